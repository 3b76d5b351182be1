"""Accounting for the sampled Gaussian mechanism beside Opacus and dp-accounting.

*RDP*: one step at 10,000 different noise multipliers (0.5 to 20, rate 0.01), at Opacus's own 151
default orders and at ours; Opacus's `compute_rdp` is called once for each, of which a sample of 50
is timed and scaled. *epsilon*: one epsilon by loss distributions, within 0.1%, at the reference
point (rate 512/60000, noise 3.42529, 9,375 steps, delta 1e-5); dp-accounting at its grid of 1e-4.
*calibration*: the noise multiplier that meets (1, 1e-5) at rate 1/118 and 9,440 steps;
dp-accounting's `calibrate_dp_mechanism` at the same grid, to a tolerance of 1e-4.

Ways take turns, and the medians are shown. `ratio` is the time over ours. `CPU ms` adds up all
threads. `peak MiB` is what the process's memory grows by at most, in a process of its own with two
threads (of Opacus, for its sample).
"""

import sys

import torch

from benchmarks._turns import peak_memory, print_peak_of, timings
from dpcompanion import accounting

MANY, SAMPLE = 10_000, 50
REFERENCE = dict(sample_rate=512 / 60000, noise_multiplier=3.42529, steps=9375, delta=1e-5)


def noises(n):
    return torch.linspace(0.5, 20, n, dtype=torch.float64)


def our_rdp(orders):
    values = noises(MANY)
    return lambda: accounting.rdp_sampled_gaussian(
        sample_rate=0.01, noise_multiplier=values, orders=orders
    )


def opacus_rdp(orders):
    from opacus.accountants.analysis.rdp import compute_rdp

    values = noises(SAMPLE).tolist()
    return lambda: [
        compute_rdp(q=0.01, noise_multiplier=value, steps=1, orders=orders) for value in values
    ]


def opacus_orders():
    from opacus.accountants import RDPAccountant

    return RDPAccountant.DEFAULT_ALPHAS


def peer_epsilon():
    from dp_accounting.pld import privacy_loss_distribution

    def block():
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            REFERENCE["noise_multiplier"],
            sampling_prob=REFERENCE["sample_rate"],
            value_discretization_interval=1e-4,
            use_connect_dots=True,
        )
        return loss.self_compose(REFERENCE["steps"]).get_epsilon_for_delta(REFERENCE["delta"])

    return block


def our_calibration():
    return lambda: accounting.find_noise_multiplier(
        target_epsilon=1.0, target_delta=1e-5, sample_rate=1 / 118, steps=9440
    )


def peer_calibration():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def event(noise):
        step = dp_accounting.PoissonSampledDpEvent(1 / 118, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(step, 9440)

    return lambda: dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-4), event, 1.0, 1e-5, tol=1e-4
    )


# task: {way: (what makes the block, by how much its time is scaled)}, ours first
WAYS = {
    "RDP, Opacus's orders": {
        "dpcompanion": (lambda: our_rdp(opacus_orders()), 1),
        "Opacus, one by one": (lambda: opacus_rdp(opacus_orders()), MANY / SAMPLE),
    },
    "RDP, our orders": {
        "dpcompanion": (lambda: our_rdp(accounting.DEFAULT_ORDERS), 1),
        "Opacus, one by one": (lambda: opacus_rdp(accounting.DEFAULT_ORDERS), MANY / SAMPLE),
    },
    "epsilon": {
        "dpcompanion": (lambda: lambda: accounting.compute_epsilon(**REFERENCE), 1),
        "dp-accounting": (peer_epsilon, 1),
    },
    "calibration": {"dpcompanion": (our_calibration, 1), "dp-accounting": (peer_calibration, 1)},
}


def run():
    """The rows of the table."""
    import warnings

    warnings.simplefilter("ignore")
    rows = []
    for task, rounds in (
        ("RDP, Opacus's orders", 3),
        ("RDP, our orders", 1),
        ("epsilon", 15),
        ("calibration", 3),
    ):
        peaks = {way: peak_memory("benchmarks.accounting", task, way) for way in WAYS[task]}
        for threads in (1, 2):
            times = timings({way: make for way, (make, _) in WAYS[task].items()}, threads, rounds)
            times = {
                way: (WAYS[task][way][1] * wall, WAYS[task][way][1] * cpu)
                for way, (wall, cpu) in times.items()
            }
            rows += [
                {
                    "task": task,
                    "way": way,
                    "threads": threads,
                    "ms": 1e3 * wall,
                    "ratio": wall / times["dpcompanion"][0],
                    "CPU ms": 1e3 * cpu,
                    "peak MiB": peaks[way] if threads == 2 else None,
                }
                for way, (wall, cpu) in times.items()
            ]
    return rows


if __name__ == "__main__":
    print_peak_of(WAYS[sys.argv[1]][sys.argv[2]][0]())
