"""The book's own scripts on a page, in a headless Chromium."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from dpcompanion.accounting import compute_epsilon

STATIC = Path(__file__).resolve().parent.parent / "book" / "_static"


@pytest.mark.slow
def test_a_table_says_that_it_scrolls_sideways_where_it_does_and_can_be_scrolled_by_keyboard(
    chromium, browser_check
):
    script, style = (
        (STATIC / name).read_text(encoding="utf-8") for name in ("formulas.js", "custom.css")
    )
    table = "<div class=pst-scrollable-table-container><table><tr>{}</tr></table></div>"
    tables = table.format("<td>one</td>") + table.format(
        "<td style='min-width: 200px'>wide</td>" * 4
    )
    with browser_check.browser(chromium, viewport={"width": 390, "height": 800}) as context:
        page = context.new_page()
        page.set_content(
            f"<!DOCTYPE html><html lang=en data-theme=light><style>{style}</style><body>"
            f"<article class=bd-content>{tables}</article><script>{script}</script></body></html>"
        )
        frames = page.locator(".pst-scrollable-table-container")
        said = "frame => getComputedStyle(frame, '::before').content"
        assert frames.nth(0).get_attribute("tabindex") is None and "scrolls" not in frames.nth(
            0
        ).evaluate(said)
        assert frames.nth(1).get_attribute("tabindex") == "0" and "scrolls sideways" in frames.nth(
            1
        ).evaluate(said)
        assert frames.nth(1).get_attribute("role") == "region" and frames.nth(1).get_attribute(
            "aria-label"
        )
        frames.nth(1).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "document.querySelectorAll('.pst-scrollable-table-container')[1].scrollLeft > 0"
        )
        page.set_viewport_size({"width": 1280, "height": 800})
        page.wait_for_function("!document.querySelector('.pst-scrollable-table-container.wide')")
        assert frames.nth(1).get_attribute("tabindex") is None


@pytest.mark.slow
def test_the_meaning_of_a_term_shows_on_focus_and_goes_with_escape(chromium, browser_check):
    script, style = (
        (STATIC / name).read_text(encoding="utf-8") for name in ("glossary.js", "custom.css")
    )
    link = (
        '<a href="#x" title="Smaller is more private.">'
        '<span class="xref std std-term">epsilon</span></a>'
    )
    with browser_check.browser(chromium, viewport={"width": 390, "height": 800}) as context:
        page = context.new_page()
        page.set_content(
            "<!DOCTYPE html><html lang=en "
            f"data-theme=light><style>{style}</style><script>{script}</script><body><article "
            f"class=bd-content>{link}</article></body></html>"
        )
        box = page.locator("#meaning")
        assert box.is_hidden()
        page.focus("a")
        assert box.is_visible() and box.text_content() == "Smaller is more private."
        assert (
            page.get_attribute("a", "aria-describedby") == "meaning"
            and page.get_attribute("a", "title") is None
        )
        page.keyboard.press("Escape")
        assert box.is_hidden()


def test_a_digit_is_picked_by_its_place_and_its_norm_is_the_one_of_its_epsilon(node):
    run = {"rate": 0.064, "steps": 20, "delta": 1e-5, "noise": 2.0}
    epsilon = compute_epsilon(sample_rate=0.064, noise_multiplier=2.0 / 0.4, steps=20, delta=1e-5)
    expressions = f"[pick.normOf({json.dumps(run)}, {epsilon}), pick.normOf({json.dumps(run)}, 99),"
    expressions += "[1, 10, 11, 30, 31, 40].map(k => pick.barOf([0.5, 1, 0, 0.5], k, 40))]"
    script = (
        f"const pick = require({str(STATIC / 'pick.js')!r}); "
        f"console.log(JSON.stringify({expressions}))"
    )
    done = subprocess.run(
        [node, "-e", script], capture_output=True, text=True, encoding="utf-8", check=True
    )
    norm, whole, bars = json.loads(done.stdout)
    assert 0.97 * 0.4 <= norm <= 1.02 * 0.4 and whole == 1
    assert bars == [0, 0, 1, 1, 3, 3]


def test_the_picture_of_the_first_page_is_of_the_plan_that_its_cell_trains():
    page = (STATIC.parent / "intro.md").read_text(encoding="utf-8")
    given = {name: float(value) for name, value in re.findall(r'data-(\w+)="([\d.]+)"', page)}
    (plan,) = re.findall(
        r"for_epsilon\(([\d.]+), n=len\(y\), sample_rate=(\d+) / len\(y\), steps=(\d+), "
        r".*?delta=(\S+)\)",
        page,
    )
    epsilon, batch, steps, delta = map(float, plan)
    # 4,000 of MNIST-5k are for training.
    assert given == {"rate": batch / 4000, "steps": steps, "delta": delta, "epsilon": epsilon}
