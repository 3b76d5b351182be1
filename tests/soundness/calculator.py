"""The page's calculator: no epsilon and no delta of its curves below the library's, over the whole
range that its form admits, and in every tenth case no promise of its exact filter either, where the
game is cheap. Needs node.
"""

import json
import math
import pathlib
import random
import shutil
import subprocess

from dpcompanion.accounting import compute_delta, compute_epsilon
from dpcompanion.filters import adaptive_delta

STATIC = pathlib.Path(__file__).resolve().parents[2] / "book" / "_static"
ACCOUNT = (
    "[[accountant.epsilonByRenyi(...run), accountant.epsilonByLosses(...run).epsilon,"
    "accountant.epsilonByLosses(...run, 1 << 14).epsilon], accountant.profileOf(...run.slice(0, "
    "3))]"
)
FILTER_EVERY = 10
LARGEST_GAME = 300  # units of a budget that are played again


def cases(seed, count):
    generator = random.Random(seed)

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    for index in range(count):
        case = [
            1.0 if generator.random() < 0.03 else logarithmic(1e-5, 1),
            logarithmic(0.3, 100) / generator.uniform(0.02, 1),
            round(logarithmic(1, 1e6)),
            logarithmic(1e-9, 1e-2),
        ]
        # from a stream of its own: the other cases stay what they were
        if index % FILTER_EVERY == FILTER_EVERY - 1:
            case.append(random.Random(f"{seed} {index}").uniform(0.02, 1))
        yield case


def violations(case):
    if shutil.which("node") is None:
        return None
    rate, noise, steps, delta, *norm = case
    answers, profile = said_by_the_page(case[:4], ACCOUNT)
    exact = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
    found = [
        f"{answer} where the library says {exact}"
        for answer in answers
        if answer is None or answer < exact
    ]
    for epsilon, shown in profile[::50]:
        exact = compute_delta(
            sample_rate=rate, noise_multiplier=noise, steps=steps, epsilon=epsilon
        )
        if shown is None or shown < exact:
            found.append(f"delta {shown} at epsilon {epsilon} where the library says {exact}")
    return found + (filter_violations([rate, max(noise, 0.5), steps, delta, *norm]) if norm else [])


def filter_violations(run):
    """What is wrong with the page's exact filter for (rate, noise, steps, delta, norm)."""
    answer, found = said_by_the_page(run, "exactFilter.finished(exactFilter.promised(...run))"), []
    for i in promises_of(answer):
        epsilon, game = answer["promises"][i], game_of(run, answer, i)
        if game["budget"] <= LARGEST_GAME:
            worst = 1.0 if epsilon is None else adaptive_delta(**game, epsilon=epsilon)
            if worst > run[3]:
                found.append(
                    f"promise {i}, {epsilon} by the filter of {run}: the library finds delta "
                    f"{worst}"
                )
    return found


def promises_of(answer):
    """Which promises of an answer are tried: the first and the last; none where the page says why
    it gives none.
    """
    return [] if "reason" in answer else sorted({1, answer["blocks"]})


def game_of(run, answer, i):
    """The library's game of the page's filter, with a budget that pays for i blocks."""
    return dict(
        sample_rate=run[0],
        noise_multiplier=run[1],
        levels=answer["levels"],
        costs=answer["costs"],
        budget=answer["budget"] * i // answer["blocks"],
        block=answer["block"],
    )


def said_by_the_page(run, expression):
    script = (
        f"const accountant = require({str(STATIC / 'accountant.js')!r}), run = {json.dumps(run)};"
    )
    script += f"const exactFilter = require({str(STATIC / 'filter.js')!r});"
    script += f"console.log(JSON.stringify({expression}))"
    return json.loads(
        subprocess.run(
            ["node", "-e", script], capture_output=True, text=True, encoding="utf-8", check=True
        ).stdout
    )
