"""An exhibit's state: what its records hold beside the print, what they lack, what follows.

An exhibit is *reproduced* if every number that it prints was recomputed at the paper's scale and
matches or comes close, and every claim that was put to the test holds; *in part* if some do, or if
the record is without a data set or a network that the exhibit shows; *contradicted* if none does
and something disagrees; *undecided* if all claims are open, if only a chapter's quick run shows
them, or if what disagrees are stand-ins or runs whose settings are not printed; *wrong in the
paper* if something that it prints is proved wrong (the rest is counted beside it); *vacuous* if its
statement holds whatever its numbers are, and so says nothing; *out of reach*, in place of undecided
and not run, if it needs data, weights or days of computing that cannot be had here; *not run*
otherwise. Findings of our own, and refutations, are counted apart and make nothing reproduced.
Numbers of a stand-in, a record with none of the exhibit's networks or none of its data, count as
not run, or as out of reach (`published.Exhibit.is_beyond`). What no experiment computes, such as a
lemma, can be checked by tests, which `published` names.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpcompanion.reproduction import experiments, published, records
from dpcompanion.reproduction.comparison import Comparison, compare

STATES = {
    "reproduced": "recomputed at the paper's scale, some with fewer seeds; every number matches or"
    " is close, every claim of the paper holds",
    "in part": "some numbers or claims agree; or only some of its data and networks, or stand-ins"
    " for them, were run",
    "undecided": "no number or claim agrees so far: there are too few runs, or only a live one, or"
    " runs that disagree are stand-ins, or of a part of the training, or have settings that the"
    " paper does not print",
    "contradicted": "recomputed, something disagrees, and nothing agrees",
    "wrong in the paper": "something that it prints is proved wrong; the rest is counted beside it",
    "vacuous": "its statement, as printed, holds whatever the numbers in it are, and so says"
    " nothing; nothing is wrong",
    "out of reach": "undecided, and needs data, weights or days of computing that cannot be had"
    " here",
    "not run": "with what it would need",
}

#: What numbers without a value of ours are called: those that could be run, and those that need
#: what cannot be had here.
NOT_RUN = ("not run", "out of reach")


def values_of(
    exhibit: published.Exhibit, record: records.Record | None, parts: Iterable[records.Record] = ()
) -> tuple[dict[str, Any], set[str]]:
    """What an exhibit's own record and those of its parts hold: (name -> value, the names of what
    is a stand-in's).

    Where several hold a value, that of the paper's network counts before that of a stand-in, then
    that of the paper's scale, the exhibit's own, and that of more seeds.

    >>> exhibit = published.exhibit("individual-accounting/table-3")
    >>> values, of_stand_in = values_of(exhibit, records.find(exhibit.name))
    >>> of_stand_in == set(values)
    True
    """
    values, of_stand_in = {}, set()
    found = [*parts] if record is None else [*parts, record]
    for each in sorted(
        found,
        key=lambda one: (
            not experiments.is_stand_in(one, exhibit.name),
            one.preset == "paper",
            one is record,
            len(one.seeds),
        ),
    ):
        values |= each.values
        (
            of_stand_in.update
            if experiments.is_stand_in(each, exhibit.name)
            else of_stand_in.difference_update
        )(each.values)
    return values, of_stand_in


def numbers(
    exhibit: published.Exhibit, record: records.Record | None, parts: Sequence[records.Record]
) -> Comparison:
    """All numbers that an exhibit prints beside those of its record and parts (`values_of`)."""
    printed = {
        key: value
        for key, value in exhibit.flat().items()
        if not exhibit.is_given(key)
        and all(
            isinstance(entry, float) for entry in (value if isinstance(value, tuple) else (value,))
        )
    }
    values, of_stand_in = values_of(exhibit, record, parts)
    ours = {key: values[key] for key in printed if key in values}
    recorded = bool(parts) or (record is not None and record.preset == "paper")
    return compare(
        exhibit.name,
        keys=printed,
        stand_in=of_stand_in,
        recorded=ours if recorded else None,
        live=None if recorded else ours,
    )


def runs_live(exhibit: published.Exhibit) -> bool:
    """Whether a quick run computes an exhibit, or what a claim of the paper is judged by."""
    claims = [
        criterion.of
        for criterion in experiments.criteria(exhibit.name)
        if criterion.kind == "claim"
    ]
    return any(
        name in experiments.names() and "quick" in experiments.get(name).presets
        for name in (exhibit.name, *claims)
    )


def missing(exhibit: published.Exhibit, found: Iterable[records.Record]) -> tuple[str, ...]:
    """The exhibit's data sets and networks without a record, and what else it lacks; accounts alone
    miss nothing.
    """
    found = [record for record in found if record.data]
    has = {entry["name"] for record in found for entry in record.data}
    has |= {name for record in found for name in experiments.networks(record)}
    return (
        (
            *(part for part in (*exhibit.data, *exhibit.networks) if part not in has),
            *filter(None, [exhibit.lacks]),
        )
        if found
        else ()
    )


def shortened(exhibit: published.Exhibit, found: Iterable[records.Record]) -> tuple[str, ...]:
    """What shortened runs among these are of, if data or networks would be missing without them."""
    found = list(found)
    whole = [record for record in found if not published.exhibit(record.name).shortened]
    words = dict.fromkeys(
        filter(None, (published.exhibit(record.name).shortened for record in found))
    )
    return () if whole and missing(exhibit, whole) == missing(exhibit, found) else tuple(words)


def not_run(
    exhibit: published.Exhibit, record: records.Record | None, parts: Iterable[records.Record]
) -> tuple[str, ...]:
    """The tasks that an exhibit's own record leaves out, and no part has, and the parts that lack
    their record while another on the same data has its own; another exhibit's record may leave out
    what this does not show.
    """
    if record is None or record.name != exhibit.name:
        return ()
    parts = list(parts)
    has = {entry["name"] for part in parts for entry in part.data}
    whole = [part.name for part in parts]
    tasks = record.config.get("tasks", {})
    halves = [
        part.title
        for part in published.parts(exhibit.name)
        if part.name not in whole and not part.shortened and part.data and {*part.data} <= has
    ]
    left = [
        task
        for task in record.values.get("not_run", ())
        if not any(_covers(part, task, tasks.get(task, {}).get("model")) for part in parts)
    ]
    return (*left, *halves)


def _covers(part: records.Record, task: str, network: str | None) -> bool:
    """Whether a part is on a task's data, and with its network where one is named."""
    on_its_data = any(entry["name"] == task for entry in part.data)
    return on_its_data and network in (None, *experiments.networks(part))


def state(
    exhibit: published.Exhibit,
    numbers: Mapping[str, int],
    held: Mapping[str, int],
    record: records.Record | None,
    *,
    some_tasks: bool,
    live: bool,
) -> str:
    """The state that follows, a word of `STATES`.

    Args:
        exhibit: what stands.
        numbers: verdict -> how many of its numbers.
        held: {"holds": ..., "fails": ..., "undecided": ...} of the paper's claims.
        record: that it is judged by, or None.
        some_tasks: whether there is something left of it that no record has.
        live: whether a page of the book shows a quick run of it.

    >>> exhibit = published.exhibit("individual-accounting/table-3")
    >>> for held in ({"holds": 1, "fails": 1}, {"fails": 1}, {"undecided": 1}, {}):
    ...     print(state(exhibit, {}, held, None, some_tasks=False, live=False))
    in part
    contradicted
    undecided
    not run
    """
    if exhibit.vacuous:
        return "vacuous"
    if exhibit.wrong and (record is not None or "statement" in exhibit.wrong):
        return "wrong in the paper"
    open_still = "out of reach" if exhibit.needs else "undecided"
    good = sum(numbers.get(word, 0) for word in ("matches", "close")) + held.get("holds", 0)
    bad = numbers.get("differs", 0) + held.get("fails", 0)
    undecided = held.get("undecided", 0)
    if good + bad + undecided == 0:
        if exhibit.tests:
            return "reproduced"
        return open_still if live or exhibit.needs else "not run"
    # A record of some of the paper's tasks neither reproduces nor contradicts it.
    if good == 0:
        return "contradicted" if bad and not (some_tasks or exhibit.unprinted) else open_still
    whole = (
        record is not None
        and record.preset == "paper"
        and not some_tasks
        and not any(numbers.get(word) for word in NOT_RUN)
    )
    return "reproduced" if bad + undecided == 0 and whole else "in part"
