"""Runs of DP-SGD watched at some points, and what theorems 3.2 and 3.3 make of their norms."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.per_instance import exact_composition, holder_order, log_mass, step_divergence
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import finding
from dpcompanion.reproduction.papers.common import Trace, reported, within_the_piece
from dpcompanion.training import Callbacks, DPSGDPlan, cross_entropy, gradient_norms, models, train

STAGES = ("initial", "middle", "final")
# Runs with the point, for training points; without it, for test points.
DIRECTIONS = {"remove": "X' || X", "add": "X || X'"}
ORDERS = (1.25, 1.5, 1.75, 2, 2.2, 2.4, 2.6, 2.8, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)


@dataclasses.dataclass(frozen=True)
class Task:
    """Runs of DP-SGD on one data set, from one start, and how often to look at how many points."""

    data: str
    model: str
    epsilon: float = 10.0
    batch_size: int = 128
    epochs: int = 10
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    drops: tuple = ()  # epochs at which the learning rate drops tenfold
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    runs: int = 4
    points: int = 100
    stops: int = 100


MNIST = Task("mnist", "lenet5", runs=5, points=200)
PLAIN_MNIST = dataclasses.replace(MNIST, model="softmax", runs=2)
CIFAR10 = Task(
    "cifar10",
    "resnet20",
    epochs=200,
    momentum=0.9,
    weight_decay=1e-4,
    drops=(100, 150),
    runs=10,
    points=500,
)
DIGITS = Task("mnist-5k", "lenet5", learning_rate=1.0, runs=2, points=60, stops=31)
PLAIN_DIGITS = dataclasses.replace(DIGITS, model="softmax", runs=1)


@dataclasses.dataclass(frozen=True)
class Watch:
    """What an exhibit looks at: tasks by name, and the order of the divergence."""

    tasks: dict
    order: float = 8


@dataclasses.dataclass(frozen=True)
class WatchMore(Watch):
    """With tasks that need a GPU; without one a record lists them as `not_run`."""

    larger: dict = dataclasses.field(default_factory=dict)


MODELS = {
    "lenet5": models.lenet5,
    "mnist_cnn": models.mnist_cnn,
    "softmax": lambda seed: torch.nn.Sequential(
        torch.nn.Flatten(), models.linear(784, 10, seed=seed)
    ),
    "resnet20": functools.partial(models.resnet20, groups=16, affine=True),
}

NETWORKS = ("lenet5", "resnet20")  # that the paper trains
OTHERS = ", with a network that the paper does not train"

# Examples in one pass: a whole batch of 128 as it is drawn, faster than what the library chooses.
TOGETHER = {"resnet20": 192}


def inputs_of(name, model, split, run):
    """Features and labels as the network wants them: normalised, LeNet-5's digits at 32 x 32."""
    found = run.load(name, split=split).normalized()
    features = found.features
    if model == "lenet5":
        features = F.interpolate(features, size=32, mode="bilinear", align_corners=False)
    return features, found.labels


def plan_of(task, examples):
    """The plan that spends the task's epsilon, by RDP (add or remove, Poisson sampling)."""
    rate = task.batch_size / examples
    return DPSGDPlan.for_epsilon(
        task.epsilon,
        n=examples,
        sample_rate=rate,
        steps=round(task.epochs / rate),
        max_grad_norm=task.max_grad_norm,
        delta=task.delta,
        accountant="rdp",
    )


def moments(task, steps):
    """After how many steps points are looked at: before training, `stops` times, and halfway."""
    return sorted({round(steps * i / task.stops) for i in range(task.stops + 1)} | {steps // 2})


def watch(task, seed, run):
    """One run: norms (moments, 2 points), whether a point is classified correctly, weights by
    stage, test accuracy.
    """
    x, y = inputs_of(task.data, task.model, "train", run)
    test_x, test_y = inputs_of(task.data, task.model, "test", run)
    plan = plan_of(task, len(y))
    members, others = (
        torch.as_tensor(np.random.RandomState(0).permutation(n)[: task.points])
        for n in (len(y), len(test_y))
    )
    points = (
        torch.cat((x[members], test_x[others])).to(run.device),
        torch.cat((y[members], test_y[others])).to(run.device),
    )
    model = MODELS[task.model](seed=0).to(run.device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=task.learning_rate,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
    )
    stops = set(moments(task, plan.steps))
    trace = Trace("norms", "correct", "weights")

    def look(step):
        model.eval()
        trace["norms"].append(gradient_norms(model, cross_entropy, *points, method="mixed").cpu())
        with torch.no_grad():
            trace["correct"].append((model(points[0]).argmax(1) == points[1]).cpu())
            if step in (0, plan.steps // 2, plan.steps):
                trace["weights"].append(
                    torch.nn.utils.parameters_to_vector(model.parameters()).cpu()
                )

    def on_step(state):
        if state.step in stops:
            look(state.step)
        drops = sum(state.step >= epoch * plan.steps_per_epoch for epoch in task.drops)
        optimizer.param_groups[0]["lr"] = task.learning_rate * 0.1**drops

    look(0)
    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=optimizer,
        seed=seed,
        device=run.device,
        method="mixed",
        microbatch_size=TOGETHER.get(task.model),
        callbacks=Callbacks(on_step=on_step),
        checkpoint=within_the_piece(looks=trace),
        progress=False,
    )
    with torch.no_grad():
        right = sum(
            (model(part.to(run.device)).argmax(1).cpu() == labels).sum()
            for part, labels in zip(test_x.split(1000), test_y.split(1000))
        )
    values = {"accuracy": float(right) / len(test_y), "seconds": trace.seconds}
    return values, {
        name: torch.stack(trace[name]).numpy() for name in ("norms", "correct", "weights")
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """A task's norms and correct (runs, moments, 2 points), weights (runs, stages, parameters)."""

    plan: DPSGDPlan
    moments: list
    norms: torch.Tensor
    correct: torch.Tensor
    weights: torch.Tensor
    accuracy: list

    def seen(self, direction, what="norms"):
        """Norms (or `correct`) of the points that a direction is about, (runs, moments, points)."""
        first, second = getattr(self, what).chunk(2, -1)
        return {"remove": first, "add": second}[direction]

    @property
    def stages(self):
        """Where the stages are among the moments."""
        return [self.moments.index(step) for step in (0, self.plan.steps // 2, self.plan.steps)]


def seconds(task, plan):
    """About how long the runs of a task take on two cores."""
    return task.runs * plan.steps * (0.45 if task.model == "resnet20" else 0.01)


def watched(task, run):
    """The runs of a task, `Watched`, seeds 0, 1, ...; long ones are kept in the data folder, each
    as it ends.
    """
    plan = plan_of(task, len(run.load(task.data, split="train")))
    pieces = {f"seed-{seed}": seed for seed in range(task.runs)}
    parts = run.keep(
        lambda piece: watch(task, pieces[piece], run),
        pieces,
        config={"task": dataclasses.replace(task, runs=1)},
        seconds=seconds(task, plan),
        under=f"watched/{task.data}-{task.model}",
        label=f"{task.data}, {task.model}",
    ).values()
    run.load(task.data, split="test")
    arrays = {
        name: torch.as_tensor(np.stack([found[name] for _, found in parts]))
        for name in ("norms", "correct", "weights")
    }
    arrays["norms"] = arrays["norms"].double().clamp(max=task.max_grad_norm)
    return Watched(
        plan,
        moments(task, plan.steps),
        **arrays,
        accuracy=[values["accuracy"] for values, _ in parts],
    )


def divergence(norms, plan, order):
    """Theorem 3.2 for one step, of clipped gradients of these norms: the shape of `norms`."""
    return step_divergence(
        sample_rate=plan.sample_rate,
        noise_multiplier=plan.noise_std,
        sensitivity=norms,
        orders=order,
    )


def share_of(norms, plan, order):
    """`divergence` over that of the worst case, a gradient as long as the clip norm."""
    return divergence(norms, plan, order) / divergence(plan.max_grad_norm, plan, order)


def costs_and_weights(norms, plan, order, after):
    """Divergences of steps that have `after` others after them, (steps,), at their orders in
    theorem 3.3, p = 3n.

    The norms are (steps, runs, points), and so are the divergences; the weights are (steps,). With
    K orders in place of one both have a last axis of K.
    """
    p = 3 * plan.steps
    if isinstance(order, Sequence):
        orders = torch.stack([holder_order(each, p, after) for each in order], -1)
    else:
        orders = holder_order(order, p, after)
    return torch.stack([divergence(step, plan, own) for step, own in zip(norms, orders)]), p * (
        orders - 1
    )


def weighted_costs(found, direction, order):
    """Divergences of the steps at their orders in theorem 3.3, p = 3n, and weights.

    The divergences are (moments but the last, runs, points), the weights (moments but the last,).
    The theorem reads D <= sum_t ln E exp(w_t D_t) / w_t, where D_t is the divergence of step t at
    the order g_t = 1 + (p/(p-1))^(n-t) (order-1), w_t = p (g_t - 1), and E the mean over runs: an
    estimate of their expectation.
    """
    after = found.plan.steps - 1 - torch.tensor(found.moments[:-1])
    return costs_and_weights(found.seen(direction)[:, :-1].movedim(1, 0), found.plan, order, after)


def soft_maximum(costs, weights):
    """ln E exp(w D) / w over the runs: between their mean and their maximum."""
    weights = weights[:, None]
    return (torch.logsumexp(weights[:, None] * costs, 1) - math.log(costs.shape[1])) / weights


def contributions(found, direction, order):
    """What each step adds to the sum of theorem 3.3: (moments but the last, points), and K where
    there are K orders.
    """
    return soft_maximum(*weighted_costs(found, direction, order))


def composed(found, direction, order):
    """Theorem 3.3 for the whole run, (points,): every step between two moments costs what the first
    of them costs.
    """
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64)
    return torch.tensordot(steps, contributions(found, direction, order), 1)


def epsilons(found, direction, orders=ORDERS):
    """Epsilon of each point by theorem 3.3 at its best order, and that order."""
    return rdp_to_epsilon(composed(found, direction, orders), orders, found.plan.delta)


def composed_exactly(norms, plan, order, direction, confidence=0.95):
    """`exact_composition` of tilted runs whose norms these are, (steps, runs, points)."""
    step = {
        "sample_rate": plan.sample_rate,
        "noise_std": plan.noise_std,
        "order": order,
        "direction": direction,
    }
    worst = plan.steps * float(log_mass(plan.max_grad_norm, **step)) / (order - 1)
    return exact_composition(
        log_mass(norms, **step).sum(0), order=order, worst_case=worst, confidence=confidence
    )


def worst_case(plan, orders=ORDERS):
    """The data-independent epsilon of a run and its best order."""
    step = rdp_sampled_gaussian(
        sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, orders=orders
    )
    return rdp_to_epsilon(plan.steps * step, orders, plan.delta)


def points_of(record, name):
    """How many points a task of a record looks at."""
    return record.config["tasks"][name]["points"]


def claim_by_network(exhibit: str, text: str) -> Callable[[Callable], Callable]:
    """Register a claim of the paper that is judged by the paper's networks alone.

    The same of other networks, which stand in for them, is a finding of our own. The function that
    follows takes a record and the names of the tasks that it judges.
    """

    def register(judge):
        finding(exhibit, text)(functools.partial(_judge_some, judge, True))
        finding(exhibit, text + OTHERS, kind="own")(functools.partial(_judge_some, judge, False))
        return judge

    return register


def _judge_some(judge, of_the_paper, record):
    tasks = record.config["tasks"] | record.config.get("larger", {})
    return judge(
        record,
        [name for name in reported(record) if (tasks[name]["model"] in NETWORKS) == of_the_paper],
    )


def mean_of(share, n):
    """The interval of a mean over n points of shares between 0 and 1: none varies more than zeros
    and ones do.
    """
    return (
        intervals.share(round(share * n), n) if 0 <= share <= 1 + 1e-6 else intervals.unknown(share)
    )


def stages_of(found, order):
    """The cost of one step over the data-independent one, and who is correct, (stages, points).

    At the stages of the first run, by theorem 3.2 at `order`.
    """
    norms, correct = found.norms[0, found.stages], found.correct[0, found.stages]
    return share_of(norms, found.plan, order), correct
