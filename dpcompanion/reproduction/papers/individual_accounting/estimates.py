"""Fewer norms and what they cost: figure 4, table 1, figures 13 and 14."""

import dataclasses
import math
import time
from typing import Any

import numpy as np
import torch

from dpcompanion.accounting import rdp_sampled_gaussian
from dpcompanion.individual import IndividualAccountant
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import ask_also, experiment, finding
from dpcompanion.reproduction.papers.common import (
    left_out,
    named,
    pearson,
    rank,
    reported,
    runnable,
)
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CIFAR10,
    CPU,
    MNIST_CNN,
    NAME,
    PAPER,
    QUICK,
    account,
    at_length,
    trained,
)
from dpcompanion.reproduction.papers.yu import LABELS, Study


@dataclasses.dataclass(frozen=True)
class Estimates(Study):
    """Figure 4: how often norms are refreshed in an epoch. Three times in 20 epochs are about as
    many refreshes as the paper's 100 epochs have at 0.5.
    """

    refreshes: tuple = (0.5, 1.0, 2.0, 3.0)


def estimate_errors(found, refreshes):
    """Accounts of reference examples with norms refreshed so often, beside norms at every step."""
    exact, estimate = found.reference_epsilon(), found.reference_epsilon(refreshes)
    error = estimate - exact
    return (
        {
            "pearson": pearson(estimate, exact),
            "mean_error": np.abs(error).mean(),
            "worst_error": np.abs(error).max(),
            "understated": (error < -1e-3 * exact).mean(),
            "worst_understatement": (-error / exact.clip(1e-9)).max(),
            "understated_by_10_percent": (error < -0.1 * exact).mean(),
        },
        exact,
        estimate,
    )


@experiment(f"{NAME}/figure-4", quick=Estimates(QUICK), paper=Estimates(at_length(PAPER)))
def figure_4(config, run):
    """Estimates with norms refreshed at times, beside norms at every step, for predrawn examples.

    Without rounding. Under-stated means by more than a part in a thousand. Arrays: exact epsilons,
    and estimates for each of `refreshes`.
    """
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seed, run)
        estimates = []
        for refreshes in config.refreshes:
            errors, exact, estimate = estimate_errors(found, refreshes)
            values |= named(f"{name}.gamma_{refreshes:g}", **errors)
            estimates.append(estimate)
        arrays |= named(
            name, exact=np.asarray(exact, np.float32), estimates=np.asarray(estimates, np.float32)
        )
    return values, arrays


@finding(f"{NAME}/figure-4", "Pearson's r is above 0.99 at one refresh in two epochs")
def rare_refreshes_suffice(record):
    for name in reported(record):
        estimates = record.arrays[f"{name}.estimates"][list(record.config["refreshes"]).index(0.5)]
        r = intervals.pearson(estimates, record.arrays[f"{name}.exact"])
        yield LABELS[name], f"{r:.3f}", r.above(0.99)


@finding(f"{NAME}/figure-4", "more refreshes never lower Pearson's r")
def more_refreshes_help(record):
    for name in reported(record):
        exact, estimates = (record.arrays[f"{name}.{key}"] for key in ("exact", "estimates"))
        rises = [
            intervals.bootstrap(
                lambda x, few, many: intervals.correlation(x, many) - intervals.correlation(x, few),
                exact,
                *pair,
            )
            for pair in zip(estimates, estimates[1:])
        ]
        found = [record.values[f"{name}.gamma_{g:g}.pearson"] for g in record.config["refreshes"]]
        yield (
            LABELS[name],
            ", ".join(f"{r:.4f}" for r in found),
            intervals.every(*(rise.at_least(0) for rise in rises)),
        )


@dataclasses.dataclass(frozen=True)
class Cost(Study):
    """Table 1: how many examples, updates, and evaluations to time one by one; precisions r to
    compare on tasks.
    """

    examples: int = 50000
    updates: int = 200
    evaluations: int = 20
    precisions: tuple = (0.01, 0.1)


def nearest(norms, max_grad_norm, rounding):
    """Norms as shares of C, rounded to the nearest of {r, 2r, ..., 1} as in algorithm 2."""
    levels = np.append(rounding * np.arange(1, math.ceil(1 / rounding - 1e-9)), 1.0)
    places = np.rint(norms.astype(np.float64) / max_grad_norm / rounding).astype(int)
    return levels[np.clip(places, 1, len(levels)) - 1]


@experiment(f"{NAME}/table-1", quick=Cost(QUICK, examples=10000), paper=Cost(CPU))
def table_1(config, run):
    """Processor seconds for the accounts of many examples with and without rounding; what rounding
    does to epsilon.
    """
    norms = torch.rand(
        config.updates,
        config.examples,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    norms = (2 * norms**2).clamp(max=1)
    parameters: dict[str, Any] = {"sample_rate": 4096 / 50000, "noise_multiplier": 3.0}
    values: dict[str, Any] = {
        "with_rounding.evaluations": 100,
        "without_rounding.evaluations": norms.numel(),
    }
    for kind, rounding in (("with_rounding", 0.01), ("without_rounding", None)):
        started = time.process_time()
        accounts = IndividualAccountant(
            config.examples, max_grad_norm=1.0, rounding=rounding, accountant="rdp", **parameters
        )
        for row in norms:
            accounts.record(row, steps=12)
        accounts.epsilon(1e-5)
        values[f"{kind}.seconds"] = time.process_time() - started
    started = time.process_time()
    for norm in norms[0, : config.evaluations].clamp(min=0.01).tolist():
        rdp_sampled_gaussian(
            **{**parameters, "noise_multiplier": parameters["noise_multiplier"] / norm}
        )
    one = (time.process_time() - started) / config.evaluations
    values["one_by_one.seconds_estimate"] = one * norms.numel()
    for name, task in runnable(config, run).items():
        found = trained(task, config.seed, run)
        exact, plan = found.epsilon(rounding=None), found.plan
        for precision in config.precisions:
            shares = nearest(found.norms, plan.max_grad_norm, precision)
            # With C = 1 the shares lie on the accountant's own levels, and none of them moves up.
            rounded = account(
                dataclasses.replace(plan, max_grad_norm=1.0),
                shares,
                found.passes,
                steps=plan.steps,
                rounding=precision,
            )
            for kind, epsilon in (("nearest", rounded), ("up", found.epsilon(rounding=precision))):
                ratio = epsilon / exact
                values |= named(
                    f"{name}.{kind}_{precision:g}",
                    understated=(ratio < 1 - 1e-3).mean(),
                    lowest=ratio.min(),
                    median=np.median(ratio),
                )
    return values


@finding(
    f"{NAME}/table-1",
    "accounts with rounding take less than a thousandth of the time of an evaluation for each norm",
)
def rounding_is_worth_it(record):
    few, many = record.values["with_rounding.seconds"], record.values["one_by_one.seconds_estimate"]
    yield (
        f"{record.config['examples']:,} examples, processor time",
        "less" if few < many / 1000 else f"{few / many:.2g} of it",
        few < many / 1000,
    )


@finding(
    f"{NAME}/table-1",
    "accounts of all examples with rounding take less than 3 seconds, even on a machine half as "
    "fast",
    kind="own",
)
def rounding_is_cheap(record):
    seconds = record.values["with_rounding.seconds"]
    said = "less than 1.5 s" if seconds < 1.5 else f"{seconds:.1f} s"
    yield (
        f"{record.config['examples']:,} examples, processor time",
        said,
        intervals.timed(seconds).below(3),
    )


@dataclasses.dataclass(frozen=True)
class Variants(Study):
    """Figures 13 and 14: how each variant changes a task."""

    variants: dict = dataclasses.field(
        default_factory=lambda: {"hinge": {"loss": "hinge"}, "small": {"model": "linear"}}
    )


#: What the network of figure 14 changes.
SMALL = {"model": "two-layer-cnn", "learning_rate": 1.0}


@experiment(
    f"{NAME}/figures-13-14",
    quick=Variants(QUICK),
    paper=Variants({"mnist_cnn": MNIST_CNN, "cifar10": CIFAR10}),
)
def figures_13_14(config, run):
    """Another loss, a smaller model: estimates, exact values, accuracy and mean epsilon by class.

    The smaller model is linear; on CIFAR-10 it is the paper's two-layer CNN with its learning rate
    of 1.
    """
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        plain = trained(task, config.seed, run)
        values[f"{name}.plain.mean_epsilon"] = plain.by_group(plain.epsilon())
        for kind, changes in config.variants.items():
            if name == "cifar10" and kind == "small":
                changes = SMALL
            found = trained(dataclasses.replace(task, **changes), config.seed, run)
            part, arrays_of_part = of_variant(found, task.refreshes)
            values |= named(f"{name}.{kind}", **part)
            arrays |= named(f"{name}.{kind}", **arrays_of_part)
            if name == "cifar10" and kind == "small":
                values |= {
                    "cat_mean_eps.wrn": values["cifar10.plain.mean_epsilon"][3],
                    "cat_mean_eps.cnn": part["mean_epsilon"][3],
                }
    return values, arrays


def of_variant(found, refreshes):
    """What figures 13 and 14 show of a run: values, and arrays of the reference examples."""
    errors, exact, estimate = estimate_errors(found, refreshes)
    epsilon, accuracy = found.epsilon(), found.by_group(found.test_right, test=True)
    groups = found.by_group(epsilon)
    return {
        "pearson_estimate": errors["pearson"],
        "understated": errors["understated"],
        "accuracy": found.accuracy,
        "class_accuracy": accuracy,
        "rank_correlation": rank(accuracy, groups),
        "mean": epsilon.mean(),
        "mean_epsilon": groups,
        "paid_little": (epsilon <= 0.1 * found.worst_case).mean(),
    }, {"exact": np.float32(exact), "estimate": np.float32(estimate)}


@dataclasses.dataclass(frozen=True)
class Alone(Study):
    """Figure 14 without the network that it is compared with: how often norms are refreshed in an
    epoch for the estimates, which is done for the reference examples; all others have their norms
    measured as the task says.
    """

    refreshes: float = 3.0
    variants: tuple = ("small",)


@experiment(
    f"{NAME}/figure-14",
    paper=Alone({"cifar10": dataclasses.replace(CIFAR10, **SMALL, refreshes=0.5, needs="")}),
)
def figure_14(config, run):
    """The two-layer CNN on CIFAR-10, as `figures_13_14` has it."""
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        found = trained(task, config.seed, run)
        (variant,) = config.variants
        part, arrays_of_part = of_variant(found, config.refreshes)
        values |= named(f"{name}.{variant}", **part) | {
            "cat_mean_eps.cnn": part["mean_epsilon"][found.found.names.index("cat")]
        }
        arrays |= named(f"{name}.{variant}", **arrays_of_part)
    return values, arrays


def _of_variants(record):
    for name in reported(record):
        small = "two-layer CNN" if name == "cifar10" else "linear"
        where = {"small": f"{LABELS[name].partition(', ')[0]}, {small}"}
        for kind in record.config["variants"]:
            yield where.get(kind, f"{LABELS[name]}, {kind}"), f"{name}.{kind}"


@finding(f"{NAME}/figures-13-14", "estimates and exact values have a Pearson's r above 0.99")
def estimates_hold_up(record):
    for where, row in _of_variants(record):
        r = intervals.pearson(record.arrays[f"{row}.estimate"], record.arrays[f"{row}.exact"])
        yield where, f"{r:.3f}", r.above(0.99)


@finding(
    f"{NAME}/figures-13-14",
    "accuracy and mean epsilon of classes have a rank correlation of -0.5 or less",
)
def underserved_still(record):
    for where, row in _of_variants(record):
        r = intervals.rank_correlation(
            record.values[f"{row}.rank_correlation"], len(record.values[f"{row}.mean_epsilon"])
        )
        yield where, f"{r:.1f}", r.at_most(-0.5)


ask_also(f"{NAME}/figures-13-14", of=f"{NAME}/figure-14")
