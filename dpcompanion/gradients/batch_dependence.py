"""How much a gradient depends on the rest of its batch; accounting for floats assumes none."""

import torch

from dpcompanion import _checks
from dpcompanion._types import Loss
from dpcompanion.gradients import clipping


def batch_dependence_error(
    model: torch.nn.Module,
    loss: Loss,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    examples: int = 8,
    batches: int = 8,
    size: int = 64,
    generator: torch.Generator | None = None,
    method: str = "auto",
) -> float:
    """By how much an example's gradient depends on the rest of its batch: the largest relative
    change that is seen.

    The gradient of each of some examples, as a run with ``arithmetic="float"`` adds it up, alone
    and in batches of random size and composition; the norm of the difference to the gradient alone,
    over its norm. It is a measurement on this machine and these data, not a bound.

    Many arguments, since it takes what a run takes, and how many batches are tried.

    Args:
        model: a module that treats examples one by one.
        loss: (outputs, targets) -> (n,), such as `cross_entropy`.
        x, y: tensors of n examples each.
        examples: how many to try.
        batches: how many batches for each.
        size: the largest batch, at least 2.
        generator: a torch.Generator for the batches.
        method: how to clip: "auto", "mixed" or "func" (`dpcompanion.gradients.clipping`).

    Returns:
        A float.
    """
    examples, batches = (
        _checks.whole_number(name, value, 1)
        for name, value in (("examples", examples), ("batches", batches))
    )
    size = _checks.whole_number("size", size, 2, len(x))
    if method == "auto":
        method = clipping.resolve_method(model, loss, x, y, float64=True)
    worst = 0.0
    for one in torch.randperm(len(x), generator=generator)[:examples].tolist():
        alone = None
        for batch in range(batches + 1):
            count = 0 if not batch else int(torch.randint(1, size, (), generator=generator))
            others = torch.randperm(len(x), generator=generator)[:count]
            others = others[others != one]
            place = int(torch.randint(len(others) + 1, (), generator=generator))
            rows = torch.cat((others[:place], torch.tensor([one]), others[place:]))
            # All but one are clipped to nothing.
            limits = torch.full((len(rows),), 1e-300, dtype=torch.float64)
            limits[place] = 1e300
            found = clipping.clipped_sum(
                model,
                loss,
                x[rows],
                y[rows],
                limits,
                method=method,
                float64=True,
                microbatch_size=size,
            )
            vector = torch.cat([g.flatten() for g in found.gradients.values()])
            if alone is None:
                alone = vector
            elif bool(alone.norm()):
                worst = max(worst, float((vector - alone).norm() / alone.norm()))
    return worst
