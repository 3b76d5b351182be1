"""Runs of DP-SGD side by side (`train_ensemble`) and one after the other (`train`).

*CNN*: ten trials of the MNIST CNN (26,010 parameters, float32), expected batches of 512 out of
60,000. *softmax*: a hundred logistic regressions on 14 x 14 pixels (1,970 parameters, float64),
expected batches of 200 out of 4,000. *char RNN*: four runs of the LSTM on names of 20 bytes
(382,418 parameters), expected batches of 64 out of 1,000. Data are random; the time is that of one
step of one run, with draws, noise and update, in blocks of several runs and steps.

With two threads `train` uses them within an operation and `train_ensemble` gives each some of the
runs. `faster` is the time of one after the other, with as many threads, over that of side by side.
On a GPU, if there is one, the same.
"""

import torch

from benchmarks._turns import timings
from dpcompanion.training import DPSGDPlan, cross_entropy, models, train, train_ensemble


def _problem(shape, n, batch, steps, dtype=torch.float32, classes=10):
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randint(1, 259, shape, generator=generator)
        if dtype is None
        else torch.randn(shape, generator=generator, dtype=dtype)
    )
    plan = DPSGDPlan(
        n=n, sample_rate=batch / n, steps=steps, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )
    return (x, torch.randint(classes, (n,), generator=generator)), plan


# task: (model of a seed, runs side by side, runs one after the other that stand for them, data and
# plan)
TASKS = {
    "CNN": (models.mnist_cnn, 10, 2, lambda: _problem((60_000, 1, 28, 28), 60_000, 512, 12)),
    "softmax": (
        lambda seed: models.linear(196, 10, seed=seed).double(),
        100,
        5,
        lambda: _problem((4000, 196), 4000, 200, 20, torch.float64),
    ),
    "char RNN": (models.char_rnn, 4, 1, lambda: _problem((1000, 20), 1000, 64, 8, None, 18)),
}


def one_after_the_other(task, device):
    build, _, runs, problem = TASKS[task]
    data, plan = problem()

    def block():
        for seed in range(runs):
            model = build(seed=seed)
            train(
                model,
                cross_entropy,
                data,
                plan,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                seed=seed,
                device=device,
                generator_device=device,
                progress=False,
            )

    return block


def side_by_side(task, device):
    build, runs, _, problem = TASKS[task]
    data, plan = problem()
    return lambda: train_ensemble(
        [build(seed=seed) for seed in range(runs)],
        cross_entropy,
        data,
        plan,
        seeds=range(runs),
        learning_rate=0.1,
        device=device,
        generator_device=device,
        progress=False,
    )


def run():
    """The rows of the table."""
    rows, gpu = [], torch.cuda.is_available()
    for device, threads in [("cpu", 1), ("cpu", 2)] + [("cuda", 1)] * gpu:
        for task, (_, runs, stand_ins, problem) in TASKS.items():
            steps = problem()[1].steps
            found = timings(
                {
                    way.__name__: lambda way=way: way(task, device)
                    for way in (one_after_the_other, side_by_side)
                },
                threads,
                3,
            )
            before = found["one_after_the_other"][0] / stand_ins
            for way, count in (("one_after_the_other", stand_ins), ("side_by_side", runs)):
                wall, cpu = (value / count / steps for value in found[way])
                rows.append(
                    {
                        "task": task,
                        "device": device,
                        "way": way.replace("_", " "),
                        "runs": runs,
                        "threads": threads,
                        "ms": 1e3 * wall,
                        "CPU ms": 1e3 * cpu,
                        "faster": before / steps / wall if way == "side_by_side" else None,
                    }
                )
    return rows
