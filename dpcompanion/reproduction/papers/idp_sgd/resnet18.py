"""Table 3 on CIFAR-10: ResNet-18 with group norm, Sample and Scale beside DP-SGD."""

import dataclasses

import torch

from dpcompanion.reproduction import pieces
from dpcompanion.reproduction.experiments import experiment
from dpcompanion.reproduction.papers.idp_sgd.networks import resnet18
from dpcompanion.reproduction.papers.idp_sgd.settings import GROUPS, Training
from dpcompanion.reproduction.papers.idp_sgd.training import (
    Task,
    accuracy,
    assign,
    plan_of,
    predictions,
    problem,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import Callbacks, Checkpoint, cross_entropy, train


@dataclasses.dataclass(frozen=True)
class Images:
    """The task, its kinds of runs and their seeds, budgets and shares of the groups."""

    task: Task
    kinds: tuple = ("dpsgd", "sample", "scale")
    seeds: tuple = (0, 1, 2)
    budgets: tuple = (5.0, 7.5, 10.0)
    groups: tuple = GROUPS["A"]
    delta: float = 1e-5


def image_trial(config, kind, seed, run):
    """Test accuracy after each epoch of a run, which goes on from its last one if cut off."""
    task, found = config.task, problem(config.task, run)
    plan = plan_of(
        kind,
        assign(len(found.labels), config.groups, seed),
        config.budgets,
        task.training,
        delta=config.delta,
    )
    model = resnet18(seed=seed).to(run.device)
    test_features = found.test_features.to(run.device)
    test_labels = found.test_labels.to(run.device)
    state = pieces.unfinished()
    history = train(
        model,
        cross_entropy,
        (found.features, found.labels),
        plan,
        seed=seed,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=task.learning_rate, momentum=task.momentum
        ),
        callbacks=Callbacks(
            on_epoch=lambda _: {
                "accuracy": float(accuracy(predictions(model, test_features), test_labels))
            }
        ),
        checkpoint=state and Checkpoint(state),
        progress=False,
    )
    return {"accuracy": [epoch["accuracy"] for epoch in history.epochs], "dropped": history.dropped}


@experiment(
    "idp-sgd/table-3-resnet18",
    paper=Images(Task("cifar10", "resnet18", Training(50_000, 1024, 30, 0.4), 0.7)),
)
def table_3_resnet18(config, run):
    """The paper prints no hyperparameters for this table: ours are table 5's for CIFAR-10."""
    names = {f"{kind}.seed-{seed}": (kind, seed) for seed in config.seeds for kind in config.kinds}
    problem(config.task, run)
    done = run.pieces(lambda piece: image_trial(config, *names[piece], run), names, label="trials")
    values = {}
    for kind in config.kinds:
        each = [done[f"{kind}.seed-{seed}"] for seed in config.seeds]
        values[f"resnet18_cifar10.{kind}"] = mean_and_sd(one["accuracy"][-1] for one in each)
        values[f"resnet18_cifar10.{kind}.final"] = [one["accuracy"][-1] for one in each]
        values[f"resnet18_cifar10.{kind}.dropped"] = sum(one["dropped"] for one in each)
    return values
