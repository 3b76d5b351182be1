"""DP-SGD by the paper's text, and as the training loop of its authors' public code has it.

The loop gives Opacus the mean over a batch as if it were a sum. Each gradient is then divided by
the size of the batch before it is clipped to C, and noise of standard deviation sigma C is added to
a mean in place of a sum. So the clip norm is C times the size of the batch, at the learning rate
that the text has for C. Here the expected size of a batch stands for its own, which depends on who
is in it: the code's training lacks the guarantee that such a run has.
"""

import dataclasses

from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.gradients_look_alike.costs import varied
from dpcompanion.reproduction.papers.gradients_look_alike.runs import (
    MNIST,
    PLAIN_DIGITS,
    STAGES,
    Watch,
    share_of,
    watched,
)


def _both(task):
    return Watch(
        {
            "text": task,
            "public code": varied(task, max_grad_norm=task.batch_size * task.max_grad_norm),
        }
    )


@experiment(
    "gradients-look-alike/public-code",
    quick=_both(varied(PLAIN_DIGITS, learning_rate=0.1)),
    paper=_both(varied(MNIST, runs=1)),
)
def public_code(config, run):
    """One run each by the text and by the public code, and what theorem 3.2 makes of their points.

    Of each: test `accuracy`, and for the three stages the norm of all `weights`, the share of
    points that are `correct`, of those with a gradient at least as long as C, `at_limit`, and of
    those that cost less than a thousandth of the data-independent step, `below_thousandth`.
    Gradients count as measured one point at a time, by the text.
    """
    values, limit = {}, config.tasks["text"].max_grad_norm
    for name, task in config.tasks.items():
        found = watched(task, run)
        norms, correct = found.norms[0, found.stages], found.correct[0, found.stages]
        by_text = dataclasses.replace(found.plan, max_grad_norm=limit)
        shares = share_of(norms.clamp(max=limit), by_text, config.order)
        values[f"{name}.accuracy"] = found.accuracy[0]
        for index, stage in enumerate(STAGES):
            values |= {
                f"{name}.{stage}.weights": found.weights[0, index].norm(),
                f"{name}.{stage}.correct": correct[index].double().mean(),
                f"{name}.{stage}.at_limit": (norms[index] >= limit).double().mean(),
                f"{name}.{stage}.below_thousandth": (shares[index] < 1e-3).double().mean(),
            }
    return values


@finding(
    "gradients-look-alike/public-code",
    "training as in the public code gives a lower test accuracy than training by the text",
    kind="own",
)
def _less_accurate(record):
    n = next(entry["examples"] for entry in record.data if entry["split"] == "test")
    text, code = (
        intervals.share(round(record.values[f"{name}.accuracy"] * n), n)
        for name in ("text", "public code")
    )
    yield "", f"{code:.0%} against {text:.0%}", (text - code).above(0)
