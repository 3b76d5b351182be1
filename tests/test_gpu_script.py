"""The command for a GPU is cut off in time, and goes on where it stopped."""

import importlib.util
import pathlib
import signal
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("gpu_script", ROOT / "tools" / "gpu.py")
gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu)


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """A function that runs the script with the given tasks, {name: Python code}: (status, what it said)."""

    def call(tasks, *arguments):
        monkeypatch.setattr(
            gpu, "tasks", lambda options: {name: [sys.executable, "-c", code] for name, code in tasks.items()}
        )
        status = gpu.main(["--out", str(tmp_path), "--device", "cpu", *arguments])
        return status, capsys.readouterr().out

    return call


def test_what_is_cut_off_may_keep_what_it_has_and_is_done_by_the_next_call(told, tmp_path):
    kept = tmp_path / "kept"
    slow = f"import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: open({str(kept)!r}, 'w').close()"
    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a shell runs it in the background
    status, said = told({"first": "pass", "second": slow, "third": "pass"}, "--minutes", "0.6")
    signal.signal(signal.SIGINT, before)
    assert status == 3 and "left for the next call: second, third" in said
    assert kept.exists() and time.monotonic() - started < 90
    status, said = told({"first": "raise SystemExit(9)", "second": "pass", "third": "pass"})
    assert status == 0 and "done: first" in said and "second: done" in said and "third: done" in said


def test_what_fails_keeps_nothing_else_from_running_and_is_tried_again(told):
    status, said = told({"first": "raise SystemExit(9)", "second": "pass"})
    assert status == 1 and "failed: first" in said and "second: done" in said
    assert told({"first": "pass", "second": "raise SystemExit(9)"})[0] == 0


def test_the_list_is_of_records_that_there_are(tmp_path, monkeypatch, capsys):
    assert gpu.main(["--list", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"to do: {name}\n" in said for name in gpu.RECORDS)


def test_a_benchmark_that_was_cut_off_comes_last_and_what_it_prints_is_kept(told, tmp_path):
    slow = "print('a row', flush=True)\nimport time\ntime.sleep(600)"
    status, said = told({"benchmarks.one": slow, "record": "pass"}, "--minutes", "0.3")
    assert status == 3 and "left for the next call: benchmarks.one, record" in said and "a row" in said
    quick = "print('a table')"
    status, said = told({"benchmarks.one": quick, "record": "pass"})
    assert status == 0 and said.index("record: done") < said.index("benchmarks.one: done") and "a table" in said
    assert (tmp_path / "benchmarks.one.txt").read_text() == "a table\n"


def test_a_machine_without_a_gpu_is_told_so_and_marks_nothing_done(told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "scipy" else object())
    with pytest.raises(SystemExit):
        told({"tests": "pass"})
    assert "has no scipy" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "sees no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
