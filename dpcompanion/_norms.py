"""By how much a computed norm may lie below the true one: the margin by which norms are raised."""

import math

import torch


def margin(dtype):
    """The factor by which a norm of this type is raised: eight units in its last place, which its
    summation may have lost; 1 for whole numbers.

    >>> margin(torch.float32) - 1 == 8 * 2.0**-23, margin(torch.int64)
    (True, 1.0)
    """
    return 1 + 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 1.0


def raised(norms, largest, device=None):
    """Norms as float64, each raised by its margin, at most `largest`, and that where not finite.

    >>> raised(torch.tensor([0.5, math.inf, math.nan], dtype=torch.float64), 1.0) - 0.5
    tensor([8.8818e-16, 5.0000e-01, 5.0000e-01], dtype=torch.float64)
    """
    wide = norms.detach().to(device=device, dtype=torch.float64) * margin(norms.dtype)
    return torch.nan_to_num(wide, nan=math.inf).clamp(max=largest)
