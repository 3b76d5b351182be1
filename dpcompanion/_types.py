"""Types of arguments that many functions take."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

#: A number, or many of any shape that broadcast.
Numbers = float | Sequence[Any] | np.ndarray | torch.Tensor
#: Vectors and matrices of numbers.
Array = Sequence[Any] | np.ndarray | torch.Tensor
#: A loss: (outputs, targets) -> one number an example, (n,).
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: A device, or None for the usual one.
Device = str | torch.device | None
#: What `state_dict` gives.
State = dict[str, Any]
