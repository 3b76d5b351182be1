"""Gradient norms of all examples at once, by passes over the data that leave no trace in the model.

>>> from dpcompanion.training import cross_entropy
>>> from dpcompanion.training.examples import examples_of
>>> model = torch.nn.Linear(2, 2).train()
>>> examples = examples_of((torch.zeros(3, 2), torch.tensor([0, 1, 1])))
>>> norms_of_all(model, cross_entropy, examples, method="mixed", microbatch_size=2).shape
torch.Size([3])
"""

import contextlib

import torch

from dpcompanion._devices import to_device
from dpcompanion.gradients import clipping, proof, states, traces


def norms_of_all(
    model, loss, examples, *, method, microbatch_size=None, precision=None, within=None
):
    """The gradient norm of each of the n examples (`dpcompanion.training.examples`), (n,), on the
    model's device; or of those of a slice, `within`.

    `microbatch_size` examples are loaded and measured at once, by default as many as suit memory
    and caches. The model computes in evaluation mode, without dropout. Random numbers, gradients,
    modes and Opacus' per-example gradients stay as they are.
    """
    device = next(model.parameters()).device
    start, stop, _ = (within or slice(None)).indices(len(examples))
    norms = (
        [torch.zeros(0, dtype=next(model.parameters()).dtype, device=device)]
        if start == stop
        else []
    )
    with undisturbed(model) as inner:
        network, loss = examples.seen(inner, loss)
        # elsewhere it would be waited for
        before = traces.noted(inner, values=device.type == "cpu")
        size = microbatch_size or loaded_at_once(examples.probe[0])
        for at in range(start, stop, size):
            with torch.random.fork_rng(devices=[]):  # a transform may draw
                x, y = examples.part(at, min(at + size, stop))
            norms.append(
                clipping.gradient_norms(
                    network,
                    loss,
                    to_device(x, device),
                    to_device(y, device),
                    method=method,
                    microbatch_size=microbatch_size,
                    precision=precision,
                )
            )
        traces.check_untouched(inner, before)
    return torch.cat(norms)


def resolve_method(model, loss, examples, method, precision=None):
    """The method proved right for this model (`clipping.resolve_method`), in evaluation mode."""
    device, (x, y) = next(model.parameters()).device, examples.probe
    rows = proof.rows_to_look_through(len(x))
    with undisturbed(model) as inner:
        network, losses = examples.seen(inner, loss)
        found = clipping.resolve_method(
            network, losses, x[rows].to(device), y[rows].to(device), method, precision
        )
        examples.prove(inner, loss)
        return found


def state_of(model):
    """The state of the model (`dpcompanion.gradients.states`) in which the passes see it."""
    with undisturbed(model) as inner:
        return states.state_of(inner)


def loaded_at_once(x):
    """512 examples of up to 8,192 numbers, fewer if larger, lest what they leave fill a GPU."""
    return min(512, max(16, 2**22 // max(1, x[0].numel())))


def unwrapped(model):
    """The model within a wrapper of Opacus; any other as it is, whatever its attributes are called.

    What carries the hooks need not be a module itself.
    """
    wraps = any(each.__module__.startswith("opacus.grad_sample") for each in type(model).__mro__)
    return getattr(model, "_module", model) if wraps else model


@contextlib.contextmanager
def undisturbed(model):
    """The model in evaluation mode, without hooks of Opacus' GradSampleModule; then as it was."""
    inner = unwrapped(model)
    hooked = getattr(model, "hooks_enabled", False)
    with traces.evaluating(inner):
        if hooked:
            model.disable_hooks()
        try:
            yield inner
        finally:
            if hooked:
                model.enable_hooks()
