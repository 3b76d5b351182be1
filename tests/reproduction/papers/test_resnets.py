"""Configurations of the paper's own networks, on networks and data that are small."""

import dataclasses
import pathlib

import pytest
import torch

from dpcompanion.reproduction import experiments, published, scoreboard
from dpcompanion.reproduction.papers import yu
from dpcompanion.reproduction.papers.per_instance_accounting import resnets, runs

TINY = resnets.Resnet("mnist-5k", 400, 1, None, reference=0, looks=1, model="linear")


def test_a_setting_that_names_a_network_trains_it_and_one_that_does_not_trains_the_small_one(monkeypatch):
    asked = []

    def build(model, found, seed):
        asked.append(model)
        raise RuntimeError

    monkeypatch.setattr(yu, "build", build)
    for setting in (runs.DIGITS, resnets.Resnet()):
        with pytest.raises(RuntimeError):
            runs.run_setting(setting, 0, torch.device("cpu"))
    assert asked == ["mlp", "resnet20"]


def test_shares_and_distributions_are_of_each_setting():
    config = resnets.Several({"one": TINY, "two": dataclasses.replace(TINY, median_multiple=0.1)})
    run = experiments.Run(config, torch.device("cpu"), pathlib.Path("nowhere"), "")
    shares, (values, arrays) = resnets.text_worst_case_share(config, run), resnets.figure_4(config, run)
    assert 0 <= shares["one"] < shares["two"] <= 1 and arrays.keys() == {"one", "two"}
    assert all(0 < values[f"{name}.min"] <= values[f"{name}.max"] <= values[f"{name}.worst_case"] for name in arrays)


def test_steps_and_noise_are_those_of_appendix_b():
    for setting, name, sizes in (
        (resnets.CIFAR10, "cifar10", 50_000),
        (resnets.MNIST_RESNET, "mnist", 60_000),
        (resnets.UTKFACE_AGE, "utkface", 15_000),
    ):
        rate, noise, steps = runs.SETTINGS[name]
        plan = runs.make_plan(setting, sizes, 1.0)
        assert plan.sample_rate == rate and plan.noise_multiplier == noise
        assert abs(plan.steps - steps) <= plan.steps_per_epoch // 2


def test_what_is_left_to_run_has_a_command_that_is_there():
    for one in scoreboard.standings():
        if one.to_do is not None:
            for command in one.to_do[1].split(" && "):
                words = command.split()
                assert words[:2] == ["dpcompanion", "run"], (one.exhibit.name, command)
                assert "paper" in experiments.get(words[2]).presets


def test_a_part_is_a_part_of_something():
    for exhibit in published.exhibits(ours=True):
        if exhibit.part_of:
            assert published.exhibit(f"{exhibit.paper}/{exhibit.part_of}").kind != published.OURS
            assert "paper" in experiments.get(exhibit.name).presets
