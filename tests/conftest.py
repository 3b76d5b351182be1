"""What some tests need besides Python: without it they skip and say how to get it; where CI is set
they fail.
"""

import gc
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run and on every machine: a search for new ones is `make soundness`.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
without_shrinking = [
    phase
    for phase in hypothesis.Phase
    if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)
]
hypothesis.settings.register_profile(
    "unshrunk", hypothesis.settings.get_profile("fixed"), phases=without_shrinking
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "fixed")
)  # "unshrunk" by tests/mutations.py

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The collector of cycles looks at what tests make, and not at a million objects of modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


_spec = importlib.util.spec_from_file_location("browser_check", ROOT / "tools" / "browser_check.py")
_browser_check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_browser_check)


def needed(found, what, advice):
    """`found` if there is one, else the end of the test."""
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} was not found: {advice}")
    return found


@pytest.fixture(scope="session")
def browser_check():
    """The module tools/browser_check.py."""
    return _browser_check


@pytest.fixture(scope="session")
def chromium():
    """The path of a Chromium."""
    return needed(
        _browser_check.find_chromium(),
        "a Chromium",
        "apt-get install chromium, or set CHROMIUM to the path of one",
    )


@pytest.fixture(scope="session")
def node():
    """The path of node."""
    return needed(shutil.which("node"), "node", "apt-get install nodejs")


@pytest.fixture(scope="session")
def run_script(node):
    """A function for the value of a JavaScript expression over the book's scripts, each under its
    name.
    """
    static = ROOT / "book" / "_static"

    def run(expression):
        names = {
            "accountant": "accountant",
            "exactFilter": "filter",
            "planner": "planner",
            "chart": "chart",
        }
        loaded = [
            f"const {name} = require({str(static / f'{file}.js')!r});"
            for name, file in names.items()
        ]
        command = [node, "-e", f"{''.join(loaded)} console.log(JSON.stringify({expression}))"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
        return json.loads(done.stdout)

    return run
