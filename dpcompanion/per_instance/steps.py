r"""What one step tells about a point x that is, or is not, in the data set.

Batches B are Poisson samples of the other points, U is the update, s the noise's standard
deviation, and x enters with probability q. With x the step draws from a mixture over B of
:math:`(1-q)\,N(U(B), s^2) + q\,N(U(B+x), s^2)`, without it from the mixture of
:math:`N(U(B), s^2)`. One step with sensitivity :math:`\Delta` has, with the density ratio
:math:`r = 1 - q + q e^{w\Delta/s - \Delta^2/2s^2}` and w a standard normal,

.. math:: A(\Delta) = E[r^\alpha] = \sum_k \binom{\alpha}{k} (1-q)^{\alpha-k} q^k
    e^{(k^2-k)\Delta^2/2s^2}, \qquad \bar A(\Delta) = E[r^{1-\alpha}] \le A(\Delta),

and the divergences :math:`\ln A / (\alpha - 1)` with x against without ("remove") and
:math:`\ln \bar A / (\alpha-1)` for the other way round ("add"). Everything is float64 and stays in
the log domain: an order of 1024 overflows nowhere.
"""

import math
from typing import overload

import torch

from dpcompanion import _checks
from dpcompanion._types import Numbers
from dpcompanion.accounting import gaussian_delta, rdp_sampled_gaussian
from dpcompanion.accounting.loss import DIRECTIONS
from dpcompanion.accounting.rdp import as_float64_tensors
from dpcompanion.per_instance.added import log_mass_add

_LARGEST_NOISE = 1e100  # so that a sensitivity that is tiny beside the noise still costs something
_LARGEST_ORDER = 1e9


@overload
def step_divergence(
    *,
    sample_rate: float,
    noise_multiplier: float,
    sensitivity: float,
    orders: float,
    direction: str = ...,
) -> float: ...
@overload
def step_divergence(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    sensitivity: Numbers,
    orders: Numbers,
    direction: str = ...,
) -> torch.Tensor: ...
def step_divergence(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    sensitivity: Numbers,
    orders: Numbers,
    direction: str = "remove",
) -> float | torch.Tensor:
    r"""Theorem 3.2: the Rényi divergence of one step whose sum x moves by at most `sensitivity`.

    Neighbouring relation: the data set with x and without it. Sampler: Poisson. For the sum of
    clipped gradients the sensitivity is the norm of x's clipped gradient, the same for every batch.

    Args:
        sample_rate: q in (0, 1].
        noise_multiplier: the noise's standard deviation in the unit of `sensitivity` (with norms as
            shares of the clip norm it is the noise multiplier of DP-SGD), above 0.
        sensitivity: at least 0. The three broadcast, to a shape ``S``.
        orders: a number above 1, whole or not, 10^9 at most, or K of them.
        direction: "remove" compares with x to without; it is never below "add", the other way round
            (Mironov et al. 2019, theorem 5), so that it serves for both.

    Returns:
        ``(*S, K)`` float64 (``S`` for a single order, a float where all are numbers): nats. The
        proof's equation 21 loses the factor :math:`q^k`; the theorem has it.

    Raises:
        ValueError: an argument outside its range, or an unknown direction.

    >>> step_divergence(
    ...     sample_rate=0.1, noise_multiplier=1.0, sensitivity=[1.0, 0.5, 0.0], orders=[2, 8]
    ... )
    tensor([[0.0170, 1.3784],
            [0.0028, 0.0137],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    _checks.in_interval("noise_multiplier", noise_multiplier, 0, math.inf, closed="neither")
    orders = _checks.unlabelled(orders)
    _checks.in_interval("orders", orders, 1, _LARGEST_ORDER, closed="right")
    given = sample_rate, noise_multiplier, sensitivity, orders
    q, noise, sensitivity = as_tensors(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, sensitivity=sensitivity
    )
    _checks.one_of("direction", direction, DIRECTIONS)
    ratio = (noise / sensitivity).clamp(max=_LARGEST_NOISE)
    alpha = torch.as_tensor(orders, dtype=torch.float64, device=q.device)
    if direction == "remove":
        found = rdp_sampled_gaussian(sample_rate=q, noise_multiplier=ratio, orders=alpha)
    else:
        found = torch.stack(
            [log_mass_add(q, ratio, a) / (a - 1) for a in alpha.reshape(-1).tolist()], dim=-1
        )
        found = found.reshape(q.shape + alpha.shape)
    found = torch.where(sensitivity.reshape(sensitivity.shape + (1,) * alpha.ndim) == 0, 0.0, found)
    return _checks.as_given(found, *given)


@overload
def log_mass(
    sensitivity: float, *, sample_rate: float, noise_std: float, order: float, direction: str = ...
) -> float: ...
@overload
def log_mass(
    sensitivity: Numbers,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    order: float,
    direction: str = ...,
) -> torch.Tensor: ...
def log_mass(
    sensitivity: Numbers,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    order: float,
    direction: str = "remove",
) -> float | torch.Tensor:
    r""":math:`\ln A(\Delta)` ("remove") or :math:`\ln \bar A(\Delta)` ("add") of one step.

    It is `order` - 1 times `step_divergence`.

    Args:
        sensitivity: (...) at least 0.
        sample_rate, noise_std: q in (0, 1] and s > 0, numbers or (...).
        order: above 1.
        direction: "remove", x's presence against its absence, or "add", the other way round.

    Returns:
        A float of numbers, else (...) float64.

    Raises:
        ValueError: an argument outside its range, or an unknown direction.

    >>> log_mass([0.0, 1.0], sample_rate=0.1, noise_std=1.0, order=3)
    tensor([0.0000, 0.0...], dtype=torch.float64)
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    _checks.in_interval("noise_std", noise_std, 0, math.inf, closed="neither")
    return (order - 1) * step_divergence(
        sample_rate=sample_rate,
        noise_multiplier=noise_std,
        sensitivity=sensitivity,
        orders=order,
        direction=direction,
    )


def sampled_delta(sensitivity, sample_rate, noise_std, epsilon, direction):
    """Delta of one step of the sampled Gaussian mechanism, exactly."""
    _checks.one_of("direction", direction, DIRECTIONS)
    _checks.in_interval("noise_std", noise_std, 0, math.inf, closed="neither")
    q, sensitivity, noise, epsilon = as_tensors(
        sample_rate=sample_rate, sensitivity=sensitivity, noise_std=noise_std, epsilon=epsilon
    )
    if direction == "remove":
        small = torch.log1p(torch.expm1(epsilon.clamp(max=30)) / q)
        large = epsilon - torch.log(q) + torch.log1p(-(1 - q) * torch.exp(-epsilon.clamp(min=30)))
        return q * gaussian_delta(sensitivity / noise, torch.where(epsilon < 30, small, large))
    # 1 - (1 - q) e^epsilon, rounded up: near the epsilon at which it is 0 it depends on the last
    # digits.
    rest = -torch.expm1(epsilon * (1 - 2.0**-51) + torch.log1p(-q)).clamp(max=0)
    # Down by what adding up rounds, which weighs much where little noise hides a small epsilon; and
    # at least 0.
    hair = 2.0**-51 * (
        epsilon - torch.log(q) - torch.log(rest.clamp(min=torch.finfo(rest.dtype).tiny))
    )
    delta = gaussian_delta(
        sensitivity / noise, (epsilon + torch.log(q) - torch.log(rest) - hair).clamp(min=0)
    )
    return torch.where(rest > 0, rest * delta, 0.0)


def as_tensors(**values: Numbers) -> tuple[torch.Tensor, ...]:
    """The named values as float64 tensors of one shape, each checked by what it is."""
    for name, low, closed, high in (
        ("sample_rate", 0, "right", 1),
        ("sensitivity", 0, "left", math.inf),
    ):
        if name in values:
            _checks.in_interval(name, values[name], low, high, closed=closed)
    return as_float64_tensors(*values.values())
