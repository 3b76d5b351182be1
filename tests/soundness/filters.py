"""`RenyiFilter`: divergences of the steps that it admits, by the closed form, never add up to more
than the budget.
"""

import math
import random

import torch

from dpcompanion.filters import RenyiFilter


def cases(seed, count):
    generator = random.Random(seed)
    for _ in range(count):
        yield {
            "sample_rate": generator.choice([1.0, 10 ** generator.uniform(-3, 0)]),
            "order": generator.randint(2, 40),
            "noise_multiplier": 10 ** generator.uniform(-0.3, 1.3),
            "budget_in_steps": 10 ** generator.uniform(0, 1.7),
            "norms": [
                [generator.random() ** generator.choice([0.2, 1, 4]) for _ in range(4)]
                for _ in range(80)
            ],
        }


def divergence(rate, noise, order):
    """ln sum_k C(a, k) (1-q)^(a-k) q^k e^((k^2-k) / 2 sigma^2) over a - 1, of the terms above 1."""
    if rate == 1:
        return order / (2 * noise * noise)
    excess = math.fsum(
        math.comb(order, k)
        * (1 - rate) ** (order - k)
        * rate**k
        * math.expm1(min(700.0, (k * k - k) / (2 * noise * noise)))
        for k in range(2, order + 1)
    )
    return math.log1p(excess) / (order - 1)


def violations(case):
    rate, noise, order = case["sample_rate"], case["noise_multiplier"], case["order"]
    if order * order / (2 * noise * noise) > 690:
        return None  # beyond what the oracle's floats hold
    budget = case["budget_in_steps"] * divergence(rate, noise, order)
    filter = RenyiFilter(
        4, sample_rate=rate, noise_multiplier=noise, max_grad_norm=1.0, orders=order, budgets=budget
    )
    spent, found = [0.0] * 4, []
    for norms in case["norms"]:
        admitted = filter.admit(torch.tensor(norms, dtype=torch.float64)).tolist()
        for i, norm in enumerate(norms):
            spent[i] += divergence(rate, noise / norm, order) if admitted[i] and norm else 0.0
    for paid, true in zip(filter.spent[:, 0].tolist(), spent):
        if true > budget * (1 + 1e-12) or true > paid * (1 + 1e-12):
            found.append(f"spent {true} of {budget}, and {paid} by the filter")
    return found
