"""The scoreboard at one glance: a cell for each exhibit, in a row for each paper, that tells its
state and leads to it.

A cell is recognised by its mark as well as by its colour, so that print and eyes without colours
lose nothing.

>>> Mosaic(scoreboard.exhibit_statuses("intrinsic-privacy")[:2])
Hyland and Tople 2020    ✓ ✓
<BLANKLINE>
✓ reproduced: 2
"""

import html
import os
from collections.abc import Iterable

from dpcompanion.reproduction import published, scoreboard

#: A mark for each state, which any font has.
MARKS = {
    "reproduced": "✓",
    "in part": "½",
    "undecided": "?",
    "contradicted": "×",
    "wrong in the paper": "!",
    "vacuous": "=",
    "out of reach": "…",
    "not run": "–",
}


class Mosaic:
    """Some statuses as cells, links to the exhibits in a notebook, with a legend that counts them.

    Args:
        statuses: as of `scoreboard.exhibit_statuses`.
        page: the page that it stands on, which links start from.
    """

    def __init__(self, statuses: Iterable[scoreboard.ExhibitStatus], page: str = "book/scoreboard"):
        self.statuses, self.page = tuple(statuses), page

    def rows(self) -> list[tuple[published.Paper, list[scoreboard.ExhibitStatus]]]:
        """(paper, its statuses) for each paper that has any, in the papers' order."""
        found: dict[str, list[scoreboard.ExhibitStatus]] = {}
        for one in self.statuses:
            found.setdefault(one.exhibit.paper, []).append(one)
        return [(published.paper(slug), board) for slug, board in found.items()]

    def __repr__(self) -> str:
        width = max(len(paper.short) for paper, _ in self.rows())
        lines = [
            f"{paper.short:<{width}}    {' '.join(MARKS[one.state] for one in board)}"
            for paper, board in self.rows()
        ]
        legend = ", ".join(f"{MARKS[state]} {state}: {count}" for state, count in self._counts())
        return "\n".join([*lines, "", legend])

    def _repr_html_(self) -> str:
        lines = ['<div class="mosaic">']
        for paper, board in self.rows():
            name = html.escape(paper.short)
            lines += [
                f'<p class="mosaic-paper">{name} <span>{len(board)} exhibits</span></p>',
                f'<ul aria-label="{name}">',
                *(f"<li>{self._cell(one)}</li>" for one in board),
                "</ul>",
            ]
        lines.append('<ul class="mosaic-legend" aria-label="Legend">')
        lines += [
            f'<li><span class="cell {_class(state)}" aria-hidden="true">{MARKS[state]}</span> '
            f"{state}: {count}</li>"
            for state, count in self._counts()
        ]
        return "\n".join([*lines, "</ul>", "</div>"])

    def _counts(self) -> list[tuple[str, int]]:
        return [
            (state, count) for state, count in scoreboard.counts(self.statuses).items() if count
        ]

    def _cell(self, one: scoreboard.ExhibitStatus) -> str:
        said = html.escape(f"{scoreboard.label(one.exhibit)}: {one.exhibit.title} ({one.state})")
        look = f'class="cell {_class(one.state)}" aria-label="{said}"'
        if one.place is None:
            return f'<span {look} role="img" tabindex="0">{MARKS[one.state]}</span>'
        page = os.path.relpath(one.place.page, os.path.dirname(self.page)).replace(os.sep, "/")
        return f'<a {look} href="{page}.html#{one.place.anchor}">{MARKS[one.state]}</a>'


def _class(state: str) -> str:
    return state.replace(" ", "-")
