"""The scoreboard: how each exhibit stands, from the published numbers and the records alone.

`states` tells which states there are and when an exhibit is in which; an `ExhibitStatus` says the
rest: the `Evidence` by which it is judged, its `Outcomes`, how many numbers and claims agree, and
where the book shows it. `ExhibitStatus.to_do` says what is left to run of an exhibit, and how;
`ExhibitStatus.more_seeds` what would decide the rest.

>>> board = exhibit_statuses("intrinsic-privacy")
>>> [one.state for one in board if one.exhibit.id == "claims-1-2"]
['reproduced']
>>> sum(counts(board).values()) == len(board)
True
"""

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dpcompanion.reproduction import experiments, intervals, places, published, records, states
from dpcompanion.reproduction.comparison import Comparison, Table
from dpcompanion.reproduction.findings import tally
from dpcompanion.reproduction.states import STATES


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """What came out of an exhibit's numbers and claims.

    Attributes:
        numbers: verdict -> how many of its numbers; without a record all of them are "not run", or
            "out of reach".
        findings: {"holds": ..., "fails": ..., "undecided": ...} of the paper's claims, judged by
            its networks and all of its training.
        smaller: the same of the paper's claims, judged by stand-ins or by a part of the training.
        own, refutations: the same of results of ours, and of findings that refute the paper.
    """

    numbers: dict[str, int]
    findings: dict[str, int]
    smaller: dict[str, int]
    own: dict[str, int]
    refutations: dict[str, int]

    @property
    def claims(self) -> dict[str, int]:
        """Those of the paper, judged by whatever was run."""
        return {
            word: self.findings.get(word, 0) + self.smaller.get(word, 0)
            for word in intervals.OUTCOMES
        }

    def said(self, how: Callable[[Mapping[str, int]], str]) -> str:
        """All counts, each group of them as `how` says it."""
        counts = {**self.numbers, **self.findings}
        counts |= {word: counts.pop(word, 0) for word in states.NOT_RUN}
        parts = [how(counts)]
        parts += [
            f"{whose}: {how(found)}"
            for whose, found in (
                ("smaller runs", self.smaller),
                ("ours", self.own),
                ("against the paper", self.refutations),
            )
            if found
        ]
        return "; ".join(filter(None, parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """The records that an exhibit is judged by.

    Attributes:
        exhibit: the `published.Exhibit`.
        judged_by: its own record, and those that its claims are judged by, as far as there are
            some.
        parts: records of runs that computed a part of it each (`published.parts`), at full length.
    """

    exhibit: published.Exhibit
    judged_by: tuple[records.Record, ...]
    parts: tuple[records.Record, ...]

    @property
    def record(self) -> records.Record | None:
        """The first of them, or None."""
        return next(iter((*self.judged_by, *self.parts)), None)

    @property
    def own(self) -> records.Record | None:
        """The exhibit's own record, or None."""
        return next((record for record in self.judged_by if record.name == self.exhibit.name), None)

    @property
    def stale(self) -> bool:
        """Whether `record` was made by other code or another configuration than today's."""
        record = self.record
        return (
            record is not None
            and record.name in experiments.names()
            and experiments.get(record.name).is_stale(record)
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The data sets and networks that the exhibit shows and no record has."""
        return states.missing(self.exhibit, (*self.judged_by, *self.parts))

    @property
    def shortened(self) -> tuple[str, ...]:
        """What shortened runs are of, if data or networks would be missing without them."""
        return states.shortened(self.exhibit, (*self.judged_by, *self.parts))

    @property
    def undecided(self) -> list[tuple[records.Record, int]]:
        """The records that leave claims of the paper undecided, each with how many."""
        found = [
            (each, experiments.findings(each, self.exhibit.name).counts("claim"))
            for each in self.judged_by
        ]
        return [
            (record, counts["undecided"]) for record, counts in found if counts.get("undecided")
        ]

    def outcomes(self) -> Outcomes:
        """What they say."""
        table = states.numbers(self.exhibit, self.own, self.parts)
        numbers = table.counts()
        for row in table.rows if numbers.pop("stand-in", 0) else ():
            if row.verdict == "stand-in":
                word = "out of reach" if self.exhibit.is_beyond(row.label) else "not run"
                numbers[word] = numbers.get(word, 0) + 1
        held: dict[str, dict[str, int]] = {kind: {} for kind in (*published.FINDINGS, "smaller")}
        for record in self.judged_by:
            findings = experiments.findings(record, self.exhibit.name)
            smaller = published.exhibit(record.name).shortened or experiments.is_stand_in(
                record, self.exhibit.name
            )
            for kind in published.FINDINGS:
                counts = held["smaller" if kind == "claim" and smaller else kind]
                for word, count in findings.counts(kind).items():
                    counts[word] = counts.get(word, 0) + count
        return Outcomes(numbers, held["claim"], held["smaller"], held["own"], held["refutes"])


@dataclasses.dataclass(frozen=True, eq=False)
class ExhibitStatus:
    """How an exhibit stands.

    Attributes:
        exhibit: the `published.Exhibit`.
        state: a word of `STATES`.
        outcomes: how many of its numbers and claims agree.
        evidence: the records that it is judged by.
        place: where the book shows it, or None.
        experiment: the `experiments.Experiment` that computes it, or None.
    """

    exhibit: published.Exhibit
    state: str
    outcomes: Outcomes
    evidence: Evidence
    place: places.Place | None
    experiment: experiments.Experiment | None

    @property
    def verdicts(self) -> str:
        """All counts in words, such as "12 match, 3 close, 2 hold, 6 not run; ours: 1 holds".

        >>> [
        ...     one.verdicts
        ...     for one in exhibit_statuses("per-instance-accounting")
        ...     if one.exhibit.id == "algorithm-1"
        ... ]
        ['against the paper: 1 holds']
        """
        return self.outcomes.said(_said)

    @property
    def marked(self) -> str:
        """The same with marks, such as "\u2713 12 match, \u2248 3 close"."""
        return self.outcomes.said(tally)

    @property
    def basis(self) -> str:
        """What the state rests on, or what is needed to have one."""
        held, record = self.evidence, self.evidence.record
        if self.exhibit.tests and not (
            self.outcomes.numbers or self.outcomes.findings or self.outcomes.smaller
        ):
            return "tests"
        if record is not None and self.state != "not run":
            parts = [f"{record.preset} record"]
            if all(
                experiments.is_stand_in(each, self.exhibit.name) for each in (record, *held.parts)
            ):
                parts[0] += " of a stand-in"
            if record.seeds:
                parts.append(_seeds(record, *held.parts))
            if held.stale:
                parts.append("stale")
            parts += [f"with {part}" for part in held.shortened]
            if held.missing:
                parts.append(f"without {', '.join(held.missing)}")
            if self.exhibit.deviation:
                parts.append(f"with {self.exhibit.deviation}")
            if self.exhibit.unprinted:
                parts.append("settings not printed")
            return ", ".join(parts)
        if self.state != "not run":
            return "quick run, live" if self.state in ("undecided", "out of reach") else "proof"
        return (
            "ready to run"
            if self.experiment and "paper" in self.experiment.presets
            else "needs an experiment"
        )

    @property
    def to_do(self) -> tuple[str, str] | None:
        """What is left to run, and how: ("cifar10", "dpcompanion run ... --device cuda"), or None.

        The second is a command, or says what has to be written first. The first says how long it
        takes, where that is known.
        """
        if self._left is None:
            return None
        what, how = self._left
        if self.exhibit.needs:
            return f"needs {self.exhibit.needs}", how
        takes = collections.Counter(
            published.exhibit(name).takes for name in re.findall(r"dpcompanion run (\S+)", how)
        )
        times = [
            words if count == 1 else f"{words} for each of {count} runs"
            for words, count in takes.items()
            if words
        ]
        return "; ".join([what, *times]), how

    @property
    def more_seeds(self) -> tuple[str, str] | None:
        """Where all is run, what the seeds were too few for, and how to run twice as many, three at
        least: ("2 claims with 3 seeds", "dpcompanion run ... --seeds 0 1 2 3 4 5"), or None, as
        where more were added once.
        """
        few = [
            (record, claims)
            for record, claims in self.evidence.undecided
            if record.preset == "paper" and record.config.get("seeds")
        ]
        if self.to_do is not None or not few or self.exhibit.looks > 1:
            return None
        what = ", ".join(
            f"{claims} claim{'s' * (claims > 1)} with {_seeds(record)}" for record, claims in few
        )
        return what, " && ".join(_with_more_seeds(record) for record, _ in few)

    @property
    def _left(self) -> tuple[str, str] | None:
        """`to_do` without times: first the exhibit's parts, then its own experiment."""
        held, record = self.evidence, self.evidence.record
        recorded = record if record is not None and record.preset == "paper" else None
        tasks = states.not_run(self.exhibit, recorded, held.parts)
        # No command supplies what the exhibit lacks besides.
        parts = [part for part in held.missing if part != self.exhibit.lacks]
        missing = ", ".join([*parts, *(f"more than {part}" for part in held.shortened)])
        numbers = self.outcomes.numbers
        if not missing and (left := sum(numbers.get(word, 0) for word in states.NOT_RUN)):
            missing = f"{left} of {sum(numbers.values())} numbers"
        if self.exhibit.tests or recorded is not None and not (missing or tasks):
            return None
        done = [part.name for part in held.parts]
        parts = [
            _at_full_scale(part.name, part.scale)
            for part in published.parts(self.exhibit.name)
            if not part.shortened and part.name not in done
        ]
        own = (
            self.experiment
            if self.experiment is not None and "paper" in self.experiment.presets
            else None
        )
        all_of_it = parts if own is None else [*parts, _at_full_scale(own.name, self.exhibit.scale)]
        if parts and not tasks:
            its_own_is_there = (
                recorded is not None and not published.exhibit(recorded.name).shortened
            )
            return missing or ", ".join(self.exhibit.data), _in_turn(
                parts if its_own_is_there else all_of_it
            )
        if own is None:
            return self._to_be_written()
        return self._left_of(own, recorded, tasks, missing, _in_turn(all_of_it))

    def _to_be_written(self) -> tuple[str, str]:
        """What is left where no experiment at the paper's scale computes the exhibit."""
        needs = (
            f" ({', '.join(('a GPU', *self.exhibit.data))})" if self.exhibit.scale == "gpu" else ""
        )
        lacks = "an experiment" if self.experiment is None else "a paper preset"
        return f"the paper's scale{needs}", f"needs {lacks}"

    def _left_of(
        self,
        own: experiments.Experiment,
        recorded: records.Record | None,
        tasks: Sequence[str],
        missing: str,
        command: str,
    ) -> tuple[str, str]:
        """What is left of the exhibit's own experiment: all, the tasks that its record leaves out,
        or what it lacks.
        """
        if recorded is None:
            return (
                f"all of it ({', '.join(self.exhibit.data)})" if self.exhibit.data else "all of it",
                command,
            )
        if tasks:
            needs = {
                name: task.get("needs") for name, task in recorded.config.get("tasks", {}).items()
            }
            return ", ".join(
                f"{name} ({needs[name]})" if needs.get(name) else name for name in tasks
            ), command
        if recorded.name != own.name:
            return missing, command  # judged so far by the record of another
        return (
            missing,
            f"needs {'a GPU and ' if self.exhibit.scale == 'gpu' else ''}a configuration",
        )


def exhibit_statuses(
    paper: str | None = None,
    *,
    folder: records.Folder | None = None,
    book: records.Folder | None = None,
) -> list[ExhibitStatus]:
    """How the exhibits of a paper stand, or those of all, in the papers' order.

    Args:
        paper: the paper's slug; all papers by default.
        folder: of the records, see `records.results_folder`.
        book: the folder of the book's sources; that of the checkout, or of the wheel, by default.
    """
    exhibits = published.exhibits(paper)
    found = {
        slug: places.of_paper(slug, book)
        for slug in dict.fromkeys(exhibit.paper for exhibit in exhibits)
    }
    return [
        _exhibit_status(exhibit, folder, found[exhibit.paper].get(exhibit.id))
        for exhibit in exhibits
    ]


def exhibit_status(name: str, *, folder: records.Folder | None = None) -> ExhibitStatus:
    """How one exhibit stands.

    >>> exhibit_status("intrinsic-privacy/claims-1-2").basis
    'paper record, one seed'
    """
    exhibit = published.exhibit(name)
    return _exhibit_status(exhibit, folder, places.of_paper(exhibit.paper).get(exhibit.id))


def counts(statuses: Sequence[ExhibitStatus]) -> dict[str, int]:
    """State -> how many exhibits, for all states."""
    return {state: sum(one.state == state for one in statuses) for state in STATES}


def sums(statuses: Iterable[ExhibitStatus]) -> dict[str, dict[str, int]]:
    """What came out, over all exhibits: {"numbers": ..., "claim": ..., "smaller": ..., "own": ...,
    "refutes": ...}, word -> how many.

    >>> sums(exhibit_statuses("intrinsic-privacy"))["refutes"]
    {}
    """
    parts = {
        "numbers": "numbers",
        "claim": "findings",
        "smaller": "smaller",
        "own": "own",
        "refutes": "refutations",
    }
    found: dict[str, dict[str, int]] = {part: {} for part in parts}
    for one in statuses:
        for part, attribute in parts.items():
            for word, count in getattr(one.outcomes, attribute).items():
                found[part][word] = found[part].get(word, 0) + count
    return {
        part: {word: here[word] for word in published.VERDICTS if word in here}
        for part, here in found.items()
    }


def _seeds(*given: records.Record) -> str:
    """How many seeds records have, in words: "one seed", "3 seeds", "one to 10 seeds"."""
    counts = [len(record.seeds) for record in given if record.seeds]
    fewest, most = ("one" if count == 1 else str(count) for count in (min(counts), max(counts)))
    return f"{fewest if fewest == most else f'{fewest} to {most}'} seed{'s' * (most != 'one')}"


def _at_full_scale(name: str, scale: str) -> str:
    """The command that makes an exhibit's record at the paper's scale."""
    return f"dpcompanion run {name} --preset paper{' --device cuda' if scale == 'gpu' else ''}"


def _in_turn(commands: Iterable[str]) -> str:
    """Commands as one, each of them once."""
    return " && ".join(dict.fromkeys(commands))


def _with_more_seeds(record: records.Record) -> str:
    """The command that makes a record with twice as many seeds, at least three, its own too."""
    seeds = sorted({*range(max(3, 2 * len(record.seeds))), *record.seeds})
    device = "" if record.device.startswith("cpu") else " --device cuda"
    return (
        f"dpcompanion run {record.name} --preset paper{device} --seeds {' '.join(map(str, seeds))}"
    )


def _said(counts: Mapping[str, int]) -> str:
    """Counts in words."""
    return re.sub(r"(^|, )\S (?=\d)", r"\1", tally(counts))


class Board:
    """The table of some statuses, with links to their places in the scoreboard's notebook.

    Args:
        statuses: the rows.

    >>> Board(exhibit_statuses("intrinsic-privacy")[:1])
    exhibit     state         verdicts    basis
    Figure 1    reproduced    1 holds     paper record
    """

    def __init__(self, statuses: Iterable[ExhibitStatus]):
        self.rows = tuple(statuses)

    def __repr__(self) -> str:
        table = [[label(one.exhibit), one.state, one.verdicts, one.basis] for one in self.rows]
        return repr(
            Table(["exhibit", "state", "verdicts", "basis"], table, kinds=[None, None, None])
        )

    def _repr_markdown_(self) -> str:
        lines = ["| exhibit | state | verdicts | basis |", "|:--|:--|:--|:--|"]
        for one in self.rows:
            state = f"[{one.state}]{{.{one.state.replace(' ', '-')}}}"
            name = self._link(one) + ": " + one.exhibit.title.replace("|", "\\|")
            lines.append(f"| {name} | {state} | {one.verdicts or ' '} | {one.basis} |")
        return "\n".join(lines)

    def _link(self, one: ExhibitStatus) -> str:
        if one.place is None:
            return label(one.exhibit)
        address = os.path.relpath(one.place.page, "book")  # the scoreboard stands there
        return f'<a href="{address}.html#{one.place.anchor}">{label(one.exhibit)}</a>'


def label(exhibit: published.Exhibit) -> str:
    """What readers call an exhibit.

    >>> (
    ...     label(published.exhibit("idp-sgd/table-d7")),
    ...     label(published.exhibit("per-instance-accounting/text-cost")),
    ... )
    ('Table D7', 'Section 3.2')
    >>> label(published.exhibit("gradients-look-alike/definition-5.1-fact-5.2"))
    'Definition 5.1, fact 5.2'
    """
    if exhibit.kind == "text":
        return exhibit.place.capitalize()
    words = re.sub(r"(?<=\d)-(?=[a-z]{2})", ", ", exhibit.id)
    words = re.sub(r"(?<=[a-z]{2})-", " ", words).capitalize()
    return re.sub(r"\b[a-z](?=[.\d])", lambda letter: letter[0].upper(), words)


def compared(statuses: Iterable[ExhibitStatus]) -> list[tuple[str, Comparison]]:
    """(exhibit's label and title, `Comparison` of printed numbers) where a record holds some."""
    return [
        (
            f"{label(one.exhibit)}: {one.exhibit.title}",
            states.numbers(one.exhibit, held.own, held.parts),
        )
        for one, held in ((one, one.evidence) for one in statuses)
        if one.outcomes.numbers and (held.own or held.parts)
    ]


def _exhibit_status(
    exhibit: published.Exhibit, folder: records.Folder | None, place: places.Place | None
) -> ExhibitStatus:
    judged = dict.fromkeys(
        [exhibit.name, *(criterion.of for criterion in experiments.criteria(exhibit.name))]
    )
    judged = sorted(judged, key=lambda name: bool(published.exhibit(name).shortened))  # those last
    whole = [part for part in published.parts(exhibit.name) if not part.shortened]
    held = Evidence(
        exhibit,
        tuple(filter(None, (_record(name, folder) for name in judged))),
        tuple(filter(None, (records.find(part.name, "paper", folder) for part in whole))),
    )
    known = [experiments.get(name) for name in judged if name in experiments.names()]
    experiment = next(
        (one for one in known if not published.exhibit(one.name).shortened), next(iter(known), None)
    )
    outcomes = held.outcomes()
    left = held.missing or states.not_run(exhibit, held.record, held.parts) or held.shortened
    live = place is not None and states.runs_live(exhibit)
    state = states.state(
        exhibit, outcomes.numbers, outcomes.claims, held.record, some_tasks=bool(left), live=live
    )
    return ExhibitStatus(exhibit, state, outcomes, held, place, experiment)


def _record(name: str, folder: records.Folder | None) -> records.Record | None:
    """The record at the scale of the paper, or the quick one where there is no other."""
    return records.find(name, "paper", folder) or records.find(name, "quick", folder)
