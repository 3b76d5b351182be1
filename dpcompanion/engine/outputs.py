"""What a module puts out, tensors in tuples, dicts and dataclasses, and what comes back to it.

>>> map_tensors(
...     {"loss": torch.zeros(()), "ids": torch.ones(2).long()},
...     lambda t: t + 1,
...     torch.is_floating_point,
... )
{'loss': tensor(1.), 'ids': tensor([1, 1])}
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def map_tensors(value, function, which):
    """A module's outputs with every tensor for which `which` holds replaced by its `function`."""
    if torch.is_tensor(value):
        return function(value) if which(value) else value
    if isinstance(value, Mapping):
        for key, part in list(value.items()):
            if (found := map_tensors(part, function, which)) is not part:
                value[key] = found  # pyright: ignore[reportIndexIssue] (an output is its module's own, made anew)
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if (found := map_tensors(part, function, which)) is not part:
                object.__setattr__(value, field.name, found)
        return value
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, function, which) for part in value]
        if all(a is b for a, b in zip(parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _wrapped(t):
    inside: Any = torch._C
    return inside._functorch.is_functorch_wrapped_tensor(t)  # in vmap, grad and the like


def is_learnt_from(t):
    """Whether a loss of this tensor sends a gradient through it to something else."""
    return (
        torch.is_tensor(t)
        and t.requires_grad
        and t.is_floating_point()
        and not t.is_leaf
        and not _wrapped(t)
    )


class Output:
    """A tensor that a pass put out: its numbers, and what comes back to it."""

    def __init__(self, tensor):
        self.tensor, self._version = tensor.detach(), tensor._version
        #: The gradient that the loop's loss sends to it; that which arrives inside of the module,
        #: by its own loss too.
        self.direct = self.total = None

    def axes(self, n):
        """Along which the examples may be; none for a number of the whole batch."""
        return [axis for axis, size in enumerate(self.tensor.shape[:2]) if size == n]

    @property
    def overwritten(self):
        return self.tensor._version != self._version


class Pass:
    """A forward pass of the module: what it put out, and what a criterion made of it."""

    def __init__(self, batch):
        self.batch, self.outputs, self.calls = batch, [], []
        self.arrived = False


def numbers_in(value):
    """Tensors of numbers with a fraction, in any nesting."""
    if torch.is_tensor(value):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return (
        [t for part in value for t in numbers_in(part)] if isinstance(value, (list, tuple)) else []
    )


class Rows:
    """A call's arguments, of which every tensor with n entries along an axis holds examples."""

    def __init__(self, call, n, dim):
        self._leaves, self._spec = tree_flatten(call)
        self.n, self._dim = n, dim
        self._mine = [
            torch.is_tensor(t) and t.ndim > dim and t.shape[dim] == n for t in self._leaves
        ]
        self.found = any(self._mine)

    def of_another_type(self, types):
        """Tensors of examples that are numbers with a fraction, and of none of the types."""
        return [
            t
            for t, mine in zip(self._leaves, self._mine)
            if mine and t.is_floating_point() and t.dtype not in types
        ]

    def take(self, rows):
        return tree_unflatten(
            [
                t.detach().index_select(self._dim, torch.tensor(rows, device=t.device))
                if mine
                else t
                for t, mine in zip(self._leaves, self._mine)
            ],
            self._spec,
        )


def _weights(shape, row, number, like):
    generator = torch.Generator().manual_seed(1000 * row + number)
    return torch.randn(shape, generator=generator).to(like)


def weighed(out, row, number):
    """A random linear function, the same for a row always; a loss that the module itself puts out
    stays as it is.
    """
    return (out * _weights(out.shape, row, number, out)).sum() if out.ndim else out


def parts_of(out, shape, rows, number):
    """The function of each row's part of what several put out together, (k,); None if there is no
    telling the parts.
    """
    if not out.ndim:
        return out
    if len(rows) == 1:
        return weighed(out, rows[0], number)[None] if out.shape == shape else None
    axes = [axis for axis, (a, b) in enumerate(zip(out.shape, shape)) if a != b]
    if out.ndim != len(shape) or len(axes) != 1 or out.shape[axes[0]] != len(rows) * shape[axes[0]]:
        return None
    return torch.stack(
        [
            weighed(part, row, number)
            for part, row in zip(out.split(shape[axes[0]], dim=axes[0]), rows)
        ]
    )
