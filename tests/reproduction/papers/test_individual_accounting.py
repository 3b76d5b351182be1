"""The exhibits of Yu et al. 2023, on short runs."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dpcompanion import individual
from dpcompanion.accounting import gaussian_delta
from dpcompanion.reproduction import experiments, published, records, runs, scoreboard
from dpcompanion.reproduction.papers import individual_accounting as ia
from dpcompanion.reproduction.papers import yu
from dpcompanion.reproduction.papers.individual_accounting import words
from dpcompanion.reproduction.runs import Run
from dpcompanion.training import DPSGDPlan

SHORT = dataclasses.replace(ia.MNIST_5K, epochs=2, batch_size=400, reference=40)
NAMES = [
    name
    for name in experiments.names()
    if name.startswith(ia.NAME) and "quick" in experiments.get(name).presets
]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))


@pytest.fixture
def run():
    return Run(None, torch.device("cpu"), None)


@pytest.fixture
def short(run):
    return ia.trained(SHORT, 0, run)


@pytest.mark.parametrize(
    "name",
    # The notebooks execute the others' quick runs.
    [
        name
        if name.endswith(("table-2", "figure-6"))
        else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_every_exhibit_gives_finite_numbers_and_its_findings_are_judged(name, monkeypatch):
    found = experiments.get(name)
    config = found.presets["quick"]
    changes = {
        field: value
        for field, value in (
            ("examples", 50),
            ("updates", 3),
            ("evaluations", 2),
            ("draws", 3),
            ("owners", 2),
        )
        if hasattr(config, field)
    }
    if name.endswith("figure-11"):
        changes["epochs"] = 1
    if not name.endswith("algorithms-1-2-3"):
        changes["tasks"] = {"mnist-5k": SHORT}
    monkeypatch.setitem(found.presets, "quick", dataclasses.replace(config, **changes))
    record = experiments.run(name, preset="quick")
    assert ia.reported(record)
    for key, value in record.values.items():
        value = value.mean if hasattr(value, "mean") else value
        # After so short a training all classes may be equally accurate.
        assert np.isfinite(np.asarray(value, dtype=float)).all() or "rank" in key, key
    rows = experiments.findings(record).rows
    assert len(rows) >= sum(one.of == name for one in experiments.criteria(name)) and all(
        row.where and row.ours for row in rows
    )


def test_accounts_are_those_of_a_tracker_that_ran_along(short):
    tracker = individual.IndividualAccountant.for_plan(short.plan)
    ends = [*short.passes[1:], short.plan.steps]
    for start, end, norms in zip(short.passes, ends, short.norms):
        tracker.record(torch.as_tensor(norms), steps=int(end - start))
    np.testing.assert_allclose(short.epsilon(), tracker.epsilon(1e-5).numpy())
    assert (short.epsilon() <= short.worst_case + 1e-9).all()
    assert (short.epsilon(upto=5) <= short.epsilon()).all()


def test_the_schedule_is_that_of_the_tracker(short):
    for refreshes in (0.5, 1.0, 2.0, 3.0, 1000):
        assert ia.schedule(short.plan, refreshes)[0] == 0
    np.testing.assert_array_equal(ia.schedule(short.plan, SHORT.refreshes), short.passes)
    np.testing.assert_array_equal(ia.schedule(short.plan, math.inf), np.arange(short.plan.steps))


def test_norms_at_every_step_contain_those_of_the_passes(short):
    everybody = short.norms[:, short.reference]
    np.testing.assert_allclose(short.reference_norms[short.passes], everybody, rtol=1e-6)
    estimates = short.reference_epsilon(SHORT.refreshes, rounding=0.01)
    np.testing.assert_allclose(estimates, short.epsilon()[short.reference])


@pytest.mark.slow
def test_individual_clipping_changes_the_run_and_accounting_alone_does_not(run, short):
    again = ia.trained(dataclasses.replace(SHORT, **ia.ONCE), 0, run)
    np.testing.assert_array_equal(again.losses, short.losses)
    clipped = ia.clipped(SHORT, "individual", 0, run)
    assert not np.array_equal(clipped.losses, short.losses)


@pytest.mark.slow
def test_a_long_run_is_cached_on_disk_and_read_back(run, monkeypatch):
    first = ia.trained(SHORT, 0, run)
    monkeypatch.setattr(runs, "KEPT", 0)
    kept = ia.trained(SHORT, 0, run)
    monkeypatch.setattr(
        ia.runs, "train", lambda *arguments, **options: pytest.fail("trained again")
    )
    read = ia.trained(SHORT, 0, run)
    for one in (kept, read):
        np.testing.assert_array_equal(one.norms, first.norms)
        assert one.plan.config() == first.plan.config()


def test_without_a_gpu_the_papers_own_networks_are_left_out_and_listed(run):
    config = experiments.get("individual-accounting/figure-5").presets["paper"]
    assert set(ia.runnable(config, run)) == {"mnist_cnn"}
    assert set(ia.left_out(config, run)["not_run"]) == {
        "mnist",
        "cifar10",
        "utkface_gender",
        "utkface_age",
    }
    assert set(ia.runnable(config, Run(None, torch.device("cuda"), None))) == set(config.tasks)


def test_one_long_run_serves_the_exhibits_of_a_single_run_and_the_sweeps_are_short():
    def epochs(exhibit):
        return {
            name: task.epochs
            for name, task in experiments.get(f"{ia.NAME}/{exhibit}").presets["paper"].tasks.items()
        }

    single = [
        experiments.get(f"{ia.NAME}/{exhibit}").presets["paper"].tasks["mnist_cnn"]
        for exhibit in ("figure-1", "figure-3", "figure-4", "figure-5", "figure-6", "table-2")
    ]
    assert set(single) == {ia.MNIST_LONG} and ia.MNIST_LONG.epochs == 20
    assert epochs("table-3")["mnist_cnn"] == epochs("figures-7-8")["mnist_cnn"] == 4
    # the paper's own are left alone
    assert epochs("figure-1")["mnist"] == epochs("figures-7-8")["mnist"] == 100


def fake_images(monkeypatch, shape):
    x, y = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 10
    found = ia.Examples(x, y, y % 3, x, y, y % 3, tuple("012"), [])
    monkeypatch.setattr(ia.runs, "examples", lambda *arguments: found)


def test_figure_14_alone_is_judged_as_with_the_network_it_is_compared_with(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, 32, 32, generator=generator), torch.arange(60) % 3
    found = ia.Examples(x, y, y, x, y, y, ("cat", "dog", "ship"), [])
    monkeypatch.setattr(ia.runs, "examples", lambda *arguments: found)
    name = f"{ia.NAME}/figure-14"
    config = experiments.get(name).presets["paper"]
    (task,) = config.tasks.values()
    assert (task.model, task.epochs, task.batch_size) == ("two-layer-cnn", 300, 4096)
    few = dataclasses.replace(task, batch_size=20, epochs=4, reference=30)
    config = dataclasses.replace(config, tasks={"cifar10": few})
    values, arrays = ia.estimates.figure_14(config, Run(config, torch.device("cpu"), tmp_path))
    trained = ia.trained(few, 0, Run(config, torch.device("cpu"), tmp_path))
    assert trained.passes.tolist() == [0, 6]  # half a refresh an epoch for all
    exact = trained.reference_epsilon()
    np.testing.assert_allclose(arrays["cifar10.small.exact"], exact, rtol=1e-6)
    np.testing.assert_allclose(
        arrays["cifar10.small.estimate"], trained.reference_epsilon(3.0), rtol=1e-6
    )
    assert values["cat_mean_eps.cnn"] == values["cifar10.small.mean_epsilon"][0]
    record = records.make(name, "paper", values, config=config, arrays=arrays)
    rows = experiments.findings(record, f"{ia.NAME}/figures-13-14").rows
    assert [row.where for row in rows] == ["CIFAR-10, two-layer CNN"] * 2


def test_the_two_layer_cnn_is_that_of_mnist_for_images_of_another_size():
    images = {side: yu.two_layer_cnn(1, 10, side, seed=0) for side in (28, 32)}
    assert [layer.in_features for layer in images[28] if hasattr(layer, "in_features")] == [512, 32]
    assert images[32](torch.zeros(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    "task,shape",
    [
        (ia.MNIST_CNN, (1, 28, 28)),
        *(
            pytest.param(task, shape, marks=pytest.mark.slow)
            for task, shape in (
                (ia.MNIST, (1, 28, 28)),
                (ia.CIFAR10, (3, 8, 8)),
                (ia.UTKFACE_GENDER, (3, 16, 16)),
                (dataclasses.replace(ia.CIFAR10, model="two-layer-cnn"), (3, 32, 32)),
                (dataclasses.replace(ia.CIFAR10_RESNET, loss="hinge"), (3, 8, 8)),
            )
        ),
    ],
)
def test_the_papers_networks_train_on_a_few_images(task, shape, run, monkeypatch):
    fake_images(monkeypatch, shape)
    few = dataclasses.replace(task, batch_size=3, epochs=1, reference=2)
    found = ia.trained(few, 0, run)
    assert (
        found.plan.steps == 2
        and found.norms.shape == (2, 6)
        and found.reference_norms.shape == (2, 2)
    )
    assert np.isfinite(found.losses).all() and (found.epsilon() > 0).all()


def test_faces_are_balanced_within_each_race():
    labels, groups = torch.tensor([0, 0, 0, 1, 1, 0, 1, 0]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 4])
    kept = yu._balanced(labels, groups, 2)
    for group in (0, 1):
        assert labels[kept][groups[kept] == group].double().mean() == 0.5
    assert len(kept) == 4 and 7 not in kept.tolist()


def test_nearest_rounds_half_of_the_norms_down_and_never_to_zero():
    shares = ia.nearest(np.array([0.001, 0.144, 0.156, 0.999, 2.0]), 1.0, 0.1)
    np.testing.assert_allclose(shares, [0.1, 0.1, 0.2, 1.0, 1.0])


def test_the_delta_of_two_gaussians_is_found_by_counting_cells():
    z = torch.linspace(-12, 12, 200001, dtype=torch.float64)
    a, b = (
        torch.exp(-((z - shift) ** 2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
        for shift in (0.0, 1.0)
    )
    assert ia.excess(a, b, 0.7) == pytest.approx(float(gaussian_delta(1.0, 0.7)), rel=1e-3)


def test_thresholds_hold_on_their_sets_where_they_fail_for_the_algorithm(run):
    values = experiments.get("individual-accounting/theorem-3.1").function(ia.Trajectories({}), run)
    delta = values["toy.delta"]
    assert max(values["toy.on_set"]) <= delta and max(values["toy.on_set_best_order"]) <= delta
    assert values["toy.everywhere"][0] > delta and values["toy.probability"][1] > 0.8
    z, cell, without, with_it, rdp, orders = ia.two_steps(ia.Trajectories({}))
    assert float(without.sum() * cell) == pytest.approx(1, abs=1e-6)
    assert float(with_it.sum() * cell) == pytest.approx(1, abs=1e-6)


def test_variance_is_split_between_examples_and_runs():
    random = np.random.RandomState(0)
    examples, noise = random.randn(1, 20000) * 2, random.randn(3, 20000)
    share, spread = ia.variance_shares(examples + noise)
    assert share == pytest.approx(4 / 5, abs=0.01) and spread == pytest.approx(1, abs=0.02)
    assert ia.variance_shares(noise)[0] < 0.02


def test_log_losses_of_zero_are_left_out():
    losses = np.array([0.0, 1.0, math.e, math.e**2])
    assert ia.with_log_loss(np.array([9.0, 0.0, 1.0, 2.0]), losses) == pytest.approx(1)
    assert math.isnan(ia.pearson(np.ones(3), np.arange(3)))


def test_the_print_is_compared_with_what_the_papers_method_releases(run):
    values = ia.releases.table_2(ia.releases.Release({"mnist-5k": SHORT}, draws=2), run)
    printed = published.exhibit(f"{ia.NAME}/table-2").flat()
    keys = {key.removeprefix("mnist.") for key in printed if key.startswith("mnist.")}
    assert "andrew2021.released.median" in keys and "released.median" not in keys
    assert keys <= {key.removeprefix("mnist-5k.") for key in values}
    by = [values[f"mnist-5k.{kind}released.median"] for kind in ("", "cdf.", "andrew2021.")]
    assert by[0] == by[1] != by[2]


def test_an_overfitted_model_betrays_its_members(run):
    config = ia.Membership({"mnist-5k": SHORT}, epochs=8, draws=4)
    accuracies, losses = ia.overfitted(SHORT, config, 0, "cpu")
    assert accuracies["accuracy"] > accuracies["test_accuracy"] > 0.8
    found = ia.examples(SHORT.data, SHORT.dtype)
    members = np.where(np.arange(len(found.y)) % 2, 0.0, losses["losses"])
    rates = ia.attacked(found, members, losses["test_losses"], config)
    assert rates["success"].mean() > 0.7 and (rates["low"] < rates["success"]).all()


def test_plain_training_goes_on_after_its_last_whole_epoch(tmp_path, monkeypatch):
    def losses(epochs):
        config = ia.Membership({"mnist-5k": SHORT}, epochs=epochs)
        return ia.overfitted(SHORT, config, 0, "cpu")[1]["losses"]

    whole = losses(3)
    monkeypatch.setattr(yu.pieces, "unfinished", lambda: tmp_path / "seed-0.unfinished")
    assert (losses(2) != whole).any()
    np.testing.assert_array_equal(losses(3), whole)


def test_plans_are_those_of_the_papers_epsilons():
    plan = ia.make_plan(ia.MNIST, 60000, 1.0)
    assert isinstance(plan, DPSGDPlan) and plan.steps == 5900
    assert (
        plan.epsilon(accountant="rdp") == pytest.approx(2.4, rel=1e-3)
        and plan.epsilon(accountant="pld") < 2.3
    )


@pytest.mark.parametrize(
    "exhibit, name",
    [
        ("figure-1", words.MNIST),
        ("figure-1-mnist", words.MNIST_RESNET),
        ("figure-1-resnet20", words.RESNET),
    ],
)
def test_the_uniform_epsilon_of_a_records_configuration_is_that_of_its_run(exhibit, name):
    record = experiments.get(f"{ia.NAME}/{exhibit}").record("paper")
    by = {
        accountant: words.plain_epsilon(record, name, accountant) for accountant in ("rdp", "pld")
    }
    assert by["rdp"] == pytest.approx(record.values[f"{name}.worst_case"], rel=1e-9)
    assert by["pld"] == pytest.approx(record.values[f"{name}.pld.worst_case"], rel=1e-6)
    top = record.values[f"{name}.worst_case"]
    below = yu.share_below(record.arrays[f"{name}.rdp"], top, by["pld"])
    assert 0 < below < yu.share_below(record.arrays[f"{name}.rdp"], top, top) == 1


def test_a_record_that_leaves_the_papers_networks_out_neither_reproduces_nor_contradicts(tmp_path):
    losses = np.random.RandomState(0).lognormal(size=500)
    for slope, state, outcome in ((1.0, "in part", "holds"), (0.0, "undecided", "fails")):
        epsilon = slope * np.log(losses) + 0.1 * np.random.RandomState(1).normal(size=500)
        record = records.make(
            f"{ia.NAME}/figure-5",
            "paper",
            {"not_run": ["mnist"], "mnist_cnn.pearson": slope},
            config={"tasks": {"mnist_cnn": {}, "mnist": {}}},
            arrays={"mnist_cnn.epsilon": epsilon, "mnist_cnn.losses": losses},
        )
        records.write(record, tmp_path)
        board = {
            one.exhibit.id: one for one in scoreboard.exhibit_statuses(ia.NAME, folder=tmp_path)
        }
        assert (board["figure-5"].state, board["figure-5"].outcomes.findings) == (
            state,
            {outcome: 1},
        )


@pytest.mark.slow
def test_the_quick_run_without_noise_does_not_depend_on_the_last_bits(monkeypatch):
    task = ia.Task("mnist-5k", "mlp", 0, 0, 0.0, 0.0, dtype="float64")

    def moved(**settings):
        losses = []
        for jitter in ("0", "1e-12"):
            monkeypatch.setenv("DPCOMPANION_JITTER", jitter)
            losses.append(
                ia.overfitted(task, ia.Membership(tasks={}, **settings), 0, "cpu")[1]["losses"]
            )
        return np.abs(np.log(losses[0] / losses[1])).max()

    assert moved(**{**ia.STABLE, "epochs": 5}) < 1e-3
    assert moved(epochs=5) > 1  # at the default rate every loss is another one


def judged(medians):
    """The outcome of figure 3's claim for the medians (epochs + 1, classes) of one run."""
    name = f"{ia.NAME}/figure-3"
    values = {"mnist_cnn.half_time_to_end": 1.0, "mnist_cnn.each.least_spread": [3.0]}
    record = records.make(
        name,
        "paper",
        values,
        config={"tasks": {"mnist_cnn": {}}},
        data=[{"name": "mnist"}],
        arrays={"mnist_cnn.medians": medians},
    )
    found = experiments.findings(record)
    return [row.outcome for row in found.rows if row.kind == "claim"]


@pytest.mark.parametrize("epochs, outcome", [(100, "holds"), (5, "holds"), (1, "undecided")])
def test_norms_of_classes_are_apart_where_they_stay_so(epochs, outcome):
    medians = np.linspace(0.3, 0.9, 10) * np.ones((epochs + 1, 1))
    assert judged(medians) == [outcome]
    assert judged(10 * medians[:, ::-1]) == (["fails"] if epochs > 1 else [outcome])


def test_norms_of_classes_that_change_places_in_every_epoch_are_not_apart():
    generator = np.random.default_rng(0)
    medians = generator.permuted(np.tile(np.linspace(0.3, 0.9, 10), (101, 1)), axis=1)
    assert (medians.max(1) / medians.min(1)).min() > 2.9
    assert judged(medians) == ["fails"]
