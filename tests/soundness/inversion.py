r"""Delta of composed sampled Gaussian mechanisms by inverting a Laplace transform, with numpy and scipy alone.

With M(z) = E[exp(z S)] of the summed loss S, delta(eps) = 1/(2 pi i) times the integral of M(z) e^(-z eps) / (z (z + 1))
along any vertical line with positive real part that M admits. The trapezoidal rule on it converges exponentially.
One step needs no transform: the event is a half line.
"""

import numpy as np
from scipy import stats
from scipy.optimize import minimize_scalar


def delta(runs, epsilon, remove):
    """Delta at epsilon of all `runs`, (sample rate, noise multiplier, steps) each; NaN where the rule does not resolve it.
    """
    runs = [run for run in runs if run[2]]
    if sum(steps for _, _, steps in runs) == 1:
        return _one_step(*runs[0][:2], epsilon, remove)

    def log_moment(z):
        return sum(steps * _log_moment(rate, noise, z, remove) for rate, noise, steps in runs)

    def exponent(log_tilt):
        tilt = np.exp(log_tilt)
        return float(log_moment(np.array([tilt + 0j]))[0].real) - tilt * epsilon - np.log(tilt) - np.log1p(tilt)
    found = minimize_scalar(exponent, bounds=(np.log(1e-4), np.log(400)), method="bounded", options={"xatol": 0.05})
    tilt = float(np.exp(found.x))
    # A rule of spacing h adds what lies multiples of 2 pi / h away: halved until that no longer shows.
    last = float("nan")
    for fineness in (14, 28, 56, 112):
        step, points = tilt / fineness, 40 * fineness
        z = tilt + 1j * step * np.arange(points)
        terms = np.exp(log_moment(z) - z * epsilon - np.log(z) - np.log1p(z) - found.fun)
        terms[0] /= 2
        value = float(step / np.pi * terms.real.sum() * np.exp(found.fun))
        if np.abs(terms[-points // 8:]).max() * points < 1e-7 and abs(value - last) < 1e-7 * value:
            return value
        last = value
    return float("nan")


def _one_step(rate, noise, epsilon, remove):
    gap = np.expm1(epsilon if remove else -epsilon) / rate
    if gap <= -1:
        return 0.0               # adding never costs more than -ln(1 - q)
    at = noise**2 * np.log1p(gap) + 0.5
    tail = stats.norm.sf if remove else stats.norm.cdf
    without, with_it = tail(at / noise), (1 - rate) * tail(at / noise) + rate * tail((at - 1) / noise)
    return float(with_it - np.exp(epsilon) * without if remove else without - np.exp(epsilon) * with_it)


def _log_moment(rate, noise, z, remove):
    """ln E[exp(z L)] of one step at complex z with one real part."""
    power = float(z[0].real) + 1 if remove else -float(z[0].real)
    low, high = sorted((0.0, power / noise))
    spacing = 0.12 * min(1.0, noise)
    t = np.arange(low - 10, high + 10 + spacing, spacing)
    u = t / noise - 0.5 / noise**2
    ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + u) if rate < 1 else u
    real = -t * t / 2 + power * ratio
    top = real.max()
    weights = np.exp(real - top) * spacing / np.sqrt(2 * np.pi)
    signed = (1 if remove else -1) * ratio
    sums = np.concatenate([np.exp(1j * np.outer(part, signed)) @ weights for part in np.array_split(
        z.imag, max(1, len(z) * len(t) >> 20))])
    return top + np.log(sums)
