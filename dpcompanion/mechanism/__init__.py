"""The mechanism of a DP-SGD run: one description of it, and the random numbers that it takes.

* `plan`: `DPSGDPlan`, from which sampler, clip norms, noise and account are made;
* `sampling`: true Poisson draws;  `noise`: Gaussian noise and the streams of a seed;
* `secure`: a cipher's stream, exact coins, noise on a grid;  `floats`: what floats do to the account of a release.

Users import these names from `dpcompanion.training`.
"""

__all__: list[str] = []  # offered by `dpcompanion.training`
