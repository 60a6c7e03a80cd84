"""SSD300 on COCO 2017 (paper, Table 1), or on any folder in COCO's schema.

The paper names neither backbone nor image size: ResNet-34 from scratch at 300 pixels is MLPerf's SSD.
"""

import numpy as np
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.coco import read_both
from adaecho.datasets.split import hold_out_rows, refuse_number
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from adaecho.models.ssd import ssd_resnet34
from adaecho.tasks.base import Task, digest_of_classes
from adaecho.tasks.boxes import SSDAugment, collate_boxes
from adaecho.tasks.detection import DetectionValidation, Detector, decode_detection, detection_loss
from adaecho.tasks.options import CocoOptions as Options


def build(config: Config, options: Options) -> Task:
    """The detection task; images are read from disk as they are needed.

    Raises:
        ConfigError: ``task.ghost_size`` doesn't divide the batch or its micro-batches.
        DataError: ``data.path`` is no folder in COCO's schema, or more in it is bad than may be skipped.
    """
    options.check_batches(config)
    path, number = config.data.path, config.data.validation_examples
    if path is None:
        raise DataError("data.path: task coco needs a folder with annotations/ and images in COCO's schema")
    bad = SkippedExamples(config.data.max_bad_examples)
    train, held_out, lists = read_both(path, bad)
    files = [*lists, *train.files, *(() if held_out is None else held_out.files)]
    if held_out is None:
        rows, others = hold_out_rows(len(train), number, seed=config.data.split_seed)
        train, held_out = train.take(np.sort(rows).tolist()), train.take(others.tolist())
    else:
        refuse_number(number, path)
    held_out = held_out.first(config.evaluate.max_examples)
    if not options.keep_images_without_boxes:
        train = train.with_boxes()
    if not len(train) or not len(held_out.with_boxes()):
        raise DataError(f"data.path={path}: none of its training, or of its validation images has a box")
    validation = DetectionValidation(
        held_out,
        decode_detection,
        per_category=options.metrics_per_category,
        image_size=options.image_size,
        batch_size=config.evaluate.batch_size,
        threads=max(config.data.num_workers, 1),
    )

    def build_model() -> nn.Module:
        ssd = ssd_resnet34(len(train.categories) + 1, options.image_size)
        return options.with_ghosts(Detector(ssd, channels_last=config.channels_last))

    return Task(
        name="coco",
        metrics=validation.metrics,
        source=train,
        decode=decode_detection,
        augment=SSDAugment(options.image_size, expand=options.expand),
        collate=collate_boxes,
        build_model=build_model,
        loss=detection_loss,
        evaluate=validation.evaluate,
        pictures=validation.pictures,
        skipped_examples=bad.count,
        files=files,
        facts={
            "training_images": len(train),
            "validation_images": len(validation),
            **digest_of_classes(train.categories),
        },
    )
