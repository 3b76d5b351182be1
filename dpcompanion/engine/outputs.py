"""What a module puts out, tensors in tuples, dicts and dataclasses, and what comes back to it.

>>> map_tensors({"loss": torch.zeros(()), "ids": torch.ones(2).long()}, lambda t: t + 1, torch.is_floating_point)
{'loss': tensor(1.), 'ids': tensor([1, 1])}
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def map_tensors(value, function, which):
    """A module's outputs with every tensor for which `which` holds exchanged for `function` of it; others stay."""
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
    return torch.is_tensor(t) and t.requires_grad and t.is_floating_point() and not t.is_leaf and not _wrapped(t)


class Output:
    """A tensor that a pass put out: its numbers, and what comes back to it."""

    def __init__(self, tensor):
        self.tensor, self._version = tensor.detach(), tensor._version
        #: The gradient that the loop's loss sends to it; that which arrives inside of the module, by its own loss too.
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
