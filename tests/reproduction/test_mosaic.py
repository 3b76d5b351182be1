import dataclasses
import html.parser
import os
import pathlib
import re

from dpcompanion.reproduction import mosaic, published, scoreboard

from .board import everything

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Reader(html.parser.HTMLParser):
    """The cells, (tag, attributes), and what each says; and all text."""

    def __init__(self, source):
        super().__init__()
        self.cells, self.text, self.open, self.depth = [], "", None, 0
        self.feed(source)
        assert self.depth == 0

    def handle_starttag(self, tag, attributes):
        attributes, self.depth = dict(attributes), self.depth + 1
        if "cell" in attributes.get("class", "").split() and "aria-hidden" not in attributes:
            self.cells.append([tag, attributes, ""])
            self.open = self.depth

    def handle_endtag(self, tag):
        self.depth -= 1
        self.open = None

    def handle_data(self, data):
        self.text += data
        if self.open:
            self.cells[-1][2] += data


def test_every_exhibit_has_a_cell_with_its_name_its_state_and_a_mark():
    cells = Reader(mosaic.Mosaic(everything())._repr_html_()).cells
    assert len(cells) == len(everything()) == len(published.exhibits())
    for one, (_, attributes, mark) in zip(everything(), cells):
        assert attributes["aria-label"].startswith(f"{scoreboard.label(one.exhibit)}: ")
        assert attributes["aria-label"].endswith(f"({one.state})")
        assert one.state.replace(" ", "-") in attributes["class"].split()
        assert mark == mosaic.MARKS[one.state]


def test_a_cell_leads_to_its_exhibits_place_from_any_page():
    for page in ("book/scoreboard", "book/papers/idp-sgd"):
        cells = Reader(mosaic.Mosaic(everything(), page)._repr_html_()).cells
        for one, (tag, attributes, _) in zip(everything(), cells):
            if one.place is None:
                assert tag == "span" and attributes["tabindex"] == "0"
                continue
            address, _, anchor = attributes["href"].partition("#")
            source = (ROOT / os.path.dirname(page) / address).with_suffix(".md").resolve()
            assert tag == "a" and source.is_file() and anchor == one.place.anchor


def test_each_state_has_its_own_mark_and_the_legend_counts_them():
    assert set(mosaic.MARKS) == set(scoreboard.STATES) and len(set(mosaic.MARKS.values())) == len(
        mosaic.MARKS
    )
    shown = mosaic.Mosaic(everything())
    text = Reader(shown._repr_html_()).text
    counted = {
        state: int(re.search(rf"{state}: (\d+)", text)[1])
        for state, count in scoreboard.counts(everything()).items()
        if count
    }
    assert sum(counted.values()) == len(everything())
    assert sum(repr(shown).count(mark) for mark in mosaic.MARKS.values()) == len(
        everything()
    ) + len(counted)


def test_a_title_cannot_break_the_markup():
    one = everything()[0]
    title = '<b>"&'
    odd = dataclasses.replace(
        one, exhibit=dataclasses.replace(one.exhibit, title=title), place=None
    )
    ((tag, attributes, _),) = Reader(mosaic.Mosaic([odd])._repr_html_()).cells
    assert tag == "span" and title in attributes["aria-label"]


def test_every_state_has_a_look():
    style = (ROOT / "book" / "_static" / "custom.css").read_text(encoding="utf-8")
    assert all(f".cell.{state.replace(' ', '-')} " in style for state in scoreboard.STATES)
