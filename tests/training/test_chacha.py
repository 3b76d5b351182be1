"""The cipher in NumPy: the known answers of RFC 8439; the bytes of the package `cryptography`, and instead of it."""

import random
import subprocess
import sys

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpcompanion.training.chacha import key_stream
from dpcompanion.training.secure import SecureStream

LAST = 2**32 - 1


def theirs(key, nonce, *sizes):
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    return b"".join(encryptor.update(bytes(size)) for size in sizes)


def test_a_block_is_that_of_rfc_8439():
    # Section 2.3.2.
    nonce = (1).to_bytes(4, "little") + bytes.fromhex("000000090000004a00000000")
    assert key_stream(bytes(range(32)), nonce, 64).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_a_text_is_enciphered_as_in_rfc_8439():
    # Section 2.4.2: two blocks, the second of them cut off.
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
        b"be it."
    )
    stream = key_stream(bytes(range(32)), (1).to_bytes(4, "little") + bytes.fromhex("000000000000004a00000000"), 114)
    assert bytes(a ^ b for a, b in zip(text, stream, strict=True)).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


@pytest.mark.parametrize("seed", range(40))
def test_bytes_are_those_of_cryptography_from_any_place_on_and_in_pieces(seed):
    drawn = random.Random(seed)
    key, sizes = drawn.randbytes(32), [drawn.choice([0, 1, 8, 63, 64, 65, 777, 4096, 300_001]) for _ in range(3)]
    blocks = -(-sum(sizes) // 64)
    # Numbers of blocks that carry from byte to byte, and those up to the last.
    start = drawn.choice([0, 1, 255, 2**16 - 1, 2**31 - 1, drawn.randrange(2**31), LAST + 1 - max(blocks, 1)])
    nonce = start.to_bytes(4, "little") + drawn.choice([drawn.randbytes(12), b"\xff" * 12])
    whole = theirs(key, nonce, *sizes)
    assert key_stream(key, nonce, sum(sizes)) == whole
    places = [sum(sizes[:i]) for i in range(len(sizes))]
    assert b"".join(key_stream(key, nonce, size, skip=skip) for size, skip in zip(sizes, places, strict=True)) == whole


def test_numbers_of_blocks_never_come_again():
    nonce = LAST.to_bytes(4, "little") + bytes(12)
    assert key_stream(bytes(32), nonce, 64) == theirs(bytes(32), nonce, 64)
    for refused in (key_stream, theirs):
        with pytest.raises(ValueError):
            refused(bytes(32), nonce, 65)
    with pytest.raises(ValueError, match="size"):
        key_stream(bytes(32), nonce, 1, skip=64)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((bytes(31), bytes(16), 1), "key must be 32 bytes, got bytes of length 31"),
        ((bytes(32), bytes(12), 1), "nonce must be 16 bytes, got bytes of length 12"),
        ((32, bytes(16), 1), "key must be 32 bytes, got int"),
        ((bytes(32), bytes(16), -1), "size"),
    ],
)
def test_bad_input_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        key_stream(*arguments)


@pytest.mark.slow
def test_a_stream_draws_the_same_where_the_package_is_missing(tmp_path):
    code = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cryptography":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
from dpcompanion.training.secure import SecureStream

stream = SecureStream(key=bytes(range(32)))
drawn = [stream.normal((333, 77), std=1.7), stream.coins(10_001, 0.3)]
goes_on = SecureStream(key=bytes(32))
goes_on.set_state(stream.get_state(with_key=True))
torch.save([*drawn, goes_on.gaps(100, 0.01, 1000)], sys.argv[1])
assert "cryptography" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "drawn")], check=True)
    stream = SecureStream(key=bytes(range(32)))
    expected = [stream.normal((333, 77), std=1.7), stream.coins(10_001, 0.3), stream.gaps(100, 0.01, 1000)]
    for mine, its in zip(expected, torch.load(tmp_path / "drawn"), strict=True):
        assert torch.equal(mine, its)
    assert "cryptography" in sys.modules
