"""DP-SGD from one description of a run.

* `loop`: `train`;  `callbacks`: what is called along a run, and what it leaves;
  `examples`: what it trains on;  `collating`: items of a data set as one batch;
  `checkpoints`: what it goes on from, a `Checkpoint`;  `options`: `Track` and `Performance`;
* `distributed`: one run on several processes;
* `people`: `by_person`, where the unit is a person with several rows;  `owners`: whose each row is;
* `ensembles`: `train_ensemble`, many runs side by side; `runs`: what they are;
* `tracking`: gradient norms of examples along a run, for accounts of each example; `measuring`:
  when they are computed;  `stepping`: a loop of one's own; `following`: whether they are those of
  the run;
* `models`: the papers' networks.

Handed on from `dpcompanion.mechanism`: `DPSGDPlan`, `PoissonSampler`, `gaussian_noise`,
`generators`; from `dpcompanion.gradients`: `clipped_sum`, `gradient_norms`, `cross_entropy`; and
from `dpcompanion.seeds`: `derive_seed`.

A plan, a training, and what it cost each example:

>>> import torch
>>> x = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
>>> y = (x[:, 0] > 0).long()
>>> plan = DPSGDPlan.for_epsilon(
...     2.0, n=1000, sample_rate=0.05, steps=100, max_grad_norm=1.0, delta=1e-5
... )
>>> model = torch.nn.Linear(5, 2)
>>> history = train(
...     model,
...     cross_entropy,
...     (x, y),
...     plan,
...     optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
...     seed=0,
...     progress=False,
... )
>>> f"{len(history.batch_sizes)} steps, epsilon {plan.epsilon():.2f} at delta {plan.delta:g}"
'100 steps, epsilon 2.00 at delta 1e-05'
"""

from dpcompanion.gradients.clipping import clipped_sum, gradient_norms
from dpcompanion.gradients.losses import cross_entropy
from dpcompanion.mechanism.noise import gaussian_noise, generators
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.mechanism.sampling import PoissonSampler
from dpcompanion.seeds import derive_seed
from dpcompanion.training.callbacks import Callbacks, History
from dpcompanion.training.checkpoints import Checkpoint
from dpcompanion.training.ensembles import train_ensemble
from dpcompanion.training.loop import train
from dpcompanion.training.options import Performance, Track
from dpcompanion.training.people import by_person
from dpcompanion.training.tracking import NormTracker

__all__ = [
    "Callbacks",
    "Checkpoint",
    "DPSGDPlan",
    "History",
    "NormTracker",
    "Performance",
    "PoissonSampler",
    "Track",
    "by_person",
    "clipped_sum",
    "cross_entropy",
    "gaussian_noise",
    "generators",
    "gradient_norms",
    "train",
    "train_ensemble",
]
