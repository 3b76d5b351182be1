import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion import idp
from dpcompanion.accounting import compute_epsilon, find_noise_multiplier

RUN = {"target_delta": 1e-5, "sample_rate": 1 / 49, "steps": 490}


def epsilon(**changes):
    run = {**RUN, **changes}
    return compute_epsilon(delta=run.pop("target_delta"), accountant="rdp", **run)


def test_sample_spends_each_budget_and_keeps_the_mean_rate():
    budgets, counts = [1.0, 2.0, 3.0], [340, 430, 230]
    found = idp.sample_parameters(budgets, counts, **RUN)
    shares = torch.tensor(counts, dtype=torch.float64) / 1000
    assert float(shares @ found.sample_rates) == pytest.approx(RUN["sample_rate"], rel=1e-9)
    for budget, rate in zip(budgets, found.sample_rates.tolist()):
        spent = epsilon(sample_rate=rate, noise_multiplier=found.noise_multiplier)
        assert 0.998 * budget <= spent <= budget


def test_scale_spends_each_budget_and_keeps_the_mean_clip_norm():
    budgets, counts = [1.0, 2.0, 3.0], [54, 37, 9]
    found = idp.scale_parameters(budgets, counts, max_grad_norm=0.4, **RUN)
    shares = torch.tensor(counts, dtype=torch.float64) / 100
    assert float(shares @ found.max_grad_norms) == pytest.approx(0.4, rel=1e-12)
    for budget, norm in zip(budgets, found.max_grad_norms.tolist()):
        # The noise that training adds, in units of the group's own clip norm.
        effective = found.noise_multiplier * 0.4 / norm
        assert 0.998 * budget <= epsilon(noise_multiplier=effective) <= budget


@pytest.mark.parametrize("budgets, counts", [([2.0], [1]), ([2.0, 2.0], [1, 3])])
def test_one_budget_for_all_is_plain_dp_sgd(budgets, counts):
    plain = find_noise_multiplier(target_epsilon=2.0, accountant="rdp", **RUN)
    sample = idp.sample_parameters(budgets, counts, **RUN)
    scale = idp.scale_parameters(budgets, counts, max_grad_norm=1.0, **RUN)
    assert sample.noise_multiplier == pytest.approx(plain, rel=1e-3)
    assert sample.sample_rates.tolist() == pytest.approx([RUN["sample_rate"]] * len(counts), rel=1e-9)
    assert scale.noise_multiplier == pytest.approx(plain, rel=1e-9)
    assert scale.max_grad_norms.tolist() == pytest.approx([1.0] * len(counts), rel=1e-9)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 8), st.floats(0.05, 1)), min_size=1, max_size=3))
def test_no_group_exceeds_its_budget_whatever_the_groups(groups):
    budgets, shares = zip(*groups)
    sample = idp.sample_parameters(budgets, shares, **RUN)
    scale = idp.scale_parameters(budgets, shares, max_grad_norm=1.0, **RUN)
    weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    assert float(weights @ sample.sample_rates) == pytest.approx(RUN["sample_rate"], rel=1e-6)
    assert float(weights @ scale.max_grad_norms) == pytest.approx(1.0, rel=1e-6)
    for budget, rate, noise in zip(budgets, sample.sample_rates.tolist(), scale.noise_multipliers.tolist()):
        assert epsilon(sample_rate=rate, noise_multiplier=sample.noise_multiplier) <= budget
        assert epsilon(noise_multiplier=noise) <= budget


def test_counts_may_be_counts_or_shares():
    counts, shares = (idp.scale_parameters([1.0, 2.0], weights, max_grad_norm=1.0, **RUN)
                      for weights in ([300, 700], torch.tensor([0.3, 0.7])))
    assert counts.noise_multiplier == pytest.approx(shares.noise_multiplier, rel=1e-6)


@pytest.mark.parametrize("budgets, counts, message", [
    ([], [], "target_epsilons must be a list with one entry"), ([1.0, 0.0], [1, 1], "target_epsilons must lie in"),
    ([1.0, math.nan], [1, 1], "target_epsilons must lie in"), ([1.0, math.inf], [1, 1], "target_epsilons must lie in"),
    ([1.0, 2.0], [1], "must have the same length"), ([1.0, 2.0], [1, 0], "counts must lie in"),
    ([1.0, 2.0], [1, -1], "counts must lie in"), (1.0, 1, "target_epsilons must be a list"),
])
@pytest.mark.parametrize("method", [idp.sample_parameters, idp.scale_parameters])
def test_bad_groups_are_refused_by_name(method, budgets, counts, message):
    extra = {"max_grad_norm": 1.0} if method is idp.scale_parameters else {}
    with pytest.raises(ValueError, match=message):
        method(budgets, counts, **RUN, **extra)


@pytest.mark.parametrize("change, message", [
    ({"sample_rate": 0.0}, "sample_rate must lie in"), ({"sample_rate": 1.5}, "sample_rate must lie in"),
    ({"steps": 0}, "steps must"), ({"target_delta": 0.0}, "target_delta must lie in"),
    ({"accountant": "gdp"}, "accountant must be one of"),
])
@pytest.mark.parametrize("method", [idp.sample_parameters, idp.scale_parameters])
def test_a_bad_run_is_refused_by_name(method, change, message):
    extra = {"max_grad_norm": 1.0} if method is idp.scale_parameters else {}
    with pytest.raises(ValueError, match=message):
        method([1.0, 2.0], [1, 1], **{**RUN, **change}, **extra)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_clip_norm_is_refused_by_name(norm):
    with pytest.raises(ValueError, match="max_grad_norm must lie in"):
        idp.scale_parameters([1.0], [1], max_grad_norm=norm, **RUN)
