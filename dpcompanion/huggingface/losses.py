r"""The loss of each example, where a model of `transformers` gives one number for its batch.

A model's own loss is a mean over the batch, and that of a language model one over the batch's
tokens, so that an example's share depends on how long the others are: no clipping bounds that. Here
each example has the mean over its own tokens,

.. math::
    \ell_i = \frac{1}{|\{t : y_{it} \ne -100\}|}
        \sum_{t : y_{it} \ne -100} -\log p(y_{it} \mid \cdot),

with labels shifted where the model shifts them. For a batch of one it is the model's own loss.

==============================  =================================================================
the model's class               an example's loss
==============================  =================================================================
...ForSequenceClassification,   cross entropy; squared error or binary cross entropies, their
...ForImageClassification       mean over the labels, by ``config.problem_type``
...ForMaskedLM,                 mean over the labelled tokens
...ForTokenClassification
...ForCausalLM, ...LMHeadModel  the same, token t + 1 from what stands before; or token t, where
                                the model's own loss does not shift (BART, XLNet)
...ForConditionalGeneration     the same for the decoder's tokens, which the model shifts itself
(T5, BART)
==============================  =================================================================
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dpcompanion.gradients.traces import beginning_alike, evaluating

IGNORED = -100


def per_example_loss(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of each example for a model of `transformers` or `peft`, by its class.

    Args:
        model: a model with a head, such as `BertForSequenceClassification`.

    Returns:
        A function (outputs, batch) -> (n,): of logits or an object that has them, and of labels or
        a mapping that has them as "labels".

    Raises:
        ValueError: for a class that is not in the table above, or a causal language model whose own
            loss is another one.

    >>> class TinyForMaskedLM:
    ...     config = None
    >>> loss = per_example_loss(TinyForMaskedLM())
    >>> loss(torch.zeros(2, 3, 5), {"labels": torch.tensor([[0, 1, 2], [0, 1, -100]])})
    tensor([1.6094, 1.6094])
    """
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, config = type(own).__name__, getattr(own, "config", None)
    if getattr(config, "is_encoder_decoder", False) and name.endswith("ForConditionalGeneration"):
        return TokenLoss(shift=False)
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return _loss_of_next_tokens(own, name)
    if name.endswith(("ForMaskedLM", "ForTokenClassification")):
        return TokenLoss(shift=False)
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return ClassLoss(getattr(config, "problem_type", None), getattr(config, "num_labels", None))
    raise ValueError(
        "model must be one for sequence, image or token classification, or for masked, causal or "
        f"conditional language modelling, got a {name}; give a loss of your own, (outputs, batch) "
        "-> (n,)"
    )


def _loss_of_next_tokens(model, name):
    """The loss of a causal language model, shifted where its own is. The class does not say so, and
    models differ: the own loss of four tokens is looked at.
    """
    try:
        vocabulary = len(model.get_input_embeddings().weight)
        special = {
            getattr(model.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")
        }
        ids = torch.tensor([[i for i in range(vocabulary) if i not in special][:4]])
        ids = ids.to(next(model.parameters()).device)
        first = torch.full_like(ids, IGNORED)
        first[:, 0] = ids[:, 0]
        with torch.no_grad(), evaluating(model), beginning_alike(model, ids.device):
            # A loss that shifts leaves out the first label, so that nothing is left to count.
            of_first = float(model(input_ids=ids, labels=first).loss)
            outputs = model(input_ids=ids, labels=ids)
        loss = TokenLoss(shift=not of_first > 0)
        own, found = float(outputs.loss), float(loss(outputs, ids))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"model must take input_ids and labels alone, so that its own loss can be compared, "
            f"but {name} fails: {error!s:.200}; give a loss of your own, (outputs, batch) -> (n,)"
        ) from error
    if abs(found - own) > (1e-3 if outputs.loss.element_size() >= 4 else 3e-2) * abs(own):
        raise ValueError(
            "model must have the mean cross entropy over its tokens as its own loss, for the next "
            f"token or the same one, but that of {name} is {own:g} where this is {found:g}; give a "
            "loss of your own, (outputs, batch) -> (n,)"
        )
    return loss


def _logits(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def _labels(batch):
    return batch if isinstance(batch, torch.Tensor) else batch["labels"]


class TokenLoss:
    """The mean cross entropy over each example's own tokens, 0 for one without a labelled token.

    Args:
        shift: whether the output at a token is about the next one.
    """

    def __init__(self, shift: bool):
        self.shift = shift

    def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
        logits, labels = _logits(outputs), _labels(batch)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        # a prompt that is trained stands before the tokens, and is not predicted
        if logits.shape[1] > labels.shape[1]:
            labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORED)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
        )
        counted = labels != IGNORED
        return losses.view(labels.shape).sum(1) / counted.sum(1).clamp(min=1)


class ClassLoss:
    """The loss of each example's labels, by the problem's type; see the module's text."""

    def __init__(self, problem_type: str | None, num_labels: int | None):
        self.problem_type, self.num_labels = problem_type, num_labels

    def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
        logits, labels = _logits(outputs), _labels(batch)
        whole = not labels.is_floating_point()
        kind = self.problem_type or (
            "regression"
            if self.num_labels == 1
            else f"{'single' if whole else 'multi'}_label_classification"
        )
        if kind == "regression":
            return (logits - labels.to(logits.dtype).view(logits.shape)).square().flatten(1).mean(1)
        if kind == "multi_label_classification":
            losses = F.binary_cross_entropy_with_logits(
                logits, labels.to(logits.dtype), reduction="none"
            )
            return losses.flatten(1).mean(1)
        return F.cross_entropy(logits, labels.view(-1), reduction="none")
