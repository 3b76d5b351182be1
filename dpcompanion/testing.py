"""What a filter, an accountant and a tracker of your own must offer and keep, and checks of it.

`train(filter=...)`, `NormTracker` and the engine take any object that offers the methods of these
protocols; it need not inherit from anything:

* `Filter`: says before each step to what gradients are clipped, so that nobody exceeds what was
  promised;
* `Accountant`: keeps account of what each example was charged;
* `Tracker`: follows a run of `train` and may clip (``trackers=[...]``).

`check_filter`, `check_accountant` and `check_tracker` work on copies of what they are given, which
must be new, and raise an AssertionError that names what does not hold. They try some strategies of
norms, and so can refute a promise but not prove it: that takes a theorem.

>>> from dpcompanion.filters import RenyiFilter
>>> check_filter(
...     RenyiFilter.for_epsilon(
...         4,
...         target_epsilons=1.0,
...         target_delta=1e-5,
...         sample_rate=0.1,
...         noise_multiplier=2.0,
...         max_grad_norm=0.5,
...     )
... )
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from dpcompanion._types import Array, Loss, State
from dpcompanion.accounting import Ledger, SampledGaussian, compute_epsilon
from dpcompanion.training import DPSGDPlan, train

_SLACK = 2e-3  # relative: what grids add to an epsilon, and what an account in float32 may lose


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> State:
        """All that is needed to go on."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from a `state_dict`."""
        ...


@runtime_checkable
class _OfExamples(_Stateful, Protocol):
    """n examples in runs with one rate, noise multiplier and clip norm; kept on `device`."""

    n: int
    sample_rate: float
    noise_multiplier: float
    max_grad_norm: float
    device: torch.device

    def epsilon(self, delta: float) -> torch.Tensor:
        """Of each example, (n,) float64, an upper bound: of a filter its promise, spent or not."""
        ...


@runtime_checkable
class Filter(_OfExamples, Protocol):
    """What `train(filter=...)`, `NormTracker(budget=...)` and `make_private_with_filter` take.

    What an example may take part with depends on its own norms only, and the promise on none.
    """

    def clip_norms(self, norms: Array) -> torch.Tensor:
        """The norms to which the next step must clip, (n,) float64 from 0 to the clip norm,
        charged; 0 for who takes no part.

        Args:
            norms: (n,) norms of the gradients, from 0 to `max_grad_norm`; ValueError for others.
        """
        ...


@runtime_checkable
class Accountant(_OfExamples, Protocol):
    """What `NormTracker(accountant, ...)` takes, such as `individual.IndividualAccountant`."""

    def charged(self, norms: Array) -> torch.Tensor:
        """What `record` charges for these norms, (n,): at least themselves or the clip norm, at
        most the clip norm.
        """
        ...

    def record(
        self, norms: Array, steps: int | torch.Tensor = 1, examples: Array | None = None
    ) -> None:
        """Charge these norms, of all or of some examples, for so many steps; ValueError for norms
        that are none.
        """
        ...


@runtime_checkable
class Tracker(_Stateful, Protocol):
    """What `train(trackers=[...])` takes, such as `NormTracker`; its state is in checkpoints."""

    def check_run(self, plan: DPSGDPlan, model: torch.nn.Module, loss: Loss, data: Any) -> None:
        """Called once before the run; ValueError for one that the tracker cannot follow."""
        ...

    def before_step(self) -> torch.Tensor | None:
        """The norms to clip to, (n,), or None for the plan's; the least of all trackers counts."""
        ...

    def after_step(self, indices: Array, norms: Array, *, clipped: Array | None = None) -> None:
        """Who was sampled, with which norms before and after clipping."""
        ...


def check_filter(filter: Filter, *, delta: float = 1e-5, steps: int = 60, seed: int = 0) -> None:
    """Whether a new filter keeps the protocol, and its promise for some strategies of norms.

    Tried: people at the full norm, at small ones, at random ones, and at ones that change; of each
    what the steps that were let through cost by privacy loss distributions, which no true promise
    is below.

    Args:
        filter: a new one, for two people at least; it is left as it is.
        delta: in (0, 1), at which the promise is read.
        steps: of a run; take so many that an example at the full norm runs out.
        seed: of the random norms.

    Raises:
        AssertionError: naming what does not hold.

    >>> class Generous:  # promises 0.1 and lets all through
    ...     n, sample_rate, noise_multiplier, max_grad_norm, device = (
    ...         2,
    ...         0.1,
    ...         1.0,
    ...         1.0,
    ...         torch.device("cpu"),
    ...     )
    ...
    ...     def clip_norms(self, norms):
    ...         norms = torch.as_tensor(norms, dtype=torch.float64)
    ...         if norms.shape != (2,) or not bool(((norms >= 0) & (norms < math.inf)).all()):
    ...             raise ValueError("norms")
    ...         return norms.clone()
    ...
    ...     def epsilon(self, delta):
    ...         return torch.full((2,), 0.1, dtype=torch.float64)
    ...
    ...     def state_dict(self):
    ...         return {}
    ...
    ...     def load_state_dict(self, state):
    ...         pass
    >>> check_filter(Generous())
    Traceback (most recent call last):
        ...
    AssertionError: epsilon must be what no run exceeds, but at full norms 60 steps cost 5.57 where
    0.1 was promised
    """
    _check_offers(filter, Filter)
    promised = _epsilons(filter, delta)
    most, n = filter.max_grad_norm, filter.n
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(steps, n, generator=generator, dtype=torch.float64) * most
    moving = most * (torch.arange(steps)[:, None] % 5 == 0).double().expand(steps, n).clamp(min=0.2)
    strategies = {
        "full norms": torch.full((steps, n), most, dtype=torch.float64),
        "small norms": torch.full((steps, n), 0.2 * most, dtype=torch.float64),
        "random norms": random,
        "norms that change": moving,
    }
    for name, norms in strategies.items():
        one = copy.deepcopy(filter)
        taken = torch.stack([_limits(one, row) for row in norms])
        _say(
            torch.equal(_epsilons(one, delta), promised),
            "epsilon must be the same before and after a run",
        )
        for i in range(n):
            cost = _cost(filter, taken[:, i], delta)
            _say(
                cost <= float(promised[i]) * (1 + _SLACK) + 1e-9,
                f"epsilon must be what no run exceeds, but at {name} {steps} steps cost {cost:.3g} "
                f"where {float(promised[i]):.3g} was promised",
            )
    # Others' norms change nothing for the first person.
    lonely, beside = copy.deepcopy(filter), copy.deepcopy(filter)
    for row in random:
        other = row.clone()
        other[1:] = most - other[1:]
        alike = torch.equal(_limits(lonely, row)[:1], _limits(beside, other)[:1])
        _say(
            alike,
            "clip_norms must give an example what its own norms ask for, but others' changed it",
        )
    nobody = _limits(copy.deepcopy(filter), torch.zeros(n, dtype=torch.float64))
    _say(not bool(nobody.any()), "clip_norms must give 0 for norms of 0")
    _check_refuses(lambda norms: copy.deepcopy(filter).clip_norms(norms), "clip_norms", n)
    _check_goes_on(filter, lambda one, row: _limits(one, row), random)


def check_accountant(
    accountant: Accountant, *, delta: float = 1e-5, steps: int = 60, seed: int = 0
) -> None:
    """Whether an accountant keeps the protocol, under-stating no cost of constant and random norms.

    Args:
        accountant: a new one, for two people at least; it is left as it is.
        delta: in (0, 1).
        steps: of a run.
        seed: of the random norms.

    Raises:
        AssertionError: naming what does not hold.

    >>> from dpcompanion.individual import IndividualAccountant
    >>> check_accountant(
    ...     IndividualAccountant(3, sample_rate=0.1, noise_multiplier=2.0, max_grad_norm=0.5)
    ... )
    """
    _check_offers(accountant, Accountant)
    most, n = accountant.max_grad_norm, accountant.n
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(steps, n, generator=generator, dtype=torch.float64) * most
    for norms in (
        random,
        torch.full_like(random, most),
        torch.full_like(random, 3 * most),
        0.2 * random.clamp(max=0.1),
    ):
        charged = copy.deepcopy(accountant).charged(norms[0])
        enough = charged.cpu().double() >= norms[0].clamp(max=most) * (1 - 1e-6)
        _say(bool(enough.all()), "charged must be at least the norms, up to the clip norm")
        one = copy.deepcopy(accountant)
        for row in norms:
            one.record(row)
        found = _epsilons(one, delta)
        for i in range(n):
            cost = _cost(accountant, norms[:, i].clamp(max=most), delta)
            _say(
                float(found[i]) >= cost * (1 - _SLACK) - 1e-9,
                f"epsilon must not under-state, got {float(found[i]):.4g} where {steps} steps cost "
                f"{cost:.4g}",
            )
        one.record(norms[0])
        _say(
            bool((_epsilons(one, delta) >= found * (1 - _SLACK)).all()),
            "epsilon must not fall with a further step",
        )
    alone = copy.deepcopy(accountant)
    for row in random:
        alone.record(row[:1], examples=[0])
        alone.record(torch.zeros(n - 1, dtype=torch.float64), examples=list(range(1, n)))
    own, all_ = _epsilons(alone, delta), copy.deepcopy(accountant)
    all_.record(random[0], steps=steps)
    constant = compute_epsilon(
        sample_rate=accountant.sample_rate,
        noise_multiplier=accountant.noise_multiplier * most / float(random[0, 0]),
        steps=steps,
        delta=delta,
    )
    _say(
        float(_epsilons(all_, delta)[0]) >= constant * (1 - _SLACK),
        "record must charge norms for all of its steps",
    )
    _say(
        not bool(own[1:].any()),
        "record must charge nothing for norms of 0, and examples for their own norms only",
    )
    _check_refuses(
        lambda norms: copy.deepcopy(accountant).record(norms), "record", n, infinite=True
    )

    def step(one, row):
        one.record(row)
        return _epsilons(one, delta)

    _check_goes_on(accountant, step, random[:8])


def check_tracker(
    tracker: Tracker, plan: DPSGDPlan, model: torch.nn.Module, loss: Loss, data: Any
) -> None:
    """Whether a tracker keeps the protocol for a few steps of `train`, and goes on from its state.

    Args:
        tracker: a new one, made for model, loss and data; all four are copied together.
        plan, model, loss, data: of the run.

    Raises:
        AssertionError: naming what does not hold.

    >>> from dpcompanion.training import NormTracker, cross_entropy
    >>> plan = DPSGDPlan(
    ...     n=8, sample_rate=0.5, steps=4, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2
    ... )
    >>> model, data = torch.nn.Linear(2, 2), (torch.randn(8, 2), torch.arange(8) % 2)
    >>> check_tracker(
    ...     NormTracker.for_plan(plan, model, cross_entropy, data), plan, model, cross_entropy, data
    ... )
    """
    _check_offers(tracker, Tracker)
    seen = []

    class Watched:
        """The tracker, between two copies of it, looked at."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

        def before_step(self):
            limits = self.inner.before_step()
            if limits is not None:
                _check_limits(
                    torch.as_tensor(limits),
                    plan.n,
                    float(torch.as_tensor(plan.max_grad_norm).max()),
                )
            seen.append(limits)
            return limits

    own, trained, rows = copy.deepcopy((tracker, model, data))
    fresh = copy.deepcopy((own, trained, rows))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    short = dataclasses.replace(plan, steps=min(plan.steps, 3))
    train(
        trained,
        loss,
        rows,
        short,
        optimizer=optimizer,
        seed=0,
        trackers=[Watched(own)],
        progress=False,
    )
    _say(len(seen) == short.steps, f"before_step must be called once a step, got {len(seen)} calls")
    other, again, _ = fresh
    again.load_state_dict(trained.state_dict())
    other.load_state_dict(own.state_dict())
    first, second = own.before_step(), other.before_step()
    same = (first is None and second is None) or (
        first is not None and second is not None and torch.equal(first, second)
    )
    _say(
        same,
        "load_state_dict must go on where state_dict was taken, but the next step's norms differ",
    )


def _say(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _check_offers(given, protocol):
    missing = sorted(name for name in _names(protocol) if not hasattr(given, name))
    _say(
        not missing,
        f"{type(given).__name__} must offer {', '.join(missing)} to be a {protocol.__name__}",
    )
    if "n" in _names(protocol):
        _say(given.n >= 2, f"n must be 2 at least for a check, got {given.n}")
        _say(0 < given.sample_rate <= 1, f"sample_rate must lie in (0, 1], got {given.sample_rate}")


def _names(protocol):
    own = {
        name
        for base in protocol.__mro__
        for name in (*vars(base), *getattr(base, "__annotations__", {}))
    }
    return {name for name in own if not name.startswith("_")}


def _epsilons(one, delta):
    found = one.epsilon(delta)
    _say(
        isinstance(found, torch.Tensor), f"epsilon must give a tensor, got a {type(found).__name__}"
    )
    found = found.detach().cpu().double()
    _say(found.shape == (one.n,), f"epsilon must have shape ({one.n},), got {tuple(found.shape)}")
    _say(bool((found >= 0).all()), "epsilon must be at least 0")
    return found


def _limits(filter, norms):
    given = norms.clone()
    found = filter.clip_norms(given)
    _say(torch.equal(given, norms), "clip_norms must leave the norms that it is given as they are")
    _say(
        isinstance(found, torch.Tensor),
        f"clip_norms must give a tensor, got a {type(found).__name__}",
    )
    kept = found.detach().cpu().double().clone()
    _check_limits(kept, filter.n, filter.max_grad_norm)
    found.zero_()  # a caller may: it must not be the filter's own
    return kept


def _check_limits(limits, n, most):
    _say(
        limits.shape == (n,), f"norms to clip to must have shape ({n},), got {tuple(limits.shape)}"
    )
    inside = bool(((limits >= 0) & (limits <= most * (1 + 1e-6))).all())
    _say(inside, f"norms to clip to must lie between 0 and the clip norm {most:g}")


def _cost(run, norms, delta):
    """The epsilon of steps with these norms, fixed beforehand, by privacy loss distributions."""
    distinct, counts = norms[norms > 0].unique(return_counts=True)
    if len(distinct) > 64:  # rounded down: the costs of these are below
        grid = (norms[norms > 0] / run.max_grad_norm * 64).floor() / 64 * run.max_grad_norm
        distinct, counts = grid[grid > 0].unique(return_counts=True)
    noise = run.noise_multiplier * run.max_grad_norm
    return _cost_of(
        run.sample_rate, tuple(zip((noise / distinct).tolist(), counts.tolist())), delta
    )


@functools.lru_cache(maxsize=64)
def _cost_of(sample_rate, steps, delta):
    ledger = Ledger([SampledGaussian(sample_rate, noise, count) for noise, count in steps])
    error = ledger.error(delta)
    return 0.0 if error == math.inf else max(ledger.epsilon(delta) - error, 0.0)


def _check_refuses(call: Callable, name: str, n: int, infinite: bool = False) -> None:
    good = torch.zeros(n, dtype=torch.float64)
    wrong = {"negative": good - 1, "not a number": good + math.nan, "of another shape": good[:-1]}
    for kind, norms in (wrong | ({"infinite": good + math.inf} if infinite else {})).items():
        try:
            call(norms)
        except ValueError:
            continue
        _say(False, f"{name} must refuse norms that are {kind} with a ValueError")


def _check_goes_on(given, step, rows):
    first, second = copy.deepcopy(given), copy.deepcopy(given)
    half = len(rows) // 2
    for row in rows[:half]:
        step(first, row)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for row in rows[half:]:
        same = torch.equal(step(first, row), step(second, row))
        _say(
            same,
            "load_state_dict must go on where state_dict was taken, but what comes next differs",
        )
