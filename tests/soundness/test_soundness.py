"""A short seeded part of the trial; `make soundness` runs the whole."""

import importlib
import math

import pytest
from scipy import special

from dpcompanion.accounting import compute_epsilon

from . import PIECES
from .power import delta_at_zero_from_above, delta_from_below, verdict


@pytest.mark.parametrize("name", PIECES)
def test_no_case_of_the_short_part_is_a_violation(name, request):
    if name == "calculator":
        request.getfixturevalue("node")
    piece = importlib.import_module(f"{__package__}.{name}")
    answers = [piece.violations(case) for case in piece.cases(1, PIECES[name][1])]
    assert [line for lines in answers for line in lines or ()] == []


def test_the_oracle_tells_a_bound_that_is_too_small():
    """One percent less epsilon than the library's, and the oracle says so: the trial can fail."""
    for rate, noise, steps in ((0.01, 1.0, 1000), (0.3, 5.0, 1), (1.0, 10.0, 20), (1e-4, 0.5, 5000)):
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
        return special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)

    for rate, noise, epsilon in ((0.01, 0.8, 1.0), (0.5, 2.0, 0.3), (1e-4, 0.4, 2.0), (1.0, 1.0, 3.0)):
        exact = one_step(rate, noise, epsilon)
        assert 0.999 * exact < delta_from_below([(rate, noise, 1)], epsilon, True, exact) < (1 + 1e-9) * exact
    for noise, steps, epsilon in ((10.0, 20, 1.0), (3.0, 4000, 300.0)):
        exact = gaussian(math.sqrt(steps) / noise, epsilon)
        for remove in (True, False):
            found = delta_from_below([(1.0, noise, steps // 2)] * 2, epsilon, remove, exact)
            assert 0.999 * exact < found < (1 + 1e-9) * exact


def test_the_oracle_does_not_take_rounding_for_a_violation():
    """Close to the largest loss that adding can have, all of a tilted law lies where a transform has no digits."""
    rate, noise, steps = 0.031433717631103045, 3.8397518285455416, 5
    assert delta_from_below([(rate, noise, steps)], 0.1532, False, 1.6e-11) < 1.6e-11


def test_an_upper_end_at_zero_is_one():
    """Total variation of one step is the rate times that of two Gaussians."""
    for rate, noise in ((0.3, 1.0), (1e-3, 5.0)):
        exact = rate * (2 * special.ndtr(0.5 / noise) - 1)
        assert delta_at_zero_from_above([(rate, noise, 1)]) == pytest.approx(exact)
        assert delta_from_below([(rate, noise, 1)], 0.0, True, exact) == pytest.approx(exact, rel=1e-3)
