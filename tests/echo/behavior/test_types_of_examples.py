"""Types of examples and sources: values, types and counts stay the same."""

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from adaecho import EchoLoader
from adaecho.echo.memory.pytree import collate, duplicate
from tests.echo.others import plain
from tests.echo.sources import IDS, VARIANTS, AddNoise, Dataset, example, labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_may_have_types_that_numpy_lacks(dtype: torch.dtype) -> None:
    rows = torch.arange(6).reshape(3, 2)
    for source in (rows.to(dtype), TensorDataset(rows.to(dtype), torch.arange(3))):
        batch = next(iter(EchoLoader(source, 3, order="sequential")))
        found = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert found.dtype == dtype
        assert found.float().tolist() == rows.tolist()


LENGTH = 23


def library() -> Any:
    return pytest.importorskip("datasets", reason="pip install '.[trainers]'")


def hugging_face() -> Any:
    examples = [example(row) for row in range(LENGTH)]
    return library().Dataset.from_dict({name: [one[name] for one in examples] for name in ("x", "label")})


def hugging_face_stream() -> Any:
    return hugging_face().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6)


SOURCES: dict[str, Callable[[], Any]] = {
    "hugging_face": hugging_face,
    "hugging_face of torch": lambda: hugging_face().with_format("torch"),
    "hugging_face stream": hugging_face_stream,
    "hugging_face stream of torch": lambda: hugging_face_stream().with_format("torch"),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_epoch_of_hugging_face_data_resumes_exactly(kind: str, num_workers: int) -> None:
    given: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 5}
    loader, resumed = (
        EchoLoader(SOURCES[kind](), 4, epochs=1, num_workers=workers, **given) for workers in (num_workers, 0)
    )
    with loader, resumed:
        for number in range(1, 3):
            passed, states = [], []
            for batch in loader:
                rows = torch.as_tensor(batch["label"])
                x = torch.stack(batch["x"], dim=1) if isinstance(batch["x"], list) else batch["x"]
                assert torch.equal(x.double(), torch.stack([rows, -rows], dim=1).double())
                passed.append(rows.tolist())
                states.append(loader.state_dict())
            assert sorted(row for batch in passed for row in batch) == sorted([*range(LENGTH)] * 2)
            assert loader.fresh_examples == number * LENGTH
            for position, state in enumerate(states[:-1], start=1):
                resumed.load_state_dict(state)
                assert labels(resumed, 2) == passed[position : position + 2]


tv_tensors = pytest.importorskip("torchvision.tv_tensors")
v2 = pytest.importorskip("torchvision.transforms.v2")

WIDTH = 8


def detection(row: int) -> dict[str, Any]:
    """An image whose columns count up, its mask, and 1 to 3 boxes at the left."""
    columns = torch.arange(WIDTH, dtype=torch.uint8).expand(6, WIDTH).clone()
    boxes = torch.tensor([[1, 1, 3, 4]] * (1 + (row // 8) % 3))
    return {
        "image": tv_tensors.Image(columns.expand(3, 6, WIDTH).clone()), "mask": tv_tensors.Mask(columns),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(6, WIDTH)), "row": row,
    }  # fmt: skip


def flip_half(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    flipped: dict[str, Any] = v2.RandomHorizontalFlip(float(rng.random() < 0.5))(example)
    return flipped


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=IDS[::3])
def test_tv_tensors_are_augmented_together(variant: Any, num_workers: int) -> None:
    common: dict[str, Any] = {"augment": flip_half, "collate": list, "shuffle_buffer": 8, **variant}
    flips = 0
    with EchoLoader(Dataset(64, detection), 4, num_workers=num_workers, **common) as loader:
        for batch in islice(loader, 32):
            for one in batch:
                flipped = int(one["image"][0, 0, 0]) == WIDTH - 1
                flips += flipped
                assert (int(one["mask"][0, 0]) == WIDTH - 1) == flipped
                assert one["boxes"][:, 0].tolist() == [WIDTH - 3 if flipped else 1] * len(one["boxes"])
                assert types(one) == types(detection(0))
    assert 32 < flips < 96


class Pair(NamedTuple):
    x: Any
    y: Any


class Noted(namedtuple("Noted", "x y")):
    note = "none"


def with_note(row: int) -> Any:
    made = Noted(np.full(2, row), row)
    made.note = f"row {row}"
    return made


EXAMPLES: dict[str, Any] = {
    "ordered dict": lambda row: OrderedDict(x=np.full(2, row), y=row),
    "named tuple": lambda row: Pair(np.full(2, row), row),
    "subclass of a named tuple": with_note,
    "masked array": lambda row: {"x": np.ma.masked_equal([row, 3], 3), "y": row},
    "image": lambda row: {"x": tv_tensors.Image(torch.full((3, 2, 2), row))},
}


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [types(part) for part in value.values()]
    return (type(value), [types(part) for part in value]) if isinstance(value, tuple | list) else type(value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=IDS[::3])
def test_augment_and_collate_receive_the_types_of_the_dataset(
    variant: dict[str, Any], kind: str, num_workers: int
) -> None:
    seen = []

    def augment(example: Any, rng: Any) -> Any:  # noqa: ARG001
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
def test_collate_equals_default_collate_and_a_duplicate_keeps_the_class(kind: str) -> None:
    examples = [EXAMPLES[kind](row) for row in range(4)]
    expected, batch = default_collate(examples), collate(examples)
    assert types(batch) == types(expected)
    assert plain(batch) == plain(expected)
    assert types(duplicate(examples[3])) == types(copy.deepcopy(examples[3])) == types(examples[3])


def image_example(row: int) -> dict[str, Any]:
    return {"image": pytest.importorskip("PIL.Image").new("RGB", (2, 2)), "label": row}


def test_an_image_that_cannot_be_collated_is_an_error_with_a_remedy() -> None:
    with pytest.raises(TypeError) as raised:
        next(iter(EchoLoader(Dataset(4, image_example), 2, order="sequential")))
    notes = "\n".join(raised.value.__notes__)
    assert "convert in decode= or augment=, e.g. numpy.asarray(image), of equal shape; or pass" in notes
    assert "while collating 2 examples, from example 0 of Dataset" in notes
    assert "differ" not in notes
    with pytest.raises(ValueError, match=r"block needs numeric examples of equal shape.*convert in decode="):
        next(iter(EchoLoader(Dataset(4, image_example), 2, augment=AddNoise())))
