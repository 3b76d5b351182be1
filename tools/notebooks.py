"""Execute the book's notebooks, and prove that what is committed was executed.

A chapter is written as MyST Markdown (`book/accounting.md`, with a `kernelspec`
in its front matter) and committed beside its executed twin of the same stem
(`book/accounting.ipynb`), which is the page that the book shows.

    python tools/notebooks.py execute               every chapter, live
    python tools/notebooks.py execute accounting    this one only
    python tools/notebooks.py prose accounting      its code is as it was executed: take over its new words
    python tools/notebooks.py check                 are source and twin one thing?
    python tools/notebooks.py verify                execute again: do the numbers come out as committed?
    python tools/notebooks.py verify accounting --under avx2 jitter

`execute` runs the source from top to bottom in the kernel of this very Python,
and writes a twin without times, with stable cell ids and with a sha256 of its
code.  Outputs that come out as they are committed are left as they are, so that
on an unchanged clone nothing changes; drawn pixels may differ by a hair.

`prose` runs no code: it writes the twin again from a source whose code cells are
those that were executed, with their outputs, and refuses any other.

`verify` executes again and writes nothing: it says which cells moved, from what
to what. Pages that train do it under two arithmetics at once that are no machine's
own, old vector units and the jitter (see arithmetic.py), or under those that are
named; outputs.py compares.

The pages of one paper, whose names begin alike (`idp-sgd`, `idp-sgd-exhibits`), are executed in turn, and share a
fresh folder in which records of live runs are kept (DPCOMPANION_LIVE, see `reproduction/chapters.py`): the first page
computes, the next reads. Every paper, and every arithmetic, has a folder of its own.

`check` takes a fraction of a second and runs no code: cells, tags and stamp
agree with the source, no line of code is too long, execution counts run 1..n, no error and no stderr is
stored, every figure has a caption, an alternative text and a digest.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import arithmetic
import jupytext
import nbformat
import outputs

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# What a page that trains imports.
TRAINS = re.compile(r"(from|import) dpcompanion\b.*\b(engine|ensembles|experiments|chapters|train\w*)\b")
# The arithmetics of `verify`: for pages that train, and for the others.
TRAINING, PLAIN = ("sse+jitter",), ("as it is",)
SHOWN = 12  # lines that are shown of one cell
# Characters of a line of code, here as in the modules.
LONGEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["line-length"]


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
    kept = {
        key: value for key, value in notebook.metadata.items() if key not in ("jupytext", "kernelspec", "language_info")
    }
    notebook.metadata = nbformat.from_dict(
        {
            **kept,
            "kernelspec": KERNEL,
            "language_info": {"name": "python"},
            "dpcompanion": {"code_sha256": code_stamp(notebook)},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code_stamp(notebook):
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def run(root, source, preset, timeout, variables):
    """Execute a source in a kernel with these environment variables: (the notebook, None) or (None, what went wrong).

    A kernel that does not start is started once more: then nothing of the notebook has run.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    for last in (False, True):
        fresh = blank_twin(source)
        metadata = dict(fresh.metadata)
        with tempfile.TemporaryDirectory() as folder:
            # A socket file, readable by its owner alone, rather than a port that others on the machine could listen to.
            channel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
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
                client.execute(env=kernel_environment(preset, variables))
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                return None, str(error)
            except RuntimeError as error:  # nbclient's, before the first cell
                if last:
                    return None, f"the kernel did not start: {error}"
                continue
        fresh.metadata = nbformat.from_dict(metadata)
        return fresh, None


def execute(root, source, preset, timeout, folder):
    """Execute one source and bring its twin up to date: (the progress line, what there is to say below it, success)."""
    started = time.monotonic()
    name, twin = name_of(root, source), source.with_suffix(".ipynb")
    if preset != "quick":
        # The committed twins are quick runs; any other preset is for reading beside them.
        twin = root / "_build" / preset / f"{name}.ipynb"
    fresh, wrong = run(root, source, preset, timeout, environment("as it is", folder))
    if fresh is None:
        return f"{name}: FAILED after {time.monotonic() - started:.0f} s", wrong, False
    verdict, below = "new", []
    if twin.exists():
        committed = nbformat.read(twin, as_version=4)
        moved, added = outputs.differences(fresh, committed)
        outputs.adopt(fresh, committed)
        verdict = f"CHANGED: cell {', '.join(str(number) for number, _ in moved)}" if moved else "reproduced"
        verdict += f", new code: cell {', '.join(map(str, added))}" if added else ""
        for number, lines in moved:
            below += [f"cell {number}: {old.strip()} -> {new.strip()}" for old, new in lines[:SHOWN]]
    write_if_different(twin, nbformat.writes(fresh) + "\n")
    cells = sum(cell.cell_type == "code" for cell in fresh.cells)
    return f"{name}: {time.monotonic() - started:.0f} s, {cells} code cells, {verdict}", "\n".join(below), True


def verify(root, source, under, timeout, folder):
    """Execute one source under an arithmetic and compare with its twin, which stays as it is: as `execute`."""
    started = time.monotonic()
    name = f"{name_of(root, source)}, {under}"
    if not source.with_suffix(".ipynb").exists():
        return f"{name}: has no executed notebook beside it", "", False
    fresh, wrong = run(root, source, "quick", timeout, environment(under, folder))
    if fresh is None:
        return f"{name}: FAILED after {time.monotonic() - started:.0f} s", wrong, False
    moved, added = outputs.differences(fresh, nbformat.read(source.with_suffix(".ipynb"), as_version=4))
    below = [f"cell {number}: {old.strip()} -> {new.strip()}" for number, lines in moved for old, new in lines[:SHOWN]]
    below += [f"cell {number}: its code is not what was executed" for number in added]
    verdict = f"MOVED in {len(moved)} cells" if moved else "NEW CODE" if added else "the same"
    return f"{name}: {time.monotonic() - started:.0f} s, {verdict}", "\n".join(below), not below


def trains(source):
    """Whether a page trains networks, itself or by the papers' experiments."""
    code = (cell.source for cell in jupytext.read(source, fmt="md:myst").cells if cell.cell_type == "code")
    return any(TRAINS.search(text) for text in code)


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


def environment(under, folder):
    """The variables of an arithmetic, and the folder in which the pages of a paper share what they compute live."""
    return {**arithmetic.environment(under), "DPCOMPANION_LIVE": folder}


def papers(pages):
    """The pages, those of one paper together: all exhibits first, so that what they share is computed in one kernel."""
    found = {}
    for page in pages:
        first = min(
            (
                other
                for other in pages
                if other.parent == page.parent and (other == page or page.stem.startswith(f"{other.stem}-"))
            ),
            key=lambda other: len(other.stem),
        )
        found.setdefault(first, []).append(page)
    return [sorted(each, key=lambda page: not page.stem.endswith("-exhibits")) for each in found.values()]


def kernel_environment(preset, variables):
    return {
        **variables,
        "DPCOMPANION_PRESET": preset,
        "DPCOMPANION_FILTERS": "anew",
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


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
        if (longest := max(map(len, cell.source.splitlines()), default=0)) > LONGEST:
            problems.append(f"code cell {number}: has a line of {longest} characters, {LONGEST} at most")
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
        if not any(output.get("data", {}).get(outputs.DIGEST) for output in cell.outputs):
            problems.append("its figure has no digest (plotting.digest), so that no check compares it")
    if pictures > 1:
        problems.append("draws more than one figure")
    return problems


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Execute the book's notebooks, or check what is committed.", allow_abbrev=False
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds book/")
    commands = parser.add_subparsers(dest="command", required=True)
    live = commands.add_parser("execute", help="execute sources into their notebooks", allow_abbrev=False)
    again = commands.add_parser(
        "verify", help="execute again and compare, under other arithmetics where asked", allow_abbrev=False
    )
    again.add_argument(
        "--under",
        nargs="+",
        type=arithmetic.known,
        metavar="ARITHMETIC",
        help=f"of {', '.join(arithmetic.ARITHMETICS)}, or several at once, joined by + "
        f"(default: {' and '.join(TRAINING)} for what trains, as it is for the rest)",
    )
    for command in (live, again):
        command.add_argument("names", nargs="*", help="which ones, by stem or path (default: all)")
        command.add_argument(
            "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many at a time (default: %(default)s)"
        )
        command.add_argument(
            "--timeout", type=int, default=900, help="seconds that one cell may take (default: %(default)s)"
        )
    words = commands.add_parser(
        "prose", help="take over new prose where the code is what was executed", allow_abbrev=False
    )
    words.add_argument("names", nargs="+", help="which ones, by stem or path")
    commands.add_parser("check", help="check that notebooks and sources are one thing", allow_abbrev=False)
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

    pages = choose(root, options.names)
    if options.command == "execute":
        preset = os.environ.get("DPCOMPANION_PRESET", "quick")
        print(f"executing {len(pages)} notebooks at the {preset} preset", flush=True)
        jobs = [[(root, page, preset, options.timeout) for page in paper] for paper in papers(pages)]
        return 0 if all(each(options.jobs, execute, jobs)) else 1

    # What takes longest comes first: pages that train, and of these the long ones.
    pages = sorted(pages, key=lambda page: (not trains(page), -page.stat().st_size))
    under = {page: options.under or (TRAINING if trains(page) else PLAIN) for page in pages}
    used = list(dict.fromkeys(name for names in under.values() for name in names))
    jobs = [
        [(root, page, name, options.timeout) for page in paper if name in under[page]]
        for paper in papers(pages)
        for name in used
        if any(name in under[page] for page in paper)
    ]
    print(f"executing {len(pages)} notebooks again, {sum(map(len, jobs))} runs, on {arithmetic.processor()}")
    for line in arithmetic.effects([name for name in used if arithmetic.settings(name)]):
        print(f"  {line}", flush=True)
    good = each(options.jobs, verify, jobs)
    print(
        f"{len(pages)} notebooks executed again, {len(good)} runs ({', '.join(used)}): {good.count(False)} differ "
        "from what is committed"
    )
    return 0 if all(good) else 1


def each(workers, work, jobs):
    """Do all the jobs, `workers` at a time, and print how each of their calls went; returns their success."""
    good = []
    with ProcessPoolExecutor(max_workers=workers) as pool:
        for job in [pool.submit(in_turn, work, calls) for calls in jobs]:
            for line, below, fine in job.result():
                good.append(fine)
                print(f"  {line}", flush=True)
                if below:
                    print("    " + below.replace("\n", "\n    "), flush=True)
    return good


def in_turn(work, calls):
    """Do the calls of one job after the other, with a folder that they share."""
    with tempfile.TemporaryDirectory() as folder:
        return [work(*arguments, folder) for arguments in calls]


if __name__ == "__main__":
    sys.exit(main())
