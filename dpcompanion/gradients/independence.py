"""Is an example's loss its own, whoever else is in the batch, and whatever the model saw before?

>>> def weighted(outputs, y):
...     return torch.nn.functional.cross_entropy(
...         outputs, y, weight=torch.tensor([1.0, 9.0])
...     ).expand(len(y))
>>> x, y = torch.randn(8, 3), torch.arange(8) % 2
>>> check_independence(torch.nn.Linear(3, 2), weighted, x, y)
Traceback (most recent call last):
    ...
ValueError: model and loss must treat examples one by one, but the loss of an example depends on
the rest of the batch: ...
"""

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from dpcompanion._devices import forked_rng
from dpcompanion.gradients.losses import cross_entropy
from dpcompanion.gradients.tensors import tolerances
from dpcompanion.gradients.traces import (
    beginning_alike,
    buffers_kept,
    drawing_alike,
    evaluating,
    next_draws,
    quiet,
)

_HINT = "do the shapes of outputs and targets broadcast, such as (n, 1) and (n,)?"

# Examples of the batches in which others are replaced.
_BATCH = 64

# Seeds with which a model that draws at random is tried at the beginning and at each later look,
# and examples of the small batches of all seeds but the first. A model that mixes a pass with
# probability p goes unseen at the beginning with probability (1 - p)^32: 1e-5 for p = 0.3, and 3%
# for p = 0.1.
DRAWS, DRAWS_LATER, _FEW = 32, 8, 8

# How often a loss is asked for the same, and by how much it may then differ: sums on a GPU may be
# added up in another order.
_ASKED, _REPEATED = 8, 1e-6


def check_independence(model, loss, x, y):
    """Refuse a model in which an example's loss changes with its company, in its layers' modes.

    Dropout is left out; of a model that draws at random all the same `check_company` tells. Buffers
    stay as they are.

    Raises:
        ValueError: with the losses together and alone.
    """

    def losses(x, y):
        with buffers_kept(model):
            return loss(model(x), y)

    with torch.no_grad(), forked_rng(x.device), quiet(model, _DropoutNd):
        together, again = losses(x, y), losses(x, y)
        alone = [losses(x[i : i + 1], y[i : i + 1]).sum() for i in range(len(x))]
    alone = torch.stack(alone)
    finite = alone.isfinite()
    if torch.equal(torch.nan_to_num(together), torch.nan_to_num(again)):
        relative, floor = tolerances(together)
        if not torch.allclose(together[finite], alone[finite], rtol=relative, atol=floor):
            raise ValueError(
                "model and loss must treat examples one by one, but the loss of an example "
                f"depends on the rest of the batch: {together.tolist()} together, "
                f"{alone.tolist()} alone ({_HINT})"
            )


def check_company(model, loss, x, y, seeds=range(DRAWS)):
    """Refuse a model in which a loss changes where others of the batch are replaced, in the modes
    of its layers.

    As `check_independence`, in a batch of 64 and of models that draw at random too: they draw the
    same each time. What is replaced is every place of half of the examples, then of the other half.
    `nn.RReLU`, which draws for negative numbers only and so shifts what is drawn next, is left out.
    A model that draws may mix some batches only, so it is tried with all `seeds`, with the second
    and later ones in batches of 8.

    Raises:
        ValueError: with the losses in either company; or if they depend on the passes before.
    """
    first_seed, *more_seeds = seeds
    generator, size = torch.Generator().manual_seed(0), _BATCH
    rows = torch.randint(len(x), (size,), generator=generator)
    half = torch.randperm(len(x), generator=generator) < len(x) / 2
    batches = []
    for stays in (half, ~half) if len(x) > 1 else ():
        others = stays.nonzero()[:, 0]
        others = others[torch.randint(len(others), (size,), generator=generator)]
        batches.append((stays[rows], torch.where(stays[rows], rows, others)))
    first = _losses_alike(model, loss, x, y, rows, first_seed)
    check_repeats(first, _losses_alike(model, loss, x, y, rows, first_seed))
    check_loss_repeats(model, loss, x[rows], y[rows])
    _compare_replaced(model, loss, x, y, first, batches, first_seed)
    if not batches or not more_seeds:
        return
    # as many places of either half, so that each of both batches keeps and replaces some
    stays = half[rows]
    few = torch.cat([part.nonzero()[: _FEW // 2, 0] for part in (stays, ~stays)])
    rows, batches = rows[few], [(kept[few], batch[few]) for kept, batch in batches]
    if _draws(model, loss, x, y, rows):
        for seed in more_seeds:
            first = _losses_alike(model, loss, x, y, rows, seed)
            _compare_replaced(model, loss, x, y, first, batches, seed)


def _compare_replaced(model, loss, x, y, first, batches, seed):
    """Refuse other losses than the `first` of the examples that a batch keeps, (kept, rows)."""
    for kept, batch in batches:
        found = _losses_alike(model, loss, x, y, batch, seed)
        kept = kept.to(first.device)
        if not alike(first[kept], found[kept]):
            raise ValueError(
                "model and loss must treat examples one by one, but the loss of an example depends "
                "on the rest of the batch, or its random numbers do: "
                f"{first[kept][:4].tolist()} in one batch, {found[kept][:4].tolist()} in another "
                f"({_HINT})"
            )


def _draws(model, loss, x, y, rows):
    """Whether the model or the loss draws from the generators of PyTorch, NumPy or Python."""
    seen = []

    def noting(outputs, targets):
        losses = loss(outputs, targets)
        seen.append(next_draws(x.device))
        return losses

    _losses_alike(model, noting, x, y, rows)
    with drawing_alike(x.device):
        return seen[0] != next_draws(x.device)


def check_stateless(model, loss, x, y):
    """Refuse a model whose loss of an example depends on those it saw before, one at a time."""
    ends = [torch.tensor([row]) for row in (0, len(x) - 1, 0)]
    first, _, again = (_losses_alike(model, loss, x, y, row) for row in ends)
    check_repeats(first, again)


def check_forgets(model, loss, x, y):
    """Refuse a model whose losses in evaluation mode depend on what it has seen in training mode,
    as with statistics that are kept in an attribute, which neither noise covers nor a look at
    buffers finds.
    """
    if any(module.training for module in model.modules()):
        ends = [torch.tensor([row]) for row in (0, len(x) - 1)]
        with evaluating(model):
            first, draws = (_losses_alike(model, loss, x, y, ends[0]) for _ in range(2))
        for row in ends:
            _losses_alike(model, loss, x, y, row)
        with evaluating(model):
            again = _losses_alike(model, loss, x, y, ends[0])
        if alike(first, draws):
            check_repeats(first, again)


def check_repeats(first, again):
    """Losses of the same examples, with the same draws, are the same."""
    if not alike(first, again):
        raise ValueError(
            "model must give the same losses for the same examples and draws, but they change from "
            f"pass to pass: {first[:4].tolist()}, then {again[:4].tolist()}; it must keep nothing "
            "of the examples that it has seen, and draw from no generator of its own"
        )


def check_loss_repeats(model, loss, x, y):
    """Refuse a loss that changes with what it has seen where gradients flow, such as one that is
    divided by a running mean: through it an example reaches the gradients of all others.
    """
    with torch.no_grad(), beginning_alike(model, x.device):
        outputs = model(x)

    def learnt_from(t):  # no leaf, as in training, where a loss may write into the outputs
        return t.detach().requires_grad_(t.is_floating_point()).clone()

    def asked():
        with torch.enable_grad(), beginning_alike(model, x.device):
            # it may write into what it is given
            targets = tree_map_only(torch.Tensor, torch.clone, y)
            return loss(tree_map_only(torch.Tensor, learnt_from, outputs), targets).detach()

    first, *_, last = (asked() for _ in range(_ASKED))
    if not torch.allclose(first, last, rtol=_REPEATED, atol=0.0, equal_nan=True):
        raise ValueError(
            "loss must give the same numbers for the same outputs and targets, but they change "
            f"from call to call: {first[:4].tolist()}, then {last[:4].tolist()}; it must keep "
            "nothing of the examples that it has seen, and draw from no generator of its own"
        )


def _losses_alike(model, loss, x, y, rows, seed=0):
    rows = rows.to(x.device)
    with torch.no_grad(), beginning_alike(model, x.device, seed), quiet(model, torch.nn.RReLU):
        return loss(model(x[rows]), y[rows])


def alike(one, other):
    """Whether numbers of batches of one size agree up to rounding, less than between sizes."""
    floor = tolerances(one)[1]
    largest = float(torch.nan_to_num(one, posinf=0, neginf=0).abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=floor, atol=floor * largest, equal_nan=True
    )


def check_loss(loss, args, losses, kwargs=None, parts=None, name="loss"):
    """Refuse a loss that mixes examples: of a part of a batch it must give what it gives of all.

    The outputs of the model are given, so this costs little and is looked at in every pass. A loss
    that draws at random cannot be compared: it is left to the other proofs of `train`, and refused
    where parts are given, as by the engine, which has no other. `cross_entropy` needs no look.

    Args:
        loss: what was called with `args` and `kwargs` and gave `losses`.
        parts: tensors of rows to compare; half of the batch by default.
        name: of the loss, in the error.

    Returns:
        Whether the loss mixes examples, a tensor, where it lies on a device that must not be waited
        for; or None.

    Raises:
        ValueError: with an example's loss in both.
    """
    n, given = len(losses), (args, kwargs or {})
    if n < 2 or loss is cross_entropy:
        return None
    outputs = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
    if parts is None and not any(t.ndim and len(t) == n for t in outputs):
        return None  # nothing to take a part of; the other proofs look at it

    def of(rows=None):
        def own(t):
            return (
                t.detach()[rows.to(t.device)]
                if rows is not None and t.ndim and len(t) == n
                else t.detach()
            )

        own_args, own_kwargs = tree_map_only(torch.Tensor, own, given)
        return loss(*own_args, **own_kwargs)

    mixed = None
    with torch.no_grad(), forked_rng(losses.device):
        for rows in [torch.arange(0, n, 2, device=losses.device)] if parts is None else parts:
            rows = rows.to(losses.device)
            part, whole = of(rows), losses.detach()[rows]
            if not isinstance(part, torch.Tensor) or part.shape != (len(rows),):
                got = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                raise ValueError(
                    f"{name} must return one number an example, shape ({len(rows)},), got {got}"
                )
            finite = whole.isfinite() & part.isfinite()
            largest = torch.where(finite, whole.abs(), 0).max()
            apart = finite & ((whole - part).abs() > tolerances(whole)[1] * (whole.abs() + largest))
            apart = (apart | (whole.isnan() != part.isnan())).any()
            if losses.device.type != "cpu":
                mixed = apart if mixed is None else mixed | apart
            elif apart and (parts is not None or torch.equal(of(), losses.detach())):
                refuse_loss(whole, part, name)
    return mixed


def refuse_loss(whole=None, part=None, name="loss"):
    """That a loss mixes examples, with some of them in a batch and in a part of it."""
    seen = (
        ""
        if whole is None or part is None
        else f" ({whole[:4].tolist()} in a batch, {part[:4].tolist()} in {len(part)} of it)"
    )
    raise ValueError(
        f"{name} must give each example's own, but an example's loss depends on the rest of the "
        f"batch, or on chance{seen}: class weights or a mean over the tokens of a batch do that, "
        "shapes that broadcast, such as (n, 1) and (n,), and losses that compare examples, for "
        "which there is no account; use reduction='none' and divide by what belongs to the example "
        "alone"
    )
