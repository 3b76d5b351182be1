"""The pieces of a run, eight trials of DP-SGD, done one after another and by two workers: this package's own processes
(`--jobs 2`), and local clusters of Dask and Ray (`pip install 'dpcompanion[cluster]'`; left out where they are not
there).  Each trial is 2,500 steps of softmax regression on MNIST-5k, an eighth of the first row's seconds on one core.

`wall s` counts from the call to the last piece, with the start of the workers, each of which has to import torch. `CPU
s` is what all workers used, that start included. `efficiency` is the time of one process over twice that of two
workers, `CPU efficiency` the processor time of one process over that of all workers together: what is left of it is
lost to starting, pickling and waking, however busy the machine is with other things, which `wall s` and `efficiency`
suffer from. Ways take turns; medians of three rounds.
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time

PIECES, STEPS, WORKERS, ROUNDS = 8, 2500, 2, 3


def work(name):
    """One trial; (process, its processor time so far)."""
    import torch

    from dpcompanion import data
    from dpcompanion.training import cross_entropy, DPSGDPlan, models, train

    torch.set_num_threads(1)
    found = data.load("mnist-5k", split="train")
    x, y = found.features.flatten(1), found.labels
    model = models.linear(x.shape[1], 10, seed=0)
    plan = DPSGDPlan(n=len(y), sample_rate=0.1, steps=STEPS, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-5)
    train(model, cross_entropy, (x, y), plan, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
          seed=int(name[-1]), progress=False)
    return {"process": os.getpid(), "cpu": time.process_time()}


@contextlib.contextmanager
def dask():
    import joblib
    from distributed import Client, LocalCluster
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        with joblib.parallel_config("dask"):
            yield


@contextlib.contextmanager
def ray():
    import joblib
    import ray
    from ray.util.joblib import register_ray
    register_ray()
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with joblib.parallel_config("ray", n_jobs=WORKERS):
            yield
    finally:
        ray.shutdown()


def once(backend):
    """(wall seconds, processor seconds of all who worked) of all pieces."""
    from dpcompanion.reproduction import pieces

    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        with backend():
            done = pieces.resumable(work, [f"seed-{k}" for k in range(PIECES)], folder=folder, config={})
            wall = time.perf_counter() - wall
    used = {}
    for each in done.values():
        used[each["process"]] = max(each["cpu"], used.get(each["process"], 0))
    if os.getpid() in used:     # what it did before is no part of it
        used[os.getpid()] -= cpu
    return wall, sum(used.values())


def run():
    from dpcompanion.reproduction import workers

    ways = {"one after another": contextlib.nullcontext, f"--jobs {WORKERS}": lambda: workers.processes(WORKERS)}
    ways |= {name: backend for name, backend, package in (("Dask", dask, "distributed"), ("Ray", ray, "ray"))
             if importlib.util.find_spec(package)}
    seen = {way: [] for way in ways}
    work("warm-0")
    for _ in range(ROUNDS):
        for way, backend in ways.items():
            seen[way].append(once(backend))
    medians = {way: tuple(map(statistics.median, zip(*each))) for way, each in seen.items()}
    alone = medians["one after another"]
    return [{"way": way, "workers": 1 if way == "one after another" else WORKERS, "wall s": wall, "CPU s": cpu,
             "efficiency": None if way == "one after another" else alone[0] / (WORKERS * wall),
             "CPU efficiency": None if way == "one after another" else alone[1] / cpu}
            for way, (wall, cpu) in medians.items()]
