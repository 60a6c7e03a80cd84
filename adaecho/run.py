"""The command: ``python -m adaecho.run task=... echo=...``, and ``-m`` for sweeps.

Training is imported only when it is about to begin, so that ``--cfg job`` and tab completion answer at once.
"""

import difflib
import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from adaecho.config import schema
from adaecho.errors import UserError

_PACKAGE = Path(__file__).resolve().parent
# A checkout keeps the configs beside the package, an installed wheel inside it.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())

schema.register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(composed: DictConfig) -> None:
    """Run one composed config in Hydra's output folder."""
    try:
        _run(composed)
    except UserError as error:
        _fail(str(error))  # before Hydra puts a line of its own in front


def _run(composed: DictConfig) -> None:
    plain = schema.to_plain(composed)
    config = schema.from_plain(plain)
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    gc.disable()  # what torch makes at import stays: scanning it while it grows only takes time
    from adaecho.training.trial import run_trial

    gc.enable()
    print(f"{folder}: {_headline(config)}", flush=True)
    summary = run_trial(
        config, folder, list(hydra_config.overrides.task), report=partial(_print_line, config.target.metric)
    )
    print(_outcome(summary), flush=True)
    if summary["status"] == "preempted":
        sys.exit(130)


def cli() -> None:
    """``main`` with one message for what the user can mend, and a traceback for everything else.

    Exits with 0 when a run has an outcome (diverging is one), 2 for the user's to mend, 1 for a crash,
    130 when interrupted.
    """
    # Hydra would print its own abridged tracebacks and hide ours.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except UserError as error:
        _fail(str(error))
    except HydraException as error:
        _fail(_explain(error))
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; choose another hydra.run.dir= or mend the path")
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _explain(error: BaseException) -> str:
    """Hydra's message with its cause, and the nearest existing key where one was mistyped."""
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        # Hydra advises to add an unknown key with +; nothing here would read it.
        message = "\n".join(x for x in str(cause).strip().splitlines() if not x.startswith("To append"))
        if message and message not in messages:
            messages.append(message)
        cause = cause.__cause__
    return "\n".join(messages + _did_you_mean(messages))


def _did_you_mean(messages: list[str]) -> list[str]:
    first = messages[0] if messages else ""
    if "Could not override" not in first:
        return []
    typed = first.split("'")[1]
    near = difflib.get_close_matches(typed, _keys(OmegaConf.structured(schema.Config)), n=3)
    return [f"Did you mean {' or '.join(near)}?"] if near else []


def _keys(node: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in node:
        keys.append(f"{prefix}{key}")
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            keys += _keys(node[key], f"{prefix}{key}.")
    return keys


def _headline(config: schema.Config) -> str:
    goal = "no target"
    if config.target.value is not None:
        goal = f"to {config.target.metric} {config.target.value:g}"
    return f"{config.task.name}, echo={config.echo.variant} factor={config.echo.factor}, {goal}"


def _print_line(metric: str, line: dict[str, Any]) -> None:
    cost = f"fresh {line['fresh_examples']:>9,}  step {line['steps']:>7,}"
    measured = f"{metric} {line[metric]:.4f}  train_loss {line['train_loss']:.4f}"
    print(f"{cost}  {measured}  {line['train_time_s']:.1f} s", flush=True)


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
