"""Lower bounds on epsilon and mu from counts of right and wrong guesses."""

import typing
from typing import Any, Generic, TypeVar, overload

import torch
from scipy import special

from dpcompanion import _checks
from dpcompanion._types import Numbers

_T = TypeVar("_T")


class Bounds(typing.NamedTuple, Generic[_T]):
    """One-sided bounds on a probability."""

    lower: _T
    upper: _T


@overload
def clopper_pearson(
    successes: float, trials: float, *, confidence: float = ...
) -> Bounds[float]: ...
@overload
def clopper_pearson(
    successes: Numbers, trials: Numbers, *, confidence: float = ...
) -> Bounds[torch.Tensor]: ...
def clopper_pearson(
    successes: Numbers, trials: Numbers, *, confidence: float = 0.95
) -> Bounds[Any]:
    """One-sided bounds on a probability, each missed with probability at most 1 - confidence.

    Args:
        successes: whole numbers from 0 to the trials; a number or a tensor.
        trials: whole numbers of 1 or more; a number or a tensor. The two broadcast.
        confidence: of each bound by itself, in (0, 1).

    Returns `Bounds`, (lower, upper): floats of numbers, else float64 tensors.

    Raises:
        ValueError: no trial, successes beyond the trials, counts that are not whole, or a
            confidence outside (0, 1).

    Source: Clopper and Pearson 1934.

    >>> clopper_pearson(0, 100)
    Bounds(lower=0.0, upper=0.0295...)
    """
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    return _interval({"successes": successes, "trials": trials}, confidence)


def _interval(counts, confidence):
    """As `clopper_pearson`, of counts under the names that the caller gave them."""
    (name, successes), (whole, trials) = counts.items()
    given = successes, trials
    successes, trials = map(_checks.unlabelled, given)
    _checks.in_interval(name, successes, 0)
    _checks.in_interval(whole, trials, 1)
    successes, trials = (
        torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in (successes, trials)
    )
    if bool((trials % 1 != 0).any()):
        raise ValueError(f"{whole} must be whole numbers, got {trials.tolist()}")
    k, n = _checks.broadcast(successes, trials, names=counts)
    if bool(((k > n) | (k % 1 != 0)).any()):
        raise ValueError(
            f"{name} must be whole numbers between 0 and the {whole}, got {successes.tolist()} of "
            f"{trials.tolist()}"
        )
    k, n = k.numpy(), n.numpy()
    lower = special.betaincinv(k.clip(min=1), n - k + 1, 1 - confidence) * (k > 0)
    upper = special.betaincinv(k + 1, (n - k).clip(min=1), confidence) * (k < n) + (k == n)
    return Bounds(*(_checks.as_given(torch.as_tensor(bound), *given) for bound in (lower, upper)))


@overload
def epsilon_lower_bound(
    *,
    true_positives: float,
    positives: float,
    false_positives: float,
    negatives: float,
    delta: float,
    confidence: float = ...,
) -> float: ...
@overload
def epsilon_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    delta: float,
    confidence: float = ...,
) -> torch.Tensor: ...
def epsilon_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    delta: float,
    confidence: float = 0.95,
) -> float | torch.Tensor:
    """The largest epsilon, at least 0, that the counts refute; in both directions.

    Args:
        true_positives, positives: right guesses among the trials of the first data set; numbers or
            tensors.
        false_positives, negatives: wrong guesses among the trials of the second.
        delta: in [0, 1).
        confidence: that the true epsilon is not below the result, for each entry by itself. A bound
            on each of the two rates enters, and they share it equally.

    Returns a float of numbers, else a float64 tensor.

    >>> epsilon_lower_bound(
    ...     true_positives=900, positives=1000, false_positives=10, negatives=1000, delta=1e-5
    ... )
    3.8719...
    """
    delta = _checks.number("delta", delta, 0, 1, closed="left")
    given = true_positives, positives, false_positives, negatives
    tpr, fpr = _rates(*given, confidence)
    found = torch.maximum((tpr - delta) / fpr, (1 - fpr - delta) / (1 - tpr)).clamp(min=1).log()
    return _checks.as_given(found, *given)


@overload
def mu_lower_bound(
    *,
    true_positives: float,
    positives: float,
    false_positives: float,
    negatives: float,
    confidence: float = ...,
) -> float: ...
@overload
def mu_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    confidence: float = ...,
) -> torch.Tensor: ...
def mu_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    confidence: float = 0.95,
) -> float | torch.Tensor:
    """The largest mu, at least 0, such that the counts refute mu-GDP.

    With `dpcompanion.accounting.gaussian_epsilon` it becomes an epsilon at any delta, for
    mechanisms that are claimed to be Gaussian only.

    Args:
        true_positives, positives: right guesses among the trials of the first data set; numbers or
            tensors.
        false_positives, negatives: wrong guesses among the trials of the second.
        confidence: that the true mu is not below the result, for each entry by itself. A bound on
            each of the two rates enters, and they share it equally.

    Returns a float of numbers, else a float64 tensor.

    >>> mu_lower_bound(true_positives=900, positives=1000, false_positives=10, negatives=1000)
    3.2634...
    """
    given = true_positives, positives, false_positives, negatives
    tpr, fpr = _rates(*given, confidence)
    # Swapping the two data sets gives the same number: the trade-off of Gaussians is symmetric.
    return _checks.as_given(
        (torch.special.ndtri(tpr) - torch.special.ndtri(fpr)).clamp(min=0), *given
    )


def _rates(true_positives, positives, false_positives, negatives, confidence):
    """The least rate of right guesses and the greatest of wrong ones, jointly at the confidence."""
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    right = {"true_positives": true_positives, "positives": positives}
    wrong = {"false_positives": false_positives, "negatives": negatives}
    each = (1 + confidence) / 2
    bounds = _interval(right, each).lower, _interval(wrong, each).upper
    return (torch.as_tensor(bound, dtype=torch.float64) for bound in bounds)
