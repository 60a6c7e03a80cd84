"""Would echoing help? Measures R = t_upstream / t_downstream before any training.

    python -m adaecho.headroom task=cifar10 data.path=...       # arguments as for python -m adaecho.run
    python -m adaecho.headroom images=... [step_s=0.05]         # a folder of photographs, or parquet files

It times each upstream stage alone, the whole of upstream as EchoLoader runs it, and the training step on a
batch that is already on the device. step_s= states the seconds of your own step instead.
"""

import math
import sys

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from adaecho.config import schema
from adaecho.errors import ConfigError, fail, say, told
from adaecho.headroom.measure import BUDGET_S, measure, measure_images, report
from adaecho.run import CONF, explain


def _given_step(arguments: list[str]) -> tuple[float | None, list[str]]:
    """The ``step_s=`` among the arguments, and the others."""
    given = [argument for argument in arguments if argument.startswith("step_s=")]
    if not given:
        return None, arguments
    value = given[-1].removeprefix("step_s=")
    try:
        step_s = float(value)
    except ValueError:
        step_s = math.nan
    if not 0 < step_s < math.inf:
        raise ConfigError(f"step_s={value}: must be the seconds of one training step, e.g. step_s=0.05")
    return step_s, [argument for argument in arguments if argument not in given]


def main(arguments: list[str], budget_s: float = BUDGET_S) -> None:
    """Compose, measure, print."""
    step_s, overrides = _given_step(arguments)
    if any(argument.startswith("images=") for argument in overrides):
        lines = measure_images(overrides, budget_s, step_s)
    else:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = schema.from_typed(schema.to_plain(compose("config", overrides=overrides)))
        found = measure(config, budget_s, step_s)
        lines = report(config.task.name, config.batch_size, config.data.num_workers, found)
    for line in lines:
        say(line)


def cli() -> None:
    """``main`` with one message for what the user can mend."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__.strip())
        return
    try:
        with told():
            main(sys.argv[1:])
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, "images", "step_s"))


if __name__ == "__main__":
    cli()
