"""Makes the site light: every page loads in seconds on a phone.

The theme brings Font Awesome twice: as a font with its style sheet, which draws every icon, and as a script of 1.5 MB
that would draw each icon once more. The script is emptied rather than removed, so that no page asks in vain. And
figures get a palette of 256 colours, which looks the same and takes a third of the bytes.
"""

from pathlib import Path

from PIL import Image

SCRIPT = "_static/scripts/fontawesome.js"


def lighten(path):
    """Give the PNG at `path` a palette, on white, if that makes it smaller.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "ramp.png")
    >>> Image.linear_gradient("L").rotate(30).convert("RGB").resize((500, 500)).save(path)
    >>> before = os.path.getsize(path)
    >>> lighten(path)
    >>> Image.open(path).mode, os.path.getsize(path) < before
    ('P', True)
    """
    path = Path(path)
    picture = Image.open(path).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    part = path.with_suffix(".part")
    flat.quantize(256, dither=Image.Dither.NONE).save(part, "png")
    if part.stat().st_size < path.stat().st_size:
        part.replace(path)
    else:
        part.unlink()


def setup(app):
    def finish(app, error):
        if error is not None or app.builder.format != "html":
            return
        site = Path(app.outdir)
        if (site / SCRIPT).is_file():
            (site / SCRIPT).write_text("// The icons are drawn by the font of the same name.\n", encoding="utf-8")
        for path in (site / "_images").glob("*.png"):
            lighten(path)

    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
