"""What is called along a run, what it sees, and what the run leaves: `Callbacks`, `Run`, `History`.

Early stopping. A callback ends a run by `Run.stop()`, of an ensemble by `Ensemble.stop()`: the
history, its statement and its epsilons are then those of the steps that were taken. What may
decide?

* What does not depend on the training data, such as time: epsilon is that of the steps taken.
* What looks at the model only, such as its accuracy on public data: the step at which the run ends
  tells something of the outputs, and the guarantee that was fixed beforehand is that of all planned
  steps, `plan.epsilon()`. The statement and the card of a stopped run say it beside the other.
* Losses, norms or accuracies on the training data are not private, and no epsilon covers what they
  decide.

>>> def note(run):
...     return {"epsilon": run.epsilon}
>>> Callbacks(on_epoch=note).on_step is None
True
"""

import collections.abc
import dataclasses
import json
import math
import os
from typing import Any

import torch

from dpcompanion import _files
from dpcompanion._rounding import epsilons_in_words
from dpcompanion.accounting import Ledger, LedgerEntry, SampledGaussian
from dpcompanion.accounting.items import entry_of
from dpcompanion.mechanism.plan import STOPPED_EARLY, DPSGDPlan
from dpcompanion.seeds import SEEDED
from dpcompanion.training.checkpoints import Checkpoint


@dataclasses.dataclass
class History:
    """What a run leaves besides the model.

    Attributes:
        losses: mean loss of each step's examples, (steps,) float64; nan for an empty batch or a
            step still to come.
        batch_sizes: number of examples in each step, (steps,) int64; both are where the run is.
        dropped: how many per-example gradients were not finite and so contributed nothing.
        epochs: one dict an epoch: epoch, step, loss, and what `on_epoch` returned.
        seed: what the run was seeded with, for research; None where its noise cannot be repeated.
        guarantee: what an epsilon of the run is about, `DPSGDPlan.statement` of the steps that were
            taken: fewer than the plan's where the run was stopped. Their epsilon is `Run.epsilon`.
        precision: what the network went forward and back in, "float32" for instance, or "bf16".
        stopped: whether a callback ended the run before the plan's last step.
        plan: the run's.
        steps: how many were taken.
        tracker: the `NormTracker` that `track=` or `filter=` of `train` made, or None.
        key_fingerprint: a name of the key that batches and noise were drawn under
            (`SecureStream.fingerprint`), by which a ledger tells runs of one seed; None before the
            first step.
        persons: with `people=`, the names of the persons, (n,), in the order of `epsilons`; neither
            a card nor a checkpoint holds them.
    """

    losses: torch.Tensor
    batch_sizes: torch.Tensor
    dropped: int = 0
    epochs: list = dataclasses.field(default_factory=list)
    seed: int | None = None
    guarantee: str = ""
    precision: str = ""
    stopped: bool = False
    key_fingerprint: str | None = None
    # What a checkpoint holds elsewhere (`saved`).
    plan: DPSGDPlan | None = None
    steps: int = 0
    tracker: Any = None
    persons: Any = None

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps under this name: what neither plan, step nor trackers say."""
        names = (field.name for field in dataclasses.fields(self))
        return {
            name: getattr(self, name)
            for name in names
            if name not in ("plan", "steps", "tracker", "persons")
        }

    def _own_plan(self) -> DPSGDPlan:
        if self.plan is None:
            raise ValueError(
                "history must be one that train returned, whose plan it knows, got one without a "
                "plan"
            )
        return self.plan

    def epsilons(self, delta: float | None = None) -> torch.Tensor:
        """The epsilon of each example by the steps that were taken, an upper bound, (n,) float64.

        Of a run with individual clipping (`track=` or `filter=` of `train`) it is the account along
        the realised trajectory, with a filter at most what the filter promises; otherwise what the
        plan guarantees, which is one number for all unless examples differ in rate or clip norm:
        `Track()` without ``clipping="individual"`` keeps estimates only, which are no bounds and
        are found in ``tracker.estimated_epsilon(delta)``. Of a run that was stopped by what looked
        at the model no epsilon of the plan below that of all planned steps is promised (the
        module's text). Accounts are as private as the example that they are about; what the plan
        and the filter promise is not.

        Args:
            delta: in (0, 1); by default the plan's.

        Raises:
            ValueError: a delta outside its range.
        """
        plan = self._own_plan()
        delta = plan.delta if delta is None else delta
        found = (
            torch.as_tensor(plan.epsilon(delta, steps=self.steps), dtype=torch.float64)
            .expand(plan.n)
            .clone()
        )
        if self.tracker is not None and self.tracker.exact and self.steps:
            found = torch.minimum(found, self.tracker.epsilon(delta).cpu())
            if self.tracker.budget is not None:
                found = torch.minimum(found, self.tracker.budget.epsilon(delta).cpu())
        return found

    def promised(self, delta: float | None = None) -> torch.Tensor:
        """The epsilon that was promised to each example before training, (n,) float64: by all steps
        of the plan, and by the filter if there is one.

        Args:
            delta: in (0, 1); by default the plan's.

        Raises:
            ValueError: a delta outside its range.
        """
        return promised(
            self._own_plan(), None if self.tracker is None else self.tracker.budget, delta
        )

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the run cost, for `accounting.Ledger.add`.

        What it promised is all of the plan's planned steps, whatever ended it, or with `delta` what
        its filter promised each example at that delta. The account, with individual clipping, is
        that of the steps that were taken; it describes this run.

        Args:
            delta: at which the promise of the run's filter, or of a plan with arithmetic="float",
                is taken.

        Raises:
            ValueError: a delta that is missing or not asked for.

        >>> plan = DPSGDPlan(
        ...     n=100,
        ...     sample_rate=0.1,
        ...     steps=20,
        ...     max_grad_norm=1.0,
        ...     noise_multiplier=2.0,
        ...     delta=1e-3,
        ... )
        >>> round(
        ...     Ledger()
        ...     .add(History(torch.zeros(20), torch.zeros(20), plan=plan, steps=20))
        ...     .epsilon(1e-3),
        ...     2,
        ... )
        0.64
        """
        plan, tracker = self._own_plan(), self.tracker
        if tracker is None or not tracker.exact or not self.steps:
            return dataclasses.replace(plan.ledger_entry(delta), **self._noise())
        # An account that keeps no norms, or one of the user's own, is left out: what was promised
        # counts then.
        known = getattr(tracker.accountant, "keeps_norms", False)
        account = tracker.ledger_entry().account if known else None
        filtered = tracker.budget is not None and delta is not None
        promise = entry_of(tracker.budget, delta) if filtered else plan.ledger_entry(delta)
        return dataclasses.replace(
            promise, account=account, relation=plan.relation, unit=plan.unit, **self._noise()
        )

    def _noise(self) -> dict[str, Any]:
        return {"key_fingerprint": self.key_fingerprint, "seeded": self.seed is not None}

    def statement(self) -> str:
        """What the run guarantees, in words: relation, sampler, constants, the steps that were
        taken, delta, accountant and epsilon; of a run that was stopped also that of all planned
        steps, and of one with a filter its promise.
        """
        plan = self._own_plan()
        filter = None if self.tracker is None else self.tracker.budget
        spent = epsilons_in_words(plan.epsilon(steps=self.steps))
        said = [plan.statement(steps=self.steps)]
        said.append(
            f"Epsilon {spent}."
            if filter is None
            else f"Without its filter the epsilon would be {spent}."
        )
        if self.steps < plan.steps:
            said.append(STOPPED_EARLY.format(planned=epsilons_in_words(plan.epsilon())))
        if filter is not None:
            promised = epsilons_in_words(self.promised())
            said.append(
                f"By its filter ({type(filter).__name__}) it promised beforehand epsilon "
                f"{promised}."
            )
        if self.seed is not None:
            said.append(SEEDED)
        return " ".join(said)

    def to_json(
        self, path: str | os.PathLike[str] | None = None, *, tuned: str | None = None
    ) -> str:
        """A card of the run for those who get the model, as JSON, written to `path` if given.

        It holds unit, relation, sampler and accountant; (epsilon, delta) of the steps that were
        taken and of those that were planned; of both, too, mu of Gaussian DP from above with its
        regret, and the largest true positive rates of any attack at false positive rates of 0.1%
        and 1%; and quantiles over the examples of what was promised to each. All of these are for
        the example with the largest epsilon, but for the quantiles. Nothing in it depends on the
        training data: no losses, norms or accounts. Numbers that are infinite or unknown are null.

        Args:
            path: where to write it.
            tuned: what was tuned on which data, in words. A search on the training data is not in
                the epsilons (`accounting.select_best`).

        >>> plan = DPSGDPlan(
        ...     n=100,
        ...     sample_rate=0.1,
        ...     steps=20,
        ...     max_grad_norm=1.0,
        ...     noise_multiplier=2.0,
        ...     delta=1e-3,
        ... )
        >>> history = History(torch.zeros(20), torch.zeros(20), plan=plan, steps=20)
        >>> card = json.loads(history.to_json(tuned="nothing"))
        >>> (
        ...     card["unit"],
        ...     card["steps"],
        ...     round(card["epsilon"], 2),
        ...     round(card["gaussian_dp"]["mu"], 2),
        ... )
        ('example', 20, 0.64, 0.32)
        """
        plan = self._own_plan()
        if tuned is not None and not isinstance(tuned, str):
            raise ValueError(f"tuned must be a text, what was tuned on which data, got {tuned!r}")
        attack, planned = (_attack(plan, steps) for steps in (self.steps, plan.steps))
        promised = self.promised()
        at = torch.tensor((0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0), dtype=torch.float64)
        filter = None if self.tracker is None else self.tracker.budget
        card = {
            "statement": self.statement(),
            "unit": plan.unit,
            "relation": plan.relation,
            "sampler": "Poisson",
            "accountant": plan.accountant,
            "n": plan.n if plan.relation == "zero-out" else None,
            "delta": plan.delta,
            "epsilon": _finite(_largest(plan.epsilon(steps=self.steps))),
            "epsilon_of_planned_steps": _finite(_largest(plan.epsilon())),
            "steps": self.steps,
            "planned_steps": plan.steps,
            "stopped": self.stopped,
            **attack,
            **{f"{name}_of_planned_steps": value for name, value in planned.items()},
            "promised_by": "the plan"
            if filter is None
            else f"the plan and a filter, {type(filter).__name__}",
            "promised_quantiles": {
                f"{q:g}": _finite(value)
                for q, value in zip(
                    at.tolist(), torch.quantile(promised, at, interpolation="higher").tolist()
                )
            },
            "seeded": self.seed is not None,
            "precision": self.precision or None,
            "tuned": tuned,
        }
        text = json.dumps(card, indent=1, allow_nan=False)
        if path is not None:
            _files.write(path, text + "\n")
        return text


def promised(plan: DPSGDPlan, filter: Any = None, delta: float | None = None) -> torch.Tensor:
    """The epsilon that a run promises to each example, (n,) float64, see `History.promised`."""
    delta = plan.delta if delta is None else delta
    found = torch.as_tensor(plan.epsilon(delta), dtype=torch.float64).expand(plan.n)
    return found if filter is None else torch.minimum(found, filter.epsilon(delta).cpu())


def _attack(plan: DPSGDPlan, steps: int) -> dict[str, Any]:
    """What so many steps tell an attacker at most, for a card; null where no mechanism says so."""
    noise = float(torch.as_tensor(plan.effective_noise_multiplier, dtype=torch.float64).min())
    if not noise > 0 or plan.arithmetic != "real":
        return {"gaussian_dp": None, "true_positive_rates": None}
    rate = float(torch.as_tensor(plan.sample_rate, dtype=torch.float64).max())
    ledger = Ledger([SampledGaussian(rate, noise, steps)] if steps else [])
    mu = ledger.mu()
    return {
        "gaussian_dp": {"mu": _finite(mu.mu), "regret": mu.regret},
        "true_positive_rates": {f"{rate:g}": 1 - ledger.trade_off(rate) for rate in (0.001, 0.01)},
    }


def _largest(epsilons):
    return float(torch.as_tensor(epsilons, dtype=torch.float64).max())


def _finite(value):
    return value if math.isfinite(value) else None


@dataclasses.dataclass
class Run:
    """The state that callbacks see: plan, model, optimizer, history, the step just done (counted
    from 1), and the indices and gradient norms (before clipping) of that step's examples.
    """

    plan: "DPSGDPlan"
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    history: History
    step: int = 0
    indices: torch.Tensor | None = None
    norms: torch.Tensor | None = None
    stopping: bool = False

    def stop(self) -> None:
        """For a callback: end the run after this step.

        The module's text says what may decide it.
        """
        self.stopping = True

    @property
    def epsilon(self) -> float | torch.Tensor:
        """The uniform epsilon after this step, or of an individual plan what each example has,
        (n,), by the plan's accountant: `plan.epsilon(steps=step)`.
        """
        return self.plan.epsilon(steps=self.step)


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Functions called with a run's state: a `Run` in `train`, the `Ensemble` in `train_ensemble`.

    They may switch the model to evaluation, draw random numbers and print; the run is what it would
    have been. They may end it: `Run.stop()`, and all or some runs of an ensemble:
    `Ensemble.stop(runs)`. That they write nothing into weights or buffers and that losses of
    private examples decide neither the end nor a learning rate is taken on trust: no account covers
    what they would give away.

    Args:
        on_step: after each step.
        on_epoch: after each epoch, and after the last step; what it returns, a dict or None, goes
            into the history.

    Raises:
        ValueError: for what cannot be called.

    >>> note = Callbacks(on_epoch=lambda run: {"epsilon": run.epsilon})
    """

    on_step: collections.abc.Callable | None = None
    on_epoch: collections.abc.Callable | None = None

    def __post_init__(self):
        for name in ("on_step", "on_epoch"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function or None, got {getattr(self, name)!r}")


def seen_at_epoch(seen: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """What `on_epoch` returned beside the entry of its epoch."""
    if not isinstance(seen, (collections.abc.Mapping, type(None))):
        raise ValueError(f"on_epoch must return a dict or None, got a {type(seen).__name__}")
    if taken := sorted(set(seen or {}) & set(entry)):
        raise ValueError(f"on_epoch must return other names than {sorted(entry)}, got {taken}")
    return dict(seen or {})


def check_extras(callbacks, checkpoint):
    """Callbacks, at least empty ones, and checkpoint, if they are what they should be."""
    if not isinstance(callbacks, (Callbacks, type(None))):
        raise ValueError(
            f"callbacks must be Callbacks(on_step=..., on_epoch=...), got {callbacks!r}"
        )
    if not isinstance(checkpoint, (Checkpoint, type(None))):
        raise ValueError(
            f"checkpoint must be a Checkpoint, such as Checkpoint({checkpoint!r}), got "
            f"{checkpoint!r}"
        )
    return callbacks or Callbacks(), checkpoint
