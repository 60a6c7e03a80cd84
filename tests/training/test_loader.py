"""Keys that reach the loader, and what measures it."""

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
KEYS = ("data.order=stored", "echo.place=decoded", "device=cpu")


def test_order_place_and_device_reach_the_loader(compose_config: Compose) -> None:
    config = compose_config(*KEYS)
    arguments = upstream_arguments(config, build_task(config), torch.device("cuda", 0))
    given = {name: arguments[name] for name in ("order", "place", "device")}
    assert given == {"order": "stored", "place": "decoded", "device": torch.device("cuda", 0)}
    assert upstream_arguments(config, build_task(config), CPU)["device"] is None
    with make_loader(config, build_task(config), CPU) as loader:
        assert loader.settings.order == "stored"


def test_they_reach_headroom(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    real = pipeline_timer.EchoLoader
    monkeypatch.setattr(pipeline_timer, "EchoLoader", lambda **given: made.append(given) or real(**given))
    pipeline_timer.measure(compose_config(*KEYS), budget_s=0.01, step_s=0.01)
    assert {given["order"] for given in made} == {"stored"}
    assert {given["place"] for given in made} == {"decoded"}


@pytest.mark.parametrize("split", [False, True])
def test_a_split_puts_the_echo_between_the_parts(compose_config: Compose, split: bool) -> None:
    config = compose_config("echo=example_before_augmentation", "echo.factor=3", f"echo.split={split}")
    task = build_task(config)
    assert task.augment_parts is not None
    given = upstream_arguments(config, task, CPU)["augment"]
    assert given is (task.augment_parts if split else task.augment)
    with make_loader(config, task, CPU) as loader:
        assert next(iter(loader))["image"].shape == (config.batch_size, 8, 8, 1)


def test_a_task_without_parts_cant_be_split(compose_config: Compose, tmp_path: Path) -> None:
    text = ("task=small_text", f"data.path={write_texts(tmp_path / 'text')}", "data.validation_examples=2")
    split = ("echo=example_before_augmentation", "echo.split=true")
    config = compose_config(*text, "task.vocabulary=300", *split)
    with pytest.raises(ConfigError, match=r"echo\.split=true: task small_text doesn't name two parts"):
        upstream_arguments(config, build_task(config), CPU)


REFUSED = {
    ("data.order=shards",): "order='shards': this source has no shard_lengths",
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "says"), REFUSED.items(), ids=["order"])
def test_what_cannot_be_read_is_refused_before_anything_is(
    compose_config: Compose, overrides: tuple[str, ...], says: str
) -> None:
    config = compose_config(*overrides)
    with pytest.raises(ConfigError, match=says):
        make_loader(config, build_task(config), CPU)
