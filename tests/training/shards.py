"""What processes are asked to do with the engine and a model after `fully_shard`: each case is
called on every rank, and `run` without a mesh is that of one process.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from ranks import N, data, rank
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.utils.checkpoint import checkpoint

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.filters import RenyiFilter
from dpcompanion.training import cross_entropy


class Words(nn.Module):
    """Words and positions, a norm, and layers of sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 5), nn.Embedding(4, 5)
        self.norm, self.frozen, self.last = nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        ids = (x.abs() * 3).long().clamp(max=6)
        seen = self.words(ids) + self.places(torch.arange(4)[None])
        return self.last(self.frozen(self.norm(seen)).tanh().mean(1))


class Mixing(nn.Sequential):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Twice(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](self[3](self[3](self[0](x)))))


class Again(nn.Sequential):
    """Activations are computed again in the backward pass."""

    def forward(self, x):
        x = checkpoint(self[0], x, use_reentrant=False)
        return self[2](self[1](x))


class Apart(nn.Module):
    """A weight that is used outside of its layer as well."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 3)

    def forward(self, x):
        return self.one(x) + x @ self.one.weight.T


def dense():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


MODELS = {
    "dense": dense,
    "words": Words,
    "tied": tied,
    "mixing": lambda: Mixing(*dense()),
    "twice": lambda: Twice(*dense(), nn.Linear(6, 6)),
    "apart": Apart,
    "again": lambda: Again(*dense()),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "unknown": lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3)),
}


def made(name="dense", dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def shard(model, **options):
    """The model after `fully_shard`, layer by layer and in whole."""
    for layer in list(model.children()):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(t):
    """A tensor of which each rank may have a part."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def sharded(model, what):
    """The model after `fully_shard`, or something like it."""
    if what == "frozen whole":
        return fully_shard(model, ignored_params=set(model.frozen.parameters()))
    if what == "root":
        return fully_shard(model)
    if what == "half":
        fully_shard(model[0])
        return model
    if what == "two roots":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return model
    options = {
        "ignored": {"ignored_params": {model[0].weight}}
        if isinstance(model, nn.Sequential)
        else {},
        "types": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "in order": {},
    }
    if what == "alone":  # every rank has a mesh of its own
        groups = [init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))]
        return shard(model, mesh=groups[0]["b"])
    if what == "two axes":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("a", "b"))
        return shard(model, mesh=mesh)
    if what == "kept":
        return shard(model, reshard_after_forward=False)
    if what == "along":
        return shard(model, shard_placement_fn=along)
    return shard(model, **options[what])


def along(p):
    last = p.ndim - 1
    even = p.shape[last] % dist.get_world_size() == 0
    return torch.distributed.tensor.Shard(last) if even else None


def optimizer_of(kind, model):
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def run(
    *,
    how=None,
    name="dense",
    dtype=torch.float64,
    kind="sgd",
    seed=5,
    differs=None,
    batch=8,
    epochs=3,
    do=None,
    at=3,
    on=None,
    path=None,
    goes_on=False,
    pieces=None,
    filter=None,
    mode="ghost",
    penalty=False,
    **options,
):
    """A run of the engine on this rank; `do` is called in the step `at`, with what there is."""
    x, y = data()
    if differs == "seed" and rank() == 1:
        seed = 6
    if differs == "data" and rank() == 1:
        x = x + 1
    model = made(name, dtype)
    model = model if how is None else sharded(model, how)
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    shared = {
        "module": model,
        "optimizer": optimizer_of(kind, model),
        "data_loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x.to(dtype), y), batch_size=batch
        ),
        "epochs": epochs,
        "seed": seed,
        "grad_sample_mode": mode,
        **options,
    }
    if goes_on and how is not None:
        read(path, model, shared["optimizer"])
    if penalty:
        shared["criterion"] = functools.partial(penalised, model[0])
    if filter is not None:
        held = RenyiFilter(
            N,
            sample_rate=batch / N,
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            orders=[8.0],
            budgets=filter,
        )
        engine.make_private_with_filter(filter=held, loss=cross_entropy, **shared)
    budgets = torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64).repeat(N)[:N]
    private, optimizer, criterion, loader = engine.make_private_with_budgets(
        **{
            "target_epsilons": budgets,
            "target_delta": 1e-3,
            "max_grad_norm": 0.5,
            "method": "scale",
            **shared,
        }
    )
    if goes_on:
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    taken, sizes, drawn, gradients = engine.accountant.steps, [], [], []
    while engine.accountant.steps < engine.accountant.planned:
        with (
            contextlib.nullcontext(loader)
            if pieces is None
            else BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            )
        ) as batches:
            for a, b in batches:
                now = do if engine.accountant.steps == at and on in (None, rank()) else None
                step(now, model, private, optimizer, criterion, a, b)
                sizes.append(len(a))
                drawn.append(len(optimizer.draws.whole))
                gradients.append(flat(p.grad for p in model.parameters() if p.requires_grad))
                if do == "save" and engine.accountant.steps == at:
                    write(engine, path, model, optimizer)
    return {
        "weights": flat(model.parameters()),
        "gradients": torch.stack(gradients),
        "sizes": torch.tensor(sizes),
        "drawn": torch.tensor(drawn),
        "steps": engine.accountant.steps - taken,
        "statement": engine.statement(),
        "epsilons": engine.get_epsilons(1e-3),
        "keys": {name: one.key for name, one in engine.accountant.generators().items()},
        "parts": sum(part(p).numel() for p in model.parameters()),
        "noise": optimizer.noise_multiplier
        * optimizer.max_grad_norm
        / float(optimizer.expected_batch_size),
    }


def penalised(layer, outputs, y):
    losses = nn.functional.cross_entropy(outputs, y, reduction="none")
    return losses + layer.weight.square().sum().to_local().view(1)[0]


def flat(tensors):
    return torch.cat([whole(t).detach().flatten() for t in tensors])


def part(t):
    return t.to_local() if hasattr(t, "to_local") else t


def write(engine, path, model, optimizer):
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    weights, state = states.get_state_dict(
        model, optimizer.original_optimizer, options=states.StateDictOptions(full_state_dict=True)
    )
    if not rank():
        torch.save((weights, state), f"{path}.weights")


def read(path, model, optimizer):
    weights, state = torch.load(f"{path}.weights", weights_only=True)
    options = states.StateDictOptions(full_state_dict=True)
    states.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
    )


def step(do, model, private, optimizer, criterion, x, y):
    """A step of the loop, in which something may be done that should not."""
    optimizer.zero_grad()
    plain = functools.partial(nn.functional.cross_entropy, reduction="sum")
    first = next(p for p in model.parameters() if p.requires_grad)
    if do == "divide":
        model.set_gradient_divide_factor(1e-3)
    if do == "average":
        for layer in model.modules():
            if isinstance(layer, FSDPModule):
                layer.set_force_sum_reduction_for_comms(False)
                layer.set_gradient_divide_factor(float(dist.get_world_size()))
    if do == "leave unreduced":  # a gradient without clipping, which the next reduction would take
        model.set_requires_gradient_sync(False)
        (1e3 * plain(private(x), y)).backward()
        optimizer.zero_grad()
        for layer in model.modules():
            for noted in ("activations", "max_batch_len"):
                layer.__dict__.pop(noted, None)
        model.set_requires_gradient_sync(True)
    if do == "left over":  # a gradient on the weights that are gathered, which a reduction takes
        for layer in model.modules():
            if isinstance(layer, FSDPModule):
                layer.unshard()
        for p in model.parameters():
            p.grad = 1e3 * torch.ones_like(p)
    if do == "another group":
        model.set_separate_reduce_scatter_group()
    if do == "no reduction":
        model.set_requires_gradient_sync(False)
    if do == "hook":
        first.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1e3))
    if do == "tensor hook":
        first.register_hook(lambda gradient: 1e3 * gradient)
    if do == "unfreeze":
        model.frozen.requires_grad_(True)
    if do == "reduce by oneself":
        model[0].set_custom_reduce_scatter(Louder())
    if do == "nothing in it" and len(x):
        x = x * torch.inf
    if do == "hook within":  # on the tensor that a layer has while it computes
        model[0].register_forward_pre_hook(
            lambda layer, args: layer.weight.register_hook(lambda gradient: 1e3 * gradient) and None
        )
    if do == "evaluate":
        with torch.no_grad():
            private(data()[0].to(x.dtype))
            private.eval()(data()[0].to(x.dtype))
        private.train()
    if do == "shard":
        fully_shard(model)
    if do == "shard what carries the hooks":
        fully_shard(private)
    if do == "more rows":
        x, y = x.repeat(3, 1), y.repeat(3)
    if do == "fewer rows":
        x, y = x[:-1], y[:-1]
    loss = criterion(private(x), y)
    if do == "two passes":
        loss.backward()
        loss = criterion(private(x), y)
    loss.backward()
    if do == "plain loss":
        plain(private(x), y).backward()
    if do == "louder":
        for p in model.parameters():
            part(p.grad).mul_(1e3)
    if do == "exchange":
        first.grad = 1e3 * first.grad
    if do == "fail":
        optimizer.add_noise = None  # an error within the step
    optimizer.step()


class Louder(DefaultReduceScatter):
    def __call__(self, output_tensor, input_tensor, **options):
        return super().__call__(output_tensor, 1e3 * input_tensor, **options)
