r"""Exhibits of Hyland and Tople 2020, "On the intrinsic privacy of SGD".

What the paper does not spell out and its numbers show: Covertype without the columns that are
constant in classes 1 and 2 has its 49 features, Adult with "?" as a level its 100.  Columns scaled
to [0, 1], then examples divided by their norms, give table III's sigma_i on Adult (0.107 for 0.108)
and come close on Forest.  On MNIST-binary they do not: there the projected digits as they are, with
norms around 9, give it (0.027 for 0.028).  So there are two tasks, `mnist-binary` as the paper says
and `mnist-binary-unscaled` as its numbers say; theorem 2 does not cover the second.

A task trains S data sets under R seeds from a fixed and from a varying initialisation, 2 R S runs,
and data set 0, which replaces nothing, beside them. Grids that take minutes are kept in the data
folder, since many exhibits share them, and an interrupted one goes on where it stopped.
"""

from dpcompanion.reproduction.papers.intrinsic_privacy import (
    audits,
    distances,
    grids,
    sensitivity,
    utility,
)
from dpcompanion.reproduction.papers.intrinsic_privacy.audits import (
    KINDS,
    Audit,
    canary,
    counted,
    gaussian_ratio,
    gaussian_view,
    linear_classifier,
)
from dpcompanion.reproduction.papers.intrinsic_privacy.distances import LOG_EDGES, table_3
from dpcompanion.reproduction.papers.intrinsic_privacy.grids import (
    INITIALIZATIONS,
    PAPER,
    Grids,
    Task,
    problem,
    trained,
)
