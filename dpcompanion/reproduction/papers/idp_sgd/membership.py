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
from dpcompanion.reproduction.papers.idp_sgd.training import assign, CIFAR10, HALVES, as_printed, plan_of, problem, Task
from dpcompanion.reproduction.records import mean_and_sd
from dpcompanion.training import derive_seed

# Membership inference ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shadows:
    """LiRA against models that are trained on random halves of `examples`: half of them at one budget, half at another.

    `kinds`: "sample" and "scale", and "dpsgd-10", DP-SGD for all at budget 10.  `size` models are trained side by side,
    in the given precision, `together` examples in one pass.
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


def trained_on(config, kind, numbers, masks, run):
    """The log odds of all examples under the models of these numbers, (k, n), and per cent of right answers of each
    among its `masks`' members and among the others."""
    task, found = config.task, problem(config.task, run)
    seed, n = config.seed, config.examples
    features, labels = found.features[:n].to(run.device), found.labels[:n].to(run.device)
    method, _, budget = kind.partition("-")
    budgets = (float(budget),) * 2 if budget else config.budgets
    groups = assign(n, (1, 1), seed)
    plan = plan_of("dpsgd" if budget else method, groups, budgets, task.training, delta=config.delta)
    trained = train_all(
        task,
        [plan] * len(numbers),
        [derive_seed(seed, "model", k) % 2**31 for k in numbers],
        features,
        labels,
        device=run.device,
        members=masks,
        precision=config.precision,
        physical_batch_size=config.together,
    )
    logits = trained.predict(features)
    right = (logits.argmax(-1) == labels).double().cpu()
    shares = {"inside": masks, "outside": ~masks}
    values = {where: (100 * (right * part).sum(1) / part.sum(1)).tolist() for where, part in shares.items()}
    return values, {"scores": attacks.log_odds(logits, labels).cpu().numpy()}


def attacked(config, kind, run):
    """LiRA on models of one kind: who is in the data of each, all scores, accuracies, and every example's group.

    The models are trained on random halves of the examples, which are drawn like everything else from the seed.  Each
    set of `size` models is kept as soon as it is trained.
    """
    seed, n = config.seed, config.examples
    generator = torch.Generator().manual_seed(derive_seed(seed, "shadow"))
    masks = torch.cat(
        (
            attacks.shadow_masks(config.shadows, n, generator=generator),
            torch.rand(config.targets, n, generator=generator) < 0.5,
        )
    )
    sets = {
        f"{kind}.models-{first}-{last - 1}": range(first, last)
        for first in range(0, len(masks), config.size)
        for last in [min(first + config.size, len(masks))]
    }
    problem(config.task, run)
    training = config.task.training
    done = run.keep(
        lambda piece: trained_on(config, kind, sets[piece], masks[list(sets[piece])], run),
        sets,
        by=trained_on,
        config=dataclasses.replace(config, kinds=(), variance=""),  # which change no model
        seconds=len(masks) * training.examples * training.epochs / (1e6 if config.task.model == "softmax" else 600),
        under=f"shadows/{config.task.data}",
        label=f"shadow models, {kind}",
    )
    accuracies = [pair for values, _ in done.values() for pair in zip(values["inside"], values["outside"])]
    scores = torch.cat([torch.as_tensor(arrays["scores"]) for _, arrays in done.values()])
    return assign(n, (1, 1), seed), masks, scores, accuracies


def attack_values(config, groups, masks, scores, accuracies):
    """What figure 2 and table 12 print: areas for each group, t-tests between the members of the two, accuracies.

    `auc.eps_10` is of the first target; `auc_all.eps_10` the mean over all models, each of which is a target of all
    others once, with its standard deviation.
    """
    shadows, every = config.shadows, torch.arange(len(masks))
    targets = attacks.lira(scores[shadows:], scores[:shadows], masks[:shadows], variance=config.variance)
    values, areas = {}, {budget: [] for budget in config.budgets}
    for k in every:
        ratios = attacks.lira(scores[k], scores[every != k], masks[every != k], variance=config.variance)
        for p, budget in enumerate(config.budgets):
            areas[budget].append(attacks.auc(ratios[masks[k] & (groups == p)], ratios[~masks[k] & (groups == p)]).value)
    tests = []
    for ratios, members in zip(targets, masks[shadows:]):
        strict, loose = (ratios[members & (groups == p)].numpy() for p in (0, 1))
        tests.append(stats.ttest_ind(loose, strict, equal_var=True))
    first, own = targets[0], masks[shadows]
    for p, budget in enumerate(config.budgets):
        inside, outside = first[own & (groups == p)], first[~own & (groups == p)]
        name = f"eps_{budget:g}"
        values[f"auc.{name}"], *values[f"auc_interval.{name}"] = attacks.auc(inside, outside)
        values[f"tpr_at_1%.{name}"], *values[f"tpr_interval.{name}"] = attacks.tpr_at_fpr(inside, outside, fpr=0.01)
        values[f"auc_all.{name}"] = mean_and_sd(areas[budget])
    values |= {
        "t_test.t": tests[0].statistic,
        "t_test.p": tests[0].pvalue,
        "accuracy.train": accuracies[shadows][0],
        "accuracy.test": accuracies[shadows][1],
        "t": [test.statistic for test in tests],
        "p": [test.pvalue for test in tests],
    }
    return values


def curves(config, groups, masks, scores, rates):
    """True positive rates of the targets' mean ROC curve at the given false positive rates, for all and for each
    group."""
    targets = attacks.lira(
        scores[config.shadows :], scores[: config.shadows], masks[: config.shadows], variance=config.variance
    )
    found = {}
    parts = {"all": groups >= 0} | {f"eps_{budget:g}": groups == p for p, budget in enumerate(config.budgets)}
    for name, part in parts.items():
        each = []
        for ratios, members in zip(targets, masks[config.shadows :]):
            fpr, tpr = attacks.roc(ratios[members & part], ratios[~members & part])
            each.append(np.interp(rates, fpr.numpy(), tpr.numpy()))
        found[name] = np.mean(each, axis=0)
    return found


RATES = np.concatenate((np.logspace(-3, -1, 41), np.linspace(0.11, 1, 90)))


_PAPER = Shadows(dataclasses.replace(CIFAR10, training=Training(25_000, 1024, 30, 0.4)), size=16)
# One model after the other, as it is fastest on a processor; few of them tell more with variances of all examples.
_SHORT = dataclasses.replace(
    _PAPER, kinds=("sample",), shadows=12, variance="pooled", size=1, precision="bf16", together=64
)


@experiment("idp-sgd/figure-2", quick=Shadows(HALVES, examples=2000, shadows=24), paper=_PAPER)
@experiment("idp-sgd/figure-2-short", paper=_SHORT)
@experiment("idp-sgd/figures-8-10-short", paper=dataclasses.replace(_SHORT, kinds=("sample", "dpsgd-10")))
def figure_2(config, run):
    """LiRA against Sample (figure 2, table 12), Scale (figure 8) and DP-SGD at either budget for all (figure 10)."""
    values, arrays = {}, {"rates": RATES}
    for kind in config.kinds:
        found = attacked(config, kind, run)
        prefix = "" if kind == "sample" else f"{kind}."
        values |= {prefix + key: value for key, value in attack_values(config, *found).items()}
        arrays |= {f"{kind}.{name}": tpr for name, tpr in curves(config, *found[:3], RATES).items()}
    return as_printed(values, config.task, "cifar10"), arrays


def _area(record, key):
    """The area over all models, each a target of all others once: mean and standard deviation."""
    prefix = "" if "auc_all.eps_10" in record.values else f"{record.config['task']['data']}."
    return record.values[f"{prefix}{key}"]


_LOOSER = "the group at 20 is attacked with more success than the group at 10"


@finding("idp-sgd/figure-2", _LOOSER)
@finding("idp-sgd/figure-2", _LOOSER, of="idp-sgd/figure-2-short")
def looser_leaks_more(record):
    for method, prefix in (("Sample", ""), ("Scale", "scale.")):
        if method.lower() not in record.config["kinds"]:
            continue
        strict, loose = (_area(record, f"{prefix}auc_all.eps_{budget:g}") for budget in record.config["budgets"])
        yield (method, f"areas {strict.mean:.3f}, {loose.mean:.3f}", intervals.unpaired(loose, strict).above(0))


_APART = "the t-test tells the groups apart (p < 0.05) for four target models of five, or more"


@finding("idp-sgd/table-12", _APART, of="idp-sgd/figure-2")
@finding("idp-sgd/table-12", _APART, of="idp-sgd/figure-2-short")
def groups_differ(record):
    prefix = "" if "p" in record.values else f"{record.config['task']['data']}."
    below = intervals.share(sum(p < 0.05 for p in record.values[f"{prefix}p"]), record.config["targets"])
    yield "Sample", f"{below:.0%}", below.at_least(0.8)


_LESS = "examples at 10 leak less under Sample than under DP-SGD at 10"


@finding("idp-sgd/figures-8-10", _LESS, of="idp-sgd/figure-2")
@finding("idp-sgd/figures-8-10", _LESS, of="idp-sgd/figures-8-10-short")
def strict_leak_less(record):
    own, dpsgd = _area(record, "auc_all.eps_10"), _area(record, "dpsgd-10.auc_all.eps_10")
    yield ("Sample", f"areas {own.mean:.3f} against {dpsgd.mean:.3f}", intervals.unpaired(dpsgd, own).above(0))
