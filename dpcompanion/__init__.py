"""Individual privacy in (DP-)SGD: accounts, budgets and bounds for each example.

`dpcompanion` is the library behind the book of the same name.  Importing it loads nothing heavy;
import the module that you need.

* `dpcompanion.accounting`: what a run of DP-SGD costs in (epsilon, delta);
* `dpcompanion.mechanism`, `gradients`: a run's description, draws, noise; clipped sums and norms;
* `dpcompanion.training`: DP-SGD from one description of a run;
* `dpcompanion.data`: data sets as tensors;
* `dpcompanion.individual`, `filters`, `release`: accounts of each example, budgets that hold,
  publishing them;
* `dpcompanion.idp`, `pate`, `engine`: a budget for each example, and the same on Opacus;
* `dpcompanion.per_instance`, `output_perturbation`, `attacks`: one point of one data set; SGD's own
  noise; lower bounds;
* `dpcompanion.reproduction`: the five papers of the book, on top of all this.
"""

__version__ = "0.1.0"
