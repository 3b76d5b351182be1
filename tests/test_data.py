import gc
import gzip
import hashlib
import io
import pickle
import sys
import types
import weakref

import numpy as np
import pytest
import torch

from dpcompanion import data
from dpcompanion.data.files import PlainUnpickler

from .refusals import refused, refuses


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(data.files.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(data.files, "import_torchvision", refuse)
    monkeypatch.delenv("DPCOMPANION_DATA", raising=False)


def idx(array):
    shape = np.array(array.shape, dtype=">i4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def small_mnist(root, compress=gzip.compress, suffix=".gz"):
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", 6), ("t10k", 4)):
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(
            compress(idx(rng.integers(0, 256, (n, 28, 28))))
        )
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(compress(idx(np.arange(n))))
    return folder


SMALL_NPZ = {
    "train_x": np.zeros((5, 32, 32, 3), np.uint8),
    "train_y": np.arange(5),
    "test_x": np.full((3, 32, 32, 3), 255, np.uint8),
    "test_y": np.arange(3),
}


@pytest.mark.parametrize(
    "name, features, classes",
    [
        ("mnist-5k", (1, 28, 28), 10),
        ("digits", (1, 8, 8), 10),
        ("breast-cancer", (30,), 2),
        ("iris", (4,), 3),
        ("wine", (13,), 3),
    ],
)
def test_the_sets_in_the_install_load_and_their_split_is_stratified(name, features, classes):
    train, test, whole = (data.load(name, split=split) for split in ("train", "test", "all"))
    assert len(train) + len(test) == len(whole)
    assert whole.features.shape == (len(whole), *features) and train.num_classes == classes
    share = test.labels.bincount() / whole.labels.bincount()
    assert torch.allclose(share.double(), torch.tensor(0.2).double(), atol=0.02)
    assert train.verified and len({train.sha256, test.sha256, whole.sha256}) == 3
    assert len(train.columns) == (features[0] if len(features) == 1 else 0)


@pytest.mark.parametrize("name", ["digits", "breast-cancer", "iris", "wine"])
def test_a_set_of_scikit_learn_is_verified_only_when_it_is_compared(name, monkeypatch):
    assert data.load(name).verified and not data.load(name, verify=False).verified
    from sklearn import datasets

    loader = f"load_{name.replace('-', '_')}"
    altered = getattr(datasets, loader)()
    altered.data[3, 1] += 1
    monkeypatch.setattr(datasets, loader, lambda: altered)
    refused(loader, data.load, name)
    assert not data.load(name, verify=False).verified


def test_mnist_5k_is_split_into_4000_and_1000_examples_that_stay_the_same():
    train, test = data.load("mnist-5k"), data.load("mnist-5k", split="test", dtype=torch.float64)
    assert (
        train.labels.bincount().tolist() == [400] * 10
        and test.labels.bincount().tolist() == [100] * 10
    )
    assert (
        test.features.dtype == torch.float64
        and test.features.min() == 0
        and test.features.max() == 1
    )
    # The digest is of the raw bytes: the dtype asked for does not change it, and no release of ours
    # may.
    assert test.sha256 == data.load("mnist-5k", split="test").sha256
    assert train.sha256.startswith("0cb263cd") and test.sha256.startswith("05f3fce7")


def test_two_loads_share_no_memory():
    first = data.load("mnist-5k", split="test")
    first.features.zero_()
    first.labels.zero_()
    again = data.load("mnist-5k", split="test")
    assert again.features.sum() > 0 and again.labels.sum() > 0


def test_normalised_uses_public_constants_only():
    test = data.load("mnist-5k", split="test", dtype=torch.float64)
    assert torch.allclose(test.normalized().features, (test.features - 0.1307) / 0.3081)
    with pytest.raises(ValueError, match="public constants.*'wine'"):
        data.load("wine").normalized()


def test_bad_arguments_are_named_with_what_is_allowed():
    good = dict(name="digits")
    refuses(
        data.load,
        good,
        name=["mnist-6k"],
        split=["validation"],
        target=["age"],
        dtype=[torch.int64],
    )


@pytest.mark.parametrize("name", list(data.HOW_TO_GET))
def test_a_missing_set_gets_one_line_on_how_to_fill_the_folder(name, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        data.load(name, root=tmp_path)
    said = str(error.value)
    assert "\n" not in said and str(tmp_path) in said and data.HOW_TO_GET[name] in said
    assert ("the download failed: no network in tests" in said) == (
        name not in ("utkface", "surnames", "imdb")
    )
    with pytest.raises(FileNotFoundError) as error:
        data.load(name, root=tmp_path, download=False)
    assert "download failed" not in str(error.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_folder_comes_from_the_argument_then_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMPANION_DATA", str(tmp_path / "env"))
    assert data.data_folder() == tmp_path / "env"
    assert data.data_folder(tmp_path) == tmp_path
    monkeypatch.delenv("DPCOMPANION_DATA")
    assert data.data_folder().parts[-2:] == (".cache", "dpcompanion")


@pytest.mark.parametrize("compress, suffix", [(gzip.compress, ".gz"), (bytes, "")])
def test_idx_files_load_compressed_or_not_once_verification_is_waived(tmp_path, compress, suffix):
    small_mnist(tmp_path, compress, suffix)
    train = data.load("mnist", root=tmp_path, verify=False)
    assert train.features.shape == (6, 1, 28, 28) and train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert not train.verified
    assert len(data.load("mnist", root=tmp_path, split="all", verify=False)) == 10


def test_an_altered_file_is_refused_by_name(tmp_path):
    small_mnist(tmp_path)
    refused("train-images-idx3-ubyte.gz", data.load, "mnist", root=tmp_path)


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-9],
        lambda b: b[:20],
        lambda b: b"",
        lambda b: b"\0" * len(b),
        lambda b: b[:30] + bytes([b[30] ^ 255]) + b[31:],
    ],
)
def test_a_truncated_or_broken_gzip_file_is_refused_by_name_even_unverified(tmp_path, file, damage):
    path = small_mnist(tmp_path) / file
    path.write_bytes(damage(path.read_bytes()))
    refused(file, data.load, "mnist", root=tmp_path, verify=False)


def test_labels_and_images_must_be_as_many(tmp_path):
    path = small_mnist(tmp_path) / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.arange(5))))
    refused("examples", data.load, "mnist", root=tmp_path, verify=False)


def test_arrays_in_an_npz_file_load_without_pickle(tmp_path):
    np.savez(tmp_path / "svhn.npz", **SMALL_NPZ)
    test = data.load("svhn", split="test", root=tmp_path)
    assert test.features.shape == (3, 3, 32, 32) and test.features.min() == 1 and not test.verified
    np.savez(
        tmp_path / "svhn.npz", **{**SMALL_NPZ, "test_y": np.array([print, 1, 2], dtype=object)}
    )
    refused("svhn.npz", data.load, "svhn", root=tmp_path)


def test_an_npz_file_with_altered_bytes_missing_arrays_or_bad_labels_is_refused(tmp_path):
    path = tmp_path / "cifar10.npz"
    np.savez(path, **SMALL_NPZ)
    refused("cifar10.npz:train_x", data.load, "cifar10", root=tmp_path)
    assert len(data.load("cifar10", root=tmp_path, verify=False)) == 5
    path.write_bytes(path.read_bytes()[:-200])
    refused("cifar10.npz", data.load, "cifar10", root=tmp_path, verify=False)
    np.savez(path, train_x=SMALL_NPZ["train_x"])
    refused("train_x", data.load, "cifar10", root=tmp_path, verify=False)
    np.savez(path, **{**SMALL_NPZ, "train_y": np.array([0, 1, 2, 3, 10])})
    refused("cifar10", data.load, "cifar10", root=tmp_path, verify=False)


class _Evil:
    def __reduce__(self):
        return (open, ("stolen", "w"))


def test_a_pickled_batch_is_checked_before_it_is_read_and_can_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    images = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": [3, 4]}))
    train = data.load("cifar10", root=tmp_path, verify=False)
    assert train.features.shape == (10, 3, 32, 32) and train.labels.tolist() == [3, 4] * 5
    assert torch.equal(train.features[0].reshape(-1), torch.from_numpy(images[0]).float() / 255)
    refused("data_batch_1", data.load, "cifar10", root=tmp_path)
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": _Evil(), b"labels": [3, 4]}))
    refused("data_batch_2", data.load, "cifar10", root=tmp_path, verify=False)
    assert not (tmp_path / "stolen").exists()


def test_svhn_matlab_files_load_with_the_digit_zero_as_class_zero(tmp_path):
    import scipy.io

    for split in ("train", "test"):
        scipy.io.savemat(
            tmp_path / f"{split}_32x32.mat",
            {
                "X": np.zeros((32, 32, 3, 4), np.uint8),
                "y": np.array([[10], [1], [2], [9]], np.uint8),
            },
        )
    train = data.load("svhn", root=tmp_path, verify=False)
    assert train.features.shape == (4, 3, 32, 32) and train.labels.tolist() == [0, 1, 2, 9]
    refused("train_32x32.mat", data.load, "svhn", root=tmp_path)


def test_adult_rows_become_numbers_and_documented_codes(tmp_path):
    row = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, "
        "0, 40, Cuba, "
    )
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text(row + "<=50K\n\n", encoding="utf-8")
    (tmp_path / "adult" / "adult.test").write_text(
        "|1x3 Cross validator\n" + row + ">50K.\n\n", encoding="utf-8"
    )
    train, test = (
        data.load("adult", split=split, root=tmp_path, verify=False) for split in ("train", "test")
    )
    assert train.labels.tolist() == [0] and test.labels.tolist() == [1]
    values = dict(zip(train.columns, train.features[0].tolist()))
    assert values["age"] == 39 and values["capital-gain"] == 2174
    assert train.categories["workclass"][int(values["workclass"])] == "State-gov"
    assert train.categories["occupation"][int(values["occupation"])] == "?"
    (tmp_path / "adult" / "adult.data").write_text(
        row.replace("Cuba", "Atlantis") + "<=50K\n", encoding="utf-8"
    )
    refused("adult.data", data.load, "adult", root=tmp_path, verify=False)


def test_covertype_classes_count_from_zero(tmp_path):
    (tmp_path / "covtype").mkdir()
    path = tmp_path / "covtype" / "covtype.data.gz"
    path.write_bytes(
        gzip.compress(
            b"\n".join(b",".join(b"%d" % v for v in [2596] * 54 + [k]) for k in (5, 7)) + b"\n"
        )
    )
    whole = data.load("covertype", split="all", root=tmp_path, verify=False)
    assert (
        whole.features.shape == (2, 54)
        and whole.labels.tolist() == [4, 6]
        and whole.columns[0] == "Elevation"
    )
    path.write_bytes(gzip.compress(b"1,2,3\n"))
    refused("covtype.data.gz", data.load, "covertype", root=tmp_path, verify=False)


def test_utkface_predicts_the_attribute_that_is_asked_for(tmp_path):
    np.savez(
        tmp_path / "utkface.npz",
        x=np.zeros((10, 8, 8, 3), np.uint8),
        age=np.arange(10, dtype=np.int16),
        gender=np.array([0, 1] * 5, np.int8),
        race=np.array([0, 1, 2, 3, 4] * 2, np.int8),
    )
    whole = {
        target: data.load("utkface", split="all", target=target, root=tmp_path)
        for target in (None, "gender", "race", "age")
    }
    assert whole[None].labels.tolist() == whole["gender"].labels.tolist() == [0, 1] * 5
    assert whole["race"].classes[4] == "Other" and whole["race"].labels.max() == 4
    assert whole["age"].labels.tolist() == list(range(10)) and whole["age"].num_classes == 0
    assert sorted(whole[None].attributes) == ["age", "gender", "race"]


def test_text_sets_load_as_strings_with_their_labels(tmp_path):
    (tmp_path / "names.tsv").write_text(
        "name\tlanguage\n" + "Ånström \tGreek\nAbe\tJapanese\n" * 5, encoding="utf-8"
    )
    names = data.load("surnames", split="all", root=tmp_path, verify=False)
    assert names.features[:2] == ("Ånström ", "Abe") and names.classes[names.labels[0]] == "Greek"
    (tmp_path / "imdb.tsv").write_text(
        "train\tneg\t0\t3\tbad\tfilm\ntest\tpos\t1\t9\tgood\n", encoding="utf-8"
    )
    reviews = data.load("imdb", root=tmp_path, verify=False)
    assert reviews.features == ("bad\tfilm",) and reviews.labels.tolist() == [0]
    assert reviews.attributes["stars"].tolist() == [3]
    refused("imdb.tsv", data.load, "imdb", root=tmp_path)
    (tmp_path / "names.tsv").write_text("name\tlanguage\nAbe Klingon\n", encoding="utf-8")
    refused("names.tsv", data.load, "surnames", root=tmp_path, verify=False)


@pytest.mark.parametrize(
    "name, file",
    [
        ("surnames", "names.tsv"),
        ("surnames", "surnames.tsv"),
        ("surnames", "surnames.tsv.gz"),
        ("imdb", "imdb/imdb.tsv"),
    ],
)
def test_a_text_set_is_checked_under_every_name_that_its_file_may_have(
    tmp_path, monkeypatch, name, file
):
    content = (
        b"name\tlanguage\nAbe\tJapanese\n" if name == "surnames" else b"train\tneg\t0\t3\tbad\n"
    )
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    refused(path.name, data.load, name, split="all", root=tmp_path)
    published = {"surnames": "names.tsv", "imdb": "imdb.tsv"}[name]
    monkeypatch.setitem(data.facts.SHA256, published, hashlib.sha256(content).hexdigest())
    assert data.load(name, split="all", root=tmp_path).verified
    assert not data.load(name, split="all", root=tmp_path, verify=False).verified


@pytest.fixture
def _torchvision_forgotten(monkeypatch):
    monkeypatch.undo()
    for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, module)


def _importer(monkeypatch, outcomes):
    """Make `import torchvision` raise or return the given outcomes, one after the other."""
    import builtins

    plain = builtins.__import__

    def fake(name, *args, **kwargs):
        if name != "torchvision":
            return plain(name, *args, **kwargs)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(builtins, "__import__", fake)


def test_torchvision_is_imported_plainly_where_that_works(monkeypatch, _torchvision_forgotten):
    module = types.ModuleType("torchvision")
    _importer(monkeypatch, [module])
    assert data.import_torchvision() is module


def test_torchvision_is_imported_with_its_operators_declared_where_they_are_missing(
    monkeypatch, _torchvision_forgotten
):
    module, declared, made = types.ModuleType("torchvision"), [], []

    class Library:
        def __init__(self, *namespace):
            declared.append(namespace)
            made.append(weakref.ref(self))

        def define(self, schema):
            declared.append(schema)

    monkeypatch.setattr(torch.library, "Library", Library)
    _importer(monkeypatch, [RuntimeError("operator torchvision::nms does not exist"), module])
    assert data.import_torchvision() is module
    assert declared == [("torchvision", "DEF")] + [
        f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms")
    ]
    gc.collect()
    assert all(library() for library in made)  # what is declared lasts as long as its library does


def test_any_other_failure_of_torchvision_is_passed_on(monkeypatch, _torchvision_forgotten):
    _importer(monkeypatch, [RuntimeError("something else")])
    with pytest.raises(RuntimeError, match="something else"):
        data.import_torchvision()


class Forged:
    """Pickled, an array whose dtype says that plain bytes are pointers."""

    class Dtype:
        def __reduce__(self):
            fields = {"a": (np.dtype("O"), 0)}
            return np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, 8, 1, 1)

    def __reduce__(self):
        state = 1, (1,), self.Dtype(), False, b"A" * 8
        return np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state


def test_a_pickled_array_is_no_more_than_its_numbers():
    def read(content, protocol=2):
        source = io.BytesIO(pickle.dumps({b"data": content}, protocol=protocol))
        return PlainUnpickler(source, encoding="bytes").load()[b"data"]

    with pytest.raises(pickle.UnpicklingError, match="no place"):
        read(Forged())
    with pytest.raises(pickle.UnpicklingError, match="no place"):
        read(np.array([None], dtype=object))
    for values in (
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.linspace(0, 1, 5),
    ):
        for protocol in (2, 3, 4):
            assert np.array_equal(np.asarray(read(values, protocol)), values)
