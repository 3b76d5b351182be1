"""Poisson draws for a loader, and a data set that notes which examples it handed out.

Where persons are the units a draw is one of persons, and the data set hands out rows of theirs: at
most k of each, one person's after the other's, so that a draw that is cut into physical batches is
cut between persons.
"""

import collections
import contextlib
import hashlib
import math
import weakref
from typing import Any

import torch
from opacus.data_loader import wrap_collate_with_empty
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Dataset

from dpcompanion._devices import to_device
from dpcompanion.mechanism.sampling import PoissonSampler
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.seeds import derive_key, seed_torch


class Draws(PoissonSampler, BatchSampler):
    """The batch sampler: an epoch of draws, each a list of indices.

    A BatchSampler with the expected batch size, from which Opacus's memory manager makes out its
    length.

    There is one sequence of draws, and they become steps in its order. Every pass begins with the
    first that is no step yet: an evaluation sees what will be trained on, and neither a new pass
    nor a checkpoint is a way to leave out a draw by what is in it.

    On several ranks all make the same draws, and each hands out its share of them, `share(n)` of n
    examples.

    `last` is what was handed out last, None where it can become no step any more, `whole` the draw
    that it is of, and `number` counts what was handed out; `passed_over` is how many draws before
    the last one are no steps.
    """

    def __init__(self, n, rates, generator, steps, share=lambda n: slice(None)):
        PoissonSampler.__init__(self, n, rates, generator)
        self._share = share
        self._steps, self.number, self.last, self.whole = steps, 0, None, []
        # how many draws became steps; how many come before the last one
        self._taken, self._place = 0, 0
        # the next ones, as far as they are known, each behind the state it came from
        self._ahead = collections.deque()
        self.batch_size, self.drop_last = float(self.sample_rate.sum()), False

    def __len__(self):
        return self._steps

    def __iter__(self):
        place = self._taken
        for _ in range(self._steps):
            self._place, self.whole, self.number = (
                place,
                self._draw_at(place).tolist(),
                self.number + 1,
            )
            self.last = self.whole[self._share(len(self.whole))]
            yield self.last
            place = max(place + 1, self._taken)

    @property
    def passed_over(self):
        return self._place - self._taken

    def step(self):
        """The first draw that was no step is one now."""
        self._draw_at(self._taken)
        self._ahead.popleft()
        self._taken += 1

    def state(self):
        """That of the generator before the first draw that is no step."""
        return self._ahead[0][0] if self._ahead else self.generator.get_state()

    def rewind(self):
        """Bring the generator there; what was handed out becomes no step any more."""
        self.generator.set_state(self.state())
        self._ahead.clear()
        self.last = None

    def _draw_at(self, place):
        while len(self._ahead) <= place - self._taken:
            self._ahead.append((self.generator.get_state(), self.draw()))
        return self._ahead[place - self._taken][1]


class IndexRecorder(Dataset):
    """A data set that notes which examples it handed out last, and the `batch` that was made of
    them; otherwise as the one that it holds.

    Args:
        dataset, loader: what was given to the engine.
        rows: a `RowChoice`, where the examples that are drawn are persons; then it is a data set of
            these, each a list of rows.

    Attributes:
        handed_out: the rows of the last batch, each once, as indices of the data set; None before
            the first.
        units: the examples (persons) that were asked for.
        sizes: how many of the rows, which follow one another, are each person's; None where each
            row is an example.
    """

    def __init__(self, dataset, loader, rows=None):
        self._dataset, self.handed_out = dataset, None
        self._batch, self._versions = None, []
        self._rows: Any = rows
        self.units, self.sizes = None, None
        self._workers = _Workers(dataset, loader) if loader.num_workers else None

    def __len__(self):
        return len(self._dataset) if self._rows is None else self._rows.n

    def __getitem__(self, index):
        if self._rows is None:
            return self._dataset[index]
        return [self._dataset[row] for row in self._rows.of([index])[0]]

    def __getitems__(self, indices):
        self.units = self.handed_out = list(indices)
        if self._rows is not None:
            chosen = self._rows.of(self.units)
            self.handed_out = [row for own in chosen for row in own]
            self.sizes = [len(own) for own in chosen]
        indices = self.handed_out
        if self._workers and indices:
            return self._workers.read(indices)
        together = getattr(self._dataset, "__getitems__", None)
        return together(indices) if together and indices else [self._dataset[i] for i in indices]

    @property
    def batch(self):
        """What was made of the examples handed out last; None in place of each of its tensors that
        the loop has written to since, as in ``y -= y.mean()``.
        """
        leaves, spec = tree_flatten(self._batch)
        kept = [
            None if torch.is_tensor(leaf) and leaf._version != version else leaf
            for leaf, version in zip(leaves, self._versions)
        ]
        return tree_unflatten(kept, spec)

    @batch.setter
    def batch(self, batch):
        self._batch = batch
        self._versions = [getattr(leaf, "_version", 0) for leaf in tree_flatten(batch)[0]]

    def combined(self, gradients):
        """Gradients of the rows handed out as those of the persons (`RowChoice.combined`)."""
        return self._rows.combined(gradients, self.sizes)

    def __getattr__(self, name):
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class RowChoice:
    """Which rows of the persons in a draw take part, at most k of each (`training.people`).

    It depends on the key of the draws and on the number of the draw alone: a draw that is seen
    again, in another pass, in pieces, by the run that goes on from a checkpoint or on another rank,
    has the same rows.

    Args:
        ownership: whose each row is.
        draws: the `Draws`.
        accountant: knows how many steps were taken.
    """

    def __init__(self, ownership, draws, accountant):
        self._ownership = ownership
        self._draws = draws
        self._accountant = accountant
        self.n = len(ownership)
        self._seed, self._known = _seed_of(draws.generator), (None, {})

    def of(self, persons):
        """The rows of these persons, a list for each."""
        seed, number = self._stream(), self._accountant.steps + self._draws.passed_over
        if self._known[0] != (seed, number, self._draws.number):
            drawn = self._draws.whole
            chosen = self._chosen(drawn, derive_key(seed, "rows", number))
            self._known = (seed, number, self._draws.number), dict(zip(drawn, chosen))
        known = self._known[1]
        if not all(person in known for person in persons):  # another loader asks
            return self._chosen(persons, derive_key(seed, "rows aside", number))
        return [known[person] for person in persons]

    def _stream(self):
        stream = self._draws.generator
        return _seed_of(stream) if isinstance(stream, SecureStream) else self._seed

    @contextlib.contextmanager
    def drawing(self, what):
        """PyTorch's generator draws by the stream of the run, for something in the step at hand."""
        with torch.random.fork_rng(devices=[]):
            seed_torch(derive_key(self._stream(), what, self._accountant.steps))
            yield

    def _chosen(self, persons, key):
        with torch.random.fork_rng(devices=[]):
            seed_torch(key)
            places, present = self._ownership.drawn(torch.tensor(persons, dtype=torch.int64))
        return [own[: int(count)].tolist() for own, count in zip(places, present.sum(1))]

    def combined(self, gradients, sizes):
        """Gradients of rows, (rows, ...), as those of the persons whose they are, (persons, ...).

        Sums are made in one order on every device, row after row.
        """
        if len(sizes) == len(gradients) and all(size == 1 for size in sizes):
            return gradients
        counts = torch.tensor(sizes, dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        total = gradients.new_zeros(len(sizes), *gradients.shape[1:])
        for place in range(max(sizes, default=0)):
            who = (counts > place).nonzero()[:, 0]
            here, rows = (to_device(t, gradients.device) for t in (who, starts[who] + place))
            total[here] = total[here] + gradients[rows]
        if self._ownership.combine == "mean":
            total /= to_device(counts.clamp(min=1).to(total.dtype), total.device).view(
                -1, *[1] * (total.ndim - 1)
            )
        return total


def _seed_of(stream):
    """A number hashed from the key of a stream, or from the state that a generator begins with."""
    key = (
        stream.key
        if isinstance(stream, SecureStream)
        else stream.get_state().cpu().numpy().tobytes()
    )
    return int.from_bytes(hashlib.sha256(b"dpcompanion rows\0" + key).digest(), "little")


class _Workers:
    """Worker processes that read the examples of one batch side by side.

    The loader itself has none: they would fetch ahead, and which batch is in use would not be
    known.
    """

    def __init__(self, dataset, loader):
        self._count, self._parts = loader.num_workers, []
        # Seeds of workers come from a generator of their own, apart from draws and noise.
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._parts,
            collate_fn=list,
            num_workers=self._count,
            persistent_workers=True,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(
                int(torch.randint(2**62, (1,), generator=loader.generator))
            )
            if loader.generator
            else None,
        )
        # Else the collector of cycles may close the queues of the workers first, and each of them
        # is then waited for, five seconds, wherever the program happens to be.
        weakref.finalize(self, lambda loader: None, self._loader)

    def read(self, indices):
        size = math.ceil(len(indices) / self._count)
        self._parts[:] = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [example for part in self._loader for example in part]


def private_loader(loader, noted, draws, batch_first):
    collate = wrap_collate_with_empty(collate_fn=loader.collate_fn, batch_first=batch_first)
    # It learns here what a batch looks like: the first one may be empty.
    collate([loader.dataset[0]])

    def noting(examples):
        noted.batch = batch = collate(examples)
        return batch

    return DataLoader(
        noted,
        batch_sampler=draws,
        collate_fn=noting,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
    )
