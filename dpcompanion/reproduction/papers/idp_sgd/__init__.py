"""Exhibits of Boenisch et al. 2023, "Have it your way".

What the paper does not spell out and its numbers show: an epoch has
ceil(N / B) steps, the sample rate is q = 1 / ceil(N / B), and an account
covers T = epochs ceil(N / B) steps.  Epsilon is by RDP, at delta 1e-5.
"""

from . import (
    settings,
    accounts,
    training,
    side_by_side,
    accuracy_tables,
    cifar,
    resnet18,
    many_groups,
    classes,
    membership,
    with_filters,
    exact_filters,
    pate_students,
    beyond_the_paper,
)
from .settings import Accounts, BUDGETS, GROUPS, TABLE_5, Training
from .accounts import bisected_noise_multiplier, table_7
from .training import (
    Accuracies,
    CIFAR10,
    DIGITS,
    MNIST,
    MNIST_5K,
    SVHN,
    Trials,
    assign,
    larger_tasks,
    network,
    parameters,
    plan_of,
    problem,
    trial,
    trials,
    tuned,
)
from .side_by_side import train_all
from .accuracy_tables import ahead, table_2, table_3, text_trial, texts
from .many_groups import Baselines, exclude, in_sequence, table_14, table_9
from .classes import level_budgets, search_cost
from .membership import RATES, attack_values, attacked, curves, memberships
from .with_filters import Descent, filtered
from .exact_filters import Promised, Table4, Watched
from .pate_students import softmax_regressions, table_13
from .beyond_the_paper import BEYOND, audit, beyond
