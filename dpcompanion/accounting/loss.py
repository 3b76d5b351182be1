"""The privacy loss of one step: its exact moments, and its discretised and tilted distribution.

`pld` composes it for a run, `histories` for many, `filters` play with it. The text of `pld` says
what each idea is for.
"""

import math
from typing import cast

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpcompanion.accounting.rdp import log_density_ratio

DIRECTIONS = ("remove", "add")

#: More noise counts as this: it costs no more, and far beyond its losses are no floats.
LARGEST_NOISE = 1e100
#: Rates are raised to this, below which floats underflow on the way; no epsilon is lower then.
LEAST_RATE = 1e-200

# tilted densities below e^-75 of the peak are cut, and the cut is accounted for
_LOG_NEGLIGIBLE = -75.0
# standard deviations of the Gaussian that are looked at on the side of small losses
SMALL_LOSS_TAIL = 13.0
_STEEPEST = 6.0  # how fast the log of the tilted density may rise between the last two nodes
# Of Gauss and Legendre, within a cell of the grid and within a panel of a moment's integral.
CELL_NODES, CELL_WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(4))
_PANEL_NODES, _PANEL_WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(6))


def smooth_length(q, sigma):
    """The length in t over which densities and losses are smooth: their branch points lie pi sigma
    from the real axis.

    Where sigma is so small that next to no mass is near them they do not matter.
    """
    return 1.0 if 0.125 / sigma / sigma + math.log(q) > -_LOG_NEGLIGIBLE else min(1.0, 2 * sigma)


class StepLoss:
    """One step's privacy loss below a cap: exact moments, and the discretised, tilted distribution.

    The loss exceeds the cap with the probability exp(log_capped).
    """

    def __init__(self, sample_rate, noise_multiplier, direction, log_capped):
        self.q = torch.tensor(float(sample_rate), dtype=torch.float64)
        self.sigma = torch.tensor(float(noise_multiplier), dtype=torch.float64)
        self.remove, self.log_capped = direction == "remove", log_capped
        # The loss rises with t where an example is removed, and falls where it is added.
        start, end = (
            (-SMALL_LOSS_TAIL, self._t_of_cap())
            if self.remove
            else (SMALL_LOSS_TAIL, -self._t_of_cap())
        )
        self.scale = self._smooth_length()
        panels = math.ceil(abs(end - start) / (0.5 * self.scale))
        edges = torch.linspace(start, end, panels + 1, dtype=torch.float64)
        width = edges.diff()[:, None]
        self.ends = start, end
        self.t = (edges[:-1, None] + width * (_PANEL_NODES + 1) / 2).reshape(-1)
        self.loss, log_density = self._loss_and_log_density(self.t)
        self.log_weight = log_density + torch.log(width.abs() / 2 * _PANEL_WEIGHTS).reshape(-1)
        weight = torch.exp(self.log_weight)
        self.std = float(torch.sqrt((weight * (self.loss - (weight * self.loss).sum()) ** 2).sum()))

    def _smooth_length(self):
        return smooth_length(float(self.q), float(self.sigma))

    def _t_of_cap(self):
        """How far in t the cap lies: the tail of N(0, 1), or of the mixture where an example is
        removed, beyond it.
        """

        def excess(t):
            log_tail = float(log_ndtr(-t))
            if self.remove:
                log_tail = np.logaddexp(
                    log_tail + math.log1p(-float(self.q)),
                    float(log_ndtr(1 / float(self.sigma) - t)) + math.log(float(self.q)),
                )
            return log_tail - self.log_capped

        return cast(float, brentq(excess, 0.0, 50 + 1 / float(self.sigma)))

    def _loss_and_log_density(self, t):
        """The loss at x = sigma t, and the log density of t under the pair's first distribution."""
        log_ratio = log_density_ratio(t, self.q, self.sigma)
        log_phi = -0.5 * t * t - 0.5 * math.log(2 * math.pi)
        return (log_ratio, log_phi + log_ratio) if self.remove else (-log_ratio, log_phi)

    def _t_of_loss(self, loss):
        """The inverse of the loss, -inf and inf where the loss does not reach."""
        log_ratio = loss if self.remove else -loss
        small = torch.log1p((torch.expm1(log_ratio.clamp(max=30)) / self.q).clamp(min=-1))
        large = (
            log_ratio
            - torch.log(self.q)
            + torch.log1p(-(1 - self.q) * torch.exp(-log_ratio.clamp(min=30)))
        )
        return self.sigma * torch.where(log_ratio < 30, small, large) + 0.5 / self.sigma

    def log_mgf(self, tilts):
        """K(tilt) = ln E[exp(tilt L)]; inf where the nodes do not resolve the tilted law."""
        exponent = self.log_weight + tilts[:, None] * self.loss
        out_of_range = exponent[:, 0] - exponent.max(dim=1).values > _LOG_NEGLIGIBLE
        too_steep = tilts * (self.loss[-1] - self.loss[-2]) > _STEEPEST
        return torch.where(out_of_range | too_steep, math.inf, torch.logsumexp(exponent, dim=1))

    def tilted_variance(self, tilt):
        weight = torch.softmax(self.log_weight + tilt * self.loss, dim=0)
        return float((weight * (self.loss - (weight * self.loss).sum()) ** 2).sum())

    def discretize(self, interval, tilt):
        """Connect-the-dots masses of the tilted law on the grid {i h}.

        Returns (first index, masses that sum to 1, ln of their sum before, bound on the mass that
        was cut).
        """
        exponent = self.log_weight + tilt * self.loss
        scale = torch.logsumexp(exponent, dim=0)
        kept = (exponent - scale > _LOG_NEGLIGIBLE).nonzero()[:, 0]
        cut = len(self.t) * math.exp(_LOG_NEGLIGIBLE)
        before, after = int(kept[0]) - 1, int(kept[-1]) + 1
        ends = torch.tensor(
            [
                self.t[before] if before >= 0 else self.ends[0],
                self.t[after] if after < len(self.t) else self.ends[1],
            ],
            dtype=torch.float64,
        )
        low, high = sorted(ends.tolist())
        least, most = self._loss_and_log_density(ends)[0].tolist()
        first = math.floor(least / interval)
        last = max(math.ceil(most / interval), math.floor(least / interval) + 1)
        # No piece crosses a grid point of the loss, and none so long that four nodes are too few.
        grid = torch.arange(first, last + 1, dtype=torch.float64) * interval
        pieces = math.ceil((high - low) / (0.1 * self.scale))
        at = torch.cat(
            [
                self._t_of_loss(grid).clamp(low, high),
                torch.linspace(low, high, pieces + 1, dtype=torch.float64),
            ]
        )
        at = torch.sort(at).values
        width = at.diff()[:, None]
        loss, log_density = self._loss_and_log_density(at[:-1, None] + width * (CELL_NODES + 1) / 2)
        cell = torch.floor(loss.mean(dim=1) / interval).clamp(first, last - 1)
        # The share of a mass at `loss` that goes to the upper end: it keeps the mass of exp(-loss),
        # that under Q.
        upper = (torch.expm1(-(loss - cell[:, None] * interval)) / math.expm1(-interval)).clamp(
            0, 1
        )
        mass = (
            width
            / 2
            * CELL_WEIGHTS
            * torch.exp(log_density + tilt * cell[:, None] * interval - scale)
        )
        lower_mass = (mass * (1 - upper)).sum(dim=1)
        upper_mass = (mass * upper).sum(dim=1) * math.exp(tilt * interval)
        masses = torch.zeros(last - first + 1, dtype=torch.float64)
        index = (cell - first).long()
        masses.index_add_(0, index, lower_mass).index_add_(0, index + 1, upper_mass)
        total = masses.sum()
        return first, masses / total, float(torch.log(total) + scale), cut
