r"""Budgets for each group of examples: Sample and Scale (Boenisch et al. 2023), and both at once.

P groups, group p with a share w_p of the examples and its own budget eps_p, train one model with
one Gaussian noise.  Two ways to spend what the looser budgets allow:

* **Sample** (algorithm 2): group p is sampled with its own rate q_p.  The noise multiplier is the
  one at which the rates that use up each budget have the mean of plain DP-SGD, \sum_p w_p q_p = q,
  so that batches keep their size.
* **Scale** (algorithm 3): group p is clipped to its own norm c_p.  With sigma_p the noise
  multiplier that eps_p needs at rate q::

      sigma_scale = 1 / \sum_p (w_p / sigma_p),      c_p = c sigma_scale / sigma_p,

  so that noise of standard deviation sigma_scale c is sigma_p c_p for each group, and the mean clip
  norm is c (equations 6 to 9).
* **Combined**: rates go part of the way from q to Sample's, and Scale spends the rest of each
  budget.

Each group's guarantee is that of DP-SGD with its own rate and noise multiplier, Poisson sampling:
neighbours differ in one example of that group, whose gradients are zero in one of them (zero-out).
The number of examples is public, and so is that of each group: noise, rates and clip norms are made
of the groups' shares. Parameters are found conservatively: by RDP no group's `compute_epsilon`
exceeds its target, and by PLD no group's delta at its target exceeds the target delta, though
`compute_epsilon`, on another grid, may give up to 0.2% more than a small target.

There may be as many groups as examples. All groups are searched side by side; of many different
budgets some are searched, and the others lie between two of them: a budget decides its group's
parameters, smoothly. They are taken from the safe side of chords through neighbouring points. By
RDP each group found so is then checked for itself, at one order, which bounds its epsilon. By PLD,
whose epsilons cost 10 to 50 milliseconds each, 1e-4 of every budget is kept back for what the grids
of nearby parameters may differ by, and one budget in the middle of every stretch is checked. Of
more than 30,000 different budgets each is rounded down first, by 5e-4 of itself at most: a million
take seconds.

>>> found = scale_parameters(
...     [1.0, 2.0, 3.0],
...     [34, 43, 23],
...     target_delta=1e-5,
...     sample_rate=1 / 49,
...     steps=1470,
...     max_grad_norm=0.4,
...     accountant="rdp",
... )  # as in the paper
>>> round(found.noise_multiplier, 2), [round(c, 3) for c in found.max_grad_norms.tolist()]
(2.01, [0.244, 0.43, 0.574])
"""

from dpcompanion.idp.groups import budgets_for
from dpcompanion.idp.parameters import (
    combined_parameters,
    rdp_epsilons,
    sample_parameters,
    scale_parameters,
)

__all__ = ["budgets_for", "combined_parameters", "sample_parameters", "scale_parameters"]


def __getattr__(name):
    """The engine stands above this package and needs Opacus: it is imported when asked for."""
    if name == "IndividualizedPrivacyEngine":
        from dpcompanion.engine import IndividualizedPrivacyEngine

        return IndividualizedPrivacyEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
