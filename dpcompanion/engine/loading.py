"""Poisson draws for a loader, and a data set that notes which examples it handed out."""

import collections
import math

import torch
from opacus.data_loader import wrap_collate_with_empty
from torch.utils.data import BatchSampler, DataLoader, Dataset

from dpcompanion.mechanism.sampling import PoissonSampler


class Draws(PoissonSampler, BatchSampler):
    """The batch sampler: an epoch of draws, each a list of indices.

    A BatchSampler with the expected batch size, from which Opacus's memory manager makes out its length.

    There is one sequence of draws, and they become steps in its order. Every pass begins with the first that is no step
    yet: an evaluation sees what will be trained on, and neither a new pass nor a checkpoint is a way to leave out a
    draw by what is in it.

    `last` is what was handed out last, None where it can become no step any more, and `number` counts what was handed
    out; `passed_over` is how many draws before the last one are no steps.
    """

    def __init__(self, n, rates, generator, steps):
        PoissonSampler.__init__(self, n, rates, generator)
        self._steps, self.number, self.last = steps, 0, None
        self._taken, self._place = 0, 0  # how many draws became steps; how many come before the last one
        self._ahead = collections.deque()  # the next ones, as far as they are known, each behind the state it came from
        self.batch_size, self.drop_last = float(self.sample_rate.sum()), False

    def __len__(self):
        return self._steps

    def __iter__(self):
        place = self._taken
        for _ in range(self._steps):
            self._place, self.last, self.number = place, self._draw_at(place).tolist(), self.number + 1
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
    """A data set that notes which examples it handed out last, and the `batch` that was made of them; otherwise as the
    one that it holds."""

    def __init__(self, dataset, loader):
        self._dataset, self.handed_out, self.batch = dataset, None, None
        self._workers = _Workers(dataset, loader) if loader.num_workers else None

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        return self._dataset[index]

    def __getitems__(self, indices):
        self.handed_out = list(indices)
        if self._workers and indices:
            return self._workers.read(self.handed_out)
        together = getattr(self._dataset, "__getitems__", None)
        return together(indices) if together and indices else [self._dataset[i] for i in indices]

    def __getattr__(self, name):
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Workers:
    """Worker processes that read the examples of one batch side by side.

    The loader itself has none: they would fetch ahead, and which batch is in use would not be known.
    """

    def __init__(self, dataset, loader):
        self._count, self._parts = loader.num_workers, []
        # Seeds of workers come from a generator of their own, so that draws and noise do not depend on them.
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._parts,
            collate_fn=list,
            num_workers=self._count,
            persistent_workers=True,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=loader.generator)))
            if loader.generator
            else None,
        )

    def read(self, indices):
        size = math.ceil(len(indices) / self._count)
        self._parts[:] = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [example for part in self._loader for example in part]


def private_loader(loader, noted, draws, batch_first):
    collate = wrap_collate_with_empty(collate_fn=loader.collate_fn, batch_first=batch_first)
    # It learns here what a batch looks like: the first one may be empty.
    collate([noted[0]])

    def noting(examples):
        noted.batch = collate(examples)
        return noted.batch

    return DataLoader(
        noted, batch_sampler=draws, collate_fn=noting, pin_memory=loader.pin_memory, generator=loader.generator
    )
