"""Records: what a run leaves behind, with everything that is needed to trust it or to run it again.

A record is one JSON file, `results/<paper>/<exhibit>.<preset>.json`: the values,
the full configuration with its seeds, the data with their sha256, library
versions, git commit, device, wall time and the command.  Arrays lie in an NPZ
file beside it, which is named after its sha256.  The JSON file comes last and
says which arrays are its own, so that a record is written whole or not at all,
however its writer ends; what it replaces is removed after that.  The JSON file
holds a sha256 of its own fields too, and both are checked when a record is read.
(Records of earlier versions have arrays without a sha256 in the name, and none
of themselves.)  NaN and infinities survive as `{"float": "nan"}`; a mean over
seeds as `{"mean": ..., "sd": ..., "n": ...}`.

What a run takes over from earlier ones (pieces that `resumable` kept) is listed under `kept`, with the commit,
versions and seconds of theirs.

A run that leaves out tasks of its configuration, for want of a GPU or of data, lists their names in `values` as
`not_run`: ["cifar10", ...]. Such a record never counts as the whole exhibit (see `dpcompanion.reproduction.scoreboard`).

A record is stale when its experiment now has another configuration or another
code than the record was made with; the book then says so.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> made = make("idp-sgd/table-5", "quick", {"mnist.sigma": float("inf")}, config={"delta": 1e-5})
>>> _ = write(made, folder)
>>> find("idp-sgd/table-5", "quick", folder).values
{'mnist.sigma': inf}
"""

import ast
import contextlib
import contextvars
import dataclasses
import datetime
import glob
import hashlib
import importlib.metadata
import inspect
import io
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import textwrap
import time
import typing

import numpy as np
import torch

from dpcompanion import _checks, _files
from dpcompanion.reproduction import published
from dpcompanion._progress import bar

try:
    import fcntl
except ImportError:     # Windows
    fcntl = None

SCHEMA = 1
LIBRARIES = ("dpcompanion", "torch", "numpy", "scipy", "torchvision", "opacus", "dp-accounting", "scikit-learn",
             "mlxtend")


class MeanSD(typing.NamedTuple):
    """A mean over n runs and the standard deviation between them; NaN when one run cannot tell."""

    mean: float
    sd: float
    n: int


def mean_and_sd(values):
    """Mean and sample standard deviation (ddof 1) over seeds.

    >>> mean_and_sd([96.0, 97.0, 98.0])
    MeanSD(mean=97.0, sd=1.0, n=3)
    >>> mean_and_sd([96.6]).sd
    nan
    """
    values = np.asarray(list(values), dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"values must be one number or more for each seed, got an array of shape {values.shape}")
    # math.fsum is exact, so that the mean does not depend on how numpy splits its sum.
    mean = math.fsum(values) / values.size
    sd = math.sqrt(math.fsum((values - mean) ** 2) / (values.size - 1)) if values.size > 1 else math.nan
    return MeanSD(mean, sd, values.size)


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One run, see the module's text.

    Attributes:
        name, preset: "idp-sgd/table-5" and "paper".
        values: what was computed, under the same dotted names as the published numbers where there are such.
        arrays: name -> numpy array, in the NPZ file beside the record.
        config: the full configuration, seeds included.
        code_hash: of the code that made it, see `code_hash`.
        data: `Dataset.provenance()` of each data set.
        versions, commit, device, wall_time (seconds), command, created (UTC): how and when.
        kept: what it took over from earlier runs, see `taken_over`.
    """

    name: str
    preset: str
    values: dict
    config: dict
    code_hash: str
    data: list
    versions: dict
    commit: str | None
    device: str
    wall_time: float
    command: str
    created: str
    arrays: dict = dataclasses.field(default_factory=dict)
    kept: list = dataclasses.field(default_factory=list)

    @property
    def seeds(self):
        return list(self.config.get("seeds", []))

    def is_stale(self, *, config=None, code_hash=None):
        """Whether it was made with another configuration (seeds apart) or another code than the given ones."""
        mine = {key: value for key, value in self.config.items() if key != "seeds"}
        other = mine if config is None else {key: value for key, value in _plain(config).items() if key != "seeds"}
        return hash_of(mine) != hash_of(other) or (code_hash is not None and self.code_hash != code_hash)


def hash_of(value):
    """A sha256 of anything that a record can hold, the same on every machine.

    >>> hash_of({"b": 1, "a": (1, 2)}) == hash_of({"a": [1, 2], "b": 1})
    True
    """
    return hashlib.sha256(_json(value, sort_keys=True).encode()).hexdigest()


def code_hash(*functions):
    """A sha256 of the source of functions and classes, blind to comments, docstrings and layout.

    A function's own decorators do not count: they register it, and hold the configurations of all presets.
    """
    total = hashlib.sha256()
    for function in functions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if isinstance(tree.body[0], ast.FunctionDef):
            tree.body[0].decorator_list = []
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
                node.body = body[1:] or [ast.Pass()]
        total.update(ast.unparse(tree).encode())
    return total.hexdigest()


def make(name, preset, values, *, config, code_hash="", data=(), arrays=None, device="cpu", wall_time=0.0, command="",
         made_with=None, kept=()):
    """A record of `values`, completed with versions, commit and time.

    `made_with` is what `software()` said when the run began, since files may be edited during a long one; None asks
    now.  `kept` is what `taken_over` gathered.
    Raises ValueError for an unknown exhibit, or for a value that no record can hold.
    """
    published.exhibit(name)
    if not isinstance(preset, str) or not re.fullmatch(r"[a-z0-9-]+", preset):
        raise ValueError(f"preset must consist of lower-case letters, digits and hyphens, got {preset!r}")
    _checks.in_interval("wall_time", wall_time, 0, math.inf, closed="left")
    return Record(
        name=name, preset=preset, values=_plain(values), config=_plain(config), code_hash=code_hash,
        data=_plain(list(data)), **(made_with or software()), device=device_name(device),
        wall_time=round(float(wall_time), 3), command=command,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        arrays={key: np.asarray(array) for key, array in (arrays or {}).items()}, kept=_plain(list(kept)),
    )


def software():
    """What a run is made with: {"versions": `versions()`, "commit": `commit()`}."""
    return {"versions": versions(), "commit": commit()}


def versions():
    """The versions of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            pass
    # An uninstalled checkout has no metadata of its own.
    import dpcompanion
    return {**found, "dpcompanion": dpcompanion.__version__}


def _repository():
    """The checkout that this package lies in, or None when it is installed without one."""
    root = pathlib.Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def commit():
    """The git commit of the code, with "+changes" where tracked files differ from it; None outside a checkout."""
    root = _repository()
    if root is None or not (root / ".git").exists():
        return None

    def git(*arguments):
        return subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, text=True, timeout=20,
                              check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "dpcompanion")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device):
    """What a device is: "cpu (x86_64)", or the name of the GPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.machine()})"


def results_folder(folder=None):
    """Where records live: `folder`, else the checkout's `results`, else `results` in the current directory."""
    return pathlib.Path(folder) if folder is not None else (_repository() or pathlib.Path.cwd()) / "results"


def path_of(name, preset, folder=None):
    """The path of a record.

    >>> str(path_of("idp-sgd/table-5", "paper", "results"))
    'results/idp-sgd/table-5.paper.json'
    """
    return results_folder(folder) / f"{published.exhibit(name).name}.{preset}.json"


def write(record, folder=None):
    """Write a record (and its arrays) whole or not at all; returns the path of its JSON file."""
    path = path_of(record.name, record.preset, folder)
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    _write_whole(path, {"schema": SCHEMA, **fields}, record.arrays, indent=1)
    return path


def read(path):
    """Read a record back; a damaged, incomplete or foreign file, or other arrays than it was made with, raise
    ValueError with the file's name."""
    path = pathlib.Path(path)
    fields, arrays = _read_whole(path)
    types = {"name": str, "preset": str, "values": dict, "config": dict, "code_hash": str, "data": list,
             "versions": dict, "commit": (str, type(None)), "device": str, "wall_time": (int, float), "command": str,
             "created": str, "arrays": dict, "kept": list}
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is no record of schema {SCHEMA}")
    fields.setdefault("kept", [])  # records of earlier versions do not say what they took over
    if fields.keys() != types.keys():
        wrong = sorted(fields.keys() ^ types.keys())
        raise ValueError(f"{path} is no record: {', '.join(wrong)} missing or unknown")
    for key, kind in types.items():
        if not isinstance(fields[key], kind):
            raise ValueError(f"{path} is no record: {key} is a {type(fields[key]).__name__}")
    return Record(**{**fields, "arrays": arrays})


# What a checkout has beside the package and a wheel inside it: `results` and the sources in `book`.
SHIPPED = pathlib.Path(__file__).resolve().parent / "shipped"


def find(name, preset="paper", folder=None):
    """The record of an exhibit, or None where there is none; another one under its name raises ValueError.

    Without a `folder`, an installed package that has no checkout finds the records that it came with as well.
    """
    path = path_of(name, preset, folder)
    if folder is None and not path.is_file() and _repository() is None:
        path = path_of(name, preset, SHIPPED / "results")
    if not path.is_file():
        return None
    record = read(path)
    if (record.name, record.preset) != (published.exhibit(name).name, preset):
        raise ValueError(f"{path} is the record of another exhibit or preset: {record.name}, {record.preset}")
    return record


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
                kept, arrays = _read_whole(path)
                if kept["config"] != hashed:
                    raise ValueError("another configuration")
                seen.setdefault(path, kept.get("made", _UNKNOWN))
            except (OSError, ValueError, KeyError, TypeError):
                made, started = software(), time.perf_counter()
                values = work(name)
                made["seconds"] = round(time.perf_counter() - started, 3)
                seen[path] = None  # this run's own, however often it is read again
                values, arrays = values if _has_arrays(values) else (values, {})
                arrays = {key: np.asarray(array) for key, array in arrays.items()}
                kept = {"config": hashed, "made": made, "values": _plain(values)}
                _write_whole(path, kept, arrays)
            results[name] = (kept["values"], arrays) if arrays else kept["values"]
            advance()
    return results


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
    for pattern in ("*.piece.json", "*.piece.npz", "*.piece.*.npz"):
        for path in folder.glob(pattern):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _has_arrays(values):
    return isinstance(values, tuple) and not isinstance(values, MeanSD) and len(values) == 2 and isinstance(
        values[1], dict) and all(isinstance(array, (np.ndarray, torch.Tensor)) for array in values[1].values())


def _plain(value):
    """The value as JSON's own types (and MeanSD), with numbers from numpy and torch unpacked."""
    if isinstance(value, MeanSD):
        return MeanSD(float(value.mean), float(value.sd), int(value.n))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"the keys of a record must be strings, got {list(value)!r}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise ValueError(f"a record holds numbers, strings, lists and dicts, got {value!r}")


def _encode(value):
    if isinstance(value, MeanSD):
        return {key: _encode(item) for key, item in value._asdict().items()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _decode(fields):
    if fields.keys() == {"float"} and fields["float"] in ("nan", "inf", "-inf"):
        return float(fields["float"])
    if fields.keys() == {"mean", "sd", "n"} and all(type(value) in (int, float) for value in fields.values()):
        return MeanSD(**fields)
    return fields


def _json(value, **layout):
    return json.dumps(_encode(_plain(value)), allow_nan=False, ensure_ascii=False, **layout)


def _read_json(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode, parse_constant=refuse)
        if isinstance(fields, dict) and "sha256" in fields and fields.pop("sha256") != hash_of(fields):
            raise ValueError("its values are not those that were written")
        return fields
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _read_whole(path):
    """The fields of a JSON file and the arrays that they name; ValueError for what is damaged or missing."""
    while True:
        before = _identity(path)
        fields = _read_json(path)
        try:
            return fields, _read_arrays(path, fields.get("arrays") if isinstance(fields, dict) else None)
        except ValueError:
            if _identity(path) == before:      # otherwise another process has replaced both meanwhile
                raise


def _identity(path):
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


def _write_whole(path, fields, arrays, **layout):
    """Write fields as JSON, with what names their arrays, and the arrays, so that a reader finds the old or the new."""
    content = _packed(arrays)
    fields["arrays"] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent) as alone:
        if content is not None:
            sha256 = hashlib.sha256(content).hexdigest()
            fields["arrays"] = {"file": f"{path.stem}.{sha256[:16]}.npz", "sha256": sha256}
            _files.replace(path.with_name(fields["arrays"]["file"]), content)
        whole = {"sha256": hash_of(fields), **fields}
        _files.replace(path, (_json(whole, **layout) + "\n").encode())
        for file in path.parent.glob(f"{glob.escape(path.stem)}.*npz"):
            # Where nobody can be locked out, young arrays may belong to a record that is being written.
            if (_is_arrays_of(path, file.name) and file.name != fields["arrays"].get("file")
                    and (alone or time.time() - file.stat().st_mtime > 3600)):
                file.unlink(missing_ok=True)
        _files._remove_stale(path.with_suffix(""))


@contextlib.contextmanager
def _alone(folder):
    """Keep other writers out of a folder, in this and other processes and containers; False where that cannot be."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:         # a file system without locks for folders
            locked = False
        yield locked
    finally:
        os.close(handle)        # unlocks; so does the end of the process, however it ends


def _packed(arrays):
    """Arrays as the content of an NPZ file; None where there are none."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"arrays must hold numbers or strings, but {name} holds objects")
    if not arrays:
        return None
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _is_arrays_of(path, name):
    """Whether a file of this name may hold the arrays of the JSON file at `path`."""
    return re.fullmatch(re.escape(path.stem) + r"(\.[0-9a-f]{16})?\.npz", name) is not None


def _read_arrays(path, about):
    if not about:
        return {}
    if not isinstance(about, dict) or about.keys() != {"file", "sha256"} or not _is_arrays_of(path, str(about["file"])):
        raise ValueError(f"{path} is damaged: its arrays must lie in {path.stem}.npz or {path.stem}.(sha256).npz")
    file = path.with_name(about["file"])
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: {path.name} keeps its arrays there") from None
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise ValueError(f"{file} holds other arrays than {path.name} was written with")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
