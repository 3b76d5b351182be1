"""Gaussian noise, and where a run's random numbers come from.

A run has independent streams: `sampling` (who is in a step), `noise`, and `forward` (what the model
itself draws, such as dropout, seeded anew for every step). Initialisation has a stream of its own,
see `dpcompanion.training.models`.

Sampling and noise are ciphers under keys of 256 bits: coins are exact, and sum and noise are added
on a grid (`dpcompanion.mechanism.secure`). Without a seed the operating system draws the keys: for
a model that is released. On a CPU each step's noise then belongs to its sum: runs that go on from
one checkpoint in two ways share none.

With a seed they are hashed from it, so that a run can be repeated: for research. Every bit of a
seed counts, and it may have up to 1024; but anyone who knows or guesses it can subtract the noise.
Two runs of one seed share their batches and their noise, so that the difference of two models from
neighbouring data is the example's gradients, without noise: what experiments want, and what no two
released models may have. Runs with checkpoints in one folder warn of it, and a ledger refuses to
add up two runs of one seed. Draws are made on the CPU, so that a run on a GPU takes the same
batches and the same noise. Those of a `generator_device` are for speed: CUDA's own generator has a
key of 64 bits, hashed from the seed too, and floats for coins.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dpcompanion import _checks
from dpcompanion._devices import to_device
from dpcompanion.mechanism.secure import SecureStream, grid_of, snapped
from dpcompanion.seeds import derive_key, keyed_generator

STREAMS = ("sampling", "noise")


def generators(seed: int | None, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The streams `sampling` and `noise` of a run, each a `SecureStream`, under keys hashed from
    the seed; without one, keys of the operating system.

    With a seed and on a GPU, CUDA's own generators; see the module's text.

    Args:
        seed: a whole number in [0, 2^1024), or None.
        device: where the draws of a seed are made.

    Returns {name: stream}.

    Raises:
        ValueError: a seed outside its range, or a device that PyTorch does not have here.

    >>> list(generators(seed=7))
    ['sampling', 'noise']
    """
    device = _checks.device("device", device)
    if seed is None:
        return {name: SecureStream() for name in STREAMS}
    keys = {name: derive_key(seed, name) for name in STREAMS}
    if device.type == "cpu":
        return {name: SecureStream(key) for name, key in keys.items()}
    return {name: keyed_generator(key, device) for name, key in keys.items()}


def fingerprint(seed: int | None, streams: dict[str, Any]) -> str:
    """A name of the key that a run with these streams of `generators` draws its batches under: two
    runs of one name share them, and those of one seed their noise, too.

    >>> fingerprint(7, generators(7)) == fingerprint(None, generators(7))
    True
    """
    streams = streams if seed is None else generators(seed)  # CUDA's hold no key
    return streams["sampling"].fingerprint


def gaussian_noise(
    shape: Sequence[int],
    std: float,
    generator: torch.Generator | SecureStream,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Independent N(0, std^2), drawn in float64 on the generator's device, then rounded and moved.

    A float64 draw reaches further into the tails than a float32 one, and models of both types get
    the same noise. That of a `SecureStream` lies on a grid (`dpcompanion.mechanism.secure.grid_of`)
    until it is rounded.

    Args:
        shape: of the tensor.
        std: standard deviation, at least 0 and finite.
        generator: a stream of `generators`, or any `torch.Generator`.
        dtype: of the result.
        device: of the result.

    Returns a tensor of that shape, type and device.

    Raises:
        ValueError: a standard deviation outside its range.

    >>> gaussian_noise((2,), 3.0, generators(seed=7)["noise"]).shape
    torch.Size([2])
    """
    std = _checks.number("std", std, 0, float("inf"), closed="left")
    _checks.generator("generator", generator, SecureStream)
    if isinstance(generator, SecureStream):
        return to_device(generator.normal(shape, std).to(dtype), device)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
    return to_device(noise.mul_(std).to(dtype), device)


def noisy(
    total: torch.Tensor, std: float, generator: torch.Generator | SecureStream
) -> torch.Tensor:
    """A tensor with noise N(0, std^2), of its type and on its device: what leaves the data.

    With a `SecureStream` the tensor is put on the grid of the noise first, and both are added there
    without rounding: what comes out is the Gaussian mechanism on the snapped tensor, rounded
    (`dpcompanion.mechanism.secure`). Under keys of the operating system, on a CPU, the noise
    belongs to the tensor: of two calls that go on from one state of the stream only those for equal
    tensors share it.

    Args:
        total: what a release consists of, such as a sum of clipped gradients.
        std: standard deviation, at least 0 and finite.
        generator: a stream of `generators`, or any `torch.Generator`.

    Raises:
        ValueError: a standard deviation outside its range, a tensor of whole numbers, in which the
            noise would be cut off, or entries that do not fit on the grid, NaN among them.

    >>> noisy(torch.zeros(3), 2.0, generators(seed=7)["noise"]).dtype
    torch.float32
    """
    if not total.is_floating_point():
        raise ValueError(f"total must have a floating-point type, got {total.dtype}")
    if isinstance(generator, SecureStream) and std:
        exact = snapped(total, grid_of(std))
        noise = gaussian_noise(total.shape, std, generator.bound(exact), device=total.device)
        return (exact + noise).to(total.dtype)
    return total + gaussian_noise(
        total.shape, std, generator, dtype=total.dtype, device=total.device
    )
