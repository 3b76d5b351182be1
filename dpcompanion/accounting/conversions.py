r"""From Rényi differential privacy to (epsilon, delta).

A mechanism whose Rényi divergence of order :math:`\alpha` is at most :math:`\rho` is
:math:`(\varepsilon, \delta)`-DP for each :math:`\delta` with

.. math::
    \varepsilon = \rho + \frac{\ln(1/\delta)}{\alpha - 1}
        \qquad\text{(Mironov 2017, proposition 3),}

    \varepsilon = \rho + \ln\frac{\alpha - 1}{\alpha} - \frac{\ln \delta + \ln \alpha}{\alpha - 1}
        \qquad\text{(Balle et al. 2020, theorem 21; Canonne et al. 2020, proposition 12).}

The second is never above the first.  Each order gives a valid epsilon, so the smallest one counts.
Two details keep the result honest where the noise is large: an epsilon below zero means that
epsilon 0 holds, and epsilon 0 also holds once delta covers the total variation distance, which
Bretagnolle and Huber bound by :math:`\sqrt{1 - e^{-\rho}}` and Pinsker by :math:`\sqrt{\rho/2}`.

>>> from dpcompanion.accounting import DEFAULT_ORDERS, rdp_sampled_gaussian, rdp_to_epsilon
>>> rdp = 1000 * rdp_sampled_gaussian(sample_rate=0.01, noise_multiplier=1.0)
>>> epsilon, order = rdp_to_epsilon(rdp, DEFAULT_ORDERS, 1e-5)
>>> round(float(epsilon), 4), float(order)
(2.1014, 7.8)
"""

import math
from typing import NamedTuple

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Numbers

CONVERSIONS = ("balle2020", "mironov2017")
_APART = 8  # orders between two that `least_epsilon` looks at first


class EpsilonAt(NamedTuple):
    """An epsilon and the Rényi order that gives it, tensors of one shape."""

    epsilon: torch.Tensor
    order: torch.Tensor


class DeltaAt(NamedTuple):
    """A delta and the Rényi order that gives it, tensors of one shape."""

    delta: torch.Tensor
    order: torch.Tensor


def rdp_to_epsilon(
    rdp: Array, orders: Array, delta: Numbers, *, conversion: str = "balle2020"
) -> EpsilonAt:
    r"""The smallest epsilon that Rényi divergences at several orders imply.

    Args:
        rdp: total divergence at each order, in nats: a tensor of shape ``(..., K)`` (or a sequence
            of K numbers).
        orders: the K orders, above 1.
        delta: a number in (0, 1), or a tensor that broadcasts against ``rdp.shape[:-1]``.
        conversion: "balle2020" (the default, tighter) or "mironov2017".

    Returns:
        `EpsilonAt`, the pair (epsilon, order), each a float64 tensor of shape ``(...)``: the bound,
        never negative, and the order that gives it (nan where epsilon is inf).

    Raises:
        ValueError: a negative or NaN divergence, an order not above 1, lengths that differ, a delta
            outside (0, 1).

    >>> rdp_to_epsilon([0.1, 0.4], [2, 8], 1e-5, conversion="mironov2017")
    EpsilonAt(epsilon=tensor(2.0447, dtype=torch.float64), order=tensor(8., dtype=torch.float64))
    """
    rdp, orders, delta = _checked(rdp, orders, conversion=conversion, delta=delta)
    log_inverse_delta = -torch.log(delta)[..., None]
    if conversion == "mironov2017":
        epsilons = rdp + log_inverse_delta / (orders - 1)
    else:
        epsilons = (
            rdp + torch.log1p(-1 / orders) + (log_inverse_delta - torch.log(orders)) / (orders - 1)
        )
    epsilon, best = epsilons.clamp(min=0).min(dim=-1)
    if conversion == "balle2020":
        epsilon = torch.where(_total_variation(rdp) <= delta, 0.0, epsilon)
    return EpsilonAt(epsilon, torch.where(epsilon.isfinite(), orders[best], math.nan))


def rdp_to_delta(
    rdp: Array, orders: Array, epsilon: Numbers, *, conversion: str = "balle2020"
) -> DeltaAt:
    """The smallest delta at a given epsilon that Rényi divergences at several orders imply.

    Args:
        rdp: total divergence at each order, in nats: a tensor of shape ``(..., K)`` (or a sequence
            of K numbers).
        orders: the K orders, above 1.
        epsilon: a number, at least 0, or a tensor that broadcasts against ``rdp.shape[:-1]``.
        conversion: "balle2020" (the default, tighter) or "mironov2017".

    Returns:
        `DeltaAt`, the pair (delta, order), each a float64 tensor of shape ``(...)``.

    Raises:
        ValueError: a negative or NaN divergence, an order not above 1, lengths that differ, an
            epsilon below 0.

    >>> delta, order = rdp_to_delta([0.1, 0.4], [2, 8], 2.0447, conversion="mironov2017")
    >>> f"{float(delta):.2e}", float(order)
    ('1.00e-05', 8.0)
    """
    rdp, orders, epsilon = _checked(rdp, orders, conversion=conversion, epsilon=epsilon)
    log_deltas = (orders - 1) * (rdp - epsilon[..., None])
    if conversion == "balle2020":
        log_deltas = log_deltas + (orders - 1) * torch.log1p(-1 / orders) - torch.log(orders)
    log_delta, best = log_deltas.min(dim=-1)
    delta = torch.exp(log_delta).clamp(max=1.0)
    if conversion == "balle2020":
        delta = torch.minimum(delta, _total_variation(rdp))
    return DeltaAt(delta, orders[best])


def least_epsilon(rdp_of, count, orders, delta):
    """Each of `count` rows' least epsilon, from about a quarter of the divergences.

    `rdp_of(rows, columns)` gives those of some rows at some orders. Epsilon times (order - 1) is
    convex in the order (so is the divergence, and the conversion adds a convex term), hence epsilon
    falls and then rises: the least one lies between the neighbours of the least of a few. Whatever
    is looked at is a bound.
    """
    first = torch.cat([torch.arange(0, len(orders) - 1, _APART), torch.tensor([len(orders) - 1])])
    all_rows = torch.arange(count, device=orders.device)
    epsilon, best = rdp_to_epsilon(rdp_of(all_rows, first), orders[first], delta)
    place = torch.searchsorted(orders[first].contiguous(), best.nan_to_num(nan=math.inf)).clamp(
        max=len(first) - 1
    )
    for each in place.unique().tolist():
        rows = (place == each).nonzero()[:, 0]
        low, high = int(first[max(each - 1, 0)]), int(first[min(each + 1, len(first) - 1)])
        near = torch.arange(low, high + 1)
        epsilon[rows] = torch.minimum(
            epsilon[rows], rdp_to_epsilon(rdp_of(rows, near), orders[near], delta)[0]
        )
    return epsilon


def _total_variation(rdp):
    """A bound on the total variation distance, by the smallest divergence at hand."""
    least = rdp.min(dim=-1).values
    return torch.minimum(torch.sqrt(-torch.expm1(-least)), torch.sqrt(least / 2))


def _checked(rdp, orders, *, conversion, **target):
    ((name, value),) = target.items()
    _checks.one_of("conversion", conversion, CONVERSIONS)
    _checks.in_interval("rdp", rdp, 0)
    _checks.in_interval("orders", orders, 1, math.inf, closed="neither")
    if name == "delta":
        _checks.in_interval(name, value, 0, 1, closed="neither")
    else:
        _checks.in_interval(name, value, 0, math.inf, closed="left")
    rdp, orders, value = map(_checks.unlabelled, (rdp, orders, value))
    rdp = torch.as_tensor(rdp, dtype=torch.float64)
    orders = torch.as_tensor(orders, dtype=torch.float64, device=rdp.device).reshape(-1)
    if rdp.ndim == 0 or rdp.shape[-1] != len(orders):
        raise ValueError(
            f"rdp must have one entry for each of the {len(orders)} orders in its last dimension, "
            f"got shape {tuple(rdp.shape)}"
        )
    return rdp, orders, torch.as_tensor(value, dtype=torch.float64, device=rdp.device)
