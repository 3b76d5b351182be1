"""Bounds in words: fewer digits, rounded to the side on which the bound still holds.

In decimals, since a product of floats may itself be rounded to the wrong side.
"""

import decimal
import math
from collections.abc import Callable
from typing import Any

_ROUNDING = {math.ceil: decimal.ROUND_CEILING, math.floor: decimal.ROUND_FLOOR}


def rounded(value: float, toward: Callable[[float], int], digits: int = 6) -> float:
    """`value` to `digits` significant digits, rounded by math.ceil or math.floor: never past the
    other side of it.

    >>> rounded(1.82826712, math.ceil), rounded(0.0141524479, math.floor), rounded(254, math.floor)
    (1.82827, 0.0141524, 254)
    """
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return value
    context = decimal.Context(prec=digits, rounding=_ROUNDING[toward])
    return float(context.create_decimal(repr(float(value))))


def exactly(value: float) -> str:
    """All digits of a number, as few as tell it from any other.

    >>> exactly(1.23456789e-05), exactly(8.0), exactly(1000000)
    ('1.23456789e-05', '8', '1000000')
    """
    return repr(value if isinstance(value, int) else float(value)).removesuffix(".0")


def with_places(value: float, toward: Callable[[float], int]) -> str:
    """`value` with three decimal places, rounded by math.ceil or math.floor.

    >>> (
    ...     with_places(0.9170001, math.ceil),
    ...     with_places(0.917, math.ceil),
    ...     with_places(1e-9, math.ceil),
    ... )
    ('0.918', '0.917', '0.001')
    """
    if not math.isfinite(value):
        return "infinite"
    context = decimal.Context(prec=400)  # enough for the largest float
    exact = decimal.Decimal(repr(float(value)))
    return str(
        exact.quantize(decimal.Decimal("0.001"), rounding=_ROUNDING[toward], context=context)
    )


def epsilons_in_words(epsilons: Any) -> str:
    """Epsilons in words, rounded up to three decimals: one, or from the least to the largest.

    >>> epsilons_in_words(0.9170001), epsilons_in_words([1.0, 2.5])
    ('0.918', '1.000 to 2.500')
    """
    import torch  # here, since the command line rounds without it

    epsilons = torch.as_tensor(epsilons, dtype=torch.float64)
    low, high = (with_places(float(x), math.ceil) for x in (epsilons.min(), epsilons.max()))
    return high if low == high else f"{low} to {high}"
