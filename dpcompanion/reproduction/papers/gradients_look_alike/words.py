"""What the book calls the values of this paper."""

from dpcompanion.reproduction.papers.gradients_look_alike.runs import Task, plan_of

BOTH = {"remove": "with x against without", "add": "without x against with"}


def uniform_epsilon(record, name):
    """The uniform epsilon of a task by the privacy loss distribution of its run."""
    task = Task(**{**record.config["tasks"], **record.config.get("larger", {})}[name])
    (examples,) = {
        source["examples"]
        for source in record.data
        if source["split"] == "train" and source["name"] == task.data
    }
    return plan_of(task, examples).epsilon(accountant="pld")


def every(chapter, exhibit):
    """(kind, record) of an exhibit: of digits, ResNet-20 on CIFAR-10 if any, and live."""
    part = chapter.recorded(f"{exhibit}-resnet20")
    return sorted(
        [*chapter.both(exhibit).items(), *([("recorded", part)] if part else [])],
        key=lambda one: one[0] == "live",
    )


def power(x):
    """A share that may be tiny, in one digit.

    >>> power(0.25), power(2.5e-7)
    ('0.25', '2e-07')
    """
    return f"{x:.2f}" if x >= 0.1 else f"{x:.0e}"
