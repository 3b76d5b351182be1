"""`compute_epsilon` by both accountants: the true delta at its epsilon is not above the delta that was asked for."""

import math
import random

from dpcompanion.accounting import ACCOUNTANTS, compute_epsilon

from .inversion import delta as true_delta


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))
    for _ in range(count):
        yield {"sample_rate": 1.0 if generator.random() < 0.05 else logarithmic(1e-5, 1),
               "noise_multiplier": logarithmic(0.3, 50), "delta": logarithmic(1e-12, 0.1),
               "steps": 1 if generator.random() < 0.1 else round(logarithmic(2, 1e5))}


def violations(case):
    run = case["sample_rate"], case["noise_multiplier"], case["steps"]
    found, resolved = [], True
    for accountant in ACCOUNTANTS:
        epsilon = compute_epsilon(**case, accountant=accountant)
        for remove in (True, False):
            true = true_delta([run], epsilon, remove)
            resolved = resolved and not math.isnan(true)
            if true > case["delta"] * (1 + 1e-6) + 1e-15:
                found.append(f"{accountant}: epsilon {epsilon} has delta {true}")
    return found if found or resolved else None
