r"""One account of all that was done with the same people's data.

A ledger composes sampled Gaussians of any rates and noises (trainings), Gaussian and Laplace
releases, (epsilon, delta) guarantees of mechanisms of which nothing else is known, training plans,
histories, filters, individual accounts and other ledgers. It adds up their privacy losses
(`dpcompanion.accounting.mixed`), in both directions (adding and removing an example), so that its
epsilon is an upper bound that the sum of the items' epsilons, or RDP, exceed by far:

>>> ledger = Ledger(
...     [
...         SampledGaussian(0.01, 1.1, 500),
...         SampledGaussian(0.01, 0.9, 300),
...         SampledGaussian(0.02, 1.3, 200),
...     ]
... )
>>> round(ledger.epsilon(1e-5), 3)
2.005

Composition is adaptive: what is done next may depend on what came out before. The parameters in the
ledger may not; where they do, take a filter (`dpcompanion.filters`). And noise is drawn anew each
time: two runs of one seed have the same, which cancels in the difference of their models, and a
ledger that is given both histories refuses the second.

>>> ledger = ledger.add(Gaussian(20.0), label="histogram").add(Guarantee(0.1, 0.0), label="survey")
>>> f"{ledger.epsilon(1e-5):.3f}"
'2.050'
>>> Ledger.from_json(ledger.to_json()) == ledger
True

**For each person.** `Ledger.epsilon` is uniform, promised beforehand. Where some item distinguishes
people, `Ledger.epsilons` has one number for each of them: by their accounts along the run, which
describe this run (output-specific) and promise nothing; with ``accounts=False`` what was promised
to each. A person whose data were not in a training spends nothing on it, provided that this did not
depend on their own data.

>>> from dpcompanion.individual import IndividualAccountant
>>> account = IndividualAccountant(3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=1.0)
>>> account.record([1.0, 0.5, 0.1], steps=500)
>>> ledger = (
...     Ledger().add(account).add(SampledGaussian(0.02, 1.2, 500), people=[0, 1])
... )  # the third has left
>>> [round(value, 2) for value in ledger.epsilons(1e-5).tolist()]
[2.35, 2.02, 0.07]

**For which neighbours.** Each item says whether it holds for adding or removing an example, or for
leaving one's data out of a public number of examples ("zero-out", as a plan may). The first implies
the second, so all items together hold for "zero-out" where one of them does (`Ledger.neighbours`),
and `statement` says so. Items may name what an example is (`unit`); where they name different
things the statement lists them.

**Where one example replaces another.** ``Ledger(..., relation="replace")`` has the same items,
which are meant for one example that takes part or not, and composes what each costs if one example
becomes another: the exact pair of a sampled Gaussian (`mixed.ReplacementLoss`), releases with
`replaced` times their sensitivity, and of an (epsilon, delta) guarantee
:math:`(2 \varepsilon, (1 + e^\varepsilon) \delta)`.

>>> f"{Ledger([SampledGaussian(0.01, 1.1, 500)], relation='replace').epsilon(1e-5):.3f}"
'1.6...'
"""

import functools
import json
import math
import os
from collections.abc import Iterable
from typing import Any

import torch

from dpcompanion import _checks, _files
from dpcompanion._rounding import exactly, rounded
from dpcompanion.accounting.composition import Composition, GaussianMu
from dpcompanion.accounting.items import (
    RELATIONS_IN_WORDS,
    Gaussian,
    Guarantee,
    Item,
    Laplace,
    LedgerEntry,
    SampledGaussian,
    check_said,
    entry_of,
    one_of_many,
    said,
)
from dpcompanion.accounting.people import Cost, epsilons_of, replacement_costs

RELATIONS = ("add-remove", "replace")
# What a file of a ledger holds, with what `dpcompanion ledger --json` prints beside it.
_OF_A_FILE = {"ledger", "relation"} | {
    *("epsilon", "delta", "accountant", "neighbouring_relation", "sampler")
}
_WHOM = {
    "add-remove": "Neighbours differ by adding or removing one {unit}",
    "zero-out": "Neighbours differ in one {unit}, whose data are left out of one of them "
    "(zero-out; the number of {unit}s is public)",
    "replace": "Neighbours differ by one {unit} that replaces another",
}


class Ledger:
    """What was done with the same people's data, and what all of it costs together.

    Sampler: Poisson, with draws that are independent of each other. A ledger does not change; `add`
    makes a new one.

    Args:
        items: what `add` takes.
        relation: "add-remove", or "replace", where neighbours differ by one example that replaces
            another; see the module's text. Items are the same in both.

    Raises:
        ValueError: something else.

    >>> round(Ledger([Laplace(2.0), Laplace(2.0)]).epsilon(0.01), 3)  # below 1/2 + 1/2
    0.96
    """

    def __init__(self, items: Iterable[Any] = (), *, relation: str = "add-remove"):
        self.relation = _checks.one_of("relation", relation, RELATIONS)
        self._entries: tuple[LedgerEntry, ...] = ()
        if not isinstance(items, Iterable):
            raise ValueError(f"items must be a list, got {items!r:.80}")
        for item in items:
            self._entries = self.add(item)._entries

    @property
    def items(self) -> tuple[Item, ...]:
        """What each item costs any person at most, in the order in which they were added."""
        return tuple(entry.item for entry in self._entries)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The items' labels, None where there is none."""
        return tuple(entry.label for entry in self._entries)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The items with what each person's part in them costs."""
        return self._entries

    @property
    def n(self) -> int | None:
        """How many people the ledger distinguishes; None where all items are uniform."""
        whole = [
            entry.size for entry in self._entries if entry.people is None and entry.size is not None
        ]
        some = [1 + max(entry.people) for entry in self._entries if entry.people]
        return whole[0] if whole else max(some, default=None)

    @property
    def neighbours(self) -> str:
        """For which relation all items hold: "replace" where that is asked for, "zero-out" where
        one of them holds for it only, else "add-remove".

        >>> run = SampledGaussian(0.01, 1.0, 500)
        >>> (
        ...     Ledger([run]).neighbours,
        ...     Ledger([run, LedgerEntry(run, relation="zero-out")]).neighbours,
        ... )
        ('add-remove', 'zero-out')
        """
        if self.relation == "replace":
            return self.relation
        return (
            "zero-out"
            if any(entry.relation == "zero-out" for entry in self._entries)
            else "add-remove"
        )

    @property
    def units(self) -> tuple[str, ...]:
        """What the items call one example, each word once, in order; "example" without items."""
        return tuple(dict.fromkeys(entry.unit for entry in self._entries)) or ("example",)

    @property
    def _unit(self):
        return self.units[0] if len(self.units) == 1 else "unit"

    @property
    def relation_in_words(self) -> str:
        """How neighbours differ, as the command line prints it.

        >>> Ledger([SampledGaussian(0.01, 1.0, 500)]).relation_in_words
        'add or remove one example'
        """
        return RELATIONS_IN_WORDS[self.neighbours].format(unit=self._unit)

    def add(
        self, item: Any, *, label: str | None = None, delta: float | None = None, people: Any = None
    ) -> "Ledger":
        """This ledger and one thing more.

        Args:
            item: one of the four kinds (`SampledGaussian`, `Gaussian`, `Laplace`, `Guarantee`),
                which counts as one for adding or removing an example; a `LedgerEntry` of one with
                another relation or unit; another ledger, whose items keep their labels; or what has
                a `ledger_entry`: a plan, a history, a tracker, an individual account, a filter. A
                history counts as all of its plan's steps, which holds whatever ended the run, and
                as its account. A tracker or an account counts as a run at the clip norm, and as
                what was recorded.
            label: a name of one's own.
            delta: for a filter, and for a history whose filter's promise shall count in place of
                its plan: at which it is taken. It must be smaller than the delta of the whole.
            people: (m,) indices of the ledger's people whose data the item was about, in the item's
                order; None for all of them.

        Raises:
            ValueError: something else, a delta that is missing or not asked for, items of different
                people, or a run that drew its noise under the key of another, as two of one seed
                do: the noise cancels in the difference of their models.

        >>> ledger = Ledger().add(Gaussian(10.0)).add(Laplace(5.0), people=[0, 2])
        >>> ledger.n, [round(value, 2) for value in ledger.epsilons(1e-5).tolist()]
        (3, [0.52, 0.34, 0.52])
        """
        if label is not None and not isinstance(label, str):
            raise ValueError(f"label must be a text, got {label!r}")
        found = Ledger(relation=self.relation)
        if isinstance(item, Ledger):
            if delta is not None:
                raise ValueError(
                    f"delta goes with a filter or a history, not with a ledger, got {delta!r}"
                )
            more = item._entries
        else:
            more = (entry_of(item, delta),)
        more = [entry.among(people) for entry in more]
        found._entries = self._entries + tuple(
            entry if label is None else entry.named(label) for entry in more
        )
        sizes = {
            entry.size
            for entry in found._entries
            if entry.people is None and entry.size is not None
        }
        if len(sizes) > 1:
            raise ValueError(
                f"people must say whose data an item was about where numbers differ, got items of "
                f"{' and '.join(str(size) for size in sorted(sizes))} people"
            )
        last = max((max(entry.people) for entry in found._entries if entry.people), default=-1)
        if sizes and last >= min(sizes):
            raise ValueError(
                f"people must lie in [0, {min(sizes)}), got {last}: an item without people= is "
                "about all of the ledger's people, and so fixes their number; give people= for it, "
                f"too, as in Ledger().add(first, people=range({min(sizes)})).add(second, "
                f"people=range({last + 1}))"
            )
        found._check_independent()
        return found

    def _check_independent(self):
        """No two entries drew their noise under one key."""
        seen: dict[str, int] = {}
        for place, entry in enumerate(self._entries):
            if (key := entry.key_fingerprint) is None:
                continue
            if key in seen:
                first = self._entries[seen[key]].label or f"item {seen[key]}"
                raise ValueError(
                    "item must have drawn its batches and its noise under a key of its own, but "
                    f"{entry.label or f'item {place}'} shares that of {first}, as two runs of one "
                    "seed do, or two endings of one checkpoint: their costs do not add up, since "
                    "the noise of both cancels in the difference of their models; give each run "
                    "another seed, or none, and of one run add the last history alone"
                )
            seen[key] = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.relation, self._entries) == (
            other.relation,
            other._entries,
        )

    def __hash__(self) -> int:
        return hash((self.relation, self.items, self.labels))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        plain, relation = {"relation": "add-remove", "unit": "example", "seeded": False}, ""
        if self.relation != "add-remove":
            relation = f", relation={self.relation!r}"
        shown = []
        for entry in self._entries:
            said = {name: value for name in plain if (value := getattr(entry, name)) != plain[name]}
            more = "".join(f", {name}={value!r}" for name, value in said.items())
            shown.append(f"LedgerEntry({entry.item!r}{more})" if more else repr(entry.item))
        return f"Ledger([{', '.join(shown)}]{relation})"

    @functools.cached_property
    def composition(self) -> Composition:
        """What the items cost together, as `epsilon`, `delta`, `trade_off` and `mu` read it."""
        return Composition(self.items, self.relation)

    def epsilon(self, delta: float) -> float:
        """Epsilon of it all at `delta`, an upper bound; inf if guarantees' deltas alone exceed it.

        The grid adds about 1e-4 of epsilon (`error`), with more than 32 different runs up to 2e-3
        of it. Where so little noise meets so many steps that no grid resolves the loss, the items'
        epsilons are added up.

        Raises:
            ValueError: a delta outside (0, 1).
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        return self.composition.epsilon(delta)

    def epsilons(self, delta: float, *, accounts: bool = True) -> torch.Tensor:
        """Each person's epsilon at `delta`, an upper bound, (n,) float64, at most `epsilon(delta)`.

        With `accounts`, what has an account counts for each person as it was recorded, at the norms
        of that person's own gradients: these epsilons describe what happened (output-specific),
        promise nothing, and are as private as the people. Without, each person's is a promise: what
        was fixed beforehand, by filters, rates and clip norms. A person who is not among the people
        of an item spends nothing on it.

        Where one example replaces another, what was promised to a person holds for both of their
        examples, and is composed as for all. An account knows the norms of one example only: the
        other counts with the full clip norm at each promised step (`mixed.ReplacementLoss`, with
        the two norms). So a person whose gradients vanish still has about the uniform epsilon for
        adding or removing an example. An account beside promises that differ between people, or of
        a filter, counts as what was promised.

        About 0.1% above the exact value; seconds for tens of thousands of people. With accounts a
        person's epsilon is a function of their own, up to the rounding errors of floats, as is
        needed where it is released (`dpcompanion.release`): where norms were rounded, and beside
        items that count their steps (a filter does not, whose caps follow the longest account).

        Raises:
            ValueError: a delta outside (0, 1), or a ledger that distinguishes no people.

        >>> from dpcompanion.accounting import PersonalCosts
        >>> filtered = LedgerEntry(
        ...     Guarantee(3.0, 1e-6),
        ...     promised=PersonalCosts.each([Guarantee(1.0, 1e-6), Guarantee(3.0, 1e-6)], [0, 1]),
        ... )
        >>> [
        ...     round(epsilon, 2)
        ...     for epsilon in Ledger([filtered, Gaussian(20.0)]).epsilons(1e-5).tolist()
        ... ]
        [1.1..., 3.1...]
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        if self.n is None:
            raise ValueError(
                "items must include one that distinguishes people, such as an account or a filter, "
                "for epsilons of each; epsilon(delta) is the uniform one"
            )
        columns: dict[Cost, torch.Tensor] = {}
        for entry in self._entries:
            places = (
                torch.arange(self.n)
                if entry.people is None
                else torch.tensor(entry.people, dtype=torch.int64)
            )
            costs, counts = self._costs(entry, accounts)
            for cost, count in zip(costs, counts.T):
                column = columns.setdefault(cost, torch.zeros(self.n, dtype=torch.int64))
                column[places] += count

        def alone(items):
            return Composition(items, self.relation).epsilon(delta)

        if not columns:  # accounts of norms that are all zero
            return torch.zeros(self.n, dtype=torch.float64)
        counts = torch.stack(list(columns.values()), dim=1)
        # Accounts are private: no one's epsilon may say something of another's counts.
        private = accounts and any(entry.account is not None for entry in self._entries)
        steps = sum(one_of_many(entry.item)[1] for entry in self._entries) if private else None
        found = epsilons_of(
            list(columns), counts, delta, alone, relation=self.relation, steps=steps
        )
        return found.clamp(max=self.epsilon(delta))

    def _costs(self, entry, accounts):
        """What each person's part costs, and (people, costs) how often; one row for all alike."""
        if self.relation == "replace" and accounts and entry.account is not None:
            found = replacement_costs(entry.item, entry.account) if entry.promised is None else None
            if found is not None:
                return found
            accounts = False
        costs = entry.costs(accounts)
        if costs is None:
            kind, count = one_of_many(entry.item)
            return [Cost(kind)], torch.tensor([[count]])
        return [Cost(kind) for kind in costs.kinds], costs.counts

    def error(self, delta: float) -> float:
        """What the grid adds to `epsilon(delta)`, to first order: 0 where none is needed."""
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        return self.composition.error(delta)

    def delta(self, epsilon: float) -> float:
        """Delta of everything together at `epsilon`, an upper bound.

        Where no grid resolves the loss, the least delta at which the items' epsilons add up to
        `epsilon`, each run at an equal share of it; `trade_off` and `mu` follow from such deltas.
        Of one run that is close, of several with noise of their own it is loose.

        Raises:
            ValueError: an epsilon below 0, or not finite.

        >>> both = Ledger([SampledGaussian(0.01, 1.0, 500), SampledGaussian(0.02, 1.2, 500)])
        >>> f"{both.delta(2.0):.2e}"
        '8.51e-05'
        """
        epsilon = _checks.number("epsilon", epsilon, 0, math.inf, closed="left")
        return self.composition.delta(epsilon)

    def trade_off(self, false_positive_rate: Any) -> Any:
        """The least false negative rate of any attack at these false positive rates, a lower bound.

        Args:
            false_positive_rate: in [0, 1], a number or many.

        Returns a float of a number, else a float64 tensor.

        >>> ledger = Ledger([SampledGaussian(0.01, 1.0, 500), SampledGaussian(0.02, 1.2, 500)])
        >>> round(ledger.trade_off(0.01), 3)
        0.962
        """
        false_positive_rate = _checks.unlabelled(false_positive_rate)
        _checks.in_interval("false_positive_rate", false_positive_rate, 0, 1)
        rates = torch.as_tensor(false_positive_rate, dtype=torch.float64, device="cpu")
        found = self.composition.trade_off(rates.reshape(-1))
        return _checks.as_given(found.reshape(rates.shape), false_positive_rate)

    def mu(self, *, least: float = 1e-9) -> GaussianMu:
        r"""The least mu, from above, whose Gaussian trade-off curve is nowhere above this one.

        The bound holds at every false positive rate once `least` is added to delta, that is for all
        epsilons whose delta is at least `least`; beyond, no finite mu says anything useful of a
        sampled mechanism. The regret is the largest gap between the two curves: how much the one
        number gives away (Dong et al. 2022; Gomez et al. 2025).

        Args:
            least: a delta, in [1e-14, 0.1].

        >>> Ledger([Gaussian(2.0), Gaussian(2.0)]).mu().mu  # exactly: 1 / sqrt(2)
        0.707...
        """
        least = _checks.number("least", least, 1e-14, 0.1)
        return self.composition.gaussian_mu(least)

    def statement(self, delta: float = 1e-5) -> str:
        """What all of it costs together, in words: relation, sampler, accountant, items, epsilon,
        what the grid adds. Items with different relations or units are each named with their own.

        >>> ledger = Ledger([SampledGaussian(0.01, 1.0, 500)]).add(Laplace(10.0), label="count")
        >>> print(ledger.statement())
        Neighbours differ by adding or removing one example; Poisson sampling; accountant pld.
        Composed: 500 steps at rate 0.01 with noise multiplier 1; Laplace noise of scale 10 (count).
        Together epsilon 1.369 at delta 1e-05, of which the grid adds about 7.9e-06.
        """
        epsilon, error = self.epsilon(delta), self.error(delta)
        units, relations = self.units, {entry.relation for entry in self._entries}
        whom = _WHOM[self.neighbours].format(unit=self._unit)
        if len(units) > 1:
            named = " or ".join(f"one {unit}" for unit in units)
            whom += f", where a unit is {named}, as each item says, and nobody has two of a kind"

        def about(entry):
            named = [f"one {entry.unit}"] if len(units) > 1 else []
            return (
                named + [entry.relation]
                if self.relation != "replace" and len(relations) > 1
                else named
            )

        items = "; ".join(said(entry, *about(entry)) for entry in self._entries)
        text = (
            f"{whom}; Poisson sampling; accountant pld. Composed: {items or 'nothing'}. Together "
            f"epsilon {_up(epsilon)} at delta {exactly(delta)}"
        )
        infinite = self.composition.infinite
        if epsilon == math.inf and delta < infinite < 1:
            text += f": the items' deltas reach {_up(infinite)}, more than delta."
        elif error == math.inf:
            text += ", which adds up the items' epsilons: no grid resolves so little noise."
        else:
            text += f", of which the grid adds about {_up(error, 2)}." if error else "."
        if self.n is not None:
            text += " This was promised beforehand, to every person."
            if any(entry.account is not None for entry in self._entries):
                text += (
                    f" The individual epsilons of {self.n} people describe this run "
                    "(output-specific): they are no promise, and as private as the people."
                )
        if seeded := sum(entry.seeded for entry in self._entries):
            text += (
                f" The noise of {seeded} of {len(self)} items came from a seed: anyone who knows "
                "it can subtract the noise."
            )
        return text

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The ledger as JSON, written to `path` if one is given; `from_json` gives it back without
        loss. With accounts it is as private as the people.
        """
        held: dict[str, Any] = {"ledger": [entry.to_json() for entry in self._entries]}
        if self.relation != "add-remove":
            held["relation"] = self.relation
        text = json.dumps(held, indent=1 if self.n is None else None)
        if path is not None:
            # readable for its owner alone, where it tells of persons
            mode = 0o666 if self.n is None else 0o600
            _files.replace(path, (text + "\n").encode(), mode=mode)
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> "Ledger":
        """The ledger of a JSON text or of a file.

        A file may also hold one run or a list of runs, with sample_rate, noise_multiplier and
        steps, as `dpcompanion epsilon --json` prints it.

        Raises:
            ValueError: what is no ledger; FileNotFoundError where there is no file.
        """
        held = _files.parsed(source, "ledger")
        if isinstance(held, dict) and "ledger" in held:
            if unknown := set(held) - _OF_A_FILE:
                raise ValueError(
                    f"source must hold a ledger, got {', '.join(sorted(unknown))} beside it too"
                )
        entries = held.get("ledger", [held]) if isinstance(held, dict) else held
        relation = (
            held.get("relation", "add-remove")
            if isinstance(held, dict) and "ledger" in held
            else "add-remove"
        )
        entries = entries if isinstance(entries, list) else [entries]
        if not entries and not isinstance(held, dict):
            raise ValueError("source must hold a run at least, or a ledger, got an empty list")
        if any(isinstance(each, dict) and "promised_quantiles" in each for each in entries):
            raise ValueError(
                "source must hold runs or a ledger, got the card of a run, which has no mechanism: "
                "Ledger().add(history).to_json() has it"
            )
        found = cls([LedgerEntry.from_json(entry) for entry in entries], relation=relation)
        if isinstance(held, dict) and "ledger" in held:
            # earlier versions said "example" of every unit
            plain = RELATIONS_IN_WORDS[found.neighbours].format(unit="example")
            check_said(held, [found.relation_in_words, plain])
        return found

    @classmethod
    def from_opacus(cls, history: Any) -> "Ledger":
        """The ledger of an Opacus accountant, or of its history: [(noise multiplier, sample rate,
        steps)].

        >>> Ledger.from_opacus([(1.0, 0.01, 500), (1.2, 0.02, 500)]).items[1]
        SampledGaussian(sample_rate=0.02, noise_multiplier=1.2, steps=500)
        """
        try:
            held = getattr(history, "history", history)
            rows = [(noise, rate, steps) for noise, rate, steps in held]
        except (TypeError, ValueError):
            raise ValueError(
                "history must be an accountant of Opacus, or its list of (noise multiplier, sample "
                f"rate, steps), got {history!r:.80}"
            ) from None
        return cls([SampledGaussian(rate, noise, steps) for noise, rate, steps in rows])

    def to_dp_event(self) -> Any:
        """The ledger as an event for Google's dp-accounting, which must be installed.

        Raises:
            ValueError: for a `Guarantee`, of which dp-accounting has no event, and for
                relation="replace", for which it takes other sensitivities.
        """
        import dp_accounting

        if self.relation != "add-remove":
            raise ValueError(
                f"relation must be 'add-remove' for events of dp-accounting, got {self.relation!r}"
            )

        def event(item):
            if isinstance(item, Guarantee):
                raise ValueError(f"items must not hold a Guarantee for dp-accounting, got {item!r}")
            if isinstance(item, Laplace):
                return dp_accounting.SelfComposedDpEvent(
                    dp_accounting.LaplaceDpEvent(item.scale), item.count
                )
            one = dp_accounting.GaussianDpEvent(item.noise_multiplier)
            if isinstance(item, Gaussian):
                return dp_accounting.SelfComposedDpEvent(one, item.count)
            sampled = dp_accounting.PoissonSampledDpEvent(item.sample_rate, one)
            return dp_accounting.SelfComposedDpEvent(sampled, item.steps)

        return dp_accounting.ComposedDpEvent([event(item) for item in self.items])


def _up(value, digits=4):
    """A number of few digits, rounded up."""
    return f"{rounded(value, math.ceil, digits):g}"
