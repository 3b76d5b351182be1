"""The reference lists every public name, with its documentation."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import dpcompanion

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(dpcompanion.__path__, "dpcompanion.")
    if not any(part.startswith("_") for part in info.name.split("."))
)
# The command line documents itself; an experiment is looked up by the name of its exhibit.
LIBRARY = [
    module
    for module in MODULES
    if module != "dpcompanion.cli" and not module.startswith("dpcompanion.reproduction.papers")
]


def directives():
    """Module -> its options, for each `automodule` on the pages of the reference."""
    found = {}
    for page in sorted((ROOT / "book" / "api").glob("*.md")):
        for name, options in re.findall(
            r"^\.\. automodule:: (\S+)\n((?:   .*\n)*)",
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            assert name not in found, f"{name} stands on two pages, or twice on {page.name}"
            found[name] = options
    return found


def public(module):
    """The functions and classes that a module or package offers: those of `__all__` if it has one,
    else its own.
    """
    found = importlib.import_module(module)
    values = {
        name: getattr(found, name)
        for name in getattr(found, "__all__", vars(found))
        if not name.startswith("_")
    }
    chosen = {
        name: value
        for name, value in values.items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    if hasattr(found, "__all__"):
        return chosen
    return {name: value for name, value in chosen.items() if value.__module__ == module}


def listed():
    """(module, name) of everything that the pages list."""
    found = set()
    for module, options in directives().items():
        if ":members:" in options:
            excluded = re.findall(
                r"\w+", (re.search(r":exclude-members:(.*)", options) or ["", ""])[1]
            )
            found |= {
                identity(value) for name, value in public(module).items() if name not in excluded
            }
    for page in (ROOT / "book" / "api").glob("*.md"):
        for module, name in re.findall(
            r"^\.\. auto(?:class|function):: ([\w.]+)\.(\w+)$",
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            found.add(identity(getattr(importlib.import_module(module), name)))
    return found


def identity(value):
    return value.__module__, value.__qualname__


@pytest.mark.parametrize("module", LIBRARY)
def test_public_names_are_documented_and_on_a_page_of_the_reference(module):
    # What a package leaves out of its `__all__` is its own business.
    package = importlib.import_module(module.rpartition(".")[0])
    offered, found = getattr(package, "__all__", None), listed()
    for name, value in public(module).items():
        if module.count(".") == 1 or offered is None or name in offered:
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"
            assert identity(value) in found, f"{module}.{name} is on no page of book/api"


@pytest.mark.parametrize(
    "module", [module for module in LIBRARY if hasattr(importlib.import_module(module), "__all__")]
)
def test_what_a_package_offers_has_an_example(module):
    for name, value in public(module).items():
        methods = vars(value).values() if inspect.isclass(value) else ()
        texts = [value.__doc__, *(one.__doc__ for one in methods if inspect.isfunction(one))]
        around = importlib.import_module(value.__module__).__doc__
        assert any(">>>" in (text or "") for text in texts) or (
            name in around and ">>>" in around
        ), f"{module}.{name}"


def test_every_module_of_the_papers_is_on_a_page_of_the_reference():
    papers = "dpcompanion.reproduction.papers."
    assert {module for module in MODULES if module.startswith(papers)} <= set(directives())


def test_every_page_of_the_reference_is_about_modules_that_exist():
    assert directives() and set(directives()) <= set(MODULES)
