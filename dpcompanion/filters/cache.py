"""A cache of calibrations in the data folder, so that the next program gets them at once.

An entry is one JSON file under `filters` in the data folder. Its name is a sha256 of the question,
of the code that answers it and of the libraries that it computes with: whatever changes in any of
these is computed anew. An entry is sealed by a sha256 of its own, holds its question, and is
written whole or not at all; one that is damaged, or answers another question, is computed again and
replaced. Answers that take less than a second of processor time are not written. Where nothing can
be written, nothing is cached. The seal guards against damage, not against people who may write into
the folder. With DPCOMPANION_FILTERS=anew in the environment nothing is read or written: so the
book's notebooks are executed, which show what is computed.

>>> import tempfile
>>> os.environ["DPCOMPANION_DATA"], before = tempfile.mkdtemp(), os.environ.get("DPCOMPANION_DATA")
>>> calls = []
>>> @cached(shortest=0.0)
... def half(x, progress=None):
...     calls.append(x)
...     return (x / 2,)
>>> half(3.0), half(3.0), half.forget(), half(3.0), len(calls)
((1.5,), (1.5,), None, (1.5,), 1)
>>> _ = (
...     os.environ.pop("DPCOMPANION_DATA")
...     if before is None
...     else os.environ.update(DPCOMPANION_DATA=before)
... )
"""

import functools
import hashlib
import inspect
import json
import os
import pathlib
import time

import numpy
import scipy
import torch

from dpcompanion import _files, accounting, data

#: Seconds of processor time below which an answer is not written.
SHORTEST = 1.0


def cached(shortest=SHORTEST):
    """A decorator for functions of numbers, strings and tuples of them that return a tuple of
    finite or infinite numbers.

    Answers stay in memory (256 of them) and in the data folder. An argument called `progress` is no
    part of the question. The function gets an attribute `forget()`, which empties the memory and
    leaves the folder.
    """

    def wrap(function):
        signature, memory = inspect.signature(function), {}

        @functools.wraps(function)
        def answered(*arguments, **named):
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            question = {
                name: value for name, value in bound.arguments.items() if name != "progress"
            }
            key = tuple(question.items())
            if key not in memory:
                if len(memory) >= 256:
                    del memory[next(iter(memory))]
                memory[key] = _answer(
                    function.__name__, question, lambda: function(**bound.arguments), shortest
                )
            return memory[key]

        vars(answered).update(forget=memory.clear)
        return answered

    return wrap


def path_of(name, question):
    """Where the answer to a question, {argument: value}, lies."""
    return (
        data.data_folder()
        / "filters"
        / f"{name.strip('_')}.{_digest([name, _plain(question), code()])}.json"
    )


@functools.cache
def code():
    """A sha256 of the modules that answers come from, and the versions of the libraries."""
    total = hashlib.sha256()
    for folder in (pathlib.Path(__file__).parent, pathlib.Path(accounting.__file__).parent):
        for file in sorted(folder.glob("*.py")):
            total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "sha256": total.hexdigest(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "torch": torch.__version__,
    }


def _answer(name, question, work, shortest):
    if os.environ.get("DPCOMPANION_FILTERS") == "anew":
        return work()
    path, question = path_of(name, question), _plain(question)
    try:
        return _read(path, question)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, damaged, or of another make
    started = time.process_time()
    answer = work()
    seconds = time.process_time() - started
    if seconds >= shortest:
        entry = {"question": question, "answer": list(answer), "seconds": round(seconds, 3)}
        try:
            _files.replace(path, json.dumps({"sha256": _digest(entry), **entry}, indent=1).encode())
        except OSError:
            pass  # a folder that cannot be written to caches nothing
    return answer


def _read(path, question):
    entry = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entry, dict) or entry.pop("sha256", None) != _digest(entry):
        raise ValueError("damaged")
    if entry["question"] != question:
        raise ValueError("the answer to another question")
    return tuple(entry["answer"])


def _plain(question):
    """As JSON gives it back: floats of the same value and type, lists for tuples."""
    return json.loads(json.dumps(question))


def _digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
