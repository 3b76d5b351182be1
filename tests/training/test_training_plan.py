import math

import pytest
import torch

from dpcompanion import accounting
from dpcompanion.training import DPSGDPlan

GOOD = dict(n=10, sample_rate=0.5, steps=20, max_grad_norm=2.0, noise_multiplier=1.5, delta=1e-5)


@pytest.mark.parametrize("change", [
    {"n": 0}, {"n": 2.5}, {"sample_rate": 0.0}, {"sample_rate": 1.1}, {"sample_rate": [0.5] * 9}, {"steps": -1},
    {"sample_rate": float("nan")}, {"max_grad_norm": 0.0}, {"max_grad_norm": float("inf")},
    {"max_grad_norm": [1.0] * 11}, {"max_grad_norm": torch.ones(10, 1)}, {"noise_multiplier": -1.0},
    {"noise_multiplier": [1.0] * 10},
    {"noise_multiplier": float("nan")}, {"delta": 0.0}, {"delta": 1.0}, {"delta": [0.1]}])
def test_a_bad_argument_is_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        DPSGDPlan(**{**GOOD, **change})


def test_the_normaliser_is_the_sum_of_the_rates():
    assert DPSGDPlan(**GOOD).expected_batch_size == 5.0
    rates = torch.linspace(0.1, 1, 10)
    plan = DPSGDPlan(**{**GOOD, "sample_rate": rates})
    assert plan.expected_batch_size == pytest.approx(5.5)
    assert plan.steps_per_epoch == 2


def test_one_number_of_noise_is_the_multiplier_times_the_mean_clip_norm():
    assert DPSGDPlan(**GOOD).noise_std == 3.0
    norms = torch.linspace(0.5, 1.5, 10)
    plan = DPSGDPlan(**{**GOOD, "max_grad_norm": norms})
    assert plan.noise_std == pytest.approx(1.5)
    torch.testing.assert_close(plan.effective_noise_multiplier, 1.5 / norms.double())


def test_epsilon_is_that_of_the_accounting_for_each_pair_of_rate_and_norm():
    rates, norms = torch.tensor([0.1, 0.1, 0.3, 0.3]).double(), torch.tensor([1.0, 2.0, 1.0, 2.0]).double()
    plan = DPSGDPlan(n=4, sample_rate=rates, steps=10, max_grad_norm=norms, noise_multiplier=2.0, delta=1e-5)
    epsilons = plan.epsilon(steps=7, accountant="rdp")
    assert epsilons.shape == (4,) and epsilons.dtype == torch.float64
    for epsilon, rate, norm in zip(epsilons.tolist(), rates.tolist(), norms.tolist()):
        assert epsilon == pytest.approx(accounting.compute_epsilon(
            sample_rate=rate, noise_multiplier=3.0 / norm, steps=7, delta=1e-5, accountant="rdp"), rel=1e-12)


def test_each_distinct_pair_is_accounted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(accounting, "compute_epsilon", lambda **arguments: calls.append(arguments) or 1.0)
    plan = DPSGDPlan(**{**GOOD, "n": 1000, "sample_rate": torch.tensor([0.1, 0.2]).repeat(500)})
    assert plan.epsilon().shape == (1000,)
    assert len(calls) == 2


def test_no_noise_costs_everything_and_no_step_costs_nothing():
    assert DPSGDPlan(**{**GOOD, "noise_multiplier": 0.0}).epsilon() == math.inf
    assert DPSGDPlan(**GOOD).epsilon(steps=0) == 0.0


@pytest.mark.parametrize("arguments", [{"steps": 21}, {"delta": 0.0}, {"accountant": "gdp"}])
def test_epsilon_refuses_what_the_plan_does_not_do(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DPSGDPlan(**GOOD).epsilon(**arguments)


def test_a_calibrated_plan_meets_its_target():
    plan = DPSGDPlan.for_epsilon(1.0, n=500, sample_rate=0.1, steps=50, max_grad_norm=1.0, delta=1e-4, accountant="rdp")
    assert 0.999 < plan.epsilon(accountant="rdp") <= 1.0
    with pytest.raises(ValueError, match="sample_rate"):
        DPSGDPlan.for_epsilon(1.0, n=2, sample_rate=[0.1, 0.2], steps=5, max_grad_norm=1.0, delta=1e-4)


def test_a_plan_keeps_its_own_copy_of_the_rates_and_cannot_be_changed():
    rates = torch.full((10,), 0.5)
    plan = DPSGDPlan(**{**GOOD, "sample_rate": rates})
    rates.fill_(1.0)
    assert plan.expected_batch_size == 5.0
    with pytest.raises(AttributeError):
        plan.delta = 0.5


def test_configs_tell_plans_apart():
    assert DPSGDPlan(**GOOD).config() == DPSGDPlan(**GOOD).config()
    one, other = (DPSGDPlan(**{**GOOD, "sample_rate": torch.tensor([a, b] * 5)}) for a, b in ((0.1, 0.2), (0.2, 0.1)))
    assert one.config() != other.config()
