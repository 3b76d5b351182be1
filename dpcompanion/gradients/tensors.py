"""Tensors by name and their norms: what the methods of clipping share.

>>> sorted(own_parameters(nn.Linear(3, 2)))
['bias', 'weight']
"""

import functools
import operator
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dpcompanion._devices import autocasts

# Numbers whose squares are added up in their own precision.
_SUMMED = 256


class UnsupportedModel(ValueError):
    """The model cannot be taken apart layer by layer; `torch.func` may still do it."""


def own_parameters(module):
    """The trainable parameters that belong to `module` itself, not to a child.

    As `named_parameters(recurse=False)`, many times a step, without what that does for a tree.
    """
    found = {}
    for name, p in module._parameters.items():
        if p is not None and p.requires_grad and not any(p is other for other in found.values()):
            found[name] = p
    return found


def call_with(model, tensors, *inputs):
    """model(*inputs) with `tensors`, {name: tensor}, in place of parameters and buffers.

    As `torch.func.functional_call`, which spoils a model that holds one module twice: it swaps the
    module's tensors twice and then puts back what it had put in. Here each module is swapped once.
    A parameter that modules share is replaced in all of them.
    """
    given = {
        id(t): tensors[name]
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if name in tensors
    }
    places = {
        f"{prefix}.{name}" if prefix else name: given[id(t)]
        for prefix, module in model.named_modules()
        for name, t in [*module._parameters.items(), *module._buffers.items()]
        if id(t) in given
    }
    return torch.func.functional_call(model, places, inputs, tie_weights=False)


def losses_in(precision, model, loss, x, y):
    """Losses, the network in `precision` ("bf16", or None for its own) and the loss in its own."""
    return loss(outputs_in(precision, model, x), y)


def outputs_in(precision, model, x):
    """What the network gives in `precision`, in float32 where that is not its own."""
    if precision is None:
        return model(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        outputs = model(x)
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs)


def in_best_format(model, x, precision=None):
    """Images of several channels in float32 with these side by side in memory
    (`torch.channels_last`), which all layers follow, where the model has convolutions: these are
    faster so. Not where a processor goes through group norms in bfloat16, whose way back takes
    longer so (measured). Only the last bits of results depend on it.
    """
    kinds = {type(module) for module in model.modules()}
    slower = (
        precision is not None
        and x.device.type == "cpu"
        and any(issubclass(k, nn.GroupNorm) for k in kinds)
    )
    convolutions = any(issubclass(kind, nn.Conv2d) for kind in kinds)
    if x.ndim == 4 and x.shape[1] > 1 and x.dtype == torch.float32 and convolutions and not slower:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def added_up(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors of one shape, one at least, in their order."""
    return functools.reduce(operator.add, tensors)


def squared_norms(tensor):
    """Sums of squares over all axes but the first, (n,) float64; above 0 for whatever is not 0.

    The squares of a million float32 numbers, added up one after another, may lack a thousandth of
    their sum, and a norm must not come out too small. So only a few are added in float32, and their
    sums in float64. Squares that float32 cannot hold are added up in float64 altogether.

    >>> round(float(squared_norms(torch.full((1, 1_000_000), 0.1)).sqrt()), 3)
    100.0
    >>> squared_norms(torch.tensor([[3e-25, 4e-25], [0.0, 0.0]])).sqrt()
    tensor([5.0000e-25, 0.0000e+00], dtype=torch.float64)
    """
    if tensor.element_size() < 4:  # a norm in bfloat16 may lack 0.4%
        tensor = tensor.float()
    # In the order in which they lie in memory, so that nothing is copied.
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(0, *order).flatten(1) if order else tensor[:, None]
    if flat.device.type != "cpu" and flat.dtype != torch.float64:
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()
    if flat.dtype == torch.float64:
        squares = torch.linalg.vector_norm(flat, dim=1).square()
    else:
        blocks = flat.shape[1] // _SUMMED
        whole = flat[:, : blocks * _SUMMED].unflatten(1, (blocks, _SUMMED))
        rest = flat[:, blocks * _SUMMED :]
        norms = (
            torch.linalg.vector_norm(whole, dim=2),
            torch.linalg.vector_norm(rest, dim=1, keepdim=True),
        )
        squares = torch.cat(norms, 1).double().square().sum(1)
    # What the squares of n numbers may have lost by underflow, against the last bit of their sum.
    few = squares <= flat.shape[1] * torch.finfo(flat.dtype).tiny / torch.finfo(flat.dtype).eps
    return squares if not few.any() else squares.masked_scatter(few, _squares_of_small(flat[few]))


def _squares_of_small(flat):
    """As `squared_norms` in float64, each row over its largest entry; underflow is rounded up."""
    flat = flat.double()
    largest = flat.abs().amax(1, keepdim=True) if flat.shape[1] else flat.new_zeros(len(flat), 1)
    norms = largest[:, 0] * torch.linalg.vector_norm(
        torch.where(largest > 0, flat / largest, 0), dim=1
    )
    return torch.where(norms > 0, norms.square().clamp(min=torch.finfo(torch.float64).tiny), 0)


def rounded_up(values, dtype):
    """float64 `values` in another precision, never smaller than they are.

    >>> float(rounded_up(torch.tensor(0.1, dtype=torch.float64), torch.float32)) >= 0.1
    True
    """
    rounded = values.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < values, above, rounded)


def tolerances(values):
    """(relative to what is compared, to the largest), by precision; a GPU may round to TF32."""
    if values.dtype == torch.float64 or not values.is_floating_point():
        return 1e-6, 1e-9
    if values.dtype != torch.float32 or autocasts(values.device):
        return 1e-1, 1e-2
    return (2e-3, 2e-5) if values.device.type == "cpu" else (1e-2, 1e-3)
