"""What may not be handed to the engine."""

import copy
import math
import threading
import warnings
from typing import Any

import torch
from opacus.validators.errors import UnsupportedModuleError
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dpcompanion import _checks
from dpcompanion._devices import on_accelerator
from dpcompanion.engine.layers import check_layers
from dpcompanion.engine.replacements import check_replaced
from dpcompanion.engine.shards import check_sharded, is_sharded, plain_types, shards_of
from dpcompanion.gradients.checks import check_alone
from dpcompanion.gradients.items import check_batched, check_forgets_items, same_items
from dpcompanion.gradients.traces import check_untouched, equal, noted


def trainable(module):
    return {id(p) for p in module.parameters() if p.requires_grad}


def check_trained(module, trained):
    """The trainable parameters are those that it had."""
    if trainable(module) != trained:
        changed = [
            name for name, p in module.named_parameters() if p.requires_grad != (id(p) in trained)
        ]
        raise ValueError(
            "module must keep the trainable parameters that it had: freeze and unfreeze before "
            f"make_private_with_budgets, but {', '.join(changed) or 'some'} changed since"
        )


def clip_norms_of(max_grad_norm, clipping, module):
    """The mean clip norm, and by layer {parameter: its share}."""
    if clipping == "flat":
        return _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither"), None
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not isinstance(max_grad_norm, (list, tuple)) or len(max_grad_norm) != len(parameters):
        raise ValueError(
            f"max_grad_norm must be a list of {len(parameters)} norms with per-layer clipping, one "
            f"for each trainable parameter, got {max_grad_norm!r}"
        )
    norms = [
        _checks.number("max_grad_norm", norm, 0, math.inf, closed="neither")
        for norm in max_grad_norm
    ]
    whole = math.hypot(*norms)
    return whole, {p: norm / whole * (1 - 1e-12) for p, norm in zip(parameters, norms)}


def _check_kind(loader):
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"data_loader must be a torch.utils.data.DataLoader, got a {type(loader).__name__}"
        )


def check_loader(loader):
    _check_kind(loader)
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError(
            "data_loader must be of a map-style data set, got an iterable one, which cannot be "
            "sampled"
        )
    if not len(loader.dataset):
        raise ValueError(
            "data_loader must be of a data set with an item at least, got an empty one"
        )
    if loader.batch_sampler is None:
        raise ValueError("data_loader must have a batch_size, got None")
    if loader.drop_last:
        raise ValueError(
            "data_loader must have drop_last=False, got True: Poisson draws have no last batch to "
            "drop"
        )
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in (
        SequentialSampler,
        RandomSampler,
    ):
        culprit = (
            loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
        )
        raise ValueError(
            f"data_loader must have no sampler of its own, got {type(culprit).__name__}: the "
            "account holds for independent draws at the budgets' rates only"
        )
    if getattr(loader.sampler, "replacement", False) or len(loader.sampler) != len(loader.dataset):
        raise ValueError(
            "data_loader must go once through its data set, got a sampler with replacement or of "
            "another length"
        )
    check_batched(loader.dataset, "data_loader")
    check_forgets_items(loader.dataset, "data_loader's data set")
    if loader.collate_fn is not default_collate:
        _check_order(loader)


def _check_order(loader):
    """Whoever comes second may not come first: neighbours among 33 examples, each pair collated
    both ways round.
    """
    n = len(loader.dataset)

    def collate(*examples):
        return loader.collate_fn(copy.deepcopy(list(examples)))  # it may take its examples apart

    probed = [
        loader.dataset[i]
        for i in sorted({int(i) for i in torch.linspace(0, n - 1, 33, dtype=torch.float64)})
    ]
    for a, b in zip(probed, probed[1:]):
        if same_items(collate(a, b), collate(b, a)) and not same_items(collate(a), collate(b)):
            raise ValueError(
                "data_loader must have a collate_fn that keeps the order of the examples, got one "
                "that makes the same batch of two examples in either order: each gradient is "
                "clipped to the norm of the example in its place"
            )
        alone = collate(a)
        # What changes at random, as words that are left out do, changes alone too.
        if _changed_by(alone, collate(a, b)) and all(
            same_items(alone, collate(a)) for _ in range(200)
        ):
            raise ValueError(
                "data_loader must have a collate_fn that makes each row of one example, got one in "
                "which a row changes with the other examples of the batch, as by mixup or by a "
                "mean over the batch: then no clip norm bounds what one of them contributes; mix "
                "nothing, or within an example only"
            )


def _changed_by(alone, together):
    """Whether the row of an example by itself, (1, ...), is another one in the company of another,
    (2, ...); padding to the longest does not count, before it or after.
    """
    for own, both in zip(tree_leaves(alone), tree_leaves(together)):
        if not (
            torch.is_tensor(own)
            and torch.is_tensor(both)
            and own.ndim == both.ndim > 0
            and len(both) == 2
        ):
            continue
        first = last = both[:1]
        for axis, size in enumerate(own.shape[1:], 1):
            size = min(size, both.shape[axis])
            first = first.narrow(axis, 0, size)
            last = last.narrow(axis, both.shape[axis] - size, size)
        if first.shape == own.shape and not any(
            torch.allclose(part.double(), own.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
            for part in (first, last)
        ):
            return True
    return False


def check_not_compiled(module, args):
    """Before a pass that is trained on: `torch.compile` does not trace the module."""
    if torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
        untraced: Any = torch.compiler.disable(_refuse_compiled)  # so that the loop gets its error
        untraced()


def _refuse_compiled():
    raise ValueError(
        "module must not be compiled where it is trained: gradients of examples come from hooks, "
        "which torch.compile does not keep in every case; call the module that the engine "
        "returned as it is"
    )


def _check_begins_here(module, args, kwargs):
    """Before a pass that gradients flow through, in whatever mode: no trainable layer lies before
    the module, where its gradients would be neither clipped nor noisy.
    """
    if not torch.is_grad_enabled():
        return
    own, seen = {id(p) for p in module.parameters()}, set()
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    waiting: list[Any] = [t.grad_fn for t in given if t.grad_fn is not None]
    leaves = [t for t in given if t.grad_fn is None and t.requires_grad]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
            leaves += [node.variable] if hasattr(node, "variable") else []
    outside = [p for p in leaves if isinstance(p, torch.nn.Parameter) and id(p) not in own]
    if outside:
        raise ValueError(
            "module must be the whole of what is trained, but its inputs come from trainable "
            f"parameters outside it, one of shape {tuple(outside[0].shape)}, whose gradients would "
            "be neither clipped nor noisy: make one module of all layers, or compute the inputs "
            "under torch.no_grad()"
        )


class StateLeakGuard:
    """Watches the forward passes of a module in training mode: no buffer and no parameter, frozen
    or trainable, may keep anything of its examples, for no step would hide it. Noise goes to
    gradients alone, and what a forward pass writes into a weight is there without it. Nor may what
    goes in come from trainable parameters outside.

    Buffers are compared by value in every pass, parameters by version and place, and in passes 1,
    2, 4, 8, ... by value too. On a device `spoilt` says whether a buffer has changed, and nobody
    waits for it until `look`.
    """

    def __init__(self, module):
        # a sharded module is looked at when each rank has its own part only
        self._shards: Any = shards_of(module)
        # replicas of a module run in threads, and share its hooks
        self._seen, self._begun = 0, threading.local()
        self.spoilt: Any = False
        # as they were in the pass before; whether it was said that one changed
        self._buffers, self._said = {}, False
        module.register_forward_pre_hook(_check_begins_here, with_kwargs=True)
        module.register_forward_pre_hook(self._note)
        module.register_forward_hook(self._compare)

    def __getstate__(self):
        # a copy of the module is watched on its own, and begins between passes
        return {"_seen": self._seen}

    def __setstate__(self, state):
        self._seen, self._begun, self.spoilt = state["_seen"], threading.local(), False
        self._buffers, self._said, self._shards = {}, True, None

    def _inner(self, module):
        if self._shards is None:
            return module
        self._shards.rest()
        return module._module

    def _passes(self):
        """What was noted at the beginning of each pass under way, for a module may call itself."""
        if not hasattr(self._begun, "stack"):
            self._begun.stack = []
        return self._begun.stack

    def _note(self, module, args):
        module = self._inner(module)
        watched = any(part.training for part in module.modules())
        power = self._seen & (self._seen - 1) == 0  # 0, 1, 2, 4, 8, ...
        before = noted(module, values=power) if watched else None
        if before and not self._said:
            self._look_between(before)
        self._passes().append((before, power) if watched else None)

    def _look_between(self, now):
        """Warn, once, of a buffer that the loop writes between passes. A device is not asked."""
        for what, (*_, value) in now.items():
            old = self._buffers.get(what)
            if (
                not what.startswith("buffer")
                or value is None
                or old is None
                or on_accelerator(value)
            ):
                continue
            if old.shape == value.shape and not equal(old, value):
                self._said = True
                warnings.warn(
                    f"{what} of a private run was changed between two passes of the module: no "
                    "budget covers what it tells of private data",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._buffers = {
            what: value for what, (_, _, _, value) in now.items() if what.startswith("buffer")
        }

    def _compare(self, module, args, output):
        begun = self._passes().pop()
        if begun is None:
            return
        before, power = begun
        self._seen += 1
        module = self._inner(module)
        for changed in check_untouched(module, before, name="module", wait=power).values():
            self.spoilt = self.spoilt | changed

    def look(self):
        """Whether a buffer on a device was changed."""
        if self.spoilt is not False and bool(self.spoilt):
            raise ValueError(
                "module must keep no statistics of its examples, but training changes a buffer, "
                "which no noise covers; the steps since were noise alone"
            )


def _check_types(module, mode):
    """What can be added up and given noise without loss."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(
                f"module must have real parameters, which noise goes to, got {p.dtype} in {name!r}"
            )
        if p.requires_grad and mode == "ghost" and p.element_size() < 4:
            raise ValueError(
                f"module must have parameters of float32 or float64 in ghost mode, got {p.dtype} "
                f"in {name!r}: its gradients are added up in the type of the parameters, and "
                "rounded so one example could move them by more than the clip norm; use "
                "grad_sample_mode='hooks'"
            )


def _check_plain(module):
    """Compiled code runs no hooks of layers, by which gradients of examples are found."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        if isinstance(part, torch.jit.ScriptModule) or kind == "OptimizedModule":
            raise ValueError(
                f"module must be plain Python, got a {kind}{f' in {name!r}' if name else ''}, of "
                f"torch.{'jit' if isinstance(part, torch.jit.ScriptModule) else 'compile'}, in "
                "which no hook finds the gradients of examples: give the module that it was made of"
            )


def _unsupported(module, error):
    """In words, what Opacus's validator found, once each."""
    norms = [
        f"{name or 'module'!r}"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        and any(p.requires_grad for p in part.parameters())
    ]
    if norms:
        others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        return (
            f"BatchNorm in {norms[0]}{others} mixes those of a batch: use GroupNorm, as "
            "opacus.validators.ModuleValidator.fix(module) does before the optimizer is made, or "
            "take a pretrained BatchNorm in evaluation mode and with frozen weights, eval() and "
            "requires_grad_(False), after each module.train()"
        )
    found = error.args[0] if error.args and isinstance(error.args[0], list) else [error]
    return "; ".join(dict.fromkeys(map(str, found)))


def check_module(engine, module, optimizer, mode, ranks):
    if mode == "ghost" and is_sharded(module):
        check_sharded(module, ranks)
    else:
        check_alone(module, opacus=True, name="module")
    _check_plain(module)
    if not module.training:
        raise ValueError(
            "module must be in training mode, got one in evaluation mode: call module.train() first"
        )
    check_replaced(module)
    try:
        with plain_types(module):
            engine.validate(module=module, optimizer=None, data_loader=None)
    except Exception as error:
        raise UnsupportedModuleError(
            f"module must compute each example by itself, but {_unsupported(module, error)}"
        ) from error
    check_layers(module, mode)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in module.parameters()}:
        # What stands behind the colon are Opacus's words, for those who catch them.
        raise ValueError(
            "optimizer must hold parameters of the module only: Module parameters are different "
            "than optimizer Parameters"
        )
    if forgotten := [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held
    ]:
        raise ValueError(
            f"optimizer must hold every trainable parameter of the module, but lacks {forgotten}: "
            "their gradients would be neither clipped nor noised; freeze them, or add them"
        )
    if not trainable(module):
        raise ValueError("module must have a trainable parameter, got none")
    _check_types(module, mode)
    if isinstance(getattr(optimizer, "original_optimizer", optimizer), torch.optim.LBFGS):
        raise ValueError(
            "optimizer must make its step from one gradient, got LBFGS, which takes several"
        )
