"""Numbers in, a float out; tensors in, a tensor out: the same value."""

import inspect
import typing

import numpy as np
import pytest
import torch

from dpcompanion import accounting, attacks, output_perturbation, per_instance
from dpcompanion.accounting.gaussian import gaussian_mu

COUNTS = dict(positives=100, false_positives=1, negatives=100, true_positives=90)
CASES = [
    (accounting.gaussian_delta, dict(sensitivity_over_sigma=1.0, epsilon=1)),
    (accounting.gaussian_epsilon, dict(sensitivity_over_sigma=1, delta=1e-5)),
    (gaussian_mu, dict(epsilon=1.0, delta=1e-5)),
    (accounting.rdp_sampled_gaussian, dict(sample_rate=0.1, noise_multiplier=1.0, orders=3)),
    (accounting.compute_epsilon, dict(sample_rate=0.1, noise_multiplier=1.0, steps=10, delta=1e-5)),
    (accounting.compute_delta, dict(sample_rate=0.1, noise_multiplier=1.0, steps=10, epsilon=1.0)),
    (
        output_perturbation.sgd_sensitivity,
        dict(passes=2.5, lipschitz=1.0, learning_rate=0.1, batch_size=5),
    ),
    (
        output_perturbation.sgd_sensitivity_estimate,
        dict(passes=2.5, lipschitz=1.0, learning_rate=0.1, batch_size=5),
    ),
    (output_perturbation.intrinsic_epsilon, dict(sensitivity=0.1, sigma=0.2, delta=1e-5)),
    (
        output_perturbation.augmented_sigma,
        dict(sensitivity=0.1, sigma_intrinsic=0.0, target_epsilon=1, target_delta=1e-5),
    ),
    (
        per_instance.step_divergence,
        dict(sample_rate=0.1, noise_multiplier=1.0, sensitivity=0.5, orders=2.5),
    ),
    (per_instance.log_mass, dict(sensitivity=0.5, sample_rate=0.1, noise_std=1.0, order=3)),
    (per_instance.holder_order, dict(order=8, p=30, i=9)),
    (attacks.mu_lower_bound, dict(**COUNTS)),
    (attacks.epsilon_lower_bound, dict(delta=1e-5, **COUNTS)),
]
STEP = dict(sample_rate=0.1, noise_std=1.0)
# One number of a list of numbers, the first argument: along a dimension that goes.
REDUCING = [
    (per_instance.coupled_divergence, dict(sensitivities=[0.5, 1.0], order=8, **STEP)),
    (
        per_instance.coupled_divergence,
        dict(sensitivities=[0.5, 1.0], order=8, max_sensitivity=1.0, confidence=0.9, **STEP),
    ),
    (per_instance.coupled_delta, dict(sensitivities=[0.5, 1.0], epsilon=0.1, **STEP)),
    (
        per_instance.coupled_delta,
        dict(sensitivities=[0.5, 1.0], epsilon=0.1, max_sensitivity=1.0, confidence=0.9, **STEP),
    ),
    (per_instance.coupled_epsilon, dict(sensitivities=[0.5, 1.0], delta=1e-5, **STEP)),
    (
        per_instance.coupled_epsilon,
        dict(sensitivities=[0.5, 1.0], delta=1e-5, probabilities=[0.9, 0.1], **STEP),
    ),
    (per_instance.holder_epsilon, dict(sensitivities=[0.5, 1.0], delta=1e-5, p=[10, 100], **STEP)),
    (per_instance.log_mean_bound, dict(log_values=[0.1, 0.2], log_largest=1.0, confidence=0.9)),
    (per_instance.loss_divergence, dict(losses=[0.5, 1.5], log_densities=[[0.3], [1.2]], order=2)),
    (
        output_perturbation.mahalanobis,
        dict(differences=[3.0, 0.5], covariance=[[9.0, 0.0], [0.0, 0.25]]),
    ),
]


@pytest.mark.parametrize(
    "function, arguments", CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_numbers_give_a_float_and_tensors_a_tensor(function, arguments):
    found = function(**arguments)
    assert type(found) is float
    assert type(function(**{name: np.float64(value) for name, value in arguments.items()})) is float
    last = list(arguments)[-1] if function is not per_instance.log_mass else "sensitivity"
    many = function(**{**arguments, last: torch.tensor([arguments[last]] * 2, dtype=torch.float64)})
    assert (
        isinstance(many, torch.Tensor)
        and many.dtype == torch.float64
        and many.tolist() == [found] * 2
    )


@pytest.mark.parametrize(
    "function, arguments", REDUCING, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_list_of_numbers_gives_a_float_and_a_tensor_a_tensor(function, arguments):
    first = next(iter(arguments))
    found, values = function(**arguments), torch.tensor(arguments[first], dtype=torch.float64)
    assert type(found) is float
    assert (
        type(function(**{**arguments, first: [np.float64(value) for value in arguments[first]]}))
        is float
    )
    one = function(**{**arguments, first: values})
    assert (
        isinstance(one, torch.Tensor)
        and one.ndim == 0
        and one.dtype == torch.float64
        and one.item() == found
    )


@pytest.mark.parametrize(
    "function",
    {function: 0 for function, _ in CASES + REDUCING},
    ids=lambda function: function.__name__,
)
def test_overloads_declare_the_same(function):
    def called(signature):
        return [(p.name, p.kind) for p in signature.parameters.values()]

    own, (of_numbers, of_tensors) = (
        inspect.signature(function),
        map(inspect.signature, typing.get_overloads(function)),
    )
    assert called(of_numbers) == called(of_tensors) == called(own)
    assert of_numbers.return_annotation is float and of_tensors.return_annotation is torch.Tensor
    for name, parameter in own.parameters.items():
        assert of_tensors.parameters[name].annotation == parameter.annotation
        assert (of_tensors.parameters[name].default is inspect.Parameter.empty) == (
            parameter.default is parameter.empty
        )


def test_what_is_one_number_of_many_weights_is_a_float():
    weights = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    for function in (
        output_perturbation.empirical_sensitivity,
        output_perturbation.intrinsic_sigma,
    ):
        assert type(function(weights)) is float
    for options in ({}, {"confidence": 0.9, "max_distance": 9.0}):
        assert (
            type(per_instance.update_divergence(*weights[:2], noise_std=1.0, order=2, **options))
            is float
        )


def test_theorem_3_3_gives_a_float_of_lists_and_a_tensor_of_tensors():
    run = dict(steps=2, order=4, p=6)
    found = per_instance.compose(lambda step, order: [0.1, 0.2], **run)
    tensor = per_instance.compose(
        lambda step, order: torch.tensor([0.1, 0.2], dtype=torch.float64), **run
    )
    assert type(found) is float and isinstance(tensor, torch.Tensor) and tensor.item() == found
    assert per_instance.compose(lambda step, order: [0.1, 0.2], each_step=True, **run).shape == (2,)


def test_bounds_on_a_probability_are_two_floats_or_two_tensors():
    lower, upper = found = attacks.clopper_pearson(3, 10)
    many = attacks.clopper_pearson(torch.tensor([3, 3]), 10)
    assert type(lower) is type(upper) is float and found == (found.lower, found.upper)
    assert many.lower.tolist() == [lower] * 2 and many.upper.tolist() == [upper] * 2
