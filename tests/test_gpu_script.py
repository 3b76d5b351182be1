"""The command for a GPU is cut off in time, and goes on where it stopped."""

import os
import pathlib
import signal
import sys

import gpu
import pytest

from dpcompanion.reproduction import experiments, scoreboard

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def run_tasks(monkeypatch, tmp_path, capsys):
    """A function that runs the script with the given tasks, {name: Python code}: (status, what it
    said).
    """

    def call(tasks, *arguments):
        monkeypatch.setattr(
            gpu,
            "tasks",
            lambda options: {name: [sys.executable, "-c", code] for name, code in tasks.items()},
        )
        status = gpu.main(["--out", str(tmp_path), "--device", "cpu", *arguments])
        return status, capsys.readouterr().out

    return call


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
def test_what_is_cut_off_may_keep_what_it_has_and_is_done_by_the_next_call(
    run_tasks, tmp_path, capsys, sent
):
    kept = tmp_path / "kept"
    slow = (
        f"import os, signal, time\ntry:\n    os.kill({os.getpid()}, signal.{sent})\n    "
        "time.sleep(1e6)\n"
        f"except KeyboardInterrupt:\n    open({str(kept)!r}, 'w').close()"
    )
    # as where a shell runs it in the background
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        run_tasks({"first": "pass", "second": slow, "third": "pass"})
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN and kept.exists()
    capsys.readouterr()
    status, said = run_tasks({"first": "raise SystemExit(9)", "second": "pass", "third": "pass"})
    assert status == 0 and "first" not in said and "second: done" in said and "third: done" in said


def test_a_command_ends_with_its_time_and_none_begins_after_it(run_tasks, tmp_path):
    assert gpu.attempt([sys.executable, "-c", "import time; time.sleep(1e6)"], seconds=0) is None
    assert gpu.attempt([sys.executable, "-c", "raise SystemExit(9)"]) == 9
    status, said = run_tasks({"first": "pass", "second": "pass"}, "--minutes", "0")
    assert (
        status == 3
        and "left for the next call: first, second" in said
        and not list(tmp_path.iterdir())
    )


def test_what_fails_keeps_nothing_else_from_running_and_is_tried_again(run_tasks):
    status, said = run_tasks({"first": "raise SystemExit(9)", "second": "pass"})
    assert status == 1 and "first: failed (9)" in said and "second: done" in said
    assert run_tasks({"first": "pass", "second": "raise SystemExit(9)"})[0] == 0


@pytest.mark.slow
def test_the_records_are_those_that_the_book_says_remain_with_its_seeds_and_days_come_last(
    tmp_path, capsys
):
    left = [
        how for one in scoreboard.exhibit_statuses() for how in (one.to_do, one.more_seeds) if how
    ]
    commands = [
        command
        for _, how in left
        for command in how.split(" && ")
        if command.startswith("dpcompanion")
    ]
    found = gpu.remaining()
    assert commands and {command.split()[2] for command in commands} == set(found)
    for command in commands:
        assert (
            " --seeds " not in command
            or " ".join(found[command.split()[2]]) == command.partition(" --seeds ")[2]
        )
    order = list(found)
    assert order.index("gradients-look-alike/figure-2") < order.index("idp-sgd/figure-2")
    assert gpu.main(["--list", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "to do: tests\n" in said and all(f"to do: {name}\n" in said for name in order)


@pytest.mark.slow
def test_a_rehearsal_makes_a_record_once(monkeypatch, tmp_path, capsys):
    name, out = "idp-sgd/table-13", tmp_path / "out"
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    rehearsal = ["--device", "cpu", "--preset", "quick", "--out", str(out), name]
    assert gpu.main(rehearsal) == 0 and f"{name}: done" in capsys.readouterr().out
    assert experiments.get(name).record("quick", out) is not None
    assert gpu.main(rehearsal) == 0 and f"{name}: done" not in capsys.readouterr().out


def test_what_a_benchmark_prints_is_kept(run_tasks, tmp_path):
    assert run_tasks({"benchmarks.one": "print('a table')"})[0] == 0
    assert (tmp_path / "benchmarks.one.txt").read_text() == "a table\n"


def test_a_machine_without_a_gpu_is_told_so_and_marks_nothing_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "sees no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
