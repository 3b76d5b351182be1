"""What the engine refuses because it would void the budgets, and what it does not."""

import copy
import gc
import math
import multiprocessing
import os
import pickle
import warnings
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.nn.functional as F
import torch.utils.data._utils as torch_data
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcompanion.idp import IndividualizedPrivacyEngine

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook", "ignore:mean of empty", "ignore:.*multi-threaded, use of fork"
)
N, DELTA = 48, 1e-5
BUDGETS = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(16)
MODES = ["hooks", "functorch", "ew", "ghost"]


def tokens():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(12, (N, 5), generator=generator), torch.randint(12, (N,), generator=generator)
    )


def vectors():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(N, 4, generator=generator), torch.randint(3, (N,), generator=generator)
    )


def private(
    model, dataset=None, *, optimizer=None, mode="hooks", num_workers=0, batch_size=12, **options
):
    """(engine, model, optimizer, criterion, loader)."""
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    optimizer = optimizer or torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    options = {
        "target_delta": DELTA,
        "epochs": 4,
        "max_grad_norm": 0.5,
        "method": "scale",
        "noise_generator": torch.Generator().manual_seed(3),
        **options,
    }
    module, optimizer, *rest = engine.make_private_with_budgets(
        module=model,
        optimizer=optimizer,
        target_epsilons=BUDGETS,
        grad_sample_mode=mode,
        data_loader=DataLoader(
            vectors() if dataset is None else dataset,
            batch_size=batch_size,
            num_workers=num_workers,
        ),
        **options,
    )
    return engine, module, optimizer, *(rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest))


def train(model, optimizer, criterion, loader, count=3):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        count -= 1
        if not count:
            break


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


class Tied(nn.Module):
    """The embedding is the head as well, by a function."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.embedding, self.hidden, self.scale = nn.Embedding(12, 6), nn.Linear(6, 6), scale

    def forward(self, x):
        return self.scale * F.linear(self.hidden(self.embedding(x).mean(1)), self.embedding.weight)


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix, self.first, self.last = mix, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.mix(self.first(x)))


MIXES = {
    "mean": lambda h: h - h.mean(0, keepdim=True),
    "a little of the mean": lambda h: h - 0.05 * h.mean(0, keepdim=True),
    "normalised": lambda h: F.batch_norm(h, None, None, training=True),
    "after dropout": lambda h: F.dropout(h, 0.5) - h.mean(0),
    "shifted": lambda h: h + h.roll(1, 0),
    "attention over the batch": lambda h: torch.softmax(h @ h.T, dim=1) @ h,
    "by the size of the batch": lambda h: h * len(h),
    # No number alone, or 0:
    "standardised": lambda h: (h - h.mean(0)) / (h.std(0) + 1e-5),
    "by the variance": lambda h: h * (h.var(0) + 1e-5).rsqrt(),
    "the second one": lambda h: h + h[1:2],
    "the fourth one": lambda h: h + h[3],
    "in large batches": lambda h: h - h.mean(0) if len(h) > 8 else h,
    "at random": lambda h: h[torch.randperm(len(h))] + h,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mix", MIXES)
def test_a_module_that_mixes_examples_is_refused_before_any_step(mix, mode):
    engine, model, optimizer, criterion, loader = private(Mixing(MIXES[mix]), mode=mode)
    before = weights(model)
    with pytest.raises((UnsupportedModuleError, RuntimeError)) as refused:
        train(model, optimizer, criterion, loader)
    # which knows few functions of tensors
    assert isinstance(refused.value, ValueError) or mode == "ew"
    assert torch.equal(before, weights(model)) and engine.accountant.steps == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_module_that_mixes_some_batches_only_is_refused_before_any_step(mode):
    for seed in range(4):  # with most, no draw of the other comparisons mixes
        torch.manual_seed(seed)
        module = Mixing(lambda h: h + 0.4 * h.roll(1, 0) if torch.rand(()) < 0.05 else h)
        engine, model, optimizer, criterion, loader = private(module, mode=mode)
        with pytest.raises(UnsupportedModuleError, match="module must compute each example"):
            train(model, optimizer, criterion, loader)
        assert engine.accountant.steps == 0


def clipped_on_the_way_back(h, axes):
    """A hidden state whose gradient is clipped, as for recurrent layers."""
    if h.requires_grad:
        h.register_hook(lambda g: g * (50 / g.norm(dim=axes, keepdim=True)).clamp(max=1))
    return h


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_gradients_that_are_clipped_together_are_refused_before_one_is_large(mode):
    """Nothing was clipped in the proof; beside an outlier the gradients of others were 0."""
    engine, model, optimizer, criterion, loader = private(
        Mixing(lambda h: clipped_on_the_way_back(h, (0, 1))), mode=mode
    )
    before = weights(model)
    with pytest.raises(UnsupportedModuleError, match="on the way back"):
        train(model, optimizer, criterion, loader)
    assert torch.equal(before, weights(model)) and engine.accountant.steps == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_gradients_that_are_clipped_one_by_one_are_taken(mode):
    engine, model, optimizer, criterion, loader = private(
        Mixing(lambda h: clipped_on_the_way_back(h, 1)), mode=mode
    )
    train(model, optimizer, criterion, loader)
    assert engine.accountant.steps == 3


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_mean_that_leaves_nothing_of_an_example_alone_is_refused(mode):
    """Without biases the gradient of one row behind its own mean is 0."""
    centring = Mixing(MIXES["mean"])
    centring.first, centring.last = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)
    engine, model, optimizer, criterion, loader = private(centring, mode=mode)
    before = weights(model)
    with pytest.raises(UnsupportedModuleError):
        train(model, optimizer, criterion, loader)
    assert torch.equal(before, weights(model)) and engine.accountant.steps == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_a_batch_of_which_no_gradient_shows_anything_is_taken_and_the_next_is_proved(mode, bad):
    x, y = vectors().tensors
    data = TensorDataset(bad * torch.ones_like(x), y)
    engine, model, optimizer, criterion, loader = private(
        nn.Linear(4, 3, bias=False), data, mode=mode
    )
    train(model, optimizer, criterion, loader, 2)
    assert (
        engine.accountant.steps == 2 and not optimizer._proof.open and optimizer._proof._proved == 0
    )
    data.tensors[0].copy_(x)
    train(model, optimizer, criterion, loader, 1)
    assert optimizer._proof._proved > 1


def test_the_proof_is_made_again_with_a_batch_of_twice_the_size():
    """The first draw may be of few."""
    _, model, optimizer, criterion, loader = private(
        Mixing(lambda h: h - h.mean(0) if len(h) > 24 else h)
    )
    train(model, optimizer, criterion, loader, 1)
    loader.batch_sampler.draw = lambda: torch.arange(N)
    with pytest.raises(UnsupportedModuleError, match="company"):
        train(model, optimizer, criterion, loader, 1)


class Residual(nn.Module):
    """Starts with a gate at zero, behind which it mixes."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.gate(h) * h.mean(0))


class Sorted(nn.Module):
    """A branch, scaled down, in which the rows go through a layer in another order."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.layer, self.scale, self.last = (nn.Linear(4, 4) for _ in range(4))
        nn.init.normal_(self.scale.weight, std=scale)

    def forward(self, x):
        h, order = self.first(x), x[:, 0].argsort()
        return self.last(h + self.scale(self.layer(h[order]).tanh()[order.argsort()]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-1, 1e-3, 1e-4, 1e-6])
def test_rows_in_another_order_are_seen_in_a_short_part_of_the_gradient(scale, mode):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModuleError):
        _, model, optimizer, criterion, loader = private(Sorted(scale), mode=mode)
        train(model, optimizer, criterion, loader)


def test_what_a_weight_of_zero_hides_is_seen():
    with pytest.raises(UnsupportedModuleError, match="examples|itself"):
        _, model, optimizer, criterion, loader = private(Residual())
        train(model, optimizer, criterion, loader)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_weight_used_outside_its_layer_is_refused(mode, wrap_model):
    model = Tied()
    _, module, optimizer, criterion, loader = private(
        model, tokens(), mode=mode, wrap_model=wrap_model
    )
    with pytest.raises(UnsupportedModuleError, match="layer"):
        train(module if wrap_model else model, optimizer, criterion, loader)


def test_a_penalty_in_the_criterion_of_ghost_mode_is_refused():
    """Its gradient goes around the layers whose norms are found."""
    model = nn.Linear(4, 3)
    penalised = nn.CrossEntropyLoss()
    plain = penalised.forward
    penalised.forward = lambda x, y: plain(x, y) + 5 * model.weight.square().sum()
    for losses in (lambda found: found, lambda found: 2 * found + 1):
        _, module, optimizer, criterion, loader = private(model, mode="ghost", criterion=penalised)
        with pytest.raises(UnsupportedModuleError, match="norm"):
            train(module, optimizer, lambda x, y: losses(criterion(x, y)), loader)
        module.to_standard_module()


def test_a_criterion_of_ghost_mode_that_looks_at_the_batch_is_refused():
    class PerBatch(nn.CrossEntropyLoss):
        def forward(self, x, y):
            return super().forward(x, y) * len(y)

    _, model, optimizer, criterion, loader = private(
        nn.Linear(4, 3), mode="ghost", criterion=PerBatch()
    )
    refused("rest of the batch", train, model, optimizer, criterion, loader)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_do_not_switch_the_proof_off(bad):
    x, y = vectors().tensors
    x = x.clone()
    x[::2] = bad
    _, model, optimizer, criterion, loader = private(
        Mixing(MIXES["a little of the mean"]), TensorDataset(x, y)
    )
    with pytest.raises(UnsupportedModuleError):
        train(model, optimizer, criterion, loader)


class Sequence(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.embedding, self.recurrent, self.head = (
            nn.Embedding(12, 4),
            DPLSTM(4, 4, batch_first=batch_first),
            nn.Linear(4, 12),
        )

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


GOOD = {
    "linear": (lambda: nn.Linear(4, 3), vectors),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)), vectors),
    "functional dropout": (lambda: Mixing(lambda h: F.dropout(h, 0.5)), vectors),
    "a layer used twice": (
        lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)))(
            nn.Linear(4, 4)
        ),
        vectors,
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 3, 2),
            nn.GroupNorm(1, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(9, 3),
        ),
        vectors,
    ),
    "recurrent": (Sequence, tokens),
    # The gradient of the bias is 0, but for rounding.
    "a bias that cancels": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 8, 2),
            nn.InstanceNorm1d(8),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        vectors,
    ),
}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("name", GOOD)
def test_modules_that_treat_examples_one_by_one_are_taken(name, mode):
    if mode == "ghost" and name == "a layer used twice":
        pytest.skip("Opacus has no ghost norms of a layer that is used twice")
    model, dataset = GOOD[name]
    engine, module, optimizer, criterion, loader = private(model(), dataset(), mode=mode)
    train(module, optimizer, criterion, loader)
    assert engine.accountant.steps == 3 and not optimizer._proof.open


@pytest.mark.parametrize("mode", MODES)
def test_the_proof_leaves_no_trace(mode):
    def trained(prove):
        torch.manual_seed(0)
        _, model, optimizer, criterion, loader = private(
            nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)), mode=mode, prove=prove
        )
        train(model, optimizer, criterion, loader)
        return weights(model)

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("kind", ["buffer", "new buffer", "frozen parameter", "data of a buffer"])
def test_a_module_that_keeps_statistics_of_its_examples_is_refused(kind):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            if kind == "frozen parameter":
                self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
            else:
                self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            with torch.no_grad():
                if self.training and kind == "new buffer":
                    self.mean = torch.lerp(self.mean, x.mean(0), 0.1)
                elif self.training and kind == "data of a buffer":
                    self.mean.data.lerp_(x.mean(0), 0.1)  # which no version counts
                elif self.training:
                    self.mean.lerp_(x.mean(0), 0.1)
            return x

    data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    model = nn.Sequential(Averaging(), nn.Linear(4, 2))
    made, optimizer, loader = IndividualizedPrivacyEngine(
        accountant="rdp"
    ).make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        target_epsilons=[1.0] * 20,
        target_delta=1e-3,
        epochs=5,
        max_grad_norm=1.0,
        method="scale",
    )
    words = "no statistics of its examples, but training changes (buffer|frozen parameter) '0.mean'"
    with pytest.raises(ValueError, match=words):
        for x, y in loader:
            F.cross_entropy(made(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_is_trained_in_front_of_the_module_is_refused(mode):
    """Its gradients were exact, and an optimizer of its own took them."""
    outside, prompt = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
    made = private(nn.Linear(4, 2), mode=mode)[1]
    x = torch.ones(6, 4)
    for inputs in (lambda: torch.relu(outside(x)), lambda: x + prompt):
        for training in (True, False):  # as where layers are trained in evaluation mode
            made.train(training)
            with pytest.raises(ValueError, match="come from trainable parameters outside it, one"):
                made(inputs())
            with torch.no_grad():
                made(inputs())
    made.train()
    outside.requires_grad_(False)
    moved = torch.zeros(6, 4, requires_grad=True)  # as an adversarial example is made
    made(outside(x) + moved)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renorms_its_rows_is_refused(layer):
    """The rows of the words that are in a batch would say so, without noise."""
    model = nn.Sequential(nn.Linear(4, 3), layer(12, 4, max_norm=1.0))
    before = weights(model)
    refused("max_norm", private, model)
    assert torch.equal(before, weights(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in place", "data", "replaced", "later"])
def test_a_forward_pass_that_writes_into_a_weight_is_refused(kind, mode):
    class Writing(nn.Linear):
        passes = 0

        def forward(self, x):
            Writing.passes += 1
            with torch.no_grad():
                if kind == "in place":
                    torch.sub(self.weight, x.mean(), out=self.weight)
                elif kind == "data":
                    self.weight.data.sub_(x.mean())  # which no version counts
                elif kind == "replaced":
                    self.weight.data = self.weight.data - x.mean()
                elif Writing.passes > 300:
                    self.weight.sub_(x.mean())
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.writing, self.last = Writing(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.writing(x))

    Writing.passes = 0
    _, model, optimizer, criterion, loader = private(Outer(), mode=mode)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        Writing.passes += 290 * (kind == "later")
        train(model, optimizer, criterion, loader, 4)
    assert isinstance(refused.value, ValueError) or mode == "ew"


@pytest.mark.parametrize("spoil", [lambda y: y + 3, lambda y: y.float(), lambda y: y.int()])
def test_targets_that_the_criterion_of_ghost_mode_does_not_take_are_refused_in_words(spoil):
    """In the other modes the loss is the loop's own, and so is its error."""
    x, y = vectors().tensors
    _, model, optimizer, criterion, loader = private(
        nn.Linear(4, 3), TensorDataset(x, spoil(y)), mode="ghost"
    )
    refused("criterion", train, model, optimizer, criterion, loader)


def test_inputs_that_do_not_say_which_rows_are_examples_are_refused_unless_your_word_is_given():
    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, box):
            return self.layer(box.x)

    class Box:
        def __init__(self, x):
            self.x = x

    engine, model, optimizer, criterion, loader = private(Boxed())
    refused("prove", train, lambda x: model(Box(x)), optimizer, criterion, loader, 1)
    assert engine.accountant.steps == 0
    engine, model, optimizer, criterion, loader = private(Boxed(), prove=False)
    train(lambda x: model(Box(x)), optimizer, criterion, loader, 1)
    assert engine.accountant.steps == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_inputs_of_another_type_than_the_models_are_refused_in_words(mode):
    x, y = vectors().tensors
    _, model, optimizer, criterion, loader = private(
        nn.Linear(4, 3), TensorDataset(x.double(), y), mode=mode
    )
    refused("data", train, model, optimizer, criterion, loader)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("freeze", [True, False])
def test_parameters_frozen_or_set_free_between_steps_are_refused(mode, freeze):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    for p in model[0].parameters():
        p.requires_grad = freeze
    _, module, optimizer, criterion, loader = private(
        model, mode=mode, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    train(module, optimizer, criterion, loader, 1)
    for p in model[0].parameters():
        p.requires_grad = not freeze
    before = weights(module)
    with pytest.raises((ValueError, AttributeError, RuntimeError)):
        train(module, optimizer, criterion, loader, 1)
    assert torch.equal(before, weights(module))


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_from_before_a_parameter_was_frozen_moves_nothing(mode):
    model, (x, y) = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), vectors().tensors
    F.cross_entropy(model(x), y).backward()
    model[0].requires_grad_(False)
    frozen = weights(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, module, optimizer, criterion, loader = private(model, mode=mode, optimizer=optimizer)
    for x, y in loader:
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.accountant.steps == 4 and torch.equal(weights(model[0]), frozen)


def test_the_original_optimizer_takes_no_step():
    model = nn.Linear(4, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, module, optimizer, criterion, loader = private(model, optimizer=plain)
    before = weights(model)
    refused("optimizer", train, module, plain, criterion, loader)
    assert torch.equal(before, weights(model))
    optimizer.zero_grad()
    train(module, optimizer, criterion, loader)
    assert engine.accountant.steps == 3


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_another_optimizer_of_the_same_parameters_is_warned_of_once(mode):
    model = nn.Linear(4, 3)
    engine, module, optimizer, criterion, loader = private(model, mode=mode)
    x, y = vectors().tensors
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parameters of a private run")
        train(module, optimizer, criterion, loader)
        other = nn.Linear(4, 3)
        F.cross_entropy(other(x), y).backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="SGD") as said:
        plain.step()
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parameters of a private run")
        plain.step()


def test_an_optimizer_that_lacks_trainable_parameters_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    refused("optimizer", private, model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    refused("LBFGS", private, model, optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    "extra",
    [
        lambda model, x, y: F.cross_entropy(model(x), y).backward(),  # another loss
        lambda model, x, y: [p.grad.mul_(100) for p in model.parameters()],
        lambda model, x, y: [setattr(p, "grad", 100 * p.grad) for p in model.parameters()],
    ],
)
def test_in_ghost_mode_gradients_stay_as_the_criterion_left_them(extra):
    _, model, optimizer, criterion, loader = private(nn.Linear(4, 3), mode="ghost")
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    extra(model, x, y)
    before = weights(model)
    refused("gradients", optimizer.step)
    assert torch.equal(before, weights(model))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_no_gradient_in_evaluation_mode_or_of_a_batch_before(mode):
    _, model, optimizer, criterion, loader = private(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), mode=mode
    )
    train(model, optimizer, criterion, loader, 1)
    before = weights(model)
    layers = model._module
    for part in (layers[0], layers):
        part.eval()
        refused("module", train, model, optimizer, criterion, loader, 1)
        part.train()
    optimizer.zero_grad()
    assert torch.equal(before, weights(model))


def test_what_the_engine_shows_may_be_written_to():
    budgets = BUDGETS.double()
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    model = nn.Linear(4, 3)
    model, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(vectors(), batch_size=12),
        target_epsilons=budgets,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=0.5,
        method="scale",
    )
    train(model, optimizer, nn.CrossEntropyLoss(), loader)
    spent, norms = engine.get_epsilons(DELTA), engine.max_grad_norms.clone()
    for shown in (budgets, engine.max_grad_norms, engine.noise_multipliers):
        shown.mul_(1e-3 if shown is budgets else 1e3)
    engine.sample_rates.fill_(1e-6)
    assert torch.equal(engine.get_epsilons(DELTA), spent) and torch.equal(
        engine.accountant.budgets.clip_norms(), norms
    )
    assert float(loader.batch_sampler.sample_rate[0]) == 0.25


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_without_wrapping_the_module_is_trained_as_with_it(mode):
    def trained(wrap_model):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        engine, module, optimizer, criterion, loader = private(
            model, mode=mode, wrap_model=wrap_model
        )
        train(module if wrap_model else model, optimizer, criterion, loader)
        assert engine.accountant.steps == 3
        return weights(model)

    assert torch.equal(trained(True), trained(False))
    refused("wrap_model", private, nn.Linear(4, 3), mode="ew", wrap_model=False)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_per_layer_clipping_gives_each_parameter_its_share_of_each_examples_norm(mode, turned):
    """In the order of the module's parameters, whatever that of the optimizer's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    plain.load_state_dict(model.state_dict())
    layers = [0.03, 0.01, 0.04, 0.02]
    groups = [{"params": list(part.parameters())} for part in (model[2], model[0])]
    sgd = torch.optim.SGD(groups if turned else model.parameters(), lr=0.1)
    engine, model, optimizer, criterion, loader = private(
        model, mode=mode, optimizer=sgd, clipping="per_layer", max_grad_norm=layers
    )
    mean = math.hypot(*layers)
    assert optimizer.max_grad_norm == pytest.approx(mean) and float(
        engine.max_grad_norms.mean()
    ) == pytest.approx(mean)
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.clip_and_accumulate()
    own = engine.max_grad_norms[loader.dataset.handed_out]
    for k, p in enumerate(
        optimizer.params[2:] + optimizer.params[:2] if turned else optimizer.params
    ):
        expected = torch.zeros_like(p)
        for i in range(len(x)):
            g = torch.autograd.grad(
                F.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]), list(plain.parameters())
            )[k]
            expected += g * min(1.0, float(own[i]) * layers[k] / mean / float(g.norm()))
        assert torch.allclose(p.summed_grad, expected, rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="max_grad_norm"):
        private(
            nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), clipping="per_layer", max_grad_norm=1.0
        )
    refused(
        "clipping",
        private,
        nn.Linear(4, 3),
        mode="ghost",
        clipping="per_layer",
        max_grad_norm=[1.0, 1.0],
    )
    refused("clipping", private, nn.Linear(4, 3), clipping="adaptive")


def test_under_a_memory_manager_the_length_is_that_of_the_pieces():
    _, _, optimizer, _, loader = private(nn.Linear(4, 3))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as small:
        assert len(loader) == 4 and len(small) == 16
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
    ) as small:
        assert len(small) == math.ceil(4 * 12 / 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_norm_without_bias_is_refused_where_opacus_fails(mode):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 3))
    if mode in ("functorch", "ew"):
        train(*private(model, mode=mode)[1:])
        return
    refused("module", private, model, mode=mode)


class Elsewhere(Dataset):
    """Notes in which processes examples were read."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return N

    def __getitem__(self, i):
        (self.folder / str(os.getpid())).touch()
        return vectors()[i]


@pytest.mark.parametrize("pieces", [None, 5])
def test_worker_processes_read_and_change_nothing(pieces, tmp_path):
    def trained(num_workers, folder):
        torch.manual_seed(0)
        folder.mkdir()
        _, model, optimizer, criterion, loader = private(
            nn.Linear(4, 3), Elsewhere(folder), num_workers=num_workers
        )
        assert loader.num_workers == 0
        if pieces is None:
            train(model, optimizer, criterion, loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            ) as small:
                train(model, optimizer, criterion, small, 6)
        return weights(model), {int(file.name) for file in folder.iterdir()} - {os.getpid()}

    here, nobody = trained(0, tmp_path / "here")
    there, others = trained(2, tmp_path / "there")
    assert torch.equal(here, there) and not nobody and len(others) == 2


def test_worker_processes_end_with_the_engine_of_which_nothing_is_left(monkeypatch):
    """By themselves: one that is not told to end is waited for and killed, here after a minute."""
    killed = []
    monkeypatch.setattr(torch_data, "MP_STATUS_CHECK_INTERVAL", 60.0)
    monkeypatch.setattr(torch_data.worker, "MP_STATUS_CHECK_INTERVAL", 3600.0)
    monkeypatch.setattr(BaseProcess, "terminate", lambda process: killed.append(process))
    before = set(multiprocessing.active_children())
    made = {"engine": private(nn.Linear(4, 3), num_workers=2)}
    train(*made["engine"][1:])
    workers = set(multiprocessing.active_children()) - before
    made["cycle"] = made
    del made
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0] and not killed


def test_a_module_is_copied_with_what_watches_it_and_nan_in_a_buffer_is_no_change():
    """As for a moving average of weights, or to keep the best ones."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.register_buffer("unknown", torch.tensor([1.0, math.nan]))
    model.register_buffer("mask", torch.tensor([True, False]))
    made, optimizer, loader = IndividualizedPrivacyEngine(
        accountant="rdp"
    ).make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.randn(20, 4), torch.arange(20) % 2), batch_size=10
        ),
        target_epsilons=[1.0] * 20,
        target_delta=1e-3,
        epochs=5,
        max_grad_norm=1.0,
        method="scale",
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(made(x), y).backward()
        optimizer.step()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        refused("optimizer", copied, optimizer)
    again = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    x = torch.randn(5, 4)
    assert torch.equal(again.eval()(x), made.eval()(x))


def moved(k, where, mode):
    """The clipped sum of one step over k examples, in a loop of which autocast takes a part."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(2048, 50, generator=generator)[:k] * 0.3 + 1,
        torch.zeros(k, dtype=torch.int64),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 64), nn.Tanh(), nn.Linear(64, 3))
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    module, optimizer, *rest = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=k),
        target_epsilons=[2.0] * k,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=0.1,
        seed=0,
        grad_sample_mode=mode,
    )
    criterion = rest[0] if mode == "ghost" else nn.CrossEntropyLoss()

    def cast(part):
        return torch.autocast("cpu", torch.bfloat16, enabled=part in where)

    for x, y in rest[-1]:
        with cast("forward"):
            loss = criterion(module(x), y)
        with cast("backward"):
            loss.backward()
        with cast("step"):
            optimizer.pre_step()
    return torch.cat([p.summed_grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.slow
def test_a_step_within_autocast_adds_up_in_float32(mode):
    where = ("forward", "backward", "step")
    assert (moved(2048, where, mode) - moved(2047, where, mode)).norm() <= 0.1 * 1.02


@pytest.mark.parametrize("where", [("forward",), ("backward",), ("forward", "backward")])
def test_autocast_is_refused_in_ghost_mode(where):
    """Gradients are added up in the backward pass, in the type of its products."""
    refused("autocast", moved, 64, where, "ghost")


@pytest.mark.parametrize("wrap_model", [True, False])
def test_after_ghost_mode_a_model_may_be_cast_again(wrap_model):
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    _, module, *_ = private(model, mode="ghost", wrap_model=wrap_model)
    with torch.autocast("cpu", torch.bfloat16):
        refused("ghost", model, x)
        module.to_standard_module() if wrap_model else module.cleanup()
        assert model(x).dtype == torch.bfloat16


def test_a_data_set_that_sorts_what_it_is_asked_for_is_refused():
    class Sorted(TensorDataset):
        def __getitems__(self, places):
            return [self[i] for i in sorted(places)]

    refused("data_loader", private, nn.Linear(4, 3), Sorted(*vectors().tensors))


class Sleeping(nn.Module):
    """A layer that does what it should until it wakes."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.norm, self.last, self.kind, self.on = (
            nn.Linear(4, 6),
            nn.Identity(),
            nn.Linear(6, 3),
            kind,
            False,
        )
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.count = 0

    def forward(self, x):
        h = self.first(x)
        awake = {"mode": self.norm.training, "flag": self.on, "number": self.count > 0}.get(
            self.kind, False
        )
        if awake:
            h = F.batch_norm(h, self.mean, self.var, training=True)
        elif self.kind == "buffer" and self.on:
            # Of data that no version counts, and of no influence on the outputs.
            self.mean.data.copy_(0.9 * self.mean.data + 0.1 * h.detach().mean(0))
        return self.last(h)


@pytest.mark.parametrize(
    "mode", ["hooks", pytest.param("functorch", marks=pytest.mark.slow), "ghost"]
)
@pytest.mark.parametrize("kind", ["mode", "flag", "number", "hook", "buffer"])
def test_what_wakes_after_the_proof_is_proved_again(kind, mode):
    model = Sleeping(kind)
    model.train()
    model.norm.eval()
    engine, module, optimizer, criterion, loader = private(model, mode=mode)
    for number, (x, y) in enumerate(loader):
        if number == 3:
            before = weights(model)
            model.norm.train(kind == "mode")
            model.on, model.count = True, 1
            if kind == "hook":
                model.first.register_forward_hook(lambda layer, args, out: out - out.mean(0))
        optimizer.zero_grad()
        if number == 3:
            with pytest.raises(
                ValueError, match="mixes examples|statistics|by itself|weights in its layers"
            ):
                criterion(module(x), y).backward()
                optimizer.step()
            break
        criterion(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == 3 and torch.equal(before, weights(model))


def test_a_module_that_counts_its_passes_is_proved_ever_more_seldom():
    class Counting(nn.Linear):
        count = 0

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x)

    model = Counting(4, 3)
    _, module, optimizer, criterion, loader = private(model, epochs=16)
    proofs, prove = [], optimizer._proof._prove
    optimizer._proof._prove = lambda *args: (proofs.append(1), prove(*args))
    for _ in range(16):
        train(module, optimizer, criterion, loader, 4)
    assert 9 < len(proofs) < 18  # with batches 1, 2, 4, ..., and twice as many states


def test_it_is_proved_with_batches_1_2_4_and_8():
    _, module, optimizer, criterion, loader = private(nn.Linear(4, 3), epochs=4)
    proofs, prove, batches = [], optimizer._proof._prove, []
    optimizer._proof._prove = lambda *args: (proofs.append(len(batches)), prove(*args))
    for _ in range(4):
        for x, y in loader:
            batches.append(len(x))
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    assert len(batches) == 16 and min(batches) > 1 and max(batches) < 2 * batches[0]
    assert proofs == [1, 2, 4, 8, 16]


class ByData(nn.Module):
    """Takes examples one by one, in a way that depends on whether their first number is marked."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.way(self, x, x[:, 0] == 9))


def _some_twice(model, x, marked):
    h = torch.tanh(model.first(x)).clone()
    if marked.any():
        h[marked] = torch.tanh(model.first(h[marked]))
    return h


def _some_only(model, x, marked):
    h = torch.zeros(len(x), 4)
    h[~marked] = torch.tanh(model.first(x[~marked]))
    return h


def _marked_last(model, x, marked):
    order = marked.long().argsort(stable=True)
    return torch.tanh(model.first(x[order]))[order.argsort()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [_some_twice, _some_only, _marked_last])
def test_a_layer_that_gets_other_rows_once_the_data_say_so_is_refused(way, mode):
    """Opacus takes the rows that it was given for the first of the batch."""
    dataset = vectors()
    _, module, optimizer, criterion, loader = private(ByData(way), dataset, mode=mode)
    batches = iter(loader)
    train(module, optimizer, criterion, batches, 1)
    dataset.tensors[0][::3, 0] = 9.0
    before = weights(module)
    with pytest.raises((ValueError, UnsupportedModuleError), match="module must"):
        train(module, optimizer, criterion, batches, 1)
    assert torch.equal(before, weights(module))


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_rows_are_looked_at_where_nothing_is_proved(mode):
    dataset = vectors()
    dataset.tensors[0][1:, 0] = 9.0
    _, module, optimizer, criterion, loader = private(
        ByData(_some_only), dataset, mode=mode, prove=False
    )
    refused("one row for each example", train, module, optimizer, criterion, loader)


def test_targets_that_the_loop_writes_to_are_not_those_of_the_loader():
    for changed, allowed in (("y", False), ("x", True)):
        dataset = TensorDataset(vectors().tensors[0], vectors().tensors[0][:, 0].clone())
        _, module, optimizer, _, loader = private(nn.Linear(4, 1), dataset)

        def loop():
            for x, y in loader:
                if changed == "y":
                    y -= y.mean()
                else:
                    x /= 2
                optimizer.zero_grad()
                F.mse_loss(module(x).squeeze(-1), y).backward()
                optimizer.step()

        if allowed:
            loop()
        else:
            refused("a tensor of the loader's batch was written to", loop)


class Heads(nn.Module):
    """Two heads, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_layer_that_the_loss_does_not_come_by_has_a_gradient_of_zero(mode):
    _, module, optimizer, criterion, loader = private(Heads(), mode=mode)
    unused = []
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(module(x, step % 2 == 0), y).backward()
        optimizer.step()
        sums = [p.summed_grad for p in (*module.parameters(),)]
        unused.append([float(total.norm()) for total in sums[2:]])
    assert len(unused) == 4 and all(not any(norms[2:]) for norms in unused)
    assert all(all(norms[:2]) == (step % 2 == 0) for step, norms in enumerate(unused))


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_a_draw_of_nobody_needs_no_way_back(mode):
    engine, module, optimizer, criterion, loader = private(
        nn.Linear(4, 3), mode=mode, batch_size=1, noise_generator=None, seed=0
    )
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            criterion(module(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes and max(sizes) > 1 and len(engine.accountant) == len(sizes) == N


def test_a_step_without_a_way_back_says_what_to_do():
    _, module, optimizer, criterion, loader = private(nn.Linear(4, 3))
    x, y = next(iter(loader))
    criterion(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in loader:
        refused("call loss.backward\\(\\) before optimizer.step", optimizer.step)
        break
    _, module, optimizer, criterion, loader = private(nn.Linear(4, 3))
    for x, y in loader:
        optimizer.zero_grad()
        module(x).argmax(1)  # the accuracy, as loops have it
        criterion(module(x), y).backward()
        refused("look at what the module puts out under torch.no_grad", optimizer.step)
        break


@pytest.mark.parametrize("mode", MODES)
def test_what_is_set_free_is_refused_by_name(mode):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    _, module, optimizer, criterion, loader = private(
        model, mode=mode, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    train(module, optimizer, criterion, loader, 1)
    model[0].requires_grad_(True)
    refused(
        "trainable parameters that it had.*0.weight", train, module, optimizer, criterion, loader, 1
    )


def test_on_a_device_a_buffer_that_keeps_statistics_makes_steps_of_noise_and_is_said(monkeypatch):
    from dpcompanion.gradients import traces

    monkeypatch.setattr(traces, "on_accelerator", lambda tensor: True)
    model = Sleeping("buffer")
    engine, module, optimizer, criterion, loader = private(model, prove=False)
    train(module, optimizer, criterion, loader, 1)
    optimizer._traceless._seen = 3  # not at a power of two, where values are waited for
    model.on = True
    train(module, optimizer, criterion, loader, 1)
    assert all(not p.summed_grad.any() for p in model.parameters())
    refused("statistics", engine.get_epsilons, DELTA)


def test_what_a_module_must_be_is_said_shortly():
    norms = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm in '1' and 1 more") as error:
        private(norms)
    assert len(str(error.value)) < 500


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.scale = (
            nn.Linear(4, 3),
            nn.Dropout(0.1),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x):
        return self.layer(self.drop(x)) * self.scale


def test_a_parameter_of_no_layer_beside_dropout_is_told_what_to_do():
    engine, model, optimizer, criterion, loader = private(Scaled())
    with pytest.raises(UnsupportedModuleError, match="a small module of their own"):
        train(model, optimizer, criterion, loader)


def test_the_module_that_the_engine_was_given_is_not_the_one_to_call():
    for options, words in (
        ({}, "as the engine returned it"),
        ({"prove": False}, "call the return"),
    ):
        own = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        engine, model, optimizer, criterion, loader = private(own, **options)
        with pytest.raises(ValueError, match=words):
            train(own, optimizer, criterion, loader)


def test_ignored_targets_are_named():
    data = vectors()
    data.tensors[1][::5] = -100
    engine, model, optimizer, criterion, loader = private(nn.Linear(4, 3), data)
    with pytest.raises(ValueError, match="as with ignore_index"):
        train(model, optimizer, criterion, loader)


def test_a_state_of_other_clip_norms_is_refused():
    states = [private(nn.Linear(4, 3), max_grad_norm=norm)[0].accountant for norm in (0.5, 3.0)]
    with pytest.raises(ValueError, match="same budgets"):
        states[1].load_state_dict(states[0].state_dict())
