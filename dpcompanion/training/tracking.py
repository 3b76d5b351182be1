r"""Every example's gradient norm along a run, for accounts of each example (Yu et al. 2022, 2023).

An account charges example i at each step for a bound on its gradient's norm, but a step of SGD
computes the norms of its own batch only.  `NormTracker` keeps :math:`Z_i`, the latest known norm of
every example at most C, charges the example for it, and renews it

* by full-batch passes, K of them an epoch, evenly spaced, the first before the first step;
* with ``running=True``, also whenever an example is sampled (version 1 of the paper; K may be 0,
  from Z = C on). It is charged then, for the steps since its norm was last renewed; all examples
  are when the account is asked for.

Two ways to clip, two kinds of account::

    clipping        a gradient is clipped to    the account is
    "individual"    Z_i as charged              exact: what is charged is enforced (`epsilon`)
    "maximum"       C, as in plain DP-SGD       an ESTIMATE: the norm may have grown since the last
                                                pass (`estimated_epsilon`; `epsilon` refuses)

The noise stays sigma C. An exact account is one along the realised trajectory: Z is a function of
the model, which is public, and of the example. It is so only without running estimates. Those
depend on who was in which batch, which is secret and on whose secrecy the sample rate's discount
rests: an account by them is an estimate however gradients are clipped (Yu et al. 2022, section 3.1,
says otherwise).

Cost: a pass is a forward and backward pass over the data; else O(n) for a pass, O(batch) for a
step. Memory: 16 bytes an example, beside the account.

In `train`::

    tracker = NormTracker.for_plan(plan, model, loss, data, clipping="individual")
    train(model, loss, data, plan, optimizer=optimizer, seed=0, trackers=[tracker])
    tracker.epsilon(1e-5)  # (n,)

For a loop of one's own, with Opacus for instance, see `dpcompanion.training.stepping`.
"""

import dataclasses
from typing import Any

import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion._norms import raised
from dpcompanion._types import Array, Loss, State
from dpcompanion.accounting import LedgerEntry
from dpcompanion.accounting.items import entry_of
from dpcompanion.gradients.tensors import rounded_up
from dpcompanion.individual import IndividualAccountant
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.mechanism.sampling import steps_per_epoch
from dpcompanion.training.examples import Data, described
from dpcompanion.training.following import check_budget, check_clipped, check_follows
from dpcompanion.training.measuring import NormPasses, pass_is_due
from dpcompanion.training.options import Performance, Track
from dpcompanion.training.stepping import OwnLoop


class NormTracker(OwnLoop):
    """Latest known gradient norms of the examples, and what they cost; see the module's text.

    Args:
        accountant: an `IndividualAccountant` of these examples; the tracker records into it, up to
            the last step when `accountant` is read. `for_plan` makes it.
        model, loss: what `train` is given: a module and (outputs, targets) -> (n,), such as
            `cross_entropy`.
        data: (x, y) or a data set, the accountant's n examples, on any device. Where `train`
            augments a data set, this one may be the same without for an estimate; an exact account
            takes the augmented one itself.
        track: a `Track`: when norms are measured, to what gradients are clipped and what is kept.
            Rounding, accountant and device are the account's own.
        examples: (n,) distinct indices, if the accountant and data are a part of what is trained
            on; such a tracker only observes, so clipping is "maximum".
        budget: a `RenyiFilter` or `ExactFilter` (`dpcompanion.filters`) of the n examples: it says
            to what each step clips, and one out of budget takes no part. Needs clipping
            "individual" without running estimates.
        performance: a `Performance`: method, precision and microbatch_size of the passes.

    The passes see the model in evaluation mode, without dropout, draw no random numbers and leave
    gradients, modes and Opacus' per-example gradients as they are. A gradient that is not finite is
    charged at C.

    Raises:
        ValueError: an argument outside its range, or options that contradict each other.

    >>> from dpcompanion.training import DPSGDPlan, cross_entropy, train
    >>> model = torch.nn.Linear(2, 2)
    >>> data = torch.randn(100, 2), torch.arange(100) % 2
    >>> plan = DPSGDPlan(
    ...     n=100, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    ... )
    >>> tracker = NormTracker.for_plan(
    ...     plan, model, cross_entropy, data, updates_per_epoch=2, clipping="individual"
    ... )
    >>> history = train(
    ...     model,
    ...     cross_entropy,
    ...     data,
    ...     plan,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     seed=0,
    ...     trackers=[tracker],
    ... )
    >>> tracker.exact, tracker.passes, bool((tracker.epsilon(1e-3) <= plan.epsilon()).all())
    (True, 4, True)
    """

    def __init__(
        self,
        accountant: IndividualAccountant,
        model: torch.nn.Module,
        loss: Loss,
        data: Data,
        track: Track | None = None,
        *,
        examples: Array | None = None,
        budget: Any = None,
        performance: Performance | None = None,
    ):
        super().__init__()
        self._accountant, self.track = accountant, Track() if track is None else track
        self.measuring = NormPasses(
            model,
            loss,
            data,
            Performance() if performance is None else performance,
            largest=accountant.max_grad_norm,
            device=accountant.device,
        )
        if len(self.measuring.data) != accountant.n:
            raise ValueError(
                f"data must hold the accountant's {accountant.n} examples, got "
                f"{len(self.measuring.data)}"
            )
        self.steps_per_epoch = steps_per_epoch(accountant.sample_rate)
        self.updates_per_epoch = min(float(self.track.updates_per_epoch), self.steps_per_epoch)
        self.examples = None
        if examples is not None:
            self.examples, self._sorted, self._order = self._checked(examples)
        if budget is not None:
            if not self.exact:
                raise ValueError(
                    "budget needs clipping='individual' and running=False: a filter must know what "
                    "is charged"
                )
            check_budget(budget, accountant)
        self.budget = budget
        for told in (accountant, budget):
            described(told, self.measuring.data)
        # The keys that runs drew under while it followed them, and whether one was of a seed.
        self._keys, self._seeded = set(), False
        #: Steps begun.
        self.steps = 0
        #: Norms that are charged at the next step, at most C, (n,) float64; running estimates
        #: change them in place.
        self.norms = torch.full(
            (accountant.n,), accountant.max_grad_norm, dtype=torch.float64, device=accountant.device
        )
        # Of each example: the steps in the account. Since then it is charged for `_charged`.
        self._recorded = torch.zeros(accountant.n, dtype=torch.int64, device=accountant.device)
        self._charged, self._limits = self.norms, None
        self._trajectory, self._kept = [], []
        # The limits of a step that has begun and not ended (None: C for all), else False.
        self._begun = False
        # Whether a gradient was longer than its limit, where the device has to be asked for it.
        self._over = None

    @classmethod
    def for_plan(
        cls,
        plan: DPSGDPlan,
        model: torch.nn.Module,
        loss: Loss,
        data: Data,
        *,
        examples: Array | None = None,
        budget: Any = None,
        performance: Performance | None = None,
        **choices: Any,
    ) -> "NormTracker":
        """A tracker with an account of its own, both made from the plan of a run.

        Args:
            plan: a `DPSGDPlan` with one rate and one clip norm for all, and with noise.
            model, loss: what `train` is given: a module and (outputs, targets) -> (n,), such as
                `cross_entropy`.
            data: (x, y) or a data set, plan.n examples, on any device; with `examples`, theirs.
            examples: (m,) distinct indices, if data are a part of what is trained on.
            budget, performance: as of the class.
            choices: what a `Track` takes, by keyword: clipping, updates_per_epoch, running,
                rounding, accountant, trajectory_delta, keep_norms and device.

        Raises:
            ValueError: an argument outside its range, or options that contradict each other.

        >>> from dpcompanion.training import DPSGDPlan, cross_entropy
        >>> plan = DPSGDPlan(
        ...     n=4, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
        ... )
        >>> data = torch.eye(4), torch.arange(4) % 2
        >>> tracker = NormTracker.for_plan(
        ...     plan, torch.nn.Linear(4, 2), cross_entropy, data, clipping="individual"
        ... )
        >>> tracker.accountant.accountant, tracker.steps_per_epoch, tracker.exact
        ('pld', 10, True)
        """
        track = Track(**choices)
        account = IndividualAccountant.for_plan(
            plan,
            n=None if examples is None else len(examples),
            rounding=track.rounding,
            accountant=track.accountant,
            device=track.device,
        )
        return cls(
            account,
            model,
            loss,
            data,
            track,
            examples=examples,
            budget=budget,
            performance=performance,
        )

    def _checked(self, examples):
        """The indices of some examples, the same sorted, and their order."""
        if self.track.clipping != "maximum":
            raise ValueError(
                "clipping must be 'maximum' for a tracker of some examples only, got "
                f"{self.track.clipping!r}"
            )
        examples, n = torch.as_tensor(examples, dtype=torch.int64, device="cpu"), self._accountant.n
        if examples.shape != (n,) or len(examples.unique()) != n:
            raise ValueError(
                f"examples must be {n} distinct indices, got shape {tuple(examples.shape)}"
            )
        if (least := int(examples.min())) < 0:
            raise ValueError(f"examples must be indices from 0, got {least}")
        return examples, *examples.sort()

    @property
    def exact(self) -> bool:
        """Whether what is charged is enforced: individual clipping, and no running estimates."""
        return self.track.exact

    @property
    def passes(self) -> int:
        """Full-batch passes made."""
        return self.measuring.count

    @property
    def parameters(self) -> State:
        """What a plan must agree with: n, sample_rate, max_grad_norm and noise_multiplier."""
        return {
            name: getattr(self._accountant, name)
            for name in ("n", "sample_rate", "max_grad_norm", "noise_multiplier")
        }

    @property
    def accountant(self) -> IndividualAccountant:
        """The accountant, with all steps recorded, the one under way too.

        It answers for what it was given only: its epsilon is 0 before the first step, and no bound
        where the last one was left half done or not enforced. `epsilon` refuses then.
        """
        steps = self.steps - self._recorded
        # elsewhere the answer takes longer than to record nothing
        if steps.device.type != "cpu" or steps.any():
            self._accountant.record(self._charged, steps=steps)
            self._recorded.fill_(self.steps)
        return self._accountant

    def epsilon(self, delta: float) -> torch.Tensor:
        """Epsilon of every example, an upper bound along the realised trajectory, (n,) float64.

        Raises:
            ValueError: if the account is an estimate, or if there was no step or the last one has
                not ended.
        """
        if not self.exact:
            raise ValueError(
                "epsilon needs clipping='individual' and running=False; this account is an "
                "estimate, see estimated_epsilon"
            )
        self._check_stepped()
        return self.accountant.epsilon(delta)

    def estimated_epsilon(self, delta: float) -> torch.Tensor:
        """Every example's epsilon if each norm had been what was last seen: no bound, (n,) float64.

        Raises:
            ValueError: if there was no step.
        """
        self._check_stepped()
        return self.accountant.epsilon(delta)

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the steps so far cost, for `accounting.Ledger.add`: promised as many at the clip
        norm, or with `delta` what the filter promises at it; and by the account.

        Raises:
            ValueError: as `epsilon`, and a delta without a filter.
        """
        if not self.exact:
            raise ValueError(
                "item must be an account that is exact (clipping='individual', running=False), got "
                "estimates"
            )
        self._check_stepped()
        found = entry_of(self.accountant, None if self.budget is not None else delta)
        if self.budget is not None and delta is not None:
            found = dataclasses.replace(entry_of(self.budget, delta), account=found.account)
        if len(self._keys) > 1:
            raise ValueError(
                "item must be of one run, whose noise has one key, but the tracker has followed "
                f"{len(self._keys)}: follow each with a tracker of its own"
            )
        key = next(iter(self._keys), None)
        return dataclasses.replace(found, key_fingerprint=key, seeded=self._seeded)

    def note_key(self, fingerprint: str, seeded: bool) -> None:
        """A run says under which key it draws, so that a ledger does not add it to what shares its
        noise.
        """
        self._keys.add(fingerprint)
        self._seeded |= seeded

    def _check_stepped(self):
        if not self.steps:
            raise ValueError(
                "tracker must have followed a run to give epsilon, but no step was begun; hand it "
                "to train(..., trackers=[tracker]), or see NormTracker.step"
            )
        if self.exact and self._begun is not False:
            raise ValueError(
                f"step {self.steps} must end before the account is exact, but it was left half done"
            )
        if self._over is not None and self._over:
            raise ValueError(
                "clipped must be at most the limits of each step, but in some step an example's "
                "was above"
            )

    @property
    def trajectory(self) -> torch.Tensor:
        """Every example's epsilon after each epoch, (epochs, n) float32.

        Rounded up; an estimate unless `exact`.
        """
        return (
            torch.stack(self._trajectory)
            if self._trajectory
            else torch.zeros(0, self._accountant.n)
        )

    @property
    def norms_of_passes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(steps, norms): before which step (from 0) each pass was made, and what it found,
        (passes, n) float32 on the host.
        """
        steps = torch.tensor([step for step, _ in self._kept], dtype=torch.int64)
        norms = [norms.cpu() for _, norms in self._kept]
        return steps, torch.stack(norms) if norms else torch.zeros(0, len(self.norms))

    @property
    def draws(self) -> tuple[int, float]:
        """From how many examples a step draws, and the sample rate."""
        return len(self.measuring.data), float(self._accountant.sample_rate)

    def before_step(self) -> torch.Tensor | None:
        """Begin a step: renew the norms if a pass is due, and charge all. `train` calls it; see
        `step` for a loop of one's own.

        Returns:
            The norms to which this step must clip, (n,) float64, 0 for who takes no part; None if
            that is C for all. A copy: what is done to it changes nothing in what is allowed.

        Raises:
            ValueError: if the step before, of an exact account, has not ended.
        """
        if self.exact and self._begun is not False:
            raise ValueError(
                f"step {self.steps} must end before another begins, but it was left half done"
            )
        if pass_is_due(self.steps, self.updates_per_epoch / self.steps_per_epoch):
            self.norms, self._limits = self.measuring.measure(), None
            if self.track.keep_norms:
                # Where they are: a copy to the host would be waited for.
                self._kept.append((self.steps, rounded_up(self.norms, torch.float32)))
        charged, limits = self.norms, None
        if self.track.clipping == "individual":
            if self._limits is None:
                self._limits = self._accountant.charged(self.norms)
            limits = self._limits.clone() if self.track.running else self._limits
            if self.budget is not None:
                paid = self.budget.clip_norms(limits)
                charged, limits = torch.where(paid == limits, charged, paid), paid
        if charged is not self._charged and (
            charged.device.type != "cpu" or not torch.equal(charged, self._charged)
        ):
            self.accountant  # noqa: B018 (records what was charged before)
        self._charged = charged
        self.steps += 1
        self._begun = limits
        return None if limits is None else limits.clone()

    def after_step(
        self,
        indices: Array | None = None,
        norms: Array | None = None,
        *,
        clipped: Array | None = None,
    ) -> None:
        """End a step. `train` calls it; see `step` for a loop of one's own.

        Args:
            indices: the examples of the step, (k,), k >= 0.
            norms: of their gradients before clipping, (k,); needed for running estimates, with
                `indices`.
            clipped: the same after clipping, (k,); needed for an exact account, with `indices`:
                what is charged must have been enforced.

        Raises:
            ValueError: if no step has begun, if something is missing, or if a gradient was longer
                than `before_step` said or an example came twice.
        """
        if self._begun is False:
            raise ValueError("before_step must begin a step before after_step ends it")
        if self.exact:
            over = check_clipped(indices, clipped, self._begun)
            if over is not None:
                self._over = over if self._over is None else self._over | over
        if self.track.running:
            if indices is None or norms is None:
                raise ValueError(
                    "indices and norms must be given (NormTracker.observe) where running=True, got "
                    "None"
                )
            indices, norms = torch.as_tensor(indices, device="cpu"), torch.as_tensor(norms)
            _checks.same_length(indices=indices, norms=norms)
            if self.examples is not None:
                mine = torch.isin(indices, self._sorted).nonzero()[:, 0]
                indices = self._order[torch.searchsorted(self._sorted, indices[mine])]
                norms = norms[to_device(mine, norms.device)]
            largest = self._accountant.max_grad_norm
            self._renew(
                to_device(indices, self.norms.device), raised(norms, largest, self.norms.device)
            )
        self._begun = False
        if self.track.trajectory_delta is not None and self.steps % self.steps_per_epoch == 0:
            epsilon = self.estimated_epsilon(self.track.trajectory_delta).cpu()
            self._trajectory.append(rounded_up(epsilon, torch.float32))

    def _renew(self, examples, norms):
        """Charge examples for what held up to this step, and let new norms hold from then on."""
        self._accountant.record(
            self.norms[examples], steps=self.steps - self._recorded[examples], examples=examples
        )
        # an assignment of a number would be waited for on a GPU
        self._recorded.index_fill_(0, examples, self.steps)
        self.norms[examples] = norms
        if self._limits is not None:
            self._limits[examples] = self._accountant.charged(norms)

    def check_run(self, plan: DPSGDPlan, model: torch.nn.Module, loss: Loss, data: Data) -> None:
        """ValueError unless this follows a run of `plan` that trains `model` by `loss` on `data`.

        Of a data set that is not the run's own 64 items are compared, their targets only where a
        transform draws at random, which an exact account refuses.
        """
        check_follows(self, plan, model, loss, data)

    def state_dict(self) -> State:
        """All that is needed to go on, the account included."""
        return {
            "accountant": self.accountant.state_dict(),
            "options": self._options(),
            "norms": self.norms.cpu().clone(),
            "step": self.steps,
            "passes": self.passes,
            "trajectory": list(self._trajectory),
            "kept": [(step, norms.cpu()) for step, norms in self._kept],
            "budget": None if self.budget is None else self.budget.state_dict(),
            # Of an exact account: the limits of a step that was left half done, and whether some
            # were not kept.
            "begun": self._begun.cpu().clone()
            if self.exact and isinstance(self._begun, torch.Tensor)
            else None,
            "over": bool(self._over is not None and self._over),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict` of a tracker with the same options; else a ValueError."""
        if (options := _checks.entry(state, "options")) != self._options():
            raise ValueError(f"state must be of a tracker with {self._options()}, got {options}")
        norms = _checks.tensor_entry(state, "norms")
        if norms.shape != self.norms.shape or norms.dtype != self.norms.dtype:
            raise ValueError(
                f"state must hold norms of shape {tuple(self.norms.shape)} and {self.norms.dtype}, "
                f"got {tuple(norms.shape)} and {norms.dtype}"
            )
        steps, passes = (
            _checks.whole_number(name, _checks.entry(state, name), 0) for name in ("step", "passes")
        )
        begun, over, budget = (_checks.entry(state, name) for name in ("begun", "over", "budget"))
        begun = False if begun is None else _checks.tensor_entry(state, "begun")
        trajectory, kept = (list(_checks.entry(state, name)) for name in ("trajectory", "kept"))
        kept = [(step, torch.as_tensor(each)) for step, each in kept]
        before = {} if self.budget is None else self._accountant.state_dict()
        self._accountant.load_state_dict(_checks.entry(state, "accountant"))
        if self.budget is not None:
            try:
                self.budget.load_state_dict(budget)
            except BaseException:  # of another run, whose account this must not keep
                self._accountant.load_state_dict(before)
                raise
        self.norms.copy_(norms)
        self.steps, self.measuring.count = steps, passes
        self._charged, self._limits = self.norms, None
        self._begun = begun if begun is False else begun.to(self.norms.device)
        self._over = torch.tensor(True) if over else None
        self._recorded.fill_(self.steps)
        self._trajectory, self._kept = trajectory, kept

    def _options(self):
        return {
            "steps_per_epoch": self.steps_per_epoch,
            "updates_per_epoch": self.updates_per_epoch,
            "running": self.track.running,
            "clipping": self.track.clipping,
            "budget": self.budget is not None,
            "examples": None if self.examples is None else self.examples.tolist(),
            "trajectory_delta": self.track.trajectory_delta,
            "keep_norms": self.track.keep_norms,
        }


def tracker_of(
    track: Track | None,
    filter: Any,
    plan: DPSGDPlan,
    model: torch.nn.Module,
    loss: Loss,
    data: Data,
    performance: Performance,
) -> NormTracker | None:
    """The tracker that `track` and `filter` ask for, None if neither is given. A filter clips
    individually, and by default norms are measured as often as it looks at them. It serves one run.
    """
    if track is None and filter is None:
        return None
    if not isinstance(track, (Track, type(None))):
        raise ValueError(f"track must be Track(clipping=..., ...), got {track!r}")
    if track is None:
        block = getattr(filter, "block", plan.steps_per_epoch)
        track = Track(clipping="individual", updates_per_epoch=plan.steps_per_epoch / block)
    elif filter is not None and (not track.exact):
        raise ValueError(
            "track must have clipping='individual' and running=False beside a filter, which must "
            f"know what is charged, got clipping={track.clipping!r} and running={track.running!r}"
        )
    if filter is not None and not plan.individual:
        check_budget(filter, plan, "filter")
    return NormTracker.for_plan(
        plan, model, loss, data, budget=filter, performance=performance, **vars(track)
    )
