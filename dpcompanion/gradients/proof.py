"""Is a fast way to per-example gradients right for this model?  It is tried against plain autograd.

What is fast looks at layers or at a batch, and a model may do what these do not see: use a weight
outside of its layer, overwrite an activation in place, mix examples. `prove` takes examples one by
one through plain autograd and compares. It is made once a run, so it can afford to be strict. The
engine proves what Opacus finds by the same probe, tolerances and weights nearby
(`dpcompanion.engine.proof`).

* The examples are a probe of 16 that is spread over the data, those with the largest gradients
  first. Rows that are not finite are left out; if all are, nothing is proved, and that is said. All
  16 are compared in one batch: a model that sorts a few of them may find them sorted.
* Tolerances are relative: a well fitted example, whose gradient is small, is proved like any other.
* Training mode is proved like evaluation mode, as it may compute something else. What is drawn at
  random there is drawn alike by all that is compared, so that neither dropout nor noise hides
  anything.
* All is proved twice, with the weights that the model has and with weights nearby: behind a weight
  of next to zero, as in residual blocks at their start, a wrong gradient looks right. The second
  time there is an example less, and the others come the other way round: what takes another axis
  for that of the examples may find as many there by chance, and what sorts them may find them
  sorted.
* A loss does not show what a hook or a backward method does on the way back, which may be nothing
  until a gradient is large. So the norms of half of the examples must stay as they are when the
  gradients of the other half are enlarged; and, in the batches of a run, when the other half is
  replaced (`check_norms`).
* Each example is clipped to another share of its gradient, so that whose gradient is whose is
  proved too, and each parameter's gradient is looked at by itself.

>>> from dpcompanion.gradients import clipped_sum, cross_entropy
>>> model, x, y = torch.nn.Linear(3, 2), torch.randn(50, 3), torch.arange(50) % 2
>>> def half(x, y, limits):
...     found = clipped_sum(model, cross_entropy, x, y, limits)
...     return found.norms / 2, found.gradients
>>> prove(model, cross_entropy, x, y, half)
Traceback (most recent call last):
    ...
dpcompanion.gradients.tensors.UnsupportedModel: the norms of gradients are wrong by up to 50%
against plain autograd
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from dpcompanion._devices import with_whole_convolutions
from dpcompanion.gradients.independence import check_company, check_independence
from dpcompanion.gradients.tensors import UnsupportedModel, in_best_format, losses_in, tolerances
from dpcompanion.gradients.traces import beginning_alike, evaluating, quiet, weights_nearby

# Examples that are looked through, those with gradients computed, and those compared.
_LOOKED_THROUGH, PROBED, COMPARED = 64, 16, 4


# What is proved, of whichever way to per-example gradients.


def rows_to_look_through(n):
    """At most 64 of n rows, evenly spread: first every fourth, then those between, (k,) int64."""
    spread = (
        torch.linspace(0, max(n - 1, 0), min(n, _LOOKED_THROUGH), dtype=torch.float64)
        .round()
        .long()
    )
    return torch.cat([spread[start::4] for start in range(4)])


def probed(alone: Callable[[int], Iterable[torch.Tensor]], n: int) -> dict[int, float]:
    """{row: norm of the gradient `alone`} of a probe over n examples, until 16 are finite."""
    norms = {}
    for row in rows_to_look_through(n).tolist():
        norms[row] = float(norms_of(alone(row)).norm())
        if sum(map(math.isfinite, norms.values())) == PROBED:
            break
    return norms


def largest(norms: dict[int, float], count: int = COMPARED) -> list[int]:
    """The rows of the largest finite norms, the largest first."""
    return sorted(
        filter(lambda row: math.isfinite(norms[row]), norms), key=norms.__getitem__, reverse=True
    )[:count]


def norms_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of each of them, (parameters,) float64 on the CPU."""
    return torch.stack([g.detach().double().norm().cpu() for g in gradients])


class Misfit(NamedTuple):
    """Of which parameter a claim is off most, and what might be there."""

    parameter: int
    bound: float


def misfit(
    errors: torch.Tensor, own: torch.Tensor, typical: torch.Tensor, tolerance
) -> Misfit | None:
    """Where a claim is too far from plain autograd; None where it is not.

    It is compared in whole, against its own length, and parameter by parameter, against what each
    is long elsewhere, too: what is off in a short part of it is off in full when that has grown.
    What cancels leaves some rounding.

    Args:
        errors: how far each parameter's part is from that of autograd, (parameters,).
        own: how long these parts are by autograd, (parameters,).
        typical: how long they are in the examples that are compared, (parameters,).
        tolerance: (relative, floor) as of `tolerances`.
    """
    relative, floor = tolerance
    bounds = relative * typical + floor * typical.norm()
    if errors.norm() <= relative * own.norm() + floor * typical.norm() and bool(
        (errors <= bounds).all()
    ):
        return None
    worst = int((errors / bounds.clamp(min=1e-300)).argmax())
    return Misfit(worst, float(bounds[worst]))


def twice(parameters, compare, rows, nearby=None):
    """Call `compare` with rows and the weights as they are, then with weights nearby and (unless
    `nearby` says which) one of the rows less, the other way round.
    """
    compare(rows)
    with weights_nearby(parameters):
        compare(rows[: max(len(rows) - 1, 1)][::-1] if nearby is None else nearby)


def _of_arithmetic(model, values, precision):
    """(relative, floor) as of `tolerances`, for gradients like `values` that rounding moves."""
    tolerance = tolerances(values if precision is None else values.bfloat16())
    # Frozen layers of a shorter type round, and so do the first layers of deep networks: by 0.2% in
    # ResNet-20's.
    if any(tolerances(p) > (1e-6, 1e-9) for p in model.parameters()):
        tolerance = max(tolerance, (1e-2, 1e-4))
    return tolerance


# Whether a gradient depends on its company. A loss does not show all that happens on the way back.

#: By how much the gradients of others are enlarged.
LOUDER = 2.0**16


def check_norms(model, loss, x, y, measure, precision=None, *, louder=False):
    """Refuse a method by which the norm of an example's gradient changes with the rest of the
    batch.

    Half of the examples keep their places, then the other half. The other places are given to those
    that stay, once more, so that the batch keeps its size and its random numbers; or, with
    `louder`, the others stay and their losses have gradients that are `LOUDER` times as long, as
    those of an outlier, which passes the threshold of what acts on large gradients only.

    Args:
        model, loss: as of `prove`, in the modes of the model's layers.
        x, y: a batch; nothing is said of a batch of less than two.
        measure: (loss, x, y) -> norms (n,), inf where they are not finite.
        precision: in which it measures.
        louder: whether the others are enlarged instead of replaced.

    Raises:
        UnsupportedModel: with the norms of some examples in either company.
    """
    n, device = len(x), x.device
    if n < 2:
        return
    places = torch.arange(n, device=device)
    beside = torch.where((places ^ 1) < n, places ^ 1, n - 2)

    def measured(rows, weights=None):
        with beginning_alike(model, device), quiet(model, torch.nn.RReLU):
            weighted = loss if weights is None else _enlarged(loss, weights)
            return measure(weighted, x[rows], y[rows]).double()

    whole = measured(places)
    finite = whole.isfinite()
    trained = next(p for p in model.parameters() if p.requires_grad)
    relative, floor = _of_arithmetic(model, trained, precision)
    # That of an outlier would hide what it does to all others.
    typical = torch.where(finite, whole, 0).sort().values[9 * (n - 1) // 10]
    for half in (0, 1):
        stays = places % 2 == half
        if louder:
            found = measured(places, torch.where(stays, 1.0, LOUDER))
        else:
            found = measured(torch.where(stays, places, beside))
        apart = torch.where(
            finite & found.isfinite(),
            (whole - found).abs() > relative * whole + floor * typical,
            finite != found.isfinite(),
        )
        if (apart := apart & stays).any():
            raise UnsupportedModel(
                "the norm of an example's gradient depends on the rest of the batch: "
                f"{whole[apart][:4].tolist()} in one batch, {found[apart][:4].tolist()} in "
                "another, as where rows change their order, or where a hook or a backward method "
                "of the model's own takes all gradients of a batch together"
            )


def _enlarged(loss, weights):
    """A loss of the same values, whose gradients are multiplied by weights, one for each place."""

    def enlarged(outputs, y):
        losses = loss(outputs, y)
        own = losses.view_as(losses)
        if own.requires_grad:
            own.register_hook(lambda g: g * weights.to(g))
        return own

    return enlarged


# How the trainer's claims are got.


@with_whole_convolutions
def prove(model, loss, x, y, candidate):
    """Raise unless `candidate` is what autograd says of a probe of 16 examples.

    Args:
        model: a module, on the device of x; it is put into evaluation mode for the proof, and back.
        loss: (outputs, targets) -> (n,).
        x, y: tensors of examples to choose from; at most 64 rows, evenly spread, are looked at.
        candidate: (x, y, clip norms (k,)) -> (norms (k,), {name: sum of the k clipped gradients})
            of k examples; the names are those of the model's trainable parameters. It is called
            with the model's weights as they are, then with others.

    Raises:
        UnsupportedModel: a norm or a sum is wrong, or no example has a finite gradient.
        ValueError: an example's loss changes with its company, or with what the model has seen
            before.
    """
    with evaluating(model):
        rows = largest_gradients(model, loss, x, y, PROBED)
    if not len(rows):
        raise UnsupportedModel(
            "no example has a finite gradient, so that nothing can be proved; use method='func'"
        )
    check_independence(model, loss, x[rows[:COMPARED]], y[rows[:COMPARED]])
    check_company(model, loss, x[rows], y[rows])
    few, rows = rows[:COMPARED], rows.tolist()
    way = _Way(model, loss, x, y, candidate)
    with evaluating(model):
        check_independence(model, loss, x[few], y[few])
        twice(way.parameters, way.compare, rows)
    if any(module.training for module in model.modules()):
        way = _Way(model, loss, x, y, candidate, together=True)
        twice(way.parameters, way.compare, rows)


@with_whole_convolutions
def prove_in(precision, model, loss, x, y, candidate):
    """As `prove`, with the network in a lower precision on both sides, for the two examples with
    the largest gradients.

    That it treats examples one by one and consists of its layers is proved without rounding, by
    `prove`.
    """
    with evaluating(model):
        rows = largest_gradients(model, loss, x, y, 2).tolist()
        way = _Way(
            model, loss, x, y, lambda x, y, limits: candidate(x, y, limits, precision), precision
        )
        twice(way.parameters, way.compare, rows, nearby=rows)


@with_whole_convolutions
def prove_alone(model, loss, x, y, candidate):
    """As `prove`, for a way that puts each example through the model alone, whatever the model does
    with a batch.

    It is wrong where the framework is: PyTorch 2.13's batched gradient of an instance norm, behind
    which channels are moved to the last axis, is. Of a model that draws at random in evaluation
    mode nothing can be said.
    """
    with evaluating(model):
        rows = largest_gradients(model, loss, x, y).tolist()
        way = _Way(model, loss, x, y, candidate)
        if rows and all(map(torch.equal, way.alone(rows[0]), way.alone(rows[0]))):
            twice(way.parameters, way.compare, rows, nearby=rows)


@with_whole_convolutions
def largest_gradients(model, loss, x, y, count=COMPARED):
    """Rows of the `count` examples with the largest finite gradients, by plain autograd, of a probe
    spread over (x, y), the largest first.
    """
    return torch.tensor(
        largest(probed(_Way(model, loss, x, y).alone, len(x)), count), dtype=torch.int64
    ).to(x.device)


class _Way:
    """What a method of clipping claims, and what plain autograd says, of examples (x, y).

    With `together` the latter are taken from one batch, so that chance is the same for all of them.
    """

    def __init__(self, model, loss, x, y, candidate: Any = None, precision=None, *, together=False):
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self._claimed, self._precision, self._together = candidate, precision, together
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())

    def alone(self, row):
        """The gradients of one example by plain autograd, one a parameter.

        Raises:
            UnsupportedModel: if autograd fails, as where a tensor is overwritten that it needs.
        """
        with torch.enable_grad():
            # Copies, for a model or a loss may overwrite what it is given.
            x, y = self.x[row : row + 1].clone(), self.y[row : row + 1].clone()
            return self._gradients(losses_in(self._precision, self.model, self.loss, x, y).sum())

    def _gradients(self, value, **options):
        try:
            found = torch.autograd.grad(
                value, self.parameters, allow_unused=True, materialize_grads=True, **options
            )
        except RuntimeError as error:
            raise UnsupportedModel(
                f"plain autograd cannot differentiate the model: {error}"
            ) from error
        return [g.to_dense() for g in found]  # those of an embedding may be sparse

    def _each(self, rows):
        if not self._together:
            return map(self.alone, rows)
        with torch.enable_grad(), self._chance():
            x, y = in_best_format(self.model, self.x[rows]), self.y[rows]
            values = losses_in(self._precision, self.model, self.loss, x, y)
        return (self._gradients(value, retain_graph=True) for value in values)

    def _chance(self):
        return (
            beginning_alike(self.model, self.x.device)
            if self._together
            else contextlib.nullcontext()
        )

    def compare(self, rows):
        """Refuse norms and a clipped sum of these examples that are not those of plain autograd."""
        shares = torch.linspace(1, 0, len(rows) + 1, dtype=torch.float64)[:-1]
        sums: list[Any] = [0] * len(self.names)
        lengths = []
        for share, gradients in zip(shares.tolist(), self._each(rows)):
            sums = [total + share * g for total, g in zip(sums, gradients)]
            lengths.append(norms_of(gradients))
        lengths = torch.stack(lengths)  # (k, parameters)
        norms = lengths.norm(dim=1)
        # of weights nearby only; for the model's own they are finite
        if not norms.isfinite().all():
            return
        tolerance = _of_arithmetic(self.model, sums[0], self._precision)
        with self._chance():
            theirs, totals = self._claimed(
                self.x[rows], self.y[rows], (shares * norms).to(self.x.device)
            )
        parts = shares @ lengths
        errors = norms_of(totals[name].to_dense() - total for name, total in zip(self.names, sums))
        off = misfit(errors, parts, parts, tolerance)
        errors = (theirs.double().cpu() - norms).abs()
        if any(
            misfit(error[None], norm[None], norms.max()[None], tolerance)
            for error, norm in zip(errors, norms)
        ):
            worst = 100 * float((errors / norms.max().clamp(min=1e-300)).max())
            where = f", that of {self.names[off.parameter]!r} among them" if off else ""
            raise UnsupportedModel(
                f"the norms of gradients are wrong by up to {worst:.3g}% against plain "
                f"autograd{where}"
            )
        if off:
            name = self.names[off.parameter]
            raise UnsupportedModel(
                f"the gradient of {name!r} is not that of plain autograd, for a cause that is "
                "unknown"
            )
