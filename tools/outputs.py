"""Whether two executions of a notebook say the same.

Texts are compared exactly, but for memory addresses and for wall times printed as "took 1.23 s". A cell may state a
tolerance in its metadata (`tolerance: 0.01`): its numbers may then differ by this share of the larger one, its words
may not. Pictures may differ in a thousandth of their pixels.

>>> same_text("mean 1.00, holds", "mean 1.01, holds"), same_text("mean 1.00, holds", "mean 1.01, holds", tolerance=0.02)
(False, True)
>>> [same_text("mean 1.00, holds", text, tolerance=0.02) for text in ("mean 1.00, fails", "mean 1.00 or 1, holds")]
[False, False]
>>> same_text("| 9,990 | 1e-3 |", "| 10,010 | 1.01e-3 |", tolerance=0.02), same_text("-1", "1", tolerance=0.02)
(True, False)
"""

import base64
import difflib
import hashlib
import io
import math
import re

import nbformat

# What `dpcompanion.reproduction.plotting.digest` gives: compared here, and shown by nothing.
DIGEST = "application/vnd.dpcompanion.digest"
PICTURE = "image/png"
PIXEL_LEVELS, PIXEL_SHARE = 16, 1e-3
# What may differ between two executions; every other number is compared.
SANITISED = (
    (re.compile(r"\bat 0x[0-9a-f]+"), "at ADDRESS"),
    (re.compile(r"\btook \d+(\.\d+)? (ms|s|min)\b"), "took TIME"),
)
NUMBER = re.compile(r"[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def differences(fresh, committed):
    """What two executions of one source differ in: [(number of the code cell, [(old line, new line)])], and the
    numbers of the cells whose code is new. Cells count from 1."""
    before = {cell.id: cell for cell in committed.cells if cell.cell_type == "code"}
    moved, added = [], []
    for number, cell in enumerate((cell for cell in fresh.cells if cell.cell_type == "code"), 1):
        old = before.get(cell.id)
        if old is None:
            added.append(number)
        elif not same_outputs(cell, old):
            moved.append((number, changed_lines(shown(old.outputs), shown(cell.outputs))))
    return moved, added


def adopt(fresh, committed):
    """Give each cell that says the same as before the outputs it had, so that equal results are equal bytes."""
    before = {cell.id: cell for cell in committed.cells if cell.cell_type == "code"}
    for cell in fresh.cells:
        if cell.cell_type == "code" and cell.id in before and same_outputs(cell, before[cell.id]):
            cell.outputs = before[cell.id].outputs
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count


def same_outputs(cell, old):
    if len(cell.outputs) != len(old.outputs):
        return False
    tolerance = float(cell.metadata.get("tolerance", 0))
    for one, other in zip(cell.outputs, old.outputs):
        texts, others = texts_of(one), texts_of(other)
        if texts.keys() != others.keys() or not same_picture(*(x.get("data", {}).get(PICTURE) for x in (one, other))):
            return False
        if not all(same_text(texts[kind], others[kind], tolerance) for kind in texts):
            return False
    return True


def texts_of(output):
    """All that is compared of an output besides its picture: {part: text}."""
    plain = nbformat.from_dict(output)
    data = plain.pop("data", {})
    plain.pop("execution_count", None)
    text = {kind: value if isinstance(value, str) else repr(value) for kind, value in plain.items()}
    return text | {
        f"data {kind}": value if isinstance(value, str) else repr(value)
        for kind, value in data.items()
        if kind != PICTURE
    }


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
        text = pattern.sub(replacement, text)
    return text


def same_picture(new, old):
    """Equal in size and, but for a thousandth of the pixels, in colour: machines differ in how they smooth lines."""
    if new is None or old is None or new == old:
        return new == old
    import numpy as np
    from PIL import Image

    one, other = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), dtype=int) for text in (new, old)
    )
    return one.shape == other.shape and (abs(one - other).max(axis=2) > PIXEL_LEVELS).mean() <= PIXEL_SHARE


def shown(outputs):
    """The lines that stand for some outputs, pictures by their hash."""
    lines = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text") or data.get("text/markdown") or data.get("text/plain") or ""
        lines += sanitized(text).splitlines()
        lines += [f"(digest) {line}" for line in data.get(DIGEST, "").splitlines()]
        if PICTURE in data:
            lines.append(f"<picture {hashlib.sha256(data[PICTURE].encode()).hexdigest()[:12]}>")
    return lines


def changed_lines(old, new):
    """[(old line, new line)], an empty text where there is none."""
    pairs = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            before, after = old[a:b], new[c:d]
            rows = max(len(before), len(after))
            pairs += zip(before + [""] * (rows - len(before)), after + [""] * (rows - len(after)))
    return pairs
