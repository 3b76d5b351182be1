"""The faults of tests/mutations.py are kept up: each text stands once in the package, and what replaces it compiles."""

import ast
from pathlib import Path

import pytest

from .mutations import FAULTS, ROOT


def test_there_are_forty_faults_and_none_twice():
    assert len(FAULTS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.text, fault.faulty) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_stands_once_and_its_tests_exist(fault):
    assert fault.found() == 1, f"write the fault in tests/mutations.py again: {fault.file} has changed"
    whole = (ROOT / "dpcompanion" / fault.file).read_text(encoding="utf-8")
    faulty = ast.parse(whole.replace(fault.text, fault.faulty))
    assert ast.dump(faulty) != ast.dump(ast.parse(whole))
    for test in fault.tests:
        file, _, name = test.partition("::")
        names = [
            node.name for node in ast.parse(Path(ROOT / file).read_text(encoding="utf-8")).body if hasattr(node, "name")
        ]
        assert name in names
