"""Describe the environment of a run: its code, package versions, machine and Slurm job."""

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

# Packages whose version can change results or run times.
_PACKAGES = (
    "adaecho", "torch", "torchvision", "tokenizers", "numpy", "opencv-python-headless", "hydra-core",
    "optuna", "scipy",
)  # fmt: skip
_SLURM = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "PROCID", "NODELIST", "CLUSTER_NAME")


def environment() -> dict[str, Any]:
    """Return the content of ``environment.json``: versions of packages, and facts about the machine.

    Some of the keys are:

    * ``git``: the commit of this package's checkout as {sha, dirty}; null if there is no checkout.
    * ``cpu_cores``: the number of cores that this process may use.
    * ``slurm``: Slurm's variables; empty outside a Slurm job.
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
    """Return a checkout's commit and whether tracked files differ from it, or None without git."""
    if not (root / ".git").exists():
        return None
    # With this option, git status takes no lock, so it cannot disturb a commit that is in progress.
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
    """Return the names of the GPUs; empty if torch has not been imported yet."""
    # Importing torch only for this would take seconds.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
