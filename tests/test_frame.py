"""The files around the library and the book agree with each other."""

import ast
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dpcompanion

ROOT = Path(__file__).resolve().parent.parent


def lines_of(name):
    return [
        line.strip() for line in (ROOT / name).read_text().splitlines() if line.strip() and not line.startswith("#")
    ]


def test_conda_installs_by_the_pins_of_constraints():
    *conda, by_pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert by_pip["pip"] == ["-c constraints.txt", "-e .[test,bench]"]


def test_everything_that_the_package_asks_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    names = {re.match(r"[\w-]+", wanted).group().lower() for wanted in asked} - {"dpcompanion"}
    pinned = {line.split("==")[0].lower() for line in lines_of("constraints.txt")}
    assert names <= pinned


def test_every_notebook_is_executed_from_the_source_beside_it():
    check = [sys.executable, str(ROOT / "tools" / "notebooks.py"), "check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def chapters(entry):
    for key in ("root", "file"):
        if key in entry:
            yield entry[key]
    for key in ("parts", "chapters", "sections"):
        for below in entry.get(key, []):
            yield from chapters(below)


def test_every_page_of_the_book_is_in_its_table_of_contents():
    listed = list(chapters(yaml.safe_load((ROOT / "_toc.yml").read_text())))
    there = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in (ROOT / "book").rglob("*.md")
        if "_static" not in path.parts and not any(part.startswith(".") for part in path.parts)
    }
    assert len(listed) == len(set(listed)) and set(listed) == there


def test_a_notebook_is_shown_and_its_source_is_not():
    excluded = yaml.safe_load((ROOT / "_config.yml").read_text())["exclude_patterns"]
    for notebook in (ROOT / "book").rglob("*.ipynb"):
        source = notebook.relative_to(ROOT).with_suffix(".md")
        assert any(source.match(pattern) for pattern in excluded), f"_config.yml: exclude_patterns lacks {source}"


def test_what_is_vendored_is_what_the_packages_of_npm_have():
    """mathjax 3.2.2, @ibm/plex-sans 1.1.0, @ibm/plex-mono 2.5.0 @expo-google-fonts/ibm-plex-sans 0.4.1."""
    lines = (ROOT / "tests" / "vendored.sha256").read_text().splitlines()
    vendored = {ROOT / file: digest for digest, file in map(str.split, lines)}
    for kind in ("*.woff2", "*.ttf", "tex-svg.js"):
        assert {file for folder in ("book", "dpcompanion") for file in (ROOT / folder).rglob(kind)} <= vendored.keys()
    for file, digest in vendored.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest, file
        assert list(file.parent.glob("LICENSE*")), f"{file} lacks its licence"


def test_the_style_sheet_names_the_fonts_that_are_there():
    style = (ROOT / "book" / "_static" / "custom.css").read_text(encoding="utf-8")
    there = {f"fonts/{file.name}" for file in (ROOT / "book" / "_static" / "fonts").glob("*.woff2")}
    assert set(re.findall(r'url\("(.*?)"\)', style)) == there


def test_the_readme_computes_what_it_says():
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [float(comment) for comment in re.findall(r"# (\d\.\d+)", snippet)]
    printed = [float(line) for line in done.stdout.split()]
    assert [round(value, 4) for value in printed[: len(said)]] == said
    assert 0 < printed[-1] < 3.42529


def test_the_readme_names_files_that_exist():
    named = re.findall(
        r"`((?:book|tools)/[\w./-]+|[A-Z]\w+\.cff|[a-z]+\.(?:yml|txt))`", (ROOT / "README.md").read_text()
    )
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dpcompanion.__version__ and citation["license"] == "Apache-2.0"


def test_package_and_repository_name_the_same_authors_and_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [author["name"] for author in project["authors"]] == [author["name"] for author in citation["authors"]]
    # Until the book's settings give an address there is none to name, and README's picture lies beside it.
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["public_repository"]
    urls = {*project.get("urls", {}).values(), *filter(None, [citation.get("repository-code")])}
    if not address:
        assert not urls
    else:
        assert urls and all(url.startswith(address) for url in urls)
        assert not re.findall(r"\]\((?!https:)[^)]*\)", (ROOT / "README.md").read_text()), "relative, so lost on PyPI"


def make(folder, *arguments, **environment):
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        ["make", *arguments], capture_output=True, text=True, cwd=folder, env={**os.environ, **environment}
    )


def test_make_alone_tells_the_targets(tmp_path):
    said = make(tmp_path).stdout
    assert all(f"make {target}" in said for target in ("book", "site", "test", "bench", "clean"))


def test_make_says_plainly_what_python_is_needed(tmp_path):
    for script, complaint in (
        ("exit 127", "is missing: please install Python 3.11"),
        ('case "$1" in -V) echo Python 3.9.2;; *) exit 1;; esac', "Python 3.11 or newer is needed"),
        ('case "$2" in *venv*) exit 1;; esac', "venv"),
    ):
        python = tmp_path / "python"
        python.unlink(missing_ok=True)
        if "127" not in script:
            python.write_text(f"#!/bin/sh\n{script}\n")
            python.chmod(0o755)
        done = make(tmp_path, "book", f"PYTHON={python}")
        assert done.returncode != 0 and complaint in done.stdout, done.stdout + done.stderr
        assert not (tmp_path / ".venv").exists()


def test_the_ci_script_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_the_repository_has(workflow):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ran
    for command in ran:
        program, target, *_ = [*command.split(), ""]
        assert program in (".ci/run", "gh") or program == "make" and target in targets, command


def test_the_pythons_that_are_claimed_are_those_that_are_tried():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [words.split()[-1] for words in classifiers if re.search(r":: 3\.\d+$", words)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert claimed == jobs["test"]["strategy"]["matrix"]["python"] and jobs["lowest"]


def test_the_tests_on_the_lowest_versions_import_no_more_than_is_installed_for_them():
    makefile = (ROOT / "Makefile").read_text()
    paths = [ROOT / path for path in re.search(r"^CORE_TESTS := (.*)", makefile, re.MULTILINE)[1].split()]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    (beside,) = re.findall(r"tools/lowest\.py opacus\) (.*)", makefile)  # pytest and what tests compare with
    installed = {"dpcompanion", "torch", "numpy", "scipy", "cryptography", "opacus", *beside.replace("-", "_").split()}
    installed |= {*sys.stdlib_module_names, *(file.stem for file in files)}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= installed, f"{file} imports {names}"
            assert not any(name.startswith("dpcompanion.reproduction") for name in names), f"{file} imports {names}"


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one(form):
    fields = yaml.safe_load(form.read_text())
    assert fields["name"] and fields["description"] and fields["body"]
    kinds = {"input", "textarea", "checkboxes"}
    assert all(field["type"] in kinds and field["attributes"]["label"] and field["id"] for field in fields["body"])
    assert len({field["id"] for field in fields["body"]}) == len(fields["body"])


@pytest.mark.parametrize("tag, passes", [(f"v{dpcompanion.__version__}", True), ("v9.9.9", False)])
def test_a_wheel_is_made_for_its_own_tag_only(tmp_path, tag, passes):
    (tmp_path / "dpcompanion").mkdir()
    shutil.copy(ROOT / "dpcompanion" / "__init__.py", tmp_path / "dpcompanion")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nmkdir dist && touch dist/made.whl\n")
    python.chmod(0o755)
    done = make(tmp_path, "wheel", f"TAG={tag}", f"PYTHON={python}")
    assert (done.returncode == 0) is passes and (tmp_path / "dist" / "made.whl").exists() is passes


def test_docstrings_write_formulas_in_one_way():
    for file in (ROOT / "dpcompanion").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                assert "$" not in (ast.get_docstring(node) or ""), f"{file}: a formula that is no :math:"


@pytest.mark.parametrize(
    "file", ["book/_ext/digests.py", "book/_ext/docstrings.py", "tools/lowest.py", "tools/outputs.py", "tools/pdf.py"]
)
def test_the_examples_of_the_tools_hold(file):
    assert subprocess.run([sys.executable, "-m", "doctest", str(ROOT / file)]).returncode == 0


@pytest.fixture
def prove(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("prove")


@pytest.mark.parametrize(
    "broken", [None, "lint", "types", "unit tests and doctests", "notebooks executed again, outputs compared"]
)
def test_the_end_of_the_tests_says_what_was_proved_and_is_red_if_anything_is(prove, monkeypatch, capsys, broken):
    tried = []

    def step(title, *command):
        tried.append(title)
        return title != broken, ["pages NOT checked in a browser: none" if "browser" in title else f"{title}: all"]

    monkeypatch.setattr(prove, "step", step)
    assert prove.main() == (broken is not None) and len(tried) == 7
    said = capsys.readouterr().out
    assert said.count("proved: ") == (6 if broken is None else 5) and said.count("FAILED: ") == (broken is not None)
    assert ("FAILED" if broken == "types" else "proved") + ": its types, by basedpyright: types: all" in said
    assert "not tried: pages NOT checked in a browser: none" in said


def test_the_summary_of_the_tests_counts_them_and_names_what_was_skipped(prove, tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('no browser')\ndef test_three(): assert 0\n"
    )
    report = tmp_path / "tests.xml"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        capture_output=True,
    )
    assert prove.counts(report) == (1, {"no browser": 1}) and prove.counts(tmp_path / "none.xml") == (0, {})


def test_buttons_for_binder_and_colab_are_off_until_an_address_is_set():
    launch = ROOT / "book" / "_ext" / "launch.py"
    assert subprocess.run([sys.executable, "-m", "doctest", str(launch)]).returncode == 0
    assert yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["public_repository"] == ""


def test_a_lighter_picture_looks_the_same():
    light = ROOT / "book" / "_ext" / "light.py"
    assert subprocess.run([sys.executable, "-m", "doctest", str(light)]).returncode == 0
