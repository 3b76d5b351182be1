"""Open every rendered page in a headless Chromium, and say what is wrong with it.

    python tools/browser_check.py [PAGE ...]             check _build/html, or these pages of it
    python tools/browser_check.py --draw DIR [PAGE ...]  pictures of pages, for a person to look at
    python tools/browser_check.py --draw DIR --of ".moving svg" book/intro.html
                                                         of one element of a page; README's picture,
                                                         book/_static/everybody.png, is this one at
                                                         640 px

Each page is opened from its file, in both colour schemes, at the widths of a phone, a tablet, a
laptop and a desktop, and once more over http. It must ask no other machine for anything, raise no
console error, show no broken formula and no TeX, never scroll sideways, describe every picture,
have one title at most, set its text off against what is behind it (WCAG's AA), link only to pages
and anchors that exist and load no more than 2 MB, MathJax not counted. Every character must be set
in a font that the book brings along, so that a page looks the same on every machine.

Without a Chromium the check says so and ends well, except where CI is set.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (390, 768, 1100, 1280)
SCHEMES = ("light", "dark")
HEAVIEST = 2_000_000  # bytes, of all that a page loads but MathJax
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERVED = "http://book.test/"  # no machine: requests to it are answered from the folder
# The theme mentions a variable that only its Thebe button defines; what is blocked is reported
# where it is asked for.
HARMLESS = ("THEBE_JS_URL", "ERR_FAILED", "ERR_BLOCKED")

SETTLE = """async () => {
    document.querySelectorAll("details").forEach(element => element.open = true);
    for (const element of document.querySelectorAll(".toggle-hidden"))
        element.classList.remove("toggle-hidden");
    if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
    await document.fonts.ready;
}"""

# The theme follows the scheme that is asked for at the next frame.
THEME = """async () => {
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return document.documentElement.dataset.theme;
}"""

CONTENT = """() => {
    const article = document.querySelector("article") || document.body;
    const found = [];
    const errors = "mjx-merror, [data-mml-node='merror'], [data-mjx-error]";
    for (const node of document.querySelectorAll(errors)) {
        const error = node.getAttribute("data-mjx-error") || node.textContent;
        found.push("a formula is broken: " + error.slice(0, 80));
    }
    for (const node of article.querySelectorAll(".math"))
        if (!node.querySelector("mjx-container"))
            found.push("a formula was not set: " + node.textContent.slice(0, 80));
    const words = article.cloneNode(true);
    const others = "pre, code, script, style, svg, mjx-container, .math";
    for (const node of words.querySelectorAll(others)) node.remove();
    const texts = "p, li, td, th, dt, dd, figcaption, summary, h1, h2, h3, h4, h5, h6";
    for (const node of words.querySelectorAll(texts)) {
        const raw = /\\$[^$]+\\$|\\$\\$|\\\\[([]|\\\\[a-zA-Z]{2,}/.exec(node.textContent);
        if (raw) found.push("TeX stands in the text: " + raw[0].slice(0, 80));
        if (/\\|:?[-\u2013\u2014]+:?\\|/.test(node.textContent))
            found.push("a table is shown as pipes: " + node.textContent.slice(0, 60));
    }
    for (const image of article.querySelectorAll("img")) {
        const name = (image.getAttribute("src") || "").slice(-60);
        const alt = (image.getAttribute("alt") || "").trim();
        if (!alt || name.endsWith(alt)) found.push("a picture has no alternative text: " + name);
        if (!(image.complete && image.naturalWidth)) found.push("a picture is missing: " + name);
    }
    for (const picture of article.querySelectorAll("[role='img']:not(mjx-container *)")) {
        const title = picture.querySelector("title")?.textContent;
        if (!(picture.getAttribute("aria-label") || title || "").trim())
            found.push("a drawing has no alternative text");
    }
    if (article.querySelectorAll("h1").length > 1) found.push("has more than one title");
    return found;
}"""

LINKS = """() => [
    [...document.querySelectorAll("a[href]")].map(link => link.href),
    [...document.querySelectorAll("[id], a[name]")].map(node => node.id || node.name),
]"""

# The contrast that WCAG 2.1 asks for at level AA: 4.5, or 3 for text of 24 px, or of 18.7 px in
# bold.
CONTRAST = """() => {
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => {
        const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = numbers(color).map(x => linear(x / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const behind = element => {
        for (; element; element = element.parentElement) {
            const color = getComputedStyle(element).backgroundColor;
            if ((numbers(color)[3] ?? 1) > 0.99) return color;
        }
        return "rgb(255, 255, 255)";
    };
    const found = {};
    const shown = "article *, .bd-sidebar-primary *, .bd-sidebar-secondary *";
    for (const node of document.querySelectorAll(shown)) {
        const texts = [...node.childNodes].filter(child => child.nodeType === 3);
        const words = texts.map(text => text.data.trim()).join("");
        if (!words || !node.getClientRects().length) continue;
        if (node.closest("mjx-container, svg, .headerlink")) continue;
        const style = getComputedStyle(node), size = parseFloat(style.fontSize);
        const shades = [light(style.color), light(behind(node))];
        const contrast = Math.max(...shades) / Math.min(...shades);
        const what = `<${node.tagName.toLowerCase()}> with a contrast of ${contrast.toFixed(1)}`;
        if (contrast < (size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5))
            found[what] ??= words.slice(0, 30);
    }
    return Object.entries(found).map(([what, words]) => `${what}: "${words}"`);
}"""

OVERFLOW = """() => {
    const width = document.documentElement.clientWidth, article = document.querySelector("article");
    const found = document.scrollingElement.scrollWidth > width + 1 ? ["scrolls sideways"] : [];
    for (const node of article ? article.querySelectorAll("*") : []) {
        const box = node.getBoundingClientRect();
        if (!box.width || !box.height || box.right <= width + 1) continue;
        const scrolls = node => ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
        let parent = node.parentElement;
        while (parent !== article && !scrolls(parent)) parent = parent.parentElement;
        if (parent !== article) continue;
        found.push(`<${node.tagName.toLowerCase()} class="${node.className}"> is cut off`);
        break;
    }
    return found;
}"""

# Characters that no font which the page brings along has, by its `unicode-range`: the machine's
# would be taken.
FONTS = """async () => {
    const name = family => family.trim().replace(/^["']|["']$/g, "");
    const shown = {};
    for (const node of document.querySelectorAll("body, body *")) {
        if (node.closest("script, style, noscript, option, mjx-assistive-mml")) continue;
        if (!node.getClientRects().length) continue;
        const texts = [...node.childNodes].filter(child => child.nodeType === 3);
        const words = texts.map(text => text.data).join("") + (node.value ?? "");
        const family = getComputedStyle(node).fontFamily;
        for (const character of words)
            if (character.trim()) (shown[family] ??= new Set()).add(character);
    }
    await document.fonts.ready;
    const ends = range => range.trim().slice(2).split("-").map(end => parseInt(end, 16));
    const fonts = [...document.fonts]
        .filter(font => font.status === "loaded")
        .map(font => [name(font.family), font.unicodeRange.split(",").map(ends)]);
    return Object.entries(shown).flatMap(([families, characters]) => {
        const list = families.split(",").map(name);
        const ranges = fonts.flatMap(([family, ranges]) => list.includes(family) ? ranges : []);
        const within = code => ([first, last]) => first <= code && code <= (last ?? first);
        const covered = character => ranges.some(within(character.codePointAt(0)));
        const rest = [...characters].filter(character => !covered(character)).sort().join("");
        return rest ? [`shows ${rest.slice(0, 80)} in a font of this machine, by ${families}`] : [];
    });
}"""


def find_chromium():
    """The path of a Chromium on this machine, or None; the variable CHROMIUM comes first."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *BROWSERS))), None)


@contextlib.contextmanager
def browser(chromium=None, **options):
    """A context in a headless Chromium, where pages take on the colour scheme that is asked for."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Hinting is a setting of the machine, and moves letters.
        opened = playwright.chromium.launch(
            executable_path=chromium or find_chromium(), args=["--font-render-hinting=none"]
        )
        context = opened.new_context(
            **{"viewport": {"width": WIDTHS[-1], "height": 900}, **options}
        )
        context.set_default_timeout(60_000)
        context.add_init_script("try { localStorage.setItem('mode', 'auto') } catch {}")
        yield context
        opened.close()


@contextlib.contextmanager
def visit(context, site, name, problems, served=False):
    """A page of the site, opened, unfolded and set, from its file or over http; `problems` takes
    what is wrong.
    """
    page, sizes = context.new_page(), {}

    def answer(route):
        url = urlparse(route.request.url)
        inside = url.scheme == "file" or route.request.url.startswith(SERVED)
        path = site / unquote(url.path).lstrip("/") if served else Path(unquote(url.path))
        if not inside:
            problems.append(f"asks another machine for {route.request.url}")
        elif not path.is_file():
            problems.append(f"not found: {route.request.url}")
        else:
            sizes[path] = 0 if "mathjax" in path.parts else path.stat().st_size
            return route.fulfill(path=path) if served else route.continue_()
        route.abort()

    def complain(words):
        if not any(harmless in words for harmless in HARMLESS):
            problems.append(f"complains: {words[:200]}")

    page.route("**/*", answer)
    page.on("console", lambda message: message.type == "error" and complain(message.text))
    page.on("pageerror", lambda error: complain(str(error)))
    page.goto(SERVED + name if served else (site / name).as_uri())
    page.add_style_tag(content="* { transition: none !important; animation: none !important; }")
    page.evaluate(SETTLE)
    yield page
    if sum(sizes.values()) > HEAVIEST:
        problems.append(
            f"loads {sum(sizes.values()) / 1e6:.1f} MB without MathJax, more than "
            f"{HEAVIEST / 1e6:g}"
        )
    page.close()


def check(site, pages=None, chromium=None):
    """What is wrong with the pages of `site` (all of them, or some), as (page, problem) pairs."""
    site = site.resolve()
    problems, links, anchors = [], {}, {}
    with browser(chromium) as context:
        for name in pages or all_pages(site):
            wrong = []
            # Sources of modules are a hundred pages of one make: one look at each is enough.
            made = name.startswith("_modules/")
            with visit(context, site, name, wrong) as page:
                wrong += page.evaluate(CONTENT)
                links[name], anchors[name] = page.evaluate(LINKS)
                for scheme in SCHEMES[: 1 if made else None]:
                    page.emulate_media(color_scheme=scheme)
                    if page.evaluate(THEME) not in (scheme, None):
                        wrong.append(f"does not become {scheme}")
                    wrong += [f"{problem} ({scheme})" for problem in page.evaluate(CONTRAST)]
                for width in WIDTHS[:: 3 if made else 1]:
                    page.set_viewport_size({"width": width, "height": 900})
                    wrong += [f"{problem} ({width} px)" for problem in page.evaluate(OVERFLOW)]
                wrong += page.evaluate(FONTS)
            if not made:
                with visit(context, site, name, wrong, served=True) as page:
                    wrong += page.evaluate(FONTS)
            problems += [(name, problem) for problem in dict.fromkeys(wrong)]
    return problems + dead_links(site, links, anchors)


def all_pages(site):
    """Every page but the theme's own templates and the root's redirection to the first chapter."""
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }
    return [
        path.relative_to(site).as_posix()
        for path, text in pages.items()
        if 'http-equiv="refresh"' not in text.lower()
    ]


def dead_links(site, links, anchors):
    """Links inside the site that reach no file, or no anchor on a page that was seen."""
    problems = []
    for name, addresses in links.items():
        for address, anchor in map(urldefrag, dict.fromkeys(addresses)):
            path = Path(unquote(urlparse(address).path))
            if urlparse(address).scheme != "file":
                continue
            if not path.is_file():
                problems.append((name, f"links to {address}, which is not there"))
            elif anchor and path.is_relative_to(site):
                known = anchors.get(path.relative_to(site).as_posix())
                if known is not None and not {anchor, unquote(anchor)} & {*known}:
                    problems.append(
                        (name, f"links to the anchor #{anchor} of {path.name}, which is not there")
                    )
    return problems


def draw(site, folder, pages, element):
    """PNGs, in twice their size, of an element of each page, in both schemes, at three widths."""
    folder.mkdir(parents=True, exist_ok=True)
    with browser(device_scale_factor=2) as context:
        for name in pages:
            with visit(context, site.resolve(), name, []) as page:
                for scheme, width in itertools.product(SCHEMES, (WIDTHS[0], 640, WIDTHS[-1])):
                    page.emulate_media(color_scheme=scheme)
                    page.set_viewport_size({"width": width, "height": 900})
                    page.evaluate(THEME)
                    file = (
                        folder
                        / f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                    )
                    page.locator(element).first.screenshot(path=file)
                    print(file)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Check the rendered pages in a headless Chromium.", allow_abbrev=False
    )
    parser.add_argument("pages", nargs="*", help="such as book/intro.html (default: all)")
    parser.add_argument("--site", type=Path, default=ROOT / "_build" / "html")
    parser.add_argument(
        "--draw", type=Path, metavar="DIR", help="pictures of the pages instead of checks"
    )
    parser.add_argument(
        "--of",
        metavar="SELECTOR",
        default="body",
        help="the element to draw (default: all of a page)",
    )
    options = parser.parse_args(arguments)

    if not (options.site / "index.html").is_file():
        print(f"no pages in {options.site}: run `make site` first")
        return 1
    if find_chromium() is None:
        print(
            "pages NOT checked in a browser: no Chromium was found (install chromium, or set "
            "CHROMIUM to its path)"
        )
        return 1 if os.environ.get("CI") else 0
    if options.draw:
        draw(options.site, options.draw, options.pages or all_pages(options.site), options.of)
        return 0
    problems = check(options.site, options.pages)
    for page, problem in problems:
        print(f"{page}: {problem}")
    print(
        f"pages checked in a browser at {', '.join(map(str, WIDTHS))} px, light and dark: "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
