"""Who does a run's pieces: this process, others, a cluster, or several runs that share a folder.

    with processes(8): ...                    eight processes here; one that is lost costs its piece
    with joblib.parallel_config("dask"): ...  any back end of joblib: Dask, Ray, its own processes
    with share(2, 5): ...                     every fifth piece, from the second, beside other runs

`dpcompanion.reproduction.pieces` asks `each` to do its pieces, and says what it does not find when
all is done. A worker writes its piece itself, whole or not at all, into a folder that all share, so
what is lost with a worker is the piece that it was at; that one is given to another worker, twice
at most.

>>> import operator
>>> list(each(operator.neg, [1, 2, 3]))
[(1, -1), (2, -2), (3, -3)]
>>> with share(2, 3):
...     [mine(number) for number in range(6)]
[False, True, False, False, True, False]
"""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dpcompanion import _checks

#: How often a piece is tried whose workers are lost.
ATTEMPTS = 3
#: What a piece came to in a worker: (value, None) or (None, error).
Outcome = tuple[Any, Exception | None]
_PROCESSES: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "how many processes do the pieces, or None", default=None
)
_SHARE: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar(
    "(which share, of how many) is done here, or None", default=None
)


class Missing(RuntimeError):
    """Pieces that this run was to leave to others are not there: `names`."""

    def __init__(self, names: Sequence[str]):
        super().__init__(f"{len(names)} pieces are left to other runs: {', '.join(names)}")
        self.names = tuple(names)


@contextlib.contextmanager
def processes(number: int) -> Iterator[None]:
    """Within, pieces are done by this many processes; one does them here."""
    number = _checks.whole_number("jobs", number, 1)
    if number > 1:
        _joblib()
    token = _PROCESSES.set(number)
    try:
        yield
    finally:
        _PROCESSES.reset(token)


@contextlib.contextmanager
def share(which: int, of: int) -> Iterator[None]:
    """Within, only every `of`-th piece is done, from number `which` (1 to `of`); 0 is the share of
    who merely merges.

    What is neither done here nor found raises `Missing`.
    """
    _checks.whole_number("of", of, 1)
    if not 0 <= _checks.whole_number("which", which, 0) <= of:
        raise ValueError(f"which must be a whole number from 0 to {of}, got {which!r}")
    token = _SHARE.set((which, of))
    try:
        yield
    finally:
        _SHARE.reset(token)


def mine(number: int) -> bool:
    """Whether the piece of this number, from 0, is done here."""
    found = _SHARE.get()
    return found is None or found[0] == number % found[1] + 1


def _never(name: Any) -> bool:
    return False


def each(
    work: Callable[[Any], Any], names: Sequence[Any], already: Callable[[Any], bool] = _never
) -> Iterator[tuple[Any, Any]]:
    """(name, work(name)) for each name, as they are done; by whom, is said in the module's text.

    An exception that `work` raises in another process is raised here, when the others are done.

    Args:
        work: name -> what it comes to.
        names: a list.
        already: whether a name's work has left what it should, asked where a back end lost a worker
            and says no more; what has comes to None.

    Raises:
        RuntimeError: where three workers were lost with the same piece.
    """
    number = _PROCESSES.get()
    if number is None and len(names) > 1:
        with contextlib.suppress(ImportError):
            number = 0 if _joblib().effective_n_jobs(None) > 1 else 1
    if number in (None, 1) or not names:
        yield from ((name, work(name)) for name in names)
        return
    failed = []
    alone = _Alone(work)
    outcomes = _by_processes(alone, names, number) if number else _by_joblib(alone, names, already)
    for name, (value, error) in outcomes:
        if error is None:
            yield name, value
        else:
            failed.append(error)
    if failed:
        raise failed[0]


class _Alone:
    """A piece in a worker: (value, None), or (None, error); its own pieces stay in its process."""

    def __init__(self, work: Callable[[Any], Any]):
        self.work = work

    def __call__(self, name: Any) -> Outcome:
        with processes(1):
            try:
                return self.work(name), None
            except Exception as error:
                return None, error


def _by_processes(
    work: Callable[[Any], Outcome], names: Iterable[Any], number: int
) -> Iterator[tuple[Any, Outcome]]:
    """Each process is a pool of its own, since a pool that loses one process ends the others."""
    _joblib()
    from joblib.externals.loky import ProcessPoolExecutor

    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // number))
    waiting, running, idle, lost = collections.deque(names), {}, [], collections.Counter()
    try:
        while waiting or running:
            while waiting and len(running) < number:
                name = waiting.popleft()
                pool = (
                    idle.pop() if idle else ProcessPoolExecutor(1, env={"OMP_NUM_THREADS": threads})
                )
                running[pool.submit(work, name)] = name, pool
            for future in concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            ).done:
                name, pool = running.pop(future)
                try:
                    outcome = future.result()
                except concurrent.futures.process.BrokenProcessPool as error:
                    pool.shutdown(wait=False)
                    lost[name] += 1
                    if lost[name] == ATTEMPTS:
                        raise RuntimeError(f"{ATTEMPTS} workers were lost at {name}") from error
                    waiting.append(name)
                else:
                    idle.append(pool)
                    yield name, outcome
    finally:
        for pool in [*idle, *(pool for _, pool in running.values())]:
            pool.shutdown(wait=False, kill_workers=True)


def _by_joblib(
    work: Callable[[Any], Outcome], names: Sequence[Any], already: Callable[[Any], bool]
) -> Iterator[tuple[Any, Outcome]]:
    """Whatever back end of joblib is active; what it lost is given to it again."""
    joblib, fruitless, done = _joblib(), 0, set()
    generates = joblib.parallel.get_active_backend()[0].supports_return_generator
    while len(done) < len(names):
        missing = [name for name in names if name not in done]
        try:
            # Ray's back end gives all results at once, and none of them where a worker was lost.
            parallel = joblib.Parallel(
                batch_size=1,
                pre_dispatch="all",
                return_as="generator_unordered" if generates else "list",
            )
            for name, outcome in parallel(joblib.delayed(_named)(work, name) for name in missing):
                done.add(name)
                yield name, outcome
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except Exception as error:  # the back end's: what a piece raises comes back as a value
            some = len(done) > len(names) - len(missing)
            for name in missing:
                if name not in done and already(name):
                    done.add(name)
                    some = True
                    yield name, (None, None)
            fruitless = 1 if some else fruitless + 1
            if fruitless == ATTEMPTS:
                left = [name for name in names if name not in done]
                raise RuntimeError(
                    f"{ATTEMPTS} workers were lost, the last at one of {', '.join(left)}"
                ) from error


def _named(work: Callable[[Any], Outcome], name: Any) -> tuple[Any, Outcome]:
    return name, work(name)


def _joblib() -> Any:
    try:
        import joblib
    except ImportError:
        raise ImportError(
            "pieces are spread over processes by joblib, which is not installed: pip install joblib"
        ) from None
    return joblib
