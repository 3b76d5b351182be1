"""What the two pages of a paper call: an exhibit computed now, as it was recorded, and how both
stand beside the print.

The *chapter*, `book/papers/idp-sgd.md`, tells the paper's argument, with the few exhibits that
carry it::

    chapter = Chapter("idp-sgd")
    table_2 = chapter.live("table-2")
    chapter.show("table-2")

The *exhibits page*, `book/papers/idp-sgd-exhibits.md`, has every exhibit that `published` knows, in
the paper's order (a test holds it to that), each with an anchor that the scoreboard links to, a
heading, two to four sentences of our own and one cell; a figure comes before it, in a cell of its
own::

    (idp-sgd-table-2)=
    ## Table 2: accuracy

    What the paper shows, and what came out, in two to four sentences.

    ```{code-cell} ipython3
    :tags: [remove-input]

    exhibits.show("table-2", labels=labeled)
    ```

The anchor is the paper's slug, a hyphen and the exhibit's id, and `exhibits = Exhibits("idp-sgd")`
stands in the first cell. The one call shows the printed numbers beside recorded and live ones, the
verdicts in a line of marks, each criterion in a line that unfolds, what remains, and the command.
Where the live run has another task than the paper, a column shows its numbers unjudged:
`show("table-9", live={"sample": "91.2 \u00b1 0.3"}, task="4,000 digits")`.

Both pages stand side by side in `_toc.yml`, the exhibits as a section of the chapter.
`tools/notebooks.py` executes them in turn, and what the first computes live the second reads: in
the folder that DPCOMPANION_LIVE names, records of live runs are kept. Without it every page
computes all that it shows.

>>> chapter = Chapter("intrinsic-privacy")
>>> sorted(chapter.recorded("claims-1-2").config)
['draws', 'examples', 'passes', 'seed']
"""

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dpcompanion import _checks
from dpcompanion.reproduction import (
    comparison,
    experiments,
    plotting,
    published,
    records,
    scoreboard,
    states,
)
from dpcompanion.reproduction.findings import Findings, unfolding
from dpcompanion.reproduction.records import Record

#: Tables with more rows than this unfold.
ROWS = 12
#: Dotted name -> what the first column says, or what makes that of the keys.
Labels = Mapping[str, str] | Callable[[list[str]], Mapping[str, str]]


class Chapter:
    """The exhibits of one paper, called by what comes after the slash: "table-2".

    Args:
        paper: the paper's slug, such as "idp-sgd".
    """

    def __init__(self, paper: str):
        self.paper = _checks.one_of("paper", paper, published.PAPERS)
        self._live: dict[str, Record] = {}

    def name(self, exhibit: str) -> str:
        """The whole name of an exhibit."""
        return published.exhibit(exhibit if "/" in exhibit else f"{self.paper}/{exhibit}").name

    def live(self, exhibit: str) -> Record:
        """The `Record` of the exhibit, computed now (once, however often it is asked for), with the
        preset of `experiments.default_preset`; see the module's text for what another page of the
        paper has computed.
        """
        name = self.name(exhibit)
        if name not in self._live:
            self._live[name] = _computed(name)
        return self._live[name]

    def recorded(self, exhibit: str) -> Record | None:
        """The record of the exhibit at the paper's scale, or None."""
        found = experiments.get(self.name(exhibit))
        return found.record("paper") if "paper" in found.presets else None

    def both(self, exhibit: str) -> dict[str, Record]:
        """{"recorded": record, "live": record}, without the first where there is none."""
        record = self.recorded(exhibit)
        return ({} if record is None else {"recorded": record}) | {"live": self.live(exhibit)}

    def printed(self, exhibit: str) -> published.Exhibit:
        """What the paper prints: the `published.Exhibit`."""
        return published.exhibit(self.name(exhibit))

    def findings(
        self, found: Record | Mapping[str, Record | list[Record]] | None, exhibit: str | None = None
    ) -> Findings | None:
        """Qualitative findings held against their criteria, or None where there are none.

        Args:
            found: a record, or a dict as `both` gives, of records or lists of them; None where
                nothing is recorded.
            exhibit: whose findings; by default those of the exhibit that the record is named after.
        """
        by_kind = found if isinstance(found, Mapping) else {"": found}
        kinds = {
            kind: each if isinstance(each, list) else [each]
            for kind, each in by_kind.items()
            if each
        }
        judged = [
            (kind, experiments.findings(record, exhibit and self.name(exhibit)))
            for kind, each in kinds.items()
            for record in each
        ]
        rows = [(kind or one.kinds[0], row) for kind, one in judged for row in one.rows]
        if not rows:
            return None
        said = [kind for kind, _ in rows]
        return Findings([row for _, row in rows], kind=said if len(kinds) > 1 else said[0])

    def compare(
        self,
        exhibit: str,
        *,
        live: Record | Mapping[str, Any] | None = None,
        recorded: Record | Mapping[str, Any] | None = None,
        keys: Iterable[str] | None = None,
        labels: Labels | None = None,
        stale: bool | None = None,
        **options: Any,
    ) -> comparison.Comparison:
        """The printed numbers beside ours, a `comparison.Comparison`; a stale record says so.

        Args:
            exhibit: its name.
            live, recorded: a record, or dotted name -> number.
            keys: which rows; by default all that the paper prints, but for what it was given where
                there is nothing of ours beside it.
            labels: dotted name -> what the first column says, or a function that makes that of the
                keys.
            stale: whether `recorded` is stale; by default what a record's experiment says of it.
            options: of `comparison.compare`.
        """
        name = self.name(exhibit)
        if keys is None:
            paper = published.exhibit(name)
            ours = comparison.values_in(recorded) | comparison.values_in(live)
            keys = [key for key in paper.flat() if key in ours or not paper.is_given(key)]
        keys = list(keys)
        if stale is None:
            stale = isinstance(recorded, Record) and _is_stale(recorded)
        return comparison.compare(
            name,
            live=live,
            recorded=recorded,
            keys=keys,
            stale=stale,
            labels=labels(keys) if callable(labels) else labels,
            **options,
        )

    def show(
        self,
        exhibit: str,
        *,
        live: Record | Mapping[str, Any] | bool | None = None,
        task: str | None = None,
        keys: Iterable[str] | None = None,
        labels: Labels | None = None,
        **options: Any,
    ) -> "Shown":
        """The exhibit in one output: the printed numbers beside ours, the verdicts in a line,
        findings, what remains.

        Recorded numbers are those that the scoreboard counts: of the exhibit's own record and of
        its parts.

        Args:
            exhibit: its name.
            live: a record to show beside the recorded one, or dotted name -> number or text for the
                column of live numbers; True computes what the exhibit is judged by.
            task: what the live numbers are of, see `comparison.compare`; a record keeps them as
                "mnist-5k.sample", say.
            keys, labels, options: see `compare`.
        """
        name = self.name(exhibit)
        one = scoreboard.exhibit_status(name)
        judged_by = [name, *(each.of for each in experiments.criteria(name))]
        judged_by = list(dict.fromkeys(judged_by))
        found: dict[str, list[Record]] = {}
        if recorded := [record for record in map(self._recorded, judged_by) if record is not None]:
            found["recorded"] = recorded
        if isinstance(live, Record):
            found["live"] = [live]
        elif live is not None and (
            computed := [self.live(each) for each in judged_by if _runs_live(each)]
        ):
            found["live"] = computed
        parts = []
        if published.exhibit(name).flat():
            numbers = self._numbers(name, one, found, live, task)
            parts += _folded(
                self.compare(exhibit, keys=keys, labels=labels, task=task, **{**numbers, **options})
            )
        parts += [_verdicts(one), self.findings(found, exhibit)]
        return Shown([*filter(None, parts), *_remains(one)])

    def _numbers(
        self,
        name: str,
        one: scoreboard.ExhibitStatus,
        found: Mapping[str, list[Record]],
        live: Record | Mapping[str, Any] | bool | None,
        task: str | None,
    ) -> dict[str, Any]:
        """What `compare` takes: recorded and live numbers, the stand-ins, and what is stale."""
        own = {
            kind: record for kind, each in found.items() for record in each if record.name == name
        }
        recorded = [each for each in (own.get("recorded"), *one.evidence.parts) if each is not None]
        values, stand_in = states.values_of(one.exhibit, own.get("recorded"), one.evidence.parts)
        numbers: dict[str, Any] = {"recorded": values} if recorded else {}
        if isinstance(live, Mapping):
            numbers["live"] = live
        elif "live" in own:
            numbers["live"] = _under_printed_names(own["live"]) if task else own["live"].values
            if experiments.is_stand_in(own["live"], name):
                stand_in |= set(numbers["live"]) - set(values)
        return {**numbers, "stand_in": stand_in, "stale": any(map(_is_stale, recorded))}

    def _recorded(self, name: str) -> Record | None:
        return self.recorded(name) if name in experiments.names() else None

    def remains(self, exhibit: str) -> "Shown":
        """What is left to run of an exhibit, and the command that runs it; empty if none."""
        return Shown(_remains(scoreboard.exhibit_status(self.name(exhibit))))

    def source(self, *what: Any) -> "Source":
        """The code of experiments (by their exhibits), functions and classes, as it is run."""
        return Source(
            [
                experiments.get(self.name(each)).function if isinstance(each, str) else each
                for each in what
            ]
        )


class Exhibits(Chapter):
    """The same for a paper's page of exhibits, where `show` computes what can be computed live."""

    def show(
        self, exhibit: str, *, live: Record | Mapping[str, Any] | bool | None = True, **options: Any
    ) -> "Shown":
        """See `Chapter.show`."""
        return super().show(exhibit, live=live, **options)


def _is_stale(record: Record) -> bool:
    return experiments.get(record.name).is_stale(record)


def _runs_live(name: str) -> bool:
    """Whether an experiment has the preset that notebooks run with."""
    return (
        name in experiments.names()
        and experiments.default_preset() in experiments.get(name).presets
    )


def _under_printed_names(record: Record) -> dict[str, Any]:
    """A record's values without the name of its data in front."""
    names = tuple(f"{entry['name']}." for entry in record.data)
    return {
        next((key.removeprefix(name) for name in names if key.startswith(name)), key): value
        for key, value in record.values.items()
    }


def _computed(name: str) -> Record:
    """The record of a live run, as it is read back from the disk: from the folder that the pages of
    a paper share.
    """
    with tempfile.TemporaryDirectory() as own:
        folder, preset = os.environ.get("DPCOMPANION_LIVE") or own, experiments.default_preset()
        kept = records.find(name, preset, folder)
        if kept is None or experiments.get(name).is_stale(kept):
            experiments.run(name, out=folder)
            kept = records.read(records.path_of(name, preset, folder))
        return kept


def _verdicts(one: scoreboard.ExhibitStatus) -> str:
    """How an exhibit stands, in one line of marks, on what it rests and how that was made; empty if
    nothing was run.
    """
    if one.state == "not run":
        return ""
    said = f"**{one.state.capitalize()}** ({one.basis}){f': {one.marked}' if one.marked else ''}."
    record = one.evidence.record
    if record is not None and record.preset == "paper":
        made = (record, *one.evidence.parts)
        commands = ", ".join(dict.fromkeys(f"`{each.command}`" for each in made))
        earlier = (
            ", with the draws of an earlier version"
            if any(each.has_earlier_draws for each in made)
            else ""
        )
        return f"{said} Made by {commands}{earlier}."
    if one.exhibit.tests and one.basis == "tests":
        files = dict.fromkeys(test.partition("::")[0] for test in one.exhibit.tests)
        return f"{said} {', '.join(f'`{file}`' for file in files)}"
    return said


def _remains(one: scoreboard.ExhibitStatus) -> list[str]:
    """What is left to run, and the command, as parts."""
    if one.to_do is None:
        return [
            f"Undecided: {what}. More seeds: `{how}`."
            for what, how in filter(None, [one.more_seeds])
        ]
    what, how = one.to_do
    return [f"Not run: {what}: {f'`{how}`' if how.startswith('dpcompanion') else how}."]


def _folded(made: comparison.Comparison) -> "list[comparison.Comparison | Unfolding]":
    """A comparison as parts: long ones unfold, and what was not run stands apart."""
    if len(made.rows) <= ROWS:
        return [made] if made.rows else []
    ours = made.only(lambda row: row.recorded is not None or row.live is not None)
    rest = made.only(lambda row: row.recorded is None and row.live is None)
    parts = [
        ours
        if len(ours.rows) <= ROWS
        else Unfolding(f"{len(ours.rows)} numbers, printed and ours", ours),
        Unfolding(f"{len(rest.rows)} printed numbers of what was not run", rest),
    ]
    return [part for part, made in zip(parts, (ours, rest)) if made.rows]


class Unfolding:
    """A table that unfolds below a line."""

    def __init__(self, line: str, table: comparison.Comparison | comparison.Table):
        self.line, self.table = line, table

    def __repr__(self) -> str:
        return f"{self.line}:\n{self.table!r}"

    def _repr_markdown_(self) -> str:
        return unfolding(self.line, self.table._repr_markdown_())


class Shown:
    """Several parts, strings or tables, as one output; without parts, as none."""

    def __init__(self, parts: Iterable[Any]):
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return "\n\n".join(part if isinstance(part, str) else repr(part) for part in self.parts)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(
            part if isinstance(part, str) else part._repr_markdown_() for part in self.parts
        )

    def _ipython_display_(self) -> None:
        if self.parts:
            # by which a notebook knows that it is to show an object in the usual way
            raise NotImplementedError


class Source:
    """The source of functions and classes.

    >>> Source([Source.__repr__])
        def __repr__(self) -> str:
            return "\\n".join(map(inspect.getsource, self.functions)).rstrip()
    """

    def __init__(self, functions: Iterable[Any]):
        self.functions = tuple(functions)

    def __repr__(self) -> str:
        return "\n".join(map(inspect.getsource, self.functions)).rstrip()

    def _repr_markdown_(self) -> str:
        return "\n".join(
            f"```python\n{inspect.getsource(function)}```" for function in self.functions
        )


def table(
    heads: Sequence[object],
    rows: Iterable[tuple[str, Sequence[Any]]],
    kinds: Sequence[str | None] | None = None,
) -> comparison.Table:
    """A `comparison.Table` of (kind, cells), kind being "recorded" or "live".

    >>> table(["", "epsilon"], [("live", ["digits", 1.5])])
              epsilon
    digits        1.5
    """
    rows = list(rows)
    return comparison.Table(
        heads,
        [cells for _, cells in rows],
        kinds=kinds or ["row"] * (len(heads) - 1),
        row_kinds=[kind for kind, _ in rows],
    )


def rows_of(
    found: Mapping[str, Any], make: Callable[[Any], Iterable[Sequence[Any]]]
) -> dict[str, list[Any]]:
    """The rows that `make` gives for the record of each kind, as a table's `rows` and `row_kinds`;
    of (kind, record) pairs where there are several of a kind.

    >>> rows_of({"live": 3}, lambda record: [["a", record]])
    {'rows': [['a (live)', 3]], 'row_kinds': ['live']}
    """
    pairs = found.items() if isinstance(found, dict) else found
    rows = [
        (kind, [f"{row[0]} ({kind})", *row[1:]]) for kind, record in pairs for row in make(record)
    ]
    return {"rows": [row for _, row in rows], "row_kinds": [kind for kind, _ in rows]}


def panels(found: Mapping[str, Any], height: float = 3.4) -> Any:
    """The axes of a figure with a panel for each record of `Chapter.both`."""
    return plotting.figure(columns=len(found), height=height, squeeze=False)[1][0]
