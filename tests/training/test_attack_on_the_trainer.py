"""An attack on our own trainer: a lower bound on epsilon from what a run gives away, against what
its plan claims.

Every parameter is one row of an embedding, and example i touches row i alone, with a gradient far
above the clip norm. Half of the examples are canaries, the other half have a gradient of zero, as
if they were not there. The coins and the noise of different rows are independent, so that one run
of a few steps is many thousand experiments with and without a canary (the idea of Steinke, Nasr and
Jagielski 2023). Of an (epsilon, delta)-DP run, P(row > t | canary) <= exp(epsilon) P(row > t |
none) + delta for every t.
"""

import math

import pytest
import torch
from faults import clip_nothing, halve_the_noise, include_everyone, join_two_draws
from scipy import stats

from dpcompanion.training import DPSGDPlan, train

N = 100_000
FALSE_ALARM = 1e-6  # two-sided level of the Clopper-Pearson intervals; the seed is fixed
PLAN = DPSGDPlan(n=N, sample_rate=0.3, steps=4, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2)


def released(plan):
    """The sums of noisy gradients of canaries and of rows without one, as the final weights show
    them.
    """
    model = torch.nn.Embedding(N, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    canary = (torch.arange(N) % 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.expected_batch_size)
    train(
        model,
        lambda row, slope: -5 * row.squeeze(1) * slope,
        (torch.arange(N), canary),
        plan,
        optimizer=optimizer,
        seed=11,
        microbatch_size=N,
    )
    weights = model.weight.detach().squeeze(1)
    return weights[1::2], weights[0::2]


def clopper_pearson(hits, trials):
    low = stats.beta.ppf(FALSE_ALARM / 2, hits, trials - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - FALSE_ALARM / 2, hits + 1, trials - hits) if hits < trials else 1.0
    return low, high


def audited_epsilon(plan):
    """A lower bound on epsilon: the threshold is chosen on one half of the rows, the bound computed
    on the other.
    """
    with_canary, without = released(plan)
    half = N // 4

    def bound(threshold, part):
        low, _ = clopper_pearson(int((with_canary[part] > threshold).sum()), half)
        _, high = clopper_pearson(int((without[part] > threshold).sum()), half)
        return math.log((low - plan.delta) / high) if low > plan.delta else 0.0

    best = max(torch.linspace(-2, 8, 101).tolist(), key=lambda t: bound(t, slice(0, half)))
    return bound(best, slice(half, 2 * half))


def test_with_the_promised_noise_the_attack_stays_below_the_claim_and_is_no_toy():
    claimed, found = PLAN.epsilon(), audited_epsilon(PLAN)
    assert claimed / 3 < found < claimed


@pytest.mark.parametrize(
    "break_it", [halve_the_noise, include_everyone, join_two_draws, clip_nothing]
)
def test_the_attack_finds_a_trainer_that_is_broken(monkeypatch, break_it):
    break_it(monkeypatch)
    assert audited_epsilon(PLAN) > PLAN.epsilon()
