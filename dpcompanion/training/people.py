r"""Persons as the unit of privacy: a table with several rows a person, of which a run draws and
clips whole persons.

The gradient of person :math:`i` is that of one loss, the mean (or the sum) of the losses of at most
k of their rows,

.. math::
    \ell_i(w) = \frac{1}{|R_i|} \sum_{r \in R_i} \ell(w; x_r, y_r),
    \qquad R_i \subseteq \text{rows of } i, |R_i| \le k,

and it is clipped once. A Poisson draw takes persons, not rows. So the sum of clipped gradients
moves by at most C if all rows of one person are added or removed, however many they are, and
everything that is said of examples (plans, budgets, accounts, filters, statements) holds of
persons: n is their number, and histories, accounts and filters say "person", or what
`DPSGDPlan(unit="patient")` calls them. Were rows the examples, a person with ten of them would
enter a run ten times and be charged for one.

Of a person with more than k rows, k are sampled afresh, uniformly and without replacement, each
time the person is sampled, by the run's own stream. Over a run all rows are used, which a choice
made once would not do. The account needs no law of this choice, but its random numbers
must be as secret as the draws: for every fixed choice a person moves a sum by at most their clip
norm, the choice for the others has one law with the person and without, and the divergence of two
mixtures over the same choices is at most the largest of its parts (joint convexity). With
individual clipping (`NormTracker`) a person is clipped to the norm that was measured at a choice of
their rows and charged, at whatever rows they take part with.

Memory: a draw is held padded to its longest person, at most k rows. The network computes on the
rows that there are, not on the padding; only where the model draws at random (dropout) or is
differentiated by `torch.func` (method "func") is the padding computed too. The data are held once,
as they were given.

Rows that belong to several persons (a message and those whom it is from and to) are refused: to
clip one owner's gradient does not bound what the others change. Give such a row to one person, and
leave it out of the others'.

Three patients, one with three visits and one with none:

>>> from dpcompanion.training import DPSGDPlan, cross_entropy, train
>>> visits, ill = torch.eye(4), torch.tensor([0, 1, 1, 0])
>>> data = by_person(
...     visits, ill, ["Ann", "Bob", "Ann", "Ann"], at_most=2, persons=["Ann", "Bob", "Cyd"]
... )
>>> len(data), data.counts.tolist()
(3, [3, 1, 0])
>>> plan = DPSGDPlan(
...     n=len(data), sample_rate=0.5, steps=10, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-2
... )
>>> model = torch.nn.Linear(4, 2)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> train(model, cross_entropy, data, plan, optimizer=optimizer, seed=0).batch_sizes.max() <= 3
tensor(True)
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dpcompanion import _checks
from dpcompanion._types import Array
from dpcompanion.gradients import proof, traces
from dpcompanion.gradients.batches import Batch, tree_of
from dpcompanion.gradients.items import check_batched, check_distinct, check_forgets_items
from dpcompanion.training.checkpoints import digest_of
from dpcompanion.training.collating import Reader, call, called, targets_in
from dpcompanion.training.owners import is_array, owners_of, rows_of

COMBINED = ("mean", "sum")

#: The name, in the batches of persons, of which of their places hold a row, (n, k) booleans.
PRESENT = "place holds a row"


def by_person(
    x: Any,
    y: Array | None = None,
    people: Any = None,
    *,
    at_most: int,
    combine: str = "mean",
    persons: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> "OfPersons":
    """Data for `train`, a `NormTracker` and `gradient_norms` with persons as examples.

    See the module's text.

    Args:
        x, y: tensors, arrays or pandas columns of the rows, in any order. Floats stay in their
            precision, which must be the model's (``x.astype("float32")``). Or x alone, a map-style
            data set of rows, which are read when their person is sampled.
        people: (rows,), who each row belongs to: a list, array or pandas column, categorical too,
            of whole numbers, of texts, or of hashable names of one other type that are compared by
            value, such as dates or UUIDs.
        at_most: k, how many rows of a person enter a step at most; above 0.
        combine: "mean" or "sum", what a person's loss is of those of their rows.
        persons: every person's name, each once, in the order of accounts and budgets; by default
            those of `people`, sorted, if they have an order, and a categorical column by its names,
            not by the order of its categories. Persons without a row are given here: they take part
            with a gradient of zero.
        collate_fn: with a data set, list of rows -> batch, as in `train`.

    Returns:
        Data of as many examples as there are persons, with `persons`, their names (n,) in the order
        of every account, `counts`, how many rows each has, and `per_person(column)`, which makes
        one number a person of a column of the table, such as the budgets that persons consented to
        (ValueError for a person whose rows disagree).

    Raises:
        ValueError: naming the argument; for a row without a person, with several persons (a tuple
            or list), or of one who is not in `persons`.
    """
    options = {"at_most": at_most, "combine": combine, "persons": persons}
    if people is None:
        raise ValueError("people must name a person for each row, got None")
    if y is not None or is_array(x):
        if collate_fn is not None:
            raise ValueError("collate_fn must go with a data set of rows, got x and y beside it")
        return Persons(x, y, people, **options)
    if not hasattr(x, "__getitem__") or not hasattr(x, "__len__") or not len(x):
        raise ValueError(
            "x must be an array or a map-style data set of one row at least, got a "
            f"{type(x).__name__}"
        )
    check_batched(x, "x")
    check_forgets_items(x, "x")
    data = PersonItems(Reader(x, collate_fn), people, **options)
    check_distinct(x, "x", data.owners)
    return data


class Ownership:
    """Whose each row is, and which rows of a person enter a step: what all data of persons share.

    Args:
        people: (rows,), who each row belongs to.
        rows: how many there are.
        at_most, combine, persons: as of `by_person`.

    Attributes:
        persons: the names, (n,), in the order of every account and budget.
        counts: how many rows each has, (n,) int64.
        owners: whose each row is, (rows,) int64, as indices of `persons`.
        at_most, combine: as given.

    >>> visits = Ownership(["Ann", "Bob", "Ann"], 3, at_most=2)
    >>> len(visits), [rows.tolist() for rows in visits.drawn(torch.tensor([0, 1]))]
    (2, [[[0, 2], [1, 1]], [[True, True], [True, False]]])
    """

    def __init__(
        self, people: Any, rows: int, *, at_most: int, combine: str = "mean", persons: Any = None
    ):
        self.at_most = _checks.whole_number("at_most", at_most, 1)
        self.combine = _checks.one_of("combine", combine, COMBINED)
        self.persons, self.owners = owners_of(people, rows, persons)
        self.counts, self._order, self._starts = grouped(self.owners, len(self.persons))

    def per_person(self, values: Array) -> torch.Tensor:
        """A column of the table, (rows,), as one number a person, (n,), such as the budgets that
        persons consented to.

        Raises:
            ValueError: for a person whose rows disagree, or who has none.

        >>> data = by_person(torch.zeros(3, 1), torch.zeros(3), [7, 5, 7], at_most=1)
        >>> data.per_person([2.0, 1.0, 2.0])
        tensor([1., 2.], dtype=torch.float64)
        """
        return per_person(values, self.owners, self.persons)

    def drawn(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of some persons, at most k of each (`drawn_rows`)."""
        return drawn_rows(indices.cpu(), self.counts, self._order, self._starts, self.at_most)

    def __len__(self) -> int:
        return len(self.persons)


class OfPersons(Ownership, abc.ABC):
    """What `by_person` gives: data whose examples are persons, with `Ownership`'s attributes."""

    #: What one example is, in the words of plans and ledgers.
    unit = "person"

    @abc.abstractmethod
    def rows(self, indices: torch.Tensor) -> tuple[Batch, Batch]:
        """Inputs and targets of some persons, at most k rows of each, drawn from PyTorch's
        generator where there are more: two `Batch` of (persons, longest, ...), and which places
        hold a row.
        """

    def seen(self, model: torch.nn.Module, loss: Any) -> tuple[torch.nn.Module, Any]:
        """Model and loss, (outputs, targets) -> (rows,), as functions of persons."""
        return PersonNetwork(model), PersonLoss(loss, self.combine)

    def prove(self, model: torch.nn.Module, loss: Any) -> None:  # noqa: B027
        """Refuse rows that are mixed on the way into a batch; those of two tensors are not."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """What a checkpoint knows these data by."""

    def part(self, start: int, stop: int) -> tuple[Batch, Batch]:
        """The persons from `start` to before `stop`."""
        return self.rows(torch.arange(start, min(stop, len(self))))

    @functools.cached_property
    def probe(self) -> tuple[Batch, Batch]:
        """Persons to try model and method on: 64 that are spread over all of them, or fewer."""
        with traces.drawing_alike(torch.device("cpu")):
            torch.manual_seed(0)
            return self.rows(proof.rows_to_look_through(len(self)).sort().values)

    def _moved(self, **changes):
        """A copy with some attributes changed, that draws its probe anew."""
        moved = type(self).__new__(type(self))
        held = {
            name: value for name, value in vars(self).items() if name not in ("probe", "digest")
        }
        vars(moved).update(held | changes)
        return moved


class Persons(OfPersons):
    """Persons whose rows lie in two tensors, or in what `rows_of` makes one of."""

    def __init__(self, x, y, people, **options):
        if y is None:
            raise ValueError(
                f"y must hold the targets of the rows of x, a {type(x).__name__}, got None"
            )
        x, y = rows_of("x", x), rows_of("y", y)
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise ValueError(
                f"x and y must have as many rows, got shapes {tuple(x.shape)} and {tuple(y.shape)}"
            )
        self.x, self.y = x, y
        super().__init__(people, len(x), **options)

    def to(self, device: str | torch.device) -> "Persons":
        """The same with its rows on a device."""
        return self._moved(x=self.x.to(device), y=self.y.to(device))

    def rows(self, indices: torch.Tensor) -> tuple[Batch, Batch]:
        """See `OfPersons.rows`."""
        places, present = self.drawn(indices)
        return self._batch(self.x, places, present), self._batch(self.y, places, present)

    def _batch(self, rows, places, present):
        places, present = places.to(rows.device), present.to(rows.device)
        found = (
            rows[places.flatten()] if len(rows) else rows.new_zeros(places.numel(), *rows.shape[1:])
        )
        found = found.unflatten(0, places.shape)
        # A person without a row must not be given another's.
        nobody = (places < 0).view(*places.shape, *[1] * (found.ndim - 2))
        found = found.masked_fill(nobody, 0)
        return Batch.of(found).beside(**{PRESENT: present})

    @functools.cached_property
    def digest(self) -> str:
        """What a checkpoint knows these data by."""
        settings = torch.tensor([self.at_most, COMBINED.index(self.combine), len(self)])
        return digest_of(self.x, self.y, self.owners, settings)


class PersonItems(OfPersons):
    """Persons whose rows a data set gives, collated when they are sampled.

    Args:
        reader: a `Reader` of the rows.
        people, options: as of `by_person`.
    """

    def __init__(self, reader: Reader, people: Any, **options: Any):
        super().__init__(people, len(reader.dataset), **options)
        self.reader, self.device = reader, torch.device("cpu")

    def to(self, device: str | torch.device) -> "PersonItems":
        """The same, given on a device."""
        return self._moved(device=torch.device(device))

    def prove(self, model: torch.nn.Module, loss: Any) -> None:
        """Refuse a `collate_fn` that mixes rows."""
        self.reader.prove(*called(model, loss))

    def rows(self, indices: torch.Tensor) -> tuple[Batch, Batch]:
        """See `OfPersons.rows`."""
        if not len(indices):
            x, y = self.probe
            return x[:0], y[:0]
        places, present = self.drawn(indices)
        # In the place of who has none any row stands, which no loss counts: an empty one may be
        # none to the model.
        wanted, where = places.clamp(min=0).unique(return_inverse=True)
        x, y = (
            Batch.of(tree_of(part))[where].beside(**{PRESENT: present}).to(self.device)
            for part in self.reader.read(wanted.tolist())
        )
        return x, y

    @functools.cached_property
    def digest(self) -> str:
        """What a checkpoint knows these data by: whose rows they are, and targets of 64 persons."""
        settings = torch.tensor([self.at_most, COMBINED.index(self.combine), len(self)])
        x, y = self.probe
        return digest_of(self.owners, settings, *targets_in(x, y))


class PersonNetwork(torch.nn.Module):
    """A model of rows as one of persons: `Batch` of (persons, k, ...) to outputs (persons, k, ...).

    Args:
        model: the module, whose parameters are called "model.<name>" here, and which is called as
            `dpcompanion.training.collating.call` does. Of its outputs those count that have the
            rows first.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.training = model.training

    def dpcompanion_grouping(self, x: Batch) -> "Grouping":
        """Where the rows are that `forward` computes on."""
        return Grouping(x[PRESENT], everything=draws_at_random(self.model))

    def forward(self, x: Batch) -> Any:
        """Outputs of all rows, 0 where there is none."""
        group = self.dpcompanion_grouping(x)
        outputs = call(self.model, x.map(group.take))
        kept = [
            t
            for t in tree_leaves(outputs)
            if isinstance(t, torch.Tensor) and t.ndim and len(t) == group.rows
        ]

        def spread(t):
            return group.spread(t) if not kept or t.ndim and len(t) == group.rows else None

        return tree_map_only(torch.Tensor, spread, outputs)


class PersonLoss:
    """A loss of rows as one of persons: the mean or sum over each one's rows, 0 for who has none.

    Args:
        loss: (outputs, targets of rows) -> (rows,).
        combine: "mean" or "sum".
    """

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor], combine: str):
        self.loss, self.combine = loss, combine

    def __call__(self, outputs: Any, y: Batch) -> torch.Tensor:
        present = y[PRESENT]
        group = Grouping(present, everything=False)
        outputs = tree_map_only(torch.Tensor, group.take, outputs)
        losses = self.loss(outputs, y.map(group.take).tree)
        if not isinstance(losses, torch.Tensor) or losses.shape != (group.rows,):
            got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"loss must return one number a row, shape ({group.rows},), got {got}")
        each = torch.where(present, group.spread(losses), 0)
        total = each.sum(1)
        return total / present.sum(1).clamp(min=1) if self.combine == "mean" else total


class Grouping:
    """Which rows of a padded (persons, k) are there, and how rows go into that form and back.

    Under `torch.func.vmap`, and with `everything`, all rows are taken, those of the padding too.

    >>> group = Grouping(torch.tensor([[True, False], [True, True]]))
    >>> group.take(torch.tensor([[1, 0], [2, 3]])), group.spread(torch.tensor([1, 2, 3])).tolist()
    (tensor([1, 2, 3]), [[1, 0], [2, 3]])
    """

    def __init__(self, present: torch.Tensor, everything: bool = False):
        self.present, self.places = present, None
        if not everything and not _mapped_over(present):
            places = present.flatten().nonzero()[:, 0]
            # A network is given one row at least; the loss leaves it out.
            self.places = (
                places if len(places) else torch.zeros(1, dtype=torch.int64, device=present.device)
            )
        #: How many rows are taken.
        self.rows = present.numel() if self.places is None else len(self.places)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """(persons, k, ...) to (rows, ...)."""
        flat = t.flatten(0, 1)
        return flat if self.places is None or self.rows == len(flat) else flat[self.places]

    def spread(self, t: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to (persons, k, ...), 0 where there is no row."""
        if not t.ndim or len(t) != self.rows:
            raise ValueError(
                f"model must keep its {self.rows} rows first, got outputs of shape {tuple(t.shape)}"
            )
        if self.places is not None and self.rows < self.present.numel():
            t = t.new_zeros(self.present.numel(), *t.shape[1:]).index_copy(0, self.places, t)
        return t.unflatten(0, self.present.shape)

    def uses(self, uses: list[Any]) -> list[Any]:
        """What a layer was given and got back for its rows, [(inputs, output gradients)], as uses
        by persons: the first row of each, then the second of each. Where there is no row both are
        0.
        """
        if self.present.all() and self.present.shape[1] == 1:
            return uses

        def padded(t):
            t = self.spread(t)
            return torch.where(self.present.view(*self.present.shape, *[1] * (t.ndim - 2)), t, 0)

        found = []
        for a, g in uses:
            a, g = padded(a), padded(g)
            found += [(a[:, place], g[:, place]) for place in range(self.present.shape[1])]
        return found


def _mapped_over(t):
    return torch._C._functorch.is_functorch_wrapped_tensor(t)  # pyright: ignore[reportAttributeAccessIssue]


def draws_at_random(model: torch.nn.Module) -> bool:
    """Whether a layer in training mode has a rate of dropout above 0, by whatever name."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or name == "p")
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
    )


def grouped(owners: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(counts (n,), rows by owner (rows,), where each owner's begin in these (n,)), int64."""
    counts = torch.bincount(owners, minlength=n)
    return counts, owners.argsort(stable=True), counts.cumsum(0) - counts


def drawn_rows(
    indices: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    at_most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of some persons, at most so many of each: ((persons, longest) int64, which are rows).

    Of who has more a uniform choice without replacement, from PyTorch's generator; of all others
    every row, in its order. What is no row repeats the person's first, and is -1 for who has none.
    """
    own = counts[indices]
    who = torch.arange(len(indices)).repeat_interleave(own)
    within = torch.arange(len(who)) - (own.cumsum(0) - own)[who]
    rows = order[starts[indices][who] + within]
    if (own > at_most).any():
        chance = torch.rand(len(who), dtype=torch.float64)
        key = torch.where(own[who] > at_most, chance, within.double() / own[who])
        by_chance = key.argsort(stable=True)
        rows = rows[by_chance[who[by_chance].argsort(stable=True)]]
    width = max(1, int(own.clamp(max=at_most).max())) if len(own) else 1
    kept = within < at_most
    present = torch.arange(width) < own[:, None]
    places = torch.full((len(indices), width), -1)
    if len(who):
        first = torch.full((len(indices),), -1)
        first[who[within == 0]] = rows[within == 0]
        places = first[:, None].expand(-1, width).clone()
        places[who[kept], within[kept]] = rows[kept]
    return places, present


def per_person(values: Array, owners: torch.Tensor, persons: Any) -> torch.Tensor:
    """One number a person, (n,) float64, from one a row, (rows,).

    Raises:
        ValueError: for a person whose rows disagree, or who has none.
    """
    try:
        values = torch.as_tensor(_checks.unlabelled(values)).to(torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"values must be one number a row, but {error}") from None
    if values.shape != owners.shape:
        raise ValueError(
            f"values must be one number a row, shape {tuple(owners.shape)}, got "
            f"{tuple(values.shape)}"
        )
    low, high = (
        torch.full((len(persons),), torch.nan, dtype=torch.float64).scatter_reduce(
            0, owners, values, reduction, include_self=False
        )
        for reduction in ("amin", "amax")
    )
    bad = ~(low == high)
    if bad.any():
        who = int(bad.nonzero()[0])
        rows = bool((owners == who).any())
        found = f"{low[who]:g} to {high[who]:g} in their rows" if rows else "no row, so none"
        raise ValueError(
            f"values must be one number a person, but {str(persons[who])!r} has {found}"
        )
    return low
