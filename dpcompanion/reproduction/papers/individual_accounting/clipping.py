"""Individual clipping and other clip norms: table 3, figures 7 to 10 and 12."""

import dataclasses

import numpy as np

from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import (
    histogram,
    left_out,
    named,
    rank,
    reported,
    runnable,
)
from dpcompanion.reproduction.papers.individual_accounting.accounts import (
    against_loss,
    by_groups,
    of_examples,
)
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CIFAR10,
    CIFAR10_RESNET,
    MNIST_CNN,
    NAME,
    PAPER,
    QUICK,
    subset,
    trained,
    with_log_loss,
)
from dpcompanion.reproduction.papers.yu import LABELS, WORST, Study, Tasks, clip_key, falls

ONCE = {"refreshes": 1.0, "reference": 0}


@dataclasses.dataclass(frozen=True)
class Clippings(Tasks):
    """Table 3: the seeds; thresholds are renewed once an epoch."""

    seeds: tuple = (0, 1, 2)


def clipped(task, clipping, seed, run):
    """A run with norms renewed once an epoch. Accounting does not change a run that clips to the
    maximum, so the first seed's is the one that other exhibits have.
    """
    changes = {} if clipping == "maximum" and seed == 0 else {**ONCE, "clipping": clipping}
    return trained(dataclasses.replace(task, **changes), seed, run)


@experiment(
    f"{NAME}/table-3",
    quick=Clippings(QUICK, seeds=(0, 1)),
    paper=Clippings(subset("mnist", "cifar10"), seeds=tuple(range(6))),
)
def table_3(config, run):
    """Test accuracy in percent, clipped to each example's own threshold and to the maximum."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        for clipping in ("individual", "maximum"):
            accuracies = [
                100 * clipped(task, clipping, seed, run).accuracy for seed in config.seeds
            ]
            values[f"{name}.{clipping}"] = records.mean_and_sd(accuracies)
    return values


@finding(f"{NAME}/table-3", "individual clipping costs at most half a point of accuracy")
def clipping_is_free(record):
    for name in reported(record):
        cost = intervals.unpaired(
            *(record.values[f"{name}.{clipping}"] for clipping in ("maximum", "individual"))
        )
        yield LABELS[name], f"{cost:+z.1f} points", cost.at_most(0.5)


@experiment(f"{NAME}/figures-7-8", quick=Study(QUICK), paper=Study(PAPER))
def figures_7_8(config, run):
    """Epsilon against loss, and by group, with individual clipping; the same groups without it."""
    changes = {**ONCE, "clipping": "individual"}
    values, arrays = against_loss(config, run, **changes)
    values |= by_groups(config, run, **changes)
    for name, task in runnable(config, run).items():
        plain = trained(task, config.seed, run)
        maximum, individual = plain.by_group(plain.epsilon()), values[f"{name}.mean_epsilon"]
        values |= named(
            name,
            same_order=bool((np.argsort(maximum) == np.argsort(individual)).all()),
            orders_agree=rank(maximum, individual),
            largest_shift=np.abs(individual / maximum - 1).max(),
        )
        values[f"{name}.maximum.mean_epsilon"] = maximum
    return values, arrays


@finding(
    f"{NAME}/figures-7-8",
    "the groups stand in exactly the same order with and without individual clipping",
)
def same_order(record):
    """Of the groups of these runs, so that there is no sample to speak of. Where norms are renewed
    more often without individual clipping than with it, another order refutes nothing.
    """
    for name in reported(record):
        agreement = record.values[f"{name}.orders_agree"]
        same = record.values[f"{name}.same_order"]
        alike = record.config["tasks"][name]["refreshes"] == ONCE["refreshes"]
        yield (
            LABELS[name],
            f"rank correlation {agreement:.2f}",
            same if same or alike else intervals.unknown(agreement).at_least(1),
        )


HALF_TIME = {"mnist_cnn": dataclasses.replace(MNIST_CNN, epochs=2)}


@dataclasses.dataclass(frozen=True)
class Sweep(Study):
    """Figures 9 and 10: clip norms in units of the median norm at initialisation."""

    multiples: tuple = (0.1, 0.3, 0.5, 1.5)


@experiment(
    f"{NAME}/figures-9-10",
    quick=Sweep(QUICK),
    paper=Sweep({**HALF_TIME, "cifar10": CIFAR10_RESNET}),
)
def figures_9_10(config, run):
    """Epsilons, test accuracy and mean epsilon by class for clip norms around the median."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        for multiple in config.multiples:
            found = trained(
                dataclasses.replace(task, **ONCE, median_multiple=multiple), config.seed, run
            )
            epsilon, key = found.epsilon(), clip_key(multiple)
            groups, accuracy = found.by_group(epsilon), found.by_group(found.test_right, test=True)
            at_worst = (epsilon >= WORST * found.worst_case).mean()
            values |= named(
                f"{name}.{key}",
                share_at_worst_case=at_worst,
                mean=epsilon.mean(),
                accuracy=found.accuracy,
                class_accuracy=accuracy,
                mean_epsilon=groups,
                rank_correlation=rank(accuracy, groups),
            )
            values[f"{name}.worst_case"] = found.worst_case
            arrays[f"{name}.{key}"] = histogram(epsilon, found.worst_case)
            if name == "cifar10":
                values |= {
                    f"share_at_worst_case.{key}": at_worst,
                    f"cat.{key}": groups[3],
                    f"ship.{key}": groups[8],
                }
    return values, arrays


@finding(
    f"{NAME}/figures-9-10",
    "the share at the worst case falls as C grows, from more than half to less than a tenth",
)
def fewer_at_the_worst_case(record):
    for name in reported(record):
        shares = [
            of_examples(record, name, record.values[f"{name}.{clip_key(c)}.share_at_worst_case"])
            for c in record.config["multiples"]
        ]
        yield LABELS[name], ", ".join(f"{share.estimate:.0%}" for share in shares), falls(shares)


@finding(
    f"{NAME}/figures-9-10",
    "from 1.5 M to 0.5 M the mean epsilon of the least accurate class grows by more than that of "
    "the most accurate",
)
def the_underserved_pay_more(record):
    def more(right, growth):
        worst, best = (
            np.take_along_axis(growth, np.expand_dims(pick(right, -1), -1), -1)[..., 0]
            for pick in (np.argmin, np.argmax)
        )
        return worst - best

    for name in reported(record):
        before, after = (
            np.array(record.values[f"{name}.{key}.mean_epsilon"]) for key in ("c15", "c05")
        )
        gap = intervals.bootstrap(
            more, np.array(record.values[f"{name}.c15.class_accuracy"]), after - before
        )
        yield LABELS[name], f"{gap:+.1f} more", gap.above(0)


@dataclasses.dataclass(frozen=True)
class Large(Study):
    """Figure 12: the clip norms for the paper's 5 and 10, in units of the median norm at the start.

    The paper's C is 1, at which 35% of CIFAR-10 reach the worst case, as many as of the digits at
    0.3 medians.
    """

    multiples: dict = dataclasses.field(default_factory=lambda: {"c5": 1.5, "c10": 3.0})


@experiment(
    f"{NAME}/figure-12",
    quick=Large(QUICK),
    paper=Large({**HALF_TIME, "cifar10": dataclasses.replace(CIFAR10, normalised=True)}),
)
def figure_12(config, run):
    """Pearson's r of epsilon with log loss for large clip norms; on CIFAR-10 the paper's."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        for key, multiple in config.multiples.items():
            size = (
                {"max_grad_norm": float(key[1:])}
                if name == "cifar10"
                else {"median_multiple": multiple}
            )
            found = trained(dataclasses.replace(task, **ONCE, **size), config.seed, run)
            r = with_log_loss(found.epsilon(), found.losses)
            values |= {f"{name}.{key}": r, f"{name}.{key}.accuracy": found.accuracy}
            if name == "cifar10":
                values[f"pearson.{key}"] = r
    return values


@finding(
    f"{NAME}/figure-12",
    "Pearson's r between epsilon and log loss is above 0.85 for both clip norms",
)
def large_clip_norms_too(record):
    # The record holds r and no examples: losses have heavy tails, for which r alone has no honest
    # interval.
    for name in reported(record):
        found = [
            intervals.unknown(record.values[f"{name}.{key}"]) for key in record.config["multiples"]
        ]
        yield (
            LABELS[name],
            ", ".join(f"{r.estimate:.2f}" for r in found) + " (no interval)",
            intervals.every(*(r.above(0.85) for r in found)),
        )
