"""Settings and runs of Yu et al. 2022: its algorithm 1."""

import dataclasses
import functools
import math
import types
from typing import Any

import numpy as np
import torch

from dpcompanion.accounting import (
    DEFAULT_ORDERS,
    compute_epsilon,
    rdp_sampled_gaussian,
    rdp_to_epsilon,
)
from dpcompanion.reproduction import intervals, published
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.common import Trace, rank, within_the_piece
from dpcompanion.training import Callbacks, DPSGDPlan, cross_entropy, gradient_norms, train

NAME = "per-instance-accounting"
DELTA = 1e-5
#: Appendix B: sample rate, noise multiplier and steps of the three settings.
SETTINGS = {
    "cifar10": (4000 / 50_000, 3.2, 2500),
    "mnist": (4000 / 60_000, 6.0, 1500),
    "utkface": (200 / 15_000, 1.5, 7500),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run of algorithm 1.

    `refreshes` is K; without a noise multiplier the run costs what the paper's on MNIST does.
    `looks` is how often all losses and norms are noted; `reference` examples have their norms taken
    at every step.
    """

    data: str = "mnist-5k"
    batch_size: int = 256
    epochs: int = 15
    noise_multiplier: float | None = None
    refreshes: float = 2.0
    clipping: str = "individual"
    median_multiple: float = 1.0
    learning_rate: float = 0.3
    reference: int = 250
    looks: int = 15
    dtype: str = "float64"

    def optimizer(self, parameters, limit, steps):
        """Plain SGD on gradients in units of the clip norm, at one learning rate: (optimizer,
        schedule of the learning rate or None).
        """
        return torch.optim.SGD(parameters, lr=self.learning_rate / limit), None


DIGITS = Setting()
MNIST = Setting(
    "mnist", 4000, 100, 6.0, learning_rate=2.0, reference=1000, looks=20, dtype="float32"
)


def as_published(sample_rate, noise_multipliers, counts):
    """Epsilon as the paper converts: at whole orders up to 256, by Mironov (2017), which is above
    ours by a tenth and more. One for each row of `counts`, (n, kinds), of steps of so many kinds.

    >>> as_published(4000 / 50_000, [3.2], [[2600]]).round(decimals=2)
    tensor([7.2500], dtype=torch.float64)
    """
    orders = torch.arange(2, 257, dtype=torch.float64)
    table = torch.stack(
        [
            rdp_sampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise, orders=orders)
            for noise in noise_multipliers
        ]
    )
    cost = torch.as_tensor(counts, dtype=torch.float64) @ table
    return rdp_to_epsilon(cost, orders, DELTA, conversion="mironov2017").epsilon


@dataclasses.dataclass(frozen=True)
class Study:
    """One setting and the seed of its run."""

    setting: Setting = DIGITS
    seed: int = 0


QUICK, PAPER = Study(), Study(MNIST)


@functools.cache
def worst_case(setting="mnist", accountant="rdp"):
    """The uniform epsilon of one of the paper's settings."""
    rate, noise, steps = SETTINGS[setting]
    return compute_epsilon(
        sample_rate=rate, noise_multiplier=noise, steps=steps, delta=DELTA, accountant=accountant
    )


def make_plan(setting, n, max_grad_norm):
    """The plan of a setting on n examples."""
    rate = setting.batch_size / n
    shape = {
        "n": n,
        "sample_rate": rate,
        "steps": setting.epochs * round(1 / rate),
        "max_grad_norm": max_grad_norm,
        "delta": DELTA,
    }
    if setting.noise_multiplier is None:
        return DPSGDPlan.for_epsilon(worst_case(), **shape, accountant="rdp")
    return DPSGDPlan(noise_multiplier=setting.noise_multiplier, accountant="rdp", **shape)


def run_setting(setting, seed, device):
    """Train one run; values and arrays of what all exhibits read."""
    found = second.examples(setting.data, setting.dtype)
    name = getattr(setting, "model", "mlp")
    model = second.build(name, found, seed).to(device)
    x, y = found.x.to(device), found.y.to(device)
    at_once = second.microbatch_size(device, name)

    def norms_of_all():
        return gradient_norms(model, cross_entropy, x, y, microbatch_size=at_once)

    limit = setting.median_multiple * float(norms_of_all().median())
    plan = make_plan(setting, len(y), limit)
    chosen = np.random.RandomState(seed).permutation(len(y))[: setting.reference]
    some = torch.as_tensor(chosen)
    whole, *reference = second.trackers_of(
        setting, plan, model, cross_entropy, (x, y), some, running=True, device=device
    )
    trace = Trace("norms", "losses")

    def look(run):
        done = round(run.step / plan.steps_per_epoch)
        if done * setting.looks // setting.epochs > (done - 1) * setting.looks // setting.epochs:
            trace["norms"].append(norms_of_all().cpu())
            trace["losses"].append(second.outcome(model, cross_entropy, x, y)[0].cpu())

    optimizer, scheduler = setting.optimizer(model.parameters(), limit, plan.steps)
    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=optimizer,
        seed=seed,
        trackers=[whole, *reference],
        microbatch_size=at_once,
        callbacks=Callbacks(
            on_epoch=look, on_step=(lambda _: scheduler.step()) if scheduler else None
        ),
        checkpoint=within_the_piece(looks=trace, scheduler=scheduler),
    )
    test_losses, right = second.outcome(
        model, cross_entropy, found.test_x.to(device), found.test_y.to(device)
    )
    losses, norms = np.stack(trace["losses"]), np.stack(trace["norms"])
    account: Any = whole.accountant.ledger_entry().account  # of one run, at noise of each level
    noise = [kind.noise_multiplier for kind in account.kinds]
    quintiles = np.array_split(norms.mean(0).argsort(), 5)
    arrays = {
        "epsilon": whole.estimated_epsilon(DELTA).cpu().numpy(),
        "published_epsilon": as_published(plan.sample_rate, noise, account.counts).numpy(),
        "reference": chosen,
        "actual": reference[0].estimated_epsilon(DELTA).cpu().numpy() if reference else np.zeros(0),
        "mean_loss": losses.mean(0),
        "last_loss": losses[-1],
        "test_losses": test_losses.cpu().numpy(),
        "quintiles": np.stack([norms[:, part].mean(1) for part in quintiles]) / limit,
    }
    return {
        "accuracy": float(right.double().mean()),
        "max_grad_norm": limit,
        "passes": whole.passes,
    }, arrays


def trained(setting, seed, run):
    """The run of a setting with a seed: computed once, kept in the data folder if it takes long."""
    found = second.examples(setting.data, setting.dtype)
    run.note(found.provenance)
    plan = make_plan(setting, len(found.y), 1.0)
    done = run.keep(
        lambda _: run_setting(setting, seed, run.device),
        [f"seed-{seed}"],
        config={"setting": setting},
        seconds=second.seconds(len(found.y), plan.steps),
        under=f"runs/{NAME}-{setting.data}",
        label=setting.data,
    )
    values, arrays = done[f"seed-{seed}"]
    plan = dataclasses.replace(plan, max_grad_norm=values["max_grad_norm"])
    return types.SimpleNamespace(
        plan=plan, found=found, worst_case=plan.epsilon(accountant="rdp"), **values, **arrays
    )


def by_class(found, values):
    """Means of the training examples' values by class."""
    return np.array(
        [values[found.groups.numpy() == group].mean() for group in range(len(found.names))]
    )


def label(record, setting=None):
    """Which data, network and part of the training a record, or one of its settings, is of."""
    setting = setting or record.config["setting"]
    data = {
        "mnist": "MNIST",
        "cifar10": "CIFAR-10",
        "utkface-age": "UTKFace, age",
        "utkface-gender": "UTKFace, gender",
    }.get(setting["data"], "digits")
    words = [data, "ResNet-20"] if setting.get("model") == "resnet20" else [data]
    shortened = published.exhibit(record.name).shortened
    if shortened:
        words.append(shortened.partition(" of ResNet-20")[0])
    return ", ".join(words)


def plain_epsilon(record, setting=None, n=None, accountant="pld"):
    """The uniform epsilon of the run of a record, or of one of its settings, on `n` examples.

    One example's gradients or zeros in their place, Poisson sampling, delta 1e-5. By default `n` is
    the record's.
    """
    if n is None:
        n = next(entry["examples"] for entry in record.data if entry["split"] == "train")
    setting = types.SimpleNamespace(**(setting or record.config["setting"]))
    return make_plan(setting, n, 1.0).epsilon(accountant=accountant)


#: How far `converted` may be off: on MNIST, where a record has both conversions, by 0.8% at most.
CONVERSION_ERROR = 0.01


@functools.cache
def _conversions(sample_rate, noise_multiplier, steps):
    """Epsilons of examples whose norm is constant, 0.02 C to C: ours, and as the paper converts."""
    shares = np.arange(2, 101) / 100
    levels = (noise_multiplier / shares).tolist()
    orders = torch.as_tensor(DEFAULT_ORDERS, dtype=torch.float64)
    costs = [
        rdp_sampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise, orders=orders)
        for noise in levels
    ]
    ours = [float(rdp_to_epsilon(steps * cost, orders, DELTA).epsilon) for cost in costs]
    return np.array(ours), as_published(sample_rate, levels, steps * np.eye(len(levels))).numpy()


def converted(record, epsilon, setting=None, *, back=False):
    """About what epsilons of a record are as the paper converts, or `back`: records have no RDP
    curves, so each example's norm is taken to be constant over training; see `CONVERSION_ERROR`.
    """
    n = next(entry["examples"] for entry in record.data if entry["split"] == "train")
    setting = types.SimpleNamespace(**(setting or record.config["setting"]))
    plan = make_plan(setting, n, 1.0)
    ours, theirs = _conversions(plan.sample_rate, plan.noise_multiplier, plan.steps)
    return np.interp(epsilon, *((theirs, ours) if back else (ours, theirs)))


def near_the_print(record, epsilon, printed):
    """Our epsilon as the paper converts, an interval by the error of `converted`; and whether it
    is within a tenth of what was printed, before it was rounded.
    """
    about = float(converted(record, epsilon))
    found = intervals.Interval(
        about, about * (1 - CONVERSION_ERROR), about * (1 + CONVERSION_ERROR)
    )
    return found, intervals.every(
        found.at_least(0.9 * (printed - printed.rounding)),
        found.at_most(1.1 * (printed + printed.rounding)),
    )


@functools.cache
def printed_limit():
    """From which share of the worst case on an epsilon has reached it, as the paper counts: it says
    that 30% do on CIFAR-10, and its Table 3 has the 0.7 quantile. The worst case is that of
    200 epochs of 13 batches.
    """
    rate, noise, _ = SETTINGS["cifar10"]
    quantile = float(published.exhibit(f"{NAME}/table-3")["non_private.q70"])
    return quantile / float(as_published(rate, [noise], [[200 * 13]]))


def reached(record):
    """The interval of the share of examples that reach the worst case by `printed_limit`. The ends
    leave out, and count, the bin of the histogram that holds the limit.
    """
    counts, top = np.asarray(record.arrays["histogram"]), record.values["worst_case"]
    limit = converted(record, printed_limit() * converted(record, top), back=True) / top
    at, n = float(limit) * len(counts), int(counts.sum())
    edge = math.floor(at)
    above = int(counts[edge + 1 :].sum())
    return intervals.Interval(
        float(above + counts[edge] * (edge + 1 - at)) / n,
        intervals.share(above, n).low,
        intervals.share(above + int(counts[edge]), n).high,
    )


def of_examples(record, share):
    """The interval of a share of the training examples."""
    n = next(entry["examples"] for entry in record.data if entry["split"] == "train")
    return intervals.share(round(share * n), n)


def groups(config, run):
    """Loss and epsilon by class."""
    found = trained(config.setting, config.seed, run)
    loss, mean_loss, epsilon = (
        by_class(found.found, values)
        for values in (found.last_loss, found.mean_loss, found.epsilon)
    )
    values = {
        "last_loss": loss,
        "mean_loss": mean_loss,
        "epsilon": epsilon,
        "rank_correlation": rank(loss, epsilon),
        "highest": epsilon[loss.argmax()],
        "lowest": epsilon[loss.argmin()],
    }
    if config.setting.data == "cifar10":  # as figure 6 prints them
        values |= {f"cifar10.{name}": each for name, each in zip(found.found.names, epsilon)}
    return values
