"""Budgets that no run can exceed, whatever norms do: two filters.

Accounts along a trajectory (`dpcompanion.individual`) are known only afterwards and differ from run
to run. A filter turns them round: every example has a budget beforehand, and each step is charged
what its own gradient may cost.

* `ExactFilter`: at the price of loss distributions, exact, for norms rounded up to a few levels.
* `RenyiFilter`: at the price of Rényi divergence, for norms of any size (Feldman and Zrnic 2021).

`adaptive_delta` is the worst that any strategy of norms can do within a budget, `calibrate_filter`
the budget that keeps a promise.

Before a run of 200 steps two people are promised epsilon 0.8, a third 0.4. Before each of four
blocks their gradients' norms say to what they are clipped, and an example that cannot cover its
cost is clipped to less:

>>> filter = ExactFilter(
...     3,
...     target_epsilon=[0.8, 0.8, 0.4],
...     target_delta=1e-5,
...     sample_rate=0.01,
...     noise_multiplier=1.0,
...     max_grad_norm=2.0,
...     levels=[0.5, 1.0],
...     costs=[1, 8],
...     steps=200,
...     block=50,
... )
>>> filter.budget.tolist()
[23, 23, 7]
>>> limits = [filter.clip_norms([5.0, 0.7, 5.0]).tolist() for step in range(200)]
>>> limits[::50]
[[2.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
>>> filter.spent.tolist(), filter.epsilon(1e-5).tolist()
([18, 4, 4], [0.8, 0.8, 0.4])
"""

from dpcompanion.filters.calibration import calibrate_filter, level_costs
from dpcompanion.filters.exact import ExactFilter
from dpcompanion.filters.game import adaptive_delta, play, worst_case
from dpcompanion.filters.renyi import RenyiFilter

__all__ = ["ExactFilter", "RenyiFilter", "adaptive_delta", "calibrate_filter"]
