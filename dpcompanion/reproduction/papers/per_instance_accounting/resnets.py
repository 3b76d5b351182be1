"""The paper's network on its data: parts of exhibits whose own records are of a smaller network,
and what needs both.

ResNet-20 with the sample rates, noise multipliers and steps of appendix B; learning rates are not
printed. The run on CIFAR-10, which all exhibits that show it share, takes ten minutes of a GPU, and
half a day of one core; it has plain SGD. The one on MNIST, eight hours of two cores, has what the
public code of the second version trains with on CIFAR-10.

On the part of UTKFace that is at hand (gender) a short run stands in, 5 of 100 epochs, about half
an hour of one core, with the noise that makes so few epochs cost what the paper's do.
"""

import dataclasses

from dpcompanion.reproduction import intervals, records
from dpcompanion.reproduction.experiments import ask_also, experiment, finding
from dpcompanion.reproduction.papers import yu as second
from dpcompanion.reproduction.papers.common import histogram, named, rank
from dpcompanion.reproduction.papers.per_instance_accounting.accounts import (
    GROUPS,
    Estimates,
    figure_1,
    figure_2,
    figure_3,
    figure_5,
    figure_6,
    underserved,
)
from dpcompanion.reproduction.papers.per_instance_accounting.clipping import (
    Clippings,
    Release,
    Sweep,
    figure_8,
    table_1,
    table_2,
)
from dpcompanion.reproduction.papers.per_instance_accounting.membership import (
    FOLLOWS,
    Membership,
    figure_7,
    figures_9_10,
    private_models_resist,
    risk_follows,
    trained_without_privacy,
)
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    NAME,
    Setting,
    Study,
    by_class,
    label,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Resnet(Setting):
    """A run of algorithm 1 with ResNet-20."""

    model: str = "resnet20"


@dataclasses.dataclass(frozen=True)
class WithMomentum(Resnet):
    """The same, trained as the public code of the second version does: gradients are not divided by
    C, and the learning rate falls along a cosine.
    """

    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-3

    def optimizer(self, parameters, limit, steps):
        return second.sgd(
            parameters,
            self.learning_rate,
            steps,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            cosine=True,
        )


# K = 0, which figure 3 shows, too: with two full passes an epoch a run takes 2.5 times as long.
CIFAR10 = Resnet(
    "cifar10",
    4000,
    208,
    3.2,
    refreshes=0.0,
    learning_rate=2.0,
    reference=1000,
    looks=20,
    dtype="float32",
)
MNIST_RESNET = WithMomentum(
    "mnist", 4000, 100, 6.0, refreshes=0.0, reference=1000, looks=20, dtype="float32"
)
UTKFACE_GENDER = Resnet(
    "utkface-gender", 200, 100, 1.5, learning_rate=1.0, reference=1000, looks=20, dtype="float32"
)
UTKFACE_AGE = dataclasses.replace(UTKFACE_GENDER, data="utkface-age")


@dataclasses.dataclass(frozen=True)
class Several:
    """Settings by name, and the seed, or seeds, of their runs."""

    settings: dict
    seeds: tuple = (0,)


@experiment(f"{NAME}/figure-4", paper=Several({"gender": UTKFACE_GENDER, "age": UTKFACE_AGE}))
def figure_4(config, run):
    """Distribution of epsilon on UTKFace."""
    values, arrays = {}, {}
    for name, setting in config.settings.items():
        found = trained(setting, config.seeds[0], run)
        values |= named(
            name,
            worst_case=found.worst_case,
            max=found.epsilon.max(),
            min=found.epsilon.min(),
            mean=found.epsilon.mean(),
            accuracy=found.accuracy,
        )
        arrays[name] = histogram(found.epsilon, found.worst_case)
    return values, arrays


@experiment(f"{NAME}/text-worst-case-share", paper=Several({"cifar10": CIFAR10}))
@experiment(f"{NAME}/text-worst-case-share-mnist", paper=Several({"mnist": MNIST_RESNET}))
def text_worst_case_share(config, run):
    """The share of examples within 1% of the worst case."""
    values = {}
    for name, setting in config.settings.items():
        found = trained(setting, config.seeds[0], run)
        values[name] = (found.epsilon >= second.WORST * found.worst_case).mean()
    return values


def _without_looks(setting):
    return dataclasses.replace(setting, reference=0, looks=1)


@experiment(
    f"{NAME}/table-1-resnet20",
    paper=Several(
        {"cifar10": _without_looks(CIFAR10), "mnist": _without_looks(MNIST_RESNET)},
        seeds=(0, 1, 2, 3),
    ),
)
def table_1_resnet20(config, run):
    """Table 1 on both data sets."""
    return {
        f"{name}.{key}": value
        for name, setting in config.settings.items()
        for key, value in table_1(Clippings(setting, config.seeds), run).items()
    }


experiment(f"{NAME}/table-3", paper=Release(CIFAR10))(table_2)
ask_also(f"{NAME}/table-2", of=f"{NAME}/table-3", under=f"{NAME}/table-3")


@dataclasses.dataclass(frozen=True)
class WithDP(Study):
    """Figure 7, the half with DP: how often to draw who is attacked."""

    draws: int = 20


@experiment(f"{NAME}/figure-7-private", paper=WithDP(CIFAR10))
def figure_7_with_dp(config, run):
    """Success of the loss attack on each class of a DP model, beside its mean epsilon."""
    found = trained(config.setting, config.seed, run)
    attacked = second.attacked(found.found, found.last_loss, found.test_losses, config)
    return {"epsilon": by_class(found.found, found.epsilon), **named("private", **attacked)}


finding(
    f"{NAME}/figure-7",
    "with DP, the success on every class lies within five points of one half",
    of=f"{NAME}/figure-7-private",
)(private_models_resist)

_OVERFIT = second.Membership(tasks={})


@dataclasses.dataclass(frozen=True)
class WithoutDP(WithDP):
    """Figure 7, the half without DP: how to train."""

    overfit: second.Membership = _OVERFIT


@experiment(f"{NAME}/figure-7-nonprivate", paper=WithoutDP(CIFAR10))
def figure_7_without_dp(config, run):
    """Success of the loss attack on each class of a model without privacy; its rank correlation
    with the mean epsilons under DP, of the record of `figure_7_with_dp`.
    """
    private = records.find(f"{NAME}/figure-7-private")
    if private is None:
        raise ValueError(
            f"{NAME}/figure-7-private must be run before: its epsilons are compared with"
        )
    found = second.examples(config.setting.data, config.setting.dtype)
    run.note(found.provenance)
    accuracies, losses = trained_without_privacy(config, run)
    attacked = second.attacked(found, losses["losses"], losses["test_losses"], config)
    return {
        **accuracies,
        **named("nonprivate", **attacked),
        **named("cifar10_nonprivate", **dict(zip(found.names, attacked["success"]))),
        "rank_correlation": rank(private.values["epsilon"], attacked["success"]),
    }


finding(f"{NAME}/figure-7", FOLLOWS, of=f"{NAME}/figure-7-nonprivate")(risk_follows)
for _exhibit, _function, _config in (
    ("figure-1", figure_1, Study(CIFAR10)),
    ("figure-2", figure_2, Study(CIFAR10)),
    ("figure-3", figure_3, Estimates(CIFAR10, refreshes=(CIFAR10.refreshes,))),
    ("figure-5", figure_5, Study(CIFAR10)),
    ("figure-6", figure_6, Study(CIFAR10)),
    ("figure-8", figure_8, Sweep(_without_looks(CIFAR10))),
    ("table-2", table_2, Release(MNIST_RESNET)),
    ("figures-9-10", figures_9_10, Membership(UTKFACE_AGE, overfit=_OVERFIT)),
):
    experiment(f"{NAME}/{_exhibit}-resnet20", paper=_config)(_function)
    # What is found on the stand-in is asked of the paper's network, too.
    ask_also(f"{NAME}/{_exhibit}", of=f"{NAME}/{_exhibit}-resnet20")

for _exhibit, _function, _config in (
    ("figure-1", figure_1, Study(MNIST_RESNET)),
    ("figure-3", figure_3, Estimates(MNIST_RESNET, refreshes=(MNIST_RESNET.refreshes,))),
    ("figure-5", figure_5, Study(MNIST_RESNET)),
):
    experiment(f"{NAME}/{_exhibit}-mnist", paper=_config)(_function)
    ask_also(f"{NAME}/{_exhibit}", of=f"{NAME}/{_exhibit}-mnist")

experiment(f"{NAME}/figures-9-10-mnist", paper=Study(MNIST_RESNET))(figure_6)
finding(f"{NAME}/figures-9-10", GROUPS, of=f"{NAME}/figures-9-10-mnist")(underserved)

for _exhibit, _function, _config in (
    ("figure-3", figure_3, Estimates(UTKFACE_GENDER)),
    ("figure-6", figure_6, Study(UTKFACE_GENDER)),
    ("figure-7", figure_7, Membership(UTKFACE_GENDER, overfit=_OVERFIT)),
):
    experiment(f"{NAME}/{_exhibit}-utkface", paper=_config)(_function)
    ask_also(f"{NAME}/{_exhibit}", of=f"{NAME}/{_exhibit}-utkface")


UTKFACE_SHORT = Resnet(
    "utkface-gender",
    200,
    5,
    0.893,
    refreshes=0.4,
    learning_rate=0.2,
    reference=200,
    looks=2,
    dtype="float32",
)

experiment(f"{NAME}/figure-4-short", paper=Several({"gender": UTKFACE_SHORT}))(figure_4)


@finding(
    f"{NAME}/figure-4",
    "the largest epsilon is at least ten times the smallest",
    of=f"{NAME}/figure-4-short",
)
def epsilons_spread(record):
    for name, setting in record.config["settings"].items():
        least, most = (record.values[f"{name}.{key}"] for key in ("min", "max"))
        yield (
            label(record, setting),
            f"{least:.1f} to {most:.1f}",
            intervals.unknown(most / least).at_least(10),
        )
