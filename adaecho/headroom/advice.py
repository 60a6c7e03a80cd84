"""Advice for a training loop that waits for data: first a cache, then more workers, then echoing."""

import math
import os
import shutil
import tempfile
from dataclasses import dataclass

MIN_RATIO = 1.05  # below this R, the loader is considered as fast as the step
_MIN_SPEEDUP = 1.1  # suggest twice as many workers only if the loop becomes faster by this factor
_MAX_WORKERS = 32


@dataclass(frozen=True)
class Loop:
    """Mean times of a training loop's steps, and properties of its loader.

    Attributes:
        wait_s: seconds that a step waits for its batch.
        step_s: seconds of a step without the wait.
        upstream_s: seconds that the loader needs to prepare a batch.
        workers: number of workers; 0 if the loop's own thread reads, None if unknown.
        epoch_bytes: bytes of all batches of an epoch; 0 if unknown.
    """

    wait_s: float
    step_s: float
    upstream_s: float
    workers: int | None
    epoch_bytes: int = 0
    factor: float = 1.0

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """R, the loading time divided by the time of a step (paper, section 2)."""
        return self.upstream_s / self.step_s


def advice(loop: Loop) -> list[str]:
    """Return numbered suggestions for a faster training loop, the best one first."""
    found = [_cache(loop) if loop.R >= MIN_RATIO else "", _workers(loop)]
    if loop.R >= MIN_RATIO:
        found.append(_echo(loop))
    return [f"{number}. {one}" for number, one in enumerate(filter(None, found), 1)]


def first_factor(ratio: float) -> int:
    """Return the echoing factor to start with: R rounded down to a whole number between 2 and 4."""
    return min(max(int(round(ratio, 1)), 2), 4)


def _cache(loop: Loop) -> str:
    """Suggest a cache if an epoch fits in half of the free memory or free disk space."""
    from adaecho.echo.memory.pool import free_bytes  # imported late, since few calls need it

    size = int(loop.epoch_bytes / loop.factor)
    on_disk = shutil.disk_usage(tempfile.gettempdir()).free
    places = {"in memory": free_bytes() or 0, "on a local disk": on_disk}
    for place, free in places.items():
        if 0 < size <= free // 2:
            return (
                f"cache the decoded examples {place}: an epoch of these batches takes "
                f"{_format_bytes(size)}, and {_format_bytes(free)} are free; echoing cannot beat a cache"
            )
    return ""


def _workers(loop: Loop) -> str:
    # This assumes that n workers prepare n batches in the time of one, while the loop runs its steps.
    now, best, found, count = loop.workers or 0, 1.0, [], 1
    while count <= _MAX_WORKERS:
        upstream_s = loop.upstream_s * max(now, 1) / count
        gain = (loop.wait_s + loop.step_s) / max(upstream_s, loop.step_s)
        if count > now and gain > best * _MIN_SPEEDUP:
            found.append(f"{gain:.2f} times as fast with {count}")
            best = gain
        count *= 2
    if not found:
        return ""
    has = f" (now {loop.workers}, on {_cores()} cores)" if loop.workers is not None else ""
    return (
        f"use more workers{has}: at best {', '.join(found[:4])} if reading waits for storage; if all cores "
        "are busy, use cheaper decoding or augment on the GPU"
    )


def _echo(loop: Loop) -> str:
    # The buffer size comes from experiments/distance: with echoing factor 4 and a shuffle buffer of 4,096
    # examples, a repeat was worth 0.8 to 0.9 times as much as one in a later epoch.
    limit = (
        f"a factor up to {loop.R * loop.factor:.1f} costs no time; each further repeat is worth less, and "
        "much less with a shuffle_buffer below 4,096"
    )
    if loop.factor > 1:
        return f"raise the factor of this EchoLoader (now {loop.factor:g}): {limit}"
    return f"if the loop still waits, echo with EchoLoader(..., factor={first_factor(loop.R)}): {limit}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _format_bytes(size: float) -> str:
    power = min(max(int(math.log2(max(size, 1)) // 10), 1), 3)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
