"""The ledger against dp-accounting's loss distributions, closed forms and quadrature."""

import json
import math

import dp_accounting
import mpmath
import numpy as np
import opacus
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as theirs
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dpcompanion.accounting import (
    DEFAULT_ORDERS,
    Gaussian,
    Guarantee,
    Laplace,
    Ledger,
    LedgerEntry,
    PersonalCosts,
    SampledGaussian,
    compute_delta,
    compute_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    mixed,
    select_best,
    selection,
    trade_off,
)
from dpcompanion.filters import RenyiFilter
from dpcompanion.individual import IndividualAccountant
from dpcompanion.training import DPSGDPlan

from ..refusals import refused

GRID, COARSE = {"value_discretization_interval": 1e-4}, {"value_discretization_interval": 1e-3}
PHASES = Ledger(
    [
        SampledGaussian(0.01, 1.1, 500),
        SampledGaussian(0.01, 0.9, 300),
        SampledGaussian(0.02, 1.3, 200),
    ]
)
TWO = Ledger([SampledGaussian(0.01, 1.0, 500), SampledGaussian(0.02, 1.2, 500)])


def oracle(item, grid=GRID):
    """The item's loss by dp-accounting."""
    if isinstance(item, SampledGaussian):
        return theirs.from_gaussian_mechanism(
            item.noise_multiplier, sampling_prob=item.sample_rate, **grid
        ).self_compose(item.steps)
    if isinstance(item, Gaussian):
        return theirs.from_gaussian_mechanism(item.noise_multiplier, **grid).self_compose(
            item.count
        )
    if isinstance(item, Laplace):
        return theirs.from_laplace_mechanism(item.scale, **grid).self_compose(item.count)
    return theirs.from_privacy_parameters(
        common.DifferentialPrivacyParameters(item.epsilon, item.delta), **grid
    )


def test_phases_of_different_rates_and_noises_cost_what_dp_accounting_says():
    assert PHASES.epsilon(1e-5) == pytest.approx(2.005, abs=5e-4)
    assert TWO.epsilon(1e-5) == pytest.approx(2.347, abs=5e-4)
    assert 0 < PHASES.error(1e-5) < 1e-4


def test_releases_guarantees_and_runs_cost_what_dp_accounting_says():
    items = [SampledGaussian(0.01, 1.0, 500), Laplace(5.0), Gaussian(8.0), Guarantee(0.1, 1e-7)]
    ledger, loss = Ledger(items), oracle(items[0])
    for item in items[1:]:
        loss = loss.compose(oracle(item))
    assert ledger.epsilon(1e-5) == pytest.approx(loss.get_epsilon_for_delta(1e-5), rel=1e-4)
    assert ledger.delta(2.0) == pytest.approx(loss.get_delta_for_epsilon(2.0), rel=1e-3)


def test_adding_counts_where_it_costs_more():
    # Both directions by dp-accounting; at this large delta and rate they are near each other.
    items = [SampledGaussian(0.6, 0.7, 3), SampledGaussian(0.9, 1.5, 2), Laplace(2.0)]
    loss = (
        oracle(items[0], COARSE).compose(oracle(items[1], COARSE)).compose(oracle(items[2], COARSE))
    )
    for delta in (1e-6, 0.05, 0.3):
        assert Ledger(items).epsilon(delta) == pytest.approx(
            loss.get_epsilon_for_delta(delta), rel=1e-3, abs=1e-3
        )


@pytest.mark.parametrize(
    "delta", [1e-3, *(pytest.param(delta, marks=pytest.mark.slow) for delta in (0.3, 1e-9))]
)
def test_one_run_costs_what_compute_epsilon_says(delta):
    run = dict(sample_rate=0.02, noise_multiplier=0.9, steps=300)
    epsilon = compute_epsilon(**run, delta=delta)
    ledger = Ledger(
        [SampledGaussian(**{**run, "steps": 100}), SampledGaussian(**{**run, "steps": 200})]
    )
    assert ledger.epsilon(delta) == pytest.approx(epsilon, rel=2e-4, abs=1e-4)
    assert ledger.delta(2.0) == pytest.approx(compute_delta(**run, epsilon=2.0), rel=1e-3)
    rates = torch.tensor([1e-3, 0.1, 0.7])
    torch.testing.assert_close(
        ledger.trade_off(rates), trade_off(**run, false_positive_rate=rates), rtol=2e-3, atol=1e-3
    )


def test_gaussians_compose_in_closed_form_and_on_the_grid():
    ledger = Ledger([Gaussian(2.0, count=3), Gaussian(4.0), SampledGaussian(1.0, 5.0, 10)])
    mu = math.sqrt(3 / 4 + 1 / 16 + 10 / 25)
    assert ledger.epsilon(1e-6) == pytest.approx(gaussian_epsilon(mu, 1e-6), rel=1e-9)
    assert ledger.epsilon(1e-6) >= gaussian_epsilon(mu, 1e-6)
    assert ledger.delta(1.5) == pytest.approx(gaussian_delta(mu, 1.5), rel=1e-9)
    assert ledger.mu().mu == pytest.approx(mu, rel=1e-12) and ledger.mu().mu >= mu
    assert ledger.trade_off(0.1) == pytest.approx(
        stats.norm.cdf(stats.norm.ppf(0.9) - mu), rel=1e-9
    )
    # A guarantee that costs nothing sends the same through the grid.
    for delta in (1e-2, 1e-6, 1e-12):
        exact = gaussian_epsilon(mu, delta)
        assert exact <= ledger.add(Guarantee(1e-9, 0.0)).epsilon(delta) <= exact * (1 + 2e-4)


@pytest.mark.parametrize("scale", [0.2, 1.0, 30.0])
def test_laplace_noise_and_guarantees_have_their_closed_forms(scale):
    c = 1 / scale
    for share in (0.0, 0.1, 0.5, 0.9):
        epsilon = share * c
        delta = -math.expm1((epsilon - c) / 2)
        assert delta <= Ledger([Laplace(scale)]).delta(epsilon) <= delta * (1 + 1e-4)
    for epsilon in (0.0, 0.5 * c):
        # P's mass on the loss c is (1 - d) e^c / (1 + e^c), and d on an infinite one.
        exact = 1e-3 + (1 - 1e-3) / (1 + math.exp(-c)) * -math.expm1(epsilon - c)
        assert (
            exact * (1 - 1e-12) <= Ledger([Guarantee(c, 1e-3)]).delta(epsilon) <= exact * (1 + 1e-4)
        )
    assert (
        Ledger([Guarantee(c, 1e-3)]).epsilon(1e-3) == c
        and Ledger([Guarantee(c, 1e-3)]).epsilon(1e-4) == math.inf
    )


@pytest.mark.slow
def test_a_full_batch_at_little_noise_beside_sampled_steps_stays_on_the_grid():
    # Its losses reach so far below zero that 1 - q + q e^u would be 0 for q = 1.
    items = [SampledGaussian(0.01, 0.6, 1), SampledGaussian(1.0, 0.6, 3)]
    loss = oracle(items[0], COARSE).compose(oracle(Gaussian(0.6, 3), COARSE))
    assert Ledger(items).epsilon(0.01) == pytest.approx(loss.get_epsilon_for_delta(0.01), rel=1e-3)
    assert Ledger([*items, Guarantee(0.0, 0.0)]).epsilon(0.01) == Ledger(items).epsilon(0.01)


def test_two_laplace_releases_by_quadrature():
    c, epsilon = 0.5, 0.3

    def single(e):
        return -math.expm1((e - c) / 2) if -c < e < c else 0.0 if e >= c else -math.expm1(e)

    def integrand(loss):
        return 0.25 * math.exp((loss - c) / 2) * single(epsilon - loss)

    density = integrate.quad(integrand, -c, c, points=[epsilon - c])[0]
    exact = density + 0.5 * single(epsilon - c) + 0.5 * math.exp(-c) * single(epsilon + c)
    found = Ledger([Laplace(2.0, count=2)]).delta(epsilon)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-4)


ITEMS = st.one_of(
    st.builds(
        SampledGaussian,
        st.sampled_from([0.01, 0.1, 0.5, 1.0]),
        st.sampled_from([0.6, 1.0, 4.0]),
        st.integers(0, 50),
    ),
    st.builds(Gaussian, st.sampled_from([1.0, 9.0]), st.integers(0, 2)),
    st.builds(Laplace, st.sampled_from([0.5, 20.0]), st.integers(0, 2)),
    st.builds(Guarantee, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 1e-7])),
)


@settings(max_examples=6, deadline=None)
@given(st.lists(ITEMS, max_size=3), ITEMS, st.sampled_from([1e-2, 1e-5]))
def test_order_does_not_matter_adding_never_lowers_and_json_gives_all_back(items, more, delta):
    ledger = Ledger(items)
    epsilon = ledger.epsilon(delta)
    assert Ledger(items[::-1]).epsilon(delta) == epsilon
    assert ledger.add(more).epsilon(delta) >= epsilon * (1 - 3e-4) - 1e-9
    labelled = ledger.add(more, label="last")
    assert Ledger.from_json(labelled.to_json()) == labelled and labelled.labels[-1] == "last"
    if math.isfinite(epsilon) and epsilon > 1e-3:
        assert ledger.delta(epsilon) <= delta * 1.01


@pytest.mark.slow
def test_a_bound_is_never_below_the_optimistic_distribution():
    items = [SampledGaussian(0.05, 0.8, 40), SampledGaussian(0.3, 3.0, 60)]
    losses = [
        theirs.from_gaussian_mechanism(
            item.noise_multiplier,
            sampling_prob=item.sample_rate,
            pessimistic_estimate=False,
            **GRID,
        ).self_compose(item.steps)
        for item in items
    ]
    below = losses[0].compose(losses[1])
    for delta in (1e-2, 1e-5, 1e-8):
        found = Ledger(items).epsilon(delta)
        assert (
            below.get_epsilon_for_delta(delta) <= found <= below.get_epsilon_for_delta(delta) * 1.01
        )


def test_more_kinds_than_few_stay_a_bound_with_a_coarser_grid(monkeypatch):
    ledger = Ledger([SampledGaussian(0.01, 0.8 + 0.02 * j, 10 + j) for j in range(12)])
    fine = ledger.epsilon(1e-5)
    monkeypatch.setattr(mixed, "FEW_KINDS", 4)
    again = Ledger([ledger])
    assert fine * (1 - 1e-4) <= again.epsilon(1e-5) <= fine * (1 + 3e-3)


@pytest.mark.slow
def test_mu_lies_above_the_whole_curve_and_its_regret_is_the_gap():
    found = TWO.mu(least=1e-8)
    for epsilon in (0.0, 0.3, 1.0, 2.0, 3.0):
        assert gaussian_delta(found.mu, epsilon) >= TWO.delta(epsilon) * (1 - 1e-3)
    rates = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    gap = TWO.trade_off(rates) - torch.from_numpy(
        stats.norm.cdf(stats.norm.ppf(1 - rates.numpy()) - found.mu)
    )
    assert -1e-6 <= float(gap.min()) and float(gap.max()) == pytest.approx(found.regret, abs=2e-3)
    assert Ledger([Guarantee(1.0, 1e-3)]).mu().mu == math.inf and Ledger().mu() == (0.0, 0.0)


def test_so_little_noise_that_no_grid_resolves_it_costs_the_sum():
    one, other = SampledGaussian(0.5, 0.005, 10), SampledGaussian(0.5, 1.0, 10)
    ledger = Ledger([one, other])
    runs = [
        dict(sample_rate=i.sample_rate, noise_multiplier=i.noise_multiplier, steps=i.steps)
        for i in (one, other)
    ]
    assert ledger.epsilon(1e-5) == pytest.approx(
        sum(compute_epsilon(**run, delta=5e-6) for run in runs), rel=1e-9
    )
    assert ledger.error(1e-5) == math.inf


def test_without_a_grid_delta_and_the_curve_are_bounds_as_well():
    run = dict(sample_rate=0.01, noise_multiplier=0.005, steps=100)
    ledger = Ledger([SampledGaussian(*run.values())])
    drawn = 1 - 0.99**100  # whoever was drawn shows, and nobody else does
    assert drawn <= ledger.delta(3.0) <= ledger.delta(0.0) <= drawn * (1 + 1e-4)
    least = compute_delta(**run, epsilon=1e5)
    assert least <= ledger.delta(1e5) <= least * (1 + 1e-4)
    rates = torch.tensor([1e-6, 0.1, 0.5, 1.0], dtype=torch.float64)
    own, exact = ledger.trade_off(rates), (1 - drawn - rates).clamp(min=0)
    assert bool((own <= exact + 1e-9).all())
    torch.testing.assert_close(own, exact, rtol=0, atol=1e-4)
    epsilons = torch.tensor([0.0, 1.0, 1e4, 1e5], dtype=torch.float64)
    deltas = ledger.composition.delta_at(epsilons)
    assert all(
        compute_delta(**run, epsilon=epsilon) <= delta
        for epsilon, delta in zip(epsilons.tolist(), deltas.tolist())
    )


@pytest.mark.slow
def test_without_a_grid_mu_and_the_price_of_a_sweep_are_bounds_as_well():
    run = SampledGaussian(0.01, 0.005, 100)
    mu = Ledger([run]).mu(least=1e-6).mu
    for epsilon in (0.0, 3.0, 1e4, 1e5, 2e5):
        assert gaussian_delta(mu, epsilon) + 1e-6 >= Ledger([run]).delta(epsilon) * (1 - 1e-3)
    assert Ledger([run]).epsilon(1e-5) < select_best(run, mean=5).epsilon(1e-5) < math.inf
    beside = Ledger([run, Guarantee(0.5, 1e-7)])
    assert 1 - 0.99**100 <= beside.delta(0.6) <= 1 - 0.99**100 + 1e-4
    assert beside.delta(0.4) == 1  # the guarantee takes all of epsilon
    assert 0 < float(beside.trade_off(0.01)) < float(Ledger([run]).trade_off(0.01))


@pytest.mark.slow
def test_a_plan_an_opacus_history_and_another_ledger_are_items():
    plan = DPSGDPlan(
        n=100, sample_rate=0.01, steps=500, max_grad_norm=0.5, noise_multiplier=1.0, delta=1e-5
    )
    other = Ledger.from_opacus([(1.2, 0.02, 500)])
    added = LedgerEntry(TWO.items[0], relation="zero-out")
    assert (
        Ledger([plan, other])
        == Ledger([added, TWO.items[1]])
        == Ledger().add(plan).add(TWO.items[1])
        != TWO
    )
    assert hash(TWO) == hash(Ledger(TWO.items)) and len(TWO) == 2
    norms = torch.tensor([0.5, 1.5], dtype=torch.float64)
    unequal = DPSGDPlan(
        n=2, sample_rate=[0.1, 0.2], steps=5, max_grad_norm=norms, noise_multiplier=3.0, delta=1e-5
    )
    assert Ledger([unequal]).items == (SampledGaussian(0.2, 2.0, 5),)
    event = Ledger([Laplace(2.0), Gaussian(3.0, 2), *TWO.items]).to_dp_event()
    accountant = dp_accounting.pld.PLDAccountant().compose(event)
    assert accountant.get_epsilon(1e-5) == pytest.approx(
        Ledger([Laplace(2.0), Gaussian(3.0, 2), *TWO.items]).epsilon(1e-5), rel=1e-3
    )


RUN = dict(n=100, sample_rate=0.1, steps=5, max_grad_norm=1.0, noise_multiplier=3.0, delta=1e-3)
ZERO_OUT = DPSGDPlan(**RUN, unit="patient")
ADD_REMOVE = DPSGDPlan(**RUN, unit="patient", expected_batch_size=10)


def whom(items, relation="add-remove"):
    """What a statement says of neighbours, and of its items."""
    said = Ledger(items, relation=relation).statement(1e-3)
    return said.partition(";" if "zero-out;" not in said else "),")[0], said.partition(
        "Composed: "
    )[2]


def test_a_statement_says_the_relation_that_all_items_hold_for():
    words = (
        "Neighbours differ in one patient, whose data are left out of one of them (zero-out; the "
        "number of patients is"
    )
    assert Ledger([ZERO_OUT]).statement(1e-3).startswith(words)
    assert whom([ADD_REMOVE])[0] == "Neighbours differ by adding or removing one patient"
    assert (
        whom([ZERO_OUT, ADD_REMOVE], "replace")[0]
        == "Neighbours differ by one patient that replaces another"
    )
    assert (
        whom([SampledGaussian(0.1, 3.0, 5)])[0]
        == "Neighbours differ by adding or removing one example"
        == whom([])[0]
    )
    mixed = Ledger([ADD_REMOVE, ZERO_OUT])
    assert mixed.neighbours == "zero-out" and mixed.statement(1e-3).startswith(words)
    first, second = whom([ADD_REMOVE, ZERO_OUT])[1].split(";")
    assert first.endswith("(add-remove)") and "(zero-out)." in second
    assert "zero-out" not in whom([ZERO_OUT])[1]
    assert Ledger.from_json(mixed.to_json()) == mixed and Ledger([mixed]).neighbours == "zero-out"
    assert Ledger([ADD_REMOVE]).epsilon(1e-3) == Ledger([ZERO_OUT]).epsilon(1e-3)


def test_a_statement_names_each_unit_where_items_have_different_ones():
    ledger = Ledger([ZERO_OUT]).add(
        LedgerEntry(Gaussian(9.0), label="means", relation="zero-out", unit="row")
    )
    said = ledger.statement(1e-3)
    assert "one unit" in said and "a unit is one patient or one row, as each item says" in said
    assert (
        "(one patient); Gaussian noise of scale 9 (means, one row)." in said
        and ledger.units == ("patient", "row")
    )
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_relation_and_unit_are_those_of_the_plan_in_accounts_filters_and_the_best_run():
    account = IndividualAccountant.for_plan(ADD_REMOVE)
    account.record(torch.ones(100), steps=5)
    bare = IndividualAccountant(1, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    bare.record([1.0])
    assert (Ledger([account]).neighbours, Ledger([bare]).neighbours) == ("add-remove", "zero-out")
    filter = RenyiFilter.for_plan(ADD_REMOVE, 1.0)
    best = select_best(Ledger([ZERO_OUT]), mean=2)
    for item, neighbours in ((filter, "add-remove"), (best, "zero-out")):
        ledger = Ledger().add(item, delta=1e-4)
        assert ledger.neighbours == neighbours and ledger.units == ("patient",)


@pytest.mark.parametrize("distribution, shape", [("poisson", np.inf), ("geometric", 1)])
@pytest.mark.parametrize("mean", [1.0, 12.0])
def test_the_best_of_many_runs_costs_what_dp_accounting_says(
    distribution, shape, mean, monkeypatch
):
    monkeypatch.setattr(selection, "_ORDERS", DEFAULT_ORDERS)
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(3.0), 2)
    accountant = RdpAccountant(list(DEFAULT_ORDERS)).compose(
        dp_event.RepeatAndSelectDpEvent(event, mean, shape)
    )
    found = select_best(Gaussian(3.0, 2), mean=mean, distribution=distribution).epsilon(1e-5)
    # Theirs bounds the delta of one run by Renyi divergences, ours knows it.
    assert found <= accountant.get_epsilon(1e-5) * (1 + 1e-6)
    assert found >= 0.75 * accountant.get_epsilon(1e-5) and found >= Ledger(
        [Gaussian(3.0, 2)]
    ).epsilon(1e-5)


def test_selection_of_pure_mechanisms_is_three_times_one():
    found = select_best(
        Ledger([Guarantee(0.1, 0.0), Laplace(10.0)]), mean=100, distribution="geometric"
    )
    assert found.epsilon(1e-9) == pytest.approx(0.6, rel=1e-3)


@pytest.mark.parametrize(
    "wrong, name",
    [
        (lambda: SampledGaussian(0.0, 1.0, 5), "sample_rate"),
        (lambda: SampledGaussian(0.1, 0.0, 5), "noise_multiplier"),
        (lambda: SampledGaussian(0.1, 1.0, 2.5), "steps"),
        (lambda: Gaussian(1.0, -1), "count"),
        (lambda: Laplace(math.nan), "scale"),
        (lambda: Guarantee(-1.0, 0.0), "epsilon"),
        (lambda: Guarantee(1.0, 1.0), "delta"),
        (lambda: Ledger(["a run"]), "item"),
        (lambda: LedgerEntry(Gaussian(1.0), relation="replace"), "relation"),
        (lambda: LedgerEntry(Gaussian(1.0), unit=""), "unit"),
        (
            lambda: Ledger.from_json(
                '{"ledger": [{"kind": "Laplace", "scale": 1, "relation": "swap"}]}'
            ),
            "relation",
        ),
        (lambda: Ledger().add(Gaussian(1.0), label=3), "label"),
        (lambda: TWO.epsilon(0.0), "delta"),
        (lambda: TWO.delta(-1.0), "epsilon"),
        (lambda: TWO.trade_off(1.5), "false_positive_rate"),
        (lambda: TWO.mu(least=0.5), "least"),
        (lambda: Ledger.from_opacus([1, 2]), "history"),
        (lambda: Ledger().add(opacus.accountants.RDPAccountant()), "Ledger.from_opacus"),
        (
            lambda: Ledger([LedgerEntry(Gaussian(1.0), people=[0, 1])]).add(
                IndividualAccountant(1, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
            ),
            r"people=range\(1\)\).add\(second, people=range\(2\)\)",
        ),
        (lambda: Ledger.from_json("{"), "source"),
        (lambda: Ledger().to_json(5), "path"),
        (lambda: Ledger().add(Gaussian(10.0), people=[10**12]), "people"),
        (lambda: Ledger.from_json('{"ledger": [{"kind": "Gauss"}]}'), "kind"),
        (
            lambda: Ledger.from_json('{"ledger": [{"kind": "Gaussian", "sigma": 1}]}'),
            "noise_multiplier",
        ),
        (lambda: Ledger([Guarantee(1.0, 0.0)]).to_dp_event(), "Guarantee"),
        (lambda: select_best(Gaussian(1.0), mean=0.5, distribution="geometric"), "mean"),
        (lambda: select_best(Gaussian(1.0), mean=2, distribution="uniform"), "distribution"),
        (lambda: select_best(Guarantee(1.0, 1e-6), mean=2), "Guarantee"),
    ],
)
def test_what_is_wrong_is_refused_by_name(wrong, name):
    with pytest.raises(ValueError, match=name):
        wrong()


def test_an_accountant_of_opacus_is_taken_by_its_history():
    accountant = opacus.accountants.RDPAccountant()
    for noise in (1.0, 1.0, 1.2):
        accountant.step(noise_multiplier=noise, sample_rate=0.01)
    found = Ledger.from_opacus(accountant)
    assert found == Ledger.from_opacus(accountant.history)
    assert found.items == (SampledGaussian(0.01, 1.0, 2), SampledGaussian(0.01, 1.2, 1))


@pytest.mark.parametrize("card", ["card.json", {"epsilon": 1.0}])
def test_a_card_is_not_added_and_what_to_keep_instead_is_said(card):
    refused(r"a card .* keep Ledger\(\)\.add\(history\)\.to_json", Ledger().add, card)


def test_entries_of_one_key_are_refused_and_the_name_of_a_key_comes_back_from_json():
    run = SampledGaussian(0.01, 1.0, 500)
    one, other = (LedgerEntry(run, key_fingerprint=name) for name in ("one", "other"))
    ledger = Ledger([one, run, other, run], relation="replace")
    assert Ledger.from_json(ledger.to_json()) == ledger != Ledger([run] * 4, relation="replace")
    for item in (one, ledger, one.named("again"), one.among([0, 2])):
        with pytest.raises(ValueError, match="key of its own"):
            ledger.add(item)
    assert ledger.epsilon(1e-5) == Ledger([run] * 4, relation="replace").epsilon(1e-5)
    with pytest.raises(ValueError, match="key_fingerprint must be a text, got 3"):
        LedgerEntry(run, key_fingerprint=3)


def test_what_is_not_as_usual_shows_in_the_ledger_itself():
    entry = LedgerEntry(Gaussian(20.0), relation="zero-out", unit="patient")
    ledger = Ledger([SampledGaussian(0.01, 1.0, 500), entry])
    assert repr(ledger).endswith("replaced=2.0), relation='zero-out', unit='patient')])")
    assert repr(ledger).count("LedgerEntry") == 1


@pytest.mark.parametrize("people", [3, 12, 13, 20])
@pytest.mark.parametrize("delta", [1e-5, 2.0**-16, 2.0**-5, 1e-8])
def test_a_guarantee_whose_delta_is_all_of_delta_leaves_nothing_for_gaussians(people, delta):
    account = IndividualAccountant(
        people, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=1.0, rounding=0.05
    )
    account.record(0.05 * (1 + torch.arange(people) % 20), steps=100)
    ledger = Ledger([Guarantee(1.0, delta)]).add(account)
    assert ledger.epsilon(delta) == math.inf and ledger.epsilons(delta).eq(math.inf).all()
    assert Ledger([Guarantee(1.0, delta), Gaussian(2.0)]).epsilon(delta) == math.inf
    assert Ledger([Guarantee(1.0, delta)]).epsilon(delta) == 1.0


def test_a_guarantee_whose_e_to_epsilon_no_float_holds_has_delta_1_where_examples_are_replaced():
    item = Guarantee(800.0, 1e-320)
    assert Ledger([item], relation="replace").epsilon(1e-10) == math.inf


def test_releases_with_next_to_no_noise_have_a_bound():
    for item in (Gaussian(1e-160), SampledGaussian(1.0, 1e-160, 1), Gaussian(1e-310, count=3)):
        assert Ledger([item]).epsilon(1e-5) == math.inf
    for item in (Gaussian(1e-310, count=0), SampledGaussian(1.0, 1e-310, 0)):
        assert Ledger([item, Gaussian(2.0)]).epsilon(1e-5) == Ledger([Gaussian(2.0)]).epsilon(1e-5)


@pytest.mark.parametrize("delta", [0.25, 1e-5, 1e-9])
def test_deltas_of_guarantees_together_are_rounded_up(delta):
    ledger = Ledger([Guarantee(1.0, delta)] * 3)
    with mpmath.workdps(60):
        exact = 1 - (1 - mpmath.mpf(delta)) ** 3
        assert exact <= ledger.delta(3.0) <= exact * (1 + 1e-12)
    assert ledger.epsilon(ledger.delta(3.0)) == 3.0


@pytest.mark.parametrize("rounding", [None, 0.01])
def test_accounts_of_norms_that_are_all_zero_are_added_and_come_back(rounding):
    account = IndividualAccountant(
        3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=1.0, rounding=rounding
    )
    account.record([0.0, 0.0, 0.0], steps=10)
    ledger = Ledger([account])
    assert ledger.epsilons(1e-5).eq(0).all()
    assert Ledger.from_json(ledger.to_json()).epsilons(1e-5).eq(0).all()


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6, 1e-8])
def test_the_best_of_one_run_with_a_tiny_epsilon_costs_that_epsilon(epsilon):
    for item in (Guarantee(epsilon, 0.0), Laplace(1 / epsilon)):
        found = select_best(item, mean=1, distribution="geometric").epsilon(1e-12)
        assert 0.99 * epsilon <= found <= 3.01 * epsilon


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e5, 1e7])
@pytest.mark.parametrize("order", [1.001, 2.0, 64.0])
def test_divergences_of_tiny_losses_are_those_of_mpmath_or_slightly_above(scale, order):
    with mpmath.workdps(60):
        a, c = mpmath.mpf(order), 1 / mpmath.mpf(scale)
        laplace = (a * mpmath.exp((a - 1) * c) + (a - 1) * mpmath.exp(-a * c)) / (2 * a - 1)
        high, low = mpmath.exp(c) / (1 + mpmath.exp(c)), 1 / (1 + mpmath.exp(c))
        response = high**a * low ** (1 - a) + low**a * high ** (1 - a)
        exact = [float(mpmath.log(each) / (a - 1)) for each in (laplace, response)]
    orders = torch.tensor([order], dtype=torch.float64)
    items = Laplace(scale), Guarantee(1 / scale, 0.0)
    for item, value in zip(items, exact):
        found = float(selection.rdp_of(Ledger([item]), orders))
        assert value * (1 - 1e-4) <= found <= value * (1 + 1e-3)


def test_a_statement_says_whose_deltas_leave_no_epsilon():
    ledger = Ledger([Guarantee(1.0, 1e-5), Guarantee(2.0, 1e-5)])
    assert ledger.statement(1e-5).endswith(
        "Together epsilon inf at delta 1e-05: the items' deltas reach 2e-05, more than delta."
    )
    assert "reach" not in ledger.statement(1e-4)


@pytest.mark.parametrize(
    "item, epsilon",
    [
        (Laplace(1e-5), 1e5),
        (Laplace(1e-9), 1e9),
        (Laplace(1e-160), 1e160),
        (Guarantee(1000.0, 1e-6), 1000.0),
        (Guarantee(1e300, 0.0), 1e300),
    ],
)
def test_a_bounded_loss_that_no_grid_holds_costs_its_bound(item, epsilon):
    """Its grid was made whole, of tens of gigabytes."""
    found = Ledger([item]).epsilon(1e-5)
    assert epsilon * (1 - 1e-4) <= found <= epsilon


def test_nobody_is_a_set_of_people_and_places_of_items_are_whole_numbers():
    entry = LedgerEntry(Gaussian(1.0), people=torch.zeros(0, dtype=torch.int64))
    assert entry.people == () and LedgerEntry(Gaussian(1.0), people=[]).size == 0
    items = [Guarantee(5.0, 0.0), Guarantee(0.1, 0.0)]
    for which in ([0, -1], [0, 0.5], [0, 2]):
        with pytest.raises(ValueError, match="which"):
            PersonalCosts.each(items, which)


def test_a_run_whose_file_says_more_than_an_item_counts_is_refused():
    run = {"sample_rate": 0.01, "noise_multiplier": 1.0, "steps": 100}
    printed = {"epsilon": 1.0, "delta": 1e-5, "accountant": "pld", "sampler": "Poisson"}
    assert Ledger.from_json(json.dumps(run | printed)) == Ledger([SampledGaussian(**run)])
    plan = DPSGDPlan(n=10, max_grad_norm=[1.0] * 9 + [5.0], delta=1e-5, **run)
    for config in (plan.config(), run | {"arithmetic": "float"}, run | {"max_grad_norm": 2.0}):
        with pytest.raises(ValueError, match=r"source must hold .* (arithmetic|max_grad_norm)"):
            Ledger.from_json(json.dumps(config))


RUN = '"sample_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000'


@pytest.mark.parametrize(
    "text, words",
    [
        (f'{{{RUN}, "sampler": "balls-and-bins"}}', "sampler must be one of 'Poisson'"),
        (
            f'{{{RUN}, "neighbouring_relation": "replace one example by another"}}',
            "neighbouring_relation must be",
        ),
        (f'{{"ledger": [], {RUN}}}', "noise_multiplier, sample_rate, steps beside it"),
        ('{"ledger": [], "sampler": "shuffled"}', "sampler must be one of"),
        (
            f'{{"ledger": [{{{RUN}}}], "neighbouring_relation": "replace one example by another"}}',
            "neighbouring_relation must be one of 'add or remove one example'",
        ),
        (f'{{{RUN}, "steps": 1}}', "'steps' twice"),
        ("[" * 100_000, "source must be a ledger in JSON"),
        ("[]", "got an empty list"),
        ('{"epsilon": 1.0, "promised_quantiles": {}}', "got the card of a run"),
    ],
)
def test_a_file_that_says_something_else_beside_its_runs_is_refused(text, words):
    refused(words, Ledger.from_json, text)


def test_no_one_is_promised_more_than_everybody():
    run = SampledGaussian(0.01, 1.0, 10)
    for kind, counts in (
        (SampledGaussian(0.01, 1.0, 1), [[11], [10]]),
        (SampledGaussian(0.01, 0.9, 1), [[1], [0]]),
        (SampledGaussian(0.02, 1.0, 1), [[0], [1]]),
    ):
        costs = PersonalCosts((kind,), torch.tensor(counts))
        refused("promised must hold none", LedgerEntry, run, promised=costs)
        refused("account must hold none", LedgerEntry, run, account=costs)
    more = PersonalCosts.each([Guarantee(3.0, 0.0)], [0, 0])
    refused("promised must hold none", LedgerEntry, Guarantee(1.0, 0.0), promised=more)
    whole = PersonalCosts((SampledGaussian(0.01, 1.0, 1),), torch.tensor([[10], [0]]))
    assert LedgerEntry(run, promised=whole).size == 2


def test_a_statement_says_that_units_of_two_kinds_are_one_each():
    ledger = Ledger([LedgerEntry(Gaussian(5.0), unit=unit) for unit in ("example", "patient")])
    assert "and nobody has two of a kind" in ledger.statement()
    assert "at delta 1.23456789e-05" in ledger.statement(1.23456789e-5)


def test_a_file_of_accounts_is_its_owners(tmp_path):
    run = SampledGaussian(0.01, 1.0, 10)
    own = PersonalCosts((SampledGaussian(0.01, 1.0, 1),), torch.tensor([[10], [0]]))
    Ledger([LedgerEntry(run, account=own)]).to_json(tmp_path / "[a].json")
    assert (tmp_path / "[a].json").stat().st_mode & 0o077 == 0
    assert Ledger.from_json(tmp_path / "[a].json").n == 2
    refused("items must be a list", Ledger, run)
