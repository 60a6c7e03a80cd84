"""scale=images and scale=text: values from the size of one's own data, resolved before they are recorded."""

from pathlib import Path

import pyarrow as pa
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pyarrow import parquet

from adaecho.config import size_defaults
from adaecho.config.size_defaults import _split
from adaecho.config.tasks import Size
from adaecho.errors import ConfigError, DataError
from adaecho.run import explain
from adaecho.tasks import build_task
from adaecho.tasks.options import CocoOptions, TextOptions
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.files import coco, encoded, write_coco, write_labeled
from tests.tasks.test_imagenet import TINY


def text(path: Path, *, lines: bool = False) -> Size:
    return TextOptions.size_of(
        str(path), {"column": "text", "sample_by": "line" if lines else "document", "block_size": 64}, 0
    )


def values(size: Size, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(size_defaults, "_size", lambda _: size)
    keys = ("batch_size", "shuffle_buffer", "every_fresh_examples", "max_fresh_examples")
    return {
        key: size_defaults.scaled(key, _root_=OmegaConf.create({"max_fresh_examples": None})) for key in keys
    }


def test_714_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(714, 714, has_validation=False)
    assert _split(size) == (142, 572)
    assert values(size, monkeypatch) == {
        "batch_size": 32, "shuffle_buffer": 143, "every_fresh_examples": 286, "max_fresh_examples": 5720,
    }  # fmt: skip


@pytest.mark.parametrize("number", [2, 3, 10, 63, 64, 100, 1000, 5001, 30_000, 1_281_167, 10**9])
@pytest.mark.parametrize("has_validation", [False, True])
def test_whatever_the_number_there_are_steps_and_evaluations_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, number: int, has_validation: bool
) -> None:
    size = Size(number, number, has_validation)
    found = values(size, monkeypatch)
    held_out, training = _split(size)
    assert (held_out or 0) + training == number
    assert training >= 1
    batch, budget = found["batch_size"], found["max_fresh_examples"]
    assert batch in (4, 8, 16, 32, 64)
    assert found["shuffle_buffer"] + batch < budget, "the first step is within the budget"
    assert found["shuffle_buffer"] <= max(training / 4, 1)
    assert 2 * found["every_fresh_examples"] <= budget, "two evaluations at least"
    assert budget >= 2 * training


@pytest.mark.parametrize("budget", [150, 500, 1143, 1144, 5720, 10**6, None])
def test_a_short_first_try_steps_and_is_evaluated_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    monkeypatch.setattr(size_defaults, "_size", lambda _: Size(714, 714, has_validation=False))
    typed = OmegaConf.create({"max_fresh_examples": budget})
    buffer, every = (
        size_defaults.scaled(key, _root_=typed) for key in ("shuffle_buffer", "every_fresh_examples")
    )
    expected = {150: (18, 37), 500: (62, 125), 1143: (142, 285)}
    assert (buffer, every) == expected.get(budget or 0, (143, 286))


def test_documents_are_held_out_and_blocks_are_trained_on() -> None:
    size = Size(1000, 50, has_validation=False)
    assert _split(size) == (10, 800)
    assert _split(Size(10**6, 10**6, has_validation=False))[0] == 1000
    assert _split(Size(7, 1, has_validation=True))[0] is None


def test_the_config_holds_numbers_and_what_is_typed_wins(compose_config: Compose, tmp_path: Path) -> None:
    write_labeled("folders", tmp_path / "data")
    images = len([file for file in (tmp_path / "data" / "train").rglob("*") if file.is_file()])
    typed = ("task=imagenet", "scale=images", f"data.path={tmp_path / 'data'}")
    config = compose_config(*typed)
    assert config.data.validation_examples is None, "it has a validation split"
    assert (config.batch_size, config.task.ghost_size, config.target.value) == (4, None, None)
    assert config.optimizer.learning_rate == 0.004
    assert config.max_fresh_examples == 10 * images
    assert config.schedule.decay_steps == 10 * images // 4
    config = compose_config(*typed, "batch_size=8", "max_fresh_examples=80")
    assert (config.batch_size, config.optimizer.learning_rate, config.schedule.decay_steps) == (8, 0.008, 10)


def test_photographs_in_class_folders_train_at_once(compose_config: Compose, tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / "mine" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(number))
    small = [one for one in TINY if one.startswith(("task.model", "task.image_size", "data.num_workers"))]
    config = compose_config("task=imagenet", "scale=images", *small, f"data.path={tmp_path / 'mine'}")
    assert (config.data.validation_examples, config.max_fresh_examples) == (4, 160)
    config.max_fresh_examples = 20
    summary = run_trial(config, tmp_path / "run")
    assert summary["status"] == "budget_spent"
    assert summary["best"] is not None
    assert summary["data"]["training_images"] == 16


def test_boxes_without_a_validation_split_are_held_out(compose_config: Compose, tmp_path: Path) -> None:
    write_coco(tmp_path, "train", coco(10))
    size = CocoOptions.size_of(str(tmp_path), {"keep_images_without_boxes": True}, 0)
    assert (size.units, size.has_validation) == (10, False)
    typed = ("task=coco", "task.ghost_size=null", f"data.path={tmp_path}", "task.image_size=96")
    built = build_task(compose_config(*typed, "data.validation_examples=4"))
    assert built.facts["validation_images"] == 4
    with pytest.raises(DataError, match=r"data\.validation_examples=null: .* of its 10 "):
        build_task(compose_config(*typed))
    write_coco(tmp_path, "val", coco(4, first=10))
    assert CocoOptions.size_of(str(tmp_path), {"keep_images_without_boxes": True}, 0).has_validation
    with pytest.raises(ConfigError, match=r"data\.validation_examples=4: .* has a validation split"):
        build_task(compose_config(*typed, "data.validation_examples=4"))


def test_the_size_of_text_is_told_from_files_rows_and_lines(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("four words of text\n" * 100)
    size = text(tmp_path)
    assert (size.units, size.examples) == (5, 5 * 1900 // 3 // 64)
    (tmp_path / "5.txt").write_text("\n \n" * 50)  # which are no documents
    assert (text(tmp_path).units, text(tmp_path, lines=True).units) == (5, 500)
    rows = tmp_path / "rows"
    rows.mkdir()
    parquet.write_table(pa.table({"text": ["a"] * 7}), rows / "train-0.parquet")
    parquet.write_table(pa.table({"text": ["b"]}), rows / "test-0.parquet")
    size = text(rows)
    assert (size.units, size.has_validation) == (7, True)
    assert text(tmp_path / "0.txt").units == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("task=imagenet", "scale=images", "data.path=null"), "data.path: missing"),
        (("scale=images", "data.path=x"), "scale: task digits does not support it"),
        (("task=imagenet", "scale=images", "data.path=./nowhere/at/all"), "data.path=./nowhere/at/all: "),
    ],
)
def test_what_has_no_size_is_one_message(
    compose_config: Compose, typed: tuple[str, ...], message: str
) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException, ConfigError)) as caught:
        compose_config(*typed)
    assert explain(caught.value).startswith(message)


def test_the_chosen_values_are_one_line() -> None:
    plain = {"batch_size": 32, "max_fresh_examples": 5720, "echo": {"shuffle_buffer": 143}}
    plain["evaluate"] = {"every_fresh_examples": 286}
    assert size_defaults.describe(plain) == (
        "scale: batch_size=32, echo.shuffle_buffer=143, evaluate.every_fresh_examples=286, "
        "max_fresh_examples=5720"
    )
