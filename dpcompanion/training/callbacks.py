"""What is called along a run, what it sees then, and what the run leaves: `Callbacks`, `Run`, `History`.

>>> def note(run):
...     return {"epsilon": run.epsilon}
>>> Callbacks(on_epoch=note).on_step is None
True
"""

import collections.abc
import dataclasses

import torch

from dpcompanion.training.checkpoints import Checkpoint
from dpcompanion.training.plan import DPSGDPlan


@dataclasses.dataclass
class History:
    """What a run leaves besides the model.

    Attributes:
        losses: mean loss of each step's examples, (steps,) float64; nan for an empty batch or a step still to come.
        batch_sizes: number of examples in each step, (steps,) int64; both are where the run is.
        dropped: how many per-example gradients were not finite and so contributed nothing.
        epochs: one dict an epoch: epoch, step, loss, and what `on_epoch` returned.
        seed: what the run was seeded with, for research; None where nobody can repeat its noise.
        guarantee: what an epsilon of the run is about, `DPSGDPlan.statement` of the steps that were taken: fewer than
            the plan's where the run was stopped. Their epsilon is `Run.epsilon`.
        precision: what the network went forward and back in, "float32" for instance, or "bf16".
    """

    losses: torch.Tensor
    batch_sizes: torch.Tensor
    dropped: int = 0
    epochs: list = dataclasses.field(default_factory=list)
    seed: int | None = None
    guarantee: str = ""
    precision: str = ""


@dataclasses.dataclass
class Run:
    """The state that callbacks see: plan, model, optimizer, history, the step just done (counted from 1), and the
    indices and gradient norms (before clipping) of that step's examples."""

    plan: "DPSGDPlan"
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    history: History
    step: int = 0
    indices: torch.Tensor | None = None
    norms: torch.Tensor | None = None

    @property
    def epsilon(self) -> float | torch.Tensor:
        """What everybody has after this step, or of an individual plan what each example has, (n,), by the plan's
        accountant: `plan.epsilon(steps=step)`."""
        return self.plan.epsilon(steps=self.step)


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """What is called along a run, with its state: a `Run` in `train`, the `Ensemble` in `train_ensemble`.

    They may switch the model to evaluation, draw random numbers and print; the run is what it would have been.

    Args:
        on_step: after each step.
        on_epoch: after each epoch, and after the last step; what it returns, a dict or None, goes into the history.

    Raises:
        ValueError: for what cannot be called.

    >>> note = Callbacks(on_epoch=lambda run: {"epsilon": run.epsilon})
    """

    on_step: collections.abc.Callable | None = None
    on_epoch: collections.abc.Callable | None = None

    def __post_init__(self):
        for name in ("on_step", "on_epoch"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function or None, got {getattr(self, name)!r}")


def check_extras(callbacks, checkpoint):
    """Callbacks, at least empty ones, and checkpoint, if they are what they should be."""
    if not isinstance(callbacks, (Callbacks, type(None))):
        raise ValueError(f"callbacks must be Callbacks(on_step=..., on_epoch=...), got {callbacks!r}")
    if not isinstance(checkpoint, (Checkpoint, type(None))):
        raise ValueError(f"checkpoint must be a Checkpoint, such as Checkpoint({checkpoint!r}), got {checkpoint!r}")
    return callbacks or Callbacks(), checkpoint
