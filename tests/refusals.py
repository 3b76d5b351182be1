"""One way to say which values of an argument are refused."""

import re

import pytest


def refuses(call, good, **bad):
    """Check that `call(**good)` refuses each of the `bad` values of an argument by a ValueError that names it.

    Args:
        call: What is called with keyword arguments alone.
        good: Arguments that `call` takes.
        bad: For each argument a list of values, which replace the good one, one at a time.
    """
    for name, values in bad.items():
        for value in values:
            try:
                call(**{**good, name: value})
            except ValueError as error:
                assert re.search(rf"\b{name}\b", str(error)), f"{name}={value!r} is refused by: {error}"
            else:
                pytest.fail(f"{name}={value!r} was accepted")
