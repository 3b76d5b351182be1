import dataclasses

import pytest

from dpcompanion.reproduction import published, records, states

PLAIN = published.Exhibit(
    "idp-sgd", "table-5", "table", "a title", "a place", data=("mnist", "svhn"), networks=("cnn",)
)
RECORD = records.make(
    PLAIN.name, "paper", {"a": 1.0}, config={"model": "cnn"}, data=[{"name": "mnist"}]
)
QUICK = dataclasses.replace(RECORD, preset="quick")


@pytest.mark.parametrize(
    "exhibit, numbers, held, record, left, live, state",
    [
        ({}, {"matches": 2, "close": 1}, {"holds": 1}, RECORD, False, False, "reproduced"),
        ({}, {"matches": 2, "not run": 1}, {}, RECORD, False, False, "in part"),
        ({}, {"matches": 2}, {}, RECORD, True, False, "in part"),
        ({}, {"matches": 2}, {}, QUICK, False, False, "in part"),
        ({}, {"matches": 2, "differs": 1}, {}, RECORD, False, False, "in part"),
        ({}, {"matches": 2}, {"undecided": 1}, RECORD, False, False, "in part"),
        ({}, {"differs": 1}, {"undecided": 1}, RECORD, False, False, "contradicted"),
        ({}, {}, {"fails": 1}, RECORD, True, False, "undecided"),
        ({"unprinted": "the learning rate"}, {}, {"fails": 1}, RECORD, False, False, "undecided"),
        ({}, {"not run": 3}, {}, None, False, True, "undecided"),
        ({}, {"not run": 3}, {}, None, False, False, "not run"),
        ({"tests": ("a test",)}, {}, {}, None, False, False, "reproduced"),
        ({"wrong": ("a",)}, {"matches": 2}, {}, RECORD, False, False, "wrong in the paper"),
        ({"wrong": ("a",)}, {}, {}, None, False, False, "not run"),
        ({"wrong": ("statement",)}, {}, {}, None, False, False, "wrong in the paper"),
        ({"needs": "weights"}, {"not run": 3}, {}, None, False, True, "out of reach"),
        ({"needs": "weights"}, {}, {"undecided": 1}, RECORD, True, False, "out of reach"),
        ({"needs": "weights"}, {"matches": 1}, {}, RECORD, True, False, "in part"),
        ({"needs": "weights"}, {"differs": 1}, {}, RECORD, False, False, "contradicted"),
        ({"vacuous": True}, {"matches": 2}, {"holds": 1}, RECORD, False, False, "vacuous"),
    ],
)
def test_a_state_follows_from_counts_and_from_what_is_left(
    exhibit, numbers, held, record, left, live, state
):
    found = dataclasses.replace(PLAIN, **exhibit)
    assert (
        states.state(found, numbers, held, record, some_tasks=left, live=live) == state
        and state in states.STATES
    )


def test_data_and_networks_are_missing_that_no_record_has():
    assert states.missing(PLAIN, [RECORD]) == ("svhn",)
    other = dataclasses.replace(RECORD, data=[{"name": "svhn"}], config={"model": "mlp"})
    assert states.missing(PLAIN, [other]) == ("mnist", "cnn")
    assert states.missing(PLAIN, [RECORD, other]) == ()
    assert (
        states.missing(PLAIN, [dataclasses.replace(RECORD, data=[])])
        == ()
        == states.missing(PLAIN, [])
    )


def test_tasks_are_not_run_that_the_exhibits_own_record_leaves_out_and_no_part_has():
    own = dataclasses.replace(RECORD, values={"not_run": ["svhn", "cifar10"]})
    part = dataclasses.replace(RECORD, data=[{"name": "cifar10"}])
    assert states.not_run(PLAIN, own, []) == ("svhn", "cifar10")
    assert states.not_run(PLAIN, own, [part]) == ("svhn",)
    assert states.not_run(PLAIN, dataclasses.replace(own, name="idp-sgd/table-7"), []) == ()
    assert states.not_run(PLAIN, None, []) == ()
