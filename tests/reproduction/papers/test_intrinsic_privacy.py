"""The exhibits of Hyland and Tople, on small grids."""

import dataclasses
import math
import types

import numpy as np
import pytest
import torch

from dpcompanion import output_perturbation
from dpcompanion.reproduction import experiments, intervals, published, runs
from dpcompanion.reproduction.papers import intrinsic_privacy as ip
from dpcompanion.reproduction.runs import Run

SMALL = ip.Task(16, 1.0, 40, seeds=8, data_sets=4)
NAMES = [name for name in experiments.names() if name.startswith("intrinsic-privacy/")]


@pytest.fixture(autouse=True)
def nothing_trained(monkeypatch, tmp_path):
    runs.forget()
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))


@pytest.fixture
def run():
    return Run(None, torch.device("cpu"), None)


@pytest.mark.parametrize(
    "name",
    # The notebooks execute the others' quick runs.
    [
        name
        if name.endswith(("table-3", "figure-2"))
        else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_every_exhibit_gives_the_same_finite_numbers_twice(name, monkeypatch):
    found = experiments.get(name)
    config = found.presets["quick"]
    changes = (
        {
            "tasks": {
                key: dataclasses.replace(task, steps=30, seeds=min(task.seeds, 140), data_sets=4)
                for key, task in config.tasks.items()
            }
        }
        if hasattr(config, "tasks")
        else {"draws": 200}
    )
    for field, value in (("models", 10), ("neighbours", 2), ("points", 5), ("targets", (1.0,))):
        if hasattr(config, field):
            changes[field] = value
    if len(getattr(config, "epsilons", ())) > 1:
        changes["epsilons"] = (0.5, 2.0)
    monkeypatch.setitem(found.presets, "quick", dataclasses.replace(config, **changes))
    first = experiments.run(name, preset="quick")
    runs.forget()
    again = experiments.run(name, preset="quick")
    for key, value in first.values.items():
        if key.endswith(".seconds"):
            continue
        np.testing.assert_array_equal(value, again.values[key], err_msg=key)
        allowed = "percent_of_gap" in key or "p_value" in key or "eps" in key
        assert allowed or np.isfinite(np.atleast_1d(value).astype(float)[:1]).all(), key
    assert first.arrays.keys() == again.arrays.keys()
    for key, array in first.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[key])


@pytest.mark.parametrize("name,examples,size", [("digits", 720, 50), ("breast-cancer", 411, 30)])
def test_examples_have_norm_1_and_the_held_out_one_comes_first(name, examples, size):
    found = ip.problem(name)
    assert found.features.shape == (examples, size) and len(found.labels) == examples
    torch.testing.assert_close(
        found.features.norm(dim=1), torch.ones(examples, dtype=torch.float64)
    )
    assert set(found.labels.tolist()) == {0, 1}


def test_grids_agree_with_algorithm_1_by_hand(run):
    weights = ip.trained("digits", SMALL, run)[1:].numpy()
    table = {}
    sigma = np.median([(w - w.mean(0)).std() for w in weights])
    star = max(
        np.linalg.norm(weights[a, r] - weights[b, r])
        for a in range(4)
        for b in range(4)
        for r in range(8)
    )
    name = "intrinsic-privacy/table-3"
    found = experiments.get(name)
    table = found.function(
        dataclasses.replace(found.presets["quick"], tasks={"digits": SMALL}), run
    )
    assert table["digits.sigma_i"] == pytest.approx(sigma)
    assert table["digits.delta_empirical"] == pytest.approx(star)
    c = math.sqrt(2 * math.log(1.25 * 720))
    assert table["digits.eps_i_star"] == pytest.approx(c * star / sigma)
    assert table["digits.eps_i"] == pytest.approx(
        c * 2 * (40 * 16 / 720) * math.sqrt(2) * 1.0 / 16 / sigma
    )


def test_table_4_is_a_mean_over_random_projections_of_the_digits(run, monkeypatch):
    name = "digits"
    monkeypatch.setattr(ip.utility, "UNSCALED", {name: SMALL})
    first, second = (ip.problem(ip.grids.projected(name, n)) for n in (0, 1))
    assert first is ip.problem(name) and not torch.equal(first.features, second.features)
    torch.testing.assert_close(first.labels, second.labels, rtol=0, atol=0)
    found = experiments.get("intrinsic-privacy/table-4")
    config = dataclasses.replace(
        found.presets["quick"], tasks={name: SMALL}, models=20, draws=2, projections=3
    )
    values, once = (found.function(dataclasses.replace(config, projections=n), run) for n in (3, 0))
    for key in ("noiseless_accuracy", "theory.deterministic", "empirical.gain"):
        whole = values[f"{key}.{name}"]
        assert whole.n == 3 and whole.sd > 0
        if key != "noiseless_accuracy":  # of twenty models here, and of all of them there
            assert values[f"one_projection.{key}.{name}"] == once[f"{key}.{name}"]
    assert not any(key.startswith("one_projection") for key in once)


def test_an_interrupted_grid_goes_on_where_it_stopped(run, monkeypatch):
    task = dataclasses.replace(SMALL, seeds=34)
    whole = ip.trained("digits", task, run)
    runs.forget()
    monkeypatch.setattr(runs, "KEPT", 0)
    train, calls = ip.grids.ensembles.train_grid, []

    def interrupted(*arguments, seeds, **options):
        calls.append(tuple(seeds))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*arguments, seeds=seeds, **options)

    monkeypatch.setattr(ip.grids.ensembles, "train_grid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ip.trained("digits", task, run)
    found = ip.trained("digits", task, run)
    assert calls == [tuple(range(16)), tuple(range(16, 32)), tuple(range(16, 32)), (32, 33)]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-14)


def test_the_gaussian_view_recovers_mu_and_the_pooled_one_understates_it():
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    noise = torch.randn(3000, 4, generator=generator, dtype=torch.float64) * scale
    shift = torch.tensor([0.0, 0.0, 0.0, 0.2], dtype=torch.float64)
    weights = torch.stack((noise, noise + shift))
    view = ip.gaussian_view(weights)
    assert view["mu"].item() == pytest.approx(2.0, rel=0.05)
    assert view["mu_pooled"].item() == pytest.approx(0.2 / math.sqrt(3.01 / 4), rel=0.05)


@pytest.mark.parametrize("make", [ip.gaussian_ratio, ip.linear_classifier])
def test_an_audit_finds_what_is_there_and_no_more(make):
    generator = torch.Generator().manual_seed(1)

    def clouds(mu):
        return torch.randn(8000, 3, generator=generator, dtype=torch.float64), torch.randn(
            8000, 3, generator=generator, dtype=torch.float64
        ) + torch.tensor([mu, 0, 0])

    fit, trial = clouds(1.5), clouds(1.5)
    epsilon, mu = ip.counted(make(*fit), fit, trial, delta=1e-4, confidence=0.95)
    assert 1.3 < mu < 1.5
    assert 1.5 < epsilon < output_perturbation.intrinsic_epsilon(1.5, 1.0, 1e-4)
    same, fresh = clouds(0.0), clouds(0.0)
    epsilon, mu = ip.counted(make(*same), same, fresh, delta=1e-4, confidence=0.95)
    assert epsilon < 0.1 and mu < 0.1


@pytest.mark.slow
def test_more_noise_never_reads_as_less(run):
    values = experiments.get("intrinsic-privacy/algorithm-2").function(
        ip.Audit({"digits": dataclasses.replace(SMALL, seeds=200)}, 2, 1), run
    )
    for row in (
        f"digits.{initialization}.{kind}"
        for initialization in ip.INITIALIZATIONS
        for kind in ip.KINDS
    ):
        assert (values[f"{row}.needed.added"].diff() <= 0).all()
        assert (values[f"{row}.theory.added"] >= values[f"{row}.empirical.added"]).all()
        assert (values[f"{row}.theory.epsilon_covariance"].diff() >= 0).all()
        assert (
            values[f"{row}.needed.epsilon_covariance"]
            <= torch.tensor(values[f"{row}.targets"]) * (1 + 1e-9)
        ).all()


def test_a_canary_moves_the_weights_further_in_units_of_the_noise_than_natural_neighbours(run):
    config = ip.Audit({"digits": dataclasses.replace(SMALL, seeds=300)}, 2, 2)
    ((_, task),) = config.tasks.items()
    mu = {
        kind: ip.gaussian_view(ip.audits._clouds("digits", task, run, config, "fixed", kind)[0])[
            "mu"
        ].max()
        for kind in ip.KINDS
    }
    assert mu["canary"] > 1.5 * mu["natural"]


def test_every_criterion_is_judged_by_the_record_of_its_exhibit():
    for name in experiments.names():
        if name.startswith("intrinsic-privacy/") and experiments.criteria(name):
            found = experiments.findings(experiments.get(name).record("paper"))
            assert {row.criterion for row in found.rows} == {
                criterion.text for criterion in experiments.criteria(name)
            }
    heavy = experiments.findings(experiments.get("intrinsic-privacy/algorithm-1").record("paper"))
    for words, outcome in (
        ("theorem 2's sensitivity, for", "undecided"),
        ("the theorem does not apply", "fails"),
        ("empirical", "fails"),
    ):
        assert {row.outcome for row in heavy.rows if words in row.criterion} == {outcome}


def test_the_hyperparameters_are_those_of_table_2():
    table_2 = published.exhibit("intrinsic-privacy/table-2")
    for name, task in ip.PAPER.items():
        ours = task.batch_size, task.learning_rate, task.steps
        assert ours == tuple(
            table_2[f"{name}.{key}"] for key in ("batch_size", "learning_rate", "batches")
        )


@pytest.mark.parametrize("forest, digits, said", [(5.0, 1.2, "hh"), (1.9, 2.5, "ff")])
def test_the_bound_is_loose_but_for_the_digits(forest, digits, said):
    ratios = {"forest": forest, "mnist-binary-unscaled": digits}
    values = {f"{name}.bound_over_data": ratio for name, ratio in ratios.items()}
    record = types.SimpleNamespace(values=values, config={"tasks": ratios})
    rows = list(ip.distances._bound_is_loose(record))
    assert [intervals.outcome(outcome)[0] for *_, outcome in rows] == list(said)
