r"""Items of a data set as a batch: what `collate_fn` makes, and how model and loss are called.

A batch is a pair (inputs, targets), or a mapping such as Hugging Face's collators return. Both may
be nested; all tensors have the examples along their first axis.

=================  ===============================================================================
a batch            model and loss
=================  ===============================================================================
(inputs, targets)  ``loss(model(inputs), targets)``; inputs that are a mapping are given by name,
                   those in a tuple or list one after the other
a mapping          ``loss(model(**entries), batch)`` with the entries that the model's `forward`
                   takes, all but "labels", of which the model's own loss would be a mean over the
                   batch
=================  ===============================================================================

An example's gradient is bounded only if its tensors are its own. So `Reader.prove` tries a
`collate_fn` before a run: what it makes of an example must not change where others take the places
beside it (mixup, a batch's mean, an order by length), and, unless it draws at random, the loss
alone is the loss in company (padding that the model is not told of).

>>> items = [{"ids": torch.arange(size), "labels": size} for size in (1, 2, 3)]
>>> def padded(items):
...     ids = torch.nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
...     return {"ids": ids, "labels": torch.tensor([item["labels"] for item in items])}
>>> x, y = Reader(items, padded).read([2, 0])
>>> x.tree, y["labels"].tolist()
({'ids': tensor([[0, 1, 2],
        [0, 0, 0]])}, [3, 1])
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dpcompanion.gradients import checks, proof, traces
from dpcompanion.gradients.batches import Batch, tree_of
from dpcompanion.gradients.items import same_bits
from dpcompanion.gradients.tensors import in_best_format, tolerances

#: What is the loss's alone where a batch is a mapping.
LABELS = "labels"

_COMPARED = 8

# How many random draws a `collate_fn` is tried with: one that mixes a batch with probability p goes
# unseen with probability (1 - p)^32, which is 1e-5 for p = 0.3 and 3% for p = 0.1.
_DRAWS = 32
# Parameters, at most, of a model that is tried in float64 too: four gigabytes beside its own.
_SMALL = 2**28


class Reader:
    """Items of a data set by their places, collated.

    Args:
        dataset: a map-style data set.
        collate_fn: list of items -> batch; by default PyTorch's, of pairs or mappings.
        name: what the function is called in messages.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str = "collate_fn",
    ):
        self.dataset, self.collate_fn, self.name = dataset, collate_fn, name

    def items(self, places: Sequence[int]) -> list[Any]:
        """The items there."""
        places = list(places)
        together = getattr(self.dataset, "__getitems__", None)
        found = list(together(places)) if together else [self.dataset[place] for place in places]
        if len(found) != len(places):
            raise ValueError(
                f"data must give as many items as it is asked for, {len(places)}, got {len(found)}"
            )
        return found

    def read(self, places: Sequence[int]) -> tuple[Any, Any]:
        """(inputs, targets) of the items there, one at least: tensors or `Batch`."""
        return self.collated(self.items(places))

    def collated(self, items: list[Any]) -> tuple[Any, Any]:
        """(inputs, targets) of some items."""
        if self.collate_fn is not None:
            return self._parts(self.collate_fn(items), len(items))
        if all(isinstance(item, Mapping) for item in items):
            return self._parts(self._stacked([dict(item) for item in items]), len(items))
        if not all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
            kind = type(items[0]).__name__
            if isinstance(items[0], (tuple, list)):
                kind += f" of {len(items[0])} parts: give mappings, or a collate_fn"
            raise ValueError(f"data must have items (x, y) or mappings, got a {kind}")
        return self._parts(self._stacked([tuple(item) for item in items]), len(items))

    def _stacked(self, items):
        """Items as a batch, where no `collate_fn` is given."""
        try:
            return default_collate(items)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                "data must have items that can be stacked, each part of one shape and type, but "
                f"{error!s:.200}; give a collate_fn, which pads items of several lengths, for "
                "instance by torch.nn.utils.rnn.pad_sequence"
            ) from error

    def _parts(self, batch, n):
        if isinstance(batch, Mapping):
            x = {key: part for key, part in batch.items() if key != LABELS}
            if not x:
                raise ValueError(
                    f"{self._of} must be of more than {LABELS!r}, which the model is not given"
                )
            return self._checked(x, n), self._checked(batch, n)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"{self._of} must be a pair (inputs, targets) or a mapping, got "
                f"{type(batch).__name__}"
            )
        return self._checked(batch[0], n), self._checked(batch[1], n)

    @property
    def _of(self):
        return "items of data" if self.collate_fn is None else f"what {self.name} returns"

    def _checked(self, tree, n):
        """A tensor, or a nesting of them, each with n examples first."""
        try:
            batch = Batch.of(tree)
        except ValueError as error:
            advice = (
                ", arrays or numbers; give it a transform or a collate_fn"
                if self.collate_fn is None
                else ""
            )
            raise ValueError(f"{self._of} must hold tensors: {error}{advice}") from None
        except (AttributeError, TypeError) as error:  # of a class that cannot be made of its parts
            raise ValueError(
                f"{self._of} must hold tensors, mappings, lists and tuples, got a "
                f"{type(tree).__name__}: {error}"
            ) from error
        if len(batch) != n:
            raise ValueError(
                f"{self._of} must have the examples first, {n} here, got {batch.shape}"
            )
        return tree if isinstance(tree, torch.Tensor) else batch

    def prove(self, model: torch.nn.Module, loss: Any) -> None:
        """Refuse a `collate_fn` that mixes examples or changes their order; see the module's text.

        Of 64 items four of the smallest and four of the largest are tried. A function that draws at
        random must draw from the generators of PyTorch, NumPy or Python; it is tried with 32
        seeds, since it may mix some batches only.

        Args:
            model, loss: functions of what `read` gives (`called`).

        Raises:
            ValueError: naming the function.
        """
        if self.collate_fn is None:  # PyTorch's puts one beside the other
            return
        cpu = torch.device("cpu")
        with traces.drawing_alike(cpu):
            looked_through = self.items(proof.rows_to_look_through(len(self.dataset)).tolist())

        def collated(items, seed=0):
            # items that cannot be copied
            with contextlib.suppress(copy.Error, TypeError, NotImplementedError):
                items = copy.deepcopy(items)  # they may be taken apart
            with traces.drawing_alike(cpu, seed):
                return self.collated(items)

        def size(item):
            return sum(part.numel() for part in collated([item]))

        by_size = sorted(looked_through, key=size)
        chosen = by_size[: _COMPARED // 2] + by_size[_COMPARED // 2 :][-_COMPARED // 2 :]
        # The largest stays the first, so that what is beside an example changes nothing that only
        # its length decides.
        order = torch.randperm(len(chosen) - 1, generator=torch.Generator().manual_seed(0)).tolist()
        items = [chosen[-1], *(chosen[place] for place in order)]
        together = collated(items)
        if not same_parts(together, collated(items)):
            raise ValueError(
                f"{self.name} must make the same batch of the same items and draws, but it changes "
                "from call to call: it must keep nothing, and draw from no generator of its own"
            )
        steady = same_parts(together, collated(items, seed=1))
        half = len(items) // 2
        for kept in ([0, 1], [*range(half)], *([[0, *range(half, len(items))]] if steady else [])):
            self._prove_kept(items, kept, together, collated)
        # Every place of the second half gets another item, so one batch a seed is enough.
        replaced = [*items[:half], *items[: len(items) - half]]
        for seed in range(1, _DRAWS):
            self._compare_kept([*range(half)], collated(items, seed), collated(replaced, seed))
        if steady:
            self._prove_alone(model, loss, together, [collated([item]) for item in items])

    def _prove_kept(self, items, kept, together, collated):
        for other in items[1:]:
            replaced = collated(
                [item if place in kept else other for place, item in enumerate(items)]
            )
            self._compare_kept(kept, together, replaced)

    def _compare_kept(self, kept, together, replaced):
        for part, found in zip(together, replaced):
            if part.shape[1:] == found.shape[1:] and not same_parts((part[kept],), (found[kept],)):
                raise ValueError(
                    f"{self.name} must make each example's tensors of this example alone, in its "
                    "place, but they change with the others in the batch; mix nothing, and keep "
                    "the order"
                )

    def _prove_alone(self, model, loss, together, alone):
        device = next(model.parameters()).device

        def losses(parts, change=lambda tensor: tensor):
            x, y = (
                part.map(change) if isinstance(part, Batch) else change(part)
                for part in (part.to(device) for part in parts)
            )
            return checks.check_losses(loss(model(x), y), len(x))

        def compare(*change):
            whole = losses(together, *change)
            return whole, torch.cat([losses(parts, *change) for parts in alone])

        with torch.no_grad(), traces.evaluating(model), traces.drawing_alike(device):
            whole, single = compare()
            # what padding adds may be little, and is more than rounding by other shapes
            floor = tolerances(whole)[1]
            self._check_alike(whole, single, min(5 * floor, max(floor, 1e-3)))
            if sum(p.numel() for p in model.parameters()) > _SMALL:
                return
            # Small weights let a padded place through by less than float32 shows. Some models
            # compute in float64 in part only, where masks may overflow, and some not at all.
            trained = [p for p in model.parameters() if p.requires_grad]
            with (
                contextlib.suppress(Exception),
                traces.in_double(model),
                traces.weights_nearby(trained),
            ):
                whole, single = compare(lambda t: t.double() if t.is_floating_point() else t)
        if whole.dtype == torch.float64 and bool((whole.isfinite() & single.isfinite()).all()):
            self._check_alike(whole, single, 1e-5)

    def _check_alike(self, whole, single, floor):
        if not torch.allclose(whole, single, rtol=floor, atol=floor, equal_nan=True):
            raise ValueError(
                f"{self.name} must leave an example's loss what it is alone, but it changes with "
                f"the examples beside it: {whole[:4].tolist()} together, {single[:4].tolist()} "
                "alone; give the model an attention_mask, and label the padding -100"
            )


def tensors_in(part: Any) -> list[torch.Tensor]:
    """The tensors of a part of a batch."""
    return list(part.tensors.values()) if isinstance(part, Batch) else [part]


def targets_in(x: Any, y: Any) -> list[torch.Tensor]:
    """The tensors of targets y that are no inputs, where the loss is given the inputs too."""
    if isinstance(x, Batch) and isinstance(y, Batch) and x.tensors.keys() < y.tensors.keys():
        return [t for name, t in y.tensors.items() if name not in x]
    return tensors_in(y)


def same_parts(ones: Any, others: Any) -> bool:
    """Whether (inputs, targets) and others hold the same bits."""
    return all(
        len(tensors_in(one)) == len(tensors_in(other))
        and all(map(same_bits, tensors_in(one), tensors_in(other)))
        for one, other in zip(ones, others)
    )


def call(model: torch.nn.Module, x: Any) -> Any:
    """What the model gives for inputs, a tensor or a nesting of them; see the module's text."""
    x = tree_of(x)
    if isinstance(x, torch.Tensor):
        return model(in_best_format(model, x))
    if isinstance(x, dict):
        taken = inspect.signature(model.forward).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            x = {name: x[name] for name in x.keys() & {each.name for each in taken}}
        return model(**x)
    return model(*x)


class Called(torch.nn.Module):
    """A model as a function of a `Batch`; its parameters are called "model.<name>" here."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Any) -> Any:
        return call(self.model, x)


class LossOfTree:
    """A loss of outputs and of tensors as they were nested, as one of outputs and a `Batch`."""

    def __init__(self, loss: Any):
        self.loss = loss

    def __call__(self, outputs: Any, y: Any) -> torch.Tensor:
        return self.loss(outputs, tree_of(y))


def called(model: torch.nn.Module, loss: Any) -> tuple[torch.nn.Module, Any]:
    """Model and loss as functions of what `Reader.read` gives."""
    return Called(model), LossOfTree(loss)
