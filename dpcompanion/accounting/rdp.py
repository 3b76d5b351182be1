r"""Rényi differential privacy of one step of the sampled Gaussian mechanism.

One step of DP-SGD draws every example with probability :math:`q` (Poisson sampling), sums their
clipped gradients and adds Gaussian noise.  With the sensitivity scaled to 1 the worst case over
data sets that differ by adding or removing one example compares

.. math::
    P = (1-q)\,N(0, \sigma^2) + q\,N(1, \sigma^2) \quad\text{with}\quad Q = N(0, \sigma^2),

and its Rényi divergence of order :math:`\alpha` is
:math:`D_\alpha(P \| Q) = \frac{1}{\alpha-1} \ln A_\alpha` with
:math:`A_\alpha = E_Q[(P/Q)^\alpha]`; the other direction is never larger
(Mironov, Talwar and Zhang 2019, theorem 5).

How :math:`A_\alpha` is computed decides how small a divergence can be distinguished from zero.
Both ways below compute :math:`A_\alpha - 1` as a sum of terms that are never negative, so that
nothing cancels, and the relative error of the divergence stays near 1e-12 from noise multiplier 0.1
to 1e6 and sample rate 1e-7 to 1:

* at an integer order, by the binomial sum, which gives :math:`A_\alpha - 1` as
  :math:`\sum_{k=2}^{\alpha} \binom{\alpha}{k} (1-q)^{\alpha-k} q^k (e^{(k^2-k)/2\sigma^2} - 1)`;
* at any other order (and above 1024), by the trapezoidal rule on
  :math:`A_\alpha - 1 = E_Q[(1+y)^\alpha - 1 - \alpha y]`, where :math:`1 + y = P/Q`: the integrand
  is convex in y, so never negative, and analytic, so the rule converges exponentially fast. Where
  noise is so small that the two halves of P never meet, :math:`A_\alpha` has a closed form there.

Cost: about a thousand exponentials for each parameter pair and large order. Everything broadcasts,
in float64, on the device of the tensors that come in.

>>> from dpcompanion.accounting import rdp_sampled_gaussian
>>> rdp_sampled_gaussian(sample_rate=0.01, noise_multiplier=[1.0, 2.0], orders=[2, 8.5])
tensor([[1.7181e-04, 1.0894e-03],
        [2.8402e-05, 1.2319e-04]], dtype=torch.float64)
"""

import math
from typing import overload

import torch

from dpcompanion import _checks
from dpcompanion._types import Numbers

#: Opacus's orders (1.1 to 10.9 by tenths, 12 to 63), 11, and from 64 to 1024 in steps of about 5%.
DEFAULT_ORDERS = tuple(
    [1 + x / 10 for x in range(1, 100)]
    + list(range(11, 64))
    + sorted({round(64 * 16 ** (j / 56)) for j in range(57)})
)

_MOST_NODES = 2**27  # of an integral: some gigabytes
# The binomial sum serves integer orders up to here; beyond, the integral costs less.
_LARGEST_SUM = 1024
# Numbers in one temporary tensor: what stays within a core's cache.
_CHUNK = 1 << 18
# With less noise a step costs, to all digits of float64, what it costs a full batch.
_LEAST_NOISE = 1e-150
# Standard deviations beyond which a Gaussian tail is below float64's resolution.
_TAIL = 9.0


@overload
def rdp_sampled_gaussian(
    *, sample_rate: float, noise_multiplier: float, orders: float
) -> float: ...
@overload
def rdp_sampled_gaussian(
    *, sample_rate: Numbers, noise_multiplier: Numbers, orders: Numbers = ...
) -> torch.Tensor: ...
def rdp_sampled_gaussian(
    *, sample_rate: Numbers, noise_multiplier: Numbers, orders: Numbers = DEFAULT_ORDERS
) -> float | torch.Tensor:
    r"""Rényi divergence of one step of the sampled Gaussian mechanism, at each order.

    Neighbouring relation: add or remove one example.  Sampler: Poisson.  The cost of several steps
    is the sum of theirs.

    Args:
        sample_rate: probability :math:`q` in (0, 1] with which an example enters a step.
        noise_multiplier: standard deviation of the noise over the sensitivity, at least 0;
            0 (no noise) costs inf.  It broadcasts against `sample_rate`, to a shape ``S``.
        orders: the orders :math:`\alpha > 1`, a number or a sequence of K numbers.

    Returns:
        Tensor of shape ``(*S, K)``, float64: :math:`D_\alpha(P \| Q)` in nats (``S`` alone where
        `orders` is a number; a float where all three are numbers).

    Raises:
        ValueError: a rate outside (0, 1], a negative or non-finite noise multiplier, an order not
            above 1, or one so large beside the noise that the integral would take gigabytes.

    Source: Mironov, Talwar and Zhang 2019, "Rényi differential privacy of the sampled
    Gaussian mechanism", section 3.

    >>> rdp_sampled_gaussian(
    ...     sample_rate=1.0, noise_multiplier=2.0, orders=[3, 16]
    ... )  # alpha / (2 sigma^2)
    tensor([0.3750, 2.0000], dtype=torch.float64)
    """
    _checks.in_interval("sample_rate", sample_rate, 0, 1, closed="right")
    _checks.in_interval("noise_multiplier", noise_multiplier, 0, math.inf, closed="left")
    _checks.in_interval("orders", orders, 1, math.inf, closed="neither")
    q, sigma = as_float64_tensors(sample_rate, noise_multiplier)
    alpha = torch.as_tensor(_checks.unlabelled(orders), dtype=torch.float64, device=q.device)
    shape = q.shape + alpha.shape
    q = q.reshape(-1)
    sigma = sigma.reshape(-1)
    alphas = alpha.reshape(-1)

    log_excess = torch.empty(len(q), len(alphas), dtype=torch.float64, device=q.device)
    by_sum = (alphas == alphas.round()) & (alphas <= _LARGEST_SUM)
    # Full batches and (almost) noiseless steps have closed forms; stand-ins keep them away. A full
    # batch keeps its noise: grids are as wide as an order over it.
    noisy = sigma > _LEAST_NOISE
    plain = (q < 1) & noisy
    safe_q, safe_sigma = torch.where(plain, q, 0.5), torch.where(noisy, sigma, 1.0)
    if by_sum.any():
        log_excess[:, by_sum] = _log_excess_by_sum(safe_q, safe_sigma, alphas[by_sum])
    if not by_sum.all():
        log_excess[:, ~by_sum] = _log_excess_by_integral(safe_q, safe_sigma, alphas[~by_sum])
    rdp = torch.logaddexp(log_excess, torch.zeros_like(log_excess)) / (alphas - 1)
    full_batch = alphas / (2 * sigma[:, None] ** 2)  # inf where there is no noise
    found = torch.where(plain[:, None], rdp, full_batch).reshape(shape)
    return _checks.as_given(found, sample_rate, noise_multiplier, orders)


def as_float64_tensors(*values: Numbers) -> tuple[torch.Tensor, ...]:
    """The values as float64 tensors of a common shape, on the device of those that are tensors."""
    values = tuple(map(_checks.unlabelled, values))
    device = _checks.device_of(*values)
    return _checks.broadcast(
        *(torch.as_tensor(v, dtype=torch.float64, device=device) for v in values)
    )


def _log_excess_by_sum(q, sigma, orders):
    """ln(A - 1) at integer orders, shape (len(q), len(orders))."""
    result = torch.empty(len(q), len(orders), dtype=torch.float64, device=q.device)
    log1m, log_odds = torch.log1p(-q), torch.log(q) - torch.log1p(-q)
    # Orders of like size share one padded table of binomial coefficients.
    size_class = torch.ceil(torch.log2(orders)).long()
    for size in size_class.unique():
        members = (size_class == size).nonzero()[:, 0]
        a = orders[members]
        k = torch.arange(2, int(a.max()) + 1, dtype=torch.float64, device=q.device)
        choose = (
            torch.lgamma(a + 1)[:, None]
            - torch.lgamma(k + 1)
            - torch.lgamma((a[:, None] - k).clamp(min=0) + 1)
        )
        choose = choose.masked_fill(k > a[:, None], -math.inf)
        rows = max(1, _CHUNK // choose.numel())
        for start in range(0, len(q), rows):
            part = slice(start, start + rows)
            exponent = (k * k - k) / (2 * sigma[part, None] ** 2)
            weight = _log_expm1(exponent) + k * log_odds[part, None]
            log_sum = torch.logsumexp(choose + weight[:, None, :], dim=-1)
            result[part, members] = log_sum + a * log1m[part, None]
    return result


def _log_expm1(x):
    """ln(e^x - 1) for x > 0, without overflow and without cancellation."""
    return torch.where(
        x > 1, x + torch.log1p(-torch.exp(-x)), torch.log(torch.expm1(x.clamp(max=2)))
    )


def log_density_ratio(t, q, sigma):
    r"""ln(P/Q) at :math:`x = \sigma t`, that is :math:`\ln(1 - q + q e^u)` with
    :math:`u = t/\sigma - 1/(2\sigma^2)`."""
    u = t / sigma - 0.5 / sigma**2
    small = torch.log1p(q * torch.expm1(u.clamp(max=30)))
    large = u + torch.log(q) + torch.log1p((1 - q) / q * torch.exp(-u.clamp(min=30)))
    return torch.where(u < 30, small, large)


def _log_excess_by_integral(q, sigma, orders):
    """ln(A - 1) at real orders, shape (len(q), len(orders)).

    In units of sigma the integrand has Gaussian bumps of width 1 between 0 and order / sigma, and
    branch points at distance pi sigma from the real axis, near the t at which the two halves of P
    are equal: a step of half the smaller of 1 and sigma leaves an error below 1e-15. Where sigma is
    so small that the integrand is negligible there, a density of about exp(-1 / 8 sigma^2) against
    q^2, there is a closed form.
    """
    result = torch.empty(len(q), len(orders), dtype=torch.float64, device=q.device)
    apart = 1 / (8 * sigma**2) + 2 * torch.log(q) > 60
    result[apart] = _log_excess_apart(q[apart], sigma[apart], orders)
    near = (~apart).nonzero()[:, 0]
    step = 0.5 * sigma.clamp(max=1.0)
    nodes = (orders.max() / sigma[near] + 2 * _TAIL) / step[near]
    if bool((nodes > _MOST_NODES).any()):
        raise ValueError(
            f"orders must be small enough beside noise_multiplier for an integral of {_MOST_NODES} "
            f"nodes, got {float(orders.max()):g}"
        )
    # Orders of like size share their nodes, so that one large order does not cost all the others.
    size_class = torch.ceil(torch.log2(orders)).long()
    for size in size_class.unique():
        members = (size_class == size).nonzero()[:, 0]
        a = orders[members]
        count = torch.ceil((float(a.max()) / sigma[near] + 2 * _TAIL) / step[near]).long() + 1
        by_count = torch.argsort(count)
        start = 0
        while start < len(near):
            rows = max(1, _CHUNK // (len(a) * int(count[by_count[start]])))
            some = by_count[start : start + rows]
            part = near[some]
            t = step[part, None] * torch.arange(int(count[some].max()), device=q.device) - _TAIL
            log_r = log_density_ratio(t, q[part, None], sigma[part, None])
            log_weight = -0.5 * t * t + torch.log(step[part, None] / math.sqrt(2 * math.pi))
            integrand = _log_convex_excess(log_r[:, None, :], a[:, None]) + log_weight[:, None, :]
            result[part[:, None], members] = torch.logsumexp(integrand, dim=-1)
            start += len(part)
    return result


def _log_excess_apart(q, sigma, orders):
    r"""ln(A - 1) where the halves of P never meet, shape (len(q), len(orders)).

    Then :math:`A = (1-q)^\alpha + q^\alpha e^{(\alpha^2-\alpha)/2\sigma^2}`, up to a share of
    1e-18. Less 1 = (1 - q) + q it is a positive part and a much smaller negative one.
    """
    q, sigma, less = q[:, None], sigma[:, None], orders - 1
    gained = torch.log(q) + _log_expm1(less * (orders / (2 * sigma**2) + torch.log(q)))
    log_lost = torch.log1p(-q) + torch.log(-torch.expm1(less * torch.log1p(-q)))
    return gained + torch.log1p(-torch.exp(log_lost - gained))


def _log_convex_excess(log_r, a):
    """ln(r^a - 1 - a (r - 1)), which is the log of a number that is never negative."""
    y = torch.expm1(log_r.clamp(max=1.0))
    series = (
        0.5
        * a
        * (a - 1)
        * y
        * y
        * (1 + (a - 2) / 3 * y * (1 + (a - 3) / 4 * y * (1 + (a - 4) / 5 * y)))
    )
    # r^a - 1 - a (r - 1) = r (r^(a-1) - 1) - (a - 1) (r - 1) keeps a small a - 1 exact. Of r > 1
    # the r^a comes out.
    up, fall = log_r > 0, torch.expm1(-log_r.abs())
    power = torch.expm1(-(a - 1) * log_r.abs())
    direct = torch.where(
        up, (a - 1) * fall * (1 + power) - power, power * (1 + fall) - (a - 1) * fall
    )
    near = (a * y).abs() < 0.003
    return torch.log(torch.where(near, series, direct)) + torch.where(up & ~near, a * log_r, 0.0)
