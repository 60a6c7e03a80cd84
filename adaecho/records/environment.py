"""The environment of a run: code, versions, machine and Slurm job."""

import functools
import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

# Packages that can change a result or a time.
_PACKAGES = (
    "adaecho", "torch", "torchvision", "tokenizers", "numpy", "opencv-python-headless", "hydra-core",
    "optuna", "scipy",
)  # fmt: skip
_SLURM = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "PROCID", "NODELIST", "CLUSTER_NAME")


def environment() -> dict[str, Any]:
    """The content of ``environment.json``.

    Returns:
        ``git`` {sha, dirty} of the checkout of this package, null if it is installed; versions of ``python``
        and ``packages``; ``host``, ``platform``, ``processor``, ``cpu_cores`` that this process may use,
        ``gpus`` by name; ``slurm`` {variable: value}, empty outside of a job.
    """
    slurm = {name.lower(): os.environ[f"SLURM_{name}"] for name in _SLURM if f"SLURM_{name}" in os.environ}
    return {**_fixed(), "slurm": slurm}


@functools.cache
def _fixed() -> dict[str, Any]:
    packages = dict[str, str]()
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "git": _git(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "packages": packages,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
    }


def _git(root: Path) -> dict[str, Any] | None:
    """The commit and whether tracked files differ from it; None without a checkout or git."""
    if not (root / ".git").exists():
        return None
    # Without optional locks, git status cannot disturb a commit in progress.
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        sha, status = (
            subprocess.run([*git, *command], check=True, capture_output=True, text=True, timeout=10).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"sha": sha.strip(), "dirty": bool(status.strip())}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[str]:
    """Names of the GPUs; empty if torch is not imported, since importing it takes seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
