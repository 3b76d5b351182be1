"""Processes that train together, and what they are asked to do: each case is called on every rank.

They are started once for all tests of a size, and meet in a file.
"""

import contextlib
import datetime
import importlib
import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from dpcompanion.filters import RenyiFilter
from dpcompanion.mechanism import noise
from dpcompanion.training import (
    Callbacks,
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    Performance,
    Track,
    by_person,
    cross_entropy,
    train,
    train_ensemble,
)

N, STEPS = 40, 12


class Pool:
    """`size` processes; called with a case's name and options it gives what each rank returned or
    raised.
    """

    def __init__(self, size, folder, backend="gloo", cases=__name__):
        # What takes long to import is imported once; the package is that of this process.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "scipy.stats", "mpmath", "opacus"])
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, backend, f"file://{folder}/meet", theirs, cases),
                daemon=True,
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, case, **options):
        for pipe in self.pipes:
            pipe.send((case, options))
        for pipe in self.pipes:
            assert pipe.poll(300), f"{case} hangs"
        return [pipe.recv() for pipe in self.pipes]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


def _serve(rank, size, backend, meet, pipe, cases):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=meet,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=200),
    )
    while (asked := pipe.recv()) is not None:
        case, options = asked
        try:
            pipe.send(getattr(importlib.import_module(cases), case)(**options))
        except BaseException as error:  # what a rank raises is what a test looks at
            pipe.send((type(error).__name__, str(error)))
    dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, dtype=torch.float64, generator=generator), torch.randint(
        3, (N,), generator=generator
    )


class Items(torch.utils.data.Dataset):
    """The same, one by one, until its disk is gone."""

    gone = False

    def __init__(self):
        self.x, self.y = data()

    def __len__(self):
        return N

    def __getitem__(self, i):
        if self.gone:
            raise OSError("a disk is gone")
        return self.x[i], self.y[i]


def network(dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 3)
    ).double()


def plan_of(budgets=None, **changes):
    numbers = {"n": N, "sample_rate": 0.15, "steps": STEPS, "max_grad_norm": 0.5, "delta": 1e-3}
    if budgets:
        targets = torch.tensor([1.0, 4.0], dtype=torch.float64).repeat(N // 2)
        return DPSGDPlan.for_epsilons(targets, method=budgets, accountant="rdp", **numbers)
    return DPSGDPlan(**{**numbers, "noise_multiplier": 1.0, "accountant": "rdp", **changes})


def fit(
    *,
    seed=5,
    form="tensors",
    model=None,
    dropout=0.0,
    dtype=torch.float64,
    method="auto",
    precision=None,
    device="cpu",
    track=None,
    filter=None,
    trackers=(),
    at=None,
    on_rank=None,
    do=None,
    path=None,
    every=None,
    plan=None,
    **options,
):
    """A run on this rank: its weights, history, account, and what callbacks saw. At the step `at`,
    on one rank or all, its callback does something.
    """
    plan = plan_of(**plan or {})
    model = network(dropout) if model is None else model
    device = f"cuda:{rank()}" if device == "cuda" else device
    model.to(device=device, dtype=dtype)
    x, y = data()
    if form == "tensors":
        examples = x.to(dtype), y
    elif form == "items":
        examples = Items()
    else:
        examples = by_person(x, y, [i % 9 for i in range(N)], at_most=5)
    seen = []

    def on_step(run):
        seen.append((run.indices.clone(), run.norms.clone()))
        if run.step == at and on_rank in (None, rank()):
            do_at(do, run, examples)

    followers = [
        NormTracker.for_plan(plan, model, cross_entropy, examples, **kind) for kind in trackers
    ]
    filter = None if filter is None else filter_of(plan, filter)
    history = train(
        model,
        cross_entropy,
        examples,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        seed=seed,
        performance=Performance(method=method, precision=precision, device=device),
        track=None if track is None else Track(**track),
        filter=filter,
        trackers=followers,
        callbacks=Callbacks(on_step),
        checkpoint=None if path is None else Checkpoint(path, every),
        progress=False,
        **options,
    )
    found = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "losses": history.losses,
        "sizes": history.batch_sizes,
        "indices": [indices for indices, _ in seen],
        "norms": [norms for _, norms in seen],
        "steps": history.steps,
        "stopped": history.stopped,
        "statement": history.statement(),
        "epsilons": history.epsilons(),
        "spent": None if filter is None else filter.spent.clone(),
        "estimates": [follower.estimated_epsilon(1e-3) for follower in followers],
        "gradients": torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ),
    }
    return tree_map_only(torch.Tensor, lambda t: t.cpu(), found)


def filter_of(plan, epsilon):
    return RenyiFilter.for_plan(plan, target_epsilons=epsilon)


def do_at(what, run, examples):
    if what == "fail":
        raise FloatingPointError("no number")
    if what == "stop":
        run.stop()
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if what == "drift":
        with torch.no_grad():
            next(run.model.parameters()).add_(1e-12)
    if what == "lose the disk":
        examples.gone = True
    if what == "die once" and not os.path.exists(lost := os.path.join(sys.argv[1], "lost")):
        open(lost, "w").close()
        os._exit(9)


def differing(what, **options):
    """A run of which rank 1 is given something else."""
    other = rank() == 1
    if what == "model":
        options["model"] = network()
        if other:
            with torch.no_grad():
                options["model"][0].weight[0, 0] += 1e-9
    if what == "frozen" or what == "mode":
        options["model"] = network()
        if other and what == "frozen":
            options["model"][0].bias.requires_grad_(False)
        elif other:
            options["model"][1].eval()
    if other:
        options |= {
            "plan": {"plan": {"noise_multiplier": 1.1}},
            "data": {"form": "items"},
            "seed": {"seed": 6},
            "no seed": {"seed": None},
            "method": {"method": "func"},
            "track": {"track": {"clipping": "individual"}},
            "filter": {"filter": 3.0},
            "unknown": {"seed": -1},
            "model": {},
            "frozen": {},
            "mode": {},
        }[what]
    return fit(**options)


def quiet(steps):
    """Gradients of steps that nobody takes part in."""
    seen = []
    x, y = data()
    model = network()
    plan = plan_of(sample_rate=1e-9, steps=steps, noise_multiplier=0.7, max_grad_norm=2.0)
    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=Callbacks(
            lambda run: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        ),
        progress=False,
    )
    return torch.cat(seen) * plan.expected_batch_size / 1.4


def keys():
    """Of a run without a seed: the keys of its draws and its noise on this rank."""
    made, before = [], noise.generators

    def noted(*arguments):
        made.append(before(*arguments))
        return made[-1]

    noise.generators = noted
    try:
        fit(seed=None)
    finally:
        noise.generators = before
    return {name: stream.key for name, stream in made[0].items()}


def refused(what):
    """What is refused where there are several processes."""
    x, y = data()
    model = network()
    if what == "wrapped":
        return fit(model=torch.nn.parallel.DistributedDataParallel(model))
    if what == "sharded":
        return fit(model=torch.distributed.fsdp.fully_shard(model))
    if what == "sharded engine":
        return engine(model=torch.distributed.fsdp.fully_shard(model.train()))
    return train_ensemble(model, cross_entropy, (x, y), plan_of(), seeds=[0], learning_rate=0.1)


def engine(
    *,
    seed=5,
    mode="hooks",
    method="sample",
    people=False,
    filter=None,
    given=False,
    norms=None,
    pieces=None,
    differs=None,
    do=None,
    at=None,
    path=None,
    goes_on=False,
    target_delta=1e-3,
    model=None,
    **options,
):
    """A run of the engine on Opacus on this rank, in a loop of its own; rank 1 may be given
    something else, or does something at the step `at`.
    """
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    from dpcompanion.engine import IndividualizedPrivacyEngine

    other, (x, y) = rank() == 1, data()
    n, batch = (9, 3) if people else (N, 8)
    model = network().train() if model is None else model
    if other and differs == "model":
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-9
    if other and differs == "data":
        x = x + 1
    if other and differs == "seed":
        seed = 6
    if other and differs == "refused":
        target_delta = 2.0
    if people:
        people = [i % 9 for i in range(N)]
        if other and differs == "people":
            people = people[::-1]
        options |= {"people": people, "at_most": 5, "unit": "patient"}
    budgets = torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64).repeat(N)[:n]
    if other and differs == "budgets":
        budgets = budgets.flip(0)
    made, held = IndividualizedPrivacyEngine(accountant="rdp"), None
    shared = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        "data_loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=batch
        ),
        "epochs": 3,
        "seed": seed,
        "grad_sample_mode": mode,
        **options,
    }
    if filter is None:
        found = made.make_private_with_budgets(
            target_epsilons=budgets,
            target_delta=target_delta,
            max_grad_norm=0.5,
            method=method,
            **shared,
        )
    else:
        length = -(-n // batch)
        held = RenyiFilter(
            n,
            sample_rate=1 / length,
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            orders=[8.0],
            budgets=filter,
        )
        measured = {"norms": lambda: torch.arange(n) / n} if given else {"loss": cross_entropy}
        found = made.make_private_with_filter(
            filter=held, updates_per_epoch=2, **measured, **shared
        )
    private, optimizer, *criterion, loader = found
    loss = criterion[0] if criterion else torch.nn.functional.cross_entropy
    if goes_on:
        made.load_checkpoint(path=path, module=private, optimizer=optimizer)
    drawn, taken = [], made.accountant.steps
    while made.accountant.steps < made.accountant.planned:
        with (
            contextlib.nullcontext(loader)
            if pieces is None
            else BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=pieces, optimizer=optimizer
            )
        ) as batches:
            for a, b in batches:
                if other and do == "fail" and len(made.accountant) == at:
                    optimizer.add_noise = None  # an error within the step
                if other and do == "drift" and len(made.accountant) == at:
                    with torch.no_grad():
                        next(model.parameters()).add_(1e-12)
                optimizer.zero_grad()
                loss(private(a), b).backward()
                optimizer.step()
                drawn.append((list(optimizer.draws.whole), list(loader.dataset.units)))
                if len(made.accountant) == at and do == "save":
                    made.save_checkpoint(path=path, module=private, optimizer=optimizer)
    streams = made.accountant.generators()
    return {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "gradients": torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ),
        "drawn": drawn,
        "steps": len(made.accountant) - taken,
        "statement": made.statement(),
        "epsilons": made.get_epsilons(1e-3),
        "spent": None if held is None else held.spent.clone(),
        "keys": {name: stream.key for name, stream in streams.items()},
    }


if __name__ == "__main__":  # by torchrun, with a folder: a run in which rank 1 dies once
    dist.init_process_group("gloo")
    found = fit(path=os.path.join(sys.argv[1], "run.pt"), every=2, do="die once", at=7, on_rank=1)
    if not rank():
        last = {"weights": found["weights"], "steps taken at last": len(found["indices"])}
        torch.save(last, os.path.join(sys.argv[1], "weights.pt"))
    dist.destroy_process_group()
