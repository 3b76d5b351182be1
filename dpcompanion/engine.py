r"""Opacus with a privacy budget for each example: `IndividualizedPrivacyEngine`.

A drop-in for `opacus.PrivacyEngine`.  Against plain Opacus three lines change: the engine's name, its method, and the
budgets.  The training loop stays as it is, with `BatchMemoryManager` too::

    engine = IndividualizedPrivacyEngine()
    model, optimizer, loader = engine.make_private_with_budgets(
        module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0,
        target_epsilons=budgets, target_delta=1e-5, epochs=10, method="sample")

What makes each budget hold:

* parameters come from `dpcompanion.idp`: for example i the rate q_i and the clip norm c_i, and one noise
  of standard deviation sigma times the mean clip norm;
* the loader's sampler is replaced by independent draws, example i with probability q_i;
* the data set notes which examples it hands out, so that each gradient meets its own clip norm whatever way a draw is
  cut into physical batches.  So a batch must keep its order, from the collate function (which is tried out beforehand)
  to the loss, and be used before the next one is fetched: a loop that fetches ahead gives examples the norms of others;
* the optimizer ends a step with the last piece of its draw: it never joins two draws, takes no example and no draw
  twice, and goes by what was handed out, not by a queue of signals, which an evaluation through the same loader would
  leave out of step;
* with the first batches it is proved against plain autograd that each example's gradient is its own and its norm
  whole, before any step: a weight used outside of its layer is refused, and so is a function that mixes examples. In
  ghost mode, whose criterion is known, that is proved of the losses too;
* the original optimizer takes no step of its own, all trainable parameters are its, and they stay the same ones;
* sums are divided by the expected batch size, $\sum_i q_i$, a public number;
* steps are counted where noise is added, and no more are taken than the budgets were made for.  After a step
  with less noise, as Opacus's schedulers of noise and clipping would have it, every epsilon is infinite;
* a checkpoint holds the states of the generators that noise and draws come from, PyTorch's default ones where none was
  given, and loading it restores them: else a script that seeds itself would repeat its noise.

Neighbours differ by one example; Poisson sampling; each example's guarantee holds whatever the others are
(individualised DP).  The budgets themselves are taken as public, or kept to oneself: rates and clip norms depend on
them.

What the engine cannot see, it takes on trust: that the loop's loss is the mean (or, with loss_reduction "sum", the sum)
of losses of which each depends on one example, and that no batch is mixed before it reaches the module (as mixup does).

Needs Opacus, version 1.6 or later.
"""

import copy
import functools
import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants.accountant import IAccountant
from opacus.data_loader import wrap_collate_with_empty
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _mark_as_processed
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, DPTensorFastGradientClipping
from opacus.validators.errors import UnsupportedModuleError
from torch.utils.data import (BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler,
                              default_collate)

from dpcompanion import _checks, _engine_proof, accounting, idp
from dpcompanion.training.layers import squared_norms
from dpcompanion.training.sampling import PoissonSampler

METHODS = ("sample", "scale", "combined")
MODES = ("hooks", "functorch", "ew", "ghost")
CLIPPINGS = ("flat", "per_layer")


class IndividualizedPrivacyEngine(PrivacyEngine):
    """See the module's text.

    Args:
        accountant: "rdp" or "pld"; what calibrates the noise and states epsilons.
        secure_mode: as in Opacus.

    Once `make_private_with_budgets` was called, `sample_rates`, `max_grad_norms` and `noise_multipliers`, (n,) float64,
    say what each example gets; the last is the noise over its own clip norm.

    >>> import warnings; warnings.simplefilter("ignore")
    >>> model = torch.nn.Linear(5, 2)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5), torch.randint(2, (100,)))
    >>> engine = IndividualizedPrivacyEngine()
    >>> model, optimizer, loader = engine.make_private_with_budgets(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=torch.utils.data.DataLoader(data, batch_size=20), target_epsilons=[1.0] * 70 + [3.0] * 30,
    ...     target_delta=1e-5, epochs=3, max_grad_norm=1.0, method="scale")
    >>> for epoch in range(3):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(x), y).backward()
    ...         optimizer.step()
    >>> [round(epsilon, 2) for epsilon in engine.get_epsilons(1e-5)[[0, 99]].tolist()]
    [1.0, 3.0]
    """

    def __init__(self, *, accountant="rdp", secure_mode=False):
        _checks.one_of("accountant", accountant, accounting.ACCOUNTANTS)
        super().__init__(accountant="rdp", secure_mode=secure_mode)
        self.accountant = _Accountant(accountant)

    def make_private(self, **_):
        raise ValueError("IndividualizedPrivacyEngine needs budgets: call make_private_with_budgets, or use "
                         "opacus.PrivacyEngine")

    make_private_with_epsilon = make_private

    def make_private_with_budgets(self, *, module, optimizer, data_loader, target_epsilons, target_delta, epochs,
                                  max_grad_norm,
                                  method="sample", sample_weight=None, criterion=None, batch_first=True,
                                  loss_reduction="mean", noise_generator=None, grad_sample_mode="hooks",
                                  clipping="flat", wrap_model=True, prove=True):
        """Model, optimizer and loader (in ghost mode the criterion before the loader) that spend each budget in
        `epochs`.

        Args:
            module, optimizer: as in Opacus. Nothing in the module may mix examples. The optimizer holds all trainable
                parameters of the module; freeze the others beforehand.
            data_loader: of a map-style data set. It says the mean rate, 1 / len(data_loader), and is replaced by one
                with Poisson draws, shuffled or not. Its `generator` draws them; without one a generator seeded from
                `noise_generator`, if that is given. Worker processes read the examples of one batch side by side;
                they do not read ahead.
            target_epsilons: (n,) budgets, one for each example of the data set, in its order.
            target_delta: in (0, 1).
            epochs: an epoch has len(data_loader) steps.
            max_grad_norm: the mean clip norm; with per-layer clipping a list of them, one for each parameter, whose
                Euclidean norm is the mean clip norm.
            method: "sample", "scale" or "combined", this one with `sample_weight` in [0, 1].
            criterion: the loss of ghost mode; cross entropy by default.
            batch_first, loss_reduction, noise_generator: as in Opacus.
            grad_sample_mode: "hooks", "functorch", "ew" or "ghost". Small rates make empty batches, and only "hooks"
                takes them for every layer: Opacus cannot in "functorch" with convolutions or embeddings, in "ew" at
                all, nor in "ghost" with embeddings.
            clipping: "flat", or "per_layer" (not in ghost mode): an example's norm for a parameter is its own clip
                norm times the parameter's share of the mean.
            wrap_model: False leaves the module as it is and returns Opacus's hooks in its place (not in "ew" mode).
            prove: False leaves out the proof with the first batches, and takes it on your word that the module treats
                examples one by one and uses every weight in its layer only.

        Raises:
            ValueError: bad input; budgets that cannot be met; and what would void the account: a sampler of one's own,
                a collate_fn that changes the order, drop_last, an iterable data set, a distributed module, an engine
                that has taken steps. A second call before any step replaces the first, whose optimizer then takes no
                step.
            ValueError: Opacus's `UnsupportedModuleError`, which is one, for a module that mixes examples, here
                for layers that do, at the first forward pass for any other; or whose norms are not whole.
        """
        _checks.one_of("method", method, METHODS)
        _checks.one_of("grad_sample_mode", grad_sample_mode, MODES)
        _checks.one_of("clipping", clipping, CLIPPINGS)
        ghost = grad_sample_mode == "ghost"
        if ghost and clipping == "per_layer":
            raise ValueError("clipping must be 'flat' in ghost mode, which knows no norms of single layers")
        if not wrap_model and grad_sample_mode == "ew":
            raise ValueError("wrap_model must be True with grad_sample_mode 'ew', which has no hooks")
        if (sample_weight is not None) != (method == "combined"):
            raise ValueError(f"sample_weight must be given with the method 'combined' and only then, got "
                             f"{sample_weight!r} with {method!r}")
        if self.accountant.steps:
            raise ValueError(f"this engine has already accounted for {self.accountant.steps} steps; use a new one")
        _check_loader(data_loader)
        _check_module(self, module, optimizer)
        if noise_generator is not None and self.secure_mode:
            raise ValueError("noise_generator must be None in secure mode")
        n, epochs = len(data_loader.dataset), _checks.whole_number("epochs", epochs, 1)
        budgets = torch.as_tensor(target_epsilons, dtype=torch.float64).cpu()
        if budgets.shape != (n,):
            raise ValueError(f"target_epsilons must have shape ({n},), one for each example, got "
                             f"{tuple(budgets.shape)}")
        max_grad_norm, shares = _clip_norms(max_grad_norm, clipping, module)
        run = {"target_delta": target_delta, "sample_rate": 1 / len(data_loader), "steps": epochs * len(data_loader),
               "accountant": self.accountant.by}
        noise = self._calibrate(method, budgets, run, max_grad_norm, sample_weight)

        sampling = self.secure_rng if self.secure_mode else data_loader.generator
        if sampling is None and noise_generator is not None:
            seed = torch.randint(2**62, (1,), generator=noise_generator, device=noise_generator.device)
            sampling = torch.Generator().manual_seed(int(seed))
        # The engine's own tensors: what it shows may be written to.
        rates, norms = self.sample_rates.clone(), self.max_grad_norms.clone()
        draws = _Draws(n, rates, sampling or torch.default_generator, len(data_loader))
        noted = _Noted(data_loader.dataset, data_loader)
        self.dataset = data_loader.dataset
        original = module
        module = self._prepare_model(module, batch_first=batch_first, max_grad_norm=max_grad_norm,
                                     loss_reduction=loss_reduction, grad_sample_mode=grad_sample_mode,
                                     wrap_model=wrap_model)
        module.forbid_grad_accumulation()
        optimizer = getattr(optimizer, "original_optimizer", optimizer)
        kind = _GhostOptimizer if ghost else _Optimizer
        optimizer = kind(optimizer, noise_multiplier=noise, max_grad_norm=max_grad_norm,
                         expected_batch_size=float(self.sample_rates.sum()), loss_reduction=loss_reduction,
                         generator=self.secure_rng if self.secure_mode else noise_generator,
                         secure_mode=self.secure_mode)
        proof = _engine_proof.Proof(module, module if wrap_model else original, batch_first=batch_first,
                                    loss_reduction=loss_reduction, ghost=ghost,
                                    batch_size=lambda: len(noted.handed_out or [])) if prove else None
        optimizer.follow(draws, noted, norms, self.accountant, proof, module._module)
        optimizer.shares = shares
        loader = _loader(data_loader, noted, draws, batch_first)
        if not ghost:
            return module, optimizer, loader
        criterion = torch.nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        return module, optimizer, optimizer.clips(module, criterion, loss_reduction), loader

    def _calibrate(self, method, budgets, run, max_grad_norm, sample_weight):
        """Set what each example gets; returns the noise multiplier."""
        counts, full = torch.ones_like(budgets), torch.ones_like(budgets)
        if method == "sample":
            found = idp.sample_parameters(budgets, counts, **run)
            rates, norms, noises = found.sample_rates, max_grad_norm * full, found.noise_multiplier * full
        else:
            if method == "scale":
                found = idp.scale_parameters(budgets, counts, max_grad_norm=max_grad_norm, **run)
                rates = run["sample_rate"] * full
            else:
                found = idp.combined_parameters(budgets, counts, max_grad_norm=max_grad_norm,
                                                sample_weight=sample_weight, **run)
                rates = found.sample_rates
            norms, noises = found.max_grad_norms, found.noise_multipliers
        self.sample_rates, self.max_grad_norms, self.noise_multipliers = rates, norms, noises
        self.accountant.plan(rates.clone(), noises.clone(), budgets.clone(), float(run["target_delta"]), run["steps"])
        return found.noise_multiplier

    def get_epsilons(self, delta):
        """Epsilon of each example after the steps so far, (n,) float64: an upper bound, inf after too little noise.

        By "pld", examples of more than 256 different parameters take the epsilon of one that has no less; before
        the planned end and at the target delta none is said to exceed its budget, which holds by calibration.
        """
        return self.accountant.get_epsilons(delta)

    def get_epsilon(self, delta):
        """The largest epsilon of all examples."""
        return self.accountant.get_epsilon(delta)


class _Accountant(IAccountant):
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
            epsilons = idp.rdp_epsilons(pairs[:, 0], pairs[:, 1], steps=self.steps, delta=delta)
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
                     generators={name: g.get_state() for name, g in self.generators().items()})
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
        generators = self.generators()
        if set(state["generators"]) != set(generators):
            # A generator that starts again would repeat noise that was already used.
            raise ValueError(f"generators must be given as in the run that was saved ({sorted(state['generators'])}), "
                             f"got {sorted(generators)}")
        if state["steps"] < self.steps:
            raise ValueError(f"state_dict must not be earlier than this run, which has taken {self.steps} steps that "
                             f"stay spent, got one of {state['steps']}")
        self.steps, self.voided = state["steps"], self.voided or state["voided"]
        for name, value in state["generators"].items():
            generators[name].set_state(value.cpu())


class _Draws(PoissonSampler, BatchSampler):
    """The batch sampler: an epoch of draws, each a list of indices; remembers the last one and counts them.

    A BatchSampler with the expected batch size, from which Opacus's memory manager makes out its length.
    """

    def __init__(self, n, rates, generator, steps):
        PoissonSampler.__init__(self, n, rates, generator)
        self._steps, self.number, self.last = steps, 0, None
        self.batch_size, self.drop_last = float(self.sample_rate.sum()), False

    def __len__(self):
        return self._steps

    def __iter__(self):
        for _ in range(self._steps):
            self.number, self.last = self.number + 1, self.draw().tolist()
            yield self.last


class _Noted(Dataset):
    """A data set that notes which examples it handed out last; otherwise as the one that it holds."""

    def __init__(self, dataset, loader):
        self._dataset, self.handed_out = dataset, None
        self._workers = _Workers(dataset, loader) if loader.num_workers else None

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        return self._dataset[index]

    def __getitems__(self, indices):
        self.handed_out = list(indices)
        if self._workers and indices:
            return self._workers.read(self.handed_out)
        together = getattr(self._dataset, "__getitems__", None)
        return together(indices) if together and indices else [self._dataset[i] for i in indices]

    def __getattr__(self, name):
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Workers:
    """Worker processes that read the examples of one batch side by side.

    The loader itself has none: they would fetch ahead, and which batch is in use would not be known.
    """

    def __init__(self, dataset, loader):
        self._count, self._parts = loader.num_workers, []
        # Seeds of workers come from a generator of their own, so that draws and noise do not depend on them.
        self._loader = DataLoader(dataset, batch_sampler=self._parts, collate_fn=list, num_workers=self._count,
                                  persistent_workers=True, timeout=loader.timeout,
                                  worker_init_fn=loader.worker_init_fn,
                                  multiprocessing_context=loader.multiprocessing_context,
                                  generator=torch.Generator().manual_seed(int(torch.randint(
                                      2**62, (1,), generator=loader.generator))) if loader.generator else None)

    def read(self, indices):
        size = math.ceil(len(indices) / self._count)
        self._parts[:] = [indices[start:start + size] for start in range(0, len(indices), size)]
        return [example for part in self._loader for example in part]


class _Following:
    """What both optimizers share: each gradient meets its example's clip norm, each draw becomes one step."""

    #: Of each parameter in the clip norm, for clipping per layer.
    shares = None

    def follow(self, draws, noted, norms, accountant, proof, module):
        self._draws, self._noted, self._norms, self._accountant = draws, noted, norms, accountant
        self._proof, self._module, self._trained = proof, module, _trainable(module)
        self._own_step = False
        original = self.original_optimizer
        if hasattr(original, "_budgets_guard"):
            original._budgets_guard.remove()
        original._budgets_guard = original.register_step_pre_hook(self._only_after_noise)
        self._draw, self._taken = None, -1                 # the draw that is being added up, and the last index in it
        self._ended = False
        #: Gradients that were not finite, and so contributed nothing.
        self.dropped = 0
        self._noise_std = self.noise_multiplier * self.max_grad_norm
        accountant.generators, accountant.follower = self._generators, self

    def _generators(self):
        """By name, what noise and draws come from; in secure mode that has no state to keep."""
        if self.secure_mode:
            return {}
        found = {"noise": self.generator} if self.generator is not None else {
            f"default of {p.device}": torch.cuda.default_generators[p.device.index] if p.is_cuda
            else torch.default_generator for p in self.params}
        sampling = self._draws.generator
        return {**found, "default of cpu" if sampling is torch.default_generator else "sampling": sampling}

    def _only_after_noise(self, *_):
        if not self._own_step:
            raise ValueError("the original optimizer must not step: it would take gradients without clipping and "
                             "noise; use the one that make_private_with_budgets returned")

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self.pre_step():
            return None
        self._own_step = True
        try:
            return self.original_optimizer.step()
        finally:
            self._own_step = False

    def _check_trained(self):
        if _trainable(self._module) != self._trained:
            raise ValueError("module must keep the trainable parameters that it had: freeze and unfreeze before "
                             "make_private_with_budgets")
        if self._proof is not None and self._proof.open and len(self._noted.handed_out or []) > 1:
            warnings.warn("it could not be proved with this batch that the module treats examples one by one: its "
                          "inputs, or the gradients of its outputs, did not allow it. The budgets hold if it does",
                          RuntimeWarning, stacklevel=4)

    def clip_factors(self, norms, share=1.0):
        """What to multiply the gradients of the current physical batch by; norms: (k,), their clip norms by `share`."""
        batch = self._noted.handed_out
        if batch is None or len(norms) != len(batch):
            raise ValueError(f"a batch must be what the loader handed out last, {len(batch or [])} examples, got "
                             f"{len(norms)}")
        own = share * self._norms[batch].to(device=norms.device, dtype=norms.dtype)
        # A hair less, so that rounding lifts no gradient above its norm.
        factors = (own / (norms * (1 + 8 * torch.finfo(self.params[0].dtype).eps) + 1e-6)).clamp(max=1.0)
        return torch.where(norms.isfinite(), factors, 0.0)

    def pre_step(self, closure=None):
        if self._accountant.follower is not self:
            raise ValueError("a step needs the optimizer of the engine's last call of make_private_with_budgets: it "
                             "has other budgets by now")
        self._accountant.check_budget()
        self._check_trained()
        noise_std = self.noise_multiplier * self.max_grad_norm
        draw, batch = self._draws.last, self._noted.handed_out
        if draw is None or batch is None:
            raise ValueError("a step needs a batch of the loader that make_private_with_budgets returned")
        if self._draw != self._draws.number:
            # What an unfinished draw has left behind belongs to no step.
            for p in self.params:
                p.summed_grad = None
            self._draw, self._taken, self._ended = self._draws.number, -1, False
        if self._ended or (batch and batch[0] <= self._taken):
            raise ValueError("a batch of the loader must be used in one step only, or its examples would count twice")
        self._taken = batch[-1] if batch else self._taken
        self._ended = not draw or batch[-1:] == draw[-1:]
        self._step_skip_queue.clear()
        noisy = super().pre_step(closure)
        if noisy:
            # Here, not in the step hook: a hook of one's own would take its place.
            self._accountant.step()
            if not noise_std >= self._noise_std:
                self._accountant.void(f"a step had noise of standard deviation {noise_std:g} where the budgets were "
                                      f"made for {self._noise_std:g}: leave noise_multiplier and max_grad_norm alone, "
                                      "and use no scheduler of noise or clipping")
        return noisy

    def _check_skip_next_step(self, pop_next=True):
        return not self._ended


class _Optimizer(_Following, DPOptimizer):
    def clip_and_accumulate(self):
        samples = self.grad_samples
        squares = [squared_norms(g) if len(g) else g.new_zeros(0, dtype=torch.float64) for g in samples]
        norms = sum(squares).sqrt()
        factors, bad = self.clip_factors(norms), ~norms.isfinite()
        unfit = bool(bad.any())
        if unfit:
            self.dropped += int(bad.sum())
            warnings.warn("per-example gradients that are not finite contribute nothing", RuntimeWarning, stacklevel=4)
        for i, (p, sample) in enumerate(zip(self.params, samples)):
            if hasattr(p.grad_sample, "_processed"):
                raise ValueError("gradients must be cleared between steps: call optimizer.zero_grad() on each")
            if self.shares is not None:
                factors = torch.where(bad, 0.0, self.clip_factors(squares[i].sqrt(), self.shares[i]))
            sample = sample.to(p.dtype)
            if unfit:
                sample = sample.masked_fill(bad.view(-1, *[1] * (sample.ndim - 1)), 0.0)
            clipped = torch.einsum("i,i...", factors.to(p.dtype), sample)
            p.summed_grad = clipped if p.summed_grad is None else p.summed_grad + clipped
            _mark_as_processed(p.grad_sample)


class _GhostOptimizer(_Following, DPOptimizerFastGradientClipping):
    _clipped = None                                        # the batch whose loss was clipped last
    _gradients = None                                      # and what the clipped loss gave
    _losses_open, _truth = True, None                      # norms by autograd of some examples of the first batch

    def clips(self, module, criterion, loss_reduction):
        """The criterion whose backward pass clips."""
        module.get_clipping_coef = lambda: self.clip_factors(self._fresh_norms(module))
        enable = module.enable_hooks

        def ends():                                        # which is how Opacus ends the second backward pass
            enable()
            self._gradients = self._seen()

        module.enable_hooks = ends
        self._hooks = module
        return _GhostCriterion(module, self, criterion, loss_reduction)

    def _fresh_norms(self, module):
        """Norms of this backward pass: none is left from an earlier one."""
        if not all(hasattr(p, "_norm_sample") for p in module.trainable_parameters):
            raise ValueError("in ghost mode every trainable layer must take part in every batch, in training mode; use "
                             "hooks")
        norms = module.get_norm_sample()
        for p in module.trainable_parameters:
            del p._norm_sample
        for row, truth in (self._truth or {}).items():
            if not abs(float(norms[row]) - truth) <= _engine_proof._tolerance(self.params[0]) * truth:
                raise _engine_proof.missing(float(norms[row]), truth)
        self._truth = None
        return norms

    def prove_losses(self, losses):
        """Note norms of some examples' gradients by plain autograd, until one is above 0."""
        if not self._losses_open or self._proof is None or losses.ndim != 1 or not len(losses):
            return
        self._truth = {}
        with self._proof._plain():
            for row in sorted({round(i * (len(losses) - 1) / 7) for i in range(8)}):
                gradients = torch.autograd.grad(losses[row], self.params, retain_graph=True, allow_unused=True,
                                                materialize_grads=True)
                norm = float(_engine_proof._norm(gradients))
                if 1e-15 < norm < math.inf:
                    self._truth[row] = norm
        self._losses_open = not self._truth

    def _seen(self):
        return [(p.grad, None if p.grad is None else p.grad._version) for p in self.params]

    def clip_factors(self, norms, share=1.0):
        factors = super().clip_factors(norms, share)
        self._clipped = self._noted.handed_out
        return factors

    def accumulate(self):
        if self._clipped is not self._noted.handed_out:
            raise ValueError("in ghost mode the criterion clips: take the loss of every batch by the criterion that "
                             "make_private_with_budgets returned")
        if any(a is not b or i != j for (a, i), (b, j) in zip(self._gradients, self._seen())):
            raise ValueError("in ghost mode gradients must stay as the criterion's backward pass left them, but they "
                             "were changed before the step: call zero_grad before the forward pass, have no other "
                             "loss, and do not clip or scale them")
        if not all(bool(p.grad.isfinite().all()) for p in self.params):
            raise FloatingPointError("a gradient is not finite, and in ghost mode it cannot be left out; use hooks")
        super().accumulate()


class _GhostLosses(DPTensorFastGradientClipping):
    """Losses whose backward pass clips, and what is computed from them."""

    def backward(self):
        self.optimizer.prove_losses(self.loss_per_sample)
        super().backward()


def _keeping(name):
    operation = getattr(DPTensorFastGradientClipping, name)

    @functools.wraps(operation)
    def kept(self, *others):
        found = operation(self, *others)
        found.__class__ = _GhostLosses
        return found

    return kept


for _name in ("__truediv__", "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"):
    setattr(_GhostLosses, _name, _keeping(_name))


class _GhostCriterion(DPLossFastGradientClipping):
    _open = True

    def __call__(self, *args, **kwargs):
        found = super().__call__(*args, **kwargs)
        found.__class__ = _GhostLosses
        losses = found.loss_per_sample
        if self._open and self.optimizer._proof is not None and len(args) > 1 and not kwargs and losses.ndim == 1 and \
                len(losses) > 1 and all(torch.is_tensor(t) and t.ndim and len(t) == len(losses) for t in args):
            self._open = False
            self._check_company(args, losses.detach())
        return found

    def _check_company(self, args, losses):
        rows = sorted({round(i * (len(losses) - 1) / 7) for i in range(8)})
        with torch.no_grad():
            alone = torch.cat([super(_GhostCriterion, self).__call__(*(t[row:row + 1] for t in args))
                               .loss_per_sample.reshape(1) for row in rows])
        together, tolerance = losses[rows], _engine_proof._tolerance(losses)
        if bool(alone.isfinite().all()) and not torch.allclose(together, alone, rtol=tolerance, atol=1e-6):
            raise ValueError("criterion must give each example a loss of its own, but it changes with its company: "
                             f"{together.tolist()} together, {alone.tolist()} alone")


def _trainable(module):
    return {id(p) for p in module.parameters() if p.requires_grad}


def _clip_norms(max_grad_norm, clipping, module):
    """The mean clip norm, and by layer each parameter's share of it."""
    if clipping == "flat":
        return _checks.number("max_grad_norm", max_grad_norm, 0, math.inf, closed="neither"), None
    count = sum(p.requires_grad for p in module.parameters())
    if not isinstance(max_grad_norm, (list, tuple)) or len(max_grad_norm) != count:
        raise ValueError(f"max_grad_norm must be a list of {count} norms with per-layer clipping, one for each "
                         f"trainable parameter, got {max_grad_norm!r}")
    norms = [_checks.number("max_grad_norm", norm, 0, math.inf, closed="neither") for norm in max_grad_norm]
    whole = math.hypot(*norms)
    return whole, [norm / whole * (1 - 1e-12) for norm in norms]


def _check_loader(loader):
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError("data_loader must be of a map-style data set, got an iterable one, which cannot be drawn from")
    if loader.batch_sampler is None:
        raise ValueError("data_loader must have a batch_size, got None")
    if loader.drop_last:
        raise ValueError("data_loader must have drop_last=False: Poisson draws have no last batch to drop")
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in (SequentialSampler, RandomSampler):
        culprit = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
        raise ValueError(f"data_loader must have no sampler of its own, got {type(culprit).__name__}: the account "
                         "holds for independent draws at the budgets' rates only")
    if getattr(loader.sampler, "replacement", False) or len(loader.sampler) != len(loader.dataset):
        raise ValueError("data_loader must go once through its data set, got a sampler with replacement or of another "
                         "length")
    if loader.collate_fn is not default_collate:
        _check_order(loader)


def _check_order(loader):
    """Whoever comes second may not come first: neighbours among 33 examples, each pair collated both ways round."""
    n = len(loader.dataset)

    def collate(*examples):
        return loader.collate_fn(copy.deepcopy(list(examples)))        # it may take its examples apart

    probed = [loader.dataset[i] for i in sorted({int(i) for i in torch.linspace(0, n - 1, 33, dtype=torch.float64)})]
    for a, b in zip(probed, probed[1:]):
        if _same(collate(a, b), collate(b, a)) and not _same(collate(a), collate(b)):
            raise ValueError("data_loader must have a collate_fn that keeps the order of the examples, got one that "
                             "makes the same batch of two examples in either order: each gradient is clipped to the "
                             "norm of the example in its place")


def _same(a, b):
    """Whether two batches, tensors in any nesting, are equal."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.array_equal(a, b))


def _check_module(engine, module, optimizer):
    if not module.training:
        raise ValueError("module must be in training mode, got one in evaluation mode: call module.train() first")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel) or type(module).__name__.startswith(
            ("DifferentiallyPrivateDistributed", "FSDP")):
        raise ValueError(f"module must not be distributed, got {type(module).__name__}")
    try:
        engine.validate(module=module, optimizer=None, data_loader=None)
    except Exception as error:
        raise UnsupportedModuleError(f"module must compute each example by itself, but: {error}") from error
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in module.parameters()}:
        raise ValueError("optimizer must hold parameters of the module only: Module parameters are different than "
                         "optimizer Parameters")                         # Opacus's words, for those who catch them
    if forgotten := [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ValueError(f"optimizer must hold every trainable parameter of the module, but lacks {forgotten}: their "
                         "gradients would be neither clipped nor noised; freeze them, or add them")
    if not _trainable(module):
        raise ValueError("module must have a trainable parameter, got none")
    if isinstance(getattr(optimizer, "original_optimizer", optimizer), torch.optim.LBFGS):
        raise ValueError("optimizer must make its step from one gradient, got LBFGS, which takes several")


def _loader(loader, noted, draws, batch_first):
    collate = wrap_collate_with_empty(collate_fn=loader.collate_fn, batch_first=batch_first)
    # It learns here what a batch looks like: the first one may be empty.
    collate([noted[0]])
    return DataLoader(noted, batch_sampler=draws, collate_fn=collate, pin_memory=loader.pin_memory,
                      generator=loader.generator)
