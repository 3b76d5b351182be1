"""R runs of one architecture: their weights, their draws, one step of all, and what remains.

`dpcompanion.training.ensembles` trains them.
"""

import copy
import functools
import math
import os
from collections.abc import Iterable, Sequence

import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion._types import Array, Loss, Numbers
from dpcompanion.gradients import checks, clipping, independence, proof, states, sums, traces
from dpcompanion.gradients.microbatches import default_microbatch_size
from dpcompanion.gradients.stacking import StackedNetwork
from dpcompanion.gradients.tensors import UnsupportedModel, call_with, tolerances
from dpcompanion.mechanism import noise
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.training.callbacks import History
from dpcompanion.training.checkpoints import digest_of, plain, read_checkpoint, write_checkpoint
from dpcompanion.training.options import Performance

_FORMAT = 4
# Examples of all runs in one pass at most, by default.
_MOST = 1024


class Ensemble:
    """R runs of one architecture: what callbacks see and may read, and what remains after training.

    Args:
        model, loss, data, plans: as in `dpcompanion.training.train_ensemble`, which makes the
            ensemble.
        seeds, learning_rate, momentum, weight_decay, members: as there.
        performance: device, method, precision and microbatch_size.
        generator_device: as there.

    Attributes:
        plans, seeds: of each run.
        step: steps done, by the runs that go on.
        vectors: the trainable parameters of each run, one after the other, (R, parameters).
        learning_rate: (R,), which a callback may change in place.
        losses: mean loss of each step's examples, (R, steps) float64; nan for an empty batch or a
            step that was not taken (yet).
        batch_sizes: (R, steps) int64.
        dropped: how many per-example gradients were not finite and so contributed nothing, (R,)
            int64.
        epochs: what `on_epoch` returned, a dict each, with `epoch` and `step`.
        indices, norms: of the step just done and of each run, the examples and their gradient norms
            before clipping.

    Raises:
        ValueError: plans, models, members or data that do not fit together, an argument outside its
            range, a model that mixes examples or draws at random, or a method or precision that
            does not fit it.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        loss: Loss,
        data: Sequence[torch.Tensor],
        plans: DPSGDPlan | Sequence[DPSGDPlan],
        *,
        seeds: Iterable[int],
        learning_rate: Numbers,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        members: Array | None = None,
        performance: Performance,
        generator_device: str | torch.device = "cpu",
    ):
        """Many arguments, since it takes what `train_ensemble` takes."""
        self.seeds = _checked_seeds(seeds)
        runs = len(self.seeds)
        models, self._plans = _models_and_plans(model, plans, runs)
        self._planned = [checks.numbers_of(plan) for plan in self._plans]
        n, self.steps = self.plans[0].n, self.plans[0].steps
        if not isinstance(data, (tuple, list)) or len(data) != 2:
            raise ValueError(
                "data must be two tensors (x, y), which runs side by side share (train takes data "
                f"sets too), got a {type(data).__name__}"
            )
        x, y = data
        checks.check_data(x, y, n)
        self.members = None if members is None else _checked_members(members, runs, n)
        _checks.in_interval("learning_rate", learning_rate, 0, math.inf, closed="left")
        self.momentum = _checks.number("momentum", momentum, 0, math.inf, closed="left")
        self.weight_decay = _checks.number("weight_decay", weight_decay, 0, math.inf, closed="left")

        there = performance.device
        self.device = next(models[0].parameters()).device if there is None else torch.device(there)
        self._take_model(models, loss, x, y)
        like = {"dtype": self.vectors.dtype, "device": self.device}
        rates = torch.as_tensor(learning_rate, dtype=torch.float64)
        if rates.shape not in ((), (runs,)):
            raise ValueError(
                f"learning_rate must be a number or have shape ({runs},), got {tuple(rates.shape)}"
            )
        self.learning_rate = rates.expand(runs).to(**like).clone()
        self._begun_with = self.learning_rate.tolist()
        self._expected = torch.tensor([plan.expected_batch_size for plan in self.plans], **like)[
            :, None
        ]
        self._velocity = torch.zeros_like(self.vectors) if self.momentum else None
        self._sums = torch.zeros_like(self.vectors)
        # What each run draws its batches and its noise from.
        self._generators = [noise.generators(seed, generator_device) for seed in self.seeds]
        self._samplers = [
            plan.sampler(g["sampling"]) for plan, g in zip(self.plans, self._generators)
        ]
        self.precision = performance.precision
        self.method = self._resolved(performance.method, self.precision)
        self._size = performance.microbatch_size or default_microbatch_size(
            self._template, loss, self.x, self.y, self.method, self.precision, most=_MOST
        )
        self._begun = {}
        self._later, self._mixed = (
            torch.zeros((), dtype=torch.bool, device=self.device) for _ in range(2)
        )
        self._network = self._workplace()
        self.step, self.epochs = 0, []
        self._added = False  # whether something was added that no plan knows of
        self._ends = torch.full((runs,), self.steps, dtype=torch.int64)  # of each run its last step
        self.losses = torch.full(
            (runs, self.steps), math.nan, dtype=torch.float64, device=self.device
        )
        self.batch_sizes = torch.zeros(runs, self.steps, dtype=torch.int64)
        self.dropped = torch.zeros(runs, dtype=torch.int64, device=self.device)
        self.indices: list[torch.Tensor | None] = [None] * runs
        self.norms: list[torch.Tensor | None] = [None] * runs

    def _take_model(self, models, loss, x, y):
        """Check data and models, and put the models' parameters in `vectors`."""
        for one in models:
            checks.check_alone(one, opacus=True)
        self._template = copy.deepcopy(models[0]).to(self.device)
        self.x, self.y, self.loss = x.to(self.device), y.to(self.device), loss
        checks.check_model(self._template)
        checks.check_types(self._template, x)
        checks.check_untrained(loss)
        checks.check_sums(self._template)
        checks.try_out(self._template, loss, self.x, self.y)
        traces.check_leaves_no_trace(self._template, self.x[:2])
        own = {name: p for name, p in self._template.named_parameters() if p.requires_grad}
        self._shapes, self._places, end = {}, {}, 0
        for name, p in own.items():
            self._shapes[name] = p.shape
            self._places[name] = slice(end, end + p.numel())
            end += p.numel()
        like = {"dtype": next(iter(own.values())).dtype, "device": self.device}
        self.vectors = (
            torch.stack([self._vector(one) for one in models])
            .to(**like)
            .expand(len(self), -1)
            .clone()
        )

    def _resolved(self, method, precision):
        """The method, once proved for the model; "func" for one whose layers cannot be stacked."""
        found = clipping.resolve_method(
            self._template, self.loss, self.x, self.y, method, precision
        )
        if found == "func" or all(
            self._stacks(one, found) for one in dict.fromkeys((None, precision))
        ):
            return found
        if precision is not None:
            raise ValueError(
                f"precision {precision!r} takes a model whose layers can be stacked, got one of "
                "others"
            )
        if method != "auto":
            raise ValueError(
                f"method {method!r} does not fit this model: its layers cannot be stacked; use "
                "'func' or 'auto'"
            )
        return "func"

    @property
    def plans(self) -> tuple[DPSGDPlan, ...]:
        """Of each run its plan."""
        return self._plans

    def __len__(self):
        """R, the number of runs."""
        return len(self.seeds)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """{name: (R, *shape)}, views of `vectors`."""
        return self.split(self.vectors)

    @property
    def steps_per_epoch(self) -> int:
        """That of the first plan."""
        return self.plans[0].steps_per_epoch

    @property
    def steps_taken(self) -> torch.Tensor:
        """By each run, (R,) int64; fewer than `step` by one that a callback has stopped."""
        return self._ends.clamp(max=self.step)

    @property
    def ended(self) -> bool:
        """Whether no run goes on."""
        return self.step >= int(self._ends.max())

    def stop(self, runs: Array | None = None) -> None:
        """End some runs after the step just done, or all: for a callback. Early stopping in the
        text of `dpcompanion.training.callbacks` says what may decide it. The others go on as if
        they were alone.

        Args:
            runs: (k,) indices, or None for all.

        Raises:
            ValueError: what are no indices of runs.
        """
        runs = range(len(self)) if runs is None else runs
        _checks.in_interval("runs", runs, 0, len(self), closed="left")
        chosen = torch.as_tensor(_checks.unlabelled(runs)).cpu().reshape(-1)
        if chosen.numel() and (chosen.is_floating_point() or chosen.dtype == torch.bool):
            raise ValueError(f"runs must be indices of runs, got {chosen.dtype}")
        chosen = chosen.long()
        self._ends[chosen] = self._ends[chosen].clamp(max=self.step)

    def history(self, run: int) -> History:
        """The history of one run: the steps that it took, its statement, its epsilons and its card.

        Raises:
            ValueError: what is no index of a run, or of runs with `add`, whose plans do not say
                what they released.

        >>> from dpcompanion.training import Callbacks, cross_entropy, models, train_ensemble
        >>> x, y = torch.randn(100, 2), torch.arange(100) % 2
        >>> plan = DPSGDPlan(
        ...     n=100,
        ...     sample_rate=0.1,
        ...     steps=20,
        ...     max_grad_norm=1.0,
        ...     noise_multiplier=2.0,
        ...     delta=1e-3,
        ... )
        >>> def stop(ensemble):
        ...     if ensemble.step == 5:
        ...         ensemble.stop([1])
        >>> runs = train_ensemble(
        ...     models.linear(2, 2),
        ...     cross_entropy,
        ...     (x, y),
        ...     plan,
        ...     seeds=[0, 1],
        ...     learning_rate=0.1,
        ...     callbacks=Callbacks(on_step=stop),
        ... )
        >>> runs.steps_taken.tolist(), runs.history(1).stopped, len(runs.history(1).losses)
        ([20, 5], True, 5)
        """
        run = _checks.whole_number("run", run, 0, len(self) - 1)
        if self._added:
            raise ValueError(
                "add must be None in a run of which there is a history: what it adds to the "
                "clipped sums is outside the plan's guarantee"
            )
        taken, plan = int(self.steps_taken[run]), self.plans[run]
        return History(
            self.losses[run, :taken].clone(),
            self.batch_sizes[run, :taken].clone(),
            dropped=int(self.dropped[run]),
            epochs=[dict(epoch) for epoch in self.epochs if epoch["step"] <= taken],
            seed=self.seeds[run],
            key_fingerprint=noise.fingerprint(self.seeds[run], self._generators[run]),
            guarantee=plan.statement(steps=taken),
            precision=self.precision or str(self.vectors.dtype).removeprefix("torch."),
            stopped=int(self._ends[run]) < self.steps,
            plan=plan,
            steps=taken,
        )

    def split(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows (k, parameters) as {name: (k, *shape)}, without a copy."""
        return {
            name: vectors[:, place].view(-1, *self._shapes[name])
            if self._shapes[name]
            else vectors[:, place.start]
            for name, place in self._places.items()
        }

    def model(self, run: int) -> torch.nn.Module:
        """A module with the weights of one run."""
        model = copy.deepcopy(self._template)
        with torch.no_grad():
            for name, p in self.parameters.items():
                model.get_parameter(name).copy_(p[run])
        return model

    def predict(self, x: torch.Tensor, *, microbatch_size: int = 1024) -> torch.Tensor:
        """The outputs of every run for x, (R, len(x), ...), in evaluation mode; `microbatch_size`
        examples at once.
        """
        microbatch_size = _checks.whole_number("microbatch_size", microbatch_size, 1)
        model = copy.deepcopy(self._template).eval()
        parameters = self.parameters
        with torch.no_grad():
            return torch.stack(
                [
                    torch.cat(
                        [
                            call_with(model, {name: p[run] for name, p in parameters.items()}, part)
                            for part in x.to(self.device).split(microbatch_size)
                        ]
                    )
                    for run in range(len(self))
                ]
            )

    def gradients_of(
        self, x: torch.Tensor, y: torch.Tensor, *, runs_at_once: int | None = None
    ) -> torch.Tensor:
        """Each run's loss gradient at each of m points (x, y), not clipped, (R, m, parameters).

        By default as many runs are worked on at once as keep 256 MiB.
        """
        x, y = x.to(self.device), y.to(self.device)
        found = self.vectors.new_empty(len(self), len(x), self.vectors.shape[1])
        if runs_at_once is None:
            runs_at_once = max(1, sums.BUDGET // max(1, found[0].numel()))
        runs_at_once = _checks.whole_number("runs_at_once", runs_at_once, 1)
        for start in range(0, len(self), runs_at_once):
            rows = slice(start, start + runs_at_once)
            found[rows] = self._explicit(rows, x, y)
        return found

    def norms_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The norm of each run's gradient at each of n points (x, y), inf if not finite, (R, n)."""
        x, y = x.to(self.device), y.to(self.device)
        found = self.vectors.new_empty(len(self), len(x))
        for rows, part in _passes(len(self), len(x), self._pass_size()):
            runs = len(self.seeds[rows])
            wide_x, wide_y = (t[part].unsqueeze(0).expand(runs, *t[part].shape) for t in (x, y))
            found[rows, part] = self._pass(self._network, rows, wide_x, wide_y, None).norms.reshape(
                runs, -1
            )
        return found

    def _vector(self, model):
        own = {name: p for name, p in self._template.named_parameters() if p.requires_grad}
        theirs = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if {name: p.shape for name, p in own.items()} != {
            name: p.shape for name, p in theirs.items()
        }:
            raise ValueError(
                "model must be of one architecture for all runs, but their parameters differ"
            )
        shared, given = (
            {
                name: t
                for name, t in [*one.named_parameters(), *one.named_buffers()]
                if name not in own
            }
            for one in (self._template, model)
        )
        differ = sorted(set(shared) ^ set(given)) or [
            name for name, t in shared.items() if not torch.equal(t, given[name].to(t))
        ]
        if differ:
            raise ValueError(
                "model must have the same frozen parameters and buffers in all runs, got others "
                f"of {', '.join(differ)}"
            )
        return torch.cat([theirs[name].detach().flatten().to(self.device) for name in own])

    def _stacks(self, precision, method):
        """Whether two different runs give stacked what each gives alone, in this precision."""
        rows = proof.largest_gradients(self._template, self.loss, self.x, self.y)
        x, y = self.x[rows], self.y[rows]
        model = copy.deepcopy(self._template)
        pair = torch.stack([self.vectors[0], self.vectors[0] / 2])
        try:
            network = StackedNetwork(self._template)
            network.load(self.split(pair))
            with traces.evaluating(network.module):
                together = sums.layerwise(
                    network.module,
                    self.loss,
                    torch.cat([x, x]),
                    torch.cat([y, y]),
                    math.inf,
                    method,
                    2,
                    precision,
                )
        except (UnsupportedModel, RuntimeError, AttributeError, TypeError):
            return False
        for run, vector in enumerate(pair):
            with torch.no_grad():
                for name, p in self.split(vector[None]).items():
                    model.get_parameter(name).copy_(p[0])
            with traces.evaluating(model):
                alone = sums.layerwise(model, self.loss, x, y, math.inf, method, None, precision)
            error = sum(
                (g - together.gradients[name][run]).norm() for name, g in alone.gradients.items()
            )
            error += (alone.norms - together.norms.chunk(2)[run]).norm()
            if (
                not error
                <= tolerances(pair if precision is None else pair.bfloat16())[0] * alone.norms.sum()
            ):
                return False
        return True

    def _workplace(self):
        """What a thread needs for itself, since `torch.func` swaps a module's parameters."""
        network = (
            copy.deepcopy(self._template)
            if self.method == "func"
            else StackedNetwork(self._template)
        )
        module = network.module if isinstance(network, StackedNetwork) else network
        self._begun[network] = (
            states.state_of(module, parameters=False),
            [(b, b.clone()) for b in _buffers(module)],
        )
        return network

    def _check_as_begun(self, network):
        """The network has kept nothing of its examples, and is in the state that was proved."""
        state, buffers = self._begun[network]
        module = network.module if isinstance(network, StackedNetwork) else network
        if states.state_of(module, parameters=False) != state:
            raise ValueError(
                "model must stay in the state in which the runs began, since that was proved to "
                "treat examples one by one, but a mode, a flag or a hook of a layer has changed"
            )
        for b, value in buffers:
            self._later |= ~traces.equal(b, value)
        if self.device.type == "cpu":
            self._check_later()

    def _check_later(self):
        """What a device was not asked at once. Waits for it."""
        if self._mixed:
            independence.refuse_loss()
        if self._later:
            traces.refuse_statistics("a buffer")

    def _pass_size(self):
        if self.method != "func":
            return self._size
        return max(1, min(self._size, sums.BUDGET // self.vectors.shape[1]))

    def _pass(self, network, rows, x, y, limits):
        """Clipped sums of x, y (runs, examples, ...) for the runs in `rows`; limits (runs,
        examples), None for norms."""
        limits = None if limits is None else limits.flatten()
        x, y, parameters = x.flatten(0, 1), y.flatten(0, 1), self.split(self.vectors[rows])
        if self.method == "func":
            return sums.functional(network, self.loss, x, y, limits, parameters)
        network.load(parameters)
        runs = len(self.seeds[rows])
        return sums.layerwise(
            network.module, self.loss, x, y, limits, self.method, runs, self.precision
        )

    def _explicit(self, rows, x, y):
        gradients, _ = torch.func.vmap(
            sums.gradients_and_losses(self._template, self.loss), in_dims=(0, None, None)
        )(self.split(self.vectors[rows]), x, y)
        return torch.cat([g.flatten(2) for g in gradients.values()], 2)

    def _draw(self, run):
        """The examples of this step and their clip norms, on the CPU."""
        indices = self._samplers[run].draw().cpu()
        if self.members is not None:
            indices = indices[self.members[run, indices]]
        return indices, self.plans[run].clip_norms(indices)

    def _sum_clipped(self, rows, network):
        """Draw the batches of the runs in `rows`, and sum their clipped gradients."""
        going = (self._ends > self.step).tolist()
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        draws = [self._draw(run) if going[run] else none for run in rows]
        sizes = torch.tensor([len(indices) for indices, _ in draws])
        self.batch_sizes[rows.start : rows.stop, self.step] = sizes
        self._sums[rows.start : rows.stop].zero_()
        indices = torch.zeros(len(rows), max(1, int(sizes.max())), dtype=torch.int64)
        # 0 beyond a run's own examples: they count nothing
        limits = torch.zeros(indices.shape, dtype=torch.float64)
        for k, (own, norms) in enumerate(draws):
            indices[k, : len(own)], limits[k, : len(own)] = own, norms
        indices, limits = to_device(indices, self.device), to_device(limits, self.device)
        present = limits > 0
        norms, losses = torch.zeros_like(limits), torch.zeros_like(limits)
        for some, part in _passes(len(rows), int(sizes.max()), self._pass_size()):
            chosen = slice(rows.start + some.start, min(rows.start + some.stop, rows.stop))
            longest = min(part.stop, int(sizes[some].max()))
            if longest <= part.start:
                continue
            part = slice(part.start, longest)
            which = indices[some, part]
            total = self._pass(network, chosen, self.x[which], self.y[which], limits[some, part])
            if total.mixed is not None:
                self._mixed |= total.mixed
            into = self.split(self._sums[chosen])
            for name, g in total.gradients.items():
                into[name] += g
            norms[some, part] = total.norms.reshape(which.shape).double()
            losses[some, part] = total.losses.reshape(which.shape).double()
        self._check_as_begun(network)
        losses = torch.where(present, losses, 0).sum(1) / present.sum(1)  # nan for an empty batch
        self.losses[rows.start : rows.stop, self.step] = losses
        self.dropped[rows.start : rows.stop] += (norms.isinf() & present).sum(1)
        for k, run in enumerate(rows):
            size = len(draws[k][0])
            self.indices[run], self.norms[run] = indices[k, :size], norms[k, :size]

    def _add(self, add):
        """What `add` gives, to the clipped sums, before noise."""
        if add is None:
            return
        more = add(self)
        if not isinstance(more, torch.Tensor) or more.shape != self.vectors.shape:
            raise ValueError(
                f"add must return a tensor of shape {tuple(self.vectors.shape)}, got "
                f"{tuple(more.shape) if isinstance(more, torch.Tensor) else type(more).__name__}"
            )
        self._sums += more

    def _add_noise(self, rows, _):
        """Noise to the sums of those of the runs in `rows` that go on."""
        for run in rows:
            if self._ends[run] > self.step:
                self._sums[run] = self.plans[run].noisy(
                    self._sums[run], self._generators[run]["noise"]
                )

    def _update(self):
        """Move every run by its noisy mean gradient."""
        move = self._sums / self._expected
        if self.weight_decay:
            move.add_(self.vectors, alpha=self.weight_decay)
        if self._velocity is not None:
            move = self._velocity.mul_(self.momentum).add_(move)
        move = self.learning_rate[:, None] * move
        if int(self._ends.min()) <= self.step:
            move = move.masked_fill((self._ends <= self.step).to(self.device)[:, None], 0)
        self.vectors -= move
        self.step += 1

    def _identity(self):
        identity = {
            "format": _FORMAT,
            "plans": [plan.config() for plan in self.plans],
            "seeds": self.seeds,
            "parameters": {name: list(shape) for name, shape in self._shapes.items()},
            "learning_rate": self._begun_with,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "data": self._data_digest,
        }
        if self.precision:
            identity["precision"] = self.precision
        return identity | ({"add": True} if self._added else {})

    @functools.cached_property
    def _data_digest(self):
        return digest_of(self.x, self.y, *([] if self.members is None else [self.members]))

    def _seeds_and_data(self):
        """(seed, digest of the data) of each run."""
        shared = digest_of(self.x, self.y)
        if self.members is None:
            return [(seed, shared) for seed in self.seeds]
        return [(seed, f"{shared} {digest_of(own)}") for seed, own in zip(self.seeds, self.members)]

    _KEPT = ("vectors", "learning_rate", "losses", "batch_sizes", "dropped", "_velocity", "_ends")

    def _save(self, path, stateful):
        self._check_later()
        write_checkpoint(
            path,
            {
                "identity": self._identity(),
                "step": self.step,
                "epochs": plain(self.epochs),
                "tensors": {name: getattr(self, name) for name in self._KEPT},
                "generators": [
                    {name: g.get_state() for name, g in streams.items()}
                    for streams in self._generators
                ],
                "stateful": {name: item.state_dict() for name, item in stateful.items()},
            },
        )

    def _load(self, path, stateful):
        content = read_checkpoint(
            path, ("identity", "step", "epochs", "tensors", "generators", "stateful")
        )
        if content["identity"] != self._identity():
            raise ValueError(
                "checkpoint must come from runs of the same plans, seeds, data, architecture and "
                f"learning rates, with `add` or without as here, but {os.fspath(path)!r} holds "
                "another ensemble"
            )
        if set(content["stateful"]) != set(stateful):
            raise ValueError(
                f"stateful must name {sorted(content['stateful'])} as the checkpoint does, got "
                f"{sorted(stateful)}"
            )
        for name, kept in content["tensors"].items():
            if kept is not None:
                getattr(self, name).copy_(kept)
        for streams, theirs in zip(self._generators, content["generators"]):
            for name, state in theirs.items():
                streams[name].set_state(state)
        for name, state in content["stateful"].items():
            stateful[name].load_state_dict(state)
        self.step, self.epochs = content["step"], content["epochs"]


def _checked_seeds(seeds):
    """One seed for each run."""
    if not isinstance(seeds, Iterable):
        raise ValueError(f"seeds must be a list of whole numbers, one for each run, got {seeds!r}")
    found = [_checks.seed("seeds", seed) for seed in seeds]
    if not found:
        raise ValueError("seeds must name one run at least, got none")
    return found


def _models_and_plans(model, plans, runs):
    """Models, one or one a run, and a plan for each, which agree in what the runs share."""
    own = [plans] if isinstance(plans, DPSGDPlan) else list(plans)
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    for name, items in (("plans", own), ("model", models)):
        if len(items) not in (1, runs):
            raise ValueError(
                f"{name} must be one, or one for each of the {runs} seeds, got {len(items)}"
            )
    if not all(isinstance(plan, DPSGDPlan) for plan in own):
        raise ValueError(f"plans must be a DPSGDPlan, or one for each run, got {own!r:.80}")
    own = tuple(own * (runs // len(own)))
    if len({(plan.n, plan.steps) for plan in own}) > 1:
        raise ValueError(
            f"plans must agree in n and steps, got {sorted({(plan.n, plan.steps) for plan in own})}"
        )
    if any(plan.arithmetic == "float" for plan in own):
        raise ValueError(
            "plans must have arithmetic='real', got 'float': runs side by side have seeds and are "
            "for research"
        )
    return models, own


def _checked_members(members, runs, n):
    """(runs, n) booleans on the CPU."""
    members = torch.as_tensor(members).cpu()
    if members.dtype != torch.bool or members.shape != (runs, n):
        raise ValueError(
            f"members must be booleans of shape ({runs}, {n}), got {members.dtype} of shape "
            f"{tuple(members.shape)}"
        )
    return members


def _buffers(module):
    """Those of a network and of the layers that are stacked in it."""
    parts = (part for one in module.modules() for part in (one, one.__dict__.get("layer")))
    return [
        b
        for part in parts
        if isinstance(part, torch.nn.Module)
        for b in part.buffers(recurse=False)
    ]


def _passes(runs, examples, size):
    """Slices of runs and of examples that cover (runs, examples) with at most `size` numbers each,
    one run at least.
    """
    some = max(1, size // max(1, examples))
    for start in range(0, runs, some):
        for first in range(0, examples, size):
            yield slice(start, start + some), slice(first, first + size)
