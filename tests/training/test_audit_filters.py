"""An attack on a filtered training: canaries whose norms follow the worst strategy that there is,
against the promise.

As in the audit of plain training, example i touches row i of an embedding alone, so that one run is
many thousand experiments. Here a canary looks at its row, works out how much it has given away so
far, and asks for the level that the game's maximising strategy plays there; a greedy one asks for
all that it can get. The filter pays, and training clips to what it allows.
"""

import math

import pytest
import torch
from scipy import stats

from dpcompanion.filters import ExactFilter, worst_case
from dpcompanion.filters.pairs import SampledGaussianBlock
from dpcompanion.training import DPSGDPlan, train

N = 60_000
FALSE_ALARM = 1e-6
LEVELS, COSTS, BUDGET, STEPS, DELTA = (0.5, 1.0), (1, 4), 10, 10, 1e-2
PLAN = DPSGDPlan(
    n=N, sample_rate=0.3, steps=STEPS, max_grad_norm=1.0, noise_multiplier=1.0, delta=DELTA
)


class Adversary:
    """A tracker: every example asks for what the worst strategy plays at the loss that its row
    shows.
    """

    def __init__(self, filter, game, model, greedy):
        self.filter, self.model, self.greedy = filter, model, greedy
        self.choices, self.game = torch.from_numpy(game.choices).long(), game
        self.loss, self.row = (
            torch.zeros(N, dtype=torch.float64),
            torch.zeros(N, dtype=torch.float64),
        )
        self.left = torch.full((N,), BUDGET)
        self.levels = torch.tensor((0.0, *LEVELS), dtype=torch.float64)

    def check_run(self, plan, model, loss, data):
        pass

    def state_dict(self):
        return {}

    def before_step(self):
        place = (self.loss / self.game.interval).round().long() - self.game.first
        place = place.clamp(0, self.choices.shape[1] - 1)
        asked, left = self.choices[self.left, place], self.left.clone()
        for _ in range(BUDGET):  # leaving a unit unspent takes no step
            waits = (asked < 0) & (left > 0)
            left -= waits.long()
            asked = torch.where(waits, self.choices[left, place], asked)
        limits = self.filter.clip_norms(torch.ones(N) if self.greedy else self.levels[asked + 1])
        self.played, self.left = limits, self.filter.budget - self.filter.spent
        return limits

    def after_step(self, indices, norms, *, clipped):
        row = self.model.weight.detach().squeeze(1)
        # A step moves the row by the noisy sum of this row's gradients.
        y, self.row = row - self.row, row.clone()
        q, z = PLAN.sample_rate, self.played
        self.loss += torch.log1p(q * torch.expm1((y * z - z**2 / 2) / PLAN.noise_multiplier**2))


def audited(greedy=False):
    """(promised epsilon, lower bound on it by the attack)."""
    filter = ExactFilter(
        N,
        sample_rate=0.3,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        levels=LEVELS,
        costs=COSTS,
        budget=BUDGET,
        steps=STEPS,
    )
    promised = float(filter.epsilon(DELTA)[0])
    pairs = [SampledGaussianBlock(0.3, 1.0 / level) for level in LEVELS]
    game = worst_case(pairs, costs=COSTS, budget=BUDGET, epsilon=promised, choices=True)
    model = torch.nn.Embedding(N, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    canary = (torch.arange(N) % 2).double()
    adversary = Adversary(filter, game, model, greedy)
    train(
        model,
        lambda row, slope: -5 * row.squeeze(1) * slope,
        (torch.arange(N), canary),
        PLAN,
        optimizer=torch.optim.SGD(model.parameters(), lr=PLAN.expected_batch_size),
        seed=5,
        microbatch_size=N,
        trackers=[adversary],
    )
    with_canary, without = adversary.loss[1::2], adversary.loss[0::2]
    half = N // 4

    def bound(threshold, part):
        hits, alarms = (
            int((with_canary[part] > threshold).sum()),
            int((without[part] > threshold).sum()),
        )
        low = stats.beta.ppf(FALSE_ALARM / 2, hits, half - hits + 1) if hits else 0.0
        high = (
            stats.beta.ppf(1 - FALSE_ALARM / 2, alarms + 1, half - alarms) if alarms < half else 1.0
        )
        return math.log((low - DELTA) / high) if low > DELTA else 0.0

    best = max(torch.linspace(-1, 4, 101).tolist(), key=lambda t: bound(t, slice(0, half)))
    return promised, bound(best, slice(half, 2 * half))


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [False, True])
def test_canaries_that_adapt_stay_below_the_promise_and_are_no_toy(greedy):
    promised, found = audited(greedy)
    assert promised / 3 < found < promised


def forget_what_was_spent(monkeypatch):
    monkeypatch.setattr(ExactFilter, "_pay", lambda self, index, blocks: None)


def charge_for_the_lowest_level(monkeypatch):
    pay = ExactFilter._pay
    monkeypatch.setattr(
        ExactFilter, "_pay", lambda self, index, blocks: pay(self, index.clamp(max=1), blocks)
    )


@pytest.mark.parametrize("break_it", [forget_what_was_spent, charge_for_the_lowest_level])
def test_the_attack_finds_a_filter_that_is_broken(monkeypatch, break_it):
    break_it(monkeypatch)
    promised, found = audited(greedy=True)
    assert found > promised
