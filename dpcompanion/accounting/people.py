r"""Epsilon of each of many people, whose steps are of different kinds: sampled Gaussians of any
rates, and releases.

`dpcompanion.accounting.histories` computes epsilons of thousands of histories of steps at one
sample rate: the logarithms of their characteristic functions are counts times those of the kinds.
Nothing there asks for one rate, so the kinds may be any losses of `loss` and `mixed`. Infinite
losses, with which (epsilon, delta) guarantees count, are taken off delta beforehand, the same for
all who have the same guarantees.

Where one example replaces another, a sampled step of a person is the pair of
`mixed.ReplacementLoss`: of what was promised with the same norm for both examples, of an account
with the person's own norm against all that the other example may have.

>>> from dpcompanion.accounting import Ledger
>>> costs = Cost(SampledGaussian(0.01, 1.0, 1)), Cost(SampledGaussian(0.02, 1.2, 1))
>>> epsilons_of(
...     costs, torch.tensor([[500, 500], [500, 0]]), 1e-5, lambda items: Ledger(items).epsilon(1e-5)
... )
tensor([2.3..., 1.3...], dtype=torch.float64)
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dpcompanion.accounting import inclusion_bound, mixed
from dpcompanion.accounting.histories import (
    BLOCK,
    MIXTURE_NODES,
    MOST_LEVELS,
    SPREAD,
    distinct_rows,
    epsilons_in_one_direction,
    total_steps,
)
from dpcompanion.accounting.items import (
    Gaussian,
    Guarantee,
    Item,
    Laplace,
    SampledGaussian,
    guarantee_replaced,
    times,
)
from dpcompanion.accounting.levels import Levels
from dpcompanion.accounting.loss import DIRECTIONS, LARGEST_NOISE, LEAST_RATE, StepLoss
from dpcompanion.accounting.pld import LOG_CAPPED

_FEW = 12  # different people whose epsilons are computed one by one


class Cost(NamedTuple):
    """What a person is charged for: an item of one step or release, and where one example replaces
    another the noise multiplier at the norm of the other example, None for the same as the
    item's.
    """

    item: Item
    other: float | None = None


class _Replaced(NamedTuple):
    """A sampled step where one example replaces another: rate, and the noise over either norm."""

    sample_rate: float
    noise_multiplier: float
    other: float


def replacement_costs(promised: Item, account: Any) -> tuple[list[Cost], torch.Tensor] | None:
    """An account's costs and (n, costs) counts where one example replaces another, or None where it
    says nothing then.

    Of the other example nothing is known but what was promised: it may have the full norm at each
    step that was promised, also at those for which the person was charged less, or nothing.
    """
    if not isinstance(promised, SampledGaussian) or any(
        not isinstance(kind, SampledGaussian) or kind.sample_rate != promised.sample_rate
        for kind in account.kinds
    ):
        return None
    most = promised.noise_multiplier
    costs = [Cost(kind, None if kind.noise_multiplier <= most else most) for kind in account.kinds]
    idle = SampledGaussian(promised.sample_rate, LARGEST_NOISE, 1)
    rest = (promised.steps - account.counts.sum(dim=1, keepdim=True)).clamp(min=0)
    return [*costs, Cost(idle, most)], torch.cat([account.counts, rest], dim=1)


def epsilons_of(
    costs: Sequence[Cost],
    counts: torch.Tensor,
    delta: float,
    alone: Callable[[list[Item]], float],
    *,
    relation: str = "add-remove",
    steps: int | None = None,
) -> torch.Tensor:
    """Epsilon of each person at `delta`, (n,) float64, an upper bound, about 0.1% too large.

    Sampler: Poisson. With `steps` a bound is a function of the person's own counts, up to the
    rounding errors of floats, as is needed where the counts are private (`histories`).

    Args:
        costs: distinct ones.
        counts: (n, costs) whole numbers, how often each person is charged for each.
        delta: in (0, 1).
        alone: the epsilon of some items, for people who are few, or have no sampled steps.
        relation: "add-remove", or "replace", where one example replaces another.
        steps: a public number, at least that of anyone's charges.
    """
    if not costs:
        return torch.zeros(len(counts), dtype=torch.float64)
    rows, which = distinct_rows(counts)
    kinds = [cost.item if relation == "add-remove" else _replaced(cost) for cost in costs]
    gridded = rows[:, [_is_sampled(kind) for kind in kinds]].any(dim=1)
    unequal = [
        isinstance(kind, _Replaced) and kind.noise_multiplier != kind.other for kind in kinds
    ]
    # How many differ says something of each of them, how many there are is public.
    if len(rows if steps is None else counts) <= _FEW:
        gridded = rows[:, unequal].any(dim=1)
    if min(map(_scale, kinds)) < inclusion_bound.LITTLE_NOISE:
        gridded[:] = False
    infinite = torch.tensor(
        [math.log1p(-kind.delta) if isinstance(kind, Guarantee) else 0.0 for kind in kinds],
        dtype=torch.float64,
    )
    # Rounded up, for as many terms as are added: a person for whom it reaches delta is asked alone.
    infinite = -torch.expm1(rows.double() @ infinite) * (1 + (len(kinds) + 4) * 2.0**-52)
    gridded &= infinite < delta
    found = torch.empty(len(rows), dtype=torch.float64)
    whole = [
        cost.item if cost.other is None else _with_noise(cost.item, cost.other) for cost in costs
    ]
    for place in (~gridded).nonzero()[:, 0].tolist():
        found[place] = alone(
            [
                item
                for kind, count in zip(whole, rows[place].tolist())
                for item in times(kind, count)
            ]
        )
    for lost in infinite[gridded].unique().tolist():
        here = (gridded & (infinite == lost)).nonzero()[:, 0]
        found[here] = _on_grids(kinds, rows[here], delta - lost, steps)
    return found[which]


def _with_noise(item, noise_multiplier):
    return dataclasses.replace(item, noise_multiplier=noise_multiplier)


def _is_sampled(kind):
    return isinstance(kind, _Replaced) or (
        isinstance(kind, SampledGaussian) and kind.sample_rate < 1
    )


def _replaced(cost):
    """A kind whose loss is that of one step or release where one example replaces another."""
    item = cost.item
    if isinstance(item, Guarantee):
        epsilon, delta = guarantee_replaced(item)
        return Guarantee(epsilon, min(delta, math.nextafter(1, 0)))
    if isinstance(item, Laplace):
        return Laplace(item.scale / item.replaced)
    if isinstance(item, Gaussian):
        return Gaussian(item.noise_multiplier / item.replaced)
    step = _Replaced(item.sample_rate, item.noise_multiplier, cost.other or item.noise_multiplier)
    return step if item.sample_rate < 1 else Gaussian(_scale(step))


def _scale(kind):
    """Noise over sensitivity: of a guarantee the scale of Laplace noise with its epsilon."""
    if isinstance(kind, Guarantee):
        return 1 / kind.epsilon if kind.epsilon else math.inf
    if isinstance(kind, _Replaced):  # the other example may lie on the other side
        return 1 / (1 / kind.noise_multiplier + 1 / kind.other)
    return kind.scale if isinstance(kind, Laplace) else kind.noise_multiplier


def _on_grids(kinds, counts, delta, steps=None):
    """Epsilon of people all of whom have sampled steps, in the worse direction."""
    # An epsilon of 0 has no finite loss.
    used = [j for j in range(len(kinds)) if _scale(kinds[j]) < math.inf]
    # Kinds whose losses are capped come first: of all the cap of the first one is counted.
    used.sort(key=lambda j: isinstance(kinds[j], (Laplace, Guarantee)))
    kinds, counts = [kinds[j] for j in used], counts[:, used]
    most = SPREAD * min(map(_scale, kinds))
    levels, nodes = _levels(kinds, most)
    longest = max(float(total_steps(counts).max()), steps or 0)
    log_capped = LOG_CAPPED + math.log(delta) - math.log(longest)
    found = torch.zeros(len(counts), dtype=torch.float64)
    for direction in DIRECTIONS:
        losses = {
            float(k): _loss(rate, kind, direction, log_capped)
            for k, (rate, kind) in enumerate(nodes)
        }
        for part, own in zip(
            counts.split(max(BLOCK // len(kinds), 1)), found.split(max(BLOCK // len(kinds), 1))
        ):
            torch.maximum(own, epsilons_in_one_direction(part, levels, losses, delta), out=own)
    return found


def _levels(kinds, most):
    """The kinds as levels of a list of nodes: (rate, noise) of sampled Gaussians, (rate, (noise,
    other)) of replaced ones, (None, item) of the others.
    """
    nodes: list[tuple[Any, Any]] = []
    groups: dict[Any, list[int]] = {}
    for j, kind in enumerate(kinds):
        groups.setdefault(_group(kind, most), []).append(j)
    low, high = torch.zeros(2, len(kinds), dtype=torch.int64)
    share = torch.zeros(len(kinds), dtype=torch.float64)
    # bounded losses come last
    for group, columns in sorted(groups.items(), key=lambda group: group[0] is None):
        if group is None:
            low[columns] = high[columns] = torch.arange(len(nodes), len(nodes) + len(columns))
            nodes += [(None, _at_most(kinds[j], most)) for j in columns]
            continue
        rate, *other = group
        noises = [min(kinds[j].noise_multiplier, most) for j in columns]
        own = {1 / noise: noise for noise in noises}
        # Of many levels of one rate some are nodes, and the others mixtures of them (`levels`).
        few = len(kinds) <= MOST_LEVELS
        between = Levels.between(
            [1 / noise for noise in noises], most=len(noises) if few else MIXTURE_NODES
        )
        low[columns], high[columns] = between.low + len(nodes), between.high + len(nodes)
        share[columns] = between.share
        if other:  # no mixture is proved for a pair: the node above counts
            low[columns] = torch.where(between.share > 0, between.high, between.low) + len(nodes)
            high[columns], share[columns] = low[columns], 0.0
        found = [own.get(node, 1 / node) for node in between.sensitivities.tolist()]
        nodes += [(rate, (noise, other[0] or noise) if other else noise) for noise in found]
    return Levels(torch.arange(len(nodes), dtype=torch.float64), low, high, share), nodes


def _group(kind, most):
    """What kinds have in common that are levels of each other: None for what is none."""
    if isinstance(kind, _Replaced):
        other = None if kind.other == kind.noise_multiplier else min(kind.other, most)
        return max(kind.sample_rate, LEAST_RATE), other
    return (max(kind.sample_rate, LEAST_RATE),) if _is_sampled(kind) else None


def _at_most(kind, most):
    if isinstance(kind, Guarantee):
        return Guarantee(max(kind.epsilon, 1 / most), kind.delta)
    if isinstance(kind, Laplace):
        return Laplace(min(kind.scale, most))
    return Gaussian(min(kind.noise_multiplier, most))


def _loss(rate, kind, direction, log_capped):
    if isinstance(kind, tuple):  # the other way round the examples change places
        noise, other = kind if direction == "remove" else kind[::-1]
        return mixed.ReplacementLoss(rate, noise, log_capped, other)
    if rate is not None:
        return StepLoss(rate, kind, direction, log_capped)
    if isinstance(kind, Gaussian):
        return mixed.GaussianLoss(kind.noise_multiplier, log_capped)
    return (
        mixed.LaplaceLoss(kind.scale)
        if isinstance(kind, Laplace)
        else mixed.WorstLoss(kind.epsilon, kind.delta)
    )
