"""Execute the book's notebooks, and prove that what is committed was executed.

A chapter is written as MyST Markdown (`book/accounting.md`, with a `kernelspec`
in its front matter) and committed beside its executed twin of the same stem
(`book/accounting.ipynb`), which is the page that the book shows.

    python tools/notebooks.py execute               every chapter, live
    python tools/notebooks.py execute accounting    this one only
    python tools/notebooks.py prose accounting      its code is as it was executed: take over its new words
    python tools/notebooks.py check                 are source and twin one thing?

`execute` runs the source from top to bottom in the kernel of this very Python,
and writes a twin without times, with stable cell ids and with a sha256 of its
code.  Outputs that come out as they are committed are left as they are, so that
on an unchanged clone nothing changes; drawn pixels may differ by a hair.

`prose` runs no code: it writes the twin again from a source whose code cells are
those that were executed, with their outputs, and refuses any other.

`check` takes a fraction of a second and runs no code: cells, tags and stamp
agree with the source, execution counts run 1..n, no error and no stderr is
stored, every figure has a caption, an alternative text and a printed digest.
"""

import argparse
import base64
import configparser
import difflib
import hashlib
import io
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parent.parent
SANITIZE = Path(__file__).with_name("nbval_sanitize.cfg")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
PIXEL_LEVELS, PIXEL_SHARE = 16, 1e-3



def sources(root):
    """The book's MyST notebooks: the Markdown pages that name a kernel in their front matter."""
    pages = sorted((root / "book").rglob("*.md"))
    opening = re.compile(r"---\n(?:(?!---\n).*\n)*?kernelspec:")
    return [page for page in pages if opening.match(page.read_text(encoding="utf-8"))]


def choose(root, names):
    """The sources named by stem, by path inside book/ or by path; all of them without names."""
    found = sources(root)
    if not names:
        return found
    known = {alias: page for page in found for alias in (page.stem, name_of(root, page), str(page.relative_to(root)))}
    unknown = [name for name in names if name not in known]
    if unknown:
        there = ", ".join(name_of(root, page) for page in found)
        raise SystemExit(f"no such notebook: {', '.join(unknown)} (there are {there})")
    return [known[name] for name in names]


def name_of(root, page):
    return page.relative_to(root / "book").with_suffix("").as_posix()


def blank_twin(source):
    """The notebook that `source` describes, unexecuted: what its twin must be but for counts and outputs."""
    notebook = jupytext.read(source, fmt="md:myst")
    seen = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    kept = {key: value for key, value in notebook.metadata.items()
            if key not in ("jupytext", "kernelspec", "language_info")}
    notebook.metadata = nbformat.from_dict(
        {**kept, "kernelspec": KERNEL, "language_info": {"name": "python"},
         "dpcompanion": {"code_sha256": code_stamp(notebook)}}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code_stamp(notebook):
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()



def execute(root, source, preset, timeout):
    """Execute one source and bring its twin up to date; returns the progress line and what there is to say below it."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    started = time.monotonic()
    name, twin = name_of(root, source), source.with_suffix(".ipynb")
    if preset != "quick":
        # The committed twins are quick runs; any other preset is for reading beside them.
        twin = root / "_build" / preset / f"{name}.ipynb"
    fresh = blank_twin(source)
    committed = nbformat.read(twin, as_version=4) if twin.exists() else None
    metadata = dict(fresh.metadata)
    with tempfile.TemporaryDirectory() as folder:
        # A socket file, readable by its owner alone, rather than a port that others on the machine could listen to.
        channel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        client = NotebookClient(
            fresh, timeout=timeout, kernel_name="python3", record_timing=False, coalesce_streams=True,
            resources={"metadata": {"path": str(source.parent)}}, config=Config(KernelManager=channel),
        )
        try:
            client.execute(env=kernel_environment(preset))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return f"{name}: FAILED after {time.monotonic() - started:.0f} s", str(error), False
    fresh.metadata = nbformat.from_dict(metadata)

    if committed:
        changed, added, difference = compare(fresh, committed)
        verdict = f"CHANGED: cell {', '.join(map(str, changed))}" if changed else "reproduced"
        verdict += f", new code: cell {', '.join(map(str, added))}" if added else ""
    else:
        verdict, difference = "new", ""
    write_if_different(twin, nbformat.writes(fresh) + "\n")
    cells = sum(cell.cell_type == "code" for cell in fresh.cells)
    return f"{name}: {time.monotonic() - started:.0f} s, {cells} code cells, {verdict}", difference, True


def take_over_prose(source):
    """Write the twin of a source whose code is the twin's, with the twin's outputs; returns what is wrong, or None."""
    twin = source.with_suffix(".ipynb")
    if not twin.exists():
        return "has no executed notebook beside it"
    fresh, executed = blank_twin(source), nbformat.read(twin, as_version=4)
    if code_stamp(fresh) != code_stamp(executed):
        return "its code has changed: execute it"
    cells = (cell for cell in executed.cells if cell.cell_type == "code")
    for cell in fresh.cells:
        if cell.cell_type == "code":
            old = next(cells)
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    write_if_different(twin, nbformat.writes(fresh) + "\n")
    return None


def kernel_environment(preset):
    return {
        **os.environ, "DPCOMPANION_PRESET": preset, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline", "JUPYTER_PREFER_ENV_PATH": "1",
    }


def compare(fresh, committed):
    """Numbers (from 1) of the code cells whose outputs differ and of those whose code is new, and a short diff.

    A cell that reproduces takes over the committed outputs, so that equal results are equal bytes.
    """
    before = {cell.id: cell for cell in committed.cells if cell.cell_type == "code"}
    changed, added, lines = [], [], []
    for number, cell in enumerate((cell for cell in fresh.cells if cell.cell_type == "code"), 1):
        old = before.get(cell.id)
        if old is None:
            added.append(number)
        elif same_outputs(cell.outputs, old.outputs):
            cell.outputs = old.outputs
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
        else:
            changed.append(number)
            names = f"committed, cell {number}", f"now, cell {number}"
            lines += list(difflib.unified_diff(shown(old.outputs), shown(cell.outputs), *names, lineterm="", n=0))[:12]
    return changed, added, "\n".join(lines[:60])


def same_outputs(new, old):
    if len(new) != len(old):
        return False
    for one, other in zip(new, old):
        pictures = [output.get("data", {}).get("image/png") for output in (one, other)]
        if without_picture(one) != without_picture(other) or not same_picture(*pictures):
            return False
    return True


def without_picture(output):
    """An output as it is compared: no PNG, no execution count, addresses and timings sanitised."""
    plain = nbformat.from_dict(output)
    plain.pop("execution_count", None)
    if "data" in plain:
        plain["data"] = {kind: sanitised(value) for kind, value in plain["data"].items() if kind != "image/png"}
    if "text" in plain:
        plain["text"] = sanitised(plain["text"])
    return plain


def sanitised(value):
    if not isinstance(value, str):
        return value
    rules = configparser.RawConfigParser()
    rules.read(SANITIZE)
    for rule in rules.sections():
        value = re.sub(rules[rule]["regex"], rules[rule]["replace"], value)
    return value


def same_picture(new, old):
    """Equal in size and, but for a thousandth of the pixels, in colour: machines differ in how they smooth lines."""
    if new is None or old is None or new == old:
        return new == old
    import numpy as np
    from PIL import Image

    one, other = (np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), dtype=int)
                  for text in (new, old))
    return one.shape == other.shape and (abs(one - other).max(axis=2) > PIXEL_LEVELS).mean() <= PIXEL_SHARE


def shown(outputs):
    """The lines that a reader sees of some outputs, pictures by their digest."""
    lines = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text") or data.get("text/markdown") or data.get("text/plain") or ""
        lines += sanitised(text).splitlines()
        if "image/png" in data:
            lines.append(f"<picture {hashlib.sha256(data['image/png'].encode()).hexdigest()[:12]}>")
    return lines


def write_if_different(path, text):
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)



def check(root):
    """What is wrong with the committed pairs, one sentence each."""
    pages = sources(root)
    problems = []
    for source in pages:
        twin = source.with_suffix(".ipynb")
        found = check_pair(root, source, twin) if twin.exists() else ["has no executed notebook beside it"]
        problems += [f"{name_of(root, source)}: {problem}" for problem in found]
    expected = {source.with_suffix(".ipynb") for source in pages}
    for stray in sorted((root / "book").rglob("*.ipynb")):
        if stray not in expected and ".ipynb_checkpoints" not in stray.parts:
            problems.append(f"{stray.relative_to(root)}: has no source beside it")
    return problems


def check_pair(root, source, twin):
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
                problems.append(f"cell {number}: {part.replace('_', ' ')} is not that of the source")
    if str(root) in text:
        problems.append("mentions this machine's folder")
    executed = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in executed] != list(range(1, len(executed) + 1)):
        problems.append("was not executed from top to bottom: its counts do not run 1, 2, 3, ...")
    for number, cell in enumerate(executed, 1):
        problems += [f"code cell {number}: {problem}" for problem in check_outputs(cell)]
    return problems


def check_outputs(cell):
    problems = []
    if any(output.output_type == "error" for output in cell.outputs):
        problems.append("stores an error")
    if any(output.get("name") == "stderr" for output in cell.outputs):
        problems.append("stores output on stderr")
    pictures = sum(any(kind.startswith("image/") for kind in output.get("data", {})) for output in cell.outputs)
    if pictures:
        options = cell.metadata.get("mystnb", {})
        if not str(options.get("image", {}).get("alt", "")).strip():
            problems.append("its figure has no alternative text (mystnb: image: alt)")
        if not str(options.get("figure", {}).get("caption", "")).strip():
            problems.append("its figure has no caption (mystnb: figure: caption)")
        if not any(output.get("name") == "stdout" for output in cell.outputs):
            problems.append("its figure prints no digest, so that no check compares it")
    if pictures > 1:
        problems.append("draws more than one figure")
    return problems



def main(arguments=None):
    parser = argparse.ArgumentParser(description="Execute the book's notebooks, or check what is committed.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds book/")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("execute", help="execute sources into their notebooks")
    run.add_argument("names", nargs="*", help="which ones, by stem or path (default: all)")
    run.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1),
                     help="how many at a time (default: %(default)s)")
    run.add_argument("--timeout", type=int, default=900, help="seconds that one cell may take (default: %(default)s)")
    words = commands.add_parser("prose", help="take over new prose where the code is what was executed")
    words.add_argument("names", nargs="+", help="which ones, by stem or path")
    commands.add_parser("check", help="check that notebooks and sources are one thing")
    options = parser.parse_args(arguments)
    root = options.root.resolve()

    if options.command == "check":
        problems = check(root)
        for problem in problems:
            print(problem)
        print(f"{len(sources(root))} notebooks checked, {len(problems)} problems")
        return 1 if problems else 0

    if options.command == "prose":
        problems = {name_of(root, page): take_over_prose(page) for page in choose(root, options.names)}
        for name, problem in problems.items():
            print(f"{name}: {problem or 'its words are up to date'}")
        return 1 if any(problems.values()) else 0

    preset = os.environ.get("DPCOMPANION_PRESET", "quick")
    pages = choose(root, options.names)
    print(f"executing {len(pages)} notebooks at the {preset} preset", flush=True)
    good = True
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        jobs = [pool.submit(execute, root, page, preset, options.timeout) for page in pages]
        for job in jobs:
            line, below, fine = job.result()
            good &= fine
            print(f"  {line}", flush=True)
            if below:
                print("    " + below.replace("\n", "\n    "), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
