"""The reproduction for machines: every exhibit with its verdict, and each file of `results/`.

    python -m dpcompanion.reproduction.exports

writes `results/exhibits.json`, whose form `results/exhibits.schema.json` describes, and
`results/ro-crate-metadata.json`, an RO-Crate (https://w3id.org/ro/crate/1.1) of the records: their
files, the commands that made them, when, and for which paper. Both follow from the records and the
published numbers alone, and a test compares them.

>>> table_2 = next(
...     one for one in exhibits()["exhibits"] if one["id"] == "intrinsic-privacy/claims-1-2"
... )
>>> table_2["state"], table_2["record"]
('reproduced', 'intrinsic-privacy/claims-1-2.paper.json')
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from dpcompanion import __version__, _files
from dpcompanion.reproduction import published, records, scoreboard, states

LICENSE = "https://spdx.org/licenses/Apache-2.0"
CRATE = "https://w3id.org/ro/crate/1.1"


def exhibits() -> dict[str, Any]:
    """All exhibits of the five papers with the states and counts of the scoreboard.

    Returns:
        {"papers": each paper's id, title, authors and venue; "states": what the words mean;
        "exhibits": for each its id, title, state, the counts of its numbers and claims, the record
        that it is judged by (a file of `results/`, or None), what is missing, and its page of the
        book}.
    """
    return {
        "$schema": "exhibits.schema.json",
        "version": __version__,
        "papers": [
            {"id": one.slug, "title": one.title, "authors": one.authors, "venue": one.venue}
            for one in published.papers()
        ],
        "states": states.STATES,
        "exhibits": [_exhibit(one) for one in scoreboard.exhibit_statuses()],
    }


def _exhibit(one: scoreboard.ExhibitStatus) -> dict[str, Any]:
    outcomes, record = one.outcomes, one.evidence.record
    return {
        "id": one.exhibit.name,
        "title": scoreboard.label(one.exhibit),
        "state": one.state,
        "numbers": outcomes.numbers,
        "claims": outcomes.findings,
        "claims_of_smaller_runs": outcomes.smaller,
        "claims_of_ours": outcomes.own,
        "refutations": outcomes.refutations,
        "record": None
        if record is None or record.preset != "paper"
        else f"{record.name}.paper.json",
        "stale": one.evidence.stale,
        "missing": list(one.evidence.missing),
        "page": None if one.place is None else f"{one.place.page}.html#{one.place.anchor}",
    }


def crate() -> dict[str, Any]:
    """The metadata of `results/` as an RO-Crate."""
    files = list(_files_of_records())
    papers = {f"#{one.slug}": one for one in published.papers()}
    runs = [_run(record, [path.name for path in paths]) for record, paths in files]
    parts = [{"@id": one["@id"]} for one in _described(files)]
    return {
        "@context": f"{CRATE}/context",
        "@graph": [
            {
                "@id": "ro-crate-metadata.json",
                "@type": "CreativeWork",
                "conformsTo": {"@id": CRATE},
                "about": {"@id": "./"},
            },
            {
                "@id": "./",
                "@type": "Dataset",
                "name": "Records of dpcompanion",
                "description": "What runs at the scale of five papers on individual privacy in "
                "DP-SGD left: values, configuration, seeds, versions and times, and verdicts on "
                "each exhibit.",
                "datePublished": max(record.created for record, _ in files)[:10],
                "license": {"@id": LICENSE},
                "about": [{"@id": name} for name in papers],
                "hasPart": parts,
            },
            {"@id": LICENSE, "@type": "CreativeWork", "name": "Apache License 2.0"},
            {
                "@id": "#dpcompanion",
                "@type": "SoftwareApplication",
                "name": "dpcompanion",
                "softwareVersion": __version__,
            },
            *(
                {"@id": name, "@type": "ScholarlyArticle", "name": one.title, "author": one.authors}
                for name, one in papers.items()
            ),
            *_described(files),
            *runs,
        ],
    }


def _files_of_records() -> Iterator[tuple[records.Record, list[pathlib.Path]]]:
    """Every record at the papers' scale, with its file and that of its arrays."""
    for path in sorted(records.results_folder().glob("*/*.paper.json")):
        record = records.read(path)
        yield record, [path, *sorted(path.parent.glob(f"{path.stem}*.npz"))]


def _described(files: list[tuple[records.Record, list[pathlib.Path]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "@id": "exhibits.json",
            "@type": "File",
            "name": "Verdicts",
            "encodingFormat": "application/json",
        },
        {
            "@id": "exhibits.schema.json",
            "@type": "File",
            "name": "Their form",
            "encodingFormat": "application/schema+json",
        },
    ]
    for record, paths in files:
        paper = record.name.partition("/")[0]
        for path in paths:
            arrays = path.suffix == ".npz"
            found.append(
                {
                    "@id": f"{paper}/{path.name}",
                    "@type": "File",
                    "name": f"{record.name}{', arrays' if arrays else ''}",
                    "encodingFormat": "application/x-npz" if arrays else "application/json",
                    "dateCreated": record.created,
                    "about": {"@id": f"#{paper}"},
                }
            )
    return found


def _run(record: records.Record, names: list[str]) -> dict[str, Any]:
    paper = record.name.partition("/")[0]
    return {
        "@id": f"#run-{record.name}",
        "@type": "CreateAction",
        "name": record.command,
        "description": f"commit {record.commit}, {record.device}, {record.wall_time:.0f} s",
        "endTime": record.created,
        "instrument": {"@id": "#dpcompanion"},
        "result": [{"@id": f"{paper}/{name}"} for name in names],
    }


def write() -> None:
    """Write both into `results/`."""
    for name, made in (("exhibits.json", exhibits()), ("ro-crate-metadata.json", crate())):
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        _files.replace(records.results_folder() / name, text.encode())


if __name__ == "__main__":
    write()
