"""The Rényi filter: budgets are never exceeded, nobody comes back, and the whole adaptive run keeps
to them.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import find_steps, rdp_sampled_gaussian
from dpcompanion.accounting.rdp_interpolation import interpolate, interpolation_table
from dpcompanion.filters import RenyiFilter
from dpcompanion.training import Callbacks, DPSGDPlan, NormTracker, cross_entropy, train

from ..refusals import refused, refuses

RUN = dict(sample_rate=0.1, noise_multiplier=2.0, max_grad_norm=0.5)


def exact(norm, orders, run=RUN):
    """The divergence of a step at this norm."""
    return rdp_sampled_gaussian(
        sample_rate=run["sample_rate"],
        orders=orders,
        noise_multiplier=run["noise_multiplier"] * run["max_grad_norm"] / norm,
    )


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        dict(sample_rate=1.0, noise_multiplier=10.0, max_grad_norm=1.0),
        dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=2.0),
    ],
)
@pytest.mark.parametrize("epsilon", [2.0, 3.0])
def test_at_the_full_norm_the_filter_stops_after_as_many_steps_as_find_steps_says(run, epsilon):
    steps = find_steps(
        target_epsilon=epsilon,
        target_delta=1e-5,
        accountant="rdp",
        sample_rate=run["sample_rate"],
        noise_multiplier=run["noise_multiplier"],
    )
    filter = RenyiFilter.for_epsilon(2, target_epsilons=epsilon, target_delta=1e-5, **run)
    admitted = [bool(filter.admit([run["max_grad_norm"]] * 2).all()) for _ in range(steps + 3)]
    assert admitted == [True] * steps + [False] * 3


def test_norms_that_float32_rounded_up_pay_the_full_share_and_longer_ones_are_refused():
    run = dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.1)
    rounded, full = (
        RenyiFilter.for_epsilon(2, target_epsilons=2.0, target_delta=1e-5, **run) for _ in range(2)
    )
    norms = torch.tensor([3.0, 0.2]).clamp(max=0.1)
    assert norms.double().max() > 0.1  # float32's 0.1
    assert rounded.admit(norms).all() and full.admit([0.1, 0.1]).all()
    assert torch.equal(rounded.spent, full.spent)
    refused("norms", full.admit, [0.10001, 0.1])


NORMS = st.lists(st.floats(1e-6, 0.5) | st.just(0.0), min_size=3, max_size=3)


def test_a_run_clips_to_the_norm_that_was_charged_and_not_to_what_float32_made_of_it():
    budget = RenyiFilter(1, orders=[8.0], budgets=1.0, **RUN)
    (norm,) = budget.clip_norms(torch.tensor([0.5 * (1 + 9e-7)], dtype=torch.float32)).tolist()
    assert norm == RUN["max_grad_norm"]


@given(
    st.lists(NORMS, min_size=1, max_size=60), st.sampled_from([2, 3.7, 16]), st.floats(1e-3, 0.1)
)
@settings(max_examples=40, deadline=None)
def test_no_budget_is_exceeded_and_inactive_examples_stay_inactive(history, order, budget):
    filter = RenyiFilter(3, **RUN, orders=order, budgets=budget)
    truth, before = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    for norms in history:
        stays = filter.admit(norms)
        for i in range(3):
            if stays[i] and norms[i] > 0:
                truth[i] += exact(norms[i], [order])[0]
            # with this step it would have exceeded, but for the chord's hair
            elif before[i] and not stays[i]:
                assert truth[i] + exact(norms[i], [order])[0] > budget * (1 - 2e-3)
        assert (
            not (stays & ~before).any()
            and (truth <= budget).all()
            and (filter.spent <= budget).all()
        )
        assert (filter.spent[:, 0] >= truth * (1 - 1e-12)).all()
        before = stays


def test_a_curve_of_budgets_holds_at_every_order():
    orders, steps = [2.0, 5.5, 20.0], 40
    budgets = steps * exact(0.5, orders)
    filter = RenyiFilter(3, **RUN, orders=orders, budgets=budgets)
    norms = torch.tensor([0.5, 0.2, 0.01], dtype=torch.float64)
    admitted = sum(filter.admit(norms).int() for _ in range(300)).tolist()
    assert 39 <= admitted[0] <= 40  # a hair of the chord may cost the last step
    assert admitted[2] == 300 and 40 * 2 < admitted[1] < 300
    for i in range(3):
        assert (admitted[i] * exact(float(norms[i]), orders) <= budgets).all()


def adaptive_divergence(order, budget, direction, run, points=161):
    """Divergence between three adaptive, filtered steps with and without an example, by quadrature.

    The example's norm at steps two and three depends on the outputs before; each admitted step is
    (1 - q) N(0, s^2) + q N(c, s^2) against N(0, s^2).
    """
    q, c = run["sample_rate"], run["max_grad_norm"]
    s = run["noise_multiplier"] * c
    grid = torch.linspace(-9 * s, 9 * s + c, points, dtype=torch.float64)
    width = float(grid[1] - grid[0])

    def densities(norm):
        without = torch.exp(-(grid**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
        moved = torch.exp(-((grid - norm) ** 2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
        return (1 - q) * without + q * moved, without

    def integrand(norm):
        with_, without = densities(norm)
        p, r = (with_, without) if direction == "remove" else (without, with_)
        return p**order * r ** (1 - order) * width

    def moment(step, outputs, filter):
        if step == 3:
            return 1.0
        norm = c if step == 0 else (c if sum(outputs) > 0.3 * c else 0.35 * c)
        copy = RenyiFilter(1, **run, orders=order, budgets=budget)
        copy.load_state_dict(filter.state_dict())
        if not copy.admit([norm])[0]:
            norm = 0.0
        values = integrand(norm) if norm else densities(0.0)[0] * width
        if step == 2:
            return float(values.sum())
        # Later norms depend on whether the outputs add up to more than a threshold: few distinct
        # futures.
        cache, total = {}, 0.0
        for output, value in zip(grid.tolist(), values.tolist()):
            future = outputs + [output]
            key = tuple(future) if step == 0 else sum(future) > 0.3 * c
            if key not in cache:
                cache[key] = moment(step + 1, future, copy)
            total += value * cache[key]
        return total

    return math.log(moment(0, [], RenyiFilter(1, **run, orders=order, budgets=budget))) / (
        order - 1
    )


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("sample_rate", [0.4, 1.0])
def test_the_whole_adaptive_run_keeps_to_the_budget(direction, sample_rate):
    run = dict(sample_rate=sample_rate, noise_multiplier=1.5, max_grad_norm=1.0)
    order = 3
    one = float(exact(1.0, [order], run)[0])
    budget = 2.2 * one  # two steps at the full norm, or one and two short ones
    divergence = adaptive_divergence(order, budget, direction, run)
    assert divergence <= budget
    if direction == "remove":
        assert divergence > 1.5 * one  # the bound is not vacuous
    assert adaptive_divergence(order, 100 * one, direction, run) > divergence


def test_budgets_differ_between_examples_and_are_their_guarantee():
    targets = torch.tensor([1.0, 2.0, 4.0, 2.0])
    filter = RenyiFilter.for_epsilon(4, target_epsilons=targets, target_delta=1e-5, **RUN)
    assert (
        torch.allclose(filter.epsilon(1e-5), targets.double(), rtol=1e-6)
        and (filter.epsilon(1e-5) <= targets).all()
    )
    admitted = sum(filter.admit([0.5] * 4).int() for _ in range(300)).tolist()
    assert admitted[0] < admitted[1] == admitted[3] < admitted[2]
    assert admitted == [
        find_steps(
            target_epsilon=e,
            target_delta=1e-5,
            sample_rate=0.1,
            noise_multiplier=2.0,
            accountant="rdp",
        )
        for e in targets.tolist()
    ]
    at_order = RenyiFilter.for_epsilon(2, target_epsilons=2.0, target_delta=1e-5, order=16, **RUN)
    assert at_order.orders.tolist() == [16.0] and (at_order.epsilon(1e-5) <= 2).all()


def test_chords_lie_above_the_divergence_by_little():
    orders, table = interpolation_table(0.02, 0.9, (1.5, 2, 8.5, 64))
    shares = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).clamp(
        min=0.01
    )
    exact_ = rdp_sampled_gaussian(sample_rate=0.02, noise_multiplier=0.9 / shares, orders=orders)
    ratio = interpolate(shares, table) / exact_
    assert (ratio >= 1).all() and (ratio[:, :3] <= 1.001).all() and ratio.max() < 1.01


def test_training_leaves_out_examples_whose_budget_is_spent():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (80,), generator=generator)
    x = torch.randn(80, 3, dtype=torch.float64, generator=generator) + y[:, None]
    plan = DPSGDPlan(
        n=80, sample_rate=0.2, steps=30, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-3
    )
    model = torch.nn.Linear(3, 2).double()

    def filtered():
        filter = RenyiFilter.for_epsilon(
            80,
            target_epsilons=1.5,
            target_delta=1e-3,
            sample_rate=0.2,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
        )
        options = {"rounding": None, "accountant": "rdp", "clipping": "individual"}
        return filter, NormTracker.for_plan(
            plan, model, cross_entropy, (x, y), updates_per_epoch=5, budget=filter, **options
        )

    filter, tracker = filtered()
    present = []

    def check(run):
        assert filter.active[run.indices].all()
        present.append(int(filter.active.sum()))

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
    assert present[0] == 80 > present[-1] > 0 and present == sorted(present, reverse=True)
    assert (tracker.epsilon(1e-3) <= 1.5).all() and plan.epsilon(accountant="rdp") > 1.7
    _, fresh = filtered()
    fresh.load_state_dict(tracker.state_dict())
    assert torch.equal(fresh.budget.active, filter.active) and torch.equal(
        fresh.epsilon(1e-3), tracker.epsilon(1e-3)
    )


def test_a_state_that_no_filter_can_have_is_refused():
    filter = RenyiFilter(2, **RUN, orders=4, budgets=0.1)
    spent, active = (filter.state_dict()[name] for name in ("spent", "active"))
    spoilt = {"spent": [spent - 5, spent + 1, spent * math.nan, spent[:1], spent.float()]}
    for name, values in {**spoilt, "active": [active[:1], active.double()]}.items():
        for value in values:
            refused(f"state.*{name}", filter.load_state_dict, {**filter.state_dict(), name: value})
    assert filter.spent.eq(0).all() and filter.active.all()


def test_bad_parameters_are_refused_by_name():
    numbers = dict(
        n=[0],
        sample_rate=[0.0],
        noise_multiplier=[0.0],
        max_grad_norm=[math.inf],
        orders=[1.0, [2, 2]],
    )
    refuses(
        RenyiFilter,
        dict(n=3, orders=4, budgets=0.1, **RUN),
        **numbers,
        budgets=[0.0, math.inf, [0.1, 0.2]],
    )
    target = dict(n=2, target_epsilons=1.0, target_delta=1e-5, **RUN)
    refuses(RenyiFilter.for_epsilon, target, noise_multiplier=["1", 0.0], sample_rate=["0.1"])
    refuses(RenyiFilter.for_epsilon, target, target_epsilons=[1e-9, [1.0, 2.0, 3.0]])


def test_bad_norms_and_states_are_refused():
    filter = RenyiFilter(2, **RUN, orders=4, budgets=0.1)
    refuses(filter.admit, {}, norms=[[0.1], [0.6, 0.1], [-0.1, 0.1], [math.nan, 0.1]])
    assert (filter.spent == 0).all() and filter.active.all()
    refused(
        "state", filter.load_state_dict, RenyiFilter(2, **RUN, orders=5, budgets=0.1).state_dict()
    )
    refused(
        "same budgets",
        filter.load_state_dict,
        RenyiFilter(2, **RUN, orders=4, budgets=0.2).state_dict(),
    )
    plan = DPSGDPlan(
        n=2, sample_rate=0.1, steps=9, max_grad_norm=0.5, noise_multiplier=2.0, delta=1e-3
    )
    with pytest.raises(ValueError, match="budget needs"):
        data = torch.ones(2, 1), torch.tensor([0, 1])
        NormTracker.for_plan(plan, torch.nn.Linear(1, 2), cross_entropy, data, budget=filter)


def test_an_incomplete_state_is_refused_and_admissions_are_copies():
    filter = RenyiFilter(2, **RUN, orders=[4.0], budgets=[[1e-9], [1.0]])
    assert filter.admit([0.5, 0.5]).logical_not_().tolist() == [
        True,
        False,
    ] and filter.active.tolist() == [False, True]
    state = filter.state_dict()
    for name in state:
        for change in (
            {**state, name: None},
            {key: value for key, value in state.items() if key != name},
        ):
            refused(f"state.*({name}|filter)", filter.load_state_dict, change)


def test_attributes_are_copies_so_that_a_caller_restores_no_budget():
    filter, untouched = (RenyiFilter(2, **RUN, orders=[2, 8], budgets=0.1) for _ in range(2))
    for _ in range(3):
        filter.admit([0.5, 0.1])
        untouched.admit([0.5, 0.1])
        for part in (filter.spent, filter.budgets, filter.active, filter.orders):
            part.zero_()
        filter.active.fill_(True)
    for name in ("spent", "budgets", "active", "orders"):
        assert torch.equal(getattr(filter, name), getattr(untouched, name))
        with pytest.raises(AttributeError):
            setattr(filter, name, getattr(filter, name))
    assert torch.equal(filter.epsilon(1e-5), untouched.epsilon(1e-5))


def test_norms_in_float32_of_numpy_are_taken_and_none_that_is_complex_or_keeps_a_graph():
    budget = dict(target_epsilons=1.0, target_delta=1e-5)
    filter = RenyiFilter.for_epsilon(2, **budget, **RUN)
    clipped = np.minimum(np.array([0.7, 0.1], dtype=np.float32), np.float32(0.1 * 5))
    assert filter.clip_norms(clipped)[0] == 0.5
    third = RUN | {"max_grad_norm": 0.1}  # whose float32 is above it
    filter = RenyiFilter.for_epsilon(2, **budget, **third)
    assert filter.clip_norms(np.array([0.1, 0.05], dtype=np.float32))[0] == 0.1
    filter.clip_norms(torch.tensor([0.1, 0.05], requires_grad=True))
    assert not filter.spent.requires_grad
    with pytest.raises(ValueError, match="norms"):
        filter.clip_norms(torch.tensor([0.05 + 5j, 0.01]))
