"""What filters share: the run that they are for, the norms of all examples that they take before
each step, and what they promise to a ledger.

Where filter and norms lie on a GPU, nothing here waits for it: a norm that is out of range counts
as infinite, so that what the filter promises holds, is noted, and refused when the filter is read.

>>> run = dict(sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
>>> PrivacyFilter(2, **run, device=None)._checked_norms([0.3, 7.0])
tensor([0.3000, 7.0000], dtype=torch.float64)
"""

import math

import torch

from dpcompanion import _checks
from dpcompanion._devices import DeferredErrors, to_device
from dpcompanion.accounting import Guarantee, LedgerEntry, PersonalCosts


class PrivacyFilter:
    """A filter's n examples and its run, checks of norms, and what a ledger is told."""

    #: Of what a ledger is told: "zero-out", which what holds for adding or removing implies, unless
    #: a plan says more.
    relation, unit = "zero-out", "example"
    #: The delta at which the targets are meant that the budgets were made from; None where budgets
    #: were given.
    target_delta: float | None = None
    #: A name of the run that it pays for, if that has checkpoints.
    pays_for: str | None = None

    def __init__(self, n, *, sample_rate, noise_multiplier, max_grad_norm, device):
        self.n = _checks.whole_number("n", n, 1, _checks.MOST_EXAMPLES)
        self.sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
        self.noise_multiplier = _checks.number(
            "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
        )
        self.max_grad_norm = _checks.number(
            "max_grad_norm", max_grad_norm, 0, math.inf, closed="neither"
        )
        self.device = torch.device("cpu" if device is None else device)
        self._deferred = DeferredErrors(self.device)  # norms out of range

    def epsilon(self, delta: float) -> torch.Tensor:
        """What is promised to each example at `delta`, (n,) float64."""
        raise NotImplementedError

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What the filter promises to each example at `delta`, for `accounting.Ledger.add`: an
        (epsilon, delta) guarantee, before the run and for every data set, whatever was spent.

        Raises:
            ValueError: a delta outside (0, 1), or None.
        """
        if delta is None:
            raise ValueError(
                "delta must be given, at which the filter's promise is taken (add(filter, "
                "delta=)), got None"
            )
        delta = _checks.number("delta", delta, 0, 1, closed="neither")
        distinct, which = self.epsilon(delta).cpu().unique(return_inverse=True)
        promised = PersonalCosts.each(
            [Guarantee(epsilon, delta) for epsilon in distinct.tolist()], which
        )
        worst = Guarantee(float(distinct[-1]), delta)
        return LedgerEntry(worst, promised=promised, relation=self.relation, unit=self.unit)

    def _about(self, plan):
        """This filter, with what its plan says that an example is."""
        self.relation, self.unit = plan.relation, plan.unit
        return self

    def _parameters(self):
        """What another filter's must be equal to for its state to be taken over."""
        return {
            "n": self.n,
            "sample_rate": self.sample_rate,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
        }

    def _check_parameters(self, state):
        if (parameters := _checks.entry(state, "parameters")) != self._parameters():
            raise ValueError(
                f"state must be of a filter with {self._parameters()}, got {parameters}"
            )

    def _checked_norms(self, norms, most=math.inf, slack=0.0):
        """Norms from 0 to `most` (1 + `slack`), as (n,) float64 on the filter's device."""
        norms = _checks.tensor("norms", norms, torch.float64).detach()
        if norms.shape != (self.n,):
            raise ValueError(f"norms must have shape ({self.n},), got {tuple(norms.shape)}")
        wrong = ~((norms >= 0) & (norms <= most * (1 + slack)))  # nor for NaN
        if self._deferred.away(norms):
            norms = self._deferred.replace(wrong, norms, instead=math.inf)
        elif bool(wrong.any()):
            _checks.in_interval("norms", norms, 0, most)
        return to_device(norms, self.device)

    def _check_nothing_refused(self):
        if self._deferred.anything:
            raise ValueError(
                "norms must be at least 0, and for a RenyiFilter at most max_grad_norm, but some "
                "that the filter was given on the device were not"
            )
