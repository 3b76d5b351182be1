"""Exhibits of Boenisch et al. 2023, "Have it your way".

What the paper does not spell out and its numbers show: an epoch has
ceil(N / B) steps, the sample rate is q = 1 / ceil(N / B), and an account
covers T = epochs ceil(N / B) steps.  Epsilon is by RDP, at delta 1e-5.
"""

import dataclasses
import math

from dpcompanion import idp
from dpcompanion.accounting import compute_epsilon, find_noise_multiplier
from dpcompanion.experiments import experiment

BUDGETS = (1.0, 2.0, 3.0)
GROUPS = {"A": (34, 43, 23), "B": (54, 37, 9)}


@dataclasses.dataclass(frozen=True)
class Training:
    """N examples, expected batches of B, epochs, and the clip norm of DP-SGD."""

    examples: int
    batch: int
    epochs: int
    clip: float

    @property
    def sample_rate(self):
        return 1 / math.ceil(self.examples / self.batch)

    @property
    def steps(self):
        return self.epochs * math.ceil(self.examples / self.batch)


TABLE_5 = {"mnist": Training(60000, 512, 80, 0.2), "svhn": Training(73257, 1024, 30, 0.9),
           "cifar10": Training(50000, 1024, 30, 0.4)}


@dataclasses.dataclass(frozen=True)
class Accounts:
    """What tables 5 and 7 are computed from."""

    training: dict = dataclasses.field(default_factory=lambda: TABLE_5)
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5
    epsilon_tolerance: float = 0.001


def bisected_noise_multiplier(*, target_epsilon, target_delta, sample_rate, steps, epsilon_tolerance):
    """The noise multiplier as the paper's code searches it (its algorithm 5, after Opacus).

    Double sigma from 10 until the budget holds, then bisect [0, sigma] until epsilon is within the tolerance below
    its target.  It returns a point of a dyadic grid, with up to the tolerance of the budget left unspent.
    """
    def epsilon(sigma):
        return compute_epsilon(sample_rate=sample_rate, noise_multiplier=sigma, steps=steps, delta=target_delta,
                               accountant="rdp")
    low, high, reached = 0.0, 10.0, math.inf
    while reached > target_epsilon:
        high *= 2
        reached = epsilon(high)
    while target_epsilon - reached > epsilon_tolerance:
        middle = (low + high) / 2
        at_middle = epsilon(middle)
        if at_middle < target_epsilon:
            high, reached = middle, at_middle
        else:
            low = middle
    return high


@experiment("idp-sgd/table-5", uses=(bisected_noise_multiplier, Training), quick=Accounts(), paper=Accounts())
def table_5(config, run):
    """The noise multiplier of eps 1: `sigma` calibrated tightly, `sigma_bisected` by the paper's own search,
    `sigma_B_over_N` at the sample rate and steps that the table seems to print."""
    target = {"target_epsilon": config.budgets[0], "target_delta": config.delta}
    values = {}
    for name, training in config.training.items():
        run_of = {"sample_rate": training.sample_rate, "steps": training.steps}
        plain = {"sample_rate": training.batch / training.examples,
                 "steps": round(training.epochs * training.examples / training.batch)}
        values[f"{name}.iterations"] = plain["steps"]
        values[f"{name}.sigma"] = find_noise_multiplier(**target, **run_of, accountant="rdp")
        values[f"{name}.sigma_bisected"] = bisected_noise_multiplier(
            **target, **run_of, epsilon_tolerance=config.epsilon_tolerance)
        values[f"{name}.sigma_B_over_N"] = find_noise_multiplier(**target, **plain, accountant="rdp")
    return values


@experiment("idp-sgd/table-7", uses=(idp.sample_parameters, idp.scale_parameters, Training), quick=Accounts(),
            paper=Accounts())
def table_7(config, run):
    """Parameters of Scale and Sample for each data set and each distribution of groups.

    Besides the printed names: `sigma_p_30_epochs` and `c_p_30_epochs` for MNIST, and `sigma_scale_arithmetic`, which
    explain the printed numbers that do not belong to the row that they stand in.
    """
    values = {}
    for name, training in config.training.items():
        run_of = {"target_delta": config.delta, "sample_rate": training.sample_rate, "steps": training.steps}
        values[f"{name}.sigma"] = find_noise_multiplier(target_epsilon=config.budgets[0], accountant="rdp", **run_of)
        values[f"{name}.c"] = training.clip
        values[f"{name}.q"] = training.sample_rate
        for setup, shares in config.groups.items():
            row = f"{name}.{setup}"
            scale = idp.scale_parameters(config.budgets, shares, max_grad_norm=training.clip, **run_of)
            sample = idp.sample_parameters(config.budgets, shares, **run_of)
            values[f"{row}.sigma_scale"] = scale.noise_multiplier
            values[f"{row}.sigma_p"] = scale.noise_multipliers
            values[f"{row}.c_p"] = scale.max_grad_norms
            values[f"{row}.sigma_sample"] = sample.noise_multiplier
            values[f"{row}.q_p"] = sample.sample_rates
            values[f"{row}.sigma_scale_arithmetic"] = sum(
                share * sigma for share, sigma in zip(shares, scale.noise_multipliers.tolist())) / sum(shares)
            if name == "mnist":
                short = dataclasses.replace(training, epochs=30)
                found = idp.scale_parameters(config.budgets, shares, max_grad_norm=short.clip,
                                             **{**run_of, "steps": short.steps})
                values[f"{row}.sigma_p_30_epochs"] = found.noise_multipliers
                values[f"{row}.c_p_30_epochs"] = found.max_grad_norms
    return values
