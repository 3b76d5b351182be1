"""Accounts for each example: bounds, exactness, state, and bad input."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import compute_epsilon, rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.accounting.rdp_interpolation import interpolate, interpolation_table, rdp_of_shares
from dpcompanion.accounting.runs import orders_for
from dpcompanion.individual import IndividualAccountant, divergences
from dpcompanion.individual.divergences import Divergences
from dpcompanion.individual.levels import finest_levels
from dpcompanion.training import DPSGDPlan

from .refusals import refused, refuses

RUN = dict(sample_rate=0.02, noise_multiplier=1.5, max_grad_norm=0.7)
MODES = [
    dict(rounding=0.01, accountant="rdp"),
    dict(rounding=None, accountant="rdp"),
    dict(rounding=0.01, accountant="pld"),
]
ALL_MODES = [*MODES, dict(rounding=None, accountant="pld")]
# by loss distributions takes seconds
BY_RENYI_FIRST = [*MODES[:2], pytest.param(MODES[2], marks=pytest.mark.slow)]


def history(n, updates, seed=0):
    """Norms that differ between examples and over time, some above the clip norm, some zero."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.rand(n, generator=generator, dtype=torch.float64) ** 2
    noise = torch.randn(updates, n, generator=generator, dtype=torch.float64)
    norms = level * torch.exp(0.4 * noise)
    return norms * (torch.rand(updates, n, generator=generator) > 0.05)


def recorded(norms, steps=3, **mode):
    accountant = IndividualAccountant(norms.shape[1], **{**RUN, **mode})
    for update in norms:
        accountant.record(update, steps=steps)
    return accountant


@st.composite
def charges(draw, n=5):
    """Charges of some of n examples each: (examples, norms, steps of each)."""
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        examples = draw(st.lists(st.integers(0, n - 1), max_size=7))
        norms = draw(st.lists(st.floats(0, 1), min_size=len(examples), max_size=len(examples)))
        steps = draw(st.lists(st.integers(0, 40), min_size=len(examples), max_size=len(examples)))
        parts.append(
            (
                examples,
                torch.tensor(norms, dtype=torch.float64),
                torch.tensor(steps, dtype=torch.int64),
            )
        )
    return parts


def direct(norms, steps, delta):
    """RDP epsilon of each example by summing the divergences of its own, unrounded norms."""
    orders = orders_for(1000 * RUN["noise_multiplier"])
    epsilons = []
    for column in norms.T:
        share = (column / RUN["max_grad_norm"]).clamp(max=1)
        share = share[share > 0]
        rdp = steps * rdp_sampled_gaussian(
            sample_rate=RUN["sample_rate"],
            noise_multiplier=RUN["noise_multiplier"] / share,
            orders=[order for order in orders if order <= 1024],
        ).sum(dim=0)
        epsilons.append(rdp_to_epsilon(rdp, [order for order in orders if order <= 1024], delta)[0])
    return torch.stack(epsilons)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_gradients_at_the_clip_norm_cost_what_the_worst_case_costs(mode):
    accountant = IndividualAccountant(2, **{**RUN, **mode})
    accountant.record([RUN["max_grad_norm"], 100.0], steps=400)
    worst = compute_epsilon(
        sample_rate=0.02, noise_multiplier=1.5, steps=400, delta=1e-5, accountant=mode["accountant"]
    )
    epsilon = accountant.epsilon(1e-5)
    assert float(epsilon[0]) == pytest.approx(worst, rel=1e-3) and epsilon[0] == epsilon[1]
    assert epsilon[0] >= worst * (1 - 1e-9)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_zero_norm_costs_nothing(mode):
    accountant = IndividualAccountant(2, **{**RUN, **mode})
    accountant.record([0.0, 0.3], steps=1000)
    assert accountant.epsilon(1e-5)[0] == 0 < accountant.epsilon(1e-5)[1]


def test_without_rounding_the_account_is_the_direct_sum_within_a_thousandth_above():
    norms = history(12, 20)
    ours, exact = (
        recorded(norms, steps=10, rounding=None, accountant="rdp").epsilon(1e-5),
        direct(norms, 10, 1e-5),
    )
    used = exact > 0.02  # below, orders above 1024 make ours the smaller bound
    assert used.sum() > 5
    assert ((ours / exact)[used] <= 1.001).all() and ((ours / exact)[used] >= 1 - 1e-6).all()


@given(
    st.lists(st.floats(0, 2), min_size=1, max_size=8),
    st.sampled_from([0.01, 0.1, 0.3]),
    st.integers(1, 5000),
)
@settings(max_examples=30, deadline=None)
def test_rounding_is_upwards_and_by_at_most_one_level(norms, rounding, steps):
    accountant = IndividualAccountant(len(norms), **RUN, rounding=rounding)
    accountant.record(norms, steps=steps)
    levels = torch.cat([torch.zeros(1, dtype=torch.float64), accountant.levels])
    for row, norm in zip(accountant.state_dict()["accounts"], norms):
        share = min(norm / RUN["max_grad_norm"], 1.0)
        if share == 0:
            assert row.sum() == 0
        else:
            level = accountant.levels[row.nonzero()[0, 0]]
            assert row.sum() == steps and share <= level and level - share <= rounding * (1 + 1e-9)
    assert levels[-1] == 1.0


def test_accounts_are_ordered_unrounded_below_rounded_and_pld_below_rdp():
    norms = history(20, 6, seed=1)
    exact = recorded(norms, rounding=None, accountant="rdp").epsilon(1e-5)
    rounded = recorded(norms, rounding=0.01, accountant="rdp").epsilon(1e-5)
    coarse = recorded(norms, rounding=0.1, accountant="rdp").epsilon(1e-5)
    pld = recorded(norms, rounding=0.01, accountant="pld").epsilon(1e-5)
    assert (exact <= rounded * (1 + 1e-3)).all() and (rounded <= coarse * (1 + 1e-9)).all()
    assert (pld <= rounded * (1 + 1e-6)).all()


@pytest.mark.parametrize("mode", BY_RENYI_FIRST)
def test_longer_gradients_and_more_steps_never_cost_less(mode):
    norms = history(40, 10, seed=2)
    base = recorded(norms, **mode).epsilon(1e-5)
    assert (recorded(norms * 1.3, **mode).epsilon(1e-5) >= base * (1 - 1e-3)).all()
    assert (recorded(norms, steps=4, **mode).epsilon(1e-5) >= base * (1 - 1e-3)).all()


@pytest.mark.parametrize("mode", [*MODES, pytest.param(ALL_MODES[3], marks=pytest.mark.slow)])
def test_state_is_saved_restored_and_merged(mode):
    norms = history(6, 4, seed=3)
    whole, first, second = (recorded(part, **mode) for part in (norms, norms[:2], norms[2:]))
    restored = IndividualAccountant(6, **{**RUN, **mode})
    restored.load_state_dict(first.state_dict())
    restored.merge(second)
    assert restored.steps == whole.steps == 12
    assert torch.allclose(restored.epsilon(1e-5), whole.epsilon(1e-5), rtol=1e-12, atol=0)
    before = first.epsilon(1e-5)
    restored.record(norms[0])
    assert torch.equal(first.epsilon(1e-5), before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", BY_RENYI_FIRST)
@given(parts=charges(), saved=st.booleans())
@settings(max_examples=12, deadline=None)
def test_charging_some_examples_equals_charging_all_with_zero_norms_for_the_others(
    mode, parts, saved
):
    some, plain = (IndividualAccountant(5, **{**RUN, **mode}) for _ in range(2))
    taken = [0] * 5
    for examples, norms, steps in parts:
        some.record(norms, steps=steps, examples=examples)
        for example, norm, count in zip(examples, norms, steps.tolist()):
            plain.record(norm * (torch.arange(5) == example), steps=count)
            taken[example] += count
        if saved:
            state, some = some.state_dict(), IndividualAccountant(5, **{**RUN, **mode})
            some.load_state_dict(state)
    assert some.steps == max(taken)
    kept, whole = (account.state_dict()["accounts"] for account in (some, plain))
    assert (
        torch.equal(kept, whole)
        if mode["rounding"]
        else torch.allclose(kept.double(), whole.double(), rtol=1e-12, atol=0)
    )
    # One has everybody's steps on the record, the other those charged; nobody's account exceeds
    # everybody's.
    found, expected = (account.epsilon(1e-5, unequal_steps=True) for account in (some, plain))
    assert torch.allclose(found, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("mode", BY_RENYI_FIRST)
def test_steps_for_all_steps_for_each_and_examples_by_index_charge_alike(mode):
    norms = history(50, 3, seed=5)
    whole = recorded(norms, steps=4, **mode)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    each, named = (IndividualAccountant(50, **{**RUN, **mode}) for _ in range(2))
    for update in norms:
        each.record(update, steps=torch.full((50,), 4))
        for part in order.split(7):
            named.record(update[part], steps=4, examples=part)
    for other in (each, named):
        assert other.steps == whole.steps == 12
        assert torch.allclose(other.epsilon(1e-5), whole.epsilon(1e-5), rtol=1e-12, atol=0)


def test_pending_charges_do_not_share_tensors_with_the_caller():
    accountant = IndividualAccountant(3, **RUN, rounding=None, accountant="rdp")
    norms, steps, examples = (
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([900]),
        torch.tensor([1]),
    )
    accountant.record(norms, steps=steps, examples=examples)
    norms[:], steps[:], examples[:] = 0, 1, 2
    zero, some, none = accountant.epsilon(1e-5, unequal_steps=True)
    assert zero == none == 0 and float(some) == pytest.approx(
        float(direct(torch.tensor([[0.5]]), 900, 1e-5)), rel=1e-3
    )


def test_pending_norms_are_summed_when_there_are_too_many(monkeypatch):
    norms = history(40, 12, seed=6)
    accounts = []
    for waiting in (divergences.WAITING, 2000):
        with monkeypatch.context() as patch:
            patch.setattr(divergences, "WAITING", waiting)
            account = IndividualAccountant(40, **RUN, rounding=None, accountant="rdp")
            for update in norms:
                for part in torch.arange(40).split(9):
                    account.record(update[part], steps=3, examples=part)
            accounts.append(account.epsilon(1e-5))
    torch.testing.assert_close(*accounts, rtol=1e-12, atol=0)
    norms = norms / RUN["max_grad_norm"]
    whole, pieces = (
        Divergences(
            40,
            **{key: RUN[key] for key in ("sample_rate", "noise_multiplier")},
            device=torch.device("cpu"),
        )
        for _ in range(2)
    )
    monkeypatch.setattr(divergences, "WAITING", 2000)
    for update in norms.clamp(max=1):
        whole.add(None, update, torch.full((40,), 3))
        for part in torch.arange(40).split(9):
            pieces.add(part, update[part], torch.full((len(part),), 3))
        assert len(pieces.waiting) < 20
    assert torch.allclose(pieces.epsilon(1e-5), whole.epsilon(1e-5), rtol=1e-12, atol=0)


def test_norms_in_single_precision_are_rounded_up():
    exact = torch.tensor([0.07, 0.35, 0.7, 0.2], dtype=torch.float64)
    for mode in MODES:
        double, single = (IndividualAccountant(4, **{**RUN, **mode}) for _ in range(2))
        double.record(exact, steps=100)
        single.record(exact.float(), steps=100)
        assert (single.epsilon(1e-5) >= double.epsilon(1e-5)).all()


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_arrays_in_low_precision_are_rounded_up_as_tensors_are(precision):
    norms = np.array([0.0701, 0.3503, 0.6502, 0.2001], dtype=precision)
    for told in (norms, list(norms), [torch.tensor(norm) for norm in norms]):
        accounts = [IndividualAccountant(4, **RUN, rounding=None) for _ in range(2)]
        for accountant, each in zip(accounts, (told, torch.from_numpy(norms))):
            accountant.record(each, steps=100)
        assert torch.equal(*(accountant.levels for accountant in accounts))
    assert (
        accounts[0].levels * RUN["max_grad_norm"] > torch.from_numpy(norms).double().sort().values
    ).all()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("norm", [1e-30, 1e-160, 1e-310])
def test_a_tiny_norm_beside_others_costs_almost_nothing(norm, accountant):
    """Losses of 1e-30 and of 1 have no grid in common: nan could not be made a whole number."""
    some = IndividualAccountant(3, **RUN, rounding=None, accountant=accountant)
    some.record([RUN["max_grad_norm"], norm, 0.0], steps=1000)
    full, least, none = some.epsilon(1e-20).tolist()
    assert full > 1 and 0 <= least < 2e-2 and none == 0


@pytest.mark.slow
def test_noise_whose_square_is_no_float_costs_almost_nothing():
    for mode in ALL_MODES:
        for noise in (1e155, 1e200, 1e300):
            accountant = IndividualAccountant(2, **RUN | mode | dict(noise_multiplier=noise))
            accountant.record([0.7, 1e-30], steps=10)
            assert (accountant.epsilon(1e-5) == 0).all()


@pytest.mark.slow
def test_a_delta_that_is_no_normal_float_is_refused_and_the_least_one_is_a_bound():
    counts, run = [[50, 7], [20, 0]], dict(sample_rate=0.1, noise_multipliers=[1.5, 2.0])
    refused("delta", epsilon_of_histories, counts, **run, delta=5e-324)
    found = epsilon_of_histories(counts, **run, delta=1e-300)
    exact = compute_epsilon(sample_rate=0.1, noise_multiplier=1.5, steps=20, delta=1e-300)
    assert exact * (1 - 1e-4) <= float(found[1]) <= exact * 1.01


@pytest.mark.parametrize("mode", [dict(rounding=0.1), dict(rounding=None)])
def test_levels_and_states_are_copies(mode):
    """What was done to `levels`, to a state or to what had been loaded made accounts ten times too
    small.
    """
    first = recorded(history(4, 3), **mode)
    before, state = first.epsilon(1e-5), first.state_dict()
    restored = IndividualAccountant(4, **RUN, **mode)
    restored.load_state_dict(state)
    for tensor in (
        first.levels,
        restored.levels,
        *(value for value in state.values() if torch.is_tensor(value)),
    ):
        tensor.zero_()
    assert torch.equal(first.epsilon(1e-5), before) and torch.equal(restored.epsilon(1e-5), before)


@pytest.mark.parametrize(
    "mode", [*ALL_MODES, dict(rounding=None, accountant="pld", noise_multiplier=0.005)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.slow
def test_accounts_are_the_same_whatever_pytorch_takes_for_the_usual_precision(mode, dtype):
    """The quotient of two whole numbers is of the default dtype: chords of a table lay far below
    the divergence.
    """

    def account():
        accountant = IndividualAccountant(20, **RUN | mode)
        accountant.record(torch.linspace(0, 0.8, 20, dtype=torch.float64) ** 2, steps=100)
        accountant.record([0.31] * 20, steps=7)
        return accountant.epsilon(1e-5)

    usual = account()
    torch.set_default_dtype(dtype)
    try:
        interpolation_table.cache_clear()
        assert torch.equal(account(), usual)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_many_examples_in_pieces_give_what_few_give():
    norms = history(10, 6, seed=4)
    for mode in MODES:
        few = recorded(norms, **mode).epsilon(1e-5)
        many = recorded(norms.repeat(1, 1000), **mode).epsilon(1e-5)
        assert torch.allclose(
            many, few.repeat(1000), rtol=1e-12 if mode["accountant"] == "rdp" else 1e-9, atol=0
        )


def test_the_accountant_is_that_of_the_plan_and_pld_by_default():
    plan = DPSGDPlan(
        n=3, sample_rate=0.02, steps=10, max_grad_norm=0.7, noise_multiplier=1.5, delta=1e-5
    )
    assert (
        IndividualAccountant(3, **RUN).accountant
        == IndividualAccountant.for_plan(plan).accountant
        == "pld"
    )
    by_rdp = dataclasses.replace(plan, accountant="rdp")
    assert IndividualAccountant.for_plan(by_rdp).accountant == "rdp"
    assert IndividualAccountant.for_plan(by_rdp, accountant="pld").accountant == "pld"
    assert IndividualAccountant.for_plan(by_rdp, n=2).n == 2


def test_without_rounding_loss_distributions_take_few_norms_as_they_are():
    norms = history(6, 4, seed=1)
    accountant = recorded(norms, rounding=None, accountant="pld")
    shares = (norms / RUN["max_grad_norm"]).clamp(max=1)
    assert (
        torch.equal(accountant.levels, shares[shares > 0].unique()) and accountant.rounding is None
    )
    counts = torch.stack([(3 * (shares == level)).sum(dim=0) for level in accountant.levels], dim=1)
    exact = epsilon_of_histories(
        counts,
        sample_rate=RUN["sample_rate"],
        delta=1e-5,
        noise_multipliers=RUN["noise_multiplier"] / accountant.levels,
    )
    assert torch.equal(accountant.epsilon(1e-5), exact)
    assert (
        exact <= recorded(norms, rounding=0.01, accountant="pld").epsilon(1e-5) * (1 + 1e-9)
    ).all()


@pytest.mark.slow
def test_many_distinct_norms_are_a_bound_between_the_exact_account_and_a_fine_grid():
    """More norms than nodes: each is a mixture of two. The account of each example alone
    discretises all its norms.
    """
    norms = history(12, 20, seed=2)
    together = recorded(norms, rounding=None, accountant="pld")
    assert len(together.levels) > 150
    alone = torch.cat(
        [
            recorded(norms[:, i : i + 1], rounding=None, accountant="pld").epsilon(1e-5)
            for i in range(12)
        ]
    )
    found = together.epsilon(1e-5)
    # Either is off by what a grid of losses adds, a thousandth.
    assert (found >= alone * (1 - 1e-3)).all() and (found <= alone * 1.004 + 1e-5).all()
    assert (found <= recorded(norms, rounding=0.01, accountant="pld").epsilon(1e-5) * 1.001).all()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [dict(DISTINCT=50), dict(_COUNTS=50 * 30, _LEAST=1)])
def test_too_many_distinct_norms_are_rounded_up_to_a_grid_and_stay_a_bound(limit, monkeypatch):
    for name, value in limit.items():
        monkeypatch.setattr(f"dpcompanion.individual.levels.{name}", value)
    finest = finest_levels(30)
    norms = history(30, 4, seed=3)
    few, all_at_once = (IndividualAccountant(30, **RUN, rounding=None) for _ in range(2))
    for update in norms:
        few.record(update[:10], steps=3, examples=range(10))
    assert len(few.levels) <= 50 == len(finest) and not torch.equal(few.levels, finest)
    for update in norms:
        few.record(update[10:], steps=3, examples=range(10, 30))
        all_at_once.record(update, steps=3)
    assert torch.equal(few.levels, finest) and torch.equal(all_at_once.levels, finest)
    assert torch.equal(few.epsilon(1e-5), all_at_once.epsilon(1e-5))
    exact = direct(norms, 3, 1e-5)
    assert (few.charged(norms[0]) >= norms[0].clamp(max=0.7) * (1 - 1e-12)).all()
    fine = torch.cat(
        [recorded(norms[:, i : i + 1], rounding=None).epsilon(1e-5) for i in range(30)]
    )
    assert (few.epsilon(1e-5) >= fine * (1 - 1e-3)).all() and (fine <= exact).all()
    part, rest = (IndividualAccountant(30, **RUN, rounding=None) for _ in range(2))
    part.record(norms[0], steps=3)
    rest.load_state_dict(few.state_dict())
    part.merge(rest)
    rest.merge(recorded(norms[:1], rounding=None))
    assert torch.equal(part.epsilon(1e-5), rest.epsilon(1e-5)) and torch.equal(part.levels, finest)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(MODES),
    charges(),
    st.sampled_from([1e-2, 1e-5, 1e-9]),
    st.sampled_from([(0.02, 1.5), (0.3, 0.8), (1.0, 4.0)]),
)
@pytest.mark.slow
def test_no_individual_epsilon_exceeds_that_of_the_run(mode, parts, delta, run):
    rate, noise = run
    accountant = IndividualAccountant(
        5, sample_rate=rate, noise_multiplier=noise, max_grad_norm=0.7, **mode
    )
    for examples, norms, steps in parts:
        accountant.record(norms, steps, examples)
    accountant.record([0.7, 0.7, 0.1, 0.0, 9.0], steps=200)
    everybody = compute_epsilon(
        sample_rate=rate,
        noise_multiplier=noise,
        steps=accountant.steps,
        delta=delta,
        accountant=accountant.accountant,
    )
    assert float(accountant.epsilon(delta, unequal_steps=True).max()) <= everybody


@pytest.mark.parametrize("mode", MODES)
def test_an_example_at_the_clip_norm_has_the_epsilon_of_the_plan(mode):
    plan = DPSGDPlan(
        n=2,
        sample_rate=0.02,
        steps=300,
        max_grad_norm=0.7,
        noise_multiplier=1.5,
        delta=1e-5,
        accountant=mode["accountant"],
    )
    accountant = IndividualAccountant.for_plan(plan, rounding=mode["rounding"])
    accountant.record([0.7, 0.2], steps=300)
    epsilon = accountant.epsilon(plan.delta).tolist()
    assert (
        plan.epsilon() * (1 - 1e-3) <= epsilon[0] <= plan.epsilon()
        and epsilon[1] < 0.5 * epsilon[0]
    )


def test_bad_parameters_are_refused_by_name():
    numbers = dict(n=[0], sample_rate=[0, 1.1], noise_multiplier=[0], max_grad_norm=[math.inf])
    refuses(
        IndividualAccountant,
        dict(n=3, **RUN),
        **numbers,
        rounding=[0, 1.5, 1e-20],
        accountant=["gdp"],
    )
    refuses(IndividualAccountant(3, **RUN).epsilon, {}, delta=[1.0])


@pytest.mark.parametrize("rounding", [0.01, None])
def test_bad_records_are_refused_by_name_and_leave_the_account_as_it_was(rounding):
    account = IndividualAccountant(3, **RUN, rounding=rounding)
    lists = [
        [0.1, 0.2],
        [0.1, -0.2, 0.0],
        [0.1, math.nan, 0.0],
        [0.1, math.inf, 0.0],
        ["0.1", "0.2", "0.3"],
    ]
    lists += [[0.1, 0.2j, 0.0], [[0.1], [0.2, 0.3], 0.0]]
    arrays = [np.array([0.1, 0.2j, 0.0]), np.array([0.1, 0.2, 0.0], dtype=object)]
    tensors = [torch.tensor([0.1, 0.2j, 0.0]), torch.tensor([0.1, 0.2, 0.0]).to_sparse()]
    refuses(account.record, {}, norms=[*lists, *arrays, *tensors])
    all_three, two = dict(norms=[0.1] * 3), dict(norms=[0.1, 0.1], examples=[0, 1])
    refuses(
        account.record,
        all_three,
        steps=[torch.tensor([1, 2]), 1.5, 10**400, -1],
        examples=[[True, False, True]],
    )
    refuses(account.record, two, steps=[torch.tensor([1, -1]), torch.tensor([1.0, 2.0])])
    refuses(account.record, dict(norms=[0.1]), examples=[[3], [-1], [0.5], 1])
    refuses(account.record, dict(examples=[1]), norms=[[0.1, 0.2]])
    refuses(
        account.record,
        dict(norms=[0.1], examples=[0]),
        steps=[torch.tensor([2**63 - 1]), torch.tensor([1j])],
    )
    refuses(
        account.record, dict(norms=[0.1] * 4, examples=[0] * 4), steps=[torch.tensor([2**62] * 4)]
    )
    refuses(
        account.record,
        dict(norms=[0.1] * 2, examples=[0] * 2),
        steps=[torch.tensor([2**31 - 1] * 2)],
    )
    assert account.steps == 0 and (account.epsilon(1e-5) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", BY_RENYI_FIRST)
def test_a_log_of_sampled_examples_is_refused_as_an_account_and_estimates_what_all_steps_cost(mode):
    n, steps, rate = 60, 400, 0.1
    run = dict(sample_rate=rate, noise_multiplier=1.0, max_grad_norm=1.0, **mode)
    draws = torch.rand(steps, n, generator=torch.Generator().manual_seed(0)) < rate
    falling = torch.linspace(1.2, 0.2, steps, dtype=torch.float64)
    norms = torch.where(
        torch.arange(n) < 20, 1.0, torch.where(torch.arange(n) < 40, falling[:, None], 0.4)
    ).double()
    whole, log = (IndividualAccountant(n, **run) for _ in range(2))
    for drawn, update in zip(draws, norms):
        whole.record(update)
        log.record(update[drawn], examples=drawn.nonzero()[:, 0])
    refused("steps", log.epsilon, 1e-5)
    true, estimate = whole.epsilon(1e-5), log.estimate_from_sampled(1e-5, steps=steps)
    constant = torch.cat((torch.arange(20), torch.arange(40, 60)))
    torch.testing.assert_close(estimate[constant], true[constant], rtol=2e-3, atol=0)
    ratio = estimate[20:40] / true[20:40]
    assert 0.9 < float(ratio.mean()) < 1.1 and (ratio > 0.6).all() and (ratio < 1.5).all()
    assert (estimate > 1.5 * log.epsilon(1e-5, unequal_steps=True)).all()


@pytest.mark.parametrize("mode", MODES)
def test_an_example_that_was_never_sampled_is_estimated_at_the_clip_norm(mode):
    log = IndividualAccountant(2, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=0.5, **mode)
    log.record([0.0], steps=7, examples=[0])
    estimate = log.estimate_from_sampled(1e-5, steps=100)
    most = compute_epsilon(
        sample_rate=0.1, noise_multiplier=1.0, steps=100, delta=1e-5, accountant=log.accountant
    )
    assert float(estimate[0]) == 0 and float(estimate[1]) == pytest.approx(most, rel=2e-3)
    refused("steps", log.estimate_from_sampled, 1e-5, steps=6)


def test_an_empty_batch_charges_no_example():
    for mode in MODES:
        accountant = IndividualAccountant(3, **{**RUN, **mode})
        accountant.record([], steps=7, examples=[])
        assert accountant.steps == 0 and (accountant.epsilon(1e-5) == 0).all()


def test_the_state_of_another_run_is_refused():
    one, other = (
        IndividualAccountant(3, **RUN),
        IndividualAccountant(3, **{**RUN, "sample_rate": 0.5}),
    )
    refuses(one.load_state_dict, {}, state=[other.state_dict(), None])
    refuses(one.merge, {}, other=[other])


def test_more_steps_than_a_count_can_hold_are_refused():
    one, other = IndividualAccountant(1, **RUN), IndividualAccountant(1, **RUN)
    one.record([0.1], steps=2**31 - 10)
    other.record([0.1], steps=10)
    refused("steps", one.record, [0.1], steps=10)
    refused("other.steps", one.merge, other)
    assert one.steps == 2**31 - 10
    some = IndividualAccountant(2, **RUN)
    some.record([0.1], steps=2**31 - 10, examples=[1])
    refused("steps", some.record, [0.1, 0.1], steps=5, examples=[1, 1])
    some.record([0.1, 0.1, 0.1], steps=torch.tensor([9, 100, 3]), examples=[1, 0, 0])
    state = some.state_dict()
    assert state["steps"].tolist() == [103, 2**31 - 1] == state["accounts"].sum(dim=1).tolist()


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_state_that_cannot_be_an_account_is_refused_and_changes_nothing(mode):
    whole = recorded(history(4, 3), **mode)
    good, before = whole.state_dict(), whole.epsilon(1e-5)
    for name in good:
        for state in (
            {**good, name: None},
            {key: value for key, value in good.items() if key != name},
        ):
            refused(f"state.*{name}", whole.load_state_dict, state)
    steps, accounts = good["steps"], good["accounts"]
    bad = dict(steps=[-1, 2.5, steps[:2], steps - 10, steps.double()])
    bad["accounts"] = [accounts - 100, accounts.float(), accounts[:2]]
    if mode["rounding"] or mode["accountant"] == "pld":
        # a count of more steps than there were
        bad["steps"] += [steps - 1, steps - torch.tensor([0, 0, 1, 0])]
    else:
        bad["accounts"].append(torch.full_like(accounts, math.nan))
    refuses(
        whole.load_state_dict,
        {},
        state=[{**good, name: value} for name, values in bad.items() for value in values],
    )
    assert torch.equal(whole.epsilon(1e-5), before)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize("rounding", [0.05, None])
def test_the_least_epsilon_over_some_orders_is_that_over_all(rounding, delta):
    generator = torch.Generator().manual_seed(3)
    for noise, rate, steps in ((0.4, 0.02, 50), (1.0, 0.01, 3000), (20.0, 1.0, 7)):
        accountant = IndividualAccountant(
            500,
            sample_rate=rate,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            rounding=rounding,
            accountant="rdp",
        )
        norms = torch.rand(500, generator=generator, dtype=torch.float64) ** 4
        norms[0] = 0.0
        accountant.record(norms, steps=steps)
        found = accountant.epsilon(delta)
        if rounding is None:
            sums = Divergences(
                500, sample_rate=rate, noise_multiplier=noise, device=torch.device("cpu")
            )
            orders, rdp = sums.orders, interpolate(norms, sums.table) * steps
        else:
            orders = torch.tensor(
                orders_for(noise / float(accountant.levels[0])), dtype=torch.float64
            )
            rdp = accountant.state_dict()["accounts"].double() @ rdp_of_shares(
                accountant.levels, orders.tolist(), sample_rate=rate, noise_multiplier=noise
            )
        torch.testing.assert_close(
            found, rdp_to_epsilon(rdp, orders, delta)[0], rtol=1e-12, atol=1e-15
        )


def counts(accountant):
    return accountant.state_dict()["accounts"]


def test_counts_grow_to_32_bits_before_they_could_wrap_around():
    parameters = dict(sample_rate=0.01, noise_multiplier=5.0, max_grad_norm=1.0, rounding=0.5)
    one, other = (IndividualAccountant(2, **parameters) for _ in range(2))
    one.record([0.4, 1.0], steps=32_767)
    other.record([0.4, 1.0], steps=1)
    assert counts(one).dtype == torch.int16
    other.load_state_dict(one.state_dict())
    assert counts(other).dtype == torch.int16
    one.record([0.4, 1.0])
    assert counts(one).dtype == torch.int32 and counts(one).tolist() == [[32_768, 0], [0, 32_768]]
    other.merge(other)
    assert counts(other).tolist() == [[65_534, 0], [0, 65_534]]
    fresh = IndividualAccountant(2, **parameters)
    fresh.load_state_dict(one.state_dict())
    assert torch.equal(fresh.epsilon(1e-5), one.epsilon(1e-5)) and float(one.epsilon(1e-5)[1]) > 0
    # As earlier versions kept them: 32 bits whatever the steps.
    short = IndividualAccountant(2, **parameters)
    short.record([0.4, 1.0], steps=9)
    fresh.load_state_dict({**short.state_dict(), "accounts": counts(short).int()})
    assert counts(fresh).dtype == torch.int16 and torch.equal(counts(fresh), counts(short))


@pytest.mark.slow
def test_few_norms_of_many_examples_are_accounted_for_in_blocks_without_a_table_of_orders():
    n = 20_000  # two blocks and a part
    account = Divergences(n, sample_rate=0.01, noise_multiplier=1.0, device=torch.device("cpu"))
    norms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    account.add(None, norms, torch.full((n,), 600))
    account.add(None, norms / 2, torch.full((n,), 400))
    waiting = account.epsilon(1e-5)
    assert account.summed is None
    assert account.total().shape == (n, len(account.orders)) and account.summed is not None
    torch.testing.assert_close(account.epsilon(1e-5), waiting, rtol=1e-9, atol=0)


@pytest.mark.parametrize("rounding", [None, 0.05])
@pytest.mark.parametrize("noise", [1e-9, 1e-3])
def test_accounts_where_a_step_shows_who_was_in_it_fit_in_memory(noise, rounding):
    run = dict(sample_rate=0.01, noise_multiplier=noise)
    accountant = IndividualAccountant(4, **run, max_grad_norm=0.5, rounding=rounding)
    assert accountant.epsilon(1e-5).tolist() == [0.0] * 4
    accountant.record([0.0] * 4, steps=3)
    assert accountant.epsilon(1e-5).tolist() == [0.0] * 4
    accountant = IndividualAccountant(4, **run, max_grad_norm=0.5, rounding=rounding)
    accountant.record([0.5, 0.2, 0.1, 0.0], steps=10)
    everybody, smaller, least, none = accountant.epsilon(1e-5).tolist()
    assert everybody == compute_epsilon(**run, steps=10, delta=1e-5) and none == 0
    for share, found in ((0.4, smaller), (0.2, least)):
        own = compute_epsilon(
            sample_rate=0.01, noise_multiplier=noise / share, steps=10, delta=1e-5
        )
        assert own * (1 - 1e-6) <= found <= 1.01 * own < everybody


@pytest.mark.parametrize(
    "noise", [1e-100, *(pytest.param(noise, marks=pytest.mark.slow) for noise in (9e-3, 1e-5))]
)
def test_an_account_by_renyi_without_rounding_has_an_answer_however_little_noise_there_is(noise):
    account = IndividualAccountant(
        3,
        accountant="rdp",
        rounding=None,
        sample_rate=0.1,
        noise_multiplier=noise,
        max_grad_norm=1.0,
    )
    account.record([0.0, 0.1, 1.0])
    everybody = compute_epsilon(
        sample_rate=0.1, noise_multiplier=noise, steps=1, delta=1e-5, accountant="rdp"
    )
    own = compute_epsilon(sample_rate=0.1, noise_multiplier=noise * 10, steps=1, delta=1e-5)
    none, tenth, whole = account.epsilon(1e-5).tolist()
    assert none == 0 and own * (1 - 1e-6) <= tenth < whole == pytest.approx(everybody)


def test_an_account_of_a_plan_whose_floats_count_is_refused():
    plan = DPSGDPlan(
        n=100,
        sample_rate=0.1,
        steps=10,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
        arithmetic="float",
        parameters=10**6,
    )
    refused("arithmetic", IndividualAccountant.for_plan, plan)
    assert (
        IndividualAccountant.for_plan(
            dataclasses.replace(plan, arithmetic="real", parameters=None)
        ).n
        == 100
    )


def test_rates_that_floats_can_hardly_hold_have_accounts():
    account = IndividualAccountant(2, sample_rate=1e-300, noise_multiplier=1.0, max_grad_norm=1.0)
    account.record([0.5, 1.0])
    assert account.epsilon(1e-5).tolist() == [0, 0]
    assert compute_epsilon(sample_rate=1e-310, noise_multiplier=0.011, steps=1000, delta=1e-5) == 0
