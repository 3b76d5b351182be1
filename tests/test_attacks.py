"""Lower bounds from counted guesses."""

import math

import pytest
import torch
from scipy import stats

from dpcompanion.accounting import gaussian_epsilon
from dpcompanion.attacks import clopper_pearson, epsilon_lower_bound, mu_lower_bound


@pytest.mark.parametrize("successes,trials", [(0, 10), (3, 10), (10, 10), (1, 100000)])
def test_the_interval_is_that_of_the_exact_binomial_test(successes, trials):
    lower, upper = clopper_pearson(successes, trials, confidence=0.975)
    exact = stats.binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="exact")
    assert lower.item() == pytest.approx(exact.low) and upper.item() == pytest.approx(exact.high)


def test_randomised_response_is_not_accused_more_often_than_the_confidence_allows():
    epsilon, trials, generator = 1.0, 200, torch.Generator().manual_seed(0)
    tell = math.exp(epsilon) / (1 + math.exp(epsilon))
    right = torch.rand(4000, trials, generator=generator).lt(tell).sum(1)
    wrong = torch.rand(4000, trials, generator=generator).lt(1 - tell).sum(1)
    counts = dict(true_positives=right, positives=trials, false_positives=wrong, negatives=trials)
    accused = (epsilon_lower_bound(**counts, delta=0.0, confidence=0.9) > epsilon).double().mean()
    assert accused <= 0.1
    assert epsilon_lower_bound(**counts, delta=0.0, confidence=0.9).median() > 0.5 * epsilon


def test_a_gaussian_mechanism_is_bounded_below_its_mu_and_close_to_it():
    mu, trials, generator = 1.5, 20000, torch.Generator().manual_seed(1)
    right = int(torch.randn(trials, generator=generator).add(mu).gt(mu / 2).sum())
    wrong = int(torch.randn(trials, generator=generator).gt(mu / 2).sum())
    counts = dict(true_positives=right, positives=trials, false_positives=wrong, negatives=trials)
    assert 0.93 * mu < mu_lower_bound(**counts) < mu
    assert epsilon_lower_bound(**counts, delta=1e-5) < gaussian_epsilon(mu, 1e-5)


def test_both_directions_count():
    counts = dict(true_positives=999, positives=1000, false_positives=500, negatives=1000, delta=0.0)
    mirrored = dict(true_positives=500, positives=1000, false_positives=1, negatives=1000, delta=0.0)
    assert epsilon_lower_bound(**counts) == pytest.approx(epsilon_lower_bound(**mirrored).item())
    assert epsilon_lower_bound(**counts) > math.log(999 / 500)


def test_chance_refutes_nothing():
    counts = dict(true_positives=50, positives=100, false_positives=50, negatives=100)
    assert epsilon_lower_bound(**counts, delta=1e-5) == 0 and mu_lower_bound(**counts) == 0


@pytest.mark.parametrize("change,said", [
    (dict(true_positives=11), "successes must be whole numbers between 0 and the trials"),
    (dict(false_positives=0.5), "successes must be whole numbers"),
    (dict(positives=0), "trials must lie in"),
    (dict(delta=1.0), "delta must lie in"),
    (dict(confidence=1.0), "confidence must lie in"),
])
def test_bad_counts_are_refused(change, said):
    given = dict(true_positives=1, positives=10, false_positives=1, negatives=10, delta=0.0)
    with pytest.raises(ValueError, match=said):
        epsilon_lower_bound(**{**given, **change})
