"""Per-instance accounts (Thudi et al. 2024), beside the ways of the paper.

*Theorem 3.6*: one point at 20 batches and 20 tuples of order 8, on a softmax regression of 7,850
parameters with expected batches of 128. The paper's way draws every tuple afresh; ours draws one
pool of 80 batches. Both estimates are the mean of 5 repetitions, with its standard deviation;
`updates` counts gradients of whole batches.

*Composition*: theorem 3.3 over 78,000 steps, 100 points and 10 runs at order 8 (200 epochs of
CIFAR-10 in batches of 128), 78 million sensitivities. The peer computes each divergence by the
theorem's sum at the next whole order, vectorised over runs and points; its time is that of 100
steps, scaled up. `excess` is what rounding up adds to the result.

*Exact composition*: what accounting adds to a step of 1,000 tilted runs, ln A and the count.
`CPU s` adds up all threads.
"""

import math
import time

import torch

from dpcompanion import per_instance


def _row(task, way, started, *, share=1.0, updates=None, result=None, excess=None):
    """A row, with the times since `started`, of which a share counts."""
    wall, processor = time.perf_counter() - started[0], time.process_time() - started[1]
    return {
        "task": task,
        "way": way,
        "s": wall * share,
        "CPU s": processor * share,
        "updates": updates,
        "result": result,
        "excess": excess,
    }


def _now():
    return time.perf_counter(), time.process_time()


def _updates(count, batch, generator, data, x=None):
    """Mean clipped gradients of a softmax regression over Poisson batches, with x joining each with
    the same rate.
    """
    features, labels, weights = data
    found = []
    for _ in range(count):
        chosen = torch.rand(len(features), generator=generator) < batch / len(features)
        rows, classes = features[chosen], labels[chosen]
        if x is not None and torch.rand((), generator=generator) < batch / len(features):
            rows, classes = torch.cat([rows, x[0][None]]), torch.cat([classes, x[1][None]])
        errors = torch.softmax(rows @ weights.T, dim=1)
        errors[torch.arange(len(rows)), classes] -= 1
        norms = errors.norm(dim=1) * rows.norm(dim=1)
        found.append(
            ((errors / norms.clamp(min=1)[:, None]).T @ rows).flatten() / max(1, len(rows))
        )
    return torch.stack(found)


def _fresh(data, x, order, noise, generator):
    """The paper's estimator for "remove": 20 batches, 20 tuples of `order` batches for each."""
    total, used = 0.0, 0
    for _ in range(20):
        centre = _updates(1, 128, generator, data)
        exponents = []
        for _ in range(20):
            shifted = (_updates(order, 128, generator, data, x) - centre) / noise
            exponents.append((shifted.sum(0).square().sum() - shifted.square().sum()) / 2)
        used += 1 + 20 * order
        total += float(torch.logsumexp(torch.stack(exponents), 0)) - math.log(20)
    return total / 20 / (order - 1), used


def _pooled(data, x, order, noise, generator):
    alone, mixed = _updates(20, 128, generator, data), _updates(80, 128, generator, data, x)
    return float(
        per_instance.update_divergence(
            alone, mixed, noise_std=noise, order=order, direction="remove", generator=generator
        )
    ), 100


def theorem_3_6():
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(5000, 785, generator=generator)
    labels = torch.randint(10, (5000,), generator=generator)
    data = features, labels, 0.01 * torch.randn(10, 785, generator=generator)
    x, rows = (torch.rand(785, generator=generator), torch.tensor(3)), []
    for name, way in (("fresh tuples", _fresh), ("one pool", _pooled)):
        values, started = [], _now()
        for seed in range(5):
            value, used = way(data, x, 8, 0.2, torch.Generator().manual_seed(seed))
            values.append(value)
        values = torch.tensor(values)
        rows.append(
            _row(
                "theorem 3.6",
                name,
                started,
                share=1 / 5,
                updates=used,
                result=f"{float(values.mean()):.4f} ± {float(values.std()):.4f}",
            )
        )
    return rows


def _plain(sensitivities, rate, noise, order, p, steps):
    """Theorem 3.3's contributions of the first steps, by theorem 3.2 at the next whole order."""
    total = 0.0
    for t, sizes in enumerate(sensitivities, start=1):
        i = steps - t
        whole = math.ceil(float(per_instance.holder_order(order, p, i)) - 1e-9)
        k = torch.arange(whole + 1, dtype=torch.float64)
        coefficients = (
            math.lgamma(whole + 1)
            - torch.lgamma(k + 1)
            - torch.lgamma(whole - k + 1)
            + k * math.log(rate)
            + (whole - k) * math.log1p(-rate)
        )
        logs = torch.logsumexp(
            coefficients + (sizes.double() ** 2)[..., None] * (k * k - k) / (2 * noise**2), dim=-1
        )
        moment = torch.logsumexp(p * logs, 0) - math.log(len(sizes))
        total = total + math.exp(i * math.log1p(-1 / p)) / p / (order - 1) * moment
    return total


def composition(steps=78_000, points=100, runs=10):
    generator = torch.Generator().manual_seed(0)
    sensitivities = torch.rand(steps, runs, points, generator=generator)
    rate, noise, order, p = 128 / 50_000, 1.0, 8, 3.0 * steps
    started = _now()
    result = per_instance.compose_sensitivities(
        sensitivities, sample_rate=rate, noise_std=noise, order=order
    )
    ours = _row(
        "composition", "compose_sensitivities", started, result=f"mean {float(result.mean()):.3f}"
    )
    few, started = 100, _now()
    _plain(sensitivities[:few], rate, noise, order, p, steps)
    theirs = _row("composition", "the sum, step by step", started, share=steps / few)
    # What rounding up adds, on a run short enough for the exact way.
    short = sensitivities[:200]
    exact = per_instance.compose(
        lambda t, a: per_instance.step_divergence(
            sample_rate=rate, noise_multiplier=noise, sensitivity=short[t - 1], orders=a
        ),
        steps=len(short),
        order=order,
        p=600,
    )
    tabled = per_instance.compose_sensitivities(
        short, sample_rate=rate, noise_std=noise, order=order
    )
    return [theirs, {**ours, "excess": f"{float((tabled / exact - 1).max()):.1e}"}]


def exact_composition(runs=1000, steps=200):
    generator = torch.Generator().manual_seed(0)
    sizes, total = torch.rand(runs, generator=generator, dtype=torch.float64), 0.0
    options = {"sample_rate": 0.01, "noise_std": 1.0, "order": 8}
    started = _now()
    for _ in range(steps):
        total = total + per_instance.log_mass(sizes, **options)
        per_instance.tilted_counts(sizes, generator=generator, **options)
    return [_row("exact composition", f"a step of {runs} runs", started, share=1 / steps)]


def run():
    """The rows of the table."""
    return theorem_3_6() + composition() + exact_composition()
