"""What is trained on: two tensors, or a data set of PyTorch's that is read one draw at a time.

A data set is anything with a length and items (x, y), such as one of torchvision's with a
transform, so that examples may be augmented and need not fit into memory: a draw does. Its items
are read one by one, or all of a draw at once where it has PyTorch's `__getitems__`. What a
transform draws from PyTorch's generator depends, in `train`, on the run's seed and the step alone.
A transform must look at its own example only: mixing examples breaks the guarantee.

Items may be mappings, and anything at all with a `collate_fn`, as for a loader of PyTorch's: see
`dpcompanion.training.collating` for how model and loss are called then.

>>> data = torch.utils.data.TensorDataset(torch.eye(3), torch.tensor([0, 1, 0]))
>>> x, y = examples_of(data).rows(torch.tensor([2, 0]))
>>> x.shape, y
(torch.Size([2, 3]), tensor([0, 0]))
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from dpcompanion._devices import to_device
from dpcompanion._types import Loss
from dpcompanion.gradients import checks, proof, traces
from dpcompanion.gradients.items import check_batched, check_distinct, check_forgets_items
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.training.checkpoints import digest_of
from dpcompanion.training.collating import Reader, called, targets_in, tensors_in
from dpcompanion.training.owners import is_array
from dpcompanion.training.people import OfPersons, by_person

#: Two tensors (x, y) of equally many examples, a map-style data set, or what `by_person` gives.
Data = Sequence[Any] | Dataset[Any] | OfPersons


def described(thing: Any, data: Any) -> Any:
    """A plan, account or filter of `data`, which says "person" where data are persons and it has no
    word of its own.
    """
    unit = getattr(data, "unit", "example")
    if getattr(thing, "unit", unit) != "example" or unit == "example":
        return thing
    if isinstance(thing, DPSGDPlan):
        return dataclasses.replace(thing, unit=unit)
    with contextlib.suppress(AttributeError):  # of a filter of the user's own
        thing.unit = unit
    return thing


class Tensors:
    """Examples that lie in two tensors."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device) -> "Tensors":
        """The same on a device."""
        return Tensors(self.x.to(device), self.y.to(device))

    def rows(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some examples."""
        return self.x[indices], self.y[indices]

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those from `start` to before `stop`."""
        # a model or a loss may overwrite what it is given
        return self.x[start:stop].clone(), self.y[start:stop].clone()

    def seen(self, model: torch.nn.Module, loss: Loss) -> tuple[torch.nn.Module, Loss]:
        """Model and loss as functions of what `rows` gives: as they are."""
        return model, loss

    def prove(self, model: torch.nn.Module, loss: Loss) -> None:
        """Rows of two tensors are an example's own."""

    @property
    def probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Examples to try model and method on: all, of which 64 are looked at."""
        return self.x, self.y

    @functools.cached_property
    def digest(self) -> str:
        """What a checkpoint knows these examples by."""
        return digest_of(self.x, self.y)


class Items:
    """Examples that a data set gives when it is asked."""

    def __init__(self, dataset: Any, device: torch.device | None = None, collate_fn: Any = None):
        self.dataset, self.device = dataset, torch.device("cpu") if device is None else device
        self.reader = Reader(dataset, collate_fn)

    def __len__(self) -> int:
        return len(self.dataset)

    def to(self, device: torch.device) -> "Items":
        """The same, given on a device."""
        return Items(self.dataset, device, self.reader.collate_fn)

    def rows(self, indices: torch.Tensor) -> tuple[Any, Any]:
        """Inputs and targets of some examples."""
        if not len(indices):
            x, y = self.probe
            return x[:0], y[:0]
        x, y = self.reader.read(indices.tolist())
        return to_device(x, self.device), to_device(y, self.device)

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        """Those from `start` to before `stop`."""
        return self.rows(torch.arange(start, min(stop, len(self))))

    def seen(self, model: torch.nn.Module, loss: Any) -> tuple[torch.nn.Module, Any]:
        """Model and loss as functions of what `rows` gives: as they are for two tensors."""
        plain = all(isinstance(part, torch.Tensor) for part in self.probe)
        return (model, loss) if plain else called(model, loss)

    def prove(self, model: torch.nn.Module, loss: Any) -> None:
        """Refuse a `collate_fn` that mixes examples."""
        self.reader.prove(*called(model, loss))

    @functools.cached_property
    def probe(self) -> tuple[Any, Any]:
        """Examples to try model and method on: the 64 that would be looked at in tensors."""
        with traces.drawing_alike(torch.device("cpu")):
            torch.manual_seed(0)
            return self.rows(proof.rows_to_look_through(len(self)).sort().values)

    @functools.cached_property
    def digest(self) -> str:
        """What a checkpoint knows these examples by: their number and kind, and the targets of 64.
        (Inputs may be augmented by whatever generator.)
        """
        x, y = self.probe
        return digest_of(torch.tensor(len(self)), *tensors_in(x[:0]), *targets_in(x, y))


def _is_map(data):
    """Whether this is a map-style data set with a length, and no table of columns by name."""
    named = isinstance(data, Mapping) and 0 not in data
    items = isinstance(data, Sized) and hasattr(data, "__getitem__") and not named
    return items and not isinstance(data, (IterableDataset, torch.Tensor))


def _tensors_of(data, n):
    """Two tensors of n examples each."""
    items = isinstance(data, list) and all(isinstance(part, (tuple, list)) for part in data)
    if len(data) != 2 or items:
        raise ValueError(
            f"data must be two tensors (x, y), got a {type(data).__name__} of {len(data)} "
            f"{'items' if items else 'parts'}; a list of items (x, y) takes a collate_fn, such as "
            "collate_fn=torch.utils.data.default_collate, or is made into two tensors"
        )
    x, y = data
    checks.check_data(x, y, n)
    return Tensors(x, y)


def examples_of(
    data: Any,
    n: int | None = None,
    *,
    collate_fn: Any = None,
    people: Any = None,
    at_most: int | None = None,
) -> Any:
    """The examples of `data`, n of them if that is given; persons, where `people` and `at_most` say
    whose each row is.

    Raises:
        ValueError: for what is neither two tensors of equally many examples (with people, or
            arrays) nor a map-style data set, or of another n; for a `collate_fn` of what is no data
            set.
    """
    # Already, such as persons. The class is asked: to ask `data` itself would read its probe.
    examples = all(hasattr(type(data), name) for name in ("rows", "part", "probe", "seen"))
    tensors = (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and all(isinstance(t, torch.Tensor) for t in data)
    )
    if collate_fn is not None and (examples or tensors or not callable(collate_fn)):
        raise ValueError(
            "collate_fn must be a function of a list of items, beside a data set, got a "
            f"{type(collate_fn).__name__} beside a {type(data).__name__}"
        )
    if people is not None or at_most is not None:
        if people is None or at_most is None or examples:
            raise ValueError(
                "people and at_most must be given both, or neither, as where data are persons "
                f"already, got people={type(people).__name__}, at_most={at_most!r} and a "
                f"{type(data).__name__}"
            )
        arrays = (
            collate_fn is None
            and isinstance(data, (tuple, list))
            and len(data) == 2
            and all(map(is_array, data))
        )
        x, y = data if arrays else (data, None)
        return by_person(x, y, people, at_most=at_most, collate_fn=collate_fn)
    if examples:
        if n not in (None, len(data)):
            whose = ": one for each person" if isinstance(data, OfPersons) else ""
            raise ValueError(f"data must hold plan.n = {n} examples, got {len(data)}{whose}")
        return data
    if (
        collate_fn is None
        and isinstance(data, (tuple, list))
        and not (data and isinstance(data[0], Mapping))
    ):
        return _tensors_of(data, n)
    if not _is_map(data):
        raise ValueError(
            "data must be two tensors (x, y) or a map-style data set with a length, got a "
            f"{type(data).__name__}: a Poisson draw names the examples that it wants, so pass the "
            "data set of a loader"
        )
    if n not in (None, len(data)) or not len(data):
        raise ValueError(
            f"data must hold {'an example' if n is None else f'plan.n = {n} examples'}, got "
            f"{len(data)}"
        )
    check_distinct(data)
    check_batched(data)
    check_forgets_items(data)
    return Items(data, collate_fn=collate_fn)
