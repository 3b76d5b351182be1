# Two commands: `make book` computes and shows the book, `make test` proves it.
# Where PyPI's torch is too large (CUDA), install the CPU build instead:
#   make book TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
PY := .venv/bin/python
INSTALLED := .venv/.installed
NBVAL = DPCOMPANION_PRESET=quick $(PY) -m pytest -n 2 --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout 900 \
  --nbval-sanitize-with tools/nbval_sanitize.cfg $$(find book -name '*.ipynb' -not -path '*/.*')
JUPYTER_BOOK := .venv/bin/jupyter-book build . -q

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

.PHONY: help book site test bench soundness clean
.DEFAULT_GOAL := help

help:
	@echo "make book    install, compute every chapter here and now, render the book"
	@echo "make site    render the book from the committed outputs"
	@echo "make test    prove it: tests, notebooks, pages"
	@echo "make bench   time the library beside its peers"
	@echo "make soundness  try the library against oracles, for hours"
	@echo "make clean   remove what was rendered (and, with ENV=1, .venv)"

$(INSTALLED): constraints.txt pyproject.toml
	@command -v git >/dev/null || { echo "git is missing: please install it first"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: please install Python 3.11, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1): say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "the module venv of $(PYTHON) is missing (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "installing into .venv (a minute or more)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
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

test: $(INSTALLED)
	@echo "== unit tests and doctests"
	@$(PY) -m pytest -n 2 --dist loadgroup
	@echo "== notebooks and their sources"
	@$(PY) tools/notebooks.py check
	@echo "== notebooks executed again, outputs compared"
	@$(NBVAL) || { echo "== once more, what failed: two kernels that start at once can take the same port"; $(NBVAL) --last-failed; }
	@echo "== pages"
	@$(MAKE) --no-print-directory site
	@$(PY) tools/browser_check.py

bench: $(INSTALLED)
	@$(PY) -m benchmarks

soundness: $(INSTALLED)
	@$(PY) -m tests.soundness

clean:
	rm -rf _build .pytest_cache $(if $(ENV),.venv)
