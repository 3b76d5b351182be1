"""How records and pieces lie on the disk: fields as JSON, arrays beside them, both under a sha256.

The JSON file comes last and says which arrays are its own, so that both are written whole or not at
all, however their writer ends; what they replace is removed after that. The JSON file holds a
sha256 of its own fields, the name of the NPZ file one of the arrays, and both are checked when they
are read. (Files of earlier versions have arrays without a sha256 in the name, and none of
themselves; pieces need one.) NaN and infinities survive as `{"float": "nan"}`; a mean over seeds as
`{"mean": ..., "sd": ..., "n": ...}`.
"""

import contextlib
import dataclasses
import glob
import hashlib
import io
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dpcompanion import _files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class MeanSD(NamedTuple):
    """A mean over n runs and the standard deviation between them; NaN when one run cannot tell."""

    mean: float
    sd: float
    n: int


def mean_and_sd(values: Iterable[float] | torch.Tensor) -> MeanSD:
    """Mean and sample standard deviation (ddof 1) over seeds.

    >>> mean_and_sd([96.0, 97.0, 98.0])
    MeanSD(mean=97.0, sd=1.0, n=3)
    >>> mean_and_sd([96.6]).sd
    nan
    """
    numbers = np.asarray(list(values), dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0:
        raise ValueError(
            "values must be one number or more for each seed, got an array of shape "
            f"{numbers.shape}"
        )
    # math.fsum is exact, so that the mean does not depend on how numpy splits its sum.
    mean = math.fsum(numbers) / numbers.size
    sd = (
        math.sqrt(math.fsum((numbers - mean) ** 2) / (numbers.size - 1))
        if numbers.size > 1
        else math.nan
    )
    return MeanSD(mean, sd, numbers.size)


def hash_of(value: Any) -> str:
    """A sha256 of anything that a record can hold, the same on every machine.

    >>> hash_of({"b": 1, "a": (1, 2)}) == hash_of({"a": [1, 2], "b": 1})
    True
    """
    return hashlib.sha256(to_json(value, sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> Any:
    """The value as JSON's own types (and MeanSD), with numbers from numpy and torch unpacked."""
    if isinstance(value, MeanSD):
        return MeanSD(float(value.mean), float(value.sd), int(value.n))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"the keys of a record must be strings, got {list(value)!r}")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise ValueError(f"a record holds numbers, strings, lists and dicts, got {value!r}")


def to_json(value: Any, **layout: Any) -> str:
    """A value as JSON text; `layout` goes to `json.dumps`."""
    return json.dumps(_encode(plain(value)), allow_nan=False, ensure_ascii=False, **layout)


def _encode(value: Any) -> Any:
    if isinstance(value, MeanSD):
        return {key: _encode(item) for key, item in value._asdict().items()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _decode(fields: dict[str, Any]) -> Any:
    if fields.keys() == {"float"} and fields["float"] in ("nan", "inf", "-inf"):
        return float(fields["float"])
    if fields.keys() == {"mean", "sd", "n"} and all(
        type(value) in (int, float) for value in fields.values()
    ):
        return MeanSD(**fields)
    return fields


def read_json(path: pathlib.Path, *, sealed: bool = False) -> Any:
    """The fields of a JSON file without their sha256, which must be theirs; ValueError with the
    file's name if not.

    Where `sealed`, they must have one: a file whose sha256 has lost its name would pass for one of
    earlier versions.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        fields = json.loads(
            path.read_text(encoding="utf-8"), object_hook=_decode, parse_constant=refuse
        )
        if sealed and not (isinstance(fields, dict) and "sha256" in fields):
            raise ValueError("it has no sha256 of its values")
        if (
            isinstance(fields, dict)
            and "sha256" in fields
            and fields.pop("sha256") != hash_of(fields)
        ):
            raise ValueError("its values are not those that were written")
        return fields
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_json(path: pathlib.Path, fields: dict[str, Any], **layout: Any) -> None:
    """Write fields in one step, under their sha256; arrays stay as they are."""
    whole = {"sha256": hash_of(fields), **fields}
    _files.replace(path, (to_json(whole, **layout) + "\n").encode())


def read_whole(path: pathlib.Path, *, sealed: bool = False) -> tuple[Any, dict[str, np.ndarray]]:
    """The fields of a JSON file and the arrays that they name; ValueError for what is damaged or
    missing. `sealed` as in `read_json`.
    """
    while True:
        before = _identity(path)
        fields = read_json(path, sealed=sealed)
        try:
            return fields, _read_arrays(
                path, fields.get("arrays") if isinstance(fields, dict) else None
            )
        except ValueError:
            if _identity(path) == before:  # otherwise another process has replaced both meanwhile
                raise


def _identity(path: pathlib.Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


def write_whole(
    path: pathlib.Path, fields: dict[str, Any], arrays: Mapping[str, np.ndarray], **layout: Any
) -> None:
    """Write fields as JSON, with what names their arrays, and the arrays, so that a reader finds
    the old or the new.
    """
    content = _packed(arrays)
    fields["arrays"] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent) as alone:
        if content is not None:
            sha256 = hashlib.sha256(content).hexdigest()
            fields["arrays"] = {"file": f"{path.stem}.{sha256[:16]}.npz", "sha256": sha256}
            _files.replace(path.with_name(fields["arrays"]["file"]), content)
        write_json(path, fields, **layout)
        for file in path.parent.glob(f"{glob.escape(path.stem)}.*npz"):
            # Where nobody can be locked out, young arrays may belong to a record being written.
            if (
                _is_arrays_of(path, file.name)
                and file.name != fields["arrays"].get("file")
                and (alone or time.time() - file.stat().st_mtime > 3600)
            ):
                file.unlink(missing_ok=True)
        _files.remove_stale(path.with_suffix(""))


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[bool]:
    """Keep other writers out of a folder, in this and other processes and containers; False where
    that cannot be.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:  # a file system without locks for folders
            locked = False
        yield locked
    finally:
        os.close(handle)  # unlocks; so does the end of the process, however it ends


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes | None:
    """Arrays as the content of an NPZ file; None where there are none."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"arrays must hold numbers or strings, but {name} holds objects")
    if not arrays:
        return None
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]: none is called `allow_pickle`
    return buffer.getvalue()


def _is_arrays_of(path: pathlib.Path, name: str) -> bool:
    """Whether a file of this name may hold the arrays of the JSON file at `path`."""
    return re.fullmatch(re.escape(path.stem) + r"(\.[0-9a-f]{16})?\.npz", name) is not None


def _read_arrays(path: pathlib.Path, about: Any) -> dict[str, np.ndarray]:
    if not about:
        return {}
    if (
        not isinstance(about, dict)
        or about.keys() != {"file", "sha256"}
        or not _is_arrays_of(path, str(about["file"]))
    ):
        raise ValueError(
            f"{path} is damaged: its arrays must lie in {path.stem}.npz or {path.stem}.(sha256).npz"
        )
    file = path.with_name(about["file"])
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: {path.name} keeps its arrays there") from None
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise ValueError(f"{file} holds other arrays than {path.name} was written with")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
