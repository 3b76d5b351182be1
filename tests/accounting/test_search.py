"""The searches: what they return was looked at, holds, and lies next to where it ends to hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion.accounting.search import PRECISION, bisect, crossing, crossings


@settings(max_examples=60, deadline=None)
@given(
    root=st.floats(-8, 8),
    start=st.floats(-9, 9),
    steep=st.sampled_from([0.01, 1.0, 100.0]),
    meets=st.sampled_from(["above", "below"]),
    curve=st.sampled_from(["line", "cube", "kink", "stairs"]),
)
def test_a_crossing_is_found_from_anywhere_on_the_side_that_meets(root, start, steep, meets, curve):
    sign, seen = 1 if meets == "below" else -1, {}

    def excess(x):
        gap = sign * steep * (x - root)
        seen[x] = {
            "line": gap,
            "cube": gap**3 + 1e-3 * gap,
            "kink": gap if gap < 0 else 50 * gap,
            "stairs": math.ceil(gap) if gap > 0 else math.floor(gap),
        }[curve]
        return seen[x]

    found = crossing(excess, start=start, low=-9.0, high=9.0, meets=meets)
    assert seen[found] <= 0 and 0 <= sign * (root - found) <= 1.01 * PRECISION + 1e-12
    assert len(seen) < 80


def test_a_range_that_lies_on_one_side_gives_its_end_or_nothing():
    for meets, end in (("below", 5.0), ("above", -5.0)):
        assert crossing(lambda x: -1.0, start=0.0, low=-5.0, high=5.0, meets=meets) == end
        assert crossing(lambda x: 1.0, start=0.0, low=-5.0, high=5.0, meets=meets) is None


@pytest.mark.parametrize("meets", ["above", "below"])
def test_only_points_where_the_function_is_defined_are_looked_at(meets):
    asked, sign = [], 1 if meets == "below" else -1

    def excess(x):
        asked.append(x)
        return sign * (x - 17.5)

    found = crossing(
        excess, start=1.2, low=-100.0, high=100.0, meets=meets, snap=lambda x: float(round(x))
    )
    assert found == (17.0 if meets == "below" else 18.0) and all(x == round(x) for x in asked)


def test_brackets_are_bisected_side_by_side_and_the_good_end_is_returned():
    roots = torch.tensor([0.3, 2.0, 7.9], dtype=torch.float64)
    low, high = torch.zeros(3, dtype=torch.float64), torch.full((3,), 8.0, dtype=torch.float64)
    below = bisect(lambda x: x <= roots, good=low, bad=high)
    above = bisect(lambda x: x >= roots, good=high, bad=low)
    assert (below <= roots).all() and (above >= roots).all()
    torch.testing.assert_close(below, above, rtol=1e-14, atol=0)


@pytest.mark.parametrize("start", [-8.0, 0.0, 8.0])
def test_crossings_side_by_side_are_found_on_the_safe_side_and_nan_where_there_is_none(start):
    roots, seen = torch.tensor([-7.5, -0.3, 2.0, 7.9, 9.5, -9.5], dtype=torch.float64), set()

    def excess(y, index):
        seen.update(zip(index.tolist(), y.tolist()))
        return torch.where(y < roots[index], 50 * (roots[index] - y), roots[index] - y)

    found = crossings(
        excess, start=torch.full_like(roots, start), low=-9.0, high=9.0, precision=1e-4
    )
    assert ((found - roots)[:4] >= 0).all() and ((found - roots)[:4] <= 1.01e-4).all()
    assert found[4].isnan() and found[5] == -9.0
    assert all((i, y) in seen for i, y in enumerate(found.tolist()) if i != 4)


def test_crossings_end_at_values_that_are_enough_and_learn_slopes_that_save_values():
    roots, count = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64), 0

    def excess(y, index):
        nonlocal count
        count += len(y)
        return 4.0 * (roots[index] - y) + 0.1 * torch.tanh(roots[index] - y)

    enough, slopes = torch.full_like(roots, 1e-4), torch.ones_like(roots)
    search = {"low": -9.0, "high": 9.0, "precision": 1e-9, "enough": enough, "slopes": slopes}
    found = crossings(excess, start=torch.zeros_like(roots), **search)
    values = excess(found, torch.arange(3))
    assert (values <= 0).all() and (values >= -enough).all()
    assert torch.allclose(slopes, torch.full_like(slopes, 4.1), rtol=0.05)
    count = 0
    again = crossings(excess, start=found + 0.01, **search)
    assert count <= 9 and (excess(again, torch.arange(3)) <= 0).all()
