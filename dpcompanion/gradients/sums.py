"""One pass's sum of clipped gradients: through the layers of a model, or by `torch.func`.

Both give a `ClippedSum`, of one run or, with stacked networks or parameters, of several at once.
`dpcompanion.gradients.clipping` chooses between them and cuts the examples into passes.

>>> model = torch.nn.Linear(3, 2).double()
>>> x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
>>> def loss(outputs, targets):
...     return (outputs - targets).square().sum(1)
>>> one, other = layerwise(model, loss, x, y, 0.1, "mixed"), functional(model, loss, x, y, 0.1)
>>> all(torch.allclose(g, other.gradients[name]) for name, g in one.gradients.items())
True
"""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import nn

from dpcompanion._devices import to_device, with_whole_convolutions
from dpcompanion._norms import margin
from dpcompanion.gradients import checks, independence
from dpcompanion.gradients.layers import Explicit, float64_sum, layer_gradient
from dpcompanion.gradients.recording import Recorder
from dpcompanion.gradients.stacking import StackedLayer
from dpcompanion.gradients.tensors import (
    call_with,
    in_best_format,
    losses_in,
    outputs_in,
    own_parameters,
    rounded_up,
)

# Numbers of per-example gradients that are held at once, 256 MiB in float32; on a GPU four times as
# many, since to make them once more takes longer there.
BUDGET = 2**26


def budget_on(device):
    """`BUDGET` on a device."""
    return BUDGET if torch.device(device).type == "cpu" else 4 * BUDGET


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Sum of clipped gradients {name: tensor}, norms before clipping (n,), inf where not finite,
    losses (n,); where they lie on a device, whether the loss was seen to mix examples, a tensor,
    else None.
    """

    gradients: dict
    norms: torch.Tensor
    losses: torch.Tensor
    mixed: torch.Tensor | None = None

    def __add__(self, other):
        return ClippedSum(
            {name: g + other.gradients[name] for name, g in self.gradients.items()},
            torch.cat([self.norms, other.norms]),
            torch.cat([self.losses, other.losses]),
            self.mixed
            if other.mixed is None
            else other.mixed
            if self.mixed is None
            else self.mixed | other.mixed,
        )


def clip_factors(norms, max_grad_norm):
    r"""min(1, C/norm), a hair smaller so that rounding does not lift a clipped gradient above C.

    0 where the norm is not finite or C is 0.

    >>> clip_factors(torch.tensor([0.5, 4.0, float("inf")]), 1.0)
    tensor([1.0000, 0.2500, 0.0000])
    """
    if isinstance(max_grad_norm, torch.Tensor):
        limits = to_device(max_grad_norm.to(norms.dtype), norms.device)
    else:  # filled in where it is needed, without a copy
        limits = torch.full((), max_grad_norm, dtype=norms.dtype, device=norms.device)
    return torch.where(
        norms.isfinite() & (limits > 0), (limits / (norms * margin(norms.dtype))).clamp(max=1), 0
    )


@with_whole_convolutions
def layerwise(model, loss, x, y, max_grad_norm, method, runs=None, precision=None):
    """Norms and clipped sum through the layers. With `runs`, the layers of `model` are stacked
    ones, the examples are those of the first run, then those of the second, as many for each, and
    there is a sum for each run.
    """
    checks.check_arithmetic(x.device)
    recorder, budget, kept = Recorder(model), budget_on(x.device), max_grad_norm is not None
    group = grouping(model, x)
    squares: dict[nn.Module, Any] = dict.fromkeys(recorder.owners, 0)
    layers: dict[nn.Module, Any] = dict.fromkeys(recorder.owners)

    def take(module, uses):
        nonlocal budget
        if isinstance(module, StackedLayer):
            layer = layer_gradient(module.layer, uses, method, budget, own_parameters(module), kept)
        else:
            layer = layer_gradient(module, uses, method, budget, kept=kept)
        squares[module] = layer.squared_norms()
        if kept:
            layers[module] = layer
            budget -= sum(g.numel() for g in getattr(layer, "gradients", {}).values())

    x = in_best_format(model, x.detach(), precision)
    with recorder.listening(group.rows if group else len(x)), torch.enable_grad():
        outputs = outputs_in(precision, model, x)
        losses = checks.check_losses(loss(outputs, y), len(x))
    mixed = independence.check_loss(loss, (outputs, y), losses)
    del outputs
    with torch.no_grad():
        recorder.backward(losses, take, group)
        squared = sum(squares.values(), torch.zeros(len(x), dtype=torch.float64, device=x.device))
        layers = {
            recorder.owners[module]: layer for module, layer in layers.items() if layer is not None
        }
        dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
        total = _clip(
            layers, squared, losses.detach(), max_grad_norm, dtype, runs, method == "materialized"
        )
    total = dataclasses.replace(total, mixed=mixed)
    if max_grad_norm is None:
        return total
    found = total.gradients
    return dataclasses.replace(
        total,
        gradients={
            name: found[name]
            if name in found
            else torch.zeros_like(p, dtype=torch.float64 if method == "materialized" else None)
            for name, p in model.named_parameters()
            if p.requires_grad
        },
    )


def grouping(model, x):
    """How a network's rows belong to its examples (`training.people`), or None: one each."""
    return model.dpcompanion_grouping(x) if hasattr(model, "dpcompanion_grouping") else None


def bytes_left(model, loss, x, y, method, precision=None):
    """How many bytes `layerwise` finds or makes on its way back through the model for the examples
    (x, y): inputs and output gradients of layers, and the gradients that it holds.
    """
    recorder, left = Recorder(model), 0
    group = grouping(model, x)

    def take(module, uses):
        nonlocal left
        layer = layer_gradient(module, uses, method, BUDGET)
        held = getattr(layer, "gradients", {}).values()
        left += sum(a.nbytes + g.nbytes for a, g in uses) + sum(g.nbytes for g in held)

    with recorder.listening(group.rows if group else len(x)), torch.enable_grad():
        losses = checks.check_losses(losses_in(precision, model, loss, x, y), len(x))
    with torch.no_grad():
        recorder.backward(losses, take, group)
    return left


def _clip(layers, squares, losses, max_grad_norm, dtype, runs, float64=False):
    """The sums of {where the layer is: its gradient}, whose squared norms add up to `squares`; of
    float64 if `float64`. Gradients are of `dtype`.
    """
    norms = squares.sqrt() if float64 else rounded_up(squares.sqrt(), losses.dtype)
    finite = norms.isfinite()
    norms = torch.where(finite, norms, math.inf)
    if max_grad_norm is None:
        return ClippedSum({}, norms, losses)
    # Factors are made in the precision in which they multiply, which that of the losses need not
    # be: one rounded to a coarser one afterwards would lift a gradient above its clip norm.
    exact = norms if float64 or norms.dtype == dtype else rounded_up(squares.sqrt(), dtype)
    factors = clip_factors(exact, max_grad_norm).reshape(runs or 1, -1)
    masked = losses.device.type != "cpu" or not finite.all()
    sums = {}
    for prefix, layer in layers.items():
        if masked:
            layer.keep_only(finite)
        if float64:
            sums |= {
                f"{prefix}.{name}" if prefix else name: g
                for name, g in float64_sum(layer, factors[0]).items()
            }
            continue
        for name, g in layer.weighted_sum(factors).items():
            sums[f"{prefix}.{name}" if prefix else name] = g if runs else g[0]
    return ClippedSum(sums, norms, losses)


def gradients_and_losses(model, loss):
    """(parameters, x, y) -> ({name: (n, *shape)}, losses (n,)): explicit gradients, one by one."""

    def one(parameters, x, y):
        with _dense(model):
            outputs = call_with(model, parameters, x.unsqueeze(0))
        return loss(outputs, y.unsqueeze(0)).sum()

    return torch.func.vmap(
        torch.func.grad_and_value(one), in_dims=(None, 0, 0), randomness="different"
    )


@contextlib.contextmanager
def _dense(model):
    """Without sparse gradients of embeddings, which vmap does not take."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", False) is True]
    try:
        for module in sparse:
            module.sparse = False
        yield
    finally:
        for module in sparse:
            module.sparse = True


def per_example_gradients(model, loss, x, y):
    """Explicit gradients of every example by torch.func: ({name: (n, *shape)}, losses (n,))."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return gradients_and_losses(model, loss)(parameters, x, y)


@with_whole_convolutions
def functional(model, loss, x, y, max_grad_norm, stacked=None, float64=False):
    """As `layerwise`, for any model; `stacked`: {name: (runs, *shape)} for several runs."""
    checks.check_arithmetic(x.device)
    if stacked is None:
        runs, (gradients, losses) = None, per_example_gradients(model, loss, x, y)
    else:
        runs = len(next(iter(stacked.values())))
        gradients, losses = torch.func.vmap(gradients_and_losses(model, loss))(
            stacked, x.unflatten(0, (runs, -1)), y.unflatten(0, (runs, -1))
        )
        gradients = {name: g.flatten(0, 1) for name, g in gradients.items()}
        losses = losses.flatten()
    layer = Explicit(gradients)
    dtype = next(g.dtype for g in gradients.values())
    return _clip({"": layer}, layer.squared_norms(), losses, max_grad_norm, dtype, runs, float64)
