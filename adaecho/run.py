"""The command: ``python -m adaecho.run task=... echo=...``, and ``-m`` for sweeps.

Training is imported only when it is about to begin, so that ``--cfg job`` and tab completion answer at once.
"""

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
from adaecho.config.launch_env import importing, launched_rank, launched_ranks
from adaecho.errors import ConfigError, UserError, fail, say, told
from adaecho.records.status import Status
from adaecho.records.tracking import exported

_PACKAGE = Path(__file__).resolve().parent
# A checkout keeps the configs beside the package, an installed wheel inside it.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
_HOW_TO_GO_ON = "the same command (without fresh=true) continues"

schema.register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """Run one composed config in Hydra's output folder."""
    try:
        with told():  # before Hydra puts a line of its own in front
            _run(composed)
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))


def _run(composed: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    config = schema.from_plain(schema.to_plain(composed))
    _check_mode(config, hydra_config.mode)
    if launched_rank() == 0 and hydra_config.runtime.choices.get("scale"):
        say(size_defaults.describe(composed, schema.to_plain(config)))
    with importing():
        from adaecho.ranks import joined
        from adaecho.training.device import choose_device
        from adaecho.training.display import Display
        from adaecho.training.trial import run_trial
    with ExitStack() as mirror, joined(choose_device(config), config.rank_timeout_s) as ranks:
        if ranks.is_first:
            of_ranks = "" if ranks.is_alone else f", {ranks.world_size} ranks"
            say(f"{folder}: {_headline(config)}{of_ranks}")
        summary = run_trial(
            config, folder, list(hydra_config.overrides.task), ranks=ranks,
            display=Display(config) if ranks.is_first else None,
            begun=lambda: mirror.enter_context(exported(config.tracking, folder)),
        )  # fmt: skip
        if ranks.is_first:
            for name, path in summary.get("model", {}).items():
                say(f"{name} weights: {folder / path}")
            say(_outcome(summary))
    if summary["status"] == Status.PREEMPTED:
        if launched_rank() == 0:
            print(_HOW_TO_GO_ON, file=sys.stderr)
        sys.exit(130)


def _check_mode(config: schema.Config, mode: RunMode | None) -> None:
    if launched_ranks() > 1 and mode == RunMode.MULTIRUN:
        raise ConfigError(
            "-m under torchrun: a sweep starts its own processes; leave torchrun out, or run one config"
        )
    if config.search.arms and mode == RunMode.RUN:
        raise ConfigError(
            f"search.arms: this is a comparison of {len(config.search.arms)} arms, which -m runs: "
            "python -m adaecho.run -m ..."
        )


def cli() -> None:
    """``main`` with one message for what the user can mend, and a traceback for everything else.

    Exits with 0 when a run has an outcome (diverging is one), 2 for the user's to mend, 1 for a crash,
    130 when interrupted.
    """
    # Hydra would print its own abridged tracebacks and hide ours.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # A task of one's own lies in the current folder: python -m looks there, the console command would not.
    if not sys.flags.safe_path and not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    # To argparse what follows -m is no override any more where others came before.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        with told():
            main()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}; choose another hydra.run.dir= or mend the path")
    except KeyboardInterrupt:
        print(f"interrupted; {_HOW_TO_GO_ON}", file=sys.stderr)
        sys.exit(130)


def explain(error: BaseException, *more_keys: str) -> str:
    """A message of Hydra or OmegaConf with its causes, and the nearest key where one was mistyped.

    Args:
        error: what they raised.
        more_keys: that the command takes beside those of the schema.
    """
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        # Hydra advises to add an unknown key with +; nothing here would read it.
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
    if target.value is not None and target.in_a_row > 1:
        goal += f" in {target.in_a_row} evaluations in a row"
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
