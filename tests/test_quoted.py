"""Pages that run no code copy numbers from pages that do: each is looked up where its section says
it is from.
"""

import json
import re
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parent.parent / "book"
SOURCE = re.compile(r"<!-- numbers:(.*?)-->")
#: The number of a span may itself have brackets, as an interval has.
NUMBER = re.compile(r"\[((?:[^\[\]\n]|\[[^\[\]\n]*\])+)\]\{\.(live|recorded|published)\}")
PAGES = [
    path for path in sorted(BOOK.glob("*.md")) if SOURCE.search(path.read_text(encoding="utf-8"))
]


def numbers(text):
    """(number, kind, pages that it is said to come from) of a page, section by section.

    >>> list(numbers("<!-- numbers: a b -->\\n[1.2]{.live} and [3 [2, 4]]{.recorded}"))
    [('1.2', 'live', ['a', 'b']), ('3 [2, 4]', 'recorded', ['a', 'b'])]
    """
    parts = SOURCE.split(text)
    for pages, section in zip(parts[1::2], parts[2::2]):
        for found in NUMBER.finditer(section):
            yield *found.groups(), pages.split()


def shown(name):
    """What the notebook of a page prints, and how it was written."""
    for cell in json.loads((BOOK / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            yield "".join(cell["source"])
            continue
        yield cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
        for output in cell["outputs"]:
            yield "".join(output.get("text", ""))
            for form in ("text/markdown", "text/plain"):
                yield "".join(output.get("data", {}).get(form, ""))


def occurs(number, text):
    """Whether a text has a number as it stands, not as a part of a longer one.

    >>> occurs("0.3%", "at most 0.3%"), occurs("0.3", "10.32"), occurs("9.0%", "in 9.0% of")
    (True, False, True)
    """
    return re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", text) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_number_that_a_page_copies_stands_where_the_page_says(page):
    missing = [
        (number, pages)
        for number, kind, pages in numbers(page.read_text(encoding="utf-8"))
        if pages
        and kind != "published"
        and not any(occurs(number, text) for name in pages for text in shown(name))
    ]
    assert not missing


def test_a_number_that_stands_nowhere_is_found():
    assert list(numbers("[1]{.live}\n<!-- numbers: a -->\n[2 (1.0)]{.live} [x](y)")) == [
        ("2 (1.0)", "live", ["a"])
    ]
    assert occurs("1.2", "so 1.2.") and not occurs("1.2", "11.2") and not occurs("1.2", "1.25")
