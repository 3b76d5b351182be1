r"""What one step of any update rule tells of a point, by how far it moves the update in each batch.

The step is a mixture over batches, with and without x, and divergences are jointly convex: the
mixtures' is at most the mean of the parts', which are steps of a fixed sensitivity
(`dpcompanion.per_instance.steps`).
"""

import math
from collections.abc import Sequence
from typing import Any, overload

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Numbers
from dpcompanion.accounting import gaussian_epsilon
from dpcompanion.accounting.search import bisect
from dpcompanion.per_instance.confidence import log_mean_bound
from dpcompanion.per_instance.steps import log_mass, sampled_delta


@overload
def coupled_divergence(
    sensitivities: Sequence[float],
    *,
    sample_rate: float,
    noise_std: float,
    order: float,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Sequence[float] | None = ...,
    direction: str = ...,
) -> float: ...
@overload
def coupled_divergence(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    order: float,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Array | None = ...,
    direction: str = ...,
) -> torch.Tensor: ...
def coupled_divergence(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    order: float,
    max_sensitivity: float | None = None,
    confidence: float | None = None,
    probabilities: Array | None = None,
    direction: str = "remove",
) -> float | torch.Tensor:
    r"""One step of any update rule, by :math:`\Delta(B) = \|U(B + x) - U(B)\|` over batches B.

    .. math:: D_\alpha \le \frac{1}{\alpha - 1} \ln E_B[A(\Delta(B))]

    Both data sets draw from mixtures over the same B with the same weights, and
    :math:`\int P^\alpha Q^{1-\alpha}` is jointly convex in (P, Q): so the mixture's is at most the
    mean of the parts'. The parts are one-dimensional Gaussians. The same with B in place of A holds
    for "add"; "remove" is never below it and serves for both.

    Args:
        sensitivities: (batches, ...) values of :math:`\Delta(B)`, for independent batches B from
            the sampler of the data set *without* x (for the mean rule
            :math:`\|g_x - \operatorname{mean}(B)\| / (|B| + 1)`).
        sample_rate, noise_std: q in (0, 1] and s > 0, numbers or (...).
        order: above 1.
        max_sensitivity: a bound on :math:`\Delta(B)` for every B; needed with a confidence.
        confidence: if given, the result is an upper confidence bound at this level for each entry
            by itself; few batches give what `max_sensitivity` alone gives, or little less. Without
            it the mean over the batches stands in for the expectation: an *estimate*, low on
            average.
        probabilities: (batches,) of *all* batches, in place of draws: then the result is exact.
        direction: "remove" or "add".

    Returns:
        A float of numbers and lists of them, else (...) float64: nats.

    Raises:
        ValueError: an argument outside its range; an unknown direction; no batch; sensitivities
            above `max_sensitivity`; a confidence without `max_sensitivity` or beside probabilities;
            probabilities that are not one for each batch or do not sum to 1.

    >>> sensitivities = torch.linspace(0.1, 0.5, 1000)
    >>> coupled_divergence(sensitivities, sample_rate=0.1, noise_std=1.0, order=8)
    tensor(0.0050, dtype=torch.float64)
    >>> coupled_divergence(
    ...     sensitivities,
    ...     sample_rate=0.1,
    ...     noise_std=1.0,
    ...     order=8,
    ...     max_sensitivity=0.5,
    ...     confidence=0.99,
    ... )
    tensor(0.0055, dtype=torch.float64)
    >>> from dpcompanion.per_instance import step_divergence  # by the worst batch:
    >>> round(step_divergence(sample_rate=0.1, noise_multiplier=1.0, sensitivity=0.5, orders=8), 4)
    0.0137
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    given = *_checks.entries(sensitivities, probabilities), sample_rate, noise_std
    sensitivities, probabilities = _batches(
        sensitivities, probabilities, max_sensitivity, confidence
    )
    step: dict[str, Any] = dict(
        sample_rate=sample_rate, noise_std=noise_std, order=order, direction=direction
    )
    masses = log_mass(sensitivities, **step)
    if confidence is None or max_sensitivity is None:
        found = log_mean(masses, probabilities)
    else:
        largest = torch.as_tensor(log_mass(max_sensitivity, **step), dtype=torch.float64)
        found = log_mean_bound(masses, largest, confidence=confidence, log_smallest=0.0)
    return _checks.as_given(found / (order - 1), *given)


@overload
def coupled_delta(
    sensitivities: Sequence[float],
    *,
    sample_rate: float,
    noise_std: float,
    epsilon: float,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Sequence[float] | None = ...,
    direction: str = ...,
) -> float: ...
@overload
def coupled_delta(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    epsilon: Numbers,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Array | None = ...,
    direction: str = ...,
) -> torch.Tensor: ...
def coupled_delta(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    epsilon: Numbers,
    max_sensitivity: float | None = None,
    confidence: float | None = None,
    probabilities: Array | None = None,
    direction: str = "remove",
) -> float | torch.Tensor:
    r"""One step of any update rule: the delta at `epsilon`, by the distribution of the sensitivity.

    The hockey-stick divergence is jointly convex as well, so
    :math:`\delta(\varepsilon) \le E_B[\delta_{\Delta(B)}(\varepsilon)]` with the exact value of the
    sampled Gaussian (Balle, Barthe and Gaboardi 2018): for "remove"
    :math:`q\,\delta_G(\ln(1 + (e^\varepsilon - 1)/q))`, for "add"
    :math:`c\,\delta_G(\ln(q e^\varepsilon/c))` with :math:`c = 1 - (1-q) e^\varepsilon`, or 0 where
    c is not positive; :math:`\delta_G` is the analytic Gaussian mechanism's. It holds where
    corollary 3.1 does, with neither Hoelder's inequality nor a second delta.

    Args:
        epsilon: at least 0, a number or (...). The others, what is returned and what is raised: see
            `coupled_epsilon`.

    >>> coupled_delta([0.5, 1.0, 1.5], sample_rate=0.1, noise_std=1.0, epsilon=0.2)
    0.0129...
    """
    _checks.in_interval("epsilon", epsilon, 0, math.inf, closed="left")
    given = *_checks.entries(sensitivities, probabilities), sample_rate, noise_std, epsilon
    sensitivities, probabilities = _batches(
        sensitivities, probabilities, max_sensitivity, confidence
    )
    deltas = sampled_delta(sensitivities, sample_rate, noise_std, epsilon, direction)
    if confidence is None or max_sensitivity is None:
        found = log_mean(torch.log(deltas), probabilities)
    else:
        largest = sampled_delta(max_sensitivity, sample_rate, noise_std, epsilon, direction)
        found = log_mean_bound(torch.log(deltas), torch.log(largest), confidence=confidence)
    return _checks.as_given(torch.exp(found), *given)


@overload
def coupled_epsilon(
    sensitivities: Sequence[float],
    *,
    sample_rate: float,
    noise_std: float,
    delta: float,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Sequence[float] | None = ...,
    direction: str = ...,
) -> float: ...
@overload
def coupled_epsilon(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    delta: float,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Array | None = ...,
    direction: str = ...,
) -> torch.Tensor: ...
def coupled_epsilon(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    delta: float,
    max_sensitivity: float | None = None,
    confidence: float | None = None,
    probabilities: Array | None = None,
    direction: str = "remove",
) -> float | torch.Tensor:
    r"""The epsilon at which `coupled_delta` falls to `delta`, rounded up.

    Args:
        sensitivities: (batches, ...) values of :math:`\Delta(B)`, for independent batches B from
            the sampler of the data set *without* x.
        sample_rate, noise_std: q in (0, 1] and s > 0, numbers or (...).
        delta: in (0, 1).
        max_sensitivity: a bound on :math:`\Delta(B)` for every B; needed with a confidence.
        confidence: if given, the result is an upper confidence bound at this level for each entry
            by itself; without it the mean over the batches stands in for the expectation: an
            *estimate*.
        probabilities: (batches,) of *all* batches, in place of draws: then the result is exact.
        direction: "remove" or "add".

    Returns:
        A float of numbers and lists of them, else (...) float64.

    Raises:
        ValueError: an argument outside its range; an unknown direction; no batch; sensitivities
            above `max_sensitivity`; a confidence without `max_sensitivity` or beside probabilities;
            probabilities that are not one for each batch or do not sum to 1.

    >>> coupled_epsilon([0.5, 1.0, 1.5], sample_rate=0.1, noise_std=1.0, delta=1e-5)
    3.4819...
    """
    _checks.number("delta", delta, 0, 1, closed="neither")
    options: dict[str, Any] = dict(
        sample_rate=sample_rate,
        noise_std=noise_std,
        max_sensitivity=max_sensitivity,
        confidence=confidence,
        probabilities=probabilities,
        direction=direction,
    )

    def reached(epsilon):
        # Nothing is above an epsilon of inf, which is the answer where no other one is a float.
        return (
            coupled_delta(sensitivities, epsilon=epsilon.clamp(max=1e308), **options) <= delta
        ) | epsilon.isinf()

    done = reached(torch.zeros((), dtype=torch.float64))
    low = torch.zeros_like(done, dtype=torch.float64)
    high = torch.ones_like(done, dtype=torch.float64)
    while not bool((enough := reached(high)).all()):
        low, high = torch.where(enough, low, high), torch.where(enough, high, 2 * high)
    found = torch.where(done, 0.0, bisect(reached, good=high, bad=low, halvings=50))
    return _checks.as_given(
        found, *_checks.entries(sensitivities, probabilities), sample_rate, noise_std
    )


@overload
def holder_epsilon(
    sensitivities: Sequence[float],
    *,
    sample_rate: float,
    noise_std: float,
    delta: float,
    p: float | Sequence[float],
    share: float = ...,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Sequence[float] | None = ...,
) -> float: ...
@overload
def holder_epsilon(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    delta: float,
    p: Numbers,
    share: float = ...,
    max_sensitivity: float | None = ...,
    confidence: float | None = ...,
    probabilities: Array | None = ...,
) -> torch.Tensor: ...
def holder_epsilon(
    sensitivities: Array,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    delta: float,
    p: Numbers,
    share: float = 0.5,
    max_sensitivity: float | None = None,
    confidence: float | None = None,
    probabilities: Array | None = None,
) -> float | torch.Tensor:
    r"""Corollary 3.1: an epsilon at `delta` for x's presence, from the sensitivities' p-norm.

    With :math:`a_p = q\,(E_B[e^{p\,\varepsilon_G(\Delta(B))}])^{1/p}`,

    .. math:: \varepsilon' = \ln\big(a_p^{p/(p-1)}\, \delta'^{-1/(p-1)} + 1 - q\big)
              \quad\text{at}\quad \delta = q\,\delta_G + \delta',

    where :math:`\varepsilon_G` is the epsilon of the analytic Gaussian mechanism at
    :math:`\delta_G` (the classical :math:`\sqrt{2\ln(1.25/\delta)}/s` per unit of sensitivity is
    proved for results below 1 only).

    Proof: :math:`P(M(X') \in S) \le q\,E_B[e^{\varepsilon_G} P_B] + q\delta_G + (1-q) Q` with
    :math:`P_B = P(N(U(B)) \in S)` and Q its mean. Hoelder's inequality and
    :math:`P_B^{p/(p-1)} \le P_B` make the first term at most :math:`a_p Q^{1-1/p}`. Either that is
    at most :math:`\delta'`; or :math:`Q^{-1/p} < (a_p/\delta')^{1/(p-1)}`, and then it is at most
    :math:`a_p^{p/(p-1)} \delta'^{-1/(p-1)} Q`.

    One-sided: nothing is said of P(M(X) in S). `coupled_epsilon` is smaller and serves both sides.

    Many arguments, since the step, the bound's order and its confidence are all given.

    Args:
        sensitivities: (batches, ...) values of :math:`\Delta(B)`, for independent batches B from
            the sampler of the data set *without* x.
        sample_rate, noise_std: q in (0, 1] and s > 0, numbers or (...).
        delta: the total, in (0, 1).
        p: above 1, or a sequence of them: the least epsilon counts.
        share: of `delta` that goes to :math:`\delta'`, in (0, 1).
        max_sensitivity: a bound on :math:`\Delta(B)` for every B; needed with a confidence.
        confidence: if given, the result is an upper confidence bound at this level for each entry
            by itself; without it the mean over the batches stands in for the expectation: an
            *estimate*.
        probabilities: (batches,) of *all* batches, in place of draws: then the result is exact.

    Returns:
        A float of numbers and lists of them, else (...) float64.

    Raises:
        ValueError: an argument outside its range; no batch; sensitivities above `max_sensitivity`;
            a confidence without `max_sensitivity` or beside probabilities; probabilities that are
            not one for each batch or do not sum to 1.

    >>> holder_epsilon(
    ...     [0.2, 0.4, 0.6], sample_rate=0.01, noise_std=1.0, delta=1e-5, p=[10, 100, 1000, 10000]
    ... )
    0.0501...
    """
    _checks.number("delta", delta, 0, 1, closed="neither")
    _checks.number("share", share, 0, 1, closed="neither")
    _checks.in_interval("p", p, 1, math.inf, closed="neither")
    given = *_checks.entries(sensitivities, probabilities, p), sample_rate, noise_std
    sensitivities, probabilities = _batches(
        sensitivities, probabilities, max_sensitivity, confidence
    )
    _checks.in_interval("sample_rate", sample_rate, 0, 1, closed="right")
    _checks.in_interval("noise_std", noise_std, 0, math.inf, closed="neither")
    q, noise = (
        torch.as_tensor(v, dtype=torch.float64, device=sensitivities.device)
        for v in (sample_rate, noise_std)
    )
    delta_prime, delta_gauss = share * delta, ((1 - share) * delta / q).clamp(max=1 - 1e-12)
    losses = _gaussian_epsilon(sensitivities / noise, delta_gauss)
    powers = torch.as_tensor(p, dtype=torch.float64).reshape(-1).tolist()
    found = []
    for power in powers:
        if confidence is None or max_sensitivity is None:
            log_moment = log_mean(power * losses, probabilities)
        else:
            largest = power * gaussian_epsilon(max_sensitivity / noise, delta_gauss)
            each = 1 - (1 - confidence) / len(powers)
            log_moment = log_mean_bound(power * losses, largest, confidence=each, log_smallest=0.0)
        first = (power * torch.log(q) + log_moment - math.log(delta_prime)) / (power - 1)
        found.append(torch.logaddexp(first, torch.log1p(-q)))
    return _checks.as_given(torch.stack(found).min(0).values.clamp(min=0), *given)


def _batches(sensitivities, probabilities, max_sensitivity, confidence):
    """The sensitivities as (batches, ...), and the logarithms of their weights."""
    _checks.in_interval("sensitivities", sensitivities, 0, math.inf, closed="left")
    sensitivities = torch.as_tensor(sensitivities, dtype=torch.float64)
    if sensitivities.ndim == 0 or len(sensitivities) == 0:
        raise ValueError(
            "sensitivities must be (batches, ...), one batch or more, got shape "
            f"{tuple(sensitivities.shape)}"
        )
    if max_sensitivity is not None:
        _checks.number("max_sensitivity", max_sensitivity, 0, math.inf, closed="left")
        _checks.in_interval("sensitivities", sensitivities, 0, max_sensitivity * (1 + 1e-9))
        sensitivities = sensitivities.clamp(max=max_sensitivity)
    if confidence is not None:
        _checks.number("confidence", confidence, 0, 1, closed="neither")
        if max_sensitivity is None:
            raise ValueError(
                "max_sensitivity must be given with a confidence: draws alone bound no mean"
            )
        if probabilities is not None:
            raise ValueError(
                "confidence must be None where probabilities are given, since then the result is "
                "exact"
            )
    if probabilities is None:
        return sensitivities, None
    _checks.in_interval("probabilities", probabilities, 0, 1)
    probabilities = torch.as_tensor(probabilities, dtype=torch.float64)
    if probabilities.shape != sensitivities.shape[:1] or abs(float(probabilities.sum()) - 1) > 1e-9:
        raise ValueError(
            f"probabilities must be {len(sensitivities)} numbers that sum to 1, got shape "
            f"{tuple(probabilities.shape)} and sum {float(probabilities.sum()):g}"
        )
    return sensitivities, torch.log(probabilities)


def log_mean(log_values, log_weights=None):
    """ln of the mean of e^values over the first dimension."""
    if log_weights is None:
        return torch.logsumexp(log_values, 0) - math.log(len(log_values))
    possible = log_weights > -math.inf  # a batch of probability 0 may have an infinite value
    log_weights = log_weights[possible].view(-1, *(1,) * (log_values.ndim - 1))
    return torch.logsumexp(log_values[possible] + log_weights, 0)


def _gaussian_epsilon(ratios, delta):
    """`gaussian_epsilon`, once per distinct pair: it is expensive; the sum rule has one pair."""
    ratios, delta = torch.broadcast_tensors(ratios, delta)
    pairs, place = torch.unique(
        torch.stack([ratios, delta], dim=-1).reshape(-1, 2), dim=0, return_inverse=True
    )
    return gaussian_epsilon(pairs[:, 0], pairs[:, 1])[place].reshape(ratios.shape)
