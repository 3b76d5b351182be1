"""What the pages of a paper call, and that a page of exhibits has them all."""

import pathlib
import re

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from dpcompanion.reproduction import experiments, places, published, records, scoreboard
from dpcompanion.reproduction.chapters import Chapter, Exhibits, Shown, panels, table
from dpcompanion.reproduction.papers import intrinsic_privacy


@pytest.fixture(scope="module")
def chapter():
    return Chapter("intrinsic-privacy")


def counted(monkeypatch):
    """The names that are run from here on."""
    calls, run = [], experiments.run
    monkeypatch.setattr(
        experiments, "run", lambda name, **options: calls.append(name) or run(name, **options)
    )
    return calls


def test_an_exhibit_is_computed_once_however_often_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("DPCOMPANION_LIVE", raising=False)
    calls, chapter = counted(monkeypatch), Chapter("idp-sgd")
    assert chapter.live("table-5") is chapter.live("idp-sgd/table-5") and calls == [
        "idp-sgd/table-5"
    ]
    Chapter("idp-sgd").live("table-5")
    assert len(calls) == 2, "without a folder another page computes it again"


def test_the_pages_of_a_paper_share_a_live_run_and_see_the_same_types(monkeypatch, tmp_path):
    calls = counted(monkeypatch)
    monkeypatch.setenv("DPCOMPANION_LIVE", str(tmp_path))
    first, second = (Chapter("intrinsic-privacy").live("figure-1") for _ in range(2))
    assert calls == ["intrinsic-privacy/figure-1"] and first.values == second.values
    assert first.arrays.keys() == second.arrays.keys()
    assert all(np.array_equal(first.arrays[key], second.arrays[key]) for key in first.arrays)
    monkeypatch.delenv("DPCOMPANION_LIVE")
    alone = Chapter("intrinsic-privacy").live("figure-1")
    assert alone.values == first.values and {type(x) for x in alone.arrays.values()} <= {np.ndarray}
    assert {key: x.dtype for key, x in alone.arrays.items()} == {
        key: x.dtype for key, x in first.arrays.items()
    }


def test_a_live_run_of_other_code_is_not_taken_over(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_LIVE", str(tmp_path))
    old = records.make("idp-sgd/table-5", "quick", {"mnist.sigma": 1.0}, config={}, version=99)
    records.write(old, tmp_path)
    assert Chapter("idp-sgd").live("table-5").values["mnist.sigma"] > 3


def test_recorded_and_live_stand_under_their_kinds(chapter):
    found = chapter.both("claims-1-2")
    assert list(found) == ["recorded", "live"] and found["recorded"].preset == "paper"
    assert (
        found["live"] is chapter.live("claims-1-2")
        and found["live"].preset == experiments.default_preset()
    )
    quick_only = Chapter("per-instance-accounting")
    assert quick_only.recorded("figure-7") is None
    assert chapter.printed("table-3").name == "intrinsic-privacy/table-3"


def test_findings_of_both_runs_are_one_line_that_says_which_is_which(chapter):
    both = chapter.findings(chapter.both("claims-1-2"))
    assert [row.outcome for row in both.rows] == ["holds", "holds"] and both.counts() == {
        "holds": 2
    }
    assert both.kinds == ("recorded", "live")
    assert "recorded \u2713 holds (random orders, " in repr(
        both
    ) and "; live \u2713 holds (random" in repr(both)
    assert (
        'class="recorded">recorded' in both._repr_markdown_()
        and 'class="live">live' in both._repr_markdown_()
    )
    assert repr(both).count("simulated mean") == 1, "a criterion is said once"
    alone = chapter.findings(chapter.live("claims-1-2"))
    assert repr(alone) == repr(experiments.findings(chapter.live("claims-1-2")))
    assert (
        chapter.findings(None) is None
        and chapter.findings(chapter.recorded("figure-1"), "table-1") is None
    )
    many = chapter.findings(
        {"recorded": [chapter.recorded("claims-1-2"), chapter.recorded("theorem-2")]}
    )
    assert len(many.rows) == 4 and len(chapter.findings({"recorded": [], "live": []}) or []) == 0


def test_a_comparison_has_all_that_is_printed_and_says_when_the_record_is_stale(monkeypatch):
    chapter = Chapter("idp-sgd")
    record = chapter.recorded("table-5")
    made = chapter.compare(
        "table-5", recorded=record, labels=lambda keys: dict.fromkeys(keys, "a row")
    )
    table = chapter.printed("table-5")
    compared = [key for key in table.flat() if key in record.values or not table.is_given(key)]
    assert 0 < len(made.rows) == len(compared) < len(table.flat())
    assert {row.label for row in made.rows} == {"a row"}
    assert "stale" not in repr(made)
    monkeypatch.setattr(experiments.Experiment, "is_stale", lambda self, record: True)
    assert "recorded (stale)" in repr(chapter.compare("table-5", recorded=record))


def test_an_exhibit_is_shown_with_its_verdicts_and_what_remains_in_one_output():
    chapter = Chapter("individual-accounting")
    shown = chapter.show("table-3")
    comparison, verdicts, findings, remains = shown.parts
    assert len(comparison.rows) == len(chapter.printed("table-3").flat())
    assert "paper record of a stand-in" in verdicts and "not run" in verdicts
    assert "individual clipping costs" in repr(findings)
    assert "cifar10" in remains
    assert "`dpcompanion run individual-accounting/table-3 --preset paper --device cuda`" in remains
    text = shown._repr_markdown_()
    assert (
        "\u2013 2 not run, \u2026 2 out of reach; smaller runs: ✓ 1 holds. Made by "
        "`dpcompanion run individual-accounting/" in verdicts
    )
    assert (
        text.count("\n\n") == 3
        and "| " in text
        and "`dpcompanion run" in text
        and remains in repr(shown)
    )


def test_a_page_of_exhibits_computes_live_what_an_exhibit_is_judged_by(monkeypatch):
    calls, page = counted(monkeypatch), Exhibits("idp-sgd")
    shown = page.show("figure-4")
    assert calls == ["idp-sgd/figure-4"] and "; live \u2713 2 hold" in repr(shown)
    assert "recorded" in repr(page.show("table-5")) and "live" in repr(page.show("table-5"))
    page.show("table-10")
    assert calls == ["idp-sgd/figure-4", "idp-sgd/table-5"], "what has no quick preset is not run"


def test_numbers_of_a_live_task_stand_beside_the_print_and_are_not_held_against_it(monkeypatch):
    counted(monkeypatch)
    monkeypatch.setattr(Chapter, "live", lambda self, exhibit: self.recorded("table-9"))
    made = (
        Chapter("idp-sgd")
        .show("table-9", live={"sample": "91.0 \u00b1 0.2"}, task="4,000 digits")
        .parts[0]
    )
    row = next(row for row in made.rows if row.label == "sample")
    assert (
        row.verdict == "matches"
        and row.live == "91.0 \u00b1 0.2"
        and "live: 4,000 digits" in repr(made)
    )
    alone = Chapter("idp-sgd").compare("table-9", live={"sample": 98.17}, task="4,000 digits")
    assert [row.verdict for row in alone.rows] == ["not run"] * 3


def test_long_tables_unfold_and_what_was_not_run_stands_apart():
    parts = Chapter("idp-sgd").show("table-2").parts
    made, left = parts[0].rows, parts[1].table.rows
    assert (
        made
        and all(row.recorded is not None for row in made)
        and all(row.recorded is None for row in left)
    )
    assert len(made) + len(left) == len(published.exhibit("idp-sgd/table-2").flat())
    assert parts[1].line == f"{len(left)} printed numbers of what was not run"
    assert parts[1]._repr_markdown_().startswith("<details")
    assert Chapter("idp-sgd").show("table-7").parts[0].line == "75 numbers, printed and ours"


def test_an_exhibit_is_shown_with_the_numbers_of_its_parts(monkeypatch):
    part = records.make(
        "idp-sgd/table-2-cifar10-a",
        "paper",
        {"cifar10.A.dpsgd": 10.0},
        config={"kinds": []},
        command="the command of the part",
    )
    find = records.find

    def of_the_exhibit_and_one_part(name, *rest):
        if name.startswith("idp-sgd/table-2-"):
            return part if name == part.name and "paper" in rest else None
        return find(name, *rest)

    monkeypatch.setattr(records, "find", of_the_exhibit_and_one_part)
    shown = Chapter("idp-sgd").show("table-2", labels={"cifar10.A.dpsgd": "the part"})
    table = next(each for each in shown.parts if hasattr(each, "rows"))
    assert len(table.rows) == 7, "six numbers of the exhibit's own record, and one of its part"
    row = next(row for row in table.rows if row.label == "the part")
    assert (row.recorded, row.verdict) == (10.0, "differs")
    assert "recorded (stale)" in repr(table), "the part was made by other code"
    said = repr(shown)
    assert (
        "Made by `dpcompanion run idp-sgd/table-2 " in said and "`the command of the part`" in said
    )


def test_an_output_without_parts_is_no_output():
    format = DisplayFormatter().format
    assert format(Shown([])) == ({}, {})
    assert format(Shown(["a", "b"]))[0] == {"text/plain": "a\n\nb", "text/markdown": "a\n\nb"}
    assert format(Chapter("idp-sgd").remains("table-5")) == ({}, {})


def test_an_exhibit_that_was_not_run_shows_the_command_that_remains():
    shown = Chapter("idp-sgd").show("table-13")
    assert "dpcompanion run idp-sgd/table-13" in shown.parts[-1]


def test_the_source_is_that_of_the_code_that_runs(chapter):
    shown = chapter.source("claims-1-2", intrinsic_privacy.canary)
    assert "def claims_1_2(config, run):" in repr(shown) and "def canary(" in repr(shown)
    assert shown._repr_markdown_().count("```python\n") == 2


def test_rows_of_a_table_say_which_run_they_are_of():
    made = table(["", "epsilon"], [("recorded", ["MNIST", 1.5]), ("live", ["digits", 2.5])])
    assert "{.recorded}" in made._repr_markdown_() and "{.live}" in made._repr_markdown_()
    assert len(panels({"recorded": 1, "live": 2})) == 2
    assert repr(Shown(["a", "b"])) == "a\n\nb"


@pytest.mark.parametrize(
    "call", [lambda: Chapter("idp"), lambda: Chapter("idp-sgd").live("table-55")]
)
def test_unknown_papers_and_exhibits_are_refused(call):
    with pytest.raises(ValueError, match="must be one of"):
        call()


BOOK = pathlib.Path(__file__).resolve().parents[2] / "book"
SPLIT = [slug for slug in published.PAPERS if (BOOK / "papers" / f"{slug}-exhibits.md").is_file()]


@pytest.mark.parametrize("slug", SPLIT)
def test_a_page_of_exhibits_has_each_in_the_papers_order_at_the_place_that_the_scoreboard_names(
    slug,
):
    text = (BOOK / "papers" / f"{slug}-exhibits.md").read_text(encoding="utf-8")
    names = [exhibit.id for exhibit in published.exhibits(slug)]
    sections = re.split(rf"^\({slug}-(.+)\)=$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == names
    for id, section in zip(names, sections[1::2]):
        assert section.startswith("\n## "), f"{id}: a heading follows its anchor"
        shows = re.findall(r'exhibits\.show\(\s*"([^"]+)"', section)
        assert shows == [id], f"{id}: one cell shows it, and no other"
    for one in scoreboard.exhibit_statuses(slug):
        assert one.place.page == f"book/papers/{slug}-exhibits"
        assert one.place.anchor == re.sub(r"[^a-z0-9]+", "-", f"{slug}-{one.exhibit.id}")


def test_a_paper_that_is_not_split_has_its_places_in_its_chapter(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "idp-sgd.md").write_text(
        "# A chapter\n\n## Table 2\n\n## Lemmas 3.1 and 3.2\n", encoding="utf-8"
    )
    found = {
        one.exhibit.id: one.place for one in scoreboard.exhibit_statuses("idp-sgd", book=tmp_path)
    }
    assert found["table-2"] == places.Place("book/papers/idp-sgd", "table-2")
    (tmp_path / "papers" / "idp-sgd-exhibits.md").write_text(
        "# Exhibits\n\n(idp-sgd-lemmas-3.1-3.2)=\n## Lemmas\n", encoding="utf-8"
    )
    found = {
        one.exhibit.id: one.place for one in scoreboard.exhibit_statuses("idp-sgd", book=tmp_path)
    }
    assert found["table-2"].page == "book/papers/idp-sgd" and found["table-9"] is None
    assert found["lemmas-3.1-3.2"] == places.Place(
        "book/papers/idp-sgd-exhibits", "idp-sgd-lemmas-3-1-3-2"
    )
