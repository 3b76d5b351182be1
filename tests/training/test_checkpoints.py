"""Runs without a seed: nobody can repeat their noise, no checkpoint holds it, and they go on where
they stopped.
"""

import contextlib
import itertools
import os
import shutil
import stat
import warnings

import numpy as np
import pytest
import torch

from dpcompanion.accounting import Ledger
from dpcompanion.filters import RenyiFilter
from dpcompanion.mechanism import secure
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    Track,
    cross_entropy,
    models,
    train,
    train_ensemble,
)

from ..refusals import refused

N, STEPS = 60, 12


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 5, generator=generator).double(), torch.arange(N) % 3


def plan(**changes):
    return DPSGDPlan(
        **{
            **dict(
                n=N,
                sample_rate=0.2,
                steps=STEPS,
                max_grad_norm=1.0,
                noise_multiplier=1.0,
                delta=1e-3,
            ),
            **changes,
        }
    )


def run(
    stop_at=None, path=None, every=None, optimizer=torch.optim.SGD, made_with=None, **arguments
):
    """Weights and history of a run with a checkpoint at `path`, or the one given."""
    model = models.linear(5, 3, seed=0).double()

    def stop(state):
        if state.step == stop_at:
            raise InterruptedError

    history = train(
        model,
        cross_entropy,
        data(),
        plan(),
        optimizer=optimizer(model.parameters(), **{"lr": 0.1, **(made_with or {})}),
        callbacks=Callbacks(on_step=stop),
        progress=False,
        **{"checkpoint": None if path is None else Checkpoint(path, every), **arguments},
    )
    return torch.cat([p.detach().flatten() for p in model.parameters()]), history


@pytest.fixture
def known_entropy(monkeypatch):
    """The operating system's entropy, replaced by what a test knows: the same again after
    `begin`.
    """
    run()  # what a first run imports draws random numbers too

    def begin():
        numbers = itertools.count(1)
        monkeypatch.setattr(
            secure.os, "urandom", lambda size: next(numbers).to_bytes(size, "little")
        )

    return begin


def test_two_runs_without_a_seed_have_nothing_in_common():
    (first, history), (second, _) = run(), run()
    assert history.seed is None and not torch.equal(first, second)
    assert run(seed=3)[1].seed == 3


def test_a_ledger_refuses_two_runs_that_share_their_noise(tmp_path):
    """The noise of two runs of one seed cancels in the difference of their models, whatever else
    differs.
    """
    histories = [run(seed=3)[1], run()[1], run()[1], run(seed=4)[1]]
    ledger = Ledger()
    for history in histories:
        ledger = ledger.add(history, label=f"seed {history.seed}")
    again = run(seed=3, optimizer=torch.optim.Adam)[1]
    refused("item 4 shares that of seed 3", ledger.add, again)
    refused("item 1 shares that of item 0", Ledger, [again, histories[0]])
    refused("second shares", ledger.add, Ledger().add(again, label="second"))
    refused("item 4", Ledger.from_json(ledger.to_json()).add, again)
    runs = train_ensemble(
        models.linear(5, 3, seed=0).double(),
        cross_entropy,
        data(),
        plan(),
        seeds=[3, 5],
        learning_rate=0.1,
        progress=False,
    )
    refused("seed 3", ledger.add, runs.history(0))
    assert len(ledger.add(runs.history(1))) == 5


def test_a_ledger_tells_endings_of_one_checkpoint_from_runs_with_new_keys(tmp_path):
    path, copied, lost = (tmp_path / f"{name}.pt" for name in ("run", "copied", "lost"))
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    for end in ("", ".key"):
        shutil.copy(f"{path}{end}", f"{copied}{end}")
    shutil.copy(path, lost)
    ledger = Ledger().add(run(path=path)[1])
    refused("two endings of one checkpoint", ledger.add, run(path=copied)[1])
    with pytest.warns(UserWarning, match="has finished"):
        refused("two endings of one checkpoint", ledger.add, run(path=path)[1])
    with pytest.warns(RuntimeWarning, match="add both up"):
        assert len(ledger.add(run(path=lost)[1])) == 2


def test_a_run_that_was_cut_off_ends_where_an_unbroken_one_ends(known_entropy, tmp_path):
    known_entropy()
    unbroken, history = run()
    known_entropy()
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    resumed, again = run(path=path)
    assert torch.equal(unbroken, resumed) and torch.equal(history.batch_sizes, again.batch_sizes)


def test_the_keys_lie_beside_the_checkpoint_for_their_owner_alone_and_go_with_the_run(
    known_entropy, tmp_path
):
    known_entropy()
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    keys = tmp_path / "run.pt.key"
    assert stat.S_IMODE(os.stat(keys).st_mode) == 0o600
    assert (1).to_bytes(32, "little").hex() in keys.read_text(encoding="utf-8")
    for number in (1, 2):
        key = number.to_bytes(32, "little")
        assert key not in path.read_bytes() and key.hex().encode() not in path.read_bytes()
    run(path=path)
    assert path.exists() and not keys.exists()


def test_a_run_whose_keys_are_lost_goes_on_and_says_so(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    os.remove(f"{path}.key")
    with pytest.warns(RuntimeWarning, match="random.*both endings cost privacy: add both up"):
        _, history = run(path=path)
    assert len(history.batch_sizes) == STEPS


@pytest.mark.parametrize(
    "content", ["", "{}", '{"keys": {"sampling": "00", "noise": "00"}, "forward": 1}', "[]"]
)
def test_damaged_keys_are_refused(content, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    (tmp_path / "run.pt.key").write_text(content, encoding="utf-8")
    refused("keys", run, path=path)


def test_a_seed_that_is_used_on_other_data_in_the_same_folder_is_warned_of_once(tmp_path):
    def begin(number, seed=1, changed=False):
        x, y = data()
        x = x + 1.0 * changed
        model = models.linear(5, 3, seed=0).double()
        train(
            model,
            cross_entropy,
            (x, y),
            plan(steps=1),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            seed=seed,
            checkpoint=Checkpoint(tmp_path / f"run {number}.pt"),
            progress=False,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (
            begin(1),
            begin(1),
            begin(2),
            begin(3, seed=2, changed=True),
            begin(4, seed=None),
            begin(5, seed=None),
        )
    with pytest.warns(RuntimeWarning, match="same noise"):
        begin(6, changed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        begin(6, changed=True)
    (tmp_path / "seeds-used.json").write_text("[1, 2", encoding="utf-8")
    begin(7)


def test_an_ensemble_warns_of_seeds_that_were_used_on_other_data(tmp_path):
    def begin(number, seeds=(1, 2), **options):
        train_ensemble(
            models.linear(5, 3, seed=0).double(),
            cross_entropy,
            data(),
            plan(steps=1),
            seeds=seeds,
            learning_rate=0.1,
            checkpoint=Checkpoint(tmp_path / f"runs {number}.pt"),
            progress=False,
            **options,
        )

    members = torch.ones(2, len(data()[0]), dtype=torch.bool)
    members[1, 3] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (
            begin(1),
            begin(1),
            begin(2),
            begin(3, seeds=(7, 7), members=members),
            begin(4, seeds=(7, 7), members=members),
        )
    with pytest.warns(RuntimeWarning, match="seed 7"):
        begin(5, seeds=(7, 8))
    with pytest.warns(RuntimeWarning, match="seed 1, 2"):
        begin(6, members=members)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = data()
        model = models.linear(5, 3, seed=0).double()
        train(
            model,
            cross_entropy,
            (x, y),
            plan(steps=1),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            seed=1,
            checkpoint=Checkpoint(tmp_path / "one.pt"),
            progress=False,
        )


def test_a_checkpoint_with_a_seed_does_not_serve_a_run_without_one(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, seed=1, path=path, every=3)
    refused("seed", run, path=path)


@pytest.mark.parametrize(
    ("optimizer", "made_with"),
    [
        (torch.optim.SGD, {"weight_decay": 0.5}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"betas": (0.8, 0.99)}),
    ],
)
def test_a_checkpoint_of_another_optimizer_setting_is_refused(optimizer, made_with, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3, optimizer=optimizer)
    refused(next(iter(made_with)), run, path=path, optimizer=optimizer, made_with=made_with)
    assert run(path=path, optimizer=optimizer)[1].steps == STEPS


def test_a_checkpoint_of_a_finished_run_is_loaded_with_a_warning(tmp_path):
    path = tmp_path / "run.pt"
    ended, _ = run(path=path)
    with pytest.warns(UserWarning, match="finished.*no step is taken"):
        loaded, _ = run(path=path)
    assert torch.equal(ended, loaded)


def test_a_checkpoint_of_a_run_with_another_tracker_is_refused_by_its_name(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(InterruptedError):
        run(stop_at=7, path=path, every=3)
    refused("track, filter and trackers", run, path=path, track=Track(clipping="individual"))


class Meter:
    """Something to be saved with a run that computes by NumPy."""

    def __init__(self, kept):
        self.kept = kept

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


def test_numbers_of_numpy_come_back_from_a_checkpoint(tmp_path):
    """A learning rate from `np.logspace` made checkpoints that nothing could read."""
    made_with = {"lr": np.logspace(-2, -1, 3)[1], "weight_decay": np.float64(0.01)}
    path, found = tmp_path / "run.pt", []
    for stop_at in (7, None):
        meter = Meter(np.arange(3.0) if stop_at else np.zeros(3))
        kept = Checkpoint(path, 3, stateful={"meter": meter})
        with contextlib.suppress(InterruptedError):
            run(stop_at=stop_at, seed=1, made_with=made_with, checkpoint=kept)
        found.append(torch.as_tensor(meter.kept).tolist())
    assert found == [[0.0, 1.0, 2.0]] * 2


def test_what_could_not_be_read_back_is_refused_by_name_when_it_is_written(tmp_path):
    kept = Checkpoint(tmp_path / "run.pt", 3, stateful={"meter": Meter([object])})
    with pytest.raises(ValueError, match="got type in 'stateful.meter.kept.0'"):
        run(seed=1, checkpoint=kept)


class Refusing(Meter):
    """It takes no state at all."""

    def load_state_dict(self, state):
        raise ValueError("state must be of another meter")


class Stateless(Meter):
    """It has nothing to save before the first step."""

    def state_dict(self):
        if not self.kept:
            raise RuntimeError("nothing seen yet")
        return super().state_dict()


def with_a_mask(model):
    model.register_buffer("mask", torch.ones(3))


@pytest.mark.parametrize(
    "meters, change, groups, word",
    [
        ((Meter,), with_a_mask, 1, "mask"),
        ((Refusing,), None, 1, "another meter"),
        ((Refusing, Meter), None, 1, "another meter"),
        ((Meter,), None, 2, "optimizer must"),
    ],
)
def test_a_checkpoint_that_is_refused_gives_nothing_back_to_a_filter(
    meters, change, groups, word, tmp_path
):
    """What a filter had paid for one run was forgotten when another's checkpoint did not fit."""
    path, spent_more = tmp_path / "run.pt", RenyiFilter.for_plan(plan(), 30.0)

    def made(model, groups):
        weight, bias = model.parameters()
        parts = [[weight, bias], []] if groups == 1 else [[weight], [bias]]
        return torch.optim.SGD([{"params": part} for part in parts], lr=0.1)

    def go(filter, checkpoint, stop_at=None, groups=1, change=None):
        model = models.linear(5, 3, seed=0).double()
        if change is not None:
            change(model)

        def stop(state):
            if state.step == stop_at:
                raise InterruptedError

        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            train(
                model,
                cross_entropy,
                data(),
                plan(),
                optimizer=made(model, groups),
                filter=filter,
                checkpoint=checkpoint,
                callbacks=Callbacks(on_step=stop),
                progress=False,
            )
        finally:
            same = [torch.equal(before[name], value) for name, value in model.state_dict().items()]
            moved.append(not all(same))

    moved, names = [], [f"meter {number}" for number in range(len(meters))]
    kept = Checkpoint(path, 3, stateful={name: Meter(1) for name in names})
    with pytest.raises(InterruptedError):
        go(RenyiFilter.for_plan(plan(), 30.0), kept, stop_at=7)
    go(spent_more, None)
    paid, here = spent_more.spent.clone(), [meter(2) for meter in meters]
    checkpoint = Checkpoint(path, 3, stateful=dict(zip(names, here)))
    refused(word, go, spent_more, checkpoint, groups=groups, change=change)
    assert torch.equal(spent_more.spent, paid) and bool((paid > 0).all())
    assert [meter.kept for meter in here] == [2] * len(here) and moved == [True, True, False]


def test_what_has_no_state_yet_does_not_keep_a_run_from_going_on(tmp_path):
    path = tmp_path / "run.pt"
    for stop_at, meter in ((7, Stateless(1)), (None, Stateless(0))):
        with contextlib.suppress(InterruptedError):
            run(stop_at=stop_at, checkpoint=Checkpoint(path, 3, stateful={"meter": meter}))
    assert meter.kept == 1
