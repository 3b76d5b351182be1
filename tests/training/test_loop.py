import math
import os
import random
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpcompanion.gradients import clipping
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    Track,
    checkpoints,
    cross_entropy,
    gaussian_noise,
    generators,
    gradient_norms,
    train,
)
from dpcompanion.training.tracking import NormTracker

from ..refusals import refused, refuses

# of a checkpoint
KEYS = ("identity", "step", "model", "optimizer", "generators", "stateful", "history")
# the seeds are fixed; this is the probability with which a right trainer would have failed
FALSE_ALARM = 1e-6


def problem(n=40, steps=30, sample_rate=0.05, dtype=torch.float64, **changes):
    """A small classification problem whose draws are often empty, and a plan for it."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 4, dtype=dtype, generator=g), torch.randint(3, (n,), generator=g)
    plan = DPSGDPlan(
        **{
            "n": n,
            "sample_rate": sample_rate,
            "steps": steps,
            "max_grad_norm": 0.5,
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            **changes,
        }
    )
    return (x, y), plan


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(dtype)


def extras(on_step=None, on_epoch=None, path=None, every=None, stateful=None, **others):
    """Arguments of `train`, of which callbacks and checkpoint are put together here."""
    checkpoint = None if path is None else Checkpoint(path, every, stateful)
    return {"callbacks": Callbacks(on_step, on_epoch), "checkpoint": checkpoint, **others}


def run(data, plan, *, model=None, seed=5, **arguments):
    model = network(data[0].dtype) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    history = train(
        model, cross_entropy, data, plan, optimizer=optimizer, seed=seed, **extras(**arguments)
    )
    return model, history


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_a_step_is_the_noisy_clipped_sum_over_the_public_constant():
    data, plan = problem(steps=1, sample_rate=0.3)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    start = weights(model).clone()
    streams = generators(5)
    indices = plan.sampler(streams["sampling"]).draw()
    assert len(indices) != plan.expected_batch_size
    total = torch.zeros(15, dtype=torch.float64)
    for i in indices:
        value = cross_entropy(model(data[0][i : i + 1]), data[1][i : i + 1]).sum()
        g = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
        total += g * min(1, 0.5 / g.norm().item())
    noise = gaussian_noise((15,), 0.5, streams["noise"])
    run(data, plan, model=model)
    torch.testing.assert_close(weights(model), start - 0.3 * (total + noise) / 12.0)


def test_an_empty_draw_is_a_step_of_noise_alone_with_the_promised_spread():
    data, plan = problem(
        n=4,
        steps=300,
        sample_rate=1e-9,
        max_grad_norm=torch.tensor([1.0, 2.0, 3.0, 6.0]),
        noise_multiplier=0.7,
    )
    seen = []

    def note(run):
        seen.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))

    _, history = run(data, plan, on_step=note)
    assert history.batch_sizes.sum() == 0 and history.losses.isnan().all()
    noise = torch.cat(seen) * plan.expected_batch_size / (0.7 * 3.0)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert low < noise.square().sum() < high
    assert stats.kstest(noise.numpy(), "norm").pvalue > FALSE_ALARM


def test_in_a_real_run_the_noise_around_the_clipped_sum_has_the_promised_spread():
    data, plan = problem(steps=200, sample_rate=0.5)
    model = nn.Linear(4, 3).double()
    state = {}

    def note(run):
        x, y = data[0][run.indices], data[1][run.indices]
        if state:
            total = clipping.clipped_sum(
                state["before"], cross_entropy, x, y, 0.5
            ).gradients.values()
            noisy = (
                torch.cat([p.grad.flatten() for p in run.model.parameters()])
                * plan.expected_batch_size
            )
            state["noise"].append(noisy - torch.cat([g.flatten() for g in total]))
        else:
            state["noise"], state["before"] = [], nn.Linear(4, 3).double()
        state["before"].load_state_dict(run.model.state_dict())

    run(data, plan, model=model, on_step=note)
    noise = torch.cat(state["noise"]) / plan.noise_std
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert low < noise.square().sum() < high


@pytest.mark.slow
def test_over_a_run_with_evaluation_no_example_is_twice_in_a_step_and_inclusion_follows_the_rates():
    rates = torch.linspace(0.05, 0.6, 40, dtype=torch.float64)
    data, plan = problem(steps=300, sample_rate=rates)
    counts, sizes = torch.zeros(40), []

    def note(run):
        assert len(run.indices.unique()) == len(run.indices) == len(run.norms)
        counts[run.indices] += 1
        sizes.append(len(run.indices))
        gradient_norms(run.model, cross_entropy, *data, method="mixed")

    _, history = run(data, plan, on_step=note, microbatch_size=3)
    chi_square = ((counts - 300 * rates) ** 2 / (300 * rates * (1 - rates))).sum().item()
    assert FALSE_ALARM / 2 < stats.chi2.sf(chi_square, df=40) < 1 - FALSE_ALARM / 2
    assert history.batch_sizes.tolist() == sizes


def test_what_a_step_reads_is_its_own_draw_and_nothing_of_another():
    data, plan = problem(steps=50, sample_rate=0.3)
    read, sampler = [], plan.sampler(generators(5)["sampling"])

    def note(module, inputs):
        read.append(inputs[0].detach().clone())

    def check(run):
        expected = data[0][sampler.draw()]
        if run.step & (run.step - 1) == 0:  # before these steps the model is tried on some examples
            while sum(map(len, read)) > len(expected):
                read.pop(0)
        assert torch.equal(torch.cat(read), expected) and max(map(len, read)) <= 4
        read.clear()
        run.model.eval()
        for i in range(0, 40, 7):
            run.model(data[0][i : i + 7])
        read.clear()

    model = nn.Linear(4, 3).double()
    model.register_forward_pre_hook(note)
    run(data, plan, model=model, on_step=check, microbatch_size=4, method="mixed")


def test_evaluating_between_steps_changes_nothing():
    data, plan = problem(sample_rate=0.2)
    plain, _ = run(data, plan)

    def meddle(run):
        run.model.eval()
        with torch.no_grad():
            run.model(data[0])
        gradient_norms(run.model, cross_entropy, *data, method="mixed")
        torch.randn(random.randrange(1, 9))
        torch.manual_seed(run.step)
        return {"seen": run.step}

    watched, history = run(data, plan, on_step=meddle, on_epoch=meddle)
    assert same(plain, watched)
    assert [e["seen"] for e in history.epochs] == [5, 10, 15, 20, 25, 30]


def test_training_leaves_the_global_generator_alone():
    data, plan = problem()
    model, state = network(), torch.get_rng_state()
    run(data, plan, model=model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("method", ["mixed", "ghost", "func"])
def test_physical_batches_and_methods_give_the_same_run(method):
    data, plan = problem(sample_rate=0.4)

    def bare():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    whole, _ = run(data, plan, model=bare())
    pieces, _ = run(data, plan, model=bare(), microbatch_size=3, method=method)
    torch.testing.assert_close(weights(whole), weights(pieces), rtol=1e-10, atol=1e-12)


def test_the_seed_decides_the_run():
    data, plan = problem()
    (one, _), (again, _), (other, _) = (run(data, plan, seed=seed) for seed in (1, 1, 2))
    assert same(one, again) and not same(one, other)


class Counter:
    """Something with a state that must survive an interruption."""

    def __init__(self):
        self.total = 0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_that_was_cut_off_ends_bit_for_bit_where_it_would_have_ended(tmp_path, seed, dtype):
    data, plan = problem(dtype=dtype)
    dice = random.Random(seed)

    def attempt(path, cuts, every):
        model, counter = network(dtype), Counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

        def on_step(run):
            counter.total += int(run.indices.sum())
            scheduler.step()
            if run.step in cuts:
                cuts.remove(run.step)
                raise KeyboardInterrupt

        history = train(
            model,
            cross_entropy,
            data,
            plan,
            optimizer=optimizer,
            seed=5,
            **extras(on_step, None, path, every, {"counter": counter, "scheduler": scheduler}),
        )
        return model, optimizer, counter.total, history

    model, optimizer, total, history = attempt(None, [], None)
    assert (history.batch_sizes == 0).any() and (history.batch_sizes > 0).any()
    cuts, path, broken = sorted(dice.sample(range(1, 31), 3)), tmp_path / "run.pt", True
    every = dice.randrange(1, 9)
    while broken:
        try:
            resumed = attempt(path, cuts, every)
            broken = False
        except KeyboardInterrupt:
            pass
    assert same(model, resumed[0]) and total == resumed[2]
    for ours, theirs in zip(optimizer.state.values(), resumed[1].state.values()):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
    assert torch.equal(history.batch_sizes, resumed[3].batch_sizes)
    assert torch.equal(history.losses.nan_to_num(-1), resumed[3].losses.nan_to_num(-1))
    assert str(history.epochs) == str(resumed[3].epochs)
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "seeds-used.json"]


def test_ctrl_c_waits_for_the_step_and_writes_a_checkpoint(tmp_path):
    data, plan = problem()
    path, before = tmp_path / "run.pt", signal.getsignal(signal.SIGINT)

    def interrupt(run):
        if run.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(data, plan, on_step=interrupt, path=path, every=1000)
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoints.read_checkpoint(path, KEYS)["step"] == 7
    assert same(run(data, plan)[0], run(data, plan, path=path)[0])


def test_a_second_ctrl_c_does_not_wait():
    data, plan = problem()

    def interrupt(run):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one was ignored")

    # A process in the background of a shell starts with interrupts ignored,
    # and would rightly ignore the second one too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(data, plan, on_step=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_run_is_read_back_without_training(tmp_path):
    data, plan = problem()
    model, history = run(data, plan, path=tmp_path / "run.pt")
    again, read = run(data, plan, path=tmp_path / "run.pt", on_step=lambda run: 1 / 0)
    assert same(model, again) and torch.equal(history.batch_sizes, read.batch_sizes)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"noise_multiplier": 0.9},
        {"n": 41},
        {"dtype": torch.float32},
        {"stateful": {"counter": Counter()}},
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change):
    data, plan = problem()
    run(data, plan, path=tmp_path / "run.pt")
    arguments = {name: change.pop(name) for name in ("seed", "stateful") if name in change}
    data, plan = problem(**change)
    refused("checkpoint|stateful", run, data, plan, path=tmp_path / "run.pt", **arguments)


@pytest.mark.parametrize("change", ["data", "labels", "learning rate", "optimizer", "architecture"])
def test_a_checkpoint_of_other_numbers_is_refused(tmp_path, change):
    (x, y), plan = problem()
    run((x, y), plan, path=tmp_path / "run.pt")
    data = {"data": (2 * x, y), "labels": (x, y.flip(0))}.get(change, (x, y))
    model = nn.Linear(4, 3).double() if change == "architecture" else network()
    optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.3)
        if change == "optimizer"
        else torch.optim.SGD(
            model.parameters(), lr=0.2 if change == "learning rate" else 0.3, momentum=0.9
        )
    )
    with pytest.raises(ValueError, match="checkpoint"):
        train(
            model,
            cross_entropy,
            data,
            plan,
            optimizer=optimizer,
            seed=5,
            checkpoint=Checkpoint(tmp_path / "run.pt"),
        )


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", {"weights": torch.ones(2)}])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "run.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    refused("checkpoint", run, *problem(), path=path)


def test_numpy_numbers_of_a_callback_are_read_back_and_what_cannot_be_is_refused(tmp_path):
    data, plan = problem()
    noted = {"accuracy": np.float64(0.5), "classes": np.array([1, 2]), "words": ("a", None)}
    run(data, plan, path=tmp_path / "run.pt", on_epoch=lambda _: noted)
    _, read = run(data, plan, path=tmp_path / "run.pt")
    assert read.epochs[0]["accuracy"] == 0.5 and read.epochs[-1]["classes"].tolist() == [1, 2]
    assert read.epochs[0]["words"] == ["a", None]
    refused(
        "on_epoch",
        run,
        data,
        plan,
        path=tmp_path / "other.pt",
        on_epoch=lambda _: {"figure": object()},
    )


class MixesInTraining(nn.Module):
    """Centres a batch, as a home-made batch norm would."""

    def __init__(self, always=False):
        super().__init__()
        self.layer, self.always = nn.Linear(4, 3), always

    def forward(self, x):
        return self.layer(x - x.mean(0) if self.training or self.always else x)


@pytest.mark.parametrize("method", ["auto", "mixed", "ghost"])
@pytest.mark.parametrize("always", [False, True])
def test_a_model_that_mixes_examples_is_refused_by_every_method_that_sees_them_together(
    method, always
):
    refused(
        "rest of the batch", run, *problem(), model=MixesInTraining(always).double(), method=method
    )


class BesideItsLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        return nn.functional.linear(self.inner(self.words(x)), self.words.weight)


@pytest.mark.parametrize("method", ["mixed", "ghost"])
def test_a_method_that_would_miss_gradients_is_refused_before_training(method):
    refused("method", run, *problem(), model=BesideItsLayer().double(), method=method)


@pytest.mark.slow
def test_a_checkpoint_with_a_flipped_bit_a_missing_end_or_a_missing_part_is_refused(tmp_path):
    """Ten of 120 single flipped bits loaded silently, and a missing part ended in a KeyError."""
    data, plan = problem()
    path = tmp_path / "run.pt"
    run(data, plan, path=path)
    written, generator = path.read_bytes(), random.Random(0)
    for _ in range(60):
        bit = generator.randrange(8 * len(written))
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refused("checkpoint", run, data, plan, path=path, on_step=lambda run: 1 / 0)
    for length in (0, 10, 60, 95, len(written) // 2, len(written) - 1):
        path.write_bytes(written[:length])
        refused("checkpoint", checkpoints.read_checkpoint, path, KEYS)
    path.write_bytes(written)
    content = checkpoints.read_checkpoint(path, KEYS)
    for key in KEYS:
        checkpoints.write_checkpoint(
            path, {name: part for name, part in content.items() if name != key}
        )
        refused("checkpoint", run, data, plan, path=path)


def test_a_crash_while_writing_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    data, plan = problem()
    path = tmp_path / "run.pt"
    replace, calls = os.replace, []

    def failing(part, path):
        calls.append(1)
        if len(calls) == 4:  # after the note of the seed and two checkpoints
            raise OSError("disk full")
        replace(part, path)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError):
        run(data, plan, path=path, every=4)
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "seeds-used.json"]
    assert checkpoints.read_checkpoint(path, KEYS)["step"] == 8
    assert same(run(data, plan)[0], run(data, plan, path=path)[0])


def test_gradients_that_are_not_finite_are_dropped_counted_and_warned_of_once(tmp_path):
    data, plan = problem(sample_rate=0.5)
    data[0][3] = math.nan
    hits = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, history = run(
            data,
            plan,
            on_step=lambda run: hits.append((run.indices == 3).sum().item()),
            path=tmp_path / "run.pt",
        )
    assert weights(model).isfinite().all()
    assert history.dropped == sum(hits) > 1
    assert [str(w.message) for w in caught if "not finite" in str(w.message)] != []
    assert len([w for w in caught if "not finite" in str(w.message)]) == 1


def test_epsilon_after_every_epoch_is_the_plans():
    data, plan = problem(steps=25, sample_rate=0.1, accountant="rdp")
    _, history = run(data, plan, on_epoch=lambda run: {"epsilon": run.epsilon})
    assert [entry["step"] for entry in history.epochs] == [10, 20, 25]
    assert [entry["epoch"] for entry in history.epochs] == [1, 2, 3]
    expected = [plan.epsilon(steps=t, accountant="rdp") for t in (10, 20, 25)]
    assert [entry["epsilon"] for entry in history.epochs] == expected


@pytest.mark.parametrize(
    "frozen, by_data", [(False, False), (True, False), (False, True), (True, True)]
)
def test_statistics_in_a_new_tensor_or_a_frozen_parameter_are_refused_too(frozen, by_data):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            mean = torch.zeros(4, dtype=torch.float64)
            if frozen:
                self.mean = nn.Parameter(mean, requires_grad=False)
            else:
                self.register_buffer("mean", mean)

        def forward(self, x):
            with torch.no_grad():
                if self.training and by_data:
                    self.mean.data.lerp_(x.mean(0), 0.1)  # which no version counts
                elif self.training and frozen:
                    self.mean.lerp_(x.mean(0), 0.1)
                elif self.training:
                    self.mean = torch.lerp(self.mean, x.mean(0), 0.1)
            return x

    data, plan = problem(sample_rate=0.5)
    model = nn.Sequential(Averaging(), nn.Linear(4, 3).double())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    words = f"training changes {'frozen parameter' if frozen else 'buffer'} '0.mean'"
    refused(words, train, model, cross_entropy, data, plan, optimizer=optimizer, seed=0)


def test_a_model_that_keeps_statistics_in_its_own_code_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            if self.training:
                self.seen += x.sum()
            return x

    data, plan = problem(sample_rate=0.5)
    refused(
        "buffer '0.seen'",
        run,
        data,
        plan,
        model=nn.Sequential(Counting(), nn.Linear(4, 3)).double(),
    )


def test_a_frozen_parameter_stays_where_it_is_whatever_gradient_it_was_left_with():
    (x, y), plan = problem(steps=3)
    model = network()
    cross_entropy(model(x), y).sum().backward()  # of everybody, without noise
    model[0].requires_grad_(False)
    before = [p.clone() for p in model[0].parameters()]

    def leave_a_gradient(run):
        for p in model[0].parameters():
            p.grad = torch.ones_like(p)

    run((x, y), plan, model=model, on_step=leave_a_gradient)
    assert all(torch.equal(p, was) for p, was in zip(model[0].parameters(), before))


def test_what_does_not_fit_together_is_refused_before_any_work():
    data, plan = problem()
    other = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    refused("optimizer", train, other, cross_entropy, data, plan, optimizer=optimizer, seed=0)
    refused("data", run, (data[0][1:], data[1][1:]), plan)
    refused("data must be dense", run, (data[0].to_sparse(), data[1]), plan)
    refused("model", train, None, cross_entropy, data, plan, optimizer=optimizer, seed=0)
    refused(
        "BatchNorm1d",
        run,
        data,
        plan,
        model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(),
    )
    good = {"data": data, "plan": plan}
    refuses(
        run,
        good,
        method=["magic"],
        microbatch_size=[0],
        seed=[-1],
        checkpoint=["run.pt"],
        callbacks=[print],
        device=["gpu", 1.5],
        generator_device=["gpu"],
        filter=[2.0],
    )


@pytest.mark.parametrize("method", ["auto", "mixed"])
def test_a_penalty_in_the_loss_is_refused_by_its_name(method):
    data, plan = problem()
    model = network()

    def penalized(outputs, targets):
        return cross_entropy(outputs, targets) + 0.1 * model[0].weight.pow(2).sum()

    with pytest.raises(ValueError, match=r"weight_decay") as found:
        train(
            model,
            penalized,
            data,
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            method=method,
        )
    assert str(found.value).count("no method fits") == 1


@pytest.mark.parametrize(
    "name, make",
    [
        ("every", lambda: Checkpoint("run.pt", every=0)),
        ("path", lambda: Checkpoint(3)),
        ("stateful", lambda: Checkpoint("run.pt", stateful={"rate": 0.1})),
        ("on_step", lambda: Callbacks(on_step=3)),
        ("on_epoch", lambda: Callbacks(on_epoch={"epsilon": 1.0})),
    ],
)
def test_callbacks_and_checkpoints_that_cannot_be_are_refused_by_name(name, make):
    refused(f"^{name} ", make)


def test_nothing_else_is_kept_under_the_name_of_a_tracker(tmp_path):
    data, plan = problem(steps=2)
    model = network()
    tracker, other = (NormTracker.for_plan(plan, model, cross_entropy, data) for _ in range(2))
    with pytest.raises(ValueError, match="stateful"):
        run(
            data,
            plan,
            model=model,
            trackers=[tracker],
            path=tmp_path / "run.pt",
            stateful={"tracker 0": other},
        )


def test_bars_are_silent_off_a_terminal_and_can_be_forced_or_switched_off(capsys):
    data, plan = problem(steps=3)
    run(data, plan)
    run(data, plan, progress=False)
    assert capsys.readouterr().err == ""
    run(data, plan, progress=True)
    assert "DP-SGD" in capsys.readouterr().err


@pytest.mark.slow
def test_training_imports_nothing_but_torch_numpy_and_scipy():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['opacus', 'dp_accounting', 'mlxtend', "
        "'tqdm']))\n"
        "import torch; from dpcompanion.training import *\n"
        "plan = DPSGDPlan(n=9, sample_rate=.5, steps=2, max_grad_norm=1., noise_multiplier=1., "
        "delta=.1)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "train(model, cross_entropy, (torch.randn(9, 2), torch.ones(9).long()), plan, seed=0, "
        "progress=True,\n"
        "      optimizer=torch.optim.Adam(model.parameters()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr


def test_two_runs_with_one_seed_share_batches_and_noise():
    """What the sharp edges warn of: on data that differ in one row, the difference of the models is
    free of noise.
    """
    (x, y), plan = problem(steps=1, sample_rate=1.0, noise_multiplier=50.0)
    other = x.clone()
    other[7] += 1
    one, two = (
        torch.cat([p.detach().flatten() for p in run((data, y), plan)[0].parameters()])
        for data in (x, other)
    )
    alone = torch.cat([p.detach().flatten() for p in network().parameters()])
    # the learning rate of `run`
    sensitivity = 2 * plan.max_grad_norm / plan.expected_batch_size * 0.3
    assert 0 < (one - two).norm() <= sensitivity * (1 + 1e-9) < (one - alone).norm() / 10


class Noisy(torch.utils.data.Dataset):
    """Items with noise that a transform adds, drawn from PyTorch's generator."""

    def __init__(self, x, y, scale):
        self.x, self.y, self.scale = x, y, scale

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + self.scale * torch.randn(self.x[i].shape, dtype=self.x.dtype), int(
            self.y[i]
        )


@pytest.mark.parametrize("method", ["mixed", "func"])
def test_a_data_set_gives_bit_for_bit_what_two_tensors_give(method):
    data, plan = problem()
    both = [
        run(given, plan, model=network(), method=method)
        for given in (data, torch.utils.data.TensorDataset(*data))
    ]
    (first, one), (second, other) = both
    assert same(first, second) and torch.equal(one.batch_sizes, other.batch_sizes)
    assert torch.equal(one.losses.nan_to_num(-1), other.losses.nan_to_num(-1))


def test_augmentation_is_repeatable_changes_no_draw_and_leaves_the_generator_alone(tmp_path):
    data, plan = problem()
    plain, models = run(data, plan), [network(), network()]
    before = torch.random.get_rng_state()
    augmented = [run(Noisy(*data, 0.5), plan, model=model) for model in models]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same(augmented[0][0], augmented[1][0]) and not same(plain[0], augmented[0][0])
    assert torch.equal(plain[1].batch_sizes, augmented[0][1].batch_sizes)

    class Cut(Exception):
        pass

    def cut(state):
        if state.step == 17:
            raise Cut

    path = tmp_path / "run"
    with pytest.raises(Cut):
        run(Noisy(*data, 0.5), plan, model=network(), on_step=cut, path=path, every=5)
    again = run(Noisy(*data, 0.5), plan, model=network(), path=path, every=5)
    assert same(again[0], augmented[0][0])


@pytest.mark.parametrize(
    "data, words",
    [
        (torch.utils.data.TensorDataset(torch.zeros(3, 4), torch.zeros(3)), "plan.n = 40"),
        (torch.utils.data.TensorDataset(torch.zeros(40, 4)), r"items \(x, y\)"),
        (torch.utils.data.ChainDataset([]), "map-style"),
        ({"x": torch.zeros(40, 4), "y": torch.zeros(40)}, "map-style"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused(data, words):
    _, plan = problem()
    refused(words, run, data, plan, model=network(torch.float32))


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_trained_may_not_change_on_the_way(frozen):
    data, plan = problem()
    model = network()
    model[0].requires_grad_(not frozen)

    def switch(run):
        model[0].requires_grad_(frozen)
        # whose gradients the optimizer would follow
        cross_entropy(model(data[0]), data[1]).sum().backward()

    before = model[0].weight.detach().clone()
    refused("0.bias, 0.weight", run, data, plan, model=model, **extras(on_step=switch))
    assert frozen is torch.equal(model[0].weight, before)


def test_nobody_else_steps_the_optimizer_of_a_run():
    data, plan = problem()

    def step(run):
        run.optimizer.zero_grad()
        cross_entropy(run.model(data[0]), data[1]).sum().backward()
        run.optimizer.step()

    refused("optimizer", run, data, plan, **extras(on_step=step))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, cross_entropy, data, plan, optimizer=optimizer, seed=0)
    optimizer.step()  # afterwards it is the caller's again


@pytest.mark.parametrize("method", clipping.METHODS)
def test_a_loss_that_overwrites_its_targets_leaves_the_data_as_they_were(method):
    def logistic(outputs, y):  # of labels 0 and 1, which become -1 and 1
        return nn.functional.softplus(-y.mul_(2).sub_(1) * outputs[:, 0])

    x, y = torch.randn(40, 5), (torch.arange(40) % 2).float()
    before, model = y.clone(), nn.Linear(5, 1)
    plan = DPSGDPlan(
        n=40, sample_rate=0.2, steps=4, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    for track in (None, Track(clipping="individual")):
        train(
            model,
            logistic,
            (x, y),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            track=track,
            method=method,
            progress=False,
        )
        assert torch.equal(y, before)


def test_a_model_that_overwrites_its_inputs_leaves_the_data_as_they_were():
    class Normalized(nn.Module):
        def forward(self, x):
            return x.sub_(1).div_(2)

    data, plan = problem()
    before = data[0].clone()
    model = nn.Sequential(Normalized(), *network())
    tracker = NormTracker.for_plan(plan, model, cross_entropy, data)
    run(data, plan, model=model, trackers=[tracker])
    assert torch.equal(data[0], before)


class Noting(nn.Module):
    """A layer that counts its passes."""

    def __init__(self):
        super().__init__()
        self.inner, self.passes = nn.Linear(4, 3), 0

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


def test_a_user_hears_that_a_model_is_proved_again_in_each_step():
    data, plan = problem(steps=10, sample_rate=0.2)
    with pytest.warns(RuntimeWarning, match="a pass changes 'passes' of it"):
        run(data, plan, model=Noting().double())
