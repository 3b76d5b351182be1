r"""Output perturbation, and the noise that SGD brings along (Hyland and Tople 2020).

**Sensitivity.**  For a convex, L-Lipschitz, beta-smooth loss and a learning rate
:math:`\eta \le 2/\beta`, k passes of SGD in batches of B move the weights by at most

.. math:: \hat\Delta_S = 2 k L \eta / B

when one example is replaced and the seed stays (theorem 2, after Wu et al. 2017).

**Intrinsic noise.** Take the weights over seeds as a draw of :math:`N(\bar w_S, \sigma_i^2 I)`.
Then SGD is a Gaussian mechanism with :math:`\mu = \Delta/\sigma_i` (algorithm 1), and to reach a
target only the missing noise must be added (algorithm 2):
:math:`\sigma_\text{augment}^2 = \sigma_\text{target}^2 - \sigma_i^2`.

The bound on sensitivity is a theorem.  That the noise is Gaussian, the same in all
directions and for all data sets, is an assumption: whatever follows from a sigma_i is an
estimate, not a guarantee.  `noise_covariance` and `mahalanobis` drop the second
assumption, `dpcompanion.attacks` none but puts the result to the test.

Neighbours replace one example. "analytic" is the exact Gaussian mechanism (Balle and Wang 2018),
"classical" is :math:`\varepsilon = \sqrt{2 \ln(1.25/\delta)}\,\Delta/\sigma`, which the paper uses
and which is proved for epsilon below 1 only. Weights are (data sets, seeds, parameters).

>>> bound = sgd_sensitivity(
...     passes=1850 / 325, lipschitz=2**0.5, learning_rate=0.1, batch_size=32, smoothness=0.5
... )
>>> epsilon = intrinsic_epsilon(bound, 0.028, 1 / 10397)
>>> print(f"{bound:.4f} {epsilon:.2f}")
0.0530 8.31
"""

from dpcompanion.output_perturbation.bounds import (
    augmented_sigma,
    empirical_sensitivity,
    intrinsic_epsilon,
    intrinsic_sigma,
    mahalanobis,
    noise_covariance,
    pairwise_sensitivity,
    seed_sigma,
    sgd_sensitivity,
    sgd_sensitivity_estimate,
)
from dpcompanion.output_perturbation.grids import train_grid

__all__ = [
    "sgd_sensitivity",
    "empirical_sensitivity",
    "intrinsic_sigma",
    "intrinsic_epsilon",
    "augmented_sigma",
    "train_grid",
]
