r"""The largest delta of adaptive choices within a budget, by dynamic programming; which levels and
costs are allowed.

The game. A run has stages. Before each one a player, who sees all outputs so far, chooses one of K
mechanisms, with dominating pairs :math:`(P_z, Q_z)` and whole costs :math:`c_z \ge 1`, and the
costs must not add up to more than a budget B. With :math:`L_z = \ln(P_z/Q_z)` under :math:`P_z` and
:math:`V(0, s) = (1 - e^{\varepsilon - s})_+`,

.. math:: V(b, s) = \max\Big( V(b-1, s),\; \max_{z: c_z \le b} E\big[V(b - c_z, s + L_z)\big] \Big)

is the worst delta when the loss so far is s and b is left: :math:`\delta(\varepsilon) \le V(B, 0)`
for every strategy, and some strategy attains it. The proof is in the book ("Exact filters"): every
V(b, -ln x) is convex in x, so domination carries over from the hockey sticks to V, backwards, stage
by stage.

What is computed lies above V, never below:

* the losses are on a grid (`pairs`), which by the same convexity can only raise V;
* to the left of the window V keeps the value of its end (or Chernoff's bound); to the right it is a
  chord of the convex function, up to 1;
* all is tilted, :math:`U(b, s) = V(b, s)\, e^{\lambda (\varepsilon - s)}` with the saddle point
  :math:`\lambda` of the worst constant strategy, so that rounding is relative to delta and not to
  1; a bound on the rounding of every transform and on every truncated mass is carried along and
  added.

A stage costs K + 1 Fourier transforms.

>>> from dpcompanion.filters.pairs import Discrete
>>> strong, weak = Discrete([0.2, 0.8], [0.8, 0.2]), Discrete([0.4, 0.6], [0.6, 0.4])
>>> game = worst_case([weak, strong], costs=[1, 3], budget=3, epsilon=0.5)
>>> [round(float(delta), 4) for delta in game.table]
[0.0, 0.0, 0.0962, 0.4703]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from dpcompanion import _checks
from dpcompanion._progress import bar
from dpcompanion.accounting.loss import DIRECTIONS
from dpcompanion.filters.pairs import SampledGaussianBlock

#: Half of what the discretisation may add to epsilon, relatively, where the grid is chosen.
TOLERANCE = 2e-3

_UNIT = 2.0**-53
_WIDTH = 7.0  # standard deviations of the tilted path that the window holds to either side
_LOG_CAPPED = math.log(1e-5)  # the part of delta that the caps on the losses may add
# budget x levels x grid points; more than that gets a coarser grid, and the error says so
_MOST_WORK = 1e9
_LARGEST_GRID = 1 << 20
# logarithms: smaller deltas are not resolved, larger tilted masses avoided
_LEAST, _LARGEST_MASS = -150.0, 250.0
_LARGEST_NOISE = 1e7
_SMALL = 1 << 12  # a window of all sums that can occur is taken where it is no larger


@dataclass(frozen=True)
class Game:
    """The value of a game in one direction.

    Attributes:
        direction: "remove" or "add".
        epsilon: at which delta is meant.
        table: (B + 1,) upper bounds on the worst delta within each budget from 0 to B; ascending.
        interval: spacing of the grid.
        error: what the discretisation may have added to epsilon, to first order (it never
            subtracts).
        first: index of the first grid point of `choices`.
        choices: (B + 1, points) int8, if asked for: which level to play with b left at ``(first +
            j) * interval``; -1 to leave a unit of the budget unspent.
    """

    direction: str
    epsilon: float
    table: np.ndarray
    interval: float
    error: float
    first: int = 0
    choices: np.ndarray | None = None

    @property
    def delta(self) -> float:
        """The worst delta within the whole budget."""
        return float(self.table[-1])


def worst_case(
    pairs: Sequence[Any],
    *,
    costs: Sequence[int],
    budget: int,
    epsilon: float,
    direction: str = "remove",
    interval: float | None = None,
    stop_above: float | None = None,
    choices: bool = False,
    progress: bool | None = None,
) -> Game:
    r"""The worst delta of any adaptive sequence of these mechanisms within a budget: an upper
    bound, tight up to its grid.

    Many arguments, since the grid and what is kept of it may be chosen, too.

    Args:
        pairs: K objects of `dpcompanion.filters.pairs`, which may be of different kinds.
        costs: (K,) whole numbers, at least 1.
        budget: a whole number, at least the least cost.
        epsilon: at least 0.
        direction: "remove" or "add"; the privacy of a run is the worse of the two.
        interval: spacing of the grid; None chooses it for an error of about `TOLERANCE`.
        stop_above: a delta above which to stop: `table` then ends with the first value beyond it.
        choices: keep the maximising strategy (a byte for each budget and grid point).
        progress: show a bar; by default on a terminal only.

    Returns:
        A `Game`.

    Raises:
        ValueError: an argument outside its range.
    """
    costs, budget = check_costs(costs, budget, len(pairs))
    epsilon = _checks.number("epsilon", epsilon, 0, math.inf, closed="left")
    _checks.one_of("direction", direction, DIRECTIONS)
    if interval is not None:
        interval = _checks.number("interval", interval, 0, math.inf, closed="neither")
    # Who cannot pay for a level cannot play it; its law would only widen the window and the bounds
    # on what is lost.
    affordable = [k for k, cost in enumerate(costs) if cost <= budget]
    pairs, costs = [pairs[k] for k in affordable], [costs[k] for k in affordable]
    times = [budget // cost for cost in costs]
    references = [pair.reference(direction, count, epsilon) for pair, count in zip(pairs, times)]
    tilt, log_delta = max(references, key=lambda reference: reference[1])
    largest = max(pair.largest_loss(direction) / cost for pair, cost in zip(pairs, costs))
    if budget * largest <= epsilon:
        return Game(direction, epsilon, np.zeros(budget + 1), 0.0, 0.0)
    log_capped = [_LOG_CAPPED + max(log_delta, _LEAST) - math.log(count) for count in times]

    def growth(tilt):
        parts = zip(pairs, costs, log_capped)
        return max(pair.log_mass(direction, tilt, log) / cost for pair, cost, log in parts)

    # A tilt that goes for deltas far below what floats hold, or that the moments do not allow, is
    # too large.
    while tilt > 1e-3 and not budget * growth(tilt) <= _LARGEST_MASS:
        tilt *= 0.7
    if interval is None:
        interval = _interval(times, tilt, epsilon)
    while True:
        laws = [
            pair.law(direction, tilt=tilt, interval=interval, log_capped=log)
            for pair, log in zip(pairs, log_capped)
        ]
        if tilt > 1e-3 and budget * _growth(laws, costs) > _LARGEST_MASS:
            tilt *= 0.7
            continue
        low, high = _ends(laws, times, interval, epsilon)
        farthest = max(high * interval - epsilon, epsilon - low * interval)
        if tilt > 1e-3 and tilt * farthest > 2 * _LARGEST_MASS:
            tilt *= 0.7
            continue
        work = budget * len(pairs) * (high - low + 1)
        if work <= _MOST_WORK and high - low < _LARGEST_GRID:
            break
        interval *= 1.25 * max(1.0, min(work / _MOST_WORK, 4.0))
    grid = _Grid(tilt, interval, low, high)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows counts as a delta of 1
        table, kept = _play(laws, costs, budget, epsilon, grid, stop_above, choices, progress)
    rise = max(
        count * max(math.log(law.masses.sum()) - law.log_mass, 0.0)
        for law, count in zip(laws, times)
    )
    # Where delta falls faster than the tilt says the errors of the grid weigh more; and within a
    # cell it is a chord.
    error = 2 * rise / tilt if epsilon >= 50 * interval else max(2 * rise / tilt, interval)
    if kept is not None:
        # -1, for a unit unspent, is the last entry
        kept = np.array([*affordable, -1], dtype=np.int8)[kept]
    return Game(direction, epsilon, table, interval, error, low, kept)


def check_costs(costs, budget, count):
    """Whole costs of `count` levels and a budget that pays for one at least; else a ValueError."""
    costs = [
        _checks.whole_number("costs", cost, 1, 2**53) for cost in np.asarray(costs).ravel().tolist()
    ]
    if len(costs) != count or not count:
        raise ValueError(
            f"costs must hold one whole number for each of the {count} levels, got {len(costs)}"
        )
    budget = _checks.whole_number("budget", budget, 1)
    if budget < min(costs):
        raise ValueError(f"budget must be at least the least cost, {min(costs)}, got {budget}")
    return costs, budget


def check_levels(levels):
    """Levels in (0, 1], strictly ascending, as floats."""
    _checks.in_interval("levels", levels, 0, 1, closed="right")
    levels = np.asarray(levels, dtype=np.float64).ravel().tolist()
    if not levels or any(a >= b for a, b in zip(levels, levels[1:])):
        raise ValueError(f"levels must be ascending, each once, one at least, got {levels}")
    return levels


def _growth(laws, costs):
    """How fast the logarithm of the tilted mass of a path may grow, a unit of the budget."""
    return max(
        0.0, max(math.log(law.masses.sum() + law.lost) / cost for law, cost in zip(laws, costs))
    )


def _interval(times, tilt, epsilon):
    # Sharing masses between the ends of a cell adds (1 + tilt) h^2 / 12 to epsilon, a stage.
    error = TOLERANCE * max(epsilon, 1e-3 / tilt)
    return min(
        math.sqrt(12 * error / (max(times) * (1 + tilt))),
        0.5 / tilt,
        (epsilon + 0.01 / tilt) / 30,
        0.1,
    )


def _ends(laws, times, interval, epsilon):
    """The window of tilted paths from 0 to epsilon, in grid points, no wider than paths can go."""
    least = min(count * min(law.first, 0) for law, count in zip(laws, times))
    most = max(count * max(law.first + len(law.masses) - 1, 0) for law, count in zip(laws, times))
    goal = math.ceil(epsilon / interval)
    if most - least <= _SMALL:
        return least, max(most, goal)
    spread = drift = 0.0
    for law, count in zip(laws, times):
        places = law.first + np.arange(len(law.masses))
        weights = law.masses / law.masses.sum()
        mean = float(weights @ places)
        spread = max(spread, math.sqrt(count * float(weights @ (places - mean) ** 2)))
        drift = max(drift, count * mean)
    # A bridge of `drift` with this spread is widest where drift (1 - t) - width spread sqrt(t (1 -
    # t)) is least.
    edge = math.ceil((math.hypot(drift, _WIDTH * spread) - drift) / 2) + 16
    low = min(-edge, min(law.first for law in laws))
    high = max(goal, math.ceil(drift)) + max(edge, max(law.first + len(law.masses) for law in laws))
    return max(low, least), max(min(high, most), goal)


class _Grid(NamedTuple):
    """The tilt of losses, and spacing and ends of their grid: low to high times the interval."""

    tilt: float
    interval: float
    low: int
    high: int


def _spectra(laws, size):
    """How far the laws reach to the left and to the right, how many points a transform of so many
    values has, and the transforms of the laws, conjugated.
    """
    left = max(0, -min(law.first for law in laws))
    right = max(0, max(law.first + len(law.masses) - 1 for law in laws))
    points = cast(int, next_fast_len(max(size + left + right, 16), real=True))
    kernels = np.zeros((len(laws), points))
    for kernel, law in zip(kernels, laws):
        np.add.at(kernel, (law.first + np.arange(len(law.masses))) % points, law.masses)
    spectra = np.conj(cast(np.ndarray, rfft(kernels, axis=1)))
    return left, right, points, spectra


def _play(laws, costs, budget, epsilon, grid, stop_above, choices, progress):
    """The table of V(b, 0), from above, and the maximising choices."""
    tilt, interval, low, high = grid
    size = high - low + 1
    left, right, points, spectra = _spectra(laws, size)
    # Three transforms, each with a relative error below 7 log2(points) units (Higham 2002, theorem
    # 24.2), doubled.
    rounding = [
        42 * math.log2(points) * _UNIT * float(np.linalg.norm(law.masses)) + law.blur
        for law in laws
    ]
    growth = _growth(laws, costs)
    capped = max(law.capped / cost for law, cost in zip(laws, costs))
    # Any U is at most chernoff: (1 - e^(epsilon - s))_+ <= kappa e^(tilt (s - epsilon)), times the
    # mass of the path.
    log_chernoff = tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)

    losses = (low + np.arange(size)) * interval
    below = np.exp(tilt * interval * np.arange(left, 0, -1))  # from the left end outwards, reversed
    beyond = (high + np.arange(1, right + 1)) * interval
    ones = np.exp(tilt * (epsilon - beyond))
    chord = np.exp(tilt * (epsilon - beyond) - (beyond - high * interval))
    to_value = math.exp(-tilt * (epsilon - high * interval))
    excess = np.minimum(epsilon - losses, 0)
    now = -np.expm1(excess) * np.exp(tilt * excess)

    ring, order = max(costs) + 1, np.array(costs)
    history = np.zeros((ring, points // 2 + 1), dtype=complex)
    padded, table = np.zeros(points), np.zeros(budget + 1)
    kept = np.full((budget + 1, size), -1, dtype=np.int8) if choices else None
    # What rounding and cut-off tails may have taken, by units: along the plays of a path, none of
    # an idle unit.
    slacks, norms, slack = [0.0] * ring, [0.0] * ring, 0.0
    scale = math.nextafter(math.exp(-tilt * epsilon), math.inf)  # few digits are left of a tiny one
    rows = np.arange(len(laws))
    with bar(budget, label="worst case", show=progress) as advance:
        for b in range(budget + 1):
            if b:
                playable = order <= b
                products = history[(b - order[playable]) % ring] * spectra[playable]
                values = cast(np.ndarray, irfft(products, n=points, axis=1))[:, :size]
                for k in rows[playable]:
                    i = (b - costs[k]) % ring
                    most = math.exp(log_chernoff + growth * (b - costs[k]))
                    taken = rounding[k] * norms[i] + laws[k].lost * most
                    slack = max(slack, slacks[i] * math.exp(growth * costs[k]) + taken)
                last = now
                if kept is not None and playable.any():
                    best = values.argmax(axis=0)
                    better = values[best, np.arange(size)] > last
                    kept[b] = np.where(better, rows[playable][best], -1)
                now = np.maximum(last, values.max(axis=0)) if playable.any() else last
                advance()
            if low <= 0 <= high:
                table[b] = min(
                    1.0, scale * (now[-low] + slack) * (1 + 1e-12 + 1e-14 * b) + b * capped
                )
                if stop_above is not None and table[b] > stop_above:
                    table = table[: b + 1]
                    break
            padded[:size] = now
            short = max(1.0 - (now[-1] + slack) * to_value, 0.0)
            padded[size : size + right] = ones - short * chord
            if left:
                padded[points - left :] = np.minimum(
                    (now[0] + slack) * below, math.exp(log_chernoff + growth * b)
                )
            history[b % ring], slacks[b % ring] = rfft(padded), slack
            norms[b % ring] = float(np.linalg.norm(padded)) + slack * math.sqrt(size)
    return np.maximum.accumulate(table), kept


def adaptive_delta(
    *,
    sample_rate: float,
    noise_multiplier: float,
    levels: Sequence[float],
    costs: Sequence[int],
    budget: int,
    epsilon: float,
    block: int = 1,
    interval: float | None = None,
    progress: bool | None = None,
) -> float:
    r"""Delta at `epsilon` of a run whose norms adapt to outputs within a budget: an upper bound.

    Before each block of steps the example's level z is any function of the outputs so far, and of
    the example; its gradients are clipped to z times the clip norm during the block, which costs
    c(z) of the budget. Neighbouring relation: add or remove one example. Sampler: Poisson.

    Many arguments, since a run, its levels and its budget are described by numbers.

    Args:
        sample_rate: in (0, 1].
        noise_multiplier: noise over the clip norm (that of level 1), above 0.
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        costs: (K,) whole numbers, at least 1: what a block at each level costs.
        budget: a whole number, at least the least cost.
        epsilon: at least 0.
        block: steps for which a level holds.
        interval: spacing of the grid; None chooses it for an error of about `game.TOLERANCE` of
            epsilon (`play` says the error).
        progress: show a bar; by default on a terminal only.

    Returns:
        A float in [0, 1], the worse of both directions.

    Raises:
        ValueError: an argument outside its range.

    >>> run = dict(sample_rate=0.01, noise_multiplier=1.0, epsilon=1.0)
    >>> constant = adaptive_delta(levels=[1.0], costs=[1], budget=20, **run)
    >>> adaptive = adaptive_delta(levels=[0.5, 1.0], costs=[1, 8], budget=160, **run)
    >>> f"{constant:.1e} {adaptive:.1e}"
    '6.5e-08 6.6e-08'
    """
    return max(
        game.delta
        for game in play(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            levels=levels,
            costs=costs,
            budget=budget,
            epsilon=epsilon,
            block=block,
            interval=interval,
            progress=progress,
        )
    )


class Games(NamedTuple):
    """The two directions of a game, one and the same where batches are full."""

    remove: Game
    add: Game


def play(
    *,
    sample_rate: float,
    noise_multiplier: float,
    levels: Sequence[float],
    costs: Sequence[int],
    budget: int,
    epsilon: float,
    block: int = 1,
    **options: Any,
) -> Games:
    """The games of `adaptive_delta` both ways, with errors, tables and, if asked for, choices.

    Args:
        sample_rate: in (0, 1].
        noise_multiplier: noise over the clip norm (that of level 1), above 0.
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        costs: (K,) whole numbers, at least 1: what a block at each level costs.
        budget: a whole number, at least the least cost.
        epsilon: at least 0.
        block: steps for which a level holds.
        options: interval, stop_above, choices and progress, which `worst_case` takes.

    Returns:
        `Games`: two `Game` objects, "remove" and "add".
    """
    levels = check_levels(levels)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise_multiplier = _checks.number(
        "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
    )
    # more noise loses less, on a grid that would have to be finer and finer
    noise_multiplier = min(noise_multiplier, _LARGEST_NOISE)
    block = _checks.whole_number("block", block, 1)
    pairs = [SampledGaussianBlock(sample_rate, noise_multiplier / level, block) for level in levels]
    # Full batches lose the same in both directions.
    games = [
        worst_case(
            pairs, costs=costs, budget=budget, epsilon=epsilon, direction=direction, **options
        )
        for direction in (DIRECTIONS if sample_rate < 1 else DIRECTIONS[:1])
    ]
    return Games(games[0], games[-1])
