"""pandas objects where arrays are taken: their values count, in their order; labels do not."""

import warnings

import numpy as np
import pytest
import torch

from dpcompanion.accounting import (
    Guarantee,
    Ledger,
    compute_epsilon,
    gaussian_epsilon,
    rdp_sampled_gaussian,
    rdp_to_epsilon,
    trade_off,
)
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.idp import budgets_for, scale_parameters
from dpcompanion.individual import IndividualAccountant
from dpcompanion.pate import weighted_parameters
from dpcompanion.per_instance.steps import step_divergence
from dpcompanion.training import DPSGDPlan

pandas = pytest.importorskip("pandas")
VALUES = [1.0, 2.0, 3.0]
RUN = dict(sample_rate=0.01, steps=100)


def recorded(norms, examples=(0, 1, 2), steps=(9, 9, 9)):
    account = IndividualAccountant(
        3, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=4.0, accountant="rdp"
    )
    account.record(norms, steps if hasattr(steps, "to_numpy") else torch.tensor(steps), examples)
    return account.epsilon(1e-5)


PLAN = DPSGDPlan(n=3, sample_rate=0.1, steps=2, max_grad_norm=4.0, noise_multiplier=1.0, delta=1e-5)
FILTER = RenyiFilter.for_plan(PLAN, 100.0)
TAKEN = {
    "compute_epsilon": lambda v: compute_epsilon(
        noise_multiplier=v, delta=1e-5, accountant="rdp", **RUN
    ),
    "rdp": lambda v: rdp_sampled_gaussian(sample_rate=0.1, noise_multiplier=v, orders=v + 1),
    "rdp_to_epsilon": lambda v: rdp_to_epsilon(v, v + 1, 1e-5)[0],
    "gaussian_epsilon": lambda v: gaussian_epsilon(v, 1e-5),
    "trade_off": lambda v: trade_off(
        sample_rate=1.0, noise_multiplier=1.0, steps=1, false_positive_rate=v / 9
    ),
    "histories": lambda v: epsilon_of_histories(
        [[1, 2, 3]], sample_rate=1.0, noise_multipliers=v, delta=1e-5
    ),
    "scale": lambda v: (
        scale_parameters(v, [1, 1, 2], target_delta=1e-5, max_grad_norm=1.0, **RUN).max_grad_norms
    ),
    "counts": lambda v: (
        scale_parameters(VALUES, v, target_delta=1e-5, max_grad_norm=1.0, **RUN).max_grad_norms
    ),
    "orders": lambda v: step_divergence(
        sample_rate=0.1, noise_multiplier=1.0, sensitivity=1.0, orders=v + 1, direction="add"
    ),
    "rates": lambda v: Ledger([Guarantee(1.0, 1e-5)]).trade_off(v / 9),
    "filter budgets": lambda v: RenyiFilter(
        3, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=1.0, orders=v + 1, budgets=9.0
    ).epsilon(1e-5),
    "pate": lambda v: weighted_parameters(v, v, target_delta=1e-5, queries=9).weights,
    "norms": recorded,
    "steps": lambda v: recorded(
        VALUES, steps=(0 * v + 4).astype(int) if hasattr(v, "astype") else [4, 4, 4]
    ),
    "filter": lambda v: FILTER.clip_norms(v),
    "plan": lambda v: (
        DPSGDPlan(
            n=3, sample_rate=0.1, steps=2, max_grad_norm=v, noise_multiplier=1.0, delta=1e-5
        ).max_grad_norm
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [[2, 0, 1], *(pytest.param(one, marks=pytest.mark.slow) for one in ([7, 8, 9], list("abc")))],
)
@pytest.mark.parametrize("name", TAKEN)
def test_a_series_counts_as_its_values_whatever_its_labels(name, index):
    plain = TAKEN[name](torch.tensor(VALUES, dtype=torch.float64))
    assert torch.equal(
        torch.as_tensor(TAKEN[name](pandas.Series(VALUES, index=index))), torch.as_tensor(plain)
    )


def budgets_of(v):
    return RenyiFilter.for_plan(PLAN, v).epsilon(1e-5)


def budgets_by_numbers(v):
    run = dict(sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=4.0)
    return RenyiFilter.for_epsilon(3, target_epsilons=v, target_delta=1e-5, **run).epsilon(1e-5)


def whole_budgets(v):
    run = dict(sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=4.0, steps=2)
    return ExactFilter(3, levels=[1.0], costs=[1], budget=v, **run).budget


@pytest.mark.parametrize(
    "take",
    [lambda v, **own: budgets_for(v, 3, **own), budgets_of, budgets_by_numbers, whole_budgets],
)
@pytest.mark.parametrize("index", [None, [0, 1, 2]])
def test_budgets_whose_labels_count_from_0_are_in_the_order_of_the_examples(take, index):
    assert torch.equal(take(pandas.Series(VALUES, index=index)), take(VALUES))


@pytest.mark.parametrize("index", [[2, 0, 1], list("amz"), [0, 0, 1], [7, 8, 9], [0, 1, None]])
def test_budgets_whose_labels_leave_their_order_open_are_refused(index):
    for take in (lambda v: budgets_for(v, 3), budgets_of, budgets_by_numbers, whole_budgets):
        with pytest.raises(ValueError, match="(target_epsilons|budget) must be in the order of"):
            take(pandas.Series(VALUES, index=index))


@pytest.mark.parametrize(
    "persons, index, found",
    [
        (["a", "m", "z"], ["z", "a", "m"], [2.0, 3.0, 1.0]),
        (["a", "m", "z"], None, VALUES),
        ([5, 7, 9], [9, 5, 7], [2.0, 3.0, 1.0]),
        ([5, 7, 9], [0, 1, 2], VALUES),
        ([2, 0, 1], [1, 2, 0], [2.0, 3.0, 1.0]),
    ],
)
def test_budgets_of_persons_go_by_name(persons, index, found):
    for names in (persons, np.array(persons)):
        given = pandas.Series(VALUES, index=index)
        assert budgets_for(given, 3, persons=names).tolist() == found


def test_rows_of_a_table_whose_labels_leave_their_order_open_are_refused():
    run = dict(sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=1.0, orders=[2.0, 3.0])
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    found = RenyiFilter(3, budgets=pandas.DataFrame(rows), **run)
    assert found.budgets.tolist() == rows
    with pytest.raises(ValueError, match="budgets must be in the order of the examples"):
        RenyiFilter(3, budgets=pandas.DataFrame(rows, index=[2, 0, 1]), **run)


def test_arrays_that_must_not_be_written_to_are_taken_without_a_warning():
    given = np.array(VALUES)
    given.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert budgets_for(given, 3).tolist() == VALUES
    finally:
        torch.set_warn_always(False)


def test_dates_are_names_and_categories_have_the_order_of_their_names():
    days = pandas.to_datetime(["2026-03-01", "2026-01-01", "2026-02-01"])
    given = pandas.Series(VALUES, index=days)
    for persons in (days.sort_values().to_numpy(), list(days.sort_values())):
        assert budgets_for(given, 3, persons=persons).tolist() == [2.0, 3.0, 1.0]
    kinds = pandas.CategoricalIndex(list("zma"), categories=list("zma"), ordered=True)
    grouped = pandas.Series(VALUES, index=kinds)
    assert budgets_for(grouped, 3, persons=list("amz")).tolist() == [3.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="target_epsilons must be in the order of the examples"):
        budgets_for(grouped, 3)


def test_labels_are_names_only_where_they_are_the_same():
    days = ["01/02/2020", "02/01/2020", "01/03/2020"]
    for labels, persons in [
        (pandas.to_datetime(days, dayfirst=True), days),
        (pandas.interval_range(0, 9, periods=3), [1, 4, 7]),
        ([2.0**53, 2.0**53 + 2, 2.0**53 + 4], np.array([2**53, 2**53 + 1, 2**53 + 4])),
        (list("bac"), list("aab")),
        (["1", 1, 2], [1, "1", 2]),
        (["a\0", "a", "b"], ["a", "a\0", "b"]),
        (np.array([2, 0, 1], "uint8"), [256, 257, 258]),
        (pandas.CategoricalIndex([1, None, 2]), [1, 2, 3]),
    ]:
        with pytest.raises(ValueError, match="target_epsilons must be in the order of the persons"):
            budgets_for(pandas.Series(VALUES, index=labels), 3, persons=persons)


@pytest.mark.parametrize(
    "persons, index",
    [(list("amz"), list("amx")), (list("amz"), [7, 8, 9]), ([2, 0, 1], None), ([1, 2], None)],
)
def test_labels_that_are_no_names_are_refused(persons, index):
    with pytest.raises(ValueError, match=r"target_epsilons must (be in the order|be a number)"):
        budgets_for(pandas.Series(VALUES[: len(persons)], index=index), 3, persons=persons)


def test_a_frame_counts_as_a_matrix_and_text_is_refused_by_name():
    frame = pandas.DataFrame([[1.0, 2.0], [3.0, 4.0]], index=[5, 2], columns=["a", "b"])
    found = compute_epsilon(noise_multiplier=frame, delta=1e-5, accountant="rdp", **RUN)
    assert torch.equal(
        found,
        compute_epsilon(
            noise_multiplier=frame.values.tolist(), delta=1e-5, accountant="rdp", **RUN
        ),
    )
    for wrong in (
        pandas.Series(["1", "x"]),
        pandas.Series([1.0, None], dtype="Float64"),
        pandas.Series([1.0, None]),
    ):
        with pytest.raises(ValueError, match="noise_multiplier"):
            compute_epsilon(noise_multiplier=wrong, delta=1e-5, **RUN)
        with pytest.raises(ValueError, match="target_epsilons"):
            scale_parameters(wrong, [1, 1], target_delta=1e-5, max_grad_norm=1.0, **RUN)
