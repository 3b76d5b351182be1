"""Kernels that are forked from one process (tools/kernels.py), as nbval starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
# Two kernels, one after the other: what each sees, and whether it has ended.
PROGRAM = """
import os
import sys

sys.path.insert(0, {tools!r})
import kernels
from jupyter_client.manager import KernelManager


def says(client, code):
    shown = []
    client.execute_interactive(code, output_hook=lambda m: shown.append(m["content"].get("text")))
    return "".join(filter(None, shown)).split()


if __name__ == "__main__":
    kernels.IMPORTED = ("ipykernel.kernelapp", "imaplib")
    kernels.fork()
    for number in (1, 2):
        manager = KernelManager(transport="ipc", connection_file={folder!r} + "/" + str(number))
        manager.start_kernel(env={{**os.environ, "NUMBER": str(number)}}, cwd={folder!r})
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        says(client, "import os, sys; fresh = 'seen' not in globals(); seen = 1")
        print(*says(client, "print(fresh, os.environ['NUMBER'], 'imaplib' in sys.modules)"))
        print(*says(client, "print(os.getcwd(), os.getpid() == os.getpgid(0) != os.getppid())"))
        manager.shutdown_kernel(now=number == 1)
        print(manager.is_alive())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
def test_forked_kernels_are_processes_of_their_own_with_what_was_imported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tools=str(TOOLS), folder=str(tmp_path)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    each = [f"True {number} True\n{tmp_path} True\nFalse\n" for number in (1, 2)]
    assert done.stdout == "".join(each)
