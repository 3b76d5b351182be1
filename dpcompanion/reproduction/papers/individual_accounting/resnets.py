"""ResNet-20 on MNIST for all 100 epochs, and on CIFAR-10 for 10 of them or all: parts of exhibits
recorded for a smaller network.

On MNIST all is as in the paper but for how often norms are measured: those of all examples once in
two epochs, those of 200 at every step. Eleven minutes of a GPU, or about seven hours of one core.

In figures 1, 2, 4, 5, 11 and table 2 the paper's network for CIFAR-10 is WRN16-4. Here one run of
ResNet-20 serves all: not the first tenth of a run, but ten epochs with the noise that makes them
cost its largest epsilon, 7.8; about one and a half hours of one core. Norms are refreshed once in
two epochs, those of 200 examples at every step. The learning rate, 0.02, is ours, since the paper
prints none; at 0.1 the loss rose at first.

Figure 3 is of ResNet-20 in the paper, too, and `figure-3-whole` is of all hundred epochs, about
eight hours of one core: of norms it needs no more than the medians of a sample by class, after each
epoch. The learning rate is 0.1, as on MNIST.
"""

import dataclasses

from dpcompanion.reproduction.experiments import ask_also, experiment, finding
from dpcompanion.reproduction.papers.common import named, runnable
from dpcompanion.reproduction.papers.individual_accounting.accounts import (
    Repeated,
    figure_1,
    figure_2,
    figure_3,
    figure_5,
    figure_6,
)
from dpcompanion.reproduction.papers.individual_accounting.estimates import Estimates, figure_4
from dpcompanion.reproduction.papers.individual_accounting.membership import private_models_resist
from dpcompanion.reproduction.papers.individual_accounting.releases import Release, table_2
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CIFAR10_RESNET,
    MNIST,
    NAME,
    trained,
)
from dpcompanion.reproduction.papers.yu import LABELS, Study, attacked

#: The task, and what readers call it.
RESNET = "cifar10_resnet20"
LABELS[RESNET] = "CIFAR-10, ResNet-20, 10 epochs"
SHORT = dataclasses.replace(
    CIFAR10_RESNET, epochs=10, learning_rate=0.02, refreshes=0.5, reference=200, needs=""
)


@dataclasses.dataclass(frozen=True)
class Attack(Study):
    """Figure 11, the half with DP: how often to draw who is attacked."""

    draws: int = 20


WHOLE = dataclasses.replace(CIFAR10_RESNET, refreshes=0, needs="")
MNIST_RESNET = dataclasses.replace(MNIST, refreshes=0.5, reference=200, needs="")
_MNIST = {"mnist": MNIST_RESNET}
_TASKS = {RESNET: SHORT}
for _part, _function, _config in (
    ("figure-1-mnist", figure_1, Study(_MNIST)),
    ("figure-4-mnist", figure_4, Estimates(_MNIST)),
    ("table-2-mnist", table_2, Release(_MNIST)),
    ("figure-5-mnist", figure_5, Study(_MNIST)),
    ("figure-6-mnist", figure_6, Repeated(_MNIST, seeds=(0,))),
    ("figure-1-resnet20", figure_1, Study(_TASKS)),
    ("figure-2-resnet20", figure_2, Study(_TASKS)),
    ("figure-3-whole", figure_3, Study({"cifar10": WHOLE})),
    ("figure-4-resnet20", figure_4, Estimates(_TASKS)),
    ("table-2-resnet20", table_2, Release(_TASKS)),
    ("figure-5-resnet20", figure_5, Study(_TASKS)),
):
    experiment(f"{NAME}/{_part}", paper=_config)(_function)
    # What is found on the stand-in is asked of the paper's network, too.
    ask_also(f"{NAME}/{_part.rpartition('-')[0]}", of=f"{NAME}/{_part}")


@experiment(f"{NAME}/figure-11-resnet20", paper=Attack(_TASKS))
def figure_11_with_dp(config, run):
    """Success of the loss attack on each group of a DP model, beside its mean epsilon."""
    values = {}
    for name, task in runnable(config, run).items():
        found = trained(task, config.seed, run)
        values |= named(
            name,
            mean_epsilon=found.by_group(found.epsilon()),
            training_accuracy=found.right.mean(),
            test_accuracy=found.accuracy,
        )
        values |= named(
            f"{name}.private", **attacked(found.found, found.losses, found.test_losses, config)
        )
    return values


finding(
    f"{NAME}/figure-11",
    "with DP, the success on every group lies within five points of one half",
    of=f"{NAME}/figure-11-resnet20",
)(private_models_resist)
