"""What the steps that were taken cost each example; Opacus's checkpoints save and load it."""

import math
import warnings

import torch
from opacus.accountants.accountant import IAccountant

from .. import _checks, accounting
from ..idp.parameters import rdp_epsilons
from .randomness import restore, states


class Accountant(IAccountant):
    """Steps taken, and what they cost each example; Opacus's checkpoints save and load it."""

    _DIFFERENT = 256

    def __init__(self, by):
        self.by, self.steps, self.planned = by, 0, None
        self._parameters = None
        #: Called, it gives what noise and draws come from, by name.
        self.generators = dict
        #: The optimizer whose steps count.
        self.follower = None
        self.voided = False

    def plan(self, rates, noises, budgets, target_delta, steps):
        self._parameters = {"rates": rates, "noises": noises, "budgets": budgets, "target_delta": target_delta,
                            "planned": steps}
        self.planned = steps

    def step(self, *, noise_multiplier=None, sample_rate=None):
        self.steps += 1

    def void(self, reason):
        """From now on no epsilon is a bound."""
        if not self.voided:
            warnings.warn(f"{reason}. No budget is kept, and every epsilon is infinite", RuntimeWarning, stacklevel=5)
        self.voided = True

    def check_budget(self):
        if self.steps >= self.planned:
            raise RuntimeError(f"the budgets are spent: they were made for {self.planned} steps, which have been taken")

    def get_epsilons(self, delta):
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        if self._parameters is None:
            raise ValueError("there are no budgets yet: call make_private_with_budgets first")
        rates, noises, budgets = (self._parameters[name] for name in ("rates", "noises", "budgets"))
        if self.steps == 0:
            return torch.zeros_like(budgets)
        if self.voided:
            return torch.full_like(budgets, math.inf)
        pairs, which = torch.unique(torch.stack([rates, noises], dim=1), dim=0, return_inverse=True)
        if self.by == "rdp" and len(pairs) > self._DIFFERENT:
            epsilons = rdp_epsilons(pairs[:, 0], pairs[:, 1], steps=self.steps, delta=delta)
        else:
            if len(pairs) > self._DIFFERENT:
                # Along rising budgets rates do not fall and noise does not rise, so the next node has no less epsilon.
                order = torch.argsort(budgets)
                ends = torch.linspace(0, len(order) - 1, self._DIFFERENT + 1, dtype=torch.float64).ceil().long()[1:]
                node = torch.searchsorted(ends, torch.arange(len(order)))
                top = torch.stack([rates[order].cummax(0).values, noises[order].cummin(0).values], dim=1)
                pairs, which = top[ends], torch.empty_like(order)
                which[order] = node
            run = {"steps": self.steps, "delta": delta, "accountant": self.by}
            epsilons = torch.tensor([accounting.compute_epsilon(sample_rate=rate, noise_multiplier=noise, **run)
                                     for rate, noise in pairs.tolist()], dtype=torch.float64)
        epsilons = epsilons[which]
        if self.steps <= self.planned and delta >= self._parameters["target_delta"]:
            epsilons = torch.minimum(epsilons, budgets)
        return epsilons

    def get_epsilon(self, delta, **_):
        return float(self.get_epsilons(delta).max())

    def __len__(self):
        return self.steps

    @classmethod
    def mechanism(cls):
        return "individualized"

    def state_dict(self, destination=None):
        state = {} if destination is None else destination
        state.update(mechanism=self.mechanism(), by=self.by, steps=self.steps, voided=self.voided,
                     parameters=self._parameters,
                     generators=states(self.generators()))
        return state

    def load_state_dict(self, state):
        if not state or state.get("mechanism") != self.mechanism():
            raise ValueError(f"state_dict must come from an IndividualizedPrivacyEngine, got {state!r:.80}")
        same = self._parameters is not None and state["by"] == self.by and all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(state["parameters"][name]).cpu())
            for name, value in self._parameters.items())
        if not same:
            raise ValueError("state_dict must come from a run with the same budgets, loader, epochs and accountant: "
                             "make the engine private in the same way before loading")
        if state["steps"] < self.steps:
            raise ValueError(f"state_dict must not be earlier than this run, which has taken {self.steps} steps that "
                             f"stay spent, got one of {state['steps']}")
        restore(self.generators(), state["generators"])
        self.steps, self.voided = state["steps"], self.voided or state["voided"]
