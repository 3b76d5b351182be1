import contextlib
import copy
import inspect
import io
import math
import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpcompanion import idp
from dpcompanion.accounting import Gaussian, Ledger, LedgerEntry, compute_epsilon
from dpcompanion.attacks import epsilon_lower_bound
from dpcompanion.engine.checks import check_loader
from dpcompanion.idp import IndividualizedPrivacyEngine, budgets_for
from dpcompanion.mechanism.noise import fingerprint, generators
from dpcompanion.training.checkpoints import write_checkpoint

from ..refusals import refused, refuses

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:mean of empty")
N, DELTA = 60, 1e-5
BUDGETS = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(20)


def data(n=N, features=4):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, features, generator=generator), torch.randint(3, (n,), generator=generator)
    )


def private(
    *,
    engine=None,
    dataset=None,
    batch_size=15,
    budgets=BUDGETS,
    lr=0.1,
    seed=0,
    model=None,
    collate_fn=None,
    **options,
):
    """The engine and what it returns, with an unseeded loader and a seeded noise generator."""
    torch.manual_seed(7)
    dataset = data() if dataset is None else dataset
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = engine or IndividualizedPrivacyEngine(accountant="rdp")
    options = {
        "target_delta": DELTA,
        "epochs": 2,
        "max_grad_norm": 0.5,
        "method": "scale",
        "noise_generator": torch.Generator().manual_seed(seed),
        **options,
    }
    made = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn),
        target_epsilons=budgets,
        **options,
    )
    return engine, *made


def steps(model, optimizer, loader, criterion=None, epochs=1):
    criterion = criterion or nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()


def without_noise(optimizer):
    """Steps move by the sums of clipped gradients alone."""

    def bare():
        for p in optimizer.params:
            p.grad = p.summed_grad.view_as(p)

    optimizer.add_noise = bare


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_equal_budgets_give_the_parameters_of_opacus_itself():
    opacus = PrivacyEngine(accountant="rdp")
    model = nn.Linear(4, 3)
    _, theirs, loader = opacus.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=15),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=0.5,
    )
    for method in ("sample", "scale"):
        engine, _, optimizer, own_loader = private(budgets=torch.full((N,), 2.0), method=method)
        assert optimizer.noise_multiplier == pytest.approx(theirs.noise_multiplier, rel=1e-2)
        assert optimizer.max_grad_norm == theirs.max_grad_norm
        assert optimizer.expected_batch_size == theirs.expected_batch_size
        assert len(own_loader) == len(loader)
        assert engine.sample_rates.tolist() == pytest.approx([loader.sample_rate] * N)


@pytest.mark.parametrize(
    "method, weight, accountant",
    [
        ("sample", None, "rdp"),
        ("scale", None, "rdp"),
        ("combined", 0.5, "rdp"),
        ("scale", None, "pld"),
    ],
)
def test_every_example_spends_its_own_budget(method, weight, accountant):
    engine, model, optimizer, loader = private(
        engine=IndividualizedPrivacyEngine(accountant=accountant),
        method=method,
        sample_weight=weight,
    )
    assert engine.get_epsilons(DELTA).tolist() == [0.0] * N and engine.get_epsilon(DELTA) == 0
    steps(model, optimizer, loader)
    half = engine.get_epsilons(DELTA)
    for i in (0, 25, 59):
        run = {
            "sample_rate": float(engine.sample_rates[i]),
            "noise_multiplier": float(engine.noise_multipliers[i]),
        }
        # The noise that training adds over the example's own clip norm.
        assert run["noise_multiplier"] == pytest.approx(
            optimizer.noise_multiplier * optimizer.max_grad_norm / float(engine.max_grad_norms[i]),
            rel=1e-9,
        )
        assert half[i] == compute_epsilon(**run, steps=4, delta=DELTA, accountant=accountant)
    steps(model, optimizer, loader)
    spent = engine.get_epsilons(DELTA)
    assert bool((spent <= BUDGETS).all()) and bool((spent >= 0.995 * BUDGETS).all())
    assert engine.get_epsilon(DELTA) == float(spent.max())


def test_budgets_are_one_number_one_for_each_or_shares():
    one, each, shares = (
        private(budgets=budgets)[0]
        for budgets in (2.0, torch.full((N,), 2.0), {1.0: 0.25, 4.0: 0.75})
    )
    assert torch.equal(
        one.noise_multipliers, each.noise_multipliers
    ) and one.noise_multipliers.shape == (N,)
    dealt = budgets_for({1.0: 0.25, 4.0: 0.75}, N)
    expected = private(budgets=dealt)[0]
    assert torch.equal(shares.noise_multipliers, expected.noise_multipliers)
    assert int((dealt == 1.0).sum()) == N // 4
    refused("target_epsilons.*shares", private, budgets={1.0: 0.25, 4.0: 0.7})


def test_with_a_different_budget_for_everybody_nobody_exceeds_it():
    n = 400
    budgets = torch.linspace(1, 3, n, dtype=torch.float64)
    engine, model, optimizer, loader = private(dataset=data(n), budgets=budgets, batch_size=100)
    steps(model, optimizer, loader)
    for i in (0, 123, 399):
        exact = compute_epsilon(
            sample_rate=0.25,
            noise_multiplier=float(engine.noise_multipliers[i]),
            steps=4,
            delta=DELTA,
            accountant="rdp",
        )
        assert exact <= engine.get_epsilons(DELTA)[i] <= 1.0001 * exact
    steps(model, optimizer, loader)
    assert bool((engine.get_epsilons(DELTA) <= budgets).all())


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_everybodys_epsilon_and_an_examples_are_by_one_accountant(accountant):
    engine, model, optimizer, loader = private(
        engine=IndividualizedPrivacyEngine(accountant=accountant), epochs=3
    )
    steps(model, optimizer, loader)
    for delta in (DELTA, 1e-3, 1e-9):
        own = engine.get_epsilons(delta)
        assert engine.get_epsilon(delta) == float(own.max())
        everybody = compute_epsilon(
            sample_rate=0.25,
            noise_multiplier=float(engine.noise_multipliers.min()),
            steps=4,
            delta=delta,
            accountant=accountant,
        )
        assert bool((own <= everybody).all()) and float(own.max()) == pytest.approx(
            everybody, rel=1e-8
        )


def test_the_engine_and_the_three_methods_have_one_default():
    defaults = {
        inspect.signature(called).parameters["accountant"].default
        for called in (
            idp.sample_parameters,
            idp.scale_parameters,
            idp.combined_parameters,
            IndividualizedPrivacyEngine,
        )
    }
    assert defaults == {"pld"}


def test_no_step_is_taken_beyond_the_budgets():
    engine, model, optimizer, loader = private(epochs=1)
    steps(model, optimizer, loader)
    before = weights(model)
    with pytest.raises(RuntimeError, match="budgets"):
        steps(model, optimizer, loader)
    assert torch.equal(before, weights(model)) and len(engine.accountant) == 4


@pytest.mark.parametrize("scheduler", [ExponentialNoise, ExponentialGradClip])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_after_a_step_with_less_noise_than_planned_no_epsilon_is_claimed(scheduler, mode):
    engine, model, optimizer, *rest = private(grad_sample_mode=mode)
    criterion, loader = rest if mode == "ghost" else (None, *rest)
    schedule = scheduler(optimizer, gamma=0.9)
    steps(model, optimizer, [next(iter(loader))], criterion)
    schedule.step()
    assert engine.get_epsilon(DELTA) < BUDGETS.max()
    with pytest.warns(RuntimeWarning, match="budget"):
        steps(model, optimizer, [next(iter(loader))], criterion)
    assert len(engine.accountant) == 2 and (engine.get_epsilons(DELTA) == math.inf).all()
    again, *_ = private(grad_sample_mode=mode)
    again.accountant.load_state_dict(engine.accountant.state_dict())
    assert again.get_epsilon(DELTA) == math.inf
    assert "no epsilon holds" in engine.statement() and "Epsilon" not in engine.statement()
    with pytest.raises(ValueError, match="no epsilon holds"):
        Ledger().add(engine)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_step_hook_of_ones_own_leaves_the_count_of_steps_as_it_is(mode):
    engine, model, optimizer, *rest = private(grad_sample_mode=mode)
    criterion, loader = rest if mode == "ghost" else (None, *rest)
    seen = []
    optimizer.attach_step_hook(lambda of: seen.append(of))
    steps(model, optimizer, loader, criterion)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as small:
        steps(model, optimizer, small, criterion)
    assert len(engine.accountant) == len(seen) == 8
    with pytest.raises(RuntimeError, match="budgets"):
        steps(model, optimizer, loader, criterion)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_step_whose_hook_fails_is_accounted_for_since_its_noisy_gradient_is_there(mode):
    engine, model, optimizer, *rest = private(grad_sample_mode=mode)
    criterion, loader = rest if mode == "ghost" else (None, *rest)

    def fails(of):
        raise KeyError("of one's own")

    optimizer.attach_step_hook(fails)
    for count in range(1, 4):
        with pytest.raises(KeyError):
            steps(model, optimizer, [next(iter(loader))], criterion)
        assert len(engine.accountant) == count


def clipped_sum(model, x, y, norms):
    """Gradients of each example by itself, clipped to its norm, and summed."""
    parts = []
    for i in range(len(x)):
        gradient = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        flat = torch.cat([g.flatten() for g in gradient])
        parts.append(flat * min(1.0, float(norms[i]) / float(flat.norm())))
    return torch.stack(parts).sum(dim=0)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_every_gradient_is_clipped_to_its_own_norm_and_the_sum_is_divided_by_a_public_number(mode):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine, model, optimizer, *rest = private(grad_sample_mode=mode, max_grad_norm=0.05, lr=1.0)
    without_noise(optimizer)
    criterion, loader = rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest)
    plain.load_state_dict(
        {name.removeprefix("_module."): value for name, value in model.state_dict().items()}
    )
    (x, y), before = next(iter(loader)), weights(model)
    expected = clipped_sum(plain, x, y, engine.max_grad_norms[loader.dataset.handed_out])
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    assert len(set(engine.max_grad_norms.tolist())) == 3
    assert torch.allclose(before - weights(model), expected / 15.0, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_example_moves_a_sum_by_no_more_than_its_clip_norm_whatever_the_type_of_the_model(
    dtype, mode
):
    """Rounded to bfloat16, the sum of a thousand gradients moved by 1.9 clip norms."""
    sums, n, generator = [], 1024, torch.Generator().manual_seed(0)
    x = (
        torch.randn(1, 200, generator=generator) + 0.3 * torch.randn(n, 200, generator=generator)
    ).to(dtype)
    for present in (1, 0):
        x[7] *= present
        dataset = TensorDataset(x.clone(), torch.zeros(n))
        _, model, optimizer, loader = private(
            model=nn.Linear(200, 1, bias=False).to(dtype),
            dataset=dataset,
            batch_size=n,
            budgets=torch.ones(n),
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        model(next(iter(loader))[0]).float().mean().backward()
        optimizer.pre_step()
        (p,) = model.parameters()
        sums.append(p.summed_grad.double())
        assert p.grad.dtype == p.dtype == dtype
    assert 0.9 < float((sums[0] - sums[1]).norm()) < 1.0001  # the last bits of float32


class Halves(nn.Module):
    """A small layer in float32 and a large one in bfloat16."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 1, bias=False), nn.Linear(100, 1, bias=False).bfloat16()

    def forward(self, x):
        return self.one(0.01 * x[:, :2]) + self.other(x[:, 2:].bfloat16()).float()


def test_no_gradient_is_longer_than_its_clip_norm_in_a_model_of_two_types():
    dataset = TensorDataset(
        torch.randn(N, 102, generator=torch.Generator().manual_seed(0)), torch.zeros(N)
    )
    engine, model, optimizer, loader = private(
        model=Halves(), dataset=dataset, batch_size=1, epochs=1
    )
    own = engine.accountant.budgets.clip_norms()
    found = []
    for x, _ in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.pre_step()
        if len(x) == 1:
            total = torch.cat([p.summed_grad.double().flatten() for p in optimizer.params]).norm()
            found.append(float(total / own[loader.dataset.handed_out]))
    assert 0.999 < max(found) <= 1


def test_parameters_to_which_noise_cannot_go_in_full_are_refused():
    refused("module", private, model=nn.Linear(4, 3, dtype=torch.complex64))
    refused("weight", private, model=nn.Linear(4, 3).bfloat16(), grad_sample_mode="ghost")


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("method", ["sample", "scale"])
@pytest.mark.slow
def test_a_memory_manager_changes_nothing(method, mode):
    def trained(pieces):
        _, model, optimizer, *rest = private(
            method=method, grad_sample_mode=mode, max_grad_norm=0.05
        )
        criterion, loader = rest if mode == "ghost" else (None, *rest)
        if pieces is None:
            steps(model, optimizer, loader, criterion, epochs=2)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            ) as small:
                steps(model, optimizer, small, criterion, epochs=2)
        return weights(model)

    whole = trained(None)
    for pieces in (1, 4, 100):
        assert torch.allclose(trained(pieces), whole, atol=1e-5)


def test_looking_through_the_managed_loader_and_leaving_it_early_joins_no_draws():
    """The signals of Opacus's memory manager then lie; each step still holds examples of one draw,
    each once.
    """
    engine, model, optimizer, loader = private(epochs=30, method="sample", budgets=BUDGETS * 5)
    taken, added = [], optimizer.clip_and_accumulate

    def noting():
        taken.append((loader.batch_sampler.number, list(loader.dataset.handed_out)))
        added()

    optimizer.clip_and_accumulate, ends = noting, []
    noise = optimizer.add_noise
    optimizer.add_noise = lambda: (
        ends.append((len(taken), [p.summed_grad.norm() for p in optimizer.params])),
        noise(),
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as small:
        for _ in range(4):
            model.eval()
            with torch.no_grad():
                for x, _ in small:  # an evaluation: nothing is learned
                    model(x)
            model.train()
            # a training that is left in the middle of a draw
            for count, (x, y) in enumerate(small):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if count == 5:
                    break
    start = 0
    for end, _ in ends:
        # What ends in this step: the pieces of its own draw; pieces of a draw that was left do not
        # count.
        draw = taken[end - 1][0]
        examples = [i for number, batch in taken[start:end] for i in batch if number == draw]
        assert len(examples) == len(set(examples))
        start = end
    assert len(engine.accountant) == len(ends) > 0
    assert len({taken[end - 1][0] for end, _ in ends}) == len(ends)


def test_a_draw_that_is_left_half_way_adds_nothing_to_the_next():
    def trained(leave_one):
        _, model, optimizer, loader = private(max_grad_norm=0.05, epochs=3)
        without_noise(optimizer)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as small:
            iterator = iter(small)
            if leave_one:
                x, y = next(iterator)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            else:
                next(iterator)
            steps(model, optimizer, small)
        return weights(model)

    assert torch.equal(trained(True), trained(False))


def test_there_is_one_sequence_of_draws_and_no_pass_is_a_way_out_of_it():
    _, model, optimizer, loader = private(epochs=3)
    draws = loader.batch_sampler
    coming = list(draws)  # an evaluation, which sees what will be trained on
    assert len(coming) == len(draws) and list(draws) == coming
    for own in coming:
        left = iter(draws)
        # whoever stops at a draw begins again with the first that is no step
        next(left), next(left)
        steps(model, optimizer, [next(iter(loader))])
        assert loader.dataset.handed_out == own
    iterator = iter(loader)
    next(iterator)
    refused("draw", steps, model, optimizer, iterator)


def test_two_passes_at_once_hand_out_no_draw_that_was_a_step():
    _, model, optimizer, loader = private(epochs=3)
    first, second = iter(loader), iter(loader)
    next(first)
    for _ in range(3):
        steps(model, optimizer, [next(second)])
    steps(model, optimizer, [next(first)])  # the fourth
    assert len(optimizer._accountant) == 4


def test_a_batch_serves_one_step_only():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    for attempt in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if attempt == 0:
            optimizer.step()
    refused("batch", optimizer.step)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_other_examples_than_those_handed_out_are_refused(mode):
    _, model, optimizer, *rest = private(grad_sample_mode=mode)
    criterion, loader = rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="batch"):
        criterion(model(x[:-1]), y[:-1]).backward()
        optimizer.step()


def test_a_step_without_the_loader_is_refused():
    _, model, optimizer, _ = private()
    nn.functional.cross_entropy(
        model(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)
    ).backward()
    refused("loader", optimizer.step)


def test_the_engine_refuses_shorter_products_of_float32():
    _, model, optimizer, loader = private()
    torch.set_float32_matmul_precision("medium")
    try:
        refused("full float32", steps, model, optimizer, loader)
    finally:
        torch.set_float32_matmul_precision("highest")


class Compared(nn.Module):
    """Of two items, by how much they differ."""

    def __init__(self):
        super().__init__()
        self.features, self.output = nn.Linear(64, 16, bias=False), nn.Linear(16, 2)

    def forward(self, x):
        found = self.features(x)
        return self.output(found[:, 0] - found[:, 1])


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
def test_items_that_are_nearly_alike_move_a_sum_by_their_clip_norm_at_most(mode, size):
    """Opacus's ghost norms lack what cancels over positions in float32: shares were up to twice the
    clip norm.
    """
    torch.manual_seed(3)
    x = size * (1 + torch.rand(N, 1, 64)) + size / 1e4 * torch.randn(N, 2, 64)
    _, model, optimizer, *rest = private(
        model=Compared(),
        dataset=TensorDataset(x, torch.arange(N) % 2),
        batch_size=1,
        budgets=[5.0] * N,
        max_grad_norm=0.1,
        grad_sample_mode=mode,
        prove=False,
        lr=0.0,
    )
    criterion, loader = rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest)
    clipped = 0
    without_noise(optimizer)
    for features, labels in loader:
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()
        if len(features) == 1:
            share = sum(p.summed_grad.double().square().sum() for p in optimizer.params).sqrt()
            assert share <= 0.1
            clipped += bool(share > 0.099)
    assert clipped or size == 1.0


def test_in_ghost_mode_a_loss_that_does_not_clip_is_refused():
    engine, model, optimizer, criterion, loader = private(grad_sample_mode="ghost")
    steps(model, optimizer, [next(iter(loader))], criterion)
    before = weights(model)
    with pytest.raises(ValueError, match="criterion"):
        steps(model, optimizer, loader)  # plain cross entropy after a batch that was clipped
    assert torch.equal(before, weights(model)) and len(engine.accountant) == 1


@pytest.mark.parametrize(
    "method, mode", [("sample", "hooks"), ("scale", "hooks"), ("scale", "ghost")]
)
def test_noise_has_the_deviation_that_was_told_and_empty_batches_take_a_step_of_noise(method, mode):
    model = nn.Linear(4, 3000)
    dataset = TensorDataset(torch.zeros(N, 4), torch.zeros(N, dtype=torch.long))
    engine, model, optimizer, *rest = private(
        model=model,
        dataset=dataset,
        batch_size=1,
        epochs=1,
        method=method,
        lr=1.0,
        grad_sample_mode=mode,
    )
    criterion, loader = rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest)
    sizes, moves = [], []
    for x, y in loader:
        before = next(model.parameters()).detach().clone()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
        # inputs are zero: the weight moves by noise alone
        moves.append(next(model.parameters()).detach() - before)
    assert 0 in sizes and len(engine.accountant) == 60
    expected = optimizer.noise_multiplier * 0.5 / float(engine.sample_rates.sum())
    assert float(engine.sample_rates.sum()) == pytest.approx(1.0)
    moves = torch.stack(moves)
    for chosen in (moves, moves[[size == 0 for size in sizes]]):
        assert float(chosen.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * chosen.numel()))


@pytest.mark.parametrize("pieces", [None, 1])
@pytest.mark.parametrize("least", [1, 2])
def test_a_loop_that_leaves_out_small_draws_is_refused_and_an_evaluation_is_not(least, pieces):
    """Left out and not accounted for, empty draws made a rate of 0.025 one of 0.039."""
    engine, model, optimizer, loader = private(
        dataset=data(10), budgets=torch.ones(10), batch_size=1, epochs=20
    )
    with contextlib.ExitStack() as stack:
        if pieces:
            loader = stack.enter_context(
                BatchMemoryManager(
                    data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
                )
            )
        for _ in range(3):
            list(loader)
            steps(model, optimizer, loader)
        assert len(engine.accountant) == 30
        with pytest.raises(ValueError, match="empty"):
            for _ in range(10):
                own = loader.batch_sampler.sampler if pieces else loader.batch_sampler
                steps(model, optimizer, (batch for batch in loader if len(own.last) >= least))
    assert len(engine.accountant) < 60


def test_a_single_empty_draw_that_is_left_out_is_refused():
    _, model, optimizer, loader = private(
        dataset=data(10), budgets=torch.ones(10), batch_size=1, epochs=20
    )
    draws = iter(loader)
    for x, y in draws:
        if not len(x):
            break
        steps(model, optimizer, [(x, y)])
    refused("empty", steps, model, optimizer, [next(draws)])


def test_every_group_is_drawn_at_its_own_rate_and_independently():
    engine, _, _, loader = private(
        dataset=data(600),
        budgets=BUDGETS.repeat_interleave(10),
        method="sample",
        epochs=1,
        batch_size=150,
    )
    draws = torch.zeros(400, 600)
    for row in draws:
        row[loader.batch_sampler.draw()] = 1
    rates = engine.sample_rates.float()
    for group in (slice(0, 200), slice(200, 400), slice(400, 600)):
        rate, count = float(rates[group][0]), draws[:, group].numel()
        assert float(draws[:, group].mean()) == pytest.approx(
            rate, abs=4 * math.sqrt(rate * (1 - rate) / count)
        )
    # Independent coins: batch sizes vary by the sum of q (1 - q), and neither examples nor steps
    # are correlated.
    sizes = draws.sum(dim=1)
    assert float(sizes.var()) == pytest.approx(
        float((rates * (1 - rates)).sum()), rel=4 * math.sqrt(2 / 400)
    )
    centred = (draws - rates) / torch.sqrt(rates * (1 - rates))
    pairs = centred.T @ centred / 400
    off_diagonal = pairs[~torch.eye(600, dtype=torch.bool)]
    assert float((off_diagonal * math.sqrt(400)).std()) == pytest.approx(1, rel=0.02)
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 4 / math.sqrt(centred[1:].numel())


def test_one_seed_gives_one_run():
    def trained(seed):
        _, model, optimizer, loader = private(seed=seed, method="sample")
        steps(model, optimizer, loader, epochs=2)
        return weights(model)

    assert torch.equal(trained(3), trained(3))
    assert not torch.equal(trained(3), trained(4))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    def made():
        return private(method="scale", epochs=2)

    engine, model, optimizer, loader = made()
    steps(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    steps(model, optimizer, loader)
    again, second, second_optimizer, second_loader = made()
    again.load_checkpoint(path=tmp_path / "run.pt", module=second, optimizer=second_optimizer)
    assert len(again.accountant) == 4
    steps(second, second_optimizer, second_loader)
    assert torch.equal(weights(second), weights(model))
    assert torch.equal(again.get_epsilons(DELTA), engine.get_epsilons(DELTA))


def test_a_checkpoint_from_before_the_steps_taken_is_refused():
    engine, model, optimizer, loader = private()
    start = engine.accountant.state_dict()
    steps(model, optimizer, loader)
    refused("state_dict", engine.accountant.load_state_dict, start)
    engine.accountant.load_state_dict(engine.accountant.state_dict())
    assert len(engine.accountant) == 4


class Elsewhere(torch.Tensor):
    """Stands for a tensor on a GPU: it must be brought home before anything else is done with
    it.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.cpu:
            raise RuntimeError("expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(torch.Tensor)


def test_a_checkpoint_that_was_loaded_to_another_device_is_taken():
    state = private()[0].accountant.state_dict()
    state["steps"] = 2
    for part in ("parameters", "generators"):
        state[part] = {
            name: value.as_subclass(Elsewhere) if torch.is_tensor(value) else value
            for name, value in state[part].items()
        }
    engine = private()[0]
    engine.accountant.load_state_dict(state)
    assert len(engine.accountant) == 2


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_the_engine_states_what_its_plan_would(method):
    """The divisor says how many examples there are, so neighbours have the same number."""
    engine, *_ = private(method=method)
    said = engine.statement()
    assert said.startswith(
        "Neighbours differ in one example, whose gradients are zero in one of them (zero-out; the "
        "number of examples, 60, is public, and so is the divisor 15); Poisson sampling at rate 0."
    )
    assert ("rate 0.25, " in said) == (method == "scale") and ("clip norm 0.5," in said) == (
        method == "sample"
    )
    assert "8 steps" in said and "delta 1e-05, accountant rdp. Epsilon at most " in said
    with pytest.raises(ValueError, match="budgets"):
        IndividualizedPrivacyEngine(accountant="rdp").statement()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sample", "scale"])
def test_a_ledger_takes_the_engine_with_all_of_its_planned_steps(method):
    engine, model, optimizer, loader = private(method=method, engine=IndividualizedPrivacyEngine())
    ledger = Ledger().add(engine)
    own = ledger.epsilons(DELTA)
    assert (own <= BUDGETS + 1e-9).all() and (own > 0.98 * BUDGETS).all()
    steps(model, optimizer, loader)
    assert torch.equal(Ledger().add(engine).epsilons(DELTA), own)
    assert ledger.neighbours == "zero-out" and ledger.units == ("example",)
    with pytest.raises(ValueError, match="no budgets"):
        Ledger().add(IndividualizedPrivacyEngine())


def test_a_ledger_takes_one_run_of_a_seed():
    def entry(seed=None):
        engine, model = IndividualizedPrivacyEngine(), nn.Linear(4, 3)
        engine.make_private_with_budgets(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=15),
            target_epsilons=BUDGETS,
            target_delta=DELTA,
            epochs=2,
            max_grad_norm=0.5,
            method="scale",
            seed=seed,
        )
        return engine.ledger_entry()

    ledger = Ledger([entry(1), entry(2), entry(), entry()])
    with pytest.raises(
        ValueError, match="under a key of its own, but item 4 shares that of item 1"
    ):
        ledger.add(entry(2))
    # `train` draws from the same streams.
    name = fingerprint(1, generators(1))
    with pytest.raises(ValueError, match="item 4 shares that of item 0"):
        ledger.add(LedgerEntry(Gaussian(1.0), key_fingerprint=name))


def test_only_a_seeded_run_says_that_its_noise_can_be_subtracted():
    assert "seed" in private()[0].statement()
    assert "seed" not in private(noise_generator=None)[0].statement()


def test_a_checkpoint_that_was_damaged_is_refused_before_anything_is_loaded(tmp_path):
    """Before there was a sha256, one bit made 4 steps 0, and the epsilon 0.0."""
    engine, model, optimizer, loader = private()
    steps(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    written = (tmp_path / "run.pt").read_bytes()
    again, second, second_optimizer, _ = private()
    before = weights(second)
    for place in range(0, len(written), len(written) // 30):
        (tmp_path / "run.pt").write_bytes(
            written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :]
        )
        with pytest.raises(ValueError, match="checkpoint"):
            again.load_checkpoint(
                path=tmp_path / "run.pt", module=second, optimizer=second_optimizer
            )
    assert len(again.accountant) == 0 and torch.equal(before, weights(second))
    write_checkpoint(tmp_path / "run.pt", {"identity": {"seed": 0}, "content": {}})
    refused(
        "another's",
        again.load_checkpoint,
        path=tmp_path / "run.pt",
        module=second,
        optimizer=second_optimizer,
    )
    with pytest.raises(ValueError, match="checkpoint_dict"):
        engine.save_checkpoint(
            path=tmp_path / "run.pt", module=model, checkpoint_dict={"code": print}
        )


def test_a_checkpoint_may_be_an_open_file():
    engine, model, optimizer, loader = private()
    steps(model, optimizer, loader)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    again, second, second_optimizer, _ = private()
    again.load_checkpoint(path=file, module=second, optimizer=second_optimizer)
    assert len(again.accountant) == 4 and torch.equal(weights(second), weights(model))


@pytest.mark.parametrize("taken", [132, -1, 2.5, True, math.nan])
def test_a_checkpoint_of_steps_that_cannot_be_is_refused(taken):
    engine = private()[0]
    refused(
        "steps",
        engine.accountant.load_state_dict,
        {**engine.accountant.state_dict(), "steps": taken},
    )


def test_a_checkpoint_of_other_budgets_is_refused(tmp_path):
    engine, model, optimizer, _ = private()
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    other, second, second_optimizer, _ = private(budgets=BUDGETS + 1)
    refused(
        "same budgets",
        other.load_checkpoint,
        path=tmp_path / "run.pt",
        module=second,
        optimizer=second_optimizer,
    )
    unseeded, second, second_optimizer, _ = private(noise_generator=None)
    refused(
        "generators",
        unseeded.load_checkpoint,
        path=tmp_path / "run.pt",
        module=second,
        optimizer=second_optimizer,
    )


def test_a_gradient_that_is_not_finite_contributes_nothing_and_is_counted():
    x, y = data().tensors
    x = x.clone()
    x[:20] = math.inf
    _, model, optimizer, loader = private(dataset=TensorDataset(x, y), epochs=1)
    with pytest.warns(RuntimeWarning, match="finite"):
        steps(model, optimizer, loader)
    assert optimizer.dropped > 0 and bool(weights(model).isfinite().all())
    _, model, optimizer, criterion, loader = private(
        dataset=TensorDataset(x, y), epochs=1, grad_sample_mode="ghost"
    )
    with pytest.raises(FloatingPointError, match="use hooks"):
        steps(model, optimizer, loader, criterion)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class _Batches(BatchSampler):
    pass


def loaders():
    whole = data()
    return {
        "drop_last": DataLoader(whole, batch_size=15, drop_last=True),
        "iterable": DataLoader(Stream(), batch_size=15),
        "batch_size": DataLoader(whole, batch_size=None),
        "WeightedRandomSampler": DataLoader(
            whole, batch_size=15, sampler=WeightedRandomSampler(torch.ones(N), N)
        ),
        "sampler with replacement": DataLoader(
            whole, batch_size=15, sampler=RandomSampler(whole, replacement=True)
        ),
        "_Batches": DataLoader(whole, batch_sampler=_Batches(SequentialSampler(whole), 15, False)),
    }


@pytest.mark.parametrize("word", loaders())
def test_a_loader_that_would_void_the_account_is_refused(word):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=word):
        IndividualizedPrivacyEngine(accountant="rdp").make_private_with_budgets(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loaders()[word],
            target_epsilons=BUDGETS,
            target_delta=DELTA,
            epochs=1,
            max_grad_norm=1.0,
        )


class Sequences(Dataset):
    """Token sequences of different lengths."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.arange(2 + i * 7 % 9) % 10, i % 3


def padded(examples):
    tokens, labels = zip(*examples)
    return {
        "tokens": nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "labels": torch.tensor(labels),
    }


def longest_first(examples):
    return padded(sorted(examples, key=lambda example: -len(example[0])))


def popped(examples):
    """As `padded`, and takes its own list apart."""
    return padded([examples.pop(0) for _ in range(len(examples))])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(dim=1))


def test_a_collate_function_must_keep_the_order_of_the_examples():
    refused("collate_fn", private, dataset=Sequences(), model=Tagger(), collate_fn=longest_first)
    for collate in (padded, popped):
        _, model, optimizer, loader = private(
            dataset=Sequences(), model=Tagger(), collate_fn=collate, epochs=1
        )
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"]).backward()
            optimizer.step()
    same = TensorDataset(torch.ones(N, 4), torch.zeros(N, dtype=torch.long))  # in no order
    private(dataset=same, collate_fn=lambda examples: torch.utils.data.default_collate(examples))


def test_bad_input_is_refused_by_name():
    mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    refuses(lambda module: private(model=module), {}, module=[nn.Linear(4, 3).eval(), mixing])
    refuses(
        lambda target_epsilons: private(budgets=target_epsilons),
        {},
        target_epsilons=[BUDGETS[:-1], -BUDGETS],
    )
    refuses(
        private, {}, method=["both"], grad_sample_mode=["no_op"], sample_weight=[0.5], epochs=[0]
    )
    refuses(private, {}, target_delta=[1.0], max_grad_norm=[0.0], noise_generator=[5])
    refuses(private, {}, batch_first=["a"], prove=["x"], trust_loss=["x"], wrap_model=[None])
    refused("data_loader", check_loader, 5)
    refused("data_loader must .* empty", check_loader, DataLoader(TensorDataset(torch.zeros(0, 4))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a delta that is none there is nothing to warn of
        refuses(private, {}, target_delta=[2.0])
    refuses(private, {"method": "combined"}, sample_weight=[None])


def test_the_methods_without_budgets_and_a_second_run_are_refused():
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    refused("needs budgets", engine.make_private)
    refused("budgets", engine.get_epsilons, DELTA)
    refused("accountant", IndividualizedPrivacyEngine, accountant="prv")
    engine, model, optimizer, loader = private()
    steps(model, optimizer, loader)
    refused("steps", private, engine=engine, budgets=BUDGETS / 4)


def test_the_optimizer_of_budgets_that_were_replaced_takes_no_step():
    engine, model, optimizer, loader = private()
    _, another, its_optimizer, its_loader = private(engine=engine, budgets=BUDGETS / 4)
    refused("budgets", steps, model, optimizer, loader)
    steps(another, its_optimizer, its_loader)
    assert engine.accountant.steps == 4


class Dictionaries(Dataset):
    name = "dictionaries"

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = data()[i]
        return {"x": x, "y": y}


def test_the_data_set_may_yield_anything_and_keeps_its_attributes():
    _, model, optimizer, loader = private(dataset=Dictionaries(), epochs=1)
    assert loader.dataset.name == "dictionaries" and len(loader.dataset) == N
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()


def test_an_empty_batch_has_the_structure_of_the_others_even_if_it_is_the_first():
    tensors = data().tensors[0]
    for dataset, structure in (
        (Dictionaries(), {"x": (0, 4), "y": (0,)}),
        (data(), [(0, 4), (0,)]),
        (tensors, (0, 4)),
    ):
        loader = private(dataset=dataset)[-1]
        loader.batch_sampler.sample_rate.zero_()
        first = next(iter(loader))
        assert loader.dataset.handed_out == []
        shapes = (
            {name: value.shape for name, value in first.items()}
            if isinstance(first, dict)
            else first.shape
            if torch.is_tensor(first)
            else [value.shape for value in first]
        )
        assert shapes == structure
    loader = private(dataset=Sequences(), collate_fn=padded)[-1]
    loader.batch_sampler.sample_rate.zero_()
    first = next(iter(loader))
    assert first["tokens"].shape[0] == 0 and first["tokens"].dtype == torch.long


class Tempered(nn.Module):
    """A linear model with a temperature, a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.linear, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.linear(x) * self.temperature


def test_a_parameter_without_dimensions_is_clipped_with_the_others():
    model = Tempered()
    plain = copy.deepcopy(model)
    engine, model, optimizer, loader = private(model=model, lr=1.0, max_grad_norm=0.05)
    without_noise(optimizer)
    (x, y), before = next(iter(loader)), weights(model)
    expected = clipped_sum(plain, x, y, engine.max_grad_norms[loader.dataset.handed_out])
    steps(model, optimizer, [(x, y)])
    assert torch.allclose(before - weights(model), expected / 15.0, rtol=1e-3, atol=1e-6)
    loader.batch_sampler.sample_rate.zero_()
    steps(model, optimizer, [next(iter(loader))])  # nobody at all
    assert len(engine.accountant) == 2


# The audit. Half of the coordinates of a linear model belong to a canary each, whose gradient
# points along its coordinate and is longer than any clip norm; nobody writes to the others. A
# coordinate that moved far tells that its canary was there.
CANARIES, ROUNDS, THRESHOLD = 400, 6, 2.5


def moved(method, spoil=None):
    """How far coordinates with and without canaries moved, in standard deviations of the noise, for
    each group.
    """
    budgets = torch.tensor([0.5, 3.0]).repeat_interleave(CANARIES)
    dataset = TensorDataset(10 * torch.eye(2 * CANARIES, 4 * CANARIES), torch.zeros(2 * CANARIES))
    seen = {"in": [], "out": []}
    for seed in range(ROUNDS):
        engine, model, optimizer, loader = private(
            model=nn.Linear(4 * CANARIES, 1, bias=False),
            dataset=dataset,
            batch_size=200,
            budgets=budgets,
            epochs=1,
            method=method,
            seed=seed,
            lr=1.0,
            max_grad_norm=1.0,
        )
        with torch.no_grad():
            next(model.parameters()).zero_()
        if spoil:
            spoil(loader)
        for x, _ in loader:
            optimizer.zero_grad()
            (-model(x)).mean().backward()
            optimizer.step()
        unit = optimizer.noise_multiplier * math.sqrt(len(loader)) / optimizer.expected_batch_size
        total = next(model.parameters()).detach()[0] / unit
        seen["in"].append(total[: 2 * CANARIES].view(2, -1))
        seen["out"].append(total[2 * CANARIES :].view(2, -1))
    return torch.cat(seen["in"], dim=1), torch.cat(seen["out"], dim=1), torch.tensor([0.5, 3.0])


def audited(inside, outside):
    count = inside.shape[1]
    best = torch.zeros(2, dtype=torch.float64)
    for threshold in (1.0, THRESHOLD):
        best = torch.maximum(
            best,
            epsilon_lower_bound(
                true_positives=(inside > threshold).sum(dim=1),
                positives=count,
                false_positives=(outside > threshold).sum(dim=1),
                negatives=count,
                delta=DELTA,
                confidence=0.999,
            ),
        )
    return best


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sample", "scale"])
def test_an_audit_with_canaries_stays_below_every_budget(method):
    inside, outside, budgets = moved(method)
    assert bool((audited(inside, outside) < budgets).all())
    assert bool((inside.mean(dim=1) > outside.mean(dim=1)).all())


@pytest.mark.slow
def test_an_audit_catches_a_sampler_that_draws_everybody():
    def spoil(loader):
        loader.batch_sampler.sample_rate = torch.ones_like(loader.batch_sampler.sample_rate)

    inside, outside, budgets = moved("sample", spoil)
    assert audited(inside, outside)[0] > budgets[0]


def test_a_range_of_noise_holds_in_the_engine_and_goes_with_sampling_alone():
    engine, model, optimizer, loader = private(method="sample", noise_range=(3.0, 3.0))
    assert optimizer.noise_multiplier == 3.0 and loader.batch_sampler.batch_size == float(
        engine.sample_rates.sum()
    )
    refused("noise_range", private, method="scale", noise_range=(3.0, 3.0))


def test_learning_rates_of_numpy_come_back_from_a_checkpoint(tmp_path):
    engine, model, optimizer, loader = private(epochs=2)
    steps(model, optimizer, loader)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    again, second, second_optimizer, _ = private(epochs=2)
    again.load_checkpoint(path=tmp_path / "run.pt", module=second, optimizer=second_optimizer)
    assert second_optimizer.param_groups[0]["lr"] == 0.25
    assert type(second_optimizer.param_groups[0]["lr"]) is float
