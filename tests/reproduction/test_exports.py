"""The list of exhibits and the crate of records that machines read are those of today's records."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dpcompanion.reproduction import exports, records

ROOT = Path(__file__).resolve().parents[2]


def committed(name):
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name, made", [("exhibits.json", exports.exhibits), ("ro-crate-metadata.json", exports.crate)]
)
def test_what_is_committed_is_of_today(name, made):
    assert committed(name) == json.loads(json.dumps(made())), (
        "run python -m dpcompanion.reproduction.exports"
    )


def test_the_exhibits_have_the_form_of_the_schema():
    schema, exhibits = committed("exhibits.schema.json"), committed("exhibits.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(exhibits, schema)
    for one in exhibits["exhibits"]:
        assert one["state"] in exhibits["states"]
        assert one["record"] is None or (ROOT / "results" / one["record"]).exists()
    exhibits["exhibits"][0]["numbers"]["right"] = 1
    with pytest.raises(jsonschema.ValidationError, match="right"):
        jsonschema.validate(exhibits, schema)


def test_the_crate_names_every_file_once_and_nothing_else():
    graph = committed("ro-crate-metadata.json")["@graph"]
    entities = {one["@id"]: one for one in graph}
    assert len(entities) == len(graph) and {"ro-crate-metadata.json", "./"} <= entities.keys()
    files = {name for name, one in entities.items() if one["@type"] == "File"}
    folder = records.results_folder()
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    # pieces of runs that are not whole yet
    there = {name for name in there if not name.startswith("begun/")}
    assert files == {one["@id"] for one in entities["./"]["hasPart"]}
    assert files == {name for name in there if ".paper." in name} | {
        "exhibits.json",
        "exhibits.schema.json",
    }
    for one in graph:
        for other in re.findall(
            r"'@id': '([^']+)'", str({k: v for k, v in one.items() if k != "@id"})
        ):
            assert other in entities or other.startswith("https://"), other


def test_what_a_codechecker_is_to_make_again_is_there():
    check = yaml.safe_load((ROOT / "codecheck.yml").read_text(encoding="utf-8"))
    assert check["manifest"] and all(
        (ROOT / one["file"]).exists() and one["comment"] for one in check["manifest"]
    )
    pages = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "book").rglob("*.ipynb")
        if ".ip" not in path.parent.name
    }
    assert {one["file"] for one in check["manifest"]} == pages
