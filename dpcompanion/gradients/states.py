"""What decides which code a model runs: modes, flags, hooks, frozen parameters; and a proof that holds for one of them.

A proof looks at a model in one state. A layer that is in evaluation mode while the proof looks, and in training mode
later, may mix examples then. So a proof is relied on only after comparing states, and is repeated where they differ.

>>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
>>> before = state_of(model)
>>> state_of(model) == before, state_of(model.eval()) == before
(True, False)
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules import module as global_module

# Of `torch.nn.Module`: what is looked at by itself, and what holds no choice of code.
_OWN = frozenset(torch.nn.Module().__dict__) | {"training"}
_HOOKS = tuple(sorted(name for name in _OWN if name.endswith("_hooks")))
_GLOBAL = tuple(sorted(name for name in dir(global_module) if name.startswith("_global_") and name.endswith("_hooks")))
# What Opacus notes at a layer between a forward and a backward pass.
_IN_PASSING = {"activations", "max_batch_len"}
# How many entries of a container and how many attributes within attributes are looked at.
_ENTRIES, _DEPTH = 64, 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def state_of(model: torch.nn.Module, *, parameters: bool = True) -> Any:
    """What decides which code `model` runs, to be compared with ==.

    For each module: its class and forward method, its mode, hooks, names and kinds of parameters (which are frozen,
    which are shared) and buffers, and attributes that are numbers, texts or functions, also those in containers and in
    objects such as a configuration. Values of parameters, buffers and other tensors are no part of it, nor is what a
    model keeps outside of itself; without `parameters` nothing of these counts.
    """
    hooks = tuple(tuple(getattr(global_module, name)) for name in _GLOBAL)
    return hooks, _modules(model, {}, {} if parameters else None)


def seen_in(function: Any) -> Any:
    """As `state_of`, of a function or another object that is called."""
    return _seen(function, {}, _DEPTH)


def _modules(model, seen, shared):
    """Of each module of `model` that is not in `seen`, {id: number}, what `state_of` says; parameters are numbered in
    `shared`, unless that is None."""
    parts = []
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in seen:
            parts.append((name, seen[id(module)]))
            continue
        seen[id(module)] = len(seen)
        parameters = (
            (own, None if p is None else (_number(p, shared), p.requires_grad, *_kind(p)))
            for own, p in ({} if shared is None else module._parameters).items()
        )
        parts.append(
            (
                name,
                type(module),
                _function(type(module).forward, seen, 0),
                module.training,
                tuple(tuple(getattr(module, hooks, None) or ()) for hooks in _HOOKS),
                tuple(parameters),
                tuple((own, None if b is None else _kind(b)) for own, b in module._buffers.items()),
                tuple(
                    (own, _seen(value, seen, _DEPTH))
                    for own, value in module.__dict__.items()
                    if own not in _OWN and own not in _IN_PASSING
                ),
            )
        )
    return tuple(parts)


def _number(item, numbers):
    return numbers.setdefault(id(item), len(numbers))


def _kind(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _function(function, seen, depth):
    """A function is its code and what it closes over."""
    if isinstance(function, types.MethodType):
        return _function(function.__func__, seen, depth), _seen(function.__self__, seen, depth)
    if not isinstance(function, types.FunctionType):
        return id(function)
    cells = []
    for cell in (function.__closure__ or ()) if depth else ():
        try:
            cells.append(_seen(cell.cell_contents, seen, depth - 1))
        except ValueError:  # an empty cell
            cells.append(None)
    return id(function.__code__), tuple(cells), _seen(function.__defaults__, seen, depth)


def _seen(value, seen, depth):
    if isinstance(value, float):
        return "float", repr(value)  # nan is itself
    if isinstance(value, _PLAIN):
        return type(value), value  # True is not 1
    if isinstance(value, torch.Tensor):
        return _kind(value)
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return _function(value, seen, depth)
    if isinstance(value, type):
        return id(value)
    if not depth or id(value) in seen:
        return type(value), seen.get(id(value))
    if isinstance(value, torch.nn.Module):  # not a child, and called all the same
        return _modules(value, seen, {})
    seen[id(value)] = len(seen)
    if isinstance(value, functools.partial):
        return tuple(_seen(part, seen, depth - 1) for part in (value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        if len(value) > _ENTRIES * 4:
            return type(value), len(value)
        return type(value), tuple((repr(key), _seen(entry, seen, depth - 1)) for key, entry in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        if len(value) > _ENTRIES or any(isinstance(entry, torch.Tensor) for entry in value):
            return type(value), None
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return type(value), tuple(_seen(entry, seen, depth - 1) for entry in entries)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and len(own) <= _ENTRIES * 4:
        return type(value), tuple((name, _seen(entry, seen, depth - 1)) for name, entry in own.items())
    return type(value), None
