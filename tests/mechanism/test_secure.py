"""Streams for a release: the cipher's known answers, exact laws, and no number drawn twice."""

import copy
import fractions
import math
import os
import pickle
import random
import sys
import threading
import time

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpcompanion.attacks import low_bits_tell
from dpcompanion.mechanism import secure
from dpcompanion.mechanism.secure import SecureStream, grid_of

from ..refusals import refuses


def stream(number=0):
    return SecureStream(key=number.to_bytes(32, "little"))


class Scripted(SecureStream):
    """A stream that yields the words that it is given, then those of the cipher."""

    def __init__(self, *words):
        super().__init__(key=bytes(32))
        self.script = [np.array(part, dtype=np.uint64) for part in words]

    def words(self, count):
        if not self.script:
            return super().words(count)
        part = self.script.pop(0)
        assert len(part) == count
        return part


def test_the_first_call_is_the_key_stream_of_rfc_8439():
    # RFC 8439, appendix A.1, test vectors 1 and 2: key 0, nonce 0, block counters 0 and 1.
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert stream().words(16).tobytes().hex() == expected


def test_a_call_has_a_nonce_of_its_own():
    # RFC 8439, appendix A.1, test vector 5: key 0, block counter 0, and a nonce that ends in 2.
    found = stream()
    found.set_state({"calls": 2 << 88})
    assert (
        found.words(8)
        .tobytes()
        .hex()
        .startswith("c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7")
    )
    assert not np.array_equal(stream().words(8), np.concatenate([one := stream().words(4), one]))


def test_streams_differ_unless_they_have_one_key_and_as_many_calls():
    assert not np.array_equal(SecureStream().words(4), SecureStream().words(4))
    first = stream(7)
    before = first.words(3)
    state = first.get_state()
    after = first.words(3)
    second = stream(7)
    second.set_state(state)
    assert np.array_equal(second.words(3), after) and not np.array_equal(before, after)


def test_a_state_holds_the_key_only_where_it_is_asked_for():
    found = SecureStream(key=b"k" * 32)
    found.words(1)
    assert found.get_state() == {"calls": 1}
    assert found.get_state(with_key=True) == {"calls": 1, "key": b"k" * 32}
    other = SecureStream()
    other.set_state(found.get_state(with_key=True))
    assert np.array_equal(other.words(5), found.words(5))
    assert "k" * 8 not in repr(found) and "6b6b" not in repr(found)


def test_a_stream_is_neither_copied_nor_sent_away():
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="same numbers"):
            copied(SecureStream())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_draws_other_numbers():
    found = stream(3)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, found.words(4).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reader, 32), dtype="<u8")
    os.close(reader), os.close(writer)
    assert not np.intersect1d(theirs, found.words(4)).size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("ask", ["words", "key", "get_state", "set_state"])
def test_a_fork_is_known_where_the_process_has_its_parents_number(ask, monkeypatch):
    """As the first process of a container has, or one whose number comes again."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    found = SecureStream()
    found.words(1)
    state, (reader, writer) = found.get_state(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if ask == "key":
                os.write(writer, SecureStream(found.key).words(4).tobytes())
            elif ask == "get_state":
                other = SecureStream()
                other.set_state(found.get_state(with_key=True))
                os.write(writer, other.words(4).tobytes())
            else:
                if ask == "set_state":
                    found.set_state(state)
                os.write(writer, found.words(4).tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 32)
    os.close(reader), os.close(writer)
    ours = {SecureStream(found.key).words(4).tobytes(), found.words(4).tobytes()}
    assert len(theirs) == 32 and theirs not in ours


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_sets_its_state_first_goes_on_from_there():
    found = SecureStream()
    child = os.fork()
    if child == 0:
        found.set_state({"calls": 7})
        found.words(1)
        os._exit(found.get_state()["calls"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8


def test_bad_arguments_are_refused_by_name():
    refuses(stream().set_state, {}, state=[{}, None, {"key": bytes(32)}])
    with pytest.raises(ValueError, match="calls"):
        stream().set_state({"calls": -1})
    refuses(SecureStream, {}, key=[b"", b"short", "0" * 32, 7, bytes(33)])
    refuses(
        stream().normal, dict(shape=(2,), std=1.0), shape=[3], std=[torch.ones(2), -1.0, math.inf]
    )
    refuses(stream().normal, dict(shape=(2,), std=1.0), grid=[0.3, 2.0**-41, 0.0])
    refuses(stream().coins, dict(n=2), rate=[-0.1, 1.1, math.nan, torch.tensor([0.1, 0.2, 0.3])])
    refuses(
        secure.snapped,
        dict(grid=2.0**-20),
        total=[torch.tensor([0.0, bad]) for bad in (math.nan, math.inf, 1e30)],
    )
    refuses(low_bits_tell, dict(canary=1.0), releases=[torch.zeros(3), [[0.0]]])


def test_threads_that_share_a_stream_draw_different_numbers():
    found, drawn, before = stream(4), [], sys.getswitchinterval()

    def draw():
        for _ in range(4000):
            drawn.append(int(found.words(1)[0]))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(set(drawn)) == len(drawn) == 16_000


def test_a_clock_that_stands_still_and_seeds_of_other_generators_repeat_no_noise(monkeypatch):
    for name in ("time", "time_ns", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 0)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        drawn.append(SecureStream().words(4))
    assert not np.intersect1d(*drawn).size


def test_the_inverse_distribution_function_is_as_good_as_is_assumed():
    rng = np.random.default_rng(0)
    probabilities = np.concatenate(
        [
            2.0 ** -rng.uniform(1, 65, 80),
            rng.uniform(0.05, 0.5, 40),
            0.5 - 2.0 ** -rng.uniform(2, 40, 40),
        ]
    )
    with mpmath.workdps(60):
        for t in probabilities:
            truth = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(t)))
            assert abs(-float(special.ndtri(t)) - truth) <= secure._INVERSE_ERROR / 10 * truth


@pytest.mark.parametrize("std", [1.0, 1.7, 3e-6, 2e5])
def test_fast_and_exact_multiples_are_the_same(std):
    words = stream(5).words(100)
    scale = std / grid_of(std)
    fast = SecureStream(key=bytes(32))._multiples(words, scale)
    exact = [
        secure._rounded_quantile(2 * int(w >> np.uint64(1)) + 1, 65, scale)
        * (-1 if w & np.uint64(1) else 1)
        for w in words
    ]
    assert fast.tolist() == exact


def test_bits_that_leave_a_boundary_open_are_followed_by_more():
    # T in [j, j + 1) / 2^64 holds the boundary between the multiples 2 and 3: the next word says
    # which.
    scale = 2.0
    with mpmath.workdps(50):
        boundary = mpmath.erfc(mpmath.mpf("1.25") / mpmath.sqrt(2)) / 2 * 2**64
        tail, rest = int(mpmath.floor(boundary)), float(boundary % 1)
    below, above = int((rest - 0.01) * 2**64), int((rest + 0.01) * 2**64)
    for more, expected in ((below, 3.0), (above, 2.0)):  # a smaller T lies further out
        found = Scripted([more])
        assert (
            found._multiples(np.array([2 * tail], np.uint64), scale).tolist() == [expected]
            and not found.script
        )


def test_the_tail_is_not_cut_off():
    # All 63 bits of T are 0: the next word decides, far beyond what 64 bits reach (9.2).
    assert Scripted([0], [2**32]).normal((1,), 1.0)[0] > 11


def test_ten_million_draws_have_the_law_of_a_rounded_gaussian_far_tails_included():
    """Against each cell's exact probability: chi-square where cells are full, Poisson counts where
    they are not.
    """
    # 112 cells are 7 standard deviations
    draws, grid, far, noise = 10_000_000, 0.0625, 112, stream(11)
    counts = np.zeros(2 * far + 1, dtype=np.int64)
    for _ in range(10):
        multiples = (noise.normal((draws // 10,), 1.0, grid=grid) / grid).numpy()
        assert np.array_equal(multiples, np.rint(multiples))
        counts += np.bincount(
            np.clip(multiples + far, 0, 2 * far).astype(int), minlength=2 * far + 1
        )
    # Upper tails keep their digits: cell k >= 0 is sf(k - 1/2) - sf(k + 1/2), and the other side
    # mirrors it.
    beyond = stats.norm.sf((np.arange(far + 1) - 0.5) * grid)
    upper = np.append(-np.diff(beyond), beyond[far])
    expected = draws * np.concatenate([upper[:0:-1], upper])
    assert expected.sum() == pytest.approx(draws, rel=1e-12)
    full = expected >= 25
    assert (
        stats.chisquare(
            np.append(counts[full], counts[~full].sum()),
            np.append(expected[full], expected[~full].sum()),
        ).pvalue
        > 1e-4
    )
    sparse = np.flatnonzero(~full)
    assert min(np.abs(sparse - far)) * grid > 4 and len(sparse) > 50
    for side in (sparse[sparse < far], sparse[sparse > far]):
        for limit in (4.25, 4.5, 5.0, 5.3):
            cells = side[np.abs(side - far) * grid >= limit]
            seen, mean = counts[cells].sum(), expected[cells].sum()
            assert min(stats.poisson.cdf(seen, mean), stats.poisson.sf(seen - 1, mean)) > 1e-5


def test_noise_on_a_fine_grid_is_gaussian():
    found = stream(12).normal((200_000,), 2.5)
    assert stats.kstest(found.numpy() / 2.5, "norm").pvalue > 1e-4
    assert torch.equal(found / grid_of(2.5), (found / grid_of(2.5)).round())


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-300, 1.0), st.integers(0, 2**64 - 1))
def test_a_coin_follows_every_bit_of_its_rate(rate, word):
    threshold = fractions.Fraction(rate) * 2**64
    whole, rest = math.floor(threshold), threshold % 1
    assert bool(Scripted([word]).coins(1, rate)[0]) == (word < whole) if word != whole else True
    if whole < 2**64:
        # A first word equal to the first 64 bits: the next 64 decide.
        more = math.floor(rest * 2**64)
        assert (
            not Scripted([whole], [min(more + 1, 2**64 - 1)]).coins(1, rate)[0] or more == 2**64 - 1
        )
        if more:
            assert Scripted([whole], [more - 1]).coins(1, rate)[0]


def exact_gap(numerator, bits, rate):
    """floor(ln(1 - u) / ln(1 - rate)) at u = numerator / 2^bits, by far more digits than it
    takes.
    """
    with mpmath.workdps(400):
        rest = 1 - mpmath.mpf(numerator) / mpmath.mpf(2) ** bits
        return (
            math.inf
            if rest == 0
            else int(mpmath.floor(mpmath.log(rest) / mpmath.log(1 - mpmath.mpf(rate))))
        )


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(
        st.floats(1e-12, 0.999), st.sampled_from([0.5, 0.25, 0.75, 1 - 2.0**-53, 1e-300, 2.0**-40])
    ),
    st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 40).map(lambda k: -k - 1)),
    st.integers(-2, 2),
    st.integers(0, 2**64 - 1),
)
def test_a_gap_is_that_of_all_its_bits(rate, word, off, more):
    """Words far from a boundary between two gaps, and those next to one, where the first 64 bits do
    not decide.
    """
    if word < 0:  # the word of the boundary to the gap -word
        with mpmath.workdps(400):
            word = int((1 - (1 - mpmath.mpf(rate)) ** -word) * 2**64)
        word = min(max(word + off, 0), 2**64 - 1)
    most = 10**9
    found = int(Scripted([word], [more]).gaps(1, rate, most)[0])
    low, high = (min(exact_gap(word + end, 64, rate), most) for end in (0, 1))
    if low != high:
        low, high = (min(exact_gap((word << 64) + more + end, 128, rate), most) for end in (0, 1))
    assert low <= found <= high


def test_gaps_come_as_often_as_they_should():
    found = stream(15).gaps(200_000, 0.3, 12)
    expected = np.array([0.3 * 0.7**k for k in range(12)] + [0.7**12])
    observed = torch.bincount(found, minlength=13).numpy() / len(found)
    chi_square = len(found) * ((observed - expected) ** 2 / expected).sum()
    assert 1e-6 < stats.chi2.sf(chi_square, df=12) < 1 - 1e-6


def test_coins_come_up_as_often_as_they_should():
    rates = torch.tensor([0.0, 1e-3, 0.3, 0.5, 1 - 1e-3, 1.0]).repeat(50_000)
    up = stream(13).coins(len(rates), rates).reshape(-1, 6).sum(0)
    assert up[0] == 0 and up[-1] == 50_000
    for count, rate in zip(up[1:-1].tolist(), rates[1:5].tolist()):
        assert stats.binomtest(count, 50_000, rate).pvalue > 1e-4
    assert stream(14).coins(3, 1.0).all()


def test_no_noise_is_no_noise():
    assert torch.equal(stream().normal((2, 3), 0.0), torch.zeros(2, 3, dtype=torch.float64))
    assert stream().normal((0,), 1.0).shape == (0,) and stream().coins(0, 0.5).shape == (0,)


def success(release, canary=1.0, runs=400, coordinates=64):
    """The share of right guesses, by low bits (Mironov 2012), about runs of which half hold the
    canary in every coordinate.
    """
    holds = torch.arange(runs) % 2 == 0
    sums = torch.stack([release(canary * torch.ones(coordinates) * bool(held)) for held in holds])
    found = low_bits_tell(sums, canary)
    return (found == holds).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_bits_of_float_noise_give_a_canary_away(dtype):
    generator = torch.Generator().manual_seed(0)

    def release(total):
        return total.to(dtype) + torch.randn(total.shape, generator=generator, dtype=dtype)

    assert success(release) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_bits_of_noise_on_a_grid_reveal_nothing(dtype):
    noise, grid = stream(21), grid_of(1.0)

    def release(total):
        return (secure.snapped(total, grid) + noise.normal(total.shape, 1.0, grid=grid)).to(dtype)

    # 400 fair coins: from 43% to 57% with a probability of 99.5%; the canary itself moves what is
    # near 0.
    right = success(release)
    assert 0.4 < right < 0.6


def test_sums_that_are_snapped_stay_near_and_add_exactly():
    torch.manual_seed(0)
    total, grid = 50 * torch.randn(10_000, dtype=torch.float64), grid_of(1.0)
    near = secure.snapped(total, grid)
    assert (near - total).abs().max() <= grid / 2
    noise = stream(22).normal(total.shape, 1.0)
    exact = [
        fractions.Fraction(a) + fractions.Fraction(b) for a, b in zip(near.tolist(), noise.tolist())
    ]
    assert [fractions.Fraction(c) for c in (near + noise).tolist()] == exact
