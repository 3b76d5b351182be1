"""The networks of the five papers' experiments.

Each takes a `seed` and is initialised from a stream of its own: the same seed gives the same
network whatever was sampled before, and building one draws nothing from PyTorch's global generator.
Inputs are (n, channels, height, width), outputs (n, classes) logits.  All treat examples one by
one: group norm, no batch norm::

    network        data            source                                      parameters
    mnist_cnn      1 x 28 x 28     Tramer & Boneh 2021; Boenisch et al. 2023        26,010
    cifar_cnn      3 x 32 x 32     Tramer & Boneh 2021; Boenisch et al. 2023       550,570
    lenet5         1 x 32 x 32     LeCun et al. 1998; Thudi et al. 2024             61,706
    resnet20       3 x 32 x 32     He et al. 2016; Yu et al. 2023                  268,346
                                   with affine=True, groups=16: Thudi et al.       269,722
    wrn16_4        3 x 32 x 32     De et al. 2022                                2,753,402
    char_rnn       20 bytes        Boenisch et al. 2023 (surnames)                 382,418
    word_mean      256 words       Boenisch et al. 2023 (IMDB), 30,000 words       480,306

The last two read token numbers (n, positions), 0 for none, as `dpcompanion.data.byte_tokens` and
`word_tokens` make them.

>>> model = mnist_cnn(seed=0)
>>> sum(p.numel() for p in model.parameters())
26010
>>> model(torch.zeros(5, 1, 28, 28)).shape
torch.Size([5, 10])
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.gradients.reparametrized import Reparametrized
from dpcompanion.gradients.tensors import squared_norms
from dpcompanion.seeds import derive_key, jittered, seed_torch

_Model = TypeVar("_Model", bound=nn.Module, covariant=True)


class Seeded(Protocol[_Model]):
    """What makes a model of its own arguments and a seed."""

    def __call__(self, *args: Any, seed: int = 0, **kwargs: Any) -> _Model: ...


def seeded(build: Callable[..., _Model]) -> Seeded[_Model]:
    """Give `build` a keyword `seed` that decides its random numbers; the global generator is left
    as it was.

    Its weights go through `jittered`, which moves them only where a test asks for it.
    """

    @functools.wraps(build)
    def wrapped(*args: Any, seed: int = 0, **kwargs: Any) -> _Model:
        with torch.random.fork_rng(devices=[]):
            seed_torch(derive_key(seed, "initialisation"))
            model = build(*args, **kwargs)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(jittered(p))
        return model

    return wrapped


@seeded
def linear(features, classes):
    """Logistic regression."""
    return nn.Linear(features, classes)


class MaxPool2d(nn.MaxPool2d):
    """Max pooling that is as fast on a CPU as elsewhere: PyTorch vectorises it over the channels
    only where these lie side by side in memory, which here is ten times faster (18 ms against 2 ms
    for 512 digits).
    """

    def forward(self, x):
        if x.device.type == "cpu":
            x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
        return super().forward(x)


@seeded
def mnist_cnn(classes=10):
    """Two tanh convolutions, as in Tramer and Boneh's DP-SGD baseline for MNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


@seeded
def cifar_cnn(classes=10):
    """Three blocks of two tanh convolutions, as in Tramer and Boneh's baseline for CIFAR-10."""
    layers, before = [], 3
    for width in (32, 64, 128):
        for after in (width, width):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
            before = after
        layers.append(MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, classes)
    )


@seeded
def lenet5(classes=10):
    """LeNet-5 with tanh and average pooling, on digits padded to 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )


class _BasicBlock(nn.Module):
    def __init__(self, before, after, stride, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)
        self.stride, self.added = stride, after - before

    def forward(self, x):
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        return F.relu(out + F.pad(x, (0, 0, 0, 0, 0, self.added)))


@seeded
def resnet20(classes=10, *, groups=4, affine=False, channels=3):
    """ResNet-20 with group norm; shortcuts are average pooling with zero channels appended.

    The defaults are Yu et al.'s, with convolutions from N(0, 2 / (k^2 out)); `groups=16,
    affine=True` is Thudi et al.'s.
    """

    def norm(width):
        return nn.GroupNorm(groups, width, affine=affine)

    layers, before = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()], 16
    for width in (16, 32, 64):
        for block in range(3):
            layers.append(_BasicBlock(before, width, 2 if block == 0 and width > 16 else 1, norm))
            before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(
                module.weight, std=math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            )
    return model


class StandardizedConv2d(Reparametrized, nn.Conv2d):
    r"""A convolution whose weight is standardised over each output channel, with a learned gain
    (Qiao et al. 2019).

    For each output channel :math:`w' = k (w - \bar w)` with
    :math:`k = \text{gain} / \lVert w - \bar w\rVert`. The gradient of :math:`w` is then
    :math:`k (g - \bar g - \hat w \langle g, \hat w\rangle)` and that of the gain
    :math:`\langle g, \hat w\rangle`, with the gradient :math:`g` of :math:`w'` and :math:`\hat w`
    the unit vector of :math:`w - \bar w`. Where the norm is below a hundredth :math:`k` is 100 gain
    and does not depend on :math:`w`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def effective_weight(self, weight, gain):
        """The standardised weight."""
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        scale = gain * torch.rsqrt((variance * weight[0].numel()).clamp(min=1e-4))
        return (weight - mean) * scale

    def stretch(self, weight, gain):
        """As of any `Reparametrized` layer, from the closed form."""
        centred = weight - weight.mean((1, 2, 3), keepdim=True)
        size = torch.linalg.vector_norm(centred, dim=(1, 2, 3), keepdim=True)
        scale = 1 / size.clamp(min=1e-2)
        return ((gain * scale).square() + (size * scale).square()).max().sqrt()

    @staticmethod
    def _directions(weight, gain):
        """Unit vectors, what of them depends on the weight, and by what the rest is multiplied:
        (out, height, width, in) and (out, 1, 1, 1), as the gradients of a convolution are held.
        """
        centred = (weight - weight.mean((1, 2, 3), keepdim=True)).permute(0, 2, 3, 1).contiguous()
        size = torch.linalg.vector_norm(centred, dim=(1, 2, 3), keepdim=True)
        scale = 1 / size.clamp(min=1e-2)
        unit, gain = centred * scale, gain.permute(0, 2, 3, 1)
        return unit, unit * (size >= 1e-2), gain * scale

    def pull_back(self, weight, gain):
        """As of any `Reparametrized` layer, in closed form."""
        unit, depends, of_gain = self._directions(weight, gain)

        def pulled(gradients):
            g = gradients.permute(0, 1, 3, 4, 2)
            mean, along = g.mean((2, 3, 4), keepdim=True), (g * unit).sum((2, 3, 4), keepdim=True)
            g = g.addcmul_(along, depends, value=-1).sub_(mean).mul_(of_gain)
            return {"weight": g.permute(0, 1, 4, 2, 3), "gain": along.permute(0, 1, 4, 2, 3)}

        return pulled

    def pulled_squares(self, weight, gain):
        r"""As of any `Reparametrized` layer, by Pythagoras: of :math:`\lVert g\rVert^2` the squares
        of what is taken away, in the directions of ones and of :math:`\hat w`. What rounding may
        hide in these sums is added.
        """
        unit, depends, of_gain = self._directions(weight, gain)
        places = unit[0].numel()
        directions = torch.stack([torch.ones_like(unit) / math.sqrt(places), unit], -1).flatten(
            1, 3
        )
        squares = (
            depends.double().square().sum((1, 2, 3)).round(),
            of_gain.double().square().flatten(),
        )
        # Twice: two sums of so many products, each rounded in every step, are squared.
        slack = 8 * (places + 2) * torch.finfo(weight.dtype).eps / 2

        def pulled(gradients):
            g = gradients.permute(0, 1, 3, 4, 2).flatten(2)  # (n, out, places)
            parts = torch.matmul(g.transpose(0, 1), directions).double().square().transpose(0, 1)
            whole = squared_norms(g.flatten(0, 1)).view(g.shape[:2])
            rest = whole - parts[..., 0] - squares[0] * parts[..., 1]
            lengths = {
                "weight": squares[1] * (rest.clamp(min=0) + slack * whole),
                "gain": parts[..., 1] + slack * whole,
            }
            return {name: length.sum(1) for name, length in lengths.items()}

        return pulled


class _WideBlock(nn.Module):
    def __init__(self, before, after, stride, groups):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, before)
        self.conv1 = StandardizedConv2d(before, after, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(groups, after)
        self.conv2 = StandardizedConv2d(after, after, 3, padding=1)
        self.shortcut = (
            StandardizedConv2d(before, after, 1, stride=stride) if before != after else None
        )

    def forward(self, x):
        active = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(active))))


@seeded
def wrn16_4(classes=10, *, groups=16, channels=3):
    """Wide ResNet-16-4 with group norm and weight standardisation, as in De et al."""
    layers: list[nn.Module] = [StandardizedConv2d(channels, 16, 3, padding=1)]
    before = 16
    for width in (64, 128, 256):
        for block in range(2):
            layers.append(_WideBlock(before, width, 2 if block == 0 and width > 64 else 1, groups))
            before = width
    return nn.Sequential(
        *layers,
        nn.GroupNorm(groups, before),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, classes),
    )


class LSTM(nn.Module):
    """`torch.nn.LSTM`, batch first and one way, from linear layers, to clip layer by layer."""

    def __init__(self, inputs, hidden, layers):
        super().__init__()
        self.hidden = hidden
        self.of_input = nn.ModuleList(
            nn.Linear(inputs if k == 0 else hidden, 4 * hidden) for k in range(layers)
        )
        self.of_state = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(layers))
        for p in self.parameters():
            nn.init.uniform_(p, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x):
        """(n, positions, inputs) -> the last layer's outputs, (n, positions, hidden)."""
        for of_input, of_state in zip(self.of_input, self.of_state):
            h = c = x.new_zeros(len(x), self.hidden)
            outputs = []
            for gates in of_input(x).unbind(1):
                i, f, g, o = (gates + of_state(h)).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outputs.append(h)
            x = torch.stack(outputs, 1)
        return x


class _CharRNN(nn.Module):
    def __init__(self, classes, tokens, embedding, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding, padding_idx=0)
        self.lstm = LSTM(embedding, hidden, layers)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[:, -1])


@seeded
def char_rnn(classes=18, *, tokens=259, embedding=64, hidden=128, layers=3):
    """Character-level LSTM, read off at the end: Opacus' name classifier, here of three layers."""
    return _CharRNN(classes, tokens, embedding, hidden, layers)


class _WordMean(nn.Module):
    def __init__(self, classes, tokens, embedding, hidden):
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding, padding_idx=0)
        self.hidden, self.head = nn.Linear(embedding, hidden), nn.Linear(hidden, classes)

    def forward(self, tokens):
        words = (tokens != 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(F.relu(self.hidden(self.embedding(tokens).sum(1) / words)))


@seeded
def word_mean(classes=2, *, tokens=30_000, embedding=16, hidden=16):
    """The mean of the words' embeddings, through two linear layers."""
    return _WordMean(classes, tokens, embedding, hidden)
