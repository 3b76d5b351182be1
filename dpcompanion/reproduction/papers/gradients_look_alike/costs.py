"""The cost of steps over training: figures 1, 5 and 6."""

import dataclasses
import math

import numpy as np
import torch

from dpcompanion.accounting import rdp_to_epsilon
from dpcompanion.per_instance import tilted_counts
from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import left_out, runnable
from dpcompanion.reproduction.papers.gradients_look_alike.runs import (
    CIFAR10,
    DIGITS,
    DIRECTIONS,
    MNIST,
    MODELS,
    PLAIN_DIGITS,
    PLAIN_MNIST,
    Watch,
    WatchMore,
    claim_by_network,
    composed,
    composed_exactly,
    contributions,
    divergence,
    epsilons,
    inputs_of,
    mean_of,
    plan_of,
    points_of,
    seconds,
    soft_maximum,
    watched,
    weighted_costs,
    worst_case,
)
from dpcompanion.seeds import derive_seed
from dpcompanion.training import cross_entropy, train_ensemble


def varied(task, **changes):
    """The task with some fields changed."""
    return dataclasses.replace(task, **changes)


@dataclasses.dataclass(frozen=True)
class Tilted:
    """Tilted runs: at which order, of which training points by their rank among those watched, how
    many of each.
    """

    order: int
    ranks: tuple = (0.1, 0.5, 0.75)
    runs: int = 3


@dataclasses.dataclass(frozen=True)
class Compositions(Watch):
    """Figure 1: for which tasks the exact composition is computed too."""

    exact: dict = dataclasses.field(default_factory=dict)


FIGURE_1 = Compositions(
    {"eps 10": MNIST, "eps 1": varied(MNIST, epsilon=1.0, runs=2)},
    exact={"eps 10": Tilted(3), "eps 1": Tilted(12)},
)
FIGURE_1_QUICK = Compositions({"eps 10": DIGITS, "eps 1": varied(DIGITS, epsilon=1.0, runs=1)})


def tilted_norms(task, order, point, seed, run):
    """Clipped norms of a point's gradients along one tilted run with it ("remove"), (steps,)."""
    x, y = inputs_of(task.data, task.model, "train", run)
    plan, norms = plan_of(task, len(y)), []
    others = torch.ones(1, len(y), dtype=torch.bool)
    others[0, point] = False
    generator = torch.Generator().manual_seed(derive_seed(seed, "tilted", point))

    def its_share(ensemble):
        gradient = ensemble.gradients_of(x[point : point + 1], y[point : point + 1])[:, 0]
        length = gradient.norm(dim=1).double()
        norms.append(length.clamp(max=task.max_grad_norm).cpu())
        count = tilted_counts(
            norms[-1],
            sample_rate=plan.sample_rate,
            noise_std=plan.noise_std,
            order=order,
            generator=generator,
        ).to(length)
        return (count / (length / task.max_grad_norm).clamp(min=1)).to(gradient.dtype)[
            :, None
        ] * gradient

    train_ensemble(
        MODELS[task.model](seed=0),
        cross_entropy,
        (x, y),
        plan,
        seeds=[seed],
        members=others,
        learning_rate=task.learning_rate,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        add=its_share,
        device=run.device,
        progress=False,
    )
    return torch.cat(norms)


def kept_norms(task, order, points, runs, run):
    """`tilted_norms` of every point, (steps, runs, points), kept in the data folder as runs end."""
    pieces = {
        f"point-{point}.seed-{seed}": (point, seed) for seed in range(runs) for point in points
    }
    each = seconds(
        dataclasses.replace(task, runs=1), plan_of(task, len(run.load(task.data, split="train")))
    )
    done = run.keep(
        lambda piece: ({}, {"norms": tilted_norms(task, order, *pieces[piece], run).numpy()}),
        pieces,
        config={"task": dataclasses.replace(task, runs=1), "order": order},
        seconds=each * len(pieces),
        under=f"watched/{task.data}-{task.model}-tilted",
        label="tilted runs",
    )
    found = torch.stack([torch.as_tensor(arrays["norms"]) for _, arrays in done.values()], 1)
    return found.view(len(found), runs, len(points))


def exactly(task, tilted, run):
    """The exact composition of a few points beside theorem 3.3, the worst case and the mean account
    along ordinary runs, all with the point against without it: nats at one order, and its
    epsilon.
    """
    found, order = watched(task, run), tilted.order
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64)
    along = (
        (divergence(found.seen("remove")[:, :-1], found.plan, order) * steps[:, None])
        .sum(1)
        .mean(0)
    )
    ranked = along.argsort(stable=True)
    chosen = ranked[[round(rank * (len(ranked) - 1)) for rank in tilted.ranks]]
    members = np.random.RandomState(0).permutation(found.plan.n)[: task.points]
    norms = kept_norms(task, order, members[chosen].tolist(), tilted.runs, run)
    exact = composed_exactly(norms, found.plan, order, "remove")

    def epsilon(rdp):
        return rdp_to_epsilon(torch.as_tensor(rdp)[..., None], [order], task.delta)[0]

    return {
        "order": order,
        "along_runs": along[chosen],
        "theorem_3_3": composed(found, "remove", order)[chosen],
        "exact": exact.estimate,
        "low": exact.low,
        "high": exact.high,
        "upper_bound": exact.upper_bound,
        "worst_case": found.plan.steps * divergence(task.max_grad_norm, found.plan, order),
        "epsilon": epsilon(exact.estimate),
        "epsilon_bound": epsilon(exact.upper_bound),
        "epsilon_theorem_3_3": epsilons(found, "remove")[0][chosen],
    }


@experiment("gradients-look-alike/figure-1", quick=FIGURE_1_QUICK, paper=FIGURE_1)
def figure_1(config, run):
    """Contributions of the steps over the data-independent cost at one order, and epsilon of the
    whole run at the best.

    For each task and direction: means and 10th percentiles over points, for the first step, the
    middle and the end; `total`, theorem 3.3 for the whole run over the data-independent sum;
    `epsilon`, quantiles over points. `exact`: the exact composition of some training points.
    """
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        found = watched(task, run)
        baseline = divergence(task.max_grad_norm, found.plan, config.order)
        epsilon, order = worst_case(found.plan)
        values |= {
            f"{name}.accuracy": records.mean_and_sd(found.accuracy),
            f"{name}.noise_multiplier": found.plan.noise_multiplier,
            f"{name}.steps": found.plan.steps,
            f"{name}.worst_case.rdp": found.plan.steps * baseline,
            f"{name}.worst_case.epsilon": epsilon,
            f"{name}.worst_case.order": order,
        }
        arrays[f"{name}.moments"] = np.array(found.moments)
        for direction in DIRECTIONS:
            row = f"{name}.{direction}"
            share = contributions(found, direction, config.order) / baseline
            mean, low = share.mean(1), share.quantile(0.1, dim=1)
            middle = found.stages[1]
            values |= {
                f"{row}.first": mean[0],
                f"{row}.middle": mean[middle],
                f"{row}.last": mean[-1],
                f"{row}.first_p10": low[0],
                f"{row}.middle_p10": low[middle],
                f"{row}.last_p10": low[-1],
                f"{row}.last_p10_cost": low[-1] * baseline,
            }
            epsilon, best = epsilons(found, direction)
            total = composed(found, direction, config.order) / (found.plan.steps * baseline)
            quantiles = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
            values |= {
                f"{row}.total": total.mean(),
                f"{row}.total_p10": total.quantile(0.1),
                f"{row}.epsilon": epsilon.quantile(quantiles),
                f"{row}.orders": [best.min(), best.max()],
                f"{row}.above_worst_case": (epsilon > values[f"{name}.worst_case.epsilon"])
                .double()
                .mean(),
            }
            arrays |= {
                f"{row}.mean": mean.numpy(),
                f"{row}.p10": low.numpy(),
                f"{row}.last": share[-1].numpy(),
                f"{row}.epsilon": epsilon.numpy(),
                f"{row}.total": total.numpy(),
            }
    for name, tilted in config.exact.items():
        values |= {
            f"{name}.exact.{key}": value
            for key, value in exactly(config.tasks[name], tilted, run).items()
        }
    return values, arrays


@finding("gradients-look-alike/figure-1", "the mean share of the first step is above 1")
def _first_step_dearer(record):
    for name, direction, row in _rows(record):
        mean, low = record.values[f"{row}.first"], record.values[f"{row}.first_p10"]
        # Nine points in ten of those seen lie at the 10th percentile or above, none below 0.
        n = points_of(record, name)
        share = intervals.Interval(
            mean, low * intervals.share(math.floor(0.9 * n), n).low, math.inf
        )
        yield f"{name}, {direction}", f"{mean:.2f}, at least {share.low:.2f}", share.above(1)


@finding("gradients-look-alike/figure-1", "the mean share of the last step is below one half")
def _falls_well_below(record):
    for name, direction, row in _rows(record):
        share = mean_of(record.values[f"{row}.last"], points_of(record, name))
        yield f"{name}, {direction}", f"{share:.2f}", share.below(0.5)


@finding(
    "gradients-look-alike/figure-1",
    "the 10th percentile of the last step's share is below a tenth of its mean",
)
def _long_tail(record):
    for name, direction, row in _rows(record):
        low = _low_end(record, row)
        mean = mean_of(record.values[f"{row}.last"], points_of(record, name))
        yield (
            f"{name}, {direction}",
            f"{low.estimate:.0e} of {mean.estimate:.2f}",
            (low - mean * 0.1).below(0),
        )


def _low_end(record, row):
    """The 10th percentile of the last step's share over the points, without an interval where a
    record has none.
    """
    points = record.arrays.get(f"{row}.last")
    return (
        intervals.unknown(record.values[f"{row}.last_p10"])
        if points is None
        else intervals.quantile(points, 0.1)
    )


@finding(
    "gradients-look-alike/figure-1",
    "with less noise (eps 10) the 10th percentile of the last step's share is smaller than at "
    "eps 1",
)
def _disproportionately_smaller(record):
    for direction, words in DIRECTIONS.items():
        loud, quiet = (_low_end(record, f"{name}.{direction}") for name in ("eps 1", "eps 10"))
        yield words, f"{quiet.estimate:.0e} against {loud.estimate:.0e}", (quiet - loud).below(0)


@finding(
    "gradients-look-alike/figure-1",
    "with less noise (eps 10) the 10th percentile of the last step's cost is smaller than at eps 1",
)
def _noise_is_not_always_better(record):
    for direction in DIRECTIONS:
        loud, quiet = (
            _low_end(record, f"{name}.{direction}")
            # of a share, the cost
            * (record.values[f"{name}.worst_case.rdp"] / record.values[f"{name}.steps"])
            for name in ("eps 1", "eps 10")
        )
        yield (
            DIRECTIONS[direction],
            f"{quiet.estimate:.0e} against {loud.estimate:.0e}",
            (quiet - loud).below(0),
        )


@finding(
    "gradients-look-alike/figure-1",
    "by theorem 3.3, at order 8, the whole run costs half of the points or more less than the "
    "data-independent sum",
)
def _whole_run_cheaper(record):
    for name, direction, row in _rows(record):
        total = record.arrays[f"{row}.total"]
        share = intervals.share(int((total < 1).sum()), len(total))
        yield f"{name}, {direction}", f"{share:.0%}", share.at_least(0.5)


@finding(
    "gradients-look-alike/figure-1",
    "by theorem 3.3, at order 8, the whole run costs some points less than a tenth of the "
    "data-independent sum",
)
def _some_by_a_magnitude(record):
    for name, direction, row in _rows(record):
        total = record.arrays[f"{row}.total"]
        share = intervals.share(int((total < 0.1).sum()), len(total))
        yield f"{name}, {direction}", f"{share:.0%} of the points", share.above(0)


@finding(
    "gradients-look-alike/figure-1",
    "theorem 3.3, at the best order, gives the median point at most half of the data-independent "
    "epsilon",
    kind="own",
)
def _epsilon_halved(record):
    for name, direction, row in _rows(record):
        median = intervals.quantile(record.arrays[f"{row}.epsilon"], 0.5)
        worst = record.values[f"{name}.worst_case.epsilon"]
        yield f"{name}, {direction}", f"{median:.2f} of {worst:.2f}", median.at_most(worst / 2)


@finding(
    "gradients-look-alike/figure-1",
    "the exact composition, at one order, gives the median point a smaller epsilon than theorem "
    "3.3 at its best",
    kind="own",
)
def _exact_below_theorem(record):
    for name, tilted in record.config.get("exact", {}).items():
        # At the median rank of those that were composed exactly; the upper end is its 95% bound.
        exact, bound, loose = (
            dict(zip(tilted["ranks"], record.values[f"{name}.exact.{key}"]))[0.5]
            for key in ("epsilon", "epsilon_bound", "epsilon_theorem_3_3")
        )
        found = intervals.Interval(exact, -math.inf, bound)
        yield (
            f"{name}, {DIRECTIONS['remove']}",
            f"{exact:.2f}, at most {bound:.2f}, against {loose:.2f}",
            found.below(loose),
        )


def _rows(record):
    """(task, direction in words, the prefix of its values) for each task and direction."""
    for name in record.config["tasks"]:
        for direction, words in DIRECTIONS.items():
            yield name, words, f"{name}.{direction}"


@dataclasses.dataclass(frozen=True)
class Intervals(Watch):
    """Figure 5: the first `shown` training points, with bootstrap intervals over runs."""

    shown: int = 10
    resamples: int = 400


@experiment(
    "gradients-look-alike/figure-5",
    quick=Intervals({"eps 10": DIGITS}),
    paper=Intervals({"eps 10": MNIST}),
)
def figure_5(config, run):
    """Contributions of steps for single training points, with 95% bootstrap intervals over runs."""
    ((name, task),) = config.tasks.items()
    found = watched(task, run)
    baseline = divergence(task.max_grad_norm, found.plan, config.order)
    costs, weights = weighted_costs(found, "remove", config.order)
    costs = costs[..., : config.shown]
    draws = torch.randint(
        task.runs, (config.resamples, task.runs), generator=torch.Generator().manual_seed(0)
    )
    again = torch.stack([soft_maximum(costs[:, draw], weights) for draw in draws]) / baseline
    low, high = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    share = soft_maximum(costs, weights) / baseline
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64) / found.plan.steps
    values = {
        f"{name}.runs": task.runs,
        f"{name}.width": steps @ (high - low),
        f"{name}.widest": (high - low).amax(0),
        f"{name}.last": share[-1],
    }
    return values, {
        "moments": np.array(found.moments),
        "share": share.numpy(),
        "low": low.numpy(),
        "high": high.numpy(),
    }


@finding(
    "gradients-look-alike/figure-5",
    "the mean width of the 95% interval, over points and steps, is below a fifth of the "
    "data-independent cost",
)
def _narrow(record):
    for name in record.config["tasks"]:
        width = intervals.mean(record.values[f"{name}.width"])
        yield name, f"{width:.2f}", width.below(0.2)


FIGURE_6 = WatchMore(
    {
        "eps 10": MNIST,
        "eps 1": varied(MNIST, epsilon=1.0, runs=2),
        "batch 64": varied(PLAIN_MNIST, batch_size=64, runs=1),
        "batch 512": varied(PLAIN_MNIST, batch_size=512, runs=1),
        "softmax regression": PLAIN_MNIST,
    },
    larger={"ResNet-20, CIFAR-10": CIFAR10},
)
FIGURE_6_QUICK = WatchMore(
    {
        "eps 10": DIGITS,
        "eps 1": varied(DIGITS, epsilon=1.0, runs=1),
        "batch 64": varied(PLAIN_DIGITS, batch_size=64),
        "batch 512": varied(PLAIN_DIGITS, batch_size=512),
        "softmax regression": PLAIN_DIGITS,
    }
)


@experiment("gradients-look-alike/figure-6", quick=FIGURE_6_QUICK, paper=FIGURE_6)
def figure_6(config, run):
    """The mean cost of a step over the data-independent one, at tenths of the run, and epsilon of
    the whole run.
    """
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = watched(task, run)
        baseline = divergence(task.max_grad_norm, found.plan, config.order)
        share = contributions(found, "remove", config.order).mean(1) / baseline
        tenths = (
            np.searchsorted(
                found.moments, [found.plan.steps * k / 10 for k in range(10)], side="right"
            )
            - 1
        )
        epsilon, _ = epsilons(found, "remove")
        values |= {
            f"{name}.share": share[tenths],
            f"{name}.last": share[-1],
            f"{name}.accuracy": np.mean(found.accuracy),
            f"{name}.worst_case.epsilon": worst_case(found.plan)[0],
            f"{name}.epsilon": epsilon.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)),
        }
    return values


@claim_by_network(
    "gradients-look-alike/figure-6", "the mean share of the last step is below the first step's"
)
def _falls_in_every_setting(record, names):
    tasks = record.config["tasks"] | record.config.get("larger", {})
    for name in names:
        # At the first step all points are alike.
        first, last = record.values[f"{name}.share"][0], record.values[f"{name}.last"]
        last = mean_of(last, tasks[name]["points"])
        yield name, f"{first:.2f} to {last:.2f}", last.below(first)
