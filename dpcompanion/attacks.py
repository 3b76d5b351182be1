r"""Audits: from the errors of a distinguisher to lower bounds on epsilon.

Someone sees one output of a mechanism and guesses which of two neighbouring data sets it
came from.  If the mechanism is (epsilon, delta)-private, no guess is much better than chance:

.. math::
    \text{TPR} \le e^\varepsilon\, \text{FPR} + \delta, \qquad 1 - \text{FPR} \le e^\varepsilon (1 - \text{TPR}) + \delta,

and if it is mu-GDP (no easier to tell apart than N(0, 1) and N(mu, 1); Dong et al. 2022),
:math:`\Phi^{-1}(\text{TPR}) - \Phi^{-1}(\text{FPR}) \le \mu`.  Rates counted in fresh trials become
lower bounds that hold with a stated confidence, by Clopper and Pearson (1934).  A claim below
such a bound is refuted; a bound below a claim proves nothing.

The guess, its threshold included, must be fixed before the trials that are counted.

>>> epsilon_lower_bound(true_positives=900, positives=1000, false_positives=10, negatives=1000, delta=1e-5)
tensor(3.8720, dtype=torch.float64)
>>> mu_lower_bound(true_positives=900, positives=1000, false_positives=10, negatives=1000)
tensor(3.2635, dtype=torch.float64)
"""

import torch
from scipy import special

from dpcompanion import _checks


def clopper_pearson(successes, trials, *, confidence=0.95):
    """One-sided bounds on a probability: (lower, upper), float64 tensors, each missed with probability at most
    1 - confidence.

    >>> [round(float(bound), 4) for bound in clopper_pearson(0, 100)]
    [0.0, 0.0295]
    """
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    _checks.in_interval("trials", trials, 1)
    successes, trials = (torch.as_tensor(v, dtype=torch.float64) for v in (successes, trials))
    if bool(((successes < 0) | (successes > trials) | (successes % 1 != 0) | (trials % 1 != 0)).any()):
        raise ValueError(f"successes must be whole numbers between 0 and the trials, got {successes.tolist()} of"
                         f" {trials.tolist()}")
    k, n = torch.broadcast_tensors(successes, trials)
    k, n = k.numpy(), n.numpy()
    lower = special.betaincinv(k.clip(min=1), n - k + 1, 1 - confidence) * (k > 0)
    upper = special.betaincinv(k + 1, (n - k).clip(min=1), confidence) * (k < n) + (k == n)
    return torch.as_tensor(lower), torch.as_tensor(upper)


def epsilon_lower_bound(*, true_positives, positives, false_positives, negatives, delta, confidence=0.95):
    """The largest epsilon, at least 0, that the counts refute; in both directions.

    Args:
        true_positives, positives: right guesses among the trials of the first data set; numbers or tensors.
        false_positives, negatives: wrong guesses among the trials of the second.
        delta: in [0, 1).
        confidence: that the true epsilon is not below the result, for each entry by itself. A bound on each of the two
            rates enters, and they share it equally.

    Returns a float64 tensor.
    """
    _checks.in_interval("delta", delta, 0, 1, closed="left")
    tpr, fpr = _rates(true_positives, positives, false_positives, negatives, confidence)
    return torch.maximum((tpr - delta) / fpr, (1 - fpr - delta) / (1 - tpr)).clamp(min=1).log()


def mu_lower_bound(*, true_positives, positives, false_positives, negatives, confidence=0.95):
    """The largest mu, at least 0, such that the counts refute mu-GDP. Arguments as for `epsilon_lower_bound`.

    With `dpcompanion.accounting.gaussian_epsilon` it becomes an epsilon at any delta, for mechanisms that are claimed to
    be Gaussian only.
    """
    tpr, fpr = _rates(true_positives, positives, false_positives, negatives, confidence)
    # Swapping the two data sets gives the same number: the trade-off of Gaussians is symmetric.
    return (torch.special.ndtri(tpr) - torch.special.ndtri(fpr)).clamp(min=0)


def _rates(true_positives, positives, false_positives, negatives, confidence):
    """The least rate of right guesses and the greatest of wrong ones, which hold together with the confidence."""
    _checks.in_interval("confidence", confidence, 0, 1, closed="neither")
    each = (1 + confidence) / 2
    return (clopper_pearson(true_positives, positives, confidence=each)[0],
            clopper_pearson(false_positives, negatives, confidence=each)[1])
