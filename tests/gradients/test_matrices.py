"""Gradients of weights as products of matrices, by patches and by strips, against automatic
differentiation.
"""

import pytest
import torch
from torch import nn

from dpcompanion.gradients import matrices


def one_by_one(layer, a, g):
    """The gradient of the weight for each example alone."""
    return torch.stack(
        [
            torch.autograd.grad(layer(a[i : i + 1]), layer.weight, g[i : i + 1])[0].movedim(1, -1)
            for i in range(len(a))
        ]
    )


CONVOLUTIONS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=3, padding=1, groups=2),
    dict(kernel_size=(5, 2), stride=(1, 2), padding=(2, 0)),
    dict(kernel_size=(3, 5), dilation=(2, 3), padding="same"),
    dict(kernel_size=3, padding=2, padding_mode="circular", groups=4),
    dict(kernel_size=3, padding=(0, 1), dilation=(1, 2), padding_mode="reflect"),
    dict(kernel_size=(2, 1)),
]


def in_all_ways(test):
    """By patches and by strips, in either layout of memory, for every kind of convolution."""
    for name, values in (
        ("strips", [False, True]),
        ("channels_last", [False, True]),
        ("options", CONVOLUTIONS),
    ):
        test = pytest.mark.parametrize(name, values, ids=str)(test)
    return test


@in_all_ways
def test_gradients_of_convolutions(monkeypatch, options, channels_last, strips):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, **options).double()
    a = torch.randn(5, 4, 11, 9, dtype=torch.float64)
    g = torch.randn_like(layer(a))
    if channels_last:
        a, g = (t.contiguous(memory_format=torch.channels_last) for t in (a, g))
    monkeypatch.setattr(matrices, "_by_strips", lambda *_: strips)
    monkeypatch.setattr(matrices, "CACHED", 2500)  # a few examples at a time
    found = matrices.weight_gradients(layer, [(a, g), (a.flip(0), g.flip(0))])
    alone = one_by_one(layer, a, g)
    torch.testing.assert_close(found, alone + alone.flip(0))


@in_all_ways
def test_gradients_of_convolutions_in_bfloat16(monkeypatch, options, channels_last, strips):
    """Sums of ones and minus ones, as many as bfloat16 has whole numbers for, come out as they
    are.
    """
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, **options).double()
    a = torch.randint(-1, 2, (5, 4, 11, 9)).double()
    g = torch.randint(-1, 2, layer(a).shape).double()
    monkeypatch.setattr(matrices, "_by_strips", lambda *_: strips)
    monkeypatch.setattr(matrices, "CACHED", 2500)
    low = [t.bfloat16() for t in (a, g)]
    if channels_last:
        low = [t.contiguous(memory_format=torch.channels_last) for t in low]
    found = matrices.weight_gradients(layer, [tuple(low)])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.double(), one_by_one(layer, a, g))


def test_strips_are_chosen_where_they_are_faster():
    def chosen(positions, *sizes, **options):
        return matrices._by_strips(nn.Conv2d(*sizes, **options), positions, torch.float32)

    assert chosen(1024, 16, 16, 3)
    assert not matrices._by_strips(nn.Conv2d(16, 16, 3), 1024, torch.bfloat16)
    assert not chosen(64, 64, 64, 3)  # a gradient has more numbers than its patches
    assert not chosen(1024, 3, 16, 3)  # three colours
    assert not chosen(1024, 16, 16, 3, stride=2)
    assert not chosen(1024, 16, 16, 1)
