r"""Levels of sensitivity over noise: what lies between a few of them.

**Mixtures.**  Let a step's sensitivity over its noise be :math:`c \in [a, b]`, and let

.. math::
    w = \frac{\Phi(c/2) - \Phi(a/2)}{\Phi(b/2) - \Phi(a/2)}.

A mechanism that takes the step of sensitivity b with probability w and the one of a otherwise, and
reports which, gives away at least as much: the hockey-stick divergence of the sampled Gaussian
mechanism at c is at most the mean of those at a and b, at every epsilon and in both directions. So
the mixture stands for the step in any composition (Zhu, Dong and Wang 2022, theorem 10), and its
loss distribution is the mean of two.

Proof. With sample rate q the likelihood ratio :math:`1 - q + q e^{ct - c^2/2}` is
:math:`e^\varepsilon` at :math:`t = L/c + c/2`, where :math:`L = \ln(1 + (e^\varepsilon - 1)/q)`;
where no such L is, the divergence is the same for all c. The divergence grows with c by
:math:`q\,\varphi(L/c - c/2)`, which is a constant times :math:`e^{-L^2/(2c^2)}\, e^{-c^2/8}`. Where
on [a, b] it grows is therefore a law whose likelihood ratio to that of :math:`L = 0` rises with c:
at c it has come at most as far as at :math:`L = 0`, that is, by the share w. The other direction is
this one at minus epsilon.

How much more is given away is of the second order in b - a: between nodes :math:`(k/K)^2` of the
clip norm the square of c is replaced by at most :math:`1 + 1/(K^2 c)` times itself.

>>> step = Levels.between([1.0, 2.0, 3.0], most=2)
>>> step.sensitivities.tolist(), step.share.round(decimals=3).tolist()
([1.0, 3.0], [0.0, 0.62, 0.0])
"""

import dataclasses
import math

import torch

_NEARLY_ONE = 4.0  # sensitivity over noise from which on the weights of mixtures come from tails


@dataclasses.dataclass(frozen=True)
class Levels:
    """Steps at some levels, each of them at a node or a mixture of those at two nodes.

    Attributes:
        sensitivities: of the nodes, over the noise, ascending, (nodes,) float64.
        low, high: (levels,) int64, the nodes of each level.
        share: (levels,) float64, the weight of the upper one.
    """

    sensitivities: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    share: torch.Tensor

    @classmethod
    def between(cls, sensitivities, *, most):
        """The levels of these sensitivities over noise (above 0), at most `most` of them: each its
        own, if so few.
        """
        levels = torch.as_tensor(sensitivities, dtype=torch.float64)
        own, place = levels.unique(return_inverse=True)
        if len(own) <= most:
            return cls(own, place, place, torch.zeros_like(levels))
        roots = torch.linspace(
            math.sqrt(float(own[0])), math.sqrt(float(own[-1])), most, dtype=torch.float64
        )
        nodes = roots**2
        nodes[0], nodes[-1] = own[0], own[-1]
        high = torch.searchsorted(nodes, levels).clamp(max=most - 1)
        low = torch.where(nodes[high] == levels, high, (high - 1).clamp(min=0))
        # Where the noise is small the error function is nearly 1, and only its distance from 1
        # keeps its digits.
        near = nodes[low] > _NEARLY_ONE
        reached, start, stop = (
            torch.where(near, -torch.erfc(value), torch.erf(value))
            for value in (level / math.sqrt(8) for level in (levels, nodes[low], nodes[high]))
        )
        # A hair up for rounding errors; where even float64 sees no difference, the upper node
        # stands for all.
        share = ((reached - start) / (stop - start) * (1 + 1e-12)).clamp(max=1).nan_to_num(nan=1.0)
        # So it does where the tails leave float64's normal numbers, and a weight its digits.
        share = torch.where(near & (start > -1e-290), 1.0, share)
        return cls(nodes, low, high, torch.where(low == high, 0, share)).only(
            torch.ones_like(levels, dtype=torch.bool)
        )

    def only(self, which):
        """Some of the levels, with the nodes that these need; `which` are booleans or indices."""
        low, high, share = self.low[which], self.high[which], self.share[which]
        needed, place = torch.cat([low, high]).unique(return_inverse=True)
        low, high = place.chunk(2)
        return Levels(self.sensitivities[needed], low, high, share)

    @property
    def plain(self):
        """Whether each level is a node."""
        return not bool(self.share.any())

    def blend(self, logs, log_rest=None, log_share=None):
        """Of logarithms (nodes, m), such as those of moments, the logarithms of the mixtures'
        means, (levels, m).
        """
        if self.plain:
            return logs[self.low]
        log_rest = torch.log1p(-self.share) if log_rest is None else log_rest
        log_share = torch.log(self.share) if log_share is None else log_share
        # An infinity that has no weight must not make nan of the other.
        lower, upper = (
            torch.where(weight[:, None] == -math.inf, -math.inf, weight[:, None] + logs[node])
            for weight, node in ((log_rest, self.low), (log_share, self.high))
        )
        return torch.logaddexp(lower, upper)
