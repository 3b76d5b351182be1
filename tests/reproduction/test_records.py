import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from dpcompanion import seeds
from dpcompanion.reproduction import provenance, records
from dpcompanion.reproduction.records import MeanSD, mean_and_sd

from ..refusals import refused

NAME = "idp-sgd/table-5"


def arrays_of(path):
    """The file in which a record keeps its arrays."""
    return path.with_name(json.loads(path.read_text(encoding="utf-8"))["arrays"]["file"])


def unsealed(text):
    """A record as earlier versions wrote it, without a checksum of itself."""
    return re.sub(r'"sha256": "[0-9a-f]{64}",\s*', "", text, count=1)


def record(values=None, **kwargs):
    return records.make(
        NAME,
        "paper",
        values or {"mnist.sigma": 3.4247},
        config={"delta": 1e-5, "seeds": [1, 2]},
        **kwargs,
    )


def test_a_record_comes_back_as_it_was_written(tmp_path):
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "low": -math.inf,
        "zero": -0.0,
        "tiny": 5e-324,
        "third": 1 / 3,
        "text": "ä <b>",
        "list": [1, 2.5, None, True],
        "seeds": MeanSD(96.75, math.nan, 1),
        "nest": {"a": {}},
    }
    arrays = {
        "norms": np.arange(6, dtype=np.float32).reshape(2, 3),
        "nan": np.array([np.nan, np.inf]),
    }
    made = record(
        values,
        arrays=arrays,
        version=3,
        wall_time=1.5,
        command="dpcompanion run",
        data=[{"name": "mnist", "sha256": "0"}],
    )
    path = records.write(made, tmp_path)
    assert path == tmp_path / "idp-sgd" / "table-5.paper.json"
    text, content = path.read_text(encoding="utf-8"), arrays_of(path).read_bytes()
    named = hashlib.sha256(content).hexdigest()
    assert sorted(file.name for file in path.parent.iterdir()) == [
        f"table-5.paper.{named[:16]}.npz",
        "table-5.paper.json",
    ]
    assert named in text
    back = records.find(NAME, "paper", tmp_path)
    for field in dataclasses.fields(made):
        if field.name not in ("values", "arrays", "folder"):
            assert getattr(back, field.name) == getattr(made, field.name), field.name
    assert repr(back.values) == repr(made.values) and math.copysign(1, back.values["zero"]) == -1
    for key, array in arrays.items():
        np.testing.assert_array_equal(back.arrays[key], array)
        assert back.arrays[key].dtype == array.dtype
    assert back.seeds == [1, 2]
    json.loads(
        path.read_text(encoding="utf-8"),
        parse_constant=lambda constant: pytest.fail(f"{constant} is not standard JSON"),
    )


def test_a_record_says_what_it_was_made_with():
    made = record()
    assert {"python", "dpcompanion", "torch", "numpy", "scipy"} <= made.versions.keys()
    assert made.device.startswith("cpu") and made.created.endswith("+00:00")
    assert made.commit is None or len(made.commit.removesuffix("+changes")) == 40


def test_values_of_numpy_and_torch_are_unpacked_and_others_refused():
    made = record(
        {
            "a": np.float64(1.5),
            "b": torch.tensor([1.0, 2.0], dtype=torch.float64),
            "c": np.int64(3),
            "d": (1, 2),
        }
    )
    assert made.values == {"a": 1.5, "b": [1.0, 2.0], "c": 3, "d": [1, 2]}
    refused("record", record, {"a": object()})
    refused("keys", record, {"a": {1: 2}})


@pytest.mark.parametrize(
    "name, preset, message",
    [
        ("idp-sgd/table-55", "paper", "name"),
        ("../x/table-5", "paper", "paper"),
        (NAME, "../paper", "preset"),
        (NAME, None, "preset"),
    ],
)
def test_a_record_belongs_to_a_published_exhibit(name, preset, message):
    refused(message, records.make, name, preset, {}, config={})


def test_a_record_is_stale_when_configuration_or_version_differ_but_not_for_other_seeds():
    made = record(version=2)
    assert not made.is_stale(config={"delta": 1e-5, "seeds": [7]}, version=2)
    assert not made.is_stale()
    assert (
        made.is_stale(config={"delta": 1e-6})
        and made.is_stale(version=1)
        and made.is_stale(version=3)
    )
    assert made.is_stale(config={"delta": 1e-5, "epochs": 3})
    assert not dataclasses.replace(made, config={"seed": 3}).is_stale(config={"seed": 0})
    assert dataclasses.replace(made, config={"seed": 3}).seeds == [3]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[:-20], "is damaged"),
        (lambda text: "[]", "schema"),
        (lambda text: unsealed(text).replace('"schema": 2', '"schema": 1'), "schema"),
        (lambda text: unsealed(text).replace('"device"', '"gadget"'), "device, gadget"),
        (lambda text: text.replace('"seeds"', "Infinity"), "is damaged"),
        (lambda text: unsealed(text).replace('"command": ""', '"command": 3'), "command"),
        (lambda text: text.replace('"command": ""', '"command": "x"'), "damaged"),
        (lambda text: text.replace("1e-05", "1e-06"), "damaged"),
        (lambda text: text.replace('"sha256"', '"sha257"'), "sha257"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path, damage, message):
    path = records.write(record(), tmp_path)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    refused(f"table-5.paper.json {message}|table-5.paper.json.*{message}", records.read, path)


@pytest.mark.parametrize("name, preset", [("idp-sgd/table-7", "paper"), (NAME, "quick")])
def test_a_record_under_the_name_of_another_is_refused(tmp_path, name, preset):
    path = records.write(record(), tmp_path)
    copy = path.rename(records.path_of(name, preset, tmp_path))
    refused(copy.name, records.find, name, preset, tmp_path)


def test_arrays_that_are_altered_or_missing_are_refused_by_name(tmp_path):
    path = records.write(record(arrays={"a": np.ones(3)}), tmp_path)
    file = arrays_of(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(file.name, records.read, path)
    file.unlink()
    refused(file.name, records.read, path)
    refused("x holds objects", records.write, record(arrays={"x": np.array([{}])}), tmp_path)


def test_a_failed_write_leaves_the_old_record_and_no_litter(tmp_path, monkeypatch):
    path = records.write(record({"a": 1}), tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        records.write(record({"a": 2}), tmp_path)
    assert records.read(path).values == {"a": 1} and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("old", [{}, {"a": np.ones(3)}])
@pytest.mark.parametrize("last", range(4))
def test_a_writer_that_ends_anywhere_leaves_the_old_record_or_the_new(
    tmp_path, monkeypatch, old, last
):
    """It ends as if by SIGKILL, after `last` of its changes to the folder; nothing of it runs after
    that.
    """
    path = records.write(record({"which": 0}, arrays=old), tmp_path)

    class Killed(BaseException):
        pass

    done = 0

    def until_killed(change):
        def changed(*arguments, **options):
            nonlocal done
            if done == last:
                raise Killed
            done += 1
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(os, "replace", until_killed(os.replace))
        patched.setattr(pathlib.Path, "unlink", until_killed(pathlib.Path.unlink))
        records.write(record({"which": 1}, arrays={"a": np.zeros(3)}), tmp_path)
    found = records.read(path)
    assert {key: array.tolist() for key, array in found.arrays.items()} == (
        {"a": [0, 0, 0]}
        if found.values["which"]
        else {key: array.tolist() for key, array in old.items()}
    )
    # The next writer removes what the killed one left, except what may still be written.
    records.write(record({"which": 2}, arrays={"a": np.full(3, 2.0)}), tmp_path)
    assert {arrays_of(path), path} == {
        file for file in path.parent.iterdir() if file.suffix != ".part"
    }


@pytest.mark.slow
def test_writers_that_share_a_process_number_and_a_folder_lose_nothing(tmp_path):
    """As two containers do: every write is whole, every read finds a whole record, and the folder
    ends clean.
    """
    code = """
import os, sys
import numpy as np
os.getpid = lambda: 1
from dpcompanion.reproduction import provenance, records, storage
made_with = {"versions": {}, "commit": None}
base = records.make("idp-sgd/table-5", "paper", {}, config={}, made_with=made_with)
import dataclasses
for i in range(40):
    number = 1000 * int(sys.argv[2]) + i
    arrays = {"a": np.full(50, number)}
    record = dataclasses.replace(base, values={"number": number}, arrays=arrays)
    path = records.write(record, sys.argv[1])
    found = records.read(path)
    assert (found.arrays["a"] == found.values["number"]).all()
"""
    run = [sys.executable, "-c", code, str(tmp_path)]
    writers = [
        subprocess.Popen([*run, str(i)], stderr=subprocess.PIPE, text=True, encoding="utf-8")
        for i in range(2)
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [("", 0)] * 2
    path = tmp_path / "idp-sgd" / "table-5.paper.json"
    assert {arrays_of(path), path} == set(path.parent.iterdir())
    assert records.read(path).values["number"] % 1000 == 39


def test_the_arrays_of_an_earlier_version_are_read_and_replaced(tmp_path):
    path = records.write(record(arrays={"a": np.ones(3)}), tmp_path)
    old = path.with_suffix(".npz")
    named = arrays_of(path).rename(old).name
    path.write_text(
        unsealed(path.read_text(encoding="utf-8")).replace(
            json.loads(path.read_text(encoding="utf-8"))["arrays"]["file"], named
        ),
        encoding="utf-8",
    )
    assert records.read(path).arrays["a"].tolist() == [1, 1, 1]
    records.write(record(arrays={"a": np.zeros(3)}), tmp_path)
    assert not old.exists() and records.read(path).arrays["a"].tolist() == [0, 0, 0]


def test_no_single_bit_of_a_record_can_change_unnoticed(tmp_path):
    made = record(
        {"a": 0.1, "seeds": MeanSD(96.75, math.nan, 1)}, arrays={"a": np.ones(3)}, command="run"
    )
    path = records.write(made, tmp_path)
    for file in (path, arrays_of(path)):
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 7):
            spoilt = bytearray(whole)
            spoilt[bit // 8] ^= 1 << bit % 8
            file.write_bytes(spoilt)
            try:
                found = records.read(path)
            except ValueError:
                continue
            # White space apart, what reads at all reads as it was written.
            assert (
                records.hash_of(found.values) == records.hash_of(made.values)
                and found.config == made.config
            )
        file.write_bytes(whole)


def test_a_new_record_without_arrays_removes_the_old_ones(tmp_path):
    path = records.write(record(arrays={"a": np.ones(3)}), tmp_path)
    records.write(record(), tmp_path)
    assert list(path.parent.iterdir()) == [path]


def test_a_record_finds_others_where_it_lay_itself(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    other = "idp-sgd/table-6"
    for folder, value in ((here, 1.0), (there, 2.0)):
        records.write(record(), folder)
        records.write(records.make(other, "paper", {"a": value}, config={}), folder)
    for folder, value in ((here, 1.0), (there, 2.0)):
        found = records.find(NAME, "paper", folder)
        assert found.beside(other).values == {"a": value}
        assert found.beside("idp-sgd/table-7") is None
    records.write(records.find(NAME, "paper", here), there)  # which knows nothing of folders
    assert records.find(NAME, "paper", there).folder == there


def test_no_record_is_none(tmp_path):
    assert records.find(NAME, "paper", tmp_path) is None


def test_records_live_in_the_checkout_or_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "repository", lambda: None)
    assert records.results_folder() == tmp_path / "results" and provenance.commit() is None
    monkeypatch.setattr(provenance, "repository", lambda: tmp_path / "checkout")
    assert records.results_folder() == tmp_path / "checkout" / "results"
    assert records.results_folder("elsewhere").name == "elsewhere"


def test_the_mean_over_seeds_has_a_sample_deviation():
    values = [96.7, 96.9, 96.8, 97.3]
    result = mean_and_sd(values)
    assert result == pytest.approx((np.mean(values), np.std(values, ddof=1), 4))
    assert math.isnan(mean_and_sd([1.0]).sd) and math.isnan(mean_and_sd([1.0, math.nan]).mean)
    refused("values", mean_and_sd, [])


def test_a_record_tells_whether_its_seeds_drew_otherwise():
    made = records.make("idp-sgd/table-5", "paper", {}, config={"seeds": [0]})
    assert made.versions["draws"] == str(seeds.DRAWS) and not made.has_earlier_draws
    older = {key: value for key, value in made.versions.items() if key != "draws"}
    assert dataclasses.replace(made, versions=older).has_earlier_draws
    taken_over = {"pieces": 1, "seconds": 1.0, "commit": None}
    assert dataclasses.replace(made, kept=[{**taken_over, "versions": older}]).has_earlier_draws
    assert not dataclasses.replace(
        made, kept=[{**taken_over, "versions": made.versions}]
    ).has_earlier_draws
    # What has neither data nor seeds draws nothing.
    assert not dataclasses.replace(made, versions=older, config={}).has_earlier_draws
