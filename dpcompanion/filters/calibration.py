r"""Prices of levels, and the largest budget or least noise that keeps a promise whatever norms do.

Which prices waste least? At the saddle point :math:`\lambda` of a run, Chernoff's bound on its
delta is :math:`e^{-\lambda\varepsilon}` times the product of :math:`E[e^{\lambda L_z}]` over its
stages. It is the same for all strategies that spend the same if, and only if,
:math:`c(z) \propto \ln E[e^{\lambda L_z}]`: the Rényi divergence of order :math:`\lambda + 1`. No
level is then a bargain for an attacker. `level_costs` takes these, as whole numbers, rounded up.
They favour the full level. What all levels lose at most is least with one over the number of steps
that a level lasts by loss distributions; with strong noise the two are nearly the same ("Exact
filters" in the book has both).

>>> level_costs(
...     [0.25, 0.5, 0.75, 1.0],
...     sample_rate=512 / 60_000,
...     noise_multiplier=3.425,
...     block=39,
...     steps=9375,
...     target_epsilon=0.9,
...     target_delta=1e-5,
... )
(1, 4, 9, 16)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpcompanion import _checks
from dpcompanion.accounting import compute_epsilon, find_noise_multiplier, find_steps
from dpcompanion.accounting.loss import DIRECTIONS
from dpcompanion.filters.cache import cached
from dpcompanion.filters.game import adaptive_delta, check_costs, check_levels, worst_case
from dpcompanion.filters.pairs import SampledGaussianBlock

#: A search for noise or epsilon stops when the answer is known to this relative precision.
PRECISION = 1e-3

_WASTE = 0.05  # what rounding costs up to whole numbers may cost a level
LARGEST_EPSILON = 1e7  # promises nothing; beyond it the search no longer resolves what it finds
_MOST_UNITS = 24_000  # no budget of more units by choice


@dataclass(frozen=True)
class CalibratedFilter:
    """A budget that keeps (epsilon, delta) for every strategy of norms.

    Attributes:
        sample_rate: in (0, 1].
        noise_multiplier: noise over the clip norm (that of level 1).
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        costs: (K,) whole numbers: what a block at each level costs.
        block: steps for which a level holds.
        budget: what may be spent.
        epsilon, target_delta: the promise.
        delta: the worst delta that was computed, at most `target_delta`.
    """

    sample_rate: float
    noise_multiplier: float
    levels: tuple
    costs: tuple
    block: int
    budget: int
    epsilon: float
    target_delta: float
    delta: float


def level_costs(
    levels: Sequence[float],
    *,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    target_epsilon: float,
    target_delta: float,
    block: int = 1,
) -> tuple[int, ...]:
    """Whole costs in proportion to levels' Rényi divergences at the order that decides the target.

    Args:
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        sample_rate: in (0, 1].
        noise_multiplier: of the full clip norm, above 0.
        steps: of the run; the costs are as fine as they can be while rounding wastes more than a
            twentieth, and a run at the full level costs at most 24,000.
        target_epsilon, target_delta: where to be tight. Costs never decide whether a promise holds.
        block: steps for which a level holds.

    Returns:
        A tuple of K whole numbers, ascending.

    Raises:
        ValueError: an argument outside its range, or a target that no step at any level meets.
    """
    levels = check_levels(levels)
    steps, block = _checks.whole_number("steps", steps, 1), _checks.whole_number("block", block, 1)
    level, count = _affordable(
        levels, sample_rate, noise_multiplier, steps, block, target_epsilon, target_delta
    )
    tilt, log_delta = SampledGaussianBlock(sample_rate, noise_multiplier / level, block).reference(
        "remove", max(1, count), target_epsilon
    )
    prices = [
        SampledGaussianBlock(sample_rate, noise_multiplier / z, block).log_mass(
            "remove", tilt, log_delta - math.log(max(1, count))
        )
        for z in levels
    ]
    blocks = math.ceil(steps / block)
    largest = max(1, min(_MOST_UNITS // blocks, math.floor(64 * prices[-1] / prices[0])))
    least, chosen = math.inf, ()
    # Costs are ceil(unit price). The full level is priced exactly: rounding takes nothing from who
    # needs all of it.
    for top in range(1, largest + 1):
        unit = top / prices[-1]
        costs = tuple(math.ceil(unit * price * (1 - 1e-9)) for price in prices)
        waste = max(cost / (unit * price) for cost, price in zip(costs, prices)) - 1
        if waste < 0.9 * least:
            least, chosen = waste, costs
        if waste <= _WASTE:
            break
    return chosen


def calibrate_filter(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    levels: Sequence[float],
    steps: int,
    costs: Sequence[int] | None = None,
    noise_multiplier: float | None = None,
    budget: int | None = None,
    block: int = 1,
    progress: bool | None = None,
) -> CalibratedFilter:
    """The largest budget at a noise, or the least noise for a budget, that keeps (epsilon, delta)
    for every strategy.

    Neighbouring relation: add or remove one example. Sampler: Poisson. What took long is kept in
    the data folder (`dpcompanion.filters.cache`): the same question is answered at once.

    Many arguments, since a run, its levels and its target are described by numbers.

    Args:
        target_epsilon: above 0, 10^7 at most.
        target_delta: in (0, 1).
        sample_rate: in (0, 1].
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        steps: of the run. A budget for all of them at the most expensive level is enough, and none
            is larger.
        costs: (K,) whole numbers, at least 1: what a block at each level costs; by default
            `level_costs`.
        noise_multiplier: above 0, to find the budget.
        budget: to find the least noise, within a relative 1e-3; needs `costs`. One of the two must
            be given.
        block: steps for which a level holds.
        progress: show a bar; by default on a terminal only.

    Returns:
        A `CalibratedFilter`.

    Raises:
        ValueError: an argument outside its range, or a target that cannot be met.

    >>> found = calibrate_filter(
    ...     target_epsilon=1.0,
    ...     target_delta=1e-5,
    ...     sample_rate=0.01,
    ...     noise_multiplier=1.0,
    ...     steps=100,
    ...     levels=[0.5, 1.0],
    ...     costs=[1, 8],
    ... )
    >>> found.budget, found.delta <= 1e-5
    (800, True)
    """
    target_epsilon = _checks.number(
        "target_epsilon", target_epsilon, 0, LARGEST_EPSILON, closed="right"
    )
    target_delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    steps, block = _checks.whole_number("steps", steps, 1), _checks.whole_number("block", block, 1)
    levels = tuple(check_levels(levels))
    if (noise_multiplier is None) == (budget is None):
        raise ValueError(
            "exactly one of noise_multiplier and budget must be given, got "
            f"noise_multiplier={noise_multiplier!r} and budget={budget!r}"
        )
    if noise_multiplier is not None:
        noise_multiplier = _checks.number(
            "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
        )
    if costs is None:
        if noise_multiplier is None:
            raise ValueError("costs must be given with a budget, got None")
        costs = level_costs(
            levels,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            block=block,
            steps=steps,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
        )
    costs, budget = check_costs(costs, max(costs) if budget is None else budget, len(levels))
    if noise_multiplier is None:
        budget = min(budget, math.ceil(steps / block) * max(costs))
        noise_multiplier, reached = _least_noise(
            target_epsilon, target_delta, sample_rate, levels, tuple(costs), budget, block, progress
        )
    else:
        budget, reached = _largest_budget(
            target_epsilon,
            target_delta,
            sample_rate,
            noise_multiplier,
            levels,
            tuple(costs),
            steps,
            block,
            progress,
        )
    return CalibratedFilter(
        sample_rate,
        noise_multiplier,
        levels,
        tuple(costs),
        block,
        budget,
        target_epsilon,
        target_delta,
        reached,
    )


def _affordable(levels, sample_rate, noise_multiplier, steps, block, epsilon, delta):
    """The highest level of which a block is affordable by PLD, and how many blocks, at most those
    of the run.
    """
    blocks = math.ceil(steps / block)
    for level in reversed(levels):
        run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier / level)
        if compute_epsilon(**run, steps=blocks * block, delta=delta) <= epsilon:
            return level, blocks
        if compute_epsilon(**run, steps=block, delta=delta) <= epsilon:
            return level, find_steps(**run, target_epsilon=epsilon, target_delta=delta) // block
    raise ValueError(
        f"target_epsilon={epsilon:g} cannot be met at target_delta={delta:g}: not even one block "
        f"of {block} steps at level {levels[0]:g} does"
    )


@cached()
def _largest_budget(
    epsilon, delta, sample_rate, noise_multiplier, levels, costs, steps, block, progress
):
    """The largest budget that keeps the promise, and the delta that it reaches.

    Many arguments, since all of the question is the key of the cache.
    """
    level, count = _affordable(levels, sample_rate, noise_multiplier, steps, block, epsilon, delta)
    # With more a constant strategy at that level would break the promise, or nobody could spend it.
    blocks, cost = math.ceil(steps / block), costs[levels.index(level)]
    budget = blocks * max(costs)
    if count < blocks:
        budget = min(budget, cost * (count + 1) - 1)
    dearer = [c for z, c in zip(levels, costs) if z > level]
    budget = max(min([budget, *(c - 1 for c in dearer)]), 0)
    pairs = [SampledGaussianBlock(sample_rate, noise_multiplier / z, block) for z in levels]
    reached = 0.0
    for direction in DIRECTIONS if sample_rate < 1 else DIRECTIONS[:1]:
        if budget < min(costs):
            break
        table = worst_case(
            pairs,
            costs=costs,
            budget=budget,
            epsilon=epsilon,
            direction=direction,
            stop_above=delta,
            progress=progress,
        ).table
        budget = len(table) - 1 - int(table[-1] > delta)
        reached = max(reached, float(table[budget]))
    if budget < min(costs):
        raise ValueError(
            f"target_epsilon={epsilon:g} cannot be met at target_delta={delta:g}: it leaves a "
            f"budget of {budget}, below the least cost, {min(costs)}"
        )
    return budget, reached


@cached()
def _least_noise(epsilon, delta, sample_rate, levels, costs, budget, block, progress):
    game = dict(
        sample_rate=sample_rate,
        levels=levels,
        costs=costs,
        budget=budget,
        epsilon=epsilon,
        block=block,
    )
    # Where to begin: what the level that needs most noise needs for itself.
    start = max(
        level
        * find_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=sample_rate,
            steps=budget // cost * block,
        )
        for level, cost in zip(levels, costs)
        if cost <= budget
    )
    found = _least(
        lambda noise: _delta(delta, noise_multiplier=noise, **game, progress=progress), start, delta
    )
    if found is None:
        raise ValueError(
            f"target_epsilon={epsilon:g} cannot be met at target_delta={delta:g} with "
            f"budget={budget}"
        )
    return found


def _delta(
    target, *, sample_rate, noise_multiplier, levels, costs, budget, epsilon, block, progress
):
    """`adaptive_delta` where it is at most the target; else that of one direction, which is above
    the target, too.

    Many arguments, since all of the question is the key of the cache.
    """
    pairs = [SampledGaussianBlock(sample_rate, noise_multiplier / level, block) for level in levels]
    delta = 0.0
    for direction in DIRECTIONS if sample_rate < 1 else DIRECTIONS[:1]:
        game = worst_case(
            pairs,
            costs=costs,
            budget=budget,
            epsilon=epsilon,
            direction=direction,
            progress=progress,
        )
        delta = max(delta, game.delta)
        if delta > target:
            break
    return delta


def epsilon_of_budget(
    delta, sample_rate, noise_multiplier, levels, costs, budget, block, progress=None
):
    """The least epsilon, within a relative 1e-3 and never below, that a budget keeps at `delta`;
    inf beyond 1e4.
    """
    if budget < min(costs):
        return 0.0
    return _least_epsilon(
        delta, sample_rate, noise_multiplier, levels, costs, budget, block, progress
    )[0]


@cached()
def _least_epsilon(delta, sample_rate, noise_multiplier, levels, costs, budget, block, progress):
    game = dict(
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        levels=levels,
        costs=costs,
        budget=budget,
        block=block,
        progress=progress,
    )
    start = max(
        compute_epsilon(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier / level,
            steps=budget // cost * block,
            delta=delta,
        )
        for level, cost in zip(levels, costs)
        if cost <= budget
    )
    if start < 1e-3 and adaptive_delta(epsilon=0.0, **game) <= delta:
        return (0.0,)
    found = _least(lambda epsilon: _delta(delta, epsilon=epsilon, **game), max(start, 1e-6), delta)
    return (math.inf if found is None else found[0],)


def _least(delta_at, start, delta) -> tuple[float, float] | None:
    """(x, delta there): the least x above 0 at which the falling `delta_at` is at most `delta`,
    within PRECISION; or None where not even 1e4 times `start` is enough.
    """
    # Not `accounting.search`: it is precise relative to x, its range ends with `start`, and delta
    # there is wanted too.
    low, x, found = None, start * (1 + PRECISION), None
    while True:
        value = delta_at(x)
        height = math.log(max(value, 1e-300) / delta)
        if height <= 0:
            found = x, value, height
        else:
            low = x, height
        if found is None:
            if x > 1e4 * start:
                return None
            x *= 1.02 if x < 1.1 * start else 1.3
        elif low is None:
            x = found[0] / 1.02
            if x < 1e-9:
                return found[:2]
        elif found[0] <= low[0] * (1 + PRECISION):
            return found[:2]
        else:
            # A secant, a little to the safe side, kept off the ends.
            share = min(max(low[1] / (low[1] - found[2]) + 0.05, 0.1), 0.9)
            x = low[0] + share * (found[0] - low[0])
