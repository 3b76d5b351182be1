"""Sensitivity, intrinsic noise, and what is missing from it: theorem 2, algorithms 1 and 2 (Hyland
and Tople 2020).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, overload

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Numbers
from dpcompanion.accounting import gaussian_epsilon, gaussian_mu

_MECHANISMS = ("analytic", "classical")


@overload
def sgd_sensitivity(
    *,
    passes: float,
    lipschitz: float,
    learning_rate: float,
    batch_size: float,
    smoothness: float | None = ...,
) -> float: ...
@overload
def sgd_sensitivity(
    *,
    passes: Numbers,
    lipschitz: Numbers,
    learning_rate: Numbers,
    batch_size: Numbers,
    smoothness: Numbers | None = ...,
) -> torch.Tensor: ...
def sgd_sensitivity(
    *,
    passes: Numbers,
    lipschitz: Numbers,
    learning_rate: Numbers,
    batch_size: Numbers,
    smoothness: Numbers | None = None,
) -> float | torch.Tensor:
    r"""Theorem 2: :math:`2 \lceil k \rceil L \eta / B`, the passes k rounded up.

    A run that has begun a pass may have met the replaced example in it already, so that a part of a
    pass counts as a whole one. The sum of gradients is divided by B in every batch.

    The theorem holds for convex losses and :math:`\eta \le 2/\beta` only: beyond it a step may
    drive two runs apart, and the result is no bound, so that such a rate is refused. `smoothness`
    is :math:`\beta`. Without it the loss is taken for that of logistic or softmax regression, by
    which :math:`\beta = L^2/4` however long the rows are: with rows of norm at most R the former
    has :math:`L = R, \beta = R^2/4`, the latter :math:`L = \sqrt 2 R, \beta = R^2/2`. Any other
    loss (a penalty added, say) needs its own.

    Args:
        passes: k, passes over the data, above 0; with a fraction where a run ends within a pass.
        lipschitz: L, a bound on the norm of an example's gradient, above 0.
        learning_rate: eta, above 0, the same throughout (or the largest).
        batch_size: B, 1 or more.
        smoothness: beta, above 0; None for lipschitz^2 / 4, that of logistic and softmax
            regression. All are numbers, or tensors or sequences that broadcast.

    Returns:
        A float of numbers, else a float64 tensor of the common shape.

    Raises:
        ValueError: passes, learning rates, Lipschitz or smoothness constants that are not positive,
            a batch size below 1, a learning rate above 2 / smoothness (there
            `sgd_sensitivity_estimate` gives the value, which bounds nothing), a result that float64
            has no digits for.

    >>> round(
    ...     sgd_sensitivity(
    ...         passes=5.7, lipschitz=2**0.5, learning_rate=0.1, batch_size=32, smoothness=0.5
    ...     ),
    ...     4,
    ... )
    0.053
    >>> sgd_sensitivity(
    ...     passes=5.7, lipschitz=2**0.5, learning_rate=5.0, batch_size=32, smoothness=0.5
    ... )
    Traceback (most recent call last):
        ...
    ValueError: learning_rate must be at most 2 / smoothness = 4 for theorem 2 to hold, got 5
    """
    whole = _checks.as_given(_positive("passes", passes).ceil(), passes)
    beta = (
        _positive("lipschitz", lipschitz).square() / 4
        if smoothness is None
        else _positive("smoothness", smoothness)
    )
    rate, most = torch.broadcast_tensors(_positive("learning_rate", learning_rate), 2 / beta)
    if bool((beyond := rate > most * (1 + 1e-12)).any()):  # the square of sqrt(2) is not 2
        raise ValueError(
            f"learning_rate must be at most 2 / smoothness = {float(most[beyond][0]):g} for "
            f"theorem 2 to hold, got {float(rate[beyond][0]):g}"
            + (
                ", where no smoothness was given and lipschitz**2 / 4 is taken"
                if smoothness is None
                else ""
            )
        )
    return sgd_sensitivity_estimate(
        passes=whole, lipschitz=lipschitz, learning_rate=learning_rate, batch_size=batch_size
    )


@overload
def sgd_sensitivity_estimate(
    *, passes: float, lipschitz: float, learning_rate: float, batch_size: float
) -> float: ...
@overload
def sgd_sensitivity_estimate(
    *, passes: Numbers, lipschitz: Numbers, learning_rate: Numbers, batch_size: Numbers
) -> torch.Tensor: ...
def sgd_sensitivity_estimate(
    *, passes: Numbers, lipschitz: Numbers, learning_rate: Numbers, batch_size: Numbers
) -> float | torch.Tensor:
    r""":math:`2 k L \eta / B`, for fractional k, as in the paper: no bound. See `sgd_sensitivity`.

    Args:
        passes: k, passes over the data, above 0.
        lipschitz: L, a bound on the norm of an example's gradient, above 0.
        learning_rate: eta, above 0.
        batch_size: B, 1 or more. All are numbers, or tensors or sequences that broadcast.

    Returns:
        A float of numbers, else a float64 tensor of the common shape.

    >>> round(
    ...     sgd_sensitivity_estimate(
    ...         passes=1850 * 32 / 10397, lipschitz=2**0.5, learning_rate=0.1, batch_size=32
    ...     ),
    ...     4,
    ... )
    0.0503
    """
    given = passes, lipschitz, learning_rate, batch_size
    passes, lipschitz, learning_rate = (
        _positive(name, value)
        for name, value in (
            ("passes", passes),
            ("lipschitz", lipschitz),
            ("learning_rate", learning_rate),
        )
    )
    _checks.in_interval("batch_size", batch_size, 1, math.inf, closed="left")
    batch_size = torch.as_tensor(batch_size, dtype=torch.float64)
    found = _in_range(
        "learning_rate", "the sensitivity", 2 * passes * lipschitz * learning_rate / batch_size
    )
    return _checks.as_given(found, *given)


def pairwise_sensitivity(weights: Array) -> torch.Tensor:
    r"""Equation 18: :math:`\|A(S_i, r) - A(S_j, r)\|` for each seed r, pair i < j: (seeds, pairs).

    Pairs come in the order of `torch.combinations`. Under one seed the runs on S_i and S_j differ
    in two places, that of example i and that of example j, so that twice the bound of theorem 2
    holds for them; it holds once against the data set that replaces nothing (data set 0 of
    `train_grid`).

    >>> pairwise_sensitivity(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 4.0]]]))
    tensor([[5., 4., 3.]], dtype=torch.float64)
    """
    weights = _weights(weights, data_sets=2, seeds=1)
    first, second = torch.combinations(torch.arange(len(weights))).T
    # Differences rather than products: neighbours lie so close to each other that |a|^2 - 2ab +
    # |b|^2 cancels.
    return torch.stack([(run[first] - run[second]).norm(dim=-1) for run in weights.unbind(1)])


def empirical_sensitivity(weights: Array) -> float:
    """Equation 17: the largest `pairwise_sensitivity` that was seen, a float.

    A maximum over the pairs that were tried, so a lower bound on the sensitivity. Raises ValueError
    for fewer than two data sets.

    >>> empirical_sensitivity([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 1.0]]])
    5.0
    """
    return float(pairwise_sensitivity(weights).max())


def seed_sigma(weights: Array) -> torch.Tensor:
    """The weights' standard deviation about their mean over seeds, (data sets,).

    All parameters are pooled.

    As algorithm 1 has it: residuals about a mean of R runs, so that it is too small by sqrt((R - 1)
    / R), on the safe side. Raises ValueError for fewer than two seeds.
    """
    weights = _weights(weights, seeds=2)
    return (weights - weights.mean(1, keepdim=True)).flatten(1).square().mean(1).sqrt()


def intrinsic_sigma(weights: Array) -> float:
    """Algorithm 1: the median over data sets of `seed_sigma`, a float.

    >>> generator = torch.Generator().manual_seed(0)
    >>> round(
    ...     intrinsic_sigma(
    ...         0.1 * torch.randn(5, 400, 20, generator=generator, dtype=torch.float64)
    ...     ),
    ...     4,
    ... )
    0.1003
    """
    return float(seed_sigma(weights).quantile(0.5))


@overload
def intrinsic_epsilon(
    sensitivity: float, sigma: float, delta: float, *, mechanism: str = ...
) -> float: ...
@overload
def intrinsic_epsilon(
    sensitivity: Numbers, sigma: Numbers, delta: Numbers, *, mechanism: str = ...
) -> torch.Tensor: ...
def intrinsic_epsilon(
    sensitivity: Numbers, sigma: Numbers, delta: Numbers, *, mechanism: str = "analytic"
) -> float | torch.Tensor:
    r"""Equation 16: epsilon of the Gaussian mechanism with noise `sigma`; inf where sigma is 0.

    Args:
        sensitivity: at least 0; number or tensor.
        sigma: at least 0; number or tensor. The three broadcast.
        delta: in (0, 1); number or tensor.
        mechanism: "analytic", or "classical", which is no bound once epsilon exceeds 1.

    Returns:
        A float of numbers, else a float64 tensor of the common shape.

    Raises:
        ValueError: an argument outside its range, or an unknown mechanism.

    >>> round(intrinsic_epsilon(0.050, 0.028, 9.62e-5, mechanism="classical"), 4)
    7.7724
    """
    given = sensitivity, sigma, delta
    _checks.one_of("mechanism", mechanism, _MECHANISMS)
    sensitivity, sigma = _at_least_0("sensitivity", sensitivity), _at_least_0("sigma", sigma)
    delta = _delta(delta)
    ratio = torch.where(sensitivity == 0, 0.0, sensitivity / sigma)
    found = (
        gaussian_epsilon(ratio, delta)
        if mechanism == "analytic"
        else ratio * torch.sqrt(2 * torch.log(1.25 / delta))
    )
    return _checks.as_given(found, *given)


@overload
def augmented_sigma(
    sensitivity: float,
    sigma_intrinsic: float,
    *,
    target_epsilon: float,
    target_delta: float,
    mechanism: str = ...,
) -> float: ...
@overload
def augmented_sigma(
    sensitivity: Numbers,
    sigma_intrinsic: Numbers,
    *,
    target_epsilon: Numbers,
    target_delta: Numbers,
    mechanism: str = ...,
) -> torch.Tensor: ...
def augmented_sigma(
    sensitivity: Numbers,
    sigma_intrinsic: Numbers,
    *,
    target_epsilon: Numbers,
    target_delta: Numbers,
    mechanism: str = "analytic",
) -> float | torch.Tensor:
    r"""Algorithm 2: the noise to add, :math:`\sqrt{\max(0, \sigma_\text{target}^2 - \sigma_i^2)}`.

    Args:
        sensitivity, sigma_intrinsic: at least 0; numbers or tensors that broadcast. With
            `sigma_intrinsic=0` this is plain output perturbation, and a guarantee if the
            sensitivity is one.
        target_epsilon, target_delta: the budget; epsilon > 0, delta in (0, 1); numbers or tensors
            that broadcast.
        mechanism: "analytic", or "classical", which is a bound for a target below 1 only.

    Returns:
        A float of numbers, else a float64 tensor of the common shape. The analytic noise is found
        conservatively: `gaussian_delta` at the total never exceeds the target.

    Raises:
        ValueError: an argument outside its range, an unknown mechanism, or a noise that float64 has
            no digits for.

    >>> augmented_sigma(0.050, [0.0, 0.028, 0.3], target_epsilon=1, target_delta=9.62e-5)
    tensor([0.1598, 0.1573, 0.0000], dtype=torch.float64)
    """
    _checks.one_of("mechanism", mechanism, _MECHANISMS)
    given = sensitivity, sigma_intrinsic, target_epsilon, target_delta
    sensitivity = _at_least_0("sensitivity", sensitivity)
    own = _at_least_0("sigma_intrinsic", sigma_intrinsic)
    epsilon = _positive("target_epsilon", target_epsilon)
    delta = _delta(target_delta, "target_delta")
    if mechanism == "analytic":
        target = sensitivity / gaussian_mu(epsilon, delta)
    else:
        target = sensitivity * torch.sqrt(2 * torch.log(1.25 / delta)) / epsilon
    _in_range("sensitivity", "the noise", torch.where(sensitivity == 0, 1.0, target))
    # No squares of what is small: they would underflow, to no noise at all.
    ratio = torch.where(target > 0, own / target, 1.0).clamp(max=1)
    return _checks.as_given(target * ((1 - ratio) * (1 + ratio)).sqrt(), *given)


class NoiseCovariance(NamedTuple):
    """A covariance, (parameters, parameters), and the share of the identity in it."""

    covariance: torch.Tensor
    shrinkage: float


def noise_covariance(weights: Array, *, shrinkage: float | None = None) -> NoiseCovariance:
    r"""The weights' covariance over seeds, shrunk towards a multiple of the identity.

    :math:`(1 - \rho) \hat S + \rho\, \frac{\operatorname{tr} \hat S}{d} I`, with the sample
    covariance of the residuals of each data set about its own mean, averaged over data sets.
    Without a `shrinkage` rho in [0, 1], that of Ledoit and Wolf (2004) is taken, with R seeds

    .. math::
        \rho = \min\Big(1, \overline{\|r r^\top - \hat S\|^2} \Big/
            R\, \Big\|\hat S - \frac{\operatorname{tr} \hat S}{d} I\Big\|^2\Big),

    since runs of one seed on neighbouring data sets are nearly equal, so data sets do not count as
    more samples. Returns `NoiseCovariance`: the covariance, (parameters, parameters), and rho.

    >>> generator = torch.Generator().manual_seed(0)
    >>> draws = torch.randn(1, 5000, 2, generator=generator, dtype=torch.float64) * torch.tensor(
    ...     [1.0, 0.1]
    ... )
    >>> covariance, shrinkage = noise_covariance(draws)
    >>> covariance.diag().sqrt(), shrinkage < 0.001
    (tensor([1.0107, 0.1024], dtype=torch.float64), True)
    """
    weights = _weights(weights, seeds=2)
    seeds, size = weights.shape[1:]
    residuals = weights - weights.mean(1, keepdim=True)
    sample = (residuals.mT @ residuals).mean(0) / seeds
    mean = sample.diag().mean() * torch.eye(size, dtype=sample.dtype, device=sample.device)
    if shrinkage is None:
        # The mean of ||r r' - S||^2 over draws is the mean of |r|^4 less |S|^2, over data sets.
        spread = residuals.square().sum(-1).square().mean() - sample.square().sum()
        distance = (sample - mean).square().sum()
        shrinkage = min(1.0, float(spread / (seeds * distance))) if distance > 0 else 1.0
    _checks.in_interval("shrinkage", shrinkage, 0, 1)
    # The factor makes up for residuals about an estimated mean.
    return NoiseCovariance(
        ((1 - shrinkage) * sample + shrinkage * mean) * (seeds / (seeds - 1)), shrinkage
    )


@overload
def mahalanobis(differences: Sequence[float], covariance: Array) -> float: ...
@overload
def mahalanobis(differences: Array, covariance: Array) -> torch.Tensor: ...
def mahalanobis(differences: Array, covariance: Array) -> float | torch.Tensor:
    r""":math:`\mu = \sqrt{d^\top S^{-1} d}` of differences d of means, (..., parameters) to (...).

    What tells two Gaussians N(m, S) and N(m + d, S) apart: they are as far from each other as N(0,
    1) and N(mu, 1), so that `gaussian_epsilon(mu, delta)` is their exact epsilon. A float of a list
    of numbers, else float64. Raises ValueError for a covariance that is not symmetric and positive
    definite.

    >>> mahalanobis([3.0, 0.5], torch.diag(torch.tensor([9.0, 0.25])))
    1.4142...
    """
    given = _checks.entries(differences)
    _checks.in_interval("differences", differences, -math.inf, math.inf, closed="neither")
    differences, covariance = (
        torch.as_tensor(v, dtype=torch.float64) for v in (differences, covariance)
    )
    _checks.in_interval("covariance", covariance, -math.inf, math.inf, closed="neither")
    if covariance.ndim != 2 or covariance.shape != (differences.shape[-1],) * 2:
        raise ValueError(
            f"covariance must be {differences.shape[-1]} x {differences.shape[-1]}, got "
            f"{tuple(covariance.shape)}"
        )
    # Only one half is read below; what a product of matrices rounds is no asymmetry.
    askew = (covariance - covariance.T).abs().max()
    if bool(askew > 1e-6 * covariance.abs().max()):
        raise ValueError(
            "covariance must be symmetric, got entries across the diagonal that differ by "
            f"{askew:g}"
        )
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        least = float(torch.linalg.eigvalsh(covariance)[0])
        raise ValueError(
            f"covariance must be positive definite, got a smallest eigenvalue of {least:g}; shrink "
            "it, or use more seeds than parameters"
        )
    flat = differences.reshape(-1, differences.shape[-1])
    found = (
        torch.linalg.solve_triangular(factor, flat.T, upper=False)
        .norm(dim=0)
        .reshape(differences.shape[:-1])
    )
    return _checks.as_given(found, *given)


def _weights(weights, *, data_sets=1, seeds=1):
    weights = _checks.tensor("weights", weights, torch.float64)
    if weights.ndim != 3:
        raise ValueError(
            f"weights must be (data sets, seeds, parameters), got shape {tuple(weights.shape)}"
        )
    for axis, name, least, why in (
        (0, "data sets", data_sets, "sensitivity compares two"),
        (1, "seeds", seeds, "the noise is what differs between them"),
    ):
        if weights.shape[axis] < least:
            raise ValueError(
                f"weights must hold {least} {name} or more, since {why}, got {weights.shape[axis]}"
            )
    _checks.in_interval("weights", weights, -math.inf, math.inf, closed="neither")
    return weights


def _positive(name, value):
    return torch.as_tensor(
        _checks.in_interval(name, value, 0, math.inf, closed="neither"), dtype=torch.float64
    )


def _in_range(name, what, found):
    """What came out, if float64 can tell it from 0 and infinity with all its digits."""
    low, high = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max
    if bool((bad := ~((found >= low) & (found <= high))).any()):
        raise ValueError(
            f"{name} must leave {what} between {low:g} and {high:g}, got {float(found[bad][0]):g}"
        )
    return found


def _at_least_0(name, value):
    return torch.as_tensor(
        _checks.in_interval(name, value, 0, math.inf, closed="left"), dtype=torch.float64
    )


def _delta(value, name="delta"):
    return torch.as_tensor(
        _checks.in_interval(name, value, 0, 1, closed="neither"), dtype=torch.float64
    )
