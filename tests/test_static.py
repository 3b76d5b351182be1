"""The book's own scripts on a page, in a headless Chromium."""

from pathlib import Path

STATIC = Path(__file__).resolve().parent.parent / "book" / "_static"


def test_a_table_says_that_it_scrolls_sideways_where_it_does_and_can_be_scrolled_by_keyboard(chromium, browser_check):
    script, style = ((STATIC / name).read_text(encoding="utf-8") for name in ("formulas.js", "custom.css"))
    table = "<div class=pst-scrollable-table-container><table><tr>{}</tr></table></div>"
    tables = table.format("<td>one</td>") + table.format("<td style='min-width: 200px'>wide</td>" * 4)
    with browser_check.browser(chromium, viewport={"width": 390, "height": 800}) as context:
        page = context.new_page()
        page.set_content(
            f"<!DOCTYPE html><html lang=en data-theme=light><style>{style}</style><body>"
            f"<article class=bd-content>{tables}</article><script>{script}</script></body></html>"
        )
        frames = page.locator(".pst-scrollable-table-container")
        said = "frame => getComputedStyle(frame, '::before').content"
        assert frames.nth(0).get_attribute("tabindex") is None and "scrolls" not in frames.nth(0).evaluate(said)
        assert frames.nth(1).get_attribute("tabindex") == "0" and "scrolls sideways" in frames.nth(1).evaluate(said)
        assert frames.nth(1).get_attribute("role") == "region" and frames.nth(1).get_attribute("aria-label")
        frames.nth(1).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelectorAll('.pst-scrollable-table-container')[1].scrollLeft > 0")
        page.set_viewport_size({"width": 1280, "height": 800})
        page.wait_for_function("!document.querySelector('.pst-scrollable-table-container.wide')")
        assert frames.nth(1).get_attribute("tabindex") is None
