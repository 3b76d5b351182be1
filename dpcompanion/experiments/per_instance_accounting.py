r"""Exhibits of Yu et al. 2022, "Per-instance privacy accounting", the first version of Yu et al. 2023.

Its algorithm 1 clips each example to a running estimate of its norm, refreshed when the example is sampled and K times
an epoch. Here the estimate that a step clips to is also what it is charged; the paper charges the one after the
step. Norms are rounded up to multiples of C / 100, the paper's to the nearest. RDP at delta 1e-5, add or remove,
Poisson sampling.

`paper` runs have the paper's batches, noise and epochs for MNIST, all 60,000 digits, and one hidden layer in place of
ResNet-20, which needs a GPU, as CIFAR-10 and UTKFace do. `quick` runs are on 4,000 digits, with the noise that costs
the same worst-case epsilon.

What the two versions of the paper share is done in `individual_accounting`, whose data and networks serve here.
"""

import dataclasses
import functools
import itertools
import math
import time
import types

import numpy as np
import torch

from dpcompanion import attacks, intervals, records, release
from dpcompanion.accounting import compute_epsilon, rdp_sampled_gaussian
from dpcompanion.experiments import experiment, finding
from dpcompanion.experiments import individual_accounting as second
from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import DPSGDPlan, cross_entropy, gradient_norms, train
from dpcompanion.training.tracking import NormTracker

NAME = "per-instance-accounting"
DELTA = 1e-5
#: Appendix B: sample rate, noise multiplier and steps of the three settings.
SETTINGS = {"cifar10": (4000 / 50_000, 3.2, 2500), "mnist": (4000 / 60_000, 6.0, 1500),
            "utkface": (200 / 15_000, 1.5, 7500)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run of algorithm 1.

    `refreshes` is K; without a noise multiplier the run costs what the paper's on MNIST does. `looks` is how often
    everybody's loss and norm are noted; `reference` examples have their norms taken at every step.
    """

    data: str = "mnist-5k"
    batch_size: int = 256
    epochs: int = 15
    noise_multiplier: float | None = None
    refreshes: float = 2.0
    clipping: str = "individual"
    median_multiple: float = 1.0
    learning_rate: float = 0.3
    reference: int = 250
    looks: int = 15
    dtype: str = "float64"


DIGITS = Setting()
MNIST = Setting("mnist", 4000, 100, 6.0, learning_rate=2.0, reference=1000, looks=20, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Study:
    """One setting and the seeds of its runs."""

    setting: Setting = DIGITS
    seeds: tuple = (0,)


QUICK, PAPER = Study(), Study(MNIST)


# Runs --------------------------------------------------------------------------------------------------------------

@functools.cache
def worst_case(setting="mnist", accountant="rdp"):
    """Epsilon of one of the paper's settings, for anybody."""
    rate, noise, steps = SETTINGS[setting]
    return compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=DELTA, accountant=accountant)


def make_plan(setting, n, max_grad_norm):
    """The plan of a setting on n examples."""
    rate = setting.batch_size / n
    shape = {"n": n, "sample_rate": rate, "steps": setting.epochs * round(1 / rate), "max_grad_norm": max_grad_norm,
             "delta": DELTA}
    if setting.noise_multiplier is None:
        return DPSGDPlan.for_epsilon(worst_case(), **shape, accountant="rdp")
    return DPSGDPlan(noise_multiplier=setting.noise_multiplier, **shape)


def run_setting(setting, seed, device):
    """Train one run; values and arrays of what all exhibits read."""
    found = second.examples(setting.data, setting.dtype)
    model = second.build("mlp", found, seed).to(device)
    x, y = found.x.to(device), found.y.to(device)
    limit = setting.median_multiple * float(gradient_norms(model, cross_entropy, x, y).median())
    plan = make_plan(setting, len(y), limit)
    everybody = NormTracker(IndividualAccountant.for_plan(plan), model, cross_entropy, (x, y), running=True,
                            steps_per_epoch=plan.steps_per_epoch, updates_per_epoch=setting.refreshes,
                            clipping=setting.clipping)
    trackers, chosen = [everybody], np.random.RandomState(seed).permutation(len(y))[:setting.reference]
    if setting.reference:
        some = torch.as_tensor(chosen)
        trackers.append(NormTracker(
            IndividualAccountant.for_plan(dataclasses.replace(plan, n=len(chosen))), model, cross_entropy,
            (x[some.to(device)], y[some.to(device)]), steps_per_epoch=plan.steps_per_epoch, updates_per_epoch=math.inf,
            examples=some))
    norms, losses = [], []

    def look(run):
        done = round(run.step / plan.steps_per_epoch)
        if done * setting.looks // setting.epochs > (done - 1) * setting.looks // setting.epochs:
            norms.append(gradient_norms(model, cross_entropy, x, y).cpu())
            losses.append(second.outcome(model, cross_entropy, x, y)[0].cpu())

    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate / limit)
    train(model, cross_entropy, (x, y), plan, optimizer=optimizer, seed=seed, trackers=trackers, on_epoch=look)
    test_losses, right = second.outcome(model, cross_entropy, found.test_x.to(device), found.test_y.to(device))
    losses, norms = np.stack(losses), np.stack(norms)
    quintiles = np.array_split(norms.mean(0).argsort(), 5)
    arrays = {"epsilon": everybody.estimated_epsilon(DELTA).cpu().numpy(), "reference": chosen,
              "actual": trackers[-1].estimated_epsilon(DELTA).cpu().numpy() if setting.reference else np.zeros(0),
              "mean_loss": losses.mean(0), "last_loss": losses[-1], "test_losses": test_losses.cpu().numpy(),
              "quintiles": np.stack([norms[:, part].mean(1) for part in quintiles]) / limit}
    return {"accuracy": float(right.double().mean()), "max_grad_norm": limit, "passes": everybody.passes}, arrays


_RUNS = (Setting, make_plan, run_setting, worst_case, second.Examples, second.examples, second.build, second.mlp,
         second.outcome, second.pearson, second.rank, second.histogram)


def trained(setting, seed, run):
    """The run of a setting with a seed: computed once, and kept in the data folder if it takes long."""
    found = second.examples(setting.data, setting.dtype)
    run.loaded += [provenance for provenance in found.provenance if provenance not in run.loaded]
    values, arrays = second.once(
        f"{NAME}-{setting.data}", {"setting": dataclasses.asdict(setting)}, seed, run, _RUNS,
        lambda: run_setting(setting, seed, run.device), size=len(found.y) * make_plan(setting, len(found.y), 1.0).steps)
    plan = dataclasses.replace(make_plan(setting, len(found.y), 1.0), max_grad_norm=values["max_grad_norm"])
    return types.SimpleNamespace(plan=plan, found=found, worst_case=plan.epsilon(accountant="rdp"), **values, **arrays)


def by_class(found, values):
    """Means of the training examples' values by class."""
    return np.array([values[found.groups.numpy() == group].mean() for group in range(len(found.names))])


def label(record):
    """Which digits a record is of."""
    return "MNIST" if record.config["setting"]["data"] == "mnist" else "digits"


# Exhibits ----------------------------------------------------------------------------------------------------------

@experiment(f"{NAME}/figure-1", one_seed=True, uses=_RUNS, quick=QUICK, paper=PAPER)
def figure_1(config, run):
    """Everybody's epsilon with K = 2, who reaches the worst case, and the worst cases of the paper's settings."""
    found = trained(config.setting, config.seeds[0], run)
    epsilon, top = found.epsilon, found.worst_case
    values = {"worst_case": top, "mean": epsilon.mean(), "quantiles": np.quantile(epsilon, (0.1, 0.5, 0.9)),
              "max": epsilon.max(), "min": epsilon.min(), "share_at_worst_case": (epsilon >= second.WORST * top).mean(),
              "below_90_percent": (epsilon < 0.9 * top).mean(), "accuracy": found.accuracy,
              "noise_multiplier": found.plan.noise_multiplier, "steps": found.plan.steps}
    for name in SETTINGS:
        values |= {f"{name}.worst_case": worst_case(name), f"{name}.worst_case_pld": worst_case(name, "pld")}
    return values, {"histogram": second.histogram(epsilon, top)}


def of_examples(record, share):
    """The interval of a share of the training examples."""
    n = next(entry["examples"] for entry in record.data if entry["split"] == "train")
    return intervals.share(round(share * n), n)


@finding(f"{NAME}/figure-1", "more than half of the examples lie at least 10% below the worst case")
def most_pay_less(record):
    share = of_examples(record, record.values["below_90_percent"])
    yield label(record), f"{share:.1%}", share.above(0.5)


@experiment(f"{NAME}/figure-2", one_seed=True, uses=_RUNS, quick=QUICK, paper=PAPER)
def figure_2(config, run):
    """Mean gradient norm, in units of C, of five groups of examples over training; groups by the mean over training."""
    found = trained(config.setting, config.seeds[0], run)
    groups = found.quintiles
    values = {"ordered": (np.diff(groups, axis=0) > 0).all(0).mean(),
              "top_over_bottom": (groups[-1] / groups[0]).min()}
    return values, {"quintiles": np.float32(groups)}


def _group_means(record):
    """The intervals of the groups' mean norms, (groups, looks), in units of C.

    No norms in [0, 1] with a mean m vary more than zeros and ones do; the record holds means and no more than that.
    """
    means = record.arrays["quintiles"]
    n = next(entry["examples"] for entry in record.data if entry["split"] == "train") // len(means)
    return [[intervals.share(round(float(mean) * n), n) if 0 <= mean <= 1 + 1e-6 else intervals.unknown(mean)
             for mean in group] for group in means]


@finding(f"{NAME}/figure-2", "the five groups stand in the same order at every look")
def stay_stratified(record):
    groups, ordered = _group_means(record), record.values["ordered"]
    steps = [(above - below).above(0) for low, high in zip(groups, groups[1:]) for below, above in zip(low, high)]
    yield label(record), f"at {ordered:.0%} of them", intervals.every(*steps)


@finding(f"{NAME}/figure-2", "the top group's mean norm is at least twice the bottom one's at every look")
def far_apart(record):
    groups = _group_means(record)
    ratios = [top / bottom for bottom, top in zip(groups[0], groups[-1])]
    least = min(ratios, key=lambda ratio: ratio.estimate)
    yield label(record), f"{least:.1f} times at least", intervals.every(*(ratio.at_least(2) for ratio in ratios))


@dataclasses.dataclass(frozen=True)
class Estimates(Study):
    """Figure 3: the values of K."""

    refreshes: tuple = (0.0, 1.0, 2.0)


@experiment(f"{NAME}/figure-3", one_seed=True, uses=_RUNS, quick=Estimates(), paper=Estimates(MNIST))
def figure_3(config, run):
    """Accounts by running estimates with K passes an epoch, beside norms at every step, for some examples."""
    values, arrays = {}, {}
    for refreshes in config.refreshes:
        found = trained(dataclasses.replace(config.setting, refreshes=refreshes), config.seeds[0], run)
        estimate, actual, key = found.epsilon[found.reference], found.actual, f"k{refreshes:g}"
        error = estimate - actual
        values |= second.named(
            key, pearson=second.pearson(estimate, actual), mean_error=np.abs(error).mean(),
            worst_error=np.abs(error).max(), understated=(error < -1e-3 * actual).mean(),
            understated_by_5_percent=(error < -0.05 * actual).mean(),
            worst_understatement=(-error / actual.clip(1e-9)).max(), accuracy=found.accuracy)
        arrays |= second.named(key, estimate=np.float32(estimate), actual=np.float32(actual))
    return {**values, "worst_case": found.worst_case}, arrays


@finding(f"{NAME}/figure-3", "Pearson's r is above 0.99 for every K")
def estimates_are_close(record):
    for refreshes in record.config["refreshes"]:
        r = intervals.pearson(*(record.arrays[f"k{refreshes:g}.{key}"] for key in ("estimate", "actual")))
        yield f"{label(record)}, K = {refreshes:g}", f"{r:.3f}", r.above(0.99)


@dataclasses.dataclass(frozen=True)
class Cost:
    """How many examples and updates to account for, and how many evaluations to time one by one."""

    examples: int = 10_000
    updates: int = 200
    evaluations: int = 100


@experiment(f"{NAME}/text-cost", uses=(), quick=Cost(), paper=Cost(examples=50_000))
def text_cost(config, run):
    """Processor seconds for 100 divergences, what every norm one by one would take, and our accounts of every norm."""
    rate, noise, _ = SETTINGS["cifar10"]
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(config.updates, config.examples, generator=generator, dtype=torch.float64).clamp(min=0.01)
    orders = list(range(2, 257))
    started = time.process_time()
    for norm in norms[0, :config.evaluations].tolist():
        rdp_sampled_gaussian(sample_rate=rate, noise_multiplier=noise / norm, orders=orders)
    hundred = (time.process_time() - started) * 100 / config.evaluations
    started = time.process_time()
    account = IndividualAccountant(config.examples, sample_rate=rate, noise_multiplier=noise, max_grad_norm=1.0,
                                   rounding=None)
    for row in norms:
        account.record(row)
    account.epsilon(DELTA)
    return {"hundred_rdp_evaluations_s": hundred, "one_by_one_h": hundred / 100 * norms.numel() / 3600,
            "without_rounding_s": time.process_time() - started}


@finding(f"{NAME}/text-cost", "100 divergences take less than 5 seconds, even on a machine half as fast")
def divergences_are_cheap(record):
    seconds = record.values["hundred_rdp_evaluations_s"]
    yield "one core", "less than 2.5 s" if seconds < 2.5 else f"{seconds:.1f} s", second.timed(seconds).below(5)


@finding(f"{NAME}/text-cost", "accounts of every norm without rounding take less than a minute, even on a machine half"
         " as fast", kind="own")
def rounding_is_not_needed(record):
    seconds = record.values["without_rounding_s"]
    yield (f"{record.config['examples']:,} examples, {record.config['updates']} updates, one core",
           "less than half a minute" if seconds < 30 else f"{seconds:.0f} s", second.timed(seconds).below(60))


@finding(f"{NAME}/text-worst-case-share", "less than a tenth of the examples reach the worst case of a smaller network",
         of=f"{NAME}/figure-1", kind="own")
def few_pay_all(record):
    share = of_examples(record, record.values["share_at_worst_case"])
    yield label(record), f"{share:.1%}", share.below(0.1)


@experiment(f"{NAME}/figure-5", one_seed=True, uses=_RUNS, quick=QUICK, paper=PAPER)
def figure_5(config, run):
    """Mean loss and mean epsilon of loss deciles, by the mean over training and by the last epoch's loss."""
    found, values = trained(config.setting, config.seeds[0], run), {}
    for kind in ("mean_loss", "last_loss"):
        loss = getattr(found, kind)
        deciles = np.array_split(loss.argsort(), 10)
        means = np.array([found.epsilon[part].mean() for part in deciles])
        values |= second.named(kind, loss=[loss[part].mean() for part in deciles], epsilon=means,
                               rank_correlation=second.rank(np.arange(10), means),
                               of_examples=second.rank(loss, found.epsilon))
    return values


@finding(f"{NAME}/figure-5", "mean epsilon rises with the decile of the loss (rank correlation 0.95 or more)")
def deciles_rise(record):
    for kind in ("mean_loss", "last_loss"):
        r = intervals.rank_correlation(record.values[f"{kind}.rank_correlation"],
                                       len(record.values[f"{kind}.epsilon"]))
        yield f"{label(record)}, {kind.replace('_', ' ')}", f"{r:.2f}", r.at_least(0.95)


def groups(config, run):
    """Loss and epsilon by class."""
    found = trained(config.setting, config.seeds[0], run)
    loss, mean_loss, epsilon = (by_class(found.found, values)
                                for values in (found.last_loss, found.mean_loss, found.epsilon))
    return {"last_loss": loss, "mean_loss": mean_loss, "epsilon": epsilon,
            "rank_correlation": second.rank(loss, epsilon), "highest": epsilon[loss.argmax()],
            "lowest": epsilon[loss.argmin()]}


@experiment(f"{NAME}/figure-6", one_seed=True, uses=(*_RUNS, groups, by_class), quick=QUICK)
def figure_6(config, run):
    """Loss and mean epsilon by class; the paper's data need a GPU."""
    return groups(config, run)


GROUPS = ("classes: loss and mean epsilon have a rank correlation of 0.5 or more, and the class of the highest loss "
          "has a higher mean than that of the lowest")


@finding(f"{NAME}/figures-9-10", GROUPS)
@finding(f"{NAME}/figure-6", GROUPS)
def underserved(record):
    loss, epsilon = (np.array(record.values[key]) for key in ("last_loss", "epsilon"))
    r, more = second.correlation_with_extremes(-loss, epsilon)
    yield (label(record), f"rank correlation {-r.estimate:.2f}, {more.estimate:+.0f}%",
           intervals.every(r.at_most(-0.5), more.above(0)))


@dataclasses.dataclass(frozen=True)
class Membership(Study):
    """Figures 7 and 10: how to train without privacy."""

    overfit: second.Membership = second.Membership(tasks={})


def attacks_by_class(config, run):
    """Success of the loss-threshold attack on each class, with and without DP."""
    found = trained(config.setting, config.seeds[0], run)
    task = second.Task(config.setting.data, "mlp", 0, 0, 0.0, 0.0, dtype=config.setting.dtype)
    accuracies, losses = second.once(
        f"{NAME}-{task.data}-overfitted", dataclasses.asdict(config), config.seeds[0], run, (*_RUNS, second.overfitted),
        lambda: second.overfitted(task, config.overfit, config.seeds[0], run.device),
        size=len(found.found.y) * config.overfit.epochs * 10)
    values = {f"nonprivate_{key}": value for key, value in accuracies.items()}
    values["epsilon"] = by_class(found.found, found.epsilon)
    for kind, members, others in (("private", found.last_loss, found.test_losses),
                                  ("nonprivate", losses["losses"], losses["test_losses"])):
        rows = []
        for group in range(len(found.found.names)):
            sides = (torch.as_tensor(members)[found.found.groups == group],
                     torch.as_tensor(others)[found.found.test_groups == group])
            result = attacks.loss_threshold_attack(*sides, generator=torch.Generator().manual_seed(group))
            rows.append((*result.success, result.fitted))
        values |= second.named(kind, **dict(zip(("success", "low", "high", "fitted"), map(list, zip(*rows)))))
    values["rank_correlation"] = second.rank(values["epsilon"], values["nonprivate.success"])
    return values


QUICK_MEMBERSHIP = Membership(overfit=second.Membership(tasks={}, **second.STABLE))
_ATTACKS = (*_RUNS, attacks_by_class, by_class, second.overfitted, attacks.loss_threshold_attack)


@experiment(f"{NAME}/figure-7", one_seed=True, uses=_ATTACKS, quick=QUICK_MEMBERSHIP)
def figure_7(config, run):
    """Success of the loss-threshold attack by class with and without DP; the paper's data need a GPU."""
    return attacks_by_class(config, run)


@experiment(f"{NAME}/figures-9-10", one_seed=True, uses=(*_ATTACKS, groups), quick=QUICK_MEMBERSHIP,
            paper=Membership(MNIST, overfit=second.Membership(tasks={}, epochs=10)))
def figures_9_10(config, run):
    """Loss, mean epsilon and attacks by class on MNIST; UTKFace-age needs a GPU."""
    return {**groups(config, run), **second.named("attack", **attacks_by_class(config, run))}


@finding(f"{NAME}/figure-7", "without privacy, classes with a higher mean epsilon are attacked with more success (rank "
         "correlation 0.5 or more)")
def risk_follows(record):
    r = intervals.rank_correlation(record.values["rank_correlation"], len(record.values["epsilon"]))
    yield label(record), f"{r:.1f}", r.at_least(0.5)


@finding(f"{NAME}/figure-7", "with DP, the success on every class lies within five points of one half")
def private_models_resist(record):
    said, outcome = second.near_one_half(record.values, "private")
    yield label(record), f"intervals from {said}", outcome


@finding(f"{NAME}/figures-9-10", "with or without DP, success on the digits stays below 60% for every class")
def digits_resist(record):
    ends = [intervals.Interval(*group) for kind in ("private", "nonprivate")
            for group in zip(*(record.values[f"attack.{kind}.{key}"] for key in ("success", "low", "high")))]
    yield (label(record), f"intervals up to {max(group.high for group in ends):.0%}",
           intervals.every(*(group.below(0.6) for group in ends)))


@dataclasses.dataclass(frozen=True)
class Clippings(Study):
    """Table 1: four seeds, K = 2, no reference."""

    setting: Setting = dataclasses.replace(DIGITS, reference=0, looks=1)
    seeds: tuple = (0, 1, 2, 3)


@experiment(f"{NAME}/table-1", uses=_RUNS, quick=Clippings())
def table_1(config, run):
    """Test accuracy in percent, clipped to everybody's own estimate and to one threshold."""
    values = {}
    for name, clipping in (("per_example", "individual"), ("single", "maximum")):
        setting = dataclasses.replace(config.setting, clipping=clipping)
        values[name] = records.mean_and_sd([100 * trained(setting, seed, run).accuracy for seed in config.seeds])
    return values


@finding(f"{NAME}/table-1", "clipping each example to its own estimate costs at most half a point of accuracy")
def clipping_is_free(record):
    cost = intervals.unpaired(record.values["single"], record.values["per_example"])
    yield label(record), f"{cost:+z.1f} points", cost.at_most(0.5)


@dataclasses.dataclass(frozen=True)
class Sweep(Study):
    """Figure 8: clip norms in units of the median norm at initialisation."""

    setting: Setting = dataclasses.replace(DIGITS, reference=0, looks=1)
    multiples: tuple = (0.1, 0.3, 0.5, 1.5)


@experiment(f"{NAME}/figure-8", one_seed=True, uses=(*_RUNS, second.clip_key), quick=Sweep())
def figure_8(config, run):
    """Distribution of epsilon for clip norms below and above the median."""
    values, arrays = {}, {}
    for multiple in config.multiples:
        found = trained(dataclasses.replace(config.setting, median_multiple=multiple), config.seeds[0], run)
        epsilon, top, key = found.epsilon, found.worst_case, second.clip_key(multiple)
        values |= second.named(key, share_at_worst_case=(epsilon >= second.WORST * top).mean(), sd=epsilon.std(),
                               max=epsilon.max(), accuracy=found.accuracy)
        arrays[key] = second.histogram(epsilon, top)
    return {**values, "worst_case": top}, arrays


@finding(f"{NAME}/figure-8", "the share at the worst case falls as C grows, from more than half to less than a tenth")
def fewer_at_the_worst_case(record):
    shares = [of_examples(record, record.values[f"{second.clip_key(c)}.share_at_worst_case"])
              for c in record.config["multiples"]]
    yield label(record), ", ".join(f"{share.estimate:.0%}" for share in shares), second.falls(shares)


@dataclasses.dataclass(frozen=True)
class Release(Study):
    """Table 2: the budget of all six statistics together, and how many times to draw."""

    epsilon: float = 0.1
    quantiles: tuple = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 20


@experiment(f"{NAME}/table-2", one_seed=True,
            uses=(*_RUNS, second.released, release.private_mean, release.private_quantiles),
            quick=Release(), paper=Release(MNIST))
def table_2(config, run):
    """Mean and quantiles of epsilon, released under one budget; mean and standard deviation over draws."""
    found, values = trained(config.setting, config.seeds[0], run), {}
    epsilon = torch.as_tensor(found.epsilon)
    true = [float(epsilon.mean()), *np.quantile(epsilon, config.quantiles)]
    values |= second.named("non_private", **dict(zip(second.STATISTICS, true)))
    for method in release.METHODS:
        drawn = np.array([second.released(epsilon, found.worst_case, DELTA, config, method, draw)
                          for draw in range(config.draws)])
        error = records.mean_and_sd(100 * np.abs(drawn / true - 1).mean(1))
        if method == "cdf":
            values |= second.named("released", **dict(zip(second.STATISTICS, map(records.mean_and_sd, drawn.T))))
            values["mean_error_percent"] = error
        values[f"{method}.mean_error_percent"] = error
    return values


@finding(f"{NAME}/table-2", "the mean error of the released statistics, by the paper's method, is at most 5%")
def released_accurately(record):
    yield from _release_error(record, "andrew2021")


@finding(f"{NAME}/table-2", "the same by a private distribution function", kind="own")
def released_by_distribution(record):
    yield from _release_error(record, "cdf")


def _release_error(record, method):
    error = intervals.of_summary(*record.values[f"{method}.mean_error_percent"])  # over draws of the noise
    yield label(record), f"{error:.1f}%", error.at_most(5)


# What a running estimate hides -------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Hidden:
    """Algorithm 1 with K = 0 in one dimension, for an example whose gradient is short at first and long afterwards.

    The gradients do not hang on the outputs, so that an account along the trajectory is an account of the algorithm.
    """

    norms: tuple = (0.05, 1.0, 1.0, 1.0, 1.0, 1.0)
    sample_rate: float = 0.1
    noise: float = 1.0
    

def histories(config, *, running=True):
    """Every history of who was sampled: (probabilities, what the example adds, what it is charged at each step)."""
    sampled = np.array(list(itertools.product((0, 1), repeat=len(config.norms))))
    probabilities = np.prod(np.where(sampled, config.sample_rate, 1 - config.sample_rate), axis=1)
    limit, added, charged = np.ones(len(sampled)), [], []
    for step, norm in enumerate(config.norms):
        z = limit if running else np.full(len(sampled), norm)
        added.append(sampled[:, step] * np.minimum(norm, z))
        charged.append(z)
        limit = np.where(sampled[:, step], norm, limit)
    return probabilities, np.stack(added, 1), np.stack(charged, 1)


def true_divergence(probabilities, added, noise):
    """Renyi divergence of order 3 of all outputs with the example and without, exactly.

    The mixture over histories of N(added, noise^2) against N(0, noise^2) has the third moment
    sum_ijk p_i p_j p_k G_ij G_ik G_jk with G = exp(<i, j> / noise^2).
    """
    gram = np.exp(added @ added.T / noise**2)
    pairs = gram * probabilities @ gram                      # over k, of p_k G_ik G_kj
    return math.log(probabilities @ (gram * pairs) @ probabilities) / 2


@experiment(f"{NAME}/algorithm-1", uses=(histories, true_divergence), quick=Hidden(), paper=Hidden())
def algorithm_1(config, run):
    """What all outputs give away of the example, and what it is told, by whether it was sampled at the first step."""
    values = {}
    for kind, running in (("running", True), ("passes", False)):
        probabilities, added, charged = histories(config, running=running)
        cost = np.zeros(charged.shape)
        for level in np.unique(charged):
            cost[charged == level] = float(rdp_sampled_gaussian(
                sample_rate=config.sample_rate, noise_multiplier=config.noise / level, orders=[3]))
        told, truth = cost.sum(1), true_divergence(probabilities, added, config.noise)
        values |= second.named(kind, truth=truth, least_told=told.min(), most_told=told.max(),
                               told_too_little=probabilities[told < truth * (1 - 1e-9)].sum())
    return values


@finding(f"{NAME}/algorithm-1", "with running estimates somebody is told less than the outputs give away; with norms "
         "of every step nobody is", kind="refutes")
def running_estimates_understate(record):
    running, passes = (record.values[f"{kind}.told_too_little"] for kind in ("running", "passes"))
    yield "six steps, exactly", f"{running:.0%} and {passes:.0%} of histories", running > 0 == passes
