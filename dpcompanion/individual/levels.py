"""The levels to which an account rounds norms up: a grid, or the distinct norms as long as there
are few of them.
"""

import math

import torch

#: So many distinct norms are kept as they are; more are rounded up to a grid of as many levels.
DISTINCT = 2048

# So many counts are kept, whatever the number of examples: of above half a million fewer levels.
_COUNTS, _LEAST = 2**30, 64


def even_levels(rounding):
    """The levels {r, 2r, ..., 1} in units of the clip norm.

    >>> even_levels(0.4)
    tensor([0.4000, 0.8000, 1.0000], dtype=torch.float64)
    """
    count = math.ceil(1 / rounding - 1e-9)
    levels = torch.clamp(rounding * torch.arange(1, count + 1, dtype=torch.float64), max=1.0)
    levels[-1] = 1.0
    return levels


def finest_levels(n=1):
    """The levels of n examples with many norms, in (0, 1] and closer to 0 the closer: the squares
    of even ones.

    `DISTINCT` for half a million examples and fewer, less than 0.001 apart.
    """
    return even_levels(1 / _most(n)) ** 2


def _most(n):
    """The most levels of n examples: what keeps counts in about 2 GB, but not hardly any."""
    return min(DISTINCT, max(_COUNTS // n, _LEAST))


def with_shares(levels, counts, shares):
    """Levels and counts (n, levels) with room for these shares: their own levels, or the finest
    ones for too many.
    """
    wanted = _with(levels, shares, len(counts))
    if wanted is levels:
        return levels, counts
    moved = counts.new_zeros(len(counts), len(wanted))
    return wanted, moved.index_add_(1, torch.searchsorted(wanted, levels), counts)


def _with(levels, shares, n):
    missing = shares[shares > 0].unique()
    missing = missing[~torch.isin(missing, levels)]
    if not len(missing) or _settled(levels, n):
        return levels
    wanted = torch.cat([levels, missing]).sort().values
    return wanted if len(wanted) <= _most(n) else finest_levels(n).to(levels)


def _settled(levels, n):
    return len(levels) == _most(n) and torch.equal(levels.cpu(), finest_levels(n))


def joined(levels, counts, other_levels, other_counts):
    """Two accounts of the same examples as one: levels, and counts (n, levels) wide enough."""
    n = len(counts)
    # The union of the finest levels with no others is no grid by itself.
    wanted = other_levels if _settled(other_levels, n) else _with(levels, other_levels, n)
    total = counts.new_zeros(len(counts), len(wanted))
    for own, part in ((levels, counts), (other_levels, other_counts)):
        total.index_add_(1, torch.searchsorted(wanted, own), part.to(total))
    return wanted, total
