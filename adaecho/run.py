"""The command ``python -m adaecho.run task=... echo=...``, with ``-m`` for sweeps."""

import difflib
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adaecho.config import schema, size_defaults
from adaecho.config.identity import flat
from adaecho.config.launch_env import launched_rank, launched_ranks
from adaecho.errors import ConfigError, UserError, fail, print_line, report_errors
from adaecho.records.trials import Status
from adaecho.records.wandb_mirror import exported

_PACKAGE = Path(__file__).resolve().parent
# The configs are next to the package in a checkout, and inside the package in an installed wheel.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
_CONTINUE = "the same command (without restart=true) continues the run"

schema.register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """Run a config that Hydra has composed, in the folder that Hydra has created."""
    try:
        # Handle errors here, because Hydra would print an additional line before the message.
        with report_errors():
            _run(composed)
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))


def _run(composed: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    config = schema.from_plain(schema.to_plain(composed))
    _check_mode(config, hydra_config.mode)
    if launched_rank() == 0 and hydra_config.runtime.choices.get("scale"):
        print_line(size_defaults.describe(schema.to_plain(config)))
    from adaecho.ranks import distributed_context
    from adaecho.training.device import choose_device
    from adaecho.training.progress import ProgressLog
    from adaecho.training.trial import run_trial

    with ExitStack() as mirror, distributed_context(choose_device(config), config.rank_timeout_s) as ranks:
        if ranks.is_first:
            of_ranks = "" if ranks.is_alone else f", {ranks.world_size} ranks"
            print_line(f"{folder}: {_headline(config)}{of_ranks}")
        summary = run_trial(
            config, folder, list(hydra_config.overrides.task), ranks=ranks,
            log=ProgressLog(config) if ranks.is_first else None,
            begun=lambda: mirror.enter_context(exported(config.tracking, folder)),
        )  # fmt: skip
        if ranks.is_first:
            for name, path in summary.get("model", {}).items():
                print_line(f"{name} weights: {folder / path}")
            print_line(_outcome(summary))
    if summary["status"] == Status.PREEMPTED:
        if launched_rank() == 0:
            print(_CONTINUE, file=sys.stderr)
        sys.exit(130)


def _check_mode(config: schema.Config, mode: RunMode | None) -> None:
    if launched_ranks() > 1 and mode == RunMode.MULTIRUN:
        raise ConfigError(
            "-m under torchrun: a sweep starts its own processes; remove torchrun, or run a single config"
        )
    if config.search.arms and mode == RunMode.RUN:
        raise ConfigError(
            f"search.arms: comparing {len(config.search.arms)} arms needs -m: python -m adaecho.run -m ..."
        )


def cli() -> None:
    """Run the command line, and exit.

    The exit code is 0 after success or divergence, 1 after a crash, 2 after an error that the user can fix,
    and 130 after an interrupt.
    """
    # Without this variable, Hydra would shorten tracebacks.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # Like python -m, the console command must find a user's task in the current folder.
    if not sys.flags.safe_path and not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    # Move -m to the front, because argparse accepts overrides after -m only if there are none before it.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        with report_errors():
            main()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}; choose another hydra.run.dir=, or fix the path")
    except KeyboardInterrupt:
        print(f"interrupted; {_CONTINUE}", file=sys.stderr)
        sys.exit(130)


def explain(error: BaseException, *more_keys: str) -> str:
    """Describe an error of Hydra or OmegaConf. For an unknown config key, suggest similar keys.

    Args:
        more_keys: further keys to suggest, which are not in the config schema.
    """
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        # Drop Hydra's advice to add an unknown key with +, because no code would read the key.
        lines += [line for line in str(cause).splitlines() if line and not line.startswith("To append")]
        cause = cause.__cause__ or cause.__context__
    if "Could not override" in lines[0]:
        plain: Any = OmegaConf.to_container(OmegaConf.structured(schema.Config))
        keys = [*more_keys, *plain, *(key for key, _ in flat(plain))]
        near = difflib.get_close_matches(lines[0].split("'")[1], keys, n=3)
        lines += [f"Did you mean {' or '.join(near)}?"] if near else []
    return "\n".join(dict.fromkeys(lines))


def _headline(config: schema.Config) -> str:
    target = config.target
    goal = "no target" if target.value is None else f"to {target.metric} {target.value:g}"
    return f"{config.task.name}, echo={config.echo.variant} factor={config.echo.factor}, {goal}"


def _outcome(summary: dict[str, Any]) -> str:
    cost, best = summary["to_target"] or summary, summary["best"]
    text = (
        f"{summary['status']}: {cost['fresh_examples']:,} fresh examples, {cost['steps']:,} steps, "
        f"{cost['train_time_s']:.1f} s of training"
    )
    if best is not None:
        text += f"; best {best['metric']} {best['value']:.4f} at {best['fresh_examples']:,}"
    return text + "".join(f"; test {name} {value:.4f}" for name, value in summary.get("test", {}).items())


if __name__ == "__main__":
    cli()
