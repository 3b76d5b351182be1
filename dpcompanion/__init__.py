"""Individual privacy in (DP-)SGD: accounts, budgets and bounds for each example.

`dpcompanion` is the library behind the book of the same name.  Importing it
loads nothing heavy; import the room that you need:

* `dpcompanion.accounting`: what a run of DP-SGD costs in (epsilon, delta);
* `dpcompanion.training`: DP-SGD from one description of a run;
* `dpcompanion.data`, `dpcompanion.records`, `dpcompanion.published`: data sets,
  results with their provenance, and the numbers that the papers print.
"""

__version__ = "0.1.0"
