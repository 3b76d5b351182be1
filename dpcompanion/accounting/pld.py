r"""Privacy loss distributions of the sampled Gaussian mechanism.

For a pair of output distributions (P, Q) the privacy loss is :math:`L = \ln(P/Q)` under P.  Losses
of independent steps add up, and the sum S decides the whole trade-off curve exactly:

.. math:: \delta(\varepsilon) = E\left[(1 - e^{\varepsilon - S})_+\right].

So T steps cost one convolution power.  Five ideas make it fast, sound and exact in the tails.

1. *Connect the dots* (Doroshenko et al. 2022). The loss of one step is moved to a grid of spacing
   h. Mass between two grid points is shared between them so that the masses under P and under Q
   both stay: the result dominates the step (its :math:`\delta(\varepsilon)` is never below), and
   the excess is of second order in h.
2. *Tilting*. The convolution is that of :math:`e^{\lambda L}` times the distribution, normalised,
   with :math:`\lambda` the saddle point, so that the bulk of what is convolved lies at the epsilon
   that is asked for. Rounding errors of the Fourier transform are then relative to delta, not to 1,
   and delta may be 1e-15.
3. *A window by Chernoff's bound*. What the transform wraps around, and what the tails of one step
   lose by truncation, is bounded under the tilted law and added to delta. A cell of width h raises
   :math:`\ln E[e^{\lambda L}]` by at most :math:`(\lambda(1+\lambda))_+ h^2/8` (Hoeffding's lemma
   on the two ends of the cell), so the bound holds for the grid's law too, however coarse.
4. *A cap on the loss of a step*, so rare that delta hardly notices: what lies beyond it is added to
   delta, a hundred-thousandth of it. Without the cap a loss whose moments explode has no useful
   tilt (rates so small that one extreme draw outweighs all the others).
5. *The grid follows from the error*. Sharing a mass between the ends of a cell of width h raises
   :math:`\ln E[e^{\lambda L}]` by about :math:`\lambda(1+\lambda) h^2/12` on average, so epsilon by
   :math:`T (1+\lambda) h^2 / 12`. h is chosen to keep that below `TOLERANCE`, and is at most 1e-4
   (1e-5 of an epsilon above 10); `ComposedLoss.error` says what the rise really is
   (`dpcompanion.accounting.composed`).

Both directions count: *remove* has :math:`P = (1-q)N(0,\sigma^2) + qN(1,\sigma^2)` and
:math:`Q = N(0, \sigma^2)`, *add* has them swapped.

Time and memory on one core: about :math:`500 \sqrt{T}` grid points; 0.02 s for ten thousand steps,
one to three seconds and half a gigabyte for ten million. Runs of tiny epsilon from rare large
losses take ten times as long as others.

So many steps may meet so little noise that a grid of four million points adds more than it
resolves, at epsilons in the thousands and more as a rule. `compute_epsilon` and `compute_delta`
then take the lower of two bounds that need no grid: Rényi divergences at orders down to 1 + 1e-9,
and that of `inclusion_bound`; `compose` refuses. They take it too where it is lower than what a
grid gives whose error may be a thousandth of epsilon.

>>> from dpcompanion.accounting import pld
>>> loss = pld.compose(sample_rate=0.01, noise_multiplier=1.0, steps=1000, delta=1e-5)
>>> f"epsilon {loss.epsilon(1e-5):.3f}, grid {loss.interval:.0e}"
'epsilon 1.828, grid 1e-04'
>>> loss.error < 1e-4
True
"""

import contextlib
import math
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from scipy.fft import next_fast_len
from scipy.optimize import brentq

from dpcompanion import _checks
from dpcompanion.accounting import inclusion_bound
from dpcompanion.accounting.composed import ComposedLoss
from dpcompanion.accounting.conversions import rdp_to_delta, rdp_to_epsilon
from dpcompanion.accounting.gaussian import composed_mu, gaussian_delta, gaussian_epsilon
from dpcompanion.accounting.loss import (
    DIRECTIONS,
    LARGEST_NOISE,
    SMALL_LOSS_TAIL,
    StepLoss,
    smooth_length,
)
from dpcompanion.accounting.rdp import DEFAULT_ORDERS, log_density_ratio, rdp_sampled_gaussian

#: What the discretisation may add to epsilon, relative to epsilon + 1/tilt.
TOLERANCE = 5e-5

WINDOW_LOG_TAIL = -38.0  # tilted mass outside the window, each side: below e^-38
# points of one transform; a run that wants more gets a coarser grid, and its error says so
LARGEST_GRID = 1 << 21
# of a grid that widens the sums themselves; a run that wants more gets none
MOST_POINTS = 2 * LARGEST_GRID
TRANSFORM_ERROR = 4e-15  # what rounding in a transform may move of the tilted mass, for each step
ROUNDING = 1 + 1e-11  # for rounding errors of a delta
# a grid that may add more than this share of an epsilon is tried against bounds that need none
_COARSE = 1e-3
# how far the logarithm of a tilt may rise through a cell of an interval that was given
_STEEPEST_CELL = 300.0
LOG_CAPPED = math.log(1e-5)  # the part of delta that the cap on the loss may add


class NoGrid(ValueError):
    """No grid resolves the loss of such a run; `compute_epsilon` bounds it without one."""


def compose(
    *,
    sample_rate,
    noise_multiplier,
    steps,
    delta=None,
    epsilon=None,
    direction="remove",
    interval=None,
):
    r"""The privacy loss of `steps` steps, discretised to be accurate near `delta` or `epsilon`.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        sample_rate: in (0, 1).
        noise_multiplier: above 0.
        steps: a whole number, at least 1.
        delta, epsilon: one of the two: where on the curve the result is to be accurate. It is an
            upper bound everywhere.
        direction: "remove" or "add"; the account of a run is the worse of the two.
        interval: spacing of the grid, of which four million points must do; None chooses it (see
            the module's text).

    Raises:
        ValueError: an argument outside its range, or not exactly one of `delta` and `epsilon`.
        NoGrid: a ValueError: so many steps at so little noise that no grid resolves their loss.

    Source: Koskela et al. 2020 (FFT), Doroshenko et al. 2022 (connect the dots).
    """
    run = (
        _checks.number("sample_rate", sample_rate, 0, 1, closed="neither"),
        min(
            _checks.number("noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"),
            LARGEST_NOISE,
        ),
        _checks.whole_number("steps", steps, low=1),
        direction,
    )
    _checks.one_of("direction", direction, DIRECTIONS)
    if (delta is None) == (epsilon is None):
        raise ValueError(
            f"exactly one of delta and epsilon must be given, got delta={delta!r} and "
            f"epsilon={epsilon!r}"
        )
    if delta is not None:
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
    else:
        epsilon = _checks.number("epsilon", epsilon, 0, math.inf, closed="left")
    if interval is not None:
        interval = _checks.number("interval", interval, 0, math.inf, closed="neither")
    return (
        compose_near(*run, epsilon, interval=interval)
        if delta is None
        else compose_at(*run, delta, interval)[0]
    )


def _capped_step(sample_rate, noise_multiplier, steps, direction, log_delta):
    """A step whose loss is capped as a run of delta exp(log_delta) can afford."""
    return StepLoss(
        sample_rate, noise_multiplier, direction, LOG_CAPPED + log_delta - math.log(steps)
    )


def compose_at(
    sample_rate, noise_multiplier, steps, direction, delta, interval=None, *, near=None, coarse=1.0
):
    """The run's loss, accurate near `delta`, and its epsilon there.

    `near`, if that is known, is about that epsilon; `coarse` is by how much the grid that would be
    chosen is widened.
    """
    step = _capped_step(sample_rate, noise_multiplier, steps, direction, math.log(delta))
    start = near or chernoff_epsilon(*_log_mgfs(step, steps), delta)
    return _refined(step, steps, start, delta, interval, near=near, coarse=coarse)


def compose_near(
    sample_rate,
    noise_multiplier,
    steps,
    direction,
    epsilon,
    delta=None,
    interval=None,
    *,
    coarse=1.0,
):
    """The run's loss, accurate near `epsilon`; `delta` is about what it is there, if known."""

    def capped(log_delta):
        return _capped_step(sample_rate, noise_multiplier, steps, direction, log_delta)

    def excess(log_delta):
        step = capped(log_delta)
        return float(chernoff_log_delta(*_log_mgfs(step, steps), epsilon).min()) - log_delta

    if delta is not None:
        return _refined(capped(math.log(delta)), steps, epsilon, None, interval, coarse=coarse)[0]
    # The rarer the cap, the larger Chernoff's bound below it: the best cap is where the two agree.
    low, high = -690.0, 0.0
    log_delta = (
        high
        if excess(high) >= 0
        else low
        if excess(low) <= 0
        else brentq(excess, low, high, xtol=0.5)
    )
    for _ in range(3):
        loss = _refined(capped(log_delta), steps, epsilon, None, interval)[0]
        found = loss.log_delta(epsilon)[0]
        if loss.log_capped < found + LOG_CAPPED + 1 or found < low:
            break
        log_delta = found  # Chernoff's bound was far above: cap more rarely
    return loss


def _refined(step, steps, epsilon, delta, interval, *, near=None, coarse=1.0):
    """A run's loss near `epsilon`, or from there to `delta`, on a fine grid; and the epsilon."""
    slope, coarser = 0.0, math.inf
    for _ in range(4):
        loss = _compose_step(step, steps, epsilon, slope, interval, coarse)
        if delta is not None:
            epsilon = near = loss.epsilon(delta, near)
        # Where delta falls faster than the tilt says, errors of the grid weigh more; within a cell
        # the curve is a chord, which no tilt sees.
        slope = -loss.log_delta(epsilon)[1]
        error = loss.error * max(1.0, (1 + slope) / (1 + loss.tilt))
        loss = replace(
            loss, error=max(error, loss.interval) if epsilon < 20 * loss.interval else error
        )
        if (
            epsilon == 0
            or loss.error <= 2 * TOLERANCE * epsilon
            or interval is not None
            or coarse > 1
            or loss.interval > 0.8 * coarser
        ):
            break
        coarser = loss.interval
    return loss, epsilon


def _log_mgfs(step, steps):
    """Tilts on a wide grid, and ln E[exp(tilt S)] of the whole run at each."""
    # Many small losses (central limit) put the saddle point near 1 / std, one rare large loss near
    # sigma. Where so little noise leaves one loss only, none of float64's spread is left.
    few, many = sorted((1 / (max(step.std, 1e-9) * math.sqrt(steps)), float(step.sigma)))
    tilts = torch.from_numpy(
        np.geomspace(1e-3 * few, 1e2 * many, int(10 * math.log10(1e5 * many / few)))
    )
    # The window's bound looks a little beyond the tilt, so a tilt whose neighbourhood is out of
    # range will not do.
    reachable = step.log_mgf(1.2 * tilts).isfinite()
    if not reachable.any():
        raise NoGrid(
            f"sample_rate={float(step.q):g}, noise_multiplier={float(step.sigma):g}, "
            f"steps={steps}: no moment of such a run's loss can be computed in float64"
        )
    return tilts[reachable], steps * step.log_mgf(tilts[reachable])


def _compose_step(step, steps, epsilon, slope, interval, coarse=1.0):
    """The loss of `steps` such steps, accurate near `epsilon`, where the log of delta falls
    at the rate `slope` or the tilt."""
    tilts, log_mgfs = _log_mgfs(step, steps)
    given = interval is not None
    if given:  # a tilted mass that moves through a cell must stay a float
        tilts = tilts[tilts * interval <= _STEEPEST_CELL]
        if not len(tilts):
            raise ValueError(
                f"interval must be far less than the losses of such a run, got {interval:g}"
            )
    tilt = float(tilts[int(chernoff_log_delta(tilts, log_mgfs[: len(tilts)], epsilon).argmin())])
    if interval is None:
        low, high, _ = tilted_window(step, steps, tilt, 0.0)
        # Far below 1 / tilt an epsilon is as good as zero.
        slope = max(slope, tilt)
        error = TOLERANCE * max(epsilon, 1e-3 / slope)
        interval = min(
            math.sqrt(12 * error / (steps * (1 + slope))), 1e-4 * max(1.0, epsilon / 10), 1 / slope
        )
        # Near an epsilon that is small a coarse grid is no use: it moves with each parameter.
        interval = min(coarse * interval, min(coarse, 3.0) * (epsilon + 0.01 / slope) / 100)
        interval = max(interval, (high - low) / (LARGEST_GRID - 2))
    low, high, outside = tilted_window(step, steps, tilt, interval)
    size = (high - low) / interval + 2
    # So many steps that what the grid adds outweighs what it resolves, or a given interval.
    if (steps > 1 or given) and not size <= MOST_POINTS:
        raise NoGrid(
            f"sample_rate={float(step.q):g}, noise_multiplier={float(step.sigma):g}, "
            f"steps={steps}: such a run's loss takes {size:.1g} grid points, at most {MOST_POINTS} "
            "are possible: "
            + (f"an interval above {interval:g}, " if given else "")
            + "fewer steps or more noise"
        )
    first, masses, log_mass, cut = step.discretize(interval, tilt)
    slack = steps * cut
    if steps > 1:
        first, masses = convolve(first, masses, steps, start=math.floor(low / interval), size=size)
        # Errors of the transform grow with the power, and lie anywhere in the window: far from its
        # saddle point a curve would be short of them. Added up they are below 1.3e-15 a step
        # (measured against 80-bit floats).
        slack += outside + TRANSFORM_ERROR * steps
    rise = log_mass - float(step.log_mgf(torch.tensor([tilt], dtype=torch.float64)))
    return ComposedLoss(
        interval=interval,
        error=steps * max(rise, 0.0) / tilt,
        tilt=tilt,
        first=first,
        masses=masses,
        log_scale=steps * log_mass,
        slack=slack,
        log_capped=step.log_capped + math.log(steps),
    )


def convolve(first, masses, steps, *, start, size):
    """The `steps`-fold convolution of masses at first, first + 1, ..., on a circle of
    at least `size` points from `start`."""
    size = cast(int, next_fast_len(max(16, math.ceil(size)), real=True))
    centre = first + round(float((masses * torch.arange(len(masses))).sum()))
    circle = torch.zeros(size, dtype=torch.float64)
    circle.index_add_(0, (torch.arange(len(masses)) + (first - centre)) % size, masses)
    frequencies = torch.fft.rfft(circle)
    power = torch.polar(
        torch.exp(steps * torch.log(frequencies.abs())), steps * frequencies.angle()
    )
    composed = torch.fft.irfft(power, n=size).clamp_(min=0)
    return start, torch.roll(composed, -((start - steps * centre) % size))


def chernoff_epsilon(tilts, log_mgfs, delta):
    """Best epsilon by Chernoff's bound with the factor of Balle et al. 2020: order = tilt + 1."""
    epsilons = (log_mgfs - math.log(delta) - torch.log1p(tilts)) / tilts - torch.log1p(1 / tilts)
    return max(float(epsilons.min()), 0.0)


def chernoff_log_delta(tilts, log_mgfs, epsilon):
    """The logarithm of the bound on delta that goes with `chernoff_epsilon`, at each tilt."""
    return log_mgfs - tilts * (epsilon + torch.log1p(1 / tilts)) - torch.log1p(tilts)


def tilted_window(step, steps, tilt, interval):
    """Ends between which the tilted sum of the losses on the grid lies, and a bound on the
    probability that it does not."""
    variance = step.tilted_variance(tilt)
    here = float(step.log_mgf(torch.tensor([tilt], dtype=torch.float64)))
    # As with the tilts: the spread sets the scale where many losses add up, the tilt where one rare
    # loss decides.
    few, many = sorted((tilt, 1 / max(math.sqrt(steps * variance), 1e-6 / tilt)))
    offsets = torch.from_numpy(
        np.geomspace(0.03 * few, 30 * many, int(8 * math.log10(1e3 * many / few)))
    )

    def reach(signed):
        tilts = tilt + signed
        rise = step.log_mgf(tilts) - here + (tilts * (1 + tilts)).clamp(min=0) * interval**2 / 8
        return ((steps * rise - WINDOW_LOG_TAIL) / signed.abs()).nan_to_num(nan=math.inf).min()

    # P(S > s) <= exp(steps (K(tilt + o) - K(tilt)) - o s), likewise below with negative offsets.
    high, low = float(reach(offsets)), -float(reach(-offsets))
    return low, high, 2 * math.exp(WINDOW_LOG_TAIL)


def epsilon(*, sample_rate, noise_multiplier, steps, delta, near=None, coarse=1.0):
    """Epsilon of a run by its privacy loss, the worse of both directions (see `compute_epsilon`).

    Args:
        near: about what it is, if that is known, which saves time.
        coarse: by how much the grid is widened: for a search, whose end is looked at with 1. It is
            an upper bound too.
    """
    if sample_rate == 1:
        return float(gaussian_epsilon(composed_mu(steps, noise_multiplier), delta / ROUNDING))
    if total_variation(sample_rate, noise_multiplier, steps) <= delta:
        return 0.0
    run = {"sample_rate": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    found, resolved = math.inf, False
    with contextlib.suppress(NoGrid):
        found, resolved = _epsilon_on_grids(
            sample_rate, noise_multiplier, steps, delta, near, coarse
        )
    if not resolved:
        by_divergence = rdp_to_epsilon(*_divergences(**run), delta)[0]
        found = min(found, float(by_divergence), inclusion_bound.epsilon(**run, delta=delta))
    return found


def _epsilon_on_grids(sample_rate, noise_multiplier, steps, delta, near, coarse):
    """Epsilon, and whether the grid of the worse direction is as fine as promised."""
    run = sample_rate, noise_multiplier, steps
    loss, worst = compose_at(*run, "remove", delta, near=near, coarse=coarse)
    # At epsilon 0 delta is the total variation, in either direction.
    if (
        0 < worst < largest_loss_of_adding(sample_rate, steps)
        and compose_near(*run, "add", worst, delta, coarse=coarse).delta(worst) > delta
    ):
        other, more = compose_at(*run, "add", delta, near=worst, coarse=coarse)
        loss, worst = (other, more) if more > worst else (loss, worst)
    return worst, coarse > 1 or _is_fine(loss, worst)


def delta(*, sample_rate, noise_multiplier, steps, epsilon):
    """Delta of a run by its privacy loss, the worse of both directions (see `compute_delta`)."""
    if sample_rate == 1:
        return min(
            1.0, ROUNDING * float(gaussian_delta(composed_mu(steps, noise_multiplier), epsilon))
        )
    run = {"sample_rate": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    found, resolved = 1.0, False
    with contextlib.suppress(NoGrid):
        found, resolved = _delta_on_grids(sample_rate, noise_multiplier, steps, epsilon)
    if not resolved:
        by_divergence = rdp_to_delta(*_divergences(**run), epsilon)[0]
        found = min(found, float(by_divergence), inclusion_bound.delta(**run, epsilon=epsilon))
    return found


def _delta_on_grids(sample_rate, noise_multiplier, steps, epsilon):
    """Delta, and whether the grid where an example is removed is as fine as promised."""
    run = sample_rate, noise_multiplier, steps
    loss = compose_near(*run, "remove", epsilon)
    worst = loss.delta(epsilon)
    if epsilon < largest_loss_of_adding(sample_rate, steps):
        # The sum of the losses is at most its largest, so delta is below 1 - e^(epsilon - largest).
        largest = largest_loss_of_adding(sample_rate, steps)
        worst = max(
            worst,
            min(compose_near(*run, "add", epsilon).delta(epsilon), -math.expm1(epsilon - largest)),
        )
    return min(1.0, ROUNDING * worst), _is_fine(loss, epsilon)


def _is_fine(loss, epsilon):
    return loss.error <= _COARSE * (epsilon + 1 / loss.tilt)


def _divergences(**run):
    """Rényi divergences at the default orders and others from 1 + 1e-9 to 1000; the orders.

    Where mu^2 / 2 is most of an epsilon, the order 1 + z / mu decides, with z the quantile of
    delta.
    """
    orders = DEFAULT_ORDERS + tuple(1 + np.geomspace(1e-9, 1e3, 241))
    return run.pop("steps") * rdp_sampled_gaussian(**run, orders=orders), orders


def largest_loss_of_adding(sample_rate, steps):
    """Adding an example never costs more: P/Q = 1/(1 - q + q e^u) is below 1/(1 - q)."""
    return -steps * math.log1p(-sample_rate)


def total_variation(sample_rate, noise_multiplier, steps):
    """A bound on a run's total variation: the sum of the steps', or by the Hellinger distance.

    With 2 c = E_Q[(sqrt(P/Q) - 1)^2], which is 1 - E_Q[sqrt(P/Q)] times 2, it is at most sqrt(1 -
    (1 - c)^(2 steps)).
    """
    one = sample_rate * math.erf(1 / (math.sqrt(8) * noise_multiplier))
    spacing = 0.25 * smooth_length(sample_rate, noise_multiplier)
    t = torch.arange(
        -SMALL_LOSS_TAIL, SMALL_LOSS_TAIL + 1 / noise_multiplier, spacing, dtype=torch.float64
    )
    q, sigma = torch.tensor([sample_rate, noise_multiplier], dtype=torch.float64)
    root = torch.expm1(log_density_ratio(t, q, sigma) / 2)
    c = min(
        float((root**2 * torch.exp(-0.5 * t * t)).sum()) * spacing / math.sqrt(8 * math.pi), 1.0
    )
    return min(steps * one, math.sqrt(-math.expm1(2 * steps * math.log1p(-c))) if c < 1 else 1.0)
