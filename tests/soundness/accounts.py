"""`compute_epsilon` by both accountants: the true delta at its epsilon is not above the delta that
was asked for.
"""

import math
import random

from dpcompanion.accounting import ACCOUNTANTS, compute_epsilon

from .power import verdict


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    for _ in range(count):
        yield {
            "sample_rate": 1.0 if generator.random() < 0.05 else logarithmic(1e-5, 1),
            "noise_multiplier": logarithmic(0.3, 50),
            "delta": logarithmic(1e-12, 0.1),
            "steps": 1 if generator.random() < 0.1 else round(logarithmic(2, 1e5)),
        }


def violations(case):
    run = case["sample_rate"], case["noise_multiplier"], case["steps"]
    claims = {
        accountant: compute_epsilon(**case, accountant=accountant) for accountant in ACCOUNTANTS
    }
    # delta falls with epsilon: what holds here holds for the others
    least = min(claims, key=claims.get)
    said = verdict([run], claims[least], case["delta"])
    return None if said is None else [f"{least}: {said}"] if said else []
