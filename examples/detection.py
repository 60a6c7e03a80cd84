"""Flip images and boxes together with torchvision's v2 transforms: ``python examples/detection.py``."""

from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from adaecho import EchoLoader


class Scenes(torch.utils.data.Dataset[dict[str, Any]]):
    """Random images with one to three boxes in the left half. A flip moves all boxes to the right half."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(row)
        corner = torch.randint(0, 10, (1 + row % 3, 2), generator=generator).float()
        boxes = torch.cat([corner, corner + 5], dim=1)
        return {
            "image": tv_tensors.Image(torch.rand(3, 32, 32, generator=generator)),
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 32)),
        }


def collate(examples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.stack([one["image"] for one in examples]), [one["boxes"] for one in examples]


def main() -> None:
    with EchoLoader(
        Scenes(),
        8,
        echo="example_before_augmentation",
        factor=2,
        shuffle_buffer=16,
        augment=v2.RandomHorizontalFlip(p=0.5),
        collate=collate,
        epochs=1,
    ) as loader:
        boxes = [box for _, targets in loader for box in targets]
        flipped = sum(bool((box[:, 0] > 16).all()) for box in boxes)
        print(f"{loader.fresh_examples} images read, {len(boxes)} trained on, {flipped} flipped with boxes")
        assert 0 < flipped < len(boxes)


if __name__ == "__main__":
    main()
