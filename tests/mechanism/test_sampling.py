import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpcompanion.mechanism import noise, sampling
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.training import PoissonSampler, gaussian_noise, generators

from ..refusals import refuses

# the seeds are fixed; this is the probability with which a right sampler would have failed
FALSE_ALARM = 1e-6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_inclusion_counts_match_the_rates_of_each_example():
    rates = torch.linspace(0.02, 0.9, 200, dtype=torch.float64)
    counts = PoissonSampler(200, rates, generator()).masks(4000).sum(0)
    chi_square = ((counts - 4000 * rates) ** 2 / (4000 * rates * (1 - rates))).sum().item()
    assert FALSE_ALARM / 2 < stats.chi2.sf(chi_square, df=200) < 1 - FALSE_ALARM / 2


def test_examples_and_steps_are_independent_so_that_batch_sizes_are_binomial():
    sizes = PoissonSampler(50, 0.1, generator()).masks(5000).sum(1)
    expected = stats.binom.pmf(range(15), 50, 0.1) * 5000
    observed = torch.bincount(sizes, minlength=15)[:15].double().numpy()
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert FALSE_ALARM / 2 < stats.chi2.sf(chi_square, df=14) < 1 - FALSE_ALARM / 2
    centred = sizes.double() - 5
    correlation = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    assert abs(correlation) * 5000**0.5 < stats.norm.isf(FALSE_ALARM / 2)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.floats(1e-6, 1), st.integers(0, 2**32))
def test_no_example_is_twice_in_a_draw(n, rate, seed):
    indices = PoissonSampler(n, rate, generator(seed)).draw()
    assert len(indices.unique()) == len(indices)
    assert ((0 <= indices) & (indices < n)).all()


def test_a_rate_of_one_takes_everyone_and_a_tiny_rate_gives_empty_draws():
    assert PoissonSampler(7, 1.0, generator()).draw().tolist() == list(range(7))
    empty = PoissonSampler(7, 1e-9, generator()).draw()
    assert empty.shape == (0,) and empty.dtype == torch.int64


def test_draws_and_masks_are_the_same_stream():
    masks = PoissonSampler(20, 0.3, generator()).masks(4)
    one_by_one = PoissonSampler(20, 0.3, generator())
    for mask in masks:
        assert one_by_one.draw().tolist() == mask.nonzero().squeeze(1).tolist()


def test_the_coins_of_a_seed_are_what_they_always_were():
    """Every trained number of the book depends on them."""
    assert (
        PoissonSampler(30, 0.2, generator(7)).draw().tolist()
        == (torch.rand(1, 30, dtype=torch.float64, generator=generator(7)) < 0.2)[0]
        .nonzero()
        .squeeze(1)
        .tolist()
    )
    assert sampling.GAPS_FROM == 1_000_000


def secure(number):
    return SecureStream(key=number.to_bytes(32, "little"))


@pytest.mark.parametrize("source, block", [(generator, 1), (generator, 1 << 20), (secure, 4)])
@pytest.mark.parametrize(
    "rates", [0.3, [0.1, 0.7, 0.1, 1.0, 0.7, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
)
def test_draws_by_gaps_have_the_exact_law_of_coins(monkeypatch, rates, block, source):
    """Every subset of six examples has its probability: so the first and the last, and all
    dependences.
    """
    monkeypatch.setattr(sampling, "GAPS_FROM", 1)
    monkeypatch.setattr(sampling, "_BLOCK", block)
    monkeypatch.setattr(sampling, "_GROUPS", 3)
    draws, sampler = 1500, PoissonSampler(6, rates, source(1))
    assert (sampler._groups is None) == (len({*rates} if isinstance(rates, list) else {rates}) > 3)
    bits, seen = 2 ** torch.arange(6), torch.zeros(64)
    for _ in range(draws):
        drawn = sampler.draw()
        assert (drawn.diff() > 0).all() and drawn.dtype == torch.int64
        seen[int(bits[drawn].sum())] += 1
    inside = (torch.arange(64)[:, None] & bits).bool()
    rates = torch.as_tensor(rates, dtype=torch.float64).expand(6)
    expected = torch.where(inside, rates, 1 - rates).prod(1) * draws
    possible = expected > 0
    assert seen[~possible].sum() == 0
    rare = possible & (expected < 5)
    observed, expected = (
        [*v[possible & ~rare].tolist(), float(v[rare].sum())] for v in (seen, expected)
    )
    pairs = [(o, e) for o, e in zip(observed, expected) if e > 0]
    chi_square = sum((o - e) ** 2 / e for o, e in pairs)
    assert FALSE_ALARM / 2 < stats.chi2.sf(chi_square, df=len(pairs) - 1) < 1 - FALSE_ALARM / 2


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-3, 0.5, 1 - 1e-9])
def test_a_gap_is_at_least_k_with_the_probability_of_k_failures(rate):
    """The uniform at which the gap reaches k is 1 - (1 - q)^k, also where that is far below 2^-53's
    neighbourhood.
    """
    with mpmath.workdps(60):
        for k in (1, 2, 3, 10, 1000, 10**6, 10**9):
            edge = 1 - (1 - mpmath.mpf(rate)) ** k
            if edge > 1 - mpmath.mpf(2) ** -20:
                continue
            slack = 1e-14 * max(1, 1 / float(1 - edge))
            below, above = (
                torch.tensor(float(edge * (1 + side * slack)), dtype=torch.float64)
                for side in (-1, 1)
            )
            assert sampling._gaps(below, rate) in (k - 1, k) and sampling._gaps(above, rate) >= k
            assert (
                sampling._gaps(
                    torch.tensor(float(edge * (1 - 1 / (2 * k))), dtype=torch.float64), rate
                )
                < k
            )


@pytest.mark.parametrize("source", [generator, secure])
def test_a_billion_examples_cost_what_is_drawn_of_them(source):
    sizes = [len(PoissonSampler(10**9, 1e-6, source(seed)).draw()) for seed in range(20)]
    assert abs(sum(sizes) - 20_000) < stats.norm.isf(FALSE_ALARM / 2) * 20_000**0.5
    assert all(PoissonSampler(10**9, 1e-12, source(seed)).draw().numel() == 0 for seed in range(5))
    assert torch.equal(PoissonSampler(2 * 10**6, 1.0, source(0)).draw(), torch.arange(2 * 10**6))


def test_masks_of_many_examples_are_the_draws():
    n = sampling.GAPS_FROM
    rates = torch.tensor([1e-5, 3e-5], dtype=torch.float64).repeat(n // 2)
    masks, sampler = (
        PoissonSampler(n, rates, generator(3)).masks(2),
        PoissonSampler(n, rates, generator(3)),
    )
    assert [mask.nonzero().squeeze(1).tolist() for mask in masks] == [
        sampler.draw().tolist() for _ in range(2)
    ]


def test_bad_arguments_are_refused_by_name():
    sampler = dict(n=5, sample_rate=0.5, generator=generator())
    refuses(PoissonSampler, sampler, n=[0], sample_rate=[0.0, [0.5] * 4], generator=[None, 7])
    refuses(
        gaussian_noise,
        dict(shape=(3,), std=1.0, generator=generator()),
        std=[-1.0, [1.0, 2.0]],
        generator=[None, 7],
    )
    refuses(generators, {}, seed=[-1])


def test_noise_has_the_promised_distribution():
    draw = gaussian_noise((100_000,), 2.5, generator(1))
    assert stats.kstest(draw.numpy() / 2.5, "norm").pvalue > FALSE_ALARM
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 100_000)
    assert low < (draw / 2.5).square().sum() < high


def test_noise_is_the_same_in_both_precisions_but_for_rounding():
    one, other = (
        gaussian_noise((100,), 1.0, generator(), dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert one.dtype == torch.float32
    torch.testing.assert_close(one, other.float(), rtol=0, atol=0)


def test_streams_of_one_seed_differ_and_repeat():
    first, again = generators(3), generators(3)
    assert first["noise"].words(5).tolist() == again["noise"].words(5).tolist()
    assert first["sampling"].words(5).tolist() != generators(3)["noise"].words(5).tolist()


def test_seeds_that_agree_in_32_bits_have_different_batches_and_noise():
    one, other = generators(5), generators(5 + 2**32)
    assert not torch.equal(
        *(gaussian_noise((8,), 1.0, streams["noise"]) for streams in (one, other))
    )
    assert not torch.equal(
        *(PoissonSampler(99, 0.5, streams["sampling"]).draw() for streams in (one, other))
    )


def test_draws_from_a_cipher_are_poisson():
    rates = torch.tensor([0.1, 0.5, 1.0] * 20, dtype=torch.float64)
    sampler = PoissonSampler(60, rates, SecureStream())
    counts = torch.stack([torch.bincount(sampler.draw(), minlength=60) for _ in range(1000)]).sum(0)
    for count, q in zip(counts.tolist(), rates.tolist()):
        assert count == 1000 if q == 1 else stats.binomtest(count, 1000, q).pvalue > 1e-6
    assert sampler.masks(4).shape == (4, 60)


def test_many_examples_are_drawn_in_blocks():
    drawn = PoissonSampler(2_500_000, 1e-4, SecureStream()).draw()
    assert 150 < len(drawn) < 360 and bool((drawn.diff() > 0).all())


@pytest.mark.parametrize("seed", [None, 0])
def test_noise_is_not_added_to_whole_numbers_which_would_cut_it_off(seed):
    with pytest.raises(ValueError, match="total must have a floating-point type"):
        noise.noisy(torch.zeros(3, dtype=torch.int64), 1.0, generators(seed)["noise"])
