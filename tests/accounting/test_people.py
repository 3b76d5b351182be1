"""A ledger's epsilon for each person, and where one example replaces another, against other ways to
compute them.
"""

import math

import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as theirs
from dp_accounting.privacy_accountant import NeighboringRelation

from dpcompanion import release
from dpcompanion.accounting import (
    Gaussian,
    Guarantee,
    Laplace,
    Ledger,
    LedgerEntry,
    PersonalCosts,
    SampledGaussian,
    compute_epsilon,
    gaussian_epsilon,
    people,
    select_best,
)
from dpcompanion.accounting.items import times
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import Callbacks, DPSGDPlan, Track, cross_entropy, train

DELTA = 1e-5
RUN = dict(sample_rate=0.05, noise_multiplier=2.0, max_grad_norm=0.5)


def account(norms, steps=100, **options):
    found = IndividualAccountant(len(norms), **{**RUN, **options})
    found.record(norms, steps=steps)
    return found


def test_replacing_an_example_costs_what_dp_accounting_says():
    for rate, noise, steps, delta in [(0.01, 1.1, 500, 1e-5), (0.5, 0.7, 3, 1e-3)]:
        ledger = Ledger([SampledGaussian(rate, noise, steps)], relation="replace")
        oracle = theirs.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            value_discretization_interval=1e-3,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
        ).self_compose(steps)
        epsilon = ledger.epsilon(delta)
        assert epsilon == pytest.approx(oracle.get_epsilon_for_delta(delta), rel=5e-4)
        assert ledger.delta(epsilon) <= delta * 1.001


def test_opposite_gradients_of_full_length_are_the_worst_pair_of_gradients():
    rate, noise = 0.3, 0.8
    axis = torch.linspace(-7, 7, 281, dtype=torch.float64)
    x = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1)

    def density(gradient):
        with_, without = (
            torch.exp(-((x - at) ** 2).sum(-1) / (2 * noise**2))
            for at in (gradient, torch.zeros(2).double())
        )
        return (
            (rate * with_ + (1 - rate) * without)
            / (2 * math.pi * noise**2)
            * float(axis[1] - axis[0]) ** 2
        )

    ledger = Ledger([SampledGaussian(rate, noise, 1)], relation="replace")
    pairs = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = pairs / pairs.norm(dim=-1, keepdim=True).clamp(min=1)
    opposite = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    densities = [(density(one), density(other)) for one, other in torch.cat((pairs, opposite))]
    for epsilon in (0.0, 0.3, 1.0):
        most = ledger.delta(epsilon)
        deltas = [
            float((one - math.exp(epsilon) * other).clamp(min=0).sum()) for one, other in densities
        ]
        assert max(deltas) <= most * (1 + 1e-4) and deltas[-1] == pytest.approx(most, rel=1e-3)


def distances(rate, noise, own, other, cells=40_000):
    """Losses of P against Q and masses of P, on cells of x: q N(own, noise^2) on the one side, q
    N(-other, ...).
    """
    x = torch.linspace(-7.5 * noise - other, 7.5 * noise + own, cells, dtype=torch.float64)

    def density(at):
        parts = [(1 - rate, 0.0), (rate, at)]
        return sum(part * torch.exp(-((x - mean) ** 2) / (2 * noise**2)) for part, mean in parts)

    first, second = density(own), density(-other)
    masses = first / (math.sqrt(2 * math.pi) * noise) * float(x[1] - x[0])
    return torch.log(first / second), masses


def deltas(losses, masses, steps, epsilons, interval):
    """Bounds on delta from below and above: losses rounded down and up to a grid, and their
    sums.
    """
    found = []
    for rounded in (torch.floor(losses / interval), torch.ceil(losses / interval)):
        first = int(rounded.min())
        one = torch.zeros(int(rounded.max()) - first + 1, dtype=torch.float64)
        one.index_add_(0, (rounded - first).long(), masses)
        size = (len(one) - 1) * steps + 1
        power = torch.fft.irfft(torch.fft.rfft(one, n=size + 1) ** steps, n=size + 1)[:size].clamp(
            min=0
        )
        total = (first * steps + torch.arange(size)) * interval
        found.append(
            [
                float((power * -torch.expm1((epsilon - total).clamp(max=0))).sum())
                for epsilon in epsilons
            ]
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "rate, noise, steps, own, other",
    [
        (0.2, 0.8, 1, 1.0, 0.4),
        (0.2, 0.8, 1, 0.9, 1.0),
        (0.3, 1.5, 12, 0.4, 1.0),
        (0.3, 1.5, 12, 1e-6, 1.0),
    ],
)
def test_replacing_examples_of_two_norms_costs_what_the_pair_costs(rate, noise, steps, own, other):
    kinds = [people._Replaced(rate, noise / own, noise / other)]
    # As few as people are, they are on grids: nothing else takes two norms.
    found = float(people._on_grids(kinds, torch.tensor([[steps]]), 1e-4)[0])
    around = (found * 0.997, found)
    ways = [
        deltas(*distances(rate, noise, *pair), steps, around, 1e-4)
        for pair in ((own, other), (other, own))
    ]
    # at epsilon delta is met in both directions, and not far below
    assert max(below[1] for below, _ in ways) <= 1e-4
    assert max(above[0] for _, above in ways) > 1e-4


def test_each_person_is_charged_for_replacement_by_what_was_promised_or_recorded():
    norms = [0.5, 0.5, 0.25, 0.05, 0.0]
    recorded = account(norms)
    ledger, both = Ledger([recorded], relation="replace"), Ledger([recorded])
    found, uniform = ledger.epsilons(DELTA), ledger.epsilon(DELTA)
    assert found[:2].tolist() == [uniform, uniform]  # who is charged in full
    assert bool((found[1:].diff() < 0).all()) and found[-1] >= both.epsilon(DELTA) * (1 - 1e-4)
    assert found[-1] == pytest.approx(both.epsilon(DELTA), rel=2e-3)  # only the other example costs
    assert bool((found >= both.epsilons(DELTA)).all())
    assert ledger.epsilons(DELTA, accounts=False).tolist() == [uniform] * 5
    # Who was charged for fewer steps may be replaced by somebody who takes part in all.
    unequal = account([0.5, 0.5], steps=torch.tensor([100, 40]))
    early = unequal.ledger_entry(unequal_steps=True)
    own = unequal.epsilon(DELTA, unequal_steps=True).tolist()
    assert Ledger().add(early).epsilons(DELTA).tolist() == pytest.approx(own, rel=2e-3)
    first, second = Ledger([early], relation="replace").epsilons(DELTA).tolist()
    assert both.epsilon(DELTA) < second < first == uniform
    # More than a few: on grids all of them.
    many = Ledger([account(torch.linspace(0.02, 0.5, 20))], relation="replace").epsilons(DELTA)
    assert bool((many.diff() > 0).all()) and many[-1] == pytest.approx(uniform, rel=2e-3)
    assert many[-1] <= uniform


def test_replacement_is_by_an_example_with_the_same_promise():
    rates, noise = torch.tensor([0.01, 0.02, 0.05]), 1.3
    plan = DPSGDPlan(
        n=3, sample_rate=rates, steps=50, max_grad_norm=1.0, noise_multiplier=noise, delta=DELTA
    )
    ledger = (
        Ledger([plan], relation="replace")
        .add(Guarantee(0.1, 1e-7), people=[0])
        .add(Laplace(20.0), people=[1])
    )
    found = ledger.epsilons(DELTA)
    for person, more in enumerate(([Guarantee(0.1, 1e-7)], [Laplace(20.0)], [])):
        alone = Ledger(
            [SampledGaussian(float(rates[person]), noise, 50), *more], relation="replace"
        )
        assert found[person] == pytest.approx(alone.epsilon(DELTA), rel=1e-6)
    oracle = theirs.from_gaussian_mechanism(
        noise,
        sampling_prob=0.05,
        value_discretization_interval=1e-3,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    ).self_compose(50)
    assert found[2] == pytest.approx(oracle.get_epsilon_for_delta(DELTA), rel=1e-3)
    filter = RenyiFilter(2, **RUN, orders=[2, 8], budgets=[0.5, 1.0])
    filtered = Ledger(relation="replace").add(filter, delta=1e-7)
    for promised, epsilon in zip(filtered.epsilons(DELTA).tolist(), filter.epsilon(1e-7).tolist()):
        assert promised == pytest.approx(
            Ledger([Guarantee(epsilon, 1e-7)], relation="replace").epsilon(DELTA)
        )


def test_many_levels_are_rounded_up_where_one_example_replaces_another(monkeypatch):
    ledger = Ledger([account(torch.linspace(0.02, 0.5, 15), rounding=0.001)], relation="replace")
    fine = ledger.epsilons(DELTA)
    monkeypatch.setattr(people, "MOST_LEVELS", 8)
    monkeypatch.setattr(people, "MIXTURE_NODES", 10)
    coarse = ledger.epsilons(DELTA)
    assert bool((coarse >= fine * (1 - 2e-3)).all()) and bool((coarse <= fine * 1.15).all())


@pytest.mark.slow
def test_replacement_is_never_above_removing_and_adding_and_counts_each_kind():
    items = [SampledGaussian(0.02, 1.0, 200), SampledGaussian(0.1, 3.0, 50), Gaussian(20.0)]
    both, single = Ledger(items, relation="replace"), Ledger(items)
    epsilon = both.epsilon(DELTA)
    splits = [
        single.delta(share * epsilon)
        + math.exp(share * epsilon) * single.delta((1 - share) * epsilon)
        for share in (0.4, 0.5)
    ]
    assert single.epsilon(DELTA) < epsilon and both.delta(epsilon) <= min(splits)
    assert 0 < both.trade_off(0.1) < single.trade_off(0.1)

    def alone(item):
        return Ledger([item], relation="replace").epsilon(DELTA)

    assert alone(Gaussian(8.0)) == pytest.approx(gaussian_epsilon(2 / 8, DELTA), rel=1e-6)
    assert alone(SampledGaussian(1.0, 8.0, 1)) == alone(Gaussian(8.0))
    assert alone(Gaussian(8.0, replaced=1.0)) == Ledger([Gaussian(8.0)]).epsilon(DELTA)
    assert alone(Laplace(10.0)) == Ledger([Laplace(5.0)]).epsilon(DELTA)
    guarantee = Guarantee(0.4, (1 + math.exp(0.2)) * 1e-6)
    assert alone(Guarantee(0.2, 1e-6)) == pytest.approx(
        Ledger([guarantee]).epsilon(DELTA), rel=1e-9
    )
    useless = Ledger([Guarantee(1.0, 0.5)], relation="replace")
    assert (useless.epsilon(0.9), useless.delta(3.0), useless.trade_off(0.1)) == (
        math.inf,
        1.0,
        0.0,
    )
    little = SampledGaussian(0.5, 0.005, 10)  # no grid: at least what removing alone costs
    assert Ledger([little]).epsilon(DELTA) < alone(little) < 8 * Ledger([little]).epsilon(DELTA)


def test_statement_and_json_name_the_relation_and_a_ledger_keeps_its_own_when_another_is_added():
    ledger = Ledger([Gaussian(8.0, replaced=1.5)], relation="replace")
    assert "replaces" in ledger.statement() and Ledger.from_json(
        ledger.to_json()
    ) == ledger != Ledger(ledger.items)
    assert Ledger().add(ledger) == Ledger(ledger.items)
    for wrong in (ledger.to_dp_event, lambda: select_best(ledger, mean=2)):
        with pytest.raises(ValueError, match="relation"):
            wrong()


def test_one_account_costs_each_person_what_the_accountant_says():
    norms = torch.linspace(0.0, 0.5, 16)
    found = Ledger().add(account(norms))
    own = account(norms).epsilon(DELTA)
    torch.testing.assert_close(found.epsilons(DELTA), own, rtol=2e-3, atol=1e-9)
    everybody = compute_epsilon(sample_rate=0.05, noise_multiplier=2.0, steps=100, delta=DELTA)
    assert found.epsilon(DELTA) == pytest.approx(everybody, rel=1e-3)
    assert found.epsilons(DELTA, accounts=False).tolist() == [found.epsilon(DELTA)] * 16


@pytest.mark.slow
def test_many_people_at_once_cost_what_each_alone_does(monkeypatch):
    monkeypatch.setattr(people, "_FEW", 0)
    kinds = [SampledGaussian(0.01, 1 / level, 1) for level in (0.1, 0.5, 1.0)]
    kinds += [SampledGaussian(0.05, 2 / level, 1) for level in (0.2, 1.0)]
    kinds = [
        Laplace(5.0),
        Gaussian(10.0),
        *kinds,
        Guarantee(0.3, 1e-6),
        SampledGaussian(1.0, 30.0, 1),
    ]
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (8, len(kinds)), generator=generator)
    counts[:, 2:7] *= torch.randint(1, 100, (8, 5), generator=generator)
    counts[3, 2:7], counts[4], counts[5, :2], counts[6, 7:] = 0, 0, 0, 0
    counts[7, 1], counts[7, 0] = 0, 2  # bounded losses and sampled ones alone
    for delta in (1e-5, 5e-7):  # the second lies below what two guarantees leave

        def alone(items, delta=delta):
            return Ledger(items).epsilon(delta)

        found = people.epsilons_of([people.Cost(kind) for kind in kinds], counts, delta, alone)
        for row, epsilon in zip(counts.tolist(), found.tolist()):
            exact = alone([item for kind, count in zip(kinds, row) for item in times(kind, count)])
            assert epsilon == exact or exact * (1 - 3e-4) <= epsilon <= exact * (1 + 3e-3)


def test_levels_beyond_number_are_mixtures_and_stay_bounds(monkeypatch):
    norms = torch.linspace(0.01, 0.5, 30)
    ledger = (
        Ledger()
        .add(account(norms, rounding=None))
        .add(account(norms.flip(0), rounding=None, noise_multiplier=3.0))
    )
    exact = ledger.epsilons(DELTA)
    monkeypatch.setattr(people, "MOST_LEVELS", 20)
    monkeypatch.setattr(people, "MIXTURE_NODES", 12)
    mixed = ledger.epsilons(DELTA)
    assert bool((mixed >= exact * (1 - 2e-3)).all()) and bool((mixed <= exact * 1.05).all())


def test_an_example_that_left_after_the_first_training_is_charged_no_more():
    first, second = account([0.5, 0.2, 0.4]), account([0.1, 0.5], sample_rate=0.1)
    ledger = Ledger().add(first, label="first").add(second, people=[2, 0])
    found, before = ledger.epsilons(DELTA), first.epsilon(DELTA)
    assert ledger.n == 3 and found[1] == pytest.approx(float(before[1]), rel=2e-3)
    for person, items in ((0, (0.5, 0.5)), (2, (0.4, 0.1))):
        runs = [
            SampledGaussian(rate, 2.0 * 0.5 / norm, 100) for rate, norm in zip((0.05, 0.1), items)
        ]
        assert found[person] == pytest.approx(Ledger(runs).epsilon(DELTA), rel=2e-3)
    # An item for all counts for all, one with people for these.
    more = ledger.add(Gaussian(5.0), people=[1]).epsilons(DELTA)
    assert more[1] > found[1] and more[0] == found[0]
    whole = Ledger().add(ledger, people=[4, 3, 2]).add(Laplace(50.0), people=[0])
    assert whole.n == 5 and whole.epsilons(DELTA)[[4, 3, 2]].tolist() == pytest.approx(
        found.tolist(), rel=1e-9
    )
    assert Ledger.from_json(whole.to_json()) == whole
    assert torch.equal(Ledger.from_json(whole.to_json()).epsilons(DELTA), whole.epsilons(DELTA))
    assert "first" in whole.statement() and "output-specific" in whole.statement()


def test_filters_promise_each_person_their_own_at_the_delta_that_was_named():
    plan = DPSGDPlan(
        n=3, sample_rate=0.05, steps=40, max_grad_norm=0.5, noise_multiplier=2.0, delta=1e-6
    )
    renyi = RenyiFilter.for_plan(plan, [1.0, 2.0, 1.0])
    exact = ExactFilter(3, **RUN, levels=[0.5, 1.0], costs=[1, 4], budget=[8, 40, 8], steps=40)
    for filter in (renyi, exact):
        ledger = Ledger().add(filter, delta=1e-6).add(Gaussian(20.0))
        promised = filter.epsilon(1e-6).tolist()
        alone = [
            Ledger([Guarantee(epsilon, 1e-6), Gaussian(20.0)]).epsilon(DELTA)
            for epsilon in promised
        ]
        assert ledger.epsilons(DELTA).tolist() == pytest.approx(alone, rel=1e-6)
        assert (
            ledger.epsilon(DELTA) == pytest.approx(max(alone), rel=1e-6)
            and ledger.epsilon(1e-7) == math.inf
        )
        assert "promise" in ledger.statement() and "output-specific" not in ledger.statement()
        assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_plan_of_different_rates_and_norms_promises_each_its_own():
    norms = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    plan = DPSGDPlan(
        n=3,
        sample_rate=[0.1, 0.2, 0.1],
        steps=50,
        max_grad_norm=norms,
        noise_multiplier=3.0,
        delta=DELTA,
    )
    ledger = Ledger([plan])
    torch.testing.assert_close(ledger.epsilons(DELTA), plan.epsilon(), rtol=1e-3, atol=0)
    assert ledger.items == (SampledGaussian(0.2, 2.0, 50),) and ledger.epsilon(DELTA) >= float(
        plan.epsilon().max()
    )
    floats = DPSGDPlan.for_epsilon(
        2.0,
        n=100,
        sample_rate=0.1,
        steps=20,
        max_grad_norm=1.0,
        delta=1e-6,
        arithmetic="float",
        parameters=10,
    )
    assert Ledger().add(floats, delta=1e-6).epsilon(DELTA) == pytest.approx(
        floats.epsilon(1e-6), rel=1e-4
    )
    with pytest.raises(ValueError, match="float"):
        Ledger().add(floats)


@pytest.mark.slow
def test_histories_of_two_trainings_and_a_release_make_one_statement():
    data = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    plan = DPSGDPlan(
        n=40, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-3
    )

    def trained(seed, **options):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options |= {"optimizer": optimizer, "seed": seed, "progress": False}
        return train(model, cross_entropy, data, plan, **options)

    stop = Callbacks(on_step=lambda run: run.stop() if run.step == 10 else None)
    first = trained(0, track=Track(clipping="individual"))
    stopped = trained(1, callbacks=stop, track=Track(clipping="individual"))
    budgets = RenyiFilter.for_plan(plan, [1.0] * 20 + [2.0] * 20)
    kept = trained(2, filter=budgets)
    torch.testing.assert_close(Ledger([first]).epsilons(1e-3), first.epsilons(), rtol=3e-3, atol=0)
    # What ended the run may have looked at the model: its promise is that of all planned steps.
    assert Ledger([stopped]).epsilon(1e-3) == Ledger([plan]).epsilon(1e-3)
    assert float(Ledger([stopped]).epsilons(1e-3).max()) < 0.8 * float(
        Ledger([first]).epsilons(1e-3).max()
    )
    promised = Ledger().add(kept, delta=1e-4)
    assert promised.items[0] == Guarantee(float(budgets.epsilon(1e-4).max()), 1e-4)
    assert bool(
        (promised.epsilons(1e-3) <= promised.epsilons(1e-3, accounts=False) * (1 + 1e-9)).all()
    )
    assert Ledger().add(kept).items == Ledger([plan]).items
    mean = release.ledger_item(0.1, 1e-4)
    ledger = Ledger([first]).add(kept, delta=1e-4).add(mean, label="mean")
    assert bool((ledger.epsilons(1e-3) <= ledger.epsilon(1e-3)).all()) and ledger.n == 40
    assert Ledger.from_json(ledger.to_json()) == ledger
    unrounded = trained(3, track=Track(clipping="individual", rounding=None, accountant="rdp"))
    (entry,) = Ledger([unrounded]).entries
    assert entry.account is None and entry.item == Ledger([plan]).items[0]  # it keeps no norms
    with pytest.raises(ValueError, match="exact"):
        Ledger().add(trained(4, track=Track()).tracker)


@pytest.mark.parametrize(
    "bins, relation", [(None, "add-remove"), (64, "add-remove"), (64, "replace")]
)
def test_a_release_costs_its_epsilon(bins, relation):
    item = release.ledger_item(0.5, 1e-6, bins=bins, relation=relation)
    assert Ledger([item], relation=relation).epsilon(1e-6) == pytest.approx(0.5, rel=1e-4)
    assert Ledger([item], relation=relation).epsilon(1e-6) >= 0.5 * (1 - 1e-6)


def test_the_best_of_many_runs_is_an_item_at_a_delta():
    best = select_best(Gaussian(5.0), mean=3)
    assert Ledger().add(best, delta=1e-6).items == (Guarantee(best.epsilon(1e-6), 1e-6),)


ONE = SampledGaussian(0.1, 1.0, 1)


@pytest.mark.parametrize(
    "wrong, name",
    [
        (lambda: Ledger(relation="zero-out"), "relation"),
        (lambda: Gaussian(1.0, replaced=3.0), "replaced"),
        (lambda: Ledger([ONE]).epsilons(DELTA), "items"),
        (lambda: Ledger([account([0.1])]).epsilons(2.0), "delta"),
        (lambda: Ledger([account([0.1]), account([0.1, 0.2])]), "people"),
        (lambda: Ledger([account([0.1, 0.2])]).add(ONE, people=[2]), "people"),
        (lambda: Ledger([account([0.1, 0.2])]).add(account([0.3]), people=[0, 1]), "people"),
        (lambda: Ledger().add(ONE, people=[1, 1]), "people"),
        (lambda: Ledger().add(ONE, people=[-1]), "people"),
        (lambda: Ledger().add(ONE, people=[0.5]), "people"),
        (lambda: Ledger().add(ONE, delta=1e-6), "delta"),
        (lambda: Ledger().add(Ledger(), delta=1e-6), "delta"),
        (lambda: Ledger().add(account([0.1]), delta=1e-6), "delta"),
        (lambda: Ledger().add(RenyiFilter(2, **RUN, orders=[2], budgets=1.0)), "delta"),
        (
            lambda: Ledger().add(account([0.1], accountant="rdp", rounding=None, sample_rate=1.0)),
            "rounding",
        ),
        (lambda: Ledger().add(account([0.1, 0.2], steps=torch.tensor([3, 4]))), "unequal_steps"),
        (lambda: PersonalCosts((SampledGaussian(0.1, 1.0, 5),), torch.ones(1, 1).long()), "kinds"),
        (lambda: PersonalCosts((ONE, ONE), torch.ones(1, 2).long()), "kinds"),
        (lambda: PersonalCosts((ONE,), torch.ones(1, 1)), "counts"),
        (lambda: PersonalCosts((ONE,), -torch.ones(1, 1).long()), "counts"),
        (lambda: LedgerEntry("a run"), "item"),
        (
            lambda: Ledger.from_json(
                '{"ledger": [{"kind": "Gaussian", "noise_multiplier": 1, "account": {}}]}'
            ),
            "counts",
        ),
        (lambda: release.ledger_item(0.0, 1e-6), "epsilon"),
    ],
)
def test_what_is_wrong_is_refused_by_name(wrong, name):
    with pytest.raises(ValueError, match=name):
        wrong()
