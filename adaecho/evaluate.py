"""``python -m adaecho.evaluate RUN``: the metrics of a run's saved weights, beside those it recorded.

The weights are those of the end, or with ``--weights best`` of the best evaluation, on every split that the
run was measured on. Keys of the config can follow the folder: ``data.path=FOLDER`` for data that has moved,
``task.validation_path=``, ``evaluate.batch_size=``, ``device=``. On the same machine a run's own data gives
the same numbers; another processor, ``threads`` or batch size rounds otherwise.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from adaecho.config.schema import Config, from_plain
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ConfigError, DataError, FolderError, say, told, warn
from adaecho.records.folder import RunFolder
from adaecho.tasks import build_task
from adaecho.tasks.base import Split, Task, check_same_meaning
from adaecho.training.device import choose_device, choose_precision, measure, place

WEIGHTS = ("final", "best")


class Measured(NamedTuple):
    """The metrics of one split.

    Attributes:
        split: "validation" or "test".
        metrics: of the saved weights.
        recorded: by the run, of these weights on this split; None where it did not evaluate them.
    """

    split: Split
    metrics: dict[str, float]
    recorded: dict[str, float] | None


@storage_errors()
def evaluate(path: Path, overrides: Sequence[str] = (), *, weights: str = "final") -> list[Measured]:
    """Measure a run's saved weights.

    Args:
        path: the run's folder.
        overrides: of its config, as ``key=value``.
        weights: those of the end ("final"), or of the best evaluation ("best").

    Raises:
        UserError: the folder holds no run or no such weights, its data is gone, or an override can't be.
    """
    run, config, task = open_run(path, overrides)
    summary = run.read_summary() or {}
    file = path / "model" / f"{weights}.safetensors"
    if not file.is_file():
        raise FolderError(
            f"{file}: is missing; a run writes its weights when it ends by itself (reached or budget_spent), "
            f"and this one's status is {summary.get('status')}"
        )
    device = choose_device(config)
    torch.set_num_threads(config.threads)
    model = place(task.build_model(), config, device)
    steps = load_weights(file, model)
    if weights == "final" and steps != summary["steps"]:
        warn(f"{file}: is of an earlier end, at step {steps}; the run has gone on to {summary['steps']}")
    line = next((line for line in reversed(run.read_metrics()) if line["steps"] == steps), None)
    recorded: dict[Split, Any] = {"validation": line}
    # The test split is read once, with the weights of the end: for no choice, and so not for the best.
    if task.has_test_split and weights == "final":
        recorded["test"] = summary.get("test")
    found = []
    for split, then in recorded.items():
        metrics = measure(task, model, split, device, choose_precision(config, device))
        found.append(Measured(split, metrics, then and {key: then[key] for key in metrics if key in then}))
    return found


def open_run(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, Config, Task]:
    """A run's folder, its config with what was typed, and its task with the data that lies there now.

    Raises:
        UserError: the folder holds no run, its data is gone or other data, or an override can't be.
    """
    run = RunFolder(path)
    plain = run.read_config()
    if plain is None:
        raise FolderError(f"{path}: holds no config.yaml, so it is no run; name the folder of one")
    config = _changed(plain, overrides)
    for key in ("split_seed", "validation_examples"):
        now = getattr(config.data, key)
        then = plain["data"].get(key, now)
        if then != now and config.data.validation_examples is not None:
            raise ConfigError(
                f"data.{key}={now}: the run may have been trained on these, as it held out others "
                f"(data.{key}={'null' if then is None else then}); leave it out"
            )
    task = build_task(config)
    check_same_meaning((run.read_summary() or {}).get("data") or {}, task.facts)
    return run, config, task


def _changed(plain: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The run's config with what was typed; its callbacks play no role here."""
    wrong = [override for override in overrides if "=" not in override]
    if wrong:
        raise ConfigError(f"{wrong[0]}: is no key=value, such as data.path=FOLDER")
    try:
        merged: Any = OmegaConf.to_container(OmegaConf.merge(plain, OmegaConf.from_dotlist([*overrides])))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    return from_plain({**merged, "callbacks": []})


def load_weights(file: Path, model: nn.Module) -> int:
    """Load the weights; after how many steps they were saved.

    Raises:
        FolderError: the file is damaged.
        DataError: it is of another model, as for data of another number of classes.
    """
    try:
        with safe_open(file, "pt") as opened:
            steps = int(opened.metadata()["steps"])
        model.load_state_dict(load_file(file))
    except SafetensorError as error:
        raise FolderError(
            f"{file}: is damaged ({error}); restore it, or run again with fresh=true"
        ) from error
    except RuntimeError as error:
        raise DataError(
            f"{file}: doesn't fit the model for this data ({str(error).splitlines()[-1].strip()})"
        ) from error
    return steps


def lines(found: Sequence[Measured]) -> list[str]:
    """One line for each metric."""
    told_lines = []
    for split, metrics, recorded in found:
        for name, value in metrics.items():
            then = (recorded or {}).get(name)
            note = (
                "not recorded" if then is None else "as recorded" if then == value else f"recorded {then!r}"
            )
            told_lines.append(f"{split} {name} {value!r} ({note})")
    return told_lines


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Of a command that takes a run's folder and overrides of its config."""
    made = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("run", type=Path, help="the run's folder")
    made.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the run's config")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command = parser("python -m adaecho.evaluate", __doc__)
    command.add_argument("--weights", choices=WEIGHTS, default="final", help="which of the run's (final)")
    typed = command.parse_intermixed_args(arguments)
    with told():
        for line in lines(evaluate(typed.run, typed.overrides, weights=typed.weights)):
            say(line)


if __name__ == "__main__":
    main()
