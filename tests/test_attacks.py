"""Lower bounds from counted guesses, and LiRA."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpcompanion.accounting import gaussian_epsilon
from dpcompanion.attacks import (
    auc,
    clopper_pearson,
    epsilon_lower_bound,
    lira,
    lira_offline,
    log_odds,
    loss_threshold_attack,
    mu_lower_bound,
    roc,
    shadow_masks,
    tpr_at_fpr,
)

from .refusals import refused, refuses


@pytest.mark.parametrize("successes,trials", [(0, 10), (3, 10), (10, 10), (1, 100000)])
def test_the_interval_is_that_of_the_exact_binomial_test(successes, trials):
    lower, upper = clopper_pearson(successes, trials, confidence=0.975)
    exact = stats.binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="exact")
    assert lower == pytest.approx(exact.low) and upper == pytest.approx(exact.high)


def test_the_bound_for_randomised_response_fails_no_more_often_than_the_confidence_allows():
    epsilon, trials, generator = 1.0, 200, torch.Generator().manual_seed(0)
    tell = math.exp(epsilon) / (1 + math.exp(epsilon))
    right = torch.rand(4000, trials, generator=generator).lt(tell).sum(1)
    wrong = torch.rand(4000, trials, generator=generator).lt(1 - tell).sum(1)
    counts = dict(true_positives=right, positives=trials, false_positives=wrong, negatives=trials)
    accused = (epsilon_lower_bound(**counts, delta=0.0, confidence=0.9) > epsilon).double().mean()
    assert accused <= 0.1
    assert epsilon_lower_bound(**counts, delta=0.0, confidence=0.9).median() > 0.5 * epsilon


def test_the_two_rates_of_a_bound_share_its_confidence():
    """By SciPy's beta distribution: each rate has an error of 2.5%, so that both hold in 95% of
    cases.
    """
    counts = dict(true_positives=80, positives=100, false_positives=10, negatives=90)
    least, most = stats.beta.ppf(0.025, 80, 21), stats.beta.ppf(0.975, 11, 80)
    assert epsilon_lower_bound(**counts, delta=0.01) == pytest.approx(
        math.log((least - 0.01) / most), rel=1e-9
    )
    assert mu_lower_bound(**counts) == pytest.approx(
        stats.norm.ppf(least) - stats.norm.ppf(most), rel=1e-9
    )


def test_a_gaussian_mechanism_is_bounded_below_its_mu_and_close_to_it():
    mu, trials, generator = 1.5, 20000, torch.Generator().manual_seed(1)
    right = int(torch.randn(trials, generator=generator).add(mu).gt(mu / 2).sum())
    wrong = int(torch.randn(trials, generator=generator).gt(mu / 2).sum())
    counts = dict(true_positives=right, positives=trials, false_positives=wrong, negatives=trials)
    assert 0.93 * mu < mu_lower_bound(**counts) < mu
    assert epsilon_lower_bound(**counts, delta=1e-5) < gaussian_epsilon(mu, 1e-5)


def test_both_directions_count():
    counts = dict(
        true_positives=999, positives=1000, false_positives=500, negatives=1000, delta=0.0
    )
    mirrored = dict(
        true_positives=500, positives=1000, false_positives=1, negatives=1000, delta=0.0
    )
    assert epsilon_lower_bound(**counts) == pytest.approx(epsilon_lower_bound(**mirrored))
    assert epsilon_lower_bound(**counts) > math.log(999 / 500)


def test_chance_refutes_nothing():
    counts = dict(true_positives=50, positives=100, false_positives=50, negatives=100)
    assert epsilon_lower_bound(**counts, delta=1e-5) == 0 and mu_lower_bound(**counts) == 0


def test_bad_arguments_are_refused_by_name():
    counts = dict(true_positives=1, positives=10, false_positives=1, negatives=10, delta=0.0)
    refuses(
        epsilon_lower_bound,
        counts,
        true_positives=[11, 0.5, math.nan, -1, "a"],
        positives=[0, 1.5],
        false_positives=[11, [1, 12]],
        negatives=[0],
        delta=[1.0],
        confidence=[1.0],
    )
    refuses(
        clopper_pearson,
        dict(successes=1, trials=10),
        successes=[11, 0.5],
        trials=[0],
        confidence=[[0.9, 0.95]],
    )
    scores = dict(members=[1.0], nonmembers=[0.0])
    nothing_of_numbers = [["a"], [None], [[1.0], [2.0, 3.0]], None, "scores"]
    refuses(
        auc,
        scores,
        members=nothing_of_numbers,
        nonmembers=nothing_of_numbers,
        confidence=[[0.9, 0.95]],
    )
    refuses(
        tpr_at_fpr,
        scores,
        members=[torch.tensor([]), torch.tensor([math.nan])],
        confidence=[[0.9, 0.95]],
    )
    losses = dict(
        members=torch.ones(5), nonmembers=torch.ones(5), generator=generator(), confidence=0.9
    )
    refuses(
        loss_threshold_attack,
        losses,
        members=[torch.tensor([math.nan, 1.0]), torch.ones(2, 2)],
        confidence=[1],
    )
    refused(
        "two losses", loss_threshold_attack, torch.ones(1), torch.ones(5), generator=generator()
    )
    refuses(shadow_masks, dict(models=6, n=50, generator=generator()), models=[5], generator=[None])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_log_odds_are_those_of_the_softmax_and_blind_to_a_common_shift_even_where_it_saturates():
    logits = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator())
    labels = torch.tensor([0, 1, 2, 3, 0])
    p = logits.softmax(-1).gather(-1, labels.expand(3, 5)[..., None]).squeeze(-1)
    assert torch.allclose(log_odds(logits, labels), (p / (1 - p)).log())
    assert torch.allclose(log_odds(logits + 7, labels), log_odds(logits, labels))
    sure = torch.tensor([[300.0, 0.0, -1.0]], dtype=torch.float64)
    assert log_odds(sure, torch.tensor([0])).item() == pytest.approx(
        300 - math.log(1 + math.exp(-1))
    )


def test_every_example_is_in_half_of_the_shadow_models():
    masks = shadow_masks(6, 50, generator=generator())
    assert (masks.sum(0) == 3).all() and masks.unique(dim=1).shape[1] > 10


@pytest.mark.parametrize("variance", ["each", "pooled"])
def test_lira_is_the_ratio_of_two_normal_densities(variance):
    masks = shadow_masks(12, 7, generator=generator())
    shadows = torch.randn(12, 7, dtype=torch.float64, generator=generator(1)) + masks
    targets = torch.randn(2, 7, dtype=torch.float64, generator=generator(2))
    found = lira(targets, shadows, masks, variance=variance)
    for i in range(7):
        sides = []
        for inside in (masks, ~masks):
            own = shadows[inside[:, i], i].numpy()
            deviations = [
                shadows[inside[:, j], j].numpy() - shadows[inside[:, j], j].numpy().mean()
                for j in range(7)
            ]
            sd = (
                own.std(ddof=1)
                if variance == "each"
                else math.sqrt((np.stack(deviations) ** 2).sum() / (7 * 5))
            )
            sides.append(stats.norm(own.mean(), sd).logpdf(targets[:, i].numpy()))
        assert found[:, i].numpy() == pytest.approx(sides[0] - sides[1])


def test_lira_finds_the_members_of_gaussian_scores_as_well_as_theory_allows():
    """In scores that a membership shifts by mu standard deviations no attack beats Phi(mu / sqrt
    2).
    """
    n, mu = 4000, 1.0
    difficulty = 3 * torch.randn(n, dtype=torch.float64, generator=generator(3))
    masks = shadow_masks(64, n, generator=generator(4))
    shadows = (
        difficulty + mu * masks + torch.randn(64, n, dtype=torch.float64, generator=generator(5))
    )
    members = torch.rand(n, generator=generator(6)) < 0.5
    target = difficulty + mu * members + torch.randn(n, dtype=torch.float64, generator=generator(7))
    best = stats.norm.cdf(mu / math.sqrt(2))
    ratios = lira(target, shadows, masks, variance="pooled")
    found = auc(ratios[members], ratios[~members])
    assert found.low < best < found.high and found.high - found.low < 0.05
    # without shadow models difficulty drowns it
    assert auc(target[members], target[~members]).high < found.low
    assert lira(target, shadows, masks).isfinite().all()


def test_the_area_is_that_of_the_curve_and_of_scikit_learn():
    from sklearn import metrics

    members, others = (
        torch.randn(300, generator=generator()) + 0.4,
        torch.randn(200, generator=generator(1)),
    )
    members, others = members.mul(5).round(), others.mul(5).round()  # many ties
    labels = np.r_[np.ones(300), np.zeros(200)]
    scores = torch.cat((members, others)).numpy()
    assert auc(members, others).value == pytest.approx(metrics.roc_auc_score(labels, scores))
    fpr, tpr = roc(members, others)
    expected = metrics.roc_curve(labels, scores, drop_intermediate=False)
    assert fpr.numpy() == pytest.approx(expected[0]) and tpr.numpy() == pytest.approx(expected[1])
    assert np.trapezoid(tpr, fpr) == pytest.approx(auc(members, others).value)


def test_delongs_interval_covers_as_often_as_it_says():
    truth, covered = stats.norm.cdf(0.5 / math.sqrt(2)), 0
    draws = torch.randn(400, 160, dtype=torch.float64, generator=generator())
    for row in draws:
        found = auc(row[:80] + 0.5, row[80:], confidence=0.9)
        covered += found.low <= truth <= found.high
    assert 0.86 <= covered / 400 <= 0.94


@pytest.mark.parametrize("sizes", [(5, 5), (10, 300), (300, 10)])
@pytest.mark.parametrize("truth", [0.5, 0.98, 0.999])
def test_the_interval_covers_where_scores_are_few_or_nearly_all_apart(sizes, truth):
    shift, missed = math.sqrt(2) * stats.norm.ppf(truth), 0
    for row in torch.randn(300, sum(sizes), dtype=torch.float64, generator=generator()):
        found = auc(row[: sizes[0]] + shift, row[sizes[0] :])
        missed += not found.low <= truth <= found.high
    assert stats.binom.sf(missed - 1, 300, 0.05) > 1e-3


def test_the_interval_is_delongs_where_scores_are_many_and_is_never_a_point():
    for size, shift in ((100, 1.0), (1000, 2.5)):
        members, others = torch.randn(
            2, size, dtype=torch.float64, generator=generator()
        ) + torch.tensor([[shift], [0]])
        found, above = auc(members, others), (members[:, None] > others).double()
        variance = (above.mean(1).var() + above.mean(0).var()) / size
        assert found.high - found.low == pytest.approx(
            2 * stats.norm.ppf(0.975) * float(variance) ** 0.5
        )
    apart, mixed = (
        auc(torch.arange(100.0) + 100, torch.arange(100.0)),
        auc(torch.arange(100.0), torch.arange(100.0) + 100),
    )
    assert apart == (1.0, pytest.approx(0.025 ** (1 / 100)), 1.0) and mixed == (
        0.0,
        0.0,
        pytest.approx(1 - apart.low),
    )


def test_a_rate_of_nearly_one_has_all_its_digits():
    assert tpr_at_fpr(torch.arange(100.0), torch.arange(100.0), fpr=1 - 1e-12)[0] == 0.99
    false, _ = roc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, 2.5]))
    assert float(false[1]) in (0.0, 1 / 3) and 1 / 3 in false.tolist()


def test_the_rate_at_a_low_false_positive_rate_respects_it_with_ties():
    members = torch.tensor([5.0, 4.0, 4.0, 1.0])
    others = torch.tensor([4.0, 4.0, 3.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert tpr_at_fpr(members, others, fpr=0.1).value == 0.25  # at 4 two of ten would be accused
    assert tpr_at_fpr(members, others, fpr=0.2).value == 0.75
    assert tpr_at_fpr(members, others, fpr=0.0).value == 0.25
    low, high = tpr_at_fpr(members, others, fpr=0.2)[1:]
    exact = stats.binomtest(3, 4).proportion_ci(confidence_level=0.95, method="exact")
    assert (low, high) == pytest.approx((exact.low, exact.high))


def test_a_loss_threshold_is_chosen_on_one_half_and_counted_on_the_other():
    members, others = torch.arange(40.0), torch.arange(60.0) + 1000
    found = loss_threshold_attack(members, others, generator=generator())
    assert (
        found.success.value == found.fitted == 1
        and found.advantage == 1
        and 0 <= found.threshold < 1000
    )
    assert found.success[1:] == pytest.approx(
        (stats.binomtest(40, 40).proportion_ci(method="exact").low, 1.0)
    )
    swapped = loss_threshold_attack(others, members, generator=generator())
    assert swapped.fitted == 0.5  # a high loss says nothing to this attack


def test_a_fitted_threshold_overstates_its_success_on_noise_and_the_interval_does_not():
    """Where members and others have the same losses no attack beats one half."""
    fitted, covered = [], 0
    for seed in range(300):
        losses = torch.randn(2, 60, generator=torch.Generator().manual_seed(seed))
        found = loss_threshold_attack(
            losses[0], losses[1], generator=torch.Generator().manual_seed(seed)
        )
        fitted.append(found.fitted)
        covered += found.success.low <= 0.5 <= found.success.high
    assert np.mean(fitted) > 0.56 and min(fitted) >= 0.5 and covered >= 0.93 * 300


@pytest.mark.parametrize("attack", [lira, lira_offline])
def test_what_is_not_scores_and_booleans_is_refused(attack):
    """Of masks of bytes ~ is true everywhere, and a model that leaks looked private."""
    shadows = torch.randn(6, 3, generator=generator())
    masks = torch.tensor([[True] * 3, [False] * 3] * 3)
    good = dict(targets=torch.zeros(3), shadows=shadows, masks=masks)
    always_in = torch.tensor([[True, True, True]] * 4 + [[True, False, False]] * 2)
    refuses(
        attack,
        good,
        masks=[
            masks.to(torch.uint8),
            masks.long(),
            masks.numpy(),
            torch.ones_like(masks),
            always_in,
        ],
    )
    refuses(
        attack,
        good,
        targets=[torch.tensor([math.nan, 0.0, 0.0]), torch.tensor([math.inf, 0.0, 0.0])],
    )
    refuses(attack, good, shadows=[shadows.long(), shadows.masked_fill(~masks, -math.inf)])
    refused("shape", attack, torch.zeros(4), shadows, masks)


@pytest.mark.parametrize("variance", ["each", "pooled"])
def test_offline_lira_is_the_tail_of_the_normal_law_without_the_example(variance):
    generator = torch.Generator().manual_seed(3)
    shadows = (
        torch.randn(10, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5])
        + 1
    )
    masks, targets = (
        shadow_masks(10, 3, generator=generator),
        torch.tensor([[1.0, 5.0, 40.0], [-30.0, 0.0, 1.0]]).double(),
    )
    found = lira_offline(targets, shadows, masks, variance=variance)
    out = [shadows[~masks[:, i], i].numpy() for i in range(3)]
    spreads = [each.std(ddof=1) for each in out]
    if variance == "pooled":
        spreads = [math.sqrt(sum(s**2 for s in spreads) / 3)] * 3
    expected = [
        [-stats.norm.logsf(t, out[i].mean(), spreads[i]) for i, t in enumerate(row)]
        for row in targets.tolist()
    ]
    assert found.numpy() == pytest.approx(np.array(expected), rel=1e-9, abs=1e-12)
    # What shadow models that saw the example say does not matter.
    assert torch.equal(
        lira_offline(targets, torch.where(masks, 99.0, shadows), masks, variance=variance), found
    )


def test_offline_lira_finds_the_members_of_gaussian_scores_as_well_as_theory_allows():
    generator, n, mu = torch.Generator().manual_seed(0), 4000, 1.5
    member = torch.rand(n, generator=generator) < 0.5
    level = torch.randn(n, generator=generator, dtype=torch.float64) * 3  # how hard an example is
    shadows = level + torch.randn(64, n, generator=generator, dtype=torch.float64)
    scores = lira_offline(
        level + mu * member + torch.randn(n, generator=generator).double(), shadows
    )
    assert auc(scores[member], scores[~member]).value == pytest.approx(
        stats.norm.cdf(mu / math.sqrt(2)), abs=0.02
    )


def test_scores_in_pandas_count_in_their_order():
    pandas = pytest.importorskip("pandas")
    members, nonmembers = [2.0, 1.0, 3.0], [1.5, 0.0, 0.5]
    series = [pandas.Series(values, index=[7, 0, 1]) for values in (members, nonmembers)]
    assert (
        auc(*series)
        == auc(members, nonmembers)
        == auc(torch.tensor(members), torch.tensor(nonmembers))
    )
    assert tpr_at_fpr(*series) == tpr_at_fpr(members, nonmembers)


def test_a_ratio_of_scores_that_do_not_differ_is_no_nan():
    masks = torch.tensor([[True], [True], [False], [False]])
    shadows = torch.tensor([[10.0], [10.0], [0.0], [0.0]])
    assert lira(torch.tensor([9.0]), shadows, masks) > 0 > lira(torch.tensor([1.0]), shadows, masks)
    assert lira(torch.tensor([3.0]), 0 * shadows, masks).isfinite().all()
