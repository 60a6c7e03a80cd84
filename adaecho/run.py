"""The command: ``python -m adaecho.run task=... echo=...``, and ``-m`` for sweeps.

Training is imported only when it is about to begin, so that ``--cfg job`` and tab completion answer at once.
"""

import difflib
import os
import re
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from adaecho.config import scale, schema
from adaecho.config.identity import BUDGETS, flat
from adaecho.config.launched import importing, launched_rank, launched_ranks, local_rank
from adaecho.errors import ConfigError, UserError, fail, say, told, warn
from adaecho.records.status import Status
from adaecho.records.tracking import exported

_PACKAGE = Path(__file__).resolve().parent
# A checkout keeps the configs beside the package, an installed wheel inside it.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())

schema.register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """Run one composed config in Hydra's output folder."""
    try:
        with told():  # before Hydra puts a line of its own in front
            _run(composed)
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except Exception as error:  # a crash: of it Hydra would print the words typed, secrets and all
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run(composed: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    try:
        config = schema.from_typed(schema.to_plain(composed))
        _check_mode(config, hydra_config.mode)
    except UserError as error:
        error.told_elsewhere = local_rank() > 0  # the ranks of a host see the same command and files
        raise
    if launched_rank() == 0:
        if hydra_config.runtime.choices.get("scale"):
            say(scale.told(composed, schema.to_plain(config)))
        for caution in cautions(config):
            warn(caution)
    with importing():
        from adaecho.ranks import joined
        from adaecho.training.device import choose_device
        from adaecho.training.display import Display
        from adaecho.training.trial import run_trial
    with ExitStack() as mirror, joined(choose_device(config), config.rank_timeout_s) as ranks:
        if ranks.is_first:
            of_ranks = "" if ranks.is_alone else f", {ranks.world_size} ranks"
            say(f"{folder}: {_headline(config)}{of_ranks}")
        display = Display(config) if ranks.is_first else None
        overrides = list(hydra_config.overrides.task)
        summary = run_trial(
            config, folder, overrides, display=display, ranks=ranks,
            begun=lambda: mirror.enter_context(exported(config.tracking, folder)),
        )  # fmt: skip
        if ranks.is_first:
            for name, path in summary.get("model", {}).items():
                say(f"{name} weights: {folder / path}")
            say(_outcome(summary))
    if summary["status"] == Status.PREEMPTED:
        if launched_rank() == 0:
            print(_how_to_go_on(), file=sys.stderr)
        sys.exit(130)


def _check_mode(config: schema.Config, mode: RunMode | None) -> None:
    if launched_ranks() > 1 and mode == RunMode.MULTIRUN:
        raise ConfigError(
            "-m under torchrun: a sweep starts its own processes; leave torchrun out, or run one config"
        )
    if config.search.arms and mode == RunMode.RUN:
        arms = list(config.search.arms)
        shown = ", ".join(arms[:4]) + (", ..." if len(arms) > 4 else "")
        raise ConfigError(
            f"search.arms: this is a comparison of {len(arms)} arms ({shown}), which -m runs: "
            "python -m adaecho.run -m ..."
        )


def cautions(config: schema.Config) -> list[str]:
    """What a run may be meant to do, but rarely is; one sentence each."""
    if config.target.value is None and all(getattr(config, key) is None for key in BUDGETS):
        return [
            "neither a target nor a budget: the run goes on until it is interrupted; set target.value=, "
            "max_steps=, max_fresh_examples= or max_train_time_s="
        ]
    bounds = [config.max_fresh_examples]
    if config.max_steps is not None:
        bounds.append(config.max_steps * config.batch_size + config.echo.shuffle_buffer)
    every = config.evaluate.every_fresh_examples
    if any(bound is not None and bound < every for bound in bounds):
        return [f"evaluated once, at the end: evaluate.every_fresh_examples={every} lies beyond the budget"]
    return []


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
        main()
    except UserError as error:
        fail(error)
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except ValueError as error:
        if "hydra" not in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts:
            raise
        fail(error)  # Hydra's own, e.g. of echo=2
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}; choose another hydra.run.dir= or mend the path")
    except KeyboardInterrupt:
        print(f"interrupted; {_how_to_go_on()}", file=sys.stderr)
        sys.exit(130)


def _how_to_go_on() -> str:
    again = any(re.fullmatch("[+]*fresh=true", word, re.IGNORECASE) for word in sys.argv)
    return f"the same command {'without fresh=true ' if again else ''}continues"


def explain(error: BaseException, *more_keys: str) -> str:
    """A message of Hydra or OmegaConf with its cause, and the nearest key where one was mistyped.

    Args:
        error: what they raised.
        more_keys: that the command takes beside those of the schema.
    """
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        if isinstance(cause, MissingMandatoryValue):
            return _missing(str(cause))
        if isinstance(cause, OverrideParseException) and "=" in cause.override:
            key, _, value = cause.override.partition("=")
            return (
                f"{cause.override}: Hydra can't read it. A value with signs, or letters beyond a to z, has "
                f"quotes of its own within the shell's: '{key}=\"{value}\"'"
            )
        # Hydra advises to add an unknown key with +; nothing here would read it.
        lines = [line for line in str(cause).strip().splitlines() if not line.startswith("To append")]
        lines = [line for line in lines if "$VALUE" not in line]  # a template that OmegaConf left unfilled
        message = "\n".join(lines)
        if message and message not in messages:
            messages.append(message)
        cause = cause.__cause__ or cause.__context__
    return "\n".join(messages + _did_you_mean(messages[0], more_keys))


def _missing(text: str) -> str:
    found = re.search(r"full_key: ([\w.]+)", text) or re.search(r"value: ([\w.]+)", text)
    key = found[1] if found else "a key"
    return f"{key} has no value: drop the ~ that deleted it, or give one; `--cfg job` prints what there is"


def _did_you_mean(message: str, more_keys: tuple[str, ...]) -> list[str]:
    if "Could not override" not in message:
        return []
    plain: Any = OmegaConf.to_container(OmegaConf.structured(schema.Config))
    keys = [*more_keys, *plain, *(key for key, _ in flat(plain))]
    near = difflib.get_close_matches(message.split("'")[1], keys, n=3)
    return [f"Did you mean {' or '.join(near)}?"] if near else []


def _headline(config: schema.Config) -> str:
    goal = "no target"
    if config.target.value is not None:
        goal = f"to {config.target.metric} {config.target.value:g}"
        if config.target.in_a_row > 1:
            goal += f" in {config.target.in_a_row} evaluations in a row"
    return f"{config.task.name}, echo={config.echo.variant} factor={config.echo.factor}, {goal}"


def _outcome(summary: dict[str, Any]) -> str:
    reached = summary["to_target"]
    cost = reached or summary
    text = (
        f"{summary['status']}: {cost['fresh_examples']:,} fresh examples, {cost['steps']:,} steps, "
        f"{cost['train_time_s']:.1f} s of training"
    )
    best = summary["best"]
    if best is not None:
        text += f"; best {best['metric']} {best['value']:.4f} at {best['fresh_examples']:,}"
    for metric, value in summary.get("test", {}).items():
        text += f"; test {metric} {value:.4f}"
    return text


if __name__ == "__main__":
    cli()
