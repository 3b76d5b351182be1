"""What a chapter of the book calls: an exhibit computed now, as it was recorded, and how both stand beside the print.

    chapter = Chapter("idp-sgd")
    table_2 = chapter.live("table-2")
    chapter.show("table-2")

>>> chapter = Chapter("intrinsic-privacy")
>>> sorted(chapter.recorded("claims-1-2").config)
['draws', 'examples', 'passes', 'seed']
"""

import dataclasses
import inspect

from dpcompanion import _checks
from dpcompanion.reproduction import comparison, experiments, plotting, published, scoreboard
from dpcompanion.reproduction.records import Record


class Chapter:
    """The exhibits of one paper, called by what comes after the slash: "table-2".

    Args:
        paper: the paper's slug, such as "idp-sgd".
    """

    def __init__(self, paper):
        self.paper, self._live = _checks.one_of("paper", paper, published.PAPERS), {}

    def name(self, exhibit):
        """The whole name of an exhibit."""
        return published.exhibit(exhibit if "/" in exhibit else f"{self.paper}/{exhibit}").name

    def live(self, exhibit):
        """The `Record` of the exhibit, computed now (once, however often it is asked for), with the preset of
        `experiments.default_preset`."""
        name = self.name(exhibit)
        if name not in self._live:
            self._live[name] = experiments.run(name)
        return self._live[name]

    def recorded(self, exhibit):
        """The record of the exhibit at the paper's scale, or None."""
        found = experiments.get(self.name(exhibit))
        return found.record("paper") if "paper" in found.presets else None

    def both(self, exhibit):
        """{"recorded": record, "live": record}, without the first where there is none."""
        record = self.recorded(exhibit)
        return ({} if record is None else {"recorded": record}) | {"live": self.live(exhibit)}

    def printed(self, exhibit):
        """What the paper prints: the `published.Exhibit`."""
        return published.exhibit(self.name(exhibit))

    def findings(self, found, exhibit=None):
        """Qualitative findings held against their criteria, or None where there are none.

        Args:
            found: a record, or a dict of them as `both` gives; None where nothing is recorded.
            exhibit: whose findings; by default those of the exhibit that the record is named after.
        """
        if isinstance(found, dict) and len(found) > 1:
            rows = [(kind, row) for kind, record in found.items() for row in self._findings(record, exhibit).rows]
            return _Both(rows) if rows else None
        record = next(iter(found.values())) if isinstance(found, dict) else found
        judged = None if record is None else self._findings(record, exhibit)
        return judged if judged is not None and judged.rows else None

    def _findings(self, record, exhibit):
        return experiments.findings(record, exhibit and self.name(exhibit))

    def compare(self, exhibit, *, live=None, recorded=None, keys=None, labels=None, **options):
        """The printed numbers beside ours, a `comparison.Comparison`; a stale record is said to be stale.

        Args:
            exhibit: its name.
            live, recorded: a record, or dotted name -> number.
            keys: which rows; by default all that the paper prints.
            labels: dotted name -> what the first column says, or a function that makes that of the keys.
            options: of `comparison.compare`.
        """
        name = self.name(exhibit)
        keys = list(published.exhibit(name).flat() if keys is None else keys)
        stale = isinstance(recorded, Record) and experiments.get(recorded.name).is_stale(recorded)
        return comparison.compare(name, live=live, recorded=recorded, keys=keys, stale=stale,
                                  labels=labels(keys) if callable(labels) else labels, **options)

    def show(self, exhibit, *, live=None, keys=None, labels=None, **options):
        """The exhibit in one output: the printed numbers beside ours, the verdicts in a line, findings, what remains.

        Args:
            exhibit: its name.
            live: a record to show beside the recorded one; True computes it.
            keys, labels, options: see `compare`.
        """
        name = self.name(exhibit)
        one = scoreboard.standing(name)
        recorded = one.record if one.record is not None and one.record.preset == "paper" else None
        live = self.live(exhibit) if live is True else live
        found = {kind: record for kind, record in (("recorded", recorded), ("live", live)) if record is not None}
        parts = []
        if published.exhibit(name).flat():
            own = {kind: record for kind, record in found.items() if record.name == name}
            stand_in = bool(own) and experiments.is_stand_in(next(iter(own.values())), name)
            parts.append(self.compare(exhibit, keys=keys, labels=labels, **{"stand_in": stand_in, **own, **options}))
        if one.verdicts and recorded is not None:
            parts.append(f"{one.state.capitalize()} ({one.basis}): {one.verdicts}.")
        if judged := self.findings(found, exhibit) if found else None:
            parts.append(judged)
        return Shown([*parts, *self.remains(exhibit).parts])

    def remains(self, exhibit):
        """What is left to run of an exhibit, and the command that runs it; empty where nothing is."""
        to_do = scoreboard.standing(self.name(exhibit)).to_do
        if to_do is None:
            return Shown([])
        what, how = to_do
        return Shown([f"Not run: {what}: {f'`{how}`' if how.startswith('dpcompanion') else how}."])

    def source(self, *what):
        """The code of experiments (by the names of their exhibits), functions and classes, as it is run."""
        return Source([experiments.get(self.name(each)).function if isinstance(each, str) else each for each in what])


class Shown:
    """Several parts, strings or tables, as one output."""

    def __init__(self, parts):
        self.parts = tuple(parts)

    def __repr__(self):
        return "\n\n".join(part if isinstance(part, str) else repr(part) for part in self.parts)

    def _repr_markdown_(self):
        return "\n\n".join(part if isinstance(part, str) else part._repr_markdown_() for part in self.parts)


class Source:
    """The source of functions and classes.

    >>> Source([Source.__repr__])
        def __repr__(self):
            return "\\n".join(map(inspect.getsource, self.functions)).rstrip()
    """

    def __init__(self, functions):
        self.functions = tuple(functions)

    def __repr__(self):
        return "\n".join(map(inspect.getsource, self.functions)).rstrip()

    def _repr_markdown_(self):
        return "\n".join(f"```python\n{inspect.getsource(function)}```" for function in self.functions)


class _Both(comparison.Findings):
    """Findings of a recorded and a live run in one table: by criterion, and each row says which run it is of."""

    def __init__(self, rows):
        order = {said: place for place, said in enumerate(dict.fromkeys(comparison.said(row) for _, row in rows))}
        rows = sorted(rows, key=lambda each: order[comparison.said(each[1])])
        super().__init__([dataclasses.replace(row, where=f"{row.where} ({kind})") for kind, row in rows], kind="live")
        self._kinds = [kind for kind, _ in rows]

    def _table(self, verdict):
        plain = super()._table(verdict)
        return table(plain.heads, zip(self._kinds, plain.rows), kinds=[None, "row", None])


def table(heads, rows, kinds=None):
    """A `comparison.Table` of (kind, cells), kind being "recorded" or "live".

    >>> table(["", "epsilon"], [("live", ["digits", 1.5])])
              epsilon
    digits        1.5
    """
    rows = list(rows)
    return comparison.Table(heads, [cells for _, cells in rows], kinds=kinds or ["row"] * (len(heads) - 1),
                            row_kinds=[kind for kind, _ in rows])


def rows_of(found, make):
    """The rows that `make` gives for the record of each kind, as a table's `rows` and `row_kinds`.

    >>> rows_of({"live": 3}, lambda record: [["a", record]])
    {'rows': [['a (live)', 3]], 'row_kinds': ['live']}
    """
    rows = [(kind, [f"{row[0]} ({kind})", *row[1:]]) for kind, record in found.items() for row in make(record)]
    return {"rows": [row for _, row in rows], "row_kinds": [kind for kind, _ in rows]}


def labelled_table(heads, rows, kinds=None):
    """The same of cells, of which the first says the kind in brackets.

    >>> labelled_table(["", "epsilon"], [["digits (live)", 1.5]])
                     epsilon
    digits (live)        1.5
    """
    return table(heads, [(cells[0].rpartition("(")[2].rstrip(")"), cells) for cells in rows], kinds)


def panels(found, height=3.4):
    """The axes of a figure with a panel for each record of `Chapter.both`."""
    return plotting.figure(columns=len(found), height=height, squeeze=False)[1][0]
