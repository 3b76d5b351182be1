"""Checks of arguments, made before any work is done.

Each check returns the value that it was given, so that it can wrap an assignment, and otherwise
raises a ValueError that names the argument, the offending value and what is allowed.

>>> in_interval("sample_rate", 0.5, 0, 1, closed="right")
0.5
>>> in_interval("sample_rate", 1.5, 0, 1, closed="right")
Traceback (most recent call last):
    ...
ValueError: sample_rate must lie in (0, 1], got 1.5
>>> one_of("accountant", "gdp", ("pld", "rdp"))
Traceback (most recent call last):
    ...
ValueError: accountant must be one of 'pld', 'rdp', got 'gdp'
"""

import difflib
import math
import numbers
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, SupportsFloat, TypeVar

import numpy as np
import torch

_T = TypeVar("_T")
_F = TypeVar("_F", bound=SupportsFloat)
_BRACKETS = {"both": "[]", "left": "[)", "right": "(]", "neither": "()"}
_MANY = 20  # names that a message lists
#: Examples of which an account of each can be kept: 80 gigabytes for one number of each.
MOST_EXAMPLES = 10**10
_LARGEST = 2**63 - 1024  # whole number that both 64 bits and float64 hold


def flat_doubles(name: str, value: Any) -> np.ndarray:
    """The entries of a number, sequence, array or tensor as a flat float64 array."""
    value = real(name, unlabelled(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # NumPy has not all kinds of floats
        value = (value.double() if value.is_floating_point() else value).numpy()
    try:
        entries = np.asarray(value)
        # Texts, which NumPy would read as numbers; complex numbers, of which it would drop a part;
        # and objects, but for a whole number that is too large for any of its own kinds.
        if entries.dtype.kind not in "biuf" and not (
            entries.dtype.kind == "O" and is_number(value)
        ):
            raise TypeError
        return entries.astype(np.float64).ravel()
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a number or an array of numbers, got {value!r:.80}"
        ) from None


def unlabelled(value: Any) -> Any:
    """A pandas Series or DataFrame as the array of its values, in their order; all else as it is.

    Labels are not positions: `torch.as_tensor` asks for what is labelled 0, and fails where nothing
    is, as in the part of a table that a split leaves.
    """
    return (
        np.array(value.to_numpy())
        if hasattr(value, "to_numpy") and hasattr(value, "index")
        else value
    )


def in_order(name: str, value: Any, persons: Any = None) -> Any:
    """A pandas Series or DataFrame with one row for each example or person as an array in their
    order; all else as it is.

    With `persons`, their names, it goes by its labels where these are the names. Else by position,
    which only labels that count from 0 do not contradict.

    Raises:
        ValueError: for other labels, since they leave open whose number is whose.
    """
    index: Any = getattr(value, "index", None)
    if not hasattr(value, "to_numpy") or not hasattr(index, "is_monotonic_increasing"):
        return value
    values, counted = unlabelled(value), np.arange(len(index))
    places = None if persons is None else _places(index, persons)
    from_0 = index.dtype.kind in "iu" and np.array_equal(index, counted)
    if places is None and from_0:
        return values
    if places is not None and (np.array_equal(places, counted) or not from_0):
        return values[places]
    whose = "examples" if persons is None else "persons"
    raise ValueError(
        f"{name} must be in the order of the {whose}, which its labels {_some(index)} leave open: "
        "give the values in that order, "
        + (
            "by .to_numpy(), or of a table by name by .reindex(names).to_numpy()"
            if persons is None
            else "by .to_numpy(), or label them by the names of the persons "
            f"({_some(np.asarray(persons))})"
        )
    )


def _some(names):
    return ", ".join(map(str, names[:3])) + (" ..." if len(names) > 3 else "")


def _places(index, persons):
    """Where each person is in an index of pandas; None if it does not hold just their names."""
    index = index.astype(object) if hasattr(index, "categories") else index
    names = np.asarray(persons)
    if names.ndim != 1 or not index.is_unique or len(index) != len(names):
        return None
    # pandas would read texts as dates and put numbers into intervals; and wrap or round numbers
    # that are not objects.
    texts = {isinstance(each, str) for each in names.tolist()}
    if hasattr(index, "closed") or texts != {index.inferred_type == "string"}:
        return None
    index = index.astype(object) if index.dtype.kind in "iuf" else index
    try:
        found = index.get_indexer(names)
    except (TypeError, ValueError):  # names of another kind
        return None
    each_once = len(np.unique(found)) == len(found) and (found >= 0).all()
    return found if each_once else None


def real(name: str, value: _T) -> _T:
    """`value` is no tensor or array that holds anything but real numbers, each in its place."""
    if isinstance(value, torch.Tensor) and (value.is_complex() or value.layout != torch.strided):
        raise ValueError(
            f"{name} must be real numbers in a dense tensor, got {value.dtype} in {value.layout}"
        )
    if isinstance(value, np.ndarray) and (
        value.dtype.kind not in "biuf" or value.dtype.itemsize > 8
    ):
        raise ValueError(f"{name} must be an array of numbers, got one of {value.dtype}")
    return value


def tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers in a tensor, array, table or lists as a dense tensor.

    >>> tensor("x", [[1, 2]])
    tensor([[1, 2]])
    """
    value = real(name, unlabelled(value))
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    try:
        if isinstance(value, np.ndarray):
            value = np.asarray(value, order="C")  # PyTorch takes no negative strides
            if not value.flags.writeable:  # of which PyTorch warns: nothing here writes
                return real(name, _unwritten(value, dtype))
        found = torch.as_tensor(value, dtype=dtype)
        # lists would go through PyTorch's default type
        if dtype is None and isinstance(value, (list, tuple)) and found.is_floating_point():
            found = torch.as_tensor(value, dtype=torch.float64)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        raise ValueError(f"{name} must be an array of numbers, got {value!r:.80}") from None
    return real(name, found)


def _unwritten(value, dtype):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.as_tensor(value, dtype=dtype)


def device_of(*values: Any) -> torch.device | None:
    """The device of the first tensor among the values; None without one."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)


def broadcast(*tensors: torch.Tensor, names: Iterable[str] = ()) -> tuple[torch.Tensor, ...]:
    """The tensors in their common shape; with `names` a message says whose the shapes are.

    >>> [each.tolist() for each in broadcast(torch.zeros(2), torch.ones(()))]
    [[0.0, 0.0], [1.0, 1.0]]
    """
    try:
        return tuple(torch.broadcast_tensors(*tensors))
    except RuntimeError:
        shapes = [str(tuple(each.shape)) for each in tensors]
        said = ", ".join(map(" ".join, zip(names, shapes))) or " and ".join(shapes)
        raise ValueError(f"arguments must have shapes that broadcast, got {said}") from None


def columns(
    values: Mapping[str, Any], device: torch.device | str | None = None
) -> tuple[torch.Tensor, ...]:
    """Named arguments, at least one number in each, as float64 tensors of their common shape."""
    found = []
    for name, value in values.items():
        value = in_interval(name, unlabelled(value))
        found.append(torch.as_tensor(value, dtype=torch.float64, device=device))
        if not found[-1].numel():
            raise ValueError(f"{name} must hold one number at least, got {value!r}")
    return broadcast(*found, names=values)


def in_interval(
    name: str, value: _T, low: float = -math.inf, high: float = math.inf, *, closed: str = "both"
) -> _T:
    """Every entry of `value` lies between `low` and `high`; NaN never does.

    `closed` says which ends are allowed: "both", "left", "right" or "neither".
    """
    # Most values are plain numbers inside the interval, and need no array. Others come below.
    if type(value) is float and low < value < high:
        return value
    entries = flat_doubles(name, value)
    above = entries >= low if closed in ("both", "left") else entries > low
    below = entries <= high if closed in ("both", "right") else entries < high
    bad = ~(above & below)
    if bad.any():
        first, last = _BRACKETS[closed]
        wrong = float(entries[bad][0])
        text = f"{wrong:g}"
        if float(text) != wrong and (low <= float(text) <= high or float(text) in (low, high)):
            text = repr(wrong)  # rounded it would be right
        raise ValueError(f"{name} must lie in {first}{low:g}, {high:g}{last}, got {text}")
    return value


def number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, closed: str = "both"
) -> float:
    """`value` is one number (or an array scalar) between `low` and `high`; returned as float."""
    if type(value) is float and low < value < high:
        return value
    entries = flat_doubles(name, value)
    if entries.size != 1:
        raise ValueError(f"{name} must be one number, got {value!r:.80}")
    in_interval(name, entries, low, high, closed=closed)
    return float(entries[0])


def whole_number(name: str, value: Any, low: float = 0, high: float = _LARGEST) -> int:
    """`value` as int: one whole number (an int, or a float or array scalar without a fraction)."""
    if type(value) is int and low <= value <= high and abs(value) < 2**53:
        return value
    entries = flat_doubles(name, value)
    if (
        entries.size != 1
        or isinstance(value, bool)
        or not math.isfinite(entries[0])
        or entries[0] != math.floor(entries[0])
    ):
        raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
    in_interval(name, entries, low, high)
    return value if isinstance(value, int) else int(entries[0])


def seed(name: str, value: Any) -> int:
    """`value` as int: a seed, a whole number in [0, 2^1024), of which no bit is lost."""
    try:
        found = operator.index(value)
    except TypeError:
        found = int(value) if isinstance(value, float) and value.is_integer() else -1
    if isinstance(value, bool) or not 0 <= found < 2**1024:
        raise ValueError(f"{name} must be a whole number in [0, 2^1024), got {value!r:.40}")
    return found


def generator(name: str, value: _T, *others: type) -> _T:
    """`value` is a torch.Generator, or of one of the `others`."""
    if not isinstance(value, (torch.Generator, *others)):
        kinds = " or a ".join(["torch.Generator", *(kind.__name__ for kind in others)])
        raise ValueError(f"{name} must be a {kinds}, got {value!r:.40}")
    return value


def one_of(name: str, value: _T, allowed: Iterable[_T]) -> _T:
    """`value` is one of the `allowed` names, of which a message lists all, or the nearest three."""
    allowed = tuple(allowed)
    if value not in allowed:
        if len(allowed) > _MANY and isinstance(value, str):
            nearest = difflib.get_close_matches(value, map(str, allowed), n=3) or allowed[:3]
            raise ValueError(
                f"{name} must be one of {len(allowed)} names, such as "
                f"{', '.join(map(repr, nearest))}, got {value!r:.80}"
            )
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r:.80}"
        )
    return value


def device(name: str, value: Any) -> torch.device:
    """`value` as a device that PyTorch has here."""
    try:
        torch.empty(0, device=value)
        return torch.device(value)
    except (AssertionError, RuntimeError, TypeError):
        raise ValueError(
            f"{name} must be a device that PyTorch has here, such as 'cpu', got {value!r:.80}"
        ) from None


def unit(name: str, value: Any) -> str:
    """`value` is a word for what one example is."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a word such as 'example' or 'patient', got {value!r}")
    return value


def same_length(**arrays: Sized) -> None:
    """All the named arrays have the same length."""
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"{' and '.join(lengths)} must have the same length, but {said}")


def entry(state: Any, name: str) -> Any:
    """What `state`, a dict, holds under this name."""
    try:
        return state[name]
    except (IndexError, KeyError, TypeError):
        raise ValueError(f"state must be a dict with {name}, got {state!r:.200}") from None


def tensor_entry(state: Any, name: str) -> torch.Tensor:
    """The tensor that `state` holds under this name."""
    found = entry(state, name)
    try:
        return torch.as_tensor(found)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"state must hold a tensor as {name}, got {found!r:.200}") from None


def is_number(value: object) -> bool:
    """True for a plain number, false for an array or tensor."""
    return isinstance(value, numbers.Real)


def as_given(result: _F, *given: object) -> float | _F:
    """The result for what was given: a float if all of that are plain numbers, else the tensor."""
    return float(result) if all(map(is_number, given)) else result


def entries(*given: Any) -> Iterator[Any]:
    """What was given, lists replaced by their entries: for `as_given`, where a list is one number.

    >>> (
    ...     as_given(np.float64(3.0), *entries([1.0, 2.0], 5)),
    ...     as_given(np.ones(2), *entries([[1.0, 2.0]], 5)),
    ... )
    (3.0, array([1., 1.]))
    """
    for each in given:
        yield from each if isinstance(each, (list, tuple)) else () if each is None else (each,)
