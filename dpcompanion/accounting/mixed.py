r"""The summed loss of different mechanisms: sampled Gaussians of any rate and noise, and releases.

Losses of independent mechanisms add up, so on a common grid the characteristic function of the sum
is :math:`\prod_j \varphi_j(\theta)^{n_j}`: one Fourier transform for each *kind* j, however often
(:math:`n_j`) it was used. Grid, tilt, window, caps and what they add to delta are those of
`dpcompanion.accounting.pld`; the result is the same `ComposedLoss`, an upper bound. Kinds other
than the sampled Gaussian:

* `ReplacementLoss`: one step of the sampled Gaussian where one example replaces another;
* `GaussianLoss`: :math:`N(1, \sigma^2)` against :math:`N(0, \sigma^2)`;
* `LaplaceLoss`: with :math:`c = 1/b`, the loss is c with probability 1/2, -c with probability
  :math:`e^{-c}/2`, and has the density :math:`\tfrac14 e^{(l-c)/2}` between;
* `WorstLoss`: of all that is known to be (epsilon, delta)-DP the worst pair (Kairouz et al. 2015):
  the loss is :math:`\pm\varepsilon` with probabilities in the ratio :math:`e^\varepsilon : 1`, and
  infinite with probability delta.

These four are the same in both directions, `ReplacementLoss` where both norms are; else the other
direction exchanges them.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpcompanion.accounting.composed import ComposedLoss
from dpcompanion.accounting.loss import CELL_NODES, CELL_WEIGHTS, StepLoss, smooth_length
from dpcompanion.accounting.pld import (
    LARGEST_GRID,
    MOST_POINTS,
    TOLERANCE,
    TRANSFORM_ERROR,
    WINDOW_LOG_TAIL,
    NoGrid,
    chernoff_epsilon,
    chernoff_log_delta,
)
from dpcompanion.accounting.rdp import log_density_ratio

#: Beyond so many kinds the grid may add `COARSER` times as much to epsilon: seconds for a thousand.
FEW_KINDS, COARSER = 32, 20.0


class GaussianLoss(StepLoss):
    """The loss of the Gaussian mechanism with this noise multiplier, below a cap."""

    def __init__(self, noise_multiplier, log_capped):
        super().__init__(1.0, noise_multiplier, "remove", log_capped)

    def _t_of_cap(self):
        shift = 1 / float(self.sigma)
        return brentq(lambda t: float(log_ndtr(shift - t)) - self.log_capped, 0.0, 50 + shift)

    def _loss_and_log_density(self, t):
        loss = t / self.sigma - 0.5 / self.sigma**2
        return loss, loss - 0.5 * t * t - 0.5 * math.log(2 * math.pi)

    def _t_of_loss(self, loss):
        return self.sigma * loss + 0.5 / self.sigma


class ReplacementLoss(StepLoss):
    r"""The loss of a step of the sampled Gaussian where one example replaces another, below a cap.

    The pair is :math:`P = (1-q) N(0, \sigma^2) + q N(a, \sigma^2)` against
    :math:`Q = (1-q) N(0, \sigma^2) + q N(-b, \sigma^2)`, which dominates every step: given who else
    is sampled, a step is :math:`P_g = (1-q) N(0, \sigma^2 I) + q N(g, \sigma^2 I)` against
    :math:`P_h`, with gradients g of length a and h of length b at most. Both are 1 where the clip
    norm is all that is known; of an example whose own norm was recorded a is smaller, and b stays
    1.

    Proof. Let :math:`\alpha \ge 1`. With densities over that of :math:`N(g, \sigma^2 I)`, under
    which X is standard normal after a shift, and :math:`v = (h - g) / \sigma, u = -g / \sigma`,

    .. math::
        H_\alpha(P_g \| P_h) = q\, E\big[(1 - A - B)_+\big], \quad
        A = \alpha e^{\langle v, X \rangle - |v|^2/2}, \quad
        B = \tfrac{(1-q)(\alpha-1)}{q} e^{\langle u, X \rangle - |u|^2/2}.

    In the entries of the covariance of :math:`(\langle v, X \rangle, \langle u, X \rangle)` its
    derivatives are :math:`\tfrac12 E[A^2 f_{AA}], \tfrac12 E[B^2 f_{BB}]` and :math:`E[AB f_{AB}]`,
    and all second derivatives of :math:`f = (1 - A - B)_+` are the same point mass, at least 0. So
    the divergence is largest where :math:`|v|, |u|` and :math:`\langle v, u \rangle` are, all at
    once for opposite g and h with :math:`|g| = a, |h| = b`. For :math:`\alpha < 1` the roles of g
    and h are exchanged.

    With :math:`\ell_a(x) = \ln(1 - q + q e^{a x/\sigma^2 - a^2/(2\sigma^2)})` the loss is
    :math:`\ell_a(x) - \ell_b(-x)`.  That of Q against P is the same with a and b exchanged.

    Args:
        sample_rate, noise_multiplier, log_capped: q, sigma / a, and the logarithm of the
            probability above the cap.
        other: sigma / b, by default sigma / a.

    >>> step = ReplacementLoss(0.1, 1.0, math.log(1e-12))
    >>> t = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    >>> step._t_of_loss(step._loss_and_log_density(t)[0]).round(decimals=9).tolist()
    [-2.0, 0.0, 3.0]
    """

    def __init__(self, sample_rate, noise_multiplier, log_capped, other=None):
        self.other = torch.tensor(
            float(noise_multiplier if other is None else other), dtype=torch.float64
        )
        super().__init__(sample_rate, noise_multiplier, "remove", log_capped)

    def _smooth_length(self):
        return smooth_length(float(self.q), min(float(self.sigma), float(self.other)))

    def _loss_and_log_density(self, t):
        above = log_density_ratio(t, self.q, self.sigma)
        below = log_density_ratio(-t, self.q, self.other)
        return above - below, above - 0.5 * t * t - 0.5 * math.log(2 * math.pi)

    def _t_of_loss(self, loss):
        return self._t_of_equal_norms(loss) if self.other == self.sigma else self._t_by_newton(loss)

    def _t_by_newton(self, loss):
        """By Newton's method from a chord of a table; its ends for losses beyond the panels."""
        low, high = self.ends
        t = torch.linspace(
            low, high, math.ceil((high - low) / (0.02 * self.scale)) + 1, dtype=torch.float64
        )
        table = torch.cummax(self._loss_and_log_density(t)[0], dim=0).values
        place = torch.searchsorted(table, loss).clamp(1, len(t) - 1)
        left, right, below, above = t[place - 1], t[place], table[place - 1], table[place]
        found = left + (right - left) * ((loss - below) / (above - below).clamp(min=1e-300)).clamp(
            0, 1
        )

        def slope(side, noise):
            """Of the logarithm of the density over that of no example."""
            exponent = torch.log(self.q) + side / noise - 0.5 / noise**2
            return torch.exp(exponent - log_density_ratio(side, self.q, noise)) / noise

        for _ in range(3):
            steep = slope(found, self.sigma) + slope(-found, self.other)
            off = self._loss_and_log_density(found)[0] - loss
            found = torch.minimum(torch.maximum(found - off / steep.clamp(min=1e-300), left), right)
        return found

    def _t_of_equal_norms(self, loss):
        # e^(x / sigma^2) solves a quadratic equation: x / sigma^2 = L/2 + asinh((1-q)/q e^(1/(2
        # sigma^2)) sinh(L/2)).
        half = loss.abs() / 2
        log_sinh = half + torch.log(-torch.expm1(-2 * half)) - math.log(2)
        log_argument = torch.log1p(-self.q) - torch.log(self.q) + 0.5 / self.sigma**2 + log_sinh
        # Beyond e^20, asinh is the logarithm of twice its argument to the last bit.
        asinh = torch.where(
            log_argument < 20,
            torch.asinh(torch.exp(log_argument.clamp(max=20))),
            log_argument + math.log(2),
        )
        return self.sigma * torch.sign(loss) * (half + asinh)


#: Pieces, at least, of a loss that lies between 0 and 1.
_PIECES = 10


class _Bounded:
    """A loss from -most to most; its law under the pair's first distribution has a closed form.

    Raises:
        NoGrid: for a loss of too many grid points and pieces, whatever the interval.
    """

    log_capped = -math.inf
    # Grid points and pieces of one loss at most: about a gigabyte.
    points = 2**23

    def __init__(self, most):
        self.most = most
        self._check_size(2 * _PIECES * most)
        self.std = math.sqrt(self.tilted_variance(0.0))

    def _check_size(self, size):
        if not size <= self.points:
            raise NoGrid(
                f"a loss of up to {self.most:g} takes {size:.1g} grid points and pieces, at most "
                f"{self.points} are possible"
            )

    def log_mgf(self, tilts: torch.Tensor) -> torch.Tensor:
        """ln E[exp(tilt L)] at each tilt."""
        raise NotImplementedError

    def _pieces(self, interval) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and log masses, none of which stands for a stretch that a grid point parts."""
        raise NotImplementedError

    def tilted_variance(self, tilt):
        """Of the tilted law: by second differences of ln E[exp(tilt L)], to choose a window."""
        step = 1e-3 / self.most
        low, here, high = self.log_mgf(
            tilt + step * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
        ).tolist()
        return max((low - 2 * here + high) / step**2, 1e-12 * self.most**2)

    def discretize(self, interval, tilt):
        """As `StepLoss.discretize`.

        Raises:
            NoGrid: for a loss of too many grid points.
        """
        self._check_size(2 * self.most / interval + 2 * _PIECES * self.most)
        loss, log_mass = self._pieces(interval)
        scale = float(self.log_mgf(torch.tensor([tilt], dtype=torch.float64)))
        first = math.floor(-self.most / interval)
        last = max(math.floor(self.most / interval) + 1, first + 1)
        cell = torch.floor(loss / interval).clamp(first, last - 1)
        upper = (torch.expm1(-(loss - cell * interval)) / math.expm1(-interval)).clamp(0, 1)
        mass = torch.exp(log_mass + tilt * cell * interval - scale)
        masses, index = torch.zeros(last - first + 1, dtype=torch.float64), (cell - first).long()
        masses.index_add_(0, index, mass * (1 - upper))
        masses.index_add_(0, index + 1, mass * upper * math.exp(tilt * interval))
        total = masses.sum()
        return first, masses / total, float(torch.log(total)) + scale, 0.0


class LaplaceLoss(_Bounded):
    """The loss of Laplace noise of scale b on a value of sensitivity 1."""

    def __init__(self, scale):
        super().__init__(1 / scale)

    def log_mgf(self, tilts):
        c, slope = self.most, (tilts + 0.5).abs()
        length = torch.where(
            slope * c > 1e-8,
            -torch.expm1(-2 * slope * c) / slope.clamp(min=1e-300),
            2 * c * torch.exp(-slope * c),
        )
        between = torch.log(length) + slope * c - math.log(4) - c / 2
        ends = torch.logaddexp(tilts * c, -tilts * c - c) - math.log(2)
        return torch.logaddexp(between, ends)

    def _pieces(self, interval):
        c = self.most
        grid = (
            torch.arange(
                math.ceil(-c / interval), math.floor(c / interval) + 1, dtype=torch.float64
            )
            * interval
        )
        pieces = math.ceil(2 * _PIECES * c) + 1
        at = (
            torch.cat([grid.clamp(-c, c), torch.linspace(-c, c, pieces + 1, dtype=torch.float64)])
            .sort()
            .values
        )
        width = at.diff()[:, None]
        loss = at[:-1, None] + width * (CELL_NODES + 1) / 2
        log_mass = (loss - c) / 2 - math.log(4) + torch.log(width / 2 * CELL_WEIGHTS)
        # In a short piece every node has the cell of its middle, however its ends are rounded.
        cell = torch.floor(loss.mean(dim=1, keepdim=True) / interval) * interval
        loss = torch.minimum(torch.maximum(loss, cell), cell + interval * (1 - 1e-12))
        ends = torch.tensor([c, -c], dtype=torch.float64)
        weights = torch.tensor([-math.log(2), -c - math.log(2)], dtype=torch.float64)
        return torch.cat([loss.reshape(-1), ends]), torch.cat([log_mass.reshape(-1), weights])


class WorstLoss(_Bounded):
    """The finite part of the worst loss under (epsilon, delta)-DP; its masses sum to 1 - delta."""

    points = 2**27

    def __init__(self, epsilon, delta):
        self._log_high = math.log1p(-delta) - math.log1p(math.exp(-epsilon))
        super().__init__(epsilon)

    def log_mgf(self, tilts):
        return self._log_high + torch.logaddexp(tilts * self.most, -(tilts + 1) * self.most)

    def _pieces(self, interval):
        loss = torch.tensor([self.most, -self.most], dtype=torch.float64)
        return loss, torch.tensor([self._log_high, self._log_high - self.most], dtype=torch.float64)


class Sum:
    """The sum of independent losses: `kinds` is a list of (loss, how often)."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.steps = sum(count for _, count in kinds)
        self.std = math.sqrt(sum(count * loss.std**2 for loss, count in kinds))
        # The scales of tilts at which one loss decides: of the widest Gaussian, or the largest of
        # what is bounded.
        bounded = [loss.most for loss, _ in kinds if isinstance(loss, _Bounded)]
        scales = [float(loss.sigma) for loss, _ in kinds if isinstance(loss, StepLoss)]
        self.widest = max([*scales, 1 / max(bounded)] if bounded else scales)
        self.log_capped = float(
            np.logaddexp.reduce([loss.log_capped + math.log(count) for loss, count in kinds])
        )

    def log_mgf(self, tilts):
        """ln E[exp(tilt S)] at each tilt."""
        total = torch.zeros_like(tilts)
        for loss, count in self.kinds:
            total += count * loss.log_mgf(tilts)
        return total

    def tilts(self):
        """Tilts on a wide grid, and ln E[exp(tilt S)] at each, as in `pld`."""
        few, many = sorted((1 / max(self.std, 1e-9), self.widest))
        tilts = torch.from_numpy(
            np.geomspace(1e-3 * few, 1e2 * many, int(10 * math.log10(1e5 * many / few)))
        )
        reachable = self.log_mgf(1.2 * tilts).isfinite()
        if not reachable.any():
            raise NoGrid("no moment of the summed loss can be computed in float64")
        return tilts[reachable], self.log_mgf(tilts[reachable])

    def window(self, tilt):
        """interval -> ends that hold the tilted sum on the grid but for 2 e^-38 (Chernoff)."""
        variance = sum(count * loss.tilted_variance(tilt) for loss, count in self.kinds)
        here = float(self.log_mgf(torch.tensor([tilt], dtype=torch.float64)))
        few, many = sorted((tilt, 1 / max(math.sqrt(variance), 1e-6 / tilt)))
        offsets = torch.from_numpy(
            np.geomspace(0.03 * few, 30 * many, int(8 * math.log10(1e3 * many / few)))
        )
        sides = [(sign * offsets, self.log_mgf(tilt + sign * offsets) - here) for sign in (1, -1)]

        def ends(interval):
            reach = []
            for signed, rise in sides:
                tilts = tilt + signed
                grid = self.steps * (tilts * (1 + tilts)).clamp(min=0) * interval**2 / 8
                reach.append(
                    float(
                        ((rise + grid - WINDOW_LOG_TAIL) / signed.abs())
                        .nan_to_num(nan=math.inf)
                        .min()
                    )
                )
            return -reach[1], reach[0]

        return ends


def refined(total, epsilon, delta=None, infinite=0.0):
    """A `Sum`'s loss near `epsilon`, or from there to `delta`, on a fine grid; and the epsilon.

    `infinite` is the probability of an infinite loss, which counts as delta.
    """
    moments = total.tilts()
    slope, coarser = 0.0, math.inf
    allowed = TOLERANCE * (1 if len(total.kinds) <= FEW_KINDS else COARSER)
    for _ in range(4):
        loss = _compose(total, moments, epsilon, slope, allowed, infinite)
        if delta is not None:
            epsilon = loss.epsilon(delta)
        slope = -loss.log_delta(epsilon)[1] if math.isfinite(epsilon) else 0.0
        error = loss.error * max(1.0, (1 + slope) / (1 + loss.tilt))
        loss = replace(
            loss, error=max(error, loss.interval) if epsilon < 20 * loss.interval else error
        )
        if epsilon == 0 or loss.error <= 2 * allowed * epsilon or loss.interval > 0.8 * coarser:
            break
        coarser = loss.interval
    return loss, epsilon


def _compose(total, moments, epsilon, slope, allowed, infinite):
    tilts, log_mgfs = moments
    tilt = float(tilts[int(chernoff_log_delta(tilts, log_mgfs, epsilon).argmin())])
    ends = total.window(tilt)
    low, high = ends(0.0)
    slope = max(slope, tilt)
    error = allowed * max(epsilon, 1e-3 / slope)
    interval = min(
        math.sqrt(12 * error / (total.steps * (1 + slope))),
        (1e-4 if allowed == TOLERANCE else 1e-3) * max(1.0, epsilon / 10),
        1 / slope,
        (epsilon + 0.01 / slope) / 100,
    )
    interval = max(interval, (high - low) / (LARGEST_GRID - 2))
    low, high = ends(interval)
    size = (high - low) / interval + 2
    if not size <= MOST_POINTS:
        raise NoGrid(
            f"the summed loss takes {size:.1g} grid points, at most {MOST_POINTS} are possible"
        )
    first, masses, log_mass, cut = _convolved(
        total.kinds, interval, tilt, math.floor(low / interval), size
    )
    rise = log_mass - float(total.log_mgf(torch.tensor([tilt], dtype=torch.float64)))
    return ComposedLoss(
        interval=interval,
        error=max(rise, 0.0) / tilt,
        tilt=tilt,
        first=first,
        masses=masses,
        log_scale=log_mass,
        slack=cut
        + 2 * math.exp(WINDOW_LOG_TAIL)
        + TRANSFORM_ERROR * (total.steps + len(total.kinds)),
        log_capped=float(
            np.logaddexp(total.log_capped, math.log(infinite) if infinite else -math.inf)
        ),
    )


def _convolved(kinds, interval, tilt, start, size):
    """The convolution of all kinds, each as often as it counts, on a circle of at least `size`
    points from `start`.

    Returns (first index, masses, ln of their sum before tilting, bound on the mass that was cut).
    """
    size = 1 << max(4, math.ceil(math.log2(size)))
    log_modulus, angle = torch.zeros(2, size // 2 + 1, dtype=torch.float64)
    shift, log_mass, cut = 0, 0.0, 0.0
    for loss, count in kinds:
        first, masses, log_total, lost = loss.discretize(interval, tilt)
        centre = first + round(float((masses * torch.arange(len(masses))).sum()))
        circle = torch.zeros(size, dtype=torch.float64)
        circle.index_add_(0, (torch.arange(len(masses)) + (first - centre)) % size, masses)
        frequencies = torch.fft.rfft(circle)
        log_modulus = log_modulus + count * torch.log(frequencies.abs())
        angle = angle + count * frequencies.angle()
        shift += count * centre
        log_mass, cut = log_mass + count * log_total, cut + count * lost
    composed = torch.fft.irfft(torch.polar(torch.exp(log_modulus), angle), n=size).clamp_(min=0)
    return start, torch.roll(composed, -((start - shift) % size)), log_mass, cut


def guess(total, delta):
    """An upper bound on epsilon at `delta`, by Chernoff's bound."""
    tilts, log_mgfs = total.tilts()
    return chernoff_epsilon(tilts, log_mgfs, delta)
