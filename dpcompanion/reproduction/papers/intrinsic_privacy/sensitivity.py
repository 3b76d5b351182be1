"""Sensitivities of SGD: figure 1, table I, theorem 2, claims 1 and 2."""

import dataclasses
import math

import numpy as np
import torch

from dpcompanion import output_perturbation as op
from dpcompanion.output_perturbation import grids as ensembles
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding, get
from dpcompanion.reproduction.papers.intrinsic_privacy.grids import (
    INITIALIZATIONS,
    PAPER,
    QUICK,
    UNSCALED,
    Grids,
    grid_runs,
    problem,
    sensitivities,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Paths(Grids):
    """Figure 1: which two weights to follow, for how many seeds, at how many steps; six runs are
    drawn, and twenty pairs tell how far runs end apart.
    """

    coordinates: tuple = (26, 36)
    runs: int = 40
    points: int = 60


@experiment(
    "intrinsic-privacy/figure-1",
    quick=Paths({"breast-cancer": QUICK["breast-cancer"]}, coordinates=(6, 16)),
    paper=Paths({"forest": PAPER["forest"]}),
)
def figure_1(config, run):
    """Two weights on the way, from one initialisation: the distance between runs at the end, and
    the whole norm.
    """
    ((name, task),) = config.tasks.items()
    found = problem(name, run)
    stops = [round(i * task.steps / config.points) for i in range(config.points + 1)]
    weights = ensembles.train_grid(
        found.features,
        found.labels,
        data_sets=(0, 1),
        seeds=range(config.runs),
        steps=task.steps,
        batch_size=task.batch_size,
        learning_rate=task.learning_rate,
        initialization="fixed",
        snapshots=stops,
        device=run.device,
        progress=False,
    )[:, 0]
    path = weights[..., list(config.coordinates)]
    apart = torch.pdist(path[-1])
    values = {
        "apart_at_start": torch.pdist(path[0]).max(),
        "apart_at_end": apart.mean(),
        "travelled": (path[-1] - path[0]).norm(dim=-1).mean(),
    }
    return values, {"steps": np.array(stops), "path": path.numpy().astype(np.float32)}


@experiment("intrinsic-privacy/table-1", quick=Grids(QUICK), paper=Grids(PAPER))
def table_1(config, run):
    """Sizes of the data sets, the number of runs 2 R S, and the seconds that they took."""
    values = {}
    for name, task in config.tasks.items():
        found = problem(name, run)
        values |= {
            f"{name}.train": found.examples,
            f"{name}.validation": found.validation,
            f"{name}.test": len(found.test_labels),
            f"{name}.d": found.features.shape[1],
            f"{name}.experiments": 2 * task.seeds * task.data_sets,
            f"{name}.seconds": sum(grid_runs(name, task, run, i)[1] for i in INITIALIZATIONS),
        }
    return values


@experiment("intrinsic-privacy/theorem-2", quick=Grids(QUICK), paper=Grids(PAPER | UNSCALED))
def theorem_2(config, run):
    """The bound and what was seen: against set 0 (one place differs), between two (two places)."""
    values = {}
    for name, task in config.tasks.items():
        bound, fractional, passes = sensitivities(task, problem(name, run).examples)
        weights = trained(name, task, run)
        values |= {
            f"{name}.passes": passes,
            f"{name}.bound": bound,
            f"{name}.fractional": fractional,
            f"{name}.one_place": (weights[1:] - weights[:1]).norm(dim=-1).max(),
            f"{name}.two_places": op.empirical_sensitivity(weights[1:]),
        }
    return values


@dataclasses.dataclass(frozen=True)
class Shuffles:
    """Claims 1 and 2: permutations of N examples in each of k passes."""

    examples: int
    passes: int
    draws: int
    seed: int = 0


@experiment(
    "intrinsic-privacy/claims-1-2", quick=Shuffles(200, 6, 20000), paper=Shuffles(10396, 6, 20000)
)
def claims_1_2(config, run):
    """Fixed points of random orders, and the bound of equation 9 in units of 2 L eta."""
    n, k = config.examples, config.passes
    random = np.random.RandomState(config.seed)
    places = np.arange(n)
    fixed = np.array(
        [[(random.permutation(n) == places).sum() for _ in range(k)] for _ in range(config.draws)]
    )
    variability = (n - fixed).sum(1)
    near = np.abs(variability - k * (n - 1)) >= k * (n - 2) / 2
    return {
        "mean": variability.mean(),
        "mean_claimed": k * (n - 1),
        "variance": variability.var(),
        "variance_claimed": k,
        "maximum_claimed": k * n,
        "chebyshev": 4 / (k * (n - 2) ** 2),
        "chance": near.mean(),
        "fixed_points": np.bincount(fixed.ravel(), minlength=8)[:8] / fixed.size,
    }


NAMES = {
    "mnist-binary": "MNIST-binary",
    "mnist-binary-unscaled": "MNIST-binary, not scaled",
    "forest": "Forest",
    "adult": "Adult",
    "adult-code": "Adult, steps of the public code",
    "digits": "digits",
    "breast-cancer": "breast cancer",
}


def bounded_sensitivity(record):
    """The tasks that theorem 2 covers."""
    return [name for name in record.config["tasks"] if not name.endswith("-unscaled")]


@finding(
    "intrinsic-privacy/figure-1",
    "two weights end further apart than any one example moved all of them (table 3)",
)
def _ends_apart(record):
    moved = get("intrinsic-privacy/table-3").record(record.preset)
    if moved is None:
        return
    ends = record.arrays["path"][-1].astype(np.float64)
    # pairs that share no run
    apart = np.linalg.norm(ends[::2][: len(ends) // 2] - ends[1::2], axis=-1)
    (name,) = record.config["tasks"]
    star = moved.values[f"{name}.delta_empirical"]
    star = getattr(star, "mean", star)
    each = intervals.mean(apart)
    yield "pairs of runs", f"{each:.3f} against {star:.3f}", each.above(star)


@finding(
    "intrinsic-privacy/theorem-2",
    "no measured distance, with one place replaced, exceeds the bound",
)
def _within_bound(record):
    for name in bounded_sensitivity(record):
        seen, bound = record.values[f"{name}.one_place"], record.values[f"{name}.bound"]
        yield NAMES[name], f"{seen:.3f} of {bound:.3f}", seen <= bound


@finding(
    "intrinsic-privacy/claims-1-2",
    "simulated mean within 0.1%, variance within 5%, chance at most Chebyshev's",
)
def _claims(record):
    value, draws = record.values, record.config["draws"]
    # The variance of a sample variance: a Poisson number of fixed points in each of k passes has
    # excess kurtosis 1 / k.
    spread = math.sqrt((2 + 1 / record.config["passes"]) / draws)
    variance = intervals.of_summary(
        value["variance"], spread * value["variance"] * math.sqrt(draws), draws
    )
    mean = intervals.of_summary(value["mean"], math.sqrt(value["variance"]), draws)
    claimed = value["mean_claimed"], value["variance_claimed"]
    good = intervals.every(
        mean.at_least(0.999 * claimed[0]),
        mean.at_most(1.001 * claimed[0]),
        variance.at_least(0.95 * claimed[1]),
        variance.at_most(1.05 * claimed[1]),
        value["chance"] <= value["chebyshev"],
    )
    yield "random orders", f"mean {mean.estimate:.1f}, variance {variance:.2f}", good
