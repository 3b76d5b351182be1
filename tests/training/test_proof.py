"""The proof of a method against plain autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.training import DPSGDPlan, clipped_sum, clipping, cross_entropy, gradient_norms, proof, train
from dpcompanion.training.layers import Unfit


class Tied(nn.Module):
    """A head that uses the weight of the embedding by F.linear, behind a gate."""

    def __init__(self, gate=1.0):
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        return self.head(x + self.gate * torch.tanh(self.one(x) + F.linear(x, self.one.weight)))


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x - x.mean(0))


def examples(n=40):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 3


def test_a_nan_in_the_first_rows_does_not_switch_off_the_proof():
    """The proof took the first two rows; with a NaN in them it accepted whatever it was shown. Tied weights then ran
    as "mixed", with norms off by 88%."""
    torch.manual_seed(0)
    model, (x, y) = Tied(), examples()
    x[:2] = math.nan
    assert clipping.resolve_method(model, cross_entropy, x, y) == "func"
    with pytest.raises(ValueError, match="'mixed' does not fit"):
        clipping.resolve_method(model, cross_entropy, x, y, "mixed")
    norms = gradient_norms(model, cross_entropy, x, y)
    torch.testing.assert_close(norms[2:], gradient_norms(model, cross_entropy, x[2:], y[2:], method="func"))


@pytest.mark.parametrize("rows", [2, 30])
def test_a_model_that_mixes_is_refused_beside_nan(rows):
    """A functional batch norm was trained where the first rows held a NaN."""
    model, (x, y) = Centred(), examples()
    x[:rows, 0] = math.nan
    plan = DPSGDPlan(n=40, sample_rate=0.5, steps=2, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="one by one"):
        train(model, cross_entropy, (x, y), plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seed=0)


def test_without_a_finite_example_nothing_is_taken_for_proved():
    model, (x, y) = nn.Linear(4, 3), examples()
    x[:] = math.inf
    assert clipping.resolve_method(model, cross_entropy, x, y) == "func"
    with pytest.raises(ValueError, match="nothing can be proved"):
        clipping.resolve_method(model, cross_entropy, x, y, "ghost")


def test_well_fitted_examples_are_proved_as_strictly_as_others():
    """A tolerance of 0.01 in norm let pass whatever fitted the two examples: norms of 0.017 of the truth."""
    torch.manual_seed(0)
    model, (x, y) = Tied(), examples()
    x, y = x[:3], torch.tensor([0, 1, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(model(x), y).mean().backward()
        optimizer.step()
    assert gradient_norms(model, cross_entropy, x, y, method="func").max() < 5e-3
    assert clipping.resolve_method(model, cross_entropy, x, y) == "func"


def test_a_gate_of_zero_hides_nothing():
    """Residual branches begin with a weight of zero; what is wrong behind it has no gradient at the first step."""
    model, (x, y) = Tied(gate=0.0), examples()
    assert clipping.resolve_method(model, cross_entropy, x, y) == "func"
    assert model.gate.item() == 0


def test_the_hardest_examples_are_those_of_the_largest_gradients_in_the_probe():
    model, (x, y) = nn.Linear(4, 3), examples(12)
    x[7] = math.nan
    rows = proof.hardest(model, cross_entropy, x, y).tolist()
    norms = gradient_norms(model, cross_entropy, x, y, method="func").nan_to_num(posinf=0)
    assert rows == norms.argsort(descending=True)[:4].tolist()
    assert sorted(proof.rows_to_look_through(1000).tolist())[-1] == 999
    assert len(set(proof.rows_to_look_through(1000).tolist())) == 64
    assert proof.rows_to_look_through(3).sort().values.tolist() == [0, 1, 2]


def test_prove_accepts_what_is_right_and_leaves_the_model_as_it_was():
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), examples()
    model[0].eval()
    before = {name: p.clone() for name, p in model.named_parameters()}

    def claimed(x, y):
        found = clipped_sum(model, cross_entropy, x, y, 1e9, method="func")
        return found.norms, found.gradients

    random = torch.get_rng_state()
    proof.prove(model, cross_entropy, x, y, claimed)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert [module.training for module in model] == [False, True, True]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda norms, sums: (norms * 0.95, sums), "norms"),
        (lambda norms, sums: (norms * math.nan, sums), "norms"),
        (lambda norms, sums: (norms, sums | {"bias": sums["bias"] * 0.9}), "'bias'"),
    ],
)
def test_prove_refuses_what_is_wrong(wrong, message):
    model, (x, y) = nn.Linear(4, 3), examples()

    def claimed(x, y):
        found = clipped_sum(model, cross_entropy, x, y, 1e9, method="func")
        return wrong(found.norms, found.gradients)

    with pytest.raises(Unfit, match=message):
        proof.prove(model, cross_entropy, x, y, claimed)
