"""Steps that were taken; Opacus's checkpoints save and load them, with all it takes to go on."""

import dataclasses
import math
import warnings
from typing import Any

import torch
from opacus.accountants.accountant import IAccountant

from dpcompanion import _checks
from dpcompanion.engine.randomness import restore
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.seeds import SEEDED


class Accountant(IAccountant):
    """Steps taken, and what they cost each example by the budgets that were planned."""

    def __init__(self):
        self.steps = 0
        #: Those that the last call made, None before there are any.
        self.budgets: Any = None
        #: Called, it gives what noise and draws come from, by name.
        self.generators = dict
        #: The optimizer whose steps count.
        self.follower: Any = None
        self.voided = False
        #: Whether the caller's word was taken that the loop's loss is one example's each.
        self.trusts_loss = False
        #: By what noise repeats itself, in words; None where nobody can repeat it.
        self.origin = None
        #: Whether draws come from a generator of the loader's, whose seed others may know.
        self.draws_are_seeded = False

    @property
    def planned(self):
        """How many steps the budgets were made for; 0 before there are any."""
        return 0 if self.budgets is None else self.budgets.planned

    def step(self, *, noise_multiplier=None, sample_rate=None):
        self.steps += 1
        self.budgets.step_taken()

    def void(self, reason):
        """From now on no epsilon is a bound."""
        if not self.voided:
            warnings.warn(
                f"{reason}. No budget is kept, and every epsilon is infinite",
                RuntimeWarning,
                stacklevel=6,
            )
        self.voided = True

    def check_budget(self):
        if self.steps >= self.planned:
            raise RuntimeError(
                f"the budgets are spent: they were made for {self.planned} steps, which have been "
                "taken"
            )

    def look(self):
        """Say what of the steps so far was left unasked (`engine.optimizers.Following.look`)."""
        if self.follower is not None:
            self.follower.look()

    def _looked(self):
        """The budgets, once it is said what was left unasked."""
        self.look()
        if self.budgets is None:
            raise ValueError("there are no budgets yet: call make_private_with_budgets first")
        return self.budgets

    def statement(self):
        budgets = self._looked()
        said = [budgets.statement(self.steps)]
        if self.voided:
            said.append("Less noise was added than was accounted for: no epsilon holds.")
        else:
            said.append(budgets.promise(self.steps))
        if self.origin is not None:
            said.append(SEEDED)
        if self.draws_are_seeded:
            said.append(
                "The random batches came from the generator of the loader: for anyone who knows "
                "its seed, sampling amplifies nothing, and an example's epsilon is larger."
            )
        if self.trusts_loss:
            said.append(
                "It takes on trust that the loss of the training loop was made of losses of which "
                "each depends on one example; if one did not, no epsilon holds."
            )
        return " ".join(said)

    def ledger_entry(self, delta):
        budgets = self._looked()
        if self.voided:
            raise ValueError(
                "the engine must have added the noise that was accounted for, but added less: no "
                "epsilon holds"
            )
        stream = self.generators().get("sampling")
        return dataclasses.replace(
            budgets.ledger_entry(self.steps, delta),
            key_fingerprint=stream.fingerprint if isinstance(stream, SecureStream) else None,
            seeded=self.origin is not None,
        )

    def get_epsilons(self, delta):
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        self._looked()
        if self.steps == 0 or self.voided:
            return torch.full(
                (self.budgets.n,), math.inf if self.voided else 0.0, dtype=torch.float64
            )
        return self.budgets.epsilons(self.steps, delta)

    def get_epsilon(self, delta, **_):
        return float(self.get_epsilons(delta).max())

    def __len__(self):
        return self.steps

    @classmethod
    def mechanism(cls):
        return "individualized"

    def state_dict(self, destination=None):
        self.look()
        state = {} if destination is None else destination
        state.update(
            mechanism=self.mechanism(),
            steps=self.steps,
            voided=self.voided,
            kind=type(self.budgets).__name__,
            parameters=None if self.budgets is None else self.budgets.parameters(),
            budgets=None if self.budgets is None else self.budgets.state_dict(),
            generators={} if self.follower is None else self.follower.states(),
            origin=self.origin,
        )
        return state

    def load_state_dict(self, state):
        if not state or state.get("mechanism") != self.mechanism():
            raise ValueError(
                f"state_dict must come from an IndividualizedPrivacyEngine, got {state!r:.80}"
            )
        if (
            self.budgets is None
            or state["kind"] != type(self.budgets).__name__
            or not self._same(state["parameters"])
        ):
            raise ValueError(
                "state_dict must come from a run with the same budgets, loader, epochs and "
                "accountant: make the engine private in the same way before loading"
            )
        steps = _checks.whole_number("steps", state["steps"], 0)
        if steps > self.planned:
            raise ValueError(
                f"state_dict must be of a run of at most the {self.planned} steps that the budgets "
                f"were made for, got one of {steps}"
            )
        if steps < self.steps:
            raise ValueError(
                f"state_dict must not be earlier than this run, which has taken {self.steps} steps "
                f"that stay spent, got one of {steps}"
            )
        if state.get("origin") != self.origin:
            raise ValueError(
                "generators must be given as in the run that was saved, whose noise came from "
                f"{state.get('origin') or 'no seed'}, got {self.origin or 'none'}"
            )
        if self.follower is not None:
            self.follower.rewind()
        restore(self.generators(), state["generators"])
        self.budgets.load_state_dict(state["budgets"])
        self.steps, self.voided = steps, self.voided or state["voided"]

    def _same(self, saved):
        own = self.budgets.parameters()
        return own.keys() == saved.keys() and all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(saved[name]).cpu())
            if torch.is_tensor(value)
            else value == saved[name]
            for name, value in own.items()
        )
