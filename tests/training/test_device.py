"""No step waits for a device: on the meta device, where no number can be read, none is asked for,
and no copy to it waits.
"""

import math

import pytest
import torch
from torch import nn
from waits import Waits

from dpcompanion import _checks
from dpcompanion._devices import DeferredErrors, to_device
from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.gradients import layers, passes, states, sums
from dpcompanion.individual import IndividualAccountant
from dpcompanion.output_perturbation import noise_covariance
from dpcompanion.training import (
    DPSGDPlan,
    NormTracker,
    Performance,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    loop,
    models,
    runs,
    train,
)

from ..refusals import refused


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.linear = (
            nn.Embedding(7, 5, padding_idx=0),
            nn.LayerNorm(5),
            nn.Linear(5, 10),
        )

    def forward(self, x):
        return self.linear(self.norm(self.embedding(x))).mean(1)


def images(*shape):
    return torch.zeros(4, *shape, device="meta")


MODELS = {
    "linear": (lambda: nn.Linear(4, 10), lambda: images(4)),
    "mnist cnn": (models.mnist_cnn, lambda: images(1, 28, 28)),
    "cifar cnn": (models.cifar_cnn, lambda: images(3, 32, 32)),
    "resnet20": (models.resnet20, lambda: images(3, 32, 32)),
    "wrn16_4": (models.wrn16_4, lambda: images(3, 32, 32)),
    "tokens": (Tokens, lambda: torch.zeros(4, 6, dtype=torch.int64, device="meta")),
}


def test_the_count_counts():
    with Waits() as waits, pytest.raises(RuntimeError):
        torch.ones((), device="meta").item()
    assert waits.seen["_local_scalar_dense"] == 1
    with Waits() as waits, pytest.raises(NotImplementedError):
        torch.ones((), device="meta").cpu()
    assert sum(waits.seen.values()) == 1


@pytest.mark.parametrize("method", ["mixed", "ghost"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("resnet20", "wrn16_4") else ())
        for name in MODELS
    ],
)
def test_clipping_and_norms_read_nothing_back(name, method):
    make, inputs = MODELS[name]
    model, x, y = make().to("meta"), inputs(), torch.zeros(4, dtype=torch.int64, device="meta")
    for limit in (1.0, torch.ones(4)):
        with Waits() as waits:
            found = clipped_sum(model, cross_entropy, x, y, limit, method=method, microbatch_size=3)
        assert not waits.seen
        assert {name: g.shape for name, g in found.gradients.items()} == {
            name: p.shape for name, p in model.named_parameters()
        }
        assert all(
            g.device.type == "meta" for g in (*found.gradients.values(), found.norms, found.losses)
        )
    with Waits() as waits:
        gradient_norms(model, cross_entropy, x, y, method=method)
    assert not waits.seen


def test_norms_of_embeddings_are_the_same_by_pairs_of_positions():
    torch.manual_seed(0)
    module, tokens, g = (
        nn.Embedding(5, 3, padding_idx=1),
        torch.randint(5, (6, 9)),
        torch.randn(6, 9, 3),
    )
    layer = layers.GhostEmbedding(module, [(tokens, g)])
    torch.testing.assert_close(layer._by_pairs_of_positions(), layer._by_tokens())


X, Y = torch.zeros(64, 1, 28, 28), torch.arange(64) % 10
PLAN = DPSGDPlan(
    n=64, sample_rate=0.25, steps=8, max_grad_norm=0.4, noise_multiplier=1.0, delta=1e-3
)


def begun(optimizer=torch.optim.SGD, model=None, **options):
    """The loop of a run that was proved on the processor, and is on the meta device from its first
    step on.
    """
    model = models.mnist_cnn(seed=0) if model is None else model
    found = loop.TrainingLoop(
        model,
        cross_entropy,
        (X, Y),
        PLAN,
        optimizer(model.parameters(), lr=0.1, **options),
        seed=0,
        performance=Performance(microbatch_size=512),
    )
    model.to("meta")
    found.run.optimizer = optimizer(model.parameters(), lr=0.1, **options)
    found.parameters, found.device = dict(model.named_parameters()), torch.device("meta")
    found.examples = found.examples.to(torch.device("meta"))
    for owner, names in ((found, ("dropped",)), (found.run.history, ("losses", "batch_sizes"))):
        for name in names:
            setattr(owner, name, getattr(owner, name).to("meta"))
    found.state = states.state_of(model)
    return found


@pytest.mark.parametrize(
    "optimizer, options",
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"foreach": True})],
)
def test_a_step_of_a_run_reads_nothing_back(optimizer, options):
    found = begun(optimizer, **options)
    with Waits() as waits:
        for _ in range(PLAN.steps):
            found.step()
    assert not waits.seen and found.run.step == PLAN.steps


TRACKERS = {
    "observed": {},
    "individual clipping": {"clipping": "individual"},
    "running": {"running": True, "updates_per_epoch": 0},
    "running and clipping": {"running": True, "clipping": "individual"},
    "some examples": {"running": True, "examples": list(range(0, 64, 3))},
    "without rounding": {"rounding": None, "accountant": "rdp", "clipping": "individual"},
    "kept norms": {"keep_norms": True},
    "data of its own": {"data": (X, Y)},
    "exact filter": {"clipping": "individual", "budget": "exact"},
    "Rényi filter": {"clipping": "individual", "budget": "renyi"},
}


def there(filter):
    """A filter that was made on the processor, from now on on the meta device."""
    filter.device = filter._deferred.device = torch.device("meta")
    for name, value in vars(filter).items():
        if isinstance(value, torch.Tensor):
            setattr(filter, name, value.to("meta"))
    return filter


def filter_of(kind, n=64, exact=ExactFilter, renyi=RenyiFilter):
    own = {
        "sample_rate": PLAN.sample_rate,
        "noise_multiplier": PLAN.noise_multiplier,
        "max_grad_norm": 0.4,
    }
    if kind == "renyi":
        return renyi(n, **own, orders=[2.0, 8.0], budgets=[1.0, 5.0])
    return exact(
        n, **own, levels=[0.25, 0.5, 1.0], costs=[1, 4, 16], budget=40, steps=PLAN.steps, block=2
    )


@pytest.mark.parametrize("name", TRACKERS)
def test_a_step_with_a_tracker_reads_nothing_back(name):
    # Layers are tried above: here one is enough.
    options, found = (
        dict(TRACKERS[name]),
        begun(model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10))),
    )
    own = options.pop("data", (found.examples.x, found.examples.y))
    if "budget" in options:
        options["budget"] = there(filter_of(options["budget"]))
    if "examples" in options:
        own = tuple(part[options["examples"]] for part in own)
    tracker = NormTracker.for_plan(
        PLAN,
        found.run.model,
        cross_entropy,
        own,
        device="meta",
        performance=Performance(method="mixed"),
        **{"updates_per_epoch": 2, **options},
    )
    tracker.measuring._proved, found.trackers = passes.state_of(found.run.model), (tracker,)
    with Waits() as waits:
        for _ in range(PLAN.steps):
            found.step()
    assert not waits.seen and tracker.steps == PLAN.steps
    assert tracker.passes == (4 if tracker.updates_per_epoch else 0)


@pytest.mark.parametrize(
    "options", [{}, {"accountant": "rdp"}, {"accountant": "rdp", "rounding": None}]
)
def test_a_record_reads_nothing_back(options):
    account = IndividualAccountant(
        64, sample_rate=0.25, noise_multiplier=1.0, max_grad_norm=1.0, device="meta", **options
    )
    norms, some = torch.zeros(64, device="meta"), torch.zeros(5, dtype=torch.int64, device="meta")
    with Waits() as waits:
        account.record(norms)
        account.record(norms[:5], steps=some, examples=some)
        account.record(norms[:5], examples=[0, 3, 4, 7, 9])
        account.record(torch.zeros(64), steps=torch.arange(64))
    assert not waits.seen


def test_a_step_of_runs_side_by_side_reads_nothing_back():
    found = runs.Ensemble(
        models.mnist_cnn(seed=0),
        cross_entropy,
        (X, Y),
        PLAN,
        seeds=[0, 1],
        learning_rate=0.1,
        momentum=0.5,
        members=torch.arange(64) % 3 > torch.tensor([[0], [1]]),
        performance=Performance(),
    )
    found.device = torch.device("meta")
    found._template.to("meta")
    for name, value in vars(found).items():
        if isinstance(value, torch.Tensor) and name not in ("members", "batch_sizes", "_ends"):
            setattr(found, name, value.to("meta"))
    network = found._workplace()
    with Waits() as waits:
        for _ in range(3):
            found._sum_clipped(range(2), network)
            found._add_noise(range(2), network)
            found._update()
    assert not waits.seen


def test_a_covariance_lies_where_the_weights_do(monkeypatch):
    monkeypatch.setattr(_checks, "in_interval", lambda name, value, *limits, **how: value)
    covariance, _ = noise_covariance(
        torch.zeros(1, 3, 2, dtype=torch.float64, device="meta"), shrinkage=0.5
    )
    assert covariance.device.type == "meta"


def test_limits_go_to_the_device_from_pinned_memory_in_the_type_of_the_norms(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sums,
        "to_device",
        lambda tensor, device: seen.append((tensor, device)) or to_device(tensor, device),
    )
    limits = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert sums.clip_factors(torch.ones(2, device="meta"), limits).device.type == "meta"
    ((tensor, device),) = seen
    assert (
        device.type == "meta"
        and torch.equal(tensor, limits.float())
        and tensor.dtype == torch.float32
    )


class NotedUnseen(DeferredErrors):
    def away(self, tensor):
        return True


class Unseen:
    """What takes numbers as it does on a device, without a look at them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._deferred = NotedUnseen(self.device)


class Away(Unseen, IndividualAccountant):
    pass


class AwayExact(Unseen, ExactFilter):
    pass


class AwayRenyi(Unseen, RenyiFilter):
    pass


@pytest.mark.parametrize(
    "norms, steps, examples",
    [
        ([0.1, -1.0], 1, [0, 1]),
        ([0.1, math.nan], 1, [0, 1]),
        ([0.1, math.inf], 1, [0, 1]),
        ([0.1, 0.1], [1, -1], [0, 1]),
        ([0.1, 0.1], 1, [0, 3]),
        ([0.1, 0.1], 1, [0, -1]),
    ],
)
def test_what_is_not_looked_at_is_refused_when_the_account_is_read_and_charged_in_full(
    norms, steps, examples
):
    account = Away(3, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=0.5)
    norms = torch.tensor(norms, dtype=torch.float64)
    steps = torch.tensor(steps) if isinstance(steps, list) else steps
    account.record(norms, steps=steps, examples=torch.tensor(examples))
    for read in (lambda: account.epsilon(1e-5), account.state_dict, lambda: account.merge(account)):
        refused("norms", read)
    if not all(0 <= norm < math.inf for norm in norms.tolist()):
        assert account._counts[1, -1] == 1


def test_what_is_not_looked_at_is_accounted_for_the_same():
    one, other = (
        kind(3, sample_rate=0.1, noise_multiplier=1.0, max_grad_norm=0.5)
        for kind in (IndividualAccountant, Away)
    )
    for account in (one, other):
        account.record(torch.tensor([0.1, 0.2, 0.7]), steps=torch.tensor([3, 5, 7]))
        account.record(torch.tensor([0.1]), examples=torch.tensor([2]))
    assert (
        torch.equal(one.epsilon(1e-5, unequal_steps=True), other.epsilon(1e-5, unequal_steps=True))
        and one.steps == other.steps == 8
    )


KINDS = ("exact", "renyi")


def filter_away(kind, n):
    """A filter that takes norms as one on a device does, without a look at them."""
    return filter_of(kind, n, exact=AwayExact, renyi=AwayRenyi)


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_that_does_not_look_at_norms_answers_the_same(kind):
    one, other = filter_of(kind, 50), filter_away(kind, 50)
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        norms = torch.rand(50, dtype=torch.float64, generator=draws) * 0.4
        assert torch.equal(one.clip_norms(norms), other.clip_norms(norms))
        assert torch.equal(one.spent, other.spent) and torch.equal(one.active, other.active)
    assert not one.active.all() and torch.equal(one.epsilon(1e-3), other.epsilon(1e-3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [-0.1, math.nan])
def test_a_norm_that_a_filter_did_not_look_at_breaks_no_promise_and_is_refused_when_it_is_read(
    kind, norm
):
    filter = filter_away(kind, 2)
    limits = filter.clip_norms(torch.tensor([norm, 0.05]))
    if kind == "exact":  # it asks for the most, which is paid for
        assert limits.tolist() == [0.4, 0.1] and filter.spent.tolist() == [16, 1]
    else:
        assert limits[0] == 0 < limits[1] and filter.active.tolist() == [False, True]
    for read in (lambda: filter.epsilon(1e-3), filter.state_dict):
        refused("norms", read)


def test_who_would_be_clipped_to_more_than_the_clip_norm_leaves_a_renyi_filter_that_did_not_look():
    filter = filter_away("renyi", 2)
    assert filter.admit(torch.tensor([0.5, 0.4])).tolist() == [False, True]
    refused("norms", filter.epsilon, 1e-3)


class Leaving(NormTracker):
    """Every third example takes no part."""

    def before_step(self):
        limits = super().before_step() * (torch.arange(64) % 3 > 0)
        self._begun = limits
        return limits


def test_who_takes_no_part_counts_nothing_whether_it_is_left_out_or_multiplied_by_0(monkeypatch):
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for away in (False, True):
        monkeypatch.setattr(loop, "on_accelerator", lambda tensor, away=away: away)
        if away:  # where limits are not looked at
            monkeypatch.setattr(_checks, "in_interval", lambda name, value, *limits, **how: value)
        model = models.linear(8, 10, seed=0).double()
        tracker = Leaving.for_plan(PLAN, model, cross_entropy, (x, Y), clipping="individual")
        history = train(
            model,
            cross_entropy,
            (x, Y),
            PLAN,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            seed=0,
            trackers=[tracker],
            progress=False,
        )
        ends.append(
            (model.weight.detach(), history.losses, history.batch_sizes, tracker.epsilon(1e-3))
        )
    for one, other in zip(*ends):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert 0 < ends[0][2].sum() < 100
