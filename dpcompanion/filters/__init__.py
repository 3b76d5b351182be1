"""Budgets that no run can exceed, whatever norms do: two filters.

Accounts along a trajectory (`dpcompanion.individual`) are known only afterwards and differ from run to run.  A filter
turns them round: everybody has a budget beforehand, and pays for each step what their own gradient may cost.

* `ExactFilter`: at the price of loss distributions, exact, for norms rounded up to a few levels.
* `RenyiFilter`: at the price of Rényi divergence, for norms of any size (Feldman and Zrnic 2021).

`adaptive_delta` is the worst that any strategy of norms can do within a budget, `calibrate_filter` the budget that
keeps a promise.
"""

from .calibration import CalibratedFilter, calibrate_filter, level_costs
from .exact import ExactFilter
from .game import Game, adaptive_delta, play, worst_case
from .renyi import RenyiFilter

__all__ = [
    "CalibratedFilter",
    "ExactFilter",
    "Game",
    "RenyiFilter",
    "adaptive_delta",
    "calibrate_filter",
    "level_costs",
    "play",
    "worst_case",
]
