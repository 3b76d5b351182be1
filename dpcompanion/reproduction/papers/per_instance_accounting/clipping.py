"""Individual clipping, other clip norms, and the release: tables 1 and 2, figure 8."""

import dataclasses

import numpy as np
import torch

from dpcompanion import release
from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.common import histogram, named
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    DELTA,
    DIGITS,
    MNIST,
    NAME,
    Setting,
    Study,
    as_published,
    label,
    of_examples,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Clippings:
    """Table 1: four seeds, K = 2, no reference."""

    setting: Setting = dataclasses.replace(DIGITS, reference=0, looks=1)
    seeds: tuple = (0, 1, 2, 3)


@experiment(f"{NAME}/table-1", quick=Clippings())
def table_1(config, run):
    """Test accuracy in percent, clipped to each example's own estimate and to one threshold."""
    values = {}
    for name, clipping in (("per_example", "individual"), ("single", "maximum")):
        setting = dataclasses.replace(config.setting, clipping=clipping)
        values[name] = records.mean_and_sd(
            [100 * trained(setting, seed, run).accuracy for seed in config.seeds]
        )
    return values


@finding(
    f"{NAME}/table-1",
    "clipping each example to its own estimate costs at most half a point of accuracy",
)
def clipping_is_free(record):
    cost = intervals.unpaired(record.values["single"], record.values["per_example"])
    yield label(record), f"{cost:+z.1f} points", cost.at_most(0.5)


@dataclasses.dataclass(frozen=True)
class Sweep(Study):
    """Figure 8: clip norms in units of the median norm at initialisation."""

    setting: Setting = dataclasses.replace(DIGITS, reference=0, looks=1)
    multiples: tuple = (0.1, 0.3, 0.5, 1.5)


@experiment(f"{NAME}/figure-8", quick=Sweep())
def figure_8(config, run):
    """Distribution of epsilon for clip norms below and above the median."""
    values, arrays = {}, {}
    for multiple in config.multiples:
        found = trained(
            dataclasses.replace(config.setting, median_multiple=multiple), config.seed, run
        )
        epsilon, top, key = found.epsilon, found.worst_case, second.clip_key(multiple)
        values |= named(
            key,
            share_at_worst_case=(epsilon >= second.WORST * top).mean(),
            sd=epsilon.std(),
            max=epsilon.max(),
            accuracy=found.accuracy,
        )
        arrays[key] = histogram(epsilon, top)
    return {**values, "worst_case": top}, arrays


@finding(
    f"{NAME}/figure-8",
    "the share at the worst case falls as C grows, from more than half to less than a tenth",
)
def fewer_at_the_worst_case(record):
    shares = [
        of_examples(record, record.values[f"{second.clip_key(c)}.share_at_worst_case"])
        for c in record.config["multiples"]
    ]
    yield (
        label(record),
        ", ".join(f"{share.estimate:.0%}" for share in shares),
        second.falls(shares),
    )


@dataclasses.dataclass(frozen=True)
class Release(Study):
    """Table 2: the budget of all six statistics together, and how many times to draw."""

    epsilon: float = 0.1
    quantiles: tuple = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 20


@experiment(f"{NAME}/table-2", quick=Release(), paper=Release(MNIST))
def table_2(config, run):
    """Mean and quantiles of epsilon, released under one budget; mean and sd over draws."""
    found = trained(config.setting, config.seed, run)
    plan, values = found.plan, {}
    for method in release.METHODS:
        true, drawn, error = _releases(found.epsilon, found.worst_case, config, method)
        values |= named("non_private", **true)
        if method == "cdf":
            values |= named("released", **drawn)
        values[f"{method}.mean_error_percent"] = error
    # As the paper converts and releases, for what it prints.
    upper = float(as_published(plan.sample_rate, [plan.noise_multiplier], [[plan.steps]]))
    true, drawn, error = _releases(found.published_epsilon, upper, config, "andrew2021")
    values |= named("published.non_private", **true) | named("published.released", **drawn)
    return {**values, "published.mean_error_percent": error}


def _releases(epsilon, upper, config, method):
    """The six statistics, those released by a method, mean and sd over draws, and the mean error in
    percent.
    """
    epsilon = torch.as_tensor(epsilon)
    true = [float(epsilon.mean()), *np.quantile(epsilon, config.quantiles)]
    drawn = np.array(
        [
            second.released(epsilon, upper, DELTA, config, method, draw)
            for draw in range(config.draws)
        ]
    )
    return (
        dict(zip(second.STATISTICS, true)),
        dict(zip(second.STATISTICS, map(records.mean_and_sd, drawn.T))),
        records.mean_and_sd(100 * np.abs(drawn / true - 1).mean(1)),
    )


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
    # over draws of the noise
    error = intervals.of_summary(*record.values[f"{method}.mean_error_percent"])
    yield label(record), f"{error:.1f}%", error.at_most(5)
