"""The cache of calibrations: the same question is answered from disk, and nothing wrong is."""

import hashlib
import itertools
import json
import os
import pathlib

import pytest

from dpcompanion.filters import ExactFilter, cache, calibrate_filter, calibration

QUESTION = dict(
    target_epsilon=1.0,
    target_delta=1e-5,
    sample_rate=0.01,
    noise_multiplier=1.0,
    steps=100,
    levels=[0.5, 1.0],
    costs=[1, 8],
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    monkeypatch.delenv("DPCOMPANION_FILTERS", raising=False)
    return tmp_path / "filters"


def counted(name="noted", shortest=0.0):
    """A cached function that squares, and the list of what it was called with."""
    calls = []

    def noted(x, levels=(), progress=None):
        calls.append(x)
        return float(x) ** 2, len(levels)

    noted.__name__ = name
    return cache.cached(shortest)(noted), calls


def sealed(**entry):
    return json.dumps(
        {"sha256": hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest(), **entry}
    )


def forget_everything():
    for function in vars(calibration).values():
        getattr(function, "forget", lambda: None)()


def test_an_answer_survives_the_memory_and_belongs_to_its_question(folder):
    square, calls = counted()
    assert square(3.0, levels=(0.1, 1.0)) == square(3.0, (0.1, 1.0), progress=False) == (9.0, 2)
    square.forget()
    assert square(3.0, (0.1, 1.0)) == (9.0, 2) and calls == [3.0]
    assert (
        square(3.0, (0.1, 0.9)) == (9.0, 2)
        and square(3.1) == (3.1**2, 0)
        and calls == [3.0, 3.0, 3.1]
    )
    other, others = counted("other")
    assert other(3.0, (0.1, 1.0)) == (9.0, 2) and others == [3.0]
    assert len(list(folder.iterdir())) == 4 and not list(folder.glob("*.part"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("9.0", "1.0"),  # a smaller answer under the old seal
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\0" * 10,
        lambda text: sealed(answer=3),
        lambda text: sealed(question={"x": 4.0}, answer=[1]),
    ],
)
def test_a_damaged_or_foreign_entry_is_computed_again_and_replaced(folder, damage):
    square, calls = counted()
    square(3.0)
    (entry,) = folder.iterdir()
    whole = entry.read_text(encoding="utf-8")
    entry.write_text(damage(whole), encoding="utf-8")
    assert entry.read_text(encoding="utf-8") != whole
    square.forget()
    assert square(3.0) == (9.0, 0) and calls == [3.0, 3.0]
    square.forget()
    assert square(3.0) == (9.0, 0) and len(calls) == 2  # mended


def test_other_code_and_other_libraries_answer_anew(folder, monkeypatch):
    square, calls = counted()
    square(3.0)
    for change in ({"sha256": "another"}, {"scipy": "99"}):
        changed = {**cache.code(), **change}
        with monkeypatch.context() as patch:
            patch.setattr(cache, "code", lambda: changed)
            square.forget()
            assert square(3.0) == (9.0, 0)
    assert len(calls) == 3 and len(list(folder.iterdir())) == 3
    source = pathlib.Path(cache.__file__).parent
    assert {"game.py", "pairs.py", "calibration.py"} <= {file.name for file in source.glob("*.py")}


def test_notebooks_compute_anew(folder, monkeypatch):
    square, calls = counted()
    square(3.0)
    monkeypatch.setenv("DPCOMPANION_FILTERS", "anew")
    square.forget()
    (entry,) = folder.iterdir()
    entry.write_text(entry.read_text(encoding="utf-8").replace("9.0", "1.0"), encoding="utf-8")
    assert (
        square(3.0) == (9.0, 0) and len(calls) == 2 and "1.0" in entry.read_text(encoding="utf-8")
    )


def test_what_took_no_time_is_not_written_and_without_a_folder_all_is_computed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "here"))
    monkeypatch.delenv("DPCOMPANION_FILTERS", raising=False)
    quick, _ = counted(shortest=10.0)
    assert quick(3.0) == (9.0, 0) and not (tmp_path / "here").exists()
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "file"))
    square, calls = counted()
    assert square(3.0) == (9.0, 0)
    square.forget()
    assert square(3.0) == (9.0, 0) and calls == [3.0, 3.0]


def test_a_calibration_is_kept_with_its_promise_and_errors_are_not(folder, monkeypatch):
    # everything takes a second
    monkeypatch.setattr(cache.time, "process_time", itertools.count().__next__)
    forget_everything()
    first = calibrate_filter(**QUESTION)
    promised = float(
        ExactFilter(
            2,
            sample_rate=0.01,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            levels=[0.5, 1.0],
            costs=[1, 8],
            budget=16,
            steps=100,
        ).epsilon(1e-5)[0]
    )
    names = sorted(os.listdir(folder))
    assert [name.partition(".")[0] for name in names] == ["largest_budget", "least_epsilon"]
    forget_everything()
    monkeypatch.setattr(calibration, "worst_case", None)  # nothing is played again
    monkeypatch.setattr(calibration, "adaptive_delta", None)
    assert calibrate_filter(**QUESTION) == first
    assert calibration.epsilon_of_budget(1e-5, 0.01, 1.0, (0.5, 1.0), (1, 8), 16, 1) == promised
    with pytest.raises(ValueError, match="cannot be met"):
        calibrate_filter(**{**QUESTION, "target_epsilon": 1e-6})
    assert sorted(os.listdir(folder)) == names
