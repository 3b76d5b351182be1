"""The three methods: sample rates, clip norms and one noise for groups with their own budgets."""

import dataclasses
import math
import warnings
from collections.abc import Mapping

import torch

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.accounting.search import bisect
from dpcompanion.idp.groups import Groups, interpolate
from dpcompanion.idp.search import HAIR, Search

#: Budgets of groups, or one for all, or each with its share of the examples.
Budgets = Array | float | Mapping[float, float]
_FEWEST_DRAWS = 1e-3  # of an example in a run, on average, before a warning


@dataclasses.dataclass(frozen=True, eq=False)
class SampleParameters:
    """One noise multiplier for all, and each group's sample rate: `sample_rates`, (P,) float64."""

    noise_multiplier: float
    sample_rates: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleParameters:
    """The noise multiplier, relative to the mean clip norm, and each group's effective noise
    multiplier and clip norm: `noise_multipliers` and `max_grad_norms`, (P,) float64.
    """

    noise_multiplier: float
    noise_multipliers: torch.Tensor
    max_grad_norms: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class CombinedParameters(ScaleParameters):
    """As `ScaleParameters`, and the sample rate of each group: `sample_rates`, (P,) float64."""

    sample_rates: torch.Tensor


def sample_parameters(
    target_epsilons: Budgets,
    counts: Array | None = None,
    *,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    noise_range: tuple[float, float] | None = None,
) -> SampleParameters:
    """Sample: one noise multiplier, and the groups' rates of mean `sample_rate`, for these budgets.

    Each group uses up its budget.

    Args:
        target_epsilons: (P,) budgets, one number, or {budget: share}.
        counts: (P,) numbers of examples, or their shares; None with {budget: share}, or for groups
            of one size.
        target_delta: in (0, 1).
        sample_rate: the mean over the examples, in (0, 1].
        steps: of the run.
        accountant: "pld", or "rdp", the paper's, which needs more noise for the same targets.
        noise_range: (low, high), between which the noise multiplier stays, fixed before the budgets
            are known; None for any.

    In Sample others' budgets move the noise, and with it the rest of my privacy profile, at my
    (epsilon, delta). Within a range nobody's profile exceeds the largest of their own budget's in
    it, whatever the others choose; with low == high it is a function of their own budget alone, as
    in Scale. Where the range binds each budget is still used up, and the rates' mean is no longer
    `sample_rate`: below it at `high`, above it at `low`. There a rate may come to 1, and a budget
    be left over.

    The noise multiplier lies within a relative 1e-4 of the best (by PLD 5e-4). The search stops
    where the rates have a mean of at least `sample_rate`, and lowers them all by the same factor to
    make it equal: a lower rate never costs more.

    A UserWarning says where budgets are so far apart that an example of the strictest is sampled
    less than once in a thousand runs.

    Raises:
        ValueError: bad input, or a budget that not even a rate of 1 would use up; the largest that
            can be is named. A budget that not even a rate of 1e-12 would keep, at the noise of a
            range.

    >>> found = sample_parameters(
    ...     [1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000
    ... )
    >>> round(found.sample_rates.mean().item(), 9)
    0.01
    >>> fixed = dict(
    ...     target_delta=1e-5,
    ...     sample_rate=0.01,
    ...     steps=1000,
    ...     noise_range=(1.0, 1.0),
    ...     accountant="rdp",
    ... )
    >>> [
    ...     sample_parameters([1.0, other], [50, 50], **fixed).sample_rates[0].item()
    ...     for other in (0.5, 8.0)
    ... ]
    [0.003561..., 0.003561...]
    """
    groups = Groups(target_epsilons, counts)
    search = Search(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    if noise_range is None:
        noise, rates = _sample(groups, search, sample_rate)
    else:
        noise, rates = _sample_within(_range(noise_range), groups, search, sample_rate)
    least = int(rates.argmin())
    if (draws := float(rates[least]) * search.steps) < _FEWEST_DRAWS:
        warnings.warn(
            f"with a budget of {float(groups.budgets[least]):g} beside ones of up to "
            f"{float(groups.budgets[-1]):g} an example has a sample rate of "
            f"{float(rates[least]):.2g}, and is sampled {draws:.2g} times in the run on average: "
            "the model learns nothing from it",
            stacklevel=2,
        )
    return SampleParameters(noise, rates[groups.which])


def scale_parameters(
    target_epsilons: Budgets,
    counts: Array | None = None,
    *,
    target_delta: float,
    sample_rate: float,
    steps: int,
    max_grad_norm: float,
    accountant: str = "pld",
) -> ScaleParameters:
    """Scale: the noise multiplier and the groups' clip norms, with the mean `max_grad_norm`, that
    use up each budget.

    Training adds noise of standard deviation `noise_multiplier * max_grad_norm` to the sum of
    gradients clipped to `max_grad_norms`.

    Args:
        target_epsilons: (P,) budgets, one number, or {budget: share}.
        counts: (P,) numbers of examples, or their shares; None with {budget: share}, or for groups
            of one size.
        target_delta: in (0, 1).
        sample_rate: of all groups, in (0, 1].
        steps: of the run.
        max_grad_norm: the clip norm of plain DP-SGD, above 0, which those of the groups have for
            their mean.
        accountant: "pld", or "rdp", the paper's, which needs more noise for the same targets.

    Raises:
        ValueError: bad input, or a budget that no noise multiplier up to 1e9 keeps.

    >>> found = scale_parameters(
    ...     [1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000, max_grad_norm=1
    ... )
    >>> torch.allclose(
    ...     found.noise_multipliers * found.max_grad_norms,
    ...     torch.tensor(found.noise_multiplier).double(),
    ... )
    True
    """
    groups = Groups(target_epsilons, counts)
    search = Search(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    max_grad_norm = _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
    noises = search.noises(groups.budgets, torch.full_like(groups.budgets, sample_rate))
    pooled = groups.harmonic_mean(noises)
    return ScaleParameters(
        pooled, noises[groups.which], (max_grad_norm * pooled / noises)[groups.which]
    )


def combined_parameters(
    target_epsilons: Budgets,
    counts: Array | None = None,
    *,
    target_delta: float,
    sample_rate: float,
    steps: int,
    max_grad_norm: float,
    sample_weight: float,
    accountant: str = "pld",
) -> CombinedParameters:
    r"""Sample and Scale at once: rates and clip norms that together use up each budget.

    Rates go a part `sample_weight` of the way from `sample_rate` to those of Sample, so that their
    mean stays. At its own rate r_p each group has the noise multiplier sigma_p that its budget
    needs, and from these follow the noise and the clip norms as in Scale::

        r_p = (1 - w) q + w q_p,    sigma = 1 / \sum_p (w_p / sigma_p),    c_p = c sigma / sigma_p.

    The paper (appendix D.6) puts the parameters of the two methods together one after the other and
    reports weights without saying how they enter; here every group's own budget holds whatever the
    weight.

    Args:
        target_epsilons: (P,) budgets, one number, or {budget: share}.
        counts: (P,) numbers of examples, or their shares; None with {budget: share}, or for groups
            of one size.
        target_delta: in (0, 1).
        sample_rate: the mean over the examples, in (0, 1].
        steps: of the run.
        max_grad_norm: the clip norm of plain DP-SGD, above 0, which those of the groups have for
            their mean.
        sample_weight: w, in [0, 1]: 0 is Scale and 1 is Sample.
        accountant: "pld", or "rdp", the paper's, which needs more noise for the same targets.

    Raises:
        ValueError: bad input, or a budget that no noise multiplier up to 1e9 keeps, or that not
            even a rate of 1 would use up, with a weight above 0.

    >>> found = combined_parameters(
    ...     [1.0, 2.0],
    ...     [50, 50],
    ...     target_delta=1e-5,
    ...     sample_rate=0.01,
    ...     steps=1000,
    ...     max_grad_norm=1,
    ...     sample_weight=0.5,
    ...     accountant="rdp",
    ... )
    >>> round(found.noise_multiplier, 3), found.sample_rates.round(decimals=4)
    (1.207, tensor([0.0083, 0.0117], dtype=torch.float64))
    >>> found.max_grad_norms.round(decimals=3)
    tensor([0.9050, 1.0950], dtype=torch.float64)
    """
    groups = Groups(target_epsilons, counts)
    search = Search(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    max_grad_norm = _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
    sample_weight = _checks.number("sample_weight", sample_weight, 0, 1)
    rates = torch.full_like(groups.budgets, sample_rate)
    if sample_weight > 0:
        noise, sampled = _sample(groups, search, sample_rate)
        rates = (1 - sample_weight) * rates + sample_weight * sampled
    noises = (
        search.noises(groups.budgets, rates) if sample_weight < 1 else torch.full_like(rates, noise)
    )
    pooled = groups.harmonic_mean(noises)
    return CombinedParameters(
        pooled,
        noises[groups.which],
        (max_grad_norm * pooled / noises)[groups.which],
        rates[groups.which],
    )


def rdp_epsilons(
    sample_rates: torch.Tensor, noise_multipliers: torch.Tensor, *, steps: int, delta: float
) -> torch.Tensor:
    """Epsilon by RDP of many runs of `steps` steps, each with its own rate and noise multiplier;
    all (P,) float64 tensors.

    As `compute_epsilon` with the accountant "rdp", side by side and within rounding errors.

    >>> rdp_epsilons(
    ...     torch.tensor([0.01, 0.02]).double(),
    ...     torch.tensor([1.0, 1.0]).double(),
    ...     steps=1000,
    ...     delta=1e-5,
    ... )
    tensor([2.1014, 4.3242], dtype=torch.float64)
    """
    search = Search(delta, steps, "rdp")
    found = [
        search.rdp_epsilon(*pair)[0]
        for pair in zip(sample_rates.split(4096), noise_multipliers.split(4096))
    ]
    return torch.cat(found) * (1 + HAIR)


def _range(noise_range):
    try:
        low, high = noise_range
    except (TypeError, ValueError):
        raise ValueError(f"noise_range must be a pair (low, high), got {noise_range!r}") from None
    low, high = (
        _checks.number("noise_range", end, 0, math.inf, closed="neither") for end in (low, high)
    )
    if low > high:
        raise ValueError(
            f"noise_range must be a pair (low, high) with low <= high, got {noise_range!r}"
        )
    return low, high


def _sample_within(noise_range, groups, search, sample_rate):
    """As `_sample`, with the noise in a range; its nearer end fixes the rates where it binds."""
    low, high = noise_range
    rates = search.rates(groups.budgets, high, start=torch.full_like(groups.budgets, sample_rate))
    # Rates grow with the noise: where even the most of it leaves their mean below, it is the end
    # that binds.
    if low == high or float((groups.weights * rates).sum()) <= sample_rate:
        return high, rates
    rates = search.rates(groups.budgets, low, start=rates)
    if float((groups.weights * rates).sum()) >= sample_rate:
        return low, rates
    noise, rates = _sample(groups, search, sample_rate)
    return (
        (noise, rates)
        if low <= noise <= high
        else (low, search.rates(groups.budgets, low, start=rates))
    )


def _sample(groups, search, sample_rate):
    """The noise multiplier of Sample, and the rates of the different budgets."""
    budgets, flat = groups.budgets, torch.full_like(groups.budgets, sample_rate)
    if len(budgets) == 1:
        return float(search.noises(budgets, flat)[0]), flat
    if sample_rate == 1:
        _refuse_beyond(float(budgets[0]), budgets, sample_rate)
    # The search looks at few budgets first, each with the weight of those near it, and at all of
    # them in the end; by PLD on coarse grids first, and in the end on fine ones.
    nodes, weights = groups.lumped(search)
    by_pld = search.accountant == "pld"
    noises = search.noises(
        nodes, torch.full_like(nodes, sample_rate), **({"rough": 0.02} if by_pld else {})
    )
    # The pooled noise of Scale is near, with rates of at most 1.
    log_noise, slope = _pooled(weights, noises, sample_rate) - 0.02, 1.2
    rates = (sample_rate * (math.exp(log_noise) / noises) ** slope).clamp(max=1.0)
    log_noise, slope, rates, mean = _match_mean(
        search, nodes, weights, sample_rate, log_noise, slope, rates, rough=1e-3 if by_pld else None
    )
    if by_pld:
        search.compare_grids(nodes, math.exp(log_noise), rates)
        log_noise, slope, rates, mean = _match_mean(
            search, nodes, weights, sample_rate, log_noise, slope, rates, rough=1e-4
        )
    _check_reachable(search, budgets, sample_rate, math.exp(log_noise), rates)
    if nodes is not budgets:
        rates = interpolate(budgets, nodes, rates)
    if nodes is not budgets or by_pld:
        log_noise, _, rates, mean = _match_mean(
            search, budgets, groups.weights, sample_rate, log_noise, slope, rates
        )
    noise = math.exp(log_noise)
    _check_reachable(search, budgets, sample_rate, noise, rates)
    return noise, rates * min(1.0, sample_rate / mean)


def _pooled(weights, noises, sample_rate):
    """The log of a noise multiplier at which rates proportional to it have mean `sample_rate`."""
    log_noise = -math.log(float((weights / noises).sum()))
    if float(noises.min()) >= sample_rate * math.exp(log_noise):
        return log_noise

    def below(log_noise):
        shares = (sample_rate * log_noise.exp() / noises).clamp(max=1.0)
        return (weights @ shares)[None] <= sample_rate

    ends = torch.tensor([log_noise, math.log(float(noises.max()))], dtype=torch.float64)
    return float(bisect(below, good=ends[:1], bad=ends[1:])[0])


def _check_reachable(search, budgets, sample_rate, noise, rates):
    """The largest budget is used up by a rate of 1, or by less."""
    if float(rates.max()) > 1 - 1e-3 and float(budgets[-1]) > (1 + 1e-3) * (
        most := search.epsilon(1.0, noise)
    ):
        _refuse_beyond(most, budgets, sample_rate)


class UnreachableBudget(ValueError):
    """A budget that no sample rate uses up; `most` is the largest that one does."""

    most: float = math.inf


def _refuse_beyond(most, budgets, sample_rate):
    most = math.floor(most * 10 ** (digits := 3 - math.floor(math.log10(most)))) / 10**digits
    error = UnreachableBudget(
        f"target_epsilons must not exceed {most:g} here, got {float(budgets[-1]):g}: not even a "
        f"sample rate of 1 would use it up, where the mean rate is to be {sample_rate:g}"
    )
    error.most = most
    raise error


def _match_mean(search, budgets, weights, sample_rate, log_noise, slope, rates, *, rough=None):
    """The noise at which the mean rate is at or just above `sample_rate`: secants in a bracket."""
    # Not `accounting.search`: this stops by how near the mean is, not the noise, and starts each
    # look from the last.
    low, high, last = -math.inf, math.inf, None
    slack = max(search.slack, rough or 0)
    slopes = torch.full_like(rates, slope)  # of each logarithm of a rate
    for _ in range(60):
        rates = search.rates(budgets, math.exp(log_noise), start=rates, rough=rough)
        mean = float(weights @ rates)
        gap = math.log(mean / sample_rate)
        if -1e-12 <= gap <= slack:
            break
        low, high = (max(low, log_noise), high) if gap < 0 else (low, min(high, log_noise))
        if last and abs(log_noise - last[0]) > 1e-4:
            slope = min(max((gap - last[1]) / (log_noise - last[0]), 0.3), 10.0)
            slopes = torch.full_like(rates, slope)
            if search.accountant == "pld":
                slopes = ((rates / last[2]).log() / (log_noise - last[0])).clamp(0.0, 30.0)
        step = min(max((slack / 2 - gap) / slope, -0.5), 0.5)
        if not low < log_noise + step < high:
            step = (low + high) / 2 - log_noise
        # too rough here to hit so small an interval: the safe end will do
        if high - low < slack / 10:
            step = high - log_noise if gap < 0 else 0.0
            if step == 0.0:
                break
        last, log_noise = (log_noise, gap, rates), log_noise + step
        rates = (rates * (slopes * step).exp()).clamp(max=1.0)
    return log_noise, slope, rates, mean
