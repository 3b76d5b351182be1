"""Runs side by side are the runs of `train`, seed for seed; and they sample, clip and add noise as each plan says."""

import copy
import math
import os
import signal
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from dpcompanion.training import (DPSGDPlan, clipped_sum, cross_entropy, derive_seed, generators, gradient_norms, models,
                                  stacking, train, train_ensemble)
from dpcompanion.training.layers import Unfit

FALSE_ALARM = 1e-6  # the seeds are fixed; this is the probability with which a right trainer would have failed
N, RUNS = 40, 4


class Pair(nn.Module):
    """A layer inside a layer that has weights of its own: it cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.inner(x) * self.scale


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 5, padding_idx=0), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embedding(x))).mean(1))


def frozen_bias():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def reused():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3))


def images():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), models.MaxPool2d(2),
                         models.StandardisedConv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 3))


ARCHITECTURES = {
    "linear": (lambda: nn.Linear(4, 3), (4,)), "convolutions": (images, (2, 4, 4)),
    "one bias frozen": (frozen_bias, (4,)), "a layer used twice": (reused, (4,)), "layers in layers": (Pair, (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)), (2, 4)),
    "tokens": (Tokens, None)}


def networks(build, count=RUNS):
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(build().double())
        if made[0] is not made[-1]:
            for (name, p), q in zip(made[-1].named_parameters(), made[0].parameters()):
                if not p.requires_grad:
                    p.data.copy_(q)
    return made


def examples(shape, n=N, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (n, 6), generator=g) if shape is None else torch.randn(n, *shape, dtype=torch.float64, generator=g)
    return x, torch.randint(3, (n,), generator=g)


def plan(**changes):
    return DPSGDPlan(**{"n": N, "sample_rate": 0.1, "steps": 8, "max_grad_norm": 0.5, "noise_multiplier": 1.0,
                        "delta": 1e-3, **changes})


# Different in rate, in norm and in noise; the third is often empty.
PLANS = [plan(), plan(sample_rate=torch.linspace(0.05, 0.6, N), noise_multiplier=0.3),
         plan(sample_rate=0.02, max_grad_norm=torch.linspace(0.01, 2, N)), plan(sample_rate=1.0, noise_multiplier=0.0)]
SGD = {"momentum": 0.9, "weight_decay": 0.1}


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def alone(model, data, plan, seed, lr, **sgd):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **sgd)
    return model, train(model, cross_entropy, data, plan, optimizer=optimizer, seed=seed)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("method, size, workers", [("auto", 512, 1), ("mixed", 7, 2), ("ghost", 60, 1), ("func", 23, 2)])
def test_each_run_is_the_run_of_its_plan_and_seed(name, method, size, workers):
    build, shape = ARCHITECTURES[name]
    if name == "layers in layers" and method in ("mixed", "ghost"):
        method = "auto"
    data, made, rates = examples(shape), networks(build), [0.3, 0.2, 0.5, 0.1]
    ensemble = train_ensemble(made, cross_entropy, data, PLANS, seeds=[5, 6, 7, 5], learning_rate=rates, method=method,
                              physical_batch_size=size, workers=workers, **SGD)
    assert (ensemble.batch_sizes == 0).any()
    for run, (model, seed) in enumerate(zip(made, [5, 6, 7, 5])):
        expected, history = alone(model, data, PLANS[run], seed, rates[run], **SGD)
        torch.testing.assert_close(ensemble.vectors[run], vector(expected), rtol=1e-10, atol=1e-12)
        assert torch.equal(ensemble.batch_sizes[run], history.batch_sizes)
        torch.testing.assert_close(ensemble.losses[run], history.losses, rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(ensemble.predict(data[0], chunk=9)[run], expected(data[0]).detach())
        torch.testing.assert_close(ensemble.model(run)(data[0]), expected(data[0]))
