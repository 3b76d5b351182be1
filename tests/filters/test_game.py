"""The worst case within a budget: never below any strategy, attained by one, and with one level the
plain account.
"""

import itertools
import math

import numpy as np
import pytest
from games import constant, every_strategy, maximising, played
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting import compute_delta, gaussian_delta
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.filters import adaptive_delta, play, worst_case
from dpcompanion.filters.pairs import Discrete, SampledGaussianBlock

from ..refusals import refuses

ADAPTIVE = dict(sample_rate=0.1, noise_multiplier=1.5, levels=[0.5, 1.0], costs=[1, 5], budget=50)


def coin(loss):
    """Randomised response of this loss."""
    p = math.exp(loss) / (1 + math.exp(loss))
    return [1 - p, p], [p, 1 - p]


@pytest.mark.parametrize(
    "run",
    [
        dict(sample_rate=0.01, noise_multiplier=1.0),
        dict(sample_rate=0.1, noise_multiplier=2.0),
        dict(sample_rate=512 / 60_000, noise_multiplier=3.425),
    ],
)
@pytest.mark.parametrize(
    "steps, block, epsilon", [(1, 1, 0.05), (60, 1, 0.3), (60, 20, 0.3), (400, 40, 1.5)]
)
def test_one_level_is_the_account_by_loss_distributions(run, steps, block, epsilon):
    games = play(
        **run,
        levels=[1.0],
        costs=[3],
        budget=3 * (steps // block) + 2,
        epsilon=epsilon,
        block=block,
    )
    exact = compute_delta(**run, steps=steps, epsilon=epsilon)
    found, error = max((game.delta, game.error) for game in games)
    assert found >= exact * (1 - 1e-3)  # the reference adds up to 1e-4 of epsilon itself
    assert found <= compute_delta(**run, steps=steps, epsilon=epsilon - error) * (1 + 1e-3) + 1e-30
    assert error <= 0.04 * epsilon


@pytest.mark.parametrize("cost", [1, 31])
def test_unused_units_of_a_budget_add_nothing_to_a_long_block(cost):
    run = dict(sample_rate=0.0037752, noise_multiplier=1.704)
    found = adaptive_delta(
        **run, levels=[1.0], costs=[cost], budget=cost, epsilon=1.6141, block=15_768
    )
    exact = compute_delta(**run, steps=15_768, epsilon=1.6141)
    assert exact * (1 - 1e-3) <= found <= 1.1 * exact


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_on_short_games_it_is_the_best_of_all_strategies(direction):
    # A weak and a strong coin that is biased, so that the directions differ; three outputs as well.
    games = [
        ([coin(0.4), ([0.2, 0.8], [0.7, 0.3])], [1, 2], 3, 3),
        ([coin(0.3), coin(0.6)], [1, 2], 3, 3),
        ([([0.2, 0.3, 0.5], [0.3, 0.4, 0.3]), ([0.05, 0.05, 0.9], [0.6, 0.2, 0.2])], [1, 2], 2, 2),
    ]
    for pairs, costs, budget, stages in games:
        for epsilon in (0.0, 0.2, 0.7):
            deltas = every_strategy(pairs, costs, budget, epsilon, direction, stages)
            found = worst_case(
                [Discrete(*pair) for pair in pairs],
                costs=costs,
                budget=budget,
                epsilon=epsilon,
                direction=direction,
                interval=1e-3,
            )
            assert found.delta >= max(deltas) * (1 - 1e-12)
            assert found.delta <= max(deltas) + 1e-4
    # Losses on the grid: equal to the last digits.
    pairs, costs = [coin(0.25), coin(0.75)], [1, 3]
    deltas = every_strategy(pairs, costs, 3, 0.5, direction, 3)
    exact = worst_case(
        [Discrete(*pair) for pair in pairs],
        costs=costs,
        budget=3,
        epsilon=0.5,
        direction=direction,
        interval=0.25,
    )
    assert exact.delta == pytest.approx(max(deltas), rel=1e-12)


def test_adaptivity_is_worth_something():
    # Two coins whose constant strategies are equally bad; changing between them is worse.
    pairs = [coin(0.5), coin(1.5)]
    found = worst_case(
        [Discrete(*pair) for pair in pairs], costs=[1, 4], budget=18, epsilon=3.0, interval=0.25
    )
    best = max(
        worst_case([Discrete(*pair)], costs=[cost], budget=18, epsilon=3.0, interval=0.25).delta
        for pair, cost in zip(pairs, [1, 4])
    )
    assert found.delta > 1.25 * best


@given(
    st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["remove", "add"]),
    st.floats(0.003, 0.3),
)
@settings(max_examples=25, deadline=None)
def test_never_below_any_strategy_whatever_the_mechanism_and_the_grid(
    biases, epsilon, direction, interval
):
    pairs = [([1 - p, p], [1 - q, q]) for p, q in biases]
    worst = max(every_strategy(pairs, [1, 2], 3, epsilon, direction, 3))
    found = worst_case(
        [Discrete(*pair) for pair in pairs],
        costs=[1, 2],
        budget=3,
        epsilon=epsilon,
        direction=direction,
        interval=interval,
    )
    assert found.delta >= worst * (1 - 1e-12) - 1e-15


def test_infinite_losses_count_as_delta():
    pairs = [([0.9, 0.1], [1.0, 0.0]), coin(0.5)]
    for direction in ("remove", "add"):
        worst = max(every_strategy(pairs, [1, 1], 3, 0.5, direction, 3))
        found = worst_case(
            [Discrete(*pair) for pair in pairs],
            costs=[1, 1],
            budget=3,
            epsilon=0.5,
            direction=direction,
            interval=1e-3,
        )
        assert worst * (1 - 1e-12) <= found.delta <= worst + 3 * 0.1


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_full_batches_with_costs_of_the_square_pay_nothing_for_adaptivity(epsilon):
    # There mu-GDP adds up whatever the choices (Koskela, Tobaben and Honkela 2023).
    levels, costs = [0.25, 0.5, 1.0], [1, 4, 16]
    games = play(
        sample_rate=1.0,
        noise_multiplier=4.0,
        levels=levels,
        costs=costs,
        budget=32,
        epsilon=epsilon,
    )
    exact = float(gaussian_delta(math.sqrt(2) / 4.0, epsilon))
    assert (
        exact
        <= games[0].delta
        <= float(gaussian_delta(math.sqrt(2) / 4.0, epsilon - games[0].error))
    )
    assert games[0].error < 0.01 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    "direction, proposals",
    [("remove", [(0.9, 0.2), (1.3, 0.35)]), ("add", [(0.6, 0.5), (0.9, 0.7)])],
)
def test_the_maximising_strategy_played_on_the_mechanism_attains_the_value(direction, proposals):
    epsilon = 1.2 if direction == "remove" else 0.7
    pairs = [
        SampledGaussianBlock(ADAPTIVE["sample_rate"], ADAPTIVE["noise_multiplier"] / z)
        for z in ADAPTIVE["levels"]
    ]
    game = worst_case(
        pairs,
        costs=ADAPTIVE["costs"],
        budget=ADAPTIVE["budget"],
        epsilon=epsilon,
        direction=direction,
        interval=1e-3,
        choices=True,
    )
    found, deviation = played(
        maximising(game), **ADAPTIVE, epsilon=epsilon, direction=direction, proposals=proposals
    )
    assert deviation < 0.02 * found
    assert found - 4 * deviation <= game.delta <= found * 1.02 + 4 * deviation
    for level in (0, 1):
        game_played = dict(
            ADAPTIVE, epsilon=epsilon, direction=direction, proposals=proposals, runs=50_000
        )
        other, deviation = played(constant(level, ADAPTIVE["costs"]), **game_played)
        assert other - 4 * deviation <= game.delta


def test_never_below_random_strategies():
    epsilon, generator = 1.2, np.random.default_rng(1)
    bound = adaptive_delta(**ADAPTIVE, epsilon=epsilon)
    # A strategy is a level for each stretch of the budget and of the loss; four hundred of them,
    # fifty in each sample.
    for seed in range(8):
        tables, whose = generator.integers(0, 2, size=(50, 6, 8)), np.arange(20_000) % 50

        def strategy(left, loss, who):
            move = tables[whose[who], left // 9, (loss * 3).astype(int).clip(-2, 5) + 2]
            return np.where(left >= 5, move, 0)

        found, deviation = played(
            strategy,
            **ADAPTIVE,
            epsilon=epsilon,
            direction="remove",
            proposals=[(0.8, 0.2), (1.2, 0.3)],
            runs=20_000,
            seed=seed,
            groups=50,
        )
        assert (found - 5 * deviation <= bound).all() and len(found) == 50


def test_the_natural_filter_breaks_its_promise():
    """Stopping when the composed loss distribution would exceed (epsilon, delta) is no filter."""
    delta = 1e-5
    run = dict(sample_rate=0.02, noise_multiplier=0.7)
    levels, costs, budget = [0.6, 1.0], [1, 20], 200
    histories = [(budget - 20 * full, full) for full in range(11)]
    noises = [run["noise_multiplier"] / z for z in levels]
    promised = float(
        epsilon_of_histories(
            histories, sample_rate=run["sample_rate"], noise_multipliers=noises, delta=delta
        ).max()
    )
    # Each history keeps (promised, delta), so the natural filter admits all that the budget admits.
    game = worst_case(
        [SampledGaussianBlock(run["sample_rate"], noise) for noise in noises],
        costs=costs,
        budget=budget,
        epsilon=promised,
        choices=True,
    )
    found, deviation = played(
        maximising(game),
        **run,
        levels=levels,
        costs=costs,
        budget=budget,
        epsilon=promised,
        direction="remove",
        proposals=[(1.7, 0.01), (2.9, 0.15)],
        runs=400_000,
    )
    assert found - 4 * deviation > 1.1 * delta
    assert found - 4 * deviation <= game.delta


@pytest.mark.slow
def test_monotone_in_levels_budget_noise_and_costs():
    run = dict(ADAPTIVE, epsilon=1.0)
    bound = adaptive_delta(**run)
    assert adaptive_delta(**{**run, "levels": [0.55, 1.0]}) > bound
    assert adaptive_delta(**{**run, "budget": 55}) > bound > adaptive_delta(**{**run, "budget": 45})
    assert adaptive_delta(**{**run, "noise_multiplier": 1.55}) < bound
    assert adaptive_delta(**{**run, "costs": [2, 5]}) < bound
    assert adaptive_delta(**{**run, "levels": [0.5, 0.7, 1.0], "costs": [1, 3, 5]}) >= bound * 0.99
    table = play(**run)[0].table
    assert (np.diff(table) >= 0).all() and len(table) == 51


@pytest.mark.slow
def test_an_unaffordable_level_changes_nothing():
    run = dict(sample_rate=1 / 118, noise_multiplier=1.2256, budget=190, epsilon=0.35, block=118)
    levels, costs = [i / 8 for i in range(1, 9)], [2, 8, 19, 34, 57, 88, 133, 199]
    without = adaptive_delta(levels=levels[:-1], costs=costs[:-1], **run)
    assert adaptive_delta(levels=levels, costs=costs, **run) == without < 1e-5
    coins = [Discrete([0.1, 0.9], [0.9, 0.1]), Discrete([0.4, 0.6], [0.6, 0.4])]
    game = worst_case(coins, costs=[4, 1], budget=3, epsilon=0.2, choices=True)
    assert set(np.unique(game.choices)) == {-1, 1}  # levels keep their numbers
    assert game.delta == worst_case(coins[1:], costs=[1], budget=3, epsilon=0.2).delta


def test_noise_beyond_measure_counts_as_much_noise():
    run = dict(ADAPTIVE, epsilon=0.0, budget=20)
    bounds = [adaptive_delta(**{**run, "noise_multiplier": noise}) for noise in (1e7, 1e9, 1e300)]
    assert 0 < bounds[0] == bounds[1] == bounds[2] < 1e-6


def test_coarse_grids_only_raise_the_value():
    fine = adaptive_delta(**ADAPTIVE, epsilon=1.0, interval=5e-4)
    for interval in (2e-3, 0.01, 0.05, 0.3):
        coarse = adaptive_delta(**ADAPTIVE, epsilon=1.0, interval=interval)
        assert coarse >= fine * (1 - 1e-9)
        fine = coarse if interval < 0.05 else fine


def test_rounding_is_accounted_for_far_below_the_smallest_relative_difference():
    run = dict(sample_rate=0.01, noise_multiplier=1.0)
    for epsilon in (3.0, 5.0):
        exact = compute_delta(**run, steps=100, epsilon=epsilon)
        found = adaptive_delta(**run, levels=[1.0], costs=[1], budget=100, epsilon=epsilon)
        assert exact < 1e-12 and exact * (1 - 1e-3) <= found <= 1.5 * exact


@pytest.mark.parametrize(
    "run",
    [
        dict(
            sample_rate=0.0025,
            noise_multiplier=3.1,
            levels=[0.2, 0.46],
            costs=[3, 8],
            budget=40,
            epsilon=0.707,
        ),
        dict(
            sample_rate=0.0012,
            noise_multiplier=3.0,
            levels=[0.18, 0.45],
            costs=[2, 9],
            budget=47,
            epsilon=0.095,
            block=10,
        ),
        dict(
            sample_rate=512 / 60_000,
            noise_multiplier=3.4,
            levels=[1.0],
            costs=[1],
            budget=10,
            epsilon=1.5,
            block=40,
        ),
    ],
)
def test_deltas_near_the_smallest_float_have_tiny_bounds(run):
    assert 0 <= adaptive_delta(**run) < 1e-50


def test_mechanisms_of_different_kinds_share_a_budget():
    pairs = [
        SampledGaussianBlock(0.1, 2.0, 5),
        SampledGaussianBlock(1.0, 10.0),
        Discrete(*coin(0.1)),
    ]
    value = worst_case(pairs, costs=[2, 1, 1], budget=8, epsilon=0.5).delta
    for chosen in itertools.combinations(range(3), 2):
        part = worst_case(
            [pairs[i] for i in chosen], costs=[[2, 1, 1][i] for i in chosen], budget=8, epsilon=0.5
        )
        assert part.delta <= value * (1 + 0.05)


def test_bad_arguments_are_refused_by_name():
    good = dict(ADAPTIVE, epsilon=1.0)
    levels = [[0.0, 1.0], [0.5, 1.1], [1.0, 0.5], [0.5, 0.5], []]
    refuses(
        adaptive_delta,
        good,
        levels=levels,
        costs=[[0, 5], [1.5, 5], [1]],
        budget=[0, 2.5],
        interval=[0.0],
    )
    refuses(
        adaptive_delta, good, sample_rate=[0.0], noise_multiplier=[0.0], epsilon=[-1.0], block=[0]
    )
    refuses(adaptive_delta, dict(good, costs=[60, 70]), budget=[50])
    refuses(Discrete, dict(q=[0.5, 0.5]), p=[[0.5, 0.4]])
    refuses(Discrete, dict(q=[0.0, 1.0]), p=[[1.0, 0.0]])


def test_delta_does_not_jump_where_losses_are_bounded():
    # Adding costs at most -16 ln 0.99 = 0.161; near it the tilt is large, and what is cut off must
    # not count too much.
    run = dict(sample_rate=0.01, noise_multiplier=0.8, levels=[0.25], costs=[1], budget=1, block=16)
    deltas = [adaptive_delta(**run, epsilon=epsilon) for epsilon in (0.0775, 0.0791, 0.0830)]
    assert 1e-9 > deltas[1] > deltas[2] > 0 and deltas[0] > deltas[1]
