import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion import accounting, idp
from dpcompanion.accounting import (
    compute_delta,
    compute_epsilon,
    find_noise_multiplier,
    find_sample_rate,
)
from dpcompanion.idp.groups import Groups

from .refusals import refused, refuses

# By RDP, the fast one, where a test does not say otherwise.
RUN = {"target_delta": 1e-5, "sample_rate": 1 / 49, "steps": 490, "accountant": "rdp"}


def epsilon(accountant="rdp", **changes):
    run = {**RUN, **changes, "accountant": accountant}
    return compute_epsilon(delta=run.pop("target_delta"), **run)


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
    plain = find_noise_multiplier(target_epsilon=2.0, **RUN)
    sample = idp.sample_parameters(budgets, counts, **RUN)
    scale = idp.scale_parameters(budgets, counts, max_grad_norm=1.0, **RUN)
    assert sample.noise_multiplier == pytest.approx(plain, rel=1e-3)
    assert sample.sample_rates.tolist() == pytest.approx(
        [RUN["sample_rate"]] * len(counts), rel=1e-9
    )
    assert scale.noise_multiplier == pytest.approx(plain, rel=5e-5)
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
    for budget, rate, noise in zip(
        budgets, sample.sample_rates.tolist(), scale.noise_multipliers.tolist()
    ):
        assert epsilon(sample_rate=rate, noise_multiplier=sample.noise_multiplier) <= budget
        assert epsilon(noise_multiplier=noise) <= budget


def pairs(found, run=RUN):
    """The rate and noise multiplier of each group."""
    rates = getattr(found, "sample_rates", None)
    noises = getattr(found, "noise_multipliers", None)
    count = len(noises if rates is None else rates)
    return list(
        zip(
            [run["sample_rate"]] * count if rates is None else rates.tolist(),
            [found.noise_multiplier] * count if noises is None else noises.tolist(),
        )
    )


def by_every_method(budgets, counts, accountant="rdp", weight=0.5):
    return [
        idp.sample_parameters(budgets, counts, **{**RUN, "accountant": accountant}),
        idp.scale_parameters(
            budgets, counts, max_grad_norm=1.0, **{**RUN, "accountant": accountant}
        ),
        idp.combined_parameters(
            budgets,
            counts,
            max_grad_norm=1.0,
            sample_weight=weight,
            **{**RUN, "accountant": accountant},
        ),
    ]


@settings(max_examples=2, deadline=None)
@given(
    low=st.floats(0.3, 2), span=st.floats(1.1, 3), weight=st.floats(0, 1), seed=st.integers(0, 99)
)
@pytest.mark.slow
def test_of_thousands_of_different_budgets_none_is_exceeded_and_none_wasted(
    low, span, weight, seed
):
    generator = torch.Generator().manual_seed(seed)
    budgets = low * span ** torch.rand(1000, dtype=torch.float64, generator=generator)
    for found in by_every_method(budgets, torch.ones(1000), weight=weight):
        chosen = torch.randint(1000, (4,), generator=generator).tolist() + [
            int(budgets.argmin()),
            int(budgets.argmax()),
        ]
        for index in chosen:
            rate, noise = pairs(found)[index]
            spent = epsilon(sample_rate=rate, noise_multiplier=noise)
            assert 0.9985 * budgets[index] <= spent <= budgets[index]


@pytest.mark.slow
@settings(max_examples=1, deadline=None)
@given(low=st.floats(0.5, 2), seed=st.integers(0, 99))
def test_by_loss_distributions_no_budget_is_exceeded_either_and_less_noise_does(low, seed):
    budgets = low * torch.logspace(0, 0.06, 50, base=10, dtype=torch.float64)
    for method, options in (
        (idp.sample_parameters, {}),
        (idp.scale_parameters, {"max_grad_norm": 1.0}),
    ):
        found, rdp = (
            method(budgets, torch.ones(50), **options, **RUN | {"accountant": by})
            for by in ("pld", "rdp")
        )
        assert found.noise_multiplier < 0.99 * rdp.noise_multiplier
        for index in torch.randint(
            50, (4,), generator=torch.Generator().manual_seed(seed)
        ).tolist():
            rate, noise = pairs(found)[index]
            spent = epsilon("pld", sample_rate=rate, noise_multiplier=noise)
            assert 0.998 * budgets[index] <= spent <= budgets[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "budgets, run",
    [
        ([1.0, 3.0, 8.0], {"target_delta": 1e-5, "sample_rate": 0.02, "steps": 100}),
        ([0.001, 100.0], {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}),
        ([1.0, 3.0], {"target_delta": 0.5, "sample_rate": 0.01, "steps": 1000}),
    ],
)
def test_a_search_on_coarse_grids_ends_where_fine_ones_and_dp_accounting_say_so(budgets, run):
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that somebody is hardly drawn
        found = idp.sample_parameters(budgets, **run)
    assert float(found.sample_rates.mean()) == pytest.approx(run["sample_rate"], rel=1e-9)
    delta, steps = run["target_delta"], run["steps"]
    for budget, rate in zip(budgets, found.sample_rates.tolist()):
        own = {"sample_rate": rate, "noise_multiplier": found.noise_multiplier, "steps": steps}
        assert 0.9985 * budget - 2e-6 <= compute_epsilon(**own, delta=delta) <= budget
        theirs = from_gaussian_mechanism(
            found.noise_multiplier, sampling_prob=rate, value_discretization_interval=1e-3
        ).self_compose(steps)
        if budget > 0.1:  # below, their grid is all that they see
            assert theirs.get_epsilon_for_delta(delta) == pytest.approx(budget, rel=5e-3)


@pytest.mark.parametrize(
    "budgets, run, most",
    [
        ([1.0, 2.0, 3.0], {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 10_000}, 60),
        # refused, and taken below
        ([1.0, 1e4], {"target_delta": 1e-5, "sample_rate": 0.9, "steps": 100}, 60),
        # epsilon jumps over 1e-3
        ([1e-3, 1e4], {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}, 60),
    ],
)
@pytest.mark.slow
def test_budgets_far_apart_take_few_loss_distributions(monkeypatch, budgets, run, most):
    looked, inside = [], accounting.pld.epsilon
    monkeypatch.setattr(
        accounting.pld, "epsilon", lambda **options: looked.append(options) or inside(**options)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if run["sample_rate"] == 0.9:
            refused(
                r"target_epsilons must not exceed 1\.2[67]", idp.sample_parameters, budgets, **run
            )
            assert len(looked) <= most
            budgets = [1.0, 1.26]
            del looked[:]
        found = idp.sample_parameters(budgets, **run)
    assert len(looked) <= most and sum(options.get("coarse", 1) == 1 for options in looked) <= 12
    assert float(found.sample_rates.mean()) == pytest.approx(run["sample_rate"], rel=1e-9)
    own = {
        "noise_multiplier": found.noise_multiplier,
        "steps": run["steps"],
        "delta": run["target_delta"],
    }
    for budget, rate in zip(budgets, found.sample_rates.tolist()):
        assert compute_epsilon(sample_rate=rate, **own) <= budget
    if budgets[0] == 1e-3:  # a rate more than this costs over a hundred
        least = found.sample_rates[0].item()
        assert (
            compute_epsilon(sample_rate=least, **own) == 0
            and compute_epsilon(sample_rate=least * 1.001, **own) > 90
        )


def test_a_coarse_grid_is_an_upper_bound_too():
    run = {"sample_rate": 0.02, "noise_multiplier": 0.8, "steps": 300, "delta": 1e-5}
    fine, coarse = accounting.pld.epsilon(**run), accounting.pld.epsilon(**run, coarse=10.0)
    assert fine <= coarse <= 1.01 * fine
    assert accounting.pld.epsilon(**run, near=1.3 * fine) == pytest.approx(fine, rel=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_groups_found_side_by_side_are_those_found_one_at_a_time(accountant):
    budgets = [0.7, 2.5]
    found = idp.scale_parameters(
        budgets, [1] * 2, max_grad_norm=1.0, **{**RUN, "accountant": accountant}
    )
    alone = [
        find_noise_multiplier(target_epsilon=budget, **{**RUN, "accountant": accountant})
        for budget in budgets
    ]
    assert found.noise_multipliers.tolist() == pytest.approx(
        alone, rel=1.5e-4 if accountant == "pld" else 8e-5
    )
    sample = idp.sample_parameters(budgets, [1] * 2, **{**RUN, "accountant": accountant})
    rates = [
        find_sample_rate(
            target_epsilon=budget,
            target_delta=1e-5,
            noise_multiplier=sample.noise_multiplier,
            steps=490,
            accountant=accountant,
        )
        for budget in budgets
    ]
    assert sample.sample_rates.tolist() == pytest.approx(rates, rel=6e-4)


@pytest.mark.slow
def test_many_different_budgets_give_what_a_few_groups_with_nearly_those_budgets_give():
    budgets = torch.linspace(1, 3, 5000, dtype=torch.float64)
    coarse = torch.linspace(1, 3, 61, dtype=torch.float64)
    weights = torch.tensor([0.5] + [1.0] * 59 + [0.5])
    for method, options in (
        (idp.sample_parameters, {}),
        (idp.scale_parameters, {"max_grad_norm": 1.0}),
    ):
        many = method(budgets, torch.ones(5000), **options, **RUN)
        few = method(coarse, weights, **options, **RUN)
        assert many.noise_multiplier == pytest.approx(few.noise_multiplier, rel=3e-4)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 8), st.floats(0.05, 1)), min_size=1, max_size=3),
    st.floats(0, 1),
)
def test_both_at_once_keeps_mean_rate_mean_norm_and_every_budget(groups, weight):
    budgets, shares = zip(*groups)
    found = idp.combined_parameters(budgets, shares, max_grad_norm=0.7, sample_weight=weight, **RUN)
    weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    assert float(weights @ found.sample_rates) == pytest.approx(RUN["sample_rate"], rel=1e-9)
    assert float(weights @ found.max_grad_norms) == pytest.approx(0.7, rel=1e-9)
    for budget, rate, norm in zip(
        budgets, found.sample_rates.tolist(), found.max_grad_norms.tolist()
    ):
        # The noise that training adds, in units of the group's own clip norm, at the group's own
        # rate.
        spent = epsilon(
            sample_rate=rate, noise_multiplier=found.noise_multiplier * 0.7 / norm * (1 + 1e-12)
        )
        assert 0.999 * budget <= spent <= budget


def test_the_ends_of_both_at_once_are_scale_and_sample():
    budgets, counts = [1.0, 2.0, 3.0], [54, 37, 9]
    sample = idp.sample_parameters(budgets, counts, **RUN)
    scale = idp.scale_parameters(budgets, counts, max_grad_norm=0.4, **RUN)
    only_scale, only_sample = (
        idp.combined_parameters(budgets, counts, max_grad_norm=0.4, sample_weight=weight, **RUN)
        for weight in (0, 1)
    )
    assert only_scale.noise_multiplier == scale.noise_multiplier
    assert torch.equal(only_scale.max_grad_norms, scale.max_grad_norms)
    assert torch.equal(
        only_scale.sample_rates, torch.full((3,), RUN["sample_rate"], dtype=torch.float64)
    )
    assert only_sample.noise_multiplier == pytest.approx(sample.noise_multiplier, rel=1e-12)
    assert torch.equal(only_sample.sample_rates, sample.sample_rates)
    assert only_sample.max_grad_norms.tolist() == pytest.approx([0.4] * 3, rel=1e-12)


@pytest.mark.slow
def test_a_budget_that_no_rate_uses_up_is_refused_and_the_largest_one_that_is_used_up_is_named():
    with pytest.raises(ValueError, match="must not exceed") as refusal:
        idp.sample_parameters([1.0, 1e5], [99, 1], **RUN)
    largest = float(str(refusal.value).split("exceed ")[1].split()[0])
    found = idp.sample_parameters([1.0, largest], [99, 1], **RUN)
    assert 0.97 < found.sample_rates[1] <= 1
    refused("must not exceed", idp.sample_parameters, [1.0, 1.02 * largest], [99, 1], **RUN)


def test_full_batches_leave_no_room_for_a_larger_rate():
    refused(
        "must not exceed 1 here",
        idp.sample_parameters,
        [1.0, 2.0],
        [1, 1],
        **{**RUN, "sample_rate": 1.0},
    )


def test_counts_may_be_counts_or_shares():
    counts, shares = (
        idp.scale_parameters([1.0, 2.0], weights, max_grad_norm=1.0, **RUN)
        for weights in ([300, 700], torch.tensor([0.3, 0.7]))
    )
    assert counts.noise_multiplier == pytest.approx(shares.noise_multiplier, rel=1e-6)


@pytest.mark.parametrize(
    "method, extra", [(idp.sample_parameters, {}), (idp.scale_parameters, {"max_grad_norm": 1.0})]
)
def test_bad_arguments_are_refused_by_name(method, extra):
    good = dict(target_epsilons=[1.0, 2.0], counts=[1, 1], **RUN, **extra)
    refuses(method, good, target_epsilons=[[1.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
    refuses(method, good, counts=[[1], [1, 0], [1, -1]])
    refuses(method, dict(good, counts=[]), target_epsilons=[[]])
    refuses(method, good, sample_rate=[0.0, 1.5], steps=[0], target_delta=[0.0], accountant=["gdp"])
    if extra:
        refuses(method, good, max_grad_norm=[0.0, -1.0, math.nan, math.inf])
        refuses(idp.combined_parameters, good, sample_weight=[-0.1, 1.1, math.nan])
    else:
        refuses(
            method,
            good,
            noise_range=[
                (2.0, 1.0),
                (0.0, 1.0),
                (1.0, math.inf),
                1.0,
                (1.0,),
                (1.0, math.nan),
                "ab",
            ],
        )
        # A budget that the noise of the range cannot keep.
        refuses(method, dict(good, noise_range=(0.02, 0.02)), target_epsilons=[[0.01, 2.0]])


@pytest.mark.parametrize("budgets", [0.0, [0.0, 1.0], {0.0: 0.5, 1.0: 0.5}])
def test_whoever_opts_out_is_left_out_of_the_data(budgets):
    words = r"target_epsilons must lie in \(0, inf\), got 0: .* count only the others in n"
    refused(words, idp.budgets_for, budgets, 2)
    refused(words, idp.sample_parameters, budgets, **RUN)


def test_a_budget_near_zero_beside_a_large_one_is_searched():
    """The orders that decide lie far apart: between them there was once no order left to look
    at.
    """
    budgets = [1e-4, 1.0]
    found = idp.sample_parameters(
        budgets, [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000, accountant="rdp"
    )
    assert found.sample_rates.mean().item() == pytest.approx(0.01)
    for rate, budget in zip(found.sample_rates.tolist(), budgets):
        assert (
            compute_epsilon(
                sample_rate=rate,
                noise_multiplier=found.noise_multiplier,
                steps=1000,
                delta=1e-5,
                accountant="rdp",
            )
            <= budget
        )


@pytest.mark.parametrize("top", [2.0, 1000.0])
def test_a_million_budgets_are_rounded_down_to_few(top):
    budgets = torch.linspace(1, top, 1_000_000, dtype=torch.float64)
    groups = Groups(budgets, torch.ones(len(budgets)))
    stand_in = groups.budgets[groups.which]
    assert len(groups.budgets) < 30_000 and float(groups.weights.sum()) == pytest.approx(1)
    assert bool((stand_in <= budgets).all()) and bool((stand_in >= (1 - 5.01e-4) * budgets).all())


OTHERS = [
    ([1.0], [1]),
    ([1.0, 0.2], [1, 99]),
    ([1.0, 8.0], [1, 99]),
    ([1.0, 0.5, 3.0], [5, 60, 35]),
]


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_scale_parameters_of_a_group_do_not_depend_on_other_budgets(accountant):
    mine = [
        idp.scale_parameters(*others, max_grad_norm=1.0, **{**RUN, "accountant": accountant})
        .noise_multipliers[0]
        .item()
        for others in OTHERS[1:]
    ]
    assert mine == pytest.approx([mine[0]] * 3, rel=5e-4)
    moved = [
        idp.sample_parameters(*others, **{**RUN, "accountant": accountant}).noise_multiplier
        for others in OTHERS[1:]
    ]
    assert max(moved) > 1.5 * min(moved)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_with_fixed_noise_sample_rates_depend_on_the_own_budget_only(accountant):
    alone = find_sample_rate(
        target_epsilon=1.0,
        noise_multiplier=1.5,
        steps=490,
        target_delta=1e-5,
        accountant=accountant,
    )
    for others in OTHERS:
        found = idp.sample_parameters(
            *others, noise_range=(1.5, 1.5), **{**RUN, "accountant": accountant}
        )
        assert found.noise_multiplier == 1.5
        assert found.sample_rates[0].item() == pytest.approx(alone, rel=2e-3)


@pytest.mark.slow
def test_within_a_range_budgets_hold_and_the_advantage_has_a_cap():
    def advantage(rate, noise):
        return compute_delta(sample_rate=rate, noise_multiplier=noise, steps=490, epsilon=0.0)

    low, high = 0.9, 1.6
    ends = [
        find_sample_rate(
            target_epsilon=1.0,
            noise_multiplier=noise,
            steps=490,
            target_delta=1e-5,
            accountant="rdp",
        )
        for noise in (low, high)
    ]
    cap, bound = advantage(ends[1], high), []
    for others in OTHERS:
        free = idp.sample_parameters(*others, **RUN)
        found = idp.sample_parameters(*others, noise_range=(low, high), **RUN)
        assert low <= found.noise_multiplier <= high
        assert found.noise_multiplier == min(max(free.noise_multiplier, low), high)
        for budget, rate in zip(others[0], found.sample_rates.tolist()):
            assert (
                0.998 * budget
                <= epsilon(sample_rate=rate, noise_multiplier=found.noise_multiplier)
                <= budget
            )
        assert advantage(float(found.sample_rates[0]), found.noise_multiplier) <= cap * (1 + 1e-3)
        bound.append(advantage(float(free.sample_rates[0]), free.noise_multiplier) > cap * 1.02)
        mean = float(torch.tensor(others[1], dtype=torch.float64) @ found.sample_rates) / sum(
            others[1]
        )
        if low < free.noise_multiplier < high:
            assert mean == pytest.approx(RUN["sample_rate"], rel=1e-9)
        else:
            assert (mean < RUN["sample_rate"]) == (free.noise_multiplier > high)
    assert any(bound)  # without a range some exceed it


def test_a_rate_of_one_may_leave_a_budget_over():
    found = idp.sample_parameters([1.0, 50.0], [1, 1], noise_range=(30.0, 30.0), **RUN)
    assert found.sample_rates[1] == 1.0 and epsilon(sample_rate=1.0, noise_multiplier=30.0) < 50


@pytest.mark.slow
def test_budgets_far_apart_are_answered_for_at_the_orders_that_count(monkeypatch):
    """An order beyond 1024 next to little noise decides nothing; there, one look took half a
    minute.
    """
    looks, divergence = [], accounting.rdp_sampled_gaussian

    def noted(*, sample_rate, noise_multiplier, orders):
        looks.append((float(orders.max()), float(noise_multiplier.min())))
        assert looks[-1][0] <= max(1024, 32 * looks[-1][1])
        return divergence(sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=orders)

    monkeypatch.setattr(accounting, "rdp_sampled_gaussian", noted)
    run = RUN | {"sample_rate": 0.1, "steps": 100, "max_grad_norm": 1.0, "sample_weight": 0.5}
    found = idp.combined_parameters([1e-3, 1e3], [1, 1], **run)
    assert float(found.sample_rates.mean()) == pytest.approx(0.1)
    assert any(order > 1024 for order, _ in looks)
    refused("target_epsilons", idp.combined_parameters, [1e-3, 1e4], [1, 1], **run)


def test_a_budget_whose_rate_is_tiny_gets_a_warning():
    run = RUN | {"sample_rate": 0.01, "steps": 1000}
    with pytest.warns(UserWarning, match="budget of 1 "):
        idp.sample_parameters([100.0, 1.0], [50, 50], **run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idp.sample_parameters([1.0, 8.0], [50, 50], **run)


def test_budgets_are_one_number_one_for_each_or_shares():
    run = RUN | {"sample_rate": 0.02, "steps": 200, "max_grad_norm": 1.0}
    shares, groups = (
        idp.scale_parameters({1.0: 0.2, 3.0: 0.8}, **run),
        idp.scale_parameters([1.0, 3.0], [1, 4], **run),
    )
    assert shares.noise_multiplier == groups.noise_multiplier
    assert torch.equal(shares.max_grad_norms, groups.max_grad_norms)
    one = idp.scale_parameters(2.0, **run).noise_multiplier
    assert (
        compute_epsilon(
            sample_rate=0.02, noise_multiplier=one, steps=200, delta=1e-5, accountant="rdp"
        )
        <= 2.0
    )
    dealt = idp.budgets_for({1.0: 0.2, 3.0: 0.5, 8.0: 0.3}, 11)
    assert sorted(dealt.tolist()) == [1.0] * 2 + [3.0] * 6 + [8.0] * 3 and dealt.tolist() != sorted(
        dealt.tolist()
    )
    assert torch.equal(dealt, idp.budgets_for({1.0: 0.2, 3.0: 0.5, 8.0: 0.3}, 11))
    for wrong in (
        {1.0: 0.5},
        {0.0: 1.0},
        {},
        {1.0: 1.5, 2.0: -0.5},
        [1.0, 2.0],
        0.0,
        "3",
        [1.0] * 3 + [math.nan],
    ):
        refused("target_epsilons", idp.budgets_for, wrong, 4)
    refused("counts", idp.scale_parameters, {1.0: 1.0}, [3], **run)


def test_by_default_budgets_are_met_and_stated_by_one_accountant():
    """RDP was the default of the search and PLD that of the statement: a budget of 1 read 0.902."""
    run = {"target_delta": 1e-5, "sample_rate": 0.05, "steps": 100}
    found = idp.scale_parameters([1.0, 3.0], [1, 1], max_grad_norm=1.0, **run)
    for budget, noise in zip((1.0, 3.0), found.noise_multipliers.tolist()):
        stated = compute_epsilon(sample_rate=0.05, noise_multiplier=noise, steps=100, delta=1e-5)
        assert 0.998 * budget <= stated <= budget
