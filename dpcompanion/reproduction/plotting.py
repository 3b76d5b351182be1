"""One look for every figure: one colour a notion in all chapters, and sizes that a phone can show.

The colours are those of Okabe and Ito (2008), which remain distinct for colour-blind readers;
`MARKERS` and `LINES` tell the same notions apart in print. The font is IBM Plex Sans, which comes
with the package, so that a figure is the same on every machine. `figure()` gives axes in the style,
`digest()` says what a figure draws, in few digits, so that a check that cannot see can compare it.

>>> COLORS["published"] == COLORS["live"]
False
>>> print(digest(epsilon=[0.123456, 2.5], steps=range(1000)))
epsilon: 2 values, 0.1235 .. 2.5, sum 2.623
steps: 1000 values, 0 .. 999, sum 4.995e+05
"""

import dataclasses
import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpcompanion import _checks

_BLACK, _ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _VERMILION, _PURPLE, _GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#7F7F7F",
)

COLORS = {
    # who says so
    "published": _BLACK,
    "recorded": _BLUE,
    "live": _VERMILION,
    # accountants
    "rdp": _BLUE,
    "pld": _VERMILION,
    "gaussian": _GREEN,
    "opacus": _ORANGE,
    "dp-accounting": _PURPLE,
    "clt": _GREY,
    # what an account is about
    "worst case": _BLACK,
    "individual": _SKY,
    "per-instance": _PURPLE,
    "intrinsic": _GREEN,
    "estimate": _ORANGE,
    # training
    "non-private": _GREY,
    "dp-sgd": _BLACK,
    "sample": _BLUE,
    "scale": _VERMILION,
    "combined": _GREEN,
    # groups, from the strictest budget to the loosest
    "group 1": _BLUE,
    "group 2": _ORANGE,
    "group 3": _GREEN,
}
MARKERS = {"published": "s", "recorded": "D", "live": "o", "opacus": "x", "dp-accounting": "+"}
LINES = {"worst case": "--", "estimate": ":", "pld": "-", "rdp": "-.", "gaussian": ":"}

FONT = Path(__file__).parent / "fonts" / "IBMPlexSans_400Regular.ttf"
#: Its name in matplotlib, which no font of a machine has: that one could be found instead.
FAMILY = "dpcompanion figures"

#: The type of the output that holds a figure as SVG: the book's pages show it, Jupyter shows the
#: PNG beside it.
DRAWING = "application/vnd.dpcompanion.drawing"

# Letters of 11 points on 4.9 inches: 11 px where a phone shows the figure in 358 px.
STYLE: dict[str, Any] = {
    "figure.figsize": (4.9, 3.4),
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.bbox": "standard",
    "figure.constrained_layout.use": True,
    "font.family": [FAMILY, "DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "axes.prop_cycle": (_BLUE, _VERMILION, _GREEN, _ORANGE, _PURPLE, _SKY, _BLACK),
    "svg.hashsalt": "dpcompanion",
    "path.simplify": True,
    "text.usetex": False,
    "mathtext.fontset": "custom",
    "mathtext.fallback": "stixsans",
    **{f"mathtext.{face}": FAMILY for face in ("rm", "it", "bf", "bfit", "sf", "tt", "cal")},
}


def style(notion: str, **changes: Any) -> dict[str, Any]:
    """What to pass to `plot` for a notion: its colour, and its marker or line where it has one.

    >>> style("worst case")
    {'color': '#000000', 'linestyle': '--'}
    >>> style("opacus", linestyle="none")["marker"]
    'x'

    Raises ValueError for an unknown notion, so that none is drawn in two colours.
    """
    _checks.one_of("notion", notion, COLORS)
    found: dict[str, Any] = {"color": COLORS[notion]}
    if notion in MARKERS:
        found["marker"] = MARKERS[notion]
    if notion in LINES:
        found["linestyle"] = LINES[notion]
    return {**found, **changes}


def use_style() -> None:
    """Set the style for every figure from here on.  Loads matplotlib."""
    import matplotlib
    from cycler import cycler
    from matplotlib import font_manager

    matplotlib.rcdefaults()
    if "IPython" in sys.modules:
        _set_up_notebook()
    fonts = font_manager.fontManager.ttflist
    if all(font.name != FAMILY for font in fonts):
        found = font_manager.ttfFontProperty(font_manager.get_font(FONT))
        fonts.append(dataclasses.replace(found, name=FAMILY))
    settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=STYLE["axes.prop_cycle"])}
    matplotlib.rcParams.update(settings)


def figure(
    rows: int = 1, columns: int = 1, *, height: float | None = None, **kwargs: Any
) -> tuple[Any, Any]:
    """A figure and its axes in the style, as wide as every other; `height` in inches is per row.

    Panels lie below each other on a phone's page, so more than two columns are refused.
    """
    _checks.whole_number("rows", rows, 1)
    _checks.whole_number("columns", columns, 1, 2)
    import matplotlib.pyplot as plt

    use_style()
    width, one = STYLE["figure.figsize"]
    size = (
        width * (1.43 if columns == 2 else 1),
        rows * (height or (one if rows == 1 else 0.8 * one)),
    )
    return plt.subplots(rows, columns, figsize=size, **kwargs)


def drawing(fig: Any) -> str:
    """A figure as an SVG element for a page: letters are text, numbers have two decimals, colours
    are as in print.

    The columns of a figure of two can be shown below each other: `data-cut` is where no axes are in
    the way, and `data-end` where the second ends if the rest below it is empty.

    >>> svg = drawing(figure(columns=2)[0])
    >>> svg[:51], ">0.8</text>" in svg
    ('<svg viewBox="0 0 504.504 244.8" data-cut="252.2"><', True)
    """
    import matplotlib

    def rounded(number: re.Match[str]) -> str:
        return f"{_unsigned(round(float(number[0]), 2)):g}"

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        fig.savefig(stream, format="svg", bbox_inches=None, metadata={"Date": None})
    svg = stream.getvalue()
    body = svg[svg.index("</metadata>") + len("</metadata>") : svg.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(
        r"\bfont-family: [^;\"]*;? ?| transform=\"rotate\(-0 .*?\"|(?<=<g) id=\"[^\"]*\"", "", body
    )
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", rounded, tag[0]), body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(?<= d=")[^"]+', lambda path: _thinned(path[0]), body)
    body = _grouped(re.sub(r">\s+<", "><", re.sub(r"\s+", " ", body).strip()))
    width, height = 72 * fig.get_size_inches()
    cut = _cut(fig)
    return f'<svg viewBox="0 0 {width:g} {height:g}"{cut}>{body}</svg>'


def _grouped(body: str) -> str:
    """The look of markers said once for all, and many dots as one path whose ends are round.

    >>> dot = '<path id="m" d="M0 1C1 0 0 -1 0 1z"/>'
    >>> use = '<use href="#m" x="3" y="4" style="fill: #000000; stroke: #000000"/>'
    >>> print(_grouped(f"{dot}<g>{use}{use}</g>").removeprefix(dot))
    <g style="fill: #000000; stroke: #000000"><use href="#m" x="3" y="4"/><use href="#m" x="3"
    y="4"/></g>
    >>> _grouped(f"{dot}<g>{100 * use}</g>").removeprefix(dot)[:80]
    '<g><path style="fill: none; stroke: #000000; stroke-width: 3; stroke-linecap: ro'
    """
    radii = dict(re.findall(r'<path id="(\w+)" d="M0 ([\d.]+)C[^ML"]*z"', body))

    def grouped(found: re.Match[str]) -> str:
        opening, uses = found.groups()
        looks, marks = ({*re.findall(f'{name}="#?(.*?)"', uses)} for name in ("style", "href"))
        if len(looks) > 1 or len(marks) > 1:
            return found[0]
        (look,), (mark,) = looks, marks
        points = re.findall('x="(.*?)" y="(.*?)"', uses)
        solid = re.fullmatch(r"fill: (#\w{6}); stroke: \1(?:; stroke-width: ([\d.]+))?", look)
        if len(points) < 50 or not solid or mark not in radii:
            return f'{opening} style="{look}">' + uses.replace(f' style="{look}"', "") + "</g>"
        across = 2 * float(radii[mark]) + float(solid[2] or 1)
        look = f"fill: none; stroke: {solid[1]}; stroke-width: {across:g}; stroke-linecap: round"
        return (
            f'{opening}><path style="{look}" d="{"".join(f"M{x} {y}z" for x, y in points)}"/></g>'
        )

    return re.sub(r"(<g[^>]*)>((?:<use [^>]*/>)+)</g>", grouped, body)


def _thinned(path: str) -> str:
    """Without the points of a line that are within a third of a point of the one before.

    >>> _thinned("M 0 0 L 0.1 0 L 0.2 0 L 5 5 L 5 4.9 z")
    'M0 0L5 5L5 4.9z'
    """
    kept: list[tuple[str, list[str]]] = []
    steps = [(step, rest.split()) for step, rest in re.findall(r"([MLQCz])([^MLQCz]*)", path)]
    for (step, point), (following, _) in zip(steps, [*steps[1:], ("", [])]):
        if (
            step == following == "L"
            and math.dist(*(map(float, each[-2:]) for each in (point, kept[-1][1]))) < 0.33
        ):
            continue
        kept.append((step, point))
    return "".join(step + " ".join(point) for step, point in kept)


def _cut(fig: Any) -> str:
    """Where a figure's two columns part, as an attribute: between axes with no legend across; and
    where the second ends, if it does in the upper half.
    """
    (width, height), dpi = fig.get_size_inches(), fig.dpi
    if width <= STYLE["figure.figsize"][0]:
        return ""
    drawn = [ax for ax in fig.axes if ax.axison or ax.has_data()]
    boxes = [box for part in (*drawn, *fig.legends) if (box := part.get_tightbbox()) is not None]
    boxes = sorted((box.x0 / dpi, box.x1 / dpi, height - box.y0 / dpi) for box in boxes)
    for i in range(1, len(boxes)):
        end, start = max(box[1] for box in boxes[:i]), boxes[i][0]
        if end < start and 0.2 * width < end < 0.8 * width:
            lowest = max(box[2] for box in boxes[i:])
            below = f' data-end="{72 * lowest + 4:.1f}"' if lowest < 0.6 * height else ""
            return f' data-cut="{36 * (end + start):.1f}"{below}'
    return ""


def _set_up_notebook() -> None:
    """Figures are not cropped, unlike the inline backend's; an SVG is kept beside each PNG."""
    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from matplotlib.figure import Figure
    from matplotlib_inline.config import InlineBackend

    if (shell := get_ipython()) is None:
        return
    InlineBackend.instance().set_trait("print_figure_kwargs", {"bbox_inches": None})
    formatters = shell.display_formatter.formatters
    if DRAWING not in formatters:
        formatters[DRAWING] = BaseFormatter(parent=shell.display_formatter)
        formatters[DRAWING].set_trait("format_type", DRAWING)
        formatters[DRAWING].set_trait("print_method", "_repr_drawing_")
        formatters[DRAWING].for_type(Figure, drawing)


class Digest(str):
    """A text for checks to compare, an output of its own type that a notebook never shows."""

    MIME_TYPE = "application/vnd.dpcompanion.digest"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({self.MIME_TYPE: str(self)}, raw=True)


def digest(*, digits: int = 4, **arrays: Any) -> Digest:
    """One line for each array: how many values, the finite range, the sum, in few digits; NaN and
    inf are counted.

    The last line of the cell that draws a figure, where the notebook keeps it out of sight; `print`
    shows it.

    >>> print(digest(epsilon=[1.0, float("nan"), float("inf")]))
    epsilon: 3 values, 1 .. 1, sum 1, 1 nan, 1 inf
    """
    _checks.whole_number("digits", digits, 1, 15)
    lines = []
    for name, values in arrays.items():
        values = np.asarray(
            values.detach().cpu()
            if hasattr(values, "detach")
            else list(values)
            if isinstance(values, range)
            else values,
            dtype=np.float64,
        ).ravel()
        finite = values[np.isfinite(values)]
        line = f"{name}: {values.size} value{'s' * (values.size != 1)}"
        if finite.size:
            low, high, total = (
                f"{_unsigned(x):.{digits}g}"
                for x in (finite.min(), finite.max(), math.fsum(finite))
            )
            line += f", {low} .. {high}, sum {total}"
        for kind, count in (("nan", np.isnan(values).sum()), ("inf", np.isinf(values).sum())):
            line += f", {count} {kind}" if count else ""
        lines.append(line)
    return Digest("\n".join(lines))


def _unsigned(value: float) -> float:
    """Minus zero as zero."""
    return float(value) + 0.0
