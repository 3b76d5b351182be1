"""What makes the host wait for a device, counted on the meta device, which stands for a GPU and
holds no numbers.
"""

import collections

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# What tells the host a number, or makes a tensor whose size the host must know.
READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
READS |= {"masked_select", "bincount", "repeat_interleave"}
MADE = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}


class Waits(TorchDispatchMode):
    """Counts, by name in `seen`, what would make the host wait for the device: numbers that are
    read back, and copies in either direction that are not said to go on meanwhile.
    """

    def __init__(self):
        super().__init__()
        self.seen, self._made = collections.Counter(), _Made(self)

    def __enter__(self):
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        here = args[0].device.type if args and isinstance(args[0], torch.Tensor) else None
        if name == "_to_copy":
            waits = self._differ(here, kwargs.get("device") or here) and not kwargs.get(
                "non_blocking"
            )
        elif name == "copy_":
            waits = self._differ(args[1].device, here) and not (
                args[2] if len(args) > 2 else kwargs.get("non_blocking")
            )
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            waits = here == "meta" and any(
                index.device.type == "cpu" or index.dtype == torch.bool
                for index in args[1]
                if index is not None
            )
        else:
            waits = name in READS and here == "meta"
        if waits:
            self.seen[name] += 1
        return function(*args, **kwargs)

    @staticmethod
    def _differ(one, other):
        return {torch.device(one).type, torch.device(other).type} == {"cpu", "meta"}


class _Made(TorchFunctionMode):
    """Tensors that are made of Python's numbers on the device, which no dispatch shows."""

    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        data = args[-1] if args else None
        if function in MADE and found.device.type == "meta" and not isinstance(data, torch.Tensor):
            self._waits.seen[function.__name__] += 1
        return found


class Asked(TorchFunctionMode):
    """Counts, by name in `seen`, what Python asks tensors for, wherever they lie."""

    _READS = (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__array__",
    )

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self._READS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))
