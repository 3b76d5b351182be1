r"""What floats do to the account of a release, and how much of it is proved.

The accounts of DP-SGD are about real numbers. A plan with ``arithmetic="float"`` counts what a
computer does instead. With per-example gradients :math:`h_i` as they are held, factors :math:`f_i`
that clip them to :math:`C_i`, a batch :math:`B`, and a grid :math:`g` that is a power of two, a
step gives out

.. math::
    \mathrm{snap}_g\Big(\mathrm{fl}\sum_{i \in B} f_i h_i\Big) + \mathrm{round}_g(Z),
    \qquad Z \sim \mathcal N(0, s^2 I)

which is :math:`\mathrm{round}_g` of the snapped sum plus :math:`Z`: the Gaussian mechanism, rounded
afterwards, and rounding costs nothing (`dpcompanion.mechanism.secure`). One example moves the
snapped sum by at most

.. math::
    \Delta_i = C_i (1 + \eta) + 2 \gamma_{n + 2} (1 + \eta) \sum_{j=1}^{n} C_j + \sqrt d\, g.

* :math:`\eta = 2^{-15}`: by how much a measured norm may be too small. Norms are those of the very
  numbers that are added up, in blocks of 256 squares in float32 and float64 above that. A sum of
  :math:`k` products is off by a relative :math:`\gamma_k = k u / (1 - k u)` at most, in any order
  (Higham 2002, section 3.1), so a norm by :math:`260 u / 2` with :math:`u = 2^{-24}`; a linear
  layer's is a product of two, and :math:`260 u < \eta`. Gradients in bfloat16 are measured in
  float32. Factors are made in float64, and a hair smaller than need be.
* :math:`\gamma_{n+2}`, with :math:`u = 2^{-53}`: the sum is made in float64. A coordinate :math:`k`
  of it is off by :math:`\gamma_{n + 2} \sum_i |f_i h_{ik}|` at most, in whatever order and pieces
  the terms are added, and whether multiplications are fused or not: no term passes through more
  than :math:`n - 1` additions and 2 roundings of its own (fast matrix multiplication in Strassen's
  way is excluded; no common library multiplies so). By the triangle inequality the vector of errors
  is no longer than :math:`\gamma_{n + 2} \sum_i \lVert f_i h_i \rVert`. The sum with the example
  errs once, and so does the one without.
* :math:`\sqrt d\, g` for :math:`d` parameters: each coordinate moves by :math:`g / 2` at most when
  it is snapped, in either sum.

The account is then the plan's with :math:`\Delta_i` in the place of :math:`C_i`. Each number of
noise is drawn from a law at most :math:`2^{-100}` in total variation from the rounded Gaussian:
where float64 leaves a multiple open, more bits and `mpmath` decide, whose working precision has 128
bits to spare. A run draws :math:`d T` numbers, and :math:`(1 + e^\varepsilon)\, d\, T\, 2^{-100}`
of delta covers them. Coins are exact.

**What remains assumed**, here and nowhere else:

1. *An example's gradient does not depend on who else is in the batch*, to the last bit. Kernels
   choose their blocks by the size of a batch, so it does, in the last bits:
   `dpcompanion.gradients.batch_dependence` measures by how much.
2. *Who sees what*: the adversary sees all noisy sums, and so all weights. Not the history (losses,
   batch sizes, norms), not the keys, not how long a step takes. Time and memory depend on the batch
   sampled.
3. *The cipher*: ChaCha20's stream cannot be distinguished from random bits.
4. *The inverse of the normal distribution function* in SciPy is right to a relative 1e-14; tests
   find 1e-15.
5. *The processor* rounds as IEEE 754 says.

An account for each example (`dpcompanion.individual`) is one for real numbers, and refuses a plan
that says "float".

>>> share = sensitivity(1.0, n=60_000, noise_std=3.4, parameters=26_010) - 1
>>> 3e-5 < share < 1e-4
True
"""

import math
from collections.abc import Callable
from typing import overload

import torch

from dpcompanion.mechanism.secure import grid_of

ARITHMETICS = ("real", "float")
#: Bound on the relative error of a measured norm, the eta above.
NORM_ERROR = 2.0**-15
#: Bound on the total variation between the law of one number of noise and the rounded Gaussian.
SAMPLER_DISTANCE = 2.0**-100
_UNIT = 2.0**-53
# Rounding of this very computation.
_SLACK = 1 + 2.0**-40


@overload
def sensitivity(max_grad_norm: float, *, n: int, noise_std: float, parameters: int) -> float: ...


@overload
def sensitivity(
    max_grad_norm: float | torch.Tensor, *, n: int, noise_std: float, parameters: int
) -> float | torch.Tensor: ...


def sensitivity(
    max_grad_norm: float | torch.Tensor, *, n: int, noise_std: float, parameters: int
) -> float | torch.Tensor:
    """How far one example moves the snapped sum at most, the Delta above: a float, or (n,) for a
    clip norm for each.

    Args:
        max_grad_norm: a number, or a tensor (n,).
        n: number of examples.
        noise_std: standard deviation of the noise on the sum, above 0; it fixes the grid.
        parameters: how many numbers the sum has.
    """
    terms = n + 2
    each = terms * _UNIT / (1 - terms * _UNIT)
    total = (
        max_grad_norm.sum().item() if isinstance(max_grad_norm, torch.Tensor) else n * max_grad_norm
    )
    common = 2 * each * (1 + NORM_ERROR) * total + math.sqrt(parameters) * grid_of(noise_std)
    return (max_grad_norm * (1 + NORM_ERROR) + common) * _SLACK


def least_noise(
    noise_multiplier: float, max_grad_norm: float | torch.Tensor, *, n: int, parameters: int
) -> float:
    """A noise multiplier whose noise is in no example's sensitivity above less than
    `noise_multiplier`'s is in their clip norm, one for all or (n,); ValueError if none is.

    >>> sigma = least_noise(2.0, 1.0, n=1000, parameters=100)
    >>> 2.0 <= sigma / sensitivity(1.0, n=1000, noise_std=sigma, parameters=100) < 2.0 + 1e-6
    True
    """
    found, norms = noise_multiplier, torch.as_tensor(max_grad_norm, dtype=torch.float64)
    for _ in range(100):
        delta = sensitivity(
            max_grad_norm, n=n, noise_std=found * norms.mean().item(), parameters=parameters
        )
        if bool((found * norms >= noise_multiplier * delta).all()):
            return found
        found = math.nextafter(float((noise_multiplier * delta / norms).max()), math.inf)
    raise ValueError(
        f"parameters must be few enough for the grid of the noise, got {parameters} with a noise "
        f"multiplier of {noise_multiplier:g}"
    )


def paid_for(epsilon_at: Callable[[float], float], delta: float, numbers: int) -> float:
    """Epsilon at `delta` when `numbers` numbers of noise are off by `SAMPLER_DISTANCE` each.

    Args:
        epsilon_at: delta -> epsilon of the exact mechanism.
        delta: of the result.
        numbers: how many numbers are drawn.

    >>> paid_for(lambda delta: 3.0, 1e-5, 10**9)
    3.0
    """
    distance = numbers * SAMPLER_DISTANCE
    if not distance:
        return float(epsilon_at(delta))
    for part in (1e-9, 0.5):
        # exp(epsilon) may be as large as this part of delta pays for.
        if part * delta <= 2 * distance:
            continue
        found = float(epsilon_at(delta * (1 - part)))
        if found <= math.log(part * delta / distance - 1):
            return found
    return math.inf
