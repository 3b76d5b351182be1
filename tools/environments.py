"""Run `make test` on a clone that was never built, in environments that differ from this one.

    python tools/environments.py                            every environment in turn: hours
    python tools/environments.py turkish "load+one core"    these; a plus sign joins several
    python tools/environments.py --command "make site" ...  something else than `make test`

A check that passes at home only is a fault, and nobody finds it at home. Each environment changes
one thing that a test could lean on without knowing: fonts, locale, time zone, cores, load,
programs, the home folder, the path, Python. What cannot be made here (a locale without its sources,
a Python that is not installed) is said and not counted.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arithmetic

ROOT = Path(__file__).resolve().parent.parent
MISSING = 77  # the exit status of an environment that cannot be made here, which says why

# No other fonts than those of a pattern; the files are the ones that matplotlib brings.
FONTS = """
FILES=$("$TOOLS_PYTHON" -c 'import matplotlib; print(matplotlib.get_data_path())')
cp "$FILES"/fonts/ttf/{0} "$MADE"
export FONTCONFIG_FILE="$MADE/fonts.conf"
echo "<fontconfig><dir>$MADE</dir><cachedir>$MADE/cache</cachedir></fontconfig>" \\
    > "$FONTCONFIG_FILE"
"""
# Neither a Chromium nor node on the path; links to all other programs.
NO_BROWSER = """
mkdir "$MADE/programs"
for place in ${PATH//:/ }; do ln -s "$place"/* "$MADE/programs" 2>/dev/null || true; done
cd "$MADE/programs"
rm -f chromium chromium-browser google-chrome google-chrome-stable node nodejs npm
cd - >/dev/null
export PATH="$MADE/programs" CHROMIUM= CI=
"""
# A locale whose small and capital i are other letters than elsewhere.
TURKISH = """
localedef -i tr_TR -f UTF-8 "$MADE/tr_TR.UTF-8" >/dev/null 2>&1 || true
[ -d "$MADE/tr_TR.UTF-8" ] || { echo "localedef cannot make tr_TR.UTF-8"; exit 77; }
export LOCPATH="$MADE" LC_ALL=tr_TR.UTF-8 LANG=tr_TR.UTF-8
"""
PYTHON = """
command -v {0} >/dev/null || {{ echo "{0} is not installed"; exit 77; }}
export PYTHON={0}
"""
LOAD = """
for process in 1 2 3 4 5 6; do "$TOOLS_PYTHON" -c 'while True: pass' & done
trap 'kill $(jobs -p); wait 2>/dev/null' EXIT
"""

# {name: lines of bash that come before the clone is made}; $MADE is an empty folder, $CLONE the
# name of the clone.
ENVIRONMENTS = {
    "as it is": "",
    "DejaVu alone": FONTS.format("DejaVu*.ttf"),
    "serif font": FONTS.format("STIXGeneral.ttf"),
    "C locale": "export LC_ALL=C LANG=C",
    "turkish": TURKISH,
    "Kiritimati": "export TZ=Pacific/Kiritimati",
    "one core": "taskset -cp $(taskset -cp $$ | grep -oE '[0-9]+' | tail -1) $$ >/dev/null",
    "load": LOAD,
    "no browser": NO_BROWSER,
    "no home": "export HOME=/dev/null/home",
    "odd path": "CLONE='ein Weg für Übungen'",
    "3.11": PYTHON.format("python3.11"),
    "3.12": PYTHON.format("python3.12"),
    "3.13": PYTHON.format("python3.13"),
}
INSTALL = """
git clone -q "$ROOT" "$CLONE" && cd "$CLONE" && make .venv/.installed || {
    echo "ERROR: the install failed"; exit 1;
}
"""


def run(name, command, folder):
    """(the exit status; what there is to say) of a command in environments joined by "+"."""
    (folder / "made").mkdir()
    made = "".join(f"{ENVIRONMENTS[part]}\n" for part in name.split("+"))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {
        "ROOT": str(ROOT),
        "MADE": str(folder / "made"),
        "CLONE": "clone",
        "TOOLS_PYTHON": sys.executable,
    }
    log = folder / "log.txt"
    with log.open("wb") as stream:
        done = subprocess.run(
            ["bash", "-c", f"{made}{INSTALL}{command}"],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, "; ".join(wrong[:5] or lines[-1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--command", default="make test")
    options = parser.parse_args()
    names = options.names or list(ENVIRONMENTS)
    if unknown := {part for name in names for part in name.split("+")} - set(ENVIRONMENTS):
        parser.error(
            f"no such environment: {', '.join(sorted(unknown))} (there are "
            f"{', '.join(ENVIRONMENTS)})"
        )
    print(f"{options.command}, on {arithmetic.processor()}, {os.cpu_count()} cores\n")
    print("| environment | outcome | minutes, with the install | |\n|:--|:--|--:|:--|", flush=True)
    outcomes = set()
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            status, said = run(name, options.command, Path(folder))
        outcome = {0: "green", MISSING: "not tried"}.get(status, "RED")
        outcomes.add(outcome)
        print(
            f"| {name} | {outcome} | {(time.monotonic() - started) / 60:.1f} | {said} |", flush=True
        )
    return 1 if "RED" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
