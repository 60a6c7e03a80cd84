"""Tasks coco and scenes on tiny data: training, bad images, and mistakes."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from adaecho.errors import ConfigError, DataError, ExampleError, with_notes
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d
from adaecho.tasks import build_task
from adaecho.tasks.detection import decode_detection
from adaecho.training.loader import make_loader
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.files import coco as content
from tests.datasets.files import write_coco
from tests.helpers import metrics
from tests.needs import first_form

TINY_COCO = (
    "task=coco", "task.image_size=64", "task.ghost_size=2", "batch_size=4", "echo.shuffle_buffer=4",
    "data.num_workers=0", "evaluate.batch_size=4", "evaluate.every_fresh_examples=8", "max_fresh_examples=24",
    "schedule.warmup_epochs=1", "schedule.first_milestone_epochs=2", "schedule.milestone_gap_epochs=1",
    "precision=float32", "target.value=null", "optimizer.learning_rate=0.0003",
)  # fmt: skip
TINY_SCENES = (
    "task=scenes", "task.training_scenes=64", "data.validation_examples=16", "batch_size=16",
    "echo.shuffle_buffer=32", "precision=float32",
)  # fmt: skip


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Twelve training and four validation images of two categories."""
    top = tmp_path / "coco"
    write_coco(top, "train", content(12))
    write_coco(top, "val", content(4, first=20))
    return top


@pytest.mark.parametrize("echo", first_form("example_before_augmentation", also=["none"]))
def test_coco_trains_and_reports_by_category(
    compose_config: Compose, coco: Path, tmp_path: Path, echo: str
) -> None:
    factor = [] if echo == "none" else ["echo.factor=2"]
    config = compose_config(
        *TINY_COCO, f"data.path={coco}", f"echo={echo}", *factor, "task.metrics_per_category=true"
    )
    summary = run_trial(config, tmp_path / "run")
    assert summary["status"] == "budget_spent"
    assert summary["steps"] > (6 if factor else 4)
    first, *_, line = metrics(tmp_path / "run")
    assert {"mAP", "mAP_50", "AP_50/cat", "AP_50/dog"} <= line.keys()
    assert "mAP_large" not in line  # none of the boxes is so large
    assert line["train_loss"] < first["train_loss"]


def test_coco_has_ghost_batch_norm_and_padded_batches(compose_config: Compose, coco: Path) -> None:
    config = compose_config(*TINY_COCO, f"data.path={coco}", "data.num_workers=2")
    task = build_task(config)
    assert len(task.source) == 12
    model = task.build_model()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {(type(norm), norm.ghost_size) for norm in norms} == {(GhostBatchNorm2d, 2)}
    batch = next(iter(make_loader(config, task, torch.device("cpu"))))
    assert (batch["image"].shape, batch["image"].dtype) == ((4, 64, 64, 3), torch.uint8)
    assert batch["boxes"].shape[0::2] == (4, 4)
    loss, weight = task.loss(model, batch)
    assert loss.requires_grad
    assert weight >= 1


def test_a_turned_image_is_a_bad_example(compose_config: Compose, coco: Path, tmp_path: Path) -> None:
    listed = content(12)
    first = listed["images"][0]
    first["height"], first["width"] = first["width"], first["height"]
    write_coco(coco, "train", listed)
    config = compose_config(*TINY_COCO, f"data.path={coco}", "data.max_bad_examples=0")
    with pytest.raises(DataError, match="was it rotated or resized after annotation") as raised:
        run_trial(config, tmp_path / "run")
    assert "train2017/0.jpg" in with_notes(raised.value)


def test_corrupt_validation_images_count_against_the_budget(
    compose_config: Compose, coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("21.jpg", "23.jpg"):
        (coco / "val2017" / name).write_bytes(b"")
    config = (*TINY_COCO, f"data.path={coco}")
    with pytest.raises(
        DataError, match=r"(?s)max_bad_examples=1 .*21\.jpg: contains no.*23\.jpg: contains no"
    ):
        run_trial(compose_config(*config, "data.max_bad_examples=1"), tmp_path / "strict")
    summary = run_trial(compose_config(*config, "data.max_bad_examples=2"), tmp_path / "run")
    assert summary["status"] == "budget_spent"
    assert capsys.readouterr().err.count("bad example skipped: validation, ") == 2, "once for each image"


REFUSED = {
    "data.path=null": "needs a folder with annotations/",
    "task=scenes": "task scenes generates its images",
    "batch_size=6 task.ghost_size=4": "task.ghost_size=4: does not divide the 6",
    "adascale=on adascale.num_gradients_to_accumulate=2 task.ghost_size=4": "in 2 micro-batches",
    "task.image_size=32": "task.image_size",
    "task.ghost_statistics=mean": "task.ghost_statistics",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_mistakes_are_refused(compose_config: Compose, coco: Path, overrides: str) -> None:
    base = TINY_SCENES if "task=scenes" in overrides else TINY_COCO
    with pytest.raises((ConfigError, DataError), match=REFUSED[overrides]):
        build_task(compose_config(*base, f"data.path={coco}", *overrides.split()))


def test_a_validation_split_without_boxes_is_refused(compose_config: Compose, coco: Path) -> None:
    write_coco(coco, "val", {**content(4, first=20), "annotations": []})
    with pytest.raises(DataError, match="no image of the training or of the validation split has a box"):
        build_task(compose_config(*TINY_COCO, f"data.path={coco}"))


def test_scenes_learn(compose_config: Compose, tmp_path: Path) -> None:
    config = compose_config(
        *TINY_SCENES, "task.training_scenes=16", "max_steps=30", "target.value=null",
        "evaluate.every_fresh_examples=160", "schedule.warmup_steps=5",
    )  # fmt: skip
    run_trial(config, tmp_path / "run")
    first, *_, last = metrics(tmp_path / "run")
    assert last["train_loss"] < 0.7 * first["train_loss"]


def test_scenes_are_evaluated_on_max_examples(compose_config: Compose) -> None:
    task = build_task(compose_config(*TINY_SCENES, "evaluate.max_examples=3"))
    model = task.build_model().eval()
    seen: list[int] = []
    model.register_forward_hook(lambda _, __, outputs: seen.append(len(outputs[0])))
    with torch.inference_mode():
        task.evaluate(model, "validation", device=torch.device("cpu"))
    assert seen == [3]


def test_images_are_decoded_in_the_orientation_of_their_annotations() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    stream = io.BytesIO()
    Image.new("RGB", (40, 30)).save(stream, "JPEG", exif=exif)
    height, width = 30, 40
    example = {"image": stream.getvalue(), "boxes": None, "labels": None}
    for size in ((height, width), (width, height)):
        assert decode_detection({**example, "size": size})["image"].shape[:2] == size
    with pytest.raises(
        ExampleError, match=rf"width of {height} and a height of {width} pixels.* say 7 and 9"
    ):
        decode_detection({**example, "size": (9, 7)})
