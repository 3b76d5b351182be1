"""Beyond the paper: the exact filter, the Rényi filter and plain DP-SGD at one promise."""

import dataclasses

import numpy as np
import torch

from dpcompanion.accounting import find_noise_multiplier, find_steps, rdp_to_epsilon
from dpcompanion.filters import ExactFilter, RenyiFilter, level_costs
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.training import (
    DIGITS,
    MNIST,
    Task,
    accuracy,
    assign,
    network,
    predictions,
    problem,
)
from dpcompanion.reproduction.papers.idp_sgd.with_filters import Descent
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import Callbacks, DPSGDPlan, NormTracker, cross_entropy, train

EIGHTHS = tuple(i / 8 for i in range(1, 9))
SIXTEENTHS = tuple(i / 16 for i in range(1, 17))


def share_of(who):
    """The share of the people who are meant, (n,) booleans."""
    return float(who.double().mean())


class Watched:
    """A filter that notes what it does at every pass over the norms, `every` steps apart.

    `seen` holds shares of the people. "held": clipped to less than they ask for, because it is all
    they can pay; "out": of these, who take no part. "cut": whose gradient is shortened at all, by
    the clip norm that holds for the plan or by the filter. "reached": held now or at a pass before.
    """

    def __init__(self, filter, every):
        self.filter, self.n, self.every, self.step = filter, filter.n, every, 0
        self.sample_rate, self.noise_multiplier = filter.sample_rate, filter.noise_multiplier
        self.max_grad_norm = filter.max_grad_norm
        self.seen = {"held": [], "out": [], "cut": [], "reached": []}
        self._reached = torch.zeros(filter.n, dtype=torch.bool, device=filter.device)

    def clip_norms(self, norms):
        limits = self.filter.clip_norms(norms)
        if self.step % self.every == 0:
            held = limits < norms * (1 - 1e-9)
            self._reached |= held
            cut = held | (norms >= self.filter.max_grad_norm * (1 - 1e-9))
            for name, who in (
                ("held", held),
                ("out", held & (limits == 0)),
                ("cut", cut),
                ("reached", self._reached),
            ):
                self.seen[name].append(share_of(who))
        self.step += 1
        return limits

    def state_dict(self):
        return self.filter.state_dict()


def make_filter(kind, plan, targets, levels, block):
    """The "exact" or "renyi" filter of a plan, for each person's epsilon, a number or (n,)."""
    own = {
        "sample_rate": plan.sample_rate,
        "max_grad_norm": plan.max_grad_norm,
        "target_delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
    }
    if kind == "renyi":
        return RenyiFilter.for_epsilon(plan.n, target_epsilons=targets, **own)
    # The costs of the largest target for every person, as when these runs were recorded.
    game = {
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "target_delta": plan.delta,
    }
    largest = float(torch.as_tensor(targets, dtype=torch.float64).max())
    costs = level_costs(levels, target_epsilon=largest, steps=plan.steps, block=block, **game)
    return ExactFilter(
        plan.n,
        target_epsilon=targets,
        levels=levels,
        costs=costs,
        steps=plan.steps,
        block=block,
        progress=False,
        **own,
    )


def trained(task, plan, filter, learning_rate, seed, run):
    """One run of a plan, with a filter or with None: accuracy after every epoch and at the end,
    what the filter did (see `Watched`), what each person is promised, by the filter or else by PLD,
    and what people at full norm would have without a filter.
    """
    found = problem(task, run)
    model = network(task, seed).to(run.device)
    examples = found.features.to(run.device), found.labels.to(run.device)
    test_features = found.test_features.to(run.device)
    test_labels = found.test_labels.to(run.device)
    budget, trackers, course = filter and Watched(filter, plan.steps_per_epoch), [], []
    if filter:
        trackers = [
            NormTracker.for_plan(
                plan,
                model,
                cross_entropy,
                examples,
                clipping="individual",
                budget=budget,
                accountant="rdp",
            )
        ]

    def look(now):
        if now.step % plan.steps_per_epoch == 0:
            course.append(accuracy(predictions(model, test_features), test_labels))

    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=task.momentum)
    train(
        model,
        cross_entropy,
        examples,
        plan,
        optimizer=optimizer,
        seed=seed,
        trackers=trackers,
        callbacks=Callbacks(on_step=look),
        progress=False,
    )
    uniform = plan.epsilon()
    promise = filter.epsilon(plan.delta).tolist() if filter else [uniform]
    return {
        "final": accuracy(predictions(model, test_features), test_labels),
        "course": course,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "least_promise": min(promise),
        "promise": max(promise),
        "full_norm": uniform,
        "full_norm_rdp": plan.epsilon(accountant="rdp"),
        **(budget.seen if filter else {}),
    }


def gathered(each, name):
    """A kind's values from its runs: what each seed came to, means of what goes over the passes,
    and the promises.
    """
    values = {
        f"{name}.final": [one["final"] for one in each],
        f"{name}.accuracy": mean_and_sd(one["final"] for one in each),
        f"{name}.promise": max(one["promise"] for one in each),
        f"{name}.least_promise": min(one["least_promise"] for one in each),
    }
    values |= {
        f"{name}.{key}": each[0][key]
        for key in ("noise_multiplier", "steps", "full_norm", "full_norm_rdp")
    }
    courses = [key for key in ("course", "held", "out", "cut", "reached") if key in each[0]]
    values |= {
        f"{name}.{key}": [mean_and_sd(at) for at in zip(*(one[key] for one in each))]
        for key in courses
    }
    if "reached" in courses:
        values[f"{name}.reached_in_the_end"] = [one["reached"][-1] for one in each]
    return values


@dataclasses.dataclass(frozen=True)
class Promised:
    """Runs in which every person is promised `epsilon` beforehand.

    "dpsgd" has the noise that this takes, by PLD, for people at full norm. "exact" and "renyi" add
    a filter at the same noise. "exact.less" and "renyi.less" have less noise: that with which full
    norms would cost `less`. Who runs out of budget is clipped, or leaves. Norms are measured once
    an epoch. `shares` of the budget are fixed beforehand: a person who spends at most that much has
    a smaller promise.
    """

    task: Task
    kinds: tuple = ("dpsgd", "exact", "renyi", "exact.less", "renyi.less")
    epsilon: float = 1.0
    less: float = 1.25
    levels: tuple = EIGHTHS
    shares: tuple = (0.125, 0.25, 0.5)
    seeds: tuple = (0, 1, 2)
    delta: float = 1e-5


def spared(filter, share, delta):
    """(what is promised to a person who spends at most a share of the budget, the share of the
    people who did).
    """
    if isinstance(filter, RenyiFilter):
        most = share * filter.budgets
        return float(rdp_to_epsilon(most, filter.orders, delta)[0].max()), share_of(
            (filter.spent <= most).all(1)
        )
    most = int(share * int(filter.budget.max()))
    return float(filter.epsilon(delta, spent=most).max()), share_of(filter.spent <= most)


def promised(config, kind, seed, run):
    """One run, as `trained` returns it, and `spared` for each of the shares."""
    task, training = config.task, config.task.training
    setting = {"sample_rate": training.sample_rate, "steps": training.steps}
    noise = find_noise_multiplier(
        target_epsilon=config.less if kind.endswith(".less") else config.epsilon,
        target_delta=config.delta,
        **setting,
    )
    plan = DPSGDPlan(
        n=len(problem(task).labels),
        max_grad_norm=training.clip,
        noise_multiplier=noise,
        delta=config.delta,
        **setting,
    )
    filter = None
    if kind != "dpsgd":
        filter = make_filter(
            kind.partition(".")[0], plan, config.epsilon, config.levels, plan.steps_per_epoch
        )
    outcome = trained(task, plan, filter, task.learning_rate, seed, run)
    return outcome | (
        {"spared": [spared(filter, share, config.delta) for share in config.shares]}
        if filter
        else {}
    )


@experiment(
    "idp-sgd/exact-filter",
    quick=Promised(DIGITS, seeds=(0, 1)),
    paper=Promised(
        dataclasses.replace(MNIST, training=dataclasses.replace(MNIST.training, epochs=12))
    ),
)
def exact_filter(config, run):
    """Accuracy, who reaches the budget and when, and the promises, of each kind; `spared_promise`
    and `spared_people` for each of the shares.
    """
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for seed in config.seeds for kind in config.kinds}
    problem(config.task, run)
    done = run.pieces(lambda piece: promised(config, *pieces[piece], run), pieces, label="filters")
    values = {}
    for kind in config.kinds:
        each = [done[f"{kind}.seed-{seed}"] for seed in config.seeds]
        values |= gathered(each, kind)
        if kind != "dpsgd":
            promises, people = zip(*(zip(*one["spared"]) for one in each))
            values |= {
                f"{kind}.spared_promise": [max(at) for at in zip(*promises)],
                f"{kind}.spared_people": [mean_and_sd(at) for at in zip(*people)],
            }
    return values


def pairs(record):
    """(where, "exact" or "exact.less", its peer) for both noises of a record."""
    for kind in record.config["kinds"]:
        if kind.startswith("exact"):
            noise = "less noise" if kind.endswith(".less") else "the same noise"
            yield f"{record.config['task']['data']}, {noise}", kind, kind.replace("exact", "renyi")


@finding(
    "idp-sgd/exact-filter",
    "fewer people reach their budget with the exact filter than with the Rényi filter: paired over "
    "the seeds",
    kind="own",
)
def fewer_reach_it(record):
    for where, exact, renyi in pairs(record):
        ends = [
            [100 * share for share in record.values[f"{kind}.reached_in_the_end"]]
            for kind in (exact, renyi)
        ]
        yield (
            where,
            f"{np.mean(ends[0]):.0f}% and {np.mean(ends[1]):.0f}%",
            intervals.difference(*ends).below(0),
        )


def gain(record, more, less):
    """By how many points one kind's accuracy is above another's, over the seeds that they share."""
    return intervals.difference(record.values[f"{more}.final"], record.values[f"{less}.final"])


@finding(
    "idp-sgd/exact-filter",
    "the exact filter is ahead of the Rényi filter: paired over the seeds",
    kind="own",
)
def ahead_of_renyi(record):
    for where, exact, renyi in pairs(record):
        ahead = gain(record, exact, renyi)
        yield where, f"{ahead:+.1f} points", ahead.above(0)


@finding(
    "idp-sgd/exact-filter",
    "the exact filter is ahead of DP-SGD at the same promise: paired over the seeds",
    kind="own",
)
def ahead_of_dpsgd(record):
    for where, exact, _ in pairs(record):
        ahead = gain(record, exact, "dpsgd")
        yield where, f"{ahead:+.1f} points", ahead.above(0)


@dataclasses.dataclass(frozen=True)
class Table4:
    """Table 4 by the exact filter: its noise, by RDP, and its steps.

    "dpsgd" takes the steps that the smallest budget pays for by PLD at that noise. Runs with the
    filter take `longer` times the descent's steps, as `with_filters.Filtered` has it.
    """

    task: Task
    descent: Descent
    kinds: tuple = ("dpsgd", "accounting", "accounting_and_assignment")
    assigned: dict = dataclasses.field(
        default_factory=lambda: {"accounting": (0.3, 0.3), "accounting_and_assignment": (0.3, 0.31)}
    )
    epsilon: float = 0.3
    longer: float = 1.5
    levels: tuple = SIXTEENTHS
    seeds: tuple = (0, 1, 2)
    delta: float = 1e-5


def again(config, kind, seed, run):
    """One run, as `trained` returns it."""
    task, descent, n = config.task, config.descent, len(problem(config.task).labels)
    own = {"sample_rate": descent.sample_rate}
    noise = find_noise_multiplier(
        target_epsilon=config.epsilon,
        target_delta=config.delta,
        steps=descent.steps,
        accountant="rdp",
        **own,
    )
    steps = round(config.longer * descent.steps)
    if kind == "dpsgd":
        steps = find_steps(
            target_epsilon=config.epsilon, target_delta=config.delta, noise_multiplier=noise, **own
        )
    plan = DPSGDPlan(
        n=n,
        steps=steps,
        max_grad_norm=descent.clip,
        noise_multiplier=noise,
        delta=config.delta,
        **own,
    )
    filter = None
    if kind != "dpsgd":
        budgets = torch.tensor(config.assigned[kind], dtype=torch.float64)[assign(n, (1, 1), seed)]
        filter = make_filter("exact", plan, budgets, config.levels, plan.steps_per_epoch)
    return trained(task, plan, filter, descent.learning_rate, seed, run)


@experiment(
    "idp-sgd/table-4-exact",
    quick=Table4(DIGITS, Descent(1.0, 1.0, 20, 1.0), levels=EIGHTHS, seeds=(0, 1)),
    paper=Table4(MNIST, Descent(1.0, 1.0, 30, 4.0), seeds=(0,)),
)
def table_4_exact(config, run):
    """The kinds of table 4, each pass a step."""
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for seed in config.seeds for kind in config.kinds}
    problem(config.task, run)
    done = run.pieces(lambda piece: again(config, *pieces[piece], run), pieces, label="filters")
    values = {}
    for kind in config.kinds:
        values |= gathered([done[f"{kind}.seed-{seed}"] for seed in config.seeds], kind)
    return values


@finding(
    "idp-sgd/table-4-exact",
    "the exact filter alone is ahead of DP-SGD, and assignment ahead of the filter: paired over "
    "the seeds",
    kind="own",
)
def exact_filter_gains(record):
    kinds = record.config["kinds"]
    gains = [gain(record, more, less) for less, more in zip(kinds, kinds[1:])]
    yield (
        record.config["task"]["data"],
        ", ".join(f"{one:+.1f}" for one in gains),
        intervals.every(*(one.above(0) for one in gains)),
    )
