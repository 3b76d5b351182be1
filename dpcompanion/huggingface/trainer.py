"""`PersonalTrainer`: the Trainer of `transformers` whose step is one of `training.train`."""

import contextlib
import copy
import json
import math
import os
import pathlib
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from dpcompanion import _checks, _files
from dpcompanion._rounding import epsilons_in_words
from dpcompanion.accounting import LedgerEntry
from dpcompanion.gradients.checks import check_alone
from dpcompanion.huggingface.losses import per_example_loss
from dpcompanion.huggingface.privacy import PersonalPrivacy
from dpcompanion.huggingface.rows import collator_of, column_of, with_decoder_inputs
from dpcompanion.training import DPSGDPlan, History, NormTracker, Performance, Track
from dpcompanion.training.callbacks import promised
from dpcompanion.training.checkpoints import key_file, note_seeds, read_checkpoint, read_keys
from dpcompanion.training.collating import Reader, call
from dpcompanion.training.loop import TAKEN_OVER, TrainingLoop
from dpcompanion.training.people import PersonItems

#: The file of a checkpoint that holds draws and accounts; keys lie beside it.
STATE = "privacy.pt"

#: The file of the output folder that holds the card, and which runs have finished there.
CARD = "privacy.json"

# What the Trainer's own loop is told: it takes one step for each draw, and neither clips nor casts.
_OWN_LOOP = {
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 0.0,
    "bf16": False,
    "mixed_precision": "no",
}

# Arguments of the Trainer that would void the account or that no step of ours takes.
_REFUSED = {
    "fp16": "its scaler looks at gradients before the noise; use bf16",
    "gradient_checkpointing": "layers are looked at on the way forward; use a smaller "
    "per_device_train_batch_size",
    "auto_find_batch_size": "it takes a step again; per_device_train_batch_size is only how many "
    "go at once",
    "torch_compile": "layers are looked at one by one",
    "deepspeed": "gradients would be added up without noise",
    "fsdp": "gradients would be added up without noise",
    "label_smoothing_factor": "give PersonalPrivacy a loss of your own",
    "neftune_noise_alpha": "it would hook the embedding after the proof",
    "use_liger_kernel": "layers are looked at one by one",
    "enable_jit_checkpoint": "it saves between a draw and its step, from where no run can go on; "
    "use save_steps",
}


class _Step(TrainingLoop):
    """The loop of `train` whose optimizer is stepped by the Trainer."""

    ready = False

    def take_step(self) -> None:
        self.ready = True


def _fixed(model):
    """The batch norms whose statistics are fixed: they stay in evaluation mode."""
    return [
        layer for layer in model.modules() if isinstance(layer, _BatchNorm) and not layer.training
    ]


def _check(args, train_dataset, privacy, options):
    """Refuse what would void the account."""
    if not isinstance(privacy, PersonalPrivacy):
        raise ValueError(f"privacy must be PersonalPrivacy(...), got {privacy!r}")
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"args.{name} must be off, got {getattr(args, name)!r}: {why}")
    if args.mixed_precision not in ("no", "bf16"):  # which `accelerate launch` says, too
        raise ValueError(
            f"args.mixed_precision must be 'no' or 'bf16', got {args.mixed_precision!r}: "
            f"{_REFUSED['fp16']}"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            f"args must be for one process on one device, got {args.world_size} processes and "
            f"{args.n_gpu} devices"
        )
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if args.push_to_hub and "checkpoint" in strategy:
        raise ValueError(
            f"args.hub_strategy must push no checkpoints, got {strategy!r}: they hold the key of "
            "the noise"
        )
    if options.get("compute_loss_func") is not None:
        raise ValueError(
            "compute_loss_func must be None: give PersonalPrivacy a loss of each example's own"
        )
    if options.get("model_init") is not None:
        raise ValueError(
            "model_init must be None: each model that is trained on the data costs its own epsilon"
        )
    if isinstance(train_dataset, IterableDataset) or not hasattr(train_dataset, "__getitem__"):
        raise ValueError(
            "train_dataset must be map-style, with a length: a Poisson draw names the persons that "
            f"it wants, got a {type(train_dataset).__name__}"
        )


def _read_card(folder):
    """The card in a folder, {} where there is none."""
    try:
        found = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(folder, card):
    _files.replace(folder / CARD, (json.dumps(card, indent=1) + "\n").encode())


def _finished_runs(folder):
    """The names of runs that have finished, as the card in a folder notes them."""
    known = _read_card(folder).get("finished_runs")
    return [str(name) for name in known] if isinstance(known, list) else []


def _without_labels(batch):
    return {name: part for name, part in batch.items() if name != "labels"}


class PersonalTrainer(Trainer):
    """A `transformers.Trainer` with a privacy budget for each person (`dpcompanion.huggingface`).

    Args:
        model: a model of `transformers` or `peft` with a head, on one device.
        args: `TrainingArguments`. `per_device_train_batch_size` x `gradient_accumulation_steps` is
            the expected number of persons in a step, `max_grad_norm` the clip norm.
        train_dataset: a map-style data set of mappings.
        privacy: a `PersonalPrivacy`.
        options: everything else that a Trainer takes, by name.

    Attributes:
        plan: the `DPSGDPlan` of the run.
        persons: the names of the persons, in the order of `epsilons`.
        privacy: as given.

    Raises:
        ValueError: naming the argument, for what would void the account: several processes or
            devices, a model that is spread over them (`fully_shard`), float16, an iterable data
            set, a collator or a model that mixes rows, a model that no method takes; for a
            subclass with a `compute_loss` of its own, which no step would call.

    >>> from transformers import BertConfig, BertForSequenceClassification, default_data_collator
    >>> config = BertConfig(
    ...     vocab_size=20,
    ...     hidden_size=8,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ...     intermediate_size=8,
    ...     max_position_embeddings=8,
    ... )
    >>> rows = [
    ...     {"input_ids": [1 + i % 7, 2, 3], "attention_mask": [1, 1, 1], "labels": i % 2}
    ...     for i in range(40)
    ... ]
    >>> import tempfile
    >>> args = TrainingArguments(
    ...     tempfile.mkdtemp(),
    ...     per_device_train_batch_size=10,
    ...     max_steps=4,
    ...     report_to="none",
    ...     save_strategy="no",
    ...     disable_tqdm=True,
    ...     use_cpu=True,
    ...     logging_strategy="no",
    ... )
    >>> trainer = PersonalTrainer(
    ...     BertForSequenceClassification(config),
    ...     args,
    ...     train_dataset=rows,
    ...     data_collator=default_data_collator,
    ...     privacy=PersonalPrivacy(budgets={1.0: 0.5, 2.0: 0.5}, delta=1e-3, accountant="rdp"),
    ... )
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [f"{epsilon:.1f}" for epsilon in sorted(set(trainer.epsilons().tolist()))]
    ['1.0', '2.0']
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Any,
        privacy: PersonalPrivacy,
        **options: Any,
    ):
        if (own := type(self).compute_loss) is not PersonalTrainer.compute_loss:
            raise ValueError(
                f"compute_loss must be that of PersonalTrainer, got {own.__qualname__}, which no "
                "step would call: give PersonalPrivacy(loss=...) a loss of each example's own, "
                "(outputs, batch) -> (n,)"
            )
        args = TrainingArguments("tmp_trainer") if args is None else args
        _check(args, train_dataset, privacy, options)
        if isinstance(model, torch.nn.Module):
            check_alone(model, opacus=True)
        self.privacy = privacy
        self._loop: Any = None
        self._tracker: NormTracker | None = None
        self._found: str | None = None
        self._training = contextlib.ExitStack()  # what ends with the training
        # By which the folder knows the run of a checkpoint, however often the run is broken off.
        self._run_name = secrets.token_hex(8)
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._max_grad_norm = args.max_grad_norm
        self._precision = "bf16" if args.mixed_precision == "bf16" else None
        self._given = {name: getattr(args, name) for name in _OWN_LOOP}
        args = copy.copy(args)
        vars(args).update(_OWN_LOOP)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)
        self._frozen = _fixed(self.model)
        people = privacy.people
        columns = [name for name in (people, privacy.budgets) if isinstance(name, str)]
        if isinstance(people, str):
            people = column_of(train_dataset, people)
        self._loss = per_example_loss(self.model) if privacy.loss is None else privacy.loss
        collate = collator_of(
            self._get_collator_with_removed_columns(self.data_collator, description="training"),
            private=columns,
            model=self.model,
        )
        self._rows = PersonItems(
            Reader(train_dataset, collate, "data_collator"),
            range(len(train_dataset)) if people is None else people,
            at_most=1 if people is None else privacy.at_most,
            combine=privacy.combine,
        )
        self.persons = self._rows.persons
        self.budgets = self._budgets()
        self._steps_per_epoch = max(1, round(len(self.persons) / batch))
        steps = (
            args.max_steps
            if args.max_steps > 0
            else math.ceil(args.num_train_epochs * self._steps_per_epoch)
        )
        self.plan: DPSGDPlan = privacy.plan(
            self.budgets,
            n=len(self.persons),
            batch_size=batch,
            steps=steps,
            max_grad_norm=_checks.number(
                "args.max_grad_norm", self._max_grad_norm, 0, math.inf, closed="neither"
            ),
        )
        self._filter = privacy.filter_of(self.plan, self.budgets)
        self._microbatch = args.per_device_train_batch_size

    def _budgets(self):
        given = self.privacy.budgets
        if isinstance(given, str):
            given = self._rows.per_person(column_of(self.train_dataset, given))
        if isinstance(given, dict):
            from dpcompanion.idp import budgets_for

            return budgets_for(given, len(self.persons))
        if _checks.is_number(given):
            return float(given)
        if self.privacy.people is not None:
            given = _checks.in_order("budgets", given, self.persons)
        given = torch.as_tensor(_checks.unlabelled(given), dtype=torch.float64)
        if given.shape != (len(self.persons),):
            raise ValueError(
                f"budgets must be one number for each of the {len(self.persons)} persons, got "
                f"shape {tuple(given.shape)}"
            )
        return given

    # What the Trainer asks for

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One item a step, of no content: each step draws its own persons."""
        steps: Any = range(self._steps_per_epoch)
        return DataLoader(steps, batch_size=1, collate_fn=lambda step: {"step": step})

    def num_examples(self, dataloader: Any) -> int:
        """How many persons, or for another loader what the Trainer says."""
        if isinstance(getattr(dataloader, "dataset", None), range):
            return len(self.persons)
        return super().num_examples(dataloader)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted."""
        return 0

    def _track_num_input_tokens(self, inputs):
        pass

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As `Trainer.train`, once: the plan's steps are the plan's. Then the card is written.

        Raises:
            ValueError: for what `dpcompanion.training.train` refuses, before the first step, and
                for an earlier checkpoint of a run without a seed that has finished: its keys are
                gone, so that a second ending would cost more privacy.
        """
        if self._loop is not None:
            raise ValueError(
                "train must be called once, since its steps are those of the plan; go on from a "
                "checkpoint with a new PersonalTrainer, or train again by one of its own and add "
                "the plans up (dpcompanion.accounting.Ledger)"
            )
        with self._training:
            found = super().train(*arguments, **options)
            if self._loop is None and self._found is not None:
                warnings.warn(
                    f"{os.path.dirname(self._found)!r} is a checkpoint of a run that has finished: "
                    "its model is loaded, and no step is taken",
                    stacklevel=2,
                )
                self._begin()
        if self.is_world_process_zero():
            self._write_card()
            for folder in self._folders():
                self._close(folder)
        return found

    def _close(self, folder):
        """Whatever ended the run, its keys go; and no finished run gets a second ending."""
        finished = _finished_runs(folder)
        try:
            if self.taken == self.plan.steps and self._run_name not in finished:
                _note(folder, _read_card(folder) | {"finished_runs": [*finished, self._run_name]})
            for key in folder.glob(f"checkpoint-*/{key_file(STATE)}"):
                key.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"{os.fspath(folder)!r} cannot be written: remove its keys, checkpoint-*/"
                f"{key_file(STATE)}, since a reader of them can subtract the noise ({error})",
                RuntimeWarning,
                stacklevel=3,
            )

    def _folders(self):
        """Where checkpoints of the run lie: in its folder, and in that from which it went on."""
        own = pathlib.Path(str(self.args.output_dir))
        theirs = own if self._found is None else pathlib.Path(self._found).parent.parent
        return [own] if theirs.resolve() == own.resolve() else [own, theirs]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        """The mean loss of a batch in evaluation: the model's own, or that of
        `PersonalPrivacy.loss`. No step of the training takes it.
        """
        if self.privacy.loss is None:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)
        outputs = call(model, _without_labels(with_decoder_inputs(inputs, self.model)))
        loss = self.privacy.loss(outputs, inputs).mean()
        if not isinstance(outputs, Mapping):  # a loss comes first, as of the model's own
            outputs = (loss, *(outputs if isinstance(outputs, (tuple, list)) else (outputs,)))
        return (loss, outputs) if return_outputs else loss

    @contextlib.contextmanager
    def _as_given(self):
        """The arguments as the caller gave them, for what is written down of the run."""
        vars(self.args).update(self._given)
        try:
            yield
        finally:
            vars(self.args).update(_OWN_LOOP)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """As in Trainer, with the arguments of the run as they were given."""
        with self._as_given():
            super().save_model(*arguments, **options)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Draw persons, add up clipped gradients and noise, and leave the mean as the gradients.

        Returns:
            The mean loss of the persons in the step, without noise; nan for an empty draw.
        """
        model.train()
        for layer in self._frozen:
            layer.eval()
        begin = getattr(self.optimizer, "train", None)  # as of schedule-free ones
        if callable(begin):
            begin()
        loop = self._loop if self._loop is not None else self._begin()
        if loop.ready:
            raise ValueError(
                "optimizer must step after each draw, but it has not since the last one"
            )
        if loop.run.step == self.state.global_step == self.plan.steps:
            raise ValueError(
                "resume_from_checkpoint must be of a run that has steps left, but it has taken all "
                f"{self.plan.steps}, which the Trainer begins an epoch after; what holds is in "
                "epsilons() and statement()"
            )
        if loop.run.step != self.state.global_step:
            raise ValueError(
                f"the Trainer must be at step {loop.run.step} of {self.plan.steps}, as its account "
                f"is, got {self.state.global_step}; a checkpoint must hold {STATE}"
            )
        loop.step()
        if loop.run.step % self._steps_per_epoch == 0 or loop.run.step == self.plan.steps:
            loop.run_deferred_checks()
            loop.count_dropped()
        return loop.run.history.losses[loop.run.step - 1].to(self.args.device, torch.float32)

    def _begin(self):
        """The loop, proved for the model; from a checkpoint if there is one."""
        model: Any = self.model
        privacy, optimizer = self.privacy, self.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._loop = _Step(
            model,
            self._loss,
            self._rows.to(self.args.device),
            self.plan,
            optimizer,
            seed=privacy.seed,
            # Passes over the data are most of what a large model costs: one an epoch, unless more
            # are asked for.
            track=Track(clipping="individual")
            if privacy.track is None and self._filter is not None
            else privacy.track,
            filter=self._filter,
            performance=Performance(
                precision=self._precision, microbatch_size=self._microbatch, device=self.args.device
            ),
        )
        self._tracker = self._loop.run.history.tracker
        self._guard(optimizer)
        self._training.enter_context(self._loop.watching_others())
        paid = self._loop.paid()
        if self._found is not None:
            self._restore(self._found)
        self._loop.take_filters(self._run_name, paid, goes_on=self._found is not None)
        if self._loop.seed is not None and self.is_world_process_zero():
            folder = pathlib.Path(str(self.args.output_dir))
            note_seeds(folder / STATE, [(self._loop.seed, self._loop.data_digest)])
        return self._loop

    def _guard(self, optimizer):
        """The optimizer takes the run's own steps only, and the first with a learning rate moves
        what it should.
        """
        loop, before, seen = self._loop, {}, []
        model: Any = self.model

        def check(stepped, args, kwargs):
            if not loop.ready:
                raise ValueError(
                    "optimizer must be stepped once a draw by the Trainer alone, but something "
                    "steps it too"
                )
            loop.ready, loop.stepping = False, True
            if not seen and any(group["lr"] for group in stepped.param_groups):
                seen.append(True)
                before.update({name: p.detach().clone() for name, p in model.named_parameters()})

        def over(stepped, args, kwargs):
            loop.stepping = False

        def moved(stepped, args, kwargs):
            if not before:
                return
            handle.remove()
            parameters = dict(model.named_parameters())
            still = [
                n for n, p in parameters.items() if p.requires_grad and torch.equal(p, before[n])
            ]
            wrong = [
                n
                for n, p in parameters.items()
                if not p.requires_grad and not torch.equal(p, before[n])
            ]
            trainable = sum(p.requires_grad for p in parameters.values())
            before.clear()
            if wrong or len(still) == trainable:
                raise ValueError(
                    f"optimizer must move the {trainable} trainable parameters of the model and no "
                    "other, but "
                    + (
                        f"it moved {', '.join(wrong[:3])}"
                        if wrong
                        else "its first step moved none of them"
                    )
                )
            if still:
                warnings.warn(
                    f"the first step has left {len(still)} of {trainable} trainable parameters "
                    f"where they were, {', '.join(still[:3])} among them",
                    stacklevel=2,
                )

        optimizer.register_step_pre_hook(check)
        optimizer.register_step_post_hook(over)
        handle = optimizer.register_step_post_hook(moved)

    # Checkpoints

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As in Trainer. Each group notes the rate that it began with, by which a checkpoint knows
        the optimizer; some schedulers leave it out.
        """
        stepped: Any = self.optimizer if optimizer is None else optimizer
        for group in stepped.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return super().create_scheduler(num_training_steps, optimizer)

    def _save_rng_state(self, output_dir):
        if self._loop.ready:
            raise ValueError("a checkpoint must be saved after the optimizer's step, not before")
        super()._save_rng_state(output_dir)
        self._loop.run_deferred_checks()
        self._loop.count_dropped()
        self._loop.write(os.path.join(output_dir, STATE), run=self._run_name)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._found = os.path.join(checkpoint, STATE)
            if not os.path.exists(self._found):
                raise ValueError(
                    f"resume_from_checkpoint must hold {STATE}, draws and accounts, but "
                    f"{checkpoint!r} does not"
                )

    def _restore(self, path):
        loop = self._loop
        content = read_checkpoint(path, ("run", *TAKEN_OVER))
        loop.check_same_run(content, path, name="resume_from_checkpoint")
        self._run_name = content["run"]
        if loop.seed is None and content["step"] < self.plan.steps:
            self._check_unfinished(path)
            found = read_keys(key_file(path), loop.generators)
            loop.forward_seed = loop.forward_seed if found is None else found
        loop.take_over(content)

    def _check_unfinished(self, path):
        """Refuse a second ending by new random numbers: both endings would cost privacy."""
        checkpoint = pathlib.Path(path).parent
        finished = any(self._run_name in _finished_runs(folder) for folder in self._folders())
        if finished and not os.path.exists(key_file(path)):
            raise ValueError(
                "resume_from_checkpoint must be a checkpoint of a run that has not finished, but "
                f"the run of {os.fspath(checkpoint)!r} has, and its random numbers are gone: "
                "another ending costs privacy beyond what the run states; train anew in another "
                "folder and add both runs up (dpcompanion.accounting.Ledger)"
            )

    # What holds

    @property
    def taken(self) -> int:
        """How many steps were taken."""
        return 0 if self._loop is None else self._loop.run.step

    @property
    def history(self) -> History:
        """Losses and batch sizes of the steps, which are not private.

        Raises:
            ValueError: before `train`.
        """
        if self._loop is None:
            raise ValueError("history must be asked for after train, which has not begun")
        return self._loop.run.history

    @property
    def tracker(self) -> NormTracker | None:
        """What follows each person's gradients from the first step on, with `track` or a filter."""
        return self._tracker

    def statement(self) -> str:
        """What an epsilon of the steps that were taken is about, and of a run that ended early
        which epsilon holds.
        """
        return self.plan.statement(steps=0) if self._loop is None else self.history.statement()

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the run counts as in `accounting.Ledger.add`, see `History.ledger_entry`."""
        return (self.plan if self._loop is None else self.history).ledger_entry(delta)

    @property
    def stopped(self) -> bool:
        """Whether the run ended before the plan's last step."""
        return 0 < self.taken < self.plan.steps

    def epsilons(self, delta: float | None = None) -> torch.Tensor:
        """Epsilon of each person after the steps that were taken, (n,) float64, in the order of
        `persons`, see `History.epsilons`: 0 before `train`.

        Args:
            delta: by default the plan's.
        """
        if self._loop is not None:
            return self.history.epsilons(delta)
        return torch.zeros(self.plan.n, dtype=torch.float64)

    def card(self) -> dict[str, Any]:
        """What may be published of the run, as plain JSON values: the statement, the largest
        epsilon of the steps that were taken and of those that were planned, by the filter if there
        is one, how many persons have which of the latter, the plan. No person's number is in it.
        """
        model: Any = self.model
        plan, beforehand, by_budget = self.plan, promised(self.plan, self._filter), None
        if len(beforehand.unique()) > 1:
            by_budget = [
                {"epsilon": float(epsilon), "persons": int(count)}
                for epsilon, count in zip(*beforehand.unique(return_counts=True))
            ]
        taken = torch.as_tensor(plan.epsilon(steps=self.taken), dtype=torch.float64)
        return {
            "statement": self.statement(),
            "unit": self.privacy.unit,
            "epsilon": float(torch.minimum(taken, beforehand).max()),
            "epsilon_of_planned_steps": float(beforehand.max()),
            "by_budget": by_budget,
            "delta": plan.delta,
            "steps": self.taken,
            "planned_steps": plan.steps,
            "rows_at_most": self._rows.at_most,
            "filter": None if self._filter is None else type(self._filter).__name__,
            "filter_budgets": None if self._filter is None else self._filter_budgets(),
            "seeded": self.privacy.seed is not None,
            "model": type(self.model).__name__,
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "plan": plan.config(),
            "not_covered": "training losses that are logged, and metrics on the training data",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def _filter_budgets(self):
        given = torch.as_tensor(self.budgets, dtype=torch.float64).flatten()
        return sorted(set(given.tolist()))

    def card_text(self) -> str:
        """The card as a section in Markdown."""
        card = self.card()
        lines = [
            "## Privacy",
            "",
            f"Trained with DP-SGD. The unit of privacy is one {card['unit']}: each step clips the "
            f"gradient of all data of one (at most {card['rows_at_most']} of their rows) to one "
            f"norm. Every {card['unit']} has epsilon at most "
            f"{epsilons_in_words(card['epsilon_of_planned_steps'])} at delta {card['delta']:g}.",
            "",
            card["statement"],
        ]
        if card["by_budget"]:
            lines += ["", f"| epsilon | {card['unit']}, how many |", "|--:|--:|"]
            lines += [
                f"| {epsilons_in_words(each['epsilon'])} | {each['persons']} |"
                for each in card["by_budget"]
            ]
        return "\n".join([*lines, "", f"Not covered: {card['not_covered']}.", ""])

    def _write_card(self):
        folder = pathlib.Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        _note(folder, self.card() | {"finished_runs": _finished_runs(folder)})
        _files.replace(folder / "privacy.md", self.card_text().encode())

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """The Trainer's model card, with a section on privacy at its end."""
        with self._as_given():
            super().create_model_card(*arguments, **options)
        path = pathlib.Path(str(self.args.output_dir)) / "README.md"
        if self.is_world_process_zero() and path.exists():
            text = path.read_text(encoding="utf-8")
            _files.replace(path, (text.rstrip() + "\n\n" + self.card_text()).encode())
