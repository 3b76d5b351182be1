"""Membership inference by budget: figures 2 and 8 to 10, table 12."""

import dataclasses

import numpy as np
import torch
from scipy import stats

from dpcompanion import attacks
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.idp_sgd.settings import Training
from dpcompanion.reproduction.papers.idp_sgd.side_by_side import ALL, train_all
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    HALVES,
    Task,
    as_printed,
    assign,
    plan_of,
    problem,
)
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import derive_seed


@dataclasses.dataclass(frozen=True)
class Shadows:
    """LiRA against models that are trained on random halves of `examples`: half of them at one
    budget, half at another.

    `kinds`: "sample" and "scale", and "dpsgd-10", DP-SGD for all at budget 10. `size` models are
    trained side by side, in the given precision, `together` examples in one pass.

    With `shadows` 0, each target is attacked with the others as its shadow models, by offline LiRA
    as well: it needs fewer, as it takes from them an example's mean, and not the difference of two.
    """

    task: Task
    kinds: tuple = ("sample", "scale", "dpsgd-10", "dpsgd-20")
    budgets: tuple = (10.0, 20.0)
    examples: int = 50_000
    shadows: int = 512
    targets: int = 5
    variance: str = "each"
    delta: float = 1e-5
    size: int = ALL
    precision: str | None = None
    together: int = 1024
    seed: int = 0


def memberships(config):
    """Who is in the data of each shadow model, then each target, (models, n): a random half.

    Every example is in half of the shadow models; the targets' halves have nothing to do with
    theirs, nor with each other, and more targets change none of them.
    """
    n, generator = config.examples, torch.Generator()
    generator.manual_seed(derive_seed(config.seed, "shadow"))
    shadows = (
        [attacks.shadow_masks(config.shadows, n, generator=generator)] if config.shadows else []
    )
    return torch.cat(shadows + [torch.rand(config.targets, n, generator=generator) < 0.5])


def trained(config, kind, numbers, run):
    """The models of these numbers: per cent of right answers `inside` and `outside` of what each
    was trained on, and each example's membership and log odds, (k, n).
    """
    # Sums are divided by what a batch of all examples would hold, and half of them are in.
    task = dataclasses.replace(config.task, learning_rate=2 * config.task.learning_rate)
    found, seed, n = problem(task, run), config.seed, config.examples
    features, labels = found.features[:n].to(run.device), found.labels[:n].to(run.device)
    method, _, budget = kind.partition("-")
    budgets = (float(budget),) * 2 if budget else config.budgets
    groups = assign(n, (1, 1), seed)
    plan = plan_of(
        "dpsgd" if budget else method, groups, budgets, task.training, delta=config.delta
    )
    members = memberships(config)[list(numbers)]
    ensemble = train_all(
        task,
        [plan] * len(numbers),
        [derive_seed(seed, "model", k) % 2**31 for k in numbers],
        features,
        labels,
        device=run.device,
        members=members,
        precision=config.precision,
        microbatch_size=config.together,
    )
    logits = ensemble.predict(features)
    right = (logits.argmax(-1) == labels).double().cpu()
    shares = {"inside": members, "outside": ~members}
    values = {
        where: (100 * (right * part).sum(1) / part.sum(1)).tolist()
        for where, part in shares.items()
    }
    return values, {
        "members": members.numpy(),
        "scores": attacks.log_odds(logits, labels).cpu().numpy(),
    }


def attacked(config, kind, run):
    """LiRA on models of one kind: examples' groups, who is in each's data, scores, accuracies.

    Each set of `size` models is kept as soon as it is trained.
    """
    models = config.shadows + config.targets
    sets = [
        range(first, min(first + config.size, models)) for first in range(0, models, config.size)
    ]
    sets = {f"{kind}.models-{part[0]}-to-{part[-1]}": part for part in sets}
    problem(config.task, run)
    training = config.task.training
    done = run.keep(
        lambda piece: trained(config, kind, sets[piece], run),
        sets,
        # Which change no model.
        config=dataclasses.replace(config, kinds=(), variance="", targets=0),
        seconds=models
        * training.examples
        * training.epochs
        / (1e6 if config.task.model == "softmax" else 600),
        under=f"shadows/{config.task.data}",
        label=f"shadow models, {kind}",
    )
    masks, scores = (
        torch.cat([torch.as_tensor(arrays[name]) for _, arrays in done.values()])
        for name in ("members", "scores")
    )
    accuracies = [
        pair for values, _ in done.values() for pair in zip(values["inside"], values["outside"])
    ]
    return assign(config.examples, (1, 1), config.seed), masks, scores, accuracies


ONLINE, OFFLINE = attacks.lira, attacks.lira_offline


def attack_each(config, groups, masks, scores, attack=ONLINE):
    """For each target, by the groups of those with two shadow models or more on either side: what
    the attack gives to (members, others).
    """
    found, models = [], torch.arange(len(masks))
    for target in models[config.shadows :]:
        shadows = models[: config.shadows] if config.shadows else models[models != target]
        inside = masks[shadows].sum(0)
        known = (inside >= 2) & (len(shadows) - inside >= 2)
        ratios = attack(
            scores[target, known],
            scores[shadows][:, known],
            masks[shadows][:, known],
            variance=config.variance,
        )
        members, of = masks[target, known], groups[known]
        found.append(
            [
                (ratios[members & (of == p)], ratios[~members & (of == p)])
                for p in range(len(config.budgets))
            ]
        )
    return found


def attack_values(config, accuracies, found):
    """What figure 2 and table 12 print: groups' areas, t-tests between their members, accuracies.

    `auc.eps_10` is of the first target, with the interval of its examples; `auc_each.eps_10` are
    the areas of all targets and `auc_mean.eps_10` their mean. Targets are trained apart from each
    other, so their spread says how far another target would be off, under this attack.
    """
    values = {}
    for p, budget in enumerate(config.budgets):
        name, first = f"eps_{budget:g}", found[0][p]
        values[f"auc.{name}"], *values[f"auc_interval.{name}"] = attacks.auc(*first)
        values[f"tpr_at_1%.{name}"], *values[f"tpr_interval.{name}"] = attacks.tpr_at_fpr(
            *first, fpr=0.01
        )
        values[f"auc_each.{name}"] = [attacks.auc(*target[p]).value for target in found]
        values[f"auc_mean.{name}"] = mean_and_sd(values[f"auc_each.{name}"])
    tests = np.array(
        [
            stats.ttest_ind(loose.numpy(), strict.numpy(), equal_var=True)
            for (strict, _), (loose, _) in found
        ]
    )
    values |= {
        "t_test.t": tests[0, 0],
        "t_test.p": tests[0, 1],
        "accuracy.train": accuracies[config.shadows][0],
        "accuracy.test": accuracies[config.shadows][1],
        "t": tests[:, 0].tolist(),
        "p": tests[:, 1].tolist(),
    }
    return values


def curves(config, found, rates):
    """True positive rates of the targets' mean ROC curve at the given false positive rates, for
    each group.
    """

    def of_group(p):
        each = [attacks.roc(*target[p]) for target in found]
        return np.mean([np.interp(rates, fpr.numpy(), tpr.numpy()) for fpr, tpr in each], axis=0)

    return {f"eps_{budget:g}": of_group(p) for p, budget in enumerate(config.budgets)}


RATES = np.concatenate((np.logspace(-3, -1, 41), np.linspace(0.11, 1, 90)))


# The settings of the public attack; the paper prints none for it.
_ATTACKED = dataclasses.replace(
    CIFAR10, learning_rate=0.5, training=Training(25_000, 1024, 60, 1.5)
)
_PAPER = Shadows(_ATTACKED, size=16)
# One model after the other, so that each is kept; few of them tell more with one variance for all
# examples.
_FEW = dataclasses.replace(
    _PAPER,
    kinds=("sample",),
    shadows=0,
    targets=6,
    variance="pooled",
    size=1,
    precision="bf16",
    together=64,
)


@experiment(
    "idp-sgd/figure-2", quick=Shadows(HALVES, examples=2000, shadows=24, targets=20), paper=_PAPER
)
@experiment("idp-sgd/figure-2-few", paper=_FEW)
@experiment(
    "idp-sgd/figures-8-10-few", paper=dataclasses.replace(_FEW, kinds=("sample", "dpsgd-10"))
)
def figure_2(config, run):
    """LiRA against Sample (figure 2, table 12), Scale (figure 8) and DP-SGD at either budget for
    all (figure 10).
    """
    values, arrays = {}, {"rates": RATES}
    for kind in config.kinds:
        groups, masks, scores, accuracies = attacked(config, kind, run)
        for attack in (ONLINE,) if config.shadows else (ONLINE, OFFLINE):
            found = attack_each(config, groups, masks, scores, attack)
            by = "" if attack is ONLINE else "offline."
            of = "" if kind == "sample" else f"{kind}."
            values |= {
                f"{by}{of}{key}": value
                for key, value in attack_values(config, accuracies, found).items()
            }
            arrays |= {
                f"{by}{kind}.{group}": tpr for group, tpr in curves(config, found, RATES).items()
            }
    return as_printed(values, config.task, "cifar10"), arrays


@experiment("idp-sgd/figure-2-accuracy", paper=_FEW)
def accuracies(config, run):
    """Accuracies of the attacked networks on their own half of the data and on the other."""
    *_, pairs = attacked(config, "sample", run)
    inside, outside = zip(*pairs[config.shadows :])
    values = {"accuracy.train": mean_and_sd(inside), "accuracy.test": mean_and_sd(outside)}
    return as_printed(values, config.task, "cifar10")


def _of_targets(record, key):
    """A value for each target, by the stronger attack if there are two."""
    names = [f"{name}{key}" for name in ("offline.", "")]
    names += [f"{record.config['task']['data']}.{name}" for name in names]
    return np.array(next(record.values[name] for name in names if name in record.values))


_LOOSER = "the group at 20 is attacked with more success than the group at 10"


@finding("idp-sgd/figure-2", _LOOSER)
@finding("idp-sgd/figure-2", _LOOSER, of="idp-sgd/figure-2-few")
# Section D.3 says of figure 9 that the group at 10 is "constantly" attacked with less success.
@finding("idp-sgd/figures-8-10", _LOOSER, of="idp-sgd/figure-2-few")
def looser_leaks_more(record):
    for kind in ("sample", "scale"):
        if kind in record.config["kinds"]:
            prefix = "" if kind == "sample" else f"{kind}."
            strict, loose = (
                _of_targets(record, f"{prefix}auc_each.eps_{budget:g}")
                for budget in record.config["budgets"]
            )
            more = intervals.difference(loose, strict)
            yield (
                kind.capitalize(),
                f"areas {strict.mean():.3f}, {loose.mean():.3f}, by {more:+.3f}",
                more.above(0),
            )


_APART = (
    "members at 20 have higher ratios than members at 10: the target models' t lies above 0 on "
    "average"
)


@finding("idp-sgd/table-12", _APART, of="idp-sgd/figure-2")
@finding("idp-sgd/table-12", _APART, of="idp-sgd/figure-2-few")
def groups_differ(record):
    t = intervals.mean(_of_targets(record, "t"))
    below = int((_of_targets(record, "p") < 0.05).sum())
    yield "Sample", f"t {t:.1f}; p below 0.05 for {below} of {record.config['targets']}", t.above(0)


_LESS = "examples at 10 leak less under Sample than under DP-SGD at 10"


@finding("idp-sgd/figures-8-10", _LESS, of="idp-sgd/figure-2")
@finding("idp-sgd/figures-8-10", _LESS, of="idp-sgd/figures-8-10-few")
def strict_leak_less(record):
    # Models of one number are trained on the same halves.
    own = _of_targets(record, "auc_each.eps_10")
    dpsgd = _of_targets(record, "dpsgd-10.auc_each.eps_10")
    less = intervals.difference(dpsgd, own)
    yield (
        "Sample",
        f"areas {own.mean():.3f} against {dpsgd.mean():.3f}, less by {less:+.3f}",
        less.above(0),
    )
