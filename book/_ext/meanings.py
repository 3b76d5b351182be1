"""Gives each link to a term of the glossary the term's meaning, which `glossary.js` shows under
pointer and focus.
"""

from docutils import nodes
from sphinx import addnodes


def meanings(doctree):
    """The id of each term of a glossary and its definition as plain text."""
    found = {}
    for entry in doctree.findall(nodes.definition_list_item):
        text = " ".join(
            part.astext().replace("\n", " ") for part in entry.findall(nodes.definition)
        )
        for term in entry.findall(nodes.term):
            found.update(dict.fromkeys(term["ids"], text))
    return found


def setup(app):
    known = {}

    def explain(app, doctree, docname):
        if not known:
            for (kind, _), (name, _) in app.env.get_domain("std").objects.items():
                if kind == "term" and name not in known:
                    known[name] = meanings(app.env.get_doctree(name))
        everything = {anchor: text for page in known.values() for anchor, text in page.items()}
        for link in doctree.findall(nodes.reference):
            anchor = link.get("refid") or link.get("refuri", "").rpartition("#")[2]
            if anchor.startswith("term-") and not link.next_node(addnodes.desc):
                link["reftitle"] = everything.get(anchor, "")

    app.connect("doctree-resolved", explain)
    return {"parallel_read_safe": True}
