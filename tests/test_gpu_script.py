"""The command for a GPU is cut off in time, and goes on where it stopped."""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile

import gpu
import pytest

from dpcompanion.reproduction import experiments, scoreboard

ROOT = pathlib.Path(__file__).resolve().parent.parent
SLEEP = "import time\ntry:\n    time.sleep(1e6)\nexcept KeyboardInterrupt:\n    "


@pytest.fixture
def time_up(monkeypatch, tmp_path_factory):
    """A file: the time of the calls is over once it is there, whatever the clock says."""
    file = tmp_path_factory.mktemp("clock") / "up"
    monkeypatch.setattr(gpu, "deadline", lambda minutes: file.exists)
    return file


@pytest.fixture
def run_tasks(monkeypatch, tmp_path, capsys):
    """A function that runs the script with the given tasks, {name: Python code}: (status, what it said)."""

    def call(tasks, *arguments):
        monkeypatch.setattr(
            gpu, "tasks", lambda options: {name: [sys.executable, "-c", code] for name, code in tasks.items()}
        )
        status = gpu.main(["--out", str(tmp_path), "--device", "cpu", *arguments])
        return status, capsys.readouterr().out

    return call


def test_what_is_cut_off_may_keep_what_it_has_and_is_done_by_the_next_call(run_tasks, tmp_path, time_up):
    kept = tmp_path / "kept"
    slow = f"open({str(time_up)!r}, 'w').close()\n{SLEEP}open({str(kept)!r}, 'w').close()"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a shell runs it in the background
    status, said = run_tasks({"first": "pass", "second": slow, "third": "pass"})
    signal.signal(signal.SIGINT, before)
    assert status == 3 and "left for the next call: second, third" in said and kept.exists()
    time_up.unlink()
    status, said = run_tasks({"first": "raise SystemExit(9)", "second": "pass", "third": "pass"})
    assert status == 0 and "first" not in said and "second: done" in said and "third: done" in said


def test_the_time_is_over_after_so_many_minutes_and_without_them_never():
    assert gpu.deadline(0)() and not gpu.deadline(1e9)() and not gpu.deadline(None)()


def test_what_fails_keeps_nothing_else_from_running_and_is_tried_again(run_tasks):
    status, said = run_tasks({"first": "raise SystemExit(9)", "second": "pass"})
    assert status == 1 and "first: failed (9)" in said and "second: done" in said
    assert run_tasks({"first": "pass", "second": "raise SystemExit(9)"})[0] == 0


@pytest.mark.slow
def test_the_records_are_those_that_the_book_says_remain_with_its_seeds_and_days_come_last(tmp_path, capsys):
    left = [how for one in scoreboard.exhibit_statuses() for how in (one.to_do, one.more_seeds) if how]
    commands = [command for _, how in left for command in how.split(" && ") if command.startswith("dpcompanion")]
    found = gpu.remaining()
    assert commands and {command.split()[2] for command in commands} == set(found)
    for command in commands:
        assert " --seeds " not in command or " ".join(found[command.split()[2]]) == command.partition(" --seeds ")[2]
    order = list(found)
    assert order.index("gradients-look-alike/figure-3") < order.index("idp-sgd/figure-2")
    assert gpu.main(["--list", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "to do: tests\n" in said and all(f"to do: {name}\n" in said for name in order)


PIECES = """
import time
from dpcompanion import data
from dpcompanion.reproduction import pieces

def work(name):
    state = pieces.unfinished()
    if name == "second" and not state.exists():
        state.write_bytes(b"an epoch")
        open({!r}, "w").close()
        time.sleep(1e6)
    print(name, "goes on" if state.exists() else "begins", flush=True)

pieces.resumable(work, ["first", "second"], folder=data.data_folder() / "runs" / "some", config=dict())
"""


@pytest.mark.slow
def test_on_another_machine_pieces_and_their_unfinished_states_are_taken_up(run_tasks, monkeypatch, tmp_path, time_up):
    folder, kept, work = tmp_path / "data", tmp_path / "carried" / "kept.tar", PIECES.format(str(time_up))
    monkeypatch.setenv("DPCOMPANION_DATA", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder.mkdir()
    (folder / "cifar10.npz").write_bytes(b"a data set")
    status, _ = run_tasks({"trial": work}, "--keep", str(kept))
    with tarfile.open(kept) as tar:
        names = sorted(re.sub(r"\.[0-9a-f]{12}\.", ".", name) for name in tar.getnames())
    assert status == 3
    assert names == [f"data/runs/some/{name}" for name in ("first.piece.json", "second.begun", "second.unfinished")]
    state = next(folder.rglob("*.unfinished"))
    written = state.stat().st_mtime
    shutil.rmtree(folder)
    time_up.unlink()
    assert run_tasks({"trial": work}, "--keep", str(kept))[0] == 0
    (piece,) = folder.rglob("second.piece.json")
    assert json.loads(piece.read_text())["made"]["earlier"] > 0 and not state.exists()
    with tarfile.open(kept) as tar:
        assert "data/runs/some/second.piece.json" in tar.getnames() and "out/done-cpu-paper.txt" in tar.getnames()
        assert not any("unfinished" in name for name in tar.getnames())
    assert list(kept.parent.iterdir()) == [kept] and written < piece.stat().st_mtime
    (tmp_path / "done-cpu-paper.txt").unlink()
    assert "trial: done" not in run_tasks({"trial": "raise SystemExit(9)"}, "--keep", str(kept))[1]


@pytest.mark.slow
def test_a_rehearsal_goes_on_from_the_file_with_the_pieces_beside_its_record(monkeypatch, tmp_path):
    name, out = "idp-sgd/table-13", tmp_path / "out"
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    common = [name, "--preset", "quick", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "dpcompanion", "run", *common, "--shard", "1/2"], cwd=ROOT, check=True)
    assert list(out.rglob("*.piece.json"))
    rehearsal = ["--device", "cpu", "--preset", "quick", "--out", str(out), "--keep", str(tmp_path / "kept.tar")]
    rehearsal += ["--records", name]
    assert gpu.main([*rehearsal, "--only", "nothing"]) == 0
    shutil.rmtree(out)
    assert gpu.main([*rehearsal, "--only", name]) == 0
    (taken,) = experiments.get(name).record("quick", out).kept
    assert taken["pieces"] == 2
    shutil.rmtree(out)
    assert gpu.main([*rehearsal, "--only", name]) == 0
    assert experiments.get(name).record("quick", out) is not None


def test_a_file_that_leads_out_of_its_folders_is_refused_and_what_is_there_stays(
    run_tasks, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "data"))
    kept, state = tmp_path / "kept.tar", tmp_path / "data" / "a.unfinished"
    state.parent.mkdir()
    state.write_bytes(b"new")

    def packed(**content):
        with tarfile.open(kept, "w") as tar:
            for name, text in content.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))

    packed(**{"data/a.unfinished": b"old", "data/b.unfinished": b"b"})
    run_tasks({}, "--keep", str(kept))
    assert state.read_bytes() == b"new" and state.with_name("b.unfinished").read_bytes() == b"b"
    for name in ("data/../../outside", "elsewhere/a", "/outside"):
        packed(**{"data/c.unfinished": b"c", name: b""})
        with pytest.raises(SystemExit):
            run_tasks({}, "--keep", str(kept))
        assert "cannot be read" in capsys.readouterr().err and not state.with_name("c.unfinished").exists()
    kept.write_bytes(b"no tar")
    with pytest.raises(SystemExit):
        run_tasks({}, "--keep", str(kept))
    assert kept.read_bytes() == b"no tar"


def test_a_call_that_is_ended_by_a_signal_keeps_what_it_has(run_tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "data"))
    ended = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_tasks({"first": "pass", "second": ended}, "--keep", str(tmp_path / "kept.tar"))
    with tarfile.open(tmp_path / "kept.tar") as tar:
        assert tar.getnames() == ["out/done-cpu-paper.txt"]


def test_the_checkouts_own_records_are_not_carried_about(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--keep", "kept.tar"])
    assert "--keep needs an --out of its own" in capsys.readouterr().err


def test_what_a_benchmark_prints_is_kept(run_tasks, tmp_path):
    assert run_tasks({"benchmarks.one": "print('a table')"})[0] == 0
    assert (tmp_path / "benchmarks.one.txt").read_text() == "a table\n"


def test_a_machine_without_a_gpu_is_told_so_and_marks_nothing_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "sees no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
