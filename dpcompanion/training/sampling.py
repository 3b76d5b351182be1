"""Poisson sampling: every example tosses its own coin at every step.

The amplification that the accountants compute holds for this sampler only:
example i is in a step with probability q_i, independently of the others and of
every other step (Mironov et al. 2019, section 2).  A shuffled pass in fixed
batches is another mechanism.  So the batch size is random, and a batch may be
empty: it is then a step of noise alone.

Coins are float64 uniforms, so that a rate holds to 2^-53.

>>> sampler = PoissonSampler(5, 0.4, torch.Generator().manual_seed(0))
>>> [sampler.draw().tolist() for _ in range(3)]
[[], [1, 2, 4], [1, 2]]
"""

import torch

from dpcompanion import _checks


class PoissonSampler:
    """Independent Bernoulli draws of the indices 0..n-1.

    Args:
        n: number of examples.
        sample_rate: probability of inclusion, a number or (n,), in (0, 1].
        generator: a torch.Generator; the draws are made on its device.
    """

    def __init__(self, n, sample_rate, generator):
        self.n = _checks.whole_number("n", n, 1)
        _checks.in_interval("sample_rate", sample_rate, 0, 1, closed="right")
        self.sample_rate = torch.as_tensor(sample_rate, dtype=torch.float64, device=generator.device)
        if self.sample_rate.shape not in ((), (self.n,)):
            raise ValueError(f"sample_rate must be a number or have shape ({n},), got {tuple(self.sample_rate.shape)}")
        self.generator = generator

    def masks(self, count):
        """The next `count` draws as a (count, n) tensor of booleans."""
        uniforms = torch.rand(count, self.n, dtype=torch.float64, generator=self.generator,
                              device=self.generator.device)
        return uniforms < self.sample_rate

    def draw(self):
        """The next draw: the indices of the examples in it, ascending, (k,) int64 with k >= 0."""
        return self.masks(1)[0].nonzero().squeeze(1)
