"""What the checkout has of runs that are not whole yet is what these runs take over, as the code stands."""

import types

import pytest
import torch

from dpcompanion import data
from dpcompanion.reproduction import experiments, pieces, records
from dpcompanion.reproduction.papers.idp_sgd import training

BEGUN = records.results_folder() / "begun"


class Asked(Exception):
    pass


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A function of an experiment's name: where below the data folder it keeps its pieces, how they are told from those
    of other configurations, and their names."""

    def no_data(name, split):
        normalized = types.SimpleNamespace(features=torch.zeros(10, 1), labels=torch.arange(10))
        return types.SimpleNamespace(provenance=dict, normalized=lambda: normalized, labels=normalized.labels)

    def resumable(work, names, *, folder, config, **options):
        raise Asked(folder.relative_to(tmp_path), records.hash_of(config), list(names))

    def call(name):
        with pytest.raises(Asked) as found:
            experiments.run(name, preset="paper")
        return found.value.args

    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path))
    monkeypatch.setattr(data, "load", no_data)
    monkeypatch.setattr(pieces, "resumable", resumable)
    training._problem.cache_clear()
    yield call
    training._problem.cache_clear()


def test_each_piece_is_whole_and_of_the_run_that_will_ask_for_it(asked):
    there = set(BEGUN.rglob("*.piece.json"))
    read = set()
    for name in ("figure-2-short", "figures-8-10-short"):
        folder, hashed, names = asked(f"idp-sgd/{name}")
        for piece in names:
            path = pieces._path(BEGUN / folder, piece)
            if path in there:
                values, _ = pieces._kept(BEGUN / folder, piece, hashed)
                assert values
                read.add(path)
    assert read == there
