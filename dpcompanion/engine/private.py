"""The engine itself: it checks, calibrates, and has module, optimizer and loader put together."""

import io
import math
import pickle
import warnings
from typing import Any, NoReturn, Unpack

import torch
from opacus import PrivacyEngine

from dpcompanion import _checks, accounting
from dpcompanion._types import Loss
from dpcompanion.accounting import LedgerEntry
from dpcompanion.engine.account import Accountant
from dpcompanion.engine.assembly import assemble
from dpcompanion.engine.budgets import FilteredBudgets, FixedBudgets
from dpcompanion.engine.checks import check_loader, check_module, clip_norms_of
from dpcompanion.engine.files import read_sealed, write_sealed
from dpcompanion.engine.norms import GivenNorms, GradientNorms, PersonNorms
from dpcompanion.engine.options import Options, settings_of
from dpcompanion.engine.randomness import digest, find_keys, keep_keys, note_origin, sources
from dpcompanion.engine.ranks import check_resumed, on_all_ranks, share_draws
from dpcompanion.engine.shards import check_measured, is_sharded
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.gradients.items import check_distinct
from dpcompanion.idp.parameters import (
    Budgets,
    combined_parameters,
    sample_parameters,
    scale_parameters,
)
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.training import distributed
from dpcompanion.training.checkpoints import read_back

METHODS = ("sample", "scale", "combined")
MODES = ("hooks", "functorch", "ew", "ghost")
CLIPPINGS = ("flat", "per_layer")


def _one_if_alike(values):
    return float(values[0]) if bool((values == values[0]).all()) else values


def _warn_of_delta(target_delta, n, unit):
    if target_delta >= 1 / n:
        warnings.warn(
            f"target_delta must be below 1 / n = {1 / n:.3g} to mean anything, got "
            f"{target_delta:g}: a mechanism that publishes one {unit} in full has such a delta",
            UserWarning,
            stacklevel=4,
        )


def _check_method(method, sample_weight, noise_range):
    """A method that there is, and what is given to this one only."""
    _checks.one_of("method", method, METHODS)
    if (sample_weight is not None) != (method == "combined"):
        raise ValueError(
            f"sample_weight must be given with the method 'combined' and only then, got "
            f"{sample_weight!r} with {method!r}"
        )
    if noise_range is not None and method != "sample":
        raise ValueError(
            f"noise_range must be None with the method {method!r}, got {noise_range!r}: it is "
            "for 'sample'"
        )


def _warn_of_paid(filter):
    if bool((filter.spent > 0).any()):
        warnings.warn(
            "filter has paid for another run, and examples without budget take no part: make a new "
            "filter for this run, unless it goes on from a checkpoint, or count the filter's "
            "promise once for both runs together",
            stacklevel=3,
        )


def _check_measure(loss, norms):
    if (loss is None) == (norms is None):
        both = "neither" if loss is None else "both"
        raise ValueError(
            f"either loss or norms must be given, by which gradients are measured, got {both}"
        )
    for name, function in (("loss", loss), ("norms", norms)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function, got {function!r:.80}")


def _check_filter(filter, units):
    """A filter of the data set's examples, or persons, and of the run's rate."""
    if filter.n != units.n:
        raise ValueError(
            f"filter must be one of the data set's {units.n} {units.unit}s, got one of {filter.n}"
        )
    if not math.isclose(filter.sample_rate * units.steps_per_epoch, 1, rel_tol=1e-9):
        raise ValueError(
            f"filter must have the run's sample_rate, 1 / {units.steps_per_epoch}, got "
            f"{filter.sample_rate:g}"
        )


class IndividualizedPrivacyEngine(PrivacyEngine):
    """See the module's text.

    Args:
        accountant: "pld" or "rdp": what calibrates the noise and states epsilons, each example's
            and the largest. The paper's, "rdp", needs more noise for the same targets.
        secure_mode: True refuses generators of one's own, so that draws and noise come from a
            cipher for certain (in place of Opacus's secure mode, whose package no longer installs).
            Without generators they do in any case.

    Its epsilons are about neighbours of the same number of examples, one of whose gradients are
    zero in one of them (zero-out); `statement` says it in full.

    Once the module was made private, `sample_rates`, `max_grad_norms` and `noise_multipliers`, (n,)
    float64, say what each example gets; the last is the noise over its own clip norm.

    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> model = torch.nn.Linear(5, 2)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5), torch.randint(2, (100,)))
    >>> engine = IndividualizedPrivacyEngine()
    >>> model, optimizer, loader = engine.make_private_with_budgets(
    ...     module=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=torch.utils.data.DataLoader(data, batch_size=20),
    ...     target_epsilons=[1.0] * 70 + [3.0] * 30,
    ...     target_delta=1e-5,
    ...     epochs=3,
    ...     max_grad_norm=1.0,
    ...     method="scale",
    ... )
    >>> for epoch in range(3):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(x), y).backward()
    ...         optimizer.step()
    >>> [round(epsilon, 2) for epsilon in engine.get_epsilons(1e-5)[[0, 99]].tolist()]
    [1.0, 3.0]
    """

    def __init__(self, *, accountant: str = "pld", secure_mode: bool = False):
        """See the class, not Opacus's."""
        _checks.one_of("accountant", accountant, accounting.ACCOUNTANTS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that its own secure mode is off
            super().__init__(accountant="rdp")
        self.secure_mode = bool(secure_mode)
        self.accountant, self._by = Accountant(), accountant
        #: Whose each item of the data set is (`dpcompanion.training.people.Ownership`); None where
        #: each item is an example.
        self.people: Any = None

    @property
    def persons(self) -> Any:
        """The names of the persons, (n,), in the order of budgets and epsilons; None where each
        item is an example.
        """
        return None if self.people is None else self.people.persons

    def make_private(self, **_: Any) -> NoReturn:
        """Always raises ValueError: this engine needs budgets (`make_private_with_budgets`)."""
        raise ValueError(
            "IndividualizedPrivacyEngine needs budgets: call make_private_with_budgets, of which "
            "target_epsilons may be one number for all, or make_private_with_filter, or use "
            "opacus.PrivacyEngine"
        )

    make_private_with_epsilon = make_private

    @on_all_ranks
    def make_private_with_budgets(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: torch.utils.data.DataLoader[Any],
        target_epsilons: Budgets,
        target_delta: float,
        epochs: int,
        max_grad_norm: Any,
        method: str = "sample",
        sample_weight: float | None = None,
        noise_range: tuple[float, float] | None = None,
        criterion: Any = None,
        seed: int | None = None,
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        clipping: str = "flat",
        **options: Unpack[Options],
    ) -> Any:
        """Model, optimizer and loader (with a criterion, and in ghost mode, that before the loader)
        that spend each budget in `epochs`.

        Many arguments, since those of Opacus's engine come first, and budgets need their own.

        Args:
            module: the model, which must treat examples one by one.
            optimizer: a torch.optim optimizer of all trainable parameters of the module; freeze the
                others beforehand.
            data_loader: of a map-style data set. It says the mean rate, 1 / len(data_loader), and
                is replaced by one with Poisson draws, shuffled or not. Its `generator`, if it has
                one, seeds that of the draws, which a RuntimeWarning and the statement say: whoever
                knows the seed knows the draws, and for them sampling amplifies nothing. Worker
                processes read the examples of one batch side by side; they do not read ahead.
            target_epsilons: (n,) budgets, one for each example of the data set, in its order, or
                for each person, in that of `persons` or as a pandas Series by name; one number for
                all; or {budget: share}, which is dealt out by a fixed permutation
                (`dpcompanion.idp.budgets_for`).
            target_delta: in (0, 1).
            epochs: an epoch has len(data_loader) steps.
            max_grad_norm: the mean clip norm; with per-layer clipping a list of them, one for each
                trainable parameter in the order of module.parameters(), whose Euclidean norm is the
                mean clip norm.
            method: "sample", "scale" or "combined", this one with `sample_weight` in [0, 1].
            noise_range: (low, high) for the noise multiplier of "sample", fixed before the budgets
                are known: it bounds what others' budgets can do to one's risk
                (`dpcompanion.idp.sample_parameters`).
            criterion: a loss of outputs and targets: a module or function with a `reduction`, which
                the engine calls without, or a function to (n,). Class weights and `ignore_index`
                are allowed: of one example's tokens the mean counts those that are not ignored.
                With it a criterion is returned before the loader, in every mode, through which
                every loss must come. In ghost mode it is cross entropy by default; else, without
                one, the loop's own loss must be a standard one (`dpcompanion.engine.losses`).
            batch_first: whether inputs have the examples along their first axis, or else along
                their second.
            loss_reduction: "mean" or "sum", what the loop's loss (or the criterion that is
                returned) makes of the examples' losses. A mean is one over all of them: what
                divides by the weights or tokens of a batch is refused at the step.
            seed: None, for a model that is released: noise and draws come from ciphers under keys
                of 256 bits that the operating system draws (`dpcompanion.mechanism.secure`). Or a
                whole number below 2^1024, for research: the keys are hashed from it, as in
                `dpcompanion.training.train`: anyone who knows it can subtract the noise.
            noise_generator: in place of a seed, a `torch.Generator`: noise comes from it, draws
                from one that it seeds.
            grad_sample_mode: "hooks", "functorch", "ew" or "ghost". Small rates make empty batches,
                which every mode takes and a loop may not leave out; with wrap_model=False the model
                must take them itself. In "ghost" parameters are of float32 or float64.
            clipping: "flat", or "per_layer" (not in ghost mode): an example's norm for a parameter
                is its own clip norm times the parameter's share of the mean.
            wrap_model: False leaves the module as it is and returns Opacus's hooks in its place
                (not in "ew" mode).
            prove: False leaves out the proof with the first batches, and takes it on your word that
                the module treats examples one by one and uses every weight in its layer only.
            trust_loss: True leaves the loop's loss unchecked. If it is no mean (or sum) of losses
                of which each depends on one example, no epsilon holds; `statement` says that your
                word was taken. Only what comes by way of layers is trained with, no penalty on
                weights.
            people: None where each item of the data set is an example. Or who each item belongs to,
                (rows,), by names of any type that `dpcompanion.training.by_person` takes: then
                draws, clip norms, budgets and epsilons are of persons. A person's gradient is the
                mean over at most `at_most` of their rows, formed before it is clipped, once; of a
                person with more rows, so many are drawn anew for each draw, by the run's own stream
                (`dpcompanion.training.people`). The loader's batch_size counts persons: the mean
                rate is 1 / ceil(n / batch_size) for n persons, and an epoch has so many steps. It
                hands out rows, a person's one after the other. Opacus's memory manager cuts a draw
                between persons, and counts these. Not in ghost mode. Or what
                `dpcompanion.training.by_person` gives of the same rows, which knows persons without
                rows, too, and sums in place of means.
            at_most: with people, how many rows of a person enter a step at most; by_person says it
                itself.
            unit: what one of the n is called in statements, such as "patient"; "person" by default
                with people, else "example".

        Raises:
            ValueError: bad input; budgets that cannot be met; and what would void the account: a
                sampler of one's own, a collate_fn that changes the order, drop_last, an iterable
                data set, a module that is spread over processes (``DistributedDataParallel``;
                ``fully_shard`` in other modes than ghost) or holds other DTensors, an engine that
                has taken steps. A second call before any step replaces the first, whose optimizer
                then takes no step.
            ValueError: Opacus's `UnsupportedModuleError`, which is one, for a module that mixes
                examples, here for layers that do, at the first forward pass for any other; or whose
                norms are not whole.
            ValueError: at the step, for a loss that mixes examples, as with class weights, or that
                is not known to be a mean (or sum) of one number an example.
        """
        _check_method(method, sample_weight, noise_range)
        _checks.one_of("clipping", clipping, CLIPPINGS)
        if grad_sample_mode == "ghost" and clipping == "per_layer":
            raise ValueError(
                "clipping must be 'flat' in ghost mode, which knows no norms of layers, got "
                "'per_layer'"
            )
        settings = settings_of("make_private_with_budgets", options)
        units = self._check(module, optimizer, data_loader, grad_sample_mode, settings)
        n, length = units.n, units.steps_per_epoch
        epochs = _checks.whole_number("epochs", epochs, 1)
        budgets = units.budgets(target_epsilons)
        max_grad_norm, shares = clip_norms_of(max_grad_norm, clipping, module)
        streams, origin = sources(
            data_loader.generator, noise_generator, seed=seed, secure_mode=self.secure_mode
        )
        run = {
            "target_delta": _checks.number("target_delta", target_delta, 0, 1, closed="neither"),
            "sample_rate": 1 / length,
            "steps": epochs * length,
            "accountant": self._by,
        }
        _warn_of_delta(target_delta, n, units.unit)
        multiplier = self._calibrate(
            method, budgets, run, max_grad_norm, sample_weight, noise_range
        )
        fixed = FixedBudgets(self._plan(n, run, units.unit), self.noise_multipliers, budgets)
        self.people = units.ownership
        return assemble(
            self,
            fixed,
            module,
            optimizer,
            data_loader,
            streams,
            origin,
            noise_multiplier=multiplier,
            max_grad_norm=max_grad_norm,
            shares=shares,
            criterion=criterion,
            grad_sample_mode=grad_sample_mode,
            settings=settings,
            units=units,
        )

    @on_all_ranks
    def make_private_with_filter(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: torch.utils.data.DataLoader[Any],
        filter: Any,
        epochs: int,
        loss: Loss | None = None,
        norms: Any = None,
        updates_per_epoch: float = 1,
        criterion: Any = None,
        seed: int | None = None,
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **options: Unpack[Options],
    ) -> Any:
        """Model, optimizer and loader (with a criterion, and in ghost mode, that before the loader)
        of a run in which a filter charges every example for each step, and no budget is exceeded
        whatever their gradients do.

        Norms of all examples are measured now and then. An example is clipped to what the filter
        makes of its norm and its budget covers; one with nothing left is clipped to 0, and has
        left. Rate, noise, clip norm and budgets are those of the filter, and so are the epsilons
        that the engine states: the promise, which holds from the start. `filter.spent` is what was
        spent.

        Many arguments, since those of Opacus's engine come first, and filters need their own.

        Args:
            module: the model, which must treat examples one by one.
            optimizer: a torch.optim optimizer of all trainable parameters of the module; freeze the
                others beforehand.
            data_loader: of a map-style data set; replaced by one with Poisson draws, shuffled or
                not. Its `generator`, if it has one, seeds that of the draws, with a warning, as in
                `make_private_with_budgets`. Worker processes read the examples of one batch side by
                side; they do not read ahead.
            filter: a `dpcompanion.filters.ExactFilter` or `RenyiFilter` of the data set's examples,
                in its order, or of its persons, with the loader's rate, 1 / len(data_loader), of
                persons 1 / ceil(n / batch_size). With different targets, different people have
                different budgets.
            epochs: an epoch has len(data_loader) steps.
            loss: (outputs, targets) -> (n,), such as `dpcompanion.training.cross_entropy`, by which
                norms are measured; the loader's batches are then pairs, (inputs, targets).
            norms: or else a function that is called without arguments and gives the norms itself,
                (n,); that of an example must depend on the weights and on this example alone. It
                may use the module itself, which is in evaluation mode then, and keeps nothing of
                it.
            updates_per_epoch: measurements an epoch, above 0; from len(data_loader) on there is one
                before each step.
            criterion, seed, noise_generator: as in `make_private_with_budgets`.
            grad_sample_mode, batch_first, loss_reduction, wrap_model: as there.
            prove, trust_loss, people, at_most, unit: as there. A person's norm is measured at a
                choice of their rows.

        Raises:
            ValueError: bad input; a filter of another rate or number of examples; and what would
                void the account: a sampler of one's own, a collate_fn that changes the order,
                drop_last, an iterable data set, a distributed module, a module that mixes examples
                or whose norms are not whole, an engine that has taken steps.

        >>> from dpcompanion.filters import ExactFilter
        >>> from dpcompanion.training import cross_entropy
        >>> model = torch.nn.Linear(5, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5), torch.randint(2, (100,)))
        >>> filter = ExactFilter(
        ...     100,
        ...     sample_rate=0.2,
        ...     noise_multiplier=2.0,
        ...     max_grad_norm=1.0,
        ...     levels=[0.5, 1.0],
        ...     costs=[1, 4],
        ...     budget=20,
        ...     steps=15,
        ... )
        >>> engine = IndividualizedPrivacyEngine()
        >>> model, optimizer, loader = engine.make_private_with_filter(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     filter=filter,
        ...     epochs=3,
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=20),
        ...     loss=cross_entropy,
        ... )
        >>> for epoch in range(3):
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        >>> bool((filter.spent <= 20).all()), len(engine.accountant)
        (True, 15)
        """
        if not isinstance(filter, (ExactFilter, RenyiFilter)):
            raise ValueError(
                f"filter must be an ExactFilter or a RenyiFilter, got {type(filter).__name__}"
            )
        _check_measure(loss, norms)
        settings = settings_of("make_private_with_filter", options)
        check_measured(module)
        if loss is not None and not settings.batch_first:
            raise ValueError("norms must be given where batch_first is False, got loss")
        units = self._check(module, optimizer, data_loader, grad_sample_mode, settings)
        n, length = units.n, units.steps_per_epoch
        epochs = _checks.whole_number("epochs", epochs, 1)
        updates = _checks.number("updates_per_epoch", updates_per_epoch, 0, closed="neither")
        _check_filter(filter, units)
        _warn_of_paid(filter)
        streams, origin = sources(
            data_loader.generator, noise_generator, seed=seed, secure_mode=self.secure_mode
        )
        full = torch.ones(n, dtype=torch.float64)
        self.sample_rates, self.max_grad_norms, self.noise_multipliers = (
            value * full
            for value in (filter.sample_rate, filter.max_grad_norm, filter.noise_multiplier)
        )
        every = max(1, math.floor(length / updates))
        budgets = FilteredBudgets(
            filter, norms, every=every, planned=epochs * length, unit=units.unit
        )
        self.people = units.ownership
        made = assemble(
            self,
            budgets,
            module,
            optimizer,
            data_loader,
            streams,
            origin,
            noise_multiplier=filter.noise_multiplier,
            max_grad_norm=filter.max_grad_norm,
            shares=None,
            criterion=criterion,
            grad_sample_mode=grad_sample_mode,
            settings=settings,
            units=units,
        )
        follower = self.accountant.follower
        passes: Any = {"size": data_loader.batch_size, "ranks": follower.ranks}
        if norms is not None:
            budgets.measure = GivenNorms(follower, norms)
        elif units.ownership is not None:
            persons = units.examples(data_loader)
            budgets.measure = PersonNorms(
                follower.hooks, loss, persons, choice=follower.choice, **passes
            )
        else:
            rows = data_loader.dataset, data_loader.collate_fn
            budgets.measure = GradientNorms(follower.hooks, loss, *rows, **passes)
        return made

    def _check(self, module, optimizer, data_loader, grad_sample_mode, settings):
        """What the units of the run are, if nothing voids its account."""
        _checks.one_of("grad_sample_mode", grad_sample_mode, MODES)
        if not settings.wrap_model and grad_sample_mode == "ew":
            raise ValueError(
                "wrap_model must be True with grad_sample_mode 'ew', which has no hooks, got False"
            )
        if self.accountant.steps:
            raise ValueError(
                f"this engine has already accounted for {self.accountant.steps} steps; use a new "
                "one"
            )
        check_loader(data_loader)
        units = settings.units_of(data_loader, grad_sample_mode)
        owners = None if units.ownership is None else units.ownership.owners
        check_distinct(data_loader.dataset, "data_loader", owners)
        check_module(self, module, optimizer, grad_sample_mode, distributed.current())
        if is_sharded(module) and not settings.wrap_model:
            raise ValueError("wrap_model must be True where the module is sharded, got False")
        return units

    def _calibrate(self, method, budgets, run, max_grad_norm, sample_weight, noise_range):
        """Set what each example gets; returns the noise multiplier."""
        counts, full = torch.ones_like(budgets), torch.ones_like(budgets)
        if method == "sample":
            found = sample_parameters(budgets, counts, noise_range=noise_range, **run)
            rates = found.sample_rates
            norms = max_grad_norm * full
            noises = found.noise_multiplier * full
        else:
            if method == "scale":
                found = scale_parameters(budgets, counts, max_grad_norm=max_grad_norm, **run)
                rates = run["sample_rate"] * full
            else:
                found = combined_parameters(
                    budgets, counts, max_grad_norm=max_grad_norm, sample_weight=sample_weight, **run
                )
                rates = found.sample_rates
            norms, noises = found.max_grad_norms, found.noise_multipliers
        self.sample_rates, self.max_grad_norms, self.noise_multipliers = rates, norms, noises
        return found.noise_multiplier

    def _plan(self, n, run, unit):
        """The plan of what was calibrated."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "delta .* is not below 1/n")  # which is said before
            return DPSGDPlan(
                n=n,
                sample_rate=_one_if_alike(self.sample_rates),
                steps=run["steps"],
                max_grad_norm=_one_if_alike(self.max_grad_norms),
                # over the mean of the clip norms, which rounding may set apart from max_grad_norm
                noise_multiplier=float(self.noise_multipliers[0] * self.max_grad_norms[0])
                / float(self.max_grad_norms.mean()),
                delta=run["target_delta"],
                accountant=self._by,
                unit=unit,
            )

    def save_checkpoint(self, *, path: Any, **options: Any) -> None:
        """As in Opacus, in a file that is written whole or not at all, under a sha256 of its bytes:
        one that was damaged could say fewer steps than were taken.

        The keys of draws and noise, if they come from ciphers, lie beside the file until the
        budgets are spent, in one of the same name and ".key" that only its owner can read: whoever
        reads it can subtract the noise. Those of a seed do not, and a seed that was used on other
        data, with a checkpoint in the same folder, is warned of. An open file has nothing beside
        it. Data sets are told apart by the tensors and arrays that they hold (TensorDataset's;
        `data` and `targets`, as in torchvision), else by type and length alone.

        A batch that was fetched and took no step yet is fetched again by the run that goes on. On
        several processes rank 0 writes, and the others only look whether all is well. Of a module
        after `fully_shard` the file has the steps, the budgets and how far the streams have come,
        and neither weights nor the optimizer's state: write these beside it, at the same step, by
        `torch.distributed.checkpoint`, and read them before the module is made private again.

        Raises:
            ValueError: a `checkpoint_dict` of other things than numbers, text, tensors, and lists
                and dicts of them.
        """
        self.accountant.look()
        if self.accountant.follower is not None and not self.accountant.follower.ranks.first:
            return
        buffer = io.BytesIO()
        super().save_checkpoint(path=buffer, **self._without_shards(options))
        try:
            content = read_back(buffer)
        except pickle.UnpicklingError as error:
            raise ValueError(
                "checkpoint_dict and states must hold numbers, text, tensors, and lists and dicts "
                f"of them, which can be read back without running code, but {error!s:.200}"
            ) from error
        content["data"], content["sharded"] = digest(self.dataset, self.people), self._sharded
        note_origin(path, self.accountant.origin, content["data"])
        if self.accountant.origin is None:
            keep_keys(
                path,
                self.accountant.generators(),
                ended=self.accountant.steps >= self.accountant.planned,
            )
        write_sealed(path, content)

    def load_checkpoint(self, *, path: Any, **options: Any) -> Any:
        """As in Opacus. Without its keys, or on other data, the run goes on with new ones, and a
        warning: as private, but not the same. Data sets are told apart as far as `save_checkpoint`
        can. A batch that was fetched before can take no step any more. On several processes each
        loads it, and rank 0 alone reads the key of the noise.

        Raises:
            ValueError: a file that is not as `save_checkpoint` wrote it, or that is of another run,
                of earlier steps, or of more steps than the budgets were made for.
        """
        follower = self.accountant.follower
        ranks = distributed.current() if follower is None else follower.ranks
        with ranks.together():
            content, buffer = read_sealed(path), io.BytesIO()
            if content.get("sharded", False) != self._sharded:
                raise ValueError(
                    "path must be that of a checkpoint of a run whose module was "
                    f"{'sharded' if self._sharded else 'whole'}, as it is now, got {path!r}"
                )
            torch.save(content, buffer)
            buffer.seek(0)
            found = super().load_checkpoint(path=buffer, **self._without_shards(options))
            check_resumed(self)
            if self.accountant.origin is None and self.accountant.steps < self.accountant.planned:
                keys = found["privacy_accountant_state_dict"]["generators"]
                same = digest(self.dataset, self.people)
                if ranks.first:
                    find_keys(
                        path,
                        self.accountant.generators(),
                        keys,
                        same_data=found.get("data") == same,
                    )
                share_draws(self)
        return found

    @property
    def _sharded(self):
        return self.accountant.follower is not None and self.accountant.follower.shards is not None

    def _without_shards(self, options):
        """What Opacus writes and reads: of a sharded module neither weights nor the optimizer's
        state, of which each rank has a part.
        """
        return (
            options | {"module": torch.nn.Module(), "optimizer": None} if self._sharded else options
        )

    def statement(self) -> str:
        """What an epsilon of this run is about, in the words of
        `dpcompanion.training.DPSGDPlan.statement`: relation, public constants, sampler, noise, and
        delta, accountant and epsilons, or what the filter promised: its epsilons at the delta of
        its targets, if it was made for targets. It is of the steps that were taken; before the
        first, of those that are planned. It says so if the noise came from a seed, and with
        trust_loss=True that the loss was not checked; after too little noise that no epsilon holds.

        Raises:
            ValueError: before the module was made private.
        """
        return self.accountant.statement()

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the run counts as in `accounting.Ledger.add`: all planned steps, for each example
        (person); with a filter what it promised at `delta`.

        Raises:
            ValueError: before the module was made private, after too little noise, and for a delta
                that is missing with a filter, or given without.
        """
        return self.accountant.ledger_entry(delta)

    def get_epsilons(self, delta: float) -> torch.Tensor:
        """Epsilon of each example (person) after the steps so far, (n,) float64: an upper bound for
        real numbers, inf after too little noise. What floats add to a sum is counted by
        `dpcompanion.training.train` alone.

        With a filter it is the filter's promise. By "pld", examples of more than 256 different
        parameters take the epsilon of one that has no less; before the planned end and at the
        target delta none is said to exceed its budget, which holds by calibration.

        Raises:
            FloatingPointError: in ghost mode on a GPU, where a step's sum was not finite.
        """
        return self.accountant.get_epsilons(delta)

    def get_epsilon(self, delta: float) -> float:
        """The largest epsilon of all examples."""
        return self.accountant.get_epsilon(delta)
