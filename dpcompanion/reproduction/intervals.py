"""Intervals for statistics, and what follows: a criterion *holds*, *fails*, or stays *undecided*.

A number from one run, or from three, says little without its spread. Each function here takes what
was measured, over seeds, examples or groups, and returns an `Interval` that covers the truth in 95
of 100 repetitions (other levels by `confidence`); its methods hold it against a criterion. The
outcome is decided where the whole interval lies on one side, and only there.

>>> gain = difference([97.7, 97.8, 97.6], [96.9, 96.9, 96.5])
>>> f"{gain:+.1f}", gain.above(0), gain.above(1)
('+0.9 (+0.6 to +1.3)', 'holds', 'undecided')

Which function fits? Few seeds: `mean`, `difference` where the seeds are shared, `unpaired` where
they are not. A count of independent cases: `share`. A correlation: `pearson` from the examples
themselves, `rank_correlation` from its value and the number of groups, which are few. A quantile:
`quantile`. Anything else that examples have: `bootstrap`. What was measured once has none:
`unknown`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpcompanion import _checks, attacks

OUTCOMES = ("holds", "fails", "undecided")


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and the two ends of its confidence interval, infinite where nothing bounds it.

    Formatted, it says all three, each in the given format.

    >>> f"{Interval(0.62, 0.05, 0.89):.2f}", f"{unknown(0.62):.2f}"
    ('0.62 (0.05 to 0.89)', '0.62 (no interval)')
    """

    estimate: float
    low: float
    high: float

    def above(self, limit: float) -> str:
        """Whether the statistic is above the limit: "holds", "fails" or "undecided"."""
        return "holds" if self.low > limit else "fails" if self.high <= limit else "undecided"

    def at_least(self, limit: float) -> str:
        """Whether the statistic is the limit or more."""
        return "holds" if self.low >= limit else "fails" if self.high < limit else "undecided"

    def below(self, limit: float) -> str:
        """Whether the statistic is below the limit."""
        return "holds" if self.high < limit else "fails" if self.low >= limit else "undecided"

    def at_most(self, limit: float) -> str:
        """Whether the statistic is the limit or less."""
        return "holds" if self.high <= limit else "fails" if self.low > limit else "undecided"

    def __sub__(self, other: "Interval") -> "Interval":
        """The difference; it covers at least as often as both together, however they depend."""
        return Interval(
            self.estimate - other.estimate, self.low - other.high, self.high - other.low
        )

    def __mul__(self, factor: float) -> "Interval":
        """The statistic in another unit; the factor is known and above 0."""
        return Interval(self.estimate * factor, self.low * factor, self.high * factor)

    def __truediv__(self, other: "Interval") -> "Interval":
        """The ratio of two statistics that are not negative, in the same way."""
        return Interval(
            self.estimate / other.estimate if other.estimate else math.nan,
            self.low / other.high,
            self.high / other.low if other.low > 0 else math.inf,
        )

    def __format__(self, spec: str) -> str:
        ends = f"{format(self.low, spec)} to {format(self.high, spec)}"
        known = math.isfinite(self.low) or math.isfinite(self.high)
        return f"{format(self.estimate, spec)} ({ends if known else 'no interval'})"


def outcome(value: bool | np.bool_ | str) -> str:
    """The word for an outcome: a word of `OUTCOMES` itself, or a truth value if not random.

    Raises ValueError for anything else.

    >>> outcome(True), outcome(np.bool_(False)), outcome("undecided")
    ('holds', 'fails', 'undecided')
    """
    if isinstance(value, (bool, np.bool_)):
        return "holds" if value else "fails"
    return _checks.one_of("outcome", value, OUTCOMES)


def every(*outcomes: bool | np.bool_ | str) -> str:
    """The outcome of a criterion of several parts: all must hold.

    >>> every("holds", True), every("holds", "undecided"), every("undecided", False)
    ('holds', 'undecided', 'fails')
    """
    words = [outcome(one) for one in outcomes]
    return next((word for word in ("fails", "undecided") if word in words), "holds")


def unknown(estimate: float) -> Interval:
    """The interval of what was measured once: it decides nothing.

    >>> unknown(0.3).above(0.1)
    'undecided'
    """
    return Interval(float(estimate), -math.inf, math.inf)


def timed(seconds: float) -> Interval:
    """Of a time, which other machines may halve or double.

    >>> timed(3.0).below(7), timed(3.0).below(5)
    ('holds', 'undecided')
    """
    return Interval(seconds, seconds / 2, 2 * seconds)


def mean(
    values: Iterable[float], *, confidence: float = 0.95, beside: float = math.inf
) -> Interval:
    """Of a mean over seeds, by Student's t; one seed alone has no interval.

    Args:
        values: one number for each seed.
        beside: how many runs there are, each of the same spread as the others, of which the values
            are the distances; by default their mean is known.

    >>> f"{mean([96.0, 97.0, 98.0]):.2f}", f"{mean([0.5, 1.5, 2.5], beside=1):.2f}"
    ('97.00 (94.52 to 99.48)', '1.50 (-3.47 to 6.47)')
    """
    values = _numbers("values", values)
    centre = math.fsum(values) / len(values)
    sd = (
        math.sqrt(math.fsum((values - centre) ** 2) / (len(values) - 1))
        if len(values) > 1
        else math.nan
    )
    return of_summary(centre, sd, len(values), confidence=confidence, beside=beside)


def of_summary(
    mean: float, sd: float, n: int, *, confidence: float = 0.95, beside: float = math.inf
) -> Interval:
    """As `mean`, from the mean, the standard deviation (over n - 1) and the number of values.

    >>> of_summary(97.0, 1.0, 3) == globals()["mean"]([96.0, 97.0, 98.0])
    True
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    if n < 2 or not math.isfinite(sd):
        return unknown(mean)
    spread = sd * math.sqrt(1 / n + 1 / beside)
    reach = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * spread
    return Interval(float(mean), mean - reach, mean + reach)


def difference(
    first: Iterable[float], second: Iterable[float], *, confidence: float = 0.95
) -> Interval:
    """Of the mean of first less second, paired: entry i of both comes from the same seed.

    >>> f"{difference([3.0, 5.0, 7.0], [2.0, 4.1, 5.9]):.2f}"
    '1.00 (0.75 to 1.25)'
    """
    first, second = _numbers("first", first), _numbers("second", second)
    _checks.same_length(first=first, second=second)
    return mean(first - second, confidence=confidence)


def unpaired(
    first: tuple[float, float, int], second: tuple[float, float, int], *, confidence: float = 0.95
) -> Interval:
    """Of the difference of two means without shared seeds, by Welch's t.

    Args:
        first, second: (mean, standard deviation, number of values) each, such as a
            `records.MeanSD`.

    >>> f"{unpaired((3.0, 0.5, 10), (2.0, 0.5, 10)):.2f}"
    '1.00 (0.53 to 1.47)'
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    (one, sd, n), (other, sd_other, n_other) = first, second
    if min(n, n_other) < 2 or not (math.isfinite(sd) and math.isfinite(sd_other)):
        return unknown(one - other)
    a, b = sd**2 / n, sd_other**2 / n_other
    if a + b == 0:
        return Interval(float(one - other), float(one - other), float(one - other))
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (n_other - 1))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(a + b)
    return Interval(one - other, one - other - reach, one - other + reach)


def share(count: float, n: float, *, confidence: float = 0.95) -> Interval:
    """Of a share, by Clopper and Pearson: it covers at least as often as it says.

    Args:
        count: how many of `n` independent cases; whole numbers.

    >>> f"{share(9, 10):.2f}", f"{share(0, 100):.2f}"
    ('0.90 (0.55 to 1.00)', '0.00 (0.00 to 0.04)')
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    n, count = _checks.whole_number("n", n, low=1), _checks.whole_number("count", count)
    if count > n:
        raise ValueError(f"count must be at most n = {n}, got {count}")
    # There each end is a bound of its own; an interval shares what is left between the two.
    low, high = attacks.clopper_pearson(count, n, confidence=(1 + confidence) / 2)
    return Interval(count / n, low, high)


class Levels(NamedTuple):
    """Two levels of quantiles, in [0, 1]."""

    low: float
    high: float


def level(q: float, n: float, *, confidence: float = 0.95) -> Levels:
    """The levels between which a quantile of n values lies, for distributions known by a histogram,
    rounded to less than a tenth of their distance.

    >>> level(0.5, 100)
    Levels(low=0.4, high=0.6)
    """
    reach = float(special.ndtri((1 + confidence) / 2)) * math.sqrt(q * (1 - q) / n)
    digits = 2 if n < 1_000 else 4
    return Levels(round(max(q - reach, 0.0), digits), round(min(q + reach, 1.0), digits))


def quantile(values: Iterable[float], q: float, *, confidence: float = 0.95) -> Interval:
    """Of a quantile of the population of `values`, between two of them: distribution-free.

    Where there are too few values for an end, that end is infinite (Conover, Practical
    Nonparametric Statistics, 3.2).

    >>> quantile(range(1, 101), 0.5)
    Interval(estimate=50.5, low=40.0, high=61.0)
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    _checks.in_interval("q", q, 0, 1, closed="neither")
    values = np.sort(_numbers("values", values))
    n, tail = len(values), (1 - confidence) / 2
    # The number of values below the quantile is binomial: ends are the ranks that it leaves with
    # chance `tail` each.
    below = special.bdtr(np.arange(n), n, q)
    first = int((below <= tail).sum()) - 1  # the largest with P(no more than it below) <= tail
    last = int((below < 1 - tail).sum())  # the smallest with P(more than it below) <= tail
    return Interval(
        float(np.quantile(values, q)),
        float(values[first]) if first >= 0 else -math.inf,
        float(values[last]) if last < n else math.inf,
    )


def rank_correlation(r: float, n: float, *, confidence: float = 0.95) -> Interval:
    """Of Spearman's rank correlation over n groups, by Fisher's z (variance: Bonett, Wright 2000).

    Perfect agreement of few groups is no proof of it: r is moved half a step of what n ranks can
    show away from 1.

    >>> f"{rank_correlation(0.62, 10):.2f}", f"{rank_correlation(1.0, 10):.2f}"
    ('0.62 (-0.08 to 0.91)', '1.00 (0.96 to 1.00)')
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    n = _checks.whole_number("n", n, low=1)
    if not math.isfinite(r) or n < 4:
        return unknown(r)
    _checks.in_interval("r", r, -1 - 1e-6, 1 + 1e-6, closed="both")
    largest = 1 - 6 / (n**3 - n)
    inside = max(-largest, min(largest, r))
    reach = float(special.ndtri((1 + confidence) / 2)) * math.sqrt((1 + inside**2 / 2) / (n - 3))
    low, high = math.tanh(math.atanh(inside) - reach), math.tanh(math.atanh(inside) + reach)
    return Interval(float(r), min(low, r), max(high, r))


def pearson(
    first: Iterable[float], second: Iterable[float], *, confidence: float = 0.95
) -> Interval:
    """Of Pearson's r over examples, by the bootstrap (pairs are sampled together); unknown where
    one does not vary.

    >>> x = np.arange(50.0)
    >>> f"{pearson(x, x + 5 * np.sin(x)):.2f}"
    '0.97 (0.96 to 0.98)'
    """
    first, second = _numbers("first", first), _numbers("second", second)
    if np.std(first) == 0 or np.std(second) == 0:
        return unknown(math.nan)

    return bootstrap(correlation, first, second, confidence=confidence)


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson's r along the last axis, NaN where one of the two does not vary.

    >>> float(correlation(np.arange(4.0), np.arange(4.0) ** 2).round(3))
    0.958
    """
    first, second = (values - values.mean(-1, keepdims=True) for values in (first, second))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))


def bootstrap(
    statistic: Callable[..., Any],
    *samples: Iterable[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Of any statistic of examples, by the percentiles of its values on resampled examples (Efron).

    Args:
        statistic: function of arrays whose last axis runs over the examples; earlier axes run over
            resamples.
        samples: arrays (n,) of the same length; the examples are sampled together from all of them.
        resamples, seed: how many, and the seed that draws them: the same every time.

    >>> f"{bootstrap(lambda x: x.mean(-1), np.arange(100.0)):.0f}"
    '50 (44 to 55)'
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    vectors = [_numbers("samples", sample) for sample in samples]
    _checks.same_length(**{f"samples[{i}]": vector for i, vector in enumerate(vectors)})
    n, random, found = len(vectors[0]), np.random.RandomState(seed), []
    estimate = float(statistic(*vectors))
    if n < 2 or not math.isfinite(estimate):
        return unknown(estimate)
    for start in range(0, resamples, 100):  # 100 at a time keeps memory small
        drawn = random.randint(n, size=(min(100, resamples - start), n))
        found.append(statistic(*(vector[drawn] for vector in vectors)))
    found = np.concatenate(found)
    if not np.isfinite(found).all():
        return unknown(estimate)
    low, high = np.quantile(found, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(estimate, float(low), float(high))


def _numbers(name: str, values: Iterable[float]) -> np.ndarray:
    """A float64 vector, or ValueError."""
    values = np.asarray(
        list(values) if not isinstance(values, np.ndarray) else values, dtype=np.float64
    )
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"{name} must be a vector of one number at least, got an array of shape {values.shape}"
        )
    return values
