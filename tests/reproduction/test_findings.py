from dpcompanion.reproduction.findings import Finding, Findings

from ..refusals import refused


def test_findings_say_where_by_what_and_with_which_outcome():
    rows = [
        Finding("Forest", "above one half", "98%", True),
        Finding("Adult", "above one half", "2%", False),
        Finding("Iris", "above one half", "51%", "undecided"),
    ]
    found = Findings(rows, kind="live")
    assert found.counts() == {"holds": 1, "fails": 1, "undecided": 1}
    first, *lines = repr(found).splitlines()
    assert first == "above one half: \u2713 1 holds, \u00d7 1 fails, ? 1 undecided", (
        "a criterion is said once"
    )
    assert [line.split() for line in lines] == [
        ["Forest", "98%", "holds"],
        ["Adult", "2%", "fails"],
        ["Iris", "51%", "undecided"],
    ]
    first, *lines, last = filter(None, found._repr_markdown_().splitlines())
    assert first.startswith("<details") and first.endswith("</summary>") and last == "</details>"
    assert (
        'above one half: <span class="holds">\u2713 1 holds</span>, <span class="fails">' in first
    )
    assert lines[2:] == [
        "| Forest | [98%]{.live} | [\u2713 holds]{.holds} |",
        "| Adult | [2%]{.live} | [\u00d7 fails]{.fails} |",
        "| Iris | [51%]{.live} | [? undecided]{.undecided} |",
    ]
    alone = Findings(rows[:1], kind="live")
    assert (
        repr(alone) == "above one half: \u2713 holds (Forest, 98%)"
        and "details" not in alone._repr_markdown_()
    )
    refused("same length", Findings, rows, kind=["live"])
    refused("kind", Findings, rows, kind="guessed")
    refused("outcome", Finding, "Forest", "above one half", "98%", "perhaps")
    refused("kind", Finding, "Forest", "above one half", "98%", True, "mine")


def test_own_results_and_refutations_are_no_claims_of_the_paper():
    rows = [
        Finding("here", "it is so", "1", True, "own"),
        Finding("here", "it is not so", "2", True, "refutes"),
    ]
    found = Findings(rows, kind="recorded")
    assert (found.counts(), found.counts("own"), found.counts("refutes")) == (
        {},
        {"holds": 1},
        {"holds": 1},
    )
    assert "ours: it is so" in repr(found) and "against the paper: it is not so" in repr(found)
