"""Examples per second of this checkout's EchoLoader and another commit's, in turns of a fraction of a second.

CIFAR-sized images in batches of 128, one background thread: arrays under PadCropFlip, and a list of
examples that are read and mirrored one by one. A ratio is of two neighbouring turns, this commit's over the
other's, and told by its quartiles: on a machine with other work single turns differ by much more than the
commits do. Processor time per batch, of all threads, depends less on that work; beside it stands that of
copying a batch, as batch echo does for each repeat: at a factor of 2 each batch takes half of a fresh one and
half of a copy.

    python -m benchmarks.loader_against [--commit ea1e3bf]

The other commit is taken from this checkout's history.
"""

import argparse
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peers.echo_small_data import BATCH_SIZE, copy_us, images
from benchmarks.peers.process import CHECKOUT, Peer

CASES = (
    ("none", 1, "arrays"),
    ("example_before_augmentation", 2, "arrays"),
    ("example_after_augmentation", 2, "arrays"),
    ("batch", 2, "arrays"),
    ("none", 1, "list"),
    ("example_before_augmentation", 2, "list"),
)
# Before the stream was a function of seed and number.
BEFORE = "ea1e3bf"

Turn = tuple[float, float]  # examples per second, processor's seconds per example


def extract(commit: str, folder: Path) -> None:
    """Write the package as it was at a commit."""
    command = ["git", "-C", str(CHECKOUT), "archive", commit, "adaecho", "benchmarks"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def loader_of(folder: Path) -> Peer:
    """The loader of a folder's package, in a process of its own, made by the script of its own commit."""
    script = folder / "benchmarks" / "peers" / "echo_small_arrays_loader.py"
    return Peer(sys.executable, str(script), path=str(folder))


def in_turns(sides: tuple[Peer, Peer], rounds: int, seconds: float) -> list[list[tuple[Turn, Turn]]]:
    """Of each case the turns of both sides, [cases][rounds]; each begins every other round."""
    turns: list[list[tuple[Turn, Turn]]] = [[] for _ in CASES]
    for number in range(rounds):
        for case, found in zip(CASES, turns, strict=True):
            order = (0, 1) if number % 2 else (1, 0)
            told = {side: sides[side].numbers(*case, seconds) for side in order}
            found.append(((told[0][0], told[0][1]), (told[1][0], told[1][1])))
    return turns


def row(case: tuple[str, int, str], turns: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Medians, and quartiles of the ratios."""
    echo, factor, form = case
    found: dict[str, Any] = {"echo": echo, "factor": factor, "source": form}
    for side, name in enumerate(("", "before_")):
        found[f"{name}examples_per_s"] = statistics.median(turn[side][0] for turn in turns)
        cpu_s = statistics.median(turn[side][1] for turn in turns)
        found[f"{name}cpu_us_per_batch"] = 1e6 * BATCH_SIZE * cpu_s
    for index, name in enumerate(("rate", "cpu")):
        ratios = [now[index] / before[index] for now, before in turns]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
        found |= {
            f"{name}_ratio_{q}": value for q, value in zip(("q1", "median", "q3"), quartiles, strict=True)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default=BEFORE, help="of this checkout's history")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.25)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            extract(arguments.commit, Path(temporary))
        except (OSError, subprocess.CalledProcessError):
            print(f"the history here has no commit {arguments.commit}: there is nothing to compare with")
            return
        sides = loader_of(CHECKOUT), loader_of(Path(temporary))
        try:
            turns = in_turns(sides, arguments.rounds, arguments.seconds)
        finally:
            for side in sides:
                side.close()
    copying = {"copy_us_per_batch": copy_us(images(50_000))}
    rows = [row(case, found) for case, found in zip(CASES, turns, strict=True)]
    record.show(rows)
    packages = ("torch", "numpy", "opencv-python-headless")
    record.write("loader_against", rows, packages=packages, against=arguments.commit, **copying)


if __name__ == "__main__":
    main()
