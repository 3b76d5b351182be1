r"""Linear layers and convolutions that use a weight computed from their parameters,
:math:`w' = f(w)`.

Weight standardisation, weight norm and low-rank factors are of this kind. The Jacobian :math:`J` of
:math:`f` is the same for all examples, so an example's gradient is :math:`J^T g_i` with the
ordinary gradient :math:`g_i` of :math:`w'`: its norm needs no second pass through the network, and
the clipped sum is :math:`J^T` of one weighted gradient of :math:`w'`.

A layer of one's own says what :math:`f` is, and `torch.func` finds :math:`J^T`; where that has a
closed form, as in `dpcompanion.training.models.StandardizedConv2d`, `pull_back` may be written
down.

>>> class WeightNorm(Reparametrized, torch.nn.Linear):
...     def __init__(self, *sizes):
...         super().__init__(*sizes)
...         self.gain = torch.nn.Parameter(torch.ones(self.out_features, 1))
...
...     def effective_weight(self, weight, gain):
...         return gain * weight / weight.norm(dim=1, keepdim=True)
>>> layer = WeightNorm(3, 2)
>>> pulled = layer.pull_back(**layer.weight_parameters())(torch.ones(5, 2, 3))
>>> {name: tuple(g.shape) for name, g in pulled.items()}
{'weight': (5, 2, 3), 'gain': (5, 2, 1)}
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.gradients.tensors import squared_norms

_ROUNDS = 6  # of the power method


class Reparametrized(nn.Module):
    """Before `torch.nn.Linear` or `torch.nn.Conv2d` among the bases of a layer: it uses
    `effective_weight` of its parameters, all but the bias, in the place of its weight.
    """

    bias: nn.Parameter | None

    def effective_weight(self, **parameters):
        """The weight that inputs meet, shaped as an ordinary layer's, from parameters by name."""
        raise NotImplementedError

    def weight_parameters(self, stacked=None, run=0):
        """{name: parameter} that `effective_weight` takes; those in `stacked`, {name: (runs,
        *shape)}, of one run.
        """
        own = {name: p for name, p in self._parameters.items() if name != "bias"}
        return own | {name: p[run] for name, p in (stacked or {}).items() if name in own}

    def forward(self, x):
        return self.use(x, self.effective_weight(**self.weight_parameters()), self.bias)

    def use(self, x, weight, bias):
        """The ordinary layer of this weight."""
        return (
            self._conv_forward(x, weight, bias)
            if isinstance(self, nn.Conv2d)
            else F.linear(x, weight, bias)
        )

    def pull_back(self, **parameters):
        r"""The function that takes gradients :math:`g_i` of the effective weight, (n, \*shape of
        it), to :math:`J^T g_i`, {name: (n, \*shape)}; it may overwrite what it is given.
        """
        back = torch.func.vjp(lambda parameters: self.effective_weight(**parameters), parameters)[1]
        return torch.func.vmap(lambda g: back(g)[0])

    def pulled_squares(self, **parameters):
        r"""The function that takes gradients :math:`g_i` of the effective weight, (n, \*shape of
        it), to the squared norms of :math:`J^T g_i`, {name: (n,)} in float64; no smaller than they
        are, and it may overwrite what it is given. A layer may do so without making
        :math:`J^T g_i`.
        """
        pull_back = self.pull_back(**parameters)
        return lambda gradients: {
            name: squared_norms(g) for name, g in pull_back(gradients).items()
        }

    def stretch(self, **parameters) -> torch.Tensor:
        """How many times longer :math:`J^T` makes a gradient at most: twice the power method's."""

        def weight_of(parameters):
            return self.effective_weight(**parameters)

        weight, back, *_ = torch.func.vjp(weight_of, parameters)
        g = (
            torch.arange(weight.numel(), dtype=weight.dtype, device=weight.device)
            .cos()
            .view(weight.shape)
        )
        found = g.new_zeros(())
        for _ in range(_ROUNDS):
            g = g / g.norm().clamp(min=torch.finfo(g.dtype).tiny)
            (pulled,) = back(g)
            found = torch.stack([p.norm() for p in pulled.values()]).norm()
            g = torch.func.jvp(weight_of, (parameters,), (pulled,))[1]
        return 2 * found

    def ordinary(self) -> nn.Linear | nn.Conv2d:
        """A layer of the same sizes, options and bias with an ordinary weight; without memory."""
        kind: dict[str, Any] = {
            "bias": self.bias is not None,
            "device": "meta",
            "dtype": next(self.parameters()).dtype,
        }
        if isinstance(self, nn.Conv2d):
            options = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
            kind |= {name: getattr(self, name) for name in options}
            layer = nn.Conv2d(self.in_channels, self.out_channels, **kind)
        elif isinstance(self, nn.Linear):
            layer = nn.Linear(self.in_features, self.out_features, **kind)
        else:
            raise TypeError(
                f"{type(self).__name__} must be a torch.nn.Linear or torch.nn.Conv2d as well"
            )
        if layer.bias is not None and self.bias is not None:
            layer.bias.requires_grad_(self.bias.requires_grad)
        return layer
