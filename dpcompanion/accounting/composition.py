r"""What the items of a ledger cost together: epsilon, delta, trade-off curve and mu.

Equal items are put together first, whatever their order, so that equal ledgers have equal epsilons:
sampled Gaussians of one rate and noise count their steps, all Gaussian releases and full batches
make one Gaussian, Laplace noise and guarantees are counted. `dpcompanion.accounting.mixed` adds up
their losses in each direction, on a grid that is accurate near what is asked for. Where so little
noise meets so many steps that no grid resolves the loss, the parts' epsilons are added up.

>>> from dpcompanion.accounting import Gaussian, SampledGaussian
>>> run = SampledGaussian(0.01, 1.0, 500)
>>> together = Composition([run, Gaussian(20.0), run], "add-remove")
>>> together.runs, round(together.mu, 6), round(together.epsilon(1e-5), 3)
({(0.01, 1.0): 1000}, 0.05, 1.8...)
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from dpcompanion.accounting import inclusion_bound, mixed
from dpcompanion.accounting.composed import ComposedLoss
from dpcompanion.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from dpcompanion.accounting.histories import SPREAD
from dpcompanion.accounting.items import (
    Gaussian,
    Guarantee,
    Item,
    Laplace,
    SampledGaussian,
    guarantee_replaced,
)
from dpcompanion.accounting.loss import DIRECTIONS, LEAST_RATE, StepLoss
from dpcompanion.accounting.pld import LOG_CAPPED, ROUNDING, NoGrid
from dpcompanion.accounting.runs import compute_epsilon
from dpcompanion.accounting.search import bisect
from dpcompanion.accounting.tradeoff import (
    GaussianTradeOff,
    TradeOffCurve,
    best_log_deltas,
    curve_deltas,
    curve_epsilons,
    last_epsilon,
)

_UP = 1 + 2.0**-50  # more than a few roundings take away
_NODES = 1 << 12  # epsilons of a curve, in even steps and as many in even ratios
_MU_NODES = 2000  # epsilons at which mu is looked at
_ADDED_UP_NODES = 50  # points of a curve where no grid resolves the loss


class GaussianMu(NamedTuple):
    """`mu` of Gaussian DP, from above, and the regret: by how much its curve lies below the true
    one, at most.
    """

    mu: float
    regret: float


class Composition:
    """The summed loss of items that are independent of each other.

    Args:
        items: of the four kinds of `dpcompanion.accounting.items`.
        relation: "add-remove" or "replace", as of a `Ledger`.

    Attributes:
        runs: {(sample rate, noise multiplier): steps} of sampled Gaussians that sample.
        mu: of all Gaussian releases and full batches together, rounded up.
        laplace: {scale over sensitivity: how often}.
        guarantees: {(epsilon, delta): how often}.
        infinite: the probability of an infinite loss, from above: all deltas of guarantees; a
            single one is what it is.
        largest: what no finite loss exceeds, inf beside Gaussians.
    """

    def __init__(self, items: Iterable[Item], relation: str):
        self.relation = relation
        self.runs: dict[tuple[float, float], int] = {}
        self.laplace: dict[float, int] = {}
        self.guarantees: dict[tuple[float, float], int] = {}
        ratios = []
        for item in items:
            if isinstance(item, SampledGaussian):
                if item.sample_rate == 1:
                    ratios.append(math.sqrt(item.steps) * self._factor(2) / item.noise_multiplier)
                elif item.steps:
                    key = max(item.sample_rate, LEAST_RATE), item.noise_multiplier
                    self.runs[key] = self.runs.get(key, 0) + item.steps
            elif isinstance(item, Guarantee):
                key = item.epsilon, item.delta
                if relation == "replace":
                    key = guarantee_replaced(item)
                self.guarantees[key] = self.guarantees.get(key, 0) + 1
            elif item.count and isinstance(item, Gaussian):
                ratio = self._factor(item.replaced) / item.noise_multiplier
                ratios.append(math.sqrt(item.count) * ratio)
            elif item.count and isinstance(item, Laplace):
                scale = item.scale / self._factor(item.replaced)
                self.laplace[scale] = self.laplace.get(scale, 0) + item.count
        self.runs = dict(sorted(self.runs.items()))
        self.laplace = dict(sorted(self.laplace.items()))
        self.guarantees = dict(sorted(self.guarantees.items()))
        self.mu = math.hypot(*ratios) * _UP
        self.infinite, self.largest = self._infinite(), self._largest()
        self._losses: dict[tuple[str, float], tuple[ComposedLoss | None, float]] = {}

    def _factor(self, replaced):
        """How many times the sensitivity to adding or removing an example counts."""
        return 1.0 if self.relation == "add-remove" else replaced

    def _infinite(self):
        used = [(delta, count) for (_, delta), count in self.guarantees.items() if delta]
        if any(delta == 1 for delta, _ in used):
            return 1.0
        if len(used) == 1 and used[0][1] == 1:
            return used[0][0]
        if not used:
            return 0.0
        together = -math.expm1(math.fsum(count * math.log1p(-delta) for delta, count in used))
        return min(1.0, together * _UP)

    def _largest(self):
        if self.runs or self.mu:
            return math.inf
        return math.fsum(self._bounded_epsilons())

    def _bounded_epsilons(self):
        """Of Laplace noise and of guarantees, each as often as it counts."""
        return [
            *(count / scale for scale, count in self.laplace.items()),
            *(count * epsilon for (epsilon, _), count in self.guarantees.items()),
        ]

    @property
    def is_gaussian(self) -> bool:
        """Whether it is one Gaussian, which has closed forms."""
        return self.mu > 0 and not (self.runs or self.laplace or self.guarantees)

    @property
    def _directions(self):
        if self.relation == "replace":  # the pair and its mirror image are one
            return ("replace",)
        return DIRECTIONS if self.runs else DIRECTIONS[:1]

    def _sum(self, direction, log_delta):
        """The loss of all items in one direction, capped as a delta of exp(log_delta) can afford;
        None of none.
        """
        log_capped = (
            LOG_CAPPED + log_delta - math.log(max(sum(self.runs.values()) + (self.mu > 0), 1))
        )
        noises = [noise / self._factor(2) for _, noise in self.runs]
        noises += [1 / self.mu] if self.mu else []
        bounded = [1 / epsilon for epsilon, _ in self.guarantees if epsilon]
        least = min([*noises, *self.laplace, *bounded], default=math.inf)
        if noises and least < inclusion_bound.LITTLE_NOISE:
            raise NoGrid(f"noise of {least:g} times the sensitivity is too little for a grid")
        most = SPREAD * least
        kinds: list = []
        for (rate, noise), steps in self.runs.items():
            if direction == "replace":
                kinds.append((mixed.ReplacementLoss(rate, min(noise, most), log_capped), steps))
            else:
                kinds.append((StepLoss(rate, min(noise, most), direction, log_capped), steps))
        if self.mu:
            kinds.append((mixed.GaussianLoss(min(1 / self.mu, most), log_capped), 1))
        kinds.extend(
            (mixed.LaplaceLoss(min(scale, most)), count) for scale, count in self.laplace.items()
        )
        # An epsilon of 0 has no finite loss; its delta is among the infinite ones.
        kinds.extend(
            (mixed.WorstLoss(max(epsilon, 1 / most), delta), count)
            for (epsilon, delta), count in self.guarantees.items()
            if epsilon
        )
        return mixed.Sum(kinds) if kinds else None

    def _guess(self, total, delta):
        """An upper bound on epsilon at `delta`, by Chernoff's bound."""
        return mixed.guess(total, (delta - self.infinite) * (1 - 2 * math.exp(LOG_CAPPED)))

    def _at(self, direction, delta):
        """The loss in one direction, accurate near `delta`, and its epsilon there."""
        if (direction, delta) not in self._losses:
            total = self._sum(direction, math.log(delta - self.infinite))
            if total is None:
                self._losses[direction, delta] = None, 0.0
            else:
                most = self._guess(total, delta)
                loss, found = mixed.refined(total, most, delta, self.infinite)
                self._losses[direction, delta] = loss, min(found, most)
        return self._losses[direction, delta]

    def epsilon(self, delta: float) -> float:
        """As `Ledger.epsilon`."""
        if self.is_gaussian:
            return float(gaussian_epsilon(self.mu, delta / ROUNDING))
        if delta <= self.infinite:
            return self.largest if delta == self.infinite else math.inf
        try:
            loss, found = self._at(self._directions[0], delta)
            if loss is not None and "add" in self._directions:
                found = max(found, self._adding(delta, found))
        except NoGrid:
            found = self._added_up(delta)
        return min(found, self.largest)

    def _adding(self, delta, found):
        """Epsilon where an example is added, or something smaller than `found`, as it mostly is."""
        bound = self._guess(self._sum("add", math.log(delta - self.infinite)), delta)
        return bound if bound <= found else self._at("add", delta)[1]

    def error(self, delta: float) -> float:
        """What the grid adds to `epsilon(delta)`, to first order: 0 where none is needed, inf where
        none will do.
        """
        if self.is_gaussian or delta <= self.infinite:
            return 0.0
        try:
            losses = [self._at(direction, delta)[0] for direction in self._directions]
        except NoGrid:
            return math.inf
        return max((loss.error for loss in losses if loss is not None), default=0.0)

    def _added_up(self, delta):
        """The sum of the parts' epsilons, at equal shares of what guarantees leave of delta."""
        share = (delta - self.infinite) / max(len(self.runs) + (self.mu > 0), 1)
        parts = self._bounded_epsilons()
        if self.mu:
            parts.append(float(gaussian_epsilon(self.mu, share / ROUNDING)))
        for (rate, noise), steps in self.runs.items():
            run = {"sample_rate": rate, "steps": steps, "delta": share}
            if self.relation == "replace":
                # a step that samples the example moves by twice the clip norm at most
                parts.append(inclusion_bound.epsilon(noise_multiplier=noise / 2, **run))
            else:
                parts.append(compute_epsilon(noise_multiplier=noise, **run))
        return math.fsum(parts) * (1 + 1e-12)

    def _delta_added_up(self, epsilon):
        """The least delta at which the parts' epsilons add up to `epsilon` at most, from above."""

        def at(log_share):
            return self.infinite + (1 - self.infinite) * math.exp(float(log_share))

        def met(log_share):
            return torch.tensor(self._added_up(at(log_share)) <= epsilon)

        # what is added to the infinite ones must not be rounded off
        least = math.log(max(1e-300, 2.0**-50 * self.infinite / (1 - self.infinite)))
        most, least = (torch.tensor(each, dtype=torch.float64) for each in (-1e-9, least))
        if not met(most):
            return 1.0
        return at(least) if met(least) else at(bisect(met, good=most, bad=least, halvings=24))

    def delta(self, epsilon: float) -> float:
        """As `Ledger.delta`."""
        if self.is_gaussian:
            return min(1.0, ROUNDING * float(gaussian_delta(self.mu, epsilon)))
        if self.infinite == 1 or epsilon >= self.largest:
            return self.infinite
        try:
            return max(self._delta_of(direction, epsilon) for direction in self._directions)
        except NoGrid:
            return self._delta_added_up(epsilon)

    def _delta_of(self, direction, epsilon):
        log_delta = math.log(1e-9)
        for _ in range(6):
            total = self._sum(direction, log_delta)
            if total is None:
                return self.infinite
            loss, _ = mixed.refined(total, epsilon, None, self.infinite)
            found = loss.delta(epsilon)
            rest = math.log(max(found - self.infinite, 1e-300))
            # Cap more rarely as long as the cap is a share of what was found.
            if total.log_capped <= rest + LOG_CAPPED + 1 or rest <= -690:
                break
            log_delta = min(rest, log_delta - 15)
        return min(1.0, found)

    def _curve(self, least, nodes=_NODES):
        """Epsilons from 0, and log bounds on delta there, good at false positive rates down to
        `least`.
        """
        try:
            return self._curve_on_a_grid(least, nodes)
        except NoGrid:
            return self._added_up_curve(least)

    def _curve_on_a_grid(self, least, nodes):
        infinite = self.infinite
        deltas = [infinite + delta * (1 - infinite) for delta in curve_deltas(least)]
        composed = [
            [loss for delta in deltas if (loss := self._at(direction, delta)[0]) is not None]
            for direction in self._directions
        ]
        losses = [loss for each in composed for loss in each]
        last = min(last_epsilon(losses) if losses else 1.0, self.largest)
        epsilons = curve_epsilons(max(last, 1e-9), nodes)
        if not losses:
            return epsilons, torch.full_like(
                epsilons, math.log(infinite) if infinite else -math.inf
            )
        each = [best_log_deltas(losses, epsilons) for losses in composed]
        return epsilons, torch.stack(each).amax(0)

    def _added_up_curve(self, least):
        infinite, first = self.infinite, self._delta_added_up(0.0)
        shares = np.geomspace(1e-3 * max(least, curve_deltas(0.0)[-1]), 1.0, _ADDED_UP_NODES + 1)
        each = (infinite + (first - infinite) * share for share in reversed(shares[:-1].tolist()))
        deltas = [delta for delta in each if delta > infinite]
        # What is computed at the next delta may be off by a last bit: epsilons must not fall.
        epsilons = np.maximum.accumulate([0.0, *(self._added_up(delta) for delta in deltas)])
        return torch.from_numpy(epsilons), torch.log(
            torch.tensor([first, *deltas], dtype=torch.float64)
        )

    def delta_at(self, epsilons: torch.Tensor) -> torch.Tensor:
        """`delta` at many epsilons from a few compositions, a little above those of `delta`."""
        if self.is_gaussian:
            return (ROUNDING * gaussian_delta(self.mu, epsilons)).clamp(max=1.0)
        at, log_deltas = self._curve(1e-14)
        # Delta falls: that at the last epsilon before bounds it.
        before = (torch.searchsorted(at, epsilons, right=True) - 1).clamp(min=0)
        return torch.exp(log_deltas)[before]

    def trade_off(self, rates: torch.Tensor) -> torch.Tensor:
        """As `Ledger.trade_off`, (n,) at (n,) false positive rates."""
        if self.is_gaussian:
            return GaussianTradeOff(self.mu).false_negative_rate(rates)
        if self.infinite == 1:
            return torch.zeros_like(rates)
        inner = torch.cat((rates, 1 - rates))
        inner = inner[inner > 0]
        curve = TradeOffCurve(*self._curve(float(inner.min()) if len(inner) else 1.0))
        return curve.false_negative_rate(rates)

    def gaussian_mu(self, least: float) -> GaussianMu:
        """As `Ledger.mu`."""
        if self.largest == 0 == self.infinite:
            return GaussianMu(0.0, 0.0)
        if self.is_gaussian:
            return GaussianMu(self.mu, 0.0)
        if self.infinite > least:
            return GaussianMu(math.inf, 1.0)
        epsilons, log_deltas = self._curve(least, _MU_NODES)
        deltas = torch.exp(log_deltas)
        if float(deltas.max()) >= 1 or float(deltas[-1]) > least:
            return GaussianMu(math.inf, 1.0)
        # Between two epsilons delta is at most the first's, and a Gaussian's at least the second's.
        inside = deltas[:-1] > least
        if not inside.any():
            return GaussianMu(0.0, 0.0)
        mu = float(gaussian_mu(epsilons[1:][inside], deltas[:-1][inside]).max()) * (1 + 1e-9)
        rates = torch.from_numpy(np.geomspace(max(least, 1e-9), 1.0, 400))
        own = TradeOffCurve(epsilons, log_deltas).false_negative_rate(rates)
        normal = torch.distributions.Normal(0.0, 1.0)
        theirs = normal.cdf(normal.icdf(1 - rates) - mu)
        return GaussianMu(mu, float((own - theirs).max().clamp(min=0)))
