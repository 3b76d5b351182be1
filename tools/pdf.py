"""Print the built book into one PDF: every page of the table of contents, by a headless Chromium.

    python tools/pdf.py                      _build/html becomes _build/dpcompanion.pdf
    python tools/pdf.py --site DIR FILE      another site, another file

A title page and the contents come first. Every page of the book is a bookmark, with its sections
below it, and links within the book lead to pages of the PDF. A reader of paper cannot unfold
anything, so verdicts, solutions and proofs are printed open; the code of figures stays folded under
its heading, as notebooks have it. The calculator and the moving picture are printed as they open.
Tables and formulas that are wider than the paper are made smaller.

Before a page is printed it is looked at as `browser_check.py` does: a formula that MathJax did not
set or could not read is a problem, and so are TeX in the text and a picture that is missing; and a
table that would become illegible. A printed page without content is a problem too. With a problem
the command ends badly.
"""

import argparse
import html
import io
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urldefrag

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
import browser_check

ROOT = Path(__file__).resolve().parent.parent
SMALLEST = 0.5  # a table that must shrink below half its size cannot be read
POINTS = 72 / 25.4  # a millimetre
PAPER = (210, 297)  # A4, in millimetres
TOP, SIDE, BOTTOM = 18, 16, 20
SCALE = 0.8  # the book's 16 px become 9.6 points
PIXELS = 96 / 25.4 / SCALE  # CSS pixels, a millimetre
FONT = '8pt "Book Text", sans-serif'

SHEET = """
@page {{ size: A4; margin: {top}mm {side}mm {bottom}mm;
  @bottom-left {{ content: {title}; font: {font}; font-variant-ligatures: none; color: #444; }}
  @bottom-right {{ content: counter(page{style}); font: {font}; color: #444; }} }}
html {{ counter-reset: page {before}; }}
"""
FRONT = """
@page :first { @bottom-left { content: none; } @bottom-right { content: none; } }
body { font: 16px/1.5 "Book Text", sans-serif; margin: 0; }
h1 { font-size: 40px; line-height: 1.2; margin: 300px 0 1em; }
h3 { margin: 1em 0 0.2em; break-after: avoid; }
.title { break-after: page; }
.notes { margin-top: 260px; }
.line { display: flex; gap: 0.5em; color: inherit; text-decoration: none; }
.line i { flex: 1; border-bottom: 1px dotted #888; margin-bottom: 0.4em; }
"""

# What is unfolded: everything but code above what it draws, and listings of experiments.
UNFOLD = """async () => {
    for (const fold of document.querySelectorAll("article details"))
        fold.open = !fold.matches(".hide:not(.solution)");
    document.querySelectorAll("img[loading]").forEach(image => image.loading = "eager");
    await document.fonts.load("8pt 'Book Text'");  // for the foot
    await Promise.all([...document.images].map(image => image.decode().catch(() => null)));
}"""

# A table that is wider than the paper shrinks; what is not much lower than a page is not torn
# apart.
FIT = """height => {
    const article = document.querySelector("article"), shrunk = [];
    for (const table of article.querySelectorAll("table:not(table table)")) {
        let by = 1;
        for (let turn = 0; turn < 4; turn++) {
            const room = table.parentElement.clientWidth + 0.5;
            by *= Math.min(1, room / table.getBoundingClientRect().width);
            table.style.zoom = by;
        }
        if (by < 1) shrunk.push([by, table.textContent.trim().replace(/\\s+/g, " ").slice(0, 40)]);
    }
    const whole = "table, figure, pre, details, .cell, .cell_input, .cell_output, .admonition, "
        + ".mosaic, .moving";
    for (const block of article.querySelectorAll(whole))
        if (block.getBoundingClientRect().height < 0.4 * height) block.style.breakInside = "avoid";
    return shrunk;
}"""

# Chromium makes a named place of each anchor that something on its page links to: so something
# does.
ANCHOR = """() => {
    const links = document.createElement("nav");
    links.style.display = "none";
    for (const { id } of document.querySelectorAll("article [id]:not(svg *)"))
        links.appendChild(document.createElement("a")).href = "#" + encodeURIComponent(id);
    document.body.appendChild(links);
    document.querySelectorAll(".headerlink, h1 ~ h1").forEach(node => node.remove());
    return (document.querySelector("article h1")?.textContent ?? "").trim().replace(/\\s+/g, " ");
}"""


@dataclass
class Sheet:
    """A page in the table of contents: its file below the site, the part it is in, and how deep it
    lies; once printed, its title, its PDF, how many sheets come before it and how many it has.
    """

    name: str
    part: str
    depth: int
    title: str = ""
    data: bytes = b""
    before: int = 0
    length: int = 0


def contents(toc):
    """The pages that a `_toc.yml` names, in their order.

    >>> toc = {
    ...     "root": "a",
    ...     "parts": [{"caption": "One", "chapters": [{"file": "b", "sections": [{"file": "c"}]}]}],
    ... }
    >>> [(sheet.name, sheet.part, sheet.depth) for sheet in contents(toc)]
    [('a.html', '', 0), ('b.html', 'One', 0), ('c.html', 'One', 1)]
    """

    def walk(chapters, part, depth=0):
        for chapter in chapters:
            yield Sheet(chapter["file"] + ".html", part, depth)
            yield from walk(chapter.get("sections", ()), part, depth + 1)

    parts = toc.get("parts", [{"chapters": toc.get("chapters", ())}])
    inside = [walk(part["chapters"], part.get("caption", "")) for part in parts]
    return [Sheet(toc["root"] + ".html", "", 0), *itertools.chain(*inside)]


def sheet_style(title, before, style=""):
    """The style of a sheet of paper: margins, the title below, the number, after `before` pages."""
    title = json.dumps(title, ensure_ascii=False)
    return SHEET.format(
        title=title, before=before, style=style, font=FONT, top=TOP, side=SIDE, bottom=BOTTOM
    )


def paper(page):
    return page.pdf(
        scale=SCALE, prefer_css_page_size=True, print_background=True, outline=True, tagged=True
    )


def print_page(context, site, sheet):
    """Print a page of the site, and give what is wrong with it."""
    from pypdf import PdfReader

    wrong = []
    with browser_check.visit(context, site, sheet.name, wrong) as page:
        page.emulate_media(media="print", color_scheme="light")
        page.set_viewport_size({"width": int((PAPER[0] - 2 * SIDE) * PIXELS), "height": 900})
        page.evaluate(UNFOLD)
        page.wait_for_function("!document.querySelector('[aria-busy=true]')")
        wrong += page.evaluate(browser_check.CONTENT)
        for by, words in page.evaluate(FIT, (PAPER[1] - TOP - BOTTOM) * PIXELS):
            if by < SMALLEST:
                wrong.append(f"a table fits only at {100 * by:.0f}%: {words}")
        sheet.title = page.evaluate(ANCHOR)
        if not sheet.title:
            wrong.append("has no title")
        page.add_style_tag(content=sheet_style(sheet.title, sheet.before))
        sheet.data = paper(page)
    sheet.length = len(PdfReader(io.BytesIO(sheet.data)).pages)
    return wrong


def front_matter(site, sheets, about):
    """The title page and the contents, as HTML."""
    lines = []
    for part, inside in itertools.groupby(sheets, lambda sheet: sheet.part):
        lines.append(f"<h3>{html.escape(part)}</h3>")
        lines += [
            f'<a class="line" style="margin-left: {1.5 * sheet.depth}em" '
            f'href="{(site / sheet.name).as_uri()}">'
            f"<span>{html.escape(sheet.title)}</span><i></i><span>{sheet.before + 1}</span></a>"
            for sheet in inside
        ]
    title, notes = (
        html.escape(about["title"]),
        "".join(f"<p>{html.escape(note)}</p>" for note in about["notes"]),
    )
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<link rel="stylesheet" href="_static/custom.css">'
        f"<style>{sheet_style(about['title'], 0, ', lower-roman')}{FRONT}</style>"
        f'<div class="title"><h1>{title}</h1><p>{html.escape(about["authors"])}</p>'
        f'<div class="notes">{notes}</div></div>'
        f"<h2>Contents</h2>{''.join(lines)}</html>"
    )


def print_book(site, toc, about, chromium=None, say=lambda line: None):
    """(the bytes of a PDF, {what was counted: number}, problems as (page, problem) pairs)."""
    site, problems, sheets = Path(site).resolve(), [], []
    with browser_check.browser(chromium) as context:
        for sheet in contents(toc):
            if not (site / sheet.name).is_file():
                problems.append((sheet.name, "is in the table of contents, and was not built"))
                continue
            sheet.before = sum(other.length for other in sheets)
            problems += [
                (sheet.name, problem) for problem in dict.fromkeys(print_page(context, site, sheet))
            ]
            sheets.append(sheet)
            say(f"{sheet.name}: {sheet.length} pages")
        page = context.new_page()
        page.route(
            "**/front.html",
            lambda route: route.fulfill(
                body=front_matter(site, sheets, about), content_type="text/html"
            ),
        )
        page.goto((site / "front.html").as_uri())
        page.evaluate(browser_check.SETTLE)
        front = Sheet("", "", 0, data=paper(page))
    writer, links = join(site, front, sheets)
    writer.add_metadata({"/Title": about["title"], "/Author": about["authors"]})
    stream = io.BytesIO()
    writer.write(stream)
    problems += empty_pages(writer, front.length, sheets)
    return stream.getvalue(), {"pages": len(writer.pages), "links within": links}, problems


def join(site, front, sheets):
    """One PDF of all, with bookmarks, numbers of pages and links that stay inside: (writer, number
    of such links).
    """
    from pypdf import PdfReader, PdfWriter

    writer, owners, places = PdfWriter(), [], {}
    for part, inside in itertools.groupby([front, *sheets], lambda sheet: sheet.part):
        joined = PdfWriter()
        for sheet in inside:
            reader, first = PdfReader(io.BytesIO(sheet.data)), len(owners)
            places[sheet.name, ""] = (first, PAPER[1] * POINTS)
            for place, target in reader.named_destinations.items():
                number = reader.get_destination_page_number(target)
                height = float(reader.pages[number].mediabox.height)
                # Chromium measures from the top of the content, before the margin and the scale. A
                # little air above.
                top = height - TOP * POINTS - SCALE * (height - float(target.top)) + 4
                places[sheet.name, unquote(place.lstrip("/"))] = (first + number, top)
            sheet.length = len(reader.pages)
            owners += [sheet.name] * sheet.length
            joined.append(reader, import_outline=sheet is not front)
        stream = io.BytesIO()
        joined.write(stream)
        writer.append(stream, outline_item=part or None)
    links = sum(lead(writer, page, name, site, places) for page, name in zip(writer.pages, owners))
    writer.set_page_label(0, front.length - 1, style="/r")
    writer.set_page_label(front.length, len(owners) - 1, style="/D", start=1)
    writer.page_mode = "/UseOutlines"
    return writer, links


def lead(writer, page, name, site, places):
    """Lead the links of a printed page of `name` to places in the PDF, and drop those to files that
    are not in it.
    """
    from pypdf.generic import ArrayObject, FloatObject, NameObject, NullObject

    kept, inside = ArrayObject(), 0
    for note in page.get("/Annots", ()):
        link = note.get_object()
        address = str(link.get("/A", {}).get("/URI", ""))
        if "/Dest" in link:
            target, anchor = name, str(link["/Dest"]).lstrip("/")
        elif address.startswith("file:"):
            target, anchor = urldefrag(unquote(address.removeprefix(site.as_uri() + "/")))
        else:
            kept.append(note)
            continue
        place = places.get((target, unquote(anchor))) or places.get((target, ""))
        if place:
            number, top = place
            link.pop("/A", None)
            leads = [
                writer.pages[number].indirect_reference,
                NameObject("/XYZ"),
                NullObject(),
                FloatObject(top),
            ]
            link[NameObject("/Dest")] = ArrayObject([*leads, NullObject()])
            kept.append(note)
            inside += 1
    page[NameObject("/Annots")] = kept
    return inside


def empty_pages(writer, offset, sheets):
    """The pages without content: whatever is printed, but for the foot, is marked for those who
    listen to a page.
    """
    return [
        (sheet.name, f"page {number} is empty")
        for sheet in sheets
        for number in range(sheet.before + 1, sheet.before + sheet.length + 1)
        if b"/MCID" not in writer.pages[offset + number - 1].get_contents().get_data()
    ]


def about_the_book():
    """Title, authors and notes for the title page, from CITATION.cff and the commit."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    names = [
        author.get("name") or f"{author['given-names']} {author['family-names']}"
        for author in cited["authors"]
    ]
    command = ["git", "log", "-1", "--format=Printed at commit %h of %cs."]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    folded = (
        "Verdicts, solutions and proofs are unfolded. The code of figures is folded, and can be "
        "read in the notebooks. The calculator and the moving picture are shown as they open."
    )
    notes = [f"Version {cited['version']}. {cited['license']}.", commit, folded]
    return {"title": cited["title"], "authors": ", ".join(names), "notes": notes}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Print the built book into one PDF.", allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "_build" / "dpcompanion.pdf")
    parser.add_argument("--site", type=Path, default=ROOT / "_build" / "html")
    parser.add_argument("--toc", type=Path, default=ROOT / "_toc.yml")
    options = parser.parse_args(arguments)

    if not (options.site / "index.html").is_file():
        print(f"no pages in {options.site}: run `make site` first")
        return 1
    if browser_check.find_chromium() is None:
        print(
            "the book was NOT printed: no Chromium was found (install chromium, or set CHROMIUM to "
            "its path)"
        )
        return 1
    toc = yaml.safe_load(options.toc.read_text(encoding="utf-8"))
    data, counted, problems = print_book(
        options.site, toc, about_the_book(), say=lambda line: print(line, flush=True)
    )
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_bytes(data)
    for page, problem in problems:
        print(f"{page}: {problem}")
    counts = ", ".join(f"{number:,} {what}" for what, number in counted.items())
    print(
        f"the book on paper: {options.file} ({counts}, {len(data) / 1e6:.1f} MB): {len(problems)} "
        "problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
