r"""The moment of "add": :math:`\bar A = E[r^{1-\alpha}]` of a step's density ratio, integrated.

`dpcompanion.accounting.rdp` has the moment A of "remove", which has a sum; this one has none at any
order.
"""

import math

import torch

from dpcompanion.accounting.rdp import log_density_ratio
from dpcompanion.accounting.search import bisect

_TAIL = 9.0  # standard deviations beyond which a Gaussian tail is below float64's resolution
_CHUNK = 1 << 18  # numbers in one temporary tensor


def log_mass_add(q, sigma, order):
    """The moment's logarithm, elementwise, by the trapezoidal rule; `_add_nodes` says where.

    Where r is 1 - q but for a tail of 1e-33 (little noise), it is that to the power 1 - order.
    """
    shape, q, sigma, power = q.shape, q.reshape(-1), sigma.reshape(-1), order - 1
    result = torch.empty_like(q)
    full = q == 1
    result[full] = order * power / (2 * sigma[full] ** 2)
    rises = 0.5 / sigma + sigma * (torch.log1p(-q) - torch.log(q) - 40)  # where r leaves 1 - q
    flat = ~full & (rises > 12)
    result[flat] = -power * torch.log1p(-q[flat])
    rows = (~full & ~flat).nonzero()[:, 0]
    q, sigma = q[rows], sigma[rows]
    # E[r] = 1, so that E[r^-b] - 1 = E[r^-b - 1 + b (r - 1)], whose integrand is never negative.
    # Where sigma is small, and neither q nor b is, nothing cancels in E[r^-b - 1], and the bump of
    # r at 1 / sigma need not be integrated.
    joint = (sigma > 0.25) | (q < 1e-3) | (power < 1e-2)
    start, step, count = _add_nodes(q, sigma, power, joint)
    by_count = torch.argsort(count)
    done = 0
    while done < len(by_count):
        width = int(count[by_count[done : done + 1 + _CHUNK // int(count[by_count[done]])]].max())
        part = by_count[done : done + max(1, _CHUNK // width)]
        nodes = torch.arange(int(count[part].max()), dtype=torch.float64, device=q.device)
        t = start[part, None] + step[part, None] * nodes
        log_r = log_density_ratio(t, q[part, None], sigma[part, None])
        log_phi = -0.5 * t * t + torch.log(step[part, None] / math.sqrt(2 * math.pi))
        log_excess = torch.logsumexp(_log_inverse_excess(log_r, power) + log_phi, dim=1)
        small = torch.logaddexp(log_excess, torch.zeros_like(log_excess))
        apart = torch.logsumexp(-power * log_r + log_phi, dim=1).clamp(min=0)
        result[rows[part]] = torch.where(joint[part], small, apart)
        done += len(part)
    return result.reshape(shape)


def _add_nodes(q, sigma, power, joint):
    """First node, distance and number of nodes for integrals of r^-power phi.

    The integrand is log-concave with curvature of 1 or more around its mode, so 9 to both sides of
    the mode hold all of it. In the strip of half-width d around the real axis it grows by exp(power
    d^2 / 8 sigma^2 + d^2 / 2) at most, and it is analytic up to pi sigma: with the distances below
    the rule errs by less than 1e-14.
    """
    start = add_mode(q, sigma, power) - _TAIL
    end = torch.where(joint, 1 / sigma, 0.0) + _TAIL
    step = torch.minimum(0.5 * sigma, 0.6 / torch.sqrt(1 + power / (4 * sigma**2))).clamp(max=0.5)
    return start, step, torch.ceil((end - start) / step).long() + 1


def add_mode(q, sigma, power):
    """The t at which r(t)^-power phi(t) is largest: the root of t + power / sigma * w(t), w the
    share of q e^u in r.
    """
    log_odds = torch.log(q) - torch.log1p(-q) - 0.5 / sigma**2

    def above(t):
        return t + power / sigma * torch.sigmoid(t / sigma + log_odds) > 0

    return bisect(above, good=torch.zeros_like(sigma), bad=-power / sigma, halvings=60)


def _log_inverse_excess(log_r, power):
    """ln(r^-b - 1 + b (r - 1)), which is the log of a number that is never negative."""
    y = torch.expm1(log_r.clamp(max=300.0))
    series = 1 - (power + 2) / 3 * y * (1 - (power + 3) / 4 * y * (1 - (power + 4) / 5 * y))
    series = 0.5 * power * (power + 1) * y * y * series
    near = max(power, 1.0) * y.abs() < 0.003
    rise = (-power * log_r).clamp(max=30.0)
    direct = torch.log(torch.where(near, series, torch.expm1(rise) + power * y))
    # far out r is all there is, and its clamped value would lose the bump of little noise
    direct = torch.where(log_r > 300.0, log_r + math.log(power), direct)
    return torch.where(-power * log_r > 30.0, -power * log_r, direct)
