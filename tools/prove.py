"""Run every check of the project, then say what was proved and what was not.

    python tools/prove.py        what `make test` does

Each step prints as it goes. The summary counts what the steps themselves report; a step that fails does not keep the
others from running, but the end is red.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def step(title, *command):
    """Run a command and show what it prints: (whether it went well, its lines)."""
    print(f"== {title}", flush=True)
    lines = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.strip())
    return process.returncode == 0, lines


def counts(path):
    """(tests that passed, {reason: tests that were skipped for it}) of a JUnit report of pytest."""
    passed, skipped = 0, {}
    if Path(path).exists():
        for case in ElementTree.parse(path).iter("testcase"):
            reasons = [child.get("message", "") for child in case if child.tag == "skipped"]
            passed += not len(case)
            for reason in reasons:
                skipped[reason] = skipped.get(reason, 0) + 1
    return passed, skipped


def main():
    python = sys.executable
    lint, _ = step("lint", "make", "--no-print-directory", "lint")
    types, typed = step("types", "make", "--no-print-directory", "types")
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/tests.xml"
        units, _ = step(
            "unit tests and doctests", python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", f"--junitxml={report}"
        )
        passed, skipped = counts(report)
    pairs, checked = step("notebooks and their sources", python, "tools/notebooks.py", "check")
    again, verified = step("notebooks executed again, outputs compared", python, "tools/notebooks.py", "verify")
    site, _ = step("pages", "make", "--no-print-directory", "site")
    seen, browser = step("pages in a browser", python, "tools/browser_check.py")

    print("\n== what was proved")
    for good, what in (
        (lint, "the code: the linter finds nothing, the formatter changes nothing"),
        (types, f"its types, by basedpyright: {last(typed)}"),
        (units, f"the library: {passed} tests and doctests passed"),
        (pairs, f"the notebooks are their sources, executed: {last(checked)}"),
        (again, f"their numbers come out again: {last(verified)}"),
        (site, "the book builds, and a warning would be an error"),
    ):
        print(f"{'proved' if good else 'FAILED'}: {what}")
    unseen = [line for line in browser if "NOT checked" in line]
    if not unseen:
        print(f"{'proved' if seen else 'FAILED'}: {last(browser)}")
    not_tried = [f"{number} tests: {reason}" for reason, number in skipped.items()] + unseen
    print("\n".join(f"not tried: {line}" for line in not_tried) or "nothing was skipped")
    return 0 if all((lint, types, units, pairs, again, site, seen)) else 1


def last(lines):
    return next((line for line in reversed(lines) if line), "it said nothing")


if __name__ == "__main__":
    sys.exit(main())
