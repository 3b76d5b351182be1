"""Beyond the paper: budgets that follow difficulty, and an audit of the parameters."""

import dataclasses
import pathlib
import tempfile
from typing import Any

import torch

from dpcompanion import attacks
from dpcompanion.reproduction.papers.idp_sgd.settings import BUDGETS, GROUPS, Training
from dpcompanion.reproduction.papers.idp_sgd.side_by_side import ALL, Compared, compared
from dpcompanion.reproduction.papers.idp_sgd.training import (
    DIGITS,
    assign,
    parameters,
    plan_of,
    problem,
)
from dpcompanion.reproduction.runs import Run
from dpcompanion.training import DPSGDPlan, derive_seed


@dataclasses.dataclass(frozen=True)
class Beyond(Compared):
    """Kinds: a distribution of groups with a method and an accountant, "A.sample.pld"; or "people"
    with their own budget, uniform between the two ends, or "rounded" down to whole numbers,
    "people.sample" and "rounded.sample".
    """

    between: tuple = (1.0, 6.0)


def beyond(config, device="cpu"):
    """{kind: [outcome for each seed]} for budgets by RDP and PLD, and for budgets of their own."""
    examples = len(problem(config.task).labels)

    def plan(kind, seed):
        who, method, *accountant = kind.split(".")
        options = {"delta": config.delta, "accountant": accountant[0] if accountant else "rdp"}
        if who in config.groups:
            return plan_of(
                method,
                assign(examples, config.groups[who], seed),
                config.budgets,
                config.task.training,
                **options,
            )
        generator = torch.Generator().manual_seed(derive_seed(seed, "people"))
        low, high = config.between
        own = low + (high - low) * torch.rand(examples, dtype=torch.float64, generator=generator)
        if who == "rounded":
            own = own.floor()
        budgets, groups = own.unique(return_inverse=True)
        return plan_of(method, groups, tuple(budgets.tolist()), config.task.training, **options)

    with tempfile.TemporaryDirectory() as folder:
        return compared(config, Run(config, torch.device(device), pathlib.Path(folder)), plan)


BEYOND = Beyond(
    DIGITS,
    (
        "A.dpsgd.rdp",
        "A.dpsgd.pld",
        "A.sample.rdp",
        "A.sample.pld",
        "A.scale.rdp",
        "A.scale.pld",
        "people.sample",
        "people.scale",
        "rounded.sample",
        "rounded.scale",
    ),
    seeds=(0, 1),
    together=ALL,
)


def audit(
    method,
    *,
    budgets=BUDGETS,
    shares=GROUPS["A"],
    sample_rate=0.5,
    steps=20,
    delta=1e-5,
    runs=60_000,
    draws=1,
    seed=0,
    confidence=0.95,
):
    """Lower bounds on the epsilon of a canary in each group, (groups,) float64.

    A canary's gradient is as long as its clip norm in every step, in a direction of its own, and
    the attacker sees every step: nobody can do better than their likelihood ratio, whose threshold
    is chosen on one half of the runs and counted on the other. `draws` Poisson draws are joined in
    every step: more than one is the fault of which algorithm 1 knows nothing.

    Many arguments, since they describe the run, the groups and the attack.
    """
    training = Training(round(1000), round(1000 * sample_rate), 1, 1.0)
    training = dataclasses.replace(training, epochs=steps * training.batch // training.examples)
    noise, rates, norms = parameters(method, tuple(budgets), tuple(shares), training, delta)
    plan = DPSGDPlan(
        n=len(budgets),
        sample_rate=rates,
        steps=training.steps,
        max_grad_norm=norms,
        noise_multiplier=1.0,
        delta=delta,
    )
    std = noise * training.clip
    streams = {
        name: torch.Generator().manual_seed(derive_seed(seed, name))
        for name in ("sampling", "noise")
    }
    ratios = []
    for present in (1.0, 0.0):
        taken: Any = sum(
            plan.sampler(streams["sampling"]).masks(runs * training.steps).double()
            for _ in range(draws)
        )
        seen = present * taken * norms + std * torch.randn(
            taken.shape, dtype=torch.float64, generator=streams["noise"]
        )
        step = torch.log1p(rates * torch.expm1(norms * (2 * seen - norms) / (2 * std**2)))
        ratios.append(step.view(runs, training.steps, -1).sum(1))
    half = runs // 2
    bounds = []
    for p in range(len(budgets)):
        inside, outside = ratios[0][:, p], ratios[1][:, p]
        # Thresholds are judged on the first half; the bound uses the best, on the second half.
        candidates = outside[:half].quantile(torch.linspace(0.5, 0.9995, 60, dtype=torch.float64))

        def bound(threshold, part):
            counts = [int((values[part] > threshold).sum()) for values in (inside, outside)]
            return attacks.epsilon_lower_bound(
                true_positives=counts[0],
                positives=half,
                false_positives=counts[1],
                negatives=half,
                delta=delta,
                confidence=confidence,
            )

        best = max(candidates, key=lambda threshold: float(bound(threshold, slice(0, half))))
        bounds.append(bound(best, slice(half, 2 * half)))
    return torch.tensor(bounds, dtype=torch.float64)
