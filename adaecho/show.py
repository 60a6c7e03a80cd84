"""``python -m adaecho.show RUN``: what a run's model predicts, as a picture.

Detection shows true boxes beside predicted ones, classification its mistakes. The model is that of the run's
end, or, where it hasn't ended, of its last checkpoint; the images are the first of the validation split (the
first that it gets wrong). The picture is ``pictures/<task>.png`` in the run's folder, or what ``--out`` says.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaecho.config.schema import from_plain
from adaecho.datasets.storage import storage_errors
from adaecho.errors import FolderError, UserError, say, told, warn
from adaecho.evaluate import check_held_out, load_weights
from adaecho.records.folder import RunFolder
from adaecho.records.status import Status
from adaecho.records.trials import check_name
from adaecho.tasks import build_task
from adaecho.tasks.base import check_same_meaning
from adaecho.training import checkpoint
from adaecho.training.device import autocast, choose_device, choose_precision
from adaecho.training.optimizer import average_of


@storage_errors()
def show(path: Path, *, number: int = 8, out: Path | None = None, task: str | None = None) -> Path:
    """Draw what a run's model predicts; returns the file.

    Args:
        path: the run's folder.
        number: of images at most.
        out: the file; its suffix (png, jpg, svg, pdf) decides the format.
        task: the run's task, where it is a module of your own: a record can't name one by itself.

    Raises:
        UserError: the folder holds no run or no weights, its data is gone, its task has no pictures, or
            there is no mistake to show, or the file can't be written.
    """
    from adaecho.figures.pictures import grid  # needs the extra figures

    run = RunFolder(path)
    plain = run.read_config()
    if plain is None:
        raise FolderError(f"{path}: holds no config.yaml, so it is no run; name the folder of one")
    config = from_plain({**plain, "callbacks": []}, [] if task is None else [task])
    built = build_task(config)
    summary = run.read_summary() or {}
    check_same_meaning(summary.get("data") or {}, built.facts)
    check_held_out(plain, summary, config, built)
    if built.pictures is None:
        raise UserError(f"{path}: task {built.name} has no pictures to show")
    device = choose_device(config)
    model = _trained(run, built.build_model())
    model = model.to(device).eval()
    with torch.inference_mode(), autocast(device, choose_precision(config, device)):
        pictures = built.pictures(model, number, device)
    if not pictures:
        raise UserError(f"{path}: there is nothing to show: the model makes no mistake")
    out = out or path / "pictures" / f"{check_name('task', built.name)}.png"
    if out.is_symlink() or out.parent.is_symlink():  # in a folder received from others, to any file of yours
        raise FolderError(f"{out}: leads elsewhere by a symbolic link; remove it, or name a file with --out")
    try:
        grid([(picture.image, picture.title, picture.true, picture.predicted) for picture in pictures], out)
    except OSError as error:
        raise FolderError(
            f"{out}: can't be written ({error.strerror}); name another file with --out"
        ) from error
    return out


def _trained(run: RunFolder, model: nn.Module) -> nn.Module:
    """The model as the run evaluated it last."""
    weights = run.path / "model" / "final.safetensors"
    summary = run.read_summary() or {}
    if weights.is_file() and summary.get("status") in (Status.REACHED, Status.BUDGET_SPENT):
        load_weights(weights, model)
        return model
    saved = run.checkpoints()
    if not saved:
        raise FolderError(f"{run.path}: holds neither weights nor a checkpoint yet; run it again")
    path, state = _newest(run, saved)
    try:
        model.load_state_dict(state["model"])
        if state.get("average") is not None:  # what the run evaluates
            average = average_of(model, decay=0.0)
            average.load_state_dict(state["average"])
            return average.module
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FolderError(f"{path}: holds no weights of the model in config.yaml ({error})") from error
    return model


def _newest(run: RunFolder, saved: list[Path]) -> tuple[Path, dict[str, Any]]:
    """The last good checkpoint, and which it is; a damaged one gives way to the one before."""
    for path in saved[:-1]:
        try:
            return path, checkpoint.load(run, path)
        except FolderError as error:
            warn(f"{error}; showing an earlier one")
    return saved[-1], checkpoint.load(run, saved[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m adaecho.show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--number", type=int, default=8, help="images at most (8)")
    parser.add_argument("--out", type=Path, help="the file: .png, .jpg, .svg or .pdf")
    parser.add_argument("--task", help="the run's task, where it is a module of your own")
    typed = parser.parse_args(arguments)
    if typed.number < 1:
        parser.error(f"--number {typed.number}: must be at least 1")
    if typed.out is not None and typed.out.suffix not in (".png", ".jpg", ".svg", ".pdf"):
        parser.error(f"--out {typed.out}: must end in .png, .jpg, .svg or .pdf")
    with told():
        say(show(typed.run, number=typed.number, out=typed.out, task=typed.task))


if __name__ == "__main__":
    main()
