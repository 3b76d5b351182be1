"""A training with one parameter, all of whose divergences can be computed: theta moves by k
g(theta) plus noise.

x enters a step with probability `rate` (then k = 1); without it k = 0. There are no other points,
so the view is the chain itself.
"""

import math

import torch


def GAIN(theta):
    """The norm of x's gradient at a state."""
    return 0.2 + 1 / (1 + theta**2)


class Chain:
    def __init__(self, steps, rate, noise, reach=12.0, nodes=801):
        self.steps, self.rate, self.noise = steps, rate, noise
        self.line = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
        self.cell = float(self.line[1] - self.line[0])
        gap = self.line[None] - self.line[:, None]  # from the row's state to the column's
        gain = GAIN(self.line)[:, None]
        self.log_q = -((gap / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))
        shifted = -(((gap - gain) / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))
        self.log_p = torch.logaddexp(math.log1p(-rate) + self.log_q, math.log(rate) + shifted)

    def sides(self, direction):
        return (self.log_p, self.log_q) if direction == "remove" else (self.log_q, self.log_p)

    def divergence(self, order, direction):
        """Of the whole chain's law, both started at 0, by backward recursion on the grid."""
        first, second = self.sides(direction)
        kernel = torch.exp((order * first + (1 - order) * second).clamp(min=-500)) * self.cell
        value = torch.ones(len(self.line), dtype=torch.float64)
        for _ in range(self.steps):
            value = kernel @ value
        return math.log(float(value[len(self.line) // 2])) / (order - 1)

    def states(self, steps, direction, count):
        """Quantiles of the state before each step under the first law: (steps, count)."""
        density = torch.zeros(len(self.line), dtype=torch.float64)
        density[len(self.line) // 2] = 1 / self.cell
        kernel = torch.exp(self.sides(direction)[0].clamp(min=-500)) * self.cell
        levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        found = []
        for _ in range(steps):
            below = (density.cumsum(0) * self.cell).contiguous()
            place = torch.searchsorted(below, levels).clamp(max=len(self.line) - 1)
            found.append(self.line[place])
            density = density @ kernel
        return torch.stack(found)
