"""What validates the notebooks turns red when it should: a small book is broken in each way.

The book is executed once, and nbval goes over it once, with a fault in each of several cells. What
needs no kernel is tried on notebooks that are written here.
"""

import base64
import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import arithmetic
import nbformat
import notebooks
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DIGEST = "application/vnd.dpcompanion.digest"
DRAWING = "application/vnd.dpcompanion.drawing"
FRONT = "---\nkernelspec:\n  name: python3\n  display_name: Python 3\n---\n# A page\n"
NUMBER = "print(6 * 7, 'in all')"
FIGURE = (
    "import matplotlib.pyplot as plt\n"
    "plt.subplots(figsize=(4, 3), dpi=80)[1].plot(range({0}))\n"
    "plt.show()\n"
    f"display({{{{'{DIGEST}': 'sum {{0}}'}}}}, raw=True)"
)
SVG = '<svg><path d="M0 0L{0} 9"/><text>ours</text></svg>'
DRAWN = f"display({{{{'{DRAWING}': '{SVG}'}}}}, raw=True)"
SHARED = "import os, pathlib\nlive = pathlib.Path(os.environ['DPCOMPANION_LIVE'])\n"
SHARED += "print([path.name for path in live.iterdir()], os.environ['DPCOMPANION_PRESET'])\n"


def page(*cells, options=()):
    """A source with these code cells; options: {number of a cell: the lines of its metadata}."""
    options = dict(options)
    return FRONT + "".join(
        f"\nWords.\n\n```{{code-cell}} ipython3\n{options.get(number, '')}{code}\n```\n"
        for number, code in enumerate(cells)
    )


def outputs_of(notebook, number):
    return notebooks.code_cells(notebook)[number].outputs


def repaint(pixels):
    """A change of a cell's outputs: so many of the picture's pixels have another colour."""

    def change(outputs):
        data = next(output.data for output in outputs if "image/png" in output.get("data", {}))
        picture = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        ).copy()
        picture[:pixels, 0] = 255 - picture[:pixels, 0]
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, "png")
        data["image/png"] = base64.b64encode(stream.getvalue()).decode()

    return change


def say(text):
    return lambda outputs: outputs[0].update(text=f"{text}\n")


def move_digest(outputs):
    outputs[-1].data[DIGEST] = "sum 8"


def redraw(old, new):
    def change(outputs):
        outputs[-1].data[DRAWING] = outputs[-1].data[DRAWING].replace(old, new)

    return change


# {what is done to the committed outputs of a cell: (its code, its metadata, the change, whether it
# is a fault)}.
CHANGES = {
    "nothing": (NUMBER, "", lambda outputs: None, False),
    "another number": (NUMBER, "", say("43 in all"), True),
    "another number that the cell tolerates": (
        NUMBER,
        ":tolerance: 0.03\n",
        say("43 in all"),
        False,
    ),
    "a number beyond the tolerance": (NUMBER, ":tolerance: 0.03\n", say("44 in all"), True),
    "another word within the tolerance": (NUMBER, ":tolerance: 0.03\n", say("43 in each"), True),
    "another number, and a tag that asks nbval to look away": (
        NUMBER,
        ":tags: [nbval-ignore-output]\n",
        say("43 in all"),
        True,
    ),
    "another number, and a comment that asks for it": (
        f"# NBVAL_SKIP\n{NUMBER}",
        "",
        say("43 in all"),
        True,
    ),
    "another time": ("print('took 1.5 s')", "", say("took 72 ms"), False),
    "another address": ("print('at 0x7f')", "", say("at 0x8e"), False),
    "no output": (NUMBER, "", lambda outputs: outputs.clear(), True),
    "a picture that differs by a hair": (FIGURE.format(5), "", repaint(20), False),
    "another picture": (FIGURE.format(6), "", repaint(200), True),
    "a drawing that differs by a hair": (DRAWN.format(5), "", redraw("L5", "L5.3"), False),
    "another line": (DRAWN.format(6), "", redraw("L6", "L8"), True),
    "another text in a drawing": (DRAWN.format(7), "", redraw("ours", "theirs"), True),
    "another digest": (FIGURE.format(7), "", move_digest, True),
    "a warning that is not committed": (
        "import sys\nprint('!', file=sys.stderr)",
        "",
        lambda o: o.clear(),
        True,
    ),
}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A folder with an executed book: a page of everything, and three that look into the folder
    that papers share.
    """
    root = tmp_path_factory.mktemp("a book")
    (root / "book").mkdir()
    options = {number: options for number, (_, options, _, _) in enumerate(CHANGES.values())}
    write = {
        "all": page(*(code for code, *_ in CHANGES.values()), options=options),
        "never": page(NUMBER),
    }
    for stem in ("idp", "idp-exhibits", "idps"):
        write[stem] = page(f"{SHARED}(live / '{stem}').touch()")
    for stem, text in write.items():
        (root / "book" / f"{stem}.md").write_text(text, encoding="utf-8")
    (root / "book" / "conftest.py").symlink_to(ROOT / "book" / "conftest.py")
    done = execute(root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def execute(root, *names, **environment):
    command = [
        sys.executable,
        str(ROOT / "tools" / "notebooks.py"),
        "--root",
        str(root),
        "execute",
        *names,
    ]
    environment = {**os.environ, "DPCOMPANION_PRESET": "quick", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment
    )


def read(root, stem):
    return nbformat.read(root / "book" / f"{stem}.ipynb", as_version=4)


def change(root, stem, edit):
    notebook = read(root, stem)
    edit(notebook)
    nbformat.write(notebook, root / "book" / f"{stem}.ipynb")


@pytest.mark.slow
def test_nbval_finds_every_fault_and_no_other(book):
    def break_all(notebook):
        for number, (_, _, edit, _) in enumerate(CHANGES.values()):
            edit(outputs_of(notebook, number))

    def clear(notebook):
        for cell in notebooks.code_cells(notebook):
            cell.update(outputs=[], execution_count=None)

    before = {path: path.read_bytes() for path in (book / "book").glob("*.ipynb")}
    try:
        change(book, "all", break_all)
        change(book, "never", clear)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "-rA",
            "--nbval",
        ]
        command += ["--nbval-current-env", f"--nbval-sanitize-with={ROOT / 'nbval.cfg'}", "book"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=book)
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    outcomes = {
        (stem, int(cell)): outcome
        for outcome, stem, cell in re.findall(
            r"^(\w+) book/([\w-]+)\.ipynb::Cell (\d+)", done.stdout, re.MULTILINE
        )
    }
    for number, (what, (_, _, _, is_fault)) in enumerate(CHANGES.items()):
        assert outcomes.pop(("all", number)) == ("FAILED" if is_fault else "PASSED"), (
            f"{what}: {done.stdout}"
        )
    assert outcomes.pop(("never", 0)) in ("FAILED", "ERROR"), done.stdout
    # The pages of a paper find what was computed before them, as where they were executed; others
    # do not.
    assert outcomes == {(stem, 0): "PASSED" for stem in ("idp", "idp-exhibits", "idps")}, (
        done.stdout
    )
    assert done.returncode == 1


def test_the_pages_of_a_paper_share_a_fresh_folder_exhibits_first(book):
    said = {
        stem: outputs_of(read(book, stem), 0)[0].text.strip()
        for stem in ("idp", "idp-exhibits", "idps")
    }
    assert said == {"idp": "['idp-exhibits'] quick", "idp-exhibits": "[] quick", "idps": "[] quick"}


@pytest.mark.slow
def test_executing_again_changes_no_byte_and_an_error_leaves_the_notebook_alone(book):
    before = {stem: (book / "book" / f"{stem}.ipynb").read_bytes() for stem in ("never", "idps")}
    (book / "book" / "idps.md").write_text(page("6 / 0"), encoding="utf-8")
    done = execute(book, "never", "idps")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stdout
    assert (
        "never: " in done.stdout and "reproduced" in done.stdout and "idps: FAILED" in done.stdout
    )
    assert before == {stem: (book / "book" / f"{stem}.ipynb").read_bytes() for stem in before}
    (book / "book" / "idps.md").write_text(
        page(f"{SHARED}(live / 'idps').touch()"), encoding="utf-8"
    )
    done = execute(book, "idps", DPCOMPANION_PRESET="paper")
    assert done.returncode == 0 and before["idps"] == (book / "book" / "idps.ipynb").read_bytes()
    assert "[] paper" in (book / "_build" / "paper" / "idps.ipynb").read_text(encoding="utf-8")


def test_what_says_the_same_keeps_its_bytes_and_what_does_not_is_named(book):
    """As nbval judges: the change of every cell, adopted or named."""
    fresh, committed = read(book, "all"), read(book, "all")
    for number, (_, _, edit, _) in enumerate(CHANGES.values()):
        edit(outputs_of(committed, number))
    kept = copy.deepcopy(committed)
    moved, added, lines = notebooks.adopt(fresh, committed)
    faults = [number for number, (_, _, _, is_fault) in enumerate(CHANGES.values()) if is_fault]
    assert moved == [str(number + 1) for number in faults] and added == []
    assert "cell 2: - 43 in all" in lines and "cell 2: + 42 in all" in lines
    for number in set(range(len(CHANGES))) - set(faults):
        assert outputs_of(fresh, number) == outputs_of(kept, number)
    notebooks.code_cells(fresh)[0].id = "new"
    assert notebooks.adopt(fresh, committed)[1] == ["1"]


@pytest.fixture
def pair(tmp_path):
    """A source and its twin as if executed: (the folder, a function that edits the source, one that
    edits the twin).
    """
    options = 'mystnb:\n  figure: {caption: "A line."}\n  image: {alt: "A line that rises."}'
    source = tmp_path / "book" / "page.md"
    source.parent.mkdir()
    source.write_text(
        page(NUMBER, "1 + 1", options={1: f"---\n{options}\n---\n"}), encoding="utf-8"
    )
    twin = notebooks.blank_twin(source)
    numbers, figure = notebooks.code_cells(twin)
    numbers.update(
        execution_count=1, outputs=[nbformat.v4.new_output("stream", text="42 in all\n")]
    )
    made = [
        nbformat.v4.new_output("display_data", data={kind: "eA=="})
        for kind in ("image/png", DIGEST)
    ]
    made[0].data[DRAWING] = (
        '<svg viewBox="0 0 350 200"><text style="font-size: 11px">ours</text></svg>'
    )
    figure.update(execution_count=2, outputs=made)
    nbformat.write(twin, source.with_suffix(".ipynb"))

    def edit_source(old, new):
        assert old in source.read_text(encoding="utf-8")
        source.write_text(source.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")

    def edit_twin(edit):
        change(tmp_path, "page", lambda notebook: edit(*notebooks.code_cells(notebook)))

    return tmp_path, edit_source, edit_twin


def test_the_pair_check_passes_what_was_executed(pair, capsys):
    assert (
        notebooks.main(["--root", str(pair[0]), "check"]) == 0
        and "0 problems" in capsys.readouterr().out
    )


ERROR = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
FAULTS_OF_OUTPUTS = {
    "executed": lambda number, figure: figure.update(execution_count=None, outputs=[]),
    "an error": lambda number, figure: number.outputs.append(ERROR),
    "stderr": lambda number, figure: number.outputs.append(
        nbformat.v4.new_output("stream", name="stderr", text="!")
    ),
    "digest": lambda number, figure: figure.outputs.pop(),
    "10.7 px on a phone": lambda number, figure: figure.outputs[0].data.update(
        {DRAWING: figure.outputs[0].data[DRAWING].replace("350", "368")}
    ),
    "SVG": lambda number, figure: figure.outputs[0].data.pop(DRAWING),
    "more than one figure": lambda number, figure: figure.outputs.append(figure.outputs[0]),
}
FAULTS_OF_SOURCES = {
    "stamp": ("6 * 7", "6 * 8"),
    "source is": ("Words", "Other words"),
    "metadata is": ("A line.", "A curve."),
    "cells": ("\nWords.\n", "\n"),
}


@pytest.mark.parametrize("word", FAULTS_OF_OUTPUTS)
def test_the_pair_check_finds_outputs_that_do_not_belong(pair, word):
    root, _, edit_twin = pair
    edit_twin(FAULTS_OF_OUTPUTS[word])
    (problem,) = notebooks.check(root)
    assert word in problem


@pytest.mark.parametrize("word", FAULTS_OF_SOURCES)
def test_the_pair_check_finds_a_stale_source(pair, capsys, word):
    root, edit_source, _ = pair
    edit_source(*FAULTS_OF_SOURCES[word])
    assert notebooks.main(["--root", str(root), "check"]) == 1 and word in capsys.readouterr().out


@pytest.mark.parametrize(
    "word, old, new",
    [
        ("alternative text", "A line that rises.", ""),
        ("caption", "A line.", ""),
        ("themes", "A line that rises.", "A black line."),
        ("characters", NUMBER, "1" * 121),
    ],
)
def test_the_pair_check_finds_a_figure_without_words_and_a_line_that_is_too_long(
    pair, word, old, new
):
    root, edit_source, _ = pair
    edit_source(
        f'"{old}"' if word != "characters" else old, f'"{new}"' if word != "characters" else new
    )
    executed = [
        (cell.outputs, cell.execution_count) for cell in notebooks.code_cells(read(root, "page"))
    ]
    twin = notebooks.blank_twin(root / "book" / "page.md")
    for cell, (outputs, count) in zip(notebooks.code_cells(twin), executed):
        cell.update(outputs=outputs, execution_count=count)
    nbformat.write(twin, root / "book" / "page.ipynb")
    (problem,) = notebooks.check(root)
    assert word in problem


def test_the_pair_check_finds_a_missing_notebook_and_a_stray_one(pair):
    root = pair[0]
    (root / "book" / "page.ipynb").rename(root / "book" / "other.ipynb")
    missing, stray = notebooks.check(root)
    assert "page: has no executed" in missing and "other.ipynb: has no source" in stray


def test_new_words_are_taken_over_without_a_run_and_new_code_is_not(pair, capsys):
    root, edit_source, _ = pair
    prose = ["--root", str(root), "prose", "page"]
    executed = [cell.outputs for cell in notebooks.code_cells(read(root, "page"))]
    edit_source("Words", "Other words")
    assert notebooks.main(prose) == 0 and notebooks.check(root) == []
    assert executed == [cell.outputs for cell in notebooks.code_cells(read(root, "page"))]
    edit_source("6 * 7", "6 * 8")
    assert notebooks.main(prose) == 1 and "execute it" in capsys.readouterr().out


def test_an_unknown_notebook_is_named(pair):
    with pytest.raises(SystemExit, match="nothing"):
        notebooks.main(["--root", str(pair[0]), "execute", "nothing"])


def test_an_arithmetic_sets_its_own_variables_and_takes_those_of_others_away(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    found = arithmetic.environment("sse+jitter")
    assert (
        found["ATEN_CPU_CAPABILITY"] == "default"
        and found["DPCOMPANION_JITTER"]
        and "MKL_CBWR" not in found
    )
    assert arithmetic.environment("two-threads")["OMP_NUM_THREADS"] == "2"
    with pytest.raises(ValueError, match="got avx9"):
        arithmetic.environment("sse+avx9")


@pytest.mark.slow
def test_a_command_runs_under_an_arithmetic_that_changes_bits():
    says = "import os; print(os.environ['DPCOMPANION_JITTER']); raise SystemExit(7)"
    command = [
        sys.executable,
        str(ROOT / "tools" / "arithmetic.py"),
        "jitter",
        sys.executable,
        "-c",
        says,
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert (
        done.returncode == 7 and "1e-12" in done.stdout and "jitter: changes bits of" in done.stdout
    )
