"""The table of every chapter: published, recorded and live numbers, with deviations and verdicts.

>>> compare("idp-sgd/table-5", live={"mnist.sigma": 3.4247, "svhn.sigma": 2.7460})
                published     live    verdict
mnist.sigma     3.42529    3.42470    close, -0.017%
svhn.sigma      2.74658    2.74600    close, -0.021%

A notebook shows the same as a Markdown table in which the three kinds of number carry the classes
`published`, `recorded` and `live`, and verdicts the classes `matches`, `close`, ....  Rows hold few
digits, those of the print, and nothing that changes between two runs of the same numbers.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from dpcompanion import _checks
from dpcompanion.reproduction import published
from dpcompanion.reproduction.records import MeanSD, Record

KINDS = ("published", "recorded", "live")


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of the table; None where a kind is missing. `ours` is held against the print."""

    label: str
    published: Any = None
    recorded: Any = None
    live: Any = None
    verdict: str = ""
    deviation: str = ""


class Comparison:
    """Rows and their rendering, see `compare`."""

    def __init__(self, rows: Iterable[Row], stale: bool = False, task: str | None = None):
        self.rows = tuple(rows)
        self._kinds = [
            kind for kind in KINDS if any(getattr(row, kind) is not None for row in self.rows)
        ]
        heads = {
            "recorded": "recorded (stale)" if stale else "recorded",
            "live": f"live: {task}" if task else "live",
        }
        self._heads = ["", *(heads.get(kind, kind) for kind in self._kinds), "verdict"]
        self._stale, self._task = stale, task

    def only(self, keep: Callable[[Row], bool]) -> "Comparison":
        """The same table of the rows for which `keep(row)` is true."""
        return Comparison(filter(keep, self.rows), self._stale, self._task)

    def counts(self) -> dict[str, int]:
        """How many rows have which verdict.

        >>> live = {"mnist.sigma": 3.4247, "mnist.iterations": 9375}
        >>> compare("idp-sgd/table-5", live=live).counts()
        {'matches': 1, 'close': 1}
        """
        found = [row.verdict for row in self.rows]
        return {word: found.count(word) for word in published.VERDICTS if word in found}

    def _cells(self, row: Row) -> list[str]:
        digits = _decimals(row)
        return [_shown(getattr(row, kind), digits) for kind in self._kinds]

    def __repr__(self) -> str:
        lines = [self._heads]
        for row in self.rows:
            lines.append(
                [
                    row.label,
                    *self._cells(row),
                    ", ".join(filter(None, (row.verdict, row.deviation))),
                ]
            )
        return _aligned(lines, "<" + ">" * len(self._kinds) + "<")

    def _repr_markdown_(self) -> str:
        lines = [
            "| " + " | ".join(head or " " for head in self._heads) + " |",
            "|:--|" + "--:|" * len(self._kinds) + ":--|",
        ]
        for row in self.rows:
            cells = [
                f"[{_literal(cell)}]{{.{kind}}}" if cell else " "
                for kind, cell in zip(self._kinds, self._cells(row))
            ]
            word = f"[{row.verdict}]{{.{row.verdict.replace(' ', '-')}}}" if row.verdict else ""
            outcome = " ".join(filter(None, (word, row.deviation)))
            lines.append("| " + " | ".join([_literal(row.label), *cells, outcome or " "]) + " |")
        return "\n".join(lines)


class Table:
    """Any other table of numbers: a word in the first column, then columns of one kind each.

    Args:
        heads: the column heads; the first may be empty.
        rows: sequences of cells, each a string or a number (shown with four significant digits).
        kinds: for each column after the first, "published", "recorded", "live", None for plain
            words, or "row" where it is the row that says.
        row_kinds: the kind of each row, for columns of the kind "row".

    Raises:
        ValueError: rows or kinds that do not fit the heads or the rows, or an unknown kind.

    >>> Table(["accountant", "epsilon"], [["RDP", 1.00357], ["PLD", 0.91721]], kinds=["live"])
    accountant    epsilon
    RDP             1.004
    PLD            0.9172
    """

    def __init__(
        self,
        heads: Iterable[object],
        rows: Iterable[Iterable[Any]],
        *,
        kinds: Iterable[str | None],
        row_kinds: Iterable[str | None] | None = None,
    ):
        self.heads, self.kinds = [str(head) for head in heads], list(kinds)
        self.rows = [[_shown(cell, None) for cell in row] for row in rows]
        self.row_kinds: list[str | None] = (
            [None] * len(self.rows) if row_kinds is None else list(row_kinds)
        )
        _checks.same_length(**{"heads[1:]": self.heads[1:], "kinds": self.kinds})
        _checks.same_length(rows=self.rows, row_kinds=self.row_kinds)
        for row in self.rows:
            _checks.same_length(heads=self.heads, row=row)
        for kind in self.kinds:
            _checks.one_of("kinds", kind, (*KINDS, "row", None))
        for kind in self.row_kinds:
            _checks.one_of("row_kinds", kind, KINDS if "row" in self.kinds else (*KINDS, None))

    def __repr__(self) -> str:
        return _aligned(
            [self.heads, *self.rows], "<" + "".join(">" if kind else "<" for kind in self.kinds)
        )

    def _repr_markdown_(self) -> str:
        heads = [_literal(head) or " " for head in self.heads]
        lines = [
            "| " + " | ".join(heads) + " |",
            "|:--|" + "".join("--:|" if kind else ":--|" for kind in self.kinds),
        ]
        for (word, *cells), row_kind in zip(self.rows, self.row_kinds):
            kinds = [row_kind if kind == "row" else kind for kind in self.kinds]
            word, *cells = (_literal(cell) for cell in (word, *cells))
            cells = [
                f"[{cell}]{{.{kind}}}" if kind and cell else cell or " "
                for kind, cell in zip(kinds, cells)
            ]
            lines.append("| " + " | ".join([word, *cells]) + " |")
        return "\n".join(lines)


def _aligned(lines: Sequence[Sequence[str]], sides: str) -> str:
    """Lines of cells as text in columns; `sides` says which stand left (<) and right (>)."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "    ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths)
        ).rstrip()
        for line in lines
    )


def compare(
    exhibit: str | None = None,
    *,
    live: Record | Mapping[str, Any] | None = None,
    recorded: Record | Mapping[str, Any] | None = None,
    keys: Iterable[str] | None = None,
    labels: Mapping[str, str] | None = None,
    verdicts: Mapping[str, str] | None = None,
    points: float | None = None,
    stale: bool = False,
    stand_in: bool | Collection[str] = False,
    task: str | None = None,
) -> Comparison:
    """The table of an exhibit.

    Many arguments, since what a table shows is chosen by keyword, each with a default.

    Args:
        exhibit: its name; None for numbers that no paper printed.
        live, recorded: dotted name -> number, `MeanSD`, or a list of them where the paper prints a
            list; either may be a `Record`.
        keys: which rows, in which order; all that live or recorded hold by default, in the paper's
            order.
        labels: dotted name -> what the first column says.
        verdicts: dotted name -> a word of `published.VERDICTS` that replaces the computed one;
            numbers that `published` knows to be wrong in the paper need none.
        points: what one percentage point is, see `published.verdict`; by default what the exhibit
            says of each number.
        stale: whether `recorded` is stale; the heading then says so, and live numbers are judged
            before recorded.
        stand_in: whether ours belong to another network or other data than the paper's, or the
            names of those that do; they then stand beside the print, and the verdict says
            "stand-in".
        task: what the live numbers are of, such as "4,000 digits", where that is not the paper's
            task; they then stand beside the print under this head, and are not held against it.

    What is held against the paper is the recorded number, which has the paper's scale, and the live
    one where nothing is recorded; settings and other numbers that are `given` have no verdict.
    Raises ValueError for an unknown exhibit, name or verdict, and for lists of another length.
    """
    paper = published.exhibit(exhibit) if exhibit is not None else None
    printed = paper.flat() if paper else {}
    now, then = values_in(live), values_in(recorded)
    labels, verdicts = dict(labels or {}), dict(verdicts or {})
    ours = {**then, **now}
    if paper:
        verdicts = {key: "wrong in the paper" for key in printed if paper.is_wrong(key)} | verdicts
    if keys is None:
        keys = [key for key in printed if key in ours] + [key for key in ours if key not in printed]
    for key in keys:
        if key not in printed and key not in ours:
            raise ValueError(f"keys must be names of the exhibit or of our numbers, got {key!r}")
    for word in verdicts.values():
        _checks.one_of("verdicts", word, published.VERDICTS)
    rows = []
    for key in keys:
        point = points if points is not None else paper.point(key) if paper else 0.0
        beside = stand_in if isinstance(stand_in, bool) else key in stand_in
        word = verdicts.get(key) or ("stand-in" if beside else None)
        tolerance = paper.tolerance if paper else 0.1
        for label, print_, old, new in _entries(
            labels.get(key, key), printed.get(key), then.get(key), now.get(key)
        ):
            candidates = (old,) if task else (new, old) if stale else (old, new)
            ours = next((value for value in candidates if value is not None), None)
            row = _row(label, print_, old, new, ours, word=word, points=point, tolerance=tolerance)
            if paper and paper.is_given(key) and key not in verdicts:
                row = dataclasses.replace(row, verdict="", deviation="")
            elif row.verdict == "not run" and paper and paper.is_beyond(key):
                row = dataclasses.replace(row, verdict="out of reach")
            rows.append(row)
    return Comparison(rows, stale, task)


def values_in(found: Record | Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a record or of a mapping, by their dotted names; none of None."""
    return dict(found.values if isinstance(found, Record) else found or {})


def _entries(label: str, printed: Any, recorded: Any, live: Any) -> list[tuple[str, Any, Any, Any]]:
    """The rows of one name: one, or one for each entry of a list."""
    values = (printed, recorded, live)
    lists = [
        value
        for value in values
        if isinstance(value, (list, tuple)) and not isinstance(value, MeanSD)
    ]
    if not lists:
        return [(label, *values)]
    if (
        any(value is not None and not any(value is entry for entry in lists) for value in values)
        or len({len(value) for value in lists}) > 1
    ):
        raise ValueError(f"the values of {label} must be lists of the same length, got {values!r}")
    return [
        (f"{label}[{i + 1}]", printed and printed[i], recorded and recorded[i], live and live[i])
        for i in range(len(lists[0]))
    ]


def _row(
    label: str,
    paper: Any,
    recorded: Any,
    live: Any,
    ours: Any,
    *,
    word: str | None,
    points: float,
    tolerance: float,
) -> Row:
    """A row, in which `ours` is held against the paper."""
    deviation = ""
    if word == "stand-in" and (paper is None or ours is None):
        word = None  # nothing stands beside anything
    if isinstance(paper, float) and _is_number(ours):
        mean, sd = _mean(ours), _sd(ours)
        word = word or published.verdict(
            mean, paper, sd_ours=sd, points=points, tolerance=tolerance
        )
        deviation = _deviation(mean, paper, points) if word != "stand-in" else ""
    return Row(
        label,
        paper,
        recorded,
        live,
        word or ("not run" if paper is not None and ours is None else ""),
        deviation,
    )


def _is_number(value: object) -> TypeGuard[float | MeanSD]:
    return isinstance(value, (int, float, MeanSD)) and not isinstance(value, bool)


def _mean(value: float | MeanSD) -> float:
    return float(value.mean if isinstance(value, MeanSD) else value)


def _sd(value: object) -> float:
    sd: float = getattr(value, "sd", 0.0)
    return sd if math.isfinite(sd) else 0.0


def _deviation(ours: float, paper: float, points: float) -> str:
    if not math.isfinite(ours - paper):
        return ""
    if points:
        return f"{round((ours - paper) / points, 2) + 0.0:+.2f} points"
    if paper == 0:
        return ""
    percent = 100 * (ours - paper) / abs(paper)
    return (
        "0%"
        if abs(percent) < 5e-4
        else f"{percent:+.2g}%"
        if abs(percent) < 100
        else f"{percent:+.0f}%"
    )


def _decimals(row: Row) -> int | None:
    """The decimals of the print; None (four significant digits) where nothing is printed."""
    rounding: float | None = getattr(row.published, "rounding", None)
    return None if rounding is None else max(0, round(-math.log10(2 * rounding)))


def _shown(value: Any, digits: int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, published.Printed):
        return value.text
    if not _is_number(value):
        return str(value)
    if isinstance(value, int):
        return str(value)
    mean, sd = _mean(value), _sd(value)
    tiny = digits is not None and digits > 6
    text = (
        f"{mean:.4g}" if digits is None or tiny or not math.isfinite(mean) else f"{mean:.{digits}f}"
    )
    if not sd:
        return text
    return f"{text}±{sd:.2g}" if digits is None or tiny else f"{text}±{sd:.{digits}f}"


def _literal(text: str) -> str:
    """Text for a cell of a Markdown table; no content may become a tag, a link or an image.

    >>> print(_literal("a|b < c <img src=x onerror=alert(1)> [here](javascript:0)"))
    a\\|b < c &lt;img src=x onerror=alert(1)> [here]\\(javascript:0)
    """
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text.replace("|", "\\|").replace("](", "]\\("))
