"""Tiny models of `transformers`, in full and with LoRA, and rows for them. Nothing is
downloaded.
"""

import torch
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import dpcompanion.huggingface  # noqa: F401  (before transformers: it helps torchvision)

VOCABULARY, LENGTH, CLASSES = 50, 6, 3

_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=8,
    num_labels=CLASSES,
    initializer_range=0.3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def bert(**options):
    return BertForSequenceClassification(BertConfig(**(_BERT | options)))


def masked(**options):
    return BertForMaskedLM(BertConfig(**(_BERT | {"tie_word_embeddings": False} | options)))


def gpt2(**options):
    sizes = dict(
        vocab_size=VOCABULARY,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False)
    return GPT2LMHeadModel(GPT2Config(**(sizes | quiet | options)))


def tied(**options):
    return gpt2(**({"tie_word_embeddings": True, "attn_implementation": "eager"} | options))


def llama(**options):
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    return LlamaForCausalLM(
        LlamaConfig(**(sizes | dict(num_key_value_heads=1, max_position_embeddings=8) | options))
    )


def t5(**options):
    sizes = dict(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(
        T5Config(**(sizes | dict(decoder_start_token_id=0, pad_token_id=0) | options))
    )


def vit(**options):
    sizes = dict(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    quiet = dict(
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(ViTConfig(**(sizes | quiet | options)))


#: {name: (model, the layers that LoRA adapts)}
MODELS = {
    "bert": (bert, ["query", "value"]),
    "masked": (masked, ["query", "value"]),
    "gpt2": (gpt2, ["c_attn"]),
    "tied": (tied, ["c_attn"]),
    "llama": (llama, ["q_proj", "v_proj"]),
    "t5": (t5, ["q", "v"]),
    "vit": (vit, ["q_proj", "v_proj"]),
}


def model_of(name, *, lora=False, **options):
    torch.manual_seed(0)
    make, targets = MODELS[name]
    model = make(**options)
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        )
    return model.double() if name == "vit" else model


def rows_of(name, n=24):
    """Rows of unequal length, padded by hand, each with a column of its person, of whom there are
    fewer than n.
    """
    g = torch.Generator().manual_seed(1)
    rows = []
    for i in range(n):
        who, length = f"person {int(i**0.5 * 2):02}", 2 + i % (LENGTH - 1)
        if name == "vit":
            row = {
                "pixel_values": torch.randn(1, 8, 8, generator=g, dtype=torch.float64),
                "labels": i % CLASSES,
            }
        else:
            ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=g)
            mask = (torch.arange(LENGTH) < length).long()
            labels = i % CLASSES if name == "bert" else torch.where(mask.bool(), ids, -100)
            row = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
        rows.append(row | {"who": who, "budget": 1.0 + int(i**0.5 * 2) % 2})
    return rows
