r"""A sweep's price: the best of randomly many runs (private selection; Papernot and Steinke 2022).

Training with k settings and publishing the best model uses the data k times. Composed, k runs cost
k times as many steps. Where the number of runs K is random and nothing but the best run is
released, much less is spent. With :math:`\varepsilon(\lambda)` the Rényi divergence of one run,

* geometric K, :math:`P(K = k) = \gamma (1-\gamma)^{k-1}`, mean :math:`1/\gamma` (theorem 2,
  :math:`\eta = 1`), for every :math:`\hat\lambda > 1`:

  .. math:: \varepsilon'(\lambda) = \varepsilon(\lambda) + 2\Big(1 - \frac1{\hat\lambda}\Big)
      \varepsilon(\hat\lambda) + \frac{2 \ln(1/\gamma)}{\hat\lambda} + \frac{\ln E[K]}{\lambda - 1};

* Poisson K of mean m (theorem 6; with K = 0 nothing is released), with :math:`\hat\delta` the delta
  of one run at :math:`\hat\varepsilon = \ln(1 + 1/(\lambda - 1))`:

  .. math::
      \varepsilon'(\lambda) = \varepsilon(\lambda) + m\,\hat\delta +
      \frac{\max(0, \ln m)}{\lambda - 1}.

The score by which the best is chosen must come from the run's output, or be covered by its epsilon;
a score on the training data itself is not free. Settings are sampled from a fixed distribution, a
new one for each run.

>>> from dpcompanion.accounting import SampledGaussian, compute_epsilon, select_best
>>> run = SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
>>> best = select_best(run, mean=10)
>>> one, ten = (
...     compute_epsilon(sample_rate=0.01, noise_multiplier=1.1, steps=n * 1000, delta=1e-5)
...     for n in (1, 10)
... )
>>> f"one run {one:.2f}, the best of about ten {best.epsilon(1e-5):.2f}, ten composed {ten:.2f}"
'one run 1.52, the best of about ten 2.96, ten composed 5.19'
"""

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion.accounting.conversions import rdp_to_delta, rdp_to_epsilon
from dpcompanion.accounting.items import Guarantee, Laplace, LedgerEntry
from dpcompanion.accounting.ledger import Ledger
from dpcompanion.accounting.rdp import DEFAULT_ORDERS, rdp_sampled_gaussian

DISTRIBUTIONS = ("poisson", "geometric")
_ORDERS = tuple(1 + np.geomspace(1e-3, 0.09, 20)) + DEFAULT_ORDERS


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """What the best of randomly many runs costs: Rényi divergences `rdp` at `orders`, upper bounds,
    for the `relation` and `unit` of one run.
    """

    orders: torch.Tensor
    rdp: torch.Tensor
    relation: str = "add-remove"
    unit: str = "example"

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta`, an upper bound."""
        return float(
            rdp_to_epsilon(
                self.rdp, self.orders, _checks.number("delta", delta, 0, 1, closed="neither")
            )[0]
        )

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon`, an upper bound."""
        return float(rdp_to_delta(self.rdp, self.orders, epsilon)[0])

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """As an (epsilon, delta) guarantee, for `Ledger.add`; ValueError without a `delta`."""
        if delta is None:
            raise ValueError(
                "delta must be given, at which the selection's guarantee is taken, got None"
            )
        return LedgerEntry(
            Guarantee(self.epsilon(delta), delta), relation=self.relation, unit=self.unit
        )


def select_best(item: Any, *, mean: float, distribution: str = "poisson") -> Selection:
    """The cost of the best of randomly many runs of `item`, as `Selection`.

    `.epsilon(delta)` and `.delta(epsilon)` of the result are upper bounds.

    Args:
        item: one run: an item of a ledger, a plan, or a `Ledger` of all that one run does; of
            guarantees only those with delta 0.
        mean: the expected number of runs, above 0; for "geometric" at least 1.
        distribution: of their number: "poisson", the cheaper one, or "geometric".

    Raises:
        ValueError: an argument outside its range, or a guarantee with a delta, of which no
            divergence is known.

    >>> geometric = select_best(Guarantee(0.1, 0.0), mean=100, distribution="geometric")
    >>> round(geometric.epsilon(1e-9), 3)  # three times one run's (Liu and Talwar 2019)
    0.3
    """
    _checks.one_of("distribution", distribution, DISTRIBUTIONS)
    geometric = distribution == "geometric"
    mean = _checks.number(
        "mean", mean, 1 if geometric else 0, math.inf, closed="left" if geometric else "neither"
    )
    one = item if isinstance(item, Ledger) else Ledger([item])
    if one.relation != "add-remove":
        raise ValueError(f"item must be a ledger with relation='add-remove', got {one.relation!r}")
    unit = " or ".join(one.units)
    # Where all losses are bounded, so are the divergences, and large orders say the most.
    beyond = (
        tuple(2.0**power for power in range(11, 31)) if one.composition.largest < math.inf else ()
    )
    orders = torch.tensor(_ORDERS + beyond, dtype=torch.float64)
    rdp = rdp_of(one, orders)
    if geometric:
        beside = ((1 - 1 / orders) * 2 * rdp + 2 * math.log(mean) / orders).min()
        return Selection(orders, rdp + beside + math.log(mean) / (orders - 1), one.neighbours, unit)
    at = -torch.log1p(-1 / orders)  # ln(lambda / (lambda - 1))
    deltas = one.composition.delta_at(at)
    return Selection(
        orders, rdp + mean * deltas + max(math.log(mean), 0.0) / (orders - 1), one.neighbours, unit
    )


def rdp_of(ledger: Ledger, orders: torch.Tensor) -> torch.Tensor:
    """Rényi divergences of all items of a ledger together, at each order."""
    total = torch.zeros_like(orders)
    for (rate, noise), steps in ledger.composition.runs.items():
        total += steps * rdp_sampled_gaussian(
            sample_rate=rate, noise_multiplier=noise, orders=orders
        )
    total += orders * ledger.composition.mu**2 / 2
    for item in ledger.items:
        if isinstance(item, Laplace):
            total += item.count * _laplace(item.scale, orders)
        elif isinstance(item, Guarantee):
            if item.delta:
                raise ValueError(f"item must have no Guarantee with a delta above 0, got {item!r}")
            total += _randomized_response(item.epsilon, orders)
    return total


#: Below this epsilon the closed forms are differences of numbers that nearly cancel.
_TINY = 1e-4


def _of_tiny_epsilon(epsilon, a):
    """An upper bound for any (epsilon, 0)-DP mechanism (Bun and Steinke 2016, proposition 3.3)."""
    return (a * (epsilon**2 / 2)).clamp(max=epsilon)


def _laplace(scale, a):
    """Mironov 2017, proposition 6."""
    if 1 / scale < _TINY:
        return _of_tiny_epsilon(1 / scale, a)
    rest = torch.logaddexp(
        torch.log(a / (2 * a - 1)) + (a - 1) / scale, torch.log((a - 1) / (2 * a - 1)) - a / scale
    )
    return rest / (a - 1)


def _randomized_response(epsilon, a):
    """Mironov 2017, proposition 5: no (epsilon, 0)-DP mechanism has larger divergences."""
    if epsilon < _TINY:
        return _of_tiny_epsilon(epsilon, a)
    high = -math.log1p(math.exp(-epsilon))
    low = -math.log1p(math.exp(epsilon)) if epsilon < 700 else -epsilon
    return torch.logaddexp(a * high + (1 - a) * low, a * low + (1 - a) * high).clamp(min=0) / (
        a - 1
    )
