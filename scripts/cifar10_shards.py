"""``python scripts/cifar10_shards.py DATA INTO``: write CIFAR-10 as PNG in tar shards, for task cifar10.

The files are ``train-00.tar`` and so on, ``validation.tar``, and ``test.tar`` if the data has a test split.
By default, the validation examples are those that the task holds out when it reads the original files. If
its config sets ``data.validation_examples`` or ``data.split_seed``, pass the same values to the script. The
training examples are in random order. The same arguments always produce byte-identical files.
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
    """Write the shards of all splits, and return their paths.

    Args:
        data: folder or hub id of CIFAR-10, as for the config key ``data.path``.
        shard_examples: number of examples in a training shard; the last shard may have fewer.
        validation_examples: number of examples in the validation split.

    Raises:
        DataError: the data cannot be read.
    """
    stored = cifar10.find(data, decode)
    all_train = stored.read("train", BadExampleBudget(0))
    train, validation = train_validation_split(all_train, validation_examples, seed=split_seed)
    into.mkdir(parents=True, exist_ok=True)
    files = []
    for number, begin in enumerate(range(0, len(train["label"]), shard_examples)):
        shard = {name: array[begin : begin + shard_examples] for name, array in train.items()}
        files.append(_write(into / f"train-{number:02}.tar", shard, begin))
    files.append(_write(into / "validation.tar", validation))
    if stored.has_test:
        files.append(_write(into / "test.tar", stored.read("test", BadExampleBudget(0))))
    return files


def _write(path: Path, examples: Arrays, first: int = 0) -> Path:
    """Write one shard under a temporary name, and rename it when it is complete."""
    temporary = path.with_name(f".{path.name}")
    pairs = zip(examples["image"], examples["label"], strict=True)
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (image, label) in enumerate(pairs, first):
            png = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1]
            for ending, content in (("png", png.tobytes()), ("cls", str(int(label)).encode())):
                member = tarfile.TarInfo(f"{number:05}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="folder with the Hub's parquet files or the Python batches, or a Hub ID")
    parser.add_argument("into", type=Path, help="folder for the shards (about 230 MB)")
    parser.add_argument("--shard-examples", type=int, default=5000, help="examples per training shard (5000)")
    parser.add_argument(
        "--validation-examples", type=int, default=5000, help="size of the validation split (5000)"
    )
    parser.add_argument("--split-seed", type=int, default=0, help="seed of the split")
    options = vars(parser.parse_args())
    with report_errors(), folder_errors(options["into"]):
        for file in write_shards(options.pop("data"), options.pop("into"), **options):
            print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
