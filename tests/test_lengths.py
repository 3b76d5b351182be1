"""What a page asks of its reader is limited: words, lines of code, tables and figures that stand
open.

Counted from sources and notebooks, so that no browser and no font has a say. A chapter's goal is
2,500 words and one table; pages that are longer have limits of their own, their lengths of today,
which may only become lower.

Two other books, counted in the same way: "Dive into Deep Learning" (d2l-ai/d2l-en at 23d7a5ae, all
118 chapters with code and at least 500 words, the PyTorch tab) and "A First Course in Quantitative
Economics with Python" (QuantEcon/lecture-python-intro at b9316aa, all 50 such lectures). Median and
ninth decile of a chapter:

    ==========  ==========  ==========  =====
    a chapter   d2l         QuantEcon   limit
    ==========  ==========  ==========  =====
    words       1318, 2751  1575, 2654   2500
    code        60, 140     165, 258       75
    tables      0, 0        0, 1            1
    ==========  ==========  ==========  =====
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import jupytext
import pytest

BOOK = Path(__file__).resolve().parent.parent / "book"
#: Pages to look things up in, as long as what there is to look up.
REFERENCE = re.compile(r"api/.*|.*-exhibits|scoreboard|errata|references")


class Length(NamedTuple):
    words: int = 0
    code: int = 0
    tables: int = 0
    figures: int = 0

    def __add__(self, other):
        return Length(*map(sum, zip(self, other)))


GENERAL = Length(words=2500, code=75, tables=1, figures=3)
#: What is longer, and by how much today: to be lowered with the page, and taken out when it is
#: within the limit.
LONGER = {"accounting-in-pictures": {"figures": 5}, "exact-filters": {"figures": 4}}
#: What says of itself that it is short.
SHORTER = {"tour": {"words": 700, "code": 45, "tables": 0, "figures": 0}}


def length_of_text(text):
    """Words and tables of Markdown as a page opens: what is folded, fenced or a comment does not
    count.

    A formula, a role and a link's words count, as many words as they have.
    """
    for folded in (
        r"(?ms)^:::+\{dropdown\}.*?^:::+$",
        r"(?ms)^(`{3,}).*?^\1$",
        r"(?s)<(details|style|script)\b.*?</\1>",
    ):
        text = re.sub(folded, "", text)
    text = re.sub(
        r"(?ms)\A---\n.*?^---$|<!--.*?-->|^:[\w-]+:.*?$|^:::+.*?$|^\([\w-]+\)=$", "", text
    )
    rows = re.compile(r"(?m)^\|.*$")
    tables = len(re.findall(r"(?m)^\|[-:| ]+\|$", text))
    text = re.sub(r"\{[\w:-]+\}|\]\(.*?\)|<.*?>", " ", rows.sub("", text))
    text = re.sub(r"(?s)\$\$.*?\$\$|\$[^$]+\$", " formula ", text)
    return Length(words=len(re.findall(r"[^\W_][\w'\u2019,.%-]*", text)), tables=tables)


def length_of_cell(cell):
    """A cell of a notebook: its prose, or its code and what it shows, unless its tags fold that."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return length_of_text(source)
    tags = {*cell["metadata"].get("tags", ())}
    length = Length()
    if not tags & {"hide-input", "remove-input", "hide-cell", "remove-cell"}:
        length += Length(
            code=sum(bool(line.strip()) for line in source.splitlines() if not line.startswith(":"))
        )
    if not tags & {"hide-output", "remove-output", "hide-cell", "remove-cell"}:
        for data in (output.get("data", {}) for output in cell["outputs"]):
            shown = "".join(data.get("text/html", data.get("text/markdown", "")))
            length += length_of_text(shown) + Length(
                figures=("image/png" in data) + shown.count("<svg")
            )
    return length


def length_of_page(name):
    notebook = BOOK / f"{name}.ipynb"
    if notebook.exists():
        return sum(
            map(length_of_cell, json.loads(notebook.read_text(encoding="utf-8"))["cells"]), Length()
        )
    return length_of_text((BOOK / f"{name}.md").read_text(encoding="utf-8"))


PAGES = {path.relative_to(BOOK).with_suffix("").as_posix() for path in BOOK.rglob("*.md")}
CHAPTERS = sorted(
    name for name in PAGES if not REFERENCE.fullmatch(name) and not name.startswith("_")
)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_page_is_within_its_limits(name):
    length, limits = (
        length_of_page(name),
        GENERAL._replace(**LONGER.get(name, {}), **SHORTER.get(name, {})),
    )
    assert length.words and all(is_ <= limit for is_, limit in zip(length, limits)), (
        length,
        limits,
    )


#: Columns of code that a page shows without a scroll bar, at a width of 1280 pixels.
COLUMNS = 76


def too_wide(cells):
    """The lines of visible code, in cells and in the text, that are longer than `COLUMNS`."""
    hidden = {"hide-input", "remove-input", "hide-cell", "remove-cell"}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            shown += re.findall(r"(?ms)^```python$(.*?)^```$", cell["source"])
        elif not hidden & {*cell["metadata"].get("tags", ())}:
            shown.append(cell["source"])
    return [line for code in shown for line in code.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_visible_code_fits_the_page(name):
    assert not too_wide(jupytext.read(BOOK / f"{name}.md", fmt="md:myst").cells)


def test_programs_that_pages_include_fit_them_too():
    texts = [path.read_text(encoding="utf-8") for path in BOOK.rglob("*.md")]
    programs = {
        name
        for text in texts
        for name in re.findall(r"(?m)^```\{literalinclude\} \.\./(examples/\S+)$", text)
    }
    wide = [
        line
        for name in programs
        for line in (BOOK.parent / name).read_text().splitlines()
        if len(line) > COLUMNS
    ]
    assert len(programs) >= 3 and not wide


def test_code_that_is_too_wide_is_found():
    def cell(source, *tags):
        return {"cell_type": "code", "source": source, "metadata": {"tags": tags}}

    wide = "x" * (COLUMNS + 1)
    assert (
        too_wide([cell(f"{wide}\n{wide[1:]}"), cell(wide, "hide-input"), cell(wide, "hide-output")])
        == [wide] * 2
    )
    text = {
        "cell_type": "markdown",
        "source": f"{wide}\n\n```python\n{wide}\n```\n\n```\n{wide}\n```\n",
    }
    assert too_wide([text]) == [wide]


@pytest.mark.parametrize("name", LONGER)
def test_an_exception_is_needed(name):
    length = length_of_page(name)
    assert all(getattr(length, what) > getattr(GENERAL, what) for what in LONGER[name]), length


def test_what_stands_open_is_counted_and_what_is_folded_is_not():
    table = "| a | b |\n|:--|--:|\n| 1 | 2 |\n"
    folded = (
        f"\n:::{{dropdown}} "
        f"Solution\nwords\n{table}:::\n<details><p>words</p>\n\n{table}</details>\n"
    )
    shown = "# A title\n\nThree more words, $x + 1$ and {doc}`a page <other>`.\n\n"
    shown += ":::{admonition} Note\n:class: tip\nOne.\n:::\n"
    assert length_of_text(shown + table + folded + "```{raw} html\nwords\n```\n") == Length(
        words=10, tables=1
    )

    def cell(*tags):
        data = [{"image/png": ""}, {"text/markdown": [table]}, {"text/plain": "<svg"}]
        outputs = [{"data": each} for each in data]
        return {
            "cell_type": "code",
            "source": ["x = 1\n", "\n", "x"],
            "metadata": {"tags": tags},
            "outputs": outputs,
        }

    assert length_of_cell(cell()) == Length(code=2, tables=1, figures=1)
    assert length_of_cell(cell("hide-input")) == Length(tables=1, figures=1)
    assert length_of_cell(cell("hide-cell")) == Length()
