"""bf16: a network that goes forward and back in bfloat16, and shares that keep to the clip norm all
the same.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpcompanion.gradients import clipping, layers
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    Performance,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    models,
    train,
    train_ensemble,
)
from dpcompanion.training.models import StandardizedConv2d

from ..refusals import refused

able = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with bfloat16"
)


class Scale(nn.Module):
    """A layer that no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        return x * torch.sin(self.scale)


class Block(nn.Module):
    """A small transformer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.scale = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            Scale(),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        x = x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(self.scale(x).mean(1))


MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        lambda n: torch.randn(n, 3, 9, 9),
    ),
    "standardised": (
        lambda: nn.Sequential(
            StandardizedConv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            StandardizedConv2d(8, 8, 3),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        lambda n: torch.randn(n, 3, 9, 9),
    ),
    "transformer": (Block, lambda n: torch.randint(11, (n, 6))),
    "linear": (
        lambda: nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)),
        lambda n: torch.randn(n, 40),
    ),
}


def build(name, n=16):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make(), inputs(n)
    model(x)
    return model, x, torch.randint(3, (n,))


@able
@pytest.mark.parametrize("method", ["mixed", "ghost"])
@pytest.mark.parametrize("name", MODELS)
def test_no_share_is_longer_than_the_clip_norm(name, method):
    """The share of an example as it is added up is the sum of a batch of one."""
    model, x, y = build(name)
    for scale in (1.0, 30.0):
        given = x * scale if x.is_floating_point() else x
        for i in range(len(x)):
            found = clipped_sum(
                model,
                cross_entropy,
                given[i : i + 1],
                y[i : i + 1],
                0.01,
                method=method,
                precision="bf16",
            )
            length = math.sqrt(
                sum(g.double().square().sum().item() for g in found.gradients.values())
            )
            assert length <= 0.01
            # A gradient that is made for its norm alone is rounded, and counted as it may have been
            # before.
            shorter = 2**-8 if method == "ghost" or name == "standardised" else 0
            assert found.norms.item() < 0.01 or length > 0.01 * (1 - 1e-3 - shorter)


@able
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_made_of_the_shares_and_is_that_of_float32_but_for_a_few_hundredths(name):
    model, x, y = build(name)
    whole = clipped_sum(model, cross_entropy, x, y, 0.1, precision="bf16")
    full = clipped_sum(model, cross_entropy, x, y, 0.1)
    assert (
        all(g.dtype == torch.float32 for g in whole.gradients.values())
        and whole.norms.dtype == torch.float32
    )
    shares = [
        clipped_sum(model, cross_entropy, x[i : i + 1], y[i : i + 1], 0.1, precision="bf16")
        for i in range(len(x))
    ]

    def joined(total):
        return torch.cat([g.flatten() for g in total.gradients.values()])

    added = sum(joined(share) for share in shares)
    assert (joined(whole) - added).norm() < 5e-3 * 0.1 * len(x)
    assert (joined(whole) - joined(full)).norm() < 0.03 * joined(full).norm()
    torch.testing.assert_close(whole.norms, full.norms, rtol=0.05, atol=0)
    torch.testing.assert_close(
        gradient_norms(model, cross_entropy, x, y, precision="bf16"), whole.norms
    )
    assert not torch.equal(whole.norms, full.norms)


@able
def test_norms_are_proved_in_the_lower_precision_too(monkeypatch):
    model, x, y = build("convolutions")
    assert clipping.resolve_method(model, cross_entropy, x, y, precision="bf16") == "mixed"

    def wrong(module, uses):
        return [(a.to(g.dtype), 0.2 * g if g.dtype == torch.bfloat16 else g) for a, g in uses]

    monkeypatch.setattr("dpcompanion.gradients.layers.in_one_precision", wrong)
    assert clipping.resolve_method(model, cross_entropy, x, y) == "mixed"
    refused("wrong", clipping.resolve_method, model, cross_entropy, x, y, precision="bf16")


@able
@pytest.mark.parametrize("groups, together", [(1, 1), (2, 1), (1, 2)])
def test_gradients_that_are_held_are_rounded_as_plain_autograd_rounds_them(
    groups, together, monkeypatch
):
    """Those of a layer that is used once, also a few examples at a time; of one used twice, and
    sums, in float32.
    """
    monkeypatch.setattr("dpcompanion.gradients.matrices.CACHED", 1000)
    monkeypatch.setattr("dpcompanion.gradients.layers.CACHED", 1000)
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
    a, g = torch.randn(5, 4, 8, 8), torch.randn(5, 6, 8, 8).bfloat16()
    layer = layers.layer_gradient(conv, [(a, g)] * together, "mixed", 10**9)
    assert all(
        held.dtype == (torch.bfloat16 if together == 1 else torch.float32)
        for held in layer.gradients.values()
    )
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [conv(a[i : i + 1]) for i in range(5)]
    theirs = [
        torch.autograd.grad(out, list(conv.parameters()), g[i : i + 1])
        for i, out in enumerate(outputs)
    ]
    weight = torch.stack([together * weight for weight, _ in theirs])
    axes = layer.axes
    held = layer.gradients["weight"].float().permute(axes)
    torch.testing.assert_close(held, weight, rtol=2**-7, atol=2**-7 * float(weight.abs().max()))
    # Norms and sums are those of what is held, to float32's last bits.
    exact = [held.double().flatten(1) for held in layer.gradients.values()]
    squares = sum(each.square().sum(1) for each in exact)
    torch.testing.assert_close(layer.squared_norms(), squares, rtol=1e-6, atol=0)
    factors = torch.rand(1, 5)
    total = layer.weighted_sum(factors)["weight"][0].double()
    theirs = (factors[0].double() @ held.double().flatten(1)).view(total.shape)
    torch.testing.assert_close(total, theirs, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_had_is_refused(monkeypatch):
    model, x, y = build("linear")
    refused("precision", clipped_sum, model, cross_entropy, x, y, 1.0, precision="half")
    refused(
        "float64", clipped_sum, model.double(), cross_entropy, x.double(), y, 1.0, precision="bf16"
    )
    refused(
        "func",
        clipped_sum,
        model.float(),
        cross_entropy,
        x,
        y,
        1.0,
        method="func",
        precision="bf16",
    )
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    refused("cpu", gradient_norms, model, cross_entropy, x, y, precision="bf16")


@able
def test_a_model_that_only_torch_func_understands_has_no_lower_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].weight = nn.Parameter(torch.randn(8, 8))
    model.append(nn.Linear(3, 3)).append(model[3])
    model[4].weight = model[3].weight
    model.append(nn.Linear(3, 3))
    model[5].weight = model[3].weight
    with pytest.raises(ValueError, match="parameter"):
        clipped_sum(
            model, cross_entropy, torch.randn(4, 40), torch.arange(4) % 3, 1.0, precision="bf16"
        )


@able
def test_a_run_says_what_it_was_computed_in_and_goes_on_in_that(tmp_path):
    plan = DPSGDPlan(
        n=16, sample_rate=0.5, steps=4, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )

    def run(steps, precision, checkpoint=None, stop=None):
        model, x, y = build("convolutions")

        def on_step(state):
            if state.step == stop:
                raise InterruptedError

        return model, train(
            model,
            cross_entropy,
            (x, y),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            seed=0,
            precision=precision,
            callbacks=Callbacks(on_step=on_step),
            checkpoint=checkpoint and Checkpoint(checkpoint, every=1),
        )

    model, history = run(4, "bf16")
    assert history.precision == "bf16" and run(4, None)[1].precision == "float32"
    assert not torch.equal(history.losses, run(4, None)[1].losses)
    with pytest.raises(InterruptedError):
        run(4, "bf16", tmp_path / "run", stop=3)
    refused("precision", run, 4, None, tmp_path / "run")
    again, resumed = run(4, "bf16", tmp_path / "run")
    assert resumed.precision == "bf16" and torch.equal(resumed.losses, history.losses)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@pytest.mark.slow
@able
def test_networks_of_the_papers_train_in_it():
    model = models.cifar_cnn(seed=0)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % 10
    full = gradient_norms(model, cross_entropy, x, y)
    torch.testing.assert_close(
        gradient_norms(model, cross_entropy, x, y, precision="bf16"), full, rtol=0.05, atol=0
    )


@able
def test_a_tracker_measures_in_bf16_what_it_would_in_float32():
    x, y = (
        torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(40) % 4,
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4))
    plan = DPSGDPlan(
        n=40, sample_rate=0.25, steps=4, max_grad_norm=100.0, noise_multiplier=1.0, delta=1e-3
    )
    norms = []
    for precision in (None, "bf16"):
        tracker = NormTracker.for_plan(
            plan, model, cross_entropy, (x, y), performance=Performance(precision=precision)
        )
        tracker.before_step()
        norms.append(tracker.norms)
    assert not torch.equal(*norms)
    torch.testing.assert_close(*norms, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    "name, value", [("precision", "fp8"), ("method", "magic"), ("microbatch_size", 0)]
)
def test_an_unknown_way_to_compute_is_refused(name, value):
    refused(name, Performance, **{name: value})


@able
@pytest.mark.parametrize("name", ["convolutions", "standardised"])
def test_runs_side_by_side_are_those_of_train_in_it_and_shares_keep_to_the_clip_norm(name):
    model, x, y = build(name)
    plan = DPSGDPlan(
        n=len(x), sample_rate=0.5, steps=3, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )

    def side_by_side(precision):
        return train_ensemble(
            model,
            cross_entropy,
            (x, y),
            plan,
            seeds=[0, 1],
            learning_rate=0.1,
            precision=precision,
            workers=1,
            progress=False,
        )

    found = side_by_side("bf16")
    assert found._identity()["precision"] == "bf16" and not torch.equal(
        found.vectors, side_by_side(None).vectors
    )
    for run in range(2):
        alone = copy.deepcopy(model)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        train(
            alone,
            cross_entropy,
            (x, y),
            plan,
            optimizer=optimizer,
            seed=run,
            precision="bf16",
            progress=False,
        )
        vector = torch.cat([p.detach().flatten() for p in alone.parameters() if p.requires_grad])
        torch.testing.assert_close(found.vectors[run], vector, rtol=0, atol=1e-3)
    limit = torch.tensor([[0.01], [0.02]], dtype=torch.float64)
    for one in range(len(x)):
        pair = [part[[one, one]].unsqueeze(1) for part in (x, y)]
        total = found._pass(found._network, slice(0, 2), *pair, limit)
        shares = sum(g.double().flatten(1).square().sum(1) for g in total.gradients.values()).sqrt()
        assert bool((shares <= limit[:, 0]).all()) and bool((shares > 0.99 * limit[:, 0]).all())


@able
def test_runs_side_by_side_that_cannot_be_stacked_refuse_it():
    plan = DPSGDPlan(
        n=4, sample_rate=0.5, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    data, options = (torch.randn(4, 3), torch.zeros(4).long()), {"seeds": [0], "learning_rate": 0.1}
    with pytest.raises(ValueError, match="precision"):
        train_ensemble(
            nn.Linear(3, 2), cross_entropy, data, plan, method="func", precision="bf16", **options
        )
    with pytest.raises(ValueError, match="precision"):
        wide = data[0].double(), data[1]
        train_ensemble(
            nn.Linear(3, 2).double(), cross_entropy, wide, plan, precision="bf16", **options
        )


@able
@pytest.mark.parametrize("kind", [nn.Conv2d, StandardizedConv2d])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_norms_from_products_in_bfloat16_are_never_too_small_and_hardly_too_large(
    kind, hold, offset
):
    """Beside float64, of the very inputs and output gradients that were given; of terms that
    cancel, too.
    """
    torch.manual_seed(0)
    conv = kind(4, 6, 3, padding=1)
    a, g = torch.randn(9, 4, 12, 12).add(offset).bfloat16(), torch.randn(9, 6, 12, 12).bfloat16()
    exact = copy.deepcopy(conv).double()
    outputs = [exact(a[i : i + 1].double()) for i in range(len(a))]
    theirs = [
        torch.autograd.grad(out, list(exact.parameters()), g[i : i + 1].double())
        for i, out in enumerate(outputs)
    ]
    norms = torch.stack([torch.cat([part.flatten() for part in each]).norm() for each in theirs])
    with torch.no_grad():
        layer = layers.layer_gradient(conv, [(a, g)], "mixed" if hold else "ghost", 10**9)
        found = layer.squared_norms().sqrt()
        sums = [layer.weighted_sum(one[None]) for one in torch.eye(9)]
    shares = [
        torch.cat([each[name].flatten().double() for name, _ in conv.named_parameters()])
        for each in sums
    ]
    # What is held is added up as it is measured, rounded; what is made for its norm alone is added
    # up in float32.
    assert hold or bool((found >= norms).all())
    assert bool((found <= (1.05 if offset else 1.02) * norms).all())
    assert all(share.norm() <= norm for share, norm in zip(shares, found * (1 + 1e-6)))
    lengths = [torch.cat([part.flatten() for part in each]) for each in theirs]
    assert all(
        (share - exact).norm() <= 0.01 * exact.norm() for share, exact in zip(shares, lengths)
    )


def test_squares_that_are_pulled_back_are_no_smaller_than_those_of_what_is_pulled_back():
    torch.manual_seed(0)
    layer = StandardizedConv2d(3, 5, 3)
    with torch.no_grad():
        layer.weight[1] = 0.5  # a channel that does not vary: its gain does not depend on it
    weight, gain = layer.weight.detach(), torch.randn_like(layer.gain)
    unit = layer.effective_weight(weight, torch.ones_like(gain)).detach()
    g = torch.stack(
        [
            torch.randn_like(weight),
            unit,
            1e3 * unit + 1e-3 * torch.randn_like(weight),
            7 + 0 * weight,
        ]
    )
    pulled = layer.pull_back(weight.double(), gain.double())(g.double())
    found = layer.pulled_squares(weight, gain)(g.clone())
    for name, exact in pulled.items():
        squares = exact.flatten(1).square().sum(1)
        assert bool((found[name] >= squares).all()), name
        torch.testing.assert_close(found[name][0], squares[0], rtol=1e-3, atol=0)
