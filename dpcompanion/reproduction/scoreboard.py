"""The scoreboard: how each exhibit of the five papers stands, from the published numbers and the records alone.

An exhibit is *reproduced* if every number that it prints was recomputed at the paper's scale and matches or comes
close, and every claim that was put to the test holds; *in part* if some do, if the record is without a data set or a
network that the exhibit shows, or if only a chapter's quick run shows them; *contradicted* if none does and something
disagrees; *undecided* if all claims are open, or what disagrees are stand-ins or runs whose settings are not printed;
*wrong in the paper* if something that it prints is proved wrong (the rest is counted beside it); *not run* otherwise.
Findings of our own, and refutations, are counted apart and make nothing reproduced.
Numbers of a stand-in, a record with none of the exhibit's networks, count as not run.
What no experiment computes, such as a lemma, can be checked by tests, which `published` names.
`Standing.to_do` says what is left to run of an exhibit, and how.

>>> board = standings("intrinsic-privacy")
>>> [one.state for one in board if one.exhibit.id == "claims-1-2"]
['reproduced']
>>> sum(counts(board).values()) == len(board)
True

An exhibit's *place* is its anchor on the paper's page of exhibits. Where that page has none, it is the section of a
chapter whose heading names it ("Figures 6 and 7", "Table III"), or else the first whose code asks for it by name.
"""

import dataclasses
import os
import pathlib
import re

from dpcompanion.reproduction import experiments, provenance, published, records
from dpcompanion.reproduction.comparison import Table, compare, tally

STATES = {
    "reproduced": "recomputed at the paper's scale; every number matches or is close, every claim of the paper holds",
    "in part": "some do; or on some of its data and networks, or stand-ins for them; or in a chapter's quick run only",
    "undecided": "none does so far: the runs are too few, or those that disagree are stand-ins, or have settings that"
    " are not printed",
    "contradicted": "recomputed, something disagrees, and nothing agrees",
    "wrong in the paper": "something that it prints is proved wrong; the rest is counted beside it",
    "not run": "with what it would need",
}
_ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4}
_KINDS = "figure|table|theorem|algorithm|claim|fact|corollary|lemma|definition"


@dataclasses.dataclass(frozen=True)
class Place:
    """A section of the book: the page, such as "book/papers/idp-sgd-exhibits", and an anchor on it."""

    page: str
    anchor: str


@dataclasses.dataclass(frozen=True, eq=False)
class Standing:
    """How an exhibit stands.

    Attributes:
        exhibit: the `published.Exhibit`.
        state: a word of `STATES`.
        numbers: verdict -> how many of its numbers.
        findings: {"holds": ..., "fails": ..., "undecided": ...} of the paper's claims.
        own, refutations: the same of results of ours, and of findings that refute the paper.
        record: the record that it is judged by, or None.
        missing: the data sets and networks that the exhibit shows and its record is without.
        stale: whether that record was made by other code or another configuration than today's.
        place: where the book shows it, or None.
        experiment: the `experiments.Experiment` that computes it, or None.
        parts: records of runs that computed a part of it each (`published.parts`), at full length.
        shortened: what alone it has, of data and networks that no record has for all of the paper's training.
    """

    exhibit: published.Exhibit
    state: str
    numbers: dict
    findings: dict
    own: dict
    refutations: dict
    record: records.Record | None
    missing: tuple
    stale: bool
    place: Place | None
    experiment: experiments.Experiment | None
    parts: tuple = ()
    shortened: tuple = ()

    @property
    def verdicts(self):
        """All counts in words, such as "12 match, 3 close, 2 hold, 6 not run; ours: 1 holds".

        >>> [one.verdicts for one in standings("per-instance-accounting") if one.exhibit.id == "algorithm-1"]
        ['against the paper: 1 holds']
        """
        return self._counted(_said)

    @property
    def marked(self):
        """The same with marks, such as "\u2713 12 match, \u2248 3 close"."""
        return self._counted(tally)

    def _counted(self, said):
        counts = {**self.numbers, **self.findings}
        counts["not run"] = counts.pop("not run", 0)
        parts = [said(counts)]
        parts += [
            f"{whose}: {said(found)}"
            for whose, found in (("ours", self.own), ("against the paper", self.refutations))
            if found
        ]
        return "; ".join(filter(None, parts))

    @property
    def basis(self):
        """What the state rests on, or what is needed to have one."""
        if self.exhibit.tests and not (self.numbers or self.findings):
            return "tests"
        if self.record is not None and self.state != "not run":
            parts = [f"{self.record.preset} record"]
            if experiments.is_stand_in(self.record, self.exhibit.name):
                parts[0] += " of a stand-in"
            if self.record.seeds:
                parts.append("one seed" if len(self.record.seeds) == 1 else f"{len(self.record.seeds)} seeds")
            if self.stale:
                parts.append("stale")
            parts += [f"with {part}" for part in self.shortened]
            if self.missing:
                parts.append(f"without {', '.join(self.missing)}")
            if self.exhibit.unprinted:
                parts.append("settings not printed")
            return ", ".join(parts)
        if self.state != "not run":
            return "quick run, live" if self.state == "in part" else "proof"
        return "ready to run" if self.experiment and "paper" in self.experiment.presets else "needs an experiment"

    @property
    def to_do(self):
        """What is left to run, and how: ("cifar10", "dpcompanion run ... --device cuda"), or None where nothing is.

        The second is a command, or says what has to be written first. The first says how long it takes, where that is
        known.
        """
        if self._left is None:
            return None
        what, how = self._left
        takes = [published.exhibit(name).takes for name in re.findall(r"dpcompanion run (\S+)", how)]
        return "; ".join([what, *filter(None, takes)]), how

    @property
    def _left(self):
        """`to_do` without times."""
        recorded = self.record is not None and self.record.preset == "paper"
        tasks = _not_run(self.exhibit, self.record, self.parts) if recorded else ()
        missing = ", ".join([*self.missing, *(f"more than {part}" for part in self.shortened)])
        if self.exhibit.tests or recorded and not (missing or tasks):
            return None
        gpu = self.exhibit.scale == "gpu"
        left = [
            part
            for part in published.parts(self.exhibit.name)
            if not part.shortened and part.name not in [record.name for record in self.parts]
        ]
        commands = [
            f"dpcompanion run {part.name} --preset paper{' --device cuda' if part.scale == 'gpu' else ''}"
            for part in left
        ]
        if left and not tasks and (missing or not recorded):
            return missing or ", ".join(self.exhibit.data), " && ".join(commands)
        if self.experiment is None or "paper" not in self.experiment.presets:
            needs = f" ({', '.join(('a GPU', *self.exhibit.data))})" if gpu else ""
            return (
                f"the paper's scale{needs}",
                f"needs {'an experiment' if self.experiment is None else 'a paper preset'}",
            )
        command = f"dpcompanion run {self.experiment.name} --preset paper{' --device cuda' if gpu else ''}"
        command = " && ".join([*commands, command])
        if not recorded:
            return f"all of it ({', '.join(self.exhibit.data)})" if self.exhibit.data else "all of it", command
        if not tasks and self.record.name != self.exhibit.name == self.experiment.name:
            return missing, command  # judged so far by the record of another
        if not tasks:
            return missing, f"needs {'a GPU and ' if gpu else ''}a configuration"
        needs = {name: task.get("needs") for name, task in self.record.config.get("tasks", {}).items()}
        return ", ".join(f"{name} ({needs[name]})" if needs.get(name) else name for name in tasks), command


def standings(paper=None, *, folder=None, book=None):
    """How the exhibits of a paper stand, or those of all, in the papers' order.

    Args:
        paper: the paper's slug; all papers by default.
        folder: of the records, see `records.results_folder`.
        book: the folder of the book's sources; that of the checkout, or of the wheel, by default.
    """
    exhibits = published.exhibits(paper)
    places = {slug: _places(slug, book) for slug in dict.fromkeys(exhibit.paper for exhibit in exhibits)}
    return [_standing(exhibit, folder, places[exhibit.paper].get(exhibit.id)) for exhibit in exhibits]


def standing(name, *, folder=None, book=None):
    """How one exhibit stands.

    >>> standing("intrinsic-privacy/claims-1-2").basis
    'paper record, one seed'
    """
    exhibit = published.exhibit(name)
    return _standing(exhibit, folder, _places(exhibit.paper, book).get(exhibit.id))


def counts(standings):
    """State -> how many exhibits, for all states."""
    return {state: sum(one.state == state for one in standings) for state in STATES}


def sums(standings):
    """What came out, over all exhibits: {"numbers": ..., "claim": ..., "own": ..., "refutes": ...}, word -> how many.

    >>> sums(standings("intrinsic-privacy"))["refutes"]
    {}
    """
    parts = {"numbers": "numbers", "claim": "findings", "own": "own", "refutes": "refutations"}
    found = {part: {} for part in parts}
    for one in standings:
        for part, attribute in parts.items():
            for word, count in getattr(one, attribute).items():
                found[part][word] = found[part].get(word, 0) + count
    return {part: {word: here[word] for word in published.VERDICTS if word in here} for part, here in found.items()}


def _said(counts):
    """Counts in words."""
    return re.sub(r"(^|, )\S (?=\d)", r"\1", tally(counts))


class Board:
    """The table of some standings, with links to their places when a notebook shows it.

    Args:
        standings: the rows.
        page: the page that the table stands on, which links start from.

    >>> Board(standings("intrinsic-privacy")[:1])
    exhibit     state         verdicts    basis
    Figure 1    reproduced    1 holds     paper record
    """

    def __init__(self, standings, page="book/scoreboard"):
        self.rows, self.page = tuple(standings), page

    def __repr__(self):
        table = [[label(one.exhibit), one.state, one.verdicts, one.basis] for one in self.rows]
        return repr(Table(["exhibit", "state", "verdicts", "basis"], table, kinds=[None, None, None]))

    def _repr_markdown_(self):
        lines = ["| exhibit | state | verdicts | basis |", "|:--|:--|:--|:--|"]
        for one in self.rows:
            state = f"[{one.state}]{{.{one.state.replace(' ', '-')}}}"
            name = self._link(one) + ": " + one.exhibit.title.replace("|", "\\|")
            lines.append(f"| {name} | {state} | {one.verdicts or ' '} | {one.basis} |")
        return "\n".join(lines)

    def _link(self, one):
        if one.place is None:
            return label(one.exhibit)
        address = os.path.relpath(one.place.page, os.path.dirname(self.page))
        return f'<a href="{address}.html#{one.place.anchor}">{label(one.exhibit)}</a>'


def label(exhibit):
    """What readers call an exhibit.

    >>> label(published.exhibit("idp-sgd/table-d7")), label(published.exhibit("per-instance-accounting/text-cost"))
    ('Table D7', 'Section 3.2')
    >>> label(published.exhibit("gradients-look-alike/definition-5.1-fact-5.2"))
    'Definition 5.1, fact 5.2'
    """
    if exhibit.kind == "text":
        return exhibit.place.capitalize()
    words = re.sub(r"(?<=\d)-(?=[a-z]{2})", ", ", exhibit.id)
    words = re.sub(r"(?<=[a-z]{2})-", " ", words).capitalize()
    return re.sub(r"\b[a-z](?=[.\d])", lambda letter: letter[0].upper(), words)


def compared(standings):
    """(exhibit's label and title, `Comparison` of all printed numbers) for each standing whose record holds some."""
    return [
        (f"{label(one.exhibit)}: {one.exhibit.title}", _compared(one.exhibit, one.record, one.parts))
        for one in standings
        if one.numbers
    ]


def _compared(exhibit, record, parts):
    printed = {
        key: value
        for key, value in exhibit.flat().items()
        if not exhibit.is_given(key)
        and all(isinstance(entry, float) for entry in (value if isinstance(value, tuple) else (value,)))
    }
    recorded = {key: each.values[key] for each in (*parts, record) for key in printed if key in each.values}
    kind = "recorded" if record.preset == "paper" else "live"
    return compare(
        exhibit.name, keys=list(printed), stand_in=experiments.is_stand_in(record, exhibit.name), **{kind: recorded}
    )


def _standing(exhibit, folder, place):
    judged = dict.fromkeys([exhibit.name, *(criterion.of for criterion in experiments.criteria(exhibit.name))])
    found = {name: _record(name, folder) for name in judged}
    whole = [part for part in published.parts(exhibit.name) if not part.shortened]
    parts = tuple(filter(None, (records.find(part.name, "paper", folder) for part in whole)))
    numbers, held = {}, {kind: {} for kind in published.FINDINGS}
    if found[exhibit.name] is not None:
        numbers = _compared(exhibit, found[exhibit.name], parts).counts()
        if count := numbers.pop("stand-in", 0):
            numbers["not run"] = numbers.get("not run", 0) + count
    for record in filter(None, found.values()):
        judged_by = experiments.findings(record, exhibit.name)
        for kind, counts in held.items():
            for word, count in judged_by.counts(kind).items():
                counts[word] = counts.get(word, 0) + count
    record = next(filter(None, found.values()), None)
    experiment = next((experiments.get(name) for name in judged if name in experiments.names()), None)
    stale = record is not None and record.name in experiments.names() and experiments.get(record.name).is_stale(record)
    seen = [*filter(None, found.values()), *parts]
    missing, shortened = _missing(exhibit, seen), _shortened(exhibit, seen)
    left = missing or _not_run(exhibit, record, parts) or shortened
    state = _state(exhibit, numbers, held["claim"], record, left, place)
    return Standing(
        exhibit, state, numbers, *held.values(), record, missing, stale, place, experiment, parts, shortened
    )


def _record(name, folder):
    """The record at the scale of the paper, or the quick one where there is no other."""
    return records.find(name, "paper", folder) or records.find(name, "quick", folder)


def _missing(exhibit, found):
    """The exhibit's data sets and networks that no record has; accounts alone, which load no data, miss nothing."""
    found = [record for record in found if record.data]
    has = {entry["name"] for record in found for entry in record.data}
    has |= {name for record in found for name in experiments.networks(record)}
    return tuple(part for part in (*exhibit.data, *exhibit.networks) if part not in has) if found else ()


def _shortened(exhibit, found):
    """What the shortened runs among these records are of, where without them data or networks would be missing."""
    whole = [record for record in found if not published.exhibit(record.name).shortened]
    words = dict.fromkeys(filter(None, (published.exhibit(record.name).shortened for record in found)))
    return () if whole and _missing(exhibit, whole) == _missing(exhibit, found) else tuple(words)


def _not_run(exhibit, record, parts):
    """The tasks that an exhibit's own record leaves out, and no part has; another exhibit's may leave out what this
    does not show."""
    if record is None or record.name != exhibit.name:
        return ()
    has = {entry["name"] for part in parts for entry in part.data}
    return tuple(task for task in record.values.get("not_run", ()) if task not in has)


def _state(exhibit, numbers, held, record, some_tasks, place):
    if exhibit.wrong and (record is not None or "statement" in exhibit.wrong):
        return "wrong in the paper"
    good = sum(numbers.get(word, 0) for word in ("matches", "close")) + held.get("holds", 0)
    bad = numbers.get("differs", 0) + held.get("fails", 0)
    undecided = held.get("undecided", 0)
    if good + bad + undecided == 0:
        if exhibit.tests:
            return "reproduced"
        live = exhibit.name in experiments.names() and "quick" in experiments.get(exhibit.name).presets
        return "in part" if place and live else "not run"
    # A record of some of the paper's tasks neither reproduces nor contradicts it.
    if good == 0:
        return "contradicted" if bad and not (some_tasks or exhibit.unprinted) else "undecided"
    whole = record.preset == "paper" and not some_tasks and not numbers.get("not run")
    return "reproduced" if bad + undecided == 0 and whole else "in part"


def _places(paper, book=None):
    """Exhibit -> its place, from the anchors of its page of exhibits, the headings of the paper's own pages, and then
    from the code of all pages."""
    book = (provenance.repository() or records.SHIPPED) / "book" if book is None else pathlib.Path(book)
    own = sorted(book.glob(f"papers/{paper}*.md"))
    others = sorted(path for path in book.glob("*.md") if path.stem not in ("scoreboard", "errata", "intro"))
    exhibits, places = published.exhibits(paper), {}
    split = book / f"papers/{paper}-exhibits.md"
    if split.is_file():
        anchors = re.findall(r"^\((.+)\)=$", split.read_text(encoding="utf-8"), re.MULTILINE)
        places = {
            exhibit.id: _place(book, split, _anchor(f"{paper}-{exhibit.id}"))
            for exhibit in exhibits
            if f"{paper}-{exhibit.id}" in anchors
        }
    for path in own:
        for heading, anchor, _ in _sections(path.read_text(encoding="utf-8")):
            named = _named(heading)
            for exhibit in exhibits:
                if named & _named(exhibit.id):
                    places.setdefault(exhibit.id, _place(book, path, anchor))
    for path in (*own, *others):
        for _, anchor, code in _sections(path.read_text(encoding="utf-8")):
            for exhibit in exhibits:
                ways = (exhibit.name,) if path not in own else (exhibit.name, exhibit.id)
                if anchor and any(f'{mark}{way}"' in code for way in ways for mark in '"/'):
                    places.setdefault(exhibit.id, _place(book, path, anchor))
    return places


def _place(book, path, anchor):
    return Place(f"book/{path.relative_to(book).with_suffix('').as_posix()}", anchor)


def _sections(text):
    """(heading, anchor, code) of each section of a page; the anchor of the title's own section is empty."""
    sections, fence = [["", "", ""]], None
    for line in text.splitlines():
        mark = re.match(r"(`{3,}|~{3,})(.*)", line)
        if fence is None and mark:
            fence, is_code = mark[1], "code-cell" in mark[2]
        elif fence is not None and line.strip() == fence:
            fence = None
        elif fence is not None and is_code:
            sections[-1][2] += line + "\n"
        elif fence is None and (heading := re.match(r"(#+)\s+(.*)", line)):
            sections.append([heading[2], _anchor(heading[2]) if len(heading[1]) > 1 else "", ""])
    return [tuple(section) for section in sections]


def _anchor(heading):
    """The anchor that Sphinx gives a heading.

    >>> _anchor("Table III: intrinsic epsilon"), _anchor("Figures 8 and 9: one's own start")
    ('table-iii-intrinsic-epsilon', 'figures-8-and-9-ones-own-start')
    """
    words = re.sub(r"\{\w+\}`([^`]*)`|[`*$]", r"\1", heading).lower().replace("'", "")
    return re.sub(r"^[-0-9]+|-+$", "", re.sub(r"[^a-z0-9]+", "-", words))


def _named(words):
    """The exhibits that a heading, or an exhibit's id, speaks of, as (kind, number) pairs.

    >>> sorted(_named("Theorem 2 and claims 1 and 2; Tables I to III of the paper"))
    [('claim', '1'), ('claim', '2'), ('table', '1'), ('table', '2'), ('table', '3'), ('theorem', '2')]
    >>> _named("algorithms-1-2-3") == _named("Algorithms 1 to 3")
    True
    """
    found, kind, last, span = set(), None, None, False
    for word in re.findall(r"[A-Za-z]?\.?\d+(?:\.\d+)*|[A-Za-z]+|[-\u2013]", words):
        if re.fullmatch(f"({_KINDS})s?", word, re.IGNORECASE):
            kind, last, span = word.lower().rstrip("s"), None, False
        elif kind and (re.search(r"\d", word) or word in _ROMAN):
            number = str(_ROMAN.get(word, word.lower()))
            if span and number.isdigit() and str(last).isdigit():
                found |= {(kind, str(between)) for between in range(int(last), int(number))}
            found.add((kind, number))
            last, span = number, False
        elif word in ("to", "-", "\u2013"):
            span = last is not None
        elif word != "and":
            kind = None
    return found
