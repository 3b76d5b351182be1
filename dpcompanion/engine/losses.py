r"""Is the loss that the loop backpropagates a mean (or sum) of losses of one example each?

Per-example gradients are those of per-example losses. With class weights, `F.cross_entropy(outputs,
y, weight=w)` divides by the weights of the batch; with `ignore_index` it divides by the batch's
tokens; a contrastive loss compares examples. Then one example moves what all others contribute, and
no clip norm bounds it. So every backward pass is compared with one that is known:

* Without a criterion, the gradient that arrives at the module's outputs must be that of a standard
  loss of these outputs and of the loader's batch, taken example by example and averaged over the
  batch (or summed, with loss_reduction="sum"): `dpcompanion.engine.standard` lists them.
* With a criterion (`dpcompanion.engine.criterion`), the engine calls it without reduction, and the
  gradient must be that of its mean, or sum, of one number an example. With the first batches, and
  at calls 2, 4, 8, ... after, it is proved that an example's loss is the same alone, in a part of
  the batch and in another order.
* What the parameters get is what these gradients send to them: looked at in batches 1, 2, 4, 8,
  ..., for a loss of what a hook took from inside of the module comes back to no output. And
  `grad_sample` is at the step what the backward pass left.

That takes about 0.3 ms of processor time a step of a linear model in batches of 512, 11 to 12% of
the step, and 0.5 ms, 21%, with a criterion, which is called twice (`benchmarks/losses.py`, where a
CNN and a transformer are timed, too).

What differs is refused before the step. On a GPU only the first batch is looked at at once; from
then on a gradient that differs makes a step of noise alone, and is said when the engine looks
(`Following.look`).
"""

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from dpcompanion._devices import autocasts, on_accelerator
from dpcompanion.engine.outputs import Output, Pass, is_learnt_from, map_tensors
from dpcompanion.engine.standard import (
    common_factor,
    fits_to,
    gradient_of,
    precise,
    resemblance,
    rounding,
    scaled,
    standard_losses,
    targets_of,
)

_WAYS_OUT = (
    "pass the loss to the engine, criterion=..., and use the criterion that it returns; or "
    "trust_loss=True, if you know that it is a {reduction} of losses of which each depends on one "
    "example: if one does not, no epsilon holds"
)


class LossWatch:
    """Compares each backward pass with that of losses that are known to be per example.

    Args:
        hooks: what Opacus made of the module; watched: what the loop calls.
        noted: the data set that notes what it handed out, with the batch that was made of it
            (`IndexRecorder`).
        loss_reduction: as in the engine.
        busy: called, it says whether a proof is under way, whose passes are none of the loop's.
        own_loss: called, it says what the proof has against a number that the module itself puts
            out; None for nothing.
        criterion: whether a criterion was given, through which every loss must come.
    """

    def __init__(self, hooks, watched, noted, *, loss_reduction, busy, own_loss, criterion):
        self._own_loss = own_loss
        self._hooks, self._noted, self._busy = hooks, noted, busy
        self._mean, self.criterion = loss_reduction == "mean", criterion
        self._recent: list[Any] = []
        self._arrived: list[Pass] = []
        self._checked: Any = None
        self._last: Any = None  # the standard loss that fitted last
        self.spoilt: Any = False  # on a device: whether a gradient did not fit
        self._trained = [p for p in hooks._module.parameters() if p.requires_grad]
        # Batches that were looked at, and the last one; whether a backward pass is under way, what
        # its outputs send to each parameter, beside what was there, and what it left; whether
        # anything else reached them.
        self._batches, self._looked_at, self._under_way, self._around = 0, None, False, False
        self._sent: dict[torch.Tensor, Any] | None = None
        self._left: dict[torch.Tensor, Any] | None = None
        self._sums: dict[torch.Tensor, Any] = {}
        # In ghost mode there is no gradient before the clipped one, and by expanded weights there
        # is no other.
        self._compares_sums = hasattr(hooks, "hooks_enabled") and not hasattr(
            hooks, "NORM_SAMPLERS"
        )
        # passes of the module under way; a layer that was used without one
        self._depth, self._beside = 0, None
        watched.register_forward_pre_hook(self._begin)
        watched.register_forward_hook(self._note)
        watched.register_forward_hook(self._end, always_call=True)
        inner = hooks._module
        for name, layer in inner.named_modules():
            if layer is not watched and any(
                p.requires_grad for p in layer.parameters(recurse=False)
            ):
                layer.register_forward_hook(functools.partial(self._note_layer, name or "module"))

    @property
    def handed_out(self):
        """The examples of the batch that the data set handed out last; None before the first."""
        return self._noted.handed_out

    def __getstate__(self):
        # a copy of the module is none of this training's
        return {"_hooks": None, "_depth": 0, "_compares_sums": False}

    # What goes forward and comes back.

    def _begin(self, module, args):
        self._depth += 1

    def _end(self, module, args, outputs):
        self._depth -= 1

    def _note_layer(self, name, layer, args, outputs):
        """Outside of a pass of the module nothing may come back to its layers."""
        if self._hooks is None or self._depth or not torch.is_grad_enabled() or self._busy():
            return
        if layer.training and torch.is_tensor(outputs) and is_learnt_from(outputs):
            outputs.register_hook(functools.partial(self._arrives_beside, name, self.handed_out))

    def _arrives_beside(self, name, batch, gradient):
        if getattr(self._hooks, "hooks_enabled", True):
            self._beside = name, batch

    def _note(self, module, args, outputs):
        counts = module.training or not hasattr(self._hooks, "hooks_enabled")
        if self._hooks is None or not counts or not torch.is_grad_enabled() or self._busy():
            return None
        one, batch = Pass(self.handed_out), self.handed_out
        if batch is not self._looked_at:
            self._looked_at, self._batches = batch, self._batches + 1

        def watched(tensor):
            output = Output(tensor)
            one.outputs.append(output)
            tensor.register_hook(functools.partial(self._arrives, one, output, "total"))
            # what comes back from the loop alone, and not from the module's own loss
            seen = tensor.view_as(tensor)
            seen.register_hook(functools.partial(self._arrives, one, output, "direct"))
            seen.register_hook(functools.partial(self._follows, tensor))
            return seen.view_as(seen)  # at which hooks of the loop's own come first

        exchanged = map_tensors(outputs, watched, is_learnt_from)
        if one.outputs:
            self._recent = [
                ref for ref in self._recent if (old := ref()) is not None and old.batch is batch
            ]
            self._recent.append(weakref.ref(one))
        return exchanged if one.outputs else None

    def _arrives(self, one, output, which, gradient):
        if not getattr(self._hooks, "hooks_enabled", True):
            return
        before = getattr(output, which)
        setattr(output, which, gradient.detach() if before is None else before + gradient)
        if not one.arrived:
            one.arrived = True
            self._arrived.append(one)
        if not self._under_way:
            self._under_way = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._goes_back)

    # What a backward pass leaves in the parameters.

    def _due(self):
        return self._batches & (self._batches - 1) == 0  # 1, 2, 4, 8, ...

    def _follows(self, tensor, gradient):
        """Note what this gradient of an output sends to the parameters, now and then: nothing else
        may reach them.
        """
        if (
            not (self._due() and self._compares_sums and self._hooks.hooks_enabled)
            or gradient.device.type == "meta"
        ):
            return
        if self._sent is None:
            self._sent = {
                p: (torch.zeros_like(p), None if p.grad is None else p.grad.clone())
                for p in self._trained
            }
        self._hooks.hooks_enabled = False
        try:
            found = torch.autograd.grad(
                tensor, self._trained, gradient, retain_graph=True, allow_unused=True
            )
        except RuntimeError:  # as of checkpoints within the module, which take no such look
            self._compares_sums = False
            return
        finally:
            self._hooks.hooks_enabled = True
        for p, part in zip(self._trained, found):
            if part is not None:
                self._sent[p][0].add_(part)

    def _goes_back(self):
        """At the end of a backward pass."""
        self._under_way = False
        self._left = {p: _versions(p) for p in self._trained}
        # What is written into `.data` has no version: now and then the sums are compared.
        self._sums = {p: _sums(p) for p in self._trained} if self._due() else {}
        sent, self._sent = self._sent, None
        for p, (expected, before) in (sent or {}).items():
            if not self._compares_sums or p.grad is None:
                continue
            found = p.grad.detach().to_dense() - (0 if before is None else before)
            off, size = (found - expected).double().norm(), expected.double().norm()
            if not off <= 10 * rounding(p.dtype) * size + 1e-6 and bool(found.isfinite().all()):
                self._around = True

    def _check_left(self):
        """Parameters' gradients are those that came through the outputs, as the pass left them."""
        if self._around:
            raise ValueError(
                "loss must be made of the outputs of the module that the engine returned, but a "
                "gradient reached its weights by another way, as of a penalty on weights, which "
                "belongs to the optimizer (weight_decay), or of what a hook took from inside: put "
                "out what the loss needs; " + self._ways_out()
            )
        for p, versions in (self._left or {}).items():
            changed = versions is not None and _versions(p) != versions
            if changed or versions and not all(map(torch.equal, _sums(p), self._sums.get(p, []))):
                raise ValueError(
                    "grad_sample must stay as the backward pass left it, but it was changed before "
                    "the step: what an example contributes must not depend on others; leave "
                    "clipping and scaling to the engine"
                )

    def passes(self):
        """Forward passes over the batch at hand whose outputs are still there."""
        found = (ref() for ref in self._recent)
        return [one for one in found if one is not None and one.batch is self.handed_out]

    # What must hold of it.

    def check(self):
        """Refuse a step whose gradients are not those of per-example losses.

        Raises:
            ValueError: naming what the loss looks like, and the ways out.
        """
        batch = self.handed_out
        passes, self._arrived = [one for one in self._arrived if one.batch is batch], []
        if self._beside is not None and self._beside[1] is batch:
            raise ValueError(
                "loss must be made of the outputs of the module that the engine returned, but a "
                f"gradient came back to its layer {self._beside[0]!r} that was called by itself, "
                "or in the module that the engine was given: call the returned one; "
                + self._ways_out()
            )
        if not batch:
            return  # and no gradient of a row, whether there was a way back or not
        self._check_left()
        if len(batch) == 1 and not self.criterion:
            return  # a loss of one example mixes nothing
        if not passes:
            if self._checked is not batch:
                raise ValueError(
                    "loss must be made of the outputs of the module that the engine returned, "
                    "called with the loader's "
                    "batch, but no gradient came back to them; " + self._ways_out()
                )
            return
        self._checked = batch
        device = passes[0].outputs[0].tensor.device
        if device.type == "meta":
            return
        with (
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False)
            if autocasts(device)
            else contextlib.nullcontext(),
        ):
            for one in passes:
                self._compare(one, len(batch), len(passes))

    def _ways_out(self):
        return _WAYS_OUT.format(reduction="mean" if self._mean else "sum")

    def _compare(self, one, n, count):
        if any(output.overwritten and output.total is not None for output in one.outputs):
            raise ValueError(
                "loss must be made of the module's outputs as they are, but the loop changes the "
                "module's outputs in "
                "place: what came back to them cannot be compared; " + self._ways_out()
            )
        if self.criterion:
            self._compare_calls(one, n, count)
            return
        inside = [o for o in one.outputs if o.direct is not None]
        if not inside:
            raise ValueError(
                "loss must be made of the outputs of the module as it put them out, but the "
                "gradient came back around "
                "them; " + self._ways_out()
            )
        scalars = [o for o in inside if not o.axes(n)]
        if scalars:
            # The module's own loss: what it sends to other outputs must be a standard loss of them.
            others = [o for o in one.outputs if o.axes(n) and o.total is not None]
            problems = [self._standard(output, output.total, n, count) for output in others]
            if self._own_loss() is not None:
                problem = self._own_loss()
            elif None in problems:
                problem = None
            elif not problems:
                problem = "no output of an example that it is made of is put out beside it"
            else:
                problem = next(
                    (said for said in problems if "looks like" in str(said)), problems[0]
                )
            if problem is not None:
                raise ValueError(
                    "loss must be a mean of losses of which each depends on one example, but the "
                    "loop backpropagates a number that the module itself puts out for the whole "
                    f"batch (its own loss): {problem}; take the "
                    "loss of its outputs instead, or " + self._ways_out()
                )
        for output in inside:
            if not any(output is o for o in scalars):
                problem = self._standard(output, output.direct, n, count)
                if problem is not None:
                    raise ValueError(
                        f"loss must be a {'mean' if self._mean else 'sum'} of losses of which each "
                        "depends on one "
                        f"example, but {problem}; " + self._ways_out()
                    )

    def _standard(self, output, gradient, n, count):
        """None if a standard loss sends the output this gradient, else what is seen, in words."""
        problems = []
        for axis in output.axes(n):
            out, own = (precise(t.movedim(axis, 0)) for t in (output.tensor, gradient))
            if (problem := self._compare_with_standard(output, out, own, n, count)) is None:
                return None
            problems.append(problem)
        return problems[0]

    def _compare_with_standard(self, output, out, gradient, n, count):
        scale = 1 / n if self._mean else 1.0
        bound = rounding(output.tensor.dtype)
        if self._last is not None:
            found = gradient_of(self._last, out, self._noted.batch)
            if found is not None:
                fits = fits_to(gradient, scale * found, bound, scale)
                if on_accelerator(out):
                    self.spoilt = self.spoilt | ~fits
                    return None
                if fits or (count > 1 and fits_to(count * gradient, scale * found, bound, scale)):
                    return None
        best = None
        for loss in standard_losses(out, gradient / scale, self._noted.batch):
            found = gradient_of(loss, out, self._noted.batch)
            if found is None:
                continue
            for times in {1, count}:
                if fits_to(times * gradient, scale * found, bound, scale):
                    self._last = loss
                    return None
            best = best or resemblance(loss, gradient / scale, found, bound, n, self._mean)
        for _, value in targets_of(self._noted.batch, n):
            if value.ndim == 1 and out.shape[1:].numel() == 1:
                crossed = 2 * (out.reshape(-1, 1) - value.to(out)).mean(1)
                if fits_to(gradient.reshape(n, 1) / scale, crossed[:, None], bound, 1.0):
                    best = (
                        f"each of the outputs, {tuple(out.shape)}, is compared with the targets of "
                        f"all examples, {tuple(value.shape)}, by broadcasting: give both the same "
                        "shape"
                    )
        if any(leaf is None for leaf in tree_flatten(self._noted.batch)[0]):
            best = (
                "a tensor of the loader's batch was written to, so that an example's target may "
                "come from those of others: make a new tensor, and give the engine your criterion"
            )
        return best or (
            "the gradient that reaches the module's outputs is that of no loss that is known to be "
            "so (cross entropy, binary cross entropy, squared and absolute errors, Huber's with "
            "delta 1 and others, of the loader's batch)"
        )

    def _compare_calls(self, one, n, count):
        """What comes back must be what the criterion's losses send."""
        if not one.calls:
            raise ValueError(
                "loss must come from the criterion that the engine returned, but a gradient came "
                "back that did not go through it: use that criterion for every loss that is "
                "backpropagated"
            )
        leaves = [_leaf(output.tensor) for output in one.outputs]
        total = sum(call(leaves) for call in one.calls)
        expected = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)  # pyright: ignore
        for output, found in zip(one.outputs, expected):
            if output.direct is None and not bool(found.any()):
                continue
            gradient = (
                torch.zeros_like(found) if output.direct is None else output.direct.to(found.dtype)
            )
            scale = 1 / n if self._mean else 1.0
            bound = rounding(output.tensor.dtype)
            fits = fits_to(gradient, found, bound, scale)
            if on_accelerator(gradient) and self._last:
                self.spoilt = self.spoilt | ~fits
            elif not fits and not (count > 1 and fits_to(count * gradient, found, bound, scale)):
                factor = common_factor(gradient.flatten(), found.flatten(), bound)
                seen = "another gradient came back to the module's outputs than its losses send"
                raise ValueError(
                    "loss must be what the criterion that the engine returned gives, but "
                    + (seen if factor is None else f"it {scaled(factor, n, self._mean)}")
                    + "; leave it as it is, and add nothing to it"
                )
        self._last = True


def _versions(p):
    """The tensors of a parameter's per-example gradients, and how often written to; or None."""
    found = getattr(p, "grad_sample", None)
    if found is None:
        return None
    return [(id(t), t._version) for t in (found if isinstance(found, list) else [found])]


def _sums(p):
    """Over examples, of a parameter's per-example gradients; NaN is left out, not compared."""
    found = getattr(p, "grad_sample", None)
    parts = found if isinstance(found, list) else [] if found is None else [found]
    return [t.detach().nan_to_num().sum(0) for t in parts if t.device.type != "meta"]


# Losses of one example each.


def _leaf(tensor):
    """The same numbers, of at least float32, in the same places."""
    found = precise(tensor.detach())
    return (found if found.stride() == tensor.stride() else tensor.detach()).requires_grad_()
