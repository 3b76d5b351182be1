"""Many groups, other ratios of the two methods, and the baselines: tables 9, 14 and 17."""

import dataclasses

import torch

from dpcompanion.accounting import find_steps
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.accuracy_tables import gain_of, looks
from dpcompanion.reproduction.papers.idp_sgd.side_by_side import (
    ALL,
    Compared,
    compared,
    final_values,
)
from dpcompanion.reproduction.papers.idp_sgd.training import (
    DIGITS,
    MNIST,
    accuracy,
    assign,
    final_accuracies,
    network,
    plan_of,
    predictions,
    problem,
)
from dpcompanion.training import DPSGDPlan, cross_entropy, derive_seed, train


@dataclasses.dataclass(frozen=True)
class Groups100(Compared):
    """Table 9: how many groups, and between which ends their budgets are drawn."""

    number: int = 100
    between: tuple = (1.0, 6.0)


@experiment(
    "idp-sgd/table-9",
    quick=Groups100(DIGITS, ("dpsgd", "sample", "scale"), together=ALL),
    paper=Groups100(MNIST, ("dpsgd", "sample", "scale"), seeds=(0, 1, 2)),
)
def table_9(config, run):
    """A hundred equal groups, each with a uniform random budget; DP-SGD gives all the lower end.

    With the paper's network DP-SGD's runs are those of table 2.
    """
    examples, (low, high) = len(problem(config.task, run).labels), config.between
    shares = (1,) * config.number

    def budgets(seed):
        generator = torch.Generator().manual_seed(derive_seed(seed, "budgets"))
        return (
            low + (high - low) * torch.rand(config.number, dtype=torch.float64, generator=generator)
        ).tolist()

    def plan(kind, seed):
        return plan_of(
            kind,
            assign(examples, shares, seed),
            (low,) * config.number if kind == "dpsgd" else budgets(seed),
            config.task.training,
            delta=config.delta,
        )

    if config.together > 1:
        final = {
            kind: [one["final"] for one in each]
            for kind, each in compared(config, run, plan).items()
        }
    else:
        final = {kind: [] for kind in config.kinds}
        for seed in config.seeds:
            final["dpsgd"] += final_accuracies(config, ("dpsgd",), (seed,), run)["dpsgd"]
            others = final_accuracies(
                config,
                ("hundred.sample", "hundred.scale"),
                (seed,),
                run,
                budgets=budgets(seed),
                groups={"hundred": shares},
            )
            for kind, found in others.items():
                final[kind.partition(".")[2]] += found
    return final_values(config, final)


@finding(
    "idp-sgd/table-9",
    "ahead of DP-SGD at the lower end: the 95% interval of the paired difference lies above 0",
)
def many_groups_gain(record):
    for kind in ("sample", "scale"):
        gain = gain_of(record, kind, "dpsgd")
        yield kind.capitalize(), f"{gain:+.1f}", gain.above(0)


@experiment(
    "idp-sgd/table-14",
    quick=Compared(
        DIGITS, ("scale", "combined-25", "combined-50", "combined-75", "sample"), together=ALL
    ),
    paper=Compared(
        MNIST, ("scale", "combined-25", "combined-50", "combined-75", "sample"), seeds=(0, 1, 2)
    ),
)
def table_14(config, run):
    """Sample and Scale at once, each group's own budget met; the weight is how much of Sample's
    change of rates is made. With the paper's network the two ends are the runs of table 2.
    """
    examples = len(problem(config.task, run).labels)

    def plan(kind, seed):
        return plan_of(
            kind,
            assign(examples, config.groups["A"], seed),
            config.budgets,
            config.task.training,
            delta=config.delta,
        )

    if config.together > 1:
        final = {
            kind: [one["final"] for one in each]
            for kind, each in compared(config, run, plan).items()
        }
    else:
        final = final_accuracies(config, [f"A.{kind}" for kind in config.kinds], config.seeds, run)
    weights = {"scale": "weight_0", "sample": "weight_100"}
    final = {kind.removeprefix("A."): each for kind, each in final.items()}
    return final_values(
        config,
        {
            weights.get(kind, kind.replace("combined-", "weight_")): each
            for kind, each in final.items()
        },
    )


@finding(
    "idp-sgd/table-14",
    "accuracy rises from Scale to Sample: the 95% interval of the paired difference lies above 0",
)
def progression(record):
    pair = "weight_100", "weight_0"
    gain = gain_of(record, *pair)
    yield "Sample less Scale", f"{gain:+.2f}, {looks(record, *pair)}", gain.above(0)


@dataclasses.dataclass(frozen=True)
class Baselines(Compared):
    """Table 17: the noise multiplier of training on the groups one after another."""

    noise_multiplier: float = 2.5


def exclude(config, found, groups):
    """DP-SGD at the second budget on those whose budget is no smaller: (features, labels, plan)."""
    kept = groups > 0
    training = dataclasses.replace(config.task.training, examples=int(kept.sum()))
    plan = plan_of(
        "dpsgd",
        torch.zeros(training.examples, dtype=torch.long),
        config.budgets[1:2],
        training,
        delta=config.delta,
    )
    return found.features[kept], found.labels[kept], plan


def in_sequence(config, found, groups, order):
    """(features, labels, plan) for each group in turn, at one noise multiplier, for as many steps
    as its budget pays.
    """
    for p in order:
        own = groups == p
        training = dataclasses.replace(config.task.training, examples=int(own.sum()))
        steps = find_steps(
            target_epsilon=config.budgets[p],
            target_delta=config.delta,
            sample_rate=training.sample_rate,
            noise_multiplier=config.noise_multiplier,
            accountant="rdp",
        )
        yield (
            found.features[own],
            found.labels[own],
            DPSGDPlan(
                n=training.examples,
                sample_rate=training.sample_rate,
                steps=steps,
                max_grad_norm=training.clip,
                noise_multiplier=config.noise_multiplier,
                delta=config.delta,
                accountant="rdp",
            ),
        )


def baseline(config, kind, seed, run):
    """Final accuracy of "A.exclude_low", "A.sequential" (strictest group first) or "A.reversed"."""
    setup, _, method = kind.partition(".")
    task, found = config.task, problem(config.task, run)
    groups = assign(len(found.labels), config.groups[setup], seed)
    order = (
        range(len(config.budgets))
        if method == "sequential"
        else reversed(range(len(config.budgets)))
    )
    stages = (
        [exclude(config, found, groups)]
        if method == "exclude_low"
        else in_sequence(config, found, groups, order)
    )
    model = network(task, seed).to(run.device)
    for number, (features, labels, plan) in enumerate(stages):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=task.learning_rate, momentum=task.momentum
        )
        train(
            model,
            cross_entropy,
            (features, labels),
            plan,
            optimizer=optimizer,
            seed=derive_seed(seed, "stage", number) % 2**31,
            progress=False,
        )
    return accuracy(
        predictions(model, found.test_features.to(run.device)), found.test_labels.to(run.device)
    )


_BASELINES = (
    "A.exclude_low",
    "A.sequential",
    "A.reversed",
    "B.exclude_low",
    "B.sequential",
    "B.reversed",
)


@experiment(
    "idp-sgd/table-17",
    quick=Baselines(DIGITS, _BASELINES, seeds=(0, 1, 2)),
    paper=Baselines(MNIST, _BASELINES, seeds=(0, 1, 2)),
)
def table_17(config, run):
    """Two ways to use budgets with DP-SGD alone; `reversed` takes groups in the other order."""
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for kind in config.kinds for seed in config.seeds}
    problem(config.task, run)
    done = run.pieces(
        lambda piece: {"final": baseline(config, *pieces[piece], run)}, pieces, label="baselines"
    )
    final = {
        kind: [done[f"{kind}.seed-{seed}"]["final"] for seed in config.seeds]
        for kind in config.kinds
    }
    methods = [f"{setup}.{method}" for setup in config.groups for method in ("sample", "scale")]
    return final_values(config, final | final_accuracies(config, methods, config.seeds, run))


MORE = Baselines(
    MNIST,
    ("A.sample", "A.scale", "A.exclude_low", "B.sample", "B.scale", "B.exclude_low"),
    seeds=(3, 4, 5),
)


@experiment("idp-sgd/more-seeds", paper=MORE)
def more_seeds(config, run):
    """`<kind>.final`, test accuracy for each further seed, of runs that tables compare."""
    own = [kind for kind in config.kinds if kind in _BASELINES]
    pieces = {f"{kind}.seed-{seed}": (kind, seed) for kind in own for seed in config.seeds}
    problem(config.task, run)
    done = run.keep(
        lambda piece: {"final": baseline(config, *pieces[piece], run)},
        pieces,
        config=dataclasses.replace(config, kinds=(), seeds=()),
        seconds=config.task.training.steps * len(pieces) / 10,
        under=f"trials/{config.task.data}-baselines",
        label="baselines",
    )
    final = {kind: [done[f"{kind}.seed-{seed}"]["final"] for seed in config.seeds] for kind in own}
    others = [kind for kind in config.kinds if kind not in own]
    final |= final_accuracies(config, others, config.seeds, run)
    return {f"{kind}.final": final[kind] for kind in config.kinds}


@finding(
    "idp-sgd/table-17",
    "Sample and Scale are ahead of leaving groups out and of going through them: each 95% interval "
    "above 0",
)
def ahead_of_baselines(record):
    for setup in record.config["groups"]:
        for other in ("exclude_low", "sequential"):
            pairs = [(f"{setup}.{method}", f"{setup}.{other}") for method in ("sample", "scale")]
            gains = [gain_of(record, *pair) for pair in pairs]
            yield (
                f"{setup}, {other.replace('_', ' ')}",
                ", ".join(f"{gain:+.2f}" for gain in gains) + f"; {looks(record, *pairs[0])}",
                intervals.every(*(gain.above(0) for gain in gains)),
            )
