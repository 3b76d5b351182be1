"""What a chapter of the book calls."""

import pytest

from dpcompanion.reproduction import experiments
from dpcompanion.reproduction.chapters import Chapter, panels, Shown, table
from dpcompanion.reproduction.papers import intrinsic_privacy


@pytest.fixture(scope="module")
def chapter():
    return Chapter("intrinsic-privacy")


def test_an_exhibit_is_computed_once_however_often_it_is_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(experiments, "run", lambda name: calls.append(name) or object())
    chapter = Chapter("idp-sgd")
    assert chapter.live("table-5") is chapter.live("idp-sgd/table-5") and calls == ["idp-sgd/table-5"]


def test_recorded_and_live_stand_under_their_kinds(chapter):
    found = chapter.both("claims-1-2")
    assert list(found) == ["recorded", "live"] and found["recorded"].preset == "paper"
    assert found["live"] is chapter.live("claims-1-2") and found["live"].preset == experiments.default_preset()
    quick_only = Chapter("per-instance-accounting")
    assert quick_only.recorded("figure-7") is None
    assert chapter.printed("table-3").name == "intrinsic-privacy/table-3"


def test_findings_of_both_runs_are_one_table_that_says_which_is_which(chapter):
    both = chapter.findings(chapter.both("claims-1-2"))
    assert [row.outcome for row in both.rows] == ["holds", "holds"] and both.counts() == {"holds": 2}
    assert "random orders (recorded)" in repr(both) and "random orders (live)" in repr(both)
    assert "{.recorded}" in both._repr_markdown_() and "{.live}" in both._repr_markdown_()
    assert repr(both).count("simulated mean") == 1, "a criterion is said once"
    alone = chapter.findings(chapter.live("claims-1-2"))
    assert repr(alone) == repr(experiments.findings(chapter.live("claims-1-2")))
    assert chapter.findings(None) is None and chapter.findings(chapter.recorded("figure-1"), "table-1") is None


def test_a_comparison_has_all_that_is_printed_and_says_when_the_record_is_stale(monkeypatch):
    chapter = Chapter("idp-sgd")
    record = chapter.recorded("table-5")
    made = chapter.compare("table-5", recorded=record, labels=lambda keys: dict.fromkeys(keys, "a row"))
    assert len(made.rows) == len(chapter.printed("table-5").flat()) and {row.label for row in made.rows} == {"a row"}
    assert "stale" not in repr(made)
    monkeypatch.setattr(experiments.Experiment, "is_stale", lambda self, record: True)
    assert "recorded (stale)" in repr(chapter.compare("table-5", recorded=record))


def test_an_exhibit_is_shown_with_its_verdicts_and_what_remains_in_one_output():
    chapter = Chapter("individual-accounting")
    shown = chapter.show("table-3")
    comparison, verdicts, findings, remains = shown.parts
    assert len(comparison.rows) == len(chapter.printed("table-3").flat())
    assert "paper record of a stand-in" in verdicts and verdicts.endswith("not run.")
    assert "individual clipping costs" in repr(findings)
    assert "cifar10" in remains
    assert "`dpcompanion run individual-accounting/table-3 --preset paper --device cuda`" in remains
    text = shown._repr_markdown_()
    assert text.count("\n\n") == 3 and "| " in text and "`dpcompanion run" in text and remains in repr(shown)


def test_what_nobody_has_run_is_shown_by_what_remains():
    shown = Chapter("idp-sgd").show("table-10")
    assert "table-10 --preset paper --device cuda" in shown.parts[-1]


def test_the_source_is_that_of_the_code_that_runs(chapter):
    shown = chapter.source("claims-1-2", intrinsic_privacy.canary)
    assert "def claims_1_2(config, run):" in repr(shown) and "def canary(" in repr(shown)
    assert shown._repr_markdown_().count("```python\n") == 2


def test_rows_of_a_table_say_which_run_they_are_of():
    made = table(["", "epsilon"], [("recorded", ["MNIST", 1.5]), ("live", ["digits", 2.5])])
    assert "{.recorded}" in made._repr_markdown_() and "{.live}" in made._repr_markdown_()
    assert len(panels({"recorded": 1, "live": 2})) == 2
    assert repr(Shown(["a", "b"])) == "a\n\nb"


@pytest.mark.parametrize("call", [lambda: Chapter("idp"), lambda: Chapter("idp-sgd").live("table-55")])
def test_unknown_papers_and_exhibits_are_refused(call):
    with pytest.raises(ValueError, match="must be one of"):
        call()
