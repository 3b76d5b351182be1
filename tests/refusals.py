"""Ways to say what is refused: values of an argument by its name, a call in words."""

import re

import pytest


def refuses(call, good, **bad):
    """Check that `call(**good)` refuses each of the `bad` values of an argument by a ValueError
    that names it.

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
                assert re.search(rf"\b{name}\b", str(error)), (
                    f"{name}={value!r} is refused by: {error}"
                )
            else:
                pytest.fail(f"{name}={value!r} was accepted")


def refused(words, call, /, *given, **options):
    """Check that a call is refused by a ValueError in these words, a regular expression."""
    with pytest.raises(ValueError, match=words):
        call(*given, **options)
