r"""Parameters of a run that meet a privacy target.

Epsilon falls with the noise multiplier and rises with the sample rate and the number of steps, so
each search is for the one crossing of a monotone function. All of them are conservative: what they
return meets the target by `compute_epsilon` itself, and lies within a relative 1e-4 of the best. A
target that cannot be met is refused, never nearly met.

>>> from dpcompanion.accounting import compute_epsilon, find_noise_multiplier
>>> run = dict(sample_rate=0.01, steps=1000)
>>> sigma = find_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, **run)
>>> round(sigma, 3), compute_epsilon(noise_multiplier=sigma, delta=1e-5, **run) <= 1.0
(1.415, True)
"""

import math

from dpcompanion import _checks
from dpcompanion.accounting.runs import ACCOUNTANTS, compute_epsilon
from dpcompanion.accounting.search import (
    LEAST_NOISE_SEARCHED,
    LEAST_RATE_SEARCHED,
    MOST_NOISE_SEARCHED,
    crossing,
)

_MOST_STEPS = 10**9


def find_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier, within a relative 1e-4, with which a run meets the target.

    The run costs at most (`target_epsilon`, `target_delta`).

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
        ValueError: an argument outside its range, or a target that no noise multiplier up to 1e9
            meets.

    >>> round(
    ...     find_noise_multiplier(
    ...         target_epsilon=1,
    ...         target_delta=1e-5,
    ...         sample_rate=1 / 118,
    ...         steps=9440,
    ...         accountant="rdp",
    ...     ),
    ...     3,
    ... )
    3.425
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    steps = _checks.whole_number("steps", steps, low=1)

    def excess(log_noise, accountant=accountant):
        return _log_ratio(
            compute_epsilon(
                sample_rate=sample_rate,
                noise_multiplier=math.exp(log_noise),
                steps=steps,
                delta=target_delta,
                accountant=accountant,
            ),
            target_epsilon,
        )

    found = _searched(
        excess,
        accountant,
        start=0.0,
        low=math.log(LEAST_NOISE_SEARCHED),
        high=math.log(MOST_NOISE_SEARCHED),
        meets="above",
    )
    if found is None:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be met: not even a noise multiplier of "
            f"{MOST_NOISE_SEARCHED:g} does"
        )
    return math.exp(found)


def find_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    steps: int,
    accountant: str = "pld",
) -> float:
    """The largest sample rate, within a relative 1e-4, with which a run meets the target.

    The run costs at most (`target_epsilon`, `target_delta`).

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        target_epsilon: above 0.
        target_delta: in (0, 1).
        noise_multiplier: above 0.
        steps: a whole number, at least 1.
        accountant: "pld" or "rdp".

    Returns:
        A float, 1.0 where even full batches meet the target; `compute_epsilon` at it never exceeds
        the target.

    Raises:
        ValueError: an argument outside its range, or a target that no sample rate down to 1e-12
            meets.

    >>> round(
    ...     find_sample_rate(
    ...         target_epsilon=1.0, target_delta=1e-5, noise_multiplier=1.415, steps=1000
    ...     ),
    ...     4,
    ... )
    0.01
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    noise_multiplier = _checks.number(
        "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
    )
    steps = _checks.whole_number("steps", steps, low=1)

    def excess(log_rate, accountant=accountant):
        return _log_ratio(
            compute_epsilon(
                sample_rate=min(math.exp(log_rate), 1.0),
                noise_multiplier=noise_multiplier,
                steps=steps,
                delta=target_delta,
                accountant=accountant,
            ),
            target_epsilon,
        )

    found = _searched(
        excess,
        accountant,
        start=math.log(0.01),
        low=math.log(LEAST_RATE_SEARCHED),
        high=0.0,
        meets="below",
    )
    if found is None:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be met with "
            f"noise_multiplier={noise_multiplier:g} and steps={steps}: not even a sample rate of "
            f"{LEAST_RATE_SEARCHED:g} does"
        )
    return min(math.exp(found), 1.0)


def find_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    noise_multiplier: float,
    accountant: str = "pld",
) -> int:
    """The largest number of steps at which a run costs at most (target_epsilon, target_delta).

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        target_epsilon: above 0.
        target_delta: in (0, 1).
        sample_rate: in (0, 1].
        noise_multiplier: above 0.
        accountant: "pld" or "rdp".

    Returns:
        An int; where a run is longer than 10,000 steps, within a relative 1e-4 of the largest.

    Raises:
        ValueError: an argument outside its range, a target that one step exceeds, or one that a
            billion steps do not spend.

    >>> find_steps(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, noise_multiplier=1.0)
    254
    """
    target_epsilon, target_delta = _check_target(target_epsilon, target_delta, accountant)
    sample_rate = _checks.number("sample_rate", sample_rate, 0, 1, closed="right")
    noise_multiplier = _checks.number(
        "noise_multiplier", noise_multiplier, 0, math.inf, closed="neither"
    )

    def epsilon(steps, accountant=accountant):
        return compute_epsilon(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            delta=target_delta,
            accountant=accountant,
        )

    if (one := epsilon(1)) > target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be met: one step already costs {one:g}"
        )

    def whole(log_steps):
        return math.log(max(1, round(math.exp(log_steps))))

    def excess(log_steps, accountant=accountant):
        return _log_ratio(epsilon(round(math.exp(log_steps)), accountant), target_epsilon)

    found = _searched(
        excess,
        accountant,
        start=math.log(1000),
        low=0.0,
        high=math.log(_MOST_STEPS),
        meets="below",
        snap=whole,
    )
    steps = round(math.exp(found))
    if steps >= _MOST_STEPS:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} is not spent by {_MOST_STEPS:g} steps, the most "
            "that is looked at"
        )
    return steps


def _check_target(target_epsilon, target_delta, accountant):
    _checks.one_of("accountant", accountant, ACCOUNTANTS)
    return (
        _checks.number("target_epsilon", target_epsilon, 0, math.inf, closed="neither"),
        _checks.number("target_delta", target_delta, 0, 1, closed="neither"),
    )


def _log_ratio(epsilon, target):
    """ln(epsilon / target), kept finite: an epsilon of 0 or inf only says on which side it lies."""
    return min(max(math.log(max(epsilon, 1e-300) / target), -50.0), 50.0)


def _searched(excess, accountant, *, start, **options):
    """`search.crossing` of `excess`; by PLD from where RDP crosses.

    RDP is never below PLD and much faster: its answer meets the target, and the tight one lies a
    little beyond.
    """
    if accountant == "pld":
        near = crossing(lambda x: excess(x, "rdp"), start=start, **options)
        start = start if near is None else near
    return crossing(excess, start=start, **options)
