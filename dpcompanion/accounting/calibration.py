r"""Parameters of a run that meet a privacy target.

Epsilon falls with the noise multiplier and rises with the sample rate and the number of steps, so each
search is for the one crossing of a monotone function.  All of them are conservative: what they return
meets the target by `compute_epsilon` itself, and lies within a relative 1e-4 of the best.  A target
that cannot be met is refused, never nearly met.

>>> from dpcompanion.accounting import compute_epsilon, find_noise_multiplier
>>> run = dict(sample_rate=0.01, steps=1000)
>>> sigma = find_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, **run)
>>> round(sigma, 3), compute_epsilon(noise_multiplier=sigma, delta=1e-5, **run) <= 1.0
(1.415, True)
"""

import math

from .. import _checks
from .runs import ACCOUNTANTS, compute_epsilon

#: A search stops when the answer is known to this relative precision.
PRECISION = 5e-5
_SMALLEST_RATE, _LARGEST_NOISE, _MOST_STEPS = 1e-12, 1e9, 10**9


def find_noise_multiplier(*, target_epsilon, target_delta, sample_rate, steps, accountant="pld"):
    """The smallest noise multiplier, within a relative 1e-4, at which a run costs at most
    (target_epsilon, target_delta).

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        target_epsilon: above 0.
        target_delta: in (0, 1).
        sample_rate: in (0, 1].
        steps: a whole number, at least 1.
        accountant: "pld" or "rdp".

    Returns:
        A float, at least 1e-3; `compute_epsilon` at it never exceeds the target.

    Raises:
        ValueError: an argument outside its range, or a target that no noise multiplier up to 1e9 meets.

    >>> round(find_noise_multiplier(target_epsilon=1, target_delta=1e-5, sample_rate=1 / 118, steps=9440,
    ...                             accountant="rdp"), 3)
    3.425
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    steps = _checks.whole_number("steps", steps, low=1)

    def excess(log_noise, accountant=accountant):
        return _log_ratio(compute_epsilon(sample_rate=sample_rate, noise_multiplier=math.exp(log_noise), steps=steps,
                                          delta=target_delta, accountant=accountant), target_epsilon)

    found = _crossing(excess, accountant, start=0.0, low=math.log(1e-3), high=math.log(_LARGEST_NOISE), meets="above")
    if found is None:
        raise ValueError(f"target_epsilon={target_epsilon:g} cannot be met: not even a noise multiplier of "
                         f"{_LARGEST_NOISE:g} does")
    return math.exp(found)


def find_sample_rate(*, target_epsilon, target_delta, noise_multiplier, steps, accountant="pld"):
    """The largest sample rate, within a relative 1e-4, at which a run costs at most (target_epsilon, target_delta).

    Arguments, return and errors as in `find_noise_multiplier`; 1.0 where even full batches meet the target.

    >>> round(find_sample_rate(target_epsilon=1.0, target_delta=1e-5, noise_multiplier=1.415, steps=1000), 4)
    0.01
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    noise_multiplier = _checks.number("noise_multiplier", noise_multiplier, 0, math.inf, closed="neither")
    steps = _checks.whole_number("steps", steps, low=1)

    def excess(log_rate, accountant=accountant):
        return _log_ratio(compute_epsilon(sample_rate=min(math.exp(log_rate), 1.0), noise_multiplier=noise_multiplier,
                                          steps=steps, delta=target_delta, accountant=accountant), target_epsilon)

    found = _crossing(excess, accountant, start=math.log(0.01), low=math.log(_SMALLEST_RATE), high=0.0, meets="below")
    if found is None:
        raise ValueError(f"target_epsilon={target_epsilon:g} cannot be met with "
                         f"noise_multiplier={noise_multiplier:g} and "
                         f"steps={steps}: not even a sample rate of {_SMALLEST_RATE:g} does")
    return min(math.exp(found), 1.0)


def find_steps(*, target_epsilon, target_delta, sample_rate, noise_multiplier, accountant="pld"):
    """The largest number of steps at which a run costs at most (target_epsilon, target_delta).

    Arguments and errors as in `find_noise_multiplier`; where a run is longer than 10,000 steps, within a relative
    1e-4. Refused also where a billion steps do not spend the target.

    >>> find_steps(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, noise_multiplier=1.0)
    254
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise_multiplier = _checks.number("noise_multiplier", noise_multiplier, 0, math.inf, closed="neither")

    def epsilon(steps, accountant=accountant):
        return compute_epsilon(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps,
                               delta=target_delta,
                               accountant=accountant)

    if (one := epsilon(1)) > target_epsilon:
        raise ValueError(f"target_epsilon={target_epsilon:g} cannot be met: one step already costs {one:g}")

    def whole(log_steps):
        return math.log(max(1, round(math.exp(log_steps))))

    def excess(log_steps, accountant=accountant):
        return _log_ratio(epsilon(round(math.exp(log_steps)), accountant), target_epsilon)

    found = _crossing(excess, accountant, start=math.log(1000), low=0.0, high=math.log(_MOST_STEPS), meets="below",
                      snap=whole)
    steps = round(math.exp(found))
    if steps >= _MOST_STEPS:
        raise ValueError(f"target_epsilon={target_epsilon:g} is not spent by {_MOST_STEPS:g} steps, the most that is "
                         f"looked at")
    return steps


def _check_target(target_epsilon, target_delta, accountant):
    _checks.one_of("accountant", accountant, ACCOUNTANTS)
    return (_checks.number("target_epsilon", target_epsilon, 0, math.inf, closed="neither"),
            _checks.number("target_delta", target_delta, 0, 1, closed="neither"))


def _log_ratio(epsilon, target):
    """ln(epsilon / target), kept finite: an epsilon of 0 or inf only says on which side it lies."""
    return min(max(math.log(max(epsilon, 1e-300) / target), -50.0), 50.0)


def _crossing(excess, accountant, *, start, low, high, meets, snap=float):
    """Where the monotone `excess` crosses zero, within PRECISION, on the side where it is at most 0.

    `meets` says on which side that is: "above" or "below" the crossing. `snap` moves a point to the nearest one
    at which `excess` is defined. None if the whole range exceeds the target; the range's end if the
    whole range meets it.
    """
    if accountant == "pld":
        # RDP is never below PLD and much faster: its answer meets the target, and the tight one lies a little beyond.
        near = _crossing(lambda x: excess(x, "rdp"), "rdp", start=start, low=low, high=high, meets=meets, snap=snap)
        start = start if near is None else near
    outward = -1 if meets == "above" else 1          # where the excess grows
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
        # Epsilon is about a power, of exponent 1/2 to 2, of what is searched: its logarithm says how far to walk.
        stride = min(max(0.02, abs(value)), 1.0) if stride is None else 2 * stride
        x = min(max(snap(x + toward * stride), low), high) if abs(end - x) > stride else end


def _narrow(excess, good, bad, snap):
    """The good end once the bracket is at most PRECISION wide, or nothing lies between; pairs (x, excess at x)."""
    idle = 0
    while abs(bad[0] - good[0]) > PRECISION:
        gap = bad[0] - good[0]
        smooth = idle < 2 and max(-good[1], bad[1]) < 50
        share = 0.5
        if smooth:
            # Aim a little past the secant's estimate, away from the nearer end: the bracket closes from both sides.
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
