"""Run the checks of `make test` or of `make prove`, then say what was proved and what was not tried.

    python tools/prove.py test
    python tools/prove.py prove      the rest, which takes longer

Each step prints as it goes. A step that fails does not keep the others from running, but the end is red.
"""

import collections
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKE = ("make", "--no-print-directory")
# Trackers, filters, attacks and theorems: what trains on these is what all papers share.
TRAINS = "book/papers/individual-accounting*.ipynb book/attacker.ipynb book/your-own-model.ipynb"
# Tests of one file share what they train.
PYTEST = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-rs")
STEPS = {
    "test": {
        "lint": (*MAKE, "lint"),
        "types": (*MAKE, "types"),
        "unit tests and doctests": (*PYTEST, "-m", "not slow"),
        "notebooks and their sources": (sys.executable, "tools/notebooks.py", "check"),
        "notebooks executed again, by nbval": (*MAKE, "notebooks"),
        "site, its warnings as errors": (*MAKE, "site"),
    },
    "prove": {
        "slow tests": (*PYTEST, "-m", "slow"),
        "deliberate faults, each caught by the short run": (sys.executable, "-m", "tests.mutations", "--jobs", "2"),
        "notebooks that train, under another arithmetic": (*MAKE, "notebooks", f"PAGES={TRAINS}", "UNDER=sse+jitter"),
        "site": (*MAKE, "site"),
        "pages in a browser": (sys.executable, "tools/browser_check.py"),
    },
}


def run(title, command):
    """Run a step and show what it prints: (whether it went well, its lines, the minutes that it took)."""
    print(f"== {title}", flush=True)
    started = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines += [line.strip()] if line.strip() else []
    return process.returncode == 0, lines, (time.monotonic() - started) / 60


def main(which):
    found = {title: run(title, command) for title, command in STEPS[which].items()}
    skipped = collections.Counter()
    print("\n== what was proved")
    for title, (good, lines, minutes) in found.items():
        unseen = [line for line in lines if "NOT checked" in line]
        if not good or not unseen:
            print(f"{'proved' if good else 'FAILED'}: {title} ({minutes:.1f} min){f': {lines[-1]}' if lines else ''}")
        skipped.update(unseen)
        for line in lines:
            if skip := re.match(r"SKIPPED \[(\d+)\] \S+: (.*)", line):
                skipped[skip[2]] += int(skip[1])
    for reason, number in skipped.items():
        print(f"not tried: {reason} ({number})")
    if which == "test":
        print(f"not tried, but by make prove: {', '.join(title for title in STEPS['prove'] if title != 'site')}")
    return 0 if all(good for good, _, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
