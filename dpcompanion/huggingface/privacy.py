"""What is promised to whom: `PersonalPrivacy`, and the plan that keeps it.

>>> privacy = PersonalPrivacy(budgets={1.0: 0.5, 3.0: 0.5}, delta=1e-5)
>>> privacy.method, privacy.unit
('sample', 'example')
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.filters import ExactFilter
from dpcompanion.mechanism.plan import METHODS
from dpcompanion.training import DPSGDPlan, Track
from dpcompanion.training.people import COMBINED


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalPrivacy:
    """Whose budgets a `PersonalTrainer` keeps, and how.

    Args:
        budgets: epsilons: one number for all; the name of a column of the training data, with one
            number a person; an array with one number a person, in the order of
            `PersonalTrainer.persons`, or with people a pandas Series by name; or {budget: share},
            dealt out by a fixed permutation. They must not depend on the data.
        delta: at which they are meant, well below one over the number of persons.
        people: the name of the column that says whose each row is, or an array of as many entries;
            None if every row is a person.
        at_most: with people, how many rows of a person enter a step at most
            (`dpcompanion.training.by_person`).
        combine: "mean" or "sum", what a person's loss is of those of their rows.
        method: how several budgets are kept: "sample" (a larger budget is sampled more often) or
            "scale" (it has a larger clip norm).
        filter: None; "exact", an `ExactFilter` that keeps each budget however long the run is; or a
            function (plan, budgets) -> filter. It charges persons for their own gradients, at one
            rate for all, with the noise that `noise_multiplier` says.
        noise_multiplier: with a filter, and then only.
        track: None, or a `dpcompanion.training.Track`, such as ``Track(clipping="individual")``,
            for an account of each person's own gradients; with a filter there is one in any case,
            by one pass an epoch.
        accountant: "pld" or "rdp".
        unit: what a person is called in statements, such as "patient"; "person" by default,
            "example" without people.
        seed: None for a model that is released: draws and noise come from ciphers with secret keys.
            A whole number for research: anyone who knows it can subtract the noise.
        loss: (outputs, batch) -> (rows,), in place of `per_example_loss`: of what the model
            returns, and of the batch, a mapping.
        expected_batch_size: the divisor of the noisy sum, a public constant; by default the sum of
            the rates. Rates are made from the number of persons, which is public ("zero-out").

    Raises:
        ValueError: naming the argument, if one is out of its range, or if they contradict each
            other.
    """

    budgets: Any
    delta: float
    people: Any = None
    at_most: int = 8
    combine: str = "mean"
    method: str = "sample"
    filter: Any = None
    noise_multiplier: float | None = None
    track: Track | None = None
    accountant: str = "pld"
    unit: str | None = None
    seed: int | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    expected_batch_size: float | None = None

    def __post_init__(self):
        _checks.number("delta", self.delta, 0, 1, closed="neither")
        _checks.whole_number("at_most", self.at_most, 1)
        _checks.one_of("combine", self.combine, COMBINED)
        _checks.one_of("method", self.method, METHODS)
        if self.filter is not None and self.filter != "exact" and not callable(self.filter):
            raise ValueError(
                "filter must be None, 'exact' or a function of plan and budgets, got "
                f"{self.filter!r}"
            )
        if (self.filter is None) != (self.noise_multiplier is None):
            raise ValueError(
                "noise_multiplier must be given with a filter, and only then, got "
                f"noise_multiplier={self.noise_multiplier!r} and filter={self.filter!r}"
            )
        if self.noise_multiplier is not None:
            _checks.number("noise_multiplier", self.noise_multiplier, 0, math.inf, closed="neither")
        if self.track is not None and not isinstance(self.track, Track):
            raise ValueError(f"track must be Track(clipping=..., ...), got {self.track!r}")
        if self.unit is None:
            object.__setattr__(self, "unit", "example" if self.people is None else "person")

    def plan(
        self, budgets: Any, *, n: int, batch_size: float, steps: int, max_grad_norm: float
    ) -> DPSGDPlan:
        """The plan of a run of n persons, `batch_size` of whom are expected in each of the steps.

        Args:
            budgets: a number, (n,), or {budget: share}.
            n, batch_size, steps, max_grad_norm: of the run.
        """
        run: dict[str, Any] = dict(
            n=n,
            sample_rate=min(1.0, batch_size / n),
            steps=steps,
            max_grad_norm=max_grad_norm,
            delta=self.delta,
            accountant=self.accountant,
            expected_batch_size=self.expected_batch_size,
            relation="zero-out",
            unit=self.unit,
        )
        if self.noise_multiplier is not None:
            return DPSGDPlan(noise_multiplier=self.noise_multiplier, **run)
        if _checks.is_number(budgets):
            return DPSGDPlan.for_epsilon(float(budgets), **run)
        return DPSGDPlan.for_epsilons(budgets, method=self.method, **run)

    def filter_of(self, plan: DPSGDPlan, budgets: Array | float) -> Any:
        """The filter of a run, or None."""
        if self.filter is None:
            return None
        if callable(self.filter):
            return self.filter(plan, budgets)
        return ExactFilter.for_plan(plan, budgets, block=1, progress=False)
