"""What to try where a loop waits for data: a cache, more workers, then echoing."""

import math
import os
import shutil
import tempfile
from dataclasses import dataclass

LEAST_RATIO = 1.05  # R below this: the loader is no slower than the step
_WORTH_A_LINE = 1.1  # more workers are named while each doubling brings so much
_MOST_WORKERS = 32


@dataclass(frozen=True)
class Loop:
    """A loop and its loader, as measured.

    Attributes:
        wait_s: mean seconds that a step waits for its batch.
        step_s: mean seconds of a step.
        upstream_s: seconds the loader takes for a batch.
        workers: of the loader, 0 where the loop's own thread reads; None where it doesn't tell.
        pass_bytes: of the batches of a pass; 0 where unknown.
        echoed: how often the loader repeats each batch already.
    """

    wait_s: float
    step_s: float
    upstream_s: float
    workers: int | None
    pass_bytes: int = 0
    echoed: float = 1.0

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """t_upstream / t_downstream (paper, section 2)."""
        return self.upstream_s / self.step_s


def advice(loop: Loop) -> list[str]:
    """What to try, in this order; empty where the loader is no slower than the step."""
    found = [_cache(loop) if loop.R >= LEAST_RATIO else "", _workers(loop)]
    if loop.R >= LEAST_RATIO:
        found.append(_echo(loop))
    return [f"{number}. {one}" for number, one in enumerate(filter(None, found), 1)]


def first_factor(ratio: float) -> int:
    """The factor to begin with at this R: what costs no time; at least 2, or nothing echoes."""
    return min(max(int(round(ratio, 1)), 2), 4)


def _cache(loop: Loop) -> str:
    """Where a pass of the batches fits in half of what is free."""
    from adaecho.echo.memory.pool import free_bytes  # watching needs none of it

    size = int(loop.pass_bytes / loop.echoed)
    on_disk = shutil.disk_usage(tempfile.gettempdir()).free
    places = {"in memory": free_bytes() or 0, "on a local disk": on_disk}
    for place, free in places.items():
        if 0 < size <= free // 2:
            return (
                f"keep what comes before augmentation {place}, read and decoded once: a pass of these "
                f"batches is {_spelt(size)}, and {_spelt(free)} are free. Augmentation stays fresh, which no "
                "repeat equals"
            )
    return ""


def _workers(loop: Loop) -> str:
    # What a worker waits for is shared out among them; reading then runs beside the step.
    now, best, found, count = loop.workers or 0, 1.0, [], 1
    while count <= _MOST_WORKERS:
        upstream_s = loop.upstream_s * max(now, 1) / count
        gain = (loop.wait_s + loop.step_s) / max(upstream_s, loop.step_s)
        if count > now and gain > best * _WORTH_A_LINE:
            found.append(f"{gain:.2f} times as fast with {count}")
            best = gain
        count *= 2
    if not found:
        return ""
    has = f" (now {loop.workers}, on {_cores()} cores)" if loop.workers is not None else ""
    return (
        f"more workers{has}: at best {', '.join(found[:4])}, where reading waits for storage; where the "
        "cores are busy, cheaper decoding or augmentation on the GPU"
    )


def _echo(loop: Loop) -> str:
    # experiments/distance: at e = 4 a buffer of 4,096 kept 0.8 to 0.9 of the worth of repeats a pass apart.
    worth = (
        f"up to {loop.R * loop.echoed:.1f} costs no time; each further repeat is worth less, and below a "
        "shuffle_buffer of 4,096 much less"
    )
    if loop.echoed > 1:
        return f"a larger factor than this EchoLoader's {loop.echoed:g}: {worth}"
    return f"EchoLoader(..., factor={first_factor(loop.R)}), for what is left: {worth}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spelt(size: float) -> str:
    """Bytes in the unit that suits them."""
    power = min(max(int(math.log2(max(size, 1)) // 10), 1), 3)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
