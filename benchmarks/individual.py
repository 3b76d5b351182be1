"""Accounts of 50,000 examples that change their gradient norm 200 times (1e7 norms),
and of 60,000 histories by loss distributions.

Yu et al. 2023 (table 1) report 26,000 s on five cores for the exact account, and 3 s with norms
rounded to 100 values. The plain way computes the divergence of every norm at every order; its time
is that of 20,000 norms, scaled up. The peer of the loss distributions is dp-accounting at a grid of
1e-4, composing one history at a time; its time is that of 20 histories, scaled up. `cpu s` is
processor time, `peak MiB` what the memory of the process reached.
"""

import resource
import time

import torch

from dpcompanion.accounting import DEFAULT_ORDERS, rdp_sampled_gaussian
from dpcompanion.individual import IndividualAccountant

RUN = dict(sample_rate=4096 / 50_000, noise_multiplier=3.3, max_grad_norm=1.0)
MNIST = dict(sample_rate=512 / 60_000, noise_multiplier=3.42529, max_grad_norm=1.0)


def norms_of(n, updates):
    """Norms that differ between examples and change over time."""
    generator = torch.Generator().manual_seed(0)
    level = torch.rand(n, generator=generator, dtype=torch.float64) ** 2
    for _ in range(updates):
        yield level * torch.exp(0.4 * torch.randn(n, generator=generator, dtype=torch.float64))


def accounts(n, updates, steps, run, **mode):
    accountant = IndividualAccountant(n, **run, **mode)
    for norms in norms_of(n, updates):
        accountant.record(norms, steps=steps)
    return accountant, accountant.epsilon(1e-5)


def plainly(count):
    """The divergences of `count` norms, each computed for itself."""
    norms = next(norms_of(count, 1)).clamp(1e-3, 1)
    rdp_sampled_gaussian(
        sample_rate=RUN["sample_rate"],
        noise_multiplier=RUN["noise_multiplier"] / norms,
        orders=DEFAULT_ORDERS,
    )


def one_by_one(accountant, count):
    """dp-accounting's composition of the first `count` histories."""
    from dp_accounting.pld import privacy_loss_distribution

    noises = (accountant.noise_multiplier / accountant.levels).tolist()
    steps = {}
    for row in accountant._counts[:count].tolist():
        composed = None
        for noise, times in zip(noises, row):
            if times:
                if noise not in steps:
                    steps[noise] = privacy_loss_distribution.from_gaussian_mechanism(
                        noise, sampling_prob=accountant.sample_rate
                    )
                part = steps[noise].self_compose(times)
                composed = part if composed is None else composed.compose(part)
        composed.get_epsilon_for_delta(1e-5)


def timed(label, threads, work, scale=1.0):
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "account": label,
        "threads": threads,
        "s": wall * scale,
        "cpu s": cpu * scale,
        "times faster": None,
        "peak MiB": peak,
    }
    return row, result


def run():
    """The rows of the table."""
    rows, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rounded, _ = timed(
                "RDP, rounded to 100 levels", threads, lambda: accounts(50_000, 200, 1, RUN)
            )
            exact, _ = timed(
                "RDP, every norm", threads, lambda: accounts(50_000, 200, 1, RUN, rounding=None)
            )
            plain, _ = timed(
                "RDP, every norm, plainly", threads, lambda: plainly(20_000), 1e7 / 20_000
            )
            pld, (accountant, _) = timed(
                "PLD, rounded", threads, lambda: accounts(60_000, 40, 234, MNIST, accountant="pld")
            )
            peer, _ = timed(
                "PLD, dp-accounting", threads, lambda: one_by_one(accountant, 20), 60_000 / 20
            )
            for ours, other in ((exact, plain), (pld, peer)):
                ours["times faster"] = other["s"] / ours["s"]
            rows += [rounded, exact, plain, pld, peer]
    finally:
        torch.set_num_threads(before)
    return rows
