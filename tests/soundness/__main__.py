"""Run the trial: `python -m tests.soundness [PIECE ...] [--count-scale 1.0] [--seed 0] [--seconds N]`."""

import argparse
import datetime
import importlib
import pathlib
import re
import sys
import time

from . import PIECES

TABLE = pathlib.Path(__file__).with_name("README.md")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.soundness", description="Random cases against oracles.")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; all by default")
    parser.add_argument("--count-scale", type=float, default=1.0, help="share of the cases of the whole trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop a piece after so long; the table says so"
    )
    options = parser.parse_args()
    if unknown := set(options.pieces) - set(PIECES):
        parser.error(f"there is no piece {', '.join(sorted(unknown))}")
    wrong = 0
    for name in options.pieces or PIECES:
        piece = importlib.import_module(f"{__package__}.{name}")
        wanted = max(1, round(PIECES[name][0] * options.count_scale))
        started, done, unresolved, found = time.perf_counter(), 0, 0, []
        for case in piece.cases(options.seed, wanted):
            if time.perf_counter() - started > options.seconds:
                break
            said = piece.violations(case)
            done, unresolved = done + 1, unresolved + (said is None)
            for line in said or ():
                found.append(line)
                print(f"{name}: {case}: {line}", flush=True)
        seconds = time.perf_counter() - started
        wrong += len(found)
        print(
            f"{name}: {done} cases, {unresolved} that the oracle does not resolve, {len(found)} violations, "
            f"{seconds:.0f} s",
            flush=True,
        )
        note(name, done, unresolved, len(found), seconds, options.seed)
    return 1 if wrong else 0


def note(name, done, unresolved, wrong, seconds, seed):
    """Put what was run into the table."""
    row = (
        f"| {name} | {PIECES[name][0]:,} | {done:,} | {unresolved:,} | {wrong} | {seed} | {seconds:.0f} | "
        f"{datetime.date.today().isoformat()} |"
    )
    text = TABLE.read_text(encoding="utf-8")
    TABLE.write_text(re.sub(rf"^\| {name} \|.*$", row, text, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
