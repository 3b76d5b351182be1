"""Buttons that open a page's notebook on Binder and Colab, once the book has a public address.

Off until `_config.yml` gives the address in one line, as `sphinx: config: public_repository`.
"""

BINDER, COLAB = "https://mybinder.org", "https://colab.research.google.com"


def options(address):
    """What the theme must be told for a repository's address; nothing for an empty one.

    >>> options("")
    {}
    >>> options("https://github.com/someone/dpcompanion")["launch_buttons"]["colab_url"]
    'https://colab.research.google.com'
    """
    if not address:
        return {}
    buttons = {
        "notebook_interface": "jupyterlab",
        "binderhub_url": BINDER,
        "colab_url": COLAB,
        "thebe": False,
    }
    return {"repository_url": address, "repository_branch": "main", "launch_buttons": buttons}


def setup(app):
    app.add_config_value("public_repository", "", "html")
    app.connect(
        "config-inited",
        lambda app, config: config.html_theme_options.update(options(config.public_repository)),
    )
    return {"parallel_read_safe": True}
