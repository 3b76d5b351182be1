r"""Draws a few numbers as horizontal bars: inline SVG in the colours of the theme, for pages that
run no code.

    ```{bars}
    :alt: What the picture shows, for readers who do not see it.
    exact filter | 0.3 | [at most 0.3%]{.live} | ours
    Rényi filter | 9 | [9%]{.live}
    ```

A line is a label, the length of its bar, what is written beside it, and, if the bar is the one to
look at, `ours`.
"""

import html
import re

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

WIDTH, ROW, BAR, LONGEST = 440, 48, 16, 300
SHOWN = re.compile(r"\[(.*)\]\{\.(\w+)\}$")


def drawn(lines, alt):
    """The SVG of some lines; lengths are in proportion, the longest takes two thirds of the width.

    >>> svg = drawn(["ours | 1 | [1%]{.live} | ours", "theirs | 4 | 4%"], "Ours is a quarter.")
    >>> svg.count("<rect"), 'class="live"' in svg, 'width="75.00"' in svg, 'width="300.00"' in svg
    (2, True, True, True)
    >>> drawn(["one | two"], "")
    Traceback (most recent call last):
    ValueError: a bar has a label, a length and what is shown: 'one | two'
    """
    rows = [[part.strip() for part in line.split("|")] for line in lines if line.strip()]
    for row in rows:
        if len(row) not in (3, 4) or not re.fullmatch(r"\d*\.?\d+", row[1]):
            raise ValueError(f"a bar has a label, a length and what is shown: {' | '.join(row)!r}")
    most = max(float(row[1]) for row in rows)
    parts = []
    for i, (label, length, shown, *look) in enumerate(rows):
        top, width = i * ROW, max(2.0, LONGEST * float(length) / most)
        found = SHOWN.match(shown)
        text, kind = found.groups() if found else (shown, "")
        parts += [
            f'<text y="{top + 16}">{html.escape(label)}</text>',
            f'<rect class="{" ".join(look)}" y="{top + 23}" '
            f'width="{width:.2f}" height="{BAR}"></rect>',
            f'<text class="{kind}" x="{width + 8:.2f}" y="{top + 36}">{html.escape(text)}</text>',
        ]
    return (
        f'<figure class="bars"><svg viewBox="0 0 {WIDTH} {ROW * len(rows)}" '
        f'role="img" aria-label="{html.escape(alt)}">{"".join(parts)}</svg></figure>'
    )


class Bars(SphinxDirective):
    has_content = True
    option_spec = {"alt": directives.unchanged_required}

    def run(self):
        if not self.options.get("alt"):
            raise self.error("bars need an alternative text")
        try:
            picture = drawn(self.content, self.options["alt"])
        except ValueError as wrong:
            raise self.error(str(wrong)) from None
        return [nodes.raw("", picture, format="html")]


def setup(app):
    app.add_directive("bars", Bars)
    return {"parallel_read_safe": True}
