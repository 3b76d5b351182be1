"""Individual privacy in (DP-)SGD: accounts, budgets and bounds for each example.

`dpcompanion` is the library behind the book of the same name.  Importing it loads nothing heavy;
import the module that you need.

* `dpcompanion.accounting`: what a run of DP-SGD costs in (epsilon, delta);
* `dpcompanion.mechanism`, `gradients`: a run's description, draws and noise; clipped sums and
  gradient norms;
* `dpcompanion.training`: DP-SGD from one description of a run;  `huggingface`: the Trainer of
  `transformers` with budgets of persons;  `estimator`: logistic regression for scikit-learn;
* `dpcompanion.data`, `seeds`: data sets as tensors; what a seed is made into;
* `dpcompanion.individual`, `filters`, `release`: accounts of each example, budgets that hold,
  publishing them;
* `dpcompanion.idp`, `pate`, `engine`: a budget for each example, and the same on Opacus;
* `dpcompanion.per_instance`, `output_perturbation`: one point of one data set; SGD's own noise;
* `dpcompanion.attacks`, `audit`: lower bounds on epsilon, from attacks and from one run;
* `dpcompanion.testing`: checks of a filter, an accountant or a tracker of your own;
* `dpcompanion.reproduction`: the five papers of the book, on top of all this;  `cli`: the command
  line.
"""

__version__ = "0.1.0"
