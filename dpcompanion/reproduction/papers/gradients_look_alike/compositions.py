"""Theorem 3.3 beside exact composition, and unlearning: many runs of softmax regression at once."""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F

from dpcompanion.accounting import rdp_to_epsilon
from dpcompanion.per_instance import naive_unlearning, tilted_counts, tilted_noise
from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import named
from dpcompanion.reproduction.papers.gradients_look_alike.runs import (
    DIRECTIONS,
    composed_exactly,
    costs_and_weights,
    divergence,
    plan_of,
    soft_maximum,
)


@dataclasses.dataclass(frozen=True)
class Regression:
    """Softmax regression on digits shrunk to `side` x `side`: `runs` of each kind for each of
    `points` test points.
    """

    data: str
    side: int
    epsilon: float
    epochs: float
    points: int
    runs: int
    order: int = 6
    orders: tuple = (4, 6, 10)
    batch_size: int = 128
    learning_rate: float = 4.0
    max_grad_norm: float = 1.0
    delta: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Composition(Regression):
    """The same, and the seed of the runs; `others` are more test points, with theorem 3.3 alone."""

    seed: int = 0
    others: int = 0


def shrunk(config, run, points):
    """Training digits and so many test points, as rows with a constant 1, and their labels."""
    found = []
    for split in ("train", "test"):
        digits = run.load(config.data, split=split, dtype=torch.float64)
        rows = F.adaptive_avg_pool2d(digits.features, config.side).flatten(1)
        found += [torch.cat((rows, torch.ones(len(rows), 1, dtype=rows.dtype)), 1), digits.labels]
    x, y, test_x, test_y = found
    chosen = torch.as_tensor(np.random.RandomState(0).permutation(len(test_y))[:points])
    return x, y, test_x[chosen], test_y[chosen]


def batches(runs, n, rate, generator):
    """A Poisson sample of n for each run: indices (runs, most) and which of them count.

    The gaps between the examples that are drawn are geometric.
    """
    width = int(n * rate + 6 * (n * rate) ** 0.5 + 10)
    log_missed = torch.log1p(-torch.tensor(rate, dtype=torch.float64))
    places = torch.full((runs, 1), -1, dtype=torch.int64)
    while int(places[:, -1].min()) < n:
        uniform = torch.rand(runs, width, generator=generator, dtype=torch.float64)
        gaps = 1 + torch.floor(torch.log1p(-uniform) / log_missed).clamp(max=n).long()
        places = torch.cat((places, places[:, -1:] + gaps.cumsum(1)), 1)
    places = places[:, 1:]
    places = places[:, : max(1, int((places < n).sum(1).max()))]  # no column that no run has
    return places.clamp(max=n - 1), places < n


def side_by_side(x, y, point_x, point_y, plan, *, kind, runs, order, learning_rate, seed):
    """Runs of DP-SGD for each point, side by side: clipped norms of its gradients along them,
    (steps, runs, points).

    x holds the *other* examples. `kind` says how the point enters: "with" at its rate, "without"
    never, "remove" and "add" as in tilted training of either direction at `order`.

    Many arguments, since they describe the run, the points and the tilting.
    """
    generator, points = torch.Generator().manual_seed(seed), len(point_y)
    lanes, limit, noise_std = runs * points, plan.max_grad_norm, plan.noise_std
    who = torch.arange(points).repeat(runs)
    weights = torch.zeros(lanes, x.shape[1], 10, dtype=x.dtype)
    one_hot = F.one_hot(y, 10).to(x.dtype)
    own_x = point_x[who, None]
    own_hot = F.one_hot(point_y, 10).to(x.dtype)[who, None]
    lengths, own_length = x.norm(dim=1), own_x.norm(dim=2)
    common = {
        "sample_rate": plan.sample_rate,
        "noise_std": noise_std,
        "order": order,
        "generator": generator,
    }
    norms = []
    for _ in range(plan.steps):
        drawn, counted = batches(lanes, len(y), plan.sample_rate, generator)
        features = x[drawn]
        errors = torch.softmax(features @ weights, 2) - one_hot[drawn]
        factors = (limit / (lengths[drawn] * errors.norm(dim=2)).clamp(min=1e-12)).clamp(
            max=1
        ) * counted
        total = features.transpose(1, 2) @ (factors[..., None] * errors)
        own = torch.softmax(own_x @ weights, 2) - own_hot
        length = own_length * own.norm(dim=2)
        gradient = (own_x.transpose(1, 2) @ own) * (limit / length.clamp(min=1e-12)).clamp(max=1)[
            ..., None
        ]
        length = length[:, 0].clamp(max=limit)
        norms.append(length.view(runs, points))
        noise = noise_std * torch.randn(weights.shape, generator=generator, dtype=x.dtype)
        if kind == "add":
            noise = tilted_noise(noise.flatten(1), gradient.flatten(1), **common).view_as(noise)
        else:
            chance = torch.rand(lanes, generator=generator, dtype=torch.float64) < plan.sample_rate
            count = {"with": chance, "without": torch.zeros_like(chance)}.get(kind)
            count = tilted_counts(length, **common) if count is None else count
            total = total + count.to(x.dtype)[:, None, None] * gradient
        weights = weights - learning_rate / plan.expected_batch_size * (total + noise)
    return torch.stack(norms)


def theorem_3_3(norms, plan, order):
    """Theorem 3.3 at p = 3n along runs of these norms, (steps, runs, points): (points,) estimates.

    At K orders (points, K).
    """
    return soft_maximum(
        *costs_and_weights(norms, plan, order, torch.arange(plan.steps - 1, -1, -1))
    ).sum(0)


@experiment(
    "gradients-look-alike/theorem-3.3",
    quick=Composition("mnist-5k", 7, 3.0, epochs=8, points=10, runs=8),
    paper=Composition("mnist-5k", 7, 3.0, epochs=8, points=10, runs=50, others=990),
)
def composition(config, run):
    """Theorem 3.3, the exact composition, the worst case, and the account along each trajectory,
    for the same points.

    At one order, nats: `worst_case`, `theorem_3_3`, `exact` with `low` and `high` (bootstrap, 95%)
    and `upper_bound` (95% confidence), each for both directions. Epsilons, with x against without,
    at the best of the orders: the same, and `trajectory`, (runs, points), the output-specific
    accounts of Yu et al. along the runs with x; and `theorem_3_3_of_others`.
    """
    x, y, point_x, point_y = shrunk(config, run, config.points + config.others)
    plan, few = plan_of(config, len(y)), slice(config.points)

    def runs_of(kind, order=config.order, chosen=few):
        def work(_):
            found = side_by_side(
                x,
                y,
                point_x[chosen],
                point_y[chosen],
                plan,
                kind=kind,
                runs=config.runs,
                order=order,
                learning_rate=config.learning_rate,
                seed=config.seed + order + (chosen.start or 0),
            )
            return {}, {"norms": found.numpy()}

        name = f"{kind}-{order}" if chosen is few else f"{kind}-{order}-from-{chosen.start}"
        ((_, arrays),) = run.pieces(work, [name]).values()
        return torch.as_tensor(arrays["norms"])

    seen = {"remove": runs_of("with"), "add": runs_of("without")}
    tilted = {
        order: composed_exactly(
            runs_of("remove", order), plan, order, "remove", 1 - 0.05 / len(config.orders)
        )
        for order in config.orders
    }
    at_order = {
        "remove": composed_exactly(runs_of("remove"), plan, config.order, "remove"),
        "add": composed_exactly(runs_of("add"), plan, config.order, "add"),
    }
    values = {
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "worst_case": plan.steps * divergence(1.0, plan, config.order),
    }
    for direction, found in at_order.items():
        values |= {
            f"{direction}.theorem_3_3": theorem_3_3(seen[direction], plan, config.order),
            f"{direction}.exact": found.estimate,
            f"{direction}.low": found.low,
            f"{direction}.high": found.high,
            f"{direction}.upper_bound": found.upper_bound,
            f"{direction}.mean_norm": seen[direction].mean((0, 1)),
        }
    starts = range(config.points, len(point_y), 90)
    more = [runs_of("with", chosen=slice(start, start + 90)) for start in starts]
    return values | _in_epsilon(config, plan, seen["remove"], tilted.values(), more)


def _in_epsilon(config, plan, seen, tilted, more):
    """Epsilons by runs with the points, by tilted runs of each order, and by runs with others."""

    def epsilon(rdp):
        return rdp_to_epsilon(rdp, config.orders, config.delta)[0]

    worst = plan.steps * divergence(1.0, plan, torch.tensor(config.orders, dtype=torch.float64))
    trajectory = divergence(seen, plan, config.orders).sum(0)
    values = {
        "worst_case": epsilon(worst),
        "trajectory": records.mean_and_sd(epsilon(trajectory).mean(1)),
        "theorem_3_3": epsilon(theorem_3_3(seen, plan, config.orders)),
        "exact": epsilon(torch.stack([found.estimate for found in tilted], -1)),
        "upper_bound": epsilon(torch.stack([found.upper_bound for found in tilted], -1)),
        "trajectory_mean": epsilon(trajectory).mean(0),
        "trajectory_max": epsilon(trajectory).amax(0),
    }
    if more:
        others = theorem_3_3(torch.cat(more, 2), plan, config.orders)
        values["theorem_3_3_of_others"] = epsilon(others)
    return named("epsilon", **values)


@finding(
    "gradients-look-alike/theorem-3.3",
    "theorem 3.3 is at least the exact composition, for every point and both ways",
)
def _no_less_than_exact(record):
    for direction in DIRECTIONS:
        loose, exact, low, high = (
            np.array(record.values[f"{direction}.{key}"])
            for key in ("theorem_3_3", "exact", "low", "high")
        )
        factors = loose / exact
        points = [
            intervals.Interval(*ends).at_most(bound)
            for *ends, bound in zip(exact, low, high, loose)
        ]
        yield (
            DIRECTIONS[direction],
            f"{factors.min():.1f} to {factors.max():.1f} times",
            intervals.every(*points),
        )


@finding(
    "gradients-look-alike/theorem-3.3",
    "theorem 3.3 gives a smaller epsilon than the worst case, for half of the points or more",
    kind="own",  # the paper says "many data points", of the runs of figure 1
)
def _below_worst_case(record):
    epsilons = [
        *record.values["epsilon.theorem_3_3"],
        *record.values.get("epsilon.theorem_3_3_of_others", ()),
    ]
    found = np.array(epsilons) < 0.99 * record.values["epsilon.worst_case"]
    share = intervals.share(int(found.sum()), found.size)
    yield f"{found.size} points", f"{share:.0%}", share.at_least(0.5)


@finding(
    "gradients-look-alike/theorem-3.3",
    "the exact composition gives a smaller epsilon than the worst case, for half of the points or "
    "more",
    kind="own",
)
def _exact_below_worst_case(record):
    found = np.array(record.values["epsilon.exact"]) < 0.99 * record.values["epsilon.worst_case"]
    share = intervals.share(int(found.sum()), found.size)
    yield f"{found.size} points", f"{share:.0%}", share.at_least(0.5)


@dataclasses.dataclass(frozen=True)
class Unlearning(Regression):
    """Requests to be forgotten, one after another; the order and the budget of the guarantee.

    Fact 5.2 is checked along `sequences` of requests where all divergences are known.
    """

    requests: int = 5
    budget: float = 0.1
    sequences: int = 500


def largest_divergence(sequences, order, budget, seed=0):
    r"""The largest share of the budget that a kept model's divergence takes; how often one is kept.

    "Training" releases the mean of numbers with Gaussian noise, so that the divergence between any
    two data sets is :math:`\alpha (m - m')^2 / (2 \sigma^2)`. In half of the sequences the largest
    numbers ask first, which moves the mean ever further away.
    """
    random, largest, kept, asked = np.random.RandomState(seed), 0.0, 0, 20
    for number in range(sequences):
        values, noise_std = random.rand(60), 10 ** random.uniform(-2.5, -0.5)
        if number % 2:
            values = np.sort(values)[::-1]
        means, trained = [values[gone:].mean() for gone in range(asked + 1)], 0

        def between(one, other, order, means=means, noise_std=noise_std):
            return order * (means[one] - means[other]) ** 2 / (2 * noise_std**2)

        decisions = naive_unlearning(
            lambda request, order, between=between: between(request - 1, request, order),
            requests=asked,
            order=order,
            budget=budget,
        )
        for decision in decisions:
            trained = trained if decision.keep else decision.request
            largest = max(largest, between(trained, decision.request, order) / budget)
            kept += decision.keep
    return largest, kept / (asked * sequences)


@experiment(
    "gradients-look-alike/definition-5.1-fact-5.2",
    quick=Unlearning("mnist-5k", 7, 1.0, epochs=8, points=1, runs=20, order=2),
    paper=Unlearning("mnist", 14, 1.0, epochs=1, points=1, runs=20, order=2),
    version=2,
)
def unlearning(config, run):
    """Naive per-instance unlearning of examples: bounds and decisions, by three divergences.

    `worst_case`, `estimate` and `upper_bound` (95% confidence for each divergence by itself) of the
    exact composition; `norms` the mean gradient norm of each example. Of `largest_divergence`:
    `gaussian.largest` and `gaussian.kept`.
    """
    x, y, _, _ = shrunk(config, run, config.points)
    asking = torch.as_tensor(np.random.RandomState(0).permutation(len(y))[: config.requests])
    plan, found, norms = plan_of(config, len(y)), {}, [math.nan] * config.requests

    def exact(request, order):
        if (request, order) not in found:
            rest = torch.ones(len(y), dtype=torch.bool)
            rest[asking[:request]] = False
            one = asking[request - 1 : request]
            seen = side_by_side(
                x[rest],
                y[rest],
                x[one],
                y[one],
                plan,
                kind="remove",
                runs=config.runs,
                order=int(order),
                learning_rate=config.learning_rate,
                seed=1000 * request + int(order),
            )
            norms[request - 1] = float(seen.mean())
            found[request, order] = composed_exactly(seen, plan, int(order), "remove")
        return found[request, order]

    kinds = {
        "worst_case": lambda request, order: plan.steps * float(divergence(1.0, plan, order)),
        "estimate": lambda request, order: float(exact(request, order).estimate[0]),
        "upper_bound": lambda request, order: float(exact(request, order).upper_bound[0]),
    }
    values = {"noise_multiplier": plan.noise_multiplier, "steps": plan.steps}
    for kind, divergences in kinds.items():
        decisions = naive_unlearning(
            divergences, requests=config.requests, order=config.order, budget=config.budget
        )
        values |= {
            f"{kind}.bound_if_kept": [d.bound_if_kept for d in decisions],
            f"{kind}.keep": [d.keep for d in decisions],
            f"{kind}.retrained": sum(not d.keep for d in decisions),
        }
    largest, kept = largest_divergence(config.sequences, config.order, config.budget)
    return values | {
        "gaussian.largest": largest,
        "gaussian.kept": kept,
        "norms": norms,
        "divergences_needed": len(found),
    }


@finding(
    "gradients-look-alike/definition-5.1-fact-5.2",
    "where divergences are known exactly, no kept model exceeds the budget",
)
def _within_budget(record):
    largest, kept = (record.values[f"gaussian.{key}"] for key in ("largest", "kept"))
    where = f"means with Gaussian noise, {record.config['sequences']} sequences of 20 requests"
    yield where, f"kept at {kept:.0%}, at most {largest:.0%} of the budget", bool(largest <= 1)


@finding(
    "gradients-look-alike/definition-5.1-fact-5.2",
    "per-instance divergences retrain less often than worst-case ones",
    kind="own",
)
def _keeps_longer(record):
    worst, own = (record.values[f"{kind}.retrained"] for kind in ("worst_case", "estimate"))
    requests = record.config["requests"]
    fewer = intervals.share(worst, requests) - intervals.share(own, requests)
    yield "all requests", f"{own} against {worst} of {requests}", fewer.above(0)
