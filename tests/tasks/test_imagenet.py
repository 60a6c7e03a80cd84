"""Task imagenet on tiny generated images, in every layout and over http."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaecho.datasets.storage import FILES
from adaecho.errors import ConfigError, DataError, FolderError, with_notes
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d
from adaecho.ranks import DistributedContext
from adaecho.tasks import build_task
from adaecho.tasks.base import digest_of_classes
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.files import write_folders, write_labeled

TINY = (
    "task=imagenet", "task.model=test_resnet", "task.image_size=32", "task.ghost_size=2", "batch_size=4",
    "echo.shuffle_buffer=4", "data.num_workers=0", "evaluate.batch_size=4", "evaluate.every_fresh_examples=8",
    "max_fresh_examples=16", "precision=float32", "target.value=null",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("layout", ["parquet", "folders", "tar"])
def test_it_trains_on_every_layout(compose_config: Compose, tmp_path: Path, layout: str) -> None:
    write_labeled(layout, tmp_path / "data")
    classes = ["task.num_classes=3"] if layout == "tar" else []
    config = compose_config(*TINY, f"data.path={tmp_path / 'data'}", *classes)
    summary = run_trial(config, tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("budget_spent", 3)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= line["accuracy"] <= 1
    assert line["cross_entropy"] > 0


def test_images_are_held_out_if_there_is_no_validation_split(compose_config: Compose, tmp_path: Path) -> None:
    write_folders(tmp_path, {".": range(9)})
    with pytest.raises(DataError, match=r"data\.validation_examples=null: .* of its 9 training"):
        build_task(compose_config(*TINY, f"data.path={tmp_path}"))
    task = build_task(compose_config(*TINY, f"data.path={tmp_path}", "data.validation_examples=3"))
    assert {key: value for key, value in task.facts.items() if key != FILES} == {
        **{"training_images": 6, "validation_images": 3, "classes": 3},
        **digest_of_classes(["class0", "class1", "class2"]),
    }


@pytest.mark.parametrize("most", ["null", "2"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_validation_shards_are_split_over_ranks(
    compose_config: Compose, tmp_path: Path, most: str, world: int
) -> None:
    write_labeled("tar", tmp_path)
    more = (f"data.path={tmp_path}", "task.num_classes=3", f"evaluate.max_examples={most}")
    task = build_task(compose_config(*TINY, *more))
    assert {"training_images", "validation_images"}.isdisjoint(task.facts)
    counts = []
    for rank in range(world):
        ranks = _Rank(rank, world)
        for _ in range(2):  # read in each evaluation
            task.evaluate(_FirstClass(), "validation", device=torch.device("cpu"), ranks=ranks)
        counts.append(ranks.counted)
    assert sum(counts) == (3 if most == "null" else 2)


class _Rank(DistributedContext):
    """One of several, whose sums are its own."""

    def sums(self, numbers: Sequence[float]) -> list[float]:
        self.counted = numbers[-1]
        return [*numbers[:-1], 1.0]


def test_a_model_may_have_more_classes_than_the_data(compose_config: Compose, tmp_path: Path) -> None:
    write_labeled("folders", tmp_path)
    more = ("task.num_classes=9", "evaluate.max_examples=2")
    task = build_task(compose_config(*TINY, f"data.path={tmp_path}", *more))
    assert task.facts["validation_images"] == 2, "a part of the split"
    norms = [one for one in task.build_model().modules() if isinstance(one, torch.nn.BatchNorm2d)]
    assert [type(norm) for norm in norms] == [GhostBatchNorm2d] * 15

    class Eighth(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(9)[torch.full((len(images),), 8)]

    assert task.pictures is not None
    shown = task.pictures(Eighth(), 2, torch.device("cpu"))
    assert [picture.title.split(",")[0] for picture in shown] == ["8", "8"]


@pytest.mark.parametrize(
    ("layout", "overrides", "message"),
    [
        ("folders", "data.validation_examples=3", "has a validation split"),
        ("tar", "data.path=data/train-0.tar task.num_classes=3", r"shards with task\.validation_path="),
        ("folders", "data.path=a.tar task.validation_path=data task.num_classes=3", r"a\.tar: cannot be"),
        ("tar", "", r"task\.num_classes=null"),
        ("parquet", "task.num_classes=2", "num_classes=2: data has 3"),
        ("folders", "task.validation_path=/no/folder", r"^task\.validation_path=/no/folder: "),
        ("folders", "task.model=resnet5", "timm has no such model"),
        ("folders", "task.model=vgg11", "the model has no batch norm"),
        ("folders", "batch_size=5", "ghost_size=2: does not divide the 5 examples"),
        ("folders", "task.min_crop_area=0", r"task\.min_crop_area=0"),
    ],
)
def test_mistakes_are_refused_before_training(
    compose_config: Compose, layout: str, overrides: str, message: str
) -> None:
    write_labeled(layout, Path("data"))
    with pytest.raises((ConfigError, DataError), match=message):
        build_task(compose_config(*TINY, "data.path=data", *overrides.split())).build_model()


@pytest.mark.parametrize("place", ["encoded", "decoded"])
def test_corrupt_images_are_skipped_within_the_budget_and_named_beyond(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_folders(tmp_path / "data", {"train": range(9), "val": range(9, 15)})
    train, *val = (
        tmp_path / "data" / name
        for name in ("train/class1/001.jpg", "val/class0/009.jpg", "val/class2/011.jpg")
    )
    for file in (train, *val):
        file.write_bytes(file.read_bytes()[:200])
    config = (
        *TINY,
        f"data.path={tmp_path / 'data'}",
        f"echo.buffer_format={place}",
        "evaluate.max_examples=null",
    )
    summary = run_trial(compose_config(*config, "data.max_bad_examples=5"), tmp_path / "run")
    assert (summary["status"], summary["skipped_examples"]) == ("budget_spent", 1)
    printed = capsys.readouterr().err
    for file in (train, *val):
        assert len(re.findall(f"warning: bad example skipped: (?:validation, )?{file}: ", printed)) == 1
    with pytest.raises(DataError, match=f"(?s)max_bad_examples=1 .*{val[0]}: .*{val[1]}: "):
        run_trial(compose_config(*config, "data.max_bad_examples=1"), tmp_path / "validation")
    for file in val:
        file.unlink()
    with pytest.raises(DataError, match="not a complete image") as raised:
        run_trial(compose_config(*config), tmp_path / "strict")
    assert str(train) in with_notes(raised.value)
    assert "data.max_bad_examples of a run" in with_notes(raised.value)
    assert str(train) in json.loads((tmp_path / "strict" / "summary.json").read_text())["error"]


def test_a_run_starts_from_weights_and_does_not_resume_with_others(
    compose_config: Compose, tmp_path: Path
) -> None:
    write_labeled("folders", tmp_path / "data")
    run_trial(compose_config(*TINY, f"data.path={tmp_path / 'data'}"), tmp_path / "first")
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((tmp_path / "first" / "model" / "final.safetensors").read_bytes())
    on = (*TINY, f"data.path={tmp_path / 'data'}", f"task.pretrained={weights}")
    config = compose_config(*on, "optimizer.learning_rate=1e-12", "max_fresh_examples=8")
    summary = run_trial(config, tmp_path / "run")
    assert summary["status"] == "budget_spent"
    begun, ended = (
        load_file(folder / "model" / "final.safetensors")["1.conv1.0.weight"]
        for folder in (tmp_path / "first", tmp_path / "run")
    )
    assert torch.allclose(begun, ended, atol=1e-6)
    other = load_file(weights)
    save_file({name: value.double() for name, value in other.items()}, weights)
    with pytest.raises(FolderError, match=r"made with files_sha256"):
        run_trial(compose_config(*on, "optimizer.learning_rate=1e-12"), tmp_path / "run")


def test_max_examples_draws_from_all_classes(compose_config: Compose, tmp_path: Path) -> None:
    write_folders(tmp_path, {"train": range(9), "val": range(9, 39)})
    part = (f"data.path={tmp_path}", "evaluate.max_examples=10")  # of three classes, ten images in each
    wrong = []
    for _ in range(2):
        task = build_task(compose_config(*TINY, *part))
        assert task.pictures is not None
        wrong.append([one.title for one in task.pictures(_FirstClass(), 10, torch.device("cpu"))])
    assert set(wrong[0]) == {"class0, true class1", "class0, true class2"}
    assert wrong[0] == wrong[1], "the same each time"


class _FirstClass(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[torch.zeros(len(images), dtype=torch.int64)]
