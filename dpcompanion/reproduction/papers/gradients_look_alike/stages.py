"""Points at three stages of one run: figures 2, 3, 7 and 9."""

import dataclasses
import math
import types

import torch

from dpcompanion.per_instance import coupled_epsilon, holder_epsilon
from dpcompanion.reproduction import intervals
from dpcompanion.reproduction.experiments import experiment, finding
from dpcompanion.reproduction.papers.common import left_out, runnable
from dpcompanion.reproduction.papers.gradients_look_alike.costs import varied
from dpcompanion.reproduction.papers.gradients_look_alike.runs import (
    CIFAR10,
    DIGITS,
    MNIST,
    PLAIN_DIGITS,
    PLAIN_MNIST,
    STAGES,
    Watch,
    WatchMore,
    claim_by_network,
    mean_of,
    plan_of,
    points_of,
    stages_of,
    watched,
    worst_case,
)


def step_epsilon(norms, plan):
    """Epsilon of one step of clipped gradients of these norms at the run's delta: the sampled
    Gaussian mechanism's own.

    A single step is mostly covered by delta alone; what is left are the points that a step can give
    away. An epsilon by RDP would end at a floor of its own, far above that of most points.
    """
    return coupled_epsilon(
        norms[None], sample_rate=plan.sample_rate, noise_std=plan.noise_std, delta=plan.delta
    )


_BATCHES = {
    f"batch {size}": varied(CIFAR10, batch_size=size, runs=1) for size in (32, 64, 256, 512)
}
FIGURE_2 = Watch({"batch 128": varied(CIFAR10, runs=1), **_BATCHES})
FIGURE_2_QUICK = Watch(
    {
        "batch 128": DIGITS,
        "batch 64": varied(PLAIN_DIGITS, batch_size=64),
        "batch 512": varied(PLAIN_DIGITS, batch_size=512),
    }
)


@experiment("gradients-look-alike/figure-2", quick=FIGURE_2_QUICK, paper=FIGURE_2)
def figure_2(config, run):
    """A step's costs over the data-independent one: quantiles at three stages, and its epsilon."""
    values, arrays = {}, {}
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    for name, task in config.tasks.items():
        found = watched(task, run)
        share, _ = stages_of(found, config.order)
        epsilon = step_epsilon(found.norms[0, found.stages], found.plan)
        values[f"{name}.worst_case.epsilon"] = step_epsilon(
            torch.full((1,), task.max_grad_norm, dtype=torch.float64), found.plan
        )[0]
        for stage, costs, eps in zip(STAGES, share, epsilon):
            values |= {
                f"{name}.{stage}.share": costs.quantile(quantiles),
                f"{name}.{stage}.below_tenth": (costs < 0.1).double().mean(),
                f"{name}.{stage}.below_thousandth": (costs < 1e-3).double().mean(),
                f"{name}.{stage}.epsilon": eps.quantile(quantiles),
            }
        arrays[f"{name}.share"] = share.numpy()
    return values, arrays


def _in_the_tail(record, name, stage):
    """The share of points below a thousandth, of training points and as many test points."""
    n = 2 * points_of(record, name)
    return intervals.share(round(record.values[f"{name}.{stage}.below_thousandth"] * n), n)


def _growth(record, since):
    for name in record.config["tasks"]:
        first, last = (_in_the_tail(record, name, stage) for stage in (since, "final"))
        yield name, f"{first.estimate:.0%} to {last.estimate:.0%}", (last - first).above(0)


@finding(
    "gradients-look-alike/figure-2",
    "more points cost less than a thousandth of the data-independent step at the end than at the "
    "start",
)
def _tail_grows(record):
    return _growth(record, "initial")


# "such improvements mostly exist in the later half of the training process"
@finding(
    "gradients-look-alike/figure-2",
    "more points cost less than a thousandth of the data-independent step at the end than in the "
    "middle",
)
def _tail_grows_in_the_later_half(record):
    return _growth(record, "middle")


@finding(
    "gradients-look-alike/figure-2",
    "most of the tail of the end comes in the later half: in the middle less than half as many "
    "points cost less than a thousandth of the data-independent step",
    kind="own",  # a stricter reading of the same words
)
def _most_of_the_tail_comes_late(record):
    for name in record.config["tasks"]:
        middle, last = (_in_the_tail(record, name, stage) for stage in ("middle", "final"))
        yield (
            name,
            f"{middle.estimate:.1%} against {last.estimate:.1%}",
            (middle - last * 0.5).below(0),
        )


@finding(
    "gradients-look-alike/figure-2",
    "at the final stage, a tenth of the points or more cost less than a thousandth of the "
    "data-independent step",
    kind="own",  # our reading of the paper's "long tail", which names no share
)
def _tail_at_the_end(record):
    for name in record.config["tasks"]:
        share = _in_the_tail(record, name, "final")
        yield name, f"{share:.0%}", share.at_least(0.1)


def correct_and_not(found, order):
    """{stage: {"correct" or "incorrect": (points, mean share, median share, mean epsilon)}}."""
    share, correct = stages_of(found, order)
    epsilon = step_epsilon(found.norms[0, found.stages], found.plan)
    table = {}
    for stage, costs, right, eps in zip(STAGES, share, correct, epsilon):
        for word, chosen in (("correct", right), ("incorrect", ~right)):
            some = bool(chosen.any())
            table[f"{stage}.{word}.points"] = int(chosen.sum())
            table[f"{stage}.{word}.mean"] = costs[chosen].mean() if some else math.nan
            table[f"{stage}.{word}.median"] = costs[chosen].median() if some else math.nan
            table[f"{stage}.{word}.epsilon"] = eps[chosen].mean() if some else math.nan
    return table


def _means(record, name, stage):
    """Intervals of the mean shares of correct and of incorrect points."""
    return [
        mean_of(record.values[f"{row}.mean"], record.values[f"{row}.points"])
        for row in (f"{name}.{stage}.{word}" for word in ("correct", "incorrect"))
    ]


def _correct_more_private(record, names):
    for name in names:
        for stage in STAGES:
            right, wrong = _means(record, name, stage)
            yield f"{name}, {stage}", f"{right:.2f} against {wrong:.2f}", (wrong - right).above(0)


def _gap_largest_at_the_end(record, names):
    for name in names:
        gaps = {
            stage: wrong - right
            for stage, (right, wrong) in ((stage, _means(record, name, stage)) for stage in STAGES)
        }
        for stage in STAGES[:-1]:
            yield (
                f"{name}, {stage}",
                f"{gaps['final'].estimate:.2f} at the end against {gaps[stage].estimate:.2f}",
                (gaps["final"] - gaps[stage]).above(0),
            )


LONG = {"ResNet-20, CIFAR-10": varied(CIFAR10, runs=1)}


@experiment(
    "gradients-look-alike/figure-3",
    quick=WatchMore({"LeNet-5": DIGITS}),
    paper=WatchMore(LONG),  # the run that the others wait for; its state is kept after every epoch
)
def figure_3(config, run):
    """Costs of one step over the data-independent one, of points that are classified correctly and
    of the others.
    """
    return left_out(config, run) | {
        f"{name}.{key}": value
        for name, task in runnable(config, run).items()
        for key, value in correct_and_not(watched(task, run), config.order).items()
    }


FIGURE_7 = WatchMore(
    {"LeNet-5": varied(MNIST, runs=1), "softmax regression": varied(PLAIN_MNIST, runs=1), **LONG}
)
FIGURE_7_QUICK = WatchMore({"LeNet-5": DIGITS, "softmax regression": PLAIN_DIGITS})


@experiment("gradients-look-alike/figure-7", quick=FIGURE_7_QUICK, paper=FIGURE_7)
def figure_7(config, run):
    """As figure 3, on digits, for several networks."""
    return figure_3(config, run)


def _on_digits(judge):
    """The same of the tasks on MNIST alone."""

    def some(record, names):
        tasks = record.config["tasks"]
        return judge(record, [name for name in names if tasks[name]["data"].startswith("mnist")])

    return some


# Section 4.1 says both of CIFAR-10, in figure 3, and of MNIST, in figure 7.
for _name, _of in (("figure-3", lambda judge: judge), ("figure-7", _on_digits)):
    claim_by_network(
        f"gradients-look-alike/{_name}",
        "at the start, in the middle and at the end, correct points cost less on average than "
        "incorrect ones",
    )(_of(_correct_more_private))
    claim_by_network(
        f"gradients-look-alike/{_name}",
        "the gap between the means of incorrect and correct points is larger at the end than at "
        "the start and in the middle",
    )(_of(_gap_largest_at_the_end))


@claim_by_network(
    "gradients-look-alike/figure-7",
    "in the middle and at the end, correct points cost less on average than the data-independent "
    "step",
)
def _correct_below_the_baseline(record, names):
    for name in names:
        for stage in STAGES[1:]:
            right, _ = _means(record, name, stage)
            mean, median = (
                record.values[f"{name}.{stage}.correct.{key}"] for key in ("mean", "median")
            )
            yield f"{name}, {stage}", f"{mean:.2f}, median {median:.2g}", right.below(1)


@dataclasses.dataclass(frozen=True)
class Corollary(WatchMore):
    """Figure 9: the exponent p of the paper's code, others of which the best is taken, and the
    delta of the step.
    """

    p: float = 1e4
    others: tuple = (3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5, 1e6)


@experiment(
    "gradients-look-alike/figure-9",
    quick=Corollary(FIGURE_7_QUICK.tasks),
    paper=Corollary(FIGURE_7.tasks),
)
def figure_9(config, run):
    """Epsilon of one step at delta 1e-5 by corollary 3.1, corrected, for the sum.

    Means over correct and over incorrect points.

    `paper_p` at the paper's p, `best_p` at the best of several, `exact` the sampled Gaussian
    mechanism's own epsilon; `worst_case` for a gradient as long as the clip norm.
    """
    values = left_out(config, run)
    for name, task in runnable(config, run).items():
        found = watched(task, run)
        norms, correct = found.norms[0, found.stages], found.correct[0, found.stages]
        step = {
            "sample_rate": found.plan.sample_rate,
            "noise_std": found.plan.noise_std,
            "delta": task.delta,
        }

        def three(norms):
            return {
                "paper_p": holder_epsilon(norms[None], p=config.p, **step),
                "best_p": holder_epsilon(norms[None], p=config.others, **step),
                "exact": coupled_epsilon(norms[None], **step),
            }

        values |= {
            f"{name}.worst_case.{key}": value
            for key, value in three(torch.tensor(task.max_grad_norm, dtype=torch.float64)).items()
        }
        for kind, epsilon in three(norms).items():
            for stage, eps, right in zip(STAGES, epsilon, correct):
                for word, chosen in (("correct", right), ("incorrect", ~right)):
                    values[f"{name}.{stage}.{word}.points"] = int(chosen.sum())
                    values[f"{name}.{stage}.{word}.{kind}"] = (
                        eps[chosen].mean() if chosen.any() else math.nan
                    )
                values[f"{name}.{stage}.{kind}_at_most"] = eps.max()
    return values


def classical_epsilon(plan, delta):
    r"""Epsilon of one step of the sampled Gaussian mechanism by the formula of section 3.1.

    From :math:`\delta_G`, the delta of the Gaussian mechanism alone, it is
    :math:`\ln(q e^{C_{\delta_G, \sigma} C} + 1 - q)` at `delta` = :math:`q \delta_G`, with
    :math:`C_{\delta_G, \sigma} = \sqrt{2 \ln(1.25 / \delta_G)} / \sigma`. The constant is proved
    where :math:`C_{\delta_G, \sigma} C` is below 1; the paper's settings lie above.
    """
    rate = plan.sample_rate
    exponent = math.sqrt(2 * math.log(1.25 * rate / delta)) / plan.noise_multiplier
    return math.log(rate * math.exp(exponent) + 1 - rate)


def baselines(record, name):
    """Data-independent epsilons of a step of a task that may be figure 9's baseline, by name."""
    task = types.SimpleNamespace(**record.config["tasks"][name])
    (examples,) = (
        entry["examples"]
        for entry in record.data
        if entry["split"] == "train" and entry["name"] == task.data
    )
    plan = plan_of(task, examples)
    return {
        "exact": record.values[f"{name}.worst_case.exact"],
        "by RDP": float(worst_case(dataclasses.replace(plan, steps=1))[0]),
        "classical": classical_epsilon(plan, task.delta),
        # At a delta of q times the run's: that of the Gaussian mechanism alone is the run's.
        "classical, smaller delta": classical_epsilon(plan, plan.sample_rate * task.delta),
    }


@claim_by_network(
    "gradients-look-alike/figure-9",
    "in all settings the mean lies below the data-independent epsilon of a step: the exact one, by "
    "RDP, and by the classical formula of section 3.1, at the same delta and at q times it",
)
def _below_the_baseline(record, names):
    """The paper prints no value of its baseline, and no delta: where the candidates disagree, the
    claim is open.
    """
    for name in names:
        found = baselines(record, name)
        highest = max(
            record.values[f"{name}.{stage}.{word}.paper_p"]
            for stage in STAGES
            for word in ("correct", "incorrect")
        )
        below = {highest < baseline for baseline in found.values()}
        yield (
            name,
            f"{highest:.2f} of " + ", ".join(f"{value:.2f}" for value in found.values()),
            below.pop() if len(below) == 1 else "undecided",
        )


@claim_by_network(
    "gradients-look-alike/figure-9",
    "in the middle and at the end correct points lie below incorrect ones",
)
def _corollary_better(record, names):
    for name in names:
        for stage in STAGES[1:]:
            right, wrong = (
                _mean_epsilon(record, name, f"{stage}.{word}") for word in ("correct", "incorrect")
            )
            yield f"{name}, {stage}", f"{right:.2f} against {wrong:.2f}", (wrong - right).above(0)


def _mean_epsilon(record, name, which):
    """The mean epsilon of some points at the paper's p, of which none lies above the worst case."""
    mean, top = (record.values[f"{name}.{key}.paper_p"] for key in (which, "worst_case"))
    points = record.values.get(f"{name}.{which}.points")  # older records do not say how many
    return intervals.unknown(mean) if points is None else mean_of(mean / top, points) * top
