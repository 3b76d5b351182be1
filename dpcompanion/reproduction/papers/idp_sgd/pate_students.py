"""PATE with a budget for each example: table 13."""

import dataclasses
import functools

import torch
import torch.nn.functional as F

from dpcompanion import pate
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.accuracy_tables import gain_of
from dpcompanion.reproduction.papers.idp_sgd.settings import BUDGETS, GROUPS
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    DIGITS,
    MNIST,
    SVHN,
    Task,
    assign,
    network,
    predictions,
    problem,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import derive_seed


@dataclasses.dataclass(frozen=True)
class Teachers:
    """Table 13: how many teachers, how teachers and student are trained without noise, and the
    numbers of public inputs to label among which each kind of student takes its best: more labels
    have more noise.

    Regressions are trained by plain gradient descent, the paper's networks by SGD in batches of
    `batch`. Public inputs are those of the first half of the test data: what is not labelled there
    chooses the number, and the other half judges.
    """

    task: Task
    teachers: int
    queries: tuple
    steps: int = 40
    student_steps: int = 100
    learning_rate: float = 1.0
    batch: int = 32
    momentum: float = 0.9
    seeds: tuple = tuple(range(4))
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5


def softmax_regressions(features, labels, steps, learning_rate):
    """Weights (k, d + 1, 10) of k regressions by plain gradient descent from 0: features (k, m, d),
    labels (k, m).
    """
    inputs = torch.cat((features, torch.ones_like(features[..., :1])), -1)
    transposed, targets = inputs.mT.contiguous(), F.one_hot(labels, 10)
    weights = features.new_zeros(len(features), inputs.shape[-1], 10)
    for _ in range(steps):
        wrong = torch.softmax(inputs @ weights, -1) - targets
        weights -= learning_rate / inputs.shape[1] * (transposed @ wrong)
    return weights


def trained_network(config, features, labels, steps, seed):
    """The task's network, initialised and trained by the seed, without noise or clipping."""
    model = network(config.task, seed).to(features.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum
    )
    generator, m = torch.Generator().manual_seed(derive_seed(seed, "batches")), len(labels)
    order = torch.cat(
        [torch.randperm(m, generator=generator) for _ in range(-(-steps * config.batch // m))]
    )
    for batch in order[: steps * config.batch].to(features.device).split(config.batch):
        optimizer.zero_grad()
        F.cross_entropy(model(features[batch]), labels[batch]).backward()
        optimizer.step()
    return model


def answers(config, features, labels, asked, steps, seed):
    """What models trained on each of k parts say to the inputs `asked`, classes (k, len(asked)):
    features (k, m, ...), labels (k, m).
    """
    if config.task.model == "softmax":
        weights = softmax_regressions(features, labels, steps, config.learning_rate)
        return (F.pad(asked, (0, 1), value=1.0) @ weights).argmax(-1)
    said = []
    for number, (own, own_labels) in enumerate(zip(features, labels)):
        model = trained_network(
            config, own, own_labels, steps, derive_seed(seed, "model", number) % 2**31
        )
        said.append(predictions(model, asked).argmax(-1))
    return torch.stack(said)


@functools.cache
def _weighted(budgets, counts, delta, queries):
    return pate.weighted_parameters(budgets, counts, target_delta=delta, queries=queries)


def students(config, seed, run):
    """{kind: (accuracies on the public inputs left over, accuracies on the judging half)}, each for
    all numbers of labels: of the students of plain PATE at the smallest budget, and of weighted
    votes in each setup.

    All examples of a teacher belong to one group. Teachers, and the draws of the noise, are the
    same for all kinds.
    """
    found, most = problem(config.task, run), max(config.queries)
    features, labels, test_features, test_labels = (
        part.to(run.device)
        for part in (found.features, found.labels, found.test_features, found.test_labels)
    )
    n, half = len(labels), len(test_labels) // 2
    generator = torch.Generator().manual_seed(derive_seed(seed, "teachers"))
    parts = torch.randperm(n, generator=generator)[: n - n % config.teachers].view(
        config.teachers, -1
    )
    votes = answers(
        config, features[parts], labels[parts], test_features[:most], config.steps, seed
    ).cpu()
    kinds = {"pate": (config.budgets[:1], torch.zeros(config.teachers, dtype=torch.long))}
    for setup, shares in config.groups.items():
        kinds[f"ipate_{setup}"] = (config.budgets, assign(config.teachers, shares, seed))
    reached = {}
    for kind, (budgets, group) in kinds.items():
        counts, shares = tuple(torch.bincount(group, minlength=len(budgets)).tolist()), []
        for queries in config.queries:
            chosen = _weighted(budgets, counts, config.delta, queries)
            histogram = pate.histograms(votes[:, :queries], chosen.weights[group], classes=10)
            noise = torch.Generator().manual_seed(derive_seed(seed, "votes"))
            learned = pate.noisy_labels(histogram, chosen.noise_std, noise).to(run.device)
            own = test_features[None, :queries], learned[None], test_features[most:]
            (said,) = answers(config, *own, config.student_steps, derive_seed(seed, "student"))
            right = 100 * (said == test_labels[most:]).double()
            shares.append((right[: half - most].mean().item(), right[half - most :].mean().item()))
        reached[kind] = [list(each) for each in zip(*shares)]
    return reached


_NUMBERS = (100, 150, 200, 300, 400, 600)
_LARGER = Teachers(
    CIFAR10, 250, _NUMBERS, steps=300, student_steps=300, learning_rate=0.05, seeds=(0, 1, 2)
)


@experiment(
    "idp-sgd/table-13",
    quick=Teachers(DIGITS, teachers=100, queries=(50,)),
    paper=Teachers(
        MNIST,
        250,
        _NUMBERS,
        steps=150,
        student_steps=300,
        learning_rate=0.05,
        seeds=tuple(range(5)),
    ),
)
@experiment("idp-sgd/table-13-cifar10", paper=_LARGER)
@experiment("idp-sgd/table-13-svhn", paper=dataclasses.replace(_LARGER, task=SVHN))
def table_13(config, run):
    """Accuracy of the student of PATE at the smallest budget, and of PATE with weighted votes (A
    and B): for each number of labels (`by_labels`, mean over the seeds), and at the best one
    (`labels`).
    """
    problem(config.task, run)
    done = run.pieces(
        lambda name: students(config, int(name[5:]), run), [f"seed-{seed}" for seed in config.seeds]
    )
    values = {}
    for kind in next(iter(done.values())):
        # (seeds, numbers of labels) each
        choosing, judging = torch.tensor(
            [one[kind] for one in done.values()], dtype=torch.float64
        ).unbind(1)
        best = int(choosing.mean(0).argmax())
        values[f"{kind}.labels"] = config.queries[best]
        values[f"{kind}.by_labels"] = judging.mean(0)
        values[f"{kind}.final"] = judging[:, best]
        values[f"{config.task.data}.{kind}"] = mean_and_sd(judging[:, best])
    return values


@finding(
    "idp-sgd/table-13",
    "weighted votes beat votes at the smallest budget: the 95% interval of the paired difference "
    "lies above 0",
)
def weights_help(record):
    for kind in ("ipate_A", "ipate_B"):
        gain = gain_of(record, kind, "pate")
        yield kind[-1], f"{gain:+.1f}", gain.above(0)


@finding(
    "idp-sgd/table-13",
    "Sample and Scale (table 2) are more accurate than weighted votes with the same budgets",
)
def ahead_of_votes(record):
    trained, data = record.beside("idp-sgd/table-2"), record.config["task"]["data"]
    if trained is None or trained.config["task"]["data"] != data:
        return
    for setup in record.config["groups"]:
        for method in ("sample", "scale"):
            gain = intervals.unpaired(
                trained.values[f"{data}.{setup}.{method}"], record.values[f"{data}.ipate_{setup}"]
            )
            yield f"{setup}, {method.capitalize()}", f"{gain:+.1f}", gain.above(0)
