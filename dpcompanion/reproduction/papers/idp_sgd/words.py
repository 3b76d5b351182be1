"""What the book calls the values of this paper, and how it writes accuracies."""

import math
from collections.abc import Iterable

from dpcompanion.reproduction.records import MeanSD, Record, mean_and_sd

WORDS: dict[str, str] = {
    "mnist": "MNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR-10",
    "dpsgd": "DP-SGD",
    "sample": "Sample",
    "scale": "Scale",
    **{
        f"{method.lower()}_{setup}": f"{method} {setup}"
        for method in ("Sample", "Scale")
        for setup in "AB"
    },
    "sigma": "σ",
    "sigma_scale": "σ of Scale",
    "sigma_sample": "σ of Sample",
    "sigma_p": "σ of group",
    "c_p": "clip norm of group",
    "q_p": "rate of group",
}


def labeled(keys: Iterable[str]) -> dict[str, str]:
    """What the rows of a table are called, for the dotted names of their values.

    >>> labeled(["mnist.A.sample"])
    {'mnist.A.sample': 'MNIST, A, Sample'}
    """
    return {key: ", ".join(WORDS.get(part, part) for part in key.split(".")) for key in keys}


def columns(record: Record | None, keys: Iterable[str]) -> list[str]:
    """Accuracies of a record for the keys; empty where nothing is recorded."""
    return [shown(record.values[f"{key}.final"]) if record else "" for key in keys]


def shown(values: Iterable[float]) -> str:
    """Mean and standard deviation over seeds, one decimal.

    >>> shown([96.0, 97.0, 98.0]), shown([96.0])
    ('97.0 ± 1.0', '96.0')
    """
    return spread(mean_and_sd(values))


def spread(found: MeanSD, digits: int = 1) -> str:
    """A mean and its standard deviation, if there is one."""
    return f"{found.mean:.{digits}f}" + (
        "" if math.isnan(found.sd) else f" ± {found.sd:.{digits}f}"
    )
