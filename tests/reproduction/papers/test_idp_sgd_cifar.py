import dataclasses

import pytest
import torch

from dpcompanion.reproduction import experiments, published, records, runs, scoreboard
from dpcompanion.reproduction.papers.idp_sgd import cifar
from dpcompanion.reproduction.papers.idp_sgd.settings import Training
from dpcompanion.reproduction.papers.idp_sgd.training import GROUPS, Task, trial

TINY = Task("mnist-5k", "softmax", Training(4000, 400, 2, 1.0), 2.0)
CONFIG = cifar.Cifar(
    TINY, ("dpsgd", "B.sample"), seeds=(0,), look=1, group_look=1, precision=None, together=512
)


def run_of(folder, config=CONFIG):
    return experiments.Run(config, torch.device("cpu"), folder)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """All pieces on the disk, however short they are."""
    monkeypatch.setattr(runs, "KEPT", 0)
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ["dpsgd", "loosest", "A.scale", "B.sample"])
def test_a_trial_is_the_one_of_table_2(tmp_path, kind):
    ours, theirs = (
        function(tmp_path)
        for function in (
            lambda folder: cifar.kept_trial(CONFIG, TINY, kind, 3, run_of(folder)),
            lambda folder: trial(CONFIG, kind, 3, run_of(folder)),
        )
    )
    assert records.plain(ours) == records.plain(theirs)


def test_a_trial_that_was_cut_off_goes_on_from_its_last_epoch_and_ends_the_same(kept, monkeypatch):
    whole, real, calls = cifar.kept_trials(CONFIG, run_of(kept)), cifar.predictions, []
    (each,) = kept.glob("trials/*")
    for piece in each.glob("*.piece.json"):
        piece.unlink()

    def cut(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(cifar, "predictions", cut)
    with pytest.raises(KeyboardInterrupt):
        cifar.kept_trials(CONFIG, run_of(kept))
    assert [path.name.partition(".")[0] for path in each.glob("*.unfinished")] == ["dpsgd"]
    calls.clear()
    calls += [None] * 3
    assert cifar.kept_trials(CONFIG, run_of(kept)) == whole
    # One epoch of the first trial and two of the second, each looked at twice, and both looked at
    # in the end.
    assert len(calls) == 3 + 2 + 4 + 2
    assert not list(each.glob("*.unfinished"))


def test_dpsgd_is_trained_once_for_both_tables_and_a_tuned_method_for_its_own(kept, monkeypatch):
    monkeypatch.setattr(
        cifar,
        "tuned",
        lambda task, kind: (
            dataclasses.replace(task, learning_rate=1.0) if kind == "B.sample" else task
        ),
    )
    same = cifar.kept_trials(CONFIG, run_of(kept))
    tuned = cifar.kept_trials(dataclasses.replace(CONFIG, tuned=True), run_of(kept))
    assert same["dpsgd"] == tuned["dpsgd"] and same["B.sample"] != tuned["B.sample"]
    assert sorted(path.name for path in kept.glob("trials/*/*.piece.json")) == [
        "B.sample.seed-0.piece.json",
        "B.sample.tuned.seed-0.piece.json",
        "dpsgd.seed-0.piece.json",
    ]


def test_the_configurations_have_every_kind_that_the_tables_print_and_the_papers_epochs():
    for table, parts, epochs in (
        ("table-8", ("table-8-cifar10-a", "table-8-cifar10-b"), {30}),
        ("table-2", ("table-2-cifar10-a", "table-2-cifar10-b"), {30, 60, 70}),
    ):
        configs = [experiments.get(f"idp-sgd/{part}").presets["paper"] for part in parts]
        whole = [part.name for part in published.parts(f"idp-sgd/{table}") if not part.shortened]
        assert whole == [f"idp-sgd/{part}" for part in parts]
        kinds = [kind for config in configs for kind in config.kinds]
        assert {f"{setup}.{method}" for setup in GROUPS for method in ("sample", "scale")} < {
            *kinds
        }
        assert all(config.kinds[0] == "dpsgd" for config in configs)
        tasks = [
            cifar.tuned(config.task, kind) if config.tuned else config.task
            for config in configs
            for kind in config.kinds
        ]
        assert {task.training.epochs for task in tasks} == epochs


def test_a_part_counts_in_its_exhibit_and_is_no_longer_left_to_run(tmp_path):
    mnist = {
        key: value
        for key, value in published.exhibit("idp-sgd/table-8").flat().items()
        if key[:5] == "mnist"
    }
    records.write(
        records.make(
            "idp-sgd/table-8",
            "paper",
            {**mnist, "not_run": ["svhn", "cifar10"]},
            config={"kinds": []},
            data=[{"name": "mnist"}],
        ),
        tmp_path,
    )
    before = scoreboard.exhibit_status("idp-sgd/table-8", folder=tmp_path)
    assert (
        before.verdicts == "6 match, 6 not run, 6 out of reach"
        and "table-8-cifar10-a" in before.to_do[1]
    )
    printed = published.exhibit("idp-sgd/table-8").flat()

    def land(part, setups, kinds):
        values = {key: value for key, value in printed.items() if key.startswith(setups)}
        values |= {f"{kind}.final": [50.0 + 5 * (kind != "dpsgd")] * 3 for kind in kinds}
        made = records.make(
            f"idp-sgd/{part}", "paper", values, config={"kinds": kinds}, data=[{"name": "cifar10"}]
        )
        records.write(made, tmp_path)
        return scoreboard.exhibit_status("idp-sgd/table-8", folder=tmp_path)

    half = land("table-8-cifar10-a", ("cifar10.A", "cifar10.B.dpsgd"), ["dpsgd", "A.sample"])
    assert (
        half.verdicts == "10 match, 1 holds, 2 not run, 6 out of reach" and half.state == "in part"
    )
    assert half.to_do == (
        "svhn, Table 8 on CIFAR-10, budgets B; one core, about ten hours",
        "dpcompanion run idp-sgd/table-8-cifar10-b --preset paper && dpcompanion run "
        "idp-sgd/table-8 --preset paper --device cuda",
    )
    after = land("table-8-cifar10-b", ("cifar10.B",), ["dpsgd", "B.sample"])
    assert after.verdicts == "12 match, 2 hold, 6 out of reach" and after.state == "in part"
    assert after.to_do == ("svhn", "dpcompanion run idp-sgd/table-8 --preset paper --device cuda")
    assert len(dict(scoreboard.compared([after]))["Table 8: " + after.exhibit.title].rows) == 18


def test_precisions_share_everything_else_and_a_loss_of_accuracy_is_found(tmp_path):
    alike = cifar.Precisions(
        dataclasses.replace(CONFIG, kinds=("same",)), {"float32": None, "bfloat16": None}
    )
    values = cifar.table_8_precision(alike, run_of(tmp_path, alike))
    assert values["float32.accuracy"] == values["bfloat16.accuracy"]
    assert values["float32.final"] == [values["float32.accuracy"][0][-1]]

    def outcome(*half):
        values = {"float32.final": [40.0, 41.0, 42.0], "bfloat16.final": [*half]}
        made = records.make("idp-sgd/table-8-precision", "paper", values, config={})
        (found,) = experiments.findings(made, "idp-sgd/table-8").rows
        assert found.kind == "own"
        return found.outcome

    assert outcome(39.8, 41.1, 41.9) == "holds"
    assert outcome(37.0, 38.1, 39.0) == "fails"
    assert outcome(39.0, 41.0, 41.0) == "undecided"


@pytest.mark.parametrize(
    "lower, said", [(-25.0, "holds"), (0.0, "undecided"), (25.0, "fails")], ids=str
)
def test_figure_5_is_judged_by_all_records_of_single_classes(tmp_path, lower, said):
    def write(exhibit, task="cifar10", **values):
        values = {key.replace("__", "."): records.mean_and_sd([one]) for key, one in values.items()}
        records.write(records.make(exhibit, "paper", values, config={"task": task}), tmp_path)

    same, everyone = "idp-sgd/table-10-classes", range(10)
    write(
        same,
        **{
            f"class_{c}__{whose}__same": 40.0 + c for c in everyone for whose in ("class", "others")
        },
    )

    def rows():
        found = experiments.findings(records.find(same, "paper", tmp_path), "idp-sgd/figures-5-6")
        return [(row.where, row.ours, row.outcome) for row in found.rows]

    assert rows() == []
    for c in everyone:
        moved = {"higher": 52.0 + c + c % 3, "lower": 40.0 + c + lower + c % 2 - 0.5}
        write(
            f"idp-sgd/table-10-class-{c}",
            **{
                f"class_{c}__{whose}__{level}": accuracy
                for level, accuracy in moved.items()
                for whose in ("class", "others")
            },
        )
    assert rows()[0] == ("CIFAR-10, higher", "+12.9 points, 10 of 10", "holds")
    assert rows()[1][::2] == ("CIFAR-10, lower", said)
    write("idp-sgd/table-10-class-7", task="mnist", **{"class_7__class__higher": 0.0})
    assert rows()[0][1] == "+12.9 points, 9 of 9", "of another task"


def test_classes_with_other_budgets_are_compared_with_the_same_budget_for_all(tmp_path):
    same, spread = (
        "idp-sgd/table-10-classes",
        [0.1, -0.2, 0.3, -0.1, 0.0, 0.2, -0.3, 0.1, 0.0, -0.1],
    )

    def write(c, task="cifar10", **levels):
        """What class c and the others have at each level."""
        values = {
            f"class_{c}.{whose}.{level}": records.mean_and_sd([accuracy])
            for level, pair in levels.items()
            for whose, accuracy in zip(("class", "others"), pair)
        }
        name = f"idp-sgd/table-10-class-{c}"
        records.write(records.make(name, "paper", values, config={"task": task}), tmp_path)

    def outcomes():
        found = experiments.findings(records.find(same, "paper", tmp_path), "idp-sgd/table-10")
        return [(row.where, row.ours, row.outcome) for row in found.rows]

    values = {
        f"class_{c}.{whose}.same": records.mean_and_sd([at])
        for c in range(10)
        for whose, at in (("class", 50.0), ("others", 54.0))
    }
    records.write(records.make(same, "paper", values, config={"task": "cifar10"}), tmp_path)
    assert outcomes() == []
    write(0, higher=(60.0, 53.0), lower=(20.0, 56.0))
    assert [row[-1] for row in outcomes()] == ["undecided", "undecided"], "one class"
    for c, off in enumerate(spread):
        write(c, higher=(60.0 + off, 53.0 + off), lower=(20.0 + off, 54.2 + off))
    assert outcomes() == [
        (
            "CIFAR-10, higher, 10 classes",
            "+10.0 (+9.9 to +10.1) points, the others -1.0 (-1.4 to -0.6)",
            "holds",
        ),
        # The one run that all are compared with may be off by as much as they gain.
        (
            "CIFAR-10, lower, 10 classes",
            "-30.0 (-30.1 to -29.9) points, the others +0.2 (-0.2 to +0.6)",
            "undecided",
        ),
    ]
    write(3, task="mnist", higher=(0.0, 0.0), lower=(0.0, 0.0))
    assert outcomes()[0][0] == "CIFAR-10, higher, 9 classes", "of another task"
