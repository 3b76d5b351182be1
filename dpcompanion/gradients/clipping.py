r"""Sums of clipped per-example gradients, and the norms alone.

For examples :math:`i` with gradients :math:`g_i` (all trainable parameters together) and clip
norms :math:`C_i` this computes :math:`\sum_i g_i \min(1, C_i / \lVert g_i\rVert)`.  Methods:

* `func`: `torch.func.vmap` of `grad`; any model that vmap understands; holds one gradient an
  example, `microbatch_size` examples at a time.
* `ghost`: one forward and one backward pass, norms from layer inputs and output gradients
  (`dpcompanion.gradients.layers`); gradients of large layers are never held.
* `mixed`: as ghost, but layer by layer the cheaper of Gram matrix and explicit gradient; the
  fastest.
* `auto`: `mixed` if the model can be taken apart into layers, else `func`. `resolve_method`
  decides, and proves it against plain autograd on the examples with the largest gradients of a
  probe (`dpcompanion.gradients.proof`): once for a model, in each state that it is in
  (`dpcompanion.gradients.states`), and whether examples are mixed is looked at again now and then,
  with the microbatches at hand.
  The trainers have it prove `mixed` and `ghost` too; here those are taken at their word.

By `mixed` and `ghost` every pass compares the losses of half of a batch with those that it has in
all of it: a loss with class weights, or with a mean over the tokens of a batch, is refused.

A loss is a function (outputs, targets) -> (n,), one number an example, such as `cross_entropy`
here. With `precision="bf16"` the network goes forward and back in bfloat16 (autocast), on a
processor or GPU that has it. Its gradients are off by about a hundredth; privacy is not: norm,
clipping and sum are worked out in float32 from the same rounded numbers, be they inputs and output
gradients of a layer or the gradients that `mixed` holds, which are multiplied in bfloat16 as plain
autograd does it. Gradients that are made for their norm alone are multiplied in it too; to their
norm is added what rounding may have hidden, 0.4%. So the share of each example, as it is added up,
is no longer than its clip norm. As in any precision, the last bits of an example's gradient may
depend on the batch's size; these bits are larger here. It saves time on a GPU and on processors
that multiply matrices of bfloat16 (AMX). One that has it in vectors alone (avx512_bf16) gains where
layers are wide, a third of a step for the CIFAR-10 CNN, and little where they are narrow, a tenth
for ResNet-20: `python -m benchmarks networks` measures it. A gradient that is not finite counts as
zero in the sum; its norm is reported as inf. A caller's own `torch.autocast` is refused, in which
sums would be rounded; the model may have one. So are products of float32 in a shorter type
(`torch.set_float32_matmul_precision` "medium" or "high"). Where terms of a gradient cancel, what
their sum is rounded by may be longer than what is left of it: with features of 10^6 in float32,
say, or of two items that are alike and compared. A norm counts what the rounding of the example's
own terms may add, up to positions x 6e-8 of the sum of their lengths, so the share stays below the
clip norm there, too. A plan with `arithmetic="float"` counts all roundings of a sum, and adds up
the very numbers that it has measured. On a GPU convolutions are computed in full float32, whatever
`torch.backends.cudnn.allow_tf32` says.
"""

import math
import types
import weakref

import torch

from dpcompanion import _checks
from dpcompanion._devices import forked_rng
from dpcompanion._types import Loss
from dpcompanion.gradients import checks, independence, proof, states, traces
from dpcompanion.gradients.microbatches import default_microbatch_size
from dpcompanion.gradients.sums import (
    BUDGET,
    ClippedSum,
    functional,
    layerwise,
    per_example_gradients,
)
from dpcompanion.gradients.tensors import UnsupportedModel

METHODS = ("auto", "mixed", "ghost", "func")


def _in_microbatches(
    model, loss, x, y, max_grad_norm, method, microbatch_size, precision, float64=False
):
    """What `clipped_sum` adds up, microbatch by microbatch.

    Many arguments, since it takes what `clipped_sum` takes.
    """
    checks.check_data(x, y)
    checks.check_types(model, x)
    if max_grad_norm is not None and not float64:
        checks.check_sums(model)
    checks.check_precision(precision, model, x.device, method, float64)
    if microbatch_size is not None:
        _checks.whole_number("microbatch_size", microbatch_size, 1)
    _checks.one_of("method", method, METHODS)
    checks.check_model(model)
    if method == "auto":
        method = _resolved(model, loss, x, y, microbatch_size, precision, float64)
    method = _materialized(method) if float64 else method
    for part in _parts(model, loss, x, y, method, microbatch_size, precision):
        limit = (
            max_grad_norm[part]
            if isinstance(max_grad_norm, torch.Tensor) and max_grad_norm.ndim
            else max_grad_norm
        )
        if method == "func":
            yield _by_func(model, loss, x[part], y[part], limit, float64)
        else:
            yield layerwise(model, loss, x[part], y[part], limit, method, precision=precision)


def _parts(model, loss, x, y, method, microbatch_size, precision):
    """The slices of the examples (x, y) that go through the model at once."""
    size = microbatch_size or default_microbatch_size(model, loss, x, y, method, precision)
    # which hold a gradient of the whole model for each example
    if method in ("func", "materialized"):
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
        size = max(1, min(size, BUDGET // numbers))
    return [slice(start, start + size) for start in range(0, len(x), size)]


def _by_func(model, loss, x, y, limit, float64):
    try:
        return functional(model, loss, x, y, limit, float64=float64)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(f"{_TAKEN_BY_FUNC}, but it fails: {error}") from error


_TAKEN_BY_FUNC = (
    "model must be one that torch.func's vmap and grad can take (recurrent layers of torch.nn "
    "often are not: replace them by dpcompanion.engine.replace_layers(model) before the optimizer "
    "is made; models of transformers are with attn_implementation='eager')"
)


def _materialized(method):
    """What `method` becomes where sums are in float64: whatever is added up has been measured."""
    if method == "ghost":
        raise ValueError(
            "method must be 'auto', 'mixed' or 'func' where sums are added up in float64, got "
            "'ghost', which measures gradients that it does not hold"
        )
    return "materialized" if method == "mixed" else method


def clipped_sum(
    model: torch.nn.Module,
    loss: Loss,
    x: torch.Tensor,
    y: torch.Tensor,
    max_grad_norm: float | torch.Tensor,
    *,
    method: str = "auto",
    microbatch_size: int | None = None,
    precision: str | None = None,
    float64: bool = False,
) -> ClippedSum:
    """Sum of the clipped gradients of the examples (x, y), with their norms and losses.

    Many arguments, since method, precision and memory may be chosen, each with a default.

    Args:
        model: a module; its parameters with requires_grad count.
        loss: (outputs, targets) -> (n,).
        x, y: tensors whose first axis counts the examples; n = 0 gives a sum of zeros.
        max_grad_norm: a number above 0, or a tensor (n,), in which 0 leaves an example out. One on
            a GPU is taken at its word: what is below 0 or no number leaves the example out, too.
        method: "auto", "mixed", "ghost" or "func".
        microbatch_size: examples in one pass at most; by default as many as a processor's caches
            hold what they leave of (`dpcompanion.gradients.microbatches`). The sum does not depend
            on it but for rounding.
        precision: None for the model's own type, or "bf16" (see above).
        float64: hold the gradients that are measured, and add them up in float64, as a plan that
            counts what floats do asks (`dpcompanion.mechanism.floats`); sums and norms are then
            float64, and `method` is not "ghost".

    Returns:
        ClippedSum with gradients {name: shape of the parameter}, norms (n,), losses (n,).

    Raises:
        ValueError: for a model that mixes examples (layers that do; with "auto" any that is seen
            to), a loss that is reduced, an unknown method, a norm of 0, ("mixed" or "ghost") a
            model that is seen not to consist of layers, or a precision that the model or the device
            does not have.

    >>> from dpcompanion.gradients import cross_entropy
    >>> model = torch.nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    >>> result = clipped_sum(model, cross_entropy, x, y, max_grad_norm=0.1)
    >>> {name: tuple(g.shape) for name, g in result.gradients.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    if not (isinstance(max_grad_norm, torch.Tensor) or _checks.is_number(max_grad_norm)):
        max_grad_norm = torch.as_tensor(
            _checks.in_interval("max_grad_norm", max_grad_norm), device=x.device
        )
    if not isinstance(max_grad_norm, torch.Tensor) or max_grad_norm.device.type == "cpu":
        # of several, 0 is the limit of who takes no part
        several = isinstance(max_grad_norm, torch.Tensor) and max_grad_norm.ndim
        _checks.in_interval(
            "max_grad_norm", max_grad_norm, 0, math.inf, closed="left" if several else "neither"
        )
    if isinstance(max_grad_norm, torch.Tensor) and max_grad_norm.shape not in ((), (len(x),)):
        raise ValueError(
            f"max_grad_norm must be a number or have shape ({len(x)},), got "
            f"{tuple(max_grad_norm.shape)}"
        )
    total = None
    for part in _in_microbatches(
        model, loss, x, y, max_grad_norm, method, microbatch_size, precision, float64
    ):
        total = part if total is None else total + part
    if total is None:
        wide = torch.float64 if float64 else None
        none = torch.zeros(0, dtype=wide or next(model.parameters()).dtype, device=x.device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total = ClippedSum(
            {name: torch.zeros_like(p, dtype=wide) for name, p in trained.items()}, none, none
        )
    return total


def gradient_norms(
    model: torch.nn.Module,
    loss: Loss,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    method: str = "auto",
    microbatch_size: int | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Gradient norms of the examples (x, y) over all trainable parameters, (n,); inf if not finite.

    Memory: one microbatch.

    Args:
        model: a module; its parameters with requires_grad count.
        loss: (outputs, targets) -> (n,).
        x, y: tensors whose first axis counts the examples.
        method: "auto", "mixed", "ghost" or "func".
        microbatch_size: examples in one pass at most, by default as for `clipped_sum`; the norms do
            not depend on it but for rounding.
        precision: None for the model's own type, or "bf16".

    Raises:
        ValueError: for a model that mixes examples (layers that do; with "auto" any that is seen
            to), a loss that is reduced, an unknown method, ("mixed" or "ghost") a model that is
            seen not to consist of layers, or a precision that the model or the device does not
            have.

    >>> from dpcompanion.gradients import cross_entropy
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    >>> gradient_norms(torch.nn.Linear(3, 2), cross_entropy, x, y).shape
    torch.Size([5])
    """
    norms = [
        part.norms
        for part in _in_microbatches(model, loss, x, y, None, method, microbatch_size, precision)
    ]
    return (
        torch.cat(norms)
        if norms
        else torch.zeros(0, dtype=next(model.parameters()).dtype, device=x.device)
    )


def resolve_method(model, loss, x, y, method="auto", precision=None, *, float64=False):
    """What "auto" stands for: "mixed" if the model can be taken apart into layers, else "func".

    Layers are trusted only if norms and sums agree with plain autograd
    (`dpcompanion.gradients.proof`) for the examples with the largest gradients of a probe of (x,
    y), which may be all the data. Another `method` is proved likewise, and returned; "func" takes
    examples one by one in any case, and is tried on them alone. With a `precision`, norms and sums
    in it are proved too, on two of the examples, against plain autograd in the same precision. With
    `float64` what is measured is held and added up in float64.

    Raises:
        ValueError: if model and loss do not accept the data, if a parameter keeps something of
            them, if an example's loss depends on the other examples or on earlier ones, or if the
            method does not fit the model or cannot be proved because no example has a finite
            gradient, or the precision does not fit the model, the device or the method.
    """
    checks.check_precision(precision, model, x.device, method, float64)
    checks.check_model(model)
    if not len(x):
        return "func" if method == "auto" else method
    checks.try_out(model, loss, x, y)
    with traces.probing(model), traces.naming(model) as inside:
        try:
            independence.check_forgets(model, loss, x, y)
            return _proved(model, loss, x, y, method, precision, float64, inside)
        except (ValueError, torch.OutOfMemoryError) as error:
            if inside and not isinstance(error, (UnsupportedModel, torch.OutOfMemoryError)):
                raise ValueError(
                    f"model must take examples one by one and in batches, {_where(inside, error)}"
                ) from error
            raise
        except Exception as error:
            raise ValueError(
                f"model must take examples one by one and in batches, {_where(inside, error)}"
            ) from error


def _where(inside, error):
    """Which layer failed, and how."""
    where = (
        f"but layer {inside[-1]!r} fails" if inside else "but for a cause that is unknown it fails"
    )
    inside.clear()
    if "nested_tensor" in str(error):
        error = (
            "torch.nn.TransformerEncoder packs padded examples into nested tensors, which "
            "torch.func does not take; set use_nested_tensor = False on it, or use "
            "dpcompanion.engine.replace_layers(model) before the optimizer is made"
        )
    return f"{where}: {error}"


_ADVICE = "; use method='func'"
_NONE_FITS = "no method fits this model: "
_PENALTY = (
    "; where the loss uses weights itself, as a penalty does, give it to the optimizer "
    "(weight_decay): a loss is of one example's output"
)
_DATA_DEPENDENT = (
    "what is computed there depends on numbers in its inputs, by .item(), `if` or a mask as an "
    "index, which vmap cannot follow. A model of transformers looks whether a mask (n, T) masks "
    "anything: give it one of shape (n, 1, T, T), 0 where a position counts and "
    "torch.finfo(dtype).min where not"
)


def _proved(model, loss, x, y, method, precision, float64, inside):
    if method == "func":
        _try_func(model, loss, x, y, inside)
        return method
    chosen = "mixed" if method == "auto" else method
    way = _materialized(chosen) if float64 else chosen

    def candidate(x, y, limits, precision=None):
        try:
            found = layerwise(model, loss, x, y, limits, way, precision=precision)
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModel(f"by layers {_where(inside, error)}") from error
        return found.norms, found.gradients

    try:
        proof.prove(model, loss, x, y, candidate)
        rows = proof.rows_to_look_through(len(x))[: proof.PROBED].to(x.device)
        _check_norms(model, loss, x[rows], y[rows], way, None, louder=True)
        if precision is not None:
            proof.prove_in(precision, model, loss, x, y, candidate)
    except UnsupportedModel as error:
        inside.clear()
        reason = str(error).removesuffix(_ADVICE)
        try:
            _try_func(model, loss, x, y, inside)
        except ValueError as other:
            wrong = "wrong by up to"
            penalty = wrong in reason and wrong in str(other)
            raise UnsupportedModel(
                f"{_NONE_FITS}layer by layer, {reason}; "
                f"{str(other).removeprefix(_NONE_FITS)}{_PENALTY if penalty else ''}"
            ) from error
        if method == "auto" and precision is None:
            return "func"
        advice = (
            "use 'func' or 'auto'"
            if precision is None
            else "use precision=None, with which 'func' takes it"
        )
        raise UnsupportedModel(
            f"method {method!r} does not fit this model: {reason}; {advice}"
        ) from error
    return chosen


def _try_func(model, loss, x, y, inside):
    independence.check_stateless(model, loss, x, y)
    try:
        with forked_rng(x.device):
            per_example_gradients(model, loss, x[:2].clone(), y[:2].clone())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if "data-dependent" in str(error):  # what vmap says of it is about itself
            error = RuntimeError(_DATA_DEPENDENT)
        raise ValueError(f"{_TAKEN_BY_FUNC}, {_where(inside, error)}") from error

    def candidate(x, y, limits):
        found = functional(model, loss, x, y, limits)
        return found.norms, found.gradients

    try:
        proof.prove_alone(model, loss, x, y, candidate)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{_NONE_FITS}by torch.func, {error}") from error


# {model: {what else a proof depends on: [method, how often it was asked for]}}
_known = weakref.WeakKeyDictionary()

# Microbatches of a call in which norms are looked at again, spread over all of it: a call may be of
# a whole data set.
_LOOKED_AT = 4


def _resolved(model, loss, x, y, microbatch_size, precision, float64):
    """As `resolve_method` by "auto", which is asked once for a model in one state, a loss and a
    kind of data; whether examples are mixed is looked at at the 1st, 2nd, 4th, 8th ... call, with
    the examples at hand.
    """
    key = _key(model, loss, x, y, precision, float64) if len(x) else None
    proved = _known.setdefault(model, {}) if key is not None else {}
    if key is None or key not in proved:
        method = resolve_method(model, loss, x, y, precision=precision, float64=float64)
        count = 1
    else:
        method, count = proved[key]
        count += 1
    if count & (count - 1) == 0:
        look_again(
            model,
            loss,
            (x, y),
            count,
            method=method,
            microbatch_size=microbatch_size,
            precision=precision,
            float64=float64,
        )
    # a proof may fill a model's caches
    key = _key(model, loss, x, y, precision, float64) if len(x) else None
    if key is not None:
        proved = _known.setdefault(model, {})
        proved[key] = [method, count]
    return method


def look_again(
    model, loss, data, look, *, method="func", microbatch_size=None, precision=None, float64=False
):
    """Refuse a model or loss that is seen to mix some examples, without the rest of a proof.

    Of a few of them losses are compared; and norms, where they are measured layer by layer, in some
    of the microbatches in which they are clipped: what mixes large gradients only may do so with
    examples that no probe holds.

    Args:
        model, loss: as of `resolve_method`.
        data: these examples, (x, y).
        look: the number of the call or step, from 1 on: each look has random draws of its own.
        method, microbatch_size, precision, float64: of the passes that follow.

    Raises:
        ValueError: as of `resolve_method`.
    """
    x, y = data
    rows = proof.rows_to_look_through(len(x))[: proof.PROBED].to(x.device)
    if len(rows) < 2:
        return
    method = _materialized(method) if float64 else method
    start = independence.DRAWS + look * independence.DRAWS_LATER
    seeds = range(start, start + independence.DRAWS_LATER)
    with traces.probing(model):
        independence.check_company(model, loss, x[rows], y[rows], seeds)
        if method == "func":
            return  # each example goes through the model alone
        try:
            parts = _parts(model, loss, x, y, method, microbatch_size, precision)
            for part in parts[:: -(-len(parts) // _LOOKED_AT)]:
                _check_norms(model, loss, x[part], y[part], method, precision)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"method {method!r} does not fit this model: {error}; use method='func', which "
                "takes examples one by one"
            ) from error


def _check_norms(model, loss, x, y, method, precision, *, louder=False):
    """As `proof.check_norms`, of norms that are measured layer by layer."""

    def measure(loss, x, y):
        return layerwise(model, loss, x, y, None, method, precision=precision).norms

    proof.check_norms(model, loss, x, y, measure, precision, louder=louder)


def _key(model, loss, x, y, precision, float64):
    """What a proof depends on besides the model's weights, or None where that cannot be kept."""
    # A function that is written down in a loop is another object each time, of the same code.
    code = loss.__code__ if isinstance(loss, types.FunctionType) else None
    target = loss.__self__ if isinstance(loss, types.MethodType) else loss if code is None else code
    try:
        kept = weakref.ref(target)
        hash(kept)
    except TypeError:
        return None
    state = states.state_of(loss) if isinstance(loss, torch.nn.Module) else states.seen_in(loss)
    setting = states.state_of(model), state, precision, float64, torch.get_default_dtype()
    return kept, *setting, *((t.dtype, tuple(t.shape[1:]), t.device) for t in (x, y))
