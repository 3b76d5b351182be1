"""A loss that mixes examples is refused before the step; what is taken is as by autograd, one
example at a time.
"""

import copy
import dataclasses
import functools
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.engine.standard import cross_entropy_gradient, fits_to

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:.*lr_scheduler")
N, MODES = 24, ["hooks", "functorch", "ew", "ghost"]
CLIP = 0.7


def drawn(*shape, high=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=generator)
        if high is None
        else torch.randint(high, shape, generator=generator)
    )


def classes():
    return TensorDataset(drawn(N, 4), drawn(N, high=3))


def numbers(width=1):
    return TensorDataset(drawn(N, 4), drawn(N, seed=2) if width == 1 else drawn(N, width, seed=2))


def two():
    return TensorDataset(drawn(N, 4), drawn(N, high=2))


def tokens():
    """Rows of 2 to 6 tokens, padded by 0."""
    t = drawn(N, 6, high=7) + 1
    for i in range(N):
        t[i, 2 + i % 5 :] = 0
    return TensorDataset(t, t)


class Words(nn.Module):
    """(n, T) to (n, classes, T), as torch's cross entropy has it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 5), nn.Linear(5, 8)

    def forward(self, t):
        return self.head(torch.tanh(self.embedding(t))).transpose(1, 2)


def private(model, data, *, mode="hooks", epochs=3, batch_size=N, **options):
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    made = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch_size),
        target_epsilons=[3.0] * len(data),
        epochs=epochs,
        max_grad_norm=CLIP,
        seed=0,
        grad_sample_mode=mode,
        **{"target_delta": 1e-3, **options},
    )
    return engine, *made


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def clipped_one_by_one(model, loss, data):
    """The sum of clipped gradients by plain autograd, one example at a time; loss: of a batch of
    one.
    """
    total = torch.zeros_like(weights(model))
    for x, y in data:
        gradients = torch.autograd.grad(loss(model(x[None]), y[None]), list(model.parameters()))
        flat = torch.cat([g.flatten() for g in gradients])
        total += flat * min(1.0, CLIP / max(float(flat.norm()), 1e-30))
    return total


def summed(engine, module, optimizer, *rest, loss=None):
    """The sum of clipped gradients of the first batch, which is all of the data, as the engine
    makes it.
    """
    criterion, loader = rest if len(rest) == 2 else (loss, *rest)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.pre_step()
    return torch.cat([p.summed_grad.flatten() for p in module.parameters()])


def focal(outputs, y):
    p = outputs.softmax(1)[torch.arange(len(y)), y]
    return (1 - p).square() * -p.log()


def contrastive(outputs, y):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(y)), reduction="none")


W = torch.tensor([1.0, 5.0, 40.0])
#: Loss, model, data. Of one example they are the loss whose gradients the engine must clip.
PER_EXAMPLE = {
    "cross entropy": (F.cross_entropy, lambda: nn.Linear(4, 3), classes),
    "module": (nn.CrossEntropyLoss(), lambda: nn.Linear(4, 3), classes),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda: nn.Linear(4, 3), classes),
    "log likelihood": (
        lambda o, y: F.nll_loss(o.log_softmax(1), y),
        lambda: nn.Linear(4, 3),
        classes,
    ),
    "squared": (lambda o, y: F.mse_loss(o.squeeze(1), y), lambda: nn.Linear(4, 1), numbers),
    "squared, several": (F.mse_loss, lambda: nn.Linear(4, 3), lambda: numbers(3)),
    "absolute": (lambda o, y: F.l1_loss(o[:, 0], y), lambda: nn.Linear(4, 1), numbers),
    "Huber": (lambda o, y: F.smooth_l1_loss(o[:, 0], y), lambda: nn.Linear(4, 1), numbers),
    "binary": (
        lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()),
        lambda: nn.Linear(4, 1),
        two,
    ),
    "probabilities": (
        lambda o, y: F.binary_cross_entropy(o[:, 0], y.float()),
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()),
        two,
    ),
    **{
        f"one number, {name}": (
            loss,
            lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            numbers,
        )
        for name, loss in {"squared": F.mse_loss, "absolute": F.l1_loss}.items()
    },
    "one-hot": (
        lambda o, y: F.mse_loss(o, F.one_hot(y, 3).float()),
        lambda: nn.Linear(4, 3),
        classes,
    ),
    "reconstruction": (
        F.mse_loss,
        lambda: nn.Linear(4, 4),
        lambda: TensorDataset(drawn(N, 4), drawn(N, 4)),
    ),
    "tokens, all": (F.cross_entropy, Words, tokens),
    "tokens, each row's own": (
        lambda o, t: (
            F.cross_entropy(o, t, ignore_index=0, reduction="none").sum(1) / (t != 0).sum(1)
        ).mean(),
        Words,
        tokens,
    ),
}
MIXED = {
    "class weights": (
        lambda o, y: F.cross_entropy(o, y, weight=W),
        lambda: nn.Linear(4, 3),
        classes,
        "class weights",
    ),
    "class weights, smoothed": (
        lambda o, y: F.cross_entropy(o, y, weight=W, label_smoothing=0.1),
        lambda: nn.Linear(4, 3),
        classes,
        "loss",
    ),
    "ignored": (
        lambda o, y: F.cross_entropy(o, y, ignore_index=0),
        lambda: nn.Linear(4, 3),
        classes,
        "ignore_index",
    ),
    "the batch's tokens": (
        lambda o, t: F.cross_entropy(o, t, ignore_index=0),
        Words,
        tokens,
        "tokens",
    ),
    "focal": (lambda o, y: focal(o, y).mean(), lambda: nn.Linear(4, 3), classes, "criterion="),
    "focal over its sum": (
        lambda o, y: focal(o, y).sum() / (1 - o.softmax(1)).sum().detach(),
        lambda: nn.Linear(4, 3),
        classes,
        "criterion=",
    ),
    "contrastive": (
        lambda o, y: contrastive(o, y).mean(),
        lambda: nn.Linear(4, 3),
        classes,
        "criterion=",
    ),
    "hardest half": (
        lambda o, y: F.cross_entropy(o, y, reduction="none").topk(len(y) // 2).values.mean(),
        lambda: nn.Linear(4, 3),
        classes,
        "criterion=",
    ),
    "a sum for a mean": (
        lambda o, y: F.cross_entropy(o, y, reduction="sum"),
        lambda: nn.Linear(4, 3),
        classes,
        "sum",
    ),
    "broadcast": (F.mse_loss, lambda: nn.Linear(4, 1), numbers, "broadcasting"),
    "scaled": (
        lambda o, y: 1024 * F.cross_entropy(o, y),
        lambda: nn.Linear(4, 3),
        classes,
        "GradScaler",
    ),
    "a penalty of the batch": (
        lambda o, y: F.cross_entropy(o, y) + o.mean(0).square().sum(),
        lambda: nn.Linear(4, 3),
        classes,
        "criterion=",
    ),
    "what another batch has": (
        lambda o, y: F.cross_entropy(o, y.roll(1)),
        lambda: nn.Linear(4, 3),
        classes,
        "criterion=",
    ),
}
CRITERIA = {
    "class weights": (
        lambda: nn.CrossEntropyLoss(weight=W),
        lambda o, y: W[y] * F.cross_entropy(o, y),
        classes,
    ),
    "smoothed, class weights": (
        lambda: functools.partial(F.cross_entropy, weight=W, label_smoothing=0.1),
        lambda o, y: F.cross_entropy(o, y, weight=W, label_smoothing=0.1, reduction="sum"),
        classes,
    ),
    "ignored": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        lambda o, y: F.cross_entropy(o, y, ignore_index=0, reduction="sum"),
        classes,
    ),
    "focal": (lambda: focal, lambda o, y: focal(o, y)[0], classes),
    "tokens": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        lambda o, t: F.cross_entropy(o, t, ignore_index=0),
        tokens,
    ),
}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_a_known_loss_is_taken_and_its_sum_is_that_of_one_example_at_a_time(name, mode):
    loss, make, data = PER_EXAMPLE[name]
    model = make()
    plain, data = copy.deepcopy(model), data()
    found = summed(*private(model, data, mode=mode), loss=loss)
    assert torch.allclose(found, clipped_one_by_one(plain, loss, data), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss])
def test_outputs_of_one_axis_are_taken_with_targets_of_any_size_and_empty_draws(loss):
    data = TensorDataset(drawn(N, 4), 1e5 * drawn(N, seed=2))
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    engine, module, optimizer, loader = private(model, data, batch_size=1, epochs=1)
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert engine.accountant.steps == len(sizes) and 0 in sizes and max(sizes) > 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_mixes_examples_is_refused_before_any_step(name, mode):
    loss, make, data, word = MIXED[name]
    engine, module, optimizer, loader = private(make(), data(), mode=mode)
    before = weights(module)
    x, y = next(iter(loader))
    loss(module(x), y).backward()
    with pytest.raises(ValueError, match=word) as refused:
        optimizer.step()
    assert "trust_loss=True" in str(refused.value)
    assert torch.equal(before, weights(module)) and engine.accountant.steps == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_is_taken_without_reduction_and_its_sum_is_that_of_one_example_at_a_time(
    name, mode
):
    make, alone, data = CRITERIA[name]
    torch.manual_seed(0)
    model, data = Words() if data is tokens else nn.Linear(4, 3), data()
    plain = copy.deepcopy(model)
    found = summed(*private(model, data, mode=mode, criterion=make()))
    if mode == "ghost":
        found = torch.cat([p.summed_grad.flatten() for p in model.parameters()])
    assert torch.allclose(found, clipped_one_by_one(plain, alone, data), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_criterion_that_mixes_examples_or_gives_one_number_is_refused(mode):
    for criterion, word in (
        (contrastive, "depends on the rest of the batch"),
        (lambda o, y: focal(o, y) / len(y), "depends on the rest of the batch"),
        (lambda o, y: focal(o, y) / len(y) + 1e-6 * torch.rand(len(y)), "or on chance"),
        (lambda o, y: focal(o, y).mean(), "one number an example"),
    ):
        engine, module, optimizer, criterion, loader = private(
            nn.Linear(4, 3), classes(), mode=mode, criterion=criterion
        )
        x, y = next(iter(loader))
        refused(word, criterion, module(x), y)
        assert engine.accountant.steps == 0


def test_a_criterion_that_mixes_is_refused_wherever_the_outputs_stand_among_its_arguments():
    for call in (lambda c, o, y: c(1.0, o, y), lambda c, o, y: c(scale=1.0, o=o, y=y)):
        engine, module, optimizer, criterion, loader = private(
            nn.Linear(4, 3), classes(), criterion=lambda scale, o, y: scale * focal(o, y) / len(y)
        )
        x, y = next(iter(loader))
        refused("depends on the rest of the batch", call, criterion, module(x), y)
        assert engine.accountant.steps == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_with_a_criterion_no_gradient_comes_by_another_way(mode):
    extras = {
        "not at all": lambda criterion, o, y: F.cross_entropy(o, y),
        "beside it": lambda criterion, o, y: criterion(o, y) + o.mean(0).square().sum(),
        "scaled": lambda criterion, o, y: 1024 * criterion(o, y),
        "after a change": lambda criterion, o, y: criterion(o - o.mean(0), y),
    }
    for name, loss in extras.items():
        engine, module, optimizer, criterion, loader = private(
            nn.Linear(4, 3), classes(), mode=mode, criterion=nn.CrossEntropyLoss()
        )
        x, y = next(iter(loader))
        with pytest.raises(ValueError, match="criterion"):
            loss(criterion, module(x), y).backward()
            optimizer.step()
        assert engine.accountant.steps == 0, name


def test_one_example_moves_the_sum_by_one_clip_norm_or_the_step_is_refused():
    """Ninety-nine alike, one with a rare class of weight 99; without the criterion the step is
    refused.
    """
    x, y = F.normalize(drawn(100, 5), dim=1), torch.zeros(100, dtype=torch.int64)
    x[1:], y[0] = x[1].clone(), 1
    sums = []
    for kept in (slice(0, None), slice(1, None)):
        model = nn.Linear(5, 2)
        for p in model.parameters():
            nn.init.zeros_(p)
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 99.0]))
        data = TensorDataset(x[kept], y[kept])
        sums.append(summed(*private(model, data, batch_size=len(data), criterion=criterion)))
    assert float((sums[0] - sums[1]).norm()) <= CLIP * (1 + 1e-5)
    with pytest.raises(ValueError, match="class weights"):
        summed(
            *private(nn.Linear(5, 2), TensorDataset(x, y), batch_size=100),
            loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 99.0])),
        )


def test_a_loss_that_mixes_in_a_later_batch_is_refused_there():
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), batch_size=12)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y, weight=W if number else None).backward()
        if number:
            refused("class weights", optimizer.step)
            break
        optimizer.step()
    assert engine.accountant.steps == 1


def test_your_word_is_taken_and_said():
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), trust_loss=True)
    for x, y in loader:
        optimizer.zero_grad()
        focal(module(x), y).mean().backward()
        optimizer.step()
    assert engine.accountant.steps == 1 and "on trust that the loss" in engine.statement()
    assert "on trust" not in private(nn.Linear(4, 3), classes())[0].statement()


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return 2 * self.layer(x)


@dataclasses.dataclass
class Outputs:
    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden: torch.Tensor


class WithLoss(nn.Module):
    """Puts out its own loss, as Hugging Face's models do, as a dataclass, a dict or a tuple."""

    def __init__(self, kind="dataclass", weight=None):
        super().__init__()
        self.first, self.last, self.kind, self.weight = (
            nn.Linear(4, 5),
            nn.Linear(5, 3),
            kind,
            weight,
        )

    def forward(self, x, y):
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        loss = F.cross_entropy(logits, y, weight=self.weight)
        if self.kind == "dataclass":
            return Outputs(loss, logits, hidden)
        return (
            (loss, logits, hidden)
            if self.kind == "tuple"
            else {"loss": loss, "logits": logits, "hidden": hidden}
        )


@pytest.mark.parametrize("kind", ["dataclass", "tuple", "dict"])
def test_a_models_own_loss_is_held_to_its_outputs(kind):
    def parts(out):
        return (
            (out.loss, out.logits)
            if kind == "dataclass"
            else out[:2]
            if kind == "tuple"
            else tuple(out.values())[:2]
        )

    for number in (0, 1):
        engine, module, optimizer, loader = private(WithLoss(kind), classes(), batch_size=12)
        for x, y in loader:
            optimizer.zero_grad()
            out = parts(module(x, y))
            (F.cross_entropy(out[1], y) if number else out[0]).backward()
            optimizer.step()
        assert engine.accountant.steps == 2
    engine, module, optimizer, loader = private(WithLoss(kind), classes(), batch_size=12)
    x, y = next(iter(loader))
    (1024 * parts(module(x, y))[0]).backward()
    refused("its own loss.*GradScaler", optimizer.step)
    for prove, word in ((False, "class weights"), (True, "no mean of the examples")):
        engine, module, optimizer, loader = private(
            WithLoss(kind, weight=W), classes(), prove=prove
        )
        x, y = next(iter(loader))
        parts(module(x, y))[0].backward()
        refused(f"its own loss.*{word}", optimizer.step)
        assert engine.accountant.steps == 0
    # What the loop does not use does no harm.
    engine, module, optimizer, loader = private(WithLoss(kind, weight=W), classes(), batch_size=12)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(parts(module(x, y))[1], y).backward()
        optimizer.step()
    assert engine.accountant.steps == 2


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_criterion_takes_a_part_of_the_outputs(mode):
    engine, module, optimizer, criterion, loader = private(
        WithLoss("dict"),
        classes(),
        mode=mode,
        criterion=nn.CrossEntropyLoss(weight=W),
        batch_size=12,
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x, y)["logits"], y).backward()
        optimizer.step()
    assert engine.accountant.steps == 2


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_pieces_of_a_draw_and_empty_ones_are_looked_at_one_by_one(mode, given):
    torch.manual_seed(0)
    criterion = {"criterion": nn.CrossEntropyLoss(weight=W)} if given else {}
    engine, module, optimizer, *rest = private(
        nn.Linear(4, 3), classes(), mode=mode, batch_size=4, epochs=2, **criterion
    )
    loss, loader = rest if len(rest) == 2 else (F.cross_entropy, *rest)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as small:
        for _ in range(2):
            for x, y in small:
                optimizer.zero_grad()
                loss(module(x), y).backward()
                optimizer.step()
    assert engine.accountant.steps == 12


def test_two_passes_over_a_batch_are_each_looked_at():
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), batch_size=12, epochs=2)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(module(scale * x), y, weight=W if number and scale == 2 else None)
            for scale in (1, 2)
        ]
        (sum(losses) / 2).backward()
        if number:
            refused("class weights", optimizer.step)
            break
        optimizer.step()
    assert engine.accountant.steps == 1


def test_a_layer_that_is_called_beside_the_module_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine, module, optimizer, loader = private(model, classes())
    x, y = next(iter(loader))
    with torch.no_grad():
        model[0](x)
    (F.cross_entropy(module(x), y) + model[0](x).mean(0).square().sum()).backward()
    refused("layer '0'", optimizer.step)
    assert engine.accountant.steps == 0


def test_outputs_that_are_changed_in_place_are_refused_by_name():
    engine, module, optimizer, loader = private(Doubled(), classes())
    x, y = next(iter(loader))
    out = module(x)
    out.mul_(2)
    F.cross_entropy(out, y).backward()
    refused("in place", optimizer.step)
    assert engine.accountant.steps == 0


@pytest.mark.parametrize("given", [False, True])
def test_a_scaler_before_the_optimizer_is_refused_by_name(given):
    options = {"criterion": nn.CrossEntropyLoss()} if given else {}
    engine, module, optimizer, *rest = private(nn.Linear(4, 3), classes(), **options)
    loss, loader = rest if given else (F.cross_entropy, *rest)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = next(iter(loader))
    scaler.scale(loss(module(x), y)).backward()
    refused("GradScaler", scaler.step, optimizer)
    assert engine.accountant.steps == 0


def test_a_loss_in_bfloat16_fits():
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), batch_size=8)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
    assert engine.accountant.steps == 3


def test_on_a_device_a_loss_that_mixes_later_makes_steps_of_noise_and_is_said(monkeypatch):
    from dpcompanion.engine import losses

    monkeypatch.setattr(losses, "on_accelerator", lambda tensor: True)
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), batch_size=12, epochs=2)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y, weight=W if number else None).backward()
        optimizer.step()
        if number:
            assert all(not p.summed_grad.any() for p in module.parameters())
    refused("loss must be", engine.get_epsilons, 1e-3)


@pytest.mark.parametrize("delta", [0.5, 1 / N])
def test_a_delta_that_one_example_in_full_would_have_is_warned_of(delta):
    with pytest.warns(UserWarning, match="target_delta must be below 1 / n"):
        engine = private(nn.Linear(4, 3), classes(), target_delta=delta)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        engine.statement()


def test_the_statement_is_of_the_steps_that_were_taken():
    engine, module, optimizer, loader = private(nn.Linear(4, 3), classes(), batch_size=4, epochs=5)
    assert " 30 steps," in engine.statement()
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        if number == 4:
            break
    said = engine.statement()
    assert " 5 of 30 planned steps," in said
    planned = re.search(r"the epsilon of all planned steps holds, (\d+.\d+)", said)
    now = re.search(r"Epsilon at most (\d+.\d+)", said)
    assert float(now[1]) < float(planned[1])


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_formula_of_cross_entropy_is_what_autograd_says(ignored, dtype):
    generator = torch.Generator().manual_seed(0)
    outputs = (3 * torch.randn(40, 5, generator=generator)).to(dtype).requires_grad_()
    targets = torch.arange(40) % 5
    targets[::7] = ignored
    loss = F.cross_entropy(outputs, targets, ignore_index=ignored, reduction="sum")
    (expected,) = torch.autograd.grad(loss, outputs)
    torch.testing.assert_close(cross_entropy_gradient(outputs.detach(), targets, ignored), expected)


@pytest.mark.parametrize("spoilt", [0.0, 1e-4, 1e-2, math.nan, math.inf])
def test_a_gradient_fits_only_as_a_whole(spoilt):
    expected = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    gradient = expected.clone()
    gradient[17, 2] += spoilt
    assert bool(fits_to(gradient, expected, 1e-3, 1.0)) == (spoilt <= 1e-4)
