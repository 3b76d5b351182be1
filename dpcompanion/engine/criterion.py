"""A criterion of the user's, which is called without reduction, and whether it gives each example a
loss of its own.

>>> Unreduced(torch.nn.CrossEntropyLoss())(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])).shape
torch.Size([4])
"""

import contextlib
import inspect
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpcompanion._devices import on_accelerator
from dpcompanion.engine.standard import own_mean, own_sum
from dpcompanion.gradients.checks import check_untrained
from dpcompanion.gradients.independence import check_loss, refuse_loss


class Unreduced:
    """A criterion that gives one number an example, (n,), whatever its own reduction.

    Of several numbers of one example it takes the mean, or the sum where its own reduction is
    "sum"; what it ignores (`ignore_index`) does not count.
    """

    def __init__(self, criterion):
        if not callable(criterion):
            raise ValueError(
                f"criterion must be a module or function of outputs and targets, got {criterion!r}"
            )
        check_untrained(criterion, "criterion")
        self.criterion, self.reduction = criterion, "none"
        self._attribute = isinstance(getattr(criterion, "reduction", None), str)
        self._keyword = not self._attribute and _takes_reduction(criterion)
        kept = getattr(criterion, "keywords", {}).get("reduction") if self._keyword else None
        self._sums = (getattr(criterion, "reduction", None) if self._attribute else kept) == "sum"

    @property
    def ignore_index(self):
        own: Any = self.criterion
        found = getattr(own, "ignore_index", getattr(own, "keywords", {}).get("ignore_index"))
        if found is None and getattr(own, "func", own) in (F.cross_entropy, F.nll_loss):
            return -100
        return found

    def __call__(self, *args, **kwargs):
        own: Any = self.criterion
        if self._attribute:
            before, own.reduction = own.reduction, "none"
            try:
                losses = own(*args, **kwargs)
            finally:
                own.reduction = before
        else:
            losses = own(*args, **kwargs, **({"reduction": "none"} if self._keyword else {}))
        if not torch.is_tensor(losses) or not losses.ndim:
            found = "one for the whole batch" if torch.is_tensor(losses) else type(losses).__name__
            raise ValueError(
                "criterion must give one number an example when it is called without reduction, "
                f"(n,), got {found}: give it a `reduction`, as torch.nn's losses have, or return "
                "the losses unreduced"
            )
        if losses.ndim == 1:
            return losses
        ignored, counted = self.ignore_index, None
        targets = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is not None and torch.is_tensor(targets) and targets.shape == losses.shape:
            counted = targets != ignored
        return (own_sum if self._sums else own_mean)(losses, counted)


def _takes_reduction(criterion):
    try:
        found = inspect.signature(criterion).parameters.get("reduction")
    except (TypeError, ValueError):
        return False
    return found is not None


def _fixed(criterion, args, kwargs, n):
    """{what to call it: a copy} of the floating-point tensors that a criterion holds, or is given,
    for all examples.
    """
    own = getattr(criterion, "func", criterion)
    held = {
        f"its {name!r}": value
        for name, value in getattr(own, "__dict__", {}).items()
        if name != "_buffers"
    }
    if isinstance(own, torch.nn.Module):
        held |= {f"its {name!r}": value for name, value in own.named_buffers()}
    held |= {f"its {name!r}": value for name, value in getattr(criterion, "keywords", {}).items()}
    code, cells = getattr(own, "__code__", None), getattr(own, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), cells):
        with contextlib.suppress(ValueError):  # an empty cell
            held[f"{name!r}, over which it closes,"] = cell.cell_contents
    found = {}
    for what, value in held.items():
        leaves = tree_flatten(value)[0] if isinstance(value, (dict, list, tuple)) else [value]
        found |= {(what, i): t for i, t in enumerate(leaves[:64]) if torch.is_tensor(t)}
    for i, t in enumerate(tree_flatten((args, kwargs))[0]):
        if torch.is_tensor(t) and len(t.shape[:1]) and len(t) != n:
            found["an argument", i] = t
    return {
        what
        if isinstance(what, str)
        else what[0] + ("" if not what[1] else f" ({what[1]})"): t.detach().clone()
        for what, t in found.items()
        if t.is_floating_point() and not t.requires_grad
    }


class LossCompany:
    """Whether an example's loss is its own: the same alone, in part of a batch, and reordered."""

    def __init__(self):
        self.calls = 0
        self._fixed: Any = {}

    def check(self, unreduced, args, kwargs, losses):
        """Refuse a criterion that mixes examples; looked at in the calls 1, 2, 4, 8, ..."""
        n = len(losses)
        self.note(getattr(unreduced, "criterion", unreduced), args, kwargs, n)
        if n < 2 or losses.device.type == "meta":
            return
        self.calls += 1
        if self.calls & (self.calls - 1) == 0:
            alone = torch.linspace(0, n - 1, 8).round().long().unique().split(1)
            parts = [*alone, torch.arange(n - 1, -1, -1), torch.arange(0, n, 2)]
            if check_loss(unreduced, args, losses, kwargs, parts, "criterion"):
                refuse_loss(name="criterion")

    def note(self, criterion, args, kwargs, n):
        """Warn, once, where a number that is of no example, as a weight of each class, has changed
        since the last call: the loop may have made it of the batch, and then an example moves the
        weight of the others.
        """
        before = self._fixed
        self._fixed = None if self._fixed is None else _fixed(criterion, args, kwargs, n)
        for what, value in (self._fixed or {}).items():
            old = before.get(what, value)
            if (
                old is not value
                and old.shape == value.shape
                and not on_accelerator(value)
                and not torch.equal(old, value)
            ):
                self._fixed = None
                warnings.warn(
                    f"criterion must weigh every batch alike, but {what} has changed since the "
                    "step before: if it is made of the batch, as weights of the classes in it, one "
                    "example moves what others contribute and no epsilon holds",
                    RuntimeWarning,
                    stacklevel=5,
                )
                break


class PerExampleCriterion:
    """A criterion of the user's, called without reduction; the mean (or sum) is made here, of one
    loss an example.
    """

    def __init__(self, criterion, watch, loss_reduction):
        self.criterion = Unreduced(criterion)
        self._watch = watch
        self.loss_reduction = loss_reduction
        self._company = LossCompany()

    def __call__(self, *args, **kwargs):
        losses = self.losses(*args, **kwargs)
        if self._watch is not None and losses.requires_grad and torch.is_grad_enabled():
            self.note(args, kwargs, losses)
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()

    def losses(self, *args, **kwargs):
        """One number an example, (n,)."""
        try:
            return self.criterion(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"criterion must take the module's outputs and the targets, but: {error}"
            ) from error

    def note(self, args, kwargs, losses):
        """What the backward pass must bring, and (at first, now and then) whose loss is whose."""
        note_call(self._watch, self.criterion, args, kwargs, losses, self.loss_reduction)
        self._company.check(self.criterion, args, kwargs, losses)


def note_call(watch, unreduced, args, kwargs, losses, loss_reduction):
    """Note a call of the criterion with the pass whose outputs it was given.

    Raises:
        ValueError: outputs that are not the module's, as it put them out.
    """
    places, one = {}, None
    for one in watch.passes():
        places = {}
        for number, t in enumerate(tree_flatten((args, kwargs))[0]):
            if torch.is_tensor(t) and t.requires_grad:
                source = next(
                    (j for j, o in enumerate(one.outputs) if _within(t, o.tensor, len(losses))),
                    None,
                )
                if source is None:
                    places = None
                    break
                places[number] = source
        if places:
            break
    batch = watch.handed_out
    if not places or one is None:
        raise ValueError(
            "criterion must be called with the module's outputs as they are, or views of them with "
            "the same examples along the first axis: what the loop computes from them first "
            "belongs into the criterion"
        )
    if batch is not None and len(losses) != len(batch):
        raise ValueError(
            f"a batch must be what the loader handed out last, {len(batch)} examples, but the "
            f"criterion gives {len(losses)} losses: call it with the examples along the first axis"
        )
    leaves, spec = tree_flatten((args, kwargs))
    kept = [t.detach() if torch.is_tensor(t) else t for t in leaves]
    views = {
        number: (t.size(), t.stride(), t.storage_offset())
        for number, t in enumerate(leaves)
        if number in places
    }
    offsets = [o.tensor.storage_offset() for o in one.outputs]

    def again(outputs):
        parts = list(kept)
        for number, source in places.items():
            size, stride, offset = views[number]
            parts[number] = outputs[source].as_strided(
                size, stride, offset - offsets[source] + outputs[source].storage_offset()
            )
        own_args, own_kwargs = tree_unflatten(parts, spec)
        found = unreduced(*own_args, **own_kwargs)
        return found.mean() if loss_reduction == "mean" else found.sum()

    one.calls.append(again)


def _within(t, output, n):
    """Whether a tensor is an output, or a view of it in which the examples are the same."""
    if (
        t.layout is not torch.strided
        or t.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
    ):
        return False
    if t.ndim and output.ndim and n > 1:
        return len(t) == n and any(
            s == n and t.stride(0) == output.stride(a) for a, s in enumerate(output.shape)
        )
    return True
