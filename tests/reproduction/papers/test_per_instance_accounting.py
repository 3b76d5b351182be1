"""Exhibits of the first version of Yu et al., on a few hundred digits; what running estimates hide,
against sampling."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dpcompanion.accounting import rdp_sampled_gaussian
from dpcompanion.reproduction import experiments, published, records, runs
from dpcompanion.reproduction.papers import per_instance_accounting as chapter
from dpcompanion.reproduction.papers import yu as second

NAMES = [
    name
    for name in experiments.names()
    if name.startswith(chapter.NAME + "/") and "quick" in experiments.get(name).presets
]
SMALL = {"batch_size": 60, "epochs": 2, "reference": 20, "looks": 2}


@pytest.fixture(autouse=True)
def few_digits(monkeypatch, tmp_path):
    whole = second.examples("mnist-5k", "float64")
    few = dataclasses.replace(whole, x=whole.x[::10], y=whole.y[::10], groups=whole.groups[::10])
    monkeypatch.setattr(second, "examples", lambda name, dtype="float32": few)
    runs.forget()
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    yield
    runs.forget()  # these are runs on other digits


@pytest.mark.parametrize(
    "name",
    # The notebooks execute the others' quick runs.
    [
        name
        if name.endswith(("figure-2", "figure-6"))
        else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_every_exhibit_gives_finite_numbers_and_a_verdict_for_each_finding(name, monkeypatch):
    found = experiments.get(name)
    config, changes = found.presets["quick"], {}
    for field, value in (("examples", 100), ("updates", 5), ("evaluations", 2), ("draws", 2)):
        if hasattr(config, field):
            changes[field] = value
    if hasattr(config, "seeds"):
        changes |= {"seeds": config.seeds[:2]}
    if hasattr(config, "setting"):
        small = {**SMALL, **({"reference": 0, "looks": 1} if not config.setting.reference else {})}
        changes["setting"] = dataclasses.replace(config.setting, **small)
    if hasattr(config, "overfit"):
        changes["overfit"] = dataclasses.replace(config.overfit, epochs=2)
    monkeypatch.setitem(found.presets, "quick", dataclasses.replace(config, **changes))
    record = experiments.run(name, preset="quick")
    for key, value in record.values.items():
        numbers = [value.mean, value.sd] if hasattr(value, "sd") else value
        assert np.isfinite(np.asarray(numbers, dtype=float)).all(), key
    criteria = experiments.criteria(name)
    assert all(list(criterion.judge(record)) for criterion in criteria if criterion.of == name)


def test_a_run_charges_what_the_tracker_of_its_setting_charges():
    setting = dataclasses.replace(chapter.DIGITS, **SMALL)
    values, arrays = chapter.run_setting(setting, 0, torch.device("cpu"))
    again = chapter.run_setting(setting, 0, torch.device("cpu"))[1]
    assert all(np.array_equal(arrays[key], again[key]) for key in arrays)
    plan = chapter.make_plan(setting, 400, values["max_grad_norm"])
    top = plan.epsilon(accountant="rdp")
    assert top == pytest.approx(chapter.worst_case(), rel=1e-3) and plan.steps == 14
    assert (arrays["epsilon"] <= top * (1 + 1e-9)).all() and arrays["epsilon"].std() > 0.01
    assert (
        arrays["quintiles"].shape == (5, 2)
        and arrays["actual"].shape == (20,)
        and values["passes"] == 4
    )
    none = chapter.run_setting(dataclasses.replace(setting, refreshes=0.0), 0, torch.device("cpu"))
    assert (
        none[0]["passes"] == 0
        and (none[1]["epsilon"] >= arrays["epsilon"] * (1 - 1e-9)).mean() > 0.9
    )


def test_the_uniform_epsilon_of_a_records_configuration_is_that_of_its_run():
    for exhibit, setting, n, top in (
        ("figure-1", None, None, "worst_case"),
        ("figure-1-resnet20", None, None, "worst_case"),
        ("figure-4-short", "gender", 6_240, "gender.worst_case"),
    ):
        record = experiments.get(f"{chapter.NAME}/{exhibit}").record("paper")
        which = record.config["settings"][setting] if setting else None
        by = {
            accountant: chapter.plain_epsilon(record, which, n, accountant)
            for accountant in ("rdp", "pld")
        }
        assert by["rdp"] == pytest.approx(record.values[top], rel=1e-9) and by["pld"] < by["rdp"]
        if exhibit == "figure-1":  # the paper's setting
            assert by["pld"] == pytest.approx(record.values["mnist.worst_case_pld"], rel=1e-6)


def test_the_divergence_of_a_mixture_of_histories_is_that_of_quadrature():
    """Two steps, so that the outputs are a plane."""
    config = chapter.Hidden(norms=(0.3, 1.0), sample_rate=0.4, noise=0.8)
    for running in (True, False):
        probabilities, added, charged = chapter.histories(config, running=running)
        assert probabilities.sum() == pytest.approx(1) and (added <= charged).all()
        grid = np.linspace(-9, 10, 801)
        width = grid[1] - grid[0]
        first, second_ = np.meshgrid(grid, grid, indexing="ij")

        def density(shift):
            return np.exp(-((first - shift[0]) ** 2 + (second_ - shift[1]) ** 2) / (2 * 0.64)) / (
                2 * math.pi * 0.64
            )

        without = density((0.0, 0.0))
        with_it = sum(p * density(shift) for p, shift in zip(probabilities, added))
        moment = (with_it**3 / without**2)[without > 0].sum() * width**2
        assert chapter.true_divergence(probabilities, added, 0.8) == pytest.approx(
            math.log(moment) / 2, rel=1e-6
        )


def test_running_estimates_lag_and_passes_do_not():
    config = chapter.Hidden(norms=(0.2, 1.0, 0.5))
    probabilities, added, charged = chapter.histories(config)
    by_history = {tuple((row > 0).astype(int)): limit for row, limit in zip(added, charged)}
    assert by_history[(1, 0, 1)].tolist() == [1.0, 0.2, 0.2] and by_history[(0, 1, 1)].tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    probabilities, added, charged = chapter.histories(config, running=False)
    assert (charged == [0.2, 1.0, 0.5]).all()
    exact = sum(
        float(rdp_sampled_gaussian(sample_rate=0.1, noise_multiplier=1 / norm, orders=[3]))
        for norm in config.norms
    )
    assert chapter.true_divergence(probabilities, added, 1.0) == pytest.approx(exact, rel=1e-9)


def made_up(exhibit, values=(), histogram=None, n=50_000, data="cifar10"):
    """A record with the settings of our run on CIFAR-10, or of that on MNIST."""
    shape = {"cifar10": (208, 3.2), "mnist": (100, 6.0)}[data]
    setting = dict(zip(("epochs", "noise_multiplier"), shape)) | {"data": data, "batch_size": 4000}
    return records.make(
        f"{chapter.NAME}/{exhibit}",
        "paper",
        dict(values),
        config={"setting": {**setting, "model": "resnet20"}},
        data=[{"name": data, "split": "train", "examples": n}],
        arrays={} if histogram is None else {"histogram": np.asarray(histogram)},
    )


def outcomes(record, exhibit, words):
    """Of the criterion whose text holds these words."""
    rows = experiments.findings(record, f"{chapter.NAME}/{exhibit}").rows
    return [row.outcome for row in rows if words in row.criterion]


def test_what_converts_epsilons_is_as_near_as_it_says_where_a_record_has_both():
    record = experiments.get(f"{chapter.NAME}/table-2-resnet20").record("paper")
    ours, theirs = (
        np.array([record.values[f"{part}non_private.{key}"] for key in second.STATISTICS])
        for part in ("", "published.")
    )
    off = np.abs(chapter.converted(record, ours) / theirs - 1)
    assert off.max() <= 0.8 * chapter.CONVERSION_ERROR < ours.min()
    assert chapter.converted(record, theirs, back=True) == pytest.approx(ours, rel=0.02)
    top = chapter.plain_epsilon(record, accountant="rdp")
    worst = float(chapter.as_published(4000 / 60_000, [6.0], [[1500]]))
    assert float(chapter.converted(record, top)) == pytest.approx(worst, rel=1e-9)


def share_at_the_top(share, n):
    """A histogram with so large a share of n examples at the worst case, the rest in its middle."""
    counts = np.zeros(120, dtype=int)
    counts[119] = round(share * n)
    counts[60] = n - counts[119]
    return counts


@pytest.mark.parametrize(
    "data, share, outcome",
    [
        ("cifar10", 0.30, "holds"),
        ("cifar10", 0.22, "fails"),
        ("cifar10", 0.27, "undecided"),
        ("mnist", 0.03, "holds"),
        ("mnist", 0.02, "fails"),
    ],
)
def test_the_share_at_the_worst_case_is_held_against_the_print(data, share, outcome):
    assert chapter.printed_limit() == pytest.approx(6.959 / 7.25, rel=1e-3)
    part = {"cifar10": "figure-1-resnet20", "mnist": "figure-1-mnist"}[data]
    top = {"cifar10": 6.365167, "mnist": 1.864743}[data]
    record = made_up(
        part, {"worst_case": top}, share_at_the_top(share, 50_000), n=50_000, data=data
    )
    assert chapter.reached(record).estimate == pytest.approx(share, abs=1e-4)
    words = "the share at the worst case"
    assert outcomes(record, "text-worst-case-share", words) == [outcome]
    if data == "cifar10":
        assert outcomes(record, "text-worst-case-share", "less than half") == ["holds"]


def test_the_bin_that_holds_the_limit_makes_the_interval():
    counts = np.zeros(120, dtype=int)
    counts[[60, 115, 118]] = 5_000, 2_000, 3_000  # the limit lies in bin 115
    share = chapter.reached(made_up("figure-1-resnet20", {"worst_case": 6.365167}, counts))
    assert share.low < 0.3 < share.estimate < 0.5 < share.high


@pytest.mark.parametrize("low, outcome", [(20, "holds"), (47, "undecided"), (70, "fails")])
def test_a_large_range_of_epsilons_is_one_of_twice_the_tenth_quantile(low, outcome):
    counts, top = np.zeros(120, dtype=int), 6.365167
    counts[[low, 80, 95]] = 10_000, 20_000, 20_000
    middle = [(place + 0.5) / 120 * top for place in (low, 80, 95)]
    values = {"worst_case": top, "quantiles": middle, "below_90_percent": 1.0}
    record = made_up("figure-1-resnet20", values, counts)
    assert outcomes(record, "figure-1", "large range") == [outcome]
    assert outcomes(record, "figure-1", "at least 10% below") == ["holds"]


def test_statistics_are_held_against_the_print_as_the_paper_converts():
    printed = published.exhibit(f"{chapter.NAME}/table-3")
    prefix = "non_private."
    theirs = np.array([float(printed[f"{prefix}{key}"]) for key in second.STATISTICS])
    error = dict.fromkeys(("andrew2021", "cdf"), records.mean_and_sd([1.0, 1.1]))
    words, factors = "by about the paper's conversion", [1.0, 1.0, 1.1, 0.9, 0.85, 1.0]
    blank = made_up("table-3")
    ours = chapter.converted(blank, theirs * factors, back=True)
    values = {f"{prefix}{key}": float(value) for key, value in zip(second.STATISTICS, ours)}
    values |= {f"{method}.mean_error_percent": each for method, each in error.items()}
    found = outcomes(made_up("table-3", values), "table-3", words)
    assert found == ["holds", "holds", "undecided", "undecided", "fails", "holds"]


def test_means_of_cats_and_ships_are_held_against_the_print_as_the_paper_converts():
    blank = made_up("figure-6-resnet20")
    ours = chapter.converted(blank, np.array([6.43, 1.3 * 4.87]), back=True)
    values = dict(zip(("cifar10.cat", "cifar10.ship"), map(float, ours)))
    values |= {key: list(range(10)) for key in ("last_loss", "mean_loss")}
    values["epsilon"] = [4.0 + number / 10 for number in range(10)]
    record = made_up("figure-6-resnet20", values)
    assert outcomes(record, "figure-6", "cats and ships") == ["holds", "fails"]


@pytest.mark.parametrize(
    "lowest, median, outcome",
    [(0.99, 1.002, "holds"), (0.94, 1.0, "fails"), (0.99, 1.02, "fails"), (0.99, 0.98, "fails")],
)
def test_rounding_has_almost_no_impact_where_it_moves_epsilon_by_little(lowest, median, outcome):
    """The record is that of the second version's Table 1."""
    key = "mnist_cnn.nearest_0.01"
    record = records.make(
        "individual-accounting/table-1",
        "paper",
        {f"{key}.lowest": lowest, f"{key}.median": median},
        config={"tasks": {"mnist_cnn": {}}},
    )
    assert outcomes(record, "text-cost", "almost no impact") == [outcome]
