"""nbval on the book: the environment of the kernels, and what nbval does not compare.

    pytest --nbval --nbval-current-env --nbval-sanitize-with=nbval.cfg book/accounting.ipynb

executes a committed notebook again and compares every output (`make notebooks` does all of them).
nbval alone accepts a notebook that was never executed, ignores pictures, lets a cell opt out, and
gives each kernel the environment of the caller. Here, a cell without an execution count fails;
pictures may differ as tools/outputs.py says; a cell's `tolerance` holds for its numbers; no cell
opts out. The pages of one paper run one after the other in one worker of pytest-xdist, and share a
fresh folder of live records.
"""

import contextlib
import functools
import os
import sys
import tempfile
import uuid
from pathlib import Path

import jupyter_client.manager
import nbval.kernel
import pytest
from nbval.plugin import IPyNbCell
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import kernels
import notebooks
import outputs

SECONDS_FOR_OUTPUT = 300  # from the end of a cell to its last output, on a machine under load
MANY = 3  # notebooks of one call, above which their imports are done once
opened = contextlib.ExitStack()


def kernel_manager(**options):
    """A kernel behind socket files, readable by their owner alone, rather than ports that others
    could listen to.
    """
    file = f"{folder_of('kernels')}/{uuid.uuid4().hex[:8]}.json"
    return jupyter_client.manager.KernelManager(transport="ipc", connection_file=file, **options)


nbval.kernel.KernelManager = kernel_manager


def pytest_configure(config):
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_make_scheduler(config, log):
    if config.option.nbval:
        return ByPaper(config, log)


class ByPaper(LoadScopeScheduling):
    """The cells of all pages of a paper go to one worker, in the order of collection."""

    def _split_scope(self, nodeid):
        return str(notebooks.paper_of(self.config.rootpath / nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    cells = {}
    for item in items:
        if isinstance(item, IPyNbCell):
            cells.setdefault(item.path, []).append(item)
            item.output_timeout = SECONDS_FOR_OUTPUT
            item.parent.skip_compare = {*item.parent.skip_compare, outputs.DRAWING}
            item.options.update(check=True, skip=False, check_exception=False)
            item.compare_outputs = functools.partial(compare, item, item.compare_outputs)
    if len(cells) > MANY:
        kernels.fork()
    # What takes longest comes first: what runs experiments, and of these the papers with the
    # largest pages.
    papers = notebooks.papers(cells)
    papers.sort(
        key=lambda pages: (
            not any(map(runs_experiments, pages)),
            -sum(page.stat().st_size for page in pages),
        )
    )
    items[:] = [item for item in items if item.path not in cells] + [
        item for pages in papers for page in pages for item in cells[page]
    ]


def runs_experiments(page):
    return "dpcompanion.reproduction.chapters" in page.read_text(encoding="utf-8")


@functools.cache
def folder_of(paper):
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    (folder / "live").mkdir()
    return folder


@pytest.hookimpl(tryfirst=True)  # before nbval starts the kernel of the first cell
def pytest_runtest_setup(item):
    if isinstance(item, IPyNbCell):
        os.environ.update(
            notebooks.kernel_environment("quick", folder_of(notebooks.paper_of(item.path)))
        )
        if item.cell.execution_count is None:
            pytest.fail(f"{item.path.name}, cell {item.cell_num}: was not executed", pytrace=False)


def pytest_unconfigure():
    opened.close()


def compare(cell, by_nbval, fresh, committed):
    """Whether the outputs of a cell are the committed ones, by nbval and then for the pictures,
    which it ignores.
    """
    if tolerance := float(cell.cell.metadata.get("tolerance", 0)):
        fresh = outputs.within(fresh, committed, tolerance)
    if not by_nbval(fresh, committed):
        return False
    if not outputs.same_pictures(fresh, committed, tolerance):
        cell.comparison_traceback = ["the picture is another one than the committed one"]
        return False
    return True
