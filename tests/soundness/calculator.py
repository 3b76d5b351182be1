"""The page's calculator: no epsilon and no delta of its curves below the library's, over the whole range that its form
admits. Needs node."""

import json
import math
import pathlib
import random
import shutil
import subprocess

from dpcompanion.accounting import compute_delta, compute_epsilon

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "book" / "_static" / "accountant.js"


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    for _ in range(count):
        yield [
            1.0 if generator.random() < 0.03 else logarithmic(1e-5, 1),
            logarithmic(0.3, 100) / generator.uniform(0.02, 1),
            round(logarithmic(1, 1e6)),
            logarithmic(1e-9, 1e-2),
        ]


def violations(case):
    if shutil.which("node") is None:
        return None
    script = (
        f"const a = require({str(SCRIPT)!r}), run = {json.dumps(case)};"
        "console.log(JSON.stringify([[a.epsilonByRenyi(...run), a.epsilonByLosses(...run).epsilon,"
        "a.epsilonByLosses(...run, 1 << 14).epsilon], a.profileOf(...run.slice(0, 3))]))"
    )
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    answers, profile = json.loads(said)
    rate, noise, steps, delta = case
    exact = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
    found = [f"{answer} where the library says {exact}" for answer in answers if answer is None or answer < exact]
    for epsilon, delta in profile[::50]:
        exact = compute_delta(sample_rate=rate, noise_multiplier=noise, steps=steps, epsilon=epsilon)
        if delta is None or delta < exact:
            found.append(f"delta {delta} at epsilon {epsilon} where the library says {exact}")
    return found
