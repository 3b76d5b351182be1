"""Membership inference by class: figures 7, 9 and 10."""

import dataclasses

import torch

from dpcompanion import attacks
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.common import named, rank
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    MNIST,
    NAME,
    Study,
    by_class,
    groups,
    label,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Membership(Study):
    """Figures 7 and 10: how to train without privacy."""

    overfit: second.Membership = second.Membership(tasks={})


FOLLOWS = (
    "without privacy, classes with a higher mean epsilon are attacked with more success (rank "
    "correlation 0.5 or more)"
)


def trained_without_privacy(config, run):
    """Accuracies and losses of the network of a run, overfitted."""
    setting = config.setting
    task = second.Task(
        setting.data, getattr(setting, "model", "mlp"), 0, 0, 0.0, 0.0, dtype=setting.dtype
    )
    return second.trained_without_privacy(task, config.overfit, config.seed, run)


def attacks_by_class(config, run):
    """Success of the loss-threshold attack on each class, with and without DP."""
    found = trained(config.setting, config.seed, run)
    accuracies, losses = trained_without_privacy(config, run)
    values = {f"nonprivate_{key}": value for key, value in accuracies.items()}
    values["epsilon"] = by_class(found.found, found.epsilon)
    for kind, members, others in (
        ("private", found.last_loss, found.test_losses),
        ("nonprivate", losses["losses"], losses["test_losses"]),
    ):
        rows = []
        for group in range(len(found.found.names)):
            sides = (
                torch.as_tensor(members)[found.found.groups == group],
                torch.as_tensor(others)[found.found.test_groups == group],
            )
            result = attacks.loss_threshold_attack(
                *sides, generator=torch.Generator().manual_seed(group)
            )
            rows.append((*result.success, result.fitted))
        values |= named(
            kind, **dict(zip(("success", "low", "high", "fitted"), map(list, zip(*rows))))
        )
    values["rank_correlation"] = rank(values["epsilon"], values["nonprivate.success"])
    return values


QUICK_MEMBERSHIP = Membership(overfit=second.Membership(tasks={}, **second.STABLE))


@experiment(f"{NAME}/figure-7", quick=QUICK_MEMBERSHIP)
def figure_7(config, run):
    """Success of the loss attack by class with and without DP; the paper's data need a GPU."""
    return attacks_by_class(config, run)


@experiment(
    f"{NAME}/figures-9-10",
    quick=QUICK_MEMBERSHIP,
    paper=Membership(MNIST, overfit=second.Membership(tasks={}, epochs=10)),
)
def figures_9_10(config, run):
    """Loss, mean epsilon and attacks by class on MNIST; UTKFace-age needs a GPU."""
    return {**groups(config, run), **named("attack", **attacks_by_class(config, run))}


@finding(f"{NAME}/figure-7", FOLLOWS)
def risk_follows(record):
    values = record.values
    r = intervals.rank_correlation(values["rank_correlation"], len(values["nonprivate.success"]))
    yield label(record), f"{r:.1f}", r.at_least(0.5)


@finding(
    f"{NAME}/figure-7", "with DP, the success on every class lies within five points of one half"
)
def private_models_resist(record):
    said, outcome = second.near_one_half(record.values, "private")
    yield label(record), f"intervals from {said}", outcome


@finding(
    f"{NAME}/figures-9-10",
    "with or without DP, success on the digits stays below 60% for every class",
)
def digits_resist(record):
    ends = [
        intervals.Interval(*group)
        for kind in ("private", "nonprivate")
        for group in zip(
            *(record.values[f"attack.{kind}.{key}"] for key in ("success", "low", "high"))
        )
    ]
    yield (
        label(record),
        f"intervals up to {max(group.high for group in ends):.0%}",
        intervals.every(*(group.below(0.6) for group in ends)),
    )
