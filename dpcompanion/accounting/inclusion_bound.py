r"""A run with so little noise that a step shows who was in it.

With K the number of steps that drew the example, binomial (T, q), the outputs of a run are a
mixture over the drawn steps of Gaussians that lie :math:`\sqrt K / \sigma` from those without it.
The hockey-stick divergence is jointly convex, so that in both directions

.. math:: \delta(\varepsilon) \le E_K\left[\delta_{\sqrt K / \sigma}(\varepsilon)\right],

with the exact curve of the Gaussian mechanism (`gaussian`). What is given away is that an observer
does not know the drawn steps for sure: about :math:`\ln(1/q)` of the :math:`1 / 2 \sigma^2` that
each of them costs, less than half a percent of epsilon at a noise multiplier below `LITTLE_NOISE`
and rates above 1e-11.

>>> f"{epsilon(sample_rate=0.01, noise_multiplier=0.005, steps=100, delta=1e-5):.4g}"
'1.41e+05'
"""

from bisect import bisect_left

import torch
from scipy import stats

from dpcompanion.accounting.gaussian import composed_mu, gaussian_delta, gaussian_epsilon
from dpcompanion.accounting.search import bisect

#: Noise multipliers below which every run is accounted for by this bound, as loss distributions
#: would cost 1 / sigma (others only where no grid resolves them, see `pld`).
LITTLE_NOISE = 0.01

_GROUPS = 512  # numbers of draws that are counted one by one, and groups of more


def delta(*, sample_rate, noise_multiplier, steps, epsilon):
    """An upper bound on delta at `epsilon` (scalars; see `compute_delta`)."""
    return float(min(1.0, _bound(*_draws(sample_rate, steps, 1e-300), noise_multiplier, epsilon)))


def epsilon(*, sample_rate, noise_multiplier, steps, delta):
    """An upper bound on epsilon at `delta` (scalars; see `compute_epsilon`)."""
    draws, weights, beyond = _draws(sample_rate, steps, 1e-5 * delta)
    if _bound(draws, weights, beyond, noise_multiplier, 0.0) <= delta:
        return 0.0
    most = torch.tensor(
        gaussian_epsilon(composed_mu(float(draws[-1]), noise_multiplier), delta / 2),
        dtype=torch.float64,
    )

    def met(epsilon):
        return torch.tensor(
            _bound(draws, weights, beyond, noise_multiplier, float(epsilon)) <= delta
        )

    return float(bisect(met, good=most, bad=torch.zeros_like(most)))


def _draws(sample_rate, steps, spare):
    """Numbers of draws, the probability of each group up to it, and a bound on that of more."""
    # By bisection: SciPy's own inverse takes one minus `spare`, which of 1e-16 and less is one, and
    # says all steps.
    most = bisect_left(
        range(steps), True, key=lambda draws: stats.binom.sf(draws, steps, sample_rate) <= spare
    )
    least = int(stats.binom.ppf(1e-3, steps, sample_rate))
    few = torch.arange(least, min(most, least + _GROUPS) + 1, dtype=torch.float64)
    ends = torch.cat(
        [few, torch.linspace(float(few[-1]), most, _GROUPS, dtype=torch.float64).ceil()]
    ).unique()
    above, below = (
        torch.from_numpy(tail(ends.numpy(), steps, sample_rate))
        for tail in (stats.binom.sf, stats.binom.cdf)
    )
    # A group counts as its largest number. Differences are taken of the smaller tail, whose
    # rounding errors are relative to it; the hair covers them.
    between = torch.where(above[:-1] > 0.5, below[1:] - below[:-1], above[:-1] - above[1:]).clamp(
        min=0
    )
    return ends, torch.cat([below[:1], between]) * (1 + 1e-9), float(above[-1]) * (1 + 1e-9)


def _bound(draws, weights, beyond, noise_multiplier, epsilon):
    # A hair on each ratio, and the one in the weights for what rounding may take from delta.
    ratios = draws.sqrt() / noise_multiplier * (1 + 2.0**-51)
    return float((weights * gaussian_delta(ratios, epsilon)).sum()) + beyond
