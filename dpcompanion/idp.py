r"""Budgets for each group of examples: Sample and Scale (Boenisch et al. 2023), and both at once.

P groups, group p with a share w_p of the examples and its own budget eps_p,
train one model with one Gaussian noise.  Two ways to spend what the looser
budgets allow:

* **Sample** (algorithm 2): group p is drawn with its own rate q_p.  The noise
  multiplier is the one at which the rates that use up each budget have the
  mean of plain DP-SGD, \sum_p w_p q_p = q, so that batches keep their size.
* **Scale** (algorithm 3): group p is clipped to its own norm c_p.  With sigma_p
  the noise multiplier that eps_p needs at rate q::

      sigma_scale = 1 / \sum_p (w_p / sigma_p),      c_p = c sigma_scale / sigma_p,

  so that noise of standard deviation sigma_scale c is sigma_p c_p for each group,
  and the mean clip norm is c (equations 6 to 9).
* **Combined**: rates go part of the way from q to Sample's, and Scale spends the rest of each budget.

Each group's guarantee is that of DP-SGD with its own rate and noise multiplier: add/remove
neighbours that differ in one example of that group, Poisson sampling.  Parameters are found
conservatively: no group's `compute_epsilon` exceeds its target.

There may be as many groups as examples.  All groups are searched side by side; of many different
budgets some are searched, and the others lie between two of them: a budget decides its group's
parameters, smoothly.  They are taken from the safe side of chords through neighbouring points.  By RDP
each group found so is then checked for itself, at one order, which bounds its epsilon.  By PLD, whose
epsilons cost 10 to 50 milliseconds each, 1e-4 of every budget is kept back for what the grids of nearby
parameters may differ by, and one budget in the middle of every stretch is checked.  Of more than 30,000 different
budgets each is rounded down first, by 5e-4 of itself at most: a million take seconds.

>>> found = scale_parameters([1.0, 2.0, 3.0], [34, 43, 23], target_delta=1e-5, sample_rate=1 / 49, steps=1470,
...                          max_grad_norm=0.4)
>>> round(found.noise_multiplier, 2), [round(c, 3) for c in found.max_grad_norms.tolist()]
(2.01, [0.244, 0.43, 0.574])
"""

import dataclasses
import math

import torch

from dpcompanion import _checks, accounting
from dpcompanion.accounting.runs import orders_for

_PRECISION = 2e-5            # of the logarithm of a parameter
_JITTER = 1e-4               # by which the PLD epsilons of nearby parameters may differ, relatively, for their grids
_HAIR = 1e-9                 # and those of RDP, for rounding errors
_LARGEST_NOISE, _SMALLEST_RATE = 1e9, 1e-12
_MANY, _APART = 30_000, 5e-4    # more different budgets than that are rounded down until they lie so far apart


@dataclasses.dataclass(frozen=True, eq=False)
class SampleParameters:
    """One noise multiplier for all, and the sample rate of each group: `sample_rates`, (P,) float64."""

    noise_multiplier: float
    sample_rates: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleParameters:
    """The noise multiplier, relative to the mean clip norm, and each group's effective noise multiplier and clip
    norm: `noise_multipliers` and `max_grad_norms`, (P,) float64."""

    noise_multiplier: float
    noise_multipliers: torch.Tensor
    max_grad_norms: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class CombinedParameters(ScaleParameters):
    """As `ScaleParameters`, and the sample rate of each group: `sample_rates`, (P,) float64."""

    sample_rates: torch.Tensor


def sample_parameters(target_epsilons, counts, *, target_delta, sample_rate, steps, accountant="rdp"):
    """Sample: the noise multiplier and the groups' rates that use up each budget and have the mean `sample_rate`.

    Args:
        target_epsilons: (P,) budgets.
        counts: (P,) numbers of examples, or their shares.
        target_delta, sample_rate, steps: as in plain DP-SGD.
        accountant: "rdp" or "pld".

    The noise multiplier lies within a relative 1e-4 of the best (by PLD 5e-4). The search stops where the rates have a
    mean of at least `sample_rate`, and lowers them all by the same factor to make it equal: a lower rate never costs
    more.

    Raises:
        ValueError: bad input, or a budget that not even a rate of 1 would use up; the largest that can be is named.

    >>> found = sample_parameters([1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000)
    >>> round(found.sample_rates.mean().item(), 9)
    0.01
    """
    groups = _Groups(target_epsilons, counts)
    run = _Run(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise, rates = _sample(groups, run, sample_rate)
    return SampleParameters(noise, rates[groups.which])


def scale_parameters(target_epsilons, counts, *, target_delta, sample_rate, steps, max_grad_norm, accountant="rdp"):
    """Scale: the noise multiplier and the groups' clip norms, with the mean `max_grad_norm`, that use up each budget.

    Arguments and errors as for `sample_parameters`; `max_grad_norm` is the clip norm of plain DP-SGD.  Training adds
    noise of standard deviation `noise_multiplier * max_grad_norm` to the sum of gradients clipped to `max_grad_norms`.

    >>> found = scale_parameters([1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000, max_grad_norm=1)
    >>> torch.allclose(found.noise_multipliers * found.max_grad_norms, torch.tensor(found.noise_multiplier).double())
    True
    """
    groups = _Groups(target_epsilons, counts)
    run = _Run(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    max_grad_norm = _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
    noises = run.noises(groups.budgets, torch.full_like(groups.budgets, sample_rate))
    pooled = groups.harmonic_mean(noises)
    return ScaleParameters(pooled, noises[groups.which], (max_grad_norm * pooled / noises)[groups.which])


def combined_parameters(target_epsilons, counts, *, target_delta, sample_rate, steps, max_grad_norm, sample_weight,
                        accountant="rdp"):
    r"""Sample and Scale at once: rates and clip norms that together use up each budget.

    Rates go a part `sample_weight` of the way from `sample_rate` to those of Sample, so that their mean stays. At its
    own rate r_p each group has the noise multiplier sigma_p that its budget needs, and from these follow the noise
    and the clip norms as in Scale::

        r_p = (1 - w) q + w q_p,      sigma = 1 / \sum_p (w_p / sigma_p),      c_p = c sigma / sigma_p.

    Arguments and errors as for `scale_parameters`; `sample_weight`, in [0, 1], is w: 0 is Scale and 1 is Sample. The
    paper (appendix D.6) puts the parameters of the two methods together one after the other and reports weights without
    saying how they enter; here every group's own budget holds whatever the weight.

    >>> found = combined_parameters([1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000,
    ...                             max_grad_norm=1, sample_weight=0.5)
    >>> round(found.noise_multiplier, 3), found.sample_rates.round(decimals=4), found.max_grad_norms.round(decimals=3)
    (1.207, tensor([0.0083, 0.0117], dtype=torch.float64), tensor([0.9050, 1.0950], dtype=torch.float64))
    """
    groups = _Groups(target_epsilons, counts)
    run = _Run(target_delta, steps, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    max_grad_norm = _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
    sample_weight = _checks.number("sample_weight", sample_weight, 0, 1)
    rates = torch.full_like(groups.budgets, sample_rate)
    if sample_weight > 0:
        noise, sampled = _sample(groups, run, sample_rate)
        rates = (1 - sample_weight) * rates + sample_weight * sampled
    noises = run.noises(groups.budgets, rates) if sample_weight < 1 else torch.full_like(rates, noise)
    pooled = groups.harmonic_mean(noises)
    return CombinedParameters(pooled, noises[groups.which], (max_grad_norm * pooled / noises)[groups.which],
                              rates[groups.which])


def rdp_epsilons(sample_rates, noise_multipliers, *, steps, delta):
    """Epsilon by RDP of many runs of `steps` steps, each with its own rate and noise multiplier; all (P,) float64
    tensors.

    As `compute_epsilon` with the accountant "rdp", side by side and within rounding errors.

    >>> rdp_epsilons(torch.tensor([0.01, 0.02]).double(), torch.tensor([1.0, 1.0]).double(), steps=1000, delta=1e-5)
    tensor([2.1014, 4.3242], dtype=torch.float64)
    """
    run = _Run(delta, steps, "rdp")
    found = [run._rdp_epsilon(*pair)[0] for pair in zip(sample_rates.split(4096), noise_multipliers.split(4096))]
    return torch.cat(found) * (1 + _HAIR)


def _sample(groups, run, sample_rate):
    """The noise multiplier of Sample, and the rates of the different budgets."""
    budgets, flat = groups.budgets, torch.full_like(groups.budgets, sample_rate)
    if len(budgets) == 1:
        return float(run.noises(budgets, flat)[0]), flat
    if sample_rate == 1:
        _refuse_beyond(float(budgets[0]), budgets, sample_rate)
    # The search looks at few budgets first, each with the weight of those near it, and at all of them in the end.
    nodes, weights = groups.lumped(run)
    noises = run.noises(nodes, torch.full_like(nodes, sample_rate))
    # The pooled noise of Scale is near.
    log_noise, slope = -math.log(float((weights / noises).sum())) - 0.02, 1.2
    rates = (sample_rate * (math.exp(log_noise) / noises) ** slope).clamp(max=1.0)
    log_noise, slope, rates, mean = _match_mean(run, nodes, weights, sample_rate, log_noise, slope, rates)
    if nodes is not budgets:
        rates = _interpolate(budgets, nodes, rates)
        log_noise, _, rates, mean = _match_mean(run, budgets, groups.weights, sample_rate, log_noise, slope, rates)
    noise = math.exp(log_noise)
    if float(rates.max()) > 1 - 1e-3 and float(budgets[-1]) > (1 + 1e-3) * (most := run.epsilon(1.0, noise)):
        _refuse_beyond(most, budgets, sample_rate)
    return noise, rates * min(1.0, sample_rate / mean)


def _refuse_beyond(most, budgets, sample_rate):
    most = math.floor(most * 10 ** (digits := 3 - math.floor(math.log10(most)))) / 10**digits
    raise ValueError(f"target_epsilons must not exceed {most:g} here, got {float(budgets[-1]):g}: not even a sample "
                     f"rate of 1 would use it up, where the mean rate is to be {sample_rate:g}")


def _match_mean(run, budgets, weights, sample_rate, log_noise, slope, rates):
    """The noise at which the rates have a mean at or a little above `sample_rate`: secants within a bracket."""
    low, high, last = -math.inf, math.inf, None
    for _ in range(60):
        rates = run.rates(budgets, math.exp(log_noise), start=rates)
        mean = float(weights @ rates)
        gap = math.log(mean / sample_rate)
        if -1e-12 <= gap <= run.slack:
            break
        low, high = (max(low, log_noise), high) if gap < 0 else (low, min(high, log_noise))
        if last and abs(log_noise - last[0]) > 1e-4:
            slope = min(max((gap - last[1]) / (log_noise - last[0]), 0.3), 10.0)
        step = min(max((run.slack / 2 - gap) / slope, -0.5), 0.5)
        if not low < log_noise + step < high:
            step = (low + high) / 2 - log_noise
        if high - low < run.slack / 10:         # too rough here to hit so small an interval: the safe end will do
            step = high - log_noise if gap < 0 else 0.0
            if step == 0.0:
                break
        last, log_noise = (log_noise, gap), log_noise + step
        rates = (rates * math.exp(slope * step)).clamp(max=1.0)
    return log_noise, slope, rates, mean


class _Groups:
    """The different budgets, ascending, (D,), their shares of the examples, and which of them each group has."""

    def __init__(self, target_epsilons, counts):
        values = {}
        for name, given in (("target_epsilons", target_epsilons), ("counts", counts)):
            values[name] = torch.as_tensor(_checks.in_interval(name, given, 0, math.inf, closed="neither"),
                                           dtype=torch.float64)
            if values[name].ndim != 1 or len(values[name]) == 0:
                raise ValueError(f"{name} must be a list with one entry for each group, got shape "
                                 f"{tuple(values[name].shape)}")
        _checks.same_length(**values)
        budgets = values["target_epsilons"].cpu()
        self.budgets, self.which = torch.unique(budgets, return_inverse=True)
        if len(self.budgets) > _MANY:
            self.budgets, self.which = torch.unique(_rounded_down(budgets), return_inverse=True)
        shares = values["counts"].cpu() / values["counts"].sum().cpu()
        self.weights = torch.zeros_like(self.budgets).index_add_(0, self.which, shares)

    def harmonic_mean(self, values):
        return 1 / float((self.weights / values).sum())

    def lumped(self, run):
        """Few budgets with weights that stand for all of them."""
        nodes = _nodes(self.budgets, run.searched, 3 * run.spacing)
        if nodes is self.budgets:
            return nodes, self.weights
        left, share = _between(self.budgets, nodes)
        weights = torch.zeros_like(nodes).index_add_(0, left, self.weights * (1 - share))
        return nodes, weights.index_add_(0, left + 1, self.weights * share)


class _Run:
    """What all groups share: delta, steps and accountant.  Finds what uses up budgets, many at once.

    Searches go along a coordinate y that makes a group safer as it grows: the logarithm of the noise, or minus that of
    the rate.  Budgets are ascending, (D,).
    """

    def __init__(self, target_delta, steps, accountant):
        self.accountant = _checks.one_of("accountant", accountant, accounting.ACCOUNTANTS)
        self.target_delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
        self.steps = _checks.whole_number("steps", steps, 1)
        self._near = None                  # the range of orders that decided last
        # So many different budgets are searched one by one; among more, the spacing of ln eps; how far the mean rate
        # may be above the wanted one.
        rdp = self.accountant == "rdp"
        self.searched, self.spacing, self.slack = (256, 0.01, 6e-5) if rdp else (24, 0.05, 3e-4)

    def noises(self, budgets, rates):
        """(D,) noise multipliers that the budgets need at the rates, (D,)."""
        nodes, rates_at = self._at_nodes(budgets, rates)

        def search(start, accountant):
            return self._search(nodes, lambda y, index: (rates_at[index], y.exp()), start, math.log(1e-3),
                                math.log(_LARGEST_NOISE), f"a noise multiplier of {_LARGEST_NOISE:g}", accountant)

        found = search(torch.zeros_like(nodes), "rdp")
        if self.accountant == "pld":
            found = search(found - 0.07, "pld")
        return self._at_budgets(budgets, nodes, found, lambda y, index: (rates[index], y.exp())).exp()

    def rates(self, budgets, noise, start):
        """(D,) sample rates, at most 1, that the budgets allow with one noise multiplier; start: (D,) guesses."""
        def pair(y, _):
            return (-y).exp().clamp(max=1.0), torch.full_like(y, noise)

        nodes, start = self._at_nodes(budgets, start)
        found = self._search(nodes, pair, -start.log(), 0.0, -math.log(_SMALLEST_RATE),
                             f"a sample rate of {_SMALLEST_RATE:g}",
                             self.accountant)
        return pair(self._at_budgets(budgets, nodes, found, pair), None)[0]

    def epsilon(self, rate, noise):
        return accounting.compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=self.steps,
                                          delta=self.target_delta,
                                          accountant=self.accountant)

    def _at_nodes(self, budgets, values):
        nodes = _nodes(budgets, self.searched, self.spacing)
        return (nodes, values) if nodes is budgets else (nodes, _interpolate(nodes, budgets, values))

    def _search(self, nodes, pair, start, low, high, extreme, accountant):
        """The least safe y of each node; `pair(y, index)` gives rates and noise multipliers."""
        found = _least(lambda y, index: self._excess(*pair(y, index), nodes[index], accountant), start, low, high)
        if bool(found.isnan().any()):
            missed = float(nodes[found.isnan()][0])
            raise ValueError(f"target_epsilons must be larger, got {missed:g}: not even {extreme} meets it")
        return found

    def _excess(self, rates, noises, budgets, accountant):
        """ln of epsilon over a budget less a hair, which is kept for what nearby parameters may differ by, (D,)."""
        if accountant == "rdp":
            return _log_ratio(self._rdp_epsilon(rates, noises)[0], budgets * (1 - _HAIR))
        epsilons = [self.epsilon(*pair) for pair in zip(rates.tolist(), noises.tolist())]
        return _log_ratio(torch.tensor(epsilons, dtype=torch.float64), budgets * (1 - _JITTER))

    def _at_budgets(self, budgets, nodes, found, pair):
        """The least safe y of each budget, from those of the nodes."""
        if nodes is budgets:
            return found
        y = _safe_interpolation(budgets, nodes, found)
        if self.accountant == "pld":
            # A look at the middle of each stretch, where a curve strays farthest from its chord.
            middle = torch.searchsorted(budgets, torch.sqrt(nodes[1:] * nodes[:-1])).clamp(max=len(budgets) - 1)
            above = self._excess(*pair(y[middle], middle), budgets[middle], "pld")
            return y + 2 * float(above.max().clamp(min=0))
        # Which order decides changes slowly, and any order gives a bound.
        left, share = _between(budgets, nodes)
        orders = self._rdp_epsilon(*pair(found, torch.searchsorted(budgets, nodes).clamp(max=len(budgets) - 1)))[1]
        orders = orders.nan_to_num(nan=1024.0)[torch.where(share < 0.5, left, left + 1)]
        open_, step = torch.arange(len(y)), _PRECISION / 2
        while len(open_):
            rates, noises = pair(y[open_], open_)
            if step < 10 * _PRECISION:
                epsilons = self._epsilon_at(rates, noises, orders[open_])
            else:
                epsilons = self._rdp_epsilon(rates, noises)[0]
            open_ = open_[epsilons > budgets[open_] * (1 - _HAIR)]
            y[open_], step = y[open_] + step, 2 * step
        return y

    def _rdp_epsilon(self, rates, noises):
        """Epsilon of each pair by RDP, at the orders of `compute_epsilon` or fewer, and the order that decides."""
        every = torch.tensor(orders_for(float(noises.max())), dtype=torch.float64)
        near = torch.ones_like(every, dtype=torch.bool)
        if self._near is not None:
            near = (every > self._near[0] / 1.7) & (every < self._near[1] * 1.7)
            near = near if bool(near.any()) else torch.ones_like(near)
        epsilon, decides = self._rdp_epsilon_at(every[near], rates, noises)
        # Epsilon has one minimum over the orders: one inside the range is it.
        least, most = (every[near][i] if not near[i] else math.nan for i in (0, -1))
        outside = (decides == least) | (decides == most) | decides.isnan() | (epsilon == 0)
        if bool(outside.any()) and not bool(near.all()):
            epsilon[outside], decides[outside] = self._rdp_epsilon_at(every, rates[outside], noises[outside])
        if bool(decides.isfinite().all()):
            self._near = float(decides.min()), float(decides.max())
        return epsilon, decides

    def _rdp_epsilon_at(self, orders, rates, noises):
        rdp = self.steps * accounting.rdp_sampled_gaussian(sample_rate=rates, noise_multiplier=noises, orders=orders)
        rdp = rdp.masked_fill((orders > 1024) & (orders > 32 * noises[:, None]), math.inf)
        return accounting.rdp_to_epsilon(rdp, orders, self.target_delta)

    def _epsilon_at(self, rates, noises, orders):
        """Epsilon of each pair by RDP at its own order."""
        epsilon = torch.empty_like(rates)
        for order in orders.unique().tolist():
            rows = (orders == order).nonzero()[:, 0]
            epsilon[rows] = self._rdp_epsilon_at(torch.tensor([order], dtype=torch.float64), rates[rows],
                                                 noises[rows])[0]
        return epsilon


def _log_ratio(epsilons, budgets):
    """ln(epsilon / budget), kept finite: an epsilon of 0 or inf only says on which side it lies."""
    return torch.log(epsilons.clamp(min=1e-300) / budgets).clamp(-50, 50)


def _least(excess, start, low, high, precision=_PRECISION):
    """The least y in [low, high] at which a falling function is at most 0: within `precision`, and never below.

    Many searches side by side: `excess(y, index)` gives the values of those at `index`, start is (n,). nan where even
    `high` exceeds 0. As in `accounting.calibration`, excesses are logarithms of epsilon over its target, which say how
    far to walk; then secants close the bracket from both sides.
    """
    good, bad = torch.full_like(start, math.nan), torch.full_like(start, math.nan)
    at_good, at_bad, stride, idle = good.clone(), bad.clone(), good.clone(), torch.zeros_like(start)
    y, open_ = start.clamp(low, high), torch.arange(len(start))
    while len(open_):
        value, here = excess(y[open_], open_), y[open_]
        safe = value <= 0
        before = (bad - good)[open_]
        for ends, values, rows in ((good, at_good, safe), (bad, at_bad, ~safe)):
            ends[open_[rows]], values[open_[rows]] = here[rows], value[rows]
        gap = (bad - good)[open_]
        idle[open_] = torch.where(gap.abs() > before.abs() / 2, idle[open_] + 1, 0.0)
        ended = torch.where(safe, here <= low, here >= high)
        open_ = open_[torch.where(gap.isnan(), ~ended, gap.abs() > precision)]
        f, g = at_good[open_], at_bad[open_]
        gap = (bad - good)[open_]
        # One end is missing: walk on towards it, twice as far each time.
        known = torch.where(f.isnan(), g, f)
        walk = torch.where(stride[open_].isnan(), (1.2 * known.abs()).clamp(2 * precision, 1.0), 2 * stride[open_])
        walked = y[open_] + torch.where(f.isnan(), walk, -walk)
        # Else aim a little past the secant's estimate, away from the nearer end.
        share = -f / (g - f)
        share = share + torch.copysign((precision / 2 / gap.abs()).clamp(0.01, 0.25), 0.5 - share)
        share = torch.where((idle[open_] >= 2) | (torch.maximum(-f, g) >= 50), 0.5, share)
        stride[open_] = walk
        y[open_] = torch.where(gap.isnan(), walked.clamp(low, high), good[open_] + share * gap)
    return good


def _rounded_down(budgets):
    """Budgets whose logarithms lie on a grid, each at most the one that it stands for."""
    first = budgets.min()
    return torch.minimum(first * torch.exp(_APART * torch.floor(torch.log(budgets / first) / _APART)), budgets)


def _nodes(budgets, most, spacing):
    """The budgets themselves if they are at most `most`, else budgets with evenly spaced logarithms."""
    first, last = float(budgets[0].log()), float(budgets[-1].log())
    count = max(4, math.ceil((last - first) / spacing) + 1)
    if len(budgets) <= max(most, count):
        return budgets
    nodes = torch.linspace(first, last, count, dtype=torch.float64).exp()
    nodes[0], nodes[-1] = budgets[0], budgets[-1]
    return nodes


def _between(budgets, nodes):
    """The node at or before each budget, and how far on the way to the next one the budget lies, in logarithms."""
    left = (torch.searchsorted(nodes, budgets, right=True) - 1).clamp(0, len(nodes) - 2)
    share = (budgets / nodes[left]).log() / (nodes[left + 1] / nodes[left]).log()
    return left, share.clamp(0, 1)


def _interpolate(budgets, nodes, values):
    """The values of nodes at budgets."""
    left, share = _between(budgets, nodes)
    return torch.lerp(values[left], values[left + 1], share)


def _safe_interpolation(budgets, nodes, values):
    """An upper bound on a curve through evenly spaced points, if its bend keeps its sign over three stretches.

    Where it bends upwards its chord lies above it, where it bends downwards the chords of the stretches beside,
    prolonged.
    """
    left, share = _between(budgets, nodes)
    rises = values.diff()
    before = values[left] + share * rises[(left - 1).clamp(min=0)]
    after = values[left + 1] - (1 - share) * rises[(left + 1).clamp(max=len(rises) - 1)]
    before = torch.where(left == 0, after, before)
    after = torch.where(left == len(rises) - 1, before, after)
    chord = torch.lerp(values[left], values[left + 1], share)
    return torch.maximum(chord, torch.minimum(before, after))


def __getattr__(name):
    """The engine needs Opacus, so it is imported where it is asked for."""
    if name == "IndividualizedPrivacyEngine":
        from dpcompanion.engine import IndividualizedPrivacyEngine
        return IndividualizedPrivacyEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
