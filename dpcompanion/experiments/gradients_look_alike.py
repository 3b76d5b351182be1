r"""Exhibits of Thudi et al. 2024, "Gradients look alike".

Most of them need one thing: the gradient norms of some points along some runs of DP-SGD.
`watched` trains the runs of a task and notes them, for `points` training points and as many
test points, at `stops` moments (between two of them norms count as at the first).
A run on X' = the training set is what the divergence D(X' || X) of a training point looks at, and a run on
X = the training set what D(X || X') of a test point looks at: one set of runs serves all points of both kinds.

What the paper does not spell out and its public code shows: digits are scaled to 32 x 32 and normalised by
public constants; the noise comes from Opacus's RDP accountant; the initial stage is the network before
training; corollary 3.1 is taken at p = 10^4 with half of delta for each part.
"""

import dataclasses
import functools
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats

from dpcompanion import data, intervals, records
from dpcompanion.accounting import rdp_sampled_gaussian, rdp_to_epsilon
from dpcompanion.accounting.histories import epsilon_of_histories
from dpcompanion.experiments import experiment, finding
from dpcompanion.per_instance import (
    coupled_divergence, coupled_epsilon, exact_composition, holder_epsilon, holder_order, law_counts, law_log_density,
    log_mass, loss_divergence, loss_epsilon, naive_unlearning, step_divergence, step_loss,
    tilted_counts, tilted_noise, update_divergence,
)
from dpcompanion.training import (
    DPSGDPlan, clipped_sum, cross_entropy, gradient_norms, models, train, train_ensemble,
)
from dpcompanion.training.clipping import per_example_gradients
from dpcompanion.training.noise import derive_seed, gaussian_noise

STAGES = ("initial", "middle", "final")
# Runs with the point, for training points; without it, for test points.
DIRECTIONS = {"remove": "X' || X", "add": "X || X'"}
ORDERS = (1.25, 1.5, 1.75, 2, 2.2, 2.4, 2.6, 2.8, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
KEPT = 2000                                # steps of runs beyond which they are kept on disk


@dataclasses.dataclass(frozen=True)
class Task:
    """Runs of DP-SGD on one data set, from one initialisation, and how often to look at how many points."""

    data: str
    model: str
    epsilon: float = 10.0
    batch_size: int = 128
    epochs: int = 10
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    drops: tuple = ()                      # epochs at which the learning rate drops tenfold
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    runs: int = 4
    points: int = 100
    stops: int = 100


MNIST = Task("mnist", "lenet5", runs=5, points=200)
PLAIN_MNIST = dataclasses.replace(MNIST, model="softmax", runs=2)
CIFAR10 = Task("cifar10", "resnet20", epochs=200, momentum=0.9, weight_decay=1e-4, drops=(100, 150), runs=10,
               points=500)
DIGITS = Task("mnist-5k", "lenet5", learning_rate=1.0, runs=3, points=60, stops=31)
PLAIN_DIGITS = dataclasses.replace(DIGITS, model="softmax", runs=1)


@dataclasses.dataclass(frozen=True)
class Watch:
    """What an exhibit looks at: tasks by name, and the order of the divergence."""

    tasks: dict
    order: float = 8


@dataclasses.dataclass(frozen=True)
class WatchMore(Watch):
    """With tasks that need a GPU; without one a record lists them as `not_run`."""

    larger: dict = dataclasses.field(default_factory=dict)


def runnable(config, run):
    """The tasks that this device can do."""
    return config.tasks if run.device.type == "cpu" else {**config.tasks, **config.larger}


def reported(record):
    """The tasks that a record has values of."""
    left = record.values.get("not_run", ())
    return [name for kind in ("tasks", "larger") for name in record.config.get(kind, ()) if name not in left]


def left_out(config, run):
    """What a record says of the tasks that were not run: {"not_run": names}, or nothing."""
    names = [name for name in config.larger if name not in runnable(config, run)]
    return {"not_run": names} if names else {}


# Training ------------------------------------------------------------------------------------------------------------

_MODELS = {
    "lenet5": models.lenet5,
    "mnist_cnn": models.mnist_cnn,
    "softmax": lambda seed: torch.nn.Sequential(torch.nn.Flatten(), models.linear(784, 10, seed=seed)),
    "resnet20": functools.partial(models.resnet20, groups=16, affine=True),
}


def _inputs(name, model, split, run):
    """Features and labels as the network wants them: normalised, LeNet-5's digits scaled to 32 x 32."""
    found = run.load(name, split=split).normalised()
    features = found.features
    if model == "lenet5":
        features = F.interpolate(features, size=32, mode="bilinear", align_corners=False)
    return features, found.labels


def plan_of(task, examples):
    """The plan that spends the task's epsilon, by RDP (add or remove one example, Poisson sampling)."""
    rate = task.batch_size / examples
    return DPSGDPlan.for_epsilon(task.epsilon, n=examples, sample_rate=rate, steps=round(task.epochs / rate),
                                 max_grad_norm=task.max_grad_norm, delta=task.delta, accountant="rdp")


def moments(task, steps):
    """After how many steps the points are looked at: before training, then `stops` times, and halfway."""
    return sorted({round(steps * i / task.stops) for i in range(task.stops + 1)} | {steps // 2})


def watch(task, seed, run):
    """One run: norms (moments, 2 points), whether a point is classified correctly, weights by stage, test accuracy."""
    x, y = _inputs(task.data, task.model, "train", run)
    test_x, test_y = _inputs(task.data, task.model, "test", run)
    plan = plan_of(task, len(y))
    members, others = (torch.as_tensor(np.random.RandomState(0).permutation(n)[:task.points])
                       for n in (len(y), len(test_y)))
    points = (torch.cat((x[members], test_x[others])).to(run.device),
              torch.cat((y[members], test_y[others])).to(run.device))
    model = _MODELS[task.model](seed=0).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=task.momentum,
                                weight_decay=task.weight_decay)
    stops = set(moments(task, plan.steps))
    norms, correct, weights, started = [], [], [], time.perf_counter()

    def look(step):
        model.eval()
        norms.append(gradient_norms(model, cross_entropy, *points, method="mixed").cpu())
        with torch.no_grad():
            correct.append((model(points[0]).argmax(1) == points[1]).cpu())
            if step in (0, plan.steps // 2, plan.steps):
                weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).cpu())

    def on_step(state):
        if state.step in stops:
            look(state.step)
        drops = sum(state.step >= epoch * plan.steps_per_epoch for epoch in task.drops)
        optimizer.param_groups[0]["lr"] = task.learning_rate * 0.1**drops

    look(0)
    train(model, cross_entropy, (x, y), plan, optimizer=optimizer, seed=seed, device=run.device, method="mixed",
          on_step=on_step, progress=False)
    with torch.no_grad():
        right = sum((model(part.to(run.device)).argmax(1).cpu() == labels).sum()
                    for part, labels in zip(test_x.split(1000), test_y.split(1000)))
    arrays = {"norms": norms, "correct": correct, "weights": weights}
    values = {"accuracy": float(right) / len(test_y), "seconds": time.perf_counter() - started}
    return values, {key: torch.stack(value).numpy() for key, value in arrays.items()}


_WATCH = (watch, _inputs, plan_of, moments)
_WATCHED = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """The runs of a task: norms and correct (runs, moments, 2 points), weights (runs, stages, parameters)."""

    plan: DPSGDPlan
    moments: list
    norms: torch.Tensor
    correct: torch.Tensor
    weights: torch.Tensor
    accuracy: list

    def seen(self, direction, what="norms"):
        """Norms (or `correct`) of the points that a direction is about, (runs, moments, points)."""
        first, second = getattr(self, what).chunk(2, -1)
        return {"remove": first, "add": second}[direction]

    @property
    def stages(self):
        """Where the stages are among the moments."""
        return [self.moments.index(step) for step in (0, self.plan.steps // 2, self.plan.steps)]


def watched(task, run):
    """The runs of a task, `Watched`, seeds 0, 1, ...; long ones are kept in the data folder, each as it ends."""
    examples = len(run.load(task.data, split="train"))
    plan = plan_of(task, examples)
    key = {"task": {**dataclasses.asdict(task), "runs": None}, "code": records.code_hash(*_WATCH),
           "device": run.device.type}
    hashed, pieces = records.hash_of({**key, "runs": task.runs}), [f"seed-{seed}" for seed in range(task.runs)]
    if hashed not in _WATCHED:
        def work(piece):
            return watch(task, int(piece.removeprefix("seed-")), run)

        if plan.steps < KEPT:
            parts = [work(piece) for piece in pieces]
        else:
            folder = data.data_folder() / "watched" / f"{task.data}-{task.model}-{records.hash_of(key)[:12]}"
            parts = records.resumable(work, pieces, folder=folder, config=key).values()
        arrays = {name: torch.as_tensor(np.stack([found[name] for _, found in parts]))
                  for name in ("norms", "correct", "weights")}
        arrays["norms"] = arrays["norms"].double().clamp(max=task.max_grad_norm)
        _WATCHED[hashed] = Watched(plan, moments(task, plan.steps), **arrays,
                                   accuracy=[v["accuracy"] for v, _ in parts])
    run.load(task.data, split="test")
    return _WATCHED[hashed]


# Theorems 3.2 and 3.3 ------------------------------------------------------------------------------------------------

def divergence(norms, plan, order):
    """Theorem 3.2 for one step, of clipped gradients of these norms: the shape of `norms`."""
    return step_divergence(sample_rate=plan.sample_rate, noise_multiplier=plan.noise_std, sensitivity=norms,
                           orders=order)


def share_of(norms, plan, order):
    """`divergence` over that of the worst case, a gradient as long as the clip norm."""
    return divergence(norms, plan, order) / divergence(plan.max_grad_norm, plan, order)


def weighted_costs(found, direction, order):
    """Divergences of the steps at their orders in theorem 3.3, p = 3n, and weights.

    The divergences are (moments but the last, runs, points), the weights (moments but the last,).
    The theorem reads D <= sum_t ln E exp(w_t D_t) / w_t, where D_t is the divergence of step t at the order
    g_t = 1 + (p/(p-1))^(n-t) (order-1), w_t = p (g_t - 1), and E the mean over runs: an estimate of their expectation.
    """
    n, norms = found.plan.steps, found.seen(direction)
    orders = holder_order(order, 3 * n, n - 1 - torch.tensor(found.moments[:-1]))
    costs = torch.stack([divergence(norms[:, index], found.plan, g) for index, g in enumerate(orders.tolist())])
    return costs, 3 * n * (orders - 1)


def soft_maximum(costs, weights):
    """ln E exp(w D) / w over the runs: between their mean and their maximum."""
    weights = weights[:, None]
    return (torch.logsumexp(weights[..., None] * costs, 1) - math.log(costs.shape[1])) / weights


def contributions(found, direction, order):
    """What each step adds to the sum of theorem 3.3: (moments but the last, points)."""
    return soft_maximum(*weighted_costs(found, direction, order))


def composed(found, direction, order):
    """Theorem 3.3 for the whole run, (points,): every step between two moments costs what the first of them costs."""
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64)
    return steps @ contributions(found, direction, order)


def epsilons(found, direction, orders=ORDERS):
    """Epsilon of each point by theorem 3.3 at its best order, and that order."""
    total = torch.stack([composed(found, direction, order) for order in orders], -1)
    return rdp_to_epsilon(total, orders, found.plan.delta)


def composed_exactly(norms, plan, order, direction, confidence=0.95):
    """`exact_composition` of tilted runs whose norms these are, (steps, runs, points)."""
    step = {"sample_rate": plan.sample_rate, "noise_std": plan.noise_std, "order": order, "direction": direction}
    worst = plan.steps * float(log_mass(plan.max_grad_norm, **step)) / (order - 1)
    return exact_composition(log_mass(norms, **step).sum(0), order=order, worst_case=worst, confidence=confidence)


def worst_case(plan, orders=ORDERS):
    """The data-independent epsilon of a run and its best order."""
    step = rdp_sampled_gaussian(sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, orders=orders)
    return rdp_to_epsilon(plan.steps * step, orders, plan.delta)


# Figures 1, 5 and 6: the cost of steps over training -----------------------------------------------------------------

def _vary(task, **changes):
    return dataclasses.replace(task, **changes)


_COMPOSE = (*_WATCH, watched, divergence, share_of, weighted_costs, soft_maximum, composed, epsilons, worst_case)


@dataclasses.dataclass(frozen=True)
class Tilted:
    """Tilted runs: at which order, of which training points by their rank among those watched, how many of each."""

    order: int
    ranks: tuple = (0.1, 0.5, 0.75)
    runs: int = 3


@dataclasses.dataclass(frozen=True)
class Compositions(Watch):
    """Figure 1: for which tasks the exact composition is computed too."""

    exact: dict = dataclasses.field(default_factory=dict)


FIGURE_1 = Compositions({"eps 10": MNIST, "eps 1": _vary(MNIST, epsilon=1.0, runs=2)},
                        exact={"eps 10": Tilted(3), "eps 1": Tilted(12)})
FIGURE_1_QUICK = Compositions({"eps 10": DIGITS, "eps 1": _vary(DIGITS, epsilon=1.0, runs=1)})


def tilted_norms(task, order, point, seed, run):
    """Clipped norms of a training point's gradients along one tilted run with it ("remove"), (steps,)."""
    x, y = _inputs(task.data, task.model, "train", run)
    plan, norms = plan_of(task, len(y)), []
    others = torch.ones(1, len(y), dtype=torch.bool)
    others[0, point] = False
    generator = torch.Generator().manual_seed(derive_seed(seed, "tilted", point))

    def its_share(ensemble):
        gradient = ensemble.gradients_of(x[point:point + 1], y[point:point + 1])[:, 0]
        length = gradient.norm(dim=1).double()
        norms.append(length.clamp(max=task.max_grad_norm).cpu())
        count = tilted_counts(norms[-1], sample_rate=plan.sample_rate, noise_std=plan.noise_std, order=order,
                              generator=generator).to(length)
        return (count / (length / task.max_grad_norm).clamp(min=1)).to(gradient.dtype)[:, None] * gradient

    train_ensemble(_MODELS[task.model](seed=0), cross_entropy, (x, y), plan, seeds=[seed], members=others,
                   learning_rate=task.learning_rate, momentum=task.momentum, weight_decay=task.weight_decay,
                   add=its_share, device=run.device, progress=False)
    return torch.cat(norms)


def kept_norms(task, order, points, runs, run):
    """`tilted_norms` of every point, (steps, runs, points), kept in the data folder, each run as it ends."""
    key = {"task": {**dataclasses.asdict(task), "runs": None}, "order": order, "device": run.device.type,
           "code": records.code_hash(tilted_norms, _inputs, plan_of)}
    folder = data.data_folder() / "watched" / f"{task.data}-{task.model}-tilted-{records.hash_of(key)[:12]}"
    pieces = {f"point-{point}.seed-{seed}": (point, seed) for seed in range(runs) for point in points}
    done = records.resumable(lambda piece: ({}, {"norms": tilted_norms(task, order, *pieces[piece], run).numpy()}),
                             pieces, folder=folder, config=key, label="tilted runs")
    found = torch.stack([torch.as_tensor(arrays["norms"]) for _, arrays in done.values()], 1)
    return found.view(len(found), runs, len(points))


def exactly(task, tilted, run):
    """The exact composition of a few points beside theorem 3.3, the worst case and the mean account along ordinary
    runs, all with the point against without it: nats at one order, and its epsilon."""
    found, order = watched(task, run), tilted.order
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64)
    along = (divergence(found.seen("remove")[:, :-1], found.plan, order) * steps[:, None]).sum(1).mean(0)
    ranked = along.argsort(stable=True)
    chosen = ranked[[round(rank * (len(ranked) - 1)) for rank in tilted.ranks]]
    members = np.random.RandomState(0).permutation(found.plan.n)[:task.points]
    norms = kept_norms(task, order, members[chosen].tolist(), tilted.runs, run)
    exact = composed_exactly(norms, found.plan, order, "remove")

    def epsilon(rdp):
        return rdp_to_epsilon(torch.as_tensor(rdp)[..., None], [order], task.delta)[0]

    return {"order": order, "along_runs": along[chosen], "theorem_3_3": composed(found, "remove", order)[chosen],
            "exact": exact.estimate, "low": exact.low, "high": exact.high, "upper_bound": exact.upper_bound,
            "worst_case": found.plan.steps * divergence(task.max_grad_norm, found.plan, order),
            "epsilon": epsilon(exact.estimate), "epsilon_bound": epsilon(exact.upper_bound),
            "epsilon_theorem_3_3": epsilons(found, "remove")[0][chosen]}


@experiment("gradients-look-alike/figure-1",
            uses=(*_COMPOSE, tilted_norms, kept_norms, composed_exactly, exactly),
            quick=FIGURE_1_QUICK, paper=FIGURE_1)
def figure_1(config, run):
    """Contributions of the steps over the data-independent cost at one order, and epsilon of the whole run at the best.

    For each task and direction: means and 10th percentiles over points, for the first step, the middle and the end;
    `total`, theorem 3.3 for the whole run over the data-independent sum; `epsilon`, quantiles over points.
    `exact`: the exact composition of some training points.
    """
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        found = watched(task, run)
        baseline = divergence(task.max_grad_norm, found.plan, config.order)
        epsilon, order = worst_case(found.plan)
        values |= {f"{name}.accuracy": records.mean_and_sd(found.accuracy),
                   f"{name}.noise_multiplier": found.plan.noise_multiplier,
                   f"{name}.steps": found.plan.steps, f"{name}.worst_case.rdp": found.plan.steps * baseline,
                   f"{name}.worst_case.epsilon": epsilon, f"{name}.worst_case.order": order}
        arrays[f"{name}.moments"] = np.array(found.moments)
        for direction in DIRECTIONS:
            row = f"{name}.{direction}"
            share = contributions(found, direction, config.order) / baseline
            mean, low = share.mean(1), share.quantile(0.1, dim=1)
            middle = found.stages[1]
            values |= {f"{row}.first": mean[0], f"{row}.middle": mean[middle], f"{row}.last": mean[-1],
                       f"{row}.first_p10": low[0], f"{row}.middle_p10": low[middle], f"{row}.last_p10": low[-1],
                       f"{row}.last_p10_cost": low[-1] * baseline}
            epsilon, best = epsilons(found, direction)
            total = composed(found, direction, config.order) / (found.plan.steps * baseline)
            quantiles = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
            values |= {f"{row}.total": total.mean(), f"{row}.total_p10": total.quantile(0.1),
                       f"{row}.epsilon": epsilon.quantile(quantiles),
                       f"{row}.orders": [best.min(), best.max()],
                       f"{row}.above_worst_case": (epsilon > values[f"{name}.worst_case.epsilon"]).double().mean()}
            arrays |= {f"{row}.mean": mean.numpy(), f"{row}.p10": low.numpy(), f"{row}.epsilon": epsilon.numpy(),
                       f"{row}.total": total.numpy()}
    for name, tilted in config.exact.items():
        values |= {f"{name}.exact.{key}": value for key, value in exactly(config.tasks[name], tilted, run).items()}
    return values, arrays


def _points(record, name):
    """How many points a task of a record looks at."""
    return record.config["tasks"][name]["points"]


def _mean_of(share, n):
    """The interval of a mean over n points of shares between 0 and 1: none varies more than zeros and ones do."""
    return intervals.share(round(share * n), n) if 0 <= share <= 1 + 1e-6 else intervals.unknown(share)


@finding("gradients-look-alike/figure-1", "the mean share of the first step is above 1")
def _first_step_dearer(record):
    for name, direction, row in _rows(record):
        mean, low = record.values[f"{row}.first"], record.values[f"{row}.first_p10"]
        # Nine points in ten of those seen lie at the 10th percentile or above, and none lies below 0.
        n = _points(record, name)
        share = intervals.Interval(mean, low * intervals.share(math.floor(0.9 * n), n).low, math.inf)
        yield f"{name}, {direction}", f"{mean:.2f}, at least {share.low:.2f}", share.above(1)


@finding("gradients-look-alike/figure-1", "the mean share of the last step is below one half")
def _falls_well_below(record):
    for name, direction, row in _rows(record):
        share = _mean_of(record.values[f"{row}.last"], _points(record, name))
        yield f"{name}, {direction}", f"{share:.2f}", share.below(0.5)


@finding("gradients-look-alike/figure-1", "the 10th percentile of the last step's share is below a tenth of its mean")
def _long_tail(record):
    # The record holds the percentile and no points: it has no interval.
    for name, direction, row in _rows(record):
        low, mean = (record.values[f"{row}.{key}"] for key in ("last_p10", "last"))
        yield (f"{name}, {direction}", f"{low:.0e} of {mean:.2f} (no interval)",
               intervals.unknown(low).below(mean / 10))


@finding("gradients-look-alike/figure-1",
         "with less noise (eps 10) the 10th percentile of the last step's cost is smaller than at eps 1")
def _noise_is_not_always_better(record):
    for direction in DIRECTIONS:
        loud, quiet = (record.values[f"{name}.{direction}.last_p10_cost"] for name in ("eps 1", "eps 10"))
        yield (DIRECTIONS[direction], f"{quiet:.0e} against {loud:.0e} (no interval)",
               intervals.unknown(quiet).below(loud))


@finding("gradients-look-alike/figure-1",
         "theorem 3.3, at the best order, gives the median point at most half of the data-independent epsilon")
def _epsilon_halved(record):
    for name, direction, row in _rows(record):
        median = intervals.quantile(record.arrays[f"{row}.epsilon"], 0.5)
        worst = record.values[f"{name}.worst_case.epsilon"]
        yield f"{name}, {direction}", f"{median:.2f} of {worst:.2f}", median.at_most(worst / 2)


@finding("gradients-look-alike/figure-1",
         "the exact composition, at one order, gives the median point a smaller epsilon than theorem 3.3 at its best",
         kind="own")
def _exact_below_theorem(record):
    for name, tilted in record.config.get("exact", {}).items():
        # At the median rank of those that were composed exactly; the upper end is its 95% bound.
        exact, bound, loose = (dict(zip(tilted["ranks"], record.values[f"{name}.exact.{key}"]))[0.5]
                               for key in ("epsilon", "epsilon_bound", "epsilon_theorem_3_3"))
        found = intervals.Interval(exact, -math.inf, bound)
        yield (f"{name}, {DIRECTIONS['remove']}", f"{exact:.2f}, at most {bound:.2f}, against {loose:.2f}",
               found.below(loose))


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


@experiment("gradients-look-alike/figure-5", uses=_COMPOSE, quick=Intervals({"eps 10": DIGITS}),
            paper=Intervals({"eps 10": MNIST}))
def figure_5(config, run):
    """Contributions of the steps for single training points, with 95% bootstrap intervals over the runs."""
    (name, task), = config.tasks.items()
    found = watched(task, run)
    baseline = divergence(task.max_grad_norm, found.plan, config.order)
    costs, weights = weighted_costs(found, "remove", config.order)
    costs = costs[..., :config.shown]
    draws = torch.randint(task.runs, (config.resamples, task.runs), generator=torch.Generator().manual_seed(0))
    again = torch.stack([soft_maximum(costs[:, draw], weights) for draw in draws]) / baseline
    low, high = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    share = soft_maximum(costs, weights) / baseline
    steps = torch.as_tensor(np.diff(found.moments), dtype=torch.float64) / found.plan.steps
    values = {f"{name}.runs": task.runs, f"{name}.width": steps @ (high - low), f"{name}.widest": (high - low).amax(0),
              f"{name}.last": share[-1]}
    return values, {"moments": np.array(found.moments), "share": share.numpy(), "low": low.numpy(),
                    "high": high.numpy()}


@finding("gradients-look-alike/figure-5",
         "the mean width of the 95% interval, over points and steps, is below a fifth of the data-independent cost")
def _narrow(record):
    for name in record.config["tasks"]:
        width = intervals.mean(record.values[f"{name}.width"])
        yield name, f"{width:.2f}", width.below(0.2)


FIGURE_6 = WatchMore({"eps 10": MNIST, "eps 1": _vary(MNIST, epsilon=1.0, runs=2),
                      "batch 64": _vary(PLAIN_MNIST, batch_size=64, runs=1),
                      "batch 512": _vary(PLAIN_MNIST, batch_size=512, runs=1), "softmax regression": PLAIN_MNIST},
                     larger={"ResNet-20, CIFAR-10": CIFAR10})
FIGURE_6_QUICK = WatchMore({"eps 10": DIGITS, "eps 1": _vary(DIGITS, epsilon=1.0, runs=1),
                            "batch 64": _vary(PLAIN_DIGITS, batch_size=64),
                            "batch 512": _vary(PLAIN_DIGITS, batch_size=512), "softmax regression": PLAIN_DIGITS})


@experiment("gradients-look-alike/figure-6", uses=(*_COMPOSE, runnable, left_out), quick=FIGURE_6_QUICK, paper=FIGURE_6)
def figure_6(config, run):
    """The mean cost of a step over the data-independent one, at tenths of the run, and epsilon of the whole run."""
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = watched(task, run)
        baseline = divergence(task.max_grad_norm, found.plan, config.order)
        share = contributions(found, "remove", config.order).mean(1) / baseline
        tenths = np.searchsorted(found.moments, [found.plan.steps * k / 10 for k in range(10)], side="right") - 1
        epsilon, _ = epsilons(found, "remove")
        values |= {f"{name}.share": share[tenths], f"{name}.last": share[-1],
                   f"{name}.accuracy": np.mean(found.accuracy),
                   f"{name}.worst_case.epsilon": worst_case(found.plan)[0],
                   f"{name}.epsilon": epsilon.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))}
    return values


@finding("gradients-look-alike/figure-6", "the mean share of the last step is below half of the first step's")
def _falls_in_every_setting(record):
    tasks = record.config["tasks"] | record.config.get("larger", {})
    for name in reported(record):
        # At the first step all points are alike.
        first, last = record.values[f"{name}.share"][0], record.values[f"{name}.last"]
        last = _mean_of(last, tasks[name]["points"])
        yield name, f"{first:.2f} to {last:.2f}", last.below(first / 2)


# Figures 2, 3, 7 and 9: points at three stages of one run ------------------------------------------------------------

def stages_of(found, order):
    """The cost of one step over the data-independent one, and who is classified correctly, (stages, points).

    At the stages of the first run, by theorem 3.2 at `order`.
    """
    norms, correct = found.norms[0, found.stages], found.correct[0, found.stages]
    return share_of(norms, found.plan, order), correct


def step_epsilon(norms, plan):
    """Epsilon of one step of clipped gradients of these norms at the run's delta: the sampled Gaussian mechanism's own.

    A single step is mostly covered by delta alone; what is left are the points that a step can give away.  An epsilon
    by RDP would end at a floor of its own, far above that of most points.
    """
    return coupled_epsilon(norms[None], sample_rate=plan.sample_rate, noise_std=plan.noise_std, delta=plan.delta)


_STAGES = (*_WATCH, watched, divergence, share_of, stages_of, step_epsilon)
_BATCHES = {f"batch {size}": _vary(CIFAR10, batch_size=size, runs=1) for size in (32, 64, 256, 512)}
FIGURE_2 = Watch({"batch 128": _vary(CIFAR10, runs=1), **_BATCHES})
FIGURE_2_QUICK = Watch({"batch 128": DIGITS, "batch 64": _vary(PLAIN_DIGITS, batch_size=64),
                        "batch 512": _vary(PLAIN_DIGITS, batch_size=512)})


@experiment("gradients-look-alike/figure-2", uses=_STAGES, quick=FIGURE_2_QUICK, paper=FIGURE_2)
def figure_2(config, run):
    """Costs of one step over the data-independent one, quantiles over points at three stages, and its epsilon."""
    values, arrays = {}, {}
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    for name, task in config.tasks.items():
        found = watched(task, run)
        share, _ = stages_of(found, config.order)
        epsilon = step_epsilon(found.norms[0, found.stages], found.plan)
        values[f"{name}.worst_case.epsilon"] = step_epsilon(torch.full((1,), task.max_grad_norm, dtype=torch.float64),
                                                            found.plan)[0]
        for stage, costs, eps in zip(STAGES, share, epsilon):
            values |= {f"{name}.{stage}.share": costs.quantile(quantiles),
                       f"{name}.{stage}.below_tenth": (costs < 0.1).double().mean(),
                       f"{name}.{stage}.below_thousandth": (costs < 1e-3).double().mean(),
                       f"{name}.{stage}.epsilon": eps.quantile(quantiles)}
        arrays[f"{name}.share"] = share.numpy()
    return values, arrays


@finding("gradients-look-alike/figure-2",
         "at the final stage, a tenth of the points or more cost less than a thousandth of the data-independent step")
def _tail_at_the_end(record):
    for name in record.config["tasks"]:
        n = _points(record, name)
        share = intervals.share(round(record.values[f"{name}.final.below_thousandth"] * n), n)
        yield name, f"{share:.0%}", share.at_least(0.1)


def correct_and_not(found, order):
    """{stage: {"correct" or "incorrect": (points, mean share, median share, mean epsilon of the step)}}."""
    share, correct = stages_of(found, order)
    epsilon = step_epsilon(found.norms[0, found.stages], found.plan)
    table = {}
    for stage, costs, right, eps in zip(STAGES, share, correct, epsilon):
        for word, chosen in (("correct", right), ("incorrect", ~right)):
            some = bool(chosen.any())
            table[f"{stage}.{word}.points"] = int(chosen.sum())
            table[f"{stage}.{word}.mean"] = costs[chosen].mean() if some else math.nan
            table[f"{stage}.{word}.median"] = costs[chosen].median() if some else math.nan
            table[f"{stage}.{word}.epsilon"] = eps[chosen].mean() if some else math.nan
    return table


def _correct_more_private(record):
    for name in reported(record):
        for stage in STAGES[1:]:
            right, wrong = (_mean_of(record.values[f"{name}.{stage}.{word}.mean"],
                                     record.values[f"{name}.{stage}.{word}.points"])
                            for word in ("correct", "incorrect"))
            yield f"{name}, {stage}", f"{right:.2f} against {wrong:.2f}", (wrong - right).above(0)


_CORRECT = (*_STAGES, correct_and_not, runnable, left_out)
ON_A_GPU = {"ResNet-20, CIFAR-10": _vary(CIFAR10, runs=1)}


@experiment("gradients-look-alike/figure-3", uses=_CORRECT, quick=WatchMore({"LeNet-5": DIGITS}),
            paper=WatchMore({}, larger=ON_A_GPU))
def figure_3(config, run):
    """Costs of one step over the data-independent one, of points that are classified correctly and of the others."""
    return left_out(config, run) | {
        f"{name}.{key}": value for name, task in runnable(config, run).items()
        for key, value in correct_and_not(watched(task, run), config.order).items()}


FIGURE_7 = WatchMore({"LeNet-5": _vary(MNIST, runs=1), "softmax regression": _vary(PLAIN_MNIST, runs=1)},
                     larger=ON_A_GPU)
FIGURE_7_QUICK = WatchMore({"LeNet-5": DIGITS, "softmax regression": PLAIN_DIGITS})


@experiment("gradients-look-alike/figure-7", uses=(*_CORRECT, figure_3), quick=FIGURE_7_QUICK, paper=FIGURE_7)
def figure_7(config, run):
    """As figure 3, on digits, for several networks."""
    return figure_3(config, run)


for _name in ("figure-3", "figure-7"):
    finding(f"gradients-look-alike/{_name}", "in the middle and at the end, correct points cost less on average than"
            " incorrect ones")(_correct_more_private)


# Figure 9: corollary 3.1 ---------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Corollary(WatchMore):
    """Figure 9: the exponent p of the paper's code, others of which the best is taken, and the delta of the step."""

    p: float = 1e4
    others: tuple = (3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5, 1e6)


@experiment("gradients-look-alike/figure-9", uses=(*_STAGES, runnable, left_out),
            quick=Corollary(FIGURE_7_QUICK.tasks), paper=Corollary(FIGURE_7.tasks, larger=ON_A_GPU))
def figure_9(config, run):
    """Epsilon of one step at delta 1e-5 by corollary 3.1, corrected, for the sum.

    Means over correct and over incorrect points.

    `paper_p` at the paper's p, `best_p` at the best of several, `exact` the sampled Gaussian mechanism's own epsilon;
    `worst_case` for a gradient as long as the clip norm.
    """
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = watched(task, run)
        norms, correct = found.norms[0, found.stages], found.correct[0, found.stages]
        step = {"sample_rate": found.plan.sample_rate, "noise_std": found.plan.noise_std, "delta": task.delta}

        def three(norms):
            return {"paper_p": holder_epsilon(norms[None], p=config.p, **step),
                    "best_p": holder_epsilon(norms[None], p=config.others, **step),
                    "exact": coupled_epsilon(norms[None], **step)}

        values |= {f"{name}.worst_case.{key}": value for key,
                   value in three(torch.tensor(task.max_grad_norm, dtype=torch.float64)).items()}
        for kind, epsilon in three(norms).items():
            for stage, eps, right in zip(STAGES, epsilon, correct):
                for word, chosen in (("correct", right), ("incorrect", ~right)):
                    values[f"{name}.{stage}.{word}.{kind}"] = eps[chosen].mean() if chosen.any() else math.nan
                values[f"{name}.{stage}.{kind}_at_most"] = eps.max()
    return values


@finding("gradients-look-alike/figure-9", "no point above the worst case")
def _corollary_within(record):
    for name in reported(record):
        worst = record.values[f"{name}.worst_case.paper_p"]
        highest = max(record.values[f"{name}.{stage}.paper_p_at_most"] for stage in STAGES)
        yield name, f"{highest:.2f} of {worst:.2f}", highest <= worst * (1 + 1e-6)


@finding("gradients-look-alike/figure-9", "in the middle and at the end correct points lie below incorrect ones")
def _corollary_better(record):
    for name in reported(record):
        for stage in STAGES[1:]:
            # No point lies above the worst case; how many are correct is in the record of figure 7, not in this one.
            right, wrong = (record.values[f"{name}.{stage}.{word}.paper_p"] for word in ("correct", "incorrect"))
            yield (f"{name}, {stage}", f"{right:.2f} against {wrong:.2f} (no interval)",
                   intervals.unknown(wrong - right).above(0))


# Figures 4 and 8: the mean of the clipped gradients ------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Means(Watch):
    """Theorem 3.6 from a pool of batches of each size, at the stages of a run of each task."""

    batch_sizes: tuple = (16, 32, 64, 128, 256, 512)
    pool: int = 40
    tuples: int = 20
    shown: int = 100
    seeds: tuple = (0,)


def batch_sums(model, x, y, masks, limit):
    """Sums of clipped gradients of the examples in each mask, (masks, parameters) float64."""
    sums = [clipped_sum(model, cross_entropy, x[mask], y[mask], limit, method="mixed").gradients for mask in masks]
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in sums]).double()


def clipped_gradients(model, x, y, limit):
    """Clipped gradients of single examples, (examples, parameters) float64."""
    gradients, _ = per_example_gradients(model, cross_entropy, x, y)
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1).double()
    return flat / (flat.norm(dim=1, keepdim=True) / limit).clamp(min=1)


def coordinates(vectors):
    """Coordinates of few long vectors in the space that they span: all inner products stay, (n, n)."""
    values, directions = torch.linalg.eigh(vectors @ vectors.T)
    return directions * values.clamp(min=0).sqrt()


def mean_update_bounds(sums, sizes, gradients, *, sample_rate, noise_std, order, tuples, generator):
    """Divergences of one step with the mean of clipped gradients, for each of the points with these gradients.

    Returns:
        {"remove", "add": theorem 3.6 for either direction, from batches that the point enters with its rate; "alone":
        the same where it enters none, so for X = X'; "coupled": ours; "sensitivity": how far the point moves the
        update, on average}, each (points,).
        Theorem 3.6 and ours are estimates.
    """
    sizes, points = sizes.double()[:, None], len(gradients)
    flat = coordinates(torch.cat((sums, gradients)))
    sums, gradients = flat[:len(sums)], flat[len(sums):]
    means = sums / sizes.clamp(min=1)
    half = len(sums) // 2
    found = {key: [] for key in ("remove", "add", "alone", "coupled", "sensitivity")}
    pool = {"noise_std": noise_std, "order": order, "tuples": tuples, "generator": generator}
    alone = update_divergence(means[:half], means[half:], direction="remove", **pool)
    for g in gradients:
        enters = (torch.rand(half, 1, generator=generator, dtype=torch.float64) < sample_rate).double()
        with_point = (sums[half:] + enters * g) / (sizes[half:] + enters).clamp(min=1)
        for direction in DIRECTIONS:
            found[direction].append(update_divergence(means[:half], with_point, direction=direction, **pool))
        distance = (g - means).norm(dim=1) / (sizes[:, 0] + 1)
        found["coupled"].append(coupled_divergence(distance, sample_rate=sample_rate, noise_std=noise_std, order=order))
        found["sensitivity"].append(distance.mean())
    found["alone"] = [alone] * points
    return {key: torch.stack(value) for key, value in found.items()}


def mean_update_bound(norms, plan, order):
    """A bound, not an estimate, on one step with the mean, from the clipped norms of the points alone: (points,).

    A point with a gradient of length g moves the mean of a batch of k by at most (g + C) / (k + 1), and by g where the
    batch is empty; k is binomial. So the coupled bound can be computed without a single draw. With g = C it is
    data-independent, for data sets of this size.
    """
    mean = plan.n * plan.sample_rate
    sizes = torch.arange(int(mean + 12 * mean**0.5 + 30) + 1, dtype=torch.float64)
    law = stats.binom(plan.n - 1, plan.sample_rate)
    weights = torch.as_tensor(law.pmf(sizes.numpy()))
    weights[-1] = (1 - weights[:-1].sum()).clamp(min=0)       # larger batches count as the largest of these
    limit = plan.max_grad_norm
    distances = torch.where(sizes[:, None] == 0, norms, (norms + limit) / (sizes[:, None] + 1)).clamp(max=limit)
    return coupled_divergence(distances, probabilities=weights, sample_rate=plan.sample_rate, noise_std=plan.noise_std,
                              order=order)


_MEANS = (*_WATCH, watched, divergence, batch_sums, clipped_gradients, coordinates, mean_update_bounds,
          mean_update_bound)
QUICK_MEANS = Means({"LeNet-5": DIGITS}, batch_sizes=(16, 64, 256), pool=20, shown=20)


@experiment("gradients-look-alike/figure-8", one_seed=True, uses=_MEANS, quick=QUICK_MEANS,
            paper=Means({"LeNet-5": _vary(MNIST, runs=1)}, shown=50))
def figure_8(config, run):
    """The mean update by theorem 3.6 and by the coupled bound, for batches of several sizes.

    Shares are over the divergence of a sensitivity as large as the clip norm; the noise is that which gives the run its
    epsilon at that batch size. `bound` is the coupled bound from the point's norm and the law of the batch size,
    `any_data` the same for any point of any data set of this size. `relevance` is the correlation over points between
    theorem 3.6's estimate and how far the point moves the update.
    """
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        found = watched(task, run)
        x, y = _inputs(task.data, task.model, "train", run)
        members = torch.as_tensor(np.random.RandomState(0).permutation(len(y))[:config.shown])
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[members] = False
        model, generator = _MODELS[task.model](seed=0), torch.Generator().manual_seed(config.seeds[0])
        for stage, weights in zip(STAGES, found.weights[0]):
            torch.nn.utils.vector_to_parameters(weights, model.parameters())
            model.eval().to(run.device)
            gradients = clipped_gradients(model, x[members].to(run.device), y[members].to(run.device),
                                          task.max_grad_norm).cpu()
            for size in config.batch_sizes:
                plan = plan_of(_vary(task, batch_size=size), len(y))
                masks = (torch.rand(2 * config.pool, len(y), generator=generator,
                                    dtype=torch.float64) < plan.sample_rate) & rest
                sums = batch_sums(model, x.to(run.device), y.to(run.device), masks, task.max_grad_norm).cpu()
                bounds = mean_update_bounds(sums, masks.sum(1), gradients, sample_rate=plan.sample_rate,
                                            noise_std=plan.noise_std,
                                            order=config.order, tuples=config.tuples, generator=generator)
                bounds["bound"] = mean_update_bound(gradients.norm(dim=1), plan, config.order)
                worst = divergence(task.max_grad_norm, plan, config.order)
                any_data = mean_update_bound(torch.full((1,), task.max_grad_norm, dtype=torch.float64), plan,
                                             config.order)
                row = f"{name}.{stage}.batch {size}"
                quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
                for key in ("remove", "add", "alone", "coupled", "bound"):
                    values[f"{row}.{key}"] = (bounds[key] / worst).quantile(quantiles)
                    arrays[f"{row}.{key}"] = (bounds[key] / worst).numpy()
                pair = torch.stack((bounds["remove"], bounds["sensitivity"]))
                values |= {f"{row}.worst_case": worst, f"{row}.any_data": any_data[0] / worst,
                           f"{row}.relevance": torch.corrcoef(pair)[0, 1]}
    return values, arrays


@experiment("gradients-look-alike/figure-4", one_seed=True, uses=_MEANS,
            quick=dataclasses.replace(QUICK_MEANS, batch_sizes=(128,)),
            paper=Means({"ResNet-20": _vary(CIFAR10, runs=1)}, batch_sizes=(32, 64, 128, 256, 512), shown=500))
def figure_4(config, run):
    """As figure 8, for CIFAR-10."""
    return figure_8(config, run)


def _each_mean(record):
    for name in record.config["tasks"]:
        for stage in STAGES:
            yield name, stage, {size: {key: record.values[f"{name}.{stage}.batch {size}.{key}"]
                                       for key in ("remove", "add", "alone", "coupled", "bound", "relevance")}
                                for size in record.config["batch_sizes"]}


def _median_of(record, name, stage, size, key, over=None):
    """The interval of the median over points of a bound, or of its ratio to another one's, paired."""
    row = f"{name}.{stage}.batch"
    values = record.arrays[f"{row} {size}.{key}"].astype(np.float64)
    if over is not None:
        values = values / record.arrays[f"{row} {over[0]}.{over[1]}"]
    return intervals.quantile(values, 0.5)


@finding("gradients-look-alike/figure-4",
         "theorem 3.6 gives the median point less than a tenth of the worst case in the middle and at the end, both"
         " ways")
def _tenth(record):
    for name, stage, sizes in _each_mean(record):
        for size in sizes if stage != "initial" else ():
            both = [_median_of(record, name, stage, size, direction) for direction in DIRECTIONS]
            yield (f"{name}, {stage}, batch {size}", f"{max(one.high for one in both):.2g} at most",
                   intervals.every(*(one.below(0.1) for one in both)))


@finding("gradients-look-alike/figure-8", "theorem 3.6's median falls from the smallest batch to the largest")
def _larger_batches(record):
    for name, stage, sizes in _each_mean(record):
        first, *_, last = sizes
        ratio = _median_of(record, name, stage, last, "remove", over=(first, "remove"))
        yield f"{name}, {stage}", f"{ratio:.1%} of it", ratio.below(1)


@finding("gradients-look-alike/theorem-3.6",
         "theorem 3.6 tells points apart: its correlation with how far a point moves the update is above 0.5",
         of="gradients-look-alike/figure-8", kind="own")
def _relevant(record):
    points = record.config["shown"]
    for name, stage, sizes in _each_mean(record):
        typical = float(np.median([found["relevance"] for found in sizes.values()]))
        # A correlation's interval by Fisher's z, and no narrower than that of ranks.
        typical = intervals.rank_correlation(typical, points)
        yield f"{name}, {stage}", f"{typical:.1f}", typical.above(0.5)


@finding("gradients-look-alike/theorem-3.6",
         "the coupled bound's estimate is below theorem 3.6's for every batch size (median point)",
         of="gradients-look-alike/figure-8", kind="own")
def _coupled_smaller(record):
    for name, stage, sizes in _each_mean(record):
        ratios = [_median_of(record, name, stage, size, "remove", over=(size, "coupled")) for size in sizes]
        yield (f"{name}, {stage}", f"{min(ratio.estimate for ratio in ratios):.0e} times or more",
               intervals.every(*(ratio.above(1) for ratio in ratios)))


# Theorem 3.3 beside the exact composition, and unlearning: many runs of softmax regression side by side --------------

@dataclasses.dataclass(frozen=True)
class Composition:
    """Softmax regression on digits shrunk to `side` x `side`: `runs` of each kind for each of `points` test points."""

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
    seeds: tuple = (0,)


def shrunk(config, run):
    """Training digits and the test points, as rows with a constant 1, and their labels."""
    found = []
    for split in ("train", "test"):
        digits = run.load(config.data, split=split, dtype=torch.float64)
        rows = F.adaptive_avg_pool2d(digits.features, config.side).flatten(1)
        found += [torch.cat((rows, torch.ones(len(rows), 1, dtype=rows.dtype)), 1), digits.labels]
    x, y, test_x, test_y = found
    chosen = torch.as_tensor(np.random.RandomState(0).permutation(len(test_y))[:config.points])
    return x, y, test_x[chosen], test_y[chosen]


def batches(runs, n, rate, generator):
    """A Poisson sample of n for each run: indices (runs, most) and which of them count.

    The gaps between the examples that are drawn are geometric.
    """
    width, log_missed = (int(n * rate + 6 * (n * rate) ** 0.5 + 10),
                         torch.log1p(-torch.tensor(rate, dtype=torch.float64)))
    places = torch.full((runs, 1), -1, dtype=torch.int64)
    while int(places[:, -1].min()) < n:
        uniform = torch.rand(runs, width, generator=generator, dtype=torch.float64)
        gaps = 1 + torch.floor(torch.log1p(-uniform) / log_missed).clamp(max=n).long()
        places = torch.cat((places, places[:, -1:] + gaps.cumsum(1)), 1)
    places = places[:, 1:]
    return places.clamp(max=n - 1), places < n


def side_by_side(x, y, point_x, point_y, plan, *, kind, runs, order, learning_rate, seed):
    """Runs of DP-SGD for each point, side by side: clipped norms of its gradients along them, (steps, runs, points).

    x holds the *other* examples. `kind` says how the point enters: "with" at its rate, "without" never, "remove" and
    "add" as in tilted training of either direction at `order`.
    """
    generator, points = torch.Generator().manual_seed(seed), len(point_y)
    lanes, limit, noise_std = runs * points, plan.max_grad_norm, plan.noise_std
    who = torch.arange(points).repeat(runs)
    weights = torch.zeros(lanes, x.shape[1], 10, dtype=x.dtype)
    one_hot, own_x, own_hot = (
        F.one_hot(y, 10).to(x.dtype), point_x[who, None], F.one_hot(point_y, 10).to(x.dtype)[who, None])
    lengths, own_length = x.norm(dim=1), own_x.norm(dim=2)
    common = {"sample_rate": plan.sample_rate, "noise_std": noise_std, "order": order, "generator": generator}
    norms = []
    for _ in range(plan.steps):
        drawn, counted = batches(lanes, len(y), plan.sample_rate, generator)
        features = x[drawn]
        errors = torch.softmax(features @ weights, 2) - one_hot[drawn]
        factors = (limit / (lengths[drawn] * errors.norm(dim=2)).clamp(min=1e-12)).clamp(max=1) * counted
        total = features.transpose(1, 2) @ (factors[..., None] * errors)
        own = torch.softmax(own_x @ weights, 2) - own_hot
        length = own_length * own.norm(dim=2)
        gradient = (own_x.transpose(1, 2) @ own) * (limit / length.clamp(min=1e-12)).clamp(max=1)[..., None]
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


_SIDE_BY_SIDE = (shrunk, batches, side_by_side)


def theorem_3_3(norms, plan, order):
    """Theorem 3.3 at p = 3n along runs whose norms these are, (steps, runs, points): (points,), an estimate."""
    n = plan.steps
    orders = holder_order(order, 3 * n, torch.arange(n - 1, -1, -1))
    costs = torch.stack([divergence(step, plan, g) for step, g in zip(norms, orders.tolist())])
    return soft_maximum(costs, 3 * n * (orders - 1)).sum(0)


@experiment("gradients-look-alike/theorem-3.3", one_seed=True,
            uses=(*_SIDE_BY_SIDE, composed_exactly, theorem_3_3, soft_maximum, divergence),
            quick=Composition("mnist-5k", 7, 3.0, epochs=8, points=10, runs=8),
            paper=Composition("mnist-5k", 7, 3.0, epochs=8, points=10, runs=50))
def composition(config, run):
    """Theorem 3.3, the exact composition, the worst case, and the account along each trajectory, for the same points.

    At one order, nats: `worst_case`, `theorem_3_3`, `exact` with `low` and `high` (bootstrap, 95%) and `upper_bound`
    (95% confidence), each for both directions. Epsilons, with x against without, at the best of the orders: the same,
    and `trajectory`, (runs, points), the output-specific accounts of Yu et al. along the runs with x.
    """
    x, y, point_x, point_y = shrunk(config, run)
    plan = plan_of(config, len(y))

    def runs_of(kind, order=config.order):
        def work(_):
            found = side_by_side(x, y, point_x, point_y, plan, kind=kind, runs=config.runs, order=order,
                                 learning_rate=config.learning_rate, seed=config.seeds[0] + order)
            return {}, {"norms": found.numpy()}
        (_, arrays), = run.pieces(work, [f"{kind}-{order}"]).values()
        return torch.as_tensor(arrays["norms"])

    seen = {"remove": runs_of("with"), "add": runs_of("without")}
    tilted = {order: composed_exactly(runs_of("remove", order), plan, order, "remove",
                                      1 - 0.05 / len(config.orders)) for order in config.orders}
    at_order = {"remove": composed_exactly(runs_of("remove"), plan, config.order, "remove"),
                "add": composed_exactly(runs_of("add"), plan, config.order, "add")}
    worst = plan.steps * divergence(1.0, plan, torch.tensor(config.orders, dtype=torch.float64))
    values = {"steps": plan.steps, "noise_multiplier": plan.noise_multiplier,
              "worst_case": plan.steps * divergence(1.0, plan, config.order)}
    for direction, found in at_order.items():
        values |= {f"{direction}.theorem_3_3": theorem_3_3(seen[direction], plan, config.order),
                   f"{direction}.exact": found.estimate,
                   f"{direction}.low": found.low, f"{direction}.high": found.high,
                   f"{direction}.upper_bound": found.upper_bound,
                   f"{direction}.mean_norm": seen[direction].mean((0, 1))}

    def epsilon(rdp):
        return rdp_to_epsilon(rdp, config.orders, config.delta)[0]

    trajectory = torch.stack([divergence(seen["remove"], plan, order).sum(0) for order in config.orders], -1)
    values |= {"epsilon.worst_case": epsilon(worst),
               "epsilon.trajectory": records.mean_and_sd(epsilon(trajectory).mean(1)),
               "epsilon.theorem_3_3": epsilon(torch.stack([theorem_3_3(seen["remove"], plan,
                                                                       order) for order in config.orders], -1)),
               "epsilon.exact": epsilon(torch.stack([found.estimate for found in tilted.values()], -1)),
               "epsilon.upper_bound": epsilon(torch.stack([found.upper_bound for found in tilted.values()], -1)),
               "epsilon.trajectory_mean": epsilon(trajectory).mean(0),
               "epsilon.trajectory_max": epsilon(trajectory).amax(0)}
    return values


@finding("gradients-look-alike/theorem-3.3",
         "theorem 3.3 is at least the exact composition, for every point and both ways")
def _no_less_than_exact(record):
    for direction in DIRECTIONS:
        loose, exact, low, high = (np.array(record.values[f"{direction}.{key}"])
                                   for key in ("theorem_3_3", "exact", "low", "high"))
        factors = loose / exact
        points = [intervals.Interval(*ends).at_most(bound) for *ends, bound in zip(exact, low, high, loose)]
        yield DIRECTIONS[direction], f"{factors.min():.1f} to {factors.max():.1f} times", intervals.every(*points)


@finding("gradients-look-alike/theorem-3.3",
         "theorem 3.3 gives a smaller epsilon than the worst case, for half of the points or more")
def _below_worst_case(record):
    found = np.array(record.values["epsilon.theorem_3_3"]) < 0.99 * record.values["epsilon.worst_case"]
    share = intervals.share(int(found.sum()), found.size)
    yield "all points", f"{share:.0%}", share.at_least(0.5)


@finding("gradients-look-alike/theorem-3.3",
         "the exact composition gives a smaller epsilon than the worst case, for half of the points or more",
         kind="own")
def _exact_below_worst_case(record):
    found = np.array(record.values["epsilon.exact"]) < 0.99 * record.values["epsilon.worst_case"]
    share = intervals.share(int(found.sum()), found.size)
    yield "all points", f"{share:.0%}", share.at_least(0.5)


@dataclasses.dataclass(frozen=True)
class Unlearning(Composition):
    """Requests to be forgotten, one after another; the order and the budget of the guarantee."""

    requests: int = 5
    budget: float = 0.1


@experiment("gradients-look-alike/definition-5.1-fact-5.2", one_seed=True,
            uses=(*_SIDE_BY_SIDE, composed_exactly, divergence),
            quick=Unlearning("mnist-5k", 7, 1.0, epochs=8, points=1, runs=20, order=2),
            paper=Unlearning("mnist", 14, 1.0, epochs=1, points=1, runs=20, order=2))
def unlearning(config, run):
    """Naive per-instance unlearning of training examples: bounds and decisions, by divergences of three kinds.

    `worst_case`, `estimate` and `upper_bound` (95% confidence for each divergence by itself) of the exact composition;
    `norms` the mean gradient norm of each example.
    """
    x, y, _, _ = shrunk(config, run)
    asking = torch.as_tensor(np.random.RandomState(0).permutation(len(y))[:config.requests])
    plan, found, norms = plan_of(config, len(y)), {}, [math.nan] * config.requests

    def exact(request, order):
        if (request, order) not in found:
            rest = torch.ones(len(y), dtype=torch.bool)
            rest[asking[:request]] = False
            one = asking[request - 1:request]
            seen = side_by_side(x[rest], y[rest], x[one], y[one], plan, kind="remove", runs=config.runs,
                                order=int(order),
                                learning_rate=config.learning_rate, seed=1000 * request + int(order))
            norms[request - 1] = float(seen.mean())
            found[request, order] = composed_exactly(seen, plan, int(order), "remove")
        return found[request, order]

    kinds = {"worst_case": lambda request, order: plan.steps * float(divergence(1.0, plan, order)),
             "estimate": lambda request, order: float(exact(request, order).estimate[0]),
             "upper_bound": lambda request, order: float(exact(request, order).upper_bound[0])}
    values = {"noise_multiplier": plan.noise_multiplier, "steps": plan.steps}
    for kind, divergences in kinds.items():
        decisions = naive_unlearning(divergences, requests=config.requests, order=config.order, budget=config.budget)
        values |= {f"{kind}.bound_if_kept": [d.bound_if_kept for d in decisions],
                   f"{kind}.keep": [d.keep for d in decisions],
                   f"{kind}.retrained": sum(not d.keep for d in decisions)}
    return values | {"norms": norms, "divergences_needed": len(found)}


@finding("gradients-look-alike/definition-5.1-fact-5.2",
         "per-instance divergences retrain less often than worst-case ones")
def _keeps_longer(record):
    worst, own = (record.values[f"{kind}.retrained"] for kind in ("worst_case", "estimate"))
    requests = record.config["requests"]
    fewer = intervals.share(worst, requests) - intervals.share(own, requests)
    yield "all requests", f"{own} against {worst} of {requests}", fewer.above(0)


# A point's own epsilon by the loss ------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Own:
    """Runs of DP-SGD with each of `points` test points, digits at `side` x `side`.

    `runs` by each of the `laws`, pairs of an order and its jumps, for the point against none; the first law is that of
    ordinary runs. `runs_add` at each of `orders_add` for the other way round. `moments` are the orders of exact
    composition and theorem 3.3; `together` points are trained side by side.
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
    seeds: tuple = (0,)


def own_inputs(task, run):
    """A network, training digits and the test points: for LeNet-5 normalised, else from 0 to 1, at the task's size."""
    found, dtype = [], getattr(torch, task.precision)
    for split in ("train", "test"):
        digits = run.load(task.data, split=split, dtype=dtype)
        if task.model == "softmax":
            features = F.adaptive_avg_pool2d(digits.features, task.side)
        else:
            features = F.interpolate(digits.normalised().features, size=task.side, mode="bilinear", align_corners=False)
        found += [features, digits.labels]
    x, y, test_x, test_y = found
    chosen = torch.as_tensor(np.random.RandomState(0).permutation(len(test_y))[:task.points])
    model = (torch.nn.Sequential(torch.nn.Flatten(), models.linear(task.side**2, 10, seed=0))
             if task.model == "softmax" else _MODELS[task.model](seed=0))
    return model.to(dtype), (x, y), (test_x[chosen], test_y[chosen])


def tilted_losses(task, model, digits, points, direction, seed, device):
    """Losses, log densities and norms of clipped gradients of runs of some points.

    (runs, points), (runs, laws, points) and (steps, runs, points); the runs of a point are those by the first law, then
    those by the second. All are trained side by side. The plan is the task's, but the noise is drawn here, since the
    loss depends on it, and added with the point's share.
    """
    plan, limit, many = plan_of(task, len(digits[1])), task.max_grad_norm, len(points[1])
    generator = torch.Generator().manual_seed(derive_seed(seed, "tilted", direction))
    removing = direction == "remove"
    laws, runs = (task.laws, task.runs) if removing else ([(a, 0.0) for a in task.orders_add], task.runs_add)
    rows = [slice(k * runs * many, (k + 1) * runs * many) for k in range(len(laws))]
    whose = torch.arange(many).repeat(runs * len(laws))
    losses, norms = torch.zeros(len(whose), dtype=torch.float64), []
    densities = torch.zeros(len(laws), len(whose), dtype=torch.float64)
    step = {"sample_rate": plan.sample_rate, "noise_std": plan.noise_std}

    def their_shares(ensemble):
        gradient = ensemble.gradients_of(*points)[torch.arange(len(whose)), whose].double().cpu()
        gradient = gradient / (gradient.norm(dim=1, keepdim=True) / limit).clamp(min=1)
        norms.append(gradient.norm(dim=1).clamp(max=limit))
        moved = gaussian_noise(gradient.shape, plan.noise_std, generator)
        for (order, jumps), its in zip(laws, rows):
            options = {**step, "order": order, "generator": generator}
            if removing:
                count = law_counts(norms[-1][its], jumps=jumps, max_sensitivity=limit, **options)
                moved[its] += count[:, None] * gradient[its]
            else:
                moved[its] = tilted_noise(moved[its], gradient[its], **options)
        losses.add_(step_loss(moved, gradient, direction=direction, **step))
        if removing:
            for row, (order, jumps) in zip(densities, laws):
                row += law_log_density(moved, gradient, order=order, jumps=jumps, max_sensitivity=limit, **step)
        return moved.to(ensemble.vectors)

    seeds = [derive_seed(seed, "run", direction, k) for k in range(len(losses))]
    train_ensemble(model, cross_entropy, digits, dataclasses.replace(plan, noise_multiplier=0.0), seeds=seeds,
                   learning_rate=task.learning_rate, add=their_shares, device=device,
                   physical_batch_size=8192, progress=False)
    norms = torch.stack(norms)
    if not removing:
        for row, (order, _) in zip(densities, laws):
            row += (order - 1) * losses - log_mass(norms, order=order, direction=direction, **step).sum(0)
    return (losses.view(-1, many), densities.view(len(laws), -1, many).transpose(0, 1),
            norms.view(plan.steps, -1, many))


def exactly_by_losses(losses, densities, task):
    """Epsilon by exact composition at its best order, from all runs, and its 95% bootstrap interval: (3, points)."""
    def divergences(rows):
        return torch.stack([loss_divergence(losses[rows], densities[rows], order=order) for order in task.moments], -1)

    epsilon, best = rdp_to_epsilon(divergences(torch.arange(len(losses))).clamp(min=1e-9), task.moments, task.delta)
    place = torch.tensor([task.moments.index(int(order)) for order in best])[:, None]
    generator = torch.Generator().manual_seed(0)
    again = torch.stack([divergences(torch.randint(len(losses), (len(losses),), generator=generator)).gather(-1, place)
                         for _ in range(task.resamples)])
    ends = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).clamp(min=1e-9)
    return torch.stack([epsilon, *(torch.stack([rdp_to_epsilon(one, [order], task.delta)[0]
                                                for one, order in zip(end, best.tolist())]) for end in ends)])


def scheduled(norms, plan):
    """A schedule of norms, epsilon for whoever is clipped to it, by PLD, and how often the other half of runs is.

    The schedule is the largest norm of each step in the first half of the runs (steps, runs), rounded up to twentieths
    of the clip norm.
    """
    first, others = norms.tensor_split(2, 1)
    levels = torch.ceil(first.amax(1) / plan.max_grad_norm * 20 - 1e-9).clamp(min=1)
    counts = torch.bincount(levels.long(), minlength=21)[None, 1:]
    epsilon = epsilon_of_histories(counts, sample_rate=plan.sample_rate, delta=plan.delta,
                                   noise_multipliers=plan.noise_multiplier / torch.arange(1, 21) * 20)
    return epsilon[0], (others > levels[:, None] / 20 * plan.max_grad_norm).double().mean()


@experiment("gradients-look-alike/own-epsilon", one_seed=True,
            uses=(own_inputs, tilted_losses, exactly_by_losses, scheduled, plan_of, runnable, left_out, theorem_3_3,
                  soft_maximum, divergence),
            quick=OwnEpsilons({"softmax regression, 7 x 7": Own("mnist-5k", "softmax", 7, points=4, runs=16, runs_add=4,
                                                                learning_rate=4.0, epochs=4)}),
            paper=OwnEpsilons({"softmax regression, 14 x 14": Own("mnist-5k", "softmax", 14, points=8, runs=24,
                                                                  runs_add=6, learning_rate=2.0, epochs=5)},
                              larger={"LeNet-5": Own("mnist", "lenet5", 32, points=4, runs=24, runs_add=6,
                                                     learning_rate=0.1, epochs=10, precision="float32")}))
def own_epsilon(config, run):
    """Epsilon of single test points, were they in the training set, by several accounts of the same runs.

    For each task, (points,): `{direction}.estimate`, `.low`, `.high` and `.upper_bound` of `loss_epsilon`, and the same
    without a direction for the larger of both (95% confidence for both together); with the point against without it
    `exact` by exact composition at the best order (with `exact_low`, `exact_high`), `theorem_3_3` at its best
    order; `schedule` and `clipped` of `scheduled`; `norm`, the mean along ordinary runs. `everybody` (PLD) and
    `everybody_rdp` are the run's own.
    """
    values = left_out(config, run)
    for number, (name, task) in enumerate(runnable(config, run).items()):
        model, digits, (point_x, point_y) = own_inputs(task, run)
        plan = plan_of(task, len(digits[1]))
        groups = torch.arange(task.points).split(task.together)
        names = {f"task-{number}.{direction}.points-{k}": (direction, group) for direction in DIRECTIONS
                 for k, group in enumerate(groups)}

        def work(piece):
            direction, group = names[piece]
            found = tilted_losses(task, model, digits, (point_x[group], point_y[group]), direction,
                                  derive_seed(config.seeds[0], int(group[0])), run.device)
            return {}, {key: one.numpy() for key, one in zip(("losses", "densities", "norms"), found)}

        done, everybody = run.pieces(work, names, label="tilted runs"), plan.epsilon(accountant="pld")
        values |= {f"{name}.steps": plan.steps, f"{name}.noise_multiplier": plan.noise_multiplier,
                   f"{name}.sample_rate": plan.sample_rate, f"{name}.everybody": everybody,
                   f"{name}.everybody_rdp": plan.epsilon(accountant="rdp")}
        for direction in DIRECTIONS:
            losses, densities, norms = (
                torch.as_tensor(np.concatenate([done[piece][1][key] for piece in names
                                                if names[piece][0] == direction], -1))
                for key in ("losses", "densities", "norms"))
            laws = task.laws if direction == "remove" else [(order, 0.0) for order in task.orders_add]
            step = {"sample_rate": plan.sample_rate, "noise_std": plan.noise_std, "direction": direction}
            floors = [(a, plan.steps * ((float(log_mass(task.max_grad_norm, order=a, **step)) if a > 1 else 0.0)
                                        - math.log1p(-jumps))) for a, jumps in laws]
            found = loss_epsilon(losses, densities, delta=task.delta, worst_case=everybody, floors=floors,
                                 confidence=1 - 0.05 / len(DIRECTIONS))
            values |= {f"{name}.{direction}.{key}": getattr(found, key)
                       for key in ("estimate", "low", "high", "upper_bound")}
            if direction == "remove":
                ordinary = norms[:, :task.runs]
                exact = exactly_by_losses(losses, densities, task)
        values |= {f"{name}.{key}": torch.maximum(*(values[f"{name}.{direction}.{key}"] for direction in DIRECTIONS))
                   for key in ("estimate", "low", "high", "upper_bound")}
        values |= {f"{name}.{key}": one for key, one in zip(("exact", "exact_low", "exact_high"), exact)}
        loose = torch.stack([theorem_3_3(ordinary, plan, order) for order in task.moments], -1)
        schedules = [scheduled(ordinary[..., k], plan) for k in range(task.points)]
        values |= {f"{name}.theorem_3_3": rdp_to_epsilon(loose, task.moments, task.delta)[0],
                   f"{name}.norm": ordinary.mean((0, 1)), f"{name}.schedule": [epsilon for epsilon, _ in schedules],
                   f"{name}.clipped": [share for _, share in schedules]}
    return values
