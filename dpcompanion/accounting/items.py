r"""What a ledger holds: mechanisms run on people's data, and what each person's part costs.

Four kinds of items describe one mechanism for all: `SampledGaussian`, `Gaussian`, `Laplace`,
`Guarantee`. All are meant for one example that takes part or not, and a `LedgerEntry` says what
that means and what an example is:

* ``relation="add-remove"``, that of an item on its own: one example is added or removed; their
  number is not public;
* ``relation="zero-out"``: the data of one example are left out, and the number of examples is
  public. What holds for "add-remove" holds for this, too, but not the other way round;
* `unit`: "example", or whose data they are, such as "patient".

Where people differ, `PersonalCosts` counts for each of them how many steps of which kinds were
theirs, and a `LedgerEntry` keeps two such counts apart:

* `promised`: what was fixed beforehand, such as a rate, a clip norm or a filter's budget of one's
  own. It holds for every data set.
* `account`: what was recorded along the run, as by `dpcompanion.individual`. It describes this run
  (output-specific) and promises nothing.

Whatever has a method ``ledger_entry(delta=None)`` that returns a `LedgerEntry` can be added to a
ledger: plans, histories, trackers, accountants and filters of this library do.

>>> kinds = SampledGaussian(0.01, 1.0, 1), SampledGaussian(0.01, 2.0, 1)
>>> costs = PersonalCosts(kinds, torch.tensor([[500, 0], [0, 500]]))
>>> costs.n, PersonalCosts.from_json(costs.to_json()) == costs
(2, True)
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from dpcompanion import _checks
from dpcompanion._rounding import rounded
from dpcompanion.accounting.loss import LARGEST_NOISE

_MOST = 10**12  # steps of an item
RELATIONS = ("add-remove", "zero-out")


def _fix(item, name, value):
    object.__setattr__(item, name, value)


def _noise(name, value):
    return min(_checks.number(name, value, 0, math.inf, closed="neither"), LARGEST_NOISE)


@dataclasses.dataclass(frozen=True)
class SampledGaussian:
    """`steps` steps of the sampled Gaussian mechanism: Poisson sampling at `sample_rate` in (0, 1],
    then noise of `noise_multiplier`, above 0, times the clip norm.

    >>> SampledGaussian(0.01, 1, 500)
    SampledGaussian(sample_rate=0.01, noise_multiplier=1.0, steps=500)
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self):
        _fix(
            self,
            "sample_rate",
            _checks.number("sample_rate", self.sample_rate, 0, 1, closed="right"),
        )
        _fix(self, "noise_multiplier", _noise("noise_multiplier", self.noise_multiplier))
        _fix(self, "steps", _checks.whole_number("steps", self.steps, 0, _MOST))


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """`count` releases with Gaussian noise of standard deviation `noise_multiplier` times the
    sensitivity to one example that is added or removed.

    One example that replaces another moves the output by at most `replaced` times as much, in [1,
    2]: 2 always holds, and 1 does for a mean of values between 0 and a public bound.

    >>> Gaussian(noise_multiplier=4, replaced=1)
    Gaussian(noise_multiplier=4.0, count=1, replaced=1.0)
    """

    noise_multiplier: float
    count: int = 1
    replaced: float = 2.0

    def __post_init__(self):
        _fix(self, "noise_multiplier", _noise("noise_multiplier", self.noise_multiplier))
        _fix(self, "count", _checks.whole_number("count", self.count, 0, _MOST))
        _fix(self, "replaced", _checks.number("replaced", self.replaced, 1, 2))


@dataclasses.dataclass(frozen=True)
class Laplace:
    """`count` releases with Laplace noise of scale `scale` times the sensitivity to one example
    that is added or removed: each is 1 / scale-DP. `replaced` is as in `Gaussian`.

    >>> Laplace(scale=2)
    Laplace(scale=2.0, count=1, replaced=2.0)
    """

    scale: float
    count: int = 1
    replaced: float = 2.0

    def __post_init__(self):
        _fix(self, "scale", _noise("scale", self.scale))
        _fix(self, "count", _checks.whole_number("count", self.count, 0, _MOST))
        _fix(self, "replaced", _checks.number("replaced", self.replaced, 1, 2))


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A mechanism of which nothing is known but that it is (epsilon, delta)-DP, with delta in [0,
    1), for one example that is added or removed.

    >>> Guarantee(epsilon=1, delta=0)
    Guarantee(epsilon=1.0, delta=0.0)
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        _fix(self, "epsilon", _checks.number("epsilon", self.epsilon, 0, math.inf, closed="left"))
        _fix(self, "delta", _checks.number("delta", self.delta, 0, 1, closed="left"))


def guarantee_replaced(item: Guarantee) -> tuple[float, float]:
    r""":math:`(2 \varepsilon, (1 + e^\varepsilon) \delta)`, what a guarantee says of one example
    that replaces another, by way of the data with neither. Delta is rounded up, and at most 1.

    >>> guarantee_replaced(Guarantee(1.0, 0.0)), guarantee_replaced(Guarantee(800.0, 1e-300))
    ((2.0, 0.0), (1600.0, 1.0))
    """
    if not item.delta:
        return 2 * item.epsilon, 0.0
    # The logarithm, since e^epsilon may be beyond all floats; its last digits are of delta's 13th.
    log_delta = item.epsilon + math.log1p(math.exp(-item.epsilon)) + math.log(item.delta)
    return 2 * item.epsilon, min(1.0, math.exp(min(0.0, log_delta)) * (1 + 2.0**-42))


Item = SampledGaussian | Gaussian | Laplace | Guarantee
ITEMS = {kind.__name__: kind for kind in (SampledGaussian, Gaussian, Laplace, Guarantee)}


def times(kind: Item, count: int) -> list[Item]:
    """`count` times an item of one step or release, as a list of few items."""
    if isinstance(kind, Guarantee):
        return [kind] * count
    name = "steps" if isinstance(kind, SampledGaussian) else "count"
    return [dataclasses.replace(kind, **{name: count})] if count else []


def one_of_many(item: Item) -> tuple[Item, int]:
    """An item as one step or release, and how often it was taken."""
    if isinstance(item, Guarantee):
        return item, 1
    name = "steps" if isinstance(item, SampledGaussian) else "count"
    return dataclasses.replace(item, **{name: 1}), getattr(item, name)


def to_dict(item: Item) -> dict[str, Any]:
    """An item as JSON values."""
    return {"kind": type(item).__name__, **dataclasses.asdict(item)}


#: What the command line prints beside runs and ledgers, of which these hold.
SAMPLER = "Poisson"
RELATIONS_IN_WORDS = {
    "add-remove": "add or remove one {unit}",
    "zero-out": "leave out the data of one {unit}, the number of {unit}s public",
    "replace": "replace one {unit} by another",
}
RELATION = RELATIONS_IN_WORDS["add-remove"].format(unit="example")
_BESIDE_A_RUN = {
    *("epsilon", "delta", "target_epsilon", "target_delta", "accountant"),
    *("neighbouring_relation", "sampler"),
}


def check_said(held: dict[str, Any], relations: Iterable[str] = (RELATION,)) -> None:
    """What a file says of relation and sampler is what its runs count as here."""
    for name, allowed in (("neighbouring_relation", relations), ("sampler", (SAMPLER,))):
        if name in held:
            _checks.one_of(name, held[name], allowed)


def from_dict(entry: Any, *, strict: bool = True) -> Item:
    """The item of `to_dict`; without `strict` what the command line prints beside a run, which
    tells nothing about its cost, is passed over.

    Raises:
        ValueError: what is none, or what may cost more than an item that lacks some of its entries.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"source must hold a list of items, got {entry!r:.80}")
    values = dict(entry)
    kind = values.pop("kind", "SampledGaussian")
    _checks.one_of("kind", kind, ITEMS)
    names = [field.name for field in dataclasses.fields(ITEMS[kind])]
    if unknown := set(values) - set(names) - (set() if strict else _BESIDE_A_RUN):
        raise ValueError(
            f"source must hold {', '.join(names)} of a {kind}, got {', '.join(sorted(unknown))} too"
        )
    if not strict:
        check_said(values)
    try:
        return ITEMS[kind](**{name: values[name] for name in names if name in values})
    except TypeError:
        raise ValueError(
            f"source must hold {', '.join(names)} of a {kind}, got {entry!r:.80}"
        ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalCosts:
    """What each of n people's parts in one thing cost.

    Args:
        kinds: distinct items, each of one step or one release.
        counts: (n, kinds) whole numbers from 0 to 1e12: how often each person is charged for each
            kind.

    Raises:
        ValueError: kinds of more than one step, twice the same kind, or counts that do not fit.

    >>> PersonalCosts.each([Guarantee(1.0, 1e-6), Guarantee(3.0, 1e-6)], [0, 1, 1]).counts.tolist()
    [[1, 0], [0, 1], [0, 1]]
    """

    kinds: tuple[Item, ...]
    counts: torch.Tensor

    def __post_init__(self):
        kinds = tuple(self.kinds)
        for kind in kinds:
            if not isinstance(kind, Item) or one_of_many(kind) != (kind, 1):
                raise ValueError(
                    f"kinds must be items of one step or release each, got {kind!r:.80}"
                )
        if len(set(kinds)) < len(kinds):
            raise ValueError("kinds must be distinct, got one twice")
        counts = torch.as_tensor(_checks.unlabelled(self.counts)).detach().cpu()
        whole = (
            not counts.is_floating_point()
            and not counts.is_complex()
            and counts.dtype != torch.bool
        )
        if not whole or counts.ndim != 2 or counts.shape[1] != len(kinds) or not len(counts):
            raise ValueError(
                f"counts must be whole numbers of shape (n, {len(kinds)}), got "
                f"{tuple(counts.shape)} of {counts.dtype}"
            )
        _checks.in_interval("counts", counts, 0, _MOST)
        _fix(self, "kinds", kinds)
        _fix(self, "counts", counts.to(torch.int64, copy=True))

    @classmethod
    def each(cls, items: Sequence[Item], which: Any) -> "PersonalCosts":
        """Person i has the whole of ``items[which[i]]``."""
        which = torch.as_tensor(_checks.unlabelled(which))
        _checks.in_interval("which", which, 0, max(len(items) - 1, 0))
        if which.is_floating_point() and not torch.equal(which, which.round()):
            raise ValueError("which must be whole numbers, the places of items, got fractions")
        which = which.to(torch.int64)
        ones = [one_of_many(item) for item in items]
        kinds = tuple(dict.fromkeys(kind for kind, _ in ones))
        rows = torch.zeros(len(items), len(kinds), dtype=torch.int64)
        for row, (kind, count) in zip(rows, ones):
            row[kinds.index(kind)] = count
        return cls(kinds, rows[which])

    @property
    def n(self) -> int:
        """How many people."""
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PersonalCosts)
            and self.kinds == other.kinds
            and torch.equal(self.counts, other.counts)
        )

    def __hash__(self) -> int:
        return hash((self.kinds, self.n))

    def to_json(self) -> dict[str, Any]:
        """As JSON values, from which `from_json` gives an equal one back."""
        return {"kinds": [to_dict(kind) for kind in self.kinds], "counts": self.counts.tolist()}

    @classmethod
    def from_json(cls, held: Any) -> "PersonalCosts":
        """The costs of `to_json`; ValueError for what are none."""
        try:
            counts = torch.tensor(held["counts"])
            if not counts.numel():  # of no kinds: empty lists say nothing of a type
                counts = counts.to(torch.int64)
            return cls(tuple(from_dict(kind) for kind in held["kinds"]), counts)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"source must hold kinds and counts of people, got {held!r:.80}: {error}"
            ) from None


def _exceeds(costs, item):
    """Whether some person's own costs are seen to be more than an item of the same kind, up to the
    rounding of noise: a larger rate, less noise, more steps, or a larger epsilon or delta.
    """
    hair = 1 + 1e-9
    taken = costs.counts > 0
    kinds = [kind for kind, some in zip(costs.kinds, taken.any(0)) if some]
    if not kinds or not all(type(kind) is type(item) for kind in kinds):
        return False
    if isinstance(item, SampledGaussian):
        steps = torch.tensor([kind.steps for kind in costs.kinds], dtype=torch.int64)
        return bool(((costs.counts * steps).sum(1) > item.steps).any()) or any(
            kind.sample_rate > hair * item.sample_rate
            or hair * kind.noise_multiplier < item.noise_multiplier
            for kind in kinds
        )
    if isinstance(item, Guarantee):
        return any(
            kind.epsilon > hair * item.epsilon or kind.delta > hair * item.delta for kind in kinds
        ) or bool((costs.counts.sum(1) > 1).any())
    return False


# What JSON holds of an entry as it is.
_PLAIN = ("label", "people", "relation", "unit", "key_fingerprint", "seeded")


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """One thing that was done with people's data; the module's text says what is what.

    Args:
        item: what it costs any person at most, promised beforehand.
        label: a name of one's own, or None.
        promised: what was promised to each person, none of it more than `item`; None where that is
            `item` for all.
        account: what each person's part cost along the run; None where there is no account.
        people: indices of the ledger's people whose data it was, in the order of `promised` and
            `account`; None for all of them. Others pay nothing.
        relation: "add-remove" or "zero-out", what it means that an example takes part or not.
        unit: what one example is, in the singular.
        key_fingerprint: a name of the key under which batches and noise were drawn, such as
            `SecureStream.fingerprint`; None where it is not known. Entries of one key are not
            independent, and a ledger takes one of them.
        seeded: whether the noise came from a seed, by which anyone who knows it can subtract it.

    Raises:
        ValueError: numbers of people that differ, people that come twice, a fingerprint that is no
            text, a mark that is no bool, or another relation: what is known of one example that
            replaces another alone does not compose with the rest.

    >>> LedgerEntry(SampledGaussian(0.01, 1.0, 500), people=[0, 2]).size
    2
    """

    item: Item
    label: str | None = None
    promised: PersonalCosts | None = None
    account: PersonalCosts | None = None
    people: tuple[int, ...] | None = None
    relation: str = "add-remove"
    unit: str = "example"
    key_fingerprint: str | None = None
    seeded: bool = False

    def __post_init__(self):
        if not isinstance(self.item, Item):
            raise ValueError(f"item must be one of {', '.join(ITEMS)}, got {self.item!r:.80}")
        _checks.one_of("relation", self.relation, RELATIONS)
        _checks.unit("unit", self.unit)
        if self.label is not None and not isinstance(self.label, str):
            raise ValueError(f"label must be a text, got {self.label!r}")
        if self.key_fingerprint is not None and not isinstance(self.key_fingerprint, str):
            raise ValueError(f"key_fingerprint must be a text, got {self.key_fingerprint!r:.80}")
        if not isinstance(self.seeded, bool):
            raise ValueError(f"seeded must be True or False, got {self.seeded!r:.80}")
        if self.people is not None:
            try:
                indices = torch.as_tensor(_checks.unlabelled(self.people))
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"people must be indices, got {self.people!r:.80}") from None
            if not indices.numel():  # of nobody: an empty list says nothing of a type
                indices = indices.to(torch.int64)
            if indices.ndim != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
                raise ValueError(
                    f"people must be indices of shape (m,), got {tuple(indices.shape)} "
                    f"{indices.dtype}"
                )
            _checks.in_interval("people", indices, 0, _checks.MOST_EXAMPLES - 1)
            found = tuple(indices.tolist())
            if len(set(found)) < len(found):
                raise ValueError("people must be distinct, got one twice")
            _fix(self, "people", found)
        sizes = [costs.n for costs in (self.promised, self.account) if costs is not None]
        sizes += [] if self.people is None else [len(self.people)]
        if len(set(sizes)) > 1:
            raise ValueError(
                "people must be as many as have costs of their own, got "
                f"{' and '.join(map(str, sizes))}"
            )
        for name in ("promised", "account"):
            costs = getattr(self, name)
            if costs is not None and _exceeds(costs, self.item):
                raise ValueError(
                    f"{name} must hold none that costs more than item, {self.item!r}, got "
                    f"{costs!r:.120}"
                )

    @property
    def size(self) -> int | None:
        """Whose data it was, how many; None where it does not say."""
        costs = self.promised or self.account
        return len(self.people) if self.people is not None else None if costs is None else costs.n

    def among(self, people: Any) -> "LedgerEntry":
        """The entry for these people of a larger ledger, in its order; as it is for None."""
        if people is None:
            return self
        given = LedgerEntry(self.item, people=people).people
        assert given is not None
        if self.people is not None:
            if max(self.people, default=-1) >= len(given):
                raise ValueError(
                    f"people must name all {max(self.people) + 1} of the entry's, got {len(given)}"
                )
            given = tuple(given[index] for index in self.people)
        return dataclasses.replace(self, people=given)

    def named(self, label: str) -> "LedgerEntry":
        """The entry under this label."""
        return dataclasses.replace(self, label=label)

    def costs(self, accounts: bool) -> PersonalCosts | None:
        """What each person spends: by the account, if one is asked for and there is one, or as
        promised; None for all alike, what `item` costs.
        """
        return self.account if accounts and self.account is not None else self.promised

    def to_json(self) -> dict[str, Any]:
        """As JSON values, from which `from_json` gives an equal one back."""
        found = to_dict(self.item)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _PLAIN and value != field.default:
                found[field.name] = value
        for name in ("promised", "account"):
            costs = getattr(self, name)
            if costs is not None:
                found[name] = costs.to_json()
        return found

    @classmethod
    def from_json(cls, held: Any) -> "LedgerEntry":
        """The entry of `to_json`; ValueError for what is none."""
        if not isinstance(held, dict):
            raise ValueError(f"source must hold a list of items, got {held!r:.80}")
        held = dict(held)
        own = {name: held.pop(name) for name in _PLAIN if name in held}
        promised, account = (
            None if costs is None else PersonalCosts.from_json(costs)
            for costs in (held.pop("promised", None), held.pop("account", None))
        )
        item = from_dict(held, strict="kind" in held)
        return cls(item, promised=promised, account=account, **own)


@runtime_checkable
class HasLedgerEntry(Protocol):
    """What can be added to a ledger: it says what it cost."""

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """The entry; of a promise at one delta only, that at `delta` (ValueError if missing)."""
        ...


def entry_of(given: Any, delta: float | None = None) -> LedgerEntry:
    """The entry of an item, of an entry itself, or of what has a `ledger_entry`.

    Raises:
        ValueError: for anything else, and for a delta where none is asked for.
    """
    if isinstance(given, Item | LedgerEntry):
        check_no_delta(delta)
        return LedgerEntry(given) if isinstance(given, Item) else given
    if not isinstance(given, HasLedgerEntry) or isinstance(given, type):
        held = isinstance(getattr(given, "history", None), list)  # as accountants of Opacus do
        written = isinstance(given, str | os.PathLike | dict)
        raise ValueError(
            f"item must be one of {', '.join(ITEMS)}, a ledger, or have a ledger_entry, such as a "
            f"plan, a history, an account or a filter, got {given!r:.80}"
            + ("; for an accountant of Opacus use Ledger.from_opacus(accountant)" if held else "")
            + (
                "; files are read by Ledger.from_json, DPSGDPlan.from_json; a card of a run has no "
                "mechanism: keep Ledger().add(history).to_json(path)"
                if written
                else ""
            )
        )
    return given.ledger_entry(delta=delta)


def check_no_delta(delta: float | None) -> None:
    """No delta is given for what is known at all of them."""
    if delta is not None:
        raise ValueError(
            f"delta goes with what is promised at one delta only, such as a filter, got {delta!r}"
        )


def said(entry: LedgerEntry, *about: str) -> str:
    """An entry in words, with what else there is to say about it."""
    item, people = entry.item, entry.size
    if isinstance(item, SampledGaussian):
        words = (
            f"{item.steps} steps at rate {item.sample_rate:g} with noise multiplier "
            f"{item.noise_multiplier:g}"
        )
    elif isinstance(item, Guarantee):
        epsilon, delta = (rounded(value, math.ceil) for value in (item.epsilon, item.delta))
        words = f"an ({epsilon:g}, {delta:g})-DP mechanism"
    else:
        noise = item.noise_multiplier if isinstance(item, Gaussian) else item.scale
        words = (
            f"{'' if item.count == 1 else f'{item.count} times '}{type(item).__name__} noise of "
            f"scale {noise:g}"
        )
    if people is not None:
        words += f" on the data of {people} people" + (
            ", at most, to each their own" if entry.promised else ""
        )
    about = ((entry.label,) if entry.label else ()) + about
    return words + (f" ({', '.join(about)})" if about else "")
