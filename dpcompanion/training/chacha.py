r"""The key stream of ChaCha20 in NumPy, for machines that have no library of ciphers.

`dpcompanion.training.secure` draws from the package `cryptography`, and from here where that is not installed: the
same bytes, seven times as slowly: 250 MB a second and core, measured beside 1.7 GB.

A block of 64 bytes is a state of 16 words of 32 bits, mixed for 20 rounds and added to itself:

.. math::
   \begin{pmatrix} \text{"expa"} & \text{"nd 3"} & \text{"2-by"} & \text{"te k"} \\
   k_0 & k_1 & k_2 & k_3 \\ k_4 & k_5 & k_6 & k_7 \\ c & n_0 & n_1 & n_2 \end{pmatrix}

with the key :math:`k`, the number :math:`c` of the block, and the nonce :math:`n` (RFC 8439, section 2.3).  A round
does the four columns or the four diagonals at once, and here of many blocks at once, by
:math:`a \mathrel{+}= b,\ d = (d \oplus a) \lll 16`, :math:`c \mathrel{+}= d,\ b = (b \oplus c) \lll 12`, and the same
again with 8 and 7 (section 2.1).

Time: sums, exclusive ors and rotations by fixed numbers, all at places that do not depend on the key, so neither
branches nor addresses tell it.  NumPy promises nothing of the kind, and the copies of keys that it leaves in memory are
not wiped.

>>> key_stream(bytes(32), bytes(16), 8).hex()       # RFC 8439, appendix A.1, test vector 1
'76b8e0ada0f13d90'
"""

import numpy as np

from dpcompanion import _checks

BLOCK_BYTES = 64
# Blocks that are worked out at a time: more fall out of the processor's cache.
_TOGETHER = 4096
_CONSTANTS = b"expand 32-byte k"


def key_stream(key, nonce, size, *, skip=0):
    """Bytes `skip` to `skip + size` of the stream, as of `Cipher(ChaCha20(key, nonce), mode=None)` of `cryptography`.

    Args:
        key: 32 bytes.
        nonce: 16 bytes: the number of the first block in 4, little end first, and RFC 8439's nonce in 12.
        size: how many bytes.
        skip: how many come before them.

    Returns bytes.

    Raises:
        ValueError: for a key or a nonce of another length, a negative size, and past block 2^32 - 1, where numbers of
            blocks would come again.

    >>> whole = key_stream(bytes(32), bytes(16), 1000)
    >>> whole == key_stream(bytes(32), bytes(16), 77) + key_stream(bytes(32), bytes(16), 923, skip=77)
    True
    """
    for name, value, length in (("key", key, 32), ("nonce", nonce, 16)):
        if not isinstance(value, bytes) or len(value) != length:
            got = type(value).__name__ + (f" of length {len(value)}" if isinstance(value, bytes) else "")
            raise ValueError(f"{name} must be {length} bytes, got {got}")
    size, skip = _checks.whole_number("size", size, 0), _checks.whole_number("skip", skip, 0)
    first, inside = divmod(skip, BLOCK_BYTES)
    count = -(-(inside + size) // BLOCK_BYTES)
    first += int.from_bytes(nonce[:4], "little")
    if first + count > 2**32:
        raise ValueError(f"size must end by block 2^32 - 1 of its nonce, got {size} bytes from block {first}")
    words = np.frombuffer(_CONSTANTS + key + nonce, dtype="<u4").astype(np.uint32)
    stream = np.empty((count, 16), dtype="<u4")
    for done in range(0, count, _TOGETHER):
        part = stream[done : done + _TOGETHER]
        part[:] = _blocks(words, np.arange(first + done, first + done + len(part), dtype=np.uint32)).T
    return stream.reshape(-1).view(np.uint8)[inside : inside + size].tobytes()


def _blocks(words, numbers):
    """The blocks of these numbers, n words, from the 16 words of a state whose own number is left out: (16, n)."""
    start = np.empty((4, 4, len(numbers)), dtype=np.uint32)
    start[:] = words.reshape(4, 4, 1)
    start[3, 0] = numbers
    a, b, c, d = start.copy()
    spare = np.empty_like(a)
    for _ in range(10):
        _quarter_rounds(a, b, c, d, spare)
        # Diagonals become columns, and columns diagonals again.
        b, c, d = b[[1, 2, 3, 0]], c[[2, 3, 0, 1]], d[[3, 0, 1, 2]]
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b[[3, 0, 1, 2]], c[[2, 3, 0, 1]], d[[1, 2, 3, 0]]
    start += np.stack([a, b, c, d])
    return start.reshape(16, -1)


def _quarter_rounds(a, b, c, d, spare):
    """Four quarter rounds, in place, on rows of four words: RFC 8439, section 2.1."""
    for up, to, by, turn in ((a, d, b, 16), (c, b, d, 12), (a, d, b, 8), (c, b, d, 7)):
        up += by
        to ^= up
        np.right_shift(to, 32 - turn, out=spare)
        to <<= turn
        to |= spare
