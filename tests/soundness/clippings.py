"""Clipping on random networks, against autograd one example at a time.

A case draws a network (layers in random order, in-place activations, views, shared and tied
weights, frozen parts, residual paths, functional mixing of examples), a dtype, data (a few of which
overflow) and a method, and asks for it the way that the trainers do: `resolve_method` first, then
norms and clipped sum. The library may refuse by ValueError; what it returns must be right. Networks
that mix examples have no right answer and must be refused.

The oracle is `torch.autograd.grad` of each example's loss alone, in the network's own type.
"""

import copy
import random
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.gradients import clipping, cross_entropy

CLASSES = 3


class Bent(nn.Module):
    """Applies a function of a tensor, with modules of its own to reach from `named_parameters`."""

    def __init__(self, function, *modules):
        super().__init__()
        self.parts, self.function = nn.ModuleList(modules), function

    def forward(self, x):
        return self.function(x, *self.parts)


class Scaled(nn.Module):
    """A module with a parameter of its own beside a child's."""

    def __init__(self, child):
        super().__init__()
        self.child, self.gain = child, nn.Parameter(torch.tensor([0.7]))

    def forward(self, x):
        return self.gain * self.child(x)


def activation(draw):
    place = draw.random() < 0.6
    return draw.choice(
        [
            lambda: nn.ReLU(inplace=place),
            lambda: nn.ELU(inplace=place),
            lambda: nn.SiLU(inplace=place),
            lambda: nn.LeakyReLU(0.2, inplace=place),
            lambda: nn.Hardtanh(-0.9, 0.9, inplace=place),
            nn.Tanh,
            nn.GELU,
            nn.Softplus,
            nn.Identity,
            lambda: nn.PReLU(),
            lambda: Bent(lambda x: x.mul_(0.9) if place else x * 0.9),
            lambda: Bent(lambda x: x.add_(0.1) if place else x + 0.1),
        ]
    )()


def vectors(draw):
    """Layers (n, ..., width) -> (n, CLASSES) and the shape of one input."""
    width, inner = draw.randint(2, 6), draw.choice([(), (), (3,), (2, 3)])
    layers, now = [], width
    for _ in range(draw.randint(1, 4)):
        after = draw.randint(2, 6)
        linear = nn.Linear(now, after, bias=draw.random() < 0.7)
        layers.append(
            draw.choice(
                [
                    lambda: linear,
                    lambda: nn.utils.parametrizations.weight_norm(linear),
                    lambda: Scaled(linear),
                    lambda: nn.Sequential(
                        linear, nn.LayerNorm(after, elementwise_affine=draw.random() < 0.8)
                    ),
                    lambda: Bent(lambda x, f: f(x) + f(x * 0.5), linear),
                    lambda: Bent(lambda x, f: f(x)[..., :], linear),
                ]
            )()
        )
        layers.append(activation(draw))
        if draw.random() < 0.2:
            twice = nn.Linear(after, after)
            layers.append(Bent(lambda x, f: x + f(f(x).tanh()), twice))
        if draw.random() < 0.15:
            tied = nn.Linear(after, after, bias=False)
            layers.append(Bent(lambda x, f: F.linear(f(x), f.weight.T), tied))
        if draw.random() < 0.1 and len(inner) == 1:
            attention = nn.MultiheadAttention(after, 1, batch_first=True)
            layers.append(Bent(lambda x, f: f(x, x, x, need_weights=False)[0], attention))
        now = after
    layers += [nn.Flatten(), nn.Linear(now * torch.Size(inner).numel(), CLASSES)]
    return layers, (*inner, width)


def images(draw):
    channels, size, layers = draw.choice([1, 2, 4]), draw.choice([5, 6, 8]), []
    now, side = channels, size
    for _ in range(draw.randint(1, 3)):
        groups = draw.choice([g for g in (1, 2) if now % g == 0])
        after = 2 * draw.randint(1, 3)
        kernel, stride = draw.choice([1, 3]), draw.choice([1, 1, 2])
        padding, dilation = draw.choice([0, 1]), draw.choice([1, 1, 2])
        out = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if out < 2:
            continue
        mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
        bias = draw.random() < 0.7
        layers.append(
            nn.Conv2d(
                now, after, kernel, stride, padding, dilation, groups, bias, padding_mode=mode
            )
        )
        now, side = after, out
        norm = draw.random()
        if norm < 0.25:
            layers.append(nn.GroupNorm(2, now, affine=draw.random() < 0.8))
        elif norm < 0.5:
            layers.append(nn.InstanceNorm2d(now, affine=draw.random() < 0.8))
        layers.append(activation(draw))
        if draw.random() < 0.2 and side >= 4:
            layers.append(draw.choice([nn.MaxPool2d, nn.AvgPool2d])(2))
            side //= 2
        if draw.random() < 0.15:
            layers.append(Bent(lambda x, f: x + f(x), nn.Conv2d(now, now, 3, padding=1)))
        if draw.random() < 0.15:
            layers += [
                Bent(lambda x: x.movedim(1, -1)),
                nn.Linear(now, now),
                activation(draw),
                Bent(lambda x: x.movedim(-1, 1)),
            ]
        if draw.random() < 0.1:
            layers.append(nn.ConvTranspose2d(now, now, 1))
    layers += [nn.Flatten(), nn.Linear(now * side * side, CLASSES)]
    return layers, (channels, size, size)


def sequences(draw):
    """Whole numbers (n, length) -> (n, CLASSES)."""
    width, length, words = draw.choice([2, 4]), draw.randint(2, 5), 7
    layers = [nn.Embedding(words, width, padding_idx=draw.choice([None, 0]))]
    for _ in range(draw.randint(0, 2)):
        layers.append(
            draw.choice(
                [
                    lambda: nn.Linear(width, width),
                    lambda: nn.LayerNorm(width),
                    lambda: Bent(lambda x, f: f(x.mT).mT, nn.Conv1d(width, width, 3, padding=1)),
                    lambda: Bent(lambda x, f: f(x)[0], nn.GRU(width, width, batch_first=True)),
                    lambda: Bent(lambda x, f: f(x)[0], nn.LSTM(width, width, batch_first=True)),
                ]
            )()
        )
        layers.append(activation(draw))
    if draw.random() < 0.3:  # the embedding's matrix once more, as a head
        head = layers[0]
        layers.append(Bent(lambda x, f: F.linear(x, f.weight), head))
        width = words
    layers += [Bent(lambda x: x.mean(1)), nn.Linear(width, CLASSES)]
    return layers, (length,)


def mixing(draw):
    """A layer that mixes examples, without saying so by its type."""
    return draw.choice(
        [
            lambda: Bent(lambda x: x - x.mean(0, keepdim=True)),
            lambda: Bent(lambda x: x / (1e-3 + x.abs().amax(0, keepdim=True))),
            lambda: Bent(lambda x: x + 0.3 * x.roll(1, 0)),
            lambda: Bent(lambda x: F.batch_norm(x, None, None, training=True)),
            lambda: Bent(lambda x: torch.cumsum(x, 0)),
        ]
    )()


def network(draw):
    """(module, shape of an input, whether inputs are whole numbers, whether examples are mixed)."""
    kind = draw.choice([vectors, vectors, images, images, sequences])
    layers, shape = kind(draw)
    mixed = draw.random() < 0.1
    if mixed:
        layers.append(mixing(draw))
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        if draw.random() < 0.05:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        layers[-2 if mixed else -1].requires_grad_(True)
    return model, shape, kind is sequences, mixed


def oracle(model, x, y, jitter=0.0):
    """Each example's gradient of all trainable parameters, flat, (n, parameters) float64."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + jitter * torch.randn_like(parameter))
    x = x if x.dtype == torch.int64 else x * (1 + jitter * torch.randn_like(x))
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        loss = cross_entropy(model(x[i : i + 1].clone()), y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten().double() for g in found]))
    return torch.stack(rows)


def truth_of(model, x, y, tolerance):
    """The oracle's gradients, and which examples have one that does not depend on the last bits:
    where rounding alone moves a gradient (behind the norm of two almost equal numbers, or at a
    kink) nobody can say what is right.
    """
    truth, jitter = oracle(model, x, y), 32 * torch.finfo(next(model.parameters()).dtype).eps
    moved = torch.stack([(oracle(model, x, y, jitter) - truth).norm(dim=1) for _ in range(2)]).amax(
        0
    )
    return truth, ~(moved > tolerance / 4 * truth.norm(dim=1))


def cases(seed, count):
    yield from range(1_000_000 * seed, 1_000_000 * seed + count)


def violations(case):
    """What is wrong, in a list; None where rounding alone moves a gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(case)


def tried(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, shape, whole, mixed = network(draw)
    dtype = torch.float64 if draw.random() < 0.75 else torch.float32
    model = model.to(dtype)
    n = draw.randint(4, 9)
    scale = draw.choice([1.0, 1.0, 1e-3, 30.0])
    x = torch.randint(0, 7, (n, *shape)) if whole else scale * torch.randn(n, *shape, dtype=dtype)
    y = torch.randint(0, CLASSES, (n,))
    spoilt = not whole and draw.random() < 0.15
    if spoilt:
        x[draw.sample(range(n), 2) if draw.random() < 0.5 else [0, 1]] = float("nan")
    method, tolerance = draw.choice(clipping.METHODS), 1e-8 if dtype == torch.float64 else 2e-3
    who = f"seed {seed}, {method}, {dtype}"
    untouched = copy.deepcopy(model)
    limits = 10 ** (2 * torch.rand(n, dtype=torch.float64) - 2)
    try:
        method = clipping.resolve_method(model, cross_entropy, x, y, method)
        found = clipping.clipped_sum(model, cross_entropy, x, y, limits, method=method)
    except ValueError:
        return []
    if mixed and method != "func":  # which puts each example through the network alone
        return [f"{who}: a network that mixes examples was accepted"]
    if any(
        type(after) is not type(before) or not torch.equal(after, before)
        for after, before in zip(model.parameters(), untouched.parameters(), strict=True)
    ):
        return [f"{who}: the network's parameters are not what they were"]
    truth, steady = truth_of(untouched, x, y, tolerance)
    finite = truth.isfinite().all(1)
    norms = truth.norm(dim=1)
    short = (found.norms.double() < norms * (1 - tolerance) - 1e-300) & finite & steady
    if short.any():
        ratio = (found.norms.double() / norms)[short].min().item()
        return [f"{who}: a norm is {ratio:.3g} of the truth"]
    if found.norms[~finite].isfinite().any():
        return [f"{who}: a gradient that is not finite has a finite norm"]
    if not steady[finite].all():
        return None
    shares = (
        torch.where(finite[:, None], truth, 0.0)
        * (limits / norms).clamp(max=1).nan_to_num(0.0)[:, None]
    )
    got = torch.cat(
        [
            found.gradients[name].flatten().double()
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
    )
    error = (got - shares.sum(0)).norm().item()
    if not error <= tolerance * float(torch.minimum(limits, norms.nan_to_num(0.0)).sum()) + 1e-300:
        return [f"{who}: the clipped sum is off by {error:.3g}"]
    return []
