"""Configurations of the paper's own networks, on networks and data that are small."""

import dataclasses
import pathlib

import numpy as np
import pytest
import torch

from dpcompanion.per_instance import holder_order
from dpcompanion.reproduction import experiments, published, records, scoreboard
from dpcompanion.reproduction.papers import gradients_look_alike, individual_accounting, yu
from dpcompanion.reproduction.papers.per_instance_accounting import against_print, resnets, runs
from dpcompanion.reproduction.runs import forget

TINY = resnets.Resnet("mnist-5k", 400, 1, None, reference=0, looks=1, model="linear")


def test_a_setting_that_names_a_network_trains_it_and_one_that_does_not_trains_the_small_one(
    monkeypatch,
):
    asked = []

    def build(model, found, seed):
        asked.append(model)
        raise RuntimeError

    monkeypatch.setattr(yu, "build", build)
    for setting in (runs.DIGITS, resnets.Resnet()):
        with pytest.raises(RuntimeError):
            runs.run_setting(setting, 0, torch.device("cpu"))
    assert asked == ["mlp", "resnet20"]


def test_shares_and_distributions_are_of_each_setting():
    config = resnets.Several({"one": TINY, "two": dataclasses.replace(TINY, median_multiple=0.1)})
    run = experiments.Run(config, torch.device("cpu"), pathlib.Path("nowhere"))
    shares, (values, arrays) = (
        resnets.text_worst_case_share(config, run),
        resnets.figure_4(config, run),
    )
    assert 0 <= shares["one"] < shares["two"] <= 1 and arrays.keys() == {"one", "two"}
    assert all(
        0 < values[f"{name}.min"] <= values[f"{name}.max"] <= values[f"{name}.worst_case"]
        for name in arrays
    )


def test_steps_and_noise_are_those_of_appendix_b():
    for setting, name, sizes in (
        (resnets.CIFAR10, "cifar10", 50_000),
        (resnets.MNIST_RESNET, "mnist", 60_000),
        (resnets.UTKFACE_AGE, "utkface", 15_000),
    ):
        rate, noise, steps = runs.SETTINGS[name]
        plan = runs.make_plan(setting, sizes, 1.0)
        assert plan.sample_rate == rate and plan.noise_multiplier == noise
        assert abs(plan.steps - steps) <= plan.steps_per_epoch // 2


def test_mnist_has_the_second_versions_optimizer_whose_gradients_are_not_in_units_of_c():
    assert resnets.MNIST_RESNET.model == "resnet20" and resnets.MNIST_RESNET.refreshes == 0
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, schedule = resnets.MNIST_RESNET.optimizer([weight], 4.0, 100)
    [group] = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 1e-3)
    task = individual_accounting.MNIST
    assert task.cosine and not task.normalised
    assert (task.learning_rate, task.momentum, task.weight_decay) == (0.1, 0.9, 1e-3)
    rates = []
    for _ in range(100):
        optimizer.step()
        schedule.step()
        rates.append(group["lr"])
    assert rates[49] == pytest.approx(0.05) and rates[99] == pytest.approx(0, abs=1e-12)
    plain, none = resnets.CIFAR10.optimizer([weight], 4.0, 100)
    assert none is None and plain.param_groups[0]["lr"] == 0.5


def test_a_run_with_a_schedule_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    setting = resnets.WithMomentum(model="mlp", batch_size=1000, epochs=4, looks=4, reference=20)
    run = experiments.Run(setting, torch.device("cpu"), tmp_path)
    monkeypatch.setattr("dpcompanion.reproduction.runs.KEPT", 0)
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "whole"))
    whole = runs.trained(setting, 0, run)
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "in two"))
    step, steps = torch.optim.lr_scheduler.CosineAnnealingLR.step, []

    def cut_off(self, *arguments):
        steps.append(len(steps))
        if len(steps) == 11:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.lr_scheduler.CosineAnnealingLR, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        runs.trained(setting, 0, run)
    again = runs.trained(setting, 0, run)
    assert (again.epsilon == whole.epsilon).all() and again.accuracy == whole.accuracy
    assert len(steps) < 11 + whole.plan.steps


def test_on_mnist_resnet20_is_trained_as_the_paper_trains_it_and_measured_less_often():
    ours, papers = individual_accounting.resnets.MNIST_RESNET, individual_accounting.MNIST
    assert {
        field.name
        for field in dataclasses.fields(ours)
        if getattr(ours, field.name) != getattr(papers, field.name)
    } == {"refreshes", "reference", "needs"}
    # Norms are measured and not clipped to, so that how often is no part of the training.
    assert ours.clipping == "maximum"
    for exhibit in ("figure-1", "figure-4", "table-2", "figure-5"):
        name = f"individual-accounting/{exhibit}-mnist"
        assert only(experiments.get(name).presets["paper"]) == ("tasks", "mnist", ours)
        assert not published.exhibit(name).shortened
        asked = {one.text for one in experiments.criteria() if one.of == name}
        assert asked == {
            one.text for one in experiments.criteria() if one.of == name.removesuffix("-mnist")
        }


@pytest.mark.parametrize(
    "paper", ["per-instance-accounting", "individual-accounting", "gradients-look-alike"]
)
def test_what_is_left_to_run_says_about_how_long_it_takes_and_on_what(paper):
    left = [one for one in scoreboard.exhibit_statuses(paper) if one.to_do is not None]
    assert left
    for one in left:
        out_of_reach = one.exhibit.needs and one.to_do[0] == f"needs {one.exhibit.needs}"
        assert out_of_reach or " GPU" in one.to_do[0] or " core" in one.to_do[0], (
            one.exhibit.name,
            one.to_do,
        )


def test_the_half_without_dp_asks_for_the_other_before_it_trains(monkeypatch):
    monkeypatch.setattr(resnets.records, "find", lambda _: None)
    with pytest.raises(ValueError, match="figure-7-private must be run before"):
        resnets.figure_7_without_dp(resnets.WithoutDP(TINY), None)


def test_fewer_reach_the_worst_case_on_mnist_only_if_both_records_say_so(tmp_path):
    mnist = records.find("per-instance-accounting/figure-1-mnist")
    ((_, words, outcome),) = against_print.fewer_on_the_easier_task(mnist)
    assert (words, outcome) == ("2.6% against 20.3%", "holds")
    records.write(mnist, tmp_path)  # alone
    assert not [*against_print.fewer_on_the_easier_task(records.find(mnist.name, folder=tmp_path))]


def test_a_part_is_a_part_of_something():
    for exhibit in published.exhibits(ours=True):
        if exhibit.part_of:
            assert published.exhibit(f"{exhibit.paper}/{exhibit.part_of}").kind != published.OURS
            assert "paper" in experiments.get(exhibit.name).presets


#: Boenisch et al. have networks of their own: test_idp_sgd_cifar.
SHORTENED = [
    part.name
    for part in published.exhibits(ours=True)
    if " epochs of " in part.shortened
    if " of " in part.shortened.partition(" epochs of ")[0] or " for 300 of " in part.shortened
    if part.paper != "idp-sgd"
]
#: Those, and what one run of ResNet-20 gives of figures that have more.
PARTS = [*SHORTENED, *(f"gradients-look-alike/figure-{number}-resnet20" for number in (2, 4, 6))]
#: Shortened tasks, what of the paper's own they change, and the epsilon that they cost.
SHORT = {
    "individual-accounting": (
        individual_accounting.resnets.SHORT,
        individual_accounting.CIFAR10_RESNET,
        {"epochs", "learning_rate", "refreshes", "reference", "needs"},
        individual_accounting.make_plan,
        7.8,
    ),
    "per-instance-accounting/figure-4": (
        resnets.UTKFACE_SHORT,
        resnets.UTKFACE_GENDER,
        {"epochs", "noise_multiplier", "refreshes", "learning_rate", "reference", "looks"},
        runs.make_plan,
        4.08,
    ),
}


def only(config):
    """The one task or setting of a configuration: its field, its name there if it has one, and
    itself.
    """
    if hasattr(config, "setting"):
        return "setting", None, config.setting
    field = "tasks" if hasattr(config, "tasks") else "settings"
    ((label, task),) = getattr(config, field).items()
    return field, label, task


@pytest.mark.parametrize("of", SHORT)
def test_a_shortened_run_is_the_papers_for_as_many_epochs_as_it_says_and_costs_as_much(of):
    short, whole, changed, make_plan, epsilon = SHORT[of]
    fields = {field.name for field in dataclasses.fields(short)}
    assert {field for field in fields if getattr(short, field) != getattr(whole, field)} == changed
    assert short.model == "resnet20"
    n, data = (6_240, "UTKFace, gender") if short.data == "utkface-gender" else (50_000, "CIFAR-10")
    plan = make_plan(short, n, 1.0)
    assert (
        epsilon - 0.01 < plan.epsilon(accountant="rdp") <= epsilon
        and plan.epsilon(accountant="pld") < epsilon
    )
    parts = [name for name in SHORTENED if name.startswith(of)]
    assert parts
    for name in parts:
        part, presets = published.exhibit(name), experiments.get(name).presets
        epochs = f"{short.epochs} of {whole.epochs} epochs of ResNet-20 on {data}"
        if of == "individual-accounting":  # the paper's own network is another
            epochs = f"{short.epochs} epochs of ResNet-20, for 300 of WRN-16-4, on {data}"
        assert part.shortened == epochs
        assert only(presets["paper"])[2] == short and presets.keys() == {"paper"}


def test_what_reads_one_run_of_resnet_20_on_cifar_10_reads_the_papers_that_figure_3_trains():
    own = dataclasses.replace(gradients_look_alike.CIFAR10, runs=1)
    for figure in (
        "figure-3",
        "figure-7",
        "figure-9",
        *(name.partition("/")[2] for name in PARTS[-3:]),
    ):
        name = f"gradients-look-alike/{figure}"
        assert experiments.get(name).presets["paper"].tasks["ResNet-20, CIFAR-10"] == own
        assert "epochs" not in published.exhibit(name).shortened


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.slow
def test_a_part_meets_the_criteria_of_its_exhibits_under_its_own_name(name, monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    forget()
    found = experiments.get(name)
    config = found.presets["paper"]
    field, label, _ = only(config)
    if name.startswith("per-instance"):
        task = dataclasses.replace(TINY, reference=40)
    elif name.startswith("individual"):
        task = dataclasses.replace(
            individual_accounting.MNIST_5K, epochs=2, batch_size=400, reference=40
        )
    else:
        task = gradients_look_alike.Task(
            "mnist-5k", "softmax", epochs=1, learning_rate=1.0, runs=1, points=15, stops=4
        )
    changes = {"draws": 3, "pool": 9, "tuples": 3, "batch_sizes": (32, 128), "shown": 6}
    changes = {field: value for field, value in changes.items() if hasattr(config, field)}
    monkeypatch.setitem(
        found.presets,
        "paper",
        dataclasses.replace(config, **{field: {label: task} if label else task}, **changes),
    )
    record = experiments.run(name, preset="paper")
    asked = [criterion for criterion in experiments.criteria() if criterion.of == name]
    exhibits = {criterion.exhibit for criterion in asked}
    assert f"{published.exhibit(name).paper}/{published.exhibit(name).part_of}" in exhibits
    rows = [row for exhibit in exhibits for row in experiments.findings(record, exhibit).rows]
    # This network is none of the paper's, and the part's own network is.
    others = gradients_look_alike.runs.OTHERS
    assert {row.criterion.removesuffix(others) for row in rows} == {
        criterion.text.removesuffix(others) for criterion in asked
    }
    network = "" if field.startswith("setting") else "ResNet-20"
    epochs = " epochs" if name in SHORTENED else ""
    assert all(network in row.where and epochs in row.where for row in rows)


def test_with_dp_the_attack_is_on_final_losses_of_members_and_others(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    found = experiments.get("individual-accounting/figure-11-resnet20")
    task = dataclasses.replace(
        individual_accounting.MNIST_5K, epochs=1, batch_size=400, reference=0
    )
    config = dataclasses.replace(found.presets["paper"], tasks={"a": task}, draws=3)
    run = experiments.Run(config, torch.device("cpu"), pathlib.Path("nowhere"))
    trained = individual_accounting.trained(task, 0, run)
    # Whoever was trained on has no loss left: every class is found out.
    perfect = dataclasses.replace(
        trained, losses=0 * trained.losses, test_losses=1 + 0 * trained.test_losses
    )
    monkeypatch.setattr(individual_accounting.resnets, "trained", lambda *_: perfect)
    values = found.function(config, run)
    assert min(values["a.private.success"]) == 1 and len(values["a.mean_epsilon"]) == 10
    assert (
        values["a.training_accuracy"] == trained.right.mean()
        and values["a.test_accuracy"] == trained.accuracy
    )


def test_a_task_without_refreshes_keeps_medians_and_has_no_accounts(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    task = dataclasses.replace(
        individual_accounting.MNIST_5K, epochs=2, batch_size=400, reference=100
    )
    tasks = {"with": task, "without": dataclasses.replace(task, refreshes=0)}
    run = experiments.Run(yu.Study(tasks), torch.device("cpu"), pathlib.Path("nowhere"))
    found = {name: individual_accounting.trained(each, 0, run) for name, each in tasks.items()}
    assert found["without"].medians.shape == (3, 10)
    for part in ("medians", "losses", "test_losses", "reference"):
        np.testing.assert_array_equal(getattr(found["with"], part), getattr(found["without"], part))
    assert len(found["with"].epsilon()) == 4000
    with pytest.raises(ValueError, match="no norms"):
        found["without"].epsilon()


WHOLE = "dpcompanion run individual-accounting/figure-3 --preset paper --device cuda"
MEDIANS = np.linspace(0.3, 0.9, 10) * np.ones((21, 1))  # of ten classes, after twenty epochs


@pytest.fixture
def shortened(monkeypatch, tmp_path):
    """How figure 3 stands with a record of its part if that were of 10 of 100 epochs."""
    part = published.exhibit("individual-accounting/figure-3-whole")
    words = "10 of 100 epochs of ResNet-20 on CIFAR-10"
    _, known = published._read(part.paper)
    monkeypatch.setitem(known, part.id, dataclasses.replace(part, shortened=words))

    def stands():
        record = records.make(
            part.name,
            "paper",
            {"cifar10.half_time_to_end": 1.0, "cifar10.each.least_spread": [3.0]},
            config={"tasks": {"cifar10": {"model": "resnet20"}}},
            data=[{"name": "cifar10", "split": "train", "examples": 50_000}],
            arrays={"cifar10.medians": MEDIANS},
        )
        records.write(record, tmp_path)
        return scoreboard.exhibit_status("individual-accounting/figure-3", folder=tmp_path)

    return stands


def test_a_shortened_run_counts_and_leaves_its_exhibit_unfinished(shortened):
    one = shortened()
    assert (
        one.outcomes.smaller == {"holds": 1}
        and one.outcomes.findings == {}
        and one.state == "in part"
    )
    assert (
        one.evidence.missing == ()
        and one.basis
        == "paper record, stale, with 10 of 100 epochs of ResNet-20 on CIFAR-10, "
        "settings not printed"
    )
    what, command = one.to_do
    assert what == "more than 10 of 100 epochs of ResNet-20 on CIFAR-10"
    assert command == WHOLE


def test_a_shortened_run_beside_a_stand_in_leaves_the_tasks_that_it_was_without(
    shortened, tmp_path
):
    record = records.make(
        "individual-accounting/figure-3",
        "paper",
        {
            "mnist_cnn.half_time_to_end": 1.0,
            "mnist_cnn.each.least_spread": [3.0],
            "not_run": ["cifar10"],
        },
        config={
            "tasks": {
                "mnist_cnn": {"model": "two-layer-cnn"},
                "cifar10": {"model": "resnet20", "needs": "a GPU"},
            }
        },
        data=[{"name": "mnist"}],
        arrays={"mnist_cnn.medians": MEDIANS},
    )
    records.write(record, tmp_path)
    assert scoreboard.exhibit_status(
        "individual-accounting/figure-3", folder=tmp_path
    ).evidence.missing == ("cifar10", "resnet20")
    one = shortened()
    assert (
        one.state == "in part"
        and one.outcomes.smaller == {"holds": 2}
        and one.evidence.missing == ()
    )
    assert (
        "stale, with 10 of 100 epochs of ResNet-20 on CIFAR-10" in one.basis
        and "stand-in" in one.basis
    )
    assert one.to_do == ("cifar10 (a GPU)", WHOLE)


def test_with_the_whole_of_it_a_shortened_run_is_no_limit(shortened, tmp_path):
    shortened()
    record = records.make(
        "individual-accounting/figure-3",
        "paper",
        {"cifar10.half_time_to_end": 1.0, "cifar10.each.least_spread": [3.0]},
        config={"tasks": {"cifar10": {"model": "resnet20"}}},
        data=[{"name": "cifar10"}],
        arrays={"cifar10.medians": MEDIANS},
    )
    records.write(record, tmp_path)
    one = scoreboard.exhibit_status("individual-accounting/figure-3", folder=tmp_path)
    assert one.state == "reproduced" and one.evidence.shortened == () and one.to_do is None


def test_numbers_of_a_shortened_run_are_not_held_against_the_print(tmp_path):
    key = "cifar10.share_at_worst_case"
    values = {key: 0.35}
    config = {"tasks": {"a": {"model": "resnet20"}}}
    part, whole = "individual-accounting/figure-1-resnet20", "individual-accounting/figure-1"
    records.write(
        records.make(whole, "paper", {"x": 1.0}, config=config, data=[{"name": "mnist"}]), tmp_path
    )
    records.write(
        records.make(part, "paper", values, config=config, data=[{"name": "cifar10"}]), tmp_path
    )
    assert scoreboard.exhibit_status(whole, folder=tmp_path).outcomes.numbers == {"out of reach": 5}


def test_the_records_of_resnet_20_follow_from_its_plan_where_all_gradients_are_clipped():
    costs, steps = (
        records.find(f"gradients-look-alike/figure-{number}-resnet20") for number in (6, 2)
    )
    ((name, task),) = gradients_look_alike.stages.LONG.items()
    plan = gradients_look_alike.plan_of(task, 50_000)
    # Before training every gradient is as long as the clip norm, and theorem 3.3 looks at it in its
    # highest order.
    order = float(holder_order(8, 3 * plan.steps, plan.steps - 1))
    first, worst = (float(gradients_look_alike.divergence(1.0, plan, each)) for each in (order, 8))
    assert costs.values[f"{name}.share"][0] == pytest.approx(first / worst, rel=1e-6)
    everybody, _ = gradients_look_alike.runs.worst_case(plan)
    assert costs.values[f"{name}.worst_case.epsilon"] == pytest.approx(float(everybody), rel=1e-9)
    shares = steps.arrays[f"{name}.share"]
    assert (
        shares.shape == (3, 1000)
        and 0 <= shares.min()
        and shares.max() <= 1 + 1e-9
        and shares[0].min() == 1
    )
    for stage, costs in zip(gradients_look_alike.STAGES, shares):
        assert steps.values[f"{name}.{stage}.share"] == pytest.approx(
            np.quantile(costs, (0.1, 0.25, 0.5, 0.75, 0.9))
        )
        assert steps.values[f"{name}.{stage}.below_thousandth"] == (costs < 1e-3).mean()
