"""The audit of a `training.train` run: coins decide who takes part, its sums give them away."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dpcompanion import _checks
from dpcompanion._types import Array, Loss
from dpcompanion.audit.bounds import Finding, PlanCurve, audit, members_of
from dpcompanion.gradients import clipping, sums
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.training import train

_MOST = 10**6  # canaries to make


def audit_training(
    model: torch.nn.Module,
    loss: Loss,
    data: Sequence[torch.Tensor],
    plan: "DPSGDPlan",
    *,
    optimizer: torch.optim.Optimizer,
    canaries: Array | None = None,
    groups: Array | None = None,
    together: bool = True,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
    **arguments: Any,
) -> dict[Any, Finding]:
    """Audit `dpcompanion.training.train` on a model, data and plan, by the sums that it gives out,
    in one run.

    A canary that is out has a clip norm of zero in every step, which is what the relation zero-out
    means. The auditor knows all but coins, draws and noise. At every step it works out the mean of
    the sum that comes, and adds to each canary's score the product of the canary's clipped gradient
    with what came beyond that mean. In a second attack it solves for all coins together, by ridge
    regression on the same, which takes the canaries out of each other's way.

    Many arguments, since a run, its canaries and the bounds have options of their own.

    Args:
        model: a module that treats examples one by one; it is trained, with about half of the
            canaries.
        loss: (outputs, targets) -> (n,), such as `cross_entropy`.
        data: (x, y), tensors of plan.n examples each; no data set with items, which `train` takes.
        plan: a `DPSGDPlan`, whose claim is tested.
        optimizer: any torch.optim optimizer of all the model's trainable parameters that needs no
            closure.
        canaries: indices of the examples that are; by default 1,000 at random, or all. Examples in
            the data themselves, or rows that were put there for the audit (`make_canaries`).
        groups: (n,) labels of the examples, such as budgets or deciles of individual epsilon.
        together: make the second attack.
        confidence: that all bounds hold, in (0, 1).
        generator: a torch.Generator for coins and canaries; with a checkpoint, a call that goes on
            needs one with the same seed.
        arguments: what else `train` takes by name: seed, device, method, precision,
            microbatch_size, callbacks, checkpoint, generator_device, progress; and filter, beside
            which the plan's claim is tested and not the filter's promise. No people, as rows are
            the examples of an audit.

    Returns:
        {label: `Finding`}, with whether the plan's claim is refuted; memory: a gradient for each
        canary, and for the second attack the products of all pairs, for which a step takes
        canaries^2 x parameters multiplications.

    Raises:
        ValueError: canaries that are not different indices of examples, data that are no two
            tensors, groups of another length or with a label that is none, a plan without noise or
            without a step, a confidence outside (0, 1), a checkpoint of other canaries or coins,
            or what `train` refuses.

    Examples whose gradients are five times the clip norm, each in a weight of its own:

    >>> plan = DPSGDPlan(
    ...     n=200, sample_rate=1.0, steps=5, max_grad_norm=1.0, noise_multiplier=2.0, delta=1e-5
    ... )
    >>> model = torch.nn.Linear(200, 1, bias=False)
    >>> found = audit_training(
    ...     model,
    ...     lambda outputs, _: -5 * outputs[:, 0],
    ...     (torch.eye(200), torch.zeros(200)),
    ...     plan,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     together=False,
    ...     seed=0,
    ...     generator=torch.Generator().manual_seed(0),
    ... )["all"]
    >>> 0 < found.epsilon < plan.epsilon(), found.refuted
    (True, False)
    """
    if not isinstance(plan, DPSGDPlan):
        raise ValueError(f"plan must be a DPSGDPlan, got {plan!r:.80}")
    confidence = _checks.number("confidence", confidence, 0, 1, closed="neither")
    _checks.one_of("together", together, (True, False))
    _check_generator(generator)
    if canaries is None:
        canaries = torch.randperm(plan.n, generator=generator)[:1000]
    canaries = _indices(canaries, plan.n)
    if any(arguments.get(name) is not None for name in ("people", "at_most")):
        raise ValueError(
            "people and at_most must be left out: an audit is of examples, each of one row"
        )
    if not isinstance(data, (tuple, list)):
        raise ValueError(
            "data must be two tensors (x, y), so that an audit sees them, got "
            f"{type(data).__name__}"
        )
    if "trackers" in arguments:
        raise ValueError(
            f"trackers must be left out, for the audit is one, got {arguments['trackers']!r:.80}"
        )
    groups = _labels(groups, canaries, plan.n)
    claims = {"all": PlanCurve(plan)}
    for label, places in members_of(canaries, groups).items():
        own = canaries[places]
        claims[label] = PlanCurve(plan, own) if plan.individual else claims["all"]

    def fit(included):
        observer = _Observer(canaries, included, together)
        train(
            model,
            loss,
            data,
            plan,
            optimizer=optimizer,
            trackers=[observer],
            **{"progress": False, **arguments},
        )
        return observer.attacks()

    return audit(
        fit,
        len(canaries),
        delta=plan.delta,
        groups=groups,
        claims=claims,
        confidence=confidence,
        generator=generator,
    )


def _indices(canaries, n):
    """Canaries as different indices below n."""
    given = _checks.tensor("canaries", canaries)
    if given.ndim == 0:
        raise ValueError(
            f"canaries must be indices of examples, not their number, got {given.item()!r}: give a "
            "list of different ones, such as torch.randperm(plan.n)[:10]"
        )
    if not given.is_floating_point() and given.dtype != torch.bool:
        given = given.long()  # of which PyTorch compares all
    _checks.in_interval("canaries", given, 0, n - 1)
    found = given.long()
    if (
        given.ndim != 1
        or given.dtype == torch.bool
        or not len(found)
        or bool((given != found).any())
        or len(found.unique()) < len(found)
    ):
        raise ValueError(
            f"canaries must be different indices below plan.n = {n}, got {given.tolist()!r:.80}"
        )
    return found


def _labels(groups, canaries, n):
    """The label of each canary; None without groups."""
    if groups is None:
        return None
    labels = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != n:
        raise ValueError(
            f"groups must be a list of plan.n = {n} labels, one for each example, got "
            f"{groups!r:.80}"
        )
    return [labels[i] for i in canaries.tolist()]


def _check_generator(generator):
    if generator is not None:
        _checks.generator("generator", generator)


class _Observer:
    """A tracker that keeps canaries out of a run and scores all of them."""

    def __init__(self, canaries, included, together=True):
        self.canaries, self.included = canaries, included
        self.scores = torch.zeros(len(canaries), dtype=torch.float64)
        self.products = (
            torch.zeros(len(canaries), len(canaries), dtype=torch.float64) if together else None
        )

    def check_run(self, plan, model, loss, data):
        self.plan, self.model, self.loss = plan, model, loss
        self.x, self.y = data
        self.limits = torch.full((plan.n,), math.inf, dtype=torch.float64)
        self.limits[self.canaries[~self.included]] = 0
        self.rates = torch.as_tensor(plan.sample_rate, dtype=torch.float64).expand(plan.n)
        self.others = torch.ones(plan.n, dtype=torch.bool)
        self.others[self.canaries] = False
        self.method = (
            clipping.resolve_method(model, loss, self.x, self.y) if self.others.any() else "func"
        )

    def before_step(self):
        with torch.random.fork_rng(devices=[]):
            gradients, _ = sums.per_example_gradients(
                self.model, self.loss, self.x[self.canaries], self.y[self.canaries]
            )
        rows = torch.cat([g.flatten(1).double().cpu() for g in gradients.values()], 1)
        norms = rows.norm(dim=1)
        finite = norms.isfinite()
        rows[~finite] = 0
        limits = self.plan.clip_norms(self.canaries)
        self.rows = (
            rows * torch.where(finite & (norms > 0), limits / norms, 0).clamp(max=1)[:, None]
        )
        mean = 0.5 * self.rates[self.canaries] @ self.rows
        for rate in self.rates[self.others].unique():
            some = (self.others & (self.rates == rate)).nonzero().squeeze(1)
            total = clipping.clipped_sum(
                self.model,
                self.loss,
                self.x[some],
                self.y[some],
                self.plan.clip_norms(some).to(self.x.device),
                method=self.method,
            )
            mean += rate * torch.cat([g.flatten() for g in total.gradients.values()]).double().cpu()
        self.mean = mean
        return self.limits

    def after_step(self, indices, norms, clipped=None):
        sent = (
            torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad])
            .double()
            .cpu()
        )
        expected = self.rates[self.canaries][:, None] * self.rows
        self.scores += expected @ (sent * self.plan.expected_batch_size - self.mean)
        if self.products is not None:
            self.products += expected @ expected.T

    def attacks(self):
        """Scores (1 or 2, m): each canary by itself, and all together.

        A coin minus 1/2 has variance 1/4, so the best ridge is 4 times the variance of the noise; a
        tenth of that takes interference out more thoroughly, which tells more where there is less
        noise than there should be.
        """
        if self.products is None:
            return self.scores[None]
        ridge = 0.4 * self.plan.noise_std**2 + 1e-12 * float(self.products.trace())
        together = self.products + ridge * torch.eye(len(self.products), dtype=torch.float64)
        return torch.stack([self.scores, torch.linalg.solve(together, self.scores)])

    def state_dict(self):
        return {
            "scores": self.scores,
            "products": self.products,
            "canaries": self.canaries,
            "included": self.included,
        }

    def load_state_dict(self, state):
        for name, own in (("canaries", self.canaries), ("included", self.included)):
            if not torch.equal(_checks.tensor_entry(state, name), own.cpu()):
                raise ValueError(
                    "checkpoint must be of an audit with the same canaries and coins, got other "
                    f"{'coins' if name == 'included' else name}: a generator with the same seed "
                    "draws the same"
                )
        self.scores, self.products = state["scores"], state["products"]


class Canaries(NamedTuple):
    """Canaries that were made: inputs (count, ...) and labels (count,)."""

    x: torch.Tensor
    y: torch.Tensor


def make_canaries(
    x: torch.Tensor,
    y: torch.Tensor,
    count: int,
    *,
    size: float = 10.0,
    generator: torch.Generator | None = None,
) -> Canaries:
    """`count` canaries for classification data: inputs that point at random, long, with random
    labels of those in y.

    Their gradients are large and nearly at right angles to all others, which is what shows best. Of
    inputs that are whole numbers, such as the tokens of a text, they are numbers at random of those
    in x.

    Args:
        x, y: inputs (n, ...) of a floating type or whole numbers, labels (n,).
        count: how many, from 1 to 10^6.
        size: their length, in mean lengths of the rows of x, above 0; of whole numbers nothing is
            longer.
        generator: a torch.Generator for directions and labels; PyTorch's own by default.

    Returns `Canaries`: (inputs (count, ...), labels (count,)).

    Raises:
        ValueError: an argument outside its range, or x and y that are not as many numbers, one or
            more, all finite.

    >>> make_canaries(torch.rand(5, 3), torch.arange(5), 2).x.shape
    torch.Size([2, 3])
    """
    count = _checks.whole_number("count", count, 1, _MOST)
    size = _checks.number("size", size, 0, math.inf, closed="neither")
    _check_generator(generator)
    x, y = (
        _checks.in_interval(name, _checks.tensor(name, value), closed="neither")
        for name, value in (("x", x), ("y", y))
    )
    if not x.ndim or not x.numel() or y.shape != x.shape[:1]:
        raise ValueError(
            "x and y must be inputs (n, ...) and labels (n,), with a number at least, got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    if not x.is_floating_point():
        seen, distinct = x.unique(), y.unique()
        return Canaries(
            seen[torch.randint(len(seen), (count, *x.shape[1:]), generator=generator)],
            distinct[torch.randint(len(distinct), (count,), generator=generator)],
        )
    directions = torch.randn(count, *x.shape[1:], generator=generator, dtype=torch.float64).reshape(
        count, -1
    )
    length = size * x.double().reshape(len(x), -1).norm(dim=1).mean()
    rows = directions / directions.norm(dim=1, keepdim=True) * length
    labels = y.unique()
    return Canaries(
        rows.view(count, *x.shape[1:]).to(x.dtype),
        labels[torch.randint(len(labels), (count,), generator=generator)],
    )
