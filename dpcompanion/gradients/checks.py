"""What must hold of data, model, loss and optimizer before a run begins; otherwise one ValueError
says what is wrong.

>>> import torch
>>> check_data(torch.zeros(3, 2).numpy(), torch.zeros(3))
Traceback (most recent call last):
    ...
ValueError: data must be two tensors (x, y), got a ndarray and a Tensor; use torch.as_tensor
"""

import contextlib
import copy
import inspect
from collections.abc import Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset

from dpcompanion import _checks
from dpcompanion._devices import autocasts, shortens_products
from dpcompanion.gradients.batches import Batch
from dpcompanion.gradients.traces import drawing_alike, evaluating, naming, probing

PRECISIONS = (None, "bf16")
# how often an item must have changed, and only after another, before that is no chance
_ROUNDS, _READINGS = 8, 20
# Seeds with which items asked for together are read: a data set that mixes them with probability p
# goes unseen with probability (1 - p)^16, 0.3% for p = 0.3.
_DRAWS = 16
# pairs of readings by which running statistics are noticed: those that give the direction in which
# an item follows what was read before it, and those that all must confirm it, 2^-14 by chance
_PAIRS = 6, 14


def check_data(x, y, n=None):
    """x and y are tensors of equally many examples, n if it is given."""
    wrong = [part for part in (x, y) if not isinstance(part, (torch.Tensor, Batch))]
    if wrong:
        advice = "use torch.as_tensor"
        if any(hasattr(part, "to_numpy") for part in wrong):  # which torch.as_tensor does not take
            advice = "use torch.as_tensor(table.to_numpy())"
        elif any(isinstance(part, (tuple, list, dict)) for part in wrong):
            advice = (
                "stack several tensors of an example into one (torch.stack), or give a data set "
                "whose items are mappings"
            )
        raise ValueError(
            f"data must be two tensors (x, y), got a {type(x).__name__} and a {type(y).__name__}; "
            f"{advice}"
        )
    for part in (x, y):
        if isinstance(part, torch.Tensor) and part.layout != torch.strided:
            raise ValueError(f"data must be dense tensors, got {part.layout}; use to_dense()")
    if not (x.ndim and y.ndim) or len(x) != len(y) or n not in (None, len(x)):
        wanted = "as many inputs as targets" if n is None else f"plan.n = {n} examples"
        raise ValueError(
            f"data must hold {wanted}, got inputs of shape {tuple(x.shape)} and targets of shape "
            f"{tuple(y.shape)}"
        )


def check_untrained(loss, name="loss"):
    """A loss that is a module has nothing to train: only what the model gives is clipped."""
    if isinstance(loss, torch.nn.Module):
        trained = [own or "its own" for own, p in loss.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(
                f"{name} must have no trainable parameters, got {', '.join(trained[:3])}: their "
                "gradients would be neither clipped nor noisy; put them into the model, or freeze "
                "them by requires_grad_(False)"
            )


def check_types(model, x):
    """All trainable parameters have one floating-point type, as have inputs with a fraction."""
    types = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(types) > 1 or not all(dtype.is_floating_point for dtype in types):
        raise ValueError(
            "model must have trainable parameters of one floating-point type, got "
            f"{', '.join(sorted(map(str, types)))}"
        )
    for dtype in types:
        if x.is_floating_point() and x.dtype != dtype:
            raise ValueError(
                f"data must have the model's type, {dtype}, but its inputs are {x.dtype}; "
                f"use x.to({dtype}), of an array x.astype({str(dtype).removeprefix('torch.')!r}), "
                f"or model.to({x.dtype})"
            )


def check_model(model):
    """Refuse layers that mix examples or keep statistics of them, and models spread over processes.

    A batch norm in evaluation mode, with statistics that it has from elsewhere, does neither: it is
    a fixed linear map.

    Raises:
        ValueError: naming the layer, for batch norm and for instance norm with running statistics
            in training mode, for lazy layers before their first batch, and for a model in
            `torch.nn.parallel.DistributedDataParallel` and the like.
    """
    check_alone(model)
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(torch.nn.parameter.is_lazy, own)):
            raise ValueError(
                f"model must have all its parameters, but those of {name or 'model'!r} (a "
                f"{type(module).__name__}) are made by its first batch: call the model once with "
                "inputs of the right shape that are nobody's, such as zeros"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"model must be plain Python, but layer {name or 'model'!r} is a "
                f"{type(module).__name__} of torch.jit, which gives no gradients of single "
                "examples: give the module that it was made of"
            )
        mixes = (
            isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            and not isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
            and (module.training or module.running_mean is None)
        )
        if mixes or getattr(module, "track_running_stats", False) and module.training:
            raise ValueError(
                f"model must treat examples one by one, but layer {name or 'model'!r} is a "
                f"{type(module).__name__} "
                f"{'in training mode' if module.training else 'without statistics'}, which mixes "
                "them; put a pretrained one into evaluation mode and leave it there, or take group "
                "norm"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model must have a trainable parameter, got none")


# Classes of modules that are spread over processes or devices, as a wrapper or in place
# (`fully_shard`, `replicate`); those of Opacus send gradients in their own optimizer.
_WRAPPERS = {"DataParallel", "DistributedDataParallel"}
_WRAPPERS_OF_OPACUS = {"DifferentiallyPrivateDistributedDataParallel", "FSDP2Wrapper"}
_IN_PLACE = {"FullyShardedDataParallel", "FSDPModule", "DDP"}


def check_alone(model, *, opacus=False, name="model", tensors=True):
    """Refuse a model that is spread over processes or devices (with `opacus` by that library, too),
    or of which a tensor is (`DTensor`, unless `tensors` are let be): no gradient would be sent
    between them, and with one seed all would draw the same noise; and of a part of a gradient no
    norm is known.

    Raises:
        ValueError: naming the class, under the `name` of the argument.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{name} must be a torch.nn.Module, got a {type(model).__name__}")
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    wrappers = classes & (_WRAPPERS | (_WRAPPERS_OF_OPACUS if opacus else set()))
    held = [p.data for p in model.parameters()] + list(model.buffers()) if tensors else []
    inside = sorted(classes & _IN_PLACE) + sorted({type(t).__name__ for t in held} & {"DTensor"})
    if wrappers or inside:
        cure = (
            "as it was before fully_shard, FullyShardedDataParallel, replicate or "
            "parallelize_module"
        )
        raise ValueError(
            f"{name} must be a plain module, whole on each process, but it is or holds "
            f"{min(wrappers, default=None) or inside[0]}, whose gradients are not clipped before "
            "they are sent between processes; give the module itself, "
            f"{cure if inside else 'model.module'}: train and the engine cut each draw among the "
            "ranks of torch.distributed and add up clipped sums themselves"
            + ("; the engine takes fully_shard in ghost mode" if opacus and inside else "")
        )


def check_sums(model):
    """The model's trainable parameters have at least the digits of float32: in their type clipped
    gradients are added up, and where a sum of thousands of them is rounded to bfloat16, one example
    moves it by several clip norms.
    """
    for name, p in model.named_parameters():
        if p.requires_grad and p.element_size() < 4:
            raise ValueError(
                "model must have trainable parameters in float32 or float64, in which clipped "
                f"gradients are added up, but {name!r} is {p.dtype}; use model.float(), with "
                "precision='bf16' for speed, or a plan with arithmetic='float'"
            )


def check_precision(precision, model, device, method="auto", float64=False):
    """Refuse a precision that the model's type, the device or the method does not allow.

    Raises:
        ValueError: naming which.
    """
    _checks.one_of("precision", precision, PRECISIONS)
    if precision is None:
        return
    if float64:
        raise ValueError("precision must be None where sums are added up in float64, got 'bf16'")
    types = {p.dtype for p in model.parameters() if p.requires_grad}
    if types != {torch.float32}:
        raise ValueError(
            f"precision 'bf16' takes a model in float32, got {', '.join(sorted(map(str, types)))}"
        )
    if method == "func":
        raise ValueError("precision 'bf16' takes method 'mixed' or 'ghost', got 'func'")
    device = torch.device(device)
    able = (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if device.type == "cpu"
        else device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    if not able:
        raise ValueError(
            f"precision 'bf16' takes a processor or GPU that has it, but {str(device)!r} does not"
        )


def check_products(device):
    """Matrices of float32 are not multiplied in a shorter type: shares would be up to 1.003 of the
    clip norm, and more where gradients cancel.
    """
    if shortens_products(device):
        raise ValueError(
            "clipped gradients must be added up in full float32, but PyTorch is set to multiply "
            "matrices in a shorter type; use torch.set_float32_matmul_precision('highest'), with "
            "precision='bf16' for speed"
        )


def check_arithmetic(device):
    """Sums of clipped gradients are made in the type that they have.

    There is no `torch.autocast` of the caller's around them: it would add up clipped gradients in
    its type, and it keeps the weights that it has cast until it ends. A model may have one of its
    own.
    """
    check_products(device)
    if autocasts(device):
        raise ValueError(
            "per-example gradients must be taken outside torch.autocast, which would round them "
            f"and their sums to {torch.get_autocast_dtype(device.type)}; leave it, and use "
            "precision='bf16' for speed"
        )


def check_trained(model, parameters):
    """The trainable parameters are those with which a run began, {name: parameter}."""
    now = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if now.keys() != parameters.keys() or any(p is not parameters[name] for name, p in now.items()):
        differ = sorted(
            name
            for name in now.keys() | parameters.keys()
            if now.get(name) is not parameters.get(name)
        )
        raise ValueError(
            "model must keep its trainable parameters while it is trained, but these were frozen, "
            f"unfrozen or exchanged: {', '.join(differ)}; train one after the other, each with a "
            "plan of its own"
        )


def numbers_of(plan):
    """The rates and clip norms of a plan, which may be tensors, as they are now."""
    return [torch.as_tensor(each).clone() for each in (plan.sample_rate, plan.max_grad_norm)]


def check_plan(plan, ours, numbers):
    """The plan is still `ours`, with the `numbers` of the start: no callback has changed it."""
    now = [torch.as_tensor(each) for each in (plan.sample_rate, plan.max_grad_norm)]
    if plan is not ours or not all(map(torch.equal, now, numbers)):
        raise ValueError(
            "plan must stay what it was when the run began, or its account would be that of "
            "another run, but a callback has changed it: for other noise or clip norms, train by "
            "one plan after the other"
        )


def check_optimizer(optimizer, model):
    """The optimizer holds all the model's trainable parameters, no others, and needs no closure."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "optimizer must be one of torch.optim, made of the model's parameters, got "
            f"{optimizer!r}"
        )
    own = {p: name for name, p in model.named_parameters()}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held <= own.keys():
        raise ValueError("optimizer must hold parameters of the model only, got others")
    left_out = [name for p, name in own.items() if p.requires_grad and p not in held]
    if left_out:
        raise ValueError(
            "optimizer must hold every trainable parameter of the model, but lacks "
            f"{', '.join(left_out)}; freeze what is not to be trained with requires_grad_(False)"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "optimizer must take dense gradients, since noise is added to every weight, but "
            "SparseAdam takes sparse ones only; use torch.optim.Adam"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer must step once a gradient, but {type(optimizer).__name__} evaluates the "
            "loss again, which would need noise again"
        )


def try_out(model, loss, x, y):
    """Model and loss accept two examples in evaluation mode, and no parameter keeps any of them."""
    x, y, described = (
        x[:2],
        y[:2],
        f"inputs of {x.dtype} and shape {tuple(x.shape)}, targets of {y.dtype}",
    )
    with probing(model), torch.no_grad(), evaluating(model):
        with naming(model) as inside:
            try:
                # copies, for a model or a loss may overwrite what it is given
                losses = loss(model(x.clone()), y.clone())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                where = f" in layer {inside[-1]!r}" if inside else ""
                raise ValueError(
                    f"model and loss must accept the data ({described}), but fail{where}: {error}"
                ) from error
    check_losses(losses, len(x))


def check_losses(losses, n):
    """`losses`, one number an example."""
    if not isinstance(losses, torch.Tensor) or losses.shape != (n,):
        got = (
            f"shape {tuple(losses.shape)}"
            if isinstance(losses, torch.Tensor)
            else type(losses).__name__
        )
        raise ValueError(
            f"loss must return one number an example, shape ({n},), got {got}"
            + (": a number for the whole batch cannot be taken apart" if got == "shape ()" else "")
            + "; use reduction='none', and the mean over an example's own tokens where it has "
            "several"
        )
    return losses


def same_items(a, b):
    """Whether two items or batches, tensors in any nesting, are equal; of what cannot be compared
    it is said of nothing but itself.
    """
    if torch.is_tensor(a) and torch.is_tensor(b):
        plain = a.layout == b.layout == torch.strided
        return (
            same_bits(a, b)
            if plain
            else a.shape == b.shape and same_bits(a.to_dense(), b.to_dense())
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_items(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_items, a, b))
    try:
        return bool(np.array_equal(cast(Any, a), b))
    except (TypeError, ValueError, NotImplementedError):  # a sparse row, for instance
        return a is b


def check_distinct(dataset, name="data", owners=None):
    """Refuse a data set that holds an item several times, as by oversampling: one example would
    count as several, and move a sum by several clip norms. Where each item has an owner, one of
    `owners` (rows,), refuse an item of several.

    Seen are parts of data sets (`Subset`), their concatenations, and parts and concatenations of
    these; items of other data sets are taken for different ones.
    """
    if type(dataset) not in (Subset, ConcatDataset):
        return
    sets, places = _sources(dataset, np.arange(len(dataset)))
    _, sets = np.unique(sets, return_inverse=True)
    _, first, which = np.unique(
        sets * (1 + places.max(initial=0)) + places, return_index=True, return_inverse=True
    )
    again = np.flatnonzero(first[which] != np.arange(len(which)))
    if owners is not None:
        shared = again[np.asarray(owners[again] != owners[first[which[again]]])]
        if len(shared):
            raise ValueError(
                f"{name} must give each row to one person, but row {shared[0]} is row "
                f"{first[which[shared[0]]]} again, and another's: clipping one owner's gradient "
                "does not bound what it adds to the other's"
            )
        return
    if len(again):
        raise ValueError(
            f"{name} must hold each item once, but item {again[0]} is item "
            f"{first[which[again[0]]]} again: what is one example in truth would count as several, "
            "and move a sum by several clip norms; or say by people= and at_most= whose each item "
            "is"
        )


def _sources(dataset, places):
    """In which data set the items at these places are, and where there: two arrays."""
    if isinstance(dataset, Sized):  # places may count from the end
        places = places % max(len(dataset), 1)
    if type(dataset) is Subset:
        return _sources(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[places])
    sets = np.full(len(places), id(dataset))
    if type(dataset) is ConcatDataset:
        ends = dataset.cumulative_sizes
        which = np.searchsorted(ends, places, side="right")
        for k, (part, begin) in enumerate(zip(dataset.datasets, (0, *ends))):
            here = which == k
            sets[here], places[here] = _sources(part, places[here] - begin)
    return sets, places


def check_batched(dataset, name="data"):
    """Where a data set gives several items at once (`__getitems__`), they come in the order in
    which they were asked for: each gradient is clipped to the norm of the example in its place.

    Refused is what stands at another's place, and an item that changes with what is asked for
    beside it. What a transform draws at random is not compared.
    """
    if not hasattr(dataset, "__getitems__"):
        return
    if (
        getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
        and len(dataset) > 1
    ):
        _check_order(dataset, name)
    if len(dataset) > 2 and _changes_beside_another(dataset):
        raise ValueError(
            f"{name} must give an item that is made of one example, but of its __getitems__ item 0 "
            "changes with the item that is asked for beside it, as by mixup or by a mean over the "
            "batch: then no clip norm bounds what one of them contributes"
        )


def _check_order(dataset, name):
    """What `__getitems__` gives stands at the place of what `__getitem__` gives."""
    places = [
        int(place)
        for place in torch.linspace(len(dataset) - 1, 0, min(8, len(dataset)), dtype=torch.float64)
    ]

    def parts(item):
        return item if isinstance(item, (tuple, list)) else (item,)

    def alone(seed):
        with drawing_alike(torch.device("cpu"), seed):
            return [parts(dataset[i]) for i in places]

    with drawing_alike(torch.device("cpu")):
        together = list(map(parts, dataset.__getitems__(list(places))))
    if len(together) != len(places):
        raise ValueError(
            f"{name} must give as many items as it is asked for, {len(places)}, got {len(together)}"
        )
    items, twins = alone(0), alone(1)
    for number, found in enumerate(together):
        for which, (got, own, twin) in enumerate(zip(found, items[number], twins[number])):
            others = (item[which] for item in items if which < len(item))
            if (
                same_items(own, twin)
                and not same_items(got, own)
                and any(same_items(got, other) for other in others)
            ):
                raise ValueError(
                    f"{name} must give items in the order in which it is asked for them, but its "
                    "__getitems__ gives others than its __getitem__"
                )


def _changes_beside_another(dataset):
    """Whether item 0 is another one beside the last item than beside the one before, and the same
    in each again.
    """
    # what mixes at random may leave it out
    return any(_changes_beside(dataset, seed) for seed in range(_DRAWS))


def _changes_beside(dataset, seed):
    def read(other):
        with drawing_alike(torch.device("cpu"), seed):
            return copy.deepcopy(dataset.__getitems__([0, other])[0])

    try:
        one, two = read(len(dataset) - 1), read(len(dataset) - 2)
        if same_items(one, two) or _shapes(one) != _shapes(two):  # padded to the longest
            return False
        again = [(read(len(dataset) - 1), read(len(dataset) - 2)) for _ in range(_READINGS)]
    except (copy.Error, TypeError, KeyError, NotImplementedError):
        return False  # no list of items, or items that cannot be copied
    return all(same_items(one, a) and same_items(two, b) for a, b in again)


def _shapes(item):
    return [tuple(getattr(leaf, "shape", ())) for leaf in tree_leaves(item)]


def check_forgets_items(dataset, name="data"):
    """An item does not depend on which were read before it, as that of a data set which mixes it
    with the last one.

    What changes at random, from generators of its own too, changes when one item is read again and
    again.

    Raises:
        ValueError: naming what was seen.
    """
    if len(dataset) < 2:
        return
    seen = False
    # items that cannot be copied
    with contextlib.suppress(copy.Error, TypeError, NotImplementedError):
        seen = _depends_on_the_last(dataset)
    if seen:
        raise ValueError(
            f"{name} must give an item that is made of one example, but its item 0 changes when "
            f"item {len(dataset) - 1} is read before it, as in a data set that mixes examples or "
            "keeps statistics of them: then no clip norm bounds what one of them contributes"
        )


def _depends_on_the_last(dataset):
    for rounds in range(_ROUNDS):
        changes = _changes_after_another(dataset, 3 if not rounds else _READINGS)
        if changes is None:  # it stays what it is, as most do
            return False
        if not changes:
            return _follows_another(dataset)
    return True


def _changes_after_another(dataset, readings):
    """Whether item 0 changes only after another one is read; None where it does not change."""

    def read(index):
        with drawing_alike(torch.device("cpu")):
            return copy.deepcopy(dataset[index])

    read(0)
    settled = read(0)
    if not all(same_items(settled, read(0)) for _ in range(readings)):
        return False
    read(len(dataset) - 1)
    return None if same_items(settled, read(0)) else True


def _follows_another(dataset):
    """Whether item 0 changes whenever it is read, and otherwise after the last item than after
    itself, as with running statistics: in one direction, pair after pair.
    """

    def read(index):
        with drawing_alike(torch.device("cpu")):
            return _numbers(dataset[index])

    def after(index):
        for _ in range(2):
            read(index)
        return read(0)

    others = 0, len(dataset) - 1
    differences = []
    for k in range(_PAIRS[0] + _PAIRS[1]):
        # each second pair the other way round, so that a drift has no direction
        found = {index: after(index) for index in others[:: -1 if k % 2 else 1]}
        if found[0].shape != found[others[1]].shape:
            return False
        differences.append(np.nan_to_num(found[others[1]] - found[0]))
    if len({d.shape for d in differences}) > 1:
        return False
    direction = np.mean(differences[: _PAIRS[0]], axis=0)
    return all(float((d * direction).sum()) > 0 for d in differences[_PAIRS[0] :])


def _numbers(item):
    """The numbers of an item, one after the other."""
    found = [np.zeros(0)]
    for leaf in tree_leaves(item):
        if torch.is_tensor(leaf):
            plain = leaf.layout == torch.strided and not leaf.is_complex()
            leaf = leaf.detach().cpu().double().numpy() if plain else None
        leaf = np.asarray(leaf)
        if leaf.dtype.kind in "biuf":
            found.append(leaf.astype(np.float64).ravel())
    return np.concatenate(found)


def same_bits(one, other):
    """Two tensors of one type and shape hold the same bits, wherever they lie; nan is itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if (
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    ):
        return True
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (one, other.to(one.device)))
    return torch.equal(one, other)
