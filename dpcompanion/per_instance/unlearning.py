r"""Retrain, or keep the model? Naive per-instance unlearning (Thudi et al. 2024, section 5.4).

Examples ask, one after another, to be forgotten; :math:`D^t` is what is left after t requests and A
trains. The model at hand was drawn from :math:`A(D^s)`, s being the last time that it was trained.
If its law is close enough to that of :math:`A(D^t)` it may stay. The weak triangle inequality

.. math::

    D_\alpha(P \| Q) \le \frac{\alpha - 1/2}{\alpha - 1}\, D_{2\alpha}(P \| R)
    + D_{2\alpha - 1}(R \| Q)

(Mironov 2017, corollary 4; by Cauchy and Schwarz) chains the requests since then, and doubles the
order for each. In the paper's algorithm the constant reads :math:`(\alpha-1)/(\alpha-2)`, which is
larger, so safe, and says nothing at orders up to 2.

The guarantee, :math:`D_\alpha(\text{model} \| A(D^t)) \le \beta` after every request, takes the
requests as fixed. A person who asks *because of* the model that was released is not covered: given
such a request, the model's law is no longer :math:`A(D^s)`. The paper's proof of fact 5.2 passes
over this.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from dpcompanion import _checks


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do at a request (counted from 1).

    `bound_if_kept` bounds the divergence of the model's law from that of retraining if the model is
    kept, `bound` after the decision.
    """

    request: int
    bound_if_kept: float
    keep: bool

    @property
    def bound(self) -> float:
        return self.bound_if_kept if self.keep else 0.0


def naive_unlearning(
    divergence: Callable[..., Any], *, requests: int, order: float, budget: float
) -> list[Decision]:
    r"""NPIU: decide at each request whether to keep the model or to retrain.

    Args:
        divergence: a function (request, order) -> a bound on
            :math:`D_\text{order}(A(D^{t-1}) \| A(D^t))`, the direction in which the example of
            request t is removed; requests count from 1.
        requests: how many there are.
        order: :math:`\alpha`, above 1.
        budget: :math:`\beta`, at least 0.

    Returns:
        A list of `Decision`, one for each request. After each, the divergence of the model's law
        from that of retraining is at most its `bound`, so at most the budget.

    >>> for decision in naive_unlearning(lambda t, a: 0.01 * a, requests=4, order=2, budget=0.3):
    ...     print(
    ...         decision.request,
    ...         f"{decision.bound_if_kept:.3f}",
    ...         "keep" if decision.keep else "retrain",
    ...     )
    1 0.020 keep
    2 0.090 keep
    3 0.275 keep
    4 0.698 retrain
    """
    requests = _checks.whole_number("requests", requests, 0)
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    budget = _checks.number("budget", budget, 0, math.inf, closed="left")
    decisions, trained = [], 0
    for request in range(1, requests + 1):
        bound = _since(divergence, trained, request, order)
        keep = bound <= budget
        decisions.append(Decision(request, bound, keep))
        trained = trained if keep else request
    return decisions


def _since(divergence, trained, request, order):
    """The triangle inequality from the data of `trained` to those of `request`, the last first."""
    total, factor = 0.0, 1.0
    while request > trained + 1:
        total += factor * _checks.number("divergence", divergence(request, 2 * order - 1), 0)
        factor *= (order - 0.5) / (order - 1)
        order, request = 2 * order, request - 1
    return total + factor * _checks.number("divergence", divergence(request, order), 0)
