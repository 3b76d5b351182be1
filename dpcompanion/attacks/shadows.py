"""LiRA: what an example scores under models that have seen it, against those that have not (Carlini
et al. 2022).
"""

import math
from typing import cast

import torch

from dpcompanion import _checks


def log_odds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""ln(p / (1 - p)) of the true class, (..., n), from logits (..., n, classes): LiRA's score.

    A logit by itself is not enough: adding a constant to all logits of an example changes no
    prediction.

    Args:
        logits: (..., n, classes), of a floating type.
        labels: the true classes, whole numbers from 0 to classes - 1, of a shape that expands to
            (..., n).

    Returns (..., n), of the type of the logits; inf where there is one class only.

    Raises:
        RuntimeError: labels that are not whole, outside their range, or of a shape that does not
            expand.

    >>> log_odds(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    tensor([2.])
    """
    labels = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    others = logits.scatter(-1, labels, -math.inf).logsumexp(-1)
    return logits.gather(-1, labels).squeeze(-1) - others


def shadow_masks(models: int, n: int, *, generator: torch.Generator) -> torch.Tensor:
    """Who is in the data of each shadow model, (models, n) booleans; every example is in exactly
    half of them.

    So a shadow model is no fair target of the others: each example that it was trained on is in one
    fewer of them. With few models that alone draws the area under the curve below 1/2. Targets get
    random halves of their own.

    Raises ValueError for an odd number of models.

    >>> masks = shadow_masks(4, 100, generator=torch.Generator().manual_seed(0))
    >>> masks.sum(0).unique()
    tensor([2])
    """
    if _checks.whole_number("models", models, 2) % 2:
        raise ValueError(
            f"models must be even, so that every example is in half of them, got {models}"
        )
    _checks.generator("generator", generator)
    draws = torch.rand(
        models, _checks.whole_number("n", n, 1), generator=generator, device=generator.device
    )
    return draws.argsort(0) < models // 2


def lira(
    targets: torch.Tensor, shadows: torch.Tensor, masks: torch.Tensor, *, variance: str = "each"
) -> torch.Tensor:
    """LiRA's log-likelihood ratio: how much likelier a score is if its model saw the example.

    Args:
        targets: (..., n) scores under one or more target models.
        shadows: (models, n) scores under the shadow models.
        masks: (models, n) booleans: who was in their data.
        variance: "each" example's own in and out variances, or "pooled" over examples (one for in
            and one for out), which is steadier below some 64 shadow models.

    Returns (..., n). Raises ValueError for an example with fewer than two shadow models in or out,
    and for scores that are not finite: where a probability was rounded to 1, `log_odds` of the
    logits says how sure the model is.

    >>> masks = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    >>> lira(
    ...     torch.tensor([3.0, 0.0]),
    ...     torch.tensor([[3.0, 0.0], [4.0, 1.0], [0.0, 3.0], [1.0, 4.0]]),
    ...     masks,
    ... )
    tensor([  6., -12.])
    """
    _check_scores(targets, shadows, masks, variance)
    ratio = 0
    for inside, sign in ((masks, 1), (~masks, -1)):
        mean, spread = _normal(shadows, inside, variance)
        ratio = ratio - sign * ((targets - mean) ** 2 / spread + spread.log()) / 2
    return ratio


def lira_offline(
    targets: torch.Tensor,
    shadows: torch.Tensor,
    masks: torch.Tensor | None = None,
    *,
    variance: str = "each",
) -> torch.Tensor:
    r"""Offline LiRA: how surprising a target's score is if the example was NOT in its data (Carlini
    et al. 2022, VI-A).

    The attack needs no model that was trained on the example, so shadow models can be trained
    before any target is attacked. With mean and variance of the example's scores under models
    without it,

    .. math:: -\ln \Pr[N(\mu_{out}, \sigma_{out}^2) > \text{score}],

    which orders examples as their :math:`\Lambda = 1 - \Pr[Z > \text{score}]` does, and does not
    saturate at 1.

    Args:
        targets: (..., n) scores under one or more target models, larger for members (`log_odds`).
        shadows: (models, n) scores under the shadow models.
        masks: (models, n) booleans: which examples were in their data; None where none was. Only
            the models without an example count for it.
        variance: "each" example's own, or "pooled" over examples.

    Returns (..., n), at least 0. Raises ValueError for an example with fewer than two models
    without it, and for scores that are not finite.

    >>> shadows = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]])
    >>> lira_offline(torch.tensor([1.0, 6.0]), shadows)
    tensor([0.6931, 3.7832])
    """
    masks = (
        torch.zeros_like(shadows, dtype=torch.bool)
        if masks is None and torch.is_tensor(shadows)
        else masks
    )
    _check_scores(targets, shadows, masks, variance)
    mean, spread = _normal(shadows, ~cast(torch.Tensor, masks), variance)
    return -torch.special.log_ndtr((mean - targets) / spread.sqrt())


def _normal(shadows, chosen, variance):
    """Mean and variance, (n,), of each example's scores under the chosen shadow models."""
    count = chosen.sum(0)
    if bool((count < 2).any()):
        raise ValueError(
            "masks must leave two shadow models on each side of every example, got "
            f"{int(count.min())}"
        )
    mean = torch.where(chosen, shadows, 0).sum(0) / count
    squares = torch.where(chosen, (shadows - mean) ** 2, 0).sum(0)
    spread = squares / (count - 1) if variance == "each" else squares.sum() / (count - 1).sum()
    # Scores that do not differ have the spread of their rounding, lest it be divided by 0.
    digits = torch.finfo(shadows.dtype).eps * shadows.abs().amax(0).clamp(min=1e-9)
    return mean, torch.maximum(spread, digits**2)


def _check_scores(targets, shadows, masks, variance):
    _checks.one_of("variance", variance, ("each", "pooled"))
    for name, given in (("targets", targets), ("shadows", shadows), ("masks", masks)):
        if not isinstance(given, torch.Tensor):
            raise ValueError(
                f"{name} must be a tensor, got a {type(given).__name__}; use torch.as_tensor"
            )
    if shadows.shape != masks.shape or shadows.ndim != 2 or targets.shape[-1] != shadows.shape[1]:
        raise ValueError(
            "shadows and masks must have shape (models, n), and targets (..., n), got "
            f"{tuple(shadows.shape)}, {tuple(masks.shape)}, {tuple(targets.shape)}"
        )
    if masks.dtype != torch.bool:
        raise ValueError(f"masks must be booleans, as by masks.bool(), got {masks.dtype}")
    for name, scores in (("targets", targets), ("shadows", shadows)):
        if not scores.is_floating_point() or not bool(scores.isfinite().all()):
            raise ValueError(
                f"{name} must be finite floats, got {scores.dtype} with "
                f"{int((~scores.isfinite()).sum())} that are not finite; where a probability was "
                "rounded to 1, take log_odds(logits, labels)"
            )
