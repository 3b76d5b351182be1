"""Exhibits of the first version of Yu et al., on a few hundred digits; what running estimates hide,
against sampling."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dpcompanion.accounting import rdp_sampled_gaussian
from dpcompanion.reproduction import experiments, runs
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
