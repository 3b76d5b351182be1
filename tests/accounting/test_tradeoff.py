import math

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as google_pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from dpcompanion.accounting import (
    best_true_positive_rate,
    compute_delta,
    compute_epsilon,
    pld,
    trade_off,
)
from dpcompanion.accounting.tradeoff import TOLERANCE, log_deltas_of
from dpcompanion.attacks import clopper_pearson

from ..refusals import refuses

RATES = torch.cat(
    (
        torch.logspace(-9, -2, 29, dtype=torch.float64),
        torch.linspace(0.02, 0.98, 25, dtype=torch.float64),
    )
)
REFERENCE = dict(sample_rate=512 / 60_000, noise_multiplier=3.42529, steps=9375)
RUNS = [
    REFERENCE,
    dict(sample_rate=0.01, noise_multiplier=1.0, steps=1000),
    dict(sample_rate=1e-4, noise_multiplier=0.5, steps=100),
    dict(sample_rate=0.2, noise_multiplier=2.0, steps=50),
]
log_uniform = dict(rate=st.floats(-4, -0.05), noise=st.floats(-0.5, 2), log_steps=st.floats(0, 4))


def run_of(rate, noise, log_steps):
    return dict(sample_rate=10**rate, noise_multiplier=10**noise, steps=round(10**log_steps))


def gaussian(rates, mu):
    """G_mu of Dong et al. 2022."""
    return torch.from_numpy(special.ndtr(-special.ndtri(rates.numpy()) - mu))


def envelope(rates, epsilons, deltas):
    """The upper envelope of the lines of these epsilons."""
    x, grows = rates[:, None], torch.exp(epsilons)
    return torch.maximum(1 - deltas - grows * x, (1 - deltas - x) / grows).amax(1).clamp(min=0)


def check_bound(found, exact, tolerance=TOLERANCE):
    """A lower bound on false negative rates whose true positive rates are hardly above the exact
    ones.
    """
    assert bool((found <= exact + 1e-12).all())
    assert bool((1 - found <= (1 - exact) * (1 + tolerance) + 1e-11).all())


@given(mu=st.floats(0.01, 12))
@settings(max_examples=5, deadline=None)
def test_without_sampling_it_is_the_gaussian_curve(mu):
    found = trade_off(sample_rate=1.0, noise_multiplier=2 / mu, steps=4, false_positive_rate=RATES)
    check_bound(found, gaussian(RATES, mu), 1e-9)
    tpr = best_true_positive_rate(
        sample_rate=1.0, noise_multiplier=2 / mu, steps=4, false_positive_rate=RATES
    )
    exact = torch.from_numpy(special.ndtr(special.ndtri(RATES.numpy()) + mu))
    assert bool((tpr >= exact * (1 - 1e-15)).all()) and bool((tpr <= exact * (1 + 1e-9)).all())


@pytest.mark.parametrize("rate", [1e-300, 1e-30, 1e-20, 1e-10, 1e-6, 0.1])
def test_far_tails_of_the_gaussian_curve_are_bounded_too(rate):
    smallest = mpmath.mpf(5e-324)  # below it a float is 0
    for mu in (0.1, 1.0, 7.5, 33.3, 70.7):
        with mpmath.workdps(60):
            z = mpmath.findroot(
                lambda z: mpmath.log(mpmath.ncdf(z) / rate), -mpmath.sqrt(-2 * mpmath.log(rate))
            )
            found, missed = mpmath.ncdf(z + mu), mpmath.ncdf(-z - mu)
        run = dict(sample_rate=1.0, noise_multiplier=1 / mu, steps=1, false_positive_rate=rate)
        assert found <= best_true_positive_rate(**run) <= found * (1 + 1e-11)
        assert missed * (1 - 1e-11) - smallest <= trade_off(**run) <= missed


def test_the_promise_holds_from_1e_minus_15_on_and_below_there_is_a_bound_still():
    rates = torch.logspace(-30, -9, 22, dtype=torch.float64)
    tpr = best_true_positive_rate(
        sample_rate=1 - 1e-12, noise_multiplier=3.0, steps=60, false_positive_rate=rates
    )
    exact = torch.from_numpy(special.ndtr(special.ndtri(rates.numpy()) + math.sqrt(60) / 3))
    assert bool((tpr >= exact * (1 - 1e-9)).all())
    assert bool((tpr <= exact * (1 + TOLERANCE))[rates > 0.9e-15].all())
    assert bool((tpr > exact * (1 + TOLERANCE)).any())  # so the promise says where it holds


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-320, 1e-300, 1e-100, 1e-60, 1e-40])
def test_losses_beyond_float32_do_not_under_rate_the_attacker(rate):
    """e^epsilon was kept below the largest number of float32: at a rate of 1e-60 the best rate of
    hits was 1e-19.
    """
    run = dict(sample_rate=0.5, noise_multiplier=0.05, steps=1, false_positive_rate=rate)
    with mpmath.workdps(60):
        z = -mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(rate)))
        z = mpmath.findroot(lambda z: mpmath.log(mpmath.ncdf(z) / rate), z)
        exact = mpmath.ncdf(20 + z) / 2
    assert best_true_positive_rate(**run) >= exact
    if rate >= 1e-60:
        assert best_true_positive_rate(**run) <= exact * (1 + TOLERANCE)
    assert trade_off(**run) <= 1 - exact


def test_a_run_that_no_grid_resolves_shows_who_was_drawn():
    run = dict(sample_rate=4.84e-6, noise_multiplier=0.154, steps=386155490532)
    with pytest.raises(pld.NoGrid):
        pld.compose(**run, delta=1e-2)
    assert trade_off(**run, false_positive_rate=[1e-6, 0.5]).tolist() == [0.0, 0.0]
    assert best_true_positive_rate(**run, false_positive_rate=1e-6) == 1


@pytest.mark.parametrize("rates", [0.0, 1.0, [0.0, 1.0]])
def test_the_ends_alone_are_answered(rates):
    run = dict(sample_rate=0.01, noise_multiplier=1.0, steps=100, false_positive_rate=rates)
    best, least = np.asarray(best_true_positive_rate(**run)), np.asarray(trade_off(**run))
    assert (best >= rates).all() and best.max() <= 1
    np.testing.assert_allclose(least, 1 - best, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise_multiplier, steps", [(0.5, 1), (4.0, 16), (1.0, 30), (100.0, 1000)])
def test_composed_losses_meet_the_gaussian_curve(noise_multiplier, steps):
    # A rate this near 1 is composed, and costs no more than a rate of 1.
    found = trade_off(
        sample_rate=1 - 1e-9,
        noise_multiplier=noise_multiplier,
        steps=steps,
        false_positive_rate=RATES,
    )
    check_bound(found, gaussian(RATES, math.sqrt(steps) / noise_multiplier))


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier",
    [
        (0.1, 1.0),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in ((1e-3, 0.4), (0.99, 20.0), (0.5, 3.0))
        ),
    ],
)
def test_a_single_sampled_step_meets_its_closed_form(sample_rate, noise_multiplier):
    # Dong et al. 2022, section 4: where q G_mu + (1 - q) Id meets its inverse, a segment joins the
    # two.
    turn = float(torch.special.ndtr(torch.tensor(-0.5 / noise_multiplier, dtype=torch.float64)))
    rates = torch.logspace(-9, math.log10(turn), 40, dtype=torch.float64)
    exact = sample_rate * gaussian(rates, 1 / noise_multiplier) + (1 - sample_rate) * (1 - rates)
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=1)
    check_bound(trade_off(**run, false_positive_rate=rates), exact)
    # And it is its own inverse.
    check_bound(trade_off(**run, false_positive_rate=exact), rates)


def test_false_negative_rates_are_not_overstated_at_false_positive_rates_near_1():
    """Next to 1 a rate has more digits than 1 less a delta: the rate of misses was said to be 3%
    too large.
    """
    sample_rate, mu = 0.9, 1.0
    least = [k * 2.0**-53 for k in range(2, 40)]  # 1 less the rate
    found = trade_off(
        sample_rate=sample_rate,
        noise_multiplier=1 / mu,
        steps=1,
        false_positive_rate=[1 - rest for rest in least],
    )
    for rest, missed in zip(least, found.tolist()):
        with mpmath.workdps(40):
            kept = lambda z: sample_rate * mpmath.ncdf(z + mu) + (1 - sample_rate) * mpmath.ncdf(z)  # noqa: E731, B023
            z = mpmath.findroot(lambda z: mpmath.log(kept(z) / rest), -9)  # noqa: B023
            assert missed <= mpmath.ncdf(z)


@pytest.mark.parametrize("run", [REFERENCE, dict(sample_rate=0.2, noise_multiplier=2.0, steps=10)])
def test_it_lies_below_the_optimistic_curve_of_dp_accounting_and_near_it(run):
    epsilons = torch.cat((torch.zeros(1), torch.logspace(-5, 1, 1000))).double()
    loss = google_pld.from_gaussian_mechanism(
        run["noise_multiplier"],
        sampling_prob=run["sample_rate"],
        pessimistic_estimate=False,
        value_discretization_interval=1e-4,
    )
    # Half a cell a step is what rounding down to its grid may lose, so few steps do.
    steps = min(run["steps"], 10)
    deltas = torch.as_tensor(
        loss.self_compose(steps).get_delta_for_epsilon(epsilons.tolist()), dtype=torch.float64
    )
    rates = RATES[RATES > 1e-6]
    found = trade_off(**{**run, "steps": steps}, false_positive_rate=rates)
    optimistic = envelope(rates, epsilons, deltas)
    # The envelope of a thousand lines lies below the whole curve by less than 1e-6.
    assert bool((found <= optimistic + 1e-6).all())
    assert bool((1 - found <= (1 - optimistic) * (1 + TOLERANCE) + 2e-3).all())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.slow
def test_no_line_of_compute_delta_is_missed(run):
    found = trade_off(**run, false_positive_rate=RATES)
    epsilons = torch.cat((torch.zeros(1), torch.logspace(-2, 1, 4))).double()
    check_bound(
        found,
        torch.maximum(found, envelope(RATES, epsilons, compute_delta(**run, epsilon=epsilons))),
    )


@pytest.mark.parametrize("direction", pld.DIRECTIONS)
@pytest.mark.parametrize("run", RUNS[1:])
def test_many_deltas_at_once_are_those_of_one_at_a_time_and_never_below(run, direction):
    loss = pld.compose(**run, delta=1e-5, direction=direction)
    epsilons = torch.cat((torch.zeros(1), torch.logspace(-4, 1.3, 40))).double()
    found = torch.exp(log_deltas_of(loss, epsilons))
    single = torch.tensor(
        [loss.delta(epsilon) for epsilon in epsilons.tolist()], dtype=torch.float64
    )
    assert bool((found >= single * (1 - 1e-12)).all()) and bool(
        (found <= single * (1 + 1e-6)).all()
    )


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, steps",
    [(0.5, 1e6, 10), (0.3, 0.02, 500)]
    + [pytest.param(*run, marks=pytest.mark.slow) for run in ((1e-7, 0.1, 1), (0.999, 0.011, 2))],
)
def test_the_corners_of_the_range_are_curves(sample_rate, noise_multiplier, steps):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    found = trade_off(**run, false_positive_rate=[0.0, 1e-4, 1e-3, 0.5, 1.0])
    assert (
        bool(found.isfinite().all())
        and bool((found.diff() <= 0).all())
        and 0 <= found[4]
        and found[0] <= 1
    )
    if noise_multiplier == 1e6 or sample_rate == 1e-7:  # next to nothing can be told
        assert found.tolist() == pytest.approx([1, 1, 0.999, 0.5, 0], abs=2e-4)


@pytest.mark.slow
def test_with_almost_no_noise_every_sampled_example_is_identified():
    run = dict(
        sample_rate=0.9, noise_multiplier=0.011, steps=1, false_positive_rate=[1e-6, 0.05, 0.5]
    )
    # One tenth was not drawn; a segment joins the attack that never accuses wrongly to the one that
    # never acquits so.
    assert trade_off(**run).tolist() == pytest.approx([0.1 - 1e-6, 0.05, 0], abs=1e-4)


def test_the_best_attack_there_is_comes_near_the_curve_and_not_below():
    # The likelihood ratio of a run, which by Neyman and Pearson no test beats, in a hundred
    # thousand runs of each kind.
    q, sigma, steps, trials = 0.1, 0.8, 20, 100_000
    rng = np.random.default_rng(0)
    without = rng.normal(scale=sigma, size=(trials, steps))
    with_it = rng.normal(scale=sigma, size=(trials, steps)) + (rng.random((trials, steps)) < q)
    ratios = [
        np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))).sum(1) for x in (without, with_it)
    ]
    for rate in (0.001, 0.01, 0.1):
        threshold = np.quantile(ratios[0], 1 - rate, method="higher")
        hits = int((ratios[1] > threshold).sum())
        # The threshold's own rate, at most: half of the error is spent on it.
        high_rate = float(
            clopper_pearson(int((ratios[0] > threshold).sum()), trials, confidence=0.9999)[1]
        )
        low, high = (float(x) for x in clopper_pearson(hits, trials, confidence=0.9999))
        bound = best_true_positive_rate(
            sample_rate=q, noise_multiplier=sigma, steps=steps, false_positive_rate=high_rate
        )
        assert low <= bound <= 1.1 * high + 0.02


@pytest.mark.parametrize(
    "run",
    [
        dict(sample_rate=0.2, noise_multiplier=2.0, steps=10),
        *(
            pytest.param(run_of(*numbers), marks=pytest.mark.slow)
            for numbers in ((-3, -0.2, 3.5), (-1, 0.5, 2), (-0.1, 1, 2), (-4, -0.3, 0))
        ),
    ],
)
def test_the_curve_is_convex_falls_and_is_its_own_inverse(run):
    found = trade_off(**run, false_positive_rate=RATES)
    assert bool((found.diff() <= 0).all()) and bool((found <= 1 - RATES).all())
    slopes = found.diff() / RATES.diff()
    assert bool((slopes.diff() >= -1e-12 / RATES.diff()[1:] - 1e-9 * slopes[1:].abs()).all())
    there = found > 1e-6
    back = trade_off(**run, false_positive_rate=found)[there]
    assert bool(((back - RATES[there]).abs() <= 1e-3 * (1 - back) + 1e-9).all())
    tpr = best_true_positive_rate(**run, false_positive_rate=RATES)
    assert torch.allclose(1 - found, tpr, rtol=0, atol=1e-12) and bool((tpr >= RATES).all())


@pytest.mark.slow
@given(
    factor=st.floats(1.01, 5),
    argument=st.sampled_from(["sample_rate", "noise_multiplier", "steps"]),
    **log_uniform,
)
@settings(max_examples=3, deadline=None)
def test_what_costs_less_is_worth_less_to_an_attacker(rate, noise, log_steps, factor, argument):
    run = run_of(rate, noise, log_steps)
    less = run[argument] * factor if argument == "noise_multiplier" else run[argument] / factor
    cheaper = {**run, argument: max(1, int(less)) if argument == "steps" else less}
    before, after = (
        best_true_positive_rate(**each, false_positive_rate=RATES) for each in (run, cheaper)
    )
    assert bool((after <= before * (1 + TOLERANCE)).all())


def test_epsilon_and_delta_are_a_line_of_it():
    epsilon = compute_epsilon(**REFERENCE, delta=1e-5)
    tpr = best_true_positive_rate(**REFERENCE, false_positive_rate=RATES)
    line = 1e-5 + math.exp(epsilon) * RATES
    assert bool((tpr <= line * (1 + 1e-4)).all())
    assert float((line / tpr).min()) == pytest.approx(1, abs=1e-3)  # which touches it


def test_with_little_noise_only_examples_that_were_never_sampled_are_hidden():
    run = dict(sample_rate=1e-3, noise_multiplier=0.005, steps=100)
    never = (1 - 1e-3) ** 100
    found = trade_off(**run, false_positive_rate=[1e-6, 0.1, 0.5 * never, 1.0])
    # Guess "yes" for who shows, and toss a coin for the others, or the other way round: the segment
    # between the two.
    assert found.tolist() == pytest.approx([never - 1e-6, never - 0.1, 0.5 * never, 0.0], abs=1e-9)


def test_the_ends():
    run = dict(sample_rate=0.01, noise_multiplier=1.0, false_positive_rate=[0.0, 0.3, 1.0])
    assert trade_off(**run, steps=0).tolist() == pytest.approx([1, 0.7, 0], abs=1e-11)
    assert trade_off(**{**run, "noise_multiplier": 0.0}, steps=5).tolist() == [0, 0, 0]
    assert best_true_positive_rate(**{**run, "noise_multiplier": 0.0}, steps=5).tolist() == [
        1,
        1,
        1,
    ]
    ends = trade_off(**run, steps=100)
    assert 1 - 1e-6 <= ends[0] <= 1 and ends[2] == 0
    assert best_true_positive_rate(**run, steps=100)[2] == 1


def test_arguments_broadcast_and_numbers_give_a_number():
    run = dict(sample_rate=0.01, steps=100)
    found = trade_off(**run, noise_multiplier=[[1.0], [2.0]], false_positive_rate=[0.01, 0.1, 0.5])
    assert found.shape == (2, 3) and found.dtype == torch.float64
    one = trade_off(**run, noise_multiplier=2.0, false_positive_rate=0.1)
    assert isinstance(one, float) and one == pytest.approx(float(found[1, 1]), rel=1e-4)
    assert isinstance(
        best_true_positive_rate(**run, noise_multiplier=2.0, false_positive_rate=0.1), float
    )


def test_one_composition_serves_all_rates(monkeypatch):
    compose, composed = pld.compose_at, []
    monkeypatch.setattr(
        pld, "compose_at", lambda *args: composed.append(args[3:]) or compose(*args)
    )
    trade_off(
        **REFERENCE, false_positive_rate=torch.linspace(1e-4, 1 - 1e-4, 1000, dtype=torch.float64)
    )
    assert len(composed) == len(set(composed)) == 4  # two deltas, each in two directions


@pytest.mark.parametrize("function", [trade_off, best_true_positive_rate])
def test_bad_arguments_are_refused_by_name_before_any_work(function, monkeypatch):
    monkeypatch.setattr(pld, "DIRECTIONS", None)  # in which runs are composed
    rates = [1.5, [0.1, math.nan], [], "low"]
    bad = dict(sample_rate=[0.0], noise_multiplier=[-1.0], steps=[1.5], false_positive_rate=rates)
    refuses(function, dict(REFERENCE, false_positive_rate=0.1), **bad)
    refuses(function, dict(REFERENCE, false_positive_rate=[0.1, 0.2]), steps=[[1, 2, 3]])
