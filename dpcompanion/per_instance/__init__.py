r"""How private is one point of one data set, against an attacker who sees the models that training
went through? (Thudi et al. 2024)

Per-instance DP fixes the pair of data sets, X and X' = X with the point x, and asks how well the
two trainings can be distinguished. Everything that a worst case must allow for may then be replaced
by what happens on this data. Five parts:

* one step: `step_divergence` (theorem 3.2, in `steps`, with the moment of "add" from `added`),
  `update_divergence` (theorem 3.6, in `updates`), `holder_epsilon` (corollary 3.1), and what the
  paper says it has no way to do: `coupled_divergence`, by the distribution of the sensitivity (both
  in `batches`);
* `composition`: many steps, by theorem 3.3 (`compose`);
* `tilted`: many steps, exactly, from a handful of runs in which x enters more often
  (`tilted_counts`, `exact_composition`);
* `loss`: the same, at the delta that was asked for, by runs of several proposals (`proposal_counts`
  in `proposals`, `loss_epsilon`);
* `unlearning`: retrain, or keep the model? (`naive_unlearning`).

Neighbouring relation: add or remove the point x; "remove" is the divergence of training with x from
training without, "add" the other way round. Sampler: Poisson. Divergences are in nats. What is a
bound and what an estimate is said with each: an expectation that is replaced by a mean over runs
makes an estimate, `confidence` an upper confidence bound. Whatever the number, it holds for this X
and this x alone, and publishing it may tell of both.

>>> import torch
>>> from dpcompanion.accounting import rdp_to_epsilon
>>> from dpcompanion.per_instance import step_divergence
>>> norms = torch.tensor(
...     [1.0, 0.5, 0.1]
... )  # three points, whose gradients keep these norms throughout
>>> orders = [2, 4, 8, 16, 32]
>>> rdp = 1000 * step_divergence(
...     sample_rate=0.01, noise_multiplier=1.0, sensitivity=norms, orders=orders
... )
>>> rdp_to_epsilon(rdp, orders, 1e-5)[0]
tensor([2.1..., 0.7..., 0.2...], dtype=torch.float64)
"""

from dpcompanion.per_instance.batches import (
    coupled_delta,
    coupled_divergence,
    coupled_epsilon,
    holder_epsilon,
)
from dpcompanion.per_instance.composition import (
    compose,
    compose_sensitivities,
    holder_order,
    log_runs_needed,
    smallest_exponent,
)
from dpcompanion.per_instance.confidence import log_mean_bound
from dpcompanion.per_instance.loss import loss_divergence, loss_epsilon
from dpcompanion.per_instance.proposals import proposal_counts, proposal_log_density, step_loss
from dpcompanion.per_instance.steps import log_mass, step_divergence
from dpcompanion.per_instance.tilted import exact_composition, tilted_counts, tilted_noise
from dpcompanion.per_instance.unlearning import naive_unlearning
from dpcompanion.per_instance.updates import update_divergence

__all__ = [
    "compose",
    "compose_sensitivities",
    "coupled_delta",
    "coupled_divergence",
    "coupled_epsilon",
    "exact_composition",
    "holder_epsilon",
    "holder_order",
    "log_mass",
    "log_mean_bound",
    "log_runs_needed",
    "loss_divergence",
    "loss_epsilon",
    "naive_unlearning",
    "proposal_counts",
    "proposal_log_density",
    "smallest_exponent",
    "step_divergence",
    "step_loss",
    "tilted_counts",
    "tilted_noise",
    "update_divergence",
]
