"""What every benchmark leaves: a JSON record of what was measured, on what, when, by which command."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# Over five minutes, before the benchmark itself adds to it: what else the machine was doing.
_LOAD = os.getloadavg()[1] if hasattr(os, "getloadavg") else None


def _without_folders(argument: str) -> str:
    """A record is read elsewhere: of an absolute path only the end says something."""
    return f"path/to/{Path(argument).name}" if Path(argument).is_absolute() else argument


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _git() -> dict[str, Any] | None:
    """Commit, and whether tracked files other than records differ from it; None without a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(FOLDER.parent)]
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/*.json"]
    try:
        sha, changed = (
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            for command in ([*git, "rev-parse", "--short", "HEAD"], status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"sha": sha, "dirty": bool(changed)}


def gpu() -> str | None:
    """Name of the GPU that torch finds."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


_GIT = _git()  # of what was imported: a long benchmark ends when the checkout may have moved on


def write(
    name: str,
    rows: list[dict[str, Any]],
    *,
    packages: tuple[str, ...] = ("torch", "numpy"),
    path: Path | None = None,
    gpu: str | None = None,
    **more: Any,
) -> Path:
    """Write ``benchmarks/<name>.json``, on a GPU ``benchmarks/gpu/<name>.json``, and return its path.

    Args:
        name: the benchmark's file name without ending.
        rows: the measurements; durations in seconds or as ratios, units in the keys.
        packages: distributions whose versions matter, peers included.
        path: where else the record goes, of a benchmark that an experiment's rule reads.
        gpu: what it was measured on, where that is one.
        more: to be told beside the rows.
    """
    path = path or FOLDER / ("gpu" if gpu else "") / f"{name}.json"
    path.parent.mkdir(exist_ok=True)  # of the first on a GPU
    more = {"gpu": gpu, **more} if gpu else more
    record = {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *map(_without_folders, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "git": _GIT,
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "load_before": _LOAD,
        "versions": _versions(packages),
        **more,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table in which numbers have four digits."""
    keys = list(rows[0])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    for line in [keys, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
