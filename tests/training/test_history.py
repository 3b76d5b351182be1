"""What `train` takes beside the plan, and what its history tells: epsilons, statement, card, and an
early end.
"""

import json
import math
import warnings

import pytest
import torch

from dpcompanion.accounting import Ledger, compute_epsilon, gaussian_mu
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    Performance,
    Track,
    cross_entropy,
    train,
)

from ..refusals import refused

N, DELTA = 40, 1e-3
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
DATA = X, (X[:, 0] > 0).long()
PLAN = DPSGDPlan(
    n=N,
    sample_rate=0.25,
    steps=12,
    max_grad_norm=1.0,
    noise_multiplier=1.5,
    delta=DELTA,
    unit="patient",
)


def trained(plan=PLAN, seed=0, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, train(
        model, cross_entropy, DATA, plan, optimizer=optimizer, seed=seed, progress=False, **options
    )


@pytest.mark.slow
def test_a_track_is_the_tracker_that_it_describes():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    tracker = NormTracker.for_plan(
        PLAN, model, cross_entropy, DATA, clipping="individual", updates_per_epoch=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(
        model,
        cross_entropy,
        DATA,
        PLAN,
        optimizer=optimizer,
        seed=0,
        progress=False,
        trackers=[tracker],
    )
    other, history = trained(track=Track(clipping="individual", updates_per_epoch=2))
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(history.epsilons(DELTA), tracker.epsilon(DELTA))
    assert (
        bool((history.epsilons() <= PLAN.epsilon()).all())
        and float(history.epsilons().min()) < PLAN.epsilon()
    )


def test_without_an_account_each_has_what_the_plan_guarantees():
    _, history = trained()
    assert history.epsilons(1e-4).tolist() == [PLAN.epsilon(1e-4)] * N
    _, history = trained(track=Track())  # an estimate, which is no bound
    assert history.epsilons().tolist() == [PLAN.epsilon()] * N
    assert float(history.tracker.estimated_epsilon(DELTA).min()) < PLAN.epsilon()
    own = DPSGDPlan.for_epsilons(
        {1.0: 0.5, 2.0: 0.5}, n=N, batch_size=8, epochs=2, max_grad_norm=1.0, delta=DELTA
    )
    _, history = trained(own)
    assert torch.equal(history.epsilons(), own.epsilon())


@pytest.mark.parametrize("kind", [ExactFilter, RenyiFilter])
def test_a_filter_of_the_plan_holds_everybody_to_their_budget(kind):
    budgets = {0.5: 0.5, 1.0: 0.5}
    options = {"levels": [0.5, 1.0], "block": 2, "progress": False} if kind is ExactFilter else {}
    filter = kind.for_plan(PLAN, budgets, **options)
    _, history = trained(filter=filter)
    assert bool((history.epsilons() <= PLAN.budgets(budgets)).all()) and bool(
        (filter.spent > 0).any()
    )
    assert kind.__name__ in history.statement()
    assert json.loads(history.to_json())["promised_quantiles"]["1"] <= 1.0
    with pytest.raises(ValueError, match="track.*clipping"):
        trained(filter=filter, track=Track())


def test_a_filter_that_has_paid_for_another_run_is_warned_of(tmp_path):
    filter = RenyiFilter.for_plan(PLAN, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(filter=filter)
    with pytest.warns(UserWarning, match="filter has paid for another run"):
        trained(filter=filter)

    def stop(run):
        if run.step == 5:
            raise InterruptedError

    options = dict(checkpoint=Checkpoint(tmp_path / "run.pt", every=2))
    filter = RenyiFilter.for_plan(PLAN, 1.0)
    with pytest.raises(InterruptedError):
        trained(filter=filter, callbacks=Callbacks(on_step=stop), **options)
    with warnings.catch_warnings():  # a run that goes on is the one that the filter has paid for
        warnings.simplefilter("error")
        trained(filter=filter, **options)

    filter, options = RenyiFilter.for_plan(PLAN, 8.0), dict(checkpoint=Checkpoint(tmp_path / "b"))
    with pytest.raises(InterruptedError):
        trained(filter=filter, callbacks=Callbacks(on_step=stop), **options)
    with pytest.warns(UserWarning, match="filter has paid for another run"):
        trained(filter=filter)
    with pytest.raises(ValueError, match="same plan, seed"):  # which has not taken the filter
        trained(filter=filter, seed=1, **options)
    with pytest.warns(UserWarning, match="which it now forgets"):
        trained(filter=filter, **options)


def test_performance_is_the_single_keywords():
    one, _ = trained(performance=Performance(method="func", microbatch_size=3, device="cpu"))
    two, _ = trained(method="func", microbatch_size=3, device="cpu")
    assert torch.equal(one.weight, two.weight)
    with pytest.raises(ValueError, match="performance must hold method"):
        trained(performance=Performance(), method="func")
    for wrong, name in (
        (dict(method="slow"), "method"),
        (dict(microbatch_size=0), "microbatch_size"),
    ):
        with pytest.raises(ValueError, match=name):
            Performance(**wrong)
    for wrong in ({"performance": "fast"}, {"track": "individual"}, {"track": Track(rounding=3.0)}):
        with pytest.raises(ValueError, match="performance|track|rounding"):
            trained(**wrong)
    with pytest.raises(ValueError, match="clipping"):
        Track(clipping="flat")


def stop_at(step):
    return Callbacks(on_step=lambda run: run.stop() if run.step == step else None)


def test_a_callback_ends_a_run_whose_history_is_of_the_steps_taken(tmp_path):
    weights = []
    callbacks = Callbacks(on_step=lambda run: weights.append(run.model.weight.detach().clone()))
    trained(callbacks=callbacks)
    model, history = trained(
        callbacks=stop_at(5), checkpoint=Checkpoint(tmp_path / "run"), track=Track()
    )
    assert torch.equal(model.weight, weights[4]) and history.stopped and history.steps == 5
    assert len(history.losses) == len(history.batch_sizes) == 5 and history.epochs[-1]["step"] == 5
    assert history.epsilons().tolist() == [PLAN.epsilon(steps=5)] * N
    said, card = history.statement(), json.loads(history.to_json())
    assert "5 of 12 planned steps" in said and "all planned steps" in said
    assert (card["steps"], card["planned_steps"], card["stopped"]) == (5, 12, True)
    assert (
        card["epsilon"] == PLAN.epsilon(steps=5)
        and card["epsilon_of_planned_steps"] == PLAN.epsilon()
    )
    # It has ended: it does not go on.
    again, other = trained(checkpoint=Checkpoint(tmp_path / "run"), track=Track())
    assert (
        torch.equal(again.weight, model.weight) and other.steps == 5 and other.statement() == said
    )


def test_a_run_that_is_stopped_at_its_last_step_or_at_the_end_of_an_epoch_ends_as_any():
    _, history = trained(callbacks=stop_at(PLAN.steps))
    assert not history.stopped and history.steps == PLAN.steps
    _, history = trained(callbacks=Callbacks(on_epoch=lambda run: run.stop()))
    assert history.steps == PLAN.steps_per_epoch == 4 and len(history.epochs) == 1


def test_a_card_says_what_the_run_guarantees(tmp_path):
    full = DPSGDPlan(
        n=N, sample_rate=1.0, steps=4, max_grad_norm=1.0, noise_multiplier=4.0, delta=DELTA
    )
    _, history = trained(full)
    refused("path", history.to_json, 5)
    history.to_json(tmp_path / "card.json", tuned="the learning rate, on other data")
    card = json.loads((tmp_path / "card.json").read_text())
    # Four full batches of noise 4 are one Gaussian mechanism of noise 2.
    assert card["gaussian_dp"]["mu"] == pytest.approx(0.5) and card["gaussian_dp"]["regret"] == 0.0
    assert card["epsilon"] == pytest.approx(
        compute_epsilon(sample_rate=1.0, noise_multiplier=2.0, steps=1, delta=DELTA), rel=1e-6
    )
    assert gaussian_mu(card["epsilon"], DELTA) == pytest.approx(0.5, rel=1e-4)
    normal = torch.distributions.Normal(0.0, 1.0)
    for rate in (0.001, 0.01):
        power = normal.cdf(normal.icdf(torch.tensor(rate, dtype=torch.float64)) + 0.5)
        assert card["true_positive_rates"][f"{rate:g}"] == pytest.approx(float(power), rel=1e-6)
    assert card["tuned"] == "the learning rate, on other data" and card["seeded"]
    assert (card["relation"], card["sampler"], card["accountant"], card["unit"]) == (
        "zero-out",
        "Poisson",
        "pld",
        "example",
    )


def test_the_card_of_a_stopped_run_tells_of_attacks_on_all_planned_steps_too():
    def stop(run):
        run.stop()

    cards = [
        json.loads(trained(callbacks=callbacks)[1].to_json())
        for callbacks in (None, Callbacks(on_epoch=stop))
    ]
    whole, stopped = cards
    assert stopped["steps"] == 4 and stopped["planned_steps"] == whole["steps"] == 12
    for name in ("epsilon", "gaussian_dp", "true_positive_rates"):
        planned = f"{name}_of_planned_steps"
        assert stopped[planned] == whole[planned] == whole[name] != stopped[name]
    assert stopped["gaussian_dp"]["mu"] < stopped["gaussian_dp_of_planned_steps"]["mu"]


def test_a_ledger_knows_the_seeds_and_keys_of_runs_by_their_trackers_too():
    run = dict(track=Track(clipping="individual"))
    (_, first), (_, again), (_, other) = (trained(seed=seed, **run) for seed in (0, 0, None))
    assert "came from a seed" not in Ledger([other]).statement()
    assert "noise of 1 of 2 items came from a seed" in Ledger([first, other]).statement()
    both = Ledger([first.tracker, other.tracker])
    assert "noise of 1 of 2 items" in both.statement() and both == Ledger.from_json(both.to_json())
    for pair in ((first.tracker, again.tracker), (first, again.tracker), (other, other.tracker)):
        with pytest.raises(ValueError, match="key of its own"):
            Ledger(pair)


def test_a_tracker_that_has_followed_two_runs_is_of_none():
    model = torch.nn.Linear(3, 2)
    tracker = NormTracker.for_plan(PLAN, model, cross_entropy, DATA, clipping="individual")
    for seed in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train(model, cross_entropy, DATA, PLAN, optimizer=optimizer, seed=seed, trackers=[tracker])
    with pytest.raises(ValueError, match="has followed 2"):
        Ledger([tracker])


def test_a_card_goes_where_a_link_leads_with_the_permissions_that_the_file_has(tmp_path):
    _, history = trained()
    file, link = tmp_path / "card.json", tmp_path / "link.json"
    file.touch(mode=0o600)
    link.symlink_to(file)
    for item in (history, PLAN):
        item.to_json(link)
        assert link.is_symlink() and json.loads(file.read_text())
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_statement_says_all_digits_of_delta():
    plan = DPSGDPlan(
        n=N, sample_rate=0.1, steps=4, max_grad_norm=1.0, noise_multiplier=2.0, delta=1 / 300_000
    )
    assert f"delta {1 / 300_000!r}," in plan.statement()


def test_a_card_without_noise_says_that_nothing_is_known():
    _, history = trained(
        DPSGDPlan(
            n=N, sample_rate=0.5, steps=2, max_grad_norm=1.0, noise_multiplier=0.0, delta=DELTA
        )
    )
    card = json.loads(history.to_json())
    assert (
        card["epsilon"] is None
        and card["gaussian_dp"] is None
        and "infinite" in history.statement()
    )
    assert history.epsilons().tolist() == [math.inf] * N
    with pytest.raises(ValueError, match="tuned"):
        history.to_json(tuned=3)
