"""What records say, computed again as far as that takes neither the data nor the hours of the run.

A slice of each kind: parameters, worst cases and accounts from the recorded configuration,
summaries from the recorded arrays, and what must hold between the numbers of one record.
"""

import dataclasses
import math
import pathlib

import numpy as np
import pytest
import torch

from dpcompanion.accounting import compute_epsilon, rdp_to_epsilon
from dpcompanion.output_perturbation import augmented_sigma, intrinsic_epsilon, sgd_sensitivity
from dpcompanion.reproduction import experiments, published, records
from dpcompanion.reproduction.papers import gradients_look_alike, idp_sgd, individual_accounting

CPU = torch.device("cpu")


def recorded(name):
    return records.find(name)


def run_of(config):
    return experiments.Run(config, CPU, pathlib.Path())


def task_of(record, name, kind):
    """The dataclass that a record's configuration tells of."""
    fields = record.config["tasks"][name]
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    )


def test_parameters_of_budgets_on_mnist():
    values = recorded("idp-sgd/table-7").values
    config = dataclasses.replace(
        idp_sgd.Accounts(),
        training={"mnist": idp_sgd.TABLE_5["mnist"]},
        groups={"B": idp_sgd.GROUPS["B"]},
    )
    again = idp_sgd.table_7(config, run_of(config))
    assert {"mnist.B.sigma_sample", "mnist.B.c_p"} <= set(again)
    for key, value in again.items():
        np.testing.assert_allclose(np.array(value), np.array(values[key]), rtol=1e-4, err_msg=key)


def test_every_trial_and_class_is_in_the_record():
    record = recorded("idp-sgd/table-2")
    config = record.config
    for kind in config["kinds"]:
        finals, (*_, last) = record.values[f"{kind}.final"], record.values[f"{kind}.accuracy"]
        assert len(finals) == last.n == len(record.seeds) and record.values[f"{kind}.dropped"] == 0
        assert (
            last.mean == pytest.approx(np.mean(finals))
            and len(record.values[f"{kind}.classes"]) == 10
        )


def test_histograms_of_individual_epsilons_count_all_examples():
    record = recorded("individual-accounting/figure-1")
    for name in individual_accounting.reported(record):
        task, value = (
            record.config["tasks"][name],
            {
                key: record.values[f"{name}.{key}"]
                for key in ("worst_case", "noise_multiplier", "steps", "mean", "pld.mean", "max")
            },
        )
        worst = compute_epsilon(
            sample_rate=task["batch_size"] / 60_000,
            noise_multiplier=value["noise_multiplier"],
            steps=value["steps"],
            delta=task["delta"],
            accountant="rdp",
        )
        assert value["worst_case"] == pytest.approx(worst, rel=1e-6) and value["max"] <= worst * (
            1 + 1e-9
        )
        for counts, mean in (("rdp", value["mean"]), ("pld", value["pld.mean"])):
            histogram = record.arrays[f"{name}.{counts}"]
            centres = worst * (np.arange(120) + 0.5) / 120
            assert histogram.sum() == 60_000
            assert histogram @ centres / 60_000 == pytest.approx(mean, abs=worst / 240)


@pytest.mark.parametrize(
    "name, exact, estimate, r",
    [
        (
            "individual-accounting/figures-13-14",
            "mnist_cnn.hinge.exact",
            "mnist_cnn.hinge.estimate",
            "mnist_cnn.hinge.pearson_estimate",
        ),
        ("per-instance-accounting/figure-3", "k0.actual", "k0.estimate", "k0.pearson"),
        ("per-instance-accounting/figure-3", "k2.actual", "k2.estimate", "k2.pearson"),
    ],
)
def test_correlations_of_estimates_are_those_of_the_recorded_points(name, exact, estimate, r):
    record = recorded(name)
    found = np.corrcoef(record.arrays[exact], record.arrays[estimate])[0, 1]
    assert found == pytest.approx(record.values[r], abs=1e-5)


def test_every_number_of_refreshes_has_the_errors_of_its_points():
    record = recorded("individual-accounting/figure-4")
    for name in individual_accounting.reported(record):
        exact = record.arrays[f"{name}.exact"].astype(float)
        for refreshes, estimate in zip(
            record.config["refreshes"], record.arrays[f"{name}.estimates"].astype(float)
        ):
            key = f"{name}.gamma_{refreshes:g}"
            assert record.values[f"{key}.pearson"] == pytest.approx(
                np.corrcoef(exact, estimate)[0, 1], abs=1e-5
            )
            assert record.values[f"{key}.mean_error"] == pytest.approx(
                np.abs(exact - estimate).mean(), abs=1e-5
            )


@pytest.mark.parametrize("task", ["mnist-binary", "forest", "adult"])
def test_intrinsic_epsilons_follow_from_recorded_noise_and_sensitivity(task):
    record = recorded("intrinsic-privacy/table-3")
    setting = record.config["tasks"][task]
    value = {key.removeprefix(f"{task}."): v for key, v in record.values.items()}
    examples = round(1 / value["delta"])
    passes = math.ceil(setting["steps"] * setting["batch_size"] / examples)
    bound = float(
        sgd_sensitivity(
            passes=passes,
            lipschitz=math.sqrt(2),
            learning_rate=setting["learning_rate"],
            batch_size=setting["batch_size"],
        )
    )
    assert value["delta_bound"] == pytest.approx(bound, rel=1e-9)
    for sensitivity, mechanism, key in (
        ("delta_theory", "classical", "eps_i"),
        ("delta_bound", "analytic", "eps_i.analytic"),
        ("delta_empirical", "analytic", "eps_i_star.analytic"),
    ):
        found = value[sensitivity]
        # Of several draws of neighbours the first is meant, which lies within 1.5 standard
        # deviations of their mean.
        ends = (
            (found.mean - 1.5 * found.sd, found.mean + 1.5 * found.sd)
            if hasattr(found, "sd")
            else (found, found)
        )
        low, high = (
            float(intrinsic_epsilon(end, value["sigma_i"], value["delta"], mechanism=mechanism))
            for end in ends
        )
        assert low * (1 - 1e-6) <= value[key] <= high * (1 + 1e-6)
    more = augmented_sigma(
        value["delta_bound"], value["sigma_i"], target_epsilon=1.0, target_delta=value["delta"]
    )
    total = math.hypot(float(more), value["sigma_i"])
    assert float(intrinsic_epsilon(value["delta_bound"], total, value["delta"])) <= 1.0


def test_bounds_of_the_mean_update_that_need_no_data():
    record = recorded("gradients-look-alike/figure-8")
    task = task_of(record, "LeNet-5", gradients_look_alike.Task)
    for size in (32, 128):
        plan = gradients_look_alike.plan_of(dataclasses.replace(task, batch_size=size), 60_000)
        worst = float(
            gradients_look_alike.divergence(task.max_grad_norm, plan, record.config["order"])
        )
        limit = torch.full((1,), task.max_grad_norm, dtype=torch.float64)
        bound = float(
            gradients_look_alike.mean_update_bound(limit, plan, record.config["order"])[0]
        )
        assert record.values[f"LeNet-5.final.batch {size}.worst_case"] == pytest.approx(
            worst, rel=1e-4
        )
        assert record.values[f"LeNet-5.final.batch {size}.any_data"] == pytest.approx(
            bound / worst, rel=1e-3
        )


def test_exact_compositions_lie_within_their_intervals_and_below_the_bounds():
    values = recorded("gradients-look-alike/theorem-3.3").values
    for direction in ("remove", "add"):
        low, exact, high, upper = (
            np.array(values[f"{direction}.{key}"])
            for key in ("low", "exact", "high", "upper_bound")
        )
        slack = 1 + 1e-9  # where all runs agree, the four are equal up to rounding
        assert (
            (low <= exact * slack).all()
            and (exact <= high * slack).all()
            and (exact <= upper * slack).all()
        )
        assert (upper <= values["worst_case"] * (1 + 1e-9)).all()
    assert (
        np.array(values["epsilon.upper_bound"]) <= values["epsilon.worst_case"] * (1 + 1e-9)
    ).all()


def test_the_exact_composition_of_lenet_keeps_to_its_bounds_and_has_the_epsilon_of_its_order():
    record = recorded("gradients-look-alike/figure-1")
    for name, tilted in record.config["exact"].items():
        value = {
            key: np.array(record.values[f"{name}.exact.{key}"])
            for key in (
                "low",
                "exact",
                "high",
                "upper_bound",
                "worst_case",
                "theorem_3_3",
                "epsilon",
            )
        }
        task = task_of(record, name, gradients_look_alike.Task)
        plan = gradients_look_alike.plan_of(task, 60_000)
        worst = plan.steps * float(
            gradients_look_alike.divergence(task.max_grad_norm, plan, tilted["order"])
        )
        assert value["worst_case"] == pytest.approx(worst, rel=1e-4)
        assert (value["low"] <= value["exact"]).all() and (value["exact"] <= value["high"]).all()
        assert (value["exact"] <= value["upper_bound"]).all() and (
            value["upper_bound"] <= worst
        ).all()
        assert (value["exact"] < value["theorem_3_3"]).all()
        exact = torch.as_tensor(value["exact"])[:, None]
        assert value["epsilon"] == pytest.approx(
            rdp_to_epsilon(exact, [tilted["order"]], task.delta)[0].numpy(), rel=1e-9
        )


def test_findings_can_be_judged_from_every_record():
    judged = 0
    for path in sorted(records.results_folder().glob("*/*.paper.json")):
        record = records.read(path)
        for exhibit in published.exhibits(record.name.partition("/")[0]):
            rows = experiments.findings(record, exhibit.name).rows
            assert all(row.where and row.ours for row in rows), exhibit.name
            judged += len(rows)
    assert judged > 100
