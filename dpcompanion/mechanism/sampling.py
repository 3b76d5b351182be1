"""Poisson sampling: every example tosses its own coin at every step.

The amplification that the accountants compute holds for this sampler only: example i is in a step
with probability q_i, independently of the others and of every other step (Mironov et al. 2019,
section 2).  A shuffled pass in fixed batches is another mechanism.  So the batch size is random,
and a batch may be empty: it is then a step of noise alone.

From `GAPS_FROM` examples on a draw costs as much as it brings, not n: where all rates are equal, or
of few different values, the number of examples passed over before the next one is geometric, P(gap
>= k) = (1 - q)^k, and gaps are drawn instead of coins. The law is the same.

From a `SecureStream`, from which runs draw, coins and gaps are exact. From a `torch.Generator` a
coin is a float64 uniform, so that a rate holds to 2^-53; the uniforms behind the gaps have 106
bits, so that small rates hold to a relative n 2^-52.
"""

import math
from typing import Any

import torch

from dpcompanion import _checks
from dpcompanion.mechanism.secure import SecureStream

#: Number of examples from which on draws are made by gaps.
GAPS_FROM = 1_000_000

_GROUPS = 64  # different rates up to which each group of equal rates has its own gaps
_BLOCK = 1 << 20  # gaps, or coins, that are drawn at a time


def steps_per_epoch(sample_rate: Any) -> int:
    """Steps in which an example is seen once on average, as a whole number of at least 1.

    >>> steps_per_epoch(0.03), steps_per_epoch(torch.tensor([0.1, 0.3]))
    (33, 5)
    """
    return max(
        1,
        round(
            1
            / (sample_rate.mean().item() if isinstance(sample_rate, torch.Tensor) else sample_rate)
        ),
    )


class PoissonSampler:
    """Independent Bernoulli draws of the indices 0..n-1.

    Args:
        n: number of examples.
        sample_rate: probability of inclusion, a number or (n,), in (0, 1].
        generator: a torch.Generator, on whose device the draws are made, or a `SecureStream`.

    >>> sampler = PoissonSampler(5, 0.4, torch.Generator().manual_seed(0))
    >>> [sampler.draw().tolist() for _ in range(3)]
    [[], [1, 2, 4], [1, 2]]
    >>> PoissonSampler(10**9, 2e-9, torch.Generator().manual_seed(1)).draw().tolist()
    [31498268, 158657061, 292108469, 389568296, 795610300, 853564864]
    """

    def __init__(
        self, n: int, sample_rate: float | torch.Tensor, generator: torch.Generator | SecureStream
    ):
        self.n = _checks.whole_number("n", n, 1)
        _checks.in_interval("sample_rate", sample_rate, 0, 1, closed="right")
        _checks.generator("generator", generator, SecureStream)
        self.sample_rate = torch.as_tensor(
            sample_rate, dtype=torch.float64, device=generator.device
        )
        if self.sample_rate.shape not in ((), (self.n,)):
            raise ValueError(
                f"sample_rate must be a number or have shape ({n},), got "
                f"{tuple(self.sample_rate.shape)}"
            )
        self.generator: Any = generator  # `_exact` says which of the two
        self._exact = isinstance(generator, SecureStream)
        self._groups = self._grouped() if self.n >= GAPS_FROM else None

    def masks(self, count: int) -> torch.Tensor:
        """The next `count` draws as a (count, n) tensor of booleans."""
        if self.n >= GAPS_FROM or self._exact:
            masks = torch.zeros(count, self.n, dtype=torch.bool, device=self.generator.device)
            for mask in masks:
                mask[self.draw()] = True
            return masks
        return self._uniforms(count, self.n) < self.sample_rate

    def draw(self) -> torch.Tensor:
        """The next draw: the indices of the examples in it, ascending, (k,) int64 with k >= 0."""
        if self.n < GAPS_FROM and not self._exact:
            return self.masks(1)[0].nonzero().squeeze(1)
        if self._groups is None:
            blocks = range(0, self.n, _BLOCK)
            return torch.cat(
                [
                    self._coins(at, min(_BLOCK, self.n - at)).nonzero().squeeze(1) + at
                    for at in blocks
                ]
            )
        drawn = [
            self._by_gaps(rate, size) if members is None else members[self._by_gaps(rate, size)]
            for rate, size, members in self._groups
        ]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn).sort().values

    def _grouped(self):
        """(rate, size, members or None for all) of each group of equal rates; None if too many."""
        if not self.sample_rate.ndim:
            return [(float(self.sample_rate), self.n, None)]
        rates, which = self.sample_rate.unique(return_inverse=True)
        if len(rates) > _GROUPS:
            return None
        members = [(which == group).nonzero().squeeze(1) for group in range(len(rates))]
        return [(rate, len(own), own) for rate, own in zip(rates.tolist(), members)]

    def _by_gaps(self, rate, size):
        """Which of `size` examples of the same rate are sampled, ascending."""
        device, found, last = self.generator.device, [], -1
        if rate == 1:
            return torch.arange(size, device=device)
        while last < size - 1:
            expected = (size - 1 - last) * rate
            count = min(_BLOCK, math.ceil(expected + 6 * math.sqrt(expected)) + 8)
            places = last + (self._gaps(count, rate, size) + 1).cumsum(0)
            last = int(places[-1])
            found.append(places[places < size])
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def _gaps(self, count, rate, most):
        """How many examples are passed over before the next one, `count` times, (count,) int64."""
        if self._exact:
            return self.generator.gaps(count, rate, most)
        coarse, fine = self._uniforms(2, count)
        return _gaps(coarse + fine * 2**-53, rate).clamp(max=most).long()

    def _coins(self, start, count):
        """Who of `count` examples from `start` on is in a draw, (count,) booleans."""
        rates = (
            self.sample_rate[start : start + count] if self.sample_rate.ndim else self.sample_rate
        )
        return self.generator.coins(count, rates) if self._exact else self._uniforms(count) < rates

    def _uniforms(self, *shape):
        return torch.rand(
            *shape, dtype=torch.float64, generator=self.generator, device=self.generator.device
        )


def _gaps(uniforms, rate):
    """The number of examples passed over before the next one, from uniforms in [0, 1]: k with
    probability q (1 - q)^k.

    It is at least k where the uniform is at least 1 - (1 - q)^k.
    """
    return torch.floor(torch.log1p(-uniforms) / math.log1p(-rate))
