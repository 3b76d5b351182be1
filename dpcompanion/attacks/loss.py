"""A threshold on the loss: members are those that a model fits best."""

import typing

import torch

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.attacks.curves import Interval, both
from dpcompanion.attacks.rates import clopper_pearson


class LossThreshold(typing.NamedTuple):
    """A loss-threshold attack: the threshold, its success on fresh examples, and on its own."""

    threshold: float
    success: Interval
    fitted: float

    @property
    def advantage(self) -> float:
        """2 success - 1: 0 for guessing, 1 for certainty."""
        return 2 * self.success.value - 1


def loss_threshold_attack(
    members: Array, nonmembers: Array, *, generator: torch.Generator, confidence: float = 0.95
) -> LossThreshold:
    """Call an example a member if its loss is at most a threshold (Yeom et al. 2018; Yu et al.
    2022, section 5.3).

    As many members as nonmembers are sampled, each is split in half: one half chooses the threshold
    with the most right answers, the other one counts them. `fitted`, the success on the first half,
    is too good: the threshold was made for it, by the more the fewer examples there are.

    Args:
        members, nonmembers: (k,) and (m,) losses of examples in and out of the training data, at
            least 2 each.
        generator: a torch.Generator for the draws.
        confidence: of the two-sided interval of Clopper and Pearson; it is about other examples,
            not other models.

    >>> losses = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0))
    >>> found = loss_threshold_attack(
    ...     losses[0] * 0.8, losses[1], generator=torch.Generator().manual_seed(0)
    ... )
    >>> [round(x, 2) for x in found.success], round(found.fitted, 2)
    ([0.6, 0.56, 0.63], 0.6)
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    _checks.generator("generator", generator)
    sides = both(members, nonmembers)
    half = min(map(len, sides)) // 2
    if not half:
        raise ValueError(
            f"members and nonmembers must hold two losses at least, got {len(sides[0])} and "
            f"{len(sides[1])}"
        )
    drawn = [side[torch.randperm(len(side), generator=generator)[: 2 * half]] for side in sides]
    (chosen, other), (trial, other_trial) = zip(*(side.split(half) for side in drawn))
    thresholds = torch.cat((chosen, other)).sort().values
    called, wrongly = (
        torch.searchsorted(side.sort().values, thresholds, right=True) for side in (chosen, other)
    )
    best = int((called - wrongly).argmax())
    threshold = thresholds[best]
    right = int((trial <= threshold).sum() + (other_trial > threshold).sum())
    low, high = clopper_pearson(right, 2 * half, confidence=(1 + confidence) / 2)
    return LossThreshold(
        float(threshold),
        Interval(right / (2 * half), low, high),
        0.5 + float(called[best] - wrongly[best]) / (2 * half),
    )
