"""What `train` may be given beside model, loss, data and plan: `Track`, an account of each example, and `Performance`.

Neither repeats a number of the plan, nor model, loss or data: `train` hands those on.

>>> Track(clipping="individual", updates_per_epoch=2).running, Performance(precision="bf16").method
(False, 'auto')
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dpcompanion import _checks
from dpcompanion._types import Device, Loss
from dpcompanion.gradients import clipping as clipping_methods
from dpcompanion.training.examples import Data
from dpcompanion.training.tracking import CLIPPINGS, NormTracker

if TYPE_CHECKING:
    from dpcompanion.mechanism.plan import DPSGDPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """An account of each example along the run, by a `NormTracker` that `train` makes of it.

    Args:
        clipping: "individual", which clips each example to what it is charged, so that its epsilon is exact along the
            run (`History.epsilons`); or "maximum", plain DP-SGD, of which there is an estimate only
            (`History.tracker.estimated_epsilon`).
        updates_per_epoch: full-batch passes in an epoch that measure all norms, such as 0.5, 1 or 3; 0 needs `running`.
        running: renew an example's norm also when it is sampled; such an account is an estimate.
        rounding: to multiples of which share of the clip norm norms are rounded up, in [1e-6, 1]; None for none.
        accountant: "pld" or "rdp"; None for the plan's.
        trajectory_delta: keep every example's epsilon at this delta at the end of each epoch.
        keep_norms: keep the norms of each pass.
        device: where the account is kept, by default on the processor.

    Raises:
        ValueError: an unknown `clipping`; the others are checked when the run begins.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """How a run is computed, which changes no guarantee.

    Args:
        method: how to clip, see `dpcompanion.gradients.clipping`.
        precision: None for the model's own, or "bf16" for the way forward and back.
        microbatch_size: examples in one pass; a draw is cut into such pieces. By default as many as suit the device.
        device: where to train; the model's own by default.

    Raises:
        ValueError: an unknown `method`, or a `microbatch_size` that is not a whole number above 0.
    """

    method: str = "auto"
    precision: str | None = None
    microbatch_size: int | None = None
    device: Device = None

    def __post_init__(self):
        _checks.one_of("method", self.method, clipping_methods.METHODS)
        if self.microbatch_size is not None:
            _checks.whole_number("microbatch_size", self.microbatch_size, 1)


def performance_of(performance: Performance | None, **single: Any) -> Performance:
    """`performance`, or the one of the single keywords, of which none may be given beside it."""
    given = {name: value for name, value in single.items() if value not in (None, "auto")}
    if performance is None:
        return Performance(**given)
    if not isinstance(performance, Performance):
        raise ValueError(f"performance must be Performance(method=..., ...), got {performance!r}")
    if given:
        raise ValueError(f"performance must hold {', '.join(given)}, which must not be given beside it")
    return performance


def tracker_of(
    track: Track | None,
    filter: Any,
    plan: "DPSGDPlan",
    model: torch.nn.Module,
    loss: Loss,
    data: Data,
    performance: Performance,
) -> NormTracker | None:
    """The tracker that `track` and `filter` ask for, None if neither is given. A filter clips individually, and by
    default norms are measured as often as it looks at them."""
    if track is None and filter is None:
        return None
    if not isinstance(track, (Track, type(None))):
        raise ValueError(f"track must be Track(clipping=..., ...), got {track!r}")
    if track is None:
        block = getattr(filter, "block", plan.steps_per_epoch)
        track = Track(clipping="individual", updates_per_epoch=plan.steps_per_epoch / block)
    elif filter is not None and (track.clipping != "individual" or track.running):
        raise ValueError(
            "track must have clipping='individual' and running=False beside a filter, which must know what is charged, "
            f"got clipping={track.clipping!r} and running={track.running!r}"
        )
    return NormTracker.for_plan(
        plan,
        model,
        loss,
        data,
        budget=filter,
        method=performance.method,
        microbatch_size=performance.microbatch_size,
        precision=performance.precision,
        **{field.name: getattr(track, field.name) for field in dataclasses.fields(track)},
    )
