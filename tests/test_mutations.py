"""The faults of tests/mutations.py are kept up: each text stands once in the package, and what
replaces it compiles.
"""

import ast
import functools

import pytest

from .mutations import FAULTS, ROOT


@functools.cache
def parsed(file):
    """A file's syntax tree: several faults share one."""
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@functools.cache
def dumped(file):
    return ast.dump(parsed(file))


def test_there_are_forty_faults_and_none_twice():
    assert len(FAULTS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.text, fault.faulty) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_stands_once_and_its_tests_exist(fault):
    assert fault.found() == 1, (
        f"write the fault in tests/mutations.py again: {fault.file} has changed"
    )
    whole = (ROOT / "dpcompanion" / fault.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(whole.replace(fault.text, fault.faulty))) != dumped(
        f"dpcompanion/{fault.file}"
    )
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in {getattr(node, "name", None) for node in parsed(file).body}
