"""The page's code runs as it is printed, and so do the two programs that it shows."""

import json
import pathlib
import re
import runpy
import sys

import pytest
import torch

import dpcompanion.huggingface  # noqa: F401  (before transformers: it helps torchvision)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book" / "hugging-face.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_accounts_for_patients(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "hugging-face.md", "exec"), names)
    assert "one patient" in capsys.readouterr().out
    assert names["epsilons"].shape == (200,) and names["epsilons"].max() <= 3.0
    assert plan_and_scaler(names) and names["text_plan"].steps == len(names["text_history"].losses)
    assert names["plan"].epsilon().unique().numel() == 2 and names["plan"].epsilon().max() <= 4.0


def plan_and_scaler(names):
    return 3.0 < names["ledger"].epsilon(1e-4) < 3.5 and abs(float(names["scaled"].mean())) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, persons", [("classifier_with_budgets", 31), ("language_model_with_a_filter", 21)]
)
def test_the_program_runs_and_keeps_every_budget(name, persons, tmp_path, monkeypatch, capsys):
    assert f"examples/{name}.py" in PAGE
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    found = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    budgets = torch.as_tensor(found["trainer"].budgets)
    assert found["epsilons"].shape == (persons,) and bool((found["epsilons"] <= budgets).all())
    assert json.loads((tmp_path / "privacy.json").read_text())["plan"]["n"] == persons
    assert found["trainer"].statement() in capsys.readouterr().out
