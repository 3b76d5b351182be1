"""What Opacus gets wrong in layers: embeddings and their bags, positions, images by channel, empty
and packed batches.

* Opacus gives the row of `padding_idx` a gradient, which autograd does not.
* It divides no row by how often an example has it (`scale_grad_by_freq`), and takes no embedding
  bag without offsets or with a padding index, and no layer of two inputs (`Bilinear`).
* Of an empty batch of words it makes the gradient of one example, where there is none; by
  functorch, and in the mode "ew", it takes no empty batch. Nor do many models (attention reshapes
  with -1): what they put out is then made of one example of zeros, and nobody has a gradient.
* It reads images as if rows lay behind one another in memory: of a convolution whose inputs have
  their channels side by side (`torch.channels_last`) it finds another gradient.
* A model that looks its positions up once for the whole batch, `positions(torch.arange(T))` of
  shape (T, d) or (1, T, d), adds them to each example by broadcasting. Then the layer gets one sum
  of all examples' gradients, and nobody's own. So such a layer is asked for the positions of each
  example: the sum that follows is the same.
* Its backward hooks stand behind what a layer puts out, which nobody may overwrite then, as
  ``relu_`` and ``y += x`` do in every ResNet of torchvision. Here they stand at the node of the
  graph that the output comes from.
* Rows of a packed sequence are in the order of falling length. Where that is not the order of the
  batch, Opacus gives an example the gradient of another, so it is refused in whichever batch it
  comes.
"""

import functools

import torch
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from dpcompanion.engine.outputs import map_tensors


def plain_type(layer):
    """The class of a layer, or that which it had before `fully_shard`."""
    kind = type(layer)
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    return kind.__mro__[kind._orig_cls_mro_index] if sharded else kind


def embedding_grad_sample(layer, activations, backprops):
    """Examples' gradients of an embedding, {weight: (n, rows, d)}; activations: ids (n, ...)."""
    if not layer.weight.requires_grad:
        return {}
    ids, n, (rows, width) = activations[0].long(), len(activations[0]), layer.weight.shape
    sample = torch.zeros(n, rows, width, device=backprops.device, dtype=backprops.dtype)
    if n:
        ids = ids.reshape(n, -1, 1)
        sent = backprops.reshape(n, -1, width)
        if layer.padding_idx is not None:
            sent = sent.masked_fill(ids == layer.padding_idx, 0.0)
        if layer.scale_grad_by_freq:  # by how often the example has it
            sent = sent / _counts(ids, rows).gather(1, ids)
        sample.scatter_add_(1, ids.expand(-1, -1, width), sent)
    return {layer.weight: sample}


def _counts(ids, rows):
    """How often each row is in each example's ids (n, k, 1): (n, rows, 1)."""
    return torch.zeros(len(ids), rows, 1, device=ids.device).scatter_add_(
        1, ids, torch.ones(ids.shape).to(ids.device)
    )


def bag_grad_sample(layer, activations, backprops):
    """Each example's gradient of an embedding bag, {weight: (n, rows, d)}; activations: ids (n, k),
    or with offsets.
    """
    if not layer.weight.requires_grad:
        return {}
    n, (rows, width) = len(backprops), layer.weight.shape
    ids = activations[0].long()
    if len(activations) == 1:
        owners = torch.arange(n, device=ids.device).repeat_interleave(ids.shape[1])
    else:
        owners = (
            torch.searchsorted(
                activations[1], torch.arange(len(ids), device=ids.device), right=True
            )
            - 1
        )
    ids = ids.reshape(-1)
    counts = torch.ones(len(ids), device=ids.device, dtype=backprops.dtype)
    if layer.padding_idx is not None:
        counts = (ids != layer.padding_idx).to(backprops.dtype)
    if layer.mode == "mean":
        counts = counts / counts.new_zeros(n).index_add_(0, owners, counts).clamp(min=1)[owners]
    sample = backprops.new_zeros(n * rows, width)
    sample.index_add_(0, owners * rows + ids, counts[:, None] * backprops[owners])
    return {layer.weight: sample.reshape(n, rows, width)}


def bilinear_grad_sample(layer, activations, backprops):
    """Each example's gradient of a bilinear layer, which Opacus takes for one of a single input."""
    first, second = (t.to(backprops.dtype) for t in activations)
    found = {layer.weight: torch.einsum("n...o,n...i,n...j->noij", backprops, first, second)}
    if layer.bias is not None:
        found[layer.bias] = backprops.flatten(1, -2).sum(1) if backprops.ndim > 2 else backprops
    return {p: sample for p, sample in found.items() if p.requires_grad}


def _of_layer(sampler, layer, activations, backprops):
    """What a rule finds of a layer's gradients, of an empty batch none."""
    if not len(backprops):
        return {
            p: backprops.new_zeros(0, *p.shape)
            for p in layer.parameters(recurse=False)
            if p.requires_grad
        }
    activations = [t.contiguous() if torch.is_tensor(t) else t for t in activations]
    return sampler(layer, activations, backprops.contiguous())


def _by_functorch(sampler, parameters, activations, backprops):
    if not len(backprops):
        return [backprops.new_zeros(0, *p.shape) for p in parameters]
    return sampler(parameters, activations, backprops)


def mend(hooks, dim=0):
    """Opacus's hooks with this module's rules for layers in place of its own, and empty batches.

    `dim` is the axis of the examples in the module's inputs.
    """
    own = {
        nn.Embedding: embedding_grad_sample,
        nn.EmbeddingBag: bag_grad_sample,
        nn.Bilinear: bilinear_grad_sample,
    }
    if hasattr(hooks, "GRAD_SAMPLERS"):
        hooks.GRAD_SAMPLERS = {
            kind: functools.partial(_of_layer, sampler)
            for kind, sampler in {**hooks.GRAD_SAMPLERS, **own}.items()
        }
    for layer in hooks._module.modules():
        if hasattr(layer, "ft_compute_sample_grad"):
            layer.ft_compute_sample_grad = functools.partial(
                _by_functorch, layer.ft_compute_sample_grad
            )
    # which `remove_hooks` takes off again
    handles = getattr(hooks._module, "autograd_grad_sample_hooks", [])
    for layer in hooks._module.modules():
        handles += _listen_to_outputs(layer)
    if isinstance(hooks, nn.Module):
        hooks.forward = functools.partial(_forward, hooks, hooks.forward, dim)


def _listen_to_outputs(layer):
    """Opacus's backward hook of the layer, if it has one, waits at the node that its output comes
    from, and receives what the layer itself would: after all hooks of the output. The handles.
    """
    handles = []
    for key, hook in list(layer._backward_hooks.items()):
        if getattr(getattr(hook, "func", None), "__name__", "") == "capture_backprops_hook":
            del layer._backward_hooks[key]
            handles.append(layer.register_forward_hook(functools.partial(_listen, hook)))
    return handles


def _listen(hook, layer, _, output):
    first = next(filter(torch.is_tensor, tree_leaves(output)), None)
    if first is None:
        return
    # A linear layer's output of three axes is a view: who overwrites it takes the view's node out
    # of the graph, and leaves that of what it is a view of.
    source, base = first, first._base
    if base is not None and base.grad_fn is not None and base.numel() == first.numel():
        source = base if base.is_contiguous() and first.is_contiguous() else first
    node = source.grad_fn
    if node is not None:
        arrives = functools.partial(_arrives, hook, layer, source.output_nr, first.shape)
        node.register_prehook(arrives)


def _arrives(hook, layer, place, shape, gradients):
    if gradients[place] is not None:
        hook(layer, None, (gradients[place].reshape(shape),))


def _forward(hooks, forward, dim, *args, **kwargs):
    """A pass, also of an empty batch, which many models refuse and expanded weights always do."""
    expanded = isinstance(hooks, GradSampleModuleExpandedWeights)
    if plain_type(hooks._module) is not type(hooks._module):
        return _with_somebody(hooks, forward, dim, args, kwargs)
    if any(_is_empty(t, dim) for t in tree_leaves((args, kwargs))):
        try:
            if not (expanded and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError):
            pass
        return _of_nobody(hooks, dim, args, kwargs)
    if expanded and not torch.is_grad_enabled():
        return hooks._module(*args, **kwargs)
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        if not expanded or "Expanded Weights" not in str(error):
            raise
        said = str(error).strip().splitlines()[0]
        raise UnsupportedModuleError(
            "module must have layers that PyTorch's expanded weights know in the mode 'ew', but "
            f"{culprit(error, hooks)} is none: {said}; use grad_sample_mode='hooks'"
        ) from error


def _is_empty(t, dim):
    return torch.is_tensor(t) and t.ndim > dim and not t.shape[dim]


def _one(t, dim):
    """One example of zeros in the place of none."""
    return t.new_zeros(*t.shape[:dim], 1, *t.shape[dim + 1 :]) if _is_empty(t, dim) else t


def _with_somebody(hooks, forward, dim, args, kwargs):
    """A pass of a sharded module; of an empty batch that of one example of zeros, of which nothing
    is left in the outputs, so that this rank makes the exchanges that the others wait for.
    """
    if not any(_is_empty(t, dim) for t in tree_leaves((args, kwargs))):
        return forward(*args, **kwargs)
    args, kwargs = tree_map(functools.partial(_one, dim=dim), (args, kwargs))
    outputs = forward(*args, **kwargs)
    return map_tensors(outputs, lambda t: t.narrow(dim if t.ndim > dim else 0, 0, 0), _has_rows)


def _has_rows(t):
    return t.ndim > 0


def _of_nobody(hooks, dim, args, kwargs):
    """What the module puts out for no example, as of one of zeros, and gradients of no example."""
    clear_notes(hooks._module)
    one = functools.partial(_one, dim=dim)
    try:
        with torch.no_grad():
            outputs = hooks._module(*tree_map(one, args), **tree_map(one, kwargs))
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
        ZeroDivisionError,
        AssertionError,
    ) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModuleError(
            "module must take one example alone, as an empty draw is tried with one of zeros, but "
            f"{culprit(error, hooks)} does not: {said}; does it mix examples, as batch norm in "
            "training mode does?"
        ) from error
    trained = [p for p in hooks._module.parameters() if p.requires_grad]
    if torch.is_grad_enabled():
        for p in trained:
            if hasattr(hooks, "NORM_SAMPLERS"):
                p._norm_sample = p.new_zeros(0)
            else:
                p.grad_sample = p.new_zeros(0, *p.shape)
    # adds to no number
    tie = sum((p.sum().double() for p in trained), torch.zeros((), dtype=torch.float64))

    def nobody(t):
        if not t.ndim:
            return t + 0.0 * tie.to(t)
        axis = dim if t.ndim > dim and t.shape[dim] == 1 else 0
        return t.narrow(axis, 0, 0) + tie.to(t)

    return map_tensors(outputs, nobody, torch.is_floating_point)


def clear_notes(module):
    """Forget what Opacus noted of a pass that has not gone back."""
    for part in module.modules():
        for name in ("activations", "max_batch_len"):
            part.__dict__.pop(name, None)
    for p in module.parameters():
        for name in ("_current_grad_sample", "_norm_sample"):
            p.__dict__.pop(name, None)
        if hasattr(p, "_forward_counter"):
            p._forward_counter = 0


def culprit(error, hooks):
    """In words, the innermost layer in which an exception was raised."""
    names = {
        id(part): f"its layer {name!r} ({type(part).__name__})"
        for name, part in hooks._module.named_modules()
    }
    names[id(hooks._module)] = "the module itself, in no layer of it"
    found, step = "", error.__traceback__
    while step is not None:
        for name in ("self", "module", "layer"):
            found = names.get(id(step.tb_frame.f_locals.get(name)), found)
        step = step.tb_next
    return found or "what comes between its layers"


def check_layers(module, mode):
    """No layer whose gradients would be wrong in this mode.

    Raises:
        UnsupportedModuleError: naming the layer, and what takes it.
    """
    places = {}
    for name, part in module.named_modules():
        shown = repr(name or "module")
        trained = any(p.requires_grad for p in part.parameters(recurse=False))
        # that lists its cells' too
        for p in () if isinstance(part, DPRNNBase) else part.parameters(recurse=False):
            places.setdefault(id(p), []).append((shown, p.requires_grad))
        problem = _problem(part, mode) if trained else None
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            problem = (
                f"max_norm must be None in an embedding, got {part.max_norm:g} in {{}}: the "
                "forward pass would write into the rows of those words that are in the batch, "
                "which no noise covers"
            )
        if problem is not None:
            raise UnsupportedModuleError(problem.format(shown))
    for shown in places.values():
        if mode == "ghost" and len(shown) > 1 and shown[0][1]:
            raise UnsupportedModuleError(
                "module must share no weight between layers in ghost mode, which knows norms of "
                f"layers only, but {' and '.join(name for name, _ in shown)} have one; use "
                "grad_sample_mode='hooks'"
            )


def _problem(part, mode):
    """What is wrong with a trainable layer in a mode, with a place for its name; or None."""
    other = "; use grad_sample_mode='hooks'"
    if (
        isinstance(part, nn.LayerNorm)
        and mode in ("hooks", "ghost")
        and part.weight is not None
        and part.bias is None
    ):
        return (
            f"module must have a bias in each LayerNorm in the mode {mode!r}, as Opacus takes it, "
            f"got none in {{}}; use grad_sample_mode='functorch'"
        )
    if isinstance(part, (nn.Bilinear, nn.EmbeddingBag)) and mode in ("functorch", "ew"):
        return f"module must have no {type(part).__name__} in the mode {mode!r}, got {{}}{other}"
    if isinstance(part, nn.EmbeddingBag):
        if part.mode == "max" or part.scale_grad_by_freq or part.include_last_offset:
            return (
                "module must have embedding bags of the mode 'sum' or 'mean', without "
                "scale_grad_by_freq and include_last_offset, got another one in {}; use an "
                "Embedding, and reduce what it gives"
            )
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        if mode == "ew" and part.padding_idx is not None:
            return (
                "padding_idx must be None in an embedding in the mode 'ew', where PyTorch's "
                f"expanded weights give that row a gradient, got {part.padding_idx} in {{}}{other}"
            )
        if mode in ("ew", "ghost") and part.scale_grad_by_freq:
            return (
                f"scale_grad_by_freq must be False in an embedding in the mode {mode!r}, which "
                f"would count the words of the whole batch, got True in {{}}{other}"
            )
        if mode in ("functorch", "ghost") and part.sparse:
            return (
                f"sparse must be False in an embedding in the mode {mode!r}, "
                f"got True in {{}}{other}"
            )
    return None


def check_packed(module):
    """From now on packed sequences must have the order of the batch."""
    for part in module.modules():
        if isinstance(part, DPRNNBase):
            part.register_forward_pre_hook(_check_order)


def _check_order(layer, args):
    order = args[0].sorted_indices if args and isinstance(args[0], PackedSequence) else None
    if order is None or not (layer.training and torch.is_grad_enabled()):
        return
    if not torch.equal(order, torch.arange(len(order), device=order.device)):
        raise ValueError(
            f"packed sequences must be in the order of the batch, in a {type(layer).__name__}, for "
            "Opacus takes an example for another where they are sorted: use "
            f"dpcompanion.engine.{type(layer).__name__[2:]}, which takes them in any order and "
            "computes the same from the same state_dict, or pad rows without packing them"
        )


class ForEachExample:
    """Positions that a model looks up once for the whole batch are looked up for each example.

    Args:
        module: the model; watched: what the loop calls.
        batch_size: called, it gives the number of examples of the pass.
    """

    def __init__(self, module, watched, batch_size):
        self._batch_size, self._n = batch_size, None
        self._shared = set()  # layers that were seen to take one row of ids, of no example
        layers = [
            part
            for part in module.modules()
            if plain_type(part) is nn.Embedding and part.weight.requires_grad
        ]
        self._handles = [layer.register_forward_pre_hook(self._expand) for layer in layers]
        if layers:
            watched.register_forward_pre_hook(self._begin)
            watched.register_forward_hook(self._end, always_call=True)

    def __getstate__(self):
        return {"_batch_size": None, "_n": None, "_shared": set(), "_handles": []}

    def _begin(self, module, args):
        counts = module.training and torch.is_grad_enabled()
        self._n = self._batch_size() if counts and self._batch_size is not None else None

    def _end(self, module, args, outputs):
        self._n = None

    def _expand(self, layer, args):
        n = self._n
        if n is None or len(args) != 1 or not torch.is_tensor(args[0]) or not args[0].ndim:
            return None
        (ids,) = args
        if ids.ndim == 1:
            if len(ids) != n:
                self._shared.add(id(layer))
            return (ids.expand(n, -1),) if id(layer) in self._shared else None
        return (ids.expand(n, *ids.shape[1:]),) if len(ids) == 1 != n else None
