"""Levels of norms: the mixtures that stand for what lies between them."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.accounting.levels import Levels


def hockey_stick(rate, c, epsilon):
    """E over N(0, 1) of (density ratio - exp(epsilon))+, the example removed: from the place where
    the two meet.
    """
    inside = 1 + math.expm1(epsilon) / rate
    if inside <= 0:  # the ratio is always above
        return -math.expm1(epsilon)
    place = math.log(inside) / c + c / 2
    gaussian = stats.norm
    return (
        (1 - rate) * gaussian.sf(place)
        + rate * gaussian.sf(place - c)
        - math.exp(epsilon) * gaussian.sf(place)
    )


def test_the_divergence_that_the_tests_use_is_the_integral():
    for rate, c, epsilon in ((0.1, 1.0, 0.05), (0.3, 0.4, -0.1), (0.5, 2.0, 1.0)):

        def excess(t, rate=rate, c=c, epsilon=epsilon):
            ratio = 1 - rate + rate * math.exp(c * t - c**2 / 2)
            return stats.norm.pdf(t) * max(ratio - math.exp(epsilon), 0)

        assert hockey_stick(rate, c, epsilon) == pytest.approx(
            integrate.quad(excess, -12, 14, limit=400)[0], abs=1e-8
        )


@settings(max_examples=80, deadline=None)
@given(
    st.floats(0.001, 1.0),
    st.floats(0.05, 3.0),
    st.floats(1.001, 2.0),
    st.floats(0.0, 1.0),
    st.floats(-3.0, 6.0),
)
def test_a_mixture_of_two_nodes_is_no_less_revealing_than_what_lies_between_them(
    rate, low, factor, where, epsilon
):
    high = low * factor
    c = low + where * (high - low)
    levels = Levels.between([low, c, high], most=2)
    share = float(levels.share[1]) if levels.low[1] != levels.high[1] else float(levels.low[1])
    at_c, at_low, at_high = (hockey_stick(rate, value, epsilon) for value in (c, low, high))
    assert at_c <= (1 - share) * at_low + share * at_high + 1e-13


def test_the_share_is_the_least_that_serves():
    """At epsilon 0 the mixture gives away as much as the step."""
    levels = Levels.between([0.5, 0.8, 1.0], most=2)
    share = float(levels.share[1])
    mean = (1 - share) * hockey_stick(0.1, 0.5, 0.0) + share * hockey_stick(0.1, 1.0, 0.0)
    assert mean == pytest.approx(hockey_stick(0.1, 0.8, 0.0), rel=1e-9)


@pytest.mark.parametrize("largest, most", [(40.0, 64), (99.0, 64), (99.0, 512)])
def test_where_the_noise_is_small_no_weight_comes_out_too_small(largest, most):
    levels = torch.linspace(3.0, largest, 600, dtype=torch.float64)
    found = Levels.between(levels, most=most)
    with mpmath.workdps(60):
        for level, low, high, share in zip(levels, found.low, found.high, found.share):
            if low != high:
                tails = [
                    mpmath.erfc(mpmath.mpf(float(c)) / mpmath.sqrt(8))
                    for c in (level, *found.sensitivities[torch.stack([low, high])])
                ]
                exact = (tails[1] - tails[0]) / (tails[1] - tails[2])
                assert exact * (1 - mpmath.mpf(10) ** -11) <= float(share)
                # Far out the upper node stands for all.
                assert (
                    float(share) <= min(exact * (1 + 1e-8), 1) or float(share) == 1 and level > 72
                )


def test_means_of_logarithms_are_those_of_the_mixtures_infinities_included():
    levels = Levels.between([1.0, 1.5, 2.0], most=2)
    logs = torch.tensor([[0.0, 1.0, -math.inf], [2.0, math.inf, 0.0]], dtype=torch.float64)
    share = levels.share[1]
    expected = torch.log((1 - share) * torch.exp(logs[0]) + share * torch.exp(logs[1]))
    found = levels.blend(logs)
    torch.testing.assert_close(found[1], expected)
    assert torch.equal(found[0], logs[0]) and torch.equal(found[2], logs[1])


@pytest.mark.parametrize("rate, noise, steps", [(0.01, 1.0, 20), (0.1, 0.5, 1), (0.3, 4.0, 50)])
@pytest.mark.slow
def test_many_levels_are_bounds_close_to_those_with_each_discretised(
    rate, noise, steps, monkeypatch
):
    shares = torch.linspace(0.02, 1, 150, dtype=torch.float64)
    counts = steps * (torch.rand(6, 150, generator=torch.Generator().manual_seed(0)) < 0.3).long()
    given = dict(sample_rate=rate, noise_multipliers=noise / shares, delta=1e-5)
    found = epsilon_of_histories(counts, **given)
    monkeypatch.setattr("dpcompanion.accounting.histories.MOST_LEVELS", 150)
    exact = epsilon_of_histories(counts, **given)
    assert not torch.equal(found, exact)
    assert (found >= exact * (1 - 2e-4)).all() and (found <= exact * 1.002).all()
