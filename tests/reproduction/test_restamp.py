"""tools/restamp.py, in a checkout of its own with a few records."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME, OTHER = "intrinsic-privacy/claims-1-2", "idp-sgd/table-5"


@pytest.fixture
def checkout(tmp_path):
    """A repository with today's code and two records."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "dpcompanion", folder / "dpcompanion", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tools").mkdir()
    for name in ("tools/restamp.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for name in (NAME, OTHER):
        path = folder / "results" / f"{name}.paper.json"
        path.parent.mkdir(parents=True)
        shutil.copy(ROOT / "results" / f"{name}.paper.json", path)

    def git(*arguments):
        subprocess.run(
            ["git", "-C", folder, "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "before")
    return folder


def restamp(checkout):
    return subprocess.run(
        [sys.executable, "tools/restamp.py", "--from", "HEAD"], cwd=checkout, capture_output=True, text=True
    )


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_records_that_were_fresh_are_restamped_and_others_named(checkout):
    papers = checkout / "dpcompanion" / "reproduction" / "papers"
    edit(
        papers / "intrinsic_privacy" / "sensitivity.py",
        "    places = np.arange(n)\n    fixed = np.array([[(random",
        "    positions = places = np.arange(n)\n    fixed = np.array([[(random",
    )
    # A preset changed as well: the record is of another configuration, and stays stale.
    edit(papers / "idp_sgd" / "settings.py", "epsilon_tolerance: float = ", "epsilon_tolerance: float = 2 * ")
    path, other = (checkout / "results" / f"{name}.paper.json" for name in (NAME, OTHER))
    before, untouched = json.loads(path.read_text()), other.read_bytes()
    done = restamp(checkout)
    assert done.returncode == 1 and done.stdout.splitlines() == ["1 restamped", f"left stale: {OTHER} (paper)"]
    after = json.loads(path.read_text())
    assert {key for key in before if before[key] != after[key]} == {"code_hash", "sha256", "restamped"}
    assert list(before) == list(after)
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert after["restamped"] == [*before["restamped"], {"code_hash": before["code_hash"], "commit": head}]
    assert other.read_bytes() == untouched
    # A record of another run than the one that was fresh is left.
    edit(papers / "intrinsic_privacy" / "sensitivity.py", "    positions = places", "    position = places")
    code = (
        "import pathlib, sys; from dpcompanion.reproduction import storage; path = pathlib.Path(sys.argv[1]); "
        "fields = storage.read_json(path); fields['values']['mean'] += 1; "
        "storage.write_json(path, fields, indent=1)"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, cwd=checkout)
    changed = path.read_bytes()
    assert restamp(checkout).stdout.splitlines() == ["0 restamped", f"left stale: {NAME} (paper), {OTHER} (paper)"]
    assert path.read_bytes() == changed


def test_one_seed_gets_its_new_name_wherever_the_configuration_has_it():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from restamp import renamed
    finally:
        sys.path.pop(0)
    then = {"seeds": [3], "many": {"seeds": [1, 2]}, "one": {"seeds": [0], "tasks": {}}, "task": {"seeds": 99}}
    today = {"seed": 0, "many": {"seeds": [0]}, "one": {"seed": 0, "tasks": {}}, "task": {"seeds": 99}}
    assert renamed(then, today) == {
        "seed": 3,
        "many": {"seeds": [1, 2]},
        "one": {"seed": 0, "tasks": {}},
        "task": {"seeds": 99},
    }
