"""The tasks coco and scenes: detect objects with SSD.

The task coco uses COCO 2017 (paper, Table 1) or other data in COCO's format. As in MLPerf, it trains a
ResNet-34 from scratch on images of 300 x 300 pixels. The task scenes uses generated images of handwritten
digits, needs no download and trains in seconds on one core.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.coco import read_both
from adaecho.datasets.scenes import SIDE, make_scenes
from adaecho.datasets.split import refuse_number, split_indices
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import ConfigError, DataError, about_one_example
from adaecho.models.images import IMAGENET_MEAN, IMAGENET_STD, Normalize
from adaecho.models.ssd import SSD, Detections, detect, multibox_loss, small_ssd, ssd_resnet34
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.average_precision import AveragePrecision, Found
from adaecho.tasks.base import Batch, LossAndWeight, Metrics, Picture, Split, Task, digest_of_classes
from adaecho.tasks.boxes import ResizeWithBoxes, SSDAugment, collate_boxes
from adaecho.tasks.digits import NUM_CLASSES, read_digits
from adaecho.tasks.images import EvaluationBatches
from adaecho.tasks.options import CocoOptions, ScenesOptions
from adaecho.transforms.photographs import decode_image

Options = CocoOptions | ScenesOptions
Parts = tuple[Callable[[], SSD], "Validation", dict[str, Any]]
"""What differs between the tasks: how to build the SSD, the validation split, other fields of ``Task``."""
Decode = Callable[[dict[str, Any]], dict[str, Any]]

_SHOWN_SCORE = 0.4
_VALIDATION_GLYPHS = 360


def build(config: Config, options: Options) -> Task:
    """Build the task coco or scenes, depending on the class of ``options``."""
    options.check_batches(config)
    if isinstance(options, CocoOptions):
        build_ssd, validation, others = _coco(config, options)
    else:
        build_ssd, validation, others = _scenes(config, options)
    return Task(
        name=options.name,
        metrics=validation.metrics,
        collate=collate_boxes,
        build_model=lambda: options.with_ghosts(Detector(build_ssd(), channels_last=config.channels_last)),
        loss=detection_loss,
        evaluate=validation.evaluate,
        pictures=validation.pictures,
        **others,
    )


def _coco(config: Config, options: CocoOptions) -> Parts:
    path, number = config.data.path, config.data.validation_examples
    if path is None:
        raise DataError("data.path: task coco needs a folder with annotations/ and images in COCO format")
    bad = BadExampleBudget(config.data.max_bad_examples)
    train, held_out, lists = read_both(path, bad)
    files = [*lists, *train.files, *(() if held_out is None else held_out.files)]
    if held_out is None:
        rows, out = split_indices(len(train), number, seed=config.data.split_seed)
        train, held_out = train.take(np.sort(rows).tolist()), train.take(out.tolist())
    else:
        refuse_number(number, path)
    held_out = held_out.take(range(len(held_out))[: config.evaluate.max_examples])
    if not options.keep_images_without_boxes:
        train = train.with_boxes()
    if not len(train) or not len(held_out.with_boxes()):
        raise DataError(f"data.path={path}: no image of the training or of the validation split has a box")
    facts = {"training_images": len(train), "validation_images": len(held_out)}
    size, num_classes = options.image_size, len(train.categories) + 1
    per_category = options.metrics_per_category
    validation = Validation(held_out, decode_detection, size, config, per_category=per_category)
    others = {
        "source": train,
        "decode": decode_detection,
        "augment": SSDAugment(size, expand=options.expand),
        "skipped_examples": len(bad.found),
        "files": files,
        "facts": {**facts, **digest_of_classes(train.categories)},
    }
    return lambda: ssd_resnet34(num_classes, size), validation, others


def _scenes(config: Config, options: ScenesOptions) -> Parts:
    """Generate the scenes. The validation scenes contain only digits that training never uses."""
    number, seed = config.data.validation_examples, config.data.split_seed
    if config.data.path is not None:
        raise ConfigError(f"data.path={config.data.path}: task scenes generates its images; set it to null")
    if not number:
        raise ConfigError(f"data.validation_examples={number}: set the number of scenes for validation")
    number = min(number, config.evaluate.max_examples or number)
    digits = read_digits()
    glyphs, labels = digits["image"][..., 0], digits["label"]
    cut = len(glyphs) - _VALIDATION_GLYPHS
    train = make_scenes(glyphs[:cut], labels[:cut], options.training_scenes, seed=2 * seed)
    held_out = make_scenes(glyphs[cut:], labels[cut:], number, seed=2 * seed + 1)
    per_category = options.metrics_per_category
    validation = Validation(held_out, lambda example: example, SIDE, config, per_category=per_category)
    # There is no flip, because a mirrored digit is not a digit, and no expansion, because scenes are small.
    augment = SSDAugment(SIDE, flip=0.0, expand=0.0, crop_scale=(0.6, 1.0), antialias=False)
    return lambda: small_ssd(NUM_CLASSES + 1, SIDE), validation, {"source": train, "augment": augment}


class Detector(nn.Module):
    """An SSD detector whose first layer normalizes pixels.

    It maps N images, uint8 [N, S, S, 3], to three tensors: class logits [N, A, C], box offsets [N, A, 4], and
    default boxes [A, 4]. A is the number of default boxes, and C the number of classes plus background.
    """

    def __init__(self, ssd: SSD, *, channels_last: bool) -> None:
        super().__init__()
        self.normalize, self.ssd = Normalize(IMAGENET_MEAN, IMAGENET_STD, channels_last=channels_last), ssd

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, codes = self.ssd(self.normalize(images))
        return logits, codes, self.ssd.boxes


def detection_loss(model: nn.Module, batch: Batch) -> LossAndWeight:
    """Return SSD's multibox loss, summed over a batch, and the number of matched default boxes."""
    logits, codes, default_boxes = model(batch["image"])
    loss, positives = multibox_loss(logits, codes, batch["boxes"], batch["labels"], default_boxes)
    # A batch without boxes must not cause a division by zero.
    return loss, positives.clamp(min=1)


@about_one_example()
def decode_detection(example: dict[str, Any]) -> dict[str, Any]:
    """Decode an example to a dict of ``image``, uint8 [H, W, 3], ``boxes`` and ``labels``."""
    height, width = example["size"]
    image = decode_image(example["image"], turned=False)  # COCO's boxes refer to the stored image
    if image.shape[:2] != (height, width):
        image = decode_image(example["image"])
    if image.shape[:2] != (height, width):
        raise ValueError(
            f"the image has a width of {image.shape[1]} and a height of {image.shape[0]} pixels, but its "
            f"annotations say {width} and {height}; was it rotated or resized after annotation?"
        )
    return {"image": image, "boxes": example["boxes"], "labels": example["labels"]}


decode_detection.thread_safe = True  # type: ignore[attr-defined]


class Validation:
    """Evaluates a detector on validation images, by its mean average precision (mAP).

    Args:
        images: the images and their true boxes, as ``DetectionImages`` or ``Scenes``.
        image_size: the side of the model's input, in pixels.
        per_category: whether to report the average precision of each category too.
    """

    def __init__(
        self, images: Any, decode: Decode, image_size: int, config: Config, *, per_category: bool
    ) -> None:
        self._images, self._decode, self._size = images, decode, image_size
        resize = ResizeWithBoxes(image_size)
        self._batches = EvaluationBatches(images, lambda example: resize(decode(example))["image"], config)
        truth = (images.truths, images.sizes, images.categories)
        self._precision = AveragePrecision(*truth, per_category=per_category)
        self.metrics = self._precision.metrics

    def evaluate(
        self,
        model: nn.Module,
        split: Split,
        *,
        device: torch.device,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> Metrics:
        """Return the metrics of a model in eval mode. Each rank evaluates its share of the images."""
        assert split == "validation", "COCO's test split has no public boxes, and scenes have none"
        shares = ranks.gather_objects(self._detect(model, device, ranks.share(len(self._images))))
        return self._precision.measure([found for share in shares for found in share])

    def _detect(self, model: nn.Module, device: torch.device, rows: Sequence[int]) -> list[Found]:
        """Run the model on the images with these indices. Return each index with its detections."""
        detections = []
        for part, inputs in self._batches.read(rows):
            logits, codes, default_boxes = model(torch.from_numpy(np.stack(inputs)).to(device))
            for row, one in zip(part, detect(logits, codes, default_boxes, self._size), strict=True):
                height, width = self._images.sizes[row]
                scale = torch.tensor([width, height, width, height], dtype=torch.float64) / self._size
                found = Detections(one.boxes.cpu().double() * scale, one.scores.cpu(), one.labels.cpu())
                detections.append((row, found))
        return detections

    def pictures(self, model: nn.Module, number: int, device: torch.device) -> list[Picture]:
        """Return the first images, with their true boxes and the boxes predicted with probability >= 0.4."""
        rows = range(min(number, len(self._images)))
        return [self._picture(row, found) for row, found in self._detect(model, device, rows)]

    def _picture(self, row: int, found: Detections) -> Picture:
        truth, names = self._images.truths[row], self._images.categories
        predicted = zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
        return Picture(
            self._decode(self._images[row])["image"],
            "",
            [(tuple(box), names[k - 1]) for box, k in zip(truth.boxes.tolist(), truth.labels, strict=True)],
            [(tuple(box), f"{names[k - 1]} {p:.2f}") for box, k, p in predicted if p >= _SHOWN_SCORE],
        )
