r"""DP-SGD by a plan: draw, clip, add noise, divide by a public constant, step.

    for t in 1..T:
        B    <- Poisson draw                          (may be empty)
        g    <- sum of the clipped gradients of B     (in physical batches of one draw)
        grad <- (g + N(0, s^2)) / expected batch size
        optimizer.step()

(Abadi et al. 2016, algorithm 1, with the expected batch size for the realised one.) Everything
random comes from cryptographic streams of the run's own (`dpcompanion.mechanism.noise`), so
callbacks may evaluate, draw and print as they like (`Callbacks`): they change nothing. Without a
seed nobody can repeat them, for a model that is released; a seed makes a run repeatable, for
research. With a `Checkpoint` a run that was cut off goes on where it stopped and ends bit for bit
where it would have ended.

The history holds training losses and batch sizes.  They are not private: the guarantee covers the
model's weights, not what is logged beside them.
"""

import contextlib
import copy
import math
import os
import pathlib
import secrets
import signal
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcompanion import _checks
from dpcompanion._devices import forked_rng, on_accelerator, to_device
from dpcompanion._progress import bar
from dpcompanion._types import Device
from dpcompanion.gradients import checks, clipping, independence, states, sums, traces
from dpcompanion.mechanism import noise
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.seeds import derive_key, seed_torch
from dpcompanion.training import distributed
from dpcompanion.training.callbacks import Callbacks, History, Run, check_extras, seen_at_epoch
from dpcompanion.training.checkpoints import (
    Checkpoint,
    check_fits,
    key_file,
    note_seeds,
    plain,
    read_checkpoint,
    read_keys,
    write_checkpoint,
    write_keys,
)
from dpcompanion.training.examples import Data, Tensors, described, examples_of
from dpcompanion.training.options import Performance, Track, performance_of
from dpcompanion.training.tracking import tracker_of

_FORMAT = 4
#: What a checkpoint holds besides the model and the optimizer.
TAKEN_OVER = ("identity", "step", "generators", "stateful", "history")
# Proofs that are repeated before a user hears that they are.
_OFTEN = 8


def train(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: Data,
    plan: "DPSGDPlan",
    *,
    optimizer: torch.optim.Optimizer,
    seed: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    people: Any = None,
    at_most: int | None = None,
    track: Track | None = None,
    filter: Any = None,
    performance: Performance | None = None,
    device: Device = None,
    method: str = "auto",
    precision: str | None = None,
    microbatch_size: int | None = None,
    trackers: Iterable[Any] = (),
    callbacks: Callbacks | None = None,
    checkpoint: Checkpoint | None = None,
    generator_device: str | torch.device = "cpu",
    progress: bool | None = None,
) -> History:
    """Train `model` in place by DP-SGD as `plan` says.

    Where `torch.distributed` has a group of several processes, they train one model together: every
    rank calls `train` with the same arguments, but for the device, each draw is cut among the
    ranks, and noise is added once (`dpcompanion.training.distributed`). The account is that of one
    process. Clipped sums travel between the ranks without noise, and so does the key of the draws
    where there is no seed: trust the ranks and the network. The key of the noise stays on rank 0,
    which writes the checkpoint, too; all ranks read it. Callbacks are called on every rank.

    Many arguments, since each is a choice of its own, most with a default.

    Args:
        model: a module that treats examples one by one: no batch norm, unless it is in evaluation
            mode and stays there, and nothing that is spread over processes, such as
            DistributedDataParallel, `fully_shard` (FSDP) and models with DTensors: give the module
            itself.
        loss: (outputs, targets) -> (n,), such as `cross_entropy`; outputs are whatever the model
            returns. Where a batch is a mapping: (outputs, batch) -> (n,), such as
            `dpcompanion.huggingface.per_example_loss` gives.
        data: (x, y), tensors of plan.n examples each; or a map-style data set with plan.n items (x,
            y) or mappings, of which each draw is read when it comes, so that its transform may
            augment them (`dpcompanion.training.examples`); or what `by_person` gives.
        plan: a `DPSGDPlan`.
        optimizer: any torch.optim optimizer of all the model's trainable parameters that needs no
            closure (not LBFGS); it sees the noisy mean gradient.
        seed: None, for a model that is released: sampling and noise come from a cipher under keys
            of 256 bits that the operating system draws (`dpcompanion.mechanism.secure`). Or a whole
            number below 2^1024, for research: the keys, and all else that is random, are hashed
            from it, and anyone who has it can subtract the noise.
        collate_fn: with a data set, a function list of items -> batch, as a loader of PyTorch's
            takes: a pair (inputs, targets) or a mapping, nested as it may be, of tensors with the
            examples first. It may pad to the longest of a draw (`dpcompanion.training.collating`).
        people: who each row of the data belongs to, (rows,), where the plan's n examples are
            persons, which history, account and filter then say; with `at_most` as of `by_person`,
            which knows persons without rows, too. Data may then be arrays or pandas columns.
        at_most: with people, how many rows of a person enter a step at most.
        track: a `Track`: keep an account of each example, of which `History.epsilons` tells.
        filter: an `ExactFilter` or `RenyiFilter` of the plan (`ExactFilter.for_plan`): it says to
            what each example is clipped, so that no example exceeds its budget. It implies
            `Track(clipping="individual")`. A filter serves one run; one that has paid for another
            is warned of, since both runs then share one budget.
        performance: a `Performance`: method, precision, microbatch_size and device.
        device, method, precision: the same by single keywords. Model and data (of a data set each
            draw) are moved to the device.
        microbatch_size: examples in one pass; a draw is cut into such pieces, never joined with
            another. By default as many as suit a processor's caches
            (`dpcompanion.gradients.microbatches`), or 512.
        trackers: further objects that follow the norms of all examples, such as a `NormTracker`,
            and may clip to less than the plan does. They must have been made with this model, loss
            and data, and are saved with the run.
        callbacks: `Callbacks`, functions of a `Run` that are called along it, and may end it
            (`Run.stop`).
        checkpoint: a `Checkpoint`, from which the run goes on if its file exists, and which it
            writes. Plan, seed, data, architecture and the numbers that the optimizer was made with
            are compared; the loss is not. A run that has finished is loaded with a warning.
        generator_device: where to draw batches and noise. The CPU gives the same draws for every
            device, and several ranks take no other.
        progress: show a bar; by default on a terminal only.

    Returns:
        History.

    Raises:
        ValueError: before any work, for data that do not fit plan, model or loss, a model, loss or
            `collate_fn` that mixes examples, a method that is wrong for the model
            (`dpcompanion.gradients.proof`), an optimizer of other parameters, a tracker of another
            run, or a checkpoint of another run or damaged. A data set is known by its length and
            the targets of 64 examples only. During the run, before the step is taken, for a model
            that mixes examples in a state that it has come into since
            (`dpcompanion.gradients.states`), or that keeps something of them, and for a loss that
            is seen to mix those of a batch; on a GPU what buffers and losses tell is looked at by
            the end of each epoch. On several ranks also, on all of them, for ranks that were given
            different things, read another checkpoint, or come to have different weights; what one
            rank raises ends all the others.
        RuntimeError: another rank ended the run by an error that is no ValueError.

    >>> from dpcompanion.training import DPSGDPlan, cross_entropy, train
    >>> model = torch.nn.Linear(2, 2)
    >>> data = torch.randn(100, 2), torch.arange(100) % 2
    >>> plan = DPSGDPlan(
    ...     n=100, sample_rate=0.1, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    ... )
    >>> history = train(
    ...     model,
    ...     cross_entropy,
    ...     data,
    ...     plan,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     seed=0,
    ... )
    >>> len(history.batch_sizes), len(history.epochs)
    (20, 2)
    """
    with distributed.joined() as ranks:
        callbacks, checkpoint = check_extras(callbacks, checkpoint)
        loop = TrainingLoop(
            model,
            loss,
            data
            if collate_fn is people is at_most is None
            else examples_of(
                data,
                getattr(plan, "n", None),
                collate_fn=collate_fn,
                people=people,
                at_most=at_most,
            ),
            plan,
            optimizer,
            seed=seed,
            performance=performance_of(
                performance,
                method=method,
                precision=precision,
                microbatch_size=microbatch_size,
                device=device,
            ),
            trackers=trackers,
            track=track,
            filter=filter,
            stateful={} if checkpoint is None else checkpoint.stateful,
            generator_device=generator_device,
        )
        paid, name, goes_on = loop.paid(), None, False
        if checkpoint is not None:
            name, goes_on = os.path.abspath(checkpoint.path), checkpoint.exists
            if goes_on:
                loop.load(checkpoint.path)
            if goes_on and (loop.run.step == plan.steps or loop.run.history.stopped):
                warnings.warn(
                    f"checkpoint {os.fspath(checkpoint.path)!r} is of a run that has finished: its "
                    "model is loaded, and no step is taken; remove the file to train anew",
                    stacklevel=2,
                )
        loop.take_filters(name, paid, goes_on=goes_on)
        loop.begin_alike(callbacks, checkpoint)
        if checkpoint is not None and seed is not None and ranks.first:
            note_seeds(checkpoint.path, [(loop.seed, loop.data_digest)])
        _take_steps(loop, callbacks, checkpoint, ranks, progress)
        loop.count_dropped()
        if checkpoint is not None and seed is None and ranks.first:
            pathlib.Path(key_file(checkpoint.path)).unlink(missing_ok=True)
        loop.check_alike()
        return loop.run.history


def _take_steps(loop, callbacks, checkpoint, ranks, progress):
    """The steps of a run from where it is to its end, with what is called and saved on the way."""
    run, plan = loop.run, loop.plan
    with (
        loop.only_own_steps(),
        loop.watching_others(),
        bar(
            plan.steps, label="DP-SGD", done=run.step, show=progress if ranks.first else False
        ) as advance,
        deferred_interrupt() as interrupted,
    ):
        while run.step < plan.steps and not run.history.stopped:
            loop.step()
            with loop.modes_kept():
                if callbacks.on_step is not None:
                    callbacks.on_step(run)
                    run.stopping = ranks.any(run.stopping)
                if run.step % plan.steps_per_epoch == 0 or run.step == plan.steps or run.stopping:
                    loop.end_epoch(callbacks.on_epoch)
                checks.check_plan(run.plan, plan, loop.plan_numbers)
            if run.stopping:
                loop.end_early()
            advance()
            stop = ranks.any(interrupted())
            due = run.history.stopped or stop
            if checkpoint is not None and (
                due or checkpoint.due(run.step, plan.steps, plan.steps_per_epoch)
            ):
                loop.save(checkpoint.path)
            if stop:
                raise KeyboardInterrupt


class TrainingLoop:
    """A DP-SGD run: what was given, checked, and its steps, for `train` and `PersonalTrainer`."""

    proved_again = 0

    def __init__(
        self,
        model,
        loss,
        data,
        plan,
        optimizer,
        *,
        seed=None,
        performance,
        trackers=(),
        track=None,
        filter=None,
        stateful: Mapping[str, Any] = types.MappingProxyType({}),
        generator_device: str | torch.device = "cpu",
    ):
        """Many arguments, since it takes what `train` takes, and checks it before any work."""
        self.asked_method, self.precision = performance.method, performance.precision
        self.microbatch_size, device = performance.microbatch_size, performance.device
        if not isinstance(plan, DPSGDPlan):
            raise ValueError(f"plan must be a DPSGDPlan, got {plan!r}")
        examples = examples_of(data, plan.n)
        checks.check_alone(model, opacus=True)
        checks.check_model(model)
        checks.check_types(model, examples.probe[0])
        checks.check_untrained(loss)
        if plan.arithmetic == "real":
            checks.check_sums(model)
        checks.check_optimizer(optimizer, model)
        self.seed = seed if seed is None else _checks.seed("seed", seed)
        # What the model itself draws goes by places in a batch, which are as secret as the draws.
        self.forward_seed = secrets.randbits(256) if self.seed is None else self.seed
        self.device = checks.training_device(model, device)
        model.to(self.device)
        self.examples, self.loss = examples.to(self.device), loss
        # No pass may change a tensor of either.
        self.watched_modules = {"model": model, "loss": loss}
        if not isinstance(trackers, Iterable):
            raise ValueError(f"trackers must be a list of them, got a {type(trackers).__name__}")
        own = tracker_of(track, filter, plan, model, loss, data, performance)
        self.trackers = (*trackers, *(() if own is None else (own,)))
        for tracker in self.trackers:
            if not hasattr(tracker, "check_run"):
                raise ValueError(f"trackers must be a list of them, got a {type(tracker).__name__}")
            tracker.check_run(plan, model, loss, data)
        self.stateful = self.with_trackers(stateful)
        self.ranks = distributed.current()
        self.ranks.check_generator(_checks.device("generator_device", generator_device))
        self.generators = noise.generators(seed, generator_device)
        self.sampler = plan.sampler(self.generators["sampling"])
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameter_count = sum(p.numel() for p in self.parameters.values())
        self.dtype = next(iter(self.parameters.values())).dtype
        self.modes = {module: module.training for module in model.modules()}
        self.float64 = self.counts_floats(plan)
        self.network, self.loss = self.examples.seen(model, loss)
        prefix = "" if self.network is model else "model."
        self.network_names = {name: prefix + name for name in self.parameters}
        self.prove(model)
        self.examples.prove(model, loss)
        self.optimizer_settings = _settings_of(optimizer)
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        #: The plan, with a word for its examples: histories speak by it.
        self.described_plan = described(plan, self.examples)
        history = History(
            torch.full((plan.steps,), math.nan, dtype=torch.float64, device=self.device),
            torch.zeros(plan.steps, dtype=torch.int64, device=self.device),
            seed=self.seed,
            guarantee=self.described_plan.statement(steps=0),
            precision=self.precision or str(self.dtype).removeprefix("torch."),
            plan=self.described_plan,
            tracker=own,
            persons=getattr(self.examples, "persons", None),
        )
        self.plan, self.plan_numbers = plan, checks.numbers_of(plan)
        self.run = Run(plan, model, optimizer, history)
        # Whether a step was seen to leave no trace, by values of parameters; and what was seen of
        # that on a device, to be looked at when there is time.
        self.compared_by_value, self.pending_checks = False, {}
        self.stepping = False

    def counts_floats(self, plan):
        """Whether the plan counts what floats do: of as many parameters, and of secret noise."""
        counts = plan.arithmetic == "float"
        if counts and (self.seed is not None or self.parameter_count != plan.parameters):
            raise ValueError(
                "plan with arithmetic='float' must have as many parameters as the model, "
                f"{self.parameter_count}, and takes no seed, got {plan.parameters} and seed "
                f"{self.seed}"
            )
        return counts

    def filters(self):
        """The filters of all trackers."""
        held = (getattr(tracker, "budget", None) for tracker in self.trackers)
        return [each for each in held if each is not None]

    def paid(self):
        """What the filters have paid; one of the user's own need not say so."""
        spent = [getattr(each, "spent", None) for each in self.filters()]
        known = [each for each in spent if isinstance(each, torch.Tensor) and not each.is_meta]
        return [each.clone() for each in known]

    def take_filters(self, run, paid, *, goes_on):
        """The filters pay for this run from here on: `run` is its name, if it has checkpoints, and
        `paid` what they had paid before one was loaded.

        A filter that has paid for another run clips those without budget to nothing; one that goes
        on from a checkpoint has forgotten what it paid since.
        """
        payers = [getattr(each, "pays_for", None) for each in self.filters()]
        same = run is not None and all(one == run for one in payers)
        if not goes_on and any(bool((each > 0).any()) for each in paid):
            warnings.warn(
                "filter has paid for another run, and examples without budget take no part: make "
                "a new filter for this run, or count the filter's promise once for both runs "
                "together",
                stacklevel=3,
            )
        elif goes_on and not same:
            if any(bool((had > has).any()) for had, has in zip(paid, self.paid())):
                warnings.warn(
                    "filter had paid more than the checkpoint knows of, which it now forgets: "
                    "unless that was for later steps of this run, which are taken again, the "
                    "filter's promise does not hold for both runs together",
                    stacklevel=3,
                )
        for each in self.filters():
            with contextlib.suppress(AttributeError):  # of a filter of the user's own
                each.pays_for = run

    def with_trackers(self, stateful):
        """What is saved with the run, its trackers among it."""
        own = {f"tracker {i}": tracker for i, tracker in enumerate(self.trackers)}
        for name in own.keys() & stateful.keys():
            raise ValueError(
                f"stateful must not be called {name!r}, as a tracker of the run is saved"
            )
        return own | dict(stateful)

    def prove(self, model):
        """How to clip, proved for the state that the model is in."""
        checks.check_model(model)
        x, y = self.examples.probe
        if isinstance(self.examples, Tensors):  # whose targets are all at hand
            checks.check_targets(self.network, self.loss, x, y)
        self.method = clipping.resolve_method(
            self.network, self.loss, x, y, self.asked_method, self.precision, float64=self.float64
        )
        self.state = states.state_of(model)

    def prove_again(self):
        """As `prove`, if the model is in another state than that which was proved: a layer that has
        woken up, a flag, a hook.
        """
        state = states.state_of(self.run.model)
        if state != self.state:
            self.proved_again += 1
            if self.proved_again == _OFTEN:
                warnings.warn(
                    "the model is proved again in each step, which is slow, because a pass changes "
                    f"{states.changed(self.state, state)} of it: keep such notes outside the model",
                    RuntimeWarning,
                    stacklevel=2,
                )
            with self.unnoticed():
                self.prove(self.run.model)

    @contextlib.contextmanager
    def unnoticed(self):
        """Data of a data set are not drawn again, and no generator goes on."""
        with forked_rng(self.device):
            yield

    @contextlib.contextmanager
    def only_own_steps(self):
        """The run's optimizer takes the run's own steps only: a gradient from elsewhere has no
        noise.
        """

        def check(optimizer, args, kwargs):
            if not self.stepping:
                raise ValueError(
                    "optimizer must be stepped by train alone while it runs, but a callback steps "
                    "it, too"
                )

        hook = self.run.optimizer.register_step_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def watching_others(self):
        """A step of another optimizer with the run's parameters, which may be on public data, is
        warned of.
        """
        own = {id(p) for p in self.parameters.values()}

        def look_beside(other, *_):
            if self.stepping or other is self.run.optimizer:
                return
            if any(id(p) in own for group in other.param_groups for p in group["params"]):
                warnings.warn(
                    f"parameters of a private run are trained by a {type(other).__name__} beside "
                    "the run's optimizer, without clipping and noise: no epsilon covers what it "
                    "learns from private data",
                    RuntimeWarning,
                    stacklevel=3,
                )

        hook = register_optimizer_step_pre_hook(look_beside)
        try:
            yield
        finally:
            hook.remove()

    def step(self):
        run, plan = self.run, self.plan
        self.check_held()
        if run.history.key_fingerprint is None:  # from here on all ranks have the keys of the run
            self.name_key(noise.fingerprint(self.seed, self.generators))
        with self._own_randomness("tracking"):
            lower = [tracker.before_step() for tracker in self.trackers]
        drawn = self.sampler.draw().cpu()
        indices = to_device(drawn, self.device)
        limits, away = self.least_limits(lower, drawn, indices)
        taking = limits > 0
        if not away and not taking.all():
            # Examples clipped to nothing take no part, so that clipping need not divide by zero. On
            # a GPU they stay, times 0, since how many they are is not known here.
            drawn, limits = drawn[taking], limits[taking]
            indices = to_device(drawn, self.device)
        run.indices, share = indices, self.ranks.share(len(drawn))
        checks.check_trained(run.model, self.parameters)
        self.prove_again()
        before = self.noted()
        with self._own_randomness(self.ranks.stream("examples")):
            x, y = self.examples.rows(
                (indices if isinstance(self.examples, Tensors) else drawn)[share]
            )
        passes = {
            "method": self.method,
            "microbatch_size": self.microbatch_size,
            "precision": self.precision,
            "float64": self.float64,
        }
        # before the 1st, 2nd, 4th, 8th ... step
        if (run.step + 1) & run.step == 0 and self.device.type == "cpu":
            with self.unnoticed():
                clipping.look_again(self.network, self.loss, (x, y), run.step + 1, **passes)
        with self._own_randomness(self.ranks.stream("forward")):
            total = clipping.clipped_sum(self.network, self.loss, x, y, limits[share], **passes)
        self.check_untouched(before)
        if total.mixed is not None:
            self.defer_check({"mixed": total.mixed})
        self.prove_again()  # a model may wake up within a pass, too
        summed = torch.cat(
            [total.gradients[name].flatten() for name in self.network_names.values()]
        )
        norms, losses = self.ranks.gathered(len(drawn), total.norms, total.losses)
        released = self.ranks.released(
            summed, lambda total: plan.noisy(total, self.generators["noise"])
        )
        self.give_gradients(released / cast(float, plan.expected_batch_size))
        # counted before it is taken, lest it be taken and not counted
        at, run.step = run.step, run.step + 1
        run.history.guarantee = self.described_plan.statement(steps=run.step)
        run.history.steps = run.step
        self.check_held()
        self.take_step()
        run.norms = norms
        self.dropped += (norms.isinf() & taking if away else norms.isinf()).sum()
        # an assignment of a number would be waited for on a GPU
        size = run.history.batch_sizes.select(0, at)
        size.copy_(taking.sum()) if away else size.fill_(len(drawn))
        if away:
            run.history.losses[at] = torch.where(taking, losses, 0).sum() / taking.sum()
        elif len(drawn):
            run.history.losses[at] = losses.mean()
        clipped = torch.where(norms.isfinite(), norms, 0) * sums.clip_factors(norms, limits)
        for tracker in self.trackers:
            tracker.after_step(drawn, norms, clipped=clipped)

    def name_key(self, fingerprint):
        """History and trackers name the key that the run draws under, so that none is added up with
        what shares its noise.
        """
        self.run.history.key_fingerprint = fingerprint
        for tracker in self.trackers:
            # one of the user's own need not know
            if fingerprint is not None and hasattr(tracker, "note_key"):
                tracker.note_key(fingerprint, self.seed is not None)

    def least_limits(self, lower, drawn, indices):
        """To what each example drawn is clipped, by the plan and by what its trackers ask for, and
        whether that lies on the device.
        """
        # Avoid host syncs: never read GPU values here.
        limits = self.plan.clip_norms(drawn)
        away = any(norms is not None and on_accelerator(norms) for norms in lower)
        for norms in lower:
            if norms is not None:
                there = self.device if away else norms.device
                own = norms.to(there)[indices if away else drawn]
                limits = torch.minimum(to_device(limits, there), own)
        return limits, away

    def give_gradients(self, released):
        """Each parameter its part of what the step releases; nothing to those without a part."""
        sizes = [p.numel() for p in self.parameters.values()]
        for p, piece in zip(self.parameters.values(), released.split(sizes)):
            p.grad = piece.view_as(p).to(p.dtype)
        for t in traces.untrained(self.run.model).values():
            t.grad = None  # one left from elsewhere has no noise, and the optimizer would follow it

    def check_held(self):
        """Refuse an optimizer that was given parameters from elsewhere since the run began."""
        own = {id(p) for p in self.run.model.parameters()}
        if any(
            id(p) not in own for group in self.run.optimizer.param_groups for p in group["params"]
        ):
            raise ValueError(
                "optimizer must hold parameters of the model only, got others that were added "
                "since the run began: their gradients have neither been clipped nor been given "
                "noise"
            )

    def take_step(self):
        """Move by the gradients that `step` has left."""
        self.stepping = True
        self.run.optimizer.step()
        self.stepping = False

    @contextlib.contextmanager
    def _own_randomness(self, stream):
        """What the model draws (dropout) depends on seed and step alone; the global generators stay
        as they were.
        """
        with forked_rng(self.device):
            seed_torch(derive_key(self.forward_seed, stream, self.run.step), self.device)
            yield

    @contextlib.contextmanager
    def modes_kept(self):
        """A callback may switch to eval mode; training goes on in the modes it began with."""
        yield
        for module, mode in self.modes.items():
            module.training = mode

    def noted(self):
        """The tensors of the model, and of a loss that is a module, before a pass."""
        values, self.compared_by_value = not self.compared_by_value, True
        return {
            name: traces.noted(module, values=values)
            for name, module in self.watched_modules.items()
            if isinstance(module, torch.nn.Module)
        }

    def check_untouched(self, before):
        """Refuse a pass that has changed what was `noted`."""
        for name, tensors in before.items():
            found = traces.check_untouched(
                self.watched_modules[name], tensors, name=name, wait=False
            )
            self.defer_check(found)

    def defer_check(self, found):
        """What is known on the device only, {what: whether it is so}."""
        for what, so in found.items():
            self.pending_checks[what] = self.pending_checks.get(what, False) | so

    def run_deferred_checks(self):
        """Refuse what was noted. Waits for the device."""
        later, self.pending_checks = self.pending_checks, {}
        if later.pop("mixed", False):
            independence.refuse_loss()
        traces.check_later(later)

    def end_epoch(self, on_epoch):
        run, plan = self.run, self.plan
        self.run_deferred_checks()
        self.count_dropped()
        # each epoch's first step is compared by values, as its end waited for the device anyway
        self.compared_by_value = False
        epoch = math.ceil(run.step / plan.steps_per_epoch)
        losses = run.history.losses[(epoch - 1) * plan.steps_per_epoch : run.step]
        entry = {"epoch": epoch, "step": run.step, "loss": losses.nanmean().item()}
        if on_epoch is not None:
            entry |= seen_at_epoch(on_epoch(run), entry)
            run.stopping = self.ranks.any(run.stopping)
        run.history.epochs.append(entry)

    def end_early(self):
        """A callback has asked for the end: the history is that of the steps taken."""
        run, history = self.run, self.run.history
        history.stopped = run.step < run.plan.steps
        history.losses = history.losses[: run.step]
        history.batch_sizes = history.batch_sizes[: run.step]

    def count_dropped(self):
        count, history = int(self.dropped), self.run.history
        if count and not history.dropped:
            warnings.warn(
                f"{count} per-example gradients so far were not finite and contributed nothing; "
                "the run's history counts them in `dropped`",
                RuntimeWarning,
                stacklevel=3,
            )
        history.dropped = count

    def begin_alike(self, callbacks, checkpoint):
        """Refuse ranks given different things; share what rank 0 has drawn, except the noise."""
        run = self.run

        def described():
            module = run.model
            trackers = [(type(item).__name__, item.state_dict()) for item in self.trackers]
            return {
                "plan": distributed.digest(run.plan.config()),
                "data": self.data_digest,
                "model": distributed.digest(
                    [(name, p.requires_grad) for name, p in module.named_parameters()],
                    [(name, part.training) for name, part in module.named_modules()],
                    module.state_dict(),
                ),
                "loss": getattr(self.loss, "__qualname__", type(self.loss).__qualname__),
                "optimizer": distributed.digest(
                    self.optimizer_settings, run.optimizer.state_dict()
                ),
                "seed": repr(self.seed),
                "method": self.asked_method,
                "precision": repr(self.precision),
                "trackers": distributed.digest(trackers),
                "callbacks": repr(
                    [each is not None for each in (callbacks.on_step, callbacks.on_epoch)]
                ),
                "checkpoint": "none" if checkpoint is None else f"every {checkpoint.every}",
                "step": str(run.step),
            }

        self.ranks.same(
            described,
            "be given the same plan, data, model and options, and read the same checkpoint",
        )
        if self.seed is None:
            state = self.generators["sampling"].get_state(with_key=True), self.forward_seed
            state, self.forward_seed = self.ranks.from_first(state)
            self.generators["sampling"].set_state(state)

    def check_alike(self):
        """Refuse ranks whose weights have become different."""
        self.ranks.same(
            lambda: {"weights": distributed.digest(self.run.model.state_dict())},
            f"hold the same weights after step {self.run.step}",
        )

    def identity(self):
        return {
            "format": _FORMAT,
            "plan": self.run.plan.config(),
            "seed": self.seed,
            "optimizer": self.optimizer_settings,
            "parameters": {name: list(p.shape) for name, p in self.parameters.items()},
            "data": self.data_digest,
        } | ({"precision": self.precision} if self.precision else {})

    @property
    def data_digest(self):
        return self.examples.digest

    def save(self, path):
        self.run_deferred_checks()
        self.count_dropped()
        self.check_alike()
        if self.ranks.first:
            run = self.run
            model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
            self.write(path, model=model, optimizer=optimizer)
        self.ranks.any(False)  # none goes on if rank 0 could not write

    def write(self, path, **rest):
        """Write a checkpoint: draws, accounts and history, with the `rest`."""
        history = self.run.history.saved()
        content = {
            "identity": self.identity(),
            "step": self.run.step,
            "generators": {name: g.get_state() for name, g in self.generators.items()},
            "stateful": {name: item.state_dict() for name, item in self.stateful.items()},
            "history": history | {"epochs": plain(history["epochs"])},
        }
        if self.seed is None:
            write_keys(key_file(path), self.generators, self.forward_seed)
        write_checkpoint(path, content | rest)

    @contextlib.contextmanager
    def _nothing_forgotten(self):
        """Where a checkpoint is refused, filters and trackers stay what they were: what a filter
        has paid is never forgotten.
        """
        before = {}
        for name, item in self.stateful.items():
            with contextlib.suppress(Exception):  # one of the user's that has no state yet
                before[name] = copy.deepcopy(item.state_dict())
        try:
            yield
        except BaseException:
            for name, state in before.items():
                with contextlib.suppress(Exception):  # one that takes no earlier state
                    self.stateful[name].load_state_dict(state)
            raise

    def take_over(self, content):
        """Go on from the draws, accounts and history of a checkpoint of this run."""
        with self._nothing_forgotten():
            self._take_over(content)

    def _take_over(self, content):
        for name, state in content["stateful"].items():
            self.stateful[name].load_state_dict(state)
        for name, state in content["generators"].items():
            self.generators[name].set_state(state)
        run, held = self.run, content["history"]
        known = {
            "plan": self.described_plan,
            "steps": content["step"],
            "tracker": run.history.tracker,
            "persons": run.history.persons,
        }
        if not _has_ended(content, run.plan):  # the next step is drawn under the keys that are here
            known["key_fingerprint"] = None
        run.step, run.history = content["step"], History(**held | known)
        self.name_key(run.history.key_fingerprint)
        run.history.losses = run.history.losses.to(self.device)
        run.history.batch_sizes = run.history.batch_sizes.to(self.device)
        self.dropped.fill_(run.history.dropped)

    def check_same_run(self, content, path, name="checkpoint"):
        """Refuse the content of a checkpoint of another run."""
        theirs, ours = content["identity"], self.identity()
        if theirs != ours:
            differ = [
                f"{key} {theirs.get(key)} there, {ours.get(key)} here"
                for key in {**ours, **theirs}
                if theirs.get(key) != ours.get(key)
            ]
            raise ValueError(
                f"{name} must come from a run of the same plan, seed, data, architecture and "
                f"optimizer, but {os.fspath(path)!r} differs: {'; '.join(differ)}"
            )
        if set(content["stateful"]) != set(self.stateful):
            theirs, ours = set(content["stateful"]), set(self.stateful)
            if own := sorted(name for name in theirs ^ ours if name.startswith("tracker ")):
                raise ValueError(
                    f"{name} must come from a run with the same track, filter and trackers, but "
                    f"{os.fspath(path)!r} {'has' if own[0] in theirs else 'lacks'} {own[0]!r}: "
                    "give the same, or another checkpoint"
                )
            raise ValueError(
                f"stateful must name {sorted(theirs)} as the checkpoint does, got {sorted(ours)}"
            )

    def load(self, path):
        content = read_checkpoint(path, (*TAKEN_OVER, "model", "optimizer"))
        self.check_same_run(content, path)
        run = self.run
        check_fits(run, content, path)
        ended = _has_ended(content, run.plan)
        if self.seed is None and not ended and self.ranks.first:  # a finished run draws no more
            found = read_keys(key_file(path), self.generators)
            self.forward_seed = self.forward_seed if found is None else found
        with self._nothing_forgotten():
            self._take_over(content)  # refuses other trackers, before anything of the user changes
            run.model.load_state_dict(content["model"])
            run.optimizer.load_state_dict(content["optimizer"])


def _has_ended(content, plan):
    """Whether the checkpoint is of a run that takes no further step."""
    return content["step"] == plan.steps or content["history"].get("stopped", False)


def _settings_of(optimizer):
    """What is compared of an optimizer: a scheduler keeps the rate that it began with as
    initial_lr, and may change others, such as the momentum, which are compared as the defaults
    have them.
    """
    groups = optimizer.param_groups
    rates = [float(group.get("initial_lr", group.get("lr", 0))) for group in groups]
    return [type(optimizer).__name__, *rates, _numbers_of(optimizer.defaults)]


def _numbers_of(defaults):
    """What an optimizer was made with, as far as these are numbers: what a checkpoint can hold."""
    found = {}
    for name, value in sorted(defaults.items()):
        if name == "lr":  # compared group by group
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(part, (bool, int, float)) for part in parts):
            found[name] = list(parts) if parts is value else value
    return found


@contextlib.contextmanager
def deferred_interrupt():
    """The first Ctrl-C sets a flag (what the yielded function returns); the second interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before, seen = signal.getsignal(signal.SIGINT), []

    def note(number, frame):
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
