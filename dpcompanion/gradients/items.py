"""What must hold of a data set before a run begins: each item is one example's own.

An example's gradient is bounded by its clip norm only if the item is made of that example alone. So
a data set is tried out: it holds each item once (`check_distinct`), gives items that are asked for
together in their order, and unmixed (`check_batched`), and gives an item that does not depend on
those read before it (`check_forgets_items`). What a transform draws at random is no fault.

>>> data = torch.utils.data.TensorDataset(torch.eye(3), torch.arange(3))
>>> check_distinct(torch.utils.data.Subset(data, [0, 2, 2]))
Traceback (most recent call last):
    ...
ValueError: data must hold each item once, but item 2 is item 1 again: ...
"""

import contextlib
import copy
from collections.abc import Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset

from dpcompanion.gradients.traces import drawing_alike

# how often an item must have changed, and only after another, before that is no chance
_ROUNDS, _READINGS = 8, 20
# Seeds with which items asked for together are read: a data set that mixes them with probability p
# goes unseen with probability (1 - p)^16, 0.3% for p = 0.3.
_DRAWS = 16
# pairs of readings by which running statistics are noticed: those that give the direction in which
# an item follows what was read before it, and those that all must confirm it, 2^-14 by chance
_PAIRS = 6, 14


def same_items(a, b):
    """Whether two items or batches, tensors in any nesting, are equal; of what cannot be compared
    it is said of nothing but itself.
    """
    if torch.is_tensor(a) and torch.is_tensor(b):
        plain = a.layout == b.layout == torch.strided
        return (
            same_bits(a, b)
            if plain
            else a.shape == b.shape and same_bits(a.to_dense(), b.to_dense())
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_items(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_items, a, b))
    try:
        return bool(np.array_equal(cast(Any, a), b))
    except (TypeError, ValueError, NotImplementedError):  # a sparse row, for instance
        return a is b


def check_distinct(dataset, name="data", owners=None):
    """Refuse a data set that holds an item several times, as by oversampling: one example would
    count as several, and move a sum by several clip norms. Where each item has an owner, one of
    `owners` (rows,), refuse an item of several.

    Seen are parts of data sets (`Subset`), their concatenations, and parts and concatenations of
    these; items of other data sets are taken for different ones.
    """
    if type(dataset) not in (Subset, ConcatDataset):
        return
    sets, places = _sources(dataset, np.arange(len(dataset)))
    _, sets = np.unique(sets, return_inverse=True)
    _, first, which = np.unique(
        sets * (1 + places.max(initial=0)) + places, return_index=True, return_inverse=True
    )
    again = np.flatnonzero(first[which] != np.arange(len(which)))
    if owners is not None:
        shared = again[np.asarray(owners[again] != owners[first[which[again]]])]
        if len(shared):
            raise ValueError(
                f"{name} must give each row to one person, but row {shared[0]} is row "
                f"{first[which[shared[0]]]} again, and another's: clipping one owner's gradient "
                "does not bound what it adds to the other's"
            )
        return
    if len(again):
        raise ValueError(
            f"{name} must hold each item once, but item {again[0]} is item "
            f"{first[which[again[0]]]} again: what is one example in truth would count as several, "
            "and move a sum by several clip norms; or say by people= and at_most= whose each item "
            "is"
        )


def _sources(dataset, places):
    """In which data set the items at these places are, and where there: two arrays."""
    if isinstance(dataset, Sized):  # places may count from the end
        places = places % max(len(dataset), 1)
    if type(dataset) is Subset:
        return _sources(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[places])
    sets = np.full(len(places), id(dataset))
    if type(dataset) is ConcatDataset:
        ends = dataset.cumulative_sizes
        which = np.searchsorted(ends, places, side="right")
        for k, (part, begin) in enumerate(zip(dataset.datasets, (0, *ends))):
            here = which == k
            sets[here], places[here] = _sources(part, places[here] - begin)
    return sets, places


def check_batched(dataset, name="data"):
    """Where a data set gives several items at once (`__getitems__`), they come in the order in
    which they were asked for: each gradient is clipped to the norm of the example in its place.

    Refused is what stands at another's place, and an item that changes with what is asked for
    beside it. What a transform draws at random is not compared.
    """
    if not hasattr(dataset, "__getitems__"):
        return
    if (
        getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
        and len(dataset) > 1
    ):
        _check_order(dataset, name)
    if len(dataset) > 2 and _changes_beside_another(dataset):
        raise ValueError(
            f"{name} must give an item that is made of one example, but of its __getitems__ item 0 "
            "changes with the item that is asked for beside it, as by mixup or by a mean over the "
            "batch: then no clip norm bounds what one of them contributes"
        )


def _check_order(dataset, name):
    """What `__getitems__` gives stands at the place of what `__getitem__` gives."""
    places = [
        int(place)
        for place in torch.linspace(len(dataset) - 1, 0, min(8, len(dataset)), dtype=torch.float64)
    ]

    def parts(item):
        return item if isinstance(item, (tuple, list)) else (item,)

    def alone(seed):
        with drawing_alike(torch.device("cpu"), seed):
            return [parts(dataset[i]) for i in places]

    with drawing_alike(torch.device("cpu")):
        together = list(map(parts, dataset.__getitems__(list(places))))
    if len(together) != len(places):
        raise ValueError(
            f"{name} must give as many items as it is asked for, {len(places)}, got {len(together)}"
        )
    items, twins = alone(0), alone(1)
    for number, found in enumerate(together):
        for which, (got, own, twin) in enumerate(zip(found, items[number], twins[number])):
            others = (item[which] for item in items if which < len(item))
            if (
                same_items(own, twin)
                and not same_items(got, own)
                and any(same_items(got, other) for other in others)
            ):
                raise ValueError(
                    f"{name} must give items in the order in which it is asked for them, but its "
                    "__getitems__ gives others than its __getitem__"
                )


def _changes_beside_another(dataset):
    """Whether item 0 is another one beside the last item than beside the one before, and the same
    in each again.
    """
    # what mixes at random may leave it out
    return any(_changes_beside(dataset, seed) for seed in range(_DRAWS))


def _changes_beside(dataset, seed):
    def read(other):
        with drawing_alike(torch.device("cpu"), seed):
            return copy.deepcopy(dataset.__getitems__([0, other])[0])

    try:
        one, two = read(len(dataset) - 1), read(len(dataset) - 2)
        if same_items(one, two) or _shapes(one) != _shapes(two):  # padded to the longest
            return False
        again = [(read(len(dataset) - 1), read(len(dataset) - 2)) for _ in range(_READINGS)]
    except (copy.Error, TypeError, KeyError, NotImplementedError):
        return False  # no list of items, or items that cannot be copied
    return all(same_items(one, a) and same_items(two, b) for a, b in again)


def _shapes(item):
    return [tuple(getattr(leaf, "shape", ())) for leaf in tree_leaves(item)]


def check_forgets_items(dataset, name="data"):
    """An item does not depend on which were read before it, as that of a data set which mixes it
    with the last one.

    What changes at random, from generators of its own too, changes when one item is read again and
    again.

    Raises:
        ValueError: naming what was seen.
    """
    if len(dataset) < 2:
        return
    seen = False
    # items that cannot be copied
    with contextlib.suppress(copy.Error, TypeError, NotImplementedError):
        seen = _depends_on_the_last(dataset)
    if seen:
        raise ValueError(
            f"{name} must give an item that is made of one example, but its item 0 changes when "
            f"item {len(dataset) - 1} is read before it, as in a data set that mixes examples or "
            "keeps statistics of them: then no clip norm bounds what one of them contributes"
        )


def _depends_on_the_last(dataset):
    for rounds in range(_ROUNDS):
        changes = _changes_after_another(dataset, 3 if not rounds else _READINGS)
        if changes is None:  # it stays what it is, as most do
            return False
        if not changes:
            return _follows_another(dataset)
    return True


def _changes_after_another(dataset, readings):
    """Whether item 0 changes only after another one is read; None where it does not change."""

    def read(index):
        with drawing_alike(torch.device("cpu")):
            return copy.deepcopy(dataset[index])

    read(0)
    settled = read(0)
    if not all(same_items(settled, read(0)) for _ in range(readings)):
        return False
    read(len(dataset) - 1)
    return None if same_items(settled, read(0)) else True


def _follows_another(dataset):
    """Whether item 0 changes whenever it is read, and otherwise after the last item than after
    itself, as with running statistics: in one direction, pair after pair.
    """

    def read(index):
        with drawing_alike(torch.device("cpu")):
            return _numbers(dataset[index])

    def after(index):
        for _ in range(2):
            read(index)
        return read(0)

    others = 0, len(dataset) - 1
    differences = []
    for k in range(_PAIRS[0] + _PAIRS[1]):
        # each second pair the other way round, so that a drift has no direction
        found = {index: after(index) for index in others[:: -1 if k % 2 else 1]}
        if found[0].shape != found[others[1]].shape:
            return False
        differences.append(np.nan_to_num(found[others[1]] - found[0]))
    if len({d.shape for d in differences}) > 1:
        return False
    direction = np.mean(differences[: _PAIRS[0]], axis=0)
    return all(float((d * direction).sum()) > 0 for d in differences[_PAIRS[0] :])


def _numbers(item):
    """The numbers of an item, one after the other."""
    found = [np.zeros(0)]
    for leaf in tree_leaves(item):
        if torch.is_tensor(leaf):
            plain = leaf.layout == torch.strided and not leaf.is_complex()
            leaf = leaf.detach().cpu().double().numpy() if plain else None
        leaf = np.asarray(leaf)
        if leaf.dtype.kind in "biuf":
            found.append(leaf.astype(np.float64).ravel())
    return np.concatenate(found)


def same_bits(one, other):
    """Two tensors of one type and shape hold the same bits, wherever they lie; nan is itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if (
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    ):
        return True
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (one, other.to(one.device)))
    return torch.equal(one, other)
