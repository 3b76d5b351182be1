"""ResNet-20 on CIFAR-10 for 6 of 200 epochs: what such a run gives of figures 2, 3, 4, 6, 7 and 9.

The paper's network, data, batch size and points; not the beginning of its run, but six epochs with
the noise that makes them cost its epsilon, 10, and with a learning rate that falls at half time and
at five sixths (the paper's at half time and three quarters). About an hour of one core.
"""

import dataclasses

from dpcompanion.reproduction.experiments import ask_also, experiment
from dpcompanion.reproduction.papers.gradients_look_alike.costs import figure_6
from dpcompanion.reproduction.papers.gradients_look_alike.mean_updates import Means, figure_4
from dpcompanion.reproduction.papers.gradients_look_alike.runs import CIFAR10, Watch, WatchMore
from dpcompanion.reproduction.papers.gradients_look_alike.stages import (
    Corollary,
    figure_2,
    figure_3,
    figure_9,
)

_NAME = "gradients-look-alike"
RESNET = "ResNet-20, CIFAR-10, 6 of 200 epochs"
SHORT = dataclasses.replace(CIFAR10, epochs=6, drops=(3, 5), runs=1, points=500, stops=10)

_TASKS = {RESNET: SHORT}
for _exhibit, _function, _config, _asked in (
    ("figure-2", figure_2, Watch(_TASKS), {"figure-2": "figure-2"}),
    # Figure 7 shows the same for other networks; on CIFAR-10 it is figure 3.
    ("figure-3", figure_3, WatchMore(_TASKS), {"figure-3": "figure-3", "figure-7": "figure-7"}),
    # Batches and tuples as in the paper; 500 points and five sizes would take hours.
    (
        "figure-4",
        figure_4,
        Means(_TASKS, batch_sizes=(32, 128), pool=20, shown=100),
        {"figure-4": "figure-4", "figure-8": "figure-4", "theorem-3.6": "theorem-3.6"},
    ),
    ("figure-6", figure_6, WatchMore(_TASKS), {"figure-6": "figure-6"}),
    ("figure-9", figure_9, Corollary(_TASKS), {"figure-9": "figure-9"}),
):
    experiment(f"{_NAME}/{_exhibit}-resnet20", paper=_config)(_function)
    # What is found on digits is asked of the paper's network, too: {whose criteria: which exhibit
    # they are for}.
    for _whose, _for in _asked.items():
        ask_also(f"{_NAME}/{_whose}", of=f"{_NAME}/{_exhibit}-resnet20", under=f"{_NAME}/{_for}")
