"""A point's own epsilon by the loss along tilted runs."""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F

from dpcompanion.accounting import rdp_to_epsilon
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.per_instance import (
    log_mass,
    loss_divergence,
    loss_epsilon,
    proposal_counts,
    proposal_log_density,
    step_loss,
    tilted_noise,
)
from dpcompanion.reproduction.experiments import experiment
from dpcompanion.reproduction.papers.common import left_out, runnable
from dpcompanion.reproduction.papers.gradients_look_alike.compositions import theorem_3_3
from dpcompanion.reproduction.papers.gradients_look_alike.runs import DIRECTIONS, MODELS, plan_of
from dpcompanion.seeds import derive_seed
from dpcompanion.training import cross_entropy, gaussian_noise, models, train_ensemble


@dataclasses.dataclass(frozen=True)
class Own:
    """Runs of DP-SGD with each of `points` test points, digits at `side` x `side`.

    `runs` by each of the `laws`, pairs of an order and its jumps, for the point against none; the
    first law is that of ordinary runs. `runs_add` at each of `orders_add` for the other way round.
    `moments` are the orders of exact composition and theorem 3.3; `together` points are trained
    side by side.
    """

    data: str
    model: str
    side: int
    points: int
    runs: int
    runs_add: int
    learning_rate: float
    epochs: float
    epsilon: float = 3.0
    laws: tuple = ((1, 0.0), (1, 0.1), (3, 0.1), (5, 0.03), (6, 0.0))
    orders_add: tuple = (2, 5, 10, 20, 40)
    moments: tuple = (3, 4, 5, 6, 8)
    together: int = 4
    resamples: int = 200
    batch_size: int = 128
    max_grad_norm: float = 1.0
    delta: float = 1e-5
    precision: str = "float64"


@dataclasses.dataclass(frozen=True)
class OwnEpsilons:
    """Tasks by name; `larger` need a GPU."""

    tasks: dict
    larger: dict = dataclasses.field(default_factory=dict)
    seed: int = 0


def own_inputs(task, run):
    """A network, training digits and the test points: for LeNet-5 normalised, else from 0 to 1, at
    the task's size.
    """
    found, dtype = [], getattr(torch, task.precision)
    for split in ("train", "test"):
        digits = run.load(task.data, split=split, dtype=dtype)
        if task.model == "softmax":
            features = F.adaptive_avg_pool2d(digits.features, task.side)
        else:
            features = F.interpolate(
                digits.normalized().features, size=task.side, mode="bilinear", align_corners=False
            )
        found += [features, digits.labels]
    x, y, test_x, test_y = found
    chosen = torch.as_tensor(np.random.RandomState(0).permutation(len(test_y))[: task.points])
    model = (
        torch.nn.Sequential(torch.nn.Flatten(), models.linear(task.side**2, 10, seed=0))
        if task.model == "softmax"
        else MODELS[task.model](seed=0)
    )
    return model.to(dtype), (x, y), (test_x[chosen], test_y[chosen])


def tilted_losses(task, model, digits, points, direction, seed, device):
    """Losses, log densities and norms of clipped gradients of runs of some points.

    (runs, points), (runs, laws, points) and (steps, runs, points); the runs of a point are those by
    the first law, then those by the second. All are trained side by side. The plan is the task's,
    but the noise is drawn here, since the loss depends on it, and added with the point's share.
    """
    plan, limit, many = plan_of(task, len(digits[1])), task.max_grad_norm, len(points[1])
    generator = torch.Generator().manual_seed(derive_seed(seed, "tilted", direction))
    removing = direction == "remove"
    laws, runs = (
        (task.laws, task.runs) if removing else ([(a, 0.0) for a in task.orders_add], task.runs_add)
    )
    rows = [slice(k * runs * many, (k + 1) * runs * many) for k in range(len(laws))]
    whose = torch.arange(many).repeat(runs * len(laws))
    losses = torch.zeros(len(whose), dtype=torch.float64)
    taken: list[torch.Tensor] = []
    densities = torch.zeros(len(laws), len(whose), dtype=torch.float64)
    step = {"sample_rate": plan.sample_rate, "noise_std": plan.noise_std}

    def their_shares(ensemble):
        gradient = ensemble.gradients_of(*points)[torch.arange(len(whose)), whose].double().cpu()
        gradient = gradient / (gradient.norm(dim=1, keepdim=True) / limit).clamp(min=1)
        taken.append(gradient.norm(dim=1).clamp(max=limit))
        moved = gaussian_noise(gradient.shape, plan.noise_std, generator)
        for (order, jumps), its in zip(laws, rows):
            options = {**step, "order": order, "generator": generator}
            if removing:
                count = proposal_counts(
                    taken[-1][its], jumps=jumps, max_sensitivity=limit, **options
                )
                moved[its] += count[:, None] * gradient[its]
            else:
                moved[its] = tilted_noise(moved[its], gradient[its], **options)
        losses.add_(step_loss(moved, gradient, direction=direction, **step))
        if removing:
            for row, (order, jumps) in zip(densities, laws):
                row += proposal_log_density(
                    moved, gradient, order=order, jumps=jumps, max_sensitivity=limit, **step
                )
        return moved.to(ensemble.vectors)

    seeds = [derive_seed(seed, "run", direction, k) for k in range(len(losses))]
    train_ensemble(
        model,
        cross_entropy,
        digits,
        dataclasses.replace(plan, noise_multiplier=0.0),
        seeds=seeds,
        learning_rate=task.learning_rate,
        add=their_shares,
        device=device,
        microbatch_size=8192,
        progress=False,
    )
    norms = torch.stack(taken)
    if not removing:
        for row, (order, _) in zip(densities, laws):
            row += (order - 1) * losses - log_mass(
                norms, order=order, direction=direction, **step
            ).sum(0)
    return (
        losses.view(-1, many),
        densities.view(len(laws), -1, many).transpose(0, 1),
        norms.view(plan.steps, -1, many),
    )


def exactly_by_losses(losses, densities, task):
    """Epsilon by exact composition at its best order, from all runs, and its 95% bootstrap
    interval: (3, points).
    """

    def divergences(rows):
        return torch.stack(
            [loss_divergence(losses[rows], densities[rows], order=order) for order in task.moments],
            -1,
        )

    epsilon, best = rdp_to_epsilon(
        divergences(torch.arange(len(losses))).clamp(min=1e-9), task.moments, task.delta
    )
    place = torch.tensor([task.moments.index(int(order)) for order in best])[:, None]
    generator = torch.Generator().manual_seed(0)
    again = torch.stack(
        [
            divergences(torch.randint(len(losses), (len(losses),), generator=generator)).gather(
                -1, place
            )
            for _ in range(task.resamples)
        ]
    )
    ends = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).clamp(min=1e-9)
    return torch.stack(
        [
            epsilon,
            *(
                torch.stack(
                    [
                        rdp_to_epsilon(one, [order], task.delta)[0]
                        for one, order in zip(end, best.tolist())
                    ]
                )
                for end in ends
            ),
        ]
    )


def scheduled(norms, plan):
    """A schedule of norms, epsilon of an example that is clipped to it, by PLD, and how often the
    other half of runs is.

    The schedule is the largest norm of each step in the first half of the runs (steps, runs),
    rounded up to twentieths of the clip norm.
    """
    first, others = norms.tensor_split(2, 1)
    levels = torch.ceil(first.amax(1) / plan.max_grad_norm * 20 - 1e-9).clamp(min=1)
    counts = torch.bincount(levels.long(), minlength=21)[None, 1:]
    epsilon = epsilon_of_histories(
        counts,
        sample_rate=plan.sample_rate,
        delta=plan.delta,
        noise_multipliers=plan.noise_multiplier / torch.arange(1, 21) * 20,
    )
    return epsilon[0], (others > levels[:, None] / 20 * plan.max_grad_norm).double().mean()


def _epsilon_of(losses, densities, task, plan, direction, uniform):
    """`loss_epsilon` of one direction, at 95% for both together; none above the `uniform` one."""
    laws = task.laws if direction == "remove" else [(order, 0.0) for order in task.orders_add]
    step = {"sample_rate": plan.sample_rate, "noise_std": plan.noise_std, "direction": direction}

    def mass(a, jumps):
        most = float(log_mass(task.max_grad_norm, order=a, **step)) if a > 1 else 0.0
        return plan.steps * (most - math.log1p(-jumps))

    floors = [(a, mass(a, jumps)) for a, jumps in laws]
    sure = 1 - 0.05 / len(DIRECTIONS)
    return loss_epsilon(
        losses, densities, delta=task.delta, worst_case=uniform, floors=floors, confidence=sure
    )


@experiment(
    "gradients-look-alike/own-epsilon",
    quick=OwnEpsilons(
        {
            "softmax regression, 7 x 7": Own(
                "mnist-5k", "softmax", 7, points=4, runs=16, runs_add=4, learning_rate=4.0, epochs=2
            )
        }
    ),
    paper=OwnEpsilons(
        {
            "softmax regression, 14 x 14": Own(
                "mnist-5k",
                "softmax",
                14,
                points=8,
                runs=24,
                runs_add=6,
                learning_rate=2.0,
                epochs=5,
            )
        },
        larger={
            "LeNet-5": Own(
                "mnist",
                "lenet5",
                32,
                points=4,
                runs=24,
                runs_add=6,
                learning_rate=0.1,
                epochs=10,
                precision="float32",
            )
        },
    ),
)
def own_epsilon(config, run):
    """Epsilon of single test points, if in the training set, by several accounts of the same runs.

    For each task, (points,): `{direction}.estimate`, `.low`, `.high` and `.upper_bound` of
    `loss_epsilon`, and the same without a direction for the larger of both (95% confidence for both
    together); with the point against without it `exact` by exact composition at the best order
    (with `exact_low`, `exact_high`), `theorem_3_3` at its best order; `schedule` and `clipped` of
    `scheduled`; `norm`, the mean along ordinary runs. `everybody` (PLD) and `everybody_rdp` are the
    run's own.
    """
    values = left_out(config, run)
    for number, (name, task) in enumerate(runnable(config, run).items()):
        model, digits, (point_x, point_y) = own_inputs(task, run)
        plan = plan_of(task, len(digits[1]))
        groups = torch.arange(task.points).split(task.together)
        names = {
            f"task-{number}.{direction}.points-{k}": (direction, group)
            for direction in DIRECTIONS
            for k, group in enumerate(groups)
        }

        def work(piece):
            direction, group = names[piece]
            found = tilted_losses(
                task,
                model,
                digits,
                (point_x[group], point_y[group]),
                direction,
                derive_seed(config.seed, int(group[0])),
                run.device,
            )
            return {}, {
                key: one.numpy() for key, one in zip(("losses", "densities", "norms"), found)
            }

        done, uniform = run.pieces(work, names, label="tilted runs"), plan.epsilon(accountant="pld")
        values |= {
            f"{name}.steps": plan.steps,
            f"{name}.noise_multiplier": plan.noise_multiplier,
            f"{name}.sample_rate": plan.sample_rate,
            f"{name}.everybody": uniform,
            f"{name}.everybody_rdp": plan.epsilon(accountant="rdp"),
        }
        for direction in DIRECTIONS:
            losses, densities, norms = (
                torch.as_tensor(
                    np.concatenate(
                        [done[piece][1][key] for piece in names if names[piece][0] == direction], -1
                    )
                )
                for key in ("losses", "densities", "norms")
            )
            found = _epsilon_of(losses, densities, task, plan, direction, uniform)
            values |= {
                f"{name}.{direction}.{key}": getattr(found, key)
                for key in ("estimate", "low", "high", "upper_bound")
            }
            if direction == "remove":
                ordinary = norms[:, : task.runs]
                exact = exactly_by_losses(losses, densities, task)
        values |= {
            f"{name}.{key}": torch.maximum(
                *(values[f"{name}.{direction}.{key}"] for direction in DIRECTIONS)
            )
            for key in ("estimate", "low", "high", "upper_bound")
        }
        values |= {
            f"{name}.{key}": one for key, one in zip(("exact", "exact_low", "exact_high"), exact)
        }
        values |= {f"{name}.{key}": one for key, one in _by_norms(ordinary, task, plan).items()}
    return values


def _by_norms(norms, task, plan):
    """What the points' norms along ordinary runs, (runs, steps, points), say of their epsilons."""
    loose = theorem_3_3(norms, plan, task.moments)
    schedules = [scheduled(norms[..., k], plan) for k in range(task.points)]
    return {
        "theorem_3_3": rdp_to_epsilon(loose, task.moments, task.delta)[0],
        "norm": norms.mean((0, 1)),
        "schedule": [epsilon for epsilon, _ in schedules],
        "clipped": [share for _, share in schedules],
    }
