"""Whether two executions of a cell give the same outputs, where equal is more than equal bytes.

Memory addresses and wall times may differ (nbval.cfg), and a thousandth of a picture's pixels, since machines smooth
lines differently. A cell may state a tolerance in its metadata (`tolerance: 0.01`): its numbers may then differ by
this share of the larger one, its words may not.

>>> same_text("mean 1.00, holds", "mean 1.01, holds"), same_text("mean 1.00, holds", "mean 1.01, holds", tolerance=0.02)
(False, True)
>>> [same_text("mean 1.00, holds", text, tolerance=0.02) for text in ("mean 1.00, fails", "mean 1.00 or 1, holds")]
[False, False]
>>> same_text("| 9,990 | 1e-3 |", "| 10,010 | 1.01e-3 |", tolerance=0.02), same_text("-1", "1", tolerance=0.02)
(True, False)
>>> same_text("it took 1.2 s", "it took 13 min"), same_text("it took 1.2 s", "it took 1.2 bits")
(True, False)
"""

import base64
import copy
import difflib
import io
import math
import re
from pathlib import Path

# What `dpcompanion.reproduction.plotting.digest` gives: compared, and shown by nothing.
DIGEST = "application/vnd.dpcompanion.digest"
PICTURE = "image/png"
PIXEL_LEVELS, PIXEL_SHARE = 16, 1e-3
SANITISED = re.findall(
    r"^regex: (.*)\nreplace: (.*)$",
    (Path(__file__).resolve().parent.parent / "nbval.cfg").read_text(encoding="utf-8"),
    re.MULTILINE,
)
NUMBER = re.compile(r"[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def same(fresh, committed, tolerance=0.0):
    """Whether two lists of outputs are the same, but for what may differ."""
    if [plain(output) for output in within(fresh, committed, tolerance)] != [plain(output) for output in committed]:
        return False
    return all(map(same_picture, pictures(fresh), pictures(committed)))


def plain(output):
    """An output without its count and its pixels."""
    data = {kind: value if kind != PICTURE else "" for kind, value in output.get("data", {}).items()}
    return {**output, "data": data, "execution_count": None}


def within(fresh, committed, tolerance):
    """The fresh outputs, with the committed text in place of each that is the same within the tolerance."""
    fresh = copy.deepcopy(fresh)
    for new, old in zip(fresh, committed):
        for text, other in ((new, old), (new.get("data", {}), old.get("data", {}))):
            for kind in text.keys() & other.keys():
                if isinstance(text[kind], str) and kind != PICTURE and same_text(text[kind], other[kind], tolerance):
                    text[kind] = other[kind]
    return fresh


def same_text(new, old, tolerance=0.0):
    new, old = sanitized(new), sanitized(old)
    if new == old or not tolerance:
        return new == old
    # A number that needs more room moves the columns of a table.
    words = [re.sub(r"[ -]+", " ", NUMBER.sub("#", text)) for text in (new, old)]
    numbers = [[float(x.replace(",", "").replace("\u2212", "-")) for x in NUMBER.findall(text)] for text in (new, old)]
    return words[0] == words[1] and all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(*numbers))


def sanitized(text):
    for pattern, replacement in SANITISED:
        text = re.sub(pattern, replacement, text)
    return text


def pictures(outputs):
    return [output["data"][PICTURE] for output in outputs if PICTURE in output.get("data", {})]


def same_picture(new, old):
    """Equal in size and, but for a thousandth of the pixels, in colour."""
    if new == old:
        return True
    import numpy as np
    from PIL import Image

    one, other = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), dtype=int) for text in (new, old)
    )
    return one.shape == other.shape and (abs(one - other).max(axis=2) > PIXEL_LEVELS).mean() <= PIXEL_SHARE


def changed_lines(fresh, committed):
    """The lines that were committed (-) and those that a fresh execution has instead (+)."""
    old, new = ([line for output in each for line in shown(output)] for each in (committed, fresh))
    return [line for line in difflib.ndiff(old, new) if line[0] in "-+"] or ["another picture"]


def shown(output):
    data = output.get("data", {})
    text = output.get("text") or data.get(DIGEST) or data.get("text/markdown") or data.get("text/plain") or ""
    return sanitized(text).splitlines()
