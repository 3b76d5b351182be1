"""What one run of ResNet-20 on CIFAR-10 gives of figures 2, 4 and 6.

Figure 3 trains the run, and figures 7 and 9 read it as well. Of the other three it is a part: one
batch size of five of figure 2, one run of ten of figure 6, and of figure 4 a hundred points and two
batch sizes.
"""

from dpcompanion.reproduction.experiments import ask_also, experiment
from dpcompanion.reproduction.papers.gradients_look_alike.costs import figure_6
from dpcompanion.reproduction.papers.gradients_look_alike.mean_updates import Means, figure_4
from dpcompanion.reproduction.papers.gradients_look_alike.runs import Watch, WatchMore
from dpcompanion.reproduction.papers.gradients_look_alike.stages import LONG, figure_2

_NAME = "gradients-look-alike"

for _exhibit, _function, _config, _asked in (
    ("figure-2", figure_2, Watch(LONG), {"figure-2": "figure-2"}),
    # Batches and tuples as in the paper; 500 points and five sizes would take hours.
    (
        "figure-4",
        figure_4,
        Means(LONG, batch_sizes=(32, 128), pool=20, shown=100),
        {"figure-4": "figure-4", "theorem-3.6": "theorem-3.6"},
    ),
    ("figure-6", figure_6, WatchMore(LONG), {"figure-6": "figure-6"}),
):
    experiment(f"{_NAME}/{_exhibit}-resnet20", paper=_config)(_function)
    # What is found on digits is asked of the paper's network, too: {whose criteria: which exhibit
    # they are for}.
    for _whose, _for in _asked.items():
        ask_also(f"{_NAME}/{_whose}", of=f"{_NAME}/{_exhibit}-resnet20", under=f"{_NAME}/{_for}")
