"""Tensors on accelerators: whether reading waits for them, how to move, cast and multiply."""

import contextlib
import functools
import inspect
import threading
from typing import Any

import torch

# Where copies need not be waited for; the meta device, which copies nothing, is the GPU of tests.
_ASYNCHRONOUS = ("cuda", "meta")


def on_accelerator(tensor):
    """Whether to look at a tensor's numbers waits for a device that is not the host."""
    return tensor.device.type != "cpu"


class DeferredErrors:
    """What is wrong in input that lies on an accelerator, noted there until somebody asks.

    >>> errors = DeferredErrors(torch.device("cpu"))
    >>> errors.replace(torch.tensor([False, True]), torch.tensor([1.0, -2.0]), instead=0.0)
    tensor([1., 0.])
    >>> errors.anything
    True
    """

    def __init__(self, device):
        self.device = device
        self._wrong = None

    def away(self, tensor):
        """Whether a look at a tensor's numbers would wait for the device."""
        return self.device.type != "cpu" and on_accelerator(tensor)

    def note(self, wrong):
        """Note that something is wrong where any of these booleans is, without a look at them."""
        found = wrong.any().to(self.device)
        self._wrong = found if self._wrong is None else self._wrong | found

    def replace(self, wrong, values, *, instead):
        """Note what is wrong, and put `instead` in its place."""
        self.note(wrong)
        return torch.where(wrong, instead, values)

    @property
    def anything(self):
        """Whether something was wrong; waits for the device."""
        return self._wrong is not None and bool(self._wrong)


def forked_rng(device):
    """A context after which PyTorch's generators, of the host and of a device, are as they were.

    >>> with forked_rng(torch.device("cpu")):
    ...     torch.rand(1).shape
    torch.Size([1])
    """
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def autocasts(device):
    """Whether `torch.autocast` is on for a device."""
    kind = torch.device(device).type
    return torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def shortens_products(device):
    """Whether PyTorch is set to multiply matrices of float32 in a shorter type on a device."""
    backend = torch.backends.mkldnn if torch.device(device).type == "cpu" else torch.backends.cuda
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if setting is None:  # before PyTorch 2.9
        return torch.get_float32_matmul_precision() != "highest"
    return setting not in ("none", "ieee")


class _Whole:
    """How many threads are within `whole_convolutions`, and what was set before the first."""

    def __init__(self):
        self._lock, self._within, self._before = threading.Lock(), 0, []

    def __enter__(self):
        with self._lock:
            if not self._within:
                self._before = [(*each, getattr(*each)) for each in self._places()]
                for place, name, _ in self._before:
                    setattr(place, name, False if name == "allow_tf32" else "ieee")
            self._within += 1

    def __exit__(self, *_):
        with self._lock:
            self._within -= 1
            if not self._within:
                for place, name, before in self._before:
                    setattr(place, name, before)

    @staticmethod
    def _places():
        cudnn: Any = torch.backends.cudnn
        try:
            cudnn.allow_tf32  # noqa: B018
        except RuntimeError:  # where the caller has set one kind of operation alone
            return [(cudnn.conv, "fp32_precision"), (cudnn.rnn, "fp32_precision")]
        return [(cudnn, "allow_tf32")]


_WHOLE = _Whole()


def whole_convolutions(device):
    """A context in which convolutions of float32 are computed in float32 on a GPU, too. By default
    PyTorch lets cuDNN round their factors to ten bits (TF32); a clipped gradient could then exceed
    its clip norm by a thousandth, and plain autograd differ from what a proof compares with it.

    >>> with whole_convolutions("cpu"):
    ...     pass
    """
    return _WHOLE if torch.device(device).type == "cuda" else contextlib.nullcontext()


def with_whole_convolutions(function):
    """The function within `whole_convolutions`, on the device of its argument x."""
    place = list(inspect.signature(function).parameters).index("x")

    @functools.wraps(function)
    def within(*args, **kwargs):
        x = args[place] if len(args) > place else kwargs["x"]
        with whole_convolutions(x.device):
            return function(*args, **kwargs)

    return within


def to_device(tensor, device):
    """A tensor of the host on a device. A GPU takes it from pinned memory of its own, so that the
    host goes on meanwhile, and may write to what it sent.
    """
    device = torch.device(device)
    if (
        not isinstance(tensor, torch.Tensor)
        or on_accelerator(tensor)
        or device.type not in _ASYNCHRONOUS
    ):
        return tensor.to(device)
    if device.type == "cuda":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)
