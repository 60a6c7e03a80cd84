"""``python -m adaecho.evaluate RUN``: evaluate a run's saved weights, and compare results with its records.

RUN is the folder of the run. By default, the command evaluates the final weights on every split that the run
evaluated. With ``--weights best``, it evaluates the weights with the best validation result during training,
on the validation split only.

Overrides of the run's config may follow RUN, for example ``data.path=FOLDER`` if the data has moved, or
``task.validation_path=``, ``evaluate.batch_size=`` or ``device=``.

On the same machine and data, the results match the records exactly. A different processor, number of
``threads`` or batch size changes the rounding.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from adaecho.config.schema import Config, from_plain
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ConfigError, DataError, FolderError, print_line, report_errors
from adaecho.records.folder import RunFolder
from adaecho.tasks import build_task
from adaecho.tasks.base import Split, Task, check_same_meaning
from adaecho.training.device import choose_device, choose_precision, measure, place


class Measured(NamedTuple):
    """The metrics of saved weights on one split: as measured now, and as recorded during training."""

    split: Split
    metrics: dict[str, float]  # as measured now
    recorded: dict[str, float] | None  # None if the run did not record them for these weights


@storage_errors()
def evaluate(path: Path, overrides: Sequence[str] = (), *, weights: str = "final") -> list[Measured]:
    """Compute the metrics of a run's saved weights on its validation and test splits.

    Args:
        path: the run's folder.
        overrides: overrides of the run's config, as ``key=value``.
        weights: "final" for the final weights, or "best" for the weights of the best evaluation.

    Raises:
        UserError: the folder contains no run or no such weights, the run's data is missing, or an override
            is invalid.
    """
    run, config, task = open_run(path, overrides)
    summary = run.read_summary() or {}
    file = path / "model" / f"{weights}.safetensors"
    if not file.is_file():
        raise FolderError(
            f"{file}: missing; a run writes its weights if its status is reached or budget_spent, but the "
            f"status of this run is {summary.get('status')}"
        )
    device = choose_device(config)
    torch.set_num_threads(config.threads)
    model = place(task.build_model(), config, device)
    steps = load_weights(file, model)
    line = next((line for line in reversed(run.read_metrics()) if line["steps"] == steps), None)
    recorded: dict[Split, Any] = {"validation": line}
    # The test split is evaluated only with the final weights, because no choice may depend on it.
    if task.has_test_split and weights == "final":
        recorded["test"] = summary.get("test")
    found = []
    for split, then in recorded.items():
        metrics = measure(task, model, split, device, choose_precision(config, device))
        found.append(Measured(split, metrics, then and {key: then[key] for key in metrics if key in then}))
    return found


def open_run(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, Config, Task]:
    """Open a run's folder, change its config by ``key=value`` overrides, and build its task."""
    run = RunFolder(path)
    plain = run.read_config()
    if plain is None:
        raise FolderError(f"{path}: contains no config.yaml; pass the folder of a run")
    config = _changed(plain, overrides)
    for key in ("split_seed", "validation_examples"):
        now = getattr(config.data, key)
        then = plain["data"].get(key, now)
        if then != now and config.data.validation_examples is not None:
            raise ConfigError(
                f"data.{key}={now}: the run may have trained on these examples, because it used "
                f"data.{key}={'null' if then is None else then}; remove this override"
            )
    task = build_task(config)
    check_same_meaning((run.read_summary() or {}).get("data") or {}, task.facts)
    return run, config, task


def _changed(plain: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Return the config of a run with overrides applied, and without callbacks."""
    wrong = [override for override in overrides if "=" not in override]
    if wrong:
        raise ConfigError(f"{wrong[0]}: expected key=value, such as data.path=FOLDER")
    try:
        merged: Any = OmegaConf.to_container(OmegaConf.merge(plain, OmegaConf.from_dotlist([*overrides])))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    return from_plain({**merged, "callbacks": []})


def load_weights(file: Path, model: nn.Module) -> int:
    """Load saved weights into a model, and return the step at which they were saved."""
    with safe_open(file, "pt") as opened:
        steps = int(opened.metadata()["steps"])
    try:
        model.load_state_dict(load_file(file))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise DataError(f"{file}: does not fit the model for this data ({reason})") from error
    return steps


def lines(found: Sequence[Measured]) -> list[str]:
    """Return a line for each metric, with its value and whether the run recorded the same value."""
    texts = []
    for split, metrics, recorded in found:
        for name, value in metrics.items():
            then = (recorded or {}).get(name)
            note = {None: "not recorded", value: "as recorded"}.get(then, f"recorded {then!r}")
            texts.append(f"{split} {name} {value!r} ({note})")
    return texts


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that takes a run's folder and overrides of the run's config."""
    formatter = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter)
    made.add_argument("run", type=Path, help="the run's folder")
    made.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="change the run's config")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``python -m adaecho.evaluate``."""
    command = parser("python -m adaecho.evaluate", __doc__)
    command.add_argument(
        "--weights", choices=("final", "best"), default="final", help="weights to measure (default: final)"
    )
    typed = command.parse_intermixed_args(arguments)
    with report_errors():
        for line in lines(evaluate(typed.run, typed.overrides, weights=typed.weights)):
            print_line(line)


if __name__ == "__main__":
    main()
