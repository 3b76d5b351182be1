"""What it costs that nobody can predict the noise: a step of `train`, and normals a second.

*Step*: of `train` on random data, with draws and noise from the cipher, on a grid, as it has them,
and with both from PyTorch's generator (Mersenne Twister, float64, no grid) put in its place.
*Normals*: float64, of the cipher (exact, rounded to a grid) and of `torch.randn`; with two threads
each has a stream of its own.

Ways take turns, block by block, and the medians are shown. `ratio` is CPU time over that with
PyTorch's generator.
"""

import concurrent.futures
from contextlib import nullcontext
from unittest import mock

import torch

from benchmarks._turns import timings
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.training import DPSGDPlan, cross_entropy, models, train

# Network: its maker, the shape of an input, how many examples there are, how many of them in a
# step, steps of a block.
NETWORKS = {
    "MNIST CNN, batches of 512": (models.mnist_cnn, (1, 28, 28), 60_000, 512, 4),
    "ResNet-20, batches of 128": (models.resnet20, (3, 32, 32), 50_000, 128, 1),
}
NORMALS, ROUNDS = 2**21, 7


def of_pytorch(seed, device="cpu"):
    """What `train` would draw from if it had no cipher."""
    return {
        name: torch.Generator().manual_seed(number)
        for number, name in enumerate(("sampling", "noise"))
    }


def steps(name):
    """{way: (seconds, CPU seconds) of a step}."""
    build, shape, n, batch, count = NETWORKS[name]
    # A thousand different images, again and again.
    x = torch.randn(1000, *shape, generator=torch.Generator().manual_seed(0)).repeat(
        n // 1000, *[1] * len(shape)
    )
    y = torch.arange(n) % 10
    plan = DPSGDPlan(
        n=n, sample_rate=batch / n, steps=count, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )

    def block(generators):
        def work():
            model = build()
            with (
                mock.patch("dpcompanion.mechanism.noise.generators", generators)
                if generators
                else nullcontext()
            ):
                train(
                    model,
                    cross_entropy,
                    (x, y),
                    plan,
                    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                    progress=False,
                )

        return lambda: work

    found = timings({"PyTorch's generator": block(of_pytorch), "cipher": block(None)}, 1, ROUNDS)
    return {way: (wall / count, cpu / count) for way, (wall, cpu) in found.items()}


def normals():
    """{way: (seconds, CPU seconds) of `NORMALS` numbers}."""
    generator, streams = torch.Generator().manual_seed(0), [SecureStream(), SecureStream()]
    pool = concurrent.futures.ThreadPoolExecutor(2)
    return timings(
        {
            "torch.randn": lambda: (
                lambda: torch.randn(NORMALS, dtype=torch.float64, generator=generator)
            ),
            "cipher": lambda: lambda: streams[0].normal((NORMALS,), 1.0),
            "cipher, 2 threads": lambda: (
                lambda: list(pool.map(lambda s: s.normal((NORMALS // 2,), 1.0), streams))
            ),
        },
        1,
        ROUNDS,
    )


def run():
    """The rows of the table."""
    rows = []
    for name in NETWORKS:
        found = steps(name)
        rows += [
            {
                "what": f"a step, {name}",
                "way": way,
                "ms": 1e3 * wall,
                "CPU ms": 1e3 * cpu,
                "ratio": cpu / found["PyTorch's generator"][1],
                "million normals/s": None,
            }
            for way, (wall, cpu) in found.items()
        ]
    found = normals()
    rows += [
        {
            "what": f"{NORMALS / 1e6:.1f} million normals",
            "way": way,
            "ms": 1e3 * wall,
            "CPU ms": 1e3 * cpu,
            "ratio": cpu / found["torch.randn"][1],
            "million normals/s": NORMALS / wall / 1e6,
        }
        for way, (wall, cpu) in found.items()
    ]
    return rows
