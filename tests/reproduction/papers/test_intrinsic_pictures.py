"""What the pages on intrinsic privacy draw and tabulate, against the records and the verdicts."""

import matplotlib
import pytest

from dpcompanion.reproduction import experiments
from dpcompanion.reproduction.papers.intrinsic_privacy import pictures

PAPER = "intrinsic-privacy"


def recorded(exhibit):
    return {"recorded": experiments.get(f"{PAPER}/{exhibit}").record("paper")}


@pytest.fixture(autouse=True)
def off_screen(monkeypatch):
    matplotlib.use("agg")


def test_a_claim_is_called_refuted_where_its_finding_fails():
    found = recorded("algorithm-1")
    cells = [row for _, row in pictures.claim_rows(found)]
    judged = experiments.findings(found["recorded"], f"{PAPER}/algorithm-1")
    for column, words in ((1, "theorem 2's sensitivity, for"), (2, "empirical sensitivity")):
        fails = [row.outcome == "fails" for row in judged.rows if words in row.criterion]
        shown = ["refuted" in row[column] for row in cells if row[column] != "no theorem"]
        assert fails and sorted(shown) == sorted(fails)


def test_rows_name_every_task_and_start_once_and_say_which_run_they_are_of():
    found = {"recorded": recorded("algorithm-1")["recorded"]}
    both = {**found, "live": found["recorded"]}
    for rows in (
        pictures.claim_rows(both),
        pictures.tail_rows(both),
        pictures.mu_rows(both, "natural"),
        pictures.mu_rows(both, "canary"),
    ):
        names = [cells[0] for _, cells in rows]
        assert len(set(names)) == len(names) == 2 * 2 * len(found["recorded"].config["tasks"])
        assert all(
            name.endswith("(live)") == (kind == "live") for (kind, _), name in zip(rows, names)
        )
        assert len({len(cells) for _, cells in rows}) == 1


def test_noise_that_the_covariance_finds_too_little_is_less_than_what_is_needed():
    for _, (_, _, empirical, achieved, needed) in pictures.noise_rows(recorded("algorithm-2"), 1.0):
        short = float(achieved.partition(" / ")[0]) > 1
        assert short == (float(empirical) < float(needed))


@pytest.mark.parametrize(
    "draw, exhibit",
    [
        (pictures.answer, "algorithm-1"),
        (pictures.paths, "figure-1"),
        (lambda found: pictures.distances(found, [("recorded", "adult")]), "figure-2"),
        (lambda found: pictures.normality(found["recorded"]), "figure-3"),
        (lambda found: pictures.spectra(found["recorded"], ["adult"]), "algorithm-1"),
        (lambda found: pictures.needed(found["recorded"]), "algorithm-2"),
    ],
)
def test_a_figure_gives_the_digest_of_what_it_draws(draw, exhibit):
    import matplotlib.pyplot as plt

    lines = draw(recorded(exhibit)).splitlines()
    assert lines and all("nan" not in line and "values" in line for line in lines)
    plt.close("all")
