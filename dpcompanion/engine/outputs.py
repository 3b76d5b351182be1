"""What a module puts out: tensors in tuples, dicts and dataclasses.

>>> map_tensors({"loss": torch.zeros(()), "ids": torch.ones(2).long()}, lambda t: t + 1, torch.is_floating_point)
{'loss': tensor(1.), 'ids': tensor([1, 1])}
"""

import dataclasses
from collections.abc import Mapping

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
