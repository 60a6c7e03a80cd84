"""Handwritten digits: 1,797 real 8x8 images that scikit-learn carries in its package.

They are the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (UCI
repository, 1998): pixel values 0 to 16. There is no test split beside the validation split.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.split import first_of, hold_out
from adaecho.errors import ConfigError, DataError
from adaecho.models.normalise import Normalise
from adaecho.models.small import small_conv, small_mlp
from adaecho.tasks.base import Task
from adaecho.tasks.images import classifier, predictions_in_memory
from adaecho.tasks.options import DigitsOptions as Options
from adaecho.transforms.small_images import Images, PadCropFlip

NUM_CLASSES = 10
BRIGHTEST = 16.0
MODELS: dict[str, Callable[[int], nn.Module]] = {"conv": small_conv, "mlp": small_mlp}


def build(config: Config, options: Options) -> Task:
    """The digits task: a model that takes float [N, 1, 8, 8] to logits [N, 10].

    Raises:
        ConfigError: ``data.path`` is set.
        DataError: scikit-learn's file is absent, or the validation split would leave nothing to train on.
    """
    if config.data.path is not None:
        raise ConfigError(
            f"data.path={config.data.path}: task digits carries its images in itself; drop data.path, or "
            "choose a task= that reads data"
        )
    source, validation = hold_out(read_digits(), config.data.validation_examples, seed=config.data.split_seed)
    source = first_of(source, options.training_examples)
    validation = {name: array[: config.evaluate.max_examples] for name, array in validation.items()}

    def build_model() -> nn.Module:
        normalise = Normalise([0.0], [BRIGHTEST], channels_last=config.channels_last)
        return nn.Sequential(normalise, MODELS[options.model](NUM_CLASSES))

    return classifier(
        predictions_in_memory(lambda _: validation, config.evaluate.batch_size),
        label_smoothing=options.label_smoothing,
        name="digits",
        source=source,
        augment=PadCropFlip(padding=1, flip=False),
        augment_parts=(
            PadCropFlip(padding=1, flip=False, horizontal=False),
            PadCropFlip(padding=1, flip=False, vertical=False),
        ),
        build_model=build_model,
    )


def read_digits() -> Images:
    """All images, uint8 [1797, 8, 8, 1], and their labels, int64 [1797].

    Raises:
        DataError: scikit-learn, or the file in it, is absent.
    """
    # The file itself: importing scikit-learn takes longer than a hundred training steps.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("task digits reads its images from scikit-learn: pip install scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"{path}: missing from this scikit-learn; reinstall it (pip install scikit-learn)")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    return {"image": table[:, :-1].reshape(-1, 8, 8, 1), "label": table[:, -1].astype(np.int64)}
