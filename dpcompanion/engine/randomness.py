"""Where draws and noise come from, how noise is added, and what a checkpoint keeps of it.

Both come from ciphers, as in `dpcompanion.mechanism.noise`: coins are exact, and sum and noise meet
on a grid. Keys are the operating system's or, for research, hashed from a seed; a
`torch.Generator`, as Opacus takes it, makes a run repeatable too, on the 32 bits of a seed that
PyTorch looks at. Either way noise is drawn and added in float64, whatever the model's type, and
rounded once.

A checkpoint holds how far each stream has come.  Keys that nobody knows lie beside it (see
`dpcompanion.training.checkpoints`).
"""

import math
import os
import pathlib
import warnings

import torch

from dpcompanion import _checks
from dpcompanion._devices import on_accelerator
from dpcompanion.mechanism import noise as mechanism
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.seeds import keyed_generator
from dpcompanion.training.checkpoints import digest_of, key_file, note_seeds, read_keys, write_keys


def sources(sampling, noise, *, seed=None, secure_mode=False):
    """((sampling, noise), origin): the generators that were given, or the streams of a seed, or of
    keys that nobody knows; and what they repeat themselves by, in words, or None.
    """
    if noise is not None:
        _checks.generator("noise_generator", noise)
    if secure_mode and not (sampling is None and noise is None and seed is None):
        raise ValueError(
            "seed, noise_generator, and the loader's generator, must be None in secure mode, which "
            "draws from a cipher under secret keys"
        )
    if seed is not None:
        if not (sampling is None and noise is None):
            raise ValueError(
                "seed must be None where the loader or noise_generator brings a generator, got "
                f"{seed!r}"
            )
        streams = mechanism.generators(seed)
        return (streams["sampling"], streams["noise"]), str(seed)
    if sampling is not None and noise is None:  # noise that repeats itself is said anyway
        warnings.warn(
            f"data_loader has a generator, of seed {sampling.initial_seed()}, which decides the "
            "random batches: for anyone who knows the seed, sampling amplifies nothing, and an "
            "example's epsilon is larger than stated; give a loader without a generator for a "
            "model that is released",
            RuntimeWarning,
            stacklevel=3,
        )
    origin = None if noise is None else f"torch.Generator, {noise.initial_seed()}"
    # Draws have a generator of their own: were it used for anything else, a run that goes on from a
    # checkpoint could give the noise of the saved one to other draws.
    source = noise if sampling is None else sampling
    if source is not None:
        words = torch.randint(-(2**63), 2**63 - 1, (4,), generator=source, device=source.device)
        sampling = keyed_generator(
            words.cpu().numpy().tobytes(), "cpu" if source is noise else source.device
        )
    return (
        SecureStream() if sampling is None else sampling,
        SecureStream() if noise is None else noise,
    ), origin


def note_origin(path, origin, data):
    """Warn where noise that repeats itself was used on data of another `digest`, with a checkpoint
    in this folder.
    """
    if origin is not None and isinstance(path, (str, os.PathLike)):
        note_seeds(path, [(origin, data)])


def digest(dataset, people=None):
    """What tells data sets apart: the tensors and arrays that they hold (TensorDataset's; `data`
    and `targets`, as in torchvision), behind subsets what is in them too, and else type and length
    alone; and whose their rows are.
    """
    held = [getattr(dataset, name, None) for name in ("tensors", "data", "targets", "indices")]
    parts = [
        part
        for item in held
        if item is not None
        for part in (item if isinstance(item, tuple) else (item,))
    ]
    try:
        own = digest_of(*map(torch.as_tensor, parts))
    except (TypeError, ValueError, RuntimeError):
        own = "unknown"
    inner = getattr(dataset, "dataset", None)
    whose = (
        ""
        if people is None
        else f" of persons {digest_of(people.owners)} {len(people)} {people.at_most}"
    )
    return (
        f"{type(dataset).__name__} {len(dataset)} {own}"
        + ("" if inner is None else f" of {digest(inner)}")
        + whose
    )


def noisy(sums, std, generator, released):
    """Each sum with its noise N(0, std^2), of its shape, type and device; and whether they were not
    finite. `released` brings together those of all ranks (`Ranks.released`).

    On the host a FloatingPointError says so at once. A device is not asked, since the host would
    wait for it: there the answer is a tensor, and where it is yes nothing that comes out is a
    number, as nothing would have come out here.
    """
    _checks.number("std", std, 0, math.inf, closed="left")

    def with_noise(total):
        away, finite = on_accelerator(total), total.isfinite().all()
        if not away and not finite:
            raise FloatingPointError(not_finite("total must be finite"))
        try:
            found = mechanism.noisy(
                torch.where(finite, total, 0.0) if away else total, std, generator
            )
        except ValueError as error:
            raise FloatingPointError(not_finite(error)) from error
        return torch.where(finite, found, torch.nan) if away else found

    total = torch.cat(
        [s.detach().flatten().to(device=sums[0].device, dtype=torch.float64) for s in sums]
    )
    total = released(total, with_noise)
    spoilt = ~total.isfinite().all() if on_accelerator(total) else torch.tensor(False)
    pieces = total.split([s.numel() for s in sums])
    return [
        piece.view(s.shape).to(device=s.device, dtype=s.dtype) for piece, s in zip(pieces, sums)
    ], spoilt


def not_finite(reason):
    """What is said of a sum that is not."""
    return (
        f"a sum of gradients cannot be given noise ({reason}); where one example's gradient is "
        "not finite it is left out in all modes but ghost: use hooks"
    )


def restore(generators, saved):
    """Go on from saved states. A stream whose key is not that of the saved run goes on with its
    own, and never back.
    """
    kinds = {name: isinstance(state, dict) for name, state in saved.items()}
    if kinds != {
        name: isinstance(generator, SecureStream) for name, generator in generators.items()
    }:
        # A generator that starts again would repeat noise that was already used.
        raise ValueError(
            "generators must be given as in the run that was saved, whose "
            f"{' and '.join(name for name in kinds if not kinds[name]) or 'none'} had one"
        )
    for name, generator in generators.items():
        if kinds[name]:
            generator.set_state(
                {"calls": max(saved[name]["calls"], generator.get_state()["calls"])}
            )
        else:
            generator.set_state(saved[name].cpu())


def keep_keys(path, generators, *, ended):
    """Write the keys of a checkpoint's streams beside it; of a run that has ended none remain."""
    streams = _streams(path, generators)
    if streams and ended:
        pathlib.Path(key_file(path)).unlink(missing_ok=True)
    elif streams:
        write_keys(key_file(path), streams, 0)


def find_keys(path, generators, saved, *, same_data):
    """Give the streams of a checkpoint the keys that lie beside it: then they go on as the saved
    run would have. Not on other data: the noise of both runs would cancel in the difference of the
    models.
    """
    streams = _streams(path, generators)
    if not streams:
        return
    if not same_data:
        warnings.warn(
            f"{os.fspath(path)!r} is a checkpoint of a run on other data, whose noise is not used "
            "again: the run goes on with new random numbers",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    try:
        found = read_keys(key_file(path), streams)
    except ValueError:
        for stream in streams.values():
            # no half of an old key from its start
            stream.set_state({"calls": 0, "key": SecureStream().key})
        raise
    if found is not None:
        for name, stream in streams.items():
            stream.set_state(saved[name])


def _streams(path, generators):
    """The streams whose keys can lie beside `path`, which may be an open file."""
    if not isinstance(path, (str, os.PathLike)):
        return {}
    return {
        name: generator
        for name, generator in generators.items()
        if isinstance(generator, SecureStream)
    }
