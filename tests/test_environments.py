"""The environments in which the whole is tried change what they say, here on a clone that nothing is installed into."""

import os
import sys

import environments
import pytest


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """A function that runs a shell command in an environment, without an install: (outcome, what it said last)."""
    (tmp_path / "programs").mkdir()
    for name, does in (("make", "exit 0"), ("git", 'for folder; do :; done; mkdir "$folder"')):
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")

    def call(name, command):
        folder = tmp_path / name
        folder.mkdir()
        outcome, _, said = environments.run(name, command, folder)
        return outcome, said

    return call


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_an_environment_changes_what_the_command_sees_and_leaves_this_process_alone(ran):
    cores, seen = os.sched_getaffinity(0), f"{sys.executable} -c 'import os; print(len(os.sched_getaffinity(0)))'"
    assert ran("odd path+one core", f'{seen}; basename "$PWD"') == (True, "ein Weg für Übungen")
    assert ran("one core+Kiritimati", f"{seen} && test $TZ = Pacific/Kiritimati") == (True, "1")
    assert ran("no browser", "for each in chromium node npm; do ! command -v $each || exit 1; done") == (True, "")
    assert ran("DejaVu alone", 'ls "$(dirname "$FONTCONFIG_FILE")" | grep -v DejaVu') == (True, "fonts.conf")
    assert ran("as it is", "echo FAILED tests/one.py; exit 1") == (False, "FAILED tests/one.py")
    assert os.sched_getaffinity(0) == cores


def test_what_cannot_be_made_here_is_said_and_does_not_count(ran, monkeypatch):
    monkeypatch.setattr(environments.shutil, "which", lambda program: None)
    assert ran("3.12+C locale", "exit 1") == (None, "python3.12 is not installed")
