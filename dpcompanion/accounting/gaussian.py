r"""The Gaussian mechanism, exactly (Balle and Wang 2018, theorem 8).

Noise :math:`N(0, \sigma^2)` on a value of sensitivity :math:`\Delta` costs, with
:math:`\mu = \Delta/\sigma`,

.. math::
    \delta(\varepsilon)
    = \Phi(\mu/2 - \varepsilon/\mu) - e^{\varepsilon}\, \Phi(-\mu/2 - \varepsilon/\mu),

with equality: no smaller delta holds. Several Gaussian mechanisms compose to one, their
:math:`\mu^2` add up. The classical rule
:math:`\sigma = \Delta \sqrt{2 \ln(1.25/\delta)}/\varepsilon` is proved for epsilon below 1 only.

The printed difference loses every digit where delta is small. With
:math:`a, b = \varepsilon/\mu \mp \mu/2` and the Mills ratio :math:`M(x) = (1-\Phi(x))/\varphi(x)`
it equals :math:`\varphi(a)\,(M(a) - M(b)) = \varphi(a) \int_a^b (1 - x M(x))\, dx`, whose integrand
is positive; that is what is computed where :math:`\mu` is at most 1.
"""

import math
from typing import overload

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion._types import Numbers
from dpcompanion.accounting.rdp import as_float64_tensors
from dpcompanion.accounting.search import bisect

_NODES, _WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(24))


@overload
def gaussian_delta(sensitivity_over_sigma: float, epsilon: float) -> float: ...
@overload
def gaussian_delta(sensitivity_over_sigma: Numbers, epsilon: Numbers) -> torch.Tensor: ...
def gaussian_delta(sensitivity_over_sigma: Numbers, epsilon: Numbers) -> float | torch.Tensor:
    r"""The smallest delta of the Gaussian mechanism at `epsilon`.

    Args:
        sensitivity_over_sigma: :math:`\mu = \Delta / \sigma`, at least 0 (inf: no noise); number or
            tensor.
        epsilon: at least 0; number or tensor. The two broadcast.

    Returns:
        A float of two numbers, else a float64 tensor of the common shape; relative error below
        1e-12 (of ratios up to 1e8 and deltas down to 1e-100).

    Raises:
        ValueError: a negative or NaN argument.

    >>> gaussian_delta([0.1, 1.0, 3.0], 1.0)
    tensor([1.2308e-25, 1.2694e-01, 7.8760e-01], dtype=torch.float64)
    """
    _checks.in_interval("sensitivity_over_sigma", sensitivity_over_sigma, 0)
    _checks.in_interval("epsilon", epsilon, 0)
    return _checks.as_given(
        _delta(*as_float64_tensors(sensitivity_over_sigma, epsilon)),
        sensitivity_over_sigma,
        epsilon,
    )


def _delta(mu, epsilon):
    usual = (mu > 0) & mu.isfinite() & epsilon.isfinite()
    m, e = torch.where(usual, mu, 1.0), torch.where(usual, epsilon, 1.0)
    a = torch.where(m > 1, (e - m * m / 2 - _rest_of_square(m) / 2) / m, e / m - m / 2)
    b = e / m + m / 2
    # The difference of tails, for mu above 1: e^eps (1 - Phi(b)) = phi(a) M(b) does not overflow.
    apart = (
        torch.erfc(a / math.sqrt(2)) / 2
        - torch.exp(-(a**2) / 2) * torch.special.erfcx(b / math.sqrt(2)) / 2
    )
    # The integral of 1 - x M(x) > 0 over [a, b], for mu up to 1 (there a >= -1/2).
    nodes, weights = _NODES.to(mu.device), _WEIGHTS.to(mu.device)
    short = m.clamp(max=1.0)
    low = torch.where(m <= 1, a, 0.0)
    x = low[..., None] + short[..., None] * (nodes + 1) / 2
    mills = math.sqrt(math.pi / 2) * torch.special.erfcx(x / math.sqrt(2))
    # For large x the complement 1 - x M(x) cancels; its asymptotic series does not.
    far = x.clamp(min=10.0) ** -2
    series = far * (
        1
        - 3 * far * (1 - 5 * far * (1 - 7 * far * (1 - 9 * far * (1 - 11 * far * (1 - 13 * far)))))
    )
    slope = torch.where(x < 20, 1 - x * mills, series)
    joint = (
        torch.exp(-(low**2) / 2) / math.sqrt(2 * math.pi) * short / 2 * (slope * weights).sum(-1)
    )
    delta = torch.where(m <= 1, joint, apart).clamp(0.0, 1.0)
    # No noise: every event may be certain under one data set and impossible under the other.
    return torch.where(usual, delta, torch.where((mu == 0) | epsilon.isinf(), 0.0, 1.0))


def _rest_of_square(m):
    """What m * m in float64 lacks of m^2 (Dekker 1971).

    Where m is large, a delta depends on the last digits of epsilon - m^2 / 2.
    """
    high = m * (2.0**27 + 1)
    high = high - (high - m)
    low, square = m - high, m * m
    rest = ((high * high - square) + 2 * high * low) + low * low
    return torch.where(rest.isfinite(), rest, 0.0)


def composed_mu(steps, noise_multiplier):
    """The mu of so many full batches, rounded up.

    Far out, delta changes mu times as much as mu does, relatively.
    """
    return math.sqrt(steps) / noise_multiplier * (1 + 2.0**-51)


@overload
def gaussian_epsilon(sensitivity_over_sigma: float, delta: float) -> float: ...
@overload
def gaussian_epsilon(sensitivity_over_sigma: Numbers, delta: Numbers) -> torch.Tensor: ...
def gaussian_epsilon(sensitivity_over_sigma: Numbers, delta: Numbers) -> float | torch.Tensor:
    r"""The smallest epsilon of the Gaussian mechanism at `delta`, rounded up.

    Args:
        sensitivity_over_sigma: :math:`\mu = \Delta / \sigma`, at least 0 (inf: no noise); number or
            tensor.
        delta: in (0, 1); number or tensor. The two broadcast.

    Returns:
        A float of two numbers, else a float64 tensor of the common shape; inf where there is no
        noise, 0 where delta covers the total variation distance. `gaussian_delta` at the result
        never exceeds `delta`.

    Raises:
        ValueError: a negative or NaN ratio, a delta outside (0, 1).

    >>> gaussian_epsilon([0.1, 1.0, 10.0], 1e-5)
    tensor([ 0.3407,  4.3772, 91.8173], dtype=torch.float64)
    """
    _checks.in_interval("sensitivity_over_sigma", sensitivity_over_sigma, 0)
    _checks.in_interval("delta", delta, 0, 1, closed="neither")
    mu, target = as_float64_tensors(sensitivity_over_sigma, delta)
    finite = torch.where(mu.isfinite(), mu, 1.0)
    # The bracket's upper end holds since delta(eps) <= 1 - Phi(eps/mu - mu/2) <= exp(-(eps/mu -
    # mu/2)^2 / 2) / 2. Rounded up: from a ratio of 1e17 on its second term is less than a last
    # digit of the first.
    low = torch.zeros_like(mu)
    high = (finite**2 / 2 + finite * torch.sqrt(-2 * torch.log(target))) * (1 + 2.0**-50)
    high = torch.where(_delta(finite, low) <= target, 0.0, high)
    found = bisect(lambda epsilon: _delta(finite, epsilon) <= target, good=high, bad=low)
    return _checks.as_given(
        torch.where(mu.isfinite(), found, math.inf), sensitivity_over_sigma, delta
    )


@overload
def gaussian_mu(epsilon: float, delta: float) -> float: ...
@overload
def gaussian_mu(epsilon: Numbers, delta: Numbers) -> torch.Tensor: ...
def gaussian_mu(epsilon: Numbers, delta: Numbers) -> float | torch.Tensor:
    r"""The largest :math:`\mu = \Delta / \sigma` at which the Gaussian mechanism is (epsilon,
    delta)-DP, rounded down.

    So the least noise for a sensitivity :math:`\Delta` is :math:`\Delta / \mu`.

    Args:
        epsilon: at least 0, finite; number or tensor.
        delta: in (0, 1); number or tensor. The two broadcast.

    Returns:
        A float of two numbers, else a float64 tensor of the common shape; `gaussian_delta` at it
        never exceeds `delta`.

    Raises:
        ValueError: an argument outside its range.

    >>> mu = gaussian_mu([0.3407, 4.3772], 1e-5)
    >>> mu, gaussian_delta(mu, [0.3407, 4.3772]) <= 1e-5
    (tensor([0.1000, 1.0000], dtype=torch.float64), tensor([True, True]))
    """
    _checks.in_interval("epsilon", epsilon, 0, math.inf, closed="left")
    _checks.in_interval("delta", delta, 0, 1, closed="neither")
    at, target = as_float64_tensors(epsilon, delta)
    # At any epsilon delta is at most that at 0, erf(mu / sqrt(8)), which is below mu / 2.
    low, high = 2 * target, torch.full_like(at, 4.0)
    while bool((within := _delta(high, at) <= target).any()):
        low, high = torch.where(within, high, low), torch.where(within, 2 * high, high)
    found = bisect(
        lambda log_mu: _delta(torch.exp(log_mu), at) <= target,
        good=torch.log(low),
        bad=torch.log(high),
    )
    # The hair is for the rounding errors of the logarithm, and of delta.
    return _checks.as_given(torch.exp(found) * (1 - 1e-12), epsilon, delta)
