"""Gradients example by example: their norms, and sums in which each is clipped.

* `clipping`: sums of clipped gradients, and norms alone;  `sums`: one pass's;
* `passes`: norms of all examples;  `losses`: `cross_entropy`, of each example by itself;
* `recording`, `layers`, `matrices`, `reparametrized`, `tensors`: how, layer by layer;
* `stacking`: networks of one architecture as one;  `batches`: several tensors as one input;
* `microbatches`: how many examples go through a network at once;
* `proof`: whether a method is right for a model;  `states`: in which of its states that was shown;
* `checks`: whether data, model, loss and optimizer can work together;  `items`: whether each item
  of a data set is one example's own;  `independence`: whether each example's loss is;
* `traces`: what a pass leaves in a model;
* `batch_dependence`: how much an example's gradient changes with the others of its batch.

What users take from here `dpcompanion.training` hands on.
"""

from dpcompanion.gradients.clipping import clipped_sum, gradient_norms
from dpcompanion.gradients.losses import cross_entropy

__all__ = ["clipped_sum", "cross_entropy", "gradient_norms"]
