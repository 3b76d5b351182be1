import dataclasses
import shutil

import numpy as np
import pytest
import torch

from dpcompanion.reproduction import pieces, runs


@dataclasses.dataclass(frozen=True)
class Config:
    examples: int = 3
    seeds: tuple = (0, 1)


@dataclasses.dataclass(frozen=True)
class OneSeed:
    seed: int = 0


@pytest.mark.parametrize(
    "name, shared",
    [
        ("seed-{}", ["seed-0", "seed-1", "seed-2"]),
        ("part-{}", ["part-0", "part-1", "part-1", "part-2"]),
    ],
)
def test_other_seeds_share_pieces_only_where_their_names_tell_the_seed(tmp_path, name, shared):
    calls = []
    for seeds in [(0, 1), (1, 2)]:
        run = runs.Run(Config(seeds=seeds), torch.device("cpu"), tmp_path)
        run.pieces(calls.append, (name.format(seed) for seed in seeds))
        # the same seeds have nothing left to do
        run.pieces(calls.append, (name.format(seed) for seed in seeds))
    assert calls == shared
    runs.Run(Config(seeds=seeds), torch.device("cpu"), tmp_path, version=2).pieces(
        calls.append, shared[:1]
    )
    assert calls == [*shared, shared[0]]


def test_pieces_of_an_unfinished_run_that_the_checkout_carries_are_taken_over(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runs.records, "results_folder", lambda: tmp_path / "results")
    calls = []

    def work(name):
        calls.append(name)
        return {"of": name}

    carried = tmp_path / "results" / "begun" / "paper" / "table-1.paper.parts"
    runs.Run(Config(), torch.device("cpu"), carried).pieces(work, ["seed-0"])
    run = runs.Run(
        Config(), torch.device("cpu"), tmp_path / "out" / "paper" / ".table-1.paper.parts"
    )
    assert run.pieces(work, ["seed-0", "seed-1"]) == {
        name: {"of": name} for name in ("seed-0", "seed-1")
    }
    assert calls == ["seed-0", "seed-1"]


def keeping(run, names, calls, **options):
    return run.keep(
        lambda name: calls.append(name) or {"of": name},
        names,
        under="runs/some",
        **{"config": {"task": OneSeed()}, "seconds": 1, **options},
    )


def test_short_runs_are_cached_in_the_process_and_shared_by_exhibits(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    runs.forget()
    first, other = (runs.Run(config, torch.device("cpu"), None) for config in (Config(), OneSeed()))
    calls = []
    assert keeping(first, ["seed-0", "seed-1"], calls) == {
        name: {"of": name} for name in ("seed-0", "seed-1")
    }
    keeping(other, ["seed-1", "seed-2"], calls)
    assert calls == ["seed-0", "seed-1", "seed-2"] and not list(tmp_path.iterdir())
    keeping(first, ["seed-0"], calls, config={"task": OneSeed(seed=1)})
    keeping(runs.Run(Config(), torch.device("meta"), None), ["seed-0"], calls)
    keeping(first, ["seed-0"], calls, version=2)
    assert calls[3:] == ["seed-0"] * 3
    runs.forget()


def test_what_a_checkout_carries_of_a_run_is_not_done_again(tmp_path, monkeypatch):
    checkout, mine, other = (tmp_path / name for name in ("results", "mine", "other"))
    monkeypatch.setattr(runs.records, "results_folder", lambda: checkout)
    run, calls, long = runs.Run(Config(), torch.device("cpu"), None), [], {"seconds": runs.KEPT}

    def work(name):
        calls.append(name)
        return {"of": name}, {"array": np.arange(3)}

    def kept(names):
        return run.keep(work, names, config={}, under="runs/some", **long)

    monkeypatch.setenv("DPCOMPANION_DATA", str(mine))
    first = kept(["a"])["a"]
    shutil.copytree(mine / "runs", checkout / "begun" / "runs")
    monkeypatch.setenv("DPCOMPANION_DATA", str(other))
    both = kept(["a", "b"])
    assert (
        calls == ["a", "b"]
        and both["a"][0] == first[0]
        and np.array_equal(both["a"][1]["array"], np.arange(3))
    )
    # One that is damaged is done again.
    (piece,) = checkout.glob("begun/runs/*/a.piece.json")
    piece.write_text(
        piece.read_text(encoding="utf-8").replace('"of": "a"', '"of": "x"'), encoding="utf-8"
    )
    shutil.rmtree(other)
    assert kept(["a"])["a"][0] == {"of": "a"} and calls == ["a", "b", "a"]


def test_what_takes_long_is_kept_on_the_disk_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    run, calls = runs.Run(Config(), torch.device("cpu"), None), []

    def broken(name):
        if name == "b" and "stop" not in calls:
            calls.append("stop")
            raise KeyboardInterrupt
        calls.append(name)
        return {"of": name}, {"array": np.arange(3)}

    long = {"config": {}, "seconds": runs.KEPT, "under": "runs/some"}
    with pytest.raises(KeyboardInterrupt):
        run.keep(broken, ["a", "b"], **long)
    with pieces.taken_over() as kept:
        done = run.keep(broken, ["a", "b"], **long)
    assert calls == ["a", "stop", "b"] and done["a"][1]["array"].tolist() == [0, 1, 2]
    assert [each["pieces"] for each in kept] == [1]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("some-")
