"""Records: what a run leaves behind, with everything that is needed to trust it or to run it again.

A record is one JSON file, `results/<paper>/<exhibit>.<preset>.json`: the values, the full
configuration with its seeds, the data with their sha256, library versions, git commit, device, wall
time and the command.  Arrays lie in an NPZ file beside it; see `dpcompanion.reproduction.storage`
for how both are written and checked.

What a run takes over from earlier ones (`dpcompanion.reproduction.pieces`) is listed under `kept`,
with their commit, versions and seconds.

A run that leaves out tasks of its configuration, for want of a GPU or of data, lists their names in
`values` as `not_run`: ["cifar10", ...]. Such a record never counts as the whole exhibit (see
`dpcompanion.reproduction.scoreboard`).

A record is stale when its experiment now has another configuration or another version than the
record was made with; the book then says so.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> made = make("idp-sgd/table-5", "quick", {"mnist.sigma": float("inf")}, config={"delta": 1e-5})
>>> _ = write(made, folder)
>>> find("idp-sgd/table-5", "quick", folder).values
{'mnist.sigma': inf}
"""

import dataclasses
import datetime
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dpcompanion import _checks, seeds
from dpcompanion.reproduction import provenance, published
from dpcompanion.reproduction.storage import (  # noqa: F401, as part of a record's values
    MeanSD,
    hash_of,
    mean_and_sd,
    plain,
    read_whole,
    write_whole,
)

SCHEMA = 2
#: A folder, or a file.
Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One run, see the module's text.

    Attributes:
        name, preset: "idp-sgd/table-5" and "paper".
        values: what was computed, under the same dotted names as the published numbers where there
            are such.
        arrays: name -> numpy array, in the NPZ file beside the record.
        config: the full configuration, seeds included.
        version: of the experiment that made it, see `experiments.experiment`.
        data: `Dataset.provenance()` of each data set. versions, commit, device, wall_time
            (seconds), command, created (UTC): how and when.
        kept: what it took over from earlier runs, see `pieces.taken_over`.
        folder: where `find` found it; no part of the record.
    """

    name: str
    preset: str
    values: dict[str, Any]
    config: dict[str, Any]
    version: int
    data: list[dict[str, Any]]
    versions: dict[str, str]
    commit: str | None
    device: str
    wall_time: float
    command: str
    created: str
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    kept: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    folder: Folder | None = None

    def beside(self, name: str) -> "Record | None":
        """The record of another exhibit with the same preset, from the same folder, or None."""
        return find(name, self.preset, self.folder)

    @property
    def has_earlier_draws(self) -> bool:
        """Whether its seeds, or those of kept work, stood for other draws than `seeds.DRAWS`.

        The same command then draws other batches, noise and first weights: its numbers agree within
        their spread, not digit for digit. A run without data and seeds draws nothing.
        """
        if not (self.data or self.seeds):
            return False
        made_with = [self.versions, *(each["versions"] for each in self.kept)]
        return any(int(versions.get("draws", 1)) < seeds.DRAWS for versions in made_with)

    @property
    def seeds(self) -> list[int]:
        """The seeds of its configuration, or its one `seed`."""
        return (
            [self.config["seed"]] if "seed" in self.config else list(self.config.get("seeds", []))
        )

    def is_stale(self, *, config: Any = None, version: int | None = None) -> bool:
        """Whether it was made with another configuration (seeds apart) or version than given."""
        mine = _without_seeds(self.config)
        other = mine if config is None else _without_seeds(plain(config))
        return hash_of(mine) != hash_of(other) or (version is not None and self.version != version)


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("seed", "seeds")}


def make(
    name: str,
    preset: str,
    values: Mapping[str, Any],
    *,
    config: Any,
    version: int = 1,
    data: Iterable[Mapping[str, Any]] = (),
    arrays: Mapping[str, np.ndarray | torch.Tensor] | None = None,
    device: str | torch.device = "cpu",
    wall_time: float = 0.0,
    command: str = "",
    made_with: provenance.Software | None = None,
    kept: Iterable[Mapping[str, Any]] = (),
) -> Record:
    """A record of `values`, completed with versions, commit and time.

    `made_with` is what `provenance.software()` said when the run began, since files may be edited
    during a long one; None asks now. `kept` is what `pieces.taken_over` gathered. Raises ValueError
    for an unknown exhibit, or for a value that no record can hold.

    Many arguments, since a record has many fields.
    """
    published.exhibit(name)
    if not isinstance(preset, str) or not re.fullmatch(r"[a-z0-9-]+", preset):
        raise ValueError(
            f"preset must consist of lower-case letters, digits and hyphens, got {preset!r}"
        )
    _checks.in_interval("wall_time", wall_time, 0, math.inf, closed="left")
    return Record(
        name=name,
        preset=preset,
        values=plain(values),
        config=plain(config),
        version=version,
        data=plain(list(data)),
        **(made_with or provenance.software()),
        device=provenance.device_name(device),
        wall_time=round(float(wall_time), 3),
        command=command,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        arrays={key: np.asarray(array) for key, array in (arrays or {}).items()},
        kept=plain(list(kept)),
    )


def results_folder(folder: Folder | None = None) -> pathlib.Path:
    """Where records live: `folder`, else the checkout's `results`, else `results` here."""
    return (
        pathlib.Path(folder)
        if folder is not None
        else (provenance.repository() or pathlib.Path.cwd()) / "results"
    )


def path_of(name: str, preset: str, folder: Folder | None = None) -> pathlib.Path:
    """The path of a record.

    >>> str(path_of("idp-sgd/table-5", "paper", "results"))
    'results/idp-sgd/table-5.paper.json'
    """
    return results_folder(folder) / f"{published.exhibit(name).name}.{preset}.json"


def write(record: Record, folder: Folder | None = None) -> pathlib.Path:
    """Write a record (and its arrays) whole or not at all; returns the path of its JSON file."""
    path = path_of(record.name, record.preset, folder)
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    fields.pop("folder")
    write_whole(path, {"schema": SCHEMA, **fields}, record.arrays, indent=1)
    return path


def read(path: Folder) -> Record:
    """Read a record back; a damaged, incomplete or foreign file, or other arrays than it was made
    with, raise ValueError with the file's name.
    """
    path = pathlib.Path(path)
    fields, arrays = read_whole(path)
    types = {
        "name": str,
        "preset": str,
        "values": dict,
        "config": dict,
        "version": int,
        "data": list,
        "versions": dict,
        "commit": (str, type(None)),
        "device": str,
        "wall_time": (int, float),
        "command": str,
        "created": str,
        "arrays": dict,
        "kept": list,
    }
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is no record of schema {SCHEMA}")
    if fields.keys() != types.keys():
        wrong = sorted(fields.keys() ^ types.keys())
        raise ValueError(f"{path} is no record: {', '.join(wrong)} missing or unknown")
    for key, kind in types.items():
        if not isinstance(fields[key], kind):
            raise ValueError(f"{path} is no record: {key} is a {type(fields[key]).__name__}")
    return Record(**{**fields, "arrays": arrays})


# What a checkout has beside the package and a wheel inside it: `results` and the sources in `book`.
SHIPPED = pathlib.Path(__file__).resolve().parent / "shipped"


def find(name: str, preset: str = "paper", folder: Folder | None = None) -> Record | None:
    """The record of an exhibit, or None; another one under its name raises ValueError.

    Without a `folder`, an installed package that has no checkout finds the records that it came
    with as well.
    """
    path = path_of(name, preset, folder)
    if folder is None and not path.is_file() and provenance.repository() is None:
        path = path_of(name, preset, SHIPPED / "results")
    if not path.is_file():
        return None
    record = read(path)
    if (record.name, record.preset) != (published.exhibit(name).name, preset):
        raise ValueError(
            f"{path} is the record of another exhibit or preset: {record.name}, {record.preset}"
        )
    return dataclasses.replace(record, folder=folder)
