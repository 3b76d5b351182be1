r"""Many runs of DP-SGD side by side: trials, budgets, sweeps, shadow models.

Run r has its own plan, seed, members, learning rate and first weights, and is, up to rounding, the
run that `dpcompanion.training.train` makes with plain SGD of the same plan and seed: the same
Poisson draws, the same noise, the same steps. What is trained beside it plays no part. Runs share
the architecture, the examples and the number of steps::

    for t in 1..T:
        B_r    <- Poisson draw of run r, among its members                 for every r
        g_r    <- sum of the clipped gradients of B_r                      many runs in one pass
        g_r    <- g_r + add(ensemble)_r                                    if asked for
        v_r    <- m v_r + (g_r + N(0, s_r^2)) / (expected batch size)_r + w theta_r
        theta_r <- theta_r - eta_r v_r

The layers of all runs are stacked (`dpcompanion.gradients.stacking`), so that small models,
whose steps are mostly calls, cost little more together than alone.  Models that cannot be taken
apart into layers go through `torch.func.vmap` over runs and examples.  On a CPU the
threads that PyTorch would use within one operation each take some of the runs.
"""

import concurrent.futures
import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dpcompanion import _checks
from dpcompanion._progress import bar
from dpcompanion._types import Array, Device, Loss, Numbers
from dpcompanion.gradients import checks
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.training.callbacks import Callbacks, check_extras, seen_at_epoch
from dpcompanion.training.checkpoints import Checkpoint, note_seeds
from dpcompanion.training.distributed import check_one_process
from dpcompanion.training.loop import deferred_interrupt
from dpcompanion.training.options import Performance
from dpcompanion.training.runs import Ensemble


def train_ensemble(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    loss: Loss,
    data: Sequence[torch.Tensor],
    plans: DPSGDPlan | Sequence[DPSGDPlan],
    *,
    seeds: Iterable[int],
    learning_rate: Numbers,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    members: Array | None = None,
    add: Callable[..., Any] | None = None,
    device: Device = None,
    method: str = "auto",
    precision: str | None = None,
    microbatch_size: int | None = None,
    workers: int | None = None,
    callbacks: Callbacks | None = None,
    checkpoint: Checkpoint | None = None,
    generator_device: str | torch.device = "cpu",
    progress: bool | None = None,
) -> Ensemble:
    """Train R runs side by side by DP-SGD, each as its plan says.

    Many arguments, since each is a choice of its own, most with a default.

    Args:
        model: a module, from whose weights all runs start, or R modules of one architecture. They
            are not changed. They may draw nothing at random (no dropout).
        loss: (outputs, targets) -> (n,), such as `cross_entropy`.
        data: (x, y), tensors of n examples each, the same for all runs; no data set with items,
            which `train` takes.
        plans: a `DPSGDPlan` for all runs, or R of them with the same n and steps.
        seeds: R whole numbers, for research: a run's batches and noise come from keys hashed from
            its own.
        learning_rate: a number or (R,).
        momentum, weight_decay: m and w above, at least 0; the same for all runs.
        members: (R, n) booleans, who is in the data set of run r at all. Others toss their coins
            too, but are never taken. The sum is still divided by the plan's public constant, the
            sum of all n rates.
        add: a function of the `Ensemble`, called at each step between clipping and noise: what to
            add to the clipped sums, (R, parameters). Its `gradients_of` helps. What is added is
            outside the plan's guarantee.
        device: where to train; the model's own by default.
        method: how to clip, see `dpcompanion.gradients.clipping`.
        precision: None for the model's own, or "bf16" for the way forward and back, which takes a
            model whose layers can be stacked.
        microbatch_size: examples, of all runs together, in one pass. By default as many as suit a
            processor's caches (`dpcompanion.gradients.microbatches`), or 1,024.
        workers: threads that share the runs; on a CPU as many as PyTorch's own by default, else 1.
        callbacks: `Callbacks`, functions of the `Ensemble`, which may end all runs or some
            (`Ensemble.stop`); a dict that on_epoch returns goes into `epochs`. An epoch is that of
            the first plan.
        checkpoint: a `Checkpoint`, from which the runs go on if its file exists, and which they
            write.
        generator_device: where to draw batches and noise. The CPU gives the same draws for every
            device.
        progress: show a bar; by default on a terminal only.

    Returns:
        Ensemble. `Ensemble.history` has the history of each run: the steps that it took, and its
        statement.

    Raises:
        ValueError: for plans, models, members or data that do not fit together, a model that mixes
            examples or draws at random, a checkpoint of another ensemble, or a `torch.distributed`
            group of several processes.

    >>> from dpcompanion.training import DPSGDPlan, cross_entropy, models, train_ensemble
    >>> x, y = torch.randn(100, 2), torch.arange(100) % 2
    >>> plans = [
    ...     DPSGDPlan(
    ...         n=100, sample_rate=0.1, steps=20, max_grad_norm=C, noise_multiplier=1.0, delta=1e-3
    ...     )
    ...     for C in (0.1, 1.0, 10.0)
    ... ]
    >>> ensemble = train_ensemble(
    ...     models.linear(2, 2), cross_entropy, (x, y), plans, seeds=[0, 0, 0], learning_rate=0.1
    ... )
    >>> ensemble.parameters["weight"].shape, ensemble.predict(x).shape
    (torch.Size([3, 2, 2]), torch.Size([3, 100, 2]))
    >>> ensemble.model(2)
    Linear(in_features=2, out_features=2, bias=True)
    """
    check_one_process(
        "train_ensemble", "give each process its own runs before the group is initialised"
    )
    callbacks, checkpoint = check_extras(callbacks, checkpoint)
    ensemble = Ensemble(
        model,
        loss,
        data,
        plans,
        seeds=seeds,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        members=members,
        performance=Performance(
            method=method, precision=precision, microbatch_size=microbatch_size, device=device
        ),
        generator_device=generator_device,
    )
    ensemble._added = add is not None
    if workers is None:
        workers = torch.get_num_threads() if ensemble.device.type == "cpu" else 1
    if checkpoint is not None:
        note_seeds(checkpoint.path, ensemble._seeds_and_data())
    workers = min(_checks.whole_number("workers", workers, 1), len(ensemble))
    if checkpoint is not None and checkpoint.exists:
        ensemble._load(checkpoint.path, checkpoint.stateful)
    with (
        _shared_among(workers, ensemble) as share,
        bar(ensemble.steps, label="DP-SGD", done=ensemble.step, show=progress) as advance,
        deferred_interrupt() as interrupted,
    ):
        while not ensemble.ended:
            share(ensemble._sum_clipped)
            ensemble._add(add)
            share(ensemble._add_noise)
            ensemble._update()
            _call(callbacks, ensemble)
            advance()
            stop = interrupted()
            if checkpoint is not None and (
                stop
                or ensemble.ended
                or checkpoint.due(ensemble.step, ensemble.steps, ensemble.steps_per_epoch)
            ):
                ensemble._save(checkpoint.path, checkpoint.stateful)
            if stop:
                raise KeyboardInterrupt
    ensemble._check_later()
    if ensemble.dropped.any():
        warnings.warn(
            f"{int(ensemble.dropped.sum())} per-example gradients were not finite and contributed "
            "nothing",
            RuntimeWarning,
            stacklevel=2,
        )
    return ensemble


def _call(callbacks, ensemble):
    """Call what is to be called after this step; the plans must come out of it as they were."""
    if callbacks.on_step is not None:
        callbacks.on_step(ensemble)
    end = ensemble.ended
    if callbacks.on_epoch is not None and (ensemble.step % ensemble.steps_per_epoch == 0 or end):
        epoch = math.ceil(ensemble.step / ensemble.steps_per_epoch)
        entry = {"epoch": epoch, "step": ensemble.step}
        ensemble.epochs.append(entry | seen_at_epoch(callbacks.on_epoch(ensemble), entry))
    if callbacks.on_step is not None or callbacks.on_epoch is not None:
        for plan, numbers in zip(ensemble.plans, ensemble._planned):
            checks.check_plan(plan, plan, numbers)


@contextlib.contextmanager
def _shared_among(workers, ensemble):
    """A function that does a piece of work for all runs, in threads of one PyTorch thread each."""
    bounds = [len(ensemble) * k // workers for k in range(workers + 1)]
    tasks = [(range(*pair), ensemble._workplace()) for pair in zip(bounds, bounds[1:])]
    if workers == 1:
        yield lambda work: work(*tasks[0])
        return
    threads = torch.get_num_threads()
    with concurrent.futures.ThreadPoolExecutor(
        workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            yield lambda work: list(pool.map(lambda task: work(*task), tasks))
        finally:
            torch.set_num_threads(threads)
