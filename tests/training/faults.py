"""Ways in which a trainer may be broken, for audits and attacks to find; each takes pytest's
`monkeypatch`.
"""

import torch

from dpcompanion.gradients import proof, sums
from dpcompanion.mechanism import noise
from dpcompanion.training import PoissonSampler


def halve_the_noise(monkeypatch, factor=0.5):
    drawn = noise.gaussian_noise
    monkeypatch.setattr(
        noise, "gaussian_noise", lambda *args, **kwargs: factor * drawn(*args, **kwargs)
    )


def add_no_noise(monkeypatch):
    halve_the_noise(monkeypatch, 0.0)


def include_everyone(monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: torch.arange(self.n))


def join_two_draws(monkeypatch):
    draw = PoissonSampler.draw
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: torch.cat([draw(self), draw(self)]))


def clip_nothing(monkeypatch):
    monkeypatch.setattr(sums, "clip_factors", lambda norms, limits: torch.ones_like(norms))
    monkeypatch.setattr(proof, "misfit", lambda *args: None)  # which would find it first
