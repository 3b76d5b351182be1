"""Where a monotone condition begins to hold, from the side where it holds: the library's searches.

`crossing` takes few values of an expensive function, `crossings` does so for many side by side,
`bisect` halves many brackets at once. All return points that were looked at and found to hold, so
that a bound stays one.

>>> bisect(
...     lambda x: x**2 <= torch.tensor([2.0, 9.0]), good=torch.zeros(2), bad=torch.full((2,), 9.0)
... )
tensor([1.4142, 3.0000])
"""

import math

import torch

#: `crossing` stops when the answer is known to this precision.
PRECISION = 5e-5
#: Where noise multipliers and sample rates are searched for.
LEAST_NOISE_SEARCHED, MOST_NOISE_SEARCHED, LEAST_RATE_SEARCHED = 1e-3, 1e9, 1e-12


def bisect(holds, *, good, bad, halvings=80):
    """The points, one for each bracket, up to which a condition holds.

    Args:
        holds: a function of a tensor of points, to booleans: true at `good`, false at `bad`, with
            one change between.
        good, bad: the brackets' ends, tensors of one shape; either may be the larger.
        halvings: how often each is halved.

    Returns:
        A tensor of that shape, at which the condition holds.
    """
    for _ in range(halvings):
        middle = (good + bad) / 2
        inside = holds(middle)
        good, bad = torch.where(inside, middle, good), torch.where(inside, bad, middle)
    return good


def crossing(excess, *, start, low, high, meets, snap=float):
    """Where monotone `excess` crosses zero, within `PRECISION`, on the side where it is at most 0.

    For an expensive function: a bracket about `start`, then secants that are kept within it.

    Args:
        excess: a function of a float, monotone, about linear where it is small.
        start: where to look first, within `low` and `high`.
        low, high: ends of the range.
        meets: on which side of the crossing `excess` is at most 0, "above" or "below".
        snap: moves a point to the nearest one at which `excess` is defined.

    Returns:
        A float. None if the whole range exceeds zero; the range's end if none of it does.

    >>> round(crossing(lambda x: x**3 - 8, start=1.0, low=0.0, high=9.0, meets="below"), 3)
    2.0
    """
    outward = -1 if meets == "above" else 1  # where the excess grows
    good = bad = None
    x, stride = snap(start), None
    while True:
        value = excess(x)
        if value <= 0:
            good, end, toward = (x, value), high if outward > 0 else low, outward
        else:
            bad, end, toward = (x, value), low if outward > 0 else high, -outward
        if good and bad:
            return _narrow(excess, good, bad, snap)
        if x == end:
            return x if good else None
        # Epsilon is about a power, of exponent 1/2 to 2, of what is searched: its logarithm says
        # how far to walk.
        stride = min(max(0.02, abs(value)), 1.0) if stride is None else 2 * stride
        x = min(max(snap(x + toward * stride), low), high) if abs(end - x) > stride else end


def _narrow(excess, good, bad, snap):
    """The good end once the bracket is at most PRECISION wide, or nothing lies between; pairs (x,
    excess at x).
    """
    idle = 0
    while abs(bad[0] - good[0]) > PRECISION:
        gap = bad[0] - good[0]
        smooth = idle < 2 and max(-good[1], bad[1]) < 50
        share = 0.5
        if smooth:
            # Aim a little past the secant's estimate, away from the nearer end: the bracket closes
            # from both sides.
            share = -good[1] / (bad[1] - good[1])
            share += math.copysign(min(max(0.01, PRECISION / 2 / abs(gap)), 0.25), 0.5 - share)
        x = snap(good[0] + share * gap)
        if x in (good[0], bad[0]):
            x = snap(good[0] + 0.5 * gap)
            if x in (good[0], bad[0]):
                break
        value = excess(x)
        good, bad = ((x, value), bad) if value <= 0 else (good, (x, value))
        idle = 0 if abs(bad[0] - good[0]) < abs(gap) / 2 else idle + 1
    return good[0]


def crossings(excess, *, start, low, high, precision, enough=None, slopes=None):
    """The least y in [low, high] where a falling function is <= 0: within `precision`, never below.

    `crossing` for many searches side by side, whose function takes all of them at once.

    Args:
        excess: (y, index) -> values, at the points y of the searches `index`; falling, as in
            `crossing`.
        start: (n,) where to look first.
        low, high: ends of the range, numbers.
        precision: how wide a bracket may stay, a number, or (n,).
        enough: (n,) a search also ends at a value from -enough to 0, and aims at the middle of
            these; None for none.
        slopes: (n,) how fast the function falls near the crossings, as far as that is known, which
            saves values; what the searches learn is written into it. With `enough` only.

    Returns:
        (n,) points; nan where even `high` exceeds 0.

    >>> cubes = torch.tensor([8.0, 27.0])
    >>> crossings(
    ...     lambda y, index: cubes[index] - y**3,
    ...     start=torch.ones(2),
    ...     low=0.0,
    ...     high=9.0,
    ...     precision=1e-4,
    ... )
    tensor([2.0000, 3.0000])
    """
    good, bad = torch.full_like(start, math.nan), torch.full_like(start, math.nan)
    at_good, at_bad, stride, idle = good.clone(), bad.clone(), good.clone(), torch.zeros_like(start)
    y, open_ = start.clamp(low, high), torch.arange(len(start))
    widths = torch.as_tensor(precision, dtype=start.dtype).expand(len(start))
    rooms = torch.zeros_like(start) if enough is None else enough
    slopes = torch.ones_like(start) if slopes is None else slopes
    last = torch.full((2, len(start)), math.nan, dtype=start.dtype)  # y and the value there
    while len(open_):
        value, here = excess(y[open_], open_), y[open_]
        safe = value <= 0
        _learn(slopes, last, open_, here, value)
        before = (bad - good)[open_]
        for ends, values, rows in ((good, at_good, safe), (bad, at_bad, ~safe)):
            ends[open_[rows]], values[open_[rows]] = here[rows], value[rows]
        gap = (bad - good)[open_]
        idle[open_] = torch.where(gap.abs() > before.abs() / 2, idle[open_] + 1, 0.0)
        ended = torch.where(safe, here <= low, here >= high)
        near = safe & (value >= -rooms[open_]) & (enough is not None)
        open_ = open_[torch.where(gap.isnan(), ~ended, gap.abs() > widths[open_]) & ~near]
        f, g, precision, aim = at_good[open_], at_bad[open_], widths[open_], -rooms[open_] / 2
        gap = (bad - good)[open_]
        # One end is missing: walk on towards it, twice as far each time, or as the slope says.
        known = torch.where(f.isnan(), g, f)
        walk = torch.where(
            stride[open_].isnan(),
            torch.maximum(1.2 * known.abs(), 2 * precision).clamp(max=1.0),
            2 * stride[open_],
        )
        if enough is not None:
            by_slope = ((known - aim).abs() / slopes[open_]).clamp(max=1.0)
            walk = torch.where(known.abs() < 20, torch.minimum(by_slope, 2 * walk), walk)
        walked = y[open_] + torch.where(f.isnan(), walk, -walk)
        # Else aim a little past the secant's estimate, off the nearer end, or at what is enough.
        share = (aim - f) / (g - f)
        past = torch.copysign((precision / 2 / gap.abs()).clamp(0.01, 0.25), 0.5 - share)
        share = share + torch.where(aim < 0, 0.0, past)
        share = torch.where((idle[open_] >= 2) | (torch.maximum(-f, g) >= 50), 0.5, share)
        stride[open_] = walk
        y[open_] = torch.where(gap.isnan(), walked.clamp(low, high), good[open_] + share * gap)
    return good


def _learn(slopes, last, open_, here, value):
    """How fast the functions fall, from the last two values of each on a smooth stretch."""
    slope = (last[1, open_] - value) / (here - last[0, open_])
    smooth = (
        (slope > 0.05) & (slope < 50) & (value.abs() < 20) & ((last[1, open_] - value).abs() > 1e-3)
    )
    slopes[open_] = torch.where(smooth, slope, slopes[open_])
    last[:, open_] = torch.stack((here, value))
