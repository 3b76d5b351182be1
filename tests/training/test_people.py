"""Persons as units: their gradient is one example's, however many rows they have, and all that is
said of examples holds of them.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from test_attack_on_the_trainer import clopper_pearson

from dpcompanion.accounting import Ledger
from dpcompanion.filters import ExactFilter
from dpcompanion.training import (
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    by_person,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    train,
)
from dpcompanion.training.people import PRESENT

PEOPLE = [3, 1, 3, 7, 3, 1, 3, 9]  # four persons with 2, 4, 1 and 1 rows


def table(rows=8, *shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *(shape or (5,)), generator=g), torch.randint(
        0, 3, (rows,), generator=g
    )


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(5, 3)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4)
        self.out = torch.nn.Linear(4, 3)

    def forward(self, tokens):
        return self.out(self.norm(self.embedding(tokens)).tanh().sum(1))


def case(name):
    torch.manual_seed(1)
    x, y = table()
    if name == "words":
        return Words().double(), torch.arange(len(y) * 6).view(-1, 6) % 9, y
    if name == "images":
        conv = torch.nn.Conv2d(2, 3, 3, padding=1)
        norm = torch.nn.GroupNorm(1, 3)
        layers = conv, norm, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 3)
        return torch.nn.Sequential(*layers).double(), table(len(y), 2, 4, 4)[0].double(), y
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return model.double(), x.double(), y


def by_autograd(model, x, y, rows, combine="mean"):
    """The gradient of one person's loss."""
    parameters = list(model.parameters())
    if not rows:
        return [torch.zeros_like(p) for p in parameters]
    losses = torch.cat([cross_entropy(model(x[r : r + 1]), y[r : r + 1]) for r in rows])
    return torch.autograd.grad(losses.mean() if combine == "mean" else losses.sum(), parameters)


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("method", ["mixed", "ghost", "func"])
@pytest.mark.parametrize("name", ["table", "words", "images"])
def test_the_gradient_of_a_person_is_that_of_one_loss_and_is_clipped_once(name, method, combine):
    model, x, y = case(name)
    data = by_person(x, y, PEOPLE, at_most=4, combine=combine, persons=[1, 3, 5, 7, 9])
    network, loss = data.seen(model, cross_entropy)
    found = clipped_sum(network, loss, *data.rows(torch.arange(5)), 0.4, method=method)
    rows = [[r for r, who in enumerate(PEOPLE) if who == name] for name in data.persons]
    gradients = [by_autograd(model, x, y, own, combine) for own in rows]
    norms = torch.stack([torch.stack([g.norm() for g in each]).norm() for each in gradients])
    torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0)
    assert (norms > 0.4).any() and norms[2] == 0
    for k, (key, p) in enumerate(model.named_parameters()):
        wanted = sum(
            each[k] * min(1, 0.4 / max(float(norm), 1e-300)) for each, norm in zip(gradients, norms)
        )
        torch.testing.assert_close(
            found.gradients[f"model.{key}"], wanted.view_as(p), rtol=1e-6, atol=1e-9
        )


def trained(data, plan, **options):
    model = linear()
    history = train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        progress=False,
        **({"seed": 3} | options),
    )
    return model, history


@pytest.mark.parametrize("unit, said", [("example", "person"), ("patient", "patient")])
def test_history_account_and_filter_say_that_examples_are_persons(unit, said):
    plan = DPSGDPlan.for_epsilon(
        2.0, n=4, batch_size=2, epochs=2, max_grad_norm=0.5, delta=1e-2, unit=unit
    )
    budget = ExactFilter.for_plan(plan, 1.0)
    _, history = trained(by_person(*table(), PEOPLE, at_most=2), plan, filter=budget)
    assert plan.unit == unit and f"differ in one {said}," in history.statement()
    assert json.loads(history.to_json())["unit"] == said
    tracker = history.tracker
    for item in (history, tracker, tracker.accountant):
        assert Ledger([item]).units == (said,)
    assert Ledger().add(budget, delta=1e-2).units == (said,)
    _, plain = trained(table(), dataclasses.replace(plan, n=8, unit="example"))
    assert "differ in one example," in plain.statement()
    assert history.persons.tolist() == sorted(set(PEOPLE)) and plain.persons is None
    assert "persons" not in history.saved() and "persons" not in json.loads(history.to_json())


@pytest.mark.parametrize("method", ["auto", "ghost", "func"])
def test_one_row_each_is_what_it_was_bit_for_bit(method):
    x, y = table(40)
    plan = DPSGDPlan(
        n=40, sample_rate=0.3, steps=6, max_grad_norm=0.5, noise_multiplier=1.0, delta=1e-3
    )
    plain, history = trained((x, y), plan, method=method)
    persons, other = trained(by_person(x, y, torch.arange(40), at_most=7), plan, method=method)
    assert torch.equal(plain.weight, persons.weight) and torch.equal(plain.bias, persons.bias)
    assert torch.equal(history.losses, other.losses) and torch.equal(
        history.batch_sizes, other.batch_sizes
    )


def test_a_person_moves_the_sum_by_at_most_the_clip_norm_whatever_their_rows():
    torch.manual_seed(0)
    model, c = torch.nn.Linear(2, 2, bias=False).double(), 0.3
    largest = 0.0
    for number in range(40):
        first, second = (
            torch.randn(k, 2, dtype=torch.float64) * 10**s
            for k, s in ((number % 4, 0), (number % 11, 1))
        )
        sums = []
        for with_second in (True, False):
            x = torch.cat([first, second]) if with_second else first
            people = ["a"] * len(first) + ["b"] * (len(x) - len(first))
            data = by_person(
                x,
                torch.zeros(len(x), dtype=torch.int64),
                people,
                at_most=number % 3 + 1,
                persons=["a", "b"],
            )
            network, loss = data.seen(model, cross_entropy)
            torch.manual_seed(number)  # the same choice of the first one's rows
            rows = [data.rows(torch.tensor([who])) for who in range(2)]
            sums.append(
                sum(
                    clipped_sum(network, loss, *each, c, method="mixed").gradients["model.weight"]
                    for each in rows
                )
            )
        largest = max(largest, float((sums[0] - sums[1]).norm()))
    assert 0.99 * c < largest <= c


def test_copies_of_a_row_change_no_account():
    x, y = table(30)
    plan = DPSGDPlan(
        n=30, sample_rate=0.3, steps=4, max_grad_norm=2.0, noise_multiplier=1.0, delta=1e-3
    )
    copied = torch.cat([torch.arange(30), torch.full((9,), 4)])
    epsilons, weights = [], []
    for rows in (torch.arange(30), copied):
        data, model = by_person(x[rows], y[rows], rows, at_most=10), linear()
        tracker = NormTracker.for_plan(
            plan, model, cross_entropy, data, clipping="individual", rounding=None
        )
        train(
            model,
            cross_entropy,
            data,
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            seed=1,
            trackers=[tracker],
            progress=False,
        )
        epsilons.append(tracker.epsilon(1e-3))
        weights.append(model.weight.detach())
    assert len(epsilons[1]) == 30 and len(epsilons[1].unique()) > 5
    torch.testing.assert_close(epsilons[1], epsilons[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(weights[1], weights[0])


def test_a_filter_keeps_the_budget_of_every_person():
    x, y = table(40)
    data = by_person(x, y, torch.arange(40) % 12, at_most=2, persons=torch.arange(13))
    plan = DPSGDPlan(
        n=13, sample_rate=0.5, steps=12, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    budget = ExactFilter(
        13,
        sample_rate=0.5,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        levels=torch.linspace(0.1, 1.0, 10),
        target_epsilon=2.0,
        target_delta=1e-2,
        steps=12,
    )
    model = linear()
    tracker = NormTracker.for_plan(
        plan,
        model,
        cross_entropy,
        data,
        clipping="individual",
        updates_per_epoch=math.inf,
        budget=budget,
    )
    train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        seed=1,
        trackers=[tracker],
        progress=False,
    )
    found = tracker.epsilon(1e-2)
    assert len(found) == 13 and found[:12].min() > 0.5
    assert found.max() < plan.epsilon() and budget.epsilon(1e-2).max() <= 2.0
    assert found[12] < found[:12].min()  # who has no row


def test_a_run_goes_on_where_it_stopped_with_rows_drawn_afresh(tmp_path):
    x, y = table(60)
    data = by_person(x, y, torch.arange(60) % 8, at_most=2)
    plan = DPSGDPlan(
        n=8, sample_rate=0.7, steps=6, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    whole, _ = trained(data, plan)

    class Stop(Exception):
        pass

    def stop(run):
        if run.step == 4:
            raise Stop

    from dpcompanion.training import Callbacks

    path = tmp_path / "run.pt"
    with pytest.raises(Stop):
        trained(data, plan, checkpoint=Checkpoint(path, every=3), callbacks=Callbacks(on_step=stop))
    again, _ = trained(data, plan, checkpoint=Checkpoint(path, every=3))
    assert torch.equal(whole.weight, again.weight)
    other = by_person(x, y, torch.arange(60) % 8, at_most=3)
    with pytest.raises(ValueError, match="checkpoint"):
        trained(other, plan, checkpoint=Checkpoint(path, every=3))


def test_rows_are_chosen_uniformly_without_replacement():
    data = by_person(
        torch.arange(7), torch.arange(7), ["a", "b", "a", "a", "b", "a", "a"], at_most=2
    )
    torch.manual_seed(0)
    counts = torch.zeros(7)
    for _ in range(500):
        x, y = data.rows(torch.tensor([0, 1]))
        assert (
            x["rows"].shape == (2, 2)
            and bool(x[PRESENT].all())
            and torch.equal(x["rows"], y["rows"])
        )
        assert x["rows"][1].tolist() == [1, 4] and len(x["rows"][0].unique()) == 2
        counts += torch.bincount(x["rows"].flatten(), minlength=7)
    shares = counts[[0, 2, 3, 5, 6]] / 500
    assert bool(((shares - 0.4).abs() < 4 * math.sqrt(0.24 / 500)).all())


def test_the_network_computes_on_rows_and_not_on_padding():
    seen, model = [], linear()
    x, y = table(21)
    data = by_person(x, y, [0] * 20 + [1], at_most=20, persons=range(9))
    network, loss = data.seen(model, cross_entropy)
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    clipped_sum(
        network, loss, *data.rows(torch.arange(9)), 1.0, method="mixed", microbatch_size=100
    )
    assert max(seen) == 21


def test_a_model_with_dropout_takes_persons_of_unequal_rows():
    x, y = table(40)
    data = by_person(
        x, y, (torch.arange(40) / 4).sqrt().mul(4).long(), at_most=4, persons=range(14)
    )
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), linear())
    plan = DPSGDPlan(
        n=14, sample_rate=0.5, steps=3, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, cross_entropy, data, plan, optimizer=optimizer, seed=0, progress=False)
    norms = gradient_norms(*data.seen(model, cross_entropy), *data.part(0, 14))
    assert norms[13] == 0 and norms[data.counts > 0].min() > 0 and len(data.counts.unique()) > 3


def audited(data, n_units, steps=4):
    """What an attack finds out about the epsilon of persons, of whom every second is a canary of
    ten rows.
    """
    n = 12_000
    plan = DPSGDPlan(
        n=n_units, sample_rate=0.3, steps=steps, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    model = torch.nn.Embedding(n, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.expected_batch_size)
    train(
        model,
        lambda row, slope: -5 * row.squeeze(1) * slope,
        data,
        plan,
        optimizer=optimizer,
        seed=11,
        microbatch_size=10**6,
        progress=False,
    )
    weights, half = model.weight.detach().squeeze(1), n // 4
    with_canary, without = weights[1::2], weights[0::2]

    def bound(threshold, part):
        low, _ = clopper_pearson(int((with_canary[part] > threshold).sum()), half)
        _, high = clopper_pearson(int((without[part] > threshold).sum()), half)
        return math.log((low - plan.delta) / high) if low > plan.delta else 0.0

    best = max(torch.linspace(-2, 20, 56).tolist(), key=lambda t: bound(t, slice(0, half)))
    return bound(best, slice(half, 2 * half)), plan.epsilon()


def test_an_attack_on_persons_with_ten_rows_stays_below_their_epsilon_that_rows_as_examples_break():
    people = torch.arange(12_000).repeat(10)
    rows = people, (people % 2).double()
    found, claimed = audited(by_person(*rows, people, at_most=10), 12_000)
    assert claimed / 4 < found < claimed
    found, claimed = audited(rows, 120_000)
    assert found > claimed


def test_a_column_is_one_number_a_person():
    data = by_person(*table(), PEOPLE, at_most=1)
    budgets = data.per_person([2.0 if who == 3 else 1.0 for who in PEOPLE])
    assert list(zip(data.persons.tolist(), budgets.tolist())) == [
        (1, 1.0),
        (3, 2.0),
        (7, 1.0),
        (9, 1.0),
    ]
    plan = DPSGDPlan.for_epsilons(
        budgets, n=4, sample_rate=0.3, steps=5, max_grad_norm=1.0, delta=1e-2, accountant="rdp"
    )
    assert plan.epsilon().shape == (4,)
    with pytest.raises(ValueError, match="values .*'1'"):
        data.per_person(range(8))


@pytest.mark.parametrize(
    "people, persons, word",
    [
        ([[1, 2]] * 8, None, "several"),
        ([(1, 2), *PEOPLE[1:]], None, "several"),
        (np.array([[1, 2]] * 8), None, "several owners"),
        (PEOPLE[1:], None, "people"),
        ([None, *PEOPLE[1:]], None, "people"),
        ([math.nan, *PEOPLE[1:]], None, "people"),
        (["a", *PEOPLE[1:]], None, "people"),
        (PEOPLE, [1, 3, 7], "persons"),
        (PEOPLE, [1, 3, 7, 7, 9], "persons"),
        (PEOPLE, ["1", "3", "7", "9"], "persons"),
    ],
)
def test_what_is_no_person_a_row_is_refused(people, persons, word):
    with pytest.raises(ValueError, match=word):
        by_person(*table(), people, at_most=1, persons=persons)


def test_settings_that_make_no_sense_are_refused():
    x, y = table()
    for options in ({"at_most": 0}, {"at_most": 1, "combine": "max"}, {"at_most": 1.5}):
        with pytest.raises(ValueError, match="at_most|combine"):
            by_person(x, y, PEOPLE, **options)
    with pytest.raises(ValueError, match="rows"):
        by_person(x[1:], y, PEOPLE, at_most=1)
    plan = DPSGDPlan(
        n=8, sample_rate=0.5, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    with pytest.raises(ValueError, match="person"):
        trained(by_person(x, y, PEOPLE, at_most=1), plan)  # n counts persons


def test_a_loss_or_model_that_mixes_persons_is_refused():
    x, y = table(40)
    data = by_person(x, y, torch.arange(40) // 2, at_most=2)
    plan = DPSGDPlan(
        n=20, sample_rate=0.5, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mixing(outputs, targets):
        losses = cross_entropy(outputs, targets)
        return losses / losses.mean()

    with pytest.raises(ValueError, match="loss"):
        train(model, mixing, data, plan, optimizer=optimizer, seed=0, progress=False)
    with pytest.raises(ValueError, match="one number a row"):
        train(
            model,
            lambda o, t: cross_entropy(o, t).mean(),
            data,
            plan,
            optimizer=optimizer,
            seed=0,
            progress=False,
        )
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(5), linear())
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="BatchNorm"):
        train(norm, cross_entropy, data, plan, optimizer=optimizer, seed=0, progress=False)


def test_a_tracker_of_other_rows_is_refused():
    x, y = table(20)
    plan = DPSGDPlan(
        n=10, sample_rate=0.5, steps=2, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    data, model = by_person(x, y, torch.arange(20) % 10, at_most=2), linear()
    for other in (by_person(x + 1, y, torch.arange(20) % 10, at_most=2), (x[:10], y[:10])):
        tracker = NormTracker.for_plan(plan, model, cross_entropy, other)
        with pytest.raises(ValueError, match="trackers"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(
                model,
                cross_entropy,
                data,
                plan,
                optimizer=optimizer,
                seed=0,
                trackers=[tracker],
                progress=False,
            )


def test_a_row_of_two_persons_is_refused_and_a_row_twice_of_one_is_not():
    data = torch.utils.data.TensorDataset(*table())
    part = torch.utils.data.Subset(data, [0, 0, 0, 1, 2, 3])
    with pytest.raises(ValueError, match="each row to one person, but row 1 is row 0 again"):
        by_person(part, people=list("ABCDDD"), at_most=3)
    assert len(by_person(part, people=list("AAABBB"), at_most=3)) == 2


def test_names_that_equal_themselves_alone_are_refused():
    class Name:
        def __init__(self, value):
            self.value = value

        def __hash__(self):
            return hash(self.value)

    x, y = table(2)
    for people in ([Name(1), Name(1)], {"a": 1, "b": 2}, "ab"):
        with pytest.raises(ValueError, match="people must"):
            by_person(x, y, people, at_most=1)


def test_truth_values_stay_such():
    x, y = table()
    data = by_person(x, y > 0, PEOPLE, at_most=4)
    found = []
    for people in (data, (x, y > 0)):
        plan = DPSGDPlan(
            n=len(data) if people is data else len(x),
            sample_rate=1.0,
            steps=1,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        )
        seen = []

        def loss(outputs, targets):
            seen.append(targets.dtype)
            return torch.where(targets, outputs[:, 0], outputs[:, 1])

        model = linear()
        train(model, loss, people, plan, optimizer=torch.optim.SGD(model.parameters(), 0.1), seed=0)
        found.append(set(seen))
    assert found == [{torch.bool}] * 2


def test_a_column_is_asked_for_persons_without_a_row():
    data = by_person(*table(2), ["a", "a"], at_most=1, persons=["a", "b"])
    with pytest.raises(ValueError, match="'b' has no row"):
        data.per_person([1.0, 1.0])
    with pytest.raises(ValueError, match="values must"):
        data.per_person(["u", "u"])
