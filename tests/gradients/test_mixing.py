"""Losses that mix examples, and models that begin to: exact, or refused before the step is
taken.
"""

import copy
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.audit import make_canaries
from dpcompanion.gradients import clipping
from dpcompanion.training import (
    Callbacks,
    DPSGDPlan,
    NormTracker,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    train,
    train_ensemble,
)

from ..refusals import refused

N = 40
GENERATOR = torch.Generator().manual_seed(0)
# one example of the rare class
X, Y = torch.randn(N, 4, generator=GENERATOR), (torch.arange(N) == 3).long()
TOKENS = torch.randint(1, 9, (N, 6), generator=GENERATOR)
TOKENS[torch.arange(6)[None] > torch.arange(N)[:, None] % 6] = 0
PLAN = DPSGDPlan(n=N, sample_rate=0.5, steps=6, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3)
BOTH = torch.arange(N) % 2
WEIGHT = torch.tensor([1.0, 99.0])


def fit(model, loss=cross_entropy, data=(X, Y), **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return train(model, loss, data, PLAN, optimizer=optimizer, seed=0, progress=False, **options)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x):
        return self.out(torch.tanh(self.words(x))).transpose(1, 2)  # (n, classes, T)


def weighted_mean(outputs, y):
    return F.cross_entropy(outputs, y, weight=WEIGHT).expand(len(y))


def weighted_share(outputs, y):
    return len(y) * F.cross_entropy(outputs, y, weight=WEIGHT, reduction="none") / WEIGHT[y].sum()


def contrastive(outputs, y):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(y)), reduction="none")


def standardized(outputs, y):
    return F.cross_entropy(outputs - outputs.mean(0), y, reduction="none")


def weighted(outputs, y):
    return F.cross_entropy(outputs, y, weight=WEIGHT, reduction="none")


def smoothed(outputs, y):
    return F.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")


def focal(outputs, y):
    loss = cross_entropy(outputs, y)
    return (1 - (-loss).exp()).square() * loss


def mean_of_tokens(outputs, y):
    return F.cross_entropy(outputs, y, ignore_index=0).expand(len(y))


def share_of_tokens(outputs, y):
    losses = F.cross_entropy(outputs, y, ignore_index=0, reduction="none").sum(1)
    return len(y) * losses / (y != 0).sum()


def mean_of_own_tokens(outputs, y):
    return F.cross_entropy(outputs, y, ignore_index=0, reduction="none").sum(1) / (y != 0).sum(1)


MIXING = {
    "class weights, mean": (weighted_mean, nn.Linear, (X, BOTH)),
    "class weights, shares": (weighted_share, nn.Linear, (X, BOTH)),
    "contrastive": (contrastive, nn.Linear, (X, BOTH)),
    "less the mean of the batch": (standardized, nn.Linear, (X, BOTH)),
    "mean of the batch's tokens": (mean_of_tokens, Tagger, (TOKENS, TOKENS)),
    "share of the batch's tokens": (share_of_tokens, Tagger, (TOKENS, TOKENS)),
}
OWN = {
    "class weights, one by one": (weighted, nn.Linear, (X, Y)),
    "label smoothing": (smoothed, nn.Linear, (X, Y)),
    "focal": (focal, nn.Linear, (X, Y)),
    "mean of one's own tokens": (mean_of_own_tokens, Tagger, (TOKENS, TOKENS)),
}


def build(kind):
    torch.manual_seed(0)
    return kind() if kind is Tagger else kind(4, 2)


@pytest.mark.parametrize("method", ["auto", "mixed", "ghost"])
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_examples_is_refused(name, method):
    loss, kind, data = MIXING[name]
    model = build(kind)
    before = copy.deepcopy(model.state_dict())
    refused("loss", fit, model, loss, data, method=method)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    refused("loss", clipped_sum, model, loss, *data, 1.0, method=method)
    refused("loss", gradient_norms, model, loss, *data, method=method)


@pytest.mark.parametrize("method", clipping.METHODS)
@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_each_example_s_own_is_exact(name, method):
    loss, kind, data = OWN[name]
    model = build(kind)
    expected = []
    for i in range(N):
        value = loss(model(data[0][i : i + 1]), data[1][i : i + 1]).sum()
        expected.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(value, model.parameters())]).norm()
        )
    assert torch.allclose(
        gradient_norms(model, loss, *data, method=method), torch.stack(expected), rtol=1e-4
    )
    fit(model, loss, data, method=method)


def test_a_rare_example_that_shifts_all_losses_is_found_in_the_step_that_draws_it():
    """It is in no probe: the proof before the run sees one class alone."""
    n = 400
    x, y = torch.randn(n, 4, generator=GENERATOR), torch.zeros(n, dtype=torch.int64)
    y[5] = 1
    plan = DPSGDPlan(
        n=n, sample_rate=0.3, steps=40, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-4
    )
    model, taken = build(nn.Linear), []
    note = Callbacks(on_step=lambda run: taken.append(bool((run.indices == 5).any())))
    with pytest.raises(ValueError, match="loss"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(
            model,
            weighted_share,
            (x, y),
            plan,
            optimizer=optimizer,
            seed=0,
            progress=False,
            callbacks=note,
        )
    assert not any(taken)


class MixingAtTimes(nn.Module):
    """Mixes activations, in training mode, where a number that is drawn is below `share`."""

    def __init__(self, draw, share):
        super().__init__()
        self.draw, self.share = draw, share
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.training and self.draw() < self.share:
            x = 0.6 * x + 0.4 * x.roll(1, 0)
        return self.last(x)


DRAWS = {"random": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(()))}


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_model_that_mixes_some_batches_only_is_refused(draw, share):
    torch.manual_seed(0)
    refused(
        "model and loss must treat examples", fit, MixingAtTimes(DRAWS[draw], share), data=(X, BOTH)
    )
    fit(MixingAtTimes(DRAWS[draw], share).eval(), data=(X, BOTH))


def test_each_later_look_at_a_model_has_random_draws_of_its_own():
    drawn = []

    def draw():
        drawn.append(float(torch.rand(())))
        return 1.0

    model, looks = MixingAtTimes(draw, 0.5), []
    for look in (1, 2):
        drawn.clear()
        clipping.look_again(model, cross_entropy, (X, BOTH), look)
        looks.append(set(drawn))
    # those of one look are repeated where the examples beside one are replaced
    assert len(looks[0]) == len(looks[1]) == 9 and len(looks[0] & looks[1]) <= 1


def test_a_loss_of_one_number_is_refused_by_name():
    refused("loss must return one number an example", fit, build(nn.Linear), F.cross_entropy)


def test_losses_of_several_numbers_an_example_are_told_what_to_take_the_mean_of():
    each = nn.MSELoss(reduction="none")
    refused(
        r"losses\.flatten\(1\)\.mean\(1\)", fit, build(nn.Linear), each, (X, torch.zeros(len(X), 2))
    )


class Named(nn.Linear):
    """A model whose outputs hold logits, as those of Hugging Face do; or that wants an entry."""

    def __init__(self, wanted=None):
        super().__init__(X.shape[1], 2)
        self.wanted = wanted

    def forward(self, x):
        return {}[self.wanted] if self.wanted else types.SimpleNamespace(logits=super().forward(x))


def test_outputs_and_entries_that_do_not_fit_are_refused_by_their_names():
    refused(r"cross_entropy\(outputs\.logits, targets\)", fit, Named())
    refused("there is no entry 'labels'", fit, Named("labels"))


class Sleeper(nn.Module):
    """Functional batch norm, with statistics in a buffer, of which a switch makes use."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.awake, self.passes, self.out = kind, False, 0, nn.Linear(4, 2)
        self.gate = nn.Dropout(0.0).eval()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("square", torch.ones(4))

    def forward(self, x):
        self.passes += self.kind == "count"
        if self.awake or self.gate.training or self.passes > 400:
            x = F.batch_norm(x, self.mean, self.square, training=len(x) > 1)
        return self.out(x)


def wake(run, kind):
    if run.step != 3:
        return
    if kind == "flag":
        run.model.awake = True
    elif kind == "hook":
        run.model.out.register_forward_hook(lambda module, args, out: out - out.mean(0))
    elif kind == "mode":
        run.model.register_forward_pre_hook(lambda module, args: module.train() and None)
    elif kind == "statistics":
        run.model.awake = True
        run.model.forward = lambda x: run.model.out(
            x + 0 * F.batch_norm(x, run.model.mean, run.model.square, None, None, True)
        )


@pytest.mark.parametrize("method", ["auto", "func"])
@pytest.mark.parametrize("kind", ["flag", "hook", "mode", "count", "statistics"])
def test_a_model_that_wakes_up_in_the_middle_of_a_run_is_refused(kind, method):
    model, steps = Sleeper(kind), []
    callbacks = Callbacks(on_step=lambda run: (steps.append(run.step), wake(run, kind)))
    plan = DPSGDPlan(
        n=N, sample_rate=0.5, steps=500, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="model"):
        train(
            model,
            cross_entropy,
            (X, Y),
            plan,
            optimizer=optimizer,
            seed=0,
            progress=False,
            callbacks=callbacks,
            method=method,
        )
    assert len(steps) == 3 or kind == "count"


def pretrained(trainable=False):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)
    )
    model(torch.randn(30, 2, 5, 5, generator=GENERATOR))
    model[:3].requires_grad_(trainable)
    model[1].eval()
    return model


IMAGES = torch.randn(N, 2, 5, 5, generator=GENERATOR)


@pytest.mark.parametrize("method", clipping.METHODS)
@pytest.mark.parametrize("trainable", [False, True])
def test_batch_norm_in_evaluation_mode_is_a_fixed_map_and_its_norms_are_those_of_autograd(
    trainable, method
):
    model = pretrained(trainable)
    parameters = [p for p in model.parameters() if p.requires_grad]
    values = [cross_entropy(model(IMAGES[i : i + 1]), Y[i : i + 1]).sum() for i in range(N)]
    expected = [
        torch.cat([g.flatten() for g in torch.autograd.grad(v, parameters)]).norm() for v in values
    ]
    found = gradient_norms(model, cross_entropy, IMAGES, Y, method=method)
    assert torch.allclose(found, torch.stack(expected), rtol=1e-4)
    mean = model[1].running_mean.clone()
    fit(model, data=(IMAGES, Y), method=method)
    assert torch.equal(model[1].running_mean, mean) and not model[1].training


def test_a_frozen_batch_norm_that_wakes_up_is_refused_and_one_that_a_callback_wakes_is_put_back():
    model = pretrained()
    fit(
        model, data=(IMAGES, Y), callbacks=Callbacks(on_step=lambda run: run.model.train() and None)
    )
    assert not model[1].training
    model[0].register_forward_pre_hook(lambda module, args: model[1].train() and None)
    refused("model", fit, model, data=(IMAGES, Y))


class DistributedDataParallel(nn.Module):
    """Known by its name, as PyTorch's own, which takes a process group to be made."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_model_that_is_spread_over_processes_is_refused_by_name():
    assert torch.nn.parallel.DistributedDataParallel.__name__ == DistributedDataParallel.__name__
    model = DistributedDataParallel(nn.Linear(4, 2))
    refused("DistributedDataParallel.*module", fit, model)
    refused(
        "DistributedDataParallel",
        train_ensemble,
        model,
        cross_entropy,
        (X, Y),
        PLAN,
        seeds=[0],
        learning_rate=0.1,
    )
    tracker = NormTracker.for_plan(PLAN, model, cross_entropy, (X, Y), clipping="individual")
    refused("DistributedDataParallel", tracker.before_step)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_is_said_of_a_run_that_was_stopped_is_about_the_steps_that_it_took(error):
    runs = []

    def stop(run):
        runs.append(run)
        if run.step == 2:
            raise error

    with pytest.raises(error):
        fit(nn.Linear(4, 2), callbacks=Callbacks(on_step=stop))
    assert "2 of 6 planned steps" in runs[-1].history.guarantee
    assert runs[-1].epsilon == PLAN.epsilon(steps=2) < PLAN.epsilon()
    assert "6 steps" in fit(nn.Linear(4, 2)).guarantee
    refused("steps", PLAN.statement, steps=7)


def test_proofs_in_a_loop_of_one_s_own_are_made_once_for_a_model_in_one_state(monkeypatch):
    proofs, own = [], clipping.resolve_method
    monkeypatch.setattr(
        clipping,
        "resolve_method",
        lambda *args, **options: proofs.append(1) or own(*args, **options),
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    for _ in range(3):
        clipped_sum(model, lambda outputs, y: cross_entropy(outputs, y), X, Y, 1.0)
    assert len(proofs) == 1
    for change in (
        model.eval,
        model[0].bias.requires_grad_(False).detach,
        lambda: model[2].register_forward_hook(print),
    ):
        change()
    gradient_norms(model.train(), cross_entropy, X, Y)
    assert len(proofs) == 2


def test_an_optimizer_that_takes_sparse_gradients_only_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(24, 2))
    with pytest.raises(ValueError, match="SparseAdam"):
        train(
            model,
            cross_entropy,
            (TOKENS, Y),
            PLAN,
            optimizer=torch.optim.SparseAdam(model.parameters()),
            seed=0,
        )


def test_crafted_tokens_are_tokens():
    x, y = make_canaries(TOKENS, Y, 50, generator=torch.Generator().manual_seed(0))
    assert (
        x.dtype == TOKENS.dtype
        and x.shape == (50, 6)
        and set(x.unique().tolist()) <= set(TOKENS.unique().tolist())
    )
    assert set(y.tolist()) == {0, 1}


class RunningScale(nn.Module):
    """A loss over a running mean of itself, which it takes where gradients flow, perhaps late."""

    def __init__(self, momentum, after=0):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.momentum, self.after, self.calls = momentum, after, 0

    def forward(self, outputs, y):
        losses = cross_entropy(outputs, y)
        self.calls += outputs.requires_grad
        if outputs.requires_grad and self.calls > self.after:
            self.mean.lerp_(losses.detach().mean(), 1 - self.momentum)
        return losses / self.mean


@pytest.mark.parametrize("momentum", [0.9, 0.999])
def test_a_loss_that_changes_with_what_it_has_seen_where_gradients_flow_is_refused(momentum):
    torch.manual_seed(0)
    refused("loss must", fit, nn.Linear(4, 2), RunningScale(momentum))
    keeping = RunningScale(momentum)
    refused("loss must", fit, nn.Linear(4, 2), lambda outputs, y: keeping(outputs, y))


def test_a_loss_that_begins_to_keep_statistics_later_is_refused_by_its_buffer():
    torch.manual_seed(0)
    refused("loss must keep no statistics", fit, nn.Linear(4, 2), RunningScale(0.999, after=100))


def test_whose_limit_is_0_takes_no_part():
    model = nn.Linear(4, 2)
    limits = torch.where(torch.arange(N) % 2 == 0, 0.0, 0.5)
    for method in ("mixed", "ghost", "func"):
        found = clipped_sum(model, cross_entropy, X, Y, limits, method=method)
        alone = clipped_sum(model, cross_entropy, X[1::2], Y[1::2], 0.5, method=method)
        for name, gradient in alone.gradients.items():
            assert torch.allclose(found.gradients[name], gradient, atol=1e-6)
        assert len(found.norms) == N and (found.norms > 0).all()
    refused("max_grad_norm", clipped_sum, model, cross_entropy, X, Y, 0.0)
    refused("max_grad_norm", clipped_sum, model, cross_entropy, X, Y, -limits)


def test_a_loss_may_write_into_the_outputs_that_it_is_given():
    def in_place(outputs, y):
        return cross_entropy(outputs.sub_(outputs.detach().amax(1, keepdim=True)), y)

    torch.manual_seed(0)
    assert len(fit(nn.Linear(4, 2), in_place).losses) == PLAN.steps


def test_a_loss_with_trainable_parameters_is_refused():
    class Tempered(nn.Module):
        def __init__(self, trained):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()), requires_grad=trained)

        def forward(self, outputs, y):
            return cross_entropy(outputs / self.temperature, y)

    torch.manual_seed(0)
    refused(
        "loss must have no trainable parameters, got temperature",
        fit,
        nn.Linear(4, 2),
        Tempered(True),
    )
    assert len(fit(nn.Linear(4, 2), Tempered(False)).losses) == PLAN.steps
