"""A short seeded part of the trial; `make soundness` runs the whole."""

import importlib

import pytest

from dpcompanion.accounting import compute_epsilon

from . import PIECES
from .inversion import delta


@pytest.mark.parametrize("name", PIECES)
def test_no_case_of_the_short_part_is_a_violation(name, request):
    if name == "calculator":
        request.getfixturevalue("node")
    piece = importlib.import_module(f"{__package__}.{name}")
    answers = [piece.violations(case) for case in piece.cases(1, PIECES[name][1])]
    assert [line for lines in answers for line in lines or ()] == []


def test_the_oracle_tells_a_bound_that_is_too_small():
    """One percent less epsilon than the library's, and the inversion says so: the trial can fail."""
    for rate, noise, steps in ((0.01, 1.0, 1000), (0.3, 5.0, 1), (1.0, 10.0, 20)):
        epsilon = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=1e-6)
        exact, less = (delta([(rate, noise, steps)], epsilon * share, True) for share in (1, 0.99))
        assert 0.99e-6 < exact <= 1e-6 * (1 + 1e-6) and less > 1.02e-6
