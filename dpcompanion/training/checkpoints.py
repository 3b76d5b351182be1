"""Checkpoints of runs: one file, written whole or not at all, and read only as it was written.

A `Checkpoint` says to `train` and `train_ensemble` where it lies, how often it is written and what
it holds besides.

A file is a line that says what it is, the sha256 of what follows, and what `torch.save` made of the
content. It is read back with `weights_only`, so that it cannot run code.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp()) / "run.pt"
>>> write_checkpoint(path, {"identity": {"seed": 0}, "step": 3})
>>> read_checkpoint(path, ("identity", "step"))["step"]
3
"""

import collections.abc
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import pickle
import warnings
from typing import Any

import numpy as np
import torch

from dpcompanion import _checks, _files

_MAGIC = b"dpcompanion checkpoint\n"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept, so that it can go on where it stopped.

    If the file exists the run goes on from there, which takes the same plan, data, architecture and
    optimizer. It is written every so many steps, at the end, and on Ctrl-C, which waits for the
    step to end (a second one does not).

    Without a seed the keys of the noise lie beside it, in a file of the same name and ".key" that
    only its owner can read; it goes when the run ends. A reader of it while the run lasts can
    subtract the noise. Where it is lost, the run goes on with new keys and a warning: as private,
    but not the same. If steps after the checkpoint have been seen, both endings cost privacy.

    Args:
        path: the file. Its folder notes which seeds were used on which data (seeds-used.json), and
            a seed that is used on others is warned of.
        every: steps from one writing to the next; an epoch's by default.
        stateful: {name: object} of more to save and restore, by state_dict and load_state_dict,
            such as a scheduler. Their states hold numbers, text, tensors, and lists and dicts of
            them; arrays of NumPy come back as tensors.

    Raises:
        ValueError: a path that is none, an `every` below 1, or an object without the two methods.

    >>> Checkpoint("run.pt", every=100).path
    'run.pt'
    """

    path: str | os.PathLike
    every: int | None = None
    stateful: collections.abc.Mapping = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.path, (str, os.PathLike)):
            raise ValueError(f"path must be that of a file, got {self.path!r}")
        if os.path.isdir(self.path):
            raise ValueError(
                f"path must be that of a file, got the folder {os.fspath(self.path)!r}"
            )
        if self.every is not None:
            object.__setattr__(self, "every", _checks.whole_number("every", self.every, 1))
        object.__setattr__(self, "stateful", dict(self.stateful or {}))
        for name, item in self.stateful.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ValueError(
                    f"stateful must hold objects with state_dict and load_state_dict, but {name!r} "
                    f"is a {type(item).__name__}"
                )

    def due(self, step: int, steps: int, steps_per_epoch: int) -> bool:
        """Whether it is written after this step of a run."""
        return step == steps or step % (self.every or steps_per_epoch) == 0

    @property
    def exists(self) -> bool:
        """Whether there is a file to go on from."""
        return os.path.exists(self.path)


def digest_of(*tensors):
    """A sha256 of the types, shapes and numbers of tensors, in hexadecimal."""
    total = hashlib.sha256()
    for t in tensors:
        total.update(f"{t.dtype} {tuple(t.shape)} ".encode())
        total.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def plain(value):
    """`value` in types that a checkpoint can be read back with: numbers, text, tensors, and lists
    and dicts of them.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise ValueError(
        "on_epoch must return numbers, text, tensors, or lists and dicts of them where there is a "
        f"checkpoint, got {type(value).__name__}"
    )


# Of what `torch.load` reads back without running code.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


# What NumPy's numbers and arrays are made of when they are read back.
_NUMPY = [
    np.float64(0).__reduce__()[0],
    np.zeros(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8")),
]


def read_back(buffer):
    """What `torch.save` wrote, without running code and `without_numpy`.

    Raises:
        pickle.UnpicklingError: for what is no number, text, tensor, list or dict.
    """
    with torch.serialization.safe_globals(_NUMPY):
        return without_numpy(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


def without_numpy(value: Any) -> Any:
    """`value` with Python's numbers in place of NumPy's and tensors in place of its arrays, in
    dicts, lists and tuples.

    >>> without_numpy({"lr": np.float64(0.5), "betas": (np.float32(0.5), 0.75)})
    {'lr': 0.5, 'betas': (0.5, 0.75)}
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.as_tensor(value.copy())  # which is writable, and has no negative strides
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        items = {key: without_numpy(item) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) is list:
        return [without_numpy(item) for item in value]
    if type(value) is tuple:
        return tuple(without_numpy(item) for item in value)
    return value


def _odd(value, name):
    """(names, type) of an entry that `torch.load` may not read back without running code, or None.

    A module's state may hold tensors of any kind; and containers are looked into.
    """
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (_odd(item, f"{name}.{key}") for key, item in items)), None)
    return None if type(value) in _PLAIN or isinstance(value, torch.Tensor) else (name, type(value))


def write_checkpoint(path, content):
    """Write `content`, of `plain`'s types or NumPy's, whole or not at all, under a sha256 of its
    bytes.

    Raises:
        ValueError: for an entry that could not be read back.
    """
    content, buffer = without_numpy(content), io.BytesIO()
    torch.save(content, buffer)
    if odd := next(filter(None, (_odd(item, str(key)) for key, item in content.items())), None):
        try:
            read_back(buffer)
        except pickle.UnpicklingError as error:
            raise ValueError(
                "a checkpoint must hold numbers, text, tensors, and lists and dicts of them, got "
                f"{odd[1].__name__} in {odd[0]!r}"
            ) from error
    payload = buffer.getvalue()
    _files.replace(path, _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)


def read_checkpoint(path, keys):
    """What `write_checkpoint` wrote, a dict with these keys; ValueError for any other file."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        written = file.read()
    if not written.startswith(_MAGIC):
        raise ValueError(
            f"checkpoint must be one of a training run of this version, but {name!r} is none"
        )
    digest, _, payload = written[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(
            f"checkpoint must be as it was written, but {name!r} is damaged: its sha256 differs; "
            "remove it to begin anew"
        )
    try:
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"checkpoint must be one of a training run, but {name!r} cannot be read: {error}"
        ) from error
    if (
        not isinstance(content, dict)
        or content.keys() != set(keys)
        or not isinstance(content["identity"], dict)
    ):
        held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"checkpoint must be one of such a run, with {', '.join(keys)}, but {name!r} holds "
            f"{held}"
        )
    return content


def key_file(checkpoint):
    """Where the keys of a run without a seed lie: beside its checkpoint, never in it."""
    return f"{os.fspath(checkpoint)}.key"


def note_seeds(checkpoint, runs):
    """Note in the checkpoint's folder which data seeds were used on; a RuntimeWarning for others.

    Two runs of one seed share their noise, so that the difference of two models tells how their
    data differ. The file, seeds-used.json, holds for each seed the digests of its data; one that is
    damaged is begun anew. Runs that begin together are compared with earlier ones only.

    Args:
        checkpoint: its path.
        runs: pairs of a seed, a number or text, and the digest of the data that it is used on.
    """
    path = pathlib.Path(checkpoint).parent / "seeds-used.json"
    try:
        known = {
            str(seed): list(digests)
            for seed, digests in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        known = {}
    runs = list(dict.fromkeys((str(seed), digest) for seed, digest in runs))
    new = [(seed, digest) for seed, digest in runs if digest not in known.get(seed, [])]
    if not new:
        return
    again = [seed for seed in dict.fromkeys(seed for seed, _ in new) if known.get(seed)]
    if again:
        warnings.warn(
            f"seed {', '.join(again[:5])}{' and more' * (len(again) > 5)} has been used on other "
            f"data with a checkpoint in {os.fspath(path.parent)!r}: both runs have the same noise, "
            "which cancels in the difference of the models; publish neither, or leave the seed out",
            RuntimeWarning,
            stacklevel=3,
        )
    for seed, digest in new:
        known.setdefault(seed, []).append(digest)
    _files.replace(path, json.dumps(known, indent=1).encode())


def write_keys(path, streams, forward_seed):
    """Write keys of the streams {name: `SecureStream`} into a file that only its owner can read."""
    content = {
        "keys": {name: stream.key.hex() for name, stream in streams.items()},
        "forward": forward_seed,
    }
    _files.replace(path, json.dumps(content).encode(), mode=0o600)


def read_keys(path, streams):
    """Give the streams the keys that the file holds, and return its forward seed; None, with a
    warning, without one.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        for name, stream in streams.items():
            stream.set_state({"calls": 0, "key": bytes.fromhex(content["keys"][name])})
        return _checks.seed("forward", content["forward"])
    except FileNotFoundError:
        warnings.warn(
            f"{path!r} is gone, so that the run goes on with new random numbers: as private as it "
            "was, but not the run that it would have been, unless anyone has seen steps that the "
            "run took after this checkpoint; then both endings cost privacy: add both up "
            "(dpcompanion.accounting.Ledger)",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint must have its keys in {path!r} as they were written, but that file is "
            f"damaged ({error}); remove it to go on with new random numbers"
        ) from None


def check_fits(run: Any, content: Any, path: Any) -> None:
    """Refuse the entries of another model and other parameter groups, before anything is loaded."""
    theirs, ours = set(content["model"]), set(run.model.state_dict())
    if theirs != ours:
        raise ValueError(
            "checkpoint must hold the weights and buffers of this model, but "
            f"{os.fspath(path)!r} "
            + " and ".join(
                f"{word} {', '.join(sorted(names)[:5])}"
                for word, names in (("lacks", ours - theirs), ("has", theirs - ours))
                if names
            )
        )
    theirs, ours = (
        [len(group["params"]) for group in of["param_groups"]]
        for of in (content["optimizer"], run.optimizer.state_dict())
    )
    if theirs != ours:
        raise ValueError(
            f"optimizer must have parameter groups of {theirs} tensors, as the checkpoint "
            f"{os.fspath(path)!r} has, got {ours}"
        )
