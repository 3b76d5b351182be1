"""What a seed is made into: keys of 256 bits, one for each stream of random numbers, by hashing.

PyTorch's generator takes 32 bits of a seed on the CPU, so that two seeds that agree in these draw
the same numbers, and four billion trials find any. Here every bit of a seed counts, and it may have
up to 1024. Noise and batches come from ciphers under such keys (`dpcompanion.mechanism.noise`);
first weights, dropout and the orders of passes from PyTorch's generator, whose whole state a key
fills. A seed is for research all the same: anyone who knows it can repeat the run.

Fresh weights go through `jittered`, which moves them only where a test asks for it.

>>> derive_key(1, "noise") == derive_key(1 + 2**32, "noise")
False
"""

import hashlib
import operator
import os
import re

import numpy as np
import torch

from dpcompanion import _checks

#: Which draws belong to a seed. A change that lets seeded runs draw otherwise raises it, and
#: records tell theirs: 1 was PyTorch's generator, which took 32 bits of a seed, 2 are these keys.
DRAWS = 2

#: What a statement says of a run whose noise came from a seed.
SEEDED = "The noise came from a seed: anyone who knows it can subtract the noise."

# What PyTorch keeps of a Mersenne Twister: seed, how many words are left (int32), whether it is
# seeded (int32), the next word, 624 words of 64 bits each, and what is left over of normals.
_WORDS, _STATE_BYTES = 624, 5056


def derive_seed(seed: int, *names: str | int) -> int:
    """A whole number below 2^63 for `names`, by hashing, for what takes seeds of its own: shadow
    runs, data, dropout.

    It is the first 63 bits of sha256("seed/names"); 32 of them are all that
    `torch.Generator.manual_seed` takes.

    Args:
        seed: a whole number in [0, 2^1024).
        names: texts without "/", or whole numbers; no text may read as a whole number ("1" beside
            1).

    Raises:
        ValueError: an argument outside its range.

    >>> derive_seed(0, "noise") == derive_seed(0, "noise") != derive_seed(1, "noise")
    True
    """
    texts = [_text(name) for name in names]
    if any("/" in text for text in texts):
        raise ValueError(f"names must hold no '/', which stands between them, got {names!r}")
    text = "/".join((str(_checks.seed("seed", seed)), *texts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_key(seed: int, *names: str | int) -> bytes:
    """The 256-bit key of the stream `names`: streams of one seed, and of two, are independent.

    It is the sha256 of a label, the names and all bits of the seed, each with its length before it.

    Args:
        seed: a whole number in [0, 2^1024).
        names: of the stream, texts or whole numbers; no text may read as a whole number ("1" beside
            1).

    Raises:
        ValueError: an argument outside its range.

    >>> len(derive_key(2**300, "noise")), derive_key(1, "noise") == derive_key(1 + 2**32, "noise")
    (32, False)
    """
    seed = _checks.seed("seed", seed)
    total = hashlib.sha256(b"dpcompanion stream\0")
    for part in (
        *(_text(name).encode() for name in names),
        seed.to_bytes((seed.bit_length() + 7) // 8, "little"),
    ):
        total.update(len(part).to_bytes(8, "little") + part)
    return total.digest()


def _text(name):
    """What is hashed of a stream's name: of two names never the same."""
    if isinstance(name, str):
        if re.fullmatch(r"-?[0-9]+", name):
            raise ValueError(
                f"names must be texts that read as no whole number, or whole numbers, got {name!r}"
            )
        return name
    try:
        if isinstance(name, bool):
            raise TypeError
        return str(operator.index(name))
    except TypeError:
        raise ValueError(f"names must be texts or whole numbers, got {name!r:.40}") from None


def keyed_generator(key: bytes, device: str | torch.device = "cpu") -> torch.Generator:
    """A `torch.Generator` for what a cipher cannot draw (weights, orders): its whole state comes
    from `key`, by SHAKE.

    On a GPU it takes the 64 bits of the key that PyTorch's generator has room for there.

    Args:
        key: 32 bytes, as of `derive_key`.

    >>> torch.rand(2, generator=keyed_generator(derive_key(0, "weights"))).shape
    torch.Size([2])
    """
    if not isinstance(key, bytes) or len(key) != 32:
        raise ValueError(
            f"key must be 32 bytes, got {len(key)} of them"
            if isinstance(key, bytes)
            else f"key must be 32 bytes, got a {type(key).__name__}"
        )
    generator = torch.Generator(device=device)
    if generator.device.type != "cpu":
        return generator.manual_seed(int.from_bytes(key[:8], "little"))
    state = generator.get_state().numpy()
    if state.size != _STATE_BYTES:
        raise RuntimeError(
            f"PyTorch {torch.__version__} keeps its generator in {state.size} bytes, not "
            f"{_STATE_BYTES}: this version of dpcompanion cannot seed it"
        )
    # one word left, seeded, next word 0: as after `manual_seed`
    state[8:24].view("<i4")[:] = 1, 1, 0, 0
    state[24 : 24 + 8 * _WORDS].view("<u8")[:] = np.frombuffer(
        hashlib.shake_256(key).digest(4 * _WORDS), dtype="<u4"
    )
    generator.set_state(torch.from_numpy(state))
    return generator


def seed_torch(key: bytes, device: str | torch.device = "cpu") -> None:
    """Give PyTorch's global generators the state that `keyed_generator` makes of a key."""
    torch.default_generator.set_state(keyed_generator(key).get_state())
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int.from_bytes(key[:8], "little"))


def jittered(weights: torch.Tensor) -> torch.Tensor:
    """Fresh weights as they are or, where the environment variable DPCOMPANION_JITTER is set to a
    number such as 1e-12, each moved up or down by this share of itself, or by one unit in its last
    place if that is more.

    Training rounds on each processor in its own way. The jitter stands for those that are not at
    hand: a number that it changes would differ on some of them too. See `tools/arithmetic.py`.

    >>> jittered(torch.ones(2, dtype=torch.float64)).tolist()
    [1.0, 1.0]
    """
    share = float(os.environ.get("DPCOMPANION_JITTER") or 0)
    if not share or not weights.is_floating_point():
        return weights
    ups = torch.rand(weights.shape, generator=torch.Generator().manual_seed(weights.numel())) < 0.5
    share = max(share, torch.finfo(weights.dtype).eps)
    return weights + torch.where(ups.to(weights.device), share, -share) * weights
