"""Runs side by side are the runs one by one."""

import math

import pytest
import torch
from torch import nn

from dpcompanion.output_perturbation import sgd_sensitivity
from dpcompanion.output_perturbation.grids import epoch_orders, initial_weights, train_grid

from ..refusals import refuses

N, D = 43, 5


def problem(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(N + 1, D, generator=generator, dtype=torch.float64)
    labels = (
        features[:, 0] + 0.3 * torch.randn(N + 1, generator=generator, dtype=torch.float64) > 0
    ).long()
    return (scale * features / features.norm(dim=1, keepdim=True)).to(dtype), labels


def reference(
    features,
    labels,
    *,
    data_set,
    seed,
    steps,
    batch_size,
    learning_rate,
    initialization,
    hidden=0,
    at=(),
):
    """One run, as plainly as PyTorch allows: modules, autograd, one batch after another."""
    x, y = features[1:].clone(), labels[1:].clone().to(features)
    if data_set:
        x[data_set - 1], y[data_set - 1] = features[0], labels[0]
    layers = (
        [nn.Linear(D, hidden), nn.ReLU(), nn.Linear(hidden, 1)] if hidden else [nn.Linear(D, 1)]
    )
    model = nn.Sequential(*layers).to(features.dtype)
    start = initial_weights(D, seed if initialization == "varying" else 0, hidden=hidden).to(
        features.dtype
    )
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in linear:
            size = layer.weight.shape[0] * (layer.weight.shape[1] + 1)
            block, start = start[:size].view(layer.weight.shape[0], -1), start[size:]
            layer.weight.copy_(block[:, :-1])
            layer.bias.copy_(block[:, -1])

    def flat():
        return (
            torch.cat(
                [torch.cat((layer.weight, layer.bias[:, None]), 1).flatten() for layer in linear]
            )
            .detach()
            .clone()
        )

    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    batches = [
        batch
        for order in epoch_orders(N, seed, steps, features=D, hidden=hidden)
        for batch in (order - 1).split(batch_size)
    ]
    snapshots = {0: flat()}
    for step, batch in enumerate(batches[:steps], 1):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(x[batch]).squeeze(1), y[batch], reduction="sum"
        )
        (loss / batch_size).backward()
        optimizer.step()
        snapshots[step] = flat()
    return torch.stack([snapshots[s] for s in at]) if at else snapshots[steps]


@pytest.mark.parametrize("initialization", ["varying", "fixed"])
@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_every_run_equals_a_plain_loop(initialization, hidden, dtype, tolerance):
    features, labels = problem(dtype)
    settings = dict(
        steps=30, batch_size=8, learning_rate=0.7, initialization=initialization, hidden=hidden
    )
    data_sets, seeds = (0, 4, N, 17), (5, 0, 9)
    grid = train_grid(
        features, labels, data_sets=data_sets, seeds=seeds, enforce_conditions=False, **settings
    )
    assert grid.dtype == dtype
    for i, data_set in enumerate(data_sets):
        for r, seed in enumerate(seeds):
            alone = reference(features, labels, data_set=data_set, seed=seed, **settings)
            torch.testing.assert_close(grid[i, r], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("learning_rate", [1e-1, 1e-3, 1e-5])
def test_theorem_2_holds_of_features_in_float32_however_small_a_step(learning_rate):
    generator, n = torch.Generator().manual_seed(1), 4000
    features = torch.randn(n + 1, 10, generator=generator)
    features = 0.999 * features / features.norm(dim=1, keepdim=True)
    labels = (torch.rand(n + 1, generator=generator) < 0.5).long()
    settings = dict(batch_size=n, learning_rate=learning_rate)
    grid = train_grid(features, labels, data_sets=(0, 1, 2, 3), seeds=(0, 1), steps=2, **settings)
    bound = sgd_sensitivity(passes=2, lipschitz=2**0.5, smoothness=0.5, **settings)
    assert grid.dtype == torch.float64
    assert 0 < (grid[1:] - grid[0]).norm(dim=-1).max() <= bound


def test_a_batch_of_all_examples_holds_every_replaced_one_at_once():
    features, labels = problem()
    settings = dict(steps=3, batch_size=N, learning_rate=1.0, initialization="fixed")
    grid = train_grid(features, labels, data_sets=range(N + 1), seeds=(0, 1), **settings)
    alone = torch.stack(
        [reference(features, labels, data_set=i, seed=1, **settings) for i in range(N + 1)]
    )
    torch.testing.assert_close(grid[:, 1], alone, rtol=0, atol=1e-12)
    # Full batches know no order.
    torch.testing.assert_close(grid[:, 0], grid[:, 1], rtol=0, atol=1e-12)


def test_snapshots_are_the_weights_on_the_way():
    features, labels = problem()
    settings = dict(steps=12, batch_size=5, learning_rate=0.5, initialization="varying")
    at = (0, 1, 9, 12, 9)
    grid = train_grid(features, labels, data_sets=(0, 3), seeds=(1, 2), snapshots=at, **settings)
    assert grid.shape == (5, 2, 2, D + 1)
    torch.testing.assert_close(
        grid[:, 1, 0],
        reference(features, labels, data_set=3, seed=1, at=at, **settings),
        rtol=0,
        atol=1e-12,
    )


def test_a_grid_trained_in_parts_is_the_grid_trained_at_once(monkeypatch):
    features, labels = problem()
    settings = dict(data_sets=(0, 2, 8), steps=20, batch_size=8, learning_rate=1.0)
    whole = train_grid(features, labels, seeds=range(6), **settings)
    parts = [
        train_grid(features, labels, seeds=seeds, **settings) for seeds in ((0, 1, 2), (3, 4, 5))
    ]
    torch.testing.assert_close(whole, torch.cat(parts, 1), rtol=0, atol=1e-14)
    monkeypatch.setattr("dpcompanion.output_perturbation.grids._CHUNK_BYTES", 1)
    torch.testing.assert_close(
        whole, train_grid(features, labels, seeds=range(6), **settings), rtol=0, atol=1e-14
    )


def test_the_fixed_initialization_is_the_same_for_all_seeds_and_the_varying_one_is_not():
    features, labels = problem()
    settings = dict(
        data_sets=(0, 1), seeds=(0, 1, 2), steps=1, batch_size=8, learning_rate=1.0, snapshots=(0,)
    )
    fixed = train_grid(features, labels, initialization="fixed", **settings)
    varying = train_grid(features, labels, initialization="varying", **settings)
    assert (fixed == fixed[:, :1, :1]).all()
    assert (varying[0, 0, 0] != varying[0, 0, 1])[:-1].all()
    another = train_grid(features, labels, initialization=2, **settings)
    assert (another == varying[:, :1, 2:]).all(), "the start of seed 2, for all"
    assert (train_grid(features, labels, initialization=0, **settings) == fixed).all()


def test_initial_weights_are_those_of_keras():
    weights = torch.stack([initial_weights(50, seed) for seed in range(200)])
    limit = (6 / 51) ** 0.5
    assert weights[:, :-1].abs().max() <= limit and weights[:, :-1].abs().max() > 0.99 * limit
    assert (weights[:, -1] == 0).all()
    assert weights[:, :-1].var().item() == pytest.approx(limit**2 / 3, rel=0.03)


def test_bad_arguments_are_refused_by_name():
    features, labels = problem()
    run = dict(data_sets=(0, 1), seeds=(0, 1), steps=10, batch_size=8, learning_rate=1.0)
    good = dict(features=features, labels=labels, **run)
    refuses(train_grid, good, features=[1.01 * features, math.nan * features, features.half()])
    refuses(train_grid, good, labels=[torch.full((N + 1,), 2), torch.zeros(3), [0] * (N + 1)])
    refuses(
        train_grid,
        good,
        learning_rate=[4.01, 0.0, [1.0, 2.0], 7.9e-9],
        batch_size=[N + 1, 0],
        steps=[0],
    )
    refuses(train_grid, good, data_sets=[[1], [1, N + 1]], seeds=[[1], [1, 1]], snapshots=[[11]])
    refuses(train_grid, good, initialization=["random", -1, 0.5])


def test_the_conditions_of_theorem_2_can_be_left_on_purpose():
    features, labels = problem(scale=3.0)
    settings = dict(steps=7, batch_size=8, learning_rate=5.0, initialization="varying")
    grid = train_grid(
        features, labels, data_sets=(0, 1), seeds=(0, 1), enforce_conditions=False, **settings
    )
    torch.testing.assert_close(
        grid[1, 1], reference(features, labels, data_set=1, seed=1, **settings)
    )
