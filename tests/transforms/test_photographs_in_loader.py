"""Encoded images inside EchoLoader."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop
from tests.datasets.files import Jpegs, encoded


def batches(number: int = 6, length: int = 23, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    settings = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 5, **arguments}
    augment = RandomResizedCrop(16, brightness=0.4, contrast=0.4, saturation=0.4)
    with EchoLoader(Jpegs(length), 4, decode=DecodeImage(), augment=augment, **settings) as loader:
        return list(islice(loader, number))


def assert_equal(ones: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one["image"].dtype == torch.uint8
        assert one["image"].shape == (4, 16, 16, 3)
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])


@pytest.mark.parametrize(
    ("echo", "num_workers", "place"),
    [
        *(
            ("example_before_augmentation", workers, place)
            for workers in (1, 8)
            for place in ("decoded", "encoded")
        ),
        ("none", 0, "encoded"),
        ("batch", 0, "encoded"),
    ],
)
def test_batches_are_the_same_for_any_workers_and_place(echo: str, num_workers: int, place: str) -> None:
    kind: dict[str, Any] = {"echo": echo, "factor": 1 if echo == "none" else 2}
    assert_equal(batches(**kind), batches(**kind, num_workers=num_workers, buffer_format=place))


@pytest.mark.parametrize("place", ["decoded", "encoded"])
def test_decode_receives_the_augment_that_alone_reads_its_images(place: str) -> None:
    class Decode(DecodeImage):
        def for_augment(self, augment: Any) -> Any:
            given.append(augment)
            return DecodeImage()

    given: list[Any] = []
    augment = RandomResizedCrop(16)
    with EchoLoader(Jpegs(9), 4, decode=Decode(), augment=augment, buffer_format=place) as loader:
        next(iter(loader))
    assert given == ([augment] if place == "encoded" else [])


def loader_of(
    number: int, batch_size: int = 4, damaged: tuple[int, ...] = (), **arguments: Any
) -> EchoLoader:
    settings = {"decode": DecodeImage(), "augment": RandomResizedCrop(16), **arguments}
    return EchoLoader(Jpegs(number, damaged), batch_size, **settings)


def test_repeats_are_augmented_from_a_read_only_image() -> None:
    image = DecodeImage()({"image": encoded(0)})["image"]
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 0
    with loader_of(1, 2, factor=2, echo="example_before_augmentation") as loader:
        first, second = next(iter(loader))["image"]
    assert not torch.equal(first, second)


def test_damaged_images_are_skipped_within_the_budget_and_named() -> None:
    lenient: dict[str, Any] = {"order": "sequential", "max_bad_examples": 2, "epochs": 1, "num_workers": 2}
    with loader_of(12, 5, damaged=(3, 7), **lenient) as loader:
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert labels == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
        assert [bad["index"] for bad in loader.bad_examples] == [3, 7]
        assert "example 3 of Jpegs" in loader.bad_examples[0]["origin"]
        assert "truncated" in loader.bad_examples[0]["error"]


@pytest.mark.parametrize("source", ["map", "stream"])
def test_a_damaged_image_after_the_buffer_stops_with_its_origin(source: str) -> None:
    jpegs = Jpegs(6, damaged=(4,))
    given: Any = jpegs if source == "map" else lambda: iter([jpegs[row] for row in range(6)])
    settings = {"decode": DecodeImage(), "augment": RandomResizedCrop(16), "buffer_format": "encoded"}
    with (
        EchoLoader(given, 3, order="sequential", **settings) as loader,
        pytest.raises(ValueError, match="truncated") as raised,
    ):
        list(islice(loader, 2))
    assert "while decoding example 4" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer_format": "raw"}, "buffer_format='raw': must be one of"),
        ({"decode": None}, "only with decode="),
        ({"echo": "example_after_augmentation"}, "no augmentation before the echo"),
        ({"batch_size": None}, "only with decode=, batch_size="),
    ],
)
def test_settings_that_exclude_encoded_buffers_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"batch_size": 2, "buffer_format": "encoded", "decode": DecodeImage(), **arguments}
    with pytest.raises(ValueError, match=message):
        EchoLoader(Jpegs(3), **given)


@pytest.mark.parametrize(
    "arguments", [{"size": 0}, {"scale": (0.5, 0.2)}, {"ratio": (0, 1)}, {"contrast": 1.5}]
)
def test_wrong_attributes_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}="):
        RandomResizedCrop(**arguments)


def test_tuples_and_bare_images_keep_their_type() -> None:
    rng = np.random.default_rng(0)
    content = encoded(0)
    image, label = RandomResizedCrop(8, field=0)(DecodeImage(0)((content, 7)), rng)
    assert (image.shape, label) == ((8, 8, 3), 7)
    assert RandomResizedCrop(8, field=None)(DecodeImage(None)(content), rng).shape == (8, 8, 3)
