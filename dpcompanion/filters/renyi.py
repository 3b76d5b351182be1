r"""A budget for each example that no run can exceed: the Rényi filter (Feldman and Zrnic 2021).

Accounts along a trajectory (`individual`) are known only afterwards and differ from run to run. A
filter turns them round: example i has a budget beforehand, each step is charged what its own
gradient costs, and i leaves for good before the step that it cannot afford. Examples with small
gradients stay longer.

What is proved. Fix an order :math:`\alpha` and a budget B. If step t, given the outputs before it,
has individual Rényi divergence :math:`\rho_t(i)` for example i, known before the step, and i takes
part only while :math:`\sum_{s \le t} \rho_s(i) \le B`, then all outputs together have divergence of
order :math:`\alpha` at most B between any data set with i and the same without it (their theorem
3.1: adaptive divergences add up as long as their sum is bounded). Here :math:`\rho_t(i)` is that of
the sampled Gaussian mechanism with sensitivity the norm to which i is clipped at step t: a function
of i and of the models so far, and of nothing else. Full-batch gradient descent (sample_rate 1) and
Poisson sampling are covered alike; a norm that depends on who was sampled before is not.

* One order, fixed beforehand, gives (epsilon, delta) by the usual conversion at that order:
  `for_epsilon` takes the one that admits the most steps at the full norm.
* A whole curve: with a budget at each of several orders, i leaves when any of them would be
  exceeded, so every one holds, and epsilon may be read off at the best order afterwards. The
  budgets must be fixed beforehand.
* Not proved, and not offered: leaving when the epsilon of the best order so far exceeds a target.
  The best order depends on the outputs, and the theorem is for one order at a time.

The guarantee is the budget, for every data set and run (individual DP, add/remove; others' budgets
may differ). What an example has `spent` is an account along the trajectory, as private as the
example. So is the list of those who have left.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Device, State
from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.accounting.rdp_interpolation import interpolate, interpolation_table
from dpcompanion.accounting.runs import orders_for
from dpcompanion.filters.base import PrivacyFilter

if TYPE_CHECKING:
    from dpcompanion.mechanism.plan import DPSGDPlan


class RenyiFilter(PrivacyFilter):
    """Budgets of n examples at K orders; see the module's text.

    A filter serves one run: what it has spent is spent for the next run, too.

    Args:
        n: number of examples.
        sample_rate: in (0, 1]; 1 for full-batch gradient descent.
        noise_multiplier: noise over `max_grad_norm`, above 0.
        max_grad_norm: the longest norm that may be admitted, above 0.
        orders: (K,) distinct orders above 1, fixed before the run.
        budgets: Rényi divergences (nats) above 0 that broadcast to (n, K); inf for no limit at an
            order, but each example has one that is finite.
        device: where the account is kept; norms may come from anywhere.

    Raises:
        ValueError: an argument outside its range, or a fractional order at which the divergence is
            not convex in the squared norm (none is known).

    >>> filter = RenyiFilter.for_epsilon(
    ...     3,
    ...     target_epsilons=2.0,
    ...     target_delta=1e-5,
    ...     sample_rate=0.01,
    ...     noise_multiplier=1.0,
    ...     max_grad_norm=1.0,
    ... )
    >>> steps = sum(filter.admit(torch.tensor([1.0, 0.5, 0.0])) for _ in range(1000))
    >>> steps.tolist(), filter.active.tolist(), float(filter.epsilon(1e-5)[0]) <= 2
    ([881, 1000, 1000], [False, True, True], True)
    """

    def __init__(
        self,
        n: int,
        *,
        sample_rate: float,
        noise_multiplier: float,
        max_grad_norm: float,
        orders: Array,
        budgets: Array,
        device: Device = None,
    ):
        super().__init__(
            n,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            device=device,
        )
        orders, budgets = _checks.unlabelled(orders), _checks.in_order("budgets", budgets)
        _checks.in_interval("orders", orders, 1, math.inf, closed="neither")
        orders = torch.as_tensor(orders, dtype=torch.float64, device="cpu").reshape(-1)
        if len(orders.unique()) != len(orders) or not len(orders):
            raise ValueError(f"orders must be distinct and one at least, got {orders.tolist()}")
        _checks.in_interval("budgets", budgets, 0, math.inf, closed="right")
        budgets = torch.as_tensor(budgets, dtype=torch.float64, device=self.device)
        try:
            budgets = budgets.expand(self.n, len(orders)).clone()
        except RuntimeError:
            raise ValueError(
                f"budgets must broadcast to ({self.n}, {len(orders)}), got {tuple(budgets.shape)}"
            ) from None
        if not bool(budgets.isfinite().any(dim=1).all()):
            raise ValueError(
                "budgets must be finite at one order at least for each example, got inf at all"
            )
        orders, place = orders.sort()
        served, table = interpolation_table(
            self.sample_rate, self.noise_multiplier, tuple(orders.tolist())
        )
        if len(served) != len(orders):
            raise ValueError(
                "orders must be ones at which the divergence is convex in the squared norm, such "
                f"as whole numbers, got {sorted(set(orders.tolist()) - set(served.tolist()))}"
            )
        self._table = table.to(self.device)
        self._orders, self._budgets = orders.to(self.device), budgets[:, place.to(self.device)]
        self._spent = torch.zeros_like(self._budgets)
        self._active = torch.ones(self.n, dtype=torch.bool, device=self.device)

    # Copies: nobody gets a budget back by what a caller does to them.

    @property
    def orders(self) -> torch.Tensor:
        """The orders, ascending, (K,)."""
        return self._orders.clone()

    @property
    def budgets(self) -> torch.Tensor:
        """What each example may spend at each order, (n, K), a copy."""
        return self._budgets.clone()

    @property
    def spent(self) -> torch.Tensor:
        """What each example has spent, (n, K), a copy."""
        return self._spent.clone()

    @property
    def active(self) -> torch.Tensor:
        """Whether an example still takes part, (n,) booleans, a copy."""
        return self._active.clone()

    @classmethod
    def for_epsilon(
        cls,
        n: int,
        *,
        target_epsilons: Array,
        target_delta: float,
        sample_rate: float,
        noise_multiplier: float,
        max_grad_norm: float,
        order: float | None = None,
        device: Device = None,
    ) -> "RenyiFilter":
        """A filter that holds every example to its epsilon at `target_delta`.

        Args:
            n: number of examples.
            target_epsilons: a number above 0 or one for each example, (n,).
            target_delta: in (0, 1).
            sample_rate: in (0, 1]; 1 for full-batch gradient descent.
            noise_multiplier: noise over `max_grad_norm`, above 0.
            max_grad_norm: the longest norm that may be admitted, above 0.
            order: at which to keep the budgets, above 1. By default each distinct target has its
                own, the one that admits the most steps at the full norm; a higher one may suit
                examples with short gradients better.
            device: where the account is kept; norms may come from anywhere.

        The conversion is that of Balle et al. 2020.

        Raises:
            ValueError: an argument outside its range, or a target below what the conversion alone
                costs at every order.
        """
        n = _checks.whole_number("n", n, 1, _checks.MOST_EXAMPLES)
        sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        noise_multiplier = _checks.number(
            "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
        )
        target_epsilons = _checks.in_order("target_epsilons", target_epsilons)
        _checks.in_interval("target_epsilons", target_epsilons, 0, math.inf, closed="neither")
        delta = _checks.number("target_delta", target_delta, 0, 1, closed="neither")
        targets = torch.as_tensor(target_epsilons, dtype=torch.float64, device="cpu")
        if targets.shape not in ((), (n,)):
            raise ValueError(
                f"target_epsilons must be a number or have shape ({n},), got {tuple(targets.shape)}"
            )
        usual = torch.tensor(
            orders_for(noise_multiplier)
            if order is None
            else [_checks.number("order", order, 1, math.inf, closed="neither")],
            dtype=torch.float64,
        )
        cost = rdp_sampled_gaussian(
            sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=usual
        )
        overhead = torch.log1p(-1 / usual) - (math.log(delta) + usual.log()) / (usual - 1)
        distinct, which = targets.reshape(-1).unique(return_inverse=True)
        room = distinct[:, None] - overhead
        budget = room.gather(1, (room / cost).argmax(dim=1, keepdim=True))
        best = (room / cost).argmax(dim=1)
        if bool((budget <= 0).any()):
            raise ValueError(
                f"target_epsilons must leave room for a step at some order, got {distinct[0]:g} at "
                f"delta {delta:g}"
            )
        chosen, column = best.unique(return_inverse=True)
        budgets = torch.full((len(distinct), len(chosen)), math.inf, dtype=torch.float64)
        budgets.scatter_(1, column[:, None], budget * (1 - 1e-12))
        made = cls(
            n,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            orders=usual[chosen],
            budgets=budgets[which],
            device=device,
        )
        made.target_delta = delta
        return made

    @classmethod
    def for_plan(
        cls,
        plan: "DPSGDPlan",
        target_epsilons: Array | float | Mapping[float, float],
        *,
        order: float | None = None,
        device: Device = None,
    ) -> "RenyiFilter":
        """The filter of a run of a `DPSGDPlan` with one rate and one clip norm for all.

        Args:
            plan: it gives the number of examples, rate, noise, clip norm and delta.
            target_epsilons: what is promised at the plan's delta: one number, one for each example,
                (n,), or {budget: share} (`idp.budgets_for`).
            order, device: as in `for_epsilon`.

        Raises:
            ValueError: as `for_epsilon`, and for a plan with rates or clip norms for each example,
                without noise, or with arithmetic="float".

        >>> from dpcompanion.training import DPSGDPlan
        >>> plan = DPSGDPlan(
        ...     n=4, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
        ... )
        >>> bool((RenyiFilter.for_plan(plan, 2.0).epsilon(1e-5) <= 2.0).all())
        True
        """
        return cls.for_epsilon(
            plan.n,
            **plan.uniform_parameters(),
            target_epsilons=plan.budgets(target_epsilons),
            target_delta=plan.delta,
            order=order,
            device=device,
        )._about(plan)

    def admit(self, norms: Array) -> torch.Tensor:
        """Which examples take part in the next step, and are charged for it: (n,) booleans.

        Args:
            norms: (n,), from 0 to `max_grad_norm`: the lengths to which gradients will be clipped
                in this step.

        Where filter and norms are on a GPU nothing here waits for it: whose norm is refused leaves,
        and that it was is found when `epsilon` or `state_dict` is asked for.

        Raises:
            ValueError: norms of another shape or outside their range.
        """
        return self._admit(self._in_range(norms))

    def _in_range(self, norms):
        # A norm that was clipped to C may come a little above it where fewer digits are kept; it
        # pays the full share.
        kind = str(getattr(norms, "dtype", "")).removeprefix("torch.")  # PyTorch's or NumPy's
        slack = 1e-6 if kind == "float32" else 1e-12
        return self._checked_norms(norms, self.max_grad_norm, slack)

    def _admit(self, norms):
        after = self._spent + interpolate((norms / self.max_grad_norm).clamp(max=1), self._table)
        # An infinite norm is one that was refused without a look at it: what clips to it would not
        # keep the promise.
        self._active = self._active & norms.isfinite() & (after <= self._budgets).all(dim=1)
        self._spent = torch.where(self._active[:, None], after, self._spent)
        return self._active.clone()  # nobody comes back by what a caller does to it

    def clip_norms(self, norms: Array) -> torch.Tensor:
        """The norms to which the next step must clip, charged, (n,) float64: those of `admit`, 0
        for who takes no part.
        """
        norms = self._in_range(norms)
        return torch.where(self._admit(norms), norms.clamp(max=self.max_grad_norm), 0)

    def epsilon(self, delta: float) -> torch.Tensor:
        """The epsilon that each example's budgets guarantee at `delta`, (n,) float64.

        It holds whatever happens in the run.
        """
        _checks.in_interval("delta", delta, 0, 1, closed="neither")
        self._check_nothing_refused()
        return rdp_to_epsilon(self._budgets.clamp(max=1e30), self._orders, delta)[0]

    def state_dict(self) -> State:
        """Budgets, what was spent, and who takes part."""
        self._check_nothing_refused()
        return {
            "parameters": self._parameters(),
            "budgets": self._budgets.clone(),
            "spent": self._spent.clone(),
            "active": self._active.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict` of a filter with the same parameters and budgets.

        Raises:
            ValueError: naming what differs, or what cannot be: an example that has spent less than
                0 or more than its budget.
        """
        self._check_parameters(state)
        budgets, spent, active = (
            _checks.tensor_entry(state, name).to(self.device)
            for name in ("budgets", "spent", "active")
        )
        if not torch.equal(budgets, self._budgets):
            raise ValueError("state must be of a filter with the same budgets, got others")
        if spent.shape != self._budgets.shape or spent.dtype != torch.float64:
            raise ValueError(
                f"state must hold spent of {tuple(self._budgets.shape)} {torch.float64}, "
                f"got {tuple(spent.shape)} {spent.dtype}"
            )
        if active.shape != (self.n,) or active.dtype != torch.bool:
            raise ValueError(
                f"state must hold active of ({self.n},) {torch.bool}, got {tuple(active.shape)} "
                f"{active.dtype}"
            )
        possible = (spent >= 0) & (spent <= self._budgets) & spent.isfinite()
        if not bool(possible.all()):
            raise ValueError(
                f"state must hold spent from 0 to the budget, got {float(spent[~possible][0]):g}"
            )
        self._spent, self._active = spent.clone(), active.clone()

    def _parameters(self):
        return super()._parameters() | {"orders": self._orders.tolist()}
