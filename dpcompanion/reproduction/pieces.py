"""Pieces of a run, each kept as soon as it ends, so that what was interrupted goes on where it stopped."""

import contextlib
import contextvars
import math
import pathlib
import re
import time

import numpy as np
import torch

from dpcompanion._progress import bar
from dpcompanion.reproduction.provenance import software
from dpcompanion.reproduction.storage import hash_of, MeanSD, plain, read_whole, write_whole


def resumable(work, pieces, *, folder, config, label="", show=None):
    """{name: work(name)} for each piece, each written as soon as it ends, so that a broken run goes on.

    Pieces that `folder` already holds for the same `config` are read, not computed again; those of another
    configuration are ignored.  An interruption (Ctrl-C) loses the piece it hits and nothing else.  Each piece notes
    what made it and in how many seconds.

    Args:
        work: piece name -> values that a record can hold, or a pair (values, {name: array}).
        pieces: names, such as "seed-3"; letters, digits, hyphens, dots and underscores.
        folder: where the pieces are kept; `discard` removes them when the record is written.
        config: what the results depend on, besides the piece's name.
        label, show: of the progress bar, see `dpcompanion._progress.bar`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> resumable(len, ["a", "bb"], folder=folder, config={})
    {'a': 1, 'bb': 2}
    >>> resumable(lambda name: 1 / 0, ["a", "bb"], folder=folder, config={})   # nothing is left to do
    {'a': 1, 'bb': 2}
    """
    pieces = list(pieces)
    for name in pieces:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
            raise ValueError(f"pieces must be names of letters, digits, hyphens, dots and underscores, got {name!r}")
    if len(set(pieces)) < len(pieces):
        raise ValueError(f"pieces must differ from each other, got {pieces!r}")
    hashed, folder, results = hash_of(config), pathlib.Path(folder), {}
    seen = _SEEN.get()
    seen = {} if seen is None else seen  # nobody gathers: the notes go nowhere
    with bar(len(pieces), label=label, show=show) as advance:
        for name in pieces:
            path = folder / f"{name}.piece.json"
            try:
                kept, arrays = read_whole(path)
                if kept["config"] != hashed:
                    raise ValueError("another configuration")
                seen.setdefault(path, kept.get("made", _UNKNOWN))
            except (OSError, ValueError, KeyError, TypeError):
                made, started = software(), time.perf_counter()
                state = folder / f"{name}.{hashed[:12]}.unfinished"
                with _working_at(state):
                    values = work(name)
                made["seconds"] = round(time.perf_counter() - started, 3)
                seen[path] = None  # this run's own, however often it is read again
                values, arrays = values if _has_arrays(values) else (values, {})
                arrays = {key: np.asarray(array) for key, array in arrays.items()}
                kept = {"config": hashed, "made": made, "values": plain(values)}
                write_whole(path, kept, arrays)
                state.unlink(missing_ok=True)
            results[name] = (kept["values"], arrays) if arrays else kept["values"]
            advance()
    return results


def unfinished():
    """Where the piece that is being worked at may keep its own state, so that it goes on within itself.

    A path, for a `dpcompanion.training.Checkpoint` for instance; the file goes when the piece is written.  None for
    work that is no piece on the disk.

    >>> import tempfile
    >>> resumable(lambda name: unfinished().suffix, ["a"], folder=tempfile.mkdtemp(), config={})
    {'a': '.unfinished'}
    >>> unfinished() is None
    True
    """
    return _UNFINISHED.get()


@contextlib.contextmanager
def _working_at(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    token = _UNFINISHED.set(path)
    try:
        yield
    finally:
        _UNFINISHED.reset(token)


_UNFINISHED = contextvars.ContextVar("where the piece at hand keeps its state", default=None)
_UNKNOWN = {"commit": None, "versions": {}, "seconds": math.nan}
_SEEN = contextvars.ContextVar("what `taken_over` has seen, path -> what made the piece", default=None)


@contextlib.contextmanager
def taken_over():
    """What `resumable` takes over from earlier runs, inside: a list that is complete when the block ends.

    One dict for each commit and set of versions that made kept pieces: {"pieces": how many, "seconds": what they took
    together, "commit", "versions"}.  Seconds are NaN, commit None and versions empty for pieces that do not say.
    Pieces that the block itself makes are none of them.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = resumable(len, ["a", "bb"], folder=folder, config={})
    >>> with taken_over() as kept:
    ...     _ = resumable(len, ["a", "bb", "ccc"], folder=folder, config={})
    >>> [each["pieces"] for each in kept]
    [2]
    """
    kept, seen = [], {}
    token = _SEEN.set(seen)
    try:
        yield kept
    finally:
        _SEEN.reset(token)
        groups = {}
        for made in seen.values():
            if made is not None:
                groups.setdefault(hash_of([made["commit"], made["versions"]]), []).append(made)
        kept += [{"pieces": len(group), "seconds": math.fsum(made["seconds"] for made in group),
                  "commit": group[0]["commit"], "versions": group[0]["versions"]} for group in groups.values()]


def discard(folder):
    """Remove the pieces in a folder, and the folder when nothing else is in it."""
    folder = pathlib.Path(folder)
    for pattern in ("*.unfinished", "*.piece.json", "*.piece.npz", "*.piece.*.npz"):
        for path in folder.glob(pattern):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _has_arrays(values):
    return isinstance(values, tuple) and not isinstance(values, MeanSD) and len(values) == 2 and isinstance(
        values[1], dict) and all(isinstance(array, (np.ndarray, torch.Tensor)) for array in values[1].values())
