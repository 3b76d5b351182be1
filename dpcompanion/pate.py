r"""PATE with a privacy budget for each group of examples: weighting and upsampling.

PATE (Papernot et al. 2017, 2018) trains teachers on disjoint parts of the private data.  For each of T public
inputs the teachers vote, Gaussian noise hides the histogram, and its largest entry becomes the label (GNMax).  A
student learns from the labels.  Adding or removing an example changes one teacher, who moves one vote from a
class to another::

    histogram + N(0, s^2 I),    L2 sensitivity sqrt(2).

Individualised PATE (Boenisch et al. 2022, the baseline of Boenisch et al. 2023, appendix D.4) gives group p more say:

* *weighting*: teachers hold examples of one group, and a vote from group p counts w_p;
* *upsampling*: an example of group p is in the parts of u_p teachers, all of whose votes it may move.

Either way the sensitivity of group p is sqrt(2) w_p (or u_p), and T labels cost it what a Gaussian mechanism of
sensitivity over noise sqrt(2 T) w_p / s costs, exactly: no search is needed.  Votes that agree cost less than that;
how much less is known from the votes only (`rdp_of_votes`, theorem 6 of Papernot et al. 2018), so that such an epsilon
is itself private.

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
from dpcompanion.accounting import DEFAULT_ORDERS, gaussian_epsilon, gaussian_mu, rdp_to_epsilon


@dataclasses.dataclass(frozen=True, eq=False)
class PateParameters:
    """The standard deviation of the noise on the histogram, and how much of it an example of each group can move:
    `weights`, (P,) float64, the weight of a vote or the number of copies."""

    noise_std: float
    weights: torch.Tensor

    def epsilons(self, delta: float, *, queries: int) -> torch.Tensor:
        """(P,) epsilons of the groups after so many labels, whatever the votes: exact, add or remove one example."""
        return gaussian_epsilon(
            math.sqrt(2 * _checks.whole_number("queries", queries, 1)) * self.weights / self.noise_std, delta
        )


def weighted_parameters(target_epsilons: Array, counts: Array, *, target_delta: float, queries: int) -> PateParameters:
    r"""Weighting: votes that count as much as each budget allows, with mean 1, and the noise that goes with them.

    Args:
        target_epsilons: (P,) budgets.
        counts: (P,) numbers of teachers of each group, or their shares.
        target_delta: in (0, 1).
        queries: number of labels T.

    With mu_p the sensitivity over noise at which the Gaussian mechanism costs (eps_p, delta), weights are proportional
    to mu_p and the noise is sqrt(2 T) / \sum_p (share_p mu_p).

    >>> weighted_parameters([1.0, 3.0], [1, 1], target_delta=1e-5, queries=100).epsilons(1e-5, queries=100)
    tensor([1.0000, 3.0000], dtype=torch.float64)
    """
    reach, shares = _reach(target_epsilons, counts, target_delta)
    queries = _checks.whole_number("queries", queries, 1)
    mean = float(shares @ reach)
    return PateParameters(math.sqrt(2 * queries) / mean, reach / mean)


def upsampled_parameters(
    target_epsilons: Array, *, target_delta: float, queries: int, copies: int = 1
) -> PateParameters:
    """Upsampling: in how many teachers' parts examples are, and the noise at which no budget is exceeded.

    Examples of the strictest budget are in `copies` parts, the others in as many as their budgets allow, a whole
    number. More copies spend the budgets more evenly.

    Args:
        target_epsilons: (P,) budgets.
        target_delta: in (0, 1).
        queries: number of labels T.
        copies: at least 1.

    >>> found = upsampled_parameters([1.0, 2.0, 3.0], target_delta=1e-5, queries=200)
    >>> found.weights.tolist(), [round(e, 2) for e in found.epsilons(1e-5, queries=200).tolist()]
    ([1.0, 1.0, 2.0], [1.0, 1.0, 2.15])
    """
    reach, _ = _reach(target_epsilons, torch.ones(len(torch.as_tensor(target_epsilons).reshape(-1))), target_delta)
    queries, copies = _checks.whole_number("queries", queries, 1), _checks.whole_number("copies", copies, 1)
    # A hair, so that a ratio that is a whole number but for rounding errors counts as one.
    times = torch.floor(copies * reach / reach.min() * (1 + 1e-9))
    return PateParameters(math.sqrt(2 * queries) * float((times / reach).max()), times)


def histograms(votes: Array, weights: Array, *, classes: int) -> torch.Tensor:
    """Weighted votes for each class: votes (teachers, queries), whole numbers; weights (teachers,). Returns (queries,
    classes).

    >>> histograms([[0, 1], [1, 1], [1, 2]], [1.0, 0.5, 2.0], classes=3)
    tensor([[1.0000, 2.5000, 0.0000],
            [0.0000, 1.5000, 2.0000]], dtype=torch.float64)
    """
    votes, weights = torch.as_tensor(votes), torch.as_tensor(weights, dtype=torch.float64)
    _checks.in_interval("weights", weights, 0, math.inf, closed="left")
    _checks.in_interval("votes", votes, 0, _checks.whole_number("classes", classes, 2) - 1)
    if votes.ndim != 2 or weights.shape != votes.shape[:1]:
        raise ValueError(
            f"votes must have shape (teachers, queries) and weights (teachers,), got "
            f"{tuple(votes.shape)} and {tuple(weights.shape)}"
        )
    return torch.einsum("t,tqc->qc", weights, torch.nn.functional.one_hot(votes.long(), classes).double())


def noisy_labels(histogram: torch.Tensor, noise_std: float, generator: torch.Generator) -> torch.Tensor:
    """The label of each query, (queries,): the largest entry of the histogram (queries, classes) with noise.

    Raises ValueError for noise that is not above 0 and finite, and for a histogram that is not of finite numbers.
    """
    noise_std = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    _checks.in_interval("histogram", histogram, -math.inf, math.inf, closed="neither")
    _checks.generator("generator", generator)
    noise = torch.randn(histogram.shape, dtype=torch.float64, generator=generator, device=generator.device)
    return (histogram + noise_std * noise.to(histogram.device)).argmax(dim=1)


def rdp_of_votes(
    histogram: torch.Tensor, parameters: PateParameters, *, orders: Array = DEFAULT_ORDERS
) -> torch.Tensor:
    r"""Rényi divergence that one label costs each group, given the votes: (queries, P, orders).

    With q a bound on the probability that the noise changes the label, which grows with
    exp(-gap^2 / 4 s^2), theorem 6 of Papernot et al. 2018 bounds the divergence from the outcome at these votes to
    that at any neighbouring ones; for group p its Rényi divergences are those of noise s / w_p. Where the theorem does
    not apply or gives more, the bound that holds for all votes, order w_p^2 / s^2, stands.

    It is one direction: the one that starts from neighbouring votes depends on theirs. And it depends on the votes, so
    on the private data: releasing it takes a mechanism of its own. Before the labels are drawn, plan with
    `PateParameters.epsilons`.

    Args:
        histogram: (queries, classes), weighted votes, at least 0.
        parameters: `PateParameters`.
        orders: (orders,), above 1.

    Returns float64, nats.

    Raises:
        ValueError: votes that are negative or not finite, or an order that is not above 1.
    """
    _checks.in_interval("histogram", histogram, 0, math.inf, closed="left")
    _checks.in_interval("orders", orders, 1, math.inf, closed="neither")
    histogram = torch.as_tensor(histogram, dtype=torch.float64)
    orders = torch.as_tensor(orders, dtype=torch.float64)
    log_q = _log_changed(histogram, parameters.noise_std)[:, None, None]
    variance = (parameters.noise_std / parameters.weights)[:, None] ** 2
    always = (orders / variance).expand(len(histogram), -1, -1)
    # The two orders at which the plain bound enters, as Papernot et al. choose them for Gaussian noise.
    second = torch.sqrt(-variance * log_q)
    first = second + 1
    rdp_first, rdp_second = first / variance, second / variance
    corrections = second * (torch.log1p(1 / second) + torch.log1p(1 / (second - 1).clamp(min=1e-300)))
    applies = (
        (second > 1) & (orders < first) & (-log_q > rdp_second) & (log_q <= (second - 1) * rdp_second - corrections)
    )
    log_kept = _log1mexp(log_q)
    log_a = log_kept - _log1mexp(((log_q + rdp_second) * (1 - 1 / second)).clamp(max=-1e-300))
    log_b = rdp_first - log_q / second
    given = torch.logaddexp(log_kept + (orders - 1) * log_a, log_q + (orders - 1) * log_b) / (orders - 1)
    return torch.where(applies, torch.minimum(always, given.clamp(min=0)), always)


def epsilons_of_votes(
    histogram: torch.Tensor, parameters: PateParameters, delta: float, *, orders: Array = DEFAULT_ORDERS
) -> torch.Tensor:
    """(P,) epsilons of the groups after the labels of these votes, by RDP; as private as `rdp_of_votes`.

    Args:
        histogram: (queries, classes), weighted votes, at least 0.
        parameters: `PateParameters`.
        delta: in (0, 1).
        orders: (orders,), above 1; each group's epsilon is that of the best.

    Raises:
        ValueError: an argument outside its range.
    """
    rdp = rdp_of_votes(histogram, parameters, orders=orders).sum(dim=0)
    return rdp_to_epsilon(rdp, orders, delta)[0]


def _log_changed(histogram, noise_std):
    """ln of a bound on the probability that the label is not the class with most votes, (queries,)."""
    top = histogram.argmax(dim=1, keepdim=True)
    gaps = histogram.gather(1, top) - histogram
    log_each = torch.special.log_ndtr(-gaps / (noise_std * math.sqrt(2))).scatter(1, top, -math.inf)
    # The class with most votes wins at least as often as any other.
    return torch.logsumexp(log_each, dim=1).clamp(max=math.log1p(-1 / histogram.shape[1]))


def _log1mexp(x):
    """ln(1 - e^x) for x < 0."""
    return torch.where(x > -0.7, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _reach(target_epsilons, counts, target_delta):
    """The largest sensitivity over noise that each budget allows, (P,), and the groups' shares."""
    epsilons = torch.as_tensor(
        _checks.in_interval("target_epsilons", target_epsilons, 0, math.inf, closed="neither"), dtype=torch.float64
    )
    counts = torch.as_tensor(_checks.in_interval("counts", counts, 0, math.inf, closed="neither"), dtype=torch.float64)
    for name, values in (("target_epsilons", epsilons), ("counts", counts)):
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(f"{name} must be a list with one entry for each group, got shape {tuple(values.shape)}")
    _checks.same_length(target_epsilons=epsilons, counts=counts)
    target_delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
    return gaussian_mu(epsilons, target_delta), counts / counts.sum()
