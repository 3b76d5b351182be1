"""A small site is broken in each way that only a browser sees, and tools/browser_check.py has to
notice.

The site is rendered once as `make site` does: a notebook with a number and a figure, and a page for
each fault.
"""

import base64
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("pages")

PAGES = {
    "macro": "# A macro that nobody defined\n\n$\\undefinedmacro{x}$\n",
    "tex": "# TeX that nothing sets\n\nA rate of \\$q\\$, and `$HOME`.\n",
    "outside": "# A picture from elsewhere\n\n"
    '<img src="http://example.org/picture.png" alt="A picture.">\n',
    "dumb": '# A picture without words\n\n<img src="../_static/dot.png">\n',
    "mute": '# A drawing without words\n\n<svg role="img" viewBox="0 0 9 9"></svg>\n',
    "wide": '# Too wide\n\n<div style="width: 500px; background: grey">wide</div>\n',
    "clipped": "# Cut off\n\n"
    '<div style="overflow: hidden"><div style="width: 500px">words</div></div>\n',
    "formula": f"# A long formula\n\nIn a line, ${' + '.join(f'a_{n}' for n in range(10, 40))}$.\n",
    "pipes": "# Pipes\n\n| a | b |\n|:--|--:|--:|\n| 1 | 2 |\n",
    "faint": '# Faint\n\n<p style="color: #999; background: #fff">words</p>\n',
    "heavy": "# A heavy page\n\n"
    '<img src="../_static/noise.png" alt="Noise." style="width: 100px">\n',
    "titles": "# A title\n\n<h1>words</h1>\n",
    "family": '# A font of the machine\n\n<p style="font-family: serif">words</p>\n',
    "letter": "# A character that no font of the book has\n\nA \N{CJK UNIFIED IDEOGRAPH-4E00}.\n",
    "missing": "# A font that is not there\n\n"
    '<style>@font-face { font-family: X; src: url("x.woff2") }</style>'
    '<p style="font-family: X, Book Text">words</p>\n',
    "dead": '# A dead link\n\n<a href="sound.html#nowhere">somewhere</a>\n',
}


DRAWING = "application/vnd.dpcompanion.drawing"
SVG = (
    '<svg viewBox="0 0 400 100" data-cut="200">'
    '<path id="m" d="M0 0L400 100" style="stroke: #0072b2"/>'
    '<text x="9" y="90" style="font-size: 11px">epsilon</text><use href="#m"/></svg>'
)


def notebook():
    """Executed, as far as a page shows: a number, and a figure with its digest."""
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "png")
    data = {
        "image/png": base64.b64encode(stream.getvalue()).decode(),
        "text/plain": "<Figure>",
        DRAWING: SVG,
    }
    digest = {"application/vnd.dpcompanion.digest": "line: 10 values, sum 45"}
    mystnb = {
        "image": {"alt": "A line that rises from 0 to 9."},
        "figure": {"caption": "A line.", "name": "fig-line"},
    }
    signs = "\u03b5 \u2264 1, **\u03c3** \u2192 `\u03c3`"  # without MathJax
    words = f"# A sound page\n\nA formula, $\\varepsilon = 1$, {signs}, and {{numref}}`fig-line`."
    number = nbformat.v4.new_output("stream", text="42\n")
    drawn = [nbformat.v4.new_output("display_data", data) for data in (data, digest)]
    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(words),
            nbformat.v4.new_code_cell("print(6 * 7)", outputs=[number], execution_count=1),
            nbformat.v4.new_code_cell(
                "draw()", outputs=drawn, execution_count=2, metadata={"mystnb": mystnb}
            ),
        ],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "language_info": {"name": "python"},
        },
    )


def render(root):
    command = [
        str(Path(sys.executable).with_name("jupyter-book")),
        "build",
        ".",
        "-q",
        "-W",
        "-n",
        "--keep-going",
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """None of the faults is a warning here."""
    root = tmp_path_factory.mktemp("site")
    for name in ("_static", "_ext"):
        shutil.copytree(ROOT / "book" / name, root / "book" / name)
    nbformat.write(notebook(), root / "book" / "sound.ipynb")
    Image.new("RGB", (4, 4)).save(root / "book" / "_static" / "dot.png")
    # Noise does not compress: three bytes a pixel.
    noise = np.random.default_rng(0).integers(0, 256, (700, 1000, 3), np.uint8)
    Image.fromarray(noise).save(root / "book" / "_static" / "noise.png")
    shutil.copy(ROOT / "book" / "references.bib", root / "book")
    shutil.copy(ROOT / "_config.yml", root)
    (root / ".pytest_cache").mkdir()
    (root / ".pytest_cache" / "README.md").write_text("# No page of the book\n")
    for name, text in PAGES.items():
        (root / "book" / f"{name}.md").write_text(text, encoding="utf-8")
    chapters = "".join(f"  - file: book/{name}\n" for name in PAGES)
    (root / "_toc.yml").write_text(f"format: jb-book\nroot: book/sound\nchapters:\n{chapters}")
    built = render(root)
    assert built.returncode == 0, built.stdout + built.stderr
    return root


@pytest.mark.slow  # make test builds the whole site with warnings as errors
def test_warnings_of_the_build_are_errors(rendered, tmp_path):
    shutil.copytree(
        rendered / "book", tmp_path / "book", ignore=lambda folder, names: {*names} & {*PAGES}
    )
    shutil.copy(rendered / "_config.yml", tmp_path)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/dead\n")
    (tmp_path / "book" / "dead.md").write_text(
        "# A reference to nothing\n\n{numref}`fig-nothing`\n"
    )
    built = render(tmp_path)
    assert built.returncode != 0 and "fig-nothing" in built.stdout + built.stderr


def test_the_digest_of_a_figure_is_on_no_page(rendered):
    page = (rendered / "_build" / "html" / "book" / "sound.html").read_text(encoding="utf-8")
    assert "A line that rises" in page and "sum 45" not in page and "vnd.dpcompanion" not in page


def test_a_figure_is_drawn_in_its_page_in_the_colours_of_the_theme(rendered):
    page = (rendered / "_build" / "html" / "book" / "sound.html").read_text(encoding="utf-8")
    figure = re.search(r'(?s)<figure.*?id="fig-line".*?</figure>', page)[0]
    assert 'aria-label="A line that rises from 0 to 9."' in figure and "A line.</span>" in figure
    assert figure.count("<svg") == 2 and "stroke: var(--blue)" in figure and "#0072b2" not in figure
    assert "<img" not in page and not list((rendered / "_build" / "html").glob("_images/*"))


@pytest.fixture(scope="module")
def verdicts(rendered, chromium, browser_check):
    """What the browser check says of each page."""
    pages = {f"book/{name}.html": [] for name in ("sound", *PAGES)}
    for page, problem in browser_check.check(rendered / "_build" / "html", pages, chromium):
        pages[page].append(problem)
    return pages


@pytest.mark.parametrize(
    "page, complaint",
    [
        ("macro", "Undefined control sequence"),
        ("tex", "$q$"),
        ("outside", "http://example.org/picture.png"),
        ("dumb", "alternative text"),
        ("mute", "alternative text"),
        ("wide", "(390 px)"),
        ("clipped", "(390 px)"),
        ("pipes", "| a | b |"),
        ("faint", "contrast of 2.8"),
        ("heavy", "MB"),
        ("titles", "more than one title"),
        ("family", "font of this machine"),
        ("letter", "\N{CJK UNIFIED IDEOGRAPH-4E00}"),
        ("missing", "x.woff2"),
        ("dead", "#nowhere"),
    ],
)
@pytest.mark.slow
def test_a_browser_finds_the_fault(verdicts, page, complaint):
    found = verdicts[f"book/{page}.html"]
    assert any(complaint in problem for problem in found) and len(found) < 6, found


@pytest.mark.parametrize("page", ["sound", "formula"])
@pytest.mark.slow
def test_a_browser_finds_no_fault_with_a_sound_page(verdicts, page):
    assert verdicts[f"book/{page}.html"] == []


@pytest.mark.parametrize("ci, status", [("", 0), ("true", 1)])
def test_without_a_chromium_the_check_says_so_and_fails_only_in_ci(tmp_path, ci, status):
    (tmp_path / "index.html").touch()
    command = [sys.executable, ROOT / "tools" / "browser_check.py", "--site", tmp_path]
    without = {**os.environ, "PATH": "/nonexistent", "CHROMIUM": "", "CI": ci}
    done = subprocess.run(command, capture_output=True, text=True, env=without)
    assert done.returncode == status and "NOT checked" in done.stdout and "Chromium" in done.stdout


@pytest.mark.parametrize(
    "ci, outcome", [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_tests_that_lack_a_program_skip_with_a_reason_and_fail_in_ci(
    request, monkeypatch, browser_check, ci, outcome
):
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    for name, value in (("PATH", "/nonexistent"), ("CHROMIUM", ""), ("CI", ci)):
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match="apt-get install chromium"):
        conftest.needed(browser_check.find_chromium(), "a Chromium", "apt-get install chromium")
    assert conftest.needed("/usr/bin/node", "node", "apt-get install nodejs") == "/usr/bin/node"
