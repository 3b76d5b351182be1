"""The one thing that pyproject.toml cannot say: a wheel carries the records and the chapters'
sources.

A checkout has them beside the package. `dpcompanion.reproduction.records.SHIPPED` is where an
installed one looks.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = {"results": ("*/*.paper.json", "*/*.paper*.npz"), "book": ("*.md", "papers/*.md")}


class WithRecords(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        for folder, patterns in SHIPPED.items():
            files = [path for pattern in patterns for path in (ROOT / folder).glob(pattern)]
            if not files:
                raise FileNotFoundError(
                    f"{ROOT / folder} has none of the files that the wheel carries"
                )
            for path in files:
                copy = Path(
                    self.build_lib, "dpcompanion", "reproduction", "shipped", path.relative_to(ROOT)
                )
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


setup(cmdclass={"build_py": WithRecords})
