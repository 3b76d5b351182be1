r"""Delta of composed sampled Gaussian mechanisms from below, by the power of a test; with numpy and
scipy alone.

No test tells P from Q better than delta allows: delta(eps) >= P(A) - e^eps Q(A) for every event A,
with equality for the likelihood ratio test (Neyman and Pearson). Here A is that a sum of whole
numbers, each step's loss rounded to the nearest multiple of a spacing, reaches a threshold. Such a
sum has an exact law, by convolution, under P and under Q, so what comes out is a lower end of delta
whatever the spacing and the threshold; it misses delta by the square of the spacing. Both laws are
tilted to where delta is decided, so that a delta of 1e-12 keeps its digits.
"""

import math

import numpy as np
from scipy import fft, optimize, special

SPAN = 1 << 20  # values of the sum that are told apart, at most
LOST = 3e-5  # the share of delta that rounding may hide, where SPAN allows
NEGLIGIBLE = 32.0  # tilted probabilities below e^-32 are left outside of the window


def delta_from_below(runs, epsilon, remove, scale):
    """A lower end of delta at epsilon >= 0 of all `runs`: (sample rate, noise multiplier, steps)
    each.

    `scale` is about the delta that is expected: single losses that are far more rare are counted as
    smaller ones.
    """
    runs = [run for run in runs if run[2]]
    total, sign = sum(steps for _, _, steps in runs), 1 if remove else -1
    most = -sum(steps * (math.log1p(-rate) if rate < 1 else -math.inf) for rate, _, steps in runs)
    if not remove and epsilon >= most:
        return 0.0  # adding never costs a step more than -ln(1 - q)
    tops = [_top(rate, noise, 1e-6 * scale / total) for rate, noise, _ in runs]

    # The tilt, and how wide the tilted sum is, from coarse laws of single steps.
    coarse = []
    for (rate, noise, steps), top in zip(runs, tops):
        # As far down as a tail is a float: a steep tilt lifts what is rare, which would be taken
        # for something else.
        edges = _log_ratio(
            rate, noise, np.linspace(-37, _output(rate, noise, np.array([top]))[0], 4000)
        )
        coarse.append(
            (sign * np.append(edges, edges[-1]), _masses(rate, noise, edges, remove)[0], steps)
        )

    def cumulants(tilt):
        return sum(
            steps * special.logsumexp(tilt * losses, b=mass) for losses, mass, steps in coarse
        )

    def exponent(log_tilt):
        tilt = math.exp(log_tilt)
        return cumulants(tilt) - tilt * epsilon - math.log(tilt) - math.log1p(tilt)

    tilt = math.exp(
        optimize.minimize_scalar(
            exponent,
            bounds=(math.log(1e-3), math.log(1e6)),
            method="bounded",
            options={"xatol": 0.02},
        ).x
    )

    def reach(direction):
        """How far above or below epsilon the tilted sum gets, by Chernoff's bound."""
        shares = direction * tilt * np.geomspace(1e-3, 1e3 if direction > 0 else 1, 40)
        return max(
            0.0,
            min(
                (NEGLIGIBLE + cumulants(tilt + more) - cumulants(tilt) - more * epsilon) / abs(more)
                for more in shares
            ),
        )

    left, right = reach(-1), reach(1)
    spacing = math.sqrt(24 * LOST / (tilt * (1 + tilt) * total))
    span = fft.next_fast_len(min(SPAN, max(64, math.ceil((left + right) / spacing) + 2)), real=True)
    spacing = max(spacing, (left + right) / (span - 1), *(top / SPAN for top in tops))

    # Single steps on the grid, under P and under Q, and by how much rounding moves a tilted sum.
    laws, moved = [], 0.0
    for (rate, noise, steps), top in zip(runs, tops):
        low = math.log1p(-rate) if rate < 1 else -top
        numbers = np.arange(math.floor(low / spacing), math.ceil(top / spacing) + 1)
        masses = _masses(rate, noise, (numbers[:-1] + 0.5) * spacing, remove)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [
                np.log(mass) + (tilt + more) * spacing * sign * numbers
                for more, mass in enumerate(masses)
            ]
            gap = np.log(masses[0]) - np.log(masses[1]) - spacing * sign * numbers
        weight = special.softmax(logs[0])
        moved += steps * float(weight @ np.where(weight > 1e-20, gap, 0.0))
        laws.append((sign * numbers, logs, steps))
    middle = round((epsilon - moved) / spacing)  # about here lies the best threshold
    first = middle - math.ceil(left / spacing)  # the window begins here
    near = max(0, middle - first - math.ceil(4 / (tilt * spacing)))
    thresholds = np.arange(first + near, first + span) * spacing
    tails, told = [], np.ones(len(thresholds), dtype=bool)
    # under P and under Q, with what the rounding of transforms may be taken off and added
    for more in (0, 1):
        height, transform = 0.0, 1.0
        for numbers, logs, steps in laws:
            top = special.logsumexp(logs[more])
            law = np.bincount(numbers % span, weights=np.exp(logs[more] - top), minlength=span)
            height, transform = height + steps * top, transform * fft.rfft(law) ** steps
        law = np.roll(fft.irfft(transform, span), -(first % span)).clip(min=0)
        law = law[near:] + (2 * more - 1) * (1e-15 * math.log2(span) + 4e-16 * total) * law.max()
        exponents = height - (tilt + more) * thresholds + more * epsilon
        # at lower thresholds nothing can be said: their terms are beyond a float
        told &= exponents <= 700
        tails.append(np.cumsum((law * np.exp(np.minimum(exponents, 700.0)))[::-1]))
    return max(0.0, float((tails[0] - tails[1])[told[::-1]].max(initial=0.0)))


def delta_at_zero_from_above(runs):
    """An upper end of delta at epsilon 0, the total variation: by the union bound, and the
    chi-squared divergence.
    """
    union = sum(steps * rate * (2 * special.ndtr(0.5 / noise) - 1) for rate, noise, steps in runs)
    chi = sum(
        steps * math.log1p(rate**2 * math.expm1(min(1 / noise**2, 700.0)))
        for rate, noise, steps in runs
    )
    return min(union, math.sqrt(math.expm1(min(chi, 10.0))) / 2)


def verdict(runs, epsilon, delta):
    """What is wrong with epsilon at delta, in words, "" where nothing is; None where the lower ends
    cannot tell.

    They can where one of them shows 95% of delta: an epsilon whose true delta is above that share
    of the delta that was asked for would have been seen. At epsilon 0 an upper end tells.
    """
    lower = {
        word: delta_from_below(runs, epsilon, word == "remove", delta) for word in ("remove", "add")
    }
    wrong = [
        f"epsilon {epsilon} has delta {found} or more, to {word}"
        for word, found in lower.items()
        if found > delta * (1 + 1e-6)
    ]
    if wrong:
        return "; ".join(wrong)
    told = max(lower.values()) >= 0.95 * delta or (
        epsilon == 0 and delta_at_zero_from_above(runs) <= delta
    )
    return "" if told else None


def _log_ratio(rate, noise, t):
    """ln(1 - q + q e^(t / noise - 1 / 2 noise^2)) at the output t noise."""
    u = t / noise - 0.5 / noise**2
    return np.logaddexp(np.log1p(-rate), np.log(rate) + u) if rate < 1 else u


def _output(rate, noise, log_ratios):
    """The outputs, over the noise, that have these log ratios; -inf below the lowest."""
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(log_ratios, 30.0)) / rate, -1.0))
    return noise * np.where(log_ratios < 30, small, log_ratios - np.log(rate)) + 0.5 / noise


def _top(rate, noise, chance):
    """The log ratio that a step exceeds with about this chance where the example takes part."""
    t = 1 / noise - special.ndtri(max(chance / rate, 1e-300)) if chance < rate / 2 else 1 / noise
    return max(float(_log_ratio(rate, noise, t)), 1e-12)


def _masses(rate, noise, edges, remove):
    """P and Q of the cells between edges of the log ratio; the first and the last cell are open."""
    t = np.concatenate(([-np.inf], _output(rate, noise, edges), [np.inf]))

    def between(t):  # of a standard Gaussian, from the side where nothing cancels
        low, high = t[:-1], t[1:]
        return np.where(
            low > 0,
            special.ndtr(-low) - special.ndtr(-high),
            special.ndtr(high) - special.ndtr(low),
        )

    without, with_it = between(t), between(t - 1 / noise)
    mixed = (1 - rate) * without + rate * with_it
    return (mixed, without) if remove else (without, mixed)
