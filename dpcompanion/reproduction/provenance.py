"""What a run is made with: versions of libraries and of the draws of a seed, the commit of the
code, the device.
"""

import importlib.metadata
import pathlib
import platform
import subprocess
from typing import TypedDict

import torch

from dpcompanion import seeds

LIBRARIES = (
    "dpcompanion",
    "torch",
    "numpy",
    "scipy",
    "torchvision",
    "opacus",
    "dp-accounting",
    "scikit-learn",
    "mlxtend",
)


class Software(TypedDict):
    """What `software` gives."""

    versions: dict[str, str]
    commit: str | None


def software() -> Software:
    """What a run is made with: {"versions": `versions()`, "commit": `commit()`}."""
    return {"versions": versions(), "commit": commit()}


def versions() -> dict[str, str]:
    """The versions of Python, of installed libraries, and of what a seed draws (`seeds.DRAWS`)."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            pass
    # An uninstalled checkout has no metadata of its own.
    import dpcompanion

    return {**found, "dpcompanion": dpcompanion.__version__, "draws": str(seeds.DRAWS)}


def repository() -> pathlib.Path | None:
    """The checkout that this package lies in, or None when it is installed without one."""
    root = pathlib.Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def commit() -> str | None:
    """The git commit, with "+changes" if tracked files differ; None outside a checkout."""
    root = repository()
    if root is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *arguments),
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "dpcompanion")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: str | torch.device) -> str:
    """What a device is: "cpu (x86_64)", or the name of the GPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.machine()})"
