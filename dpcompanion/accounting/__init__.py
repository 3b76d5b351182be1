"""What DP-SGD costs: privacy accounting for the sampled Gaussian mechanism.

Everything here is a pure function of numbers or tensors, in float64, and returns a bound that never
under-states.  Neighbours differ by adding or removing one example; batches are Poisson samples.

* `compute_epsilon`, `compute_delta`: a whole run, by privacy loss distributions or by RDP;
* `trade_off`, `best_true_positive_rate`: what the run is worth to an attacker, at every rate of
  false positives;
* `find_noise_multiplier`, `find_sample_rate`, `find_steps`: the parameters that meet a target;
* `rdp_sampled_gaussian`, `rdp_to_epsilon`, `rdp_to_delta`: the Rényi accountant in its two halves;
* `gaussian_epsilon`, `gaussian_delta`, `gaussian_mu`: the Gaussian mechanism, exactly;
* `Ledger`: trainings and releases on the same people's data in one account; `select_best`: the
  price of a sweep;
* `pld`: the privacy loss distribution itself, its grid and its error.

>>> from dpcompanion.accounting import compute_epsilon
>>> round(compute_epsilon(sample_rate=0.01, noise_multiplier=1.0, steps=1000, delta=1e-5), 3)
1.828
"""

from dpcompanion.accounting import pld
from dpcompanion.accounting.calibration import find_noise_multiplier, find_sample_rate, find_steps
from dpcompanion.accounting.conversions import rdp_to_delta, rdp_to_epsilon
from dpcompanion.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from dpcompanion.accounting.items import (
    Gaussian,
    Guarantee,
    Laplace,
    LedgerEntry,
    PersonalCosts,
    SampledGaussian,
)
from dpcompanion.accounting.ledger import Ledger
from dpcompanion.accounting.rdp import DEFAULT_ORDERS, rdp_sampled_gaussian
from dpcompanion.accounting.runs import ACCOUNTANTS, compute_delta, compute_epsilon
from dpcompanion.accounting.selection import select_best
from dpcompanion.accounting.tradeoff import best_true_positive_rate, trade_off

__all__ = [
    "DEFAULT_ORDERS",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Ledger",
    "LedgerEntry",
    "PersonalCosts",
    "SampledGaussian",
    "best_true_positive_rate",
    "compute_delta",
    "compute_epsilon",
    "find_noise_multiplier",
    "find_sample_rate",
    "find_steps",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "pld",
    "rdp_sampled_gaussian",
    "rdp_to_delta",
    "rdp_to_epsilon",
    "select_best",
    "trade_off",
]
