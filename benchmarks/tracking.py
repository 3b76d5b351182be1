r"""What it costs to follow everybody's gradient norms.

A *pass* measures the norms of all examples, as `NormTracker` does K times an epoch; it stands
beside the plain forward and backward pass over the same examples, in chunks of 512, that SGD makes.
A *step* is one of DP-SGD with an expected batch of 512 out of 60,000 random images; beside it what
a tracker adds to it between passes: with norms that hold for many steps, and with running
estimates, which change for the batch at every step.

Each time is the least of several repetitions of processor time, on one thread.
"""

import time

import torch

from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import DPSGDPlan, NormTracker, cross_entropy, models, train

N = 60_000
CASES = {
    "linear, 28 x 28": (
        lambda: torch.nn.Sequential(torch.nn.Flatten(), models.linear(784, 10)),
        (1, 28, 28),
        8192,
    ),
    "mnist_cnn, 28 x 28": (models.mnist_cnn, (1, 28, 28), 2048),
    "resnet20, 32 x 32": (models.resnet20, (3, 32, 32), 256),
}


def least(work, repetitions=3):
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def plan_of(n, rate, steps):
    return DPSGDPlan(
        n=n, sample_rate=rate, steps=steps, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )


def passes(build, shape, n):
    """Seconds of a plain pass and of a norm pass over n images."""
    x, y = torch.randn(n, *shape), torch.randint(10, (n,))
    model = build()

    def plain():
        for start in range(0, n, 512):
            model.zero_grad()
            cross_entropy(model(x[start : start + 512]), y[start : start + 512]).mean().backward()

    tracker = NormTracker.for_plan(plan_of(n, 0.1, 1), model, cross_entropy, (x, y))
    tracker.before_step()
    return least(plain), least(tracker._measure)


def steps(build, shape, count=3):
    """Seconds of a step, and what a tracker adds: with norms that hold, and running estimates."""
    x, y = torch.randn(1, *shape).expand(N, *shape), torch.randint(10, (N,))
    plan = plan_of(N, 512 / N, count)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = (
        least(lambda: train(model, cross_entropy, (x, y), plan, optimizer=optimizer, seed=0), 1)
        / count
    )
    added = []
    batches = [(torch.randperm(N)[:512], torch.rand(512)) for _ in range(100)]
    for running in (False, True):
        accountant = IndividualAccountant.for_plan(plan)
        tracker = NormTracker(
            accountant,
            model,
            cross_entropy,
            (x, y),
            steps_per_epoch=10**6,
            running=running,
            updates_per_epoch=0 if running else 1e-6,
        )
        tracker._due = lambda: False  # the passes are timed above

        def work(tracker=tracker):
            for batch in batches:
                tracker.before_step()
                tracker.after_step(*batch)
            return tracker.accountant

        added.append(least(work) / 100)
    return alone, *added


def run():
    """The rows of the table."""
    rows, before = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (build, shape, n) in CASES.items():
            plain, norms = passes(build, shape, n)
            step, held, running = steps(build, shape)
            rows.append(
                {
                    "model": name,
                    "plain pass, us an example": 1e6 * plain / n,
                    "norm pass, us an example": 1e6 * norms / n,
                    "times": norms / plain,
                    "step, ms": 1e3 * step,
                    "accounts add, %": 100 * held / step,
                    "running estimates add, %": 100 * running / step,
                }
            )
    finally:
        torch.set_num_threads(before)
    return rows
