"""Individualised budgets: finding parameters, and a training step with them.

*Parameters*: as table 15 of Boenisch et al. 2023, MNIST (rate 1/118, 9,440 steps, delta 1e-5) with
budgets evenly spaced from 1 to 6 and groups of equal size; by RDP as there, where the paper reports
277.52 s (Sample) and 78.85 s (Scale) for 128 groups; and by loss distributions. The plain loop
searches one group after the other with `find_noise_multiplier` or `find_sample_rate`; its time is
that of eight groups, scaled up. *Step*: the MNIST CNN (26,010 parameters, float32), batches of 512
with the loader, random data, in Opacus: its own `PrivacyEngine` against ours with one budget for
all and with three budgets (Scale; Sample's steps differ in who is drawn only).

Ways take turns, and the medians are shown. `ratio` is the time over the plain loop's (parameters)
or over Opacus's (steps). `CPU s` adds up all threads.
"""

import warnings

import torch
from scipy.optimize import brentq
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._turns import timings
from dpcompanion import accounting, idp
from dpcompanion.training import models

RUN = dict(target_delta=1e-5, sample_rate=1 / 118, steps=9440)
GROUPS, BATCH, STEPS = 8, 512, 3


def budgets(n):
    return torch.linspace(1, 6, n, dtype=torch.float64)


def ours(method, groups, accountant="rdp"):
    extra = {"max_grad_norm": 0.2} if method == "scale" else {}
    search = {"sample": idp.sample_parameters, "scale": idp.scale_parameters}[method]
    return lambda: (
        lambda: search(budgets(groups), torch.ones(groups), accountant=accountant, **extra, **RUN)
    )


def plain_scale():
    return lambda: [
        accounting.find_noise_multiplier(target_epsilon=epsilon, accountant="rdp", **RUN)
        for epsilon in budgets(GROUPS).tolist()
    ]


def plain_sample():
    run = {name: RUN[name] for name in ("target_delta", "steps")}

    def missing(noise):
        rates = [
            accounting.find_sample_rate(
                target_epsilon=epsilon, noise_multiplier=noise, accountant="rdp", **run
            )
            for epsilon in budgets(GROUPS).tolist()
        ]
        return sum(rates) / len(rates) / RUN["sample_rate"] - 1

    return lambda: brentq(missing, 0.8, 3.5, xtol=1e-4)


def parameters(method, groups):
    ways = {"by RDP": ours(method, groups)}
    if groups == 128:
        ways |= {
            "plain loop, by RDP": plain_sample if method == "sample" else plain_scale,
            "by PLD": ours(method, groups, "pld"),
        }
    return ways


def images():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(BATCH, 1, 28, 28, generator=generator),
        torch.randint(10, (BATCH,), generator=generator),
    )


def _steps(model, optimizer, criterion, loader):
    def block():
        for _ in range(STEPS):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()

    return block


def opacus_step(mode):
    from opacus import PrivacyEngine

    model = models.mnist_cnn()
    model, optimizer, *rest = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(images(), batch_size=BATCH),
        noise_multiplier=10.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    return _steps(model, optimizer, rest[0] if mode == "ghost" else nn.CrossEntropyLoss(), rest[-1])


def our_step(mode, targets):
    from dpcompanion.engine import IndividualizedPrivacyEngine

    model = models.mnist_cnn()
    model, optimizer, *rest = IndividualizedPrivacyEngine().make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(images(), batch_size=BATCH),
        target_epsilons=torch.tensor(targets)[torch.arange(BATCH) % len(targets)],
        target_delta=1e-5,
        epochs=10_000,
        max_grad_norm=1.0,
        method="scale",
        grad_sample_mode=mode,
    )
    return _steps(model, optimizer, rest[0] if mode == "ghost" else nn.CrossEntropyLoss(), rest[-1])


def step(mode):
    return {
        "Opacus": lambda: opacus_step(mode),
        "dpcompanion, one budget": lambda: our_step(mode, [20.0]),
        "dpcompanion, three budgets": lambda: our_step(mode, [10.0, 20.0, 30.0]),
    }


def run():
    """The rows of the table."""
    warnings.simplefilter("ignore")
    rows = []
    for threads in (1, 2):
        for method in ("sample", "scale"):
            for groups in (128, 60_000):
                times = timings(parameters(method, groups), threads, 1)
                plain = "plain loop, by RDP"
                if plain in times:
                    times[plain] = tuple(value * groups / GROUPS for value in times[plain])
                rows += [
                    {
                        "task": f"{method}, {groups} budgets",
                        "way": way,
                        "threads": threads,
                        "s": wall,
                        "ratio": wall / times[plain][0] if plain in times else None,
                        "CPU s": cpu,
                    }
                    for way, (wall, cpu) in times.items()
                ]
        for mode in ("hooks", "ghost"):
            times = timings(step(mode), threads, 25)
            rows += [
                {
                    "task": f"step, {mode}",
                    "way": way,
                    "threads": threads,
                    "s": wall / STEPS,
                    "ratio": wall / times["Opacus"][0],
                    "CPU s": cpu / STEPS,
                }
                for way, (wall, cpu) in times.items()
            ]
    return rows
