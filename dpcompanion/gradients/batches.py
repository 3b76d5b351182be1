"""Examples whose inputs are several tensors, as one object that is cut along its first axis like a tensor.

A language model takes token ids, a mask and labels; a person's rows come with the number of them.  `Batch` holds such
tensors by name.  It is a pytree of PyTorch's, so that `torch.func.vmap` maps over its examples.

>>> batch = Batch(ids=torch.arange(6).view(3, 2), mask=torch.ones(3, 2))
>>> len(batch), batch[torch.tensor([2, 0])]["ids"].tolist()
(3, [[4, 5], [0, 1]])
>>> torch.func.vmap(lambda example: example["ids"].sum())(batch).tolist()
[1, 5, 9]
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node


class Batch:
    """Tensors by name, {name: (n, ...)}, of the same n examples.

    Args:
        tensors: the tensors, one at least.

    Raises:
        ValueError: if there is none, if one is no tensor with an axis, or if their lengths differ.
    """

    def __init__(self, **tensors: torch.Tensor):
        for name, t in tensors.items():
            if not isinstance(t, torch.Tensor) or not t.ndim:
                raise ValueError(f"{name} must be a tensor with one entry an example, got {t!r}")
        lengths = {name: len(t) for name, t in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"tensors of a batch must have as many examples each, at least one tensor, got {lengths}")
        self.tensors = tensors

    @classmethod
    def _of(cls, tensors: dict[str, Any]) -> "Batch":
        self = cls.__new__(cls)
        self.tensors = tensors
        return self

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch of function(t) for each tensor t."""
        return Batch._of({name: function(t) for name, t in self.tensors.items()})

    def __getitem__(self, index: Any) -> Any:
        """The tensor of that name, or for rows (a slice, a tensor of indices or booleans) the batch of these."""
        return self.tensors[index] if isinstance(index, str) else self.map(lambda t: t[index])

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors)

    def keys(self) -> Any:
        """The names, so that a model can be called with `**batch`."""
        return self.tensors.keys()

    def __len__(self) -> int:
        return len(self._first)

    @property
    def _first(self) -> torch.Tensor:
        return next(iter(self.tensors.values()))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._first.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point tensor, or that of the first."""
        return next((t.dtype for t in self.tensors.values() if t.is_floating_point()), self._first.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        """(n, {name: shape of an example}) as a tuple that can be compared and hashed."""
        return (len(self), *((name, tuple(t.shape[1:])) for name, t in self.tensors.items()))

    @property
    def ndim(self) -> int:
        """At least 1: examples come first."""
        return 1

    def numel(self) -> int:
        """How many numbers all tensors have."""
        return sum(t.numel() for t in self.tensors.values())

    def is_floating_point(self) -> bool:
        """Whether a tensor is of a floating-point type."""
        return self.dtype.is_floating_point

    def to(self, device: str | torch.device, **options: Any) -> "Batch":
        """The same on a device."""
        return self.map(lambda t: t.to(device, **options))

    def clone(self) -> "Batch":
        """A copy."""
        return self.map(torch.Tensor.clone)

    def detach(self) -> "Batch":
        """The same without a graph."""
        return self.map(torch.Tensor.detach)

    def unsqueeze(self, axis: int) -> "Batch":
        """A new axis in each tensor."""
        return self.map(lambda t: t.unsqueeze(axis))


register_pytree_node(
    Batch,
    lambda batch: (list(batch.tensors.values()), list(batch.tensors)),
    lambda values, names: Batch._of(dict(zip(names, values, strict=True))),
)
