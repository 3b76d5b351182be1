"""Records and checkpoints under SIGKILL: what is found afterwards is whole, and one that a writer
had written.
"""

import os
import random
import signal
import tempfile
import time

import numpy as np
import torch

from dpcompanion.reproduction import records
from dpcompanion.training.checkpoints import read_checkpoint, write_checkpoint


def cases(seed, count):
    generator = random.Random(seed)
    for i in range(count):
        yield {
            "what": "record" if i % 2 else "checkpoint",
            "after": generator.uniform(0, 0.04),
            "arrays": generator.random() < 0.7,
        }


def violations(case):
    with tempfile.TemporaryDirectory() as folder:
        write, read = (
            _record(folder, case["arrays"]) if case["what"] == "record" else _checkpoint(folder)
        )
        write(0)
        writer = os.fork()
        if not writer:  # the child writes until it is killed
            try:
                for number in range(1, 10**6):
                    write(number)
            finally:
                os._exit(1)
        time.sleep(case["after"])
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        try:
            number, content = read()
            found = (
                []
                if content is None or set(content) == {float(number)}
                else [f"{number} with arrays of {content}"]
            )
            write(number + 1)  # and the next writer is not in the way of what the killed one left
            found += [] if read()[0] == number + 1 else ["the next write is lost"]
        except (ValueError, OSError) as error:
            found = [f"{type(error).__name__}: {error}"]
        return found


def _record(folder, arrays):
    def write(number):
        records.write(
            records.make(
                "idp-sgd/table-5",
                "paper",
                {"number": number},
                config={},
                made_with={"versions": {}, "commit": None},
                arrays={"a": np.full(2000, float(number))} if arrays else {},
            ),
            folder,
        )

    def read():
        found = records.find("idp-sgd/table-5", "paper", folder)
        return found.values["number"], found.arrays["a"].tolist() if arrays else None

    return write, read


def _checkpoint(folder):
    path = os.path.join(folder, "run.pt")

    def write(number):
        write_checkpoint(
            path, {"identity": {}, "number": number, "a": torch.full((2000,), float(number))}
        )

    def read():
        content = read_checkpoint(path, ("identity", "number", "a"))
        return content["number"], content["a"].tolist()

    return write, read
