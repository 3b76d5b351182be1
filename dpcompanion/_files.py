"""The one way in which a file is written: whole or not at all.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp()) / "sub" / "numbers.txt"
>>> replace(path, b"1 2 3")
>>> path.read_bytes(), [each.name for each in path.parent.iterdir()]
(b'1 2 3', ['numbers.txt'])
"""

import glob
import json
import os
import pathlib
import secrets
import time

# Seconds after which a partial file that nobody has written to is what a killed process left.
_STALE = 3600


def replace(path, content, *, mode=0o666):
    """Put `content`, bytes or blocks of them, at `path` in one step: a reader sees the old file or
    the new one, never a part.

    The content goes to a new file in the same folder under a random name (two containers may share
    a folder and even a process number), then to the disk, then into place. Of several writers at
    once the last one wins, whole. The folder is made if there is none. Partial files for the same
    `path` that have not been written to for an hour are removed: a killed process left them.
    `mode`: its permissions, less what the process masks.
    """
    path = _path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # As mkstemp does, but with the permissions of usual files; "x" refuses a file that exists.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    remove_stale(path)


def write(path, text):
    """Put a text into a file as it is, with its permissions, or into what a link or a device leads
    to.
    """
    _path(path).write_text(text, encoding="utf-8")


def _path(path):
    if not isinstance(path, (str, os.PathLike)) or str(path) == "":
        raise ValueError(f"path must be that of a file, got {path!r:.80}")
    return pathlib.Path(path)


def parsed(source, kind):
    """What a JSON text or a file of it holds, a `kind` of thing. Where an object says a thing
    twice, of which Python would take the last, it is refused.

    >>> parsed('{"n": 5}', "plan")
    {'n': 5}
    """
    if not isinstance(source, (str, os.PathLike)) or source == "":
        raise ValueError(f"source must be a JSON text or a file, got {source!r:.80}")
    text = str(source)
    if isinstance(source, os.PathLike) or not text.lstrip().startswith(("{", "[")):
        text = pathlib.Path(source).read_text(encoding="utf-8")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"source must be a {kind} in JSON, got {text[:80]!r}: {error}") from None


def _once(pairs):
    """A JSON object that says nothing twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"source must say each thing once, got {twice!r} twice")
    return found


def remove_stale(path):
    """Remove the partial files that processes which were killed left beside `path`."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        try:
            if time.time() - part.stat().st_mtime > _STALE:
                part.unlink()
        except OSError:  # another process removed it, or it is not ours to remove
            pass
