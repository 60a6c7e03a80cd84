"""The digits of ``adaecho.tasks.digits`` with a small MLP: many steps in little time, and no batch norm."""

from adaecho.config.schema import Config
from adaecho.models.small_mlp import small_mlp
from adaecho.tasks.base import Task
from adaecho.tasks.digits import build_with


def build(config: Config) -> Task:
    """The digits_mlp task.

    Raises:
        ConfigError: ``data.path`` is set.
        DataError: scikit-learn's file is absent, or the validation split would leave nothing to train on.
    """
    return build_with(small_mlp, config, name="digits_mlp")
