"""Rényi divergences of n examples, added up step by step without rounding of norms.

A norm is two weights on the nodes of a table (`dpcompanion.accounting.rdp_interpolation`). Norms
wait until they are many; then they become a histogram for each example, times the table. As long as
they are few, an account is cheaper made of those that wait.

>>> sums = Divergences(2, sample_rate=0.01, noise_multiplier=1.0, device="cpu")
>>> sums.add(None, torch.tensor([1.0, 0.4], dtype=torch.float64), torch.tensor([1000, 1000]))
>>> sums.epsilon(1e-5)
tensor([2.1014, 0.5203], dtype=torch.float64)
"""

import torch

from dpcompanion.accounting import inclusion_bound, rdp_to_epsilon
from dpcompanion.accounting.conversions import least_epsilon
from dpcompanion.accounting.rdp_interpolation import (
    NODES,
    interpolate,
    interpolation_table,
    weights,
)
from dpcompanion.accounting.runs import orders_for

WAITING = 200_000_000  # bytes of norms that may wait before they are added up
_FEW = 16  # waiting norms of an example that are cheaper added up again than by a histogram
ROWS = 8192  # examples that are worked on at a time


class Divergences:
    """RDP of n examples at each order that chords can serve.

    Attributes:
        orders, table: the orders, (K,), and their divergences at the nodes, (NODES + 1, K).
        summed: (n, K), made when the waiting norms are first added up; None before.
        waiting, held: what waits, (examples or None, shares, steps) each, and its bytes.
    """

    def __init__(self, n, *, sample_rate, noise_multiplier, device):
        self.n, self.device = n, device
        orders = orders_for(NODES * noise_multiplier)
        # Whole orders are closed sums; at so little noise other integrals take minutes, or fail.
        whole = 1 if noise_multiplier < inclusion_bound.LITTLE_NOISE else 64
        orders = tuple(
            sorted({order if order < whole else max(2.0, float(round(order))) for order in orders})
        )
        self.orders, self.table = (
            part.to(self.device)
            for part in interpolation_table(sample_rate, noise_multiplier, orders)
        )
        self.summed = None
        self.waiting, self.held = [], 0

    def add(self, examples, shares, steps):
        """Of `examples` (None: of all) these shares of the clip norm, for so many steps each."""
        self.waiting.append((examples, shares, steps))
        self.held += sum(
            part.untyped_storage().nbytes() for part in self.waiting[-1] if part is not None
        )
        if self.held > WAITING:
            self.total()

    def load(self, summed):
        """Go on from these sums, (n, K), which are copied."""
        self.summed, self.waiting, self.held = summed.to(self.device, copy=True), [], 0

    def epsilon(self, delta):
        """Epsilon of each example, (n,)."""
        result = torch.empty(self.n, dtype=torch.float64, device=self.device)
        if (
            self.summed is not None
            or len(self.waiting) > _FEW
            or any(part[0] is not None for part in self.waiting)
        ):
            self.total()
        for start in range(0, self.n, ROWS):
            block = slice(start, start + ROWS)
            if self.summed is not None:
                result[block] = rdp_to_epsilon(self.summed[block], self.orders, delta)[0]
            else:
                # So few norms that an account is cheaper made again than kept.
                nothing = torch.zeros(
                    len(result[block]), 1, dtype=torch.float64, device=self.device
                )
                waiting = [(shares[block], steps[block, None]) for _, shares, steps in self.waiting]
                result[block] = least_epsilon(
                    lambda rows, columns, nothing=nothing, waiting=waiting: sum(
                        (
                            interpolate(shares[rows], self.table[:, columns]) * steps[rows]
                            for shares, steps in waiting
                        ),
                        start=nothing[rows].expand(-1, len(columns)),
                    ),
                    len(nothing),
                    self.orders,
                    delta,
                )
        return result

    def total(self):
        """The sums, (n, K), with the waiting norms added: a histogram of weights on the nodes,
        times the table.
        """
        if self.summed is None:
            self.summed = torch.zeros(
                self.n, len(self.orders), dtype=torch.float64, device=self.device
            )
        waiting, self.waiting, self.held = self.waiting, [], 0
        of_all = [part for part in waiting if part[0] is None]
        some = [
            torch.cat(column) for column in zip(*(part for part in waiting if part[0] is not None))
        ]
        if some:
            examples, order = some[0].sort()
            some = [column[order] for column in some[1:]]
        for start in range(0, self.n if waiting else 0, ROWS // 4):
            stop = min(start + ROWS // 4, self.n)
            histogram = torch.zeros(
                (stop - start) * (NODES + 1), dtype=torch.float64, device=self.device
            )

            def add(rows, shares, steps, histogram=histogram):
                node, upper = weights(shares)
                histogram.scatter_add_(0, rows * (NODES + 1) + node, steps * (1 - upper))
                histogram.scatter_add_(0, rows * (NODES + 1) + node + 1, steps * upper)

            for _, shares, steps in of_all:
                add(
                    torch.arange(stop - start, device=self.device),
                    shares[start:stop],
                    steps[start:stop],
                )
            if some:
                first, last = torch.searchsorted(
                    examples, torch.tensor([start, stop], device=self.device)
                ).tolist()
                add(examples[first:last] - start, *(column[first:last] for column in some))
            self.summed[start:stop] += histogram.view(stop - start, -1) @ self.table
        return self.summed
