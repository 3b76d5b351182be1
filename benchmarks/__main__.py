"""Run every benchmark and print its table.

    python -m benchmarks                    all of them
    python -m benchmarks training           one of them
    python -m benchmarks training --write   and write its table into benchmarks/README.md

A module of this folder takes part if it has a function `run()` that returns rows: dicts with the
same keys, which become the columns. The module's docstring becomes the text above the table, and
the machine stands below it. Written anew, a table takes the place of the one that the same make of
processor has left; those of other makes stay.
"""

import argparse
import datetime
import importlib
import os
import pathlib
import pkgutil
import platform
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
README = FOLDER / "README.md"
TITLE = (
    "# Benchmarks\n\nMade by `python -m benchmarks --write`; each table names its machine below it."
)


def names():
    """The modules beside this one, in alphabetical order."""
    return sorted(m.name for m in pkgutil.iter_modules([str(FOLDER)]) if not m.name.startswith("_"))


def table(rows):
    """Rows as a Markdown table; numbers with three significant digits.

    >>> print(table([{"way": "ours", "ms": 1.23456}, {"way": "a peer", "ms": 1234.5}]))
    | way | ms |
    |---|---|
    | ours | 1.23 |
    | a peer | 1234 |
    """

    def text(value):
        if not isinstance(value, float):
            return "" if value is None else str(value)
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

    columns = list(rows[0])
    lines = [columns, *([text(row[c]) for c in columns] for row in rows)]
    lines = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def machine():
    """The machine, how busy it is, the versions, the commit and the day, in one line."""
    import torch

    cpuinfo = (
        pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if os.path.exists("/proc/cpuinfo")
        else ""
    )
    processor = (
        next(
            (
                line.split(":")[1].strip()
                for line in cpuinfo.splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        )
        if os.path.exists("/proc/cpuinfo")
        else platform.processor()
    )
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    named = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty=+changes", "--exclude=*"]
    commit = (
        subprocess.run(named, capture_output=True, text=True, encoding="utf-8").stdout.strip()
        or "unknown"
    )
    return (
        f"{processor}, {os.cpu_count()} cores{load}; Python {platform.python_version()}, torch "
        f"{torch.__version__}; commit {commit}, {datetime.date.today():%-d %B %Y}"
    )


def tables(section):
    r"""A section's tables in the README and the line that names the machine, by make of processor.

    >>> tables("## one\n\nWhat is timed.\n\n| ms |\n|---|\n| 1 |\n\nAcme 3, 2 cores; Python 3.\n")
    {'Acme 3': '| ms |\n|---|\n| 1 |\n\nAcme 3, 2 cores; Python 3.'}
    """
    found = re.findall(r"^((?:\|.*\n)+\n([^|\n]+?),.*)$", section, flags=re.MULTILINE)
    return {make: text for text, make in found}


def sections(text):
    """The sections of a written README: {module name: its text, heading included}."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.strip() for part in parts}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Timings beside peers.", allow_abbrev=False
    )
    parser.add_argument(
        "modules", nargs="*", metavar="module", help=f"which to run: {', '.join(names())}"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the tables into benchmarks/README.md, others stay",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.modules) - set(names()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    written = sections(README.read_text(encoding="utf-8")) if README.exists() else {}
    for name in options.modules or names():
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "run"):
            print(f"benchmarks.{name} ...", file=sys.stderr, flush=True)
            made = f"{table(module.run())}\n\n{machine()}."
            of_makes = tables(written.get(name, "")) | tables(made)
            written[name] = "\n\n".join([f"## {name}", module.__doc__.strip(), *of_makes.values()])
            print(written[name] + "\n", flush=True)
            if options.write:
                parts = [TITLE, *(written[name] for name in names() if name in written)]
                README.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
