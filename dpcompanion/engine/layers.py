"""What Opacus gets wrong in layers: embeddings with a padding index, in an empty batch, and of positions; packed rows.

* Opacus gives the row of `padding_idx` a gradient, which autograd does not.
* Of an empty batch it makes the gradient of one example, where there is none.
* A model that looks its positions up once for the whole batch, `positions(torch.arange(T))` of shape (T, d) or
  (1, T, d), adds them to each example by broadcasting. Then the layer gets one sum of all examples' gradients, and
  nobody's own. So such a layer is asked for the positions of each example: the sum that follows is the same.
* Rows of a packed sequence are in the order of falling length. Where that is not the order of the batch, Opacus gives
  an example the gradient of another, so it is refused in whichever batch it comes.
"""

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence


def embedding_grad_sample(layer, activations, backprops):
    """Each example's gradient of an embedding, {weight: (n, rows, d)}; activations: ids (n, ...)."""
    if not layer.weight.requires_grad:
        return {}
    ids, n, (rows, width) = activations[0].long(), len(activations[0]), layer.weight.shape
    sample = torch.zeros(n, rows, width, device=backprops.device, dtype=backprops.dtype)
    if n:
        ids = ids.reshape(n, -1, 1)
        sent = backprops.reshape(n, -1, width)
        if layer.padding_idx is not None:
            sent = sent.masked_fill(ids == layer.padding_idx, 0.0)
        sample.scatter_add_(1, ids.expand(-1, -1, width), sent)
    return {layer.weight: sample}


def check_packed(module):
    """From now on packed sequences must have the order of the batch."""
    for part in module.modules():
        if isinstance(part, DPRNNBase):
            part.register_forward_pre_hook(_check_order)


def _check_order(layer, args):
    order = args[0].sorted_indices if args and isinstance(args[0], PackedSequence) else None
    if order is None or not (layer.training and torch.is_grad_enabled()):
        return
    if not torch.equal(order, torch.arange(len(order), device=order.device)):
        raise ValueError(
            f"packed sequences must be in the order of the batch, in a {type(layer).__name__}, for Opacus takes an "
            "example for another where they are sorted: collate the batch without packing, and leave its rows padded"
        )


class ForEachExample:
    """Positions that a model looks up once for the whole batch are looked up for each example.

    Args:
        module: the model; watched: what the loop calls.
        batch_size: called, it gives the number of examples of the pass.
    """

    def __init__(self, module, watched, batch_size):
        self._batch_size, self._n = batch_size, None
        self._shared = set()  # layers that were seen to take one row of ids, of no example
        layers = [part for part in module.modules() if type(part) is nn.Embedding and part.weight.requires_grad]
        self._handles = [layer.register_forward_pre_hook(self._expand) for layer in layers]
        if layers:
            watched.register_forward_pre_hook(self._begin)
            watched.register_forward_hook(self._end, always_call=True)

    def __getstate__(self):
        return {"_batch_size": None, "_n": None, "_shared": set(), "_handles": []}

    def _begin(self, module, args):
        counts = module.training and torch.is_grad_enabled()
        self._n = self._batch_size() if counts and self._batch_size is not None else None

    def _end(self, module, args, outputs):
        self._n = None

    def _expand(self, layer, args):
        n = self._n
        if n is None or len(args) != 1 or not torch.is_tensor(args[0]) or not args[0].ndim:
            return None
        (ids,) = args
        if ids.ndim == 1:
            if len(ids) != n:
                self._shared.add(id(layer))
            return (ids.expand(n, -1),) if id(layer) in self._shared else None
        return (ids.expand(n, *ids.shape[1:]),) if len(ids) == 1 != n else None
