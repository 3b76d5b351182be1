r"""What a run's summed privacy loss says, once it lies on a grid: delta at an epsilon, and epsilon
at a delta.

`dpcompanion.accounting.pld` composes it. With masses :math:`m_j` of the tilted law at the grid
points :math:`s_j` and :math:`\Lambda = \ln E[e^{\lambda S}]`,

.. math:: \delta(\varepsilon) = e^{\Lambda - \lambda\varepsilon} \Big(\sum_{s_j > \varepsilon} m_j\,
    e^{-\lambda(s_j - \varepsilon)} \big(1 - e^{-(s_j - \varepsilon)}\big) + \frac{\text{slack}}{1 +
    \lambda}\Big) + \text{cap},

and the epsilon of a delta is the root of this: slack is what the grid's window may have lost, cap
the probability of a loss beyond the cap.

>>> from dpcompanion.accounting import pld
>>> loss = pld.compose(sample_rate=0.01, noise_multiplier=1.0, steps=1000, delta=1e-5)
>>> type(loss).__name__, f"{loss.delta(loss.epsilon(1e-5)):.6g}"
('ComposedLoss', '1e-05')
"""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from scipy.optimize import brentq

_NEWTON = 24  # steps of Newton's method; most runs take 7


@dataclass(frozen=True)
class ComposedLoss:
    r"""The summed privacy loss of a run, on a grid, tilted: an upper bound in one direction.

    Attributes:
        interval: spacing h of the grid.
        error: what the discretisation adds to epsilon near the target, to first order (it never
            subtracts).
        tilt: the saddle point :math:`\lambda`.
        first: index of the first grid point of `masses`.
        masses: probabilities under the tilted law at ``(first + j) * interval``.
        log_scale: :math:`\ln E[e^{\lambda S}]` on the grid.
        slack: bound on the tilted mass that the window and the transform may have lost.
        log_capped: logarithm of the probability that the loss of any step exceeds its cap, which
            counts as delta.
    """

    interval: float
    error: float
    tilt: float
    first: int
    masses: torch.Tensor
    log_scale: float
    slack: float
    log_capped: float

    def log_delta(self, epsilon):
        """The logarithm of the bound on delta, and its derivative."""
        # A mass at or below epsilon costs nothing; one far above, in the tilted law, next to
        # nothing.
        # which of the largest epsilons is no float
        cell = math.floor(min(epsilon / self.interval, 2.0**62))
        start = min(max(cell + 1 - self.first, 0), len(self.masses))
        above = (
            self.first + torch.arange(start, len(self.masses), dtype=torch.float64)
        ) * self.interval - epsilon
        above.clamp_(min=0)
        tilted = self.masses[start:] * torch.exp(-self.tilt * above)
        all_above, total = float(tilted.sum()), -float((tilted * torch.expm1(-above)).sum())
        # No mass counts for more than max_a e^(-tilt a) (1 - e^-a) < 1 / (1 + tilt).
        slack = self.slack / (1 + self.tilt)
        slope = -(self.tilt * slack + max(all_above - total, 0.0)) / (total + slack)
        log_below = self.log_scale - self.tilt * epsilon + math.log(total + slack)
        log_delta = float(np.logaddexp(log_below, self.log_capped))
        return min(0.0, log_delta), slope * math.exp(log_below - log_delta)

    def delta(self, epsilon):
        """Upper bound on delta at `epsilon` (a float, at least 0)."""
        return math.exp(self.log_delta(epsilon)[0])

    def epsilon(self, delta, near=None):
        """Upper bound on epsilon at `delta` in (0, 1); 0.0 where delta covers the total variation.

        inf at a delta so far below that the cap on the losses alone costs more. `near` is where to
        look first, if it is known about where the answer lies.
        """
        target = math.log(delta)
        if self.log_capped >= target:
            return math.inf
        if self.log_delta(0.0)[0] <= target:
            return 0.0
        low, high = 0.0, math.inf
        # Newton's method from the tilted mean, near which the answer lies, kept within bounds.
        if not near:
            index = torch.arange(len(self.masses), dtype=torch.float64)
            near = max(self.first + float(index @ self.masses), 1.0) * self.interval
        root = near
        for _ in range(_NEWTON):
            value, slope = self.log_delta(root)
            low, high = (low, root) if value <= target else (root, high)
            last, root = root, root + (target - value) / slope if slope else math.nan
            if not low <= root <= high:
                root = 2 * low if high == math.inf else (low + high) / 2
            if abs(root - last) <= 1e-9 * root:
                break
        # on a grid coarser than 1 delta falls in stairs, flat in between, which no tangent shows
        else:
            root = max(self._in_its_cell(target), low, 1e-9 * self.interval)
        step = 1e-10
        while self.log_delta(root)[0] > target:  # the root may lie a hair on the wrong side
            root, step = root * (1 + step), 2 * step
        return root

    def log_tails(self):
        """At each grid point s_j, and at one beyond the last: the logarithms of A_j = P(S >= s_j)
        and of delta(s_j), before slack and cap.

        All sums are of positive terms: with spacing h, delta(s_j) is that over i >= j of e^(s_j -
        s_i) (1 - e^-h) A_(i+1), and delta(e) = A_j (1 - e^(e - s_j)) + e^(e - s_j) delta(s_j) for
        the next grid point s_j above e. Returns (grid, logs of A, logs of delta).
        """

        def sums_from(logs):
            return torch.logcumsumexp(logs.flip(0), 0).flip(0)

        grid = (
            self.first + torch.arange(len(self.masses) + 1, dtype=torch.float64)
        ) * self.interval
        never = torch.tensor([-math.inf], dtype=torch.float64)
        above = torch.cat(
            (sums_from(self.masses.log() + self.log_scale - self.tilt * grid[:-1]), never)
        )
        at_grid = grid[:-1] + sums_from(
            math.log(-math.expm1(-self.interval)) + above[1:] - grid[:-1]
        )
        return grid, above, torch.cat((at_grid, never))

    def _in_its_cell(self, target):
        """About where delta falls to exp(target): the cell of the grid, then the point in it."""
        grid, above, at_grid = self.log_tails()
        slack = self.log_scale + math.log(max(self.slack, 1e-300) / (1 + self.tilt))
        met = torch.logaddexp(at_grid, slack - self.tilt * grid) <= target
        if not met.any():
            return float(grid[-1])
        j = int(met.double().argmax())
        end, above, at_end = (float(of[j]) for of in (grid, above, at_grid))

        def excess(epsilon):
            back = epsilon - end
            within = np.logaddexp(above + math.log(max(-math.expm1(back), 1e-300)), at_end + back)
            return (
                float(
                    np.logaddexp(np.logaddexp(within, slack - self.tilt * epsilon), self.log_capped)
                )
                - target
            )

        start = max(end - self.interval, 0.0)
        if not excess(start) > 0 > excess(end):
            return max(end, 0.0)
        return cast(float, brentq(excess, start, end, rtol=np.float64(1e-12)))
