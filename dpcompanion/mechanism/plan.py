r"""One description of a DP-SGD run, from which everything else is made.

A step of DP-SGD (Abadi et al. 2016; for each example its own rate and norm, Boenisch et al. 2023)
takes example :math:`i` with probability :math:`q_i`, clips its gradient :math:`g_i` to length
:math:`C_i` and moves along

.. math::
    \frac{1}{\sum_i q_i}\Big(\sum_{i \in B} g_i \min(1, C_i/\lVert g_i\rVert)
    + \mathcal N(0, s^2 I)\Big), \qquad s = \sigma \cdot \operatorname{mean}_i C_i.

Sampler, clip norms, noise and account all come from the plan, so they cannot disagree.  The divisor
is the expected batch size, where the realised size would depend on the data.

Whom is the guarantee about?  The plan says it (`relation`), and `statement` says it in words:

* "zero-out", the default: neighbours have the same n, which is public, and one example's gradients
  are replaced by zero in one of them. The divisor is the sum of the rates, which is public since n
  is.
* "add-remove": neighbours differ by one example, so n is not public, and nothing that depends on n
  may show. The divisor would: the noise is divided by it too, and its scale alone tells n from n +
  1 after enough numbers have been seen (mu about
  :math:`\sqrt{2 \cdot \text{parameters} \cdot \text{steps}} / n`). So this relation asks for
  `expected_batch_size`, a constant chosen before the data were seen, as the rate and the number of
  steps are. For the same reason it takes one clip norm for all, because the noise is measured in
  their mean.

The numbers are the same for both: an example whose gradient is zero adds nothing to any sum, so
with the constants fixed a run with it and a run without it are the same run in distribution (the
names are those of Kairouz et al. 2021 and Ponomareva et al. 2023).

>>> plan = DPSGDPlan(
...     n=60_000,
...     sample_rate=512 / 60_000,
...     steps=9375,
...     max_grad_norm=1.0,
...     noise_multiplier=3.42529,
...     delta=1e-5,
... )
>>> plan.expected_batch_size
512.0
>>> round(plan.epsilon(accountant="rdp"), 4)
1.0036
>>> plan.accountant, round(plan.epsilon(), 4)
('pld', 0.9172)
>>> plan.relation
'zero-out'

With a clip norm for each example the noise stays one number, and the example with the smaller norm
is hidden better:

>>> plan = DPSGDPlan(
...     n=4,
...     sample_rate=0.1,
...     steps=100,
...     max_grad_norm=[0.5, 0.5, 1.5, 1.5],
...     noise_multiplier=2.0,
...     delta=1e-5,
... )
>>> plan.noise_std, plan.effective_noise_multiplier.tolist()
(2.0, [4.0, 4.0, 1.3333333333333333, 1.3333333333333333])
>>> epsilons = plan.epsilon()
>>> bool(epsilons[0] < epsilons[2])
True

A plan is JSON, without loss:

>>> DPSGDPlan.from_json(plan.to_json()) == plan
True
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import warnings
from typing import Any

import torch

from dpcompanion import _checks, _files
from dpcompanion._rounding import exactly
from dpcompanion._types import State
from dpcompanion.accounting import (
    ACCOUNTANTS,
    Guarantee,
    LedgerEntry,
    PersonalCosts,
    SampledGaussian,
    compute_epsilon,
    find_noise_multiplier,
)
from dpcompanion.accounting.items import check_no_delta
from dpcompanion.mechanism import floats
from dpcompanion.mechanism.noise import noisy
from dpcompanion.mechanism.sampling import PoissonSampler, steps_per_epoch
from dpcompanion.mechanism.secure import SecureStream

RELATIONS = ("zero-out", "add-remove")
#: How several budgets are kept: a larger one is sampled more often, or has a larger clip norm.
METHODS = ("sample", "scale")
#: What statements say of runs that took fewer steps than were planned.
STOPPED_EARLY = (
    "If what ended the run looked at the model, the epsilon of all planned steps holds, {planned}."
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DPSGDPlan:
    """What a run of DP-SGD does, and so what it costs.

    Args:
        n: number of examples.
        sample_rate: probability that an example enters a step; a number or one for each example,
            (n,), in (0, 1].
        steps: number of steps; for E epochs, E / sample_rate of them.
        max_grad_norm: length to which a gradient is clipped; a number or one for each example,
            (n,), above 0.
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, in units
            of the mean clip norm. 0 means no noise and no privacy.
        delta: the delta at which `epsilon` is reported. A UserWarning says where it is 1/n or more.
        expected_batch_size: the divisor of the noisy sum, a public constant above 0. By default the
            sum of the rates.
        relation: "zero-out" or "add-remove", see the module's text. By default "zero-out", and
            "add-remove" where `expected_batch_size` is given.
        arithmetic: "real", an account of real numbers, or "float", for a release: it counts the
            grid, the rounding of sums and the sampler (`dpcompanion.mechanism.floats`), and `train`
            then adds in float64 and takes no seed.
        parameters: for "float", how many trainable numbers the model has.
        accountant: "pld" or "rdp": by which the run is accounted for, here and in all that is made
            from the plan, so that the uniform epsilon and an example's stand side by side by the
            same accountant.
        unit: what one of the n examples is, in the singular: "example", or whose data they are,
            such as "patient" or "user", where all data of one make one example. It is a word of the
            statements and changes no number.

    Two plans are equal if all of these are, to the last bit.

    Raises:
        ValueError: naming the argument, if one is out of its range or an array is not of length n,
            and for "add-remove" without `expected_batch_size` or with a clip norm for each example.
    """

    n: int
    sample_rate: float | torch.Tensor
    steps: int
    max_grad_norm: float | torch.Tensor
    noise_multiplier: float
    delta: float
    expected_batch_size: float | None = None
    relation: str | None = None
    arithmetic: str = "real"
    parameters: int | None = None
    accountant: str = "pld"
    unit: str = "example"

    def __post_init__(self):
        def fix(name, value):
            object.__setattr__(self, name, value)

        _checks.one_of("accountant", self.accountant, ACCOUNTANTS)
        _checks.unit("unit", self.unit)
        fix("n", _checks.whole_number("n", self.n, 1))
        fix("steps", _checks.whole_number("steps", self.steps, 0))
        for name, high in (("sample_rate", 1.0), ("max_grad_norm", math.inf)):
            value = _checks.unlabelled(getattr(self, name))
            _checks.in_interval(name, value, 0, high, closed="right" if high == 1 else "neither")
            value = torch.as_tensor(value, dtype=torch.float64, device="cpu").clone()
            if value.shape not in ((), (self.n,)):
                raise ValueError(
                    f"{name} must be a number or have shape ({self.n},), got shape "
                    f"{tuple(value.shape)}"
                )
            fix(name, value if value.ndim else value.item())
        for name, high, closed in (("noise_multiplier", math.inf, "left"), ("delta", 1, "neither")):
            fix(name, _checks.number(name, getattr(self, name), 0, high, closed=closed))
        relation, given = _relation_and_divisor(self.relation, self.expected_batch_size)
        fix("relation", relation)
        if relation == "add-remove" and isinstance(self.max_grad_norm, torch.Tensor):
            raise ValueError(
                "max_grad_norm must be one number for relation='add-remove', got one for each "
                "example: the noise is measured in their mean, which depends on who takes part"
            )
        fix("parameters", _number_of_parameters(self.arithmetic, self.parameters))
        if self.arithmetic == "float" and not self.noise_multiplier:
            raise ValueError("noise_multiplier must be above 0 for arithmetic='float', got 0")
        if self.delta * self.n >= 1:
            warnings.warn(
                f"delta {self.delta:g} is not below 1/n = {1 / self.n:g}: to publish an example at "
                "random would be as private; take a delta well below 1/n",
                stacklevel=3,
            )
        rate = self.sample_rate
        fix(
            "expected_batch_size",
            given
            or _SumOfRates(rate.sum().item() if isinstance(rate, torch.Tensor) else self.n * rate),
        )

    @classmethod
    def for_epsilon(
        cls,
        target_epsilon: float,
        *,
        n: int,
        max_grad_norm: Any,
        delta: float,
        sample_rate: Any = None,
        steps: int | None = None,
        batch_size: float | None = None,
        epochs: float | None = None,
        expected_batch_size: float | None = None,
        relation: str | None = None,
        accountant: str = "pld",
        arithmetic: str = "real",
        parameters: int | None = None,
        unit: str = "example",
    ) -> "DPSGDPlan":
        """The plan with the least noise whose epsilon, by `accountant`, does not exceed
        `target_epsilon`, for one rate for all. It keeps the accountant.

        Many arguments, since a run can be described in epochs or steps, and batches or rates.

        Args:
            target_epsilon: above 0.
            n: number of examples.
            max_grad_norm: length to which a gradient is clipped; one number above 0.
            delta: at which the target is meant.
            sample_rate, steps: probability that an example enters a step, one number in (0, 1], and
                number of steps; or else
            batch_size, epochs: the mean size of a batch, in (0, n], and how often an example is
                sampled on average: the rate is batch_size / n, and epochs n / batch_size steps are
                taken, rounded, at least one.
            expected_batch_size: the divisor of the noisy sum, a public constant above 0; by default
                the sum of the rates.
            relation: "zero-out" or "add-remove", whom neighbours differ in; by default "zero-out",
                and "add-remove" where `expected_batch_size` is given with rate and steps. Rate and
                noise that are made from `batch_size` and n give n away, so they go with "zero-out".
            accountant: "pld" or "rdp".
            arithmetic: "real", an account of real numbers, or "float", for a release, which counts
                what floats do.
            parameters: for "float", how many trainable numbers the model has.
            unit: what an example is, as in `DPSGDPlan`.

        Raises:
            ValueError: naming the argument, if one is out of its range, is not one number for all
                examples, if no noise meets the target, or unless exactly one of the two pairs is
                given, in full.

        >>> plan = DPSGDPlan.for_epsilon(
        ...     2.0, n=1000, batch_size=50, epochs=10, max_grad_norm=1.0, delta=1e-5
        ... )
        >>> plan.sample_rate, plan.steps, 1.99 < plan.epsilon() <= 2.0
        (0.05, 200, True)
        """
        n, max_grad_norm, delta = _checked(n, max_grad_norm, delta, unit)
        if batch_size is not None:
            relation = _zero_out(relation, "the rate is batch_size / n")
        sample_rate, steps = _rate_and_steps(n, sample_rate, steps, batch_size, epochs)
        sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        if _checks.flat_doubles("target_epsilon", target_epsilon).size > 1:
            raise ValueError(
                "target_epsilon must be one number (for_epsilons takes one for each example), got "
                f"{target_epsilon!r:.80}"
            )
        _relation_and_divisor(relation, expected_batch_size)
        counted = _number_of_parameters(arithmetic, parameters)
        noise_multiplier = find_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=_left_of(delta, arithmetic),
            sample_rate=sample_rate,
            steps=steps,
            accountant=accountant,
        )
        if arithmetic == "float":
            noise_multiplier = floats.least_noise(
                noise_multiplier, max_grad_norm, n=n, parameters=counted
            )
        return cls(
            n=n,
            sample_rate=sample_rate,
            steps=steps,
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            delta=delta,
            expected_batch_size=expected_batch_size,
            relation=relation,
            arithmetic=arithmetic,
            parameters=counted,
            accountant=accountant,
            unit=unit,
        )

    @classmethod
    def for_epsilons(
        cls,
        target_epsilons: Any,
        *,
        n: int,
        max_grad_norm: float,
        delta: float,
        sample_rate: float | None = None,
        steps: int | None = None,
        batch_size: float | None = None,
        epochs: float | None = None,
        method: str = "sample",
        expected_batch_size: float | None = None,
        relation: str | None = None,
        accountant: str = "pld",
        arithmetic: str = "real",
        parameters: int | None = None,
        unit: str = "example",
    ) -> "DPSGDPlan":
        """The plan that spends each example's own budget (individualised DP, Boenisch et al. 2023).

        Many arguments, since a run can be described in epochs or steps, and batches or rates.

        Args:
            target_epsilons: one number, one for each example, (n,), or {budget: share}, whose
                shares add up to 1 and are dealt out by a fixed permutation (`idp.budgets_for`).
                Budgets must not depend on the data.
            n: number of examples.
            max_grad_norm: the mean of the examples' clip norms, above 0.
            delta: at which the targets are meant.
            sample_rate, steps: the mean of the examples' rates, in (0, 1], and the number of steps;
                or else
            batch_size, epochs: the mean size of a batch, in (0, n], and how often an example is
                sampled on average (over all of them), as in `for_epsilon`.
            method: "sample", which gives larger budgets a larger sample rate, or "scale", a larger
                clip norm.
            expected_batch_size, relation, accountant, arithmetic, parameters, unit: as in
                `for_epsilon`. Noise that is made from several budgets depends on how many examples
                have which, so they go with "zero-out".

        Raises:
            ValueError: an argument outside its range, budgets that the method cannot use up, or
                unless exactly one of the two pairs is given, in full.

        >>> plan = DPSGDPlan.for_epsilons(
        ...     {1.0: 0.5, 2.0: 0.5},
        ...     n=4,
        ...     sample_rate=0.05,
        ...     steps=200,
        ...     max_grad_norm=1.0,
        ...     delta=1e-5,
        ... )
        >>> plan.epsilon().round(decimals=2)
        tensor([2., 2., 1., 1.], dtype=torch.float64)
        """
        from dpcompanion.idp import budgets_for, sample_parameters, scale_parameters

        _checks.one_of("method", method, METHODS)
        n, max_grad_norm, delta = _checked(n, max_grad_norm, delta, unit)
        sample_rate, steps = _rate_and_steps(n, sample_rate, steps, batch_size, epochs)
        budgets, which, counts = budgets_for(target_epsilons, n).unique(
            return_inverse=True, return_counts=True
        )
        if batch_size is not None or len(budgets) > 1:
            relation = _zero_out(relation, "rates or noise are made from n or several budgets")
        _relation_and_divisor(relation, expected_batch_size)
        counted = _number_of_parameters(arithmetic, parameters)
        rates, norms = sample_rate, max_grad_norm
        run = {"sample_rate": sample_rate, "steps": steps, "accountant": accountant}
        run["target_delta"] = _left_of(delta, arithmetic)
        if method == "sample" or len(budgets) == 1:
            sampled = sample_parameters(budgets, counts, **run)
            noise_multiplier = sampled.noise_multiplier
            rates = sampled.sample_rates[which] if len(budgets) > 1 else sample_rate
        else:
            scaled = scale_parameters(budgets, counts, max_grad_norm=max_grad_norm, **run)
            noise_multiplier, norms = scaled.noise_multiplier, scaled.max_grad_norms[which]
        if arithmetic == "float":
            noise_multiplier = floats.least_noise(noise_multiplier, norms, n=n, parameters=counted)
        return cls(
            n=n,
            sample_rate=rates,
            steps=steps,
            max_grad_norm=norms,
            noise_multiplier=noise_multiplier,
            delta=delta,
            expected_batch_size=expected_batch_size,
            relation=relation,
            arithmetic=arithmetic,
            parameters=counted,
            accountant=accountant,
            unit=unit,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DPSGDPlan) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self.n, self.steps, self.noise_multiplier, self.delta, self.accountant))

    def _fields(self):
        """All fields as JSON values without loss: arrays as lists, a divisor not given as None."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.expected_batch_size, _SumOfRates):
            held["expected_batch_size"] = None
        return {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in held.items()
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as JSON, with the rate and clip norm of each example, written to `path` if one
        is given; `from_json` gives an equal plan back.
        """
        text = json.dumps({"plan": self._fields()}, indent=1)
        if path is not None:
            _files.write(path, text + "\n")
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> "DPSGDPlan":
        """The plan of a JSON text, or of a file, that `to_json` wrote.

        Raises:
            ValueError: what is no plan; FileNotFoundError where there is no file.
        """
        held = _files.parsed(source, "plan")
        try:
            held = held["plan"]
            unknown = set(held) - {field.name for field in dataclasses.fields(cls)}
            if not unknown:
                return cls(**held)
        except KeyError:
            raise ValueError(
                "source must be a plan in JSON, {'plan': ...} as to_json writes it, got "
                f"{str(source)[:80]!r}"
            ) from None
        except TypeError as error:
            raise ValueError(
                f"source must be a plan in JSON, got {str(source)[:80]!r}: {error}"
            ) from None
        raise ValueError(
            "source must hold the fields of a DPSGDPlan, got "
            f"{', '.join(sorted(map(str, unknown)))} too"
        )

    def budgets(self, target_epsilons: Any) -> torch.Tensor:
        """The budget of each example, (n,) float64, given as `idp.budgets_for` takes it."""
        from dpcompanion.idp import budgets_for

        return budgets_for(target_epsilons, self.n)

    def uniform_parameters(self) -> dict[str, float]:
        """sample_rate, noise_multiplier and max_grad_norm, what accounts and filters of single
        examples are made of.

        Raises:
            ValueError: for a plan with rates or clip norms for each example, or with
                arithmetic="float": what floats add is not in these accounts.
        """
        if self.individual:
            raise ValueError(
                "plan must have one sample_rate and one max_grad_norm for all examples, got one "
                "for each"
            )
        if self.arithmetic != "real":
            raise ValueError(
                f"plan must have arithmetic='real', got {self.arithmetic!r}: what floats add is "
                "not in individual accounts; for one of real numbers, dataclasses.replace(plan, "
                "arithmetic='real', parameters=None)"
            )
        return {
            name: getattr(self, name)
            for name in ("sample_rate", "noise_multiplier", "max_grad_norm")
        }

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which an example is seen once on average, as a whole number; of no consequence
        for the model.
        """
        return steps_per_epoch(self.sample_rate)

    @property
    def noise_std(self) -> Any:
        """Standard deviation of the noise on each of the sum's coordinates.

        It is `noise_multiplier` x mean clip norm.
        """
        norm = self.max_grad_norm
        return self.noise_multiplier * (
            norm.mean().item() if isinstance(norm, torch.Tensor) else norm
        )

    @property
    def sensitivity(self) -> Any:
        """How far an example moves a sum at most: the clip norm, with what floats add where
        `arithmetic` is "float".
        """
        if self.arithmetic == "real":
            return self.max_grad_norm
        assert self.parameters is not None  # which is checked where a plan is made
        return floats.sensitivity(
            self.max_grad_norm, n=self.n, noise_std=self.noise_std, parameters=self.parameters
        )

    @property
    def effective_noise_multiplier(self) -> Any:
        """Noise over sensitivity, what the account of an example depends on: a float, or (n,) for a
        norm for each.
        """
        if self.arithmetic == "real" and isinstance(self.max_grad_norm, float):
            return self.noise_multiplier
        return self.noise_std / self.sensitivity

    @property
    def individual(self) -> bool:
        """True if examples differ in rate or norm, and so in epsilon."""
        return not (isinstance(self.sample_rate, float) and isinstance(self.max_grad_norm, float))

    def sampler(self, generator: torch.Generator | SecureStream) -> Any:
        """The Poisson sampler of this plan, drawing from `generator`."""
        return PoissonSampler(self.n, self.sample_rate, generator)

    def clip_norms(self, indices: torch.Tensor) -> torch.Tensor:
        """The clip norms of the examples at `indices`, (len(indices),) float64."""
        if isinstance(self.max_grad_norm, torch.Tensor):
            return self.max_grad_norm[indices]
        return torch.full((len(indices),), self.max_grad_norm, dtype=torch.float64)

    def noisy(self, total: torch.Tensor, generator: torch.Generator | SecureStream) -> torch.Tensor:
        """A sum of clipped gradients with its noise (`dpcompanion.mechanism.noise.noisy`): what
        leaves the data.
        """
        return noisy(total, self.noise_std, generator)

    def statement(self, *, steps: int | None = None) -> str:
        """What an epsilon of this plan is about, in one sentence: relation, public constants,
        sampler, noise, delta, accountant. The epsilon itself, which may take a while, is `epsilon`;
        `History.statement` has both. With `steps` it is about so many of the plan's steps, as of a
        run that was stopped.

        Raises:
            ValueError: if `steps` exceeds the plan's.

        >>> plan = DPSGDPlan(
        ...     n=60_000,
        ...     sample_rate=0.01,
        ...     steps=500,
        ...     max_grad_norm=1.0,
        ...     noise_multiplier=1.0,
        ...     delta=1e-5,
        ...     expected_batch_size=600,
        ... )
        >>> print(plan.statement())
        Neighbours differ by one example (add-remove; rate, clip norm, steps and the divisor 600 are
        constants that do not depend on the data); Poisson sampling at rate 0.01, 500 steps, noise 1
        times the clip norm 1, delta 1e-05, accountant pld.
        """
        steps = _checks.whole_number("steps", self.steps if steps is None else steps, 0, self.steps)
        counted = (
            ""
            if self.arithmetic == "real"
            else (f", and what floats add for {self.parameters} parameters is counted")
        )
        return (
            f"{self.mechanism_in_words(steps)}, delta {exactly(self.delta)}, accountant "
            f"{self.accountant}{counted}."
        )

    def mechanism_in_words(self, steps: int) -> str:
        """Of `statement` what holds for every delta and accountant: relation, constants, sampler,
        `steps` and noise.
        """
        taken = (
            f"{steps} steps" if steps == self.steps else f"{steps} of {self.steps} planned steps"
        )

        def said(value):
            return (
                f"{value:g}" if isinstance(value, float) else f"{value.min():g} to {value.max():g}"
            )

        if self.relation == "zero-out":
            whom = (
                f"Neighbours differ in one {self.unit}, whose gradients are zero in one of them "
                f"(zero-out; the number of {self.unit}s, {self.n}, is public, and so is the "
                f"divisor {self.expected_batch_size:g})"
            )
        else:
            whom = (
                f"Neighbours differ by one {self.unit} (add-remove; rate, clip norm, steps and the "
                f"divisor {self.expected_batch_size:g} are constants that do not depend on the "
                "data)"
            )
        mean = "" if isinstance(self.max_grad_norm, float) else "mean "
        return (
            f"{whom}; Poisson sampling at rate {said(self.sample_rate)}, {taken}, noise "
            f"{self.noise_multiplier:g} times the {mean}clip norm {said(self.max_grad_norm)}"
        )

    def epsilon(
        self, delta: float | None = None, *, steps: int | None = None, accountant: str | None = None
    ) -> Any:
        """Epsilon after `steps` steps (all of the plan's by default), of which `statement` says
        what it is about, by the plan's accountant unless another is named.

        A float, or an (n,) float64 tensor where examples differ (individualised DP, Boenisch et al.
        2023), computed once for each distinct pair of rate and norm, which takes about a tenth of a
        second each by PLD, and kept. Inf without noise, 0 without a step.

        Raises:
            ValueError: if `steps` exceeds the plan's, `delta` is outside (0, 1) or `accountant` is
                unknown.
        """
        steps = _checks.whole_number("steps", self.steps if steps is None else steps, 0, self.steps)
        delta = _checks.number(
            "delta", self.delta if delta is None else delta, 0, 1, closed="neither"
        )
        accountant = _checks.one_of(
            "accountant", self.accountant if accountant is None else accountant, ACCOUNTANTS
        )
        rates = torch.as_tensor(self.sample_rate, dtype=torch.float64)
        multipliers = torch.as_tensor(self.effective_noise_multiplier, dtype=torch.float64)
        pairs = torch.stack(torch.broadcast_tensors(rates, multipliers), dim=-1).reshape(-1, 2)
        distinct, which = torch.unique(pairs, dim=0, return_inverse=True)
        drawn = steps * (self.parameters or 0)  # numbers of noise that come as floats
        values = torch.tensor(
            [_epsilon(*pair, steps, delta, accountant, drawn) for pair in distinct.tolist()],
            dtype=torch.float64,
        )
        return values[which] if self.individual else values.item()

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the plan costs, for `accounting.Ledger.add`: all of its steps, and where examples
        differ the rate and noise of each; with arithmetic="float" the guarantee at `delta`, which
        must be given then.

        Raises:
            ValueError: a delta that is missing or not asked for, or no noise.

        >>> plan = DPSGDPlan(
        ...     n=9, sample_rate=0.1, steps=20, max_grad_norm=0.5, noise_multiplier=2.0, delta=1e-3
        ... )
        >>> plan.ledger_entry().item
        SampledGaussian(sample_rate=0.1, noise_multiplier=2.0, steps=20)
        """
        rates = torch.as_tensor(self.sample_rate, dtype=torch.float64)
        noises = torch.as_tensor(self.effective_noise_multiplier, dtype=torch.float64)
        if self.arithmetic == "real":
            check_no_delta(delta)
            worst = SampledGaussian(rates.max().item(), noises.min().item(), self.steps)
        elif delta is None:
            raise ValueError(
                "delta must be given for arithmetic='float', which counts what floats add at it, "
                "got None; beside other items give a part of the delta of the whole, such as "
                "plan.delta / 4"
            )
        else:
            worst = Guarantee(float(torch.as_tensor(self.epsilon(delta)).max()), delta)
        whom: dict[str, Any] = {"relation": self.relation, "unit": self.unit}
        if not self.individual:
            return LedgerEntry(worst, **whom)
        if delta is not None:
            distinct, which = self.epsilon(delta).unique(return_inverse=True)
            items: list[Any] = [Guarantee(epsilon, delta) for epsilon in distinct.tolist()]
        else:
            pairs = torch.stack(torch.broadcast_tensors(rates, noises), dim=-1)
            distinct, which = pairs.unique(dim=0, return_inverse=True)
            items = [SampledGaussian(rate, noise, self.steps) for rate, noise in distinct.tolist()]
        return LedgerEntry(worst, promised=PersonalCosts.each(items, which), **whom)

    def config(self) -> State:
        """What the run does, as plain JSON values: all but `unit`; arrays as their length, mean and
        sha256. Equal plans give equal configs.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "unit"]
        return {name: _plain(getattr(self, name)) for name in names}


@functools.lru_cache(maxsize=1 << 17)
def _epsilon(rate, noise, steps, delta, accountant, drawn):
    """The epsilon of an example, kept: what a run says of itself asks for it again and again."""
    if steps == 0 or noise == 0:
        return math.inf if steps else 0.0
    run = {"sample_rate": rate, "noise_multiplier": noise, "steps": steps, "accountant": accountant}
    return floats.paid_for(lambda at: compute_epsilon(**run, delta=at), delta, drawn)


def _checked(n: Any, max_grad_norm: Any, delta: Any, unit: str) -> tuple[int, float, float]:
    """Number of examples, clip norm and delta of a plan to be made; each is checked, and its unit,
    before the noise is searched for.
    """
    _checks.unit("unit", unit)
    return (
        _checks.whole_number("n", n, 1),
        _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither"),
        _checks.number("delta", delta, 0, 1, closed="neither"),
    )


def _left_of(delta: float, arithmetic: str) -> float:
    """What of delta is left for the exact mechanism, where a hair of it pays for the law of the
    numbers of noise.
    """
    return delta * (1 - 1e-8) if arithmetic == "float" else delta


def _zero_out(relation: str | None, where: str) -> str:
    """The relation of a plan whose parameters give n away."""
    if relation == "add-remove":
        raise ValueError(
            f"relation must be 'zero-out' where {where}, got 'add-remove': it takes one budget, "
            "sample_rate and steps, chosen before the data were seen"
        )
    return "zero-out" if relation is None else relation


def _rate_and_steps(
    n: int, sample_rate: Any, steps: Any, batch_size: Any, epochs: Any
) -> tuple[float, int]:
    """The rate and the number of steps, given as such or by batch size and epochs."""
    pairs = (
        {"sample_rate": sample_rate, "steps": steps},
        {"batch_size": batch_size, "epochs": epochs},
    )
    given = [name for pair in pairs for name, value in pair.items() if value is not None]
    if given not in (["sample_rate", "steps"], ["batch_size", "epochs"]):
        raise ValueError(
            "either sample_rate and steps or batch_size and epochs must be given, got "
            f"{' and '.join(given) or 'none'}"
        )
    if batch_size is None:
        return sample_rate, steps
    batch_size = _checks.number("batch_size", batch_size, 0, n, closed="right")
    epochs = _checks.number("epochs", epochs, 0, 1e12, closed="right")
    return batch_size / n, max(1, round(epochs * n / batch_size))


class _SumOfRates(float):
    """A divisor that nobody gave: made anew when a plan is replaced, not public where n is not."""


def _plain(value):
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, float) else value
    digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return {"length": len(value), "mean": value.mean().item(), "sha256": digest}


def _relation_and_divisor(relation: str | None, divisor: Any) -> tuple[str, float | None]:
    """The relation of a plan, and its divisor, None if that is the sum of the rates."""
    given = None if divisor is None or isinstance(divisor, _SumOfRates) else divisor
    if given is not None:
        given = _checks.number("expected_batch_size", given, 0, math.inf, closed="neither")
    if relation is None:
        relation = "zero-out" if given is None else "add-remove"
    if _checks.one_of("relation", relation, RELATIONS) == "add-remove" and given is None:
        raise ValueError(
            "expected_batch_size must be given for relation='add-remove', a public constant chosen "
            "before the data were seen, got None: the sum of the rates gives n away"
        )
    return relation, given


def _number_of_parameters(arithmetic: str, parameters: Any) -> Any:
    """How many parameters a plan counts: None for real numbers."""
    if _checks.one_of("arithmetic", arithmetic, floats.ARITHMETICS) != "float":
        if parameters is not None:
            raise ValueError(f"parameters goes with arithmetic='float' alone, got {parameters!r}")
        return None
    if parameters is None:
        raise ValueError(
            "parameters must be given for arithmetic='float', how many trainable numbers the model "
            "has: sum(p.numel() for p in model.parameters() if p.requires_grad), got None"
        )
    return _checks.whole_number("parameters", parameters, 1, 2**62)
