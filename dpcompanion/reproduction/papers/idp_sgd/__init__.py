"""Exhibits of Boenisch et al. 2023, "Have it your way".

What the paper does not spell out and its numbers show: an epoch has ceil(N / B) steps, the sample
rate is q = 1 / ceil(N / B), and an account covers T = epochs ceil(N / B) steps.  Epsilon is by RDP,
at delta 1e-5.
"""

from dpcompanion.reproduction.papers.idp_sgd import (
    accounts,
    accuracy_tables,
    beyond_the_paper,
    cifar,
    classes,
    exact_filters,
    many_groups,
    membership,
    pate_students,
    resnet18,
    settings,
    side_by_side,
    training,
    with_filters,
)
from dpcompanion.reproduction.papers.idp_sgd.accounts import bisected_noise_multiplier, table_7
from dpcompanion.reproduction.papers.idp_sgd.accuracy_tables import (
    ahead,
    table_2,
    table_3,
    text_trial,
    texts,
)
from dpcompanion.reproduction.papers.idp_sgd.beyond_the_paper import BEYOND, audit, beyond
from dpcompanion.reproduction.papers.idp_sgd.classes import level_budgets, search_cost
from dpcompanion.reproduction.papers.idp_sgd.exact_filters import Promised, Table4, Watched
from dpcompanion.reproduction.papers.idp_sgd.many_groups import (
    Baselines,
    exclude,
    in_sequence,
    table_9,
    table_14,
)
from dpcompanion.reproduction.papers.idp_sgd.membership import (
    RATES,
    attack_each,
    attack_values,
    attacked,
    curves,
    memberships,
)
from dpcompanion.reproduction.papers.idp_sgd.pate_students import softmax_regressions, table_13
from dpcompanion.reproduction.papers.idp_sgd.settings import (
    BUDGETS,
    GROUPS,
    TABLE_5,
    Accounts,
    Training,
)
from dpcompanion.reproduction.papers.idp_sgd.side_by_side import train_all
from dpcompanion.reproduction.papers.idp_sgd.training import (
    CIFAR10,
    DIGITS,
    MNIST,
    MNIST_5K,
    SVHN,
    Accuracies,
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
from dpcompanion.reproduction.papers.idp_sgd.with_filters import Descent, filtered
