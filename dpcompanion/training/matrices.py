"""Linear layers and convolutions as products of matrices: what went in, and the gradients of what came out.

>>> layer = nn.Linear(3, 2)
>>> inputs, outputs = matrices(layer, torch.ones(5, 4, 3), torch.ones(5, 4, 2))       # 5 examples, 4 positions
>>> inputs.shape, outputs.shape
(torch.Size([5, 1, 4, 3]), torch.Size([5, 1, 2, 4]))
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.training.tensors import added_up, own_parameters

# What it costs to write a number of an explicit gradient and read it twice, in multiply-adds (measured on a CPU).
_TRAFFIC = 16
# Numbers that stay in a processor's cache while they are worked on several times.
CACHED = 2**20


def padded(conv, a):
    if conv.padding_mode == "zeros":
        return F.pad(a, conv._reversed_padding_repeated_twice)
    return F.pad(a, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)


def _patches(conv, a):
    """(n, channels, height, width) -> (n, groups, positions, in), what each position of the output sees.

    The channels of a patch lie side by side, which is several times faster to copy than the order of the weight.
    """
    windows = padded(conv, a).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    for axis, (size, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation), start=1):
        windows = windows.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    n, height, width = windows.shape[:3]
    windows = windows.unflatten(3, (conv.groups, -1)).permute(0, 3, 1, 2, 5, 6, 4)
    return windows.reshape(n, conv.groups, height * width, -1)


def _slides(conv, g):
    """Whether `_slid` is faster than patches (measured): steps of one pixel, and many of them beside the channels, but
    not the colours of an image, whose products would have three columns, nor in bfloat16, whose products are of
    copies."""
    channels, positions = conv.weight.shape[1], g[0, 0].numel()
    fits = positions > 2 * channels and channels != 3 and g.dtype != torch.bfloat16
    return conv.stride == (1, 1) and fits


def _slid(conv, a, g):
    """Gradients of a convolution's weight without patches, (n, height, width, out, in), for steps of one pixel.

    With its rows padded to those of the input and laid end to end, an output gradient meets the input of each place of
    the kernel at one constant offset: one product of matrices for each place, and nothing of the input is copied.
    """
    a, groups = padded(conv, a), conv.groups
    width, wider = a.shape[3], a.shape[3] - g.shape[3]
    length = g.shape[2] * width - wider
    outputs = F.pad(g, (0, wider)).flatten(2)[..., :length].unflatten(1, (groups, -1)).flatten(0, 1)
    inputs = a.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1)
    found = g.new_empty(len(g), *conv.kernel_size, *conv.weight.shape[:2])
    for row in range(conv.kernel_size[0]):
        for column in range(conv.kernel_size[1]):
            offset = row * conv.dilation[0] * width + column * conv.dilation[1]
            product = outputs @ inputs[..., offset : offset + length].mT
            found[:, row, column] = product.view(len(g), *conv.weight.shape[:2])
    return found


def matrices(module, a, g):
    """Inputs (n, groups, positions, in) and output gradients (n, groups, out, positions) of one use of a layer."""
    if type(module) is nn.Conv2d:
        return _patches(module, a), g.reshape(len(g), module.groups, -1, g[0, 0].numel())
    return a.reshape(len(a), 1, -1, a.shape[-1]), g.reshape(len(g), 1, -1, g.shape[-1]).transpose(2, 3)


def count_positions(module, uses):
    return sum(g[0].numel() for _, g in uses) // module.weight.shape[0]


def gram_is_cheaper(module, positions):
    """Whether the Gram matrices cost less arithmetic than what writing and reading a gradient costs."""
    groups = getattr(module, "groups", 1)
    gram = positions**2 * (module.weight.shape[0] + groups * module.weight[0].numel())
    return gram < _TRAFFIC * module.weight.numel()


def bias_gradients(module, g):
    """Gradients of the bias, (n, out)."""
    if type(module) is nn.Conv2d:
        return g.flatten(2).sum(2)
    return g.reshape(len(g), -1, g.shape[-1]).sum(1)


def in_full(module, tensor):
    """In the precision of the module's parameters: what went through a network in a lower one is multiplied and added
    up in theirs, in the norm and in the sum alike."""
    return tensor.to(next(iter(own_parameters(module).values())).dtype) if tensor.is_floating_point() else tensor


def in_one_precision(module, uses):
    """Uses whose inputs and output gradients can be multiplied: those of a layer that computed in bfloat16, and is used
    once, in bfloat16, as plain autograd does it (sums are made in float32, then rounded), all others in full.

    Only for gradients that are held: whoever clips must measure and add up what was rounded.
    """
    if len(uses) == 1 and uses[0][1].dtype == torch.bfloat16:
        return [(a.to(g.dtype), g) for a, g in uses]
    return [(in_full(module, a), in_full(module, g)) for a, g in uses]


def rows_at_once(device, numbers, rows):
    """How many of some rows, of so many numbers each, to work on at once: on a processor as many as stay in its cache,
    on a GPU all, since every further product is one more to launch."""
    return max(1, CACHED // max(1, numbers)) if device.type == "cpu" else max(1, rows)


def weight_gradients(module, uses, slide=True):
    """Gradients of the weight over all uses of the layer, (n, ...), and where its axes are (see `Explicit`)."""
    conv = type(module) is nn.Conv2d
    slides = conv and slide and all(_slides(module, g) for _, g in uses)
    out, inside, *kernel = module.weight.shape

    def of_use(a, g):
        if slides:
            return _slid(module, a, g)
        found = g.new_empty(len(a), out, *kernel, inside)
        rows = rows_at_once(a.device, count_positions(module, [(a, g)]) * module.weight[0].numel(), len(a))
        for i in range(0, len(a), rows):
            inputs, outputs = matrices(module, a[i : i + rows], g[i : i + rows])
            torch.matmul(outputs, inputs, out=found[i : i + rows].view(*outputs.shape[:3], -1))
        return found

    return added_up(of_use(a, g) for a, g in uses), ((0, 3, 4, 1, 2) if slides else (0, 1, 4, 2, 3)) if conv else None
