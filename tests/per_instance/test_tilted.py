import math

import numpy as np
import pytest
import torch
from chains import GAIN, Chain
from scipy.stats import kstest
from waits import Asked

from dpcompanion.per_instance import (
    compose,
    exact_composition,
    log_mass,
    step_divergence,
    tilted,
    tilted_counts,
    tilted_noise,
)

from ..refusals import refused, refuses


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(q, s, size, order):
    terms = [
        math.comb(order, k)
        * (1 - q) ** (order - k)
        * q**k
        * math.exp((k * k - k) * size**2 / (2 * s * s))
        for k in range(order + 1)
    ]
    return np.array(terms) / sum(terms), sum(terms)


@pytest.mark.parametrize(
    "q, s, size, order", [(0.1, 1.0, 0.5, 2), (0.3, 0.7, 0.9, 6), (0.01, 2.0, 1.0, 10)]
)
def test_counts_follow_their_weights(q, s, size, order):
    counts = tilted_counts(
        torch.full((100_000,), size), sample_rate=q, noise_std=s, order=order, generator=generator()
    )
    expected, mass = weights(q, s, size, order)
    seen = np.bincount(counts.numpy(), minlength=order + 1) / len(counts)
    assert np.abs(seen - expected).max() < 5 * math.sqrt(0.25 / len(counts))
    assert float(log_mass(size, sample_rate=q, noise_std=s, order=order)) == pytest.approx(
        math.log(mass), rel=1e-9
    )


def test_counts_at_the_ends():
    sizes = torch.tensor([0.0, 1.0, 50.0]).expand(1000, 3)
    always = tilted_counts(sizes, sample_rate=1.0, noise_std=1.0, order=5, generator=generator())
    assert (always == 5).all()  # r is a power of e: a shift by order times the gradient
    counts = tilted_counts(sizes, sample_rate=0.2, noise_std=1.0, order=5, generator=generator())
    assert (counts[:, 2] == 5).all() and counts.max() <= 5
    assert float(counts[:, 0].double().mean()) == pytest.approx(1.0, abs=0.12)  # binomial
    assert counts.shape == (1000, 3) and counts.dtype == torch.int64


def test_rare_points_are_tilted_little():
    counts = tilted_counts(
        torch.full((100_000,), 0.5), sample_rate=1e-3, noise_std=1.0, order=4, generator=generator()
    )
    assert float(counts.double().mean()) == pytest.approx(4e-3, rel=0.3)


def add_density(q, s, size, order):
    line = np.linspace(-12 * s - order * size, 12 * s, 200_001)
    log_r = np.logaddexp(math.log1p(-q), math.log(q) + line * size / s**2 - size**2 / (2 * s * s))
    density = np.exp((1 - order) * log_r - line**2 / (2 * s * s))
    below = np.cumsum(density)
    return line, below / below[-1]


@pytest.mark.parametrize(
    "q, s, size, order",
    [(0.3, 1.0, 1.0, 4), (0.9, 0.5, 1.0, 6), (0.01, 2.0, 1.0, 2), (0.99, 1.0, 2.0, 2.5)],
)
def test_noise_the_other_way_round_has_its_density_along_the_gradient_and_no_other_change(
    q, s, size, order
):
    noise = s * torch.randn(20_000, 3, generator=generator(1), dtype=torch.float64)
    direction = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    moved = tilted_noise(
        noise, size * direction, sample_rate=q, noise_std=s, order=order, generator=generator(2)
    )
    line, below = add_density(q, s, size, order)
    assert kstest((moved @ direction).numpy(), lambda x: np.interp(x, line, below)).pvalue > 0.001
    across = torch.tensor([[0.0, 1.0, 0.0], [0.8, 0.0, -0.6]], dtype=torch.float64)
    torch.testing.assert_close(moved @ across.T, noise @ across.T)


def test_a_point_that_enters_always_shifts_the_noise_and_one_without_gradient_leaves_it():
    noise = torch.randn(50_000, 1, generator=generator(3), dtype=torch.float64)
    shifted = tilted_noise(
        noise, torch.ones(1), sample_rate=1.0, noise_std=1.0, order=4, generator=generator(4)
    )
    assert float(shifted.mean()) == pytest.approx(-3, abs=0.03) and float(
        shifted.std()
    ) == pytest.approx(1, abs=0.02)
    same = tilted_noise(
        noise, torch.zeros(1), sample_rate=0.5, noise_std=1.0, order=4, generator=generator(4)
    )
    assert torch.equal(same, noise)


RATE, NOISE, STEPS = 0.3, 1.0, 4


def tilted_runs(order, direction, runs, seed):
    """The sums of ln A or ln B along tilted runs of the chain."""
    own = generator(seed)
    theta, total = torch.zeros(runs, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
    options = dict(sample_rate=RATE, noise_std=NOISE, order=order)
    for _ in range(STEPS):
        gradient = GAIN(theta)
        total += log_mass(gradient, direction=direction, **options)
        noise = NOISE * torch.randn(runs, generator=own, dtype=torch.float64)
        if direction == "remove":
            theta = theta + tilted_counts(gradient, generator=own, **options) * gradient + noise
        else:
            theta = (
                theta
                + tilted_noise(noise[:, None], gradient[:, None], generator=own, **options)[:, 0]
            )
    return total


def worst(order, direction):
    return STEPS * float(
        step_divergence(
            sample_rate=RATE,
            noise_multiplier=NOISE,
            sensitivity=1.2,
            orders=order,
            direction=direction,
        )
    )


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("order", [2, 4])
def test_exact_composition_is_the_truth_by_quadrature_below_theorem_3_3_and_the_worst_case(
    order, direction
):
    chain = Chain(STEPS, RATE, NOISE)
    truth = chain.divergence(order, direction)
    found = exact_composition(
        tilted_runs(order, direction, 8_000, seed=1),
        order=order,
        worst_case=worst(order, direction),
        confidence=0.999,
    )
    assert float(found.low) <= truth <= float(found.high)
    assert float(found.estimate) == pytest.approx(truth, rel=0.03)
    assert truth <= float(found.upper_bound) <= float(found.worst_case)
    states = chain.states(STEPS, direction, 500)
    holder = min(
        float(
            compose(
                lambda t, a: step_divergence(
                    sample_rate=RATE,
                    noise_multiplier=NOISE,
                    sensitivity=GAIN(states[t - 1]),
                    orders=a,
                    direction=direction,
                ),
                steps=STEPS,
                order=order,
                p=p,
            )
        )
        for p in (2 * STEPS, 3 * STEPS)
    )
    assert truth < holder


def test_upper_bounds_from_a_handful_of_runs_hold_as_often_as_they_say():
    truth, bound = Chain(STEPS, RATE, NOISE).divergence(3, "remove"), worst(3, "remove")
    sums = tilted_runs(3, "remove", 12 * 300, seed=5).view(12, 300)
    found = exact_composition(sums, order=3, worst_case=bound, confidence=0.9, resamples=200)
    assert int((found.upper_bound < truth).sum()) <= 44  # 30 in the mean
    assert (found.upper_bound <= bound).all() and (found.estimate <= found.upper_bound).all()
    assert (found.low <= found.estimate + 1e-12).all() and (
        found.estimate <= found.high + 1e-12
    ).all()
    assert float((found.high - found.low).mean()) < 0.4 * float(found.estimate.mean())


def test_one_run_bounds_hardly_anything_and_no_worst_case_bounds_nothing():
    one = exact_composition(torch.tensor([0.5]), order=2, worst_case=1.0, confidence=0.95)
    assert (
        0.95 < float(one.upper_bound) <= 1.0
        and float(one.low) == float(one.estimate) == float(one.high) == 0.5
    )
    assert float(exact_composition(torch.zeros(50), order=2).upper_bound) == math.inf


def test_sums_of_any_shape_are_worked_on_entry_by_entry():
    sums = torch.rand(9, 2, 3, generator=generator(7), dtype=torch.float64)
    whole = exact_composition(sums, order=4, worst_case=torch.full((2, 3), 0.5), resamples=100)
    alone = exact_composition(sums[:, 1, 2], order=4, worst_case=0.5, resamples=100)
    for name in ("estimate", "low", "high", "upper_bound"):
        assert getattr(whole, name).shape == (2, 3)
        assert float(getattr(whole, name)[1, 2]) == pytest.approx(
            float(getattr(alone, name)), rel=1e-12
        )


def test_sums_beyond_float64_are_no_obstacle():
    found = exact_composition(torch.tensor([800.0, 900.0, 5000.0]), order=2, worst_case=1e4)
    assert (
        float(found.estimate) == pytest.approx(5000 - math.log(3)) and found.upper_bound.isfinite()
    )


def test_bad_arguments_are_refused_by_name():
    bad = dict(
        log_masses=[[-0.5], [], [math.inf]], order=[1], worst_case=[0.4, -1.0], confidence=[1.0]
    )
    refuses(exact_composition, dict(log_masses=[0.5], order=2), **bad)
    good = dict(sensitivity=1.0, sample_rate=0.1, noise_std=1.0, order=2, generator=generator())
    refuses(
        tilted_counts,
        good,
        order=[2.5, 1],
        sample_rate=[0.0],
        noise_std=[0.0],
        sensitivity=[-1.0],
        generator=[None],
    )


def test_masses_that_lie_on_a_device_are_asked_twice_in_a_whole_call(monkeypatch):
    """By name: whether all is well, here and in the bound. It was 82 times."""
    masses = torch.rand(20, 3, generator=generator(0), dtype=torch.float64)
    here = exact_composition(masses, order=4, worst_case=1.0, resamples=50)
    monkeypatch.setattr(tilted, "on_accelerator", lambda tensor: True)
    with Asked() as asked:
        there = exact_composition(masses, order=4, worst_case=1.0, resamples=50)
    assert sum(asked.seen.values()) == 2
    for name in ("estimate", "low", "high", "upper_bound"):
        assert torch.equal(getattr(here, name), getattr(there, name))
    for bad, message in (
        (masses - 1, "log_masses must lie in"),
        (masses * math.nan, "log_masses must lie in"),
    ):
        refused(message, exact_composition, bad, order=4, worst_case=1.0)
    refused("log_masses", exact_composition, masses + 3, order=4, worst_case=1.0)
    refused(
        "worst_case", exact_composition, torch.zeros(4), order=4, worst_case=torch.tensor(-1e-12)
    )
