"""Runs side by side are the runs of `train`, seed for seed; and they sample, clip and add noise as
each plan says.
"""

import copy
import json
import math
import os
import signal
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpcompanion.gradients import stacking
from dpcompanion.gradients.tensors import UnsupportedModel
from dpcompanion.mechanism.secure import grid_of, snapped
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    clipped_sum,
    cross_entropy,
    gaussian_noise,
    generators,
    gradient_norms,
    models,
    train,
    train_ensemble,
)

from ..refusals import refused, refuses

# the seeds are fixed; this is the probability with which a right trainer would have failed
FALSE_ALARM = 1e-6
N, RUNS = 40, 4


class Pair(nn.Module):
    """A layer inside a layer that has weights of its own: it cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.inner(x) * self.scale


class Peeking(nn.Module):
    """Reads the shape of a weight, which stacking changes: only torch.func gets it right."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x) * len(self.first.weight)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(7, 5, padding_idx=0),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embedding(x))).mean(1))


class Averaging(nn.Module):
    """Keeps a mean of its examples where no optimizer looks."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x


def frozen_bias():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def reused():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3))


def images():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        models.MaxPool2d(2),
        models.StandardizedConv2d(4, 3, 2),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


ARCHITECTURES = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "convolutions": (images, (2, 4, 4)),
    "one bias frozen": (frozen_bias, (4,)),
    "a layer used twice": (reused, (4,)),
    "layers in layers": (Pair, (4,)),
    "a weight's shape": (Peeking, (4,)),
    "an LSTM": (lambda: models.char_rnn(3, tokens=7, embedding=2, hidden=3, layers=2), None),
    "positions": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)),
        (2, 4),
    ),
    "tokens": (Tokens, None),
}


def networks(build, count=RUNS):
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(build().double())
        if made[0] is not made[-1]:
            for p, q in zip(made[-1].parameters(), made[0].parameters()):
                if not p.requires_grad:
                    p.data.copy_(q)
    return made


def examples(shape, n=N, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = (
        torch.randint(7, (n, 6), generator=g)
        if shape is None
        else torch.randn(n, *shape, dtype=torch.float64, generator=g)
    )
    return x, torch.randint(3, (n,), generator=g)


def plan(**changes):
    return DPSGDPlan(
        **{
            "n": N,
            "sample_rate": 0.1,
            "steps": 8,
            "max_grad_norm": 0.5,
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            **changes,
        }
    )


# Different in rate, in norm and in noise; the third is often empty.
PLANS = [
    plan(),
    plan(sample_rate=torch.linspace(0.05, 0.6, N), noise_multiplier=0.3),
    plan(sample_rate=0.02, max_grad_norm=torch.linspace(0.01, 2, N)),
    plan(sample_rate=1.0, noise_multiplier=0.0),
]
SGD = {"momentum": 0.9, "weight_decay": 0.1}


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def alone(model, data, plan, seed, lr, **sgd):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **sgd)
    return model, train(model, cross_entropy, data, plan, optimizer=optimizer, seed=seed)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    "method, size, workers", [("auto", 512, 1), ("mixed", 7, 2), ("ghost", 60, 1), ("func", 23, 2)]
)
@pytest.mark.slow
def test_each_run_is_the_run_of_its_plan_and_seed(name, method, size, workers):
    build, shape = ARCHITECTURES[name]
    if name in ("layers in layers", "a weight's shape") and method in ("mixed", "ghost"):
        method = "auto"
    data, made, rates = examples(shape), networks(build), [0.3, 0.2, 0.5, 0.1]
    ensemble = train_ensemble(
        made,
        cross_entropy,
        data,
        PLANS,
        seeds=[5, 6, 7, 5],
        learning_rate=rates,
        method=method,
        microbatch_size=size,
        workers=workers,
        **SGD,
    )
    assert (ensemble.batch_sizes == 0).any()
    assert ensemble.method == (
        "func"
        if method == "func" or build in (Pair, Peeking)
        else "mixed"
        if method == "auto"
        else method
    )
    for run, (model, seed) in enumerate(zip(made, [5, 6, 7, 5])):
        expected, history = alone(model, data, PLANS[run], seed, rates[run], **SGD)
        torch.testing.assert_close(ensemble.vectors[run], vector(expected), rtol=1e-10, atol=1e-12)
        assert torch.equal(ensemble.batch_sizes[run], history.batch_sizes)
        torch.testing.assert_close(
            ensemble.losses[run], history.losses, rtol=1e-10, atol=1e-12, equal_nan=True
        )
        torch.testing.assert_close(
            ensemble.predict(data[0], microbatch_size=9)[run], expected(data[0]).detach()
        )
        torch.testing.assert_close(ensemble.model(run)(data[0]), expected(data[0]))


def small(shape=(4,), **changes):
    """Two runs of logistic regression, of few steps."""
    return train_ensemble(
        changes.pop("model", nn.Linear(4, 3).double()),
        cross_entropy,
        examples(shape),
        changes.pop("plans", plan(steps=4)),
        **{"seeds": [1, 2], "learning_rate": 0.5, **changes},
    )


@settings(max_examples=15, deadline=None)
@given(
    batches=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    size=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_stacked_sums_are_the_sums_of_each_run_whatever_the_batches(batches, size, seed):
    data, made = examples((4,), seed=seed), networks(lambda: nn.Linear(4, 3), len(batches))
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    members = torch.zeros(len(batches), N, dtype=torch.bool)
    for run, count in enumerate(batches):
        members[run, chosen[run : run + count]] = True
    one = plan(sample_rate=1.0, steps=1, noise_multiplier=0.0)
    ensemble = train_ensemble(
        made,
        cross_entropy,
        data,
        one,
        seeds=range(len(batches)),
        learning_rate=one.n,
        members=members,
        microbatch_size=size,
    )
    for run, model in enumerate(made):
        total = clipped_sum(model, cross_entropy, data[0][members[run]], data[1][members[run]], 0.5)
        moved = torch.cat([g.flatten() for g in total.gradients.values()])
        torch.testing.assert_close(
            vector(model) - ensemble.vectors[run], moved, rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(ensemble.norms[run], total.norms)
        assert torch.equal(ensemble.indices[run], members[run].nonzero().squeeze(1))


def test_who_is_no_member_tosses_a_coin_and_counts_nothing():
    members = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.5
    (x, y), one = examples((4,)), plan(sample_rate=0.4)
    model = nn.Linear(4, 3).double()
    ensemble = train_ensemble(
        model, cross_entropy, (x, y), one, seeds=[1, 2], learning_rate=0.5, members=members
    )

    def masked(outputs, targets):
        return cross_entropy(outputs, targets[:, 0]) * targets[:, 1]

    for run, seed in enumerate([1, 2]):
        expected = copy.deepcopy(model)
        train(
            expected,
            masked,
            (x, torch.stack([y, members[run].long()], 1)),
            one,
            seed=seed,
            optimizer=torch.optim.SGD(expected.parameters(), lr=0.5),
        )
        torch.testing.assert_close(ensemble.vectors[run], vector(expected), rtol=1e-10, atol=1e-12)


def test_what_is_trained_beside_a_run_plays_no_part():
    model = nn.Linear(4, 3).double()
    both = small(plans=PLANS[:2], model=model)
    for run in range(2):
        one = train_ensemble(
            model, cross_entropy, examples((4,)), PLANS[run], seeds=[run + 1], learning_rate=0.5
        )
        torch.testing.assert_close(one.vectors[0], both.vectors[run], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["linear", "convolutions", "layers in layers", "tokens"])
def test_gradients_and_norms_at_given_points_are_those_of_each_run(name):
    build, shape = ARCHITECTURES[name]
    data, made = examples(shape), networks(build)
    ensemble = train_ensemble(
        made,
        cross_entropy,
        data,
        plan(steps=1, noise_multiplier=0.1),
        seeds=range(RUNS),
        learning_rate=0.5,
        microbatch_size=11,
    )
    norms, gradients = (
        ensemble.norms_of(*data),
        ensemble.gradients_of(data[0][:3], data[1][:3], runs_at_once=3),
    )
    for run in range(RUNS):
        model = ensemble.model(run)
        torch.testing.assert_close(norms[run], gradient_norms(model, cross_entropy, *data))
        for k in range(3):
            loss = cross_entropy(model(data[0][k : k + 1]), data[1][k : k + 1]).sum()
            expected = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
            )
            torch.testing.assert_close(gradients[run, k], expected)
        named = ensemble.split(gradients[run])
        assert all(named[key].shape[1:] == p.shape for key, p in model.named_parameters())


def test_what_is_worked_on_at_once_is_one_run_or_example_at_least():
    ensemble, (x, y) = small(plans=PLANS[:2], model=nn.Linear(4, 3).double()), examples((4,))
    refuses(ensemble.gradients_of, dict(x=x, y=y), runs_at_once=[0, -1, 1.5])
    refuses(ensemble.predict, dict(x=x), microbatch_size=[0, -1, 1.5])


def test_what_add_returns_joins_the_clipped_sum_before_noise_and_division():
    """A point that enters k times, k drawn for each run from the gradient of that run."""
    data, one = examples((4,)), plan(steps=5)
    point, counts = (data[0][:1], data[1][:1]), []
    model = nn.Linear(4, 3).double()

    def tilt(ensemble):
        g = ensemble.gradients_of(*point)[:, 0]
        norms = g.norm(dim=1, keepdim=True)
        k = 1 + (norms * 1000).long() % 3
        counts.append(k.flatten().tolist())
        return k * g / norms.clamp(min=0.5) * 0.5

    ensemble = train_ensemble(
        model, cross_entropy, data, one, seeds=[4, 9], learning_rate=0.5, add=tilt
    )
    assert len(counts) == 5 and len({k for step in counts for k in step}) > 1
    for run, seed in enumerate([4, 9]):
        theta, streams = copy.deepcopy(model), generators(seed)
        sampler = one.sampler(streams["sampling"])
        for step in range(5):
            drawn = sampler.draw()
            total = clipped_sum(theta, cross_entropy, data[0][drawn], data[1][drawn], 0.5)
            extra = clipped_sum(theta, cross_entropy, *point, 0.5)
            draw = gaussian_noise((15,), one.noise_std, streams["noise"])
            with torch.no_grad():
                for p, g, x, z in zip(
                    theta.parameters(),
                    total.gradients.values(),
                    extra.gradients.values(),
                    (draw[:12], draw[12:]),
                ):
                    p -= (
                        0.5
                        * (
                            snapped(g + counts[step][run] * x, grid_of(one.noise_std))
                            + z.view_as(p)
                        )
                        / 4.0
                    )
        torch.testing.assert_close(ensemble.vectors[run], vector(theta), rtol=1e-9, atol=1e-11)


def test_a_callback_may_change_each_runs_learning_rate_and_report_epochs():
    def slower(ensemble):
        ensemble.learning_rate *= torch.tensor([0.5, 1.0])

    ensemble = small(
        plans=plan(steps=25, sample_rate=0.1),
        callbacks=Callbacks(slower, on_epoch=lambda e: {"seen": e.step * len(e)}),
    )
    assert ensemble.epochs == [
        {"epoch": 1, "step": 10, "seen": 20},
        {"epoch": 2, "step": 20, "seen": 40},
        {"epoch": 3, "step": 25, "seen": 50},
    ]
    assert ensemble.learning_rate.tolist() == pytest.approx([0.5**26, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_a_callback_ends_stays_as_it_was_and_the_others_go_on_as_if_alone(workers):
    def stop(ensemble):
        if ensemble.step == 3:
            ensemble.stop([1])
        if ensemble.step == 6:
            ensemble.stop()

    model, plans = (
        nn.Linear(4, 3).double(),
        [plan(), plan(noise_multiplier=0.8), plan(sample_rate=0.02)],
    )
    runs = dict(model=model, plans=plans, seeds=[1, 2, 3], **SGD, workers=workers)
    seen = []
    note = Callbacks(
        stop, on_epoch=lambda ensemble: seen.append([len(own) for own in ensemble.indices])
    )
    stopped, whole = small(**runs, callbacks=note), small(**runs)
    assert stopped.steps_taken.tolist() == [6, 3, 6] and stopped.step == 6 and stopped.ended
    assert seen[0][1] == 0 < seen[0][0] and whole.steps_taken.tolist() == [8] * 3
    for run, taken in enumerate(stopped.steps_taken.tolist()):
        short = small(
            **{
                **runs,
                "callbacks": Callbacks(
                    on_step=lambda one, taken=taken: one.stop() if one.step == taken else 0
                ),
            }
        )
        assert torch.equal(stopped.vectors[run], short.vectors[run])
        assert torch.equal(stopped.batch_sizes[run, :taken], whole.batch_sizes[run, :taken])
        assert not stopped.batch_sizes[run, taken:].any() and bool(
            stopped.losses[run, taken:].isnan().all()
        )
        history, planned = stopped.history(run), whole.history(run)
        assert (history.steps, history.stopped, planned.stopped) == (taken, True, False)
        assert len(history.losses) == len(history.batch_sizes) == taken
        assert (
            bool((history.epsilons() <= planned.epsilons()).all())
            and history.epsilons().max() < planned.epsilons().max()
        )
        expected = torch.as_tensor(plans[run].epsilon(steps=taken), dtype=torch.float64).expand(N)
        torch.testing.assert_close(history.epsilons(), expected)
        assert (
            history.guarantee == plans[run].statement(steps=taken)
            and history.guarantee in history.statement()
        )
        assert "planned" in history.statement()
        assert json.loads(history.to_json())["steps"] == taken


def test_an_ensemble_that_was_cut_off_after_a_run_had_ended_ends_where_it_would_have_ended(
    tmp_path,
):
    left, model = [5], nn.Linear(4, 3).double()

    def note(path):
        def stop(ensemble):
            if ensemble.step == 3:
                ensemble.stop([0])
            if path and left and ensemble.step == left[0]:
                left.pop()
                os.kill(os.getpid(), signal.SIGINT)

        checkpoint = path and Checkpoint(path, every=100)
        return small(
            model=model, plans=PLANS[:2], **SGD, callbacks=Callbacks(stop), checkpoint=checkpoint
        )

    whole = note(None)
    with pytest.raises(KeyboardInterrupt):
        note(tmp_path / "runs.pt")
    for _ in range(2):  # the second finds all runs at their ends
        resumed = note(tmp_path / "runs.pt")
        assert torch.equal(whole.vectors, resumed.vectors) and resumed.steps_taken.tolist() == [
            3,
            8,
        ]


def test_only_runs_that_there_are_can_be_ended():
    refuses(small().stop, {}, runs=[[2], [-1], [0.5], torch.tensor([True, False]), "all"])


class Total:
    def __init__(self):
        self.total = torch.zeros(2, dtype=torch.int64)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@pytest.mark.parametrize("cuts", [(1, 3), (5,), (2, 6, 7)])
def test_an_ensemble_that_was_cut_off_ends_bit_for_bit_where_it_would_have_ended(tmp_path, cuts):
    model, left = networks(lambda: nn.Linear(4, 3), 1)[0], list(cuts)

    def attempt(path=None):
        total = Total()

        def note(ensemble):
            total.total += torch.tensor([int(indices.sum()) for indices in ensemble.indices])
            ensemble.learning_rate *= 0.9
            if path and left and ensemble.step == left[0]:
                left.pop(0)
                os.kill(os.getpid(), signal.SIGINT)

        return total, train_ensemble(
            model,
            cross_entropy,
            examples((4,)),
            PLANS[:2],
            seeds=[1, 2],
            learning_rate=0.5,
            checkpoint=path and Checkpoint(path, every=100, stateful={"total": total}),
            **SGD,
            callbacks=Callbacks(note, lambda e: {"loss": float(e.losses[:, e.step - 1].nansum())}),
        )

    total, whole = attempt()
    before = signal.getsignal(signal.SIGINT)
    for _ in cuts:
        with pytest.raises(KeyboardInterrupt):
            attempt(tmp_path / "runs.pt")
    again, resumed = attempt(tmp_path / "runs.pt")
    assert signal.getsignal(signal.SIGINT) is before and not left
    assert sorted(os.listdir(tmp_path)) == ["runs.pt", "seeds-used.json"]
    assert torch.equal(whole.vectors, resumed.vectors) and torch.equal(
        whole.batch_sizes, resumed.batch_sizes
    )
    assert (
        torch.equal(whole.losses.nan_to_num(-1), resumed.losses.nan_to_num(-1))
        and whole.epochs == resumed.epochs
    )
    assert torch.equal(total.total, again.total)
    kept = Checkpoint(tmp_path / "runs.pt", stateful={"total": again})
    read = train_ensemble(
        model,
        cross_entropy,
        examples((4,)),
        PLANS[:2],
        seeds=[1, 2],
        learning_rate=0.5,
        **SGD,
        callbacks=Callbacks(on_step=lambda e: 1 / 0),
        checkpoint=kept,
    )
    assert torch.equal(read.vectors, whole.vectors)
    for other in (
        {"seeds": [1, 3]},
        {"plans": PLANS[0]},
        {"members": torch.ones(2, N, dtype=torch.bool)},
        {"learning_rate": 0.4},
    ):
        refused("checkpoint", small, **{"plans": PLANS[:2], **SGD, **other}, checkpoint=kept)
    refused("stateful", small, plans=PLANS[:2], **SGD, checkpoint=Checkpoint(tmp_path / "runs.pt"))


@pytest.mark.parametrize("method, spoilt", [("mixed", 0), ("ghost", 3), ("func", 3), ("func", 0)])
def test_gradients_that_are_not_finite_contribute_nothing_to_any_run_and_are_counted(
    method, spoilt
):
    x, y = examples((4,))
    x[spoilt] = math.inf
    hits = torch.zeros(2, dtype=torch.int64)

    def note(ensemble):
        hits.add_(torch.tensor([(indices == spoilt).sum() for indices in ensemble.indices]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ensemble = train_ensemble(
            nn.Linear(4, 3).double(),
            cross_entropy,
            (x, y),
            PLANS[:2],
            seeds=[9, 10],
            learning_rate=0.5,
            method=method,
            callbacks=Callbacks(on_step=note),
        )
    assert ensemble.vectors.isfinite().all()
    assert torch.equal(ensemble.dropped, hits) and hits.sum() > 0
    assert len([w for w in caught if "not finite" in str(w.message)]) == 1


def test_models_and_the_global_generator_stay_as_they_were():
    model = nn.Linear(4, 3).double()
    before, state = vector(model).clone(), torch.get_rng_state()
    ensemble = train_ensemble(
        model, cross_entropy, examples((4,)), plan(), seeds=[1, 1], learning_rate=0.5, workers=2
    )
    assert torch.equal(before, vector(model)) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(ensemble.vectors[0], ensemble.vectors[1])
    assert ensemble.parameters["weight"].data_ptr() == ensemble.vectors.data_ptr()


def test_workers_leave_the_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        small(workers=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sampling_clipping_and_noise_of_each_run_are_as_its_plan_says():
    """Example i moves parameter i alone, by a slope above its clip norm, so that the weights show
    who was taken, at which norm; parameters beyond the examples show the noise. Of 40 steps of
    three runs: inclusions by chi-square, noise by its variance, clip norms exactly (without
    noise).
    """
    n, free, steps = 60, 500, 40
    x, y = torch.arange(n), torch.zeros(n)
    norms, rates = (
        torch.linspace(0.5, 2, n, dtype=torch.float64),
        torch.linspace(0.1, 0.7, n, dtype=torch.float64),
    )
    common = {"n": n, "steps": steps, "delta": 1e-3}
    plans = [
        DPSGDPlan(**common, sample_rate=0.3, max_grad_norm=1.0, noise_multiplier=0.0),
        DPSGDPlan(**common, sample_rate=rates, max_grad_norm=norms, noise_multiplier=0.0),
        DPSGDPlan(**common, sample_rate=0.3, max_grad_norm=norms, noise_multiplier=2.0),
    ]
    model = nn.Embedding(n + free, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    moves = []

    def note(ensemble):
        moves.append(ensemble.vectors - note.before)
        note.before = ensemble.vectors.clone()

    note.before = torch.zeros(3, n + free, dtype=torch.float64)

    train_ensemble(
        model,
        lambda row, _: 10 * row.squeeze(1),
        (x, y),
        plans,
        seeds=[1, 2, 3],
        callbacks=Callbacks(on_step=note),
        learning_rate=[plan.expected_batch_size for plan in plans],
    )
    moves = -torch.stack(moves, 1)  # (runs, steps, parameters): the noisy sums
    level = FALSE_ALARM / 5
    for run, plan in enumerate(plans[:2]):
        q, clip = (
            torch.as_tensor(v, dtype=torch.float64).expand(n)
            for v in (plan.sample_rate, plan.max_grad_norm)
        )
        taken = moves[run, :, :n] != 0
        torch.testing.assert_close(moves[run, :, :n], taken * clip, rtol=1e-9, atol=1e-12)
        chi_square = ((taken.sum(0) - steps * q) ** 2 / (steps * q * (1 - q))).sum().item()
        assert level / 2 < stats.chi2.sf(chi_square, df=n) < 1 - level / 2
        size = (taken.sum().item() - steps * q.sum().item()) / math.sqrt(
            steps * (q * (1 - q)).sum().item()
        )
        assert abs(size) < stats.norm.isf(level / 2)
    noise = moves[2, :, n:] / plans[2].noise_std
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], noise.numel())
    assert low < noise.square().sum() < high and plans[2].noise_std == 2.0 * norms.mean().item()
    lag = (noise[1:] * noise[:-1]).sum().item() / math.sqrt(noise[1:].numel())
    assert abs(lag) < stats.norm.isf(level / 2)


def test_runs_with_different_seeds_draw_independently():
    ensemble = small(plans=plan(steps=200, sample_rate=0.5), learning_rate=0.0)
    sizes = (ensemble.batch_sizes.double() - 20) / math.sqrt(10)
    assert abs((sizes[0] * sizes[1]).sum().item()) / math.sqrt(200) < stats.norm.isf(
        FALSE_ALARM / 2
    )


def test_a_network_used_under_two_names_is_stacked_under_both():
    layer = nn.Linear(4, 4).double()
    model = nn.ModuleDict({"one": layer, "two": nn.Sequential(layer, nn.Tanh())})
    stacked = stacking.StackedNetwork(model)
    assert stacked.module["one"] is stacked.module["two"][0]
    with pytest.raises(UnsupportedModel, match="'model'"):
        stacking.StackedNetwork(Pair())


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def test_what_does_not_fit_together_is_refused():
    refuses(
        small,
        {},
        plans=[[plan()] * 3, [plan(steps=3), plan()]],
        members=[torch.ones(2, N), torch.ones(3, N, dtype=torch.bool)],
        seeds=[[0.5, 1], []],
        learning_rate=[-0.1, [0.1, 0.2, 0.3]],
        add=[lambda ensemble: torch.zeros(2, 3), lambda ensemble: None],
    )
    refuses(
        small,
        {},
        momentum=[-1.0],
        weight_decay=[math.inf],
        method=["magic"],
        workers=[0],
        microbatch_size=[0],
    )
    refuses(small, {}, checkpoint=["runs.pt"])
    refused("data", small, plans=plan(n=39))


def test_a_data_set_with_items_is_refused_by_name():
    items = torch.utils.data.TensorDataset(*examples((4,)))
    refused(
        "data",
        train_ensemble,
        nn.Linear(4, 3),
        cross_entropy,
        items,
        plan(),
        seeds=[1, 2],
        learning_rate=0.5,
    )


@pytest.mark.parametrize("change", [lambda x: x[:, :3], lambda x: x.to(torch.complex128)])
def test_inputs_that_the_model_does_not_take_are_refused_as_train_does(change):
    """They ended in PyTorch's own RuntimeError."""
    x, y = examples((4,))
    with pytest.raises(ValueError, match="model and loss"):
        train_ensemble(
            nn.Linear(4, 3).double(),
            cross_entropy,
            (change(x), y),
            plan(),
            seeds=[1, 2],
            learning_rate=0.5,
        )


class Shifted(nn.Module):
    """Its trainable shift is taken from the first examples that it sees in training mode."""

    def __init__(self):
        super().__init__()
        self.shift, self.head, self.ready = nn.Parameter(torch.zeros(4)), nn.Linear(4, 3), False

    def forward(self, x):
        if self.training and not self.ready:
            self.shift.data.copy_(-x.mean(0))
            self.ready = True
        return self.head(x + self.shift)


@pytest.mark.parametrize(
    "message, model",
    [
        ("parameter 'shift'", Shifted),
        ("BatchNorm1d", lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
        ("random", lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))),
        ("'seen'", Counting),
        ("0.mean", lambda: nn.Sequential(Averaging(), nn.Linear(4, 3))),
        ("parameters differ", lambda: [nn.Linear(4, 3), nn.Linear(4, 2)]),
        ("0.bias", lambda: [frozen_bias(), frozen_bias()]),
        ("model", lambda: [nn.Linear(4, 3)] * 3),
    ],
)
def test_a_model_that_will_not_do_is_refused_with_the_reason(message, model):
    made = model()
    made = [one.double() for one in made] if isinstance(made, list) else made.double()
    refused(
        message,
        train_ensemble,
        made,
        cross_entropy,
        examples((4,)),
        plan(),
        seeds=[1, 2],
        learning_rate=0.5,
    )


def test_an_ensemble_to_which_something_was_added_goes_on_with_it_alone(tmp_path):
    """Its history would be that of a run without."""
    data, one = examples((4,)), plan(steps=4)
    keep = Checkpoint(tmp_path / "run", every=2)
    run = dict(seeds=[4], learning_rate=0.5, checkpoint=keep)

    def stop(ensemble):
        if ensemble.step == 3:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train_ensemble(
            nn.Linear(4, 3).double(),
            cross_entropy,
            data,
            one,
            add=lambda ensemble: torch.ones_like(ensemble.vectors),
            callbacks=Callbacks(on_step=stop),
            **run,
        )
    with pytest.raises(ValueError, match="with `add` or without"):
        train_ensemble(nn.Linear(4, 3).double(), cross_entropy, data, one, **run)


@pytest.mark.parametrize("seen", [[1], {"step": -1}])
def test_what_is_noted_of_an_epoch_is_a_dict_of_other_names(seen):
    with pytest.raises(ValueError, match="on_epoch must return"):
        train_ensemble(
            nn.Linear(4, 3).double(),
            cross_entropy,
            examples((4,)),
            plan(steps=2),
            seeds=[4],
            learning_rate=0.5,
            callbacks=Callbacks(on_epoch=lambda ensemble: seen),
        )
