"""Module, optimizer and loader of a private run, put together.

The module gets Opacus's hooks, the loader its draws, the optimizer clip norms and noise. The
accountant follows the optimizer, and a proof with the first batch comes before any step.
"""

import functools
from typing import Any

import torch
from opacus.layers.dp_rnn import RNNLinear
from opacus.validators.errors import UnsupportedModuleError

from dpcompanion.engine.checks import StateLeakGuard, check_not_compiled
from dpcompanion.engine.criterion import PerExampleCriterion
from dpcompanion.engine.ghost import GhostOptimizer
from dpcompanion.engine.layers import ForEachExample, check_packed, mend
from dpcompanion.engine.loading import Draws, IndexRecorder, RowChoice, private_loader
from dpcompanion.engine.losses import LossWatch
from dpcompanion.engine.optimizers import HooksOptimizer
from dpcompanion.engine.proof import Proof
from dpcompanion.engine.shards import ShardedHooks, is_sharded
from dpcompanion.training import distributed


class _RowsOfLoop:
    """Called, how many examples the loader handed out last; None before that, while a proof is made
    with others, in a copy of the module, and on shards for a rank without an example, which may
    take a row of zeros.
    """

    def __init__(self, noted, sharded):
        self.noted: Any = noted
        self.sharded = sharded
        self.proof: Any = None

    def __call__(self):
        if self.noted is None or self.proof is not None and self.proof.busy:
            return None
        handed_out = self.noted.handed_out
        if handed_out is None or self.sharded and not handed_out:
            return None
        return len(handed_out)

    def of_pass(self):
        """How many examples are in the pass under way, of a proof or of the loop."""
        if self.proof is not None and self.proof.busy:
            return self.proof.rows
        return len(self.noted.handed_out or [])

    def __getstate__(self):
        return {"noted": None, "sharded": False, "proof": None}


def _rearranged(rearrange, rows, *, module, backprops, batch_first, **options):
    """As Opacus does, but a layer without notes of a pass in training mode raises ValueError, and
    so does one whose gradients are not of as many examples as `rows` says, which Opacus would take
    for the first of the batch.
    """
    if not getattr(module, "activations", None):
        raise ValueError(
            "module must be in training mode in the forward pass of each backward pass, but "
            f"{type(module).__name__} was in evaluation mode, or went back twice: call "
            "module.train() first"
        )
    n, recurrent = rows(), type(module) is RNNLinear  # which is called once a time step
    found = backprops.shape[0 if batch_first else 1]
    if n is not None and not recurrent and found != n:
        raise ValueError(
            "module must call each of its layers with one row for each example, but "
            f"{type(module).__name__} was given {found} in a batch of {n}: give it all rows, and "
            "choose among what comes out; a batch in pieces takes Opacus's BatchMemoryManager"
        )
    return rearrange(module=module, backprops=backprops, batch_first=batch_first, **options)


def _prepared(engine, module, settings, grad_sample_mode, max_grad_norm, rows):
    """The module with Opacus's hooks, mended."""
    options = {
        "batch_first": settings.batch_first,
        "max_grad_norm": max_grad_norm,
        "loss_reduction": settings.loss_reduction,
    }
    try:
        if is_sharded(module):
            module = ShardedHooks(module, distributed.current(), **options)
        else:
            module = engine._prepare_model(
                module, grad_sample_mode=grad_sample_mode, wrap_model=settings.wrap_model, **options
            )
    except NotImplementedError as error:
        raise UnsupportedModuleError(
            f"module must be one that Opacus takes in the mode {grad_sample_mode!r}, but: "
            + (str(error) or "batch_first=False is not possible in it")
        ) from error
    module.forbid_grad_accumulation()
    mend(module, int(not settings.batch_first))
    if hasattr(module, "rearrange_grad_samples"):
        module.rearrange_grad_samples = functools.partial(
            _rearranged, module.rearrange_grad_samples, rows
        )
    return module


def assemble(
    engine,
    budgets,
    module,
    optimizer,
    data_loader,
    streams,
    origin,
    *,
    noise_multiplier,
    max_grad_norm,
    shares,
    criterion,
    grad_sample_mode,
    settings,
    units,
):
    """What the caller gets; from here on the accountant follows the new optimizer.

    Many arguments, since all that the engine's `make_private_with_...` make comes together here.
    """
    sampling, noise = streams
    rates, ghost = engine.sample_rates.clone(), grad_sample_mode == "ghost"
    loss_reduction = settings.loss_reduction
    draws = Draws(len(rates), rates, sampling, units.steps_per_epoch, distributed.current().share)
    choice = (
        None if units.ownership is None else RowChoice(units.ownership, draws, engine.accountant)
    )
    noted = IndexRecorder(data_loader.dataset, data_loader, choice)
    engine.dataset, original, rows = (
        data_loader.dataset,
        module,
        _RowsOfLoop(noted, is_sharded(module)),
    )
    module = _prepared(engine, module, settings, grad_sample_mode, max_grad_norm, rows)
    optimizer = (GhostOptimizer if ghost else HooksOptimizer)(
        getattr(optimizer, "original_optimizer", optimizer),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=float(rates.sum()),  # pyright: ignore[reportArgumentType] (Opacus divides by it)
        loss_reduction=loss_reduction,
        generator=noise,
    )
    proof = rows.proof = (
        _proof_of(module, original, settings, optimizer, noted, ghost or criterion is not None)
        if settings.prove
        else None
    )
    watch = (
        None
        if settings.trust_loss
        else LossWatch(
            module,
            module if settings.wrap_model else original,
            noted,
            loss_reduction=loss_reduction,
            busy=lambda: optimizer.aside or (proof is not None and proof.busy),
            own_loss=lambda: None if proof is None else proof.own_loss_mixes,
            criterion=ghost or criterion is not None,
        )
    )
    check_packed(original)
    ForEachExample(original, original, rows.of_pass)
    engine.accountant.budgets, engine.accountant.origin = budgets, origin
    engine.accountant.draws_are_seeded = data_loader.generator is not None
    engine.accountant.trusts_loss = settings.trust_loss
    called = module if settings.wrap_model else original
    called.register_forward_pre_hook(check_not_compiled, prepend=True)
    guard = StateLeakGuard(module if is_sharded(original) else original)
    optimizer.follow(draws, noted, engine.accountant, proof, module, watch, guard)
    optimizer.choice = choice
    optimizer.shares = None if shares is None else [shares[p] for p in optimizer.params]
    loader = private_loader(data_loader, noted, draws, settings.batch_first)
    criterion = _criterion_of(criterion, module, optimizer, watch, loss_reduction)
    return (module, optimizer, *criterion, loader)


def _proof_of(module, original, settings, optimizer, noted, has_criterion):
    """The proof of the module, of the examples that the loop takes."""
    return Proof(
        module,
        module if settings.wrap_model else original,
        batch_first=settings.batch_first,
        loss_reduction=settings.loss_reduction,
        ghost=isinstance(optimizer, GhostOptimizer),
        batch_size=lambda: 0 if optimizer.aside else len(noted.handed_out or []),
        own_loss=None if has_criterion else settings.trust_loss,
    )


def _criterion_of(criterion, module, optimizer, watch, loss_reduction):
    """What the caller gets of a criterion: nothing without one, but in ghost mode always one."""
    if isinstance(optimizer, GhostOptimizer):
        criterion = torch.nn.CrossEntropyLoss() if criterion is None else criterion
        return (optimizer.clips(module, criterion, loss_reduction),)
    if criterion is None:
        return ()
    return (PerExampleCriterion(criterion, watch, loss_reduction),)
