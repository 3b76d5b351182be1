"""How many examples go through a network at once."""

import pytest
import torch
from torch import nn

from dpcompanion.gradients import microbatches
from dpcompanion.gradients.sums import bytes_left
from dpcompanion.training import clipped_sum, cross_entropy, gradient_norms, models


def data(n, *shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)


def test_what_an_example_leaves_is_counted():
    """Of a convolution of 3 x 3 from 2 to 4 channels on 6 x 6 pixels: its inputs, its output
    gradients and one gradient of weight and bias; of the linear layer after it, with one position,
    no gradient that is held.
    """
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, 10))
    x, y = data(3, 2, 6, 6)
    alone = 2 * 36 + 4 * 36 + (4 * 2 * 9 + 4) + 4 * 36 + 10
    assert bytes_left(model, cross_entropy, x, y, "mixed") == 3 * 4 * alone
    assert bytes_left(model.double(), cross_entropy, x.double(), y, "mixed") == 3 * 8 * alone


@pytest.mark.parametrize(
    "task", [lambda *a, **o: gradient_norms(*a, **o), lambda *a, **o: clipped_sum(*a, 0.5, **o)]
)
@pytest.mark.slow
def test_large_networks_are_taken_in_small_portions(monkeypatch, task):
    model, sizes = models.resnet20(seed=0), []
    x, y = data(130, 3, 32, 32)
    whole = task(model, cross_entropy, x, y, method="mixed", microbatch_size=130)
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    ours = task(model, cross_entropy, x, y, method="mixed")
    assert sizes == [2, 32, 32, 32, 32, 2]  # two to count, once for each network
    task(model, cross_entropy, x, y, method="mixed")
    assert sizes[6:] == [32, 32, 32, 32, 2]
    of = getattr(ours, "norms", ours), getattr(whole, "norms", whole)
    torch.testing.assert_close(*of, rtol=1e-5, atol=0)


def test_small_batches_and_small_networks_are_taken_as_they_come():
    sizes, model = [], models.linear(20, 10, seed=0)
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    for n in (microbatches.FEWEST, 500):
        gradient_norms(model, cross_entropy, *data(n, 20), method="mixed")
    assert sizes == [microbatches.FEWEST, 2, 500]


def test_counting_draws_nothing_and_changes_nothing():
    model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.5), nn.Linear(30, 10))
    x, y = data(40, 20)
    torch.manual_seed(0)
    microbatches.default_microbatch_size(model, cross_entropy, x, y, "mixed")
    ours = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(ours, torch.rand(3))
    assert all(p.grad is None for p in model.parameters())


def test_another_precision_is_noticed():
    model = models.mnist_cnn(seed=0)
    x, y = data(40, 1, 28, 28)
    single = microbatches.default_microbatch_size(model, cross_entropy, x, y, "mixed")
    double = microbatches.default_microbatch_size(
        model.double(), cross_entropy, x.double(), y, "mixed"
    )
    assert microbatches.FEWEST < double < single < microbatches.MOST


def test_freezing_a_layer_is_noticed():
    model = models.cifar_cnn(seed=0)
    x, y = data(40, 3, 32, 32)
    all_of_it = microbatches.default_microbatch_size(model, cross_entropy, x, y, "mixed")
    for p in list(model.parameters())[:-2]:
        p.requires_grad_(False)
    assert (
        all_of_it
        < microbatches.default_microbatch_size(model, cross_entropy, x, y, "mixed")
        == microbatches.MOST
    )
