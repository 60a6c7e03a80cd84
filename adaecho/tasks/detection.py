"""What detection tasks share: SSD on uint8 images, its loss, and mean average precision over a split."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.errors import about_one_example
from adaecho.models.multibox import detect, multibox_loss
from adaecho.models.normalise import IMAGENET_MEAN, IMAGENET_STD, Normalise
from adaecho.models.ssd import SSD
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.average_precision import AveragePrecision, Found
from adaecho.tasks.base import Batch, LossAndWeight, Picture, Split
from adaecho.tasks.boxes import ResizeWithBoxes
from adaecho.tasks.images import read_batches
from adaecho.transforms.photographs import decode_image

_SHOWN_SCORE = 0.4


class Detector(nn.Module):
    """uint8 [N, S, S, 3] to class logits [N, A, C], box codes [N, A, 4] and the default boxes [A, 4]."""

    def __init__(self, ssd: SSD, *, channels_last: bool) -> None:
        super().__init__()
        self.normalise, self.ssd = Normalise(IMAGENET_MEAN, IMAGENET_STD, channels_last=channels_last), ssd

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, codes = self.ssd(self.normalise(images))
        return logits, codes, self.ssd.boxes


def detection_loss(model: nn.Module, batch: Batch) -> LossAndWeight:
    """The multibox loss of a padded batch, and how many default boxes matched; 1 if none did."""
    logits, codes, default_boxes = model(batch["image"])
    loss, positives = multibox_loss(logits, codes, batch["boxes"], batch["labels"], default_boxes)
    return loss, positives.clamp(min=1)


@about_one_example()
def decode_detection(example: dict[str, Any]) -> dict[str, Any]:
    """``decode`` for ``datasets.coco``: the example with ``image`` uint8 [H, W, 3], without ``size``.

    Raises:
        ExampleError: the bytes are no whole image, or it has another size than the annotations say.
    """
    height, width = example["size"]
    image = decode_image(example["image"], turned=False)  # as COCO's own were annotated, whatever EXIF says
    if image.shape[:2] != (height, width):
        image = decode_image(example["image"])
    if image.shape[:2] != (height, width):
        raise ValueError(
            f"the image has a width of {image.shape[1]} and a height of {image.shape[0]} pixels, its "
            f"annotations say {width} and {height}; was it turned or resized after it was annotated?"
        )
    return {"image": image, "boxes": example["boxes"], "labels": example["labels"]}


decode_detection.thread_safe = True  # type: ignore[attr-defined]


class DetectionValidation:
    """Mean average precision on images that are read anew each time.

    Args:
        images: ``DetectionImages``, or ``Scenes``.
        decode: of an example; None where its image is an array.
        per_category: as for ``AveragePrecision``.
        image_size: side of the model's input, in pixels.
        batch_size: images at once.
        threads: that decode and resize.
    """

    def __init__(
        self,
        images: Any,
        decode: Callable[[Any], Any] | None,
        *,
        per_category: bool,
        image_size: int,
        batch_size: int,
        threads: int,
    ) -> None:
        self._images, self._decode = images, decode or (lambda example: example)
        self._resize = ResizeWithBoxes(image_size)
        self._at_once = {"batch_size": batch_size, "threads": threads}
        self._precision = AveragePrecision(
            images.truths, images.sizes, images.categories, per_category=per_category
        )
        self.metrics = self._precision.metrics

    def __len__(self) -> int:
        return len(self._images)

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        *,
        device: torch.device,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> dict[str, float]:
        """The metrics of a model in eval mode; each rank looks at its share of the images."""
        assert split == "validation", "COCO's test split has no public boxes, and scenes have none"
        shares = ranks.gather_objects(self.found(model, device, ranks.share(len(self))))
        return self._precision.measure([found for share in shares for found in share])

    def found(self, model: nn.Module, device: torch.device, rows: Sequence[int]) -> list[Found]:
        """What a model finds in some images, in pixels of the images themselves."""
        found: list[Found] = []
        size = self._resize.size
        for part, inputs in read_batches(self._images, self._input, rows, **self._at_once):
            logits, codes, default_boxes = model(torch.from_numpy(np.stack(inputs)).to(device))
            for row, one in zip(part, detect(logits, codes, default_boxes, size), strict=True):
                height, width = self._images.sizes[row]
                boxes = one.boxes.cpu().numpy() * (np.array([width, height, width, height]) / size)
                found.append(Found(boxes, one.scores.cpu().numpy(), one.labels.cpu().numpy()))
        return found

    def pictures(self, model: nn.Module, number: int, device: torch.device) -> list[Picture]:
        """The first images with their true boxes, and the predicted ones of a probability of 0.4 or more."""
        rows = range(min(number, len(self)))
        return [
            self._picture(row, found)
            for row, found in zip(rows, self.found(model, device, rows), strict=True)
        ]

    def _picture(self, row: int, found: Found) -> Picture:
        truth, names, certain = (
            self._images.truths[row],
            self._images.categories,
            found.scores >= _SHOWN_SCORE,
        )
        columns = (found.boxes[certain], found.labels[certain], found.scores[certain])
        return Picture(
            self._decode(self._images[row])["image"],
            "",
            [
                (tuple(box), names[label - 1])
                for box, label in zip(truth.boxes.tolist(), truth.labels, strict=True)
            ],
            [
                (tuple(box), f"{names[label - 1]} {score:.2f}")
                for box, label, score in zip(*(column.tolist() for column in columns), strict=True)
            ],
        )

    def _input(self, example: dict[str, Any]) -> Any:
        return self._resize(self._decode(example))["image"]
