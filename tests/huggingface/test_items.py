"""`train` with data sets, collators and models of transformers as they are: exact against autograd
of one example at a time whose batch is its own, or refused by the layer's name.
"""

import copy
import itertools

import peft  # after tiny, which helps torchvision
import pytest
import torch
from tiny import CLASSES, MODELS, VOCABULARY, bert, gpt2, llama, model_of
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from dpcompanion.huggingface import per_example_loss
from dpcompanion.training import DPSGDPlan, by_person, train

N, CLIP = 6, 0.3


def tokenizer():
    words = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[MASK]": 1} | {f"w{i}": i for i in range(2, VOCABULARY)})
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")


def rows_and_collator(name, model):
    """Rows without padding, and the collator of the library that pads them."""
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, VOCABULARY, (2 + 3 * i % 5,), generator=g).tolist() for i in range(N)]
    if name == "vit":
        pixels = torch.randn(N, 1, 8, 8, generator=g, dtype=torch.float64)
        return [
            {"pixel_values": t, "labels": i % CLASSES} for i, t in enumerate(pixels)
        ], default_data_collator
    if name == "bert":
        rows = [{"input_ids": each, "labels": i % CLASSES} for i, each in enumerate(ids)]
        return rows, DataCollatorWithPadding(tokenizer())
    if name == "t5":
        own = model.get_base_model() if hasattr(model, "get_base_model") else model
        rows = [{"input_ids": each, "labels": each[::-1]} for each in ids]
        return rows, DataCollatorForSeq2Seq(tokenizer(), model=own)
    return [{"input_ids": each} for each in ids], DataCollatorForLanguageModeling(
        tokenizer(), mlm=False
    )


def alone(model, rows, collate, groups):
    """The sum of the clipped gradients of each group's mean loss, by the model's own loss of a
    batch of one row.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for group in groups:
        losses = torch.stack([model(**collate([dict(rows[i])])).loss for i in group])
        found = torch.autograd.grad(
            losses.mean(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        norm = torch.stack([g.norm() for g in found]).norm()
        for name, g in zip(named, found):
            total[name] += g * min(1.0, CLIP / max(float(norm), 1e-30))
    return total


# Which are refused: vmap takes no mask that Hugging Face makes for fast attention; the rest as in
# tests/test_whole_models.py.
LAYERS, FUNC = {"mixed", "ghost"}, {"func"}
REFUSED = {
    **{
        (name, lora): FUNC for name in ("bert", "masked", "gpt2", "llama") for lora in (False, True)
    },
    ("t5", False): LAYERS | FUNC | {"auto"},
    ("t5", True): FUNC,
    ("tied", False): LAYERS,
    ("vit", False): LAYERS,
}


def outcome(name, lora, method, people=None, model=None):
    model = model_of(name, lora=lora) if model is None else model
    rows, collate = rows_and_collator(name, model)
    groups = [[i] for i in range(N)] if people is None else [[0, 3], [1, 2, 4], [5]]
    expected = alone(copy.deepcopy(model).eval(), rows, collate, groups)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    plan = DPSGDPlan(
        n=len(groups),
        sample_rate=1.0,
        steps=1,
        max_grad_norm=CLIP,
        noise_multiplier=0.0,
        delta=1e-2,
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    options = {} if people is None else {"people": people, "at_most": 3}
    try:
        train(
            model.eval(),
            per_example_loss(model),
            rows,
            plan,
            optimizer=optimizer,
            seed=0,
            collate_fn=collate,
            method=method,
            progress=False,
            **options,
        )
    except ValueError as error:
        assert "layer" in str(error) or str(error).startswith("model"), error
        return str(error)
    for key, p in model.named_parameters():
        wanted = expected.get(key, torch.zeros_like(p))
        assert (len(groups) * (before[key] - p.detach()) - wanted).norm() <= 1e-4 * CLIP * N
    return None


LLAMA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
PEFT = {
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True, init_lora_weights=False, **LLAMA),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], init_ia3_weights=False, **LLAMA),
    "vera": lambda: peft.VeraConfig(r=2, init_weights=False, **LLAMA),
    "adapters": lambda: peft.AdaptionPromptConfig(
        adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=2, encoder_hidden_size=4, task_type="CAUSAL_LM"
    ),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def adapted(name, **options):
    torch.manual_seed(0)
    return peft.get_peft_model(llama(max_position_embeddings=16, **options), PEFT[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", PEFT)
def test_what_peft_adds_is_trained_as_autograd_says_and_nothing_else_moves(name):
    assert outcome("llama", True, "auto", model=adapted(name, attn_implementation="eager")) is None
    error = outcome("llama", True, "auto", model=adapted(name))
    assert error is None or "eager" in error


def test_a_prompt_is_trained_as_autograd_says_and_nothing_else_moves():
    assert (
        outcome("llama", True, "auto", model=adapted("prompt", attn_implementation="eager")) is None
    )
    model = adapted("prompt", attn_implementation="eager").eval()
    rows, collate = rows_and_collator("llama", model)
    batch = collate([dict(rows[1])])
    torch.testing.assert_close(
        per_example_loss(model)(model(**batch), batch)[0], model(**batch).loss
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, lora", itertools.product(MODELS, [False, True]))
def test_a_model_is_trained_as_autograd_says_of_each_example_or_refused(name, lora):
    found = {method: outcome(name, lora, method) for method in ("auto", "mixed", "ghost", "func")}
    assert {method for method, error in found.items() if error} == REFUSED.get(
        (name, lora), set()
    ), found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_auto_is_exact_with_padding_of_the_collator(name):
    assert outcome(name, name == "llama", "auto") is None


def test_persons_are_exact_with_padding_of_the_collator():
    assert outcome("bert", True, "auto", people=["a", "b", "b", "a", "b", "c"]) is None


def run(model, rows, collate):
    plan = DPSGDPlan(
        n=len(rows), sample_rate=0.5, steps=3, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(
        model,
        per_example_loss(model),
        rows,
        plan,
        optimizer=optimizer,
        seed=0,
        collate_fn=collate,
        progress=False,
    )


def test_masks_of_a_masked_language_model_are_drawn_by_the_run():
    rows = [{"input_ids": [2 + (i + k) % 40 for k in range(4 + i % 3)]} for i in range(12)]
    words, found = tokenizer(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = model_of("masked")
        run(model, rows, DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.5))
        found.append(model.bert.embeddings.word_embeddings.weight.detach())
    assert torch.equal(*found)
    # a generator of its own goes on where no step is
    with pytest.raises(ValueError, match="collate_fn"):
        run(
            model_of("masked"),
            rows,
            DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.5, seed=1),
        )


@pytest.mark.parametrize("initial", [0.02, 0.5])
def test_a_collator_that_forgets_the_mask_is_refused(initial):
    pad = DataCollatorWithPadding(tokenizer())

    def unmasked(rows):
        batch = pad(rows)
        return {key: batch[key] for key in ("input_ids", "labels")}

    torch.manual_seed(0)
    rows = [{"input_ids": list(range(2, 4 + i % 5)), "labels": i % CLASSES} for i in range(20)]
    with pytest.raises(ValueError, match="collate_fn.*attention_mask"):
        run(bert(initializer_range=initial), rows, unmasked)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_model_that_rounds_to_single_precision_inside_is_taken(side):
    """Llama's eager attention computes in float32 whatever its weights are."""
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            num_labels=CLASSES,
            attn_implementation="eager",
        )
    )
    rows = [
        {"ids": torch.randint(1, 100, (5 + (7 * i) % 40,)), "labels": i % CLASSES}
        for i in range(20)
    ]

    def padded(rows):
        ids = pad_sequence([row["ids"] for row in rows], batch_first=True, padding_side=side)
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    run(model, rows, padded)


def test_persons_of_a_data_set_have_one_budget_each():
    rows = [{"input_ids": [2 + i % 40, 3], "labels": [2 + i % 40, 3]} for i in range(12)]
    data = by_person(
        rows, people=[f"P{i % 5}" for i in range(12)], at_most=2, collate_fn=default_data_collator
    )
    budgets = data.per_person([1.0 + i % 5 for i in range(12)])
    assert budgets.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    plan = DPSGDPlan.for_epsilons(
        budgets,
        n=5,
        sample_rate=0.4,
        steps=4,
        max_grad_norm=1.0,
        delta=1e-2,
        accountant="rdp",
        unit="patient",
    )
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = train(
        model, per_example_loss(model), data, plan, optimizer=optimizer, seed=0, progress=False
    )
    assert "one patient" in history.statement() and bool((plan.epsilon() <= budgets).all())
