"""What must hold of data, model, loss and optimizer before a run begins; otherwise one ValueError
says what is wrong.

>>> import torch
>>> check_data(torch.zeros(3, 2).numpy(), torch.zeros(3))
Traceback (most recent call last):
    ...
ValueError: data must be two tensors (x, y), got a ndarray and a Tensor; use torch.as_tensor
"""

import inspect

import torch

from dpcompanion import _checks
from dpcompanion._devices import autocasts, forked_rng, shortens_products
from dpcompanion.gradients.batches import Batch
from dpcompanion.gradients.losses import cross_entropy
from dpcompanion.gradients.traces import evaluating, naming, probing

PRECISIONS = (None, "bf16")
_IGNORED = -100  # the target of an example whose cross entropy is zero


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


def training_device(model, device=None):
    """The device to train a model on, by default its own: one with numbers, and outside of
    `torch.inference_mode`, where gradients are computed.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "train must be called outside of torch.inference_mode, in which no gradient is computed"
        )
    found = torch.device(next(model.parameters()).device if device is None else device)
    empty = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if empty or found.type == "meta":
        raise ValueError(
            f"{'model' if empty else 'device'} must hold numbers, as on 'cpu', got 'meta', a "
            "device that holds shapes alone"
        )
    return found


def check_targets(model, loss, x, y):
    """For `cross_entropy`, targets that are classes are among those that the model has outputs for,
    or -100, which is ignored.

    Raises:
        ValueError: with the first that is not, and its row.
    """
    classes = y.ndim == 1 and not y.is_floating_point() and not y.is_complex()
    if loss is not cross_entropy or not classes or not len(x):
        return
    with probing(model), torch.no_grad(), evaluating(model), forked_rng(x.device):
        try:
            outputs = model(x[:1].clone())  # a model may overwrite what it is given
        except Exception:  # of which `try_out` says more
            return
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        return
    y = y.long()
    wrong = ((y < 0) | (y >= outputs.shape[1])) & (y != _IGNORED)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"targets must lie in [0, {outputs.shape[1]}), got {int(y[row])} in row {row}"
        )


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
                said = f"there is no entry {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"model and loss must accept the data ({described}), but fail{where}: {said}"
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
            f"loss must return one number an example, shape ({n},) for {n} examples, got {got}"
            + (": a number for the whole batch cannot be taken apart" if got == "shape ()" else "")
            + (
                "; take the mean of each example's own, where nothing is padded by "
                "losses.flatten(1).mean(1)"
                if isinstance(losses, torch.Tensor) and losses.ndim > 1 and len(losses) == n
                else "; use reduction='none', and the mean over an example's own tokens where it "
                "has several"
            )
        )
    return losses
