"""Accounts by example and by class: figures 1, 2, 3, 5 and 6, and what they cost."""

import dataclasses
import time

import numpy as np
import torch

from dpcompanion.accounting import rdp_sampled_gaussian
from dpcompanion.individual import IndividualAccountant
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.common import histogram, named, pearson, rank, reported
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    DELTA,
    MNIST,
    NAME,
    PAPER,
    QUICK,
    SETTINGS,
    Study,
    groups,
    label,
    of_examples,
    trained,
    worst_case,
)


@experiment(f"{NAME}/figure-1", quick=QUICK, paper=PAPER)
def figure_1(config, run):
    """Individual epsilon with K = 2, who reaches the worst case, and the paper's worst cases."""
    found = trained(config.setting, config.seed, run)
    epsilon, top = found.epsilon, found.worst_case
    values = {
        "worst_case": top,
        "mean": epsilon.mean(),
        "quantiles": np.quantile(epsilon, (0.1, 0.5, 0.9)),
        "max": epsilon.max(),
        "min": epsilon.min(),
        "share_at_worst_case": (epsilon >= second.WORST * top).mean(),
        "below_90_percent": (epsilon < 0.9 * top).mean(),
        "accuracy": found.accuracy,
        "noise_multiplier": found.plan.noise_multiplier,
        "steps": found.plan.steps,
    }
    for name in SETTINGS:
        values |= {
            f"{name}.worst_case": worst_case(name),
            f"{name}.worst_case_pld": worst_case(name, "pld"),
        }
    return values, {"histogram": histogram(epsilon, top)}


@finding(
    f"{NAME}/figure-1",
    "most examples cost less: more than half lie at least 10% below the worst case (in Table 3 of "
    "the paper half of them lie 12% below)",
)
def most_pay_less(record):
    share = of_examples(record, record.values["below_90_percent"])
    yield label(record), f"{share:.1%}", share.above(0.5)


@finding(
    f"{NAME}/figure-1",
    "epsilons vary across a large range: the 0.9 quantile is at least twice the 0.1 quantile (2.4 "
    "times in Table 3 of the paper, 2.5 times in its Table 2)",
)
def epsilons_range_widely(record):
    low, high = (_quantile(record, q) for q in (0.1, 0.9))
    ratio = high / low
    yield label(record), f"{ratio.estimate:.1f} times", ratio.at_least(2)


def _quantile(record, q):
    """The interval of a quantile of epsilon, by the edges of the histogram's bins."""
    counts, place = record.arrays["histogram"], {0.1: 0, 0.5: 1, 0.9: 2}[q]
    edges = np.linspace(0, record.values["worst_case"], len(counts) + 1)
    levels = intervals.level(q, counts.sum())
    low, high = np.searchsorted(counts.cumsum(), np.array(levels) * counts.sum())
    return intervals.Interval(record.values["quantiles"][place], edges[low], edges[high + 1])


@experiment(f"{NAME}/figure-2", quick=QUICK, paper=PAPER)
def figure_2(config, run):
    """Mean gradient norm, in units of C, of five groups of examples over training; groups by the
    mean over training.
    """
    found = trained(config.setting, config.seed, run)
    groups = found.quintiles
    values = {
        "ordered": (np.diff(groups, axis=0) > 0).all(0).mean(),
        "top_over_bottom": (groups[-1] / groups[0]).min(),
    }
    return values, {"quintiles": np.float32(groups)}


@finding(f"{NAME}/figure-2", "the five groups are in the same order at every measurement")
def stay_stratified(record):
    """Of all examples, so that there is no sample to speak of."""
    ordered = record.values["ordered"]
    yield label(record), f"at {ordered:.0%} of them", ordered > 1 - 1e-6


@finding(
    f"{NAME}/figure-2",
    "averaged over training, the top group's mean norm is at least twice the bottom group's",
)
def far_apart(record):
    bottom, *_, top = record.arrays["quintiles"].mean(1)
    yield label(record), f"{top / bottom:.1f} times", bool(top >= 2 * bottom)


@dataclasses.dataclass(frozen=True)
class Estimates(Study):
    """Figure 3: the values of K."""

    refreshes: tuple = (0.0, 1.0, 2.0)


@experiment(f"{NAME}/figure-3", quick=Estimates(), paper=Estimates(MNIST))
def figure_3(config, run):
    """Accounts by running estimates with K passes an epoch, beside norms at every step."""
    values, arrays = {}, {}
    for refreshes in config.refreshes:
        found = trained(dataclasses.replace(config.setting, refreshes=refreshes), config.seed, run)
        estimate, actual, key = found.epsilon[found.reference], found.actual, f"k{refreshes:g}"
        error = estimate - actual
        values |= named(
            key,
            pearson=pearson(estimate, actual),
            mean_error=np.abs(error).mean(),
            worst_error=np.abs(error).max(),
            understated=(error < -1e-3 * actual).mean(),
            understated_by_5_percent=(error < -0.05 * actual).mean(),
            worst_understatement=(-error / actual.clip(1e-9)).max(),
            accuracy=found.accuracy,
        )
        arrays |= named(key, estimate=np.float32(estimate), actual=np.float32(actual))
    return {**values, "worst_case": found.worst_case}, arrays


@finding(f"{NAME}/figure-3", "Pearson's r is above 0.99 for every K")
def estimates_are_close(record):
    for refreshes in record.config["refreshes"]:
        r = intervals.pearson(
            *(record.arrays[f"k{refreshes:g}.{key}"] for key in ("estimate", "actual"))
        )
        yield f"{label(record)}, K = {refreshes:g}", f"{r:.3f}", r.above(0.99)


@dataclasses.dataclass(frozen=True)
class Cost:
    """How many examples and updates to account for, and how many evaluations to time one by one."""

    examples: int = 10_000
    updates: int = 200
    evaluations: int = 100
    rounding: float = 0.01


@experiment(f"{NAME}/text-cost", quick=Cost(), paper=Cost(examples=50_000))
def text_cost(config, run):
    """Processor seconds for 100 divergences, what every norm one by one would take, and our
    accounts of every norm.
    """
    rate, noise, _ = SETTINGS["cifar10"]
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(
        config.updates, config.examples, generator=generator, dtype=torch.float64
    ).clamp(min=0.01)
    orders = list(range(2, 257))
    started = time.process_time()
    for norm in norms[0, : config.evaluations].tolist():
        rdp_sampled_gaussian(sample_rate=rate, noise_multiplier=noise / norm, orders=orders)
    hundred = (time.process_time() - started) * 100 / config.evaluations
    started = time.process_time()
    account = IndividualAccountant(
        config.examples,
        sample_rate=rate,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        rounding=None,
        accountant="rdp",
    )
    for row in norms:
        account.record(row)
    account.epsilon(DELTA)
    rounded = (norms / config.rounding).ceil()
    return {
        "divergences_with_rounding": len(rounded.unique()),
        "divergences_without": len(norms.unique()),
        "hundred_rdp_evaluations_s": hundred,
        "one_by_one_h": hundred / 100 * norms.numel() / 3600,
        "without_rounding_s": time.process_time() - started,
    }


@finding(
    f"{NAME}/text-cost",
    "with norms rounded to 0.01 of the clip norm, 100 divergences serve all (by construction)",
)
def few_divergences_serve_all(record):
    few, many = (
        record.values.get(f"divergences_{which}") for which in ("with_rounding", "without")
    )
    if few is not None:
        yield "random norms", f"{few} in place of {many:,}", few <= 100


@finding(
    f"{NAME}/text-cost",
    "rounding to the nearest 0.01 C has almost no impact on epsilon: that of the median example "
    "changes by less than 1%, and none is understated by more than 5%",
    of="individual-accounting/table-1",
)
def rounding_changes_little(record):
    """Of all examples of a run. The record, that of the second version's Table 1, does not say by
    how much an epsilon is overstated at most.
    """
    for name in reported(record):
        lowest, median = (
            record.values[f"{name}.nearest_0.01.{key}"] for key in ("lowest", "median")
        )
        yield (
            second.LABELS[name],
            f"{100 * (median - 1):+z.1f}%, understated by {100 * (1 - lowest):.1f}% at most",
            bool(abs(median - 1) < 0.01 and lowest >= 0.95),
        )


@finding(
    f"{NAME}/text-cost",
    "100 divergences take less than 5 seconds, even on a machine half as fast",
    kind="own",
)
def divergences_are_cheap(record):
    seconds = record.values["hundred_rdp_evaluations_s"]
    yield (
        "one core",
        "less than 2.5 s" if seconds < 2.5 else f"{seconds:.1f} s",
        intervals.timed(seconds).below(5),
    )


@finding(
    f"{NAME}/text-cost",
    "accounts of every norm without rounding take less than a minute, even on a machine half as "
    "fast",
    kind="own",
)
def rounding_is_not_needed(record):
    seconds = record.values["without_rounding_s"]
    yield (
        f"{record.config['examples']:,} examples, {record.config['updates']} updates, one core",
        "less than half a minute" if seconds < 30 else f"{seconds:.0f} s",
        intervals.timed(seconds).below(60),
    )


@experiment(f"{NAME}/figure-5", quick=QUICK, paper=PAPER)
def figure_5(config, run):
    """Mean loss and epsilon of loss deciles, by the mean over training and the last epoch's."""
    found, values = trained(config.setting, config.seed, run), {}
    for kind in ("mean_loss", "last_loss"):
        loss = getattr(found, kind)
        deciles = np.array_split(loss.argsort(), 10)
        means = np.array([found.epsilon[part].mean() for part in deciles])
        values |= named(
            kind,
            loss=[loss[part].mean() for part in deciles],
            epsilon=means,
            rank_correlation=rank(np.arange(10), means),
            of_examples=rank(loss, found.epsilon),
        )
    return values


@finding(
    f"{NAME}/figure-5",
    "mean epsilon rises with the decile of the loss (rank correlation 0.9 or more, our threshold)",
)
def deciles_rise(record):
    for kind in ("mean_loss", "last_loss"):
        r = intervals.rank_correlation(
            record.values[f"{kind}.rank_correlation"], len(record.values[f"{kind}.epsilon"])
        )
        yield f"{label(record)}, {kind.replace('_', ' ')}", f"{r:.2f}", r.at_least(0.9)


@experiment(f"{NAME}/figure-6", quick=QUICK)
def figure_6(config, run):
    """Loss and mean epsilon by class; the paper's data need a GPU."""
    return groups(config, run)


GROUPS = (
    "classes: loss and mean epsilon have a rank correlation of 0.5 or more, and the class of the "
    "highest loss has a higher mean than that of the lowest"
)


@finding(f"{NAME}/figures-9-10", GROUPS)
@finding(f"{NAME}/figure-6", GROUPS)
def underserved(record):
    """By the loss at the end and by that averaged over training: the paper shows both."""
    for kind, words in (("last_loss", "final loss"), ("mean_loss", "mean loss")):
        loss, epsilon = (np.array(record.values[key]) for key in (kind, "epsilon"))
        r, more = second.correlation_with_extremes(-loss, epsilon)
        yield (
            f"{label(record)}, {words}",
            f"rank correlation {-r.estimate:.2f}, {more.estimate:+.0f}%",
            intervals.every(r.at_most(-0.5), more.above(0)),
        )
