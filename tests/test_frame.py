"""The files around the library and the book agree with each other."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import prove
import pytest
import yaml

import dpcompanion

ROOT = Path(__file__).resolve().parent.parent


def lines_of(name):
    return [
        line.strip()
        for line in (ROOT / name).read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]


def test_conda_installs_by_the_pins_of_constraints():
    *conda, by_pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert by_pip["pip"] == ["-c constraints.txt", "-e .[test,bench]"]


def test_everything_that_the_package_asks_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        name for extra in project["optional-dependencies"].values() for name in extra
    ]
    names = {re.match(r"[\w-]+", wanted).group().lower() for wanted in asked} - {"dpcompanion"}
    pinned = {line.split("==")[0].lower() for line in lines_of("constraints.txt")}
    assert names <= pinned


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
        assert any(source.match(pattern) for pattern in excluded), (
            f"_config.yml: exclude_patterns lacks {source}"
        )


def test_what_is_vendored_is_what_the_packages_of_npm_have():
    """mathjax 3.2.2, @ibm/plex-sans 1.1.0, @ibm/plex-mono 2.5.0 @expo-google-fonts/ibm-plex-sans
    0.4.1.
    """
    lines = (ROOT / "tests" / "vendored.sha256").read_text().splitlines()
    vendored = {ROOT / file: digest for digest, file in map(str.split, lines)}
    for kind in ("*.woff2", "*.ttf", "tex-svg.js"):
        assert {
            file for folder in ("book", "dpcompanion") for file in (ROOT / folder).rglob(kind)
        } <= vendored.keys()
    for file, digest in vendored.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest, file
        assert list(file.parent.glob("LICENSE*")), f"{file} lacks its licence"


def test_the_style_sheet_names_the_fonts_that_are_there():
    style = (ROOT / "book" / "_static" / "custom.css").read_text(encoding="utf-8")
    there = {f"fonts/{file.name}" for file in (ROOT / "book" / "_static" / "fonts").glob("*.woff2")}
    assert set(re.findall(r'url\("(.*?)"\)', style)) == there


@pytest.mark.slow
def test_the_readme_computes_what_it_says():
    snippet, _ = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [float(comment) for comment in re.findall(r"# (\d\.\d+)", snippet)]
    printed = [float(line) for line in done.stdout.split()]
    assert [round(value, 4) for value in printed[: len(said)]] == said
    assert 0 < printed[-1] < 3.42529


@pytest.mark.slow
def test_the_jobs_of_the_readme_keep_their_promises(tmp_path):
    _, jobs = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", jobs], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, statement, tracked, kept, own = done.stdout.splitlines()
    assert round(float(first), 4) == 0.9172 and "Epsilon 3.000" in statement
    account, promised, point = (
        float(re.findall(r"\d\.\d+", line)[0]) for line in (tracked, kept, own)
    )
    assert 2 < account <= 3 and 1 < promised <= 2
    # An estimate from one run without a seed, after three others on one model: of a model that has
    # wandered off it is what a point at the clip norm costs by these orders, 4.097.
    assert 0 < point < 4.1
    card = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert card["promised_quantiles"]["1"] == 2 and card["steps"] == 20


def test_the_tour_does_the_jobs_of_the_readme_as_the_readme_does_them():
    def calls(code):
        made = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
        return {ast.unparse(node) for node in made if ast.unparse(node.func).startswith(NAMES)}

    NAMES = ("DPSGDPlan.", "ExactFilter.", "Track")
    _, jobs = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    tour = (ROOT / "book" / "tour.md").read_text(encoding="utf-8")
    shown = re.findall(r"```\{code-cell\} ipython3\n(?!:tags:)(.*?)```", tour, re.DOTALL)
    done = calls("".join(shown))
    assert len(shown) == 5 and len(done) == 4 and done <= calls(jobs)


def test_the_readme_names_files_that_exist():
    named = re.findall(
        r"`((?:book|tools)/[\w./-]+|[A-Z]\w+\.cff|[a-z]+\.(?:yml|txt))`",
        (ROOT / "README.md").read_text(),
    )
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dpcompanion.__version__ and citation["license"] == "Apache-2.0"
    (printed,) = re.findall(
        r"version = \{(.*)\}", (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    )
    assert printed == dpcompanion.__version__


def test_package_and_repository_name_the_same_authors_and_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [author["name"] for author in project["authors"]] == [
        author["name"] for author in citation["authors"]
    ]
    # Until the book's settings give an address there is none to name, and README's picture lies
    # beside it.
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"][
        "public_repository"
    ]
    urls = {*project.get("urls", {}).values(), *filter(None, [citation.get("repository-code")])}
    if not address:
        assert not urls
    else:
        assert urls and all(url.startswith(address) for url in urls)
        assert not re.findall(r"\]\((?!https:)[^)]*\)", (ROOT / "README.md").read_text()), (
            "relative, so lost on PyPI"
        )


def make(folder, *arguments, **environment):
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [shutil.which("make"), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
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
    done = make(tmp_path, "book", PATH=str(tmp_path))
    assert (
        done.returncode != 0
        and "git is missing" in done.stdout
        and not (tmp_path / ".venv").exists()
    )


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


def test_a_pull_request_is_tested_on_one_python_and_every_night_on_all():
    on_request, at_night = (
        yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
        for name in ("ci.yml", "nightly.yml")
    )
    assert (
        "pull_request" in on_request[True]
        and {"schedule", "workflow_dispatch"} <= at_night[True].keys()
    )
    assert [step["run"] for step in on_request["jobs"]["test"]["steps"] if "run" in step] == [
        "make test"
    ]
    jobs = at_night["jobs"]
    ran = {
        name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()
    }
    assert ran == {"all": [".ci/run"], "cluster": ["make cluster"], "lowest": ["make lowest"]}


def test_the_pythons_that_are_claimed_are_those_that_are_tried():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [words.split()[-1] for words in classifiers if re.search(r":: 3\.\d+$", words)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    assert claimed == jobs["all"]["strategy"]["matrix"]["python"]


def test_the_tests_on_the_lowest_versions_import_no_more_than_is_installed_for_them():
    makefile = (ROOT / "Makefile").read_text()
    paths = [
        ROOT / path for path in re.search(r"^CORE_TESTS := (.*)", makefile, re.MULTILINE)[1].split()
    ]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    # pytest and what tests compare with
    (beside,) = re.findall(r"tools/lowest\.py opacus\) (.*)", makefile)
    installed = {
        "dpcompanion",
        "torch",
        "numpy",
        "scipy",
        "cryptography",
        "opacus",
        *beside.replace("-", "_").split(),
    }
    installed |= {*sys.stdlib_module_names, *(file.stem for file in files)}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= installed, f"{file} imports {names}"
            assert not any(name.startswith("dpcompanion.reproduction") for name in names), (
                f"{file} imports {names}"
            )


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one(form):
    fields = yaml.safe_load(form.read_text())
    assert fields["name"] and fields["description"] and fields["body"]
    kinds = {"input", "textarea", "checkboxes"}
    assert all(
        field["type"] in kinds and field["attributes"]["label"] and field["id"]
        for field in fields["body"]
    )
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
                assert "$" not in (ast.get_docstring(node) or ""), (
                    f"{file}: a formula that is no :math:"
                )


def test_the_end_says_what_was_proved_and_is_red_if_anything_is(monkeypatch, capsys):
    steps = {
        "good": "print('SKIPPED [2] a.py:3: no node'); print('SKIPPED [1] b.py:4: no node'); "
        "print('7 passed')",
        "bad": "print('8 failed'); raise SystemExit(1)",
        "unseen": "print('pages NOT checked: no browser')",
    }
    commands = {title: [sys.executable, "-c", code] for title, code in steps.items()}
    beside = {"beside": [sys.executable, "-c", "print('9 passed')"]}
    monkeypatch.setattr(prove, "STEPS", {"test": (commands, beside), "prove": ({"long": []}, {})})
    assert prove.main("test") == 1
    end = capsys.readouterr().out.partition("== what was proved")[2].splitlines()
    end = [re.sub(r" \(\d+\.\d min\)", "", line) for line in end]
    assert (
        "proved: good: 7 passed" in end
        and "FAILED: bad: 8 failed" in end
        and not any("unseen" in x for x in end)
    )
    assert "proved: beside: 9 passed" in end
    assert "not tried: no node (3)" in end and any("no browser" in line for line in end)
    assert any("make prove" in line and "long" in line for line in end)
    del commands["bad"]
    assert prove.main("test") == 0
    beside["worse"] = [sys.executable, "-c", "raise SystemExit(1)"]
    assert prove.main("test") == 1


def test_the_steps_call_what_the_repository_has():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in [
        command for lanes in prove.STEPS.values() for steps in lanes for command in steps.values()
    ]:
        if command[0] == "make":
            assert [word for word in command[2:] if "=" not in word][0] in targets
        else:
            assert command[1] == "-m" or (ROOT / command[1]).exists()


def test_buttons_for_binder_and_colab_are_off_until_an_address_is_set():
    assert (
        yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["public_repository"]
        == ""
    )
