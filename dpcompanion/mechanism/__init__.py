"""The mechanism of a DP-SGD run: one description of it, and the random numbers that it takes.

* `plan`: `DPSGDPlan`, from which sampler, clip norms, noise and account are made;
* `sampling`: true Poisson draws;  `noise`: Gaussian noise and the streams of a seed;
* `secure`: a cipher's stream, exact coins, noise on a grid;
* `floats`: what floats do to the account of a release.

What users take from here `dpcompanion.training` hands on.
"""

from dpcompanion.mechanism.noise import gaussian_noise, generators
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.mechanism.sampling import PoissonSampler

__all__ = ["DPSGDPlan", "PoissonSampler", "gaussian_noise", "generators"]
