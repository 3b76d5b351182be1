r"""Exhibits of Yu et al. 2023, "Individual privacy accounting for DP-SGD".

One run of DP-SGD serves many exhibits, so a run is trained once and leaves what they all read:
norms of all examples at each full-batch pass, those of some reference examples at every step, final
losses, who was right. Runs that take long are kept in the data folder, where an interrupted study
goes on.

Accounts are by RDP at delta 1e-5, norms rounded up to multiples of C / 100, add or remove, Poisson
sampling, unless a value's name says otherwise. With the maximum clip norm they are estimates (norms
may grow between two passes), with individual clipping they are exact along the realised trajectory.

Where our runs differ from the paper's: batches are Poisson draws; MNIST on a CPU is learned by a
two-layer CNN, once for 20 epochs and for 4 or 2 where settings are compared, with the noise that
makes these the paper's largest epsilon, 2.4; the learning rate is divided by C, so that a sweep of
C changes what is clipped and not how far a step goes. The paper's own models are tasks that need a
GPU; without one they are left out, and the record lists them under `not_run`.
"""

from dpcompanion.reproduction.papers.common import left_out, pearson, reported, runnable
from dpcompanion.reproduction.papers.individual_accounting import (
    accounts,
    clipping,
    estimates,
    membership,
    releases,
    resnets,
    runs,
    trajectories,
)
from dpcompanion.reproduction.papers.individual_accounting.accounts import figure_1
from dpcompanion.reproduction.papers.individual_accounting.clipping import ONCE, clipped
from dpcompanion.reproduction.papers.individual_accounting.estimates import nearest
from dpcompanion.reproduction.papers.individual_accounting.membership import attacked
from dpcompanion.reproduction.papers.individual_accounting.runs import (
    CIFAR10,
    CIFAR10_RESNET,
    MNIST,
    MNIST_CNN,
    MNIST_LONG,
    NAME,
    PAPER,
    UTKFACE_GENDER,
    make_plan,
    run_task,
    schedule,
    trained,
    with_log_loss,
)
from dpcompanion.reproduction.papers.individual_accounting.trajectories import (
    Trajectories,
    excess,
    two_steps,
    variance_shares,
)
from dpcompanion.reproduction.papers.yu import (
    LABELS,
    MNIST_5K,
    STABLE,
    Examples,
    Membership,
    Task,
    build,
    clip_key,
    examples,
    outcome,
    overfitted,
)
