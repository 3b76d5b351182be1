"""Networks of one architecture as one network, whose layers hold the weights of all.

The examples of all runs pass through the stacked network as one batch, first those of run 0, then
those of run 1, as many for each.  A layer with weights gives each run's part to that run's weights;
all else (activations, pooling, reshaping) sees an ordinary batch and need not know.  Linear layers
multiply stacks of matrices. Convolutions are called run by run, because grouped ones are slower on
a CPU (two to five times for the MNIST CNN).  Other layers go through `torch.func.vmap`.

>>> one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
>>> network = StackedNetwork(one)
>>> network.load(
...     {
...         "weight": torch.stack([one.weight, other.weight]),
...         "bias": torch.stack([one.bias, other.bias]),
...     }
... )
>>> x = torch.randn(8, 3)  # four examples of each run
>>> torch.allclose(network.module(x), torch.cat([one(x[:4]), other(x[4:])]), atol=1e-6)
True
"""

import copy

import torch
from torch import nn

from dpcompanion.gradients.reparametrized import Reparametrized
from dpcompanion.gradients.tensors import UnsupportedModel, call_with, own_parameters


class StackedLayer(nn.Module):
    """One layer of all runs: parameters under the names of `layer`, (runs, *shape) each. What is
    frozen is shared.
    """

    def __init__(self, layer):
        super().__init__()
        # Not a child: only its sizes, options and frozen parameters count.
        self.__dict__["layer"] = layer
        self._parameters |= {
            name: nn.Parameter(p.detach().unsqueeze(0)) for name, p in own_parameters(layer).items()
        }

    def __getattr__(self, name):
        """Sizes and options, which models may read, are those of the layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, x):
        layer, own = self.layer, own_parameters(self)
        runs = len(next(iter(own.values())))
        if type(layer) is nn.Conv2d:
            weight, bias = (
                own.get(name, [getattr(layer, name)] * runs) for name in ("weight", "bias")
            )
            parts = [
                layer._conv_forward(part, w, b) for part, w, b in zip(x.chunk(runs), weight, bias)
            ]
            return parts[0] if runs == 1 else torch.cat(parts)
        if isinstance(layer, Reparametrized):
            bias = own.get("bias", [layer.bias] * runs)
            parts = [
                layer.use(
                    part, layer.effective_weight(**layer.weight_parameters(own, run)), bias[run]
                )
                for run, part in enumerate(x.chunk(runs))
            ]
            return parts[0] if runs == 1 else torch.cat(parts)
        if type(layer) is nn.Linear:
            weight, bias = own.get("weight", layer.weight), own.get("bias", layer.bias)
            out = x.reshape(runs, -1, x.shape[-1]) @ weight.mT
            if bias is not None:
                out = out + bias.reshape(-1, 1, bias.shape[-1])
            return out.reshape(*x.shape[:-1], -1)

        def one(own, x):
            return call_with(layer, own, x)

        return torch.func.vmap(one)(own, x.unflatten(0, (runs, -1))).flatten(0, 1)


class StackedNetwork:
    """A copy of `model` with stacked layers, `module`, and the way to load weights into it.

    Raises:
        UnsupportedModel: if a layer with weights of its own holds further layers.
    """

    def __init__(self, model):
        network = copy.deepcopy(model)
        stacked: dict[nn.Module, nn.Module] = {}
        for name, layer in network.named_modules():
            if own_parameters(layer):
                if any(True for _ in layer.children()):
                    raise UnsupportedModel(
                        f"layer {name or 'model'!r} has its own weights and further layers; use "
                        "method='func'"
                    )
                stacked[layer] = StackedLayer(layer)
        for parent in network.modules():
            parent._modules |= {
                name: stacked[child] for name, child in parent._modules.items() if child in stacked
            }
        self.module = stacked[network] if network in stacked else network
        self._slots = {
            (f"{prefix}.{name}" if prefix else name): (layer, name)
            for prefix, layer in self.module.named_modules()
            if isinstance(layer, StackedLayer)
            for name in own_parameters(layer)
        }

    def load(self, parameters):
        """Use `parameters`, {name: (runs, *shape)}, without copying them."""
        for name, (layer, own) in self._slots.items():
            layer._parameters[own] = nn.Parameter(parameters[name])
