"""SGD on every (neighbouring data set, seed), side by side, on random data of the sizes of Hyland
and Tople 2020.

*MNIST-binary*: all 2 x 99 seeds x 50 data sets = 9,900 runs (the paper has 9,799) of 1,850 batches
of 32, 51 parameters, by `train_grid` and by a plain PyTorch loop, whose time is that of three runs,
scaled up. *All three*: the 51,916 runs of the three convex tasks (the paper has 51,617), whose time
is that of a share of the seeds, scaled up. `runs/s` counts whole runs, `times the loop` compares
them. `peak MiB` is what the memory of a process of its own grows by at most.
"""

import sys
import time

import torch
from torch import nn

from benchmarks._turns import peak_memory, print_peak_of
from dpcompanion.output_perturbation.grids import epoch_orders, initial_weights, train_grid

# Examples, features, batch size, learning rate, batches, data sets, seeds, and the share of the
# seeds that is timed.
TASKS = {
    "MNIST-binary": (10397, 50, 32, 0.1, 1850, 50, 99, 1.0),
    "Forest": (378783, 49, 50, 1.0, 8400, 64, 127, 0.2),
    "Adult": (29305, 100, 32, 0.5, 3400, 80, 161, 0.2),
}


def problem(examples, size, dtype):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(examples, size, generator=generator, dtype=dtype)
    return features / features.norm(dim=1, keepdim=True), torch.randint(
        2, (examples,), generator=generator
    )


def grid(task, dtype, share=1.0):
    """Seconds for both initializations of a task, scaled up from a share of the seeds."""
    examples, size, batch_size, learning_rate, steps, data_sets, seeds, own_share = TASKS[task]
    features, labels = problem(examples, size, dtype)
    count = max(2, round(seeds * own_share * share))
    started = time.perf_counter()
    for initialization in ("varying", "fixed"):
        train_grid(
            features,
            labels,
            data_sets=range(1, data_sets + 1),
            seeds=range(count),
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            initialization=initialization,
            enforce_conditions=False,  # which would compute all in float64
            progress=False,
        )
    return (time.perf_counter() - started) * seeds / count


def plain_loop(task, dtype, runs=3):
    """Seconds for all runs of a task, one by one, scaled up from a few."""
    examples, size, batch_size, learning_rate, steps, data_sets, seeds, _ = TASKS[task]
    features, labels = problem(examples, size, dtype)
    started = time.perf_counter()
    for seed in range(runs):
        model = nn.Linear(size, 1, dtype=dtype)
        with torch.no_grad():
            start = initial_weights(size, seed).to(dtype)
            model.weight.copy_(start[None, :-1])
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        x, y = features[1:], labels[1:].to(dtype)
        epochs = -(-steps // -(-(examples - 1) // batch_size))
        batches = [
            batch
            for order in epoch_orders(examples - 1, seed, epochs, features=size)
            for batch in (order - 1).split(batch_size)
        ]
        for batch in batches[:steps]:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(
                model(x[batch]).squeeze(1), y[batch]
            ).backward()
            optimizer.step()
    return (time.perf_counter() - started) * 2 * seeds * data_sets / runs


def _runs(tasks):
    return sum(2 * TASKS[task][6] * TASKS[task][5] for task in tasks)


def _peak(task, dtype):
    """`peak_memory` while a part of a task's grid is trained."""
    return peak_memory("benchmarks.output_perturbation", task, str(dtype).removeprefix("torch."))


def run():
    """The rows of the table."""
    rows, before = [], torch.get_num_threads()
    # the first pass of a process pays for what it sets up
    plain_loop("MNIST-binary", torch.float32, runs=1)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.float64):
                kind = f"{str(dtype).removeprefix('torch.')}, {threads} thread{'s' * (threads > 1)}"
                loop = plain_loop("MNIST-binary", dtype)
                rate = _runs(["MNIST-binary"]) / loop
                times = {"MNIST-binary": grid("MNIST-binary", dtype)}
                rows += [
                    {
                        "task": "MNIST-binary",
                        "way": f"plain loop, {kind}",
                        "s": loop,
                        "runs/s": rate,
                        "times the loop": 1.0,
                        "peak MiB": None,
                    },
                    {
                        "task": "MNIST-binary",
                        "way": f"train_grid, {kind}",
                        "s": times["MNIST-binary"],
                        "runs/s": _runs(["MNIST-binary"]) / times["MNIST-binary"],
                        "times the loop": loop / times["MNIST-binary"],
                        "peak MiB": _peak("MNIST-binary", dtype) if threads == 2 else None,
                    },
                ]
                if dtype == torch.float64:
                    total = sum(times.get(task) or grid(task, dtype) for task in TASKS)
                    rows.append(
                        {
                            "task": "all three",
                            "way": f"train_grid, {kind}",
                            "s": total,
                            "runs/s": _runs(TASKS) / total,
                            "times the loop": None,
                            "peak MiB": max(_peak(task, dtype) for task in TASKS)
                            if threads == 2
                            else None,
                        }
                    )
    finally:
        torch.set_num_threads(before)
    return rows


if __name__ == "__main__":
    task, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    print_peak_of(lambda: grid(task, dtype, share=1.0 if task == "MNIST-binary" else 0.25))
