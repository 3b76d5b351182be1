"""Rooms know those below them, and what they need from outside is little."""

import ast
import pathlib
import sys

import dpcompanion

ROOT = pathlib.Path(dpcompanion.__file__).parent

# From the ground up; a room may import, when it is loaded, from the floors below its own.
FLOORS = (
    {"_checks", "_files", "_progress"},
    {"accounting", "attacks", "data", "ensembles", "plotting", "published"},
    {"_engine_proof", "filters", "idp", "individual", "intervals", "output_perturbation", "pate", "per_instance",
     "records", "release", "training"},
    {"comparison", "engine"},
    {"experiments"},
    {"cli", "scoreboard"},
)
CORE = {"torch", "numpy", "scipy", "dpcompanion"}
BEYOND_THE_CORE = {"_engine_proof": {"opacus"}, "engine": {"opacus"}}


def imports():
    """(room, what it imports as it is loaded) for every file."""
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).with_suffix("").parts
        package = ("dpcompanion", *place[:-1])
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                yield from ((place[0], alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module
                if node.level:
                    base = ".".join(filter(None, (*package[:len(package) - node.level + 1], node.module)))
                yield from ((place[0], f"{base}.{alias.name}" if base == "dpcompanion" else base)
                            for alias in node.names)


def test_every_room_has_its_floor():
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py"
             or (path / "__init__.py").is_file()} - {"__init__"}
    assert rooms == set.union(*FLOORS)


def test_dependencies_run_downwards_only():
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    for room, name in imports():
        if name.startswith("dpcompanion."):
            other = name.split(".")[1]
            assert other == room or floor[other] < floor[room], f"{room} imports {other}"


def test_loading_needs_torch_numpy_and_scipy_only():
    for room, name in imports():
        top = name.split(".")[0]
        allowed = top in sys.stdlib_module_names or top in CORE | BEYOND_THE_CORE.get(room, set())
        assert allowed, f"{room} imports {top} as it is loaded"
