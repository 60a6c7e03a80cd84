"""What to try where a loop waits for data, from what was measured of it."""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_RATIO = 1.05  # R below this: the loader is no slower than the step
_LEAST_GAIN = 1.1  # a change that promises less is not worth proposing
_WORTH_A_LINE = 1.1  # more workers are named while each doubling brings so much
_MOST_WORKERS = 32
_ONE_CORE = (0.8, 1.3)  # busy cores of threads that take turns at the interpreter's lock


@dataclass(frozen=True)
class Loop:
    """A loop and its loader, as measured.

    Attributes:
        wait_s, step_s: mean seconds a step waits for its batch, and takes, in the loop as it runs.
        upstream_s: seconds a batch of the loader alone.
        downstream_s: seconds of a step on a batch at hand.
        workers: of the loader, 0 where the loop's own thread reads; None where it doesn't tell.
        threads: whether they are threads of this process.
        busy: cores that this process and its children kept busy while the loader ran alone; None: unknown.
        cores: that this process may use.
        batch_bytes: arrays and tensors of a batch; 0 where unknown.
        batches: of a pass; 0 where unknown.
        echoed: how often the loader repeats already; 1 for most.
    """

    wait_s: float
    step_s: float
    upstream_s: float
    downstream_s: float
    workers: int | None
    threads: bool
    busy: float | None
    cores: int
    batch_bytes: int
    batches: int
    echoed: float

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """t_upstream / t_downstream (paper, section 2)."""
        return self.upstream_s / self.downstream_s

    def times_as_fast(self, workers: int) -> float:
        """The loop with so many workers over the loop as it is, at best.

        What a worker waits for is shared out among them, what it computes among the cores; reading then runs
        beside the step.
        """
        shared_s = self.upstream_s * max(self.workers or 0, 1) / workers
        computed_s = self.upstream_s * (self.busy or 0.0) / self.cores
        return (self.wait_s + self.step_s) / max(shared_s, computed_s, self.downstream_s)


def steps(loop: Loop) -> list[str]:
    """What to try, in this order."""
    return before_echoing(loop) + ([_echo(loop)] if loop.R >= LEAST_RATIO else [])


def before_echoing(loop: Loop) -> list[str]:
    """What to try before echoing, in this order."""
    cached = _cache(loop) if loop.R >= LEAST_RATIO else ""
    return [one for one in (cached, _workers(loop)) if one]


def _workers(loop: Loop) -> str:
    found = []
    best, count = _LEAST_GAIN / _WORTH_A_LINE, 1
    while count <= _MOST_WORKERS:
        gain = loop.times_as_fast(count)
        if count > (loop.workers or 0) and gain > best * _WORTH_A_LINE:
            found.append(f"{gain:.2f} times as fast with {count}")
            best = gain
        count *= 2
    busy = "" if loop.busy is None else f", {loop.busy:.1f} of {loop.cores} cores busy while it ran alone"
    now = "" if loop.workers is None else f" (now {loop.workers}{busy})"
    several = loop.threads and (loop.workers or 0) > 1 and loop.cores > 1
    if several and loop.busy is not None and _ONE_CORE[0] < loop.busy < _ONE_CORE[1]:
        return f"processes=True: threads wait for the interpreter's lock{now}"
    if found:
        unknown = " where reading waits; where it computes, no more than the cores allow" * (
            loop.busy is None
        )
        return f"more workers{now}: at best {', '.join(found[:4])}{unknown}"
    if loop.R < LEAST_RATIO:
        return ""
    return f"cheaper decoding, or augmentation on the GPU: more workers would not help{now}"


def _cache(loop: Loop) -> str:
    """Where a pass of decoded data fits in half of what is free."""
    total = int(loop.batch_bytes * loop.batches / loop.echoed)
    if not total:
        return ""
    from adaecho.echo.memory.budget import free_bytes  # watching needs none of it

    free = free_bytes()
    if free is not None and total <= free // 2:
        where, room = "in memory", free
    else:
        where, room = "on a local disk", shutil.disk_usage(tempfile.gettempdir()).free
        if total > room // 2:
            return ""
    return (
        f"keep what comes before augmentation {where}, read and decoded once: a pass of these batches is "
        f"{_spelt(total)}, and {_spelt(room)} are free. Augmentation stays fresh, which no repeat equals"
    )


def _echo(loop: Loop) -> str:
    memory = f"; a batch holds {_spelt(loop.batch_bytes)}" if loop.batch_bytes else ""
    peak = _peak_bytes()
    memory += f", the process {_spelt(peak)} at its peak" if memory and peak else ""
    fresh_ratio = loop.R * loop.echoed  # of a fresh batch, not of one of its repeats
    # experiments/distance: at e = 4 a buffer of 4,096 kept 0.8 to 0.9 of the worth of repeats a pass apart.
    worth = (
        f"up to {fresh_ratio:.1f} costs no time; each further repeat is worth less, and below a "
        f"shuffle_buffer of 4,096 much less{memory}"
    )
    if loop.echoed > 1:
        return f"a larger factor than this EchoLoader's {loop.echoed:g}: {worth}"
    return f"EchoLoader(..., factor={first_factor(loop.R)}), for what is left: {worth}"


def first_factor(ratio: float) -> int:
    """What to begin with at this R: what costs no time, as it is told; at least 2, or nothing echoes."""
    return min(max(int(round(ratio, 1)), 2), 4)


def expected() -> list[dict[str, Any]]:
    """What committed records say of each variant: fresh examples to the target over those of the baseline.

    Returns:
        Rows with ``record`` (its folder), ``variant``, ``factor``, ``fresh_ratio``, and ``low`` and ``high``,
        its 95 % interval. Made by ``scripts/expected_gains.py``; a test compares them with the records.
    """
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("expected.json").read_text())
    return rows


def cpu_s() -> float | None:
    """Processor seconds that this process and its children have taken; None where nothing tells it."""
    if not Path("/proc/self/stat").exists():
        return None
    found = list(_processes(1 / os.sysconf("SC_CLK_TCK")))
    own = {os.getpid()}
    while more := {process for process, parent, _ in found if parent in own} - own:
        own |= more
    return sum(seconds for process, _, seconds in found if process in own)


def _processes(ticks_s: float) -> Iterator[tuple[int, int, float]]:
    """Each process of this machine: its number, its parent's, and its processor seconds (proc(5))."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, after = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        words = after.split()  # from the third field, the state, on
        yield int(number.split(" ", 1)[0]), int(words[1]), sum(map(int, words[11:15])) * ticks_s


def _spelt(size: float) -> str:
    """Bytes in the unit that suits them."""
    power = min(max(int(math.log2(max(size, 1)) // 10), 1), 3)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_kept_busy(before_s: float | None, spent_s: float) -> float | None:
    """Since ``cpu_s`` gave ``before_s``; None where it isn't known, or too little time has passed to tell."""
    after_s = cpu_s()
    if before_s is None or after_s is None or spent_s < 0.1:  # the clock's ticks are ten milliseconds
        return None
    return (after_s - before_s) / spent_s


def num_bytes(batch: Any) -> int:
    """Of the arrays and tensors in a batch."""
    if isinstance(batch, dict):
        return sum(map(num_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(num_bytes, batch))
    try:
        return int(getattr(batch, "nbytes", 0))
    except RuntimeError:  # as of a sparse tensor
        return 0


def _peak_bytes() -> int | None:
    """The most memory that this process had; None where nothing tells it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
