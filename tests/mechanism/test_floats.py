"""The account of what floats do: each of its bounds against exact arithmetic, and what it costs."""

import dataclasses
import fractions
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpcompanion.accounting import compute_epsilon
from dpcompanion.gradients import batch_dependence, clipping, layers, sums
from dpcompanion.mechanism import floats
from dpcompanion.mechanism.secure import grid_of, snapped
from dpcompanion.training import DPSGDPlan, cross_entropy, models, train, train_ensemble

from ..refusals import refuses

GOOD = dict(
    n=100,
    sample_rate=0.2,
    steps=10,
    max_grad_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-5,
    arithmetic="float",
    parameters=18,
)


def fractions_of(tensor):
    return [fractions.Fraction(value) for value in tensor.flatten().tolist()]


def norm(values):
    with mpmath.workdps(60):
        return (
            mpmath.sqrt(
                mpmath.mpf(sum(v * v for v in values).numerator)
                / mpmath.mpf(sum(v * v for v in values).denominator)
            )
            if any(values)
            else mpmath.mpf(0)
        )


class Words(nn.Module):
    """Every kind of layer whose gradients are held in a way of their own."""

    def __init__(self):
        super().__init__()
        self.words, self.along, self.conv = nn.Embedding(7, 6), nn.Linear(6, 4), nn.Conv2d(1, 3, 2)
        self.even, self.last = nn.GroupNorm(1, 3), nn.Linear(27, 3)

    def forward(self, x):
        return self.last(
            self.even(self.conv(torch.tanh(self.along(self.words(x))).unsqueeze(1))).flatten(1)
        )


def words(n=13):
    torch.manual_seed(0)
    return Words(), torch.randint(7, (n, 4)), torch.arange(n) % 3


def vectors(model, x, y, limits, **arguments):
    """The contribution of each example, by asking for each by itself with the others clipped to
    nothing.
    """
    found = []
    for i in range(len(x)):
        alone = torch.full((len(x),), 1e-290, dtype=torch.float64)
        alone[i] = limits[i]
        total = clipping.clipped_sum(model, cross_entropy, x, y, alone, float64=True, **arguments)
        found.append(torch.cat([g.flatten() for g in total.gradients.values()]))
    return torch.stack(found)


@pytest.mark.parametrize("method", ["mixed", "func"])
def test_what_is_added_is_what_was_measured_and_is_the_gradient(method):
    model, x, y = words()
    total = clipping.clipped_sum(model, cross_entropy, x, y, 1e300, method=method, float64=True)
    each = vectors(model, x, y, torch.full((len(x),), 1e300, dtype=torch.float64), method=method)
    torch.testing.assert_close(each.norm(dim=1), total.norms, rtol=floats.NORM_ERROR, atol=0)
    assert all(g.dtype == torch.float64 for g in total.gradients.values())
    for i in range(len(x)):
        model.zero_grad()
        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        torch.testing.assert_close(
            each[i].float(),
            torch.cat([p.grad.flatten() for p in model.parameters()]),
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("method, microbatch_size", [("mixed", None), ("mixed", 5), ("func", 4)])
def test_the_sum_is_off_by_no_more_than_its_bound(method, microbatch_size):
    model, x, y = words(16)
    limits = torch.linspace(0.1, 3, 16, dtype=torch.float64)
    total = clipping.clipped_sum(model, cross_entropy, x, y, limits, method=method, float64=True)
    found = torch.cat([g.flatten() for g in total.gradients.values()])
    each = vectors(model, x, y, limits, method=method)
    bound = 18 * 2.0**-53 / (1 - 18 * 2.0**-53)
    for k in range(0, len(found), 7):
        terms = fractions_of(each[:, k])
        # The terms themselves are rounded, to half a bit.
        slack = (fractions.Fraction(bound) + fractions.Fraction(2) ** -52) * sum(map(abs, terms))
        assert abs(fractions.Fraction(found[k].item()) - sum(terms)) <= slack + fractions.Fraction(
            1e-280
        )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 700),
    st.integers(0, 2**31),
    st.floats(-6, 3),
    st.booleans(),
)
def test_a_clipped_vector_is_no_longer_than_the_account_says(dtype, size, seed, power, constant):
    generator = torch.Generator().manual_seed(seed)
    g = (
        torch.ones(1, size) if constant else torch.randn(1, size, generator=generator)
    ) * 10.0**power
    g = (g * (1 + torch.rand(1, 1, generator=generator))).to(dtype)
    layer = layers.Explicit({"weight": g})
    limit = 0.7 * 10.0**power
    total = sums._clip(
        {"": layer}, layer.squared_norms(), torch.zeros(1), limit, dtype, None, float64=True
    )
    assert norm(fractions_of(total.gradients["weight"])) <= limit * (1 + floats.NORM_ERROR)


def test_norms_of_short_floats_are_measured_in_long_ones():
    # 256 equal numbers, whose norm lies between two bfloat16 numbers: 0.4% were lost.
    g = torch.full((1, 256), 1.0039 / 16).bfloat16()
    exact = 16 * float(g[0, 0])
    for size in (256, 200, 97):
        part = g[:, :size]
        assert float(layers.squared_norms(part).sqrt()) == pytest.approx(
            exact * math.sqrt(size / 256), rel=1e-5
        )
    many = torch.rand(50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(
        layers.squared_norms(many).sqrt(), many.double().norm(dim=1), rtol=1e-5, atol=0
    )


class Rows(nn.Module):
    """Example i's gradient is its input, whatever the batch."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Linear(size, 1, bias=False)

    def forward(self, x):
        return self.weight(x).squeeze(1)


def test_neighbours_move_the_snapped_sum_by_no_more_than_the_sensitivity():
    torch.manual_seed(3)
    n, size, std = 60, 30, 2.0
    x, y, model = 100 * torch.randn(n, size), torch.zeros(n), Rows(size)
    bound = floats.sensitivity(1.0, n=n, noise_std=std, parameters=size)

    def released(keep):
        total = clipping.clipped_sum(
            model, lambda outputs, _: outputs, x[keep], y[keep], 1.0, method="mixed", float64=True
        )
        return fractions_of(snapped(total.gradients["weight.weight"], grid_of(std)))

    everybody, worst = released(torch.arange(n)), 0
    for one in range(20):
        others = torch.arange(n)[torch.arange(n) != one]
        worst = max(worst, norm([a - b for a, b in zip(everybody, released(others))]))
    assert 1 - 1e-6 < worst <= bound


@pytest.mark.parametrize(
    "n, batch, steps, parameters, sigma",
    [
        (60_000, 512, 9375, 26_010, 3.42529),  # MNIST, the small CNN, epsilon 1
        (50_000, 1000, 2500, 268_346, 1.5),  # CIFAR-10, ResNet-20
        (1497, 128, 300, 2410, 1.3),
    ],
)  # digits, the page on your own model
def test_the_account_of_floats_costs_less_than_a_thousandth_at_the_books_sizes(
    n, batch, steps, parameters, sigma
):
    plan = dict(
        n=n,
        sample_rate=batch / n,
        steps=steps,
        max_grad_norm=1.0,
        noise_multiplier=sigma,
        delta=1e-5,
    )
    real = DPSGDPlan(**plan).epsilon()
    exact = DPSGDPlan(**plan, arithmetic="float", parameters=parameters).epsilon()
    assert real < exact < 1.001 * real


def test_the_account_is_that_of_the_larger_sensitivity():
    plan = DPSGDPlan(**GOOD)
    delta = 1 + 2.0**-15 + math.sqrt(18) * 2.0**-24
    assert plan.sensitivity == pytest.approx(delta, rel=1e-9) and plan.sensitivity > delta
    assert plan.effective_noise_multiplier == 1 / plan.sensitivity
    expected = compute_epsilon(
        sample_rate=0.2,
        noise_multiplier=1 / plan.sensitivity,
        steps=10,
        delta=1e-5,
        accountant="rdp",
    )
    assert plan.epsilon(accountant="rdp") == pytest.approx(float(expected), rel=1e-6)
    assert plan.epsilon(accountant="rdp") > (1 - 1e-9) * expected
    norms = torch.linspace(0.1, 2, 100)
    several = DPSGDPlan(**{**GOOD, "max_grad_norm": norms})
    assert (several.sensitivity > norms).all() and several.epsilon(accountant="rdp").shape == (100,)
    assert DPSGDPlan(**{**GOOD, "arithmetic": "real", "parameters": None}).sensitivity == 1.0


@pytest.mark.parametrize("target", [0.3, 8.0])
def test_a_calibrated_plan_meets_its_target(target):
    plan = DPSGDPlan.for_epsilon(
        target,
        n=1000,
        sample_rate=0.05,
        steps=200,
        max_grad_norm=0.3,
        delta=1e-5,
        arithmetic="float",
        parameters=10**6,
        accountant="rdp",
    )
    assert 0.998 * target < plan.epsilon(accountant="rdp") <= target


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_a_plan_for_budgets_meets_each_with_what_floats_add(method):
    run = dict(
        n=40,
        sample_rate=0.05,
        steps=200,
        max_grad_norm=0.3,
        delta=1e-5,
        accountant="rdp",
        method=method,
    )
    budgets = torch.tensor([0.5, 8.0], dtype=torch.float64).repeat(20)
    real = DPSGDPlan.for_epsilons(budgets, **run)
    plan = DPSGDPlan.for_epsilons(budgets, arithmetic="float", parameters=10**10, **run)
    spent = plan.epsilon()
    # What floats add is the same for all, and so a larger share of the smallest clip norm, for
    # which the noise is made.
    assert (
        plan.individual
        and (spent <= budgets).all()
        and (spent > 0.95 * budgets).all()
        and spent[0] > 0.998 * 0.5
    )
    # The account of real numbers' noise, with what floats add, exceeds the smallest budgets.
    careless = dataclasses.replace(real, arithmetic="float", parameters=10**10)
    assert (careless.epsilon() > budgets).any() and plan.noise_multiplier > real.noise_multiplier
    one = DPSGDPlan.for_epsilons(2.0, arithmetic="float", parameters=10**6, **run)
    assert not one.individual and 0.998 * 2 < one.epsilon() <= 2.0
    with pytest.raises(ValueError, match="parameters"):
        DPSGDPlan.for_epsilons(budgets, arithmetic="float", **run)


def test_the_distance_of_the_sampler_is_paid_for():
    calls = []

    def epsilon_at(delta):
        calls.append(delta)
        return 2.0

    numbers, delta = int(2.0**100 * 1e-9), 1e-5
    assert floats.paid_for(epsilon_at, delta, numbers) == 2.0
    # What is left for the exact mechanism, and what its law costs, are no more than delta.
    assert calls[-1] + (1 + math.exp(2.0)) * 1e-9 <= delta
    assert floats.paid_for(epsilon_at, delta, int(2.0**100 * 1e-4)) == math.inf
    assert floats.paid_for(lambda delta: 50.0, delta, numbers) == math.inf
    assert "what floats add" in DPSGDPlan(**GOOD).statement()


def test_bad_arguments_are_refused_by_name():
    refuses(DPSGDPlan, GOOD, arithmetic=["binary"], parameters=[None, 0], noise_multiplier=[0.0])
    refuses(DPSGDPlan, dict(GOOD, arithmetic="real"), parameters=[18])


def data(dtype=torch.float32):
    return torch.randn(100, 5, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(
        100
    ) % 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["auto", "func"])
def test_training_adds_in_float64_and_steps_in_the_models_type(dtype, method, monkeypatch):
    model, seen, noisy = models.linear(5, 3, seed=0).to(dtype), [], DPSGDPlan.noisy
    monkeypatch.setattr(
        DPSGDPlan,
        "noisy",
        lambda self, total, generator: (
            seen.append((total.dtype, noisy(self, total, generator))) or seen[-1][1]
        ),
    )
    before = [p.clone() for p in model.parameters()]
    train(
        model,
        cross_entropy,
        data(dtype),
        DPSGDPlan(**GOOD),
        method=method,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        progress=False,
    )
    assert len(seen) == 10 and all(p.dtype == dtype for p in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    for given_type, out in seen:
        assert given_type == torch.float64 and torch.equal(
            out / grid_of(1.0), (out / grid_of(1.0)).round()
        )


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(seed=1), "seed 1"),
        (dict(method="ghost"), "ghost"),
        (dict(parameters=17), "parameters"),
    ],
)
def test_a_run_that_the_account_does_not_cover_is_refused(arguments, match):
    model = models.linear(5, 3, seed=0)
    plan = DPSGDPlan(**{**GOOD, "parameters": arguments.pop("parameters", 18)})
    with pytest.raises(ValueError, match=match):
        train(
            model,
            cross_entropy,
            data(),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            **arguments,
        )
    with pytest.raises(ValueError, match="arithmetic"):
        train_ensemble(model, cross_entropy, data(), plan, seeds=[0], learning_rate=0.1)


def test_gradients_depend_on_the_batch_in_the_last_bits_only():
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))
    error = batch_dependence.batch_dependence_error(
        model,
        cross_entropy,
        *data(),
        examples=4,
        batches=6,
        generator=torch.Generator().manual_seed(0),
    )
    assert 0 <= error < 1e-5
    double = batch_dependence.batch_dependence_error(
        model.double(),
        cross_entropy,
        *data(torch.float64),
        examples=2,
        batches=4,
        generator=torch.Generator().manual_seed(0),
    )
    assert double < 1e-13


def test_a_model_that_mixes_examples_is_detected():
    class Mixing(nn.Sequential):
        def forward(self, x):
            return super().forward(x - 0.01 * x.mean(0))

    error = batch_dependence.batch_dependence_error(
        Mixing(nn.Linear(5, 3)),
        cross_entropy,
        *data(),
        examples=2,
        batches=4,
        method="mixed",
        generator=torch.Generator().manual_seed(0),
    )
    assert error > 1e-4
