"""Tables 2 and 8 on CIFAR-10: the paper's own network, budgets and epochs, one trial a piece.

A trial is 1.5 to 3.5 million per-example gradients, hours on one core.  So each is a piece of its own that any process,
or any machine that shares the data folder, may take; within a trial the run is kept after every epoch.  The ways
forward and back are in bfloat16, norms, clipping and sums in float32 (`dpcompanion.training.clipping`), which takes
nothing from the guarantee.
"""

import dataclasses
import math

import torch

from dpcompanion.reproduction import pieces
from dpcompanion.reproduction.experiments import experiment
from dpcompanion.reproduction.papers.idp_sgd.training import (
    accuracies,
    accuracy,
    assign,
    CIFAR10,
    class_accuracy,
    network,
    plan_of,
    predictions,
    problem,
    Trials,
    tuned,
)
from dpcompanion.training import Callbacks, Checkpoint, cross_entropy, train


@dataclasses.dataclass(frozen=True)
class Cifar(Trials):
    """`Trials` whose methods have hyperparameters of their own if `tuned`, in the given precision, `together` examples
    in one pass: few stay in a processor's cache."""

    tuned: bool = False
    precision: str | None = "bf16"
    together: int = 64


def kept_trial(config, task, kind, seed, run):
    """What `training.trial` returns, of a run that goes on from its last whole epoch if it was cut off."""
    found, budgets = problem(config.task, run), config.budgets
    setup, _, method = kind.rpartition(".")
    groups = assign(len(found.labels), config.groups[setup or "B"], seed)
    strictest = groups == 0
    if method == "loosest":
        groups, budgets, method = torch.zeros_like(groups), budgets[-1:], "dpsgd"
    plan = plan_of(method, groups, budgets, task.training, delta=config.delta)
    model = network(task, seed).to(run.device)
    test_features, test_labels = found.test_features.to(run.device), found.test_labels.to(run.device)
    own_features, own_labels = (part[strictest].to(run.device) for part in (found.features, found.labels))

    def look(run_now):
        seen, epoch = {}, run_now.step // math.ceil(task.training.examples / task.training.batch)
        if epoch % config.look == 0:
            seen["accuracy"] = float(accuracy(predictions(model, test_features), test_labels))
        if epoch % config.group_look == 0:
            logits = predictions(model, own_features)
            seen["group_loss"] = float(cross_entropy(logits, own_labels).mean())
            seen["group_accuracy"] = float(accuracy(logits, own_labels))
        return seen

    state = pieces.unfinished()
    history = train(
        model,
        cross_entropy,
        (found.features, found.labels),
        plan,
        seed=seed,
        precision=config.precision,
        optimizer=torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=task.momentum),
        physical_batch_size=config.together,
        callbacks=Callbacks(on_epoch=look),
        checkpoint=state and Checkpoint(state),
        progress=False,
    )

    def looks(name):
        return [epoch[name] for epoch in history.epochs if name in epoch]

    logits = predictions(model, test_features)
    return {
        "epochs": [epoch["epoch"] for epoch in history.epochs if "accuracy" in epoch],
        "accuracy": looks("accuracy"),
        "group_epochs": [epoch["epoch"] for epoch in history.epochs if "group_loss" in epoch],
        "group_loss": looks("group_loss"),
        "group_accuracy": looks("group_accuracy"),
        "final": accuracy(logits, test_labels),
        "classes": class_accuracy(logits, test_labels),
        "dropped": history.dropped,
    }


def kept_trials(config, run):
    """{kind: [what `kept_trial` returns for each seed]}, each kept in the data folder for whatever shares it."""
    problem(config.task, run)
    tasks = {kind: tuned(config.task, kind) if config.tuned else config.task for kind in config.kinds}
    names = {
        (kind, seed): f"{kind}{'' if tasks[kind] == config.task else '.tuned'}.seed-{seed}"
        for seed in config.seeds
        for kind in config.kinds
    }
    asked = {name: pair for pair, name in names.items()}
    key = {
        "task": config.task,
        "budgets": config.budgets,
        "groups": config.groups,
        "delta": config.delta,
        "look": config.look,
        "group_look": config.group_look,
        "precision": config.precision,
        "together": config.together,
    }

    def work(piece):
        kind, seed = asked[piece]
        return kept_trial(config, tasks[kind], kind, seed, run)

    examples = sum(tasks[kind].training.epochs * tasks[kind].training.examples for kind, _ in names)
    done = run.keep(
        work,
        asked,
        by=kept_trial,
        config=key,
        seconds=examples / 300,
        under=f"trials/{config.task.data}",
        label="trials",
    )
    return {kind: [done[names[kind, seed]] for seed in config.seeds] for kind in config.kinds}


_KINDS = ("dpsgd", "loosest", "A.sample", "A.scale", "B.sample", "B.scale")


@experiment("idp-sgd/table-8-cifar10", paper=Cifar(CIFAR10, _KINDS, seeds=(0,), group_look=10))
def table_8_cifar10(config, run):
    """DP-SGD at 1 and at 3, Sample and Scale, all with the hyperparameters of table 5."""
    return accuracies(config, kept_trials(config, run))


@experiment("idp-sgd/table-2-cifar10", paper=Cifar(CIFAR10, _KINDS, seeds=(0,), group_look=10, tuned=True))
def table_2_cifar10(config, run):
    """The same with the hyperparameters that table 6 has for each method; DP-SGD is that of table 8."""
    return accuracies(config, kept_trials(config, run))
