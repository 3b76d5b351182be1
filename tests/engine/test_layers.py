"""Layers that people use, in every mode: each example has the gradient that autograd gives it
alone, or is refused.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.training import models

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:In CPU autocast")
N, CLIP, MODES = 12, 0.7, ["hooks", "functorch", "ew", "ghost"]


class Padded(nn.Module):
    """Words, padded, and positions that are looked up for the whole batch."""

    def __init__(self, positions=None):
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(9, 5, padding_idx=0),
            nn.Embedding(6, 5) if positions else None,
        )
        self.head, self.kind = nn.Linear(5, 3), positions

    def forward(self, t):
        h = self.words(t)
        if self.kind:
            ids = torch.arange(t.shape[1])
            h = h + self.positions(ids[None] if self.kind == "(1, T)" else ids)
        return self.head(torch.tanh(h).mean(1))


def sentences(length=6):
    generator = torch.Generator().manual_seed(0)
    t = torch.randint(1, 9, (N, length), generator=generator)
    for i in range(N):
        t[i, 1 + i % length :] = 0
    return TensorDataset(t, torch.randint(3, (N,), generator=generator))


def private(model, data, mode, *, batch_size=N, epochs=1, **options):
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    module, optimizer, *rest = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(data, batch_size=batch_size),
        target_epsilons=[3.0] * N,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=CLIP,
        seed=0,
        grad_sample_mode=mode,
        **options,
    )
    return engine, module, optimizer, *(rest if mode == "ghost" else (F.cross_entropy, *rest))


def check_sum(model, data, mode):
    """The first batch is all of the data; its clipped sum is that of plain autograd."""
    plain = copy.deepcopy(model)
    own = [p for p in plain.parameters() if p.requires_grad]
    expected = [torch.zeros_like(p) for p in own]
    for x, y in data:
        gradients = torch.autograd.grad(F.cross_entropy(plain(x[None]), y[None]), own)
        factor = min(1.0, CLIP / float(torch.stack([g.norm() for g in gradients]).norm()))
        for total, g in zip(expected, gradients):
            total += factor * g
    _, module, optimizer, criterion, loader = private(model, data, mode)
    x, y = next(iter(loader))
    criterion(module(x), y).backward()
    optimizer.pre_step()
    for p, total in zip((p for p in model.parameters() if p.requires_grad), expected):
        assert torch.allclose(p.summed_grad, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("positions", [None, "(T,)", "(1, T)"])
def test_embeddings_with_padding_and_with_positions_of_the_whole_batch_are_right(positions, mode):
    torch.manual_seed(0)
    check_sum(Padded(positions), sentences(), mode)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("inside", [False, True])
def test_convolutions_over_images_that_lie_by_channel_are_right(inside, mode):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        *([models.MaxPool2d(2, stride=1)] if inside else []),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x = torch.randn(N, 2, 7, 7).contiguous(memory_format=torch.channels_last)
    model(x)
    if not inside:
        model = model.to(memory_format=torch.channels_last)
    check_sum(model, TensorDataset(x, torch.arange(N) % 3), mode)


class Residual(nn.Module):
    """A block that overwrites what its layers put out, as torchvision's ResNets do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4))
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)])
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4 * 25, 3)

    def forward(self, x):
        x = self.relu(self.norms[0](self.first(x)))
        out = self.norms[1](self.second(x))
        out += x
        return self.head(torch.relu_(out).flatten(1))


@pytest.mark.parametrize("mode", MODES)
def test_layers_whose_outputs_are_overwritten_are_right(mode):
    torch.manual_seed(0)
    x = torch.randn(N, 2, 5, 5)
    check_sum(Residual(), TensorDataset(x, torch.arange(N) % 3), mode)


class Sequential(nn.Module):
    """A linear layer over words, whose output is a view, overwritten in several ways."""

    def __init__(self, change, bias):
        super().__init__()
        self.change, self.first = change, nn.Linear(5, 6, bias=bias)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3, bias=bias)

    def forward(self, x):
        return self.head(self.norm(self.change(self.first(x)))).mean(1)


def doubled_at_first(h):
    h[:, 0] *= 2
    return h


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", [torch.relu_, lambda h: h.mul_(2), doubled_at_first])
def test_views_that_are_overwritten_are_right(change, bias, mode):
    torch.manual_seed(0)
    x = torch.randn(N, 7, 5)
    check_sum(Sequential(change, bias), TensorDataset(x, torch.arange(N) % 3), mode)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_nothing_listens_to_a_module_that_is_plain_again(mode):
    module = private(nn.Linear(5, 3), TensorDataset(torch.randn(N, 5), torch.arange(N) % 3), mode)[
        1
    ]
    layer = module._module
    assert any(getattr(hook, "func", None) for hook in layer._forward_hooks.values())
    module.remove_hooks()
    assert not [hook for hook in layer._forward_hooks.values() if "_listen" in repr(hook)]


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_as_many_positions_as_examples_are_no_examples(mode):
    torch.manual_seed(0)
    model = Padded("(T,)")
    model.positions = nn.Embedding(N, 5)
    check_sum(model, sentences(N), mode)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("positions", [None, "(T,)", "(1, T)"])
def test_embeddings_take_empty_draws(positions, mode):
    engine, module, optimizer, criterion, loader = private(
        Padded(positions), sentences(), mode, batch_size=1
    )
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes and max(sizes) > 1 and engine.accountant.steps == 12


def test_a_padding_index_is_refused_by_name_where_it_would_be_wrong():
    refused("padding_idx .* in 'words'", private, Padded(), sentences(), "ew")


class Packed(nn.Module):
    def __init__(self, enforce_sorted=False):
        super().__init__()
        self.words, self.recurrent, self.head = (
            nn.Embedding(9, 4),
            DPLSTM(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )
        self.enforce_sorted = enforce_sorted

    def forward(self, t):
        lengths = (t != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(t), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        return self.head(self.recurrent(packed)[1][0][-1])


def falling():
    """Rows of 14, 13, ..., 3 words."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randint(1, 9, (N, 14), generator=generator)
    for i in range(N):
        t[i, 14 - i :] = 0
    return TensorDataset(t, torch.randint(3, (N,), generator=generator))


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_rows_in_the_order_of_the_batch_are_right(enforce_sorted):
    torch.manual_seed(0)
    check_sum(Packed(enforce_sorted), falling(), "hooks")


def test_packed_rows_in_another_order_are_refused_in_whichever_batch_they_come():
    engine, module, optimizer, criterion, loader = private(Packed(), falling(), "hooks", epochs=2)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if number:
            refused("packed sequences", module, x.flip(0))
            break
        criterion(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_frozen_batch_norm_in_evaluation_mode_is_taken_until_it_wakes(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(N, 4)
    model(x)
    model[:2].requires_grad_(False)
    model[1].eval()
    data = TensorDataset(x, torch.arange(N) % 3)
    check_sum(copy.deepcopy(model), data, mode)
    engine, module, optimizer, criterion, loader = private(model, data, mode, epochs=2)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if number:
            module.train()
            with pytest.raises(ValueError, match="mixes|statistics|module must"):
                criterion(module(x), y).backward()
                optimizer.step()
            break
        criterion(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == 1
