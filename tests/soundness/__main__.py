"""Run the trial: `python -m tests.soundness [PIECE ...] [--seed 0] [--seconds N] [--fresh]`.

Every case is a line of .soundness/PIECE-SEED.jsonl once it is done, and no later run does it again:
a trial may be stopped at any time and goes on where it was. A case that was a violation is tried
again.
"""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import torch

from . import PIECES

TABLE = pathlib.Path(__file__).with_name("README.md")
DONE = pathlib.Path(__file__).resolve().parents[2] / ".soundness"


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.soundness",
        description="Random cases against oracles.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; all by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="stop after so long; a later run goes on",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have done")
    options = parser.parse_args()
    if unknown := set(options.pieces) - set(PIECES):
        parser.error(f"there is no piece {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # several threads cost small tensors more than they save
    wrong, until = 0, time.monotonic() + options.seconds
    for name in options.pieces or PIECES:
        path = DONE / f"{name}-{options.seed}.jsonl"
        if options.fresh:
            path.unlink(missing_ok=True)
        piece = importlib.import_module(f"{__package__}.{name}")
        try:
            run(piece, options.seed, PIECES[name][0], path, until)
        finally:
            row = note(name, options.seed, read(path), TABLE)
        wrong += sum(bool(line["said"]) for line in read(path).values())
        print(row, flush=True)
    return 1 if wrong else 0


def run(piece, seed, count, path, until):
    """Do those of `count` cases that `path` does not hold, and add a line to it for each."""
    before, commit = read(path), _commit()
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        if path.stat().st_size:
            file.write("\n")  # behind a line that a kill cut off; empty lines are skipped
        for index, case in enumerate(piece.cases(seed, count)):
            if index in before and not before[index]["said"]:
                continue
            if time.monotonic() >= until:
                break
            started = _processor_seconds()
            try:
                said = piece.violations(case)
            except Exception as error:
                said = [f"{type(error).__name__}: {error}"]
            seconds = round(_processor_seconds() - started, 3)
            file.write(
                json.dumps({"case": index, "said": said, "seconds": seconds, "commit": commit})
                + "\n"
            )
            file.flush()
            for line in said or ():
                print(f"case {index}: {case}: {line}", flush=True)


def read(path):
    """{case: its line} of what was done; a line that a kill cut off does not count."""
    done = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        done[line["case"]] = line
    return done


def note(name, seed, done, table):
    """Put what was run into the table."""
    unresolved, wrong = (
        sum(map(of, done.values()))
        for of in (lambda d: d["said"] is None, lambda d: bool(d["said"]))
    )
    commits = ", ".join(dict.fromkeys(line["commit"] for line in done.values()))
    row = (
        f"| {name} | {PIECES[name][0]:,} | {len(done):,} | {unresolved:,} | {wrong} | {seed} | "
        f"{sum(line['seconds'] for line in done.values()):.0f} | {commits} | "
        f"{datetime.date.today().isoformat()} |"
    )
    text = table.read_text(encoding="utf-8")
    table.write_text(re.sub(rf"^\| {name} \|.*$", row, text, flags=re.MULTILINE), encoding="utf-8")
    return row


def _processor_seconds():
    return sum(os.times()[:4])


def _commit():
    """The commit that is tried; with a plus where the tree differs from it."""
    git = ["git", "-C", str(DONE.parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    return (
        subprocess.run(git, capture_output=True, text=True, encoding="utf-8").stdout.strip()
        or "no commit"
    )


if __name__ == "__main__":
    sys.exit(main())
