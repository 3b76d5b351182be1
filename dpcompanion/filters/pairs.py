r"""What a filter can charge for: dominating pairs (P, Q), with the law of each loss on a grid.

A pair stands for one stage of a run. Its loss :math:`L = \ln(P/Q)` under P is moved to a grid of
spacing h by connecting the dots (Doroshenko et al. 2022): mass between two grid points is shared
between them so that the masses under P and under Q both stay. That spreads :math:`e^{-L}` and keeps
its mean, so the expectation of every convex function of it rises, which is all that `game` needs.
The masses are tilted, :math:`P(L = l)\, e^{\lambda l}`, so that rounding is relative to the delta
that is asked for.

* `SampledGaussianBlock`: a block of steps of DP-SGD at one clip norm, any rate up to 1. Several
  steps are composed on a finer grid first, so that each block is rounded once.
* `Discrete`: any mechanism given by two lists of probabilities.

>>> coin = Discrete([0.25, 0.75], [0.75, 0.25])
>>> law = coin.law("remove", tilt=1.0, interval=math.log(3))
>>> law.first, [round(float(mass), 3) for mass in law.masses]
(-1, [0.083, 0.0, 2.25])
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion.accounting.pld import (
    StepLoss,
    chernoff_log_delta,
    compose_near,
    convolve,
    largest_loss_of_adding,
    tilted_window,
)

# tilted mass cut off at either end of a law, relative to all of it; it is accounted for
_TRIMMED = 1e-16
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Law:
    r"""The privacy loss of a stage on a grid, tilted.

    Attributes:
        first: index of the first grid point.
        masses: :math:`P(L = l) e^{\lambda l}` at ``(first + j) * interval``.
        lost: bound on the tilted mass that is missing.
        blur: bound on the Euclidean norm of what rounding may have taken from the masses.
        capped: probability of a loss above the cap, which counts as delta.
        log_mass: logarithm of the exact tilted mass, without the discretisation.
    """

    first: int
    masses: np.ndarray
    lost: float
    blur: float
    capped: float
    log_mass: float


def connect_the_dots(losses, masses, interval, tilt, cells=None):
    """Point masses (already tilted) on a grid: (first index, tilted masses).

    `cells` says in which cell each lies.
    """
    if cells is None:
        # A loss that lies on the grid but for rounding belongs there, not half in the cell below.
        near = np.round(losses / interval)
        cells = np.where(np.abs(losses / interval - near) < 1e-9, near, np.floor(losses / interval))
    cells = cells.astype(np.int64)
    above = losses - cells * interval
    upper = np.clip(np.expm1(-above) / math.expm1(-interval), 0, 1)
    first, size = int(cells.min()), int(cells.max() - cells.min()) + 2
    found = np.bincount(cells - first, masses * (1 - upper) * np.exp(-tilt * above), size)
    found += np.bincount(
        cells - first + 1, masses * upper * np.exp(tilt * (interval - above)), size
    )
    return first, found


class SampledGaussianBlock:
    """`steps` steps of DP-SGD at one clip norm: Poisson sampling, add or remove one example.

    Args:
        sample_rate: in (0, 1].
        noise_multiplier: noise over this clip norm, above 0.
        steps: a whole number, at least 1.
    """

    def __init__(self, sample_rate, noise_multiplier, steps=1):
        self.sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        self.noise_multiplier = _checks.number(
            "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
        )
        self.steps = _checks.whole_number("steps", steps, 1)

    def largest_loss(self, direction):
        """The largest loss that can occur; inf where there is none."""
        if direction == "remove" or self.sample_rate == 1:
            return math.inf
        return largest_loss_of_adding(self.sample_rate, self.steps)

    def reference(self, direction, times, epsilon):
        """The best tilt for so many such stages at `epsilon`, and about ln delta; -inf where delta
        is exactly 0.
        """
        steps = times * self.steps
        if self.sample_rate == 1:
            mean = steps / (2 * self.noise_multiplier**2)
            tilts = torch.from_numpy(np.geomspace(1e-3, 1e4, 400)) / math.sqrt(2 * mean)
            bound = chernoff_log_delta(tilts, tilts * (1 + tilts) * mean, epsilon)
            return float(tilts[int(bound.argmin())]), min(0.0, float(bound.min()))
        if epsilon >= times * self.largest_loss(direction):
            return 1.0, -math.inf
        loss = compose_near(self.sample_rate, self.noise_multiplier, steps, direction, epsilon)
        return loss.tilt, loss.log_delta(epsilon)[0]

    def log_mass(self, direction, tilt, log_capped):
        """ln E[exp(tilt L)] of the block below the cap: tilt x Rényi divergence, order tilt + 1."""
        if self.sample_rate == 1:
            return tilt * (1 + tilt) * self.steps / (2 * self.noise_multiplier**2)
        step = StepLoss(
            self.sample_rate, self.noise_multiplier, direction, log_capped - math.log(self.steps)
        )
        return self.steps * float(step.log_mgf(torch.tensor([tilt], dtype=torch.float64)))

    def law(self, direction, *, tilt, interval, log_capped=-math.inf):
        """The `Law` of the block's loss; each loss above a cap of probability exp(`log_capped`) in
        all counts as delta.
        """
        if self.sample_rate == 1:
            return self._gaussian_law(tilt, interval)
        step = StepLoss(
            self.sample_rate, self.noise_multiplier, direction, log_capped - math.log(self.steps)
        )
        tilts = torch.tensor([tilt], dtype=torch.float64)
        log_mass, blur = self.steps * float(step.log_mgf(tilts)), 0.0
        if self.steps == 1:
            first, masses, log_scale, cut = step.discretize(interval, tilt)
            masses, lost = masses.numpy() * math.exp(log_scale), cut * math.exp(log_scale)
        else:
            finer = math.ceil(math.sqrt(10 * self.steps))
            fine = interval / finer
            low, high, outside = tilted_window(step, self.steps, tilt, fine)
            first, masses, log_scale, cut = step.discretize(fine, tilt)
            first, masses = convolve(
                first,
                masses,
                self.steps,
                start=math.floor(low / fine),
                size=(high - low) / fine + 2,
            )
            scale = math.exp(self.steps * log_scale)
            lost = (self.steps * cut + outside) * scale
            # The spectrum's modulus is at most 1: its power amplifies relative errors by the number
            # of steps.
            blur = (
                scale * self.steps * _UNIT * (7 * math.log2(len(masses)) + 8) * math.sqrt(2 * finer)
            )
            places = np.arange(first, first + len(masses))
            first, masses = connect_the_dots(
                places * fine, masses.numpy() * scale, interval, tilt, places // finer
            )
        return _trimmed(first, masses, lost, blur, math.exp(log_capped), log_mass)

    def _gaussian_law(self, tilt, interval):
        scale = math.sqrt(self.steps) / self.noise_multiplier
        # Tilted, the loss is normal around (tilt + 1/2) scale^2; quadrature with an edge at every
        # grid point.
        mean, reach = (tilt + 0.5) * scale**2, 10 * scale
        first, last = math.floor((mean - reach) / interval), math.ceil((mean + reach) / interval)
        parts = math.ceil(interval / (0.2 * scale))
        cells = np.repeat(np.arange(first, last), parts)
        nodes, weights = np.polynomial.legendre.leggauss(12)
        width = interval / parts
        start = cells * interval + np.tile(np.arange(parts), last - first) * width
        losses = start[:, None] + width * (nodes + 1) / 2
        masses = (
            np.exp(-0.5 * ((losses - mean) / scale) ** 2)
            * weights
            * width
            / (2 * scale * math.sqrt(2 * math.pi))
        )
        log_mass = tilt * (1 + tilt) * scale**2 / 2
        first, masses = connect_the_dots(
            losses.ravel(),
            masses.ravel() * math.exp(log_mass),
            interval,
            tilt,
            np.repeat(cells, len(nodes)),
        )
        return _trimmed(first, masses, 1e-22 * math.exp(log_mass), 0.0, 0.0, log_mass)


class Discrete:
    """A mechanism with finitely many outputs: probabilities `p` with the example, `q` without.

    Args:
        p, q: sequences of the same length that sum to 1. Where q is 0 and p is not, the loss is
            infinite. Some output is possible with both.
    """

    def __init__(self, p, q):
        _checks.same_length(p=p, q=q)
        self.p, self.q = (
            np.asarray(_checks.in_interval(name, v, 0, 1), dtype=np.float64)
            for name, v in (("p", p), ("q", q))
        )
        for name, values in (("p", self.p), ("q", self.q)):
            if abs(values.sum() - 1) > 1e-9:
                raise ValueError(f"{name} must sum to 1, got {values.sum():g}")
        if not ((self.p > 0) & (self.q > 0)).any():
            raise ValueError(
                "p and q must both allow some output, got two that share none: every output tells "
                "whether the example is there, and delta is 1 at each epsilon"
            )

    def _losses(self, direction):
        p, q = (self.p, self.q) if direction == "remove" else (self.q, self.p)
        both = (p > 0) & (q > 0)
        return np.log(p[both] / q[both]), p[both], float(p[q == 0].sum())

    def largest_loss(self, direction):
        """As in `SampledGaussianBlock`."""
        losses, _, infinite = self._losses(direction)
        return math.inf if infinite else float(losses.max())

    def reference(self, direction, times, epsilon):
        """As in `SampledGaussianBlock`, by Chernoff's bound."""
        losses, masses, infinite = self._losses(direction)
        if times * self.largest_loss(direction) <= epsilon:
            return 1.0, -math.inf
        tilts = np.geomspace(1e-3, 1e3, 400) / max(
            math.sqrt(times) * float(np.abs(losses).max()), 1e-9
        )
        exponents = tilts[:, None] * losses + np.log(masses)
        top = exponents.max(axis=1)
        log_mgfs = times * (top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))
        bound = chernoff_log_delta(torch.from_numpy(tilts), torch.from_numpy(log_mgfs), epsilon)
        best = int(bound.argmin())
        return float(tilts[best]), min(
            0.0, max(float(bound[best]), math.log(infinite) if infinite else -math.inf)
        )

    def log_mass(self, direction, tilt, log_capped):
        """As in `SampledGaussianBlock`."""
        losses, masses, _ = self._losses(direction)
        top = float(losses.max())
        return tilt * top + math.log(float((masses * np.exp(tilt * (losses - top))).sum()))

    def law(self, direction, *, tilt, interval, log_capped=-math.inf):
        """As in `SampledGaussianBlock`; infinite losses count as delta."""
        losses, masses, infinite = self._losses(direction)
        masses = masses * np.exp(tilt * losses)
        log_mass = math.log(masses.sum())
        first, masses = connect_the_dots(losses, masses, interval, tilt)
        return _trimmed(first, masses, 0.0, 0.0, infinite, log_mass)


def _trimmed(first, masses, lost, blur, capped, log_mass):
    """A `Law` without the ends that hold next to nothing."""
    limit = _TRIMMED * masses.sum()
    start = int(np.searchsorted(np.cumsum(masses), limit))
    stop = len(masses) - int(np.searchsorted(np.cumsum(masses[::-1]), limit))
    cut = masses[:start].sum() + masses[stop:].sum()
    return Law(first + start, masses[start:stop].copy(), lost + float(cut), blur, capped, log_mass)
