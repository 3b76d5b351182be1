"""Gaussian noise, and where a run's random numbers come from.

A run has independent streams: `sampling` (who is in a step), `noise`, and `forward` (what the model itself draws, such
as dropout, seeded anew for every step).  Initialisation has a stream of its own, see `dpcompanion.training.models`.

Without a seed the first two are ciphers under keys of 256 bits that the operating system draws, coins are exact, and
sum and noise are added on a grid (`dpcompanion.training.secure`): for a model that is released.

With a seed a run can be repeated: for research.  PyTorch's generator uses 32 bits of a seed, few enough to try them
all, and whoever knows the seed can subtract the noise; and the sum of a gradient and a float Gaussian is not exactly
Gaussian, so that its last bits can tell neighbouring data sets apart (Mironov 2012).  Two runs of one seed share
their batches and their noise, so that the difference of two models from neighbouring data is the example's gradients,
without noise: what experiments want, and what no two released models may have.  Runs with checkpoints in one folder
warn of it.  Draws are made on the CPU, so that a
run on a GPU takes the same batches and the same noise.

>>> streams = generators(seed=7)
>>> gaussian_noise((2,), 3.0, streams["noise"]).shape
torch.Size([2])
"""

import hashlib

import torch

from dpcompanion import _checks
from dpcompanion.training.secure import SecureStream

STREAMS = ("sampling", "noise")


def derive_seed(seed, *names):
    """A seed for the stream called `names`, by hashing: streams of one seed are independent.

    The seed of stream s is the first 63 bits of sha256("seed/s").

    >>> derive_seed(0, "noise") == derive_seed(0, "noise") != derive_seed(1, "noise")
    True
    """
    text = "/".join(map(str, (_checks.whole_number("seed", seed, 0), *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generators(seed, device="cpu"):
    """The generators `sampling` and `noise` of a run: on `device` with a seed, each a `SecureStream` without one."""
    if seed is None:
        return {name: SecureStream() for name in STREAMS}
    return {name: torch.Generator(device=device).manual_seed(derive_seed(seed, name)) for name in STREAMS}


def gaussian_noise(shape, std, generator, *, dtype=torch.float64, device="cpu"):
    """Independent N(0, std^2) entries, drawn in float64 on the generator's device, then rounded and moved.

    A float64 draw reaches further into the tails than a float32 one, and models of both types get the same noise.
    """
    _checks.in_interval("std", std, 0, float("inf"), closed="left")
    if isinstance(generator, SecureStream):
        return generator.normal(shape, std).to(dtype=dtype, device=device)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
    return noise.mul_(std).to(dtype=dtype, device=device)
