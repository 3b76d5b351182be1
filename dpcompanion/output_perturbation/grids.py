r"""Thousands of small SGD runs side by side: every (neighbouring data set, seed) of a grid.

The runs of Hyland and Tople 2020, section VI-A.  Example 0 is held out; data set :math:`S_i` is the
examples 1..n with example i replaced, in its place, by example 0. A seed draws the initialization
and a new order of the n places for each epoch.  So all runs of one seed walk through the same
batches, which differ in one row where a replaced example turns up: one batched matrix product
serves them all, with example 0 as an extra row that only the runs concerned look at.

Models are those of the paper, with cross-entropy loss and plain SGD: logistic regression with a
bias, and one hidden layer of ReLU units. Gradients of a batch are summed and divided by
`batch_size`, also in the last, smaller batch of an epoch, so that one example never moves the
weights by more than theorem 2 allows. Weights start as Keras starts them: uniform in
:math:`\pm\sqrt{6/(\text{inputs} + \text{outputs})}`, biases 0.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from dpcompanion import _checks
from dpcompanion._progress import bar
from dpcompanion._types import Device
from dpcompanion.seeds import derive_key, jittered, keyed_generator

# Runs of a chunk are as many as keep the weights in a core's own cache.
_CHUNK_BYTES = 2**19
_ROUNDING = 1e-6
# Least learning rate over batch size: float64 rounds weights of size 1 by a ten-millionth of it.
_LEAST_STEP = 1e-9


def _check_rate(learning_rate, batch_size):
    """A learning rate that the bound of theorem 2 covers, for logistic regression."""
    if learning_rate > 4:
        raise ValueError(
            "learning_rate must be at most 2 / beta = 4, or a step of SGD is not 1-expansive and "
            "theorem 2 fails (logistic loss, norms with the bias up to sqrt(2): beta = 1/2), got "
            f"{learning_rate:g}"
        )
    if learning_rate < _LEAST_STEP * batch_size:
        raise ValueError(
            f"learning_rate must be at least {_LEAST_STEP:g} times the batch_size, or the rounding "
            f"of weights counts beside the bound of theorem 2, got {learning_rate:g}"
        )


def train_grid(
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    data_sets: Iterable[int],
    seeds: Iterable[int],
    steps: int,
    batch_size: int,
    learning_rate: float,
    initialization: str | int = "varying",
    hidden: int = 0,
    snapshots: Sequence[int] | None = None,
    enforce_conditions: bool = True,
    device: Device = None,
    progress: bool | None = None,
) -> torch.Tensor:
    r"""The weights of one SGD run for each data set and seed.

    Many arguments, since the data sets, the runs and their common settings are all given.

    Args:
        features: (n + 1, d), float32 or float64, rows of norm at most 1; row 0 is the held-out
            example that replaces others. Runs compute in this dtype, but in float64 where theorem 2
            is to hold: a step of learning_rate / B may be less than float32 rounds weights by.
        labels: (n + 1,) of 0 and 1.
        data_sets: different numbers i in [0, n], two at least: data set i has example i replaced by
            example 0; data set 0 has none replaced.
        seeds: different whole numbers, two at least, of which every bit counts
            (`dpcompanion.seeds`). A run depends on its own seed and data set only, not on what is
            trained beside it, so that a large grid can be trained in parts.
        steps: of SGD, each on one batch.
        batch_size, learning_rate: B in [1, n] and eta.
        initialization: "varying" with the seed, or "fixed": the same for all seeds, which is that
            of seed 0; a whole number is the seed of another one.
        hidden: ReLU units of the hidden layer; 0 for logistic regression.
        snapshots: steps in [0, steps] at which to return the weights; the last one by default.
        enforce_conditions: refuse norms and learning rates that theorem 2 does not cover, and
            compute logistic regression in float64. What that rounds (1e-16 of a weight in each
            step) is small beside learning_rate / B, and not counted. Without it runs are as
            reproducible, but their sensitivity has no bound.
        device: where to compute; that of the features by default. Seeds are sampled on the CPU
            everywhere.
        progress: whether to show a bar; on a terminal by default.

    Returns:
        (data sets, seeds, parameters) tensor on the CPU, with a leading axis for the snapshots if
        they are given. The parameters: weights, then bias; with a hidden layer the rows (weights,
        bias) of its units, then those of the output.

    Raises:
        ValueError: bad input; for logistic regression also what breaks the conditions of theorem 2:
            a row norm above 1 (the gradient's bound sqrt(2)), a learning rate above 2 / beta = 4
            (steps would no longer be 1-expansive), or one below 1e-9 B (rounding would count).

    >>> features = torch.randn(41, 3, generator=torch.Generator().manual_seed(0))
    >>> labels = (features[:, 0] > 0).long()
    >>> features = features / features.norm(dim=1, keepdim=True).clamp(min=1)
    >>> weights = train_grid(
    ...     features,
    ...     labels,
    ...     data_sets=(0, 5, 7),
    ...     seeds=range(4),
    ...     steps=50,
    ...     batch_size=8,
    ...     learning_rate=1,
    ... )
    >>> weights.shape  # data sets, seeds, parameters: three weights and the bias
    torch.Size([3, 4, 4])
    """
    data_sets, seeds = _check_grid(
        features, labels, data_sets, seeds, math.inf if not enforce_conditions else 1
    )
    n = len(features) - 1
    steps = _checks.whole_number("steps", steps, 1)
    batch_size = _checks.whole_number("batch_size", batch_size, 1)
    if batch_size > n:
        raise ValueError(
            f"batch_size must be at most the {n} examples of a data set, got {batch_size}"
        )
    hidden = _checks.whole_number("hidden", hidden, 0)
    learning_rate = _checks.number("learning_rate", learning_rate, 0, math.inf, closed="neither")
    bounded = enforce_conditions and not hidden
    if bounded:
        _check_rate(learning_rate, batch_size)
    if isinstance(initialization, str):
        _checks.one_of("initialization", initialization, ("varying", "fixed"))
    else:
        _checks.whole_number("initialization", initialization, 0)
    stops = (
        [steps]
        if snapshots is None
        else [_checks.whole_number("snapshots", s, 0, steps) for s in snapshots]
    )
    device = torch.device(device or features.device)

    dtype = torch.float64 if bounded else features.dtype
    features = torch.cat((features, torch.ones_like(features[:, :1])), 1).to(device, dtype)
    labels = labels.to(device, features.dtype)
    model = _Network(hidden) if hidden else _Logistic()
    count = model.count(features.shape[1])
    size = max(1, _CHUNK_BYTES // (len(data_sets) * count * features.element_size()))
    found = torch.empty(len(stops), len(data_sets), len(seeds), count, dtype=features.dtype)
    chunks = [range(i, min(i + size, len(seeds))) for i in range(0, len(seeds), size)]
    with bar(steps * len(seeds), label="SGD", show=progress) as advance:
        for chunk in chunks:
            runs = _Runs(
                model,
                features,
                labels,
                data_sets,
                [seeds[i] for i in chunk],
                batch_size,
                initialization,
            )
            done = 0
            for stop in sorted(set(stops)):
                for _ in range(stop - done):
                    runs.step(learning_rate / batch_size)
                advance((stop - done) * len(chunk))
                done = stop
                for k in (k for k, s in enumerate(stops) if s == stop):
                    found[k, :, chunk.start : chunk.stop] = (
                        model.flat(runs.weights).transpose(0, 1).cpu()
                    )
    return found[0] if snapshots is None else found


def initial_weights(features, seed, *, hidden=0):
    """The weights that a run starts from, (parameters,) float64; `features` is their number d.

    >>> initial_weights(3, 0)[-1]  # the bias
    tensor(0., dtype=torch.float64)
    """
    model = _Network(hidden) if hidden else _Logistic()
    return model.flat([w[None, None] for w in model.start(features + 1, _stream(seed))])[0, 0]


def epoch_orders(n, seed, epochs, *, features, hidden=0):
    """The order of the places 1..n in each epoch of a run, (epochs, n). See `train_grid`.

    >>> epoch_orders(4, 0, 2, features=3).sort(1).values
    tensor([[1, 2, 3, 4],
            [1, 2, 3, 4]])
    """
    generator = _stream(seed)
    (_Network(hidden) if hidden else _Logistic()).start(features + 1, generator)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(epochs)]) + 1


def _stream(seed):
    return keyed_generator(derive_key(seed, "sgd"))


def _check_grid(features, labels, data_sets, seeds, max_norm):
    if not (
        torch.is_tensor(features)
        and features.ndim == 2
        and features.dtype in (torch.float32, torch.float64)
    ):
        raise ValueError(
            "features must be a float32 or float64 tensor of shape (n + 1, d), got "
            f"{tuple(features.shape) if hasattr(features, 'shape') else type(features).__name__}"
        )
    if not (torch.is_tensor(labels) and labels.shape == (len(features),)):
        raise ValueError(
            f"labels must be a tensor of shape ({len(features)},), got "
            f"{tuple(labels.shape) if hasattr(labels, 'shape') else type(labels).__name__}"
        )
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"labels must be 0 or 1, got {labels[(labels != 0) & (labels != 1)][0].item():g}"
        )
    norms = features.norm(dim=1)
    if not bool(norms.isfinite().all()):
        raise ValueError(
            "features must be finite numbers, got a row of norm "
            f"{norms[~norms.isfinite()][0].item():g}"
        )
    if not bool((norms <= max_norm + _ROUNDING).all()):
        worst = norms.max().item()
        raise ValueError(
            "features must have row norms of at most 1, or the loss is not sqrt(2)-Lipschitz and "
            f"theorem 2 fails, got {worst:g}"
        )
    data_sets = [_checks.whole_number("data_sets", i, 0, len(features) - 1) for i in data_sets]
    seeds = [_checks.seed("seeds", s) for s in seeds]
    for name, values, why in (
        ("data_sets", data_sets, "the sensitivity compares pairs of them"),
        ("seeds", seeds, "the intrinsic noise is what differs between them"),
    ):
        if len(values) < 2 or len(set(values)) < len(values):
            raise ValueError(
                f"{name} must be two or more different numbers, since {why}, got {values!r}"
            )
    return data_sets, seeds


class _Runs:
    """The runs of some seeds on all data sets: weights[k] is (seeds, data sets, ...)."""

    def __init__(self, model, features, labels, data_sets, seeds, batch_size, initialization):
        self.model = model
        self.features = features
        self.labels = labels
        self.batch_size = batch_size
        self.generators = [_stream(seed) for seed in seeds]
        starts = [model.start(features.shape[1], generator) for generator in self.generators]
        if initialization != "varying":
            start = _stream(0 if initialization == "fixed" else initialization)
            starts = [model.start(features.shape[1], start)] * len(seeds)
        self.weights = [
            torch.stack(layer)[:, None]
            .repeat(1, len(data_sets), *[1] * (layer[0].ndim))
            .to(features)
            for layer in zip(*starts)
        ]
        self.replaced = torch.tensor(data_sets)
        self.batches = iter(())

    def step(self, rate):
        batch = next(self.batches, None)
        if batch is None:
            self.batches = self.epoch()
            batch = next(self.batches)
        examples, (seed, data_set, place) = batch
        x, y = self.features[examples], self.labels[examples]
        residual, memory = self.model.forward(self.weights, x)
        residual.sigmoid_().sub_(y[:, None])
        # The last row is example 0, and counts in the runs whose replaced example is in this batch.
        own = residual[seed, data_set, -1]
        residual[..., -1] = 0
        residual[seed, data_set, place] = 0
        residual[seed, data_set, -1] = own
        self.model.update(self.weights, x, residual, memory, rate)

    def epoch(self):
        """The examples of each batch with a last 0, (seeds, B + 1), and where replaced ones are."""
        n, size, device = len(self.features) - 1, self.batch_size, self.features.device
        order = torch.stack(
            [torch.randperm(n, generator=generator) for generator in self.generators]
        )
        place = order.new_empty(len(order), n).scatter_(1, order, torch.arange(n).expand_as(order))
        # Data set 0 replaces nothing: it waits at a place behind the last batch.
        batches = -(-n // size)
        place = torch.where(
            self.replaced > 0, place[:, (self.replaced - 1).clamp(min=0)], batches * size
        )
        at, sequence = (place // size).flatten().sort(stable=True)
        seed, data_set = sequence // len(self.replaced), sequence % len(self.replaced)
        hits = torch.stack((seed, data_set, place.flatten()[sequence] % size)).to(device)
        hits = hits.split(torch.bincount(at, minlength=batches + 1).tolist(), 1)
        order = (order + 1).to(device)
        zero = order.new_zeros(len(order), 1)
        for t in range(batches):
            yield torch.cat((order[:, t * size : (t + 1) * size], zero), 1), hits[t]


def _glorot(inputs, outputs, generator):
    """(outputs, inputs + 1): uniform weights, bias 0."""
    uniform = torch.rand(outputs, inputs, generator=generator, dtype=torch.float64) * 2 - 1
    weights = jittered(uniform * math.sqrt(6 / (inputs + outputs)))
    return torch.cat((weights, torch.zeros(outputs, 1, dtype=torch.float64)), 1)


class _Logistic:
    """One layer, (seeds, data sets, inputs); the last input is 1."""

    def count(self, inputs):
        return inputs

    def start(self, inputs, generator):
        return [_glorot(inputs - 1, 1, generator)[0]]

    def forward(self, weights, x):
        return torch.bmm(weights[0], x.mT), None

    def update(self, weights, x, residual, memory, rate):
        weights[0].baddbmm_(residual, x, alpha=-rate)

    def flat(self, weights):
        return weights[0]


class _Network:
    """A hidden layer (seeds, data sets, hidden, inputs), whose last input is 1, and the output
    (seeds, data sets, hidden + 1)."""

    def __init__(self, hidden):
        self.hidden = hidden

    def count(self, inputs):
        return self.hidden * inputs + self.hidden + 1

    def start(self, inputs, generator):
        return [_glorot(inputs - 1, self.hidden, generator), _glorot(self.hidden, 1, generator)[0]]

    def forward(self, weights, x):
        first, last = weights
        active = torch.bmm(first.flatten(1, 2), x.mT).relu_().unflatten(1, first.shape[1:3])
        return (last[..., None, :-1] @ active).squeeze(2) + last[..., -1:], active

    def update(self, weights, x, residual, active, rate):
        first, last = weights
        back = residual[:, :, None] * last[..., :-1, None] * (active > 0)
        last[..., :-1] -= rate * (active @ residual[..., None]).squeeze(-1)
        last[..., -1] -= rate * residual.sum(-1)
        first.flatten(1, 2).baddbmm_(back.flatten(1, 2), x, alpha=-rate)

    def flat(self, weights):
        return torch.cat((weights[0].flatten(2), weights[1]), -1)
