import math

import mpmath as mp
import pytest
import torch
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import (
    DEFAULT_ORDERS,
    gaussian_epsilon,
    rdp_sampled_gaussian,
    rdp_to_delta,
    rdp_to_epsilon,
)

from ..refusals import refuses

CONVERSIONS = ("balle2020", "mironov2017")


def run(sample_rate=0.01, noise_multiplier=1.0, steps=1000):
    return steps * rdp_sampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise_multiplier)


@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.01])
def test_the_conversion_of_balle_et_al_is_that_of_dp_accounting(delta):
    rdp = run()
    theirs, order = rdp_privacy_accountant.compute_epsilon(DEFAULT_ORDERS, rdp.numpy(), delta)
    ours = rdp_to_epsilon(rdp, DEFAULT_ORDERS, delta)
    assert [float(x) for x in ours] == pytest.approx([theirs, order], rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 10.0])
def test_the_delta_of_balle_et_al_is_that_of_dp_accounting(epsilon):
    rdp = run()
    theirs, _ = rdp_privacy_accountant.compute_delta(DEFAULT_ORDERS, rdp.numpy(), epsilon)
    assert float(rdp_to_delta(rdp, DEFAULT_ORDERS, epsilon)[0]) == pytest.approx(theirs, rel=1e-10)
    # At 0 Pinsker's bound, which it does not use, is the smaller one.
    assert (
        float(rdp_to_delta(rdp, DEFAULT_ORDERS, 0.0)[0])
        <= rdp_privacy_accountant.compute_delta(DEFAULT_ORDERS, rdp.numpy(), 0.0)[0]
    )


def test_mironovs_conversion_is_its_formula():
    rdp, orders = [0.3, 1.0], [2.0, 16.0]
    each = [r + math.log(1e5) / (a - 1) for r, a in zip(rdp, orders)]
    epsilon, order = rdp_to_epsilon(rdp, orders, 1e-5, conversion="mironov2017")
    assert float(epsilon) == pytest.approx(min(each), rel=1e-14) and float(order) == 16


@given(
    rate=st.floats(-7, 0),
    noise=st.floats(-1, 6),
    steps=st.integers(1, 10**7),
    log_delta=st.floats(-15, -0.31),
)
@settings(max_examples=25, deadline=None)
def test_over_the_whole_range_the_bounds_are_finite_and_ordered(rate, noise, steps, log_delta):
    rdp, delta = run(10**rate, 10**noise, steps), 10**log_delta
    tight, loose = (
        float(rdp_to_epsilon(rdp, DEFAULT_ORDERS, delta, conversion=c)[0]) for c in CONVERSIONS
    )
    assert 0 <= tight <= loose < math.inf


@given(scale=st.floats(-6, 3), log_delta=st.floats(-15, -1))
@settings(max_examples=25, deadline=None)
def test_delta_and_epsilon_are_inverse_to_each_other(scale, log_delta):
    rdp, delta = run() * 10**scale, 10**log_delta
    for conversion in CONVERSIONS:
        epsilon, _ = rdp_to_epsilon(rdp, DEFAULT_ORDERS, delta, conversion=conversion)
        back, _ = rdp_to_delta(rdp, DEFAULT_ORDERS, epsilon, conversion=conversion)
        assert float(back) <= delta * (1 + 1e-9)
        if epsilon > 0:
            # The rounding of epsilon counts for (order - 1) times as much.
            assert float(back) == pytest.approx(delta, rel=1e-9)


@given(mu=st.floats(0.01, 30), log_delta=st.floats(-15, -0.31))
@settings(max_examples=25, deadline=None)
def test_no_conversion_falls_below_the_exact_gaussian_mechanism(mu, log_delta):
    orders = torch.tensor(DEFAULT_ORDERS, dtype=torch.float64)
    exact = float(gaussian_epsilon(mu, 10**log_delta))
    for conversion in CONVERSIONS:
        assert float(
            rdp_to_epsilon(orders * mu**2 / 2, orders, 10**log_delta, conversion=conversion)[0]
        ) >= exact * (1 - 1e-12)


def test_epsilon_is_zero_once_delta_covers_the_total_variation():
    # Gaussian mechanism with mu: total variation 2 Phi(mu / 2) - 1, which Pinsker bounds by mu / 2.
    mu, orders = 0.01, torch.tensor([1.0001, 2.0, 8.0], dtype=torch.float64)
    rdp = orders * mu**2 / 2
    total_variation = float(2 * mp.ncdf(mu / 2) - 1)
    assert float(rdp_to_epsilon(rdp, orders, 0.501 * mu)[0]) == 0
    assert float(rdp_to_epsilon(rdp, orders, 0.99 * total_variation)[0]) > 0
    assert total_variation <= float(rdp_to_delta(rdp, orders, 0.0)[0]) <= 0.501 * mu


def test_a_divergence_of_zero_costs_nothing_and_an_infinite_one_everything():
    orders = [2.0, 8.0]
    assert float(rdp_to_epsilon([0.0, 0.0], orders, 1e-5)[0]) == 0
    assert float(rdp_to_delta([0.0, 0.0], orders, 0.0)[0]) == 0
    epsilon, order = rdp_to_epsilon([math.inf, math.inf], orders, 1e-5)
    assert epsilon == math.inf and order.isnan()
    assert float(rdp_to_delta([math.inf, math.inf], orders, 3.0)[0]) == 1
    epsilon, order = rdp_to_epsilon([0.5, math.inf], orders, 1e-5)
    assert epsilon.isfinite() and order == 2


def test_many_rows_and_deltas_are_converted_together():
    rdp = torch.stack([run(noise_multiplier=s) for s in (0.7, 1.0, 4.0)])
    epsilon, order = rdp_to_epsilon(rdp[:, None], DEFAULT_ORDERS, torch.tensor([1e-5, 1e-9]))
    assert (
        epsilon.shape == order.shape == (3, 2)
        and epsilon.dtype == torch.float64
        and epsilon.device == rdp.device
    )
    for i in range(3):
        for j, delta in enumerate(torch.tensor([1e-5, 1e-9]).double().tolist()):
            assert float(epsilon[i, j]) == float(rdp_to_epsilon(rdp[i], DEFAULT_ORDERS, delta)[0])


def test_bad_arguments_are_refused_by_name():
    curve = dict(rdp=[0.1, 0.2], orders=[2.0, 3.0])
    refuses(
        rdp_to_epsilon,
        dict(curve, delta=1e-5),
        rdp=[[-0.1, 1.0], [math.nan, 1.0], [0.1, 0.2, 0.3], 0.1],
        orders=[[1.0, 2.0], [2.0, math.nan]],
        delta=[0.0, 1.0, math.nan, "x"],
        conversion=["zcdp"],
    )
    refuses(rdp_to_delta, dict(curve, epsilon=1.0), epsilon=[-1.0, math.nan, math.inf, "x"])


def test_the_pairs_have_names_and_unpack():
    found = rdp_to_epsilon([0.1, 0.4], [2, 8], 1e-5)
    epsilon, order = found
    assert found.epsilon is epsilon and found.order is order and found[0] is epsilon
    found = rdp_to_delta([0.1, 0.4], [2, 8], 1.0)
    assert found.delta is found[0] and found.order is found[1]
