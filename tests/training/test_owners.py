"""Persons of names of any type, and tables of NumPy and pandas: what `by_person` makes of both."""

import enum
import math
import uuid

import numpy as np
import pytest
import torch
from test_people import PEOPLE, table, trained

from dpcompanion.training import DPSGDPlan, by_person

pandas = pytest.importorskip("pandas")
UUIDS = [uuid.UUID(int=number) for number in (7, 3)]


class Ward(enum.Enum):
    NORTH, SOUTH = 1, 2


class Nameless:
    pass


@pytest.mark.parametrize(
    "people, names",
    [
        (np.array(["b", "a", "b"], dtype=object), ["a", "b"]),
        ([np.str_("b"), "a", "b"], ["a", "b"]),
        (pandas.Series(["b", "a", "b"], index=[2, 0, 1]), ["a", "b"]),
        (pandas.Series(["b", "a", "b"], dtype="category", index=[7, 8, 9]), ["a", "b"]),
        (pandas.Categorical([2, 1, 2]), [1, 2]),
        (pandas.Series([2, 1, 2], dtype="Int64"), [1, 2]),
        (pandas.Series(pandas.to_datetime(["2024-02-01", "2024-01-01", "2024-02-01"])), None),
        (list(torch.tensor([2, 1, 2])), [1, 2]),
        (torch.tensor([2, 1, 2], dtype=torch.bfloat16), [1, 2]),
        (np.array([2**24 - 1, 1, 2**24 - 1], dtype=np.float32), [1, 2**24 - 1]),
        (np.array([2, np.int64(1), 2.0], dtype=object), [1, 2]),
        (np.array([2**64 - 1, 2**63, 2**64 - 1], dtype=np.uint64), [2**63, 2**64 - 1]),
        ([2**80, -1, 2**80], [-1, 2**80]),
        ([UUIDS[0], UUIDS[1], UUIDS[0]], UUIDS[::-1]),
        ([b"b", b"a", b"b"], [b"a", b"b"]),
    ],
)
def test_names_of_any_type_are_persons_in_their_order(people, names):
    data = by_person(torch.eye(3), torch.zeros(3), people, at_most=2)
    assert data.owners.tolist() == [1, 0, 1] and data.counts.tolist() == [1, 2]
    assert names is None or data.persons.tolist() == names
    again = by_person(torch.eye(3), torch.zeros(3), people, at_most=2, persons=data.persons[::-1])
    assert (
        again.owners.tolist() == [0, 1, 0] and again.persons.tolist() == data.persons.tolist()[::-1]
    )


def test_names_without_an_order_stand_as_they_come_first():
    data = by_person(torch.eye(3), torch.zeros(3), [Ward.SOUTH, Ward.NORTH, Ward.SOUTH], at_most=2)
    assert data.persons.tolist() == [Ward.SOUTH, Ward.NORTH] and data.owners.tolist() == [0, 1, 0]


@pytest.mark.parametrize("index", [range(8), range(8)[::-1]])
def test_a_table_of_numpy_or_pandas_is_the_tensors_of_its_numbers(index):
    x, y = table()
    whole = by_person(x, y, PEOPLE, at_most=4)
    frame = pandas.DataFrame(x.numpy(), index=index).assign(label=y.numpy(), who=PEOPLE)
    columns = frame.drop(columns=["label", "who"]), frame["label"], frame["who"]
    for made in (
        by_person(*columns, at_most=4),
        by_person(x.numpy()[::-1][::-1], y.tolist(), PEOPLE, at_most=4),
    ):
        assert made.x.dtype == torch.float32 and made.digest == whole.digest
        assert all(
            torch.equal(a["rows"], b["rows"]) for a, b in zip(made.part(0, 4), whole.part(0, 4))
        )
    assert by_person(x.double().numpy(), y, PEOPLE, at_most=4).x.dtype == torch.float64
    assert (
        by_person(frame[[0]].assign(known=True), y, PEOPLE, at_most=4).x[:, 1].tolist() == [1] * 8
    )
    plan = DPSGDPlan(
        n=4, sample_rate=0.5, steps=3, max_grad_norm=0.5, noise_multiplier=1.0, delta=1e-2
    )
    model, _ = trained(whole, plan)
    other, _ = trained(columns[:2], plan, people=columns[2], at_most=4)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(ValueError, match="data must have the model's type, torch.float32"):
        trained((x.double().numpy(), y.numpy()), plan, people=PEOPLE, at_most=4)


@pytest.mark.parametrize(
    "wrong",
    [
        np.array(list("abcdefgh")),
        np.ones(8, dtype=complex),
        pandas.Series(["a"] * 8),
        np.ma.array(np.ones(8), mask=[0] * 7 + [1]),
        [None] * 8,
        [[1], [1, 2]] * 4,
        "abcdefgh",
        7,
    ],
)
def test_rows_that_are_no_numbers_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match="x must be"):
        by_person(wrong, torch.zeros(8), PEOPLE, at_most=1)
    with pytest.raises(ValueError, match="y must be"):
        by_person(np.ones((8, 1)), wrong, PEOPLE, at_most=1)


def test_an_array_without_targets_is_refused():
    with pytest.raises(ValueError, match="y must hold the targets"):
        by_person(np.ones((8, 1)), None, PEOPLE, at_most=1)


@pytest.mark.parametrize(
    "people, word",
    [
        (pandas.Series([*"abcdefg", None]), "none missing"),
        (pandas.Series([*PEOPLE[1:], None], dtype="Int64"), "none missing"),
        (np.ma.array(PEOPLE, mask=[1] + [0] * 7), "none missing"),
        (pandas.Series(pandas.to_datetime(["2024-01-01"] * 7 + [None])), "none missing"),
        ([0.5, *PEOPLE[1:]], "whole numbers"),
        ([2.0**53, *PEOPLE[1:]], "whole numbers"),
        (torch.tensor([2.0**24, *PEOPLE[1:]]), "too large for its type of float"),
        ([np.float32(2**24), *PEOPLE[1:]], "too large for its type of float"),
        (np.array([2048, *PEOPLE[1:]], dtype=np.float16), "too large for its type of float"),
        (torch.tensor([256, *PEOPLE[1:]], dtype=torch.bfloat16), "too large for its type"),
        (torch.tensor(PEOPLE).to_sparse(), "dense"),
        ([torch.tensor(2.0**24), *PEOPLE[1:]], "too large for its type"),
        ([np.array(2048, dtype=np.float16), *PEOPLE[1:]], "too large for its type"),
        ([torch.tensor(256, dtype=torch.bfloat16), *PEOPLE[1:]], "too large for its type"),
        ([math.inf, *PEOPLE[1:]], "whole numbers"),
        ([Nameless() for _ in PEOPLE], "by value"),
        ([{}] * 8, "hashable"),
        (7, "people"),
    ],
)
def test_what_names_no_person_a_row_is_refused(people, word):
    with pytest.raises(ValueError, match=word):
        by_person(*table(), people, at_most=1)
    with pytest.raises(ValueError, match="persons"):
        by_person(*table(), PEOPLE, at_most=1, persons=people)
