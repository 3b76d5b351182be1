"""Norms as an account takes them: as shares of the clip norm, with the examples and numbers of
steps they hold for.

Norms are rounded up where their precision is low, longer ones than the clip norm count as it. Where
the account and its input lie on a GPU, nothing here waits for it: what is wrong is noted, charged
in full, and refused when the account is read.

>>> history = NormHistory(3, max_grad_norm=0.5, device=None)
>>> history._shares([0.1, 0.5, 7.0], 3)
tensor([0.2000, 1.0000, 1.0000], dtype=torch.float64)
"""

import math

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion._devices import DeferredErrors, to_device
from dpcompanion._norms import margin

MOST = 2**31 - 1  # steps that a count can hold


def _as_tensor(norms):
    """Norms as a tensor of their own precision; lists and whole numbers as float64."""
    norms = _checks.unlabelled(norms)
    if isinstance(norms, (list, tuple)) and any(isinstance(norm, torch.Tensor) for norm in norms):
        norms = torch.stack([torch.as_tensor(norm) for norm in norms])
    if not isinstance(norms, torch.Tensor):
        doubles, array = _checks.flat_doubles("norms", norms), np.asarray(norms)
        kept = array if array.dtype in (np.float16, np.float32) else doubles.reshape(array.shape)
        norms = torch.as_tensor(kept)
    return _checks.real("norms", norms)


class NormHistory:
    """The n examples of an account, how many steps each has, and checks of what is recorded."""

    def __init__(self, n, *, max_grad_norm, device):
        self.n = _checks.whole_number("n", n, 1, _checks.MOST_EXAMPLES)
        self.max_grad_norm = _checks.number(
            "max_grad_norm", max_grad_norm, 0, math.inf, closed="neither"
        )
        self.device = torch.device("cpu" if device is None else device)
        # The most steps that were recorded of any example; None where the device has to be asked.
        self._most = 0
        self._deferred = DeferredErrors(self.device)  # what was recorded and cannot be
        self._steps = torch.zeros(self.n, dtype=torch.int64, device=self.device)  # of each example

    @property
    def steps(self) -> int:
        """Steps recorded so far, of whom most were recorded."""
        if self._most is None:
            self._most = int(self._steps.max())
        return self._most

    @steps.setter
    def steps(self, most: int) -> None:
        self._most = most

    def _shares(self, norms, count=None):
        """Norms as shares of the clip norm, at most 1, none of them below its norm."""
        norms = _as_tensor(norms)
        if count is not None and norms.shape != (count,):
            raise ValueError(f"norms must have shape ({count},), got {tuple(norms.shape)}")
        share = to_device(norms.detach(), self.device).to(torch.float64) / self.max_grad_norm
        here = norms if norms.device.type == "cpu" else share
        if self._deferred.away(here):
            share = self._deferred.replace(~((share >= 0) & (share < math.inf)), share, instead=1.0)
        elif here.numel() and not (here.min() >= 0 and here.max() < math.inf):  # nor for NaN
            _checks.in_interval("norms", norms, 0, math.inf, closed="left")
        if norms.dtype != torch.float64:
            # A norm summed in few digits may lie a few of its last places below the true one.
            share = share * margin(norms.dtype)
        return share.clamp(max=1.0)

    def _indices(self, examples):
        """Indices as (m,) int64 on the device."""
        examples = _checks.unlabelled(examples)
        examples = examples if isinstance(examples, torch.Tensor) else torch.as_tensor(examples)
        count = examples.numel()
        if examples.ndim != 1 or (
            count and (examples.is_floating_point() or examples.dtype == torch.bool)
        ):
            raise ValueError(
                f"examples must be indices of shape (m,), got {tuple(examples.shape)} "
                f"{examples.dtype}"
            )
        if self._deferred.away(examples):
            beyond = (examples < 0) | (examples >= self.n)
            examples = self._deferred.replace(beyond, examples, instead=0)
        elif count and not (examples.min() >= 0 and examples.max() < self.n):
            _checks.in_interval("examples", examples, 0, self.n, closed="left")
        # It may wait, and the caller's may change meanwhile.
        return to_device(examples.to(torch.int64, copy=True), self.device)

    def _whole(self, steps, count):
        """Numbers of steps as (count,) int64 on the device; one number is not copied."""
        steps = _checks.unlabelled(steps)
        steps = torch.as_tensor(steps) if isinstance(steps, np.ndarray) and steps.ndim else steps
        if not isinstance(steps, torch.Tensor) or not steps.ndim:
            number = _checks.whole_number("steps", steps, 0, MOST)
            return torch.full((), number, dtype=torch.int64, device=self.device).expand(count)
        # Larger ones than a count can hold must not be added up: sums of 64 bits wrap around, too.
        whole = not (_checks.real("steps", steps).is_floating_point() or steps.dtype == torch.bool)
        if self._deferred.away(steps) and steps.shape == (count,) and whole:
            steps = self._deferred.replace((steps < 0) | (steps > MOST), steps, instead=0)
        elif (
            steps.shape != (count,)
            or not whole
            or (count and not (steps.min() >= 0 and steps.max() <= MOST))
        ):
            raise ValueError(
                f"steps must be whole numbers from 0 to {MOST}, one or ({count},) of them, got "
                f"{steps}"
            )
        return to_device(steps.to(torch.int64, copy=True), self.device)

    def _check_nothing_refused(self):
        if self._deferred.anything:
            raise ValueError(
                f"norms must lie in [0, inf), steps be whole numbers that add up to at most {MOST} "
                f"for an example, and examples lie in [0, {self.n}), but some that were recorded "
                "on the device did not"
            )

    def _add_steps(self, steps, examples):
        """Add to the steps of each example, unless one gets more than its counts can hold."""
        rows = slice(None) if examples is None else examples
        if examples is None:
            self._steps += steps
        else:
            self._steps.index_add_(0, examples, steps)
        if self.device.type != "cpu":
            self._deferred.note(self._steps > MOST)
            self._most = None
            return
        most = int(self._steps[rows].max())
        if most > MOST:
            self._steps.index_add_(0, torch.arange(self.n, device=self.device)[rows], -steps)
            raise ValueError(f"steps must add up to at most {MOST} for an example, got {most}")
        self.steps = max(self.steps, most)
