r"""Is each example's gradient, as Opacus finds it, its own? Proved with batches 1, 2, 4, 8, ...

Opacus looks at layers: it multiplies what goes into a layer with the gradient that comes back to
it. A module may do what that does not see: use a weight outside of its layer, or mix examples by a
function that is no layer. So before the first forward pass some examples of the batch are put
through the module together, by Opacus, and one by one, by plain autograd. What Opacus says of each
must be what autograd says of it alone; then norms are whole, and an example has no influence on the
gradient of another.

* Each is put through in three companies: alone, with a few others, and in the whole batch, at whose
  size the step is taken. The examples are those with the largest gradients among a probe that is
  spread over the batch. The loss is a random linear function of the outputs: no example is well
  fitted by it.
* One whose gradient alone is 0, or not finite, must be so in the whole batch too: the standard
  deviation of one row is no number, and of its difference from the mean nothing is left. Where
  hardly any other is in the probe, all of the batch are looked at.
* The gradient is compared in whole and parameter by parameter, each against its own length: what is
  off in a short part of it is off in full when it has grown.
* All is done twice, with the weights as they are and with weights nearby (and one of the few less),
  as by the trainer's proof (`dpcompanion.gradients.proof`), whose probe and tolerances these are:
  behind a weight of zero or nearly so, as in residual blocks at their start, a wrong gradient looks
  right.
* A module that draws at random is tried with 32 seeds, since it may mix some batches only: what it
  puts out for an example stays the same where the examples beside it are replaced.
* The gradients of a few must also stay as they are in the whole batch when those of all others are
  enlarged: a hook or a backward method of the module's own that clips them together does nothing
  until one of them is large, as that of an outlier.
* What the module puts out for one example is the same afterwards: it remembers no batch.
* Dropout is left out. The state of generators, buffers and gradients is afterwards what it was.

An example by itself has no company, so a proof takes a batch of two. It is made again with batches
2, 4, 8 and so on, since a module may do with some data what it does not with others, with a batch
of twice the size, and with the next batch when what says which code runs has changed
(`dpcompanion.gradients.states`): a layer that was in evaluation mode while the proof looked may do
anything when it wakes. Attributes that are numbers may count passes: at their changes 1, 2, 4, 8,
... it is made again. Without it no step is taken of more than one example: where inputs do not say
which rows are examples, it takes prove=False, and your word.
"""

import contextlib
import math
from typing import cast

import torch
import torch.nn.functional as F
from opacus.validators.errors import UnsupportedModuleError
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from dpcompanion._devices import whole_convolutions
from dpcompanion.engine.checks import check_trained, trainable
from dpcompanion.engine.layers import clear_notes, culprit
from dpcompanion.engine.outputs import Rows, numbers_in, parts_of, weighed
from dpcompanion.engine.shards import shards_of
from dpcompanion.gradients.checks import check_types
from dpcompanion.gradients.independence import DRAWS, alike
from dpcompanion.gradients.proof import COMPARED, LOUDER, largest, misfit, norms_of, probed, twice
from dpcompanion.gradients.states import State
from dpcompanion.gradients.tensors import added_up, tolerances
from dpcompanion.gradients.traces import buffers_kept, drawing_alike, next_draws
from dpcompanion.training import distributed

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


class Proof:
    """Waits before the forward pass of a module until it has proved what stands above.

    Args:
        hooks: what Opacus made of the module.
        watched: the module that the training loop calls.
        batch_first: whether inputs have the examples along their first axis, or else along their
            second.
        loss_reduction: "mean" or "sum", what the loop's loss makes of the examples' losses.
        ghost: whether Opacus finds norms only.
        batch_size: called, it gives the number of examples that the loader handed out last.
        own_loss: of a number that the module puts out for a whole batch (its own loss), None if the
            loop cannot use it; True if it may, whatever it is; False if its use is refused once it
            is known to mix examples.
    """

    #: Those whom an error ends, too.
    ranks = distributed.Ranks()

    def __init__(self, hooks, watched, *, batch_first, loss_reduction, ghost, batch_size, own_loss):
        self._hooks, self._watched, self._inner = hooks, watched, hooks._module
        self._dim = int(not batch_first)
        self._mean = loss_reduction == "mean"
        self._ghost = ghost
        self._batch_size = batch_size
        #: Whether the batch at hand waits for it; how many examples the largest had that did not.
        self.open, self._proved, self.busy = True, 0, False
        self.rows = 0  # of how many examples a pass of the proof is
        self._own_loss, self._trained = own_loss, trainable(self._inner)
        self._shards = shards_of(hooks)  # of a module that is whole while it is proved
        self._state = None  # in which it was proved
        self._batches = 1  # that were put through since, and the first
        #: What is known against the number that the module puts out; None where it is examples'.
        self.own_loss_mixes, self._numbers = None, False
        watched.register_forward_pre_hook(self._before, with_kwargs=True)

    def __getstate__(self):
        return {"busy": True}  # a copy of the module is none of this training's

    def _before(self, module, args, kwargs):
        if self.busy or not torch.is_grad_enabled():
            return
        # Opacus's hooks look away
        if not module.training and hasattr(self._hooks, "hooks_enabled"):
            return
        with self.ranks.together():
            if self._shards is None:
                looked = self._is_due() and self._look(args, kwargs)
            else:
                self._shards.rest()
                due = self._is_due()
                with self._shards.whole_where(due):
                    looked = due and self._look(args, kwargs)
            if looked:
                self._state = State(self._inner, 0 if self._state is None else self._state.changes)

    def _is_due(self):
        """Whether the batch at hand waits for a proof."""
        if not (n := self._batch_size()):
            return False
        check_trained(self._inner, self._trained)
        parameters = [p for p in self._inner.parameters() if p.requires_grad]
        under_way = any(getattr(p, "_forward_counter", 0) for p in parameters)
        if self._state is not None:
            if n > 1 and not under_way:
                self._batches += 1
            # Some data show what others do not: it is proved again with batches 2, 4, 8, ...
            again = n > 1 and not under_way and self._batches & (self._batches - 1) == 0
            if again or self._state.has_changed(self._inner):
                self.open, self._proved = True, 0
        return n >= 2 * self._proved and bool(parameters) and not under_way

    def _look(self, args, kwargs):
        """Prove it with this batch; whether there was something to look at."""
        self.open, self.busy = True, True
        parameters = [p for p in self._inner.parameters() if p.requires_grad]
        try:
            batch = Rows((args, kwargs), self._batch_size(), self._dim)
            if batch.found:
                with self._aside():
                    self._prove(batch, parameters)
        finally:
            self.busy = False
        return bool(batch.found)

    def _prove(self, batch, parameters):
        try:
            with whole_convolutions(parameters[0].device):
                self._prove_known(batch, parameters)
        except (ValueError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            cause = (
                "parameters that belong to no layer are differentiated with all that their module "
                "contains, which may then not be random: leave out dropout in it, or give these "
                "parameters a small module of their own"
                if "randomness" in str(error)
                else "the cause is unknown: try the module with a batch of that size, without the "
                "engine, then another grad_sample_mode ('hooks' takes most layers)"
            )
            raise UnsupportedModuleError(
                f"module must take {self.rows} example{'s' * (self.rows > 1)} of the batch by "
                f"themselves, forwards and backwards, but in {culprit(error, self._hooks)} there "
                f"was {type(error).__name__}: {error!s:.300}; {cause}"
            ) from error

    def _prove_known(self, batch, parameters):
        try:
            self._prove_outputs(batch, parameters)
        except UnsupportedModuleError as error:
            if not self._numbers or self._own_loss is not False:
                raise
            # Without it the module may be right; then the loop may take the loss of its outputs.
            self.own_loss_mixes = "it is no mean of the examples' own losses"
            self._clear()
            try:
                self._prove_outputs(batch, parameters)
            except UnsupportedModuleError:
                raise error from None

    def _outputs(self, value):
        """Those that a loss can be made of here."""
        found = [out for out in numbers_in(value) if out.requires_grad]
        self._numbers = any(not out.ndim for out in found)
        leaves_out = self._own_loss is None or self.own_loss_mixes is not None
        return [out for out in found if out.ndim or not leaves_out]

    def _prove_outputs(self, batch, parameters):
        norms = self._norms(batch, parameters)
        if not norms:
            return
        put_out, self._unlike = self._put_out(batch), False
        fit = [row for row in largest(norms, batch.n) if norms[row]]
        hardest, unfit = sorted(fit[:COMPARED]), [row for row in norms if row not in fit]

        def compare(rows):
            if rows:
                self._compare(batch, rows, rows, parameters)
            if len(hardest) < batch.n:
                self._compare(batch, list(range(batch.n)), hardest + unfit, parameters)

        # In the order of the batch, for a loader may have put the longest first.
        twice(parameters, compare, hardest, nearby=hardest[:-1] or hardest)
        if few := hardest if len(hardest) < batch.n else hardest[:-1]:
            self._compare(batch, list(range(batch.n)), few, parameters, louder=True)
        self._check_memory(put_out, self._put_out(batch))
        if self._unlike or self._mixes_at_times(batch):
            raise UnsupportedModuleError(
                "module must compute each example by itself, but it mixes examples: what it puts "
                "out for one changes with the others by a number that no gradient shows, as when a "
                "mean over the batch is detached and subtracted; leave that out"
            )
        self.open, self._proved = False, batch.n if len(fit) > 1 else self._proved

    def _put_out(self, batch):
        """What the module puts out for the first example alone, with the same random draws."""
        args, kwargs = batch.take([0])
        self.rows, device = 1, next(self._inner.parameters()).device
        with drawing_alike(device), self.without_hooks(), torch.no_grad():
            return numbers_in(self._inner(*args, **kwargs))

    def _mixes_at_times(self, batch):
        """Whether, with some random draws, what the module puts out for examples changes where
        those beside them are replaced. The other comparisons see one draw each.
        """
        rows = list(range(min(batch.n, 4)))
        kept = len(rows) // 2
        replaced = [*rows[:kept], *rows[: len(rows) - kept]]
        shapes = [out.shape for out in self._put_out(batch)]
        device = next(self._inner.parameters()).device

        def put_out(rows, seed):
            args, kwargs = batch.take(rows)
            self.rows = len(rows)
            with drawing_alike(device, seed), self.without_hooks(), torch.no_grad():
                return numbers_in(self._inner(*args, **kwargs)), next_draws(device)

        with drawing_alike(device):
            if put_out(rows, 0)[1] == next_draws(device):
                return False  # it draws nothing
        for seed in range(DRAWS):
            outputs, others = put_out(rows, seed)[0], put_out(replaced, seed)[0]
            for i, (one, other, shape) in enumerate(zip(outputs, others, shapes)):
                own, found = (
                    parts_of(out, shape, places, i)
                    for out, places in ((one, rows), (other, replaced))
                )
                if own is None or found is None or not one.ndim:
                    continue
                bound = 3 * tolerances(one)[0] * one.norm() + 1e-6
                if bool(((own - found)[:kept].abs() > bound).any()):
                    return True
        return False

    def _check_memory(self, before, after):
        if not all(map(alike, before, after)):
            raise UnsupportedModuleError(
                "module must keep nothing of its examples, but what it puts out for one has "
                "changed after a pass with others, the weights being the same: it remembers "
                "earlier batches in an attribute or outside of itself, which no noise covers; "
                "leave that out"
            )

    @contextlib.contextmanager
    def _aside(self):
        """Without dropout; and what is done here leaves no trace."""
        inner = self._inner
        kept = [(p, p.grad, getattr(p, "grad_sample", None)) for p in inner.parameters()]
        dropout = [
            module
            for module in inner.modules()
            if isinstance(module, _DropoutNd) and module.training
        ]
        devices = {p.device for p, *_ in kept if p.is_cuda}
        try:
            for module in dropout:
                module.training = False
            for p, *_ in kept:
                p.grad = None
            with torch.random.fork_rng(devices=devices), buffers_kept(inner), _NoDropout():
                yield
        finally:
            for module in dropout:
                module.training = True
            self._clear()
            for p, grad, sample in kept:
                p.grad = grad
                if hasattr(p, "grad_sample"):
                    p.grad_sample = sample

    def _clear(self):
        """Gradients, and what Opacus notes on the way to them."""
        clear_notes(self._inner)
        if self._shards is not None:
            self._hooks.take_norms()
        for p in self._inner.parameters():
            p.grad = None
            if hasattr(p, "grad_sample"):
                p.grad_sample = None

    @contextlib.contextmanager
    def without_hooks(self):
        """The hooks of Opacus look away."""
        if not hasattr(self._hooks, "hooks_enabled"):
            yield
            return
        self._hooks.hooks_enabled = False
        try:
            yield
        finally:
            self._hooks.hooks_enabled = True

    def _alone(self, batch, row, parameters):
        """Gradients of one example by plain autograd, the shapes of its outputs, and of each the
        function of it that is taken, with the length of the output, which says what rounding may
        move it by.
        """
        args, kwargs = batch.take([row])
        self.rows = 1
        with self.without_hooks():
            outputs = self._outputs(self._inner(*args, **kwargs))
            if not outputs:
                return (), [], []
            values = [weighed(out, row, i) for i, out in enumerate(outputs)]
            gradients = torch.autograd.grad(
                added_up(values), parameters, allow_unused=True, materialize_grads=True
            )
        sizes = [(value.detach(), out.detach().norm()) for value, out in zip(values, outputs)]
        return gradients, [out.shape for out in outputs], sizes

    def _norms(self, batch, parameters):
        """{row: norm of its gradient alone} of a probe, of all rows where hardly any shows
        something; of none where no output depends on a weight.
        """
        try:
            if not self._alone(batch, 0, parameters)[0]:
                return {}

            def alone(row):
                return self._alone(batch, row, parameters)[0]

            norms = probed(alone, batch.n)
            if sum(0 < norm < math.inf for norm in norms.values()) < 2:
                norms |= {
                    row: float(norms_of(alone(row)).norm())
                    for row in range(batch.n)
                    if row not in norms
                }
            return norms
        except UnsupportedModuleError:
            raise
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            for x in batch.of_another_type({p.dtype for p in parameters}):
                check_types(self._inner, x)
            raise UnsupportedModuleError(
                "module must take an example by itself, a batch of one, but in "
                f"{culprit(error, self._hooks)} there was {type(error).__name__}: {error!s:.300}; "
                "see that no layer or reshape needs more than one example"
            ) from error

    def _parts(self, batch, rows, shapes):
        """What the module puts out for the rows together, example by example where it is theirs."""
        args, kwargs = batch.take(rows)
        outputs = self._outputs(self._watched(*args, **kwargs))
        parts = [
            parts_of(out, shape, rows, i) for i, (out, shape) in enumerate(zip(outputs, shapes))
        ]
        known = [part for part in parts if part is not None]
        if len(outputs) != len(shapes) or len(known) < len(parts):
            raise UnsupportedModuleError(
                f"module must put out something for each example, but {len(rows)} examples gave "
                f"the shapes {[tuple(out.shape) for out in outputs]} where one has "
                f"{[tuple(shape) for shape in shapes]}"
            )
        return known

    def _compare(self, batch, rows, checked, parameters, *, louder=False):
        """Of the rows together, those checked must have the gradients that they have alone; where
        `louder`, beside others that are enlarged.
        """
        # Before the pass that Opacus watches: between that and its backward pass nothing may
        # overwrite its notes.
        _, shapes, _ = self._alone(batch, checked[0], parameters)
        self._clear()
        self.rows = len(rows)
        known = self._parts(batch, rows, shapes)
        own = sum(
            (part for part in known if part.ndim), torch.zeros(len(rows), device=known[0].device)
        )
        whole = sum(part for part in known if not part.ndim)
        weights = [LOUDER if louder and row not in checked else 1.0 for row in rows]
        weighted = own * torch.tensor(weights).to(own)
        score = cast(torch.Tensor, whole + weighted.sum() / (len(rows) if self._mean else 1))
        score.backward(retain_graph=self._ghost)
        # Frozen layers of a shorter type round what goes through them.
        tolerance = max(map(tolerances, self._inner.parameters()))
        typical = torch.stack(
            [norms_of(self._alone(batch, row, parameters)[0]) for row in checked[:COMPARED]]
        )
        typical = typical.nan_to_num(0.0, 0.0).amax(0)
        found_of = [self._samples(p, len(rows)) for p in parameters]
        alone: list[tuple[int, list]] = []
        for row in checked:
            i = rows.index(row)
            expected, _, values = self._alone(batch, row, parameters)
            alone.append((row, values))
            lengths = norms_of(expected)

            def check(found, errors, say, total=None):
                off = misfit(errors, lengths, typical, tolerance)
                if off and (found.norm().isfinite() or lengths.norm().isfinite()):
                    p, wrong = off.parameter, float(errors[off.parameter])
                    said = say(float(found[p]), float(lengths[p]), wrong)
                    bound = min(wrong / 3, off.bound)
                    total = None if total is None else total[p].sum(0)
                    if louder:
                        raise self._mixes_large(rows, parameters[p], said)
                    raise self._mismatch(
                        batch, rows, row, parameters[p], expected[p], bound, said, total
                    )

            if self._ghost:
                norms = torch.stack([samples[i].double().cpu() for samples in found_of])
                check(norms, abs(norms - lengths), _norms_differ)
                if rows != checked or not own.requires_grad:
                    continue  # beside losses that are not finite the gradient of one is none either
                with self.without_hooks():
                    found = torch.autograd.grad(
                        own[i],
                        parameters,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
            else:
                found = [samples[i] for samples in found_of]
            errors = norms_of(a - b for a, b in zip(found, expected))
            check(norms_of(found), errors, _gradients_differ, None if self._ghost else found_of)
        for row, values in alone:
            together = [part[rows.index(row)] if part.ndim else None for part in known]
            self._check_outputs(batch, row, parameters, together, values, tolerance[0])
        self._clear()

    def _check_outputs(self, batch, row, parameters, together, alone, relative):
        """Note whether outputs in a batch are those alone: gradients do not show detached parts."""
        for i, (found, (own, size)) in enumerate(zip(together, alone)):
            if found is None or not abs(found.detach() - own) > 3 * relative * size + 1e-6:
                continue  # a number of the whole batch; or the same, or none to compare
            if self._alone(batch, row, parameters)[2][i][0] != own:
                return  # it draws at random
            self._unlike = True

    def _samples(self, p, n):
        """What Opacus found of a parameter: each example's gradient or, in ghost mode, its norm."""
        if self._shards is None:
            found = getattr(p, "_norm_sample" if self._ghost else "grad_sample", None)
        else:
            own = (name for name, one in self._inner.named_parameters() if one is p)
            found = self._hooks.norms.get(next(own))
        if found is None:
            return p.new_zeros(n) if self._ghost else torch.zeros_like(p).expand(n, *p.shape)
        if not torch.is_tensor(found) or len(found) != n:
            shape = (
                [tuple(t.shape) for t in found]
                if isinstance(found, list)
                else tuple(getattr(found, "shape", ()))
            )
            raise UnsupportedModuleError(
                "module must have layers that keep the examples on the axis that batch_first says, "
                f"but of {n} examples {self._holder(p)} has gradients of shape {shape}: it may be "
                "called with other rows than the examples, as a table that is looked up once for "
                "all of them; give it an input for each example, freeze it, or use "
                "dpcompanion.training.train, whose method 'func' takes it"
            )
        return found

    def _holder(self, p):
        """In words, the layer and the name of a parameter."""
        name = next((name for name, own in self._inner.named_parameters() if own is p), "a weight")
        layer, _, own = name.rpartition(".")
        kind = type(self._inner.get_submodule(layer)).__name__
        return f"{own!r} of {f'layer {layer!r}' if layer else 'the module itself'} ({kind})"

    def _by_autograd(self, batch, rows, row, p, shapes):
        """The gradients of p by plain autograd: of the example in `row`, and of all rows; and
        whether the module puts out numbers for the whole batch.
        """
        args, kwargs = batch.take(rows)
        with self.without_hooks():
            outputs = self._outputs(self._inner(*args, **kwargs))
            parts = [
                parts_of(out, shape, rows, i) for i, (out, shape) in enumerate(zip(outputs, shapes))
            ]
            scalars = [part for part in parts if part is not None and not part.ndim]
            own = [part[rows.index(row)] for part in parts if part is not None and part.ndim]
            whole = [part.sum() for part in parts if part is not None]
            one, summed = (
                torch.autograd.grad(
                    added_up(values),
                    p,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )[0]
                for values in (own or scalars, whole)
            )
        return one, summed, bool(scalars)

    def _mixes_large(self, rows, p, said):
        """The error for an example's gradient that differs only beside large ones."""
        return UnsupportedModuleError(
            "module must compute each example by itself, but the gradient of an example in the "
            f"company of {len(rows) - 1} whose gradients are large {said}, in {self._holder(p)}, "
            "so the module mixes examples on the way back: look for a hook or a backward method "
            "of its own that clips or scales all gradients of a batch together; let it take each "
            "example by itself"
        )

    def _mismatch(self, batch, rows, row, p, expected, bound, said, total):
        """The error for an example's gradient that differs in the company of others, with its cause
        if that is known.

        Args:
            rows, row: the examples of the pass, and the one of them.
            p, expected, bound: the parameter where it differs most, its gradient alone, and what
                may differ.
            said: by how much it differs, in words.
            total: the sum of what Opacus found for p, None in ghost mode.
        """
        where = (
            f"the gradient of an example in the company of {len(rows) - 1} {said}, in "
            f"{self._holder(p)}"
        )
        other = (
            "'functorch'"
            if not hasattr(self._hooks, "force_functorch") or not self._hooks.force_functorch
            else "'hooks'"
        )

        def differs(a, b):
            return not float((a - b).detach().double().norm()) <= bound

        found, shapes, _ = self._alone(batch, row, [p])
        again = next(iter(found))
        if differs(again, expected):
            cause = (
                "its loss changes from one call to the next, with the same input: the module draws "
                "at random by other means than dropout, or keeps something of a pass; draw from "
                "nothing, or freeze and evaluate that part"
            )
            return UnsupportedModuleError(
                f"module must compute each example by itself, but {where}: {cause}"
            )
        together, summed, scalars = self._by_autograd(batch, rows, row, p, shapes)
        if not scalars and differs(together, expected):
            cause = (
                "by plain autograd too, so the module mixes examples: its outputs for one depend "
                "on others of the batch; look for a mean, a normalisation, a sort or a comparison "
                "along the axis of the examples"
            )
        elif scalars:
            cause = (
                "it puts out a number for the whole batch (a loss of its own), which may be no "
                "mean of the examples' own; put out one number an example, or take the loss of its "
                "outputs instead"
            )
        elif total is None:
            cause = (
                "by plain autograd examples do not mix; the cause is unknown, often a weight that "
                "is also used outside of its layer's own call; use grad_sample_mode='hooks' or "
                f"{other}, which say more"
            )
        elif differs(total, summed):
            cause = (
                "by plain autograd examples do not mix, but what Opacus finds does not add up to "
                "autograd's gradient: the weight is used outside of its layer's own call, or "
                "Opacus's rule for this layer does not fit it; use it in its layer only, or "
                f"grad_sample_mode={other}"
            )
        else:
            cause = (
                "by plain autograd examples do not mix, and the sum over them is right, so that it "
                "goes to another example: rows change their order or number before the layer; keep "
                "them as they are in the batch"
            )
        return UnsupportedModuleError(
            f"module must compute each example by itself, but {where}: {cause}"
        )


def _norms_differ(found, truth, _):
    return f"has norm {found:.6g} by Opacus and {truth:.6g} by autograd"


def _gradients_differ(_, truth, wrong):
    return f"is off by {wrong:.2g} where alone it has norm {truth:.2g}"


def missing(found, truth):
    return UnsupportedModuleError(
        "module must use its weights in its layers only, but of the criterion's loss of an example "
        f"the gradient has norm {found:.6g} by Opacus and {truth:.6g} by autograd; the cause is "
        "unknown, often a weight that the criterion uses itself, as in a penalty; leave it out, or "
        "use grad_sample_mode='hooks'"
    )


class _NoDropout(TorchFunctionMode):
    """Calls of dropout's functions return what they got."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)
