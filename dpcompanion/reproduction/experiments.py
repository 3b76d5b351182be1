"""The book's experiments: each exhibit that computes is a function, registered by its name.

    @experiment("idp-sgd/table-5", quick=Table5(), paper=Table5(), version=1)
    def table_5(config, run): ...

A function gets a frozen configuration, one for each preset (`quick`: minutes on two cores; `paper`:
the paper's own data and scale), and a `runs.Run`, through which it asks for data, device and
resumable pieces, so that all of them end up in the record.  It returns values under the dotted
names of the published numbers, or a pair (values, arrays).

An experiment declares a version, 1 by default. A change of its code, or the library's, that changes
its numbers raises it: records of another version are stale.

>>> record = run("idp-sgd/table-5")
>>> round(record.values["mnist.sigma"], 2)
3.42
>>> "idp-sgd/table-5" in [entry.name for entry in catalogue(folder="nowhere")]
True

`run` is what the command line calls.  Modules of papers are loaded when one of their experiments is
asked for.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from dpcompanion import _checks
from dpcompanion.reproduction import comparison, pieces, provenance, published, records, workers
from dpcompanion.reproduction.findings import Finding, Findings
from dpcompanion.reproduction.runs import Run

PRESETS = ("quick", "paper")
#: Yields (where, our numbers in words, outcome) of a record.
Judge = Callable[[records.Record], Iterable[tuple[str, str, Any]]]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_REGISTRY: "dict[str, Experiment]" = {}
_CRITERIA: "list[Criterion]" = []


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """A registered experiment: its exhibit's name, its function, a configuration for each preset,
    and its version.
    """

    name: str
    function: Callable[..., Any]
    presets: dict[str, Any]
    version: int = 1

    @property
    def title(self) -> str:
        """The published title."""
        return published.exhibit(self.name).title

    def record(
        self, preset: str = "paper", folder: records.Folder | None = None
    ) -> records.Record | None:
        """The record in the results folder, or None."""
        return records.find(self.name, _checks.one_of("preset", preset, self.presets), folder)

    def is_stale(self, record: records.Record) -> bool:
        """Whether a record has another configuration or another version than this experiment."""
        if record.preset not in self.presets:
            return True
        return record.is_stale(config=self.presets[record.preset], version=self.version)


def experiment(name: str, *, version: int = 1, **presets: Any) -> Callable[[_Function], _Function]:
    """Register a function as the experiment of an exhibit.

    Args:
        name: the exhibit, such as "idp-sgd/table-5".
        version: of its code, 1, 2, ...: raised when a change moves its numbers, which makes its
            records stale.
        presets: preset -> frozen dataclass, one at least; a field `seeds`, or `seed` where there is
            no more than one, is what `run(seeds=...)` replaces.
    """
    published.exhibit(name)
    version = _checks.whole_number("version", version, 1)
    for preset, config in presets.items():
        _checks.one_of("presets", preset, PRESETS)
        parameters = getattr(config, "__dataclass_params__", None)
        if not (dataclasses.is_dataclass(config) and parameters and parameters.frozen):
            raise ValueError(f"presets must be frozen dataclasses, got {config!r} for {preset!r}")
        if hasattr(config, "seed") and hasattr(config, "seeds"):
            raise ValueError(
                f"presets must have a field seed or seeds and not both, got {config!r} for "
                f"{preset!r}"
            )
    if not presets or name in _REGISTRY:
        raise ValueError(f"name must be new and have a preset, got {name!r} with {presets!r}")

    def register(function: _Function) -> _Function:
        _REGISTRY[name] = Experiment(name, function, dict(presets), version)
        return function

    return register


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What decides a qualitative finding, from the values of a record of the experiment `of`."""

    exhibit: str
    of: str
    text: str
    judge: Judge
    kind: str = "claim"


def finding(
    name: str, criterion: str, *, of: str | None = None, kind: str = "claim"
) -> Callable[[_Function], _Function]:
    """Register the criterion of a qualitative finding.

    Args:
        name: the exhibit that shows the finding.
        criterion: what must be the case for it to hold, in words.
        of: the experiment whose record it is judged by; by default that of the exhibit itself.
        kind: whose finding it is, see `published.FINDINGS`: the paper's "claim", a result of our
            "own", or one that "refutes" the paper. Only claims count as reproduced.

    The function that follows takes a `Record` and yields (where, our numbers in words, outcome). An
    outcome that rests on chance comes from the statistic's interval over seeds, examples or groups,
    see `intervals`, and is "undecided" where that lies on both sides of the criterion, or where the
    record holds too little for one. What is not random, such as a theorem that is checked exactly,
    may yield a truth value::

        @finding("idp-sgd/table-9", "Sample is ahead of DP-SGD")
        def many_groups_gain(record):
            gain = intervals.difference(record.values["sample.final"], record.values["dpsgd.final"])
            yield "100 groups", f"{gain:+.1f} points", gain.above(0)
    """
    for exhibit in (name, of or name):
        published.exhibit(exhibit)
    _checks.one_of("kind", kind, published.FINDINGS)

    def register(judge: _Function) -> _Function:
        _CRITERIA.append(Criterion(name, of or name, criterion, judge, kind))
        return judge

    return register


def ask_also(exhibit: str, *, of: str, under: str | None = None) -> None:
    """Judge an exhibit by the record of another experiment, too, such as that of a part with the
    paper's own network.

    Registers the criteria of the exhibit that are there by now once more: all but those that are
    judged by a part (`published.Exhibit.part_of`), which were asked of it alone, or came from here.

    Args:
        exhibit: whose criteria.
        of: the experiment whose record they are judged by.
        under: the exhibit that these findings are shown with; by default the one that has the
            criteria.

    Raises:
        ValueError: for unknown names, and where there are no criteria yet, which comes of the order
            of imports.
    """
    published.exhibit(exhibit)
    asked = [
        one for one in _CRITERIA if one.exhibit == exhibit and not published.exhibit(one.of).part_of
    ]
    if not asked:
        raise ValueError(
            f"exhibit must have criteria by now that no part is judged by, got {exhibit!r}"
        )
    for one in asked:
        finding(under or exhibit, one.text, of=of, kind=one.kind)(one.judge)


def criteria(name: str | None = None) -> list[Criterion]:
    """The criteria of an exhibit, or of all, in the order in which they are written down."""
    if name is None:
        _load()
        return list(_CRITERIA)
    published.exhibit(name)
    _load(name.partition("/")[0])
    return [criterion for criterion in _CRITERIA if criterion.exhibit == name]


@contextlib.contextmanager
def set_aside(*exhibits: str) -> Iterator[None]:
    """Do without experiments and criteria of these exhibits, so that a test may register its own.

    Afterwards everything is as before, whatever was registered meanwhile.

    >>> with set_aside("idp-sgd/table-5"):
    ...     "idp-sgd/table-5" in names(), criteria("idp-sgd/table-5")
    (False, [])
    """
    _load()
    before = dict(_REGISTRY), list(_CRITERIA)
    for name in exhibits:
        _REGISTRY.pop(published.exhibit(name).name, None)
    _CRITERIA[:] = [one for one in _CRITERIA if one.exhibit not in exhibits]
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(before[0])
        _CRITERIA[:] = before[1]


def findings(record: records.Record, name: str | None = None) -> Findings:
    """The findings of an exhibit, held against their criteria: a `findings.Findings`.

    Args:
        record: of the experiment that they are judged by; what was run at the scale of the paper
            counts as recorded.
        name: the exhibit; by default the one that the record is named after.
    """
    rows = [
        Finding(where, criterion.text, ours, outcome, criterion.kind)
        for criterion in criteria(name or record.name)
        if criterion.of == record.name
        for where, ours, outcome in criterion.judge(record)
    ]
    return Findings(rows, kind="recorded" if record.preset == "paper" else "live")


def get(name: str) -> Experiment:
    """The experiment of an exhibit; ValueError lists those that there are."""
    _load(str(name).partition("/")[0])
    if name not in _REGISTRY:
        _load()
    _checks.one_of("name", name, names())
    return _REGISTRY[name]


def names() -> tuple[str, ...]:
    """The names of all experiments, in the order of the papers and their exhibits."""
    _load()
    return tuple(
        exhibit.name for exhibit in published.exhibits(ours=True) if exhibit.name in _REGISTRY
    )


def default_preset() -> str:
    """The preset that notebooks run with: `DPCOMPANION_PRESET`, or "quick"."""
    return _checks.one_of(
        "DPCOMPANION_PRESET", os.environ.get("DPCOMPANION_PRESET") or "quick", PRESETS
    )


def _with_seeds(config, seeds, name):
    """The configuration with these seeds in place of its own, and the seeds as a tuple."""
    one = hasattr(config, "seed")
    if not (one or hasattr(config, "seeds")):
        raise ValueError(
            f"seeds must be left out, since {name} draws nothing at random, got {seeds!r}"
        )
    seeds = tuple(_checks.whole_number("seeds", seed) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different whole numbers, one at least, got {seeds!r}")
    if one and len(seeds) > 1:
        raise ValueError(
            f"seeds must be a single one, since {name} runs with one seed at a time, got {seeds!r}"
        )
    return dataclasses.replace(
        config, **{"seed": next(iter(seeds))} if one else {"seeds": seeds}
    ), seeds


def run(
    name: str,
    *,
    preset: str | None = None,
    device: str | torch.device = "cpu",
    out: records.Folder | None = None,
    seeds: Iterable[int] | None = None,
    jobs: int | None = None,
    share: tuple[int, int] | None = None,
) -> records.Record:
    """Run an experiment and return its `Record`.

    Args:
        name: "idp-sgd/table-5".
        preset: "quick" or "paper"; `default_preset()` by default.
        device: where to compute.
        out: the folder to write the record into (`records.results_folder()` is the usual one); None
            writes nothing. With a folder, an interrupted run goes on where it stopped when it is
            started again.
        seeds: replaces the configuration's seeds, or its one seed.
        jobs: how many processes do its pieces; None leaves them to the back end of joblib that is
            active (Dask, Ray), or else to this process.
        share: (k, n) to do every n-th piece alone, from the k-th, for a run that n processes with
            the same folders share; (0, 1) to do none, and to make the record of the pieces that
            others have done.

    Raises:
        ValueError: before any work, for unknown names and presets, for a device or a folder that
            cannot be used, for seeds, or more of them, than the experiment uses, and for a share
            without a folder.
        dpcompanion.reproduction.workers.Missing: where the pieces of other shares are not there
            yet.
    """
    found = get(name)
    if preset is None and default_preset() not in found.presets:
        raise ValueError(
            f"preset must be given for {name}, which has none for {default_preset()!r}: "
            f"{' or '.join(map(repr, found.presets))}, a long run"
        )
    preset = _checks.one_of("preset", preset or default_preset(), found.presets)
    config = found.presets[preset]
    if seeds is not None:
        config, seeds = _with_seeds(config, seeds, name)
    device = _device(device)
    if share is not None and out is None:
        raise ValueError(
            f"out must be a folder that all shares of a run write to, got None with share {share!r}"
        )
    if out is not None:
        _writable(records.path_of(name, preset, out).parent, out)
    with tempfile.TemporaryDirectory() as scratch:
        path = records.path_of(name, preset, scratch if out is None else out)
        parts = path.with_name(f".{path.stem}.parts")
        # Asked before the work begins: an edit during a long run is not in the record.
        this, made_with = Run(config, device, parts, found.version), provenance.software()
        started = time.perf_counter()
        with contextlib.ExitStack() as spread:
            if jobs is not None:
                spread.enter_context(workers.processes(jobs))
            if share is not None:
                spread.enter_context(workers.share(*share))
            kept = spread.enter_context(pieces.taken_over())
            values = found.function(config, this)
        if share == (0, 1) and not kept:
            raise ValueError(
                f"{name} must have been done in pieces for its record to be merged, but there are "
                "none: a run makes its record"
            )
        values, arrays = values if isinstance(values, tuple) else (values, {})
        command = f"dpcompanion run {name} --preset {preset} --device {device}"
        if seeds is not None:
            command += f" --seeds {' '.join(map(str, seeds))}"
        if jobs is not None:
            command += f" --jobs {jobs}"
        record = records.make(
            name,
            preset,
            values,
            config=config,
            version=found.version,
            data=this.loaded,
            arrays=arrays,
            device=device,
            wall_time=time.perf_counter() - started,
            command=command,
            made_with=made_with,
            kept=kept,
        )
        if out is not None:
            records.write(record, out)
            pieces.discard(parts)
    return record


def compare(
    live: records.Record, *, folder: records.Folder | None = None, **options: Any
) -> comparison.Comparison:
    """The table of a live `Record` beside published numbers and, if any, the paper-scale record.

    `options` go to `dpcompanion.reproduction.comparison.compare`. A stale record is said to be
    stale, a stand-in for the paper's network to be one.
    """
    found = get(live.name)
    recorded = found.record("paper", folder) if "paper" in found.presets else None
    stale = recorded is not None and found.is_stale(recorded)
    judged = live if recorded is None or stale else recorded
    return comparison.compare(
        live.name,
        live=live,
        recorded=recorded,
        stale=stale,
        stand_in=is_stand_in(judged),
        **options,
    )


def is_stand_in(record: records.Record, name: str | None = None) -> bool:
    """Whether a record has none of the networks that its exhibit, or the one called `name`, shows;
    or, at the paper's scale, none of its data.

    >>> [
    ...     is_stand_in(records.find(f"individual-accounting/{exhibit}"))
    ...     for exhibit in ("table-1", "table-2")
    ... ]
    [False, True]
    """
    shown = published.exhibit(name or record.name)
    if not record.data:
        return False
    data = {entry["name"] for entry in record.data}
    return bool(
        (shown.networks and not {*shown.networks} & networks(record))
        or (record.preset == "paper" and shown.data and not {*shown.data} & data)
    )


def networks(record: records.Record) -> set[str]:
    """The entries `model` of a record's configuration and of its tasks, but for those not run."""
    return set(_networks(record.config, record.values.get("not_run", ())))


def _networks(config: Mapping[str, Any], not_run: Sequence[str] = ()) -> Iterator[str]:
    for key, value in config.items():
        if key == "model":
            yield value
        elif isinstance(value, dict) and key not in not_run:
            yield from _networks(value, not_run)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A catalogue line; `records` maps each preset to "missing", "fresh", "stale" or "damaged"."""

    name: str
    title: str
    presets: tuple[str, ...]
    records: dict[str, str]


def catalogue(folder: records.Folder | None = None) -> list[Entry]:
    """All experiments with their published titles, presets, and the state of their records."""
    entries = []
    for name in names():
        found = _REGISTRY[name]
        states = {}
        for preset in found.presets:
            try:
                record = found.record(preset, folder)
                states[preset] = (
                    "missing" if record is None else "stale" if found.is_stale(record) else "fresh"
                )
            except ValueError:
                states[preset] = "damaged"
        entries.append(Entry(name, found.title, tuple(found.presets), states))
    return entries


def _device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be a torch device such as 'cpu' or 'cuda', got {device!r}"
        ) from None
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # each backend has its own way to say that it is not there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"device must be one that computes here, got {str(device)!r} ({reason})"
        ) from None
    return device


def _writable(folder: pathlib.Path, out: records.Folder) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"out must be a folder that can be written to, got {str(out)!r} ({error.strerror})"
        ) from None


def _load(*papers: str) -> None:
    """Import the modules of the given papers, or of all."""
    for slug in papers or published.PAPERS:
        module = f"{__package__}.papers.{slug.replace('-', '_')}"
        if slug in published.PAPERS and importlib.util.find_spec(module):
            importlib.import_module(module)
