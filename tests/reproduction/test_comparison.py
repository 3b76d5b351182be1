import math
import re

import pytest

from dpcompanion.reproduction import records
from dpcompanion.reproduction.comparison import Table, compare
from dpcompanion.reproduction.findings import Finding, Findings
from dpcompanion.reproduction.records import MeanSD

from ..refusals import refused

TABLE_2 = "idp-sgd/table-2"


def test_the_table_puts_published_recorded_and_live_side_by_side():
    table = compare(
        TABLE_2,
        recorded={"mnist.A.sample": MeanSD(97.7, 0.1, 10)},
        live={"mnist.A.sample": 91.23456},
    )
    assert repr(table) == (
        "                   published      recorded     live    verdict\n"
        "mnist.A.sample    97.81±0.09    97.70±0.10    91.23    matches, -0.11 points"
    )
    assert table._repr_markdown_() == (
        "|   | published | recorded | live | verdict |\n"
        "|:--|--:|--:|--:|:--|\n"
        "| mnist.A.sample | [97.81±0.09]{.published} | [97.70±0.10]{.recorded} | [91.23]{.live} |"
        " [matches]{.matches} -0.11 points |"
    )


def test_a_column_without_a_number_is_left_out_and_none_has_more_than_five():
    table = compare(TABLE_2, live={"mnist.A.sample": 97.8, "mnist.A.scale": 97.0})
    assert "recorded" not in repr(table) and table.counts() == {"matches": 1, "close": 1}
    assert table._repr_markdown_().splitlines()[0].count("|") == 5
    assert compare(live={"a": 1.0})._repr_markdown_().splitlines()[-1] == "| a | [1]{.live} |   |"


def test_a_record_is_judged_first_unless_it_is_stale():
    arguments = {"recorded": {"mnist.A.sample": 97.8}, "live": {"mnist.A.sample": 90.0}}
    assert compare(TABLE_2, **arguments).counts() == {"matches": 1}
    stale = compare(TABLE_2, stale=True, **arguments)
    assert stale.counts() == {"differs": 1} and "recorded (stale)" in repr(stale)
    record = records.make(TABLE_2, "paper", {"mnist.A.sample": 97.8}, config={})
    assert compare(TABLE_2, recorded=record).counts() == {"matches": 1}


def test_lists_become_one_row_for_each_entry():
    table = compare(
        "idp-sgd/table-7",
        live={"svhn.A.c_p": [0.5613, 0.9701, 1.2699], "svhn.A.sigma_scale": 1.712},
        verdicts={"svhn.A.sigma_scale": "wrong in the paper"},
        labels={"svhn.A.c_p": "c"},
    )
    assert [row.label for row in table.rows] == ["svhn.A.sigma_scale", "c[1]", "c[2]", "c[3]"]
    assert table.counts() == {"matches": 3, "wrong in the paper": 1}
    assert "wrong in the paper, -9.7%" in repr(table)
    assert "[wrong in the paper]{.wrong-in-the-paper} -9.7%" in table._repr_markdown_()
    refused("length", compare, "idp-sgd/table-7", live={"svhn.A.c_p": [0.5, 0.9]})
    refused("length", compare, "idp-sgd/table-7", live={"svhn.A.c_p": 0.5})


def test_rows_keep_the_papers_order_and_unknown_names_are_refused():
    table = compare(
        "idp-sgd/table-5", live={"extra": 12345.678, "svhn.sigma": 2.746, "mnist.sigma": 3.4247}
    )
    assert [row.label for row in table.rows] == ["mnist.sigma", "svhn.sigma", "extra"]
    assert repr(table).splitlines()[-1].split() == ["extra", "1.235e+04"]
    assert compare("idp-sgd/table-5", keys=["mnist.sigma"]).counts() == {"not run": 1}
    # A setting has no verdict, whatever stands beside it.
    for live in ({}, {"mnist.clip": 0.2}, {"mnist.clip": 7.0}):
        assert compare("idp-sgd/table-5", live=live, keys=["mnist.clip"]).rows[0].verdict == ""
    refused("keys", compare, "idp-sgd/table-5", keys=["mnist.tau"])
    refused(
        "verdicts",
        compare,
        "idp-sgd/table-5",
        live={"mnist.sigma": 1},
        verdicts={"mnist.sigma": "fine"},
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, True, None, "text"])
def test_odd_values_are_shown_and_never_called_a_match(value):
    table = compare("idp-sgd/table-5", live={"mnist.sigma": value})
    assert "matches" not in repr(table) and "matches" not in table._repr_markdown_()


def test_small_and_large_prints_keep_their_digits():
    shown = repr(
        compare("intrinsic-privacy/table-3", live={"adult.delta": 3.4123e-5, "adult.eps_i": 6.9521})
    )
    assert "3.412e-05    matches" in shown and "6.95    matches" in shown
    assert "9440    differs, +0.69%" in repr(
        compare("idp-sgd/table-5", live={"mnist.iterations": 9440})
    )


def test_a_table_shows_each_column_as_the_kind_that_it_is():
    table = Table(
        ["what", "paper", "here"],
        [["a", "0.1", 0.123456], ["b", "", 2]],
        kinds=["published", "live"],
    )
    assert repr(table).splitlines() == [
        "what    paper      here",
        "a         0.1    0.1235",
        "b                     2",
    ]
    assert "| a | [0.1]{.published} | [0.1235]{.live} |" in table._repr_markdown_()
    assert "| b |   | [2]{.live} |" in table._repr_markdown_()


def test_a_row_can_say_what_its_numbers_are():
    table = Table(
        ["what", "paper", "ours"],
        [["a", "1", 2], ["b", "3", 4]],
        kinds=["published", "row"],
        row_kinds=["recorded", "live"],
    )
    assert table._repr_markdown_().splitlines()[2:] == [
        "| a | [1]{.published} | [2]{.recorded} |",
        "| b | [3]{.published} | [4]{.live} |",
    ]
    refused("row_kinds", Table, ["what", "ours"], [["a", 1]], kinds=["row"])


def test_a_table_that_does_not_fit_is_refused():
    for heads, rows, kinds in ((["a", "b"], [["x"]], ["live"]), (["a", "b"], [], [])):
        refused("same length", Table, heads, rows, kinds=kinds)
    refused("kinds", Table, ["a", "b"], [], kinds=["dead"])


def test_numbers_that_are_proved_wrong_are_called_so_without_being_asked_for():
    live = {"mnist.A.sigma_scale": 2.0629, "mnist.A.sigma_p": [3.425, 1.92, 1.424]}
    rows = {row.label: row.verdict for row in compare("idp-sgd/table-7", live=live).rows}
    assert (
        rows["mnist.A.sigma_scale"] == "matches"
        and rows["mnist.A.sigma_p[1]"] == "wrong in the paper"
    )


def test_numbers_of_a_stand_in_stand_beside_the_print_and_are_not_held_against_it():
    table = compare(
        "idp-sgd/table-5",
        recorded={"mnist.sigma": 3.42529, "own": 1.0},
        stand_in=True,
        keys=["mnist.sigma", "svhn.sigma", "own"],
    )
    assert table.counts() == {"stand-in": 1, "not run": 1} and "%" not in repr(table)


def test_an_exhibit_says_how_near_is_close():
    exhibit = "idp-sgd/table-5"  # where two readings of the setting lie 0.3% apart
    assert [
        compare(exhibit, live={"mnist.sigma": sigma}).rows[0].verdict
        for sigma in (3.4255, 3.4245, 3.415)
    ] == ["close", "close", "differs"]
    assert compare("idp-sgd/table-9", live={"sample": 97.3}).rows[0].verdict == "close", (
        "points have no share"
    )


def test_accuracies_that_are_printed_as_fractions_are_judged_by_points():
    key = "noiseless_accuracy.mnist-binary-unscaled"
    (row,) = compare("intrinsic-privacy/table-4", recorded={key: 0.882}).rows
    assert (row.verdict, row.deviation) == ("differs", "-4.50 points")
    (row,) = compare(
        "intrinsic-privacy/table-4", recorded={"theory.percent_of_gap.forest": 11.0}
    ).rows
    assert (row.verdict, row.deviation) == ("close", "+9.2%")


def test_text_from_records_stays_text():
    tag = "<script>alert(1)</script>|![x](http://x)"
    record = records.make("idp-sgd/table-5", "paper", {tag: 1.0, "name": tag}, config={})
    shown = [
        compare("idp-sgd/table-5", recorded=record),
        Table([tag, tag], [[tag, tag]], kinds=["live"]),
        Findings([Finding(tag, tag, tag, True)] * 2, kind="recorded"),
    ]
    lines = [shown[-1], Findings([Finding(tag, tag, tag, True)], kind=["live"])]
    assert not any(
        mark in text._repr_markdown_() for text in lines for mark in ("<script", "</script", "](")
    )
    for table in (*shown[:-1], shown[-1]._table({"recorded": shown[-1].rows}, str)):
        rendered = table._repr_markdown_()
        assert "<script" not in rendered and "</script" not in rendered and "](" not in rendered
        assert "&lt;script>alert(1)&lt;/script>\\|![x]\\(http://x)" in rendered
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rendered.splitlines()}) == 1
        assert tag in repr(table)
