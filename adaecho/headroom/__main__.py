"""Measure R = t_upstream / t_downstream of a task before training.

t_upstream is the time to read and prepare a batch, t_downstream the time of a training step. If R is above 1,
training waits for data, and echoing can use this time.

    python -m adaecho.headroom task=cifar10 data.path=...       # arguments as for python -m adaecho.run
    python -m adaecho.headroom task=imagenet data.path=... step_s=0.05

The command measures each upstream stage alone, all stages together as EchoLoader runs them, and a training
step on a batch that is already on the device. Pass step_s= to use the seconds of your own training step
instead.
"""

import sys

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from adaecho.config import schema
from adaecho.errors import ConfigError, fail, print_line, report_errors
from adaecho.headroom.pipeline_timer import BUDGET_S, measure
from adaecho.run import CONF, explain


def main(arguments: list[str], budget_s: float = BUDGET_S) -> None:
    """Measure a task's input pipeline and training step, and print the report.

    Args:
        arguments: config overrides as for ``python -m adaecho.run``. ``step_s=SECONDS`` replaces the
            measurement of a training step.
        budget_s: seconds for each measurement.
    """
    given = [argument for argument in arguments if argument.startswith("step_s=")]
    overrides = [argument for argument in arguments if argument not in given]
    if not any(argument.startswith("task=") for argument in overrides):
        raise ConfigError("task: missing; set one, for example task=digits")
    try:
        step_s = float(given[-1].removeprefix("step_s=")) if given else None
    except ValueError:
        step_s = 0.0
    if step_s is not None and not step_s > 0:
        raise ConfigError(f"{given[-1]}: expected the seconds of one training step, for example step_s=0.05")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = schema.from_plain(schema.to_plain(compose("config", overrides=overrides)))
    found = measure(config, budget_s, step_s)
    for line in found.report(config.task.name, config.batch_size, config.data.num_workers):
        print_line(line)


def cli() -> None:
    """Run ``main``, and print a single message without a traceback if the user can fix the error."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__.strip())
        return
    try:
        with report_errors():
            main(sys.argv[1:])
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, "step_s"))


if __name__ == "__main__":
    cli()
