import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion import pate
from dpcompanion.accounting import Ledger, compute_epsilon
from dpcompanion.mechanism.secure import SecureStream, grid_of

from .refusals import refuses


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.05, 1)), min_size=1, max_size=4),
    st.integers(1, 5000),
)
def test_weights_have_mean_one_and_spend_each_budget_exactly(groups, queries):
    budgets, shares = zip(*groups)
    found = pate.weighted_parameters(budgets, shares, target_delta=1e-5, queries=queries)
    weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    assert float(weights @ found.weights) == pytest.approx(1, rel=1e-6)
    spent = found.epsilons(1e-5, queries=queries).tolist()
    assert all(0.99999 * budget <= epsilon <= budget for budget, epsilon in zip(budgets, spent))


def test_queries_cost_what_as_many_gaussian_mechanisms_cost():
    found = pate.weighted_parameters([1.0, 2.5], [3, 1], target_delta=1e-6, queries=300)
    for budget, weight in zip((1.0, 2.5), found.weights.tolist()):
        noise_multiplier = found.noise_std / (math.sqrt(2) * weight)
        assert compute_epsilon(
            sample_rate=1, noise_multiplier=noise_multiplier, steps=300, delta=1e-6
        ) == pytest.approx(budget, rel=1e-6)


def test_a_budget_for_which_a_vote_counts_for_nothing_is_refused():
    with pytest.raises(ValueError, match="target_epsilons must leave every vote a weight"):
        pate.weighted_parameters([1e-9, 1e3], [1, 1], target_delta=1e-14, queries=10**6)


def test_no_ledger_takes_a_group_without_a_vote():
    with pytest.raises(ValueError, match="weights must lie in"):
        pate.PateParameters(1.0, torch.tensor([0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    "noise_std, weights, word",
    [
        (-1.0, [1.0], "noise_std"),
        (0.0, [1.0], "noise_std"),
        (1.0, [], "weights"),
        (1.0, 2.0, "weights"),
    ],
)
def test_parameters_by_hand_are_checked(noise_std, weights, word):
    with pytest.raises(ValueError, match=f"{word} must"):
        pate.PateParameters(noise_std, weights)


def test_parameters_by_hand_may_be_lists():
    found = pate.PateParameters(4, [1, 2])
    assert found.epsilons(1e-5, queries=2)[0] < found.epsilons(1e-5, queries=2)[1]
    assert found.ledger_entry(queries=2).item.noise_multiplier == pytest.approx(2**0.5)


def test_a_ledger_charges_each_example_what_labels_cost_its_group():
    found = pate.weighted_parameters([1.0, 2.5], [3, 1], target_delta=1e-6, queries=300)
    entry = found.ledger_entry(queries=300, groups=torch.tensor([1, 0, 0, 1]))
    for epsilon in (Ledger([entry]).epsilon(1e-6), Ledger([entry]).epsilons(1e-6).max()):
        assert float(epsilon) == pytest.approx(2.5, rel=1e-6)
    assert Ledger([entry]).epsilons(1e-6).tolist() == pytest.approx([2.5, 1, 1, 2.5], rel=1e-6)
    whole = found.ledger_entry(queries=300)
    assert whole.promised is None and whole.item == entry.item
    twice = Ledger([entry, dataclasses.replace(entry, label="again")])
    again = found.epsilons(1e-6, queries=600)
    assert twice.epsilons(1e-6)[:2].tolist() == pytest.approx(again.flip(0).tolist(), rel=1e-6)
    refuses(
        found.ledger_entry,
        dict(queries=300),
        queries=[0, 1.5],
        groups=[[2], [-1], [0.5], [[0, 1]], "a"],
    )


def log_chances(histogram, noise_std):
    """Logarithms of the exact distribution of the label; the trapezoidal rule is exact for such
    integrands.
    """
    votes = torch.tensor(histogram, dtype=torch.float64) / noise_std
    spacing = 0.02
    x = torch.arange(
        float(votes.min()) - 40, float(votes.max()) + 40, spacing, dtype=torch.float64
    )[:, None]
    log_below = torch.special.log_ndtr(x - votes)
    log_density = -0.5 * (x - votes) ** 2 - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(
        log_density + log_below.sum(dim=1, keepdim=True) - log_below, dim=0
    ) + math.log(spacing)


@pytest.mark.parametrize(
    "votes", [[30.0, 12.0, 8.0], [24.0, 20.0, 6.0], [50.0, 0.0, 0.0], [17.0, 17.0, 16.0]]
)
@pytest.mark.parametrize("noise_std", [2.5, 5.0])
def test_moving_a_groups_vote_changes_the_label_by_no_more_than_is_said(votes, noise_std):
    parameters = pate.PateParameters(noise_std, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    here = log_chances(votes, noise_std).exp()
    assert float(here.sum()) == pytest.approx(1, abs=1e-12)
    for delta in (1e-6, 0.05):
        for weight, epsilon in zip(
            parameters.weights.tolist(), parameters.epsilons(delta, queries=1).tolist()
        ):
            for source, target in itertools.permutations(range(3), 2):
                if votes[source] >= weight:
                    moved = list(votes)
                    moved[source], moved[target] = moved[source] - weight, moved[target] + weight
                    there = log_chances(moved, noise_std).exp()
                    for one, other in ((here, there), (there, here)):
                        assert float((one - math.exp(epsilon) * other).clamp(min=0).sum()) <= delta


def test_weights_count_and_noise_decides_close_calls():
    votes = torch.tensor([[0, 2], [0, 1], [1, 1]])
    histogram = pate.histograms(votes, [1.0, 1.0, 2.5], classes=3)
    assert histogram.tolist() == [[2.0, 2.5, 0.0], [0.0, 3.5, 1.0]]
    assert pate.noisy_labels(histogram, 1e-9, torch.Generator()).tolist() == [1, 1]
    many = histogram[:1].repeat(20_000, 1)
    labels = pate.noisy_labels(many, 1.5, torch.Generator().manual_seed(0))
    share = torch.bincount(labels, minlength=3) / 20_000
    assert share.tolist() == pytest.approx(
        log_chances([2.0, 2.5, 0.0], 1.5).exp().tolist(), abs=0.015
    )


def test_bad_arguments_are_refused_by_name():
    weighted = dict(target_epsilons=[1.0], counts=[1], target_delta=1e-5, queries=1)
    refuses(
        pate.weighted_parameters,
        weighted,
        target_epsilons=[[0.0]],
        counts=[[1, 2]],
        target_delta=[0],
        queries=[0],
    )
    refuses(pate.weighted_parameters, dict(weighted, counts=[]), target_epsilons=[[]])
    refuses(
        pate.histograms,
        dict(votes=[[0]], weights=[1.0], classes=3),
        votes=[[[3]], None, "a"],
        weights=[[-1.0], None, "a"],
        classes=[10**10, 1e300],
    )
    refuses(pate.histograms, dict(weights=[1.0, 1.0], classes=3), votes=[[[0]]])
    good = dict(histogram=torch.ones(1, 2), noise_std=1.0, generator=torch.Generator())
    not_finite = torch.tensor([[1, math.nan]])
    refuses(
        pate.noisy_labels,
        good,
        noise_std=[0.0, math.nan],
        histogram=[not_finite, None, torch.ones(2), torch.ones(2, 0), torch.ones(2, 2, 2)],
        generator=["seed", 7],
    )
    refuses(pate.noisy_labels, dict(histogram=[[1.0, 9e9]]), noise_std=[1.0, 1e-200])
    refuses(pate.noisy_labels, dict(histogram=[[0.0, 0.0]]), noise_std=[1e-200])
    assert pate.noisy_labels([[1.0, 9e9]], 1.0, torch.Generator()).tolist() == [1]
    assert pate.noisy_labels(torch.ones(0, 3), 1.0).tolist() == []
    assert pate.noisy_labels(torch.tensor([[False, True]]), 1e-3).tolist() == [1]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=4), st.integers(1, 5000))
def test_votes_lie_on_the_grid_of_the_noise(budgets, queries):
    alike = [1] * len(budgets)
    found = pate.weighted_parameters(budgets, alike, target_delta=1e-5, queries=queries)
    votes = torch.randint(3, (25 * len(budgets), 40), generator=torch.Generator().manual_seed(0))
    histogram = pate.histograms(votes, found.weights.repeat(25), classes=3)
    cells = histogram / (grid_of(found.noise_std) * 2.0**-12)
    assert torch.equal(cells, cells.round()) and float(cells.max()) < 2.0**51


def test_labels_by_a_cipher_have_the_chances_of_gaussian_noise():
    histogram = torch.tensor([[2.0, 2.5, 0.0]]).repeat(20_000, 1)
    first, second = (pate.noisy_labels(histogram, 1.5) for _ in range(2))
    assert not torch.equal(first, second)
    again = [pate.noisy_labels(histogram, 1.5, SecureStream(bytes(32))) for _ in range(2)]
    assert torch.equal(*again)
    expected = log_chances([2.0, 2.5, 0.0], 1.5).exp().tolist()
    for labels in (first, second, again[0]):
        share = torch.bincount(labels, minlength=3) / 20_000
        assert share.tolist() == pytest.approx(expected, abs=0.02)
