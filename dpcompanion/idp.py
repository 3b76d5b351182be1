r"""Budgets for each group of examples: Sample and Scale (Boenisch et al. 2023).

P groups, group p with a share w_p of the examples and its own budget eps_p,
train one model with one Gaussian noise.  Two ways to spend what the looser
budgets allow:

* **Sample** (algorithm 2): group p is drawn with its own rate q_p.  The noise
  multiplier is the one at which the rates that use up each budget have the
  mean of plain DP-SGD, \sum_p w_p q_p = q, so that batches keep their size.
* **Scale** (algorithm 3): group p is clipped to its own norm c_p.  With sigma_p
  the noise multiplier that eps_p needs at rate q,

      sigma_scale = 1 / \sum_p (w_p / sigma_p),      c_p = c sigma_scale / sigma_p,

  so that noise of standard deviation sigma_scale c is sigma_p c_p for each group,
  and the mean clip norm is c.

Each group's guarantee is that of DP-SGD with its own (q_p, sigma_sample), or
(q, sigma_p): add/remove neighbours that differ in one example of that group,
Poisson sampling.  Parameters are found conservatively: no group's epsilon exceeds
its target.

>>> found = scale_parameters([1.0, 2.0, 3.0], [34, 43, 23], target_delta=1e-5, sample_rate=1 / 49, steps=1470,
...                          max_grad_norm=0.4)
>>> round(found.noise_multiplier, 2), [round(c, 3) for c in found.max_grad_norms.tolist()]
(2.01, [0.244, 0.43, 0.574])
"""

import dataclasses
import functools
import math

import torch
from scipy.optimize import brentq

from dpcompanion import _checks, accounting


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


def sample_parameters(target_epsilons, counts, *, target_delta, sample_rate, steps, accountant="rdp"):
    """Sample: the noise multiplier and the groups' rates that use up each budget and have the mean `sample_rate`.

    Args:
        target_epsilons: (P,) budgets.
        counts: (P,) numbers of examples, or their shares.
        target_delta, sample_rate, steps: as in plain DP-SGD.
        accountant: "rdp" or "pld".

    The search stops at a noise multiplier whose rates have a mean of at least `sample_rate`, and lowers them all by
    the same factor to make it equal: a lower rate never costs more.  Raises ValueError for bad input and for a budget
    that no noise can meet.

    >>> found = sample_parameters([1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000)
    >>> round(found.sample_rates.mean().item(), 9)
    0.01
    """
    epsilons, weights = _groups(target_epsilons, counts)
    common = dict(target_delta=target_delta, steps=steps, accountant=accountant)
    distinct = sorted(set(epsilons))

    @functools.cache
    def rates(log_noise):
        found = {epsilon: accounting.find_sample_rate(target_epsilon=epsilon, noise_multiplier=math.exp(log_noise),
                                                      **common) for epsilon in distinct}
        return torch.tensor([found[epsilon] for epsilon in epsilons], dtype=torch.float64)

    def log_excess(log_noise):
        return math.log(float(weights @ rates(log_noise)) / sample_rate)

    # At the noise that the loosest budget needs no rate exceeds `sample_rate`, at the strictest one's none falls below.
    low, high = (math.log(accounting.find_noise_multiplier(target_epsilon=epsilon, sample_rate=sample_rate, **common))
                 for epsilon in (distinct[-1], distinct[0]))
    tolerance = 1e-4
    if low < high and log_excess(low) < 0 < log_excess(high):
        low = brentq(log_excess, low, high, xtol=tolerance)
    step = tolerance
    while log_excess(low) < 0:
        low, step = low + step, 2 * step
        if step > 1:
            raise ValueError(f"target_epsilons cannot be met at sample_rate {sample_rate:g}, got {epsilons}")
    found = rates(low)
    return SampleParameters(math.exp(low), found * (sample_rate / float(weights @ found)))


def scale_parameters(target_epsilons, counts, *, target_delta, sample_rate, steps, max_grad_norm, accountant="rdp"):
    """Scale: the noise multiplier and the groups' clip norms, with the mean `max_grad_norm`, that use up each budget.

    Arguments as for `sample_parameters`; `max_grad_norm` is the clip norm of plain DP-SGD.  Training adds noise of
    standard deviation `noise_multiplier * max_grad_norm` to the sum of gradients clipped to `max_grad_norms`.

    >>> found = scale_parameters([1.0, 2.0], [50, 50], target_delta=1e-5, sample_rate=0.01, steps=1000, max_grad_norm=1)
    >>> torch.allclose(found.noise_multipliers * found.max_grad_norms, torch.tensor(found.noise_multiplier).double())
    True
    """
    epsilons, weights = _groups(target_epsilons, counts)
    _checks.in_interval("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
    found = {epsilon: accounting.find_noise_multiplier(
        target_epsilon=epsilon, target_delta=target_delta, sample_rate=sample_rate, steps=steps, accountant=accountant)
        for epsilon in set(epsilons)}
    noise = torch.tensor([found[epsilon] for epsilon in epsilons], dtype=torch.float64)
    pooled = 1 / float((weights / noise).sum())
    return ScaleParameters(pooled, noise, max_grad_norm * pooled / noise)


def _groups(target_epsilons, counts):
    """The budgets as a list, and the groups' shares as a (P,) tensor that sums to 1."""
    epsilons = torch.as_tensor(_checks.in_interval("target_epsilons", target_epsilons, 0, math.inf, closed="neither"),
                               dtype=torch.float64)
    counts = torch.as_tensor(_checks.in_interval("counts", counts, 0, math.inf, closed="neither"), dtype=torch.float64)
    for name, values in (("target_epsilons", epsilons), ("counts", counts)):
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(f"{name} must be a list with one entry for each group, got shape {tuple(values.shape)}")
    _checks.same_length(target_epsilons=epsilons, counts=counts)
    return epsilons.tolist(), counts / counts.sum()
