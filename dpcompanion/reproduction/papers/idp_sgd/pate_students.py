"""PATE with a budget for each example: table 13."""

import dataclasses
import functools

import torch
import torch.nn.functional as F

from dpcompanion import pate
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.accuracy_tables import _gain
from dpcompanion.reproduction.papers.idp_sgd.settings import BUDGETS, GROUPS
from dpcompanion.reproduction.papers.idp_sgd.training import accuracy, assign, DIGITS, problem, Task
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import derive_seed

# PATE --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Teachers:
    """Table 13: how many teachers, for how many steps of plain gradient descent, and how many public inputs they label.

    The public inputs are the first half of the test data; the student is judged on the other half.
    """

    task: Task
    teachers: int
    queries: int
    steps: int = 40
    student_steps: int = 100
    learning_rate: float = 1.0
    seeds: tuple = tuple(range(4))
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5


def softmax_regressions(features, labels, steps, learning_rate):
    """Weights (k, d + 1, 10) of k regressions by plain gradient descent from 0: features (k, m, d), labels (k, m)."""
    inputs = torch.cat((features, torch.ones_like(features[..., :1])), -1)
    transposed, targets = inputs.mT.contiguous(), F.one_hot(labels, 10)
    weights = features.new_zeros(len(features), inputs.shape[-1], 10)
    for _ in range(steps):
        wrong = torch.softmax(inputs @ weights, -1) - targets
        weights -= learning_rate / inputs.shape[1] * (transposed @ wrong)
    return weights


@functools.cache
def _weighted(budgets, counts, delta, queries):
    return pate.weighted_parameters(budgets, counts, target_delta=delta, queries=queries)


def students(config, setup, seed, run):
    """Accuracies of the students of plain PATE at the smallest budget and of weighted votes: (pate, ipate).

    All examples of a teacher belong to one group.
    """
    found = problem(config.task, run)
    features, labels, test_features, test_labels = (
        part.to(run.device) for part in (found.features, found.labels, found.test_features, found.test_labels)
    )
    n, half = len(labels), len(test_labels) // 2
    generator = torch.Generator().manual_seed(derive_seed(seed, "teachers"))
    parts = torch.randperm(n, generator=generator)[: n - n % config.teachers].view(config.teachers, -1)
    teachers = softmax_regressions(features[parts], labels[parts], config.steps, config.learning_rate)
    public, judged = (
        F.pad(part, (0, 1), value=1.0) for part in (test_features[: config.queries], test_features[half:])
    )
    votes = (public @ teachers).argmax(-1).cpu()
    group, reached = assign(config.teachers, config.groups[setup], seed), []
    counts = torch.bincount(group, minlength=len(config.budgets)).tolist()
    everybody = (config.budgets[:1], [config.teachers], torch.zeros_like(group))
    for budgets, sizes, own in (everybody, (config.budgets, counts, group)):
        chosen = _weighted(budgets, tuple(sizes), config.delta, config.queries)
        histogram = pate.histograms(votes, chosen.weights[own], classes=10)
        answers = pate.noisy_labels(histogram, chosen.noise_std, generator).to(run.device)
        student = softmax_regressions(public[None, :, :-1], answers[None], config.student_steps, config.learning_rate)[
            0
        ]
        reached.append(accuracy(judged @ student, test_labels[half:]))
    return reached


@experiment(
    "idp-sgd/table-13",
    quick=Teachers(DIGITS, teachers=100, queries=50),
    # The paper's data by our teachers, regressions of digits of 14 x 14 pixels, as many as it has of them.
    paper=Teachers(dataclasses.replace(DIGITS, data="mnist"), teachers=250, queries=200, seeds=tuple(range(10))),
)
def table_13(config, run):
    """Accuracy of the student of PATE at the smallest budget, and of PATE with weighted votes (A and B)."""
    found = {setup: [students(config, setup, seed, run) for seed in config.seeds] for setup in config.groups}
    final = {f"ipate_{setup}": [ipate for _, ipate in each] for setup, each in found.items()}
    final["pate"] = [plain for plain, _ in found["A"]]
    values = {f"{kind}.final": each for kind, each in final.items()}
    return values | {f"{config.task.data}.{kind}": mean_and_sd(each) for kind, each in final.items()}


@finding(
    "idp-sgd/table-13",
    "weighted votes beat votes at the smallest budget: the 95% interval of the paired difference lies above 0",
)
def weights_help(record):
    for kind in ("ipate_A", "ipate_B"):
        gain = _gain(record, kind, "pate")
        yield kind[-1], f"{gain:+.1f}", gain.above(0)
