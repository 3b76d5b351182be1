"""Run the checks of `make test` or of `make prove`, then say what was proved and what was not.

    python tools/prove.py test
    python tools/prove.py prove      the rest, which takes longer

Lanes run side by side, so that no core is idle while the last of a step's workers ends; steps of a
lane run one after the other, since each of the longest keeps two cores busy. The first lane prints
as it goes, the others a step when it is over. A step that fails does not keep the others from
running, but the end is red.
"""

import collections
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKE = ("make", "--no-print-directory")
# Trackers, filters, attacks and theorems: what trains on these is what all papers share.
TRAINS = (
    "PAGES=book/papers/individual-accounting*.ipynb book/attacker.ipynb book/your-own-model.ipynb"
)
# Tests of one file share what they train.
PYTEST = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-rs")
STEPS = {
    "test": (
        {
            "lint": (*MAKE, "lint"),
            "notebooks and their sources": (sys.executable, "tools/notebooks.py", "check"),
            "notebooks executed again, by nbval": (*MAKE, "notebooks"),
            "unit tests and doctests": (*PYTEST, "-m", "not slow"),
        },
        {"types": (*MAKE, "types"), "site, its warnings as errors": (*MAKE, "site")},
    ),
    "prove": (
        {
            "slow tests": (*PYTEST, "-m", "slow"),
            "deliberate faults, each caught by the short run": (
                sys.executable,
                "-m",
                "tests.mutations",
                "--jobs",
                "2",
            ),
            "notebooks that train, under another arithmetic": (
                *MAKE,
                "notebooks",
                TRAINS,
                "UNDER=sse+jitter",
            ),
        },
        {"site": (*MAKE, "site"), "pages in a browser": (sys.executable, "tools/browser_check.py")},
    ),
}


def run(title, command, live):
    """Run a step and show what it prints: (whether it went well, its lines, its minutes)."""
    if live:
        print(f"== {title}", flush=True)
    started, lines = time.monotonic(), []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ) as process:
        for line in process.stdout or ():
            if live:
                print(line, end="", flush=True)
            lines.append(line.rstrip())
    if not live:
        print("\n".join([f"== {title}", *lines]), flush=True)
    return (
        process.returncode == 0,
        [line.strip() for line in lines if line.strip()],
        (time.monotonic() - started) / 60,
    )


def main(which):
    first, *others = STEPS[which]

    def steps(lane, live=False):
        return {title: run(title, command, live) for title, command in lane.items()}

    with ThreadPoolExecutor(len(others)) as pool:
        beside = [pool.submit(steps, lane) for lane in others]
        found = steps(first, live=True)
        for lane in beside:
            found |= lane.result()
    skipped = collections.Counter()
    print("\n== what was proved")
    for title, (good, lines, minutes) in found.items():
        unseen = [line for line in lines if "NOT checked" in line]
        if not good or not unseen:
            print(
                f"{'proved' if good else 'FAILED'}: {title} ({minutes:.1f} "
                f"min){f': {lines[-1]}' if lines else ''}"
            )
        skipped.update(unseen)
        for line in lines:
            if skip := re.match(r"SKIPPED \[(\d+)\] \S+: (.*)", line):
                skipped[skip[2]] += int(skip[1])
    for reason, number in skipped.items():
        print(f"not tried: {reason} ({number})")
    if which == "test":
        print(
            "not tried, but by make prove: "
            f"{', '.join(t for steps in STEPS['prove'] for t in steps if t != 'site')}"
        )
    return 0 if all(good for good, _, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
