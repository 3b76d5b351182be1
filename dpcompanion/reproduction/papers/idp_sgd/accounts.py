"""What Sample and Scale compute: tables 5, 6, 7, 15 and 16, figure 4."""

import dataclasses
import statistics
import time
from typing import Any

import numpy as np
import torch
from scipy import stats

from dpcompanion import idp
from dpcompanion.accounting import compute_epsilon, find_noise_multiplier, find_sample_rate
from dpcompanion.reproduction import intervals, published
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.settings import (
    BUDGETS,
    GROUPS,
    TABLE_5,
    Accounts,
    Training,
)
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    MNIST_5K,
    Task,
    assign,
    network,
    parameters,
    plan_of,
    problem,
)
from dpcompanion.training import cross_entropy, train


def bisected_noise_multiplier(*, target_epsilon, target_delta, sample_rate, steps, precision):
    """The noise multiplier as the authors' code searches it.

    Double sigma from 10 until the budget holds, then bisect [0, sigma] until its ends agree to the
    relative `precision`, and take the upper one. Algorithm 5 of the paper stops by epsilon instead.
    """

    def epsilon(sigma):
        return compute_epsilon(
            sample_rate=sample_rate,
            noise_multiplier=sigma,
            steps=steps,
            delta=target_delta,
            accountant="rdp",
        )

    low, high = 0.0, 20.0
    while epsilon(high) > target_epsilon:
        high *= 2
    while low / high < 1 - precision:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle) < target_epsilon else (middle, high)
    return high


@experiment("idp-sgd/table-5", quick=Accounts(), paper=Accounts())
def table_5(config, run):
    """The noise multiplier of eps 1: `sigma` calibrated tightly, `sigma_bisected` by the authors'
    own search, `sigma_B_over_N` at the sample rate and steps that the table seems to print.
    """
    target = {"target_epsilon": config.budgets[0], "target_delta": config.delta}
    values = {}
    for name, training in config.training.items():
        run_of = {"sample_rate": training.sample_rate, "steps": training.steps}
        plain = {
            "sample_rate": training.batch / training.examples,
            "steps": round(training.epochs * training.examples / training.batch),
        }
        values[f"{name}.iterations"] = plain["steps"]
        values[f"{name}.sigma"] = find_noise_multiplier(**target, **run_of, accountant="rdp")
        values[f"{name}.sigma_bisected"] = bisected_noise_multiplier(
            **target, **run_of, precision=config.precision
        )
        values[f"{name}.sigma_B_over_N"] = find_noise_multiplier(
            **target, **plain, accountant="rdp"
        )
    return values


@experiment("idp-sgd/table-7", quick=Accounts(), paper=Accounts())
def table_7(config, run):
    """Parameters of Scale and Sample for each data set and each distribution of groups.

    Besides the printed names: `sigma_p_30_epochs` and `c_p_30_epochs` for MNIST, and
    `sigma_scale_arithmetic`, which explain the printed numbers that do not belong to the row that
    they stand in.
    """
    values = {}
    for name, training in config.training.items():
        run_of = {
            "target_delta": config.delta,
            "sample_rate": training.sample_rate,
            "steps": training.steps,
            "accountant": "rdp",
        }
        values[f"{name}.sigma"] = find_noise_multiplier(target_epsilon=config.budgets[0], **run_of)
        values[f"{name}.c"] = training.clip
        values[f"{name}.q"] = training.sample_rate
        for setup, shares in config.groups.items():
            row = f"{name}.{setup}"
            scale = idp.scale_parameters(
                config.budgets, shares, max_grad_norm=training.clip, **run_of
            )
            sample = idp.sample_parameters(config.budgets, shares, **run_of)
            values[f"{row}.sigma_scale"] = scale.noise_multiplier
            values[f"{row}.sigma_p"] = scale.noise_multipliers
            values[f"{row}.c_p"] = scale.max_grad_norms
            values[f"{row}.sigma_sample"] = sample.noise_multiplier
            values[f"{row}.q_p"] = sample.sample_rates
            values[f"{row}.sigma_scale_arithmetic"] = sum(
                share * sigma for share, sigma in zip(shares, scale.noise_multipliers.tolist())
            ) / sum(shares)
            if name == "mnist":
                short = dataclasses.replace(training, epochs=30)
                found = idp.scale_parameters(
                    config.budgets,
                    shares,
                    max_grad_norm=short.clip,
                    **{**run_of, "steps": short.steps},
                )
                values[f"{row}.sigma_p_30_epochs"] = found.noise_multipliers
                values[f"{row}.c_p_30_epochs"] = found.max_grad_norms
    return values


@experiment("idp-sgd/table-6", quick=Accounts(), paper=Accounts())
def table_6(config, run):
    """The noise multiplier of every row, as what it is: that of Sample, or the pooled one of Scale,
    not that of eps 1.

    Besides: `sigma_of_eps_1`, what the column is said to hold. In the MNIST rows that is what it
    does hold.
    """
    values = {}
    for name, training in config.training.items():
        for method in ("sample", "scale"):
            for setup, shares in config.groups.items():
                row = published.exhibit("idp-sgd/table-6").numbers[name][f"{method}_{setup}"]
                tuned = dataclasses.replace(
                    training,
                    batch=int(row["batch"]),
                    epochs=int(row["epochs"]),
                    clip=float(row["clip"]),
                )
                noise, _, _ = parameters(method, config.budgets, shares, tuned, config.delta)
                strictest, _, _ = parameters("dpsgd", config.budgets, shares, tuned, config.delta)
                key = f"{name}.{method}_{setup}"
                values[f"{key}.iterations"] = round(tuned.epochs * tuned.examples / tuned.batch)
                values[f"{key}.sigma"] = strictest if name == "mnist" else noise
                values[f"{key}.sigma_of_method"] = noise
                values[f"{key}.sigma_of_eps_1"] = strictest
    return values


@experiment("idp-sgd/figure-4", quick=Accounts(), paper=Accounts())
def figure_4(config, run):
    """Groups' epsilons after each fourth epoch, MNIST (B): `sample`, `scale`, (groups, epochs)."""
    training, shares = config.training["mnist"], config.groups["B"]
    epochs = list(range(4, training.epochs + 1, 4))
    values: dict[str, Any] = {"epochs": epochs}
    for method in ("sample", "scale"):
        noise, rates, norms = parameters(method, config.budgets, shares, training, config.delta)
        multipliers = noise * training.clip / norms
        values[method] = [
            [
                compute_epsilon(
                    sample_rate=rate,
                    noise_multiplier=sigma,
                    steps=epoch * training.steps // training.epochs,
                    delta=config.delta,
                    accountant="rdp",
                )
                for epoch in epochs
            ]
            for rate, sigma in zip(rates.tolist(), multipliers.tolist())
        ]
    return values


@finding(
    "idp-sgd/figure-4",
    "at the last step every group has spent its budget, to within 0.1%, and none more",
)
def spent_together(record):
    for method in ("sample", "scale"):
        ends = [spent[-1] for spent in record.values[method]]
        shares = [end / budget for end, budget in zip(ends, record.config["budgets"])]
        holds = all(0.999 <= share <= 1 + 1e-7 for share in shares)
        yield method.capitalize(), ", ".join(f"{end:.4f}" for end in ends), holds


@dataclasses.dataclass(frozen=True)
class Searches:
    """Table 15: how many groups, with budgets spread evenly over [1, 3], in the setting of
    CIFAR-10; and whether to search them one after another, too, as the paper does.
    """

    groups: tuple = (2, 8, 32, 128)
    one_by_one: bool = False
    training: Training = TABLE_5["cifar10"]
    delta: float = 1e-5


def _one_by_one(budgets, noise, run_of):
    """Processor seconds of each group's parameter: (rates at common noise, noise multipliers)."""
    started = time.process_time()
    for budget in budgets:
        wanted = {key: value for key, value in run_of.items() if key != "sample_rate"}
        find_sample_rate(target_epsilon=budget, noise_multiplier=noise, **wanted)
    rates = time.process_time()
    for budget in budgets:
        find_noise_multiplier(target_epsilon=budget, **run_of)
    return rates - started, time.process_time() - rates


@experiment("idp-sgd/table-15", quick=Searches(), paper=Searches(one_by_one=True))
def table_15(config, run):
    """Seconds to find the parameters by RDP, as the paper does, to the finer of its two precisions;
    `one_by_one` those of a search for each group (of Sample: of one round of its outer search).
    """
    values = {}
    run_of = {
        "target_delta": config.delta,
        "sample_rate": config.training.sample_rate,
        "steps": config.training.steps,
        "accountant": "rdp",
    }
    for number in config.groups:
        budgets = torch.linspace(1, 3, number, dtype=torch.float64).tolist()
        for method, search, options in (
            ("sample", idp.sample_parameters, {}),
            ("scale", idp.scale_parameters, {"max_grad_norm": config.training.clip}),
        ):
            started = time.perf_counter()
            search(budgets, [1] * number, **run_of, **options)
            values[f"precision_1e-4.groups_{number}.{method}"] = time.perf_counter() - started
        if config.one_by_one:
            noise = float(idp.sample_parameters(budgets, [1] * number, **run_of).noise_multiplier)
            for method, seconds in zip(("sample", "scale"), _one_by_one(budgets, noise, run_of)):
                values[f"one_by_one.groups_{number}.{method}"] = seconds
    return values


@finding(
    "idp-sgd/table-15", "searched one after another, twice the groups take 1.6 to 2.4 times as long"
)
def grows_linearly(record):
    groups = record.config["groups"]
    for method in ("sample", "scale") if record.config.get("one_by_one") else ():
        seconds = [record.values[f"one_by_one.groups_{number}.{method}"] for number in groups]
        line: Any = stats.linregress(np.log2(groups), np.log2(seconds))
        reach = stats.t.ppf(0.975, len(groups) - 2) * line.stderr
        slope = intervals.Interval(
            *(2.0**power for power in (line.slope, line.slope - reach, line.slope + reach))
        )
        yield (
            method.capitalize(),
            f"{slope:.2f} times",
            intervals.every(slope.at_least(1.6), slope.at_most(2.4)),
        )


@finding(
    "idp-sgd/table-15",
    "time grows less than the number of groups, which are searched at once",
    kind="own",
)
def searched_at_once(record):
    groups = record.config["groups"]
    for method in ("sample", "scale"):
        few, many = (
            intervals.timed(record.values[f"precision_1e-4.groups_{n}.{method}"])
            for n in (groups[0], groups[-1])
        )
        longer = many / few
        ours = (
            f"{groups[-1] // groups[0]} times the groups take {longer.estimate:.1f} times as long"
        )
        yield method.capitalize(), ours, longer.below(groups[-1] / groups[0])


@dataclasses.dataclass(frozen=True)
class Steps:
    """Table 16: how many steps of each method are timed in a turn, and how many turns."""

    task: Task
    steps: int
    rounds: int = 5
    budgets: tuple = BUDGETS
    groups: tuple = GROUPS["A"]
    delta: float = 1e-5


@experiment(
    "idp-sgd/table-16", quick=Steps(MNIST_5K, 6, rounds=2), paper=Steps(CIFAR10, 20, rounds=12)
)
def table_16(config, run):
    """Milliseconds of a step of DP-SGD, Sample and Scale with the paper's network, and the times of
    the two beside DP-SGD's in the same turn: of the processor, or on a GPU by the clock.
    """
    task, found = config.task, problem(config.task, run)
    groups = assign(len(found.labels), config.groups, 0)
    clock = time.process_time if run.device.type == "cpu" else time.perf_counter
    turns: dict[str, list] = {method: [] for method in ("dpsgd", "sample", "scale")}
    plans = {
        method: plan_of(method, groups, config.budgets, task.training, delta=config.delta)
        for method in turns
    }

    def milliseconds(plan, steps):
        model, plan = network(task, 0).to(run.device), dataclasses.replace(plan, steps=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)
        started = clock()
        train(
            model,
            cross_entropy,
            (found.features, found.labels),
            plan,
            optimizer=optimizer,
            seed=0,
            progress=False,
        )
        return 1000 * (clock() - started) / steps

    milliseconds(plans["dpsgd"], 1)  # the first of all has more to do
    for _ in range(config.rounds):
        for method, plan in plans.items():
            turns[method].append(milliseconds(plan, config.steps))
    values: dict[str, Any] = {
        f"{task.data}.{method}": statistics.median(times) for method, times in turns.items()
    }
    for method in ("sample", "scale"):
        values[f"{task.data}.{method}.over_dpsgd"] = [
            own / plain for own, plain in zip(turns[method], turns["dpsgd"])
        ]
    return values


@finding(
    "idp-sgd/table-16", "a step of Sample or of Scale takes at most 5% longer than one of DP-SGD"
)
def as_fast(record):
    for method in ("sample", "scale"):
        longer = intervals.mean(
            record.values[f"{record.config['task']['data']}.{method}.over_dpsgd"]
        )
        yield method.capitalize(), f"{longer.estimate:.3f} times as long", longer.below(1.05)
