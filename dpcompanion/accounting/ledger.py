r"""One account of all that was done with the same people's data.

A ledger composes sampled Gaussians of any rates and noises (trainings), Gaussian and Laplace releases,
(epsilon, delta) guarantees of mechanisms of which nothing else is known, training plans and other ledgers.  It adds up
their privacy losses (`dpcompanion.accounting.mixed`), in both directions (adding and removing an example), so that its
epsilon is an upper bound that the sum of the items' epsilons, or RDP, exceed by far:

>>> ledger = Ledger([SampledGaussian(0.01, 1.1, 500), SampledGaussian(0.01, 0.9, 300), SampledGaussian(0.02, 1.3, 200)])
>>> round(ledger.epsilon(1e-5), 3)
2.005

Composition is adaptive: what is done next may depend on what came out before.  The parameters in the ledger may not;
where they do, take a filter (`dpcompanion.filters`).

>>> ledger = ledger.add(Gaussian(20.0), label="histogram").add(Guarantee(0.1, 0.0), label="survey")
>>> f"{ledger.epsilon(1e-5):.3f}"
'2.050'
>>> Ledger.from_json(ledger.to_json()) == ledger
True
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _checks
from . import mixed, revealed
from .composed import ComposedLoss
from .gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from .loss import DIRECTIONS, LARGEST_NOISE, LEAST_RATE, _Step
from .pld import _HAIR, _LOG_CAPPED, NoGrid
from .runs import compute_epsilon
from .tradeoff import _Curve, _Gaussian, _log_deltas

_DELTAS = (1e-2, 1e-5, 1e-8, 1e-11, 1e-14)  # where the losses behind a curve are accurate
_NODES = 1 << 12  # epsilons of a curve, in even steps and as many in even ratios
_MU_NODES = 2000  # epsilons at which mu is looked at
_SPREAD = 1e12  # what costs so much less than the dearest item counts as so much: one grid holds all losses


@dataclasses.dataclass(frozen=True)
class SampledGaussian:
    """`steps` steps of the sampled Gaussian mechanism: Poisson sampling at `sample_rate` in (0, 1], then noise of
    `noise_multiplier`, above 0, times the clip norm."""

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self):
        _fix(self, "sample_rate", _checks.number("sample_rate", self.sample_rate, 0, 1, closed="right"))
        _fix(self, "noise_multiplier", _noise("noise_multiplier", self.noise_multiplier))
        _fix(self, "steps", _checks.whole_number("steps", self.steps, 0, 10**12))


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """`count` releases with Gaussian noise of standard deviation `noise_multiplier` times the sensitivity."""

    noise_multiplier: float
    count: int = 1

    def __post_init__(self):
        _fix(self, "noise_multiplier", _noise("noise_multiplier", self.noise_multiplier))
        _fix(self, "count", _checks.whole_number("count", self.count, 0, 10**12))


@dataclasses.dataclass(frozen=True)
class Laplace:
    """`count` releases with Laplace noise of scale `scale` times the sensitivity: each is 1 / scale-DP."""

    scale: float
    count: int = 1

    def __post_init__(self):
        _fix(self, "scale", _noise("scale", self.scale))
        _fix(self, "count", _checks.whole_number("count", self.count, 0, 10**12))


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A mechanism of which nothing is known but that it is (epsilon, delta)-DP, with delta in [0, 1)."""

    epsilon: float
    delta: float

    def __post_init__(self):
        _fix(self, "epsilon", _checks.number("epsilon", self.epsilon, 0, math.inf, closed="left"))
        _fix(self, "delta", _checks.number("delta", self.delta, 0, 1, closed="left"))


Item = SampledGaussian | Gaussian | Laplace | Guarantee
_ITEMS = {kind.__name__: kind for kind in (SampledGaussian, Gaussian, Laplace, Guarantee)}


class GaussianMu(NamedTuple):
    """`mu` of Gaussian DP, from above, and the regret: by how much its curve lies below the true one, at most."""

    mu: float
    regret: float


def _fix(item, name, value):
    object.__setattr__(item, name, value)


def _noise(name, value):
    return min(_checks.number(name, value, 0, math.inf, closed="neither"), LARGEST_NOISE)


def item_of(given: Any) -> Item:
    """An item, or the one that costs what a `DPSGDPlan` does: of individual rates and noises the dearest.

    Raises ValueError for anything else, for a plan without noise and for one with arithmetic="float".
    """
    if isinstance(given, tuple(_ITEMS.values())):
        return given
    names = ("sample_rate", "effective_noise_multiplier", "steps", "arithmetic")
    if not all(hasattr(given, name) for name in names):
        raise ValueError(f"item must be one of {', '.join(_ITEMS)}, a plan or a ledger, got {given!r:.80}")
    if given.arithmetic != "real":
        raise ValueError(
            f"item must be a plan with arithmetic='real', got {given.arithmetic!r}: add "
            "Guarantee(plan.epsilon(delta), delta), which counts what floats add"
        )
    noise = torch.as_tensor(given.effective_noise_multiplier, dtype=torch.float64).min().item()
    rate = torch.as_tensor(given.sample_rate, dtype=torch.float64).max().item()
    return SampledGaussian(rate, noise, given.steps)


class Ledger:
    """What was done with the same people's data, and what all of it costs together.

    Neighbouring relation: add or remove one example, by which also the items must be meant. Sampler: Poisson, with
    draws that are independent of each other. A ledger does not change; `add` makes a new one.

    Args:
        items: of the four kinds (`SampledGaussian`, `Gaussian`, `Laplace`, `Guarantee`), plans, or ledgers.

    Raises:
        ValueError: something else.

    >>> round(Ledger([Laplace(2.0), Laplace(2.0)]).epsilon(0.01), 3)           # below 1/2 + 1/2
    0.96
    """

    def __init__(self, items: Iterable[Any] = ()):
        self._entries: tuple[tuple[Item, str | None], ...] = ()
        for item in items:
            self._entries = self.add(item)._entries
        self._composed: dict[Any, Any] = {}

    @property
    def items(self) -> tuple[Item, ...]:
        """The items, in the order in which they were added."""
        return tuple(item for item, _ in self._entries)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The items' labels, None where there is none."""
        return tuple(label for _, label in self._entries)

    def add(self, item: Any, *, label: str | None = None) -> "Ledger":
        """This ledger and one thing more: an item, a plan, or another ledger, whose items keep their labels."""
        if label is not None and not isinstance(label, str):
            raise ValueError(f"label must be a text, got {label!r}")
        if isinstance(item, Ledger):
            more = tuple((each, own if label is None else label) for each, own in item._entries)
        else:
            more = ((item_of(item), label),)
        found = Ledger()
        found._entries = self._entries + more
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    def __hash__(self) -> int:
        return hash(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Ledger({list(self.items)!r})"

    # What is equal is put together, whatever the order: equal ledgers then have equal epsilons.

    def _runs(self):
        """{(rate, noise): steps} of sampled Gaussians that sample."""
        found: dict[tuple[float, float], int] = {}
        for item in self.items:
            if isinstance(item, SampledGaussian) and item.sample_rate < 1 and item.steps:
                key = max(item.sample_rate, LEAST_RATE), item.noise_multiplier
                found[key] = found.get(key, 0) + item.steps
        return dict(sorted(found.items()))

    def _gaussian_mu(self):
        """mu of all Gaussian releases and full batches together."""
        squares = [
            (item.count if isinstance(item, Gaussian) else item.steps) / item.noise_multiplier**2
            for item in self.items
            if isinstance(item, Gaussian) or (isinstance(item, SampledGaussian) and item.sample_rate == 1)
        ]
        return math.sqrt(math.fsum(squares)) * (1 + 2.0**-50)

    def _bounded(self):
        """Counts of Laplace scales, and of (epsilon, delta)."""
        scales: dict[float, int] = {}
        guarantees: dict[tuple[float, float], int] = {}
        for item in self.items:
            if isinstance(item, Laplace) and item.count:
                scales[item.scale] = scales.get(item.scale, 0) + item.count
            elif isinstance(item, Guarantee):
                key = item.epsilon, item.delta
                guarantees[key] = guarantees.get(key, 0) + 1
        return dict(sorted(scales.items())), dict(sorted(guarantees.items()))

    def _infinite(self):
        """The probability of an infinite loss: all deltas of guarantees, composed."""
        _, guarantees = self._bounded()
        return -math.expm1(sum(count * math.log1p(-delta) for (_, delta), count in guarantees.items()))

    def _largest(self):
        """What no finite loss exceeds: inf beside Gaussians."""
        scales, guarantees = self._bounded()
        if self._runs() or self._gaussian_mu():
            return math.inf
        return math.fsum([*(n / b for b, n in scales.items()), *(n * e for (e, _), n in guarantees.items())])

    def _only_gaussian(self):
        return not self._runs() and self._largest() == math.inf and not any(self._bounded())

    def _sum(self, direction, log_delta):
        """The loss of all items in one direction, capped as a delta of exp(log_delta) can afford; None of none."""
        runs, mu = self._runs(), self._gaussian_mu()
        scales, guarantees = self._bounded()
        log_capped = _LOG_CAPPED + log_delta - math.log(max(sum(runs.values()) + (mu > 0), 1))
        least = min(
            [*(noise for _, noise in runs), *scales, *([1 / mu] if mu else [])]
            + [1 / epsilon for epsilon, _ in guarantees if epsilon],
            default=math.inf,
        )
        if least < revealed.LITTLE_NOISE and (runs or mu):
            raise NoGrid(f"noise of {least:g} times the sensitivity is too little for a grid")
        most = _SPREAD * least
        kinds: list[tuple[Any, int]] = []
        for (rate, noise), steps in runs.items():
            kinds.append((_Step(rate, min(noise, most), direction, log_capped), steps))
        if mu:
            kinds.append((mixed.GaussianLoss(min(1 / mu, most), log_capped), 1))
        kinds.extend((mixed.LaplaceLoss(min(scale, most)), count) for scale, count in scales.items())
        # An epsilon of 0 has no finite loss; its delta is among the infinite ones.
        kinds.extend(
            (mixed.WorstLoss(max(epsilon, 1 / most), delta), count)
            for (epsilon, delta), count in guarantees.items()
            if epsilon
        )
        return mixed.Sum(kinds) if kinds else None

    def _directions(self):
        return DIRECTIONS if self._runs() else DIRECTIONS[:1]

    def _at(self, direction, delta) -> tuple[ComposedLoss | None, float]:
        """The loss in one direction, accurate near `delta`, and its epsilon there."""
        if (direction, delta) not in self._composed:
            infinite = self._infinite()
            total = self._sum(direction, math.log(delta - infinite))
            if total is None:
                self._composed[direction, delta] = None, 0.0
            else:
                most = mixed.guess(total, (delta - infinite) * (1 - 2 * math.exp(_LOG_CAPPED)))
                loss, found = mixed.refined(total, most, delta, infinite)
                self._composed[direction, delta] = loss, min(found, most)
        return self._composed[direction, delta]

    def epsilon(self, delta: float) -> float:
        """Epsilon of everything together at `delta`, an upper bound; inf where guarantees' deltas alone exceed it.

        The grid adds about 1e-4 of epsilon (`error`), with more than 32 different runs up to 2e-3 of it. Where so
        little noise meets so many steps that no grid resolves the loss, the items' epsilons are added up.

        Raises:
            ValueError: a delta outside (0, 1).
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        infinite, largest = self._infinite(), self._largest()
        if not self._entries:
            return 0.0
        if self._only_gaussian():
            return float(gaussian_epsilon(self._gaussian_mu(), delta / _HAIR))
        if delta <= infinite:
            return largest if delta == infinite else math.inf
        try:
            loss, found = self._at("remove", delta)
            if loss is not None and "add" in self._directions():
                found = max(found, self._adding(delta, found))
        except NoGrid:
            found = self._added_up(delta)
        return min(found, largest)

    def _adding(self, delta, found):
        """Epsilon where an example is added, or something smaller than `found`, as it mostly is."""
        infinite = self._infinite()
        total = self._sum("add", math.log(delta - infinite))
        bound = mixed.guess(total, (delta - infinite) * (1 - 2 * math.exp(_LOG_CAPPED)))
        return bound if bound <= found else self._at("add", delta)[1]

    def _added_up(self, delta):
        """The sum of the parts' epsilons, at equal shares of what guarantees leave of delta."""
        runs, mu = self._runs(), self._gaussian_mu()
        scales, guarantees = self._bounded()
        share = (delta - self._infinite()) / max(len(runs) + (mu > 0), 1)
        parts = [n / b for b, n in scales.items()] + [n * e for (e, _), n in guarantees.items()]
        if mu:
            parts.append(float(gaussian_epsilon(mu, share / _HAIR)))
        for (rate, noise), steps in runs.items():
            parts.append(compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=share))
        return math.fsum(parts) * (1 + 1e-12)

    def error(self, delta: float) -> float:
        """What the grid adds to `epsilon(delta)`, to first order: 0 where none is needed."""
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        if not self._entries or self._only_gaussian() or delta <= self._infinite():
            return 0.0
        try:
            losses = [self._at(direction, delta)[0] for direction in self._directions()]
        except NoGrid:
            return math.inf
        return max((loss.error for loss in losses if loss is not None), default=0.0)

    def delta(self, epsilon: float) -> float:
        """Delta of everything together at `epsilon`, an upper bound.

        Raises:
            ValueError: an epsilon below 0, or not finite, or a run that no grid resolves.

        >>> f"{Ledger([SampledGaussian(0.01, 1.0, 500), SampledGaussian(0.02, 1.2, 500)]).delta(2.0):.2e}"
        '8.51e-05'
        """
        epsilon = _checks.number("epsilon", epsilon, 0, math.inf, closed="left")
        if not self._entries:
            return 0.0
        if self._only_gaussian():
            return min(1.0, _HAIR * float(gaussian_delta(self._gaussian_mu(), epsilon)))
        infinite = self._infinite()
        if epsilon >= self._largest():
            return infinite
        return max(self._delta_of(direction, epsilon, infinite) for direction in self._directions())

    def _delta_of(self, direction, epsilon, infinite):
        log_delta = math.log(1e-9)
        for _ in range(6):
            total = self._sum(direction, log_delta)
            if total is None:
                return infinite
            loss, _ = mixed.refined(total, epsilon, None, infinite)
            found = loss.delta(epsilon)
            rest = math.log(max(found - infinite, 1e-300))
            # Cap more rarely as long as the cap is a share of what was found.
            if total.log_capped <= rest + _LOG_CAPPED + 1 or rest <= -690:
                break
            log_delta = min(rest, log_delta - 15)
        return min(1.0, found)

    def _curve(self, least, nodes=_NODES):
        """Epsilons, and logarithms of bounds on delta there, good at false positive rates down to `least`."""
        infinite = self._infinite()
        deltas = [d for d, before in zip(_DELTAS, (2.0, *_DELTAS)) if before > least] or [1e-2]
        deltas = [infinite + d * (1 - infinite) for d in deltas]
        composed = {direction: [self._at(direction, d)[0] for d in deltas] for direction in self._directions()}
        losses = [loss for each in composed.values() for loss in each if loss is not None]
        last = min(
            max(((loss.first + len(loss.masses)) * loss.interval for loss in losses), default=1.0), self._largest()
        )
        last = max(last, 1e-9)
        epsilons = torch.cat(
            (
                torch.linspace(0, last, nodes, dtype=torch.float64),
                torch.from_numpy(np.geomspace(1e-8 * last, last, nodes)),
            )
        ).unique()
        if not losses:
            return epsilons, torch.full_like(epsilons, math.log(infinite) if infinite else -math.inf)
        each = [
            torch.stack([_log_deltas(loss, epsilons) for loss in found if loss is not None]).amin(0)
            for found in composed.values()
        ]
        return epsilons, torch.stack(each).amax(0)

    def delta_at(self, epsilons: torch.Tensor) -> torch.Tensor:
        """`delta` at many epsilons from a few compositions, a little above those of `delta`."""
        if not self._entries:
            return torch.zeros_like(epsilons)
        if self._only_gaussian():
            return (_HAIR * gaussian_delta(self._gaussian_mu(), epsilons)).clamp(max=1.0)
        at, log_deltas = self._curve(1e-14)
        # Delta falls: that at the last epsilon before bounds it.
        before = (torch.searchsorted(at, epsilons, right=True) - 1).clamp(min=0)
        return torch.exp(log_deltas)[before]

    def trade_off(self, false_positive_rate: Any) -> Any:
        """The least false negative rate of any attack with these false positive rates, a lower bound.

        Args:
            false_positive_rate: in [0, 1], a number or many.

        Returns a float of a number, else a float64 tensor.

        >>> ledger = Ledger([SampledGaussian(0.01, 1.0, 500), SampledGaussian(0.02, 1.2, 500)])
        >>> round(ledger.trade_off(0.01), 3)
        0.962
        """
        _checks.in_interval("false_positive_rate", false_positive_rate, 0, 1)
        rates = torch.as_tensor(false_positive_rate, dtype=torch.float64)
        flat = rates.reshape(-1)
        if not self._entries:
            return _checks.as_given(1 - rates, false_positive_rate)
        if self._only_gaussian():
            found = _Gaussian(self._gaussian_mu()).false_negative_rate(flat)
            return _checks.as_given(found.reshape(rates.shape), false_positive_rate)
        inner = torch.cat((flat, 1 - flat))
        inner = inner[inner > 0]
        curve = _Curve(*self._curve(float(inner.min()) if len(inner) else 1.0))
        return _checks.as_given(curve.false_negative_rate(flat).reshape(rates.shape), false_positive_rate)

    def mu(self, *, least: float = 1e-9) -> GaussianMu:
        r"""The least mu, from above, with which the whole trade-off curve lies on or above that of mu-Gaussian DP.

        The bound holds at every false positive rate once `least` is added to delta, that is for all epsilons whose
        delta is at least `least`; beyond, no finite mu says anything useful of a sampled mechanism. The regret is the
        largest gap between the two curves: how much the one number gives away (Dong et al. 2022; Gomez et al. 2025).

        Args:
            least: a delta, in [1e-14, 0.1].

        >>> Ledger([Gaussian(2.0), Gaussian(2.0)]).mu().mu                # exactly: 1 / sqrt(2)
        0.707...
        """
        least = _checks.number("least", least, 1e-14, 0.1)
        if not self._entries or self._largest() == 0 == self._infinite():
            return GaussianMu(0.0, 0.0)
        if self._only_gaussian():
            return GaussianMu(self._gaussian_mu(), 0.0)
        if self._infinite() > least:
            return GaussianMu(math.inf, 1.0)
        epsilons, log_deltas = self._curve(least, _MU_NODES)
        deltas = torch.exp(log_deltas)
        if float(deltas.max()) >= 1 or float(deltas[-1]) > least:
            return GaussianMu(math.inf, 1.0)
        # Between two epsilons delta is at most that at the first, and a Gaussian's at least that at the second.
        inside = deltas[:-1] > least
        if not inside.any():
            return GaussianMu(0.0, 0.0)
        mu = float(gaussian_mu(epsilons[1:][inside], deltas[:-1][inside]).max()) * (1 + 1e-9)
        rates = torch.from_numpy(np.geomspace(max(least, 1e-9), 1.0, 400))
        own = _Curve(epsilons, log_deltas).false_negative_rate(rates)
        normal = torch.distributions.Normal(0.0, 1.0)
        theirs = normal.cdf(normal.icdf(1 - rates) - mu)
        return GaussianMu(mu, float((own - theirs).max().clamp(min=0)))

    def statement(self, delta: float = 1e-5) -> str:
        """What all of it costs together, in words: relation, sampler, accountant, items, epsilon, what the grid adds.

        >>> print(Ledger([SampledGaussian(0.01, 1.0, 500)]).add(Laplace(10.0), label="count").statement())
        ... # doctest: +NORMALIZE_WHITESPACE
        Neighbours differ by adding or removing one example; Poisson sampling; accountant pld. Composed: 500 steps at
        rate 0.01 with noise multiplier 1; Laplace noise of scale 10 (count). Together epsilon 1.369 at delta 1e-05,
        of which the grid adds at most 7.9e-06.
        """
        said = "; ".join(_said(item) + (f" ({label})" if label else "") for item, label in self._entries)
        epsilon, error = self.epsilon(delta), self.error(delta)
        text = (
            "Neighbours differ by adding or removing one example; Poisson sampling; accountant pld. "
            f"Composed: {said or 'nothing'}. Together epsilon {_up(epsilon)} at delta {delta:g}"
        )
        if error == math.inf:
            return text + ", which adds up the items' epsilons: no grid resolves so little noise."
        return text + (f", of which the grid adds at most {_up(error, 2)}." if error else ".")

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The ledger as JSON, written to `path` if one is given; `from_json` gives it back without loss."""
        entries = [
            {"kind": type(item).__name__, **dataclasses.asdict(item), **({} if label is None else {"label": label})}
            for item, label in self._entries
        ]
        text = json.dumps({"ledger": entries}, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> "Ledger":
        """The ledger of a JSON text or of a file.

        A file may also hold one run or a list of runs, with sample_rate, noise_multiplier and steps, as
        `dpcompanion epsilon --json` prints it.

        Raises:
            ValueError: what is no ledger; FileNotFoundError where there is no file.
        """
        text = str(source)
        if not text.lstrip().startswith(("{", "[")):
            text = Path(source).read_text(encoding="utf-8")
        try:
            held = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"source must be a ledger in JSON, got {text[:80]!r}: {error}") from None
        entries = held.get("ledger", [held]) if isinstance(held, dict) else held
        ledger = cls()
        for entry in entries if isinstance(entries, list) else [entries]:
            ledger = _add_entry(ledger, entry)
        return ledger

    @classmethod
    def from_opacus(cls, history: Sequence[Any]) -> "Ledger":
        """The ledger of an Opacus accountant's history: a list of (noise multiplier, sample rate, steps).

        >>> Ledger.from_opacus([(1.0, 0.01, 500), (1.2, 0.02, 500)]).items[1]
        SampledGaussian(sample_rate=0.02, noise_multiplier=1.2, steps=500)
        """
        try:
            rows = [(noise, rate, steps) for noise, rate, steps in history]
        except (TypeError, ValueError):
            raise ValueError(
                f"history must be a list of (noise multiplier, sample rate, steps), got {history!r:.80}"
            ) from None
        return cls([SampledGaussian(rate, noise, steps) for noise, rate, steps in rows])

    def to_dp_event(self) -> Any:
        """The ledger as an event of Google's dp-accounting (which must be installed), for its own accountants.

        Raises:
            ValueError: for a `Guarantee`, of which dp-accounting has no event.
        """
        import dp_accounting

        def event(item):
            if isinstance(item, Guarantee):
                raise ValueError(f"items must not hold a Guarantee for dp-accounting, got {item!r}")
            if isinstance(item, Laplace):
                return dp_accounting.SelfComposedDpEvent(dp_accounting.LaplaceDpEvent(item.scale), item.count)
            one = dp_accounting.GaussianDpEvent(item.noise_multiplier)
            if isinstance(item, Gaussian):
                return dp_accounting.SelfComposedDpEvent(one, item.count)
            sampled = dp_accounting.PoissonSampledDpEvent(item.sample_rate, one)
            return dp_accounting.SelfComposedDpEvent(sampled, item.steps)

        return dp_accounting.ComposedDpEvent([event(item) for item in self.items])


def _add_entry(ledger, entry):
    if not isinstance(entry, dict):
        raise ValueError(f"source must hold a list of items, got {entry!r:.80}")
    values = dict(entry)
    label, kind = values.pop("label", None), values.pop("kind", "SampledGaussian")
    _checks.one_of("kind", kind, _ITEMS)
    names = [field.name for field in dataclasses.fields(_ITEMS[kind])]
    if "kind" in entry:
        if unknown := set(values) - set(names):
            raise ValueError(f"source must hold {', '.join(names)} of a {kind}, got {', '.join(sorted(unknown))} too")
    try:
        item = _ITEMS[kind](**{name: values[name] for name in names if name in values})
    except TypeError:
        raise ValueError(f"source must hold {', '.join(names)} of a {kind}, got {entry!r:.80}") from None
    return ledger.add(item, label=label)


def _said(item):
    if isinstance(item, SampledGaussian):
        return f"{item.steps} steps at rate {item.sample_rate:g} with noise multiplier {item.noise_multiplier:g}"
    if isinstance(item, Guarantee):
        return f"an ({item.epsilon:g}, {item.delta:g})-DP mechanism"
    noise = item.noise_multiplier if isinstance(item, Gaussian) else item.scale
    times = "" if item.count == 1 else f"{item.count} times "
    return f"{times}{type(item).__name__} noise of scale {noise:g}"


def _up(value, digits=4):
    """A number of few digits, rounded up."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return f"{math.ceil(value / unit) * unit:.{digits}g}"
