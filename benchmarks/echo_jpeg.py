"""Compare EchoLoader with DataLoader, tf.data, SPDL and Grain on photographs, on all cores.

The loaders take turns reading JPEGs from memory and returning uint8 batches of 64. The augmentation is a
random resized crop to 224 pixels, a flip, and a color jitter. Rates are training examples per second and per
CPU second, so repeats count.

* DataLoader and Grain use 2 worker processes and Pillow. SPDL uses 2 threads and FFmpeg. All three resize
  with antialiasing.
* tf.data decodes only the crop, and interpolates linearly.
* EchoLoader decodes either only the crop, which is its default, or the whole image. It uses 2 threads if the
  dataset declares ``thread_safe = True``, and 2 worker processes otherwise.

    pip install -e '.[regions]'
    # Optional; missing loaders are skipped. For a different environment: --peers-python path/to/python
    pip install tensorflow-cpu grain pillow spdl  # and FFmpeg's libraries
    python -m benchmarks.echo_jpeg [folder of JPEGs, default: synthetic images]
"""

import io
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaecho import EchoLoader
from adaecho.transforms import regions
from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop
from benchmarks import record
from benchmarks.peers import sides
from benchmarks.peers.sides import JITTER, RATIO, SCALE, SIZE, WORKERS, Batches, Rates

NUMBER = 300
PEERS = {"tf.data": "tf_data jpegs", "SPDL": "spdl_jpegs", "Grain": "grain_jpegs"}


class Case(NamedTuple):
    """A configuration of EchoLoader to measure."""

    echo: str
    factor: int
    antialias: bool
    crop_only: bool
    declared: bool


CASES = [
    (Case("none", 1, True, True, False), "DataLoader"),
    (Case("none", 1, True, True, True), "DataLoader"),
    (Case("none", 1, True, True, True), "SPDL"),
    (Case("none", 1, True, True, True), "Grain"),
    (Case("none", 1, False, True, True), "tf.data"),
    (Case("none", 1, True, False, False), "DataLoader"),
    (Case("none", 1, True, False, True), "DataLoader"),
    (Case("none", 1, False, False, True), "tf.data"),
    (Case("example_before_augmentation", 2, True, False, False), "DataLoader"),
    (Case("example_before_augmentation", 2, True, False, True), "DataLoader"),
    (Case("example_before_augmentation", 2, False, False, True), "tf.data"),
    (Case("batch", 2, True, True, True), "DataLoader"),
]


class Encoded(torch.utils.data.Dataset[Any]):
    """A dataset of JPEGs, which stay encoded unless a transform for PIL images is given."""

    def __init__(self, encoded: list[bytes], transform: Any = None, *, declared: bool = False) -> None:
        self._encoded, self._transform, self.thread_safe = encoded, transform, declared

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, row: int) -> Any:
        if self._transform is None:
            return {"image": self._encoded[row]}
        from PIL import Image

        return self._transform(Image.open(io.BytesIO(self._encoded[row])).convert("RGB"))


def echo_loader(encoded: list[bytes], case: Case) -> Batches:
    augment = RandomResizedCrop(
        SIZE, SCALE, RATIO, brightness=JITTER, contrast=JITTER, saturation=JITTER, antialias=case.antialias
    )
    # If decode is a bound method, it decodes the whole image, because the loader finds no for_augment on it.
    decode = DecodeImage() if case.crop_only else DecodeImage().__call__
    loader = EchoLoader(
        Encoded(encoded, declared=case.declared), sides.JPEGS.batch_size, echo=case.echo, factor=case.factor,
        shuffle_buffer=sides.JPEG_BUFFER, decode=decode, augment=augment, num_workers=WORKERS,
    )  # fmt: skip
    return iter(loader)


def data_loader(encoded: list[bytes]) -> Batches:
    from torchvision.transforms import v2

    jitter = v2.ColorJitter(JITTER, JITTER, JITTER)
    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), jitter, v2.PILToTensor()])
    loader = torch.utils.data.DataLoader(
        Encoded(encoded, transform), sides.JPEGS.batch_size, shuffle=True, num_workers=WORKERS,
        drop_last=True, persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def measure(folder: Path, rounds: int, seconds: float, peers_python: str) -> list[dict[str, Any]]:
    """Measure all loaders in turn, and return one row for each entry of ``CASES``."""
    encoded = sides.read_jpegs(folder)
    # Fork worker processes first, before other libraries start threads.
    running: dict[Any, Batches] = {"DataLoader": data_loader(encoded)}
    cases = sorted({case for case, _ in CASES}, key=lambda case: case.declared)
    running |= {case: echo_loader(encoded, case) for case in cases}
    for batches in running.values():
        next(batches)
    peers = {name: sides.Peer(peers_python, *words.split(), str(folder)) for name, words in PEERS.items()}
    turns: dict[Any, Any] = {
        name: partial(sides.rates, batches, seconds, sides.JPEGS) for name, batches in running.items()
    }
    turns |= {name: partial(peer.rates, seconds) for name, peer in peers.items() if peer.version}
    found = sides.take_turns(turns, rounds)
    for peer in peers.values():
        peer.close()
    return [_row(case, name, found, peers.get(name)) for case, name in CASES]


def _row(case: Case, name: str, found: dict[Any, list[Rates]], peer: sides.Peer | None) -> dict[str, Any]:
    ours, measured = [one.per_s for one in found[case]], peer is None or peer.version
    row = {**case._asdict(), "examples_per_s": statistics.median(ours), "peer": name}
    if not measured:
        return row | dict.fromkeys(("peer_examples_per_s", "ratio", "ratio_per_cpu_s"), peer.note)
    theirs = [one.per_s for one in found[name]]
    cpu = ([one.per_cpu_s for one in found[side]] for side in (case, name))
    return row | {
        "peer": f"{name} {peer.version}" if peer else name,
        "peer_examples_per_s": statistics.median(theirs),
        "ratio": sides.ratio(ours, theirs),
        "ratio_per_cpu_s": sides.ratio(*cpu),
    }


def main() -> None:
    parser = record.options(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of JPEGs")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not regions.available():
        raise SystemExit("needs the extra regions: pip install -e '.[regions]'")
    with tempfile.TemporaryDirectory() as made:
        if options.folder is None:
            sides.write_jpegs(Path(made), NUMBER)
        folder = options.folder or Path(made)
        rows = measure(folder, options.rounds, options.seconds, options.peers_python)
    packages = (
        "torch", "torchvision", "numpy", "opencv-python-headless", "nvidia-nvimgcodec-cu13", "pillow",
    )  # fmt: skip
    record.write("echo_jpeg", rows, packages=packages)


if __name__ == "__main__":
    main()
