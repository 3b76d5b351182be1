import itertools
import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import rdp_sampled_gaussian
from dpcompanion.per_instance import (
    coupled_delta,
    coupled_divergence,
    coupled_epsilon,
    holder_epsilon,
    log_mass,
    step_divergence,
    update_divergence,
)

from ..refusals import refuses


def step(q, s, size, order, **options):
    return float(
        step_divergence(
            sample_rate=q, noise_multiplier=s, sensitivity=size, orders=order, **options
        )
    )


def theorem_3_2(q, s, size, order, power_of_q=True):
    """The sum of the theorem in 50 digits, or that of equation 21, which has no q^k."""
    with mp.workdps(50):
        q, x = mp.mpf(q), (mp.mpf(size) / s) ** 2
        terms = (
            mp.binomial(order, k)
            * (1 - q) ** (order - k)
            * (q**k if power_of_q else 1)
            * mp.exp((k * k - k) * x / 2)
            for k in range(order + 1)
        )
        return float(mp.log(mp.fsum(terms)) / (order - 1))


def other_direction(q, s, size, order):
    """E[r^(1 - order)] by quadrature."""
    with mp.workdps(30):
        q, ratio, b = mp.mpf(q), mp.mpf(size) / s, mp.mpf(order) - 1

        def integrand(t):
            r = 1 - q + q * mp.exp(t * ratio - ratio**2 / 2)
            return (r**-b - 1 + b * (r - 1)) * mp.npdf(t)

        ends = sorted(
            {
                float(p + d)
                for p in (0, -b * ratio, ratio)
                for d in (-12, -6, -3, -1, 0, 1, 3, 6, 12)
            }
        )
        return float(
            mp.log1p(mp.quad(integrand, mp.linspace(ends[0], ends[-1], 60), maxdegree=4)) / b
        )


@pytest.mark.parametrize(
    "q, s, size, order",
    [(0.01, 1.0, 0.3, 2), (0.002, 0.6, 1.0, 8), (0.3, 2.0, 5.0, 17), (1e-5, 3.0, 0.1, 64)],
)
def test_theorem_3_2_agrees_with_its_sum_in_high_precision(q, s, size, order):
    assert step(q, s, size, order) == pytest.approx(theorem_3_2(q, s, size, order), rel=1e-9)


def test_equation_21_without_the_power_of_q_is_another_number():
    assert theorem_3_2(0.01, 1.0, 1.0, 8, power_of_q=False) > 100 * step(0.01, 1.0, 1.0, 8)


@pytest.mark.parametrize(
    "q, s, size, order",
    [
        (1e-5, 1.0, 1.0, 8),
        (0.01, 1.0, 0.01, 2),
        (0.01, 0.5, 1.0, 1.5),
        (0.3, 1.0, 1.0, 1.01),
        (0.3, 3.0, 1.0, 40),
        (0.9, 2.0, 5.0, 8),
        (0.999, 1.0, 1.0, 8.5),
    ],
)
def test_the_other_direction_agrees_with_quadrature(q, s, size, order):
    found = step(q, s, size, order, direction="add")
    assert found == pytest.approx(other_direction(q, s, size, order), rel=1e-9)


def by_the_excess(q, s, order, *, digits):
    """The divergence where an example is added, of the moment's excess over 1, by quadrature."""
    with mp.workdps(digits):
        rate, noise, power = mp.mpf(q), mp.mpf(s), mp.mpf(order) - 1

        def excess(t):
            r = 1 - rate + rate * mp.exp(t / noise - 1 / (2 * noise**2))
            return (r**-power - 1 + power * (r - 1)) * mp.npdf(t)

        rises = float(1 / (2 * noise) + noise * mp.log((1 - rate) / rate))
        near = [float(1 / noise) + d for d in (-4, -2, -1, 0, 1, 3, 12)]
        parts = sorted([-15, -5, 0, 5, *near, *(rises + d for d in (-1, -0.5, 0, 0.5, 1))])
        return float(mp.log1p(mp.quad(excess, parts)) / power)


@pytest.mark.parametrize(
    "q, s, order", [(1e-14, 0.2, 2), (1e-12, 0.25, 2), (1e-13, 0.24, 1.5), (1e-13, 0.12, 32)]
)
def test_the_other_direction_of_a_rare_point_under_little_noise_does_not_cancel(q, s, order):
    """The moment is 1 and less than a rounding error more; 40 digits hold it."""
    expected = by_the_excess(q, s, order, digits=40)
    assert step(q, s, 1.0, order, direction="add") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("q, s", [(0.001, 0.1), (0.5, 0.11), (0.01, 0.2), (0.5, 0.25)])
def test_close_to_order_1_the_other_direction_is_the_mean_loss(q, s):
    with mp.workdps(30):
        rate, noise = mp.mpf(q), mp.mpf(s)

        def loss(t):
            return -mp.log(1 - rate + rate * mp.exp(t / noise - 1 / (2 * noise**2))) * mp.npdf(t)

        expected = float(mp.quad(loss, [-12, *(k / 2 for k in range(-20, 26)), 40]))
    for exponent in (8, 10, 12, 13):
        found = step(q, s, 1.0, 1 + 10.0**-exponent, direction="add")
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "q, s", [(0.5, 0.038), (0.1, 0.0373), (2e-3, 0.038), (0.9, 0.045), (5e-4, 0.04), (0.5, 0.051)]
)
@pytest.mark.parametrize("order", [1 + 1e-6, 1.009, 1.011, 2.0])
def test_the_other_direction_keeps_the_bump_of_little_noise(q, s, order):
    expected = by_the_excess(q, s, order, digits=30)
    assert step(q, s, 1.0, order, direction="add") == pytest.approx(expected, rel=1e-8)


@given(rate=st.floats(-6, 0), noise=st.floats(-1, 2), order=st.floats(1.01, 64))
@settings(max_examples=25, deadline=None)
def test_the_other_direction_is_never_larger_and_never_negative(rate, noise, order):
    remove, add = (step(10**rate, 10**noise, 1.0, order, direction=d) for d in ("remove", "add"))
    assert 0 <= add <= remove * (1 + 1e-8)


@pytest.mark.parametrize("noise", [0.05, 0.03, 1e-4, 1e-8, 1e-160])
def test_with_little_noise_the_other_direction_costs_the_odds_of_staying_out(noise):
    # At 0.05 by the integral, below it by the closed form.
    for q in (1e-7, 0.01, 0.3, 0.999):
        found = step(q, noise, 1.0, 8, direction="add")
        assert found == pytest.approx(-math.log1p(-q), rel=1e-11)


def test_a_point_that_enters_always_makes_both_directions_the_gaussian_mechanism():
    for direction in ("remove", "add"):
        assert step(1.0, 2.0, 3.0, 8, direction=direction) == pytest.approx(8 * 9 / 8, rel=1e-12)


def test_parameters_broadcast_and_an_unmoved_sum_costs_nothing():
    sizes, orders = torch.tensor([[0.0, 0.5], [1.0, 2.0]]), [1.5, 8, 1024]
    for direction in ("remove", "add"):
        found = step_divergence(
            sample_rate=0.01,
            noise_multiplier=torch.tensor([1.0, 2.0]),
            sensitivity=sizes,
            orders=orders,
            direction=direction,
        )
        assert found.shape == (2, 2, 3) and found.isfinite().all() and (found[0, 0] == 0).all()
        assert float(found[1, 1, 1]) == pytest.approx(
            step(0.01, 2.0, 2.0, 8, direction=direction), rel=1e-12
        )
    assert log_mass(sizes, sample_rate=0.01, noise_std=1.0, order=3).shape == (2, 2)


def test_only_the_ratio_of_sensitivity_and_noise_counts():
    assert step(0.1, 4.0, 2.0, 5) == pytest.approx(
        float(rdp_sampled_gaussian(sample_rate=0.1, noise_multiplier=2.0, orders=5))
    )


# A data set of three points and x with gradients in the plane: everything about one step can be
# computed.

GRADIENTS = torch.tensor([[0.6, 0.8], [-0.3, 0.4], [0.5, -0.1]], dtype=torch.float64)
X = torch.tensor([0.9, -0.2], dtype=torch.float64)
RATE, NOISE = 0.4, 0.7


def mean_rule(rows):
    return rows.mean(0) if len(rows) else torch.zeros(2, dtype=torch.float64)


def sum_rule(rows):
    return rows.sum(0) if len(rows) else torch.zeros(2, dtype=torch.float64)


def batches(rule):
    """Probabilities of the batches without x, their updates, and their updates with x."""
    chances, without, with_x = [], [], []
    for chosen in itertools.product([False, True], repeat=len(GRADIENTS)):
        rows = GRADIENTS[list(chosen)]
        chances.append(RATE ** sum(chosen) * (1 - RATE) ** (len(GRADIENTS) - sum(chosen)))
        without.append(rule(rows))
        with_x.append(rule(torch.cat([rows, X[None]])))
    return torch.tensor(chances, dtype=torch.float64), torch.stack(without), torch.stack(with_x)


def densities(rule):
    """The densities of the step's outcome with x and without it on a fine grid, and the area of a
    cell.
    """
    chances, without, with_x = batches(rule)
    line = torch.linspace(-9, 9, 721, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)

    def mixture(weights, centres):
        squares = torch.cdist(grid, centres).square()
        return (torch.exp(-squares / (2 * NOISE**2)) @ weights) / (2 * math.pi * NOISE**2)

    alone = mixture(chances, without)
    return (
        (1 - RATE) * alone + RATE * mixture(chances, with_x),
        alone,
        float(line[1] - line[0]) ** 2,
    )


def true_divergences(rule, order):
    p, q, cell = densities(rule)
    keep = (p > 1e-250) & (q > 1e-250)
    log_p, log_q = p[keep].log(), q[keep].log()
    return [
        float(torch.logsumexp(order * a + (1 - order) * b, 0) + math.log(cell)) / (order - 1)
        for a, b in ((log_p, log_q), (log_q, log_p))
    ]


@pytest.mark.parametrize("rule", [sum_rule, mean_rule])
@pytest.mark.parametrize("order", [2, 3, 6.5])
def test_the_coupled_bound_lies_between_the_truth_and_the_worst_batch(rule, order):
    chances, without, with_x = batches(rule)
    sizes = (without - with_x).norm(dim=1)
    for truth, direction in zip(true_divergences(rule, order), ("remove", "add")):
        bound = float(
            coupled_divergence(
                sizes,
                sample_rate=RATE,
                noise_std=NOISE,
                order=order,
                probabilities=chances,
                direction=direction,
            )
        )
        worst = step(RATE, NOISE, sizes.max(), order, direction=direction)
        assert truth <= bound <= worst * (1 + 1e-12)
        if rule is mean_rule:
            assert bound < 0.95 * worst


def test_the_coupled_bound_of_the_sum_is_theorem_3_2():
    chances, without, with_x = batches(sum_rule)
    sizes = (without - with_x).norm(dim=1)
    exact = step(RATE, NOISE, X.norm(), 4)
    settings_ = dict(sample_rate=RATE, noise_std=NOISE, order=4)
    assert float(coupled_divergence(sizes, probabilities=chances, **settings_)) == pytest.approx(
        exact, rel=1e-12
    )
    assert float(coupled_divergence(sizes, **settings_)) == pytest.approx(exact, rel=1e-12)
    largest = float(X.norm()) * (1 + 1e-12)
    assert float(
        coupled_divergence(sizes, max_sensitivity=largest, confidence=0.99, **settings_)
    ) == pytest.approx(exact, rel=1e-9)


def draws(rule, count, seed):
    """Updates of Poisson batches without x, their updates with x, and those of batches of the data
    set with x.
    """
    generator = torch.Generator().manual_seed(seed)
    chances, without, with_x = batches(rule)
    chosen = torch.multinomial(chances, count, replacement=True, generator=generator)
    enters = torch.rand(count, 1, generator=generator) < RATE
    return without[chosen], with_x[chosen], torch.where(enters, with_x[chosen], without[chosen])


def test_coupled_confidence_bounds_hold_as_often_as_they_say_and_shrink_to_the_expectation():
    chances, without, with_x = batches(mean_rule)
    sizes = (without - with_x).norm(dim=1)
    exact = float(
        coupled_divergence(sizes, sample_rate=RATE, noise_std=NOISE, order=3, probabilities=chances)
    )
    options = dict(
        sample_rate=RATE,
        noise_std=NOISE,
        order=3,
        max_sensitivity=float(sizes.max()),
        confidence=0.9,
    )
    sampled = torch.stack(
        [(a - b).norm(dim=1) for a, b, _ in (draws(mean_rule, 200, seed) for seed in range(100))],
        dim=1,
    )
    bounds = coupled_divergence(sampled[:20], **options), coupled_divergence(sampled, **options)
    # 10 in the mean; 19 or more has a chance below 1%
    assert all(int((b < exact).sum()) <= 18 for b in bounds)
    assert (
        exact
        < float(bounds[1].mean())
        < float(bounds[0].mean())
        <= step(RATE, NOISE, sizes.max(), 3)
    )
    few = coupled_divergence(sampled[:1], **options)
    assert (few >= exact).float().mean() >= 0.85 and (
        few <= step(RATE, NOISE, sizes.max(), 3) * (1 + 1e-12)
    ).all()


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_delta_of_one_sensitivity_is_that_of_a_step(direction):
    found = float(
        coupled_delta([0.8, 0.8], sample_rate=0.2, noise_std=0.8, epsilon=0.15, direction=direction)
    )
    line = torch.linspace(-12, 14, 400_001, dtype=torch.float64)
    without = torch.exp(-(line**2) / 2) / math.sqrt(2 * math.pi)
    with_x = 0.8 * without + 0.2 * torch.exp(-((line - 1) ** 2) / 2) / math.sqrt(2 * math.pi)
    p, q = (with_x, without) if direction == "remove" else (without, with_x)
    assert found == pytest.approx(
        float(torch.trapezoid((p - math.exp(0.15) * q).clamp(min=0), line)), rel=1e-6
    )


@pytest.mark.parametrize(
    "rate, epsilon", [(0.3, 1e-12), (0.01, 1e-8), (1e-6, 1e-12), (0.5, 1e-300)]
)
@pytest.mark.parametrize("sensitivity", [1e-6, 0.01, 1.0])
def test_the_delta_of_one_added_example_is_never_below_the_truth(rate, epsilon, sensitivity):
    with mp.workdps(60):
        q, mu, e = (mp.mpf(value) for value in (rate, sensitivity, epsilon))
        rest = 1 - (1 - q) * mp.exp(e)
        level = mp.log(q * mp.exp(e) / rest)
        gaussian = mp.ncdf(mu / 2 - level / mu) - mp.exp(level) * mp.ncdf(-mu / 2 - level / mu)
        truth = float(rest * gaussian)
    found = coupled_delta(
        [sensitivity], sample_rate=rate, noise_std=1.0, epsilon=epsilon, direction="add"
    )
    assert truth * (1 - 1e-14) <= found <= truth * (1 + 1e-6)


def test_the_other_delta_vanishes_where_the_ratio_cannot_reach_epsilon():
    options = dict(sample_rate=0.2, noise_std=1.0, direction="add")
    assert float(coupled_delta([5.0], epsilon=-math.log(0.8) + 1e-9, **options)) == 0
    assert float(coupled_delta([5.0], epsilon=-math.log(0.8) - 1e-3, **options)) > 0


@pytest.mark.parametrize("rule", [sum_rule, mean_rule])
def test_coupled_delta_and_epsilon_bound_the_truth(rule):
    p, q, cell = densities(rule)
    chances, without, with_x = batches(rule)
    sizes = (without - with_x).norm(dim=1)
    for first, second, direction in ((p, q, "remove"), (q, p, "add")):
        options = dict(
            sample_rate=RATE, noise_std=NOISE, probabilities=chances, direction=direction
        )
        for epsilon in (0.0, 0.2, 0.4):
            truth = float((first - math.exp(epsilon) * second).clamp(min=0).sum()) * cell
            assert truth <= float(coupled_delta(sizes, epsilon=epsilon, **options)) * (1 + 1e-9)
        epsilon = coupled_epsilon(sizes, delta=0.01, **options)
        assert float(coupled_delta(sizes, epsilon=epsilon, **options)) <= 0.01
        assert float(coupled_delta(sizes, epsilon=epsilon - 1e-9, **options)) > 0.01
        assert float((first - math.exp(float(epsilon)) * second).clamp(min=0).sum()) * cell <= 0.01


def test_batches_of_the_largest_sensitivity_have_the_epsilon_of_a_fixed_one():
    given = dict(sample_rate=0.1, noise_std=1.0, delta=1e-5)
    with_confidence = coupled_epsilon([1e-3] * 5, max_sensitivity=1e-3, confidence=0.9, **given)
    assert with_confidence == pytest.approx(coupled_epsilon([1e-3], **given), rel=1e-6)


def one_step_delta(q, s, epsilon, direction):
    """The text of `coupled_delta` in 60 digits, for a sensitivity of 1."""
    with mp.workdps(60):
        q, mu, rise = mp.mpf(q), 1 / mp.mpf(s), mp.exp(mp.mpf(epsilon))
        c = q if direction == "remove" else 1 - (1 - q) * rise
        if c <= 0:
            return mp.mpf(0)
        ratio = 1 + (rise - 1) / q if direction == "remove" else q * rise / c
        return c * (
            mp.ncdf(mu / 2 - mp.log(ratio) / mu) - ratio * mp.ncdf(-mu / 2 - mp.log(ratio) / mu)
        )


def test_an_epsilon_beyond_the_largest_exponent_is_found():
    """e^epsilon overflowed, and no delta was above 0 from an epsilon of 709.8 on."""
    step = dict(sample_rate=0.5, noise_std=0.01)
    for epsilon in (29.9, 30.1, 709.0, 800.0, 5300.0, 5600.0):
        exact = one_step_delta(0.5, 0.01, epsilon, "remove")
        assert coupled_delta([1.0], **step, epsilon=epsilon) == pytest.approx(
            float(exact), rel=1e-9
        )
    epsilon = coupled_epsilon([1.0], **step, delta=1e-5)
    assert (
        epsilon == pytest.approx(5409.07484, abs=1e-4)
        and one_step_delta(0.5, 0.01, epsilon, "remove") <= 1.00001e-5
    )
    full = dict(sample_rate=1.0, noise_std=0.01, delta=1e-5)
    removed = coupled_epsilon([1.0], **full)
    assert (
        coupled_epsilon([1.0], **full, direction="add") == pytest.approx(removed, rel=1e-12)
        and removed > 5000
    )
    assert coupled_epsilon([1.0, 1e-3], sample_rate=0.5, noise_std=1e-200, delta=1e-5) == math.inf


@pytest.mark.parametrize("q, s", [(0.5, 0.3), (1e-3, 0.1), (0.9, 0.05)])
def test_the_other_delta_just_below_its_largest_epsilon_is_not_too_small(q, s):
    for rest in (0.5, 1e-6, 1e-9, 1e-12):
        epsilon = -math.log1p(-q) * (1 - rest)
        found = coupled_delta([1.0], sample_rate=q, noise_std=s, epsilon=epsilon, direction="add")
        exact = one_step_delta(q, s, epsilon, "add")
        assert exact * (1 - 1e-13) <= found <= exact * (1 + 1e-11 + 1e-14 / rest)
    largest = -math.log1p(-q) * (1 + 1e-9)
    for epsilon in (largest, 800.0):
        assert (
            coupled_delta([1.0], sample_rate=q, noise_std=s, epsilon=epsilon, direction="add") == 0
        )


def test_a_confidence_where_no_sensitivity_costs_anything_is_an_answer():
    """The worst delta was 0, whose logarithm no draw seemed to lie below."""
    step = dict(sample_rate=0.1, noise_std=10.0, max_sensitivity=1.0, confidence=0.9)
    assert coupled_delta([0.1, 0.2], **step, epsilon=20.0) == 0
    assert 0 < coupled_epsilon([0.1] * 50, **step, delta=1e-9) < 1


def test_epsilon_is_zero_where_delta_covers_everything():
    assert float(coupled_epsilon([0.0, 0.001], sample_rate=0.01, noise_std=1.0, delta=0.1)) == 0.0


def instances(count, seed):
    """Random steps on a line: four batches each, their chances, updates without x and with x, a
    rate and a noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def one_of(values, *shape):
        return values[torch.randint(len(values), shape, generator=generator)]

    # Few values of what the Gaussian mechanism's epsilon depends on, since that is what takes the
    # time.
    chances, without = uniform(4) + 0.05, 2 * uniform(4, count)
    with_x = without + one_of(3 * uniform(8) ** 3, 4, count)
    return (
        chances / chances.sum(),
        without,
        with_x,
        one_of(0.01 + 0.9 * uniform(4), count),
        one_of(0.3 + 2 * uniform(3), count),
    )


def hockey_sticks(epsilons, chances, without, with_x, rate, noise):
    """sup_S P(M(X') in S) - e^epsilon P(M(X) in S): for each of the epsilons, one for each
    instance.
    """
    width = 5 + 16 * noise
    line = torch.linspace(0, 1, 500, dtype=torch.float64) * width[:, None] - 8 * noise[:, None]
    alone, both = (
        sum(
            chance
            * torch.exp((-(((line - centre[:, None]) / noise[:, None]) ** 2) / 2).clamp(min=-500))
            for chance, centre in zip(chances, centres)
        )
        for centres in (without, with_x)
    )
    p = (1 - rate[:, None]) * alone + rate[:, None] * both
    scale = width / (499 * noise * math.sqrt(2 * math.pi))
    return [
        (p - epsilon.exp()[:, None] * alone).clamp(min=0).sum(1) * scale for epsilon in epsilons
    ]


def test_corollary_3_1_holds_on_ten_thousand_instances_and_its_form_with_inverted_exponents_fails():
    corrected = inverted = 0
    for seed, (p, delta) in enumerate(
        [
            (1.3, 1e-3),
            (1.5, 0.03),
            (2, 1e-5),
            (2, 0.1),
            (3, 1e-3),
            (4, 1e-2),
            (8, 1e-4),
            (16, 1e-6),
            (40, 1e-3),
            (100, 1e-2),
        ]
    ):
        chances, without, with_x, rate, noise = case = instances(1000, seed)
        sizes = (with_x - without).round(decimals=12)
        epsilon = holder_epsilon(
            sizes, sample_rate=rate, noise_std=noise, delta=delta, p=p, probabilities=chances
        )
        # With a_p^(1 - 1/p) delta'^(1/(p - 1)) in place of a_p^(p/(p - 1)) delta'^(-1/(p - 1)).
        log_a = ((p - 1) * (epsilon.exp() - 1 + rate).log() + math.log(delta / 2)) / p
        wrong = torch.logaddexp(
            (1 - 1 / p) * log_a + math.log(delta / 2) / (p - 1), torch.log1p(-rate)
        )
        right, other = hockey_sticks((epsilon, wrong), *case)
        corrected += int((right > delta * (1 + 1e-6)).sum())
        inverted += int((other > delta * (1 + 1e-6)).sum())
    assert corrected == 0
    assert inverted > 1000


def test_the_coupled_epsilon_is_never_above_corollary_3_1():
    chances, without, with_x, rate, noise = instances(40, 99)
    options = dict(sample_rate=rate, noise_std=noise, delta=1e-3, probabilities=chances)
    holder = holder_epsilon(with_x - without, p=[1.5, 3, 10, 100, 1000], **options)
    assert (coupled_epsilon(with_x - without, **options) <= holder).all()


def test_corollary_3_1_takes_the_best_exponent_and_a_confidence_costs_more():
    sizes = torch.linspace(0.1, 0.5, 100)
    options = dict(sample_rate=0.01, noise_std=1.0, delta=1e-5)
    best = float(holder_epsilon(sizes, p=[5, 50, 500], **options))
    assert best == pytest.approx(
        min(float(holder_epsilon(sizes, p=p, **options)) for p in (5, 50, 500)), rel=1e-12
    )
    assert best < float(
        holder_epsilon(sizes, p=[5, 50, 500], max_sensitivity=0.5, confidence=0.95, **options)
    )


def paper_exponent(updates, centre, noise):
    """-Delta_{U, alpha} / (2 sigma^2) as the paper defines it."""
    total = updates.sum(0) - (len(updates) - 1) * centre
    delta = (
        updates.square().sum() - (len(updates) - 1) * centre.square().sum() - total.square().sum()
    )
    return float(-delta / (2 * noise**2))


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_gram_matrix_gives_the_papers_exponent(direction):
    generator = torch.Generator().manual_seed(3)
    pool = 2 + torch.randn(5, 7, generator=generator, dtype=torch.float64)
    centre = torch.zeros(1, 7, dtype=torch.float64)
    pair = (centre, pool) if direction == "remove" else (pool, centre)
    found = float(update_divergence(*pair, noise_std=3.0, order=5, direction=direction, tuples=1))
    assert found == pytest.approx(paper_exponent(pool, centre[0], 3.0) / 4, rel=1e-10)


def theorem_3_6(rule, order):
    """The theorem with every expectation enumerated, for x present against absent."""
    chances, without, with_x = batches(rule)
    weights = torch.cat([(1 - RATE) * chances, RATE * chances]).log()
    updates = torch.cat([without, with_x])
    total = 0.0
    for chance, centre in zip(chances, without):
        shifted = (updates - centre) / NOISE
        tuples = torch.cartesian_prod(*[torch.arange(len(updates))] * order)
        rows = shifted[tuples]
        exponents = (rows.sum(1).square().sum(1) - rows.square().sum((1, 2))) / 2
        total += float(chance * torch.logsumexp(exponents + weights[tuples].sum(1), 0))
    return total / (order - 1)


def test_theorem_3_6_is_a_bound_looser_than_ours_and_its_estimate_comes_near_it():
    order = 3
    exact = theorem_3_6(mean_rule, order)
    chances, without, with_x = batches(mean_rule)
    ours = float(
        coupled_divergence(
            (without - with_x).norm(dim=1),
            sample_rate=RATE,
            noise_std=NOISE,
            order=order,
            probabilities=chances,
        )
    )
    assert true_divergences(mean_rule, order)[0] < ours < exact
    alone, _, mixed = draws(mean_rule, 150, 5)
    estimate = float(
        update_divergence(
            alone, mixed, noise_std=NOISE, order=order, tuples=200, direction="remove"
        )
    )
    assert estimate == pytest.approx(exact, rel=0.2)


def test_the_confidence_bound_of_theorem_3_6_is_mostly_the_trivial_one_and_never_below_the_truth():
    order, truth = 2, max(true_divergences(mean_rule, 2))
    options = dict(noise_std=NOISE, order=order, max_distance=2.2, confidence=0.95)
    trivial = order * (2.2 / NOISE) ** 2 / 2
    for count in (1, 10, 1500):
        alone, _, mixed = draws(mean_rule, count, count)
        bound = float(update_divergence(alone, mixed, **options))
        assert truth <= bound <= trivial * (1 + 1e-12)
    assert bound < 0.6 * trivial
    assert float(update_divergence(alone[:1], mixed[:1], **options)) == pytest.approx(trivial)


def test_both_directions_are_the_larger_of_the_two():
    alone, _, mixed = draws(mean_rule, 50, 1)
    one, other, both = (
        float(update_divergence(alone, mixed, noise_std=NOISE, order=3, direction=d, tuples=300))
        for d in ("remove", "add", "both")
    )
    assert both == pytest.approx(max(one, other), rel=0.1)


def test_bad_arguments_are_refused_by_name():
    step = dict(sample_rate=0.1, noise_multiplier=1.0, sensitivity=1.0, orders=2)
    sizes = [-1.0, math.nan, math.inf]
    refuses(
        step_divergence,
        step,
        sample_rate=[0.0],
        noise_multiplier=[0.0],
        sensitivity=sizes,
        orders=[1.0, 1e300, 1e8],
    )
    refuses(step_divergence, step, direction=["both"])
    refuses(
        log_mass, dict(sensitivity=1.0, sample_rate=0.1, noise_std=1.0, order=3), noise_std=[-1.0]
    )


@pytest.mark.parametrize(
    "function, extra",
    [
        (coupled_divergence, {"order": 2}),
        (coupled_delta, {"epsilon": 1.0}),
        (holder_epsilon, {"p": 2.0, "delta": 1e-5}),
    ],
)
def test_bad_batches_are_refused_by_name(function, extra):
    one = dict(sensitivities=[0.5], sample_rate=0.1, noise_std=1.0, **extra)
    refuses(function, one, sensitivities=[[], 0.5, [-0.1]])
    refuses(function, dict(one, max_sensitivity=0.4), sensitivities=[[0.5]])
    refuses(function, dict(one, max_sensitivity=1.0), confidence=[1.0])
    refuses(function, dict(one, confidence=0.9), max_sensitivity=[None])
    refuses(function, dict(one, sensitivities=[0.5, 0.6]), probabilities=[[0.5, 0.6], [1.0]])
    refuses(function, dict(one, max_sensitivity=1.0, probabilities=[1.0]), confidence=[0.9])


def test_bad_pools_are_refused_by_name():
    zeros, ones = torch.zeros(3, 2), torch.ones(3, 2)
    good = dict(updates=zeros, updates_with=zeros, noise_std=1.0, order=2)
    refuses(update_divergence, good, updates=[torch.zeros(3)], order=[2.5])
    refuses(update_divergence, good, updates_with=[torch.zeros(3, 1), torch.full((3, 2), math.nan)])
    refuses(update_divergence, dict(good, order=4), updates=[zeros])
    # whose updates are further apart than 1
    bounded = dict(good, updates_with=ones, confidence=0.9)
    refuses(update_divergence, bounded, max_distance=[None, 1.0])


def test_adding_at_an_epsilon_of_zero_is_computed_at_every_rate():
    """Rounding made an epsilon that is 0 negative, and refused it, at one rate in 250."""
    rates, sizes = torch.arange(1, 1000, dtype=torch.float64) / 1000, torch.full((1, 999), 0.5)
    step = dict(sample_rate=rates, noise_std=1.0, epsilon=0.0)
    add, remove = (
        coupled_delta(sizes, **step, direction=direction) for direction in ("add", "remove")
    )
    torch.testing.assert_close(add, remove, rtol=1e-9, atol=0)  # at 0 both are the total variation


def test_a_batch_that_cannot_be_counts_nothing():
    run = dict(sample_rate=0.1, noise_std=1.0, order=8)
    alone = coupled_divergence([0.1], probabilities=[1.0], **run)
    assert coupled_divergence([0.1, 1e200], probabilities=[1.0, 0.0], **run) == alone
