"""A data set of `transformers` as persons: rows are read and collated when their person is sampled.

>>> texts = [{"input_ids": [1, 2], "labels": 0, "who": "a"}, {"input_ids": [3, 4], "labels": 1, "who": "a"}]
>>> from transformers import default_data_collator
>>> rows = Rows(texts, default_data_collator, owners=torch.tensor([0, 0]), persons=["a"], at_most=2, private=("who",))
>>> x, y = rows.rows(torch.tensor([0]))
>>> x["input_ids"].tolist(), y["labels"].tolist(), x["present"].tolist()
([[[1, 2], [3, 4]]], [[0, 1]], [[True, True]])
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dpcompanion.gradients import proof, traces
from dpcompanion.gradients.tensors import tolerances
from dpcompanion.gradients.batches import Batch
from dpcompanion.training.checkpoints import digest_of
from dpcompanion.training.people import PRESENT, OfPersons, PersonLoss, PersonNetwork, drawn_rows, grouped


def column_of(dataset: Any, name: str) -> list[Any]:
    """A column of a data set, by its rows' entries of that name.

    Raises:
        ValueError: where a row has none.
    """
    if name in getattr(dataset, "column_names", ()):
        return list(dataset[name])
    found = []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, Mapping) or name not in item:
            raise ValueError(f"train_dataset must have a column {name!r} in every row, but row {place} has none")
        value = item[name]
        found.append(value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value)
    return found


class Rows(OfPersons):
    """The rows of persons, collated as the Trainer would; each row is a person by default.

    Args:
        dataset: a map-style data set whose items are mappings.
        collate: a collator: list of items -> mapping of tensors with the rows first, "labels" among them.
        owners: (rows,) int64, whose each row is.
        persons: the names of the persons.
        at_most: rows of a person in a step.
        combine: "mean" or "sum" of the rows' losses.
        private: columns that the collator is not given.
        prepare: what is added to a collated batch, such as a decoder's inputs.
        device: where batches go.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        *,
        owners: torch.Tensor,
        persons: Any,
        at_most: int = 1,
        combine: str = "mean",
        private: Sequence[str] = (),
        prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        device: str | torch.device = "cpu",
    ):
        self.dataset, self.collate, self.private, self.prepare = dataset, collate, tuple(private), prepare
        self.owners, self.persons, self.at_most, self.combine = owners, persons, at_most, combine
        self.device = torch.device(device)
        self.counts, self._order, self._starts = grouped(owners, len(persons))

    def to(self, device: str | torch.device) -> "Rows":
        """The same, given on a device."""
        return self._moved(device=torch.device(device))

    def collated(self, places: Sequence[int]) -> tuple[Batch, Batch]:
        """(inputs, labels) of some rows, one at least."""
        items = [self.dataset[place] for place in places]
        if not all(isinstance(item, Mapping) for item in items):
            raise ValueError(f"train_dataset must have items that are mappings, got {type(items[0]).__name__}")
        batch = dict(self.collate([{k: v for k, v in item.items() if k not in self.private} for item in items]))
        if self.prepare is not None:
            batch = self.prepare(batch)
        if "labels" not in batch:
            raise ValueError(f"train_dataset must have 'labels', got {', '.join(map(str, sorted(batch)))}")
        for name, t in batch.items():
            if not isinstance(t, torch.Tensor) or not t.ndim or len(t) != len(items):
                got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise ValueError(
                    f"data_collator must return tensors with one entry a row, {len(items)} here, but {name!r} is {got}"
                )
        labels = batch.pop("labels")
        return Batch(**batch), Batch(labels=labels)

    def rows(self, indices: torch.Tensor) -> tuple[Batch, Batch]:
        """See `OfPersons.rows`."""
        if not len(indices):
            x, y = self.probe
            return x[:0], y[:0]
        places, present = drawn_rows(indices.cpu(), self.counts, self._order, self._starts, self.at_most)
        wanted, where = places.unique(return_inverse=True)
        parts = self.collated(wanted.tolist())
        x, y = (Batch._of({k: t[where] for k, t in part.tensors.items()} | {PRESENT: present}) for part in parts)
        return x.to(self.device), y.to(self.device)

    @functools.cached_property
    def digest(self) -> str:
        """What a checkpoint knows these data by: whose rows they are, and 64 persons' labels."""
        return digest_of(self.owners, torch.tensor([self.at_most, len(self)]), self.probe[1]["labels"].cpu())

    def seen(self, model: torch.nn.Module, loss: Any) -> tuple[torch.nn.Module, Any]:
        """Model and loss, (logits, batch) -> (rows,), as functions of persons."""
        return PersonNetwork(model, logits_of), PersonLoss(loss, self.combine)


def logits_of(model: torch.nn.Module, batch: Batch) -> Any:
    """What the model gives for a batch of rows."""
    return model(**batch.tensors).logits


def check_padding(rows: Rows, model: torch.nn.Module, loss: Any) -> None:
    """Refuse a collator by which a row's loss depends on the rows beside it, as padding that the model does not know of
    does. Of 64 rows the four shortest and the four longest alone are tried; of a collator that draws at random nothing
    can be said.

    Raises:
        ValueError: with the losses together and alone.
    """
    places = proof.rows_to_look_through(len(rows.dataset)).tolist()
    device = next(model.parameters()).device

    def losses(chosen):
        x, y = (part.to(device) for part in rows.collated(chosen))
        return loss(logits_of(model, x), y)

    def size(place):
        return sum(t.numel() for part in rows.collated([place]) for t in part.tensors.values())

    with torch.no_grad(), traces.evaluating(model), torch.random.fork_rng(devices=[]):
        places = sorted(places, key=size)
        places = places[:4] + places[4:][-4:]
        together, again = losses(places), losses(places)
        if not torch.equal(torch.nan_to_num(together), torch.nan_to_num(again)):
            return
        alone = torch.cat([losses([place]) for place in places])
    floor = tolerances(together)[1]  # what padding adds may be little, and is more than rounding by other shapes
    floor = min(5 * floor, max(floor, 1e-3))
    if not torch.allclose(together, alone, rtol=floor, atol=floor, equal_nan=True):
        raise ValueError(
            "data_collator must leave a row's loss what it is alone, but it changes with the rows beside it: "
            f"{together[:4].tolist()} together, {alone[:4].tolist()} alone; give the model an attention_mask, and "
            "label the padding -100"
        )
