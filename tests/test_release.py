"""Private means and quantiles: calibrated noise, sound sensitivities, and which method errs
less.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpcompanion import release
from dpcompanion.accounting import Gaussian, Ledger, gaussian_delta, gaussian_epsilon
from dpcompanion.individual import IndividualAccountant
from dpcompanion.mechanism import secure
from dpcompanion.release import (
    _convolved,
    _noisy_prefixes,
    _square_root,
    ledger_item,
    noise_ratio,
    private_mean,
    private_quantiles,
    private_scaler,
    replacement_factor,
    split,
)
from dpcompanion.training import DPSGDPlan

from .refusals import refuses

BUDGET = dict(epsilon=0.1, delta=1e-5)
SHARES = [0.1, 0.3, 0.5, 0.7, 0.9]


def epsilons(n=60_000, seed=0):
    """Like the individual epsilons of a run on MNIST: most of them low, a few at the worst case of
    2.4.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(0.75 * torch.randn(n, generator=generator, dtype=torch.float64) - 0.84).clamp(
        max=2.4
    )


def released(values, seed, **options):
    return private_quantiles(
        values,
        SHARES,
        upper=2.4,
        generator=torch.Generator().manual_seed(seed),
        **{**BUDGET, **options},
    )


@pytest.mark.parametrize("epsilon, delta", [(0.1, 1e-5), (1.0, 1e-9), (3.0, 0.1)])
def test_the_noise_is_the_least_that_the_exact_curve_of_the_gaussian_mechanism_allows(
    epsilon, delta
):
    ratio = noise_ratio(epsilon, delta)
    assert (
        float(gaussian_delta(ratio, epsilon))
        <= delta
        < float(gaussian_delta(ratio * (1 + 1e-9), epsilon))
    )


def test_the_mean_has_noise_of_the_promised_spread():
    values = epsilons(500)
    draws = [
        private_mean(values, upper=2.4, generator=torch.Generator().manual_seed(s), **BUDGET)
        for s in range(400)
    ]
    std = 2.4 / noise_ratio(**BUDGET) / 500
    assert stats.kstest(np.array(draws), "norm", args=(float(values.mean()), std)).pvalue > 1e-7


@pytest.mark.parametrize("value, end", [(0.0, 0.0), (2.4, 2.4)])
@pytest.mark.parametrize("secure_noise", [False, True])
def test_a_mean_lies_where_means_lie(value, end, secure_noise):
    """Four values, and noise of seven times the range: what it carries beyond an end is moved
    there.
    """
    found = [
        private_mean(
            torch.full((4,), value),
            upper=2.4,
            generator=None if secure_noise else torch.Generator().manual_seed(seed),
            **BUDGET,
        )
        for seed in range(40)
    ]
    assert all(0 <= mean <= 2.4 for mean in found) and end in found


def test_releases_that_split_a_budget_compose_to_it():
    each = split(0.1, 1e-5, 3)
    together = math.sqrt(3) * noise_ratio(each, 1e-5)
    assert float(gaussian_delta(together, 0.1)) <= 1e-5 and each > 0.1 / 3
    assert split(0.1, 1e-5, 1) == pytest.approx(0.1, rel=1e-9)


def test_the_square_root_of_prefix_sums_is_one_and_no_column_is_longer_than_the_first():
    column = _square_root(40)
    matrix = torch.stack(
        [_convolved(column, row) for row in torch.eye(40, dtype=torch.float64)], dim=1
    )
    assert torch.allclose(
        matrix @ matrix, torch.ones(40, 40, dtype=torch.float64).tril(), atol=1e-12
    )
    assert torch.allclose(matrix.norm(dim=0).max(), column.norm())


def test_the_noise_on_the_curve_is_that_of_the_factorisation():
    # so many values in each bin that the noisy curve needs no isotonic correction
    bins, n = 16, 10**5
    values = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    truth = torch.arange(1, bins, dtype=torch.float64) * n / bins
    draws = (
        torch.stack(
            [
                _noisy_prefixes(
                    values, 1.0, bins, noise_ratio(**BUDGET), torch.Generator().manual_seed(s)
                )
                for s in range(300)
            ]
        )[:, :-1]
        - truth
    )
    column = _square_root(bins)
    expected = column.square().cumsum(0)[:-1].sqrt() * float(column.norm()) / noise_ratio(**BUDGET)
    expected = expected.flip(0)  # counted from the top
    low, high = (math.sqrt(stats.chi2.ppf(p, 300) / 300) for p in (1e-6, 1 - 1e-6))
    measured = draws.square().mean(dim=0).sqrt() / expected
    assert ((measured > low) & (measured < high)).all()


@pytest.mark.parametrize("bins", [2, 3, 17, 128])
def test_the_longest_difference_of_columns_is_what_a_replaced_value_moves(bins):
    column = _square_root(bins)
    matrix = torch.stack(
        [_convolved(column, row) for row in torch.eye(bins, dtype=torch.float64)], dim=1
    )
    differences = (matrix[:, :, None] - matrix[:, None, :]).norm(dim=0)
    exact = float(differences.max() / matrix.norm(dim=0).max())
    assert exact <= replacement_factor(bins) <= min(exact * (1 + 1e-8), math.sqrt(2)) + 1e-15


def test_a_release_is_calibrated_for_the_relation_that_is_asked_for():
    values = epsilons(2000)

    def noise(**relation):
        """What the released curve moves by per unit of noise, from the noise multiplier that
        reaches it.
        """
        seen = []
        original = release._noisy_prefixes
        release._noisy_prefixes = lambda *given: seen.append(given[3]) or original(*given)
        try:
            released(values, 0, **relation)
        finally:
            release._noisy_prefixes = original
        return seen[0]

    usual, replaced = noise(), noise(relation="replace")
    assert usual == noise(relation="add-remove") == noise_ratio(**BUDGET)
    # A value that is replaced moves the curve by the factor times what one that is added does.
    for ratio, least, most in ((usual, 0.1306, 0.131), (replaced, 0.1 - 1e-8, 0.1)):
        assert (
            least <= float(gaussian_epsilon(ratio * replacement_factor(512), 1e-5)) <= most + 1e-12
        )


@pytest.mark.parametrize(
    "release_of",
    [
        lambda **o: private_mean(
            epsilons(99), upper=2.4, generator=torch.Generator().manual_seed(0), **BUDGET, **o
        ),
        lambda **o: released(epsilons(99), 0, method="andrew2021", **o).tolist(),
    ],
)
def test_counts_of_one_value_move_alike_in_both_relations(release_of):
    assert release_of() == release_of(relation="replace") == release_of(relation="add-remove")
    with pytest.raises(ValueError, match="relation"):
        release_of(relation="zero-out")


def test_without_noise_quantiles_are_those_of_the_data():
    values, truth = (
        epsilons(),
        torch.quantile(epsilons(), torch.tensor(SHARES, dtype=torch.float64)),
    )
    loose = released(values, 0, epsilon=1e6, bins=4096)
    assert torch.allclose(loose, truth, rtol=2e-3)
    iterated = released(values, 0, epsilon=1e6, method="andrew2021", steps=300)
    assert torch.allclose(iterated, truth, rtol=2e-3)


def test_at_the_same_budget_the_curve_errs_less_than_the_iterations():
    values = epsilons()
    truth = torch.quantile(values, torch.tensor(SHARES, dtype=torch.float64))

    def error(**options):
        return float(
            torch.stack(
                [(released(values, seed, **options) / truth - 1).abs() for seed in range(20)]
            ).mean()
        )

    curve = error()
    assert curve < 0.005
    for rate in (0.2, 0.5, 1.0, 1.5):
        assert curve < 0.85 * error(method="andrew2021", learning_rate=rate)


def test_no_value_moves_a_release_further_than_the_bound_allows():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(50, generator=generator, dtype=torch.float64)
    for wild in (math.inf, -math.inf, math.nan, 1e9):
        other = values.clone()
        other[3] = wild
        means = [
            private_mean(v, upper=1.0, generator=torch.Generator().manual_seed(1), **BUDGET)
            for v in (values, other)
        ]
        assert abs(means[0] - means[1]) <= 1.0 / 50
        assert released(other, 2).isfinite().all()


def test_without_a_generator_the_noise_is_a_ciphers_and_no_seed_repeats_it():
    # noise far less than the mean
    values, options = epsilons(3000), {"upper": 2.4, "generator": None, **BUDGET}
    means = []
    for _ in range(60):
        torch.manual_seed(0)
        means.append(private_mean(values, **options))
    assert len(set(means)) == 60
    std = 2.4 / noise_ratio(**BUDGET) / 3000
    z = (np.array(means) - float(values.mean())) / std
    assert stats.kstest(z, "norm").pvalue > 1e-7
    # On a grid: what comes out has no low bits of the mean in it.
    grid = 2.0 ** (math.floor(math.log2(std)) - 24)
    assert all((mean / grid).is_integer() for mean in means)
    for method in ("cdf", "andrew2021"):
        found = [private_quantiles(values, SHARES, method=method, **options) for _ in range(2)]
        assert found[0].isfinite().all() and not torch.equal(*found)
    with pytest.raises(ValueError, match="epsilon"):
        private_mean(values, upper=2.4, epsilon=1e-8, delta=1e-12, generator=None)


def test_the_same_generator_gives_the_same_release():
    assert torch.equal(released(epsilons(300), 5), released(epsilons(300), 5))
    assert not torch.equal(released(epsilons(300), 5), released(epsilons(300), 6))


def test_bad_arguments_are_refused_by_name():
    good = dict(values=[0.5, 0.7], upper=2.0, generator=torch.Generator(), **BUDGET)
    bad = dict(upper=[0, 1e-200, 1e308], epsilon=[0, 1e40], delta=[1], generator=[0])
    bad["values"] = [[], [[0.1]], None, "abc", [0.5j]]
    refuses(private_mean, good, **bad)
    good["quantiles"] = [0.5]
    refuses(private_quantiles, good, **bad, quantiles=[[0.0], [1.0]], method=["magic"])
    refuses(
        private_quantiles,
        good,
        bins=[1, 10**7, 10**10, 1e300],
        steps=[0, -5, 1e300],
        learning_rate=[0, "x"],
        start=[3.0, "x"],
    )
    scaler = dict(x=torch.zeros(4, 2), lower=0.0, upper=1.0, generator=None, **BUDGET)
    refuses(
        private_scaler,
        scaler,
        lower=[1.0, math.nan],
        upper=[[1.0, 2.0, 3.0], math.inf],
        generator=[3],
    )
    refuses(private_scaler, scaler, epsilon=[0.0], delta=[1.0], relation=["swap"], unit=["", None])
    refuses(private_scaler, scaler, x=[torch.zeros(4), torch.zeros(0, 2), [["a", "b"]]])
    refuses(private_scaler(**scaler).transform, {}, x=[torch.zeros(4, 3), "a", None])


@pytest.mark.parametrize("method", ["mean", "cdf", "andrew2021"])
def test_whether_the_grid_of_the_noise_is_too_coarse_does_not_depend_on_the_values(method):
    def errs(value, epsilon):
        values, given = (
            torch.full((3000,), value),
            dict(upper=1.0, epsilon=epsilon, delta=1e-5, generator=None),
        )
        try:
            private_mean(values, **given) if method == "mean" else private_quantiles(
                values, [0.5], method=method, **given
            )
        except ValueError as error:
            assert "epsilon must be smaller" in str(error)
            return True
        return False

    found = [[errs(value, 10.0**power) for value in (0.0, 0.5, 1.0)] for power in range(4, 13)]
    assert [False] * 3 in found and [True] * 3 in found
    assert all(len(set(alike)) == 1 for alike in found)


def test_large_rates_leave_no_nan_in_iterated_quantiles():
    found = released(epsilons(200), 3, method="andrew2021", learning_rate=1e4, steps=50)
    assert bool(((found >= 0) & (found <= 2.4)).all())


@pytest.mark.parametrize("numbers", [1, 64])
def test_the_noise_on_a_grid_pays_for_what_the_grid_adds_to_the_sensitivity(numbers, monkeypatch):
    drawn = []

    def normal(self, shape, std):
        drawn.append(std)
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(secure.SecureStream, "normal", normal)
    for ratio in (1e-4, 1e-2, 1.0):
        drawn.clear()
        release._noisy(
            torch.zeros(numbers, dtype=torch.float64),
            1.0 / ratio,
            None,
            ratio=ratio,
            most=1.0,
            numbers=numbers,
        )
        [std] = drawn
        assert (1.0 + math.sqrt(numbers) * secure.grid_of(std)) / std <= ratio


def test_lists_keep_the_digits_of_their_numbers():
    """Through PyTorch's default type 1e50 is infinite."""
    wide = dict(upper=1e52, epsilon=1.0, delta=1e-5)
    means = [
        release.private_mean(values, **wide, generator=torch.Generator().manual_seed(0))
        for values in (
            [1e50] * 1000,
            np.full(1000, 1e50),
            np.full(1000, 1e50)[::-1],
            [10**50] * 1000,
        )
    ]
    assert len(set(means)) == 1 and means[0] < 1e51
    ends = [
        release.private_mean(v, **wide, generator=torch.Generator().manual_seed(0))
        for v in ([10**400], [1e300])
    ]
    assert ends[0] == ends[1]
    for values in (["1"], [1j], [None]):
        with pytest.raises(ValueError, match="values"):
            release.private_mean(values, **wide, generator=None)


def test_a_share_of_epsilon_for_which_delta_pays_alone_is_refused_in_words():
    with pytest.raises(ValueError, match="delta"):
        release.split(1e-3, 1e-3, 3)
    with pytest.raises(ValueError, match="delta"):
        release.private_quantiles(
            [0.1] * 100,
            [0.5],
            upper=1.0,
            epsilon=1e-6,
            delta=1e-4,
            generator=None,
            relation="replace",
        )


def sums_of(x, monkeypatch, **options):
    """The sums that a scaler gives noise to, and the standard deviation of the noise."""
    seen = {}

    def exactly(exact, std, generator, **_):
        seen.update(sums=exact, std=std)
        return exact

    monkeypatch.setattr(release, "_noisy", exactly)
    private_scaler(x, **({"lower": 0.0, "upper": 4.0, "generator": None} | BUDGET | options))
    return seen["sums"], seen["std"]


@pytest.mark.parametrize("relation", release.RELATIONS)
@pytest.mark.parametrize("d", [1, 2])
def test_neighbours_of_a_scaler_are_no_further_apart_than_its_noise_says(d, relation, monkeypatch):
    grid = torch.cartesian_prod(*[torch.linspace(-1.0, 5.0, 13, dtype=torch.float64)] * d).reshape(
        -1, d
    )
    grid = torch.cat([grid, torch.full((1, d), torch.nan), torch.full((1, d), -torch.inf)])
    rest = torch.rand(5, d, dtype=torch.float64) * 4
    sums, stds = zip(
        *[sums_of(torch.cat([rest, row[None]]), monkeypatch, relation=relation) for row in grid]
    )
    sums, sensitivity = torch.stack(sums), stds[0] * noise_ratio(**BUDGET)
    # who is left out of a public number has a row of NaN, and adds nothing
    assert torch.equal(sums[-2], sums_of(rest, monkeypatch)[0])
    if relation == "replace":
        largest = float(torch.cdist(sums, sums).max())
    else:  # n is public, and so a row that is not there adds nothing
        largest = float((sums - sums_of(rest, monkeypatch)[0]).norm(dim=1).max())
    assert sensitivity * (1 - 1e-9) < largest <= sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("secure_noise", [False, True])
def test_a_scaler_has_noise_of_the_promised_law(secure_noise):
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(50_000, 2, generator=generator, dtype=torch.float64)
    found = [
        private_scaler(
            x, lower=-3, upper=[7, 8], generator=None if secure_noise else generator, **BUDGET
        )
        for _ in range(200)
    ]
    means = torch.stack([scaler.mean for scaler in found])
    std = math.sqrt(2 * 5 / 4) / noise_ratio(**BUDGET) / len(x)
    for column, half in enumerate((5.0, 5.5)):
        exact = float(x[:, column].clamp(-3, 7 + column).mean())
        assert (
            stats.kstest(means[:, column].numpy(), "norm", args=(exact, half * std)).pvalue > 1e-7
        )
    assert found[0].seeded == (not secure_noise) == ("seeded" in found[0].statement())
    z = torch.stack([scaler.transform(x) for scaler in found[:5]])
    assert z.dtype == x.dtype and z.mean(1).abs().max() < 0.05 and (z.std(1) - 1).abs().max() < 0.05


def test_a_scaler_is_an_item_of_a_ledger_beside_the_training():
    x = torch.rand(1000, 3)
    options = dict(lower=0, upper=1, epsilon=0.5, delta=1e-6, generator=None)
    for relation in release.RELATIONS:
        scaler = private_scaler(x, relation=relation, **options)
        ledger = Ledger(relation=relation).add(scaler)
        assert 0.5 <= ledger.epsilon(1e-6) < 0.505
    plan = DPSGDPlan(
        n=1000, sample_rate=0.1, steps=50, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-5
    )
    both = Ledger().add(private_scaler(x, **options)).add(plan)
    assert max(plan.epsilon(), 0.5) < both.epsilon(1e-5) < plan.epsilon() + 0.5
    assert Ledger.from_json(both.to_json()) == both


@pytest.mark.parametrize(
    "relation, words", [("add-remove", "by one patient"), ("replace", "in one patient that is")]
)
def test_a_scaler_says_what_a_row_is_in_its_statement_and_on_a_ledger(relation, words):
    options = dict(lower=0, upper=1, epsilon=0.5, delta=1e-6, generator=None, relation=relation)
    scaler = private_scaler(torch.rand(100, 2), unit="patient", **options)
    assert (
        "of 100 patients" in scaler.statement()
        and words in scaler.statement()
        and "row" not in scaler.statement()
    )
    # The number of rows is public, and so adding or removing one is zero-out.
    assert (
        Ledger([scaler]).neighbours == "zero-out" and "one patient" in Ledger([scaler]).statement()
    )
    assert "100 examples" in private_scaler(torch.rand(100, 2), **options).statement()
    assert Ledger([ledger_item(0.5, 1e-6, unit="patient")]).units == ("patient",)


def test_a_scaler_of_constants_and_of_few_rows_is_finite():
    for x in (
        torch.zeros(50, 2),
        torch.full((2, 2), torch.nan),
        torch.full((3, 2), 1e300, dtype=torch.float64),
    ):
        scaler = private_scaler(x, lower=-1, upper=1, generator=None, **BUDGET)
        assert scaler.transform(torch.nan_to_num(x)).isfinite().all() and bool(
            (scaler.scale > 0).all()
        )
        assert bool((scaler.mean.abs() <= 1).all()) and bool((scaler.scale <= 1).all())


def test_who_is_left_out_with_value_0_moves_a_curve_no_further_than_its_noise_says():
    """Zero-out: n is public, and the epsilon of whose gradients are zeroed is 0."""
    bins = 16
    column, generator = _square_root(bins), torch.Generator().manual_seed(0)
    rest = torch.rand(20, generator=generator, dtype=torch.float64)

    def released(value):
        values = torch.cat([rest, torch.tensor([value], dtype=torch.float64)])
        curve = _noisy_prefixes(values, 1.0, bins, 1e9, torch.Generator().manual_seed(0))
        above = len(values) - curve.flip(0)  # the top 0, 1, ... bins hold so many
        counts = torch.diff(torch.cat([above, above[-1:]]))
        return _convolved(column, counts)

    left_out = released(0.0)
    moved = [float((released(value) - left_out).norm()) for value in (1e-9, 0.3, 0.97, 1.0)]
    assert max(moved) == pytest.approx(float(column.norm()), rel=1e-6)
    mean = [
        private_mean(
            torch.cat([rest, torch.tensor([v])]),
            upper=1.0,
            epsilon=1.0,
            delta=1e-5,
            generator=torch.Generator().manual_seed(1),
        )
        for v in (0.0, math.nan)
    ]
    assert mean[0] == mean[1]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_whose_gradients_vanish_moves_no_other_persons_epsilon(accountant):
    """By PLD persons shared grids: the mean of all moved by more than the noise was made for."""
    norms = torch.rand(20, 60, generator=torch.Generator().manual_seed(0)).cumprod(dim=0).sqrt()

    def epsilons(left_out):
        account = IndividualAccountant(
            60, sample_rate=0.05, noise_multiplier=1.0, max_grad_norm=0.5, accountant=accountant
        )
        for row in norms:
            row = row.clone()
            row[left_out] = 0
            account.record(row, steps=5)
        spent = Ledger().add(account).add(Gaussian(3.0)).epsilons(1e-6)
        return torch.stack([account.epsilon(1e-5), spent])

    all_ = epsilons([])
    for person in (int(all_[0].argmax()), int(all_[0].argmin()), 7):
        beside = torch.arange(60) != person
        found = epsilons([person])
        assert torch.allclose(found[:, beside], all_[:, beside], rtol=1e-11, atol=0)
        assert found[0, person] == 0 < all_[0, person]


def test_two_scalers_of_one_generators_state_do_not_add_up():
    x = torch.rand(50, 2, generator=torch.Generator().manual_seed(1))

    def scaler(generator):
        run = dict(lower=0, upper=1, epsilon=0.12345649, delta=1.00000049e-6)
        return private_scaler(x, **run, generator=generator)

    generator = torch.Generator().manual_seed(0)
    first, second = scaler(generator), scaler(generator)
    again = scaler(torch.Generator().manual_seed(0))
    assert len(Ledger([first, second, scaler(None), scaler(None)])) == 4
    with pytest.raises(ValueError, match="shares that of scaler"):
        Ledger([first, again])
    assert "(0.123457, 1.00001e-06)-DP" in first.statement()
