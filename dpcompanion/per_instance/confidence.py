r"""An upper confidence bound on the mean of a bounded variable, from few draws, in the log domain.

The variables here are moments :math:`Y = e^L` between known ends, mostly tiny beside the larger
one. Scale Y to :math:`X \in [0, 1]`. If the mean of X were m or more, then betting against it,

.. math::
    K(m) = \sum_j w_j \prod_i \Big(1 - c_j + c_j \frac{1 - X_i}{1 - m}\Big),
    \qquad 0 \le c_j \le 1, \quad \sum_j w_j = 1,

would be a fair or losing game: every factor has a mean of at most 1. So K(m) reaches 1/(1 -
confidence) with a probability of at most 1 - confidence (Markov), and every m at which it does is
refuted. K rises with m, so a bisection finds the smallest one.

Unlike Hoeffding's bound it profits from a small variance, and unlike the empirical Bernstein bound
it is not vacuous for a dozen draws. If all draws lie at the lower end it comes close to the best
possible, :math:`m = 1 - (1 - \text{confidence})^{1/n}`.

Source: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
section 4; here with a mixture of fixed bets in place of bets that adapt.
"""

import math
from collections.abc import Sequence
from typing import overload

import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion._types import Array, Numbers
from dpcompanion.accounting.search import bisect

_HALVINGS = 40


@overload
def log_mean_bound(
    log_values: Sequence[float], log_largest: float, *, confidence: float, log_smallest: float = ...
) -> float: ...
@overload
def log_mean_bound(
    log_values: Array, log_largest: Numbers, *, confidence: float, log_smallest: float = ...
) -> torch.Tensor: ...
def log_mean_bound(
    log_values: Array, log_largest: Numbers, *, confidence: float, log_smallest: float = -math.inf
) -> float | torch.Tensor:
    r""":math:`\ln u` with :math:`E[Y] \le u` at the given confidence, from independent draws of
    :math:`L = \ln Y`.

    Args:
        log_values: (draws, ...) draws of L, at most `log_largest`.
        log_largest: the logarithm of the most that Y can be; a number, or (...).
        confidence: in (0, 1).
        log_smallest: the logarithm of the least that Y can be; a number.

    Returns:
        A float of a list of numbers and a number, else (...) float64; `log_largest` where nothing
        better holds (so without any draw).

    Raises:
        ValueError: draws outside the range.

    >>> draws = [0.1, 0.2, 0.0, 0.1, 0.3, 0.1, 0.2, 0.1, 0.0, 0.2]
    >>> log_mean_bound(draws, 1.0, confidence=0.95, log_smallest=0.0)
    0.4839...
    """
    _checks.number("confidence", confidence, 0, 1, closed="neither")
    given = *_checks.entries(log_values), log_largest
    log_values = torch.as_tensor(log_values, dtype=torch.float64)
    largest = to_device(
        torch.as_tensor(log_largest, dtype=torch.float64), log_values.device
    ).expand(log_values.shape[1:])
    # Of a Y that is always 0 the logarithm is -inf, which has no room for rounding.
    most = torch.where(largest.isinf(), largest, largest + 1e-9 * (1 + largest.abs()))
    # One question, since each is a wait where the values lie on a GPU.
    fit = (log_values <= most) & (log_values >= log_smallest) & (log_values < math.inf)
    if not bool(fit.all()):
        _checks.in_interval("log_values", log_values, -math.inf, math.inf, closed="left")
        raise ValueError(
            f"log_values must lie in [{log_smallest:g}, {float(largest.max()):g}], got "
            f"{float(log_values.min()):g} to {float(log_values.max()):g}"
        )
    draws = len(log_values)
    if draws == 0:
        return _checks.as_given(largest.clone(), *given)
    span = _log_difference(largest, log_smallest)
    # Rounded up a little, so that a draw never counts for less than it is.
    share = (torch.exp(_log_difference(log_values, log_smallest) - span) * (1 + 1e-12)).clamp(
        max=1.0
    )
    share = torch.where(span.isneginf(), torch.zeros_like(share), share)
    bets, weights = _bets(draws)

    def refuted(mean):
        return _log_capital(share, mean, bets, weights) >= -math.log1p(-confidence)

    least = bisect(
        refuted, good=torch.ones_like(largest), bad=torch.zeros_like(largest), halvings=_HALVINGS
    )
    bound = torch.logaddexp(torch.log(least) + span, torch.full_like(span, log_smallest))
    return _checks.as_given(torch.minimum(bound, largest), *given)


def _bets(draws):
    """Shares of the capital to bet, and how the capital is spread over them: half on all-in, the
    rest from 1/2 down. Numbers of the host, which need not be asked for.
    """
    count = 2 + math.ceil(math.log2(draws + 1) / 2)
    return [0.5**i for i in range(count + 1)], [0.5] + [0.5 / count] * count


def _log_capital(share, mean, bets, weights):
    """ln K(mean): share (draws, ...), mean (...)."""
    odds = (1 - share) / (1 - mean)
    total = torch.full_like(mean, -math.inf)
    for bet, weight in zip(bets, weights):
        capital = torch.log1p(bet * (odds - 1)).sum(0) if bet < 1 else torch.log(odds).sum(0)
        total = torch.logaddexp(total, capital + math.log(weight))
    return total


def _log_difference(log_a, log_b):
    """ln(e^a - e^b) for a >= b; -inf where they are equal."""
    if log_b == -math.inf:
        return log_a
    gap = (log_a - log_b).clamp(min=0)
    return log_a + torch.log(-torch.expm1(-gap))
