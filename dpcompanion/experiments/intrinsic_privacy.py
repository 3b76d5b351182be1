r"""Exhibits of Hyland and Tople 2020, "On the intrinsic privacy of SGD".

What the paper does not spell out and its numbers show: Covertype without the
columns that are constant in classes 1 and 2 has its 49 features, Adult with "?"
as a level its 100.  Columns scaled to [0, 1], then examples divided by their
norms, give table III's sigma_i on Adult (0.107 for 0.108) and come close on
Forest.  On MNIST-binary they do not: there the projected digits as they are, with
norms around 9, give it (0.027 for 0.028).  So there are two tasks, `mnist-binary`
as the paper says and `mnist-binary-unscaled` as its numbers say; theorem 2 does
not cover the second.

A task trains S data sets under R seeds from a fixed and from a varying
initialisation, 2 R S runs, and data set 0, which replaces nothing, beside them.
Grids that take minutes are kept in the data folder, since many exhibits share them,
and an interrupted one goes on where it stopped.
"""

import dataclasses
import functools
import math
import time

import numpy as np
import torch
from scipy import stats

from dpcompanion import attacks, data, ensembles, intervals, records
from dpcompanion import output_perturbation as op
from dpcompanion.accounting import gaussian_delta, gaussian_epsilon
from dpcompanion.experiments import experiment, finding, get

INITIALISATIONS = ("varying", "fixed")
KEPT = 3e6  # steps of SGD, about ten seconds: smaller grids are trained again when they are needed


@dataclasses.dataclass(frozen=True)
class Task:
    """Plain SGD on one data set: hyperparameters, and how many neighbouring data sets and seeds to train."""

    batch_size: int
    learning_rate: float
    steps: int
    seeds: int
    data_sets: int


PAPER = {
    "mnist-binary": Task(32, 0.1, 1850, seeds=99, data_sets=50),
    "forest": Task(50, 1.0, 8400, seeds=127, data_sets=64),
    "adult": Task(32, 0.5, 3400, seeds=161, data_sets=80),
}
UNSCALED = {"mnist-binary-unscaled": PAPER["mnist-binary"]}
QUICK = {
    "digits": Task(32, 1.0, 120, seeds=40, data_sets=20),
    "breast-cancer": Task(16, 1.0, 150, seeds=40, data_sets=20),
}


@dataclasses.dataclass(frozen=True)
class Grids:
    """The tasks that an exhibit looks at."""

    tasks: dict


@dataclasses.dataclass(frozen=True)
class Problem:
    """Training examples, the held-out one first, and test examples."""

    features: torch.Tensor
    labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor
    validation: int

    @property
    def examples(self):
        """The N of table I, of which data sets hold N - 1."""
        return len(self.labels)


# Data --------------------------------------------------------------------------------------------------------------

@functools.cache
def _digits(source, unscaled):
    """3 against 5, projected from 784 to 50 features."""
    generator = torch.Generator().manual_seed(50)
    projection = torch.randn(784, 50, generator=generator, dtype=torch.float64) / 50**0.5
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load(source, split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        kept = (found.labels == 3) | (found.labels == 5)
        parts += [found.features[kept].flatten(1) @ projection, (found.labels[kept] == 5).long()]
    return _problem(*parts, rescale=False, unit=not unscaled), loaded


@functools.cache
def _forest():
    """Covertype classes 1 and 2; 15% for testing."""
    found = data.load("covertype", split="all", dtype=torch.float64)
    kept = found.labels < 2
    features, labels = found.features[kept], found.labels[kept]
    features = features[:, features.amin(0) < features.amax(0)]
    order = torch.as_tensor(np.random.RandomState(0).permutation(len(labels)))
    test, train = order[:math.ceil(0.15 * len(order))], order[math.ceil(0.15 * len(order)):]
    return _problem(features[train], labels[train], features[test], labels[test]), [found.provenance()]


@functools.cache
def _adult():
    """One-hot, without the first level of each column."""
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load("adult", split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        columns = []
        for name, values in zip(found.columns, found.features.T):
            levels = len(found.categories.get(name, ()))
            columns.append(torch.nn.functional.one_hot(values.long(), levels)[:, 1:] if levels else values[:, None])
        parts += [torch.cat([column.double() for column in columns], 1), found.labels]
    return _problem(*parts), loaded


@functools.cache
def _breast_cancer():
    parts, loaded = [], []
    for split in ("train", "test"):
        found = data.load("breast-cancer", split=split, dtype=torch.float64)
        loaded.append(found.provenance())
        parts += [found.features, found.labels]
    return _problem(*parts), loaded


def _problem(features, labels, test_features, test_labels, *, rescale=True, unit=True):
    """Shuffle, set a tenth aside for validation, scale columns to [0, 1] and examples to norm 1."""
    if rescale:
        low, high = features.amin(0), features.amax(0)
        features, test_features = ((part - low) / (high - low).clamp(min=1e-12) for part in (features, test_features))
    if unit:
        features, test_features = (part / part.norm(dim=1, keepdim=True) for part in (features, test_features))
    order = torch.as_tensor(np.random.RandomState(0).permutation(len(labels)))
    held_out = len(order) // 10
    order = order[held_out:]
    return Problem(features[order], labels[order], test_features, test_labels, held_out)


_SOURCES = {
    "mnist-binary": lambda: _digits("mnist", False), "mnist-binary-unscaled": lambda: _digits("mnist", True),
    "forest": _forest, "adult": _adult, "digits": lambda: _digits("mnist-5k", False), "breast-cancer": _breast_cancer,
}


def problem(name, run=None):
    """The examples of a task, noted in the run's record."""
    found, loaded = _SOURCES[name]()
    if run is not None:
        run.loaded += [provenance for provenance in loaded if provenance not in run.loaded]
    return found


# Grids -------------------------------------------------------------------------------------------------------------

_ENSEMBLE = (ensembles.train_grid, ensembles._Runs, ensembles._Logistic, ensembles._Network, ensembles._glorot, Task,
             Problem, _digits, _forest, _adult, _breast_cancer, _problem)
_TRAINED = {}


def trained(name, task, run, initialisation="varying", **options):
    """The weights of a task's grid, (1 + data sets, seeds, parameters) float64, data set 0 first. See `_grid`."""
    return _grid(name, task, run, initialisation, **options)[0]


def _grid(name, task, run, initialisation, *, hidden=0, data_sets=None, first_seed=0, held_out=None):
    """The weights, and the seconds that training took when it was done.

    `data_sets` replaces 0, ..., task.data_sets; seeds count from `first_seed`; `held_out` (features, label) stands in
    for the example that replaces others. Runs that take long are kept, piece by piece.
    """
    found = problem(name, run)
    data_sets = tuple(range(task.data_sets + 1)) if data_sets is None else tuple(data_sets)
    key = {"task": name, "batch_size": task.batch_size, "learning_rate": task.learning_rate, "steps": task.steps,
           "initialisation": initialisation, "hidden": hidden, "data_sets": data_sets,
           "code": records.code_hash(*_ENSEMBLE)}
    if held_out is not None:
        key["held_out"] = [held_out[0].tolist(), held_out[1]]
        found = dataclasses.replace(found, features=torch.cat((held_out[0][None], found.features[1:])),
                                    labels=torch.cat((torch.tensor([held_out[1]]), found.labels[1:])))

    def train(piece):
        first, last = map(int, piece.split("-"))
        started = time.perf_counter()
        weights = ensembles.train_grid(
            found.features, found.labels, data_sets=data_sets, seeds=range(first, last), steps=task.steps,
            batch_size=task.batch_size, learning_rate=task.learning_rate, initialisation=initialisation, hidden=hidden,
            enforce_conditions=not name.endswith("-unscaled"), device=run.device, progress=False)
        return {"seconds": time.perf_counter() - started}, {"weights": weights.numpy()}

    # A last piece of one seed would be no grid: it joins the piece before.
    size = max(16, task.seeds // 16)
    cuts = [*range(first_seed, first_seed + task.seeds - 1, size), first_seed + task.seeds]
    pieces = [f"{a}-{b}" for a, b in zip(cuts, cuts[1:])]
    hashed = records.hash_of({**key, "pieces": pieces})
    if hashed not in _TRAINED:
        if task.steps * task.seeds * len(data_sets) < KEPT:
            parts = [train(piece) for piece in pieces]
        else:
            folder = data.data_folder() / "grids" / f"{name}-{initialisation}-{records.hash_of(key)[:12]}"
            parts = records.resumable(train, pieces, folder=folder, config=key,
                                      label=f"{name}, {initialisation}").values()
        _TRAINED[hashed] = (torch.cat([torch.as_tensor(arrays["weights"]) for _, arrays in parts], 1),
                            sum(values["seconds"] for values, _ in parts))
    return _TRAINED[hashed]


def sensitivities(task, examples):
    """Theorem 2 for a task: (the bound, the paper's fractional value, passes begun)."""
    batches = math.ceil((examples - 1) / task.batch_size)
    common = {"lipschitz": math.sqrt(2), "learning_rate": task.learning_rate, "batch_size": task.batch_size}
    return (op.sgd_sensitivity(passes=task.steps / batches, **common),
            op.sgd_sensitivity_estimate(passes=task.steps * task.batch_size / examples, **common),
            math.ceil(task.steps / batches))


def between_seeds(weights):
    """Distances between all pairs of seeds on each data set, (data sets, pairs)."""
    return torch.stack([torch.pdist(one) for one in weights])


# Exhibits ----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Paths(Grids):
    """Figure 1: which two weights to follow, for how many seeds, at how many steps."""

    coordinates: tuple = (26, 36)
    runs: int = 6
    points: int = 60


@experiment("intrinsic-privacy/figure-1", uses=_ENSEMBLE,
            quick=Paths({"breast-cancer": QUICK["breast-cancer"]}, coordinates=(6, 16)),
            paper=Paths({"forest": PAPER["forest"]}))
def figure_1(config, run):
    """Two weights on the way, from one initialisation: the distance between runs at the end, and the whole norm."""
    (name, task), = config.tasks.items()
    found = problem(name, run)
    stops = [round(i * task.steps / config.points) for i in range(config.points + 1)]
    weights = ensembles.train_grid(
        found.features, found.labels, data_sets=(0, 1), seeds=range(config.runs), steps=task.steps,
        batch_size=task.batch_size, learning_rate=task.learning_rate, initialisation="fixed", snapshots=stops,
        device=run.device, progress=False)[:, 0]
    path = weights[..., list(config.coordinates)]
    apart = torch.pdist(path[-1])
    values = {"apart_at_start": torch.pdist(path[0]).max(), "apart_at_end": apart.mean(),
              "travelled": (path[-1] - path[0]).norm(dim=-1).mean()}
    return values, {"steps": np.array(stops), "path": path.numpy().astype(np.float32)}


@experiment("intrinsic-privacy/table-1", uses=(*_ENSEMBLE, _grid), quick=Grids(QUICK), paper=Grids(PAPER))
def table_1(config, run):
    """Sizes of the data sets, the number of runs 2 R S, and the seconds that they took."""
    values = {}
    for name, task in config.tasks.items():
        found = problem(name, run)
        values |= {f"{name}.train": found.examples, f"{name}.validation": found.validation,
                   f"{name}.test": len(found.test_labels), f"{name}.d": found.features.shape[1],
                   f"{name}.experiments": 2 * task.seeds * task.data_sets,
                   f"{name}.seconds": sum(_grid(name, task, run, i)[1] for i in INITIALISATIONS)}
    return values


@experiment("intrinsic-privacy/theorem-2", uses=(*_ENSEMBLE, _grid, sensitivities), quick=Grids(QUICK),
            paper=Grids(PAPER | UNSCALED))
def theorem_2(config, run):
    """The bound beside what was seen: against data set 0 (one place differs), and between two sets (two places)."""
    values = {}
    for name, task in config.tasks.items():
        bound, fractional, passes = sensitivities(task, problem(name, run).examples)
        weights = trained(name, task, run)
        values |= {f"{name}.passes": passes, f"{name}.bound": bound, f"{name}.fractional": fractional,
                   f"{name}.one_place": (weights[1:] - weights[:1]).norm(dim=-1).max(),
                   f"{name}.two_places": op.empirical_sensitivity(weights[1:])}
    return values


@dataclasses.dataclass(frozen=True)
class Shuffles:
    """Claims 1 and 2: permutations of N examples in each of k passes."""

    examples: int
    passes: int
    draws: int
    seeds: tuple = (0,)


@experiment("intrinsic-privacy/claims-1-2", one_seed=True,
            quick=Shuffles(200, 6, 20000), paper=Shuffles(10396, 6, 20000))
def claims_1_2(config, run):
    """Fixed points of random orders, and the bound of equation 9 in units of 2 L eta."""
    n, k = config.examples, config.passes
    random = np.random.RandomState(config.seeds[0])
    places = np.arange(n)
    fixed = np.array([[(random.permutation(n) == places).sum() for _ in range(k)] for _ in range(config.draws)])
    variability = (n - fixed).sum(1)
    near = np.abs(variability - k * (n - 1)) >= k * (n - 2) / 2
    return {"mean": variability.mean(), "mean_claimed": k * (n - 1),
            "variance": variability.var(), "variance_claimed": k,
            "maximum_claimed": k * n, "chebyshev": 4 / (k * (n - 2) ** 2), "chance": near.mean(),
            "fixed_points": np.bincount(fixed.ravel(), minlength=8)[:8] / fixed.size}


LOG_EDGES = np.linspace(-5, 2, 141)


def _log_histogram(values):
    return np.histogram(np.log10(np.clip(values.numpy().ravel(), 1e-300, None)).clip(-5, 2),
                        LOG_EDGES)[0].astype(np.int32)


def _distances(name, weights, bound):
    """What figures 2 and 6 show: values and histograms of distances, `weights` for each initialisation."""
    values, arrays = {}, {}
    generator = torch.Generator().manual_seed(0)
    found = {"data": op.pairwise_sensitivity(weights["varying"][1:])}
    for initialisation, grid in weights.items():
        sets, seeds = grid.shape[:2]
        found[f"seed.{initialisation}"] = between_seeds(grid[1:])
        pairs = (torch.randint(1, sets, (2, 20000), generator=generator),
                 torch.randint(seeds, (2, 20000), generator=generator))
        differ = (pairs[0][0] != pairs[0][1]) & (pairs[1][0] != pairs[1][1])
        (a, b), (r, s) = (pair[:, differ] for pair in pairs)
        found[f"both.{initialisation}"] = (grid[a, r] - grid[b, s]).norm(dim=-1)
    for kind, distances in found.items():
        arrays[f"{name}.{kind}"] = _log_histogram(distances)
        values |= {f"{name}.{kind}.median": distances.median(), f"{name}.{kind}.max": distances.max(),
                   f"{name}.{kind}.min": distances.min()}
    largest = found["data"].max()
    for initialisation in weights:
        values[f"{name}.seed_above_all_data.{initialisation}"] = (
            found[f"seed.{initialisation}"] > largest).double().mean()
        if bound is not None:
            values[f"{name}.seed_above_bound.{initialisation}"] = (
                found[f"seed.{initialisation}"] > bound).double().mean()
    values[f"{name}.varying_over_fixed"] = found["seed.varying"].median() / found["seed.fixed"].median()
    if bound is not None:
        values |= {f"{name}.bound": bound, f"{name}.bound_over_data": bound / largest}
    return values, arrays


@experiment("intrinsic-privacy/figure-2",
            uses=(*_ENSEMBLE, _grid, sensitivities, between_seeds, _distances, _log_histogram),
            quick=Grids(QUICK), paper=Grids(PAPER | UNSCALED))
def figure_2(config, run):
    """Distances between runs that differ in data, in seed, or in both; histograms over `LOG_EDGES` of log10."""
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        bound = None if name.endswith("-unscaled") else sensitivities(task, problem(name, run).examples)[0]
        weights = {initialisation: trained(name, task, run, initialisation) for initialisation in INITIALISATIONS}
        for mine, new in zip((values, arrays), _distances(name, weights, bound)):
            mine |= new
    return values, arrays


@dataclasses.dataclass(frozen=True)
class Normality(Grids):
    """Figure 3: the data sets whose weights are tested."""

    data_sets: int = 25


@experiment("intrinsic-privacy/figure-3", uses=(*_ENSEMBLE, _grid), quick=Normality(QUICK, 5),
            paper=Normality({"mnist-binary": PAPER["mnist-binary"], **UNSCALED}))
def figure_3(config, run):
    """Shapiro-Wilk for each weight over seeds: shares of p-values below 0.05, and below 0.05 / d.

    Also for one data set alone, since runs of one seed on neighbouring sets are nearly equal, and the excess kurtosis
    (0 for a Gaussian, -1.2 for the uniform distribution that initial weights come from).
    """
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        for initialisation in INITIALISATIONS:
            weights = trained(name, task, run, initialisation)[1:config.data_sets + 1].numpy()
            p = np.array([[stats.shapiro(weights[i, :, j]).pvalue for j in range(weights.shape[2])]
                          for i in range(len(weights))])
            row = f"{name}.{initialisation}"
            arrays[row] = p.astype(np.float32)
            values |= {f"{row}.below_5_percent": (p < 0.05).mean(),
                       f"{row}.below_bonferroni": (p < 0.05 / p.shape[1]).mean(),
                       f"{row}.smallest": p.min(), f"{row}.one_set_below_5_percent": (p[0] < 0.05).mean(),
                       f"{row}.kurtosis": np.median(stats.kurtosis(weights, axis=1))}
    return values, arrays


@experiment("intrinsic-privacy/table-3", uses=(*_ENSEMBLE, _grid, sensitivities), quick=Grids(QUICK),
            paper=Grids(PAPER | UNSCALED))
def table_3(config, run):
    """Algorithm 1 as the paper computes it (fractional passes, the classical formula), and as the theorems allow:
    `delta_bound` with whole passes, and `.analytic`."""
    values = {}
    for name, task in config.tasks.items():
        examples = problem(name, run).examples
        bound, fractional, _ = sensitivities(task, examples)
        grids = {initialisation: trained(name, task, run, initialisation)[1:] for initialisation in INITIALISATIONS}
        sigma, star, delta = (
            op.intrinsic_sigma(grids["varying"]), op.empirical_sensitivity(grids["varying"]), 1 / examples)

        def epsilon(sensitivity, sigma=sigma, mechanism="analytic"):
            return op.intrinsic_epsilon(sensitivity, sigma, delta, mechanism=mechanism)

        values |= {
            f"{name}.delta_theory": fractional, f"{name}.delta_empirical": star, f"{name}.delta": delta,
            f"{name}.sigma_i": sigma, f"{name}.eps_i": epsilon(fractional, mechanism="classical"),
            f"{name}.eps_i_star": epsilon(star, mechanism="classical"), f"{name}.delta_bound": bound,
            f"{name}.eps_i.analytic": epsilon(bound), f"{name}.eps_i_star.analytic": epsilon(star),
            f"{name}.sigma_i_smallest": op.seed_sigma(grids["varying"]).min(),
            f"{name}.sigma_i_largest": op.seed_sigma(grids["varying"]).max(),
        }
        sigma_fixed = op.intrinsic_sigma(grids["fixed"])
        star_fixed = op.empirical_sensitivity(grids["fixed"])
        values |= {f"{name}.sigma_i_fixed": sigma_fixed, f"{name}.eps_i_fixed.analytic": epsilon(bound, sigma_fixed),
                   f"{name}.eps_i_star_fixed.analytic": epsilon(star_fixed, sigma_fixed)}
    return values


def _pairwise_epsilon(name, weights, delta):
    """Pairwise epsilon with the sigma of the same grid, classical (as printed) and analytic: values and a histogram."""
    values, arrays = {}, {}
    distances, sigma = op.pairwise_sensitivity(weights[1:]), op.intrinsic_sigma(weights[1:])
    # Half a million distances, one smooth curve: epsilon at 2,000 of them, straight lines between.
    knots = torch.linspace(0, float(distances.max()), 2001, dtype=torch.float64)
    for mechanism in ("classical", "analytic"):
        curve = op.intrinsic_epsilon(knots, sigma, delta, mechanism=mechanism)
        epsilon = torch.as_tensor(np.interp(distances.numpy(), knots.numpy(), curve.numpy()))
        values |= {f"{name}.{mechanism}.median": epsilon.median(), f"{name}.{mechanism}.max": epsilon.max(),
                   f"{name}.{mechanism}.skew": stats.skew(epsilon.numpy().ravel())}
        arrays[f"{name}.{mechanism}"] = _log_histogram(epsilon)
    return values, arrays


def _figure_of_pairs(config, run, initialisation):
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        delta = 1 / problem(name, run).examples
        for mine, new in zip((values, arrays),
                             _pairwise_epsilon(name, trained(name, task, run, initialisation), delta)):
            mine |= new
    return values, arrays


@experiment("intrinsic-privacy/figure-4", uses=(*_ENSEMBLE, _grid, _pairwise_epsilon, _figure_of_pairs, _log_histogram),
            quick=Grids(QUICK), paper=Grids(PAPER | UNSCALED))
def figure_4(config, run):
    """Pairwise epsilon, the initialisation varying; histograms over `LOG_EDGES` of log10."""
    return _figure_of_pairs(config, run, "varying")


@dataclasses.dataclass(frozen=True)
class Utility(Grids):
    """Table IV and figures 5 and 9: how many of the grid's models get noise, and for which epsilons."""

    models: int
    epsilons: tuple = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    seeds: tuple = (0,)


def accuracies(found, weights, sigma, generator):
    """Test accuracy of each model, (models,), with noise N(0, sigma^2) on its weights, drawn from `generator`."""
    noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    features = torch.cat((found.test_features, torch.ones(len(found.test_features), 1)), 1)
    positive = found.test_labels[:, None] == 1
    return torch.cat([((features @ part.T > 0) == positive).double().mean(0)
                      for part in (weights + sigma * noise).split(64)])


def _utility(name, task, run, config, initialisation, mechanism):
    """Accuracy of the noiseless models and, for each sensitivity and epsilon, with full and with augmented noise.

    The same normal draws serve both, so that only the size of the noise differs between the members of a pair.
    """
    found = problem(name, run)
    grid = trained(name, task, run, initialisation)[1:]
    chosen = torch.randperm(grid[..., 0].numel(),
                            generator=torch.Generator().manual_seed(config.seeds[0]))[:config.models]
    weights = grid.flatten(0, 1)[chosen]
    bound, fractional, _ = sensitivities(task, found.examples)
    theory = fractional if mechanism == "classical" else bound
    sigma = op.intrinsic_sigma(grid)
    results = {"noiseless": accuracies(found, weights, 0.0, torch.Generator().manual_seed(0))}
    for kind, sensitivity in (("theory", theory), ("empirical", op.empirical_sensitivity(grid))):
        for epsilon in config.epsilons:
            for setting, own in (("deterministic", 0.0), ("augmented", sigma)):
                added = op.augmented_sigma(sensitivity, own, target_epsilon=epsilon, target_delta=1 / found.examples,
                                           mechanism=mechanism)
                results[kind, epsilon, setting] = accuracies(
                    found, weights, added, torch.Generator().manual_seed(1 + config.seeds[0]))
    return results


@experiment("intrinsic-privacy/table-4", one_seed=True, uses=(*_ENSEMBLE, _grid, sensitivities, accuracies, _utility),
            quick=Utility(QUICK, 200, (1.0,)), paper=Utility(PAPER | UNSCALED, 2000, (1.0,)))
def table_4(config, run):
    """Accuracy at eps 1 as the paper computes it; with the bound and the analytic mechanism under `.analytic`."""
    values = {}
    for mechanism, suffix in (("classical", ""), ("analytic", ".analytic")):
        for name, task in config.tasks.items():
            results = _utility(name, task, run, config, "varying", mechanism)
            values[f"noiseless_accuracy.{name}"] = records.mean_and_sd(results["noiseless"])
            for kind in ("theory", "empirical"):
                plain, augmented = (results[kind, 1.0, setting] for setting in ("deterministic", "augmented"))
                gain, gap = (augmented - plain).mean(), (results["noiseless"] - plain).mean()
                test = stats.ttest_rel(augmented.numpy(), plain.numpy())
                values |= {f"{kind}.deterministic.{name}{suffix}": records.mean_and_sd(plain),
                           f"{kind}.gain.{name}{suffix}": gain,
                           f"{kind}.percent_of_gap.{name}{suffix}": 100 * gain / gap if gap > 0 else math.nan,
                           f"{kind}.p_value.{name}{suffix}": test.pvalue}
    return values


def _figure_of_utility(config, run, initialisation):
    values, arrays = {}, {"epsilons": np.array(config.epsilons)}
    for mechanism in ("classical", "analytic"):
        for name, task in config.tasks.items():
            results = _utility(name, task, run, config, initialisation, mechanism)
            values[f"{name}.noiseless"] = results["noiseless"].mean()
            for kind in ("theory", "empirical"):
                means = {setting: np.array([results[kind, epsilon, setting].mean() for epsilon in config.epsilons])
                         for setting in ("deterministic", "augmented")}
                for setting, mean in means.items():
                    arrays[f"{name}.{mechanism}.{kind}.{setting}"] = mean
                values[f"{name}.{mechanism}.{kind}.largest_gain"] = (means["augmented"] - means["deterministic"]).max()
                values[f"{name}.{mechanism}.{kind}.smallest_gain"] = (means["augmented"] - means["deterministic"]).min()
    return values, arrays


@experiment("intrinsic-privacy/figure-5", one_seed=True,
            uses=(*_ENSEMBLE, _grid, sensitivities, accuracies, _utility, _figure_of_utility),
            quick=Utility(QUICK, 100), paper=Utility(PAPER | UNSCALED, 500))
def figure_5(config, run):
    """Mean accuracy over epsilon, the initialisation varying."""
    return _figure_of_utility(config, run, "varying")


@dataclasses.dataclass(frozen=True)
class Networks(Grids):
    """Figures 6 and 7: networks with hidden units, two numbers of them where print and text disagree."""

    hidden: dict


_NETWORKS = {name: dataclasses.replace(PAPER[name], seeds=32, data_sets=24) for name in ("mnist-binary", "adult")}
_NETWORKS["mnist-binary-unscaled"] = _NETWORKS["mnist-binary"]


@experiment("intrinsic-privacy/figures-6-7",
            uses=(*_ENSEMBLE, _grid, between_seeds, _distances, _pairwise_epsilon, _log_histogram),
            quick=Networks({"digits": dataclasses.replace(QUICK["digits"], seeds=24, data_sets=12)}, {"digits": (10,)}),
            paper=Networks(_NETWORKS, {"mnist-binary": (10, 16), "mnist-binary-unscaled": (10, 16), "adult": (8,)}))
def figures_6_7(config, run):
    """Distances and pairwise epsilon of networks with one hidden layer, the hyperparameters those of table II."""
    values, arrays = {}, {}
    for name, task in config.tasks.items():
        delta = 1 / problem(name, run).examples
        for hidden in config.hidden[name]:
            row = f"{name}.hidden_{hidden}"
            grids = {i: trained(name, task, run, i, hidden=hidden) for i in INITIALISATIONS}
            values[f"{row}.parameters"] = grids["varying"].shape[-1]
            for new in (_distances(row, grids, None), _pairwise_epsilon(row, grids["varying"], delta)):
                values |= new[0]
                arrays |= new[1]
        # The number of hidden units that fits the printed number of parameters is the one held against the paper.
        row = f"{name}.hidden_{config.hidden[name][0]}"
        values |= {f"pairwise_eps_centre.{name}": values[f"{row}.classical.median"],
                   f"pairwise_eps_max.{name}": values[f"{row}.classical.max"]}
    return values, arrays


@experiment("intrinsic-privacy/figures-8-9", one_seed=True,
            uses=(*_ENSEMBLE, _grid, sensitivities, accuracies, _utility, _figure_of_utility, _pairwise_epsilon,
                  _figure_of_pairs, _log_histogram),
            quick=Utility(QUICK, 100), paper=Utility(PAPER | UNSCALED, 500))
def figures_8_9(config, run):
    """Figures 4 and 5 with a fixed initialisation."""
    values, arrays = _figure_of_pairs(config, run, "fixed")
    more, curves = _figure_of_utility(config, run, "fixed")
    return values | {f"utility.{key}": value for key, value in more.items()}, arrays | curves


# Beyond the paper --------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Audit(Grids):
    """Fresh seeds for data set 0 and its `neighbours` that move the weights most, in units of the noise, and for as
    many as `canaries` in which a made-up example takes another's place.

    Half of the seeds fit the Gaussians and the distinguishers, the other half are counted.
    """

    neighbours: int
    canaries: int
    confidence: float = 0.95
    targets: tuple = (1.0, 2.0, 4.0, 8.0)
    first_seed: int = 100_000


def worst_neighbours(weights, count):
    """The data sets furthest from data set 0 by `mahalanobis`, of a small grid: candidates for an audit."""
    covariance, _ = op.noise_covariance(weights)
    return (op.mahalanobis((weights[1:] - weights[:1]).mean(1), covariance).topk(count).indices + 1).tolist()


def gaussian_view(weights):
    r"""Fitted Gaussians of data set 0 against each other one, over many more seeds than parameters: a dict.

    `mu`: mahalanobis of the mean differences with the sample covariance, freed of what the estimates add to its square
    (an inverse covariance is too large by (R - 1) / (R - d - 2), a squared difference by its own variance);
    `mu_shrunk`: the same with the covariance shrunk by `shrinkage`, which drowns the directions of least noise;
    `mu_pooled`: lengths of the differences over the pooled sigma; also `covariance`, `differences`.
    """
    seeds, size = weights.shape[1:]
    coupled = weights[1:] - weights[:1]
    differences = coupled.mean(1)
    spread = (coupled - differences[:, None]).mT @ (coupled - differences[:, None]) / (seeds - 1)

    def mu(covariance):
        inverse = torch.linalg.inv(covariance) * (seeds - size - 2) / (seeds - 1)
        square = torch.einsum("pi,ij,pj->p", differences, inverse, differences)
        return (square - (inverse * spread).sum((1, 2)) / seeds).clamp(min=0).sqrt()

    covariance, _ = op.noise_covariance(weights, shrinkage=0.0)
    shrunk, shrinkage = op.noise_covariance(weights)
    return {"mu": mu(covariance), "mu_shrunk": mu(shrunk),
            "mu_pooled": differences.norm(dim=1) / op.intrinsic_sigma(weights),
            "covariance": covariance, "shrinkage": shrinkage, "differences": differences}


def gaussian_ratio(first, second):
    """The log likelihood ratio of Gaussians fitted to two clouds of weights, (seeds, parameters), as a function."""
    fits = []
    for cloud in (first, second):
        # A hair of shrinkage, since a weight that no batch moves has no noise at all;
        # any score is a valid distinguisher.
        covariance, _ = op.noise_covariance(cloud[None], shrinkage=1e-9)
        fits.append((cloud.mean(0), covariance, torch.linalg.slogdet(covariance).logabsdet))

    def score(weights):
        logs = [-op.mahalanobis(weights - mean, covariance)**2 / 2 - volume / 2 for mean, covariance, volume in fits]
        return logs[1] - logs[0]
    return score


def linear_classifier(first, second, *, ridge=1e-3, iterations=15):
    """Logistic regression between two clouds of weights, by Newton's method on standardised weights, as a function."""
    both = torch.cat((first, second))
    mean, scale = both.mean(0), both.std(0)
    x = torch.cat(((both - mean) / scale, torch.ones(len(both), 1, dtype=both.dtype)), 1)
    y = torch.cat((torch.zeros(len(first)), torch.ones(len(second)))).to(x)
    beta = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(iterations):
        p = (x @ beta).sigmoid()
        hessian = (x * (p * (1 - p) + 1e-9)[:, None]).T @ x / len(x) + ridge * torch.eye(len(beta), dtype=x.dtype)
        beta = beta - torch.linalg.solve(hessian, x.T @ (p - y) / len(x) + ridge * beta)
    return lambda weights: (weights - mean) / scale @ beta[:-1] + beta[-1]


def counted(score, fit, trial, *, delta, confidence):
    """Lower bounds on epsilon and mu: thresholds chosen on the `fit` clouds, counted on the `trial` clouds.

    Both are pairs (weights of data set 0, weights of its neighbour), each (seeds, parameters).
    """
    def counts(clouds, thresholds):
        negative, positive = (score(cloud).sort().values for cloud in clouds)
        above = [len(s) - torch.searchsorted(s, thresholds) for s in (positive, negative)]
        return dict(true_positives=above[0], positives=len(positive), false_positives=above[1], negatives=len(negative))

    thresholds = torch.cat([score(cloud) for cloud in fit]).quantile(
        torch.linspace(0.001, 0.999, 999, dtype=torch.float64))
    seen = counts(fit, thresholds)
    at_epsilon = thresholds[attacks.epsilon_lower_bound(**seen, delta=delta, confidence=confidence).argmax()]
    at_mu = thresholds[attacks.mu_lower_bound(**seen, confidence=confidence).argmax()]
    return (attacks.epsilon_lower_bound(**counts(trial, at_epsilon[None]), delta=delta, confidence=confidence)[0],
            attacks.mu_lower_bound(**counts(trial, at_mu[None]), confidence=confidence)[0])


def canary(found, weights, count):
    """A made-up example that moves the weights where they are least noisy, and the examples whose place it takes.

    An example pulls by (y - p) x, with a 1 for the bias. Candidates are the directions of least noise with the largest
    norm that training examples have and the label that the mean model finds least likely; the one with the largest
    pull' S^-1 pull is taken, and the `count` examples that pull against it the most.
    Returns ((features, label), numbers).
    """
    covariance, _ = op.noise_covariance(weights[:1], shrinkage=0.0)
    mean, directions = weights[0].mean(0), torch.linalg.eigh(covariance).eigenvectors[:-1, :8].T
    norm = found.features.norm(dim=1).max()
    rows = torch.cat((directions, -directions)) / directions.norm(dim=1).repeat(2)[:, None] * norm
    labels = ((rows @ mean[:-1] + mean[-1]) < 0).long()

    def pulls(features, labels):
        features = torch.cat((features, torch.ones_like(features[:, :1])), 1)
        return (labels - (features @ mean).sigmoid())[:, None] * features

    candidates = pulls(rows, labels)
    best = int(op.mahalanobis(candidates, covariance).argmax())
    against = pulls(found.features[1:], found.labels[1:]) @ torch.linalg.solve(covariance, candidates[best])
    return (rows[best], int(labels[best])), ((-against).topk(count).indices + 1).tolist()


def _clouds(name, task, run, config, initialisation, kind):
    """Fresh weights of data set 0 and neighbours of it, "natural" ones (its worst in the task's own grid) or with a
    "canary"; the task's own grid; the numbers of the neighbours."""
    small = dataclasses.replace(task, seeds=PAPER[name].seeds if name in PAPER else 99 if name in UNSCALED else 40)
    grid = trained(name, small, run, initialisation)
    chosen = worst_neighbours(grid, config.neighbours)
    first = config.first_seed
    weights = trained(name, task, run, initialisation, data_sets=(0, *chosen), first_seed=first)
    if kind == "canary":
        held_out, chosen = canary(problem(name, run), weights, config.canaries)
        weights = trained(name, task, run, initialisation, data_sets=(0, *chosen), first_seed=2 * first,
                          held_out=held_out)
    return weights, grid, chosen


_AUDIT = (*_ENSEMBLE, _grid, sensitivities, worst_neighbours, gaussian_view, gaussian_ratio, linear_classifier, counted,
          canary, _clouds)
_QUICK_AUDIT = Audit({"digits": dataclasses.replace(QUICK["digits"], seeds=2000)}, 3, 2)
_PAPER_AUDIT = Audit({
    "mnist-binary": dataclasses.replace(PAPER["mnist-binary"], seeds=16000),
    "mnist-binary-unscaled": dataclasses.replace(PAPER["mnist-binary"], seeds=16000),
    "adult": dataclasses.replace(PAPER["adult"], seeds=1600)}, 7, 3)
KINDS = ("natural", "canary")


def _cases(config, run):
    """Every case of an audit: its name, delta, theorem 2's bound, and what `_clouds` gives."""
    for name, task in config.tasks.items():
        examples = problem(name, run).examples
        for initialisation in INITIALISATIONS:
            for kind in KINDS:
                clouds = _clouds(name, task, run, config, initialisation, kind)
                yield f"{name}.{initialisation}.{kind}", 1 / examples, sensitivities(task, examples)[0], *clouds


@experiment("intrinsic-privacy/algorithm-1", uses=(*_AUDIT, _cases), quick=_QUICK_AUDIT, paper=_PAPER_AUDIT)
def algorithm_1(config, run):
    """Algorithm 1 put to the test: the whole covariance instead of one sigma, tails, and an audit.

    For each task, initialisation and kind of neighbour, one number for each neighbour of data set 0: mu by the pooled
    sigma, by the whole covariance, and by an audit, which is a lower bound; beside them what algorithm 1 claims, with
    theorem 2's sensitivity and with the empirical one. Confidence is shared among the neighbours of a row and the two
    distinguishers.
    """
    values, arrays = {}, {}
    for row, delta, bound, weights, grid, chosen in _cases(config, run):
        fit, trial = weights.split(weights.shape[1] // 2, 1)
        view, sigma, star = gaussian_view(fit), op.intrinsic_sigma(grid), op.empirical_sensitivity(grid[1:])
        spectrum = torch.linalg.eigvalsh(view["covariance"]).flip(0).sqrt()
        each = 1 - (1 - config.confidence) / (2 * len(chosen))
        found = {kind: torch.stack([torch.stack(counted(make(fit[0], other), (fit[0], other), (trial[0], fresh),
                                                        delta=delta, confidence=each))
                                    for other, fresh in zip(fit[1:], trial[1:])]).T
                 for kind, make in (("gaussian_ratio", gaussian_ratio), ("linear", linear_classifier))}
        epsilon, mu = torch.stack(list(found.values())).amax(0)
        # The direction that tells the worst neighbour apart, in the half that it was not chosen on: tails decide delta.
        worst = int(view["mu"].argmax())
        projected = trial[0] @ torch.linalg.solve(view["covariance"], view["differences"][worst])
        z = (projected - projected.mean()) / projected.std()
        values |= {
            f"{row}.neighbours": chosen, f"{row}.sigma_i": sigma, f"{row}.shrinkage": view["shrinkage"],
            f"{row}.sigma_largest": spectrum[0], f"{row}.sigma_smallest": spectrum[-1],
            f"{row}.moved": view["differences"].norm(dim=1), f"{row}.mu_pooled": view["mu_pooled"],
            f"{row}.mu_shrunk": view["mu_shrunk"], f"{row}.mu_covariance": view["mu"], f"{row}.mu_audited": mu,
            f"{row}.mu_claimed": bound / sigma, f"{row}.mu_claimed_star": star / sigma,
            f"{row}.epsilon_audited": epsilon, f"{row}.epsilon_of_mu_audited": gaussian_epsilon(mu, delta),
            f"{row}.epsilon_pooled": gaussian_epsilon(view["mu_pooled"], delta),
            f"{row}.epsilon_covariance": gaussian_epsilon(view["mu"], delta),
            f"{row}.epsilon_claimed": op.intrinsic_epsilon(bound, sigma, delta),
            f"{row}.epsilon_claimed_star": op.intrinsic_epsilon(star, sigma, delta),
            f"{row}.kurtosis_weights": stats.kurtosis(weights[0].numpy(), axis=0).mean(),
            f"{row}.kurtosis_worst": stats.kurtosis(z.numpy()),
            f"{row}.beyond_3_sigma": (z.abs() > 3).double().mean(),
            f"{row}.beyond_4_sigma": (z.abs() > 4).double().mean(),
        }
        for kind, (epsilons, mus) in found.items():
            values |= {f"{row}.epsilon_audited.{kind}": epsilons, f"{row}.mu_audited.{kind}": mus}
        arrays[f"{row}.spectrum"] = spectrum.numpy()
        arrays[f"{row}.worst_direction"] = np.histogram(z.numpy(), np.linspace(-5, 5, 81))[0]
    return values, arrays


@experiment("intrinsic-privacy/algorithm-2", uses=(*_AUDIT, _cases), quick=_QUICK_AUDIT, paper=_PAPER_AUDIT)
def algorithm_2(config, run):
    """Algorithm 2 put to the test: with the noise that it adds, and with the noise that would be enough.

    For each target epsilon and kind of neighbour: the noise by theorem 2's sensitivity and by the empirical one, what
    the whole covariance says that this gives against the worst neighbour, and what an audit with that noise shows.
    `needed` is the noise at which the whole covariance meets the target for all audited neighbours.
    """
    values = {}
    for row, delta, bound, weights, grid, _ in _cases(config, run):
        view, sigma = gaussian_view(weights), op.intrinsic_sigma(grid)
        identity = torch.eye(weights.shape[-1], dtype=torch.float64)
        noise = torch.randn(2, *weights.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        worst = int(view["mu"].argmax())

        def mus(added):
            return op.mahalanobis(view["differences"], view["covariance"] + added**2 * identity)

        def audited(added):
            noisy = weights[[0, worst + 1]] + added * noise
            fit, trial = noisy.split(noisy.shape[1] // 2, 1)
            return torch.stack(counted(gaussian_ratio(*fit), fit, trial, delta=delta, confidence=config.confidence))

        def report(kind, added):
            epsilons, audits = torch.stack([mus(a).max() for a in added]), torch.stack([audited(a) for a in added]).T
            return {f"{row}.{kind}.added": added, f"{row}.{kind}.epsilon_covariance": gaussian_epsilon(epsilons, delta),
                    f"{row}.{kind}.epsilon_audited": audits[0],
                    f"{row}.{kind}.epsilon_of_mu_audited": gaussian_epsilon(audits[1], delta)}

        for kind, sensitivity in (("theory", bound), ("empirical", op.empirical_sensitivity(grid[1:]))):
            values |= report(
                kind, op.augmented_sigma(sensitivity, sigma, target_epsilon=config.targets, target_delta=delta))
        needed = []
        for target in config.targets:
            low, high = 0.0, 10.0
            for _ in range(60):
                middle = (low + high) / 2
                enough = bool((gaussian_delta(mus(middle), target) <= delta).all())
                low, high = (low, middle) if enough else (middle, high)
            needed.append(high)
        values |= {f"{row}.targets": config.targets, **report("needed", torch.tensor(needed, dtype=torch.float64))}
    return values


# Criteria of the qualitative findings ------------------------------------------------------------------------------

NAMES = {"mnist-binary": "MNIST-binary", "mnist-binary-unscaled": "MNIST-binary, not scaled", "forest": "Forest",
         "adult": "Adult", "digits": "digits", "breast-cancer": "breast cancer"}


def _bounded(record):
    """The tasks that theorem 2 covers."""
    return [name for name in record.config["tasks"] if not name.endswith("-unscaled")]


@finding("intrinsic-privacy/figure-1", "from one start, runs end apart by 1% of their way or more")
def _ends_apart(record):
    ends = record.arrays["path"][-1].astype(np.float64)
    apart = np.linalg.norm(ends[::2][:len(ends) // 2] - ends[1::2], axis=-1)  # pairs that share no run
    share = intervals.mean(apart / record.values["travelled"])
    yield "pairs of runs", f"{share:.1%}", share.at_least(0.01)


@finding("intrinsic-privacy/theorem-2", "no distance that was seen, with one place replaced, exceeds the bound")
def _within_bound(record):
    for name in _bounded(record):
        seen, bound = record.values[f"{name}.one_place"], record.values[f"{name}.bound"]
        yield NAMES[name], f"{seen:.3f} of {bound:.3f}", seen <= bound


@finding("intrinsic-privacy/claims-1-2", "simulated mean within 0.1%, variance within 5%, chance at most Chebyshev's")
def _claims(record):
    value, draws = record.values, record.config["draws"]
    # The variance of a sample variance: a Poisson number of fixed points in each of k passes has excess kurtosis 1 / k.
    spread = math.sqrt((2 + 1 / record.config["passes"]) / draws)
    variance = intervals.of_summary(value["variance"], spread * value["variance"] * math.sqrt(draws), draws)
    mean = intervals.of_summary(value["mean"], math.sqrt(value["variance"]), draws)
    claimed = value["mean_claimed"], value["variance_claimed"]
    good = intervals.every(
        mean.at_least(0.999 * claimed[0]), mean.at_most(1.001 * claimed[0]), variance.at_least(0.95 * claimed[1]),
        variance.at_most(1.05 * claimed[1]), value["chance"] <= value["chebyshev"])
    yield "random orders", f"mean {mean.estimate:.1f}, variance {variance:.2f}", good


@finding("intrinsic-privacy/algorithm-1", "epsilon is at most what is claimed with theorem 2's sensitivity: an attack"
         " can refute that, and never prove it")
def _claim_stands(record):
    yield from _attacked(record, _bounded(record), "mu_claimed", "epsilon_claimed")


@finding("intrinsic-privacy/algorithm-1", "epsilon is at most what is claimed with the empirical sensitivity")
def _empirical_claim_stands(record):
    yield from _attacked(record, record.config["tasks"], "mu_claimed_star", "epsilon_claimed_star")


def _attacked(record, tasks, mu, epsilon):
    for name in tasks:
        for start in INITIALISATIONS:
            row = f"{name}.{start}.canary"
            # What an attack shows, at 95% for all attacks together, is a lower end and nothing else.
            seen = max(record.values[f"{row}.mu_audited"])
            shown = max(record.values[f"{row}.epsilon_of_mu_audited"])
            yield (f"{NAMES[name]}, {start} start",
                   f"at least {shown:.2f}; claimed {record.values[f'{row}.{epsilon}']:.2f}",
                   intervals.Interval(seen, seen, math.inf).at_most(record.values[f"{row}.{mu}"]))


@finding("intrinsic-privacy/algorithm-2", "at target 1, epsilon is at most 1 with theorem 2's sensitivity: an attack can"
         " refute that, and never prove it")
def _augmented_stands(record):
    yield from _augmented(record, _bounded(record), "theory")


@finding("intrinsic-privacy/algorithm-2", "at target 1, epsilon is at most 1 with the empirical sensitivity")
def _empirically_augmented_stands(record):
    yield from _augmented(record, record.config["tasks"], "empirical")


def _augmented(record, tasks, sensitivity):
    for name in tasks:
        for start in INITIALISATIONS:
            row = f"{name}.{start}.canary"
            shown = record.values[f"{row}.{sensitivity}.epsilon_of_mu_audited"][
                record.values[f"{row}.targets"].index(1.0)]
            yield (f"{NAMES[name]}, {start} start", f"at least {shown:.2f}",
                   intervals.Interval(shown, shown, math.inf).at_most(1.0))


def _independent(record, name, what):
    """How many independent pairs there are among the seeds, or the data sets, of a task: those that share no run."""
    return max(1, record.config["tasks"][name][what] // 2)


def _share_of_pairs(record, name, key):
    pairs = _independent(record, name, "seeds")
    return intervals.share(math.floor(record.values[f"{name}.{key}"] * pairs + 1e-6), pairs)


def _median(record, name, key, what, median):
    """The interval of a median of distances or epsilons between pairs, from their histogram, to the width of a bin."""
    counts = record.arrays[f"{name}.{key}"].cumsum()
    low, high = (np.searchsorted(counts, level * counts[-1])
                 for level in intervals.level(0.5, _independent(record, name, what)))
    return intervals.Interval(median, 10 ** LOG_EDGES[low], 10 ** LOG_EDGES[min(high, len(counts) - 1) + 1])


@finding("intrinsic-privacy/figure-2", "95% of pairs of seeds (fixed start) above every pair of data sets")
def _seeds_above_data(record):
    for name in record.config["tasks"]:
        share = _share_of_pairs(record, name, "seed_above_all_data.fixed")
        yield NAMES[name], f"{share:.1%}", share.at_least(0.95)


@finding("intrinsic-privacy/figure-2", "95% of pairs of seeds (varying start) above the bound")
def _seeds_above_bound(record):
    for name in record.config["tasks"]:
        if f"{name}.bound" in record.values:
            share = _share_of_pairs(record, name, "seed_above_bound.varying")
            yield NAMES[name], f"{share:.1%}", share.at_least(0.95)


@finding("intrinsic-privacy/figure-2", "a varying start raises the median by 1 to 5 times")
def _start_matters(record):
    for name in record.config["tasks"]:
        varying, fixed = (_median(record, name, f"seed.{start}", "seeds", record.values[f"{name}.seed.{start}.median"])
                          for start in INITIALISATIONS)
        factor = varying / fixed
        yield NAMES[name], f"{factor:.1f}", intervals.every(factor.at_least(1), factor.at_most(5.5))


@finding("intrinsic-privacy/figure-3", "less than half of the weights below 0.05, none below 0.05 over their number")
def _looks_normal(record):
    for name in record.config["tasks"]:
        for start in INITIALISATIONS:
            p = record.arrays[f"{name}.{start}"]
            low = intervals.bootstrap(lambda share: share.mean(-1), (p < 0.05).mean(0))  # over the weights
            corrected = record.values[f"{name}.{start}.below_bonferroni"]
            yield (f"{NAMES[name]}, {start} start", f"{low:.1%}; {corrected:.1%}",
                   intervals.every(low.below(0.5), corrected == 0))


@finding("intrinsic-privacy/figure-4", "largest above twice the median, skewed to the right (classical)")
def _right_tail(record):
    for name in record.config["tasks"]:
        median, largest = (record.values[f"{name}.classical.{key}"] for key in ("median", "max"))
        median = _median(record, name, "classical", "data_sets", median)
        # As many values as there are independent pairs, at even levels of the histogram.
        pairs, counts = _independent(record, name, "data_sets"), record.arrays[f"{name}.classical"].cumsum()
        even = 10 ** LOG_EDGES[1 + np.searchsorted(counts, (np.arange(pairs) + 0.5) / pairs * counts[-1])]
        skew = intervals.bootstrap(lambda x: ((x - x.mean(-1, keepdims=True)) ** 3).mean(-1), even)
        yield (NAMES[name], f"median {median:.2f}, up to {largest:.2f}",
               intervals.every(intervals.Interval(largest, largest, math.inf).above(2 * median.high), skew.above(0)))


@finding("intrinsic-privacy/figure-5", "augmented never less accurate by more than 0.001")
def _never_worse(record):
    # The record holds means over models, and not how far models differ from each other.
    for name in record.config["tasks"]:
        for which in ("theory", "empirical"):
            low, high = (record.values[f"{name}.classical.{which}.{key}_gain"] for key in ("smallest", "largest"))
            yield (f"{NAMES[name]}, {which}", f"{low:+z.4f} to {high:+z.4f} (no interval)",
                   intervals.unknown(low).at_least(-0.001))


def _of_varying_start(exhibit, record):
    """The record of an exhibit with a varying start at the same preset, to set one with a fixed start against."""
    return get(f"intrinsic-privacy/{exhibit}").record(record.preset)


@finding("intrinsic-privacy/figures-8-9", "median epsilon of pairs larger than with a varying start")
def _larger_when_fixed(record):
    varying = _of_varying_start("figure-4", record)
    for name in record.config["tasks"] if varying else ():
        fixed, free = (_median(one, name, "analytic", "data_sets", one.values[f"{name}.analytic.median"])
                       for one in (record, varying))
        yield NAMES[name], f"{fixed:.2f} against {free:.2f}", (fixed - free).above(0)


@finding("intrinsic-privacy/figures-8-9", "largest gain smaller than with a varying start")
def _smaller_gains(record):
    varying = _of_varying_start("figure-5", record)
    for name in record.config["tasks"] if varying else ():
        fixed, free = (values[f"{prefix}{name}.classical.empirical.largest_gain"]
                       for prefix, values in (("utility.", record.values), ("", varying.values)))
        yield (NAMES[name], f"{fixed:.4f} against {free:.4f} (no interval)",
               intervals.unknown(fixed - free).below(0))
