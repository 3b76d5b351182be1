"""Intervals against SciPy, brute force and simulated truth; outcomes by the side on which they
lie.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.intervals import Interval
from dpcompanion.reproduction.records import mean_and_sd

from ..refusals import refused, refuses


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_an_outcome_is_decided_where_the_whole_interval_lies_on_one_side(a, b, limit):
    low, high = sorted((a, b))
    found = Interval((low + high) / 2, low, high)
    inside = low < limit < high
    for outcome in (
        found.above(limit),
        found.at_least(limit),
        found.below(limit),
        found.at_most(limit),
    ):
        assert outcome in intervals.OUTCOMES and (outcome == "undecided") >= inside
    if low > limit:
        assert (
            found.above(limit),
            found.at_least(limit),
            found.below(limit),
            found.at_most(limit),
        ) == ("holds", "holds", "fails", "fails")
    # Opposite criteria are never both true, and never both false.
    for one, other in (
        (found.above(limit), found.at_most(limit)),
        (found.at_least(limit), found.below(limit)),
    ):
        assert {one, other} in ({"holds", "fails"}, {"undecided"})


def test_what_has_no_interval_decides_nothing():
    for nothing in (
        intervals.unknown(3.0),
        intervals.unknown(math.nan),
        intervals.mean([3.0]),
        intervals.difference([3.0], [2.0]),
        intervals.unpaired((3.0, math.nan, 1), (2.0, 0.1, 5)),
        intervals.rank_correlation(0.9, 3),
        intervals.rank_correlation(math.nan, 10),
        intervals.pearson([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]),
    ):
        assert {nothing.above(0), nothing.below(0), nothing.at_least(0), nothing.at_most(0)} == {
            "undecided"
        }
        assert "no interval" in f"{nothing:.2f}"


def test_a_known_end_is_enough_for_one_side():
    shown = Interval(2.0, 2.0, math.inf)
    assert (shown.at_most(1.0), shown.at_most(3.0), shown.above(1.0)) == (
        "fails",
        "undecided",
        "holds",
    )


def test_parts_of_a_criterion_must_all_hold():
    assert intervals.every() == "holds"
    assert intervals.every("undecided", "fails", True) == "fails"
    refused("outcome", intervals.every, 1)


def test_a_mean_of_distances_from_one_run_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    runs, one = rng.normal(size=(4000, 6)), rng.normal(size=(4000, 1))
    found = [intervals.mean(row, beside=1) for row in runs - one]
    covered = sum(each.low <= 0 <= each.high for each in found)
    assert stats.binomtest(covered, len(found), 0.95).pvalue > 1e-6
    apart = [intervals.mean(row) for row in runs - one]
    assert sum(each.low <= 0 <= each.high for each in apart) < 0.75 * len(apart)


def test_means_and_differences_are_those_of_student_and_welch():
    first, second = np.array([3.1, 2.9, 3.4, 3.3]), np.array([2.0, 2.4, 2.2, 2.1])
    for found, test in (
        (intervals.mean(first), stats.ttest_1samp(first, 0)),
        (intervals.difference(first, second), stats.ttest_rel(first, second)),
        (
            intervals.unpaired(mean_and_sd(first), mean_and_sd(second[:3])),
            stats.ttest_ind(first, second[:3], equal_var=False),
        ),
    ):
        assert (found.low, found.high) == pytest.approx(
            tuple(test.confidence_interval(0.95)), rel=1e-9
        )
    wider = intervals.mean(first, confidence=0.99)
    assert wider.low < intervals.mean(first).low


@pytest.mark.parametrize("count, n", [(0, 10), (3, 10), (10, 10), (91, 100), (1, 1)])
def test_a_share_has_the_exact_interval(count, n):
    exact = stats.binomtest(count, n).proportion_ci(0.95, method="exact")
    found = intervals.share(count, n)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-12)


@pytest.mark.parametrize("n, q", [(10, 0.5), (40, 0.5), (200, 0.1), (5, 0.9)])
def test_a_quantile_lies_between_its_ranks_as_often_as_it_says(n, q):
    found = intervals.quantile(np.arange(n), q)
    low, high = (
        -1 if end == -math.inf else n if end == math.inf else int(end)
        for end in (found.low, found.high)
    )
    # Brute force: the quantile lies between order statistics `low` and `high` iff so many of n
    # values lie below it.
    covered = sum(stats.binom.pmf(below, n, q) for below in range(n + 1) if low < below <= high)
    assert covered >= 0.95
    if low >= 0:
        assert stats.binom.cdf(low + 1, n, q) > 0.025, "no tighter end would do"


def coverage(draw, truth, trials=400):
    random, hits = np.random.RandomState(0), 0
    for _ in range(trials):
        found = draw(random)
        hits += found.low <= truth <= found.high
    return hits / trials


def test_intervals_cover_the_truth_as_often_as_they_say():
    assert coverage(lambda r: intervals.mean(r.normal(1, 2, 3)), 1) == pytest.approx(0.95, abs=0.03)
    assert coverage(
        lambda r: intervals.unpaired(
            mean_and_sd(r.normal(1, 2, 4)), mean_and_sd(r.normal(0, 1, 5))
        ),
        1,
    ) == pytest.approx(0.95, abs=0.03)
    assert coverage(lambda r: intervals.share(r.binomial(50, 0.9), 50), 0.9) >= 0.93
    assert coverage(lambda r: intervals.quantile(r.exponential(size=60), 0.5), math.log(2)) >= 0.93
    skewed = coverage(
        lambda r: intervals.bootstrap(lambda x: x.mean(-1), r.exponential(size=100), resamples=400),
        1,
    )
    assert skewed == pytest.approx(0.95, abs=0.05)


def test_the_interval_of_a_rank_correlation_of_ten_groups_covers_it():
    rho = 0.8  # of normal pairs; Spearman's is 6 / pi asin(rho / 2)

    def draw(random):
        x = random.normal(size=10)
        y = rho * x + math.sqrt(1 - rho**2) * random.normal(size=10)
        return intervals.rank_correlation(stats.spearmanr(x, y).statistic, 10)

    assert coverage(draw, 6 / math.pi * math.asin(rho / 2)) == pytest.approx(0.95, abs=0.03)


@pytest.mark.slow
def test_pearson_over_examples_covers_it_and_is_the_same_every_time():
    def draw(random):
        x = random.normal(size=150)
        return intervals.pearson(x, 0.9 * x + math.sqrt(1 - 0.81) * random.normal(size=150))

    assert coverage(draw, 0.9, trials=100) == pytest.approx(0.95, abs=0.06)
    random = np.random.RandomState(1)
    x, y = random.normal(size=(2, 50))
    assert intervals.pearson(x, y) == intervals.pearson(x, y)
    assert intervals.pearson(x, y).estimate == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_perfect_agreement_of_few_groups_is_no_proof_of_it():
    assert intervals.rank_correlation(1.0, 10).at_least(0.95) == "holds"
    assert intervals.rank_correlation(1.0, 4).at_least(0.5) == "undecided"
    assert intervals.rank_correlation(-1.0, 10).high > -1


def test_rank_correlations_of_ten_classes_are_undecided():
    # What one experiment gave under several roundings, against the criterion 0.5.
    for r in (0.09, 0.11, 0.35, 0.44, 0.61, 0.62, 0.79):
        assert intervals.rank_correlation(r, 10).at_least(0.5) == "undecided"


def test_rounding_does_not_move_an_interval():
    random = np.random.RandomState(0)
    x = random.exponential(size=200)
    again = x * (1 + 1e-12 * random.normal(size=200))
    for make in (
        intervals.mean,
        lambda v: intervals.quantile(v, 0.5),
        lambda v: intervals.pearson(v, np.log(v)),
        lambda v: intervals.bootstrap(lambda s: s.mean(-1), v),
    ):
        one, other = make(x), make(again)
        assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-9)


def test_differences_and_ratios_of_intervals_are_no_narrower_than_both_allow():
    one, other = Interval(3.0, 2.0, 4.0), Interval(1.0, 0.5, 1.5)
    assert one - other == Interval(2.0, 0.5, 3.5) and one / other == Interval(3.0, 4 / 3, 8.0)
    assert (one / Interval(0.0, 0.0, 1.0)).high == math.inf


def test_bad_arguments_are_refused_by_name():
    refuses(intervals.mean, {"values": [1.0, 2.0]}, values=[[], [[1.0]]], confidence=[1.0])
    refuses(intervals.share, {"count": 1, "n": 10}, count=[11, 1.5])
    refuses(intervals.share, {"count": 0}, n=[0])
    refuses(intervals.quantile, {"values": [1.0]}, q=[1.0])
    refuses(intervals.rank_correlation, {"n": 10}, r=[1.5])
    for call in (intervals.difference, lambda *values: intervals.bootstrap(np.mean, *values)):
        refused("same length", call, [1.0], [1.0, 2.0])
