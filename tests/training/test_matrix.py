"""Layers that people use, in all ways of training: what autograd says of one example at a time, or
a ValueError.

The table of `layers.CASES` is crossed with methods, modes, frozen parameters, types, empty draws
and the order of calls. The short run takes a fixed design in which every layer meets every method,
and every two of the other settings meet; three more settings of the product, for every layer and
method, are marked slow.
"""

import importlib.util
import itertools
import pathlib

import pytest
import torch

from dpcompanion.gradients.tensors import UnsupportedModel
from dpcompanion.training import DPSGDPlan, clipped_sum, cross_entropy, gradient_norms, train

_spec = importlib.util.spec_from_file_location(
    "layers", pathlib.Path(__file__).parent.parent / "layers.py"
)
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)

N = 6
METHODS = ("auto", "mixed", "ghost", "func")
SETTINGS = {
    "mode": ("train", "eval"),
    "frozen": ("nothing", "head", "layer"),
    "dtype": (torch.float32, torch.float64, torch.bfloat16),
    "draw": ("everybody", "nobody"),
    "order": ("once", "norms first"),
}
PRODUCT = list(itertools.product(*SETTINGS.values()))


def name_of(value):
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def alone(model, x, y, limits):
    """The sum of clipped gradients and the norms, by plain autograd, one example at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(x)):
        value = cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        found = [g.to_dense() for g in found]
        norms.append(torch.stack([g.norm() for g in found]).norm())
        total = [a + b * min(1.0, float(limits[i] / norms[-1])) for a, b in zip(total, found)]
    return total, torch.stack(norms) if norms else torch.zeros(0)


def check(name, method, settings):
    mode, frozen, dtype, draw, order = settings
    case = layers.CASES[name]
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.build().to(dtype)
    x, y = case.inputs(N, generator), torch.arange(N) % layers.CLASSES
    x = x.to(dtype) if x.is_floating_point() else x
    for part in {"nothing": [], "head": ["head", "out"], "layer": ["layer"]}[frozen]:
        if hasattr(model, part):
            getattr(model, part).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        return "nothing to train"
    model.train(mode == "train")
    limits = torch.linspace(0.05, 0.5, N, dtype=torch.float64)
    plan = DPSGDPlan(
        n=N,
        sample_rate=1.0 if draw == "everybody" else 1e-9,
        steps=1,
        max_grad_norm=limits,
        noise_multiplier=0.0,
        delta=1e-3,
    )
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    rows, seen = slice(None) if draw == "everybody" else slice(0), []
    try:
        if order == "norms first":
            seen.append(gradient_norms(model, cross_entropy, x, y))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        train(
            model,
            cross_entropy,
            (x, y),
            plan,
            optimizer=optimizer,
            seed=0,
            method=method,
            progress=False,
        )
    except ValueError as error:
        assert dtype == torch.bfloat16 or str(error).partition(" ")[0] in (
            "model",
            "method",
            "no",
            "layer",
        ), error
        return error
    # A layer that keeps something of its examples keeps nothing of an empty draw.
    assert not (case.refused and mode == "train" and draw == "everybody" or dtype == torch.bfloat16)
    moved = [
        plan.expected_batch_size * (b - p.detach())
        for b, p in zip(before, (p for p in model.parameters() if p.requires_grad))
    ]
    close = 1e-9 if dtype == torch.float64 else 1e-4
    if case.random and mode == "train":
        assert torch.stack([m.norm() for m in moved]).norm() <= limits.sum()
        return "within its bounds"
    total, norms = alone(model_before(model, before), x[rows], y[rows], limits)
    for got, expected in zip(moved, total):
        assert (got - expected).norm() <= close * limits.sum()
    if seen and draw == "everybody":
        assert torch.allclose(
            seen[0].to(norms), norms, rtol=1e-3 if dtype == torch.float32 else 1e-6
        )
    return "as autograd"


def model_before(model, before):
    """The model with the weights that it had."""
    with torch.no_grad():
        for p, value in zip((p for p in model.parameters() if p.requires_grad), before):
            p.copy_(value)
    return model


@pytest.mark.parametrize("name, method, settings", layers.design(SETTINGS, METHODS), ids=name_of)
def test_a_layer_is_trained_as_autograd_says_or_refused(name, method, settings):
    check(name, method, settings)


@pytest.mark.slow
# of the whole product, which takes 40 minutes
@pytest.mark.parametrize("settings", PRODUCT[::31], ids=name_of)
@pytest.mark.parametrize("method", METHODS)
def test_every_layer_in_every_way_is_trained_as_autograd_says_or_refused(method, settings):
    for name in layers.CASES:
        check(name, method, settings)


# Which layers some method takes, in training mode as they are: a refusal must not spread unseen.
REFUSED = {
    "BatchNorm1d",
    "BatchNorm2d",
    "Embedding with max_norm",
    "InstanceNorm2d with statistics",
    "spectral_norm",
}
UNABLE = {"GRU", "LSTM, packed", "RNN"}  # torch.func cannot take them


@pytest.mark.slow
def test_auto_takes_every_layer_but_those_that_mix_or_keep_something_or_that_no_method_takes():
    settings = "train", "nothing", torch.float32, "everybody", "once"
    found = {name: check(name, "auto", settings) for name in layers.CASES}
    assert {
        name for name, what in found.items() if isinstance(what, ValueError)
    } == REFUSED | UNABLE
    assert all(
        isinstance(found[name], UnsupportedModel) and "layer" in str(found[name]) for name in UNABLE
    )


@pytest.mark.parametrize(
    "name",
    ["positions of a batch of one", "BertEmbeddings", "GPT2Model", "Embedding with padding_idx"],
)
@pytest.mark.parametrize("method", ["mixed", "ghost"])
def test_embeddings_of_transformers_are_taken_apart_into_layers(name, method):
    settings = "train", "nothing", torch.float64, "everybody", "norms first"
    assert check(name, method, settings) == "as autograd"


@pytest.mark.parametrize("method", METHODS)
def test_the_padding_row_gets_no_gradient(method):
    case = layers.CASES["Embedding with padding_idx"]
    x, y = case.inputs(N, torch.Generator().manual_seed(0)), torch.arange(N) % layers.CLASSES
    total = clipped_sum(case.build(), cross_entropy, x, y, 1.0, method=method)
    assert bool((x == 0).any()) and not total.gradients["layer.weight"][0].any()
