"""Filters: what the worst strategy costs to compute, and a training step with a filter.

*Worst case* (`adaptive_delta`) and *calibration* (`calibrate_filter`, nothing kept): Boenisch et
al. on MNIST, 9,375 steps in blocks of a third of an epoch, and Yu et al. on CIFAR-10, 3,600 steps
of 4,096 in blocks of 36, with four and with ten levels and costs that are the squares of the norms,
in both directions. The step is that of a small CNN on 60,000 examples of which one in a hundred is
drawn: alone, with the exact filter, and with the Rényi filter; norms are not measured here (see the
benchmark of tracking). *clip_norms* is all that a filter adds to a step; over a step alone it is
the exact overhead, which the ratio of whole steps shows with the noise of a busy machine.

`cpu s` is processor time on one core. `peak MiB` is what the process's memory grows by at most, in
a process of its own.
"""

import sys
import time

import torch

from benchmarks._turns import peak_memory, print_peak_of, timings
from dpcompanion.filters import ExactFilter, RenyiFilter, adaptive_delta, calibration, play
from dpcompanion.training import DPSGDPlan, cross_entropy, train
from dpcompanion.training.models import mnist_cnn

SETTINGS = {
    "MNIST, 240 blocks of 39": (
        dict(sample_rate=512 / 60_000, noise_multiplier=3.425, epsilon=0.92, block=39),
        240,
    ),
    "CIFAR-10, 100 blocks of 36": (
        dict(sample_rate=4096 / 50_000, noise_multiplier=3.3, epsilon=7.0, block=36),
        100,
    ),
}
N, STEPS, NORM = 60_000, 20, 1.0


def game(name, count):
    """The arguments of `adaptive_delta` at a setting with so many levels."""
    run, blocks = SETTINGS[name]
    return dict(
        run,
        levels=tuple(i / count for i in range(1, count + 1)),
        budget=blocks * count**2,
        costs=tuple(i * i for i in range(1, count + 1)),
    )


def calibrated(name, count):
    """The largest budget at a setting for its epsilon and delta 1e-5, found anew."""
    run = game(name, count)
    return calibration._largest_budget.__wrapped__(
        run["epsilon"],
        1e-5,
        run["sample_rate"],
        run["noise_multiplier"],
        run["levels"],
        run["costs"],
        SETTINGS[name][1] * run["block"],
        run["block"],
        False,
    )[0]


class Filtering:
    """A tracker that clips to what a filter allows, by norms that it makes up."""

    def __init__(self, filter):
        self.filter = filter
        generator = torch.Generator().manual_seed(0)
        self.norms = torch.rand(N, generator=generator, dtype=torch.float64)

    def check_run(self, plan, model, loss, data):
        pass

    def before_step(self):
        return self.filter.clip_norms(self.norms)

    def after_step(self, indices, norms, *, clipped):
        pass

    def state_dict(self):
        return {}


def steps():
    """{way: (seconds, CPU seconds) of a step}."""
    plan = DPSGDPlan(
        n=N, sample_rate=0.01, steps=STEPS, max_grad_norm=NORM, noise_multiplier=1.0, delta=1e-5
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, 28, 28, generator=generator)
    y = torch.randint(10, (N,), generator=generator)
    run = dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=NORM)
    filters = {
        "alone": lambda: [],
        "exact filter": lambda: [
            Filtering(
                ExactFilter(
                    N,
                    **run,
                    levels=[0.25, 0.5, 0.75, 1.0],
                    costs=[1, 4, 9, 16],
                    budget=10**6,
                    steps=STEPS,
                    block=10,
                )
            )
        ],
        "Rényi filter": lambda: [
            Filtering(RenyiFilter.for_epsilon(N, **run, target_epsilons=8.0, target_delta=1e-5))
        ],
    }

    def block(trackers):
        def work():
            torch.manual_seed(0)
            model = mnist_cnn()
            train(
                model,
                cross_entropy,
                (x, y),
                plan,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                seed=0,
                trackers=trackers(),
                progress=False,
            )

        return lambda: work

    found = timings({way: block(trackers) for way, trackers in filters.items()}, 1, 3)
    return {way: (wall / STEPS, cpu / STEPS) for way, (wall, cpu) in found.items()}


def admission():
    """{way: CPU seconds of `clip_norms`, a step}: a block's worth of calls, beginning included."""
    run = dict(sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=NORM)
    norms = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = ExactFilter(
        N,
        **run,
        levels=[0.25, 0.5, 0.75, 1.0],
        costs=[1, 4, 9, 16],
        budget=10**6,
        steps=100,
        block=10,
    )
    renyi = RenyiFilter.for_epsilon(N, **run, target_epsilons=8.0, target_delta=1e-5)

    def block(filter):
        def work():
            for _ in range(10):
                filter.clip_norms(norms)

        return lambda: work

    found = timings({"exact filter": block(exact), "Rényi filter": block(renyi)}, 1, 20)
    return {way: cpu / 10 for way, (_, cpu) in found.items()}


def run():
    """The rows of the table."""
    rows = []
    for name in SETTINGS:
        for count in (4, 10):
            start, arguments = time.process_time(), game(name, count)
            games = play(**arguments, progress=False)
            rows.append(
                {
                    "what": f"worst case, {name}, {count} levels",
                    "cpu s": time.process_time() - start,
                    "peak MiB": peak_memory("benchmarks.filters", "worst case", name, str(count)),
                    "result": f"delta {max(g.delta for g in games):.2e}, "
                    f"grid adds at most {max(g.error for g in games):.0e} to epsilon",
                }
            )
        start = time.process_time()
        budget = calibrated(name, 4)
        rows.append(
            {
                "what": f"calibration, {name}, 4 levels",
                "cpu s": time.process_time() - start,
                "peak MiB": peak_memory("benchmarks.filters", "calibration", name, "4"),
                "result": f"budget {budget} of {game(name, 4)['budget']} "
                f"at epsilon {game(name, 4)['epsilon']}",
            }
        )
    found, added = steps(), admission()
    for way, (_, cpu) in found.items():
        rows.append(
            {
                "what": f"a training step, {way}",
                "cpu s": cpu,
                "peak MiB": None,
                "result": f"{cpu / found['alone'][1]:.3f} times one alone",
            }
        )
    for way, cpu in added.items():
        rows.append(
            {
                "what": f"clip_norms, {way}",
                "cpu s": cpu,
                "peak MiB": None,
                "result": f"{100 * cpu / found['alone'][1]:.2f}% of a step alone",
            }
        )
    return rows


if __name__ == "__main__":
    task, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print_peak_of(
        lambda: (
            adaptive_delta(**game(name, count), progress=False)
            if task == "worst case"
            else calibrated(name, count)
        )
    )
