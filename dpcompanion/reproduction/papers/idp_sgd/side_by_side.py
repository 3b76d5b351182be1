"""Many runs at once: networks of a task, each with its plan and seed, as an ensemble."""

import dataclasses
import math

from dpcompanion.reproduction import pieces, records
from dpcompanion.reproduction.papers.idp_sgd.settings import BUDGETS, GROUPS
from dpcompanion.reproduction.papers.idp_sgd.training import (
    Task,
    accuracy,
    as_printed,
    class_accuracy,
    network,
    problem,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import Callbacks, Checkpoint, cross_entropy, train_ensemble


@dataclasses.dataclass(frozen=True)
class Compared:
    """Runs of each kind on one task, for each seed, `together` of them side by side.

    Kinds are as for `Trials`; accuracies are noted after every `look` epochs.
    """

    task: Task
    kinds: tuple = ()
    seeds: tuple = tuple(range(5))
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5
    look: int = 1
    together: int = 1


ALL = 10_000  # runs of softmax regression go side by side, however many they are


def train_all(task, plans, seeds, features, labels, *, device="cpu", watch=None, **options):
    """The ensemble of one run for each plan and seed, each with the task's network of its seed.

    What `watch(epoch, ensemble)` returns after every epoch is in the ensemble's `epochs`; `options`
    are further ones of `train_ensemble`. As a piece of a run it goes on from its last whole epoch
    if it was cut off.
    """
    state = pieces.unfinished()
    return train_ensemble(
        [network(task, seed) for seed in seeds],
        cross_entropy,
        (features, labels),
        plans,
        seeds=seeds,
        learning_rate=task.learning_rate,
        momentum=task.momentum,
        device=device,
        progress=False,
        checkpoint=state and Checkpoint(state),
        callbacks=Callbacks(
            on_epoch=watch
            and (
                lambda ensemble: watch(
                    math.ceil(ensemble.step / ensemble.steps_per_epoch), ensemble
                )
            )
        ),
        **options,
    )


def compared(config, run, plan):
    """{kind: [outcome for each seed]} of runs with the plans `plan(kind, seed)`.

    An outcome holds the accuracy on test data, `final` and in each of the `classes`, and its
    course, `epochs` and `accuracy`.
    """
    task, found = config.task, problem(config.task, run)
    runs = [(kind, seed) for kind in config.kinds for seed in config.seeds]
    parts = [runs[i : i + config.together] for i in range(0, len(runs), config.together)]
    parts = {records.hash_of(part)[:12]: part for part in parts}
    test_features = found.test_features.to(run.device)
    test_labels = found.test_labels.to(run.device)

    def work(piece):
        part = parts[piece]

        def watch(epoch, ensemble):
            if epoch % config.look == 0:
                return {"accuracy": accuracy(ensemble.predict(test_features), test_labels).tolist()}

        plans, seeds = [plan(kind, seed) for kind, seed in part], [seed for _, seed in part]
        trained = train_all(
            task, plans, seeds, found.features, found.labels, device=run.device, watch=watch
        )
        course = {
            epoch["epoch"]: epoch["accuracy"] for epoch in trained.epochs if "accuracy" in epoch
        }
        return {
            "outcomes": [
                {
                    "final": accuracy(logits, test_labels),
                    "classes": class_accuracy(logits, test_labels),
                    "epochs": list(course),
                    "accuracy": [at[r] for at in course.values()],
                }
                for r, logits in enumerate(trained.predict(test_features))
            ]
        }

    done = run.pieces(work, parts, label="runs")
    outcomes = {
        name: outcome
        for piece, part in parts.items()
        for name, outcome in zip(part, done[piece]["outcomes"])
    }
    return {kind: [outcomes[kind, seed] for seed in config.seeds] for kind in config.kinds}


def final_values(config, final):
    """`<kind>.final` for each seed, and under published names the mean and standard deviation."""
    values = {f"{kind}.final": each for kind, each in final.items()}
    return values | as_printed(
        {kind: mean_and_sd(each) for kind, each in final.items()}, config.task, "mnist"
    )
