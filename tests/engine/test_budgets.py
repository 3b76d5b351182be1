"""The engine with a filter: everybody pays for what their own gradients are clipped to, and no
budget is exceeded.
"""

import math
import re

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcompanion.accounting import Ledger
from dpcompanion.attacks import epsilon_lower_bound
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.idp import IndividualizedPrivacyEngine
from dpcompanion.training import DPSGDPlan, cross_entropy, gradient_norms

from ..refusals import refused, refuses

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:mean of empty")
N, BATCHES, CLIP, NOISE, DELTA = 24, 3, 0.6, 2.0, 1e-3
BUDGET = torch.tensor([9, 30, 60]).repeat_interleave(N // 3)


def data():
    generator = torch.Generator().manual_seed(1)
    # Some have short gradients, some long ones.
    size = torch.logspace(-1.5, 1, N, dtype=torch.float64)[
        torch.randperm(N, generator=generator), None
    ]
    return TensorDataset(
        size * torch.randn(N, 4, generator=generator, dtype=torch.float64), torch.arange(N) % 3
    )


def exact(**changes):
    return ExactFilter(
        N,
        **{
            "sample_rate": 1 / BATCHES,
            "noise_multiplier": NOISE,
            "max_grad_norm": CLIP,
            "levels": [0.25, 0.5, 1.0],
            "costs": [1, 4, 16],
            "budget": BUDGET,
            "steps": 12,
            **changes,
        },
    )


def renyi():
    return RenyiFilter(
        N,
        sample_rate=1 / BATCHES,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        orders=[8.0],
        budgets=BUDGET[:, None] * 0.1,
    )


def private(
    filter,
    *,
    mode="hooks",
    seed=0,
    model=None,
    engine=None,
    dataset=None,
    batch_size=N // BATCHES,
    **options,
):
    """An engine and what it returns, the criterion before the loader."""
    torch.manual_seed(7)
    model, engine = (
        model or nn.Linear(4, 3).double(),
        engine or IndividualizedPrivacyEngine(accountant="rdp"),
    )
    options = {
        "epochs": 4,
        "updates_per_epoch": BATCHES,
        "loss": None if "norms" in options else cross_entropy,
        "noise_generator": torch.Generator().manual_seed(seed),
        **options,
    }
    module, optimizer, *rest = engine.make_private_with_filter(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        filter=filter,
        grad_sample_mode=mode,
        data_loader=DataLoader(data() if dataset is None else dataset, batch_size=batch_size),
        **options,
    )
    return engine, module, optimizer, *(rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest))


def train(model, optimizer, criterion, loader, epochs=4):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def alone(model, x, y):
    """Every example's own gradient by plain autograd, (n, d)."""
    parameters = list(model.parameters())
    return torch.stack(
        [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters
                    )
                ]
            )
            for i in range(len(x))
        ]
    )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("make", [exact, renyi])
def test_every_gradient_is_clipped_to_what_the_filter_allows_and_nobody_exceeds_a_budget(
    make, mode
):
    plain, filter, own = nn.Linear(4, 3).double(), make(), make()
    engine, model, optimizer, criterion, loader = private(filter, mode=mode)
    x, y = data().tensors

    def bare():
        for p in optimizer.params:
            p.grad = p.summed_grad.view_as(p)

    optimizer.add_noise = bare
    asked_for_less, left = False, False
    for _ in range(4):
        for batch_x, batch_y in loader:
            before = weights(model)
            torch.nn.utils.vector_to_parameters(before, plain.parameters())
            gradients = alone(plain, x, y)
            norms = gradients.norm(dim=1)
            limits = own.clip_norms(norms.clamp(max=CLIP))
            optimizer.zero_grad()
            criterion(model(batch_x), batch_y).backward()
            optimizer.step()
            drawn = loader.batch_sampler.last
            expected = (gradients * (limits / norms).clamp(max=1)[:, None])[drawn].sum(dim=0)
            moved = (before - weights(model)) * N / BATCHES
            assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-5)
            assert torch.allclose(filter.spent, own.spent, rtol=1e-9)
            asked_for_less |= bool(((limits > 0) & (limits < CLIP)).any())
            left |= bool((limits[drawn] == 0).any())
    spent = filter.spent if make is exact else filter.spent[:, 0]
    budgets = filter.budget if make is exact else filter.budgets[:, 0]
    assert bool((spent <= budgets).all()) and asked_for_less and left
    assert bool((spent[BUDGET == 60] > budgets[BUDGET == 9].max()).any())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("block", [1, 5])
def test_draws_that_are_left_half_way_and_cut_into_pieces_are_paid_once_a_step(mode, block):
    filter = exact(levels=[1.0], costs=[1], budget=100, block=block)
    engine, model, optimizer, criterion, loader = private(
        filter, mode=mode, norms=lambda: torch.full((N,), 9.0)
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as small:
        for round in range(40):
            for count, (x, y) in enumerate(small):
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if count == 5 * (round % 3) or len(engine.accountant) == 12:
                    break
            model.eval()
            for x, _ in small:  # an evaluation: nobody pays
                model(x)
            model.train()
            paid = filter.spent.unique()
            taken = len(engine.accountant)
            assert len(paid) == 1 and math.ceil(taken / block) <= int(paid) <= math.ceil(
                (taken + 1) / block
            )
            if taken == 12:
                break
    assert taken == 12 and int(paid) == math.ceil(12 / block)
    with pytest.raises(RuntimeError, match="budgets"):
        train(model, optimizer, criterion, loader)
    assert torch.equal(filter.spent.unique(), paid)


def test_norms_are_measured_as_often_as_was_asked_and_bounded():
    calls = []

    def norms():
        calls.append(len(engine.accountant))
        return torch.tensor([math.nan, math.inf, 5.0, 0.14] + [0.0] * (N - 4))

    filter = exact()
    engine, *parts = private(filter, norms=norms, updates_per_epoch=0.5)
    train(*parts)
    assert calls == [0, 6]
    # Not finite, or longer than the clip norm: in full, and then what is left. Nothing costs
    # nothing.
    assert filter.spent[:5].tolist() == [9, 9, 9, 9, 0] and not bool(filter.spent[4:].any())
    engine, *parts = private(exact(), norms=lambda: torch.ones(3))
    refused("norms", train, *parts)


def by_layers(model, x, y):
    return gradient_norms(model, cross_entropy, x, y, method="mixed")


def by_backward_passes(model, x, y):
    """A loop of one's own, which writes into `grad` and leaves the module in training mode."""
    model.train()
    norms = []
    for i in range(len(x)):
        for p in model.parameters():
            p.grad = None
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("norms_of", [by_layers, by_backward_passes])
def test_norms_of_ones_own_may_be_measured_on_the_module_itself(mode, norms_of):
    def trained(own):
        torch.manual_seed(7)
        model, (x, y), filter = nn.Linear(4, 3).double(), data().tensors, exact()
        options = {"norms": lambda: norms_of(model, x, y)} if own else {}
        engine, *parts = private(filter, model=model, mode=mode, **options)
        train(*parts)
        return filter.spent, weights(model)

    (spent, found), (expected_spent, expected) = trained(own=True), trained(own=False)
    assert torch.equal(spent, expected_spent)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_the_measuring_pass_leaves_no_trace():
    """The same levels by a function of one's own, which touches nothing, give the same run."""

    def trained(measure):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
        filter, found = exact(), []
        options = {} if measure else {"norms": lambda: next(recorded)}
        engine, *parts = private(filter, model=model, **options)
        if measure:
            own = engine.accountant.budgets.measure
            engine.accountant.budgets.measure = lambda: found.append(own()) or found[-1]
        train(*parts)
        return weights(model), found

    one, found = trained(True)
    recorded = iter(found)
    other, _ = trained(False)
    assert len(found) == 12 and torch.equal(one, other)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_model_that_is_not_wrapped_is_measured_alike(mode):
    def trained(wrap_model):
        model, filter = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), exact()
        torch.manual_seed(7)
        model.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)
        _, made, *parts = private(filter, model=model, mode=mode, wrap_model=wrap_model)
        train(made if wrap_model else model, *parts)
        return weights(model), filter.spent

    for one, other in zip(trained(True), trained(False)):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExactFilter, RenyiFilter])
def test_the_statement_names_the_filter_s_epsilons_at_the_delta_of_its_targets(kind):
    delta, targets = 1e-3, torch.where(torch.arange(N) % 2 == 0, 1.0, 2.0)
    run = dict(
        n=N,
        sample_rate=1 / BATCHES,
        steps=12,
        max_grad_norm=CLIP,
        noise_multiplier=NOISE,
        delta=delta,
    )
    filter = kind.for_plan(DPSGDPlan(**run), targets)
    engine, model, *parts = private(filter, unit="patient")
    found = re.findall(
        r"promised beforehand epsilon (\S+) to (\S+) at delta 0.001\.", engine.statement()
    )
    low, high = map(float, found[0])
    assert low - 1e-3 <= float(filter.epsilon(delta).min()) <= low <= 1.001
    assert high - 1e-3 <= float(filter.epsilon(delta).max()) <= high <= 2.001
    assert (
        f"({kind.__name__})" in engine.statement()
        and "each patient is charged" in engine.statement()
    )
    ledger = Ledger().add(engine, delta=delta)
    assert (ledger.neighbours, ledger.units) == ("zero-out", ("patient",))
    with pytest.warns(RuntimeWarning, match="less noise"):
        engine.accountant.void("less noise")
    assert "no epsilon holds" in engine.statement() and "promised" not in engine.statement()


@pytest.mark.parametrize("make", [exact, renyi])
def test_a_run_with_a_filter_goes_on_from_a_checkpoint(make, tmp_path):
    def made():
        filter = make() if make is renyi else make(block=2)
        return filter, *private(filter, updates_per_epoch=0.75)

    filter, engine, model, optimizer, *rest = made()
    assert "(zero-out; the number of examples, " in engine.statement()
    promise = (
        f"By its filter ({type(filter).__name__}) it promised beforehand an epsilon at each delta"
    )
    assert promise in engine.statement() and "Epsilon at most" not in engine.statement()
    train(model, optimizer, *rest, epochs=1)  # three steps: in the middle of a block
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    train(model, optimizer, *rest, epochs=3)
    its_filter, again, second, its_optimizer, *its_rest = made()
    again.load_checkpoint(path=tmp_path / "run.pt", module=second, optimizer=its_optimizer)
    assert len(again.accountant) == 3 and 0 < float(its_filter.spent.max()) < float(
        filter.spent.max()
    )
    train(second, its_optimizer, *its_rest, epochs=3)
    assert torch.equal(its_filter.spent, filter.spent) and torch.equal(
        weights(second), weights(model)
    )
    other, *_ = private(exact(budget=61))
    with pytest.raises(ValueError, match="state"):
        other.accountant.load_state_dict(
            engine.accountant.state_dict()
            | {"parameters": other.accountant.state_dict()["parameters"]}
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"paid": torch.full((N,), 2 * CLIP)}, "paid"),
        ({"served": -1}, "served must"),
        ({"measured": torch.ones(3)}, "measured"),
    ],
)
def test_a_checkpoint_that_allows_more_than_the_filter_is_refused(change, message):
    engine, *parts = private(exact())
    train(*parts, epochs=1)
    state = engine.accountant.state_dict()
    refused(
        message, engine.accountant.load_state_dict, state | {"budgets": state["budgets"] | change}
    )


def test_the_epsilons_are_the_promise_of_the_filter_until_noise_is_missing():
    filter = exact(
        levels=[0.5, 1.0], costs=[1, 4], budget=torch.tensor([4, 8]).repeat_interleave(N // 2)
    )
    engine, model, optimizer, criterion, loader = private(filter)
    assert engine.get_epsilon(DELTA) == 0
    train(model, optimizer, criterion, loader, epochs=1)
    epsilons = engine.get_epsilons(DELTA)
    assert torch.equal(epsilons, filter.epsilon(DELTA)) and epsilons[0] < epsilons[
        -1
    ] == engine.get_epsilon(DELTA)
    optimizer.noise_multiplier = 1.9
    with pytest.warns(RuntimeWarning, match="budget"):
        train(model, optimizer, criterion, loader, epochs=1)
    assert engine.get_epsilon(DELTA) == math.inf


class Dictionaries(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"x": torch.ones(4, dtype=torch.float64), "y": 0}


def test_bad_input_is_refused_by_name():
    run = dict(sample_rate=1 / 3, noise_multiplier=2.0, max_grad_norm=1.0, steps=3)
    few, good = ExactFilter(3, **run, levels=[1.0], costs=[1], budget=3), {"filter": exact()}
    refuses(
        private,
        good,
        filter=[object(), exact(sample_rate=0.3), few],
        loss=[None, "a"],
        updates_per_epoch=[0],
        epochs=[0],
    )
    refuses(private, good | {"loss": cross_entropy}, norms=[list])
    for change, message in (
        ({"mode": "no_op"}, "grad_sample_mode"),
        ({"batch_first": False}, "norms"),
    ):
        refused(message, private, exact(), **change)


def test_batches_that_are_no_pairs_need_norms_of_ones_own():
    _, model, optimizer, _, loader = private(exact(), dataset=Dictionaries())
    batch = next(iter(loader))
    nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    refused("norms", optimizer.step)


def test_the_filters_of_two_runs_are_not_mixed_up():
    filter, other = exact(), exact()
    engine, *_ = private(filter)
    _, *parts = private(other, engine=engine)  # before any step: the second replaces it
    train(*parts)
    assert not bool(filter.spent.any()) and bool(other.spent.any())


# The audit. Half of the coordinates of a linear model belong to a canary each, whose gradient
# points along its coordinate and is longer than the clip norm; nobody writes to the others.
# Canaries ask for more once they are seen.
CANARIES, STEPS = 300, 64


def moved(budget, spoil=None):
    """How far coordinates with and without canaries moved, in standard deviations of the noise; and
    the filter.
    """
    dataset, inside, outside = (
        TensorDataset(10 * torch.eye(CANARIES, 2 * CANARIES), torch.zeros(CANARIES)),
        [],
        [],
    )
    for seed in range(4):
        filter = ExactFilter(
            CANARIES,
            sample_rate=0.5,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            levels=[0.25, 1.0],
            costs=[1, 16],
            budget=budget,
            steps=STEPS,
        )
        model = nn.Linear(2 * CANARIES, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine, made, optimizer, _, loader = private(
            filter,
            model=model,
            dataset=dataset,
            batch_size=CANARIES // 2,
            epochs=STEPS // 2,
            seed=seed,
            norms=lambda: torch.where(model.weight[0, :CANARIES] > 0, 1.0, 0.25),
        )
        if spoil:
            spoil(engine)
        for _ in range(STEPS // 2):
            for x, _ in loader:
                optimizer.zero_grad()
                (-made(x)).mean().backward()
                optimizer.step()
        total = model.weight.detach()[0] * optimizer.expected_batch_size / (2 * math.sqrt(STEPS))
        inside.append(total[:CANARIES])
        outside.append(total[CANARIES:])
    return torch.cat(inside), torch.cat(outside), filter


def audited(inside, outside):
    return max(
        float(
            epsilon_lower_bound(
                true_positives=(inside > threshold).sum(),
                positives=len(inside),
                false_positives=(outside > threshold).sum(),
                negatives=len(outside),
                delta=DELTA,
                confidence=0.999,
            )
        )
        for threshold in (0.5, 1.0, 2.0)
    )


@pytest.mark.slow
def test_an_audit_with_adaptive_canaries_stays_below_the_promise_and_catches_an_ignored_filter():
    inside, outside, filter = moved(20)
    promise = float(filter.epsilon(DELTA)[0])
    assert audited(inside, outside) <= promise < 1.2
    assert bool((filter.spent <= 20).all()) and bool((filter.spent > 16).any())

    def spoil(engine):
        engine.accountant.budgets.clip_norms = lambda: torch.ones(CANARIES)

    inside, outside, _ = moved(20, spoil)
    assert audited(inside, outside) > promise


def test_whatever_an_example_is_called_the_statement_tells_of_the_mechanism():
    engine, *_ = private(exact(), unit="case, delta wave")
    said = engine.statement()
    assert f"Poisson sampling at rate {1 / BATCHES:g}" in said and f"noise {NOISE:g} times" in said
    assert "each case, delta wave is charged" in said and "accountant" not in said


def test_a_filter_that_has_paid_is_warned_of():
    filter = exact()
    private(filter)
    filter.record(filter.levels_for(torch.ones(N)), 1)
    with pytest.warns(UserWarning, match="filter has paid for another run"):
        private(filter)


@pytest.mark.parametrize("method", ["make_private_with_budgets", "make_private_with_filter"])
def test_an_unknown_keyword_is_refused_in_the_name_of_the_method(method):
    model = nn.Linear(4, 3).double()
    own = (
        {"filter": exact(), "loss": cross_entropy}
        if method == "make_private_with_filter"
        else {"target_epsilons": 1.0, "target_delta": DELTA, "max_grad_norm": CLIP}
    )
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword.*'peple'"):
        getattr(IndividualizedPrivacyEngine(), method)(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=8),
            epochs=1,
            peple=range(N),
            **own,
        )
