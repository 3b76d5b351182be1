r"""Rényi divergences of any number of gradient norms, from a small table and from above.

An example whose gradient is a share s of the clip norm C costs :math:`\rho(s)`, the divergence of
the sampled Gaussian mechanism with noise multiplier :math:`\sigma/s`. At a whole order the moment
is a sum of exponentials of affine functions of :math:`x = s^2`, so :math:`\rho` is convex in x and
a chord between two nodes of a table lies above it. At a fractional order convexity is checked on
the table, at the nodes and between them, and an order that fails is left out.

With 1024 nodes the chords are less than 1e-3 above, a few times more at the phase transition of a
large order.

>>> orders, table = interpolation_table(0.01, 1.0, (2, 8.5))
>>> interpolate(torch.tensor([0.0, 0.12345, 1.0], dtype=torch.float64), table)[:, 0]
tensor([0.0000e+00, 1.5357e-06, 1.7181e-04], dtype=torch.float64)
"""

import functools

import torch

from dpcompanion.accounting.rdp import rdp_sampled_gaussian

#: Chords of a table, evenly spaced in s.
NODES = 1024

_NOTHING = 1e30  # an upper bound on any divergence, finite so that none of it is nothing


def rdp_of_shares(shares, orders, *, sample_rate, noise_multiplier):
    """RDP of a step with gradients of these shares (above 0) of the clip norm, (shares, orders).

    Orders beyond 1024 serve examples that cost next to nothing. At a share where such an order is
    expensive to compute it is never the best one, and a bound that says nothing stands in for it.
    """
    noise = noise_multiplier / shares
    usual = [order for order in orders if order <= 1024]
    table = [rdp_sampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise, orders=usual)]
    for order in orders[len(usual) :]:
        column = torch.full_like(noise, _NOTHING)
        cheap = order <= 32 * noise
        column[cheap] = rdp_sampled_gaussian(
            sample_rate=sample_rate, noise_multiplier=noise[cheap], orders=[order]
        )[:, 0]
        table.append(column[:, None])
    return torch.cat(table, dim=1)


@functools.lru_cache(maxsize=8)
def interpolation_table(sample_rate, noise_multiplier, orders):
    """The orders (a tuple, ascending) that can be served, (K,), and their table at the nodes,
    (NODES + 1, K).

    The table is shared between calls: do not write to it.
    """
    nodes = torch.linspace(0, 1, 2 * NODES + 1, dtype=torch.float64)
    table = torch.zeros(len(nodes), len(orders), dtype=torch.float64)
    table[1:] = rdp_of_shares(
        nodes[1:], orders, sample_rate=sample_rate, noise_multiplier=noise_multiplier
    )
    slopes = table.diff(dim=0) / (nodes**2).diff()[:, None]
    orders = torch.tensor(orders, dtype=torch.float64)
    keep = (slopes.diff(dim=0) >= -1e-9 * slopes[1:].abs()).all(dim=0) | (orders == orders.round())
    # The hair covers what rounding errors do to a chord, and to a sum of a great many.
    return orders[keep], table[::2, keep] * (1 + 1e-9)


def weights(shares):
    """(node, weight of the next node) of each share in [0, 1]: its chord's two ends."""
    node = (shares * NODES).long().clamp(max=NODES - 1)
    # Not of whole numbers, whose quotient has the digits of the default dtype only.
    left, right = ((end.double() / NODES) ** 2 for end in (node, node + 1))
    return node, ((shares**2 - left) / (right - left)).clamp(0, 1)


def interpolate(shares, table):
    """The chords' values at shares (n,) in [0, 1]: (n, K), never below the divergence."""
    node, upper = weights(shares)
    return table[node] * (1 - upper)[:, None] + table[node + 1] * upper[:, None]
