"""Task cifar10 on tar shards of encoded images: the examples are those of the same data in memory."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from adaecho.errors import ConfigError, DataError
from adaecho.tasks import build_task
from adaecho.tasks.cifar10 import decode
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.cifar10_files import encode, random_images, write_parts
from tests.scripts.load import load
from tests.shards.nginx import needs_nginx, nginx

NUMBER = 40
HELD_OUT = 8
TINY = (
    "task=cifar10", "task.depth=8", "task.channels=2", "batch_size=4", "echo.shuffle_buffer=4",
    "evaluate.every_fresh_examples=8", "max_fresh_examples=24", "precision=float32", "target.value=null",
    "data.validation_examples=null",
)  # fmt: skip


def parquet(folder: Path) -> Path:
    images, labels = random_images(NUMBER), [number % 10 for number in range(NUMBER)]
    return write_parts(
        folder, np.concatenate([images, random_images(6, seed=1)]), labels + labels[:6], tests=6
    )


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards, as the script writes them."""
    write = load("cifar10_shards", monkeypatch).write_shards
    files = write(
        str(parquet(tmp_path / "data")), tmp_path / "shards", shard_examples=10, validation_examples=HELD_OUT
    )
    assert [file.name for file in files] == [
        "train-00.tar", "train-01.tar", "train-02.tar", "train-03.tar", "validation.tar", "test.tar",
    ]  # fmt: skip
    return tmp_path / "shards"


def test_shards_hold_the_examples_that_the_task_holds_in_memory(
    compose_config: Compose, shards: Path
) -> None:
    in_memory = build_task(
        compose_config(
            "task=cifar10", f"data.path={shards.parent / 'data'}", f"data.validation_examples={HELD_OUT}"
        )
    )
    streamed = build_task(compose_config(*TINY, f"data.path={shards}"))
    assert streamed.decode is not None
    decoded = [streamed.decode(example) for example in streamed.source]
    # Shards come in an order of their own, each in the order of the permutation.
    images = np.stack([example["image"] for example in decoded])
    order = np.concatenate(
        [np.flatnonzero((image == in_memory.source["image"]).all((1, 2, 3))) for image in images]
    )
    np.testing.assert_array_equal(np.sort(order), np.arange(NUMBER - HELD_OUT))
    np.testing.assert_array_equal(np.diff(order[:2]), [1])
    np.testing.assert_array_equal([example["label"] for example in decoded], in_memory.source["label"][order])


def test_both_forms_have_the_same_validation_and_test_splits(compose_config: Compose, shards: Path) -> None:
    in_memory = build_task(
        compose_config("task=cifar10", "task.depth=8", f"data.path={shards.parent / 'data'}",
                       f"data.validation_examples={HELD_OUT}")
    )  # fmt: skip
    streamed = build_task(compose_config(*TINY, "task.channels=16", f"data.path={shards}"))
    model = streamed.build_model().eval()
    for split in ("validation", "test"):
        with torch.inference_mode():
            metrics = [
                task.evaluate(model, split, device=torch.device("cpu")) for task in (in_memory, streamed)
            ]  # type: ignore[arg-type]
        assert metrics[0] == metrics[1]


@pytest.mark.parametrize("form", ["shards", "data"])
def test_a_part_of_the_validation_split_can_be_taken(
    compose_config: Compose, shards: Path, form: str
) -> None:
    held_out = "null" if form == "shards" else HELD_OUT
    entropies = []
    for most in ("null", 3):
        task = build_task(
            compose_config(
                *TINY, f"data.path={shards.parent / form}", f"data.validation_examples={held_out}",
                f"evaluate.max_examples={most}",
            )
        )  # fmt: skip
        torch.manual_seed(0)
        model = task.build_model().eval()
        with torch.inference_mode():
            metrics = task.evaluate(model, "validation", device=torch.device("cpu"))
        entropies.append(metrics["cross_entropy"])
    assert metrics["accuracy"] in (0, 1 / 3, 2 / 3, 1)
    assert entropies[0] != entropies[1]


@pytest.fixture
def served(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    with nginx(tmp_path / "server", shards) as url:
        yield url


@needs_nginx
def test_a_run_over_http_goes_on_where_it_was(compose_config: Compose, tmp_path: Path, served: str) -> None:
    base = (
        *TINY, f"data.path='{served}slow/train-{{00..03}}.tar'", "data.num_workers=1",
        f"task.validation_shards={served}validation.tar", "echo=example_before_augmentation", "echo.factor=2",
    )  # fmt: skip
    whole = run_trial(compose_config(*base), tmp_path / "whole")
    run_trial(compose_config(*base, "max_fresh_examples=12"), tmp_path / "parts")
    parts = run_trial(compose_config(*base), tmp_path / "parts")
    assert whole["R"] > 0
    for key in ("best", "final"):
        whole[key].pop("train_time_s", None)
        parts[key].pop("train_time_s", None)
        assert parts[key] == whole[key]
    assert (parts["fresh_examples"], parts["steps"]) == (whole["fresh_examples"], whole["steps"])


def test_shards_are_streamed_so_nothing_can_be_held_out(compose_config: Compose, shards: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation_examples=8: shards have a validation split"):
        build_task(compose_config(*TINY, f"data.path={shards}", "data.validation_examples=8"))
    with pytest.raises(DataError, match=r"name the validation shards with task\.validation_shards="):
        build_task(compose_config(*TINY, f"data.path={shards}/train-00.tar"))


def test_a_validation_shards_is_refused_where_part_is_held_out(
    compose_config: Compose, tmp_path: Path
) -> None:
    parquet(tmp_path)
    with pytest.raises(
        ConfigError, match=r"task\.validation_shards=val\.tar: only for data\.path= of tar shards"
    ):
        build_task(
            compose_config("task=cifar10", f"data.path={tmp_path}", "data.validation_examples=4",
                           "task.validation_shards=val.tar")
        )  # fmt: skip


def test_training_examples_are_counted_off_in_memory_alone(compose_config: Compose, shards: Path) -> None:
    in_memory = (
        "task=cifar10",
        f"data.path={shards.parent / 'data'}",
        f"data.validation_examples={HELD_OUT}",
    )
    whole = build_task(compose_config(*in_memory)).source
    part = build_task(compose_config(*in_memory, "task.training_examples=3")).source
    for name, array in whole.items():
        assert (part[name] == array[:3]).all()
    with pytest.raises(ConfigError, match=r"task\.training_examples=3: shards are read whole"):
        build_task(compose_config(*TINY, f"data.path={shards}", "task.training_examples=3"))


def test_missing_and_damaged_shards_are_errors_that_name_them(compose_config: Compose, shards: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches"):
        build_task(
            compose_config(
                *TINY, f"data.path='{shards}/absent-*.tar'", f"task.validation_shards={shards}/test.tar"
            )
        )
    with pytest.raises(DataError, match=r"absent\.tar"):
        build_task(
            compose_config(*TINY, f"data.path={shards}", f"task.validation_shards={shards}/absent.tar")
        )
    whole = (shards / "validation.tar").read_bytes()
    (shards / "validation.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"validation\.tar: the archive ends"):
        build_task(compose_config(*TINY, f"data.path={shards}"))
    with tarfile.open(shards / "validation.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"validation\.tar: the tar shards hold no usable examples"):
        build_task(compose_config(*TINY, f"data.path={shards}"))


def test_a_bad_validation_example_is_never_skipped(compose_config: Compose, shards: Path) -> None:
    with tarfile.open(shards / "validation.tar", "w") as archive:
        for name, content in (("a.png", encode(random_images(1)[0])), ("a.cls", b"10")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match=r"example 0 of .*validation\.tar: its label 10 is not one of 0 to 9"):
        build_task(compose_config(*TINY, f"data.path={shards}", "data.max_bad_examples=9"))


def test_an_image_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the image has 16x16 pixels, 32x32 are needed"):
        decode({"__key__": "a", "png": encode(random_images(1, side=16)[0]), "cls": b"1"})
