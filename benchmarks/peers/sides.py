"""Functions that the benchmarks share to compare EchoLoader with other data loaders.

The loaders of other libraries run in separate processes (see ``Peer``), which also import this module, so it
imports neither torch nor TensorFlow.
"""

import io
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Name, Measured = TypeVar("Name"), TypeVar("Measured")
Batches = Iterator[Any]


class Rates(NamedTuple):
    """A loader's training examples per wall second, and per CPU second of all its processes."""

    per_s: float
    per_cpu_s: float


class Kind(NamedTuple):
    """The batch size, and how many batches to read before a measurement to empty full queues."""

    batch_size: int
    warm_up: int


SMALL, JPEGS = Kind(128, 24), Kind(64, 8)
SMALL_BUFFER, PADDING = 10_000, 4
JPEG_BUFFER, SIZE, WORKERS = 256, 224, 2
SCALE, RATIO, JITTER = (0.08, 1.0), (3 / 4, 4 / 3), 0.4
# Heights and widths of the synthetic photographs. The median in ImageNet is 375 x 500.
_SIZES = [(375, 500), (375, 500), (333, 500), (500, 375), (400, 500)]


def rates(batches: Batches, seconds: float, kind: Kind) -> Rates:
    """Read batches for a number of seconds, and return the speed of the loader."""
    for _ in range(kind.warm_up):
        next(batches)
    start_s, start_cpu_s, number = time.perf_counter(), _cpu_s(), 0
    while (spent_s := time.perf_counter() - start_s) < seconds:
        next(batches)
        number += kind.batch_size
    return Rates(number / spent_s, number / (_cpu_s() - start_cpu_s))


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its worker processes (on Linux)."""
    spent = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def take_turns(sides: Mapping[Name, Callable[[], Measured]], rounds: int) -> dict[Name, list[Measured]]:
    """Call each function once per round, in turn, and return all results by name."""
    # The functions alternate, so that other work on the machine slows all loaders equally.
    found: dict[Name, list[Measured]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure())
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median, over rounds, of the ratio between two measurements of the same round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


class Peer:
    """A data loader of another library, which runs and is measured in a separate process.

    Some libraries, such as TensorFlow and torch, cannot share a process.

    Args:
        python: path of the Python interpreter for the process.
        module: module of ``benchmarks.peers`` that calls ``serve``.
        arguments: command-line arguments of the module.
        first_batch_s: seconds to wait for the first batch.

    Attributes:
        version: version of the library; None if no batch arrived.
        note: if ``version`` is None, the reason.
    """

    def __init__(self, python: str, module: str, *arguments: str, first_batch_s: float = 90.0) -> None:
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{module}", *arguments], cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | quiet,
        )  # fmt: skip
        # Without FFmpeg, SPDL would wait forever.
        limit, begin = threading.Timer(first_batch_s, self._process.kill), time.monotonic()
        limit.start()
        ready, _, version = self._answer().partition(" ")
        limit.cancel()
        late = time.monotonic() - begin >= first_batch_s
        self.version = version if ready == "ready" else None
        self.note = f"no first batch within {first_batch_s:g} s" if late else "absent"

    def rates(self, seconds: float) -> Rates:
        """Make the process read batches for some seconds, and return the speed of its loader."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return Rates(*map(float, self._answer().split()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the process. It is killed if it hangs on exit, as TensorFlow may do."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def serve(batches: Batches, version: str, kind: Kind) -> None:
    """Measure a loader for the parent process: read durations from stdin, and print speeds to stdout."""
    next(batches)
    # Peer waits for this line.
    print("ready", version, flush=True)
    for line in sys.stdin:
        print(*rates(batches, float(line), kind), flush=True)


def images(number: int) -> dict[str, Any]:
    """Return random images and labels in the shape of CIFAR-10."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, number),
    }


def write_jpegs(folder: Path, number: int) -> None:
    """Write synthetic photographs of about 100 kB: noise with the 1/f spectrum of natural images."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for row in range(number):
        stream = io.BytesIO()
        Image.fromarray(_noise(*_SIZES[row % len(_SIZES)], rng)).save(stream, "JPEG", quality=90)
        (folder / f"{row:05}.jpg").write_bytes(stream.getvalue())


def _noise(height: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    amplitude = np.maximum(frequency, 1 / width) ** -1.15
    phases = np.exp(2j * np.pi * rng.random((4, *frequency.shape)))
    fields = np.fft.irfft2(amplitude * phases, s=(height, width))
    fields /= fields.std(axis=(1, 2), keepdims=True)
    # Mix a common field into all channels, because the colors of a photograph vary together.
    channels = np.moveaxis(fields[0] + 0.35 * fields[1:], 0, -1)
    return np.clip(120 + 50 * channels, 0, 255).astype(np.uint8)


def read_jpegs(folder: Path) -> list[bytes]:
    """Return the encoded JPEGs of a folder and its subfolders, repeated to fill four batches."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*.jp*g"))]
    if not found:
        raise SystemExit(f"{folder} contains no file *.jpg or *.jpeg")
    return found * -(-4 * JPEGS.batch_size // len(found))


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random crop, as in torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * rng.uniform(*SCALE)
        aspect = math.exp(rng.uniform(*map(math.log, RATIO)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            return int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1)), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side
