"""Pieces of a run, each kept as soon as it ends, so that an interrupted run goes on."""

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from dpcompanion import _files
from dpcompanion._progress import bar
from dpcompanion.reproduction import workers
from dpcompanion.reproduction.provenance import software
from dpcompanion.reproduction.storage import MeanSD, hash_of, plain, read_whole, write_whole

#: What lies in a folder of pieces: the pieces, their arrays, and states of those that are not whole
#: yet, with a note of each.
FILES = (
    "*.unfinished",
    "*.begun",
    "seeds-used.json",
    "*.piece.json",
    "*.piece.npz",
    "*.piece.*.npz",
)


def resumable(
    work: Callable[[str], Any],
    pieces: Iterable[str],
    *,
    folder: str | os.PathLike[str],
    config: Any,
    label: str = "",
    show: bool | None = None,
) -> dict[str, Any]:
    """{name: work(name)} for each piece, each written when it ends, so that a broken run goes on.

    Pieces that `folder` already holds for the same `config` are read, not computed again; those of
    another configuration are ignored. An interruption (Ctrl-C) loses the piece it hits and nothing
    else. Each piece notes what made it and in how many seconds, with those of earlier runs that it
    went on from (`unfinished`). Who does the pieces, `dpcompanion.reproduction.workers` says: this
    process, or whatever back end of joblib is active, or a share of them.

    Args:
        work: piece name -> values that a record can hold, or a pair (values, {name: array}).
        pieces: names, such as "seed-3"; letters, digits, hyphens, dots and underscores.
        folder: where the pieces are kept; `discard` removes them when the record is written.
        config: what the results depend on, besides the piece's name.
        label, show: of the progress bar, see `dpcompanion._progress.bar`.

    Raises:
        dpcompanion.reproduction.workers.Missing: where pieces were left to other runs, and are not
            there.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> resumable(len, ["a", "bb"], folder=folder, config={})
    {'a': 1, 'bb': 2}
    >>> resumable(
    ...     lambda name: 1 / 0, ["a", "bb"], folder=folder, config={}
    ... )  # nothing is left to do
    {'a': 1, 'bb': 2}
    """
    pieces = list(pieces)
    for name in pieces:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
            raise ValueError(
                "pieces must be names of letters, digits, hyphens, dots and underscores, got "
                f"{name!r}"
            )
    if len(set(pieces)) < len(pieces):
        raise ValueError(f"pieces must differ from each other, got {pieces!r}")
    hashed, kept_in = hash_of(config), pathlib.Path(folder).resolve()
    results: dict[str, Any] = {}
    seen = _SEEN.get()
    seen = {} if seen is None else seen  # nobody gathers: the notes go nowhere
    for name in pieces:
        with contextlib.suppress(*_NOT_THERE):
            results[name], made = _kept(kept_in, name, hashed)
            seen.setdefault(_path(kept_in, name), made)
    left = [name for name in pieces if name not in results]
    ours = [name for number, name in enumerate(pieces) if name in left and workers.mine(number)]
    with bar(len(pieces), label=label, done=len(results), show=show) as advance:
        for name, _ in workers.each(
            functools.partial(_make, work, kept_in, hashed),
            ours,
            lambda name: _is_there(kept_in, name, hashed),
        ):
            results[name], made = _arrived(kept_in, name, hashed)
            # This run's own, however often it is read again, but for an earlier run's part.
            seen[_path(kept_in, name)] = (
                {**made, "seconds": made["earlier"]} if made.get("earlier") else None
            )
            advance()
    # Another run may have done its share meanwhile.
    for name in left:
        if name not in results:
            with contextlib.suppress(*_NOT_THERE):
                results[name], seen[_path(kept_in, name)] = _kept(kept_in, name, hashed)
    if len(results) < len(pieces):
        raise workers.Missing([name for name in pieces if name not in results])
    return {name: results[name] for name in pieces}


_NOT_THERE = (OSError, ValueError, KeyError, TypeError)


def _path(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f"{name}.piece.json"


def _kept(folder: pathlib.Path, name: str, hashed: str) -> tuple[Any, dict[str, Any]]:
    """(a piece's values, and arrays if there are any; what made it), or one of `_NOT_THERE`."""
    kept, arrays = read_whole(_path(folder, name), sealed=True)
    if kept.keys() != {"config", "made", "values", "arrays"}:
        raise ValueError(f"a piece holds config, made, values and arrays, got {', '.join(kept)}")
    if kept["config"] != hashed:
        raise ValueError("another configuration")
    return (kept["values"], arrays) if arrays else kept["values"], kept["made"]


def _is_there(folder: pathlib.Path, name: str, hashed: str) -> bool:
    try:
        return bool(_kept(folder, name, hashed))
    except _NOT_THERE:
        return False


def _make(work: Callable[[str], Any], folder: pathlib.Path, hashed: str, name: str) -> None:
    """Do a piece and write it, in whatever process this is."""
    made: dict[str, Any] = {**software()}
    started, state = time.perf_counter(), folder / f"{name}.{hashed[:12]}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    stretch, begun = _Stretch(state), state.exists()
    token = _UNFINISHED.set(stretch)
    try:
        try:
            values = work(name)
        except ValueError:
            if not begun:
                raise
            stretch.forget()  # what an earlier version of the library has left, for instance
            values = work(name)
    finally:
        _UNFINISHED.reset(token)
    made["seconds"] = round(time.perf_counter() - started + stretch.earlier, 3)
    if stretch.earlier:
        made["earlier"] = round(stretch.earlier, 3)
    values, arrays = values if _has_arrays(values) else (values, {})
    arrays = {key: np.asarray(array) for key, array in arrays.items()}
    write_whole(
        _path(folder, name), {"config": hashed, "made": made, "values": plain(values)}, arrays
    )
    stretch.forget()


_PATIENCE = 60  # seconds


def _arrived(folder: pathlib.Path, name: str, hashed: str) -> tuple[Any, dict[str, Any]]:
    """A piece that a worker says it has written: on a network's file system it may take a while
    until it is seen.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return _kept(folder, name, hashed)
        except _NOT_THERE as error:
            if time.monotonic() > until:
                raise RuntimeError(
                    f"a worker has written {name}, but it is not in {folder}: "
                    "the folder must be one that all workers share"
                ) from error
            time.sleep(1)
            os.listdir(folder)  # which makes a client ask the server again


def unfinished() -> pathlib.Path | None:
    """Where the piece at work may keep its own state, so that it goes on within itself.

    A path, for a `dpcompanion.training.Checkpoint` for instance; the file goes when the piece is
    written. None for work that is no piece on the disk.

    >>> import tempfile
    >>> resumable(lambda name: unfinished().suffix, ["a"], folder=tempfile.mkdtemp(), config={})
    {'a': '.unfinished'}
    >>> unfinished() is None
    True
    """
    stretch = _UNFINISHED.get()
    return stretch and stretch.begin()


@dataclasses.dataclass
class _Stretch:
    """Work at a piece from its start, or from the `state` that an interruption left, to its end or
    the next one.

    `earlier` are the seconds that earlier stretches took until they last wrote the state: what came
    after it is done again. They are known from a note beside the state, of what they took and when
    this stretch began.
    """

    state: pathlib.Path
    earlier: float = 0.0
    begun: bool = False

    @property
    def _note(self):
        return self.state.with_suffix(".begun")

    def taken(self) -> float:
        """The seconds of earlier stretches until they last wrote the state."""
        with contextlib.suppress(*_NOT_THERE):
            noted = json.loads(self._note.read_bytes())
            if noted["since"] is None:  # a copy, whose own time says nothing
                return noted["seconds"]
            return noted["seconds"] + max(0.0, self.state.stat().st_mtime - noted["since"])
        return 0.0

    def begin(self) -> pathlib.Path:
        """The state's path, once it is noted that this stretch begins."""
        if not self.begun:
            self.earlier = self.taken()
            note = {"seconds": self.earlier, "since": time.time()}
            _files.replace(self._note, json.dumps(note).encode())
            self.begun = True
        return self.state

    def forget(self) -> None:
        """Remove the state and its note."""
        for path in (self.state, self._note):
            path.unlink(missing_ok=True)
        self.earlier, self.begun = 0.0, False


_UNFINISHED: contextvars.ContextVar[_Stretch | None] = contextvars.ContextVar(
    "where the piece at hand keeps its state", default=None
)
_SEEN: contextvars.ContextVar[dict[pathlib.Path, dict[str, Any] | None] | None] = (
    contextvars.ContextVar("what `taken_over` has seen, path -> what made the piece", default=None)
)


@contextlib.contextmanager
def taken_over() -> Iterator[list[dict[str, Any]]]:
    """What `resumable` takes over from earlier runs, inside: a list, complete when the block ends.

    One dict for each commit and set of versions that made kept pieces: {"pieces": how many,
    "seconds": what they took together, "commit", "versions"}. Pieces that the block itself makes
    are none of them.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = resumable(len, ["a", "bb"], folder=folder, config={})
    >>> with taken_over() as kept:
    ...     _ = resumable(len, ["a", "bb", "ccc"], folder=folder, config={})
    >>> [each["pieces"] for each in kept]
    [2]
    """
    kept: list[dict[str, Any]] = []
    seen: dict[pathlib.Path, dict[str, Any] | None] = {}
    token = _SEEN.set(seen)
    try:
        yield kept
    finally:
        _SEEN.reset(token)
        groups: dict[str, list[dict[str, Any]]] = {}
        for made in seen.values():
            if made is not None:
                groups.setdefault(hash_of([made["commit"], made["versions"]]), []).append(made)
        kept += [
            {
                "pieces": len(group),
                "seconds": math.fsum(made["seconds"] for made in group),
                "commit": group[0]["commit"],
                "versions": group[0]["versions"],
            }
            for group in groups.values()
        ]


def bring(begun: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copy what lies in `begun` and not in `folder`, as what a checkout carries of a run that is
    not whole yet (`carry`); `resumable` then reads it as it reads its own, or ignores it.

    States of pieces that are not whole are copied unless `folder` has the piece, or a state of it.
    """
    brought, kept = pathlib.Path(begun), pathlib.Path(folder)
    _copy_pieces(brought, kept)
    for state in sorted(brought.glob("*.unfinished")):
        if not (_piece_of(state, kept).exists() or (kept / state.name).exists()):
            for path in (state.with_suffix(".begun"), state):
                if path.exists():  # without its note a state counts no seconds
                    _files.replace(kept / path.name, path.read_bytes())


def carry(folder: str | os.PathLike[str], begun: str | os.PathLike[str]) -> None:
    """Copy the pieces in `folder` to `begun`, for a checkout to carry to another machine, and the
    states of those that are not whole, each with the seconds that it took.

    >>> import tempfile
    >>> folder, begun, elsewhere = (tempfile.mkdtemp() for _ in range(3))
    >>> _ = resumable(len, ["a", "bb"], folder=folder, config={})
    >>> carry(folder, begun)
    >>> bring(begun, elsewhere)
    >>> resumable(lambda name: 1 / 0, ["a", "bb"], folder=elsewhere, config={})
    {'a': 1, 'bb': 2}
    """
    kept, carried = pathlib.Path(folder), pathlib.Path(begun)
    _copy_pieces(kept, carried)
    for old in sorted(carried.glob("*.unfinished")):
        if _piece_of(old, carried).exists():
            _Stretch(old).forget()
    for state in sorted(kept.glob("*.unfinished")):
        note = {"seconds": _Stretch(state).taken(), "since": None}
        target = carried / state.name
        _files.replace(target, state.read_bytes())
        _files.replace(target.with_suffix(".begun"), json.dumps(note).encode())


def _copy_pieces(source: pathlib.Path, target: pathlib.Path) -> None:
    for pattern in ("*.piece*.npz", "*.piece.json"):  # what a piece refers to comes first
        for path in sorted(source.glob(pattern)):
            if not (target / path.name).exists():
                _files.replace(target / path.name, path.read_bytes())


def _piece_of(state: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    return _path(folder, state.stem.rpartition(".")[0])


def discard(folder: str | os.PathLike[str]) -> None:
    """Remove the pieces in a folder with all that was noted of them, and the folder when nothing
    else is in it.
    """
    emptied = pathlib.Path(folder)
    for pattern in FILES:
        for path in emptied.glob(pattern):
            path.unlink()
    if emptied.is_dir() and not any(emptied.iterdir()):
        emptied.rmdir()


def _has_arrays(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and not isinstance(values, MeanSD)
        and len(values) == 2
        and isinstance(values[1], dict)
        and all(isinstance(array, (np.ndarray, torch.Tensor)) for array in values[1].values())
    )
