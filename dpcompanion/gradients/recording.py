"""What each trainable layer of a network was given, and gradients that come back to what it gave.

>>> model, found = torch.nn.Linear(3, 2), {}
>>> recorder = Recorder(model)
>>> with recorder.listening():
...     losses = model(torch.ones(5, 3)).sum(1)
>>> recorder.backward(losses, lambda layer, uses: found.update({layer: uses}))
>>> [(tuple(inputs.shape), tuple(gradients.shape)) for inputs, gradients in found[model]]
[((5, 3), (5, 2))]
"""

import contextlib

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.dropout import _DropoutNd

from dpcompanion.gradients.tensors import UnsupportedModel, own_parameters


class Recorder:
    """Forward hooks that note a trainable layer's inputs and where gradients of outputs arrive."""

    def __init__(self, model):
        self.uses, self._examples = {}, None
        self.owners = {
            module: name for name, module in model.named_modules() if own_parameters(module)
        }
        seen = {}
        for module, name in self.owners.items():
            if any(isinstance(part, _DropoutNd) and part.p for part in module.modules()):
                raise UnsupportedModel(
                    f"layer {name or 'model'!r} has parameters of its own around dropout, which "
                    "would be sampled again; use method='func'"
                )
            for parameter in own_parameters(module).values():
                if parameter in seen:
                    raise UnsupportedModel(
                        f"layers {seen[parameter]!r} and {name!r} share a parameter; use "
                        "method='func'"
                    )
                seen[parameter] = name

    def _note(self, module, args, kwargs, output):
        if (
            len(args) != 1
            or kwargs
            or not all(isinstance(t, torch.Tensor) and t.ndim for t in (*args, output))
        ):
            raise UnsupportedModel(
                f"layer {self.owners[module]!r} does not map one tensor to one tensor; use "
                "method='func'"
            )
        if not torch.is_grad_enabled():
            return None
        a = args[0]
        if len(a) == len(output) == 1 and self._examples is not None and self._examples > 1:
            # Made once for all examples, as embeddings of positions are: each gets a use of its
            # own, of the same numbers, in whose place the broadcast of what comes after would have
            # put them.
            a = a.expand(self._examples, *a.shape[1:])
            output = output.expand(self._examples, *output.shape[1:])
        # Once a view is changed in place, autograd no longer comes by the node that it had. A
        # tensor of its own keeps that node (linear layers on more than two axes and instance norm
        # return views).
        output = output.clone() if output._is_view() else output
        self.uses.setdefault(module, []).append(
            (a.detach(), a._version, get_gradient_edge(output), len(output), a.requires_grad)
        )
        return output

    @contextlib.contextmanager
    def listening(self, examples=None):
        """Within, the layers are listened to. Where the number of `examples` is given, a layer may
        be called with one row that stands for all of them.
        """
        self._examples = examples
        hooks = [
            module.register_forward_hook(self._note, with_kwargs=True) for module in self.owners
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, losses, take, group=None):
        """take(layer, [(inputs, output gradients)]) for each layer that is reached, as soon as the
        way back through the network has come by all its uses, so that what is not kept can go.
        Where an example is a `group` of rows (`dpcompanion.training.people`), layers see rows, and
        each row of an example is a use of its own.
        """
        n = len(losses) if group is None else group.rows
        for module, uses in self.uses.items():
            if any(len(a) != n or rows != n for a, _, _, rows, _ in uses):
                raise UnsupportedModel(
                    f"layer {self.owners[module]!r} does not keep the examples first; use "
                    "method='func'"
                )
        pairs = {module: {} for module in self.uses}

        def arrived(module, use, g):
            a, version, *_ = self.uses[module][use]
            if a._version != version:
                raise UnsupportedModel(
                    f"the input of layer {self.owners[module]!r} is changed in place; use "
                    "method='func'"
                )
            pairs[module][use] = a, g
            if len(pairs[module]) == len(self.uses[module]):
                finish(module)

        def finish(module):
            self.uses.pop(module)
            found = pairs.pop(module)
            if found:
                uses = [found[use] for use in sorted(found)]
                take(module, uses if group is None else group.uses(uses))

        def on_the_way(module, use, output):
            def hook(gradients):
                if gradients[output] is not None:
                    arrived(module, use, gradients[output])

            return hook

        # Autograd goes where it is asked to: to the first layers, whose inputs need no gradient,
        # and by all others.
        first, handles = [], []
        for module, uses in self.uses.items():
            for use, (_, _, edge, _, inner) in enumerate(uses):
                if inner:
                    handles.append(
                        edge.node.register_prehook(on_the_way(module, use, edge.output_nr))
                    )
                else:
                    first.append((module, use, edge))
        try:
            gradients = self._gradients(losses, [edge for _, _, edge in first])
        finally:
            for handle in handles:
                handle.remove()
        for (module, use, _), g in zip(first, gradients):
            if g is not None:
                arrived(module, use, g)
        reached = _reached(losses) if self.uses else ()
        for module in list(self.uses):
            if len(pairs[module]) < len(self.uses[module]) and any(
                p in reached for p in own_parameters(module).values()
            ):
                raise UnsupportedModel(
                    f"layer {self.owners[module]!r} is used, but no gradient comes by its output; "
                    "use method='func'"
                )
            finish(module)

    def _gradients(self, losses, edges):
        """Of the summed losses with respect to the edges; none may come by the parameters of a
        layer that was not called.
        """
        silent = [
            p
            for module in self.owners
            if module not in self.uses
            for p in own_parameters(module).values()
        ]
        with torch.enable_grad():
            # weights of ones would make PyTorch import SymPy: a second, and 30 MB
            total = losses.sum()
        gradients = torch.autograd.grad(total, [*edges, *silent], allow_unused=True)
        if any(g is not None for g in gradients[len(edges) :]):
            raise UnsupportedModel(
                "a parameter is used outside the forward method of its layer; use method='func'"
            )
        return gradients[: len(edges)]


def _reached(losses):
    """The leaves, such as parameters, that the graph of `losses` ends in."""
    leaves, seen, nodes = set(), set(), [losses.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves.add(getattr(node, "variable", None))
        nodes.extend(after for after, _ in node.next_functions)
    return leaves
