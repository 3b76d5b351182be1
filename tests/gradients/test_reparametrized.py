"""Layers whose weight is computed from parameters, against torch.func on each example."""

import pytest
import torch
from torch import nn

from dpcompanion.gradients import clipping, sums
from dpcompanion.gradients.reparametrized import Reparametrized
from dpcompanion.gradients.stacking import StackedNetwork
from dpcompanion.training import clipped_sum, cross_entropy, gradient_norms, models
from dpcompanion.training.models import StandardizedConv2d


class WeightNorm(Reparametrized, nn.Linear):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.rand(self.out_features, 1) + 0.5)

    def effective_weight(self, weight, gain):
        return gain * weight / weight.norm(dim=1, keepdim=True)


class LowRank(Reparametrized, nn.Conv2d):
    """A convolution that has no parameter of the weight's shape."""

    def __init__(self, before, after, size, **options):
        super().__init__(before, after, size, **options)
        shape = self.weight.shape
        del self.weight
        self.left = nn.Parameter(torch.randn(shape[0], 2))
        self.right = nn.Parameter(torch.randn(2, shape[1:].numel()))
        self.shape = shape

    def effective_weight(self, left, right):
        return (left @ right).reshape(self.shape)


CONVOLUTIONS = {
    "3 x 3": lambda: StandardizedConv2d(4, 6, 3, padding=1),
    "no bias": lambda: StandardizedConv2d(4, 6, 3, bias=False),
    "stride 2": lambda: StandardizedConv2d(4, 6, 3, stride=2, padding=1),
    "1 x 1, stride 2": lambda: StandardizedConv2d(4, 6, 1, stride=2),
    "oblong, dilated, reflected": lambda: StandardizedConv2d(
        4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(1, 2), padding_mode="reflect"
    ),
    "same": lambda: StandardizedConv2d(4, 6, 3, padding="same"),
    "groups": lambda: StandardizedConv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: StandardizedConv2d(4, 4, 3, padding=1, groups=4),
    "the whole image": lambda: StandardizedConv2d(4, 6, 8),
    "low rank": lambda: LowRank(4, 6, 3, padding=1, stride=2),
}


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()


def examples(n=5):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 4, 8, 8, dtype=torch.float64, generator=generator),
        torch.randint(3, (n,), generator=generator),
    )


def agree(model, x, y, method):
    theirs = clipped_sum(model, cross_entropy, x, y, 0.1, method="func")
    ours = clipped_sum(model, cross_entropy, x, y, 0.1, method=method)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(
        gradient_norms(model, cross_entropy, x, y, method=method), ours.norms
    )
    assert list(ours.gradients) == list(theirs.gradients)
    for name, g in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[name], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["mixed", "ghost"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_are_those_of_torch_func(name, method):
    model, (x, y) = network(CONVOLUTIONS[name]), examples()
    model(x)
    assert clipping.resolve_method(model, cross_entropy, x, y) == "mixed"
    agree(model, x, y, method)


@pytest.mark.parametrize("method", ["mixed", "ghost"])
@pytest.mark.parametrize("frozen", ["weight", "gain", "bias"])
def test_what_is_frozen_takes_no_part(frozen, method):
    model, (x, y) = network(CONVOLUTIONS["3 x 3"]), examples()
    model(x)
    getattr(model[0], frozen).requires_grad_(False)
    agree(model, x, y, method)


def test_a_channel_whose_weight_hardly_varies_has_a_gain_that_does_not_depend_on_it():
    model, (x, y) = network(CONVOLUTIONS["3 x 3"]), examples()
    model(x)
    with torch.no_grad():
        model[0].weight[0] = 0.5
        model[0].weight[1] = 0.5 + 1e-4 * torch.randn(4, 3, 3)
        model[0].gain.copy_(torch.randn(6, 1, 1, 1))
    for method in ("mixed", "ghost"):
        agree(model, x, y, method)


def test_other_layers_work_too_and_layers_may_be_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = StandardizedConv2d(4, 4, 3, padding=1), WeightNorm(16, 3)

        def forward(self, x):
            x = torch.tanh(self.conv(nn.functional.avg_pool2d(torch.tanh(self.conv(x)), 4)))
            return self.linear(x.flatten(1))

    torch.manual_seed(0)
    model, (x, y) = Twice().double(), examples()
    for method in ("mixed", "ghost"):
        agree(model, x, y, method)


def test_blocks_do_not_change_the_norms(monkeypatch):
    model, (x, y) = network(CONVOLUTIONS["groups"]), examples(7)
    model(x)
    whole = gradient_norms(model, cross_entropy, x, y, method="mixed")
    monkeypatch.setattr("dpcompanion.gradients.layers.CACHED", 1)
    torch.testing.assert_close(gradient_norms(model, cross_entropy, x, y, method="mixed"), whole)


def test_norms_are_not_too_small_where_the_standardisation_takes_away_almost_all_of_the_gradient():
    """In float32 the difference of two squares would lose all of it, and a norm must not come out
    too small.
    """
    torch.manual_seed(0)
    layer = StandardizedConv2d(3, 2, 3)
    weight, gain = layer.weight.detach(), layer.gain.detach()
    unit = layer.effective_weight(weight, gain).detach()
    g = 1e3 * unit + 5e2 + 1e-2 * torch.randn(1, *weight.shape)
    exact = Reparametrized.pull_back(layer, weight=weight.double(), gain=gain.double())
    norm = exact(g.double())["weight"].norm()
    found = layer.pull_back(weight, gain)(g.clone())["weight"].norm()
    assert abs(found / norm - 1) < 1e-2


@pytest.mark.slow
def test_wrn16_4_is_taken_apart_into_layers():
    model = models.wrn16_4(seed=0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)
    assert clipping.resolve_method(model, cross_entropy, x, y) == "mixed"
    ours = clipped_sum(model, cross_entropy, x, y, 0.5, method="mixed")
    theirs = clipped_sum(model, cross_entropy, x, y, 0.5, method="func")
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-4, atol=0)
    for name, g in theirs.gradients.items():
        assert (ours.gradients[name] - g).norm() <= 1e-3 * sum(
            g.norm() for g in theirs.gradients.values()
        ), name


def test_a_wrong_pull_back_is_found_by_the_proof():
    class Wrong(StandardizedConv2d):
        def pull_back(self, **parameters):
            right = super().pull_back(**parameters)
            return lambda g: {"weight": 0.9 * right(g)["weight"], "gain": right(g)["gain"]}

    model, (x, y) = network(lambda: Wrong(4, 6, 3)), examples()
    model(x)
    assert clipping.resolve_method(model, cross_entropy, x, y) == "func"
    with pytest.raises(ValueError, match="norms"):
        clipping.resolve_method(model, cross_entropy, x, y, "mixed")


@pytest.mark.parametrize("name", ["groups", "low rank"])
def test_runs_side_by_side_each_use_their_own_weights(name):
    torch.manual_seed(2)
    runs = [network(CONVOLUTIONS[name]) for _ in range(3)]
    x, y = examples(6)
    for run, model in enumerate(runs):
        model(x)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * run * torch.randn_like(p)
    together = StackedNetwork(runs[0])
    together.load(
        {
            n: torch.stack([dict(m.named_parameters())[n].detach() for m in runs])
            for n, _ in runs[0].named_parameters()
        }
    )
    found = sums.layerwise(together.module, cross_entropy, x, y, 0.1, "mixed", runs=3)
    for run, model in enumerate(runs):
        mine = slice(2 * run, 2 * run + 2)
        alone = clipped_sum(model, cross_entropy, x[mine], y[mine], 0.1, method="func")
        torch.testing.assert_close(found.norms[mine], alone.norms)
        for parameter, g in alone.gradients.items():
            torch.testing.assert_close(found.gradients[parameter][run], g)


@pytest.mark.parametrize(
    "make",
    [lambda: WeightNorm(7, 5), lambda: LowRank(2, 4, 3), lambda: StandardizedConv2d(3, 4, 3)],
)
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_no_gradient_of_a_weight_is_longer_for_its_parameters_than_stretched(make, size):
    torch.manual_seed(0)
    layer = make().double()
    with torch.no_grad():
        layer.gain.copy_(torch.rand_like(layer.gain) * 3) if hasattr(layer, "gain") else None
        [p.mul_(size) for p in layer.parameters()]
    parameters = {name: p.detach() for name, p in layer.weight_parameters().items()}
    parts = torch.func.jacrev(lambda parameters: layer.effective_weight(**parameters).flatten())(
        parameters
    )
    longest = torch.linalg.matrix_norm(
        torch.cat([part.flatten(1) for part in parts.values()], 1), 2
    )
    assert longest * (1 - 1e-12) <= layer.stretch(**parameters) <= 2.1 * longest
