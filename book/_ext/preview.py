"""What other sites show of a linked page: its title, a description, and the book's picture.

The description is the first paragraph of the page. The picture needs the book's address,
`html_baseurl`; until that is set there is none.
"""

import html
import re

from docutils import nodes

PICTURE = "everybody.png"
LONGEST = 200


def description(doctree):
    """The first paragraph of some length, cut at a word.

    >>> from docutils.core import publish_doctree
    >>> description(
    ...     publish_doctree(
    ...         "Short.\\n\\nA paragraph with enough words to say what this page is about."
    ...     )
    ... )
    'A paragraph with enough words to say what this page is about.'
    """
    for paragraph in doctree.findall(nodes.paragraph):
        text = re.sub(r"\s+", " ", paragraph.astext())
        if len(text) > 40:
            return text if len(text) <= LONGEST else text[: LONGEST - 4].rsplit(" ", 1)[0] + " ..."
    return ""


def setup(app):
    def tags(app, pagename, templatename, context, doctree):
        if doctree is None:
            return
        said = {"description": description(doctree)}
        shared = {
            "og:title": re.sub("<.*?>", "", context.get("title", "")),
            "og:type": "article",
            "og:site_name": app.config.project,
        }
        shared["og:description"] = said["description"]
        if address := app.config.html_baseurl:
            shared["og:image"] = f"{address.rstrip('/')}/_static/{PICTURE}"
        lines = [
            f'<meta name="{name}" content="{html.escape(text)}">'
            for name, text in said.items()
            if text
        ]
        lines += [
            f'<meta property="{name}" content="{html.escape(html.unescape(text))}">'
            for name, text in shared.items()
            if text
        ]
        context["metatags"] = context.get("metatags", "") + "\n".join(lines)

    app.connect("html-page-context", tags)
    return {"parallel_read_safe": True}
