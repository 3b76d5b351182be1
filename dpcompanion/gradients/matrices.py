"""Linear layers and convolutions as matrix products: what went in, and gradients of what came out.

>>> layer = nn.Linear(3, 2)
>>> inputs, outputs = matrices(
...     layer, torch.ones(5, 4, 3), torch.ones(5, 4, 2)
... )  # 5 examples, 4 positions
>>> inputs.shape, outputs.shape
(torch.Size([5, 1, 4, 3]), torch.Size([5, 1, 2, 4]))
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion.gradients.tensors import added_up, own_parameters

# What it costs to write a number of an explicit gradient and read it twice, in multiply-adds
# (measured on a CPU).
_TRAFFIC = 16
# Numbers that stay in a processor's cache while they are worked on several times.
CACHED = 2**19


def padded(conv, a):
    if conv.padding_mode == "zeros":
        return F.pad(a, conv._reversed_padding_repeated_twice)
    return F.pad(a, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)


def _image(conv, a, room):
    """(n, channels, height, width) -> padded, channels last, (n, height, width, channels)."""
    if conv.padding_mode != "zeros":
        return padded(conv, a).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    left, right, top, bottom = conv._reversed_padding_repeated_twice
    n, channels, height, width = a.shape
    if "image" not in room:
        room["image"] = a.new_zeros(n, top + height + bottom, left + width + right, channels)
    image = room["image"][:n]
    image[:, top : top + height, left : left + width].copy_(a.permute(0, 2, 3, 1))
    return image


def _copied(windows, room):
    """What the windows look at, side by side."""
    if "windows" not in room:
        room["windows"] = windows.new_empty(windows.shape)
    return room["windows"][: len(windows)].copy_(windows)


def _patches(conv, a, room=None):
    """(n, channels, height, width) -> (n, groups, positions, in), what each output position sees.

    The channels of a patch lie side by side, which is several times faster to copy than the order
    of the weight. Examples that are worked on a few at a time go to the same `room`, a dict that is
    empty at first: to memory that is new a processor takes twice as long to write.
    """
    room = {} if room is None else room
    windows = _image(conv, a, room)
    for axis, (size, stride, dilation) in enumerate(
        zip(conv.kernel_size, conv.stride, conv.dilation), start=1
    ):
        windows = windows.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    n, height, width = windows.shape[:3]
    windows = windows.unflatten(3, (conv.groups, -1)).permute(0, 3, 1, 2, 5, 6, 4)
    return _copied(windows, room).view(n, conv.groups, height * width, -1)


def _strips(conv, a, room):
    """(n, channels, height, width) -> (n * groups, rows x columns of the output, in): what lies
    before each column of the output in one row of the (padded) input. A patch is as many of them as
    its kernel has rows.
    """
    windows = _image(conv, a, room)
    (_, width), stride, dilation = conv.kernel_size, conv.stride[1], conv.dilation[1]
    windows = windows.unfold(2, dilation * (width - 1) + 1, stride)[..., ::dilation]
    n, rows, columns = windows.shape[:3]
    windows = windows.unflatten(3, (conv.groups, -1)).permute(0, 3, 1, 2, 5, 4)
    return _copied(windows, room).view(n * conv.groups, rows * columns, -1)


def _by_strips(conv, positions, dtype):
    """Whether strips are faster than patches (measured): where the kernel goes down row by row,
    over more positions than there are channels to copy a gradient for; not where they are as narrow
    as those of an image's colours, and not in bfloat16, whose products are so fast that three in
    the place of one cost more than they save.
    """
    out, inside, height, width = conv.weight.shape
    whole = dtype != torch.bfloat16
    return (
        whole
        and conv.stride[0] == 1
        and height > 1
        and inside * width >= 16
        and positions > 2 * out
    )


def matrices(module, a, g, room=None):
    """Inputs (n, groups, positions, in) and output gradients (n, groups, out, positions) of one use
    of a layer. `room` is what patches were copied to before, and are again.
    """
    if type(module) is nn.Conv2d:
        return _patches(module, a, room), g.reshape(len(g), module.groups, -1, g[0, 0].numel())
    return a.reshape(len(a), 1, -1, a.shape[-1]), g.reshape(len(g), 1, -1, g.shape[-1]).transpose(
        2, 3
    )


def count_positions(module, uses):
    return sum(g[0].numel() for _, g in uses) // module.weight.shape[0]


def gram_is_cheaper(module, positions, kept=True, dtype=torch.float32):
    """Whether the Gram matrices, in float64, cost less arithmetic than a gradient: than what
    writing and reading it costs, if it is `kept`, since without it the sum takes as much to make;
    than all of it, if it is made for its norm alone.

    Linear layers alone make a difference: patches of a convolution in float64 cost more than they
    save, and what was computed in bfloat16 (`dtype`) is multiplied in it several times faster.
    """
    groups = getattr(module, "groups", 1)
    gram = positions**2 * (module.weight.shape[0] + groups * module.weight[0].numel())
    cost = _TRAFFIC
    if type(module) is nn.Linear and dtype != torch.bfloat16:
        if module.weight.numel() > CACHED:
            cost = 3 * _TRAFFIC  # from and to memory (measured)
        if not kept:
            cost = max(cost, (cost + positions) / 2)
    return gram < cost * module.weight.numel()


def bias_gradients(module, g):
    """Gradients of the bias, (n, out)."""
    if type(module) is nn.Conv2d:
        return g.flatten(2).sum(2)
    return g.reshape(len(g), -1, g.shape[-1]).sum(1)


def in_full(module, tensor):
    """In the precision of the module's parameters: what went through a network in a lower one is
    multiplied and added up in theirs, in the norm and in the sum alike.
    """
    return (
        tensor.to(next(iter(own_parameters(module).values())).dtype)
        if tensor.is_floating_point()
        else tensor
    )


def in_one_precision(module, uses):
    """Uses whose inputs and output gradients can be multiplied: those of a layer that computed in
    bfloat16, and is used once, in bfloat16, as plain autograd does it (sums are made in float32,
    then rounded), all others in full.

    Only for gradients that are held: clipping must measure and add up what was rounded.
    """
    if len(uses) == 1 and uses[0][1].dtype == torch.bfloat16:
        return [(a.to(g.dtype), g) for a, g in uses]
    return [(in_full(module, a), in_full(module, g)) for a, g in uses]


def rows_at_once(device, numbers, rows):
    """How many of some rows, of so many numbers each, to work on at once: on a processor as many as
    stay in its cache, on a GPU all, since every further product is one more to launch.
    """
    return max(1, CACHED // max(1, numbers)) if device.type == "cpu" else max(1, rows)


def weight_gradients(module, uses):
    """Gradients of the weight over all uses of the layer, (n, out, in); those of a convolution in
    the order in which they are computed, (n, out, height, width, in).
    """
    out, inside, *kernel = module.weight.shape

    def of_use(a, g):
        found = g.new_empty(len(a), out, *kernel, inside)
        positions = count_positions(module, [(a, g)])
        strips = bool(kernel) and _by_strips(module, positions, g.dtype)
        seen = module.weight[0].numel() // (kernel[0] if strips else 1)
        # More in bfloat16: of few examples its products are too short for what it takes to begin
        # them (measured).
        numbers = positions * seen // (4 if g.dtype == torch.bfloat16 else 1)
        rows, room = rows_at_once(a.device, numbers, len(a)), {}
        rows = max(1, -(-len(a) // max(1, -(-len(a) // rows))))  # as many each time
        for i in range(0, len(a), rows):
            multiply = _by_rows if strips else _at_once
            multiply(module, a[i : i + rows], g[i : i + rows], found[i : i + rows], room)
        return found

    return added_up(of_use(a, g) for a, g in uses)


def _at_once(module, a, g, found, room):
    inputs, outputs = matrices(module, a, g, room)
    torch.matmul(outputs, inputs, out=found.view(*outputs.shape[:3], -1))


def _by_rows(conv, a, g, found, room):
    """Of patches of 3 x 3 pixels only a third is copied, with a product a row of the kernel."""
    inputs = _strips(conv, a, room)
    positions = g[0, 0].numel()
    per_row = conv.dilation[0] * g.shape[3]
    outputs = g.reshape(len(inputs), -1, positions)
    found = found.view(len(inputs), outputs.shape[1], conv.kernel_size[0], -1)
    for row in range(conv.kernel_size[0]):
        # Written where it is to go, products would be made one by one.
        found[:, :, row] = outputs @ inputs[:, row * per_row : row * per_row + positions]
