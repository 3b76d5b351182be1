"""One step of any update rule, by comparing batches of both data sets (theorem 3.6)."""

import math

import torch

from dpcompanion import _checks
from dpcompanion.accounting.loss import DIRECTIONS
from dpcompanion.per_instance.confidence import log_mean_bound

_CHUNK = 1 << 18  # numbers in one temporary tensor


def update_divergence(
    updates: torch.Tensor,
    updates_with: torch.Tensor,
    *,
    noise_std: float,
    order: float,
    direction: str = "both",
    tuples: int = 20,
    generator: torch.Generator | None = None,
    max_distance: float | None = None,
    confidence: float | None = None,
) -> float:
    r"""Theorem 3.6: one step of any update rule, by comparing batches of both data sets.

    .. math:: D_\alpha(M(X') \| M(X)) \le \frac{1}{\alpha-1} E_{B \sim X} \ln E_{B_1 \dots B_\alpha
        \sim X'} \exp\Big(\frac{1}{s^2} \sum_{i<j} \langle U(B_i) - U(B), U(B_j) - U(B)\rangle\Big)

    for "remove"; "add" swaps X and X'. This is the paper's :math:`-\Delta_{U,\alpha}/2s^2`, written
    so that it shows that all that matters are inner products: one pool of updates of each data set
    and their Gram matrix serve every tuple.

    Without a confidence the result is an *estimate*, as in the paper: the logarithm of a Monte
    Carlo mean is low on average. With one, Jensen's inequality moves the logarithm outside, and
    disjoint tuples of the pool are independent draws: an upper confidence bound. Since one tuple
    may outweigh all others by far, it is mostly the trivial bound :math:`\alpha R^2 / 2s^2`, R
    being `max_distance`; never less than what can be proved.

    The bound does not vanish for X = X': use `coupled_divergence`.

    Many arguments, since the step, the estimate and its confidence are all given.

    Args:
        updates, updates_with: (pool, parameters) updates of independent batches of X and of X'
            (with x); a tuple takes different entries of a pool, so that a pool needs `order`
            entries or more.
        noise_std: s, above 0, in the unit of the updates.
        order: a whole number of 2 or more.
        direction: "remove", "add", or "both" for the larger.
        tuples: sampled for each B. The paper compares 20 B with 20 tuples.
        generator: for the tuples; by default one with seed 0.
        max_distance: a bound on the distance between any two updates; needed with a confidence.
        confidence: in (0, 1).

    Returns:
        A float, nats.

    Raises:
        ValueError: pools of other shapes, or too small for an estimate.

    >>> generator = torch.Generator().manual_seed(1)
    >>> updates = 0.02 * torch.randn(80, 5, generator=generator, dtype=torch.float64)
    >>> estimate = update_divergence(updates, updates + 0.01, noise_std=0.1, order=8)
    """
    order = _checks.whole_number("order", order, 2)
    noise = _checks.number("noise_std", noise_std, 0, math.inf, closed="neither")
    tuples = _checks.whole_number("tuples", tuples, 1)
    _checks.one_of("direction", direction, ("both", *DIRECTIONS))
    pools = [torch.as_tensor(pool, dtype=torch.float64) for pool in (updates, updates_with)]
    for name, pool in zip(("updates", "updates_with"), pools):
        if pool.ndim != 2 or pool.shape[1] != pools[0].shape[1] or len(pool) == 0:
            raise ValueError(
                f"{name} must be (pool, parameters), as many parameters in both, got "
                f"{tuple(pool.shape)}"
            )
        _checks.in_interval(name, pool, -math.inf, math.inf, closed="neither")
    if confidence is not None:
        _checks.number("confidence", confidence, 0, 1, closed="neither")
        if max_distance is None:
            raise ValueError(
                "max_distance, a bound on the distance between two updates, must be given with a "
                "confidence"
            )
        _checks.number("max_distance", max_distance, 0, math.inf, closed="left")
    stacked = torch.cat(pools)
    stacked = stacked - stacked.mean(0)  # distances stay, and the products below lose fewer digits
    gram = stacked @ stacked.T
    if generator is None:
        generator = torch.Generator(device=gram.device).manual_seed(0)
    first, second = slice(0, len(pools[0])), slice(len(pools[0]), None)
    sides = {"remove": (first, second), "add": (second, first)}
    chosen = DIRECTIONS if direction == "both" else (direction,)
    results = []
    for one in chosen:
        alone, tupled = sides[one]
        blocks = gram[alone, alone].diagonal(), gram[alone, tupled], gram[tupled, tupled]
        own, cross, inner = (block / noise**2 for block in blocks)
        if confidence is None or max_distance is None:
            results.append(_tuple_estimate(own, cross, inner, order, tuples, generator))
        else:
            each = 1 - (1 - confidence) / len(chosen)
            results.append(_tuple_bound(own, cross, inner, order, max_distance / noise, each))
    return float(torch.stack(results).max())


def _tuple_exponents(own, cross, inner, chosen):
    """Sums over pairs of <u_i - v, u_j - v>, (m, tuples).

    own = |v|^2 (m,), cross = <v, u> (m, pool), inner = <u, u> (pool, pool); chosen (m, tuples,
    order) are places in it.
    """
    order = chosen.shape[-1]
    projections = torch.gather(cross[:, None, :].expand(-1, chosen.shape[1], -1), 2, chosen)
    pairs = inner[chosen[..., :, None], chosen[..., None, :]]
    # |sum of w|^2 - sum of |w|^2 with w = u - v; the diagonal of the pairs drops out of both.
    off_diagonal = pairs.sum((-1, -2)) - pairs.diagonal(dim1=-1, dim2=-2).sum(-1)
    return (
        off_diagonal - 2 * (order - 1) * projections.sum(-1) + order * (order - 1) * own[:, None]
    ) / 2


def _tuple_estimate(own, cross, inner, order, tuples, generator):
    pool = len(inner)
    if pool < order:
        raise ValueError(
            f"each pool must hold {order} updates or more, one for each of a tuple, got {pool}"
        )
    total, rows = own.new_zeros(()), max(1, _CHUNK // (tuples * max(pool, order * order)))
    for part in torch.arange(len(own), device=own.device).split(rows):
        keys = torch.rand(len(part), tuples, pool, generator=generator, device=own.device)
        exponents = _tuple_exponents(own[part], cross[part], inner, keys.topk(order).indices)
        total = total + (torch.logsumexp(exponents, 1) - math.log(tuples)).sum()
    return (total / len(own) / (order - 1)).clamp(min=0)


def _tuple_bound(own, cross, inner, order, radius, confidence):
    """Jensen, and one disjoint tuple for each v."""
    if float((own[:, None] - 2 * cross + inner.diagonal()).max()) > radius**2 * (1 + 1e-6):
        raise ValueError(
            "max_distance must bound the distance between any two updates, but two of the pools "
            f"are further apart than that, {radius:g} times the noise"
        )
    count = min(len(own), len(inner) // order)
    trivial = own.new_tensor(order * (order - 1) / 2 * radius**2)
    chosen = torch.arange(count * order, device=own.device).view(count, 1, order)
    exponents = (
        _tuple_exponents(own[:count], cross[:count], inner, chosen).flatten().clamp(max=trivial)
    )
    return log_mean_bound(exponents, trivial, confidence=confidence) / (order - 1)
