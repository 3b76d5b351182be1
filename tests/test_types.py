"""Every public function of the library, and of what makes the reproduction, says what it takes and
what it gives.
"""

import importlib
import inspect
import pkgutil

import pytest

import dpcompanion.reproduction

MODULES = sorted(
    info.name
    for info in pkgutil.iter_modules(dpcompanion.__path__)
    if not info.name.startswith("_") and info.name not in ("cli", "reproduction")
)
# What records, compares and shows; exhibits are functions of a configuration and a run, all of
# them.
MACHINERY = sorted(
    f"reproduction.{info.name}"
    for info in pkgutil.iter_modules(dpcompanion.reproduction.__path__)
    if info.name != "papers"
)


def functions(module):
    """(name, function) of what a module or package offers: functions, and methods and properties of
    its classes.
    """
    names = getattr(
        module,
        "__all__",
        [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ],
    )
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or not getattr(value, "__module__", "").startswith("dpcompanion"):
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for member, found in vars(value).items():
                found = getattr(found, "__func__", getattr(found, "fget", found))
                found = inspect.unwrap(found) if callable(found) else found
                if not inspect.isfunction(found) or found.__module__ != value.__module__:
                    continue
                # What `dataclasses` and `NamedTuple` make has types of its own.
                if "<" not in found.__code__.co_filename and (
                    member == "__init__" or not member.startswith("_")
                ):
                    yield f"{name}.{member}", found


@pytest.mark.parametrize("name", [*MODULES, *MACHINERY, "cli"])
def test_public_functions_have_types(name):
    module = importlib.import_module(f"dpcompanion.{name}")
    for spoken, function in functions(module):
        signature = inspect.signature(function)
        bare = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert not bare, f"{name}: {spoken} has no types for {', '.join(bare)}"
        given = signature.return_annotation is not signature.empty or spoken.endswith("__init__")
        assert given, f"{name}: {spoken} does not say what it gives"
