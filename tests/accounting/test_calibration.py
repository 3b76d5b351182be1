import math

import pytest
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
)
from dp_accounting.pld import PLDAccountant

from dpcompanion.accounting import (
    ACCOUNTANTS,
    compute_epsilon,
    find_noise_multiplier,
    find_sample_rate,
    find_steps,
    gaussian_epsilon,
)

from ..refusals import refuses

USUAL, LOOSE, STRICT = (
    dict(target_epsilon=epsilon, target_delta=delta)
    for epsilon, delta in ((1.0, 1e-5), (8.0, 1e-10), (0.05, 1e-3))
)
OFF = 1.1e-4


def epsilon_of(target, accountant, **run):
    return compute_epsilon(**run, delta=target["target_delta"], accountant=accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    "sample_rate, steps, target",
    [
        (1 / 118, 9440, USUAL),
        (0.3, 40, LOOSE),
        (0.01, 1, USUAL),
        (1.0, 10, LOOSE),
        *(
            pytest.param(1e-4, 500, target, marks=pytest.mark.slow)
            for target in (USUAL, LOOSE, STRICT)
        ),
    ],
)
def test_the_noise_meets_the_target_and_a_little_less_does_not(
    sample_rate, steps, target, accountant
):
    run = dict(sample_rate=sample_rate, steps=steps)
    noise = find_noise_multiplier(**run, **target, accountant=accountant)
    assert type(noise) is float
    assert epsilon_of(target, accountant, **run, noise_multiplier=noise) <= target["target_epsilon"]
    assert (
        epsilon_of(target, accountant, **run, noise_multiplier=noise * (1 - OFF))
        > target["target_epsilon"]
    )


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    "noise_multiplier, steps, target",
    [
        (3.4253, 9440, USUAL),
        (30.0, 10**5, LOOSE),
        (1.5, 1, USUAL),
        *(
            pytest.param(0.8, 100, target, marks=pytest.mark.slow)
            for target in (USUAL, LOOSE, STRICT)
        ),
    ],
)
def test_the_rate_meets_the_target_and_a_little_more_does_not(
    noise_multiplier, steps, target, accountant
):
    run = dict(noise_multiplier=noise_multiplier, steps=steps)
    rate = find_sample_rate(**run, **target, accountant=accountant)
    assert (
        0 < rate <= 1
        and epsilon_of(target, accountant, **run, sample_rate=rate) <= target["target_epsilon"]
    )
    if rate < 1:
        assert (
            epsilon_of(target, accountant, **run, sample_rate=min(1.0, rate * (1 + OFF)))
            > target["target_epsilon"]
        )


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, target",
    [
        (512 / 60000, 3.42529, USUAL),
        (1.0, 20.0, LOOSE),
        *(pytest.param(0.5, 30.0, target, marks=pytest.mark.slow) for target in (USUAL, LOOSE)),
    ],
)
def test_the_steps_meet_the_target_and_one_more_does_not(
    sample_rate, noise_multiplier, target, accountant
):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier)
    steps = find_steps(**run, **target, accountant=accountant)
    more = steps + 1 if steps < 10_000 else math.ceil(steps * (1 + OFF))
    assert (
        type(steps) is int
        and epsilon_of(target, accountant, **run, steps=steps) <= target["target_epsilon"]
    )
    assert epsilon_of(target, accountant, **run, steps=more) > target["target_epsilon"]


def test_a_single_step_may_be_all_that_is_allowed():
    one = compute_epsilon(sample_rate=0.01, noise_multiplier=1.0, steps=1, delta=1e-5)
    assert (
        find_steps(target_epsilon=one, target_delta=1e-5, sample_rate=0.01, noise_multiplier=1.0)
        == 1
    )


def test_full_batches_need_the_noise_of_the_gaussian_mechanism():
    noise = find_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=1, steps=16)
    assert 1 - 3e-4 <= float(gaussian_epsilon(4 / noise, 1e-5)) <= 1


def test_a_rate_of_one_is_found_where_full_batches_are_affordable():
    assert (
        find_sample_rate(target_epsilon=1.0, target_delta=1e-5, noise_multiplier=1000.0, steps=10)
        == 1.0
    )


def test_tight_accounting_needs_less_noise():
    run = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=1 / 118, steps=9440)
    assert (
        find_noise_multiplier(**run)
        < find_noise_multiplier(**run, accountant="rdp")
        == pytest.approx(3.4247, rel=2e-4)
    )


@pytest.mark.slow
def test_dp_accounting_finds_the_same_noise():
    theirs = calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-4),
        lambda noise: SelfComposedDpEvent(
            PoissonSampledDpEvent(0.01, GaussianDpEvent(noise)), 2000
        ),
        2.0,
        1e-5,
        tol=1e-5,
    )
    ours = find_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, steps=2000
    )
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
    def out_of_reach(search, epsilon, **given):
        refuses(search, dict(given, accountant=accountant), target_epsilon=[epsilon])

    out_of_reach(find_noise_multiplier, 1e-12, target_delta=1e-15, sample_rate=1.0, steps=10**7)
    out_of_reach(find_sample_rate, 1e-9, target_delta=1e-15, noise_multiplier=0.1, steps=10**7)
    out_of_reach(find_steps, 0.1, target_delta=1e-5, sample_rate=0.5, noise_multiplier=0.5)
    out_of_reach(find_steps, 10, target_delta=0.4, sample_rate=1e-7, noise_multiplier=1e6)


GOOD = dict(
    target_epsilon=1.0,
    target_delta=1e-5,
    sample_rate=0.01,
    noise_multiplier=1.0,
    steps=10,
    accountant="rdp",
)
SEARCHES = [
    (find_noise_multiplier, "noise_multiplier"),
    (find_sample_rate, "sample_rate"),
    (find_steps, "steps"),
]


def test_bad_arguments_are_refused_by_name():
    bad = dict(
        target_epsilon=[0.0, -1.0, math.inf, math.nan, [1, 2]],
        target_delta=[0.0, 1.0, math.nan, "x"],
        sample_rate=[0.0, 1.01, math.nan],
        noise_multiplier=[0.0, -1.0, math.inf, math.nan],
        steps=[0, 1.5, math.nan],
        accountant=["gdp"],
    )
    for search, found in SEARCHES:
        given, wrong = (
            {key: value for key, value in every.items() if key != found} for every in (GOOD, bad)
        )
        refuses(search, given, **wrong)
