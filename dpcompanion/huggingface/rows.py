"""A data set of `transformers` as rows: its columns, and the Trainer's collator as a `collate_fn`.

>>> texts = [
...     {"input_ids": [1, 2], "labels": 0, "who": "a"},
...     {"input_ids": [3, 4], "labels": 1, "who": "a"},
... ]
>>> from transformers import default_data_collator
>>> column_of(texts, "who")
['a', 'a']
>>> collator_of(default_data_collator, private=("who",))(texts)["labels"].tolist()
[0, 1]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


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
            raise ValueError(
                f"train_dataset must have a column {name!r} in every row, but row {place} has none"
            )
        value = item[name]
        found.append(value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value)
    return found


def collator_of(
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    private: Sequence[str] = (),
    model: Any = None,
) -> Callable[[list[Any]], dict[str, Any]]:
    """A collator of the Trainer's, list of items -> mapping, that is not given some columns.

    Args:
        collate: the collator.
        private: the columns.
        model: as in `with_decoder_inputs`.

    Raises:
        ValueError: when called, for items that are no mappings and batches without labels.
    """

    def collated(items):
        if not all(isinstance(item, Mapping) for item in items):
            raise ValueError(
                f"train_dataset must have items that are mappings, got {type(items[0]).__name__}"
            )
        batch = dict(
            collate([{k: v for k, v in item.items() if k not in private} for item in items])
        )
        if "labels" not in batch:
            raise ValueError(
                f"train_dataset must have 'labels', got {', '.join(map(str, sorted(batch)))}"
            )
        return with_decoder_inputs(batch, model)

    return collated


def with_decoder_inputs(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A batch with the decoder's inputs: made of the labels where there are none, as the model
    itself would.

    Args:
        batch: with "labels".
        model: an encoder with a decoder; None or any other model for none.
    """
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    shift = getattr(own, "prepare_decoder_input_ids_from_labels", None)
    if (
        shift is None
        or "decoder_input_ids" in batch
        or not getattr(getattr(own, "config", None), "is_encoder_decoder", False)
    ):
        return dict(batch)
    labels = batch["labels"]
    return {**batch, "decoder_input_ids": shift(labels=labels).to(labels.device)}
