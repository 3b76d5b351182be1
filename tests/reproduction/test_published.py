import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcompanion.reproduction import published
from dpcompanion.reproduction.published import Printed, verdict

from ..refusals import refused, refuses


@pytest.mark.parametrize(
    "text, value, sd, rounding",
    [
        ("3.42529", 3.42529, 0, 5e-6),
        ("96.75±0.15", 96.75, 0.15, 0.005),
        ("96.75 ± 0.15", 96.75, 0.15, 0.005),
        ("0.927(2)", 0.927, 0.002, 5e-4),
        ("0.64(1)", 0.64, 0.01, 5e-3),
        ("9.62e-5", 9.62e-5, 0, 5e-8),
        ("9375", 9375, 0, 0.5),
        ("+0.015", 0.015, 0, 5e-4),
        ("1e7", 1e7, 0, 5e6),
        ("2.10", 2.1, 0, 5e-3),
    ],
)
def test_a_printed_number_knows_its_digits_and_its_deviation(text, value, sd, rounding):
    number = Printed(text)
    assert number == value and isinstance(number, float) and str(number) == text
    assert number.sd == pytest.approx(sd) and number.rounding == pytest.approx(rounding, rel=1e-12)
    copy = pickle.loads(pickle.dumps(number))
    assert (copy.text, copy.sd, copy.rounding) == (number.text, number.sd, number.rounding)


def test_what_is_no_plain_number_is_refused_as_one():
    refuses(Printed, {}, text=["", "about 0.5", "< 3", "nan", "1.2.3", 3.4, "4±"])


@given(st.integers(-(10**6), 10**6), st.integers(0, 6))
def test_whatever_rounds_to_the_print_matches_it(units, places):
    text = f"{units / 10**places:.{places}f}"
    if text.startswith("-0") and float(text) == 0:
        return
    for part in (-0.49999, 0.0, 0.3, 0.49999):
        assert verdict(float(text) + part / 10**places, text) == "matches"


def test_the_verdict_follows_the_rule_of_two_standard_deviations_then_ten_percent():
    assert (
        verdict(10 + 2 * math.hypot(0.3, 0.4) - 1e-9, 10.0, sd_ours=0.3, sd_published=0.4)
        == "matches"
    )
    assert (
        verdict(10 + 2 * math.hypot(0.3, 0.4) + 1e-9, 10.0, sd_ours=0.3, sd_published=0.4)
        == "differs"
    )
    assert (
        verdict(10.9, 10.0) == "close"
        and verdict(9.0, 10.0) == "close"
        and verdict(11.1, 10.0) == "differs"
    )
    assert verdict(-9.5, -10.0) == "close" and verdict(9.5, -10.0) == "differs"
    assert verdict(96.0, "96.75±0.15", points=True) == "close"
    assert (
        verdict(95.7, "96.75±0.15", points=True) == "differs"
        and verdict(95.7, "96.75±0.15") == "close"
    )
    assert verdict(0.957, "0.9675(15)", points=0.01) == "differs"
    assert verdict(0.96, "0.9675(15)", points=0.01) == "close"


def test_deviation_and_rounding_are_those_of_the_print_by_default():
    assert (
        verdict(97.0, "96.75±0.15") == "matches"
        and verdict(97.0, "96.75±0.15", sd_published=0) == "close"
    )
    assert verdict(3.43, "3.425", rounding=0.01) == "matches" and verdict(3.43, "3.425") == "close"


def test_what_is_not_finite_differs_and_infinite_matches_infinite():
    assert verdict(math.nan, 1.0) == "differs" and verdict(math.inf, 1.0) == "differs"
    assert verdict(math.inf, math.inf) == "matches"


def test_a_deviation_that_is_negative_or_not_finite_is_refused():
    bad = [-1, math.nan, math.inf]
    refuses(
        lambda **options: verdict(1.0, 1.0, **options),
        {},
        sd_ours=bad,
        sd_published=bad,
        rounding=bad,
    )


def test_every_exhibit_is_complete():
    names = [exhibit.name for exhibit in published.exhibits()]
    assert len(names) == len(set(names)) >= 90
    for exhibit in published.exhibits():
        assert exhibit.kind in published.KINDS and exhibit.scale in ("cpu", "gpu"), exhibit.name
        assert exhibit.title and exhibit.place, exhibit.name
        assert all(exhibit.flat().values()), exhibit.name
        assert published.exhibit(exhibit.name) is exhibit
        if exhibit.kind == "table":
            assert exhibit.numbers, exhibit.name
        for value in exhibit.flat().values():
            assert isinstance(value, (Printed, str, tuple)), exhibit.name


def test_text_stands_only_where_the_paper_prints_no_plain_number():
    texts = {
        (e.name, key): value
        for e in published.exhibits()
        for key, value in e.flat().items()
        if isinstance(value, str)
    }
    assert texts == {
        ("per-instance-accounting/figure-7", "with_dp"): "about 0.5",
        ("individual-accounting/table-1", "with_rounding.seconds"): "< 3",
        ("individual-accounting/table-1", "without_rounding.seconds"): "~ 2.6e4",
    }


def test_the_papers_own_arithmetic_holds_where_it_is_consistent():
    for name, size in (("mnist", 60000), ("svhn", 73257), ("cifar10", 50000)):
        row = published.exhibit("idp-sgd/table-5").numbers[name]
        epoch = math.ceil(size / row["batch"])
        assert abs(row["epochs"] * epoch - row["iterations"]) <= epoch
    # Table 1 of Hyland and Tople: delta of table 3 is one over the training size.
    sizes, deltas = (published.exhibit(f"intrinsic-privacy/table-{i}").numbers for i in (1, 3))
    for name in sizes:
        column = name if name in deltas else f"{name}-unscaled"
        assert verdict(1 / sizes[name]["train"], deltas[column]["delta"]) == "matches"


def test_an_unknown_paper_exhibit_or_number_is_named_with_what_there_is():
    refused("paper", published.exhibit, "idp/table-5")
    refused("paper", published.exhibits, paper="idp")
    refused("name", published.exhibit, "idp-sgd/table-55")
    with pytest.raises(ValueError, match="key"):
        published.exhibit("idp-sgd/table-5")["mnist.tau"]
    with pytest.raises(TypeError):
        published.exhibit("idp-sgd/table-5").numbers["mnist"] = 0
