"""What can be counted of the language of the pages: short sentences, plain words for terms,
pronouns without a subject.

Counted per thousand words of prose, as a page opens. The limits are the lower of two other books'
ninth deciles. Both were counted in the same way, at the commits that `test_lengths` names; median
and ninth decile of a chapter:

    =================  =====  =========  =====
    a chapter          d2l    QuantEcon  limit
    =================  =====  =========  =====
    short sentences %  4, 9   12, 23         9
    plain words        0, 1   0, 1           1
    pronouns           0, 1   2, 4           1
    asides             4, 7   1, 4           4
    =================  =====  =========  =====
"""

import re
from pathlib import Path

import pytest

from .test_lengths import CHAPTERS, PAGES

BOOK = Path(__file__).resolve().parent.parent / "book"
#: Words for which the field has terms, or that name nobody.
PLAIN = re.compile(
    r"\b(everybody|everybody's|dear|told|whoever|accused|accuses|drawn)\b", re.IGNORECASE
)
#: A pronoun that opens a paragraph in place of a subject, which "this page" is.
PRONOUN = re.compile(
    r"(It|They|She|He|Both|Ours|Theirs)\b"
    r"|(This|That|These|Those) "
    r"(is|are|was|were|has|have|had|says?|does|do|can|may|must|will|would|holds?)\b"
)
ASIDE = re.compile(r"\w[^.!?\n]*? \([^()]{12,}\)[^.!?]*[.!?]")


def paragraphs(text):
    """The prose of a page, paragraph by paragraph: no code, table, list, heading, box's frame or
    formula.

    >>> list(
    ...     paragraphs(
    ...         "# T\\n\\nOne `x` and {doc}`a <b>`.\\n\\n| a |\\n|--|\\n\\n- item\\n\\n$$ x $$\\n"
    ...     )
    ... )
    ['One code and term.']
    """
    for folded in (
        r"(?ms)\A---\n.*?^---$",
        r"(?ms)^(`{3,}).*?^\1$",
        r"(?s)<!--.*?-->",
        r"(?ms)^\$\$.*?\$\$$",
    ):
        text = re.sub(folded, "", text)
    text = re.sub(r"(?m)^:::+.*$|^:[\w-]+:.*$|^\(.*\)=$", "", text)
    for part in re.split(r"\n\s*\n", text):
        part = " ".join(part.split())
        if not part or re.match(r"[#|>$]|[-*] |\d+\. |: ", part):
            continue
        part = re.sub(r"^\*\*[^*]+\*\*[.:]? *", "", part)  # a label, as of a definition
        part = re.sub(r"\{[\w:-]+\}`[^`]*`", "term", part)
        part = re.sub(r"`[^`]*`", "code", re.sub(r"\$[^$]+\$", "formula", part))
        part = re.sub(r"\[([^\]]*)\](\{[^}]*\}|\([^)]*\))", r"\1", part)
        yield part.replace("**", "").replace("*", "")


def sentences(paragraph):
    """The sentences of a paragraph.

    >>> sentences("One, e.g. this. Two is 1.5! Three?")
    ['One, e.g. this.', 'Two is 1.5!', 'Three?']
    """
    return [
        part
        for part in re.split(
            r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<! al\.) +(?=[A-Z\"'(])", paragraph
        )
        if part
    ]


#: The pages are in British English; code and titles of papers keep their own spelling.
AMERICAN = re.compile(
    r"\b(?!optimizers?\b)(behavior\w*|color\w*|neighbor\w*|favor\w*|center\w*|label(ed|ing)|model(ed|ing)|analyze\w*|artifact\w*"
    r"|(character|discret|emphas|general|individual|initial|minim|maxim|normal|optim|random|real|recogn|summar|util)iz\w+)\b",
    re.IGNORECASE,
)


def own(sentence):
    """The words of a sentence that are its own: no link, no code, no formula."""
    return [
        word for word in sentence.split() if word.strip(".,;:()") not in ("term", "code", "formula")
    ]


def counted(text):
    """Short sentences in percent of all; plain words, pronouns that open a paragraph and asides, a
    thousand words.

    >>> counted("It is so. That was told to everybody by the others here today (in a long aside).")[
    ...     "short"
    ... ]
    50
    """
    prose = list(paragraphs(text))
    all_ = [
        sentence
        for paragraph in prose
        for sentence in sentences(paragraph)
        if len(own(sentence)) >= 3
    ]
    words = max(1, sum(len(paragraph.split()) for paragraph in prose))
    short = sum(len(sentence.split()) <= 6 for sentence in all_)

    def often(number):
        return round(1000 * number / words)

    return {
        "short": round(100 * short / max(1, len(all_))),
        "plain": often(sum(len(PLAIN.findall(paragraph)) for paragraph in prose)),
        "pronouns": often(sum(bool(PRONOUN.match(paragraph)) for paragraph in prose)),
        "asides": often(sum(bool(ASIDE.search(sentence)) for sentence in all_)),
    }


LIMITS = {"short": 9, "plain": 1, "pronouns": 1, "asides": 4}


@pytest.mark.parametrize(
    "name", [*CHAPTERS, *sorted(name for name in PAGES if name.endswith("-exhibits"))]
)
def test_the_language_of_a_page_is_within_its_limits(name):
    found = counted((BOOK / f"{name}.md").read_text(encoding="utf-8"))
    assert all(found[what] <= LIMITS[what] for what in LIMITS), found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_in_british_english(name):
    text = (BOOK / f"{name}.md").read_text(encoding="utf-8")
    assert not [
        found[0] for paragraph in paragraphs(text) for found in AMERICAN.finditer(paragraph)
    ]


def test_what_is_counted():
    found = counted(
        "Everybody was told. "
        + "This is a sentence of more than six plain words. " * 9
        + "\n\nIt opens a paragraph."
    )
    assert found == {"short": 18, "plain": 21, "pronouns": 10, "asides": 0}
    assert counted("A sentence (with an aside of some length) that goes on.")["asides"] > 0
    assert counted("```\neverybody (told in a long aside) x.\n```\n| dear |\n|--|\n")["plain"] == 0
