"""Other processors, imitated: settings under which the same code rounds differently.

    python tools/arithmetic.py                            what each of them changes on this machine
    python tools/arithmetic.py sse+jitter COMMAND ...     run a command under two of them at once

MKL, oneDNN and PyTorch choose their kernels by the processor's vector units, and each kernel adds
in an order of its own. The settings below forbid the newest units or split the work in two; the
jitter moves every fresh weight in its last places (`dpcompanion.seeds.jittered`) and stands for
processors whose kernels are not at hand. A setting may change nothing on some machine, and then
proves nothing there: that is why this is measured and printed.
"""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

ARITHMETICS = {
    "as it is": {},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
    "avx2": {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "two-threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "jitter": {"DPCOMPANION_JITTER": "1e-12"},
}


def environment(name):
    """All variables under an arithmetic, or several joined by "+"; the others' are taken away."""
    if unknown := set(name.split("+")) - set(ARITHMETICS):
        raise ValueError(
            f"name must be of {', '.join(ARITHMETICS)}, got {', '.join(sorted(unknown))}"
        )
    others = {key for each in ARITHMETICS.values() for key in each}
    found = {key: value for key, value in os.environ.items() if key not in others} | {
        "OMP_NUM_THREADS": "1"
    }
    for part in name.split("+"):
        found |= ARITHMETICS[part]
    return found


def processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def probe():
    """{operation: the hash of its result}, here and now."""
    import torch

    from dpcompanion.training import models

    found = {}
    for bits, dtype in ((32, torch.float32), (64, torch.float64)):
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(2, 300, 784, generator=generator, dtype=dtype)
        network = models.mnist_cnn(seed=0).to(dtype)
        fresh = network[0].weight.detach().clone()
        images = network[:2](torch.randn(64, 1, 28, 28, generator=generator, dtype=dtype))
        network[2:](images).log_softmax(1)[:, 0].sum().backward()
        found |= {
            f"products ({bits})": a @ b.T,
            f"sums ({bits})": a.sum(),
            f"exponentials ({bits})": a.exp(),
            f"softmax ({bits})": a.log_softmax(1),
            f"convolutions ({bits})": images.detach(),
            f"fresh weights ({bits})": fresh,
            f"gradients ({bits})": network[0].weight.grad,
        }
    return {
        name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in found.items()
    }


def effects(names):
    """One line for each arithmetic: what it changes on this machine."""
    command = [sys.executable, __file__, "probe"]
    found = {}
    for name in ("as it is", *names):
        done = subprocess.run(
            command, env=environment(name), capture_output=True, text=True, check=True
        )
        found[name] = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    lines = []
    for name in names:
        changed = [what for what, value in found[name].items() if value != found["as it is"][what]]
        says = (
            f"changes bits of {', '.join(changed)}"
            if changed
            else "changes NO bit of the probe on this machine"
        )
        lines.append(f"{name}: {says}")
    return lines


def main(arguments):
    if arguments == ["probe"]:
        print("\n".join(f"{key} {value}" for key, value in probe().items()))
        return 0
    name, *command = arguments or [""]
    print("\n".join([processor(), *effects([name] if name else list(ARITHMETICS)[1:])]), flush=True)
    return subprocess.run(command, env=environment(name)).returncode if command else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
