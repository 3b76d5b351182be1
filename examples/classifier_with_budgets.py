"""A text classifier with a budget for each patient, from a data column.

Beside a plain script for `transformers.Trainer`, the lines marked with # <-
are new or changed.  As it stands it trains a tiny BERT on made-up notes, in
seconds and without a download: put your own model, tokenizer and data in
their place.
"""

import sys

# Before transformers and peft:
from dpcompanion.huggingface import PersonalPrivacy, PersonalTrainer  # <-

# isort: split
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    default_data_collator,
)

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "classifier"

# Data: several notes a patient. Every row says whose it is, and which
# epsilon its patient has agreed to.
generator = torch.Generator().manual_seed(0)
notes = []
for i in range(120):
    words = torch.randint(2, 50, (8,), generator=generator)
    row = {
        "input_ids": words,
        "attention_mask": torch.ones(8, dtype=torch.long),
        "labels": int(words[0] > 25),
    }
    patient = (i * i) % 61  # <-
    row["patient"] = f"P{patient}"  # <-
    row["consent"] = 2.0 if patient % 2 else 8.0  # <-
    notes.append(row)

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
)
arguments = TrainingArguments(
    FOLDER,
    per_device_train_batch_size=10,
    num_train_epochs=4,
    learning_rate=1e-2,
    report_to="none",
    save_strategy="no",
)
trainer = PersonalTrainer(  # <- Trainer
    model,
    arguments,
    train_dataset=notes,
    data_collator=default_data_collator,
    privacy=PersonalPrivacy(  # <-
        budgets="consent",  # <-
        people="patient",  # <-
        at_most=4,  # <-
        delta=1e-4,  # <-
        unit="patient",  # <-
    ),  # <-
)
trainer.train()
trainer.save_model(f"{FOLDER}/model")

epsilons = trainer.epsilons()  # <-
for budget in (2.0, 8.0):  # <-
    own = epsilons[trainer.budgets == budget]  # <-
    whose = f"{len(own)} patients with a budget of {budget:g}"  # <-
    print(f"{whose}: epsilon {own.max():.3f}")  # <-
print(trainer.statement())  # <-
