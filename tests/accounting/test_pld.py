import math

import mpmath as mp
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp, ndtr
from torch.overrides import TorchFunctionMode

from dpcompanion.accounting import compute_delta, compute_epsilon, pld

from ..refusals import refuses
from ..soundness.power import delta_from_below

DIRECTIONS = ("remove", "add")


def one_step_delta(q, sigma, epsilon, direction):
    """P(L > eps) - e^eps Q(L > eps), exactly; epsilon may be negative."""
    with mp.workdps(60):
        q, s, e = mp.mpf(q), mp.mpf(sigma), mp.exp(mp.mpf(epsilon))
        upper = lambda t: mp.erfc(t / mp.sqrt(2)) / 2  # noqa: E731
        if direction == "remove":
            if e <= 1 - q:
                return 1 - e
            t = s * mp.log((e - 1 + q) / q) + 1 / (2 * s)
            return (1 - q) * upper(t) + q * upper(t - 1 / s) - e * upper(t)
        if 1 / e <= 1 - q:
            return mp.mpf(0)
        t = s * mp.log((1 / e - 1 + q) / q) + 1 / (2 * s)
        return upper(-t) - e * ((1 - q) * upper(-t) + q * upper(1 / s - t))


def two_step_delta(q, sigma, epsilon, direction):
    """E[delta_1(epsilon - L)] by the trapezoidal rule, in float64 with what is small kept small."""
    t = np.arange(-12, 12 + 1 / sigma, 2e-3 * min(1, sigma))
    ratio = np.log1p(q * np.expm1(t / sigma - 0.5 / sigma**2))
    density = np.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    loss, density = (ratio, density * np.exp(ratio)) if direction == "remove" else (-ratio, density)
    e = np.exp(epsilon - loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        if direction == "remove":
            at = sigma * np.log((e - 1 + q) / q) + 0.5 / sigma
            delta = np.where(
                e <= 1 - q, 1 - e, (1 - q) * ndtr(-at) + q * ndtr(1 / sigma - at) - e * ndtr(-at)
            )
        else:
            at = sigma * np.log((1 / e - 1 + q) / q) + 0.5 / sigma
            delta = np.where(
                1 / e <= 1 - q, 0.0, ndtr(at) - e * ((1 - q) * ndtr(at) + q * ndtr(at - 1 / sigma))
            )
    return float((density * delta).sum() * (t[1] - t[0]))


def inverted_delta(q, sigma, steps, epsilon, direction="remove"):
    """(1 / 2 pi i) int M(z)^T e^(-z eps) / (z (z + 1)) dz along Re z = tilt, where M(z) = E[e^(z
    L)]: no grid of losses.

    Good to eight digits where delta does not depend on a loss so rare that M hardly sees it: there
    it is no oracle.
    """
    x, w = np.polynomial.legendre.leggauss(16)
    ends = (-14, 1 / sigma + 32) if direction == "remove" else (-32, 14)
    edges = np.arange(*ends, 0.25 * min(1, sigma))
    half = np.diff(edges)[:, None] / 2
    t = (edges[:-1, None] + half * (x + 1)).ravel()
    log_weight = np.log((half * w).ravel()) - 0.5 * t * t - 0.5 * math.log(2 * math.pi)
    u = t / sigma - 0.5 / sigma**2
    ratio = np.where(
        u < 30,
        np.log1p(q * np.expm1(np.minimum(u, 30))),
        u + np.log(q + (1 - q) * np.exp(-np.maximum(u, 30))),
    )
    loss, log_weight = (
        (ratio, log_weight + ratio) if direction == "remove" else (-ratio, log_weight)
    )

    def log_integrand(tilt):
        return (
            steps * logsumexp(log_weight + tilt * loss)
            - tilt * epsilon
            - math.log(tilt * (tilt + 1))
        )

    tilts = np.geomspace(1e-2, 1e8, 500)
    tilt = tilts[int(np.argmin([log_integrand(tilt) for tilt in tilts]))]
    log_scale = logsumexp(log_weight + tilt * loss)
    tilted = np.exp(log_weight + tilt * loss - log_scale)
    mean = tilted @ loss
    step = 2 * math.pi / (60 * math.sqrt(tilted @ (loss - mean) ** 2 * steps) + 80 / tilt)
    total, start, block = 0.0, 0, 256
    while start < 200_000:
        frequency = step * np.arange(start, start + block)
        transform = np.exp(1j * frequency[:, None] * (loss - mean)) @ tilted
        z = tilt + 1j * frequency
        values = (
            np.exp(steps * np.log(transform) + 1j * frequency * (steps * mean - epsilon))
            / (z * (z + 1))
        ).real
        values[0] /= 1 + (start == 0)
        total, start = total + values.sum(), start + block
        if abs(values[-50:]).max() < 1e-13 * abs(total):
            break
    return total * step / math.pi * math.exp(steps * log_scale - tilt * epsilon)


ONE_STEP = {
    "rate": st.floats(-6, -0.01),
    "noise": st.floats(-0.9, 3),
    "log_delta": st.floats(-15, -0.5),
    "direction": st.sampled_from(DIRECTIONS),
}


@given(**ONE_STEP)
@settings(max_examples=12, deadline=None)
def test_one_step_is_never_below_the_closed_form_and_close_to_it(rate, noise, log_delta, direction):
    q, sigma, delta = 10**rate, 10**noise, 10**log_delta
    if one_step_delta(q, sigma, 0, direction) <= delta:
        return
    loss = pld.compose(
        sample_rate=q, noise_multiplier=sigma, steps=1, delta=delta, direction=direction
    )
    epsilon = loss.epsilon(delta)
    # The curve at the epsilon that was found: the exact delta is not above, nor is it reached well
    # before.
    assert one_step_delta(q, sigma, epsilon * (1 + 1e-9), direction) <= delta * (1 + 1e-9)
    # Near the largest loss of adding, where delta falls to nothing, epsilon may be that of the next
    # point of the grid.
    lower = epsilon * (1 - 3e-4) - max(
        1.1 * loss.error, loss.interval if direction == "add" else 0.0
    )
    assert one_step_delta(q, sigma, lower, direction) >= delta * (1 - 1e-9)


@pytest.mark.slow
@given(**ONE_STEP)
@settings(max_examples=60, deadline=None)
def test_one_step_is_so_in_many_more_places(rate, noise, log_delta, direction):
    inner = test_one_step_is_never_below_the_closed_form_and_close_to_it.hypothesis.inner_test
    inner(rate, noise, log_delta, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sample_rate, noise_multiplier", [(0.01, 1.0), (0.3, 0.5), (1e-4, 0.7)])
def test_the_whole_curve_of_one_step_is_an_upper_bound_wherever_it_was_composed(
    sample_rate, noise_multiplier, direction
):
    for at in (1e-3, 1e-10):
        if one_step_delta(sample_rate, noise_multiplier, 0, direction) <= at:
            continue
        loss = pld.compose(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            steps=1,
            delta=at,
            direction=direction,
        )
        for epsilon in (0, 1e-4, 0.01, 0.1, 0.3, 1, 3, 10, 30):
            assert loss.delta(epsilon) >= one_step_delta(
                sample_rate, noise_multiplier, epsilon, direction
            ) * (1 - 1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, interval, delta",
    [(0.01, 1.0, 0.5, 1e-5), (0.1, 0.1, 30.0, 1e-6)],
)
def test_a_curve_on_a_grid_far_coarser_than_its_losses_is_an_upper_bound_still(
    sample_rate, noise_multiplier, interval, delta, direction
):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=1)
    loss = pld.compose(**run, delta=delta, direction=direction, interval=interval)
    for epsilon in (0.0, 0.01, 0.3, 3.0):
        exact = one_step_delta(sample_rate, noise_multiplier, epsilon, direction)
        assert 1 >= loss.delta(epsilon) >= exact * (1 - 1e-9)


@pytest.mark.parametrize("at, direction", [(1e-3, "remove"), (1e-6, "add")])
def test_the_whole_curve_of_many_steps_is_an_upper_bound_far_from_where_it_was_composed(
    at, direction
):
    """Rounding in the transform is relative to the bulk, which lies far above: the total variation
    was 0.5% short.
    """
    run = 0.0901988620570045, 4.82130072246411, 128_203
    loss = pld.compose(
        **dict(zip(("sample_rate", "noise_multiplier", "steps"), run)),
        delta=at,
        direction=direction,
    )
    for epsilon in (0.0, 5.0):
        least = delta_from_below([run], epsilon, direction == "remove", 0.9)
        assert 0.8 < least <= loss.delta(epsilon)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, epsilon",
    [(0.01, 1.0, 1.0), (0.3, 0.8, 6.0), (0.9, 2.0, 0.4), (1e-3, 0.5, 0.001)],
)
def test_two_steps_agree_with_quadrature(sample_rate, noise_multiplier, epsilon, direction):
    exact = two_step_delta(sample_rate, noise_multiplier, epsilon, direction)
    loss = pld.compose(
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=2,
        epsilon=epsilon,
        direction=direction,
    )
    found = loss.delta(epsilon)
    assert found >= exact * (1 - 1e-9) - 1e-15
    assert found <= exact * (1 + 2e-3) + 1e-14


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, steps, delta",
    [
        (512 / 60000, 3.42529, 9375, 1e-5),
        (0.01, 0.8, 500, 1e-12),
        (0.5, 5.0, 200, 1e-15),
        (0.9, 10.0, 10**5, 0.4),
        (1e-3, 30.0, 10**7, 1e-6),
        (0.1, 0.6, 20, 1e-8),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in (
                (0.01, 1.0, 1000, 1e-5),
                (1e-3, 0.7, 1000, 1e-10),
                (1e-3, 1.0, 1000, 1e-5),
                (1e-4, 1.0, 10**4, 1e-5),
                (1e-4, 1.0, 10**4, 1e-9),
                (0.02, 100.0, 10**6, 1e-7),
                (1e-5, 4.0, 10**7, 1e-6),
            )
        ),
    ],
)
def test_epsilon_agrees_with_the_inversion_of_the_laplace_transform(
    sample_rate, noise_multiplier, steps, delta
):
    run = dict(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    epsilon = compute_epsilon(**run, delta=delta)
    assert max(
        inverted_delta(sample_rate, noise_multiplier, steps, epsilon, d) for d in DIRECTIONS
    ) <= delta * (1 + 1e-8)
    assert inverted_delta(sample_rate, noise_multiplier, steps, epsilon * (1 - 3e-4)) > delta


@pytest.mark.parametrize(
    "sample_rate, noise_multiplier, steps, delta",
    [
        (512 / 60000, 3.42529, 9375, 1e-5),
        (0.9, 10.0, 100, 1e-3),
        (0.001, 2.0, 10**4, 1e-8),
        (0.02, 1.5, 300, 1e-10),
        (0.25, 1.0, 3, 1e-5),
        (0.2, 20.0, 2000, 1e-7),
    ],
)
@pytest.mark.slow
def test_dp_accounting_on_a_fine_grid_says_the_same(sample_rate, noise_multiplier, steps, delta):
    # Not below a delta of 1e-10 or so: there its transform loses digits, and its epsilon comes out
    # too small.
    theirs = (
        privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier,
            sampling_prob=sample_rate,
            value_discretization_interval=1e-5 if noise_multiplier > 1.5 else 1e-4,
            use_connect_dots=True,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
    )
    ours = compute_epsilon(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps, delta=delta
    )
    assert theirs * (1 - 1e-4) <= ours <= theirs * 1.001


def test_the_reference_point():
    run = dict(sample_rate=512 / 60000, noise_multiplier=3.42529, steps=9375, delta=1e-5)
    assert compute_epsilon(**run) == pytest.approx(0.91717, rel=1e-4)
    assert compute_epsilon(**run, accountant="rdp") == pytest.approx(1.0035718, abs=1e-7)


RUNS = [
    dict(sample_rate=0.01, noise_multiplier=1.0, steps=1000, delta=1e-5),
    dict(sample_rate=0.3, noise_multiplier=8.0, steps=400, delta=1e-12),
    dict(sample_rate=1e-3, noise_multiplier=0.6, steps=10**4, delta=1e-3),
    dict(sample_rate=0.5, noise_multiplier=0.5, steps=10, delta=1e-8),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_coarser_grids_only_raise_epsilon_and_the_error_says_by_how_much(run, direction):
    fine = pld.compose(**run, direction=direction)
    truth = pld.compose(**run, direction=direction, interval=fine.interval / 4).epsilon(
        run["delta"]
    )
    before = truth
    for factor in (1, 4, 16, 64, 256, 1024):
        loss = pld.compose(**run, direction=direction, interval=fine.interval * factor)
        epsilon = loss.epsilon(run["delta"])
        assert before * (1 - 1e-9) <= epsilon <= truth + 1.3 * loss.error
        before = epsilon


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_composing_near_epsilon_or_near_delta_gives_the_same_point_of_the_curve(run, direction):
    parameters = {k: v for k, v in run.items() if k != "delta"}
    epsilon = pld.compose(**run, direction=direction).epsilon(run["delta"])
    near = pld.compose(**parameters, epsilon=epsilon, direction=direction)
    assert near.epsilon(run["delta"]) == pytest.approx(epsilon, rel=2e-4)
    # Tilt and cap only say where rounding and truncation are small:
    # elsewhere the bound stays a bound, and near by close.
    for factor, tolerance in ((0.8, math.inf), (0.98, 0.02), (1.02, 0.02), (1.5, math.inf)):
        elsewhere = pld.compose(
            **parameters, epsilon=factor * epsilon, direction=direction, interval=near.interval / 2
        )
        assert (
            near.delta(epsilon) * (1 - 5e-3)
            <= elsewhere.delta(epsilon)
            <= near.delta(epsilon) * (1 + tolerance)
        )


@pytest.mark.parametrize("run", RUNS)
def test_the_account_is_the_worse_of_both_directions(run):
    each = [pld.compose(**run, direction=direction) for direction in DIRECTIONS]
    assert compute_epsilon(**run) == pytest.approx(
        max(loss.epsilon(run["delta"]) for loss in each), rel=1e-9
    )
    for loss in each:  # whose masses are a distribution, on a grid that keeps the promised error
        assert (loss.masses >= 0).all() and float(loss.masses.sum()) == pytest.approx(1, abs=1e-9)
        assert loss.slack < 1e-10
    assert each[0].error <= 2.2 * pld.TOLERANCE * each[0].epsilon(run["delta"])


def test_the_largest_loss_of_adding_is_never_exceeded():
    loss = pld.compose(
        sample_rate=0.01, noise_multiplier=0.5, steps=10, delta=1e-9, direction="add"
    )
    assert loss.epsilon(1e-9) <= -10 * math.log1p(-0.01) * 1.01


def test_bad_arguments_are_refused_by_name():
    numbers = dict(
        sample_rate=[0.0, 1.0, math.nan],
        noise_multiplier=[0.0, math.inf],
        delta=[0.0, 1.0, None, "x"],
    )
    refuses(pld.compose, RUNS[0], **numbers, steps=[0, 1.5, math.nan, True], direction=["both"])
    # An interval of which the grid does not fit, and an epsilon beside a delta.
    refuses(pld.compose, RUNS[0], interval=[0.0, math.nan, -1e-4, 1e-10, 1e9], epsilon=[1.0])
    one_step = dict(sample_rate=0.01, noise_multiplier=1.0, steps=1)
    refuses(pld.compose, dict(one_step, delta=1e-5), interval=[1e-10, 1e9])
    refuses(pld.compose, one_step, epsilon=[-1.0, math.nan, math.inf])


def test_a_run_that_no_grid_of_reasonable_size_resolves_is_refused_before_the_memory_is_taken():
    """So many steps that the grid's own spread outgrows the loss's: 54 GB were asked for."""
    with pytest.raises(pld.NoGrid, match="steps"):
        pld.compose(sample_rate=4.84e-6, noise_multiplier=0.154, steps=386155490532, delta=4.1e-233)


class Work(TorchFunctionMode):
    """Counts the numbers that PyTorch computes."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.numbers += found.numel() if isinstance(found, torch.Tensor) else 0
        return found


CORNERS = [  # of the range, where privacy loss distributions took minutes or were refused
    (0.5153179636664761, 0.47475898178714454, 106442559, 1.15e-9),
    (0.20983344891084724, 0.2552399809495483, 666702409, 4e-6),
    (0.310655816701071, 0.016319045699112657, 57821563, 0.0614),
    (0.15615985321724718, 0.1133512883280374, 866139763, 9.6e-14),
    (4.84e-6, 0.154, 386155490532, 4.1e-233),
]


@pytest.mark.parametrize("rate, noise, steps, delta", CORNERS)
def test_without_a_grid_epsilon_lies_between_the_mean_of_the_loss_and_a_little_above(
    rate, noise, steps, delta
):
    """By Cantelli's inequality the loss is above its mean less a thousandth of its spread with a
    chance of 1e-6 and more; and a sum of so many bounded losses is Gaussian but for its last
    tail.
    """
    run = dict(sample_rate=rate, noise_multiplier=noise, steps=steps)
    t = np.linspace(-12, 12 + 1 / noise, 400_001)
    loss = np.logaddexp(np.log1p(-rate), np.log(rate) + t / noise - 0.5 / noise**2)
    weight = np.exp(loss - t**2 / 2) * (t[1] - t[0]) / math.sqrt(2 * math.pi)
    assert weight.sum() == pytest.approx(1, abs=1e-9)
    mean = float(weight @ loss)
    spread = math.sqrt(steps * float(weight @ (loss - mean) ** 2))
    found = compute_epsilon(**run, delta=delta)
    assert (
        steps * mean - 1e-3 * spread
        < found
        < steps * mean + 1.1 * math.sqrt(-2 * math.log(delta)) * spread
    )
    assert found <= compute_epsilon(**run, delta=delta, accountant="rdp")
    assert compute_delta(**run, epsilon=found) <= delta * (1 + 1e-6)


def test_without_a_grid_rare_draws_cost_what_an_example_pays_that_is_sampled_so_often():
    run = dict(sample_rate=7.027523461238453e-10, noise_multiplier=0.015412, steps=1287887224)
    found = compute_epsilon(**run, delta=9.6e-13)
    # Who is drawn k times is found out with even chances at this epsilon, less what it costs not to
    # know when.
    draws = stats.binom(run["steps"], run["sample_rate"])
    often = max(k for k in range(40) if 0.45 * draws.sf(k - 1) > 9.6e-13)
    each = 0.5 / run["noise_multiplier"] ** 2
    assert often * (each + math.log(run["sample_rate"])) <= found < (often + 2) * each


@pytest.mark.parametrize(
    "rate, noise, steps, delta, most",
    [
        *((*corner, 3e8) for corner in CORNERS),
        (5.04e-5, 0.01587, 476223305, 0.043, 3e8),
        pytest.param(1.6e-8, 0.356, 808_631, 1e-5, 2e9, marks=pytest.mark.slow),
    ],
)
def test_the_work_of_a_corner_is_bounded(rate, noise, steps, delta, most):
    """Some 500 million numbers are a second of a processor."""
    with Work() as work:
        assert (
            0
            <= compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
            < math.inf
        )
    assert 0 < work.numbers < most


def test_on_stairs_the_cell_is_found_by_sums_over_all_points_at_once(monkeypatch):
    """A grid coarser than 1: delta falls in stairs, where Newton's method takes hundreds of
    steps.
    """
    run = dict(sample_rate=0.3, noise_multiplier=0.05, steps=200)
    loss = pld.compose(**run, delta=1e-6, interval=30.0)
    looked, log_delta = [], pld.ComposedLoss.log_delta
    monkeypatch.setattr(
        pld.ComposedLoss, "log_delta", lambda *args: looked.append(args) or log_delta(*args)
    )
    for delta in (1e-9, 1e-6, 1e-5, 1e-3):
        looked.clear()
        epsilon = loss.epsilon(delta)
        assert len(looked) < 40
        assert (
            loss.delta(epsilon) <= delta * (1 + 1e-12) and loss.delta(epsilon * (1 - 1e-6)) > delta
        )


@pytest.mark.slow
def test_delta_of_a_step_whose_noise_hides_nothing_is_the_sample_rate():
    # The loss of adding has no spread left in float64.
    run = dict(sample_rate=0.9, noise_multiplier=0.011, steps=1)
    assert all(
        pld.delta(**run, epsilon=epsilon) == pytest.approx(0.9, rel=1e-6) for epsilon in (0.0, 1.0)
    )
