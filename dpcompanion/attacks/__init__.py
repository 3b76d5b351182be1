r"""Audits: from the errors of a distinguisher to lower bounds on epsilon.

Someone sees one output of a mechanism and guesses which of two neighbouring data sets it
came from.  If the mechanism is (epsilon, delta)-private, no guess is much better than chance:

.. math::
    \text{TPR} \le e^\varepsilon\, \text{FPR} + \delta, \qquad
    1 - \text{FPR} \le e^\varepsilon (1 - \text{TPR}) + \delta,

and if it is mu-GDP (no easier to tell apart than N(0, 1) and N(mu, 1); Dong et al. 2022),
:math:`\Phi^{-1}(\text{TPR}) - \Phi^{-1}(\text{FPR}) \le \mu`.  Rates counted in fresh trials become
lower bounds that hold with a stated confidence, by Clopper and Pearson (1934).  A claim below
such a bound is refuted; a bound below a claim proves nothing.

The guess, its threshold included, must be fixed before the trials that are counted.

**LiRA** (Carlini et al. 2022) asks of one example whether a model was trained on it. Shadow models
are trained on random halves of the data; what an example scores under those that saw it, and under
those that did not, is taken as two Gaussians, and the target's score is weighed between them::

    masks = shadow_masks(64, n, generator=generator)  # who is in which shadow model's data
    scores = torch.stack([log_odds(fit(x[mask], y[mask])(x), y) for mask in masks])  # (64, n)
    ratios = lira(target_scores, scores, masks)
    auc(ratios[members], ratios[~members])

`lira_offline` needs models without the example only.
"""

from dpcompanion.attacks.curves import auc, roc, tpr_at_fpr
from dpcompanion.attacks.loss import loss_threshold_attack
from dpcompanion.attacks.low_bits import low_bits_tell
from dpcompanion.attacks.rates import clopper_pearson, epsilon_lower_bound, mu_lower_bound
from dpcompanion.attacks.shadows import lira, lira_offline, log_odds, shadow_masks

__all__ = [
    "auc",
    "epsilon_lower_bound",
    "lira",
    "lira_offline",
    "log_odds",
    "loss_threshold_attack",
    "low_bits_tell",
    "mu_lower_bound",
    "roc",
    "shadow_masks",
    "tpr_at_fpr",
]
