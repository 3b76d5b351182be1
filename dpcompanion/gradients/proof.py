"""Is a fast way to per-example gradients right for this model?  It is tried against plain autograd.

What is fast looks at layers or at a batch, and a model may do what these do not see: use a weight outside of its
layer, overwrite an activation in place, mix examples.  `prove` takes examples one by one through plain autograd and
compares.  It is made once a run, so it can afford to be strict:

* The examples are those with the largest gradients among a probe that is spread over the data.  Rows that are not
  finite are left out; if all are, nothing is proved, and that is said.
* Tolerances are relative: a well fitted example, whose gradient is small, is proved like any other.
* Training mode is proved like evaluation mode, as it may compute something else. What is drawn at random there is
  drawn alike by all that is compared, so that neither dropout nor noise hides anything.
* All is proved twice, with the weights that the model has and with weights nearby: behind a weight of next to zero, as
  in residual blocks at their start, a wrong gradient looks right. The second time there is an example less, and the
  others come the other way round: what takes another axis for that of the examples may find as many there by chance,
  and what sorts them may find them sorted.
* Each example is clipped to another share of its gradient, so that whose gradient is whose is proved too, and each
  parameter's gradient is looked at by itself.

>>> from dpcompanion.gradients import clipping
>>> model, x, y = torch.nn.Linear(3, 2), torch.randn(50, 3), torch.arange(50) % 2
>>> def half(x, y, limits):
...     found = clipping.clipped_sum(model, clipping.cross_entropy, x, y, limits)
...     return found.norms / 2, found.gradients
>>> prove(model, clipping.cross_entropy, x, y, half)
Traceback (most recent call last):
    ...
dpcompanion.gradients.tensors.Unfit: the norms of gradients are wrong by up to 50% against plain autograd
"""

import contextlib
import math
import random
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from dpcompanion.seeds import derive_key, seed_torch
from dpcompanion.gradients.tensors import Unfit, in_best_format

# Examples that are looked through, those of them whose gradients are computed, and those that are compared.
_LOOKED_THROUGH, PROBED, _COMPARED = 64, 16, 4


def prove(model, loss, x, y, claimed):
    """Raise unless `claimed` is what plain autograd says of the examples with the largest gradients.

    Args:
        model: a module, on the device of x; it is put into evaluation mode for the proof, and back.
        loss: (outputs, targets) -> (n,).
        x, y: tensors of examples to choose from; at most 64 rows, evenly spread, are looked at.
        claimed: (x, y, clip norms (k,)) -> (norms (k,), {name: sum of the k clipped gradients}) of k examples; the
            names are those of the model's trainable parameters. It is called with the model's weights as they are,
            then with others.

    Raises:
        Unfit: a norm or a sum is wrong, or no example has a finite gradient.
        ValueError: an example's loss changes with its company, or with what the model has seen before.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y, PROBED)
    if not len(rows):
        raise Unfit("no example has a finite gradient, so that nothing can be proved; use method='func'")
    many, (x, y) = (x[rows], y[rows]), (x[rows[:_COMPARED]], y[rows[:_COMPARED]])
    fewer = slice(max(len(x) - 1, 1))
    fewer = x[fewer].flip(0), y[fewer].flip(0)
    check_independence(model, loss, x, y)
    check_company(model, loss, *many)
    with evaluating(model):
        check_independence(model, loss, x, y)
        _compare(model, loss, x, y, claimed)
        with weights_nearby(model):
            _compare(model, loss, *fewer, claimed)
    if any(module.training for module in model.modules()):
        _compare(model, loss, x, y, claimed, together=True)
        with weights_nearby(model):
            _compare(model, loss, *fewer, claimed, together=True)


def losses_in(precision, model, loss, x, y):
    """The losses, with the network in `precision` ("bf16", or None for its own) and the loss in its own."""
    return loss(outputs_in(precision, model, x), y)


def outputs_in(precision, model, x):
    """What the network gives in `precision`, in float32 where that is not its own."""
    if precision is None:
        return model(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        outputs = model(x)
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs)


def prove_in(precision, model, loss, x, y, claimed):
    """As `prove`, with the network in a lower precision on both sides, for the two examples with the largest gradients.

    That it treats examples one by one and consists of its layers is proved without rounding, by `prove`.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y)[:2]

        def lowered(x, y, limits):
            return claimed(x, y, limits, precision)

        _compare(model, loss, x[rows], y[rows], lowered, precision)
        with weights_nearby(model):
            _compare(model, loss, x[rows], y[rows], lowered, precision)


def prove_alone(model, loss, x, y, claimed):
    """As `prove`, for a way that puts each example through the model alone, whatever the model does with a batch.

    It is wrong where the framework is: PyTorch 2.13's batched gradient of an instance norm, behind which channels are
    moved to the last axis, is.  Of a model that draws at random in evaluation mode nothing can be said.
    """
    with evaluating(model):
        rows = hardest(model, loss, x, y)
        if not len(rows):
            return
        x, y = x[rows], y[rows]
        once, again = (gradients_alone(model, loss, x, y, 0)[1] for _ in range(2))
        if not all(map(torch.equal, once, again)):
            return
        _compare(model, loss, x, y, claimed)
        with weights_nearby(model):
            _compare(model, loss, x, y, claimed)


def hardest(model, loss, x, y, count=_COMPARED):
    """Rows of the `count` examples with the largest finite gradients, by plain autograd, of a probe spread over (x, y),
    the largest first."""
    norms, found = [], []
    for row in rows_to_look_through(len(x)).tolist():
        norm = torch.stack([g.double().norm() for g in gradients_alone(model, loss, x, y, row)[1]]).norm()
        if norm.isfinite():
            norms.append(norm)
            found.append(row)
        if len(found) == PROBED:
            break
    if not found:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    return torch.tensor(found, device=x.device)[torch.stack(norms).argsort(descending=True)[:count]]


def rows_to_look_through(n):
    """At most 64 of n rows, evenly spread: first every fourth of them, then those between, (k,) int64."""
    spread = torch.linspace(0, max(n - 1, 0), min(n, _LOOKED_THROUGH), dtype=torch.float64).round().long()
    return torch.cat([spread[start::4] for start in range(4)])


def gradients_alone(model, loss, x, y, row, precision=None):
    """The loss of one example, and its gradients for the trainable parameters, by plain autograd.

    Raises:
        Unfit: if autograd fails, as where a tensor is overwritten that it needs.
    """
    with torch.enable_grad():
        # A copy, for a model may overwrite what it is given.
        value = losses_in(precision, model, loss, x[row : row + 1].clone(), y[row : row + 1]).sum()
        return value.detach(), _gradients(model, value)


def _gradients(model, value, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True, **options)
    except RuntimeError as error:
        raise Unfit(f"plain autograd cannot differentiate the model: {error}") from error
    return [g.to_dense() for g in found]  # those of an embedding may be sparse


def _each(model, loss, x, y, precision, together):
    """The gradients of each example, alone or (where chance is to be the same for all of them) from one batch."""
    if not together:
        return (gradients_alone(model, loss, x, y, row, precision)[1] for row in range(len(x)))
    with torch.enable_grad(), beginning_alike(model, x.device):
        values = losses_in(precision, model, loss, in_best_format(model, x), y)
    return (_gradients(model, value, retain_graph=True) for value in values)


def _compare(model, loss, x, y, claimed, precision=None, together=False):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    sums: list[Any] = [0] * len(names)
    lengths, shares = [], torch.linspace(1, 0, len(x) + 1, dtype=torch.float64)[:-1].to(x.device)
    for share, gradients in zip(shares.tolist(), _each(model, loss, x, y, precision, together)):
        sums = [total + share * g for total, g in zip(sums, gradients)]
        lengths.append(torch.stack([g.double().norm() for g in gradients]))
    lengths = torch.stack(lengths)  # (k, parameters)
    norms = lengths.norm(dim=1)
    if not norms.isfinite().all():  # of weights nearby only; for the model's own they are finite
        return
    relative, floor = tolerances(sums[0] if precision is None else sums[0].bfloat16())
    with beginning_alike(model, x.device) if together else contextlib.nullcontext():
        theirs, totals = claimed(x, y, shares * norms)
    errors = (theirs.double() - norms).abs()
    allowed = relative * lengths.sum(0) + floor * norms.sum()
    off = [
        name
        for name, total, limit in zip(names, sums, allowed)
        if not (totals[name].to_dense() - total).double().norm() <= limit
    ]
    if not (errors <= relative * norms + floor * norms.max()).all():
        worst = 100 * float((errors / norms.max().clamp(min=1e-300)).max())
        where = f", that of {off[0]!r} among them" if off else ""
        raise Unfit(f"the norms of gradients are wrong by up to {worst:.3g}% against plain autograd{where}")
    if off:
        raise Unfit(f"the gradient of {off[0]!r} is not that of plain autograd, for a cause that is unknown")


def check_independence(model, loss, x, y):
    """Refuse a model in which an example's loss changes with its company, in the modes that its layers are in.

    Dropout is left out; of a model that draws at random all the same `check_company` tells. Buffers stay as they are.

    Raises:
        ValueError: with the losses together and alone.
    """
    dropout = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]
    devices = [x.device] if x.device.type == "cuda" else []

    def losses(x, y):
        with buffers_kept(model):
            return loss(model(x), y)

    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            for module in dropout:
                module.eval()
            together, again = losses(x, y), losses(x, y)
            alone = [losses(x[i : i + 1], y[i : i + 1]).sum() for i in range(len(x))]
        finally:
            for module in dropout:
                module.train()
    alone = torch.stack(alone)
    finite = alone.isfinite()
    if torch.equal(torch.nan_to_num(together), torch.nan_to_num(again)):
        relative, floor = tolerances(together)
        if not torch.allclose(together[finite], alone[finite], rtol=relative, atol=floor):
            raise ValueError(
                "model must treat examples one by one, but the loss of an example depends on "
                f"the rest of the batch: {together.tolist()} together, {alone.tolist()} alone"
            )


def check_company(model, loss, x, y):
    """Refuse a model in which a loss changes where others of the batch are replaced, in the modes of its layers.

    As `check_independence`, in a batch of 64 and of models that draw at random too: they draw the same each time. What
    is replaced is every place of half of the examples, then of the other half. `nn.RReLU`, which draws for negative
    numbers only and so shifts what is drawn next, is left out.

    Raises:
        ValueError: with the losses in either company; or if they depend on the passes before.
    """
    generator, size = torch.Generator().manual_seed(0), _LOOKED_THROUGH
    rows = torch.randint(len(x), (size,), generator=generator)
    half = torch.randperm(len(x), generator=generator) < len(x) / 2
    batches = []
    for stays in (half, ~half) if len(x) > 1 else ():
        others = stays.nonzero()[:, 0]
        others = others[torch.randint(len(others), (size,), generator=generator)]
        batches.append((stays[rows], torch.where(stays[rows], rows, others)))
    everybody = torch.ones(size, dtype=torch.bool)
    batches = [(kept, _losses_alike(model, loss, x, y, batch)) for kept, batch in [(everybody, rows), *batches]]
    (_, first), *replaced = batches
    check_repeats(first, _losses_alike(model, loss, x, y, rows))
    for kept, found in replaced:
        kept = kept.to(first.device)
        if not _alike(first[kept], found[kept]):
            raise ValueError(
                "model must treat examples one by one, but the loss of an example depends on the rest of the batch, or "
                f"its random numbers do: {first[kept][:4].tolist()} in one batch, {found[kept][:4].tolist()} in another"
            )


def check_stateless(model, loss, x, y):
    """Refuse a model whose loss of an example depends on what it has seen before, one example at a time."""
    ends = [torch.tensor([row]) for row in (0, len(x) - 1, 0)]
    first, _, again = (_losses_alike(model, loss, x, y, row) for row in ends)
    check_repeats(first, again)


def check_forgets(model, loss, x, y):
    """Refuse a model whose losses in evaluation mode depend on what it has seen in training mode, as with statistics
    that are kept in an attribute, which neither noise covers nor a look at buffers finds."""
    if any(module.training for module in model.modules()):
        ends = [torch.tensor([row]) for row in (0, len(x) - 1)]
        with evaluating(model):
            first, draws = (_losses_alike(model, loss, x, y, ends[0]) for _ in range(2))
        for row in ends:
            _losses_alike(model, loss, x, y, row)
        with evaluating(model):
            again = _losses_alike(model, loss, x, y, ends[0])
        if _alike(first, draws):
            check_repeats(first, again)


def check_repeats(first, again):
    """Losses of the same examples, with the same draws, are the same."""
    if not _alike(first, again):
        raise ValueError(
            "model must give the same losses for the same examples and draws, but they change from pass to pass: "
            f"{first[:4].tolist()}, then {again[:4].tolist()}; it must keep nothing of the examples that it has seen, "
            "and draw from no generator of its own"
        )


def _losses_alike(model, loss, x, y, rows):
    rows, quiet = rows.to(x.device), [m for m in model.modules() if isinstance(m, torch.nn.RReLU) and m.training]
    with torch.no_grad(), beginning_alike(model, x.device):
        try:
            for module in quiet:
                module.eval()
            return loss(model(x[rows]), y[rows])
        finally:
            for module in quiet:
                module.train()


def _alike(one, other):
    """Whether losses of batches of one size are the same up to rounding, which is less than between sizes."""
    floor = tolerances(one)[1]
    largest = float(torch.nan_to_num(one, posinf=0, neginf=0).abs().max()) if len(one) else 0.0
    return torch.allclose(one, other, rtol=floor, atol=floor * largest, equal_nan=True)


@contextlib.contextmanager
def beginning_alike(model, device):
    """As `drawing_alike`, from the same buffers too, which end as they were."""
    with buffers_kept(model), drawing_alike(device):
        yield


@contextlib.contextmanager
def drawing_alike(device, seed=0):
    """What is drawn within, by PyTorch, NumPy or Python, depends on `seed` alone; the generators end as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_torch(derive_key(seed, "proof"), device)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def buffers_kept(model):
    """Buffers end as they were, whether they were written or exchanged."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    before = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    try:
        yield
    finally:
        for place, own in places:
            place.update(own)
        with torch.no_grad():
            for b, value in before:
                if not torch.equal(b.to_dense(), value.to_dense()):
                    b.copy_(value)


@contextlib.contextmanager
def naming(model):
    """A list of the names of the layers whose forward methods are under way: after an exception, where it came from."""
    inside, hooks = [], []

    def enters(name):
        return lambda *_: inside.append(name)

    def leaves(*_):
        inside.pop()

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enters(name or "model")))
        hooks.append(module.register_forward_hook(leaves))
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def check_loss(loss, outputs, y, losses):
    """Refuse a loss that mixes examples: of half of the batch it must give what it gives of all of it.

    The outputs of the model are given, so this costs little and is looked at in every pass. A loss that draws at random
    cannot be compared, and is left to the other proofs.

    Returns:
        Whether the loss mixes examples, a tensor, where it lies on a device that must not be waited for; or None.

    Raises:
        ValueError: with an example's loss in both.
    """
    n = len(losses)
    if n < 2:
        return None
    rows = torch.arange(0, n, 2, device=losses.device)

    def own(t):
        return t.detach()[rows] if t.ndim and len(t) == n else t.detach()

    with torch.no_grad(), torch.random.fork_rng(devices=[losses.device] if losses.device.type == "cuda" else []):
        if not any(t.ndim and len(t) == n for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)):
            return None  # nothing to take a half of; the other proofs look at it
        half = loss(tree_map_only(torch.Tensor, own, outputs), y[rows])
        if not isinstance(half, torch.Tensor) or half.shape != (len(rows),):
            got = tuple(half.shape) if isinstance(half, torch.Tensor) else type(half).__name__
            raise ValueError(f"loss must return one number an example, shape ({len(rows)},), got {got}")
        whole = losses.detach()[rows]
        finite = whole.isfinite() & half.isfinite()
        floor = tolerances(whole)[1]
        largest = torch.where(finite, whole.abs(), 0).max()
        apart = finite & ((whole - half).abs() > floor * (whole.abs() + largest))
        apart = (apart | (whole.isnan() != half.isnan())).any()
        if losses.device.type != "cpu":
            return apart
        if apart and torch.equal(loss(tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), y), losses.detach()):
            refuse_loss(whole, half)
    return None


def refuse_loss(whole=None, half=None):
    """That a loss mixes examples, with some of them in a batch and in half of it."""
    seen = (
        ""
        if whole is None or half is None
        else f" ({whole[:4].tolist()} in a batch, {half[:4].tolist()} in half of it)"
    )
    raise ValueError(
        f"loss must give each example's own, but an example's loss changes with who else is in the batch{seen}: class "
        "weights or a mean over the tokens of a batch do that; use reduction='none' and divide by what belongs to the "
        "example alone"
    )


def tolerances(values):
    """(relative to what is compared, relative to the largest), by precision; a GPU may round to TF32."""
    if values.dtype == torch.float64:
        return 1e-6, 1e-9
    if values.dtype == torch.float32:
        return 1e-2, 1e-4 if values.device.type == "cpu" else 1e-3
    return 1e-1, 1e-2


@contextlib.contextmanager
def evaluating(model):
    """The model in evaluation mode, and each module in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def weights_nearby(model):
    """The trainable weights moved at random by 0.3 of their size, or of what they would begin with; then as before."""
    generator = torch.Generator().manual_seed(0)
    own = {p: p.data for p in model.parameters() if p.requires_grad}
    try:
        for p, data in own.items():
            usual = 1 / math.sqrt(data[0].numel()) if data.ndim > 1 and len(data) else 0.3
            size = 0.3 * max(data.double().square().mean().sqrt().item(), usual)
            p.data = data + size * torch.randn(data.shape, generator=generator).to(data)
        yield
    finally:
        for p, data in own.items():
            p.data = data
