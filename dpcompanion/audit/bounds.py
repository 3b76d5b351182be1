"""Lower bounds on epsilon from the guesses of an auditor, and the claims that they refute."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import special, stats

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.accounting import gaussian_epsilon
from dpcompanion.accounting.search import bisect
from dpcompanion.accounting.tradeoff import curve_of
from dpcompanion.mechanism.plan import DPSGDPlan

# Shares of the canaries about which an auditor guesses; a confidence is spent on each.
_SHARES = (0.5, 0.2)
_LEAST_RATE = 1e-6  # from which on to 1 minus it, curves of plans are accurate; elsewhere bounds
_TOLERANCE = 1e-4  # within which the largest refuted epsilon or mu is found


def random_inclusion(canaries: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Who takes part: (canaries,) booleans, fair and independent.

    >>> random_inclusion(4, torch.Generator().manual_seed(0)).dtype
    torch.bool
    """
    return (
        torch.rand(
            _checks.whole_number("canaries", canaries, 1), generator=generator, dtype=torch.float64
        )
        < 0.5
    )


def _counts(correct, guesses, canaries):
    canaries = _checks.whole_number("canaries", canaries, 1)
    guesses = _checks.whole_number("guesses", guesses, 1, canaries)
    return _checks.whole_number("correct", correct, 0, guesses), guesses, canaries


def one_run_epsilon(
    correct: int, guesses: int, canaries: int, *, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon, at least 0, that so many right guesses refute, whatever the mechanism.

    Args:
        correct, guesses, canaries: v <= r <= m. The number of guesses must not depend on the coins.
        delta: in [0, 1).
        confidence: that the true epsilon is not below the result, in (0, 1).

    Returns a float. Source: Steinke, Nasr and Jagielski 2023, theorem 5.2.

    Raises:
        ValueError: counts that are not whole numbers with 0 <= correct <= guesses <= canaries, no
            guess, or a delta or confidence outside its range.

    >>> round(one_run_epsilon(190, 200, 1000, delta=1e-5), 2)
    2.39
    """
    v, r, m = _counts(correct, guesses, canaries)
    _checks.number("delta", delta, 0, 1, closed="left")
    _checks.number("confidence", confidence, 0, 1, closed="neither")

    def probability(epsilon):
        right = 1 / (1 + math.exp(-epsilon))
        if not v:
            return 1.0
        window = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, right))
        return (
            stats.binom.sf(v - 1, r, right) + 2 * m * delta * (window / np.arange(1, v + 1)).max()
        )

    return _largest_refuted(lambda epsilon: probability(epsilon) < 1 - confidence)


def one_run_mu(correct: int, guesses: int, canaries: int, *, confidence: float = 0.95) -> float:
    """The largest mu, at least 0, such that so many right guesses refute mu-GDP.

    By `dpcompanion.accounting.gaussian_epsilon` it becomes an epsilon, of mechanisms that are
    claimed to be Gaussian.

    Args:
        correct, guesses, canaries: v <= r <= m. The number of guesses must not depend on the coins.
        confidence: that the true mu is not below the result, in (0, 1).

    Returns a float. Source: Mahloujifar, Melis and Chaudhuri 2024.

    Raises:
        ValueError: counts that are not whole numbers with 0 <= correct <= guesses <= canaries, no
            guess, or a confidence outside its range.

    >>> round(one_run_mu(190, 200, 1000), 2)
    0.91
    """
    return _largest_refuted(
        lambda mu: refutes(GaussianCurve(mu), correct, guesses, canaries, confidence=confidence)
    )


def _largest_refuted(refuted):
    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
        if high > 64:
            return low
    low, high = torch.tensor([low, high], dtype=torch.float64)
    halvings = math.ceil(math.log2(float(high - low) / _TOLERANCE))
    return float(
        bisect(lambda x: torch.tensor(refuted(float(x))), good=low, bad=high, halvings=halvings)
    )


@dataclasses.dataclass(frozen=True)
class GaussianCurve:
    """The trade-off of N(0, 1) and N(mu, 1).

    >>> round(GaussianCurve(1.0).inverse(0.5), 4)
    0.1587
    """

    mu: float

    def __post_init__(self):
        _checks.number("mu", self.mu, 0, math.inf, closed="left")

    def inverse(self, inside: float) -> float:
        """The least P(E | out) that goes with this P(E | in)."""
        return float(special.ndtr(special.ndtri(inside) - self.mu))


class PlanCurve:
    """What a `DPSGDPlan` claims: the trade-off curve of `dpcompanion.accounting.trade_off`.

    Args:
        plan: with noise, and with a step at least; otherwise ValueError.
        among: indices of the examples that it is claimed of, where rates or clip norms differ; by
            default all. One curve holds for all of them, that of their largest rate and least noise
            over clip norm.

    Add or remove one example (or zero-out: the plan says), Poisson sampling.

    >>> from dpcompanion.training import DPSGDPlan
    >>> plan = DPSGDPlan(
    ...     n=100, sample_rate=1.0, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    ... )
    >>> 0 < GaussianCurve(1.0).inverse(0.5) - PlanCurve(plan).inverse(0.5) < 1e-3
    True
    """

    def __init__(self, plan: "DPSGDPlan", among: Array | None = None):
        rows = slice(None) if among is None else among
        rates, noise = (
            torch.as_tensor(value, dtype=torch.float64).expand(plan.n)[rows]
            for value in (plan.sample_rate, plan.effective_noise_multiplier)
        )
        rate, noise = float(rates.max()), float(noise.min())
        if not noise:
            raise ValueError("plan must have noise, got noise_multiplier 0")
        if not plan.steps:
            raise ValueError("plan must have a step, got none")
        self._curve = curve_of(rate, noise, plan.steps, _LEAST_RATE)

    def inverse(self, inside: float) -> float:
        """The least P(E | out) that goes with this P(E | in)."""
        # A hair more than 1 - inside, which was rounded: there the curve is lower.
        out = torch.tensor([min(1 - inside + 2.0**-52, 1.0)], dtype=torch.float64)
        return float(self._curve.false_negative_rate(out)[0])


def refutes(
    curve: Any, correct: int, guesses: int, canaries: int, *, confidence: float = 0.95
) -> bool:
    """Whether so many right guesses refute a trade-off curve, with this confidence.

    Args:
        curve: with a function `inverse`, such as `GaussianCurve` and `PlanCurve`.
        correct, guesses, canaries: v <= r <= m. The number of guesses must not depend on the coins.
        confidence: that a curve which holds is not refuted, in (0, 1).

    Raises:
        ValueError: counts that are not whole numbers with 0 <= correct <= guesses <= canaries, no
            guess, or a confidence outside its range.

    >>> refutes(GaussianCurve(1.0), 199, 200, 1000), refutes(GaussianCurve(2.0), 199, 200, 1000)
    (True, False)
    """
    v, r, m = _counts(correct, guesses, canaries)
    at_least, beyond = 1 - _checks.number("confidence", confidence, 0, 1, closed="neither"), 0.0
    for t in range(v, 0, -1):
        # at_least: bound below on P(V >= t); beyond: on the sum of P(V >= s) over s > t.
        inside = (t * at_least + beyond) / m
        if inside > 1:
            return True
        beyond += at_least
        at_least = max(at_least, (m * curve.inverse(inside) + beyond) / (r - t + 1))
        if at_least > 1:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Finding:
    """What an audit finds about one group.

    Attributes:
        canaries, guesses, correct: the counts behind `epsilon`.
        epsilon: lower bound, whatever the mechanism (`one_run_epsilon`).
        mu: lower bound on the mu of a Gaussian mechanism (`one_run_mu`).
        gaussian_epsilon: epsilon of such a mechanism at the audit's delta.
        refuted: whether the claim is refuted; None without a claim.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    mu: float
    gaussian_epsilon: float
    refuted: bool | None


def members_of(included, groups):
    """{label: the places of its canaries}, in the order of the labels; without groups none."""
    if groups is None:
        return {}
    labels = groups.tolist() if isinstance(groups, torch.Tensor) else list(groups)
    _checks.same_length(included=included, groups=labels)
    if bad := [label for label in labels if label != label or label == "all"]:
        raise ValueError(
            f"groups must not hold NaN, nor 'all', which stands for all, got {bad[0]!r}"
        )
    try:
        distinct = sorted(set(labels))
    except TypeError as error:
        raise ValueError(
            f"groups must be labels of one kind, numbers or texts, but: {error}"
        ) from None
    return {
        label: torch.tensor([i for i, own in enumerate(labels) if own == label])
        for label in distinct
    }


def audit_scores(
    scores: Array,
    included: Array,
    *,
    delta: float,
    groups: Array | None = None,
    claims: dict[Any, Any] | None = None,
    confidence: float = 0.95,
) -> dict[Any, Finding]:
    """Lower bounds on epsilon from scores of canaries, for all and for each group.

    An auditor guesses about the half with the most extreme scores, and about a fifth. The better
    counts. All bounds of the result hold together with the confidence.

    Args:
        scores: (m,) numbers, larger for canaries that seem to have taken part; made without the
            coins. Or (k, m): those of k attacks, of which the best counts. Equal ones come in an
            order that does not depend on their places.
        included: (m,) booleans, the coins.
        delta: of every epsilon.
        groups: (m,) labels, such as budgets or deciles, not "all" nor NaN. Canaries of other groups
            count as given.
        claims: {label: curve}, "all" for every canary; such as `PlanCurve`.
        confidence: in (0, 1).

    Returns:
        The `Finding` of each label, "all" first, then the groups in order.

    Raises:
        ValueError: scores that are no numbers, coins that are no booleans, labels that are none, a
            claim of a label that there is not, or one that is no curve.

    >>> included = random_inclusion(1000, torch.Generator().manual_seed(0))
    >>> noise = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    >>> scores = included + 0.5 * noise  # a Gaussian with mu = 2
    >>> found = audit_scores(scores, included, delta=1e-5)["all"]
    >>> found.guesses, found.correct, round(found.epsilon, 2), round(found.mu, 2)
    (200, 197, 3.08, 1.11)
    """
    scores = torch.as_tensor(scores, dtype=torch.float64, device="cpu")
    included = torch.as_tensor(included, device="cpu")
    if (
        scores.ndim not in (1, 2)
        or not len(scores)
        or included.shape != scores.shape[-1:]
        or included.dtype != torch.bool
        or bool(scores.isnan().any())
    ):
        raise ValueError(
            "scores and included must be (m,) numbers and booleans without NaN, got "
            f"{tuple(scores.shape)} and {included.dtype} of shape {tuple(included.shape)}"
        )
    scores = scores.reshape(-1, len(included))
    members = {"all": torch.arange(len(included))} | members_of(included, groups)
    claims = claims or {}
    for label, claim in claims.items():
        _checks.one_of("claims", label, members)
        if not callable(getattr(claim, "inverse", None)):
            raise ValueError(
                f"claims must be curves such as PlanCurve or GaussianCurve, got {claim!r} for "
                f"{label!r}"
            )
    tried = len(members) * len(_SHARES) * len(scores)
    each = 1 - (1 - _checks.number("confidence", confidence, 0, 1, closed="neither")) / tried
    found = {}
    for label, own in members.items():
        # Canaries may be listed by their coins: among equal scores their places would tell.
        own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))]
        tries: list[tuple[int, int]] = []
        for share, attack in itertools.product(_SHARES, scores):
            order = own[attack[own].argsort(stable=True)]
            half = max(1, math.floor(share * len(own) / 2))
            correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            tries.append((correct, 2 * half) if len(own) > 1 else (int(included[own].sum()), 1))
        bounds = [
            (one_run_epsilon(*pair, len(own), delta=delta, confidence=each), *pair)
            for pair in tries
        ]
        epsilon, correct, guesses = max(bounds, key=lambda bound: bound[0])
        mu = max(one_run_mu(*pair, len(own), confidence=each) for pair in tries)
        claim = claims.get(label)
        found[label] = Finding(
            len(own),
            guesses,
            correct,
            epsilon,
            mu,
            _gaussian_epsilon(mu, delta),
            None
            if claim is None
            else any(refutes(claim, *pair, len(own), confidence=each) for pair in tries),
        )
    return found


def _gaussian_epsilon(mu, delta):
    return 0.0 if not mu else float(gaussian_epsilon(mu, delta)) if delta else math.inf


def audit(
    fit: Callable[..., Any],
    canaries: int,
    *,
    delta: float,
    groups: Array | None = None,
    claims: dict[Any, Any] | None = None,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> dict[Any, Finding]:
    """Audit any training function in one run.

    Args:
        fit: (included (m,) booleans) -> (m,) scores: trains once, with these canaries and all else,
            and says of each how much it seems to have taken part (such as minus its loss). It must
            use the coins for the training alone.
        canaries: how many, m.
        delta: of every epsilon.
        groups: (m,) labels, such as budgets or deciles. Canaries of other groups count as given.
        claims: {label: curve}, "all" for every canary; such as `PlanCurve`.
        confidence: in (0, 1).
        generator: a torch.Generator for the coins.

    Returns:
        The `Finding` of each label, "all" first, then the groups in order.

    Raises:
        ValueError: no canary, a delta or confidence outside its range, or what `audit_scores`
            refuses of the scores, groups and claims.

    >>> noise = torch.Generator().manual_seed(0)
    >>> def answers(included):  # randomised response at epsilon 2
    ...     truthful = torch.rand(len(included), generator=noise) < 1 / (1 + math.exp(-2))
    ...     return torch.where(truthful, included, ~included).double()
    >>> found = audit(answers, 2000, delta=0, generator=torch.Generator().manual_seed(1))
    >>> 1.5 < found["all"].epsilon < 2
    True
    """
    included = random_inclusion(canaries, generator)
    return audit_scores(
        fit(included), included, delta=delta, groups=groups, claims=claims, confidence=confidence
    )
