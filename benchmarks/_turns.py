"""Timing ways of doing the same thing: they take turns, so that a busy moment hits all alike, and
medians are shown.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch


def timings(makers, threads, rounds):
    """{way: (median seconds, median CPU seconds)} of the blocks that `makers`, {way: function},
    make; the first round is not counted.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        blocks = {way: make() for way, make in makers.items()}
        seen = {way: [] for way in blocks}
        for turn in range(rounds + 1):
            for way, block in blocks.items():
                wall, cpu = time.perf_counter(), time.process_time()
                block()
                if turn:
                    seen[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    finally:
        torch.set_num_threads(before)
    return {
        way: tuple(statistics.median(values) for values in zip(*pairs))
        for way, pairs in seen.items()
    }


def peak_memory(module, *which):
    """MiB by which the memory of a fresh process, `python -m module which`, grows at most while its
    block runs; None off Linux. Such a process ends with `print_peak_of(block)`.
    """
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *which],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    return json.loads(done.stdout)


def print_peak_of(block):
    """Print by how many MiB this process's memory grows at most while the block runs."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    start = _own_memory("VmRSS")
    block()
    print(json.dumps(_own_memory("VmHWM") - start))


def _own_memory(field):
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))
