r"""Modules whose parameters are sharded by `fully_shard` (FSDP2), in ghost mode.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state; PyTorch
gathers the weights of a layer while it computes. A rank has whole examples and sees whole layers,
one after the other, so the norm of an example's gradient is found where the example is. Then

* the clipped sums of all ranks are added up by PyTorch's reduce-scatter, as a sum in the type of
  the parameters, and each rank receives its part;
* the parts meet on rank 0, which adds the noise to the whole sum, once, and sends each rank its
  part of the noisy sum: the draw is that of one process, and the key of the noise stays there;
* a rank without examples takes part in every exchange by one of zeros, whose loss does not count;
* for proofs the weights of all layers are gathered at once: then each rank looks at its own
  examples, as often as it likes, without the others.

What PyTorch may do with a sharded module is fixed before every clipped backward pass, and what
gradients were left unreduced is dropped: neither a divisor nor a gradient from elsewhere enters the
sum.

>>> plain_type(torch.nn.Linear(2, 2)).__name__
'Linear'
"""

import contextlib
from typing import Any

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from dpcompanion.engine.layers import plain_type
from dpcompanion.engine.randomness import noisy
from dpcompanion.gradients.checks import check_alone
from dpcompanion.gradients.tensors import rounded_up, squared_norms
from dpcompanion.gradients.traces import local

_INSTEAD = "or give the module as it was before fully_shard"


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with the module or a part of it."""
    return any(
        base.__name__ == "FSDPModule" for part in module.modules() for base in type(part).__mro__
    )


@contextlib.contextmanager
def plain_types(module):
    """Layers have the classes that they had before `fully_shard`, for a look at them."""
    before = [(part, type(part)) for part in module.modules()]
    try:
        for part, _ in before:
            part.__class__ = plain_type(part)
        yield
    finally:
        for part, kind in before:
            part.__class__ = kind


def _groups(module):
    """PyTorch's groups of parameters that are gathered together."""
    states = []
    for part in module.modules():
        if plain_type(part) is not type(part):
            state = part._get_fsdp_state()
            if not any(state is other for other in states):
                states.append(state)
    try:
        return [group for state in states for group in state._fsdp_param_groups]
    except AttributeError as error:
        raise ValueError(
            "module must be sharded by PyTorch 2.13 or later, whose groups of parameters are "
            f"known, got {torch.__version__}; {_INSTEAD}"
        ) from error


def check_sharded(module: nn.Module, ranks: Any) -> None:
    """Refuse shards whose gradients would be clipped, added up or given noise otherwise than those
    of one process.

    Raises:
        ValueError: a module of which the root or a parameter is not sharded, or not over all ranks,
            and one that is sharded with a policy of types or of offloading.
        ValueError: Opacus's `UnsupportedModuleError`, for layers without a rule for gradients.
    """
    with plain_types(module):
        check_alone(module, opacus=True, name="module", tensors=False)
    if plain_type(module) is type(module):
        raise ValueError(
            "module must be sharded in whole, got one of which parts were given to fully_shard and "
            f"the module itself was not: call fully_shard(module) last, {_INSTEAD}"
        )
    _rest(module)
    groups = _groups(module)
    held = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    for name, p in module.named_parameters():
        if id(p) not in held:
            raise ValueError(
                f"module must be sharded in whole, but {name!r} is no parameter that fully_shard "
                f"cut among the ranks: leave out ignored_params, {_INSTEAD}"
            )
    for name, buffer in module.named_buffers():
        if local(buffer) is not buffer:
            raise ValueError(
                f"module must have buffers that are whole on each rank, got a DTensor in {name!r}"
            )
    for group in groups:
        _check_group(group, ranks)
    for name, layer in module.named_modules():
        _check_layer(name, layer)


def check_measured(module: nn.Module) -> None:
    """Refuse shards where a filter measures the norms of all examples."""
    if is_sharded(module):
        raise ValueError(
            "module must be whole on each rank where a filter measures norms, got one after "
            "fully_shard: give it as it was before, or use make_private_with_budgets"
        )


def _check_group(group, ranks):
    for wrong in _problems(group, ranks):
        raise ValueError(f"module must be sharded {wrong}; {_INSTEAD}")


def _problems(group, ranks):
    """What is wrong with the way in which a group of parameters is sharded, in words."""
    policy, info, own = group.mp_policy, group.mesh_info, list(range(ranks.size))
    if any(kind is not None for kind in (policy.param_dtype, policy.reduce_dtype)):
        yield f"in the type of its parameters, without mp_policy, got {policy}"
    if policy.output_dtype is not None:
        yield f"with outputs as they are, without mp_policy, got {policy}"
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        yield f"without offload_policy, got {group.offload_policy}"
    if type(info).__name__ != "FSDPMeshInfo" or info.mesh.mesh.tolist() != own:
        yield f"over a mesh of one axis with all {ranks.size} ranks in their order, got {info.mesh}"
    if group._use_post_forward_mesh:
        yield "with reshard_after_forward True or False, got a number of ranks"
    if not group.unshard_in_backward or group._all_reduce_hook is not None:
        yield "without hooks on what is added up, and with its weights in the backward pass"
    comm = type(group._reduce_scatter_comm)
    if not comm.__module__.startswith("torch.distributed.fsdp."):
        yield f"with PyTorch's own reduce-scatter, got {comm.__name__}"
    for one in group.fsdp_params:
        yield from _problems_of_parameter(one, ranks)


def _problems_of_parameter(one, ranks):
    p = one.sharded_param
    own, axis = local(p), getattr(p.placements[0], "dim", None)
    if len(p.placements) > 1 or axis is None or hasattr(own, "fsdp_pre_all_gather"):
        yield f"along one axis, in plain tensors, got {p.placements} of {type(own).__name__}"
    elif own.shape[axis] != _sizes(p.shape[axis], ranks.size)[ranks.rank]:
        yield f"as torch.chunk cuts a tensor, got a part of shape {tuple(own.shape)}"
    for t in (p, getattr(one, "_unsharded_param", None)):
        if getattr(t, "_backward_hooks", None) or getattr(t, "_post_accumulate_grad_hooks", None):
            yield "without hooks on its parameters, which change what is added up"


def _check_layer(name, layer):
    known = {
        *GradSampleModuleFastGradientClipping.GRAD_SAMPLERS,
        *GradSampleModuleFastGradientClipping.NORM_SAMPLERS,
    }
    if _trains(layer) and plain_type(layer) not in known:
        raise UnsupportedModuleError(
            "module must have trainable layers for whose gradients Opacus has a rule where it is "
            f"sharded, got a {plain_type(layer).__name__} in {name or 'module'!r}: freeze it, "
            f"{_INSTEAD}"
        )


def _trains(layer):
    return any(p.requires_grad for p in layer.parameters(recurse=False))


def _sizes(length, ranks):
    """How many of `length` rows are on each rank."""
    most = -(-length // ranks)
    return [min(most, max(0, length - most * rank)) for rank in range(ranks)]


def _rest(module):
    for part in module.modules():
        if plain_type(part) is not type(part):
            part.reshard()


class Shards:
    """The shards of a module in training.

    Args:
        module: after `fully_shard`, as `check_sharded` takes it.
        ranks: those of the run.
    """

    def __init__(self, module, ranks):
        self._module, self._ranks, self._whole, self._passes = module, ranks, False, 0
        module._get_fsdp_state()._lazy_init()
        self._groups = _groups(module)

    def rest(self):
        """Every rank holds its own part only, as between steps."""
        if not self._whole:
            _rest(self._module)

    @contextlib.contextmanager
    def whole(self):
        """On all ranks together: each has all weights, and passes within wait for no other rank."""
        groups, kinds = self._groups, ("post_forward_mesh_info", "reduce_grads")
        kinds = (*kinds, "reshard_after_backward")
        kept = [(group, name, getattr(group, name)) for group in groups for name in kinds]
        self.rest()
        for part in self._module.modules():
            if plain_type(part) is not type(part):
                part.unshard()
        for group, name, _ in kept:
            setattr(group, name, None if name == kinds[0] else False)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for group, name, value in kept:
                setattr(group, name, value)
            self._drop()
            self.rest()

    @contextlib.contextmanager
    def whole_where(self, due):
        """On all ranks together: `whole`, where it is due on one of them; none goes on before all
        are ready.
        """
        with self.whole() if self._ranks.any(due) else contextlib.nullcontext():
            yield
        self._ranks.any(False)

    def _drop(self):
        """No gradient waits for its reduction; and no rank fetches weights ahead that another,
        which made other passes, does not.
        """
        for group in self._groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            for p in group.fsdp_params:
                p.unsharded_accumulated_grad = None
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.grad = None

    def check_within(self, losses, parameters):
        """Refuse losses into which a parameter enters by another way than through the module: of a
        shard no norm is known.
        """
        options: Any = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(losses.sum(), parameters, **options)
        if any(gradient is not None for gradient in found):
            raise UnsupportedModuleError(
                "criterion must depend on the module through its outputs only where the module is "
                "sharded, but a parameter enters by itself, as in a penalty: leave it out"
            )

    def settle(self):
        """What the next backward pass leaves is the sum over all ranks of its gradients, and
        nothing else.

        Raises:
            ValueError: where fully_shard's settings were changed since.
        """
        self._settle()
        self._drop()
        for p in self._module.parameters():
            p.grad = None
        # What one rank refuses no rank adds up; and sums are those of one pass.
        self._ranks.same(lambda: {"number of passes": str(self._passes)}, "make the same passes")

    def _settle(self):
        module, found = self._module, _groups(self._module)
        if len(found) != len(self._groups) or any(a is not b for a, b in zip(found, self._groups)):
            raise ValueError("module must stay sharded as it was when it was made private")
        for group in found:
            _check_group(group, self._ranks)
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        for group in self._groups:
            group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True

    def watch(self, hooks, noted, draws):
        """Before each pass of the loop: all ranks are there, each with its share of the draw."""

        def enters(module, args):
            if self._whole or not (module.training and torch.is_grad_enabled()):
                return
            with self._ranks.together():
                if noted.units is not None and noted.units != draws.last:
                    raise ValueError(
                        "a batch must be the rank's whole share of the draw where the module is "
                        f"sharded, {len(draws.last or [])} examples, got {len(noted.units)}: all "
                        "ranks must make as many passes, so leave out BatchMemoryManager"
                    )
                self._settle()
                self._passes += 1
                self._ranks.any(False)

        hooks.register_forward_pre_hook(enters, prepend=True)

    def noisy(self, parameters, sums, std, generator):
        """Each sum with its noise, and whether they were not finite, as
        `dpcompanion.engine.randomness.noisy` has them for sums that are whole.
        """

        def released(total, with_noise):
            def together(parts):
                return self._cut(with_noise(self._joined(parts, parameters)), parameters)

            return self._ranks.from_parts(total, together)

        found, spoilt = noisy(sums, std, generator, released)
        return [_sharded_like(p, own) for p, own in zip(parameters, found)], spoilt

    def _joined(self, parts, parameters):
        """The whole sum, of the parts of all ranks."""
        rests, found = list(parts), []
        for p in parameters:
            axis, pieces = p.placements[0].dim, []
            for rank, size in enumerate(_sizes(p.shape[axis], len(parts))):
                shape = list(p.shape)
                shape[axis] = size
                own, rests[rank] = rests[rank].tensor_split([torch.Size(shape).numel()])
                pieces.append(own.view(shape))
            found.append(torch.cat(pieces, axis).flatten())
        return torch.cat(found)

    def _cut(self, total, parameters):
        """The part of each rank, of the whole sum."""
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._ranks.size)]
        for p, own in zip(parameters, total.split([p.numel() for p in parameters])):
            axis = p.placements[0].dim
            pieces = own.view(p.shape).split(_sizes(p.shape[axis], len(parts)), axis)
            for part, piece in zip(parts, pieces):
                part.append(piece.flatten())
        return [torch.cat(part) for part in parts]


def _sharded_like(p, own):
    """A DTensor as p, of which a rank has the part `own`."""
    return type(p.data).from_local(
        own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


class ShardedHooks(GradSampleModuleFastGradientClipping):
    """Opacus's hooks of layers, which note the norms of each example's gradients by the names of
    the parameters: while a layer computes, these are other tensors than between steps.
    """

    def __init__(self, module, ranks, **options):
        #: {parameter: norms (n,)} of the last backward pass.
        self.norms: dict[str, torch.Tensor] = {}
        self._layers = {id(layer): name for name, layer in module.named_modules() if _trains(layer)}
        super().__init__(module, **options)
        self.names = {name for name, p in module.named_parameters() if p.requires_grad}
        self.shards = Shards(module, ranks)

    def iterate_submodules(self, module):
        return (layer for layer in module.modules() if id(layer) in self._layers)

    def _get_module_type(self, module):  # pyright: ignore[reportIncompatibleMethodOverride] (it says str)
        return plain_type(module)

    def capture_activations_hook(self, module: Any, forward_input, _forward_output):
        if not (module.training and torch.is_grad_enabled() and self.hooks_enabled):
            return
        if getattr(module, "activations", None):
            raise UnsupportedModuleError(
                "module must use each layer once where it is sharded, and each pass must go back "
                f"before the next, but {self._layers[id(module)] or 'it'!r} is called a second time"
            )
        module.activations = [[t.detach() for t in forward_input]]

    def capture_backprops_hook(
        self, module, _forward_input, forward_output, loss_reduction, batch_first
    ):
        if not self.hooks_enabled:
            return
        activations, sent = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        del module.activations, module.max_batch_len
        layer, kind, name = _stand_in(module), plain_type(module), self._layers[id(module)]
        if kind in self.NORM_SAMPLERS:
            found = self.NORM_SAMPLERS[kind](layer, activations, sent)
        else:
            samples = self.GRAD_SAMPLERS[kind](layer, activations, sent)
            found = {
                p: rounded_up(squared_norms(g).sqrt(), g.dtype) if len(g) else g.new_zeros(0)
                for p, g in samples.items()
            }
        own = {id(p): f"{name}.{own}" if name else own for own, p in layer.named_parameters()}
        self.norms |= {own[id(p)]: norms for p, norms in found.items() if p.requires_grad}

    def take_norms(self):
        """{parameter: norms} of the last backward pass; they are taken once."""
        found, self.norms = self.norms, {}
        return found


def _stand_in(layer):
    """The layer with parameters that have shapes and no values, which its rule does not need: a
    rank need not have them at this moment.
    """
    kind = plain_type(layer)
    made: Any = object.__new__(kind)
    made.__dict__ = layer.__dict__ | {
        "_parameters": {
            name: None
            if p is None
            else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for name, p in layer._parameters.items()
        }
    }
    return made


def shards_of(hooks: Any) -> Shards | None:
    """The shards of a module with Opacus's hooks; None where it is whole."""
    return hooks.shards if isinstance(hooks, ShardedHooks) else None
