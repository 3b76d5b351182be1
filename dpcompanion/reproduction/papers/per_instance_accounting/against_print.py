"""Findings that hold numbers against the print after a conversion, or by a limit: the share at the
worst case, table 3, and the means of figure 6.
"""

from dpcompanion.reproduction import intervals, published
from dpcompanion.reproduction.experiments import finding
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    NAME,
    label,
    near_the_print,
    reached,
)

SHARE = f"{NAME}/text-worst-case-share"


@finding(
    SHARE,
    "the share at the worst case, as near as in Table 3 of the paper, is the printed one (within a "
    "tenth, or the rounding of the print)",
    of=f"{NAME}/figure-1-resnet20",
)
@finding(
    SHARE,
    "the share at the worst case, as near as in Table 3 of the paper, is the printed one (within a "
    "tenth, or the rounding of the print)",
    of=f"{NAME}/figure-1-mnist",
)
def share_is_printed(record):
    printed = published.exhibit(SHARE)[record.config["setting"]["data"]]
    share, within = reached(record), max(0.1 * printed, printed.rounding)
    yield (
        label(record),
        f"{share:.1%}, printed {printed:.0%}",
        intervals.every(share.at_least(printed - within), share.at_most(printed + within)),
    )


@finding(
    SHARE,
    "fewer examples reach the worst case on MNIST than on CIFAR-10",
    of=f"{NAME}/figure-1-mnist",
)
def fewer_on_the_easier_task(record):
    harder = record.beside(f"{NAME}/figure-1-resnet20")
    if harder is None:
        return
    share, easier = reached(harder), reached(record)
    yield (
        label(record),
        f"{easier.estimate:.1%} against {share.estimate:.1%}",
        (share - easier).above(0),
    )


@finding(
    SHARE,
    "less than half of the examples reach the worst case",
    of=f"{NAME}/figure-1-resnet20",
    kind="own",
)
def many_pay_less(record):
    share = reached(record)
    yield label(record), f"{share.estimate:.0%}", share.below(0.5)


@finding(
    SHARE,
    "less than a fifth of the examples reach the worst case of a smaller network",
    of=f"{NAME}/figure-1",
    kind="own",
)
def few_pay_all(record):
    share = reached(record)
    yield label(record), f"{share.estimate:.1%}", share.below(0.2)


@finding(
    f"{NAME}/table-3",
    "the mean and the quantiles of epsilon, by about the paper's conversion, lie within a tenth of "
    "the printed ones",
)
def statistics_are_printed(record):
    for key in second.STATISTICS:
        yield _beside(record, f"non_private.{key}", key, f"{NAME}/table-3")


@finding(
    f"{NAME}/figure-6",
    "the mean epsilons of cats and ships, by about the paper's conversion, lie within a tenth of "
    "the printed ones",
    of=f"{NAME}/figure-6-resnet20",
)
def means_are_printed(record):
    for key in ("cat", "ship"):
        yield _beside(record, f"cifar10.{key}", key, f"{NAME}/figure-6")


def _beside(record, key, word, exhibit):
    printed = published.exhibit(exhibit)[key]
    found, outcome = near_the_print(record, record.values[key], printed)
    return f"{label(record)}, {word}", f"{found.estimate:.2f}, printed {printed}", outcome
