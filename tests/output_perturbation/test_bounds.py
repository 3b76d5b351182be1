"""Sensitivity, intrinsic noise and what is added to it."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.covariance import ledoit_wolf

from dpcompanion.output_perturbation import (
    augmented_sigma,
    empirical_sensitivity,
    intrinsic_epsilon,
    intrinsic_sigma,
    mahalanobis,
    noise_covariance,
    pairwise_sensitivity,
    seed_sigma,
    sgd_sensitivity,
    sgd_sensitivity_estimate,
)
from dpcompanion.output_perturbation.grids import train_grid
from dpcompanion.reproduction import experiments, published

from ..refusals import refused, refuses

TABLE_3 = published.exhibit("intrinsic-privacy/table-3")
TASKS = ("mnist-binary-unscaled", "forest", "adult")
SIZES = {
    "mnist-binary-unscaled": (10397, 32, 0.1, 1850),
    "forest": (378783, 50, 1.0, 8400),
    "adult": (29305, 32, 0.5, 3400),
}


def gaussian_delta(mu, epsilon):
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )


@pytest.mark.parametrize("task,ceiling", zip(TASKS, (0.0530, 0.1131, 0.1768)))
def test_the_bound_rounds_passes_up_and_the_papers_value_does_not(task, ceiling):
    n, batch_size, learning_rate, steps = SIZES[task]
    given = dict(
        passes=steps * batch_size / n,
        lipschitz=2**0.5,
        learning_rate=learning_rate,
        batch_size=batch_size,
    )
    assert sgd_sensitivity(**given) == pytest.approx(ceiling, abs=6e-5)
    assert published.verdict(
        sgd_sensitivity_estimate(**given), TABLE_3[f"{task}.delta_theory"]
    ) in ("matches", "close")


@pytest.mark.parametrize("task", TASKS)
def test_the_classical_formula_reproduces_table_3_from_its_own_columns(task):
    row = {
        key: TABLE_3[f"{task}.{key}"]
        for key in ("delta_theory", "delta_empirical", "delta", "sigma_i", "eps_i", "eps_i_star")
    }
    for sensitivity, epsilon in (("delta_theory", "eps_i"), ("delta_empirical", "eps_i_star")):
        low, high = (
            intrinsic_epsilon(
                row[sensitivity] + sign * row[sensitivity].rounding,
                row["sigma_i"] - sign * row["sigma_i"].rounding,
                float(row["delta"]),
                mechanism="classical",
            )
            for sign in (-1, 1)
        )
        assert low - row[epsilon].rounding <= row[epsilon] <= high + row[epsilon].rounding


def test_runs_keep_the_bound_against_the_base_set_and_twice_the_bound_against_each_other():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    labels = torch.randint(2, (30,), generator=generator)
    weights = train_grid(
        features,
        labels,
        data_sets=range(30),
        seeds=range(8),
        steps=20,
        batch_size=7,
        learning_rate=4.0,
    )
    bound = sgd_sensitivity(
        passes=20 / 5, lipschitz=2**0.5, learning_rate=4.0, batch_size=7, smoothness=0.5
    )
    apart = (weights[1:] - weights[:1]).norm(dim=-1)
    assert 0.1 * bound < apart.max() <= bound
    assert empirical_sensitivity(weights) <= 2 * bound
    assert apart.max() < empirical_sensitivity(weights)


def test_beyond_the_theorems_condition_two_runs_drift_apart_and_the_learning_rate_is_refused():
    """f(w) = w^2 / 2 has smoothness 1 and is Lipschitz where |w| <= L: at eta above 2 a step
    stretches differences.
    """
    given = dict(passes=3, lipschitz=4.0, batch_size=1)

    def apart(rate):
        one, other = 1.0, -1.0  # the replaced example pulled them so far apart
        for _ in range(5):
            one, other = one - rate * one, other - rate * other
        return abs(one - other) / 2

    assert apart(2.0) <= 1 < apart(2.01)
    assert sgd_sensitivity(learning_rate=2.0, smoothness=1.0, **given) == sgd_sensitivity_estimate(
        learning_rate=2.0, **given
    )
    refused("learning_rate", sgd_sensitivity, learning_rate=2.01, smoothness=1.0, **given)
    with pytest.raises(ValueError, match="got 3"):
        sgd_sensitivity(
            learning_rate=torch.tensor([0.1, 3.0]), smoothness=torch.tensor([1.0, 1.0]), **given
        )


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("classes", [None, 2, 5])
def test_without_a_smoothness_the_condition_is_that_of_logistic_and_softmax_regression(
    radius, classes
):
    """Nothing was checked: a learning rate of 100 got a "bound". The constants are found by
    autograd, at the weights and of the rows where they are attained, or nearly.
    """
    row = torch.tensor([radius, 0.0], dtype=torch.float64)
    if classes is None:
        lipschitz, ways = radius, 1

        def loss(weights):
            return torch.nn.functional.softplus(weights @ row)
    else:
        lipschitz, ways = 2**0.5 * radius, classes

        def loss(weights):
            return torch.nn.functional.cross_entropy(
                weights.view(classes, 2) @ row, torch.tensor(0)
            )

    steepest = torch.zeros(ways, 2, dtype=torch.float64)
    steepest[-1] = 60 / radius  # a hopeless case
    steepest = steepest.flatten() if classes else steepest[0]
    assert torch.func.grad(loss)(steepest).norm() == pytest.approx(lipschitz)
    curved = torch.zeros(ways, 2, dtype=torch.float64)
    curved[2:] = -60 / radius  # two classes that are equally likely
    curved = curved.flatten() if classes else curved[0]
    smoothness = float(torch.linalg.eigvalsh(torch.func.hessian(loss)(curved)).max())
    assert smoothness == pytest.approx(lipschitz**2 / 4)
    given = dict(passes=1, lipschitz=lipschitz, batch_size=32)
    most = 8 / lipschitz**2
    assert sgd_sensitivity(learning_rate=most, **given) == sgd_sensitivity_estimate(
        learning_rate=most, **given
    )
    refused("learning_rate", sgd_sensitivity, learning_rate=1.001 * most, **given)
    assert sgd_sensitivity(learning_rate=1.001 * most, smoothness=0.9 * smoothness, **given) > 0


def test_the_experiments_learning_rates_meet_the_condition_for_two_classes_and_rows_of_norm_1():
    tasks = [
        task
        for name in experiments.names()
        if name.startswith("intrinsic-privacy/")
        for config in experiments.get(name).presets.values()
        for task in getattr(config, "tasks", {}).values()
    ]
    assert tasks
    for task in tasks:
        sgd_sensitivity(
            passes=1,
            lipschitz=2**0.5,
            learning_rate=task.learning_rate,
            batch_size=task.batch_size,
            smoothness=0.5,
        )


def test_the_bound_is_tight_at_the_first_step():
    """Two examples that pull as far apart as the Lipschitz constant allows, on saturated
    weights.
    """
    features = torch.tensor([[1.0], [-1.0]] + 6 * [[1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0] + 6 * [1])
    weights = train_grid(
        features, labels, data_sets=(0, 1), seeds=(0, 1), steps=1, batch_size=7, learning_rate=1.0
    )
    step = sgd_sensitivity(passes=1, lipschitz=2**0.5, learning_rate=1.0, batch_size=7)
    assert 0.3 * step < empirical_sensitivity(weights) <= step


def test_pairwise_sensitivity_is_the_distance_of_every_pair_under_one_seed():
    weights = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = pairwise_sensitivity(weights)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for k, (i, j) in enumerate(pairs):
        for r in range(3):
            assert found[r, k] == pytest.approx(math.dist(weights[i, r], weights[j, r]))
    assert empirical_sensitivity(weights) == found.max()


def test_intrinsic_sigma_is_the_papers_algorithm_step_by_step():
    weights = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sigmas = [np.std((w - w.mean(0)).ravel()) for w in weights.numpy()]
    torch.testing.assert_close(seed_sigma(weights), torch.tensor(sigmas))
    assert intrinsic_sigma(weights) == pytest.approx(np.median(sigmas))


def test_analytic_epsilon_solves_the_exact_equation():
    for ratio, delta in ((0.3, 1e-5), (1.8, 9.62e-5), (4.0, 1e-6)):
        exact = optimize.brentq(lambda e: gaussian_delta(ratio, e) - delta, 1e-9, 100, xtol=1e-13)
        assert intrinsic_epsilon(ratio, 1.0, delta) == pytest.approx(exact, rel=1e-9)


def counted_delta(epsilon, shift, *stds):
    """The delta of a shift under independent Gaussian noises of these sizes, from the sum of
    densities on a grid.
    """
    reach = 10 * math.hypot(*stds) + shift
    points, spacing = np.linspace(-reach, reach, 4001, retstep=True)

    def density(center):
        found = stats.norm(center, stds[0]).pdf(points)
        for std in stds[1:]:
            found = np.convolve(found, stats.norm(0, std).pdf(points), mode="same") * spacing
        return found

    return float(
        np.clip(density(shift) - math.exp(epsilon) * density(0.0), 0, None).sum() * spacing
    )


def test_theorem_1_holds_below_epsilon_1_and_not_at_every_epsilon_above():
    for delta in (0.5, 0.1, 1e-2, 9.62e-5, 2.64e-6, 1e-9):
        for epsilon in (0.05, 0.3, 0.7, 0.999):
            sigma = math.sqrt(2 * math.log(1.25 / delta)) * 0.05 / epsilon
            assert 0 < counted_delta(epsilon, 0.05, sigma) <= delta
            by_library = augmented_sigma(
                0.05, 0.0, target_epsilon=epsilon, target_delta=delta, mechanism="classical"
            )
            assert by_library == pytest.approx(sigma, rel=1e-12)
    sigma = math.sqrt(2 * math.log(1.25 / 9.62e-5)) * 0.05 / 12
    assert counted_delta(12, 0.05, sigma) > 5 * 9.62e-5


def algorithm_2(sigma_i, epsilon, delta, sensitivity, *, printed=False):
    """The standard deviation that it adds, by hand; with the constant as printed, or as equation 16
    means it.
    """
    c = (
        math.sqrt(2 * math.log(1.25) / delta) + 1e-5
        if printed
        else math.sqrt(2 * math.log(1.25 / delta))
    )
    target = c * sensitivity / epsilon
    return math.sqrt(target**2 - sigma_i**2) if sigma_i < target else 0.0


def test_theorem_3_holds_of_round_gaussian_noise_and_of_no_other():
    delta, sensitivity = 1e-4, 0.05
    for epsilon in (0.1, 0.5, 0.999):
        for sigma_i in (0.05, 0.2, 0.8, 5.0):
            added = algorithm_2(sigma_i, epsilon, delta, sensitivity)
            counted = counted_delta(epsilon, sensitivity, *filter(None, (sigma_i, added)))
            assert counted <= delta
            by_library = augmented_sigma(
                sensitivity,
                sigma_i,
                target_epsilon=epsilon,
                target_delta=delta,
                mechanism="classical",
            )
            assert by_library == pytest.approx(added, rel=1e-9)
            # The misprinted constant is on the safe side for a small delta.
            literal = algorithm_2(sigma_i, epsilon, delta, sensitivity, printed=True)
            assert literal >= added
            assert (
                counted_delta(epsilon, sensitivity, *filter(None, (sigma_i, literal)))
                <= counted + 1e-12
            )
    # Standard deviations of 0.4 and 0.04 pool to 0.284. Where there is little noise, what is added
    # is too little.
    pooled, little = math.sqrt((0.4**2 + 0.04**2) / 2), 0.04
    added = algorithm_2(pooled, 0.7, delta, sensitivity)
    assert added > 0 and counted_delta(0.7, sensitivity, little, added) > 10 * delta
    assert algorithm_2(pooled, 0.999, delta, sensitivity) == 0
    assert counted_delta(0.999, sensitivity, little) > 1000 * delta


def test_classical_epsilon_is_no_bound_for_large_ratios():
    small, large = intrinsic_epsilon([0.1, 10.0], 1.0, 1e-5, mechanism="classical")
    exact_small, exact_large = intrinsic_epsilon([0.1, 10.0], 1.0, 1e-5)
    assert small > exact_small and large < exact_large


def test_without_noise_epsilon_is_infinite_and_without_sensitivity_it_is_0():
    for mechanism in ("analytic", "classical"):
        assert intrinsic_epsilon(0.1, 0.0, 1e-5, mechanism=mechanism) == math.inf
        assert intrinsic_epsilon(0.0, 0.0, 1e-5, mechanism=mechanism) == 0


@pytest.mark.parametrize("mechanism", ["analytic", "classical"])
def test_intrinsic_and_augmented_noise_together_meet_the_target(mechanism):
    for target in (0.5, 1.0, 6.0):
        own = torch.tensor([0.0, 0.01, 0.02], dtype=torch.float64)
        added = augmented_sigma(
            0.05, own, target_epsilon=target, target_delta=1e-4, mechanism=mechanism
        )
        total = torch.hypot(added, own)
        epsilon = intrinsic_epsilon(0.05, total, 1e-4, mechanism=mechanism)
        assert (epsilon <= target * (1 + 1e-12)).all()
        torch.testing.assert_close(
            epsilon[added > 0], torch.full_like(epsilon[added > 0], target), rtol=1e-9, atol=0
        )


def test_enough_intrinsic_noise_needs_no_more():
    assert augmented_sigma(0.05, 10.0, target_epsilon=1, target_delta=1e-5) == 0


def test_noise_for_a_tiny_sensitivity_does_not_vanish():
    for mechanism in ("analytic", "classical"):
        given = dict(target_epsilon=1.0, target_delta=1e-5, mechanism=mechanism)
        usual = augmented_sigma(1.0, [0.0, 2.0], **given)
        for scale in (1e-170, 1e-300, 1e170):
            scaled = augmented_sigma(scale, [0.0, 2 * scale], **given)
            torch.testing.assert_close(scaled / scale, usual, rtol=1e-12, atol=0)
    assert augmented_sigma(0.0, 0.0, target_epsilon=1.0, target_delta=1e-5) == 0
    assert augmented_sigma(1e-200, 1.0, target_epsilon=1.0, target_delta=1e-5) == 0


def test_the_covariance_of_many_seeds_is_recovered_and_that_of_few_is_shrunk():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    truth = root @ root.T
    draws = torch.randn(2, 20000, 6, generator=generator, dtype=torch.float64) @ root.T
    covariance, shrinkage = noise_covariance(draws)
    assert shrinkage < 1e-3
    torch.testing.assert_close(covariance, truth, rtol=0.05, atol=0.2)
    covariance, shrinkage = noise_covariance(draws[:, :4])
    assert shrinkage > 0.1 and torch.linalg.eigvalsh(covariance).min() > 0


def test_the_shrinkage_is_that_of_ledoit_and_wolf():
    draws = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    draws = draws * torch.linspace(0.2, 2, 8)
    covariance, shrinkage = noise_covariance(draws)
    oracle, intensity = ledoit_wolf(draws[0].numpy())
    assert shrinkage == pytest.approx(intensity)
    np.testing.assert_allclose(covariance.numpy() * 39 / 40, oracle)


def test_mahalanobis_is_the_distance_after_whitening():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    differences = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    expected = (differences @ torch.linalg.inv(root).T).norm(dim=-1)
    torch.testing.assert_close(mahalanobis(differences, root @ root.T), expected)


def test_bad_arguments_are_refused_by_name():
    one_pass = dict(passes=1, lipschitz=1, learning_rate=1, batch_size=1)
    refuses(
        sgd_sensitivity,
        one_pass,
        passes=[0],
        batch_size=[0.5],
        smoothness=[0],
        lipschitz=[math.inf],
    )
    refuses(sgd_sensitivity, dict(one_pass, batch_size=32), learning_rate=[1e-323])
    refuses(empirical_sensitivity, {}, weights=[torch.zeros(1, 5, 2)])
    not_finite = torch.full((2, 2, 2), math.nan)
    refuses(
        intrinsic_sigma,
        {},
        weights=[torch.zeros(3, 2), torch.zeros(3, 1, 2), not_finite, "a", None],
    )
    noise = dict(sensitivity=1, sigma=1, delta=1e-5)
    refuses(intrinsic_epsilon, noise, sensitivity=[-1], delta=[0], mechanism=["laplace"])
    added = dict(sensitivity=1, sigma_intrinsic=0, target_epsilon=0.1, target_delta=1e-5)
    refuses(
        augmented_sigma,
        added,
        target_epsilon=[0],
        target_delta=[2],
        sensitivity=[1e-310, [1.0, 1e308]],
    )
    asymmetric, negative = (
        torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
        torch.diag(torch.tensor([1.0, -2.0])),
    )
    distance = dict(differences=torch.ones(2), covariance=torch.eye(2))
    refuses(
        mahalanobis,
        distance,
        covariance=[torch.eye(3), asymmetric, negative, torch.full((2, 2), math.nan)],
    )
    refuses(mahalanobis, distance, differences=[[math.nan, 1.0]])
    refuses(noise_covariance, dict(weights=torch.zeros(2, 3, 2)), shrinkage=[2])
