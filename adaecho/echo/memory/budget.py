"""Whether a buffer fits into memory, asked before anything is read into it."""

import os
from pathlib import Path

_SLOT_BYTES = 12  # a buffer's own of each item: identity and row


def check_memory(needed_bytes: int, key: str = "shuffle_buffer") -> None:
    """Refuse a buffer that can't fit.

    Args:
        needed_bytes: of the buffer.
        key: the argument that sets its size.

    Raises:
        ValueError: more bytes than there are free.
    """
    free = free_bytes()
    if free is not None and needed_bytes > free:
        needed_gib, free_gib = needed_bytes / 2**30, free / 2**30
        raise ValueError(
            f"{key}: needs {needed_gib:,.1f} GiB, but only {free_gib:,.1f} GiB are free; reduce {key}, or "
            "the size of the examples"
        )


def check_slots(items: int, example_bytes: int, key: str) -> None:
    """Refuse a buffer of so many items, of known bytes each or 0, before anything is allocated."""
    check_memory(items * (_SLOT_BYTES + example_bytes), key)


def free_bytes(root: Path = Path("/")) -> int | None:
    """What the machine, and the control groups this process is in, have free; None where neither tells.

    Args:
        root: of the file system that tells.
    """
    known = [free for free in (_machine(root), *_groups(root)) if free is not None]
    return min(known) if known else None


def _machine(root: Path) -> int | None:
    try:
        told = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _groups(root: Path) -> list[int | None]:
    """Free bytes of this process's control groups (version 2): containers and batch systems set limits."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")]
    top = root / "sys/fs/cgroup"
    return [_group(top / group) for path in paths for group in (path, *path.parents)]


def _group(folder: Path) -> int | None:
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        stat = (folder / "memory.stat").read_text().split()
    except OSError:
        return None
    if limit.strip() == "max":
        return None
    # Pages of files that have not been touched lately are given back on demand.
    reclaimable = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return max(int(limit) - int(used) + reclaimable, 0)
