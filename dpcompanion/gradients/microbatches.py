"""How many examples to take through a network at once, by default.

On a processor time goes where memory is: the gradients that are held until their norms are known,
and the inputs and output gradients of layers, are written and read again, several times slower once
they leave the caches, and slower still where the system gives memory out anew in every pass. Too
few examples at once leave matrices small and Python busy. So what a network leaves is counted on
two examples, and as many go at once as leave `BYTES`. Against all 512 at once, clipped sums of
ResNet-20 take two thirds of the time, those of the CIFAR-10 CNN and of a small transformer three
quarters and less, those of networks for digits in float64 two thirds.

>>> from dpcompanion.training import cross_entropy, models
>>> x, y = torch.zeros(600, 3, 32, 32), torch.zeros(600, dtype=torch.int64)
>>> default_microbatch_size(models.resnet20(seed=0), cross_entropy, x, y, "mixed")
32
>>> default_microbatch_size(
...     models.mnist_cnn(seed=0), cross_entropy, torch.zeros(600, 1, 28, 28), y, "mixed"
... )
255
>>> default_microbatch_size(
...     models.linear(3072, 10, seed=0), cross_entropy, x.flatten(1), y, "mixed"
... )
512
"""

import weakref

import torch

from dpcompanion.gradients import traces
from dpcompanion.gradients.sums import bytes_left

#: Bytes that the examples which go through a network at once may leave, and the fewest and most
#: such examples. Measured on one core, for networks of 10^4 to 3 * 10^6 parameters; twice or half
#: as many change little.
BYTES, FEWEST, MOST = 2**24, 32, 512

# {model: {what else matters: bytes that an example leaves}}: counted once, by shapes alone.
_counted = weakref.WeakKeyDictionary()


def default_microbatch_size(model, loss, x, y, method, precision=None, most=MOST):
    """How many of the examples (x, y) to take through the model at once, `FEWEST` to `most`.

    `most` by "func", which bounds its gradients itself, and on a GPU, where a launch costs more
    than memory.
    """
    if x.device.type != "cpu" or method == "func" or len(x) <= FEWEST:
        return most
    trainable = tuple((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)
    key, counted = (method, precision, x.shape[1:], trainable), _counted.setdefault(model, {})
    if key not in counted:
        with torch.random.fork_rng(devices=[]), traces.probing(model):
            counted[key] = (
                bytes_left(model, loss, x[:2].clone(), y[:2].clone(), method, precision) / 2
            )
    return min(most, max(FEWEST, int(BYTES / max(1, counted[key]))))
