r"""A point's own (epsilon, delta), by the privacy loss itself along tilted runs.

`exact_composition` gives a moment of the loss, and a moment turned into an epsilon is looser than
the loss distribution that holds uniformly anyway. The runs know more. In the view that shows the
batches of the other points the likelihood ratio r of every step can be computed along a run
(`step_loss`), and so can the whole loss

.. math:: S = \sum_t \ln r_t \quad\text{("remove")}, \qquad S = -\sum_t \ln r_t \quad\text{("add")}.

Any run whose noise follows another distribution, a proposal, of known density is a draw that can be
weighted. If G_l is the logarithm of the density of proposal l over that of the first training along
a run, whatever proposal sampled the run, and l has the share :math:`c_l` of the runs, then

.. math:: \delta(\varepsilon) = E[(1 - e^{\varepsilon - S})_+ \, w], \qquad w = 1 \Big/ \sum_l c_l
    e^{G_l},

holds without bias: for the view with equality, so for training as a bound. Tilting at order a has
:math:`G = (a-1) S - \sum_t \ln A_a(\Delta_t)`, an ordinary run is one of order 1 with G = 0, and no
order has to be the right one. Orders alone miss how a point whose gradient fades is given away: by
one step, early, in which a point that was drawn meets noise of four standard deviations. Low orders
do not reach there, and high ones send *every* early step far beyond. So a proposal may **jump**: at
any step, with a small probability, x enters k times with k uniform up to `REACH`
(`proposal_counts`, `proposal_log_density`; "remove" alone, since the loss of "add" is bounded and
orders are enough).

What the numbers promise. The `estimate` of `loss_epsilon` is an *estimate*: a path that no run took
counts nothing. With a few dozen runs it is low more often than high, and its interval covers less
than it says. What n runs prove is the `upper_bound`: the weighted values are at most :math:`1/c_l`
times Chernoff's bound of the worst case, so that a confidence bound exists (`log_mean_bound`), but
it cannot exclude paths rarer than 3/n of the mixture. A bound without sampling needs norms that are
fixed beforehand: clip the point's gradients to a schedule, and account for that schedule
(`dpcompanion.accounting.histories`).

A run of four steps whose gradient shrinks as the model moves, one parameter, q = 0.3, s = 1:

>>> from dpcompanion.accounting import compute_epsilon
>>> from dpcompanion.per_instance import proposal_counts, proposal_log_density, log_mass, step_loss
>>> generator, each = torch.Generator().manual_seed(0), 400
>>> step, proposals = (
...     {"sample_rate": 0.3, "noise_std": 1.0},
...     [(2, 0.1), (4, 0.0), (7, 0.0)],
... )  # orders, jumps
>>> theta, losses = (
...     torch.zeros(3, each, dtype=torch.float64),
...     torch.zeros(3, each, dtype=torch.float64),
... )
>>> densities = torch.zeros(
...     3, 3, each, dtype=torch.float64
... )  # (proposals looked at, proposals of the runs, runs)
>>> for _ in range(4):
...     gradient = 1 / (1 + theta**2)
...     count = torch.stack(
...         [
...             proposal_counts(g, order=a, jumps=j, generator=generator, **step)
...             for g, (a, j) in zip(gradient, proposals)
...         ]
...     )
...     moved = count * gradient + torch.randn(3, each, generator=generator, dtype=torch.float64)
...     here = moved[..., None], gradient[..., None]
...     densities += torch.stack(
...         [proposal_log_density(*here, order=a, jumps=j, **step) for a, j in proposals]
...     )
...     losses += step_loss(*here, **step)
...     theta += moved
>>> found = loss_epsilon(
...     losses.flatten(),
...     densities.flatten(1).T,
...     delta=1e-5,
...     worst_case=compute_epsilon(sample_rate=0.3, noise_multiplier=1.0, steps=4, delta=1e-5),
...     floors=[
...         (a, 4 * (float(log_mass(1.0, order=a, **step)) - math.log1p(-j))) for a, j in proposals
...     ],
... )
>>> f"about {found.estimate:.1f}, at most {found.upper_bound:.1f}, uniform {found.worst_case:.1f}"
'about 3.0, at most 3.9, uniform 4.8'
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import overload

import torch
from scipy.special import ndtri

from dpcompanion import _checks
from dpcompanion._types import Array, Numbers
from dpcompanion.accounting.search import bisect
from dpcompanion.per_instance.confidence import log_mean_bound

_LEVELS = 200  # epsilons that the upper bound tries, from the worst case down
_HALVINGS = 60


@overload
def loss_divergence(
    losses: Sequence[float], log_densities: Array, *, order: float, shares: Array | None = ...
) -> float: ...
@overload
def loss_divergence(
    losses: Array, log_densities: Array, *, order: float, shares: Array | None = ...
) -> torch.Tensor: ...
def loss_divergence(
    losses: Array, log_densities: Array, *, order: float, shares: Array | None = None
) -> float | torch.Tensor:
    r"""The divergence of any `order` above 1 from the same runs, nats:
    :math:`\ln E[e^{(\alpha-1)S} w] / (\alpha-1)`.

    An estimate, as that of `exact_composition`, by all runs in place of those that were tilted at
    this order.

    Args:
        losses: (runs, ...) S of each run, the sum of its `step_loss`.
        log_densities: (runs, proposals, ...) G of every proposal along each run, whichever sampled
            the run.
        order: :math:`\alpha`, above 1.
        shares: (proposals,) of the runs that were sampled by each, above 0, with the sum 1; equal
            by default.

    Returns:
        A float where `losses` is a list of numbers, else (...) float64.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite.

    >>> losses, masses = torch.tensor([0.5, 1.5, 2.5]), torch.tensor([0.2, 0.3, 0.4])
    >>> loss_divergence(
    ...     losses, (losses - masses)[:, None], order=2
    ... )  # ln of the mean of exp(masses)
    tensor(0.3033, dtype=torch.float64)
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    given = _checks.entries(losses)
    losses, log_weights = _weighted(losses, log_densities, shares)
    found = (torch.logsumexp((order - 1) * losses + log_weights, 0) - math.log(len(losses))) / (
        order - 1
    )
    return _checks.as_given(found, *given)


@dataclasses.dataclass(frozen=True, eq=False)
class EpsilonEstimate:
    """What tilted runs say about an epsilon at one `delta`, in one direction; tensors of one shape.

    * `estimate`: where the estimate of delta falls to `delta`;
    * `low`, `high`: where it does with as many standard errors of its logarithm less or more as
      `confidence` has in a normal law. The interval describes the scatter of the runs that were
      seen, and is no guarantee;
    * `upper_bound`: epsilon is at most this, with probability `confidence` over the runs, each
      entry by itself;
    * `worst_case`: the uniform epsilon, which none of the others exceeds.
    """

    delta: float
    runs: int
    confidence: float
    estimate: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    upper_bound: torch.Tensor
    worst_case: torch.Tensor


def loss_epsilon(
    losses: Array,
    log_densities: Array,
    *,
    delta: float,
    worst_case: Numbers,
    floors: Array | None = None,
    shares: Array | None = None,
    confidence: float = 0.95,
) -> EpsilonEstimate:
    r"""Epsilon of one direction at `delta`, from independent runs by several proposals.

    Args:
        losses: (runs, ...) S of each run, the sum of its `step_loss`.
        log_densities: (runs, proposals, ...) G of every proposal along each run, whichever sampled
            the run.
        delta: in (0, 1).
        worst_case: the uniform epsilon at this delta, by the privacy loss distribution of the whole
            run (`dpcompanion.accounting.compute_epsilon`); a number or (...).
        floors: (proposals, 2) pairs (a, m) with :math:`G \ge (a-1) S - m` on every path: the order
            of the proposal, and m the steps times `log_mass` at the clip norm, less the steps times
            ln(1 - jumps). The upper bound cannot do without, and is `worst_case` then.
        shares: (proposals,) of the runs that were sampled by each, above 0, with the sum 1; equal
            by default.
        confidence: of the interval, and of the upper bound, in (0, 1). For both directions divide
            what is missing to 1 between them, and take the larger of the two.

    Returns:
        An `EpsilonEstimate`. The upper bound tries epsilons that are fixed beforehand, from the
        worst case down, and stops at the first whose delta it cannot bound by `delta`; only the
        first that is too small can do harm, so that trying many costs nothing. It holds as well
        where runs are divided among the proposals in fixed shares.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, densities below their
            floors.

    >>> losses = torch.tensor([1.0, 2.0, 3.0, 2.5])
    >>> masses = torch.tensor([6.0, 6.5, 6.2, 6.6])  # tilted at order 5
    >>> densities = (4 * losses - masses)[:, None]
    >>> found = loss_epsilon(losses, densities, delta=1e-2, worst_case=4.0, floors=[(5, 7.0)])
    >>> f"{found.estimate:.2f} in [{found.low:.2f}, {found.high:.2f}]"
    '1.89 in [1.00, 2.26]'
    >>> f"at most {found.upper_bound:.2f}"
    'at most 2.20'
    """
    delta = _checks.number("delta", delta, 0, 1, closed="neither")
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    _checks.in_interval("worst_case", worst_case, 0, math.inf, closed="left")
    densities = log_densities
    losses, log_weights = _weighted(losses, densities, shares)
    worst = torch.as_tensor(worst_case, dtype=torch.float64, device=losses.device).expand(
        losses.shape[1:]
    )
    errors = float(ndtri((1 + confidence) / 2))

    def where_it_falls(signed):
        def above(epsilon):
            mean, error = _mean_and_error(_log_values(losses, log_weights, epsilon))
            if signed and len(losses) == 1:  # no scatter to tell of: nothing is excluded
                return torch.full_like(mean, signed > 0, dtype=torch.bool)
            return (mean * torch.exp(signed * error / mean) if signed else mean) > delta

        return _crossing(above, worst)

    estimate, low, high = (where_it_falls(signed) for signed in (0.0, -errors, errors))
    bound = worst.clone()
    if floors is not None:
        floors = _checked_floors(floors, losses, densities)
        bound = _upper_bound(losses, log_weights, floors, shares, delta, worst, confidence)
    return EpsilonEstimate(
        delta,
        len(losses),
        confidence,
        estimate,
        torch.minimum(low, estimate),
        torch.maximum(high, estimate),
        bound,
        worst,
    )


def _weighted(losses, log_densities, shares):
    """The losses, and ln w of each run: (runs, ...) float64 both."""
    _checks.in_interval("losses", losses, -math.inf, math.inf, closed="neither")
    _checks.in_interval("log_densities", log_densities, -math.inf, math.inf, closed="neither")
    losses = torch.as_tensor(losses, dtype=torch.float64)
    densities = torch.as_tensor(log_densities, dtype=torch.float64, device=losses.device)
    if losses.ndim == 0 or len(losses) == 0:
        raise ValueError(
            f"losses must be (runs, ...), one run or more, got shape {tuple(losses.shape)}"
        )
    if (
        densities.ndim != losses.ndim + 1
        or densities.shape[:1] + densities.shape[2:] != losses.shape
        or (not densities.shape[1])
    ):
        raise ValueError(
            "log_densities must have the shape (runs, proposals, ...), here "
            f"{(len(losses), 'proposals', *losses.shape[1:])}, got {tuple(densities.shape)}"
        )
    shares = _shares(shares, densities.shape[1]).to(losses.device)
    return losses, -torch.logsumexp(
        densities + torch.log(shares).view((-1,) + (1,) * (losses.ndim - 1)), 1
    )


def _shares(shares, proposals):
    if shares is None:
        return torch.full((proposals,), 1 / proposals, dtype=torch.float64)
    _checks.in_interval("shares", shares, 0, 1, closed="right")
    shares = torch.as_tensor(shares, dtype=torch.float64).reshape(-1)
    if len(shares) != proposals or abs(float(shares.sum()) - 1) > 1e-9:
        raise ValueError(
            f"shares must be one for each of the {proposals} proposals and have the sum 1, got "
            f"{shares.tolist()}"
        )
    return shares


def _checked_floors(floors, losses, densities):
    """(proposals, 2): orders less 1, and masses, raised to what rounding made of the densities."""
    _checks.in_interval("floors", floors, 0, math.inf, closed="left")
    floors = torch.as_tensor(floors, dtype=torch.float64).cpu()
    densities = torch.as_tensor(densities, dtype=torch.float64)
    if floors.shape != (densities.shape[1], 2):
        raise ValueError(
            f"floors must be a pair for each of the {densities.shape[1]} proposals, got shape "
            f"{tuple(floors.shape)}"
        )
    _checks.in_interval("floors", floors[:, 0], 1, math.inf, closed="left")
    for row, (order, mass) in enumerate(floors.tolist()):
        most = float(((order - 1) * losses - densities[:, row].to(losses)).max())
        if most > mass + 1e-6 * (1 + abs(mass)):
            raise ValueError(
                f"floors must lie below log_densities, but for proposal {row} of order {order:g} a "
                f"run has the mass {most:g}, above {mass:g}"
            )
        floors[row, 1] = max(mass, most)
    return floors


def _log_values(losses, log_weights, epsilon):
    """ln of (1 - e^(epsilon - S))_+ w, -inf where the loss is at most epsilon."""
    above = losses - epsilon
    return (
        torch.where(above > 0, torch.log(-torch.expm1(-above.clamp(min=1e-300))), -math.inf)
        + log_weights
    )


def _mean_and_error(log_values):
    """The mean of the values over the runs, and its standard error."""
    runs, top = len(log_values), log_values.max(0).values
    top = torch.where(top.isneginf(), torch.zeros_like(top), top)
    scaled, scale = torch.exp(log_values - top), torch.exp(top)
    if runs == 1:
        return scaled[0] * scale, torch.full_like(top, math.inf)
    return scaled.mean(0) * scale, scaled.std(0) / math.sqrt(runs) * scale


def _crossing(above, largest):
    """The end of the epsilons, from 0 to `largest`, at which `above` holds: 0 if nowhere."""
    low = torch.zeros_like(largest)
    found = bisect(lambda epsilon: ~above(epsilon), good=largest, bad=low, halvings=_HALVINGS)
    return torch.where(above(largest), largest, torch.where(above(low), found, 0.0))


def _upper_bound(losses, log_weights, floors, shares, delta, worst, confidence):
    """The smallest level, from above, down to which delta is bounded at the given confidence."""
    bound, passed = worst.clone(), torch.ones_like(worst, dtype=torch.bool)
    for level in range(1, _LEVELS + 1):
        epsilon = worst * (1 - level / _LEVELS)
        log_largest = _log_largest(epsilon, floors, shares)
        # A value is a hair above its own bound at times, by rounding.
        values = torch.minimum(_log_values(losses, log_weights, epsilon), log_largest)
        passed = passed & (
            log_mean_bound(values, log_largest, confidence=confidence) <= math.log(delta)
        )
        if not passed.any():
            break
        bound = torch.where(passed, epsilon, bound)
    return bound


def _log_largest(epsilon, floors, shares):
    """ln of the most that (1 - e^(epsilon - S))_+ w can be, (...): concave in S, so bisected."""
    steep, offset = floors[:, 0] - 1, torch.log(_shares(shares, len(floors))) - floors[:, 1]
    steep, offset = steep.to(epsilon.device), offset.to(epsilon.device)
    low, high = torch.full_like(epsilon, 1e-12), torch.full_like(epsilon, 50.0)

    def terms(x):
        return steep * (epsilon + x)[..., None] + offset

    for _ in range(_HALVINGS):  # not `bisect`: both ends are needed
        x = (low + high) / 2
        rising = 1 / torch.expm1(x) > (torch.softmax(terms(x), -1) * steep).sum(-1)
        low, high = torch.where(rising, x, low), torch.where(rising, high, x)
    # Beyond x = 50 the first factor is 1, and with order 1 in the list the second may go on.
    return torch.log(-torch.expm1(-high)) - torch.logsumexp(terms(low), -1) + 1e-9
