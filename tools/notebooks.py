"""Execute the book's notebooks, and check that what is committed was executed.

A chapter is written as MyST Markdown (`book/accounting.md`, with a `kernelspec` in its front
matter) and committed beside its executed twin of the same stem (`book/accounting.ipynb`), which is
the page that the book shows.

    python tools/notebooks.py execute               every chapter, live
    python tools/notebooks.py execute accounting    this one only
    python tools/notebooks.py prose accounting      its code is as executed: take over its new words
    python tools/notebooks.py check                 are source and twin one thing?

`execute` runs the source from top to bottom in the kernel of this very Python, and writes a twin
without times, with stable cell ids and with a sha256 of its code. Outputs that come out as they are
committed (outputs.py) keep their bytes, so that on an unchanged clone nothing changes.

`prose` runs no code: it writes the twin again from a source whose code cells are those that were
executed, with their outputs, and refuses any other.

`check` takes a fraction of a second and runs no code: cells, tags and stamp agree with the source,
no line of code is too long, execution counts run 1..n, no error and no stderr is stored, every
figure has a caption, an alternative text for both themes, a digest, and an SVG that a phone can
show. That the outputs come out again is nbval's to say: see book/conftest.py.

The pages of one paper, whose names begin alike (`idp-sgd`, `idp-sgd-exhibits`), are executed in
turn, and share a fresh folder in which records of live runs are kept (DPCOMPANION_LIVE, see
`reproduction/chapters.py`): the first page computes, the next reads.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import arithmetic
import jupytext
import nbformat
import outputs

from dpcompanion import _files

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
SHOWN = 24  # lines that are shown of one cell
LEGIBLE = 11  # px of a figure's letters on a phone
LONGEST = 120  # characters of a line of code that unfolds


def sources(root):
    """The book's MyST notebooks: the Markdown pages that name a kernel in their front matter."""
    opening = re.compile(r"---\n(?:(?!---\n).*\n)*?kernelspec:")
    return [
        page
        for page in sorted((root / "book").rglob("*.md"))
        if opening.match(page.read_text(encoding="utf-8"))
    ]


def choose(root, names):
    """The sources named by stem, by path inside book/ or by path; all of them without names."""
    found = sources(root)
    known = {
        alias: page
        for page in found
        for alias in (page.stem, name_of(root, page), str(page.relative_to(root)))
    }
    if unknown := [name for name in names if name not in known]:
        there = ", ".join(name_of(root, page) for page in found)
        raise SystemExit(f"no such notebook: {', '.join(unknown)} (there are {there})")
    return [known[name] for name in names] or found


def name_of(root, page):
    return page.relative_to(root / "book").with_suffix("").as_posix()


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def blank_twin(source):
    """The notebook that `source` describes, unexecuted: its twin but for counts and outputs."""
    notebook = jupytext.read(source, fmt="md:myst")
    seen = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    code = "\0".join(cell.source for cell in code_cells(notebook))
    notebook.metadata.pop("jupytext", None)
    notebook.metadata |= {
        "kernelspec": KERNEL,
        "language_info": {"name": "python"},
        "dpcompanion": {"code_sha256": hashlib.sha256(code.encode()).hexdigest()},
    }
    notebook = nbformat.from_dict(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(root, source, preset, timeout, folder):
    """Execute one source and bring its twin up to date: (lines to print, success)."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    started, name, fresh = time.monotonic(), name_of(root, source), blank_twin(source)
    # The committed twins are quick runs; any other preset is for reading beside them.
    twin = (
        source.with_suffix(".ipynb")
        if preset == "quick"
        else root / "_build" / preset / f"{name}.ipynb"
    )
    metadata = dict(fresh.metadata)
    # A socket file, readable by its owner alone, rather than a port that others on the machine
    # could listen to.
    channel = {"transport": "ipc", "connection_file": f"{folder}/kernel-{source.stem}.json"}
    client = NotebookClient(
        fresh,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(source.parent)}},
        config=Config(KernelManager=channel),
    )
    try:
        client.execute(
            env={**arithmetic.environment("as it is"), **kernel_environment(preset, folder)}
        )
    except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
        return [
            f"{name}: FAILED after {time.monotonic() - started:.0f} s",
            *str(error).splitlines(),
        ], False
    fresh.metadata = nbformat.from_dict(metadata)
    below, verdict = [], "new"
    if twin.exists():
        moved, added, below = adopt(fresh, nbformat.read(twin, as_version=4))
        verdict = f"CHANGED: cell {', '.join(moved)}" if moved else "reproduced"
        verdict += f", new code: cell {', '.join(added)}" if added else ""
    _files.replace(twin, f"{nbformat.writes(fresh)}\n".encode())
    said = (
        f"{name}: {time.monotonic() - started:.0f} s, {len(code_cells(fresh))} code cells, "
        f"{verdict}"
    )
    return [said, *below], True


def adopt(fresh, committed):
    """Give each cell that says the same as before the outputs it had, so that equal results are
    equal bytes: the numbers of the cells that do not, of those whose code is new, and the lines
    that changed.
    """
    before = {cell.id: cell.outputs for cell in code_cells(committed)}
    moved, added, lines = [], [], []
    for number, cell in enumerate(code_cells(fresh), 1):
        old = before.get(cell.id)
        if old is None:
            added.append(str(number))
        elif outputs.same(cell.outputs, old, float(cell.metadata.get("tolerance", 0))):
            cell.outputs = old
            for output in old:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
        else:
            moved.append(str(number))
            lines += [
                f"cell {number}: {line}"
                for line in outputs.changed_lines(cell.outputs, old)[:SHOWN]
            ]
    return moved, added, lines


def take_over_prose(source):
    """Write the twin of a source whose code is the twin's, with the twin's outputs; returns what is
    wrong, or None.
    """
    twin = source.with_suffix(".ipynb")
    if not twin.exists():
        return "has no executed notebook beside it"
    fresh, executed = blank_twin(source), nbformat.read(twin, as_version=4)
    if [cell.source for cell in code_cells(fresh)] != [
        cell.source for cell in code_cells(executed)
    ]:
        return "its code has changed: execute it"
    for cell, old in zip(code_cells(fresh), code_cells(executed)):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    _files.replace(twin, f"{nbformat.writes(fresh)}\n".encode())
    return None


def paper_of(page):
    """The page whose name begins the names of all pages of its paper."""
    words = page.stem.split("-")
    firsts = (page.with_stem("-".join(words[:number])) for number in range(1, len(words)))
    return next((first for first in firsts if first.exists()), page)


def papers(pages):
    """The pages, those of one paper together: all exhibits first, so that what they share is
    computed in one kernel.
    """
    found = {}
    for page in sorted(pages, key=lambda page: not page.stem.endswith("-exhibits")):
        found.setdefault(paper_of(page), []).append(page)
    return list(found.values())


def kernel_environment(preset, folder):
    """What a kernel has beside the environment of its caller. No IPython profile of this machine
    plays a part; its own collects cycles less often, for little of what loading modules makes ever
    goes.
    """
    startup = Path(folder, "ipython", "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "cycles.py").write_text("__import__('gc').set_threshold(100_000, 20, 100)\n")
    return {
        "DPCOMPANION_PRESET": preset,
        "DPCOMPANION_FILTERS": "anew",
        "DPCOMPANION_LIVE": f"{folder}/live",
        "IPYTHONDIR": f"{folder}/ipython",
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def check(root):
    """What is wrong with the committed pairs, one sentence each."""
    pages = sources(root)
    problems = [
        f"{name_of(root, source)}: {problem}"
        for source in pages
        for problem in check_pair(root, source)
    ]
    twins = {source.with_suffix(".ipynb") for source in pages}
    stray = sorted(
        path for path in (root / "book").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    )
    return problems + [
        f"{name_of(root, path)}.ipynb: has no source beside it"
        for path in stray
        if path not in twins
    ]


def check_pair(root, source):
    twin = source.with_suffix(".ipynb")
    if not twin.exists():
        return ["has no executed notebook beside it"]
    text = twin.read_text(encoding="utf-8")
    notebook, blank = nbformat.reads(text, as_version=4), blank_twin(source)
    problems = []
    if notebook.metadata != blank.metadata:
        problems.append("its metadata or the stamp of its code is not that of the source")
    if len(notebook.cells) != len(blank.cells):
        problems.append(f"has {len(notebook.cells)} cells, its source {len(blank.cells)}")
    for number, (cell, wanted) in enumerate(zip(notebook.cells, blank.cells), 1):
        for part in ("cell_type", "source", "metadata", "id"):
            if cell.get(part) != wanted.get(part):
                problems.append(f"cell {number}: {part} is not that of the source")
    if str(root) in text:
        problems.append("mentions this machine's folder")
    executed = code_cells(notebook)
    if [cell.execution_count for cell in executed] != list(range(1, len(executed) + 1)):
        problems.append("was not executed from top to bottom: its counts do not run 1, 2, 3, ...")
    for number, cell in enumerate(executed, 1):
        problems += [f"code cell {number}: {problem}" for problem in check_cell(cell)]
    return problems


def check_cell(cell):
    options = cell.metadata.get("mystnb", {})
    pictures = len(outputs.pictures(cell.outputs))
    digests = [output for output in cell.outputs if output.get("data", {}).get(outputs.DIGEST)]
    drawings = outputs.pictures(cell.outputs, outputs.DRAWING)
    smallest = min(map(outputs.letters_on_a_phone, drawings), default=LEGIBLE)
    alt, caption = (
        str(options.get(part, {}).get(key, ""))
        for part, key in (("image", "alt"), ("figure", "caption"))
    )
    longest = max(map(len, cell.source.splitlines()), default=0)
    faults = {
        f"has a line of {longest} characters, {LONGEST} at most": longest > LONGEST,
        "stores an error": any(output.output_type == "error" for output in cell.outputs),
        "stores output on stderr": any(output.get("name") == "stderr" for output in cell.outputs),
        "its figure has no alternative text (mystnb: image: alt)": pictures and not alt.strip(),
        "its figure has no caption (mystnb: figure: caption)": pictures and not caption.strip(),
        "its caption or alternative text says black or white, which is not so in both themes": bool(
            re.search(r"(?i)\b(black|white)\b", f"{caption} {alt}")
        ),
        "its figure has no digest (plotting.digest), so that no check compares it": pictures
        and not digests,
        "its figure was not kept as SVG (plotting.use_style)": pictures != len(drawings),
        f"its figure has letters of {smallest:.1f} px on a phone, {LEGIBLE} at least": smallest
        < LEGIBLE,
        "draws more than one figure": pictures > 1,
    }
    return [fault for fault, there in faults.items() if there]


def execute_all(root, pages, jobs, timeout):
    """Execute pages, some papers at a time, and print a report; returns whether all went well."""
    preset = os.environ.get("DPCOMPANION_PRESET", "quick")
    print(f"executing {len(pages)} notebooks at the {preset} preset", flush=True)
    good = True
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for done in pool.map(
            in_turn, *zip(*[(root, paper, preset, timeout) for paper in papers(pages)])
        ):
            for lines, fine in done:
                print("  " + "\n    ".join(lines), flush=True)
                good = good and fine
    return good


def in_turn(root, pages, preset, timeout):
    """Execute the pages of one paper one after the other, with a folder that they share."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/live")
        return [execute(root, page, preset, timeout, folder) for page in pages]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Execute the book's notebooks, or check what is committed.", allow_abbrev=False
    )
    parser.add_argument(
        "command", choices=("execute", "prose", "check"), help="see the head of this file"
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="pages to execute or to write again, by stem or path (default: all)",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds book/")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="papers at a time (%(default)s)",
    )
    parser.add_argument(
        "--timeout", type=int, default=2000, help="seconds that one cell may take (%(default)s)"
    )
    options = parser.parse_args(arguments)
    root = options.root.resolve()

    if options.command == "check":
        problems = check(root)
        print(
            "\n".join(
                [*problems, f"{len(sources(root))} notebooks checked, {len(problems)} problems"]
            )
        )
        return 1 if problems else 0
    pages = choose(root, options.names)
    if options.command == "execute":
        return 0 if execute_all(root, pages, options.jobs, options.timeout) else 1
    problems = {name_of(root, page): take_over_prose(page) for page in pages}
    for name, problem in problems.items():
        print(f"{name}: {problem or 'its words are up to date'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
