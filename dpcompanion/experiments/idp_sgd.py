"""Exhibits of Boenisch et al. 2023, "Have it your way".

What the paper does not spell out and its numbers show: an epoch has
ceil(N / B) steps, the sample rate is q = 1 / ceil(N / B), and an account
covers T = epochs ceil(N / B) steps.  Epsilon is by RDP, at delta 1e-5.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from dpcompanion import data, idp, records
from dpcompanion.accounting import compute_epsilon, find_noise_multiplier
from dpcompanion.experiments import experiment
from dpcompanion.records import mean_and_sd
from dpcompanion.training import DPSGDPlan, cross_entropy, derive_seed, models, train

BUDGETS = (1.0, 2.0, 3.0)
GROUPS = {"A": (34, 43, 23), "B": (54, 37, 9)}


@dataclasses.dataclass(frozen=True)
class Training:
    """N examples, expected batches of B, epochs, and the clip norm of DP-SGD."""

    examples: int
    batch: int
    epochs: int
    clip: float

    @property
    def sample_rate(self):
        return 1 / math.ceil(self.examples / self.batch)

    @property
    def steps(self):
        return self.epochs * math.ceil(self.examples / self.batch)


TABLE_5 = {"mnist": Training(60000, 512, 80, 0.2), "svhn": Training(73257, 1024, 30, 0.9),
           "cifar10": Training(50000, 1024, 30, 0.4)}


@dataclasses.dataclass(frozen=True)
class Accounts:
    """What tables 5 and 7 are computed from."""

    training: dict = dataclasses.field(default_factory=lambda: TABLE_5)
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5
    epsilon_tolerance: float = 0.001


def bisected_noise_multiplier(*, target_epsilon, target_delta, sample_rate, steps, epsilon_tolerance):
    """The noise multiplier as the paper's code searches it (its algorithm 5, after Opacus).

    Double sigma from 10 until the budget holds, then bisect [0, sigma] until epsilon is within the tolerance below
    its target.  It returns a point of a dyadic grid, with up to the tolerance of the budget left unspent.
    """
    def epsilon(sigma):
        return compute_epsilon(sample_rate=sample_rate, noise_multiplier=sigma, steps=steps, delta=target_delta,
                               accountant="rdp")
    low, high, reached = 0.0, 10.0, math.inf
    while reached > target_epsilon:
        high *= 2
        reached = epsilon(high)
    while target_epsilon - reached > epsilon_tolerance:
        middle = (low + high) / 2
        at_middle = epsilon(middle)
        if at_middle < target_epsilon:
            high, reached = middle, at_middle
        else:
            low = middle
    return high


@experiment("idp-sgd/table-5", uses=(bisected_noise_multiplier, Training), quick=Accounts(), paper=Accounts())
def table_5(config, run):
    """The noise multiplier of eps 1: `sigma` calibrated tightly, `sigma_bisected` by the paper's own search,
    `sigma_B_over_N` at the sample rate and steps that the table seems to print."""
    target = {"target_epsilon": config.budgets[0], "target_delta": config.delta}
    values = {}
    for name, training in config.training.items():
        run_of = {"sample_rate": training.sample_rate, "steps": training.steps}
        plain = {"sample_rate": training.batch / training.examples,
                 "steps": round(training.epochs * training.examples / training.batch)}
        values[f"{name}.iterations"] = plain["steps"]
        values[f"{name}.sigma"] = find_noise_multiplier(**target, **run_of, accountant="rdp")
        values[f"{name}.sigma_bisected"] = bisected_noise_multiplier(
            **target, **run_of, epsilon_tolerance=config.epsilon_tolerance)
        values[f"{name}.sigma_B_over_N"] = find_noise_multiplier(**target, **plain, accountant="rdp")
    return values


@experiment("idp-sgd/table-7", uses=(idp.sample_parameters, idp.scale_parameters, Training), quick=Accounts(),
            paper=Accounts())
def table_7(config, run):
    """Parameters of Scale and Sample for each data set and each distribution of groups.

    Besides the printed names: `sigma_p_30_epochs` and `c_p_30_epochs` for MNIST, and `sigma_scale_arithmetic`, which
    explain the printed numbers that do not belong to the row that they stand in.
    """
    values = {}
    for name, training in config.training.items():
        run_of = {"target_delta": config.delta, "sample_rate": training.sample_rate, "steps": training.steps}
        values[f"{name}.sigma"] = find_noise_multiplier(target_epsilon=config.budgets[0], accountant="rdp", **run_of)
        values[f"{name}.c"] = training.clip
        values[f"{name}.q"] = training.sample_rate
        for setup, shares in config.groups.items():
            row = f"{name}.{setup}"
            scale = idp.scale_parameters(config.budgets, shares, max_grad_norm=training.clip, **run_of)
            sample = idp.sample_parameters(config.budgets, shares, **run_of)
            values[f"{row}.sigma_scale"] = scale.noise_multiplier
            values[f"{row}.sigma_p"] = scale.noise_multipliers
            values[f"{row}.c_p"] = scale.max_grad_norms
            values[f"{row}.sigma_sample"] = sample.noise_multiplier
            values[f"{row}.q_p"] = sample.sample_rates
            values[f"{row}.sigma_scale_arithmetic"] = sum(
                share * sigma for share, sigma in zip(shares, scale.noise_multipliers.tolist())) / sum(shares)
            if name == "mnist":
                short = dataclasses.replace(training, epochs=30)
                found = idp.scale_parameters(config.budgets, shares, max_grad_norm=short.clip,
                                             **{**run_of, "steps": short.steps})
                values[f"{row}.sigma_p_30_epochs"] = found.noise_multipliers
                values[f"{row}.c_p_30_epochs"] = found.max_grad_norms
    return values


# Training ----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: a data set, a network, plain SGD with momentum, and the plan of DP-SGD that budgets start from."""

    data: str
    model: str
    training: Training
    learning_rate: float
    momentum: float = 0.5


MNIST = Task("mnist", "mnist_cnn", TABLE_5["mnist"], 0.6)
# Softmax regression on digits of 14 x 14 pixels: seconds for hundreds of runs.
DIGITS = Task("mnist-5k", "softmax", Training(4000, 200, 15, 1.0), 1.0)


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
            parts += [F.avg_pool2d(found.features.double(), 2).flatten(1), found.labels]
        else:
            parts += [found.normalised().features, found.labels]
    return Problem(*parts), loaded


def problem(task, run=None):
    """The examples of a task, noted in the run's record."""
    found, loaded = _problem(task.data, task.model)
    if run is not None:
        run.loaded += [provenance for provenance in loaded if provenance not in run.loaded]
    return found


def network(task, seed):
    """The task's network, initialised by the seed."""
    if task.model == "softmax":
        return models.linear(196, 10, seed=seed).double()
    return getattr(models, task.model)(seed=seed)


def assign(examples, shares, seed):
    """Each example's group, (examples,): shares to the nearest whole example, in an order drawn by the seed.

    >>> torch.bincount(assign(1000, (34, 43, 23), seed=0)).tolist()
    [340, 430, 230]
    """
    ends = [round(examples * sum(shares[:i + 1]) / sum(shares)) for i in range(len(shares))]
    groups = torch.bucketize(torch.arange(examples), torch.tensor(ends), right=True)
    generator = torch.Generator().manual_seed(derive_seed(seed, "groups"))
    return groups[torch.randperm(examples, generator=generator)]


@functools.cache
def parameters(method, budgets, counts, training, delta, accountant="rdp"):
    """(noise multiplier, each group's rate, each group's clip norm) of "dpsgd", "sample", "scale" or "combined-50", which
    takes half of what Sample changes and leaves the rest to Scale.  DP-SGD gives everybody the smallest budget."""
    run_of = {"target_delta": delta, "sample_rate": training.sample_rate, "steps": training.steps, "accountant": accountant}
    same = torch.ones(len(budgets), dtype=torch.float64)
    if method == "sample":
        found = idp.sample_parameters(budgets, counts, **run_of)
        return found.noise_multiplier, found.sample_rates, same * training.clip
    if method == "scale":
        found = idp.scale_parameters(budgets, counts, max_grad_norm=training.clip, **run_of)
        return found.noise_multiplier, same * training.sample_rate, found.max_grad_norms
    if method.startswith("combined-"):
        found = idp.combined_parameters(budgets, counts, max_grad_norm=training.clip,
                                        sample_weight=int(method.partition("-")[2]) / 100, **run_of)
        return found.noise_multiplier, found.sample_rates, found.max_grad_norms
    noise = find_noise_multiplier(target_epsilon=min(budgets), **run_of)
    return noise, same * training.sample_rate, same * training.clip


def plan_of(method, groups, budgets, training, *, delta, accountant="rdp"):
    """The plan of a method for examples in `groups`, (n,) numbers of entries of `budgets`."""
    counts = tuple(torch.bincount(groups, minlength=len(budgets)).tolist())
    noise, rates, norms = parameters(method, tuple(budgets), counts, training, delta, accountant)
    return DPSGDPlan(n=len(groups), sample_rate=rates[groups], steps=training.steps, max_grad_norm=norms[groups],
                     noise_multiplier=noise, delta=delta)


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


# Accuracy ----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Trials:
    """Runs of each kind on one task, for each seed.

    `kinds`: "dpsgd" and "loosest" (DP-SGD for all at the smallest and at the largest budget), "A.sample" (a distribution
    of groups and a method), and "B.alone" (DP-SGD on the group with the smallest budget, without the others).  A run is
    looked at after every `look` epochs, and its strictest group's own loss after every `group_look`.
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
    """One run: accuracy on test data over the epochs, at the end by class, and the strictest group's loss and accuracy.

    Runs of one seed share the assignment of groups, the initial weights and the streams of random numbers.
    """
    task, found = config.task, problem(config.task, run)
    setup, _, method = kind.rpartition(".")
    groups = assign(len(found.labels), config.groups[setup or "B"], seed)
    strictest = groups == 0
    features, labels, training, budgets = found.features, found.labels, task.training, config.budgets
    if method == "alone":
        features, labels = features[strictest], labels[strictest]
        training = dataclasses.replace(training, examples=len(labels))
        groups, budgets, method = groups[strictest], budgets[:1], "dpsgd"
    if method == "loosest":
        groups, budgets, method = torch.zeros_like(groups), budgets[-1:], "dpsgd"
    plan = plan_of(method, groups, budgets, training, delta=config.delta)
    model = network(task, seed)
    seen = {"epochs": [], "accuracy": [], "group_epochs": [], "group_loss": [], "group_accuracy": []}

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

    test_features, test_labels = found.test_features.to(run.device), found.test_labels.to(run.device)
    own_features, own_labels = (part[strictest].to(run.device) for part in (found.features, found.labels))
    optimizer = torch.optim.SGD(model.to(run.device).parameters(), lr=task.learning_rate, momentum=task.momentum)
    history = train(model, cross_entropy, (features, labels), plan, optimizer=optimizer, seed=seed, on_epoch=look,
                    progress=False)
    logits = predictions(model, test_features)
    return {**seen, "final": accuracy(logits, test_labels), "classes": class_accuracy(logits, test_labels),
            "dropped": history.dropped}


_TRIAL = (Task, Training, Problem, _problem, network, assign, parameters, plan_of, predictions, accuracy, class_accuracy, trial)


def trials(config, run):
    """{kind: [what `trial` returns for each seed]}.  Trials that take minutes are kept in the data folder, so that more
    seeds or kinds, and other exhibits, go on from them."""
    key = {"task": config.task, "budgets": config.budgets, "groups": config.groups, "delta": config.delta,
           "look": config.look, "group_look": config.group_look, "device": run.device.type,
           "code": records.code_hash(*_TRIAL)}
    folder = run.folder
    if config.task.model != "softmax":
        folder = data.data_folder() / "trials" / f"{config.task.data}-{records.hash_of(key)[:12]}"
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for seed in config.seeds for kind in config.kinds}
    problem(config.task, run)
    done = records.resumable(lambda piece: trial(config, *pieces[piece], run), pieces, folder=folder, config=key, label="trials")
    return {kind: [done[f"{kind}.seed-{seed}"] for seed in config.seeds] for kind in config.kinds}


@experiment("idp-sgd/table-2", uses=(*_TRIAL, trials), quick=Trials(DIGITS, seeds=tuple(range(5)), look=3, group_look=3),
            paper=Trials(MNIST, kinds=("dpsgd", "A.sample", "A.scale", "B.sample", "B.scale"), seeds=(0,)))
def table_2(config, run):
    """Accuracy of DP-SGD, Sample and Scale: `mnist.A.sample` and so on, with the curves of figure 1 and appendix D.7.

    On MNIST the paper uses one set of hyperparameters for all methods, so this is table 8 as well.
    """
    values = {}
    for kind, each in trials(config, run).items():
        for setup in [kind] if "." in kind else [f"{setup}.{kind}" for setup in config.groups]:
            values[f"{config.task.data}.{setup}"] = mean_and_sd(one["final"] for one in each)
        values[f"{kind}.final"] = [one["final"] for one in each]
        values[f"{kind}.classes"] = [mean_and_sd(classes) for classes in zip(*(one["classes"] for one in each))]
        for name in ("epochs", "group_epochs"):
            values[f"{kind}.{name}"] = each[0][name]
        for name in ("accuracy", "group_loss", "group_accuracy"):
            values[f"{kind}.{name}"] = [mean_and_sd(looks) for looks in zip(*(one[name] for one in each))]
        values[f"{kind}.dropped"] = sum(one["dropped"] for one in each)
    return values
