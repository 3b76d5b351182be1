"""Budgets by class: figures 5 to 7, tables 10 and 11."""

import dataclasses
from typing import Any

import numpy as np
import torch

from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.side_by_side import ALL, Compared, compared, train_all
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    DIGITS,
    MNIST,
    as_printed,
    class_accuracy,
    parameters,
    plan_of,
    problem,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import derive_seed

# The MNIST network for 5 of its 80 epochs, with the noise that makes them cost the same budgets.
_SHORT = dataclasses.replace(MNIST, training=dataclasses.replace(MNIST.training, epochs=5))


@dataclasses.dataclass(frozen=True)
class Classes(Compared):
    """Figures 5 and 6, table 10: one class at a time gets another budget than the rest."""

    levels: dict = dataclasses.field(default_factory=lambda: {"lower": 1.0, "higher": 3.0})
    rest: float = 2.0
    method: str = "sample"


def by_class(config, run):
    """{(class, level): accuracy of every class, (seeds, classes)}, with the key (None, "same") for
    the same budget for all.
    """
    labels = problem(config.task, run).labels

    def plan(kind, seed):
        own, _, level = kind.partition(".")
        if kind == "same":
            return plan_of(
                "dpsgd",
                torch.zeros_like(labels),
                (config.rest,),
                config.task.training,
                delta=config.delta,
            )
        return plan_of(
            config.method,
            (labels == int(own)).long(),
            (config.rest, config.levels[level]),
            config.task.training,
            delta=config.delta,
        )

    kinds = ("same", *(f"{c}.{level}" for c in range(10) for level in config.levels))
    outcomes = compared(dataclasses.replace(config, kinds=kinds), run, plan)
    return {
        (
            None if kind == "same" else int(kind.partition(".")[0]),
            kind.rpartition(".")[2],
        ): torch.tensor([one["classes"] for one in each])
        for kind, each in outcomes.items()
    }


@experiment(
    "idp-sgd/figures-5-6",
    quick=Classes(DIGITS, seeds=tuple(range(2)), together=ALL),
    paper=Classes(MNIST, seeds=(0,)),
)
@experiment("idp-sgd/figures-5-6-short", paper=Classes(_SHORT, seeds=(0, 1)))
def figures_5_6(config, run):
    """`changes.lower` and `changes.higher`: how far the accuracy of the class in the column moves
    when the class in the row gets another budget, in points, mean over seeds (10 x 10).
    """
    found = by_class(config, run)
    same = found.pop((None, "same"))
    changes = {
        level: torch.stack([(found[c, level] - same).mean(0) for c in range(10)])
        for level in config.levels
    }
    values = {"same": same.mean(0)}
    for level, change in changes.items():
        own, others = change.diagonal(), (change.sum(1) - change.diagonal()) / 9
        values |= {f"{level}.own": own, f"{level}.others": others}
    return values, {f"changes.{level}": change.numpy() for level, change in changes.items()}


MOVES = (
    "with a higher budget the class itself gains, with a lower one it loses: on average, and most "
    "of the classes"
)


@finding("idp-sgd/figures-5-6", MOVES)
@finding("idp-sgd/figures-5-6", MOVES, of="idp-sgd/figures-5-6-short")
def own_budget_matters(record):
    for level in ("higher", "lower"):
        yield level, *moves_as_its_budget(level, record.values[f"{level}.own"])


def moves_as_its_budget(level, moved):
    """How far the accuracies of classes moved with their own budget, on average, how many of them
    the same way as the budget, and what that says of `MOVES`.
    """
    sign = 1 if level == "higher" else -1
    gained = sign * np.array(moved)
    gain, gaining = intervals.mean(gained), int((gained > 1e-9).sum())
    return (
        f"{sign * gain.estimate:+.1f} points, {gaining} of {len(gained)}",
        intervals.every(gain.above(0), intervals.share(gaining, len(gained)).above(0.5)),
    )


@experiment("idp-sgd/table-10", paper=Classes(CIFAR10, seeds=tuple(range(10)), together=10))
def table_10(config, run):
    """Accuracy of the class with another budget and of the other nine, as the paper prints it."""
    found = by_class(config, run)
    values = {}
    for c in range(10):
        for level in ("higher", "same", "lower"):
            classes = found[(None, "same") if level == "same" else (c, level)]
            values[f"class_{c}.class.{level}"] = mean_and_sd(classes[:, c])
            values[f"class_{c}.others.{level}"] = mean_and_sd((classes.sum(1) - classes[:, c]) / 9)
    return values


@dataclasses.dataclass(frozen=True)
class Levelled(Compared):
    """Table 11: the budget of the baseline, the budgets of the paper, and our search: rounds (0:
    none), runs in each, step.
    """

    baseline: float = 3.0
    rounds: int = 8
    runs: int = 2
    step: float = 0.04
    paper_budgets: tuple = (0.75, 0.5, 2.0, 2.6, 4.1, 2.1, 2.05, 3.0, 3.1, 6.1)


def level_budgets(config, run):
    """Budgets of classes that level out accuracies, and those of each round, (rounds + 1, classes).

    Each round trains by Sample and looks at the accuracy on the *training* examples of each class;
    a class that is a point behind the mean has its budget raised by `step`, relatively, and all are
    scaled so that the mean stays that of the baseline. The search is no free lunch: its runs see
    private data, and what they cost adds up.
    """
    task, found = config.task, problem(config.task, run)
    budgets, history = torch.full((10,), config.baseline, dtype=torch.float64), []
    features, labels = found.features.to(run.device), found.labels.to(run.device)
    for number in range(config.rounds):
        history.append(budgets)
        plan = plan_of(
            "sample", found.labels, tuple(budgets.tolist()), task.training, delta=config.delta
        )
        seeds = [derive_seed(number, "level", r) % 2**31 for r in range(config.runs)]
        pieces = {f"round-{number}.seed-{seed}": seed for seed in seeds}

        def work(piece, plan=plan, pieces=pieces):
            trained = train_all(
                task, [plan], [pieces[piece]], found.features, found.labels, device=run.device
            )
            return class_accuracy(trained.predict(features)[0], labels)

        done = run.pieces(work, pieces, label=f"round {number + 1}")
        reached = torch.tensor(list(map(list, done.values())), dtype=torch.float64).mean(0)
        budgets = budgets * torch.exp(config.step * (reached.mean() - reached).clamp(-10, 10))
        budgets = (budgets * config.baseline / budgets.mean()).round(decimals=2)
    return torch.stack([*history, budgets])


def search_cost(config, examples, budgets):
    """What the runs of the search cost each class together, by RDP: (classes,) epsilons."""
    training = config.task.training
    orders = torch.arange(2, 129, dtype=torch.float64)
    total: Any = 0
    for row in budgets[:-1]:
        noise, rates, _ = parameters(
            "sample", tuple(row.tolist()), tuple(examples), training, config.delta
        )
        total = total + config.runs * training.steps * rdp_sampled_gaussian(
            sample_rate=rates, noise_multiplier=noise, orders=orders
        )
    return rdp_to_epsilon(total, orders, config.delta)[0]


_LEVELLED = Levelled(
    MNIST, ("baseline", "sample", "scale", "paper.sample", "paper.scale"), seeds=(0, 1, 2)
)
# At full length, the printed budgets alone: they are what the printed accuracies belong to.
_AS_PRINTED = dataclasses.replace(
    _LEVELLED, kinds=("baseline", "paper.sample", "paper.scale"), rounds=0
)


@experiment(
    "idp-sgd/table-11",
    quick=Levelled(
        DIGITS, ("baseline", "sample", "scale", "paper.sample"), seeds=(0, 1, 2), together=ALL
    ),
    paper=_AS_PRINTED,
)
@experiment("idp-sgd/table-11-short", paper=dataclasses.replace(_LEVELLED, task=_SHORT))
def table_11(config, run):
    """Accuracy of each class at one budget for all, at budgets that our search found, and at the
    paper's (`paper.sample`). Without rounds of a search, only at those that the configuration
    gives.
    """
    labels = problem(config.task, run).labels
    searched = level_budgets(config, run)

    def plan(kind, seed):
        source, _, method = kind.rpartition(".")
        budgets = {"paper": config.paper_budgets, "": tuple(searched[-1].tolist())}[source]
        if method == "baseline":
            method, budgets = "dpsgd", (config.baseline,) * 10
        return plan_of(method, labels, budgets, config.task.training, delta=config.delta)

    values: dict[str, Any] = {
        "budgets": searched[-1] if config.rounds else list(config.paper_budgets)
    }
    arrays = {}
    if config.rounds:
        values["cost_of_search"] = search_cost(config, torch.bincount(labels).tolist(), searched)
        arrays["searched"] = searched.numpy()
    for kind, each in compared(config, run, plan).items():
        classes = torch.tensor([one["classes"] for one in each], dtype=torch.float64)
        values[kind] = [mean_and_sd(column) for column in classes.T]
        values[f"gap.{kind}"] = mean_and_sd(classes.amax(1) - classes.amin(1))
        values[f"gap_of_means.{kind}"] = classes.mean(0).max() - classes.mean(0).min()
        values[f"{kind}.accuracy"] = mean_and_sd(one["final"] for one in each)
    return as_printed(values, config.task, "mnist"), arrays


_NARROWER = (
    "the searched budgets narrow the gap between the best and the worst class, for Sample and for "
    "Scale"
)
_CLOSER = "with the printed budgets the classes end closer together than with one budget for all"


@finding("idp-sgd/table-11", _NARROWER, kind="own")
@finding("idp-sgd/table-11", _NARROWER, of="idp-sgd/table-11-short", kind="own")
@finding("idp-sgd/figure-7", _NARROWER, of="idp-sgd/table-11", kind="own")
@finding("idp-sgd/figure-7", _NARROWER, of="idp-sgd/table-11-short", kind="own")
def gap_narrows(record):
    """Of the budgets of our search, which the paper does not have."""
    if record.config["rounds"]:
        yield from _changes(
            record, "" if "gap.baseline" in record.values else f"{record.config['task']['data']}."
        )


@finding("idp-sgd/table-11", _CLOSER)
@finding("idp-sgd/figure-7", _CLOSER, of="idp-sgd/table-11")
def printed_budgets_narrow_the_gap(record):
    """Of the paper's budgets, on the data and for the epochs that they were tuned for."""
    if record.config["task"]["data"] == "mnist":
        yield from _changes(record, "", "paper.")


def _changes(record, prefix, of=""):
    """How the gap between classes changes from one budget to one a class, for both methods."""
    before = record.values[f"{prefix}gap.baseline"]
    for method in ("sample", "scale"):
        after = record.values[f"{prefix}gap.{of}{method}"]
        change = intervals.unpaired(after, before)
        yield (
            method.capitalize(),
            f"{before.mean:.1f} to {after.mean:.1f} points, by {change:+.1f}",
            change.below(0),
        )
