"""One flipped bit in a record, its arrays, or a checkpoint of `train` or of the engine: refused
with ValueError, or read as it was written.
"""

import functools
import pathlib
import random
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.reproduction import records
from dpcompanion.training import Checkpoint, DPSGDPlan, cross_entropy, train

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
        yield {
            "file": generator.choice(["json", "npz", "train", "engine"]),
            "place": generator.random(),
            "bit": generator.randrange(8),
        }


def violations(case):
    return _record(case) if case["file"] in ("json", "npz") else _checkpoint(case)


def _flipped(content, case):
    content = bytearray(content)
    content[int(case["place"] * len(content))] ^= 1 << case["bit"]
    return content


def _record(case):
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
        file.write_bytes(_flipped(file.read_bytes(), case))
        try:
            found = records.read(path)
        except ValueError:
            return []
        same = records.hash_of([found.values, found.config]) == records.hash_of(
            [made.values, made.config]
        ) and all(np.array_equal(found.arrays[name], array) for name, array in ARRAYS.items())
        return [] if same else ["read, and not as it was written"]


DATA = torch.linspace(-1, 1, 60).reshape(12, 5), torch.arange(12) % 3


def _trained(path):
    """A run of `train` that goes on from `path` where there is a file."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    plan = DPSGDPlan(
        n=12, sample_rate=0.5, steps=2, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(
        model, cross_entropy, DATA, plan, optimizer=optimizer, seed=0, checkpoint=Checkpoint(path)
    )
    return [2, *model.parameters()]


def _private():
    """An engine, and what its checkpoints take."""
    torch.manual_seed(0)
    model, engine = torch.nn.Linear(5, 3), IndividualizedPrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*DATA), batch_size=6),
        target_epsilons=[1.0] * 12,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        seed=0,
    )
    return engine, loader, {"module": model, "optimizer": optimizer}


def _loaded(path):
    engine, _, parts = _private()
    engine.load_checkpoint(path=path, **parts)
    return [len(engine.accountant), *parts["module"].parameters()]


@functools.cache
def _written(what):
    """The bytes of a checkpoint, and the steps and weights in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.pt")
        if what == "train":
            return (_trained(path), path.read_bytes())[::-1]
        engine, loader, parts = _private()
        for x, y in loader:
            parts["optimizer"].zero_grad()
            F.cross_entropy(parts["module"](x), y).backward()
            parts["optimizer"].step()
        engine.save_checkpoint(path=path, **parts)
        return path.read_bytes(), [len(engine.accountant), *parts["module"].parameters()]


def _checkpoint(case):
    content, expected = _written(case["file"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.pt")
        path.write_bytes(_flipped(content, case))
        try:
            found = (_trained if case["file"] == "train" else _loaded)(path)
        except ValueError:
            return []
        same = all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected)
        )
        return [] if same else ["loaded, and not as it was written"]
