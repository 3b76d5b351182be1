r"""Audits: from the errors of a distinguisher to lower bounds on epsilon.

Someone sees one output of a mechanism and guesses which of two neighbouring data sets it
came from.  If the mechanism is (epsilon, delta)-private, no guess is much better than chance:

.. math::
    \text{TPR} \le e^\varepsilon\, \text{FPR} + \delta, \qquad
    1 - \text{FPR} \le e^\varepsilon (1 - \text{TPR}) + \delta,

and if it is mu-GDP (no easier to tell apart than N(0, 1) and N(mu, 1); Dong et al. 2022),
:math:`\Phi^{-1}(\text{TPR}) - \Phi^{-1}(\text{FPR}) \le \mu`.  Rates counted in fresh trials become
lower bounds that hold with a stated confidence, by Clopper and Pearson (1934).  A claim below
such a bound is refuted; a bound below a claim proves nothing.

The guess, its threshold included, must be fixed before the trials that are counted.

>>> epsilon_lower_bound(true_positives=900, positives=1000, false_positives=10, negatives=1000, delta=1e-5)
3.8719...
>>> mu_lower_bound(true_positives=900, positives=1000, false_positives=10, negatives=1000)
3.2634...

**LiRA** (Carlini et al. 2022) asks of one example whether a model was trained on it.  Shadow models are trained on
random halves of the data; what an example scores under those that saw it, and under those that did not,
is taken as two Gaussians, and the target's score is weighed between them::

    masks = shadow_masks(64, n, generator=generator)     # who is in which shadow model's data
    scores = shadow_scores(fit, masks, size=16, jobs=2)  # (64, n) log-odds of the true class
    ratios = lira(target_scores, scores, masks)
    auc(ratios[members], ratios[~members])
"""

import math
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, overload

import torch
from scipy import special

from dpcompanion import _checks
from dpcompanion._types import Array, Numbers


_T = TypeVar("_T")


class Bounds(typing.NamedTuple, Generic[_T]):
    """One-sided bounds on a probability."""

    lower: _T
    upper: _T


@overload
def clopper_pearson(successes: float, trials: float, *, confidence: float = ...) -> Bounds[float]: ...
@overload
def clopper_pearson(successes: Numbers, trials: Numbers, *, confidence: float = ...) -> Bounds[torch.Tensor]: ...
def clopper_pearson(successes: Numbers, trials: Numbers, *, confidence: float = 0.95) -> Bounds[Any]:
    """One-sided bounds on a probability, each missed with probability at most 1 - confidence.

    Args:
        successes: whole numbers from 0 to the trials; a number or a tensor.
        trials: whole numbers of 1 or more; a number or a tensor. The two broadcast.
        confidence: of each bound by itself, in (0, 1).

    Returns `Bounds`, (lower, upper): floats of numbers, else float64 tensors.

    Raises:
        ValueError: no trial, successes beyond the trials, counts that are not whole, or a confidence outside (0, 1).

    Source: Clopper and Pearson 1934.

    >>> clopper_pearson(0, 100)
    Bounds(lower=0.0, upper=0.0295...)
    """
    given = successes, trials
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    _checks.in_interval("trials", trials, 1)
    successes, trials = (torch.as_tensor(v, dtype=torch.float64) for v in (successes, trials))
    if bool(((successes < 0) | (successes > trials) | (successes % 1 != 0) | (trials % 1 != 0)).any()):
        raise ValueError(
            f"successes must be whole numbers between 0 and the trials, got {successes.tolist()} of {trials.tolist()}"
        )
    k, n = torch.broadcast_tensors(successes, trials)
    k, n = k.numpy(), n.numpy()
    lower = special.betaincinv(k.clip(min=1), n - k + 1, 1 - confidence) * (k > 0)
    upper = special.betaincinv(k + 1, (n - k).clip(min=1), confidence) * (k < n) + (k == n)
    return Bounds(*(_checks.as_given(torch.as_tensor(bound), *given) for bound in (lower, upper)))


@overload
def epsilon_lower_bound(
    *,
    true_positives: float,
    positives: float,
    false_positives: float,
    negatives: float,
    delta: float,
    confidence: float = ...,
) -> float: ...
@overload
def epsilon_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    delta: float,
    confidence: float = ...,
) -> torch.Tensor: ...
def epsilon_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    delta: float,
    confidence: float = 0.95,
) -> float | torch.Tensor:
    """The largest epsilon, at least 0, that the counts refute; in both directions.

    Args:
        true_positives, positives: right guesses among the trials of the first data set; numbers or tensors.
        false_positives, negatives: wrong guesses among the trials of the second.
        delta: in [0, 1).
        confidence: that the true epsilon is not below the result, for each entry by itself. A bound on each of the two
            rates enters, and they share it equally.

    Returns a float of numbers, else a float64 tensor.
    """
    delta = _checks.number("delta", delta, 0, 1, closed="left")
    given = true_positives, positives, false_positives, negatives
    tpr, fpr = _rates(*given, confidence)
    found = torch.maximum((tpr - delta) / fpr, (1 - fpr - delta) / (1 - tpr)).clamp(min=1).log()
    return _checks.as_given(found, *given)


@overload
def mu_lower_bound(
    *, true_positives: float, positives: float, false_positives: float, negatives: float, confidence: float = ...
) -> float: ...
@overload
def mu_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    confidence: float = ...,
) -> torch.Tensor: ...
def mu_lower_bound(
    *,
    true_positives: Numbers,
    positives: Numbers,
    false_positives: Numbers,
    negatives: Numbers,
    confidence: float = 0.95,
) -> float | torch.Tensor:
    """The largest mu, at least 0, such that the counts refute mu-GDP.

    With `dpcompanion.accounting.gaussian_epsilon` it becomes an epsilon at any delta, for mechanisms that are claimed
    to be Gaussian only.

    Args:
        true_positives, positives: right guesses among the trials of the first data set; numbers or tensors.
        false_positives, negatives: wrong guesses among the trials of the second.
        confidence: that the true mu is not below the result, for each entry by itself. A bound on each of the two rates
            enters, and they share it equally.

    Returns a float of numbers, else a float64 tensor.
    """
    given = true_positives, positives, false_positives, negatives
    tpr, fpr = _rates(*given, confidence)
    # Swapping the two data sets gives the same number: the trade-off of Gaussians is symmetric.
    return _checks.as_given((torch.special.ndtri(tpr) - torch.special.ndtri(fpr)).clamp(min=0), *given)


def _rates(true_positives, positives, false_positives, negatives, confidence):
    """The least rate of right guesses and the greatest of wrong ones, which hold together with the confidence."""
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    each = (1 + confidence) / 2
    bounds = (
        clopper_pearson(true_positives, positives, confidence=each).lower,
        clopper_pearson(false_positives, negatives, confidence=each).upper,
    )
    return (torch.as_tensor(bound, dtype=torch.float64) for bound in bounds)


class Interval(typing.NamedTuple):
    """An estimate and a two-sided confidence interval."""

    value: float
    low: float
    high: float


class LossThreshold(typing.NamedTuple):
    """A loss-threshold attack: the threshold, its success on fresh examples, and on those that chose it."""

    threshold: float
    success: Interval
    fitted: float

    @property
    def advantage(self) -> float:
        """2 success - 1: 0 for guessing, 1 for certainty."""
        return 2 * self.success.value - 1


def loss_threshold_attack(
    members: Array, nonmembers: Array, *, generator: torch.Generator, confidence: float = 0.95
) -> LossThreshold:
    """Call an example a member if its loss is at most a threshold (Yeom et al. 2018; Yu et al. 2022, section 5.3).

    As many members as nonmembers are drawn and both are cut in half: one half chooses the threshold with the most right
    answers, the other one counts them. `fitted`, the success on the first half, is too good: the threshold was made
    for it, by the more the fewer examples there are.

    Args:
        members, nonmembers: (k,) and (m,) losses of examples in and out of the training data, at least 2 each.
        generator: a torch.Generator for the draws.
        confidence: of the two-sided interval of Clopper and Pearson; it is about other examples, not other models.

    >>> losses = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0))
    >>> found = loss_threshold_attack(losses[0] * 0.8, losses[1], generator=torch.Generator().manual_seed(0))
    >>> [round(x, 2) for x in found.success], round(found.fitted, 2)
    ([0.6, 0.56, 0.63], 0.6)
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    _checks.generator("generator", generator)
    sides = _scores(members, nonmembers)
    half = min(map(len, sides)) // 2
    if not half:
        raise ValueError(
            f"members and nonmembers must hold two losses at least, got {len(sides[0])} and {len(sides[1])}"
        )
    drawn = [side[torch.randperm(len(side), generator=generator)[: 2 * half]] for side in sides]
    (chosen, other), (trial, other_trial) = zip(*(side.split(half) for side in drawn))
    thresholds = torch.cat((chosen, other)).sort().values
    called, wrongly = (torch.searchsorted(side.sort().values, thresholds, right=True) for side in (chosen, other))
    best = int((called - wrongly).argmax())
    threshold = thresholds[best]
    right = int((trial <= threshold).sum() + (other_trial > threshold).sum())
    low, high = clopper_pearson(right, 2 * half, confidence=(1 + confidence) / 2)
    return LossThreshold(
        float(threshold),
        Interval(right / (2 * half), low, high),
        0.5 + float(called[best] - wrongly[best]) / (2 * half),
    )


def log_odds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""ln(p / (1 - p)) of the true class, (..., n), from logits (..., n, classes): the score that LiRA needs.

    A logit by itself is not enough: adding a constant to all logits of an example changes no prediction.

    Args:
        logits: (..., n, classes), of a floating type.
        labels: the true classes, whole numbers from 0 to classes - 1, of a shape that expands to (..., n).

    Returns (..., n), of the type of the logits; inf where there is one class only.

    Raises:
        RuntimeError: labels that are not whole, outside their range, or of a shape that does not expand.

    >>> log_odds(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    tensor([2.])
    """
    labels = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    others = logits.scatter(-1, labels, -math.inf).logsumexp(-1)
    return logits.gather(-1, labels).squeeze(-1) - others


def shadow_masks(models: int, n: int, *, generator: torch.Generator) -> torch.Tensor:
    """Who is in the data of each shadow model, (models, n) booleans; every example is in exactly half of them.

    So a shadow model is no fair target of the others: each example that it was trained on is in one fewer of them. With
    few models that alone draws the area under the curve below 1/2. Targets get random halves of their own.

    Raises ValueError for an odd number of models.

    >>> masks = shadow_masks(4, 100, generator=torch.Generator().manual_seed(0))
    >>> masks.sum(0).unique()
    tensor([2])
    """
    if _checks.whole_number("models", models, 2) % 2:
        raise ValueError(f"models must be even, so that every example is in half of them, got {models}")
    _checks.generator("generator", generator)
    draws = torch.rand(models, _checks.whole_number("n", n, 1), generator=generator, device=generator.device)
    return draws.argsort(0) < models // 2


def shadow_scores(fit: Callable[..., Any], masks: torch.Tensor, *, size: int = 1, jobs: int = 1) -> torch.Tensor:
    """The scores of all examples under every shadow model, (models, n).

    Args:
        fit: (numbers (k,), masks (k, n)) -> (k, n) scores of models trained on these masks, such as `log_odds`.
        masks: (models, n) booleans.
        size: how many models `fit` trains at a time.
        jobs: how many such sets to train at once, by joblib; whatever back end is active there (processes, Dask, Ray)
            carries them. `fit` must then be picklable. 1 runs them here.

    >>> shadow_scores(lambda numbers, masks: masks.double() + numbers[:, None], torch.eye(2, dtype=torch.bool))
    tensor([[1., 0.],
            [1., 2.]], dtype=torch.float64)
    """
    if not _checks.whole_number("jobs", jobs, -1):
        raise ValueError("jobs must be 1 or more, or -1 for all processors, got 0")
    numbers = torch.arange(len(masks)).split(_checks.whole_number("size", size, 1))
    if jobs == 1:
        return torch.cat([fit(some, masks[some]) for some in numbers])
    import joblib

    found = joblib.Parallel(n_jobs=jobs)(joblib.delayed(fit)(some, masks[some]) for some in numbers)
    return torch.cat(cast(list[torch.Tensor], found))


def lira(targets: torch.Tensor, shadows: torch.Tensor, masks: torch.Tensor, *, variance: str = "each") -> torch.Tensor:
    """The log-likelihood ratio of LiRA: how much likelier a target's score is if the example was in its data.

    Args:
        targets: (..., n) scores under one or more target models.
        shadows: (models, n) scores under the shadow models.
        masks: (models, n) booleans: who was in their data.
        variance: "each" example's own in and out variances, or "pooled" over examples (one for in and one for out),
            which is steadier below some 64 shadow models.

    Returns (..., n). Raises ValueError for an example with fewer than two shadow models in or out.
    """
    _checks.one_of("variance", variance, ("each", "pooled"))
    for name, given in (("targets", targets), ("shadows", shadows), ("masks", masks)):
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got a {type(given).__name__}; use torch.as_tensor")
    if shadows.shape != masks.shape or shadows.ndim != 2 or targets.shape[-1] != shadows.shape[1]:
        raise ValueError(
            "shadows and masks must have shape (models, n), and targets (..., n), got "
            f"{tuple(shadows.shape)}, {tuple(masks.shape)}, {tuple(targets.shape)}"
        )
    if masks.dtype != torch.bool:
        raise ValueError(f"masks must be booleans, as by masks.bool(), got {masks.dtype}")
    if not (shadows.is_floating_point() and targets.is_floating_point()) or bool(
        shadows.isnan().any() or targets.isnan().any()
    ):
        raise ValueError(f"shadows and targets must be floats without NaN, got {shadows.dtype} and {targets.dtype}")
    ratio = 0
    for inside, sign in ((masks, 1), (~masks, -1)):
        count = inside.sum(0)
        if bool((count < 2).any()):
            raise ValueError(
                f"masks must have every example in two shadow models and out of two, got {int(count.min())}"
            )
        mean = torch.where(inside, shadows, 0).sum(0) / count
        squares = torch.where(inside, (shadows - mean) ** 2, 0).sum(0)
        spread = squares / (count - 1) if variance == "each" else squares.sum() / (count - 1).sum()
        spread = spread.clamp(min=torch.finfo(shadows.dtype).tiny)
        ratio = ratio - sign * ((targets - mean) ** 2 / spread + spread.log()) / 2
    return ratio


class Rates(typing.NamedTuple):
    """An ROC curve: float64 tensors, from 0 to 1."""

    false_positive: torch.Tensor
    true_positive: torch.Tensor


def roc(members: Array, nonmembers: Array) -> Rates:
    """The ROC curve of a score that is larger for members: `Rates`, (false positive, true positive), from (0, 0) to
    (1, 1), one point for each threshold.

    >>> [rates.tolist() for rates in roc(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    members, nonmembers = _scores(members, nonmembers)
    thresholds = torch.cat((members, nonmembers)).unique().flip(0)
    rates = [
        torch.searchsorted(-values.sort(descending=True).values, -thresholds, right=True).double() / len(values)
        for values in (nonmembers.double(), members.double())
    ]
    false, true = (torch.cat((torch.zeros(1, dtype=torch.float64), rate)) for rate in rates)
    return Rates(false, true)


def auc(members: Array, nonmembers: Array, *, confidence: float = 0.95) -> Interval:
    """The area under the ROC curve, the chance that a member scores above a nonmember, with DeLong's interval.

    DeLong's variance is too small, down to 0, where scores are few or nearly all of one side lie above the other's.
    With k scores on the smaller side the true one is at most area (1 - area) / k, that of a share of k trials. So where
    k times the area, or times the rest of it, is below 10, the interval also holds Clopper and Pearson's for k trials;
    it is then too wide rather than too narrow. It is about other examples of the same kind under this model, not about
    other models.

    Args:
        members, nonmembers: (k,) and (m,) scores, larger for members, one at least of each and none of them NaN.
        confidence: of the two-sided interval, in (0, 1).

    Returns `Interval`, (value, low, high).

    Raises:
        ValueError: a side without scores, or with NaN among them, or a confidence outside (0, 1).

    Source: DeLong, DeLong and Clarke-Pearson 1988.

    >>> members, nonmembers = torch.tensor([3.0, 2.0, 1.0, 2.5]), torch.tensor([1.0, 0.0, 1.5, 2.0])
    >>> [round(x, 3) for x in auc(members, nonmembers)]
    [0.812, 0.236, 1.0]
    """
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    members, nonmembers = _scores(members, nonmembers)

    def below(values, others):
        """For each value the share of others below it, ties counted half."""
        others = others.sort().values
        first, last = (torch.searchsorted(others, values, right=right) for right in (False, True))
        return (first + last).double() / (2 * len(others))

    placed, passed = below(members, nonmembers), below(nonmembers, members)
    variance = sum(float(part.var()) / len(part) for part in (placed, passed) if len(part) > 1)
    value, reach = float(placed.mean()), float(special.ndtri((1 + confidence) / 2)) * math.sqrt(variance)
    low, high = max(0.0, value - reach), min(1.0, value + reach)
    trials = min(len(members), len(nonmembers))
    above, below_it = value * trials, (1 - value) * trials
    if min(above, below_it) < 10:
        tail = (1 - confidence) / 2
        low = min(low, float(special.betaincinv(above, below_it + 1, tail)) if above else 0.0)
        high = max(high, float(special.betaincinv(above + 1, below_it, 1 - tail)) if below_it else 1.0)
    return Interval(value, low, high)


def tpr_at_fpr(members: Array, nonmembers: Array, *, fpr: float = 0.01, confidence: float = 0.95) -> Interval:
    """The true positive rate at the lowest threshold that at most the share `fpr` of nonmembers exceeds, with Clopper
    and Pearson's interval, in which the threshold counts as given.

    Args:
        members, nonmembers: (k,) and (m,) scores, larger for members, one at least of each and none of them NaN.
        fpr: the largest false positive rate, in [0, 1).
        confidence: of the two-sided interval, in (0, 1).

    Returns `Interval`, (value, low, high).

    Raises:
        ValueError: a side without scores, or with NaN among them, or an argument outside its range.

    >>> tpr_at_fpr(torch.arange(100.0) + 50, torch.arange(100.0), fpr=0.1)[0]
    0.6
    """
    fpr = _checks.number("fpr", fpr, 0, 1, closed="left")
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    members, nonmembers = _scores(members, nonmembers)
    allowed = min(math.floor(fpr * len(nonmembers) + 1e-9), len(nonmembers) - 1)
    threshold = nonmembers.sort(descending=True).values[allowed]
    hits = int((members > threshold).sum())
    low, high = clopper_pearson(hits, len(members), confidence=(1 + confidence) / 2)
    return Interval(hits / len(members), low, high)


def low_bits_tell(releases: torch.Tensor, canary: float) -> torch.Tensor:
    """Whether each release holds the canary, by the low bits of numbers near 0 alone (after Mironov 2012).

    A float near 0 has bits far below those of a float near the canary.  So canary + float noise that lands near 0 is a
    multiple of what floats near the canary are multiples of; noise that is near 0 by itself hardly ever is.

    Args:
        releases: (runs, coordinates) floats, each canary + noise or noise alone.
        canary: the number that was added to each coordinate, or was not; above 0.

    Returns (runs,) booleans; False where no number is near enough to 0 to tell.

    >>> noise = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    >>> [round(float(low_bits_tell(noise + held, 1.0).double().mean()), 1) for held in (0, 1)]
    [0.0, 1.0]
    """
    _checks.number("canary", canary, 0, math.inf, closed="neither")
    if not isinstance(releases, torch.Tensor) or releases.ndim != 2 or not releases.is_floating_point():
        tensor = isinstance(releases, torch.Tensor)
        got = f"{releases.dtype} of shape {tuple(releases.shape)}" if tensor else type(releases).__name__
        raise ValueError(f"releases must be a floating tensor of shape (runs, coordinates), got {got}")
    unit = canary * torch.finfo(releases.dtype).eps / 2
    near = releases.abs() < canary / 16
    coarse = (releases / unit == (releases / unit).round()) | ~near
    return coarse.all(1) & near.any(1)


def _scores(members, nonmembers) -> tuple[torch.Tensor, torch.Tensor]:
    return _scores_of("members", members), _scores_of("nonmembers", nonmembers)


def _scores_of(name, values):
    try:
        scores = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers, got {values!r:.80}") from None
    if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
        raise ValueError(
            f"{name} must be a list of one score or more, none of them NaN, got shape {tuple(scores.shape)}"
        )
    return scores
