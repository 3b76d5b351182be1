r"""What a whole run of DP-SGD costs: epsilon at a delta, or delta at an epsilon.

A run is `steps` steps of the sampled Gaussian mechanism with the same sample rate and noise
multiplier (add/remove neighbours, Poisson sampling).  Two accountants answer:

* "pld", the default: the composed privacy loss distribution, tight up to a grid that adds about
  1e-4 of epsilon (`dpcompanion.accounting.pld`);
* "rdp": Rényi divergences at many orders, added up and converted (`rdp`, `conversions`);
  microseconds rather than milliseconds, and typically 5 to 15% above.

Both are upper bounds on the same number, so the PLD epsilon is the one to report.
"""

import math
from typing import overload

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion._types import Numbers
from dpcompanion.accounting import inclusion_bound, pld
from dpcompanion.accounting.conversions import rdp_to_delta, rdp_to_epsilon
from dpcompanion.accounting.loss import LARGEST_NOISE, LEAST_RATE
from dpcompanion.accounting.rdp import DEFAULT_ORDERS, rdp_sampled_gaussian

ACCOUNTANTS = ("pld", "rdp")

#: Orders below the default ones, which are asked where the least of those decides.
_NEAR_ONE = tuple(1 + np.geomspace(1e-5, 0.1, 81))
# deltas below it lie so far out that a grid may say less than divergences: the better one counts
_TINY = 1e-60


@overload
def compute_epsilon(
    *,
    sample_rate: float,
    noise_multiplier: float,
    steps: float,
    delta: float,
    accountant: str = ...,
) -> float: ...
@overload
def compute_epsilon(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    steps: Numbers,
    delta: Numbers,
    accountant: str = ...,
) -> torch.Tensor: ...
def compute_epsilon(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    steps: Numbers,
    delta: Numbers,
    accountant: str = "pld",
) -> float | torch.Tensor:
    r"""Epsilon of `steps` steps of the sampled Gaussian mechanism at `delta`, an upper bound.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        sample_rate: probability in (0, 1] with which an example enters a step.
        noise_multiplier: standard deviation of the noise over the clip norm, at least 0. Below
            `inclusion_bound.LITTLE_NOISE` both accountants use the bound of that module.
        steps: number of steps, a whole number from 0 to 1e12.
        delta: in (0, 1). The four are numbers, or tensors or sequences that broadcast; each
            distinct run is computed once.
        accountant: "pld" (tight) or "rdp" (fast).

    Returns:
        A float, at least 0, inf where there is no noise; a float64 tensor of the common shape where
        an argument is no number. Seconds at most for a run; one of so many steps at so little noise
        that no grid resolves it is bounded without one (see `pld`).

    Raises:
        ValueError: an argument outside its range.

    >>> reference = dict(sample_rate=512 / 60000, noise_multiplier=3.42529, steps=9375, delta=1e-5)
    >>> (
    ...     round(compute_epsilon(**reference), 4),
    ...     round(compute_epsilon(**reference, accountant="rdp"), 4),
    ... )
    (0.9172, 1.0036)
    >>> run = dict(sample_rate=0.01, noise_multiplier=[1.0, 2.0], steps=1000)
    >>> compute_epsilon(**run, delta=1e-5).round(decimals=3)
    tensor([1.8280, 0.6220], dtype=torch.float64)
    """
    _checks.one_of("accountant", accountant, ACCOUNTANTS)
    return _each(
        _epsilon,
        accountant,
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=steps,
        delta=delta,
    )


def _epsilon(accountant, *, sample_rate, noise_multiplier, steps, delta):
    q, sigma, steps = checked_run(sample_rate, noise_multiplier, steps)
    delta = _checks.number("delta", delta, 0, 1, closed="neither")
    if steps == 0 or sigma == 0:
        return 0.0 if steps == 0 else math.inf
    if sigma < inclusion_bound.LITTLE_NOISE:
        return inclusion_bound.epsilon(
            sample_rate=q, noise_multiplier=sigma, steps=steps, delta=delta
        )
    found = math.inf
    if accountant == "pld":
        found = pld.epsilon(sample_rate=q, noise_multiplier=sigma, steps=steps, delta=delta)
        if delta >= _TINY:
            return found
    orders = orders_for(sigma)
    rdp = steps * rdp_sampled_gaussian(sample_rate=q, noise_multiplier=sigma, orders=orders)
    epsilon, order = (float(value) for value in rdp_to_epsilon(rdp, orders, delta))
    if not order > orders[0]:  # so little noise that an order nearer to 1 may decide
        rdp = steps * rdp_sampled_gaussian(sample_rate=q, noise_multiplier=sigma, orders=_NEAR_ONE)
        epsilon = min(epsilon, float(rdp_to_epsilon(rdp, _NEAR_ONE, delta)[0]))
    return min(found, epsilon)


@overload
def compute_delta(
    *,
    sample_rate: float,
    noise_multiplier: float,
    steps: float,
    epsilon: float,
    accountant: str = ...,
) -> float: ...
@overload
def compute_delta(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    steps: Numbers,
    epsilon: Numbers,
    accountant: str = ...,
) -> torch.Tensor: ...
def compute_delta(
    *,
    sample_rate: Numbers,
    noise_multiplier: Numbers,
    steps: Numbers,
    epsilon: Numbers,
    accountant: str = "pld",
) -> float | torch.Tensor:
    """Delta of `steps` steps of the sampled Gaussian mechanism at `epsilon`, an upper bound.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        sample_rate: probability in (0, 1] with which an example enters a step.
        noise_multiplier: standard deviation of the noise over the clip norm, at least 0.
        steps: number of steps, a whole number from 0 to 1e12.
        epsilon: at least 0, finite. The four are numbers, or tensors or sequences that broadcast.
        accountant: "pld" (tight) or "rdp" (fast).

    Returns:
        A float in [0, 1]; a float64 tensor of the common shape where an argument is no number.

    Raises:
        ValueError: an argument outside its range.

    >>> run = dict(sample_rate=0.01, noise_multiplier=1.0, steps=1000)
    >>> for accountant in ("pld", "rdp"):
    ...     print(f"{compute_delta(**run, epsilon=2.0, accountant=accountant):.2e}")
    2.67e-06
    1.98e-05
    """
    _checks.one_of("accountant", accountant, ACCOUNTANTS)
    return _each(
        _delta,
        accountant,
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=steps,
        epsilon=epsilon,
    )


def _delta(accountant, *, sample_rate, noise_multiplier, steps, epsilon):
    q, sigma, steps = checked_run(sample_rate, noise_multiplier, steps)
    epsilon = _checks.number("epsilon", epsilon, 0, math.inf, closed="left")
    if steps == 0 or sigma == 0:
        return 0.0 if steps == 0 else 1.0
    if sigma < inclusion_bound.LITTLE_NOISE:
        return inclusion_bound.delta(
            sample_rate=q, noise_multiplier=sigma, steps=steps, epsilon=epsilon
        )
    found = 1.0
    if accountant == "pld":
        found = pld.delta(sample_rate=q, noise_multiplier=sigma, steps=steps, epsilon=epsilon)
        if found >= _TINY:
            return found
    orders = orders_for(sigma)
    rdp = steps * rdp_sampled_gaussian(sample_rate=q, noise_multiplier=sigma, orders=orders)
    delta, order = (float(value) for value in rdp_to_delta(rdp, orders, epsilon))
    if not order > orders[0]:
        rdp = steps * rdp_sampled_gaussian(sample_rate=q, noise_multiplier=sigma, orders=_NEAR_ONE)
        delta = min(delta, float(rdp_to_delta(rdp, _NEAR_ONE, epsilon)[0]))
    return min(found, delta)


def _each(function, accountant, **values):
    """A float where all values are numbers; else a tensor of the common shape, once for each
    distinct row of them.
    """
    if all(np.ndim(value) == 0 for value in values.values()):
        return function(accountant, **values)
    device = _checks.device_of(*values.values())
    columns = _checks.columns(values, device)
    rows, which = torch.unique(
        torch.stack(columns, dim=-1).reshape(-1, len(values)), dim=0, return_inverse=True
    )
    found = [function(accountant, **dict(zip(values, row))) for row in rows.tolist()]
    return torch.tensor(found, dtype=torch.float64, device=device)[which].reshape(columns[0].shape)


def checked_run(sample_rate, noise_multiplier, steps):
    """Rate, noise and steps of a run, in the range that float64 carries; else a ValueError."""
    return (
        max(_checks.number("sample_rate", sample_rate, 0, 1, closed="right"), LEAST_RATE),
        min(
            _checks.number("noise_multiplier", noise_multiplier, 0, math.inf, closed="left"),
            LARGEST_NOISE,
        ),
        _checks.whole_number("steps", steps, 0, 10**12),
    )


def orders_for(noise_multiplier):
    """The default orders and, where noise is so large that they cost little, orders beyond 1024.

    With the default orders alone a tiny divergence still costs ln(1 / (1024 delta)) / 1023,
    whatever the noise.
    """
    beyond = [1024 * math.sqrt(2) ** j for j in range(1, 61)]
    return DEFAULT_ORDERS + tuple(order for order in beyond if order <= 32 * noise_multiplier)
