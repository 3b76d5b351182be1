"""What decides which code a model runs: modes, flags, hooks, frozen parameters; and a proof that
holds for one of them.

A proof looks at a model in one state. A layer that is in evaluation mode while the proof looks, and
in training mode later, may mix examples then. So a proof is relied on only after comparing states,
and is repeated where they differ.

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
_GLOBAL = tuple(
    sorted(
        name
        for name in dir(global_module)
        if name.startswith("_global_") and name.endswith("_hooks")
    )
)
# What Opacus notes at a layer between a forward and a backward pass.
_IN_PASSING = {"activations", "max_batch_len"}
# How many entries of a container and how many attributes within attributes are looked at.
_ENTRIES, _DEPTH = 64, 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def state_of(model: torch.nn.Module, *, parameters: bool = True, numbers: bool = True) -> Any:
    """What decides which code `model` runs, to be compared with ==.

    For each module: its class and forward method, its mode, hooks, names and kinds of parameters
    (which are frozen, which are shared) and buffers, and attributes that are numbers, texts or
    functions, also those in containers and in objects such as a configuration. Values of
    parameters, buffers and other tensors are no part of it, nor is what a model keeps outside of
    itself; without `parameters` nothing of these counts. Without `numbers`, which may count passes,
    neither does an attribute that is a number or a tensor.
    """
    hooks = tuple(tuple(getattr(global_module, name)) for name in _GLOBAL)
    return hooks, _Look(numbers).modules(model, {} if parameters else None)


def changed(before: Any, after: Any) -> str:
    """The names of attributes or modules in which two states of one model differ, at most three.

    >>> model = torch.nn.Sequential(torch.nn.Dropout())
    >>> before = state_of(model)
    >>> model[0].p = 0.25
    >>> changed(before, state_of(model))
    "'0.p'"
    """
    found = []
    for one, other in zip(before[1], after[1]):
        if one != other:
            mine, theirs = (dict(each[-1]) if len(each) > 2 else {} for each in (one, other))
            names = [own for own, value in theirs.items() if mine.get(own) != value] or [""]
            found += [f"{other[0]}.{own}".strip(".") or "the whole" for own in names]
    return ", ".join(map(repr, found[:3])) or "hooks"


def seen_in(function: Any) -> Any:
    """As `state_of`, of a function or another object that is called."""
    return _Look(numbers=True).value(function, _DEPTH)


class State:
    """The state of a model, in which it was proved, and whether it must be proved again by now.

    It must where `state_of` without numbers has changed, and at the changes 1, 2, 4, 8, ... of
    numbers, which may count passes.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    >>> state = State(model)
    >>> state.has_changed(model), state.has_changed(model.eval())
    (False, True)
    """

    def __init__(self, model: torch.nn.Module, changes: int = 0) -> None:
        self._whole = state_of(model)
        self._code = state_of(model, numbers=False)
        self.changes = changes

    def has_changed(self, model: torch.nn.Module) -> bool:
        whole = state_of(model)
        if whole == self._whole:
            return False
        self._whole = whole
        if state_of(model, numbers=False) != self._code:
            return True
        self.changes += 1
        return self.changes & (self.changes - 1) == 0


class _Look:
    """A look at modules and values, of which each that was seen has a number, {id: number}."""

    def __init__(self, numbers):
        self._numbers, self._seen = numbers, {}

    def modules(self, model, shared):
        """Of each module of `model` that was not seen, what `state_of` says; parameters are
        numbered in `shared`, unless that is None.
        """
        parts = []
        for name, module in model.named_modules(remove_duplicate=False):
            if id(module) in self._seen:
                parts.append((name, self._seen[id(module)]))
                continue
            self._seen[id(module)] = len(self._seen)
            parameters = (
                (
                    own,
                    None
                    if p is None
                    else (_number(p, shared), p.requires_grad, _hooks_of(p), *_kind(p)),
                )
                for own, p in ({} if shared is None else module._parameters).items()
            )
            attributes = (
                (own, value)
                for own, value in module.__dict__.items()
                if own not in _OWN and own not in _IN_PASSING and self._counts(value)
            )
            parts.append(
                (
                    name,
                    type(module),
                    self._function(type(module).forward, 0),
                    module.training,
                    tuple(tuple(getattr(module, hooks, None) or ()) for hooks in _HOOKS),
                    tuple(parameters),
                    tuple(
                        (own, None if b is None else _kind(b)) for own, b in module._buffers.items()
                    ),
                    tuple((own, self.value(value, _DEPTH)) for own, value in attributes),
                )
            )
        return tuple(parts)

    def _counts(self, value):
        return (
            self._numbers
            or isinstance(value, bool)
            or not isinstance(value, (int, float, complex, torch.Tensor))
        )

    def _function(self, function, depth):
        """A function is its code and what it closes over."""
        if isinstance(function, types.MethodType):
            return self._function(function.__func__, depth), self.value(function.__self__, depth)
        if not isinstance(function, types.FunctionType):
            return id(function)
        cells = []
        for cell in (function.__closure__ or ()) if depth else ():
            try:
                cells.append(self.value(cell.cell_contents, depth - 1))
            except ValueError:  # an empty cell
                cells.append(None)
        return id(function.__code__), tuple(cells), self.value(function.__defaults__, depth)

    def value(self, value, depth):
        if not self._counts(value):
            return None
        if isinstance(value, float):
            return "float", repr(value)  # nan is itself
        if isinstance(value, _PLAIN):
            return type(value), value  # True is not 1
        if isinstance(value, torch.Tensor):
            return _kind(value)
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._function(value, depth)
        if isinstance(value, type):
            return id(value)
        if not depth or id(value) in self._seen:
            return type(value), self._seen.get(id(value))
        if isinstance(value, torch.nn.Module):  # not a child, and called all the same
            return self.modules(value, {})
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, functools.partial):
            return tuple(
                self.value(part, depth - 1) for part in (value.func, value.args, value.keywords)
            )
        if isinstance(value, Mapping):
            if len(value) > _ENTRIES * 4:
                return type(value), len(value) if self._numbers else None
            return type(value), tuple(
                (repr(key), each) for key, each in self._entries(value.items(), depth)
            )
        if isinstance(value, (list, tuple, set, frozenset)):
            if len(value) > _ENTRIES or any(isinstance(entry, torch.Tensor) for entry in value):
                return type(value), None
            entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return type(value), tuple(each for _, each in self._entries(enumerate(entries), depth))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and len(own) <= _ENTRIES * 4:
            return type(value), tuple(self._entries(own.items(), depth))
        return type(value), None

    def _entries(self, items, depth):
        return [(key, self.value(entry, depth - 1)) for key, entry in items if self._counts(entry)]


def _number(item, numbers):
    return numbers.setdefault(id(item), len(numbers))


def _hooks_of(p):
    """Of a parameter's own hooks, which change the gradient that it gets, what tells them apart."""
    return tuple(
        tuple(getattr(p, name, None) or ())
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )


def _kind(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.device
