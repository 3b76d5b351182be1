import dataclasses
import itertools
import math
import pickle
import types
import warnings

import pytest
import torch
from scipy import stats

from dpcompanion import accounting
from dpcompanion.mechanism import plan as plan_module
from dpcompanion.mechanism.secure import SecureStream, grid_of
from dpcompanion.training import Callbacks, DPSGDPlan, PoissonSampler, cross_entropy, train

from ..refusals import refused, refuses

GOOD = dict(n=10, sample_rate=0.5, steps=20, max_grad_norm=2.0, noise_multiplier=1.5, delta=1e-5)


def test_bad_arguments_are_refused_by_name():
    refuses(
        DPSGDPlan,
        GOOD,
        n=[0, 2.5],
        sample_rate=[0.0, 1.1, math.nan, [0.5] * 9],
        steps=[-1],
        max_grad_norm=[0.0, math.inf, [1.0] * 11, torch.ones(10, 1)],
        noise_multiplier=[-1.0, math.nan, [1.0] * 10],
        delta=[0.0, 1.0, [0.1, 0.2]],
        unit=[""],
    )
    bad_steps_and_deltas = dict(steps=[21], delta=[0.0, [1e-3, 1e-4]])
    refuses(DPSGDPlan(**GOOD).epsilon, {}, accountant=["gdp"], **bad_steps_and_deltas)
    batch = dict(target_epsilon=2.0, batch_size=50, epochs=3, **TARGET)
    refuses(DPSGDPlan.for_epsilon, batch, batch_size=[601, 0], epochs=[0, math.inf, 1e300])
    refuses(
        DPSGDPlan.from_json,
        {},
        source=[
            "{}",
            '{"plan": 3}',
            "{",
            '{"plan": {"n": 3}}',
            '{"plan": {"m": 3}}',
            '{"plan": [1]}',
            None,
            5,
            "",
        ],
    )
    text = DPSGDPlan(**GOOD).to_json()
    refused("'n' twice", DPSGDPlan.from_json, text.replace('"n": ', '"n": 7, "n": '))
    refuses(DPSGDPlan(**GOOD).to_json, {}, path=[5, ""])


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
    rates, norms = (
        torch.tensor([0.1, 0.1, 0.3, 0.3]).double(),
        torch.tensor([1.0, 2.0, 1.0, 2.0]).double(),
    )
    plan = DPSGDPlan(
        n=4, sample_rate=rates, steps=10, max_grad_norm=norms, noise_multiplier=2.0, delta=1e-5
    )
    epsilons = plan.epsilon(steps=7, accountant="rdp")
    assert epsilons.shape == (4,) and epsilons.dtype == torch.float64
    for epsilon, rate, norm in zip(epsilons.tolist(), rates.tolist(), norms.tolist()):
        assert epsilon == pytest.approx(
            accounting.compute_epsilon(
                sample_rate=rate, noise_multiplier=3.0 / norm, steps=7, delta=1e-5, accountant="rdp"
            ),
            rel=1e-12,
        )


def test_each_distinct_pair_is_accounted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        plan_module, "compute_epsilon", lambda **arguments: calls.append(arguments) or 1.0
    )
    plan = DPSGDPlan(**{**GOOD, "n": 1000, "sample_rate": torch.tensor([0.1, 0.2]).repeat(500)})
    assert plan.epsilon().shape == (1000,)
    assert len(calls) == 2


def test_no_noise_costs_everything_and_no_step_costs_nothing():
    assert DPSGDPlan(**{**GOOD, "noise_multiplier": 0.0}).epsilon() == math.inf
    assert DPSGDPlan(**GOOD).epsilon(steps=0) == 0.0


def test_a_calibrated_plan_meets_its_target():
    plan = DPSGDPlan.for_epsilon(
        1.0, n=500, sample_rate=0.1, steps=50, max_grad_norm=1.0, delta=1e-4, accountant="rdp"
    )
    assert (
        0.999 < plan.epsilon() <= 1.0
        and plan.accountant == "rdp"
        and plan.epsilon(accountant="pld") < 0.97
    )
    assert (
        plan.statement().endswith("delta 0.0001, accountant rdp.")
        and plan.config()["accountant"] == "rdp"
    )
    with pytest.raises(ValueError, match="sample_rate"):
        DPSGDPlan.for_epsilon(
            1.0, n=2, sample_rate=[0.1, 0.2], steps=5, max_grad_norm=1.0, delta=1e-4
        )


def test_a_plan_keeps_its_own_copy_of_the_rates_and_cannot_be_changed():
    rates = torch.full((10,), 0.5)
    plan = DPSGDPlan(**{**GOOD, "sample_rate": rates})
    rates.fill_(1.0)
    assert plan.expected_batch_size == 5.0
    with pytest.raises(AttributeError):
        plan.delta = 0.5


def test_configs_tell_plans_apart():
    assert DPSGDPlan(**GOOD).config() == DPSGDPlan(**GOOD).config()
    one, other = (
        DPSGDPlan(**{**GOOD, "sample_rate": torch.tensor([a, b] * 5)})
        for a, b in ((0.1, 0.2), (0.2, 0.1))
    )
    assert one.config() != other.config()


def test_the_divisor_is_public_under_the_relation_that_the_plan_states():
    """Every plan divided by the sum of its rates and said "add or remove": the scale of the noise
    alone told n from n + 1 (see the next test). Now the sentence is chosen by what is known of the
    divisor.
    """
    plan = DPSGDPlan(**GOOD)
    assert (
        plan.relation == "zero-out"
        and "zero-out; the number of examples, 10, is public" in plan.statement()
    )
    plan = DPSGDPlan(**GOOD, expected_batch_size=4)
    assert (
        plan.relation == "add-remove"
        and plan.expected_batch_size == 4.0
        and "10" not in plan.statement()
    )
    assert DPSGDPlan(**GOOD, expected_batch_size=4, relation="zero-out").expected_batch_size == 4.0
    assert (
        DPSGDPlan.for_epsilon(
            2.0,
            n=10,
            sample_rate=0.5,
            steps=20,
            max_grad_norm=1.0,
            delta=1e-5,
            expected_batch_size=5,
        ).relation
        == "add-remove"
    )
    sizes = dict(n=10, batch_size=5, epochs=10, max_grad_norm=1.0, delta=1e-5)
    sizes["expected_batch_size"] = 5
    several = dict(n=10, sample_rate=0.5, steps=20, max_grad_norm=1.0, delta=1e-5)
    several["expected_batch_size"] = 5
    for make, budget, options in (
        (DPSGDPlan.for_epsilon, 2.0, sizes),
        (DPSGDPlan.for_epsilons, 2.0, sizes),
        (DPSGDPlan.for_epsilons, {1.0: 0.5, 2.0: 0.5}, several),
    ):  # noise and rates give n away
        assert make(budget, **options).relation == "zero-out"
        with pytest.raises(ValueError, match="relation must be 'zero-out' where"):
            make(budget, relation="add-remove", **options)
    assert DPSGDPlan.for_epsilons(2.0, **several).relation == "add-remove"
    for bad, message in (
        ({"relation": "add-remove"}, "expected_batch_size must be given"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": math.nan}, "expected_batch_size"),
        ({"relation": "replace"}, "relation"),
        (
            {"expected_batch_size": 5, "max_grad_norm": [1.0] * 10},
            "max_grad_norm must be one number",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DPSGDPlan(**{**GOOD, **bad})


def test_what_is_replaced_in_a_plan_takes_the_divisor_along_only_where_it_was_given():
    assert dataclasses.replace(DPSGDPlan(**GOOD), n=20).expected_batch_size == 10.0
    assert (
        dataclasses.replace(DPSGDPlan(**GOOD, expected_batch_size=4), n=20).expected_batch_size
        == 4.0
    )
    with pytest.raises(ValueError, match="expected_batch_size"):
        dataclasses.replace(DPSGDPlan(**GOOD), relation="add-remove")
    assert type(DPSGDPlan(**GOOD).config()["expected_batch_size"]) is float


def test_the_scale_of_the_noise_tells_n_from_its_neighbour_unless_the_divisor_is_given():
    """Two plans of n and n + 1 examples: what a step does to the model without any gradient."""

    def scales(**options):
        return [
            plan.noise_std / plan.expected_batch_size
            for plan in (DPSGDPlan(**{**GOOD, "n": n}, **options) for n in (10, 11))
        ]

    summed, given = scales(), scales(expected_batch_size=5)
    assert summed[0] / summed[1] == pytest.approx(1.1) and given[0] == given[1]


def test_a_zeroed_example_and_an_absent_one_give_the_same_mechanism():
    """With the constants fixed, zero-out and add-remove are one pair of distributions: the same
    seed gives the same weights with an example whose gradient is zero as without it, whoever else
    is drawn.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(11, 3, generator=generator).double(), torch.arange(11) % 2
    shape = dict(steps=15, sample_rate=0.4, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5)

    def weights(n, rows, divisor, gone):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        plan = DPSGDPlan(n=n, expected_batch_size=divisor, **shape)
        masks = PoissonSampler(11, 0.4, torch.Generator().manual_seed(3)).masks(15)
        draws = iter([mask[rows].nonzero().squeeze(1) for mask in masks])
        object.__setattr__(
            plan, "sampler", lambda generator: types.SimpleNamespace(draw=lambda: next(draws))
        )

        def loss(outputs, targets):
            return torch.where(targets == 9, 0, cross_entropy(outputs, targets.clamp(max=1)))

        labels = y.clone()
        labels[10] = 9 if gone else labels[10]
        train(
            model,
            loss,
            (x[rows], labels[rows]),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            seed=1,
        )
        return torch.cat([p.flatten() for p in model.parameters()])

    everybody, others = torch.arange(11), torch.arange(10)
    zeroed, absent = weights(11, everybody, None, True), weights(10, others, 4.4, False)
    torch.testing.assert_close(zeroed, absent, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(zeroed, weights(11, everybody, None, False))
    assert not torch.allclose(absent, weights(10, others, None, False))


def test_sum_and_noise_lie_on_the_grid_and_have_the_right_size():
    total, std = torch.randn(20_000, dtype=torch.float64), 2.5
    noisy = DPSGDPlan(**{**GOOD, "max_grad_norm": 1.0, "noise_multiplier": std}).noisy
    released = noisy(total, SecureStream())
    assert torch.equal(released / grid_of(std), (released / grid_of(std)).round())
    assert stats.kstest(((released - total) / std).numpy(), "norm").pvalue > 1e-4
    assert noisy(total.float(), SecureStream()).dtype == torch.float32
    assert noisy(total.bfloat16(), SecureStream()).dtype == torch.bfloat16
    noiseless = DPSGDPlan(**{**GOOD, "noise_multiplier": 0.0})
    assert torch.equal(noiseless.noisy(total, SecureStream()), total)


def test_a_step_moves_by_exactly_its_noise_where_gradients_are_zero():
    model = torch.nn.Linear(100, 40, bias=False).double()
    moves = []
    before = model.weight.detach().clone()
    train(
        model,
        lambda out, y: 0.0 * out.sum(1),
        (torch.randn(50, 100).double(), torch.zeros(50)),
        DPSGDPlan(
            n=50, sample_rate=0.2, steps=3, max_grad_norm=0.5, noise_multiplier=2.0, delta=1e-3
        ),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        progress=False,
        callbacks=Callbacks(on_step=lambda state: moves.append(model.weight.detach().clone())),
    )
    for last, now in itertools.pairwise([before, *moves]):
        assert stats.kstest(((now - last) * 0.2 * 50).numpy().ravel(), "norm").pvalue > 1e-5


def test_two_sums_have_no_noise_in_common_and_one_sum_has_always_the_same():
    plan = DPSGDPlan(
        n=10, sample_rate=0.1, steps=3, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    total, key = torch.randn(5000, dtype=torch.float64), bytes(range(32))
    one, same, other = (SecureStream() for _ in range(3))
    for stream in (one, same, other):  # as a checkpoint's keys are given back
        stream.set_state({"calls": 0, "key": key})
    for _ in range(2):  # two calls in a row differ, too
        noisy = plan.noisy(total, one)
        assert torch.equal(noisy, plan.noisy(total, same))
        moved = total.clone()
        moved[7] += 1e-3  # so much may be one example's
        noise = torch.stack([noisy - total, plan.noisy(moved, other) - moved])
        assert abs(float(torch.corrcoef(noise)[0, 1])) < 6 / math.sqrt(5000)
        assert (noise.std(dim=1) - 1).abs().max() < 0.07
    assert not torch.equal(plan.noisy(total, one), noisy)
    # With a seed a run is the same up to rounding, as on another processor.
    one, other = SecureStream(key), SecureStream(key)
    noises = plan.noisy(total, one) - total, plan.noisy(moved, other) - moved
    torch.testing.assert_close(*noises, rtol=0, atol=1e-6)  # of the grid


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_a_plan_for_budgets_uses_up_each(method):
    run = dict(n=20, sample_rate=0.05, steps=100, max_grad_norm=1.0, delta=1e-5, accountant="rdp")
    plan = DPSGDPlan.for_epsilons({1.0: 0.5, 3.0: 0.5}, method=method, **run)
    spent, budgets = plan.epsilon(), torch.as_tensor([1.0, 3.0], dtype=torch.float64)
    nearest = budgets[(spent[:, None] - budgets).abs().argmin(1)]
    assert (
        (spent <= nearest).all()
        and (spent >= nearest * (1 - 2e-3)).all()
        and (nearest == 1.0).sum() == 10
    )
    each = DPSGDPlan.for_epsilons(nearest, method=method, **run)
    assert torch.equal(each.epsilon(), spent)
    same = DPSGDPlan.for_epsilons(2.0, method=method, **run)
    assert not same.individual and 1.99 < same.epsilon() <= 2.0
    with pytest.raises(ValueError, match="method"):
        DPSGDPlan.for_epsilons(2.0, **run, **{"method": "both"})


@pytest.mark.parametrize("n, warned", [(999, False), (1000, True), (5000, True)])
def test_a_delta_of_one_over_n_or_more_gets_a_warning(n, warned):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        DPSGDPlan(
            n=n, sample_rate=0.1, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
        )
    assert [("1/n" in str(each.message)) for each in found] == [True] * warned


def test_a_statement_is_of_the_steps_taken():
    plan = DPSGDPlan(
        n=100, sample_rate=0.1, steps=50, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )
    assert " 50 steps" in plan.statement() and " 7 of 50 " in plan.statement(steps=7)
    with pytest.raises(ValueError, match="steps"):
        plan.statement(steps=51)


TARGET = dict(n=600, max_grad_norm=1.0, delta=1e-4)


@pytest.mark.parametrize("target", ["target_epsilon", "target_epsilons"])
def test_what_a_plan_is_made_for_is_checked_by_name_before_the_search(target, monkeypatch):
    monkeypatch.setattr(plan_module, "find_noise_multiplier", None)
    monkeypatch.setattr("dpcompanion.idp.sample_parameters", None)
    make = DPSGDPlan.for_epsilon if target == "target_epsilon" else DPSGDPlan.for_epsilons
    run = dict(batch_size=50, epochs=3, **TARGET)
    bad = dict(delta=[0, 1], max_grad_norm=[0, [1.0] * 600], unit=[""], n=[0])
    bad |= dict(relation=["replace-one"], arithmetic=["decimal"], parameters=[3])
    refuses(make, run | {target: 2.0}, expected_batch_size=[0], **bad)
    refused("parameters must be given", make, **run, **{target: 2.0}, arithmetic="float")
    with pytest.raises(ValueError, match="for_epsilons") as found:
        DPSGDPlan.for_epsilon([1.0] * 600, **run)
    assert len(str(found.value)) < 300


def test_epsilons_of_many_budgets_are_computed_once(monkeypatch):
    budgets = torch.linspace(1.0, 2.0, 6, dtype=torch.float64)
    plan = DPSGDPlan.for_epsilons(
        budgets, n=6, sample_rate=0.1, steps=20, max_grad_norm=1.0, delta=1e-3, method="scale"
    )
    first = plan.epsilon()
    monkeypatch.setattr(plan_module, "compute_epsilon", None)
    assert torch.equal(plan.epsilon(), first)


def test_a_batch_size_and_epochs_are_a_rate_and_steps():
    plan = DPSGDPlan.for_epsilon(2.0, batch_size=50, epochs=3, **TARGET)
    assert (plan.sample_rate, plan.steps) == (50 / 600, 36)
    assert plan == DPSGDPlan.for_epsilon(2.0, sample_rate=50 / 600, steps=36, **TARGET)
    plan = DPSGDPlan.for_epsilons(
        {1.0: 0.5, 2.0: 0.5}, batch_size=50, epochs=3, accountant="rdp", **TARGET
    )
    assert plan.steps == 36 and plan.expected_batch_size == pytest.approx(50)
    # The paper's 80 epochs of MNIST are 9,375 steps.
    assert plan_module._rate_and_steps(60_000, None, None, 512, 80)[1] == 9375


@pytest.mark.parametrize("make", [DPSGDPlan.for_epsilon, DPSGDPlan.for_epsilons])
def test_rate_and_steps_are_given_in_exactly_one_way(make):
    both = {"sample_rate": 0.1, "steps": 5}
    mixed = {"sample_rate": 0.1, "epochs": 2}
    for given in (
        {},
        {"sample_rate": 0.1},
        mixed,
        {**both, "epochs": 2},
        {**both, "batch_size": 60, "epochs": 2},
    ):
        with pytest.raises(ValueError, match="sample_rate and steps or batch_size and epochs"):
            make(2.0, **TARGET, **given)


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_budgets_are_used_up_by_the_default_accountant_too(method):
    run = dict(n=4, sample_rate=0.05, steps=100, max_grad_norm=1.0, delta=1e-5)
    plan = DPSGDPlan.for_epsilons({1.0: 0.5, 2.0: 0.5}, method=method, **run)
    budgets = torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    assert (
        plan.accountant == "pld"
        and (plan.epsilon() <= budgets).all()
        and (plan.epsilon() > 0.998 * budgets).all()
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"expected_batch_size": 5, "unit": "patient"},
        {"expected_batch_size": 5, "relation": "zero-out"},
        {"sample_rate": torch.rand(10, generator=torch.Generator().manual_seed(0))},
        {"max_grad_norm": [1 / 3] * 9 + [0.1], "accountant": "rdp"},
        {"arithmetic": "float", "parameters": 7},
    ],
)
def test_a_plan_comes_back_equal_from_json_and_from_a_pickle(change, tmp_path):
    plan = DPSGDPlan(**{**GOOD, **change})
    plan.to_json(tmp_path / "plan.json")
    for other in (
        DPSGDPlan.from_json(plan.to_json()),
        DPSGDPlan.from_json(tmp_path / "plan.json"),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert other == plan and hash(other) == hash(plan) and other.statement() == plan.statement()
        assert dataclasses.replace(other, steps=1) == dataclasses.replace(plan, steps=1) != plan


@pytest.mark.parametrize("relation", [{}, {"expected_batch_size": 5}])
def test_a_statement_names_the_unit_that_is_protected_and_the_run_is_the_same(relation):
    plan, other = (DPSGDPlan(**GOOD, **relation, unit=unit) for unit in ("example", "patient"))
    assert "one patient" in other.statement() and "example" not in other.statement()
    assert plan.config() == other.config() and plan != other
    assert plan.epsilon(accountant="rdp") == other.epsilon(accountant="rdp")


@pytest.mark.parametrize("make", [DPSGDPlan.for_epsilon, DPSGDPlan.for_epsilons])
def test_a_plan_with_floats_says_which_parameters_it_lacks(make):
    budgets = 2.0 if make == DPSGDPlan.for_epsilon else {1.0: 0.5, 2.0: 0.5}
    usual = dict(n=100, batch_size=10, epochs=1, max_grad_norm=1.0, delta=1e-3)
    with pytest.raises(ValueError, match="parameters must be given.*trainable numbers"):
        make(budgets, arithmetic="float", **usual)
    made = make(budgets, arithmetic="float", parameters=12, **usual)
    with pytest.raises(ValueError, match=r"such as plan\.delta / 4"):
        made.ledger_entry()
