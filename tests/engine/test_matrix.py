"""Layers that people use, in all modes of the engine: what autograd says of one example at a time,
or a ValueError.

The table of `layers.CASES` is crossed with the engine's modes, evaluation mode, frozen parameters,
draws and the order of calls. The short run takes a fixed design in which every layer meets every
mode, and every two of the other settings meet; three more settings of the product, for every layer
and mode, are marked slow.
"""

import copy
import importlib.util
import itertools
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import MODES, IndividualizedPrivacyEngine, replace_layers

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook", "ignore:target_delta", "ignore:In CPU autocast"
)

_spec = importlib.util.spec_from_file_location(
    "layers", pathlib.Path(__file__).parent.parent / "layers.py"
)
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)

N, CLIP, STEPS = 6, 0.3, 4
SETTINGS = {
    "mode": ("train", "eval", "layer in eval"),
    "frozen": ("nothing", "head", "layer"),
    "draws": ("everybody", "some", "nobody first"),
    "order": ("once", "evaluated before", "unwrapped"),
}
PRODUCT = list(itertools.product(*SETTINGS.values()))
# What an error speaks of.
NAMES = {
    "module",
    "in",
    "padding_idx",
    "max_norm",
    "scale_grad_by_freq",
    "sparse",
    "grad_sample_mode",
    "wrap_model",
}
SEEDS = {"some": 0, "nobody first": 0}


def name_of(value):
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def gradients_alone(model, x, y):
    """{name: (n, ...)} clipped gradients, by plain autograd, one example at a time."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x)):
        value = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(
            value, list(named.values()), allow_unused=True, materialize_grads=True
        )
        found = [g.to_dense() for g in found]
        norm = torch.stack([g.norm() for g in found]).norm()
        rows.append([g * min(1.0, CLIP / float(norm)) for g in found])
    return {name: torch.stack(column) for name, column in zip(named, zip(*rows))}


def in_torchs_names(model, sums):
    """{name: tensor} in a state_dict's names, of tensors {parameter's name: tensor}."""
    shown = copy.deepcopy(model).requires_grad_(False)
    for name, p in shown.named_parameters():
        p.copy_(sums[name]) if name in sums else p.zero_()
    return shown.state_dict()


def private(model, data, mode, draws, wrap_model):
    engine = IndividualizedPrivacyEngine(accountant="rdp")  # which is fast, and of no matter here
    found = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data_loader=DataLoader(data, batch_size=N if draws == "everybody" else 1),
        target_epsilons=[3.0] * N,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=CLIP,
        seed=SEEDS.get(draws, 0),
        grad_sample_mode=mode,
        wrap_model=wrap_model,
    )
    return found if mode == "ghost" else (*found[:2], F.cross_entropy, found[2])


def check(name, mode, settings):
    state, frozen, draws, order = settings
    case = layers.CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = case.build()
    x, y = case.inputs(N, torch.Generator().manual_seed(0)), torch.arange(N) % layers.CLASSES
    for part in {"nothing": [], "head": ["head", "out"], "layer": ["layer"]}[frozen]:
        if hasattr(plain, part):
            getattr(plain, part).requires_grad_(False)
    if not any(p.requires_grad for p in plain.parameters()):
        return "nothing to train"
    plain.train(state != "eval")
    if state == "layer in eval" and hasattr(plain, "layer"):
        plain.layer.eval()
    model, steps, kept = copy.deepcopy(plain), 0, None
    try:
        model = replace_layers(model)
        module, optimizer, criterion, loader = private(
            model, TensorDataset(x, y), mode, draws, order != "unwrapped"
        )
        called = model if order == "unwrapped" else module
        for inputs, targets in itertools.islice(loader, STEPS):
            if order == "evaluated before":
                states = [(part, part.training) for part in model.modules()]
                model.eval()
                with torch.no_grad():
                    called(x)
                for part, training in states:
                    part.training = training
            optimizer.zero_grad()
            criterion(called(inputs), targets).backward()
            assert optimizer.pre_step()
            sums = {own: p.summed_grad for own, p in model.named_parameters() if p.requires_grad}
            kept = in_torchs_names(model, sums)
            rows = [next(i for i in range(N) if torch.equal(x[i], row)) for row in inputs]
            check_sums(plain, case, kept, x, y, rows, state)
            steps += 1
    except ValueError as error:
        assert str(error).partition(" ")[0] in NAMES, error
        return error
    except (RuntimeError, IndexError) as error:
        # Without the engine's module around it, that a model takes no empty batch is its own
        # affair.
        if order != "unwrapped" or draws == "everybody":
            raise
        with pytest.raises(type(error)):
            plain(x[:0])
        return error
    return f"{steps} steps as autograd"


def check_sums(plain, case, kept, x, y, rows, state):
    # and no buffers
    kept = {own: kept[own] for own, p in plain.named_parameters() if p.requires_grad}
    # A layer that keeps something of its examples keeps nothing of an empty draw.
    assert not (case.refused and state == "train" and len(rows))
    if case.random and state == "train":
        assert torch.stack([s.norm() for s in kept.values()]).norm() <= CLIP * len(rows) * (
            1 + 1e-5
        )
        return
    for own, g in gradients_alone(plain, x[rows], y[rows]).items() if rows else ():
        assert (kept[own] - g.sum(0)).norm() <= 1e-4 * CLIP * N
    assert rows or not any(s.any() for s in kept.values())


@pytest.mark.parametrize("name, mode, settings", layers.design(SETTINGS, MODES), ids=name_of)
def test_a_layer_is_trained_as_autograd_says_or_refused(name, mode, settings):
    check(name, mode, settings)


@pytest.mark.slow
# of the whole product, which takes half an hour
@pytest.mark.parametrize("settings", PRODUCT[4::31], ids=name_of)
@pytest.mark.parametrize("mode", MODES)
def test_every_layer_in_every_way_is_trained_as_autograd_says_or_refused(mode, settings):
    for name in layers.CASES:
        check(name, mode, settings)


# Which layers are refused in training mode as they are: a refusal must not spread unseen.
REFUSED = {
    "BatchNorm1d",
    "BatchNorm2d",
    "Embedding with max_norm",
    "InstanceNorm2d with statistics",
    "spectral_norm",
}
# a table of positions (T, T) that is looked up once for all examples
BY_HOOKS = {"T5LayerSelfAttention"}
BY_GHOST = {"Embedding scaled by frequency", "Embedding with sparse gradients"} | {
    "weights that are tied",
    "a layer that is used twice",
}


@pytest.mark.slow
@pytest.mark.parametrize("mode, more", [("hooks", set()), ("ghost", BY_GHOST)])
def test_all_but_those_that_mix_or_keep_something_are_taken_with_an_empty_draw_first(mode, more):
    found = {
        name: check(name, mode, ("train", "nothing", "nobody first", "once"))
        for name in layers.CASES
    }
    refused = {name: str(what) for name, what in found.items() if isinstance(what, ValueError)}
    assert refused.keys() == REFUSED | BY_HOOKS | more
    assert "relative_attention_bias" in refused["T5LayerSelfAttention"]


@pytest.mark.parametrize(
    "name", ["RNN", "LSTM", "GRU", "MultiheadAttention", "TransformerEncoderLayer"]
)
def test_layers_that_no_hook_sees_into_are_refused_with_the_name_of_those_that_compute_the_same(
    name,
):
    case = layers.CASES[name]
    data = TensorDataset(
        case.inputs(N, torch.Generator().manual_seed(0)), torch.arange(N) % layers.CLASSES
    )
    with pytest.raises(ValueError, match="'layer.*dpcompanion.engine.*replace_layers"):
        private(case.build(), data, "hooks", "everybody", wrap_model=True)
