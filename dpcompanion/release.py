r"""Publishing what individual epsilons look like together: a private mean and private quantiles;
and the means and variances by which columns are scaled before a training, a private scaler.

An epsilon of one's own is computed from one's own data and may not be published as it is.  Two
releases add Gaussian noise instead, calibrated by the analytic Gaussian mechanism.

**What is protected.** By default one value is left out: ``relation="add-remove"``. The number of
values n counts as public, and whoever is left out has the value 0 (or NaN, which counts as 0), as
the epsilon and the gradient norm are of whose gradient is zeroed. Where one value becomes another,
``relation="replace"`` is the one to ask for: it moves two of the counts behind a curve of
quantiles, and a release of epsilon 0.1 for add or remove is one of 0.131 for replacement (512 bins,
delta 1e-5). The mean and the iterations cost the same in both.

Given the models of the training run, a person's epsilon is a function of these models and of that
person's data alone (Yu et al. 2023, theorem 3.2), so one person changes one value. The models
protect a person by the training's own guarantee, and the two add up:
:math:`(\varepsilon_\text{train} + \varepsilon, \delta_\text{train} + \delta)` at most, with what
training promised beforehand and not with the person's own account. **Not covered:** values that
depend on more than that. Epsilons by running estimates follow who was sampled. Accounts by PLD
without `rounding` have the norms of all persons as their levels, so that one person's norms may
move the epsilons of all others by about a thousandth, and mean and quantiles by many times what is
paid for: give them a rounding, or take ``accountant="rdp"``.

**Several releases.** All methods here are compositions of Gaussian mechanisms, so they compose
exactly: `split` gives the epsilon at which each of k releases may run so that together they are
(epsilon, delta)-private. `ledger_item` is what a release counts as in a
`dpcompanion.accounting.Ledger`, beside trainings.

**Quantiles.**

* "cdf", the default: count the values above 0 in `bins` equal bins of [0, upper], from the top, and
  release all prefix sums of these counts with correlated noise: with :math:`A = L L` the matrix of
  prefix sums and L its lower triangular Toeplitz square root,
  :math:`L (L h + \mathcal N(0, \sigma^2 c^2 I))`, where c is the length of L's longest column
  (Fichtenberger, Henzinger and Upadhyay 2023). The noise of a
  prefix is at most :math:`\sigma c^2`, with :math:`c^2 \approx 1.07 + \ln(\text{bins})/\pi`. All
  quantiles are read off one monotone curve (isotonic regression), at no further cost: 5 cost what 1
  does.
* "andrew2021": `steps` rounds of :math:`C \leftarrow C \exp(-\eta (b - \gamma))`, b the noisy share
  of values that are at most C (Andrew et al. 2021), as in Yu et al.; the budget is shared equally
  by all rounds and quantiles. Andrew et al.'s own :math:`\eta = 0.2` is meant for hundreds of
  rounds and does not arrive in 20.

**A scaler.** What columns are scaled by is computed from the data that are to be protected, so it
costs epsilon like everything else. With :math:`z \in [-1, 1]` the values of d columns, between
public bounds, `private_scaler` releases the 2d sums of :math:`z` and :math:`z^2 - 1/2` at once. One
row moves a column's two sums by at most

.. math::
    \max_{|z| \le 1} z^2 + \left(z^2 - \tfrac12\right)^2 = \tfrac54, \qquad
    \max_{|z|, |z'| \le 1} (z - z')^2 + (z^2 - z'^2)^2 = 4

in square, if it is left out or replaced: all of them by :math:`\sqrt{5d/4}` or :math:`2\sqrt d`. A
NaN adds nothing to either sum: a row of them is one that is left out.

>>> values = torch.linspace(0.0, 2.0, 60_000, dtype=torch.float64) ** 2 / 2
>>> generator = torch.Generator().manual_seed(0)
>>> mean = private_mean(values, upper=2.0, epsilon=0.1, delta=1e-5, generator=generator)
>>> abs(mean - float(values.mean())) < 0.01
True
>>> private_quantiles(
...     values, [0.1, 0.5, 0.9], upper=2.0, epsilon=0.1, delta=1e-5, generator=generator
... )
tensor([0.0...], dtype=torch.float64)
"""

import dataclasses
import functools
import hashlib
import math
import numbers

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from dpcompanion import _checks
from dpcompanion._rounding import rounded
from dpcompanion._types import Array
from dpcompanion.accounting import Gaussian, LedgerEntry, gaussian_epsilon, gaussian_mu
from dpcompanion.accounting.items import check_no_delta
from dpcompanion.mechanism.noise import gaussian_noise, noisy
from dpcompanion.mechanism.secure import CELLS, MOST_CELLS, SecureStream, grid_of

METHODS = ("cdf", "andrew2021")
RELATIONS = ("add-remove", "replace")
_MOST = 10**6  # bins or steps: more take minutes and tell no more
_SMALL = (
    "delta must be small beside epsilon, whose share would be 0 here, got epsilon={} and delta={}"
)


def private_mean(
    values: Array,
    *,
    upper: float,
    epsilon: float,
    delta: float,
    generator: torch.Generator | None,
    relation: str = "add-remove",
) -> float:
    """The mean of `values` with noise of standard deviation sigma upper / n, (epsilon,
    delta)-private: a float from 0 to `upper`, where what the noise carries beyond is moved to the
    nearest end.

    Neighbouring relation: one value left out or replaced, n public; the sum moves by
    `upper` at most in both.

    Args:
        values: (n,), each from 0 to `upper`; what lies outside is moved to the nearest end, and NaN
            to 0.
        upper: a public bound, from 1e-100 to 1e100, such as the worst-case epsilon of the run.
        epsilon, delta: of this release, see `split`.
        generator: None, for what is published: the noise comes from a cipher under a key of the
            operating system and is added on a grid (`dpcompanion.mechanism.secure`). Or a
            torch.Generator, for research: anyone who knows or guesses its seed subtracts the noise.
        relation: "add-remove" or "replace": what (epsilon, delta) is for.

    Raises:
        ValueError: an argument outside its range.

    Source: the Gaussian mechanism, calibrated as in Balle and Wang 2018, theorem 8.
    """
    upper, generator = _upper(upper), _generator(generator)
    values = _bounded(values, upper)
    _checks.one_of("relation", relation, RELATIONS)
    ratio = noise_ratio(epsilon, delta)
    mean = float(
        _noisy(values.mean(), upper / ratio / len(values), generator, ratio=ratio, most=upper)
    )
    return min(max(mean, 0.0), float(upper))  # what is done to what was released costs nothing


def private_quantiles(
    values: Array,
    quantiles: Array,
    *,
    upper: float,
    epsilon: float,
    delta: float,
    generator: torch.Generator | None,
    method: str = "cdf",
    bins: int = 512,
    steps: int = 20,
    learning_rate: float = 1.0,
    start: float | None = None,
    relation: str = "add-remove",
) -> torch.Tensor:
    """Quantiles of `values`, together (epsilon, delta)-private.

    They are (len(quantiles),) float64, from 0 to `upper`.

    Neighbouring relation: one value left out, n public; or one replaced, see
    `replacement_factor`.

    Many arguments, since quantiles, privacy and randomness are all chosen by keyword.

    Args:
        values: (n,), each from 0 to `upper`; what lies outside is moved to the nearest end, and NaN
            to 0.
        quantiles: shares in (0, 1).
        upper: a public bound, from 1e-100 to 1e100, such as the worst-case epsilon of the run.
        epsilon, delta: of this release, see `split`.
        generator: None, for what is published, or a torch.Generator, for research; see
            `private_mean`.
        method: "cdf" or "andrew2021"; see the module's text.
        bins: of the public grid of "cdf", from 2 to 10^6.
        steps, learning_rate, start: of "andrew2021", 10^6 steps at most; it starts at upper / 2 by
            default.
        relation: "add-remove" or "replace": what (epsilon, delta) is for.

    Raises:
        ValueError: an argument outside its range.
    """
    _checks.in_interval("quantiles", quantiles, 0, 1, closed="neither")
    quantiles = torch.as_tensor(quantiles, dtype=torch.float64).reshape(-1)
    upper, generator = _upper(upper), _generator(generator)
    values = _bounded(values, upper)
    _checks.one_of("method", method, METHODS)
    _checks.one_of("relation", relation, RELATIONS)
    bins = _checks.whole_number("bins", bins, 2, _MOST)
    steps = _checks.whole_number("steps", steps, 1, _MOST)
    learning_rate = _checks.number("learning_rate", learning_rate, 0, math.inf, closed="neither")
    start = upper / 2 if start is None else _checks.number("start", start, 0, upper, closed="right")
    if method == "cdf":
        ratio = noise_ratio(
            _epsilon_of_adding(epsilon, delta, bins) if relation == "replace" else epsilon, delta
        )
        return _read_off(
            _noisy_prefixes(values, upper, bins, ratio, generator), quantiles, upper, len(values)
        )
    ratio = noise_ratio(epsilon, delta)
    found = torch.full_like(quantiles, start)
    std = math.sqrt(steps * len(quantiles)) / ratio
    ordered = values.sort().values
    for _ in range(steps):
        counts = torch.searchsorted(ordered, found, right=True).double()
        below = _noisy(
            counts, std, generator, ratio=ratio, most=len(values), numbers=steps * len(quantiles)
        )
        factor = torch.exp(-learning_rate * (below / len(values) - quantiles))
        # 0 times inf is NaN
        found = (found * factor.clamp(max=torch.finfo(factor.dtype).max)).clamp(max=upper)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateScaler:
    """What `private_scaler` gives.

    Attributes:
        mean, scale: of each column, (d,) float64, by which `transform` moves and divides.
        lower, upper: the public bounds of each column, (d,) float64.
        n: how many rows there were.
        epsilon, delta, relation, unit: what was asked for.
        seeded: whether the noise came from a `torch.Generator`.
        key_fingerprint: a name of that generator's state: two scalers of one state share their
            noise, which cancels in their difference. None where the noise has a key of its own.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor
    n: int
    epsilon: float
    delta: float
    relation: str = "add-remove"
    seeded: bool = False
    unit: str = "example"
    key_fingerprint: str | None = None

    def transform(self, x: Array) -> torch.Tensor:
        """(x - mean) / scale of columns clipped to their bounds, (m, d), with x's type and device.

        It is a fixed map of each row, at no further cost. NaN stays NaN.

        Raises:
            ValueError: for another number of columns, or what is no number.
        """
        x = _checks.tensor("x", x)
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise ValueError(f"x must have shape (m, {len(self.mean)}), got {tuple(x.shape)}")
        wide = x.to(torch.float64)
        lower, upper, mean, scale = (
            t.to(x.device) for t in (self.lower, self.upper, self.mean, self.scale)
        )
        found = (wide.clamp(lower, upper) - mean) / scale
        return found.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())

    def statement(self) -> str:
        """What the scaler has cost, in a sentence for a report."""
        neighbours = (
            f"by one {self.unit}"
            if self.relation == "add-remove"
            else f"in one {self.unit} that is replaced"
        )
        epsilon, delta = (rounded(value, math.ceil) for value in (self.epsilon, self.delta))
        return (
            f"Means and variances of {len(self.mean)} columns of {self.n} {self.unit}s (a public "
            f"number) were released with Gaussian noise, ({epsilon:g}, {delta:g})-DP for "
            f"neighbours that differ {neighbours} ({self.relation})."
            + (
                " The noise was seeded, for research: anyone who knows the seed can subtract it."
                if self.seeded
                else ""
            )
        )

    def ledger_entry(self, delta: float | None = None) -> LedgerEntry:
        """What `Ledger.add` counts: a Gaussian mechanism, exactly, for a public number of rows."""
        check_no_delta(delta)
        replaced = _SCALER["replace"] / _SCALER["add-remove"]
        longer = _SCALER[self.relation] / _SCALER["add-remove"]
        noise = (1 - 1e-12) * longer / noise_ratio(self.epsilon, self.delta)
        item = Gaussian(noise, replaced=replaced * (1 + 1e-9))
        return LedgerEntry(
            item,
            label="scaler",
            relation="zero-out",
            unit=self.unit,
            key_fingerprint=self.key_fingerprint,
            seeded=self.seeded,
        )


#: By how much a row moves the sums of one column, for a scaler.
_SCALER = {"add-remove": math.sqrt(5 / 4), "replace": 2.0}


def private_scaler(
    x: Array,
    *,
    lower: Array | float,
    upper: Array | float,
    epsilon: float,
    delta: float,
    generator: torch.Generator | None,
    relation: str = "add-remove",
    unit: str = "example",
) -> PrivateScaler:
    """Mean and standard deviation of each column, (epsilon, delta)-private together: for scaling
    data before training.

    Neighbouring relation: one row left out or replaced, n public; see the module's text.
    Where a person has several rows, give one row a person, such as their mean.

    Args:
        x: (n, d) numbers; what lies outside of the bounds is moved to the nearest. A NaN adds
            nothing: it counts as the middle in the mean, and as half the square of the distance
            from the middle to a bound in the variance.
        lower, upper: public bounds of all columns, or (d,) of each, lower below upper, between
            -1e100 and 1e100. They must not be read off the data.
        epsilon, delta: of this release.
        generator: None, for what is published, or a torch.Generator, for research; see
            `private_mean`.
        relation: "add-remove" or "replace": what (epsilon, delta) is for.
        unit: what one row is, in the singular, such as "patient" where each patient has one row: a
            word of the statement and of a ledger's, as in `DPSGDPlan`.

    Returns:
        A `PrivateScaler`, whose `transform` scales data, and which a `Ledger` takes beside the
        training. A variance that the noise may hide counts as the standard deviation of the noise
        in it.

    Raises:
        ValueError: an argument outside its range.

    >>> from dpcompanion.accounting import Ledger
    >>> ages = torch.randint(20, 80, (5000, 1), generator=torch.Generator().manual_seed(0))
    >>> scaler = private_scaler(ages, lower=0, upper=100, epsilon=0.5, delta=1e-6, generator=None)
    >>> (
    ...     bool(scaler.transform(ages).mean().abs() < 0.1),
    ...     round(Ledger().add(scaler).epsilon(1e-6), 3),
    ... )
    (True, 0.5)
    """
    generator = _generator(generator)
    _checks.one_of("relation", relation, RELATIONS)
    _checks.unit("unit", unit)
    ratio = noise_ratio(epsilon, delta)
    x = _real("x", x)
    if x.ndim != 2 or not x.numel():
        raise ValueError(
            f"x must be rows of one column at least, shape (n, d), got shape {tuple(x.shape)}"
        )
    n, d = x.shape
    low, high = (_bounds(name, value, d) for name, value in (("lower", lower), ("upper", upper)))
    if not (low < high).all():
        raise ValueError(
            f"lower must be below upper in each column, got {low.tolist()} and {high.tolist()}"
        )
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    z = ((x - middle) / half).clamp(-1, 1)
    sums = torch.cat([z.nansum(0), (z.square() - 0.5).nansum(0)])
    std = _SCALER[relation] * math.sqrt(d) / ratio
    fingerprint = None if generator is None else _fingerprint(generator)
    means = _noisy(sums, std, generator, ratio=ratio, most=n, numbers=2 * d) / n
    mean, square = means[:d].clamp(-1, 1), means[d:] + 0.5
    variance = (square - mean.square()).clamp(min(std / n, 1.0), 1.0)
    return PrivateScaler(
        middle + half * mean,
        half * variance.sqrt(),
        low,
        high,
        n,
        float(epsilon),
        float(delta),
        relation,
        generator is not None,
        unit,
        fingerprint,
    )


def _fingerprint(generator):
    """A name of a generator's state."""
    state = generator.get_state().numpy().tobytes()
    return hashlib.sha256(b"dpcompanion fingerprint\0" + state).hexdigest()[:32]


def _bounds(name, value, d):
    found = _checks.tensor(name, _checks.in_interval(name, value, -1e100, 1e100), torch.float64)
    if found.shape not in ((), (d,)):
        raise ValueError(f"{name} must be a number or have shape ({d},), got {tuple(found.shape)}")
    return found.expand(d).clone()


def split(epsilon: float, delta: float, parts: int) -> float:
    """The epsilon of each of `parts` releases that are together (epsilon, delta)-private.

    Each is a release of this module, and runs with the same `delta` and the same relation, which is
    that of the whole. Raises ValueError where a share of epsilon would be 0, since delta alone pays
    for as much.

    >>> each = split(0.1, 1e-5, 2)
    >>> round(each, 4)
    0.0684
    """
    parts = _checks.whole_number("parts", parts, 1)
    each = float(gaussian_epsilon(noise_ratio(epsilon, delta) / math.sqrt(parts), delta))
    if not each:
        raise ValueError(_SMALL.format(epsilon, delta))
    return each


def ledger_item(
    epsilon: float,
    delta: float,
    *,
    bins: int | None = None,
    relation: str = "add-remove",
    unit: str = "example",
) -> LedgerEntry:
    """What one release of this module costs, for `accounting.Ledger.add`: it is a Gaussian
    mechanism, exactly, of a public number of values.

    Args:
        epsilon, delta: those of the release.
        bins: of `private_quantiles` with method "cdf", None for `private_mean` and for
            "andrew2021".
        relation: that of the release.
        unit: what one value is of, in the singular: a word of the ledger's statement.

    Raises:
        ValueError: an argument outside its range.

    >>> from dpcompanion.accounting import Ledger, SampledGaussian
    >>> ledger = Ledger([SampledGaussian(0.01, 1.0, 500)]).add(ledger_item(0.1, 1e-6), label="mean")
    >>> round(ledger.epsilon(1e-5), 2)
    1.3...
    """
    _checks.one_of("relation", relation, RELATIONS)
    replaced = 1.0 if bins is None else replacement_factor(bins)
    if bins is not None and relation == "replace":
        epsilon = _epsilon_of_adding(epsilon, delta, bins)
    item = Gaussian(
        (1 - 1e-12) / noise_ratio(epsilon, delta), replaced=min(replaced * (1 + 1e-9), 2.0)
    )
    return LedgerEntry(item, relation="zero-out", unit=unit)


def replacement_factor(bins: int) -> float:
    """How much longer than one value added is one replaced, for quantiles: from 1 to sqrt(2).

    The replaced value leaves bin a and enters bin b, which moves :math:`L h` by the difference of
    two columns of L: :math:`\\max_{a,b} \\|L e_a - L e_b\\| / \\max_a \\|L e_a\\|`.

    >>> round(replacement_factor(512), 4)
    1.2776
    """
    bins = _checks.whole_number("bins", bins, 2, _MOST)
    column = _square_root(bins)
    # Entries fall along a column, so that the longest difference has the first column in it: the
    # other begins at bin b.
    own = column.square().cumsum(0)
    spectrum = torch.fft.rfft(column, 2 * bins)
    shared = torch.fft.irfft(spectrum.abs().square(), 2 * bins)[1:bins]
    longest = (own[-1] + own[:-1].flip(0) - 2 * shared).max()
    return min(float((longest / own[-1]).sqrt()) * (1 + 1e-9), math.sqrt(2))


def _epsilon_of_adding(epsilon, delta, bins):
    """The epsilon, for one value added, of a curve of quantiles that is (epsilon, delta)-private
    for one replaced.

    A Gaussian mechanism whose sensitivity for replacement is c times that for adding has the
    epsilon for replacement at noise c times as large, that is at the epsilon for adding of a ratio
    c times smaller.
    """
    found = float(
        gaussian_epsilon(noise_ratio(epsilon, delta) / replacement_factor(bins), delta)
    ) * (1 - 1e-9)
    if not found:
        raise ValueError(_SMALL.format(epsilon, delta))
    return found


def noise_ratio(epsilon: float, delta: float) -> float:
    """The largest sensitivity over noise at which the Gaussian mechanism is (epsilon,
    delta)-private, rounded down.

    >>> round(1 / noise_ratio(0.1, 1e-5), 2)
    30.75
    """
    return _ratio(
        _checks.number("epsilon", epsilon, 0, math.inf, closed="neither"),
        _checks.number("delta", delta, 0, 1, closed="neither"),
    )


@functools.lru_cache(maxsize=64)
def _ratio(epsilon, delta):
    return float(gaussian_mu(epsilon, delta))


def _upper(upper):
    # Far from where sums overflow and noise underflows.
    return _checks.number("upper", upper, 1e-100, 1e100)


def _generator(generator):
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be None or a torch.Generator, got {generator!r:.40}")
    return generator


def _bounded(values, upper):
    values = _real("values", values)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"values must be a list of one number at least, got shape {tuple(values.shape)}"
        )
    return values.nan_to_num(nan=0.0, posinf=upper, neginf=0.0).clamp(0, upper)


def _real(name, values):
    """`values` as float64; what is no number is refused without showing it."""
    try:
        if not isinstance(values, torch.Tensor):
            entries = np.asarray(values)
            whole = entries.dtype.kind == "O" and all(
                isinstance(entry, numbers.Real) for entry in entries.flat
            )
            if entries.dtype.kind not in "biuf" and not whole:
                raise TypeError
            if whole:  # 10^400 is no float64, and whether a value lies outside must not be seen
                cut = [min(max(entry, -1e300), 1e300) for entry in entries.flat]
                entries = np.asarray(cut, dtype=np.float64).reshape(entries.shape)
            # lists would go through PyTorch's default type
            values = torch.from_numpy(entries.astype(np.float64))
        if values.is_complex():
            raise TypeError
        return values.to("cpu", torch.float64).detach()
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # its message would show a value
        raise ValueError(f"{name} must be real numbers, got {type(values).__name__}") from None


def _noisy(exact, std, generator, *, ratio, most, numbers=1):
    """`exact` and N(0, std^2), where `std` is sensitivity / ratio for all `numbers` of the release.

    Without a generator sum and noise are added on a grid g, which moves two releases apart by
    sqrt(numbers) g more; what floats add to `exact` is less than that again. No number of `exact`
    can exceed `most`, so that whether the grid has room for them is known without them: an error
    that depended on private values would tell about them.
    """
    if generator is not None:
        _check_room(most, std)
        return noisy(exact, std, generator)

    # at most, as a share of the sensitivity at the noise that it takes
    moved = 2 * math.sqrt(numbers) / CELLS / ratio
    if not moved <= 0.5:
        raise ValueError(
            "epsilon must be large enough for noise on a grid, got sensitivity / noise of "
            f"{ratio:g}"
        )
    std = std / (1 - moved)
    _check_room(most, grid_of(std))
    return noisy(exact, std, SecureStream())


def _check_room(most, unit):
    """float64 tells multiples of `unit` apart up to `most` (and a little more, for rounding)."""
    if not most / unit <= MOST_CELLS / 2:
        raise ValueError(
            f"epsilon must be smaller: beside what so many values may add up to, {most:g}, noise "
            "is lost"
        )


def _square_root(bins):
    """First column of the Toeplitz square root of the matrix of prefix sums: binom(2k, k) / 4^k."""
    k = torch.arange(1, bins, dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(1 - 1 / (2 * k), dim=0)])


def _convolved(column, vector):
    """The lower triangular Toeplitz matrix with this first column, times the vector."""
    size = 2 * len(column)
    return torch.fft.irfft(torch.fft.rfft(column, size) * torch.fft.rfft(vector, size), size)[
        : len(column)
    ]


def _noisy_prefixes(values, upper, bins, ratio, generator):
    """Noisy numbers of values in the first 1, 2, ... bins, monotone, (bins,).

    They are counted from the top, and n is public, so that a value of 0 need not be counted.
    """
    places = (values[values > 0] / upper * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(places, minlength=bins).double().flip(0)
    column = _square_root(bins)
    std = float(column.square().sum().sqrt()) / ratio
    if generator is None:
        found = _convolved(
            column,
            _noisy(
                _convolved(column, counts), std, None, ratio=ratio, most=len(values), numbers=bins
            ),
        )
    else:
        _check_room(len(values), std)
        found = counts.cumsum(0) + std * _convolved(column, gaussian_noise((bins,), 1.0, generator))
    above = torch.from_numpy(isotonic_regression(found.numpy()).x).clamp(0, len(values))
    return len(values) - torch.cat([above[:-1].flip(0), torch.zeros(1, dtype=torch.float64)])


def _read_off(prefixes, quantiles, upper, n):
    """Where the curve of prefix sums, linear within a bin, reaches each quantile's rank."""
    bins, ranks = len(prefixes), quantiles * n
    place = torch.searchsorted(prefixes, ranks).clamp(max=bins - 1)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), prefixes])[place]
    share = ((ranks - before) / (prefixes[place] - before)).nan_to_num(nan=1.0).clamp(0, 1)
    return (place + share) / bins * upper
