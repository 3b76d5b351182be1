"""Lets docstrings say what they say in plain text.

Sphinx reads docstrings as reStructuredText; this takes a bar or the star of `(n, *shape)` for what
it is, and leaves formulas (`:math:`), examples (`>>>`) and literal blocks as they are. A function
has one signature on its page: overloads are for type checkers. What a page has under its module's
name is found under its package's, too.
"""

import re

from docutils import nodes
from sphinx.ext.autodoc import FunctionDocumenter


def with_bars(lines):
    """The lines of a docstring with bars and lone stars as reStructuredText; lines that have none
    come back unchanged.

    >>> print(
    ...     "\\n".join(
    ...         with_bars(
    ...             ["|a| of (n, *shape), :math:`|b|`", "", "As in::", "", "    a | b", "", "|c|"]
    ...         )
    ...     )
    ... )
    \\|a\\| of (n, \\*shape), :math:`|b|`
    <BLANKLINE>
    As in::
    <BLANKLINE>
        a | b
    <BLANKLINE>
    \\|c\\|
    """
    done, literal = [], None
    for part in re.split(r"(\n[ \t]*\n)", "\n".join(lines)):
        indent = len(re.match(r"\n*([ \t]*)", part)[1])
        if part.strip():
            literal = literal if literal is not None and indent > literal else None
        if ">>>" not in part and literal is None:
            part = _as_text(part)
        if part.strip() and literal is None and part.rstrip().endswith("::"):
            literal = len(re.search(r"^([ \t]*)\S.*\Z", part.rstrip(), re.MULTILINE)[1])
        done.append(part)
    return "".join(done).split("\n")


def _as_text(part):
    """A paragraph whose bars and lone stars are no markup; formulas and code keep theirs."""
    if re.search(r"^\s*\.\. math::", part, re.MULTILINE):
        return part
    pieces = re.split(r"(`[^`]*`)", part)
    return "".join(
        piece if index % 2 else re.sub(r"\*(?=\w+[)\]}])", r"\\*", piece).replace("|", r"\|")
        for index, piece in enumerate(pieces)
    )


class OneSignature(FunctionDocumenter):
    """A function by the signature of its definition, and not by those of its overloads."""

    def format_signature(self, **kwargs):
        if self.analyzer:
            self.analyzer.overloads.pop(".".join(self.objpath), None)
        return super().format_signature(**kwargs)


def _without_source(app):
    """The index of modules lists no module without a source, such as what Python builds in."""
    known = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, found in known.items() if not found]:
        del known[name]
    return []


def _under_the_package(app, doctree):
    """A source links back to its page by one name of its module, the package's where that has a
    name of it.
    """
    signatures = [
        node for node in doctree.findall(nodes.Element) if node.tagname == "desc_signature"
    ]
    taken = {name for signature in signatures for name in signature["ids"]}
    for signature in signatures:
        module = signature.get("module") or ""
        name = f"{module.rpartition('.')[0]}.{signature.get('fullname')}"
        if module.count(".") > 1 and name not in taken:
            signature["ids"].append(name)
            taken.add(name)


def setup(app):
    app.connect("doctree-read", _under_the_package)
    app.connect("html-collect-pages", _without_source)
    app.setup_extension("sphinx.ext.autodoc")

    def rewrite(app, what, name, obj, options, lines):
        lines[:] = with_bars(lines)

    # Before napoleon (priority 500) rearranges the sections.
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.add_autodocumenter(OneSignature, override=True)
    return {"parallel_read_safe": True}
