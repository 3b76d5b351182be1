"""Noise multipliers and sample rates that use up budgets, many at once: searches side by side."""

import math
from collections.abc import Callable

import torch

from dpcompanion import _checks, accounting
from dpcompanion.accounting import inclusion_bound, pld
from dpcompanion.accounting.loss import LARGEST_NOISE
from dpcompanion.accounting.runs import orders_for
from dpcompanion.accounting.search import (
    LEAST_NOISE_SEARCHED,
    LEAST_RATE_SEARCHED,
    MOST_NOISE_SEARCHED,
    bisect,
    crossings,
)
from dpcompanion.idp.groups import between, interpolate, nodes_of, safe_interpolation

HAIR = 1e-9  # by which epsilons by RDP may be off, relatively, for rounding errors
_PRECISION = 2e-5  # of the logarithm of a parameter
# by which the PLD epsilons of nearby parameters may differ, relatively, for their grids
_JITTER = 1e-4
_COARSE, _ROUNDS = 10.0, 6  # a search by PLD is on grids so much wider, and is corrected so often
_EXTREMES = {
    "noises": f"a noise multiplier of {MOST_NOISE_SEARCHED:g}",
    "rates": f"a sample rate of {LEAST_RATE_SEARCHED:g}",
}

#: (y, which of the searched) -> (rates, noise multipliers).
_Pair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Search:
    """What all groups share: delta, steps and accountant. Finds what uses up budgets, many at once.

    Searches go along a coordinate y that makes a group safer as it grows: the logarithm of the
    noise, or minus that of the rate. Budgets are ascending, (D,).

    By PLD they go along coarse grids, corrected by how far those are from fine ones where the
    search ended; what they give was looked at on the fine ones, and meets its budget. With rough=r,
    to begin with, nobody looks, and epsilons on coarse grids may be a share r below their budgets.
    """

    def __init__(self, target_delta, steps, accountant):
        self.accountant = _checks.one_of("accountant", accountant, accounting.ACCOUNTANTS)
        self.target_delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
        self.steps = _checks.whole_number("steps", steps, 1)
        self._near = None  # the range of orders that decided last
        self._seen: dict[tuple[float, ...], float] = {}
        # Of each kind of search and number of nodes: by how much fine grids are above coarse ones
        # where the last one ended, and how fast epsilons fall there, both (nodes,), in logarithms.
        self._learnt: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # So many different budgets are searched one by one; among more, the spacing of ln eps; how
        # far the mean rate may be above the wanted one.
        rdp = self.accountant == "rdp"
        self.searched, self.spacing, self.slack = (256, 0.01, 6e-5) if rdp else (24, 0.05, 3e-4)

    def noises(self, budgets, rates, *, rough=None):
        """(D,) noise multipliers that the budgets need at the rates, (D,)."""
        nodes, rates_at = self._at_nodes(budgets, rates)

        def search(start, accountant):
            return self._search(
                nodes,
                lambda y, index: (rates_at[index], y.exp()),
                start,
                math.log(LEAST_NOISE_SEARCHED),
                math.log(MOST_NOISE_SEARCHED),
                "noises",
                accountant,
                rough,
            )

        found = search(torch.zeros_like(nodes), "rdp")
        if self.accountant == "pld":
            found = search(found - 0.07, "pld")
        return self._at_budgets(
            budgets, nodes, found, lambda y, index: (rates[index], y.exp()), rough
        ).exp()

    def rates(self, budgets, noise, start, *, rough=None):
        """(D,) sample rates, at most 1, that budgets allow with one noise; start: (D,) guesses."""

        def pair(y, _):
            return (-y).exp().clamp(max=1.0), torch.full_like(y, noise)

        nodes, start = self._at_nodes(budgets, start)
        found = self._search(
            nodes,
            pair,
            -start.log(),
            0.0,
            -math.log(LEAST_RATE_SEARCHED),
            "rates",
            self.accountant,
            rough,
        )
        return pair(self._at_budgets(budgets, nodes, found, pair, rough), None)[0]

    def compare_grids(self, budgets, noise, rates):
        """Learn how far fine grids are above coarse ones at all budgets' rates, for next time."""
        bias, _ = self._learnt_of("rates", budgets)
        pairs = rates, torch.full_like(rates, noise), budgets
        bias.copy_(self._excess(*pairs, "pld") - self._excess(*pairs, "pld", coarse=_COARSE))

    def _learnt_of(self, kind, nodes):
        zeros = torch.zeros_like(nodes)
        return self._learnt.setdefault((kind, len(nodes)), (zeros, zeros + 1.5))

    def epsilon(self, rate, noise):
        return accounting.compute_epsilon(
            sample_rate=rate,
            noise_multiplier=noise,
            steps=self.steps,
            delta=self.target_delta,
            accountant=self.accountant,
        )

    def _at_nodes(self, budgets, values):
        nodes = nodes_of(budgets, self.searched, self.spacing)
        return (nodes, values) if nodes is budgets else (nodes, interpolate(nodes, budgets, values))

    def _search(self, nodes, pair: _Pair, start, low, high, kind, accountant, rough):
        """The least safe y of each node; `pair(y, index)` gives rates and noise multipliers."""

        def crossed(excess, start, **options):
            return crossings(
                excess, start=start, low=low, high=high, **{"precision": _PRECISION, **options}
            )

        if accountant == "rdp":
            found = crossed(
                lambda y, index: self._excess(*pair(y, index), nodes[index], "rdp"), start
            )
        else:
            found = self._corrected(nodes, pair, start, low, high, crossed, rough, kind)
        if bool(found.isnan().any()):
            missed, extreme = float(nodes[found.isnan()][0]), _EXTREMES[kind]
            raise ValueError(
                f"target_epsilons must be larger, got {missed:g}: not even {extreme} meets it"
            )
        return found

    def _corrected(self, nodes, pair: _Pair, start, low, high, crossed, rough, kind):
        """A search by PLD on coarse grids, whose end meets the budgets on fine ones: within 1e-4 of
        them, or 1e-6.
        """
        bias, slopes = self._learnt_of(kind, nodes)
        room = (1e-4 if rough is None else max(rough, 1e-4)) + 1e-6 / nodes
        precision = _PRECISION + (0 if rough is None else 1e-4) + 1e-7 / nodes

        def coarse(y, index):
            return self._excess(*pair(y, index), nodes[index], "pld", coarse=_COARSE)

        def fine(y, index):
            return self._excess(*pair(y, index), nodes[index], "pld")

        found, open_ = start.clamp(low, high), torch.arange(len(nodes))
        if kind == "rates":
            free = self._free(float(pair(start, open_)[1][0]), low, high)
            held = self._held(free, found, coarse, low)
            found, open_ = torch.where(held, free, found), open_[~held]
        for _ in range(_ROUNDS if rough is None else 1):
            known = slopes[open_]
            ends = crossed(
                lambda y, index, open_=open_: coarse(y, open_[index]) + bias[open_[index]],
                found[open_],
                precision=precision[open_],
                enough=room[open_],
                slopes=known,
            )
            slopes[open_] = known
            if bool(ends.isnan().any()):
                break
            found = found.index_copy(0, open_, ends)
            if rough is not None:
                return found
            off = fine(ends, open_)
            bias[open_] = off - coarse(ends, open_)
            wrong = (off > 0) | (off < -room[open_]) & (ends > low)
            open_ = open_[wrong]
            if not len(open_):
                return found
        return crossed(fine, found)

    def _free(self, noise, low, high):
        """Minus the logarithm of the largest rate at which delta covers a run's total variation:
        epsilon is 0.
        """

        def covered(y):
            bounds = [pld.total_variation(math.exp(-float(v)), noise, self.steps) for v in y]
            return torch.tensor(bounds, dtype=torch.float64) <= self.target_delta

        ends = torch.tensor([high, low], dtype=torch.float64)
        at_high, at_low = covered(ends).tolist()
        if at_low or not at_high:
            return low if at_low else high
        return float(bisect(covered, good=ends[:1], bad=ends[1:], halvings=50)[0])

    def _held(self, free, start, coarse, low):
        """Which budgets lie in epsilon's jump there, from 0 to above them, (nodes,) booleans."""
        every = torch.arange(len(start))
        held = torch.zeros(len(start), dtype=torch.bool)
        if free - _PRECISION <= low:
            return held
        value = coarse(start, every)
        far = every[(value.abs() > 3) & ((value > 0) | (start > low))]
        at, above = (coarse(torch.full_like(start[far], y), far) for y in (free, free - _PRECISION))
        held[far] = (at <= 0) & (above > 0)
        return held

    def _excess(self, rates, noises, budgets, accountant, *, coarse=1.0):
        """ln of epsilon over a budget less a hair, which is kept for what nearby parameters may
        differ by, (D,).
        """
        if accountant == "rdp":
            return _log_ratio(self.rdp_epsilon(rates, noises)[0], budgets * (1 - HAIR))
        epsilons = [
            self._pld_epsilon(rate, noise, budget, coarse)
            for rate, noise, budget in zip(rates.tolist(), noises.tolist(), budgets.tolist())
        ]
        return _log_ratio(torch.tensor(epsilons, dtype=torch.float64), budgets * (1 - _JITTER))

    def _pld_epsilon(self, rate, noise, budget, coarse):
        """As `compute_epsilon` has it, near a budget, on grids that may be coarse."""
        if noise < inclusion_bound.LITTLE_NOISE or self.target_delta < 1e-60:
            return self.epsilon(rate, noise)
        looked = rate, noise, budget, coarse  # a search begins where the last one ended
        if looked not in self._seen:
            self._seen[looked] = pld.epsilon(
                sample_rate=rate,
                noise_multiplier=min(noise, LARGEST_NOISE),
                steps=self.steps,
                delta=self.target_delta,
                near=budget,
                coarse=coarse,
            )
        return self._seen[looked]

    def _at_budgets(self, budgets, nodes, found, pair: _Pair, rough):
        """The least safe y of each budget, from those of the nodes."""
        if nodes is budgets:
            return found
        y = safe_interpolation(budgets, nodes, found)
        if self.accountant == "pld":
            # A look at the middle of each stretch, where a curve strays farthest from its chord.
            middle = torch.searchsorted(budgets, torch.sqrt(nodes[1:] * nodes[:-1])).clamp(
                max=len(budgets) - 1
            )
            grids = {} if rough is None else {"coarse": _COARSE}
            above = self._excess(*pair(y[middle], middle), budgets[middle], "pld", **grids)
            return y + 2 * float(above.max().clamp(min=0))
        # Which order decides changes slowly, and any order gives a bound.
        left, share = between(budgets, nodes)
        orders = self.rdp_epsilon(
            *pair(found, torch.searchsorted(budgets, nodes).clamp(max=len(budgets) - 1))
        )[1]
        orders = orders.nan_to_num(nan=1024.0)[torch.where(share < 0.5, left, left + 1)]
        open_, step = torch.arange(len(y)), _PRECISION / 2
        while len(open_):
            rates, noises = pair(y[open_], open_)
            if step < 10 * _PRECISION:
                epsilons = self._epsilon_at(rates, noises, orders[open_])
            else:
                epsilons = self.rdp_epsilon(rates, noises)[0]
            open_ = open_[epsilons > budgets[open_] * (1 - HAIR)]
            y[open_], step = y[open_] + step, 2 * step
        return y

    def rdp_epsilon(self, rates, noises):
        """Epsilon of each pair by RDP, at `compute_epsilon`'s orders or fewer, and its order."""
        every = torch.tensor(orders_for(float(noises.max())), dtype=torch.float64)
        near = torch.ones_like(every, dtype=torch.bool)
        if self._near is not None:
            near = (every > self._near[0] / 1.7) & (every < self._near[1] * 1.7)
            near = near if bool(near.any()) else torch.ones_like(near)
        epsilon, decides = self._rdp_epsilon_at(every[near], rates, noises)
        # Epsilon has one minimum over the orders: one inside the range is it.
        least, most = (every[near][i] if not near[i] else math.nan for i in (0, -1))
        outside = (decides == least) | (decides == most) | decides.isnan() | (epsilon == 0)
        if bool(outside.any()) and not bool(near.all()):
            epsilon[outside], decides[outside] = self._rdp_epsilon_at(
                every, rates[outside], noises[outside]
            )
        if bool(decides.isfinite().all()):
            self._near = float(decides.min()), float(decides.max())
        return epsilon, decides

    def _rdp_epsilon_at(self, orders, rates, noises):
        # An order beyond 1024 is for large noise: next to little noise it would take minutes, and
        # decide nothing.
        counts = (orders <= 1024) | (orders <= 32 * noises[:, None])
        rdp = torch.full(counts.shape, math.inf, dtype=torch.float64)
        different, kinds = torch.unique(counts, dim=1, return_inverse=True)
        for kind, which in enumerate(different.T):
            columns, rows = (kinds == kind).nonzero()[:, 0], which.nonzero()[:, 0]
            if len(rows):
                rdp[rows[:, None], columns] = accounting.rdp_sampled_gaussian(
                    sample_rate=rates[rows], noise_multiplier=noises[rows], orders=orders[columns]
                )
        return accounting.rdp_to_epsilon(self.steps * rdp, orders, self.target_delta)

    def _epsilon_at(self, rates, noises, orders):
        """Epsilon of each pair by RDP at its own order."""
        epsilon = torch.empty_like(rates)
        for order in orders.unique().tolist():
            rows = (orders == order).nonzero()[:, 0]
            epsilon[rows] = self._rdp_epsilon_at(
                torch.tensor([order], dtype=torch.float64), rates[rows], noises[rows]
            )[0]
        return epsilon


def _log_ratio(epsilons, budgets):
    """ln(epsilon / budget), kept finite: an epsilon of 0 or inf only says on which side it lies."""
    return torch.log(epsilons.clamp(min=1e-300) / budgets).clamp(-50, 50)
