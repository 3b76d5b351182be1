import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.per_instance import naive_unlearning

from ..refusals import refuses


def gaussian(first, second, order):
    """The divergence of N(first, 1) from N(second, 1)."""
    return order * (first - second) ** 2 / 2


@given(
    st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=6), st.floats(1.05, 6), st.floats(0.01, 2)
)
@settings(max_examples=100, deadline=None)
def test_whatever_is_decided_the_model_stays_within_the_budget_of_retraining(moves, order, budget):
    # Training on D^t draws from N(m_t, 1): the divergence of the model at hand from retraining is
    # known.
    centres = [0.0]
    for move in moves:
        centres.append(centres[-1] + move)
    decisions = naive_unlearning(
        lambda t, a: gaussian(centres[t - 1], centres[t], a),
        requests=len(moves),
        order=order,
        budget=budget,
    )
    trained = 0
    for decision in decisions:
        t = decision.request
        truth = gaussian(centres[trained], centres[t], order)
        assert decision.bound_if_kept >= truth * (1 - 1e-12)
        assert decision.keep == (decision.bound_if_kept <= budget)
        trained = trained if decision.keep else t
        assert (
            gaussian(centres[trained], centres[t], order)
            <= decision.bound * (1 + 1e-12)
            <= budget * (1 + 1e-12)
        )


def test_the_first_request_needs_one_divergence_and_each_without_retraining_doubles_the_order():
    asked = []
    naive_unlearning(lambda t, a: asked.append((t, a)) or 0.0, requests=3, order=3, budget=1.0)
    assert asked == [(1, 3), (2, 5), (1, 6), (3, 5), (2, 11), (1, 12)]


def test_after_retraining_the_chain_starts_anew():
    decisions = naive_unlearning(
        lambda t, a: 10.0 if t == 2 else 0.1, requests=3, order=4, budget=1.0
    )
    assert [d.keep for d in decisions] == [True, False, True]
    assert decisions[1].bound == 0.0 and decisions[2].bound_if_kept == pytest.approx(0.1)


def test_bad_arguments_are_refused_by_name():
    good = dict(divergence=lambda t, a: 0.0, requests=2, order=2, budget=1.0)
    negative = [lambda t, a: -0.1]
    refuses(
        naive_unlearning,
        good,
        order=[1.0],
        budget=[-1, math.nan],
        requests=[1.5],
        divergence=negative,
    )
