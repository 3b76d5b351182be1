"""What the last bits of floating-point noise give away."""

import math

import torch

from dpcompanion import _checks


def low_bits_tell(releases: torch.Tensor, canary: float) -> torch.Tensor:
    """Whether each release holds the canary, by low bits of numbers near 0 (after Mironov 2012).

    A float near 0 has bits far below those of a float near the canary. So canary + float noise that
    lands near 0 is a multiple of what floats near the canary are multiples of; noise that is near 0
    by itself hardly ever is.

    Args:
        releases: (runs, coordinates) floats, each canary + noise or noise alone.
        canary: the number that was added to each coordinate, or was not; above 0.

    Returns (runs,) booleans; False where no number is near enough to 0 to tell.

    >>> noise = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    >>> [round(float(low_bits_tell(noise + held, 1.0).double().mean()), 1) for held in (0, 1)]
    [0.0, 1.0]
    """
    _checks.number("canary", canary, 0, math.inf, closed="neither")
    if (
        not isinstance(releases, torch.Tensor)
        or releases.ndim != 2
        or not releases.is_floating_point()
    ):
        tensor = isinstance(releases, torch.Tensor)
        got = (
            f"{releases.dtype} of shape {tuple(releases.shape)}"
            if tensor
            else type(releases).__name__
        )
        raise ValueError(
            f"releases must be a floating tensor of shape (runs, coordinates), got {got}"
        )
    unit = canary * torch.finfo(releases.dtype).eps / 2
    near = releases.abs() < canary / 16
    coarse = (releases / unit == (releases / unit).round()) | ~near
    return coarse.all(1) & near.any(1)
