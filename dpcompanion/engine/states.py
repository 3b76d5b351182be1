"""What says which code a module runs: modes, flags, hooks, and what is trained.  When it changes, a proof is stale.

>>> layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
>>> before = CodeState(layer)
>>> before == CodeState(layer)
True
>>> _ = layer[1].eval()
>>> before == CodeState(layer)
False
"""

import types

import torch

#: What Opacus notes in a module on the way of a pass.
_NOTES = {"activations", "max_batch_len"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = (bool, str, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


class CodeState:
    """A module's state as it is now; two compare equal where the same code runs.

    `numbers` are its attributes that are numbers, which may count passes: they are held apart, and do not compare.
    """

    def __init__(self, module):
        flags, numbers, seen = [], [], set()
        for part in module.modules():
            flags.append(
                (id(part), part.training, id(type(part).forward), *(tuple(getattr(part, name)) for name in _HOOKS))
            )
            own = part.__dict__
            flags += [(id(p), p.requires_grad) for p in own["_parameters"].values() if p is not None]
            flags += [id(child) for child in own["_modules"].values()]
            for name, value in own.items():
                if name in _NOTES or name == "training":
                    continue
                _note(name, value, flags, numbers)
                if _holds_flags(value) and id(value) not in seen:  # a configuration
                    seen.add(id(value))
                    for inner, each in vars(value).items():
                        _note(inner, each, flags, numbers)
        self._flags, self.numbers = flags, numbers

    def __eq__(self, other):
        return isinstance(other, CodeState) and self._flags == other._flags

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _note(name, value, flags, numbers):
    if type(value) in _FLAGS:
        flags.append((name, value))
    elif type(value) in (int, float):
        numbers.append((name, value))
    elif isinstance(value, _FUNCTIONS):
        flags.append((name, id(value)))


def _holds_flags(value):
    plain = isinstance(value, (torch.nn.Module, torch.Tensor, *_FUNCTIONS)) or isinstance(value, types.ModuleType)
    return not plain and hasattr(value, "__dict__")
