"""One look for every figure: a colour for a notion, the same in every chapter, and sizes that a phone can show.

The colours are those of Okabe and Ito (2008), which remain distinct for
colour-blind readers; `MARKERS` and `LINES` tell the same notions apart in
print.  The font is IBM Plex Sans, which comes with the package, so that a
figure is the same on every machine.  `figure()` gives axes in the style, `digest()` says what a figure
draws, in few digits, so that a check that cannot see can compare it.

>>> COLORS["published"] == COLORS["live"]
False
>>> print(digest(epsilon=[0.123456, 2.5], steps=range(1000)))
epsilon: 2 values, 0.1235 .. 2.5, sum 2.623
steps: 1000 values, 0 .. 999, sum 4.995e+05
"""

import dataclasses
import math
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
#: What matplotlib calls it: a name that no font of a machine has, else that one could be found instead.
FAMILY = "dpcompanion figures"

# 5.2 inches at 150 dpi: 780 px, legible when a phone shrinks it to 360.
STYLE: dict[str, Any] = {
    "figure.figsize": (5.2, 3.4),
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
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
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
    # A notebook's inline backend crops figures by default.
    if "matplotlib_inline" in sys.modules:
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance().set_trait("print_figure_kwargs", {"bbox_inches": None})
    fonts = font_manager.fontManager.ttflist
    if all(font.name != FAMILY for font in fonts):
        found = font_manager.ttfFontProperty(font_manager.get_font(FONT))
        fonts.append(dataclasses.replace(found, name=FAMILY))
    settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=STYLE["axes.prop_cycle"])}
    matplotlib.rcParams.update(settings)


def figure(rows: int = 1, columns: int = 1, *, height: float | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """A figure and its axes in the style, as wide as every other; `height` in inches is for each row of axes.

    Panels lie below each other on a phone's page, so more than two columns are refused.
    """
    _checks.whole_number("rows", rows, 1)
    _checks.whole_number("columns", columns, 1, 2)
    import matplotlib.pyplot as plt

    use_style()
    width, one = STYLE["figure.figsize"]
    size = (width * (1.35 if columns == 2 else 1), rows * (height or (one if rows == 1 else 0.8 * one)))
    return plt.subplots(rows, columns, figsize=size, **kwargs)


class Digest(str):
    """A text for checks to compare, which a notebook keeps as an output of a type of its own and never shows."""

    MIME_TYPE = "application/vnd.dpcompanion.digest"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({self.MIME_TYPE: str(self)}, raw=True)


def digest(*, digits: int = 4, **arrays: Any) -> Digest:
    """One line for each array: how many values, the finite range, the sum, in few digits; NaN and inf are counted.

    The last line of the cell that draws a figure, where the notebook keeps it out of sight; `print` shows it.

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
            low, high, total = (f"{_unsigned(x):.{digits}g}" for x in (finite.min(), finite.max(), math.fsum(finite)))
            line += f", {low} .. {high}, sum {total}"
        for kind, count in (("nan", np.isnan(values).sum()), ("inf", np.isinf(values).sum())):
            line += f", {count} {kind}" if count else ""
        lines.append(line)
    return Digest("\n".join(lines))


def _unsigned(value: float) -> float:
    """Minus zero as zero."""
    return float(value) + 0.0
