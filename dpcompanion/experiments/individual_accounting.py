r"""Exhibits of Yu et al. 2023, "Individual privacy accounting for DP-SGD".

One run of DP-SGD serves many exhibits, so a run is trained once and leaves what they all read: everybody's norms
at each full-batch pass, those of some reference examples at every step, final losses, who was right.  Runs that
take long are kept in the data folder, where an interrupted study goes on.

Accounts are by RDP at delta 1e-5, norms rounded up to multiples of C / 100, add or remove, Poisson sampling, unless
a value's name says otherwise.  With the maximum clip norm they are estimates (norms may grow between two passes),
with individual clipping they are exact along the realised trajectory.

Where our runs differ from the paper's: batches are Poisson draws; MNIST on a CPU is learned by a two-layer CNN, once
for 20 epochs and for 4 or 2 where settings are compared, with the noise that makes these the paper's largest
epsilon, 2.4; the learning rate is divided by C, so that a sweep of C changes what is clipped and not how far a step
goes.  The paper's own models are tasks that need a GPU; without one they are left out, and the record lists them
under `not_run`.
"""

import dataclasses
import functools
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from dpcompanion import attacks, data, intervals, records, release
from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.experiments import experiment, finding
from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import DPSGDPlan, cross_entropy, gradient_norms, models, train
from dpcompanion.training.tracking import NormTracker

KEPT = 5e6       # examples times steps, half a minute: what is smaller is trained again when it is needed
NAME = "individual-accounting"


@dataclasses.dataclass(frozen=True)
class Task:
    """DP-SGD on one data set.

    `median_multiple` is C in units of the median norm at initialisation, unless `max_grad_norm` gives C.
    `learning_rate` is divided by C where `normalised`. `refreshes` are full-batch passes an epoch, `reference`
    examples are measured at every step. `needs` says what it takes where two cores are not enough.
    """

    data: str
    model: str
    batch_size: int
    epochs: int
    target_epsilon: float
    learning_rate: float
    refreshes: float = 3.0
    reference: int = 1000
    clipping: str = "maximum"
    loss: str = "cross-entropy"
    median_multiple: float = 1.0
    max_grad_norm: float | None = None
    normalised: bool = True
    momentum: float = 0.0
    weight_decay: float = 0.0
    cosine: bool = False
    dtype: str = "float32"
    delta: float = 1e-5
    needs: str = ""


MNIST_5K = Task("mnist-5k", "mlp", 256, 20, 2.4, 0.3, reference=500, dtype="float64")
MNIST_CNN = Task("mnist", "two-layer-cnn", 1024, 4, 2.4, 1.5)
# Five times as long for the same epsilon takes 1.4 times the noise; the learning rate falls by as much.
MNIST_LONG = dataclasses.replace(MNIST_CNN, epochs=20, learning_rate=1.0)
RESNET = {"momentum": 0.9, "weight_decay": 1e-3, "cosine": True, "normalised": False, "learning_rate": 0.1}
MNIST = Task("mnist", "resnet20", 1024, 100, 2.4, needs="a GPU, about an hour", **RESNET)
CIFAR10 = Task("cifar10", "wrn16-4", 4096, 300, 7.8, 4.0, max_grad_norm=1.0, normalised=False,
               needs="a GPU of 32 GB, about a day")
CIFAR10_RESNET = Task("cifar10", "resnet20", 1024, 100, 7.8, needs="a GPU, about two hours", **RESNET)
UTKFACE_GENDER = Task("utkface-gender", "resnet20", 1024, 100, 4.5, needs="a GPU, about an hour", **RESNET)
UTKFACE_AGE = dataclasses.replace(UTKFACE_GENDER, data="utkface-age")

QUICK = {"mnist-5k": MNIST_5K}
CPU = {"mnist_cnn": MNIST_CNN}
LONG = {"mnist_cnn": MNIST_LONG}
PAPER = {**CPU, "mnist": MNIST, "cifar10": CIFAR10, "utkface_gender": UTKFACE_GENDER, "utkface_age": UTKFACE_AGE}


@dataclasses.dataclass(frozen=True)
class Study:
    """The tasks that an exhibit looks at, and the seeds of their runs."""

    tasks: dict
    seeds: tuple = (0,)


def runnable(config, run):
    """The tasks that this device can do."""
    return {name: task for name, task in config.tasks.items() if not task.needs or run.device.type != "cpu"}


def left_out(config, run):
    """What a record says of the tasks that were not run: {"not_run": names}, or nothing."""
    names = [name for name in config.tasks if name not in runnable(config, run)]
    return {"not_run": names} if names else {}


# Data and models ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Training and test examples, the group of each (class, or race), the groups' names, and where all came from."""

    x: torch.Tensor
    y: torch.Tensor
    groups: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    test_groups: torch.Tensor
    names: tuple
    provenance: list


@functools.cache
def examples(name, dtype="float32"):
    """The examples of a data set, normalised by public constants."""
    parts, provenance = [], []
    source, _, attribute = name.partition("-") if name.startswith("utkface") else (name, "", "")
    for split in ("train", "test"):
        found = data.load(source, split=split, dtype=getattr(torch, dtype))
        provenance.append(found.provenance())
        x, y, groups, names = found.normalised().features, found.labels, found.labels, found.classes
        if attribute:
            groups, names = found.attributes["race"], data.UTKFACE_RACES[:4]
            y = found.attributes["gender"] if attribute == "gender" else (found.attributes["age"] < 30).long()
            kept = _balanced(y, groups, len(names))
            x, y, groups = x[kept], y[kept], groups[kept]
        parts += [x, y, groups]
    return Examples(*parts, names, provenance)


def _balanced(labels, groups, count):
    """Indices of as many 0s as 1s in each of the first `count` groups; who is left out is drawn once and for all."""
    random, kept = np.random.RandomState(0), []
    for group in range(count):
        sides = [random.permutation(np.flatnonzero((groups == group) & (labels == label))) for label in (0, 1)]
        kept += [side[:min(map(len, sides))] for side in sides]
    return torch.as_tensor(np.sort(np.concatenate(kept)))


@models.seeded
def mlp(inputs, classes):
    """One hidden layer of 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, classes))


@models.seeded
def two_layer_cnn(channels, classes):
    """Two tanh convolutions, as `training.models.mnist_cnn`, for any size of image."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2), nn.Tanh(), models.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), models.MaxPool2d(2, stride=1),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, classes))


def build(model, found, seed):
    """The model called `model` for these examples."""
    channels, inputs, classes = found.x.shape[1], found.x[0].numel(), int(found.y.max()) + 1
    return {
        "linear": lambda: nn.Sequential(nn.Flatten(), models.linear(inputs, classes, seed=seed)),
        "mlp": lambda: mlp(inputs, classes, seed=seed),
        "two-layer-cnn": lambda: two_layer_cnn(channels, classes, seed=seed),
        "resnet20": lambda: models.resnet20(classes, channels=channels, seed=seed),
        "wrn16-4": lambda: models.wrn16_4(classes, channels=channels, seed=seed),
    }[model]().to(found.x.dtype)


def hinge(outputs, targets):
    """Multi-class hinge loss of each example, (n,)."""
    return F.multi_margin_loss(outputs, targets, reduction="none")


LOSSES = {"cross-entropy": cross_entropy, "hinge": hinge}


# Runs --------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """What a run of DP-SGD leaves.

    `plan` and `task` say how it was trained. `passes` are the steps (from 0) before which everybody's norm was
    measured, `norms` (passes, n) what was found, at most C; `reference` are the examples measured at every step,
    `reference_norms` (steps, reference); `medians` (epochs + 1, groups) are the medians of unclipped reference norms
    by group. Losses are those of the final model.
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
        """Epsilon of the run, for anybody (RDP)."""
        return self.plan.epsilon(accountant="rdp")

    @property
    def accuracy(self):
        """On the test examples."""
        return float(self.test_right.mean())

    def by_group(self, values, *, test=False):
        """Means of `values` in each group."""
        groups = (self.found.test_groups if test else self.found.groups).numpy()
        return np.array([values[groups == group].mean() for group in range(len(self.found.names))])

    def epsilon(self, *, refreshes=None, accountant="rdp", rounding=0.01, upto=None):
        """Everybody's epsilon after `upto` steps (all by default), from all passes or from fewer `refreshes`."""
        steps = self.plan.steps if upto is None else upto
        chosen = self.passes if refreshes is None else schedule(self.plan, refreshes)
        rows = np.searchsorted(self.passes, chosen, side="right") - 1
        return account(self.plan, self.norms[rows], chosen, steps=steps, accountant=accountant, rounding=rounding)

    def reference_epsilon(self, refreshes=math.inf, *, rounding=None):
        """Epsilon of the reference examples when their norms are measured so often; at every step by default."""
        chosen = schedule(self.plan, refreshes)
        return account(self.plan, self.reference_norms[chosen], chosen, steps=self.plan.steps, rounding=rounding)


def schedule(plan, refreshes):
    """The steps (from 0) before which norms are measured, `refreshes` times an epoch, as by `NormTracker`."""
    refreshes = min(refreshes, plan.steps_per_epoch)
    count = math.ceil(plan.steps * refreshes / plan.steps_per_epoch - 1e-9)
    steps = np.ceil(np.arange(count) * plan.steps_per_epoch / refreshes - 1e-9).astype(int)
    return steps[steps < plan.steps]


def account(plan, norms, passes, *, steps, accountant="rdp", rounding=0.01):
    """Epsilon of each example whose norms (passes, n) hold from their pass to the next, (n,) numpy."""
    accounts = IndividualAccountant.for_plan(dataclasses.replace(plan, n=norms.shape[1]), rounding=rounding,
                                             accountant=accountant)
    ends = [*passes[1:], steps]
    for start, end, row in zip(passes, ends, norms):
        if start < steps:
            accounts.record(torch.as_tensor(row), steps=int(min(end, steps) - start))
    return accounts.epsilon(plan.delta).numpy()


def outcome(model, loss, x, y):
    """Losses and who is right, by the final model."""
    model.eval()
    with torch.no_grad():
        parts = [model(part) for part in x.split(2048)]
    outputs = torch.cat(parts)
    return loss(outputs, y), outputs.argmax(1) == y


def run_task(task, seed, device):
    """Train one run; values and arrays for `Trained`."""
    found, loss = examples(task.data, task.dtype), LOSSES[task.loss]
    started = time.perf_counter()
    model = build(task.model, found, seed).to(device)
    x, y = found.x.to(device), found.y.to(device)
    limit = task.max_grad_norm or task.median_multiple * float(gradient_norms(model, loss, x, y).median())
    plan = make_plan(task, len(y), limit)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate / (limit if task.normalised else 1),
                                momentum=task.momentum, weight_decay=task.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps) if task.cosine else None

    everybody = NormTracker(IndividualAccountant.for_plan(plan), model, loss, (x, y),
                            steps_per_epoch=plan.steps_per_epoch, updates_per_epoch=task.refreshes,
                            clipping=task.clipping, keep_norms=True)
    trackers = [everybody]
    chosen = torch.as_tensor(np.random.RandomState(seed).permutation(len(y))[:task.reference])
    some = x[chosen.to(device)], y[chosen.to(device)]
    if task.reference:
        theirs = IndividualAccountant.for_plan(dataclasses.replace(plan, n=len(chosen)))
        trackers.append(NormTracker(theirs, model, loss, some, steps_per_epoch=plan.steps_per_epoch,
                                    updates_per_epoch=math.inf, examples=chosen, keep_norms=True))
    medians, groups = [], found.groups[chosen]

    def watch(_):
        if task.reference:
            norms = gradient_norms(model, loss, *some).cpu()
            medians.append([float(norms[groups == group].median()) for group in range(len(found.names))])

    watch(None)
    train(model, loss, (x, y), plan, optimizer=optimizer, seed=seed, trackers=trackers, on_epoch=watch,
          on_step=(lambda _: scheduler.step()) if scheduler else None)
    losses, right = outcome(model, loss, x, y)
    test_losses, test_right = outcome(model, loss, found.test_x.to(device), found.test_y.to(device))
    passes, norms = everybody.norms_of_passes
    exact = trackers[-1].norms_of_passes[1] if task.reference else torch.zeros(0, 0)
    values = {"max_grad_norm": limit, "seconds": time.perf_counter() - started}
    arrays = {"passes": passes, "norms": norms, "reference": chosen, "reference_norms": exact,
              "medians": np.array(medians), "losses": losses.cpu(), "test_losses": test_losses.cpu(),
              "right": right.cpu(), "test_right": test_right.cpu()}
    return values, {key: np.asarray(array) for key, array in arrays.items()}


def make_plan(task, n, max_grad_norm):
    """The plan of a task on n examples: the noise that makes its epochs cost its epsilon (RDP)."""
    rate = task.batch_size / n
    return DPSGDPlan.for_epsilon(
        task.target_epsilon, n=n, sample_rate=rate, steps=task.epochs * max(1, round(1 / rate)),
        max_grad_norm=max_grad_norm, delta=task.delta, accountant="rdp")


_TRAINING = (Task, Examples, examples, _balanced, mlp, two_layer_cnn, build, hinge, outcome, run_task, make_plan)
_RUNS = (*_TRAINING, Trained, schedule, account)
_DONE = {}


def trained(task, seed, run):
    """The run of a task with a seed, as `Trained`: computed once, and kept in the data folder if it takes long."""
    found = examples(task.data, task.dtype)
    run.loaded += [provenance for provenance in found.provenance if provenance not in run.loaded]
    plan = make_plan(task, len(found.y), 1.0)
    fields = {key: value for key, value in dataclasses.asdict(task).items() if key != "needs"}
    values, arrays = once(f"{task.data}-{task.model}", {"task": fields}, seed, run, _TRAINING,
                          lambda: run_task(task, seed, run.device), size=len(found.y) * plan.steps)
    plan = dataclasses.replace(plan, max_grad_norm=values["max_grad_norm"])
    return Trained(task, plan, found, **arrays, seconds=values["seconds"])


def once(name, key, seed, run, code, work, *, size):
    """work() for a key and seed: once a process, and once and for all if `size` exceeds `KEPT`."""
    key = {**key, "device": run.device.type, "code": records.code_hash(*code), "size": size}
    hashed = records.hash_of({**key, "seed": seed, "name": name})
    if hashed not in _DONE:
        if size < KEPT:
            _DONE[hashed] = work()
        else:
            folder = data.data_folder() / "runs" / f"{name}-{records.hash_of(key)[:12]}"
            pieces = records.resumable(lambda _: work(), [f"seed-{seed}"], folder=folder, config=key, label=name)
            _DONE[hashed], = pieces.values()
    return _DONE[hashed]


# What exhibits share -----------------------------------------------------------------------------------------------

LABELS = {"mnist-5k": "digits", "mnist_cnn": "MNIST, two-layer CNN", "mnist": "MNIST", "cifar10": "CIFAR-10",
          "utkface_gender": "UTKFace, gender", "utkface_age": "UTKFace, age"}
WORST = 0.99     # an epsilon from this share of the worst case on has reached it


def reported(record):
    """The tasks that a record has values of."""
    return [name for name in record.config.get("tasks", ()) if any(key.startswith(name + ".") for key in record.values)]


def named(prefix, **values):
    """Values under the names that a record gives them, such as "mnist.max"."""
    return {f"{prefix}.{key}": value for key, value in values.items()}


def pearson(a, b):
    """Pearson's r; nan where one of the two does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if np.std(a) > 0 and np.std(b) > 0 else math.nan


def with_log_loss(epsilon, losses):
    """Pearson's r between epsilon and the logarithm of the loss, over examples whose loss is above 0."""
    positive = losses > 0
    return pearson(epsilon[positive], np.log(losses[positive]))


def rank(a, b):
    """Spearman's rank correlation; nan where one of the two does not vary."""
    return pearson(stats.rankdata(a), stats.rankdata(b))


def histogram(values, top):
    """Counts in 120 bins from 0 to the worst case."""
    return np.histogram(np.clip(values, 0, top), np.linspace(0, top, 121))[0].astype(np.int32)


def subset(*names):
    """Some of the paper's tasks, our own first."""
    return {name: PAPER[name] for name in ("mnist_cnn", *names)}


def at_length(tasks):
    """The tasks with our own run of 20 epochs in place of that of 4."""
    return {**tasks, **LONG}


_SHARED = (*_RUNS, runnable, left_out, pearson, with_log_loss, rank, histogram)


# Exhibits ----------------------------------------------------------------------------------------------------------

@experiment(f"{NAME}/figure-1", one_seed=True, uses=_SHARED, quick=Study(QUICK), paper=Study(at_length(PAPER)))
def figure_1(config, run):
    """Everybody's epsilon by RDP, the share that reaches the worst case, and what PLD makes of the same histories."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seeds[0], run)
        epsilon, tighter, top = found.epsilon(), found.epsilon(accountant="pld"), found.worst_case
        values |= named(
            name, max=epsilon.max(), min=epsilon.min(), mean=epsilon.mean(), worst_case=top, accuracy=found.accuracy,
            share_at_worst_case=(epsilon >= WORST * top).mean(), below_90_percent=(epsilon < 0.9 * top).mean(),
            quantiles=np.quantile(epsilon, (0.3, 0.5, 0.7)), noise_multiplier=found.plan.noise_multiplier,
            max_grad_norm=found.plan.max_grad_norm, steps=found.plan.steps, seconds=found.seconds)
        values |= named(f"{name}.pld", worst_case=found.plan.epsilon(), mean=tighter.mean(), median=np.median(tighter),
                        over_rdp=np.quantile(tighter / epsilon, (0.1, 0.5, 0.9)))
        arrays |= named(name, rdp=histogram(epsilon, top), pld=histogram(tighter, top))
    return values, arrays


def of_examples(record, name, share):
    """The interval of a share of a task's training examples."""
    source = record.config["tasks"][name]["data"].partition("-")[0] if "tasks" in record.config else ""
    sizes = [entry["examples"] for entry in record.data if entry["split"] == "train" and entry["name"].startswith(source)]
    return intervals.share(round(share * sizes[0]), sizes[0]) if sizes else intervals.unknown(share)


@finding(f"{NAME}/figure-1", "more than half of the examples lie at least 10% below the worst case")
def most_pay_less(record):
    for name in reported(record):
        share = of_examples(record, name, record.values[f"{name}.below_90_percent"])
        yield LABELS[name], f"{share:.1%}", share.above(0.5)


def by_groups(config, run, **changes):
    """Test accuracy and mean epsilon of each group."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = trained(dataclasses.replace(task, **changes), config.seeds[0], run)
        epsilon, accuracy = found.by_group(found.epsilon()), found.by_group(found.test_right, test=True)
        worst, best = int(accuracy.argmin()), int(accuracy.argmax())
        values |= named(name, accuracy=accuracy, mean_epsilon=epsilon, rank_correlation=rank(accuracy, epsilon),
                        worst_group=worst, best_group=best, worst_case=found.worst_case,
                        worst_over_best_percent=100 * (epsilon[worst] / epsilon[best] - 1))
    return values


@experiment(f"{NAME}/figure-2", one_seed=True, uses=(*_SHARED, by_groups), quick=Study(QUICK),
            paper=Study({name: PAPER[name] for name in ("cifar10", "utkface_gender")}))
def figure_2(config, run):
    """Test accuracy and mean epsilon by class or race."""
    values = by_groups(config, run)
    for name, above, below in (("cifar10", "cat", "automobile"), ("utkface_gender", "asian", "indian")):
        if f"{name}.mean_epsilon" in values:
            groups = [group.lower() for group in examples(config.tasks[name].data).names]
            mean = dict(zip(groups, values[f"{name}.mean_epsilon"]))
            key = f"{name.removesuffix('_gender')}_{above}_over_{below}_percent"
            values[key] = 100 * (mean[above] / mean[below] - 1)
    return values


@experiment(f"{NAME}/figure-6", one_seed=True, uses=(*_SHARED, by_groups), quick=Study(QUICK),
            paper=Study(at_length(subset("mnist", "utkface_age"))))
def figure_6(config, run):
    """Test accuracy and mean epsilon by class or race."""
    return by_groups(config, run)


def correlation_with_extremes(accuracy, epsilon):
    """Rank correlation of the groups' accuracy (or of their loss, with the sign turned) and mean epsilon; and by how
    many percent the mean of the least accurate is above that of the most accurate, by the bootstrap over groups."""
    accuracy, epsilon = np.array(accuracy), np.array(epsilon)

    def percent(right, cost):
        worst, best = (np.take_along_axis(cost, np.expand_dims(pick(right, -1), -1), -1)[..., 0]
                       for pick in (np.argmin, np.argmax))
        return 100 * (worst / best - 1)
    return (intervals.rank_correlation(rank(accuracy, epsilon), len(accuracy)),
            intervals.bootstrap(percent, accuracy, epsilon))


@finding(f"{NAME}/figure-6", "groups: accuracy and mean epsilon have a rank correlation of -0.5 or less, and the least "
         "accurate has a higher mean than the most accurate")
@finding(f"{NAME}/figure-2", "groups: accuracy and mean epsilon have a rank correlation of -0.5 or less, and the least "
         "accurate has a higher mean than the most accurate")
def underserved(record):
    for name in reported(record):
        r, more = correlation_with_extremes(*(record.values[f"{name}.{key}"] for key in ("accuracy", "mean_epsilon")))
        yield (LABELS[name], f"rank correlation {r:.1f}, {more.estimate:+.0f}%",
               intervals.every(r.at_most(-0.5), more.above(0)))


@experiment(f"{NAME}/figure-3", one_seed=True, uses=_SHARED, quick=Study(QUICK),
            paper=Study({**LONG, "cifar10": CIFAR10_RESNET}))
def figure_3(config, run):
    """Median gradient norm of each class in the reference sample, in units of C: at first, and after each epoch."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seeds[0], run)
        medians = found.medians / found.plan.max_grad_norm
        spread = medians.max(1) / medians.min(1)
        values |= named(name, least_spread=spread[1:].min(), spread_at_end=spread[-1],
                        half_time_to_end=rank(medians[len(medians) // 2], medians[-1]))
        arrays[f"{name}.medians"] = medians
    return values, arrays


@finding(f"{NAME}/figure-3", "after every epoch the largest class median is at least 1.5 times the smallest, and the "
         "order at half time predicts that at the end (rank correlation 0.7 or more)")
def stratified(record):
    for name in reported(record):
        medians = record.arrays[f"{name}.medians"][1:]
        spread = intervals.bootstrap(  # over the classes
            lambda chosen, medians=medians: (medians.T[chosen.astype(int)].max(-2) /
                                             medians.T[chosen.astype(int)].min(-2)).min(-1),
            np.arange(medians.shape[1]))
        # Classes that are drawn again never lie further apart than all of them: as far up as down.
        spread = intervals.Interval(spread.estimate, spread.low, 2 * spread.estimate - spread.low)
        order = intervals.rank_correlation(record.values[f"{name}.half_time_to_end"], medians.shape[1])
        yield (LABELS[name], f"{spread:.1f} times; rank correlation {order:.1f}",
               intervals.every(spread.at_least(1.5), order.at_least(0.7)))


@dataclasses.dataclass(frozen=True)
class Estimates(Study):
    """Figure 4: how often norms are refreshed in an epoch. Three times in 20 epochs are about as many refreshes as the
    paper's 100 epochs have at 0.5."""

    refreshes: tuple = (0.5, 1.0, 2.0, 3.0)


def estimate_errors(found, refreshes):
    """Accounts of the reference examples with norms refreshed so often, beside those with norms at every step."""
    exact, estimate = found.reference_epsilon(), found.reference_epsilon(refreshes)
    error = estimate - exact
    return {"pearson": pearson(estimate, exact), "mean_error": np.abs(error).mean(), "worst_error": np.abs(error).max(),
            "understated": (error < -1e-3 * exact).mean(), "worst_understatement": (-error / exact.clip(1e-9)).max(),
            "understated_by_10_percent": (error < -0.1 * exact).mean()}, exact, estimate


@experiment(f"{NAME}/figure-4", one_seed=True, uses=(*_SHARED, estimate_errors), quick=Estimates(QUICK),
            paper=Estimates(at_length(PAPER)))
def figure_4(config, run):
    """Estimates with norms refreshed now and then, beside norms at every step, for examples drawn beforehand.

    Without rounding. Under-stated means by more than a part in a thousand. Arrays: exact epsilons, and estimates for
    each of `refreshes`.
    """
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seeds[0], run)
        estimates = []
        for refreshes in config.refreshes:
            errors, exact, estimate = estimate_errors(found, refreshes)
            values |= named(f"{name}.gamma_{refreshes:g}", **errors)
            estimates.append(estimate)
        arrays |= named(name, exact=np.float32(exact), estimates=np.float32(estimates))
    return values, arrays


@finding(f"{NAME}/figure-4", "Pearson's r is above 0.99 at one refresh in two epochs")
def rare_refreshes_suffice(record):
    for name in reported(record):
        estimates = record.arrays[f"{name}.estimates"][list(record.config["refreshes"]).index(0.5)]
        r = intervals.pearson(estimates, record.arrays[f"{name}.exact"])
        yield LABELS[name], f"{r:.3f}", r.above(0.99)


@finding(f"{NAME}/figure-4", "more refreshes never lower Pearson's r")
def more_refreshes_help(record):
    for name in reported(record):
        exact, estimates = (record.arrays[f"{name}.{key}"] for key in ("exact", "estimates"))
        rises = [intervals.bootstrap(lambda x, few, many: intervals.correlation(x, many) - intervals.correlation(x, few),
                                     exact, *pair) for pair in zip(estimates, estimates[1:])]
        found = [record.values[f"{name}.gamma_{g:g}.pearson"] for g in record.config["refreshes"]]
        yield (LABELS[name], ", ".join(f"{r:.4f}" for r in found),
               intervals.every(*(rise.at_least(0) for rise in rises)))


@dataclasses.dataclass(frozen=True)
class Cost(Study):
    """Table 1: how many examples, updates, and evaluations to time one by one; precisions r to compare on tasks."""

    examples: int = 50000
    updates: int = 200
    evaluations: int = 20
    precisions: tuple = (0.01, 0.1)


def nearest(norms, max_grad_norm, rounding):
    """Norms as shares of C, rounded to the nearest of {r, 2r, ..., 1} as in the paper's algorithm 2."""
    levels = np.append(rounding * np.arange(1, math.ceil(1 / rounding - 1e-9)), 1.0)
    places = np.rint(norms.astype(np.float64) / max_grad_norm / rounding).astype(int)
    return levels[np.clip(places, 1, len(levels)) - 1]


@experiment(f"{NAME}/table-1", one_seed=True, uses=(*_SHARED, nearest),
            quick=Cost(QUICK, examples=10000), paper=Cost(CPU))
def table_1(config, run):
    """Processor seconds for the accounts of many examples with and without rounding; what rounding does to epsilon."""
    norms = torch.rand(config.updates, config.examples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = (2 * norms**2).clamp(max=1)
    parameters = {"sample_rate": 4096 / 50000, "noise_multiplier": 3.0}
    values = {"with_rounding.evaluations": 100, "without_rounding.evaluations": norms.numel()}
    for kind, rounding in (("with_rounding", 0.01), ("without_rounding", None)):
        started = time.process_time()
        accounts = IndividualAccountant(config.examples, max_grad_norm=1.0, rounding=rounding, **parameters)
        for row in norms:
            accounts.record(row, steps=12)
        accounts.epsilon(1e-5)
        values[f"{kind}.seconds"] = time.process_time() - started
    started = time.process_time()
    for norm in norms[0, :config.evaluations].clamp(min=0.01).tolist():
        rdp_sampled_gaussian(**{**parameters, "noise_multiplier": parameters["noise_multiplier"] / norm})
    one = (time.process_time() - started) / config.evaluations
    values["one_by_one.seconds_estimate"] = one * norms.numel()
    for name, task in runnable(config, run).items():
        found = trained(task, config.seeds[0], run)
        exact, plan = found.epsilon(rounding=None), found.plan
        for precision in config.precisions:
            shares = nearest(found.norms, plan.max_grad_norm, precision)
            # With C = 1 the shares lie on the accountant's own levels, and none of them moves up.
            rounded = account(dataclasses.replace(plan, max_grad_norm=1.0), shares, found.passes, steps=plan.steps,
                              rounding=precision)
            for kind, epsilon in (("nearest", rounded), ("up", found.epsilon(rounding=precision))):
                ratio = epsilon / exact
                values |= named(f"{name}.{kind}_{precision:g}", understated=(ratio < 1 - 1e-3).mean(),
                                lowest=ratio.min(), median=np.median(ratio))
    return values


def timed(seconds):
    """A time, which other machines may halve or double."""
    return intervals.Interval(seconds, seconds / 2, 2 * seconds)


@finding(f"{NAME}/table-1", "accounts of all examples with rounding take less than 3 seconds, even on a machine half as"
         " fast")
def rounding_is_cheap(record):
    seconds = record.values["with_rounding.seconds"]
    said = "less than 1.5 s" if seconds < 1.5 else f"{seconds:.1f} s"
    yield f"{record.config['examples']:,} examples, processor time", said, timed(seconds).below(3)


@dataclasses.dataclass(frozen=True)
class Release(Study):
    """Table 2: the budget for all six statistics together, and how many times to draw."""

    epsilon: float = 0.1
    quantiles: tuple = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 20


STATISTICS = ("mean", "q10", "q30", "median", "q70", "q90")


def released(epsilon, upper, delta, config, method, seed):
    """The six statistics, with noise."""
    budget = {"upper": upper, "epsilon": release.split(config.epsilon, delta, 2), "delta": delta,
              "generator": torch.Generator().manual_seed(seed)}
    mean = release.private_mean(epsilon, **budget)
    return [mean, *release.private_quantiles(epsilon, config.quantiles, method=method, **budget).tolist()]


@experiment(f"{NAME}/table-2", one_seed=True, uses=(*_SHARED, released), quick=Release(QUICK),
            paper=Release(at_length(subset("mnist", "cifar10"))))
def table_2(config, run):
    """Mean and quantiles of epsilon, released under one budget; mean and standard deviation over draws."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = trained(task, config.seeds[0], run)
        epsilon = torch.as_tensor(found.epsilon())
        true = [float(epsilon.mean()), *np.quantile(epsilon, config.quantiles)]
        values |= named(f"{name}.non_private", **dict(zip(STATISTICS, true)))
        for method in release.METHODS:
            drawn = np.array([released(epsilon, found.worst_case, task.delta, config, method, draw)
                              for draw in range(config.draws)])
            error = records.mean_and_sd(100 * np.abs(drawn / true - 1).mean(1))
            if method == "cdf":
                values |= named(f"{name}.released", **dict(zip(STATISTICS, map(records.mean_and_sd, drawn.T))))
                values[f"{name}.mean_error_percent"] = error
            values[f"{name}.{method}.mean_error_percent"] = error
    return values


@finding(f"{NAME}/table-2", "the mean error of the released statistics, by the paper's method, is at most 5%")
def released_accurately(record):
    yield from _release_error(record, "andrew2021")


@finding(f"{NAME}/table-2", "the same by a private distribution function", kind="own")
def released_by_distribution(record):
    yield from _release_error(record, "cdf")


def _release_error(record, method):
    for name in reported(record):
        error = intervals.of_summary(*record.values[f"{name}.{method}.mean_error_percent"])  # over draws of the noise
        yield LABELS[name], f"{error:.1f}%", error.at_most(5)


def against_loss(config, run, points=1500, **changes):
    """Pearson's r of epsilon with log loss, and some of the points."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        found = trained(dataclasses.replace(task, **changes), config.seeds[0], run)
        epsilon = found.epsilon()
        some = np.random.RandomState(0).permutation(len(epsilon))[:points]
        values |= named(name, pearson=with_log_loss(epsilon, found.losses), spearman=rank(epsilon, found.losses),
                        worst_case=found.worst_case)
        arrays |= named(name, epsilon=np.float32(epsilon[some]), losses=np.float32(found.losses[some]))
    return values, arrays


@experiment(f"{NAME}/figure-5", one_seed=True, uses=(*_SHARED, against_loss), quick=Study(QUICK),
            paper=Study(at_length(PAPER)))
def figure_5(config, run):
    """Epsilon against the final training loss."""
    return against_loss(config, run)


@finding(f"{NAME}/figures-7-8", "with individual clipping, Pearson's r between epsilon and log loss is above 0.9")
@finding(f"{NAME}/figure-5", "Pearson's r between epsilon and log loss is above 0.9")
def loss_tells(record):
    for name in reported(record):
        epsilon, losses = (record.arrays[f"{name}.{key}"] for key in ("epsilon", "losses"))
        r = intervals.pearson(epsilon[losses > 0], np.log(losses[losses > 0]))
        yield LABELS[name], f"{r:.2f}", r.above(0.9)


ONCE = {"refreshes": 1.0, "reference": 0}


@dataclasses.dataclass(frozen=True)
class Clippings(Study):
    """Table 3: the seeds; thresholds are renewed once an epoch."""

    seeds: tuple = (0, 1, 2)


def clipped(task, clipping, seed, run):
    """A run with norms renewed once an epoch. Accounting does not change a run that clips to the maximum, so the
    first seed's is the one that other exhibits have."""
    changes = {} if clipping == "maximum" and seed == 0 else {**ONCE, "clipping": clipping}
    return trained(dataclasses.replace(task, **changes), seed, run)


@experiment(f"{NAME}/table-3", uses=(*_SHARED, clipped), quick=Clippings(QUICK),
            paper=Clippings(subset("mnist", "cifar10")))
def table_3(config, run):
    """Test accuracy in percent, clipped to everybody's own threshold and to the maximum."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        for clipping in ("individual", "maximum"):
            accuracies = [100 * clipped(task, clipping, seed, run).accuracy for seed in config.seeds]
            values[f"{name}.{clipping}"] = records.mean_and_sd(accuracies)
    return values


@finding(f"{NAME}/table-3", "individual clipping costs at most half a point of accuracy")
def clipping_is_free(record):
    for name in reported(record):
        cost = intervals.unpaired(*(record.values[f"{name}.{clipping}"] for clipping in ("maximum", "individual")))
        yield LABELS[name], f"{cost:+z.1f} points", cost.at_most(0.5)


@experiment(f"{NAME}/figures-7-8", one_seed=True, uses=(*_SHARED, by_groups, against_loss),
            quick=Study(QUICK), paper=Study(PAPER))
def figures_7_8(config, run):
    """Epsilon against loss, and by group, with individual clipping; the same groups without it."""
    changes = {**ONCE, "clipping": "individual"}
    values, arrays = against_loss(config, run, **changes)
    values |= by_groups(config, run, **changes)
    for name, task in runnable(config, run).items():
        plain = trained(task, config.seeds[0], run)
        maximum, individual = plain.by_group(plain.epsilon()), values[f"{name}.mean_epsilon"]
        values |= named(name, same_order=bool((np.argsort(maximum) == np.argsort(individual)).all()),
                        orders_agree=rank(maximum, individual), largest_shift=np.abs(individual / maximum - 1).max())
        values[f"{name}.maximum.mean_epsilon"] = maximum
    return values, arrays


@finding(f"{NAME}/figures-7-8", "the groups stand in exactly the same order with and without individual clipping")
def same_order(record):
    for name in reported(record):
        groups = len(record.values[f"{name}.mean_epsilon"])
        agreement = intervals.rank_correlation(record.values[f"{name}.orders_agree"], groups)
        # Half of the smallest step that the rank correlation of so many groups can take.
        yield LABELS[name], f"rank correlation {agreement:.2f}", agreement.at_least(1 - 6 / (groups**3 - groups))


HALF_TIME = {"mnist_cnn": dataclasses.replace(MNIST_CNN, epochs=2)}


@dataclasses.dataclass(frozen=True)
class Sweep(Study):
    """Figures 9 and 10: clip norms in units of the median norm at initialisation."""

    multiples: tuple = (0.1, 0.3, 0.5, 1.5)


def clip_key(multiple):
    """The name of a multiple in values.

    >>> clip_key(0.5), clip_key(1.5)
    ('c05', 'c15')
    """
    return "c" + f"{multiple:.1f}".replace(".", "")


@experiment(f"{NAME}/figures-9-10", one_seed=True, uses=(*_SHARED, clip_key), quick=Sweep(QUICK),
            paper=Sweep({**HALF_TIME, "cifar10": CIFAR10_RESNET}))
def figures_9_10(config, run):
    """Distribution of epsilon, test accuracy and mean epsilon by class for clip norms around the median."""
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        for multiple in config.multiples:
            found = trained(dataclasses.replace(task, **ONCE, median_multiple=multiple), config.seeds[0], run)
            epsilon, key = found.epsilon(), clip_key(multiple)
            groups, accuracy = found.by_group(epsilon), found.by_group(found.test_right, test=True)
            at_worst = (epsilon >= WORST * found.worst_case).mean()
            values |= named(f"{name}.{key}", share_at_worst_case=at_worst, mean=epsilon.mean(), accuracy=found.accuracy,
                            class_accuracy=accuracy, mean_epsilon=groups, rank_correlation=rank(accuracy, groups))
            values[f"{name}.worst_case"] = found.worst_case
            arrays[f"{name}.{key}"] = histogram(epsilon, found.worst_case)
            if name == "cifar10":
                values |= {f"share_at_worst_case.{key}": at_worst, f"cat.{key}": groups[3], f"ship.{key}": groups[8]}
    return values, arrays


def falls(shares):
    """Whether shares (intervals) fall one after the other, from more than half to less than a tenth."""
    return intervals.every(shares[0].above(0.5), shares[-1].below(0.1),
                           *((before - after).at_least(0) for before, after in zip(shares, shares[1:])))


@finding(f"{NAME}/figures-9-10", "the share at the worst case falls as C grows, from more than half to less than a "
         "tenth")
def fewer_at_the_worst_case(record):
    for name in reported(record):
        shares = [of_examples(record, name, record.values[f"{name}.{clip_key(c)}.share_at_worst_case"])
                  for c in record.config["multiples"]]
        yield LABELS[name], ", ".join(f"{share.estimate:.0%}" for share in shares), falls(shares)


@finding(f"{NAME}/figures-9-10", "from 1.5 M to 0.5 M the mean epsilon of the least accurate class grows by more than "
         "that of the most accurate")
def the_underserved_pay_more(record):
    def more(right, growth):
        worst, best = (np.take_along_axis(growth, np.expand_dims(pick(right, -1), -1), -1)[..., 0]
                       for pick in (np.argmin, np.argmax))
        return worst - best
    for name in reported(record):
        before, after = (np.array(record.values[f"{name}.{key}.mean_epsilon"]) for key in ("c15", "c05"))
        gap = intervals.bootstrap(more, np.array(record.values[f"{name}.c15.class_accuracy"]), after - before)
        yield LABELS[name], f"{gap:+.1f} more", gap.above(0)


@dataclasses.dataclass(frozen=True)
class Large(Study):
    """Figure 12: the clip norms that stand for the paper's 5 and 10, in units of the median norm at initialisation.

    The paper's C is 1, at which 35% of CIFAR-10 reach the worst case, as many as of the digits at 0.3 medians.
    """

    multiples: dict = dataclasses.field(default_factory=lambda: {"c5": 1.5, "c10": 3.0})


@experiment(f"{NAME}/figure-12", one_seed=True, uses=_SHARED, quick=Large(QUICK),
            paper=Large({**HALF_TIME, "cifar10": dataclasses.replace(CIFAR10, normalised=True)}))
def figure_12(config, run):
    """Pearson's r of epsilon with log loss for large clip norms; on CIFAR-10 these are the paper's."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        for key, multiple in config.multiples.items():
            size = {"max_grad_norm": float(key[1:])} if name == "cifar10" else {"median_multiple": multiple}
            found = trained(dataclasses.replace(task, **ONCE, **size), config.seeds[0], run)
            r = with_log_loss(found.epsilon(), found.losses)
            values |= {f"{name}.{key}": r, f"{name}.{key}.accuracy": found.accuracy}
            if name == "cifar10":
                values[f"pearson.{key}"] = r
    return values


@finding(f"{NAME}/figure-12", "Pearson's r between epsilon and log loss is above 0.85 for both clip norms")
def large_clip_norms_too(record):
    # The record holds r and no examples: losses have heavy tails, for which r alone has no honest interval.
    for name in reported(record):
        found = [intervals.unknown(record.values[f"{name}.{key}"]) for key in record.config["multiples"]]
        yield (LABELS[name], ", ".join(f"{r.estimate:.2f}" for r in found) + " (no interval)",
               intervals.every(*(r.above(0.85) for r in found)))


@dataclasses.dataclass(frozen=True)
class Variants(Study):
    """Figures 13 and 14: how each variant changes a task."""

    variants: dict = dataclasses.field(
        default_factory=lambda: {"hinge": {"loss": "hinge"}, "small": {"model": "linear"}})


@experiment(f"{NAME}/figures-13-14", one_seed=True, uses=(*_SHARED, estimate_errors), quick=Variants(QUICK),
            paper=Variants({"mnist_cnn": MNIST_CNN, "cifar10": CIFAR10}))
def figures_13_14(config, run):
    """Another loss and a smaller model: estimates against exact values, accuracy and mean epsilon by class.

    The smaller model is linear; on CIFAR-10 it is the paper's two-layer CNN with its learning rate of 1.
    """
    values, arrays = left_out(config, run), {}
    for name, task in runnable(config, run).items():
        plain = trained(task, config.seeds[0], run)
        values[f"{name}.plain.mean_epsilon"] = plain.by_group(plain.epsilon())
        for kind, changes in config.variants.items():
            if name == "cifar10" and kind == "small":
                changes = {"model": "two-layer-cnn", "learning_rate": 1.0}
            found = trained(dataclasses.replace(task, **changes), config.seeds[0], run)
            errors, exact, estimate = estimate_errors(found, task.refreshes)
            epsilon, accuracy = found.epsilon(), found.by_group(found.test_right, test=True)
            groups = found.by_group(epsilon)
            values |= named(
                f"{name}.{kind}", pearson_estimate=errors["pearson"], understated=errors["understated"],
                accuracy=found.accuracy, class_accuracy=accuracy, rank_correlation=rank(accuracy, groups),
                mean=epsilon.mean(), mean_epsilon=groups, paid_little=(epsilon <= 0.1 * found.worst_case).mean())
            arrays |= named(f"{name}.{kind}", exact=np.float32(exact), estimate=np.float32(estimate))
            if name == "cifar10" and kind == "small":
                values |= {"cat_mean_eps.wrn": values["cifar10.plain.mean_epsilon"][3], "cat_mean_eps.cnn": groups[3]}
    return values, arrays


def _of_variants(record):
    for name in reported(record):
        small = "two-layer CNN" if name == "cifar10" else "linear"
        where = {"small": f"{LABELS[name].partition(', ')[0]}, {small}"}
        for kind in record.config["variants"]:
            yield where.get(kind, f"{LABELS[name]}, {kind}"), f"{name}.{kind}"


@finding(f"{NAME}/figures-13-14", "estimates and exact values have a Pearson's r above 0.99")
def estimates_hold_up(record):
    for where, row in _of_variants(record):
        r = intervals.pearson(record.arrays[f"{row}.estimate"], record.arrays[f"{row}.exact"])
        yield where, f"{r:.3f}", r.above(0.99)


@finding(f"{NAME}/figures-13-14", "accuracy and mean epsilon of classes have a rank correlation of -0.5 or less")
def underserved_still(record):
    for where, row in _of_variants(record):
        r = intervals.rank_correlation(record.values[f"{row}.rank_correlation"],
                                       len(record.values[f"{row}.mean_epsilon"]))
        yield where, f"{r:.1f}", r.at_most(-0.5)


@dataclasses.dataclass(frozen=True)
class Membership(Study):
    """Figure 11: how to train without privacy, and how often to draw who is attacked."""

    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 0.1
    draws: int = 20


# At the default rate training without noise is chaotic: the last bit of a weight decides who is attacked with success.
# At a fifth of it the network comes as close to its data, and no bit counts (tests/experiments).
STABLE = {"epochs": 30, "learning_rate": 0.02}


def overfitted(task, config, seed, device):
    """Accuracies, and losses of training and test examples, after plain SGD: shuffled, with momentum 0.9."""
    found, loss = examples(task.data, task.dtype), LOSSES[task.loss]
    model, x, y = build(task.model, found, seed).to(device), found.x.to(device), found.y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        for batch in torch.randperm(len(y), generator=generator).to(device).split(config.batch_size):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).mean().backward()
            optimizer.step()
    losses, right = outcome(model, loss, x, y)
    test_losses, test_right = outcome(model, loss, found.test_x.to(device), found.test_y.to(device))
    return ({"accuracy": float(right.double().mean()), "test_accuracy": float(test_right.double().mean())},
            {"losses": losses.cpu().numpy(), "test_losses": test_losses.cpu().numpy()})


def attacked(found, members, others, config):
    """Success of the loss-threshold attack on each group and the ends of its 95% interval, means over the draws."""
    generator, rates = torch.Generator().manual_seed(config.seeds[0]), []
    for group in range(len(found.names)):
        sides = torch.as_tensor(members)[found.groups == group], torch.as_tensor(others)[found.test_groups == group]
        rates.append([attacks.loss_threshold_attack(*sides, generator=generator).success for _ in range(config.draws)])
    return dict(zip(("success", "low", "high"), np.mean(rates, axis=1).T))


@experiment(f"{NAME}/figure-11", one_seed=True, uses=(*_SHARED, overfitted, attacked),
            quick=Membership(QUICK, **STABLE), paper=Membership(subset("cifar10", "utkface_gender"), epochs=10))
def figure_11(config, run):
    """Success of the loss-threshold attack on each group with and without DP, beside its mean epsilon."""
    values, seed = left_out(config, run), config.seeds[0]
    for name, task in runnable(config, run).items():
        found = trained(task, seed, run)
        key = {**dataclasses.asdict(config), "tasks": {name: dataclasses.asdict(task)}}
        accuracies, losses = once(f"{task.data}-{task.model}-overfitted", key, seed, run, (*_TRAINING, overfitted),
                                  lambda task=task: overfitted(task, config, seed, run.device),
                                  size=len(found.found.y) * config.epochs * 10)
        values |= named(name, mean_epsilon=found.by_group(found.epsilon()), nonprivate_accuracy=accuracies["accuracy"],
                        nonprivate_test_accuracy=accuracies["test_accuracy"])
        for kind, (members, others) in {"private": (found.losses, found.test_losses),
                                        "nonprivate": (losses["losses"], losses["test_losses"])}.items():
            values |= named(f"{name}.{kind}", **attacked(found.found, members, others, config))
        if name == "cifar10":
            success = dict(zip(found.found.names, values["cifar10.nonprivate.success"]))
            values |= named("cifar10_nonprivate", cat=success["cat"], ship=success["ship"])
    return values


@finding(f"{NAME}/figure-11", "without privacy, groups with a higher mean epsilon are attacked with more success (rank "
         "correlation 0.5 or more)")
def risk_follows_epsilon(record):
    for name in reported(record):
        epsilon, success = (record.values[f"{name}.{key}"] for key in ("mean_epsilon", "nonprivate.success"))
        r = intervals.rank_correlation(rank(epsilon, success), len(epsilon))
        yield LABELS[name], f"{r:.1f}", r.at_least(0.5)


def near_one_half(values, prefix):
    """Whether every group's success, by its own interval, lies within five points of one half; and the widest ends."""
    groups = [intervals.Interval(*ends) for ends in zip(*(values[f"{prefix}.{key}"]
                                                          for key in ("success", "low", "high")))]
    said = f"{min(group.low for group in groups):.0%} to {max(group.high for group in groups):.0%}"
    return said, intervals.every(*(part for group in groups for part in (group.at_least(0.45), group.at_most(0.55))))


@finding(f"{NAME}/figure-11", "with DP, the success on every group lies within five points of one half")
def private_models_resist(record):
    for name in reported(record):
        said, outcome = near_one_half(record.values, f"{name}.private")
        yield LABELS[name], f"intervals from {said}", outcome


# What an account along a trajectory means --------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Trajectories(Study):
    """Theorem 3.1: two adaptive steps in one dimension, and the seeds of whole runs.

    In step 1 the example's gradient is `first`, in step 2 `low` where the first output lies below `turn`, else 1.
    """

    seeds: tuple = (0, 1, 2)
    sample_rate: float = 0.5
    noise: float = 1.0
    first: float = 0.3
    low: float = 0.2
    turn: float = 1.5
    width: float = 0.2
    order: float = 8.0
    delta: float = 1e-3


def two_steps(config, points=1201, reach=9.0):
    """The mechanism of `Trajectories` on a grid of outputs: first outputs z, weights of cells (z, z'), densities of
    both without the example and with it, and the RDP of each trajectory, (points, orders), at `orders`."""
    z = torch.linspace(-reach, reach, points, dtype=torch.float64)
    q, s = config.sample_rate, config.noise

    def density(shift):
        return torch.exp(-((z - shift) / s) ** 2 / 2) / (s * math.sqrt(2 * math.pi))

    second = config.low + (1 - config.low) * torch.sigmoid((z - config.turn) / config.width)
    without = density(0.0)[:, None] * density(0.0)
    first = (1 - q) * density(0.0) + q * density(config.first)
    with_it = first[:, None] * ((1 - q) * density(0.0) + q * density(second[:, None]))
    orders = torch.tensor([1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64], dtype=torch.float64)
    lengths = torch.cat((torch.tensor([config.first]), second))
    rdp = rdp_sampled_gaussian(sample_rate=q, noise_multiplier=s / lengths, orders=orders.tolist())
    return z, (z[1] - z[0]) ** 2, without, with_it, rdp[:1] + rdp[1:], orders


def excess(a, b, epsilon):
    """The delta that epsilon needs, max of P(S) - e^epsilon Q(S) in the worse direction, from the masses of cells."""
    return max(float((p - math.exp(epsilon) * q).clamp(min=0).sum()) for p, q in ((a, b), (b, a)))


def variance_shares(values):
    """values (runs, n): which share of the variance lies between examples, corrected for what runs add to their means;
    and the standard deviation between runs of the same example."""
    within = values.var(0, ddof=1).mean()
    between = max(values.mean(0).var(ddof=1) - within / len(values), 0.0)
    return between / (between + within), math.sqrt(within)


@experiment(f"{NAME}/theorem-3.1", uses=(*_SHARED, clipped, two_steps, excess, variance_shares),
            quick=Trajectories(QUICK), paper=Trajectories(CPU))
def theorem_3_1(config, run):
    """What the account promises, by quadrature, on sets of trajectories that were fixed beforehand and on all of them;
    and how much of an example's account is the example's own, over seeds.
    """
    z, cell, without, with_it, rdp, orders = two_steps(config)
    without, with_it = without * cell, with_it * cell
    at = int((orders == config.order).nonzero())
    fixed_order = rdp_to_epsilon(rdp[:, [at]], orders[[at]], config.delta)[0]
    best_order = rdp_to_epsilon(rdp, orders, config.delta)[0]
    thresholds = torch.linspace(float(fixed_order.min()) + 1e-6, float(fixed_order.max()), 15, dtype=torch.float64)
    rows = []
    for threshold in thresholds.tolist():
        sets = [order <= threshold for order in (fixed_order, best_order)]
        needed = [excess(without[chosen], with_it[chosen], threshold) for chosen in sets]
        rows.append((threshold, float(with_it[sets[0]].sum()), *needed, excess(without, with_it, threshold)))
    columns = ("threshold", "probability", "on_set", "on_set_best_order", "everywhere")
    values = named("toy", delta=config.delta, **dict(zip(columns, map(list, zip(*rows)))))
    for name, task in runnable(config, run).items():
        epsilons = np.stack([clipped(task, "maximum", seed, run).epsilon(refreshes=1.0) for seed in config.seeds])
        pairs = [(a, b) for a in range(len(epsilons)) for b in range(a)]
        share, spread = variance_shares(epsilons)
        ratio = epsilons.max(0) / epsilons.min(0)
        values |= named(name, share_of_the_example=share, sd_between_runs=spread, mean_of_each_run=epsilons.mean(1),
                        rank_correlation=np.mean([rank(epsilons[a], epsilons[b]) for a, b in pairs]),
                        largest_over_smallest=np.quantile(ratio, (0.1, 0.5, 0.9)))
    return values


@finding(f"{NAME}/theorem-3.1", "on every set of trajectories whose account at a fixed order stays below a threshold, "
         "that threshold holds with the stated delta", kind="own")
def thresholds_hold(record):
    worst, delta = max(record.values["toy.on_set"]), record.values["toy.delta"]
    yield "two steps, by quadrature", f"delta {worst:.1e} of {delta:.0e}", worst <= delta


@dataclasses.dataclass(frozen=True)
class Owners(Study):
    """Theorem 3.2: how many owners compute their own epsilon from the models alone."""

    owners: int = 20


@experiment(f"{NAME}/theorem-3.2", one_seed=True, uses=_SHARED,
            quick=Owners({"mnist-5k": dataclasses.replace(MNIST_5K, epochs=2)}))
def theorem_3_2(config, run):
    """Owners compute their epsilons from the models that training went through and their own example, nothing else."""
    values = {}
    for name, task in config.tasks.items():
        found, loss = examples(task.data, task.dtype), LOSSES[task.loss]
        run.loaded += [provenance for provenance in found.provenance if provenance not in run.loaded]
        model = build(task.model, found, config.seeds[0])
        plan = make_plan(task, len(found.y), float(gradient_norms(model, loss, found.x, found.y).median()))
        tracker = NormTracker(IndividualAccountant.for_plan(plan), model, loss, (found.x, found.y),
                              clipping="individual", steps_per_epoch=plan.steps_per_epoch,
                              updates_per_epoch=task.refreshes)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate / plan.max_grad_norm)
        passes, seen = schedule(plan, task.refreshes), []

        def keep(step, passes=passes, seen=seen, model=model):
            if step in passes:
                seen.append({key: value.clone() for key, value in model.state_dict().items()})

        keep(0)
        train(model, loss, (found.x, found.y), plan, optimizer=optimizer, seed=config.seeds[0], trackers=[tracker],
              on_step=lambda state, keep=keep: keep(state.step))
        told = tracker.epsilon(plan.delta)[:config.owners].numpy()
        private = build(task.model, found, config.seeds[0])
        alone = np.zeros(config.owners)
        for owner in range(config.owners):
            norms, mine = [], (found.x[[owner]], found.y[[owner]])
            for state in seen:
                private.load_state_dict(state)
                norms.append(gradient_norms(private, loss, *mine).clamp(max=plan.max_grad_norm))
            alone[owner] = account(plan, np.stack(norms), passes, steps=plan.steps)[0]
        values |= named(name, owners=config.owners, largest_difference=np.abs(alone - told).max(), largest=told.max())
    return values


@finding(f"{NAME}/theorem-3.2", "owners find what they are told, to one level of rounding")
def owners_need_nobody(record):
    for name in reported(record):
        difference = record.values[f"{name}.largest_difference"]
        said = f"differences up to {difference:.0e}" if difference > 1e-9 else "equal to rounding"
        yield LABELS[name], said, difference <= 0.02 * record.values[f"{name}.largest"]


_PRINTED = Study({name: task for name, task in PAPER.items() if name not in CPU})


@experiment(f"{NAME}/algorithms-1-2-3", one_seed=True, uses=(Task, make_plan), quick=_PRINTED, paper=_PRINTED)
def algorithms_1_2_3(config, run):
    """The noise that the paper's largest epsilons take, which is not printed, and what PLD says of it."""
    sizes, values = {"mnist": 60000, "cifar10": 50000, "utkface_gender": 15000, "utkface_age": 15000}, {}
    for name, task in config.tasks.items():
        plan = make_plan(task, sizes[name], 1.0)
        values |= named(name, noise_multiplier=plan.noise_multiplier, steps=plan.steps,
                        epsilon_rdp=plan.epsilon(accountant="rdp"), epsilon_pld=plan.epsilon())
    return values
