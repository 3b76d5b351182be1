"""Filters: what the worst strategy costs to compute, and a training step with a filter.

The games are those of Boenisch et al. on MNIST (9,375 steps in blocks of a third of an epoch) and of Yu et al. on
CIFAR-10 (3,600 steps of 4,096 in blocks of 36), with four and with ten levels and costs that are the squares of the
norms, in both directions.  The steps are those of a small CNN on 60,000 examples of which one in a hundred is drawn:
alone, with the exact filter, and with the Renyi filter; norms are not measured here (see the benchmark of tracking).
`cpu s` is processor time on one core.
"""

import time

import torch

from benchmarks._turns import timings
from dpcompanion.filters import ExactFilter, RenyiFilter, play
from dpcompanion.training import DPSGDPlan, cross_entropy, train
from dpcompanion.training.models import mnist_cnn

GAMES = {
    "MNIST, 240 blocks of 39": (dict(sample_rate=512 / 60_000, noise_multiplier=3.425, epsilon=0.92, block=39), 240),
    "CIFAR-10, 100 blocks of 36": (dict(sample_rate=4096 / 50_000, noise_multiplier=3.3, epsilon=7.0, block=36), 100)}
N, STEPS, NORM = 60_000, 20, 1.0


class Filtering:
    """A tracker that clips to what a filter allows, by norms that it makes up."""

    def __init__(self, filter):
        self.filter = filter
        generator = torch.Generator().manual_seed(0)
        self.norms = torch.rand(N, generator=generator, dtype=torch.float64)

    def check_plan(self, plan):
        pass

    def before_step(self):
        return self.filter.clip_norms(self.norms)

    def after_step(self, indices, norms):
        pass

    def state_dict(self):
        return {}


def steps():
    """{way: (seconds, CPU seconds) of a step}."""
    plan = DPSGDPlan(n=N, sample_rate=0.01, steps=STEPS, max_grad_norm=NORM, noise_multiplier=1.0, delta=1e-5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, 28, 28, generator=generator)
    y = torch.randint(10, (N,), generator=generator)
    run = dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=NORM)
    filters = {
        "alone": lambda: [],
        "exact filter": lambda: [Filtering(ExactFilter(N, **run, levels=[0.25, 0.5, 0.75, 1.0], costs=[1, 4, 9, 16],
                                                       budget=10**6, steps=STEPS, block=10))],
        "Renyi filter": lambda: [Filtering(RenyiFilter.for_epsilon(N, **run, target_epsilons=8.0, target_delta=1e-5))]}

    def block(trackers):
        def work():
            torch.manual_seed(0)
            model = mnist_cnn()
            train(model, cross_entropy, (x, y), plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seed=0,
                  trackers=trackers(), progress=False)
        return lambda: work

    found = timings({way: block(trackers) for way, trackers in filters.items()}, 1, 3)
    return {way: (wall / STEPS, cpu / STEPS) for way, (wall, cpu) in found.items()}


def run():
    """The rows of the table."""
    rows = []
    for name, (game, blocks) in GAMES.items():
        for count in (4, 10):
            start = time.process_time()
            games = play(**game, levels=[i / count for i in range(1, count + 1)],
                         costs=[i * i for i in range(1, count + 1)], budget=blocks * count**2, progress=False)
            rows.append({"what": f"worst case, {name}, {count} levels", "cpu s": time.process_time() - start,
                         "result": f"delta {max(g.delta for g in games):.2e}, "
                                   f"grid adds at most {max(g.error for g in games):.0e} to epsilon"})
    found = steps()
    for way, (wall, cpu) in found.items():
        rows.append({"what": f"a training step, {way}", "cpu s": cpu,
                     "result": f"{cpu / found['alone'][1]:.3f} times one alone"})
    return rows
