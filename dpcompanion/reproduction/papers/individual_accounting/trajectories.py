"""What an account along a trajectory means: theorems 3.1 and 3.2, algorithms 1 to 3."""

import dataclasses
import math

import numpy as np
import torch

from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import named, rank, reported, runnable
from dpcompanion.reproduction.papers.individual_accounting.clipping import clipped
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CPU,
    NAME,
    PAPER,
    QUICK,
    account,
    make_plan,
    schedule,
)
from dpcompanion.reproduction.papers.yu import (
    LABELS,
    LOSSES,
    MNIST_5K,
    Study,
    Tasks,
    build,
    examples,
)
from dpcompanion.training import Callbacks, gradient_norms, train
from dpcompanion.training.tracking import NormTracker


@dataclasses.dataclass(frozen=True)
class Trajectories(Tasks):
    """Theorem 3.1: two adaptive steps in one dimension, and the seeds of whole runs.

    In step 1 the example's gradient is `first`, in step 2 `low` where the first output lies below
    `turn`, else 1.
    """

    seeds: tuple = (0, 1, 2)
    sample_rate: float = 0.5
    noise: float = 1.0
    first: float = 0.3
    low: float = 0.2
    turn: float = 1.5
    width: float = 0.2
    order: float = 8.0
    delta: float = 1e-3


def two_steps(config, points=1201, reach=9.0):
    """The mechanism of `Trajectories` on a grid of outputs: first outputs z, weights of cells (z,
    z'), densities of both without the example and with it, and the RDP of each trajectory, (points,
    orders), at `orders`.
    """
    z = torch.linspace(-reach, reach, points, dtype=torch.float64)
    q, s = config.sample_rate, config.noise

    def density(shift):
        return torch.exp(-(((z - shift) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))

    second = config.low + (1 - config.low) * torch.sigmoid((z - config.turn) / config.width)
    without = density(0.0)[:, None] * density(0.0)
    first = (1 - q) * density(0.0) + q * density(config.first)
    with_it = first[:, None] * ((1 - q) * density(0.0) + q * density(second[:, None]))
    orders = torch.tensor([1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64], dtype=torch.float64)
    lengths = torch.cat((torch.tensor([config.first]), second))
    rdp = rdp_sampled_gaussian(sample_rate=q, noise_multiplier=s / lengths, orders=orders.tolist())
    return z, (z[1] - z[0]) ** 2, without, with_it, rdp[:1] + rdp[1:], orders


def excess(a, b, epsilon):
    """The delta that epsilon needs, max of P(S) - e^epsilon Q(S) in the worse direction, from the
    masses of cells.
    """
    return max(float((p - math.exp(epsilon) * q).clamp(min=0).sum()) for p, q in ((a, b), (b, a)))


def variance_shares(values):
    """values (runs, n): which share of the variance lies between examples, corrected for what runs
    add to their means; and the standard deviation between runs of the same example.
    """
    within = values.var(0, ddof=1).mean()
    between = max(values.mean(0).var(ddof=1) - within / len(values), 0.0)
    return between / (between + within), math.sqrt(within)


@experiment(f"{NAME}/theorem-3.1", quick=Trajectories(QUICK), paper=Trajectories(CPU))
def theorem_3_1(config, run):
    """What the account promises, by quadrature, on sets of trajectories that were fixed beforehand
    and on all of them; and how much of an example's account is the example's own, over seeds.
    """
    z, cell, without, with_it, rdp, orders = two_steps(config)
    without, with_it = without * cell, with_it * cell
    at = int((orders == config.order).nonzero())
    fixed_order = rdp_to_epsilon(rdp[:, [at]], orders[[at]], config.delta)[0]
    best_order = rdp_to_epsilon(rdp, orders, config.delta)[0]
    thresholds = torch.linspace(
        float(fixed_order.min()) + 1e-6, float(fixed_order.max()), 15, dtype=torch.float64
    )
    rows = []
    for threshold in thresholds.tolist():
        sets = [order <= threshold for order in (fixed_order, best_order)]
        needed = [excess(without[chosen], with_it[chosen], threshold) for chosen in sets]
        rows.append(
            (threshold, float(with_it[sets[0]].sum()), *needed, excess(without, with_it, threshold))
        )
    columns = ("threshold", "probability", "on_set", "on_set_best_order", "everywhere")
    values = named("toy", delta=config.delta, **dict(zip(columns, map(list, zip(*rows)))))
    for name, task in runnable(config, run).items():
        epsilons = np.stack(
            [clipped(task, "maximum", seed, run).epsilon(refreshes=1.0) for seed in config.seeds]
        )
        pairs = [(a, b) for a in range(len(epsilons)) for b in range(a)]
        share, spread = variance_shares(epsilons)
        ratio = epsilons.max(0) / epsilons.min(0)
        values |= named(
            name,
            share_of_the_example=share,
            sd_between_runs=spread,
            mean_of_each_run=epsilons.mean(1),
            rank_correlation=np.mean([rank(epsilons[a], epsilons[b]) for a, b in pairs]),
            largest_over_smallest=np.quantile(ratio, (0.1, 0.5, 0.9)),
        )
    return values


@finding(
    f"{NAME}/theorem-3.1",
    "on every set of trajectories whose account at a fixed order stays below a threshold, "
    "that threshold holds with the stated delta",
    kind="own",
)
def thresholds_hold(record):
    worst, delta = max(record.values["toy.on_set"]), record.values["toy.delta"]
    yield "two steps, by quadrature", f"delta {worst:.1e} of {delta:.0e}", worst <= delta


@dataclasses.dataclass(frozen=True)
class Owners(Study):
    """Theorem 3.2: how many owners compute their own epsilon from the models alone."""

    owners: int = 20


@experiment(
    f"{NAME}/theorem-3.2",
    quick=Owners({"mnist-5k": dataclasses.replace(MNIST_5K, epochs=2)}),
    paper=Owners(CPU),
)
def theorem_3_2(config, run):
    """Owners compute their epsilons from the models that training went through and their own
    example, nothing else.
    """
    values = {}
    for name, task in config.tasks.items():
        found, loss = examples(task.data, task.dtype), LOSSES[task.loss]
        run.note(found.provenance)
        model = build(task.model, found, config.seed)
        plan = make_plan(
            task, len(found.y), float(gradient_norms(model, loss, found.x, found.y).median())
        )
        tracker = NormTracker.for_plan(
            plan,
            model,
            loss,
            (found.x, found.y),
            clipping="individual",
            updates_per_epoch=task.refreshes,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate / plan.max_grad_norm)
        passes, seen = schedule(plan, task.refreshes), []

        def keep(step, passes=passes, seen=seen, model=model):
            if step in passes:
                seen.append({key: value.clone() for key, value in model.state_dict().items()})

        keep(0)
        train(
            model,
            loss,
            (found.x, found.y),
            plan,
            optimizer=optimizer,
            seed=config.seed,
            trackers=[tracker],
            callbacks=Callbacks(on_step=lambda state, keep=keep: keep(state.step)),
        )
        tracked = tracker.epsilon(plan.delta)[: config.owners].numpy()
        private = build(task.model, found, config.seed)
        alone = np.zeros(config.owners)
        for owner in range(config.owners):
            norms, mine = [], (found.x[[owner]], found.y[[owner]])
            for state in seen:
                private.load_state_dict(state)
                norms.append(gradient_norms(private, loss, *mine).clamp(max=plan.max_grad_norm))
            alone[owner] = account(plan, np.stack(norms), passes, steps=plan.steps)[0]
        values |= named(
            name,
            owners=config.owners,
            largest_difference=np.abs(alone - tracked).max(),
            largest=tracked.max(),
        )
    return values


@finding(f"{NAME}/theorem-3.2", "owners recompute their reported epsilon, to one level of rounding")
def owners_need_nobody(record):
    for name in reported(record):
        difference = record.values[f"{name}.largest_difference"]
        said = f"differences up to {difference:.0e}" if difference > 1e-9 else "equal to rounding"
        yield LABELS[name], said, difference <= 0.02 * record.values[f"{name}.largest"]


_PRINTED = Tasks({name: task for name, task in PAPER.items() if name not in CPU})


@experiment(f"{NAME}/algorithms-1-2-3", quick=_PRINTED, paper=_PRINTED)
def algorithms_1_2_3(config, run):
    """The noise of the paper's largest epsilons, not printed, and what PLD says of it."""
    sizes = {"mnist": 60000, "cifar10": 50000, "utkface_gender": 15000, "utkface_age": 15000}
    values = {}
    for name, task in config.tasks.items():
        plan = make_plan(task, sizes[name], 1.0)
        values |= named(
            name,
            noise_multiplier=plan.noise_multiplier,
            steps=plan.steps,
            epsilon_rdp=plan.epsilon(accountant="rdp"),
            epsilon_pld=plan.epsilon(accountant="pld"),
        )
    return values
