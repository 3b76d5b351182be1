r"""A budget for each example that no run exceeds, priced by loss distributions: the exact filter.

Each example has levels, shares :math:`z_1 < \dots < z_K` of the clip norm. Before each block of m
steps its gradient's norm decides which level it asks for (the norm, rounded up); in the block its
gradients are clipped to that level, and it is charged c(z). If that exceeds its budget, it is
clipped to the largest level it affords, and leaves when none is left.

What is promised, before the run, for every data set: with the budget B of an example, all outputs
together are (epsilon, delta) indistinguishable from those without it, for the epsilon and delta of
`adaptive_delta`, however norms depend on the outputs before (individual DP; add or remove; Poisson
sampling; others' levels and budgets may be anything that depends on their data and the outputs).
The bound is exact: some strategy of norms attains it, up to the grid.

Costs at which no level is a bargain depend on the epsilon that is promised, so each target has its
own (they are those of `level_costs`): a person who is promised 3 beside people with 8 can use all
of it.

To those who spent little. Fix a threshold b beforehand. For every event in which the example has
spent at most b, the inequalities of (epsilon, delta) hold with the smaller delta of a filter of
budget b: up to there the two runs are the same. That is ``epsilon(delta, spent=b)``. A threshold
that is read off the run afterwards has no such promise.

What an example has `spent` is as private as the example.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Device, Numbers, State
from dpcompanion.filters.base import PrivacyFilter
from dpcompanion.filters.calibration import LARGEST_EPSILON, calibrate_filter, epsilon_of_budget
from dpcompanion.filters.game import check_costs, check_levels

if TYPE_CHECKING:
    from dpcompanion.mechanism.plan import DPSGDPlan

#: Shares of the clip norm that `ExactFilter.for_plan` charges at by default.
LEVELS = (0.25, 0.5, 0.75, 1.0)


class ExactFilter(PrivacyFilter):
    """Budgets of n examples at K levels; see the module's text.

    A filter serves one run: what it has spent is spent for the next run, too.

    Args:
        n: number of examples.
        sample_rate: in (0, 1].
        noise_multiplier: noise over `max_grad_norm`, above 0.
        max_grad_norm: the clip norm of level 1, above 0.
        levels: (K,) ascending shares of the clip norm, in (0, 1].
        costs: (K,) whole numbers, at least 1, that a block at each level costs an example; by
            default `level_costs` at each example's own target.
        budget: whole numbers, at least the least cost, one or (n,); needs `costs`.
        target_epsilon, target_delta: instead of `budget`: the largest that keeps each example's
            epsilon (a number above 0, 10^7 at most, or (n,)).
        steps: of the run.
        block: steps for which a level holds.
        device: where the account is kept; norms may come from anywhere.
        progress: show a bar while budgets or promises are sought; by default on a terminal only.

    Raises:
        ValueError: an argument outside its range, or a target that cannot be met.

    >>> filter = ExactFilter(
    ...     3,
    ...     sample_rate=0.01,
    ...     noise_multiplier=1.0,
    ...     max_grad_norm=1.0,
    ...     levels=[0.5, 1.0],
    ...     costs=[1, 8],
    ...     budget=20,
    ...     steps=100,
    ... )
    >>> levels = filter.levels_for([3.0, 0.2, 0.0])
    >>> filter.record(levels, steps=1)
    >>> levels.tolist(), filter.spent.tolist()
    ([1.0, 0.5, 0.0], [8, 1, 0])
    >>> for _ in range(5):
    ...     filter.clip_norms([3.0, 0.2, 0.0]).tolist()
    [1.0, 0.5, 0.0]
    [0.5, 0.5, 0.0]
    [0.5, 0.5, 0.0]
    [0.5, 0.5, 0.0]
    [0.5, 0.5, 0.0]
    >>> filter.spent.tolist(), filter.active.tolist()
    ([20, 6, 0], [False, True, True])
    """

    def __init__(
        self,
        n: int,
        *,
        sample_rate: float,
        noise_multiplier: float,
        max_grad_norm: float,
        levels: Sequence[float],
        costs: Sequence[int] | None = None,
        budget: Array | float | None = None,
        target_epsilon: Numbers | None = None,
        target_delta: float | None = None,
        steps: int,
        block: int = 1,
        device: Device = None,
        progress: bool | None = None,
    ):
        """Many arguments, since a run, its levels and its budgets are described by numbers."""
        super().__init__(
            n,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            device=device,
        )
        self.levels = tuple(check_levels(levels))
        self.steps = _checks.whole_number("steps", steps, 1)
        self.block = _checks.whole_number("block", block, 1)
        if (budget is None) == (target_epsilon is None) or (target_epsilon is None) != (
            target_delta is None
        ):
            raise ValueError(
                "either budget, or target_epsilon and target_delta must be given, got "
                f"budget={budget!r}, target_epsilon={target_epsilon!r}, "
                f"target_delta={target_delta!r}"
            )
        self._targets, self._progress, self.target_delta = {}, progress, target_delta
        if budget is None:
            budget, tables, which = self._calibrated(target_epsilon, costs)
        elif costs is None:
            raise ValueError("costs must be given with a budget, got None")
        else:
            tables, which = [costs], torch.tensor(0)
        budget = _checks.in_order("budget", budget)
        _checks.in_interval("budget", budget, 1, 2**53)
        # which holds whole numbers up to 2^53
        budget = torch.as_tensor(budget, dtype=torch.float64)
        if budget.shape not in ((), (self.n,)):
            raise ValueError(
                f"budget or target_epsilon must be a number or have shape ({self.n},), got "
                f"{tuple(budget.shape)}"
            )
        if not torch.equal(budget, budget.round()):
            raise ValueError("budget must hold whole numbers, got fractions")
        which = torch.zeros((), dtype=torch.int64) if len(tables) == 1 else which
        least = [
            int(budget[which == k].min() if len(tables) > 1 else budget.min())
            for k in range(len(tables))
        ]
        tables = [
            tuple(check_costs(own, low, len(self.levels))[0]) for own, low in zip(tables, least)
        ]
        self._budget = budget.to(self.device, torch.int64).expand(self.n).clone()
        self._spent = torch.zeros_like(self._budget)
        # Who has which costs, (n,), and what a block costs each at no level and at each level,
        # (n, K + 1).
        self._tables, self._which = tables, which.expand(self.n)
        self._costs = torch.tensor([(0, *own) for own in tables], device=self.device)
        self._costs = self._costs[which.to(self.device)].expand(self.n, -1)
        self._least_costs = self._costs[:, 1:].amin(dim=1)
        self._shares = torch.tensor(self.levels, dtype=torch.float64, device=self.device)
        self._norms = torch.cat([self._shares.new_zeros(1), self._shares * self.max_grad_norm])
        self._current, self._limits, self._steps_left = torch.zeros_like(self._budget), None, 0

    def _calibrated(self, target_epsilon, costs):
        """The budgets of the targets, the tables of costs, and which of these is whose."""
        run: dict[str, Any] = dict(
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            levels=self.levels,
            steps=self.steps,
            block=self.block,
            target_delta=self.target_delta,
            costs=costs,
            progress=self._progress,
        )
        target_epsilon = _checks.in_order("target_epsilon", target_epsilon)
        _checks.in_interval("target_epsilon", target_epsilon, 0, LARGEST_EPSILON, closed="right")
        targets = torch.as_tensor(target_epsilon, dtype=torch.float64).cpu()
        distinct, which = targets.unique(return_inverse=True)
        found = [calibrate_filter(target_epsilon=epsilon, **run) for epsilon in distinct.tolist()]
        # Where a run cannot spend what two targets allow, the same budget keeps the smaller one.
        for answer in reversed(found):
            self._targets[answer.costs, answer.budget] = (answer.target_delta, answer.epsilon)
        budget = torch.tensor([answer.budget for answer in found])[which]
        tables = list(dict.fromkeys(answer.costs for answer in found))
        which = torch.tensor([tables.index(answer.costs) for answer in found])[which]
        return budget, tables, which

    @classmethod
    def for_plan(
        cls,
        plan: "DPSGDPlan",
        target_epsilons: Array | float | Mapping[float, float],
        *,
        levels: Sequence[float] = LEVELS,
        block: int | None = None,
        costs: Sequence[int] | None = None,
        device: Device = None,
        progress: bool | None = None,
    ) -> "ExactFilter":
        """The filter of a run of a `DPSGDPlan` with one rate and one clip norm for all.

        Args:
            plan: it gives the number of examples, rate, noise, clip norm, steps and delta.
            target_epsilons: what is promised at the plan's delta: one number, one for each example,
                (n,), or {budget: share} (`idp.budgets_for`). What exceeds the plan's own epsilon is
                never spent. Each different one is calibrated by itself, in seconds to a minute, so
                that many should be rounded down to a few; a `RenyiFilter` takes any number.
            levels: (K,) ascending shares of the clip norm, in (0, 1].
            block: steps for which a level holds, by default half an epoch of the plan; the tracker
                that measures norms should do so as often.
            costs, device, progress: as in `ExactFilter`.

        Raises:
            ValueError: an argument outside its range, a target that cannot be met, or a plan with
                rates or clip norms for each example, without noise, or with arithmetic="float".

        >>> from dpcompanion.training import DPSGDPlan
        >>> plan = DPSGDPlan(
        ...     n=4, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
        ... )
        >>> filter = ExactFilter.for_plan(plan, {1.0: 0.5, 2.0: 0.5}, levels=[0.5, 1.0])
        >>> filter.epsilon(1e-5).tolist()
        [2.0, 2.0, 1.0, 1.0]
        """
        return cls(
            plan.n,
            **plan.uniform_parameters(),
            levels=levels,
            costs=costs,
            target_epsilon=plan.budgets(target_epsilons),
            target_delta=plan.delta,
            steps=plan.steps,
            block=max(1, plan.steps_per_epoch // 2) if block is None else block,
            device=device,
            progress=progress,
        )._about(plan)

    @property
    def costs(self) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """A block's cost at each level: whole numbers (K,) if the same for all, else (n, K)."""
        if len(self._tables) == 1:
            return self._tables[0]
        return tuple(self._tables[k] for k in self._which.tolist())

    @property
    def budget(self) -> torch.Tensor:
        """What each example may spend, (n,) int64, a copy."""
        return self._budget.clone()

    @property
    def spent(self) -> torch.Tensor:
        """What each example has spent, (n,) int64, a copy."""
        return self._spent.clone()

    @property
    def active(self) -> torch.Tensor:
        """Which examples can still afford some level, (n,) booleans."""
        return self._budget - self._spent >= self._least_costs

    def levels_for(self, norms: Array) -> torch.Tensor:
        """The norms to which the next block must clip, (n,) float64: the least level above each
        norm, or the largest below that is affordable; 0 for norms of 0 and for examples with
        nothing left. Charges nothing.

        Args:
            norms: (n,) gradient norms, at least 0, before clipping.

        Raises:
            ValueError: norms of another shape, or below 0.
        """
        return self._norms[self._payable(self._checked_norms(norms))]

    def record(self, levels: Array, steps: int) -> None:
        """Charge `steps` steps in which gradients were clipped to `levels`, (n,), as `levels_for`
        gave them. A block that is begun is charged in full. Where they lie on a GPU, this waits for
        it.

        Raises:
            ValueError: levels that are none, or that some example cannot afford; nothing is
                recorded then.
        """
        blocks = -(-_checks.whole_number("steps", steps, 1) // self.block)
        levels = _checks.tensor("levels", levels, torch.float64).to(self.device)
        if levels.shape != (self.n,):
            raise ValueError(f"levels must have shape ({self.n},), got {tuple(levels.shape)}")
        index = (levels[:, None] - self._norms).abs().argmin(dim=1)
        wrong = ~((levels - self._norms[index]).abs() <= 1e-6 * self._norms[index])
        if wrong.any():
            raise ValueError(
                f"levels must be 0 or among {self._norms[1:].tolist()}, got "
                f"{float(levels[wrong][0]):g}"
            )
        # By division: 64 bits could wrap around. No budget pays for more blocks than 2^53.
        blocks = min(blocks, 2**53 + 1)
        lacking = self._cost_of(index) > (self._budget - self._spent) // blocks
        if bool(lacking.any()):
            raise ValueError(
                f"levels must be affordable for every example for {blocks} block(s) (see "
                f"levels_for), but {int(lacking.sum())} cannot afford them"
            )
        self._pay(index, blocks)

    def clip_norms(self, norms: Array) -> torch.Tensor:
        """The norms to which the next step must clip, (n,) float64, charged: where a block begins,
        by `norms` as in `levels_for`; within one they stay.

        Where filter and norms are on a GPU nothing here waits for it, nor in `levels_for`: norms
        that are refused count as infinite, and are found when `epsilon` or `state_dict` is asked
        for.
        """
        norms = self._checked_norms(norms)  # those that a block does not ask for, too
        if not self._steps_left:
            index = self._payable(norms)
            self._pay(index, 1)  # as `_payable` found that all can
            self._current, self._limits, self._steps_left = index, None, self.block
        self._steps_left -= 1
        if self._limits is None:
            self._limits = self._norms[self._current]
        return self._limits.clone()  # what a caller does to it must not move the next step's

    def epsilon(self, delta: float, *, spent: Array | None = None) -> torch.Tensor:
        """Each example's promised epsilon at `delta`: (n,) float64, within a relative 1e-3.

        It is promised before the run, whatever the run will spend.

        Args:
            delta: in (0, 1).
            spent: a threshold fixed before the run: then what holds for all events in which the
                example spends at most that.
        """
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        self._check_nothing_refused()
        budgets = self._budget
        if spent is not None:
            budgets = budgets.clamp(max=_checks.whole_number("spent", spent, 0))
        pairs, which = torch.stack([self._which, budgets.cpu()], dim=1).unique(
            dim=0, return_inverse=True
        )
        promised = [
            self._epsilon_of(self._tables[table], budget, delta) for table, budget in pairs.tolist()
        ]
        return torch.tensor(promised, dtype=torch.float64)[which].to(self.device)

    def _epsilon_of(self, costs, budget, delta):
        target_delta, epsilon = self._targets.get((costs, budget), (None, None))
        if delta == target_delta:
            return epsilon
        return epsilon_of_budget(
            delta,
            self.sample_rate,
            self.noise_multiplier,
            self.levels,
            costs,
            budget,
            self.block,
            self._progress,
        )

    def _payable(self, norms):
        wanted = torch.searchsorted(self._norms, norms).clamp(max=len(self.levels))
        left = self._budget - self._spent
        # Mostly every example can pay. On an accelerator asking takes longer than to look for what
        # each can pay.
        if not self._deferred.away(wanted) and bool((self._cost_of(wanted) <= left).all()):
            return wanted
        places = torch.arange(len(self._norms), device=self.device)
        fits = (self._costs <= left[:, None]) & (places <= wanted[:, None])
        return torch.where(fits, places, 0).amax(dim=1)

    def _cost_of(self, index):
        return self._costs.gather(1, index[:, None])[:, 0]

    def _pay(self, index, blocks):
        self._spent = self._spent + self._cost_of(index) * blocks

    def state_dict(self) -> State:
        """Budgets, what was spent, and the levels of a block that is under way."""
        self._check_nothing_refused()
        return {
            "parameters": self._parameters(),
            "budget": self._budget.cpu().clone(),
            "spent": self._spent.cpu().clone(),
            "current": self._current.cpu().clone(),
            "steps_left": self._steps_left,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict` of the same parameters and budgets; ValueError otherwise."""
        self._check_parameters(state)
        tensors = {
            name: _checks.tensor_entry(state, name) for name in ("budget", "spent", "current")
        }
        for name, value in tensors.items():
            if value.shape != (self.n,) or value.dtype != torch.int64:
                raise ValueError(
                    f"state must hold {self.n} whole numbers as {name}, got {tuple(value.shape)} "
                    f"of {value.dtype}"
                )
        if not torch.equal(tensors["budget"].to(self.device), self._budget):
            raise ValueError("state must be of a filter with the same budgets, got others")
        steps_left = _checks.whole_number(
            "steps_left", _checks.entry(state, "steps_left"), 0, self.block - 1
        )
        if not bool(((tensors["spent"] >= 0) & (tensors["spent"] <= tensors["budget"])).all()):
            raise ValueError("state must hold spent budgets between 0 and the whole, got others")
        _checks.in_interval("current", tensors["current"], 0, len(self.levels))
        if bool((tensors["spent"] < self._cost_of(tensors["current"].to(self.device)).cpu()).any()):
            raise ValueError(
                "state must hold spent budgets that cover the cost of the current levels, got less"
            )
        self._spent, self._current = (
            tensors[name].to(self.device).clone() for name in ("spent", "current")
        )
        self._limits, self._steps_left = None, steps_left

    def _parameters(self):
        return super()._parameters() | {
            "levels": list(self.levels),
            "costs": [list(self._tables[k]) for k in self._which.tolist()]
            if len(self._tables) > 1
            else list(self._tables[0]),
            "block": self.block,
        }
