"""A wheel, installed where there is no checkout and only what the core needs: what it promises
works there.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpcompanion.reproduction import experiments, scoreboard

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow  # a wheel is built and installed

# Runs in a Python that sees the wheel, not the checkout, and nothing of what the extras bring.
CODE = """
import contextlib, importlib, importlib.abc, io, json, os, sys

installed, checkout, snippet = sys.argv[1:]
sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(checkout)]
sys.path.insert(0, installed)
EXTRAS = {
    "opacus", "torchvision", "sklearn", "mlxtend", "mpmath", "joblib", "dp_accounting",
    "matplotlib", "matplotlib_inline", "tqdm", "IPython",
}

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from dpcompanion import __file__ as place, cli
from dpcompanion.reproduction import scoreboard

def said(do, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = do(*arguments)
        except ImportError as error:
            status = str(error)
    return status, out.getvalue(), err.getvalue()

statuses = scoreboard.exhibit_statuses()
print(json.dumps({
    "place": place,
    "readme": said(exec, snippet),
    "list": said(cli.main, ["list", "--json"]),
    "run": said(cli.main, ["run", "idp-sgd/table-5", "--preset", "quick"]),
    "without data": said(cli.main, ["run", "intrinsic-privacy/figure-1", "--preset", "quick"]),
    "without opacus": said(importlib.import_module, "dpcompanion.engine"),
    "scoreboard": [[one.exhibit.name, one.state, one.verdicts, one.basis] for one in statuses],
}))
"""


def pip(*arguments):
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr


pytestmark = pytest.mark.slow  # an install into a folder of its own


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What an installed wheel of this checkout says."""
    source, wheels, target, here = (
        tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target", "here")
    )
    for name in ("dpcompanion", "results", "book"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "_static", "*.ipynb"),
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source)
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", target, *wheels.iterdir())
    snippet, _ = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", CODE, str(target), str(ROOT), snippet],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=here,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout)
    assert (
        Path(answers["place"]).is_relative_to(target)
        and Path(answers["place"]).with_name("py.typed").is_file()
    )
    return {**answers, "folder": here}


def test_the_readme_holds(said):
    status, out, _ = said["readme"]
    rdp, pld, noise = map(float, out.split())
    assert status is None and (round(rdp, 4), round(pld, 4)) == (1.0036, 0.9172) and noise < 3.42529


def test_an_experiment_runs_and_its_record_goes_to_the_current_folder(said):
    status, out, err = said["run"]
    assert status == 0 and "mnist.sigma" in out, err
    assert (said["folder"] / "results" / "idp-sgd" / "table-5.quick.json").is_file()


def test_records_and_scoreboard_are_those_of_the_checkout(said):
    status, out, err = said["list"]
    assert status == 0, err
    states = {entry["name"]: entry["records"].get("paper") for entry in json.loads(out)}
    assert states == {entry.name: entry.records.get("paper") for entry in experiments.catalogue()}
    assert "fresh" in states.values()
    assert said["scoreboard"] == [
        [one.exhibit.name, one.state, one.verdicts, one.basis]
        for one in scoreboard.exhibit_statuses()
    ]


def test_what_an_extra_brings_is_named_where_it_is_missing(said):
    status, _, err = said["without data"]
    assert status == 2 and "pip install 'dpcompanion[data]'" in err and err.count("\n") == 1
    status, _, _ = said["without opacus"]
    assert "pip install 'dpcompanion[opacus]'" in status
