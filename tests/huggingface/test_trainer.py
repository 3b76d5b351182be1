"""The Trainer with budgets takes the steps that its plan says, for real models, exactly as autograd
says.
"""

import copy
import json
import re
import warnings

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from tiny import MODELS, bert, llama, model_of, rows_of
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from dpcompanion.accounting import Ledger
from dpcompanion.filters import ExactFilter
from dpcompanion.gradients.proof import rows_to_look_through
from dpcompanion.huggingface import PersonalPrivacy, PersonalTrainer
from dpcompanion.training import DPSGDPlan, Track
from dpcompanion.training.people import PRESENT

PRIVACY = dict(budgets=8.0, delta=1e-3, seed=1, accountant="rdp")


def arguments(folder, **options):
    usual = dict(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        max_steps=3,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    return TrainingArguments(**(usual | options))


def trainer_of(
    folder, name="bert", model=None, rows=None, privacy=None, lora=False, given=None, **options
):
    return PersonalTrainer(
        model_of(name, lora=lora) if model is None else model,
        arguments(folder, **options),
        train_dataset=rows_of(name) if rows is None else rows,
        data_collator=default_data_collator,
        privacy=PersonalPrivacy(**(PRIVACY | (privacy or {}))),
        **(given or {}),
    )


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def clipped_by_autograd(model, x, y, c):
    """The sum of the persons' clipped gradients, by the model's own loss of one row at a time."""
    own = {key: p for key, p in model.named_parameters() if p.requires_grad}
    total = {key: torch.zeros_like(p) for key, p in own.items()}
    for person, present in enumerate(x[PRESENT]):
        losses = []
        for place in present.nonzero()[:, 0]:
            row = {k: t[person, place][None] for k, t in x.tensors.items() if k != PRESENT}
            losses.append(model(**row, labels=y["labels"][person, place][None]).loss)
        found = torch.autograd.grad(
            torch.stack(losses).mean(),
            list(own.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        norm = torch.stack([g.norm() for g in found]).norm()
        for key, g in zip(own, found):
            total[key] += g * min(1.0, c / float(norm))
    return total


@pytest.mark.parametrize(
    "name, lora",
    [
        pytest.param(name, lora, marks=[pytest.mark.slow] if lora and number else [])
        for number, name in enumerate(MODELS)
        for lora in (False, True)
    ],
)
def test_a_step_is_that_of_autograd_one_person_at_a_time(name, lora, tmp_path, monkeypatch):
    model = model_of(name, lora=lora)
    if name == "t5" and not lora:  # three layers share it, and positions come before examples
        model.shared.weight.requires_grad_(False)
        for key, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and "relative_attention_bias" not in key)
    before = copy.deepcopy(model).eval()
    monkeypatch.setattr(DPSGDPlan, "noisy", lambda plan, total, generator: total)
    trainer = trainer_of(
        tmp_path,
        name,
        model,
        privacy={"people": "who", "at_most": 3},
        max_steps=1,
        max_grad_norm=0.5,
        learning_rate=10.0,
    )
    seen, rows = [], type(trainer._rows).rows
    monkeypatch.setattr(
        type(trainer._rows),
        "rows",
        lambda self, drawn: seen.append((drawn, rows(self, drawn))) or seen[-1][1],
    )
    trainer.train()
    drawn, (x, y) = seen[-1]
    assert len(drawn) == trainer.history.batch_sizes[0] > 1 and x[PRESENT].sum() > len(drawn)
    total = clipped_by_autograd(before, x, y, 0.5)
    assert max(g.abs().max() for g in total.values()) > 1e-3
    after = weights_of(model)
    for key, p in before.named_parameters():
        wanted = (
            p - 10 * total[key] / float(trainer.plan.expected_batch_size) if key in total else p
        )
        torch.testing.assert_close(
            after[key], wanted.detach(), rtol=1e-5, atol=1e-5 if key in total else 0
        )


def test_each_person_gets_the_budget_of_their_column_and_no_number_of_theirs_is_published(tmp_path):
    logged = []

    class Note(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            logged.append(logs)

    privacy = {"budgets": "budget", "people": "who", "at_most": 2, "unit": "patient"}
    trainer = trainer_of(
        tmp_path,
        privacy=privacy,
        given={"callbacks": [Note()]},
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    wanted = {row["who"]: row["budget"] for row in rows_of("bert")}
    assert list(trainer.persons) == sorted(wanted) and trainer.plan.n == len(wanted) < 24
    for who, epsilon in zip(trainer.persons, trainer.epsilons()):
        assert wanted[who] - 0.02 < epsilon <= wanted[who]
    assert "patient" in trainer.statement() and f"{len(wanted)}" in trainer.statement()
    assert logged and all(
        isinstance(value, (int, float)) for logs in logged for value in logs.values()
    )
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert (
        card["steps"] == 3
        and card["epsilon"] <= 2.0
        and sum(b["persons"] for b in card["by_budget"]) == len(wanted)
    )
    text = (tmp_path / "privacy.md").read_text()
    assert "patient" in text and "person 0" not in text + json.dumps(card)


def test_a_series_of_budgets_goes_to_persons_by_name_and_to_rows_by_position(tmp_path):
    pandas = pytest.importorskip("pandas")
    plain = trainer_of(tmp_path)
    order = list(range(len(plain.persons)))[::-1]
    given = pandas.Series([1.0 + place / 90 for place in range(len(order))], index=order)
    rows = trainer_of(tmp_path, privacy={"budgets": given})
    assert rows.budgets.tolist() == given.tolist()
    names = trainer_of(tmp_path, privacy={"people": "who", "budgets": 1.0}).persons.tolist()
    own = {name: 1.0 + place / 9 for place, name in enumerate(names)}
    given = pandas.Series(own).iloc[::-1]
    people = trainer_of(tmp_path, privacy={"people": "who", "budgets": given})
    assert people.budgets.tolist() == list(own.values())


def test_scale_and_shares_keep_their_budgets(tmp_path):
    trainer = trainer_of(
        tmp_path, lora=True, privacy={"budgets": {1.0: 0.5, 3.0: 0.5}, "method": "scale"}
    )
    trainer.train()
    epsilons, counts = trainer.epsilons().round(decimals=1).unique(return_counts=True)
    assert epsilons.tolist() == [1.0, 3.0] and counts.tolist() == [12, 12]


@pytest.mark.slow
def test_pieces_for_memory_change_no_draw_and_no_step(tmp_path):
    found = []
    for size, accumulated in ((6, 1), (2, 3)):
        trainer = trainer_of(
            tmp_path,
            lora=True,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
        )
        trainer.train()
        found.append((weights_of(trainer.model), trainer.history.batch_sizes))
    assert torch.equal(found[0][1], found[1][1])
    for key, p in found[0][0].items():
        torch.testing.assert_close(p, found[1][0][key])


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


def with_dropout():
    torch.manual_seed(0)
    return bert(hidden_dropout_prob=0.1)


LONG = dict(
    max_steps=4, save_strategy="steps", save_steps=2, learning_rate=0.05, lr_scheduler_type="linear"
)


@pytest.mark.slow
def test_a_run_that_goes_on_ends_where_it_would_have_ended(tmp_path):
    privacy = {"people": "who", "at_most": 2, "track": Track(clipping="individual")}
    whole = trainer_of(tmp_path / "a", model=with_dropout(), privacy=privacy, **LONG)
    whole.train()
    cut = trainer_of(
        tmp_path / "b",
        model=with_dropout(),
        privacy=privacy,
        given={"callbacks": [Interrupt()]},
        **LONG,
    )
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = trainer_of(tmp_path / "b", model=with_dropout(), privacy=privacy, **LONG)
    again.train(resume_from_checkpoint=True)
    assert again.taken == 4 and torch.equal(again.history.batch_sizes, whole.history.batch_sizes)
    for key, p in weights_of(whole.model).items():
        assert torch.equal(p, weights_of(again.model)[key])
    assert torch.equal(whole.epsilons(), again.epsilons()) and len(whole.epsilons().unique()) > 2


@pytest.mark.slow
def test_without_a_seed_keys_lie_in_the_checkpoint_until_the_run_ends(tmp_path):
    cut = trainer_of(
        tmp_path, lora=True, privacy={"seed": None}, given={"callbacks": [Interrupt()]}, **LONG
    )
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    file = tmp_path / "checkpoint-2" / "privacy.pt.key"
    kept, found = file.read_bytes(), []
    for _ in range(2):
        file.write_bytes(kept)
        again = trainer_of(tmp_path, lora=True, privacy={"seed": None}, **LONG)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        found.append(weights_of(again.model))
        assert not file.exists()
    assert all(torch.equal(p, found[1][key]) for key, p in found[0].items())


def test_a_finished_run_gets_no_second_ending_from_an_earlier_checkpoint(tmp_path):
    options = dict(save_strategy="steps", save_steps=1, max_steps=2)
    first = trainer_of(tmp_path, lora=True, privacy={"seed": None}, **options)
    first.train()
    for folder in (tmp_path, tmp_path / "elsewhere"):
        again = trainer_of(folder, lora=True, privacy={"seed": None}, **options)
        with pytest.raises(ValueError, match="resume_from_checkpoint must be a checkpoint of a"):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(json.loads((tmp_path / "privacy.json").read_text())["finished_runs"]) == 1


def test_a_checkpoint_of_a_finished_run_keeps_its_account(tmp_path):
    """Were no step taken and nothing restored, the epsilon would be 0, and on the card too."""
    options = dict(lora=True, max_steps=4, save_strategy="steps", save_steps=2)
    first = trainer_of(tmp_path, **options)
    first.train()
    card = json.loads((tmp_path / "privacy.json").read_text())
    again = trainer_of(tmp_path, **options)
    with pytest.warns(UserWarning, match="has finished"):
        again.train(resume_from_checkpoint=True)
    assert again.taken == 4 and torch.equal(again.epsilons(), first.epsilons())
    assert again.statement() == first.statement()
    assert json.loads((tmp_path / "privacy.json").read_text()) == card
    # The Trainer goes on within an epoch, though no step is left.
    within = options | {"max_steps": 3, "save_steps": 3}
    trainer_of(tmp_path / "within", **within).train()
    again = trainer_of(tmp_path / "within", **within)
    with pytest.raises(ValueError, match="a run that has steps left, but it has taken all 3"):
        again.train(resume_from_checkpoint=True)
    assert again.taken == 3 and float(again.epsilons().max()) == again.plan.epsilon()


def test_keys_go_whatever_ends_a_run_and_from_the_folder_that_it_went_on_from(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    options = dict(
        lora=True, privacy={"seed": None}, max_steps=4, save_strategy="steps", save_steps=1
    )
    stopped = trainer_of(tmp_path / "stopped", given={"callbacks": [Stop()]}, **options)
    stopped.train()
    assert stopped.stopped and not [*tmp_path.rglob("*.key")]
    again = trainer_of(tmp_path / "stopped", **options)
    with pytest.warns(RuntimeWarning, match="both endings cost privacy"):
        again.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-1"))
    assert again.history.key_fingerprint != stopped.history.key_fingerprint

    cut = trainer_of(tmp_path / "a", given={"callbacks": [Interrupt()]}, **options)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    assert [*(tmp_path / "a").rglob("*.key")]
    trainer_of(tmp_path / "b", **options).train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1")
    )
    assert not [*tmp_path.rglob("*.key")]
    with pytest.raises(ValueError, match="must be a checkpoint of a run that has not finished"):
        trainer_of(tmp_path / "c", **options).train(
            resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1")
        )


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_no_checkpoint_is_pushed_to_the_hub(strategy, tmp_path):
    args = arguments(tmp_path, hub_strategy=strategy)
    args.push_to_hub = True
    with pytest.raises(
        ValueError, match=f"hub_strategy must push no checkpoints, got '{strategy}'"
    ):
        PersonalTrainer(
            model_of("bert"),
            args,
            train_dataset=rows_of("bert"),
            privacy=PersonalPrivacy(**PRIVACY),
        )


@pytest.mark.parametrize("own", [False, True])
def test_evaluation_has_the_loss_of_the_training(own, tmp_path):
    class Own(torch.nn.Module):
        """A model without a loss of its own."""

        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(300, 4), torch.nn.Linear(4, 3)

        def forward(self, input_ids, labels=None):
            return {"logits": self.head(self.embedding(input_ids).mean(1))}

    def weighted(outputs, batch):
        return torch.nn.functional.cross_entropy(
            outputs["logits"],
            batch["labels"],
            weight=torch.tensor([1.0, 20.0, 0.05]),
            reduction="none",
        )

    rows = rows_of("bert")
    trainer = trainer_of(
        tmp_path,
        model=Own() if own else None,
        rows=rows,
        lora=not own,
        privacy={"loss": weighted},
        given={"eval_dataset": rows[:7]},
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    predicted = torch.as_tensor(trainer.predict(rows[:7]).predictions)
    assert predicted.shape == (7, 3)
    labels = torch.tensor([int(row["labels"]) for row in rows[:7]])
    assert found == pytest.approx(
        float(weighted({"logits": predicted}, {"labels": labels}).mean()), rel=1e-4
    )


def test_a_run_whose_rate_was_lowered_on_a_plateau_goes_on(tmp_path):
    options = dict(
        lora=True,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        metric_for_best_model="same",
        greater_is_better=False,
    )
    given = {"eval_dataset": rows_of("bert", 4), "compute_metrics": lambda predictions: {"same": 1}}
    cut = trainer_of(tmp_path, given=given | {"callbacks": [Interrupt()]}, **options)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    assert cut.optimizer.param_groups[0]["lr"] < 0.1
    again = trainer_of(tmp_path, given=given, **options)
    again.train(resume_from_checkpoint=True)
    assert again.taken == 4


def test_the_precision_of_accelerate_is_that_of_the_run_and_accelerate_casts_nothing(
    tmp_path, monkeypatch
):
    """`accelerate launch --mixed_precision` says it by this variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = model_of("bert", lora=True)
    forward = type(model).forward
    trainer = trainer_of(tmp_path, model=model, max_steps=1)
    trainer.train()
    assert trainer.history.precision == "bf16"
    assert trainer.accelerator.mixed_precision == "no" and model.forward.__func__ is forward
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="mixed_precision must be 'no' or 'bf16', got 'fp16'"):
        trainer_of(tmp_path)


def test_a_seed_that_was_used_on_other_data_in_this_folder_is_warned_of(tmp_path):
    rows = rows_of("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            trainer_of(tmp_path, lora=True, rows=rows, max_steps=1).train()
    changed = [dict(row) for row in rows]
    changed[0] = changed[0] | {"labels": 1 - changed[0]["labels"]}
    with pytest.warns(RuntimeWarning, match="seed 1 has been used on other data"):
        trainer_of(tmp_path, lora=True, rows=changed, max_steps=1).train()


def test_another_run_in_the_folder_of_a_finished_one_may_go_on(tmp_path):
    options = dict(lora=True, privacy={"seed": None}, **LONG)
    trainer_of(tmp_path, **options).train()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, given={"callbacks": [Interrupt()]}, **options).train()
    again = trainer_of(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.taken == 4
    assert len(json.loads((tmp_path / "privacy.json").read_text())["finished_runs"]) == 2


@pytest.mark.slow
def test_a_checkpoint_of_another_run_or_of_a_plain_trainer_is_refused(tmp_path):
    options = dict(save_strategy="steps", save_steps=1, max_steps=2)
    trainer_of(tmp_path, lora=True, **options).train()
    other = trainer_of(tmp_path, lora=True, privacy={"budgets": 2.0}, **options)
    with pytest.raises(ValueError, match="same plan"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / "privacy.pt").unlink()
    with pytest.raises(ValueError, match=r"privacy\.pt"):
        trainer_of(tmp_path, lora=True, **options).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def test_a_run_that_stops_early_states_the_steps_that_it_took(tmp_path):
    options = dict(
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="falling",
        greater_is_better=True,
    )
    metrics = iter([3.0, 2.0, 1.0, 0.0])
    given = {
        "eval_dataset": rows_of("bert", 4),
        "callbacks": [EarlyStoppingCallback(2)],
        "compute_metrics": lambda predictions: {"falling": next(metrics)},
    }
    trainer = trainer_of(tmp_path, given=given, **options)
    trainer.train()
    assert trainer.taken == 3 and "3 of 6" in trainer.statement()
    assert trainer.epsilons().max() == trainer.plan.epsilon(steps=3) < trainer.plan.epsilon()
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert (
        card["steps"] == 3
        and card["epsilon"] < card["epsilon_of_planned_steps"] == trainer.plan.epsilon()
    )
    # The models decided when to stop: what is said first is what holds all the same, and rounded
    # up.
    said = float(re.findall(r"epsilon at most (\S+)", trainer.card_text())[0])
    assert (
        trainer.plan.epsilon() <= said < trainer.plan.epsilon() + 1e-3
        and str(said) in trainer.statement()
    )
    with pytest.raises(ValueError, match="once"):
        trainer.train()


@pytest.mark.slow
def test_a_filter_keeps_budgets_and_an_exact_account_goes_below_the_uniform_one(tmp_path):
    privacy = {
        "budgets": 1.5,
        "filter": "exact",
        "noise_multiplier": 1.0,
        "people": "who",
        "accountant": "pld",
    }
    trainer = trainer_of(tmp_path, lora=True, privacy=privacy, max_steps=8)
    trainer.train()
    epsilons = trainer.epsilons()
    assert trainer.tracker.exact and epsilons.shape == (trainer.plan.n,)
    assert epsilons.max() <= 1.5 < trainer.plan.epsilon() and epsilons.min() > 0
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert (
        card["filter_budgets"] == [1.5]
        and 0 < card["epsilon"] <= card["epsilon_of_planned_steps"] <= 1.5
    )
    assert float(re.findall(r"epsilon at most (\S+)", trainer.card_text())[0]) <= 1.5
    assert "By its filter (ExactFilter)" in trainer.statement()
    delta = trainer.plan.delta
    assert (
        Ledger().add(trainer, delta=delta).epsilon(delta)
        <= 1.5
        < Ledger().add(trainer).epsilon(delta)
    )


def test_a_filter_that_has_paid_for_another_run_and_an_optimizer_beside_are_warned_of(tmp_path):
    filters = []

    def shared(plan, budgets):
        if not filters:
            filters.append(ExactFilter.for_plan(plan, budgets, block=1))
        return filters[0]

    class Beside(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0).step()

    privacy = {"budgets": 1.5, "filter": shared, "noise_multiplier": 1.0, "accountant": "pld"}
    first = trainer_of(
        tmp_path / "a", lora=True, privacy=privacy, max_steps=4, given={"callbacks": [Beside()]}
    )
    with pytest.warns(RuntimeWarning, match="trained by a SGD beside") as seen:
        first.train()
    assert not any("filter has paid" in str(each.message) for each in seen)
    with warnings.catch_warnings():  # what watched other optimizers is gone with the training
        warnings.simplefilter("error")
        torch.optim.SGD([p for p in first.model.parameters() if p.requires_grad], lr=0.0).step()
    assert float(filters[0].spent.max()) > 0
    with pytest.warns(UserWarning, match="filter has paid for another run"):
        trainer_of(tmp_path / "b", lora=True, privacy=privacy, max_steps=4).train()
    own, options = privacy | {"filter": "exact"}, dict(save_strategy="steps", save_steps=1)
    trainer_of(tmp_path / "c", lora=True, privacy=own, max_steps=4, **options).train()
    resumed = trainer_of(tmp_path / "a", lora=True, privacy=privacy, max_steps=4)
    with pytest.warns(UserWarning, match="which it now forgets"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "c" / "checkpoint-1"))


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 on this processor"
)
def test_bf16_goes_through_the_network_only(tmp_path):
    model = model_of("bert", lora=True)
    trainer = trainer_of(tmp_path, model=model, bf16=True)
    trainer.train()
    assert trainer.history.precision == "bf16" and all(
        p.dtype == torch.float32 for p in model.parameters()
    )


@pytest.mark.parametrize(
    "name, names",
    [
        ("gpt2", ["wte", "lm_head"]),
        ("masked", ["word_embeddings", "decoder"]),
        ("t5", ["shared", "embed_tokens"]),
    ],
)
def test_a_model_that_shares_a_weight_where_no_method_takes_it_is_refused_by_its_layers(
    name, names, tmp_path
):
    with pytest.raises(ValueError, match="share a parameter") as caught:
        trainer_of(tmp_path, name, model=model_of(name, tie_word_embeddings=True)).train()
    assert all(name in str(caught.value) for name in names)


def test_an_optimizer_that_moves_not_what_it_should_or_is_stepped_by_others_is_refused(tmp_path):
    model = model_of("bert", lora=True)
    own = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="optimizer"):
        trainer_of(
            tmp_path, model=model, given={"optimizers": (torch.optim.SGD(own[:1], lr=0.1), None)}
        ).train()

    class Again(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            optimizer.step()

    with pytest.raises(ValueError, match="optimizer"):
        trainer_of(tmp_path, lora=True, given={"callbacks": [Again()]}).train()

    class Stuck(torch.optim.SGD):
        def step(self, closure=None):
            return None

    with pytest.raises(ValueError, match="moved none"):
        trainer_of(tmp_path, model=model, given={"optimizers": (Stuck(own, lr=0.1), None)}).train()


def test_padding_that_few_rows_need_is_found_among_many_of_one_length(tmp_path):
    rows = rows_of("bert", 64)
    for row in rows:
        row["attention_mask"] = torch.tensor([1, 1, 1, 0, 0, 0])
    rows[int(rows_to_look_through(64)[40])]["attention_mask"] = torch.ones(6, dtype=torch.int64)
    trainer = trainer_of(tmp_path, model=bert(initializer_range=0.5), rows=rows)
    trainer._rows.reader.collate_fn = padded_without_a_mask
    with pytest.raises(ValueError, match="data_collator"):
        trainer.train()


def padded_without_a_mask(items):
    length = max(int(item["attention_mask"].sum()) for item in items)
    ids = torch.stack([item["input_ids"][:length] for item in items])
    return {"input_ids": ids, "labels": torch.tensor([item["labels"] for item in items])}


def mixing(outputs, batch):
    losses = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")
    return losses / losses.detach().mean()


def test_what_mixes_persons_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, model=bert(initializer_range=0.5))
    trainer._rows.reader.collate_fn = padded_without_a_mask
    with pytest.raises(ValueError, match="data_collator"):
        trainer.train()
    with pytest.raises(ValueError, match="loss"):
        trainer_of(tmp_path, privacy={"loss": mixing}).train()


class FSDPModule:
    """Known by its name, as the class that `fully_shard` adds to a model's, which takes a process
    group.
    """


def test_a_compute_loss_of_a_subclass_is_refused_since_no_step_would_call_it(tmp_path):
    class Weighted(PersonalTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            return 2 * super().compute_loss(model, inputs, return_outputs, **options)

    with pytest.raises(ValueError, match="compute_loss must .*Weighted.compute_loss.*loss=") as no:
        Weighted(
            model_of("bert"),
            arguments(tmp_path),
            train_dataset=rows_of("bert"),
            privacy=PersonalPrivacy(**PRIVACY),
        )
    assert "PersonalPrivacy" in str(no.value)


def test_a_model_that_is_sharded_is_refused_before_the_trainer_is_made(tmp_path):
    model = model_of("bert")
    model.bert.__class__ = type("FSDPBertModel", (FSDPModule, type(model.bert)), {})
    with pytest.raises(
        ValueError, match="model must be a plain module, .* holds FSDPModule, .* before fully_shard"
    ):
        trainer_of(tmp_path, model=model)


@pytest.mark.parametrize(
    "privacy, options, word",
    [
        ({"delta": 2.0}, {}, "delta"),
        ({"method": "both"}, {}, "method"),
        ({"budgets": "nobody's"}, {}, "nobody's"),
        ({"budgets": [1.0, 2.0]}, {}, "budgets"),
        ({"filter": "exact"}, {}, "noise_multiplier"),
        ({"noise_multiplier": 1.0}, {}, "filter"),
        ({"people": ["a"] * 7}, {}, "people"),
        ({"people": "who", "at_most": 0}, {}, "at_most"),
        ({}, {"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({}, {"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(privacy, options, word, tmp_path):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=word):
        warnings.simplefilter("ignore")
        trainer_of(tmp_path, privacy=privacy, **options)


def test_of_a_trained_prompt_the_prompt_moves_and_nothing_else(tmp_path):
    torch.manual_seed(0)
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = get_peft_model(llama(attn_implementation="eager"), config)
    before = weights_of(model)
    trainer = trainer_of(tmp_path, "llama", model)
    trainer.train()
    moved = {name for name, p in weights_of(model).items() if not torch.equal(p, before[name])}
    assert (
        moved == {name for name, p in model.named_parameters() if p.requires_grad}
        and len(moved) == 1
    )


def test_epochs_count_persons(tmp_path):
    trainer = trainer_of(
        tmp_path, lora=True, privacy={"people": "who"}, max_steps=-1, num_train_epochs=2
    )
    trainer.train()
    assert trainer.plan.n == 9 and trainer.taken == trainer.plan.steps == 2 * round(9 / 6)
    assert round(float(trainer.plan.expected_batch_size), 9) == 6


class Normed(torch.nn.Module):
    """A classifier with a batch norm, in the signature of `transformers`."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.norm(x))
        return {"logits": logits}


def test_batch_norms_in_evaluation_mode_stay_in_it(tmp_path):
    torch.manual_seed(0)
    model = Normed().eval()
    before = model.norm.running_mean.clone()
    rows = [{"x": torch.randn(4) + 3, "labels": i % 3} for i in range(24)]
    trainer = trainer_of(
        tmp_path,
        model=model,
        rows=rows,
        privacy={
            "loss": lambda outputs, batch: torch.nn.functional.cross_entropy(
                outputs["logits"], batch["labels"], reduction="none"
            )
        },
        remove_unused_columns=False,
    )
    trainer.train()
    assert trainer.taken == 3 and torch.equal(model.norm.running_mean, before)
    assert model.training and not model.norm.training


class ScheduleFree(torch.optim.SGD):
    """An optimizer that must be told when training begins, as those of schedulefree must."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False


def test_an_optimizer_with_modes_is_put_into_training(tmp_path):
    model = model_of("bert", lora=True)
    optimizer = ScheduleFree([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.training))
    trainer_of(tmp_path, model=model, given={"optimizers": (optimizer, None)}).train()
    assert seen == [True] * 3


def test_arguments_are_written_down_as_they_were_given(tmp_path):
    trainer = trainer_of(
        tmp_path,
        lora=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=0.7,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    kept = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert (kept.gradient_accumulation_steps, kept.max_grad_norm) == (3, 0.7)
    assert (trainer.args.gradient_accumulation_steps, trainer.args.max_grad_norm) == (1, 0.0)
