"""One trial: a network trained with a budget for each example, and what the tables of accuracies
read of trials.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from dpcompanion import data, idp
from dpcompanion.accounting import find_noise_multiplier
from dpcompanion.reproduction import published
from dpcompanion.reproduction.papers.idp_sgd.settings import BUDGETS, GROUPS, TABLE_5, Training
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import Callbacks, DPSGDPlan, cross_entropy, derive_seed, models, train


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: a data set, a network, plain SGD with momentum, and the plan of DP-SGD that
    budgets start from.
    """

    data: str
    model: str
    training: Training
    learning_rate: float
    momentum: float = 0.5


MNIST = Task("mnist", "mnist_cnn", TABLE_5["mnist"], 0.6)
SVHN = Task("svhn", "cifar_cnn", TABLE_5["svhn"], 0.2)
CIFAR10 = Task("cifar10", "cifar_cnn", TABLE_5["cifar10"], 0.7)
MNIST_5K = Task("mnist-5k", "mnist_cnn", Training(4000, 512, 80, 0.2), 0.6)
# Softmax regression on digits of 14 x 14 pixels: seconds for hundreds of runs.
DIGITS = Task("mnist-5k", "softmax", Training(4000, 400, 10, 1.0), 2.0)
HALVES = Task("mnist-5k", "softmax", Training(1000, 200, 15, 1.0), 2.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Features and labels of a task's training and test examples."""

    features: torch.Tensor
    labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor


@functools.cache
def _problem(name, model):
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load(name, split=split)
        loaded.append(found.provenance())
        if model == "softmax":
            images = found.features
            assert isinstance(images, torch.Tensor)  # texts alone have a tuple
            parts += [F.avg_pool2d(images.double(), 2).flatten(1), found.labels]
        else:
            parts += [found.normalized().features, found.labels]
    return Problem(*parts), loaded


def problem(task, run=None):
    """The examples of a task, noted in the run's record."""
    found, loaded = _problem(task.data, task.model)
    if run is not None:
        run.note(loaded)
    return found


def network(task, seed):
    """The task's network, initialised by the seed."""
    if task.model == "softmax":
        return models.linear(196, 10, seed=seed).double()
    return getattr(models, task.model)(seed=seed)


def assign(examples, shares, seed):
    """Each example's group, (examples,): shares to the nearest example, in the seed's order.

    >>> torch.bincount(assign(1000, (34, 43, 23), seed=0)).tolist()
    [340, 430, 230]
    """
    ends = [round(examples * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    groups = torch.bucketize(torch.arange(examples), torch.tensor(ends), right=True)
    generator = torch.Generator().manual_seed(derive_seed(seed, "groups"))
    return groups[torch.randperm(examples, generator=generator)]


@functools.cache
def parameters(method, budgets, counts, training, delta, accountant="rdp"):
    """(noise multiplier, each group's rate, each group's clip norm) of "dpsgd", "sample", "scale"
    or "combined-50", which takes half of what Sample changes and leaves the rest to Scale. DP-SGD
    gives every group the smallest budget.
    """
    run_of = {
        "target_delta": delta,
        "sample_rate": training.sample_rate,
        "steps": training.steps,
        "accountant": accountant,
    }
    same = torch.ones(len(budgets), dtype=torch.float64)
    if method == "sample":
        found = idp.sample_parameters(budgets, counts, **run_of)
        return found.noise_multiplier, found.sample_rates, same * training.clip
    if method == "scale":
        found = idp.scale_parameters(budgets, counts, max_grad_norm=training.clip, **run_of)
        return found.noise_multiplier, same * training.sample_rate, found.max_grad_norms
    if method.startswith("combined-"):
        found = idp.combined_parameters(
            budgets,
            counts,
            max_grad_norm=training.clip,
            sample_weight=int(method.partition("-")[2]) / 100,
            **run_of,
        )
        return found.noise_multiplier, found.sample_rates, found.max_grad_norms
    noise = find_noise_multiplier(target_epsilon=min(budgets), **run_of)
    return noise, same * training.sample_rate, same * training.clip


def plan_of(method, groups, budgets, training, *, delta, accountant="rdp"):
    """The plan of a method for examples in `groups`, (n,) numbers of entries of `budgets`,
    calibrated and accounted for by one accountant.
    """
    counts = tuple(torch.bincount(groups, minlength=len(budgets)).tolist())
    noise, rates, norms = parameters(method, tuple(budgets), counts, training, delta, accountant)
    return DPSGDPlan(
        n=len(groups),
        sample_rate=rates[groups],
        steps=training.steps,
        max_grad_norm=norms[groups],
        noise_multiplier=noise,
        delta=delta,
        accountant=accountant,
    )


def predictions(model, features):
    """Logits, (n, classes), a thousand examples at a time."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part) for part in features.split(1000)])


def accuracy(logits, labels):
    """Per cent of right answers."""
    return 100 * (logits.argmax(-1) == labels).double().mean(-1)


def class_accuracy(logits, labels, classes=10):
    """Per cent of right answers in each class, (classes,)."""
    return torch.stack([accuracy(logits[labels == c], labels[labels == c]) for c in range(classes)])


def as_printed(values, task, data):
    """The values under the published names if the task's data are the paper's, else under the name
    of the data.
    """
    return (
        values
        if task.data == data
        else {f"{task.data}.{key}": value for key, value in values.items()}
    )


@dataclasses.dataclass(frozen=True)
class Trials:
    """Runs of each kind on one task, for each seed.

    `kinds`: "dpsgd" and "loosest" (DP-SGD for all at the smallest and at the largest budget),
    "A.sample" (a distribution of groups and a method), and "B.alone" (DP-SGD on the group with the
    smallest budget, without the others). A run is looked at after every `look` epochs, and its
    strictest group's own loss after every `group_look`.
    """

    task: Task
    kinds: tuple = ("dpsgd", "loosest", "A.sample", "A.scale", "B.sample", "B.scale", "B.alone")
    seeds: tuple = tuple(range(10))
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5
    look: int = 5
    group_look: int = 20


def trial(config, kind, seed, run):
    """One run: accuracy on test data over the epochs, at the end by class, and the strictest
    group's loss and accuracy.

    Runs of one seed share the assignment of groups, the initial weights and the streams of random
    numbers.
    """
    task, found = config.task, problem(config.task, run)
    setup, _, method = kind.rpartition(".")
    groups = assign(len(found.labels), config.groups[setup or "B"], seed)
    strictest = groups == 0
    features, labels = found.features, found.labels
    training, budgets = task.training, config.budgets
    if method == "alone":
        features, labels = features[strictest], labels[strictest]
        training = dataclasses.replace(training, examples=len(labels))
        groups, budgets, method = groups[strictest], budgets[:1], "dpsgd"
    if method == "loosest":
        groups, budgets, method = torch.zeros_like(groups), budgets[-1:], "dpsgd"
    plan = plan_of(method, groups, budgets, training, delta=config.delta)
    model = network(task, seed)
    looks = ("epochs", "accuracy", "group_epochs", "group_loss", "group_accuracy")
    seen = {name: [] for name in looks}

    def look(run_now):
        epoch = run_now.step // math.ceil(training.examples / training.batch)
        if epoch % config.look == 0:
            seen["epochs"].append(epoch)
            seen["accuracy"].append(accuracy(predictions(model, test_features), test_labels))
        if epoch % config.group_look == 0:
            logits = predictions(model, own_features)
            seen["group_epochs"].append(epoch)
            seen["group_loss"].append(cross_entropy(logits, own_labels).mean())
            seen["group_accuracy"].append(accuracy(logits, own_labels))

    test_features, test_labels = (
        part.to(run.device) for part in (found.test_features, found.test_labels)
    )
    own_features, own_labels = (
        part[strictest].to(run.device) for part in (found.features, found.labels)
    )
    optimizer = torch.optim.SGD(
        model.to(run.device).parameters(), lr=task.learning_rate, momentum=task.momentum
    )
    history = train(
        model,
        cross_entropy,
        (features, labels),
        plan,
        optimizer=optimizer,
        seed=seed,
        callbacks=Callbacks(on_epoch=look),
        progress=False,
    )
    logits = predictions(model, test_features)
    return {
        **seen,
        "final": accuracy(logits, test_labels),
        "classes": class_accuracy(logits, test_labels),
        "dropped": history.dropped,
    }


def trials(config, run):
    """{kind: [what `trial` returns for each seed]}. Trials that take minutes are kept in the data
    folder, so that more seeds or kinds, and other exhibits, go on from them.
    """
    key = {
        "task": config.task,
        "budgets": config.budgets,
        "groups": config.groups,
        "delta": config.delta,
        "look": config.look,
        "group_look": config.group_look,
    }
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for seed in config.seeds for kind in config.kinds}
    problem(config.task, run)
    steps = config.task.training.steps * len(pieces)
    done = run.keep(
        lambda piece: trial(config, *pieces[piece], run),
        pieces,
        config=key,
        seconds=steps / (1000 if config.task.model == "softmax" else 10),
        under=f"trials/{config.task.data}",
        label="trials",
    )
    return {kind: [done[f"{kind}.seed-{seed}"] for seed in config.seeds] for kind in config.kinds}


def final_accuracies(config, kinds, seeds, run, *, budgets=None, groups=None):
    """{kind: final accuracy for each seed} of trials that other exhibits may share."""
    found = trials(
        Trials(
            config.task,
            tuple(kinds),
            tuple(seeds),
            tuple(budgets or config.budgets),
            groups or config.groups,
            config.delta,
        ),
        run,
    )
    return {kind: [one["final"] for one in each] for kind, each in found.items()}


def accuracies(config, done):
    """The trials' values: `mnist.A.sample` and so on, curves of figure 1, and of appendix D.7."""
    values = {}
    for kind, each in done.items():
        for setup in [kind] if "." in kind else [f"{setup}.{kind}" for setup in config.groups]:
            values[f"{config.task.data}.{setup}"] = mean_and_sd(one["final"] for one in each)
        values[f"{kind}.final"] = [one["final"] for one in each]
        values[f"{kind}.classes"] = [
            mean_and_sd(classes) for classes in zip(*(one["classes"] for one in each))
        ]
        for name in ("epochs", "group_epochs"):
            values[f"{kind}.{name}"] = each[0][name]
        for name in ("accuracy", "group_loss", "group_accuracy"):
            values[f"{kind}.{name}"] = [
                mean_and_sd(looks) for looks in zip(*(one[name] for one in each))
            ]
        values[f"{kind}.dropped"] = sum(one["dropped"] for one in each)
    return values


@dataclasses.dataclass(frozen=True)
class Accuracies(Trials):
    """Tables 2 and 8: besides the task those that need a GPU, by what they need."""

    larger: dict = dataclasses.field(default_factory=dict)


def tuned(task, kind):
    """The task with the hyperparameters of table 6 for "A.sample" and its like; DP-SGD keeps those
    of table 5.

    >>> tuned(SVHN, "A.scale").training, tuned(SVHN, "A.scale").learning_rate
    (Training(examples=73257, batch=1024, epochs=50, clip=2.0), 0.1)
    >>> tuned(SVHN, "dpsgd") == SVHN
    True
    """
    setup, _, method = kind.rpartition(".")
    printed, row = published.exhibit("idp-sgd/table-6").flat(), f"{task.data}.{method}_{setup}"
    if f"{row}.lr" not in printed:
        return task
    training = dataclasses.replace(
        task.training,
        batch=int(printed[f"{row}.batch"]),
        epochs=int(printed[f"{row}.epochs"]),
        clip=float(printed[f"{row}.clip"]),
    )
    return dataclasses.replace(task, training=training, learning_rate=float(printed[f"{row}.lr"]))


def larger_tasks(config, run, hyperparameters):
    """`svhn.A.sample` and so on, for tasks on a GPU; each with `hyperparameters(task, kind)`."""
    values = {}
    for task in config.larger.values():
        for kind in (
            "dpsgd",
            *(f"{setup}.{method}" for setup in config.groups for method in ("sample", "scale")),
        ):
            own = dataclasses.replace(config, task=hyperparameters(task, kind), kinds=(kind,))
            final = [one["final"] for one in trials(own, run)[kind]]
            for name in [kind] if "." in kind else [f"{setup}.{kind}" for setup in config.groups]:
                values[f"{task.data}.{name}"] = mean_and_sd(final)
            values[f"{task.data}.{kind}.final"] = final
    return values


def with_larger(config, run, hyperparameters):
    """`accuracies` of the task, and of the larger ones on a GPU; without one they are `not_run`."""
    values = accuracies(config, trials(config, run))
    if config.larger and run.device.type == "cpu":
        return {**values, "not_run": list(config.larger)}
    return values | larger_tasks(config, run, hyperparameters)
