"""Proposals, distributions by which runs are sampled to be weighted: how often a point enters a
step, and its density.

See `dpcompanion.per_instance.loss`.
"""

import math

import torch
import torch.nn.functional as F

from dpcompanion import _checks
from dpcompanion._types import Numbers
from dpcompanion.accounting.loss import DIRECTIONS

#: How often x enters at most where a proposal jumps.
REACH = 6


def step_loss(
    moved: torch.Tensor,
    gradient: torch.Tensor,
    *,
    sample_rate: float,
    noise_std: float,
    direction: str = "remove",
) -> torch.Tensor:
    r"""What a step of a run adds to its loss: :math:`\ln r` ("remove") or :math:`-\ln r` ("add").

    .. math:: r = 1 - q + q\, e^{\langle z, g\rangle/s^2 - \|g\|^2/2s^2}

    Args:
        moved: (..., parameters) z, the noisy sum less that of the *other* points' clipped
            gradients: for "remove" k gradients of x plus the noise, for "add" the noise
            (`tilted_noise`).
        gradient: (..., parameters) g, x's clipped gradient at the state in which the step began.
        sample_rate: q in (0, 1], a number.
        noise_std: s above 0, a number.
        direction: "remove" or "add".

    Returns:
        (...) float64, nats.

    Raises:
        ValueError: an argument outside its range, an unknown direction, or `moved` and `gradient`
            with different numbers of parameters.

    >>> step_loss([[0.0], [3.0]], [[1.0], [1.0]], sample_rate=0.1, noise_std=1.0)
    tensor([-0.0401,  0.7506], dtype=torch.float64)
    """
    _checks.one_of("direction", direction, DIRECTIONS)
    along, size = _along(moved, gradient, noise_std)
    log_ratio = _log_ratio(along, size, sample_rate)
    return log_ratio if direction == "remove" else -log_ratio


def proposal_counts(
    sensitivity: Numbers,
    *,
    sample_rate: float,
    noise_std: float,
    order: float,
    generator: torch.Generator,
    jumps: float = 0.0,
    max_sensitivity: float = 1.0,
) -> torch.Tensor:
    r"""How often x enters a step of a run by the proposal of this order that jumps ("remove").

    With probability :math:`\rho = \text{jumps} \cdot (\Delta / C)^2` k is uniform on 1 to `REACH`,
    else it is that of `tilted_counts` (for order 1 an ordinary coin).

    Args:
        sensitivity: (...) the norm of x's clipped gradient in each run, at most `max_sensitivity`.
        sample_rate, noise_std: q in (0, 1] and s above 0, numbers.
        order: a whole number of 1 or more.
        generator: a `torch.Generator` on the device of `sensitivity`.
        jumps: in [0, 1), of steps at the full norm.
        max_sensitivity: C, above 0.

    Returns:
        (...) int64.

    Raises:
        ValueError: an argument outside its range, such as a sensitivity above `max_sensitivity`.

    >>> proposal_counts(
    ...     torch.ones(9),
    ...     sample_rate=0.1,
    ...     noise_std=1.0,
    ...     order=1,
    ...     jumps=0.5,
    ...     generator=torch.Generator().manual_seed(0),
    ... ).tolist()
    [...]
    """
    log_proposal = _log_proposal(sensitivity, sample_rate, noise_std, order, jumps, max_sensitivity)
    _checks.generator("generator", generator)
    below = torch.exp(log_proposal).cumsum(-1)
    draw = torch.rand(
        below.shape[:-1], generator=generator, dtype=torch.float64, device=below.device
    )
    return ((draw * below[..., -1])[..., None] >= below[..., :-1]).sum(-1)


def proposal_log_density(
    moved: torch.Tensor,
    gradient: torch.Tensor,
    *,
    sample_rate: float,
    noise_std: float,
    order: float,
    jumps: float = 0.0,
    max_sensitivity: float = 1.0,
) -> torch.Tensor:
    r"""What a step adds to G, the log density of that proposal over training with x ("remove").

    .. math:: \ln \sum_k \pi_k(\Delta)\, e^{k\langle z, g\rangle/s^2 - k^2\Delta^2/2s^2} - \ln r

    Without jumps this is :math:`(a-1) \ln r - \ln A_a(\Delta)`. For "add", where runs are tilted by
    `tilted_noise`, G is :math:`(a-1) S - \sum_t \ln \bar A_a(\Delta_t)`, from `log_mass`.

    Args:
        moved: (..., parameters) z, the noisy sum less that of the *other* points' clipped
            gradients.
        gradient: (..., parameters) g, x's clipped gradient at the state in which the step began.
        sample_rate, noise_std: q in (0, 1] and s above 0, numbers.
        order: a whole number of 1 or more.
        jumps: in [0, 1), of steps at the full norm.
        max_sensitivity: C, above 0.

    Returns:
        (...) float64.

    Raises:
        ValueError: an argument outside its range, a gradient longer than `max_sensitivity`, or
            `moved` and `gradient` with different numbers of parameters.

    >>> proposal_log_density([[2.0]], [[1.0]], sample_rate=0.1, noise_std=1.0, order=3)
    tensor([0.5341], dtype=torch.float64)
    """
    along, size = _along(moved, gradient, noise_std)
    log_proposal = _log_proposal(
        size * noise_std, sample_rate, noise_std, order, jumps, max_sensitivity
    )
    k = torch.arange(log_proposal.shape[-1], dtype=torch.float64, device=along.device)
    shifted = k * along[..., None] - k**2 * size[..., None] ** 2 / 2
    return torch.logsumexp(log_proposal + shifted, -1) - _log_ratio(along, size, sample_rate)


def _along(moved, gradient, noise_std):
    """<z, g> / s^2 and |g| / s, float64."""
    noise_std = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    moved, gradient = (torch.as_tensor(v, dtype=torch.float64) for v in (moved, gradient))
    if not moved.ndim or moved.shape[-1] != gradient.shape[-1]:
        raise ValueError(
            "moved and gradient must have the same number of parameters, got shapes "
            f"{tuple(moved.shape)} and {tuple(gradient.shape)}"
        )
    return (moved * gradient).sum(-1) / noise_std**2, gradient.norm(dim=-1) / noise_std


def _log_ratio(along, size, sample_rate):
    """ln r of a step."""
    q = torch.tensor(
        _checks.number("sample_rate", sample_rate, 0, 1, closed="right"),
        dtype=torch.float64,
        device=along.device,
    )
    return torch.logaddexp(torch.log1p(-q), torch.log(q) + along - size**2 / 2)


def _log_proposal(sensitivity, sample_rate, noise_std, order, jumps, max_sensitivity):
    """ln of probabilities of k = 0, 1, ..., the larger of order and `REACH`: (..., 1 + that)."""
    order = _checks.whole_number("order", order, 1)
    jumps = _checks.number("jumps", jumps, 0, 1, closed="left")
    max_sensitivity = _checks.number(
        "max_sensitivity", max_sensitivity, 0, math.inf, closed="neither"
    )
    q = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise_std = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    _checks.in_interval("sensitivity", sensitivity, 0, max_sensitivity * (1 + 1e-6))
    size = torch.as_tensor(sensitivity, dtype=torch.float64)
    k = torch.arange(order + 1, dtype=torch.float64, device=size.device)
    log_choose = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
    unsampled = torch.where(k == order, 0.0, (order - k) * (math.log1p(-q) if q < 1 else -math.inf))
    gain = (k * k - k) / 2 * ((size / noise_std) ** 2)[..., None]
    logs = torch.log_softmax(log_choose + unsampled + k * math.log(q) + gain, -1)
    if not jumps:
        return logs
    chance = (jumps * (size / max_sensitivity).clamp(max=1) ** 2)[..., None]
    logs = F.pad(logs + torch.log1p(-chance), (0, max(0, REACH - order)), value=-math.inf)
    k = torch.arange(logs.shape[-1], device=size.device)
    uniform = ((k >= 1) & (k <= REACH)).double() / REACH
    return torch.logaddexp(logs, torch.log(chance) + torch.log(uniform))
