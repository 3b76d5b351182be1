"""What each step clips to and costs: parameters fixed beforehand, or a filter that is asked."""

import dataclasses

import torch

from dpcompanion import _checks, accounting
from dpcompanion._norms import raised
from dpcompanion._rounding import epsilons_in_words
from dpcompanion.idp.parameters import rdp_epsilons
from dpcompanion.mechanism.plan import STOPPED_EARLY, DPSGDPlan


class FixedBudgets:
    """A plan whose rates, clip norms and noise use up budgets in its steps.

    Args:
        plan: of the whole run.
        noises: (n,) float64, over each example's own clip norm, as they were calibrated: the plan's
            are the same up to rounding.
        budgets: (n,) epsilons at the plan's delta after its steps.
    """

    _DIFFERENT = 256

    def __init__(self, plan, noises, budgets):
        self._plan, self.planned, self.n = plan, plan.steps, plan.n
        # Its own tensors: what is shown elsewhere may be written to.
        self._rates, self._norms, self._noises, self._budgets = (
            torch.as_tensor(values, dtype=torch.float64).expand(plan.n).clone()
            for values in (plan.sample_rate, plan.max_grad_norm, noises, budgets)
        )

    def clip_norms(self):
        """(n,) norms that the present step clips to."""
        return self._norms

    def step_taken(self):
        """The step has been released."""

    def epsilons(self, steps, delta):
        """(n,) float64, upper bounds after so many steps."""
        pairs, which = torch.unique(
            torch.stack([self._rates, self._noises], dim=1), dim=0, return_inverse=True
        )
        if self._plan.accountant == "rdp" and len(pairs) > self._DIFFERENT:
            epsilons = rdp_epsilons(pairs[:, 0], pairs[:, 1], steps=steps, delta=delta)
        else:
            if len(pairs) > self._DIFFERENT:
                # Along rising budgets rates do not fall and noise does not rise, so the next node
                # has no less epsilon.
                order = torch.argsort(self._budgets)
                ends = (
                    torch.linspace(0, len(order) - 1, self._DIFFERENT + 1, dtype=torch.float64)
                    .ceil()
                    .long()[1:]
                )
                node = torch.searchsorted(ends, torch.arange(len(order)))
                top = torch.stack(
                    [self._rates[order].cummax(0).values, self._noises[order].cummin(0).values],
                    dim=1,
                )
                pairs, which = top[ends], torch.empty_like(order)
                which[order] = node
            epsilons = torch.tensor(
                [
                    accounting.compute_epsilon(
                        sample_rate=rate,
                        noise_multiplier=noise,
                        steps=steps,
                        delta=delta,
                        accountant=self._plan.accountant,
                    )
                    for rate, noise in pairs.tolist()
                ],
                dtype=torch.float64,
            )
        epsilons = epsilons[which]
        if steps <= self.planned and delta >= self._plan.delta:
            epsilons = torch.minimum(epsilons, self._budgets)
        return epsilons

    def statement(self, steps):
        """What the epsilons are about: so many steps, or before the first all that are planned."""
        return self._plan.statement(steps=steps or None)

    def promise(self, steps):
        """The epsilons of `statement`, in words, and of a run that stops early those that hold
        whatever stopped it: no larger than the budgets, by calibration.
        """
        planned = epsilons_in_words(self._budgets)
        if steps in (0, self.planned):
            return f"Epsilon at most {planned}."
        found = epsilons_in_words(self.epsilons(steps, self._plan.delta))
        return f"Epsilon at most {found}. {STOPPED_EARLY.format(planned=planned)}"

    def ledger_entry(self, steps, delta):
        """What the run counts as in a ledger."""
        return self._plan.ledger_entry(delta)

    def parameters(self):
        """What must be the same in a run that goes on."""
        return {
            "rates": self._rates,
            "noises": self._noises,
            "norms": self._norms,
            "budgets": self._budgets,
            "target_delta": self._plan.delta,
            "planned": self.planned,
            "by": self._plan.accountant,
        }

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class FilteredBudgets:
    """A filter that charges every example for each step, at its gradient's norm as last measured.

    The norms of a step are charged when its first gradients are clipped. They hold until a step is
    released: a draw that is left half way is charged once.

    Args:
        filter: an `ExactFilter` or `RenyiFilter`.
        measure: called, it gives the (n,) norms at the present weights.
        every: how many steps they serve.
        planned: the number of steps.
        unit: what one of the n is called.
    """

    def __init__(self, filter, measure, *, every, planned, unit="example"):
        self._filter, self.measure, self._every, self.planned = filter, measure, every, planned
        self._measured, self._served, self._paid, self.n, self._unit = None, 0, None, filter.n, unit

    def clip_norms(self):
        """(n,) norms that the present step clips to; asked for the first time, they are charged."""
        if self._paid is None:
            if self._measured is None or self._served >= self._every:
                self._measured, self._served = self._bounded(self.measure()), 0
            self._paid = self._filter.clip_norms(self._measured).cpu()
        return self._paid

    def _bounded(self, norms):
        """Norms, one for each example, as `raised` makes them."""
        norms = torch.as_tensor(norms)
        if norms.shape != (self._filter.n,):
            raise ValueError(
                f"norms must give shape ({self._filter.n},), one for each example, got "
                f"{tuple(norms.shape)}"
            )
        return raised(norms, self._filter.max_grad_norm, self._filter.device)

    def step_taken(self):
        self._paid, self._served = None, self._served + 1

    def epsilons(self, steps, delta):
        return self._filter.epsilon(delta).cpu()

    def statement(self, steps):
        plan = DPSGDPlan(
            n=self.n,
            sample_rate=self._filter.sample_rate,
            steps=max(steps, self.planned),
            max_grad_norm=self._filter.max_grad_norm,
            noise_multiplier=self._filter.noise_multiplier,
            delta=0.5 / self.n,  # unused: a filter promises an epsilon for each delta
            unit=self._unit,
        )
        mechanism = plan.mechanism_in_words(steps or self.planned)
        return f"{mechanism}; each {self._unit} is charged for its own gradient norms."

    def promise(self, steps):
        """What the filter promises whatever is spent, in words: at the delta that it was made for,
        if there is one.
        """
        delta = self._filter.target_delta
        at_each = "an epsilon at each delta, which get_epsilons(delta) gives"
        promised = (
            at_each
            if delta is None
            else f"epsilon {epsilons_in_words(self.epsilons(steps, delta))} at delta {delta:g}"
        )
        return f"By its filter ({type(self._filter).__name__}) it promised beforehand {promised}."

    def ledger_entry(self, steps, delta):
        return dataclasses.replace(
            self._filter.ledger_entry(delta), relation="zero-out", unit=self._unit
        )

    def parameters(self):
        return {"every": self._every, "planned": self.planned}

    def state_dict(self):
        return {
            "filter": self._filter.state_dict(),
            "measured": self._measured,
            "served": self._served,
            "paid": self._paid,
        }

    def load_state_dict(self, state):
        served, found = _checks.whole_number("served", state["served"], 0), {}
        for name, device in (("measured", self._filter.device), ("paid", "cpu")):
            value = state[name]
            if value is not None:
                value = torch.as_tensor(value, dtype=torch.float64).to(device)
                if value.shape != (self.n,):
                    raise ValueError(
                        f"{name} must have shape ({self.n},), got {tuple(value.shape)}"
                    )
                _checks.in_interval(name, value, 0, self._filter.max_grad_norm)
            found[name] = value
        self._filter.load_state_dict(state["filter"])
        self._measured, self._paid, self._served = found["measured"], found["paid"], served
