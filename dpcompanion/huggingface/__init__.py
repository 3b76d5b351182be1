r"""Hugging Face's Trainer with a privacy budget for each person: `PersonalTrainer`, and the losses
of each example.

Beside a script with `transformers.Trainer` two things change: the class, and a `PersonalPrivacy`
that says whose budgets are kept::

    privacy = PersonalPrivacy(budgets="consent", people="patient_id", delta=1e-6, unit="patient")
    trainer = PersonalTrainer(model=model, args=args, train_dataset=train_dataset, privacy=privacy)
    trainer.train()
    trainer.epsilons()  # (n,), one for each person
    print(trainer.statement())

Model, arguments, data, collator, optimizer, scheduler, evaluation, callbacks, early stopping,
checkpoints and reports stay what they are. A step becomes one of `dpcompanion.training.train`, with
all of its proofs: persons are sampled by Poisson sampling, each one's gradient is clipped once,
noise is added, and the optimizer sees the noisy mean.

* `per_device_train_batch_size` x `gradient_accumulation_steps` is the expected number of persons in
  a step, and `per_device_train_batch_size` how many go through the model at once; `max_grad_norm`
  is the clip norm of a person's gradient. An epoch has n / batch size steps, rounded, where n
  counts persons.
* Before the first step it is proved against plain autograd, one person at a time, that norms and
  sums are right for the model, and after it that the trainable parameters have moved and the frozen
  ones have not.
* A layer is taken apart where it can be; a model whose layers share a weight (GPT-2's head and
  embedding) goes through `torch.func`, one gradient a person at a time, or is refused with the
  layer's name: LoRA, or `tie_word_embeddings= False` in its configuration, make it fit.
* `bf16=True` goes forward and back in bfloat16; clipping, sums and noise are float32 or more.
  float16 is refused, for its scaler looks at the gradients before the noise.
* A checkpoint holds draws, accounts and keys besides; a run that goes on from it ends where it
  would have ended. Without a seed the keys of the noise are in the file `privacy.pt.key` of a
  checkpoint, until `train` returns: a reader of it can subtract the noise. So checkpoints are not
  pushed to the hub (``hub_strategy="checkpoint"`` is refused). A run that was stopped goes on from
  a checkpoint with new keys, and a warning, since two endings cost more than one.
* A run that ends early, or keeps its best checkpoint, was decided by what its models showed. So its
  epsilon is that of all planned steps, which statement and card name beside that of the steps that
  were taken.
* At the end `privacy.json` and `privacy.md` in the output folder say what holds of the steps that
  were taken, and so does a section of the model card. They hold no person's number.

What is logged as ``loss`` is the mean over a step's persons, without noise: as everywhere the
guarantee covers the weights, and not the training curve. ``grad_norm`` is that of the noisy mean,
and private. Evaluation is on other data.

Needs `transformers`, `accelerate` and, for adapters, `peft`: ``pip install
'dpcompanion[huggingface]'``.
"""

import contextlib

from dpcompanion.data import import_torchvision

with contextlib.suppress(ImportError):
    # which transformers imports, and which takes help beside a CPU build of PyTorch
    import_torchvision()

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dpcompanion.huggingface stands on transformers: pip install 'dpcompanion[huggingface]'"
    ) from error

from dpcompanion.huggingface.losses import per_example_loss
from dpcompanion.huggingface.privacy import PersonalPrivacy
from dpcompanion.huggingface.trainer import PersonalTrainer

__all__ = ["PersonalPrivacy", "PersonalTrainer", "per_example_loss"]
