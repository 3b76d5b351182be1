"""A causal language model, fine-tuned by LoRA under a filter of budgets.

Each author's messages are one unit.  The filter charges authors for what
their own gradients need, so that one with small gradients takes part for
longer.  As it stands it trains a tiny Llama on made-up messages, in seconds
and without a download.
"""

import sys

from dpcompanion.huggingface import PersonalPrivacy, PersonalTrainer

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
)

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "language-model"

generator = torch.Generator().manual_seed(0)
messages = []
for i in range(90):
    words = torch.randint(3, 50, (10,), generator=generator)
    mask = (torch.arange(10) < 3 + i % 8).long()
    messages.append(
        {
            "input_ids": words * mask,
            "attention_mask": mask,
            # The padding is not predicted.
            "labels": torch.where(mask.bool(), words, -100),
            "author": f"author {(i * i) % 41}",
        }
    )

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=16,
    )
)
model = get_peft_model(
    model,
    LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    ),
)
trainer = PersonalTrainer(
    model,
    TrainingArguments(
        FOLDER,
        per_device_train_batch_size=4,
        max_steps=12,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=messages,
    data_collator=default_data_collator,
    privacy=PersonalPrivacy(
        budgets=2.0,
        filter="exact",
        noise_multiplier=1.0,
        people="author",
        at_most=4,
        delta=1e-4,
        unit="author",
    ),
)
trainer.train()
trainer.save_model(f"{FOLDER}/adapter")

epsilons = trainer.epsilons()
print(f"promised to each of {trainer.plan.n} authors: 2.0")
print(f"without the filter it had been {trainer.plan.epsilon():.3f}")
print(f"charged at most {epsilons.max():.3f}")
print(trainer.statement())
