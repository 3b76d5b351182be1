"""Run `make test` on a clone that was never built, in environments that differ from this one.

    python tools/environments.py                                every environment, one after the other: hours
    python tools/environments.py turkish "serif font+one core"  these; a plus sign puts several into one run
    python tools/environments.py --keep FOLDER ...              clone and install there, and leave it
    python tools/environments.py --command "make site" ...      something else than `make test`

A check that passes at home only is a fault, and nobody finds it at home. Each environment changes one thing that a
test could lean on without knowing: fonts, locale, time zone, cores, load, programs, the home folder, the path, Python.
What cannot be made here (a locale without its sources, a Python that is not installed) is said and not counted.
"""

import argparse
import contextlib
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
LOAD = 6


class NotHere(Exception):
    """The environment cannot be made on this machine."""


def only_fonts(pattern):
    """No other fonts than those of a pattern; the files are the ones that matplotlib brings."""

    @contextlib.contextmanager
    def make(folder):
        import matplotlib

        fonts = folder / "fonts"
        fonts.mkdir()
        for font in Path(matplotlib.get_data_path(), "fonts", "ttf").glob(pattern):
            shutil.copy(font, fonts)
        (fonts / "fonts.conf").write_text(FONTS.format(fonts), encoding="utf-8")
        yield {"FONTCONFIG_FILE": str(fonts / "fonts.conf")}

    return make


@contextlib.contextmanager
def turkish(folder):
    """A locale whose small and capital i are other letters than elsewhere."""
    if not shutil.which("localedef"):
        raise NotHere("localedef is not installed")
    made = subprocess.run(
        ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(folder / "tr_TR.UTF-8")], capture_output=True, text=True
    )
    if not (folder / "tr_TR.UTF-8").is_dir():
        raise NotHere(f"localedef cannot make tr_TR.UTF-8: {made.stderr.strip()[:80]}")
    yield {"LOCPATH": str(folder), "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}


@contextlib.contextmanager
def bare(folder):
    """Neither a Chromium nor node on the path; links to all other programs."""
    programs = folder / "programs"
    programs.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = programs / program.name
            if program.name not in PROGRAMS and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program)
    yield {"PATH": str(programs), "CHROMIUM": "", "CI": ""}


@contextlib.contextmanager
def one_core(folder):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield {}
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def load(folder):
    """Six processes that compute for as long as the run takes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    try:
        yield {}
    finally:
        for process in busy:
            process.kill()


def variables(**values):
    @contextlib.contextmanager
    def make(folder):
        yield values

    return make


def python(version):
    @contextlib.contextmanager
    def make(folder):
        if not shutil.which(f"python{version}"):
            raise NotHere(f"python{version} is not installed")
        yield {"PYTHON": f"python{version}"}

    return make


ENVIRONMENTS = {
    "as it is": variables(),
    "DejaVu alone": only_fonts("DejaVu*.ttf"),
    "serif font": only_fonts("STIXGeneral.ttf"),
    "C locale": variables(LC_ALL="C", LANG="C"),
    "turkish": turkish,
    "Kiritimati": variables(TZ="Pacific/Kiritimati"),
    "one core": one_core,
    "load": load,
    "no browser": bare,
    "no home": variables(HOME="/dev/null/home"),
    "odd path": variables(CLONE="ein Weg für Übungen"),
    "3.11": python("3.11"),
    "3.12": python("3.12"),
    "3.13": python("3.13"),
}


def run(name, command, keep=None):
    """(whether it went well, or None where it could not be tried; seconds; what there is to say)."""
    with contextlib.ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            made = {}
            for number, part in enumerate(name.split("+")):
                inside = folder / f"made-{number}"
                inside.mkdir(parents=True)
                made |= stack.enter_context(ENVIRONMENTS[part](inside))
        except NotHere as error:
            return None, 0, str(error)
        clone = folder / made.pop("CLONE", "clone")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment = {**os.environ, **made}
        environment.pop("PYTHONPATH", None)
        installed = subprocess.run(["make", ".venv/.installed"], cwd=clone, env=environment)
        if installed.returncode:
            return False, 0, "the install failed"
        started = time.monotonic()
        log = clone.with_name("log.txt")
        with log.open("wb") as stream:
            done = subprocess.run(
                command, shell=True, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return done.returncode == 0, time.monotonic() - started, "; ".join(wrong[:5] or lines[-1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--command", default="make test")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    names = options.names or list(ENVIRONMENTS)
    if unknown := {part for name in names for part in name.split("+")} - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))} (there are {', '.join(ENVIRONMENTS)})")
    print(f"{options.command}, on {arithmetic.processor()}, {os.cpu_count()} cores\n")
    print("| environment | outcome | minutes | |\n|:--|:--|--:|:--|", flush=True)
    good = True
    for name in names:
        keep = options.keep / name.replace(" ", "-") if options.keep else None
        fine, seconds, said = run(name, options.command, keep)
        outcome = {True: "green", False: "RED", None: "not tried"}[fine]
        print(f"| {name} | {outcome} | {seconds / 60:.1f} | {said} |", flush=True)
        good &= fine is not False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
