"""Write a benchmark's results to a JSON file, with the machine, date, commit and command."""

import argparse
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
# The load average over the last five minutes, read before the benchmark adds to it. It shows whether other
# work ran on the machine.
_LOAD = os.getloadavg()[1] if hasattr(os, "getloadavg") else None


def _without_folders(argument: str) -> str:
    """Replace the folders of an absolute path by ``path/to``, because they differ between machines."""
    return f"path/to/{Path(argument).name}" if Path(argument).is_absolute() else argument


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
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
    """Return the commit, and whether the checkout has uncommitted changes; None if git fails."""
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
    """Return the name of the first GPU, or None if there is no GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


_GIT = _git()  # read it at import, because the checkout may change during a long benchmark


def options(doc: str | None, *, rounds: int, seconds: float | None = None) -> argparse.ArgumentParser:
    """Return a benchmark's argument parser. If ``seconds`` is None, it has no option ``--seconds``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each side (%(default)s)")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="duration of a turn (%(default)s)")
    return parser


def write(
    name: str,
    rows: list[dict[str, Any]],
    *,
    packages: tuple[str, ...] = ("torch", "numpy"),
    path: Path | None = None,
    gpu: str | None = None,
    **more: Any,
) -> None:
    """Print the results of a benchmark, one dict per measurement, and write them to a JSON file.

    The file is ``benchmarks/<name>.json`` by default, and ``benchmarks/gpu/<name>.json`` if you give the name
    of a GPU.
    """
    for table in (rows, *(value for value in more.values() if isinstance(value, list))):
        show(table)
    path = path or FOLDER / ("gpu" if gpu else "") / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    more = {"gpu": gpu, **more} if gpu else more
    module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    record = {
        "command": " ".join(["python", "-m", module, *map(_without_folders, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "git": _GIT,
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "load_before": _LOAD,
        "versions": _versions(packages),
        **more,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


def show(rows: list[dict[str, Any]]) -> None:
    """Print dicts with the same keys as a table, with four significant digits of each float."""
    keys = list(rows[0])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    for line in [keys, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
