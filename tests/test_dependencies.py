"""The library knows nothing of the reproduction; modules import from the layers below; little comes
from outside.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

import dpcompanion

ROOT = pathlib.Path(dpcompanion.__file__).parent
WING = "dpcompanion.reproduction"

# From the ground up; a module may import from the layers below its own, wherever it does.
LIBRARY = (
    {"_checks", "_devices", "_files", "_norms", "_progress", "_rounding", "_types"},
    {"seeds"},
    {"accounting", "attacks", "data"},
    {"filters", "idp", "individual", "output_perturbation", "per_instance"},
    {"mechanism"},
    {"gradients"},
    {"training"},
    {"audit", "engine", "huggingface", "pate", "release", "testing"},
    {"estimator"},
    {"reproduction"},
    {"cli"},
    {"__main__"},
)
REPRODUCTION = (
    {"intervals", "moving", "plotting", "provenance", "published", "storage", "workers"},
    {"pieces", "records"},
    {"comparison", "places", "runs"},
    {"findings"},
    {"experiments"},
    {"papers", "states"},
    {"scoreboard"},
    {"chapters", "exports", "mosaic"},
)
# But for the name of a type, and for a name that is handed on where Opacus is.
UPWARDS = {
    ("dpcompanion.individual.accountant", "dpcompanion.mechanism.plan.DPSGDPlan"),
    ("dpcompanion.filters.exact", "dpcompanion.mechanism.plan.DPSGDPlan"),
    ("dpcompanion.filters.renyi", "dpcompanion.mechanism.plan.DPSGDPlan"),
    ("dpcompanion.idp.__init__", "dpcompanion.engine.IndividualizedPrivacyEngine"),
}
CORE = {"torch", "numpy", "scipy", "cryptography", "dpcompanion"}
# Packages whose text lists their modules; that of others lists functions and classes.
LISTED = ("", "gradients", "mechanism", "per_instance", "reproduction", "training")
BEYOND_THE_CORE = {"engine": {"opacus"}, "huggingface": {"transformers"}, "estimator": {"sklearn"}}


def nodes(tree, inside_functions):
    """All nodes below one; without those in functions what runs when a module is loaded, in `try`
    and `if`, too.
    """
    for node in ast.iter_child_nodes(tree):
        if inside_functions or not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        ):
            yield node
            yield from nodes(node, inside_functions)


@functools.cache
def trees():
    """{(the parts of a module's name): what is parsed of it} for every file."""
    return {
        file.relative_to(ROOT.parent).with_suffix("").parts: ast.parse(file.read_bytes())
        for file in sorted(ROOT.rglob("*.py"))
    }


@functools.cache
def imports(*, inside_functions):
    """(module, what it imports) for every file, as dotted names."""
    return tuple(_imports(inside_functions))


def _imports(inside_functions):
    for place, tree in trees().items():
        module, package = ".".join(place), place[:-1]
        for node in nodes(tree, inside_functions):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module
                if node.level:
                    base = ".".join(
                        filter(None, (*package[: len(package) - node.level + 1], node.module))
                    )
                yield from ((module, f"{base}.{alias.name}") for alias in node.names)


def within(module, wing):
    return module == wing or module.startswith(wing + ".")


def part(module, of):
    """The part of a package that a dotted name lies in: ("dpcompanion.training.loop",
    "dpcompanion") is "training".
    """
    return module.removeprefix(of + ".").partition(".")[0]


def parts(folder):
    return {
        path.stem
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    } - {"__init__"}


def test_every_part_has_its_layer():
    assert parts(ROOT) == set.union(*LIBRARY)
    assert parts(ROOT / "reproduction") == set.union(*REPRODUCTION)


@pytest.mark.parametrize("package", LISTED)
def test_the_text_of_a_package_names_each_of_its_public_modules(package):
    folder = ROOT / package
    text = ast.get_docstring(trees()[("dpcompanion", *filter(None, [package]), "__init__")])
    for name in parts(folder):
        assert private(name) or name == "__main__" or re.search(rf"[`.]{name}`", text), name


def test_dependencies_run_downwards_only():
    upwards = set()
    for of, layers in (("dpcompanion", LIBRARY), (WING, REPRODUCTION)):
        height = {name: index for index, names in enumerate(layers) for name in names}
        for module, name in imports(inside_functions=True):
            mine, other = part(module, of), part(name, of)
            inside = within(module, of) and within(name, of) and mine in height and other in height
            if inside and mine != other and height[other] >= height[mine]:
                upwards.add((module, name))
    assert upwards == UPWARDS


def test_budgets_and_the_engine_stand_in_no_circle():
    """`dpcompanion.idp` names the engine, which imports the modules behind that name, and never the
    name.
    """
    for module, name in imports(inside_functions=True):
        if within(module, "dpcompanion.idp") and module != "dpcompanion.idp.__init__":
            assert not within(name, "dpcompanion.engine"), f"{module} imports {name}"
        if within(module, "dpcompanion.engine") and within(name, "dpcompanion.idp"):
            assert name.split(".")[2] in parts(ROOT / "idp"), f"{module} imports {name}"


@pytest.mark.slow
def test_without_opacus_budgets_are_found_and_the_engine_says_what_to_install():
    code = """
import sys
sys.modules["opacus"] = None
from dpcompanion import idp
run = {"target_delta": 1e-5, "sample_rate": 1.0, "steps": 1}
print(idp.scale_parameters([1.0], [1], max_grad_norm=2.0, **run).max_grad_norms.tolist())
engine = "from dpcompanion.idp import IndividualizedPrivacyEngine"
for statement in ("import dpcompanion.engine", engine):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True
    )
    needs = "the engine stands on Opacus: pip install 'dpcompanion[opacus]'"
    assert found.stdout.splitlines() == ["[2.0]", needs, needs]


def test_the_library_never_imports_the_reproduction():
    for module, name in imports(inside_functions=True):
        if not within(module, WING) and module != "dpcompanion.cli":
            assert not within(name, WING), f"{module} imports {name}"


def private(name):
    return name.startswith("_") and not name.endswith("__")


def test_no_module_uses_the_private_names_of_another():
    """What modules share is a public name of one of them, whether or not its package exports it."""
    found, parsed = [], {".".join(place): tree for place, tree in trees().items()}
    shared = {}  # module: the short names of the modules that it imports
    for module, name in imports(inside_functions=True):
        short = name.rpartition(".")[2]
        if name in parsed:
            shared.setdefault(module, set()).add(short)
        elif within(name, "dpcompanion") and private(short):
            found.append(f"{module} imports {name}")
    for module, shorts in shared.items():
        found += [
            f"{module} uses {node.value.id}.{node.attr}"
            for node in ast.walk(parsed[module])
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in shorts
            and private(node.attr)
        ]
    assert not found


def test_no_paper_imports_another():
    papers = {
        path.name
        for path in (ROOT / "reproduction" / "papers").iterdir()
        if (path / "printed.toml").is_file()
    }
    assert len(papers) == 5
    for module, name in imports(inside_functions=True):
        mine, other = (part(one, f"{WING}.papers") for one in (module, name))
        if within(module, f"{WING}.papers") and within(name, f"{WING}.papers") and other in papers:
            assert mine == other, f"{module} imports {name}"


def test_loading_needs_the_core_only():
    for module, name in imports(inside_functions=False):
        top = name.split(".")[0]
        allowed = top in sys.stdlib_module_names or top in CORE | BEYOND_THE_CORE.get(
            part(module, "dpcompanion"), set()
        )
        assert allowed, f"{module} imports {top} as it is loaded"
