"""Checks that trackers, filters and accounts fit the run that they follow; else a ValueError.

>>> check_clipped([0, 2], [0.5, 1.0], torch.tensor([0.5, 0.5, 0.5]))
Traceback (most recent call last):
    ...
ValueError: clipped must be at most the limits of the step, but example 2 has 1 where 0.5 is allowed
"""

import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion.gradients import proof, traces
from dpcompanion.gradients.passes import unwrapped
from dpcompanion.training.collating import same_parts
from dpcompanion.training.examples import Tensors, examples_of
from dpcompanion.training.people import OfPersons, PersonItems

# By how much a clipped norm, worked out in float32, may seem too long.
_ROUNDING = 1e-6
# What is asked of a filter at each step; the rest is for checkpoints and statements.
_OF_A_FILTER = ("n", "sample_rate", "noise_multiplier", "max_grad_norm", "clip_norms")


def check_clipped(indices, clipped, limits):
    """The gradients of the examples `indices`, once clipped, have norms (k,) within the `limits`
    (n,) of the step, and no example comes twice. Where limits lie on a GPU nothing waits for it:
    whether one is above comes back as a tensor.
    """
    if indices is None or clipped is None:
        raise ValueError(
            "indices and clipped must be given (NormTracker.observe) where clipping='individual', "
            "so that what is charged is known to be enforced, got None"
        )
    indices = torch.as_tensor(indices, dtype=torch.int64)
    clipped = torch.as_tensor(clipped).detach().to(device=limits.device, dtype=torch.float64)
    _checks.same_length(indices=indices, clipped=clipped)
    # -1 is the last one's second name
    _checks.in_interval("indices", indices, 0, len(limits), closed="left")
    limits = limits[to_device(indices, limits.device)]
    over = ~(clipped <= limits * (1 + _ROUNDING))
    away = over.device.type != "cpu"
    if not away and over.any():
        raise ValueError(
            f"clipped must be at most the limits of the step, but example {int(indices[over][0])} "
            f"has {clipped[over][0]:g} where {limits[over][0]:g} is allowed"
        )
    if len(indices.unique()) < len(indices):
        different, times = indices.unique(return_counts=True)
        twice = int(different[times > 1][0])
        raise ValueError(
            f"indices must be distinct, got {twice} more than once: who is summed twice is longer "
            "than was allowed"
        )
    return over.any() if away else None


def check_budget(budget, accountant, name="budget"):
    """A filter keeps the protocol `dpcompanion.testing.Filter`, and charges for the steps that the
    accountant accounts for: as many examples, one rate, noise and norm.
    """
    if missing := [name for name in _OF_A_FILTER if not hasattr(budget, name)]:
        raise ValueError(
            f"{name} must be a filter (dpcompanion.testing.Filter), got a {type(budget).__name__} "
            f"without {', '.join(missing)}"
        )
    if budget.n != accountant.n:
        raise ValueError(f"{name} must be a filter of {accountant.n} examples, got {budget.n}")
    for part in ("sample_rate", "noise_multiplier", "max_grad_norm"):
        ours, theirs = getattr(accountant, part), getattr(budget, part)
        if ours != theirs:
            raise ValueError(
                f"{name} must be a filter of runs with the account's {part}, {ours!r}, got "
                f"{theirs!r}: what it charges, and so its promise, is that of other steps"
            )


def check_follows(tracker, plan, model, loss, data):
    """A `NormTracker` follows a run of `plan` that trains `model` by `loss` on `data`.

    Of a data set that is not the run's own items at 64 places are compared (`_check_items`).
    """
    mine, part, passes = tracker.parameters, tracker.examples, tracker.measuring
    if plan.individual:
        raise ValueError(
            "trackers follow runs with one rate and one clip norm for all, but the plan has a "
            "number for each example: its own parameters determine the epsilon of each example"
        )
    theirs = {
        "n": plan.n if part is None else mine["n"],
        "sample_rate": plan.sample_rate,
        "max_grad_norm": plan.max_grad_norm,
        "noise_multiplier": plan.noise_multiplier,
    }
    if mine != theirs:
        raise ValueError(
            "trackers must keep accounts of the plan (IndividualAccountant.for_plan), but their n, "
            f"sample_rate, max_grad_norm and noise_multiplier are {tuple(mine.values())}"
        )
    if part is not None and (last := int(part.max())) >= plan.n:
        raise ValueError(
            f"examples of a tracker must be indices of the plan's {plan.n} examples, got {last}"
        )
    if unwrapped(passes.model) is not unwrapped(model):
        raise ValueError(
            "trackers must follow the model that is trained, but one was made with another"
        )
    if passes.loss != loss:
        raise ValueError(
            "trackers must follow the loss that is trained, but one was made with "
            f"{passes.loss!r}, not {loss!r}"
        )
    run, own = examples_of(data, plan.n), passes.data
    if (isinstance(run, OfPersons) or isinstance(own, OfPersons)) and run is not own:
        alike = part is None and type(run) is type(own) and run.digest == own.digest
        if not alike or isinstance(run, PersonItems) and _source(own) != _source(run):
            raise ValueError(
                "trackers must follow the data that are trained on, but one has other persons or "
                "rows"
            )
    elif isinstance(run, Tensors) and isinstance(own, Tensors):
        for name, ours, theirs in (("inputs", own.x, run.x), ("targets", own.y, run.y)):
            theirs = theirs if part is None else theirs[part.to(theirs.device)]
            _check_same(name, ours, theirs)
    elif part is not None or _source(own) != _source(run):
        _check_items(own, run, part, tracker.exact)


def _source(examples):
    """What a data set's examples are made of, where that is known."""
    reader = getattr(examples, "reader", None)
    return id(examples) if reader is None else (id(reader.dataset), id(reader.collate_fn))


def _check_same(name, ours, theirs):
    if not same_parts([ours], [theirs]):
        raise ValueError(
            f"trackers must follow the data that are trained on, but one has other {name}"
        )


def _check_items(own, run, part, exact):
    """Items at 64 places, spread over all, are the same. Where a transform draws at random only
    targets can be: an exact account, whose limits must be the example's own, takes no such data set
    beside another.
    """
    rows, cpu = proof.rows_to_look_through(len(own)), torch.device("cpu")
    read = []
    for seed in (0, 1):
        for examples, places in ((own, rows), (run, rows if part is None else part[rows])):
            with traces.drawing_alike(cpu, seed):
                read.append(examples.rows(places))
    (x, y), (run_x, run_y), (x_again, _), (run_x_again, _) = read
    _check_same("targets", y, run_y)
    if same_parts([x, run_x], [x_again, run_x_again]):
        _check_same("inputs", x, run_x)
    elif exact:
        raise ValueError(
            "trackers with clipping='individual' must be made with the very data set that is "
            "trained on where a transform draws at random, got another, whose inputs cannot be "
            "compared"
        )
