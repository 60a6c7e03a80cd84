"""A small SSD on made scenes of real handwritten digits: detection in seconds on one core, data embedded.

Glyphs of the validation scenes occur in no training scene.
"""

from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.scenes import SIDE, make_scenes
from adaecho.errors import ConfigError
from adaecho.models.ssd import small_ssd
from adaecho.tasks.base import Task
from adaecho.tasks.boxes import SSDAugment, collate_boxes
from adaecho.tasks.detection import DetectionValidation, Detector, detection_loss
from adaecho.tasks.digits import NUM_CLASSES, read_digits
from adaecho.tasks.options import ScenesOptions as Options

_VALIDATION_GLYPHS = 360


def build(config: Config, options: Options) -> Task:
    """The scenes task; ``data.validation_examples`` scenes are made for validation, none is held out.

    Raises:
        ConfigError: ``data.path`` is set, or ``task.ghost_size`` doesn't divide the batch.
        DataError: scikit-learn's file of digits is absent.
    """
    if config.data.path is not None:
        raise ConfigError(
            f"data.path={config.data.path}: task scenes makes its images; drop data.path, or choose task=coco"
        )
    options.check_batches(config)
    number = config.data.validation_examples
    if not number:
        raise ConfigError(f"data.validation_examples={number}: say how many scenes to make for validation")
    number = min(number, config.evaluate.max_examples or number)
    digits = read_digits()
    glyphs, labels = digits["image"][..., 0], digits["label"]
    seed = config.data.split_seed
    train = make_scenes(
        glyphs[:-_VALIDATION_GLYPHS], labels[:-_VALIDATION_GLYPHS], options.training_scenes, seed=2 * seed
    )
    held_out = make_scenes(
        glyphs[-_VALIDATION_GLYPHS:], labels[-_VALIDATION_GLYPHS:], number, seed=2 * seed + 1
    )
    validation = DetectionValidation(
        held_out,
        None,
        per_category=options.metrics_per_category,
        image_size=SIDE,
        batch_size=config.evaluate.batch_size,
        threads=1,
    )

    def build_model() -> nn.Module:
        detector = Detector(small_ssd(NUM_CLASSES + 1, SIDE), channels_last=config.channels_last)
        return options.with_ghosts(detector)

    return Task(
        name="scenes",
        metrics=validation.metrics,
        source=train,
        # A mirrored digit is none; scenes are small enough as they are.
        augment=SSDAugment(SIDE, flip=0.0, expand=0.0, crop_scale=(0.6, 1.0), antialias=False),
        collate=collate_boxes,
        build_model=build_model,
        loss=detection_loss,
        evaluate=validation.evaluate,
        pictures=validation.pictures,
    )
