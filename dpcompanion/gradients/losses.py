"""Losses of each example by itself, as clipping needs them.

>>> cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1])).shape
torch.Size([3])
"""

import torch
import torch.nn.functional as F


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each example, (n,): outputs (n, classes), targets (n,) or (n, classes).

    Raises:
        ValueError: for tokens, outputs (n, length, classes) and targets (n, length), whose loss is
            to be said: such as the mean of each example's; for outputs that hold logits among
            others, as models of Hugging Face have them.

    >>> cross_entropy(torch.zeros(2, 3), torch.tensor([0, 2]))
    tensor([1.0986, 1.0986])
    """
    if hasattr(outputs, "logits"):
        raise ValueError(
            f"outputs must be a tensor, got {type(outputs).__name__}: give the loss of its logits, "
            "lambda outputs, targets: cross_entropy(outputs.logits, targets), or "
            "dpcompanion.huggingface.per_example_loss(model)"
        )
    if outputs.ndim == 3 and targets.shape == outputs.shape[:2] != outputs.shape[::2]:
        raise ValueError(
            f"outputs must have shape (n, classes), got those of tokens, {tuple(outputs.shape)}: "
            "give a loss that is one number an example, such as the mean over their tokens, lambda "
            "outputs, targets: F.cross_entropy(outputs.mT, targets, reduction='none').mean(1)"
        )
    return F.cross_entropy(outputs, targets, reduction="none")
