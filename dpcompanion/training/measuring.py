"""Norms of all examples, measured by passes over the data: when one is due, and what it found."""

import math

from dpcompanion._norms import raised
from dpcompanion.gradients import checks, passes
from dpcompanion.training.distributed import current
from dpcompanion.training.examples import examples_of


def pass_is_due(step, rate):
    """Whether a pass comes before this step (from 0): `rate` of them a step, at the multiples of 1
    / rate, rounded up.

    >>> [step for step in range(10) if pass_is_due(step, 0.3)]
    [0, 4, 7]
    """
    count = math.floor(step * rate + 1e-9)
    return rate > 0 and (step == 0 or count > math.floor((step - 1) * rate + 1e-9))


class NormPasses:
    """Full-batch passes of a model: the gradient norms of all examples, none above `largest`.

    Args:
        model, loss, data: as of a `NormTracker`.
        performance: a `Performance`: method, precision and microbatch_size.
        largest: the clip norm.
        device: where the norms are needed.
    """

    def __init__(self, model, loss, data, performance, *, largest, device):
        self.model, self.loss, self.data = model, loss, examples_of(data)
        self.performance, self.largest, self.device = performance, largest, device
        self._method, self._proved = performance.method, None
        #: Passes made.
        self.count = 0

    def measure(self):
        """The norms at the present weights, (n,) float64."""
        # In its modes: a pass is made in evaluation mode.
        checks.check_model(passes.unwrapped(self.model))
        asked = self.performance
        if self._proved is None or passes.state_of(self.model) != self._proved:
            self._method = passes.resolve_method(
                self.model, self.loss, self.data, asked.method, asked.precision
            )
            self._proved = passes.state_of(self.model)
        ranks = current()
        norms = passes.norms_of_all(
            self.model,
            self.loss,
            self.data,
            method=self._method,
            microbatch_size=asked.microbatch_size,
            precision=asked.precision,
            within=ranks.share(len(self.data)),
        )
        (norms,) = ranks.gathered(len(self.data), raised(norms, self.largest, self.device))
        self.count += 1
        return norms
