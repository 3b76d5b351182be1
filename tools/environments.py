"""Run `make test` on a clone that was never built, in environments that differ from this one.

    python tools/environments.py                                every environment, one after the other: hours
    python tools/environments.py turkish "serif font+one core"  these; a plus sign puts several into one run
    python tools/environments.py --command "make site" ...      something else than `make test`

A check that passes at home only is a fault, and nobody finds it at home. Each environment changes one thing that a
test could lean on without knowing: fonts, locale, time zone, cores, load, programs, the home folder, the path, Python.
What cannot be made here (a locale without its sources, a Python that is not installed) is said and not counted.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arithmetic

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "node", "nodejs", "npm")
FONTS = "<?xml version='1.0'?><fontconfig><dir>{0}</dir><cachedir>{0}/cache</cachedir></fontconfig>"


class NotHere(Exception):
    """The environment cannot be made on this machine."""


def only_fonts(folder, pattern):
    """No other fonts than those of a pattern; the files are the ones that matplotlib brings."""
    import matplotlib

    for font in Path(matplotlib.get_data_path(), "fonts", "ttf").glob(pattern):
        shutil.copy(font, folder)
    (folder / "fonts.conf").write_text(FONTS.format(folder), encoding="utf-8")
    return {"FONTCONFIG_FILE": str(folder / "fonts.conf")}


def turkish(folder):
    """A locale whose small and capital i are other letters than elsewhere."""
    made = folder / "tr_TR.UTF-8"
    if shutil.which("localedef"):
        subprocess.run(["localedef", "-i", "tr_TR", "-f", "UTF-8", str(made)], capture_output=True)
    if not made.is_dir():
        raise NotHere("localedef cannot make tr_TR.UTF-8")
    return {"LOCPATH": str(folder), "LC_ALL": made.name, "LANG": made.name}


def no_browser(folder):
    """Neither a Chromium nor node on the path; links to all other programs."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name not in PROGRAMS and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program)
    return {"PATH": str(folder), "CHROMIUM": "", "CI": ""}


def python(version):
    if not shutil.which(version):
        raise NotHere(f"{version} is not installed")
    return {"PYTHON": version}


# {name: variables, or a function of an empty folder that makes them}; three of them are for `run` itself: the folder
# of the CLONE, the number of the CORES, and the LOAD, processes that compute for as long as the run takes.
ENVIRONMENTS = {
    "as it is": {},
    "DejaVu alone": lambda folder: only_fonts(folder, "DejaVu*.ttf"),
    "serif font": lambda folder: only_fonts(folder, "STIXGeneral.ttf"),
    "C locale": {"LC_ALL": "C", "LANG": "C"},
    "turkish": turkish,
    "Kiritimati": {"TZ": "Pacific/Kiritimati"},
    "one core": {"CORES": "1"},
    "load": {"LOAD": "6"},
    "no browser": no_browser,
    "no home": {"HOME": "/dev/null/home"},
    "odd path": {"CLONE": "ein Weg für Übungen"},
    "3.11": lambda folder: python("python3.11"),
    "3.12": lambda folder: python("python3.12"),
    "3.13": lambda folder: python("python3.13"),
}


def variables(name, folder):
    """The variables of an environment, or of several that are joined by "+". Raises NotHere."""
    found = {}
    for number, part in enumerate(name.split("+")):
        inside = folder / f"made-{number}"
        inside.mkdir()
        made = ENVIRONMENTS[part]
        found |= made(inside) if callable(made) else made
    return found


def run(name, command, folder):
    """(whether it went well, or None where it could not be tried; seconds; what there is to say)."""
    try:
        made = variables(name, folder)
    except NotHere as error:
        return None, 0, str(error)
    clone, log = folder / made.get("CLONE", "clone"), folder / "log.txt"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    environment = {key: value for key, value in (os.environ | made).items() if key != "PYTHONPATH"}
    if subprocess.run(["make", ".venv/.installed"], cwd=clone, env=environment).returncode:
        return False, 0, "the install failed"
    cores = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(made.get("LOAD", 0)))]
    started = time.monotonic()
    try:
        os.sched_setaffinity(0, sorted(cores)[: int(made.get("CORES", len(cores)))])
        with log.open("wb") as stream:
            streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
            status = subprocess.run(command, shell=True, cwd=clone, env=environment, **streams).returncode
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return status == 0, time.monotonic() - started, "; ".join(wrong[:5] or lines[-1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--command", default="make test")
    options = parser.parse_args()
    names = options.names or list(ENVIRONMENTS)
    if unknown := {part for name in names for part in name.split("+")} - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))} (there are {', '.join(ENVIRONMENTS)})")
    print(f"{options.command}, on {arithmetic.processor()}, {os.cpu_count()} cores\n")
    print("| environment | outcome | minutes | |\n|:--|:--|--:|:--|", flush=True)
    outcomes = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            fine, seconds, said = run(name, options.command, Path(folder))
        outcomes.append(fine)
        outcome = {True: "green", False: "RED", None: "not tried"}[fine]
        print(f"| {name} | {outcome} | {seconds / 60:.1f} | {said} |", flush=True)
    return 1 if False in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
