import pathlib
import re
import runpy
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from dpcompanion.reproduction import plotting

BOOK = pathlib.Path(__file__).resolve().parents[2] / "book"


def test_notions_that_meet_in_a_figure_have_different_colours():
    for together in (
        ("published", "recorded", "live"),
        ("rdp", "pld", "gaussian", "opacus", "dp-accounting", "clt"),
        ("worst case", "individual", "per-instance", "intrinsic", "estimate"),
        ("non-private", "dp-sgd", "sample", "scale", "combined"),
        ("group 1", "group 2", "group 3"),
    ):
        assert len({plotting.COLORS[notion] for notion in together}) == len(together)


def test_an_unknown_notion_is_refused():
    with pytest.raises(ValueError, match="notion"):
        plotting.style("moments")


def test_every_figure_has_the_same_width_and_a_white_ground():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    for rows, height in ((1, 3.4), (2, 5.44)):
        fig, axes = plotting.figure(rows)
        assert fig.get_size_inches().tolist() == pytest.approx([4.9, height]) and fig.dpi == 150
        assert fig.get_facecolor() == (1, 1, 1, 1)
        plt.close(fig)
    with pytest.raises(ValueError, match="columns"):
        plotting.figure(1, 3)


def test_figures_are_set_in_the_font_of_the_package_whatever_the_machine_has(monkeypatch, recwarn):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    # A machine with a Plex of its own, which comes first.
    manager = font_manager.fontManager
    other = font_manager.FontEntry(
        fname="/nowhere/Plex.ttf", name="IBM Plex Sans", style="normal", weight=400
    )
    monkeypatch.setattr(manager, "ttflist", [other, *manager.ttflist])
    fig, axes = plotting.figure()
    axes.loglog([1, 10, 100], label="\u03c3, \u03b5 \u2264 1")
    axes.set_xlabel(r"$\sigma$, $\mathcal{N}$")
    axes.legend()
    fig.canvas.draw()
    plt.close(fig)
    for text in fig.findobj(matplotlib.text.Text):
        assert font_manager.findfont(text.get_fontproperties()) == str(plotting.FONT)
    assert not list(recwarn), "a character that is missing is a warning"


def test_two_drawings_of_the_same_figure_are_the_same_bytes(tmp_path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    drawings = set()
    for name in ("one.png", "two.png"):
        fig, axes = plotting.figure()
        axes.plot([1, 2, 3], **plotting.style("pld"))
        fig.savefig(tmp_path / name)
        drawings.add(plotting.drawing(fig))
        plt.close(fig)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes() and len(
        drawings
    ) == 1


@pytest.fixture
def axes():
    """The two axes of a figure of two columns."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig, axes = plotting.figure(columns=2)
    yield axes
    plt.close(fig)


def test_a_drawing_keeps_texts_as_they_are_and_rounds_where_they_stand(axes):
    axes[0].plot(np.linspace(0, 1, 5000), np.linspace(0, 1, 5000) ** 2)
    axes[0].fill_between(np.linspace(0, 1, 5000), np.linspace(0, 1, 5000) ** 2)
    axes[0].text(0.123456, 0.5, "0.123456 < \u03c3")
    svg = plotting.drawing(axes[0].figure)
    assert [text for text in ElementTree.fromstring(svg).itertext() if "\u03c3" in text] == [
        "0.123456 < \u03c3"
    ]
    tags = re.sub(">[^<]*<", "><", svg)
    assert (
        not re.search(r"\.\d{3}", tags.partition(">")[2])
        and "<style" not in svg
        and "dpcompanion" not in svg
    )
    # A point for each third of a point, rather than 5,000.
    assert max(len(path) for path in re.findall(' d="(.*?)"', svg)) < 25_000


def test_a_drawing_is_cut_between_its_columns_unless_something_lies_across(axes):
    fig = axes[0].figure
    axes[0].plot([1, 2], label="both")
    (cut,) = map(float, re.findall('data-cut="(.*?)"', plotting.drawing(fig)))
    left, right = (
        72 * np.array([box.x0, box.x1]) / fig.dpi for box in (ax.get_tightbbox() for ax in axes)
    )
    assert left[1] < cut < right[0]
    fig.legend(loc="outside lower center")
    assert "data-cut" not in plotting.drawing(fig)


def test_a_second_column_that_is_half_empty_ends_where_its_axes_do():
    """So that a phone, which has it below the first one, leaves no blank."""
    import matplotlib.pyplot as plt

    fig, axes = plotting.figure(rows=2, columns=2)
    assert "data-cut" in plotting.drawing(fig) and "data-end" not in plotting.drawing(fig)
    axes[1, 1].axis("off")
    (end,) = map(float, re.findall('data-end="(.*?)"', plotting.drawing(fig)))
    lowest, highest = (
        72 * (fig.get_figheight() - edge / fig.dpi)
        for edge in (axes[0, 1].get_tightbbox().y0, axes[1, 0].get_tightbbox().y1)
    )
    assert lowest < end < highest + 10
    plt.close(fig)


def test_a_figure_of_one_column_is_not_cut(axes):
    import matplotlib.pyplot as plt

    fig, ax = plotting.figure()
    ax.inset_axes((0.6, 0.6, 0.3, 0.3))
    assert "data-cut" not in plotting.drawing(fig)
    plt.close(fig)


def test_a_notebook_keeps_the_svg_of_its_first_figure_and_crops_none(monkeypatch, axes):
    import IPython
    from IPython.core.formatters import DisplayFormatter
    from matplotlib_inline.config import InlineBackend

    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    plotting.use_style()
    data, _ = shell.display_formatter.format(axes[0].figure)
    assert (
        data[plotting.DRAWING].startswith("<svg")
        and plotting.DRAWING not in shell.display_formatter.format(1)[0]
    )
    assert InlineBackend.instance().print_figure_kwargs == {"bbox_inches": None}


def test_the_pages_have_each_colour_of_the_figures_and_the_dark_theme_a_visible_one():
    extension = runpy.run_path(str(BOOK / "_ext" / "figures.py"))
    css = (BOOK / "_static" / "custom.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(
            r"(?ms)^(?:html\[data-theme=\"dark\"\] )?\.drawing \{(?= --).*?\}", css
        )
    )
    for color in {*plotting.COLORS.values(), *plotting.STYLE["axes.prop_cycle"]} - {"#000000"}:
        name = extension["COLORS"][color.lower()]
        assert light[name] == color.lower()
        shades = [luminance({**light, **dark}[name]) + 0.05, luminance("#14181e") + 0.05]
        assert max(shades) / min(shades) >= 3, f"{name} on a dark page"


def test_a_digest_changes_with_the_data_and_not_with_the_last_bits():
    values = np.linspace(0, 1, 7)
    text = plotting.digest(a=values, b=torch.tensor([1, 2]))
    assert text == plotting.digest(a=values * (1 + 1e-12), b=[1, 2])
    assert text != plotting.digest(a=values * 1.01, b=[1, 2])
    assert plotting.digest(a=[-0.0]) == "a: 1 value, 0 .. 0, sum 0"
    assert plotting.digest(a=[]) == "a: 0 values"
    assert plotting.digest(a=3.5) == "a: 1 value, 3.5 .. 3.5, sum 3.5"


def test_a_digest_is_an_output_of_its_own_type_in_a_notebook(monkeypatch):
    from IPython import display

    shown = []
    monkeypatch.setattr(display, "display", lambda data, raw: shown.append((data, raw)))
    plotting.digest(a=[1, 2])._ipython_display_()
    assert shown == [({"application/vnd.dpcompanion.digest": "a: 2 values, 1 .. 2, sum 3"}, True)]


def luminance(colour):
    """Relative luminance by WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_three_kinds_of_number_can_be_read_on_light_and_dark_pages():
    css = (BOOK / "_static" / "custom.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", line))
        for line in re.findall(r"^(?::root|html\[data-theme).*--live.*$", css, re.MULTILINE)
    )
    assert light.keys() == dark.keys() >= {"live", "recorded", "published"}
    # the theme's shaded surfaces, the worse case
    for colours, page in ((light, "#f3f4f5"), (dark, "#29313d")):
        for kind, colour in colours.items():
            bright, dim = sorted((luminance(colour), luminance(page)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, f"{kind}: {colour} on {page}"
