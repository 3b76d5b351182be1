"""Budgets, groups and training settings of Boenisch et al."""

import dataclasses
import math

BUDGETS = (1.0, 2.0, 3.0)
GROUPS = {"A": (34, 43, 23), "B": (54, 37, 9)}


@dataclasses.dataclass(frozen=True)
class Training:
    """N examples, expected batches of B, epochs, and the clip norm of DP-SGD."""

    examples: int
    batch: int
    epochs: int
    clip: float

    @property
    def sample_rate(self):
        return 1 / math.ceil(self.examples / self.batch)

    @property
    def steps(self):
        return self.epochs * math.ceil(self.examples / self.batch)


TABLE_5 = {
    "mnist": Training(60000, 512, 80, 0.2),
    "svhn": Training(73257, 1024, 30, 0.9),
    "cifar10": Training(50000, 1024, 30, 0.4),
}


@dataclasses.dataclass(frozen=True)
class Accounts:
    """What tables 5 and 7 are computed from."""

    training: dict = dataclasses.field(default_factory=lambda: TABLE_5)
    budgets: tuple = BUDGETS
    groups: dict = dataclasses.field(default_factory=lambda: GROUPS)
    delta: float = 1e-5
    precision: float = 0.001
