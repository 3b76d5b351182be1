"""What the two versions of Yu et al. share: tasks, data, networks, and statistics of their runs."""

import dataclasses
import functools
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion import attacks, data, release
from dpcompanion.reproduction import intervals, pieces
from dpcompanion.reproduction.papers.common import rank
from dpcompanion.training import Performance, cross_entropy, models
from dpcompanion.training.checkpoints import read_checkpoint, write_checkpoint
from dpcompanion.training.tracking import NormTracker


@dataclasses.dataclass(frozen=True)
class Task:
    """DP-SGD on one data set.

    `median_multiple` is C in units of the median norm at initialisation, unless `max_grad_norm`
    gives C. `learning_rate` is divided by C where `normalised`. `refreshes` are full-batch passes
    an epoch, `reference` examples are measured at every step. `needs` says what it takes where two
    cores are not enough.
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


@dataclasses.dataclass(frozen=True)
class Tasks:
    """The tasks that an exhibit looks at."""

    tasks: dict


@dataclasses.dataclass(frozen=True)
class Study(Tasks):
    """The tasks that an exhibit looks at, and the seed of their runs."""

    seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Training and test examples, the group of each (class, or race), the groups' names, and where
    all came from.
    """

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
        x, y, groups, names = found.normalized().features, found.labels, found.labels, found.classes
        if attribute:
            groups, names = found.attributes["race"], data.UTKFACE_RACES[:4]
            y = (
                found.attributes["gender"]
                if attribute == "gender"
                else (found.attributes["age"] < 30).long()
            )
            kept = _balanced(y, groups, len(names))
            x, y, groups = x[kept], y[kept], groups[kept]
        parts += [x, y, groups]
    x, y, groups, test_x, test_y, test_groups = parts
    return Examples(x, y, groups, test_x, test_y, test_groups, names, provenance)


def _balanced(labels, groups, count):
    """Indices of as many 0s as 1s in each of the first `count` groups; who is left out is drawn
    once and for all.
    """
    random, kept = np.random.RandomState(0), []
    for group in range(count):
        sides = [
            random.permutation(np.flatnonzero((groups == group) & (labels == label)))
            for label in (0, 1)
        ]
        kept += [side[: min(map(len, sides))] for side in sides]
    return torch.as_tensor(np.sort(np.concatenate(kept)))


@models.seeded
def mlp(inputs, classes):
    """One hidden layer of 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, classes))


@models.seeded
def two_layer_cnn(channels, classes, side):
    """Two tanh convolutions, as `training.models.mnist_cnn`, for images of another size."""
    last = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        models.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        models.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * last**2, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def build(model, found, seed):
    """The model called `model` for these examples."""
    channels, inputs, classes = found.x.shape[1], found.x[0].numel(), int(found.y.max()) + 1
    return {
        "linear": lambda: nn.Sequential(nn.Flatten(), models.linear(inputs, classes, seed=seed)),
        "mlp": lambda: mlp(inputs, classes, seed=seed),
        "two-layer-cnn": lambda: two_layer_cnn(channels, classes, found.x.shape[-1], seed=seed),
        "resnet20": lambda: models.resnet20(classes, channels=channels, seed=seed),
        "wrn16-4": lambda: models.wrn16_4(classes, channels=channels, seed=seed),
    }[model]().to(found.x.dtype)


def seconds(examples, steps):
    """About how long a run takes on two cores, with all norms every few steps."""
    return examples * steps / 1.7e5


def hinge(outputs, targets):
    """Multi-class hinge loss of each example, (n,)."""
    return F.multi_margin_loss(outputs, targets, reduction="none")


LOSSES = {"cross-entropy": cross_entropy, "hinge": hinge}


def outcome(model, loss, x, y):
    """Losses and who is right, by the final model."""
    model.eval()
    with torch.no_grad():
        parts = [model(part) for part in x.split(2048)]
    outputs = torch.cat(parts)
    return loss(outputs, y), outputs.argmax(1) == y


def microbatch_size(device, model):
    """Examples in one pass: on a GPU, which waits for launches otherwise, as many as leave the
    gradients of ResNet-20 within what is held at once; on a processor what the library chooses, but
    128 for ResNet-20, a tenth faster than its 32 where a core has a cache of 2 MiB.
    """
    if torch.device(device).type != "cpu":
        return 960
    return 128 if model == "resnet20" else None


def sgd(parameters, learning_rate, steps, *, momentum, weight_decay, cosine):
    """SGD, and the schedule of its learning rate: a cosine over so many steps, or None."""
    optimizer = torch.optim.SGD(
        parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    return optimizer, schedule


def trackers_of(task, plan, model, loss, data, chosen, *, running=False, **options):
    """A tracker of all examples, which are measured as the task says; and, if some are `chosen`,
    one of these, measured at every step.
    """
    at_once = microbatch_size(data[0].device, getattr(task, "model", None))
    options["performance"] = Performance(microbatch_size=at_once)
    trackers = [
        NormTracker.for_plan(
            plan,
            model,
            loss,
            data,
            running=running,
            updates_per_epoch=task.refreshes,
            clipping=task.clipping,
            **options,
        )
    ]
    if len(chosen):
        some = tuple(part[chosen.to(part.device)] for part in data)
        trackers.append(
            NormTracker.for_plan(
                plan, model, loss, some, updates_per_epoch=math.inf, examples=chosen, **options
            )
        )
    return trackers


#: What readers call a task.
LABELS = {
    "mnist-5k": "digits",
    "mnist_cnn": "MNIST, two-layer CNN",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "utkface_gender": "UTKFace, gender",
    "utkface_age": "UTKFace, age",
}

# An epsilon from this share of the worst case on has reached it in our records; neither version of
# the paper prints a limit, and what Table 3 of the first implies is lower (`printed_limit` there).
WORST = 0.99


def correlation_with_extremes(accuracy, epsilon):
    """Rank correlation of the groups' accuracy (or of their loss, with the sign turned) and mean
    epsilon; and by how many percent the mean of the least accurate is above that of the most
    accurate, by the bootstrap over groups.
    """
    accuracy, epsilon = np.array(accuracy), np.array(epsilon)

    def percent(right, cost):
        worst, best = (
            np.take_along_axis(cost, np.expand_dims(pick(right, -1), -1), -1)[..., 0]
            for pick in (np.argmin, np.argmax)
        )
        return 100 * (worst / best - 1)

    return (
        intervals.rank_correlation(rank(accuracy, epsilon), len(accuracy)),
        intervals.bootstrap(percent, accuracy, epsilon),
    )


STATISTICS = ("mean", "q10", "q30", "median", "q70", "q90")


def released(epsilon, upper, delta, config, method, seed):
    """The six statistics, with noise."""
    budget = {
        "upper": upper,
        "epsilon": release.split(config.epsilon, delta, 2),
        "delta": delta,
        "generator": torch.Generator().manual_seed(seed),
    }
    mean = release.private_mean(epsilon, **budget)
    return [
        mean,
        *release.private_quantiles(epsilon, config.quantiles, method=method, **budget).tolist(),
    ]


def clip_key(multiple):
    """The name of a multiple in values.

    >>> clip_key(0.5), clip_key(1.5)
    ('c05', 'c15')
    """
    return "c" + f"{multiple:.1f}".replace(".", "")


def share_below(counts, top, limit):
    """The share of examples below a limit, by a histogram from 0 to `top`; a bin that holds the
    limit is not below it.

    >>> share_below([2, 1, 1, 4], top=2.0, limit=1.2)
    0.375
    """
    edges = np.linspace(0, top, len(counts) + 1)[1:]
    return float(np.asarray(counts)[edges <= limit].sum() / np.sum(counts))


def against_uniform(epsilons, limit):
    """The uniform epsilon by PLD, and which of some others, by name, lie above it.

    >>> against_uniform({"mean": 1.0, "q90": 2.3}, 2.186)
    'uniform epsilon 2.19 by PLD; above it: 1 of 2 (q90)'
    >>> against_uniform({"mean": 1.0}, 2.186)
    'uniform epsilon 2.19 by PLD; above it: none of 1'
    """
    above = [str(name) for name, epsilon in epsilons.items() if epsilon > limit]
    which = f" ({', '.join(above)})" if above else ""
    count = f"{len(above) or 'none'} of {len(epsilons)}"
    return f"uniform epsilon {limit:.2f} by PLD; above it: {count}{which}"


def falls(shares):
    """Whether shares (intervals) fall in turn, from more than half to less than a tenth."""
    return intervals.every(
        shares[0].above(0.5),
        shares[-1].below(0.1),
        *((before - after).at_least(0) for before, after in zip(shares, shares[1:])),
    )


@dataclasses.dataclass(frozen=True)
class Membership(Study):
    """Figure 11: how to train without privacy, and how often to draw who is attacked."""

    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 0.1
    draws: int = 20


# At the default rate training without noise is chaotic: the last bit of a weight decides who is
# attacked with success. At a fifth of it the network comes as close to its data, and no bit counts
# (tests/reproduction).
STABLE = {"epochs": 30, "learning_rate": 0.02}


@dataclasses.dataclass(frozen=True)
class _Epochs:
    """The state of plain training after its last whole epoch, in a file if there is to be one."""

    path: pathlib.Path | None

    def save(self, done, model, optimizer, generator):
        """Keep it after so many epochs."""
        if self.path:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_checkpoint(
                self.path,
                {"identity": {"epochs": done}, "generator": generator.get_state(), **states},
            )

    def restore(self, model, optimizer, generator):
        """How many epochs are done, with their state; 0 where none is kept."""
        if not (self.path and self.path.exists()):
            return 0
        kept = read_checkpoint(self.path, ("identity", "generator", "model", "optimizer"))
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        generator.set_state(kept["generator"])
        return kept["identity"]["epochs"]


def overfitted(task, config, seed, device):
    """Accuracies, and losses of training and test examples, after plain SGD with momentum 0.9. A
    piece on the disk keeps its state after every epoch.
    """
    found, loss = examples(task.data, task.dtype), LOSSES[task.loss]
    model, x, y = build(task.model, found, seed).to(device), found.x.to(device), found.y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    generator, kept = torch.Generator().manual_seed(seed), _Epochs(pieces.unfinished())
    for epoch in range(kept.restore(model, optimizer, generator), config.epochs):
        for batch in (
            torch.randperm(len(y), generator=generator).to(device).split(config.batch_size)
        ):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).mean().backward()
            optimizer.step()
        kept.save(epoch + 1, model, optimizer, generator)
    losses, right = outcome(model, loss, x, y)
    test_losses, test_right = outcome(model, loss, found.test_x.to(device), found.test_y.to(device))
    return (
        {
            "accuracy": float(right.double().mean()),
            "test_accuracy": float(test_right.double().mean()),
        },
        {"losses": losses.cpu().numpy(), "test_losses": test_losses.cpu().numpy()},
    )


def trained_without_privacy(task, config, seed, run):
    """`overfitted`, kept."""
    settings = {key: getattr(config, key) for key in ("epochs", "batch_size", "learning_rate")}
    done = run.keep(
        lambda _: overfitted(task, config, seed, run.device),
        [f"seed-{seed}"],
        config={"task": dataclasses.replace(task, needs=""), **settings},
        seconds=seconds(len(examples(task.data, task.dtype).y), 10 * config.epochs),
        under=f"runs/{task.data}-{task.model}-overfitted",
        label=f"{task.data}, {task.model}",
    )
    return done[f"seed-{seed}"]


def attacked(found, members, others, config):
    """Success of the loss-threshold attack on each group and the ends of its 95% interval, means
    over the draws.
    """
    generator, rates = torch.Generator().manual_seed(config.seed), []
    for group in range(len(found.names)):
        sides = (
            torch.as_tensor(members)[found.groups == group],
            torch.as_tensor(others)[found.test_groups == group],
        )
        rates.append(
            [
                attacks.loss_threshold_attack(*sides, generator=generator).success
                for _ in range(config.draws)
            ]
        )
    return dict(zip(("success", "low", "high"), np.mean(rates, axis=1).T))


def near_one_half(values, prefix):
    """Whether every group's success, by its own interval, lies within five points of one half; and
    the widest ends.
    """
    groups = [
        intervals.Interval(*ends)
        for ends in zip(*(values[f"{prefix}.{key}"] for key in ("success", "low", "high")))
    ]
    said = f"{min(group.low for group in groups):.0%} to {max(group.high for group in groups):.0%}"
    return said, intervals.every(
        *(part for group in groups for part in (group.at_least(0.45), group.at_most(0.55)))
    )
