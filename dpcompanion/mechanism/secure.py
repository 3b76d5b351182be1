r"""Unpredictable random numbers: a cipher's stream, exact coins and gaps, Gaussian noise on a grid.

A model that is published leaves its noise behind. Anyone who can guess the noise subtracts it, so a
release needs more than a good statistical generator: its seed must be too long to try, and its
output must tell nothing of what comes next. `SecureStream` is the stream of ChaCha20 under a key of
256 bits, which by default the operating system draws and no file holds. The package `cryptography`
computes it.

Three laws are drawn from it without error, up to the cipher itself:

* coins: example :math:`i` is in with probability :math:`q_i`, exactly, for every double
  :math:`q_i`. The first 64 bits of a uniform number decide unless they equal those of :math:`q_i`;
  then further bits do.
* gaps: how many such coins of one rate come down before the next comes up,
  :math:`P(k \ge j) = (1 - q)^j`, for as much work as there are gaps. With :math:`U` uniform,
  :math:`k = \lfloor \ln(1 - U) / \ln(1 - q) \rfloor`; float64 decides unless the quotient lies
  within its error of a whole number, and then more bits and exact arithmetic do.
* noise: the multiple of a grid :math:`g` that lies nearest to :math:`Z \sim \mathcal N(0, s^2)`.
  With :math:`T` uniform in (0, 1/2) and a random sign, :math:`|Z| = -s\,\Phi^{-1}(T)`. 64 bits of
  sign and :math:`T`, and an inverse in float64, decide the multiple unless :math:`|Z|` lies within
  the error of a boundary between two; then more bits and exact arithmetic do. No tail is cut off.

A float Gaussian on a float sum is not as private as the account says: the low bits of what comes
out tell which sums are possible at all (Mironov 2012). With the sum :math:`S` on the grid too,
:math:`S + \mathrm{round}_g(Z) = \mathrm{round}_g(S + Z)`: what comes out is the exact Gaussian
mechanism on :math:`S`, rounded afterwards, and rounding costs nothing. `snapped` puts a sum there;
each of its :math:`d` numbers moves by :math:`g/2` at most, and so two sums that were :math:`C`
apart are at most :math:`C + \sqrt d\,g` apart.

Sharp edges. A process that is forked gets a key of its own. A virtual machine that is copied while
it runs does not. A stream with a given key repeats itself, which is what research wants and a
release does not: a run with a seed draws from streams whose keys are hashed from the seed
(`dpcompanion.mechanism.noise`). The time of a draw may tell something of it: a number that its
first bits leave open takes longer, and for an inverse in float64 nobody claims constant time, and
the key is not wiped from memory. What the grid and the rounding of the sum add to the sensitivity
is counted where a plan asks for it (`dpcompanion.mechanism.floats`).

>>> stream = SecureStream(key=bytes(32))  # a known key, for the example alone
>>> stream.normal((3,), std=1.0, grid=2.0**-3)
tensor([ 0.6250,  1.3750, -1.6250], dtype=torch.float64)
>>> stream.coins(8, 0.5).tolist()
[True, False, False, True, False, False, True, True]
"""

import fractions
import hashlib
import math
import os
import threading

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy.special import ndtri

from dpcompanion import _checks

KEY_BYTES = 32
#: How many cells of the grid there are to a standard deviation, at least.
CELLS = 2**24
# Bound on the relative error of `scipy.special.ndtri` for probabilities in [2^-65, 1/2]; a test
# holds it to a tenth.
_INVERSE_ERROR = 1e-14
# Below it lies a probability of noise for which no one bound on errors serves.
_TAIL = 2.0**-12
# Numbers that are worked out at a time: more fall out of the processor's cache.
_BLOCK = 2**14
#: Cells of the grid in a sum, at most: four times as many are whole numbers of float64 still.
MOST_CELLS = 2.0**51

# One thread of a forked process draws a new key, and the rest wait for it.
_FORKED = threading.Lock()
# How many forks lie behind this process: numbers of processes come again, as in namespaces.
_forks = 0


def _after_fork():
    global _forks
    _forks += 1
    _FORKED._at_fork_reinit()  # pyright: ignore[reportAttributeAccessIssue] typeshed lacks it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _here():
    return os.getpid(), _forks


class SecureStream:
    """ChaCha20 under a 256-bit key: words, coins, Gaussian noise on a grid.

    Every call takes the stream of a nonce of its own (the number of the call), so a stream that has
    made as many calls with the same key goes on alike: `get_state` and `set_state` hold that
    number, and the key only when they are asked.

    Args:
        key: 32 bytes; by default the operating system draws them.

    Raises:
        ValueError: for a key of another length.

    >>> SecureStream().words(2).dtype
    dtype('uint64')
    """

    device = torch.device("cpu")

    def __init__(self, key=None):
        self._drawn = key is None  # by the operating system
        if key is None:
            key = os.urandom(KEY_BYTES)
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(
                f"key must be {KEY_BYTES} bytes, got {type(key).__name__}"
                + (f" of length {len(key)}" if isinstance(key, bytes) else "")
            )
        self._key, self._calls, self._counting = key, 0, threading.Lock()
        self._process = _here()  # last: who finds it here finds the rest

    def __repr__(self):
        return f"SecureStream(<{8 * KEY_BYTES} bits>, calls={self._calls})"  # never the key

    def __reduce__(self):
        raise TypeError(
            "a SecureStream is not copied or sent to another process, which would draw the same "
            "numbers; make one there"
        )

    def get_state(self, *, with_key=False):
        """{"calls": how many were made}, and {"key": the key} where asked for: anyone with it knows
        all the noise.
        """
        self._own()
        return {"calls": self._calls} | ({"key": self._key} if with_key else {})

    def set_state(self, state):
        """Go on after so many calls, with the key of the state, or else with the present one."""
        if not isinstance(state, dict) or "calls" not in state:
            raise ValueError(
                "state must be a dict with the number of calls, as of get_state, got "
                f"{type(state).__name__}"
            )
        calls = _checks.whole_number("calls", state["calls"], 0, math.inf)
        if "key" in state:
            drawn = self._drawn
            self.__init__(state["key"])
            self._drawn = drawn
        self._own()
        self._calls = calls

    @property
    def key(self):
        """The key: anyone who has it knows every number of the stream."""
        self._own()
        return self._key

    @property
    def fingerprint(self):
        """A name of the key, 128 bits of its hash, from which the key cannot be found unless it
        came from a seed that can be guessed.

        >>> SecureStream(bytes(32)).fingerprint == SecureStream(bytes(32)).fingerprint
        True
        """
        return hashlib.sha256(b"dpcompanion fingerprint\0" + self.key).hexdigest()[:32]

    def _own(self):
        """After a fork, a new key: what the parent draws must not be drawn here."""
        if self._process != _here():
            with _FORKED:
                if self._process != _here():
                    self.__init__()

    def bound(self, total):
        """The stream of the next call for this tensor alone: for other numbers it is another.

        So two runs that go on from one state, on other data or with another loss, have no noise in
        common, whose difference would show what they add it to. It is the stream itself where the
        key was given, as a seed's is (such runs are alike up to rounding, on every processor), and
        for a tensor on a GPU, which would be waited for.
        """
        self._own()
        if not self._drawn or total.device.type != "cpu":
            return self
        with self._counting:
            key, call = self._key, self._calls
            self._calls += 1
        content, salt = total.detach().contiguous().numpy(), call.to_bytes(16, "little")
        return SecureStream(
            hashlib.blake2b(content, key=key, salt=salt, digest_size=KEY_BYTES).digest()
        )

    def words(self, count):
        """`count` uniform 64-bit words, a NumPy array of uint64."""
        count = _checks.whole_number("count", count, 0)
        self._own()
        with self._counting:  # two threads must not take one number: they would draw the same
            key, call = self._key, self._calls
            self._calls += 1
        # The first 4 bytes count blocks of 64 bytes within a call, the other 12 are the nonce.
        cipher = Cipher(algorithms.ChaCha20(key, bytes(4) + call.to_bytes(12, "little")), mode=None)
        return np.frombuffer(cipher.encryptor().update(bytes(8 * count)), dtype="<u8")

    def coins(self, n, rate):
        """n independent coins that come up with probability `rate`, exactly; (n,) booleans.

        Args:
            n: how many.
            rate: a number or a tensor (n,), in [0, 1].
        """
        n = _checks.whole_number("n", n, 0)
        _checks.in_interval("rate", rate, 0, 1, closed="both")
        rates = torch.as_tensor(rate, dtype=torch.float64, device="cpu").numpy()
        if rates.shape not in ((), (n,)):
            raise ValueError(f"rate must be a number or have shape ({n},), got {rates.shape}")
        words = self.words(n)
        scaled = np.ldexp(rates, 64)
        sure = scaled >= 2.0**64
        whole = np.where(sure, 0.0, np.floor(scaled)).astype(np.uint64)
        up = sure | (words < whole)
        for i in np.flatnonzero(~sure & (words == whole)):  # with probability 2^-64 each
            rest = fractions.Fraction(float(scaled if scaled.ndim == 0 else scaled[i])) % 1
            up[i] = self._below(rest)
        return torch.from_numpy(up)

    def _below(self, threshold):
        """Whether a uniform number lies below an exact fraction in [0, 1)."""
        while threshold:
            threshold *= 2**64
            word, whole = int(self.words(1)[0]), math.floor(threshold)
            if word != whole:
                return word < whole
            threshold -= whole
        return False

    def gaps(self, count, rate, most):
        """`count` independent numbers of coins that come down before the next one comes up,
        exactly; those above `most` become `most`. A (count,) tensor of int64.

        Args:
            count: how many.
            rate: the probability with which a coin comes up, in (0, 1).
            most: a whole number below 2^50.
        """
        rate = _checks.number("rate", rate, 0, 1, closed="neither")
        most = _checks.whole_number("most", most, 0, 2**50 - 1)
        words, log = self.words(count), -math.log1p(-rate)
        u = np.ldexp(words.astype(np.float64) + 0.5, -64)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            found = -np.log1p(-u) / log
            # What is left open of u, and its rounding, by the derivative 1 / ((1 - u) log), twice;
            # the logarithms.
            reach = (2.0**-63 + u * 2.0**-51) / ((1 - u) * log) + found * 2.0**-49
            unsure = (np.abs(found - np.rint(found)) <= reach) & (found <= 2.0 * most + 2) | (
                u > 1 - _TAIL
            )
        gaps = np.minimum(np.floor(found), most)
        for i in np.flatnonzero(unsure):
            gaps[i] = self._exact_gap(int(words[i]), rate, most)
        return torch.from_numpy(gaps.astype(np.int64))

    def _exact_gap(self, word, rate, most):
        """The gap for U in [word, word + 1) / 2^64, at most `most`: with more bits as needed."""
        bits = 64
        while True:
            low, high = (min(_quotient(word + end, bits, rate), most) for end in (0, 1))
            if low == high:
                return low
            word, bits = (word << 64) | int(self.words(1)[0]), bits + 64

    def normal(self, shape, std, *, grid=None):
        """Gaussian noise, rounded to the nearest multiples of a grid, float64 on the CPU.

        Args:
            shape: of the tensor.
            std: the standard deviation before rounding, at least 0 and finite.
            grid: a power of two; `grid_of(std)` by default. Rounding adds a variance of grid^2 /
                12.
        """
        try:
            shape = torch.Size(shape)
        except TypeError:
            raise ValueError(
                f"shape must be whole numbers such as (3,), got {shape!r:.40}"
            ) from None
        std = _checks.number("std", std, 0, math.inf, closed="left")
        if std == 0:
            return torch.zeros(shape, dtype=torch.float64)
        grid = grid_of(std) if grid is None else grid
        _checks.in_interval("grid", grid, 0, math.inf, closed="neither")
        if math.frexp(grid)[0] != 0.5 or not 2.0**-400 <= grid or not std / grid <= 2.0**40:
            raise ValueError(
                f"grid must be a power of two of at least std / 2^40 = {std / 2**40:.3g}, got "
                f"{grid!r}"
            )
        result = np.empty(shape.numel())
        for start in range(0, len(result), _BLOCK):
            part = result[start : start + _BLOCK]
            part[:] = self._multiples(self.words(len(part)), std / grid)
        return torch.from_numpy(result * grid).reshape(shape)

    def _multiples(self, words, scale):
        """The whole numbers nearest to N(0, scale^2), as floats: one from each word, exactly."""
        tails = words >> np.uint64(1)
        # The middle of what the bits leave open of T, [tails, tails + 1) / 2^64.
        t = tails.astype(np.float64)
        t += 0.5
        t *= 2.0**-64
        above = ndtri(t)
        above *= -scale
        above += 0.5
        multiples = np.floor(above)
        off = above - np.rint(above)
        np.abs(off, out=off)
        # One bound for all that do not lie in the tails, and then each one's own for the few that
        # are left.
        near = np.flatnonzero((off <= _reach(_TAIL, scale)) | (t < _TAIL))
        own = t[near]
        for i in near[(off[near] <= _reach(own, scale)) | (tails[near] < 2**12)]:
            multiples[i] = self._exact_multiple(int(tails[i]), scale)
        sign = words << np.uint64(63)
        return np.bitwise_xor(multiples.view(np.uint64), sign, out=sign).view(np.float64)

    def _exact_multiple(self, tail, scale):
        """The multiple for T in [tail, tail + 1) / 2^64: exact, with more bits as needed."""
        bits = 64
        while True:
            low, high = (_rounded_quantile(tail + end, bits, scale) for end in (1, 0))
            if low == high:
                return low
            tail, bits = (tail << 64) | int(self.words(1)[0]), bits + 64


def _reach(t, scale):
    """Bound on how far scale x + 1/2, with x = -Phi^-1(t), is off when t is the middle of what 63
    bits leave open of T.

    |d x / d T| = 1 / density(x) <= 4.2 + 1 / T; twice that over the rest of T, whose ends may be as
    far as a factor of two from its middle, and over the rounding of T, t 2^-52, with
    t (4.2 + 1 / t) <= 3.1; then what the inverse and its multiple are off by, with x^2 <= -2 ln t.
    It falls as t grows.
    """
    size = scale * np.sqrt(-2 * np.log(t))
    return (
        2 * scale * ((4.2 + 1 / t) * 2.0**-65 + 3.1 * 2.0**-52)
        + size * (_INVERSE_ERROR + 2.0**-50)
        + 2.0**-50
    )


def snapped(total, grid):
    """The nearest multiples of a grid (a power of two, or a tensor), float64, where `total` lies.

    Raises:
        ValueError: numbers that are not finite or too large to add exactly; not on a GPU, which is
            not asked: there they become 0 or the largest multiple, which moves no two sums apart.

    >>> snapped(torch.tensor([0.1, -0.3]), 0.25)
    tensor([ 0.0000, -0.2500], dtype=torch.float64)
    """
    multiples = (total.double() / grid).round()
    if multiples.device.type != "cpu":
        multiples = multiples.nan_to_num(nan=0.0).clamp(-MOST_CELLS, MOST_CELLS)
    elif not bool((multiples.abs() <= MOST_CELLS).all()):
        raise ValueError(f"total must be finite and at most 2^51 = 2e15 times the grid {grid}")
    return multiples * grid


def grid_of(std):
    """The largest power of two of which `CELLS` or more fit into a standard deviation.

    >>> grid_of(1.0) == 2.0**-24, grid_of(1.9) == 2.0**-24, grid_of(2.0) == 2.0**-23
    (True, True, True)
    """
    std = _checks.number("std", std, 0, math.inf, closed="neither")
    return 2.0 ** (math.frexp(std)[1] - 1) / CELLS


def _rounded_quantile(numerator, bits, scale):
    """floor(-scale Phi^-1(numerator / 2^bits) + 1/2), inf for 0; exact but where the two ends of an
    interval that crosses a boundary differ, and there more bits are drawn.
    """
    import mpmath

    if numerator == 0:
        return math.inf
    with mpmath.workprec(2 * bits + 128):
        t = mpmath.mpf(numerator) / mpmath.mpf(2) ** bits
        return float(
            mpmath.floor(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * t) * scale + mpmath.mpf(1) / 2)
        )


def _quotient(numerator, bits, rate):
    """floor(ln(1 - numerator / 2^bits) / ln(1 - rate)), inf for 1; exact as `_rounded_quantile`."""
    import mpmath

    if numerator == 1 << bits:
        return math.inf
    with mpmath.workprec(2 * bits + 128):
        rest = mpmath.mpf((1 << bits) - numerator) / mpmath.mpf(2) ** bits
        return int(mpmath.floor(mpmath.log(rest) / mpmath.log1p(-mpmath.mpf(rate))))
