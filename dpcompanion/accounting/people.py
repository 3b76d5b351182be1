r"""Epsilon of each of many people, whose steps are of different kinds: sampled Gaussians of any rates, and releases.

`dpcompanion.accounting.histories` computes epsilons of thousands of histories of steps at one sample rate: the
logarithms of their characteristic functions are counts times those of the kinds.  Nothing there asks for one rate, so
the kinds may be any losses of `loss` and `mixed`.  Infinite losses, with which (epsilon, delta) guarantees count, are
taken off delta beforehand, the same for all who have the same guarantees.

>>> from dpcompanion.accounting import Ledger
>>> kinds = SampledGaussian(0.01, 1.0, 1), SampledGaussian(0.02, 1.2, 1)
>>> epsilons_of(kinds, torch.tensor([[500, 500], [500, 0]]), 1e-5, lambda items: Ledger(items).epsilon(1e-5))
tensor([2.3..., 1.3...], dtype=torch.float64)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import mixed, inclusion_bound
from .histories import BLOCK, MOST_LEVELS, MIXTURE_NODES, distinct_rows, epsilons_in_one_direction, total_steps
from .items import Gaussian, Guarantee, Item, Laplace, SampledGaussian, times
from .levels import Levels
from .loss import DIRECTIONS, LEAST_RATE, StepLoss
from .pld import LOG_CAPPED

_FEW = 12  # different people whose epsilons are computed one by one
SPREAD = 1e12  # what costs so much less than the most expensive kind counts as so much: one grid holds all losses


def epsilons_of(
    kinds: Sequence[Item], counts: torch.Tensor, delta: float, alone: Callable[[list[Item]], float]
) -> torch.Tensor:
    """Epsilon of each person at `delta`, (n,) float64, an upper bound, about 0.1% above the exact value.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        kinds: items of one step or release each.
        counts: (n, kinds) whole numbers, how often each person is charged for each.
        delta: in (0, 1).
        alone: the epsilon of some items, for people who are few, or have no sampled steps.
    """
    used = [j for j in range(len(kinds)) if bool(counts[:, j].any())]
    kinds, counts = [kinds[j] for j in used], counts[:, used]
    if not kinds:
        return torch.zeros(len(counts), dtype=torch.float64)
    rows, which = distinct_rows(counts)
    sampled = [isinstance(kind, SampledGaussian) and kind.sample_rate < 1 for kind in kinds]
    noises = [_scale(kind) for kind in kinds]
    gridded = rows[:, sampled].any(dim=1)
    if len(rows) <= _FEW or min(noises) < inclusion_bound.LITTLE_NOISE:
        gridded[:] = False
    infinite = torch.tensor([math.log1p(-kind.delta) if isinstance(kind, Guarantee) else 0.0 for kind in kinds])
    infinite = -torch.expm1(rows.double() @ infinite.double())
    gridded &= infinite < delta
    found = torch.empty(len(rows), dtype=torch.float64)
    for place in (~gridded).nonzero()[:, 0].tolist():
        found[place] = alone([item for kind, count in zip(kinds, rows[place].tolist()) for item in times(kind, count)])
    for lost in infinite[gridded].unique().tolist():
        here = (gridded & (infinite == lost)).nonzero()[:, 0]
        found[here] = _on_grids(kinds, rows[here], delta - lost)
    return found[which]


def _scale(kind):
    """Noise over sensitivity: of a guarantee the scale of Laplace noise with its epsilon."""
    if isinstance(kind, Guarantee):
        return 1 / kind.epsilon if kind.epsilon else math.inf
    return kind.scale if isinstance(kind, Laplace) else kind.noise_multiplier


def _on_grids(kinds, counts, delta):
    """Epsilon of people all of whom have sampled steps, in the worse direction."""
    # An epsilon of 0 has no finite loss.
    used = [j for j in range(len(kinds)) if bool(counts[:, j].any()) and _scale(kinds[j]) < math.inf]
    # Kinds whose losses are capped come first: of all the cap of the first one is counted.
    used.sort(key=lambda j: isinstance(kinds[j], (Laplace, Guarantee)))
    kinds, counts = [kinds[j] for j in used], counts[:, used]
    most = SPREAD * min(map(_scale, kinds))
    levels, nodes = _levels(kinds, most)
    log_capped = LOG_CAPPED + math.log(delta) - math.log(float(total_steps(counts).max()))
    found = torch.zeros(len(counts), dtype=torch.float64)
    for direction in DIRECTIONS:
        losses = {float(k): _loss(rate, kind, direction, log_capped) for k, (rate, kind) in enumerate(nodes)}
        for part, own in zip(counts.split(max(BLOCK // len(kinds), 1)), found.split(max(BLOCK // len(kinds), 1))):
            torch.maximum(own, epsilons_in_one_direction(part, levels, losses, delta), out=own)
    return found


def _levels(kinds, most):
    """The kinds as levels of a list of nodes: (rate, noise) of sampled Gaussians, (None, item) of the others."""
    nodes: list[tuple[Any, Any]] = []
    rates: dict[float | None, list[int]] = {}
    for j, kind in enumerate(kinds):
        sampled = isinstance(kind, SampledGaussian) and kind.sample_rate < 1
        rates.setdefault(max(kind.sample_rate, LEAST_RATE) if sampled else None, []).append(j)
    low, high = torch.zeros(2, len(kinds), dtype=torch.int64)
    share = torch.zeros(len(kinds), dtype=torch.float64)
    for rate, columns in sorted(rates.items(), key=lambda group: group[0] is None):  # bounded losses come last
        if rate is None:
            low[columns] = high[columns] = torch.arange(len(nodes), len(nodes) + len(columns))
            nodes += [(None, _at_most(kinds[j], most)) for j in columns]
            continue
        noises = [min(kinds[j].noise_multiplier, most) for j in columns]
        own = {1 / noise: noise for noise in noises}
        # Of many levels of one rate some are nodes, and the others mixtures of them (`levels`).
        few = len(kinds) <= MOST_LEVELS
        between = Levels.between([1 / noise for noise in noises], most=len(noises) if few else MIXTURE_NODES)
        low[columns], high[columns] = between.low + len(nodes), between.high + len(nodes)
        share[columns] = between.share
        nodes += [(rate, own.get(node, 1 / node)) for node in between.sensitivities.tolist()]
    return Levels(torch.arange(len(nodes), dtype=torch.float64), low, high, share), nodes


def _at_most(kind, most):
    if isinstance(kind, Guarantee):
        return Guarantee(max(kind.epsilon, 1 / most), kind.delta)
    if isinstance(kind, Laplace):
        return Laplace(min(kind.scale, most))
    return Gaussian(min(kind.noise_multiplier, most))


def _loss(rate, kind, direction, log_capped):
    if rate is not None:
        return StepLoss(rate, kind, direction, log_capped)
    if isinstance(kind, Gaussian):
        return mixed.GaussianLoss(kind.noise_multiplier, log_capped)
    return mixed.LaplaceLoss(kind.scale) if isinstance(kind, Laplace) else mixed.WorstLoss(kind.epsilon, kind.delta)
