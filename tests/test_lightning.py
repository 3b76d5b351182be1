"""The program for Lightning: the steps of a plain loop, to the bit, and every budget kept."""

import pathlib
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

from dpcompanion.data import import_torchvision

import_torchvision()  # Lightning imports it, and beside a CPU build of PyTorch that takes help

pytest.importorskip("lightning.pytorch", reason="the extra 'lightning' is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "examples" / "lightning_with_budgets.py"


def names_of(program):
    names = {"__name__": "program"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, str(PROGRAM), "exec"), names)
    return names


def test_the_program_takes_the_steps_of_a_plain_loop_and_keeps_every_budget(capsys):
    program = PROGRAM.read_text(encoding="utf-8").replace("SEED = None", "SEED = 3")
    found = names_of(program)
    assert found["trainer"].global_step == 3 * len(found["loader"]) == 30
    assert "steps: 30" in capsys.readouterr().out
    plain = names_of(re.split(r"^trainer = ", program, flags=re.MULTILINE)[0])
    network, optimizer = plain["network"], plain["optimizer"]
    for _ in range(3):
        for x, y in plain["loader"]:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    for one, other in zip(found["network"].parameters(), network.parameters()):
        assert torch.equal(one, other)
    epsilons = plain["engine"].get_epsilons(1e-4)
    assert torch.equal(found["epsilons"], epsilons) and bool((epsilons <= found["budgets"]).all())
    assert bool((epsilons > 0.9 * found["budgets"]).all())


def test_without_a_seed_two_runs_differ():
    program = PROGRAM.read_text(encoding="utf-8")
    first, second = (next(iter(names_of(program)["network"].parameters())) for _ in range(2))
    assert not torch.equal(first, second)
