"""The environments in which the whole is tried change what they say, here on a clone that nothing
is installed into.
"""

import os
import sys

import environments
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """A function that runs a shell command in an environment, without an install: (exit status,
    what it said last).
    """
    (tmp_path / "programs").mkdir()
    for name, does in (("make", "exit 0"), ("git", 'for folder; do :; done; mkdir "$folder"')):
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")

    def call(name, command):
        folder = tmp_path / name
        folder.mkdir()
        return environments.run(name, command, folder)

    return call


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_an_environment_changes_what_the_command_sees_and_leaves_this_process_alone(ran):
    cores, seen = (
        os.sched_getaffinity(0),
        f"{sys.executable} -c 'import os; print(len(os.sched_getaffinity(0)))'",
    )
    assert ran("odd path+one core", f'{seen}; basename "$PWD"') == (0, "ein Weg für Übungen")
    assert ran("one core+Kiritimati", f"{seen} && test $TZ = Pacific/Kiritimati") == (0, "1")
    assert ran(
        "no browser", "for each in chromium node npm; do ! command -v $each || exit 1; done"
    ) == (0, "")
    assert ran("DejaVu alone", 'ls "$(dirname "$FONTCONFIG_FILE")" | grep -v DejaVu') == (
        0,
        "fonts.conf",
    )
    assert ran("as it is", "echo FAILED tests/one.py; exit 1") == (1, "FAILED tests/one.py")
    assert os.sched_getaffinity(0) == cores


def test_what_cannot_be_made_here_is_said_and_does_not_count(ran, monkeypatch):
    monkeypatch.setitem(environments.ENVIRONMENTS, "3.12", environments.PYTHON.format("python0.1"))
    assert ran("3.12+C locale", "exit 1") == (environments.MISSING, "python0.1 is not installed")


def test_an_install_that_fails_is_red_and_nothing_is_run(ran, tmp_path):
    (tmp_path / "programs" / "make").write_text("#!/bin/sh\nexit 2\n")
    assert ran("as it is", "exit 0") == (1, "ERROR: the install failed")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_processes_that_load_the_machine_end_with_the_command(ran, tmp_path):
    assert ran("load", "jobs -p > pids; wc -l < pids") == (0, "6")
    left = [
        pid
        for pid in (tmp_path / "load" / "clone" / "pids").read_text().split()
        if os.path.exists(f"/proc/{pid}")
    ]
    assert not left
