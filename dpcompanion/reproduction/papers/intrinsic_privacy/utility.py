"""What the noise costs: table IV, figure 5, and both for a fixed start in figures 8 and 9."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from scipy import stats

from dpcompanion import output_perturbation as op
from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import experiment, get
from dpcompanion.reproduction.papers.intrinsic_privacy.distances import (
    RIGHT_TAIL,
    figure_of_pairs,
    right_tail,
)
from dpcompanion.reproduction.papers.intrinsic_privacy.grids import (
    PAPER,
    QUICK,
    UNSCALED,
    Grids,
    claim,
    numeric_first,
    problem,
    projected,
    sensitivities,
    trained,
)
from dpcompanion.reproduction.papers.intrinsic_privacy.sensitivity import NAMES


@dataclasses.dataclass(frozen=True)
class Utility(Grids):
    """Table IV and figures 5 and 9: how many of the grid's models get noise, for which epsilons.

    `draws` are the single noise vectors, each the same for all models, beside noise of each model's
    own (table IV).
    """

    models: int
    epsilons: tuple = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    seed: int = 0
    draws: int = 0


@dataclasses.dataclass(frozen=True)
class Projected(Utility):
    """Table IV: over how many random projections of the unscaled digits its numbers are means. The
    paper does not print its own projection.
    """

    projections: int = 0


def accuracies(found, weights, sigma, noise):
    """Test accuracy of each model, (models,), with standard normal `noise` times sigma on its
    weights; a generator draws it afresh for each model.
    """
    if isinstance(noise, torch.Generator):
        noise = torch.randn(weights.shape, generator=noise, dtype=torch.float64)
    features = torch.cat((found.test_features, torch.ones(len(found.test_features), 1)), 1)
    positive = found.test_labels[:, None] == 1
    return torch.cat(
        [
            ((features @ part.T > 0) == positive).double().mean(0)
            for part in (weights + sigma * noise).split(64)
        ]
    )


def _utility(name, task, run, config, initialization, mechanism, draw=None):
    """Accuracy without noise and, for each sensitivity and epsilon, with full and augmented noise.

    The same normal draws serve both, so that only the size of the noise differs between the members
    of a pair. With a `draw` they serve all models, too: the vector of NumPy's legacy generator with
    that seed, in the order of the public code's columns.
    """
    found = problem(name, run)
    grid = trained(name, task, run, initialization)[1:]
    chosen = torch.randperm(
        grid[..., 0].numel(), generator=torch.Generator().manual_seed(config.seed)
    )[: config.models]
    weights = grid.flatten(0, 1)[chosen]
    bound, fractional, _ = sensitivities(task, found.examples)
    theory = fractional if mechanism == "classical" else bound
    sigma = op.intrinsic_sigma(grid)

    def noise():
        if draw is None:
            return torch.Generator().manual_seed(1 + config.seed)
        drawn = torch.from_numpy(np.random.RandomState(draw).normal(size=weights.shape[1]))
        return drawn[[*numeric_first(name, weights.shape[1] - 1), -1]]

    results: dict[Any, torch.Tensor] = {
        "noiseless": accuracies(found, weights, 0.0, torch.zeros(()))
    }
    for kind, sensitivity in (("theory", theory), ("empirical", op.empirical_sensitivity(grid))):
        for epsilon in config.epsilons:
            for setting, own in (("deterministic", 0.0), ("augmented", sigma)):
                added = op.augmented_sigma(
                    sensitivity,
                    own,
                    target_epsilon=epsilon,
                    target_delta=1 / found.examples,
                    mechanism=mechanism,
                )
                results[kind, epsilon, setting] = accuracies(found, weights, added, noise())
    return results


def _single_draws(name, task, run, config):
    """Table IV as the public code computes it, with one noise vector for all models: that of seed
    0, as printed, and the same for the vectors of other seeds (`other_draws`, mean and standard
    deviation over them).
    """
    values = {}
    each = [
        _utility(name, task, run, config, "varying", "classical", draw)
        for draw in range(config.draws)
    ]
    noiseless = each[0]["noiseless"]
    values[f"noiseless_accuracy.{name}"] = records.mean_and_sd(noiseless)
    draws = {"": each[:1]} | ({"other_draws.": each[1:]} if each[1:] else {})
    for kind in ("theory", "empirical"):
        for prefix, results in draws.items():
            plain, augmented = (
                [found[kind, 1.0, setting] for found in results]
                for setting in ("deterministic", "augmented")
            )
            gains = [float((more - less).mean()) for more, less in zip(augmented, plain)]
            values |= {
                f"{prefix}{kind}.deterministic.{name}": records.mean_and_sd(
                    [float(one.mean()) for one in plain] if prefix else plain[0].tolist()
                ),
                f"{prefix}{kind}.gain.{name}": records.mean_and_sd(gains) if prefix else gains[0],
            }
        gap = float((noiseless - each[0][kind, 1.0, "deterministic"]).mean())
        share = 100 * values[f"{kind}.gain.{name}"] / gap
        values[f"{kind}.percent_of_gap.{name}"] = share if gap > 0 else math.nan
    return values


def _over_projections(name, task, run, config):
    """The values of `_single_draws` for the vector of seed 0, as means and standard deviations over
    random projections of the digits; `one_projection.` has those of the one that the other exhibits
    use.
    """
    each = []
    for number in range(config.projections):
        own = projected(name, number)
        drawn = _single_draws(own, task, run, dataclasses.replace(config, draws=1))
        each.append({key.replace(own, name): value for key, value in drawn.items()})
    return {f"one_projection.{key}": value for key, value in each[0].items()} | {
        key: records.mean_and_sd([getattr(one[key], "mean", one[key]) for one in each])
        for key in each[0]
    }


@experiment(
    "intrinsic-privacy/table-4",
    quick=Projected(QUICK, 200, (1.0,)),
    paper=Projected(PAPER | UNSCALED, 2000, (1.0,), draws=61, projections=12),
)
def table_4(config, run):
    """Accuracy at eps 1: with one noise vector for all models, as the paper computes it, where
    there are `draws`; with noise of each model's own under `own_draws.`, and that with the bound
    and the analytic mechanism under `.analytic`. With `projections`, what is printed of the
    unscaled digits is a mean over them.
    """
    values = {}
    own = "own_draws." if config.draws else ""
    if config.draws:
        few = dataclasses.replace(config, models=min(config.models, 200))
        for name, task in config.tasks.items():
            values |= _single_draws(name, task, run, few)
    for mechanism, suffix in (("classical", ""), ("analytic", ".analytic")):
        for name, task in config.tasks.items():
            results = _utility(name, task, run, config, "varying", mechanism)
            values[f"noiseless_accuracy.{name}"] = records.mean_and_sd(results["noiseless"])
            for kind in ("theory", "empirical"):
                plain, augmented = (
                    results[kind, 1.0, setting] for setting in ("deterministic", "augmented")
                )
                gain, gap = (augmented - plain).mean(), (results["noiseless"] - plain).mean()
                test = stats.ttest_rel(augmented.numpy(), plain.numpy())
                of = "" if suffix else own
                values |= {
                    f"{of}{kind}.deterministic.{name}{suffix}": records.mean_and_sd(plain),
                    f"{of}{kind}.gain.{name}{suffix}": gain,
                    f"{of}{kind}.percent_of_gap.{name}{suffix}": 100 * gain / gap
                    if gap > 0
                    else math.nan,
                    f"{of}{kind}.p_value.{name}{suffix}": test.pvalue,
                }
    if config.projections:
        few = dataclasses.replace(config, models=min(config.models, 200))
        for name in UNSCALED.keys() & config.tasks.keys():
            values |= _over_projections(name, config.tasks[name], run, few)
    return values


def _figure_of_utility(config, run, initialization):
    values, arrays = {}, {"epsilons": np.array(config.epsilons)}
    for mechanism in ("classical", "analytic"):
        for name, task in config.tasks.items():
            results = _utility(name, task, run, config, initialization, mechanism)
            values[f"{name}.noiseless"] = results["noiseless"].mean()
            for kind in ("theory", "empirical"):
                key = f"{name}.{mechanism}.{kind}"
                plain, augmented = (
                    [results[kind, epsilon, setting] for epsilon in config.epsilons]
                    for setting in ("deterministic", "augmented")
                )
                arrays[f"{key}.deterministic"] = np.array([each.mean() for each in plain])
                arrays[f"{key}.augmented"] = np.array([each.mean() for each in augmented])
                # Of each model, since both members of a pair have the same noise but for its size.
                values[f"{key}.gains"] = [
                    records.mean_and_sd(more - less) for more, less in zip(augmented, plain)
                ]
    return values, arrays


@experiment(
    "intrinsic-privacy/figure-5", quick=Utility(QUICK, 100), paper=Utility(PAPER | UNSCALED, 4900)
)
def figure_5(config, run):
    """Mean accuracy over epsilon, the initialisation varying."""
    return _figure_of_utility(config, run, "varying")


@experiment(
    "intrinsic-privacy/figures-8-9",
    quick=Utility(QUICK, 100),
    paper=Utility(PAPER | UNSCALED, 4900),
)
def figures_8_9(config, run):
    """Figures 4 and 5 with a fixed initialisation."""
    values, arrays = figure_of_pairs(config, run, "fixed")
    more, curves = _figure_of_utility(config, run, "fixed")
    return values | {f"utility.{key}": value for key, value in more.items()}, arrays | curves


def _gains(values, key):
    """How much more accurate the augmented mechanism is at each epsilon: joint intervals."""
    gains = values[f"{key}.gains"]
    return [intervals.of_summary(*each, confidence=1 - 0.05 / len(gains)) for each in gains]


def _largest(gains):
    """The largest of some statistics whose intervals all hold at once."""
    return intervals.Interval(
        *(max(getattr(gain, end) for gain in gains) for end in ("estimate", "low", "high"))
    )


def _superior(record, names, prefix):
    """Of each task and sensitivity: is augmented noise more accurate somewhere, nowhere less?"""
    for name in names:
        for which in ("theory", "empirical"):
            gains = _gains(record.values, f"{prefix}{name}.classical.{which}")
            low, high = min(gains, key=lambda gain: gain.estimate), _largest(gains)
            yield (
                f"{NAMES[name]}, {which}",
                f"{low.estimate:+z.5f} to {high:+z.5f}",
                intervals.every(high.above(0), all(gain.high >= 0 for gain in gains)),
            )


_SUPERIOR = (
    "augmented significantly more accurate at the best epsilon, significantly less at none (paired)"
)


@claim("intrinsic-privacy/figure-5", _SUPERIOR)
def _superior_when_varying(record, names):
    yield from _superior(record, names, "")


@claim("intrinsic-privacy/figures-8-9", _SUPERIOR)
def _superior_when_fixed(record, names):
    yield from _superior(record, names, "utility.")


@claim("intrinsic-privacy/figures-8-9", RIGHT_TAIL)
def _right_tail_when_fixed(record, names):
    yield from right_tail(record, names)


def _of_varying_start(exhibit, record):
    """An exhibit's record with a varying start, same preset, to compare a fixed start with."""
    return get(f"intrinsic-privacy/{exhibit}").record(record.preset)


@claim("intrinsic-privacy/figures-8-9", "largest gain smaller than with a varying start")
def _smaller_gains(record, names):
    varying = _of_varying_start("figure-5", record)
    if varying is None:
        return
    for name in names:
        fixed, free = (
            _largest(_gains(values, f"{prefix}{name}.classical.empirical"))
            for prefix, values in (("utility.", record.values), ("", varying.values))
        )
        yield NAMES[name], f"{fixed:.4f} against {free:.4f}", (fixed - free).below(0)
