r"""What a run of DP-SGD is worth to an attacker: its whole trade-off curve.

An attacker sees what a run released and guesses whether one example was in the data. Of the guesses
"yes", some are false (the false positive rate x), and of the data sets with the example some go
unnoticed (the false negative rate). The trade-off function of Dong et al. 2022 is the least false
negative rate that *any* test can have,

.. math:: f(x) = \min \{ 1 - P(S) : Q(S) \le x \},

for a pair of neighbours (P, Q). The curve here is the largest convex one below those of adding and
of removing an example. It says all that epsilon and delta can say: (epsilon, delta)-DP bounds f by
two lines, and the curve is the upper envelope of the lines of all epsilons (Wasserman and Zhou
2010; Dong et al. 2022),

.. math::
    f(x) = \sup_{\varepsilon \ge 0} \max\{0,\; 1 - \delta(\varepsilon) - e^{\varepsilon} x,\;
                                          e^{-\varepsilon} (1 - \delta(\varepsilon) - x)\}.

That is how it is computed here. Losses are composed as in `pld`, in both directions, accurate at a
few deltas down to the least rate that is asked for, and :math:`\delta(\varepsilon)` is read off at
sixteen thousand epsilons, the worse of both directions. Each of these deltas is an upper bound, so
each line lies below f, and so does their envelope: the attacker is never under-rated, however
coarse the grids. The curve is convex, falls, and is its own inverse, since adding and removing
count alike. Where the curves of adding and of removing cross, a segment joins them, which an attack
on either need not attain: of a single step with little noise the true positive rate on the curve
may be a sixth too large there.

What the grids give away: the true positive rate on the curve comes out too large by less than
`TOLERANCE` of it, at false-positive rates from 1e-15 on, of composed runs (noise multipliers from
0.01 on). Elsewhere it is a bound, and how tight is not promised. The tests measure it against the
Gaussian curve, a single sampled step in closed form, and optimistic distributions of dp-accounting.

Time on one core: some 0.2 to 4 s for a run, whatever the number of rates.

>>> run = dict(sample_rate=0.01, noise_multiplier=1.0, steps=1000)
>>> trade_off(**run, false_positive_rate=[0.001, 0.01, 0.5]).round(decimals=3)
tensor([0.9960, 0.9710, 0.3410], dtype=torch.float64)
>>> round(best_true_positive_rate(**run, false_positive_rate=0.01), 3)
0.029
"""

import contextlib
import math
from typing import overload

import numpy as np
import torch
from scipy import special

from dpcompanion import _checks
from dpcompanion._types import Numbers
from dpcompanion.accounting import inclusion_bound, pld
from dpcompanion.accounting.runs import checked_run

#: By how much of itself the best true positive rate may come out too large: false-positive rates
#: from 1e-15 on, composed runs.
TOLERANCE = 1e-3

_DELTAS = (1e-2, 1e-5, 1e-8, 1e-11, 1e-14)  # where the composed losses are accurate
_REVEALING = 0.5  # below, delta is flat from 0 to far beyond where losses are then accurate
_ROUNDING = 4e-12  # of a Gaussian tail
_NODES = 1 << 13  # epsilons in even steps, and as many in even ratios


@overload
def trade_off(
    *, sample_rate: float, noise_multiplier: float, steps: float, false_positive_rate: float
) -> float: ...


@overload
def trade_off(
    *, sample_rate: Numbers, noise_multiplier: Numbers, steps: Numbers, false_positive_rate: Numbers
) -> torch.Tensor: ...


def trade_off(
    *, sample_rate: Numbers, noise_multiplier: Numbers, steps: Numbers, false_positive_rate: Numbers
) -> float | torch.Tensor:
    r"""A lower bound on the false negative rate of any attack with these false positive rates.

    Neighbouring relation: add or remove one example. Sampler: Poisson. Accountant: loss
    distributions.

    Args:
        sample_rate: probability in (0, 1] with which an example enters a step.
        noise_multiplier: standard deviation of the noise over the clip norm, at least 0.
        steps: number of steps, a whole number from 0 to 1e12.
        false_positive_rate: in [0, 1]. The four are numbers, or tensors or sequences that
            broadcast; each distinct run is composed once, for all its rates.

    Returns:
        A float in [0, 1], or a float64 tensor of the common shape where an argument is no number. 1
        minus the rate where there are no steps, 0 where there is no noise.

    Raises:
        ValueError: an argument outside its range, or shapes that do not broadcast.

    Source: Dong et al. 2022, definition 2.1 and its dual, epsilons and deltas.

    >>> trade_off(
    ...     sample_rate=1.0, noise_multiplier=1.0, steps=1, false_positive_rate=[0.0, 0.05, 1.0]
    ... )
    tensor([1.0000, 0.7405, 0.0000], dtype=torch.float64)
    """
    return _each("false_negative_rate", sample_rate, noise_multiplier, steps, false_positive_rate)


@overload
def best_true_positive_rate(
    *, sample_rate: float, noise_multiplier: float, steps: float, false_positive_rate: float
) -> float: ...


@overload
def best_true_positive_rate(
    *, sample_rate: Numbers, noise_multiplier: Numbers, steps: Numbers, false_positive_rate: Numbers
) -> torch.Tensor: ...


def best_true_positive_rate(
    *, sample_rate: Numbers, noise_multiplier: Numbers, steps: Numbers, false_positive_rate: Numbers
) -> float | torch.Tensor:
    r"""An upper bound on the true positive rate of any attack with these false positive rates: 1 -
    `trade_off`, but with all its digits where it is small.

    Neighbouring relation: add or remove one example. Sampler: Poisson. Accountant: loss
    distributions.

    Args:
        sample_rate: probability in (0, 1] with which an example enters a step.
        noise_multiplier: standard deviation of the noise over the clip norm, at least 0.
        steps: number of steps, a whole number from 0 to 1e12.
        false_positive_rate: in [0, 1]. The four are numbers, or tensors or sequences that
            broadcast.

    Returns:
        A float in [0, 1], or a float64 tensor of the common shape where an argument is no number.

    Raises:
        ValueError: as of `trade_off`.

    At one false alarm in a thousand, who was in the reference run of epsilon 0.92 (delta 1e-5) is
    found at most twice in a thousand times:

    >>> reference = dict(sample_rate=512 / 60000, noise_multiplier=3.42529, steps=9375)
    >>> f"{best_true_positive_rate(**reference, false_positive_rate=1e-3):.4f}"
    '0.0022'
    """
    return _each("true_positive_rate", sample_rate, noise_multiplier, steps, false_positive_rate)


def _each(reading, sample_rate, noise_multiplier, steps, false_positive_rate):
    """A float where all arguments are numbers; else a tensor of the common shape, one curve for
    each distinct run.
    """
    values = {
        "sample_rate": sample_rate,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "false_positive_rate": false_positive_rate,
    }
    _checks.in_interval("false_positive_rate", false_positive_rate, 0, 1)
    columns = _checks.columns(values, "cpu")
    table = torch.stack(columns, dim=-1).reshape(-1, 4)
    runs, which = torch.unique(table[:, :3], dim=0, return_inverse=True)
    checked = [checked_run(*run) for run in runs.tolist()]
    found = torch.empty(len(table), dtype=torch.float64)
    for index, run in enumerate(checked):
        rates = table[which == index, 3]
        inner = torch.cat((rates, 1 - rates))
        curve = curve_of(*run, float(inner[inner > 0].min()))
        found[which == index] = getattr(curve, reading)(rates)
    device = _checks.device_of(*values.values())
    return float(found) if not columns[0].ndim else found.reshape(columns[0].shape).to(device)


class TradeOffCurve:
    """The lines of many epsilons, with the logarithm of an upper bound on delta at each."""

    def __init__(self, epsilons, log_deltas):
        self.epsilons, self.deltas = epsilons, torch.exp(log_deltas)

    def false_negative_rate(self, rates):
        # A line that overflows lies at -inf, and does not count. 1 - x is exact near 1, where 1 -
        # delta would round a small delta off.
        return (
            self._reduce(
                rates,
                lambda x, grown, shrinks: torch.maximum(
                    1 - self.deltas - grown, shrinks * (1 - x - self.deltas)
                ).amax(1),
            )
            .clamp(0, 1)
            .abs()
        )

    def true_positive_rate(self, rates):
        found = self._reduce(
            rates,
            lambda x, grown, shrinks: torch.minimum(
                self.deltas + grown, 1 - shrinks * (1 - x - self.deltas)
            ).amin(1),
        )
        return torch.minimum(torch.maximum(found, rates), torch.ones_like(rates))

    def _reduce(self, rates, envelope):
        grows, shrinks = torch.exp(self.epsilons), torch.exp(-self.epsilons)
        # A rate of 0 times an overflow is 0, and any other one overflows too: a smaller factor
        # would under-rate.
        return torch.cat(
            [
                envelope(x, (grows * x).nan_to_num(nan=0.0), shrinks)
                for x in rates[:, None].split(64)
            ]
        )


class GaussianTradeOff:
    """G_mu, the curve of N(0, 1) against N(mu, 1), rounded in the attacker's favour.

    SciPy's quantiles and tails err by a few last bits of their arguments; no tail of float64 is
    further out than 38, and there that is 2e-12 of it. The tails of PyTorch are right to 1e-16 of
    one only.
    """

    def __init__(self, mu):
        self.mu = mu

    def false_negative_rate(self, rates):
        return self._tail(lambda z: special.ndtr(-z - self.mu), rates, 0.0) * (1 - _ROUNDING)

    def true_positive_rate(self, rates):
        found = self._tail(lambda z: special.ndtr(z + self.mu), rates, 1.0) * (1 + _ROUNDING)
        return torch.minimum(torch.maximum(found, rates), torch.ones_like(rates))

    @staticmethod
    def _tail(of, rates, undefined):
        with np.errstate(invalid="ignore"):  # no noise at a rate of 0 or 1
            return torch.from_numpy(np.asarray(of(special.ndtri(rates.numpy())))).nan_to_num(
                nan=undefined
            )


def curve_of(
    sample_rate: float, noise_multiplier: float, steps: int, least: float
) -> TradeOffCurve | GaussianTradeOff:
    """The curve of a run: a bound at every rate, and accurate from `least` to 1 - `least`."""
    if steps == 0 or noise_multiplier == 0:
        return GaussianTradeOff(0.0 if steps == 0 else math.inf)
    if sample_rate == 1:
        return GaussianTradeOff(math.sqrt(steps) / noise_multiplier)
    if noise_multiplier >= inclusion_bound.LITTLE_NOISE:
        with contextlib.suppress(pld.NoGrid):
            return _composed_curve(sample_rate, noise_multiplier, steps, least)
    return _revealed_curve(sample_rate, noise_multiplier, steps, least)


def _composed_curve(sample_rate, noise_multiplier, steps, least):
    run = sample_rate, noise_multiplier, steps
    composed = {
        direction: [pld.compose_at(*run, direction, delta)[0] for delta in curve_deltas(least)]
        for direction in pld.DIRECTIONS
    }
    if noise_multiplier < _REVEALING:
        for direction, losses in composed.items():
            losses.append(pld.compose_near(*run, direction, 0.0))
    epsilons = curve_epsilons(last_epsilon(composed["remove"]), _NODES)
    removed, added = (
        best_log_deltas(composed[direction], epsilons) for direction in ("remove", "add")
    )
    # No loss of adding exceeds a constant. Where noise is so small that all are near it, a composed
    # loss says less.
    below = epsilons - pld.largest_loss_of_adding(sample_rate, steps)
    added = torch.minimum(added, torch.log(-torch.expm1(below.clamp(max=0))))
    return TradeOffCurve(epsilons, torch.maximum(removed, added))


def curve_deltas(least: float) -> list[float]:
    """Deltas near which losses must be accurate for a curve that is good at rates from `least`."""
    return [delta for delta, before in zip(_DELTAS, (2.0, *_DELTAS)) if before > least] or [1e-2]


def curve_epsilons(last: float, nodes: int) -> torch.Tensor:
    """Epsilons from 0 to `last`, in even steps and as many in even ratios."""
    ratios = torch.from_numpy(np.geomspace(1e-8 * last, last, nodes))
    return torch.cat((torch.linspace(0, last, nodes, dtype=torch.float64), ratios)).unique()


def last_epsilon(losses):
    """The epsilon beyond which no finite loss of these lies."""
    return max((loss.first + len(loss.masses)) * loss.interval for loss in losses)


def best_log_deltas(losses, epsilons):
    """The least of the bounds on delta, all of which hold everywhere, as logarithms."""
    return torch.stack([log_deltas_of(loss, epsilons) for loss in losses]).amin(0)


def log_deltas_of(loss, epsilons):
    """Logarithms of the bound on delta at many epsilons, as `loss.delta` gives at one."""
    points = len(loss.masses)
    grid, above, at_grid = loss.log_tails()
    # Each of the sums may be off by a rounding of its logarithm for each point.
    largest = max(100.0, abs(loss.log_scale), (1 + loss.tilt) * float(grid.abs().max()))
    hair = 2 * points * torch.finfo(torch.float64).eps * largest
    j = torch.searchsorted(grid, epsilons, right=True).clamp(max=points)
    down = (epsilons - grid[j]).clamp(max=0)
    found = torch.logaddexp(above[j] + torch.log(-torch.expm1(down)), at_grid[j] + down) + hair
    slack = loss.log_scale - loss.tilt * epsilons + math.log(loss.slack / (1 + loss.tilt))
    capped = torch.full_like(slack, loss.log_capped)
    return torch.logaddexp(torch.logaddexp(found, slack), capped).clamp(max=0)


def _revealed_curve(sample_rate, noise_multiplier, steps, least):
    run = {"sample_rate": sample_rate, "noise_multiplier": noise_multiplier, "steps": steps}
    most = max(inclusion_bound.epsilon(**run, delta=1e-2 * max(least, 1e-12)), 1.0)
    epsilons = torch.cat(
        (
            torch.zeros(1, dtype=torch.float64),
            torch.logspace(math.log10(most) - 6, math.log10(most), 256, dtype=torch.float64),
        )
    )
    log_deltas = [
        math.log(inclusion_bound.delta(**run, epsilon=epsilon)) for epsilon in epsilons.tolist()
    ]
    return TradeOffCurve(epsilons, torch.tensor(log_deltas, dtype=torch.float64))
