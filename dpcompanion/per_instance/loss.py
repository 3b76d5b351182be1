r"""A point's own (epsilon, delta), by the privacy loss itself along tilted runs.

`exact_composition` gives a moment of the loss, and a moment turned into an epsilon is looser than the loss
distribution that everybody has anyway. The runs know more. In the view that shows the batches of the other points the
likelihood ratio r of every step can be computed along a run (`step_loss`), and so can the whole loss

.. math:: S = \sum_t \ln r_t \quad\text{("remove")}, \qquad S = -\sum_t \ln r_t \quad\text{("add")}.

A run tilted at order a has the density :math:`e^{(a-1) S - L_a}` with respect to the first of the two trainings, where
:math:`L_a = \sum_t \ln A_a(\Delta_t)` (for "add" B in place of A) is known along *any* run, whatever it was tilted by.
So runs tilted at several orders are draws from one mixture, in which order a has the share :math:`c_a`, and

.. math::
    \delta(\varepsilon) = E[(1 - e^{\varepsilon - S})_+ \, w], \qquad w = 1 \Big/ \sum_a c_a e^{(a-1) S - L_a},

holds without bias: for the view with equality, so for training as a bound. No order has to be the right one. An
ordinary run is a run of order 1, with :math:`L_1 = 0`.

What the numbers promise. `loss_delta` and the `estimate` of `loss_epsilon` are *estimates*: a path that no run took
counts nothing. What n runs prove is the `upper_bound`. The weighted values are at most :math:`1/c_a` times Chernoff's
bound of the worst case, so that a confidence bound exists (`log_mean_bound`), but it cannot exclude paths rarer than
3/n of the mixture. A bound without sampling needs norms that are fixed beforehand: clip the point's gradients to a
schedule, and account for that schedule (`dpcompanion.accounting.histories`).

A run of four steps whose gradient shrinks as the model moves, one parameter, q = 0.3, s = 1:

>>> from dpcompanion.accounting import compute_epsilon
>>> generator, orders, each = torch.Generator().manual_seed(0), (2, 4, 8), 500
>>> step = {"sample_rate": 0.3, "noise_std": 1.0}
>>> theta, losses = torch.zeros(3, each, dtype=torch.float64), torch.zeros(3, each, dtype=torch.float64)
>>> masses = torch.zeros(3, 3, each, dtype=torch.float64)                # (orders looked at, orders of the runs, runs)
>>> for _ in range(4):
...     gradient = 1 / (1 + theta**2)
...     masses += torch.stack([log_mass(gradient, order=a, **step) for a in orders])
...     count = torch.stack([tilted_counts(g, order=a, generator=generator, **step) for g, a in zip(gradient, orders)])
...     moved = count * gradient + torch.randn(3, each, generator=generator, dtype=torch.float64)
...     losses += step_loss(moved[..., None], gradient[..., None], **step)
...     theta += moved
>>> found = loss_epsilon(losses.flatten(), masses.flatten(1).T, orders=orders, delta=1e-5,
...     worst_case=compute_epsilon(sample_rate=0.3, noise_multiplier=1.0, steps=4, delta=1e-5),
...     worst_masses=[4 * float(log_mass(1.0, order=a, **step)) for a in orders])
>>> print(f"about {found.estimate:.1f}, at most {found.upper_bound:.1f}; everybody {found.worst_case:.1f}")
about 3.0, at most 3.8; everybody 4.8
"""

import dataclasses
import math

import torch
from scipy.special import ndtri

from dpcompanion import _checks
from dpcompanion.per_instance.confidence import log_mean_bound
from dpcompanion.per_instance.steps import DIRECTIONS, log_mass
from dpcompanion.per_instance.tilted import tilted_counts

__all__ = ["DeltaEstimate", "EpsilonEstimate", "log_mass", "loss_delta", "loss_divergence", "loss_epsilon", "step_loss",
           "tilted_counts"]

_LEVELS = 200            # epsilons that the upper bound tries, from the worst case down
_HALVINGS = 60


def step_loss(moved, gradient, *, sample_rate, noise_std, direction="remove"):
    r"""What a step of a run adds to its loss: :math:`\ln r` ("remove") or :math:`-\ln r` ("add").

    .. math:: r = 1 - q + q\, e^{\langle z, g\rangle/s^2 - \|g\|^2/2s^2}

    Args:
        moved: (..., parameters) z, the noisy sum less that of the *other* points' clipped gradients: for "remove" k
            gradients of x (`tilted_counts`) plus the noise, for "add" the noise (`tilted_noise`).
        gradient: (..., parameters) g, x's clipped gradient at the state in which the step began.
        sample_rate: q in (0, 1], a number or (...).
        noise_std: s above 0, a number or (...).
        direction: "remove" or "add".

    Returns:
        (...) float64, nats.

    >>> step_loss([[0.0], [3.0]], [[1.0], [1.0]], sample_rate=0.1, noise_std=1.0)
    tensor([-0.0401,  0.7506], dtype=torch.float64)
    """
    _checks.one_of("direction", direction, DIRECTIONS)
    _checks.in_interval("noise_std", noise_std, 0, math.inf, closed="neither")
    _checks.in_interval("sample_rate", sample_rate, 0, 1, closed="right")
    moved, gradient, q, noise = (torch.as_tensor(v, dtype=torch.float64) for v in (
        moved, gradient, sample_rate, noise_std))
    if not moved.ndim or moved.shape[-1] != gradient.shape[-1]:
        raise ValueError("moved and gradient must have the same number of parameters, got shapes "
                         f"{tuple(moved.shape)} and {tuple(gradient.shape)}")
    exponent = ((moved * gradient).sum(-1) - (gradient**2).sum(-1) / 2) / noise.to(moved.device) ** 2
    q = q.to(moved.device)
    log_ratio = torch.logaddexp(torch.log1p(-q), torch.log(q) + exponent)
    return log_ratio if direction == "remove" else -log_ratio


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaEstimate:
    """An unbiased estimate of a delta, and its standard error from the scatter over the runs; tensors of one shape."""

    estimate: torch.Tensor
    standard_error: torch.Tensor


def loss_delta(losses, log_masses, *, orders, epsilon, shares=None):
    r""":math:`\delta(\varepsilon) = E[(1 - e^{\varepsilon - S})_+ w]`, from independent tilted runs of several orders.

    Args:
        losses: (runs, ...) S of each run, the sum of its `step_loss`.
        log_masses: (runs, orders, ...) :math:`L_a`, the sums of `log_mass` of each order along each run.
        orders: of 1 or more, each once.
        epsilon: at least 0, a number or (...).
        shares: (orders,) of the runs that were tilted at each order, above 0, with the sum 1; equal by default.
            Which run was tilted at which order plays no part.

    Returns:
        A `DeltaEstimate`. The estimate may exceed 1. One run has the standard error inf. Where runs are divided among
        the orders in fixed shares the true error is no larger than this one, which takes the order for drawn as well.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite.

    >>> losses, masses = torch.tensor([0.5, 1.5, 2.5]), torch.tensor([[0.2], [0.3], [0.4]])
    >>> found = loss_delta(losses, masses, orders=[2], epsilon=1.0)
    >>> print(f"{found.estimate:.3f} +- {found.standard_error:.3f}")
    0.071 +- 0.036
    """
    losses, log_weights = _weighted(losses, log_masses, orders, shares)
    _checks.in_interval("epsilon", epsilon, 0, math.inf, closed="left")
    epsilon = torch.as_tensor(epsilon, dtype=torch.float64, device=losses.device)
    return DeltaEstimate(*_mean_and_error(_log_values(losses, log_weights, epsilon)))


def loss_divergence(losses, log_masses, *, orders, order, shares=None):
    r"""The divergence of any `order` above 1 from the same runs, nats: :math:`\ln E[e^{(\alpha-1)S} w] / (\alpha-1)`.

    An estimate, as that of `exact_composition`, by all runs in place of those that were tilted at this order. Other
    arguments as for `loss_delta`; returns (...) float64.

    >>> losses, masses = torch.tensor([0.5, 1.5, 2.5]), torch.tensor([[0.2], [0.3], [0.4]])
    >>> loss_divergence(losses, masses, orders=[2], order=2)              # ln of the mean of exp(masses)
    tensor(0.3033, dtype=torch.float64)
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    losses, log_weights = _weighted(losses, log_masses, orders, shares)
    return (torch.logsumexp((order - 1) * losses + log_weights, 0) - math.log(len(losses))) / (order - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class EpsilonEstimate:
    """What tilted runs say about an epsilon at one `delta`, in one direction; tensors of one shape.

    * `estimate`: where the estimate of delta falls to `delta`;
    * `low`, `high`: where it does with as many standard errors less or more as `confidence` has in a normal law. The
      interval describes the scatter of the runs that were seen, and is no guarantee;
    * `upper_bound`: epsilon is at most this, with probability `confidence` over the runs, each entry by itself;
    * `worst_case`: everybody's epsilon, which none of the others exceeds.
    """

    delta: float
    runs: int
    confidence: float
    estimate: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    upper_bound: torch.Tensor
    worst_case: torch.Tensor


def loss_epsilon(losses, log_masses, *, orders, delta, worst_case, worst_masses=None, shares=None, confidence=0.95):
    r"""Epsilon of one direction at `delta`, from independent tilted runs of several orders.

    Args:
        losses, log_masses, orders, shares: as for `loss_delta`.
        delta: in (0, 1).
        worst_case: everybody's epsilon at this delta, by the privacy loss distribution of the whole run
            (`dpcompanion.accounting.compute_epsilon`); a number or (...).
        worst_masses: (orders,) what :math:`L_a` is for a gradient as long as the clip norm at every step. The upper
            bound cannot do without, and is `worst_case` then.
        confidence: of the interval, and of the upper bound, in (0, 1). For both directions divide what is missing to 1
            between them, and take the larger of the two.

    Returns:
        An `EpsilonEstimate`. The upper bound tries epsilons that are fixed beforehand, from the worst case down, and
        stops at the first whose delta it cannot bound by `delta`; only the first that is too small can do harm, so that
        nothing is paid for trying many. It holds as well where runs are divided among the orders in fixed shares.

    Raises:
        ValueError: as for `loss_delta`, and log masses above those of the worst case.

    >>> losses, masses = torch.tensor([1.0, 2.0, 3.0, 2.5]), torch.tensor([[6.0], [6.5], [6.2], [6.6]])
    >>> found = loss_epsilon(losses, masses, orders=[5], delta=1e-2, worst_case=4.0, worst_masses=[7.0])
    >>> print(f"{found.estimate:.2f} in [{found.low:.2f}, {found.high:.2f}], at most {found.upper_bound:.2f}")
    1.89 in [0.00, 2.00], at most 2.20
    """
    delta = _checks.number("delta", delta, 0, 1, closed="neither")
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    _checks.in_interval("worst_case", worst_case, 0, math.inf, closed="left")
    masses = log_masses
    losses, log_weights = _weighted(losses, masses, orders, shares)
    worst = torch.as_tensor(worst_case, dtype=torch.float64, device=losses.device).expand(losses.shape[1:])
    errors = float(ndtri((1 + confidence) / 2))

    def where_it_falls(signed):
        def above(epsilon):
            mean, error = _mean_and_error(_log_values(losses, log_weights, epsilon))
            return (mean + signed * error if signed else mean) > delta
        return _crossing(above, worst)

    estimate, low, high = (where_it_falls(signed) for signed in (0.0, -errors, errors))
    bound = worst.clone()
    if worst_masses is not None:
        worst_masses = _checked_masses(worst_masses, masses, orders)
        bound = _upper_bound(losses, log_weights, worst_masses, orders, shares, delta, worst, confidence)
    return EpsilonEstimate(delta, len(losses), confidence, estimate, torch.minimum(low, estimate),
                           torch.maximum(high, estimate), bound, worst)


def _weighted(losses, log_masses, orders, shares):
    """The losses, and ln w of each run: (runs, ...) float64 both."""
    _checks.in_interval("losses", losses, -math.inf, math.inf, closed="neither")
    _checks.in_interval("log_masses", log_masses, 0, math.inf, closed="left")
    losses = torch.as_tensor(losses, dtype=torch.float64)
    masses = torch.as_tensor(log_masses, dtype=torch.float64, device=losses.device)
    orders, shares = (t.to(losses.device) for t in _orders_and_shares(orders, shares))
    if losses.ndim == 0 or len(losses) == 0:
        raise ValueError(f"losses must be (runs, ...), one run or more, got shape {tuple(losses.shape)}")
    expected = (len(losses), len(orders), *losses.shape[1:])
    if masses.shape != expected:
        raise ValueError(f"log_masses must have the shape (runs, orders, ...), here {expected}, got "
                         f"{tuple(masses.shape)}")
    column = (-1,) + (1,) * (losses.ndim - 1)
    terms = (orders - 1).view(column) * losses[:, None] - masses + torch.log(shares).view(column)
    return losses, -torch.logsumexp(terms, 1)


def _orders_and_shares(orders, shares):
    _checks.in_interval("orders", orders, 1, math.inf, closed="left")
    orders = torch.as_tensor(orders, dtype=torch.float64).reshape(-1)
    if len(orders) == 0 or len(orders.unique()) < len(orders):
        raise ValueError(f"orders must be different, one at least, got {orders.tolist()}")
    if shares is None:
        return orders, torch.full_like(orders, 1 / len(orders))
    _checks.in_interval("shares", shares, 0, 1, closed="right")
    shares = torch.as_tensor(shares, dtype=torch.float64).reshape(-1)
    if len(shares) != len(orders) or abs(float(shares.sum()) - 1) > 1e-9:
        raise ValueError(f"shares must be one for each of the {len(orders)} orders and have the sum 1, got "
                         f"{shares.tolist()}")
    return orders, shares


def _checked_masses(worst_masses, log_masses, orders):
    _checks.in_interval("worst_masses", worst_masses, 0, math.inf, closed="left")
    worst = torch.as_tensor(worst_masses, dtype=torch.float64).reshape(-1)
    seen = torch.as_tensor(log_masses, dtype=torch.float64).transpose(0, 1).flatten(1).amax(1).cpu()
    orders = torch.as_tensor(orders, dtype=torch.float64).reshape(-1)
    if len(worst) != len(orders):
        raise ValueError(f"worst_masses must be one for each of the {len(orders)} orders, got {worst.tolist()}")
    for order, most, given in zip(orders.tolist(), seen.tolist(), worst.tolist()):
        if most > given * (1 + 1e-6) + 1e-9:
            raise ValueError(f"log_masses must not exceed worst_masses, but at order {order:g} {most:g} does, with "
                             f"{given:g}")
    return torch.maximum(worst, seen)                        # the seen may be larger by its rounding


def _log_values(losses, log_weights, epsilon):
    """ln of (1 - e^(epsilon - S))_+ w, -inf where the loss is at most epsilon."""
    above = losses - epsilon
    return torch.where(above > 0, torch.log(-torch.expm1(-above.clamp(min=1e-300))), -math.inf) + log_weights


def _mean_and_error(log_values):
    """The mean of the values over the runs, and its standard error."""
    runs, top = len(log_values), log_values.max(0).values
    top = torch.where(top.isneginf(), torch.zeros_like(top), top)
    scaled, scale = torch.exp(log_values - top), torch.exp(top)
    if runs == 1:
        return scaled[0] * scale, torch.full_like(top, math.inf)
    return scaled.mean(0) * scale, scaled.std(0) / math.sqrt(runs) * scale


def _crossing(above, largest):
    """The end of the epsilons, from 0 to `largest`, at which `above` holds: 0 where it holds nowhere."""
    low, high = torch.zeros_like(largest), largest.clone()
    everywhere = above(largest)
    nowhere = ~above(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = above(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return torch.where(everywhere, largest, torch.where(nowhere, 0.0, high))


def _upper_bound(losses, log_weights, worst_masses, orders, shares, delta, worst, confidence):
    """The smallest level of the worst case, from above, down to which delta is bounded at the given confidence."""
    bound, passed = worst.clone(), torch.ones_like(worst, dtype=torch.bool)
    for level in range(1, _LEVELS + 1):
        epsilon = worst * (1 - level / _LEVELS)
        log_largest = _log_largest(epsilon, worst_masses, orders, shares)
        # A value is a hair above its own bound at times, by rounding.
        values = torch.minimum(_log_values(losses, log_weights, epsilon), log_largest)
        passed = passed & (log_mean_bound(values, log_largest, confidence=confidence) <= math.log(delta))
        if not passed.any():
            break
        bound = torch.where(passed, epsilon, bound)
    return bound


def _log_largest(epsilon, worst_masses, orders, shares):
    """ln of the most that (1 - e^(epsilon - S))_+ w can be, (...): concave in S, so that its peak is bisected."""
    orders, shares = (t.to(epsilon.device) for t in _orders_and_shares(orders, shares))
    steep, offset = orders - 1, torch.log(shares) - worst_masses.to(epsilon.device)
    low, high = torch.full_like(epsilon, 1e-12), torch.full_like(epsilon, 50.0)

    def terms(x):
        return steep * (epsilon + x)[..., None] + offset

    for _ in range(_HALVINGS):
        x = (low + high) / 2
        rising = 1 / torch.expm1(x) > (torch.softmax(terms(x), -1) * steep).sum(-1)
        low, high = torch.where(rising, x, low), torch.where(rising, high, x)
    # Beyond x = 50 the first factor is 1, and with order 1 in the list the second may go on to its limit.
    return torch.log(-torch.expm1(-high)) - torch.logsumexp(terms(low), -1) + 1e-9
