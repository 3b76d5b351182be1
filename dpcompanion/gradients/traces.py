"""What a pass leaves in a model: nothing, if only tried; or what `check_untouched` refuses.

>>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
>>> before = noted(model, values=False)
>>> _ = model(torch.randn(5, 3))
>>> check_untouched(model, before)
Traceback (most recent call last):
    ...
ValueError: model must keep no statistics of its examples, but training changes buffer
'1.running_mean', which may ...
"""

import contextlib
import copy
import math
import random

import numpy as np
import torch

from dpcompanion._devices import forked_rng, on_accelerator
from dpcompanion.seeds import derive_key, seed_torch


@contextlib.contextmanager
def evaluating(model):
    """The model in evaluation mode, and each module in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def quiet(model, kind):
    """The modules of a kind in evaluation mode, and in their own mode afterwards."""
    found = [module for module in model.modules() if isinstance(module, kind) and module.training]
    try:
        for module in found:
            module.eval()
        yield
    finally:
        for module in found:
            module.train()


@contextlib.contextmanager
def drawing_alike(device, seed=0):
    """What is drawn within, by PyTorch, NumPy or Python, depends on `seed` alone; the generators
    end as they were.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with forked_rng(device):
        seed_torch(derive_key(seed, "proof"), device)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def next_draws(device):
    """The next number of each generator that `drawing_alike` sets: it shows, within, whether
    anything was drawn since the beginning.
    """
    return (
        random.random(),
        np.random.rand(),
        *(torch.rand((), device=d).item() for d in {torch.device("cpu"), device}),
    )


@contextlib.contextmanager
def buffers_kept(model):
    """Buffers end as they were, whether they were written or exchanged."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    before = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    try:
        yield
    finally:
        for place, own in places:
            place.update(own)
        with torch.no_grad():
            for b, value in before:
                if not torch.equal(b.to_dense(), value.to_dense()):
                    b.copy_(value)


@contextlib.contextmanager
def beginning_alike(model, device, seed=0):
    """As `drawing_alike`, from the same buffers too, which end as they were."""
    with buffers_kept(model), drawing_alike(device, seed):
        yield


@contextlib.contextmanager
def naming(model):
    """A list of the names of the layers whose forward methods are under way: after an exception,
    where it came from.
    """
    inside, hooks = [], []

    def enters(name):
        return lambda *_: inside.append(name)

    def leaves(*_):
        inside.pop()

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enters(name or "model")))
        hooks.append(module.register_forward_hook(leaves))
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def weights_nearby(parameters):
    """Weights moved at random by 0.3 of their size, or of what they begin with; then as before."""
    generator = torch.Generator().manual_seed(0)
    own = {p: p.data for p in parameters}
    try:
        for p, data in own.items():
            usual = 1 / math.sqrt(data[0].numel()) if data.ndim > 1 and len(data) else 0.3
            size = 0.3 * max(data.double().square().mean().sqrt().item(), usual)
            p.data = data + size * torch.randn(data.shape, generator=generator).to(data)
        yield
    finally:
        for p, data in own.items():
            p.data = data


@contextlib.contextmanager
def in_double(model):
    """Parameters and buffers of a model as float64; then as before, to the bit."""
    parts = (*model.parameters(), *model.buffers())
    own = {id(part): (part, part.data) for part in parts if part.is_floating_point()}
    try:
        for part, data in own.values():
            part.data = data.double()
        yield
    finally:
        for part, data in own.values():
            part.data = data


def untrained(model):
    """Buffers and frozen parameters, {what to call it: tensor}: no step may change them, as no
    noise would cover it.
    """
    # Opacus's expanded weights stand for what is trained, and answer no question.
    own = ((name, p) for name, p in model.named_parameters() if isinstance(p, torch.nn.Parameter))
    frozen = {f"frozen parameter {name!r}": p for name, p in own if not p.requires_grad}
    return {f"buffer {name!r}": b for name, b in model.named_buffers()} | frozen


def _tensors_of(model):
    """Buffers and parameters, {name: tensor}: no pass may change them, a step only trained ones."""
    own = ((name, p) for name, p in model.named_parameters() if isinstance(p, torch.nn.Parameter))
    return untrained(model) | {f"parameter {name!r}": p for name, p in own if p.requires_grad}


def noted(model, *, values):
    """Buffers and parameters of a model now, for `check_untouched`: tensors, their versions, their
    places in memory and copies: of buffers, which some layers write without a new version, and, if
    asked for, of parameters.

    Versions and places cost nothing, and miss what is written into `.data`.
    """
    return {
        what: (
            t,
            local(t)._version,
            _place(local(t)),
            local(t).detach().clone()
            if (values or not isinstance(t, torch.nn.Parameter)) and not t.is_meta
            else None,
        )
        for what, t in _tensors_of(model).items()
    }


def local(t):
    """The part of a DTensor that this process has; of another tensor itself."""
    if type(t).__name__ != "DTensor":
        return t
    with torch.no_grad():
        return t.to_local()


def _place(t):
    # what is sparse has no place of its own
    return t.data_ptr() if t.layout is torch.strided else None


def equal(a, b):
    """Whether two tensors hold the same numbers, NaN where NaN is: a tensor where the two lie."""
    a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape:
        return torch.tensor(False)
    if a.device.type == "cpu" and torch.equal(a, b):
        return torch.tensor(True)
    return ((a == b) | (a != a) & (b != b)).all()


def check_untouched(model, before, *, name="model", buffers=True, wait=True):
    """No pass has changed a parameter since `noted`, as a layer does that initialises itself from
    the first examples that it sees, nor (unless `buffers` are let be) a buffer.

    Without `wait` values that lie on a device are not asked for: {what: whether it changed, a
    tensor} comes back.
    """
    later = {}
    for what, t in _tensors_of(model).items():
        was, version, place, value = before.get(what, (None,) * 4)
        if isinstance(t, torch.nn.Parameter) or buffers:
            here = local(t)
            if was is not t or (version, place) != (here._version, _place(here)):
                refuse_statistics(what, name)
            elif value is not None and not wait and on_accelerator(t):
                later[what] = ~equal(value, here)
            elif value is not None and not equal(value, here):
                refuse_statistics(what, name)
    return later


def refuse_statistics(what, name="model"):
    raise ValueError(
        f"{name} must keep no statistics of its examples, but training changes {what}, which may "
        "hold some that no noise covers"
    )


def check_later(later):
    """What `check_untouched` left for several later looks: {what: whether it changed, a tensor}."""
    for what, changed in later.items():
        if changed:
            refuse_statistics(what)


@contextlib.contextmanager
def probing(model):
    """Passes that only try a model: it ends as it was, and one that writes into a parameter is
    refused by its name.
    """
    places = [(m._parameters, dict(m._parameters)) for m in model.modules()]
    before = noted(model, values=True)
    with buffers_kept(model):
        try:
            try:
                yield
            finally:  # that something was written is said first: what else fails may come of it
                check_untouched(model, before, buffers=False)
        finally:
            for place, own in places:
                place.update(own)
            with torch.no_grad():
                for t, _, _, value in before.values():
                    if (
                        isinstance(t, torch.nn.Parameter)
                        and value is not None
                        and not equal(value, t)
                    ):
                        t.copy_(value)


def check_leaves_no_trace(model, x):
    """Refuse a model that keeps statistics, or that draws at random: runs would share the draws."""
    model = copy.deepcopy(model)
    before = noted(model, values=True)
    generators = [torch.random.get_rng_state] + [torch.cuda.get_rng_state] * (
        x.device.type == "cuda"
    )
    with forked_rng(x.device), torch.no_grad():
        states = [state() for state in generators]
        model(x)
        if not all(torch.equal(old, state()) for old, state in zip(states, generators)):
            raise ValueError(
                "model must not draw at random, as dropout does; train such runs one by one"
            )
    check_untouched(model, before)
