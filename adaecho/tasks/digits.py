"""The task digits: classify the 1,797 handwritten digits of scikit-learn, 8x8 pixels with values 0 to 16.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (UCI repository, 1998). The
task has a validation split but no test split.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.split import first_of, train_validation_split
from adaecho.errors import ConfigError, DataError
from adaecho.models.images import Normalize, small_conv, small_mlp
from adaecho.tasks.base import Task
from adaecho.tasks.images import classifier, predictions_in_memory
from adaecho.tasks.options import DigitsOptions as Options
from adaecho.transforms.small_images import Images, PadCropFlip

NUM_CLASSES = 10
BRIGHTEST = 16.0
MODELS = {"conv": small_conv, "mlp": small_mlp}


def build(config: Config, options: Options) -> Task:
    """Build the task. Its model maps N images, uint8 [N, 8, 8, 1], to logits [N, 10]."""
    if config.data.path is not None:
        raise ConfigError(f"data.path={config.data.path}: task digits has built-in images; set it to null")
    source, validation = train_validation_split(
        read_digits(), config.data.validation_examples, seed=config.data.split_seed
    )
    validation = {name: array[: config.evaluate.max_examples] for name, array in validation.items()}

    def build_model() -> nn.Module:
        normalize = Normalize([0.0], [BRIGHTEST], channels_last=config.channels_last)
        return nn.Sequential(normalize, MODELS[options.model](NUM_CLASSES))

    down, across = (PadCropFlip(1, flip=False, horizontal=h, vertical=not h) for h in (False, True))
    return classifier(
        predictions_in_memory(lambda _: validation, config.evaluate.batch_size),
        label_smoothing=options.label_smoothing,
        name="digits",
        source=first_of(source, options.training_examples),
        augment=PadCropFlip(padding=1, flip=False),
        augment_parts=(down, across),
        build_model=build_model,
    )


def read_digits() -> Images:
    """Read all images, uint8 [1797, 8, 8, 1], and their labels, int64 [1797]."""
    # The file is read directly, because importing scikit-learn takes longer than a hundred training steps.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("task digits reads its images from scikit-learn: pip install scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"{path}: missing from this scikit-learn; reinstall it (pip install scikit-learn)")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    return {"image": table[:, :-1].reshape(-1, 8, 8, 1), "label": table[:, -1].astype(np.int64)}
