import math

import mpmath as mp
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from dpcompanion.accounting import DEFAULT_ORDERS, rdp, rdp_sampled_gaussian

from ..refusals import refuses


def one(sample_rate, noise_multiplier, order):
    return float(
        rdp_sampled_gaussian(
            sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=order
        )
    )


def integral(q, sigma, order):
    """The divergence by quadrature of E[r^a - 1 - a (r - 1)] between all places where the integrand
    may peak.
    """
    with mp.workdps(60 if sigma > 1e3 else 30):
        q, s, a = map(mp.mpf, (q, sigma, order))

        def integrand(t):
            r = 1 - q + q * mp.exp(t / s - 1 / (2 * s * s))
            return (r**a - 1 - a * (r - 1)) * mp.npdf(t)

        crossing = 1 / (2 * s) + s * mp.log((1 - q) / q)
        ends = {
            p + d for p in (0, crossing, 2 / s, a / s) for d in (-12, -8, -4, -2, 0, 2, 4, 8, 12)
        }
        ends |= {crossing + d * s for d in (-8, -4, -2, 0, 2, 4, 8)}
        ends = sorted(x for x in ends if x > -13)
        return mp.log1p(mp.quad(integrand, ends, method="gauss-legendre", maxdegree=5)) / (a - 1)


def binomial_sum(q, sigma, order):
    """The divergence at an integer order, by the exact sum in 60 digits."""
    with mp.workdps(60):
        q, s = mp.mpf(q), mp.mpf(sigma)
        terms = (
            mp.binomial(order, k)
            * (1 - q) ** (order - k)
            * q**k
            * mp.exp((k * k - k) / (2 * s * s))
            for k in range(order + 1)
        )
        return mp.log(mp.fsum(terms)) / (order - 1)


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, order",
    [
        (1e-7, 0.1, 1.01),
        (1e-7, 0.1, 10.5),
        (1e-7, 1.0, 2.5),
        (1e-7, 1e6, 1.01),
        (1e-7, 1e6, 1023.5),
        (1e-7, 30.0, 64.3),
        (1e-3, 0.03, 3.5),
        (1e-3, 0.1, 1.5),
        (1e-3, 1.0, 64.3),
        (1e-3, 4.0, 10.9),
        (0.01, 0.05, 1.1),
        (0.01, 0.04, 1 + 1e-9),
        (0.3, 0.0455, 1.0001),
        (0.999, 0.0455, 1.01),
        (1e-7, 0.02, 1.01),
        (0.01, 1e-3, 10.9),
        (0.01, 1e-6, 1.1),
        (0.01, 1e3, 1.5),
        (0.3, 0.1, 1.01),
        (0.3, 0.1, 1023.5),
        (0.3, 0.7, 2.5),
        (0.3, 20.0, 1023.5),
        (0.999, 0.3, 200.5),
        (0.999, 1.0, 1.1),
        (0.999, 1e6, 10.5),
        (1 - 1e-12, 1.0, 1023.5),
    ],
)
def test_fractional_orders_agree_with_an_integral_in_high_precision(
    sample_rate, noise_multiplier, order
):
    assert one(sample_rate, noise_multiplier, order) == pytest.approx(
        float(integral(sample_rate, noise_multiplier, order)), rel=1e-9
    )


@pytest.mark.parametrize("sample_rate", [1e-7, 1e-3, 0.3, 0.999])
@pytest.mark.parametrize("noise_multiplier", [0.1, 1.0, 30.0, 1e6])
def test_integer_orders_agree_with_the_binomial_sum_in_high_precision(
    sample_rate, noise_multiplier
):
    orders = [2, 3, 17, 256, 1024]
    exact = [float(binomial_sum(sample_rate, noise_multiplier, order)) for order in orders]
    found = rdp_sampled_gaussian(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=orders
    )
    assert found.tolist() == pytest.approx(exact, rel=1e-9)


@given(rate=st.floats(-7, 0), noise=st.floats(-1, 6), order=st.integers(2, 60))
@settings(max_examples=60, deadline=None)
def test_sum_and_integral_meet_between_neighbouring_orders(rate, noise, order):
    # The sum serves integers, the integral all else: a hair beside an integer both must say the
    # same.
    rate, noise = 10**rate, 10**noise
    assert one(rate, noise, order * (1 + 1e-13)) == pytest.approx(
        one(rate, noise, order), rel=1e-10
    )


def test_orders_grow_smoothly_where_the_closed_form_takes_over():
    for rate in (1e-3, 0.3, 0.999):
        change = (1 / (8 * (60 - 2 * math.log(rate)))) ** 0.5
        beside = [one(rate, change * (1 + d), 1.3) * (1 + d) ** 2 for d in (-1e-12, 1e-12)]
        assert beside[0] == pytest.approx(beside[1], rel=1e-10)


def test_little_noise_needs_little_memory():
    # On a grid these would be 1e16 nodes.
    found = rdp_sampled_gaussian(
        sample_rate=0.01, noise_multiplier=[1e-8, 1e-160], orders=DEFAULT_ORDERS
    )
    alphas = torch.tensor(DEFAULT_ORDERS, dtype=torch.float64)
    exact = alphas / (2 * 1e-8**2) + alphas / (alphas - 1) * math.log(0.01)
    torch.testing.assert_close(found[0], exact, rtol=1e-12, atol=0)
    assert torch.isinf(found[1]).all()


def test_full_batches_with_much_noise_need_little_memory_at_large_orders(monkeypatch):
    nodes, inner = [], rdp.log_density_ratio

    def counted(t, *arguments):
        nodes.append(t.numel())
        return inner(t, *arguments)

    monkeypatch.setattr(rdp, "log_density_ratio", counted)
    assert one(1.0, 1e6, 1e8 + 0.5) == pytest.approx((1e8 + 0.5) / 2e12, rel=1e-12)
    assert max(nodes) < 1e4


def test_orders_beyond_1024_agree_with_the_sum():
    assert one(0.01, 50.0, 1025) == pytest.approx(float(binomial_sum(0.01, 50.0, 1025)), rel=1e-9)


@pytest.mark.parametrize("noise_multiplier", [0.1, 1.0, 1e6])
def test_a_full_batch_is_the_gaussian_mechanism(noise_multiplier):
    orders = torch.tensor(DEFAULT_ORDERS, dtype=torch.float64)
    found = rdp_sampled_gaussian(sample_rate=1, noise_multiplier=noise_multiplier)
    torch.testing.assert_close(found, orders / (2 * noise_multiplier**2), rtol=1e-14, atol=0)


def test_no_noise_costs_infinity_at_every_rate_and_order():
    found = rdp_sampled_gaussian(sample_rate=torch.tensor([1e-7, 0.5, 1.0]), noise_multiplier=0.0)
    assert (found == math.inf).all()


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier",
    [(1e-4, 0.6), (0.01, 1.0), (512 / 60000, 3.42529), (0.2, 5.0), (1.0, 2.0)],
)
def test_dp_accounting_says_the_same_at_integer_orders_and_never_less_between_them(
    sample_rate, noise_multiplier
):
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(sample_rate, GaussianDpEvent(noise_multiplier)))
    orders, theirs = (
        torch.tensor(accountant.orders, dtype=torch.float64),
        torch.tensor(accountant.rdp),
    )
    found = rdp_sampled_gaussian(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=orders
    )
    whole = orders == orders.round()
    torch.testing.assert_close(found[whole], theirs[whole], rtol=1e-7, atol=1e-13)
    # Its series for fractional orders stops early, on the safe side: by a factor of six at order
    # 1.1 with (0.2, 5).
    assert (found <= theirs * (1 + 1e-7) + 1e-13).all()


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier", [(0.01, 1.0), (512 / 60000, 3.42529), (0.2, 5.0), (1.0, 2.0)]
)
def test_opacus_says_the_same_at_its_own_orders(sample_rate, noise_multiplier):
    orders = OpacusAccountant.DEFAULT_ALPHAS
    assert set(orders) <= set(DEFAULT_ORDERS) and max(DEFAULT_ORDERS) == 1024
    theirs = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    found = rdp_sampled_gaussian(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, orders=orders
    )
    # Opacus subtracts numbers near 1, so that its small divergences have fewer digits.
    assert found.tolist() == pytest.approx(theirs.tolist(), rel=1e-7, abs=1e-12)


@given(rate=st.floats(-7, 0), noise=st.floats(-1, 6), factor=st.floats(1.001, 10))
@settings(max_examples=60, deadline=None)
def test_more_noise_less_sampling_and_smaller_orders_never_cost_more(rate, noise, factor):
    rates, noises = (
        torch.tensor([10**rate / factor, 10**rate]),
        torch.tensor([10**noise * factor, 10**noise]),
    )
    cost = rdp_sampled_gaussian(
        sample_rate=rates[:, None].double(), noise_multiplier=noises.double()
    )
    assert cost.isfinite().all() and (cost > 0).all()
    slack = 1 + 1e-11
    assert (cost[0] <= slack * cost[1]).all() and (cost[:, 0] <= slack * cost[:, 1]).all()
    in_order = torch.tensor(DEFAULT_ORDERS).argsort()
    assert (cost[..., in_order][..., :-1] <= slack * cost[..., in_order][..., 1:]).all()


def test_the_other_direction_is_never_larger():
    # D(Q || P) by the trapezoidal rule, at settings where its integrand is tame.
    t = torch.linspace(-40, 40, 200_001, dtype=torch.float64)
    for q, sigma in [(0.01, 1.0), (0.3, 2.0), (0.9, 1.5)]:
        for order in (1.5, 4.0, 20.0):
            ratio = torch.log1p(q * torch.expm1(t / sigma - 0.5 / sigma**2))
            log_moment = torch.logsumexp((1 - order) * ratio - 0.5 * t * t, 0) + math.log(
                float(t[1] - t[0]) / math.sqrt(2 * math.pi)
            )
            assert float(log_moment) / (order - 1) <= one(q, sigma, order)


def test_rates_and_noises_broadcast_and_orders_come_last():
    rates = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)[:, None]
    noises = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = rdp_sampled_gaussian(sample_rate=rates, noise_multiplier=noises, orders=[2, 2.5, 2000])
    assert found.shape == (3, 2, 3) and found.dtype == torch.float64
    for i, rate in enumerate(rates[:, 0].tolist()):
        for j, noise in enumerate(noises.tolist()):
            for k, order in enumerate((2, 2.5, 2000)):
                assert float(found[i, j, k]) == pytest.approx(one(rate, noise, order), rel=1e-13)


def test_numbers_sequences_arrays_and_tensors_are_alike():
    expected = rdp_sampled_gaussian(
        sample_rate=0.01, noise_multiplier=torch.tensor([1.0, 2.0]), orders=torch.tensor([2.0, 3.5])
    )
    for wrap in (list, tuple, lambda x: torch.tensor(list(x), dtype=torch.float64).numpy()):
        found = rdp_sampled_gaussian(
            sample_rate=0.01, noise_multiplier=wrap([1.0, 2.0]), orders=wrap([2.0, 3.5])
        )
        assert torch.equal(found, expected)
    assert (
        rdp_sampled_gaussian(sample_rate=0.01, noise_multiplier=torch.tensor(1.0), orders=2).shape
        == ()
    )
    assert rdp_sampled_gaussian(sample_rate=0.01, noise_multiplier=1.0, orders=[2]).shape == (1,)
    assert rdp_sampled_gaussian(sample_rate=[], noise_multiplier=1.0, orders=[2, 2.5]).shape == (
        0,
        2,
    )


def test_results_do_not_depend_on_how_many_are_computed_together():
    noises = torch.logspace(-0.5, 3, 60, dtype=torch.float64)
    together = rdp_sampled_gaussian(sample_rate=0.02, noise_multiplier=noises)
    for i in (0, 17, 30, 59):
        alone = rdp_sampled_gaussian(sample_rate=0.02, noise_multiplier=float(noises[i]))
        torch.testing.assert_close(alone, together[i], rtol=1e-13, atol=0)


def test_results_stay_on_the_device_and_leave_the_input_alone():
    noise = torch.tensor([1.0, 2.0], dtype=torch.float32)
    found = rdp_sampled_gaussian(sample_rate=0.1, noise_multiplier=noise)
    assert (
        found.device == noise.device
        and found.dtype == torch.float64
        and noise.tolist() == [1.0, 2.0]
    )


def test_bad_arguments_are_refused_by_name():
    refuses(
        rdp_sampled_gaussian,
        dict(sample_rate=0.1, noise_multiplier=1.0, orders=[2, 3]),
        sample_rate=[0.0, 1.5, math.nan, [0.5, -1.0], "a"],
        noise_multiplier=[-1.0, math.inf, torch.tensor([1.0, math.nan]), None],
        orders=[1, [2, math.inf], [2, math.nan], [1e300], 1e10],
    )
