r"""Is the loss that the loop backpropagates a mean (or a sum) of losses of which each depends on one example?

Per-example gradients are those of per-example losses.  With class weights, `F.cross_entropy(outputs, y, weight=w)`
divides by the weights of the batch; with `ignore_index` it divides by the batch's tokens; a contrastive loss compares
examples.  Then one example moves what all others contribute, and no clip norm bounds it.  So every backward pass is
compared with one that is known:

* Without a criterion, the gradient that arrives at the module's outputs must be that of a standard loss of these
  outputs and of the loader's batch, taken example by example and averaged over the batch (or summed, with
  loss_reduction="sum"): `standard_losses` lists them.
* With a criterion, the engine calls it without reduction, and the gradient must be that of its mean, or sum, of one
  number an example.  With the first batches, and at calls 2, 4, 8, ... after, it is proved that an example's loss is
  the same alone, in a part of the batch and in another order.
* What the parameters get is what these gradients send to them: looked at in batches 1, 2, 4, 8, ..., for a loss of what
  a hook took from inside of the module comes back to no output.  And `grad_sample` is at the step what the backward
  pass left.

That takes half to three quarters of a millisecond of processor time a step (`benchmarks/losses.py`): 10 to 14% of one
of a linear model in batches of 512, and less than can be measured of one of a small CNN or a transformer.

What differs is refused before the step.  On a GPU only the first batch is looked at at once; from then on a gradient
that differs makes a step of noise alone, and is said when the engine looks (`Following.look`).
"""

import contextlib
import functools
import inspect
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .._devices import autocasts, is_away
from .outputs import map_tensors

_WAYS_OUT = (
    "pass the loss to the engine, criterion=..., and use the criterion that it returns; or trust_loss=True, if you "
    "know that it is a {reduction} of losses of which each depends on one example: if one does not, no epsilon holds"
)


def _wrapped(t):
    inside: Any = torch._C
    return inside._functorch.is_functorch_wrapped_tensor(t)  # in vmap, grad and the like


def _learns(t):
    return torch.is_tensor(t) and t.requires_grad and t.is_floating_point() and not t.is_leaf and not _wrapped(t)


class _Output:
    """A tensor that a pass put out: its numbers, and what comes back to it."""

    def __init__(self, tensor):
        self.tensor, self._version = tensor.detach(), tensor._version
        #: The gradient that the loop's loss sends to it; that which arrives inside of the module, by its own loss too.
        self.direct = self.total = None

    def axes(self, n):
        """Along which the examples may be; none for a number of the whole batch."""
        return [axis for axis, size in enumerate(self.tensor.shape[:2]) if size == n]

    @property
    def overwritten(self):
        return self.tensor._version != self._version


class Pass:
    """A forward pass of the module: what it put out, and what a criterion made of it."""

    def __init__(self, batch):
        self.batch, self.outputs, self.calls = batch, [], []
        self.arrived = False


class LossWatch:
    """Compares each backward pass with that of losses that are known to be per example.

    Args:
        hooks: what Opacus made of the module; watched: what the loop calls.
        noted: the data set that notes what it handed out, with the batch that was made of it (`Noted`).
        loss_reduction: as in the engine.
        busy: called, it says whether a proof is under way, whose passes are none of the loop's.
        own_loss: called, it says what the proof has against a number that the module itself puts out; None for nothing.
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
        # Batches that were looked at, and the last one; whether a backward pass is under way, what its outputs send to
        # each parameter, beside what was there, and what it left; whether anything else reached them.
        self._batches, self._looked_at, self._under_way, self._around = 0, None, False, False
        self._sent: dict[torch.Tensor, Any] | None = None
        self._left: dict[torch.Tensor, Any] | None = None
        # In ghost mode there is no gradient before the clipped one, and by expanded weights there is no other.
        self._compares_sums = hasattr(hooks, "hooks_enabled") and not hasattr(hooks, "NORM_SAMPLERS")
        self._depth, self._beside = 0, None  # passes of the module under way; a layer that was used without one
        watched.register_forward_pre_hook(self._begin)
        watched.register_forward_hook(self._note)
        watched.register_forward_hook(self._end, always_call=True)
        inner = hooks._module
        for name, layer in inner.named_modules():
            if layer is not watched and any(p.requires_grad for p in layer.parameters(recurse=False)):
                layer.register_forward_hook(functools.partial(self._note_layer, name or "module"))

    def __getstate__(self):
        return {"_hooks": None, "_depth": 0, "_compares_sums": False}  # a copy of the module is none of this training's

    # What goes forward and comes back.

    def _begin(self, module, args):
        self._depth += 1

    def _end(self, module, args, outputs):
        self._depth -= 1

    def _note_layer(self, name, layer, args, outputs):
        """Outside of a pass of the module nothing may come back to its layers."""
        if self._hooks is None or self._depth or not torch.is_grad_enabled() or self._busy():
            return
        if layer.training and torch.is_tensor(outputs) and _learns(outputs):
            outputs.register_hook(functools.partial(self._arrives_beside, name, self._noted.handed_out))

    def _arrives_beside(self, name, batch, gradient):
        if getattr(self._hooks, "hooks_enabled", True):
            self._beside = name, batch

    def _note(self, module, args, outputs):
        counts = module.training or not hasattr(self._hooks, "hooks_enabled")
        if self._hooks is None or not counts or not torch.is_grad_enabled() or self._busy():
            return None
        one, batch = Pass(self._noted.handed_out), self._noted.handed_out
        if batch is not self._looked_at:
            self._looked_at, self._batches = batch, self._batches + 1

        def watched(tensor):
            output = _Output(tensor)
            one.outputs.append(output)
            tensor.register_hook(functools.partial(self._arrives, one, output, "total"))
            seen = tensor.view_as(tensor)  # what comes back from the loop alone, and not from the module's own loss
            seen.register_hook(functools.partial(self._arrives, one, output, "direct"))
            seen.register_hook(functools.partial(self._follows, tensor))
            return seen.view_as(seen)  # at which hooks of the loop's own come first

        exchanged = map_tensors(outputs, watched, _learns)
        if one.outputs:
            self._recent = [ref for ref in self._recent if (old := ref()) is not None and old.batch is batch]
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

    def _follows(self, tensor, gradient):
        """Note what this gradient of an output sends to the parameters, now and then: nothing else may reach them."""
        due = self._batches & (self._batches - 1) == 0  # 1, 2, 4, 8, ...
        if not (due and self._compares_sums and self._hooks.hooks_enabled) or gradient.device.type == "meta":
            return
        if self._sent is None:
            self._sent = {p: (torch.zeros_like(p), None if p.grad is None else p.grad.clone()) for p in self._trained}
        self._hooks.hooks_enabled = False
        try:
            found = torch.autograd.grad(tensor, self._trained, gradient, retain_graph=True, allow_unused=True)
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
        sent, self._sent = self._sent, None
        for p, (expected, before) in (sent or {}).items():
            if not self._compares_sums or p.grad is None:
                continue
            found = p.grad.detach().to_dense() - (0 if before is None else before)
            off, size = (found - expected).double().norm(), expected.double().norm()
            if not off <= 10 * _rounding(p.dtype) * size + 1e-6 and bool(found.isfinite().all()):
                self._around = True

    def _check_left(self):
        """Gradients of the parameters are those that came through the outputs, as the backward pass left them."""
        if self._around:
            raise ValueError(
                "loss must be made of the outputs of the module that the engine returned, but a gradient reached its "
                "weights by another way, as of what a hook took from inside of it: put out what the loss needs; "
                + self._ways_out()
            )
        for p, versions in (self._left or {}).items():
            if versions is not None and _versions(p) != versions:
                raise ValueError(
                    "grad_sample must stay as the backward pass left it, but it was changed before the step: what an "
                    "example contributes must not depend on others; leave clipping and scaling to the engine"
                )

    def passes(self):
        """Forward passes over the batch at hand whose outputs are still there."""
        found = (ref() for ref in self._recent)
        return [one for one in found if one is not None and one.batch is self._noted.handed_out]

    # What must hold of it.

    def check(self):
        """Refuse a step whose gradients are not those of per-example losses.

        Raises:
            ValueError: naming what the loss looks like, and the ways out.
        """
        batch = self._noted.handed_out
        passes, self._arrived = [one for one in self._arrived if one.batch is batch], []
        if self._beside is not None and self._beside[1] is batch:
            raise ValueError(
                f"loss must be made of the outputs of the module that the engine returned, but a gradient came back to "
                f"its layer {self._beside[0]!r} that was called by itself; " + self._ways_out()
            )
        self._check_left()
        if not batch or len(batch) == 1 and not self.criterion:
            return  # a loss of one example mixes nothing
        if not passes:
            if self._checked is not batch:
                raise ValueError(
                    "loss must be made of the outputs of the module that the engine returned, called with the loader's "
                    "batch, but no gradient came back to them; " + self._ways_out()
                )
            return
        self._checked = batch
        device = passes[0].outputs[0].tensor.device
        if device.type == "meta":
            return
        with (
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext(),
        ):
            for one in passes:
                self._compare(one, len(batch), len(passes))

    def _ways_out(self):
        return _WAYS_OUT.format(reduction="mean" if self._mean else "sum")

    def _compare(self, one, n, count):
        if any(output.overwritten and output.total is not None for output in one.outputs):
            raise ValueError(
                "loss must be made of the module's outputs as they are, but the loop changes the module's outputs in "
                "place: what came back to them cannot be compared; " + self._ways_out()
            )
        if self.criterion:
            self._compare_calls(one, n, count)
            return
        inside = [o for o in one.outputs if o.direct is not None]
        if not inside:
            raise ValueError(
                "loss must be made of the outputs of the module as it put them out, but the gradient came back around "
                "them; " + self._ways_out()
            )
        scalars = [o for o in inside if not o.axes(n)]
        if scalars:
            # The module's own loss: what it sends to the other outputs must be a standard loss of theirs.
            others = [o for o in one.outputs if o.axes(n) and o.total is not None]
            problems = [self._standard(output, output.total, n, count) for output in others]
            if self._own_loss() is not None:
                problem = self._own_loss()
            elif None in problems:
                problem = None
            elif not problems:
                problem = "no output of an example that it is made of is put out beside it"
            else:
                problem = next((said for said in problems if "looks like" in str(said)), problems[0])
            if problem is not None:
                raise ValueError(
                    "loss must be a mean of losses of which each depends on one example, but the loop backpropagates a "
                    f"number that the module itself puts out for the whole batch (its own loss): {problem}; take the "
                    "loss of its outputs instead, or " + self._ways_out()
                )
        for output in inside:
            if not any(output is o for o in scalars):
                problem = self._standard(output, output.direct, n, count)
                if problem is not None:
                    raise ValueError(
                        f"loss must be a {'mean' if self._mean else 'sum'} of losses of which each depends on one "
                        f"example, but {problem}; " + self._ways_out()
                    )

    def _standard(self, output, gradient, n, count):
        """None if a standard loss sends this gradient to the output, else what is seen, in words."""
        problems = []
        for axis in output.axes(n):
            out, own = (_precise(t.movedim(axis, 0)) for t in (output.tensor, gradient))
            if (problem := self._compare_with_standard(output, out, own, n, count)) is None:
                return None
            problems.append(problem)
        return problems[0]

    def _compare_with_standard(self, output, out, gradient, n, count):
        scale = 1 / n if self._mean else 1.0
        bound = _rounding(output.tensor.dtype)
        if self._last is not None:
            found = _gradient(self._last, out, self._noted.batch)
            if found is not None:
                fits = _fits(gradient, scale * found, bound, scale)
                if is_away(out):
                    self.spoilt = self.spoilt | ~fits
                    return None
                if fits or (count > 1 and _fits(count * gradient, scale * found, bound, scale)):
                    return None
        best = None
        for loss in standard_losses(out, gradient / scale, self._noted.batch):
            found = _gradient(loss, out, self._noted.batch)
            if found is None:
                continue
            for times in {1, count}:
                if _fits(times * gradient, scale * found, bound, scale):
                    self._last = loss
                    return None
            best = best or _resemblance(loss, gradient / scale, found, bound, n, self._mean)
        for _, value in _targets(self._noted.batch, n):
            if value.ndim == 1 and out.shape[1:].numel() == 1:
                crossed = 2 * (out.reshape(-1, 1) - value.to(out)).mean(1)
                if _fits(gradient.reshape(n, 1) / scale, crossed[:, None], bound, 1.0):
                    best = (
                        f"each of the outputs, {tuple(out.shape)}, is compared with the targets of all examples, "
                        f"{tuple(value.shape)}, by broadcasting: give both the same shape"
                    )
        return best or (
            "the gradient that reaches the module's outputs is that of no loss that is known to be so (cross entropy, "
            "binary cross entropy, squared, absolute and Huber errors and others, of the loader's batch)"
        )

    def _compare_calls(self, one, n, count):
        """What comes back must be what the criterion's losses send."""
        if not one.calls:
            raise ValueError(
                "loss must come from the criterion that the engine returned, but a gradient came back that did not go "
                "through it: use that criterion for every loss that is backpropagated"
            )
        leaves = [_leaf(output.tensor) for output in one.outputs]
        total = sum(call(leaves) for call in one.calls)
        expected = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)  # pyright: ignore
        for output, found in zip(one.outputs, expected):
            if output.direct is None and not bool(found.any()):
                continue
            gradient = torch.zeros_like(found) if output.direct is None else output.direct.to(found.dtype)
            scale = 1 / n if self._mean else 1.0
            bound = _rounding(output.tensor.dtype)
            fits = _fits(gradient, found, bound, scale)
            if is_away(gradient) and self._last:
                self.spoilt = self.spoilt | ~fits
            elif not fits and not (count > 1 and _fits(count * gradient, found, bound, scale)):
                factor = _common_factor(gradient.flatten(), found.flatten(), bound)
                seen = "another gradient came back to the module's outputs than its losses send"
                raise ValueError(
                    "loss must be what the criterion that the engine returned gives, but "
                    + (seen if factor is None else f"it {_scaled(factor, n, self._mean)}")
                    + "; leave it as it is, and add nothing to it"
                )
        self._last = True


def _versions(p):
    """Which tensors hold a parameter's per-example gradients, and how often they were written to; None without."""
    found = getattr(p, "grad_sample", None)
    if found is None:
        return None
    return [(id(t), t._version) for t in (found if isinstance(found, list) else [found])]


# Losses of one example each.


def _precise(t):
    return t if t.dtype == torch.float64 else t.float()


def _rounding(dtype):
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 5e-2)


def _gradient(loss, out, batch):
    """Of the sum of (n,) losses by the outputs; None where there is no such loss of this batch."""
    leaf = out.detach().requires_grad_()
    try:
        losses = loss(leaf, batch)
        if losses is None or losses.shape != out.shape[:1] or not losses.requires_grad:
            return None
        return torch.autograd.grad(losses.sum(), leaf)[0]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _fits(gradient, expected, bound, scale):
    """Whether each example's gradient is the expected one, up to rounding; of what is not finite none is."""
    difference, size = (t.flatten(1).abs().amax(1) for t in (gradient - expected, expected))
    close = difference <= bound * size + bound / 50 * scale
    return (close | ~gradient.flatten(1).isfinite().all(1) & ~expected.flatten(1).isfinite().all(1)).all()


def _ratios(gradient, expected, bound):
    """(n,) factors by which an example's gradient is the expected one, nan where that is 0; None if it is not so."""
    a, b = gradient.flatten(1).double(), expected.flatten(1).double()
    squares = b.square().sum(1)
    factors = torch.where(squares > 1e-20, (a * b).sum(1) / squares.clamp(min=1e-300), torch.nan)
    left = (a - factors.nan_to_num(0.0)[:, None] * b).abs().amax(1)
    sizes = a.abs().amax(1)
    alike = (left <= 3 * bound * sizes + bound / 50) & ~(factors < 0)
    return factors if bool(alike.all()) and bool((factors > 0).any()) else None


def _common_factor(gradient, expected, bound):
    factors = _ratios(gradient[None], expected[None], bound)
    return None if factors is None else float(factors[0])


def _power_of_two(factor):
    return factor >= 8 and abs(torch.log2(torch.tensor(factor)).item() % 1) < 1e-3


def _scaled(factor, n, mean):
    """In words, what a common factor of all examples comes of."""
    if _power_of_two(factor) and abs(factor - n) > 1e-2:
        return (
            f"is {factor:g} times what it should be, as by a torch.amp.GradScaler, which Opacus does not know: "
            "gradients would be clipped as if they were so much longer; leave it out (bfloat16 needs none)"
        )
    hint = ""
    if abs(factor / n - 1) < 1e-2 and mean:
        hint = ", as by a sum over the batch; pass loss_reduction='sum', or take the mean"
    elif abs(factor * n - 1) < 1e-2 and not mean:
        hint = ", as by a mean over the batch; pass loss_reduction='mean', or take the sum"
    return (
        f"is {factor:g} times what it should be in a batch of {n}{hint}: leave it unscaled, and divide by nothing "
        "of the batch"
    )


def _resemblance(loss, gradient, found, bound, n, mean):
    """What a loss looks like that is a standard one up to a positive factor of each example; None if it is not."""
    factors = _ratios(gradient, found, bound)
    if factors is None:
        return None
    known = factors[~factors.isnan()]
    if float(known.max() - known.min()) <= 10 * bound * float(known.max()):
        return f"it looks like {loss.name} that {_scaled(float(known.mean()), n, mean=mean)}"
    if loss.of_outputs_alone or gradient[0].numel() == 1 and loss.classes is None:
        return None  # of one number each, every gradient is a multiple
    if loss.tokens:
        return (
            f"it looks like {loss.name} averaged over all tokens of the batch, so that an example with many moves the "
            "weight of the others; average over each example's own tokens first"
        )
    if bool((known == 0).any()):
        return (
            f"it looks like {loss.name} that leaves out some examples (ignore_index) and divides by the number of the "
            "others"
        )
    groups = (
        [] if loss.classes is None else [factors[(loss.classes == c) & ~factors.isnan()] for c in loss.classes.unique()]
    )
    if groups and all(len(g) < 2 or float(g.max() - g.min()) <= 10 * bound * float(g.max()) for g in groups):
        return (
            f"it looks like {loss.name} with class weights, which divides by the weights of the batch, so that one "
            "example of a rare class moves the weight of all others"
        )
    return f"it looks like {loss.name} with another weight for each example, which may depend on the others"


class Standard:
    """A loss of one example each, `f(outputs, target) -> (n, ...)`, averaged or summed over an example's own numbers.

    target: called with the loader's batch and the device, it gives the target, so that the loss can be taken of the
    next batch as well.
    """

    def __init__(self, name, f, target, *, classes=None, tokens=False):
        self.name, self._f, self._target, self.classes, self.tokens = name, f, target, classes, tokens

    @property
    def of_outputs_alone(self):
        return self._target is None

    def __call__(self, out, batch):
        target = None if self._target is None else self._target(batch, out.device)
        return self._f(out) if target is None else self._f(out, target)


def _own_mean(losses, counted=None):
    losses = losses.flatten(1)
    if counted is None:
        return losses.mean(1)
    counted = counted.flatten(1)
    return (losses * counted).sum(1) / counted.sum(1).clamp(min=1)


def _own_sum(losses, counted=None):
    return losses.flatten(1).sum(1) if counted is None else (losses * counted).flatten(1).sum(1)


def _targets(batch, n):
    """Tensors of the loader's batch with n examples: (how to find it in such a batch, itself)."""
    leaves, _ = tree_flatten(batch)
    for number, leaf in enumerate(leaves):
        if not torch.is_tensor(leaf) or leaf.is_complex():
            continue
        for axis in (axis for axis, size in enumerate(leaf.shape[:2]) if size == n):

            def target(batch, device, number=number, axis=axis):
                return tree_flatten(batch)[0][number].detach().movedim(axis, 0).to(device, non_blocking=True)

            yield target, leaf.detach().movedim(axis, 0)


def standard_losses(out, gradient, batch):
    """Losses of one example each of these outputs (n, ...) and a batch, those first that are used most.

    `gradient` (that of the sum of the losses) shows what a target value's losses are left out by (`ignore_index`), and
    how much labels are smoothed: a value, and a number of two digits, are looked for that explain it.
    """
    found = list(_targets(batch, len(out)))
    for target, value in found:
        if not (value.is_floating_point() or value.dtype == torch.bool):
            yield from _of_classes(out, gradient, target, value.to(out.device))
    for target, value in found:
        yield from _of_numbers(out, target, value)
    for name, sign in (("the outputs", 1.0), ("the outputs, negated", -1.0)):
        for reduce, kind in ((_own_mean, "mean"), (_own_sum, "sum")):
            yield Standard(f"the {kind} of {name}", lambda o, r=reduce, s=sign: s * r(o.reshape(len(o), -1)), None)


#: How classes may lie in the outputs (n, ...), and which positions have targets.
_LAYOUTS = {
    "": lambda o, t: (o, t),
    " of the last axis": lambda o, t: (o.movedim(-1, 1), t),
    " of the next token": lambda o, t: (o[:, :-1].movedim(-1, 1), t[:, 1:]),
}


def _of_classes(out, gradient, target, value):
    if out.ndim < 2:
        return
    squeezed = value.ndim > 1 and value.shape[1:].numel() == 1 and out.ndim == 2
    for layout, arrange in _LAYOUTS.items():

        def arranged(o, t, arrange=arrange):
            return arrange(o, t.reshape(len(t)) if squeezed else t)

        if layout and out.ndim < 3:
            continue
        try:
            shaped, t = arranged(out, value)
            sent, _ = arranged(gradient, value)
        except IndexError:
            continue
        if shaped.shape[:1] + shaped.shape[2:] != t.shape:
            continue
        quiet = ~sent.bool().any(1)  # positions to which nothing is sent
        ignored = [-100]
        for v in t[quiet].unique()[:4].tolist():
            if v != -100 and bool(quiet[t == v].all()):
                ignored.append(v)
        rest = [v for v in t.unique().tolist() if not 0 <= v < shaped.shape[1]]
        tokens = t.ndim > 1
        for v in ignored:
            if any(other != v for other in rest):
                continue
            smoothing = _smoothing(shaped, sent, t, v)
            for name, raw in (
                ("cross entropy", F.cross_entropy),
                ("the negative log likelihood", F.nll_loss),
                *(
                    [
                        (
                            f"cross entropy with labels smoothed by {smoothing:g}",
                            functools.partial(F.cross_entropy, label_smoothing=smoothing),
                        )
                    ]
                    if smoothing
                    else []
                ),
            ):
                for reduce, kind in (
                    ((_own_mean, ""), (_own_sum, ", summed over an example's tokens")) if tokens else ((_own_mean, ""),)
                ):

                    def losses(o, t, raw=raw, reduce=reduce, v=v, arranged=arranged):
                        o, t = arranged(o, t)
                        each = raw(o, t.long(), reduction="none", ignore_index=v)
                        return reduce(each.reshape(len(each), -1), (t != v).reshape(len(t), -1))

                    yield Standard(name + layout + kind, losses, target, classes=None if tokens else t, tokens=tokens)
    if out.ndim == 2 and value.shape[:1].numel() == value.numel() and value.numel():
        k = out.shape[1]
        if 0 <= int(value.min()) and int(value.max()) < k and k > 1:

            def one_hot(value):
                return F.one_hot(value.reshape(-1).long(), k)

            yield from _of_numbers(out, lambda batch, device: one_hot(target(batch, device)), one_hot(value))


def _smoothing(out, sent, t, ignored):
    """By how much labels are smoothed in a cross entropy that sends this, to two digits; 0 if they are not."""
    k = out.shape[1]
    counted = (t != ignored) & (t >= 0) & (t < k)
    if k < 2 or not bool(counted.any()):
        return 0.0
    labels = F.one_hot(t.clamp(0, k - 1).long(), k).movedim(-1, 1)
    plain, slope = out.softmax(1) - labels, labels - 1 / k
    each = ((sent * out.shape[2:].numel() - plain) * slope).sum(1) / slope.square().sum(1)
    value = round(float(each[counted].median()), 2)
    return value if 0 < value < 1 else 0.0


def _of_numbers(out, target, value):
    rows = out.shape[1:].numel()
    if value.shape[1:].numel() != rows or not rows:
        return

    def both(f, reduce):
        return lambda o, t: reduce(f(o.reshape(len(o), -1), t.reshape(len(t), -1).to(o.dtype)))

    def logistic(o, t):
        return F.binary_cross_entropy_with_logits(o, t, reduction="none")

    functions = {
        "binary cross entropy with logits": logistic,
        "the squared error": lambda o, t: (o - t).square(),
        "half the squared error": lambda o, t: (o - t).square() / 2,
        "the absolute error": lambda o, t: (o - t).abs(),
        "the Huber loss": lambda o, t: F.huber_loss(o, t, reduction="none"),
        "the logistic loss of signs": lambda o, t: F.soft_margin_loss(o, t, reduction="none"),
        "the hinge loss of signs": lambda o, t: (1 - o * t).clamp(min=0),
        "the hinge loss": lambda o, t: (1 - o * (2 * t - 1)).clamp(min=0),
        "the Poisson loss": lambda o, t: o.exp() - t * o,
        "the Poisson loss of rates": lambda o, t: o - t * torch.log(o + 1e-8),
    }
    if bool(((out >= 0) & (out <= 1)).all()):
        functions["binary cross entropy"] = lambda o, t: F.binary_cross_entropy(o, t, reduction="none")
    classes = value.reshape(-1) if rows == 1 and not value.is_floating_point() else None
    for name, f in functions.items():
        for reduce, kind in ((_own_mean, ""), (_own_sum, ", summed over an example's numbers"))[: 2 if rows > 1 else 1]:
            yield Standard(name + kind, both(f, reduce), target, classes=classes)
    if rows > 1 and out.ndim == 2:
        yield Standard(
            "cross entropy with soft labels", lambda o, t: F.cross_entropy(o, t.to(o.dtype), reduction="none"), target
        )
        yield Standard(
            "the Kullback-Leibler divergence", lambda o, t: F.kl_div(o, t.to(o.dtype), reduction="none").sum(1), target
        )


# A criterion of the user's.


class Unreduced:
    """A criterion that gives one number an example, (n,), whatever its own reduction.

    Of several numbers of one example it takes the mean, or the sum where its own reduction is "sum"; what it ignores
    (`ignore_index`) does not count.
    """

    def __init__(self, criterion):
        if not callable(criterion):
            raise ValueError(f"criterion must be a module or function of outputs and targets, got {criterion!r}")
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
            raise ValueError(
                "criterion must give one number an example when it is called without reduction, (n,), got "
                f"{'one for the whole batch' if torch.is_tensor(losses) else type(losses).__name__}: give it a "
                "`reduction`, as torch.nn's losses have, or return the losses unreduced"
            )
        if losses.ndim == 1:
            return losses
        ignored, counted = self.ignore_index, None
        targets = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is not None and torch.is_tensor(targets) and targets.shape == losses.shape:
            counted = targets != ignored
        return (_own_sum if self._sums else _own_mean)(losses, counted)


def _takes_reduction(criterion):
    try:
        found = inspect.signature(criterion).parameters.get("reduction")
    except (TypeError, ValueError):
        return False
    return found is not None


class LossCompany:
    """Whether an example's loss is its own: the same alone, in a part of the batch, and in another order."""

    def __init__(self):
        self.calls = 0

    def due(self, n):
        if n < 2:
            return False
        self.calls += 1
        return self.calls & (self.calls - 1) == 0  # 1, 2, 4, 8, ...

    def check(self, unreduced, args, kwargs, losses, tolerance):
        n = len(losses)

        def of(rows):
            index = torch.tensor(rows, device=losses.device)

            def part(t):
                mine = torch.is_tensor(t) and t.ndim and len(t) == n
                return t.detach().index_select(0, index.to(t.device)) if mine else t

            with torch.no_grad():
                return unreduced(*tree_map(part, args), **tree_map(part, kwargs))

        rows = sorted({round(i * (n - 1) / 7) for i in range(8)})
        turned = list(range(n - 1, -1, -1))
        half = list(range(0, n, 2))
        for company, seen in [("alone", [row]) for row in rows] + [("in another order", turned), ("with fewer", half)]:
            found, own = of(seen), losses.detach()[seen]
            if found.shape != own.shape or not torch.allclose(found, own, rtol=tolerance, atol=1e-6, equal_nan=True):
                if not bool(found.isfinite().all()):
                    continue
                raise ValueError(
                    "criterion must give each example a loss of its own, but it depends on the rest of the batch: "
                    f"{own[:8].tolist()} together, {found[:8].tolist()} {company}"
                )


class PerExampleCriterion:
    """A criterion of the user's, called without reduction; the mean (or sum) is made here, of one loss an example."""

    def __init__(self, criterion, watch, loss_reduction, tolerance):
        self.criterion, self._watch, self.loss_reduction = Unreduced(criterion), watch, loss_reduction
        self._company, self._tolerance = LossCompany(), tolerance

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
            raise ValueError(f"criterion must take the module's outputs and the targets, but: {error}") from error

    def note(self, args, kwargs, losses):
        """What the backward pass must bring, and (the first times, and now and then) whose loss is whose."""
        note_call(self._watch, self.criterion, args, kwargs, losses, self.loss_reduction)
        if self._company.due(len(losses)) and losses.device.type != "meta":
            self._company.check(self.criterion, args, kwargs, losses, self._tolerance(losses))


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
                source = next((j for j, o in enumerate(one.outputs) if _within(t, o.tensor, len(losses))), None)
                if source is None:
                    places = None
                    break
                places[number] = source
        if places:
            break
    batch = watch._noted.handed_out
    if not places or one is None:
        raise ValueError(
            "criterion must be called with the module's outputs as they are, or views of them with the same examples "
            "along the first axis: what the loop computes from them first belongs into the criterion"
        )
    if batch is not None and len(losses) != len(batch):
        raise ValueError(
            f"a batch must be what the loader handed out last, {len(batch)} examples, but the criterion gives "
            f"{len(losses)} losses: call it with the examples along the first axis"
        )
    leaves, spec = tree_flatten((args, kwargs))
    kept = [t.detach() if torch.is_tensor(t) else t for t in leaves]
    views = {number: (t.size(), t.stride(), t.storage_offset()) for number, t in enumerate(leaves) if number in places}
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
    if t.layout is not torch.strided or t.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
        return False
    if t.ndim and output.ndim and n > 1:
        return len(t) == n and any(s == n and t.stride(0) == output.stride(a) for a, s in enumerate(output.shape))
    return True


def _leaf(tensor):
    """The same numbers, of at least float32, in the same places."""
    precise = _precise(tensor.detach())
    return (precise if precise.stride() == tensor.stride() else tensor.detach()).requires_grad_()
