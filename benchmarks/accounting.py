"""Accounting for the sampled Gaussian mechanism beside Opacus and dp-accounting.

*RDP*: one step at 10,000 different noise multipliers (0.5 to 20, rate 0.01), at Opacus's own 151 default orders and at ours;
Opacus's `compute_rdp` is called once for each, of which a sample of 50 is timed and scaled.
*epsilon*: one epsilon by loss distributions, within 0.1%, at the reference point (rate 512/60000, noise 3.42529, 9,375 steps,
delta 1e-5); dp-accounting at its grid of 1e-4.
*calibration*: the noise multiplier that meets (1, 1e-5) at rate 1/118 and 9,440 steps; dp-accounting's `calibrate_dp_mechanism`
at the same grid, to a tolerance of 1e-4.

Ways take turns, and the medians are shown. `ratio` is the time over ours. `CPU ms` adds up all threads. `peak MiB` is what the process's memory
grows by at most, in a process of its own with two threads (of Opacus, for its sample).
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch

from dpcompanion import accounting

MANY, SAMPLE = 10_000, 50
REFERENCE = dict(sample_rate=512 / 60000, noise_multiplier=3.42529, steps=9375, delta=1e-5)


def noises(n):
    return torch.linspace(0.5, 20, n, dtype=torch.float64)


def our_rdp(orders):
    values = noises(MANY)
    return lambda: accounting.rdp_sampled_gaussian(sample_rate=0.01, noise_multiplier=values, orders=orders)


def opacus_rdp(orders):
    from opacus.accountants.analysis.rdp import compute_rdp

    values = noises(SAMPLE).tolist()
    return lambda: [compute_rdp(q=0.01, noise_multiplier=value, steps=1, orders=orders) for value in values]


def opacus_orders():
    from opacus.accountants import RDPAccountant

    return RDPAccountant.DEFAULT_ALPHAS


def peer_epsilon():
    from dp_accounting.pld import privacy_loss_distribution

    def block():
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            REFERENCE["noise_multiplier"], sampling_prob=REFERENCE["sample_rate"], value_discretization_interval=1e-4,
            use_connect_dots=True)
        return loss.self_compose(REFERENCE["steps"]).get_epsilon_for_delta(REFERENCE["delta"])

    return block


def our_calibration():
    return lambda: accounting.find_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=1 / 118, steps=9440)


def peer_calibration():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def event(noise):
        step = dp_accounting.PoissonSampledDpEvent(1 / 118, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(step, 9440)

    return lambda: dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-4), event, 1.0, 1e-5, tol=1e-4)


# task: {way: (what makes the block, by how much its time is scaled)}, ours first
WAYS = {
    "RDP, Opacus's orders": {"dpcompanion": (lambda: our_rdp(opacus_orders()), 1),
                             "Opacus, one by one": (lambda: opacus_rdp(opacus_orders()), MANY / SAMPLE)},
    "RDP, our orders": {"dpcompanion": (lambda: our_rdp(accounting.DEFAULT_ORDERS), 1),
                        "Opacus, one by one": (lambda: opacus_rdp(accounting.DEFAULT_ORDERS), MANY / SAMPLE)},
    "epsilon": {"dpcompanion": (lambda: lambda: accounting.compute_epsilon(**REFERENCE), 1), "dp-accounting": (peer_epsilon, 1)},
    "calibration": {"dpcompanion": (our_calibration, 1), "dp-accounting": (peer_calibration, 1)},
}


def timings(task, threads, rounds):
    """{way: (median seconds, median CPU seconds)}, in turns after one unmeasured round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        blocks = {way: make() for way, (make, _) in WAYS[task].items()}
        seen = {way: [] for way in blocks}
        for round in range(rounds + 1):
            for way, block in blocks.items():
                wall, cpu = time.perf_counter(), time.process_time()
                block()
                if round:
                    seen[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    finally:
        torch.set_num_threads(before)
    return {way: tuple(WAYS[task][way][1] * statistics.median(values) for values in zip(*pairs)) for way, pairs in seen.items()}


def peak_memory(task, way):
    """MiB by which the memory of a fresh process grows at most while the block runs; None off Linux."""
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.accounting", task, way], check=True,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    return json.loads(done.stdout)


def _own_memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def run():
    """The rows of the table."""
    import warnings

    warnings.simplefilter("ignore")
    rows = []
    for task, rounds in (("RDP, Opacus's orders", 3), ("RDP, our orders", 1), ("epsilon", 15), ("calibration", 3)):
        peaks = {way: peak_memory(task, way) for way in WAYS[task]}
        for threads in (1, 2):
            times = timings(task, threads, rounds)
            rows += [{"task": task, "way": way, "threads": threads, "ms": 1e3 * wall, "ratio": wall / times["dpcompanion"][0],
                      "CPU ms": 1e3 * cpu, "peak MiB": peaks[way] if threads == 2 else None}
                     for way, (wall, cpu) in times.items()]
    return rows


if __name__ == "__main__":
    block = WAYS[sys.argv[1]][sys.argv[2]][0]()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = _own_memory("VmRSS")
    block()
    print(json.dumps(_own_memory("VmHWM") - start))
