"""Optimizers in which each gradient meets its example's clip norm, and each draw becomes a step."""

import contextlib
import functools
import warnings
import weakref
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcompanion._devices import autocasts, on_accelerator, to_device
from dpcompanion._norms import margin
from dpcompanion.engine.checks import check_trained, trainable
from dpcompanion.engine.randomness import noisy, not_finite
from dpcompanion.engine.ranks import check_weights
from dpcompanion.engine.shards import shards_of
from dpcompanion.gradients.checks import check_products
from dpcompanion.gradients.passes import undisturbed
from dpcompanion.gradients.tensors import added_up, squared_norms
from dpcompanion.training.distributed import current


def _wide(dtype):
    """In what gradients of parameters of this type are added up."""
    return torch.promote_types(dtype, torch.float32)


def _look_beside(following, optimizer, *_):
    """Before a step of any optimizer: one that is not ours, with our parameters, trains them
    without clipping and noise. On public data that is fine, so it is said and not refused.
    """
    own = following()
    if (
        own is None
        or own._own_step
        or own._accountant.follower is not own
        or hasattr(optimizer, "_budgets_guard")
    ):
        return
    if any(id(p) in own._trained for group in optimizer.param_groups for p in group["params"]):
        own._beside.remove()  # once is enough
        warnings.warn(
            f"parameters of a private run are trained by a {type(optimizer).__name__} beside the "
            "optimizer that the engine returned, without clipping and noise: no budget covers what "
            "it learns from private data",
            RuntimeWarning,
            stacklevel=3,
        )


class Following(DPOptimizer):
    """What both optimizers share: a clip norm for each gradient, and a step for each draw."""

    #: Of each parameter in the clip norm, in the order of `params`, for clipping per layer.
    shares: list[float] | None = None
    #: Which rows of persons take part; None where each item is an example.
    choice: Any = None
    #: Whether the module is used for something else than the loop's passes.
    aside = False

    def follow(self, draws, noted, accountant, proof, hooks, watch, traceless):
        self.draws, self._noted, self._accountant = draws, noted, accountant
        self._proof = proof
        self.hooks = hooks
        self._trained = trainable(hooks._module)
        self.watch = watch
        self._traceless, self.ranks, self.shards = traceless, current(), shards_of(hooks)
        if self.shards is not None:
            self.shards.watch(hooks, noted, draws)
        if proof is not None:
            proof.ranks = self.ranks
        self._own_step = False
        original: Any = self.original_optimizer
        if hasattr(original, "_budgets_guard"):
            original._budgets_guard.remove()
        original._budgets_guard = original.register_step_pre_hook(self._only_after_noise)
        self._beside = register_optimizer_step_pre_hook(
            functools.partial(_look_beside, weakref.ref(self))
        )
        weakref.finalize(self, self._beside.remove)
        # the draw that is being added up, and the last index in it
        self._draw, self._taken = None, -1
        self._ended = False
        # How many gradients were not finite, and of how many that was said; whether a sum was not.
        self._dropped, self._said, self._spoilt = 0, 0, False
        self._noise_std = self.noise_multiplier * self.max_grad_norm
        self._noise_from, self._noise_states = self.generator, set()
        accountant.generators, accountant.follower = self._generators, self

    def __getstate__(self):
        raise ValueError(
            "an optimizer of a private run must not be copied or pickled: the copy would give its "
            "noise a second time; keep its state_dict(), or the engine's save_checkpoint"
        )

    def _noted_parameters(self) -> list[Any]:
        """The parameters, to which Opacus attaches what it computes."""
        return self.params

    @property
    def dropped(self):
        """Gradients that were not finite, and so contributed nothing."""
        return int(self._dropped)

    def _drop(self, bad):
        """Note which gradients (k,) are not finite; whether there may be any.

        A device is not asked: see `look`.
        """
        if not on_accelerator(bad) and not bad.any():
            return False
        self._dropped = self._dropped + bad.sum()
        if not on_accelerator(bad):
            self.look()
        return True

    def look(self):
        """Say what has come to light: asked for where the host waits anyway, not in each step.

        Raises:
            FloatingPointError: a sum was not finite, and the weights are no numbers since.
        """
        if self._spoilt:
            raise FloatingPointError(not_finite("it was noticed after the step"))
        if self.watch is not None and self.watch.spoilt:
            raise ValueError(
                "loss must be a mean of losses of which each depends on one example, as it was in "
                "the first batch, but in a later one another gradient came back to the module's "
                "outputs; the steps since were noise alone"
            )
        self._traceless.look()
        if self.dropped > self._said:
            self._said = self.dropped
            warnings.warn(
                "per-example gradients that are not finite contribute nothing",
                RuntimeWarning,
                stacklevel=6,
            )

    @contextlib.contextmanager
    def set_aside(self):
        """What is done with the module here, in evaluation mode, is none of the loop's: nothing
        notes it, and gradients are afterwards what they were.
        """
        kept = [(p, p.grad, p.__dict__.get("grad_sample")) for p in self._noted_parameters()]
        self.aside = True
        try:
            with undisturbed(self.hooks) as module:
                for p, *_ in kept:
                    p.grad = None
                yield module
        finally:
            self.aside = False
            for p, gradient, sample in kept:
                p.grad = gradient
                if "grad_sample" in p.__dict__:
                    p.grad_sample = sample

    def rewind(self):
        """Before a checkpoint loads: draws that are no steps yet are repeated from its state."""
        self.draws.rewind()

    def states(self):
        """What a checkpoint keeps of noise and draws; of a stream how far it came, never its key.

        A draw that was fetched and is no step yet is drawn again by the run that goes on, so that
        both give the same noise to the same draw.
        """
        states = {name: generator.get_state() for name, generator in self._generators().items()}
        return states | {"sampling": self.draws.state()}

    def _generators(self):
        """By name, what noise and draws come from."""
        return {"noise": self.generator, "sampling": self.draws.generator}

    def _only_after_noise(self, *_):
        if not self._own_step:
            raise ValueError(
                "the original optimizer must not step: it would take gradients without clipping "
                "and noise; use the one that make_private_with_budgets returned"
            )

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.pre_step():
            return loss
        self._own_step = True
        try:
            own = self.original_optimizer.step()
        finally:
            self._own_step = False
        return own if closure is None else loss

    def _check_trained(self):
        if self.shards is not None:
            self.shards.rest()
        check_trained(self.hooks._module, self._trained)

    def clip_factors(self, norms, share=1.0):
        """What to multiply the gradients of the current physical batch by; norms: (k,), their clip
        norms by `share`.
        """
        with self.ranks.together():
            return self._clip_factors(norms, share)

    def _clip_factors(self, norms, share):
        self._accountant.check_budget()
        check_products(norms.device)
        batch = self._noted.units
        self._check_handed_out(batch, len(norms))
        if self._proof is not None and self._proof.open and len(self._noted.handed_out) > 1:
            raise ValueError(
                "module must be called as the engine returned it, take tensors with the examples "
                "along one axis, and put out tensors that depend on its weights: with this batch "
                "it could not be proved that it treats examples one by one, which prove=False "
                "takes on your word"
            )
        if self.watch is not None:
            self.watch.check()
        own = to_device(
            (share * self._accountant.budgets.clip_norms()[batch]).to(norms.dtype), norms.device
        )
        # A hair less, so that rounding lifts no gradient above its norm.
        hair = max(margin(_wide(p.dtype)) for p in self.params)
        factors = (own / (norms * hair + 1e-6)).clamp(max=1.0)
        fits = norms.isfinite()
        for watch in (self.watch, self._traceless):
            if watch is not None and watch.spoilt is not False:
                fits = fits & ~watch.spoilt
        return torch.where(fits, factors, 0.0)

    def _check_handed_out(self, batch, found):
        if batch is None or found != len(batch):
            raise ValueError(
                f"a batch must be what the loader handed out last, {len(batch or [])} examples, "
                f"got {found}"
            )

    def pre_step(self, closure=None):
        with self.ranks.together():
            return self._pre_step(closure)

    def _pre_step(self, closure):
        if self._accountant.follower is not self:
            raise ValueError(
                "a step needs the optimizer of the engine's last call of "
                "make_private_with_budgets: it has other budgets by now"
            )
        self._accountant.check_budget()
        self._check_trained()
        draw, batch = self.draws.last, self._noted.units
        if draw is None or batch is None:
            raise ValueError(
                "a step needs a batch of the loader that make_private_with_budgets returned, "
                "fetched after any checkpoint was loaded"
            )
        if self.draws.passed_over > 0:
            raise ValueError(
                "every draw of the loader must become a step, an empty one too, which is noise "
                f"alone, but {self.draws.passed_over} before this one did not: to leave draws out "
                "by what is in them raises the rate of the others; leave out no batch, as by `if "
                "len(x) == 0: continue`"
            )
        if self._draw != self.draws.number:
            # What an unfinished draw has left behind belongs to no step.
            for p in self._noted_parameters():
                p.summed_grad = None
            self._draw, self._taken, self._ended = self.draws.number, -1, False
        if self._ended or (batch and batch[0] <= self._taken):
            raise ValueError(
                "a batch of the loader must be used in one step only, or its examples would count "
                "twice"
            )
        self._taken = batch[-1] if batch else self._taken
        self._ended = not draw or batch[-1:] == draw[-1:]
        self._step_skip_queue.clear()
        # A loop's autocast would round the clipped gradients while they are added up.
        device = self.params[0].device
        with (
            torch.autocast(device.type, enabled=False)
            if autocasts(device)
            else contextlib.nullcontext()
        ):
            noisy = super().pre_step(closure)
        if noisy:
            own = {id(p) for p in self.params}
            for p in (
                p for group in self.param_groups for p in group["params"] if id(p) not in own
            ):
                # what was there before p was frozen, without noise: the step would take it
                p.grad = None
            steps, last = self._accountant.steps, self._accountant.steps == self._accountant.planned
            if last:
                self.look()
            if last or steps % len(self.draws) == 0:
                check_weights(self.ranks, self.hooks._module, f"before step {steps}")
        return noisy

    def _new_state(self):
        """That of the generator of the noise, in which it has not been before: noise that comes
        twice is subtracted.
        """
        if self.generator is not self._noise_from:
            raise ValueError(
                "generator must stay the one that noise came from when the module was made "
                "private, but the optimizer's was exchanged"
            )
        if not isinstance(self.generator, torch.Generator) or not self.ranks.first:
            return None  # a stream is never set back, and other ranks add no noise
        state = hash(self.generator.get_state().cpu().numpy().tobytes())
        if state in self._noise_states:
            raise ValueError(
                "noise_generator must go on from step to step, but it was set back to where it was "
                "before an earlier step, as by manual_seed in each epoch: the difference of two "
                "steps with the same noise has none"
            )
        return state

    def add_noise(self):
        parameters = self._noted_parameters()
        sums = [p.summed_grad for p in parameters]
        for total in sums:
            _check_processed_flag(total)
        state = self._new_state()
        std = self.noise_multiplier * self.max_grad_norm
        if self.shards is None:
            found, spoilt = noisy(sums, std, self.generator, self.ranks.released)
        else:
            found, spoilt = self.shards.noisy(parameters, sums, std, self.generator)
        self._noise_states.add(state)
        self._spoilt = self._spoilt | spoilt
        for p, gradient in zip(parameters, found):
            p.grad = gradient.view_as(p).to(p.dtype)
            _mark_as_processed(p.summed_grad)

    def scale_grad(self):
        # Opacus does this right after the noise. Not in the step hook: one's own takes its place,
        # or fails.
        self._accountant.step()
        self.draws.step()
        noise_std = self.noise_multiplier * self.max_grad_norm
        if not noise_std >= self._noise_std:
            self._accountant.void(
                f"a step had noise of standard deviation {noise_std:g} where the budgets were "
                f"made for {self._noise_std:g}: leave noise_multiplier and max_grad_norm alone, "
                "and use no scheduler of noise or clipping"
            )
        super().scale_grad()

    def _check_skip_next_step(self, pop_next=True):
        return not self._ended


class HooksOptimizer(Following, DPOptimizer):
    def _get_flat_grad_sample(self, p: Any):
        """Of a parameter that the step's loss did not come by, zeros, as autograd gives it."""
        if getattr(p, "grad_sample", None) is None:
            if getattr(p, "_forward_counter", 0):
                raise ValueError(
                    "a forward pass in training mode must go back before the step, but one has "
                    "not: look at what the module puts out under torch.no_grad(), or in "
                    "evaluation mode"
                )
            n = len(self._noted.handed_out or [])
            if n and all(getattr(other, "grad_sample", None) is None for other in self.params):
                raise ValueError(
                    "gradients must come back before the step, but none has since the last one: "
                    "call loss.backward() before optimizer.step()"
                )
            p.grad_sample = p.new_zeros(n, *p.shape)
        return super()._get_flat_grad_sample(p)

    def _by_unit(self, samples):
        """The gradients of rows that were found, [(rows, ...)], as those of the examples that are
        clipped: of persons, in float32 at least, the sums over their rows, which are formed before
        any norm is taken.
        """
        for sample in samples:
            self._check_handed_out(self._noted.handed_out, len(sample))
        if self._noted.sizes is None:
            return samples
        wide = (sample.to(_wide(p.dtype)) for p, sample in zip(self._noted_parameters(), samples))
        return [self._noted.combined(sample) for sample in wide]

    def clip_and_accumulate(self):
        samples = self._by_unit(self.grad_samples)
        squares = [
            squared_norms(g) if len(g) else g.new_zeros(0, dtype=torch.float64) for g in samples
        ]
        norms = added_up(squares).sqrt()
        factors, bad = self.clip_factors(norms), ~norms.isfinite()
        unfit = self._drop(bad)
        for i, (p, sample) in enumerate(zip(self._noted_parameters(), samples)):
            if hasattr(p.grad_sample, "_processed"):
                raise ValueError(
                    "gradients must be cleared between steps: call optimizer.zero_grad() on each"
                )
            if self.shares is not None:
                factors = torch.where(
                    bad, 0.0, self.clip_factors(squares[i].sqrt(), self.shares[i])
                )
            # Rounded to bfloat16 before the noise, a sum would move by more than the clip norm with
            # one example.
            sample = sample.to(_wide(p.dtype))
            if unfit:
                sample = sample.masked_fill(bad.view(-1, *[1] * (sample.ndim - 1)), 0.0)
            clipped = torch.einsum("i,i...", factors.to(sample.dtype), sample)
            p.summed_grad = clipped if p.summed_grad is None else p.summed_grad + clipped
            _mark_as_processed(p.grad_sample)
