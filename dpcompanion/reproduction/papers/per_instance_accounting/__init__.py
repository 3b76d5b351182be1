r"""Exhibits of Yu et al. 2022, "Per-instance privacy accounting", first version of Yu et al. 2023.

Its algorithm 1 clips each example to a running estimate of its norm, refreshed when the example is
sampled and K times an epoch. Here the estimate that a step clips to is also what it is charged; the
paper charges the one after the step. Norms are rounded up to multiples of C / 100, the paper's to
the nearest. RDP at delta 1e-5, add or remove, Poisson sampling.

`paper` runs have the paper's batches, noise and epochs for MNIST, all 60,000 digits, and one hidden
layer in place of ResNet-20, which needs a GPU, as CIFAR-10 and UTKFace do. `quick` runs are on
4,000 digits, with the noise that costs the same worst-case epsilon.

What the two versions of the paper share is done in `individual_accounting`, whose data and networks
serve here.
"""

from dpcompanion.reproduction.papers.per_instance_accounting import (
    accounts,
    against_print,
    clipping,
    hidden,
    membership,
    resnets,
    runs,
)
from dpcompanion.reproduction.papers.per_instance_accounting.accounts import figure_1
from dpcompanion.reproduction.papers.per_instance_accounting.hidden import (
    Hidden,
    algorithm_1,
    histories,
    true_divergence,
)
from dpcompanion.reproduction.papers.per_instance_accounting.runs import (
    CONVERSION_ERROR,
    DIGITS,
    NAME,
    SETTINGS,
    as_published,
    converted,
    make_plan,
    plain_epsilon,
    printed_limit,
    reached,
    run_setting,
    worst_case,
)
