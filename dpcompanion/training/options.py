"""What `train` may be given too: `Track`, an account of each example, and `Performance`.

Neither repeats a number of the plan, nor model, loss or data: `train` hands those on.
"""

import dataclasses
from typing import Any

from dpcompanion import _checks
from dpcompanion._types import Device
from dpcompanion.gradients import checks
from dpcompanion.gradients import clipping as clipping_methods

CLIPPINGS = ("maximum", "individual")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """An account of each example along the run, by a `NormTracker` that `train` makes of it.

    Args:
        clipping: "individual", which clips each example to what it is charged, so that its epsilon
            is exact along the run (`History.epsilons`); or "maximum", plain DP-SGD, of which there
            is an estimate only (`History.tracker.estimated_epsilon`).
        updates_per_epoch: full-batch passes in an epoch that measure all norms, such as 0.5, 1 or
            3; from `plan.steps_per_epoch` on (or math.inf) there is one before every step; 0 needs
            `running`.
        running: renew an example's norm also when it is sampled; such an account is an estimate.
        rounding: to multiples of which share of the clip norm norms are rounded up, in [1e-6, 1];
            None for none.
        accountant: "pld" or "rdp"; None for the plan's.
        trajectory_delta: keep every example's epsilon at this delta at the end of each epoch
            (`NormTracker.trajectory`): 4 bytes an example and epoch. It is worked out there and
            then, which waits for the account's device.
        keep_norms: keep the norms of each pass (`NormTracker.norms_of_passes`): 4 bytes an example
            and pass, where the account is.
        device: where the account is kept, by default on the processor; the steps of a model on a
            GPU wait for one that is not there, too.

    Raises:
        ValueError: an argument outside its range, or no passes without `running`; `rounding` and
            `accountant` are checked when the account is made.

    >>> Track(clipping="individual", updates_per_epoch=2).running
    False
    """

    clipping: str = "maximum"
    updates_per_epoch: float = 1
    running: bool = False
    rounding: float | None = 0.01
    accountant: str | None = None
    trajectory_delta: float | None = None
    keep_norms: bool = False
    device: Device = None

    def __post_init__(self):
        _checks.one_of("clipping", self.clipping, CLIPPINGS)
        if not _checks.number("updates_per_epoch", self.updates_per_epoch, 0) and not self.running:
            raise ValueError("updates_per_epoch must be above 0 unless running=True, got 0")
        if self.trajectory_delta is not None:
            _checks.number("trajectory_delta", self.trajectory_delta, 0, 1, closed="neither")
        if self.device is not None:
            _checks.device("device", self.device)

    @property
    def exact(self) -> bool:
        """Whether what is charged is enforced: individual clipping, and no running estimates."""
        return self.clipping == "individual" and not self.running


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """How a run is computed, which changes no guarantee.

    Args:
        method: how to clip, see `dpcompanion.gradients.clipping`.
        precision: None for the model's own, or "bf16" for the way forward and back. Norms are then
            off by about a hundredth: with clipping "individual" no less is enforced than is
            charged, and an estimate is as much less accurate.
        microbatch_size: examples in one pass; a draw is cut into such pieces. By default as many as
            suit the device.
        device: where to train; the model's own by default.

    Raises:
        ValueError: an unknown `method` or `precision`, a `microbatch_size` that is not a whole
            number above 0, or a device that PyTorch does not have here.

    >>> Performance(precision="bf16").method
    'auto'
    """

    method: str = "auto"
    precision: str | None = None
    microbatch_size: int | None = None
    device: Device = None

    def __post_init__(self):
        _checks.one_of("method", self.method, clipping_methods.METHODS)
        _checks.one_of("precision", self.precision, checks.PRECISIONS)
        if self.microbatch_size is not None:
            _checks.whole_number("microbatch_size", self.microbatch_size, 1)
        if self.device is not None:
            _checks.device("device", self.device)


def performance_of(performance: Performance | None, **single: Any) -> Performance:
    """`performance`, or the one of the single keywords, of which none may be given beside it."""
    given = {name: value for name, value in single.items() if value not in (None, "auto")}
    if performance is None:
        return Performance(**given)
    if not isinstance(performance, Performance):
        raise ValueError(f"performance must be Performance(method=..., ...), got {performance!r}")
    if given:
        raise ValueError(
            f"performance must hold {', '.join(given)}, which must not be given beside it"
        )
    return performance
