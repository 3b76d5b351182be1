"""One flipped bit in a record or its arrays: refused with ValueError, or read as it was written."""

import pathlib
import random
import tempfile

import numpy as np

from dpcompanion.reproduction import records

VALUES = {
    "mnist.sigma": 3.42529,
    "lost": float("nan"),
    "text": "x \u00e4",
    "list": [1, 2.5, None, True],
    "seeds": records.MeanSD(96.75, 0.25, 3),
}
ARRAYS = {"norms": np.linspace(0, 1, 50), "counts": np.arange(20)}


def cases(seed, count):
    generator = random.Random(seed)
    for _ in range(count):
        yield {"file": generator.choice(["json", "npz"]), "place": generator.random(), "bit": generator.randrange(8)}


def violations(case):
    with tempfile.TemporaryDirectory() as folder:
        made = records.make(
            "idp-sgd/table-5",
            "paper",
            VALUES,
            config={"delta": 1e-5},
            arrays=ARRAYS,
            made_with={"versions": {}, "commit": None},
        )
        path = records.write(made, folder)
        (file,) = pathlib.Path(folder).rglob(f"*.{case['file']}")
        content = bytearray(file.read_bytes())
        content[int(case["place"] * len(content))] ^= 1 << case["bit"]
        file.write_bytes(content)
        try:
            found = records.read(path)
        except ValueError:
            return []
        same = records.hash_of([found.values, found.config]) == records.hash_of([made.values, made.config]) and all(
            np.array_equal(found.arrays[name], array) for name, array in ARRAYS.items()
        )
        return [] if same else ["read, and not as it was written"]
