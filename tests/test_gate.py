"""The gate turns red when it should: a small book is broken in each way, and each check has to notice.

The book of these tests is one notebook with a number and a figure, and a page
for each fault that only a browser sees. It is executed and rendered once.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent

NOTEBOOK = r"""---
kernelspec:
  name: python3
  display_name: Python 3
---
# Accounting

A formula, $\varepsilon = 1$, and {numref}`fig-line`.

```{code-cell} ipython3
print(6 * 7)
```

```{code-cell} ipython3
---
mystnb:
  figure: {caption: "A line.", name: fig-line}
  image: {alt: "A line that rises from 0 to 9."}
tags: [hide-input]
---
import matplotlib.pyplot as plt
from dpcompanion.reproduction import plotting
fig, ax = plt.subplots(figsize=(4, 3), dpi=80)
ax.plot(range(10))
plt.show()
plotting.digest(line=range(10))
```
"""
PAGES = {
    "macro": "# A macro that nobody defined\n\n$\\undefinedmacro{x}$\n",
    "tex": "# TeX that nothing sets\n\nA rate of \\$q\\$, and `$HOME`.\n",
    "outside": '# A picture from elsewhere\n\n<img src="http://example.org/picture.png" alt="A picture.">\n',
    "dumb": '# A picture without words\n\n<img src="../_static/dot.png">\n',
    "wide": '# Too wide\n\n<div style="width: 500px; background: grey">wide</div>\n',
    "clipped": '# Cut off\n\n<div style="overflow: hidden"><div style="width: 500px">words</div></div>\n',
    "formula": f"# A long formula\n\nIn a line, ${' + '.join(f'a_{n}' for n in range(10, 40))}$.\n",
    "pipes": "# Pipes\n\n| a | b |\n|:--|--:|--:|\n| 1 | 2 |\n",
    "faint": '# Faint\n\n<p style="color: #999; background: #fff">words</p>\n',
    "heavy": '# A heavy page\n\n<img src="../_static/noise.png" alt="Noise." style="width: 100px">\n',
    "long": '# Too long\n\n<div style="height: 15000px">words</div>\n',
    "long-exhibits": '# As long as it takes\n\n<div style="height: 15000px">words</div>\n',
    "dead": '# A dead link\n\n<a href="accounting.html#nowhere">somewhere</a>\n',
}


def tool(name, root, *arguments, **environment):
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, **environment})


def notebooks(root, *arguments, **environment):
    return tool("notebooks.py", root, "--root", root, *arguments, **environment)


@pytest.fixture(scope="module")
def sound_book(tmp_path_factory):
    root = tmp_path_factory.mktemp("book")
    (root / "book").mkdir()
    (root / "book" / "accounting.md").write_text(NOTEBOOK)
    done = notebooks(root, "execute")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def render(root):
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", ".", "-q", "-W", "-n", "--keep-going"]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def rendered(sound_book, tmp_path_factory):
    """The sound notebook and the faulty pages, rendered as `make site` does; none of the faults is a warning there."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(sound_book / "book", root / "book")
    for name in ("_static", "_ext"):
        shutil.copytree(ROOT / "book" / name, root / "book" / name)
    Image.new("RGB", (4, 4)).save(root / "book" / "_static" / "dot.png")
    # Noise does not compress: three bytes a pixel.
    noise = np.random.default_rng(0).integers(0, 256, (700, 1000, 3), np.uint8)
    Image.fromarray(noise).save(root / "book" / "_static" / "noise.png")
    shutil.copy(ROOT / "book" / "references.bib", root / "book")
    shutil.copy(ROOT / "_config.yml", root)
    (root / ".pytest_cache").mkdir()
    (root / ".pytest_cache" / "README.md").write_text("# No page of the book\n")
    for name, text in PAGES.items():
        (root / "book" / f"{name}.md").write_text(text)
    chapters = "".join(f"  - file: book/{name}\n" for name in PAGES)
    (root / "_toc.yml").write_text(f"format: jb-book\nroot: book/accounting\nchapters:\n{chapters}")
    built = render(root)
    assert built.returncode == 0, built.stdout + built.stderr
    return root


def test_warnings_of_the_build_are_errors(rendered, tmp_path):
    for name in ("_config.yml", "_toc.yml", "book"):
        copy = shutil.copytree if (rendered / name).is_dir() else shutil.copy
        copy(rendered / name, tmp_path / name)
    (tmp_path / "book" / "dead.md").write_text("# A reference to nothing\n\n{numref}`fig-nothing`\n")
    built = render(tmp_path)
    assert built.returncode != 0 and "fig-nothing" in built.stdout + built.stderr


def test_the_digest_of_a_figure_is_on_no_page(rendered):
    page = (rendered / "_build" / "html" / "book" / "accounting.html").read_text()
    assert "A line that rises" in page and "sum 45" not in page and "vnd.dpcompanion" not in page


@pytest.fixture(scope="module")
def verdicts(rendered, chromium):
    """What the browser check says of each page."""
    pages = [f"book/{name}.html" for name in ("accounting", *PAGES)]
    done = tool("browser_check.py", rendered, "--site", rendered / "_build" / "html", "check", *pages)
    assert done.returncode == 1, done.stdout + done.stderr
    return {page: [line for line in done.stdout.splitlines() if line.startswith(f"{page}:")] for page in pages}


@pytest.mark.parametrize(
    "page, complaint",
    [
        ("macro", "a formula is broken: Undefined control sequence"),
        ("tex", "TeX stands in the text: $q$"),
        ("outside", "asks another machine for http://example.org/picture.png"),
        ("dumb", "a picture has no alternative text"),
        ("wide", "(390 px)"),
        ("clipped", "is cut off (390 px)"),
        ("pipes", "a table is shown as pipes: | a | b |"),
        ("faint", '<p> with a contrast of 2.8: "words" (light)'),
        ("heavy", "MB without MathJax, more than 2"),
        ("dead", "links to the anchor #nowhere"),
        ("long", "px long at 1280 wide, more than 14,000"),
    ],
)
def test_a_browser_finds_the_fault(verdicts, page, complaint):
    assert any(complaint in line for line in verdicts[f"book/{page}.html"]), verdicts[f"book/{page}.html"]


@pytest.mark.parametrize("page", ["accounting", "formula", "long-exhibits"])
def test_a_browser_finds_no_fault_with_a_sound_page(verdicts, page):
    assert verdicts[f"book/{page}.html"] == []


def test_without_a_chromium_the_check_says_so_and_fails_only_in_ci(rendered):
    for ci, status in (("", 0), ("true", 1)):
        done = tool(
            "browser_check.py",
            rendered,
            "--site",
            rendered / "_build" / "html",
            PATH="/nonexistent",
            CHROMIUM="",
            CI=ci,
        )
        assert "NOT checked in a browser: no Chromium was found" in done.stdout and done.returncode == status


def test_tests_that_lack_a_browser_or_node_skip_with_a_reason_and_fail_in_ci():
    # As if neither were installed: the calculator's tests need both.
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_calculator.py"]
    for ci, status, said in (("", 0, "apt-get install nodejs"), ("true", 1, "a Chromium was not found")):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PATH": "/nonexistent", "CHROMIUM": "", "CI": ci},
        )
        assert done.returncode == status and said in done.stdout, done.stdout
