"""Open every rendered page in a headless Chromium, and say what is wrong with it.

    python tools/browser_check.py                         check _build/html
    python tools/browser_check.py screenshot DIR [PAGE]   pictures of pages for a person to look at
    python tools/browser_check.py picture FILE PAGE WHAT  one element of a page, by a CSS selector: README's picture is
                                                          book/_static/everybody.png book/intro.html ".moving svg"

Each page is loaded once in each colour scheme from its file and resized to a
phone, a tablet, a laptop and a desktop, and once more over http.  A page must
ask no other machine for anything, raise no console error, show no broken
formula and no TeX, never scroll sideways, describe every picture, keep its headings in
order, set its text off against what is behind it (WCAG's AA), link only to
pages and anchors that exist, load no more than 2 MB, MathJax not counted, and
be no longer than a reader scrolls.

Without a Chromium the check says so and ends well, except where CI is set.
"""

import argparse
import functools
import http.server
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (390, 768, 1100, 1280)
SCHEMES = ("light", "dark")
HEAVIEST = 2_000_000  # bytes, of all that a page loads but MathJax
# Pixels of a page as it opens, at the last of the widths; of pages to look things up in, any number.
TALLEST, LOOKED_UP = 14_000, re.compile(r"book/(.*-exhibits|scoreboard|errata|api/.*)\.html")
# Pages that are longer than that and have still to be split: a list that may only become shorter.
LONG = ()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The theme mentions a variable that only its Thebe button defines.
HARMLESS = ("THEBE_JS_URL",)

SETTLE = """async () => {
    if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
    const height = document.documentElement.scrollHeight;
    document.querySelectorAll("details").forEach(element => element.open = true);
    document.querySelectorAll(".toggle-hidden").forEach(element => element.classList.remove("toggle-hidden"));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return height;
}"""

CONTENT = """() => {
    const article = document.querySelector("article") || document.body;
    const found = [];
    for (const node of document.querySelectorAll("mjx-merror, [data-mml-node='merror'], [data-mjx-error]"))
        found.push("a formula is broken: " + (node.getAttribute("data-mjx-error") || node.textContent).slice(0, 80));
    for (const node of article.querySelectorAll(".math"))
        if (!node.querySelector("mjx-container")) found.push("a formula was not set: " + node.textContent.slice(0, 80));
    const words = article.cloneNode(true);
    for (const node of words.querySelectorAll("pre, code, script, style, svg, mjx-container, .math")) node.remove();
    for (const node of words.querySelectorAll("p, li, td, th, dt, dd, figcaption, summary, h1, h2, h3, h4, h5, h6")) {
        const raw = /\\$[^$]+\\$|\\$\\$|\\\\[([]|\\\\[a-zA-Z]{2,}/.exec(node.textContent);
        if (raw) found.push("TeX stands in the text: " + raw[0].slice(0, 80));
    }
    for (const node of article.querySelectorAll("p"))
        if (/\\|:?[-\u2013\u2014]+:?\\|/.test(node.textContent))
            found.push("a table is shown as pipes: " + node.textContent.slice(0, 60));
    for (const image of article.querySelectorAll("img")) {
        const name = (image.getAttribute("src") || "").slice(-60);
        const alt = (image.getAttribute("alt") || "").trim();
        if (!alt || name.endsWith(alt)) found.push("a picture has no alternative text: " + name);
        if (!(image.complete && image.naturalWidth)) found.push("a picture is missing: " + name);
    }
    let level = 0;
    for (const heading of article.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
        const next = Number(heading.tagName[1]);
        const words = heading.textContent.slice(0, 40);
        if (next > level + 1) found.push(`heading "${words}" skips from h${level} to h${next}`);
        level = next;
    }
    if (article.querySelectorAll("h1").length > 1) found.push("has more than one title");
    return {
        found,
        links: [...document.querySelectorAll("a[href]")].map(link => link.href),
        anchors: [...document.querySelectorAll("[id], a[name]")].map(node => node.id || node.name),
    };
}"""

# The contrast that WCAG 2.1 asks for at level AA: 4.5, or 3 for text of 24 px, or of 18.7 px in bold.
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
    for (const node of document.querySelectorAll("article *, .bd-sidebar-primary *, .bd-sidebar-secondary *")) {
        const own = [...node.childNodes].filter(child => child.nodeType === 3);
        const words = own.map(child => child.data.trim()).join(" ").trim();
        const seen = words && node.getClientRects().length;
        if (!seen || node.closest("mjx-container, svg, script, style, .headerlink")) continue;
        const style = getComputedStyle(node), size = parseFloat(style.fontSize);
        const large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
        const shades = [light(style.color), light(behind(node))];
        const contrast = Math.max(...shades) / Math.min(...shades);
        if (contrast < (large ? 3 : 4.5))
            found[`<${node.tagName.toLowerCase()}> with a contrast of ${contrast.toFixed(1)}`] ??= words.slice(0, 30);
    }
    return Object.entries(found).map(([what, words]) => `${what}: "${words}"`);
}"""

OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    const found = [];
    if (document.scrollingElement.scrollWidth > width + 1) found.push("scrolls sideways");
    const article = document.querySelector("article");
    for (const node of article ? article.querySelectorAll("*") : []) {
        const box = node.getBoundingClientRect();
        if (!box.width || !box.height || box.right <= width + 1) continue;
        let parent = node.parentElement;
        const scrolls = element => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
        const spills = element => element !== article && !scrolls(element);
        while (parent && spills(parent)) parent = parent.parentElement;
        if (parent === article || !parent) {
            found.push(`<${node.tagName.toLowerCase()} class="${node.className}"> is cut off`);
            break;
        }
    }
    return found;
}"""


def find_chromium():
    """The path of a Chromium on this machine, or None; the variable CHROMIUM comes first."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *BROWSERS))), None)


def contexts_of(browser):
    """One browser context for each colour scheme."""
    contexts = {}
    for scheme in SCHEMES:
        contexts[scheme] = browser.new_context(color_scheme=scheme, viewport={"width": WIDTHS[-1], "height": 900})
        for key in ("mode", "theme"):
            contexts[scheme].add_init_script(f"localStorage.setItem('{key}', '{scheme}');")
        contexts[scheme].set_default_timeout(60_000)
    return contexts


class Visit:
    """One page, loaded: what it asked of others, what it complained of and, over http, how many bytes it loaded are
    gathered while it lives."""

    def __init__(self, context, address, problems):
        self.address, self.local = address, urlparse(address)
        self.problems = problems
        self.weight = self.height = 0
        self.page = context.new_page()
        self.page.route("**/*", self.admit)
        self.page.on("response", self.weigh)
        self.page.on("console", lambda message: message.type == "error" and self.complain(message.text))
        self.page.on("pageerror", lambda error: self.complain(str(error)))
        self.page.on(
            "requestfailed", lambda request: self.is_local(request.url) and self.complain(f"not found: {request.url}")
        )

    def __enter__(self):
        self.page.goto(self.address, wait_until="load")
        self.height = self.page.evaluate(SETTLE)
        return self.page

    def __exit__(self, *error):
        self.page.close()

    def is_local(self, url):
        asked = urlparse(url)
        if asked.scheme in ("data", "blob", "about"):
            return True
        return (asked.scheme, asked.netloc) == (self.local.scheme, self.local.netloc)

    def admit(self, route):
        if self.is_local(route.request.url):
            route.continue_()
        else:
            self.problems.append(f"asks another machine for {route.request.url}")
            route.abort()

    def weigh(self, response):
        if "/mathjax/" not in response.url:
            self.weight += int(response.headers.get("content-length", 0))

    def complain(self, text):
        blocked = "ERR_FAILED" in text or "ERR_BLOCKED" in text
        if not blocked and not any(words in text for words in HARMLESS):
            self.problems.append(f"complains: {text[:200]}")


def check(site, pages=None, chromium=None):
    """What is wrong with the pages of `site` (all of them, or those named), as (page, problem) pairs."""
    from playwright.sync_api import sync_playwright

    site = site.resolve()
    pages = all_pages(site) if pages is None else list(pages)
    problems, links, anchors = [], {}, {}
    with sync_playwright() as playwright, serve(site) as served:
        browser = playwright.chromium.launch(executable_path=chromium or find_chromium(), args=LAUNCH)
        contexts = contexts_of(browser)
        for name in pages:
            wrong = []
            # Sources of modules are a hundred pages of one make: once each is enough.
            made = name.startswith("_modules/")
            for scheme, context in list(contexts.items())[: 1 if made else None]:
                with Visit(context, (site / name).as_uri(), wrong) as page:
                    seen = page.evaluate(CONTENT)
                    wrong += seen["found"] + [f"{problem} ({scheme})" for problem in page.evaluate(CONTRAST)]
                    links[name], anchors[name] = seen["links"], set(seen["anchors"])
                    shown = page.evaluate("document.documentElement.dataset.theme")
                    if shown not in (scheme, None):
                        wrong.append(f"stays {shown} where {scheme} is asked for")
                    for width in WIDTHS:
                        page.set_viewport_size({"width": width, "height": 900})
                        wrong += [f"{problem} ({width} px)" for problem in page.evaluate(OVERFLOW)]
            visit = Visit(contexts["light"], f"{served}/{name}", wrong)
            if not made:
                with visit:
                    pass
            if visit.weight > HEAVIEST:
                wrong.append(f"weighs {visit.weight / 1e6:.1f} MB without MathJax, more than {HEAVIEST / 1e6:g}")
            may_be_long = name in LONG or LOOKED_UP.fullmatch(name) or not name.startswith("book/")
            if visit.height > TALLEST and not may_be_long:
                wrong.append(f"is {visit.height:,} px long at {WIDTHS[-1]} wide, more than {TALLEST:,}")
            problems += [(name, problem) for problem in dict.fromkeys(wrong)]
        browser.close()
    return problems + dead_links(site, links, anchors)


def all_pages(site):
    """Every page but the theme's own templates and the root's redirection to the first chapter."""
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    redirects = 'http-equiv="refresh"'
    return [
        path.relative_to(site).as_posix() for path in pages if redirects not in path.read_text(encoding="utf-8").lower()
    ]


def dead_links(site, links, anchors):
    """Links inside the site that reach no file, or no anchor on a page that was seen."""
    problems = []
    for name, addresses in links.items():
        for address in dict.fromkeys(addresses):
            target, anchor = urldefrag(urljoin((site / name).as_uri(), address))
            if urlparse(target).scheme != "file":
                continue
            path = Path(unquote(urlparse(target).path))
            if not path.is_file():
                problems.append((name, f"links to {address}, which is not there"))
                continue
            known = anchors.get(path.relative_to(site).as_posix()) if path.is_relative_to(site) else None
            if anchor and known is not None and unquote(anchor) not in known and anchor not in known:
                problems.append((name, f"links to the anchor #{anchor} of {path.name}, which is not there"))
    return problems


class serve:
    """The folder over http on a free port of this machine, while the block lasts; gives the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    def __init__(self, folder):
        handler = functools.partial(self.Quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def screenshot(site, folder, pages, widths=(390, 1280)):
    """PNGs of whole pages, in each scheme and at each width."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=LAUNCH)
        contexts = contexts_of(browser)
        for name in pages:
            for scheme, context in contexts.items():
                with Visit(context, (site.resolve() / name).as_uri(), []) as page:
                    for width in widths:
                        page.set_viewport_size({"width": width, "height": 900})
                        page.wait_for_timeout(300)
                        target = folder / f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                        page.screenshot(path=target, full_page=True)
                        print(target)
        browser.close()


def picture(site, file, name, what):
    """A PNG of the first element of a page that a CSS selector finds, in the light scheme, at twice its size."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=LAUNCH)
        context = browser.new_context(
            color_scheme="light", viewport={"width": 640, "height": 900}, device_scale_factor=2
        )
        with Visit(context, (site.resolve() / name).as_uri(), []) as page:
            page.locator(what).first.screenshot(path=file)
        browser.close()


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Check the rendered pages in a headless Chromium.", allow_abbrev=False)
    parser.add_argument("--site", type=Path, default=ROOT / "_build" / "html")
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("check", help="check pages (the default)", allow_abbrev=False)
    one.add_argument("pages", nargs="*", help="such as book/intro.html (default: all)")
    two = commands.add_parser("screenshot", help="draw pages into a folder", allow_abbrev=False)
    two.add_argument("folder", type=Path)
    two.add_argument("pages", nargs="*", help="such as book/intro.html (default: all of book/)")
    three = commands.add_parser("picture", help="draw one element of a page", allow_abbrev=False)
    three.add_argument("file", type=Path)
    three.add_argument("page")
    three.add_argument("what", help="a CSS selector")
    options = parser.parse_args(arguments)

    if not (options.site / "index.html").is_file():
        print(f"no pages in {options.site}: run `make site` first")
        return 1
    if find_chromium() is None:
        print("pages NOT checked in a browser: no Chromium was found (install chromium, or set CHROMIUM to its path)")
        return 1 if os.environ.get("CI") else 0
    if options.command == "screenshot":
        default = sorted(path.relative_to(options.site).as_posix() for path in (options.site / "book").rglob("*.html"))
        screenshot(options.site, options.folder, options.pages or default)
        return 0
    if options.command == "picture":
        picture(options.site, options.file, options.page, options.what)
        return 0
    problems = check(options.site, getattr(options, "pages", None) or None)
    for page, problem in problems:
        print(f"{page}: {problem}")
    print(f"pages checked in a browser at {', '.join(map(str, WIDTHS))} px, light and dark: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
