r"""Epsilon by privacy loss distributions for many histories at once.

Individual accounting gives every example its own history: how many steps it took part in at each of
a few noise levels. Each history has its own composed privacy loss; this module computes the
epsilons of tens of thousands of them in seconds.

What makes it cheap. Losses of independent steps add, so on a common grid the characteristic
function of history i is :math:`\prod_j \varphi_j(\theta)^{n_{ij}}`: the logarithms are one matrix
product, counts times levels. The composed loss is smooth, so its characteristic function has died
out after a few dozen of the thousands of frequencies. And delta at a given epsilon is linear in the
composed distribution, so it can be read off in the frequency domain, without transforming back:

.. math::
    \delta_i(\varepsilon) = \frac{1}{N} \sum_k \Phi_i(k)\, \overline{W_\varepsilon(k)}, \qquad
    W_\varepsilon = \text{transform of } (1 - e^{\varepsilon - l})_+ \text{ on the grid}.

What makes it sound. Steps are discretised by connecting the dots and tilted as in `pld`; the window
holds all but a bounded mass of every history (Chernoff); losses above the steps' caps count as
delta; the frequencies left out are bounded by the largest modulus among them. All these bounds are
added to delta. Between the epsilons that are looked at, delta is convex in :math:`e^\varepsilon`
(it is a mean of such functions), so a chord is an upper bound. Histories of like epsilon, like best
tilt and like length share a grid. Of more than 128 levels only 64 nodes are discretised; a step
between two of them is hidden in a mixture of theirs (`accounting.levels`).

A bound is a function of its own history, up to the rounding errors of floats: the other histories
do not move it. What a history is grouped by is its own, and the grid, tilt and epsilons of a group
follow from the group's public name, from the levels and from `steps`, not from its members. So
what is released of many epsilons has the sensitivity of one history (`dpcompanion.release`).

Memory: below 500 MB beside the counts, whatever their number.

>>> counts = torch.tensor([[1000, 0], [0, 1000], [500, 500], [0, 0]])
>>> run = dict(sample_rate=0.01, noise_multipliers=[1.0, 2.0])
>>> epsilon_of_histories(counts, **run, delta=1e-5).round(decimals=2)
tensor([1.8300, 0.6200, 1.4000, 0.0000], dtype=torch.float64)
"""

import dataclasses
import math

import numpy as np
import torch

from dpcompanion import _checks
from dpcompanion.accounting.gaussian import gaussian_epsilon
from dpcompanion.accounting.levels import Levels
from dpcompanion.accounting.loss import DIRECTIONS, LARGEST_NOISE, LEAST_RATE, StepLoss
from dpcompanion.accounting.pld import LOG_CAPPED, ROUNDING, TRANSFORM_ERROR, WINDOW_LOG_TAIL

#: What discretisation may add to epsilon, relatively.
TOLERANCE = 1e-3

BLOCK = 1 << 27  # counts, of some histories at all levels, that are worked on at a time
# what costs so much less than the most expensive kind counts as so much: one grid holds all losses
SPREAD = 1e12
_BUCKET = 1.5  # histories whose epsilons lie within this factor share a grid
_TILTS = 8  # in each octave, among which a history's best one is sought
_OFFSETS = 4  # of tilts, in each octave, by which windows are bounded
_ASKED = 512  # histories that try all tilts, where there are many
_IMPOSSIBLE = 1e30  # stands for an infinite moment, so that none times it is none
_LARGEST_GRID = 1 << 20
_LEAST_DELTA = 1e-300
_LEAST_NOISE = 1e-4  # with less, sampling is not counted: no grid holds such losses
_LARGEST_TABLE = 1 << 23  # complex numbers in one table of frequencies
MOST_LEVELS = 128  # levels whose losses are all discretised
MIXTURE_NODES = 64  # of more levels those that are; the others are mixtures of them
_ROWS = 4096  # histories that are worked on at a time


def epsilon_of_histories(counts, *, sample_rate, noise_multipliers, delta, steps=None):
    """Epsilon of each history of steps of the sampled Gaussian mechanism: an upper bound, the worse
    of both directions.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        counts: (n, levels) whole numbers: the steps of history i at level j.
        sample_rate: in (0, 1], the same for all steps.
        noise_multipliers: (levels,), above 0: the noise over the sensitivity at each level.
        delta: in [1e-300, 1): below, floats lose digits.
        steps: at least as many as any history has, such as those of the run; by default those of
            the longest one, which moves the others' bounds by up to a hundred-thousandth of delta.

    Returns:
        (n,) float64 tensor, about 0.1% above the exact value; with noise multipliers below 1e-4
        as if every step took everybody.

    Raises:
        ValueError: an argument outside its range, or counts that do not fit the levels.
    """
    sample_rate = max(_checks.number("sample_rate", sample_rate, 0, 1, closed="right"), LEAST_RATE)
    _checks.in_interval("noise_multipliers", noise_multipliers, 0, math.inf, closed="right")
    delta = _checks.number("delta", delta, _LEAST_DELTA, 1, closed="left")
    counts = _whole(counts)
    levels = (
        torch.as_tensor(_checks.unlabelled(noise_multipliers), dtype=torch.float64)
        .reshape(-1)
        .clamp(max=LARGEST_NOISE)
    )
    levels = levels.tolist()
    if counts.ndim != 2 or counts.shape[1] != len(levels):
        raise ValueError(
            f"counts must have shape (n, {len(levels)}), one column for each noise multiplier, "
            f"got {tuple(counts.shape)}"
        )
    longest = float(total_steps(counts).max()) if counts.numel() else 0.0
    if steps is not None:
        steps = _checks.whole_number("steps", steps, 0)
        if steps < longest:
            raise ValueError(
                f"steps must be at least those of the longest history, {longest:.0f}, got {steps}"
            )
    if sample_rate == 1:
        return _without_sampling(counts, levels, delta)
    if levels and min(levels) < _LEAST_NOISE:
        run = {"sample_rate": sample_rate, "delta": delta, "steps": steps or int(longest)}
        return _with_little_noise(counts, levels, run)
    epsilon = torch.zeros(len(counts), dtype=torch.float64)
    if not longest:
        return epsilon
    levels = [min(level, SPREAD * min(levels)) for level in levels]
    log_capped = LOG_CAPPED + math.log(delta) - math.log(steps or longest)
    own = {1 / level: level for level in levels}
    between = Levels.between(
        [1 / level for level in levels],
        most=len(levels) if len(levels) <= MOST_LEVELS else MIXTURE_NODES,
    )
    losses = [
        {
            node: StepLoss(sample_rate, own.get(node, 1 / node), direction, log_capped)
            for node in between.sensitivities.tolist()
        }
        for direction in DIRECTIONS
    ]
    block = max(BLOCK // len(levels), 1)
    for part, found in zip(counts.split(block), epsilon.split(block)):
        part, which = distinct_rows(part)
        for own_losses in losses:
            torch.maximum(
                found,
                epsilons_in_one_direction(part, between, own_losses, float(delta))[which],
                out=found,
            )
    # Next to no noise leaves losses that no tilt resolves.
    unresolved = epsilon.isinf()
    if unresolved.any():
        epsilon[unresolved] = _without_sampling(counts[unresolved], levels, delta)
    return epsilon


def _whole(counts):
    """Counts that were given, on the CPU, in a type that PyTorch computes with."""
    counts = counts if isinstance(counts, torch.Tensor) else torch.as_tensor(np.asarray(counts))
    if counts.dtype in (torch.uint16, torch.uint32, torch.uint64):
        counts = counts.to(torch.int64)
    whole = not counts.is_floating_point() and counts.dtype != torch.bool
    if counts.is_floating_point() or (
        whole and counts.numel() and not 0 <= counts.min() <= counts.max() <= 2**53
    ):
        _checks.in_interval("counts", counts, 0, 2**53)
        if not torch.equal(counts, counts.round()):
            raise ValueError("counts must be whole numbers, got fractions")
    return counts.cpu()


def _with_little_noise(counts, levels, run):
    """Epsilon of histories where some levels have less noise than a grid resolves."""
    noisy = torch.tensor(levels, dtype=torch.float64) >= _LEAST_NOISE
    rest = [level for level in levels if level >= _LEAST_NOISE]
    return torch.where(
        (counts[:, ~noisy] > 0).any(dim=1),
        _without_sampling(counts, levels, run["delta"]),
        epsilon_of_histories(counts[:, noisy], noise_multipliers=rest, **run),
    )


def _without_sampling(counts, levels, delta):
    """Epsilon of histories whose steps take everybody, which is no less than that of a sample."""
    each = 1 / torch.tensor(levels, dtype=torch.float64) ** 2
    squares = torch.cat([part.double() @ each.clamp(max=1e300) for part in counts.split(_ROWS)])
    squares[(counts[:, each.isinf()] > 0).any(dim=1)] = math.inf
    # A hair up for what adding up thousands of levels rounds.
    return gaussian_epsilon(torch.sqrt(squares) * (1 + 2.0**-40), delta / ROUNDING)


def _moments(counts, table):
    """counts (n, levels) times a table (levels, m) of logarithms, some of them infinite: infinite
    where one of these is counted at least once.
    """
    product = counts.double() @ table.clamp(max=_IMPOSSIBLE)
    return product.masked_fill_(product > 0.5 * _IMPOSSIBLE, math.inf)


def distinct_rows(counts):
    """The distinct rows, and which of them each row is. Two equal rows may both be kept."""
    weights = torch.rand(
        counts.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    marks, which = torch.cat([part.double() @ weights for part in counts.split(_ROWS)]).unique(
        return_inverse=True
    )
    if 2 * len(marks) > len(counts):
        return counts, torch.arange(len(counts))
    first = torch.zeros(len(marks), dtype=torch.int64).index_copy_(
        0, which, torch.arange(len(counts))
    )
    rows = counts[first]
    # Two rows that differ may have the same mark.
    other = torch.cat(
        [
            (part != rows[own]).any(dim=1)
            for part, own in zip(counts.split(_ROWS), which.split(_ROWS))
        ]
    ).nonzero()[:, 0]
    which[other] = torch.arange(len(other)) + len(rows)
    return torch.cat([rows, counts[other]]), which


def total_steps(counts):
    """The steps of each history."""
    return torch.cat([part.double().sum(dim=1) for part in counts.split(_ROWS)])


def epsilons_in_one_direction(counts, levels, steps, delta):
    """Epsilon of histories, counts (n, levels); `steps` at the levels' nodes, by sensitivity."""
    total = total_steps(counts)
    spread = math.sqrt(float(total.max())) * max(step.std for step in steps.values())
    narrow = min(step.std for step in steps.values())
    # A history's best tilt lies far from both ends, and where they are does not move what is
    # between them.
    tilts = _octaves(1e-3 / max(spread, 1e-3), 1e2 / min(max(narrow, 1e-12), 1.0), _TILTS)
    mgf = levels.blend(
        torch.stack(
            [
                torch.where(step.log_mgf(1.2 * tilts).isfinite(), step.log_mgf(tilts), math.inf)
                for step in steps.values()
            ]
        )
    )
    # A little less than delta leaves room for the capped losses.
    bonus = -math.log(delta * (1 - 2 * math.exp(LOG_CAPPED))) - torch.log1p(tilts)
    # Chernoff's bound with the factor of Balle et al. (as in `pld`): where to look first.
    guess, at = _least(
        counts,
        mgf,
        lambda moments, rows, of: (moments + bonus[of]) / tilts[of] - torch.log1p(1 / tilts[of]),
    )
    result = torch.where(total > 0, guess.clamp(min=0.0), 0.0)
    floor = 1e-9 / float(tilts[-1])
    open_ = (result > floor).nonzero()[:, 0]
    # where the guess is least, a smaller epsilon has the least bound on delta, too
    own = tilts[at[open_]]
    for _ in range(6):
        # without a finite guess no tilt resolves a history's losses
        finite = result[open_].isfinite()
        open_, own = open_[finite], own[finite]
        if not len(open_):
            break
        names, which = torch.stack(
            [
                torch.floor(torch.log(result[open_]) / math.log(_BUCKET)),
                torch.floor(torch.log2(own)),
                torch.floor(torch.log2(total[open_])),
            ],
            dim=1,
        ).unique(dim=0, return_inverse=True)
        again = []
        for place, (size, tilt, length) in enumerate(names.tolist()):
            members = open_[which == place]
            group = _Group.named(size, tilt, length, delta)
            found = group.epsilons(counts[members], levels, steps, result[members])
            # The guess is itself a bound; what lies below the group's range is looked at again, on
            # a finer grid.
            result[members] = torch.minimum(result[members], found)
            again.append(members[(found < group.low) & (found > floor)])
        open_ = torch.cat(again)
        epsilon = result[open_][:, None]
        _, at = _least(
            counts[open_],
            mgf,
            lambda moments, rows, of: (
                moments
                - tilts[of] * (epsilon[rows] + torch.log1p(1 / tilts[of]))
                - torch.log1p(tilts[of])
            ),
        )
        own = tilts[at]
    return result


def _octaves(low, high, each):
    """Powers of two, `each` in an octave, from about `low` to about `high`: where the ends lie does
    not move what is between them.
    """
    first, last = math.floor(each * math.log2(low)), math.ceil(each * math.log2(high))
    return 2 ** (torch.arange(first, last + 1, dtype=torch.float64) / each)


def _least(counts, table, value):
    """The least of `value` over the columns of a table, and its column, for each history (n,).

    `value` gets some histories' moments (m, k), which histories they are and which columns. Some
    histories are asked about all columns, the others about those in between which these have their
    least, and about all if they have it at an end or find nothing possible.
    """
    everywhere = torch.arange(table.shape[1])
    least = torch.full((len(counts),), math.inf, dtype=torch.float64)
    at = torch.zeros(len(counts), dtype=torch.int64)

    def ask(rows, columns):
        for part in rows.split(_ROWS):
            least[part], which = value(
                _moments(counts[part], table[:, columns]), part, columns
            ).min(dim=1)
            at[part] = columns[which]

    rows = torch.arange(len(counts))
    if len(counts) <= _ROWS:
        ask(rows, everywhere)
        return least, at
    ask(rows[:: len(counts) // _ASKED], everywhere)
    asked = at[:: len(counts) // _ASKED]
    some = everywhere[max(int(asked.min()) - 1, 0) : int(asked.max()) + 2]
    ask(rows, some)
    if len(some) < len(everywhere):
        beside = (at == some[0]) | (at == some[-1]) | (least > 1e-9 * _IMPOSSIBLE)
        ask(beside.nonzero()[:, 0], everywhere)
    return least, at


@dataclasses.dataclass(frozen=True)
class _Group:
    """What histories of like epsilon, tilt and length have in common, none of it from its members.

    Attributes:
        low, high: the epsilons that are looked at.
        tilt: not above that of any member. A larger one than a member's own would magnify what is
            added to its delta, beyond the point where its moments explode without limit; a smaller
            one does not, for the logarithm of the moment is convex.
        interval: spacing of the grid of losses.
        delta: at which epsilon is asked for.
    """

    low: float
    high: float
    tilt: float
    interval: float
    delta: float

    @classmethod
    def named(cls, size, tilt, length, delta):
        """The group of these exponents: of the guess, of the tilt, of the number of steps."""
        low, tilt = _BUCKET**size / 2, 2.0**tilt
        # Four fifths of the tolerance would be the average; the rest covers what the chords add.
        allowed = 12 * 0.8 * TOLERANCE * low
        interval = min(math.sqrt(allowed / (2 ** (length + 1) * (1 + tilt))), 0.2 / tilt)
        return cls(0.6 * low, _BUCKET ** (size + 1), tilt, interval, delta)

    def epsilons(self, counts, levels, steps, guess):
        """Epsilon of the members, inf where the grid has none; one below `low` is resolved badly.

        Members whose sums fill too large a grid get a coarser one.
        """
        found = torch.full((len(counts),), math.inf, dtype=torch.float64)
        if not self.interval:  # losses beyond what floats resolve
            return found
        used = counts.amax(dim=0).nonzero()[:, 0]
        counts, levels = counts[:, used], levels.only(used)
        steps = [steps[node] for node in levels.sensitivities.tolist()]
        ends = self._window(counts, levels, steps)
        points = (ends[1] - ends[0]) / self.interval + 2
        coarser = torch.ceil(torch.log2(points / _LARGEST_GRID)).clamp(min=0)
        for exponent in coarser[coarser.isfinite()].unique().tolist():
            rows = coarser == exponent
            group, own = self, ends[:, rows]
            if exponent:
                group = dataclasses.replace(self, interval=self.interval * 2**exponent)
                own = group._window(counts[rows], levels, steps)
            found[rows] = group._on_grid(counts[rows], levels, steps, guess[rows], own)
        return found

    def _window(self, counts, levels, steps):
        """Ends (2, n) that hold each member's tilted sum on the grid but a small mass (as in
        `pld`).
        """
        here = torch.tensor([self.tilt], dtype=torch.float64)
        base = levels.blend(torch.stack([step.log_mgf(here) for step in steps]))
        # One over the standard deviation of the tilted sum, were the steps Gaussian mechanisms.
        few, many = sorted((self.tilt, math.sqrt((self.tilt + 0.5) / self.high)))
        offsets = _octaves(0.01 * few, 100 * many, _OFFSETS)
        ends = []
        for sign in (-1, 1):
            tilts = self.tilt + sign * offsets
            of_the_grid = (tilts * (1 + tilts)).clamp(min=0) * self.interval**2 / 8
            moments = levels.blend(torch.stack([step.log_mgf(tilts) for step in steps]))
            reach, _ = _least(
                counts,
                moments - base + of_the_grid,
                lambda moments, rows, of: (moments - WINDOW_LOG_TAIL) / offsets[of],
            )
            ends.append(sign * reach)
        return torch.stack(ends)

    def _on_grid(self, counts, levels, steps, guess, ends):
        """Epsilon of members whose sums lie between these ends."""
        spectra = _Spectra(self, levels, steps, float(ends[0].min()), float(ends[1].max()))
        found = torch.empty(len(counts), dtype=torch.float64)
        frequencies = spectra.frequencies(counts)
        for kept in frequencies.unique().tolist():
            rows = (frequencies == kept).nonzero()[:, 0]
            # Epsilons between which the logarithm of delta falls by at most a tenth.
            wanted = math.ceil(10 * self.tilt * (self.high - self.low))
            points = max(2, min(wanted, _LARGEST_TABLE // kept)) + 1
            grid = torch.linspace(self.low, self.high, points, dtype=torch.float64)
            grid = torch.cat([torch.zeros(1, dtype=torch.float64), grid])
            found[rows] = spectra.epsilons(counts[rows], guess[rows], grid, kept)
        return found


class _Spectra:
    """The levels' losses, tilted and discretised on a group's grid, in the frequency domain."""

    def __init__(self, group, levels, steps, start, stop):
        self.group, self.levels, self.log_capped = group, levels, steps[0].log_capped
        self.size = 1 << max(6, math.ceil(math.log2((stop - start) / group.interval + 2)))
        self.first = math.floor(start / group.interval)
        transforms, log_mass, self.cut = [], [], 0.0
        for step in steps:
            at, masses, log_total, lost = step.discretize(group.interval, group.tilt)
            circle = torch.zeros(self.size, dtype=torch.float64)
            circle.index_add_(0, (torch.arange(len(masses)) + at) % self.size, masses)
            transforms.append(torch.fft.rfft(circle))
            log_mass.append(log_total)
            self.cut = max(self.cut, lost)
        self.transforms = torch.stack(transforms)
        # the largest modulus from each frequency on
        self.moduli = self.transforms.abs().flip(1).cummax(dim=1).values.flip(1)
        log_mass = torch.tensor(log_mass, dtype=torch.float64)[:, None]
        #: Logarithms of the levels' masses before tilting, (levels, 1).
        self.log_mass = levels.blend(log_mass)
        # The weights of the two nodes in a mixture, once it is tilted and normalised.
        self.log_rest, self.log_share = (
            torch.log(weight) + (log_mass[node] - self.log_mass)[:, 0]
            for weight, node in ((1 - levels.share, levels.low), (levels.share, levels.high))
        )

    def log_phi(self, kept):
        """Logarithms of the levels' first frequencies, (levels, kept)."""
        levels, first = self.levels, self.transforms[:, :kept]
        if levels.plain:
            return torch.log(first[levels.low])
        rest, share = torch.exp(self.log_rest)[:, None], torch.exp(self.log_share)[:, None]
        return torch.log(rest * first[levels.low] + share * first[levels.high])

    def beyond(self, kept):
        """Logarithms of bounds on the levels' moduli from this frequency on, (levels,)."""
        logs = torch.log(self.moduli[:, kept]).clamp(min=-_IMPOSSIBLE)[:, None]
        return self.levels.blend(logs, self.log_rest, self.log_share)[:, 0]

    def frequencies(self, counts):
        """How many frequencies each history needs, (n,): the least power of two after which its
        moduli are negligible, or all.
        """
        needed = torch.full((len(counts),), self.size // 2 + 1)
        rows, kept = torch.arange(len(counts)), 32
        while len(rows) and kept <= self.size // 2:
            beyond = self.beyond(kept)
            died = torch.cat([counts[part].double() @ beyond for part in rows.split(_ROWS)]) < -40
            needed[rows[died]] = kept
            rows, kept = rows[~died], 2 * kept
        return needed

    def epsilons(self, counts, guess, grid, kept):
        """Where each history's delta on a grid of epsilons reaches the group's, by so many
        frequencies; inf where nowhere.
        """
        log_phi, beyond = self.log_phi(kept), self.beyond(kept) if kept <= self.size // 2 else None
        log_modulus = log_phi.real.clamp(min=-_IMPOSSIBLE)
        payoff, heaviest = self._payoffs(grid, kept)
        found, ratio = torch.empty(len(counts), dtype=torch.float64), 0.0
        # Of those with like guesses in turn: their epsilons lie on the same few points of the grid.
        for rows in guess.argsort().split(max(1, min(_ROWS, _LARGEST_TABLE // kept))):
            part = counts[rows].double()
            total = part.sum(dim=1, keepdim=True)
            phases, modulus = part @ log_phi.imag, torch.exp(part @ log_modulus)
            real, imaginary = modulus * torch.cos(phases), modulus * torch.sin(phases)
            # Rounding errors of a power grow with it, and are relative to the bulk, not to the
            # value.
            slack = (
                2 * math.exp(WINDOW_LOG_TAIL)
                + total * (self.cut + TRANSFORM_ERROR)
                + 1e-14
                + 2 * kept / self.size * self._lost()
            )
            tail = torch.zeros_like(slack)
            if beyond is not None:
                left_out = self.size // 2 + 1 - kept
                tail = torch.exp(part @ beyond)[:, None] * 2 * left_out / self.size
            masses, capped = part @ self.log_mass, total * math.exp(self.log_capped)

            def on(points):
                value = real @ payoff.real[:, points] + imaginary @ payoff.imag[:, points]
                value = value.clamp(min=0) + slack + tail * heaviest[points]
                log_deltas = masses - self.group.tilt * grid[points] + torch.log(value)
                deltas = torch.exp(log_deltas.clamp(max=0.0)) + capped
                return _read_off(deltas, grid[points], self.group.delta)

            least, most = float(guess[rows[0]]) * ratio, float(guess[rows[-1]])
            first, last = (int(torch.searchsorted(grid, end)) for end in (least, most))
            first = max(first - 2, 0)
            own = on(slice(first, last + 1))
            if first and bool((own <= grid[first]).any()):
                own = on(slice(None))
            found[rows], ratio = own, 0.98 * float((own / guess[rows]).min())
        return found

    def _payoffs(self, grid, kept):
        """The weights (kept, epsilons) with which frequencies enter delta, and an upper bound on
        the sum of the payoffs.

        A payoff is the difference of two geometric series, cut off at the end of the circle, and so
        is its transform.
        """
        tilt, interval, first, size = self.group.tilt, self.group.interval, self.first, self.size
        # Each frequency but the first (and last) stands for itself and its conjugate.
        weight = torch.full((kept, 1), 2.0 / size, dtype=torch.float64)
        weight[0] = 1.0 / size
        if kept == size // 2 + 1:
            weight[-1] = 1.0 / size
        # the first position above each epsilon
        start = torch.ceil(grid / interval - first).clamp(0, size).long()
        above = ((start + first).double() * interval - grid).clamp(min=0)
        count, frequency = size - start, torch.arange(kept)[:, None]
        # The transform counts positions modulo the circle, so a mass has the phase of its index.
        angles = (
            (frequency * index % size).double() * (-2 * math.pi / size)
            for index in (start + first, count)
        )
        begin, end = (torch.polar(torch.ones_like(angle), angle) for angle in angles)

        def series(rate):
            """The sum of exp(-rate above) over the positions above, transformed."""
            decay = torch.complex(
                torch.full((kept, 1), -rate * interval, dtype=torch.float64),
                -2 * math.pi / size * frequency.double(),
            )
            return (
                begin
                * torch.exp(-rate * above)
                * (1 - end * torch.exp(-rate * interval * count.double()))
                / -torch.expm1(decay)
            )

        columns = series(tilt) - series(tilt + 1)
        return columns * weight, columns[0].real * (1 + 1e-9) + self._lost()

    def _lost(self):
        """What a transformed payoff may have lost to rounding: a few last bits of the larger
        series, which is up to 1 / (tilt interval).
        """
        return 1e-15 / (self.group.tilt * self.group.interval)


def _read_off(deltas, grid, delta):
    """The least epsilon where chords of delta over exp(epsilon) reach the target; inf without."""
    met = deltas <= delta
    index = met.double().argmax(dim=1)
    never = ~met.any(dim=1)
    before = (index - 1).clamp(min=0)
    row = torch.arange(len(deltas))
    high, low = deltas[row, before], deltas[row, index]
    share = ((high - delta) / (high - low).clamp(min=5e-324)).clamp(0, 1)
    # In units of exp(epsilon) at the chord's upper end: in those of the grid's end a low epsilon
    # would underflow to 0.
    epsilon = grid[index] + torch.log(share + (1 - share) * torch.exp(grid[before] - grid[index]))
    epsilon = torch.minimum(torch.maximum(epsilon * (1 + 1e-12), grid[before]), grid[index])
    return torch.where(never, math.inf, torch.where(index == 0, 0.0, epsilon))
