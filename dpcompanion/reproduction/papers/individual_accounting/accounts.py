"""Individual accounts, by example and group: figures 1, 2, 3, 6, and, beside losses, 5."""

import dataclasses

import numpy as np

from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import (
    histogram,
    left_out,
    named,
    rank,
    reported,
    runnable,
)
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CIFAR10_RESNET,
    LONG,
    NAME,
    PAPER,
    QUICK,
    at_length,
    subset,
    trained,
    with_log_loss,
)
from dpcompanion.reproduction.papers.yu import (
    LABELS,
    WORST,
    Study,
    Tasks,
    correlation_with_extremes,
    examples,
)


@experiment(f"{NAME}/figure-1", quick=Study(QUICK), paper=Study(at_length(PAPER)))
def figure_1(config, run):
    """Each example's epsilon by RDP, the share that reaches the worst case, and the same by PLD."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seed, run)
        epsilon, tighter, top = found.epsilon(), found.epsilon(accountant="pld"), found.worst_case
        values |= named(
            name,
            max=epsilon.max(),
            min=epsilon.min(),
            mean=epsilon.mean(),
            worst_case=top,
            accuracy=found.accuracy,
            share_at_worst_case=(epsilon >= WORST * top).mean(),
            below_90_percent=(epsilon < 0.9 * top).mean(),
            quantiles=np.quantile(epsilon, (0.3, 0.5, 0.7)),
            noise_multiplier=found.plan.noise_multiplier,
            max_grad_norm=found.plan.max_grad_norm,
            steps=found.plan.steps,
            seconds=found.seconds,
        )
        values |= named(
            f"{name}.pld",
            worst_case=found.plan.epsilon(accountant="pld"),
            mean=tighter.mean(),
            median=np.median(tighter),
            over_rdp=np.quantile(tighter / epsilon, (0.1, 0.5, 0.9)),
        )
        arrays |= named(name, rdp=histogram(epsilon, top), pld=histogram(tighter, top))
    return values, arrays


def of_examples(record, name, share):
    """The interval of a share of a task's training examples."""
    source = (
        record.config["tasks"][name]["data"].partition("-")[0] if "tasks" in record.config else ""
    )
    sizes = [
        entry["examples"]
        for entry in record.data
        if entry["split"] == "train" and entry["name"].startswith(source)
    ]
    return intervals.share(round(share * sizes[0]), sizes[0]) if sizes else intervals.unknown(share)


@finding(f"{NAME}/figure-1", "more than half of the examples lie at least 10% below the worst case")
def most_pay_less(record):
    for name in reported(record):
        share = of_examples(record, name, record.values[f"{name}.below_90_percent"])
        yield LABELS[name], f"{share:.1%}", share.above(0.5)


@dataclasses.dataclass(frozen=True)
class Repeated(Tasks):
    """Several seeds: what a claim on all groups of a data set depends on is the run."""

    seeds: tuple = tuple(range(10))


def of_each(found, name, *keys):
    """A task's values of these keys, one for each seed, as "name.each.key"."""
    return {f"{name}.each.{key}": [one[f"{name}.{key}"] for one in found] for key in keys}


def over_seeds(record, name, *keys):
    """Intervals of means over seeds, or nothing where a run has one seed."""
    each = [record.values.get(f"{name}.each.{key}", ()) for key in keys]
    return [intervals.mean(values) for values in each] if len(each[0]) > 1 else None


def by_groups(config, run, *, seed=None, **changes):
    """Test accuracy and mean epsilon of each group, with the seed of `config` if none is given."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = trained(
            dataclasses.replace(task, **changes), config.seed if seed is None else seed, run
        )
        epsilon = found.by_group(found.epsilon())
        accuracy = found.by_group(found.test_right, test=True)
        worst, best = int(accuracy.argmin()), int(accuracy.argmax())
        values |= named(
            name,
            accuracy=accuracy,
            mean_epsilon=epsilon,
            rank_correlation=rank(accuracy, epsilon),
            worst_group=worst,
            best_group=best,
            worst_case=found.worst_case,
            worst_over_best_percent=100 * (epsilon[worst] / epsilon[best] - 1),
        )
    return values


@experiment(
    f"{NAME}/figure-2",
    quick=Study(QUICK),
    paper=Study({name: PAPER[name] for name in ("cifar10", "utkface_gender")}),
)
def figure_2(config, run):
    """Test accuracy and mean epsilon by class or race."""
    values = by_groups(config, run)
    for name, above, below in (
        ("cifar10", "cat", "automobile"),
        ("utkface_gender", "asian", "indian"),
    ):
        if f"{name}.mean_epsilon" in values:
            groups = [group.lower() for group in examples(config.tasks[name].data).names]
            mean = dict(zip(groups, values[f"{name}.mean_epsilon"]))
            key = f"{name.removesuffix('_gender')}_{above}_over_{below}_percent"
            values[key] = 100 * (mean[above] / mean[below] - 1)
    return values


@experiment(
    f"{NAME}/figure-6",
    quick=Repeated(QUICK, seeds=(0,)),
    paper=Repeated(at_length(subset("mnist", "utkface_age"))),
)
def figure_6(config, run):
    """Test accuracy and mean epsilon by class or race, with the first seed; `each` has what is
    judged, for each seed.
    """
    each = [by_groups(config, run, seed=seed) for seed in config.seeds]
    values = each[0]
    for name in runnable(config, run):
        values |= of_each(each, name, "rank_correlation", "worst_over_best_percent")
    return values


@finding(
    f"{NAME}/figure-6",
    "groups: accuracy and mean epsilon have a rank correlation of -0.5 or less, and the least "
    "accurate has a higher mean than the most accurate",
)
@finding(
    f"{NAME}/figure-2",
    "groups: accuracy and mean epsilon have a rank correlation of -0.5 or less, and the least "
    "accurate has a higher mean than the most accurate",
)
def underserved(record):
    for name in reported(record):
        r, more = over_seeds(
            record, name, "rank_correlation", "worst_over_best_percent"
        ) or correlation_with_extremes(
            *(record.values[f"{name}.{key}"] for key in ("accuracy", "mean_epsilon"))
        )
        yield (
            LABELS[name],
            f"rank correlation {r:.1f}, {more.estimate:+.0f}%",
            intervals.every(r.at_most(-0.5), more.above(0)),
        )


@experiment(
    f"{NAME}/figure-3",
    quick=Repeated(QUICK, seeds=(0,)),
    paper=Repeated({**LONG, "cifar10": CIFAR10_RESNET}),
)
def figure_3(config, run):
    """Median gradient norm of each class in the reference sample, in units of C: at first, and
    after each epoch, with the first seed; `each` has how the seeds differ.
    """
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        each = []
        for seed in config.seeds if isinstance(config, Repeated) else (config.seed,):
            found = trained(task, seed, run)
            medians = found.medians / found.plan.max_grad_norm
            arrays.setdefault(f"{name}.medians", medians)
            spread = medians.max(1) / medians.min(1)
            each.append(
                named(
                    name,
                    least_spread=spread[1:].min(),
                    spread_at_end=spread[-1],
                    half_time_to_end=rank(medians[len(medians) // 2], medians[-1]),
                )
            )
        values |= each[0] | of_each(each, name, "least_spread", "half_time_to_end")
    return values, arrays


def _costs_apart(medians):
    """How many times as much as the cheapest class the dearest one costs in a run: an interval.

    To leading order a step costs an example the square of its clipped norm, so a class costs the
    mean of the squares of its medians (epochs + 1, classes), clipped at C = 1, over all epochs.
    Were the order of the classes another in every epoch, these means would be alike. The bootstrap
    resamples tenths of the training, since norms of neighbouring epochs are alike.
    """
    squares = np.minimum(medians[1:], 1) ** 2
    tenths = np.array_split(squares, min(10, len(squares)))
    parts = np.stack([tenth.mean(0) for tenth in tenths])

    def ratio(chosen):
        costs = parts[chosen.astype(int)].mean(-2)
        return costs.max(-1) / costs.min(-1)

    return intervals.bootstrap(ratio, np.arange(len(parts)))


@finding(
    f"{NAME}/figure-3",
    "classes cost differently: over the training, the mean square of the clipped median norm is at "
    "least 1.5 times as large in one class as in another",
)
def stratified(record):
    for name in reported(record):
        costs = _costs_apart(record.arrays[f"{name}.medians"])
        spread = min(record.values[f"{name}.each.least_spread"])
        yield (
            LABELS[name],
            f"{costs:.1f} times; the largest median is {spread:.1f} times the smallest or more",
            costs.at_least(1.5),
        )


@finding(
    f"{NAME}/figure-3",
    "the order of the class medians at half time predicts that at the end (rank correlation 0.7 or "
    "more)",
    kind="own",
)
def order_stays(record):
    for name in reported(record):
        (order,) = over_seeds(record, name, "half_time_to_end") or (
            intervals.rank_correlation(
                record.values[f"{name}.half_time_to_end"], record.arrays[f"{name}.medians"].shape[1]
            ),
        )
        yield LABELS[name], f"rank correlation {order:.1f}", order.at_least(0.7)


def against_loss(config, run, points=1500, **changes):
    """Pearson's r of epsilon with log loss, and some of the points."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(dataclasses.replace(task, **changes), config.seed, run)
        epsilon = found.epsilon()
        some = np.random.RandomState(0).permutation(len(epsilon))[:points]
        values |= named(
            name,
            pearson=with_log_loss(epsilon, found.losses),
            spearman=rank(epsilon, found.losses),
            worst_case=found.worst_case,
        )
        arrays |= named(
            name, epsilon=np.float32(epsilon[some]), losses=np.float32(found.losses[some])
        )
    return values, arrays


@experiment(f"{NAME}/figure-5", quick=Study(QUICK), paper=Study(at_length(PAPER)))
def figure_5(config, run):
    """Epsilon against the final training loss."""
    return against_loss(config, run)


@finding(
    f"{NAME}/figures-7-8",
    "with individual clipping, Pearson's r between epsilon and log loss is above 0.9",
)
@finding(f"{NAME}/figure-5", "Pearson's r between epsilon and log loss is above 0.9")
def loss_tells(record):
    for name in reported(record):
        epsilon, losses = (record.arrays[f"{name}.{key}"] for key in ("epsilon", "losses"))
        r = intervals.pearson(epsilon[losses > 0], np.log(losses[losses > 0]))
        yield LABELS[name], f"{r:.2f}", r.above(0.9)
