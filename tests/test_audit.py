"""One-run audits: bounds that hold as often as they say, are no toys, and find a trainer that is
broken.
"""

import math

import numpy as np
import pytest
import torch
from faults import add_no_noise, clip_nothing, halve_the_noise, include_everyone, join_two_draws
from scipy import stats

from dpcompanion import audit
from dpcompanion.accounting import compute_delta, gaussian_epsilon
from dpcompanion.training import Callbacks, Checkpoint, DPSGDPlan, cross_entropy, models

from .refusals import refused, refuses


class Line:
    """The trade-off of (epsilon, delta)."""

    def __init__(self, epsilon, delta=0.0):
        self.grown, self.delta = math.exp(epsilon), delta

    def inverse(self, inside):
        return max(
            0.0, (inside - self.delta) / self.grown, 1 - self.delta - self.grown * (1 - inside)
        )


def share_refuted(refuted, law):
    """The probability, exactly, that a count drawn from a law over 0..r is refuted."""
    return sum(p for v, p in enumerate(law) if p > 1e-12 and refuted(v))


@pytest.mark.parametrize("epsilon, trials", [(0.0, 60), (0.5, 60), (2.0, 60), (4.0, 150)])
def test_randomised_response_is_refuted_as_rarely_as_is_said_and_nearly_found(epsilon, trials):
    law = stats.binom.pmf(np.arange(trials + 1), trials, 1 / (1 + math.exp(-epsilon)))
    assert (
        share_refuted(lambda v: audit.one_run_epsilon(v, trials, trials, delta=0) > epsilon, law)
        <= 0.05
    )
    assert share_refuted(lambda v: audit.refutes(Line(epsilon), v, trials, trials), law) <= 0.05
    typical = 40 * trials / (1 + math.exp(-epsilon))
    found = audit.one_run_epsilon(int(typical), 40 * trials, 40 * trials, delta=0)
    assert 0.85 * epsilon - 0.05 <= found <= epsilon


@pytest.mark.parametrize("mu", [0.5, 1.5, 3.0])
def test_gaussian_noise_is_refuted_as_rarely_as_is_said(mu):
    trials = 80
    law = stats.binom.pmf(np.arange(trials + 1), trials, stats.norm.cdf(mu / 2))
    assert (
        share_refuted(lambda v: audit.refutes(audit.GaussianCurve(mu), v, trials, trials), law)
        <= 0.05
    )
    delta = 1e-3
    epsilon = float(gaussian_epsilon(mu, delta))
    assert (
        share_refuted(
            lambda v: audit.one_run_epsilon(v, trials, trials, delta=delta) > epsilon, law
        )
        <= 0.05
    )


@pytest.mark.parametrize("delta", [0.04, 0.06, 0.2])
def test_a_mechanism_that_reveals_all_with_probability_delta_is_rarely_refuted(delta):
    # (0, delta): all coins with probability delta, else nothing. Of 30 guesses all are right with
    # that probability.
    trials = 30
    law = (1 - delta) * stats.binom.pmf(np.arange(trials + 1), trials, 0.5)
    law[-1] += delta
    for refuted in (
        lambda v: audit.refutes(Line(0.0, delta), v, trials, trials),
        lambda v: audit.one_run_epsilon(v, trials, trials, delta=delta) > 0,
    ):
        assert share_refuted(refuted, law) <= 0.05
    assert audit.refutes(Line(0.0, 0.0), trials, trials, trials)


@pytest.mark.slow
def test_extreme_scores_of_gaussian_noise_stay_below_the_truth_and_are_no_toy():
    generator, mu, above, values = torch.Generator().manual_seed(0), 2.0, 0, []
    for _ in range(40):
        found = audit.audit(
            lambda included: mu * included + torch.randn(600, generator=generator),
            600,
            delta=1e-4,
            generator=generator,
        )["all"]
        above += found.mu > mu or found.epsilon > float(gaussian_epsilon(mu, 1e-4))
        values.append(found.mu)
    assert stats.binom.sf(above - 1, 40, 0.05) > 1e-4
    assert np.median(values) > 0.8 and found.gaussian_epsilon > found.epsilon > 1


def test_uninformative_scores_give_a_small_epsilon_and_perfect_ones_a_large_epsilon():
    included = audit.random_inclusion(1000, torch.Generator().manual_seed(0))
    noise = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    nothing, all_ = (
        audit.audit_scores(scores, included, delta=1e-5)["all"]
        for scores in (noise, included + noise)
    )
    assert nothing.epsilon < 0.2 and all_.epsilon > 4 and nothing.refuted is None


@pytest.mark.parametrize("members_first", [False, True])
def test_ties_give_no_evidence_wherever_members_are_listed(members_first):
    included = (torch.arange(1000) < 500) == members_first
    rightly = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.95
    for scores in (torch.zeros(1000), rightly.double(), -rightly.double()):
        found = audit.audit_scores(
            scores, included, delta=1e-5, claims={"all": audit.GaussianCurve(0.5)}
        )["all"]
        assert found.epsilon < 0.3 and not found.refuted


def test_the_better_of_two_attacks_counts():
    included = audit.random_inclusion(1000, torch.Generator().manual_seed(0))
    noise = torch.rand(2, 1000, generator=torch.Generator().manual_seed(1))
    found = audit.audit_scores(
        noise + torch.stack([0.0 * included, 1.0 * included]), included, delta=1e-5
    )["all"]
    assert found.epsilon > 3.5 and found.correct == found.guesses


@pytest.fixture
def fitted(monkeypatch):
    """What the audit of a training does for each draw of coins: trains, and scores by each
    attack.
    """
    # what the plan promises
    monkeypatch.setattr(audit.trained, "PlanCurve", lambda *arguments: None)
    monkeypatch.setattr(audit.trained, "audit", lambda fit, *arguments, **options: fit)
    return audit.audit_training


def test_attacking_all_canaries_together_separates_those_that_overlap(fitted):
    # 120 gradients in 130 dimensions, and next to no noise: by itself each drowns in the others.
    x = torch.randn(120, 130, generator=torch.Generator().manual_seed(0)).double()
    model = torch.nn.Linear(130, 1, bias=False).double()
    fit = fitted(
        model,
        lambda outputs, _: -outputs.squeeze(1),
        (x, torch.zeros(120)),
        plan(120, sample_rate=1.0, noise_multiplier=0.1, steps=3),
        method="func",
        seed=0,
        canaries=torch.arange(120),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    )
    included = audit.random_inclusion(120, torch.Generator().manual_seed(1))
    right = [int(((attack > attack.median()) == included).sum()) for attack in fit(included)]
    assert right[0] < right[1] and right[1] >= 110


def test_groups_have_bounds_of_their_own():
    included, groups = (
        audit.random_inclusion(2000, torch.Generator().manual_seed(0)),
        np.arange(2000) % 2,
    )
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    found = audit.audit_scores(
        included * torch.as_tensor(4.0 * groups) + noise,
        included,
        delta=1e-5,
        groups=groups.tolist(),
        claims={0: audit.GaussianCurve(0.1), 1: audit.GaussianCurve(0.1)},
    )
    assert list(found) == ["all", 0, 1] and found[0].canaries == found[1].canaries == 1000
    assert found[0].epsilon < 0.3 < 2 < found[1].epsilon and (
        found[0].refuted,
        found[1].refuted,
    ) == (False, True)


def plan(n, **changes):
    return DPSGDPlan(
        **{
            **dict(
                n=n, sample_rate=0.3, steps=15, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-5
            ),
            **changes,
        }
    )


def test_the_claim_of_a_plan_is_all_its_pairs_of_epsilon_and_delta():
    claimed = plan(100)
    curve = audit.PlanCurve(claimed)
    assert curve.inverse(0.0) == 0 and curve.inverse(1.0) > 0.1
    for epsilon in (0.5, 2.0):
        delta = compute_delta(sample_rate=0.3, noise_multiplier=2.0, steps=15, epsilon=epsilon)
        # No event may be likelier than P(out) e^epsilon + delta, and the curve nearly has them all.
        values = np.linspace(0.05, 0.95, 19)
        line = np.array([Line(epsilon, delta).inverse(v) for v in values])
        ours = np.array([curve.inverse(v) for v in values])
        assert (ours >= line - 1e-3).all()
    several = plan(4, sample_rate=[0.1, 0.1, 0.3, 0.3], max_grad_norm=[1.0, 1.0, 1.0, 1.0])
    assert audit.PlanCurve(several, torch.tensor([0, 1])).inverse(0.5) > audit.PlanCurve(
        several
    ).inverse(0.5)


def orthogonal(n, claimed=None, seed=0, **options):
    """An audit of a model in which each example's gradient, five times the clip norm, has a weight
    of its own.
    """
    model = torch.nn.Linear(n, 1, bias=False).double()
    data = torch.eye(n).double(), torch.zeros(n)
    return audit.audit_training(
        model,
        lambda outputs, _: -5 * outputs.squeeze(1),
        data,
        claimed or plan(n),
        method="func",
        seed=0,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        canaries=torch.arange(n),
        together=False,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )["all"]


def test_an_audit_that_goes_on_scores_the_coins_of_its_run(tmp_path):
    claimed = plan(50, noise_multiplier=0.3, sample_rate=1.0, steps=5)
    checkpoint = Checkpoint(tmp_path / "audit", every=2)

    def stop(run):
        if run.step == 3:
            raise KeyboardInterrupt

    whole = orthogonal(50, claimed)
    with pytest.raises(KeyboardInterrupt):
        orthogonal(50, claimed, checkpoint=checkpoint, callbacks=Callbacks(on_step=stop))
    refused("other coins", orthogonal, 50, claimed, seed=1, checkpoint=checkpoint)
    for _ in range(2):  # once more, when all is done
        again = orthogonal(50, claimed, checkpoint=checkpoint)
        assert (again.epsilon, again.correct) == (whole.epsilon, whole.correct)
    assert whole.epsilon > 1


def test_a_sound_trainer_is_not_refuted_and_something_is_found():
    found = orthogonal(1000)
    assert found.refuted is False and 0.3 < found.epsilon < plan(1000).epsilon(accountant="rdp")


@pytest.mark.parametrize("break_it", [add_no_noise, include_everyone, join_two_draws, clip_nothing])
def test_a_trainer_that_is_broken_is_refuted(break_it, monkeypatch):
    break_it(monkeypatch)
    assert orthogonal(1000, plan(1000, steps=30, noise_multiplier=1.5)).refuted


def test_a_trainer_with_half_the_noise_is_refuted_by_enough_canaries(monkeypatch):
    halve_the_noise(monkeypatch)
    assert orthogonal(2000).refuted


def test_a_canary_that_is_out_takes_no_part(fitted):
    canaries, included = torch.arange(0, 40, 2), torch.arange(20) % 2 == 0
    model = torch.nn.Linear(40, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    fit = fitted(
        model,
        lambda outputs, _: -outputs.squeeze(1),
        (torch.eye(40).double(), torch.zeros(40)),
        plan(40, noise_multiplier=0.0),
        canaries=canaries,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        seed=0,
    )
    scores = fit(included)[0]
    moved = model.weight.detach()[0] != 0
    assert (
        not moved[canaries[~included]].any()
        and moved[canaries[included]].all()
        and moved[1::2].all()
    )
    assert scores[included].min() > scores[~included].max()


def test_a_network_is_audited_by_group_on_crafted_canaries():
    torch.manual_seed(0)
    x, y = torch.rand(300, 20), torch.arange(300) % 3
    extra = audit.make_canaries(x, y, 200, generator=torch.Generator().manual_seed(1))
    data = torch.cat((x, extra[0])), torch.cat((y, extra[1]))
    norms = torch.where(torch.arange(500) % 2 == 0, 0.2, 1.0)
    model = models.linear(20, 3, seed=0)
    found = audit.audit_training(
        model,
        cross_entropy,
        data,
        plan(500, max_grad_norm=norms, noise_multiplier=0.5),
        canaries=range(300, 500),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        groups=(torch.arange(500) % 2),
        seed=0,
        generator=torch.Generator().manual_seed(2),
    )
    assert list(found) == ["all", 0, 1] and not any(one.refuted for one in found.values())
    assert found[1].mu > found[0].mu


def test_bad_input_is_refused():
    counts = dict(correct=1, guesses=2, canaries=10)
    refuses(audit.one_run_epsilon, dict(counts, delta=0), correct=[3], guesses=[11], delta=[1])
    refuses(audit.one_run_mu, counts, confidence=[1])
    scores = dict(scores=[1.0, 2.0], included=torch.tensor([True, False]), delta=0)
    labels = [[1], ["a", "all"], [1.0, math.nan]]
    refuses(
        audit.audit_scores, scores, scores=[[1.0, math.nan]], included=[[0.5, 1]], groups=labels
    )
    refuses(audit.random_inclusion, {}, canaries=[0])
    run = dict(model=None, loss=None, data=(torch.eye(5),) * 2, plan=plan(5), optimizer=None)
    refuses(
        audit.audit_training,
        run,
        canaries=[[1, 1], [0.5, 1.5], "a", [1e300], [math.nan], [True, False], {0, 1}, 5, []],
        groups=[5, "abcde", [1] * 4, [[1]] * 5, torch.zeros(5, 2), ["all"] * 5],
        plan=[None, 5],
        trackers=[[]],
        generator=[5],
        confidence=["a", 1],
        together=["a"],
    )
    refused(
        "canaries must be indices.* got 3: give a list", audit.audit_training, **run, canaries=3
    )
    refuses(
        audit.make_canaries,
        dict(x=torch.rand(5, 3), y=torch.arange(5), count=2),
        x=[None, "a", torch.rand(5, 3) * math.nan, torch.rand(0, 3), torch.rand(5, 0)],
        y=[None, torch.arange(3), torch.rand(5, 3), torch.arange(5.0) / 0],
        count=[0, 1e300, 10**12],
        size=["a", math.inf, math.nan, 0, -1],
        generator=[5],
    )
    for change, word in ((dict(noise_multiplier=0.0), "noise"), (dict(steps=0), "step")):
        refused(word, audit.PlanCurve, plan(5, **change))


def test_canaries_and_groups_may_be_arrays_and_lists():
    found = audit.make_canaries([[1.0], [2.0]], np.array([3, 4]), 5)
    assert found.x.shape == (5, 1) and set(found.y.tolist()) <= {3, 4}
    model = torch.nn.Linear(4, 1, bias=False)
    found = audit.audit_training(
        model,
        lambda outputs, _: outputs.squeeze(1),
        (torch.eye(4), torch.zeros(4)),
        plan(4),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        canaries=np.array([0.0, 3.0]),
        groups=np.array(["a", "b", "b", "c"]),
    )
    assert list(found) == ["all", "a", "c"]


def test_a_claim_that_cannot_be_held_against_anything_is_refused():
    included = audit.random_inclusion(300, torch.Generator().manual_seed(0))
    scores = included.double()
    assert audit.audit_scores(
        scores, included, delta=1e-5, claims={"all": audit.GaussianCurve(0.1)}
    )["all"].refuted
    for claims in ({"everyone": audit.GaussianCurve(0.1)}, {"all": 0.1}, {"all": None}):
        refused("claims", audit.audit_scores, scores, included, delta=1e-5, claims=claims)
    for mu in (math.nan, -1.0, math.inf):
        refused("mu", audit.GaussianCurve, mu)


def test_the_claim_of_a_plan_with_next_to_no_noise_is_made_without_loss_distributions():
    plan = DPSGDPlan(
        n=40, sample_rate=0.3, steps=15, max_grad_norm=1.0, noise_multiplier=1e-3, delta=1e-5
    )
    claim = audit.PlanCurve(plan)
    # Whoever is drawn at all shows: in vain is only what happens where somebody is never drawn.
    never = 0.7**15
    assert claim.inverse(0.5) == 0 and 0 < claim.inverse(1 - never / 2) <= 1
    assert never - 1e-5 <= claim.inverse(1 - 1e-6) <= never


@pytest.mark.slow
@pytest.mark.parametrize(
    "rate, noise, steps, epsilon",
    [
        *((0.01, 0.05, 1000, 3.0), (0.1, 0.2, 10_000, 3.0), (0.1, 0.07, 100, 3.0)),
        *((0.01, 1e4, 1000, 0.0), (0.5, 1e3, 10_000, 0.0)),
    ],
)
def test_the_claim_of_a_plan_is_no_less_than_its_account_and_hardly_more(
    rate, noise, steps, epsilon
):
    """Of runs that no grid resolves, and of much noise."""
    claim = audit.PlanCurve(
        DPSGDPlan(
            n=40,
            sample_rate=rate,
            steps=steps,
            max_grad_norm=1.0,
            noise_multiplier=noise,
            delta=1e-5,
        )
    )
    inside = 1 - np.logspace(-6, 0, 2001)
    claimed = max(v - math.exp(epsilon) * claim.inverse(v) for v in inside)
    truth = compute_delta(sample_rate=rate, noise_multiplier=noise, steps=steps, epsilon=epsilon)
    assert truth * (1 - 1e-3) <= claimed <= min(1.0, 1.1 * truth + 1e-6)


@pytest.mark.parametrize("groups", [[1, "a", 2, "b"], torch.zeros(4, 2)])
def test_labels_that_are_none_are_refused(groups):
    with pytest.raises(ValueError, match="groups"):
        audit.audit_scores(
            torch.arange(4.0), torch.tensor([True, False, True, False]), delta=1e-5, groups=groups
        )


class Text(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(61, 4, sparse=sparse), torch.nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.words(ids).mean(1))


@pytest.mark.parametrize("sparse", [False, True])
def test_texts_are_audited_with_crafted_canaries_of_their_own_words(sparse):
    generator = torch.Generator().manual_seed(0)
    ids, y = 2 * torch.randint(1, 31, (30, 5), generator=generator), torch.arange(30) % 2
    made = audit.make_canaries(ids, y, 10, generator=generator)
    assert made.x.dtype == ids.dtype and set(made.x.unique().tolist()) <= set(ids.unique().tolist())
    data = torch.cat([ids, made.x]), torch.cat([y, made.y])
    plan = DPSGDPlan(
        n=40, sample_rate=1.0, steps=4, max_grad_norm=1.0, noise_multiplier=1e-3, delta=1e-5
    )
    model = Text(sparse)
    found = audit.audit_training(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        canaries=torch.arange(30, 40),
        seed=0,
        generator=generator,
    )["all"]
    assert found.correct > found.guesses / 2 and not found.refuted
