"""DP-SGD from one description of a run.

* `plan`: `DPSGDPlan`, from which sampler, clip norms, noise and account are made;
* `sampling`: true Poisson draws;  `noise`: Gaussian noise and the streams of a seed;
* `clipping`: sums of clipped per-example gradients, and norms; `recording`, `layers`, `matrices`, `tensors`: how,
  layer by layer;
* `proof`: whether a method is right for a model;  `checks`: whether data, model and optimizer can work together;
* `loop`: `train` and its `Callbacks`;  `examples`: what it trains on;  `checkpoints`: what it goes on from, a
  `Checkpoint`;
* `ensembles`: `train_ensemble`, many runs side by side; `runs`: what they are; `stacking`: their networks as one;
* `tracking`: everybody's gradient norms along a run, for accounts of each example; `passes`: how they are computed;
  `following`: whether they are those of the run;
* `models`: the papers' networks.
"""

from dpcompanion.training.checkpoints import Checkpoint
from dpcompanion.training.clipping import clipped_sum, cross_entropy, gradient_norms
from dpcompanion.training.ensembles import train_ensemble
from dpcompanion.training.loop import Callbacks, History, Run, train
from dpcompanion.training.noise import derive_seed, gaussian_noise, generators
from dpcompanion.training.plan import DPSGDPlan
from dpcompanion.training.runs import Ensemble
from dpcompanion.training.sampling import PoissonSampler
from dpcompanion.training.tracking import NormTracker

__all__ = ["Callbacks", "Checkpoint", "DPSGDPlan", "Ensemble", "History", "NormTracker", "PoissonSampler", "Run",
           "clipped_sum", "cross_entropy", "derive_seed", "gaussian_noise", "generators", "gradient_norms", "train",
           "train_ensemble"]
