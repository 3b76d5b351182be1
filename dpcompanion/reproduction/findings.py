"""Findings held against their criteria, and how a notebook shows them: a marked line for each.

What a table of numbers is to numbers, see `comparison`, this is to what a paper says in words.
`MARKS` are those of all verdicts, on numbers and on findings, and `tally` counts both.

>>> Findings([Finding("Adult", "epsilon is below one", "0.97", True)], kind="live")
epsilon is below one: \u2713 holds (Adult, 0.97)
"""

import dataclasses
import functools
import html
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from typing import Any

from dpcompanion import _checks
from dpcompanion.reproduction import intervals, published
from dpcompanion.reproduction.comparison import KINDS, Table

#: The mark of each verdict; its word stands beside it.
MARKS = {
    "matches": "\u2713",
    "close": "\u2248",
    "differs": "\u2260",
    "holds": "\u2713",
    "fails": "\u00d7",
    "undecided": "?",
    "stand-in": "~",
    "not run": "\u2013",
    "out of reach": "\u2026",
    "wrong in the paper": "!",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A qualitative finding held against its criterion.

    Attributes:
        where: which part of the exhibit.
        criterion: what must be the case for it to hold.
        ours: our numbers in words.
        outcome: "holds", "fails" or "undecided"; a truth value becomes one of the first two.
        kind: whose finding it is, see `published.FINDINGS`.
    """

    where: str
    criterion: str
    ours: str
    outcome: Any
    kind: str = "claim"

    def __post_init__(self):
        object.__setattr__(self, "outcome", intervals.outcome(self.outcome))
        _checks.one_of("kind", self.kind, published.FINDINGS)


def said(finding: Finding) -> str:
    """A finding's criterion, and whose it is where it is not the paper's."""
    return {"claim": "", "own": "ours: ", "refutes": "against the paper: "}[
        finding.kind
    ] + finding.criterion


class Findings:
    """Findings and their rendering, see `dpcompanion.reproduction.experiments.findings`: a line for
    each criterion, with marks, that unfolds where there is more than one row.

    Args:
        rows: the findings.
        kind: "recorded" or "live", or one of them for each row, which the line and the rows then
            say.

    >>> found = Findings(
    ...     [Finding("Forest", "seeds move weights further than data", "98%", True)],
    ...     kind="recorded",
    ... )
    >>> found
    seeds move weights further than data: \u2713 holds (Forest, 98%)
    >>> found.counts(), found.counts("own")
    ({'holds': 1}, {})
    """

    def __init__(self, rows: Iterable[Finding], *, kind: str | Iterable[str]):
        self.rows = tuple(rows)
        self._both = not isinstance(kind, str)
        self.kinds = (kind,) * len(self.rows) if isinstance(kind, str) else tuple(kind)
        for each in (kind,) if isinstance(kind, str) else self.kinds:
            _checks.one_of("kind", each, KINDS)
        _checks.same_length(rows=self.rows, kind=self.kinds)

    def counts(self, kind: str = "claim") -> dict[str, int]:
        """How many findings of a kind hold, fail and are undecided."""
        words = [
            row.outcome
            for row in self.rows
            if row.kind == _checks.one_of("kind", kind, published.FINDINGS)
        ]
        return {word: words.count(word) for word in intervals.OUTCOMES if word in words}

    def _criteria(self) -> ItemsView[str, dict[str, list[Finding]]]:
        """Of each criterion: (what it says, {kind: rows})."""
        found: dict[str, dict[str, list[Finding]]] = {}
        for row, kind in zip(self.rows, self.kinds):
            found.setdefault(said(row), {}).setdefault(kind, []).append(row)
        return found.items()

    def _outcomes(
        self, by_kind: dict[str, list[Finding]]
    ) -> Iterator[tuple[str, dict[str, int], Finding | None, str]]:
        """What came out, by kind: (the kind if two, counts, the row if alone, the kind)."""
        alone = all(len(rows) == 1 for rows in by_kind.values())
        for kind, rows in by_kind.items():
            words = [row.outcome for row in rows]
            counts = {word: words.count(word) for word in intervals.OUTCOMES if word in words}
            yield kind if self._both else "", counts, rows[0] if alone else None, kind

    def _table(self, by_kind: dict[str, list[Finding]], verdict: Callable[[str], str]) -> Table:
        rows = [
            (
                kind,
                [
                    f"{row.where} ({kind})" if self._both else row.where,
                    row.ours,
                    verdict(row.outcome),
                ],
            )
            for kind, each in by_kind.items()
            for row in each
        ]
        return Table(
            ["where", "ours", "verdict"],
            [cells for _, cells in rows],
            kinds=["row", None],
            row_kinds=[kind for kind, _ in rows],
        )

    def __repr__(self) -> str:
        lines = []
        for criterion, by_kind in self._criteria():
            parts = [
                " ".join(
                    filter(None, (head, tally(counts, alone=bool(row)), row and _in_brackets(row)))
                )
                for head, counts, row, _ in self._outcomes(by_kind)
            ]
            lines.append(f"{criterion}: {'; '.join(parts)}")
            if any(len(rows) > 1 for rows in by_kind.values()):
                lines += [
                    "    " + line for line in repr(self._table(by_kind, str)).splitlines()[1:]
                ]
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        blocks = []
        for criterion, by_kind in self._criteria():
            parts = []
            for head, counts, row, kind in self._outcomes(by_kind):
                marks = tally(counts, _span, alone=bool(row))
                words = row and _in_brackets(row, _html, functools.partial(_span, kind))
                parts.append(" ".join(filter(None, (head and _span(kind, head), marks, words))))
            line = f"{_html(criterion)}: {'; '.join(parts)}"
            if all(len(rows) == 1 for rows in by_kind.values()):
                blocks.append(f'<p class="finding">{line}</p>')
            else:
                table = self._table(by_kind, lambda word: f"[{MARKS[word]} {word}]{{.{word}}}")
                blocks.append(unfolding(line, table._repr_markdown_()))
        return "\n\n".join(blocks)


def _unmarked(word: str, text: str) -> str:
    return text


def tally(
    counts: Mapping[str, int], mark: Callable[[str, str], str] = _unmarked, alone: bool = False
) -> str:
    """Counts of verdicts with their marks; `alone` leaves out the number where there is one only.

    >>> tally({"matches": 6, "holds": 1, "not run": 0})
    '\u2713 6 match, \u2713 1 holds'
    >>> tally({"undecided": 1}, alone=True)
    '? undecided'
    """
    plural = {"matches": "match", "differs": "differ", "holds": "hold", "fails": "fail"}
    return ", ".join(
        mark(
            word,
            f"{MARKS[word]} {f'{count} ' if not (alone and count == 1) else ''}"
            f"{word if count == 1 else plural.get(word, word)}",
        )
        for word, count in counts.items()
        if count
    )


def _in_brackets(
    row: Finding, plain: Callable[[str], str] = str, number: Callable[[str], str] = str
) -> str:
    words = [shown(text) for shown, text in ((plain, row.where), (number, row.ours)) if text]
    return f"({', '.join(words)})" if words else ""


def unfolding(line: str, inside: str) -> str:
    """Markdown that unfolds below a line of HTML, in a notebook as in the book."""
    return f'<details class="unfolds"><summary>{line}</summary>\n\n{inside}\n\n</details>'


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind.replace(" ", "-")}">{_html(text)}</span>'


def _html(text: str) -> str:
    """Text within a line of HTML that Markdown leaves alone."""
    return html.escape(" ".join(text.split())).replace("](", "]&#40;").replace("{", "&#123;")
