"""The runs of Yu et al. 2023: one serves many exhibits, and leaves what they all read."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from dpcompanion.individual import IndividualAccountant
from dpcompanion.reproduction.papers.common import Trace, pearson, within_the_piece
from dpcompanion.reproduction.papers.yu import (
    LOSSES,
    MNIST_5K,
    Examples,
    Task,
    build,
    examples,
    microbatch_size,
    outcome,
    seconds,
    sgd,
    trackers_of,
)
from dpcompanion.training import Callbacks, DPSGDPlan, gradient_norms, train

NAME = "individual-accounting"
MNIST_CNN = Task("mnist", "two-layer-cnn", 1024, 4, 2.4, 1.5)
# Five times as long for the same epsilon takes 1.4 times the noise; the learning rate falls by as
# much.
MNIST_LONG = dataclasses.replace(MNIST_CNN, epochs=20, learning_rate=1.0)
RESNET = {
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "cosine": True,
    "normalised": False,
    "learning_rate": 0.1,
}
MNIST = Task("mnist", "resnet20", 1024, 100, 2.4, needs="a GPU, about an hour", **RESNET)
CIFAR10 = Task(
    "cifar10",
    "wrn16-4",
    4096,
    300,
    7.8,
    4.0,
    max_grad_norm=1.0,
    normalised=False,
    needs="a GPU of 32 GB, about a day",
)
CIFAR10_RESNET = Task(
    "cifar10", "resnet20", 1024, 100, 7.8, needs="a GPU, about two hours", **RESNET
)
UTKFACE_GENDER = Task(
    "utkface-gender", "resnet20", 1024, 100, 4.5, needs="a GPU, about an hour", **RESNET
)
UTKFACE_AGE = dataclasses.replace(UTKFACE_GENDER, data="utkface-age")

QUICK = {"mnist-5k": MNIST_5K}
CPU = {"mnist_cnn": MNIST_CNN}
LONG = {"mnist_cnn": MNIST_LONG}
PAPER = {
    **CPU,
    "mnist": MNIST,
    "cifar10": CIFAR10,
    "utkface_gender": UTKFACE_GENDER,
    "utkface_age": UTKFACE_AGE,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """What a run of DP-SGD leaves.

    `plan` and `task` say how it was trained. `passes` are the steps (from 0) before which every
    norm was measured, `norms` (passes, n) what was found, at most C; `reference` are the examples
    measured at every step, `reference_norms` (steps, reference); `medians` (epochs + 1, groups) are
    the medians of unclipped reference norms by group. Losses are those of the final model. A task
    without refreshes has no passes and measures no step: of norms there are the medians alone.
    """

    task: Task
    plan: DPSGDPlan
    found: Examples
    passes: np.ndarray
    norms: np.ndarray
    reference: np.ndarray
    reference_norms: np.ndarray
    medians: np.ndarray
    losses: np.ndarray
    test_losses: np.ndarray
    right: np.ndarray
    test_right: np.ndarray
    seconds: float

    @property
    def worst_case(self):
        """The uniform epsilon of the run (RDP)."""
        return self.plan.epsilon(accountant="rdp")

    @property
    def accuracy(self):
        """On the test examples."""
        return float(self.test_right.mean())

    def by_group(self, values, *, test=False):
        """Means of `values` in each group."""
        groups = (self.found.test_groups if test else self.found.groups).numpy()
        return np.array([values[groups == group].mean() for group in range(len(self.found.names))])

    def epsilon(
        self,
        *,
        refreshes: float | None = None,
        accountant: str = "rdp",
        rounding: float | None = 0.01,
        upto: int | None = None,
    ) -> np.ndarray:
        """Every example's epsilon after `upto` steps (or all), by all passes or `refreshes`."""
        steps = self.plan.steps if upto is None else upto
        chosen = self.passes if refreshes is None else schedule(self.plan, refreshes)
        rows = np.searchsorted(self.passes, chosen, side="right") - 1
        return account(
            self.plan,
            self.norms[rows],
            chosen,
            steps=steps,
            accountant=accountant,
            rounding=rounding,
        )

    def reference_epsilon(
        self, refreshes: float = math.inf, *, rounding: float | None = None
    ) -> np.ndarray:
        """Epsilon of the reference examples with norms measured so often (default: each step)."""
        chosen = schedule(self.plan, refreshes)
        return account(
            self.plan,
            self.reference_norms[chosen],
            chosen,
            steps=self.plan.steps,
            rounding=rounding,
        )


def schedule(plan, refreshes):
    """Steps from 0 before which norms are measured, `refreshes` times an epoch (`NormTracker`)."""
    refreshes = min(refreshes, plan.steps_per_epoch)
    count = math.ceil(plan.steps * refreshes / plan.steps_per_epoch - 1e-9)
    steps = np.ceil(np.arange(count) * plan.steps_per_epoch / refreshes - 1e-9).astype(int)
    return steps[steps < plan.steps]


def account(
    plan: DPSGDPlan,
    norms: Any,
    passes: Any,
    *,
    steps: int,
    accountant: str = "rdp",
    rounding: float | None = 0.01,
) -> np.ndarray:
    """Epsilon of each example whose norms (passes, n) hold from pass to pass, (n,) numpy."""
    if not len(passes):
        raise ValueError("the run measured no norms (refreshes=0): it has no accounts")
    accounts = IndividualAccountant.for_plan(
        dataclasses.replace(plan, n=norms.shape[1]), rounding=rounding, accountant=accountant
    )
    ends = [*passes[1:], steps]
    for start, end, row in zip(passes, ends, norms):
        if start < steps:
            accounts.record(torch.as_tensor(row), steps=int(min(end, steps) - start))
    return accounts.epsilon(plan.delta).numpy()


def run_task(task, seed, device):
    """Train one run; values and arrays for `Trained`."""
    found, loss, trace = examples(task.data, task.dtype), LOSSES[task.loss], Trace("medians")
    model = build(task.model, found, seed).to(device)
    x, y = found.x.to(device), found.y.to(device)
    limit = task.max_grad_norm or task.median_multiple * float(
        gradient_norms(model, loss, x, y).median()
    )
    plan = make_plan(task, len(y), limit)
    optimizer, schedule = sgd(
        model.parameters(),
        task.learning_rate / (limit if task.normalised else 1),
        plan.steps,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        cosine=task.cosine,
    )

    chosen = torch.as_tensor(np.random.RandomState(seed).permutation(len(y))[: task.reference])
    some = x[chosen.to(device)], y[chosen.to(device)]
    trackers = (
        trackers_of(task, plan, model, loss, (x, y), chosen, keep_norms=True, device=device)
        if task.refreshes
        else []
    )
    groups = found.groups[chosen]

    def watch(_):
        if task.reference:
            norms = gradient_norms(model, loss, *some).cpu()
            trace["medians"].append(
                [float(norms[groups == group].median()) for group in range(len(found.names))]
            )

    watch(None)
    train(
        model,
        loss,
        (x, y),
        plan,
        optimizer=optimizer,
        seed=seed,
        trackers=trackers,
        microbatch_size=microbatch_size(device, "resnet20") if task.model == "resnet20" else None,
        callbacks=Callbacks(
            on_epoch=watch, on_step=(lambda _: schedule.step()) if schedule else None
        ),
        checkpoint=within_the_piece(looks=trace, scheduler=schedule),
    )
    losses, right = outcome(model, loss, x, y)
    test_losses, test_right = outcome(model, loss, found.test_x.to(device), found.test_y.to(device))
    values = {"max_grad_norm": limit, "seconds": trace.seconds}
    arrays = {
        **norms_of(trackers),
        "reference": chosen,
        "medians": np.array(trace["medians"]),
        "losses": losses.cpu(),
        "test_losses": test_losses.cpu(),
        "right": right.cpu(),
        "test_right": test_right.cpu(),
    }
    return values, {key: np.asarray(array) for key, array in arrays.items()}


def norms_of(trackers):
    """What trackers of all examples and of the reference saw, as arrays of `Trained`."""
    seen = [tracker.norms_of_passes for tracker in trackers]
    passes, norms = seen[0] if seen else (torch.zeros(0, dtype=torch.long), torch.zeros(0, 0))
    reference = seen[1][1] if len(seen) > 1 else torch.zeros(0, 0)
    return {"passes": passes, "norms": norms, "reference_norms": reference}


def make_plan(task, n, max_grad_norm):
    """The plan of a task on n examples: the noise that makes its epochs cost its epsilon (RDP)."""
    rate = task.batch_size / n
    return DPSGDPlan.for_epsilon(
        task.target_epsilon,
        n=n,
        sample_rate=rate,
        steps=task.epochs * max(1, round(1 / rate)),
        max_grad_norm=max_grad_norm,
        delta=task.delta,
        accountant="rdp",
    )


def trained(task, seed, run):
    """A task's run with a seed, as `Trained`: computed once, and kept if it takes long."""
    found = examples(task.data, task.dtype)
    run.note(found.provenance)
    plan = make_plan(task, len(found.y), 1.0)
    done = run.keep(
        lambda _: run_task(task, seed, run.device),
        [f"seed-{seed}"],
        config={"task": dataclasses.replace(task, needs="")},
        seconds=seconds(len(found.y), plan.steps),
        under=f"runs/{task.data}-{task.model}",
        label=f"{task.data}, {task.model}",
    )
    values, arrays = done[f"seed-{seed}"]
    plan = dataclasses.replace(plan, max_grad_norm=values["max_grad_norm"])
    return Trained(task, plan, found, **arrays, seconds=values["seconds"])


def with_log_loss(epsilon, losses):
    """Pearson's r between epsilon and the log of the loss, over examples whose loss is above 0."""
    positive = losses > 0
    return pearson(epsilon[positive], np.log(losses[positive]))


def subset(*names):
    """Some of the paper's tasks, our own first."""
    return {name: PAPER[name] for name in ("mnist_cnn", *names)}


def at_length(tasks):
    """The tasks with our own run of 20 epochs in place of that of 4."""
    return {**tasks, **LONG}
