import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, calibrate_dp_mechanism
from dp_accounting.pld import PLDAccountant

from dpcompanion.accounting import (
    ACCOUNTANTS,
    compute_epsilon,
    find_noise_multiplier,
    find_sample_rate,
    find_steps,
    gaussian_epsilon,
)

TARGETS = [
    pytest.param(dict(target_epsilon=e, target_delta=d), marks=marks)
    for e, d, marks in ((1.0, 1e-5, ()), (0.05, 1e-3, pytest.mark.slow), (8.0, 1e-10, ()))
]
OFF = 1.1e-4


def epsilon_of(target, accountant, **run):
    return compute_epsilon(**run, delta=target["target_delta"], accountant=accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "sample_rate, steps",
    [(1 / 118, 9440), pytest.param(1e-4, 500, marks=pytest.mark.slow), (0.3, 40), (0.01, 1), (1.0, 10)],
)
def test_the_noise_meets_the_target_and_a_little_less_does_not(sample_rate, steps, target, accountant):
    run = dict(sample_rate=sample_rate, steps=steps)
    noise = find_noise_multiplier(**run, **target, accountant=accountant)
    assert type(noise) is float
    assert epsilon_of(target, accountant, **run, noise_multiplier=noise) <= target["target_epsilon"]
    assert epsilon_of(target, accountant, **run, noise_multiplier=noise * (1 - OFF)) > target["target_epsilon"]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "noise_multiplier, steps", [(3.4253, 9440), pytest.param(0.8, 100, marks=pytest.mark.slow), (30.0, 10**5), (1.5, 1)]
)
def test_the_rate_meets_the_target_and_a_little_more_does_not(noise_multiplier, steps, target, accountant):
    run = dict(noise_multiplier=noise_multiplier, steps=steps)
    rate = find_sample_rate(**run, **target, accountant=accountant)
    assert 0 < rate <= 1 and epsilon_of(target, accountant, **run, sample_rate=rate) <= target["target_epsilon"]
    if rate < 1:
        assert epsilon_of(target, accountant, **run, sample_rate=min(1.0, rate * (1 + OFF))) > target["target_epsilon"]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("target", TARGETS[::2])
@pytest.mark.parametrize(
    "sample_rate, noise_multiplier",
    [(512 / 60000, 3.42529), (1.0, 20.0)]
    + [pytest.param(*run, marks=pytest.mark.slow) for run in ((0.01, 1.0), (0.5, 30.0))],
)
def test_the_steps_meet_the_target_and_one_more_does_not(sample_rate, noise_multiplier, target, accountant):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier)
    steps = find_steps(**run, **target, accountant=accountant)
    more = steps + 1 if steps < 10_000 else math.ceil(steps * (1 + OFF))
    assert type(steps) is int and epsilon_of(target, accountant, **run, steps=steps) <= target["target_epsilon"]
    assert epsilon_of(target, accountant, **run, steps=more) > target["target_epsilon"]


def test_a_single_step_may_be_all_that_is_allowed():
    one = compute_epsilon(sample_rate=0.01, noise_multiplier=1.0, steps=1, delta=1e-5)
    assert find_steps(target_epsilon=one, target_delta=1e-5, sample_rate=0.01, noise_multiplier=1.0) == 1


def test_full_batches_need_the_noise_of_the_gaussian_mechanism():
    noise = find_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=1, steps=16)
    assert 1 - 3e-4 <= float(gaussian_epsilon(4 / noise, 1e-5)) <= 1


def test_a_rate_of_one_is_found_where_full_batches_are_affordable():
    assert find_sample_rate(target_epsilon=1.0, target_delta=1e-5, noise_multiplier=1000.0, steps=10) == 1.0


def test_tight_accounting_needs_less_noise():
    run = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=1 / 118, steps=9440)
    assert (
        find_noise_multiplier(**run) < find_noise_multiplier(**run, accountant="rdp") == pytest.approx(3.4247, rel=2e-4)
    )


@pytest.mark.slow
def test_dp_accounting_finds_the_same_noise():
    theirs = calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-4),
        lambda noise: SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(noise)), 2000),
        2.0,
        1e-5,
        tol=1e-5,
    )
    ours = find_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, steps=2000)
    assert ours == pytest.approx(theirs, rel=3e-4)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_extreme_targets_are_met_or_refused(accountant):
    run = dict(sample_rate=0.01, steps=100, accountant=accountant)
    for epsilon, delta in ((1e-4, 1e-12), (1e5, 1e-5), (1e-6, 0.4)):
        noise = find_noise_multiplier(**run, target_epsilon=epsilon, target_delta=delta)
        assert compute_epsilon(**run, noise_multiplier=noise, delta=delta) <= epsilon


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.slow
def test_targets_out_of_reach_are_refused_by_name(accountant):
    with pytest.raises(ValueError, match="target_epsilon"):
        find_noise_multiplier(
            target_epsilon=1e-12, target_delta=1e-15, sample_rate=1.0, steps=10**7, accountant=accountant
        )
    with pytest.raises(ValueError, match="target_epsilon"):
        find_sample_rate(
            target_epsilon=1e-9, target_delta=1e-15, noise_multiplier=0.1, steps=10**7, accountant=accountant
        )
    with pytest.raises(ValueError, match="target_epsilon"):
        find_steps(target_epsilon=0.1, target_delta=1e-5, sample_rate=0.5, noise_multiplier=0.5, accountant=accountant)
    with pytest.raises(ValueError, match="target_epsilon"):
        find_steps(target_epsilon=10, target_delta=0.4, sample_rate=1e-7, noise_multiplier=1e6, accountant=accountant)


GOOD = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, noise_multiplier=1.0, steps=10, accountant="rdp")
SEARCHES = [(find_noise_multiplier, "noise_multiplier"), (find_sample_rate, "sample_rate"), (find_steps, "steps")]


@pytest.mark.parametrize(
    "name, value",
    [
        ("target_epsilon", 0.0),
        ("target_epsilon", -1.0),
        ("target_epsilon", math.inf),
        ("target_epsilon", math.nan),
        ("target_epsilon", [1, 2]),
        ("target_delta", 0.0),
        ("target_delta", 1.0),
        ("target_delta", math.nan),
        ("target_delta", "x"),
        ("sample_rate", 0.0),
        ("sample_rate", 1.01),
        ("sample_rate", math.nan),
        ("noise_multiplier", 0.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
        ("noise_multiplier", math.nan),
        ("steps", 0),
        ("steps", 1.5),
        ("steps", math.nan),
        ("accountant", "gdp"),
    ],
)
def test_bad_arguments_are_named(name, value):
    for search, found in SEARCHES:
        if found != name:
            arguments = {key: v for key, v in {**GOOD, name: value}.items() if key != found}
            with pytest.raises(ValueError, match=name):
                search(**arguments)
