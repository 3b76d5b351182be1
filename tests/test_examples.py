"""The notebook to download runs on a CSV file that it has never seen, and leaves a model and its
card.
"""

import json
import pathlib
import re

import numpy as np
import pytest
import torch

NOTEBOOK = pathlib.Path(__file__).resolve().parent.parent / "examples" / "own_csv.ipynb"
FOUND = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in FOUND["cells"] if cell["cell_type"] == "code"]


def written(path, *, header, last=None):
    random = np.random.RandomState(0)
    features = random.uniform(0, 1, (240, 3))
    rows = np.column_stack([features, (features.sum(1) > 1.5).astype(int)])
    lines = [",".join(f"{value:g}" for value in row) for row in rows] + ([last] if last else [])
    path.write_text(
        "\n".join([*(["age,height,weight,ill"] if header else []), *lines]) + "\n", encoding="utf-8"
    )


def run(cells=None):
    names = {}
    settings = re.sub(r"STEPS, BATCH(.*)= 32, 300, 128", r"STEPS, BATCH\1= 8, 12, 40", CODE[0])
    assert settings != CODE[0]
    for code in (settings, *CODE[1:cells]):
        exec(compile(code, str(NOTEBOOK), "exec"), names)
    return names


@pytest.mark.slow
def test_it_runs_on_a_csv_and_says_what_it_promises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "people.csv", header=True)
    found = run()
    card = (tmp_path / "model-card.md").read_text(encoding="utf-8")
    # rows, rows to test, features, classes
    assert {"200", "40", "3", "2"} <= set(capsys.readouterr().out.split())
    assert found["plan"].statement() in card and f"epsilon {found['plan'].epsilon():.3f}" in card
    assert 3.9 < found["plan"].epsilon() <= 4.0 and bool(
        (found["epsilons"] <= found["plan"].epsilon()).all()
    )
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(weights[name], p) for name, p in found["released"].state_dict().items())
    assert not any(one.refuted for one in found["found"].values())


def test_a_first_line_of_names_is_optional(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = []
    for header in (True, False):
        written(tmp_path / "people.csv", header=header)
        tables.append(run(cells=2)["table"])
    assert torch.equal(*tables) and tables[0].shape == (240, 4)


@pytest.mark.parametrize("last, match", [("0.1,0.2,0.3,7", "labels"), ("0.1,nan,0.3,1", "missing")])
def test_what_it_cannot_read_is_said(last, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "people.csv", header=True, last=last)
    with pytest.raises(ValueError, match=match):
        run(cells=2)


def test_it_is_kept_without_outputs_and_imports_no_reproduction():
    assert all(
        not cell.get("outputs") and cell.get("execution_count") is None for cell in FOUND["cells"]
    )
    assert "reproduction" not in "".join(CODE)
