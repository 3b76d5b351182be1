"""DP-SGD on the MNIST CNN (26,010 parameters, float32), on random data.

*Step*: clip, add noise and update, on a batch of 512, against an SGD step of plain PyTorch and the
modes of Opacus; the time is that of a step in a block of steps, ours through `train` with all it
does. *Norms*: the gradient norms of 10,000 examples, in passes of 512 for everyone.

Ways take turns, block by block, and the medians are shown, so that a busy moment hits all alike.
`ratio` is the time over that of plain SGD (steps), or over ours (norms). `CPU ms` adds up all
threads. `peak MiB` is what the process's memory grows by at most, in a process of its own, with two
threads.
"""

import sys

import torch
from torch import nn

from benchmarks._turns import peak_memory, print_peak_of, timings
from dpcompanion.training import DPSGDPlan, cross_entropy, gradient_norms, models, train

BATCH, EXAMPLES, STEPS = 512, 10_000, 4


def images(n):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 28, 28, generator=generator), torch.randint(
        10, (n,), generator=generator
    )


def _steps(step):
    def block():
        for _ in range(STEPS):
            step()

    return block


def plain_step():
    model, (x, y) = models.mnist_cnn(), images(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return _steps(step)


def our_step(method="auto"):
    model, data = models.mnist_cnn(), images(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = DPSGDPlan(
        n=BATCH, sample_rate=1.0, steps=STEPS, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )
    return lambda: train(
        model, cross_entropy, data, plan, optimizer=optimizer, seed=0, method=method, progress=False
    )


def opacus_step(mode):
    from opacus import PrivacyEngine

    model, (x, y) = models.mnist_cnn(), images(BATCH)
    model, optimizer, *rest = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=BATCH
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    loss = rest[0] if mode == "ghost" else nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return _steps(step)


def our_norms(method="auto"):
    model, (x, y) = models.mnist_cnn(), images(EXAMPLES)
    return lambda: gradient_norms(model, cross_entropy, x, y, method=method, microbatch_size=BATCH)


def opacus_norms(mode):
    from opacus import grad_sample

    model, (x, y) = models.mnist_cnn(), images(EXAMPLES)
    if mode == "ghost":
        model = grad_sample.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    elif mode == "ew":
        model = grad_sample.GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        model = grad_sample.GradSampleModule(
            model, loss_reduction="sum", force_functorch=mode == "functorch"
        )

    def norms():
        found = []
        for i in range(0, EXAMPLES, BATCH):
            nn.functional.cross_entropy(
                model(x[i : i + BATCH]), y[i : i + BATCH], reduction="sum"
            ).backward()
            if mode == "ghost":
                found.append(model.get_norm_sample().detach())
            else:
                samples = [p.grad_sample for p in model.parameters()]
                found.append(torch.stack([g.flatten(1).norm(dim=1) for g in samples]).norm(dim=0))
            for p in model.parameters():
                p.grad = p.grad_sample = None
        return torch.cat(found)

    return norms


MODES = ("hooks", "functorch", "ew", "ghost")
WAYS = {
    "step": {
        "plain SGD": plain_step,
        "dpcompanion": our_step,
        "dpcompanion, torch.func": lambda: our_step("func"),
        **{f"Opacus {mode}": lambda mode=mode: opacus_step(mode) for mode in MODES},
    },
    "norms": {
        "dpcompanion": our_norms,
        "dpcompanion, torch.func": lambda: our_norms("func"),
        **{f"Opacus {mode}": lambda mode=mode: opacus_norms(mode) for mode in MODES},
    },
}


def run():
    """The rows of the table."""
    import warnings

    warnings.simplefilter("ignore")
    rows = []
    for task, base, rounds in (("step", "plain SGD", 7), ("norms", "dpcompanion", 3)):
        peaks = {way: peak_memory("benchmarks.training", task, way) for way in WAYS[task]}
        scale = STEPS if task == "step" else 1
        for threads in (1, 2):
            times = {
                way: (wall / scale, cpu / scale)
                for way, (wall, cpu) in timings(WAYS[task], threads, rounds).items()
            }
            rows += [
                {
                    "task": task,
                    "way": way,
                    "threads": threads,
                    "ms": 1e3 * wall,
                    "ratio": wall / times[base][0],
                    "CPU ms": 1e3 * cpu,
                    "peak MiB": peaks[way] if threads == 2 else None,
                }
                for way, (wall, cpu) in times.items()
            ]
    return rows


if __name__ == "__main__":
    print_peak_of(WAYS[sys.argv[1]][sys.argv[2]]())
