r"""A privacy account for every example of a DP-SGD run (Yu et al. 2022 and 2023).

The worst case charges everybody for a gradient as long as the clip norm C.  An example whose
gradients have length :math:`c < C` is hidden by the same noise as if the noise multiplier were
:math:`\sigma C / c`: that is its own cost.  `IndividualAccountant` is told the norms as training goes on and gives
every example its epsilon.

Norms are rounded UP to the grid :math:`\{r, 2r, \dots, C\}`, so the account is a bound, and a history is a
row of counts: how many steps at which level.  One table for the levels and one matrix product give
the epsilons of all examples, by RDP or by privacy loss distributions (`accounting.histories`).  Without rounding,
both are still cheap, and still bounds.  RDP at each order is convex in :math:`x = (c/C)^2`, so a chord between two
nodes of a table lies above it, and a norm adds two weights to its example's row.  Loss distributions take up to 2,048
distinct norms as they are, each as a mixture of two nodes (`accounting.levels`); where there are more, norms are
rounded up to a grid of as many, less than 0.001 C apart.

What the number is: an account along the realised trajectory ("output-specific", theorem 3.1 of Yu et al. 2023).  It is
exact along it where gradients are clipped to the recorded norms, an estimate where these are merely observed.  It
becomes a guarantee of individual DP where the norms are bounded beforehand, or a filter keeps their sum within a budget
(`filters`).  It concerns its owner; publishing it takes noise (`release`).

Whom the neighbours of a run differ in is the plan's to say (`DPSGDPlan.relation`, "zero-out" or "add-remove"); the
numbers are the same for both.  Accountant and clip norm are the plan's too, and no account exceeds what everybody has
by the same accountant for as many steps: the account of one who is charged C at each of them is that number.

By privacy loss distributions, the default, the epsilons of 60,000 examples take about ten seconds on a CPU, by RDP one;
without rounding about a minute, and three seconds for a few hundred.

Memory, with rounding: 2 bytes for each example and level up to 32,767 steps (2 GB for ten million examples at r =
0.01), 4 bytes beyond; without, by loss distributions, the same for each distinct norm or level.  Without, by RDP: at
most 200 MB of norms that wait to be added, and 8 bytes for each example and order (about 2 GB for a million) once they
were added.  Epsilons are computed in blocks of examples, so that what
comes on top does not grow with n.  Accounts of different examples have nothing to do with each other: where those
without rounding take too much, one accountant after another, each for a part of the examples, gives the same.

Norms that change for a few examples at a time are recorded for these alone, in time that does not grow with n.

>>> accountant = IndividualAccountant(3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5)
>>> accountant.record([0.5, 0.2, 0.0], steps=1000)
>>> accountant.epsilon(1e-5)
tensor([1.8282, 0.4717, 0.0000], dtype=torch.float64)
"""

import math
from typing import TYPE_CHECKING

import torch

from . import _checks
from ._devices import sent
from ._types import Array, Device, State
from .accounting import ACCOUNTANTS, compute_epsilon, rdp_to_epsilon
from .accounting.chords import NODES, between, chords, rdp_of_shares, weights
from .accounting.conversions import least_epsilon
from .accounting.histories import epsilon_of_histories
from .accounting.levels import even_levels, joined, with_shares
from .accounting.runs import orders_for

if TYPE_CHECKING:
    from .training.plan import DPSGDPlan

_WAITING = 200_000_000  # bytes of norms that may wait before they are added up
_MOST = 2**31 - 1  # steps that a count can hold
_ROWS = 8192  # examples that are worked on at a time
_NARROW = 2**15 - 1  # steps that a count of 16 bits can hold
_FEW = 16  # waiting norms of an example that are cheaper added up again than by a histogram


class IndividualAccountant:
    """Accounts for n examples; see the module's text.

    Neighbouring relation: that of the plan, add-remove or zero-out of the example. Sampler: Poisson.

    Args:
        n: number of examples.
        sample_rate: in (0, 1], the same for all.
        noise_multiplier: noise over `max_grad_norm`, above 0.
        max_grad_norm: the clip norm C, above 0; longer norms are taken as C.
        rounding: r as a share of C, in (0, 1]; None for none, so far as the accountant allows: "rdp" takes each norm as
            it is, "pld" up to 2,048 distinct ones; if more are recorded, all are rounded up, by less than 0.001 C.
        accountant: "pld", which is tight, or "rdp", which is fast.
        device: where the account is kept; norms may come from anywhere.

    Raises:
        ValueError: an argument outside its range.

    Source: Yu et al. 2023, algorithm 2 (which rounds to the nearest multiple, and so under-states half of the norms).
    """

    def __init__(
        self,
        n: int,
        *,
        sample_rate: float,
        noise_multiplier: float,
        max_grad_norm: float,
        rounding: float | None = 0.01,
        accountant: str = "pld",
        device: Device = None,
    ):
        self.n = _checks.whole_number("n", n, 1)
        self.sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        self.noise_multiplier = _checks.number("noise_multiplier", noise_multiplier, 0, math.inf, closed="neither")
        self.max_grad_norm = _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither")
        self.accountant = _checks.one_of("accountant", accountant, ACCOUNTANTS)
        self.rounding = None if rounding is None else _checks.number("rounding", rounding, 0, 1, closed="right")
        self.device = torch.device("cpu" if device is None else device)
        # The most steps that were recorded of anybody; None where the device has to be asked.
        self._most = 0
        # Whether something that was recorded cannot be, where the device has to be asked; see `_refuse`.
        self._wrong = None
        self._steps = torch.zeros(self.n, dtype=torch.int64, device=self.device)  # of each example
        if self._by_levels:
            self._levels = (
                torch.zeros(0, dtype=torch.float64) if self.rounding is None else even_levels(self.rounding)
            ).to(self.device)
            self._counts = torch.zeros(self.n, len(self._levels), dtype=torch.int16, device=self.device)
        else:
            orders = orders_for(NODES * self.noise_multiplier)
            orders = tuple(sorted({order if order < 64 else float(round(order)) for order in orders}))
            self._orders, self._table = (
                part.to(self.device) for part in chords(self.sample_rate, self.noise_multiplier, orders)
            )
            self._rdp = None  # (n, K), made when the waiting norms are first added up
            self._waiting, self._held = [], 0

    @property
    def _by_levels(self):
        """Whether the account is one of counts at levels, not of divergences that were added up."""
        return self.rounding is not None or self.accountant == "pld"

    @property
    def levels(self) -> torch.Tensor:
        """The levels to which norms are rounded up, in units of the clip norm, ascending: without rounding the norms
        that were recorded, or a grid where they are many; none by RDP without rounding."""
        return self._levels.cpu() if self._by_levels else torch.zeros(0, dtype=torch.float64)

    @classmethod
    def for_plan(
        cls,
        plan: "DPSGDPlan",
        *,
        n: int | None = None,
        rounding: float | None = 0.01,
        accountant: str | None = None,
        device: Device = None,
    ) -> "IndividualAccountant":
        """The accountant of a `dpcompanion.training.DPSGDPlan` with one rate and one clip norm for all.

        Args:
            plan: it gives sample rate, noise multiplier, clip norm and accountant.
            n: number of examples, all of the plan's by default.
            rounding: r as a share of the clip norm, in (0, 1], or None, see the class.
            accountant: the plan's by default.
            device: where the account is kept.

        Raises:
            ValueError: for a plan with rates or clip norms for each example, or without noise.

        >>> from dpcompanion.training import DPSGDPlan
        >>> plan = DPSGDPlan(n=3, sample_rate=0.01, steps=1000, max_grad_norm=0.5, noise_multiplier=1.0, delta=1e-5)
        >>> IndividualAccountant.for_plan(plan, rounding=None).n
        3
        """
        rate, norm = plan.sample_rate, plan.max_grad_norm
        if not (isinstance(rate, float) and isinstance(norm, float)):
            raise ValueError("plan must have one sample_rate and one max_grad_norm for all examples, got one for each")
        return cls(
            plan.n if n is None else n,
            sample_rate=rate,
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=norm,
            rounding=rounding,
            accountant=plan.accountant if accountant is None else accountant,
            device=device,
        )

    @property
    def steps(self) -> int:
        """Steps recorded so far, of whom most were recorded."""
        if self._most is None:
            self._most = int(self._steps.max())
        return self._most

    @steps.setter
    def steps(self, most: int) -> None:
        self._most = most

    def charged(self, norms: Array) -> torch.Tensor:
        """What `record` charges for these norms at least: themselves or the next level of the grid, at most C; float64.

        A gradient clipped to this costs no more than will be charged.

        >>> accountant = IndividualAccountant(3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=2.0,
        ...                                   rounding=0.1)
        >>> accountant.charged([0.0, 0.5, 7.0])
        tensor([0.0000, 0.6000, 2.0000], dtype=torch.float64)
        """
        share = self._shares(norms)
        if self.rounding is not None:
            share = torch.where(share > 0, self._levels[torch.searchsorted(self._levels, share)], 0)
        return share * self.max_grad_norm

    def record(self, norms: Array, steps: int | torch.Tensor = 1, examples: Array | None = None) -> None:
        """Account for `steps` steps in which example i's gradient has the norm ``norms[i]``.

        Args:
            norms: (n,) gradient norms before clipping, finite and at least 0. A norm of 0 costs nothing. Norms of less
                than float64's precision are raised by eight units in their last place.
            steps: a whole number, at least 0, or one for each norm.
            examples: (m,) indices of those whose norms these are, (m,) then; the others are charged nothing. Who is
                named twice is charged twice.

        Where account and numbers are on a GPU nothing here waits for it: what is refused is found when the account is
        read, and has been charged at C meanwhile.

        Raises:
            ValueError: norms, steps or examples of another shape, norms that are negative or not finite, examples that
                there are not, more steps for an example than 2^31 - 1.

        >>> accountant = IndividualAccountant(3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5)
        >>> accountant.record([0.5, 0.2], steps=torch.tensor([600, 1000]), examples=[0, 1])
        >>> accountant.record([0.5], steps=400, examples=[0])
        >>> accountant.epsilon(1e-5)
        tensor([1.8282, 0.4717, 0.0000], dtype=torch.float64)
        """
        examples = None if examples is None else self._indices(examples)
        count = self.n if examples is None else examples.numel()
        share, steps = self._shares(norms, count), self._whole(steps, count)
        if not count:
            return
        self._add_steps(steps, examples)
        if not self._by_levels:
            self._waiting.append((examples, share, steps))
            self._held += sum(part.untyped_storage().nbytes() for part in self._waiting[-1] if part is not None)
            if self._held > _WAITING:
                self._flush()
        else:
            self._widen()
            if self.rounding is None:
                self._levels, self._counts = with_shares(self._levels, self._counts, share[steps > 0])
            if not len(self._levels):  # norms of 0 only, or charged for no step
                return
            # The first level that is not below the norm; what is charged for no step may be above all of them.
            level = torch.searchsorted(self._levels, share).clamp(max=len(self._levels) - 1)
            rows = torch.arange(self.n, device=self.device) if examples is None else examples
            added = (steps * (share > 0)).to(self._counts.dtype)
            self._counts.view(-1).index_add_(0, rows * len(self._levels) + level, added)

    def _shares(self, norms, count=None):
        """Norms as shares of the clip norm, at most 1, none of them below its norm."""
        norms = norms if isinstance(norms, torch.Tensor) else torch.as_tensor(norms, dtype=torch.float64)
        if count is not None and norms.shape != (count,):
            raise ValueError(f"norms must have shape ({count},), got {tuple(norms.shape)}")
        share = sent(norms.detach(), self.device).to(torch.float64) / self.max_grad_norm
        here = norms if norms.device.type == "cpu" else share
        if self._away(here):
            share = self._refuse(~((share >= 0) & (share < math.inf)), share, 1.0)
        elif here.numel() and not (here.min() >= 0 and here.max() < math.inf):  # nor for NaN
            _checks.in_interval("norms", norms, 0, math.inf, closed="left")
        if norms.dtype != torch.float64:
            # A norm that was summed in few digits may lie a few of its last places below the true one.
            share = share * (1 + 8 * torch.finfo(norms.dtype).eps if norms.is_floating_point() else 1)
        return share.clamp(max=1.0)

    def _indices(self, examples):
        """Indices as (m,) int64 on the device."""
        examples = examples if isinstance(examples, torch.Tensor) else torch.as_tensor(examples)
        count = examples.numel()
        if examples.ndim != 1 or (count and (examples.is_floating_point() or examples.dtype == torch.bool)):
            raise ValueError(f"examples must be indices of shape (m,), got {tuple(examples.shape)} {examples.dtype}")
        if self._away(examples):
            examples = self._refuse((examples < 0) | (examples >= self.n), examples, 0)
        elif count and not (examples.min() >= 0 and examples.max() < self.n):
            _checks.in_interval("examples", examples, 0, self.n, closed="left")
        # It may wait, and the caller's may change meanwhile.
        return sent(examples.to(torch.int64, copy=True), self.device)

    def _whole(self, steps, count):
        """Numbers of steps as (count,) int64 on the device; one number is not copied."""
        if not isinstance(steps, torch.Tensor) or not steps.ndim:
            number = _checks.whole_number("steps", steps, 0, _MOST)
            return torch.full((), number, dtype=torch.int64, device=self.device).expand(count)
        if self._away(steps) and steps.shape == (count,) and not steps.is_floating_point():
            steps = self._refuse(steps < 0, steps, 0)
        elif steps.shape != (count,) or steps.is_floating_point() or (count and steps.min() < 0):
            raise ValueError(f"steps must be whole numbers, at least 0, one or ({count},) of them, got {steps}")
        return sent(steps.to(torch.int64, copy=True), self.device)

    def _away(self, tensor):
        """Whether a look at a tensor's numbers would wait for the device of the account."""
        return self.device.type != "cpu" and tensor.device.type != "cpu"

    def _note(self, wrong):
        """Note that something is wrong, without a look at it."""
        found = wrong.any().to(self.device)
        self._wrong = found if self._wrong is None else self._wrong | found

    def _refuse(self, wrong, values, instead):
        """Note what is wrong, and put `instead` in its place."""
        self._note(wrong)
        return torch.where(wrong, instead, values)

    def _check_nothing_refused(self):
        if self._wrong is not None and self._wrong:
            raise ValueError(
                "norms must lie in [0, inf), steps be whole numbers that add up to at most "
                f"{_MOST} for an example, and examples lie in [0, {self.n}), but some that were recorded "
                "on the device did not"
            )

    def _add_steps(self, steps, examples):
        """Add to the steps of each example, unless one comes to have more than its counts can hold."""
        rows = slice(None) if examples is None else examples
        if examples is None:
            self._steps += steps
        else:
            self._steps.index_add_(0, examples, steps)
        if self.device.type != "cpu":
            self._note(self._steps > _MOST)
            self._most = None
            return
        most = int(self._steps[rows].max())
        if most > _MOST:
            self._steps.index_add_(0, torch.arange(self.n, device=self.device)[rows], -steps)
            raise ValueError(f"steps must add up to at most {_MOST} for an example, got {most}")
        self.steps = max(self.steps, most)

    def _widen(self):
        """Counts of 32 bits where those of 16 could wrap around, or where to know it would wait for the device."""
        if self._counts.dtype == torch.int16 and (self.device.type != "cpu" or self.steps > _NARROW):
            self._counts = self._counts.to(torch.int32)

    def epsilon(self, delta: float) -> torch.Tensor:
        """Epsilon of every example at `delta`, from all that has been recorded: an upper bound, (n,) float64.

        None exceeds `accounting.compute_epsilon` at the clip norm, by the same accountant and for `steps` steps, whose
        grid may be the finer one.

        Raises:
            ValueError: a delta outside (0, 1).
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        self._check_nothing_refused()
        everybody = compute_epsilon(
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            steps=self.steps,
            delta=delta,
            accountant=self.accountant,
        )
        return self._epsilon(delta).clamp(max=everybody)

    def _epsilon(self, delta):
        if self.accountant == "pld":
            return epsilon_of_histories(
                self._counts,
                sample_rate=self.sample_rate,
                delta=delta,
                noise_multipliers=self.noise_multiplier / self.levels,
            ).to(self.device)
        result = torch.empty(self.n, dtype=torch.float64, device=self.device)
        if self.rounding is None:
            if self._rdp is not None or len(self._waiting) > _FEW or any(part[0] is not None for part in self._waiting):
                self._flush()
            orders = self._orders
        else:
            orders = torch.tensor(orders_for(self.noise_multiplier / float(self._levels[0])), dtype=torch.float64)
            table = rdp_of_shares(
                self._levels, orders.tolist(), sample_rate=self.sample_rate, noise_multiplier=self.noise_multiplier
            )
        for start in range(0, self.n, _ROWS):
            block = slice(start, start + _ROWS)
            if self.rounding is not None:
                counts = self._counts[block].double()
                result[block] = least_epsilon(
                    lambda rows, columns, counts=counts: counts[rows] @ table[:, columns],
                    len(counts),
                    orders.to(self.device),
                    delta,
                )
            elif self._rdp is not None:
                result[block] = rdp_to_epsilon(self._rdp[block], orders, delta)[0]
            else:
                # So few norms that an account is cheaper made again than kept.
                nothing = torch.zeros(len(result[block]), 1, dtype=torch.float64, device=self.device)
                waiting = [(shares[block], steps[block, None]) for _, shares, steps in self._waiting]
                result[block] = least_epsilon(
                    lambda rows, columns, nothing=nothing, waiting=waiting: sum(
                        (between(shares[rows], self._table[:, columns]) * steps[rows] for shares, steps in waiting),
                        start=nothing[rows].expand(-1, len(columns)),
                    ),
                    len(nothing),
                    orders,
                    delta,
                )
        return result

    def merge(self, other: "IndividualAccountant") -> None:
        """Add what another accountant of the same examples and parameters has recorded, as if this one had."""
        if not isinstance(other, IndividualAccountant) or other._parameters() != self._parameters():
            raise ValueError(
                f"other must be an accountant with the parameters {self._parameters()}, got "
                f"{other._parameters() if isinstance(other, IndividualAccountant) else other!r}"
            )
        for one in (self, other):
            one._check_nothing_refused()
        # Counts are 32 bits wide: one that wrapped around would make an account too small.
        steps = self._steps + other._steps.to(self.device)
        if steps.max() > _MOST:
            raise ValueError(
                f"other.steps must add up with these to at most {_MOST} for an example, got {int(steps.max())}"
            )
        self._steps, self.steps = steps, int(steps.max())
        if not self._by_levels:
            rdp = self._flush()
            rdp += other._flush().to(self.device)
            return
        self._widen()
        self._levels, self._counts = joined(self._levels, self._counts, other._levels.to(self.device), other._counts)

    def state_dict(self) -> State:
        """All that is needed to go on: parameters, steps of each example and accounts."""
        self._check_nothing_refused()
        return {
            "parameters": self._parameters(),
            "steps": self._steps.clone(),
            "accounts": (self._counts if self._by_levels else self._flush()).clone(),
        } | ({"levels": self.levels} if self._by_levels and self.rounding is None else {})

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict` of an accountant with the same parameters.

        Raises:
            ValueError: naming what differs, or what cannot be an account: a count below 0 or not whole, more steps in
                an example's row than it took, a divergence below 0 or NaN.
        """
        if state["parameters"] != self._parameters():
            raise ValueError(
                f"state must be of an accountant with the parameters {self._parameters()}, got {state['parameters']}"
            )
        levels = None
        if not self._by_levels:
            shape, kinds = (self.n, len(self._orders)), (torch.float64,)
        else:
            levels = torch.as_tensor(state["levels"]) if self.rounding is None else self._levels
            shape, kinds = (self.n, len(levels)), (torch.int16, torch.int32)
            if levels.dtype != torch.float64 or not ((levels > 0) & (levels <= 1)).all() or (levels.diff() <= 0).any():
                raise ValueError(f"state must hold ascending levels in (0, 1], got {levels}")
        accounts, steps = state["accounts"], torch.as_tensor(state["steps"])
        if steps.shape != (self.n,) or steps.dtype != torch.int64 or steps.min() < 0 or steps.max() > _MOST:
            raise ValueError(f"state must hold ({self.n},) int64 steps from 0 to {_MOST}, got {steps}")
        if accounts.shape != shape or accounts.dtype not in kinds:
            raise ValueError(
                f"state must hold accounts of {tuple(shape)} {kinds[-1]}, got {tuple(accounts.shape)} {accounts.dtype}"
            )
        if not bool((accounts >= 0).all()):
            lowest = float(accounts.nan_to_num(nan=-1.0).min())
            raise ValueError(f"state must hold accounts of at least 0, got {lowest:g}")
        if levels is not None:
            counted = accounts.sum(dim=1, dtype=torch.int64)
            if bool((counted > steps.to(counted.device)).any()):
                raise ValueError(
                    f"state must hold at most an example's steps for it, got {int(counted.max())} of {int(steps.max())}"
                )
        self._steps.copy_(steps)
        self.steps = int(steps.max())
        if levels is None:
            self._rdp, self._waiting, self._held = accounts.to(self.device, copy=True), [], 0
        else:
            self._levels = levels.to(self.device)
            self._counts = accounts.to(self.device, torch.int16 if self.steps <= _NARROW else torch.int32, copy=True)

    def _parameters(self):
        return {
            "n": self.n,
            "sample_rate": self.sample_rate,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "rounding": self.rounding,
            "accountant": self.accountant,
        }

    def _flush(self):
        """The accounts, with the waiting norms added: a histogram of weights on the nodes, times the table."""
        if self._rdp is None:
            self._rdp = torch.zeros(self.n, len(self._orders), dtype=torch.float64, device=self.device)
        waiting, self._waiting, self._held = self._waiting, [], 0
        everybody = [part for part in waiting if part[0] is None]
        some = [torch.cat(column) for column in zip(*(part for part in waiting if part[0] is not None))]
        if some:
            examples, order = some[0].sort()
            some = [column[order] for column in some[1:]]
        for start in range(0, self.n if waiting else 0, _ROWS // 4):
            stop = min(start + _ROWS // 4, self.n)
            histogram = torch.zeros((stop - start) * (NODES + 1), dtype=torch.float64, device=self.device)

            def add(rows, shares, steps, histogram=histogram):
                node, upper = weights(shares)
                histogram.scatter_add_(0, rows * (NODES + 1) + node, steps * (1 - upper))
                histogram.scatter_add_(0, rows * (NODES + 1) + node + 1, steps * upper)

            for _, shares, steps in everybody:
                add(torch.arange(stop - start, device=self.device), shares[start:stop], steps[start:stop])
            if some:
                first, last = torch.searchsorted(examples, torch.tensor([start, stop], device=self.device)).tolist()
                add(examples[first:last] - start, *(column[first:last] for column in some))
            self._rdp[start:stop] += histogram.view(stop - start, -1) @ self._table
        return self._rdp
