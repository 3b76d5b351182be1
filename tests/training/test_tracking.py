"""Norms of all examples along a run: when they are renewed, what is charged, and that it is
enforced.
"""

import contextlib
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpcompanion._norms import raised
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    clipped_sum,
    cross_entropy,
    gaussian_noise,
    generators,
    gradient_norms,
    train,
)
from dpcompanion.training.options import Track
from dpcompanion.training.tracking import NormTracker

from ..refusals import refused, refuses


def problem(n=60, steps=30, sample_rate=0.1, **changes):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (n,), generator=generator)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator) + 2 * nn.functional.one_hot(
        y, 4
    )
    plan = DPSGDPlan(
        **{
            "n": n,
            "sample_rate": sample_rate,
            "steps": steps,
            "max_grad_norm": 1.0,
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            **changes,
        }
    )
    return (x, y), plan


def network(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def tracked(data, plan, model, **options):
    return NormTracker.for_plan(
        plan, model, cross_entropy, data, **{"rounding": None, "accountant": "rdp"} | options
    )


def run(data, plan, model, *trackers, on_step=None, on_epoch=None, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=optimizer,
        seed=5,
        trackers=trackers,
        callbacks=Callbacks(on_step, on_epoch),
        **arguments,
    )


def true_norms(data, plan, **arguments):
    """The norms of all examples before each step, (steps, n), from a run that is watched from
    outside.
    """
    model = network()
    norms = [gradient_norms(model, cross_entropy, *data)]

    def note(run):
        norms.append(gradient_norms(run.model, cross_entropy, *data))

    run(data, plan, model, on_step=note, **arguments)
    return torch.stack(norms[: plan.steps])


def direct(norms, plan):
    """The account of a (steps, n) history of charged norms."""
    account = IndividualAccountant.for_plan(plan, rounding=None, accountant="rdp")
    for row in norms:
        account.record(row)
    return account.epsilon(1e-3)


@pytest.mark.parametrize(
    "per_epoch, expected",
    [
        (0.5, [0, 20]),
        (1, [0, 10, 20]),
        (2, [0, 5, 10, 15, 20, 25]),
        (3, [0, 4, 7, 10, 14, 17, 20, 24, 27]),
        (math.inf, list(range(30))),
    ],
)
def test_passes_are_evenly_spaced_and_the_first_precedes_the_first_step(per_epoch, expected):
    data, plan = problem()
    model = network()
    tracker = tracked(data, plan, model, updates_per_epoch=per_epoch, keep_norms=True)
    run(data, plan, model, tracker)
    steps, norms = tracker.norms_of_passes
    assert steps.tolist() == expected and tracker.passes == len(expected)
    truth = true_norms(data, plan)[steps].clamp(max=plan.max_grad_norm)
    assert (norms >= truth).all() and torch.allclose(norms.double(), truth, rtol=1e-6)


def test_passes_before_every_step_account_for_the_true_norms():
    data, plan = problem()
    model = network()
    tracker = tracked(data, plan, model, updates_per_epoch=math.inf)
    run(data, plan, model, tracker)
    truth = direct(true_norms(data, plan), plan)
    assert torch.allclose(tracker.estimated_epsilon(1e-3), truth, rtol=1e-9) and truth.std() > 0.1


def test_between_passes_the_last_norms_are_charged():
    data, plan = problem()
    model = network()
    tracker = tracked(data, plan, model, updates_per_epoch=1)
    run(data, plan, model, tracker)
    truth = true_norms(data, plan)
    assert torch.allclose(
        tracker.estimated_epsilon(1e-3), direct(truth[torch.arange(30) // 10 * 10], plan), rtol=1e-9
    )


def test_running_estimates_begin_at_the_clip_norm_and_follow_who_is_sampled():
    data, plan = problem()
    model, seen = network(), []
    tracker = tracked(data, plan, model, updates_per_epoch=0, running=True)
    run(data, plan, model, tracker, on_step=lambda run: seen.append((run.indices, run.norms)))
    latest, charged = torch.full((60,), plan.max_grad_norm, dtype=torch.float64), []
    for indices, norms in seen:
        charged.append(latest.clone())
        latest[indices] = norms.clamp(max=plan.max_grad_norm)
    assert tracker.passes == 0
    assert torch.allclose(
        tracker.estimated_epsilon(1e-3), direct(torch.stack(charged), plan), rtol=1e-9
    )


@st.composite
def histories(draw, n=6):
    """A run without a network: its passes an epoch, what each pass would find, and who is sampled
    with which norm.
    """
    steps = draw(st.integers(1, 25))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    norms = torch.rand(2, steps, n, dtype=torch.float64, generator=generator) ** 2 * 1.5
    sampled = torch.rand(steps, n, generator=generator) < draw(
        st.sampled_from([0.0, 0.1, 0.5, 1.0])
    )
    return (
        draw(st.sampled_from([0, 0.5, 1, 3])),
        norms[0],
        [(row.nonzero()[:, 0], norms[1, step, row]) for step, row in enumerate(sampled)],
    )


@pytest.mark.parametrize("mode", [dict(rounding=None), dict(rounding=0.1)])
@pytest.mark.parametrize("clipping", ["maximum", "individual"])
@given(history=histories(), stop=st.integers(0, 25), looks=st.sets(st.integers(0, 25), max_size=3))
@settings(max_examples=8, deadline=None)
def test_running_estimates_charge_as_if_everybody_were_charged_at_every_step(
    mode, clipping, history, stop, looks
):
    per_epoch, found, batches = history
    (x, y), plan = problem(n=6)

    def fresh():
        tracker = tracked(
            (x, y),
            plan,
            network(),
            running=True,
            updates_per_epoch=per_epoch,
            clipping=clipping,
            **mode,
        )
        tracker.measuring.measure = lambda: measured(tracker)
        return tracker

    def measured(tracker):
        """A pass that finds what it is given."""
        tracker.measuring.count += 1
        return raised(found[tracker.steps], plan.max_grad_norm)

    tracker, plainly = fresh(), IndividualAccountant.for_plan(plan, **{"accountant": "rdp", **mode})
    latest, passes = torch.ones(6, dtype=torch.float64), tracker.passes
    for step, (indices, norms) in enumerate(batches):
        if step == stop:
            state, tracker = tracker.state_dict(), fresh()
            tracker.load_state_dict(state)
        limits = tracker.before_step()
        if tracker.passes > passes:
            latest, passes = (
                (found[step] * (1 + 8 * torch.finfo(torch.float64).eps)).clamp(max=1),
                tracker.passes,
            )
        plainly.record(latest)
        if clipping == "individual":
            assert torch.equal(limits, plainly.charged(latest))
        if step in looks:  # asking in between changes nothing
            torch.testing.assert_close(
                tracker.estimated_epsilon(1e-3), plainly.epsilon(1e-3), rtol=1e-9, atol=0
            )
        tracker.after_step(indices, norms)
        latest = latest.clone()
        latest[indices] = (norms * (1 + 8 * torch.finfo(torch.float64).eps)).clamp(max=1)
    assert tracker.accountant.steps == plainly.steps == len(batches)
    if mode["rounding"]:
        assert torch.equal(
            *(account.state_dict()["accounts"] for account in (tracker.accountant, plainly))
        )
    torch.testing.assert_close(
        tracker.estimated_epsilon(1e-3), plainly.epsilon(1e-3), rtol=1e-9, atol=0
    )


def test_a_saved_state_stays_what_it_was_when_the_run_goes_on():
    data, plan = problem(n=6)
    tracker = tracked(data, plan, network(), running=True, updates_per_epoch=0)
    tracker.before_step()
    state = tracker.state_dict()
    before = state["norms"].clone()
    tracker.after_step(torch.tensor([2, 4]), torch.tensor([0.1, 0.2]))
    assert torch.equal(state["norms"], before) and (tracker.norms != before).sum() == 2
    tracker.load_state_dict(state)
    tracker.before_step()
    tracker.after_step(torch.tensor([1]), torch.tensor([0.1]))
    assert torch.equal(state["norms"], before)


def test_watching_changes_nothing_about_the_run():
    data, plan = problem()
    plain, watched = network(dropout=0.3), network(dropout=0.3)
    run(data, plan, plain)
    run(
        data,
        plan,
        watched,
        tracked(data, plan, watched, updates_per_epoch=3),
        tracked(data, plan, watched, updates_per_epoch=0, running=True),
    )
    assert (
        all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))
        and watched.training
    )


@pytest.mark.parametrize("rounding", [None, 0.1])
def test_individual_clipping_enforces_what_is_charged(rounding):
    data, plan = problem(n=30, sample_rate=0.4, max_grad_norm=2.0)
    model, limits, own = network(), [], []
    tracker = tracked(
        data, plan, model, rounding=rounding, updates_per_epoch=0.2, clipping="individual"
    )
    before_step = tracker.before_step

    def note():
        limits.append(before_step())
        own.append(network())
        own[-1].load_state_dict(model.state_dict())
        return limits[-1]

    tracker.before_step = note
    streams = generators(5)
    sampler = plan.sampler(streams["sampling"])
    parameters = sum(p.numel() for p in model.parameters())

    def check(run):
        """The step taken is that of gradients clipped to the limits, computed here one by one."""
        before, limit = own[-1], limits[-1]
        indices = sampler.draw()
        total = torch.zeros(parameters, dtype=torch.float64)
        for i in indices:
            value = cross_entropy(before(data[0][i : i + 1]), data[1][i : i + 1]).sum()
            g = torch.cat(
                [g.flatten() for g in torch.autograd.grad(value, list(before.parameters()))]
            )
            total += g * min(1, (limit[i] / g.norm()).item())
        noise = gaussian_noise((parameters,), plan.noise_std, streams["noise"])
        got = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        torch.testing.assert_close(got, (total + noise) / plan.expected_batch_size)

    run(data, plan, model, tracker, on_step=check)
    assert len({tuple(limit.tolist()) for limit in limits}) == 3 and all(
        (limit < 2).any() for limit in limits
    )
    if rounding:
        assert all(torch.allclose((limit / 0.2).round(), limit / 0.2) for limit in limits)
    assert torch.allclose(tracker.epsilon(1e-3), direct(torch.stack(limits), plan), rtol=1e-3)
    assert (tracker.epsilon(1e-3) <= plan.epsilon(accountant="rdp") * (1 + 1e-9)).all()


def test_individual_clipping_to_norms_of_every_step_is_plain_dp_sgd():
    data, plan = problem()
    plain, clipped = network(), network()
    run(data, plan, plain)
    run(
        data,
        plan,
        clipped,
        tracked(data, plan, clipped, updates_per_epoch=math.inf, clipping="individual"),
    )
    for a, b in zip(plain.parameters(), clipped.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options", [dict(), dict(clipping="individual", running=True), dict(updates_per_epoch=math.inf)]
)
def test_an_estimate_is_never_given_out_as_an_epsilon(options):
    data, plan = problem()
    tracker = tracked(data, plan, network(), **options)
    tracker.before_step()
    assert not tracker.exact and (tracker.estimated_epsilon(1e-3) > 0).all()
    refused("estimate", tracker.epsilon, 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        dict(updates_per_epoch=2, clipping="individual"),
        dict(updates_per_epoch=1, running=True, clipping="individual"),
        dict(updates_per_epoch=0, running=True),
    ],
)
@pytest.mark.parametrize("mode", [dict(rounding=None), dict(rounding=0.05, accountant="pld")])
@pytest.mark.slow
def test_an_interrupted_run_ends_bit_for_bit_where_it_would_have_ended(tmp_path, options, mode):
    class Enough(Exception):
        pass

    def stop(run):
        if run.step == 17:
            raise Enough

    def fresh():
        data, plan = problem()
        model = network(dropout=0.2)
        return (
            data,
            plan,
            model,
            tracked(data, plan, model, trajectory_delta=1e-3, keep_norms=True, **options, **mode),
        )

    data, plan, whole, reference = fresh()
    run(data, plan, whole, reference)
    data, plan, model, tracker = fresh()
    with pytest.raises(Enough):
        run(
            data,
            plan,
            model,
            tracker,
            on_step=stop,
            checkpoint=Checkpoint(tmp_path / "run.pt", every=7),
        )
    data, plan, model, tracker = fresh()
    run(data, plan, model, tracker, checkpoint=Checkpoint(tmp_path / "run.pt", every=7))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters()))
    assert len(tracker.trajectory) == 3
    if mode["rounding"]:
        assert torch.equal(reference.estimated_epsilon(1e-3), tracker.estimated_epsilon(1e-3))
        assert torch.equal(reference.trajectory, tracker.trajectory)
    else:  # unrounded accounts are sums of floats, and an interruption splits the sum
        torch.testing.assert_close(
            reference.estimated_epsilon(1e-3), tracker.estimated_epsilon(1e-3), rtol=1e-12, atol=0
        )
    assert all(
        torch.equal(a, b) for a, b in zip(reference.norms_of_passes, tracker.norms_of_passes)
    )


def test_the_trajectory_is_the_account_at_the_end_of_each_epoch():
    data, plan = problem()
    model, seen = network(), []
    tracker = tracked(data, plan, model, trajectory_delta=1e-3)
    run(
        data,
        plan,
        model,
        tracker,
        on_epoch=lambda run: seen.append(tracker.estimated_epsilon(1e-3)),
    )
    assert (tracker.trajectory >= torch.stack(seen)).all()
    assert torch.allclose(tracker.trajectory.double(), torch.stack(seen), rtol=1e-6)
    assert (tracker.trajectory.diff(dim=0) >= 0).all()


def test_a_tracker_of_some_examples_keeps_their_accounts():
    (x, y), plan = problem()
    some = torch.tensor([41, 3, 17, 58])
    for options in (dict(updates_per_epoch=1), dict(updates_per_epoch=0, running=True)):
        model = network()
        everybody = tracked((x, y), plan, model, **options)
        few = tracked((x[some], y[some]), plan, model, examples=some, **options)
        run((x, y), plan, model, everybody, few)
        assert torch.allclose(
            few.estimated_epsilon(1e-3), everybody.estimated_epsilon(1e-3)[some], rtol=1e-9
        )


def test_a_gradient_that_is_not_finite_is_charged_at_the_clip_norm():
    (x, y), plan = problem()
    x = x.clone()
    x[7] = math.inf
    model = network()
    tracker = tracked((x, y), plan, model, clipping="individual")
    with pytest.warns(RuntimeWarning, match="not finite"):
        run((x, y), plan, model, tracker)
    assert torch.isclose(tracker.epsilon(1e-3)[7], tracker.epsilon(1e-3).max())
    assert float(tracker.epsilon(1e-3)[7]) == pytest.approx(
        plan.epsilon(accountant="rdp"), rel=1e-3
    )


def test_passes_leave_gradients_and_modes_alone():
    data, plan = problem()
    model = network(dropout=0.5).train()
    model[0].eval()
    model[0].weight.grad = torch.ones(8, 4, dtype=torch.float64)
    state = torch.get_rng_state()
    tracked(data, plan, model).before_step()
    assert (
        torch.equal(model[0].weight.grad, torch.ones(8, 4, dtype=torch.float64))
        and model[3].weight.grad is None
    )
    assert not model[0].training and model[2].training and torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_in_a_loop_with_opacus_it_tracks_what_opacus_computes():
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    (x, y), plan = problem()
    model = GradSampleModule(network(), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=6,
        loss_reduction="sum",
        generator=torch.Generator().manual_seed(3),
    )
    sampler = plan.sampler(torch.Generator().manual_seed(4))
    passes, running = (
        tracked((x, y), plan, model, **options)
        for options in (
            dict(updates_per_epoch=math.inf, keep_norms=True),
            dict(updates_per_epoch=0, running=True),
        )
    )
    latest, charged = torch.ones(60, dtype=torch.float64), []
    for _ in range(12):
        indices = sampler.draw()
        optimizer.zero_grad()
        passes.before_step()
        running.before_step()
        cross_entropy(model(x[indices]), y[indices]).sum().backward()
        norms = torch.stack(
            [p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()], dim=1
        ).norm(dim=1)
        assert len(norms) == len(indices) and torch.allclose(
            passes.norms[indices], norms.clamp(max=1.0)
        )
        optimizer.step()
        passes.after_step()
        running.after_step(indices, norms)
        charged.append(latest.clone())
        latest[indices] = norms.clamp(max=1.0)
    assert torch.allclose(
        running.estimated_epsilon(1e-3), direct(torch.stack(charged), plan), rtol=1e-9
    )
    assert torch.allclose(
        passes.estimated_epsilon(1e-3), direct(passes.norms_of_passes[1], plan), rtol=1e-5
    )


def test_bad_options_are_refused_by_name():
    data, plan = problem()
    good = dict(data=data, plan=plan, model=network())
    refuses(tracked, good, updates_per_epoch=[-1], clipping=["both"], trajectory_delta=[0])
    refuses(Track, {}, device=["x", 5])
    for words, options in (
        ("running=True", dict(updates_per_epoch=0)),
        ("some examples", dict(examples=range(60), clipping="individual")),
        ("60 distinct", dict(examples=[0] * 60)),
        ("from 0, got -1", dict(examples=range(-1, 59))),
    ):
        refused(words, tracked, **good | options)


def test_data_plan_and_state_of_another_run_are_refused():
    data, plan = problem()
    refused("60 examples", tracked, (data[0][:5], data[1][:5]), plan, network())
    model = network()
    _, other = problem(noise_multiplier=2.0)
    refused("plan", run, data, other, model, tracked(data, plan, model))
    beyond = tracked(data, plan, model, examples=range(1, 61))
    refused("60 examples, got 60", run, data, plan, model, beyond)
    with pytest.raises(ValueError, match="state"):
        tracked(data, plan, model).load_state_dict(
            tracked(data, plan, model, updates_per_epoch=2).state_dict()
        )
    refused("each", IndividualAccountant.for_plan, problem(sample_rate=torch.full((60,), 0.1))[1])
    tracker = tracked(data, plan, model, running=True)
    tracker.before_step()
    refused("indices", tracker.after_step)


@pytest.mark.parametrize("clipping", ["maximum", "individual"])
def test_a_tracker_that_nobody_stepped_gives_no_epsilon(clipping):
    """It said epsilon 0 for everybody."""
    data, plan = problem()
    tracker = tracked(data, plan, network(), clipping=clipping)
    run(data, plan, network())
    for epsilon in (tracker.estimated_epsilon, tracker.epsilon)[: 1 + (clipping == "individual")]:
        refused("step", epsilon, 1e-3)


def test_a_tracker_of_another_model_loss_or_data_is_refused():
    """It was accepted, followed what was not trained, and its account still called itself exact."""
    (x, y), plan = problem()
    model, other = network(), network()

    def attempt(*data, **options):
        run((x, y), plan, model, tracked(data, plan, model, **options))

    refused("model", run, (x, y), plan, model, tracked((x, y), plan, other))
    refused(
        "loss",
        run,
        (x, y),
        plan,
        model,
        NormTracker.for_plan(plan, model, lambda out, y: out.sum(1), (x, y)),
    )
    for changed in ((x.flip(0), y), (x, y.flip(0)), (x + 1e-12, y), (x.float(), y), (x[:, :3], y)):
        refused("data", attempt, *changed)
    refused(
        "other inputs",
        run,
        (x, y),
        plan,
        model,
        tracked((x[:3], y[:3]), plan, model, examples=[0, 1, 3]),
    )
    attempt(x.clone(), y.clone())
    x[0] = math.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        attempt(x.clone(), y.clone())


def test_an_exact_account_wants_to_see_that_its_limits_were_kept():
    """Whoever ignored the limits of `before_step` in a loop of one's own still got an account that
    was "exact".
    """
    data, plan = problem()
    tracker = tracked(data, plan, network(), clipping="individual")
    refused("before_step", tracker.after_step, [0], clipped=[0.0])
    limits = tracker.before_step()
    refused("step 1", tracker.epsilon, 1e-3)
    refused("step 1", tracker.before_step)
    for arguments in (
        {},
        {"indices": [0]},
        {"clipped": [0.0]},
        {"indices": [0, 1], "norms": [0.1, 0.1]},
    ):
        refused("clipped", tracker.after_step, **arguments)
    for bad in (
        limits[[3, 4]] * torch.tensor([1.0, 1.001]),
        torch.tensor([0, math.nan]),
        torch.tensor([0, math.inf]),
    ):
        refused("example 4", tracker.after_step, [3, 4], clipped=bad)
    refused("same length", tracker.after_step, [3, 4], clipped=[0.0])
    with pytest.raises(ValueError, match="distinct"):  # twice as long as was allowed, in the sum
        tracker.after_step([3, 3], clipped=limits[[3, 3]])
    tracker.after_step([3, 4], clipped=limits[[3, 4]].float())
    tracker.before_step()
    tracker.after_step([], clipped=[])
    assert tracker.epsilon(1e-3).isfinite().all()


@pytest.mark.slow
def test_a_loop_of_ones_own_in_whole_steps_gives_the_account_of_train():
    data, plan = problem()
    ours, theirs = network(), network()
    theirs.load_state_dict(ours.state_dict())
    options = dict(updates_per_epoch=2, clipping="individual", trajectory_delta=1e-3)
    expected = NormTracker.for_plan(plan, theirs, cross_entropy, data, **options)
    run(data, plan, theirs, expected)
    tracker = NormTracker.for_plan(plan, ours, cross_entropy, data, **options)
    streams, optimizer = generators(5), torch.optim.SGD(ours.parameters(), lr=0.5)
    sampler, pieces = plan.sampler(streams["sampling"]), [p.numel() for p in ours.parameters()]
    for _ in range(plan.steps):
        with tracker.step() as limits:
            drawn, total = sampler.draw(), torch.zeros(sum(pieces), dtype=torch.float64)
            for part in drawn.split(4) or [drawn]:  # a draw that is cut for memory
                found = clipped_sum(ours, cross_entropy, data[0][part], data[1][part], limits[part])
                total += torch.cat([g.flatten() for g in found.gradients.values()])
                tracker.observe(part, clipped=torch.minimum(found.norms, limits[part]))
            released = plan.noisy(total, streams["noise"]) / plan.expected_batch_size
            for p, piece in zip(ours.parameters(), released.split(pieces)):
                p.grad = piece.view_as(p)
            optimizer.step()
    assert all(
        torch.allclose(a, b, rtol=1e-9) for a, b in zip(ours.parameters(), theirs.parameters())
    )
    assert torch.allclose(tracker.epsilon(1e-3), expected.epsilon(1e-3), rtol=1e-6)
    assert tracker.accountant.accountant == "pld" and tracker.epsilon(1e-3).max() <= plan.epsilon()
    assert (
        torch.allclose(tracker.trajectory, expected.trajectory, rtol=1e-5)
        and len(tracker.trajectory) == 3
    )


def test_a_step_says_what_is_missing_and_ends_whole_or_not_at_all():
    data, plan = problem()
    tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")
    refused("within step", tracker.observe, [0], clipped=[0.0])
    with tracker.step() as limits:
        tracker.observe([], clipped=[])
        with pytest.raises(ValueError, match="within"), tracker.step():
            pass
        refused("same length", tracker.observe, [0, 1], clipped=[0.0])
    assert limits.shape == (60,) and tracker.steps == 1 and tracker.epsilon(1e-3).isfinite().all()
    for wrong in (
        dict(),
        dict(indices=[1], clipped=[2 * float(limits[1])]),
        dict(indices=[0, 0], clipped=[0.0, 0.0]),
    ):
        tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")
        with pytest.raises(ValueError, match="clipped|distinct"), tracker.step():
            if wrong:
                tracker.observe(**wrong)
        refused("half", tracker.epsilon, 1e-3)
    tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")
    with pytest.raises(RuntimeError, match="memory"), tracker.step():
        tracker.observe([0], clipped=[0.0])
        raise RuntimeError("out of memory")
    with pytest.raises(ValueError, match="half"), tracker.step():
        pass


def test_a_step_that_clips_as_the_plan_does_says_so_and_one_cut_short_stays_charged():
    data, plan = problem()
    tracker = NormTracker.for_plan(
        plan, network(), cross_entropy, data, running=True, updates_per_epoch=0
    )
    with tracker.step() as limits:
        assert (limits == plan.max_grad_norm).all() and limits.shape == (60,)
        tracker.observe([3], [0.1])
        tracker.observe([4], [0.2])
    assert (tracker.norms < 1).sum() == 2
    with pytest.raises(ValueError, match="piece"), tracker.step():
        tracker.observe([3], [0.1])
        tracker.observe([4])
    with pytest.raises(ValueError, match="running=True"), tracker.step():
        pass
    assert tracker.steps == tracker.accountant.steps == 3


def test_a_step_cut_short_is_not_forgotten_where_the_state_is_saved_and_loaded():
    data, plan = problem()

    def tracker():
        return NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")

    cut, loaded = tracker(), tracker()
    with pytest.raises(KeyboardInterrupt), cut.step() as limits:
        raise KeyboardInterrupt
    loaded.load_state_dict(cut.state_dict())
    refused("half", loaded.epsilon, 1e-3)
    with pytest.raises(ValueError, match="half"), loaded.step():
        pass
    loaded.after_step([3], clipped=limits[[3]])  # who saw it after all may say so
    assert torch.equal(loaded.epsilon(1e-3), cut.accountant.epsilon(1e-3))
    good = loaded.state_dict()
    bad = {
        name: {key: value for key, value in good.items() if key != name}
        for name in good
        if name != "budget"
    }
    bad |= {"norms": good | {"norms": torch.ones(3)}, "step": good | {"step": -1}}
    for name, state in bad.items():
        refused(name, loaded.load_state_dict, state)
    refused("begun", loaded.load_state_dict, good | {"begun": "half"})
    over = good | {"over": True}  # as on a GPU, which is asked late
    loaded.load_state_dict(over)
    refused("above", loaded.epsilon, 1e-3)


def test_a_refused_state_leaves_account_and_budget_as_they_were():
    data, plan = problem(steps=20)

    def after(steps, budget):
        budget = RenyiFilter.for_plan(plan, budget)
        options = {"clipping": "individual", "budget": budget}
        tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, **options)
        for _ in range(steps):
            with tracker.step() as limits:
                tracker.observe([3], clipped=limits[[3]])
        return tracker

    other, own = after(3, 20.0), after(12, 30.0)
    spent, promised = own.accountant.epsilon(1e-3), own.epsilon(1e-3)
    refused("of a filter", own.load_state_dict, other.state_dict())
    assert torch.equal(own.accountant.epsilon(1e-3), spent)
    assert torch.equal(own.epsilon(1e-3), promised) and own.accountant.steps == own.steps == 12


@pytest.mark.parametrize(
    "change", [{"noise_multiplier": 9.0}, {"sample_rate": 0.01}, {"max_grad_norm": 0.5}]
)
def test_a_budget_for_other_steps_than_those_of_the_run_is_refused(change):
    data, plan = problem()
    run = {
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "max_grad_norm": 1.0,
    }
    for make in (
        lambda **steps: ExactFilter(
            plan.n, levels=[0.5, 1.0], costs=[1, 4], budget=40, steps=plan.steps, **steps
        ),
        lambda **steps: RenyiFilter(plan.n, orders=[8], budgets=1.0, **steps),
    ):
        options = {"clipping": "individual"}
        NormTracker.for_plan(plan, network(), cross_entropy, data, budget=make(**run), **options)
        with pytest.raises(ValueError, match=next(iter(change))):
            NormTracker.for_plan(
                plan, network(), cross_entropy, data, budget=make(**run | change), **options
            )


def test_a_tracker_of_a_plan_is_the_one_that_is_put_together_by_hand():
    (x, y), plan = problem()
    plan, some = dataclasses.replace(plan, accountant="rdp"), torch.tensor([5, 2, 9])
    tracker = NormTracker.for_plan(
        plan, network(), cross_entropy, (x[some], y[some]), examples=some, rounding=0.1
    )
    assert (
        tracker.accountant.n == 3
        and tracker.accountant.accountant == "rdp"
        and tracker.accountant.rounding == 0.1
    )
    assert tracker.steps_per_epoch == plan.steps_per_epoch
    model = network()
    run(
        (x, y),
        plan,
        model,
        NormTracker.for_plan(plan, model, cross_entropy, (x[some], y[some]), examples=some),
    )


@pytest.mark.parametrize(
    "options", [dict(clipping="individual", updates_per_epoch=2), dict(running=True)]
)
def test_a_data_set_gives_bit_for_bit_the_account_of_two_tensors(options):
    data, plan = problem()
    accounts = []
    for examples in (data, torch.utils.data.TensorDataset(*data)):
        model = network()
        tracker = tracked(examples, plan, model, **options)
        run(examples, plan, model, tracker)
        accounts.append(tracker.estimated_epsilon(1e-3))
    assert torch.equal(*accounts)
    with pytest.raises(ValueError, match="60"):
        tracked(
            torch.utils.data.Subset(torch.utils.data.TensorDataset(*data), range(59)),
            plan,
            network(),
            **options,
        )


def test_a_tracker_of_other_items_than_the_run_s_is_refused_and_of_the_same_not():
    """Of data sets only the length was compared: of zeros, of scaled or permuted items the account
    stayed "exact".
    """
    (x, y), plan = problem(steps=2)
    sets = torch.utils.data.TensorDataset, torch.utils.data.Subset
    whole, order = sets[0](x, y), list(reversed(range(60)))
    for other, words in (
        (sets[0](torch.zeros_like(x), y), "inputs"),
        (sets[0](0.01 * x, y), "inputs"),
        ((0.01 * x, y), "inputs"),
        (sets[0](x, (y + 1) % 3), "targets"),
        (sets[1](whole, order), "targets"),
    ):
        for mine, theirs in ((other, whole), (whole, other)):
            model = network()
            tracker = NormTracker.for_plan(plan, model, cross_entropy, mine, clipping="individual")
            refused(words, run, theirs, plan, model, tracker)
            assert not tracker.steps
    for same in ((x, y), sets[0](x.clone(), y), sets[1](sets[1](whole, order), order)):
        model = network()
        tracker = NormTracker.for_plan(plan, model, cross_entropy, same, clipping="individual")
        run(whole, plan, model, tracker)
        assert tracker.exact and tracker.epsilon(1e-3).max() <= plan.epsilon()
    some, model = torch.tensor([5, 2, 9]), network()
    observing = NormTracker.for_plan(plan, model, cross_entropy, (x[some], y[some]), examples=some)
    run(whole, plan, model, observing)
    observing = NormTracker.for_plan(
        plan, model, cross_entropy, (2 * x[some], y[some]), examples=some
    )
    refused("inputs", run, whole, plan, model, observing)


class Jittered(torch.utils.data.TensorDataset):
    """Items whose inputs a transform moves at random."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype), y


def test_beside_augmented_items_an_exact_tracker_takes_the_same_data_set_only():
    data, plan = problem(steps=2)
    augmented = Jittered(*data)
    for mine, clipping, unlike in (
        (augmented, "individual", False),
        (data, "individual", True),
        (Jittered(*data), "individual", True),
        (data, "maximum", False),
    ):
        model, state = network(), torch.get_rng_state()
        tracker = NormTracker.for_plan(plan, model, cross_entropy, mine, clipping=clipping)
        with pytest.raises(ValueError, match="data") if unlike else contextlib.nullcontext():
            run(augmented, plan, model, tracker)
        assert torch.equal(torch.get_rng_state(), state)


def test_what_is_done_to_the_limits_of_a_step_does_not_raise_them():
    """They were the tracker's own tensor: once filled with 100, clipped norms of 50 were
    accepted.
    """
    data, plan = problem()
    tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")
    tracker.before_step().fill_(100.0)
    refused("example 0", tracker.after_step, [0, 1], clipped=[50.0, 50.0])


@pytest.mark.parametrize("indices", [[0, -60], [0, 60]])
def test_an_example_has_one_index(indices):
    data, plan = problem()
    tracker = NormTracker.for_plan(plan, network(), cross_entropy, data, clipping="individual")
    tracker.before_step()
    refused("indices", tracker.after_step, indices, clipped=[0.0, 0.0])


class Scaled(nn.Module):
    """A model whose part has the name that Opacus's wrappers have for the model within."""

    def __init__(self):
        super().__init__()
        self._module = network().double()

    def forward(self, x):
        return 0.01 * self._module(x)


def test_a_part_of_a_model_is_not_taken_for_the_model_within_a_wrapper():
    """Its norms were measured, without what the model does with its outputs."""
    data, plan = problem(steps=2)
    model = Scaled().double()
    tracker = tracked(data, plan, model, keep_norms=True)
    run(data, plan, model, tracker)
    before = gradient_norms(Scaled().double(), cross_entropy, *data)
    assert torch.allclose(tracker.norms_of_passes[1][0].double(), before, rtol=1e-6)


def test_batches_of_a_shuffled_data_set_in_a_loop_of_ones_own_warn():
    data, plan = problem()
    shuffled, drawn = (tracked(data, plan, network(), clipping="individual") for _ in range(2))

    def take(tracker, indices):
        with tracker.step() as limits:
            tracker.observe(indices, clipped=limits[indices])

    sampler = plan.sampler(torch.Generator().manual_seed(0))
    for _ in range(plan.steps):
        take(drawn, sampler.draw())
    batches = torch.randperm(60, generator=torch.Generator().manual_seed(0)).split(6)
    with pytest.warns(RuntimeWarning, match="batches in a row were observed that hold 6") as seen:
        for _ in range(3):
            for batch in batches:
                take(shuffled, batch)
    assert len(seen) == 1
