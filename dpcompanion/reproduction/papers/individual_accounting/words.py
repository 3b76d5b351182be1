"""What the book calls the runs of this paper, and the uniform epsilon of one."""

from dpcompanion.reproduction import experiments, plotting
from dpcompanion.reproduction.papers.individual_accounting.runs import make_plan
from dpcompanion.reproduction.papers.yu import Task

DIGITS, MNIST, MNIST_RESNET, RESNET = "mnist-5k", "mnist_cnn", "mnist", "cifar10_resnet20"
RESNET_WHOLE = "cifar10"  # that of figure 3, for all epochs
_DATA = {
    DIGITS: "digits",
    MNIST: "MNIST",
    MNIST_RESNET: "MNIST, ResNet-20",
    RESNET: "CIFAR-10, ResNet-20",
    RESNET_WHOLE: "CIFAR-10, ResNet-20",
}
_PARTS = {MNIST_RESNET: "mnist", RESNET: "resnet20", RESNET_WHOLE: "whole"}


def shown(found):
    """(kind, task) for each record of `chapters.Chapter.both`."""
    return [(kind, {"recorded": MNIST, "live": DIGITS}[kind]) for kind in found]


def every(chapter, exhibit):
    """(kind, task, record) of an exhibit: those of `shown`, and between them those of ResNet-20 on
    MNIST and on CIFAR-10, where there are such.
    """
    found = chapter.both(exhibit)
    runs = [(kind, task, found[kind]) for kind, task in shown(found)]
    parts = [
        ("recorded", task, chapter.recorded(f"{exhibit}-{part}"))
        for task, part in _PARTS.items()
        if f"{chapter.paper}/{exhibit}-{part}" in experiments.names()
    ]
    return [*runs[:-1], *(part for part in parts if part[2]), runs[-1]]


def grid(runs, height=3.0):
    """The axes of a figure with a panel for each of `every`, two to a row; the rest is empty."""
    rows = -(-len(runs) // 2)
    _, axes = plotting.figure(rows=rows, columns=min(2, len(runs)), height=height, squeeze=False)
    for ax in axes.flat[len(runs) :]:
        ax.axis("off")
    return axes


def label(record, kind, what=""):
    """Data, epochs, what is special about a run, and where it comes from.

    >>> from types import SimpleNamespace
    >>> label(
    ...     SimpleNamespace(config={"tasks": {"mnist_cnn": {"epochs": 20}}}),
    ...     "recorded",
    ...     "three an epoch",
    ... )
    'MNIST, 20 epochs, three an epoch (recorded)'
    """
    name = next(name for name in _DATA if name in record.config["tasks"])
    parts = [
        _DATA[name],
        f"{record.config['tasks'][name]['epochs']} epochs",
        *([what] if what else []),
    ]
    return f"{', '.join(parts)} ({kind})"


def plain_epsilon(record, name, accountant="pld"):
    """The uniform epsilon of the run of a record's task.

    One example's gradients or zeros in their place, Poisson sampling, the task's delta.
    """
    n = next(entry["examples"] for entry in record.data if entry["split"] == "train")
    return make_plan(Task(**record.config["tasks"][name]), n, 1.0).epsilon(accountant=accountant)
