"""How well scores tell members from nonmembers: ROC curves, the area below, one point."""

import math
import typing

import torch
from scipy import special

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.attacks.rates import clopper_pearson


class Interval(typing.NamedTuple):
    """An estimate and a two-sided confidence interval."""

    value: float
    low: float
    high: float


class Rates(typing.NamedTuple):
    """An ROC curve: float64 tensors, from 0 to 1."""

    false_positive: torch.Tensor
    true_positive: torch.Tensor


def roc(members: Array, nonmembers: Array) -> Rates:
    """The ROC curve of a score that is larger for members: `Rates`, (false positive, true
    positive), from (0, 0) to (1, 1), one point for each threshold.

    >>> [rates.tolist() for rates in roc(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    members, nonmembers = both(members, nonmembers)
    thresholds = torch.cat((members, nonmembers)).unique().flip(0)
    rates = [
        torch.searchsorted(-values.sort(descending=True).values, -thresholds, right=True).double()
        / len(values)
        for values in (nonmembers.double(), members.double())
    ]
    false, true = (torch.cat((torch.zeros(1, dtype=torch.float64), rate)) for rate in rates)
    return Rates(false, true)


def auc(members: Array, nonmembers: Array, *, confidence: float = 0.95) -> Interval:
    """The area under the ROC curve, with DeLong's interval.

    It is the probability that a member scores above a nonmember.

    DeLong's variance is too small, down to 0, where scores are few or nearly all of one side lie
    above the other's. With k scores on the smaller side the true one is at most area (1 - area) /
    k, that of a share of k trials. So where k times the area, or times the rest of it, is below 10,
    the interval also holds Clopper and Pearson's for k trials; it is then too wide rather than too
    narrow. It is about other examples of the same kind under this model, not about other models.

    Args:
        members, nonmembers: (k,) and (m,) scores, larger for members, one at least of each and none
            of them NaN.
        confidence: of the two-sided interval, in (0, 1).

    Returns `Interval`, (value, low, high).

    Raises:
        ValueError: a side without scores, or with NaN among them, or a confidence outside (0, 1).

    Source: DeLong, DeLong and Clarke-Pearson 1988.

    >>> members, nonmembers = torch.tensor([3.0, 2.0, 1.0, 2.5]), torch.tensor([1.0, 0.0, 1.5, 2.0])
    >>> [round(x, 3) for x in auc(members, nonmembers)]
    [0.812, 0.236, 1.0]
    """
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    members, nonmembers = both(members, nonmembers)

    def below(values, others):
        """For each value the share of others below it, ties counted half."""
        others = others.sort().values
        first, last = (torch.searchsorted(others, values, right=right) for right in (False, True))
        return (first + last).double() / (2 * len(others))

    placed, passed = below(members, nonmembers), below(nonmembers, members)
    variance = sum(float(part.var()) / len(part) for part in (placed, passed) if len(part) > 1)
    value = float(placed.mean())
    reach = float(special.ndtri((1 + confidence) / 2)) * math.sqrt(variance)
    low, high = max(0.0, value - reach), min(1.0, value + reach)
    trials = min(len(members), len(nonmembers))
    above, below_it = value * trials, (1 - value) * trials
    if min(above, below_it) < 10:
        tail = (1 - confidence) / 2
        low = min(low, float(special.betaincinv(above, below_it + 1, tail)) if above else 0.0)
        high = max(
            high, float(special.betaincinv(above + 1, below_it, 1 - tail)) if below_it else 1.0
        )
    return Interval(value, low, high)


def tpr_at_fpr(
    members: Array, nonmembers: Array, *, fpr: float = 0.01, confidence: float = 0.95
) -> Interval:
    """The true positive rate at the lowest threshold that at most the share `fpr` of nonmembers
    exceeds, with Clopper and Pearson's interval, in which the threshold counts as given.

    Args:
        members, nonmembers: (k,) and (m,) scores, larger for members, one at least of each and none
            of them NaN.
        fpr: the largest false positive rate, in [0, 1).
        confidence: of the two-sided interval, in (0, 1).

    Returns `Interval`, (value, low, high).

    Raises:
        ValueError: a side without scores, or with NaN among them, or an argument outside its range.

    >>> tpr_at_fpr(torch.arange(100.0) + 50, torch.arange(100.0), fpr=0.1)[0]
    0.6
    """
    fpr = _checks.number("fpr", fpr, 0, 1, closed="left")
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    members, nonmembers = both(members, nonmembers)
    allowed = min(math.floor(fpr * len(nonmembers) + 1e-9), len(nonmembers) - 1)
    threshold = nonmembers.sort(descending=True).values[allowed]
    hits = int((members > threshold).sum())
    low, high = clopper_pearson(hits, len(members), confidence=(1 + confidence) / 2)
    return Interval(hits / len(members), low, high)


def both(members, nonmembers) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the two, checked: float64 tensors, (k,) and (m,)."""
    return _scores_of("members", members), _scores_of("nonmembers", nonmembers)


def _scores_of(name, values):
    try:
        scores = torch.as_tensor(_checks.unlabelled(values), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers, got {values!r:.80}") from None
    if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
        raise ValueError(
            f"{name} must be a list of one score or more, none of them NaN, got shape "
            f"{tuple(scores.shape)}"
        )
    return scores
