"""`IndividualAccountant`: rounds norms up to levels, counts steps, and computes epsilons."""

import math
from typing import TYPE_CHECKING

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Device, State
from dpcompanion.accounting import (
    ACCOUNTANTS,
    LedgerEntry,
    PersonalCosts,
    SampledGaussian,
    compute_epsilon,
    inclusion_bound,
)
from dpcompanion.accounting.conversions import least_epsilon
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.accounting.items import check_no_delta
from dpcompanion.accounting.rdp_interpolation import rdp_of_shares
from dpcompanion.accounting.runs import orders_for
from dpcompanion.individual.divergences import ROWS, Divergences
from dpcompanion.individual.levels import even_levels, joined, with_shares
from dpcompanion.individual.norm_history import MOST, NormHistory

if TYPE_CHECKING:
    from dpcompanion.mechanism.plan import DPSGDPlan

_NARROW = 2**15 - 1  # steps that a count of 16 bits can hold
_FINEST = 1e-6  # steps of a grid, whose counts are kept for each example
_LEAST_SHARE = 1e-12  # of the clip norm: what is less, but not nothing, counts as it beside others


class IndividualAccountant(NormHistory):
    """Accounts for n examples; `dpcompanion.individual` says what they are.

    Neighbouring relation: that of the plan, add-remove or zero-out of the example. Sampler:
    Poisson. It is not made for several threads at once.

    Args:
        n: number of examples.
        sample_rate: in (0, 1], the same for all.
        noise_multiplier: noise over `max_grad_norm`, above 0.
        max_grad_norm: the clip norm C, above 0; longer norms are taken as C.
        rounding: r as a share of C, in [1e-6, 1]; None for none, so far as the accountant allows:
            "rdp" takes each norm as it is, "pld" up to 2,048 distinct ones; if more are recorded,
            all are rounded up, by less than 0.001 C (for more than half a million examples by less
            than n C / 5e8, so that counts take about 2 GB).
        accountant: "pld", which is tight, or "rdp", which is fast.
        device: where the account is kept; norms may come from anywhere.

    Raises:
        ValueError: an argument outside its range.

    Source: Yu et al. 2023, algorithm 2 (which rounds to the nearest multiple, and so under-states
    half of the norms).
    """

    #: Of what a ledger is told: "zero-out", which what holds for adding or removing implies, unless
    #: a plan says more.
    relation, unit = "zero-out", "example"

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
        super().__init__(n, max_grad_norm=max_grad_norm, device=device)
        self.sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        self.noise_multiplier = _checks.number(
            "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
        )
        self.accountant = _checks.one_of("accountant", accountant, ACCOUNTANTS)
        self.rounding = (
            None if rounding is None else _checks.number("rounding", rounding, _FINEST, 1)
        )
        if self.keeps_norms:
            self._levels = (
                torch.zeros(0, dtype=torch.float64)
                if self.rounding is None
                else even_levels(self.rounding)
            ).to(self.device)
            self._counts = torch.zeros(
                self.n, len(self._levels), dtype=torch.int16, device=self.device
            )
        else:
            self._divergences = Divergences(
                self.n,
                sample_rate=self.sample_rate,
                noise_multiplier=self.noise_multiplier,
                device=self.device,
            )

    @property
    def keeps_norms(self) -> bool:
        """Whether the account is one of counts at levels, which a ledger composes, not of
        divergences that were added up (by RDP without rounding).
        """
        return self.rounding is not None or self.accountant == "pld"

    @property
    def levels(self) -> torch.Tensor:
        """The levels to which norms are rounded up, in units of the clip norm, ascending: without
        rounding the norms that were recorded, or a grid where they are many; none by RDP without
        rounding.
        """
        return (
            self._levels.cpu().clone() if self.keeps_norms else torch.zeros(0, dtype=torch.float64)
        )

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
        """The accountant of a `DPSGDPlan` with one rate and one clip norm for all.

        Args:
            plan: it gives sample rate, noise multiplier, clip norm and accountant.
            n: number of examples, all of the plan's by default.
            rounding: r as a share of the clip norm, in [1e-6, 1], to whose multiples norms are
                rounded up; None for none, so far as the accountant allows: "rdp" takes each norm as
                it is, "pld" up to 2,048 distinct ones.
            accountant: "pld", which is tight, or "rdp", which is fast; the plan's by default.
            device: where the account is kept; norms may come from anywhere.

        Raises:
            ValueError: for a plan with rates or clip norms for each example, without noise, or with
                arithmetic="float": what floats add is not in these accounts.

        >>> from dpcompanion.training import DPSGDPlan
        >>> plan = DPSGDPlan(
        ...     n=3,
        ...     sample_rate=0.01,
        ...     steps=1000,
        ...     max_grad_norm=0.5,
        ...     noise_multiplier=1.0,
        ...     delta=1e-5,
        ... )
        >>> IndividualAccountant.for_plan(plan, rounding=None).n
        3
        """
        made = cls(
            plan.n if n is None else n,
            **plan.uniform_parameters(),
            rounding=rounding,
            accountant=plan.accountant if accountant is None else accountant,
            device=device,
        )
        made.relation, made.unit = str(plan.relation), plan.unit
        return made

    def charged(self, norms: Array) -> torch.Tensor:
        """What `record` charges for these norms at least: themselves or the next level of the grid,
        at most C; float64.

        A gradient clipped to this costs no more than will be charged.

        >>> accountant = IndividualAccountant(
        ...     3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=2.0, rounding=0.1
        ... )
        >>> accountant.charged([0.0, 0.5, 7.0])
        tensor([0.0000, 0.6000, 2.0000], dtype=torch.float64)
        """
        share = self._shares(norms)
        if self.rounding is not None:
            share = torch.where(share > 0, self._levels[torch.searchsorted(self._levels, share)], 0)
        return share * self.max_grad_norm

    def record(
        self, norms: Array, steps: int | torch.Tensor = 1, examples: Array | None = None
    ) -> None:
        """Account for `steps` steps in which example i's gradient has the norm ``norms[i]``.

        Args:
            norms: (n,) gradient norms before clipping, finite and at least 0. A norm of 0 costs
                nothing. Norms of less than float64's precision are raised by eight units in their
                last place.
            steps: a whole number, at least 0, or one for each norm.
            examples: (m,) indices of those whose norms these are, (m,) then; the others are charged
                nothing. Who is named twice is charged twice. An example counts as one of a step
                wherever it COULD have been sampled: the account multiplies its steps by the sample
                rate's effect already, so a log of sampled examples only counts sampling twice (see
                `estimate_from_sampled`).

        Where account and numbers are on a GPU nothing here waits for it: what is refused is found
        when the account is read, and has been charged at C meanwhile. Only accounts without
        rounding do wait: by PLD each time, as their levels are the norms that are recorded, and how
        many of these are new must be known; by RDP where some examples' norms have come to fill 200
        MB, and are added up.

        Raises:
            ValueError: norms, steps or examples of another shape, norms that are negative or not
                finite, examples that there are not, more steps for an example than 2^31 - 1.

        >>> accountant = IndividualAccountant(
        ...     3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5
        ... )
        >>> accountant.record([0.5, 0.2], steps=torch.tensor([600, 1000]), examples=[0, 1])
        >>> accountant.record([0.5, 0.0], steps=torch.tensor([400, 1000]), examples=[0, 2])
        >>> accountant.epsilon(1e-5)
        tensor([1.8282, 0.4719, 0.0000], dtype=torch.float64)
        """
        examples = None if examples is None else self._indices(examples)
        count = self.n if examples is None else examples.numel()
        share, steps = self._shares(norms, count), self._whole(steps, count)
        if not count:
            return
        self._add_steps(steps, examples)
        if not self.keeps_norms:
            self._divergences.add(examples, share, steps)
        else:
            self._widen()
            if self.rounding is None:
                share = torch.where(share > 0, share.clamp(min=_LEAST_SHARE), share)
                self._levels, self._counts = with_shares(
                    self._levels, self._counts, share[steps > 0]
                )
            if not len(self._levels):  # norms of 0 only, or charged for no step
                return
            # The first level that is not below the norm; what is charged for no step may be above
            # all of them.
            level = torch.searchsorted(self._levels, share).clamp(max=len(self._levels) - 1)
            rows = torch.arange(self.n, device=self.device) if examples is None else examples
            added = (steps * (share > 0)).to(self._counts.dtype)
            self._counts.view(-1).index_add_(0, rows * len(self._levels) + level, added)

    def _widen(self):
        """Counts of 32 bits if 16 could wrap around, or if finding out would wait for a device."""
        if self._counts.dtype == torch.int16 and (
            self.device.type != "cpu" or self.steps > _NARROW
        ):
            self._counts = self._counts.to(torch.int32)

    def epsilon(self, delta: float, *, unequal_steps: bool = False) -> torch.Tensor:
        """Each example's epsilon at `delta`, from all recorded norms: an upper bound, (n,) float64.

        None exceeds `accounting.compute_epsilon` at the clip norm, by the same accountant and for
        `steps` steps, whose grid may be the finer one.

        An example's epsilon is a function of its own norms, up to the rounding errors of floats, as
        is needed where it is told to its owner or released with noise (`dpcompanion.release`). The
        exception are accounts by PLD without `rounding`: their levels are the norms of all
        examples, and those of others may move a bound by about a thousandth.

        Args:
            delta: in (0, 1).
            unequal_steps: True says that examples with fewer recorded steps really could not be
                sampled in the other ones: they joined the data later, or left earlier. Without it
                unequal numbers are refused, since they mostly come from a log of sampled examples,
                of which the account would be far too small.

        Raises:
            ValueError: a delta outside (0, 1), or examples with different numbers of steps without
                `unequal_steps`.

        >>> accountant = IndividualAccountant(
        ...     2, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5
        ... )
        >>> accountant.record(
        ...     [0.5, 0.5], steps=torch.tensor([1000, 400])
        ... )  # the second left after 400 steps
        >>> accountant.epsilon(1e-5, unequal_steps=True)
        tensor([1.8282, 1.2044], dtype=torch.float64)
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        self._check_steps("epsilon(delta, unequal_steps=True)", unequal_steps)
        uniform = compute_epsilon(
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            steps=self.steps,
            delta=delta,
            accountant=self.accountant,
        )
        return self._epsilon(delta).clamp(max=uniform)

    def _check_steps(self, allowing, unequal_steps):
        """What was recorded can be accounted for; `allowing` is the call for unequal steps."""
        self._check_nothing_refused()
        fewest, most = int(self._steps.min()), int(self._steps.max())
        if fewest < most and not unequal_steps:
            raise ValueError(
                f"steps must be as many for each example, got {fewest} to {most}: of norms of "
                "sampled examples the account would count sampling twice, and be too small. Record "
                "a norm for each example and step, or take estimate_from_sampled(delta, "
                f"steps=...). Examples that could not be sampled in the other steps: {allowing}"
            )

    def ledger_entry(
        self, delta: float | None = None, *, unequal_steps: bool = False
    ) -> LedgerEntry:
        """What was recorded, for `accounting.Ledger.add`: promised as so many steps at the clip
        norm, and the account of each example by its own norms.

        Args:
            delta: None; the account holds at each delta.
            unequal_steps: as in `epsilon`.

        Raises:
            ValueError: as `epsilon`, and of an account that keeps no norms: one by RDP without
                rounding.

        >>> run = dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5)
        >>> accountant = IndividualAccountant(2, **run, rounding=0.5)
        >>> accountant.record([0.5, 0.2], steps=1000)
        >>> accountant.ledger_entry().account.counts.tolist()
        [[0, 1000], [1000, 0]]
        """
        check_no_delta(delta)
        self._check_steps("ledger_entry(unequal_steps=True)", unequal_steps)
        if not self.keeps_norms:
            raise ValueError(
                "item must be an account that keeps norms: rounding must be a number, or "
                "accountant 'pld'"
            )
        run = self.sample_rate, self.noise_multiplier
        kinds = tuple(SampledGaussian(run[0], run[1] / level, 1) for level in self.levels.tolist())
        # Levels so small that their noise is as good as infinite are one kind.
        distinct = tuple(dict.fromkeys(kinds))
        counts = torch.zeros(self.n, len(distinct), dtype=torch.int64)
        place = torch.tensor([distinct.index(kind) for kind in kinds], dtype=torch.int64)
        counts.index_add_(1, place, self._counts.cpu().to(torch.int64))
        costs = PersonalCosts(distinct, counts)
        return LedgerEntry(
            SampledGaussian(*run, self.steps), account=costs, relation=self.relation, unit=self.unit
        )

    def estimate_from_sampled(self, delta: float, *, steps: int) -> torch.Tensor:
        r"""An ESTIMATE of every example's epsilon from logged norms of sampled ones, (n,) float64.

        Here `record` was called once a step with the norms of those who were sampled, as Opacus
        sees them: ``accountant.record(norms, examples=sampled)``. Whether an example is sampled at
        a step does not depend on its norm there, so the :math:`m_i` steps in which example i was
        seen are a random sample of its T steps, and of these about

        .. math:: T \, \#\{t \text{ seen}: \lVert g_i(t) \rVert > c\} \, / \, m_i

        had norms above c. They are rounded up to whole steps. Who was never seen is charged the
        clip norm at each step. The result is exact for norms that do not change, and otherwise errs
        to both sides, by more the fewer steps an example was seen in: it is no bound, and no
        guarantee. For one, record a norm for each example and step (`training.NormTracker`).

        Args:
            delta: in (0, 1).
            steps: T, all steps of the run, at least as many as any example was seen in.

        Raises:
            ValueError: a delta outside (0, 1), or fewer steps than an example was seen in.

        >>> run = dict(sample_rate=0.05, noise_multiplier=1.0, max_grad_norm=1.0)
        >>> accountant = IndividualAccountant(2, **run)
        >>> accountant.record([1.0], steps=25, examples=[0])  # sampled in 25 of 500 steps
        >>> accountant.record([0.3], steps=31, examples=[1])
        >>> accountant.estimate_from_sampled(1e-5, steps=500)
        tensor([7.5237, 1.3453], dtype=torch.float64)
        """
        _checks.number("delta", delta, 0, 1, closed="neither")
        steps = _checks.whole_number("steps", steps, 1, MOST)
        self._check_nothing_refused()
        if steps < self.steps:
            raise ValueError(
                f"steps must be all steps of the run, at least the {self.steps} in which an "
                f"example was seen, got {steps}"
            )
        state, seen = self.state_dict(), self._steps.double()
        unseen = seen == 0
        scale = steps / seen.clamp(min=1)[:, None]
        whole = IndividualAccountant(**self._parameters(), device=self.device)
        if not self.keeps_norms:
            state["accounts"] = state["accounts"] * scale
        else:
            # Of each level and those above it, rounded up: between 0 and T, falling in the level.
            above = state["accounts"].double().flip(1).cumsum(1)
            above = torch.ceil(above * scale - 1e-9).to(torch.int64)
            state["accounts"] = (
                above.diff(dim=1, prepend=torch.zeros_like(above[:, :1])).flip(1).to(torch.int32)
            )
        state["steps"] = torch.where(unseen, 0, steps)
        whole.load_state_dict(state)
        if bool(unseen.any()):
            names = unseen.nonzero()[:, 0]
            whole.record(
                torch.full((len(names),), self.max_grad_norm, dtype=torch.float64), steps, names
            )
        return whole.epsilon(delta)

    def _epsilon(self, delta):
        if (
            self.keeps_norms
            and len(self._levels)
            and self.noise_multiplier < inclusion_bound.LITTLE_NOISE
        ):
            return self._of_largest(delta)
        if self.accountant == "pld":
            return epsilon_of_histories(
                self._counts,
                sample_rate=self.sample_rate,
                delta=delta,
                noise_multipliers=self.noise_multiplier / self.levels,
                steps=self.steps,
            ).to(self.device)
        if self.rounding is None:
            return self._divergences.epsilon(delta)
        result = torch.empty(self.n, dtype=torch.float64, device=self.device)
        orders = torch.tensor(
            orders_for(self.noise_multiplier / float(self._levels[0])), dtype=torch.float64
        )
        table = rdp_of_shares(
            self._levels,
            orders.tolist(),
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
        )
        for start in range(0, self.n, ROWS):
            block = slice(start, start + ROWS)
            counts = self._counts[block].double()
            result[block] = least_epsilon(
                lambda rows, columns, counts=counts: counts[rows] @ table[:, columns],
                len(counts),
                orders.to(self.device),
                delta,
            )
        return result

    def _of_largest(self, delta):
        """With so little noise that a step shows who was in it, where loss distributions would not
        fit in memory: all steps of an example count as its largest.
        """
        largest, steps = (
            torch.empty(self.n, dtype=torch.float64, device=self.device) for _ in range(2)
        )
        for start in range(0, self.n, ROWS):
            block = slice(start, start + ROWS)
            counts = self._counts[block]
            largest[block] = torch.where(counts > 0, self._levels.double(), 0).amax(1)
            steps[block] = counts.sum(1).double()
        pairs, which = torch.stack([largest, steps], 1).unique(dim=0, return_inverse=True)
        found = [
            inclusion_bound.epsilon(
                sample_rate=self.sample_rate,
                noise_multiplier=self.noise_multiplier / level,
                steps=int(count),
                delta=delta,
            )
            if level * count
            else 0.0
            for level, count in pairs.tolist()
        ]
        return torch.tensor(found, dtype=torch.float64, device=self.device)[which]

    def merge(self, other: "IndividualAccountant") -> None:
        """Add another accountant's records of the same examples and parameters, as if made here."""
        if not isinstance(other, IndividualAccountant) or other._parameters() != self._parameters():
            raise ValueError(
                f"other must be an accountant with the parameters {self._parameters()}, got "
                f"{other._parameters() if isinstance(other, IndividualAccountant) else other!r}"
            )
        for one in (self, other):
            one._check_nothing_refused()
        # Counts are 32 bits wide: one that wrapped around would make an account too small.
        steps = self._steps + other._steps.to(self.device)
        if steps.max() > MOST:
            raise ValueError(
                f"other.steps must add up with these to at most {MOST} for an example, got "
                f"{int(steps.max())}"
            )
        self._steps, self.steps = steps, int(steps.max())
        if not self.keeps_norms:
            rdp = self._divergences.total()
            rdp += other._divergences.total().to(self.device)
            return
        self._widen()
        self._levels, self._counts = joined(
            self._levels, self._counts, other._levels.to(self.device), other._counts
        )

    def state_dict(self) -> State:
        """All that is needed to go on: parameters, steps of each example and accounts."""
        self._check_nothing_refused()
        return {
            "parameters": self._parameters(),
            "steps": self._steps.clone(),
            "accounts": (self._counts if self.keeps_norms else self._divergences.total()).clone(),
        } | ({"levels": self.levels} if self.keeps_norms and self.rounding is None else {})

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict` of an accountant with the same parameters.

        Raises:
            ValueError: naming what differs, or what cannot be an account: a count below 0 or not
                whole, more steps in an example's row than it took, a divergence below 0 or NaN.
        """
        if (parameters := _checks.entry(state, "parameters")) != self._parameters():
            raise ValueError(
                f"state must be of an accountant with the parameters {self._parameters()}, got "
                f"{parameters}"
            )
        levels = None
        if not self.keeps_norms:
            shape, kinds = (self.n, len(self._divergences.orders)), (torch.float64,)
        else:
            levels = (
                _checks.tensor_entry(state, "levels") if self.rounding is None else self._levels
            )
            shape, kinds = (self.n, len(levels)), (torch.int16, torch.int32)
            if (
                levels.dtype != torch.float64
                or not ((levels > 0) & (levels <= 1)).all()
                or (levels.diff() <= 0).any()
            ):
                raise ValueError(f"state must hold ascending levels in (0, 1], got {levels}")
        accounts, steps = (_checks.tensor_entry(state, name) for name in ("accounts", "steps"))
        if (
            steps.shape != (self.n,)
            or steps.dtype != torch.int64
            or steps.min() < 0
            or steps.max() > MOST
        ):
            raise ValueError(
                f"state must hold ({self.n},) int64 steps from 0 to {MOST}, got {steps}"
            )
        if accounts.shape != shape or accounts.dtype not in kinds:
            raise ValueError(
                f"state must hold accounts of {tuple(shape)} {kinds[-1]}, got "
                f"{tuple(accounts.shape)} {accounts.dtype}"
            )
        if not bool((accounts >= 0).all()):
            lowest = float(accounts.nan_to_num(nan=-1.0).min())
            raise ValueError(f"state must hold accounts of at least 0, got {lowest:g}")
        if levels is not None:
            counted = accounts.sum(dim=1, dtype=torch.int64)
            if bool((counted > steps.to(counted.device)).any()):
                raise ValueError(
                    f"state must hold at most an example's steps for it, got {int(counted.max())} "
                    f"of {int(steps.max())}"
                )
        self._steps.copy_(steps)
        self.steps = int(steps.max())
        if levels is None:
            self._divergences.load(accounts)
        else:
            # what the caller does to it must not move the account
            self._levels = levels.to(self.device, copy=True)
            self._counts = accounts.to(
                self.device, torch.int16 if self.steps <= _NARROW else torch.int32, copy=True
            )

    def _parameters(self):
        return {
            "n": self.n,
            "sample_rate": self.sample_rate,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "rounding": self.rounding,
            "accountant": self.accountant,
        }
