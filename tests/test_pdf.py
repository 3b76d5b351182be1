"""The book on paper: two small sites, a sound one and a broken one, printed by tools/pdf.py and
read back.
"""

import base64
import importlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"
HEAD = """<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8">
<link rel="stylesheet" href="_static/custom.css">
<script>MathJax = {tex: {packages: {"[-]": ["noundefined"]}}};</script>
<script src="_static/mathjax/tex-svg.js"></script></head><body><article class="bd-content">"""
DOT = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc00000"
        "03010100c9fe92ef0000000049454e44ae426082"
    )
).decode()
FIRST = rf"""<h1>One<a class="headerlink" href="#">#</a></h1>
<p>The first page, with <span class="math">\(e^\varepsilon\)</span>.
It leads to <a href="two.html#far">the far section</a>, <a href="https://example.org/">elsewhere</a>
and <a href="_sources/one.txt">its source</a>.</p>
<img alt="A dot." src="data:image/png;base64,{DOT}">
<details class="unfolds"><summary>Verdicts</summary><p>Everything holds.</p></details>
<details class="admonition hide"><summary><p class="admonition-title">Code</p></summary>
<p>secret = 42</p></details>
<section id="below"><h2>Below</h2><p>Words.</p></section>"""
WIDE = (
    "<table><tr>"
    + "<td style='white-space: nowrap'>a cell of a wide table</td>" * 8
    + "</tr></table>"
)
SECOND = rf"""<h1>Two</h1><p><a href="#far">Further down</a> is a section.</p>
<div style="overflow-x: auto">{WIDE}</div><div style="height: 2000px"></div>
<section id="far"><h2>Far away</h2><p>Words that are far away.</p></section>"""
BROKEN = r"""<h1>Broken</h1><p>An <span class="math">\(\undefinedmacro{x}\)</span>,
and $\sigma$ left as it is, but <code>$HOME</code> is a variable.</p>
<img alt="Nothing." src="nothing.png">"""
EMPTY = """<h1>Empty</h1><p>Words.</p><div style="break-before: page; height: 1px"></div>
<p style="break-before: page">Words.</p>"""
ABOUT = {"title": "A small book", "authors": "Nobody", "notes": ["For a test."]}


@pytest.fixture(scope="module")
def pdf():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("pdf")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def site_of(folder, **pages):
    shutil.copytree(STATIC, folder / "_static", ignore=shutil.ignore_patterns("*.png", "*.js"))
    shutil.copy(STATIC / "mathjax" / "tex-svg.js", folder / "_static" / "mathjax")
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(
            f"{HEAD}{body}</article></body></html>", encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def printed(pdf, chromium, tmp_path_factory):
    """(reader, counts, problems) of a book of two pages."""
    from pypdf import PdfReader

    site = site_of(tmp_path_factory.mktemp("site"), one=FIRST, two=SECOND)
    toc = {"root": "one", "parts": [{"caption": "A part", "chapters": [{"file": "two"}]}]}
    data, counted, problems = pdf.print_book(site, toc, ABOUT, chromium)
    return PdfReader(io.BytesIO(data)), counted, problems


def text_of(reader):
    return [" ".join(page.extract_text().split()) for page in reader.pages]


def test_a_sound_book_has_no_problems_and_what_is_on_it_is_counted(printed):
    reader, counted, problems = printed
    assert problems == []
    assert counted == {"pages": 5, "links within": 4}  # two links, two lines of contents
    assert reader.page_labels == ["i", "ii", "1", "2", "3"]
    assert reader.metadata.title == "A small book"


def test_the_pages_come_in_the_order_of_the_contents_with_numbers_and_what_paper_cannot_unfold(
    printed,
):
    title, contents, one, two, far = text_of(printed[0])
    assert "A small book" in title and "For a test." in title
    assert "One 1 A part Two 2" in contents
    assert "Everything holds." in one and "folded: in the notebook" in one and "secret" not in one
    assert one.count("One") == 2 and "#" not in one  # the heading and the foot; no sign of a link
    assert "Words that are far away." in far and "Words that" not in two
    for number, (page, foot) in enumerate(zip((one, two, far), ("One", "Two", "Two")), 1):
        assert page.startswith(f"{number}{foot}"), page


def test_the_outline_has_parts_pages_and_sections(printed):
    def shape(items):
        return [shape(item) if isinstance(item, list) else item.title for item in items]

    assert shape(printed[0].outline) == ["One", ["Below"], "A part", ["Two", ["Far away"]]]


def places_of(reader, word):
    """Where a word stands: [(number of the page, points above the page's lower edge)]."""
    found = []
    for number, page in enumerate(reader.pages):

        def see(text, matrix, place, *rest, number=number):
            if word in text:
                found.append((number, place[5] * matrix[3] + matrix[5]))

        page.extract_text(visitor_text=see)
    return found


def test_links_and_bookmarks_lead_to_the_line_and_not_only_to_the_page(printed):
    reader, _, _ = printed
    notes = [note.get_object() for page in reader.pages for note in page.get("/Annots", ())]
    outside = [note["/A"]["/URI"] for note in notes if "/A" in note]
    assert outside == ["https://example.org/"]  # the source is no page of the book
    numbers = {page.indirect_reference.idnum: number for number, page in enumerate(reader.pages)}
    inside = [
        (numbers[note["/Dest"][0].idnum], float(note["/Dest"][3]))
        for note in notes
        if "/Dest" in note
    ]
    [(page, height)] = places_of(reader, "Far")
    assert [number for number, _ in inside] == [2, 3, page, page]
    assert all(0 < top - height < 40 for _, top in inside[2:])  # the line is just below
    bookmark = reader.outline[3][1][0]
    assert (
        reader.get_destination_page_number(bookmark) == page
        and 0 < float(bookmark.top) - height < 40
    )


def test_a_wide_table_is_fitted_to_the_paper(printed, pdf):
    seen = []
    for page in printed[0].pages:
        page.extract_text(
            visitor_text=lambda text, matrix, place, *rest: seen.append((text, matrix, place))
        )
    ends = [matrix[0] * place[4] + matrix[4] for text, matrix, place in seen if "wide" in text]
    assert len(ends) == 8 and max(ends) < (pdf.PAPER[0] - pdf.SIDE) * pdf.POINTS


def test_a_long_formula_is_fitted_to_the_paper(pdf, chromium, browser_check, tmp_path):
    formula = " + ".join(f"a_{{{number}}}" for number in range(99))
    site = site_of(
        tmp_path, long=rf'<h1>Long</h1><p>Here: <span class="math">\({formula}\)</span></p>'
    )
    long = site / "long.html"
    long.write_text(long.read_text().replace("<body>", '<body class="bd-content">'))
    ends = "[document.querySelector('mjx-container svg').getBoundingClientRect().right, innerWidth]"
    with (
        browser_check.browser(chromium) as context,
        browser_check.visit(context, site, "long.html", []) as page,
    ):
        page.set_viewport_size(
            {"width": int((pdf.PAPER[0] - 2 * pdf.SIDE) * pdf.PIXELS), "height": 900}
        )
        right, width = page.evaluate(ends)
        assert right > width
        page.emulate_media(media="print")
        right, width = page.evaluate(ends)
        assert right <= width


def test_what_is_broken_is_said_page_by_page(pdf, chromium, tmp_path):
    site = site_of(tmp_path, broken=BROKEN, empty=EMPTY)
    toc = {"root": "broken", "chapters": [{"file": "empty"}, {"file": "missing"}]}
    _, _, problems = pdf.print_book(site, toc, ABOUT, chromium)
    said = [f"{page}: {problem}" for page, problem in problems]
    for words in (
        "missing.html: is in the table of contents, and was not built",
        "broken.html: a formula is broken: Undefined control sequence",
        "broken.html: TeX stands in the text: $\\sigma$",
        "broken.html: a picture is missing: nothing.png",
        "empty.html: page 3 is empty",
    ):
        assert any(line.startswith(words) for line in said), (words, said)
    assert sum(line.endswith("is empty") for line in said) == 1
    assert not any("HOME" in line for line in said)


def test_a_formula_that_nothing_sets_is_a_problem(pdf, chromium, tmp_path):
    site = site_of(tmp_path, one=FIRST)
    (site / "_static" / "mathjax" / "tex-svg.js").write_text("")
    _, _, problems = pdf.print_book(site, {"root": "one"}, ABOUT, chromium)
    assert ("one.html", r"a formula was not set: \(e^\varepsilon\)") in problems


@pytest.mark.parametrize("built", [False, True])
def test_what_is_missing_is_said_and_the_end_is_red(built, tmp_path):
    if built:
        (tmp_path / "index.html").write_text("")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "pdf.py", "--site", tmp_path, tmp_path / "book.pdf"],
        env={"PATH": "/nowhere", "CHROMIUM": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not (tmp_path / "book.pdf").exists()
    assert (
        "no Chromium was found (install chromium" if built else "run `make site` first"
    ) in done.stdout
