"""A short seeded part of the trial; `make soundness` runs the whole."""

import importlib
import math

import pytest
from scipy import special

from dpcompanion.accounting import compute_epsilon

from . import PIECES, calculator
from .__main__ import note, read, run
from .power import delta_at_zero_from_above, delta_from_below, verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_no_case_of_the_short_part_is_a_violation(name, request):
    if name == "calculator":
        request.getfixturevalue("node")
    piece = importlib.import_module(f"{__package__}.{name}")
    answers = [piece.violations(case) for case in piece.cases(1, PIECES[name][1])]
    assert [line for lines in answers for line in lines or ()] == []


def test_every_tenth_case_of_the_calculator_tries_its_filter_and_the_others_are_what_they_were():
    assert [len(case) for case in calculator.cases(0, 20)] == 2 * ([4] * 9 + [5])
    assert all(0.02 <= case[4] <= 1 for case in calculator.cases(0, 100) if len(case) == 5)
    # The 11th case, as it was before there were filters.
    before = [0.005028263576068687, 132.62981933300534, 3355, 1.3029363005070636e-06]
    assert list(calculator.cases(0, 11))[10] == pytest.approx(before)


@pytest.mark.parametrize("less", [1.0, 0.97])
def test_a_promise_of_the_pages_filter_that_is_too_small_is_told(less, monkeypatch, request):
    request.getfixturevalue("node")
    said = calculator.said_by_the_page

    def lowered(run, expression):
        answer = said(run, expression)
        return {**answer, "promises": [less * epsilon for epsilon in answer["promises"]]}

    monkeypatch.setattr(calculator, "said_by_the_page", lowered)
    assert bool(calculator.filter_violations([0.2, 2.0, 1, 1e-4, 1.0])) == (less < 1)


@pytest.mark.slow
def test_the_oracle_tells_a_bound_that_is_too_small():
    """One percent less epsilon than the library's, and the oracle says so: the trial can fail."""
    for rate, noise, steps in (
        (0.01, 1.0, 1000),
        (0.3, 5.0, 1),
        (1.0, 10.0, 20),
        (1e-4, 0.5, 5000),
    ):
        epsilon = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=1e-6)
        run = [(rate, noise, steps)]
        assert verdict(run, epsilon, 1e-6) == ""
        assert "or more, to remove" in verdict(run, 0.99 * epsilon, 1e-6)


def test_the_oracle_is_a_lower_end_and_close_to_delta():
    """One step, and steps that everybody is in, have closed forms."""

    def one_step(rate, noise, epsilon):
        at = noise**2 * math.log1p(math.expm1(epsilon) / rate) + 0.5
        with_it = (1 - rate) * special.ndtr(-at / noise) + rate * special.ndtr((1 - at) / noise)
        return with_it - math.exp(epsilon) * special.ndtr(-at / noise)

    def gaussian(mu, epsilon):
        return special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
            -mu / 2 - epsilon / mu
        )

    for rate, noise, epsilon in (
        (0.01, 0.8, 1.0),
        (0.5, 2.0, 0.3),
        (1e-4, 0.4, 2.0),
        (1.0, 1.0, 3.0),
    ):
        exact = one_step(rate, noise, epsilon)
        assert (
            0.999 * exact
            < delta_from_below([(rate, noise, 1)], epsilon, True, exact)
            < (1 + 1e-9) * exact
        )
    for noise, steps, epsilon in ((10.0, 20, 1.0), (3.0, 4000, 300.0)):
        exact = gaussian(math.sqrt(steps) / noise, epsilon)
        for remove in (True, False):
            found = delta_from_below([(1.0, noise, steps // 2)] * 2, epsilon, remove, exact)
            assert 0.999 * exact < found < (1 + 1e-9) * exact


def test_the_oracle_does_not_take_rounding_for_a_violation():
    """Close to the largest loss that adding can have, all of a tilted law lies where a transform
    has no digits.
    """
    rate, noise, steps = 0.031433717631103045, 3.8397518285455416, 5
    assert delta_from_below([(rate, noise, steps)], 0.1532, False, 1.6e-11) < 1.6e-11


def test_an_upper_end_at_zero_is_one():
    """Total variation of one step is the rate times that of two Gaussians."""
    for rate, noise in ((0.3, 1.0), (1e-3, 5.0)):
        exact = rate * (2 * special.ndtr(0.5 / noise) - 1)
        assert delta_at_zero_from_above([(rate, noise, 1)]) == pytest.approx(exact)
        assert delta_from_below([(rate, noise, 1)], 0.0, True, exact) == pytest.approx(
            exact, rel=1e-3
        )


def test_a_trial_goes_on_where_it_was_stopped(tmp_path):
    """Done cases are not done again, one that a kill cut off is, and so are violations, in case
    they are mended.
    """
    tried, mended = [], False

    class Piece:
        @staticmethod
        def cases(seed, count):
            return range(100 * seed, 100 * seed + count)

        @staticmethod
        def violations(case):
            tried.append(case)
            if case == 101:
                raise ValueError("not accepted")
            return None if case == 102 else [] if mended or case != 103 else ["too small"]

    path = tmp_path / "piece-1.jsonl"
    run(Piece, 1, 5, path, math.inf)
    said = {case: line["said"] for case, line in read(path).items()}
    assert said == {0: [], 1: ["ValueError: not accepted"], 2: None, 3: ["too small"], 4: []}
    # the last line is cut off
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    assert len(read(path)) == 4
    tried.clear()
    mended = True
    run(Piece, 1, 7, path, math.inf)
    assert tried == [101, 103, 104, 105, 106]
    assert sorted(case for case, line in read(path).items() if line["said"]) == [1]
    run(Piece, 1, 9, path, -math.inf)  # no time left
    assert len(read(path)) == 7


def test_the_table_counts_what_was_done(tmp_path):
    table = tmp_path / "README.md"
    table.write_text("| bits | old |\n| filters | old |\n", encoding="utf-8")
    line = {"seconds": 2.0, "commit": "abc"}
    note(
        "bits",
        3,
        {0: {**line, "said": []}, 1: {**line, "said": None}, 2: {**line, "said": ["wrong"]}},
        table,
    )
    assert table.read_text(encoding="utf-8").startswith("| bits | 300 | 3 | 1 | 1 | 3 | 6 | abc | ")
    assert table.read_text(encoding="utf-8").endswith("\n| filters | old |\n")


@pytest.mark.parametrize(
    "run, epsilon",
    [
        # was once taken for 6e299
        ((0.13244170690541146, 5.7850647828935715, 1), 0.12372611344120354),
        ((0.012738867941571004, 10.320758370525999, 1), 0.008786478675853549),  # and this for 8e-7
    ],
)
def test_what_rounding_leaves_of_a_delta_far_below_it_is_no_lower_end(run, epsilon):
    """Both are about 1e-37 by quadrature, to add: the epsilons lie a hair below the largest
    loss.
    """
    assert delta_from_below([run], epsilon, False, 1e-11) <= 1e-36
