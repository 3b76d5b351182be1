import math

import pytest
import torch
from chains import GAIN, Chain

from dpcompanion.accounting import pld
from dpcompanion.per_instance import (
    exact_composition,
    log_mass,
    loss,
    loss_divergence,
    loss_epsilon,
    proposal_counts,
    proposal_log_density,
    step_loss,
    tilted_counts,
    tilted_noise,
)

from ..refusals import refuses

DIRECTIONS = ("remove", "add")
RATE, NOISE, STEPS, LARGEST = 0.3, 1.0, 3, 1.3
LAWS = {"remove": ((2, 0.1), (4, 0.0), (7, 0.02)), "add": ((2, 0.0), (4, 0.0), (8, 0.0))}
STEP = {"sample_rate": RATE, "noise_std": NOISE}


def runs_of(direction, each, seed, gain=GAIN, laws=None):
    """Losses (runs,) and log densities (runs, laws) along `each` runs of the chain by each of the
    laws.
    """
    generator, laws = torch.Generator().manual_seed(seed), LAWS[direction] if laws is None else laws
    state = torch.zeros(len(laws), each, dtype=torch.float64)
    losses, densities = (
        torch.zeros_like(state),
        torch.zeros(len(laws), *state.shape, dtype=torch.float64),
    )
    for _ in range(STEPS):
        gradient, moved = (
            gain(state),
            NOISE * torch.randn(state.shape, generator=generator, dtype=torch.float64),
        )
        for row, (order, jumps) in enumerate(laws):
            options = {"order": order, "generator": generator, **STEP}
            if direction == "remove":
                count = proposal_counts(
                    gradient[row], jumps=jumps, max_sensitivity=LARGEST, **options
                )
                moved[row] += count * gradient[row]
            else:
                moved[row] = tilted_noise(moved[row, :, None], gradient[row, :, None], **options)[
                    :, 0
                ]
        here = step_loss(moved[..., None], gradient[..., None], direction=direction, **STEP)
        losses += here
        pair = moved[..., None], gradient[..., None]
        densities += torch.stack(
            [
                proposal_log_density(*pair, order=a, jumps=jumps, max_sensitivity=LARGEST, **STEP)
                if direction == "remove"
                else (a - 1) * here - log_mass(gradient, order=a, direction="add", **STEP)
                for a, jumps in laws
            ]
        )
        state = state + moved
    return losses.flatten(), densities.flatten(1).T


def many(direction, each, times, seed):
    """The same as `times` small ensembles: (runs, times) and (runs, laws, times)."""
    losses, densities = runs_of(direction, each * times, seed)
    laws = densities.shape[1]
    return (
        losses.view(laws, times, each).transpose(1, 2).reshape(laws * each, times),
        densities.T.reshape(laws, laws, times, each)
        .permute(1, 3, 0, 2)
        .reshape(laws * each, laws, times),
    )


def delta_by_quadrature(direction, epsilon, nodes=161, reach=9.0):
    """E[(1 - e^(epsilon - S))_+] over all paths of three states."""
    chain = Chain(STEPS, RATE, NOISE, reach=reach, nodes=nodes)
    first, second = chain.sides(direction)
    ratio, start = first - second, nodes // 2
    losses = ratio[start][:, None, None] + ratio[:, :, None] + ratio[None]
    law = (first[start][:, None, None] + first[:, :, None] + first[None]).exp() * chain.cell**3
    return float((law * -torch.expm1((epsilon - losses).clamp(max=0))).sum())


def floors(direction, size=LARGEST):
    return [
        (
            a,
            STEPS
            * (
                (float(log_mass(size, order=a, direction=direction, **STEP)) if a > 1 else 0)
                - math.log1p(-jumps)
            ),
        )
        for a, jumps in LAWS[direction]
    ]


def delta_at(losses, densities, *, epsilon, shares=None):
    """The estimate of delta whose falling `loss_epsilon` follows, and its standard error."""
    losses, log_weights = loss._weighted(losses, densities, shares)
    return loss._mean_and_error(loss._log_values(losses, log_weights, epsilon))


def uniform(size, delta):
    return pld.epsilon(sample_rate=RATE, noise_multiplier=NOISE / size, steps=STEPS, delta=delta)


@pytest.mark.parametrize(
    "direction, epsilons", [("remove", (0.0, 0.5, 1.0, 2.0, 3.0)), ("add", (0.0, 0.3, 0.6))]
)
def test_delta_is_the_truth_by_quadrature_over_all_paths(direction, epsilons):
    losses, densities = runs_of(direction, 4_000, seed=1)
    for epsilon in epsilons:
        truth = delta_by_quadrature(direction, epsilon)
        found, error = delta_at(losses, densities, epsilon=epsilon)
        assert float(found) == pytest.approx(truth, abs=4 * float(error) + 1e-4 * truth)
        assert float(error) < 0.06 * truth


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delta_is_unbiased_over_small_ensembles_and_scatters_as_its_standard_error_says(direction):
    found, errors = delta_at(*many(direction, 30, 200, seed=2), epsilon=0.5)
    truth = delta_by_quadrature(direction, 0.5)
    assert float(found.mean()) == pytest.approx(truth, abs=4 * float(found.std()) / math.sqrt(200))
    assert float(errors.mean()) == pytest.approx(float(found.std()), rel=0.3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
@pytest.mark.slow
def test_where_norms_are_constant_epsilon_is_that_of_the_privacy_loss_distribution(
    direction, delta
):
    losses, densities = runs_of(direction, 1_000, seed=3, gain=torch.ones_like)
    truth = pld.compose(
        sample_rate=RATE, noise_multiplier=NOISE, steps=STEPS, delta=delta, direction=direction
    ).epsilon(delta)
    found = loss_epsilon(
        losses,
        densities,
        delta=delta,
        worst_case=uniform(LARGEST, delta),
        floors=floors(direction),
        confidence=0.999,
    )
    assert float(found.low) <= truth <= float(found.high)
    assert float(found.estimate) == pytest.approx(truth, rel=0.03, abs=0.015)
    assert truth <= float(found.upper_bound) <= float(found.worst_case)
    # The estimate of epsilon is where that of delta falls to the target.
    assert float(delta_at(losses, densities, epsilon=found.estimate)[0]) == pytest.approx(
        delta, rel=1e-6
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_moments_are_those_of_the_chain(direction):
    chain = Chain(STEPS, RATE, NOISE)
    losses, densities = runs_of(direction, 5_000, seed=4)
    for order in (2, 3, 4):
        found = loss_divergence(losses, densities, order=order)
        assert float(found) == pytest.approx(
            chain.divergence(order, direction), rel=0.06, abs=0.005
        )


def test_one_law_that_tilts_at_the_order_asked_for_is_exact_composition():
    losses, densities = runs_of("remove", 500, seed=5, laws=((3, 0.0),))
    masses = (2 * losses - densities[:, 0]).clamp(min=0)
    own = exact_composition(masses, order=3)
    assert float(loss_divergence(losses, densities, order=3)) == pytest.approx(
        float(own.estimate), rel=1e-12
    )


def test_epsilon_is_far_below_the_worst_case_where_gradients_fade():
    losses, densities = runs_of(
        "remove", 2_000, seed=5, gain=lambda state: 1.2 * torch.exp(-2 * state**2) + 0.05
    )
    found = loss_epsilon(
        losses, densities, delta=1e-5, worst_case=uniform(1.25, 1e-5), floors=floors("remove")
    )
    assert float(found.upper_bound) < 0.95 * float(found.worst_case)
    assert float(found.high) - float(found.low) < 0.2
    assert (
        float(found.low) <= float(found.estimate) <= float(found.high) <= float(found.upper_bound)
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.slow
def test_upper_bounds_hold_as_often_as_they_say(direction):
    delta = delta_by_quadrature(direction, 0.5)
    found = loss_epsilon(
        *many(direction, 20, 100, seed=6),
        delta=delta,
        worst_case=uniform(1.2, delta),
        floors=floors(direction),
        confidence=0.8,
    )
    assert int((found.upper_bound < 0.5).sum()) <= 34  # 20 in the mean
    assert bool((found.upper_bound <= found.worst_case).all())
    assert float(found.upper_bound.mean()) < 0.99 * uniform(1.2, delta)


def test_jumps_in_the_proposal_halve_the_error_of_orders_alone():
    """A gradient that is long at the first step alone: one step with noise of several standard
    deviations decides.
    """
    rate, delta = 0.02, 1e-5
    truth = pld.compose(sample_rate=rate, noise_multiplier=1.0, steps=1, delta=delta).epsilon(delta)
    step, generator = {"sample_rate": rate, "noise_std": 1.0}, torch.Generator().manual_seed(8)

    def estimate(laws, each=15, times=200):
        losses, densities = [], []
        gradient = torch.ones(each * times, 1, dtype=torch.float64)
        for order, jumps in laws:
            count = proposal_counts(
                gradient[:, 0], order=order, jumps=jumps, generator=generator, **step
            )
            moved = count[:, None] * gradient + torch.randn(
                gradient.shape, generator=generator, dtype=torch.float64
            )
            losses.append(step_loss(moved, gradient, **step).view(each, times))
            densities.append(
                torch.stack(
                    [
                        proposal_log_density(moved, gradient, order=a, jumps=j, **step)
                        for a, j in laws
                    ]
                )
                .view(len(laws), each, times)
                .transpose(0, 1)
            )
        return loss_epsilon(
            torch.cat(losses), torch.cat(densities), delta=delta, worst_case=5.0
        ).estimate

    alone, jumping = (
        estimate([(2, 0.0), (6, 0.0), (13, 0.0)]),
        estimate([(2, 0.5), (6, 0.5), (13, 0.0)]),
    )
    assert float((jumping - truth).abs().mean()) < 0.4 * float((alone - truth).abs().mean())
    assert float((jumping - truth).abs().mean()) < 0.2 * truth


def test_counts_follow_the_law_whose_density_is_accounted_for():
    size, options = (
        torch.full((100_000,), 0.8),
        {"order": 3, "jumps": 0.2, "max_sensitivity": 1.6, **STEP},
    )
    counts = proposal_counts(size, generator=torch.Generator().manual_seed(9), **options)
    tilted = [
        math.comb(3, k) * 0.7 ** (3 - k) * 0.3**k * math.exp((k * k - k) * 0.32) for k in range(4)
    ]
    chance = 0.2 / 4
    expected = [
        (1 - chance) * (tilted[k] / sum(tilted) if k < 4 else 0) + (chance / 6 if k else 0)
        for k in range(7)
    ]
    seen = torch.bincount(counts, minlength=7) / len(counts)
    assert (seen - torch.tensor(expected)).abs().max() < 5 * math.sqrt(0.25 / len(counts))
    line = torch.linspace(-12, 18, 6001, dtype=torch.float64)
    density = proposal_log_density(line[:, None], torch.full((1, 1), 0.8), **options)
    first = (
        step_loss(line[:, None], torch.full((1, 1), 0.8), **STEP)
        - line**2 / 2
        - math.log(2 * math.pi) / 2
    )
    by_hand = sum(
        p * torch.exp(-((line - 0.8 * k) ** 2) / 2) for k, p in enumerate(expected)
    ) / math.sqrt(2 * math.pi)
    torch.testing.assert_close(torch.exp(density + first), by_hand, rtol=1e-6, atol=1e-12)


def test_a_law_without_jumps_is_tilting_and_that_of_order_one_an_ordinary_run():
    size = torch.tensor([0.0, 0.4, 1.0]).repeat(50, 1)
    again, own = (torch.Generator().manual_seed(10) for _ in range(2))
    counts = proposal_counts(size, order=4, generator=own, **STEP)
    assert torch.equal(counts, tilted_counts(size, order=4, generator=again, **STEP))
    moved, gradient = torch.tensor([[1.7]]), torch.tensor([[0.9]])
    tilted = proposal_log_density(moved, gradient, order=4, **STEP)
    expected = 3 * step_loss(moved, gradient, **STEP) - log_mass(0.9, order=4, **STEP)
    assert float(tilted) == pytest.approx(float(expected), rel=1e-6)
    assert float(proposal_log_density(moved, gradient, order=1, **STEP)) == pytest.approx(
        0, abs=1e-12
    )
    ordinary = proposal_counts(torch.ones(50_000), order=1, generator=own, **STEP)
    assert ordinary.max() == 1 and float(ordinary.double().mean()) == pytest.approx(RATE, abs=0.01)


def test_a_point_that_enters_always_has_its_law_too():
    counts = proposal_counts(
        torch.ones(9), sample_rate=1.0, noise_std=1.0, order=3, generator=torch.Generator()
    )
    assert (counts == 3).all()
    found = proposal_log_density([[2.0]], [[1.0]], sample_rate=1.0, noise_std=1.0, order=3)
    assert float(found) == pytest.approx(2 * 1.5 - 3)


def test_uneven_shares():
    losses, densities = runs_of("remove", 4_000, seed=7)
    few = torch.cat((torch.arange(500), torch.arange(4_000, 7_000), torch.arange(8_000, 8_500)))
    found, _ = delta_at(losses[few], densities[few], epsilon=1.0, shares=[0.125, 0.75, 0.125])
    assert float(found) == pytest.approx(delta_by_quadrature("remove", 1.0), rel=0.1)


def test_an_example_without_gradient_costs_nothing_and_losses_below_epsilon_neither():
    none = loss_epsilon(
        torch.zeros(9), torch.zeros(9, 1), delta=1e-5, worst_case=3.0, floors=[(2, 1.0)]
    )
    assert float(none.estimate) == float(none.low) == float(none.high) == 0
    found, error = delta_at(torch.tensor([-1.0, 0.5]), torch.ones(2, 1), epsilon=0.5)
    assert float(found) == float(error) == 0


def test_one_run_excludes_nothing_and_no_floors_bound_nothing():
    one = loss_epsilon(torch.tensor([2.0]), torch.tensor([[3.0]]), delta=1e-2, worst_case=3.0)
    assert (
        float(one.high) == float(one.upper_bound) == 3
        and float(one.low) == 0 < float(one.estimate) < 2
    )
    assert float(delta_at(torch.tensor([2.0]), torch.tensor([[3.0]]), epsilon=0)[1]) == math.inf


def test_no_number_exceeds_the_worst_case():
    found = loss_epsilon(
        torch.tensor([9.0, 9.5]),
        torch.full((2, 1), -10.0),
        delta=1e-5,
        worst_case=2.0,
        floors=[(2, 21.0)],
    )
    assert float(found.estimate) == float(found.high) == float(found.upper_bound) == 2


def test_runs_of_any_shape_are_worked_on_entry_by_entry():
    generator = torch.Generator().manual_seed(9)
    losses = 3 * torch.rand(8, 2, 3, generator=generator, dtype=torch.float64)
    densities = torch.rand(8, 2, 2, 3, generator=generator, dtype=torch.float64)
    options = {"delta": 0.05, "floors": [(1, 1.0), (1, 1.0)]}
    whole = loss_epsilon(losses, densities, worst_case=torch.full((2, 3), 4.0), **options)
    alone = loss_epsilon(losses[:, 1, 2], densities[..., 1, 2], worst_case=4.0, **options)
    for name in ("estimate", "low", "high", "upper_bound"):
        assert getattr(whole, name).shape == (2, 3)
        assert float(getattr(whole, name)[1, 2]) == pytest.approx(
            float(getattr(alone, name)), rel=1e-9
        )


def test_losses_beyond_float64_are_no_obstacle():
    found, _ = delta_at(
        torch.tensor([3000.0, 2900.0]), torch.tensor([[1000.0], [700.0]]), epsilon=2800.0
    )
    assert float(found) == pytest.approx((math.exp(-1000) + math.exp(-700)) / 2)
    assert float(loss_divergence([3000.0], [[1000.0]], order=3)) == pytest.approx(2500)


def test_a_steps_loss_is_its_likelihood_ratio():
    moved, gradient = torch.tensor([[0.5, -1.0]]), torch.tensor([[0.3, 0.4]])
    ratio = 0.8 + 0.2 * math.exp((0.15 - 0.4) / 0.49 - 0.25 / 0.98)
    step = {"sample_rate": 0.2, "noise_std": 0.7}
    assert float(step_loss(moved, gradient, **step)) == pytest.approx(math.log(ratio), rel=1e-6)
    assert float(step_loss(moved, gradient, direction="add", **step)) == pytest.approx(
        -math.log(ratio), rel=1e-6
    )
    assert float(step_loss([2.0], [1.0], sample_rate=1.0, noise_std=1.0)) == 1.5
    assert float(step_loss([1e4], [1.0], sample_rate=0.1, noise_std=1.0)) == pytest.approx(
        9999.5 + math.log(0.1)
    )


def test_bad_arguments_are_refused_by_name():
    refuses(
        loss_epsilon,
        dict(
            losses=[1.0, 2.0],
            log_densities=[[0.5], [1.4]],
            delta=1e-5,
            worst_case=3.0,
            floors=[(2, 1.0)],
        ),
        losses=[[], [math.nan, 1.0], [math.inf, 1.0]],
        log_densities=[[[0.5], [math.nan]], [0.5, 0.5], [[0.5]], [[], []]],
        shares=[[0.5], [0.5, 0.5], [0.0]],
        delta=[0.0, 1.0],
        worst_case=[-1.0, math.inf],
        floors=[[(2, 0.1)], [2.0, 1.0], [(0.5, 1.0)]],
        confidence=[1.0],
    )
    step = dict(moved=[1.0], gradient=[0.5], sample_rate=0.1, noise_std=1.0, order=2)
    numbers = dict(
        sample_rate=[0.0], noise_std=[0.0], order=[0, 2.5], jumps=[1.0], max_sensitivity=[0.0]
    )
    refuses(proposal_log_density, step, **numbers, moved=[[1.0, 2.0], 1.0])
    with pytest.raises(ValueError, match="sensitivity"):
        proposal_log_density(**dict(step, gradient=[1.5]))
    refuses(
        step_loss,
        dict(moved=[1.0], gradient=[0.5], sample_rate=0.1, noise_std=1.0),
        direction=["both"],
    )
    one = dict(losses=[1.0], log_densities=[[0.5]])
    refuses(loss_divergence, one, order=[1])
    refuses(
        proposal_counts, dict(order=2, generator=torch.Generator(), **STEP), sensitivity=[[-0.1]]
    )
