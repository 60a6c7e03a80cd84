"""``python scripts/cifar10_shards.py DATA INTO``: CIFAR-10 as lossless PNG in tar shards, for task cifar10.

Writes ``train-00.tar`` and so on, ``validation.tar`` and, where the data has one, ``test.tar``. Training and
validation examples are those that the task holds out itself with the same number and seed, in that permuted
order, so that a shard read through is already mixed. The same arguments give the same bytes.
"""

import argparse
import io
import tarfile
from pathlib import Path

import cv2

from adaecho.datasets import cifar10
from adaecho.datasets.split import Arrays, train_validation_split
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import report_errors
from adaecho.records.files import folder_errors
from adaecho.tasks.cifar10 import decode


def write_shards(
    data: str, into: Path, *, shard_examples: int = 5000, validation_examples: int = 5000, split_seed: int = 0
) -> list[Path]:
    """Write every part; returns the files.

    Args:
        data: as ``data.path`` of task cifar10.
        into: a folder, made where it is missing.
        shard_examples: in each training shard; the last may have fewer.
        validation_examples, split_seed: as ``data.*`` of task cifar10.

    Raises:
        DataError: the data can't be read.
    """
    stored = cifar10.find(data, decode)
    train, validation = train_validation_split(
        stored.read("train", BadExampleBudget(0)), validation_examples, seed=split_seed
    )
    into.mkdir(parents=True, exist_ok=True)
    files = []
    for number, begin in enumerate(range(0, len(train["label"]), shard_examples)):
        part = {name: array[begin : begin + shard_examples] for name, array in train.items()}
        files.append(_write(into / f"train-{number:02}.tar", part, begin))
    files.append(_write(into / "validation.tar", validation))
    if stored.has_test:
        files.append(_write(into / "test.tar", stored.read("test", BadExampleBudget(0))))
    return files


def _write(path: Path, examples: Arrays, first: int = 0) -> Path:
    """One shard; it gets its name once it is whole."""
    temporary = path.with_name(f".{path.name}")
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (image, label) in enumerate(
            zip(examples["image"], examples["label"], strict=True), first
        ):
            done, png = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
            assert done, "OpenCV encodes any image of three channels"
            for ending, content in (("png", png.tobytes()), ("cls", str(int(label)).encode())):
                member = tarfile.TarInfo(f"{number:05}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return temporary.replace(path)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="folder with the hub's parquet files or the python batches, or a hub id")
    parser.add_argument("into", type=Path, help="folder for the shards (about 230 MB)")
    parser.add_argument("--shard-examples", type=int, default=5000, help="in each training shard (5000)")
    parser.add_argument("--validation-examples", type=int, default=5000, help="held out (5000)")
    parser.add_argument("--split-seed", type=int, default=0, help="of the permutation that holds them out")
    options = vars(parser.parse_args())
    with report_errors(), folder_errors(options["into"]):
        for file in write_shards(options.pop("data"), options.pop("into"), **options):
            print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
