"""Print the built book into one PDF: every page of the table of contents, in its order, by a headless Chromium.

    python tools/pdf.py                      _build/html becomes _build/dpcompanion.pdf
    python tools/pdf.py --site DIR FILE      another site, another file

A title page and the contents come first. Every page of the book is a bookmark, with its sections below it, and links
within the book lead to pages of the PDF. A reader of paper cannot unfold anything, so verdicts, solutions and proofs
are printed open; the code of figures stays folded under its heading, as notebooks have it. The calculator and the
moving picture are printed as they open. Tables and formulas that are wider than the paper are made smaller.

Before a page is printed it is looked at as `browser_check.py` does: a formula that MathJax did not set or could not
read is a problem, and so are TeX in the text and a picture that is missing; and a table that would become illegible.
The printed pages are read back: one without content or without its number is a problem too. With a problem the command
ends badly.
"""

import argparse
import html
import io
import json
import re
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urldefrag

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
import browser_check

ROOT = Path(__file__).resolve().parent.parent
BROKEN = re.compile(r"Undefined control sequence|Math input error|Math Processing Error")
SMALLEST = 0.5  # a table that must shrink below half its size cannot be read
POINTS = 72 / 25.4  # a millimetre
PAPER = (210, 297)  # A4, in millimetres
TOP, SIDE, BOTTOM = 18, 16, 20
SCALE = 0.8  # the book's 16 px become 9.6 points
WIDTH = int((PAPER[0] - 2 * SIDE) / 25.4 * 96 / SCALE)  # CSS pixels between the margins

SHEET = """
@page {{ size: A4; margin: {top}mm {side}mm {bottom}mm;
  @bottom-left {{ content: {title}; font: 8pt sans-serif; font-variant-ligatures: none; color: #444; }}
  @bottom-right {{ content: counter(page{style}); font: 8pt sans-serif; color: #444; }} }}
html {{ counter-reset: page {before}; }}
"""

# What is unfolded: everything but code above what it draws, and listings of experiments.
UNFOLD = """async () => {
    for (const fold of document.querySelectorAll("article details"))
        fold.open = !fold.matches(".hide:not(.solution)");
    document.querySelectorAll(".toggle-hidden").forEach(element => element.classList.remove("toggle-hidden"));
    document.querySelectorAll("img[loading]").forEach(image => image.loading = "eager");
    if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
    await document.fonts.ready;
    await Promise.all([...document.images].map(image => image.decode().catch(() => null)));
}"""

COUNT = """() => ["mjx-container", "img"].map(what => document.querySelectorAll("article " + what).length)"""

# What is wider than the paper shrinks; what is not much lower than a page is not torn apart.
FIT = """height => {
    const article = document.querySelector("article"), shrunk = [];
    const scaled = (node, available) => {
        for (let turn = 0; turn < 4; turn++) {
            const wide = node.getBoundingClientRect().width;
            if (wide <= available + 0.5) break;
            node.style.zoom = (Number(node.style.zoom) || 1) * available / wide;
        }
        return Number(node.style.zoom) || 1;
    };
    for (const table of article.querySelectorAll("table")) {
        if (table.parentElement.closest("table")) continue;
        const by = scaled(table, table.parentElement.clientWidth);
        if (by < 1) shrunk.push([by, table.textContent.trim().replace(/\\s+/g, " ").slice(0, 40)]);
    }
    for (const formula of article.querySelectorAll("mjx-container")) {
        const line = formula.closest("p, li, dd, figcaption, h1, h2, h3, div.math");
        const svg = formula.querySelector("svg");
        if (line && svg && !formula.closest("table")) scaled(svg, line.clientWidth);
    }
    const whole = "table, figure, pre, .cell, .cell_input, .cell_output, .admonition, .mosaic, .moving, details";
    for (const block of article.querySelectorAll(whole))
        if (block.getBoundingClientRect().height < 0.4 * height) block.style.breakInside = "avoid";
    return shrunk;
}"""

# Chromium makes a named place of each anchor that something on its page links to: so something does.
ANCHOR = """() => {
    const article = document.querySelector("article"), links = document.createElement("nav");
    links.style.display = "none";
    const ids = [...article.querySelectorAll("[id]")].filter(node => !node.closest("svg")).map(node => node.id);
    for (const id of ids)
        links.appendChild(Object.assign(document.createElement("a"), {href: "#" + encodeURIComponent(id)}));
    document.body.appendChild(links);
    const words = node => {
        const copy = node.cloneNode(true);
        copy.querySelectorAll(".headerlink, mjx-assistive-mml").forEach(part => part.remove());
        return copy.textContent.trim().replace(/\\s+/g, " ");
    };
    const title = article.querySelector("h1");
    const sections = [...article.querySelectorAll("section[id] > h2, h2[id]")]
        .map(head => [words(head), head.id || head.parentElement.id]);
    return [title ? words(title) : "", sections];
}"""


@dataclass(frozen=True)
class Entry:
    """A page in the table of contents: its file below the site, the part it is in, and how deep it lies."""

    name: str
    part: str
    depth: int


@dataclass
class Sheet:
    """A page of the book, printed: its PDF, its headings and what was seen on it."""

    entry: Entry
    title: str
    sections: list
    data: bytes
    formulas: int
    pictures: int


def contents(toc):
    """The pages that a `_toc.yml` names, in their order.

    >>> toc = {"root": "a", "parts": [{"caption": "One", "chapters": [{"file": "b", "sections": [{"file": "c"}]}]}]}
    >>> [(entry.name, entry.part, entry.depth) for entry in contents(toc)]
    [('a.html', '', 0), ('b.html', 'One', 0), ('c.html', 'One', 1)]
    """
    entries = [Entry(toc["root"] + ".html", "", 0)]

    def walk(chapters, part, depth):
        for chapter in chapters:
            if "file" in chapter:
                entries.append(Entry(chapter["file"] + ".html", part, depth))
                walk(chapter.get("sections", ()), part, depth + 1)

    for part in toc.get("parts", [{"chapters": toc.get("chapters", ())}]):
        walk(part["chapters"], part.get("caption", ""), 0)
    return entries


def sheet_style(title, before, style=""):
    """The style of a sheet of paper: margins, the title below, and the number, after `before` pages."""
    return SHEET.format(
        title=json.dumps(title, ensure_ascii=False), before=before, style=style, top=TOP, side=SIDE, bottom=BOTTOM
    )


def paper(page):
    return page.pdf(scale=SCALE, prefer_css_page_size=True, print_background=True)


def print_page(context, site, entry, before, problems):
    """A page of the site as a `Sheet` whose numbers begin after `before`."""
    wrong = []
    with browser_check.Visit(context, (site / entry.name).as_uri(), wrong) as page:
        page.emulate_media(media="print", color_scheme="light")
        page.set_viewport_size({"width": WIDTH, "height": 900})
        page.evaluate(UNFOLD)
        page.wait_for_function("!document.querySelector('[aria-busy=true]')")
        wrong += page.evaluate(browser_check.CONTENT)["found"]
        formulas, pictures = page.evaluate(COUNT)
        for by, words in page.evaluate(FIT, (PAPER[1] - TOP - BOTTOM) / 25.4 * 96 / SCALE):
            if by < SMALLEST:
                wrong.append(f"a table fits only at {100 * by:.0f}%: {words}")
        title, sections = page.evaluate(ANCHOR)
        if not title:
            wrong.append("has no title")
        page.add_style_tag(content=sheet_style(title, before))
        data = paper(page)
    problems += [(entry.name, problem) for problem in dict.fromkeys(wrong)]
    return Sheet(entry, title, sections, data, formulas, pictures)


def front_matter(site, sheets, starts, about):
    """The title page and the contents, as HTML."""
    lines, part = [], ""
    for sheet, start in zip(sheets, starts):
        if sheet.entry.part != part:
            part = sheet.entry.part
            lines.append(f"<h3>{html.escape(part)}</h3>")
        address, indent = (site / sheet.entry.name).as_uri(), 1.5 * sheet.entry.depth
        lines.append(
            f'<a class="line" style="margin-left: {indent}em" href="{address}">'
            f"<span>{html.escape(sheet.title)}</span><i></i><span>{start + 1}</span></a>"
        )
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in about["notes"])
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(about["title"])}</title><style>'
        f"{sheet_style(about['title'], 0, ', lower-roman')}"
        "@page :first { @bottom-left { content: none; } @bottom-right { content: none; } }"
        "body { font: 16px/1.5 sans-serif; margin: 0; } h1 { font-size: 40px; line-height: 1.2; margin: 300px 0 1em; }"
        "h3 { margin: 1em 0 0.2em; break-after: avoid; } .title { break-after: page; } .notes { margin-top: 260px; }"
        ".line { display: flex; gap: 0.5em; color: inherit; text-decoration: none; }"
        ".line i { flex: 1; border-bottom: 1px dotted #888; margin-bottom: 0.4em; }</style>"
        f'<div class="title"><h1>{html.escape(about["title"])}</h1><p>{html.escape(about["authors"])}</p>'
        f'<div class="notes">{notes}</div></div><h2>Contents</h2>{"".join(lines)}</html>'
    )


def print_book(site, toc, about, chromium=None, say=lambda line: None):
    """The book as (the bytes of a PDF, {what was counted: number}, problems as (page, problem) pairs)."""
    from playwright.sync_api import sync_playwright
    from pypdf import PdfReader

    site = Path(site).resolve()
    entries, problems, sheets, starts, length = contents(toc), [], [], [], 0
    absent = [entry for entry in entries if not (site / entry.name).is_file()]
    problems += [(entry.name, "is in the table of contents, and was not built") for entry in absent]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium or browser_check.find_chromium(), args=browser_check.LAUNCH
        )
        context = browser_check.contexts_of(browser)["light"]
        for entry in entries:
            if entry in absent:
                continue
            sheets.append(print_page(context, site, entry, length, problems))
            starts.append(length)
            length += len(PdfReader(io.BytesIO(sheets[-1].data)).pages)
            say(f"{entry.name}: {length - starts[-1]} pages, {sheets[-1].formulas} formulas")
        page = context.new_page()
        page.set_content(front_matter(site, sheets, starts, about))
        front = paper(page)
        browser.close()
    writer, links = join(site, front, sheets, starts, about)
    stream = io.BytesIO()
    writer.write(stream)
    data = stream.getvalue()
    problems += read_back(data, len(writer.pages) - length, sheets, starts)
    counted = {"pages": len(writer.pages), "links within": links}
    counted |= {what: sum(getattr(sheet, what) for sheet in sheets) for what in ("formulas", "pictures")}
    return data, counted, problems


def join(site, front, sheets, starts, about):
    """One PDF of all, with bookmarks, numbers of pages and links that stay inside: (writer, number of such links)."""
    from pypdf import PdfReader, PdfWriter

    writer, owners, places = PdfWriter(), [], {}
    for name, data in [("", front), *((sheet.entry.name, sheet.data) for sheet in sheets)]:
        reader, first = PdfReader(io.BytesIO(data)), len(writer.pages)
        places[name, ""] = (first, PAPER[1] * POINTS)
        for place, target in reader.named_destinations.items():
            number = reader.get_destination_page_number(target)
            height = float(reader.pages[number].mediabox.height)
            # Chromium measures from the top of the content, before the margin and the scale. A little air above.
            top = height - TOP * POINTS - SCALE * (height - float(target.top)) + 4
            places[name, unquote(place.lstrip("/"))] = (first + number, top)
        for page in reader.pages:
            writer.add_page(page)
            owners.append(name)
    links = sum(lead(writer, page, name, site, places) for page, name in zip(writer.pages, owners))
    bookmarks(writer, sheets, places)
    offset = owners.count("")
    writer.set_page_label(0, offset - 1, style="/r")
    writer.set_page_label(offset, len(owners) - 1, style="/D", start=1)
    writer.page_mode = "/UseOutlines"
    writer.add_metadata({"/Title": about["title"], "/Author": about["authors"]})
    return writer, links


def lead(writer, page, name, site, places):
    """Lead the links of a printed page of `name` to places in the PDF, and drop those to files that are not in it."""
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
            leads = [writer.pages[number].indirect_reference, NameObject("/XYZ"), NullObject(), FloatObject(top)]
            link[NameObject("/Dest")] = ArrayObject([*leads, NullObject()])
            kept.append(note)
            inside += 1
    page[NameObject("/Annots")] = kept
    return inside


def bookmarks(writer, sheets, places):
    """The outline: parts, the pages of each, the pages below these, and the sections of every page."""
    from pypdf.generic import Fit

    def add(words, place, above, **look):
        number, top = place
        return writer.add_outline_item(title=words, page_number=number, parent=above, fit=Fit.xyz(top=top), **look)

    part, above = "", {-1: None}
    for sheet in sheets:
        entry = sheet.entry
        start = places[entry.name, ""]
        if entry.part != part:
            part = entry.part
            above = {-1: add(part, start, None, bold=True)}
        above[entry.depth] = add(sheet.title, start, above[entry.depth - 1], is_open=False)
        for words, anchor in sheet.sections:
            add(words, places.get((entry.name, anchor), start), above[entry.depth], is_open=False)


def read_back(data, offset, sheets, starts):
    """What is wrong with the joined PDF, whose first `offset` pages are title and contents."""
    from pypdf import PdfReader

    problems = []
    pages = list(PdfReader(io.BytesIO(data)).pages)[offset:]
    for sheet, start, end in zip(sheets, starts, [*starts[1:], len(pages)]):
        for number in range(start + 1, end + 1):
            page = pages[number - 1]
            text = unicodedata.normalize("NFKC", page.extract_text())
            # Without spaces: words that are set one by one come back without them. The foot comes back first.
            foot = "".join(unicodedata.normalize("NFKC", f"{number}{sheet.title}").split())
            words = "".join(text.split())
            if not words.startswith(foot):
                problems.append((sheet.entry.name, f"page {number} does not bear its number and title"))
            elif words == foot and not page.images:
                problems.append((sheet.entry.name, f"page {number} is empty"))
            if raw := BROKEN.search(text):
                problems.append((sheet.entry.name, f"page {number} says {raw[0]!r}"))
    return problems


def about_the_book():
    """Title, authors and notes for the title page, from CITATION.cff and the commit."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    authors = ", ".join(
        author.get("name") or f"{author['given-names']} {author['family-names']}" for author in cited["authors"]
    )
    notes = [f"Version {cited['version']}. {cited['license']}."]
    commit = subprocess.run(
        ["git", "log", "-1", "--format=commit %h of %cs"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if commit:
        notes.append(f"Printed at {commit}.")
    notes.append(
        "Verdicts, solutions and proofs are unfolded. The code of figures is folded, and can be read in the notebooks. "
        "The calculator and the moving picture are shown as they open."
    )
    return {"title": cited["title"], "authors": authors, "notes": notes}


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Print the built book into one PDF.", allow_abbrev=False)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "_build" / "dpcompanion.pdf")
    parser.add_argument("--site", type=Path, default=ROOT / "_build" / "html")
    parser.add_argument("--toc", type=Path, default=ROOT / "_toc.yml")
    options = parser.parse_args(arguments)

    if not (options.site / "index.html").is_file():
        print(f"no pages in {options.site}: run `make site` first")
        return 1
    if browser_check.find_chromium() is None:
        print("the book was NOT printed: no Chromium was found (install chromium, or set CHROMIUM to its path)")
        return 1
    toc = yaml.safe_load(options.toc.read_text(encoding="utf-8"))
    data, counted, problems = print_book(options.site, toc, about_the_book(), say=lambda line: print(line, flush=True))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_bytes(data)
    for page, problem in problems:
        print(f"{page}: {problem}")
    counts = ", ".join(f"{number:,} {what}" for what, number in counted.items())
    print(f"the book on paper: {options.file} ({counts}, {len(data) / 1e6:.1f} MB): {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
