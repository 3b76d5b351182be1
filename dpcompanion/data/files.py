"""Files from outside: found, checked by checksum, parsed without pickle, and downloaded."""

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import io
import lzma
import pickle
import re
import sys
import urllib.request
import zipfile
import zlib
from typing import Any, TypeVar

import numpy as np
import torch

from dpcompanion import _files
from dpcompanion.data.facts import MD5, SHA256, URLS

_Found = TypeVar("_Found")


def import_torchvision() -> Any:
    """torchvision, also beside a build of torch for which its compiled operators do not load.

    A torchvision wheel made for CUDA fails on a CPU build of torch at `import torchvision`, because
    it describes an operator (`nms`) that its library never registered. Declaring the two names
    first is enough for its data sets, transforms and models; `torchvision.ops.nms` itself stays
    unusable.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for module in [
            m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")
        ]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)
        import torchvision
    return torchvision


_KEPT_ALIVE = []


@dataclasses.dataclass(frozen=True)
class Part:
    """One split as its reader returns it.

    Labels and attributes are numpy arrays with one entry for each example; features are uint8
    images (n, height, width, channels), float tables (n, columns), or a list of strings.
    """

    features: object
    labels: np.ndarray
    attributes: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Raw:
    """A data set as its reader returns it: {split: `Part`}, where it came from, and whether a
    checksum was compared.
    """

    parts: dict
    source: str
    verified: bool
    classes: tuple = ()
    columns: tuple = ()
    categories: dict = dataclasses.field(default_factory=dict)


def take(part, index):
    """The examples of a part at some indices."""
    features = (
        [part.features[i] for i in index]
        if isinstance(part.features, list)
        else part.features[index]
    )
    return Part(
        features,
        part.labels[index],
        {key: values[index] for key, values in part.attributes.items()},
    )


def select_split(raw, split):
    """The part "train", "test" or "all" of a data set; of one without splits, a stratified fifth is
    the test part.
    """
    if split in raw.parts:
        return raw.parts[split]
    if split == "all":
        parts = list(raw.parts.values())
        join = (
            (lambda lists: sum(lists, []))
            if isinstance(parts[0].features, list)
            else np.concatenate
        )
        return Part(
            join([p.features for p in parts]),
            np.concatenate([p.labels for p in parts]),
            {
                key: np.concatenate([p.attributes[key] for p in parts])
                for key in parts[0].attributes
            },
        )
    whole = raw.parts["all"]
    return take(whole, _stratified(whole.labels)[split])


def _stratified(labels):
    """Indices of a train and a test part, shuffled: a fifth of each class is for the test.

    numpy promises that a RandomState's stream never changes, which it does not for its newer
    generators.
    """
    order = np.random.RandomState(0).permutation(len(labels))
    rank, size = np.empty(len(labels), dtype=np.int64), np.empty(len(labels), dtype=np.int64)
    for value in np.unique(labels):
        members = order[labels[order] == value]
        rank[members], size[members] = np.arange(len(members)), len(members)
    test = rank < np.floor(0.2 * size + 0.5)
    return {"train": order[~test[order]], "test": order[test[order]]}


def digest_of(part):
    """A sha256 of all features, labels and attributes of a part."""
    total = hashlib.sha256()
    arrays = {"features": part.features, "labels": part.labels, **part.attributes}
    for key, values in arrays.items():
        if isinstance(values, list):
            values = np.frombuffer("\0".join(values).encode(), dtype=np.uint8)
        total.update(f"{key} {values.dtype.str} {values.shape};".encode())
        total.update(np.ascontiguousarray(values).data)
    return total.hexdigest()


def damaged_file(path, why):
    """The ValueError for a file that is not what it should be."""
    return ValueError(f"{path} is damaged or altered ({why}); remove it and get it again")


def first_file(folder, *candidates):
    """The first of the candidate paths that exists in the folder, also compressed; or None."""
    for candidate in candidates:
        for suffix in ("", ".gz", ".xz"):
            if (path := folder / (candidate + suffix)).is_file():
                return path
    return None


def existing(found: _Found | None) -> _Found:
    """What was looked for: a set is read once all files are found, and missing only after that."""
    if found is None:
        raise FileNotFoundError("a file of the data set went missing while it was read")
    return found


def all_of(*groups):
    """A finder of all of several files, each under one of its names."""

    def find(folder):
        paths = [path for group in groups if (path := first_file(folder, *group)) is not None]
        return paths if len(paths) == len(groups) else None

    return find


def any_of(*finders):
    """A finder of what the first of several finders finds."""

    def find(folder):
        return next((found for finder in finders if (found := finder(folder)) is not None), None)

    return find


def content_of(path, verify, name=None):
    """The decompressed bytes of a file, checked against the checksum of its name, or of `name`."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise damaged_file(path, error) from None
    name = name or path.name.removesuffix(".gz").removesuffix(".xz")
    if verify and name in MD5:
        check_same(path, "md5", hashlib.md5(content, usedforsecurity=False).hexdigest(), MD5[name])
    elif verify:
        check_same(path, "sha256", hashlib.sha256(content).hexdigest(), SHA256[name])
    return content


def check_same(path, kind, found, expected):
    """The digest that was found of a file is the one expected."""
    if found != expected:
        raise damaged_file(path, f"its {kind} is {found[:12]}..., expected {expected[:12]}...")


def arrays_of(path):
    """All arrays of an npz file; pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (
        *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error),
        *(AttributeError, TypeError),  # of one array alone, which is no archive
    ) as error:
        raise damaged_file(path, error) from None


def checked_images(path, values):
    """Images as (n, height, width, channels) uint8, from arrays with or without a channel axis."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        raise damaged_file(
            path, f"images must be uint8 with 3 or 4 axes, got {values.dtype} {values.shape}"
        )
    return values[..., None] if values.ndim == 3 else values


def checked_labels(path, values, examples):
    """Labels as (examples,) int64."""
    values = np.asarray(values).reshape(-1)
    if values.dtype.kind not in "iu" or len(values) != examples:
        raise damaged_file(
            path,
            f"{examples} examples need as many whole-number labels, got {values.dtype} "
            f"{values.shape}",
        )
    return values.astype(np.int64)


def idx_array(path, verify):
    """An IDX file: two zero bytes, a type (8: uint8), the number of axes, each as a big-endian
    int32, then data.
    """
    content = content_of(path, verify)
    axes = content[3] if len(content) > 3 and content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">i4", axes, 4) if axes and len(content) >= 4 + 4 * axes else ()
    if len(shape) == 0 or len(content) != 4 + 4 * axes + np.prod(shape, dtype=np.int64):
        raise damaged_file(path, "it is no whole IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


class _Dtype:
    """What a pickled dtype says, as text: NumPy's own would believe any flags and fields."""

    def __init__(self, kind, *_):
        self.kind = kind if isinstance(kind, str) else kind.decode("ascii")
        if not re.fullmatch("[biuf][1248]", self.kind):
            raise pickle.UnpicklingError(f"arrays of {self.kind!r} have no place in it")
        self.order = "="

    def __setstate__(self, state):
        self.order = state[1] if isinstance(state[1], str) else state[1].decode("ascii")


class _Array:
    """A pickled array: a shape and the bytes of plain numbers."""

    def __init__(self, *_):
        self.values = np.zeros(0)

    def __setstate__(self, state):
        _, shape, dtype, by_column, content = state
        order = "" if dtype.order == "|" else dtype.order
        if order not in ("", "=", "<", ">"):
            raise pickle.UnpicklingError(f"a byte order of {order!r} has no place in it")
        kind = np.dtype(order + dtype.kind)
        values = np.frombuffer(content, kind)
        self.values = values.reshape(shape, order="F" if by_column else "C")

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)


class PlainUnpickler(pickle.Unpickler):
    """Reads the arrays, numbers and strings of the CIFAR batches, and refuses everything else.

    No object of NumPy is made from what the file says of one: its arrays come as what
    `numpy.asarray` takes.
    """

    ALLOWED = {"encode": codecs.encode, "ndarray": _Array, "dtype": _Dtype, "_reconstruct": _Array}

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return self.ALLOWED[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def lines_of(path, verify, name):
    """The lines of a text file in UTF-8, checked as by `content_of`."""
    try:
        return content_of(path, verify, name).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise damaged_file(path, error) from None


def download_files(name, folder):
    """Try to fetch a data set from its publisher; returns what the message adds if that failed."""
    try:
        if name in ("mnist", "cifar10", "svhn"):
            # torchvision announces what it does on stdout, which belongs to the caller.
            with contextlib.redirect_stdout(io.StringIO()):
                datasets = import_torchvision().datasets
                if name == "svhn":
                    for split in ("train", "test"):
                        datasets.SVHN(folder, split=split, download=True)
                else:
                    {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name](
                        folder, download=True
                    )
        elif name in URLS:
            for file, url in URLS[name].items():
                _fetch(url, folder / file)
        else:
            return ""
    except ImportError:
        return " (no download: torchvision is not installed: pip install 'dpcompanion[data]')"
    except Exception as error:  # whatever went wrong on the network, the reader needs the same line
        reason = str(error).strip().splitlines()
        return f" (the download failed: {reason[0] if reason else type(error).__name__})"
    return ""


def _fetch(url, path):
    """A file from the network, put in place only when it is whole."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        _files.replace(path, iter(lambda: answer.read(1 << 20), b""))
