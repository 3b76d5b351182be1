"""The engine's checkpoints in files of `training.checkpoints`: whole, and as they were written.

Opacus hands over paths and open files alike.
"""

import os
import pathlib
import tempfile

from dpcompanion.training.checkpoints import read_checkpoint, write_checkpoint

_IDENTITY = {"kind": "IndividualizedPrivacyEngine"}


def write_sealed(place, content):
    """Write `content` to a path or an open file."""
    if isinstance(place, (str, os.PathLike)):
        write_checkpoint(place, {"identity": _IDENTITY, "content": content})
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sealed(part := pathlib.Path(folder, "open file"), content)
        place.write(part.read_bytes())


def read_sealed(place):
    """What `write_sealed` wrote; ValueError for anything else."""
    if isinstance(place, (str, os.PathLike)):
        found = read_checkpoint(place, ("identity", "content"))
        if found["identity"] != _IDENTITY:
            raise ValueError(
                f"path must be that of an engine's checkpoint, but {os.fspath(place)!r} is "
                "another's"
            )
        return found["content"]
    with tempfile.TemporaryDirectory() as folder:
        (part := pathlib.Path(folder, "open file")).write_bytes(place.read())
        return read_sealed(part)
