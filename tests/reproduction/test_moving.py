import html
import json
import re

import numpy as np
import pytest

from dpcompanion.reproduction.moving import MovingHistogram

GENERATOR = np.random.default_rng(0)
TIMES = {f"epoch {k}": GENERATOR.uniform(0, 0.3 * k, 200) for k in (1, 2, 3)}
UNIFORM = {f"epoch {k}": 0.4 * k for k in (1, 2, 3)}


def made(**changes):
    return MovingHistogram(
        **{
            "times": TIMES,
            "uniform": UNIFORM,
            "bins": 20,
            "alt": "Bars & a <line>.",
            "caption": "What it is.",
        }
        | changes
    )


def frames(picture):
    data = re.search(r'data-moving="([^"]*)"', picture._repr_html_())[1]
    return json.loads(html.unescape(data))["frames"]


def test_every_time_has_its_bars_and_no_value_is_lost():
    picture = made()
    for (name, values), frame in zip(TIMES.items(), frames(picture)):
        assert picture.counts[name].sum() == len(values)
        counts = np.histogram(values, picture.edges)[0]
        assert np.allclose(np.array(frame["bars"]) * counts.max(), counts, atol=0.1)
        assert frame["said"] == picture.said(name) and f"{np.median(values):.2f}" in frame["said"]
        assert max(frame["bars"]) == 1


def test_without_a_script_the_last_time_stands_whole_and_says_what_it_is():
    source = made()._repr_html_()
    last = np.array(frames(made())[-1]["bars"])
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', source)]
    assert len(heights) == 20 and np.allclose(
        np.array(heights) / max(heights), last / last.max(), atol=0.01
    )
    assert (
        'role="img" aria-label="Bars &amp; a &lt;line&gt;."' in source
        and "<figcaption>What it is." in source
    )
    assert '<p class="control" hidden>' in source and made().said("epoch 3") in source


def test_what_is_no_account_is_refused():
    for epsilons in ([float("nan")], [0.9], [-0.1], []):
        with pytest.raises(ValueError, match="must"):
            made(times={**TIMES, "epoch 2": epsilons})
    for changes in ({"times": {}, "uniform": {}}, {"uniform": {"epoch 1": 1.0}}, {"bins": 0}):
        with pytest.raises(ValueError, match="must"):
            made(**changes)


@pytest.mark.slow
def test_the_slider_moves_the_bars_by_keyboard(chromium, browser_check):
    with browser_check.browser(chromium) as context:
        page = context.new_page()
        page.set_content(f"<!DOCTYPE html><html lang=en><body>{made()._repr_html_()}</body></html>")
        assert page.locator("input").is_hidden(), "without its script there is nothing to drag"
        page.add_script_tag(path=browser_check.ROOT / "book" / "_static" / "moving.js")
        slider = page.get_by_label("Drag through the run")
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert (
            slider.get_attribute("aria-valuetext")
            == page.text_content(".said")
            == made().said("epoch 2")
        )
        page.keyboard.press("Home")
        assert page.text_content(".said") == made().said("epoch 1")
        heights = page.eval_on_selector_all(
            ".bars rect", "bars => bars.map(bar => Number(bar.getAttribute('height')))"
        )
        bars = np.array(frames(made())[0]["bars"])
        assert np.allclose(np.array(heights) / max(heights), bars / bars.max())
