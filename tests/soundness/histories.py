"""`epsilon_of_histories`: the true delta of mixed steps at its epsilon is not above the delta that
was asked for.
"""

import math
import random

import torch

from dpcompanion.accounting.histories import epsilon_of_histories

from .power import verdict


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    for _ in range(count):
        levels = generator.randint(1, 3)
        yield {
            "rate": logarithmic(1e-4, 0.5),
            "delta": logarithmic(1e-10, 1e-2),
            "noise": [logarithmic(0.5, 50) for _ in range(levels)],
            "counts": [[round(logarithmic(1, 5000)) for _ in range(levels)] for _ in range(2)],
        }


def violations(case):
    epsilons = epsilon_of_histories(
        torch.tensor(case["counts"]),
        sample_rate=case["rate"],
        delta=case["delta"],
        noise_multipliers=case["noise"],
    )
    said = [
        verdict(
            [(case["rate"], noise, steps) for noise, steps in zip(case["noise"], row)],
            epsilon,
            case["delta"],
        )
        for row, epsilon in zip(case["counts"], epsilons.tolist())
    ]
    found = [f"history {row}: {one}" for row, one in zip(case["counts"], said) if one]
    return None if None in said and not found else found
