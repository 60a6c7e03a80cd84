"""Task cifar10 on tar shards has the same examples as on data in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.errors import ConfigError, DataError
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.trial import run_trial
from scripts.cifar10_shards import write_shards
from tests.conftest import Compose
from tests.datasets.files import encode, random_images, write_cifar10, write_tar
from tests.servers import serving

NUMBER = 40
HELD_OUT = 8
TINY = (
    "task=cifar10", "task.depth=8", "task.channels=2", "batch_size=4", "echo.shuffle_buffer=4",
    "evaluate.every_fresh_examples=8", "max_fresh_examples=24", "precision=float32", "target.value=null",
    "data.validation_examples=null",
)  # fmt: skip


def parquet(folder: Path) -> Path:
    images, labels = random_images(NUMBER), [number % 10 for number in range(NUMBER)]
    both = np.concatenate([images, random_images(6, seed=1)])
    return write_cifar10(folder, both, labels + labels[:6], tests=6)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Shards that the script writes from the folder ``data``."""
    into = tmp_path / "shards"
    files = write_shards(
        str(parquet(tmp_path / "data")), into, shard_examples=10, validation_examples=HELD_OUT
    )
    assert [file.name for file in files] == [
        "train-00.tar", "train-01.tar", "train-02.tar", "train-03.tar", "validation.tar", "test.tar",
    ]  # fmt: skip
    return into


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path / "cache"))


Build = Callable[..., Task]


@pytest.fixture
def build(compose_config: Compose, tmp_path: Path) -> Build:
    """``build("data")``, held in memory, or ``build("shards")``, each with more overrides."""

    def built(form: str, *overrides: str) -> Task:
        held_out = HELD_OUT if form == "data" else "null"
        given = (f"data.path={tmp_path / form}", f"data.validation_examples={held_out}")
        return build_task(compose_config(*TINY, *given, *overrides))

    return built


def evaluated(task: Task, split: Any) -> dict[str, float]:
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.inference_mode():
        return task.evaluate(model, split, device=torch.device("cpu"))


@pytest.mark.usefixtures("shards")
def test_shards_hold_the_examples_that_the_task_holds_in_memory(build: Build) -> None:
    in_memory, streamed = build("data"), build("shards")
    assert streamed.decode is not None
    decoded = [streamed.decode(example) for example in streamed.source]
    # Shards are shuffled; within a shard the order of the permutation stays.
    places = [(one["image"] == in_memory.source["image"]).all((1, 2, 3)) for one in decoded]
    order = np.concatenate([np.flatnonzero(place) for place in places])
    np.testing.assert_array_equal(np.sort(order), np.arange(NUMBER - HELD_OUT))
    np.testing.assert_array_equal(np.diff(order[:2]), [1])
    np.testing.assert_array_equal([example["label"] for example in decoded], in_memory.source["label"][order])
    for split in ("validation", "test"):
        assert evaluated(in_memory, split) == evaluated(streamed, split)


def test_a_run_over_http_resumes(
    compose_config: Compose, tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with serving(shards) as served:
        base = (
            *TINY, f"data.path='http://{served}/train-{{00..03}}.tar'", "data.num_workers=1",
            f"task.validation_shards=http://{served}/validation.tar", "echo=example_before_augmentation",
            "echo.factor=2",
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


@pytest.mark.parametrize(
    ("form", "overrides", "message"),
    [
        ("shards", "data.validation_examples=8", r"data\.validation_examples=8: .*has a validation split"),
        ("shards/train-00.tar", "", r"name the validation shards with task\.validation_shards="),
        ("data", "task.validation_shards=val.tar", r"val\.tar: needs tar shards in data\.path"),
        ("shards", "task.training_examples=3", r"task\.training_examples=3: does not apply"),
        ("shards/absent-*.tar", "task.validation_shards=x.tar", "no file matches"),
        ("shards", "task.validation_shards=x/absent.tar", r"absent\.tar"),
    ],
)
@pytest.mark.usefixtures("shards")
def test_mistakes_are_refused(build: Build, form: str, overrides: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        build(form, *overrides.split())


def test_validation_shards_without_usable_examples_are_refused(build: Build, shards: Path) -> None:
    write_tar(shards / "validation.tar", [])
    with pytest.raises(DataError, match=r"validation\.tar: the tar shards contain no examples"):
        build("shards")
    write_tar(shards / "validation.tar", [("a.png", encode(random_images(1)[0])), ("a.cls", b"10")])
    with pytest.raises(DataError, match=r"a of .*validation\.tar: its label 10 is not between 0 and 9"):
        build("shards")
