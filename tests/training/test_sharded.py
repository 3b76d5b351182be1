"""Models of which a part lies on other processes are refused by name, wherever they are handed in,
before any work.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.training import (
    DPSGDPlan,
    clipped_sum,
    cross_entropy,
    gradient_norms,
    train,
    train_ensemble,
)

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
PLAN = DPSGDPlan(
    n=40, sample_rate=0.25, steps=2, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
)


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def in_place(mesh):
    return fully_shard(network(), mesh=mesh)


def within(mesh):
    model = network()
    fully_shard(model[0], mesh=mesh)
    return model


def classic(mesh):
    return nn.Sequential(
        FullyShardedDataParallel(network(), device_id=torch.device("cpu"), device_mesh=mesh)
    )


def by_tensors(mesh):
    return parallelize_module(network(), mesh, {"0": ColwiseParallel()})


def frozen(mesh):
    model = network()
    model[0].weight = nn.Parameter(
        distribute_tensor(model[0].weight.data, mesh, [Replicate()]), requires_grad=False
    )
    return model


def buffered(mesh):
    model = network()
    model.register_buffer("scale", distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    return model


def by_train(model):
    train(model, cross_entropy, (X, Y), PLAN, optimizer=sgd(model), seed=0, progress=False)


def by_ensemble(model):
    train_ensemble(
        [model, model], cross_entropy, (X, Y), PLAN, learning_rate=0.1, seeds=[0, 1], progress=False
    )


def by_engine(mode):
    def private(model):
        IndividualizedPrivacyEngine().make_private_with_budgets(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=10),
            target_epsilons=1.0,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )

    return private


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


TAKERS = {
    "train": by_train,
    "train_ensemble": by_ensemble,
    "clipped_sum": lambda model: clipped_sum(model, cross_entropy, X, Y, 1.0),
    "gradient_norms": lambda model: gradient_norms(model, cross_entropy, X, Y),
} | {f"engine {mode}": by_engine(mode) for mode in ("hooks", "functorch", "ew", "ghost")}


@pytest.mark.parametrize(
    "make, named",
    [
        (in_place, "FSDPModule"),
        (within, "FSDPModule"),
        (classic, "FullyShardedDataParallel"),
        (by_tensors, "DTensor"),
        (frozen, "DTensor"),
        (buffered, "DTensor"),
    ],
)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_model_that_is_sharded_is_refused_by_name(taker, make, named, mesh):
    model = make(mesh)
    if taker == "engine ghost" and named == "FSDPModule":
        pytest.skip("the engine takes it in this mode")
    with pytest.raises(
        ValueError, match=f"holds {named}, .*before fully_shard.* ranks of torch.distributed"
    ):
        TAKERS[taker](model)
    TAKERS["clipped_sum"](network())


def test_the_engine_takes_a_module_that_is_sharded_in_whole_in_ghost_mode(mesh):
    TAKERS["engine ghost"](in_place(mesh))
    with pytest.raises(ValueError, match=r"fully_shard\(module\) last"):
        TAKERS["engine ghost"](within(mesh))


def test_what_a_wrapper_holds_is_what_to_give(mesh):
    wrapped = nn.parallel.DistributedDataParallel(network())
    for taker in ("train", "engine hooks"):
        with pytest.raises(
            ValueError, match=r"DistributedDataParallel, .*the module itself, model\.module:"
        ):
            TAKERS[taker](wrapped)
