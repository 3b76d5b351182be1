"""`epsilon_of_histories`: the true delta of mixed steps at its epsilon is not above the delta that was asked for."""

import math
import random

import torch

from dpcompanion.accounting.histories import epsilon_of_histories

from .inversion import delta as true_delta


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))
    for _ in range(count):
        levels = generator.randint(1, 3)
        yield {"rate": logarithmic(1e-4, 0.5), "delta": logarithmic(1e-10, 1e-2),
               "noise": [logarithmic(0.5, 50) for _ in range(levels)],
               "counts": [[round(logarithmic(1, 5000)) for _ in range(levels)] for _ in range(2)]}


def violations(case):
    epsilons = epsilon_of_histories(torch.tensor(case["counts"]), sample_rate=case["rate"], delta=case["delta"],
                                    noise_multipliers=case["noise"])
    found, resolved = [], True
    for row, epsilon in zip(case["counts"], epsilons.tolist()):
        runs = [(case["rate"], noise, steps) for noise, steps in zip(case["noise"], row)]
        for remove in (True, False):
            true = true_delta(runs, epsilon, remove)
            resolved = resolved and not math.isnan(true)
            if true > case["delta"] * (1 + 1e-6) + 1e-15:
                found.append(f"history {row}: epsilon {epsilon} has delta {true}")
    return found if found or resolved else None
