"""Examples whose inputs are several tensors, as one object, cut along its first axis like a tensor.

A language model takes token ids, a mask and labels; a person's rows come with the number of them.
`Batch` holds such tensors by name, and a nesting of them (`Batch.of`). It is a pytree of PyTorch's,
so that `torch.func.vmap` maps over its examples.

>>> batch = Batch(ids=torch.arange(6).view(3, 2), mask=torch.ones(3, 2))
>>> len(batch), batch[torch.tensor([2, 0])]["ids"].tolist()
(3, [[4, 5], [0, 1]])
>>> torch.func.vmap(lambda example: example["ids"].sum())(batch).tolist()
[1, 5, 9]
>>> Batch.of({"ids": torch.zeros(3, 2), "boxes": [torch.ones(3), torch.ones(3, 1)]})[:1].tree
{'ids': tensor([[0., 0.]]), 'boxes': [tensor([1.]), tensor([[1.]])]}
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import register_pytree_node

#: The name of a tensor that is all there is.
WHOLE = "rows"


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
                got = "a single number" if isinstance(t, torch.Tensor) else type(t).__name__
                raise ValueError(f"{name!r} must be a tensor with one entry an example, got {got}")
        lengths = {name: len(t) for name, t in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                "tensors of a batch must have as many examples each, at least one tensor, got "
                f"{lengths}"
            )
        self.tensors: dict[str, Any] = tensors
        self._nesting: Any = {name: name for name in tensors}

    @classmethod
    def of(cls, tree: Any) -> "Batch":
        """Nested mappings, lists and tuples of tensors, or a tensor, as a batch; inverse of `tree`.

        Raises:
            ValueError: as of `Batch`, or for what is no such nesting.
        """
        tensors: dict[str, Any] = {}

        def named(tree, path):
            if isinstance(tree, Mapping):
                return {key: named(part, (*path, str(key))) for key, part in tree.items()}
            if isinstance(tree, PackedSequence):
                raise ValueError(
                    f"{'.'.join(path) or WHOLE!r} must be a tensor with one entry an example, got "
                    "a PackedSequence: give padded tensors and their lengths (pad_sequence), which "
                    "the model may pack"
                )
            if isinstance(tree, (list, tuple)):
                parts = [named(part, (*path, str(place))) for place, part in enumerate(tree)]
                return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
            name = ".".join(path) or WHOLE
            if name in tensors:
                raise ValueError(
                    f"tensors of a batch must have names of their own, got {name!r} twice"
                )
            tensors[name] = tree
            return name

        nesting = named(tree, ())
        return cls._of(cls(**tensors).tensors, nesting)

    @classmethod
    def _of(cls, tensors: dict[str, Any], nesting: Any) -> "Batch":
        self = cls.__new__(cls)
        self.tensors, self._nesting = tensors, nesting
        return self

    @property
    def tree(self) -> Any:
        """The tensors, nested as they were given to `of`; else {name: tensor}."""
        return _filled(self._nesting, self.tensors)

    def beside(self, **tensors: torch.Tensor) -> "Batch":
        """The batch with further tensors by name, which are no part of its `tree`."""
        return Batch._of(self.tensors | tensors, self._nesting)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch of function(t) for each tensor t."""
        return Batch._of({name: function(t) for name, t in self.tensors.items()}, self._nesting)

    def __getitem__(self, index: Any) -> Any:
        """The tensor of a name, or for rows (a slice, indices, booleans) their batch."""
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
        return next(
            (t.dtype for t in self.tensors.values() if t.is_floating_point()), self._first.dtype
        )

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


def _filled(nesting, tensors):
    if isinstance(nesting, str):
        return tensors[nesting]
    if isinstance(nesting, dict):
        return {key: _filled(part, tensors) for key, part in nesting.items()}
    parts = [_filled(part, tensors) for part in nesting]
    return type(nesting)(*parts) if hasattr(nesting, "_fields") else type(nesting)(parts)


def tree_of(batch: Any) -> Any:
    """The tensors of a `Batch` as they were nested; a tensor as it is."""
    return batch.tree if isinstance(batch, Batch) else batch


register_pytree_node(
    Batch,
    lambda batch: (list(batch.tensors.values()), (list(batch.tensors), batch._nesting)),
    lambda values, names: Batch._of(dict(zip(names[0], values, strict=True)), names[1]),
)
