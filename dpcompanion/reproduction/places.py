"""Where the book shows an exhibit.

Its *place* is its anchor on the paper's page of exhibits. Where that page has none, it is the
section of a chapter whose heading names it ("Figures 6 and 7", "Table III"), or else the first
whose code asks for it by name.

>>> of_paper("intrinsic-privacy")["table-3"].anchor
'intrinsic-privacy-table-3'
"""

import dataclasses
import pathlib
import re

from dpcompanion.reproduction import provenance, published, records

_ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4}
_KINDS = "figure|table|theorem|algorithm|claim|fact|corollary|lemma|definition"


@dataclasses.dataclass(frozen=True)
class Place:
    """A section of the book: the page, such as "book/papers/idp-sgd-exhibits", and an anchor."""

    page: str
    anchor: str


def of_paper(paper: str, book: records.Folder | None = None) -> dict[str, Place]:
    """Exhibit -> its place, from the anchors of its page of exhibits, the headings of the paper's
    own pages, and then from the code of all pages.
    """
    book = (
        (provenance.repository() or records.SHIPPED) / "book"
        if book is None
        else pathlib.Path(book)
    )
    own = sorted(book.glob(f"papers/{paper}*.md"))
    others = sorted(
        path for path in book.glob("*.md") if path.stem not in ("scoreboard", "errata", "intro")
    )
    exhibits = published.exhibits(paper)
    found: dict[str, Place] = {}
    split = book / f"papers/{paper}-exhibits.md"
    if split.is_file():
        anchors = re.findall(r"^\((.+)\)=$", split.read_text(encoding="utf-8"), re.MULTILINE)
        found = {
            exhibit.id: _place(book, split, anchor_of(f"{paper}-{exhibit.id}"))
            for exhibit in exhibits
            if f"{paper}-{exhibit.id}" in anchors
        }
    for path in own:
        for heading, anchor, _ in sections(path.read_text(encoding="utf-8")):
            named = named_in(heading)
            for exhibit in exhibits:
                if named & named_in(exhibit.id):
                    found.setdefault(exhibit.id, _place(book, path, anchor))
    for path in (*own, *others):
        for _, anchor, code in sections(path.read_text(encoding="utf-8")):
            for exhibit in exhibits:
                ways = (exhibit.name,) if path not in own else (exhibit.name, exhibit.id)
                if anchor and any(f'{mark}{way}"' in code for way in ways for mark in '"/'):
                    found.setdefault(exhibit.id, _place(book, path, anchor))
    return found


def _place(book: pathlib.Path, path: pathlib.Path, anchor: str) -> Place:
    return Place(f"book/{path.relative_to(book).with_suffix('').as_posix()}", anchor)


def sections(text: str) -> list[tuple[str, str, str]]:
    """(heading, anchor, code) of each section of a page; that of the title's is empty."""
    found, fence, is_code = [["", "", ""]], None, False
    for line in text.splitlines():
        mark = re.match(r"(`{3,}|~{3,})(.*)", line)
        if fence is None and mark:
            fence, is_code = mark[1], "code-cell" in mark[2]
        elif fence is not None and line.strip() == fence:
            fence = None
        elif fence is not None and is_code:
            found[-1][2] += line + "\n"
        elif fence is None and (heading := re.match(r"(#+)\s+(.*)", line)):
            found.append([heading[2], anchor_of(heading[2]) if len(heading[1]) > 1 else "", ""])
    return [(heading, anchor, code) for heading, anchor, code in found]


def anchor_of(heading: str) -> str:
    """The anchor that Sphinx gives a heading.

    >>> anchor_of("Table III: intrinsic epsilon"), anchor_of("Figures 8 and 9: one's own start")
    ('table-iii-intrinsic-epsilon', 'figures-8-and-9-ones-own-start')
    """
    words = re.sub(r"\{\w+\}`([^`]*)`|[`*$]", r"\1", heading).lower().replace("'", "")
    return re.sub(r"^[-0-9]+|-+$", "", re.sub(r"[^a-z0-9]+", "-", words))


def named_in(words: str) -> set[tuple[str, str]]:
    """The exhibits that a heading, or an exhibit's id, speaks of, as (kind, number) pairs.

    >>> sorted(named_in("Theorem 2 and claims 1 and 2; Tables I to III of the paper"))
    [('claim', '1'), ('claim', '2'), ('table', '1'), ('table', '2'), ('table', '3'),
    ('theorem', '2')]
    >>> named_in("algorithms-1-2-3") == named_in("Algorithms 1 to 3")
    True
    """
    found, kind, last, span = set(), None, None, False
    for word in re.findall(r"[A-Za-z]?\.?\d+(?:\.\d+)*|[A-Za-z]+|[-\u2013]", words):
        if re.fullmatch(f"({_KINDS})s?", word, re.IGNORECASE):
            kind, last, span = word.lower().rstrip("s"), None, False
        elif kind and (re.search(r"\d", word) or word in _ROMAN):
            number = str(_ROMAN.get(word, word.lower()))
            if span and number.isdigit() and last is not None and last.isdigit():
                found |= {(kind, str(between)) for between in range(int(last), int(number))}
            found.add((kind, number))
            last, span = number, False
        elif word in ("to", "-", "\u2013"):
            span = last is not None
        elif word != "and":
            kind = None
    return found
