"""What is refused before a run begins, and models that only look unusual."""

import copy
import dataclasses
import random

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion._devices import whole_convolutions
from dpcompanion.gradients import items
from dpcompanion.gradients.tensors import call_with
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    Performance,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    train,
    train_ensemble,
)
from dpcompanion.training.runs import Ensemble

from ..refusals import refused, refuses

PLAN = DPSGDPlan(
    n=20, sample_rate=0.5, steps=3, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
)
X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def fit(model, x=X, y=Y, loss=cross_entropy, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, loss, (x, y), PLAN, optimizer=optimizer, seed=0, progress=False, **options)


@pytest.mark.parametrize(
    "x, y, message",
    [
        (X.numpy(), Y, "tensors"),
        (X, Y.numpy(), "tensors"),
        (X.tolist(), Y, "tensors"),
        (X[:19], Y, "plan.n = 20"),
        (X, Y[:19], "plan.n = 20"),
        (X.double(), Y, "torch.float64"),
        (X, Y.float(), "data"),
        (X, Y.int(), "data"),
        (X[:, :3], Y, "data"),
        (X.long(), Y, "data"),
        (X, torch.tensor(1), "shape"),
    ],
)
def test_data_that_the_model_cannot_take_are_refused(x, y, message):
    """They ended in an error of some layer, or of numpy, in the middle of the work."""
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model.state_dict())
    refused(message, fit, model, x, y)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_cross_entropy_of_tokens_asks_for_one_number_an_example():
    model, tokens = nn.Embedding(5, 3), torch.zeros(20, 6, dtype=torch.int64)
    refused("mean over their tokens", fit, model, tokens, tokens)

    def mean(outputs, targets):
        return nn.functional.cross_entropy(outputs.mT, targets, reduction="none").mean(1)

    fit(model, tokens, tokens, loss=mean)
    assert cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4).long()).shape == (2, 4)


def test_the_other_ways_in_refuse_such_data_too():
    model = nn.Linear(4, 3)
    refused("tensors", gradient_norms, model, cross_entropy, X.numpy(), Y.numpy())
    refused("float64", gradient_norms, model, cross_entropy, X.double(), Y, method="mixed")
    refused("tensors", NormTracker.for_plan, PLAN, model, cross_entropy, (X.numpy(), Y))
    for data in ((X.numpy(), Y), (X.double(), Y)):
        refused(
            "data must",
            train_ensemble,
            model,
            cross_entropy,
            data,
            PLAN,
            seeds=[0, 1],
            learning_rate=0.1,
        )


def test_parameters_of_two_types_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double())
    refused("floating-point", fit, model)


def test_an_optimizer_that_leaves_out_a_trainable_parameter_is_refused():
    """It got noise and an account, and never moved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    refused(
        r"1\.weight, 1\.bias", fit, model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1)
    )
    model[1].requires_grad_(False)
    fit(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_an_optimizer_that_needs_the_loss_again_is_refused():
    model = nn.Linear(4, 3)
    refused("LBFGS", fit, model, optimizer=torch.optim.LBFGS(model.parameters()))


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x.unflatten(1, (2, 2)))[0][:, -1])


@pytest.mark.parametrize("cell, dtype", [(nn.LSTM, torch.float64), (nn.GRU, torch.float32)])
def test_a_model_that_vmap_cannot_take_is_refused_before_training(cell, dtype):
    model = Recurrent(cell).to(dtype)
    refused("torch.func", fit, model, X.to(dtype))


class Shared(nn.Module):
    """One module under two names, one weight in two modules, and a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again, self.tied.weight = self.one, self.one.weight
        self.one.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        for layer in (self.one, self.again, self.tied):
            x = torch.tanh(layer(x)) * self.one.scale
        return self.head(x)


@pytest.mark.parametrize("method", ["func", "auto"])
def test_a_model_that_holds_one_module_twice_is_whole_after_training(method):
    """torch.func.functional_call put dead tensors in the place of its parameters."""
    torch.manual_seed(0)
    model = Shared()
    before = dict(model.named_parameters())
    fit(model, method=method)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is p for name, p in before.items())
    assert model.tied.weight is model.one.weight and type(model.one.scale) is torch.Tensor
    assert all(p.requires_grad and p.is_leaf for p in after.values())
    cross_entropy(model(X), Y).mean().backward()


def test_call_with_replaces_a_shared_parameter_everywhere_and_matches_autograd():
    torch.manual_seed(0)
    model = Shared()
    changed = {name: p.detach() * 2 for name, p in model.named_parameters()}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert torch.equal(call_with(model, changed, X), other(X))
    norms = gradient_norms(model, cross_entropy, X, Y, method="func")
    for i in range(3):
        model.zero_grad()
        cross_entropy(model(X[i : i + 1]), Y[i : i + 1]).sum().backward()
        alone = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert float((norms[i] / alone - 1).abs()) < 1e-5


def test_a_loader_is_not_unpacked_and_its_data_set_is_asked_for():
    model = nn.Linear(4, 3)
    pairs = torch.utils.data.TensorDataset(X, Y)
    for data in (torch.utils.data.DataLoader(pairs), iter([(X, Y)]), None, 3):
        with pytest.raises(ValueError, match=f"data.*{type(data).__name__}"):
            train(
                model,
                cross_entropy,
                data,
                PLAN,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            )
    refused(
        "data",
        train,
        model,
        cross_entropy,
        (X, Y, X),
        PLAN,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def test_a_finished_run_is_read_without_a_warning(tmp_path, recwarn):
    model = nn.Linear(4, 3)
    for _ in range(2):  # the second time all steps are done, and the keys of the run are gone
        train(
            model,
            cross_entropy,
            (X, Y),
            PLAN,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            checkpoint=Checkpoint(tmp_path / "run.pt"),
            progress=False,
        )
    assert [str(w.message) for w in recwarn if "is gone" in str(w.message)] == []


def cast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("setting", ["medium", "high"])
@pytest.mark.parametrize("method", ["auto", "mixed", "ghost", "func"])
def test_shorter_products_of_float32_are_refused(method, setting):
    torch.set_float32_matmul_precision(setting)
    try:
        with pytest.raises(
            ValueError, match=r"full float32.*set_float32_matmul_precision\('highest'\)"
        ):
            clipped_sum(nn.Linear(4, 3), cross_entropy, X, Y, 0.1, method=method)
        refused("full float32", fit, nn.Linear(4, 3), method=method)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("method", ["auto", "mixed", "ghost", "func"])
def test_an_autocast_of_the_callers_is_refused_and_one_of_the_models_is_not(method):
    """In bfloat16 sums of 4,096 clipped gradients moved by five clip norms with one example."""

    class Own(nn.Sequential):
        def forward(self, x):
            with cast():
                return super().forward(x).float()

    torch.manual_seed(0)
    model = Own(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(1024, 4) * 0.1 + 1, torch.zeros(1024, dtype=torch.int64)
    with cast(), pytest.raises(ValueError, match=r"outside torch\.autocast.*precision='bf16'"):
        clipped_sum(nn.Linear(4, 3), cross_entropy, x, y, 0.1, method=method)
    with cast(), pytest.raises(ValueError, match=r"outside torch\.autocast"):
        gradient_norms(nn.Linear(4, 3), cross_entropy, x, y, method=method)
    with cast(), pytest.raises(ValueError, match=r"outside torch\.autocast"):
        fit(nn.Linear(4, 3), method=method)
    with cast(), pytest.raises(ValueError, match=r"outside torch\.autocast"):
        train_ensemble(
            nn.Linear(4, 3),
            cross_entropy,
            (X, Y),
            PLAN,
            seeds=[0],
            learning_rate=0.1,
            method=method,
            progress=False,
        )
    if method != "func":
        whole, fewer = (
            clipped_sum(model, cross_entropy, x[:k], y[:k], 0.1, method=method)
            for k in (1024, 1023)
        )
        moved = sum(
            (g - fewer.gradients[name]).double().square().sum()
            for name, g in whole.gradients.items()
        ).sqrt()
        assert moved <= 0.1 * 1.001


@pytest.mark.parametrize(
    "change",
    [
        lambda run: setattr(run, "plan", dataclasses.replace(run.plan, noise_multiplier=0.01)),
        lambda run: setattr(run, "plan", dataclasses.replace(run.plan, max_grad_norm=10.0)),
        lambda run: run.plan.sample_rate.mul_(2),
    ],
)
def test_a_callback_that_changes_the_plan_is_refused(change):
    plan = dataclasses.replace(PLAN, sample_rate=torch.full((20,), 0.25))
    model, steps = nn.Linear(4, 3), []
    with pytest.raises(ValueError, match="plan"):
        train(
            model,
            cross_entropy,
            (X, Y),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=Callbacks(on_step=lambda run: (steps.append(run.step), change(run))),
            progress=False,
        )
    assert steps == [1]
    ensemble = Ensemble(
        model,
        cross_entropy,
        (X, Y),
        PLAN,
        seeds=[0, 1],
        learning_rate=0.1,
        performance=Performance(),
    )
    with pytest.raises((TypeError, AttributeError)):
        ensemble.plans[:] = [change]
    with pytest.raises(AttributeError):
        ensemble.plans = [change]
    own = dataclasses.replace(PLAN, max_grad_norm=torch.full((20,), 0.5))
    callbacks = Callbacks(on_step=lambda ensemble: ensemble.plans[0].max_grad_norm.fill_(100.0))
    options = {"seeds": [0], "learning_rate": 0.1, "progress": False}
    refused(
        "plan", train_ensemble, model, cross_entropy, (X, Y), own, callbacks=callbacks, **options
    )
    refused("plans", train_ensemble, model, cross_entropy, (X, Y), [None], **options)


class Batched(torch.utils.data.Dataset):
    """Items that are also given many at once: as asked for, sorted, or one short."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + (torch.rand(4) if self.kind == "at random" else 0), int(Y[i])

    def __getitems__(self, places):
        places = (
            sorted(places)
            if self.kind == "sorted"
            else places[1:]
            if self.kind == "short"
            else places
        )
        return [self[i] for i in places]


def test_a_data_set_that_gives_its_items_in_another_order_is_refused():
    for kind in ("as asked", "at random"):
        model = nn.Linear(4, 3)
        train(
            model,
            cross_entropy,
            Batched(kind),
            PLAN,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            seed=0,
            progress=False,
        )
    for kind, said in (
        ("sorted", "in the order"),
        ("short", "as many items as it is asked for, 8, got 7"),
    ):
        refused(
            f"data.*{said}",
            NormTracker.for_plan,
            PLAN,
            nn.Linear(4, 3),
            cross_entropy,
            Batched(kind),
        )


class Flipped(torch.utils.data.Dataset):
    """An example in two is flipped, at random, by one of the usual generators."""

    def __init__(self, coin):
        self.coin = coin

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i].flip(0) if self.coin() else X[i], int(Y[i])


@pytest.mark.parametrize(
    "coin",
    [lambda: torch.rand(()) < 0.5, lambda: np.random.rand() < 0.5, lambda: random.random() < 0.5],
)
def test_data_sets_that_augment_at_random_are_taken_and_their_generators_go_on_as_they_were(coin):
    subset = torch.utils.data.Subset(Flipped(coin), range(20))
    for seed in range(40):
        for each in (torch.manual_seed, np.random.seed, random.seed):
            each(seed)
        items.check_batched(subset)
        first = [bool(coin()) for _ in range(20)]
        for each in (torch.manual_seed, np.random.seed, random.seed):
            each(seed)
        assert first == [bool(coin()) for _ in range(20)]


def test_of_items_read_together_only_those_of_other_places_are_refused():
    class Rounded(Batched):  # other last bits than one by one, and another type
        def __getitems__(self, places):
            return [(self[i][0] * (1 + 1e-6), float(self[i][1])) for i in places]

    class Together(torch.utils.data.Dataset):  # in no other way
        def __len__(self):
            return len(X)

        def __getitems__(self, places):
            return [(X[i], int(Y[i])) for i in places]

    class Sparse(Batched):
        def __getitem__(self, i):
            return (scipy.sparse.csr_matrix(X[i].numpy()), X[i].to_sparse()), int(Y[i])

    class Shuffled(Batched):  # among labels alone, beside random numbers
        def __getitems__(self, places):
            return [(self[i][0], self[j][1]) for i, j in zip(places, reversed(places))]

    for data_set in (Rounded("as asked"), Together(), Sparse("as asked")):
        items.check_batched(data_set)
    refused("order", items.check_batched, Shuffled("at random"))


def test_what_is_of_another_kind_is_refused_in_words():
    model = nn.Linear(4, 3)
    good = dict(model=model, loss=cross_entropy, data=(X, Y), plan=PLAN, progress=False)
    good["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(train, good, plan=[None], optimizer=[torch.optim.SGD], trackers=[3])
    refused("on_epoch", train, **good, callbacks=Callbacks(on_epoch=lambda run: [1]))


def test_a_tracker_of_a_plan_with_a_number_for_each_example_is_refused_in_words():
    model = nn.Linear(4, 3)
    tracker = NormTracker.for_plan(PLAN, model, cross_entropy, (X, Y))
    own = dataclasses.replace(PLAN, sample_rate=torch.full((20,), 0.25))
    refused("plan", tracker.check_run, own, model, cross_entropy, (X, Y))
    refused("seeds", train_ensemble, model, cross_entropy, (X, Y), PLAN, seeds=3, learning_rate=0.1)


def test_clip_norms_may_be_a_list():
    limits = [0.1 + 0.01 * i for i in range(20)]
    model = nn.Linear(4, 3)
    one, other = (
        clipped_sum(model, cross_entropy, X, Y, each) for each in (limits, torch.tensor(limits))
    )
    assert torch.allclose(one.gradients["weight"], other.gradients["weight"])
    refused("shape", clipped_sum, model, cross_entropy, X, Y, limits[:3])


def test_convolutions_round_nothing_on_a_gpu_and_the_callers_setting_comes_back():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        for allowed in (True, False):
            cudnn.allow_tf32 = allowed
            with pytest.raises(ZeroDivisionError), whole_convolutions("cuda"):
                with whole_convolutions("cuda"):  # of another thread, which ends first
                    assert not cudnn.allow_tf32
                assert not cudnn.allow_tf32
                1 / 0  # noqa: B018
            assert cudnn.allow_tf32 == allowed
        with whole_convolutions("cpu"):
            assert cudnn.allow_tf32 == allowed
    finally:
        cudnn.allow_tf32 = before


@pytest.mark.skipif(
    not hasattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision"),
    reason="needs PyTorch 2.9, where convolutions have a setting of their own",
)
def test_a_setting_of_convolutions_alone_is_kept_too():
    convolutions = torch.backends.cudnn.conv
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        convolutions.fp32_precision = "tf32"
        with whole_convolutions("cuda"):
            assert convolutions.fp32_precision == "ieee"
        assert convolutions.fp32_precision == "tf32"
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Column:
    """What a column of a table has that matters here."""

    def to_numpy(self):
        return X.numpy()


@pytest.mark.parametrize(
    "data, advice",
    [
        ((Column(), Column()), r"\.to_numpy\(\)"),
        ((X.numpy(), Y.numpy()), r"use torch\.as_tensor$"),
        ((X, (Y, Y)), "torch.stack.*mappings"),
        (torch.utils.data.TensorDataset(X, Y, Y), "got a tuple of 3 parts"),
        (list(zip(X, Y)), "collate_fn=torch.utils.data.default_collate, or .* two tensors"),
        (list(zip(X, Y))[:2], "got a list of 2 items.*default_collate"),
    ],
)
def test_data_of_another_form_are_refused_with_advice_that_helps(data, advice):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(advice, train, model, cross_entropy, data, PLAN, optimizer=optimizer, progress=False)


@pytest.mark.parametrize("row", [0, 1, len(Y) - 1])
@pytest.mark.parametrize("target", [3, 7, -1, -99])
def test_a_target_of_a_class_without_an_output_is_refused_by_its_row(row, target):
    y = Y.clone()
    y[row] = target
    words = rf"targets must lie in \[0, 3\), got {target} in row {row}"
    refused(words, fit, nn.Linear(4, 3), y=y)


def test_targets_that_cross_entropy_takes_are_taken():
    ignored = torch.where(torch.arange(len(Y)) == 1, -100, Y)
    for y in (ignored, Y.to(torch.uint8), F.one_hot(Y, 3).float()):
        fit(nn.Linear(4, 3), y=y)


def test_training_is_refused_in_inference_mode_and_without_numbers():
    model = nn.Linear(4, 3)
    with torch.inference_mode():
        refused("outside of torch.inference_mode", fit, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model, cross_entropy, (X, Y), PLAN
    refused("device must hold numbers", train, *run, optimizer=optimizer, device="meta")
    assert model.weight.device.type == "cpu"
    empty = nn.Linear(4, 3, device="meta")
    refused("model must hold numbers", fit, empty)
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
    refused("model must hold numbers", train, empty, *run[1:], optimizer=optimizer, device="cpu")


def test_a_loss_whose_shapes_broadcast_is_refused_with_a_hint():
    def squared(outputs, targets):
        return (outputs - targets).square().mean(1)

    refused("model and loss must.*broadcast", fit, nn.Linear(4, 1), y=Y.float(), loss=squared)


class Remembers(torch.utils.data.Dataset):
    """Items less a running mean of all that was read, or with noise of a generator of its own."""

    def __init__(self, kind):
        self.x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        self.kind, self.mean, self.count = kind, torch.zeros(3, dtype=torch.float64), 0
        self.own = np.random.default_rng(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.count += 1
        if self.kind == "noise":
            return self.x[index] + torch.from_numpy(self.own.normal(size=3)), 0
        if self.kind == "counts":
            return self.x[index] * self.count, 0
        weight = 0.1 if self.kind == "lately" else 1 / self.count
        self.mean = self.mean + weight * (self.x[index] - self.mean)
        return (self.x[index] - self.mean).float(), 0


@pytest.mark.parametrize("kind", ["lately", "all"])
def test_items_that_follow_running_statistics_are_refused(kind):
    with pytest.raises(ValueError, match="keeps statistics of them"):
        items.check_forgets_items(Remembers(kind))


def test_items_that_stay_what_they_are_are_read_a_few_times():
    class Still(Remembers):
        def __getitem__(self, index):
            self.count += 1
            return self.x[index], "a text", np.array(["another"])

    data = Still("still")
    items.check_forgets_items(data)
    assert data.count < 10


@pytest.mark.parametrize("kind", ["noise", "counts"])
def test_items_that_change_by_themselves_are_taken(kind):
    items.check_forgets_items(Remembers(kind))
