"""The kit for filters, accountants and trackers of one's own: the library's pass it, broken ones
are named.
"""

import pytest
import torch

from dpcompanion.filters import ExactFilter, RenyiFilter
from dpcompanion.individual import IndividualAccountant
from dpcompanion.testing import (
    Accountant,
    Filter,
    Tracker,
    check_accountant,
    check_filter,
    check_tracker,
)
from dpcompanion.training import DPSGDPlan, NormTracker, cross_entropy, train

RUN = dict(sample_rate=0.1, noise_multiplier=2.0, max_grad_norm=0.5)
TARGET = dict(target_epsilons=0.8, target_delta=1e-5)


def renyi(kind=RenyiFilter):
    return kind.for_epsilon(3, **RUN, **TARGET)


@pytest.mark.slow
def test_the_filters_keep_the_protocol():
    exact = ExactFilter(
        3, **RUN, levels=[0.25, 0.5, 1.0], costs=[1, 4, 16], budget=[160, 80, 320], steps=60
    )
    for filter in (renyi(), exact):
        assert isinstance(filter, Filter)
        check_filter(filter)
    assert not exact.spent.any()  # it is left as it was


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="pld", marks=pytest.mark.slow),
        pytest.param({"rounding": None}, id="exact", marks=pytest.mark.slow),
        pytest.param({"accountant": "rdp"}, id="rdp", marks=pytest.mark.slow),
    ],
)
def test_the_accountants_keep_the_protocol(options):
    accountant = IndividualAccountant(3, **RUN, **options)
    assert isinstance(accountant, Accountant)
    check_accountant(accountant, steps=12)


def test_the_tracker_keeps_the_protocol_and_one_with_a_filter_too():
    plan = DPSGDPlan(n=3, steps=20, delta=1e-2, **RUN)
    model, data = torch.nn.Linear(2, 2), (torch.randn(3, 2), torch.arange(3) % 2)
    for budget in (None, renyi()):
        tracker = NormTracker.for_plan(
            plan, model, cross_entropy, data, clipping="individual", budget=budget
        )
        assert isinstance(tracker, Tracker)
        check_tracker(tracker, plan, model, cross_entropy, data)


class Stingy:
    """A filter of one's own that inherits from nothing: everybody takes part in 3 steps, at the
    full norm.
    """

    n, device = 3, torch.device("cpu")
    sample_rate, noise_multiplier, max_grad_norm = RUN.values()

    def __init__(self):
        self.left = torch.full((3,), 3)

    def clip_norms(self, norms):
        norms = torch.as_tensor(norms, dtype=torch.float64)
        if norms.shape != (3,) or not bool(((norms >= 0) & (norms <= self.max_grad_norm)).all()):
            raise ValueError(f"norms must lie in [0, {self.max_grad_norm}], got {norms}")
        taken = torch.where(self.left > 0, norms, 0)
        self.left = self.left - (taken > 0).long()
        return taken

    def epsilon(self, delta):
        run = IndividualAccountant(3, **RUN)
        run.record([self.max_grad_norm] * 3, steps=3)
        return run.epsilon(delta)

    def state_dict(self):
        return {"left": self.left.clone()}

    def load_state_dict(self, state):
        self.left = state["left"].clone()


def test_a_filter_of_ones_own_passes_and_trains():
    check_filter(Stingy())
    plan = DPSGDPlan(n=3, steps=6, delta=1e-2, **RUN)
    model, data, own = torch.nn.Linear(2, 2), (torch.randn(3, 2), torch.arange(3) % 2), Stingy()
    history = train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        filter=own,
        seed=0,
    )
    assert own.left.tolist() == [0, 0, 0] and bool((history.epsilons() <= own.epsilon(1e-2)).all())


class Late(RenyiFilter):
    def epsilon(self, delta):
        return super().epsilon(delta) / 3


class Spent(RenyiFilter):
    def epsilon(self, delta):
        return super().epsilon(delta) - 0.1 * (self.spent[:, 0] > 0).double()


class Coupled(RenyiFilter):
    def clip_norms(self, norms):
        return super().clip_norms(norms) * (norms[1] < 0.3)


class Forgetful(RenyiFilter):
    def load_state_dict(self, state):
        pass


class Lax(RenyiFilter):
    def clip_norms(self, norms):
        return super().clip_norms(torch.as_tensor(norms).abs().nan_to_num())


@pytest.mark.parametrize(
    "kind, name",
    [
        (Late, "no run exceeds"),
        (Spent, "epsilon"),
        (Coupled, "others"),
        (Forgetful, "load_state_dict"),
        (Lax, "refuse"),
    ],
)
def test_a_broken_filter_is_named(kind, name):
    with pytest.raises(AssertionError, match=name):
        check_filter(renyi(kind))


class Small(IndividualAccountant):
    def record(self, norms, steps=1, examples=None):
        super().record(0.9 * torch.as_tensor(norms), steps, examples)


class Once(IndividualAccountant):
    def record(self, norms, steps=1, examples=None):
        super().record(norms, 1, examples)


class Cheap(IndividualAccountant):
    def charged(self, norms):
        return super().charged(norms) / 2


@pytest.mark.parametrize(
    "kind, name", [(Small, "under-state"), (Once, "steps"), (Cheap, "charged")]
)
def test_a_broken_accountant_is_named(kind, name):
    with pytest.raises(AssertionError, match=name):
        check_accountant(kind(3, **RUN), steps=12)


def test_missing_methods_are_named():
    with pytest.raises(AssertionError, match="clip_norms"):
        check_filter(IndividualAccountant(3, **RUN))
    with pytest.raises(AssertionError, match="before_step"):
        check_tracker(renyi(), None, None, None, None)


def test_a_run_refuses_what_is_no_filter_by_what_it_lacks():
    plan = DPSGDPlan(n=3, steps=6, delta=1e-2, **RUN)
    model, data = torch.nn.Linear(2, 2), (torch.randn(3, 2), torch.arange(3) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="filter.* without n, .*clip_norms"):
        train(model, cross_entropy, data, plan, optimizer=optimizer, filter=object())
