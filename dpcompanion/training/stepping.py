"""A step of a training loop of one's own, which cannot be left half done.

A tracker (`dpcompanion.training.tracking`) says to what a step clips, and takes what was done. In a
loop of one's own, with Opacus for instance, each logical step is a `step`::

    with tracker.step() as limits:  # (n,)
        ...  # clip example i of the batch to limits[i], and step
        tracker.observe(indices, clipped=norms_after_clipping)  # ValueError if one is longer
    ...
    tracker.epsilon(1e-5)

Each draw must be one of the plan's Poisson sampler, empty ones too: ``plan.sampler(generator)``
gives them. An exact account wants to see what was clipped. One by running estimates wants
``tracker.observe(indices, norms)``, the norms before clipping; any other nothing, and
`estimated_epsilon` tells what it is.
"""

import abc
import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
from scipy import stats

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.training.measuring import NormPasses

# How unlikely as many batches of one size must be under Poisson sampling before they are none.
_CHANCE = 1e-12


class OwnLoop(abc.ABC):
    """`step` and `observe`, from a tracker's `before_step` and `after_step`."""

    norms: torch.Tensor
    measuring: NormPasses

    @property
    @abc.abstractmethod
    def draws(self) -> tuple[int, float]:
        """From how many examples a step draws, and the sample rate."""

    @abc.abstractmethod
    def before_step(self) -> torch.Tensor | None:
        """Begin a step, and say to what it must clip."""

    @abc.abstractmethod
    def after_step(
        self,
        indices: Array | None = None,
        norms: Array | None = None,
        *,
        clipped: Array | None = None,
    ) -> None:
        """End a step, with what was done."""

    def __init__(self):
        # What was observed within `step`: (indices, norms, clipped) of each piece.
        self._observed = None
        self._size, self._alike = None, 0  # of the last draw, and how many in a row had that size

    @contextlib.contextmanager
    def step(self) -> Iterator[torch.Tensor]:
        """One logical step of a loop of one's own, from its beginning to its end.

        Within, clip to what it gives, and tell it by `observe` what was done. A step that an
        exception cut short stays charged, and an account that was exact gives no epsilon any more:
        nobody has seen that it was clipped.

        Yields:
            The norms to which this step must clip, (n,) float64: C where that is the plan's own, 0
            for who takes no part.

        Raises:
            ValueError: at its end, if something was not observed that the account needs, or a
                gradient was longer than allowed; at its beginning, if the step before has not
                ended.

        >>> from dpcompanion.training import DPSGDPlan, NormTracker, cross_entropy
        >>> plan = DPSGDPlan(
        ...     n=4, sample_rate=0.5, steps=20, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-3
        ... )
        >>> data = torch.eye(4), torch.arange(4) % 2
        >>> tracker = NormTracker.for_plan(
        ...     plan, torch.nn.Linear(4, 2), cross_entropy, data, clipping="individual"
        ... )
        >>> with tracker.step() as limits:
        ...     drawn = torch.tensor([0, 3])
        ...     # ... clip their gradients to limits[drawn], add noise, step
        ...     tracker.observe(drawn, clipped=limits[drawn])
        >>> bool((tracker.epsilon(1e-3) <= plan.epsilon(steps=1)).all())
        True
        """
        if self._observed is not None:
            raise ValueError("step must end before another begins, but this one lies within one")
        limits = self.before_step()
        self._observed = []
        try:
            yield torch.full_like(self.norms, self.measuring.largest) if limits is None else limits
            pieces = [
                [piece[k] for piece in self._observed if piece[k] is not None] for k in range(3)
            ]
            if any(len(column) not in (0, len(self._observed)) for column in pieces):
                raise ValueError(
                    "observe must be given the same arguments for each piece of a step"
                )
            indices, norms, clipped = (torch.cat(column) if column else None for column in pieces)
            self.after_step(indices, norms, clipped=clipped)
            if indices is not None:
                self._note_size(len(indices))
        finally:
            self._observed = None

    def _note_size(self, size):
        """Warn of batches that are no Poisson draws: of a shuffled data set all have one size."""
        self._alike = self._alike + 1 if size == self._size else 1
        self._size, (n, rate) = size, self.draws
        if rate == 1 or self._alike < 2:
            return
        # of the likeliest size; so many were equal to the first, and one less before this one
        chance = float(stats.binom.pmf(math.floor((n + 1) * rate), n, rate))
        if chance ** (self._alike - 1) < _CHANCE <= chance ** (self._alike - 2):
            warnings.warn(
                f"{self._alike} batches in a row were observed that hold {size} examples each, "
                "which Poisson draws hardly do: the account holds for draws of plan.sampler alone, "
                "in which each example tosses a coin of its own; batches of a shuffled data set "
                "cost more",
                RuntimeWarning,
                stacklevel=4,
            )

    def observe(
        self, indices: Array, norms: Array | None = None, *, clipped: Array | None = None
    ) -> None:
        """Say within `step` what was done, once or for each piece of a draw that is cut for memory.

        Args:
            indices: the examples, (k,), k >= 0.
            norms: of their gradients before clipping, (k,); needed for running estimates.
            clipped: the same after clipping, (k,); needed for an exact account, also of an empty
                draw.

        Raises:
            ValueError: outside of `step`, or for lengths that differ.
        """
        if self._observed is None:
            raise ValueError(
                "observe must be called within step: with tracker.step() as limits: ..."
            )
        indices = torch.as_tensor(indices, device="cpu").to(torch.int64)
        piece: list[torch.Tensor | None] = [indices]
        for name, values in (("norms", norms), ("clipped", clipped)):
            if values is not None:
                values = torch.as_tensor(values).detach()
                _checks.same_length(indices=indices, **{name: values})
            piece.append(values)
        self._observed.append(piece)
