"""The tasks, their data, and the grids of runs that most exhibits of Hyland and Tople share."""

import dataclasses
import functools
import math
import time

import numpy as np
import torch

from dpcompanion import data
from dpcompanion import output_perturbation as op
from dpcompanion.output_perturbation import grids as ensembles
from dpcompanion.reproduction.experiments import finding

INITIALIZATIONS = ("varying", "fixed")


@dataclasses.dataclass(frozen=True)
class Task:
    """Plain SGD on one data set: hyperparameters, and how many neighbours and seeds to train."""

    batch_size: int
    learning_rate: float
    steps: int
    seeds: int
    data_sets: int


PAPER = {
    "mnist-binary": Task(32, 0.1, 1850, seeds=99, data_sets=50),
    "forest": Task(50, 1.0, 8400, seeds=127, data_sets=64),
    "adult": Task(32, 0.5, 3400, seeds=161, data_sets=80),
}
UNSCALED = {"mnist-binary-unscaled": PAPER["mnist-binary"]}
# Its printed numbers come from digits that are not scaled, as in its public code, unlike its text.
SCALED = "mnist-binary"
QUICK = {
    "digits": Task(32, 1.0, 120, seeds=40, data_sets=20),
    "breast-cancer": Task(16, 1.0, 150, seeds=40, data_sets=20),
}


@dataclasses.dataclass(frozen=True)
class Grids:
    """The tasks that an exhibit looks at."""

    tasks: dict


@dataclasses.dataclass(frozen=True)
class Problem:
    """Training examples, the held-out one first, and test examples."""

    features: torch.Tensor
    labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor
    validation: int

    @property
    def examples(self):
        """The N of table I, of which data sets hold N - 1."""
        return len(self.labels)


@functools.cache
def _digits(source, unscaled, projection=0):
    """3 against 5, projected from 784 to 50 features by the random matrix of that number."""
    generator = torch.Generator().manual_seed(50 + projection)
    matrix = torch.randn(784, 50, generator=generator, dtype=torch.float64) / 50**0.5
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load(source, split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        kept = (found.labels == 3) | (found.labels == 5)
        parts += [found.features[kept].flatten(1) @ matrix, (found.labels[kept] == 5).long()]
    return _problem(*parts, rescale=False, unit=not unscaled), loaded


@functools.cache
def _forest():
    """Covertype classes 1 and 2; 15% for testing."""
    found = data.load("covertype", split="all", dtype=torch.float64)
    kept = found.labels < 2
    features, labels = found.features[kept], found.labels[kept]
    features = features[:, features.amin(0) < features.amax(0)]
    order = torch.as_tensor(np.random.RandomState(0).permutation(len(labels)))
    test, train = order[: math.ceil(0.15 * len(order))], order[math.ceil(0.15 * len(order)) :]
    return _problem(features[train], labels[train], features[test], labels[test]), [
        found.provenance()
    ]


@functools.cache
def _adult():
    """One-hot, without the first level of each column."""
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load("adult", split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        columns, table = [], found.features
        assert isinstance(table, torch.Tensor)  # texts alone have a tuple
        for name, values in zip(found.columns, table.T):
            levels = len(found.categories.get(name, ()))
            columns.append(
                torch.nn.functional.one_hot(values.long(), levels)[:, 1:]
                if levels
                else values[:, None]
            )
        parts += [torch.cat([column.double() for column in columns], 1), found.labels]
    return _problem(*parts), loaded


def numeric_first(name, features):
    """Where the public code has each feature of a task: Adult's numbers stand before its
    categories, in the order of the file; other tasks are in the order of theirs.
    """
    if name != "adult":
        return list(range(features))
    found = data.load("adult", split="train")
    widths = [
        len(found.categories[column]) - 1 if column in found.categories else 1
        for column in found.columns
    ]
    numeric = [column not in found.categories for column in found.columns]
    places, at = {}, 0
    for wanted in (True, False):
        for i, width in enumerate(widths):
            if numeric[i] is wanted:
                places[i], at = range(at, at + width), at + width
    return [place for i in range(len(widths)) for place in places[i]]


@functools.cache
def _breast_cancer():
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load("breast-cancer", split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        parts += [found.features, found.labels]
    return _problem(*parts), loaded


def _problem(features, labels, test_features, test_labels, *, rescale=True, unit=True):
    """Shuffle, set a tenth aside for validation, scale columns to [0, 1] and examples to norm 1."""
    if rescale:
        low, high = features.amin(0), features.amax(0)
        features, test_features = (
            (part - low) / (high - low).clamp(min=1e-12) for part in (features, test_features)
        )
    if unit:
        features, test_features = (
            part / part.norm(dim=1, keepdim=True) for part in (features, test_features)
        )
    order = torch.as_tensor(np.random.RandomState(0).permutation(len(labels)))
    held_out = len(order) // 10
    order = order[held_out:]
    return Problem(features[order], labels[order], test_features, test_labels, held_out)


_SOURCES = {
    "mnist-binary": functools.partial(_digits, "mnist", False),
    "mnist-binary-unscaled": functools.partial(_digits, "mnist", True),
    "forest": _forest,
    "adult": _adult,
    "adult-code": _adult,
    "digits": functools.partial(_digits, "mnist-5k", False),
    "breast-cancer": _breast_cancer,
}


def projected(name, number):
    """The task of digits that has the random projection of that number in place of the first."""
    return f"{name}.projection-{number}" if number else name


def problem(name, run=None):
    """The examples of a task, noted in the run's record."""
    name, _, number = name.partition(".projection-")
    found, loaded = _SOURCES[name](*([int(number)] if number else []))
    if run is not None:
        run.note(loaded)
    return found


def as_computed(record):
    """The tasks of a record whose numbers and figures the paper prints: without the scaled digits
    of its text.
    """
    tasks = record.config["tasks"]
    return [name for name in tasks if name != SCALED or not UNSCALED.keys() & tasks.keys()]


def as_written(record):
    """The rest: the digits scaled to norm 1, as the paper's text has them, where both are there."""
    return [name for name in record.config["tasks"] if name not in as_computed(record)]


def claim(exhibit, criterion):
    """Register `judge(record, names)` for the tasks that the paper shows and, as our own, for those
    of its text.
    """

    def register(judge):
        for names, words, kind in (
            (as_computed, criterion, "claim"),
            (as_written, f"{criterion}, with digits scaled as its text says", "own"),
        ):
            judged = functools.wraps(judge)(
                lambda record, names=names: judge(record, names(record))
            )
            finding(exhibit, words, kind=kind)(judged)
        return judge

    return register


def trained(name, task, run, initialization="varying", **options):
    """`grid_runs`' weights, (1 + data sets, seeds, parameters) float64, data set 0 first."""
    return grid_runs(name, task, run, initialization, **options)[0]


def grid_runs(
    name,
    task,
    run,
    initialization,
    *,
    hidden=0,
    data_sets=None,
    first_seed=0,
    held_out=None,
    half=False,
):
    """The weights, and the seconds that training took when it was done.

    `data_sets` replaces 0, ..., task.data_sets; seeds count from `first_seed`; `held_out`
    (features, label) stands in for the example that replaces others; `half` leaves half of the
    examples out. Runs that take long are kept, piece by piece.

    Many arguments, since they describe the data sets, the seeds and the model of a grid.
    """
    found = problem(name, run)
    data_sets = tuple(range(task.data_sets + 1)) if data_sets is None else tuple(data_sets)
    key = {
        "task": name,
        "batch_size": task.batch_size,
        "learning_rate": task.learning_rate,
        "steps": task.steps,
        "initialisation": initialization,
        "hidden": hidden,
        "data_sets": data_sets,
    }
    if half:
        key["half"], kept = True, len(found.labels) // 2
        found = dataclasses.replace(
            found, features=found.features[:kept], labels=found.labels[:kept]
        )
    if held_out is not None:
        key["held_out"] = [held_out[0].tolist(), held_out[1]]
        found = dataclasses.replace(
            found,
            features=torch.cat((held_out[0][None], found.features[1:])),
            labels=torch.cat((torch.tensor([held_out[1]]), found.labels[1:])),
        )

    def train(piece):
        first, last = map(int, piece.split("-"))
        started = time.perf_counter()
        weights = ensembles.train_grid(
            found.features,
            found.labels,
            data_sets=data_sets,
            seeds=range(first, last),
            steps=task.steps,
            batch_size=task.batch_size,
            learning_rate=task.learning_rate,
            initialization=initialization,
            hidden=hidden,
            enforce_conditions="-unscaled" not in name,
            device=run.device,
            progress=False,
        )
        return {"seconds": time.perf_counter() - started}, {"weights": weights.numpy()}

    # A last piece of one seed would be no grid: it joins the piece before.
    size = max(16, task.seeds // 16)
    cuts = [*range(first_seed, first_seed + task.seeds - 1, size), first_seed + task.seeds]
    pieces = [f"{a}-{b}" for a, b in zip(cuts, cuts[1:])]
    parts = run.keep(
        train,
        pieces,
        config=key,
        seconds=task.steps * task.seeds * len(data_sets) / 3e5,
        under=f"grids/{name}-{initialization}",
        label=f"{name}, {initialization}",
    ).values()
    return (
        torch.cat([torch.as_tensor(arrays["weights"]) for _, arrays in parts], 1),
        sum(values["seconds"] for values, _ in parts),
    )


def sensitivities(task, examples):
    """Theorem 2 for a task: (the bound, the paper's fractional value, passes begun)."""
    batches = math.ceil((examples - 1) / task.batch_size)
    common = {
        "lipschitz": math.sqrt(2),
        "learning_rate": task.learning_rate,
        "batch_size": task.batch_size,
    }
    return (
        # two classes, rows of norm 1
        op.sgd_sensitivity(passes=task.steps / batches, smoothness=0.5, **common),
        op.sgd_sensitivity_estimate(passes=task.steps * task.batch_size / examples, **common),
        math.ceil(task.steps / batches),
    )


def between_seeds(weights):
    """Distances between all pairs of seeds on each data set, (data sets, pairs)."""
    return torch.stack([torch.pdist(one) for one in weights])
