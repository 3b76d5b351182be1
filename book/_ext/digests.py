"""Keeps from the pages what just checks read: the digests notebooks store beside their figures."""

import json

MIME_TYPE = "application/vnd.dpcompanion.digest"


def without_digests(text):
    """The text of a notebook without the outputs that are digests.

    >>> digest = {"output_type": "display_data", "data": {MIME_TYPE: "1 value"}, "metadata": {}}
    >>> notebook = {
    ...     "cells": [{"cell_type": "code", "outputs": [digest]}, {"cell_type": "markdown"}]
    ... }
    >>> without_digests(json.dumps(notebook))
    '{"cells": [{"cell_type": "code", "outputs": []}, {"cell_type": "markdown"}]}'
    """
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [
                output for output in cell["outputs"] if MIME_TYPE not in output.get("data", {})
            ]
    return json.dumps(notebook, ensure_ascii=False)


def setup(app):
    def read(app, name, source):
        if app.env.doc2path(name).endswith(".ipynb"):
            source[0] = without_digests(source[0])

    app.connect("source-read", read)
    return {"parallel_read_safe": True}
