"""Examples that hold more than plain arrays keep it, whatever they are chunked and stacked with."""

import copy
import itertools
import json
from collections import OrderedDict, namedtuple
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from adaecho import EchoLoader
from adaecho.echo.memory.pytree import collate, duplicate
from tests.echo.others import plain
from tests.echo.sources import IDS, VARIANTS, AddNoise, Dataset

tv_tensors = pytest.importorskip("torchvision.tv_tensors")
v2 = pytest.importorskip("torchvision.transforms.v2")

WIDTH = 8


def detection(row: int, count: int = 2) -> dict[str, Any]:
    """A picture whose columns count up, its mask, and boxes at the left."""
    columns = torch.arange(WIDTH, dtype=torch.uint8).expand(6, WIDTH).clone()
    boxes = torch.tensor([[1, 1, 3, 4]] * count)
    return {
        "image": tv_tensors.Image(columns.expand(3, 6, WIDTH).clone()), "mask": tv_tensors.Mask(columns),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(6, WIDTH)), "row": row,
    }  # fmt: skip


def ragged_detection(row: int) -> dict[str, Any]:
    return detection(row, 1 + (row // 8) % 3)


def flip_half(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    flipped: dict[str, Any] = v2.RandomHorizontalFlip(float(rng.random() < 0.5))(example)
    return flipped


@pytest.mark.parametrize("make", [ragged_detection, detection], ids=["ragged", "even"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_a_flip_turns_pictures_masks_and_boxes_alike(variant: Any, num_workers: int, make: Any) -> None:
    common: dict[str, Any] = {"augment": flip_half, "collate": list, "shuffle_buffer": 8, **variant}
    flips = 0
    with EchoLoader(Dataset(64, make), 4, num_workers=num_workers, **common) as loader:
        for batch in islice(loader, 32):
            for one in batch:
                flipped = int(one["image"][0, 0, 0]) == WIDTH - 1
                flips += flipped
                assert (int(one["mask"][0, 0]) == WIDTH - 1) == flipped
                assert one["boxes"][:, 0].tolist() == [WIDTH - 3 if flipped else 1] * len(one["boxes"])
                assert types(one) == types(make(0))
    assert 32 < flips < 96


class Pair(NamedTuple):
    x: Any
    y: Any


# An instance of a subclass holds more than its fields.
class Noted(namedtuple("Noted", "x y")):
    note = "none"


class Bag(dict[str, Any]):
    pass


def noted(row: int) -> Any:
    made = Noted(np.full(2, row), row)
    made.note = f"row {row}"
    return made


EXAMPLES: dict[str, Any] = {
    "ordered dict": lambda row: OrderedDict(x=np.full(2, row), y=row),
    "subclass of dict": lambda row: Bag(x=np.full(2, row), y=row),
    "named tuple": lambda row: Pair(np.full(2, row), row),
    "subclass of a named tuple": noted,
    "masked array": lambda row: {"x": np.ma.masked_equal([row, 3], 3), "y": row},
    "array subclass": lambda row: {"x": np.full(2, row).view(np.recarray), "y": row},
    "parameter": lambda row: {"x": torch.nn.Parameter(torch.full((2,), float(row))), "y": row},
    "ordered dict within": lambda row: {"x": [OrderedDict(y=row)]},
    "image": lambda row: {"x": tv_tensors.Image(torch.full((3, 2, 2), row))},
}


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [types(part) for part in value.values()]
    return (type(value), [types(part) for part in value]) if isinstance(value, tuple | list) else type(value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=IDS[::3])
def test_augment_and_collate_get_what_the_dataset_gave(
    variant: dict[str, Any], kind: str, num_workers: int
) -> None:
    seen = []

    def augment(example: Any, rng: Any) -> Any:  # noqa: ARG001 (the loader gives it)
        seen.append(types(example))
        return example

    source = Dataset(12, EXAMPLES[kind])
    expected = types(EXAMPLES[kind](0))
    with EchoLoader(
        source, 3, augment=augment, collate=list, shuffle_buffer=4, num_workers=num_workers, **variant
    ) as loader:
        batches = list(islice(loader, 6))
    assert all(one == expected for one in seen)
    assert all(types(one) == expected for batch in batches for one in batch)
    if kind == "subclass of a named tuple":
        assert all(one.note == f"row {one.y}" for batch in batches for one in batch)
    if kind == "masked array":
        assert all(one["x"].mask.tolist() == [one["y"] == 3, True] for batch in batches for one in batch)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_default_batch_is_that_of_torch_and_a_copy_keeps_the_class(kind: str) -> None:
    examples = [EXAMPLES[kind](row) for row in range(4)]
    expected, batch = default_collate(examples), collate(examples)
    assert types(batch) == types(expected)
    assert plain(batch) == plain(expected)
    assert types(duplicate(examples[3])) == types(copy.deepcopy(examples[3])) == types(examples[3])


def pictures(row: int) -> dict[str, Any]:
    return {"image": pytest.importorskip("PIL.Image").new("RGB", (2, 2)), "label": row}


def test_a_picture_in_a_batch_is_named_with_what_to_do() -> None:
    with pytest.raises(TypeError) as raised:
        next(iter(EchoLoader(Dataset(4, pictures), 2, order="stored")))
    notes = "\n".join(raised.value.__notes__)
    assert "convert in decode= or augment=, e.g. numpy.asarray(image); or pass collate=" in notes
    assert "while collating 2 examples, from example 0 of Dataset" in notes
    assert "differ" not in notes
    with pytest.raises(ValueError, match=r"block needs examples of one shape.*convert in decode="):
        next(iter(EchoLoader(Dataset(4, pictures), 2, augment=AddNoise())))


def coco(folder: Path, **transforms: Any) -> Any:
    """Pictures whose columns grow brighter, each with as many boxes at the left as its number and one."""
    pytest.importorskip("pycocotools")
    library = pytest.importorskip("torchvision.datasets")
    columns = np.broadcast_to(np.arange(WIDTH, dtype=np.uint8)[:, None] * 20, (6, WIDTH, 3))
    for number in range(12):
        pytest.importorskip("PIL.Image").fromarray(columns).save(folder / f"{number}.png")
    sizes = [
        {"id": number, "file_name": f"{number}.png", "height": 6, "width": WIDTH} for number in range(12)
    ]
    box = {"bbox": [1, 1, 2, 3], "area": 6, "category_id": 1, "iscrowd": 0, "segmentation": []}
    of_picture = [number for number in range(12) for _ in range(number % 3 + 1)]
    boxes = [{"id": one, "image_id": number, **box} for one, number in enumerate(of_picture, start=1)]
    told = {"images": sizes, "annotations": boxes, "categories": [{"id": 1, "name": "box"}]}
    (folder / "boxes.json").write_text(json.dumps(told))
    dataset = library.CocoDetection(str(folder), str(folder / "boxes.json"), **transforms)
    return library.wrap_dataset_for_transforms_v2(dataset, target_keys=("boxes", "labels"))


@pytest.mark.filterwarnings("ignore:source. WrappedCocoDetection draws")
@pytest.mark.parametrize("where", ["augment", "transforms"])
def test_wrapped_detection_datasets(where: str, tmp_path: Path) -> None:
    flip = v2.RandomHorizontalFlip(0.5)
    given: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 4}
    flips: list[list[bool]] = []
    for num_workers in (0, 1):  # each thread has a process of its own, which takes seconds to start
        dataset = coco(tmp_path, **({"transforms": flip} if where == "transforms" else {}))
        given |= {"collate": list, "augment": flip if where == "augment" else None}
        flips.append([])
        with EchoLoader(dataset, 4, num_workers=num_workers, **given) as loader:
            for picture, target in itertools.chain(*islice(loader, 12)):
                flips[-1].append(picture.getpixel((0, 0))[0] > 60)
                assert type(target["boxes"]) is tv_tensors.BoundingBoxes
                left = WIDTH - 3 if flips[-1][-1] else 1
                assert target["boxes"][:, 0].tolist() == [left] * len(target["boxes"])
    assert flips[0] == flips[1]
    assert 8 < sum(flips[0]) < 40
