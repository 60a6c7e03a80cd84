"""``python -m adaecho.evaluate RUN``: the metrics of a run's saved weights, beside those it recorded.

The weights are those of the end, or with ``--weights best`` of the best evaluation, on every split that the
run was measured on. Keys of the config can follow the folder: ``data.path=FOLDER`` for data that has moved,
``task.validation_path=``, ``evaluate.batch_size=``, ``device=``, and ``task.name=MODULE`` where the task is a
module of your own, which a record can't name by itself. On the same machine a run's own data gives
the same numbers; another processor, ``threads`` or batch size rounds otherwise.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from yaml import YAMLError  # type: ignore[import-untyped]

from adaecho.config.schema import Config, from_plain
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ConfigError, DataError, FolderError, say, told, warn
from adaecho.records.files import folder_errors, record_errors
from adaecho.records.folder import RunFolder
from adaecho.tasks import build_task
from adaecho.tasks.base import HELD_OUT, Split, Task, check_same_meaning
from adaecho.training.device import choose_device, choose_precision, measure, place

WEIGHTS = ("final", "best")


class Measured(NamedTuple):
    """The metrics of one split.

    Attributes:
        split: "validation" or "test".
        metrics: of the saved weights.
        recorded: by the run, of these weights on this split: those of the metrics that it knew; None where
            it did not evaluate them.
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
    run = RunFolder(path)
    plain, summary = run.read_config(), run.read_summary()
    if plain is None or summary is None:
        raise FolderError(f"{path}: holds no run (config.yaml and summary.json); name the folder of one")
    config = _changed(plain, overrides)
    file = path / "model" / f"{weights}.safetensors"
    if not file.is_file():
        raise FolderError(
            f"{file}: is missing; a run writes its weights when it ends by itself (reached or budget_spent), "
            f"and this one's status is {summary['status']}"
        )
    task = build_task(config)
    check_same_meaning(summary.get("data") or {}, task.facts)
    check_held_out(plain, summary, config, task)
    _check_size(file, task)
    device = choose_device(config)
    torch.set_num_threads(config.threads)
    model = place(task.build_model(), config, device)
    steps = load_weights(file, model)
    if weights == "final" and steps != summary["steps"]:
        warn(f"{file}: is of an earlier end, at step {steps}; the run has gone on to {summary['steps']}")
    precision = choose_precision(config, device)
    # The test split is read once, with the weights of the end: for no choice, and so not for the best.
    splits: list[Split] = ["validation"]
    if task.has_test_split and weights == "final":
        splits.append("test")
    found = []
    for split in splits:
        metrics = measure(task, model, split, device, precision)
        with record_errors(path):
            recorded = _recorded(run, summary, steps, split)
            same = recorded and {name: recorded[name] for name in metrics if name in recorded}
            found.append(Measured(split, metrics, same))
    return found


def _changed(plain: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The run's config with what was typed; a sweep's, a tracker's and callbacks' parts play no role here."""
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override}: is no key=value, such as data.path=FOLDER")
    try:
        merged = OmegaConf.merge(OmegaConf.create(plain), OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    tasks = [
        override.removeprefix("task.name=") for override in overrides if override.startswith("task.name=")
    ]
    changed: Any = OmegaConf.to_container(merged)
    return from_plain({**changed, "callbacks": []}, tasks)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with folder_errors(file), safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FolderError(
            f"{file}: is damaged ({error}); restore it, or run again with fresh=true"
        ) from error


def check_held_out(plain: dict[str, Any], summary: dict[str, Any], config: Config, task: Task) -> None:
    """Raises UserError where held-out examples may be among those that the run was trained on."""
    then, now = plain.get("data") or {}, vars(config.data)
    recorded = (summary.get("data") or {}).get(HELD_OUT)
    is_other = bool(recorded) and recorded != task.facts.get(HELD_OUT)
    if now["validation_examples"] is None:  # a split of its own
        if is_other:
            warn("data.path: its validation split is not that of the run, which may have been trained on it")
        return
    for key in ("split_seed", "validation_examples"):
        if then.get(key, now[key]) != now[key]:
            raise ConfigError(
                f"data.{key}={now[key]}: the run may have been trained on these, as it held out others "
                f"(data.{key}={'null' if then[key] is None else then[key]}); leave it out"
            )
    if is_other:
        raise DataError(
            "data.path: other examples are held out of it than in the run (some were added, removed, renamed "
            "or changed), and the run may have been trained on them; name that data, or, with "
            "data.validation_examples=null, data that has a validation split"
        )


def _check_size(file: Path, task: Task) -> None:
    """Raises DataError where the model is larger than its weights, before any memory is taken for it."""
    with _opened(file) as opened:
        saved = sum(math.prod(part.get_shape()) for part in map(opened.get_slice, opened.keys()))
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in task.build_model().parameters())
    except RuntimeError:  # SSD computes its boxes as it is built; its size does not hang on options
        return
    if parameters > saved:
        raise DataError(f"{file}: doesn't fit the model for this data ({saved:,} numbers for {parameters:,})")


def load_weights(file: Path, model: nn.Module) -> int:
    """Load the weights; after how many steps they were saved."""
    try:
        with _opened(file) as opened:
            steps = int(opened.metadata()["steps"])
            model.load_state_dict(load_file(file))
    except RuntimeError as error:  # of another number of classes, say
        raise DataError(
            f"{file}: doesn't fit the model for this data ({str(error).splitlines()[-1].strip()})"
        ) from error
    return steps


def _recorded(run: RunFolder, summary: dict[str, Any], steps: int, split: Split) -> dict[str, float] | None:
    """What the run wrote down of the weights after so many steps."""
    if split == "test":
        return summary.get("test")
    return next((line for line in reversed(run.read_metrics()) if line["steps"] == steps), None)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m adaecho.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the run's config")
    parser.add_argument("--weights", choices=WEIGHTS, default="final", help="which of the run's (final)")
    typed = parser.parse_intermixed_args(arguments)
    with told():
        for line in lines(evaluate(typed.run, typed.overrides, weights=typed.weights)):
            say(line)


if __name__ == "__main__":
    main()
