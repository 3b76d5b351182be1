"""Is a fast way to per-example gradients right for this model?  It is tried against plain autograd.

What is fast looks at layers or at a batch, and a model may do what these do not see: use a weight outside of its
layer, overwrite an activation in place, mix examples.  `prove` takes examples one by one through plain autograd and
compares.  It is made once a run, so it can afford to be strict:

* The examples are those with the largest gradients among a probe that is spread over the data.  Rows that are not
  finite are left out; if all are, nothing is proved, and that is said.
* Tolerances are relative: a well fitted example, whose gradient is small, is proved like any other.
* Training mode is proved like evaluation mode, as it may compute something else. What is drawn at random there is
  drawn alike by all that is compared, so that neither dropout nor noise hides anything.
* All is proved twice, with the weights that the model has and with weights nearby: behind a weight of next to zero, as
  in residual blocks at their start, a wrong gradient looks right. The second time there is an example less, and the
  others come the other way round: what takes another axis for that of the examples may find as many there by chance,
  and what sorts them may find them sorted.
* Each example is clipped to another share of its gradient, so that whose gradient is whose is proved too, and each
  parameter's gradient is looked at by itself.

>>> from dpcompanion.gradients import clipping
>>> model, x, y = torch.nn.Linear(3, 2), torch.randn(50, 3), torch.arange(50) % 2
>>> def half(x, y, limits):
...     found = clipping.clipped_sum(model, clipping.cross_entropy, x, y, limits)
...     return found.norms / 2, found.gradients
>>> prove(model, clipping.cross_entropy, x, y, half)
Traceback (most recent call last):
    ...
dpcompanion.gradients.tensors.Unfit: the norms of gradients are wrong by up to 50% against plain autograd
"""

import contextlib
from typing import Any

import torch

from dpcompanion.gradients.independence import check_company, check_independence
from dpcompanion.gradients.tensors import Unfit, in_best_format, losses_in, tolerances
from dpcompanion.gradients.traces import beginning_alike, evaluating, weights_nearby

# Examples that are looked through, those of them whose gradients are computed, and those that are compared.
_LOOKED_THROUGH, PROBED, _COMPARED = 64, 16, 4


def prove(model, loss, x, y, claimed):
    """Raise unless `claimed` is what plain autograd says of the examples with the largest gradients.

    Args:
        model: a module, on the device of x; it is put into evaluation mode for the proof, and back.
        loss: (outputs, targets) -> (n,).
        x, y: tensors of examples to choose from; at most 64 rows, evenly spread, are looked at.
        claimed: (x, y, clip norms (k,)) -> (norms (k,), {name: sum of the k clipped gradients}) of k examples; the
            names are those of the model's trainable parameters. It is called with the model's weights as they are,
            then with others.

    Raises:
        Unfit: a norm or a sum is wrong, or no example has a finite gradient.
        ValueError: an example's loss changes with its company, or with what the model has seen before.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y, PROBED)
    if not len(rows):
        raise Unfit("no example has a finite gradient, so that nothing can be proved; use method='func'")
    many, (x, y) = (x[rows], y[rows]), (x[rows[:_COMPARED]], y[rows[:_COMPARED]])
    fewer = slice(max(len(x) - 1, 1))
    fewer = x[fewer].flip(0), y[fewer].flip(0)
    check_independence(model, loss, x, y)
    check_company(model, loss, *many)
    with evaluating(model):
        check_independence(model, loss, x, y)
        _compare(model, loss, x, y, claimed)
        with weights_nearby(model):
            _compare(model, loss, *fewer, claimed)
    if any(module.training for module in model.modules()):
        _compare(model, loss, x, y, claimed, together=True)
        with weights_nearby(model):
            _compare(model, loss, *fewer, claimed, together=True)


def prove_in(precision, model, loss, x, y, claimed):
    """As `prove`, with the network in a lower precision on both sides, for the two examples with the largest gradients.

    That it treats examples one by one and consists of its layers is proved without rounding, by `prove`.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y)[:2]

        def lowered(x, y, limits):
            return claimed(x, y, limits, precision)

        _compare(model, loss, x[rows], y[rows], lowered, precision)
        with weights_nearby(model):
            _compare(model, loss, x[rows], y[rows], lowered, precision)


def prove_alone(model, loss, x, y, claimed):
    """As `prove`, for a way that puts each example through the model alone, whatever the model does with a batch.

    It is wrong where the framework is: PyTorch 2.13's batched gradient of an instance norm, behind which channels are
    moved to the last axis, is.  Of a model that draws at random in evaluation mode nothing can be said.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y)
        if not len(rows):
            return
        x, y = x[rows], y[rows]
        once, again = (gradients_alone(model, loss, x, y, 0)[1] for _ in range(2))
        if not all(map(torch.equal, once, again)):
            return
        _compare(model, loss, x, y, claimed)
        with weights_nearby(model):
            _compare(model, loss, x, y, claimed)


def hardest(model, loss, x, y, count=_COMPARED):
    """Rows of the `count` examples with the largest finite gradients, by plain autograd, of a probe spread over (x, y),
    the largest first."""
    norms, found = [], []
    for row in rows_to_look_through(len(x)).tolist():
        norm = torch.stack([g.double().norm() for g in gradients_alone(model, loss, x, y, row)[1]]).norm()
        if norm.isfinite():
            norms.append(norm)
            found.append(row)
        if len(found) == PROBED:
            break
    if not found:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    return torch.tensor(found, device=x.device)[torch.stack(norms).argsort(descending=True)[:count]]


def rows_to_look_through(n):
    """At most 64 of n rows, evenly spread: first every fourth of them, then those between, (k,) int64."""
    spread = torch.linspace(0, max(n - 1, 0), min(n, _LOOKED_THROUGH), dtype=torch.float64).round().long()
    return torch.cat([spread[start::4] for start in range(4)])


def gradients_alone(model, loss, x, y, row, precision=None):
    """The loss of one example, and its gradients for the trainable parameters, by plain autograd.

    Raises:
        Unfit: if autograd fails, as where a tensor is overwritten that it needs.
    """
    with torch.enable_grad():
        # A copy, for a model may overwrite what it is given.
        value = losses_in(precision, model, loss, x[row : row + 1].clone(), y[row : row + 1]).sum()
        return value.detach(), _gradients(model, value)


def _gradients(model, value, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True, **options)
    except RuntimeError as error:
        raise Unfit(f"plain autograd cannot differentiate the model: {error}") from error
    return [g.to_dense() for g in found]  # those of an embedding may be sparse


def _each(model, loss, x, y, precision, together):
    """The gradients of each example, alone or (where chance is to be the same for all of them) from one batch."""
    if not together:
        return (gradients_alone(model, loss, x, y, row, precision)[1] for row in range(len(x)))
    with torch.enable_grad(), beginning_alike(model, x.device):
        values = losses_in(precision, model, loss, in_best_format(model, x), y)
    return (_gradients(model, value, retain_graph=True) for value in values)


def _compare(model, loss, x, y, claimed, precision=None, together=False):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    sums: list[Any] = [0] * len(names)
    lengths, shares = [], torch.linspace(1, 0, len(x) + 1, dtype=torch.float64)[:-1].to(x.device)
    for share, gradients in zip(shares.tolist(), _each(model, loss, x, y, precision, together)):
        sums = [total + share * g for total, g in zip(sums, gradients)]
        lengths.append(torch.stack([g.double().norm() for g in gradients]))
    lengths = torch.stack(lengths)  # (k, parameters)
    norms = lengths.norm(dim=1)
    if not norms.isfinite().all():  # of weights nearby only; for the model's own they are finite
        return
    relative, floor = tolerances(sums[0] if precision is None else sums[0].bfloat16())
    with beginning_alike(model, x.device) if together else contextlib.nullcontext():
        theirs, totals = claimed(x, y, shares * norms)
    errors = (theirs.double() - norms).abs()
    allowed = relative * lengths.sum(0) + floor * norms.sum()
    off = [
        name
        for name, total, limit in zip(names, sums, allowed)
        if not (totals[name].to_dense() - total).double().norm() <= limit
    ]
    if not (errors <= relative * norms + floor * norms.max()).all():
        worst = 100 * float((errors / norms.max().clamp(min=1e-300)).max())
        where = f", that of {off[0]!r} among them" if off else ""
        raise Unfit(f"the norms of gradients are wrong by up to {worst:.3g}% against plain autograd{where}")
    if off:
        raise Unfit(f"the gradient of {off[0]!r} is not that of plain autograd, for a cause that is unknown")
