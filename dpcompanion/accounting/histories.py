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
(it is a mean of such functions), so a chord is an upper bound. Histories of like epsilon and like
best tilt share grid, tilt and window. Of more than 128 levels only 64 nodes are discretised; a step
between two of them is hidden in a mixture of theirs (`accounting.levels`).

Memory: below 500 MB beside the counts, whatever their number.

>>> counts = torch.tensor([[1000, 0], [0, 1000], [500, 500], [0, 0]])
>>> run = dict(sample_rate=0.01, noise_multipliers=[1.0, 2.0])
>>> epsilon_of_histories(counts, **run, delta=1e-5).round(decimals=2)
tensor([1.8300, 0.6200, 1.4000, 0.0000], dtype=torch.float64)
"""

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
_BUCKET = 1.5  # histories whose epsilons lie within this factor share a grid
_ASKED = 512  # histories that try all tilts, where there are many
_IMPOSSIBLE = 1e30  # stands for an infinite moment, so that none times it is none
_LARGEST_GRID = 1 << 20
_LEAST_DELTA = 1e-300
_LARGEST_TABLE = 1 << 23  # complex numbers in one table of frequencies
MOST_LEVELS = 128  # levels whose losses are all discretised
MIXTURE_NODES = 64  # of more levels those that are; the others are mixtures of them
_ROWS = 4096  # histories that are worked on at a time


def epsilon_of_histories(counts, *, sample_rate, noise_multipliers, delta):
    """Epsilon of each history of steps of the sampled Gaussian mechanism: an upper bound, the worse
    of both directions.

    Neighbouring relation: add or remove one example. Sampler: Poisson.

    Args:
        counts: (n, levels) whole numbers: the steps of history i at level j.
        sample_rate: in (0, 1], the same for all steps.
        noise_multipliers: (levels,), above 0: the noise over the sensitivity at each level.
        delta: in [1e-300, 1): below, floats lose digits.

    Returns:
        (n,) float64 tensor, about 0.1% above the exact value.

    Raises:
        ValueError: an argument outside its range, or counts that do not fit the levels.
    """
    sample_rate = max(_checks.number("sample_rate", sample_rate, 0, 1, closed="right"), LEAST_RATE)
    _checks.in_interval("noise_multipliers", noise_multipliers, 0, math.inf, closed="right")
    delta = _checks.number("delta", delta, _LEAST_DELTA, 1, closed="left")
    counts = counts if isinstance(counts, torch.Tensor) else torch.as_tensor(np.asarray(counts))
    # which PyTorch stores and hardly computes with
    if counts.dtype in (torch.uint16, torch.uint32, torch.uint64):
        counts = counts.to(torch.int64)
    whole = not counts.is_floating_point() and counts.dtype != torch.bool
    if counts.is_floating_point() or (
        whole and counts.numel() and not 0 <= counts.min() <= counts.max() <= 2**53
    ):
        _checks.in_interval("counts", counts, 0, 2**53)
        if not torch.equal(counts, counts.round()):
            raise ValueError("counts must be whole numbers, got fractions")
    levels = (
        torch.as_tensor(_checks.unlabelled(noise_multipliers), dtype=torch.float64)
        .reshape(-1)
        .clamp(max=LARGEST_NOISE)
    )
    # one grid holds all losses: what costs a trillionth of the most expensive level counts as that
    if len(levels):
        levels = levels.clamp(max=1e12 * float(levels.min()))
    levels = levels.tolist()
    if counts.ndim != 2 or counts.shape[1] != len(levels):
        raise ValueError(
            f"counts must have shape (n, {len(levels)}), one column for each noise multiplier, "
            f"got {tuple(counts.shape)}"
        )
    counts = counts.cpu()
    if sample_rate == 1:
        return _without_sampling(counts, levels, delta)
    epsilon = torch.zeros(len(counts), dtype=torch.float64)
    if not counts.numel() or not len(used := counts.amax(dim=0).nonzero()[:, 0]):
        return epsilon
    log_capped = LOG_CAPPED + math.log(delta) - math.log(float(total_steps(counts).max()))
    own = {1 / levels[j]: levels[j] for j in used.tolist()}
    between = Levels.between(
        [1 / levels[j] for j in used.tolist()],
        most=len(used) if len(used) <= MOST_LEVELS else MIXTURE_NODES,
    )
    steps = [
        {
            node: StepLoss(sample_rate, own.get(node, 1 / node), direction, log_capped)
            for node in between.sensitivities.tolist()
        }
        for direction in DIRECTIONS
    ]
    block = max(BLOCK // len(used), 1)
    for part, found in zip(counts.split(block), epsilon.split(block)):
        part, which = distinct_rows(part[:, used])
        for own_steps in steps:
            torch.maximum(
                found,
                epsilons_in_one_direction(part, between, own_steps, float(delta))[which],
                out=found,
            )
    # Next to no noise leaves losses that no tilt resolves.
    unresolved = epsilon.isinf()
    if unresolved.any():
        epsilon[unresolved] = _without_sampling(counts[unresolved], levels, delta)
    return epsilon


def _without_sampling(counts, levels, delta):
    """Epsilon of histories whose steps take everybody, which is no less than that of a sample."""
    each = 1 / torch.tensor(levels, dtype=torch.float64) ** 2
    squares = torch.cat([part.double() @ each for part in counts.split(_ROWS)])
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
    tilts = torch.from_numpy(
        np.geomspace(1e-3 / max(spread, 1e-3), 1e2 / min(max(narrow, 1e-12), 1.0), 160)
    )
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
        if not len(open_):
            break
        sizes, places = torch.log(result[open_]) / math.log(_BUCKET), torch.log2(own)
        keys = sizes.floor().long() * 2**20 + places.floor().long()
        again = []
        for key in keys.unique():
            here = keys == key
            members = open_[here]
            low, found = _bucket(
                counts[members],
                total[members],
                levels,
                steps,
                result[members],
                float(own[here].min()),
                delta,
            )
            # The guess is itself a bound; what lies below the bucket's range is looked at again, on
            # a finer grid.
            result[members] = torch.minimum(result[members], found)
            again.append(members[(found < low) & (found > floor)])
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


def _bucket(counts, total, levels, steps, guess, tilt, delta):
    """Epsilon of histories whose guesses and own tilts lie within a factor; also the least epsilon
    that this grid resolves well.

    `tilt` is the least of their own. A larger one than its own magnifies what is added to a
    history's delta, beyond the point where its moments explode without limit; a smaller one does
    not, for the logarithm of the moment is convex.
    """
    used = counts.amax(dim=0).nonzero()[:, 0]
    counts, levels = counts[:, used], levels.only(used)
    steps = [steps[node] for node in levels.sensitivities.tolist()]
    top, low = float(guess.max()), float(guess.min()) / 2
    most = float(total.max())
    if not math.isfinite(top):
        return 0.0, guess
    start, stop, _ = _window(counts, levels, steps, tilt, 0.0)
    # Four fifths of the tolerance would be the average; the rest covers what the chords add.
    interval = min(math.sqrt(12 * 0.8 * TOLERANCE * low / (most * (1 + tilt))), 0.2 / tilt)
    interval = max(interval, (stop - start) / (_LARGEST_GRID - 2))
    if interval == 0:  # losses beyond what floats resolve: the guesses are bounds, too
        return 0.0, guess
    start, stop, outside = _window(counts, levels, steps, tilt, interval)
    size = 1 << max(6, math.ceil(math.log2((stop - start) / interval + 2)))
    first = math.floor(start / interval)

    phi, log_mass, beyond, cut = _transforms(levels, steps, size, interval, tilt)
    # A grid of epsilons on which delta falls by at most a tenth of its logarithm a step.
    kept = _frequencies(counts, beyond, size)
    log_phi = torch.log(phi(kept))
    log_modulus = log_phi.real.clamp(min=-_IMPOSSIBLE)
    points = min(math.ceil(10 * tilt * (top - 0.6 * low)), _LARGEST_TABLE // kept)
    grid = torch.linspace(0.6 * low, top, max(2, points) + 1, dtype=torch.float64)
    grid = torch.cat([torch.zeros(1, dtype=torch.float64), grid])
    payoff, heaviest = _payoffs(grid, first, size, interval, tilt, kept)
    found, ratio = torch.empty(len(counts), dtype=torch.float64), 0.0
    # Of those with like guesses in turn: their epsilons lie on the same few points of the grid.
    for rows in guess.argsort().split(max(1, min(_ROWS, _LARGEST_TABLE // kept))):
        part, steps_taken = counts[rows].double(), total[rows][:, None]
        phases = part @ log_phi.imag
        modulus = torch.exp(part @ log_modulus)
        real, imaginary = modulus * torch.cos(phases), modulus * torch.sin(phases)
        # Rounding errors of a power grow with it, and are relative to the bulk, not to the value.
        slack = (
            outside
            + steps_taken * (cut + TRANSFORM_ERROR)
            + 1e-14
            + 2 * kept / size * _lost(tilt, interval)
        )
        left_out = size // 2 + 1 - kept
        tail = (
            torch.exp(part @ beyond(kept))[:, None] * 2 * left_out / size
            if left_out
            else torch.zeros_like(slack)
        )
        masses, capped = part @ log_mass, steps_taken * math.exp(steps[0].log_capped)

        def on(points):
            value = real @ payoff.real[:, points] + imaginary @ payoff.imag[:, points]
            value = value.clamp(min=0) + slack + tail * heaviest[points]
            log_deltas = masses - tilt * grid[points] + torch.log(value)
            return _read_off(torch.exp(log_deltas.clamp(max=0.0)) + capped, grid[points], delta)

        least, most = float(guess[rows[0]]) * ratio, float(guess[rows[-1]])
        first, last = (int(torch.searchsorted(grid, end)) for end in (least, most))
        first = max(first - 2, 0)
        own = on(slice(first, last + 1))
        if first and bool((own <= grid[first]).any()):
            own = on(slice(None))
        found[rows], ratio = own, 0.98 * float((own / guess[rows]).min())
    return 0.6 * low, found


def _transforms(levels, steps, size, interval, tilt):
    """The tilted and discretised losses of the levels in the frequency domain.

    Returns (k -> the first k frequencies (levels, k), logarithms of the masses before tilting
    (levels, 1), k -> logarithms of bounds on the moduli from frequency k on (levels,), bound on the
    mass that was cut from a step).
    """
    transforms, log_mass, cut = [], [], 0.0
    for step in steps:
        at, masses, log_total, lost = step.discretize(interval, tilt)
        circle = torch.zeros(size, dtype=torch.float64)
        circle.index_add_(0, (torch.arange(len(masses)) + at) % size, masses)
        transforms.append(torch.fft.rfft(circle))
        log_mass.append(log_total)
        cut = max(cut, lost)
    transforms = torch.stack(transforms)
    log_mass = torch.tensor(log_mass, dtype=torch.float64)[:, None]
    moduli = transforms.abs().flip(1).cummax(dim=1).values.flip(1)

    def log_moduli(k):
        return torch.log(moduli[:, k]).clamp(min=-_IMPOSSIBLE)

    mass = levels.blend(log_mass)
    if levels.plain:
        return lambda k: transforms[levels.low, :k], mass, lambda k: log_moduli(k)[levels.low], cut
    # The weights of the two nodes in the mixture, once it is tilted and normalised.
    log_rest = torch.log1p(-levels.share) + (log_mass[levels.low] - mass)[:, 0]
    log_share = torch.log(levels.share) + (log_mass[levels.high] - mass)[:, 0]

    def phi(k):
        rest, share = torch.exp(log_rest)[:, None], torch.exp(log_share)[:, None]
        return rest * transforms[levels.low, :k] + share * transforms[levels.high, :k]

    return phi, mass, lambda k: levels.blend(log_moduli(k)[:, None], log_rest, log_share)[:, 0], cut


def _window(counts, levels, steps, tilt, interval):
    """Ends that hold all tilted sums on the grid but a small mass, and that mass (as in `pld`)."""
    here = torch.tensor([tilt], dtype=torch.float64)
    base = levels.blend(torch.stack([step.log_mgf(here) for step in steps]))
    # Of a mixture somewhat less than its own, which only chooses where to look.
    variances = torch.tensor([step.tilted_variance(tilt) for step in steps], dtype=torch.float64)[
        levels.high
    ]
    variance = max(float((part.double() @ variances).max()) for part in counts.split(_ROWS))
    few, many = sorted((tilt, 1 / max(math.sqrt(variance), 1e-6 / tilt)))
    offsets = torch.from_numpy(
        np.geomspace(0.03 * few, 30 * many, int(20 * math.log10(1e3 * many / few)))
    )
    ends = []
    for sign in (1, -1):
        tilts = tilt + sign * offsets
        of_the_grid = (tilts * (1 + tilts)).clamp(min=0) * interval**2 / 8
        rise = (
            levels.blend(torch.stack([step.log_mgf(tilts) for step in steps])) - base + of_the_grid
        )
        reach, _ = _least(
            counts, rise, lambda moments, rows, of: (moments - WINDOW_LOG_TAIL) / offsets[of]
        )
        ends.append(float(reach.max()))
    return -ends[1], ends[0], 2 * math.exp(WINDOW_LOG_TAIL)


def _frequencies(counts, beyond, size):
    """How many frequencies to keep: the least power of two after which all moduli are negligible,
    or all of them.

    `beyond` gives the logarithm of the largest modulus of each level from a frequency on, or a
    bound on it.
    """
    kept = 32
    while kept <= size // 2:
        if max(float((part.double() @ beyond(kept)).max()) for part in counts.split(_ROWS)) < -40:
            return kept
        kept *= 2
    return size // 2 + 1


def _payoffs(grid, first, size, interval, tilt, kept):
    """The weights (kept, epsilons) with which frequencies enter delta, and an upper bound on the
    sum of the payoffs.

    A payoff is the difference of two geometric series, cut off at the end of the circle, and so is
    its transform.
    """
    # Multiplicities: each frequency but the first (and last) stands for itself and its conjugate.
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
    return columns * weight, columns[0].real * (1 + 1e-9) + _lost(tilt, interval)


def _lost(tilt, interval):
    """What a transformed payoff may have lost to rounding: a few last bits of the larger series,
    which is up to 1 / (tilt interval).
    """
    return 1e-15 / (tilt * interval)


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
