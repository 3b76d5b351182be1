"""What a record depends on, in a package of two modules that stands in for the papers."""

import dataclasses
import importlib
import subprocess
import sys
import textwrap
import time

import pytest

from dpcompanion.reproduction import experiments, sources

SHARED = '''
    """What two papers share."""
    import dataclasses, functools

    STEPS = (1, 2)
    LOADERS = {"small": lambda: load(3)}
    PRESETS = {"small": 1}


    @functools.cache
    def load(n):
        """Loads."""
        return list(range(n))   # so many


    def aside():
        return "unused"


    @dataclasses.dataclass
    class Trained:
        """A run."""
        steps: int = 1

        def cost(self, factor=len(STEPS)):
            return self.steps * factor


    @dataclasses.dataclass(frozen=True)
    class Task:
        name: str = "small"
        size: int = 10

        @property
        def rate(self):
            return 1 / self.size
'''
PAPER = '''
    import dataclasses
    from math import sqrt as root
    from standin import shared as second
    from standin.shared import Task, aside as unused, PRESETS

    QUICK = {"small": Task()}


    @dataclasses.dataclass(frozen=True)
    class Config:
        tasks: dict
        runs: int = 3


    def experiment(name, **presets):
        return lambda function: function


    def helper(task, aside=0):
        if task:
            return helper(None)
        return second.Trained().cost(), second.LOADERS, [unused for unused in ()]


    def tidy(x):
        return x


    def other():
        return unused()


    @experiment("exhibit", quick=Config(QUICK))
    def exhibit(config, run):
        """The exhibit."""
        found: int = tidy(root(4))
        return {name: (helper(task), found, task.rate) for name, task in config.tasks.items()}


    @experiment("another", quick=Config(QUICK, runs=PRESETS["small"]))
    def another(config, run):
        return exhibit(config, run)
'''


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """A function that writes the package with some text replaced, and hashes its experiments."""
    folder = tmp_path / "standin"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "OWN", "standin")

    def hashed(old="", new="", *, of="exhibit"):
        found = 0
        for file, text in {"__init__": "", "shared": SHARED, "paper": PAPER}.items():
            text = textwrap.dedent(text)
            found += text.count(old) if old else 1
            (folder / f"{file}.py").write_text(text.replace(old, new) if old else text)
        assert found
        for name in ("standin.paper", "standin.shared", "standin"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sources.forget()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        paper = importlib.import_module("standin.paper")
        sys.dont_write_bytecode = before
        closure = sources.closure(getattr(paper, of), paper.Config(paper.QUICK))
        return sources.code_hash(getattr(paper, of), paper.Config(paper.QUICK)), set(closure)

    yield hashed
    sources.forget()
    for name in ("standin.paper", "standin.shared", "standin"):
        sys.modules.pop(name, None)


def test_the_closure_is_what_is_used_by_name_through_modules_and_methods(standin):
    _, found = standin()
    assert found == {
        "standin.paper.exhibit",
        "standin.paper.helper",
        "standin.paper.tidy",
        "standin.shared.Trained",
        "standin.shared.STEPS",
        "standin.shared.LOADERS",
        "standin.shared.load",
        "standin.shared.Task()",
    }
    assert standin(of="another")[1] == found | {"standin.paper.another"}


@pytest.mark.parametrize(
    "old, new",
    [
        ("helper(None)", "None"),
        ("range(n)", "range(n + 1)"),
        ("self.steps * factor", "self.steps + factor"),
        ("STEPS = (1, 2)", "STEPS = (1, 3)"),
        ("load(3)", "load(4)"),
        ("1 / self.size", "2 / self.size"),
        ("@functools.cache\n", ""),
        ("steps: int = 1", "steps: int = 2"),
        ("root(4)", "root(9)"),
        ("factor=len(STEPS)", "factor=max(STEPS)"),
    ],
)
def test_a_change_of_what_an_experiment_uses_changes_its_hash(standin, old, new):
    assert standin()[0] != standin(old, new)[0]
    assert standin(of="another")[0] != standin(old, new, of="another")[0]


@pytest.mark.parametrize(
    "old, new",
    [
        ('"unused"', '"changed"'),
        ("return unused()", "return 3"),
        ("# so many", "# as many as asked for"),
        ('"""Loads."""', '"""Loads numbers."""'),
        ('    """The exhibit."""\n', ""),
        ("found: int = ", "found = "),
        ("size: int = 10", "size: int = 20"),
        ("runs: int = 3", "runs: int = 4"),
        ("Task()}", "Task(size=3)}"),
        ('PRESETS = {"small": 1}', 'PRESETS = {"small": 2}'),
        ("(config, run):", "(config, run) -> dict:"),
        ("steps: int = 1", "steps: float = 1"),
        ("root(4)", "root( 4 )"),
        ("    return list(range(n))", "\n    return list(range(n))"),
        ('@experiment("exhibit", quick=Config(QUICK))', '@experiment("exhibit", quick=Config({}))'),
    ],
)
def test_what_an_experiment_does_not_use_and_presets_and_layout_leave_the_hash(standin, old, new):
    assert standin()[0] == standin(old, new)[0]


def test_a_move_to_another_module_leaves_the_hash(standin, monkeypatch):
    before = standin()[0]
    tidy = "    def tidy(x):\n        return x\n"
    monkeypatch.setattr(sys.modules[__name__], "PAPER", PAPER.replace(tidy, "    from standin.shared import tidy\n"))
    monkeypatch.setattr(sys.modules[__name__], "SHARED", SHARED + tidy)
    after, found = standin()
    assert after == before and {"standin.shared.tidy"} < found


def test_a_module_that_is_used_whole_counts_whole(standin):
    assert "standin.shared.aside" in standin("second.LOADERS", "vars(second)")[1]


def test_a_name_that_is_another_inside_a_function_is_not_the_modules(standin):
    assert "standin.shared.aside" not in standin()[1]
    assert "standin.shared.aside" in standin("helper(None)", "helper(unused)")[1]


def test_functions_inside_functions_are_hashed_too():
    def first(config, run):
        return dataclasses.asdict(config)

    def second(config, run):
        return dataclasses.astuple(config)

    assert sources.code_hash(first) == sources.code_hash(first) != sources.code_hash(second)


def test_what_was_missed_when_it_was_typed_is_found():
    def names(exhibit):
        found = experiments.get(exhibit)
        return {name.removeprefix(sources.OWN + ".") for name in sources.closure(found.function)}

    assert "gradients_look_alike.mean_updates.figure_8" in names("gradients-look-alike/figure-4")
    figure_6 = names("gradients-look-alike/figure-6")
    assert {f"gradients_look_alike.runs.{one}" for one in ("contributions", "ORDERS", "_inputs")} <= figure_6
    assert "idp_sgd.training.parameters" in names("idp-sgd/table-6")
    assert "intrinsic_privacy.grids._adult" in names("intrinsic-privacy/table-3")  # through a table of loaders
    for name in experiments.names():
        assert not [one for one in names(name) if one.rpartition(".")[2] in ("QUICK", "QUICK_MEANS", "FIGURE_1")], name


def test_all_hashes_together_take_less_than_a_second():
    found = [experiments.get(name) for name in experiments.names()]
    sources.forget()
    started = time.process_time()
    assert len({experiment.code_hash for experiment in found}) > 60
    assert time.process_time() - started < 3  # 0.6 on the machine that this was written on, with slack for slow ones


def test_the_hash_is_the_same_in_every_process():
    name = "intrinsic-privacy/table-3"
    code = f"from dpcompanion.reproduction import experiments; print(experiments.get({name!r}).code_hash)"
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout.strip()
        for seed in "12"
    ]
    assert said == [experiments.get(name).code_hash] * 2
