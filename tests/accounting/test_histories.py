"""Loss distributions of many histories at once, against one at a time."""

import functools
import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution

from dpcompanion.accounting import compute_epsilon, gaussian_epsilon, histories
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.accounting.levels import Levels
from dpcompanion.accounting.loss import StepLoss

from ..refusals import refuses


@pytest.mark.parametrize(
    "rate, noises, steps, delta",
    [
        (0.01, [1.0, 2.0, 50.0], 1000, 1e-5),
        (512 / 60000, [3.42529, 7.0, 350.0], 9375, 1e-5),
        (0.1, [1.0, 3.0, 10.0], 50, 1e-9),
        (0.5, [0.5, 5.0], 3, 1e-5),
        (0.2, [0.8, 20.0], 40, 1e-13),
        (0.9, [2.0, 30.0], 7, 0.01),
    ],
)
def test_a_history_at_one_level_costs_what_the_run_costs(rate, noises, steps, delta):
    found = epsilon_of_histories(
        torch.eye(len(noises)) * steps, sample_rate=rate, noise_multipliers=noises, delta=delta
    )
    for epsilon, noise in zip(found.tolist(), noises):
        exact = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
        assert exact * (1 - 2e-4) <= epsilon <= exact * 1.002 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.03])
def test_histories_with_little_noise_have_the_epsilon_of_their_run(noise):
    """Where the grid of epsilons was longer than 745, the exponential of its lower part was 0, and
    so was epsilon.
    """
    found = epsilon_of_histories(
        [[50, 0], [25, 25]], sample_rate=0.01, noise_multipliers=[noise, 2 * noise], delta=1e-5
    )
    exact = [
        compute_epsilon(sample_rate=0.01, noise_multiplier=noise, steps=steps, delta=1e-5)
        for steps in (50, 25)
    ]
    assert exact[0] * (1 - 2e-4) <= float(found[0]) <= 1.005 * exact[0]
    assert exact[1] <= float(found[1]) <= float(found[0])


@pytest.mark.slow
def test_mixed_histories_are_never_below_dp_accounting_and_within_a_hundredth_above():
    generator = torch.Generator().manual_seed(0)
    rate, noises, delta = 0.02, [1.2, 2.0, 4.0], 1e-5
    counts = torch.randint(20, 150, (10, 3), generator=generator)
    counts *= (torch.rand(10, 3, generator=generator) < 0.7).long()
    ours = epsilon_of_histories(counts, sample_rate=rate, noise_multipliers=noises, delta=delta)
    steps = [
        privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=5e-5
        )
        for noise in noises
    ]
    compared = 0
    for row, epsilon in zip(counts.tolist(), ours.tolist()):
        parts = [step.self_compose(count) for step, count in zip(steps, row) if count]
        if not parts:
            assert epsilon == 0
            continue
        composed = parts[0]
        for part in parts[1:]:
            composed = composed.compose(part)
        reference = composed.get_epsilon_for_delta(delta)
        assert reference * (1 - 1e-4) <= epsilon <= reference * 1.01
        compared += 1
    assert compared >= 8


def test_histories_that_want_other_tilts_do_not_spoil_each_other():
    """Long gradients at first and short ones later cost about as much as middling ones, and want
    half the tilt.
    """
    rate, noises, delta = 1024 / 60000, [1.32 / share for share in (1.0, 0.43, 0.05)], 1e-5
    counts = torch.tensor([[60, 0, 1120], [0, 1180, 0], [120, 0, 1060], [0, 1000, 100]])
    ours = epsilon_of_histories(counts, sample_rate=rate, noise_multipliers=noises, delta=delta)
    steps = [
        privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=rate)
        for noise in noises
    ]
    for row, epsilon in zip(counts.tolist(), ours.tolist()):
        parts = [step.self_compose(count) for step, count in zip(steps, row) if count]
        reference = functools.reduce(
            lambda one, other: one.compose(other), parts
        ).get_epsilon_for_delta(delta)
        assert reference * (1 - 1e-4) <= epsilon <= reference * 1.01


def test_no_steps_cost_nothing_and_the_order_of_histories_does_not_matter():
    counts = torch.tensor([[0, 0], [30, 4], [500, 0], [0, 1], [30, 4]])
    given = dict(sample_rate=0.05, noise_multipliers=[1.0, 4.0], delta=1e-6)
    found = epsilon_of_histories(counts, **given)
    assert found[0] == 0 and found[1] == found[4] and found[2] > found[1] > found[3] >= 0
    assert torch.allclose(
        epsilon_of_histories(counts.flip(0), **given), found.flip(0), rtol=1e-9, atol=0
    )
    assert (epsilon_of_histories(torch.zeros(3, 2), **given) == 0).all()


@functools.cache
def some():
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 300, (600, 12), generator=generator)
    # Some have none of the higher levels, whose tilts are of another size, and some are the same.
    counts[:200, 3:] = 0
    counts[200:220, 1:] = 0
    counts[220:230] = 0
    counts[500:] = counts[400:500]
    run = dict(sample_rate=0.02, noise_multipliers=[20.0 / (k + 1) for k in range(12)], delta=1e-5)
    return counts, run, epsilon_of_histories(counts, **run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [dict(_ROWS=64, _ASKED=64), dict(_ROWS=64, _ASKED=4), dict(BLOCK=100 * 12)]
)
def test_in_parts_of_any_size_histories_cost_what_they_cost_together(changed, monkeypatch):
    counts, run, together = some()
    for name, value in changed.items():
        monkeypatch.setattr(histories, name, value)
    parts = epsilon_of_histories(counts, **run)
    torch.testing.assert_close(parts, together, rtol=1e-9, atol=0)


@pytest.mark.parametrize("levels, delta", [(12, 1e-5), (300, 1e-8)])
def test_what_a_history_costs_says_nothing_of_the_others(levels, delta):
    """They shared grids, tilts and windows, and one moved the bounds of all others by a thousandth:
    a release of their mean protected nobody by what it said.
    """
    generator = torch.Generator().manual_seed(2)
    counts = torch.zeros(120, levels, dtype=torch.int64)
    where = torch.randint(0, levels, (120, 30), generator=generator)
    counts.scatter_add_(1, where, torch.randint(0, 40, (120, 30), generator=generator))
    counts[0], counts[1, 1:] = 0, 0
    counts[2, -1] = 1600
    noises = (1.5 * levels / torch.arange(1, levels + 1)).tolist()
    run = dict(sample_rate=0.02, noise_multipliers=noises, delta=delta, steps=12_000)
    together = epsilon_of_histories(counts, **run)
    assert len(together.unique()) > 100
    for others in (slice(3, 9), slice(40, 41), slice(60, 120)):
        assert torch.allclose(
            epsilon_of_histories(counts[others], **run), together[others], rtol=1e-11, atol=0
        )
    moved = counts.clone()
    moved[5], moved[6] = 0, 40  # who had little has nothing now, who had something has most of all
    beside = torch.arange(120)[[k not in (5, 6) for k in range(120)]]
    changed = epsilon_of_histories(moved, **run)[beside]
    assert torch.allclose(changed, together[beside], rtol=1e-11, atol=0)


def test_a_history_whose_sums_fill_no_grid_leaves_the_others_theirs(monkeypatch):
    counts = torch.tensor([[900, 0], [0, 5], [40, 40]])
    run = dict(sample_rate=0.01, noise_multipliers=[0.8, 3.0], delta=1e-6, steps=900)
    exact = epsilon_of_histories(counts, **run)
    monkeypatch.setattr(histories, "_LARGEST_GRID", 1 << 13)
    coarse = epsilon_of_histories(counts, **run)
    assert exact[0] * 1.004 < coarse[0] < exact[0] * 1.006
    assert torch.equal(coarse[1:], exact[1:])
    assert torch.equal(coarse[:1], epsilon_of_histories(counts[:1], **run))


def test_only_rows_that_are_the_same_are_taken_for_the_same(monkeypatch):
    counts, run, found = some()
    rows, which = histories.distinct_rows(counts)
    assert torch.equal(rows[which], counts)
    few = counts[400:410].repeat(20, 1)
    rows, which = histories.distinct_rows(few)
    assert torch.equal(rows[which], few) and len(rows) == 10
    # Where all have the same mark.
    monkeypatch.setattr(
        torch, "rand", lambda *size, generator, dtype: torch.full(size, 0.0, dtype=dtype)
    )
    rows, which = histories.distinct_rows(counts)
    assert torch.equal(rows[which], counts)


@pytest.mark.parametrize("noise, rate", [(0.02, 0.01), (0.01, 0.5), (1e-4, 0.01)])
def test_next_to_no_noise_has_a_large_epsilon_all_the_same(noise, rate):
    """Such histories ended in a ZeroDivisionError or an OverflowError."""
    found = epsilon_of_histories([[10]], sample_rate=rate, noise_multipliers=[noise], delta=1e-12)
    run = dict(sample_rate=rate, noise_multiplier=noise, steps=10, delta=1e-12)
    exact = compute_epsilon(**run)
    assert exact * (1 - 2e-4) <= float(found[0]) <= 1.06 * exact


@pytest.mark.parametrize("noise", [1e-6, 1e-10, 1e-100, 1e-300])
def test_less_noise_than_any_grid_resolves_costs_what_full_batches_cost(noise):
    """Such histories took gigabytes, or left others beside them without a bound."""
    run = dict(sample_rate=0.01, delta=1e-5)
    counts = [[3, 0], [3, 1], [0, 2], [0, 0]]
    found = epsilon_of_histories(counts, noise_multipliers=[1.0, noise], **run)
    alone = epsilon_of_histories([[3]], noise_multipliers=[1.0], steps=4, **run)
    assert found[0] == alone and found[3] == 0
    assert (found[1:3] >= torch.tensor([0.5, 1.0], dtype=torch.float64) / noise / noise).all()


def test_a_loss_that_hardly_varies_counts_whole():
    """Where an example is added the loss at little noise is -ln(1 - q), nearly always. Its tilts
    went up to 1e302, where a moment counted as the number that stands for an infinite one, and
    the epsilon of this direction as 1e-271.
    """
    step = StepLoss(0.01, 0.02, "add", -80.0)
    found = histories.epsilons_in_one_direction(
        torch.tensor([[10]]), Levels.between([50.0], most=1), {50.0: step}, 1e-12
    )
    assert -10 * math.log1p(-0.01) - 2e-12 <= float(found[0]) <= 0.2


def test_full_batches_are_one_gaussian_mechanism():
    found = epsilon_of_histories([[3, 4]], sample_rate=1, noise_multipliers=[2.0, 5.0], delta=1e-5)
    exact = gaussian_epsilon(math.sqrt(3 / 4 + 4 / 25), 1e-5)
    assert exact <= float(found) <= exact * (1 + 1e-11)


def test_bad_arguments_are_refused_by_name():
    refuses(
        epsilon_of_histories,
        dict(counts=[[1, 2]], sample_rate=0.1, noise_multipliers=[1.0, 2.0], delta=1e-5),
        counts=[[[-1, 0]], [[1, 2, 3]], [[1, 2**53 + 2]], [[0.5, 2.0]]],
        sample_rate=[0, [0.1, 0.2]],
        noise_multipliers=[[0.0, 1.0]],
        delta=[0, [1e-5, 1e-6]],
        steps=[2, -1, 3.5],
    )


def test_counts_may_be_of_any_whole_type():
    given = dict(sample_rate=0.1, noise_multipliers=[1.0, 2.0], delta=1e-5)
    found = [
        epsilon_of_histories(np.array([[200, 100]], dtype=kind), **given)
        for kind in ("int64", "uint64", "uint8")
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_steps_with_very_large_noise_add_almost_nothing():
    run = dict(sample_rate=0.1, delta=1e-5)
    alone = compute_epsilon(noise_multiplier=1.0, steps=1, **run)
    for noise in (1e11, 1e99, math.inf):
        both = float(epsilon_of_histories([[1, 2]], noise_multipliers=[1.0, noise], **run))
        assert alone * (1 - 1e-6) <= both <= alone * 1.002
