"""Losses of one example each that are in common use, and whether a gradient is that of one of them.

>>> outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
>>> gradient = outputs.softmax(1) - F.one_hot(targets, 3)
>>> next(loss.name for loss in standard_losses(outputs, gradient, (targets,)))
'cross entropy'
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten

from dpcompanion._devices import on_accelerator


def precise(t):
    return t if t.dtype == torch.float64 else t.float()


def rounding(dtype):
    return {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 5e-2)


def by_example(t):
    """A tensor (n, ...) as (n, numbers), with one column if each example has one number."""
    return t.reshape(len(t), t.shape[1:].numel())


def gradient_of(loss, out, batch):
    """Of the sum of (n,) losses by the outputs; None where there is no such loss of this batch."""
    leaf = out.detach().requires_grad_()
    try:
        if loss.gradient is not None:
            return loss.gradient(out, batch)
        losses = loss(leaf, batch)
        if losses is None or losses.shape != out.shape[:1] or not losses.requires_grad:
            return None
        return torch.autograd.grad(losses.sum(), leaf)[0]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def fits_to(gradient, expected, bound, scale):
    """Whether each example's gradient is the expected one, up to rounding; False if not finite."""
    off = gradient - expected
    # What is within the smallest bound of all is within each example's own; NaN is not.
    if (
        not on_accelerator(off)
        and off.numel()
        and bool(torch.linalg.vector_norm(off, torch.inf) <= bound / 50 * scale)
    ):
        return torch.tensor(True)
    difference, size = (by_example(t).abs().amax(1) for t in (off, expected))
    close = difference <= bound * size + bound / 50 * scale
    return (
        close | ~by_example(gradient).isfinite().all(1) & ~by_example(expected).isfinite().all(1)
    ).all()


def _ratios(gradient, expected, bound):
    """(n,) factors by which an example's gradient is the expected one, nan where that is 0; None if
    it is not so.
    """
    a, b = by_example(gradient).double(), by_example(expected).double()
    squares = b.square().sum(1)
    factors = torch.where(squares > 1e-20, (a * b).sum(1) / squares.clamp(min=1e-300), torch.nan)
    left = (a - factors.nan_to_num(0.0)[:, None] * b).abs().amax(1)
    sizes = a.abs().amax(1)
    alike = (left <= 3 * bound * sizes + bound / 50) & ~(factors < 0)
    return factors if bool(alike.all()) and bool((factors > 0).any()) else None


def common_factor(gradient, expected, bound):
    factors = _ratios(gradient[None], expected[None], bound)
    return None if factors is None else float(factors[0])


def _power_of_two(factor):
    return factor >= 8 and abs(torch.log2(torch.tensor(factor)).item() % 1) < 1e-3


def scaled(factor, n, mean):
    """In words, what a common factor of all examples comes of."""
    if _power_of_two(factor) and abs(factor - n) > 1e-2:
        return (
            f"is {factor:g} times what it should be, as by a torch.amp.GradScaler, which Opacus "
            "does not know: gradients would be clipped as if they were so much longer; leave it "
            "out (bfloat16 needs none)"
        )
    hint = ""
    if abs(factor / n - 1) < 1e-2 and mean:
        hint = ", as by a sum over the batch; pass loss_reduction='sum', or take the mean"
    elif abs(factor * n - 1) < 1e-2 and not mean:
        hint = ", as by a mean over the batch; pass loss_reduction='mean', or take the sum"
    return (
        f"is {factor:g} times what it should be in a batch of {n}{hint}: leave it unscaled, and "
        "divide by nothing of the batch"
    )


def resemblance(loss, gradient, found, bound, n, mean):
    """What a loss looks like that is a standard one up to a positive factor of each example; None
    if it is not.
    """
    factors = _ratios(gradient, found, bound)
    if factors is None:
        return None
    known = factors[~factors.isnan()]
    if float(known.max() - known.min()) <= 10 * bound * float(known.max()):
        if mean and len(known) < n and abs(float(known.mean()) * len(known) / n - 1) < 1e-2:
            return (
                f"it looks like {loss.name} over the {len(known)} of {n} examples that have one, "
                "as with ignore_index, so that what one contributes depends on how many others do"
            )
        return f"it looks like {loss.name} that {scaled(float(known.mean()), n, mean=mean)}"
    if loss.of_outputs_alone or gradient[0].numel() == 1 and loss.classes is None:
        return None  # of one number each, every gradient is a multiple
    if loss.tokens:
        return (
            f"it looks like {loss.name} averaged over all tokens of the batch, so that an example "
            "with many moves the weight of the others; average over each example's own tokens first"
        )
    if bool((known == 0).any()):
        return (
            f"it looks like {loss.name} that leaves out some examples (ignore_index) and divides "
            "by the number of the others"
        )
    groups = (
        []
        if loss.classes is None
        else [factors[(loss.classes == c) & ~factors.isnan()] for c in loss.classes.unique()]
    )
    if groups and all(
        len(g) < 2 or float(g.max() - g.min()) <= 10 * bound * float(g.max()) for g in groups
    ):
        return (
            f"it looks like {loss.name} with class weights, which divides by the weights of the "
            "batch, so that one example of a rare class moves the weight of all others"
        )
    return (
        f"it looks like {loss.name} with another weight for each example, which may depend on the "
        "others"
    )


class Standard:
    """A loss of one example each, `f(outputs, target) -> (n, ...)`, averaged or summed over an
    example's own numbers.

    target: called with the loader's batch and the device, it gives the target, so that the loss can
    be taken of the next batch as well. gradient: `(outputs, batch)` gives the gradient of the sum
    of the losses by a formula; by autograd if it is None.
    """

    def __init__(self, name, f, target, *, classes=None, tokens=False, gradient=None):
        self.name = name
        self._f = f
        self._target = target
        self.classes = classes
        self.tokens = tokens
        self.gradient = gradient

    @property
    def of_outputs_alone(self):
        return self._target is None

    def __call__(self, out, batch):
        target = None if self._target is None else self._target(batch, out.device)
        return self._f(out) if target is None else self._f(out, target)


def own_mean(losses, counted=None):
    losses = losses.flatten(1)
    if counted is None:
        return losses.mean(1)
    counted = counted.flatten(1)
    return (losses * counted).sum(1) / counted.sum(1).clamp(min=1)


def own_sum(losses, counted=None):
    return losses.flatten(1).sum(1) if counted is None else (losses * counted).flatten(1).sum(1)


def targets_of(batch, n):
    """Tensors of the loader's batch with n examples: (how to find it in such a batch, itself)."""
    leaves, _ = tree_flatten(batch)
    for number, leaf in enumerate(leaves):
        if not torch.is_tensor(leaf) or leaf.is_complex():
            continue
        for axis in (axis for axis, size in enumerate(leaf.shape[:2]) if size == n):

            def target(batch, device, number=number, axis=axis):
                found = tree_flatten(batch)[0][number]
                if not torch.is_tensor(found):
                    raise ValueError("the loop has written to this target")
                return found.detach().movedim(axis, 0).to(device, non_blocking=True)

            yield target, leaf.detach().movedim(axis, 0)


def standard_losses(out, gradient, batch):
    """Losses of one example each of these outputs (n, ...) and a batch, the most used first.

    `gradient` (that of the sum of the losses) shows what a target value's losses are left out by
    (`ignore_index`), and how much labels are smoothed: a value, and a number of two digits, are
    looked for that explain it.
    """
    found = list(targets_of(batch, len(out)))
    for target, value in found:
        if not (value.is_floating_point() or value.dtype == torch.bool):
            yield from _of_classes(out, gradient, target, value.to(out.device))
    for target, value in found:
        yield from _of_numbers(out, target, value)
    for name, sign in (("the outputs", 1.0), ("the outputs, negated", -1.0)):
        for reduce, kind in ((own_mean, "mean"), (own_sum, "sum")):
            yield Standard(
                f"the {kind} of {name}",
                lambda o, r=reduce, s=sign: s * r(o.reshape(len(o), -1)),
                None,
            )


#: How classes may lie in the outputs (n, ...), and which positions have targets.
_LAYOUTS = {
    "": lambda o, t: (o, t),
    " of the last axis": lambda o, t: (o.movedim(-1, 1), t),
    " of the next token": lambda o, t: (o[:, :-1].movedim(-1, 1), t[:, 1:]),
}


def _of_classes(out, gradient, target, value):
    if out.ndim < 2:
        return
    squeezed = value.ndim > 1 and value.shape[1:].numel() == 1 and out.ndim == 2
    for layout, arrange in _LAYOUTS.items():

        def arranged(o, t, arrange=arrange):
            return arrange(o, t.reshape(len(t)) if squeezed else t)

        if layout and out.ndim < 3:
            continue
        try:
            shaped, t = arranged(out, value)
            sent, _ = arranged(gradient, value)
        except IndexError:
            continue
        if shaped.shape[:1] + shaped.shape[2:] != t.shape:
            continue
        ignored = _ignored(t, ~sent.bool().any(1))
        rest = [v for v in t.unique().tolist() if not 0 <= v < shaped.shape[1]]
        tokens = t.ndim > 1
        for v in ignored:
            if any(other != v for other in rest):
                continue
            for name, raw in _losses_of_classes(_smoothing(shaped, sent, t, v)):
                for reduce, kind in (
                    ((own_mean, ""), (own_sum, ", summed over an example's tokens"))
                    if tokens
                    else ((own_mean, ""),)
                ):

                    def losses(o, t, raw=raw, reduce=reduce, v=v, arranged=arranged):
                        o, t = arranged(o, t)
                        each = raw(o, t.long(), reduction="none", ignore_index=v)
                        return reduce(each.reshape(len(each), -1), (t != v).reshape(len(t), -1))

                    formula: Any = None
                    if raw is F.cross_entropy and out.ndim == 2 and not tokens:

                        def by_formula(o, batch, v=v):
                            return cross_entropy_gradient(
                                o, target(batch, o.device).reshape(len(o)), v
                            )

                        formula = by_formula

                    yield Standard(
                        name + layout + kind,
                        losses,
                        target,
                        classes=None if tokens else t,
                        tokens=tokens,
                        gradient=formula,
                    )
    if out.ndim == 2 and value.shape[:1].numel() == value.numel() and value.numel():
        k = out.shape[1]
        if 0 <= int(value.min()) and int(value.max()) < k and k > 1:

            def one_hot(value):
                return F.one_hot(value.reshape(-1).long(), k)

            yield from _of_numbers(
                out, lambda batch, device: one_hot(target(batch, device)), one_hot(value)
            )


def _ignored(targets, quiet):
    """Targets that stand for none: -100, and others of which only positions are `quiet`, to which
    nothing is sent.
    """
    others = [v for v in targets[quiet].unique()[:4].tolist() if v != -100]
    return [-100, *(v for v in others if bool(quiet[targets == v].all()))]


def _losses_of_classes(smoothing):
    """(name, loss of PyTorch): those that take classes, with the smoothing of labels that was
    found, or None.
    """
    yield "cross entropy", F.cross_entropy
    yield "the negative log likelihood", F.nll_loss
    if smoothing:
        smoothed = functools.partial(F.cross_entropy, label_smoothing=smoothing)
        yield f"cross entropy with labels smoothed by {smoothing:g}", smoothed


def cross_entropy_gradient(outputs, targets, ignored):
    """That of the sum of cross entropies by the outputs (n, k), softmax - one_hot(targets): 0 where
    the target is ignored. Autograd says the same and takes several times as long, in each step.
    """
    counted = (targets != ignored)[:, None]
    labels = targets.long()[:, None].where(counted, 0)
    return (outputs.softmax(1).scatter_add(1, labels, outputs.new_full(labels.shape, -1.0))).where(
        counted, 0.0
    )


def _smoothing(out, sent, t, ignored):
    """How much labels are smoothed in a cross entropy that sends this, to two digits; 0 if not."""
    k = out.shape[1]
    counted = (t != ignored) & (t >= 0) & (t < k)
    if k < 2 or not bool(counted.any()):
        return 0.0
    labels = F.one_hot(t.clamp(0, k - 1).long(), k).movedim(-1, 1)
    plain, slope = out.softmax(1) - labels, labels - 1 / k
    each = ((sent * out.shape[2:].numel() - plain) * slope).sum(1) / slope.square().sum(1)
    value = round(float(each[counted].median()), 2)
    return value if 0 < value < 1 else 0.0


def _of_numbers(out, target, value):
    rows = out.shape[1:].numel()
    if value.shape[1:].numel() != rows or not rows:
        return

    def both(f, reduce):
        return lambda o, t: reduce(f(o.reshape(len(o), -1), t.reshape(len(t), -1).to(o.dtype)))

    def logistic(o, t):
        return F.binary_cross_entropy_with_logits(o, t, reduction="none")

    functions = {
        "binary cross entropy with logits": logistic,
        "the squared error": lambda o, t: (o - t).square(),
        "half the squared error": lambda o, t: (o - t).square() / 2,
        "the absolute error": lambda o, t: (o - t).abs(),
        "the Huber loss": lambda o, t: F.huber_loss(o, t, reduction="none"),
        "the logistic loss of signs": lambda o, t: F.soft_margin_loss(o, t, reduction="none"),
        "the hinge loss of signs": lambda o, t: (1 - o * t).clamp(min=0),
        "the hinge loss": lambda o, t: (1 - o * (2 * t - 1)).clamp(min=0),
        "the Poisson loss": lambda o, t: o.exp() - t * o,
        "the Poisson loss of rates": lambda o, t: o - t * torch.log(o + 1e-8),
    }
    if bool(((out >= 0) & (out <= 1)).all()):
        functions["binary cross entropy"] = lambda o, t: F.binary_cross_entropy(
            o, t, reduction="none"
        )
    classes = value.reshape(-1) if rows == 1 and not value.is_floating_point() else None
    for name, f in functions.items():
        for reduce, kind in ((own_mean, ""), (own_sum, ", summed over an example's numbers"))[
            : 2 if rows > 1 else 1
        ]:
            yield Standard(name + kind, both(f, reduce), target, classes=classes)
    if rows > 1 and out.ndim == 2:
        yield Standard(
            "cross entropy with soft labels",
            lambda o, t: F.cross_entropy(o, t.to(o.dtype), reduction="none"),
            target,
        )
        yield Standard(
            "the Kullback-Leibler divergence",
            lambda o, t: F.kl_div(o, t.to(o.dtype), reduction="none").sum(1),
            target,
        )
