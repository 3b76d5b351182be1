"""Tables 2, 8 and 10 on CIFAR-10: the paper's own network and budgets, one trial a piece.

With all of the paper's epochs a trial is 1.5 to 3.5 million per-example gradients, hours on one
core. So each is a piece of its own that any process, or any machine that shares the data folder,
may take; within a trial the run is kept after every epoch. The ways forward and back are in
bfloat16, norms, clipping and sums in float32 (`dpcompanion.gradients.clipping`), which takes
nothing from the guarantee.

Of table 10 there is the same budget for all, and one class that has another.
"""

import dataclasses
import math

import torch

from dpcompanion.reproduction import intervals, pieces
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.classes import MOVES, moves_as_its_budget
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    Trials,
    accuracies,
    accuracy,
    assign,
    class_accuracy,
    network,
    plan_of,
    predictions,
    problem,
    tuned,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import Callbacks, Checkpoint, cross_entropy, train


@dataclasses.dataclass(frozen=True)
class Cifar(Trials):
    """`Trials` whose methods have hyperparameters of their own if `tuned`, in the given precision,
    `together` examples in one pass: few stay in a processor's cache.

    Further kinds: "same", DP-SGD at the budget `rest`, and "class-3.lower", Sample with that
    level's budget for class 3 and `rest` for all others.
    """

    tuned: bool = False
    precision: str | None = "bf16"
    together: int = 64
    rest: float = 2.0
    levels: dict = dataclasses.field(default_factory=lambda: {"lower": 1.0, "higher": 3.0})


def assignment(config, kind, labels, seed):
    """Method, each example's group, the groups' budgets and whose accuracy is looked at, those with
    the strictest one: of the kinds of `Trials`, of "same" and of "class-3.lower".
    """
    setup, _, method = kind.rpartition(".")
    if setup.startswith("class-"):
        groups = (labels == int(setup[-1])).long()
        return "sample", groups, (config.rest, config.levels[method]), groups == 0
    if kind == "same":
        return "dpsgd", torch.zeros_like(labels), (config.rest,), torch.ones_like(labels).bool()
    groups = assign(len(labels), config.groups[setup or "B"], seed)
    if method == "loosest":
        return "dpsgd", torch.zeros_like(groups), config.budgets[-1:], groups == 0
    return method, groups, config.budgets, groups == 0


def kept_trial(config, task, kind, seed, run):
    """What `training.trial` returns, of a run that goes on from its last whole epoch if cut off."""
    found = problem(config.task, run)
    method, groups, budgets, strictest = assignment(config, kind, found.labels, seed)
    plan = plan_of(method, groups, budgets, task.training, delta=config.delta)
    model = network(task, seed).to(run.device)
    test_features = found.test_features.to(run.device)
    test_labels = found.test_labels.to(run.device)
    own_features, own_labels = (
        part[strictest].to(run.device) for part in (found.features, found.labels)
    )

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
        optimizer=torch.optim.SGD(
            model.parameters(), lr=task.learning_rate, momentum=task.momentum
        ),
        microbatch_size=config.together,
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
    """{kind: [`kept_trial` for each seed]}, each kept in the data folder for whatever shares it."""
    problem(config.task, run)
    tasks = {
        kind: tuned(config.task, kind) if config.tuned else config.task for kind in config.kinds
    }
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
        "rest": config.rest,
        "levels": config.levels,
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
        config=key,
        seconds=examples / 300,
        under=f"trials/{config.task.data}",
        label="trials",
    )
    return {kind: [done[names[kind, seed]] for seed in config.seeds] for kind in config.kinds}


_A = Cifar(CIFAR10, ("dpsgd", "A.sample", "A.scale"), seeds=(0, 1, 2), group_look=10)
_B = dataclasses.replace(_A, kinds=("dpsgd", "loosest", "B.sample", "B.scale"))


@experiment("idp-sgd/table-8-cifar10-a", paper=_A)
@experiment("idp-sgd/table-8-cifar10-b", paper=_B)
def table_8_cifar10(config, run):
    """DP-SGD at 1, Sample and Scale, all with the hyperparameters of table 5; B has DP-SGD at 3 as
    well, of figure 1.

    Each distribution of budgets is a run of its own, since each takes hours; DP-SGD is trained once
    for both.
    """
    return accuracies(config, kept_trials(config, run))


_TUNED = dataclasses.replace(_A, tuned=True)


@experiment("idp-sgd/table-2-cifar10-a", paper=_TUNED)
@experiment(
    "idp-sgd/table-2-cifar10-b",
    paper=dataclasses.replace(_TUNED, kinds=("dpsgd", "B.sample", "B.scale"), seeds=(0,)),
)
def table_2_cifar10(config, run):
    """The same with table 6's hyperparameters for each method; DP-SGD is that of table 8."""
    return accuracies(config, kept_trials(config, run))


def _classes(outcomes):
    """Accuracy of each class, (seeds, classes)."""
    return torch.stack([torch.as_tensor(one["classes"]) for one in outcomes])


_SAME = Cifar(CIFAR10, ("same",), seeds=(0,), look=5, group_look=30)


@experiment("idp-sgd/table-10-classes", paper=_SAME)
def table_10_classes(config, run):
    """Table 10: accuracy of each class and of the others with the same budget for all, or where one
    class has another budget.
    """
    done = kept_trials(config, run)
    found = [("same", c, done["same"]) for c in range(10) if "same" in done] + [
        (kind.partition(".")[2], int(kind[len("class-")]), each)
        for kind, each in done.items()
        if kind != "same"
    ]
    values = {}
    for level, c, each in found:
        classes = _classes(each)
        values[f"class_{c}.class.{level}"] = mean_and_sd(classes[:, c])
        values[f"class_{c}.others.{level}"] = mean_and_sd((classes.sum(1) - classes[:, c]) / 9)
    return values


# Each class is a run of its own, since it takes hours.
for _one in range(10):
    _kinds = (f"class-{_one}.lower", f"class-{_one}.higher")
    experiment(f"idp-sgd/table-10-class-{_one}", paper=dataclasses.replace(_SAME, kinds=_kinds))(
        table_10_classes
    )


def _moved(record, level):
    """How far the accuracy of each class that has a record moved with its own budget, and that of
    the nine others: two lists.
    """
    own, others = [], []
    for c in range(10):
        found = record.beside(f"idp-sgd/table-10-class-{c}")
        if found is not None and found.config["task"] == record.config["task"]:
            for whose, moved in (("class", own), ("others", others)):
                after, before = (
                    each.values[f"class_{c}.{whose}.{name}"].mean
                    for each, name in ((found, level), (record, "same"))
                )
                moved.append(after - before)
    return own, others


@finding(
    "idp-sgd/table-10",
    "classes with a higher budget gain and the nine others lose, with a lower budget they lose and "
    "the others gain: each on average over the classes",
    of="idp-sgd/table-10-classes",
)
def budgets_move_classes(record):
    """All classes are compared with one run: its own spread is that of the others' accuracies."""
    for level, sign in (("higher", 1), ("lower", -1)):
        own, others = _moved(record, level)
        if own:
            gain, loss = intervals.mean(own), intervals.mean(others, beside=1)
            gains, loses = (gain, loss) if sign > 0 else (loss, gain)
            yield (
                f"CIFAR-10, {level}, {len(own)} classes",
                f"{gain:+.1f} points, the others {loss:+.1f}",
                intervals.every(gains.above(0), loses.below(0)),
            )


@finding("idp-sgd/figures-5-6", MOVES, of="idp-sgd/table-10-classes")
def own_budget_matters_on_photographs(record):
    """Figure 5 is of the accuracies of table 10: of as many classes as have a record."""
    for level in ("higher", "lower"):
        if moved := _moved(record, level)[0]:
            yield f"CIFAR-10, {level}", *moves_as_its_budget(level, moved)


@dataclasses.dataclass(frozen=True)
class Precisions:
    """The same run in each of some precisions."""

    trial: Cifar
    precisions: dict = dataclasses.field(
        default_factory=lambda: {"float32": None, "bfloat16": "bf16"}
    )


_SHORTEST = dataclasses.replace(CIFAR10, training=dataclasses.replace(CIFAR10.training, epochs=3))


@experiment(
    "idp-sgd/table-8-precision",
    paper=Precisions(Cifar(_SHORTEST, ("same",), seeds=(0, 1, 2), look=1, group_look=5)),
)
def table_8_precision(config, run):
    """Accuracy of DP-SGD over a few epochs, with the ways forward and back in float32 and in
    bfloat16: all else, first weights, batches and noise, is the same.
    """
    trial = config.trial
    (kind,) = trial.kinds
    problem(trial.task, run)
    pieces = {
        f"{name}.seed-{seed}": (name, seed) for seed in trial.seeds for name in config.precisions
    }

    def work(piece):
        name, seed = pieces[piece]
        own = dataclasses.replace(trial, precision=config.precisions[name])
        return kept_trial(own, trial.task, kind, seed, run)

    done, values = run.pieces(work, pieces, label="trials"), {}
    for name in config.precisions:
        each = [done[f"{name}.seed-{seed}"] for seed in trial.seeds]
        values[f"{name}.final"] = [one["final"] for one in each]
        values[f"{name}.accuracy"] = [one["accuracy"] for one in each]
    return values


@finding(
    "idp-sgd/table-8",
    "bfloat16 costs at most a point of accuracy",
    of="idp-sgd/table-8-precision",
    kind="own",
)
def bfloat16_is_precise_enough(record):
    full, half = (record.values[f"{name}.final"] for name in ("float32", "bfloat16"))
    cost = intervals.difference(full, half)
    yield "CIFAR-10, 3 of 30 epochs", f"{cost:+z.2f} points", cost.at_most(1)
