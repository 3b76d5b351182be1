"""Lets docstrings write formulas as the book's pages do, between dollar signs.

Sphinx reads docstrings as reStructuredText; this turns `$x$` into a math role
and `$$ x $$` into a math directive, and leaves examples (`>>>`) as they are.
"""

import re


def with_math(lines):
    """The lines of a docstring with dollar formulas as reStructuredText; lines that have none come back unchanged.

    >>> with_math(["A rate $q$ costs", "", "$$ q^2", "   / 2. $$", "", ">>> price($5, $6)"])
    ['A rate :math:`q` costs', '', '', '.. math::', '', '   q^2', '   / 2.', '', '', '>>> price($5, $6)']
    """
    text = "\n".join(lines)
    display = re.compile(r"^([ \t]*)\$\$(.+?)\$\$[ \t]*$", re.MULTILINE | re.DOTALL)
    text = display.sub(_directive, text)
    paragraphs = re.split(r"(\n[ \t]*\n)", text)
    inline = re.compile(r"(?<![\\$`\w])\$([^\s$](?:[^$]*?[^\s$])?)\$(?![\w$])")
    return "".join(part if ">>>" in part else inline.sub(r":math:`\1`", part) for part in paragraphs).split("\n")


def _directive(found):
    indent, formula = found.groups()
    body = [f"{indent}   {line.strip()}" for line in formula.strip().splitlines()]
    return "\n".join(["", f"{indent}.. math::", "", *body, ""])


def setup(app):
    def rewrite(app, what, name, obj, options, lines):
        lines[:] = with_math(lines)

    # Before napoleon (priority 500) rearranges the sections.
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    return {"parallel_read_safe": True}
