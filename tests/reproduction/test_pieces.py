import json
import os

import numpy as np
import pytest

from dpcompanion.reproduction import pieces, provenance, records, storage


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    calls = []

    def work(name, stop=None):
        if name == stop:
            raise KeyboardInterrupt
        calls.append(name)
        return {"accuracy": float(name[-1])}, {"norms": np.full(3, float(name[-1]))}

    names = [f"seed-{seed}" for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        pieces.resumable(
            lambda name: work(name, "seed-2"), names, folder=tmp_path, config={"lr": 1}
        )
    assert calls == ["seed-0", "seed-1"]
    done = pieces.resumable(work, names, folder=tmp_path, config={"lr": 1})
    assert calls == names and list(done) == names
    assert done["seed-1"][0] == {"accuracy": 1.0} and done["seed-1"][1]["norms"].tolist() == [
        1,
        1,
        1,
    ]
    pieces.resumable(work, names, folder=tmp_path, config={"lr": 2})
    assert len(calls) == 8  # another configuration: everything anew
    with pytest.raises(KeyboardInterrupt):
        pieces.resumable(_cut_off, ["half"], folder=tmp_path, config={})
    assert len(list(tmp_path.glob("half.*"))) == 2  # its state, and when it began
    pieces.discard(tmp_path)
    assert not tmp_path.exists()


def test_a_piece_that_is_damaged_is_computed_again(tmp_path):
    first = pieces.resumable(lambda name: 1.0, ["a"], folder=tmp_path, config={})
    (tmp_path / "a.piece.json").write_text("{", encoding="utf-8")
    assert (
        pieces.resumable(lambda name: 2.0, ["a"], folder=tmp_path, config={}) == {"a": 2.0} != first
    )


@pytest.mark.parametrize("key", ["sha256", "made"])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_piece_without_what_vouches_for_it_is_computed_again(tmp_path, key, renamed):
    path = tmp_path / "a.piece.json"
    pieces.resumable(lambda name: 1.0, ["a"], folder=tmp_path, config={})
    piece = json.loads(path.read_text(encoding="utf-8"))
    piece["values"], value = 3.0, piece.pop(key)
    if renamed:  # by one bit, for instance
        piece[key[:-1] + chr(ord(key[-1]) ^ 1)] = value
    if key != "sha256":
        del piece["sha256"]
        piece["sha256"] = storage.hash_of(piece)
    path.write_text(json.dumps(piece), encoding="utf-8")
    assert pieces.resumable(lambda name: 2.0, ["a"], folder=tmp_path, config={}) == {"a": 2.0}


def written(kept, folder):
    """What was taken over, as a record has it."""
    return records.read(
        records.write(records.make("idp-sgd/table-5", "paper", {}, config={}, kept=kept), folder)
    ).kept


def test_a_record_lists_what_it_took_over_and_from_which_code(tmp_path, monkeypatch):
    def gathered(names):
        with pieces.taken_over() as kept:
            for _ in range(2):  # a piece that is asked for twice counts once, one's own never
                pieces.resumable(lambda name: name, names, folder=tmp_path, config={})
        return kept

    monkeypatch.setattr(provenance, "commit", lambda: "first")
    assert gathered(["a", "b"]) == []
    monkeypatch.setattr(provenance, "commit", lambda: "second")
    (first,) = gathered(["a", "b", "c"])
    assert (first["pieces"], first["commit"], first["versions"]) == (
        2,
        "first",
        provenance.versions(),
    )
    monkeypatch.setattr(provenance, "commit", lambda: "third")
    kept = gathered(["a", "b", "c"])
    assert [(each["commit"], each["pieces"]) for each in kept] == [("first", 2), ("second", 1)]
    assert all(each["seconds"] >= 0 for each in kept)
    assert written(kept, tmp_path) == kept


def test_a_piece_tells_what_all_its_stretches_took(tmp_path):
    """Those that were cut off count up to the last state that they left, be it by a kill."""

    def begin(name):
        state = pieces.unfinished()
        assert state == pieces.unfinished()
        state.write_text("half of it", encoding="utf-8")
        raise KeyboardInterrupt

    def end(name):
        assert pieces.unfinished().read_text(encoding="utf-8") == "half of it"
        return 1.0

    for stretch in (100, 200):
        with pytest.raises(KeyboardInterrupt):
            pieces.resumable(begin, ["a"], folder=tmp_path, config={})
        (state,) = tmp_path.glob("*.unfinished")
        began = json.loads(state.with_suffix(".begun").read_text(encoding="utf-8"))["since"]
        os.utime(state, (began + stretch, began + stretch))
    with pieces.taken_over() as kept:
        assert pieces.resumable(end, ["a"], folder=tmp_path, config={}) == {"a": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["a.piece.json"]
    made = json.loads((tmp_path / "a.piece.json").read_text(encoding="utf-8"))["made"]
    assert made["earlier"] == pytest.approx(300, abs=0.01) and 300 <= made["seconds"] < 310
    assert [(each["pieces"], each["seconds"]) for each in kept] == [(1, made["earlier"])]


def test_a_state_goes_on_where_a_checkout_carries_it(tmp_path):
    """With the seconds that it took, whatever a copy's own time is."""
    here, begun, there = (tmp_path / name for name in ("here", "begun", "there"))

    def begin(name):
        state = pieces.unfinished()
        state.write_text("half of it", encoding="utf-8")
        raise KeyboardInterrupt

    def end(name):
        assert pieces.unfinished().read_text(encoding="utf-8") == "half of it"
        return 1.0

    pieces.resumable(len, ["whole"], folder=here, config={})
    with pytest.raises(KeyboardInterrupt):
        pieces.resumable(begin, ["a"], folder=here, config={})
    (state,) = here.glob("*.unfinished")
    began = json.loads(state.with_suffix(".begun").read_text(encoding="utf-8"))["since"]
    os.utime(state, (began + 100, began + 100))
    pieces.carry(here, begun)
    os.utime(begun / state.name, (0, 0))
    alone = tmp_path / "without a note"
    alone.mkdir()
    (alone / state.name).write_bytes(state.read_bytes())
    pieces.bring(alone, tmp_path / "elsewhere")  # its seconds are not known, and it counts
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [state.name]
    pieces.bring(begun, there)
    with pieces.taken_over() as kept:
        done = pieces.resumable(end, ["whole", "a"], folder=there, config={})
    assert done == {"whole": 5, "a": 1.0}
    assert sum(each["seconds"] for each in kept) == pytest.approx(100, abs=1)

    # What is further here than what is brought stays, and a whole piece needs no state.
    state.write_text("more of it", encoding="utf-8")
    pieces.bring(begun, here)
    pieces.bring(begun, there)
    assert state.read_text(encoding="utf-8") == "more of it"
    assert not list(there.glob("*.unfinished"))
    pieces.carry(there, begun)
    assert {path.name for path in begun.iterdir()} == {"whole.piece.json", "a.piece.json"}


def test_what_an_earlier_version_began_counts_for_nothing(tmp_path):
    def work(name):
        state = pieces.unfinished()
        if not state.exists():
            return 1.0
        raise ValueError("another format")

    with pytest.raises(KeyboardInterrupt):
        pieces.resumable(_cut_off, ["a"], folder=tmp_path, config={})
    assert pieces.resumable(work, ["a"], folder=tmp_path, config={}) == {"a": 1.0}
    assert (
        "earlier" not in json.loads((tmp_path / "a.piece.json").read_text(encoding="utf-8"))["made"]
    )


def _cut_off(name):
    pieces.unfinished().write_text("of another version", encoding="utf-8")
    raise KeyboardInterrupt


@pytest.mark.parametrize("names", [["a/b"], ["../a"], [""], [3], ["a", "a"]])
def test_pieces_have_safe_and_different_names(tmp_path, names):
    with pytest.raises(ValueError, match="pieces must"):
        pieces.resumable(lambda name: 1, names, folder=tmp_path, config={})
