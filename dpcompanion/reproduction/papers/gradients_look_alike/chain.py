"""A training so small that its divergence is an integral: four steps, one parameter, gradients that
depend on it.

What the bounds of the paper and ours are held against. x enters a step with probability `Q`, the
noise has the standard deviation `S`, and all four states are seen.

>>> truth("remove") < worst_case("remove")
True
"""

import math

import torch

from dpcompanion import per_instance

Q, S, STEPS, ORDER = 0.3, 1.0, 4, 4
STEP = {"sample_rate": Q, "noise_std": S}
DIVERGENCE = {"sample_rate": Q, "noise_multiplier": S}
LARGEST = 1.2


def gain(theta):
    """The norm of x's gradient at a state: between 0.2 and `LARGEST`."""
    return 0.2 + 1 / (1 + theta**2)


def kernels(cells=601, reach=12.0):
    """The states, and the densities of a step from each to each, with x and without."""
    line = torch.linspace(-reach, reach, cells, dtype=torch.float64)
    move = line[None] - line[:, None]

    def normal(shift):
        return torch.exp(-(((move - shift) / S) ** 2) / 2) / (S * math.sqrt(2 * math.pi))

    return line, (1 - Q) * normal(0.0) + Q * normal(gain(line)[:, None]), normal(0.0)


def truth(direction, order=ORDER):
    """The divergence of all four states together, nats, by integrating backwards."""
    line, with_x, without = kernels()
    first, second = (with_x, without) if direction == "remove" else (without, with_x)
    ratio = (first / second.clamp(min=1e-300)) ** order * second * float(line[1] - line[0])
    value = torch.ones(len(line), dtype=torch.float64)
    for _ in range(STEPS):
        value = ratio @ value
    return math.log(float(value[len(line) // 2])) / (order - 1)


def worst_case(direction, order=ORDER):
    """The sum of the steps' worst cases, nats."""
    return STEPS * float(
        per_instance.step_divergence(
            **DIVERGENCE, sensitivity=LARGEST, orders=order, direction=direction
        )
    )


def states(direction, count=400):
    """States before each step, (steps, count), each for the same share of ordinary runs."""
    line, with_x, without = kernels()
    step, width = (with_x if direction == "remove" else without), float(line[1] - line[0])
    density, found = torch.zeros(len(line), dtype=torch.float64), []
    density[len(line) // 2] = 1 / width
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for _ in range(STEPS):
        found.append(
            line[torch.searchsorted(density.cumsum(0) * width, levels).clamp(max=len(line) - 1)]
        )
        density = density @ step * width
    return torch.stack(found)


def by_holder(direction, p, recursion="proof"):
    """Theorem 3.3, nats, its expectations by quadrature."""
    where = states(direction)
    return float(
        per_instance.compose(
            lambda step, order: per_instance.step_divergence(
                **DIVERGENCE, sensitivity=gain(where[step - 1]), orders=order, direction=direction
            ),
            steps=STEPS,
            order=ORDER,
            p=p,
            recursion=recursion,
        )
    )


def tilted(direction, runs, seed, order=ORDER):
    """The logarithms of the moments of "remove" or "add", summed along tilted runs: (runs,)."""
    generator = torch.Generator().manual_seed(seed)
    theta, total = torch.zeros(runs, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
    for _ in range(STEPS):
        gradient = gain(theta)
        total += per_instance.log_mass(gradient, direction=direction, order=order, **STEP)
        noise = S * torch.randn(runs, generator=generator, dtype=torch.float64)
        if direction == "remove":
            theta = (
                theta
                + noise
                + gradient
                * per_instance.tilted_counts(gradient, order=order, generator=generator, **STEP)
            )
        else:
            theta = (
                theta
                + per_instance.tilted_noise(
                    noise[:, None], gradient[:, None], order=order, generator=generator, **STEP
                )[:, 0]
            )
    return total
