"""Long runs of three papers go on from their last whole epoch, and end as if nothing had happened,
and keep accounts on their device.
"""

import dataclasses

import numpy as np
import pytest
import torch

from dpcompanion.reproduction import experiments, runs
from dpcompanion.reproduction.papers import yu
from dpcompanion.reproduction.papers.gradients_look_alike import runs as alike
from dpcompanion.reproduction.papers.individual_accounting import runs as second
from dpcompanion.reproduction.papers.per_instance_accounting import runs as first
from dpcompanion.training import Callbacks, train

WATCHED = dataclasses.replace(
    alike.PLAIN_DIGITS, epochs=2, batch_size=400, points=5, stops=4, drops=(1,), momentum=0.5
)
TASK = dataclasses.replace(
    yu.MNIST_5K, model="linear", batch_size=400, epochs=2, reference=20, cosine=True
)
SETTING = dataclasses.replace(
    first.DIGITS, batch_size=400, epochs=2, looks=2, reference=20, noise_multiplier=2.0
)

CASES = {
    "gradients look alike": (alike, lambda run: vars(alike.watched(WATCHED, run))),
    "individual accounting": (second, lambda run: vars(second.trained(TASK, 0, run))),
    "per-instance accounting": (first, lambda run: vars(first.trained(SETTING, 0, run))),
}


@pytest.mark.parametrize("paper", CASES)
@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_and_ends_the_same(paper, tmp_path, monkeypatch):
    module, trained = CASES[paper]
    monkeypatch.setattr(runs, "KEPT", 0)  # all pieces on the disk, however short they are

    def run(folder):
        monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / folder))
        return trained(experiments.Run(None, torch.device("cpu"), tmp_path / folder))

    whole, steps = run("whole"), []

    def cut(*arguments, callbacks, **options):
        def on_step(state):
            steps.append(state.step)
            if callbacks.on_step is not None:
                callbacks.on_step(state)
            if len(steps) == 13:  # an epoch has ten
                raise KeyboardInterrupt

        return train(
            *arguments, callbacks=Callbacks(on_step=on_step, on_epoch=callbacks.on_epoch), **options
        )

    monkeypatch.setattr(module, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        run("cut")
    again = run("cut")
    assert steps == [*range(1, 14), *range(11, 21)]
    assert whole.keys() == again.keys()
    for name in whole.keys() - {"seconds", "plan", "found", "task"}:
        np.testing.assert_array_equal(whole[name], again[name], err_msg=name)


@pytest.mark.parametrize(
    "module, start",
    [
        (second, lambda *of: second.run_task(TASK, *of)),
        (first, lambda *of: first.run_setting(SETTING, *of)),
    ],
)
def test_accounts_of_runs_lie_on_the_device_of_the_run(module, start, monkeypatch):
    class Begun(Exception):
        pass

    def begin(*arguments, trackers, **options):
        assert [tracker.accountant.device for tracker in trackers] == [device, device]
        raise Begun

    device = torch.device("cpu", 0)  # is not torch.device("cpu"), where accounts are by default
    monkeypatch.setattr(module, "train", begin)
    with pytest.raises(Begun):
        start(0, device)
