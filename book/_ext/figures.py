"""Draws each figure of a notebook into its page as SVG: in the colours of the theme, and on a phone
in one column.

A notebook keeps a figure as PNG and, beside it, as an SVG element in the colours of print
(`dpcompanion.reproduction.plotting.drawing`). Here the colours become variables of `custom.css`,
which has a value of each for either theme, and a figure of two columns becomes two pictures of one
drawing, which narrow pages show below each other.
"""

import html
import json
import re

DRAWING = "application/vnd.dpcompanion.drawing"
COLORS = {
    "#000000": "ink",
    "#ffffff": "ground",
    "#dddddd": "grid",
    "#bbbbbb": "pale",
    "#cccccc": "pale",
    "#d9d9d9": "pale",
    "#7f7f7f": "grey",
    "#808080": "grey",
    "#e69f00": "orange",
    "#56b4e9": "sky",
    "#009e73": "green",
    "#f0e442": "yellow",
    "#0072b2": "blue",
    "#d55e00": "vermilion",
    "#cc79a7": "purple",
}


def on_page(svg, name, alt):
    """The HTML of a drawing; `name` tells its ids from those of the page's other figures.

    >>> svg = '<svg viewBox="0 0 9 2"><path id="a" style="stroke: #000000"/><use href="#a"/></svg>'
    >>> print(on_page(svg, "fig", "A line & its twin."))
    <div class="drawing" role="img" aria-label="A line &amp; its twin."><svg viewBox="0 0 9 2"
    style="--width: 9" aria-hidden="true"><g id="fig"><path id="fig-a" style="stroke:
    var(--ink)"/><use href="#fig-a"/></g></svg></div>
    >>> on_page(svg.replace("2\\"", "2\\" data-cut=\\"4\\""), "fig", "").count("<svg viewBox")
    2
    >>> short = svg.replace("2\\"", "2\\" data-cut=\\"4\\" data-end=\\"1\\"")
    >>> 'viewBox="4 0 5 1"' in on_page(short, "fig", "")
    True
    >>> on_page(svg.replace("#000000", "#123456"), "fig", "")
    Traceback (most recent call last):
    ValueError: fig: no variable of custom.css stands for the colour #123456
    """
    width, height, cut, end, body = re.fullmatch(
        r'<svg viewBox="0 0 (\S+) (\S+)"(?: data-cut="(.*?)")?(?: data-end="(.*?)")?>(.*)</svg>',
        svg,
        re.DOTALL,
    ).groups()
    if unknown := {*re.findall(r"(?:fill|stroke): (#\w{6})", body)} - COLORS.keys():
        raise ValueError(
            f"{name}: no variable of custom.css stands for the colour {', '.join(sorted(unknown))}"
        )
    body = re.sub(r"(?<=(?:fill|roke): )#\w{6}", lambda color: f"var(--{COLORS[color[0]]})", body)
    # A rule for `image` would not reach into the second column, a variable does.
    body = re.sub(r"<image [^>]*/>", r'<g style="filter: var(--image)">\g<0></g>', body)
    body = re.sub(r'(?<=\bid=")|(?<=="#)|(?<=\burl\(#)', f"{name}-", body)
    columns = [(0.0, float(cut or width), height)]
    columns += [(float(cut), float(width), end or height)] if cut else []
    pictures = [f'<g id="{name}">{body}</g>', f'<use href="#{name}"/>']
    shown = "".join(
        f'<svg viewBox="{left:g} 0 {right - left:g} {below}" style="--width: {right - left:g}" '
        f'aria-hidden="true">{picture}</svg>'
        for (left, right, below), picture in zip(columns, pictures)
    )
    return f'<div class="drawing" role="img" aria-label="{html.escape(alt.strip())}">{shown}</div>'


def with_drawings(text):
    """The text of a notebook in which HTML stands for each figure that is kept as SVG."""
    notebook = json.loads(text)
    for number, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", []):
            if svg := "".join(output.get("data", {}).get(DRAWING, "")):
                alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
                output["data"] = {"text/html": on_page(svg, f"drawing-{number}", alt)}
    return json.dumps(notebook, ensure_ascii=False)


def setup(app):
    def read(app, name, source):
        if app.env.doc2path(name).endswith(".ipynb"):
            source[0] = with_drawings(source[0])

    app.connect("source-read", read)
    return {"parallel_read_safe": True}
