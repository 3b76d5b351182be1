"""Membership inference by group: figure 11."""

from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import left_out, named, rank, reported, runnable
from dpcompanion.reproduction.papers.individual_accounting.runs import NAME, QUICK, subset, trained
from dpcompanion.reproduction.papers.yu import (
    LABELS,
    STABLE,
    Membership,
    attacked,
    near_one_half,
    trained_without_privacy,
)


@experiment(
    f"{NAME}/figure-11",
    quick=Membership(QUICK, **STABLE),
    paper=Membership(subset("cifar10", "utkface_gender"), epochs=10),
)
def figure_11(config, run):
    """Success of the loss attack on each group with and without DP, beside its mean epsilon."""
    values, seed = left_out(config, run), config.seed
    for name, task in runnable(config, run).items():
        found = trained(task, seed, run)
        accuracies, losses = trained_without_privacy(task, config, seed, run)
        values |= named(
            name,
            mean_epsilon=found.by_group(found.epsilon()),
            nonprivate_accuracy=accuracies["accuracy"],
            nonprivate_test_accuracy=accuracies["test_accuracy"],
        )
        for kind, (members, others) in {
            "private": (found.losses, found.test_losses),
            "nonprivate": (losses["losses"], losses["test_losses"]),
        }.items():
            values |= named(f"{name}.{kind}", **attacked(found.found, members, others, config))
        if name == "cifar10":
            success = dict(zip(found.found.names, values["cifar10.nonprivate.success"]))
            values |= named("cifar10_nonprivate", cat=success["cat"], ship=success["ship"])
    return values


@finding(
    f"{NAME}/figure-11",
    "without privacy, groups with a higher mean epsilon are attacked with more success (rank "
    "correlation 0.5 or more)",
)
def risk_follows_epsilon(record):
    """Not of MNIST, where the attack finds nothing with DP or without: the first version says so,
    and the second makes the claim for CIFAR-10 and UTKFace.
    """
    for name in reported(record):
        if name in ("mnist", "mnist_cnn"):
            continue
        epsilon, success = (
            record.values[f"{name}.{key}"] for key in ("mean_epsilon", "nonprivate.success")
        )
        r = intervals.rank_correlation(rank(epsilon, success), len(epsilon))
        yield LABELS[name], f"{r:.1f}", r.at_least(0.5)


@finding(
    f"{NAME}/figure-11", "with DP, the success on every group lies within five points of one half"
)
def private_models_resist(record):
    for name in reported(record):
        said, outcome = near_one_half(record.values, f"{name}.private")
        yield LABELS[name], f"intervals from {said}", outcome
