"""What the book calls the runs of this paper."""

DIGITS, MNIST = "mnist-5k", "mnist_cnn"


def shown(found):
    """(kind, task) for each record of `chapters.Chapter.both`."""
    return [(kind, {"recorded": MNIST, "live": DIGITS}[kind]) for kind in found]


def label(record, kind, what=""):
    """Data, epochs, what is special about a run, and where it comes from.

    >>> from types import SimpleNamespace
    >>> label(SimpleNamespace(config={"tasks": {"mnist_cnn": {"epochs": 20}}}), "recorded", "three an epoch")
    'MNIST, 20 epochs, three an epoch (recorded)'
    """
    name, data = {"recorded": (MNIST, "MNIST"), "live": (DIGITS, "digits")}[kind]
    parts = [data, f"{record.config['tasks'][name]['epochs']} epochs", *([what] if what else [])]
    return f"{', '.join(parts)} ({kind})"
