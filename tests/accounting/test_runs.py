import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpcompanion.accounting import (
    ACCOUNTANTS,
    best_true_positive_rate,
    compute_delta,
    compute_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    pld,
)

from ..refusals import refuses

log_uniform = dict(
    rate=st.floats(-7, 0), noise=st.floats(-1, 6), log_delta=st.floats(-15, math.log10(0.5))
)


def run_of(rate, noise, log_steps):
    return dict(
        sample_rate=min(10**rate, 1.0), noise_multiplier=10**noise, steps=round(10**log_steps)
    )


def check_order(epsilon_pld, epsilon_rdp):
    assert 0 <= epsilon_pld < math.inf and 0 <= epsilon_rdp < math.inf
    # whose grid is that fine where epsilon is in the millions
    assert epsilon_pld <= epsilon_rdp * (1 + 1e-4)


def check_monotone(run, delta, argument, factor, accountant):
    """More noise or delta, or fewer steps or a lower rate, never raises epsilon, up to the error of
    the grid.
    """
    cheaper, epsilon = (
        dict(run, delta=delta),
        compute_epsilon(**run, delta=delta, accountant=accountant),
    )
    if argument in ("noise_multiplier", "delta"):
        cheaper[argument] = min(
            cheaper[argument] * factor, 0.5 if argument == "delta" else math.inf
        )
    else:
        cheaper[argument] = (
            cheaper[argument] / factor
            if argument == "sample_rate"
            else max(1, int(cheaper[argument] / factor))
        )
    assert compute_epsilon(**cheaper, accountant=accountant) <= epsilon * (1 + 3e-4) + 1e-12


@pytest.mark.slow
@given(log_steps=st.floats(0, 7), **log_uniform)
@settings(max_examples=12, deadline=None)
def test_over_the_whole_range_epsilon_is_finite_and_pld_is_never_above_rdp(
    rate, noise, log_steps, log_delta
):
    run, delta = run_of(rate, noise, log_steps), 10**log_delta
    check_order(*(compute_epsilon(**run, delta=delta, accountant=a) for a in ("pld", "rdp")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, steps, delta",
    [
        (1e-7, 0.1, 10**7, 1e-15),
        (1e-7, 1.0, 10**7, 1e-5),
        (1.0, 0.1, 10**7, 0.5),
        (1 - 1e-9, 0.1, 10**7, 1e-5),
        (0.5, 1e6, 10**7, 1e-15),
        (1e-7, 1e6, 1, 1e-15),
        (1 - 1e-12, 1e6, 1, 1e-15),
        (1e-7, 0.1, 1, 1e-15),
        (0.5, 0.1, 1, 0.5),
        (1.0, 1e6, 1, 0.5),
        # With so little noise that no grid of losses resolves a step.
        (0.01, 1e-4, 100, 1e-5),
        (0.01, 1e-9, 10**12, 1e-12),
        (1e-11, 0.0099, 10**6, 1e-300),
        pytest.param(1.6e-8, 0.356, 808_631, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_the_corners_of_the_range_are_finite_and_ordered(
    sample_rate, noise_multiplier, steps, delta
):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps, delta=delta)
    check_order(*(compute_epsilon(**run, accountant=a) for a in ("pld", "rdp")))


ANY_ARGUMENT = dict(
    factor=st.floats(1.001, 10),
    argument=st.sampled_from(["sample_rate", "noise_multiplier", "steps", "delta"]),
    **log_uniform,
)


@given(log_steps=st.floats(0, 5), **ANY_ARGUMENT)
@settings(max_examples=10, deadline=None)
def test_the_pld_epsilon_is_monotone_in_every_argument(
    rate, noise, log_steps, log_delta, argument, factor
):
    check_monotone(run_of(rate, noise, log_steps), 10**log_delta, argument, factor, "pld")


@given(log_steps=st.floats(0, 7), **ANY_ARGUMENT)
@settings(max_examples=30, deadline=None)
def test_the_rdp_epsilon_is_monotone_in_every_argument(
    rate, noise, log_steps, log_delta, argument, factor
):
    check_monotone(run_of(rate, noise, log_steps), 10**log_delta, argument, factor, "rdp")


@given(
    log_steps=st.floats(0, 5),
    factor=st.floats(1.001, 10),
    scale=st.floats(0.01, 3),
    rate=st.floats(-5, 0),
    noise=st.floats(-0.5, 3),
    accountant=st.sampled_from(ACCOUNTANTS),
)
@settings(max_examples=10, deadline=None)
def test_delta_falls_with_epsilon_and_stays_a_probability(
    rate, noise, log_steps, scale, factor, accountant
):
    run = run_of(rate, noise, log_steps)
    epsilon = scale * compute_epsilon(**run, delta=1e-5, accountant=accountant)
    here, further = (
        compute_delta(**run, epsilon=e, accountant=accountant) for e in (epsilon, epsilon * factor)
    )
    assert 0 <= further <= here * (1 + 1e-2) + 1e-300 and here <= 1


@pytest.mark.slow
@given(
    log_steps=st.floats(0, 5),
    rate=st.floats(-4, 0),
    noise=st.floats(-0.5, 2),
    log_delta=st.floats(-14, -2),
)
@settings(max_examples=10, deadline=None)
def test_delta_and_epsilon_are_inverse_to_each_other(rate, noise, log_steps, log_delta):
    run, delta = run_of(rate, noise, log_steps), 10**log_delta
    for accountant, tolerance in (("rdp", 1e-6), ("pld", 1e-2)):
        epsilon = compute_epsilon(**run, delta=delta, accountant=accountant)
        back = compute_delta(**run, epsilon=epsilon, accountant=accountant)
        assert back <= delta * (1 + tolerance)
        if epsilon > 1e-6:
            assert back >= delta * (1 - tolerance)


@pytest.mark.slow
@given(noise=st.floats(-1, 6), log_steps=st.floats(0, 7), log_delta=st.floats(-15, -0.31))
@settings(max_examples=15, deadline=None)
def test_full_batches_are_the_gaussian_mechanism(noise, log_steps, log_delta):
    run, delta = run_of(0, noise, log_steps), 10**log_delta
    mu = math.sqrt(run["steps"]) / run["noise_multiplier"]
    epsilon, at_one = gaussian_epsilon(mu, delta), gaussian_delta(mu, 1.0)
    assert epsilon <= compute_epsilon(**run, delta=delta) <= epsilon * (1 + 1e-9) + 1e-10
    assert at_one <= compute_delta(**run, epsilon=1.0) <= at_one * (1 + 1e-8)
    assert compute_epsilon(**run, delta=delta, accountant="rdp") >= float(
        gaussian_epsilon(mu, delta)
    ) * (1 - 1e-12)


@pytest.mark.parametrize(
    "noise, steps", [(1.1, 10**12), (0.3, 10**11 + 1), (0.011, 10**12 - 1), (3.7, 7)]
)
def test_full_batches_of_any_number_are_bounded_to_the_last_digit(noise, steps):
    """At a ratio of a million delta changes a million times as much as the ratio does,
    relatively.
    """
    for z in (1, 3, 6):
        with mpmath.workdps(60):
            mu = mpmath.sqrt(steps) / noise
            epsilon = float(mu * (mu / 2 + z))
            exact = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
                -mu / 2 - epsilon / mu
            )
            found = compute_delta(
                sample_rate=1, noise_multiplier=noise, steps=steps, epsilon=epsilon
            )
            assert exact <= found <= exact * (1 + mpmath.mpf(1e-14) * mu * z + 2e-11)


def test_almost_full_batches_approach_the_gaussian_mechanism():
    run = dict(noise_multiplier=10.0, steps=100, delta=1e-5)
    full = compute_epsilon(sample_rate=1.0, **run)
    assert full * (1 - 1e-5) <= compute_epsilon(sample_rate=1 - 1e-9, **run) <= full * (1 + 2e-4)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_vanishes_as_the_noise_grows(accountant):
    # No floor: with orders up to 1024 alone, RDP would never fall below ln(1 / (1024 delta)) /
    # 1023.
    epsilons = [
        compute_epsilon(
            sample_rate=0.01, noise_multiplier=s, steps=1000, delta=1e-9, accountant=accountant
        )
        for s in (1e2, 1e3, 1e4, 1e5, 1e6)
    ]
    assert all(b <= a / 5 for a, b in zip(epsilons, epsilons[1:])) and epsilons[-1] < 2e-6
    assert (
        compute_epsilon(
            sample_rate=0.01, noise_multiplier=1e6, steps=1000, delta=1e-5, accountant=accountant
        )
        == 0
    )


def test_divergences_of_high_orders_are_near_the_loss_distribution_where_noise_is_large():
    """By orders up to 64 alone epsilon would have a floor of ln(1 / (64 delta)) / 63, six times the
    answer.
    """
    run = dict(sample_rate=0.01, noise_multiplier=20.0, steps=1000, delta=1e-9)
    exact, by_divergences = (
        compute_epsilon(**run, accountant=accountant) for accountant in ("pld", "rdp")
    )
    assert exact <= by_divergences <= 1.2 * exact


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_costs_nothing_and_no_noise_costs_everything(accountant):
    run = dict(sample_rate=0.5, accountant=accountant)
    assert compute_epsilon(**run, noise_multiplier=1.0, steps=0, delta=1e-5) == 0
    assert compute_delta(**run, noise_multiplier=0.0, steps=0, epsilon=0.0) == 0
    assert compute_epsilon(**run, noise_multiplier=0.0, steps=1, delta=1e-5) == math.inf
    assert compute_delta(**run, noise_multiplier=0.0, steps=1, epsilon=5.0) == 1


def test_at_epsilon_zero_one_step_costs_its_total_variation():
    exact = 0.3 * math.erf(1 / (math.sqrt(8) * 2.0))
    found = compute_delta(sample_rate=0.3, noise_multiplier=2.0, steps=1, epsilon=0.0)
    assert exact * (1 - 1e-12) <= found <= exact * 1.001


def test_pld_is_the_default_and_numbers_of_numpy_and_torch_are_numbers():
    run = dict(sample_rate=0.01, noise_multiplier=1.0, steps=100, delta=1e-5)
    expected = compute_epsilon(**run)
    assert (
        expected == compute_epsilon(**run, accountant="pld") == pld.epsilon(**run)
        and type(expected) is float
    )
    assert (
        compute_epsilon(**{**run, "noise_multiplier": np.float64(1), "steps": np.int64(100)})
        == expected
    )
    assert (
        compute_epsilon(
            **{
                **run,
                "noise_multiplier": torch.tensor(1.0),
                "steps": torch.tensor(100),
                "delta": np.float64(1e-5),
            }
        )
        == expected
    )


BAD = dict(
    sample_rate=[
        0.0,
        1.1,
        math.nan,
        "half",
        ["0.5", "0.6"],
        torch.tensor([0.1, 0.0]),
        [0.1, 1.5],
        [0.1, "x"],
    ],
    noise_multiplier=[-0.1, math.inf, math.nan, None, [1.0, -2.0], [1.0, math.nan]],
    steps=[-1, 2.5, math.inf, math.nan, True, "ten", [1, 2.5], 10**13, 10**400],
    accountant=["gdp", None],
)


def test_bad_arguments_are_refused_by_name():
    run = dict(sample_rate=0.1, noise_multiplier=1.0, steps=10, accountant="pld")
    bad_deltas = [0.0, 1.0, -1e-5, math.nan, [], torch.ones(0), [1e-5, 0.0], "0.5"]
    refuses(compute_epsilon, dict(run, delta=1e-5), **BAD, delta=bad_deltas)
    refuses(compute_delta, dict(run, epsilon=1.0), **BAD, epsilon=[-0.1, math.inf, math.nan])
    # Shapes that do not broadcast.
    refuses(
        compute_epsilon,
        dict(run, delta=1e-5, sample_rate=[0.1, 0.2]),
        noise_multiplier=[[1.0, 2.0, 3.0]],
    )


@pytest.mark.parametrize("rate, steps", [(0.01, 100), (0.5, 30), (1e-6, 1000), (1.0, 10)])
def test_with_little_noise_the_bound_is_a_bound_and_close(rate, steps):
    """Against loss distributions where both can be computed, and against a direct sum over the
    draws.
    """
    run = dict(sample_rate=rate, noise_multiplier=0.0099, steps=steps)
    exact = pld.epsilon(**run, delta=1e-6)
    found = compute_epsilon(**run, delta=1e-6)
    assert exact * (1 - 1e-9) <= found <= 1.004 * exact
    assert compute_delta(**run, epsilon=found) <= 1e-6 * (1 + 1e-4)
    draws = range(steps + 1)
    direct = math.fsum(
        stats.binom.pmf(k, steps, rate) * float(gaussian_delta(math.sqrt(k) / 0.0099, found))
        for k in draws
    )
    assert 0.9e-6 < direct <= 1e-6


@pytest.mark.parametrize("steps", [10**6, 10**9, 10**12])
def test_with_little_noise_delta_and_epsilon_stay_each_others_inverse_however_many_the_steps(steps):
    run = dict(sample_rate=1e-3, noise_multiplier=0.0099, steps=steps)
    assert 0.9e-6 < compute_delta(**run, epsilon=compute_epsilon(**run, delta=1e-6)) < 1.3e-6


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_numbers_give_a_float_and_arrays_broadcast(accountant):
    rates = torch.tensor([[0.01], [0.05]], dtype=torch.float64)
    run = dict(sample_rate=rates, noise_multiplier=[1.0, 2.0, 1.0], steps=30)
    for function, target in ((compute_epsilon, {"delta": 1e-5}), (compute_delta, {"epsilon": 0.4})):
        found = function(**run, **target, accountant=accountant)
        assert found.shape == (2, 3) and found.dtype == torch.float64
        assert torch.equal(found[:, 0], found[:, 2])
        for i, rate in enumerate((0.01, 0.05)):
            for j, noise in enumerate((1.0, 2.0)):
                one = function(
                    sample_rate=rate,
                    noise_multiplier=torch.tensor(noise),
                    steps=30,
                    **target,
                    accountant=accountant,
                )
                assert type(one) is float and one == float(found[i, j])


@pytest.mark.parametrize("delta", [1e-100, 1e-200])
def test_pld_is_not_above_rdp_at_tiny_deltas(delta):
    """At 1e-100 they said 31.39, and divergences 30.16."""
    run = dict(sample_rate=0.01, noise_multiplier=1.0, steps=1000)
    epsilon, by_divergence = (
        compute_epsilon(**run, delta=delta, accountant=name) for name in ACCOUNTANTS
    )
    assert epsilon <= by_divergence <= 1.1 * epsilon
    assert compute_delta(**run, epsilon=epsilon) <= compute_delta(
        **run, epsilon=epsilon, accountant="rdp"
    )


@pytest.mark.parametrize("sample_rate", [0.01, 1.0])
@pytest.mark.parametrize("noise_multiplier", [1e155, 1.7e308])
def test_noise_whose_square_is_no_float_is_accounted_for(noise_multiplier, sample_rate):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=3)
    assert 0 <= compute_delta(**run, epsilon=0.1) <= compute_delta(**run, epsilon=0.0) <= 1e-99
    assert compute_epsilon(**run, delta=1e-5) == 0 <= compute_epsilon(**run, delta=1e-280) <= 1e-97
    assert compute_epsilon(**run, delta=1e-5, accountant="rdp") == 0
    assert best_true_positive_rate(**run, false_positive_rate=0.1) <= 0.1001


def test_the_largest_epsilon_is_an_answer():
    for run in (dict(sample_rate=0.5), dict(sample_rate=1 - 1e-16), dict(sample_rate=1.0)):
        assert compute_delta(**run, noise_multiplier=1.0, steps=3, epsilon=1e308) <= 1e-300


def test_tensors_of_few_bits_are_read_and_what_is_no_real_number_is_refused():
    run = dict(sample_rate=0.5, noise_multiplier=1.0, steps=1, delta=1e-5)
    found = compute_epsilon(**{**run, "sample_rate": torch.tensor([0.5], dtype=torch.bfloat16)})
    assert found.tolist() == [compute_epsilon(**run)]
    objects = [
        np.array([0.5 + 5j]),
        np.array([0.5], dtype=object),
        torch.tensor([0.5j]),
        torch.tensor([0.5]).to_sparse(),
    ]
    refuses(compute_epsilon, run, sample_rate=[0.5 + 5j, [0.5, None], *objects])


def test_rdp_at_little_noise_looks_at_orders_near_one():
    run = dict(sample_rate=0.05, noise_multiplier=0.124153, steps=300)
    epsilon = compute_epsilon(**run, delta=1e-5, accountant="rdp")
    # dp-accounting's loss distributions give 1000, RDP at orders from 1.1 on 2556.
    assert 1000 <= epsilon <= 1090
    assert compute_delta(**run, epsilon=epsilon, accountant="rdp") == pytest.approx(1e-5, rel=1e-6)
