import math

import pytest
import torch
from chains import GAIN, Chain

from dpcompanion.accounting import pld
from dpcompanion.per_instance import (
    exact_composition, log_mass, loss_delta, loss_divergence, loss_epsilon, step_loss, tilted_counts, tilted_noise,
)

DIRECTIONS = ("remove", "add")
RATE, NOISE, STEPS, ORDERS = 0.3, 1.0, 3, (2, 4, 8)
STEP = {"sample_rate": RATE, "noise_std": NOISE}


def tilted(direction, each, seed, gain=GAIN, orders=ORDERS):
    """Losses (runs,) and log masses (runs, orders) along `each` runs of the chain tilted at each of the orders."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.zeros(len(orders), each, dtype=torch.float64)
    losses, masses = torch.zeros_like(state), torch.zeros(len(orders), *state.shape, dtype=torch.float64)
    for _ in range(STEPS):
        gradient, moved = gain(state), NOISE * torch.randn(state.shape, generator=generator, dtype=torch.float64)
        masses += torch.stack([log_mass(gradient, order=a, direction=direction, **STEP) for a in orders])
        for row, order in enumerate(orders):
            options = {"order": order, "generator": generator, **STEP}
            if direction == "remove":
                moved[row] += tilted_counts(gradient[row], **options) * gradient[row]
            else:
                moved[row] = tilted_noise(moved[row, :, None], gradient[row, :, None], **options)[:, 0]
        losses += step_loss(moved[..., None], gradient[..., None], direction=direction, **STEP)
        state = state + moved
    return losses.flatten(), masses.flatten(1).T


def delta_by_quadrature(direction, epsilon, nodes=161, reach=9.0):
    """E[(1 - e^(epsilon - S))_+] over all paths of three states."""
    chain = Chain(STEPS, RATE, NOISE, reach=reach, nodes=nodes)
    first, second = chain._sides(direction)
    ratio, start = first - second, nodes // 2
    losses = ratio[start][:, None, None] + ratio[:, :, None] + ratio[None]
    law = (first[start][:, None, None] + first[:, :, None] + first[None]).exp() * chain.cell**3
    return float((law * -torch.expm1((epsilon - losses).clamp(max=0))).sum())


def worst_masses(direction, size=1.2, orders=ORDERS):
    return [STEPS * float(log_mass(size, order=a, direction=direction, **STEP)) for a in orders]


def everybody(size, delta):
    return pld.epsilon(sample_rate=RATE, noise_multiplier=NOISE / size, steps=STEPS, delta=delta)


@pytest.mark.parametrize("direction, epsilons", [("remove", (0.0, 0.5, 1.0, 2.0, 3.0)), ("add", (0.0, 0.3, 0.6))])
def test_delta_is_the_truth_by_quadrature_over_all_paths(direction, epsilons):
    losses, masses = tilted(direction, 4_000, seed=1)
    for epsilon in epsilons:
        truth = delta_by_quadrature(direction, epsilon)
        found = loss_delta(losses, masses, orders=ORDERS, epsilon=epsilon)
        assert float(found.estimate) == pytest.approx(truth, abs=4 * float(found.standard_error) + 1e-4 * truth)
        assert float(found.standard_error) < 0.06 * truth


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delta_is_unbiased_over_many_small_ensembles_and_scatters_as_its_standard_error_says(direction):
    losses, masses = tilted(direction, 200 * 30, seed=2)
    losses = losses.view(3, 200, 30).transpose(1, 2).reshape(90, 200)
    masses = masses.T.view(3, 3, 200, 30).permute(1, 3, 0, 2).reshape(90, 3, 200)
    found = loss_delta(losses, masses, orders=ORDERS, epsilon=0.5)
    truth = delta_by_quadrature(direction, 0.5)
    assert float(found.estimate.mean()) == pytest.approx(truth, abs=4 * float(found.estimate.std()) / math.sqrt(200))
    assert float(found.standard_error.mean()) == pytest.approx(float(found.estimate.std()), rel=0.25)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_where_norms_are_constant_epsilon_is_that_of_the_privacy_loss_distribution(direction, delta):
    losses, masses = tilted(direction, 3_000, seed=3, gain=torch.ones_like)
    truth = pld.compose(sample_rate=RATE, noise_multiplier=NOISE, steps=STEPS, delta=delta,
                        direction=direction).epsilon(delta)
    found = loss_epsilon(losses, masses, orders=ORDERS, delta=delta, worst_case=everybody(1.2, delta),
                         worst_masses=worst_masses(direction), confidence=0.999)
    assert float(found.low) <= truth <= float(found.high)
    assert float(found.estimate) == pytest.approx(truth, rel=0.02, abs=0.01)
    assert truth <= float(found.upper_bound) <= float(found.worst_case)
    # The estimate of epsilon is where that of delta falls to the target.
    again = loss_delta(losses, masses, orders=ORDERS, epsilon=found.estimate)
    assert float(again.estimate) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_moments_are_those_of_the_chain_and_of_the_runs_tilted_at_their_order(direction):
    chain = Chain(STEPS, RATE, NOISE)
    losses, masses = tilted(direction, 5_000, seed=4)
    for order in (2, 3, 4):
        found = loss_divergence(losses, masses, orders=ORDERS, order=order)
        assert float(found) == pytest.approx(chain.divergence(order, direction), rel=0.05)
    own = exact_composition(masses[5_000:10_000, 1], order=4)
    assert float(loss_divergence(losses, masses, orders=ORDERS, order=4)) == pytest.approx(float(own.estimate), rel=0.04)
    # One order alone: the loss drops out, and the mean of exp(L) remains.
    alone = loss_divergence(losses[:5_000], masses[:5_000, :1], orders=[2], order=2)
    assert float(alone) == pytest.approx(float(exact_composition(masses[:5_000, 0], order=2).estimate), rel=1e-12)


def test_epsilon_is_far_below_everybodys_where_gradients_shrink():
    losses, masses = tilted("remove", 2_000, seed=5, gain=lambda state: 1.2 * torch.exp(-2 * state**2) + 0.05)
    found = loss_epsilon(losses, masses, orders=ORDERS, delta=1e-5, worst_case=everybody(1.25, 1e-5),
                         worst_masses=worst_masses("remove", 1.25))
    assert float(found.upper_bound) < 0.95 * float(found.worst_case)
    assert float(found.high) - float(found.low) < 0.2
    assert float(found.low) <= float(found.estimate) <= float(found.high) <= float(found.upper_bound)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_upper_bounds_hold_as_often_as_they_say(direction):
    delta, each, times = delta_by_quadrature(direction, 0.5), 20, 100
    losses, masses = tilted(direction, each * times, seed=6)
    losses = losses.view(3, times, each).transpose(1, 2).reshape(3 * each, times)
    masses = masses.T.view(3, 3, times, each).permute(1, 3, 0, 2).reshape(3 * each, 3, times)
    found = loss_epsilon(losses, masses, orders=ORDERS, delta=delta, worst_case=everybody(1.2, delta),
                         worst_masses=worst_masses(direction), confidence=0.8)
    assert int((found.upper_bound < 0.5).sum()) <= 34                # 20 in the mean
    assert bool((found.upper_bound <= found.worst_case).all()) and float(found.upper_bound.mean()) < 0.99 * everybody(
        1.2, delta)


def test_uneven_shares_and_a_run_of_order_one():
    losses, masses = tilted("remove", 4_000, seed=7)
    ordinary, theirs = tilted("remove", 2_000, seed=8, orders=(2,))
    few = torch.cat((torch.arange(500), torch.arange(4_000, 7_000), torch.arange(8_000, 8_500)))
    found = loss_delta(losses[few], masses[few], orders=ORDERS, epsilon=1.0, shares=[0.125, 0.75, 0.125])
    assert float(found.estimate) == pytest.approx(delta_by_quadrature("remove", 1.0), rel=0.1)
    # Order 1 has no mass, and its weight no more than one over its share.
    both = torch.cat((torch.zeros(2_000, 1, dtype=torch.float64), theirs), 1)
    capped = loss_delta(ordinary + 50, both, orders=[1, 2], epsilon=0.0, shares=[0.25, 0.75])
    assert float(capped.estimate) <= 4


def test_an_example_without_gradient_costs_nothing_and_losses_below_epsilon_neither():
    none = loss_epsilon(torch.zeros(9), torch.zeros(9, 1), orders=[2], delta=1e-5, worst_case=3.0, worst_masses=[1.0])
    assert float(none.estimate) == float(none.low) == float(none.high) == 0
    found = loss_delta(torch.tensor([-1.0, 0.5]), torch.ones(2, 1), orders=[3], epsilon=0.5)
    assert float(found.estimate) == float(found.standard_error) == 0


def test_one_run_excludes_nothing_and_no_worst_masses_bound_nothing():
    one = loss_epsilon(torch.tensor([2.0]), torch.tensor([[3.0]]), orders=[4], delta=1e-2, worst_case=3.0)
    assert float(one.high) == float(one.upper_bound) == 3 and float(one.low) == 0 < float(one.estimate) < 2
    assert float(loss_delta(torch.tensor([2.0]), torch.tensor([[3.0]]), orders=[4], epsilon=0).standard_error) == math.inf


def test_no_number_exceeds_everybodys_epsilon():
    found = loss_epsilon(torch.tensor([9.0, 9.5]), torch.ones(2, 1) * 20, orders=[2], delta=1e-5, worst_case=2.0,
                         worst_masses=[21.0])
    assert float(found.estimate) == float(found.high) == float(found.upper_bound) == 2


def test_runs_of_any_shape_are_worked_on_entry_by_entry():
    generator = torch.Generator().manual_seed(9)
    losses = 3 * torch.rand(8, 2, 3, generator=generator, dtype=torch.float64)
    masses = torch.rand(8, 2, 2, 3, generator=generator, dtype=torch.float64)
    options = {"orders": [2, 5], "delta": 0.05, "worst_masses": [1.0, 1.0]}
    whole = loss_epsilon(losses, masses, worst_case=torch.full((2, 3), 4.0), **options)
    alone = loss_epsilon(losses[:, 1, 2], masses[..., 1, 2], worst_case=4.0, **options)
    for name in ("estimate", "low", "high", "upper_bound"):
        assert getattr(whole, name).shape == (2, 3)
        assert float(getattr(whole, name)[1, 2]) == pytest.approx(float(getattr(alone, name)), rel=1e-9)


def test_losses_beyond_float64_are_no_obstacle():
    found = loss_delta(torch.tensor([3000.0, 2900.0]), torch.tensor([[5000.0], [5100.0]]), orders=[3], epsilon=2800.0)
    assert float(found.estimate) == pytest.approx((math.exp(-1000) + math.exp(-700)) / 2)
    assert float(loss_divergence([3000.0], [[5000.0]], orders=[3], order=3)) == pytest.approx(2500)


def test_a_steps_loss_is_its_likelihood_ratio_and_a_point_that_enters_always_has_a_linear_one():
    moved, gradient = torch.tensor([[0.5, -1.0]]), torch.tensor([[0.3, 0.4]])
    ratio = 0.8 + 0.2 * math.exp((0.15 - 0.4) / 0.49 - 0.25 / 0.98)
    step = {"sample_rate": 0.2, "noise_std": 0.7}
    assert float(step_loss(moved, gradient, **step)) == pytest.approx(math.log(ratio), rel=1e-6)
    assert float(step_loss(moved, gradient, direction="add", **step)) == pytest.approx(-math.log(ratio), rel=1e-6)
    assert float(step_loss([2.0], [1.0], sample_rate=1.0, noise_std=1.0)) == 1.5
    assert float(step_loss([1e4], [1.0], sample_rate=0.1, noise_std=1.0)) == pytest.approx(9999.5 + math.log(0.1))


@pytest.mark.parametrize("change, message", [
    ({"losses": []}, "losses must be"), ({"losses": [math.nan, 1.0]}, "losses must lie in"),
    ({"losses": [math.inf, 1.0]}, "losses must lie in"), ({"log_masses": [[0.5], [-0.1]]}, "log_masses must lie in"),
    ({"log_masses": [0.5, 0.5]}, "log_masses must have the shape"), ({"orders": []}, "orders must be different"),
    ({"orders": [2, 2]}, "orders must be different"), ({"orders": [0.5]}, "orders must lie in"),
    ({"shares": [0.5]}, "shares must be"), ({"shares": [0.5, 0.5]}, "shares must be"), ({"shares": [0.0]}, "shares must"),
    ({"delta": 0.0}, "delta must lie in"), ({"delta": 1.0}, "delta must lie in"),
    ({"worst_case": -1.0}, "worst_case must lie in"), ({"worst_case": math.inf}, "worst_case must lie in"),
    ({"worst_masses": [0.1]}, "must not exceed worst_masses"), ({"worst_masses": [1.0, 1.0]}, "worst_masses must be one"),
    ({"confidence": 1.0}, "confidence must lie in")])
def test_bad_runs_are_refused_by_name(change, message):
    arguments = {"losses": [1.0, 2.0], "log_masses": [[0.5], [0.6]], "orders": [2], "delta": 1e-5, "worst_case": 3.0,
                 "worst_masses": [1.0], **change}
    with pytest.raises(ValueError, match=message):
        loss_epsilon(arguments.pop("losses"), arguments.pop("log_masses"), **arguments)


@pytest.mark.parametrize("change, message", [
    ({"sample_rate": 0.0}, "sample_rate must lie in"), ({"noise_std": 0.0}, "noise_std must lie in"),
    ({"direction": "both"}, "direction must be one of"), ({"moved": [1.0, 2.0]}, "moved and gradient must have"),
    ({"moved": 1.0}, "moved and gradient must have")])
def test_bad_steps_are_refused_by_name(change, message):
    arguments = {"moved": [1.0], "gradient": [0.5], "sample_rate": 0.1, "noise_std": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        step_loss(arguments.pop("moved"), arguments.pop("gradient"), **arguments)


@pytest.mark.parametrize("epsilon", [-0.1, math.inf, math.nan])
def test_bad_epsilons_are_refused_by_name(epsilon):
    with pytest.raises(ValueError, match="epsilon must lie in"):
        loss_delta([1.0], [[0.5]], orders=[2], epsilon=epsilon)
    with pytest.raises(ValueError, match="order must lie in"):
        loss_divergence([1.0], [[0.5]], orders=[2], order=1)
