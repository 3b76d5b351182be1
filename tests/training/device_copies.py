"""Counts what makes a GPU's host wait, without a GPU: tensors of the `meta` device stand for those on the device.

They have shapes and types and no numbers, so what asks for a number of theirs (`item`, `bool`, `nonzero`, a copy to the
CPU) is what would wait.  `copies` lists such operations with the line that asked; each is answered with a zero, so that
all of them come to light.
"""

import pathlib
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

AWAY = torch.device("meta")
_ROOT = pathlib.Path(__file__).resolve().parents[2] / "dpcompanion"
_ASK = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::_unique2",
        "aten::unique_dim", "aten::unique_consecutive", "aten::masked_select", "aten::repeat_interleave.Tensor"}


def _away(value):
    return isinstance(value, torch.Tensor) and value.device == AWAY


class copies(TorchDispatchMode):
    """Within, the operations that wait for the device are in the list that this gives: "aten::item, loop.py:259"."""

    def __enter__(self):
        super().__enter__()
        self.seen = []
        return self.seen

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options, name = options or {}, function._schema.name
        flat = [each for argument in (*arguments, *options.values())
                for each in (argument if isinstance(argument, (list, tuple)) else (argument,))]
        asks = any(_away(each) for each in flat) and (
            name in _ASK or name == "aten::_to_copy" and torch.device(options.get("device") or AWAY) != AWAY)
        if name == "aten::copy_" and _away(arguments[1]) and not _away(arguments[0]):
            asks = True
        if name.startswith("aten::index") and len(arguments) > 1 and isinstance(arguments[1], (list, tuple)):
            asks = asks or any(_away(each) and each.dtype == torch.bool for each in arguments[1])
        if not asks:
            return function(*arguments, **options)
        here = [frame for frame in traceback.extract_stack() if str(_ROOT) in frame.filename]
        self.seen.append(f"{name}, {pathlib.Path(here[-1].filename).name}:{here[-1].lineno}" if here else name)
        if name == "aten::_to_copy":
            return torch.zeros_like(arguments[0], device=options["device"], dtype=options.get("dtype"))
        if name == "aten::copy_":
            return arguments[0].zero_()
        if name == "aten::_local_scalar_dense":
            return False if arguments[0].dtype == torch.bool else 0
        if name in ("aten::equal", "aten::is_nonzero"):
            return False
        raise AssertionError(f"waits for the device: {self.seen[-1]}")
