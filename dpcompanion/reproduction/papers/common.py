"""What the exhibits of several papers share: which tasks a device can do, runs that go on within
themselves, names of values, and a few statistics.
"""

import math
import time
from typing import Any

import numpy as np
from scipy import stats

from dpcompanion.reproduction import pieces
from dpcompanion.reproduction.records import Record
from dpcompanion.reproduction.runs import Run
from dpcompanion.training import Checkpoint


def runnable(config: Any, run: Run) -> dict[str, Any]:
    """The tasks that this device can do: those that need more than two cores, and those called
    `larger`, on a GPU.
    """
    if run.device.type != "cpu":
        return _all(config)
    return {name: task for name, task in config.tasks.items() if not getattr(task, "needs", "")}


def left_out(config: Any, run: Run) -> dict[str, Any]:
    """What a record says of the tasks that were not run: {"not_run": names}, or nothing."""
    names = [name for name in _all(config) if name not in runnable(config, run)]
    return {"not_run": names} if names else {}


def _all(config: Any) -> dict[str, Any]:
    return {**config.tasks, **getattr(config, "larger", {})}


class Trace:
    """What a run sees along its way, lists of tensors by name, and its seconds, with its state.

    >>> trace = Trace("norms")
    >>> trace["norms"].append(1.5)
    >>> again = Trace("norms")
    >>> again.load_state_dict(trace.state_dict())
    >>> again["norms"], again.seconds >= 0
    ([1.5], True)
    """

    def __init__(self, *names: str):
        self._lists: dict[str, list[Any]] = {name: [] for name in names}
        self._before, self._since = 0.0, time.perf_counter()

    def __getitem__(self, name: str) -> list[Any]:
        return self._lists[name]

    @property
    def seconds(self) -> float:
        """How long the run took so far, in all processes of it, up to their last state."""
        return self._before + time.perf_counter() - self._since

    def state_dict(self) -> dict[str, Any]:
        return {
            "lists": {name: list(values) for name, values in self._lists.items()},
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["lists"].items():
            self._lists[name][:] = values
        self._before, self._since = state["seconds"], time.perf_counter()


def within_the_piece(**stateful: Any) -> Checkpoint | None:
    """Where the piece at work keeps its run after every epoch, these objects' state included.

    None for a run that is no piece on the disk: a short one.
    """
    state = pieces.unfinished()
    kept = {name: each for name, each in stateful.items() if each is not None}
    return Checkpoint(state, stateful=kept) if state else None


def reported(record: Record) -> list[str]:
    """The tasks that a record has values of."""
    left = record.values.get("not_run", ())
    return [
        name
        for kind in ("tasks", "larger")
        for name in record.config.get(kind, ())
        if name not in left and any(key.startswith(f"{name}.") for key in record.values)
    ]


def named(prefix: str, **values: Any) -> dict[str, Any]:
    """Values under the names that a record gives them.

    >>> named("mnist", max=1.5)
    {'mnist.max': 1.5}
    """
    return {f"{prefix}.{key}": value for key, value in values.items()}


def pearson(a: Any, b: Any) -> float:
    """Pearson's r; nan where one of the two does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if np.std(a) > 0 and np.std(b) > 0 else math.nan


def rank(a: Any, b: Any) -> float:
    """Spearman's rank correlation; nan where one of the two does not vary."""
    return pearson(stats.rankdata(a), stats.rankdata(b))


def histogram(values: Any, top: float) -> np.ndarray:
    """Counts in 120 bins from 0 to the worst case."""
    return np.histogram(np.clip(values, 0, top), np.linspace(0, top, 121))[0].astype(np.int32)
