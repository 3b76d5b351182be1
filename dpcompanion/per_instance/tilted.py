r"""Exact composition by tilted training: no Hoelder inequality, no larger orders.

Show the adversary, at every step, the batch of the other points (its law is the same with x and
without, so this only adds to the view) and the noisy sum. Given the state, let g be x's clipped
gradient, :math:`\Delta = \|g\|`, z the noisy sum less the batch's, and
:math:`r(z) = 1 - q + q e^{\langle z, g\rangle/s^2 - \Delta^2/2s^2}` the likelihood ratio of the
step. With :math:`\varphi` the noise's density,

.. math::
    e^{k\langle z,g\rangle/s^2 - k\Delta^2/2s^2}\, \varphi(z)
    = e^{(k^2-k)\Delta^2/2s^2}\, \varphi(z - kg),

and so

.. math::
    r(z)^\alpha \varphi(z)
    = \sum_k \binom{\alpha}{k}(1-q)^{\alpha-k}q^k e^{(k^2-k)\Delta^2/2s^2}\, \varphi(z - kg)

is :math:`A(\Delta)` times a mixture of Gaussians. In **tilted training** x enters each step k
times, k being sampled with probability proportional to the k-th weight. Multiplying over the steps,

.. math::
    D_\alpha(\text{with } x \,\|\, \text{without})
    \le \frac{1}{\alpha-1}\ln E_\text{tilted}\Big[\prod_t A(\Delta_t)\Big],

with equality for the view that shows the batches. So: train a few tilted runs side by side, add up
:math:`\ln A` along each (`log_mass`), and hand the sums to `exact_composition`. It is never above
the sum of worst cases, nor above theorem 3.3 for the same view.

The other way round ("add") the weight of a step is :math:`r^{1-\alpha}`: not a mixture of shifts,
but a law that differs from the noise along g only, and is sampled exactly by rejection
(`tilted_noise`).

A run of four steps whose gradient shrinks as the model moves, one parameter, q = 0.3, s = 1, order
4:

>>> from dpcompanion.per_instance import log_mass
>>> generator = torch.Generator().manual_seed(0)
>>> theta, total = torch.zeros(4_000, dtype=torch.float64), torch.zeros(4_000, dtype=torch.float64)
>>> for step in range(4):
...     gradient = 1 / (1 + theta**2)
...     total += log_mass(gradient, sample_rate=0.3, noise_std=1.0, order=4)
...     count = tilted_counts(
...         gradient, sample_rate=0.3, noise_std=1.0, order=4, generator=generator
...     )
...     theta += count * gradient + torch.randn(4_000, generator=generator, dtype=torch.float64)
>>> largest = 4 * log_mass(1.0, sample_rate=0.3, noise_std=1.0, order=4)
>>> found = exact_composition(total, order=4, worst_case=largest / 3)
>>> print(
...     f"{found.estimate:.2f}, at most {found.upper_bound:.2f}; worst case {found.worst_case:.2f}"
... )
0.73, at most 0.77; worst case 2.42
"""

import dataclasses
import math

import torch

from dpcompanion import _checks
from dpcompanion._devices import on_accelerator, to_device
from dpcompanion._types import Array, Numbers
from dpcompanion.per_instance.added import add_mode
from dpcompanion.per_instance.batches import log_mean
from dpcompanion.per_instance.confidence import log_mean_bound
from dpcompanion.per_instance.steps import as_tensors

_CHUNK = 1 << 22  # numbers in one temporary tensor


def tilted_counts(
    sensitivity: Numbers,
    *,
    sample_rate: Numbers,
    noise_std: Numbers,
    order: float,
    generator: torch.Generator,
) -> torch.Tensor:
    r"""How often x enters a step of a tilted run ("remove").

    k is sampled with probability
    :math:`\propto \binom{\alpha}{k}(1-q)^{\alpha-k}q^k e^{(k^2-k)\Delta^2/2s^2}`.

    Args:
        sensitivity: (...) norm of x's clipped gradient in each run, at least 0.
        sample_rate: q in (0, 1], a number or (...).
        noise_std: s above 0, a number or (...).
        order: :math:`\alpha`, a whole number of 2 or more.
        generator: a `torch.Generator` on the device of `sensitivity`.

    Returns:
        (...) int64 between 0 and `order`. Add k times the clipped gradient to the sum over a
        Poisson batch of the *other* points, and the usual noise.

    Raises:
        ValueError: an argument outside its range.

    >>> generator = torch.Generator().manual_seed(0)
    >>> sizes = torch.tensor([0.1, 1.0, 3.0]).repeat(5, 1)
    >>> tilted_counts(sizes, sample_rate=0.3, noise_std=1.0, order=4, generator=generator).tolist()
    [[..., 4], [..., 4], [..., 4], [..., 4], [..., 4]]
    """
    order = _checks.whole_number("order", order, 2)
    _checks.in_interval("noise_std", noise_std, 0, math.inf, closed="neither")
    _checks.generator("generator", generator)
    sensitivity, q, noise = as_tensors(
        sensitivity=sensitivity, sample_rate=sample_rate, noise_std=noise_std
    )
    k = torch.arange(order + 1, dtype=torch.float64, device=sensitivity.device)
    log_choose = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
    unsampled = torch.where(k == order, 0.0, (order - k) * torch.log1p(-q)[..., None])
    gain = (k * k - k) / 2 * ((sensitivity / noise) ** 2)[..., None]
    logs = log_choose + unsampled + k * torch.log(q)[..., None] + gain
    below = torch.softmax(logs, dim=-1).cumsum(-1)
    # Scaled by the last entry, so that rounding errors cannot lead past the end.
    draw = torch.rand(
        sensitivity.shape, generator=generator, dtype=torch.float64, device=sensitivity.device
    )
    return ((draw * below[..., -1])[..., None] >= below[..., :-1]).sum(-1)


def tilted_noise(
    noise: torch.Tensor,
    gradient: torch.Tensor,
    *,
    sample_rate: Numbers,
    noise_std: float,
    order: float,
    generator: torch.Generator,
) -> torch.Tensor:
    r"""Noise of a step of a tilted run the other way round ("add"): the law
    :math:`\propto r(z)^{1-\alpha} \varphi(z)`.

    A trainer that can only add to a run's sum takes a plan without noise, and the whole of this
    added.

    Args:
        noise: (..., parameters) draws of the noise, normal with standard deviation `noise_std`.
        gradient: (..., parameters) x's clipped gradient. x itself enters no step of these runs.
        sample_rate: q in (0, 1], a number or (...).
        noise_std: s above 0, a number.
        order: :math:`\alpha` above 1, whole or not.
        generator: a `torch.Generator` on the device of `noise`.

    Returns:
        (..., parameters), the noise with its component along the gradient drawn anew: from
        :math:`N(m, s^2)` at the mode m, and accepted with the probability that is left. The target
        is log-concave with a curvature of at least :math:`1/s^2`, so this is exact.

    Raises:
        ValueError: an argument outside its range, or a gradient that is not finite.
        RuntimeError: noise and gradient of shapes that do not broadcast.

    >>> generator = torch.Generator().manual_seed(0)
    >>> noise = torch.randn(10_000, 2, generator=generator, dtype=torch.float64)
    >>> gradient = torch.tensor([1.0, 0.0])
    >>> moved = tilted_noise(
    ...     noise, gradient, sample_rate=0.3, noise_std=1.0, order=4, generator=generator
    ... )
    >>> moved.mean(0)
    tensor([-0.5..., ...], dtype=torch.float64)
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    noise_std = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    _checks.generator("generator", generator)
    noise, gradient = torch.broadcast_tensors(noise, gradient.to(noise.dtype))
    size = torch.linalg.vector_norm(gradient, dim=-1).double()
    drawn = noise_std * _tilted_component(size / noise_std, sample_rate, order - 1, generator)
    direction = torch.where(size[..., None] > 0, gradient / size[..., None], 0.0)
    along = (noise * direction).sum(-1, keepdim=True)
    return (
        noise
        + torch.where(size[..., None] > 0, drawn[..., None] - along, 0.0).to(noise.dtype)
        * direction
    )


def _tilted_component(ratio, sample_rate, power, generator):
    """Draws of t of density proportional to r(t)^-power phi(t), one per sensitivity over noise."""
    ratio, q = as_tensors(sensitivity=ratio, sample_rate=sample_rate)
    shape, ratio, q = ratio.shape, ratio.reshape(-1), q.reshape(-1)
    result = torch.randn(len(ratio), generator=generator, dtype=torch.float64, device=ratio.device)
    # there the law is a shifted Gaussian
    result = torch.where(q == 1, result - power * ratio, result)
    waiting = ((ratio > 0) & (q < 1)).nonzero()[:, 0]
    sigma = 1 / ratio
    mode = torch.zeros_like(ratio)
    mode[waiting] = add_mode(q[waiting], sigma[waiting], power)

    def log_r(t, rows):
        u = t / sigma[rows] - 0.5 / sigma[rows] ** 2
        return torch.logaddexp(torch.log1p(-q[rows]), torch.log(q[rows]) + u)

    while len(waiting):
        step = torch.randn(
            len(waiting), generator=generator, dtype=torch.float64, device=ratio.device
        )
        chance = torch.rand(
            len(waiting), generator=generator, dtype=torch.float64, device=ratio.device
        )
        m = mode[waiting]
        # ln of target over proposal, less its value at the mode: at most 0.
        log_keep = -power * (log_r(m + step, waiting) - log_r(m, waiting)) - m * step
        kept = torch.log(chance) < log_keep
        result[waiting[kept]] = (m + step)[kept]
        waiting = waiting[~kept]
    return result.reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class CompositionEstimate:
    """What tilted runs say about a divergence of this `order`, in nats; tensors of one shape.

    * `estimate`: the plug-in value, with the mean over the runs for the expectation; low on
      average;
    * `low`, `high`: a bootstrap interval of it, which describes its scatter and is no guarantee;
    * `upper_bound`: the divergence is at most this, with probability `confidence` over the runs,
      each entry by itself;
    * `worst_case`: the data-independent divergence, which the upper bound never exceeds.
    """

    order: float
    runs: int
    confidence: float
    estimate: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    upper_bound: torch.Tensor
    worst_case: torch.Tensor


def exact_composition(
    log_masses: Array,
    *,
    order: float,
    worst_case: Numbers = math.inf,
    confidence: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> CompositionEstimate:
    r""":math:`\frac{1}{\alpha-1} \ln E_\text{tilted}[\prod_t A(\Delta_t)]`, from tilted runs.

    Args:
        log_masses: (runs, ...) sums over the steps of :math:`\ln A(\Delta_t)` (for "add"
            :math:`\ln \bar A`), along independent tilted runs of the same order and direction.
        order: :math:`\alpha`, above 1.
        worst_case: the data-independent divergence of the run at this order, nats: the number of
            steps times `step_divergence` at the clip norm. A number or (...). The upper bound
            cannot do without.
        confidence: of the interval, and of the upper bound, in (0, 1). For both directions, or
            several orders, divide what is missing to 1 among them.
        resamples: of the bootstrap.
        generator: for the bootstrap; by default one with seed 0.

    Returns:
        A `CompositionEstimate`. Pass divergences at several orders to
        `dpcompanion.accounting.rdp_to_epsilon` for an epsilon at the best of them; orders of 2 to
        10 mostly are, and there a dozen runs fix the estimate. The upper bound wants more: n runs
        cannot exclude that a share 3/n of all would reach the worst case.

    Raises:
        ValueError: sums that are negative or above the worst case.

    >>> found = exact_composition(torch.tensor([1.0, 1.2, 1.1, 0.9]), order=6, worst_case=1.0)
    >>> f"{found.estimate:.3f} in [{found.low:.3f}, {found.high:.3f}]"
    '0.211 in [0.190, 0.231]'
    >>> f"at most {found.upper_bound:.3f}"
    'at most 0.898'
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    _checks.number("confidence", confidence, 0, 1, closed="neither")
    resamples = _checks.whole_number("resamples", resamples, 1)

    def look():
        _checks.in_interval("worst_case", worst_case, 0)
        _checks.in_interval("log_masses", log_masses, 0, math.inf, closed="left")

    # What lies on a GPU is asked once whether all is well, and only if not, what is not.
    if not (isinstance(log_masses, torch.Tensor) and on_accelerator(log_masses)):
        look()
    log_masses = torch.as_tensor(log_masses, dtype=torch.float64)
    if log_masses.ndim == 0 or len(log_masses) == 0:
        raise ValueError(
            f"log_masses must be (runs, ...), one run or more, got shape {tuple(log_masses.shape)}"
        )
    worst = to_device(torch.as_tensor(worst_case, dtype=torch.float64), log_masses.device).expand(
        log_masses.shape[1:]
    )
    fit = (
        (log_masses >= 0)
        & (log_masses < math.inf)
        & (log_masses <= (order - 1) * worst * (1 + 1e-6) + 1e-9)
    )
    if not bool((fit & (worst >= 0)).all()):
        look()
        raise ValueError(
            f"log_masses must not exceed (order - 1) * worst_case, but {float(log_masses.max()):g} "
            f"does, with worst_case {float(worst.min()):g}"
        )
    log_masses = torch.minimum(log_masses, (order - 1) * worst)
    bound = log_mean_bound(log_masses, (order - 1) * worst, confidence=confidence, log_smallest=0.0)
    low, high = _bootstrap(log_masses, confidence, resamples, generator)
    estimate, low, high, bound = (v / (order - 1) for v in (log_mean(log_masses), low, high, bound))
    return CompositionEstimate(
        order, len(log_masses), confidence, estimate, low, high, bound, worst
    )


def _bootstrap(log_masses, confidence, resamples, generator):
    """Percentiles of the log-mean over runs sampled with replacement, the same for every entry."""
    runs, flat = len(log_masses), log_masses.reshape(len(log_masses), -1)
    if generator is None:
        generator = torch.Generator(device=flat.device).manual_seed(0)
    drawn = torch.randint(runs, (resamples, runs), generator=generator, device=flat.device)
    counts = torch.zeros(resamples, runs, dtype=torch.float64, device=flat.device).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    ends = to_device(
        torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64), flat.device
    )
    top = flat.max(0).values
    found = []
    for part in torch.arange(flat.shape[1], device=flat.device).split(max(1, _CHUNK // resamples)):
        means = torch.log(counts @ torch.exp(flat[:, part] - top[part]) / runs) + top[part]
        found.append(torch.quantile(means, ends, dim=0))
    return torch.cat(found, dim=1).reshape(2, *log_masses.shape[1:])
