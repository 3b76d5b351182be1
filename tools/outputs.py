"""Whether two executions of a cell give the same outputs, where equal is more than equal bytes.

Memory addresses and wall times may differ (nbval.cfg), and a thousandth of a picture's pixels,
since machines smooth lines differently. The SVG beside a picture has the same texts and shapes,
each within a point of where it was, but for a hundredth of them. A cell may state a tolerance in
its metadata (`tolerance: 0.01`): its numbers may then differ by this share of the larger one, its
words may not.

>>> (
...     same_text("mean 1.00, holds", "mean 1.01, holds"),
...     same_text("mean 1.00, holds", "mean 1.01, holds", tolerance=0.02),
... )
(False, True)
>>> [
...     same_text("mean 1.00, holds", text, tolerance=0.02)
...     for text in ("mean 1.00, fails", "mean 1.00 or 1, holds")
... ]
[False, False]
>>> (
...     same_text("| 9,990 | 1e-3 |", "| 10,010 | 1.01e-3 |", tolerance=0.02),
...     same_text("-1", "1", tolerance=0.02),
... )
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
import xml.etree.ElementTree
from pathlib import Path

# What `dpcompanion.reproduction.plotting.digest` gives: compared, and shown by nothing.
DIGEST = "application/vnd.dpcompanion.digest"
PICTURE = "image/png"
PIXEL_LEVELS, PIXEL_SHARE = 16, 1e-3
# What `dpcompanion.reproduction.plotting.drawing` gives.
DRAWING = "application/vnd.dpcompanion.drawing"
POINTS, SHAPE_SHARE = 1.0, 1e-2
PHONE = 358  # px of a figure in a window of 390
SANITISED = re.findall(
    r"^regex: (.*)\nreplace: (.*)$",
    (Path(__file__).resolve().parent.parent / "nbval.cfg").read_text(encoding="utf-8"),
    re.MULTILINE,
)
NUMBER = re.compile(r"[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def same(fresh, committed, tolerance=0.0):
    """Whether two lists of outputs are the same, but for what may differ."""
    if [plain(output) for output in within(fresh, committed, tolerance)] != [
        plain(output) for output in committed
    ]:
        return False
    return same_pictures(fresh, committed, tolerance)


def plain(output):
    """An output without its count, its pixels and its lines."""
    data = {
        kind: value if kind not in (PICTURE, DRAWING) else ""
        for kind, value in output.get("data", {}).items()
    }
    return {**output, "data": data, "execution_count": None}


def within(fresh, committed, tolerance):
    """The fresh outputs, with the committed text in place of each that is within the tolerance."""
    fresh = copy.deepcopy(fresh)
    for new, old in zip(fresh, committed):
        for text, other in ((new, old), (new.get("data", {}), old.get("data", {}))):
            for kind in (text.keys() & other.keys()) - {PICTURE, DRAWING}:
                if isinstance(text[kind], str) and same_text(text[kind], other[kind], tolerance):
                    text[kind] = other[kind]
    return fresh


def same_text(new, old, tolerance=0.0):
    new, old = sanitized(new), sanitized(old)
    if new == old or not tolerance:
        return new == old
    # A number that needs more room moves the columns of a table.
    words = [re.sub(r"[ -]+", " ", NUMBER.sub("#", text)) for text in (new, old)]
    numbers = [
        [float(x.replace(",", "").replace("\u2212", "-")) for x in NUMBER.findall(text)]
        for text in (new, old)
    ]
    return words[0] == words[1] and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(*numbers)
    )


def sanitized(text):
    for pattern, replacement in SANITISED:
        text = re.sub(pattern, replacement, text)
    return text


def pictures(outputs, kind=PICTURE):
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def same_pictures(fresh, committed, tolerance=0.0):
    """Whether the pictures of two lists of outputs are the same, as PNG and as SVG."""
    pairs = [(pictures(fresh, kind), pictures(committed, kind)) for kind in (PICTURE, DRAWING)]
    if any(len(new) != len(old) for new, old in pairs):
        return False
    return all(map(same_picture, *pairs[0])) and all(
        same_drawing(*pair, tolerance) for pair in zip(*pairs[1])
    )


def same_picture(new, old):
    """Equal in size and, but for a thousandth of the pixels, in colour."""
    if new == old:
        return True
    import numpy as np
    from PIL import Image

    one, other = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), dtype=int)
        for text in (new, old)
    )
    return (
        one.shape == other.shape
        and (abs(one - other).max(axis=2) > PIXEL_LEVELS).mean() <= PIXEL_SHARE
    )


def same_drawing(new, old, tolerance=0.0):
    """Equal in texts and shapes; all but a hundredth of these stand within a point of their place.

    >>> path = '<path d="M1 2L3 4" style="stroke: #000000"/>'
    >>> line = f'<svg viewBox="0 0 9 9">{path}<text x="5" y="6">ours</text></svg>'
    >>> [
    ...     same_drawing(line.replace(*change), line)
    ...     for change in (("L3 4", "L2 3L3 4.5"), ("ours", "theirs"))
    ... ]
    [True, False]
    >>> [
    ...     same_drawing(line.replace(*change), line)
    ...     for change in (("L3 4", "L3 8"), ("#000000", "#ffffff"))
    ... ]
    [False, False]
    """
    if new == old:
        return True
    (words, looks, boxes), (old_words, old_looks, old_boxes) = shapes(new), shapes(old)
    if looks != old_looks or not same_text(words, old_words, tolerance):
        return False
    moved = sum(any(abs(x - y) > POINTS for x, y in zip(*pair)) for pair in zip(boxes, old_boxes))
    return moved <= SHAPE_SHARE * len(boxes)


def shapes(svg):
    """The texts of an SVG, and of each element the kind, the look and the place."""
    elements = list(xml.etree.ElementTree.fromstring(svg).iter())
    boxes = []
    for element in elements:
        numbers = [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", element.get("d", ""))]
        ends = [end(part) for part in (numbers[::2], numbers[1::2]) if part for end in (min, max)]
        for name in ("x", "y", "width", "height", "transform", "viewBox", "data-cut", "data-end"):
            ends += [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", element.get(name, ""))]
        boxes.append(ends)
    words = "\n".join(element.text for element in elements if element.text)
    return words, [(element.tag, element.get("style")) for element in elements], boxes


def letters_on_a_phone(svg):
    """The size in px of the smallest text of an SVG, exponents apart, where each of its columns is
    `PHONE` px wide.

    >>> wide = '<svg viewBox="0 0 500 200"><text style="font-size: 11px">ours</text></svg>'
    >>> (
    ...     letters_on_a_phone(wide),
    ...     letters_on_a_phone(wide.replace('"><text', '" data-cut="250"><text')),
    ... )
    (7.876, 15.752)
    """
    width, cut = re.match(r'<svg viewBox="0 0 (\S+) \S+"(?: data-cut="(\S+)")?', svg).groups()
    column = max(float(cut), float(width) - float(cut)) if cut else float(width)
    sizes = [float(size) for size in re.findall(r'<text style="font-size: ([\d.]+)px', svg)]
    return min(sizes, default=math.inf) * PHONE / column


def changed_lines(fresh, committed):
    """The lines that were committed (-) and those that a fresh execution has instead (+)."""
    old, new = ([line for output in each for line in shown(output)] for each in (committed, fresh))
    return [line for line in difflib.ndiff(old, new) if line[0] in "-+"] or ["another picture"]


def shown(output):
    data = output.get("data", {})
    text = (
        output.get("text")
        or data.get(DIGEST)
        or data.get("text/markdown")
        or data.get("text/plain")
        or ""
    )
    return sanitized(text).splitlines()
