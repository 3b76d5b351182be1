"""The lowest versions that pyproject.toml claims, as requirements that name just these.

    python tools/lowest.py            of what the library needs
    python tools/lowest.py opacus     and of what an extra adds

>>> pinned(["torch>=2.6", "opacus>=1.6,<2", "joblib"])
['torch==2.6', 'opacus==1.6', 'joblib']
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def pinned(requirements):
    """Each `name>=version` as `name==version`; what claims no lowest version stays as it is."""
    return [
        re.sub(r"^([\w-]+)>=([\w.]+).*", r"\1==\2", requirement) for requirement in requirements
    ]


def main(extras):
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = project["dependencies"] + [
        name for extra in extras for name in project["optional-dependencies"][extra]
    ]
    print("\n".join(pinned(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
