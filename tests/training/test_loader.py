"""Config keys that reach the loader and headroom."""

from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.errors import ConfigError
from adaecho.headroom import pipeline_timer
from adaecho.tasks import build_task
from adaecho.training.loader import make_loader, upstream_arguments
from tests.conftest import Compose
from tests.datasets.files import write_texts

CPU = torch.device("cpu")
KEYS = ("data.order=sequential", "echo.buffer_format=decoded", "device=cpu")


def test_order_place_and_device_reach_the_loader(compose_config: Compose) -> None:
    config = compose_config(*KEYS)
    arguments = upstream_arguments(config, build_task(config), torch.device("cuda", 0))
    given = {name: arguments[name] for name in ("order", "buffer_format", "device")}
    assert given == {"order": "sequential", "buffer_format": "decoded", "device": torch.device("cuda", 0)}
    assert upstream_arguments(config, build_task(config), CPU)["device"] is None
    with make_loader(config, build_task(config), CPU) as loader:
        assert loader.settings.order == "sequential"


def test_order_and_place_reach_headroom(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    real = pipeline_timer.EchoLoader
    monkeypatch.setattr(pipeline_timer, "EchoLoader", lambda **given: made.append(given) or real(**given))
    pipeline_timer.measure(compose_config(*KEYS), budget_s=0.01, step_s=0.01)
    assert {given["order"] for given in made} == {"sequential"}
    assert {given["buffer_format"] for given in made} == {"decoded"}


@pytest.mark.parametrize("split", [False, True])
def test_a_split_puts_the_echo_between_the_parts_of_the_augmentation(
    compose_config: Compose, split: bool
) -> None:
    config = compose_config(
        "echo=example_before_augmentation", "echo.factor=3", f"echo.split_augmentation={split}"
    )
    task = build_task(config)
    assert task.augment_parts is not None
    given = upstream_arguments(config, task, CPU)["augment"]
    assert given is (task.augment_parts if split else task.augment)
    with make_loader(config, task, CPU) as loader:
        assert next(iter(loader))["image"].shape == (config.batch_size, 8, 8, 1)


def test_a_task_without_parts_cant_be_split(compose_config: Compose, tmp_path: Path) -> None:
    text = ("task=small_text", f"data.path={write_texts(tmp_path / 'text')}", "data.validation_examples=2")
    split = ("echo=example_before_augmentation", "echo.split_augmentation=true")
    config = compose_config(*text, "task.vocab_size=300", *split)
    with pytest.raises(
        ConfigError, match=r"echo\.split_augmentation=true: task small_text has no augment_parts"
    ):
        upstream_arguments(config, build_task(config), CPU)


def test_an_order_that_the_source_lacks_is_refused(compose_config: Compose) -> None:
    config = compose_config("data.order=shards")
    with pytest.raises(ConfigError, match="order='shards': this source has no shard_lengths"):
        make_loader(config, build_task(config), CPU)
