"""Ghost mode: a criterion whose backward pass clips, and the optimizer that goes with it."""

import functools
import math
from typing import Any, cast

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from dpcompanion._devices import autocasts, whole_convolutions
from dpcompanion.engine.criterion import LossCompany, Unreduced, note_call
from dpcompanion.engine.optimizers import Following
from dpcompanion.engine.proof import Proof, missing
from dpcompanion.gradients.layers import Ghost, GhostEmbedding
from dpcompanion.gradients.proof import norms_of
from dpcompanion.gradients.tensors import rounded_up, tolerances
from dpcompanion.gradients.traces import local


def _check_autocast(layer, args):
    """Refuse a layer in training under autocast: its gradients would add up in the shorter type."""
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    watched = layer is None or (layer.training and torch.is_grad_enabled())
    if watched and autocasts(device):
        raise ValueError(
            "in ghost mode torch.autocast must be left, in the module and in the loop: gradients "
            "would be added up in its type, and rounded so one example could move them by more "
            "than the clip norm; use grad_sample_mode='hooks'"
        )


def _check_once(hooks, name, layer, args):
    """A layer whose norms are found without its gradients is called once between two steps."""
    if hooks.hooks_enabled and layer.training and torch.is_grad_enabled():
        if any(
            getattr(p, "_forward_counter", 0)
            for p in layer.parameters(recurse=False)
            if p.requires_grad
        ):
            raise UnsupportedModuleError(
                "module must use each layer once in ghost mode, and each pass must go back before "
                f"the next, but {name or 'it'!r} is called a second time; use "
                "grad_sample_mode='hooks'"
            )


def _norms(layer, activations, backprops):
    """Norms of the gradients of a linear layer or an embedding, {parameter: (n,)}, as
    `dpcompanion.gradients.layers` has them: Opacus's own, in float32, lose what cancels over the
    positions of an example.
    """
    if not len(backprops):
        return {
            p: backprops.new_zeros(0) for p in layer.parameters(recurse=False) if p.requires_grad
        }
    uses = [(activations[0], backprops)]
    if isinstance(layer, nn.Embedding):
        squares = (
            {layer.weight: GhostEmbedding(layer, uses).squared_norms}
            if layer.weight.requires_grad
            else {}
        )
    else:
        ghost = Ghost(layer, [(activations[0].to(backprops.dtype), backprops)])
        squares = {layer.weight: ghost.weight_squares, layer.bias: ghost.bias_squares}
        squares = {p: found for p, found in squares.items() if p is not None and p.requires_grad}
    return {
        p: rounded_up(torch.as_tensor(found()).sqrt(), backprops.dtype)
        for p, found in squares.items()
    }


class GhostOptimizer(Following, DPOptimizerFastGradientClipping):
    _clipped = None  # the batch whose loss was clipped last
    _gradients: list[Any] | None = None  # and what the clipped loss gave
    _losses_open, _truth = True, None  # norms by autograd of some examples of the first batch

    def clips(self, module, criterion, loss_reduction):
        """The criterion whose backward pass clips."""
        module.NORM_SAMPLERS = {**module.NORM_SAMPLERS, nn.Linear: _norms, nn.Embedding: _norms}
        module.get_clipping_coef = lambda: self._factors(module)
        enable = module.enable_hooks

        def ends():  # which is how Opacus ends the second backward pass
            enable()
            self._gradients = self._seen()

        module.enable_hooks = ends
        own = [
            (name, layer)
            for name, layer in module._module.named_modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False))
        ]
        watched = [layer.register_forward_pre_hook(_check_autocast) for _, layer in own]
        once = functools.partial(_check_once, module)
        watched += [
            layer.register_forward_pre_hook(functools.partial(once, name))
            for name, layer in own
            if type(layer) in module.NORM_SAMPLERS
        ]
        remove = module.remove_hooks

        def leaves():  # and the layers are the user's own again
            for handle in watched:
                handle.remove()
            remove()

        module.remove_hooks = leaves
        unreduced = Unreduced(criterion)
        unreduced.reduction = loss_reduction  # which Opacus asks for, and sets to "none" for a call
        return GhostCriterion(module, self, unreduced, loss_reduction)

    def _factors(self, module):
        """What to multiply the examples' losses by before the backward pass that clips."""
        if self.shards is None:
            return self.clip_factors(self._fresh_norms(module))
        with self.ranks.together():
            factors = self.clip_factors(self._fresh_norms(module))
            self.shards.settle()
        return factors

    def _noted_norms(self, module):
        """Those of this backward pass, (n,); None where a layer has noted none."""
        if self.shards is not None:
            found = module.take_norms()
            if found.keys() != module.names:
                return None
            norms = torch.stack([found[name] for name in sorted(found)]).norm(2, dim=0)
            return norms if self._noted.units else norms[:0]  # one of zeros, where there is none
        if not all(hasattr(p, "_norm_sample") for p in module.trainable_parameters):
            return None
        norms = module.get_norm_sample()
        for p in module.trainable_parameters:
            del p._norm_sample
        return norms

    def _fresh_norms(self, module):
        """Norms of this backward pass: none is left from an earlier one."""
        norms = self._noted_norms(module)
        if norms is None:
            raise ValueError(
                "in ghost mode every trainable layer must take part in every batch, in training "
                "mode; use hooks"
            )
        relative, _ = max(map(tolerances, module._module.parameters()))
        for row, truth in (self._truth or {}).items():
            if not abs(float(norms[row]) - truth) <= relative * truth:
                raise missing(float(norms[row]), truth)
        self._truth = None
        return norms

    def prove_losses(self, losses):
        """Note norms of some examples' gradients by plain autograd, until one is above 0."""
        due = self._losses_open and self._proof is not None and losses.ndim == 1 and len(losses)
        if self.shards is not None:
            with self.ranks.together(), self.shards.whole_where(bool(due)):
                if due:
                    self._note_truth(losses)
        elif due:
            self._note_truth(losses)

    def _note_truth(self, losses):
        self._truth, proof = {}, cast(Proof, self._proof)
        trained = [p for p in self.hooks._module.parameters() if p.requires_grad]
        with proof.without_hooks():
            if self.shards is not None:
                self.shards.check_within(losses, self.params)
            for row in sorted({round(i * (len(losses) - 1) / 7) for i in range(8)}):
                gradients = torch.autograd.grad(
                    losses[row],
                    trained,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                norm = float(norms_of(gradients).norm())
                if 1e-15 < norm < math.inf:
                    self._truth[row] = norm
        self._losses_open = not self._truth

    def _seen(self):
        return [(p.grad, None if p.grad is None else local(p.grad)._version) for p in self.params]

    def clip_factors(self, norms, share=1.0):
        factors = super().clip_factors(norms, share)
        self._clipped = self._noted.handed_out
        return factors

    def accumulate(self):
        if self._gradients is None or self._clipped is not self._noted.handed_out:
            raise ValueError(
                "in ghost mode the criterion clips: take the loss of every batch by the criterion "
                "that make_private_with_budgets returned"
            )
        if any(a is not b or i != j for (a, i), (b, j) in zip(self._gradients, self._seen())):
            raise ValueError(
                "in ghost mode gradients must stay as the criterion's backward pass left them, but "
                "they were changed before the step: call zero_grad before the forward pass, have "
                "no other loss, and do not clip or scale them"
            )
        if self.shards is None:
            return super().accumulate()
        for p in self._noted_parameters():  # a draw is one batch
            p.summed_grad = local(p.grad).detach().clone()


class GhostLosses(DPTensorFastGradientClipping):
    """Losses whose backward pass clips, and what is computed from them."""

    optimizer: GhostOptimizer

    def backward(self):
        with self.optimizer.ranks.together():
            _check_autocast(None, (self.loss_per_sample,))
        self.optimizer.prove_losses(self.loss_per_sample)
        with whole_convolutions(self.loss_per_sample.device):
            super().backward()


def _keeping(name):
    operation = getattr(DPTensorFastGradientClipping, name)

    @functools.wraps(operation)
    def kept(self, *others):
        found = operation(self, *others)
        found.__class__ = GhostLosses
        return found

    return kept


for _name in (
    "__truediv__",
    "__mul__",
    "__rmul__",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__neg__",
):
    setattr(GhostLosses, _name, _keeping(_name))


class GhostCriterion(DPLossFastGradientClipping):
    optimizer: GhostOptimizer

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._company = LossCompany()

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():  # an evaluation, which one rank may make alone
            return self._losses(args, kwargs)
        with self.optimizer.ranks.together():
            return self._losses(args, kwargs)

    def _losses(self, args, kwargs):
        try:
            found = super().__call__(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"criterion must take the module's outputs and the targets, but: {error}"
            ) from error
        found.__class__ = GhostLosses
        losses, watch = found.loss_per_sample, self.optimizer.watch
        if (
            watch is not None
            and losses.ndim == 1
            and losses.requires_grad
            and "shape" not in kwargs
        ):
            note_call(watch, self.criterion, args, kwargs, losses, self.loss_reduction)
            self._company.check(self.criterion, args, kwargs, losses)
        return found
