r"""Exhibits of Thudi et al. 2024, "Gradients look alike".

Most of them need one thing: the gradient norms of some points along some runs of DP-SGD. `watched`
trains the runs of a task and notes them, for `points` training points and as many test points, at
`stops` moments (between two of them norms count as at the first). A run on X' = the training set is
what the divergence D(X' || X) of a training point looks at, and a run on X = the training set what
D(X || X') of a test point looks at: one set of runs serves all points of both kinds.

What the paper does not spell out and its public code shows: digits are scaled to 32 x 32 and
normalised by public constants; the noise comes from Opacus's RDP accountant; the initial stage is
the network before training; corollary 3.1 is taken at p = 10^4 with half of delta for each part.
"""

from dpcompanion.reproduction.papers.common import left_out, reported, runnable
from dpcompanion.reproduction.papers.gradients_look_alike import (
    by_loss,
    compositions,
    costs,
    mean_updates,
    public_code,
    resnets,
    runs,
    stages,
)
from dpcompanion.reproduction.papers.gradients_look_alike.by_loss import (
    Own,
    OwnEpsilons,
    own_epsilon,
    tilted_losses,
)
from dpcompanion.reproduction.papers.gradients_look_alike.compositions import (
    batches,
    side_by_side,
    theorem_3_3,
)
from dpcompanion.reproduction.papers.gradients_look_alike.costs import Tilted, exactly, tilted_norms
from dpcompanion.reproduction.papers.gradients_look_alike.mean_updates import (
    batch_sums,
    clipped_gradients,
    coordinates,
    mean_update_bound,
    mean_update_bounds,
)
from dpcompanion.reproduction.papers.gradients_look_alike.runs import (
    CIFAR10,
    DIRECTIONS,
    STAGES,
    Task,
    composed,
    composed_exactly,
    divergence,
    plan_of,
    soft_maximum,
    watch,
    watched,
    weighted_costs,
)
