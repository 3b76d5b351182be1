"""The exact filter: nobody spends more than their budget, the promise is the target, and it works
in training.
"""

import copy
import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import compute_epsilon, find_steps
from dpcompanion.filters import (
    ExactFilter,
    RenyiFilter,
    adaptive_delta,
    calibrate_filter,
    level_costs,
)
from dpcompanion.training import Callbacks, DPSGDPlan, NormTracker, cross_entropy, train

from ..refusals import refused, refuses

RUN = dict(sample_rate=0.1, noise_multiplier=2.0)
LEVELS = [0.25, 0.5, 1.0]
FILTER = dict(RUN, max_grad_norm=0.5, levels=LEVELS, costs=[1, 4, 16], steps=100)


@given(
    st.lists(
        st.lists(st.floats(0, 2) | st.just(0.0), min_size=3, max_size=3), min_size=1, max_size=30
    ),
    st.integers(1, 3),
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_no_budget_is_exceeded_and_examples_stay_active_while_budget_is_left(
    history, block, budgets
):
    filter = ExactFilter(3, **FILTER, budget=budgets, block=block)
    cost = {0.0: 0, 0.125: 1, 0.25: 4, 0.5: 16}
    spent, limits = [0, 0, 0], None
    for step, norms in enumerate(history):
        left = [budget - used for budget, used in zip(budgets, spent)]
        before, limits = limits, filter.clip_norms(norms).tolist()
        if step % block:
            assert limits == before  # a level holds for its block
            continue
        for i, (norm, limit) in enumerate(zip(norms, limits)):
            spent[i] += cost[limit]
            asked = next((z for z in cost if z >= norm), 0.5)
            payable = [z for z in cost if z <= asked and cost[z] <= left[i]]
            assert limit == max(payable) and spent[i] <= budgets[i]
        assert filter.spent.tolist() == spent
        assert filter.active.tolist() == [used < budget for used, budget in zip(spent, budgets)]


def test_levels_are_recorded_at_what_they_cost_and_refused_where_they_cannot_be_paid():
    filter = ExactFilter(2, **FILTER, budget=20, block=5)
    levels = filter.levels_for([0.2, 9.0])
    assert levels.tolist() == [0.25, 0.5] and filter.spent.tolist() == [0, 0]
    filter.record(levels, steps=3)  # a block that is begun is paid
    assert filter.spent.tolist() == [4, 16]
    refused("1 cannot", filter.record, levels, steps=5)
    refused("levels", filter.record, [0.3, 0.0], steps=5)
    filter.record([0.25, 0.0], steps=20)
    assert filter.spent.tolist() == [20, 16] and filter.active.tolist() == [False, True]
    assert filter.levels_for([0.2, math.inf]).tolist() == [0.0, 0.25]
    for shown in (filter.spent, filter.budget):  # copies: nobody gets a budget back
        shown.zero_()
    assert filter.spent.tolist() == [20, 16] and filter.budget.tolist() == [20, 20]


@pytest.mark.slow
def test_the_budget_is_the_largest_that_keeps_the_target_and_about_that_of_the_plain_account():
    levels, target = (0.25, 0.5, 1.0), dict(target_epsilon=1.0, target_delta=1e-5)
    found = calibrate_filter(
        **target, **RUN, levels=levels, costs=[1, 4, 17], steps=10_000, block=5
    )
    game = dict(RUN, levels=levels, costs=found.costs, block=5)
    assert found.delta <= 1e-5 and adaptive_delta(
        **game, budget=found.budget, epsilon=1.0
    ) == pytest.approx(found.delta, rel=0.05)
    assert adaptive_delta(**game, budget=found.budget + 17, epsilon=1.0) > 1e-5
    plain = find_steps(**target, **RUN)
    renyi = find_steps(**target, **RUN, accountant="rdp")
    assert 5 * (found.budget // 17) <= plain and 5 * found.budget / 17 > renyi
    assert (
        calibrate_filter(**target, **RUN, levels=levels, costs=[1, 4, 17], steps=10, block=5).budget
        == 2 * 17
    )


def test_the_least_noise_keeps_the_target_and_a_little_less_does_not():
    target = dict(target_epsilon=2.0, target_delta=1e-5)
    found = calibrate_filter(
        **target, sample_rate=0.1, levels=[0.5, 1.0], costs=[1, 5], steps=20, budget=100
    )
    game = dict(sample_rate=0.1, levels=[0.5, 1.0], costs=[1, 5], budget=100, epsilon=2.0)
    assert (
        found.budget == 100
        and adaptive_delta(noise_multiplier=found.noise_multiplier, **game) <= 1e-5
    )
    assert adaptive_delta(noise_multiplier=found.noise_multiplier * 0.99, **game) > 1e-5
    assert (
        compute_epsilon(
            sample_rate=0.1, noise_multiplier=found.noise_multiplier, steps=20, delta=1e-5
        )
        <= 2.0
    )


def test_default_costs_make_no_level_a_bargain():
    run = dict(sample_rate=512 / 60_000, noise_multiplier=3.425, steps=9375, block=39)
    costs = level_costs(LEVELS, target_epsilon=1.0, target_delta=1e-5, **run)
    assert costs == tuple(sorted(costs)) and costs[0] >= 1
    # With strong noise a step costs as much as the square of its norm, a little more at full
    # length.
    for cost, level in zip(costs, LEVELS):
        assert 0.9 < cost / costs[-1] / level**2 < 1.15
    assert sum(240 * c for c in costs[-1:]) <= 24_000


@pytest.mark.slow
def test_promises_differ_between_people_and_thresholds_below_the_budget_have_smaller_ones():
    targets = torch.tensor([1.0, 2.0, 1.0])
    filter = ExactFilter(3, **FILTER, target_epsilon=targets, target_delta=1e-5, block=5)
    assert filter.epsilon(1e-5).tolist() == [1.0, 2.0, 1.0]
    assert filter.budget[0] == filter.budget[2] < filter.budget[1]
    looser = filter.epsilon(1e-6)
    assert (looser > filter.epsilon(1e-5)).all()
    threshold = int(filter.budget[0]) // 2
    little = filter.epsilon(1e-5, spent=threshold)
    assert (
        (little < 0.9).all()
        and little[0] == little[1]
        and filter.epsilon(1e-5, spent=0).tolist() == [0.0] * 3
    )
    assert (
        adaptive_delta(
            **RUN,
            levels=LEVELS,
            costs=filter.costs,
            budget=threshold,
            epsilon=float(little[0]),
            block=5,
        )
        <= 1e-5
    )
    plain = ExactFilter(2, **FILTER, budget=32)
    constant = compute_epsilon(**RUN, steps=2, delta=1e-5)
    assert constant * 0.999 <= float(plain.epsilon(1e-5)[0]) <= 1.15 * constant


def test_limits_that_a_caller_changes_are_not_those_of_the_next_step():
    filter = ExactFilter(2, **FILTER, budget=20, block=3)
    first = filter.clip_norms([0.4, 0.1])
    first += 9
    assert filter.clip_norms([0.0, 0.0]).tolist() == [0.5, 0.125] and filter.spent.tolist() == [
        16,
        1,
    ]
    other = ExactFilter(2, **FILTER, budget=20, block=3)
    other.clip_norms([0.1, 0.1])
    other.load_state_dict(filter.state_dict())
    assert other.clip_norms([0.0, 0.0]).tolist() == [0.5, 0.125]


def test_states_go_on_and_foreign_ones_are_refused():
    filter, other = (ExactFilter(2, **FILTER, budget=[20, 40], block=3) for _ in range(2))
    filter.clip_norms([0.4, 0.1])
    filter.clip_norms([0.4, 0.1])
    other.load_state_dict(filter.state_dict())
    assert torch.equal(other.clip_norms([0.0, 0.4]), filter.clip_norms([0.0, 0.4]))
    assert torch.equal(other.clip_norms([0.0, 0.4]), filter.clip_norms([0.0, 0.4]))
    assert torch.equal(other.spent, filter.spent) and filter.spent.tolist() == [16, 17]
    for change, words in (
        (dict(budget=[20, 41]), "same budgets"),
        (dict(max_grad_norm=1.0), "filter with"),
    ):
        with pytest.raises(ValueError, match=words):
            ExactFilter(2, **{**FILTER, "budget": [20, 40], "block": 3, **change}).load_state_dict(
                filter.state_dict()
            )
    for name, value in (
        ("spent", torch.tensor([21, 0])),
        ("spent", torch.tensor([-1, 0])),
        ("spent", torch.zeros(3)),
        ("current", torch.tensor([4, 0])),
        # less than the levels of the block that is under way cost
        ("spent", torch.zeros(2, dtype=torch.int64)),
        ("steps_left", 3),
    ):
        refused(
            "state|current|steps_left", other.load_state_dict, {**filter.state_dict(), name: value}
        )


def test_bad_parameters_are_refused_by_name():
    good = dict(FILTER, n=2, budget=20)
    numbers = dict(
        n=[0, 10**12],
        steps=[0],
        block=[0],
        max_grad_norm=[0.0],
        sample_rate=[1.5],
        noise_multiplier=[0.0],
    )
    refuses(ExactFilter, good, **numbers, levels=[[0.5, 2.0], [1.0, 0.5, 0.2]])
    refuses(ExactFilter, good, costs=[[1, 2], [0, 4, 16], [1, 4.5, 16], [1, 4, 2**70], None])
    refuses(ExactFilter, good, budget=[None, [3, 4, 5], 2.5], target_epsilon=[1.0])
    refuses(ExactFilter, dict(good, costs=[4, 8, 16]), budget=[[3, 20]])
    target = dict(FILTER, n=2, target_epsilon=1.0, target_delta=1e-5)
    refuses(ExactFilter, dict(target, target_delta=1e-9), target_epsilon=[1e-6, -1.0, 1e300])
    refuses(ExactFilter, target, target_delta=[None])


def test_bad_norms_and_calls_are_refused():
    filter = ExactFilter(2, **FILTER, budget=20)
    refuses(filter.clip_norms, {}, norms=[[0.1], [-0.1, 0.1], [math.nan, 0.1], "a", None])
    refuses(filter.record, dict(levels=LEVELS[:2], steps=1), levels=["a", None], steps=["a", 1e300])
    assert (filter.spent == 0).all()
    within = ExactFilter(2, **FILTER | {"steps": 5}, budget=20, block=4)
    for _ in range(7):  # within blocks, and beyond the last step
        within.clip_norms([0.1, 0.1])
        spent = within.spent
        refuses(within.clip_norms, {}, norms=[[0.1], [-0.1, 0.1], [math.nan, 0.1], "a"])
        assert torch.equal(within.spent, spent)
    refuses(filter.epsilon, dict(delta=0.1), delta=[1.0], spent=[1e300, "a"])
    given = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, levels=LEVELS, steps=9)
    refused("exactly one", calibrate_filter, **given)
    refuses(calibrate_filter, dict(given, budget=3), costs=[None])


@pytest.mark.slow
def test_training_clips_each_example_to_the_largest_affordable_level():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (80,), generator=generator)
    x = torch.randn(80, 3, dtype=torch.float64, generator=generator) + y[:, None]
    plan = DPSGDPlan(
        n=80, sample_rate=0.2, steps=30, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-3
    )
    model = torch.nn.Linear(3, 2).double()

    def filtered():
        filter = ExactFilter(
            80,
            sample_rate=0.2,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            levels=[0.25, 0.5, 1.0],
            target_epsilon=1.5,
            target_delta=1e-3,
            steps=30,
            block=2,
        )
        options = {"rounding": None, "accountant": "rdp", "clipping": "individual"}
        return filter, NormTracker.for_plan(
            plan, model, cross_entropy, (x, y), updates_per_epoch=2, budget=filter, **options
        )

    filter, tracker = filtered()
    norms = torch.tensor([0, *filter.levels], dtype=torch.float64)
    active, shortened = [], []

    def check(run):
        limits = norms[filter.state_dict()["current"][run.indices].long()]
        assert (limits > 0).all() and (filter.spent <= filter.budget).all()
        shortened.append(int((run.norms > limits).sum()))
        active.append(int(filter.active.sum()))

    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        seed=1,
        trackers=[tracker],
        callbacks=Callbacks(on_step=check),
    )
    assert (
        active[0] == 80 > active[-1]
        and active == sorted(active, reverse=True)
        and sum(shortened) > 0
    )
    # Everybody's account along the run, and their promise, which holds for every run.
    assert (filter.epsilon(1e-3) == 1.5).all() and plan.epsilon() > 1.5
    _, fresh = filtered()
    fresh.load_state_dict(tracker.state_dict())
    assert torch.equal(fresh.budget.spent, filter.spent) and torch.equal(
        fresh.epsilon(1e-3), tracker.epsilon(1e-3)
    )


def test_no_digit_of_a_budget_is_lost():
    """A list of floats became single precision, and 2^24 + 3 one more."""
    filter = ExactFilter(2, **FILTER, budget=[2.0**24 + 3, 2.0**53 - 1])
    assert filter.budget.tolist() == [2**24 + 3, 2**53 - 1]


def test_more_steps_than_64_bits_hold_are_not_paid_with_less_than_nothing():
    """The price of 2^61 steps at a level that costs 8 wrapped around to 0."""
    filter = ExactFilter(1, **{**FILTER, "costs": [1, 4, 8]}, budget=[20])
    for norms, steps in (
        [[0.5], 2**61],
        [[0.5], 2**60],
        [[0.1], 2**63],
        [[0.5], 10**30],
        [[0.5], 3],
    ):
        refused("cannot|steps", filter.record, filter.levels_for(norms), steps=steps)
    refused("steps", filter.record, [0.5], steps=10**400)
    assert filter.spent.tolist() == [0]
    filter.record([0.5], steps=2)
    assert filter.spent.tolist() == [16]
    refused("costs", ExactFilter, 1, **{**FILTER, "costs": [1, 4, 2**70]}, budget=[20])


def test_an_incomplete_state_is_refused():
    filter = ExactFilter(1, **FILTER, budget=[20])
    state = filter.state_dict()
    for name in state:
        for change in (
            {**state, name: None},
            {key: value for key, value in state.items() if key != name},
        ):
            refused(
                name if name == "steps_left" else f"state must .*({name}|filter)",
                filter.load_state_dict,
                change,
            )


SHORT = DPSGDPlan(
    n=4, sample_rate=0.1, steps=60, max_grad_norm=2.0, noise_multiplier=1.5, delta=1e-5
)


@pytest.mark.slow
def test_a_filter_of_a_plan_serves_each_budget_as_a_filter_of_that_budget_alone_would():
    """Costs were made for the largest target: people with 3 beside people with 8 could spend 1.89
    of their 3.
    """
    own = dict(levels=[0.5, 1.0], block=5, progress=False)
    filter = ExactFilter.for_plan(SHORT, {1.0: 0.5, 2.5: 0.5}, **own)
    assert (
        filter.epsilon(1e-5).tolist()
        == SHORT.budgets({1.0: 0.5, 2.5: 0.5}).tolist()
        == [2.5, 2.5, 1.0, 1.0]
    )
    assert (filter.sample_rate, filter.noise_multiplier, filter.max_grad_norm, filter.steps) == (
        0.1,
        1.5,
        2.0,
        60,
    )
    for target, who in ((2.5, 0), (1.0, 2)):
        alone = ExactFilter.for_plan(SHORT, target, **own)
        assert (filter.costs[who], filter.budget[who]) == (alone.costs, alone.budget[0])
        game = dict(sample_rate=0.1, noise_multiplier=1.5, levels=own["levels"], block=5)
        assert (
            adaptive_delta(**game, costs=alone.costs, budget=int(alone.budget[0]), epsilon=target)
            <= 1e-5
        )
    other = ExactFilter.for_plan(SHORT, [2.5, 2.5, 1.0, 1.0], **own)
    filter.clip_norms([2.0, 0.7, 2.0, 0.7])
    other.load_state_dict(filter.state_dict())
    assert torch.equal(other.spent, filter.spent) and torch.equal(
        other.clip_norms([0.0] * 4), filter.clip_norms([0.0] * 4)
    )
    with pytest.raises(ValueError, match="state"):
        ExactFilter.for_plan(SHORT, [2.5, 1.0, 2.5, 1.0], **own).load_state_dict(
            filter.state_dict()
        )


@functools.cache
def mixed():
    return ExactFilter.for_plan(
        SHORT, [1.0, 2.5, 1.0, 2.5], levels=[0.5, 1.0], block=5, progress=False
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(0, 3), min_size=4, max_size=4), min_size=1, max_size=60))
def test_no_budget_is_exceeded_where_costs_differ_between_examples(norms):
    filter = copy.deepcopy(mixed())
    prices = [{0.0: 0, 1.0: low, 2.0: full} for low, full in filter.costs]
    assert prices[0] != prices[1]
    paid = [0] * 4
    for step, row in enumerate(norms):
        limits = filter.clip_norms(row).tolist()
        if step % 5 == 0:
            paid = [before + price[limit] for before, price, limit in zip(paid, prices, limits)]
        assert filter.spent.tolist() == paid and bool((filter.spent <= filter.budget).all())


@pytest.mark.parametrize("make", [ExactFilter.for_plan, RenyiFilter.for_plan])
def test_a_plan_that_no_filter_fits_is_refused_by_name(make):
    refused("sample_rate", make, dataclasses.replace(SHORT, sample_rate=[0.1, 0.2, 0.1, 0.2]), 1.0)
    refused("arithmetic", make, dataclasses.replace(SHORT, arithmetic="float", parameters=3), 1.0)
    refused("noise_multiplier", make, dataclasses.replace(SHORT, noise_multiplier=0.0), 1.0)
    refused("target_epsilons", make, SHORT, {1.0: 0.5, 2.0: 0.6})


def test_given_costs_apply_to_all_examples():
    filter = ExactFilter.for_plan(
        SHORT, [1.0, 2.5, 1.0, 2.5], levels=[0.5, 1.0], costs=[1, 4], block=5, progress=False
    )
    assert filter.costs == (1, 4) and filter.state_dict()["parameters"]["costs"] == [1, 4]
    assert filter.budget[0] == filter.budget[2] < filter.budget[1] == filter.budget[3]


def test_a_renyi_filter_of_a_plan_is_the_one_of_its_numbers():
    ours = RenyiFilter.for_plan(SHORT, [1.0, 2.0, 1.0, 2.0])
    theirs = RenyiFilter.for_epsilon(
        4,
        target_epsilons=[1.0, 2.0, 1.0, 2.0],
        target_delta=1e-5,
        sample_rate=0.1,
        noise_multiplier=1.5,
        max_grad_norm=2.0,
    )
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.budgets, theirs.budgets)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_next_to_no_noise_nobody_at_one_level_spends_more_than_the_target(monkeypatch):
    monkeypatch.setenv("DPCOMPANION_FILTERS", "anew")
    run = dict(sample_rate=1.0, noise_multiplier=1e-3)
    filter = ExactFilter(
        1, **run, max_grad_norm=1.0, levels=LEVELS, target_epsilon=5e6, target_delta=1e-5, steps=10
    )
    budget = int(filter.budget[0])
    assert budget > 0
    for level, cost in zip(LEVELS, filter.costs):
        alone = dict(run, noise_multiplier=1e-3 / level, steps=budget // cost)
        assert compute_epsilon(**alone, delta=1e-5) <= 5e6
