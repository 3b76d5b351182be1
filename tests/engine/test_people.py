"""Persons as units of the engine: draws, clip norms, budgets and filters are theirs, however many
rows they have.
"""

from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.filters import ExactFilter
from dpcompanion.training import DPSGDPlan, by_person, cross_entropy, gradient_norms, train

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:mean of empty")
ROWS, EPOCHS, CLIP, DELTA = 30, 3, 0.7, 1e-3
PEOPLE = [(7 * i + i // 3) % 9 for i in range(ROWS)]  # nine persons with 3 or 4 rows, in no order
PEOPLE[4:8] = [20] * 4  # and one with four of these


def table(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=g).to(dtype), torch.randint(3, (ROWS,), generator=g)


def network(dtype=torch.float64):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def rows_of(person):
    return [i for i, who in enumerate(PEOPLE) if who == person]


def made(
    people=PEOPLE,
    at_most=100,
    *,
    data=None,
    model=None,
    mode="hooks",
    batch_size=3,
    filter=None,
    **options,
):
    """Engine, model, optimizer and loader."""
    engine, model = (
        IndividualizedPrivacyEngine(accountant="rdp"),
        network() if model is None else model,
    )
    if people is not None and not isinstance(people, (list, torch.Tensor)):
        at_most = None
    own: dict[str, Any] = {"target_epsilons": 3.0, "target_delta": DELTA, "max_grad_norm": CLIP}
    make: Any = engine.make_private_with_budgets
    if filter is not None:
        make, own = engine.make_private_with_filter, {"filter": filter, "loss": cross_entropy}
    found: Any = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=DataLoader(
            TensorDataset(*(table() if data is None else data)), batch_size=batch_size
        ),
        epochs=EPOCHS,
        grad_sample_mode=mode,
        people=people,
        at_most=None if people is None else at_most,
        **{"seed": 3} | own | options,
    )
    private, optimizer, loader = found
    return engine, private, optimizer, loader


def run(model, optimizer, loader):
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(*arguments, **options):
    engine, model, optimizer, loader = made(*arguments, **options)
    return run(model, optimizer, loader), engine


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_the_run_is_that_of_train(method):
    """From the same seed both make the same draws and add the same noise."""
    budgets = torch.tensor([1.0, 4.0], dtype=torch.float64).repeat(5)
    found, engine = trained(target_epsilons=budgets, method=method, unit="patient")
    plan = DPSGDPlan.for_epsilons(
        budgets,
        method=method,
        n=10,
        sample_rate=1 / 4,
        steps=4 * EPOCHS,
        max_grad_norm=CLIP,
        delta=DELTA,
        accountant="rdp",
        unit="patient",
    )
    model = network()
    train(
        model,
        cross_entropy,
        table(),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        seed=3,
        people=PEOPLE,
        at_most=100,
        progress=False,
    )
    # Opacus adds 1e-6 to a norm before it clips.
    torch.testing.assert_close(found, weights(model), rtol=1e-4, atol=1e-4)
    assert (
        engine.statement().startswith(plan.statement())
        and "The noise came from a seed" in engine.statement()
    )
    torch.testing.assert_close(engine.get_epsilons(DELTA), plan.epsilon(), rtol=1e-9, atol=0)
    assert list(engine.persons) == sorted(set(PEOPLE))


def by_hand(model, rows, x, y, combine):
    """The gradient of one person's loss."""
    parameters = list(model.parameters())
    if not rows:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    losses = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction=combine)
    return torch.cat([g.flatten() for g in torch.autograd.grad(losses, parameters)])


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_a_person_is_clipped_once_to_the_sum_over_at_most_k_of_their_rows(mode, combine):
    x, y = table()
    people = by_person(x, y, PEOPLE, at_most=2, combine=combine, persons=[99, *range(9), 20])
    engine, model, optimizer, loader = made(people, mode=mode, batch_size=6)
    assert list(engine.persons) == [99, *range(9), 20]
    plain, chosen = network(), set()
    for batch, labels in (each for _ in range(EPOCHS) for each in loader):
        drawn, rows = loader.dataset.units, loader.dataset.handed_out
        plain.load_state_dict(
            dict(zip(plain.state_dict(), (p.detach().clone() for p in model.parameters())))
        )
        own = {person: [r for r in rows if people.owners[r] == person] for person in drawn}
        assert (
            len(set(rows)) == len(rows)
            and torch.equal(batch, x[rows])
            and torch.equal(labels, y[rows])
        )
        assert all(len(own[person]) == min(2, int(people.counts[person])) for person in drawn)
        chosen |= set(rows)
        wanted = torch.zeros_like(weights(plain))
        for person in drawn:
            gradient = by_hand(plain, own[person], x, y, combine)
            wanted += gradient * min(1.0, CLIP / (float(gradient.norm()) + 1e-6))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.clip_and_accumulate()
        found = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
        for p in optimizer.params:
            p.summed_grad = None
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    assert len(chosen) > 20  # two of four, and over the draws others


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("filtered", [False, True])
def test_one_row_each_is_what_it_was_bit_for_bit(mode, filtered):
    def own():
        return {
            "filter": ExactFilter(
                ROWS,
                sample_rate=1 / 5,
                noise_multiplier=2.0,
                max_grad_norm=CLIP,
                levels=[0.5, 1.0],
                costs=[1, 4],
                budget=20,
                steps=5 * EPOCHS,
            )
            if filtered
            else None,
            "mode": mode,
            "batch_size": 6,
        }

    rows, first = trained(None, **own())
    persons, second = trained(torch.arange(ROWS), 7, **own())
    assert torch.equal(rows, persons)
    assert torch.equal(first.get_epsilons(DELTA), second.get_epsilons(DELTA))
    assert first.statement().replace("example", "person") == second.statement()


def test_copies_of_a_row_change_no_epsilon_and_move_a_sum_by_at_most_the_clip_norm():
    x, y = table()
    copies = torch.cat([torch.arange(ROWS), torch.tensor([0]).expand(50)])
    more = [PEOPLE[i] for i in copies]
    budgets = torch.arange(10, dtype=torch.float64) % 3 + 1
    _, few = trained(target_epsilons=budgets)
    _, many = trained(more, data=(x[copies] * 50, y[copies]), target_epsilons=budgets)
    assert (
        torch.equal(few.get_epsilons(DELTA), many.get_epsilons(DELTA))
        and few.statement() == many.statement()
    )
    # All are drawn: without a person the sum is another by at most their clip norm.
    sums = []
    for left_out in (None, more[0]):
        kept = torch.tensor([i for i, who in enumerate(more) if who != left_out])
        people = by_person(
            x[copies[kept]] * 50,
            y[copies[kept]],
            [more[i] for i in kept],
            at_most=99,
            persons=sorted(set(more)),
        )
        _, model, optimizer, loader = made(
            people, data=(x[copies[kept]] * 50, y[copies[kept]]), batch_size=10, target_epsilons=3.0
        )
        batch, labels = next(iter(loader))
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.clip_and_accumulate()
        sums.append(torch.cat([p.summed_grad.flatten() for p in optimizer.params]))
    moved = float((sums[0] - sums[1]).norm())
    assert 0.5 * CLIP < moved <= CLIP


def test_budgets_of_persons_go_by_name():
    pandas = pytest.importorskip("pandas")
    names = sorted(set(PEOPLE))
    budgets = {name: 1.0 + place for place, name in enumerate(names)}
    given = pandas.Series(budgets).iloc[::-1]
    engine, *_ = made(target_epsilons=given, method="scale")
    plain, *_ = made(target_epsilons=[budgets[name] for name in names], method="scale")
    assert torch.equal(engine.max_grad_norms, plain.max_grad_norms)
    assert list(engine.persons) == names and len(engine.max_grad_norms.unique()) > 1


def test_rows_in_any_order_and_cut_into_pieces():
    x, y = table()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    found, _ = trained()
    shuffled, _ = trained([PEOPLE[i] for i in order], data=(x[order], y[order]))
    torch.testing.assert_close(shuffled, found, rtol=1e-9, atol=1e-9)
    whole, _ = trained(at_most=2, batch_size=5)
    _, model, optimizer, loader = made(at_most=2, batch_size=5)
    sizes = []
    for _ in range(EPOCHS):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as pieces:
            for a, b in pieces:
                sizes.append(len(a))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(a), b).backward()
                optimizer.step()
    assert max(sizes) == 4 and len(sizes) > 2 * EPOCHS  # two persons, with two rows each
    torch.testing.assert_close(weights(model), whole, rtol=1e-9, atol=1e-9)


def test_persons_without_rows_take_part_with_a_gradient_of_zero():
    x, y = table()
    x, y, people = x[:2], y[:2], ["Bob", "Bob"]
    data = by_person(x, y, people, at_most=2, persons=["Ann", "Bob", "Cyd", "Dan"])
    engine, model, optimizer, loader = made(data, data=(x, y), batch_size=2)
    assert len(loader) == 2 and list(engine.persons) == ["Ann", "Bob", "Cyd", "Dan"]
    sizes = set()
    for _ in range(EPOCHS):
        for batch, labels in loader:
            sizes.add((len(loader.dataset.units) > 0, len(batch)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
    assert (True, 0) in sizes  # a draw of those who have none
    assert weights(model).isfinite().all() and len(engine.accountant) == 2 * EPOCHS
    assert engine.get_epsilons(DELTA).shape == (4,) and (engine.get_epsilons(DELTA) <= 3).all()


@pytest.mark.parametrize("at_most", [100, 2])
def test_a_filter_charges_persons_for_their_own_gradients(at_most):
    x, y = table()
    budget = torch.arange(10) % 3 * 10 + 12
    filter = ExactFilter(
        10,
        sample_rate=1 / 4,
        noise_multiplier=2.0,
        max_grad_norm=CLIP,
        levels=[0.25, 0.5, 1.0],
        costs=[1, 4, 16],
        budget=budget,
        steps=4 * EPOCHS,
    )
    engine, model, optimizer, loader = made(at_most=at_most, filter=filter, unit="patient")
    data = by_person(x, y, PEOPLE, at_most=at_most)
    start = network()
    measured = engine.accountant.budgets.measure()
    # the choice is that of the step at hand
    assert torch.equal(measured, engine.accountant.budgets.measure())
    network_of, loss = data.seen(start, cross_entropy)
    if at_most == 100:
        persons: Any = data.rows(torch.arange(10))
        wanted = gradient_norms(network_of, loss, *persons)
        torch.testing.assert_close(measured, wanted, rtol=1e-9, atol=0)
    run(model, optimizer, loader)
    assert (
        (filter.spent <= budget).all()
        and (filter.spent > 0).all()
        and len(filter.spent.unique()) > 1
    )
    assert (
        "each patient is charged" in engine.statement()
        and "number of patients, 10" in engine.statement()
    )
    with pytest.raises(ValueError, match="filter must be one of the data set's 10 persons"):
        made(
            filter=ExactFilter(
                ROWS,
                sample_rate=1 / 4,
                noise_multiplier=2.0,
                max_grad_norm=CLIP,
                levels=[1.0],
                costs=[1],
                budget=9,
                steps=9,
            )
        )


def test_rows_that_nearly_cancel_are_summed_before_they_are_clipped():
    """A mean that is a millionth of its rows is at most its clip norm long, which rows scaled one
    by one are not.
    """
    x = torch.tensor([[1e3, 2.0, 3.0, 4.0], [1e3, 2.0, 3.0, 4.0], [1e-4, 0.0, 0.0, 0.0]])
    y = torch.tensor([0.5, -0.5, 0.0])
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 1e-4)
    _, model, optimizer, loader = made(
        ["a", "a", "b"], data=(x, y[:, None]), model=model, batch_size=2, target_epsilons=1.0
    )
    batch, targets = next(iter(loader))
    nn.functional.mse_loss(model(batch), targets).backward()
    optimizer.clip_and_accumulate()
    drawn = len(loader.dataset.units)
    moved = torch.cat([p.summed_grad.flatten() for p in optimizer.params]).double().norm()
    assert drawn == 2 and 0 < float(moved) <= drawn * CLIP


def test_a_row_that_is_not_finite_takes_its_person_out_and_no_other():
    x, y = table()
    x[5] = torch.inf
    _, model, optimizer, loader = made(data=(x, y), batch_size=10, prove=False, trust_loss=True)
    batch, labels = next(iter(loader))
    nn.functional.cross_entropy(model(batch), labels).backward()
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.clip_and_accumulate()
    found = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
    plain, wanted = network(), 0
    for person in sorted(set(PEOPLE) - {20}):
        gradient = by_hand(plain, rows_of(person), x, y, "mean")
        wanted = wanted + gradient * min(1.0, CLIP / (float(gradient.norm()) + 1e-6))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    assert optimizer.dropped == 1


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_that_goes_on_hands_out_the_same_rows(seed, tmp_path):
    def seen(steps, model, optimizer, loader):
        rows = []
        for x, y in (each for _ in range(EPOCHS) for each in loader):
            rows.append(list(loader.dataset.handed_out))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if len(rows) == steps:
                break
        return rows

    engine, *whole = made(at_most=1, seed=seed)
    seen(5, *whole)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=whole[0], optimizer=whole[1])
    rest = seen(7, *whole)
    other, *again = made(at_most=1, seed=seed)
    other.load_checkpoint(path=tmp_path / "run.pt", module=again[0], optimizer=again[1])
    assert seen(7, *again) == rest
    assert seed is None or len({row for rows in rest for row in rows}) > 10
    moved, *third = made(people=PEOPLE[1:] + PEOPLE[:1], at_most=1, seed=seed)
    if seed is None:
        with pytest.warns(RuntimeWarning, match="other data"):
            moved.load_checkpoint(path=tmp_path / "run.pt", module=third[0], optimizer=third[1])


def test_a_pass_that_looks_sees_the_rows_that_the_step_will_take_and_changes_no_generator():
    _, _, _, loader = made(at_most=1, batch_size=10)
    first = [row for _ in loader for row in loader.dataset.handed_out]
    assert first == [row for _ in loader for row in loader.dataset.handed_out]
    before = torch.random.get_rng_state()
    assert len(loader.dataset) == 10 and len(loader.dataset[9]) == 1
    assert torch.equal(before, torch.random.get_rng_state())
    aside = DataLoader(loader.dataset, batch_size=4)
    assert sum(len(x) for x, _ in aside) == 10  # one row of each person


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"mode": "ghost"}, ValueError, "people must be None in ghost mode"),
        ({"batch_first": False}, ValueError, "people must be None where batch_first is False"),
        (
            {"people": PEOPLE[1:]},
            ValueError,
            "people must name a person for each of the 30 rows, got 29",
        ),
        ({"people": [[1, 2]] * ROWS}, ValueError, "people must name one person a row"),
        ({"at_most": 0}, ValueError, "at_most must lie in"),
        ({"at_most": None}, ValueError, "people and at_most must be given both"),
        ({"target_epsilons": [1.0] * ROWS}, ValueError, "10"),
        ({"unit": ""}, ValueError, "unit must be a word"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
    ids=str,
)
def test_what_persons_cannot_be_is_refused_by_name(options, error, said):
    with pytest.raises(error, match=said):
        made(**options)


def test_persons_of_other_rows_are_refused():
    x, y = table()
    with pytest.raises(
        ValueError, match="people must name a person for each of the 30 items, got 29"
    ):
        made(by_person(x[1:], y[1:], PEOPLE[1:], at_most=1))


def test_layers_are_clipped_by_persons_too():
    norms = [0.1, 0.2, 0.3, 0.4]
    _, model, optimizer, loader = made(batch_size=10, max_grad_norm=norms, clipping="per_layer")
    x, y = table()
    batch, labels = next(iter(loader))
    nn.functional.cross_entropy(model(batch), labels).backward()
    optimizer.clip_and_accumulate()
    plain = network()
    wanted = [0.0] * 4
    for person in sorted(set(PEOPLE)):
        parts = by_hand(plain, rows_of(person), x, y, "mean").split(
            [p.numel() for p in plain.parameters()]
        )
        wanted = [
            w + g * min(1.0, c / (float(g.norm()) + 1e-6)) for w, g, c in zip(wanted, parts, norms)
        ]
    for p, own in zip(optimizer.params, wanted):
        torch.testing.assert_close(p.summed_grad.flatten(), own, rtol=1e-6, atol=1e-8)
