"""What the engine's checks of the loop's loss cost: processor time of a step, on random data.

An epoch of eight steps with the loader, by Opacus's hooks: the engine compares what comes back to
the model's outputs with standard losses (*compared*), with the losses of the criterion that it was
given (*criterion*), or takes the loop's word (*trust_loss*); beside them Opacus's own engine. The
models are a linear one of 20 features and the MNIST CNN in batches of 512, and a transformer of
526,090 parameters on 64 tokens in batches of 32. Ways take turns, epoch by epoch, and medians are
shown; `ratio` is the time over that of *trust_loss*. What is looked at in batches 1, 2, 4, 8, ...
only is in the first epochs, and hardly in a median.
"""

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._turns import timings
from benchmarks.networks import Transformer
from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.training import models

STEPS = 8


def _rows(n):
    return torch.randn(n, 20), 2


def _images(n):
    return torch.randn(n, 1, 28, 28), 10


def _texts(n):
    return torch.randint(1000, (n, 64)), 10


MODELS = {
    "linear": (lambda: nn.Linear(20, 2), _rows, 512),
    "mnist_cnn": (models.mnist_cnn, _images, 512),
    "transformer": (Transformer, _texts, 32),
}
WAYS = {
    "compared": {},
    "criterion": {"criterion": nn.CrossEntropyLoss()},
    "trust_loss": {"trust_loss": True},
}


def maker(name, way):
    """A function that makes a block: one epoch of steps."""

    def make():
        torch.manual_seed(0)
        build, draw, batch = MODELS[name]
        x, classes = draw(STEPS * batch)
        data = TensorDataset(x, torch.randint(classes, (len(x),)))
        model = build()
        common = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
            "data_loader": DataLoader(data, batch_size=batch),
            "max_grad_norm": 1.0,
        }
        if way == "Opacus":
            from opacus import PrivacyEngine

            made = PrivacyEngine().make_private(noise_multiplier=1.0, **common)
        else:
            made = IndividualizedPrivacyEngine(accountant="rdp").make_private_with_budgets(
                target_epsilons=8.0, target_delta=1e-5, epochs=200, **WAYS[way], **common
            )
        module, optimizer, loader = made[0], made[1], made[-1]
        loss = made[2] if way == "criterion" else nn.CrossEntropyLoss()

        def epoch():
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(module(inputs), targets).backward()
                optimizer.step()

        return epoch

    return make


def run():
    """The rows of the table."""
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS:
            times = timings({way: maker(name, way) for way in (*WAYS, "Opacus")}, 1, 9)
            base = times["trust_loss"][1]
            rows += [
                {"model": name, "way": way, "CPU ms a step": 1e3 * cpu / STEPS, "ratio": cpu / base}
                for way, (_, cpu) in times.items()
            ]
    return rows


if __name__ == "__main__":
    from benchmarks.__main__ import table

    print(table(run()))
