r"""A run on several processes, the ranks of `torch.distributed`: the only place where ranks differ.

Every rank is given the same plan, data, model and options, and calls `train` alike.  At each step

1. all ranks make the same Poisson draw, from one key, and the same limits (filters decide before
   the draw);
2. each rank computes the clipped sum of its share of the draw, which may be empty;
3. norms and losses of all shares are gathered, so that trackers, callbacks and histories are alike;
4. the sums are added up on rank 0, which adds the noise, once; what all ranks receive is the noisy
   sum.

So all ranks take the same step, to the last bit, and the account is that of one process. The result
is that of one process up to the order of sums; what is random in a model (dropout), a transform or
the choice of a person's rows differs from rank to rank.

Norms, losses and whether all is well are exchanged by the hosts (gloo), the sums by NCCL where the
process group has it. So a step on GPUs waits for them, as one on a single GPU does not.

A rank whose gradients fail says so before sums are exchanged, and all ranks raise before they step;
one that fails later, as in a callback, ends all after the step. Ranks that disagree on what they
are given are refused before the first step, and ranks whose weights differ later at the next
checkpoint, or at the end.

**What is trusted.** Clipped sums travel without noise from rank to rank, and where there is no seed
so does the key of the draws: whoever reads along, or runs a rank, learns what the guarantee hides.
`torch.distributed` encrypts nothing. The key of the noise never leaves rank 0.

>>> ranks = current()
>>> ranks.size, ranks.share(10)
(1, slice(0, 10, None))
"""

import contextlib
import contextvars
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dpcompanion.training.checkpoints import digest_of

# Types in which numbers of examples are gathered, all of which float64 holds exactly.
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Ranks:
    """One process alone, rank 0 of 1, which has nobody to ask."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes files and adds the noise."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """Which of n items are this rank's: all ranks' shares, in order, are all items."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def stream(self, name: str) -> str:
        """What a rank's own random numbers are called."""
        return name if self.first else f"{name} of rank {self.rank}"

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank."""
        return flag

    def from_first(self, value: Any) -> Any:
        """The value that rank 0 has."""
        return value

    def gathered(self, n: int, *shares: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Numbers of n items, (n,) each, of which every rank has those of its share."""
        return shares

    def released(
        self, total: torch.Tensor, noisy: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The ranks' summed totals with noise, by `noisy` on rank 0: the same bits everywhere."""
        return noisy(total)

    def from_parts(
        self, part: torch.Tensor, together: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> torch.Tensor:
        """This rank's part of what `together` makes, on rank 0, of the parts (k,) of all ranks."""
        return together([part])[0]

    def same(self, described: Callable[[], Mapping[str, str]], what: str) -> None:
        """Refuse ranks that differ in what `described` gives, {name: value or digest}."""

    def check_generator(self, device: str | torch.device) -> None:
        """Refuse generators whose numbers depend on the machine."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What one rank raises within ends all of them, where they meet next."""
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise

    def _failed(self, error):
        pass

    def _leave(self):
        pass


class _Several(Ranks):
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._host: Any = dist.new_group(backend="gloo")
        self._nccl = "cuda:nccl" in str(dist.get_backend_config())
        self._over = False  # whether no rank can be asked any more

    def any(self, flag):
        return self._agreed(flag)

    def from_first(self, value):
        self._agreed()
        values = [value if self.first else None]
        self._call(dist.broadcast_object_list, values, 0, group=self._host)
        return values[0]

    def gathered(self, n, *shares):
        self._agreed()
        most = -(-n // self.size)
        mine = torch.zeros(len(shares), 1 + most, dtype=torch.float64)
        for row, share in zip(mine, shares):
            row[0] = _TYPES.index(share.dtype)
            row[1 : 1 + len(share)] = share
        blocks = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(dist.all_gather, blocks, mine, group=self._host)
        ends = [n * rank // self.size for rank in range(self.size + 1)]
        # The last rank has a share if any has, and so knows the type.
        types = [_TYPES[int(kind)] for kind in blocks[-1][:, 0]]
        return tuple(
            torch.cat(
                [block[i, 1 : 1 + end - start] for block, start, end in zip(blocks, ends, ends[1:])]
            ).to(device=share.device, dtype=types[i])
            for i, share in enumerate(shares)
        )

    def released(self, total, noisy):
        self._agreed()
        there, group = (total, None) if self._nccl and total.is_cuda else (total.cpu(), self._host)
        self._call(dist.reduce, there, 0, group=group)
        if self.first:
            there = noisy(there.to(total.device)).to(there.device).contiguous()
        self._agreed()  # if rank 0 could not add noise, there is nothing to receive
        self._call(dist.broadcast, there, 0, group=group)
        return there.to(total.device)

    def from_parts(self, part, together):
        self._agreed()
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(dist.all_gather, sizes, torch.tensor([len(part)]), group=self._host)
        mine = part.new_zeros(int(max(sizes)), device="cpu")
        mine[: len(part)] = part
        parts = [torch.zeros_like(mine) for _ in sizes] if self.first else None
        self._call(dist.gather, mine, parts, 0, group=self._host)
        if parts is not None:
            found = together([one[: int(size)] for one, size in zip(parts, sizes)])
            for one, own in zip(parts, found, strict=True):
                one[: len(own)] = own
        self._agreed()  # if rank 0 could not, there is nothing to receive
        self._call(dist.scatter, mine, parts, 0, group=self._host)
        return mine[: len(part)].to(part.device)

    def same(self, described, what):
        ours: Any = dict(described())
        self._agreed()
        everyone: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, everyone, ours, group=self._host)
        found = [
            f"{name} ({theirs.get(name, 'none'):.40} on rank {rank}, "
            f"{everyone[0].get(name, 'none'):.40} on rank 0)"
            for rank, theirs in enumerate(everyone)
            for name in {**everyone[0], **theirs}
            if theirs.get(name) != everyone[0].get(name)
        ]
        if found:
            raise ValueError(f"ranks must {what}, but they differ in {'; '.join(found)}")

    def check_generator(self, device):
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"generator_device must be 'cpu' on {self.size} ranks, got {str(device)!r}: what a "
                "GPU draws depends on its make, and all ranks must make the same draws"
            )

    def _call(self, collective, *arguments, **options):
        self._over = True  # whatever interrupts it, others may wait in it
        collective(*arguments, **options)
        self._over = False

    def _agreed(self, flag=False, error=None):
        """Whether the flag is up on some rank; if one has failed instead, this one ends, too."""
        mine = torch.tensor([error is not None, bool(flag)], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(dist.all_gather, found, mine, group=self._host)
        failed, up = torch.stack(found).T
        if failed.any():
            texts: list[Any] = [None] * self.size
            text = (
                None
                if error is None
                else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
            )
            self._call(dist.all_gather_object, texts, text, group=self._host)
            self._over = True
            if error is None:
                rank = int(failed.argmax())
                refused, said = texts[rank]
                raise (ValueError if refused else RuntimeError)(
                    f"rank {rank} of {self.size} ended the run: {said}"
                )
        return bool(up.any())

    def _failed(self, error):
        if not self._over:
            self._agreed(error=error)

    def _leave(self):
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self._host)


_ALONE = Ranks()
_current: contextvars.ContextVar[Ranks] = contextvars.ContextVar("ranks", default=_ALONE)


def current() -> Ranks:
    """The ranks of the run that is under way here, one process alone where there is none."""
    return _current.get()


@contextlib.contextmanager
def joined(*, lasting: bool = False) -> Iterator[Ranks]:
    """All ranks of the process group, if there is one, in one run: what one raises ends all.

    Args:
        lasting: whether they meet afterwards, too, as in a loop of the user's own.

    Raises:
        ValueError: where `torchrun` started several processes that have no process group.
    """
    processes = _processes()
    if processes > 1 and not dist.is_initialized():
        raise ValueError(
            f"torch.distributed must be initialised in each of the {processes} processes that "
            "torchrun started, which would each train and release a model of its own: call "
            "torch.distributed.init_process_group() first"
        )
    ranks = _Several() if processes > 1 else _ALONE
    before = _current.set(ranks)
    try:
        with ranks.together():
            yield ranks
    finally:
        _current.reset(before)
        if not lasting:
            ranks._leave()


def check_one_process(what: str, instead: str) -> None:
    """Refuse what runs in one process only where there are more: each would release its model."""
    if (processes := _processes()) > 1:
        raise ValueError(
            f"{what} must run in one process, got {processes} of torch.distributed, each of which "
            f"would train and release a model of its own: {instead}"
        )


def _processes():
    """How many processes are in the process group, or, without one, were started by `torchrun`."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1)) if dist.is_torchelastic_launched() else 1


def digest(*values: Any) -> str:
    """A sha256 of numbers, texts and tensors, in lists and dicts of any nesting; of other objects,
    of their type; of a DTensor, of which each rank has another part, of its shape and placement.
    """
    total = hashlib.sha256()

    def add(value):
        if isinstance(value, Mapping):
            value = [part for pair in value.items() for part in pair]
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value)
        if isinstance(value, (list, tuple)):
            total.update(f"[{len(value)}".encode())
            for part in value:
                add(part)
        elif type(value).__name__ == "DTensor":
            add([str(value.dtype), tuple(value.shape), str(getattr(value, "placements", None))])
        elif isinstance(value, torch.Tensor):
            total.update(digest_of(value).encode())
        elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
            total.update(f"{type(value).__name__} {value!r}|".encode())
        else:
            total.update(f"{type(value).__module__}.{type(value).__qualname__}|".encode())

    add(values)
    return total.hexdigest()
