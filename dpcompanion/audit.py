r"""Audits in one run: lower bounds on epsilon from a single training, for everybody and for each group.

Among the examples, m are canaries.  A fair coin for each decides whether it takes part.  The training runs once; an
auditor scores every canary, calls the r/2 with the largest scores in and the r/2 with the smallest out, and says
nothing of the rest (Steinke, Nasr and Jagielski 2023).  Of a private training few guesses can be right: the more are,
the larger epsilon must be.

**For any (epsilon, delta)** (their theorem 5.2 and appendix D).  With V right guesses among r,

.. math::
    P(V \ge v) \le \beta + 2 m \delta \max_{1 \le i \le v} \frac{P(v > W \ge v - i)}{i}, \quad
    W \sim \mathrm{Bin}\big(r, 1 / (1 + e^{-\varepsilon})\big), \quad \beta = P(W \ge v).

`one_run_epsilon` is the largest epsilon at which that probability is below 1 - confidence.  It needs no assumption, and
is far from tight: it allows for mechanisms that give away everything or nothing.

**For a whole trade-off curve** (Mahloujifar, Melis and Chaudhuri 2024).  Let every pair of neighbours satisfy
P(E | in) <= F(P(E | out)) and the reverse, with F increasing and concave.  Fix canary j and the other coins.  For each
answer of the auditor let E be the outputs that give j this answer and i - 1 right answers to the others, for any i of a
set T.  Averaged over answers and coins, Jensen's inequality gives

.. math::
    P(j \text{ right}, V \in T) \le F\big(P(j \text{ wrong}, V + 1 \in T)\big),

and averaged over j, with p_i = P(V = i) and T = {t, ..., r},

.. math::
    \frac1m \sum_{i \ge t} i\, p_i \le F\Big(\frac1m \sum_{i \ge t} (r - i + 1)\, p_{i - 1}\Big).

If P(V >= v) were as large as 1 - confidence, these inequalities would bound P(V >= t) from below for t = v - 1, v - 2,
... in turn; where a bound exceeds 1, F is refuted.  F may be that of a Gaussian with shift mu (`one_run_mu`), or
what a plan claims (`PlanCurve`), at all its pairs of epsilon and delta together.

A bound below a claim proves nothing.  One above it refutes the claim: the account, the code or an assumption is wrong.
**Which faults it finds** depends on the canaries.  With gradients at right angles and five times the clip norm, as the
tests have them, `audit_training` finds in one run:

=====================================  ==================
fault of the trainer                   found
=====================================  ==================
no noise                               with 500 canaries
everybody in each step                 with 500
two draws joined into one              with 500
no clipping                            with 500
half the noise                         with 2,000
a tenth less noise, a tenth more rate  no: too small
low bits that floats give away         no: not looked at
a seed that can be guessed             no: not looked at
batch sizes or losses that are told    no: not looked at
=====================================  ==================

>>> included = coins(1000, torch.Generator().manual_seed(0))
>>> noise = torch.randn(1000, generator=torch.Generator().manual_seed(1))
>>> found = judge(included + 0.5 * noise, included, delta=1e-5)["everybody"]     # a Gaussian with mu = 2
>>> found.guesses, found.correct, round(found.epsilon, 2), round(found.mu, 2)
(200, 197, 3.08, 1.11)
"""

import dataclasses
import itertools
import math

import numpy as np
import torch
from scipy import special, stats

from dpcompanion import _checks
from dpcompanion.accounting import gaussian_delta, gaussian_epsilon
from dpcompanion.training import clipping, train

# Shares of the canaries about which an auditor guesses; a confidence is spent on each.
_SHARES = (0.5, 0.2)


def coins(canaries, generator=None):
    """Who takes part: (canaries,) booleans, fair and independent.

    >>> coins(4, torch.Generator().manual_seed(0)).dtype
    torch.bool
    """
    return torch.rand(_checks.whole_number("canaries", canaries, 1), generator=generator, dtype=torch.float64) < 0.5


def _counts(correct, guesses, canaries):
    canaries = _checks.whole_number("canaries", canaries, 1)
    guesses = _checks.whole_number("guesses", guesses, 1, canaries)
    return _checks.whole_number("correct", correct, 0, guesses), guesses, canaries


def one_run_epsilon(correct, guesses, canaries, *, delta, confidence=0.95):
    """The largest epsilon, at least 0, that so many right guesses refute, whatever the mechanism.

    Args:
        correct, guesses, canaries: v <= r <= m. The number of guesses must not depend on the coins.
        delta: in [0, 1).
        confidence: that the true epsilon is not below the result.

    Returns a float. Source: Steinke, Nasr and Jagielski 2023, theorem 5.2.

    >>> round(one_run_epsilon(190, 200, 1000, delta=1e-5), 2)
    2.39
    """
    v, r, m = _counts(correct, guesses, canaries)
    _checks.number("delta", delta, 0, 1, closed="left")
    _checks.number("confidence", confidence, 0, 1, closed="neither")

    def probability(epsilon):
        right = 1 / (1 + math.exp(-epsilon))
        if not v:
            return 1.0
        window = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, right))
        return stats.binom.sf(v - 1, r, right) + 2 * m * delta * (window / np.arange(1, v + 1)).max()

    return _largest_refuted(lambda epsilon: probability(epsilon) < 1 - confidence)


def one_run_mu(correct, guesses, canaries, *, confidence=0.95):
    """The largest mu, at least 0, such that so many right guesses refute mu-GDP; arguments as for `one_run_epsilon`.

    By `dpcompanion.accounting.gaussian_epsilon` it becomes an epsilon, of mechanisms that are claimed to be Gaussian.

    >>> round(one_run_mu(190, 200, 1000), 2)
    0.91
    """
    return _largest_refuted(lambda mu: refutes(GaussianCurve(mu), correct, guesses, canaries, confidence=confidence))


def _largest_refuted(refuted, tolerance=1e-4):
    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
        if high > 64:
            return low
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class GaussianCurve:
    """The trade-off of N(0, 1) and N(mu, 1).

    >>> round(GaussianCurve(1.0).inverse(0.5), 4)
    0.1587
    """

    mu: float

    def inverse(self, inside):
        """The least P(E | out) that goes with this P(E | in)."""
        return float(special.ndtr(special.ndtri(inside) - self.mu))


class PlanCurve:
    """What a `DPSGDPlan` claims: all its pairs of epsilon and delta, by PLD, in both directions.

    Args:
        plan: with noise, and with a step at least; otherwise ValueError.
        among: indices of the examples that it is claimed of, where rates or clip norms differ; by default all. One
            curve holds for all of them, that of their largest rate and least noise over clip norm.

    Add or remove one example (or zero-out: the plan says), Poisson sampling.

    >>> from dpcompanion.training import DPSGDPlan
    >>> plan = DPSGDPlan(n=100, sample_rate=1.0, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    >>> 0 < GaussianCurve(1.0).inverse(0.5) - PlanCurve(plan).inverse(0.5) < 1e-3
    True
    """

    def __init__(self, plan, among=None):
        from dpcompanion.accounting import pld

        among = slice(None) if among is None else among
        rates, noise = (torch.as_tensor(value, dtype=torch.float64).expand(plan.n)[among]
                        for value in (plan.sample_rate, plan.effective_noise_multiplier))
        rate, noise = float(rates.max()), float(noise.min())
        if not noise:
            raise ValueError("plan must have noise, got noise_multiplier 0")
        if not plan.steps:
            raise ValueError("plan must have a step, got none")
        self.epsilons = np.concatenate([np.linspace(0, 3, 31), np.linspace(3.25, 12, 36)])
        if rate == 1:
            deltas = [gaussian_delta(math.sqrt(plan.steps) / noise, torch.as_tensor(self.epsilons)).numpy()]
        else:
            deltas = [self._deltas(pld.compose(sample_rate=rate, noise_multiplier=noise, steps=plan.steps, delta=1e-2,
                                               direction=direction, interval=1e-3)) for direction in ("remove", "add")]
        self.deltas = np.max(deltas, axis=0)

    def _deltas(self, composed):
        return [composed.delta(epsilon) for epsilon in self.epsilons.tolist()]

    def inverse(self, inside):
        """The least P(E | out) that goes with this P(E | in)."""
        grown = np.exp(self.epsilons)
        least = np.maximum((inside - self.deltas) / grown, 1 - self.deltas - grown * (1 - inside))
        return max(0.0, float(least.max()))


def refutes(curve, correct, guesses, canaries, *, confidence=0.95):
    """Whether so many right guesses refute a trade-off curve, with this confidence.

    Args:
        curve: with a function `inverse`, such as `GaussianCurve` and `PlanCurve`.
        correct, guesses, canaries, confidence: as for `one_run_epsilon`.

    >>> refutes(GaussianCurve(1.0), 199, 200, 1000), refutes(GaussianCurve(2.0), 199, 200, 1000)
    (True, False)
    """
    v, r, m = _counts(correct, guesses, canaries)
    at_least, beyond = 1 - _checks.number("confidence", confidence, 0, 1, closed="neither"), 0.0
    for t in range(v, 0, -1):
        # at_least: bound below on P(V >= t); beyond: on the sum of P(V >= s) over s > t.
        inside = (t * at_least + beyond) / m
        if inside > 1:
            return True
        beyond += at_least
        at_least = max(at_least, (m * curve.inverse(inside) + beyond) / (r - t + 1))
        if at_least > 1:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Finding:
    """What an audit finds about one group.

    Attributes:
        canaries, guesses, correct: the counts behind `epsilon`.
        epsilon: lower bound, whatever the mechanism (`one_run_epsilon`).
        mu: lower bound on the mu of a Gaussian mechanism (`one_run_mu`).
        gaussian_epsilon: epsilon of such a mechanism at the audit's delta.
        refuted: whether the claim is refuted; None without a claim.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    mu: float
    gaussian_epsilon: float
    refuted: bool | None


def judge(scores, included, *, delta, groups=None, claims=None, confidence=0.95):
    """Lower bounds on epsilon from scores of canaries, for everybody and for each group.

    An auditor guesses about the half with the most extreme scores, and about a fifth. The better counts.
    All bounds of the result hold together with the confidence.

    Args:
        scores: (m,) numbers, larger for canaries that seem to have taken part; made without the coins. Or (k, m): those
            of k attacks, of which the best counts.
        included: (m,) booleans, the coins.
        delta: of every epsilon.
        groups: (m,) labels, such as budgets or deciles. Canaries of other groups count as given.
        claims: {label: curve}, "everybody" for all; such as `PlanCurve`.
        confidence: in (0, 1).

    Returns:
        {label: `Finding`}, "everybody" first, then the groups in order.
    """
    scores = torch.as_tensor(scores, dtype=torch.float64)
    included = torch.as_tensor(included)
    if (scores.ndim not in (1, 2) or not len(scores) or included.shape != scores.shape[-1:]
            or included.dtype != torch.bool or bool(scores.isnan().any())):
        raise ValueError("scores and included must be (m,) numbers and booleans without NaN, got "
                         f"{tuple(scores.shape)} and {included.dtype} of shape {tuple(included.shape)}")
    scores = scores.reshape(-1, len(included))
    members = {"everybody": torch.arange(len(included))}
    if groups is not None:
        labels = groups.tolist() if isinstance(groups, torch.Tensor) else list(groups)
        _checks.same_length(included=included, groups=labels)
        members |= {label: torch.tensor([i for i, own in enumerate(labels) if own == label])
                    for label in sorted(set(labels))}
    tried = len(members) * len(_SHARES) * len(scores)
    each = 1 - (1 - _checks.number("confidence", confidence, 0, 1, closed="neither")) / tried
    found = {}
    for label, own in members.items():
        tries = []
        for share, attack in itertools.product(_SHARES, scores):
            order = own[attack[own].argsort()]
            half = max(1, math.floor(share * len(own) / 2))
            correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            tries.append((correct, 2 * half) if len(own) > 1 else (int(included[own].sum()), 1))
        bounds = [(one_run_epsilon(*pair, len(own), delta=delta, confidence=each), *pair) for pair in tries]
        epsilon, correct, guesses = max(bounds, key=lambda bound: bound[0])
        mu = max(one_run_mu(*pair, len(own), confidence=each) for pair in tries)
        claim = (claims or {}).get(label)
        found[label] = Finding(
            len(own), guesses, correct, epsilon, mu, _gaussian_epsilon(mu, delta),
            None if claim is None else any(refutes(claim, *pair, len(own), confidence=each) for pair in tries))
    return found


def _gaussian_epsilon(mu, delta):
    return 0.0 if not mu else float(gaussian_epsilon(mu, delta)) if delta else math.inf


def audit(fit, canaries, *, delta, groups=None, claims=None, confidence=0.95, generator=None):
    """Audit any training function in one run.

    Args:
        fit: (included (m,) booleans) -> (m,) scores: trains once, with these canaries and all else, and says of each
            how much it seems to have taken part (such as minus its loss). It must use the coins for the training alone.
        canaries: how many, m.
        generator: a torch.Generator for the coins.

    Other arguments, and the result, as for `judge`.

    >>> noise = torch.Generator().manual_seed(0)
    >>> def answers(included):                          # randomised response at epsilon 2
    ...     truthful = torch.rand(len(included), generator=noise) < 1 / (1 + math.exp(-2))
    ...     return torch.where(truthful, included, ~included).double()
    >>> found = audit(answers, 2000, delta=0, generator=torch.Generator().manual_seed(1))
    >>> 1.5 < found["everybody"].epsilon < 2
    True
    """
    included = coins(canaries, generator)
    return judge(fit(included), included, delta=delta, groups=groups, claims=claims, confidence=confidence)


def audit_training(model, loss, data, plan, *, optimizer, canaries=None, groups=None, together=True, confidence=0.95,
                   generator=None, **arguments):
    """Audit `dpcompanion.training.train` on a model, data and plan, by the sums that it gives out, in one run.

    A canary that is out has a clip norm of zero in every step, which is what the relation zero-out means.  The auditor
    knows all but coins, draws and noise.  At every step it works out the mean of the sum that comes, and adds to each
    canary's score the product of the canary's clipped gradient with what came beyond that mean.  In a second attack
    it solves for all coins together, by ridge regression on the same, which takes the canaries out of each other's way.

    Args:
        model, loss, data, plan, optimizer: as for `train`; the model is trained, with about half of the canaries.
        canaries: indices of the examples that are; by default 1,000 at random, or all. Examples in the data themselves,
            or rows that were put there for the audit (`crafted`).
        groups: (n,) labels of the examples, such as budgets or deciles of individual epsilon.
        together: make the second attack.
        confidence: that all bounds hold.
        generator: a torch.Generator for coins and canaries.
        arguments: for `train`, such as seed or method.

    Returns:
        {label: `Finding`}, with whether the plan's claim is refuted; memory: a gradient for each canary, and for
        the second attack the products of all pairs, for which a step takes canaries^2 x parameters multiplications.
    """
    n = plan.n
    if canaries is None:
        canaries = torch.randperm(n, generator=generator)[:1000]
    canaries = torch.as_tensor(canaries)
    if canaries.ndim != 1 or not len(canaries) or len(canaries.unique()) < len(canaries) \
            or not 0 <= int(canaries.min()) <= int(canaries.max()) < n:
        raise ValueError(f"canaries must be different indices below plan.n = {n}")
    if groups is not None:
        _checks.same_length(data=data[0], groups=groups)
        groups = [groups[i].item() if isinstance(groups, torch.Tensor) else groups[i] for i in canaries.tolist()]
    claims = {"everybody": PlanCurve(plan)}
    for label in set(groups or ()):
        own = canaries[torch.tensor([group == label for group in groups])]
        claims[label] = PlanCurve(plan, own) if plan.individual else claims["everybody"]

    def fit(included):
        observer = _Observer(canaries, included, together)
        train(model, loss, data, plan, optimizer=optimizer, trackers=[observer],
              **{"progress": False, **arguments})
        return observer.attacks()

    return audit(fit, len(canaries), delta=plan.delta, groups=groups, claims=claims, confidence=confidence,
                 generator=generator)


class _Observer:
    """A tracker that keeps canaries out of a run and scores all of them."""

    def __init__(self, canaries, included, together=True):
        self.canaries, self.included = canaries, included
        self.scores = torch.zeros(len(canaries), dtype=torch.float64)
        self.products = torch.zeros(len(canaries), len(canaries), dtype=torch.float64) if together else None

    def check_run(self, plan, model, loss, x, y):
        self.plan, self.model, self.loss, self.x, self.y = plan, model, loss, x, y
        self.limits = torch.full((plan.n,), math.inf, dtype=torch.float64)
        self.limits[self.canaries[~self.included]] = 0
        self.rates = torch.as_tensor(plan.sample_rate, dtype=torch.float64).expand(plan.n)
        self.others = torch.ones(plan.n, dtype=torch.bool)
        self.others[self.canaries] = False
        self.method = clipping.resolve_method(model, loss, x, y) if self.others.any() else "func"

    def before_step(self):
        with torch.random.fork_rng(devices=[]):
            gradients, _ = clipping.per_example_gradients(self.model, self.loss, self.x[self.canaries],
                                                          self.y[self.canaries])
        rows = torch.cat([g.flatten(1).double().cpu() for g in gradients.values()], 1)
        norms = rows.norm(dim=1)
        finite = norms.isfinite()
        rows[~finite] = 0
        limits = self.plan.clip_norms(self.canaries)
        self.rows = rows * torch.where(finite & (norms > 0), limits / norms, 0).clamp(max=1)[:, None]
        mean = 0.5 * self.rates[self.canaries] @ self.rows
        for rate in self.rates[self.others].unique():
            some = (self.others & (self.rates == rate)).nonzero().squeeze(1)
            total = clipping.clipped_sum(self.model, self.loss, self.x[some], self.y[some],
                                         self.plan.clip_norms(some).to(self.x.device), method=self.method)
            mean += rate * torch.cat([g.flatten() for g in total.gradients.values()]).double().cpu()
        self.mean = mean
        return self.limits

    def after_step(self, indices, norms, clipped=None):
        sent = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad]).double().cpu()
        expected = self.rates[self.canaries][:, None] * self.rows
        self.scores += expected @ (sent * self.plan.expected_batch_size - self.mean)
        if self.products is not None:
            self.products += expected @ expected.T

    def attacks(self):
        """Scores (1 or 2, m): each canary by itself, and all together.

        A coin minus 1/2 has variance 1/4, so the best ridge is 4 times the variance of the noise; a tenth of that takes
        interference out more thoroughly, which tells more where there is less noise than there should be.
        """
        if self.products is None:
            return self.scores[None]
        ridge = 0.4 * self.plan.noise_std**2 + 1e-12 * float(self.products.trace())
        together = self.products + ridge * torch.eye(len(self.products), dtype=torch.float64)
        return torch.stack([self.scores, torch.linalg.solve(together, self.scores)])

    def state_dict(self):
        return {"scores": self.scores, "products": self.products, "included": self.included}

    def load_state_dict(self, state):
        self.scores, self.products, self.included = state["scores"], state["products"], state["included"]


def crafted(x, y, count, *, size=10.0, generator=None):
    """`count` canaries for classification data: inputs that point at random, long, with random labels of those in y.

    Their gradients are large and nearly at right angles to all others, which is what shows best.

    Args:
        x, y: inputs (n, ...) of a floating type, labels (n,).
        size: their length, in mean lengths of the rows of x.

    Returns (inputs (count, ...), labels (count,)).

    >>> crafted(torch.rand(5, 3), torch.arange(5), 2)[0].shape
    torch.Size([2, 3])
    """
    count = _checks.whole_number("count", count, 1)
    directions = torch.randn(count, *x.shape[1:], generator=generator, dtype=torch.float64).flatten(1)
    length = size * x.double().flatten(1).norm(dim=1).mean()
    rows = directions / directions.norm(dim=1, keepdim=True) * length
    labels = y.unique()
    return (rows.view(count, *x.shape[1:]).to(x.dtype),
            labels[torch.randint(len(labels), (count,), generator=generator)])
