"""What some tests need besides Python: without it they skip and say how to get it; where CI is set they fail."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
        _browser_check.find_chromium(), "a Chromium", "apt-get install chromium, or set CHROMIUM to the path of one"
    )


@pytest.fixture(scope="session")
def node():
    """The path of node."""
    return needed(shutil.which("node"), "node", "apt-get install nodejs")
