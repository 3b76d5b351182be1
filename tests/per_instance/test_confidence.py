import math

import pytest
import torch

from dpcompanion.per_instance import log_mean_bound

from ..refusals import refuses

LARGEST = 3.0


def samples(kind, draws, repeats, seed=0):
    """Logarithms of a variable between 1 and e^3, and the logarithm of its mean."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(draws, repeats, generator=generator, dtype=torch.float64)
    top = math.exp(LARGEST)
    if kind == "two ends":  # rarely the largest value, else the least
        return torch.where(u < 0.05, LARGEST, 0.0), math.log(0.95 + 0.05 * top)
    if kind == "narrow":
        return torch.log(8 + u), math.log(8.5)
    return torch.log(1 + (top - 1) * u**6), math.log(1 + (top - 1) / 7)


@pytest.mark.parametrize("kind", ["two ends", "narrow", "skewed"])
@pytest.mark.parametrize("draws, confidence", [(3, 0.95), (30, 0.8), (200, 0.95)])
def test_the_bound_fails_no_more_often_than_allowed(kind, draws, confidence):
    values, truth = samples(kind, draws, 500, seed=draws)
    failures = float(
        (log_mean_bound(values, LARGEST, confidence=confidence, log_smallest=0.0) < truth)
        .double()
        .mean()
    )
    allowed = 1 - confidence
    assert failures <= allowed + 2.6 * math.sqrt(allowed / 500)


@pytest.mark.parametrize("kind", ["narrow", "skewed"])
def test_the_bound_is_tighter_than_hoeffdings_and_closes_in_on_the_mean(kind):
    values, truth = samples(kind, 1600, 20)
    bounds = [
        log_mean_bound(values[:n], LARGEST, confidence=0.95, log_smallest=0.0) for n in (100, 1600)
    ]
    for n, bound in zip((100, 1600), bounds):
        hoeffding = values[:n].exp().mean(0) + (math.exp(LARGEST) - 1) * math.sqrt(
            math.log(20) / (2 * n)
        )
        assert (bound.exp() < hoeffding).all()
    assert float((bounds[1].exp() - math.exp(truth)).mean()) < 0.35 * float(
        (bounds[0].exp() - math.exp(truth)).mean()
    )


def test_draws_at_the_lower_end_leave_the_share_that_no_test_excludes():
    for draws in (1, 5, 50):
        share = float(
            torch.expm1(log_mean_bound(torch.zeros(draws), 1.0, confidence=0.95, log_smallest=0.0))
            / math.expm1(1)
        )
        least = 1 - 0.05 ** (1 / draws)
        assert least < share < 1 - 0.024 ** (1 / draws)


def test_no_draw_and_draws_at_the_upper_end_give_the_upper_end():
    assert float(log_mean_bound(torch.zeros(0), 2.0, confidence=0.9)) == 2.0
    assert float(
        log_mean_bound(torch.full((5,), 2.0), 2.0, confidence=0.9, log_smallest=0.0)
    ) == pytest.approx(2.0)
    assert float(log_mean_bound(torch.zeros(5), 0.0, confidence=0.9, log_smallest=0.0)) == 0.0


def test_more_confidence_costs_more_and_entries_are_apart():
    values, _ = samples("skewed", 50, 4)
    usual, strict = (
        log_mean_bound(values, LARGEST, confidence=c, log_smallest=0.0) for c in (0.9, 0.999)
    )
    assert (usual < strict).all()
    alone = torch.stack(
        [log_mean_bound(v, LARGEST, confidence=0.9, log_smallest=0.0) for v in values.T]
    )
    torch.testing.assert_close(usual, alone)


def test_moments_beyond_float64_are_no_obstacle():
    bound = float(
        log_mean_bound(torch.tensor([1.0, 2.0, 3000.0]), 5000.0, confidence=0.9, log_smallest=0.0)
    )
    assert 4990 < bound < 5000


def test_of_what_is_always_0_the_logarithm_has_no_end():
    assert log_mean_bound([-math.inf] * 5, -math.inf, confidence=0.9) == -math.inf
    with pytest.raises(ValueError, match="log_values"):
        log_mean_bound([-math.inf, -3.0], -math.inf, confidence=0.9)


def test_bad_arguments_are_refused_by_name():
    good = dict(log_values=[0.5], log_largest=1.0, confidence=0.9)
    refuses(log_mean_bound, good, log_values=[[0.5, 2.0], [math.nan]], confidence=[0.0])
    refuses(log_mean_bound, dict(good, log_smallest=0.0), log_values=[[-0.1]])
