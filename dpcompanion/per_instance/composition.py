r"""Composition by expected divergences: theorem 3.3 of Thudi et al. 2024, and facts 3.4 and 3.5.

Training passes through states :math:`\theta_1 \dots \theta_n`, and step t has the divergence
:math:`D_\beta(t)` of order :math:`\beta`, which depends on the state before it. For every
:math:`p > 1`, with :math:`i = n - t` steps still to come,

.. math::
    D_\alpha \le \frac{1}{\alpha - 1} \sum_{t=1}^{n} \frac{(p-1)^i}{p^{i+1}}
        \ln E\Big[\big(e^{(g^i(\alpha) - 1)\, D_{g^i(\alpha)}(t)}\big)^p\Big],
    \qquad g^i(\alpha) = 1 + \Big(\frac{p}{p-1}\Big)^i (\alpha - 1),

where the expectation is over runs of the *first* argument of the divergence.

Proof: with F the inner integral of the last step, the integral of :math:`X^\alpha Y^{1-\alpha}` is
:math:`\int X_{<n}^{\alpha - 1/p}\, Y_{<n}^{1-\alpha} \cdot X_{<n}^{1/p} F`. Hoelder's inequality
with p/(p-1) and p bounds it by the same integral over one step less, of order
:math:`\frac{p}{p-1}(\alpha - \frac1p) = g(\alpha)`, to the power (p-1)/p, times
:math:`E[F^p]^{1/p}`. Repeat.

The statement prints :math:`g(\alpha) = \frac{p}{p-1}\alpha - \frac1p`, larger than the proof's: a
bound too, a looser one. Orders blow up for the *early* steps, which have many after them. With p =
2 it is theorem A.2.

>>> holder_order(8, 30, [0, 1, 9])
tensor([ 8.0000,  8.2414, 10.4975], dtype=torch.float64)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion._types import Array, Numbers
from dpcompanion.accounting import rdp_sampled_gaussian

RECURSIONS = ("proof", "statement")

_NODES = 1024  # sensitivities in the table of `compose_sensitivities`
_ORDERS = 33  # orders in it
_LARGEST_ORDER = 1024
_FINITE = 1e300  # orders below it, and one over them, have all their digits
_CHUNK = 1 << 17  # numbers in one temporary tensor
_HAIR = 1 + 1e-11  # for rounding errors


@overload
def holder_order(order: float, p: float, i: float, *, recursion: str = ...) -> float: ...
@overload
def holder_order(order: float, p: float, i: Numbers, *, recursion: str = ...) -> torch.Tensor: ...
def holder_order(
    order: float, p: float, i: Numbers, *, recursion: str = "proof"
) -> float | torch.Tensor:
    r""":math:`g_p^i(\alpha)`: the order at which theorem 3.3 asks for a step with i steps after it.

    Args:
        order: :math:`\alpha`, above 1.
        p: above 1.
        i: at least 0, a number or a tensor.
        recursion: "proof", :math:`g(\alpha) = \frac{p\alpha - 1}{p - 1}`; or "statement", the
            larger one that the theorem prints.

    Returns:
        A float of numbers, else a float64 tensor like i.

    Raises:
        ValueError: an argument outside its range, or an unknown recursion.

    >>> round(holder_order(8, 30, 9), 4), round(holder_order(8, 30, 9, recursion="statement"), 4)
    (10.4975, 10.5093)
    """
    _checks.one_of("recursion", recursion, RECURSIONS)
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    p = _checks.number("p", p, 1, math.inf, closed="neither")
    after = torch.as_tensor(
        _checks.in_interval("i", i, 0, math.inf, closed="left"), dtype=torch.float64
    )
    # the order that the recursion leaves where it is
    fixed = 1.0 if recursion == "proof" else (p - 1) / p
    return _checks.as_given(fixed + torch.exp(-after * math.log1p(-1 / p)) * (order - fixed), i)


def smallest_exponent(steps: int) -> float:
    r"""Fact 3.4: the smallest p with :math:`(p/(p-1))^n \le 2`, which is
    :math:`1/(1 - 2^{-1/n})`, rounded up: no order then exceeds twice the first.

    For :math:`g^i(\alpha) - 1 = (p/(p-1))^i (\alpha - 1)`. It is about
    :math:`1.44\,n + \frac12`; the paper's 3n does it for every n.

    >>> smallest_exponent(1), round(smallest_exponent(1000), 2)
    (2.0, 1443.2)
    """
    steps = _checks.whole_number("steps", steps, 1)
    return -1 / math.expm1(-math.log(2) / steps) * (1 + 1e-13) if steps > 1 else 2.0


def log_runs_needed(
    *, rdp: float, rdp_doubled: float, order: float, precision: float, failure: float
) -> float:
    r"""Fact 3.5: the natural logarithm of the number of runs after which Hoeffding's inequality
    vouches for a mean.

    With p = 3n the moment f of a step lies in :math:`[1, e^{3(2\alpha-1)\varepsilon'}]`. Runs
    :math:`l \ge \frac{\ln(2/J)}{2c^2} e^{6(2\alpha-1)\varepsilon' - 6(\alpha-1)\varepsilon}` bring
    their mean within :math:`c\,e^{3(\alpha-1)\varepsilon}` of E f, but for a probability J. The
    paper prints the exponent with the opposite sign.

    Args:
        rdp, rdp_doubled: :math:`\varepsilon, \varepsilon'`, the data-independent divergence of the
            whole run at orders :math:`\alpha` and :math:`2\alpha`.
        order: :math:`\alpha`, above 1.
        precision: c, above 0.
        failure: J in (0, 1).

    >>> round(
    ...     log_runs_needed(rdp=0.5, rdp_doubled=1.2, order=8, precision=0.1, failure=0.05)
    ...     / math.log(10),
    ...     1,
    ... )
    40.0
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    rdp, doubled = _checks.number("rdp", rdp, 0), _checks.number("rdp_doubled", rdp_doubled, 0)
    precision = _checks.number("precision", precision, 0, math.inf, closed="neither")
    failure = _checks.number("failure", failure, 0, 1, closed="neither")
    exponent = 6 * (2 * order - 1) * doubled - 6 * (order - 1) * rdp
    return math.log(math.log(2 / failure)) - math.log(2 * precision**2) + exponent


@overload
def compose(
    divergence: Callable[..., Sequence[float]],
    *,
    steps: int,
    order: float,
    p: float,
    recursion: str = ...,
) -> float: ...
@overload
def compose(
    divergence: Callable[..., Any],
    *,
    steps: int,
    order: float,
    p: float,
    recursion: str = ...,
    each_step: bool = ...,
) -> torch.Tensor: ...
def compose(
    divergence: Callable[..., Any],
    *,
    steps: int,
    order: float,
    p: float,
    recursion: str = "proof",
    each_step: bool = False,
) -> float | torch.Tensor:
    r"""Theorem 3.3, for divergences of any kind.

    Args:
        divergence: a function (step, order) -> (runs, ...): the divergences of a step (counted from
            1), at an order (a float), in runs of training that are independent; bounds on them, or
            the divergences themselves.
        steps: n.
        order: :math:`\alpha`, above 1.
        p: above 1; the paper takes 3n. See `smallest_exponent`. So near 1 that the order of the
            first step exceeds 1e300 it is refused.
        recursion: see `holder_order`.
        each_step: return the contributions, (steps, ...), in place of their sum.

    Returns:
        A float of lists of numbers, else (...) float64: nats. The mean over the runs stands in for
        the expectation, so this is an *estimate*, low on average, unless the divergences are the
        same in all states. `log_runs_needed` says why no confidence bound comes with it;
        `exact_composition` has one, and is smaller.

    Raises:
        ValueError: an argument outside its range, an unknown recursion, a p with which the order of
            the first step exceeds 1e300, or divergences that are negative, NaN or no list of runs.

    >>> steps, sizes = 20, torch.tensor([0.9, 1.0])
    >>> compose(lambda step, order: 0.001 * order * sizes**2, steps=steps, order=4, p=3 * steps)
    tensor(0.0825, dtype=torch.float64)
    >>> compose(
    ...     lambda step, order: [0.004, 0.004], steps=steps, order=4, p=3 * steps
    ... )  # plain composition
    0.0800...
    """
    steps = _checks.whole_number("steps", steps, 1)
    i = torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    orders = holder_order(order, p, i, recursion=recursion).tolist()
    if not orders[0] <= _FINITE:
        raise ValueError(f"p must keep every order below {_FINITE:g}, got {p:g} for {steps} steps")
    shares = torch.exp(i * math.log1p(-1 / p)) / p / (order - 1)
    contributions, total, given = [], torch.zeros((), dtype=torch.float64), []
    for step, (at, share) in enumerate(zip(orders, shares.tolist()), start=1):
        found = divergence(step, at)
        given = (
            given or [each for each in _checks.entries(found) if not _checks.is_number(each)][:1]
        )
        found = torch.as_tensor(found, dtype=torch.float64)
        if found.ndim == 0 or bool((found < 0).any()) or bool(found.isnan().any()):
            raise ValueError(
                f"divergence must return (runs, ...) numbers of 0 or more, got {found!r} at step "
                f"{step}"
            )
        one = share * (torch.logsumexp(p * (at - 1) * found, 0) - math.log(len(found))).clamp(min=0)
        if each_step:
            contributions.append(one)
        else:
            total = total + one
    return torch.stack(contributions) if each_step else _checks.as_given(total, *given)


def compose_sensitivities(
    sensitivities: Array,
    *,
    sample_rate: float,
    noise_std: float,
    order: float,
    p: float | None = None,
    recursion: str = "proof",
    each_step: bool = False,
) -> torch.Tensor:
    r"""Theorem 3.3 for runs of DP-SGD of known sensitivities: all steps, runs and points at once.

    The same as `compose` with `step_divergence`, and never below it (mostly 1e-4 above): moments
    are read off a table of sensitivities and orders, from above. :math:`A(\Delta)` is convex in
    :math:`\Delta^2` (its second derivative is the expectation of
    :math:`r^{\alpha-4} w^2 (2r^2 + 4(\alpha-2)rw + (\alpha-2)(\alpha-3)w^2) \ge 0` up to a factor,
    w being q times the likelihood ratio, at most r), and its logarithm is convex in the order
    (Lyapunov), so that chords lie above.

    Args:
        sensitivities: (steps, runs, ...) norms of the clipped gradient of each point, at least 0.
        sample_rate, noise_std: q in (0, 1] and s above 0, numbers.
        order: above 1.
        p: above 1, by default 3 x steps. The largest order, that of the first step, may not exceed
            1024.
        recursion: "proof" or "statement", the order that the theorem's proof or its text gives
            (`holder_order`).
        each_step: return the contributions, (steps, ...), in place of their sum.

    Returns:
        (...) float64, or (steps, ...) contributions: an *estimate*, see `compose`.

    Raises:
        ValueError: an argument outside its range, an unknown recursion, sensitivities of another
            shape or without an entry, or a p with which the order of the first step exceeds 1024.

    >>> sensitivities = torch.linspace(1.0, 0.2, 100)[:, None, None].expand(100, 10, 3)
    >>> compose_sensitivities(sensitivities, sample_rate=0.05, noise_std=1.0, order=4)
    tensor([0.4544, 0.4544, 0.4544], dtype=torch.float64)
    """
    order = _checks.number("order", order, 1, math.inf, closed="neither")
    rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    # of lists PyTorch would keep the digits of its default dtype
    if not isinstance(sensitivities, torch.Tensor):
        sensitivities = np.asarray(sensitivities)
    sensitivities = _checks.tensor("sensitivities", sensitivities)
    if sensitivities.ndim < 2 or 0 in sensitivities.shape:
        raise ValueError(
            f"sensitivities must be (steps, runs, ...), got shape {tuple(sensitivities.shape)}"
        )
    low, high = torch.stack(sensitivities.aminmax()).tolist()  # which waits for a GPU, once
    _checks.in_interval("sensitivities", [low, high], 0, math.inf, closed="left")
    steps, runs, *rest = sensitivities.shape
    p = 3.0 * steps if p is None else p
    device = sensitivities.device
    i = torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    orders = holder_order(order, p, i, recursion=recursion)
    if float(orders[0]) > _LARGEST_ORDER:
        raise ValueError(
            f"p must keep every order at or below {_LARGEST_ORDER}, got {p:g}, with which the "
            f"first step has the order {float(orders[0]):.3g}"
        )
    shares, there = (
        to_device(t, device) for t in (torch.exp(i * math.log1p(-1 / p)) / p / (order - 1), orders)
    )
    result = torch.zeros((steps if each_step else 1, *rest), dtype=torch.float64, device=device)
    if high == 0:
        return result if each_step else result[0]
    table = _MomentTable(rate, noise, order, float(orders[0]), high, device)
    block = max(1, _CHUNK // max(1, sensitivities[0].numel()))
    for start in range(0, steps, block):
        part = slice(start, start + block)
        log_moments = table(sensitivities[part], there[part])
        share = shares[part].view(-1, *(1,) * len(rest))
        found = share * (torch.logsumexp(p * log_moments, 1) - math.log(runs))
        if each_step:
            result[part] = found
        else:
            result[0] += found.sum(0)
    return result if each_step else result[0]


class _MomentTable:
    """Upper bounds on ln A(sensitivity) at orders between two ends: chords between nodes."""

    def __init__(self, rate, noise, least, greatest, largest, device):
        self.orders = torch.linspace(
            least, max(greatest, least * (1 + 1e-9)), _ORDERS, dtype=torch.float64
        )
        self.scale = _NODES / largest
        nodes = largest * torch.arange(1, _NODES + 1, dtype=torch.float64) / _NODES
        logs = torch.zeros(_NODES + 1, _ORDERS, dtype=torch.float64)
        rdp = rdp_sampled_gaussian(
            sample_rate=rate, noise_multiplier=noise / nodes, orders=self.orders
        )
        logs[1:] = rdp * (self.orders - 1)
        # without infinities, of which a chord would be NaN; p times the largest float is infinite
        logs = (logs * _HAIR).clamp(max=torch.finfo(logs.dtype).max).T.contiguous()
        rise = logs.diff(dim=1)
        # A chord of A from a to b is a + x (b - a), whose logarithm is at most ln a + x (b / a -
        # 1); where the cell is too steep for that, the upper end serves as the whole of it.
        steep = rise > 1
        # Two rows for each order: what a cell starts with, and by how much it rises.
        self.base = to_device(torch.where(steep, logs[:, 1:], logs[:, :-1]).reshape(-1), device)
        self.rise = to_device(
            torch.where(steep, 0.0, torch.expm1(rise.clamp(max=1.0))).reshape(-1), device
        )

    def __call__(self, sensitivities, orders):
        """(steps, ...) sensitivities, (steps,) orders."""
        at = (orders - self.orders[0]) / float(self.orders[1] - self.orders[0])
        row = at.long().clamp(0, _ORDERS - 2)
        ones = (1,) * (sensitivities.ndim - 1)
        upper, row = (at - row).clamp(0, 1).view(-1, *ones), row.view(-1, *ones)
        x = sensitivities.double() * self.scale
        node = x.long().clamp_(max=_NODES - 1)
        share = ((x * x - node * node) / (2 * node + 1)).clamp_(0, 1)
        place = row * _NODES + node
        first = torch.addcmul(self.base[place], self.rise[place], share)
        place += _NODES
        second = torch.addcmul(self.base[place], self.rise[place], share)
        return torch.lerp(first, second, upper)
