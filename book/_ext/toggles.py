"""Says what is folded away: the code of a figure or table, an experiment's code, a solution.

A cell tagged `hide-cell` is a solution, one tagged `hide-input` shows its output and folds its
code, and one tagged `remove-input` and `hide-output` lists the code of an experiment. The words are
what screen readers say as well.
"""

from myst_nb.sphinx_ import HideCodeCellNode

WORDS = {
    "content": "Solution",
    "source": "Code",
    "output": "Output",
    "outputs": "The experiment's code",
}
LABEL = '<summary aria-label="Toggle hidden content">'


def setup(app):
    def name(app, doctree, docname):
        for node in doctree.findall(HideCodeCellNode):
            *_, kind = node["prompt_show"].split()
            node["prompt_show"] = node["prompt_hide"] = WORDS[kind]
            node["classes"] += ["solution"] if kind == "content" else []

    def speak(app, pagename, templatename, context, doctree):
        if "body" in context:
            context["body"] = context["body"].replace(LABEL, "<summary>")

    app.connect("doctree-resolved", name)
    app.connect("html-page-context", speak)
    return {"parallel_read_safe": True}
