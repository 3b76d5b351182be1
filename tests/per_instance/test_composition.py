import math

import pytest
import torch
from chains import GAIN, Chain
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpcompanion.per_instance import (
    compose,
    compose_sensitivities,
    holder_order,
    log_runs_needed,
    smallest_exponent,
    step_divergence,
)

from ..refusals import refused, refuses


@given(st.floats(1.1, 50), st.floats(1.01, 1e4), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_the_orders_are_those_of_the_recursion(order, p, i):
    expected = {"proof": order, "statement": order}
    for _ in range(i):
        expected["proof"] = p / (p - 1) * expected["proof"] - 1 / (p - 1)
        expected["statement"] = p / (p - 1) * expected["statement"] - 1 / p
    for recursion, value in expected.items():
        assert float(holder_order(order, p, i, recursion=recursion)) == pytest.approx(
            value, rel=1e-9
        )
    assert expected["statement"] >= expected["proof"] * (1 - 1e-12)


def test_theorem_a_2_is_the_case_of_two():
    assert holder_order(3, 2, [0, 1, 2, 3]).tolist() == pytest.approx([3, 5, 9, 17])


@given(st.integers(1, 5000), st.floats(1.01, 64))
@settings(max_examples=100, deadline=None)
def test_fact_3_4_the_smallest_exponent_and_three_times_the_steps_keep_orders_below_twice_the_first(
    steps, order
):
    smallest = smallest_exponent(steps)
    for p in (smallest, 3 * steps):
        assert float(holder_order(order, p, steps)) <= 2 * order
    assert smallest == pytest.approx(1.4427 * steps + 0.5, rel=0.06)
    if smallest > 2:
        assert (smallest * 0.999 / (smallest * 0.999 - 1)) ** steps > 2


def test_fact_3_5_is_hoeffdings_inequality():
    order, rdp, doubled, precision, failure = 3.0, 0.2, 0.5, 0.3, 0.1
    runs = math.exp(
        log_runs_needed(
            rdp=rdp, rdp_doubled=doubled, order=order, precision=precision, failure=failure
        )
    )
    gap, span = precision * math.exp(3 * (order - 1) * rdp), math.exp(3 * (2 * order - 1) * doubled)
    assert 2 * math.exp(-2 * runs * gap**2 / span**2) == pytest.approx(failure, rel=1e-9)


def test_ten_runs_are_far_from_enough_at_the_papers_order():
    # MNIST of the paper: eps 10 needs noise 0.571 or so;
    # even the smallest of its data-independent divergences will do here.
    assert log_runs_needed(rdp=10, rdp_doubled=22, order=8, precision=0.1, failure=0.05) > math.log(
        1e100
    )


def test_divergences_that_depend_on_nothing_compose_plainly():
    def constant(step, order):
        return torch.full((3,), 0.01, dtype=torch.float64)

    for recursion in ("proof", "statement"):
        plain = float(compose(constant, steps=7, order=4, p=1e9, recursion=recursion))
        assert plain == pytest.approx(0.07, rel=1e-6)
    assert float(compose(constant, steps=7, order=4, p=5)) == pytest.approx(0.07, rel=1e-12)


def test_data_independent_divergences_add_up_at_their_orders_and_plainly_for_a_large_exponent():
    def worst(step, order):
        return step_divergence(
            sample_rate=0.05, noise_multiplier=1.0, sensitivity=torch.ones(4), orders=order
        )

    orders = holder_order(4, 30, torch.arange(10.0)).tolist()
    assert float(compose(worst, steps=10, order=4, p=30)) == pytest.approx(
        sum(float(worst(1, a)[0]) for a in orders), rel=1e-9
    )
    assert float(compose(worst, steps=10, order=4, p=1e7)) == pytest.approx(
        10 * float(worst(1, 4)[0]), rel=1e-5
    )


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_theorem_3_3_lies_above_the_truth_of_a_chain_with_the_printed_recursion_above_the_proofs(
    direction,
):
    chain = Chain(steps=3, rate=0.3, noise=1.0)
    truth = chain.divergence(3, direction)
    # The expectation is over runs of the first argument, at states that each stand for the same
    # share of the runs.
    states = chain.states(3, direction, count=500)

    def divergence(step, order):
        return step_divergence(
            sample_rate=0.3,
            noise_multiplier=1.0,
            sensitivity=GAIN(states[step - 1]),
            orders=order,
            direction=direction,
        )

    for p in (2, 4, 9, 30):
        proof, statement = (
            float(compose(divergence, steps=3, order=3, p=p, recursion=r))
            for r in ("proof", "statement")
        )
        assert truth < proof <= statement


def test_contributions_sum_to_the_whole_and_orders_blow_up_for_early_steps():
    sensitivities = torch.rand(
        20, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    options = dict(sample_rate=0.1, noise_std=1.0, order=6, p=40)
    each = compose_sensitivities(sensitivities, each_step=True, **options)
    assert each.shape == (20, 3)
    torch.testing.assert_close(each.sum(0), compose_sensitivities(sensitivities, **options))
    constant = compose_sensitivities(torch.ones(20, 5, 1), each_step=True, **options)[:, 0]
    assert (constant.diff() < 0).all()


@given(
    st.floats(-3, 0),
    st.floats(-0.5, 1),
    st.floats(1.5, 12),
    st.integers(1, 12),
    st.integers(0, 1000),
)
@example(-2.0, 0.0, 9.0, 5, 1)  # 0.8% above, where most are 0.1%
@settings(max_examples=8, deadline=None)
def test_the_table_of_moments_is_a_tight_upper_bound(rate, noise, order, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    sensitivities = torch.rand(steps, 3, 2, generator=generator, dtype=torch.float64)
    sensitivities[0, 0, 0] = 0.0
    options = dict(order=order, p=3.0 * steps)
    exact = compose(
        lambda t, a: step_divergence(
            sample_rate=10**rate,
            noise_multiplier=10**noise,
            orders=a,
            sensitivity=sensitivities[t - 1],
        ),
        steps=steps,
        **options,
    )
    found = compose_sensitivities(
        sensitivities, sample_rate=10**rate, noise_std=10**noise, **options
    )
    assert (found >= exact * (1 - 1e-12)).all()
    assert (found <= exact * 1.02 + 1e-300).all()


def test_sensitivities_of_zero_cost_nothing_and_single_precision_will_do():
    assert (
        float(compose_sensitivities(torch.zeros(4, 2), sample_rate=0.1, noise_std=1.0, order=3))
        == 0.0
    )
    values = torch.rand(10, 2, 4, generator=torch.Generator().manual_seed(0))
    options = dict(sample_rate=0.1, noise_std=1.0, order=3)
    torch.testing.assert_close(
        compose_sensitivities(values, **options), compose_sensitivities(values.double(), **options)
    )


def test_bad_arguments_are_refused_by_name():
    good = dict(sensitivities=torch.ones(3, 2), sample_rate=0.1, noise_std=1.0, order=4)
    refuses(
        compose_sensitivities,
        good,
        sensitivities=[torch.ones(3), torch.ones(0, 2), [1.0, 2.0], "a", None],
        order=[1],
        p=[1.0],
    )
    refuses(compose_sensitivities, good, sample_rate=[0], recursion=["book"])
    refuses(compose_sensitivities, dict(good, sensitivities=torch.ones(30, 2)), p=[1.5])
    for found in (torch.tensor(0.1), torch.tensor([-0.1]), torch.tensor([math.nan])):
        refused("divergence", compose, lambda t, a, found=found: found, steps=2, order=2, p=4)


def test_with_next_to_no_noise_the_divergence_is_infinite():
    run = dict(order=4, sample_rate=0.1, noise_std=1e-300)
    assert float(compose_sensitivities([[1.0], [2.0]], **run)) == math.inf


def test_sensitivities_in_lists_keep_their_digits():
    sensitivities = [[[0.1, 0.2]] * 3] * 5
    found = compose_sensitivities(sensitivities, sample_rate=0.05, noise_std=1.0, order=4)
    exact = torch.tensor(sensitivities, dtype=torch.float64)
    assert torch.equal(
        found, compose_sensitivities(exact, sample_rate=0.05, noise_std=1.0, order=4)
    )


def test_an_exponent_whose_orders_no_float_holds_is_refused():
    """0 times infinity was nan, which is below every target."""
    refused("^p ", compose, lambda step, order: [0.001, 0.002], steps=3000, order=2, p=1.5)
    assert compose(
        lambda step, order: [0.001, 0.002], steps=3000, order=2, p=9000
    ) == pytest.approx(4.5, rel=0.5)
