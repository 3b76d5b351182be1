"""`load`, and what it gives: `Dataset`; texts as tokens."""

import dataclasses
import os
import pathlib
import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion._types import State
from dpcompanion.data.facts import HOW_TO_GET, PUBLIC_MOMENTS, UTKFACE_RACES
from dpcompanion.data.files import digest_of, download_files, select_split
from dpcompanion.data.sets import SETS


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """One split of one data set.

    Attributes:
        name, split: what was asked for.
        features: a tensor, (n, channels, height, width) or (n, columns); for text a tuple of n
            strings.
        labels: (n,) int64.
        classes: the name of each class number; empty where the label is a plain number (ages).
        columns: the name of each column of a table, empty otherwise.
        categories: for a column of codes, the value that each code stands for.
        attributes: further (n,) tensors, such as `age`, `gender` and `race` of utkface.
        source: which files it came from.
        sha256: of the raw features, labels and attributes of this split, whatever the dtype asked
            for.
        verified: whether the files were checked against known checksums.
    """

    name: str
    split: str
    features: torch.Tensor | tuple
    labels: torch.Tensor
    classes: tuple
    columns: tuple
    categories: dict
    attributes: dict
    source: str
    sha256: str
    verified: bool

    def __len__(self):
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def normalized(self) -> "Dataset":
        """The same split with (x - mean) / sd a channel, by public constants (`PUBLIC_MOMENTS`).

        Raises ValueError for a set that has none: statistics of private data would have to be paid
        for.

        >>> round(load("mnist-5k", split="train").normalized().features.min().item(), 4)
        -0.4242
        """
        if self.name not in PUBLIC_MOMENTS or isinstance(self.features, tuple):
            raise ValueError(
                "normalized() needs public constants, which exist for "
                f"{', '.join(PUBLIC_MOMENTS)}, got {self.name!r}"
            )
        mean, sd = (
            torch.tensor(m, dtype=self.features.dtype)[:, None, None]
            for m in PUBLIC_MOMENTS[self.name]
        )
        return dataclasses.replace(self, features=(self.features - mean) / sd)

    def provenance(self) -> State:
        """What a record says about its data: name, split, examples, source, sha256, verified."""
        return {
            "name": self.name,
            "split": self.split,
            "examples": len(self),
            "source": self.source,
            "sha256": self.sha256,
            "verified": self.verified,
        }


def data_folder(root: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The folder of data sets: `root`, else `DPCOMPANION_DATA`, else `~/.cache/dpcompanion`."""
    return pathlib.Path(
        root or os.environ.get("DPCOMPANION_DATA") or "~/.cache/dpcompanion"
    ).expanduser()


def names() -> tuple[str, ...]:
    """The data sets that `load` knows.

    >>> names()[:3]
    ('mnist-5k', 'digits', 'breast-cancer')
    """
    return tuple(SETS)


def load(
    name: str,
    *,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    target: str | None = None,
    download: bool = True,
    verify: bool = True,
) -> "Dataset":
    """One split of a data set as a `Dataset`.

    Args:
        name: one of `names()`.
        split: "train", "test" or "all"; covertype also has "validation".
        root: the data folder (see `data_folder`); sets in the install do not use it.
        dtype: of the features, where they are numbers.
        target: for utkface, the attribute to predict: "gender" (the default), "age" or "race".
        download: fetch what is missing, where its publisher serves it.
        verify: refuse contents that are not the published ones. With False a subset or a variant of
            one's own is loaded, and `Dataset.verified` says so. Without published checksums (npz of
            svhn and utkface), too.

    Raises ValueError for an unknown name, split or target and for a damaged or altered file (which
    it names), and FileNotFoundError, with one line on how to fill the folder, for a missing one.

    >>> load("iris", split="test").features.shape
    torch.Size([30, 4])
    """
    _checks.one_of("name", name, SETS)
    allowed = (
        ("train", "test", "all", "validation") if name == "covertype" else ("train", "test", "all")
    )
    _checks.one_of("split", split, allowed)
    _checks.one_of(
        "target", target, (None, "gender", "age", "race") if name == "utkface" else (None,)
    )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    entry = SETS[name]
    folder = data_folder(root)
    if name in HOW_TO_GET and entry.find(folder) is None:
        tried = download_files(name, folder) if download else ""
        if entry.find(folder) is None:
            raise FileNotFoundError(f"{name} is not in {folder}: {HOW_TO_GET[name]}{tried}")
    raw = entry.read(folder, verify)
    part = select_split(raw, split)
    classes = entry.classes or raw.classes
    if target and target != "gender":
        part = dataclasses.replace(part, labels=part.attributes[target])
        classes = UTKFACE_RACES if target == "race" else ()
    if (
        classes
        and len(part.labels)
        and not 0 <= part.labels.min() <= part.labels.max() < len(classes)
    ):
        raise ValueError(
            f"the labels of {name} must lie in [0, {len(classes) - 1}], got {part.labels.min()} to "
            f"{part.labels.max()}"
        )
    return Dataset(
        name=name,
        split=split,
        features=_features(part.features, dtype),
        labels=torch.as_tensor(part.labels.copy()),
        classes=tuple(classes),
        columns=tuple(raw.columns),
        categories=dict(raw.categories),
        attributes={key: torch.as_tensor(values.copy()) for key, values in part.attributes.items()},
        source=raw.source,
        sha256=digest_of(part),
        verified=raw.verified,
    )


def byte_tokens(texts: Sequence[str], *, length: int = 20) -> torch.Tensor:
    """Each text's last `length` bytes in UTF-8, with marks of start and end: (n, length) int64.

    0 fills up on the left, 1 and 2 are the marks, 3 + b is the byte b: 259 tokens in all.

    >>> byte_tokens(["Yu", "Boenisch"], length=6).tolist()
    [[0, 0, 1, 92, 120, 2], [113, 108, 118, 102, 107, 2]]
    """
    length = _checks.whole_number("length", length, 1)
    found = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(found, texts):
        tokens = [1, *(3 + byte for byte in text.strip().encode()), 2][-length:]
        row[length - len(tokens) :] = torch.tensor(tokens)
    return found


def word_tokens(texts: Sequence[str], *, tokens: int = 30_000, length: int = 256) -> torch.Tensor:
    """Each text's first `length` words as numbers, (n, length) int64; 0 fills up on the right.

    Words are runs of letters, digits and apostrophes in lower case; a word's number is 1 + crc32
    mod (tokens - 1). Some words share a number; but a vocabulary of hashes is public, and one of
    the frequent words has its price.

    >>> word_tokens(["A film. A <br />good one", ""], tokens=100, length=5).tolist()
    [[46, 96, 46, 96, 81], [0, 0, 0, 0, 0]]
    """
    tokens = _checks.whole_number("tokens", tokens, 2)
    length = _checks.whole_number("length", length, 1)
    found = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(found, texts):
        words = re.findall(r"[\w']+", text.replace("<br />", " ").lower())[:length]
        row[: len(words)] = [1 + zlib.crc32(word.encode()) % (tokens - 1) for word in words]
    return torch.from_numpy(found)


def _features(values, dtype):
    if isinstance(values, list):
        return tuple(values)
    tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    if tensor.dtype == torch.uint8:
        return tensor.permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format).div_(255)
    return tensor.to(dtype)
