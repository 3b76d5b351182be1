"""The pieces of a run, four trials of DP-SGD, done one after another and by two workers: this
package's own processes (`--jobs 2`), and local clusters of Dask and Ray (`pip install
'dpcompanion[cluster]'`; left out where they are not there). Each trial is 400 steps of softmax
regression on MNIST-5k.

What is lost to a cluster does not depend on how long pieces are: the processor time that a worker
takes besides its pieces, which is that of importing torch, of being told and of writing. `CPU s a
piece` is the median of a piece's own, `CPU s besides` what each worker used beyond its pieces, and
`efficiency at a minute` what that would leave of two workers' time for eight pieces of a minute
each, computed: 480 s over 480 s and what is besides. Times are processor times; a piece of the same
work takes more of it on a busy machine, whose other work takes the caches.
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time

PIECES, STEPS, WORKERS = 4, 400, 2


def work(name):
    """One trial; the process, the processor time of the trial, and of the process so far."""
    started = time.process_time()
    import torch

    from dpcompanion import data
    from dpcompanion.training import DPSGDPlan, cross_entropy, models, train

    torch.set_num_threads(1)
    found = data.load("mnist-5k", split="train")
    x, y = found.features.flatten(1), found.labels
    model, trial = models.linear(x.shape[1], 10, seed=0), time.process_time()
    plan = DPSGDPlan(
        n=len(y), sample_rate=0.1, steps=STEPS, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-5
    )
    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        seed=int(name[-1]),
        progress=False,
    )
    return {
        "process": os.getpid(),
        "own": time.process_time() - trial,
        "all": time.process_time(),
        "before": started,
    }


@contextlib.contextmanager
def dask():
    import joblib
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        with joblib.parallel_config("dask"):
            yield


@contextlib.contextmanager
def ray():
    import joblib
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    ray.init(
        num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        with joblib.parallel_config("ray", n_jobs=WORKERS):
            yield
    finally:
        ray.shutdown()


def once(backend):
    """(median processor seconds of a piece, what each worker used besides)."""
    from dpcompanion.reproduction import pieces

    with tempfile.TemporaryDirectory() as folder, backend():
        done = pieces.resumable(
            work, [f"seed-{k}" for k in range(PIECES)], folder=folder, config={}
        ).values()
    besides = []
    for process in {each["process"] for each in done}:
        own = [each for each in done if each["process"] == process]
        # What this process did before is no part of it.
        before = min(each["before"] for each in own) if process == os.getpid() else 0
        besides.append(max(each["all"] for each in own) - before - sum(each["own"] for each in own))
    return statistics.median(each["own"] for each in done), statistics.mean(besides)


def run():
    from dpcompanion.reproduction import workers

    ways = {
        "one after another": contextlib.nullcontext,
        f"--jobs {WORKERS}": lambda: workers.processes(WORKERS),
    }
    ways |= {
        name: backend
        for name, backend, package in (("Dask", dask, "distributed"), ("Ray", ray, "ray"))
        if importlib.util.find_spec(package)
    }
    work("warm-0")
    rows = []
    for way, backend in ways.items():
        piece, besides = once(backend)
        count = 1 if way == "one after another" else WORKERS
        left = 8 * 60 / (8 * 60 + count * besides)
        rows.append(
            {
                "way": way,
                "workers": count,
                "CPU s a piece": piece,
                "CPU s besides": besides,
                "efficiency at a minute": left if count > 1 else None,
            }
        )
    return rows
