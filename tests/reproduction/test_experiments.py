import contextlib
import dataclasses
import json
import math
import re

import numpy as np
import pytest

from dpcompanion.reproduction import experiments, provenance, published, records

from ..refusals import refused, refuses

NAME = "individual-accounting/table-1"  # an exhibit to hang a test's own experiment on


@dataclasses.dataclass(frozen=True)
class Config:
    examples: int = 3
    seeds: tuple = (0, 1)


@dataclasses.dataclass(frozen=True)
class OneSeed:
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class BothSeeds(Config, OneSeed):
    pass


def work(config, run):
    digits = run.load("digits", split="test")
    done = run.pieces(
        lambda name: float(name.split("-")[1]), [f"seed-{seed}" for seed in config.seeds]
    )
    return {"mean": records.mean_and_sd(done.values()), "examples": len(digits)}, {
        "seeds": np.array(config.seeds)
    }


@pytest.fixture
def registered():
    with instead(work, quick=Config(), paper=Config(examples=30)):
        yield NAME


@contextlib.contextmanager
def instead(function, **options):
    """Another experiment under the test's name."""
    with experiments.set_aside(NAME):
        experiments.experiment(NAME, **options)(function)
        yield


def never(config, run):
    pytest.fail("it ran")


def test_what_a_test_registers_is_gone_afterwards_and_the_rest_is_as_before():
    names, criteria, figure = (
        experiments.names(),
        experiments.criteria(),
        "individual-accounting/figure-1",
    )
    assert NAME in names and experiments.criteria(figure)
    with (
        pytest.raises(InterruptedError),
        instead(never, quick=Config()),
        experiments.set_aside(figure),
    ):
        experiments.finding(figure, "anything")(lambda record: ())
        assert experiments.get(NAME).function is never and figure not in experiments.names()
        assert [one.text for one in experiments.criteria(figure)] == ["anything"]
        assert set(experiments.criteria()) - set(criteria) == set(experiments.criteria(figure))
        raise InterruptedError
    assert (experiments.names(), experiments.criteria()) == (names, criteria)
    assert experiments.get(NAME).function is not never
    with pytest.raises(ValueError, match="name"), experiments.set_aside("idp-sgd/table-55"):
        pass


def test_a_run_makes_a_record_with_its_provenance(registered, tmp_path):
    record = experiments.run(registered, preset="quick", out=tmp_path)
    assert record.values == {"mean": records.MeanSD(0.5, math.sqrt(0.5), 2), "examples": 359}
    assert record.config == {"examples": 3, "seeds": [0, 1]} and record.arrays[
        "seeds"
    ].tolist() == [0, 1]
    assert [entry["name"] for entry in record.data] == ["digits"] and len(
        record.data[0]["sha256"]
    ) == 64
    assert record.command == f"dpcompanion run {registered} --preset quick --device cpu"
    assert record.wall_time > 0 and record.device.startswith("cpu")
    arrays, fields = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert (
        re.fullmatch(r"table-1\.quick\.[0-9a-f]{16}\.npz", arrays)
        and fields == "table-1.quick.json"
    )
    assert records.find(registered, "quick", tmp_path).values == record.values


def test_a_record_names_the_commit_that_a_run_began_with_though_files_are_edited_meanwhile(
    monkeypatch,
):
    commits = ["before"]
    monkeypatch.setattr(provenance, "commit", lambda: commits[0])

    def edited(config, run):
        commits[:] = ["after+changes"]
        return {"one": 1}

    with instead(edited, quick=Config()):
        record = experiments.run(NAME, preset="quick")
    assert record.commit == "before" and commits == ["after+changes"]


def test_without_a_folder_nothing_is_written(registered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments.run(registered, preset="quick")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_is_continued_by_the_next_one(tmp_path):
    calls = []

    def broken(config, run):
        def piece(name):
            if name == "seed-1" and "stop" not in calls:
                calls.append("stop")
                raise KeyboardInterrupt
            calls.append(name)
            return 1.0

        return {"sum": sum(run.pieces(piece, ["seed-0", "seed-1"]).values())}

    with instead(broken, quick=Config()):
        with pytest.raises(KeyboardInterrupt):
            experiments.run(NAME, preset="quick", out=tmp_path)
        record = experiments.run(NAME, preset="quick", out=tmp_path)
    assert record.values == {"sum": 2.0} and calls == ["seed-0", "stop", "seed-1"]
    assert [each["pieces"] for each in record.kept] == [1]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["table-1.quick.json"]


def test_the_catalogue_knows_which_records_are_missing_stale_or_damaged(registered, tmp_path):
    def state():
        return next(
            entry for entry in experiments.catalogue(tmp_path) if entry.name == registered
        ).records

    assert state() == {"quick": "missing", "paper": "missing"}
    experiments.run(registered, preset="quick", out=tmp_path, seeds=[5])
    assert state() == {"quick": "fresh", "paper": "missing"}
    with instead(work, quick=Config(examples=4)):
        assert state() == {"quick": "stale"}
    with instead(work, quick=Config(), version=2):
        assert state() == {"quick": "stale"}
        experiments.run(registered, preset="quick", out=tmp_path)
        assert state() == {"quick": "fresh"}
    assert state() == {"quick": "stale", "paper": "missing"}
    records.path_of(registered, "paper", tmp_path).write_text("{", encoding="utf-8")
    assert state()["paper"] == "damaged"
    quick = records.write(records.make(registered, "quick", {}, config=Config()), tmp_path)
    quick.replace(records.path_of(registered, "paper", tmp_path))
    assert state() == {"quick": "missing", "paper": "damaged"}


def test_a_live_run_is_shown_beside_the_record_which_is_called_stale_when_it_is(
    registered, tmp_path
):
    live = experiments.run(registered, preset="quick")
    assert "recorded" not in repr(experiments.compare(live, folder=tmp_path, keys=["examples"]))
    experiments.run(registered, preset="paper", out=tmp_path)
    shown = repr(experiments.compare(live, folder=tmp_path, keys=["examples"]))
    assert "recorded" in shown and "stale" not in shown
    with instead(work, quick=Config(), paper=Config(examples=31)):
        assert "recorded (stale)" in repr(
            experiments.compare(live, folder=tmp_path, keys=["examples"])
        )


def test_seeds_are_replaced_and_named_in_the_command(registered):
    record = experiments.run(registered, preset="quick", seeds=[7, 8, 9])
    assert record.seeds == [7, 8, 9] and record.command.endswith("--seeds 7 8 9")
    assert record.values["mean"].n == 3


def test_bad_arguments_are_refused_by_name_before_any_work():
    with instead(never, quick=Config(), paper=Config()):
        refuses(
            experiments.run,
            {"name": NAME, "preset": "quick"},
            name=["idp-sgd/table-55"],
            preset=["full"],
            device=["abacus", "meta", "cuda:99"],
            out=[__file__, "/proc/results"],
            seeds=[[], [1, 1], [0.5], [-1]],
        )
    refuses(experiments.run, {"name": "idp-sgd/table-5"}, seeds=[[1]])  # where nothing is random
    refuses(experiments.run, {"name": "idp-sgd/table-8"}, preset=["quick"])  # which has none


def test_several_seeds_are_refused_before_any_work_where_one_is_used():
    def one(config, run):
        return {"the seed": config.seed}

    with instead(one, quick=OneSeed()):
        assert experiments.run(NAME, preset="quick").seeds == [0]
        record = experiments.run(NAME, preset="quick", seeds=[4])
        assert (
            record.values == {"the seed": 4}
            and record.seeds == [4]
            and record.command.endswith("--seeds 4")
        )
        assert not experiments.get(NAME).is_stale(record)
    several = pytest.raises(ValueError, match="seeds")
    with instead(never, quick=OneSeed()), several:
        experiments.run(NAME, preset="quick", seeds=[0, 1, 2])
    both = pytest.raises(ValueError, match="presets")
    with both, instead(one, quick=BothSeeds()):
        pass


def test_the_preset_comes_from_one_place(monkeypatch):
    monkeypatch.delenv("DPCOMPANION_PRESET", raising=False)
    assert experiments.default_preset() == "quick"
    monkeypatch.setenv("DPCOMPANION_PRESET", "paper")
    assert experiments.default_preset() == "paper"
    monkeypatch.setenv("DPCOMPANION_PRESET", "big")
    refused("DPCOMPANION_PRESET", experiments.default_preset)


def test_an_experiment_belongs_to_an_exhibit_and_has_a_frozen_configuration(registered):
    refuses(experiments.experiment, {"quick": Config()}, name=[registered, "idp-sgd/table-55"])
    for presets in ({"quick": {"examples": 3}}, {"large": Config()}):
        refused("presets", experiments.experiment, "idp-sgd/table-8", **presets)
    with experiments.set_aside(NAME):
        refuses(experiments.experiment, {"name": NAME, "quick": Config()}, version=[0, 1.5, "2"])


def test_every_registered_experiment_has_a_preset_and_one_without_a_quick_one_says_so():
    assert {"idp-sgd/table-5", "idp-sgd/table-7"} <= set(experiments.names())
    for name in experiments.names():
        assert 0 < len(experiments.get(name).presets) and set(experiments.get(name).presets) <= set(
            experiments.PRESETS
        )


def test_configurations_survive_json():
    for name in experiments.names():
        for preset, config in experiments.get(name).presets.items():
            made = records.make(
                name, preset, {}, config=config, made_with={"versions": {}, "commit": None}
            )
            assert not made.is_stale(config=config)
            json.dumps(made.config, allow_nan=False)
            assert published.exhibit(name)


def test_a_finding_is_judged_by_the_record_of_the_experiment_that_it_names(registered):
    def enough(record):
        yield "here", f"{record.values['examples']} examples", record.values["examples"] > 2

    record = experiments.run(NAME, preset="quick")
    with experiments.set_aside("individual-accounting/figure-2"):
        experiments.finding("individual-accounting/figure-2", "more than two examples", of=NAME)(
            enough
        )
        assert experiments.findings(record).rows == ()  # table 1 itself claims nothing
        found = experiments.findings(record, "individual-accounting/figure-2")
    assert [(row.where, row.outcome) for row in found.rows] == [
        ("here", "holds")
    ] and found.kinds == ("live",)
    refused("name", experiments.finding, "individual-accounting/figure-99", "anything")


@pytest.fixture
def without_criteria():
    exhibits = [f"individual-accounting/figure-{which}" for which in ("3", "1")]
    with experiments.set_aside(*exhibits):
        yield exhibits


def test_the_criteria_of_an_exhibit_are_asked_of_another_record_but_not_those_of_a_part(
    without_criteria,
):
    exhibit, figure = without_criteria
    part, other = f"{exhibit}-whole", f"{figure}-resnet20"
    refused("exhibit", experiments.ask_also, exhibit, of=part)

    @experiments.finding(exhibit, "it rises", kind="own")
    def rises(record):
        yield "here", "", True

    @experiments.finding(exhibit, "it falls", of=NAME)
    def falls(record):
        yield "here", "", False

    experiments.ask_also(exhibit, of=part)
    experiments.ask_also(exhibit, of=other, under=figure)
    asked = [(one.text, one.of, one.kind, one.judge) for one in experiments.criteria(exhibit)]
    assert asked == [
        ("it rises", exhibit, "own", rises),
        ("it falls", NAME, "claim", falls),
        ("it rises", part, "own", rises),
        ("it falls", part, "claim", falls),
    ]
    shown = experiments.criteria(figure)
    assert [(one.of, one.judge) for one in shown] == [(other, rises), (other, falls)]
    refused("name", experiments.ask_also, exhibit, of="individual-accounting/figure-99")
