"""Norms of all examples, measured by passes over the data now and then: when a pass is due, and what it found."""

import math

import torch

from dpcompanion import _checks
from dpcompanion.gradients import checks, clipping, passes
from dpcompanion.gradients.tensors import rounded_up
from dpcompanion.training.distributed import current
from dpcompanion.training.examples import examples_of


class Measured:
    """The latest known norm of each of n examples, at most `largest`, and `updates_per_epoch` passes that renew it."""

    def __init__(
        self,
        model,
        loss,
        data,
        *,
        n,
        largest,
        steps_per_epoch,
        updates_per_epoch,
        keep_norms,
        method,
        microbatch_size,
        precision,
        device,
    ):
        self.model, self.loss, self.data = model, loss, examples_of(data)
        if len(self.data) != n:
            raise ValueError(f"data must hold the accountant's {n} examples, got {len(self.data)}")
        self.steps_per_epoch = _checks.whole_number("steps_per_epoch", steps_per_epoch, 1)
        self.updates_per_epoch = min(_checks.number("updates_per_epoch", updates_per_epoch, 0), self.steps_per_epoch)
        self.keep_norms = bool(keep_norms)
        self.method, self._proved = _checks.one_of("method", method, clipping.METHODS), None
        self._asked = self.method
        self.precision = _checks.one_of("precision", precision, checks.PRECISIONS)
        self.microbatch_size = (
            None if microbatch_size is None else _checks.whole_number("microbatch_size", microbatch_size, 1)
        )
        #: Norms that are charged at the next step, at most C, (n,) float64; running estimates change them in place.
        self.norms = torch.full((n,), largest, dtype=torch.float64, device=device)
        #: Steps begun, and full-batch passes made.
        self.steps, self.passes = 0, 0
        self._largest, self._kept = largest, []

    @property
    def norms_of_passes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(steps, norms): before which step (from 0) each pass was made, and what it found, (passes, n) float32 on
        the host."""
        steps = torch.tensor([step for step, _ in self._kept], dtype=torch.int64)
        norms = [norms.cpu() for _, norms in self._kept]
        return steps, torch.stack(norms) if norms else torch.zeros(0, len(self.norms))

    def _due(self):
        """Whether a pass comes before this step: they lie at the whole multiples of steps_per_epoch / K, rounded up."""
        rate = self.updates_per_epoch / self.steps_per_epoch
        count = math.floor(self.steps * rate + 1e-9)
        return rate > 0 and (self.steps == 0 or count > math.floor((self.steps - 1) * rate + 1e-9))

    def _measure(self):
        checks.check_model(
            getattr(self.model, "_module", self.model)
        )  # in its modes: a pass is made in evaluation mode
        if self._proved is None or passes.state_of(self.model) != self._proved:
            self.method = passes.resolve_method(self.model, self.loss, self.data, self._asked, self.precision)
            self._proved = passes.state_of(self.model)
        ranks = current()
        norms = passes.norms_of_all(
            self.model,
            self.loss,
            self.data,
            method=self.method,
            microbatch_size=self.microbatch_size,
            precision=self.precision,
            within=ranks.share(len(self.data)),
        )
        (self.norms,) = ranks.gathered(len(self.data), self._bounded(norms))
        self.passes += 1
        if self.keep_norms:
            # Where they are: a copy to the host would be waited for.
            self._kept.append((self.steps, rounded_up(self.norms, torch.float32)))

    def _bounded(self, norms):
        """Norms as float64, a few units up for what their summation may have lost, at most C, also where not finite."""
        up = 1 + 8 * torch.finfo(norms.dtype).eps
        norms = norms.detach().to(device=self.norms.device, dtype=torch.float64) * up
        return torch.nan_to_num(norms, nan=math.inf).clamp(max=self._largest)
