"""Accounts that are published: table 2."""

import dataclasses

import numpy as np
import torch

from dpcompanion import release
from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import left_out, named, reported, runnable
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    NAME,
    QUICK,
    at_length,
    subset,
    trained,
)
from dpcompanion.reproduction.papers.yu import LABELS, STATISTICS, Study, released


@dataclasses.dataclass(frozen=True)
class Release(Study):
    """Table 2: the budget for all six statistics together, and how many times to draw."""

    epsilon: float = 0.1
    quantiles: tuple = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 20


@experiment(
    f"{NAME}/table-2", quick=Release(QUICK), paper=Release(at_length(subset("mnist", "cifar10")))
)
def table_2(config, run):
    """Mean and quantiles of epsilon, released under one budget; mean and sd over draws."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = trained(task, config.seed, run)
        epsilon = torch.as_tensor(found.epsilon())
        true = [float(epsilon.mean()), *np.quantile(epsilon, config.quantiles)]
        values |= named(f"{name}.non_private", **dict(zip(STATISTICS, true)))
        for method in release.METHODS:
            drawn = np.array(
                [
                    released(epsilon, found.worst_case, task.delta, config, method, draw)
                    for draw in range(config.draws)
                ]
            )
            error = records.mean_and_sd(100 * np.abs(drawn / true - 1).mean(1))
            statistics = dict(zip(STATISTICS, map(records.mean_and_sd, drawn.T)))
            # The print's row is by "andrew2021", which records of before leave out.
            values |= named(f"{name}.{method}.released", **statistics)
            if method == "cdf":
                values |= named(f"{name}.released", **statistics)
                values[f"{name}.mean_error_percent"] = error
            values[f"{name}.{method}.mean_error_percent"] = error
    return values


@finding(
    f"{NAME}/table-2",
    "the mean error of the released statistics, by the paper's method, is at most 5%",
)
def released_accurately(record):
    yield from _release_error(record, "andrew2021")


@finding(f"{NAME}/table-2", "the same by a private distribution function", kind="own")
def released_by_distribution(record):
    yield from _release_error(record, "cdf")


def _release_error(record, method):
    for name in reported(record):
        # over draws of the noise
        error = intervals.of_summary(*record.values[f"{name}.{method}.mean_error_percent"])
        yield LABELS[name], f"{error:.1f}%", error.at_most(5)
