"""Pieces done by processes, by Dask and Ray, and by runs that share a folder; workers are killed in
each.
"""

import contextlib
import itertools
import os
import pathlib
import signal

import joblib
import pytest

from dpcompanion import cli
from dpcompanion.reproduction import pieces, workers

NAMES = [f"seed-{number}" for number in range(6)]


def noting(folder, killed=(), times=1):
    """Work that leaves a file for each start, and whose process is killed at some pieces, the first
    `times` times.
    """

    def work(name):
        starts = len(list(folder.glob(f"{name}.start.*")))
        (folder / f"{name}.start.{starts}.{os.getpid()}").touch()
        if name in killed and starts < times:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seed": int(name[-1]), "square": int(name[-1]) ** 2}

    return work


def starts(folder):
    """How often each piece was started, and by which processes."""
    found = [path.name.split(".") for path in folder.glob("*.start.*")]
    return {name: sum(each[0] == name for each in found) for name in NAMES}, {
        int(each[3]) for each in found
    }


def resumable(work, folder, names=NAMES):
    return pieces.resumable(work, names, folder=folder / "pieces", config={})


EXPECTED = {name: {"seed": number, "square": number**2} for number, name in enumerate(NAMES)}


@contextlib.contextmanager
def dask():
    """A real cluster of Dask on this machine, of two processes."""
    distributed = pytest.importorskip("distributed", reason="pip install 'dpcompanion[cluster]'")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        with distributed.Client(cluster), joblib.parallel_config("dask"):
            yield


@contextlib.contextmanager
def ray():
    """A real cluster of Ray on this machine, of two processes."""
    ray = pytest.importorskip("ray", reason="pip install 'dpcompanion[cluster]'")
    from ray.util.joblib import register_ray

    register_ray()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with joblib.parallel_config("ray", n_jobs=2):
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def loky():
    """Joblib's own processes."""
    with joblib.parallel_config("loky", n_jobs=2):
        yield


def own():
    """Our own processes, as of `--jobs 2`."""
    return workers.processes(2)


@pytest.mark.parametrize("cluster", [own, loky, dask, ray])
@pytest.mark.slow
def test_a_worker_that_is_killed_costs_the_piece_that_it_was_at(cluster, tmp_path):
    with cluster():
        done = resumable(noting(tmp_path, killed=("seed-1",)), tmp_path)
    assert done == EXPECTED and list(done) == NAMES
    counts, processes = starts(tmp_path)
    assert counts["seed-1"] == 2 and os.getpid() not in processes and len(processes) >= 2
    # A pool of joblib, and Ray's, ends with its first lost worker, so that the other worker's piece
    # starts again, too.
    assert sum(counts.values()) - len(NAMES) <= (1 if cluster is own else 2)
    # What is on the disk is whole, and is not done again, whoever asks.
    assert resumable(noting(tmp_path, killed=NAMES), tmp_path) == EXPECTED


@pytest.mark.slow
def test_a_piece_that_kills_every_worker_is_given_up(tmp_path):
    with own(), pytest.raises(RuntimeError, match="seed-2"):
        list(workers.each(noting(tmp_path, killed=("seed-2",), times=99), ["seed-2"]))
    assert starts(tmp_path)[0]["seed-2"] == 3


@pytest.mark.slow
def test_a_mistake_in_a_piece_is_raised_when_the_others_are_done(tmp_path):
    def work(name):
        return 1 / int(name[-1])

    found = workers.each(work, NAMES[:3])
    with own(), pytest.raises(ZeroDivisionError):
        assert dict(next(found) for _ in range(2)) == {"seed-1": 1, "seed-2": 1 / 2}
        next(found)


@pytest.mark.slow
def test_pieces_within_a_piece_are_done_in_its_own_process(tmp_path):
    def work(name):
        inner = resumable(lambda part: os.getpid(), tmp_path / name, ["a", "b"])
        return [os.getpid(), *inner.values()]

    with workers.processes(2):
        assert all(len(set(found)) == 1 for found in resumable(work, tmp_path, NAMES[:2]).values())


def test_without_a_back_end_all_is_done_here(tmp_path):
    resumable(noting(tmp_path), tmp_path)
    assert starts(tmp_path)[1] == {os.getpid()}


def test_a_piece_that_no_worker_left_in_the_folder_says_that_it_must_be_shared(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        workers, "each", lambda work, names, already: ((name, None) for name in names)
    )
    # a minute and more at each look
    monkeypatch.setattr(pieces.time, "monotonic", itertools.count(step=100).__next__)
    monkeypatch.setattr(pieces.time, "sleep", lambda seconds: None)
    with pytest.raises(RuntimeError, match="workers"):
        resumable(noting(tmp_path), tmp_path)


def test_shares_do_each_piece_once_and_who_merges_does_none(tmp_path):
    for which in (1, 2):
        with workers.share(which, 3), pytest.raises(workers.Missing):
            resumable(noting(tmp_path), tmp_path)
    with workers.share(0, 1), pytest.raises(workers.Missing, match="seed-2, seed-5") as missing:
        resumable(noting(tmp_path), tmp_path)
    assert missing.value.names == ("seed-2", "seed-5")
    with workers.share(3, 3):
        assert resumable(noting(tmp_path), tmp_path) == EXPECTED
    with workers.share(0, 1):
        assert resumable(noting(tmp_path), tmp_path) == EXPECTED
    assert set(starts(tmp_path)[0].values()) == {1}


def test_what_another_run_does_meanwhile_is_taken_over(tmp_path):
    def other():
        with workers.share(1, 2), contextlib.suppress(workers.Missing):
            resumable(noting(tmp_path), tmp_path)

    def work(name):
        if name == "seed-5":
            other()
        return noting(tmp_path)(name)

    with workers.share(2, 2):
        assert resumable(work, tmp_path) == EXPECTED


def test_a_share_that_there_is_not_is_refused(capsys):
    for which, of in ((4, 3), (-1, 3), (1, 0), (1.5, 2)):
        with pytest.raises(ValueError, match="which|of"), workers.share(which, of):
            pass
    for shard in ("0/3", "4/3", "2", "a/b", "1/0"):
        with pytest.raises(SystemExit):
            cli.main(["run", "idp-sgd/table-8", "--shard", shard])
        assert "2/5" in capsys.readouterr().err


@pytest.fixture
def table():
    """An experiment of four short pieces, under the name of table 8, as (its name, what was
    done).
    """
    from dpcompanion.reproduction import experiments

    found, done = experiments.get("idp-sgd/table-8"), []

    def function(config, run):
        def work(name):
            done.append(name)
            return float(name[-1])

        return {f"mnist.A.{name}": value for name, value in run.pieces(work, NAMES[:4]).items()}

    with experiments.set_aside(found.name):
        experiments.experiment(found.name, **found.presets)(function)
        yield found.name, done


def test_the_command_line_shards_and_merges(capsys, tmp_path, table):
    name, done = table

    def said(command, *options, status=0):
        assert (
            cli.main([command, name, "--preset", "paper", "--out", str(tmp_path), *options])
            == status
        )
        return capsys.readouterr()

    assert "the share 1/3 is done; 2 pieces" in said("run", "--shard", "1/3").out
    assert "seed-1, seed-2" in said("merge", status=2).err and not list(
        tmp_path.rglob("*.paper.json")
    )
    assert "the share 3/3 is done; 1 pieces" in said("run", "--shard", "3/3").out
    assert "the record" in said("run", "--shard", "2/3").out
    assert sorted(done) == NAMES[:4] and list(tmp_path.rglob("table-8.paper.json"))
    assert not list(tmp_path.rglob("*.piece.json"))


def test_what_was_not_done_in_pieces_is_not_merged(capsys, tmp_path):
    from dpcompanion.reproduction import experiments

    found = experiments.get("idp-sgd/table-5")
    with experiments.set_aside(found.name):
        experiments.experiment(found.name, **found.presets)(lambda config, run: {"sigma": 1.0})
        options = ["--preset", "paper", "--out", str(tmp_path)]
        assert cli.main(["merge", found.name, *options]) == 2
        assert "done in pieces" in capsys.readouterr().err and not list(tmp_path.rglob("*.json"))
        assert cli.main(["run", found.name, *options]) == 0
    assert list(tmp_path.rglob("table-5.paper.json"))


def test_the_command_line_merges_what_shards_have_done(capsys, tmp_path, table):
    for which in (1, 2):
        with contextlib.suppress(workers.Missing), workers.share(which, 2):
            from dpcompanion.reproduction import experiments

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(experiments.records, "write", lambda *a: None)
                patch.setattr(pieces, "discard", lambda folder: None)
                experiments.run(table[0], preset="paper", out=tmp_path)
    assert cli.main(["merge", table[0], "--preset", "paper", "--out", str(tmp_path)]) == 0
    assert sorted(table[1]) == NAMES[:4] and list(
        pathlib.Path(tmp_path).rglob("table-8.paper.json")
    )
