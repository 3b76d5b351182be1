import pathlib
import re

import numpy as np
import pytest
import torch

from dpcompanion.reproduction import plotting


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
        assert fig.get_size_inches().tolist() == pytest.approx([5.2, height]) and fig.dpi == 150
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
    other = font_manager.FontEntry(fname="/nowhere/Plex.ttf", name="IBM Plex Sans", style="normal", weight=400)
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

    for name in ("one.png", "two.png"):
        fig, axes = plotting.figure()
        axes.plot([1, 2, 3], **plotting.style("pld"))
        fig.savefig(tmp_path / name)
        plt.close(fig)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


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
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_three_kinds_of_number_can_be_read_on_light_and_dark_pages():
    css = (pathlib.Path(__file__).resolve().parents[2] / "book" / "_static" / "custom.css").read_text(encoding="utf-8")
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
