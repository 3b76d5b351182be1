r"""PATE with a privacy budget for each group of examples, by weighting.

PATE (Papernot et al. 2017, 2018) trains teachers on disjoint parts of the private data. For each of
T public inputs the teachers vote, Gaussian noise hides the histogram, and its largest entry becomes
the label (GNMax). A student learns from the labels. Adding or removing an example changes one
teacher, who moves one vote from a class to another::

    histogram + N(0, s^2 I),    L2 sensitivity sqrt(2).

Individualised PATE (Boenisch et al. 2022, the baseline of Boenisch et al. 2023, appendix D.4) gives
group p more say: teachers hold examples of one group, and a vote from group p counts w_p. The
sensitivity of group p is sqrt(2) w_p, and T labels cost it what a Gaussian mechanism of sensitivity
over noise sqrt(2 T) w_p / s costs, exactly: no search is needed.

That holds in floating point, too. Weights are rounded down to multiples of a public grid, 2^36 or
more of which fit into s, so that every histogram lies on it, and noise is rounded to it: the label
is read off the Gaussian mechanism, rounded afterwards (`dpcompanion.mechanism.secure`).

Plain GNMax: the test of confidence that comes before a label in Papernot et al. 2018 is not here.

>>> found = weighted_parameters([1.0, 2.0, 3.0], [34, 43, 23], target_delta=1e-5, queries=200)
>>> round(found.noise_std, 2), [round(w, 3) for w in found.weights.tolist()]
(42.35, [0.568, 1.062, 1.523])
"""

import dataclasses
import math

import torch

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.accounting import (
    Gaussian,
    LedgerEntry,
    PersonalCosts,
    gaussian_epsilon,
    gaussian_mu,
)
from dpcompanion.mechanism.noise import gaussian_noise
from dpcompanion.mechanism.secure import MOST_CELLS, SecureStream, grid_of, snapped

_MOST_CLASSES = 10**6
# Cells of the votes' grid in one of `grid_of`: weights lose less than 2^-36 of the noise.
_FINER = 2.0**12


@dataclasses.dataclass(frozen=True, eq=False)
class PateParameters:
    """The standard deviation of the noise on the histogram, and `weights`, (P,) float64: what a
    vote of each group counts.
    """

    noise_std: float
    weights: torch.Tensor

    def __post_init__(self):
        number = _checks.number("noise_std", self.noise_std, 0, math.inf, closed="neither")
        object.__setattr__(self, "noise_std", number)
        weights = _checks.tensor("weights", self.weights, torch.float64).detach().clone()
        _checks.in_interval("weights", weights, 0, math.inf, closed="neither")
        if weights.ndim != 1 or not len(weights):
            raise ValueError(
                f"weights must have one entry for each group, got shape {tuple(weights.shape)}"
            )
        object.__setattr__(self, "weights", weights)

    def epsilons(self, delta: float, *, queries: int) -> torch.Tensor:
        """(P,) epsilons of the groups after so many labels, whatever the votes: exact, add or
        remove one example.
        """
        return gaussian_epsilon(
            math.sqrt(2 * _checks.whole_number("queries", queries, 1))
            * self.weights
            / self.noise_std,
            delta,
        )

    def ledger_entry(self, *, queries: int, groups: Array | None = None) -> LedgerEntry:
        """What so many labels cost, for `accounting.Ledger.add`: at most what they cost the group
        with the largest weight; and with `groups`, (n,) from 0, the group of each example, what
        they cost its own. Neighbours: add or remove one example.

        Raises:
            ValueError: queries that are no whole number above 0, or groups without a weight.

        >>> from dpcompanion.accounting import Ledger
        >>> found = weighted_parameters([1.0, 3.0], [1, 1], target_delta=1e-5, queries=100)
        >>> entry = found.ledger_entry(queries=100, groups=[0, 0, 1])
        >>> [round(epsilon, 4) for epsilon in Ledger([entry]).epsilons(1e-5).tolist()]
        [1.0, 1.0, 3.0]
        """
        queries = _checks.whole_number("queries", queries, 1)
        costs = [
            Gaussian(self.noise_std / (math.sqrt(2) * weight), queries)
            for weight in self.weights.tolist()
        ]
        worst = costs[int(self.weights.argmax())]
        if groups is None:
            return LedgerEntry(worst)
        groups = _checks.tensor("groups", groups)
        _checks.in_interval("groups", groups, 0, len(costs) - 1)
        if groups.ndim != 1 or groups.is_floating_point():
            raise ValueError(
                "groups must be whole numbers, one for each example, got shape "
                f"{tuple(groups.shape)} of {groups.dtype}"
            )
        return LedgerEntry(worst, promised=PersonalCosts.each(costs, groups))


def weighted_parameters(
    target_epsilons: Array, counts: Array, *, target_delta: float, queries: int
) -> PateParameters:
    r"""Weighting: votes count as much as each budget allows, with mean 1, and the noise for them.

    Weights are rounded down to the grid of the noise, so that their mean is a trifle below 1.

    Args:
        target_epsilons: (P,) budgets.
        counts: (P,) numbers of teachers of each group, or their shares.
        target_delta: in (0, 1).
        queries: number of labels T.

    Raises:
        ValueError: an argument outside its range, or a budget so small that a vote would count for
            nothing on the grid.

    With mu_p the sensitivity over noise at which the Gaussian mechanism costs (eps_p, delta),
    weights are proportional to mu_p and the noise is sqrt(2 T) / \sum_p (share_p mu_p).

    >>> found = weighted_parameters([1.0, 3.0], [1, 1], target_delta=1e-5, queries=100)
    >>> found.epsilons(1e-5, queries=100)
    tensor([1.0000, 3.0000], dtype=torch.float64)
    """
    reach, shares = _reach(target_epsilons, counts, target_delta)
    queries = _checks.whole_number("queries", queries, 1)
    mean = float(shares @ reach)
    noise_std = math.sqrt(2 * queries) / mean
    grid = _grid(noise_std)
    weights = (reach / mean / grid).floor() * grid
    if not bool((weights > 0).all()):
        least = float(torch.as_tensor(target_epsilons, dtype=torch.float64).min())
        raise ValueError(
            f"target_epsilons must leave every vote a weight, but {least:g} is less than the noise "
            f"of {queries} queries resolves: leave its teachers out, or ask for fewer"
        )
    return PateParameters(noise_std, weights)


def histograms(votes: Array, weights: Array, *, classes: int) -> torch.Tensor:
    """Weighted votes for each class: votes (teachers, queries), whole numbers; weights (teachers,).
    Returns (queries, classes), of 10^6 classes at most.

    >>> histograms([[0, 1], [1, 1], [1, 2]], [1.0, 0.5, 2.0], classes=3)
    tensor([[1.0000, 2.5000, 0.0000],
            [0.0000, 1.5000, 2.0000]], dtype=torch.float64)
    """
    classes = _checks.whole_number("classes", classes, 2, _MOST_CLASSES)
    votes = _checks.tensor("votes", votes)
    weights = _checks.tensor("weights", weights, torch.float64)
    _checks.in_interval("weights", weights, 0, math.inf, closed="left")
    _checks.in_interval("votes", votes, 0, classes - 1)
    if votes.is_floating_point() and not torch.equal(votes, votes.round()):
        raise ValueError("votes must be whole numbers, the classes from 0, got fractions")
    if votes.ndim != 2 or weights.shape != votes.shape[:1]:
        raise ValueError(
            f"votes must have shape (teachers, queries) and weights (teachers,), got "
            f"{tuple(votes.shape)} and {tuple(weights.shape)}"
        )
    return torch.einsum(
        "t,tqc->qc", weights, torch.nn.functional.one_hot(votes.long(), classes).double()
    )


def noisy_labels(
    histogram: Array, noise_std: float, generator: torch.Generator | SecureStream | None = None
) -> torch.Tensor:
    """Each query's label, (queries,): the largest noisy entry of the histogram (queries, classes).

    Args:
        histogram: of `histograms`, with weights of `weighted_parameters`: those lie on the grid of
            the noise. Others are rounded to it, which moves an entry by half a cell at most.
        noise_std: standard deviation of the noise.
        generator: of the noise. By default a cipher under a key of the operating system, with
            noise on a grid: for labels that are released. Or a torch.Generator, for research:
            floats that anyone who knows its seed can subtract.

    Raises:
        ValueError: noise that is not above 0 and finite, or too little for a grid; a histogram that
            is not of finite numbers, or of another shape.

    >>> noisy_labels([[60.0, 1.0], [0.0, 61.0]], 1.5)
    tensor([0, 1])
    """
    noise_std = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    histogram = _checks.tensor("histogram", histogram)
    _checks.in_interval("histogram", histogram, -math.inf, math.inf, closed="neither")
    if histogram.ndim != 2 or not histogram.shape[1]:
        raise ValueError(
            "histogram must have shape (queries, classes), with a class at least, got "
            f"{tuple(histogram.shape)}"
        )
    if generator is None:
        generator = SecureStream()
    _checks.generator("generator", generator, SecureStream)
    if isinstance(generator, SecureStream):
        labels = _noisy_on_grid(histogram.cpu(), noise_std, generator).argmax(dim=1)
        return labels.to(histogram.device)
    return (
        histogram + gaussian_noise(histogram.shape, noise_std, generator, device=histogram.device)
    ).argmax(dim=1)


def _grid(noise_std):
    return grid_of(noise_std) / _FINER


def _noisy_on_grid(histogram, noise_std, stream):
    histogram = histogram.double()
    grid, most = _grid(noise_std), float(histogram.abs().max()) if histogram.numel() else 0.0
    if not grid >= 2.0**-400 or not most / grid <= MOST_CELLS:
        raise ValueError(
            f"noise_std must be at least 2^-14 of the largest entry of histogram, {most:g}, for "
            f"noise on a grid, got {noise_std:g}; a generator has floats"
        )
    exact = snapped(histogram, grid)
    return exact + stream.bound(exact).normal(exact.shape, noise_std, grid=grid)


def _reach(target_epsilons, counts, target_delta):
    """The largest sensitivity over noise that each budget allows, (P,), and the groups' shares."""
    epsilons = _checks.tensor("target_epsilons", target_epsilons, torch.float64)
    counts = _checks.tensor("counts", counts, torch.float64)
    for name, values in (("target_epsilons", epsilons), ("counts", counts)):
        _checks.in_interval(name, values, 0, math.inf, closed="neither")
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(
                f"{name} must be a list with one entry for each group, got shape "
                f"{tuple(values.shape)}"
            )
    _checks.same_length(target_epsilons=epsilons, counts=counts)
    target_delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
    return gaussian_mu(epsilons, target_delta), counts / counts.sum()
