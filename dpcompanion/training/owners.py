"""Whose each row is: names of any kind as persons, and columns of a table as tensors of rows.

Names are compared by value, so "Ann" is one person wherever the text comes from: a list, an array,
a pandas column or a categorical. What has no value of its own (an object that equals itself alone)
would make a person of every row, and is refused; so are missing names, and names of several types,
of which equal ones might be meant for one person.

>>> names, owners = owners_of(np.array(["b", "a", "b"], dtype=object), 3)
>>> names.tolist(), owners.tolist()
(['a', 'b'], [1, 0, 1])
"""

import enum
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpcompanion import _checks

_SEVERAL = (
    "{} must name one person a row, got a row with several: what one owner's clipped gradient "
    "hides is not what the others change; give each row to one person"
)

# From 2^53 on, or 2^24 in single precision, one float stands for several whole numbers.
_TOO_LARGE = (
    "{} must be whole numbers, or of another type, got a number with a fraction or one that is too "
    "large for its type of float"
)


def rows_of(name: str, given: Any) -> torch.Tensor:
    """A table's column or columns as a tensor with the rows first: tensors as they are, arrays and
    pandas objects in their own precision and, where they can be, without a copy, lists as
    `torch.as_tensor` takes them.

    Raises:
        ValueError: for what is not an array of numbers.

    >>> rows_of("x", np.ones((2, 3))).dtype, rows_of("y", [0, 1]).dtype
    (torch.float64, torch.int64)
    """
    if isinstance(given, torch.Tensor):
        return given
    try:
        given = _checks.unlabelled(given)
        if not is_array(given) and not (len(given) and is_array(given[0])):
            return torch.as_tensor(given)
        values = np.asarray(given)
        # columns of several types, or of one whose entries may be missing
        if values.dtype.kind == "O":
            values = np.array(values.tolist())
        if values.dtype.kind not in "biuf" or np.ma.is_masked(given):
            raise TypeError
        return torch.as_tensor(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError, RuntimeError, LookupError):
        kind = getattr(given, "dtype", type(given).__name__)
        raise ValueError(
            f"{name} must be a tensor or an array of numbers, none missing, got {kind}"
        ) from None


def is_array(given: Any) -> bool:
    """Whether this is a tensor, an array, or a column or table of pandas and the like."""
    return hasattr(given, "__array__")


def owners_of(people: Any, rows: int, persons: Any = None) -> tuple[np.ndarray, torch.Tensor]:
    """(names (n,), whose each row is as an index of these (rows,) int64).

    Names without `persons` are sorted, or in the order in which they come first if they have no
    order.

    Raises:
        ValueError: for a row with no person or several, for `persons` that are not distinct or lack
            one.
    """
    names, owners = _coded("people", people)
    if len(owners) != rows:
        raise ValueError(
            f"people must name a person for each of the {rows} rows, got {len(owners)}"
        )
    if persons is None:
        if not rows:
            raise ValueError("people must name one person at least, got no row; or give persons")
        try:
            order = sorted(range(len(names)), key=names.__getitem__)
        except TypeError:
            order = list(range(len(names)))
        return _array([names[place] for place in order]), torch.from_numpy(
            np.argsort(order)[owners]
        )
    wanted, places = _coded("persons", persons)
    if not wanted or len(wanted) != len(places):
        raise ValueError(
            f"persons must be distinct, one at least, got {len(places)} of which some are alike"
        )
    place_of = {wanted[code]: place for place, code in enumerate(places)}
    for each in names:
        if each not in place_of:
            raise ValueError(
                f"persons must hold every name in people, of the same type, but lacks {each!r}"
            )
    found = np.array([place_of[each] for each in names], dtype=np.int64)
    return _array([wanted[code] for code in places]), torch.from_numpy(found[owners])


def _coded(name, values) -> tuple[list[Any], np.ndarray]:
    """(distinct names, what each entry is as an index of these, int64)."""
    values = _array_of(name, values)
    if isinstance(values, (str, bytes, Mapping)):
        raise ValueError(f"{name} must name one person a row, got a {type(values).__name__}")
    if not isinstance(values, np.ndarray):
        try:
            values = list(values)
        except TypeError:
            raise ValueError(f"{name} must name one person a row, got {values!r:.80}") from None
    elif values.ndim != 1:
        raise ValueError(
            f"{name} must name one person a row, shape (rows,), got shape {values.shape}; a row "
            "with several owners must be given to one of them"
        )
    elif values.dtype.kind == "f" and (np.abs(values) >= _most(values.dtype)).any():
        raise ValueError(_TOO_LARGE.format(name))
    elif values.dtype.kind in "biu" and not np.ma.isMaskedArray(values):
        values = values.astype(np.int64) if values.dtype.kind == "b" else values
        distinct, codes = np.unique(values, return_inverse=True)
        return distinct.tolist(), codes.astype(np.int64)
    else:
        values = list(values) if values.dtype.kind in "mM" else values.tolist()
    names = _of_one_type(name, [_scalar(name, each) for each in values])
    seen: dict[Any, int] = {}
    codes = np.fromiter(
        (seen.setdefault(each, len(seen)) for each in names), dtype=np.int64, count=len(names)
    )
    return list(seen), codes


def _array_of(name, values):
    """`values` without labels, and as an array if they are a tensor."""
    if not isinstance(values, torch.Tensor):
        return _checks.unlabelled(values)
    values = _checks.real(name, values).detach().cpu()
    # NumPy has no bfloat16, which holds whole numbers up to 256
    if values.dtype == torch.bfloat16:
        if (values.abs() >= 256).any():
            raise ValueError(_TOO_LARGE.format(name))
        values = values.float()
    return values.numpy()


def _scalar(name, value):
    """A tensor or an array of one name as that name; a float keeps its type, which says how far it
    tells whole numbers apart.
    """
    if not isinstance(value, (torch.Tensor, np.ndarray)) or value.ndim:
        return value
    value = _array_of(name, value)
    return value[()] if value.dtype.kind == "f" else value.item()


def _of_one_type(name, values):
    """Names of one type that are compared by value; numbers as ints."""
    if any(
        isinstance(each, (list, tuple, set, frozenset, np.ndarray, torch.Tensor)) for each in values
    ):
        raise ValueError(_SEVERAL.format(name))
    if any(map(_missing, values)):
        raise ValueError(
            f"{name} must name a person for each row, none missing, got a row without one"
        )
    if all(isinstance(each, str) for each in values):
        return list(map(str, values))
    if all(isinstance(each, (numbers.Real, np.bool_)) for each in values):
        if all(map(_whole, values)):
            return list(map(int, values))
        raise ValueError(_TOO_LARGE.format(name))
    kinds = {type(each) for each in values}
    if len(kinds) > 1:
        said = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"{name} must be names of one type, such as all numbers or all texts, got {said}"
        )
    kind = kinds.pop()
    by_identity = kind.__eq__ is object.__eq__ and not issubclass(kind, enum.Enum)
    if kind.__hash__ in (None, object.__hash__) or by_identity:
        raise ValueError(
            f"{name} must be names that are hashable and compared by value, got a {kind.__name__} "
            "a row"
        )
    return values


def _most(kind):
    """The least whole number that shares its float of this type with another."""
    return min(2 / float(np.finfo(kind).eps), 2.0**53)


def _whole(value):
    """Whether a number is a whole one, and no other has the same float."""
    if isinstance(value, (numbers.Integral, np.bool_)):
        return True
    kind = type(value) if isinstance(value, np.floating) else np.float64
    return value % 1 == 0 and abs(value) < _most(kind)


def _missing(value):
    try:
        return value is None or not value == value
    except (TypeError, ValueError):  # pandas.NA
        return True


def _array(names):
    found = np.array(names) if isinstance(names[0], (str, int)) else np.empty(0)
    if found.dtype.kind not in "iuU":
        found = np.empty(len(names), dtype=object)
        found[:] = names
    return found
