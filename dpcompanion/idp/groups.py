"""The groups of a calibration: different budgets, few that stand for many, and what lies between.

Parameters follow budgets smoothly, in logarithms of both.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpcompanion import _checks

# more different budgets than that are rounded down until they lie so far apart
_MANY, _APART = 30_000, 5e-4


class Groups:
    """The different budgets, ascending, (D,), their shares, and which one each group has."""

    def __init__(self, target_epsilons, counts):
        values = {}
        target_epsilons, counts = with_counts(target_epsilons, counts)
        for name, given in (("target_epsilons", target_epsilons), ("counts", counts)):
            values[name] = torch.as_tensor(
                _checks.in_interval(name, given, 0, math.inf, closed="neither"), dtype=torch.float64
            )
            if values[name].ndim != 1 or len(values[name]) == 0:
                raise ValueError(
                    f"{name} must be a list with one entry for each group, got shape "
                    f"{tuple(values[name].shape)}"
                )
        _checks.same_length(**values)
        budgets = values["target_epsilons"].cpu()
        self.budgets, self.which = torch.unique(budgets, return_inverse=True)
        if len(self.budgets) > _MANY:
            self.budgets, self.which = torch.unique(rounded_down(budgets), return_inverse=True)
        shares = values["counts"].cpu() / values["counts"].sum().cpu()
        self.weights = torch.zeros_like(self.budgets).index_add_(0, self.which, shares)

    def harmonic_mean(self, values):
        return 1 / float((self.weights / values).sum())

    def lumped(self, search):
        """Few budgets with weights that stand for all of them."""
        nodes = nodes_of(self.budgets, search.searched, 3 * search.spacing)
        if nodes is self.budgets:
            return nodes, self.weights
        left, share = between(self.budgets, nodes)
        weights = torch.zeros_like(nodes).index_add_(0, left, self.weights * (1 - share))
        return nodes, weights.index_add_(0, left + 1, self.weights * share)


def with_counts(target_epsilons, counts):
    """Budgets and counts as lists or arrays, of one number, one for each group, or {budget: share}.

    >>> with_counts({1.0: 0.2, 8.0: 0.8}, None), with_counts(3.0, None)
    (([1.0, 8.0], [0.2, 0.8]), ([3.0], [1.0]))
    """
    if isinstance(target_epsilons, Mapping):
        if counts is not None:
            raise ValueError(
                f"counts must be None where target_epsilons is {{budget: share}}, got "
                f"{counts!r:.80}"
            )
        _check_nobody_opts_out(list(target_epsilons))
        return list(target_epsilons), list(target_epsilons.values())
    target_epsilons, counts = _checks.unlabelled(target_epsilons), _checks.unlabelled(counts)
    _check_nobody_opts_out(target_epsilons)
    if np.ndim(target_epsilons) == 0:
        target_epsilons = [
            _checks.number("target_epsilons", target_epsilons, 0, math.inf, closed="neither")
        ]
        counts = [1.0] if counts is None else [counts] if np.ndim(counts) == 0 else counts
    return target_epsilons, [1.0] * len(target_epsilons) if counts is None else counts


def _check_nobody_opts_out(budgets):
    """A budget of 0 is that of a person whose data are not used at all."""
    if (_checks.flat_doubles("target_epsilons", budgets) == 0).any():
        raise ValueError(
            "target_epsilons must lie in (0, inf), got 0: leave the data of persons who opt out "
            "out of the data set, and count only the others in n"
        )


def budgets_for(target_epsilons: Any, n: int, *, persons: Any = None) -> torch.Tensor:
    """The budgets of n examples, (n,) float64, from one number, one for each, or {budget: share}.

    Shares are of the examples and add up to 1. They are rounded to whole numbers of examples, by
    the largest remainders, and dealt out by a fixed permutation, so that neither the order of the
    data nor their values decide who gets which budget.

    A pandas Series goes by its labels if they are the names of `persons`, (n,), the order in which
    budgets come out, such as `by_person(...).persons`. Without persons its labels must count from
    0: others leave open whose budget is whose.

    Raises:
        ValueError: a budget that is not above 0 and finite, a wrong number of them, labels that
            leave their order open, or shares that do not add up to 1.

    >>> budgets_for({1.0: 0.25, 8.0: 0.75}, 4)
    tensor([8., 8., 8., 1.], dtype=torch.float64)
    >>> budgets_for(3.0, 2)
    tensor([3., 3.], dtype=torch.float64)
    """
    n = _checks.whole_number("n", n, 1, _checks.MOST_EXAMPLES)
    given = _checks.in_order("target_epsilons", target_epsilons, persons)
    if isinstance(given, Mapping):
        if not given:
            raise ValueError("target_epsilons must hold one budget at least, got {}")
        budgets, shares = list(given), list(given.values())
        _check_nobody_opts_out(budgets)
        _checks.in_interval("target_epsilons", budgets, 0, math.inf, closed="neither")
        _checks.in_interval("target_epsilons' shares", shares, 0, 1)
        if abs(math.fsum(shares) - 1) > 1e-9:
            raise ValueError(f"target_epsilons' shares must add up to 1, got {math.fsum(shares):g}")
        exact = np.asarray(shares, dtype=float) * n
        counts = np.floor(exact + 1e-9).astype(int)
        counts[np.argsort(counts - exact, kind="stable")[: n - counts.sum()]] += 1
        dealt = torch.tensor(budgets, dtype=torch.float64).repeat_interleave(
            torch.from_numpy(counts)
        )
        # whose draws NumPy never changes
        return dealt[torch.from_numpy(np.random.RandomState(0).permutation(n))]
    _check_nobody_opts_out(given)
    _checks.in_interval("target_epsilons", given, 0, math.inf, closed="neither")
    budgets = _checks.tensor("target_epsilons", given, torch.float64).cpu()
    if budgets.shape not in ((), (n,)):
        raise ValueError(
            f"target_epsilons must be a number, ({n},) or {{budget: share}}, got "
            f"{tuple(budgets.shape)}"
        )
    return budgets.expand(n).clone()


def rounded_down(budgets):
    """Budgets whose logarithms lie on a grid, each at most the one that it stands for."""
    first = budgets.min()
    return torch.minimum(
        first * torch.exp(_APART * torch.floor(torch.log(budgets / first) / _APART)), budgets
    )


def nodes_of(budgets, most, spacing):
    """The budgets themselves if at most `most`, else budgets with evenly spaced logarithms."""
    first, last = float(budgets[0].log()), float(budgets[-1].log())
    count = max(4, math.ceil((last - first) / spacing) + 1)
    if len(budgets) <= max(most, count):
        return budgets
    nodes = torch.linspace(first, last, count, dtype=torch.float64).exp()
    nodes[0], nodes[-1] = budgets[0], budgets[-1]
    return nodes


def between(budgets, nodes):
    """The node at or before each budget, and how far on to the next it lies, in logarithms."""
    left = (torch.searchsorted(nodes, budgets, right=True) - 1).clamp(0, len(nodes) - 2)
    share = (budgets / nodes[left]).log() / (nodes[left + 1] / nodes[left]).log()
    return left, share.clamp(0, 1)


def interpolate(budgets, nodes, values):
    """The values of nodes at budgets."""
    left, share = between(budgets, nodes)
    return torch.lerp(values[left], values[left + 1], share)


def safe_interpolation(budgets, nodes, values):
    """An upper bound on a curve through evenly spaced points, if its bend keeps its sign over three
    stretches.

    Where it bends upwards its chord lies above it, where it bends downwards the chords of the
    stretches beside, prolonged.
    """
    left, share = between(budgets, nodes)
    rises = values.diff()
    before = values[left] + share * rises[(left - 1).clamp(min=0)]
    after = values[left + 1] - (1 - share) * rises[(left + 1).clamp(max=len(rises) - 1)]
    before = torch.where(left == 0, after, before)
    after = torch.where(left == len(rises) - 1, before, after)
    chord = torch.lerp(values[left], values[left + 1], share)
    return torch.maximum(chord, torch.minimum(before, after))
