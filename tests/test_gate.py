"""The gate turns red when it should: a small book is broken in each way, and each check has to notice.

The book of these tests is one notebook with a number and a figure, executed once.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DIGEST = "application/vnd.dpcompanion.digest"
pytestmark = pytest.mark.xdist_group("gate")

NOTEBOOK = r"""---
kernelspec:
  name: python3
  display_name: Python 3
---
# Accounting

A formula, $\varepsilon = 1$, and {numref}`fig-line`.

```{code-cell} ipython3
print(6 * 7)
```

```{code-cell} ipython3
---
mystnb:
  figure: {caption: "A line.", name: fig-line}
  image: {alt: "A line that rises from 0 to 9."}
tags: [hide-input]
---
import matplotlib.pyplot as plt
from dpcompanion.reproduction import plotting
fig, ax = plt.subplots(figsize=(4, 3), dpi=80)
ax.plot(range(10))
plt.show()
plotting.digest(line=range(10))
```
"""


def tool(name, root, *arguments, **environment):
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, **environment})


def notebooks(root, *arguments, **environment):
    return tool("notebooks.py", root, "--root", root, *arguments, **environment)


def twin_of(root):
    return root / "book" / "accounting.ipynb"


def edit(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def code(notebook, number):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][number - 1]


@pytest.fixture(scope="module")
def sound_book(tmp_path_factory):
    root = tmp_path_factory.mktemp("book")
    (root / "book").mkdir()
    (root / "book" / "accounting.md").write_text(NOTEBOOK)
    done = notebooks(root, "execute")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def book(sound_book, tmp_path):
    shutil.copytree(sound_book / "book", tmp_path / "book")
    return tmp_path


def verify(root, *under):
    return notebooks(root, "verify", *(("--under", *under) if under else ()))


def test_a_sound_book_passes_the_pair_check_and_a_second_execution(book):
    before = twin_of(book).read_bytes()
    checked, compared = notebooks(book, "check"), verify(book)
    assert checked.returncode == 0 and "1 notebooks checked, 0 problems" in checked.stdout, checked.stdout
    assert compared.returncode == 0 and "accounting, as it is: " in compared.stdout, compared.stdout + compared.stderr
    assert "1 runs (as it is): 0 differ" in compared.stdout and twin_of(book).read_bytes() == before


def test_executing_again_changes_no_byte(book):
    before = twin_of(book).read_bytes()
    done = notebooks(book, "execute", "accounting")
    assert "accounting: " in done.stdout and done.stdout.rstrip().endswith("2 code cells, reproduced")
    assert twin_of(book).read_bytes() == before


def test_a_line_of_code_that_is_too_long_is_refused(book):
    source = book / "book" / "accounting.md"
    source.write_text(NOTEBOOK.replace("print(6 * 7)", f"print(6 * 7)  # {'so ' * 40}"))
    assert notebooks(book, "execute").returncode == 0
    checked = notebooks(book, "check")
    assert checked.returncode == 1 and "has a line of 136 characters, 120 at most" in checked.stdout, checked.stdout


def test_an_unexecuted_notebook_is_refused(book):
    def clear(notebook):
        for number in (1, 2):
            code(notebook, number).update(outputs=[], execution_count=None)

    edit(twin_of(book), clear)
    checked = notebooks(book, "check")
    assert checked.returncode == 1 and "was not executed from top to bottom" in checked.stdout


def test_a_missing_notebook_and_a_stray_one_are_refused(book):
    twin_of(book).rename(book / "book" / "other.ipynb")
    checked = notebooks(book, "check")
    assert checked.returncode == 1
    assert "has no executed notebook beside it" in checked.stdout and "other.ipynb: has no source" in checked.stdout


def test_a_changed_printed_number_is_found_by_verify_and_named_by_execute(book):
    sound = twin_of(book).read_bytes()
    edit(twin_of(book), lambda notebook: code(notebook, 1)["outputs"][0].update(text=["43\n"]))
    assert notebooks(book, "check").returncode == 0  # no code is run there, so this is for a second execution to find
    compared = verify(book)
    assert compared.returncode == 1 and "MOVED in 1 cells" in compared.stdout and "cell 1: 43 -> 42" in compared.stdout
    done = notebooks(book, "execute")
    assert "CHANGED: cell 1" in done.stdout and "cell 1: 43 -> 42" in done.stdout
    assert twin_of(book).read_bytes() == sound


def test_a_cell_may_state_its_tolerance_and_no_other_number_or_word_may_move(book):
    source = book / "book" / "accounting.md"
    source.write_text(NOTEBOOK.replace("ipython3\nprint(6 * 7)", "ipython3\n:tolerance: 0.03\nprint(6 * 7, 'in all')"))
    assert notebooks(book, "execute").returncode == 0 and notebooks(book, "check").returncode == 0
    for text, status in (("44 in all", 1), ("43 in all", 0)):
        edit(twin_of(book), lambda notebook: code(notebook, 1)["outputs"][0].update(text=[f"{text}\n"]))
        assert verify(book).returncode == status, text
    before = twin_of(book).read_bytes()
    assert notebooks(book, "execute").stdout.rstrip().endswith("reproduced")
    assert twin_of(book).read_bytes() == before  # what reproduces keeps its committed bytes


def test_a_moved_digest_is_found(book):
    def move(notebook):
        data = next(output["data"] for output in code(notebook, 2)["outputs"] if DIGEST in output.get("data", {}))
        data[DIGEST] = data[DIGEST].replace("sum 45", "sum 46")

    edit(twin_of(book), move)
    compared = verify(book)
    assert compared.returncode == 1 and "sum 46 -> (digest)" in compared.stdout, compared.stdout


def test_code_that_was_not_executed_is_found_by_a_second_execution(book):
    (book / "book" / "accounting.md").write_text(NOTEBOOK.replace("6 * 7", "7 * 6"))
    compared = verify(book)
    assert compared.returncode == 1 and "cell 1: its code is not what was executed" in compared.stdout


def test_what_depends_on_the_arithmetic_is_found(book):
    """The jitter reaches the weights, and the settings of an arithmetic reach its kernel and no other."""
    source = book / "book" / "accounting.md"
    trained = "from dpcompanion.training import models\nprint(f'{models.linear(9, 1).weight.sum().item():.9f}')"
    source.write_text(NOTEBOOK.replace("print(6 * 7)", trained))
    assert notebooks(book, "execute").returncode == 0
    again = verify(book)  # it trains, or so it looks: bits are changed
    assert again.returncode == 1 and "accounting, sse+jitter" in again.stdout
    assert again.stdout.count("MOVED in 1 cells") == 1 and "1 differ from what is committed" in again.stdout
    assert "sse+jitter: changes bits of" in again.stdout

    source.write_text(NOTEBOOK.replace("print(6 * 7)", "import os\nprint(os.environ.get('MKL_CBWR'))"))
    assert notebooks(book, "execute", MKL_CBWR="AVX2").returncode == 0
    compared = verify(book, "avx2", "sse")
    assert compared.returncode == 1 and compared.stdout.count("cell 1: None -> AVX2") == 1, compared.stdout


def test_the_pages_of_a_paper_are_executed_in_turn_and_share_a_folder_that_is_fresh(book):
    front = NOTEBOOK.partition("# Acc")[0]
    where = "import os, pathlib\nfolder = pathlib.Path(os.environ['DPCOMPANION_LIVE'])\n"
    says = "print([path.name for path in folder.iterdir()], os.environ.get('MKL_CBWR'))\n"
    for stem, made in (("idp", "chapter"), ("idp-exhibits", "exhibits"), ("idps", "other")):
        cell = f"{where}{says}(folder / '{made}').touch()"
        (book / "book" / f"{stem}.md").write_text(f"{front}# A page\n\n```{{code-cell}} ipython3\n{cell}\n```\n")
    (book / "book" / "accounting.md").unlink(), twin_of(book).unlink()
    assert notebooks(book, "execute", "--jobs", "1").returncode == 0
    said = {
        path.stem: "".join(code(json.loads(path.read_text()), 1)["outputs"][0]["text"]).strip()
        for path in (book / "book").glob("*.ipynb")
    }
    assert said == {"idp": "['exhibits'] None", "idp-exhibits": "[] None", "idps": "[] None"}
    compared = verify(book, "avx2", "compatible")
    assert compared.returncode == 1 and "3 notebooks again, 6 runs" in compared.stdout
    for found in ("['exhibits']", "[]"):
        for setting in ("AVX2", "COMPATIBLE"):
            assert f"{found} None -> {found} {setting}" in compared.stdout, "each arithmetic has a folder of its own"


def test_a_kernel_that_does_not_start_is_started_once_more_and_the_whole_notebook_runs(book, tmp_path):
    # A kernel's interpreter that ends before it listens: as often as there are files to take away.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('ipykernel_launcher' in word for word in sys.orig_argv):\n"
        f"    for name in ('once', 'twice'):\n"
        f"        path = os.path.join({str(tmp_path)!r}, name)\n"
        "        if os.path.exists(path):\n"
        "            os.remove(path)\n"
        "            os._exit(1)\n"
    )
    (tmp_path / "once").touch()
    done = notebooks(book, "execute", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and done.stdout.rstrip().endswith("reproduced") and not (tmp_path / "once").exists()
    (tmp_path / "once").touch(), (tmp_path / "twice").touch()
    done = notebooks(book, "execute", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "the kernel did not start" in done.stdout, done.stdout


def test_edited_code_under_stale_outputs_is_refused(book):
    source = book / "book" / "accounting.md"
    source.write_text(NOTEBOOK.replace("6 * 7", "6 * 8"))
    checked = notebooks(book, "check")
    assert checked.returncode == 1
    assert "the stamp of its code" in checked.stdout and "cell 2: source is not that of the source" in checked.stdout


def test_edited_prose_and_tags_are_refused_until_the_notebook_is_written_again(book):
    source = book / "book" / "accounting.md"
    source.write_text(NOTEBOOK.replace("A formula", "One formula").replace("hide-input", "hide-output"))
    checked = notebooks(book, "check")
    assert "cell 1: source" in checked.stdout and "cell 3: metadata" in checked.stdout
    assert notebooks(book, "execute").stdout.rstrip().endswith("reproduced")
    assert notebooks(book, "check").returncode == 0


def test_new_words_are_taken_over_without_a_run_and_new_code_is_not(book):
    source, executed = book / "book" / "accounting.md", json.loads(twin_of(book).read_text())
    source.write_text(NOTEBOOK.replace("A formula", "One formula"))
    assert notebooks(book, "prose", "accounting").returncode == 0 and notebooks(book, "check").returncode == 0
    after = json.loads(twin_of(book).read_text())
    assert "One formula" in "".join(after["cells"][0]["source"])
    assert [code(after, n)["outputs"] for n in (1, 2)] == [code(executed, n)["outputs"] for n in (1, 2)]
    source.write_text(NOTEBOOK.replace("6 * 7", "6 * 8"))
    refused = notebooks(book, "prose", "accounting")
    assert refused.returncode == 1 and "its code has changed: execute it" in refused.stdout


@pytest.mark.parametrize("option, complaint", [("alt", "no alternative text"), ("caption", "no caption")])
def test_a_figure_without_words_is_refused(book, option, complaint):
    def drop(cell_metadata):
        cell_metadata["mystnb"]["image" if option == "alt" else "figure"].pop(option)

    source = book / "book" / "accounting.md"
    source.write_text(
        NOTEBOOK.replace('{alt: "A line that rises from 0 to 9."}', "{}")
        if option == "alt"
        else NOTEBOOK.replace('caption: "A line.", ', "")
    )
    edit(twin_of(book), lambda notebook: drop(code(notebook, 2)["metadata"]))
    checked = notebooks(book, "check")
    assert checked.returncode == 1 and checked.stdout.count("accounting:") == 1 and complaint in checked.stdout


def test_a_figure_without_a_digest_is_refused(book):
    edit(
        twin_of(book),
        lambda notebook: code(notebook, 2).update(
            outputs=[output for output in code(notebook, 2)["outputs"] if DIGEST not in output.get("data", {})]
        ),
    )
    assert "its figure has no digest" in notebooks(book, "check").stdout


@pytest.mark.parametrize(
    "output, complaint",
    [
        ({"output_type": "error", "ename": "E", "evalue": "", "traceback": []}, "stores an error"),
        ({"output_type": "stream", "name": "stderr", "text": ["warning\n"]}, "stores output on stderr"),
    ],
)
def test_stored_errors_and_stderr_are_refused(book, output, complaint):
    edit(twin_of(book), lambda notebook: code(notebook, 1)["outputs"].append(output))
    checked = notebooks(book, "check")
    assert checked.returncode == 1 and complaint in checked.stdout


def test_a_figure_may_differ_by_a_hair_and_no_more(book):
    def repaint(pixels):
        def change(notebook):
            data = next(
                output["data"] for output in code(notebook, 2)["outputs"] if "image/png" in output.get("data", {})
            )
            picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")).copy()
            picture[:pixels, 0] = 255 - picture[:pixels, 0]
            stream = io.BytesIO()
            Image.fromarray(picture).save(stream, "png")
            data["image/png"] = base64.b64encode(stream.getvalue()).decode()

        edit(twin_of(book), change)
        return twin_of(book).read_bytes()

    sound = twin_of(book).read_bytes()
    almost = repaint(pixels=20)
    assert notebooks(book, "execute").stdout.rstrip().endswith("reproduced")
    assert twin_of(book).read_bytes() == almost
    repaint(pixels=200)
    assert "CHANGED: cell 2" in notebooks(book, "execute").stdout
    assert twin_of(book).read_bytes() == sound


def test_execute_tells_new_code_from_changed_numbers(book):
    (book / "book" / "accounting.md").write_text(NOTEBOOK.replace("print(6 * 7)", "n = 11\nprint(6 * 7)"))
    done = notebooks(book, "execute")
    assert done.stdout.rstrip().endswith("2 code cells, reproduced, new code: cell 1")
    edit(twin_of(book), lambda notebook: code(notebook, 1)["outputs"][0].update(text=["43\n"]))
    assert "CHANGED: cell 1" in notebooks(book, "execute").stdout


def test_an_error_fails_and_leaves_the_notebook_alone(book):
    before = twin_of(book).read_bytes()
    (book / "book" / "accounting.md").write_text(NOTEBOOK.replace("6 * 7", "6 / 0"))
    done = notebooks(book, "execute")
    assert done.returncode == 1 and "accounting: FAILED" in done.stdout and "ZeroDivisionError" in done.stdout
    assert twin_of(book).read_bytes() == before


def test_another_preset_leaves_the_committed_notebook_alone(book):
    before = twin_of(book).read_bytes()
    said = "__import__('os').environ['DPCOMPANION_PRESET']"
    (book / "book" / "accounting.md").write_text(NOTEBOOK.replace("6 * 7", said))
    assert notebooks(book, "execute", DPCOMPANION_PRESET="paper").returncode == 0
    assert '"paper\\n"' in (book / "_build" / "paper" / "accounting.ipynb").read_text()
    assert twin_of(book).read_bytes() == before
