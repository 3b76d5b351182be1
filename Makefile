# Two commands: `make book` computes and shows the book, `make test` proves it, in ten to twenty minutes; `make prove` does the rest.
# Where PyPI's torch is too large (CUDA), install the CPU build instead:
#   make book TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
PY := .venv/bin/python
INSTALLED := .venv/.installed
LOWEST := .venv-lowest/bin/python
CORE_TESTS := tests/accounting tests/engine tests/filters tests/gradients tests/mechanism tests/per_instance tests/training tests/test_individual.py
# Of the committed notebooks: all, or PAGES; as it is, or UNDER another arithmetic.
PAGES ?= $$(find book -name '*.ipynb' -not -path '*/.*')
NBVAL := $(PY) -m pytest -n 2 --no-loadscope-reorder -p no:cacheprovider --color=no --nbval --nbval-current-env \
  --nbval-sanitize-with=nbval.cfg $(PAGES)
JUPYTER_BOOK := .venv/bin/jupyter-book build . -q

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# Neither settings nor a folder of the user's home plays a part in what is drawn.
export MPLCONFIGDIR := $(CURDIR)/.venv/.matplotlib

.PHONY: help book site pdf test prove notebooks gpu cluster portable bench soundness lint types lowest wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make book      install, compute every chapter here and now, render the book"
	@echo "make site      render the book from the committed outputs"
	@echo "make pdf       the same as one PDF, by a Chromium, and checked"
	@echo "make test      prove it, in ten to twenty minutes: tests, notebooks executed again (nbval), pages without a warning"
	@echo "make prove     the rest, half an hour more: slow tests, faults, another arithmetic, pages in a browser"
	@echo "make notebooks the part of make test that executes the notebooks again (PAGES=book/accounting.ipynb: this one)"
	@echo "make portable  the same under the arithmetics of other processors: does a number move?"
	@echo "make bench     time the library beside its peers"
	@echo "make gpu       what waits for a GPU: its tests, benchmarks, then the records (MINUTES=9 stops in time, and goes on)"
	@echo "make cluster   the pieces of a run on local clusters of Dask and Ray, with workers that are killed"
	@echo "make soundness try the library against oracles on thousands of random cases, for about an hour"
	@echo "make lint      the part of make test that takes a second"
	@echo "make types     the part of make test that takes half a minute: the types, by basedpyright"
	@echo "make lowest    the library's tests on the lowest versions that pyproject.toml claims"
	@echo "make wheel     a wheel in dist (TAG=v0.1.0 holds it to a version)"
	@echo "make clean     remove what was rendered (and, with ENV=1, .venv)"

$(INSTALLED): constraints.txt pyproject.toml
	@command -v git >/dev/null || { echo "git is missing: please install it first"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: please install Python 3.11, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1): say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "the module venv of $(PYTHON) is missing (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "installing into .venv (a minute or more)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) torchvision) torch
	@$(PY) -m pip install -q -c constraints.txt -e ".[test]"
	@$(PY) -c 'import matplotlib.font_manager'  # else the first figure warns that it builds a font cache
	@touch $@

book: $(INSTALLED)
	@$(PY) tools/notebooks.py execute
	@rm -rf _build/html _build/.doctrees
	@$(JUPYTER_BOOK) >/dev/null
	@echo "the book: file://$(CURDIR)/_build/html/index.html"

site: $(INSTALLED)
	@rm -rf _build/html _build/.doctrees
	@$(JUPYTER_BOOK) -W -n --keep-going >/dev/null
	@echo "the book, from the committed outputs: file://$(CURDIR)/_build/html/index.html"

pdf: site
	@$(PY) tools/pdf.py

test: $(INSTALLED)
	@$(PY) tools/prove.py test

prove: $(INSTALLED)
	@$(PY) tools/prove.py prove

notebooks: $(INSTALLED)
	@$(if $(UNDER),$(PY) tools/arithmetic.py $(UNDER)) $(NBVAL)

portable: $(INSTALLED)
	@for under in compatible avx2 sse two-threads jitter; do \
	  $(PY) tools/arithmetic.py $$under $(NBVAL) || moved=1; done; exit $${moved:-0}

bench: $(INSTALLED)
	@$(PY) -m benchmarks

gpu: $(INSTALLED)
	@$(PY) tools/gpu.py $(if $(MINUTES),--minutes $(MINUTES))

cluster: $(INSTALLED)
	@$(PY) -m pip install -q -c constraints.txt -e ".[cluster]"
	@$(PY) -m pytest -p no:cacheprovider tests/reproduction/test_workers.py

soundness: $(INSTALLED)
	@$(PY) -m tests.soundness

lint: $(INSTALLED)
	@$(PY) -m ruff check --quiet
	@$(PY) -m ruff format --check --quiet

types: $(INSTALLED)
	@$(PY) -m basedpyright

lowest:
	@test -x $(LOWEST) || $(PYTHON) -m venv .venv-lowest
	@$(LOWEST) -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$($(LOWEST) tools/lowest.py | grep ^torch)
	@$(LOWEST) -m pip install -q $$($(LOWEST) tools/lowest.py opacus) pytest pytest-xdist hypothesis mpmath dp-accounting tqdm
	@$(LOWEST) -m pytest -n 2 -p no:cacheprovider $(CORE_TESTS)

wheel:
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' dpcompanion/__init__.py); \
	  case "$(TAG)" in ""|"v$$version") ;; *) echo "the tag $(TAG) is not v$$version, the version of the package"; exit 1;; esac
	@rm -rf build dist
	@$(PYTHON) -m pip wheel -q . --no-deps -w dist
	@ls dist/*.whl

clean:
	rm -rf _build build dist .pytest_cache .ruff_cache $(if $(ENV),.venv .venv-lowest)
