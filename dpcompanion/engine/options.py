"""What both ways to make a module private take alike, by keyword and with a default.

>>> Settings(loss_reduction="sum").loss_reduction
'sum'
"""

import dataclasses
from collections.abc import Sized
from typing import Any, TypedDict, cast

import torch
from torch.utils.data import default_collate

from dpcompanion import _checks
from dpcompanion.idp.groups import budgets_for
from dpcompanion.training.collating import Reader
from dpcompanion.training.people import Ownership, PersonItems


class Options(TypedDict, total=False):
    """Keywords of `make_private_with_budgets` and `make_private_with_filter`, explained there."""

    batch_first: bool
    loss_reduction: str
    wrap_model: bool
    prove: bool
    trust_loss: bool
    people: Any
    at_most: int | None
    unit: str | None


def settings_of(method, options):
    """The options of a method of the engine; a TypeError, in its name, for one that it does not
    take.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"{method}() got an unexpected keyword argument {unknown[0]!r}; beside those in its "
            f"signature it takes {', '.join(known)}"
        )
    return Settings(**options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The same with their defaults."""

    batch_first: bool = True
    loss_reduction: str = "mean"
    wrap_model: bool = True
    prove: bool = True
    trust_loss: bool = False
    people: Any = None
    at_most: int | None = None
    unit: str | None = None

    def __post_init__(self):
        for name in ("batch_first", "wrap_model", "prove", "trust_loss"):
            _checks.one_of(name, getattr(self, name), (True, False))

    def units_of(self, loader: Any, mode: str) -> "Units":
        """What the units of privacy are that a loader's items belong to.

        Raises:
            ValueError: for `people` without `at_most`, of another number of items, or in a mode
                that cannot take them.
        """
        rows, people, at_most = len(cast(Sized, loader.dataset)), self.people, self.at_most
        given = isinstance(people, Ownership)
        if (people is not None and not given) != (at_most is not None):
            raise ValueError(
                "people and at_most must be given both, or neither, as with what by_person gives, "
                f"which says at_most itself, got people={type(people).__name__} and "
                f"at_most={at_most!r}"
            )
        if self.unit is not None:
            _checks.unit("unit", self.unit)
        if people is None:
            return Units(rows, len(loader), self.unit or "example")
        if mode == "ghost":
            raise ValueError(
                "people must be None in ghost mode, which finds the norm of each row's gradient "
                f"and not that of the sum over a person's rows, got a {type(people).__name__}: use "
                "grad_sample_mode='hooks'"
            )
        if not self.batch_first:
            raise ValueError(
                f"people must be None where batch_first is False, got a {type(people).__name__}"
            )
        if given and len(people.owners) != rows:
            raise ValueError(
                f"people must name a person for each of the {rows} items, got {len(people.owners)}"
            )
        ownership = (
            people
            if given
            else Ownership(people, rows, at_most=_checks.whole_number("at_most", at_most, 1))
        )
        return Units(
            len(ownership),
            -(-len(ownership) // loader.batch_size),
            self.unit or "person",
            ownership,
        )


@dataclasses.dataclass(frozen=True)
class Units:
    """A run's n units of privacy: the items of its data set, or the persons whose rows they are.

    Args:
        n: how many there are.
        steps_per_epoch: one over the mean rate at which each is sampled. It depends on their
            number, which is public, and never on that of their rows.
        unit: what one of them is called.
        ownership: whose each row is; None where each item is a unit.
    """

    n: int
    steps_per_epoch: int
    unit: str
    ownership: Ownership | None = None

    def budgets(self, target_epsilons: Any) -> torch.Tensor:
        """The budget of each unit (`idp.budgets_for`); a pandas Series is taken by name if they are
        persons, else as it stands.
        """
        if self.ownership is None:
            return budgets_for(_checks.unlabelled(target_epsilons), self.n)
        return budgets_for(target_epsilons, self.n, persons=self.ownership.persons)

    def examples(self, loader: Any) -> PersonItems:
        """The persons as data of `dpcompanion.training`, by which their norms are measured."""
        own = self.ownership
        if own is None:
            raise ValueError("people must be given, got None")
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        options: dict[str, Any] = {
            "at_most": own.at_most,
            "combine": own.combine,
            "persons": own.persons,
        }
        return PersonItems(
            Reader(loader.dataset, collate, "data_loader's collate_fn"),
            own.persons[own.owners],
            **options,
        )
