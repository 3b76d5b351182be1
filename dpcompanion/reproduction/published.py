"""What the five papers print, and the rule by which a number of ours matches a printed one, is
close or differs.

The numbers lie in `papers/*/printed.toml`, one file a paper, as strings, digit for digit.  Here
they become `Printed` numbers: floats that know how they were printed, and so how precise the print
is.

>>> exhibit("idp-sgd/table-5").title
'Hyperparameters of DP-SGD'
>>> sigma = exhibit("idp-sgd/table-5")["mnist.sigma"]
>>> sigma, sigma.rounding
(Printed('3.42529'), 5e-06)
>>> exhibit("idp-sgd/table-2")["mnist.A.sample"].sd
0.09

`verdict` is the one place where ours is held against theirs.

>>> verdict(3.4247, sigma)
'close'
>>> verdict(3.42529, sigma)
'matches'
"""

import dataclasses
import fnmatch
import functools
import importlib.resources
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from dpcompanion import _checks

PAPERS = (
    "intrinsic-privacy",
    "per-instance-accounting",
    "individual-accounting",
    "idp-sgd",
    "gradients-look-alike",
)
KINDS = ("table", "figure", "theorem", "algorithm", "text")
# the kind of what no paper prints: an experiment of our own, beside the paper that it goes on from
OURS = "ours"

# The words for an outcome, and what each promises.
VERDICTS = {
    "matches": "|ours - paper| is at most 2 sqrt(sd_ours^2 + sd_paper^2), of accuracies at most 3 "
    "points, plus the rounding of the print",
    "close": "within 10%, within 1 point of accuracy, or within the tolerance that its exhibit "
    "states",
    "differs": "further away than that",
    "holds": "a qualitative finding: its 95% interval lies on the criterion's side, or the "
    "criterion is not random",
    "fails": "the interval lies on the other side",
    "undecided": "it lies on both sides, or one run cannot decide",
    "stand-in": "a number of another network or other data than the paper's, which is set beside "
    "the print and not held against it",
    "not run": "with what it would need",
    "out of reach": "not run, and needs data, weights or days of computing that cannot be had here",
    "wrong in the paper": "with the proof",
}

# Whose a finding is; outcomes are counted apart.
FINDINGS = {
    "claim": "what the paper says, or what follows from it at once",
    "own": "a result of ours, which the paper does not state",
    "refutes": "where it holds, what the paper says does not",
}

_PRINTED = re.compile(
    r"""
    \s*(?P<sign>[+-]?)(?P<whole>\d+)(?:\.(?P<fraction>\d*))?
    (?:[eE](?P<exponent>[+-]?\d+))?
    (?:\s*±\s*(?P<sd>\d+(?:\.\d+)?) | \((?P<last>\d+)\))?\s*""",
    re.VERBOSE,
)


class Printed(float):
    """A number as a paper prints it: its value, and `text`, `sd` and `rounding`.

    `sd` is the printed standard deviation ("96.75±0.15", or "0.927(2)" for 0.002), 0 where none is
    printed, and `rounding` half a unit in the last printed place. Raises ValueError for anything
    else.

    >>> accuracy = Printed("0.927(2)")
    >>> accuracy + 0, accuracy.sd, accuracy.rounding
    (0.927, 0.002, 0.0005)
    >>> Printed("9.62e-5").rounding
    5e-08
    """

    text: str
    rounding: float
    sd: float

    def __new__(cls, text: str) -> Self:
        match = _PRINTED.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                "text must be a printed number such as '3.42', '96.75±0.15', '0.927(2)', got "
                f"{text!r}"
            )
        value, _, _ = re.split(r"±|\(", text.strip() + "±±", maxsplit=2)
        self = super().__new__(cls, value)
        places = len(match["fraction"] or "") - int(match["exponent"] or 0)
        self.text = text.strip()
        self.rounding = float(f"0.5e{-places}")
        self.sd = float(match["sd"] or f"{match['last'] or 0}e{-places}")
        return self

    def __repr__(self) -> str:
        return f"Printed({self.text!r})"

    def __str__(self) -> str:
        return self.text

    __format__ = float.__format__

    def __reduce__(self) -> tuple[type["Printed"], tuple[str]]:
        return Printed, (self.text,)


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper: slug, title, authors, venue, question, and the setup that its exhibits share."""

    slug: str
    title: str
    short: str
    authors: str
    venue: str
    question: str
    setup: str


@dataclasses.dataclass(frozen=True, eq=False)
class Exhibit:
    """A table, figure, theorem, algorithm or passage of a paper.

    `numbers` holds what it prints, nested as in the paper; `exhibit["mnist.A.sample"]` is one of
    them, a `Printed`, a tuple of them, or text where the paper prints no plain number. `shows` is
    the finding in words, `caution` what is wrong or loose in it, `data` and `networks` the data
    sets and networks that it shows, and `scale` what its own scale needs: "cpu" or "gpu". `wrong`
    are patterns of the numbers that are proved wrong on the page of errata, or "statement" where it
    is the words that are; `vacuous` is whether the statement, as printed, says nothing; `given` are
    patterns of those numbers that are not held against ours: settings, what holds by construction,
    results of another exhibit printed again, times of one machine, and test statistics of single
    networks, which a criterion judges by their mean; `accuracies` of those that are accuracies,
    where the exhibit's unit does not say so; `tests` name the tests that check an exhibit that no
    experiment computes, as "tests/test_x.py::test_y". `tolerance` is how far a
    close number may lie from the print, as a share of it. `unprinted` says which settings the paper
    leaves out: a disagreement then contradicts nothing. `deviation` says in which settings that the
    paper does print our runs differ from it. `part_of` is the id of the exhibit that a
    run of its own computes a part of, such as one data set of several. `shortened` says of a part
    how much of the paper's training it has, such as "10 of 100 epochs of ResNet-20 on CIFAR-10":
    its numbers are not held against the print, and the exhibit stays unfinished. `needs` says what
    it cannot be decided without and this project does not have: data, weights, or days of
    computing; `beyond` are patterns of its numbers of which that is so where it is not so of the
    rest. `takes` is about how long its experiment takes at its own scale, and on what. `looks`
    counts how often its claims were looked at, with more seeds each time: what two looks left
    undecided, with intervals that allow for two, is not looked at a third time. `lacks` says what
    it shows that no record of ours has, though all of its data and networks were run.
    """

    paper: str
    id: str
    kind: str
    title: str
    place: str
    setup: str = ""
    unit: str = ""
    shows: str = ""
    caution: str = ""
    data: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    scale: str = "gpu"
    wrong: tuple[str, ...] = ()
    vacuous: bool = False
    given: tuple[str, ...] = ()
    accuracies: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    tolerance: float = 0.1
    unprinted: str = ""
    deviation: str = ""
    part_of: str = ""
    shortened: str = ""
    needs: str = ""
    beyond: tuple[str, ...] = ()
    takes: str = ""
    looks: int = 1
    lacks: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )

    @property
    def name(self) -> str:
        """The name that experiments, records and chapters use, such as "idp-sgd/table-5"."""
        return f"{self.paper}/{self.id}"

    def is_wrong(self, key: str) -> bool:
        """Whether a number is proved wrong in the paper.

        >>> (
        ...     exhibit("idp-sgd/table-7").is_wrong("mnist.A.sigma_p"),
        ...     exhibit("idp-sgd/table-7").is_wrong("mnist.A.q_p"),
        ... )
        (True, False)
        """
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.wrong)

    def is_given(self, key: str) -> bool:
        """Whether a number is no result of this exhibit.

        >>> (
        ...     exhibit("idp-sgd/table-5").is_given("mnist.lr"),
        ...     exhibit("idp-sgd/table-5").is_given("mnist.sigma"),
        ... )
        (True, False)
        """
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.given)

    def is_beyond(self, key: str) -> bool:
        """Whether a number cannot be had here.

        >>> (
        ...     exhibit("idp-sgd/table-8").is_beyond("svhn.A.sample"),
        ...     exhibit("idp-sgd/table-8").is_beyond("mnist.A.sample"),
        ... )
        (True, False)
        """
        return bool(self.needs) or any(fnmatch.fnmatchcase(key, pattern) for pattern in self.beyond)

    def point(self, key: str) -> float:
        """How much one percentage point of accuracy is in a number: 1, 0.01, or 0 if it is none.

        >>> (
        ...     exhibit("idp-sgd/table-2").point("mnist.A.sample"),
        ...     exhibit("idp-sgd/table-5").point("mnist.sigma"),
        ... )
        (1.0, 0.0)
        >>> exhibit("intrinsic-privacy/table-4").point("noiseless_accuracy.adult")
        0.01
        """
        if self.unit.startswith("%"):
            return 1.0
        return (
            0.01 if any(fnmatch.fnmatchcase(key, pattern) for pattern in self.accuracies) else 0.0
        )

    def flat(self) -> dict[str, Any]:
        """All numbers under their dotted names, in the paper's order.

        >>> exhibit("intrinsic-privacy/table-2").flat()["adult.learning_rate"]
        Printed('0.5')
        """
        return dict(_flatten(self.numbers))

    def __getitem__(self, key: str) -> Any:
        flat = self.flat()
        if key not in flat:
            raise ValueError(f"key must be one of {', '.join(flat) or '(no numbers)'}, got {key!r}")
        return flat[key]


def _flatten(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in numbers.items():
        if isinstance(value, types.MappingProxyType):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _number(leaf: Any) -> Any:
    if isinstance(leaf, dict):
        return types.MappingProxyType({key: _number(value) for key, value in leaf.items()})
    if isinstance(leaf, list):
        return tuple(map(_number, leaf))
    return Printed(leaf) if _PRINTED.fullmatch(leaf) else leaf


@functools.cache
def _read(slug: str) -> tuple[Paper, dict[str, Exhibit]]:
    file = (
        importlib.resources.files("dpcompanion.reproduction")
        / "papers"
        / slug.replace("-", "_")
        / "printed.toml"
    )
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    found = content.pop("exhibit")
    exhibits = {}
    for fields in found:
        for key in ("data", "networks", "wrong", "given", "beyond", "accuracies", "tests"):
            fields[key] = tuple(fields.get(key, ()))
        fields["numbers"] = _number(fields.get("numbers", {}))
        exhibits[fields["id"]] = Exhibit(paper=slug, **fields)
    return Paper(slug=slug, **content), exhibits


def papers() -> list[Paper]:
    """The five papers, oldest idea first.

    >>> [paper.short for paper in papers()][-2:]
    ['Boenisch et al. 2023', 'Thudi et al. 2024']
    """
    return [_read(slug)[0] for slug in PAPERS]


def paper(slug: str) -> Paper:
    """One paper by its slug."""
    return _read(_checks.one_of("slug", slug, PAPERS))[0]


def exhibits(paper: str | None = None, *, ours: bool = False) -> list[Exhibit]:
    """All exhibits, or those of one paper, in the paper's order; with `ours` our own results, too.

    >>> len(exhibits()) == sum(len(exhibits(paper=slug)) for slug in PAPERS)
    True
    """
    slugs = PAPERS if paper is None else (_checks.one_of("paper", paper, PAPERS),)
    return [
        found for slug in slugs for found in _read(slug)[1].values() if ours or found.kind != OURS
    ]


def parts(name: str) -> list[Exhibit]:
    """The exhibits whose records hold a part of this one's numbers, see `Exhibit.part_of`.

    >>> [part.name for part in parts("idp-sgd/table-2")]
    ['idp-sgd/table-2-cifar10-a', 'idp-sgd/table-2-cifar10-b']
    """
    whole = exhibit(name)
    return [found for found in exhibits(whole.paper, ours=True) if found.part_of == whole.id]


def exhibit(name: str) -> Exhibit:
    """One exhibit by its name, "paper/id"; a ValueError lists the paper's exhibits."""
    slug, _, id = str(name).partition("/")
    _checks.one_of("paper", slug, PAPERS)
    known = _read(slug)[1]
    if id not in known:
        raise ValueError(
            f"name must be one of {', '.join(f'{slug}/{key}' for key in known)}, got {name!r}"
        )
    return known[id]


def verdict(
    ours: float,
    published: float | str,
    *,
    sd_ours: float = 0.0,
    sd_published: float | None = None,
    rounding: float | None = None,
    points: float = False,
    tolerance: float = 0.1,
) -> Literal["matches", "close", "differs"]:
    """ "matches", "close" or "differs", by the rule in `VERDICTS`.

    Args:
        ours: our number; NaN differs from everything.
        published: a number, a `Printed` one or its text; the standard deviation and the rounding of
            the print are read off a `Printed` one unless they are given.
        sd_ours, sd_published: standard deviations of the two.
        rounding: half a unit in the last printed place.
        points: what one percentage point is where the numbers are accuracies, 1 (or True) for
            percentages and 0.01 for fractions: close then means within 1 point, and
            numbers more than 3 points apart do not match, whatever their scatter.
        tolerance: what close means for other numbers, as a share of the published one.

    >>> verdict(97.6, "97.81±0.09", sd_ours=0.1, points=True)
    'matches'
    >>> verdict(96.9, "97.81±0.09", sd_ours=0.1, points=True)
    'close'
    >>> verdict(84.0, "91.2±1.2", sd_ours=3.5, points=True)
    'differs'
    >>> verdict(2.9, "3.42529"), verdict(3.41, "3.42529"), verdict(3.41, "3.42529", tolerance=0.001)
    ('differs', 'close', 'differs')
    """
    _checks.in_interval("tolerance", tolerance, 0, 1, closed="left")
    published = Printed(published) if isinstance(published, str) else published
    if sd_published is None:
        sd_published = published.sd if isinstance(published, Printed) else 0.0
    if rounding is None:
        rounding = published.rounding if isinstance(published, Printed) else 0.0
    for name, value in (
        ("sd_ours", sd_ours),
        ("sd_published", sd_published),
        ("rounding", rounding),
    ):
        _checks.in_interval(name, value, 0, math.inf, closed="left")
    ours, paper = float(ours), float(published)
    distance = 0.0 if ours == paper else abs(ours - paper)
    # A number that rounds to just half a unit must not depend on the last bit of the subtraction.
    slack = 1e-12 * max(1.0, abs(paper)) if rounding else 0.0
    scatter = min(2 * math.hypot(sd_ours, sd_published), 3 * float(points) or math.inf)
    if distance <= scatter + rounding + slack:
        return "matches"
    return "close" if distance <= (float(points) or tolerance * abs(paper)) else "differs"
