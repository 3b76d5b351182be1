import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import gaussian_delta, gaussian_epsilon, gaussian_mu

from ..refusals import refused, refuses


def exact_delta(mu, epsilon):
    with mp.workdps(400):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        upper = lambda x: mp.erfc(x / mp.sqrt(2)) / 2  # noqa: E731
        return upper(epsilon / mu - mu / 2) - mp.exp(epsilon) * upper(epsilon / mu + mu / 2)


@given(log_mu=st.floats(-6, 2), z=st.floats(0, 36))
@settings(max_examples=100, deadline=None)
def test_delta_agrees_with_the_formula_in_high_precision(log_mu, z):
    mu = 10**log_mu
    epsilon = max(0.0, mu * (z + mu / 2 - 3))  # from the bulk to a delta of e^-650
    exact = float(exact_delta(mu, epsilon))
    assert float(gaussian_delta(mu, epsilon)) == pytest.approx(
        exact, rel=1e-11 * (1 + z * z), abs=1e-305
    )


@pytest.mark.parametrize("mu", [2.5, 30.7, 11234.567, 1234567.891, 123456789.123])
def test_no_digit_of_delta_is_lost_where_the_ratio_is_large(mu):
    """There epsilon / mu and mu / 2 nearly cancel: delta was short of 2e-8 of itself at 1e8."""
    for z in (-1, 0.5, 4, 20):
        epsilon = mu * (z + mu / 2)
        with mp.workdps(60):
            assert abs(gaussian_delta(mu, epsilon) / exact_delta(mu, epsilon) - 1) <= 1e-12


@given(log_mu=st.floats(-7, 3), log_delta=st.floats(-300, -0.01))
@settings(max_examples=30, deadline=None)
def test_epsilon_meets_delta_and_nothing_smaller_does(log_mu, log_delta):
    mu, delta = 10**log_mu, 10**log_delta
    epsilon = float(gaussian_epsilon(mu, delta))
    assert float(gaussian_delta(mu, epsilon)) <= delta
    if epsilon > 0:
        assert float(gaussian_delta(mu, epsilon * (1 - 1e-9))) > delta * (1 - 1e-9)
    else:
        assert float(exact_delta(mu, 0)) <= delta * (1 + 1e-12)


@given(epsilon=st.floats(0, 500), log_delta=st.floats(-100, -0.01))
@settings(max_examples=25, deadline=None)
def test_the_largest_ratio_meets_delta_and_nothing_larger_does(epsilon, log_delta):
    delta = 10**log_delta
    mu = float(gaussian_mu(epsilon, delta))
    assert mu > 0 and float(exact_delta(mu, epsilon)) <= delta
    assert float(exact_delta(mu * (1 + 1e-8), epsilon)) > delta


def test_the_two_inverses_agree_and_broadcast():
    mu = gaussian_mu(torch.tensor([0.1, 1.0, 10.0])[:, None], [1e-3, 1e-6])
    assert mu.shape == (3, 2) and mu.dtype == torch.float64
    again = gaussian_epsilon(mu, [1e-3, 1e-6])
    torch.testing.assert_close(
        again, torch.tensor([0.1, 1.0, 10.0]).double()[:, None].expand(3, 2), rtol=1e-7, atol=0
    )
    assert float(gaussian_mu(0, 0.5)) == pytest.approx(math.sqrt(8) * 0.4769362762044699, rel=1e-9)


@given(mu=st.floats(0.01, 20), epsilon=st.floats(0, 50), factor=st.floats(1.001, 5))
@settings(max_examples=100, deadline=None)
def test_delta_rises_with_the_sensitivity_and_falls_with_epsilon(mu, epsilon, factor):
    here = float(gaussian_delta(mu, epsilon))
    assert 0 <= here <= 1
    assert float(gaussian_delta(mu * factor, epsilon)) >= here * (1 - 1e-10)
    assert float(gaussian_delta(mu, epsilon * factor)) <= here * (1 + 1e-10)


def test_at_epsilon_zero_delta_is_the_total_variation():
    for mu in (1e-9, 0.3, 5.0):
        assert float(gaussian_delta(mu, 0.0)) == pytest.approx(
            math.erf(mu / math.sqrt(8)), rel=1e-12
        )


def test_the_ends_of_the_range():
    assert gaussian_delta([0.0, math.inf, 1.0, 0.0], [0.0, 5.0, math.inf, 3.0]).tolist() == [
        0,
        1,
        0,
        0,
    ]
    assert gaussian_epsilon([0.0, math.inf], 1e-5).tolist() == [0, math.inf]
    assert float(gaussian_epsilon(1e-300, 1e-5)) == 0
    assert float(gaussian_epsilon(1e4, 1e-5)) == pytest.approx(5e7 + 4.26489e4, rel=1e-6)


def test_shapes_broadcast_and_stay_where_they_are():
    mu = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float32)
    found = gaussian_delta(mu[:, None], torch.tensor([0.5, 1.0]))
    assert found.shape == (3, 2) and found.dtype == torch.float64 and found.device == mu.device
    assert float(found[1, 1]) == float(gaussian_delta(1.0, 1.0))
    assert (
        gaussian_epsilon(1.0, [1e-5, 1e-6]).shape == (2,)
        and gaussian_epsilon(torch.tensor(1.0), 1e-5).shape == ()
    )


def test_bad_arguments_are_refused_by_name():
    ratio = dict(sensitivity_over_sigma=1.0)
    refuses(gaussian_delta, dict(ratio, epsilon=1.0), sensitivity_over_sigma=[-1.0, math.nan])
    refuses(gaussian_delta, dict(ratio, epsilon=1.0), epsilon=[-0.1, [1.0, math.nan]])
    refuses(
        gaussian_epsilon,
        dict(ratio, delta=0.1),
        sensitivity_over_sigma=["x"],
        delta=[0.0, 1.0, math.nan],
    )
    refused("shapes that broadcast", gaussian_epsilon, [1.0, 2.0], [1e-5] * 3)
    refuses(gaussian_mu, dict(epsilon=1.0, delta=0.1), epsilon=[-1.0, math.inf], delta=[0.0])


def test_ratios_whose_square_swallows_the_rest_are_rounded_up():
    """From 1e17 on the end of the search was below the answer."""
    for mu in (1e16, 1e17, 1e18, 1e30, 1e150):
        assert gaussian_delta(mu, gaussian_epsilon(mu, 1e-5)) <= 1e-5
